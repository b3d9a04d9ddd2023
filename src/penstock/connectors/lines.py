"""Bytes of text formats to rows: lines, CSV records and JSON lines, and the ones that are no rows.

A piece of a file begins where a record begins. Each record becomes one row or one failure, and which of the two it
becomes depends on the record alone, never on its neighbours or on the piece that it is read in.

CSV follows RFC 4180: a quoted field may hold separators, doubled quotes and line breaks. Where a record ends is what
Python's csv module says: a quote opens a field only at the field's first byte, and a line break ends the record only
outside an open field. A record with a quote in any other place is a failure, and so is one with a lone carriage return.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
import polars as pl
import pyarrow as pa

from penstock.connectors.rows import parse_strings, salvage

RECORD_BYTES_MAX: Final = 16 << 20
"""A longer record is a failure: one row of this size would fill the memory of everything behind it."""

BLOCK_BYTES: Final = 1 << 20
"""Bytes in which the ends of CSV records are looked for at a time."""

BOM: Final = b"\xef\xbb\xbf"

Failure = tuple[int, str, bytes | str]
"""Byte offset, reason, raw record."""

Positions = np.ndarray[Any, np.dtype[np.int64]]

_NEWLINE, _RETURN, _QUOTE = 10, 13, 34


# ---------------------------------------------------------------- where CSV records end


def record_ends(data: bytes, separator: str) -> Positions:
    """The positions after each CSV record of ``data`` that ends with a line break. ``data`` begins with a record."""
    if b'"' not in data:
        return np.flatnonzero(np.frombuffer(data, np.uint8) == _NEWLINE) + 1
    found: list[Positions] = []
    start, size = 0, BLOCK_BYTES
    while start < len(data):
        block = data[start : start + size]
        ends = _block_ends(block, separator)
        if len(ends):
            found.append(ends + start)
            start, size = start + int(ends[-1]), BLOCK_BYTES
        elif start + size >= len(data):
            break
        else:
            size *= 4  # a record that is longer than the block
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _block_ends(block: bytes, separator: str) -> Positions:
    letters = np.frombuffer(block, np.uint8)
    breaks = np.flatnonzero(letters == _NEWLINE)
    quotes = np.flatnonzero(letters == _QUOTE)
    if not len(quotes):
        return breaks + 1
    if not _is_regular(letters, quotes, ord(separator)):
        return _ends_one_by_one(block, separator.encode())
    # Every quote opens or closes: after an even number of quotes, a line break is outside of a field.
    return breaks[np.searchsorted(quotes, breaks) % 2 == 0] + 1


def _is_regular(letters: np.ndarray[Any, Any], quotes: Positions, separator: int) -> bool:
    """True when quotes stand only where RFC 4180 has them, so that counting them is enough."""
    padded = np.concatenate(([_NEWLINE], letters, [_NEWLINE, _NEWLINE])).astype(np.uint8)
    before = padded[quotes[0::2]]
    if not ((before == separator) | (before == _NEWLINE) | (before == _QUOTE)).all():
        return False
    after = padded[quotes[1::2] + 2]
    closed = (after == separator) | (after == _NEWLINE) | (after == _QUOTE)
    if closed.all():
        return True
    returns = after == _RETURN
    return bool((closed | (returns & (padded[quotes[1::2] + 3] == _NEWLINE))).all())


def _ends_one_by_one(block: bytes, separator: bytes) -> Positions:
    """The same by walking from field to field, for blocks with misplaced quotes."""
    stop = re.compile(b"[" + re.escape(separator) + b"\n]")
    ends: list[int] = []
    at = 0
    while at < len(block):
        if block[at] == _QUOTE:
            at += 1
            while True:
                quote = block.find(b'"', at)
                if quote < 0:
                    return np.array(ends, np.int64)
                at = quote + 1
                if block[at : at + 1] != b'"':
                    break
                at += 1
        match = stop.search(block, at)
        if match is None:
            break
        at = match.end()
        if match[0] == b"\n":
            ends.append(at)
    return np.array(ends, np.int64)


class CsvCuts:
    """Where one CSV file may be cut. Only a scan from the last known cut tells; each byte is scanned about once."""

    def __init__(self, read: Callable[[int, int], bytes], separator: str) -> None:
        self._read = read
        self._separator = separator
        self._known = [0]
        """Positions at which records begin, ascending, about one for each block."""

    def know(self, position: int) -> None:
        """A record begins here: the log says so."""
        place = bisect_left(self._known, position)
        if self._known[place : place + 1] != [position]:
            insort(self._known, position)

    def first_from(self, wanted: int, limit: int) -> int:
        """The first beginning of a record at or after ``wanted``, or ``limit``."""
        at, size = self._known[bisect_right(self._known, wanted) - 1], BLOCK_BYTES
        while at < wanted:
            if at >= limit:
                return limit
            block = self._read(at, min(at + size, limit))
            skipped = len(BOM) if at == 0 and block.startswith(BOM) else 0
            ends = record_ends(block[skipped:], self._separator) + skipped
            if len(ends):
                place = int(np.searchsorted(ends, wanted - at))
                at += int(ends[min(place, len(ends) - 1)])
                self.know(at)
                size = BLOCK_BYTES
            elif at + size >= limit:
                return limit
            else:
                size *= 4
        return min(at, limit)


# ---------------------------------------------------------------- lines


class Lines:
    """The lines, or CSV records, of a piece of a file, without their ends, as a polars Series. Those that are too long
    or not UTF-8 are in ``failed``.

    The Arrow offsets are the positions of the line ends, so the text is never touched line by line.
    """

    def __init__(self, data: bytes, base: int, ends: Positions | None = None) -> None:
        """``base`` is the place of ``data`` in its file, ``ends`` are the ends of records if these are not lines."""
        self.data = data
        self.failed: list[Failure] = []
        if ends is None:
            ends = np.flatnonzero(np.frombuffer(data, np.uint8) == _NEWLINE) + 1
        last = int(ends[-1]) if len(ends) else 0
        tail = [len(data)] if last < len(data) else []
        bounds = np.concatenate(([0], ends, tail)).astype(np.int64)
        self.starts = bounds[:-1] + base
        """Byte offset in the file of each line."""
        if not _is_utf8(data) or (len(bounds) > 1 and np.diff(bounds).max() > RECORD_BYTES_MAX):
            bounds = self._drop_unfit(bounds, base)
        self.whole = not self.failed
        """True when ``data`` is exactly these lines."""
        array = pa.LargeStringArray.from_buffers(len(bounds) - 1, pa.py_buffer(bounds), pa.py_buffer(self.data))
        text = pl.Series("line", array, dtype=pl.String).str.strip_suffix("\n")
        self.text = text.str.strip_suffix("\r") if b"\r" in self.data else text

    def _drop_unfit(self, bounds: Positions, base: int) -> Positions:
        good: list[bytes] = []
        keep: list[int] = []
        for i, (first, last) in enumerate(pairwise(bounds.tolist())):
            line = self.data[first:last]
            if last - first > RECORD_BYTES_MAX:
                self.failed.append((first + base, f"a record of more than {RECORD_BYTES_MAX} bytes", line[:4096]))
                continue
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                self.failed.append((first + base, f"not UTF-8 (byte {error.start} of the line)", line.rstrip(b"\r\n")))
            else:
                good.append(line)
                keep.append(i)
        self.starts = self.starts[keep]
        self.data = b"".join(good)
        return np.concatenate(([0], np.cumsum([len(line) for line in good]))).astype(np.int64)

    def select(self, mask: pl.Series) -> None:
        """Keep some of the lines."""
        self.text = self.text.filter(mask)
        self.starts = self.starts[mask.to_numpy()]
        self.whole = False

    def reject(self, wrong: pl.Series, reason: str) -> None:
        """Make failures of some of the lines."""
        rows = wrong.arg_true().to_list()
        if rows:
            self.failed += [(int(self.starts[row]), reason, self.text[row]) for row in rows]
            self.select(~wrong)

    def leave_out(self, positions: Sequence[int], reason: str) -> None:
        """Make failures of the lines that hold these bytes of the file."""
        if positions and len(self.starts):
            rows = np.searchsorted(self.starts, np.array(positions, np.int64), side="right") - 1
            self.reject(pl.Series(np.isin(np.arange(len(self.starts)), rows)), reason)

    def drop_blank(self) -> None:
        filled = self.text.str.strip_chars().str.len_bytes() > 0
        if not filled.all():
            self.select(filled)

    def drop_empty(self) -> None:
        filled = self.text.str.len_bytes() > 0
        if not filled.all():
            self.select(filled)

    def joined(self) -> bytes:
        if self.whole:
            return self.data
        return "\n".join(self.text.to_list()).encode()


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


# ---------------------------------------------------------------- CSV


def csv_strings(
    lines: Lines, columns: Sequence[str], wanted: Sequence[str], separator: str
) -> tuple[pl.DataFrame, list[Failure]]:
    """Fields as strings. A record is checked for its shape first, so that the parser proper meets only good ones."""
    lines.drop_empty()
    # polars would drop the mark from the first record of a piece, and only from that one.
    lines.reject(lines.text.str.starts_with("\ufeff"), "a byte order mark in the midst of a file")
    failed: list[Failure] = []
    text = lines.text
    if not len(text):
        return pl.DataFrame(schema=dict.fromkeys(wanted, pl.String)), failed
    fields = text.str.count_matches(separator, literal=True)
    quoted = text.str.contains('"', literal=True)
    returns = text.str.contains("\r", literal=True)
    well_formed = pl.Series([True]).new_from_index(0, len(text))
    if quoted.any():
        sep = pl.escape_regex(separator)
        field = rf'(?:"(?:[^"]|"")*"|[^"{sep}]*)'
        well_formed = ~quoted | text.str.contains(rf"^{field}(?:{sep}{field})*$")
        outside = text.str.replace_all(r'"(?:[^"]|"")*"', "")
        bare = outside.str.count_matches(separator, literal=True)
        fields = pl.select(pl.when(quoted).then(bare).otherwise(fields)).to_series()
        returns &= outside.str.contains("\r", literal=True)
    good = well_formed & (fields == len(columns) - 1) & ~returns
    if not good.all():
        for row in (~good).arg_true().to_list():
            if not well_formed[row]:
                reason = "misplaced quotes"
            elif returns[row]:
                reason = "a carriage return outside quotes that ends no line"
            else:
                reason = f"{fields[row] + 1} fields, expected {len(columns)}"
            failed.append((int(lines.starts[row]), reason, text[row]))
        lines.select(good)
    if not len(lines.text):
        return pl.DataFrame(schema=dict.fromkeys(wanted, pl.String)), failed
    frame = pl.read_csv(
        lines.joined(),
        has_header=False,
        schema=dict.fromkeys(columns, pl.String),
        columns=[i for i, name in enumerate(columns) if name in wanted],
        separator=separator,
    )
    assert frame.height == len(lines.text), "a well-formed record is one row"
    return frame.select(wanted), failed


def read_csv(
    lines: Lines, columns: Sequence[str], schema: pl.Schema, separator: str
) -> tuple[pl.DataFrame, list[Failure]]:
    frame, failed = csv_strings(lines, columns, list(schema), separator)
    parsed, misfits = parse_strings(frame, schema)
    failed = lines.failed + failed + [(int(lines.starts[row]), reason, lines.text[row]) for row, reason in misfits]
    return parsed, sorted(failed, key=lambda f: f[0])


# ---------------------------------------------------------------- JSON lines

_SMALL_INTEGERS = (pl.Int8, pl.Int16, pl.UInt8, pl.UInt16)

_SURROGATE: Final = r"\\u[dD][89a-fA-F]"


def _raw_type(dtype: pl.DataType) -> pl.DataType:
    """The type that polars' JSON reader is asked for. Dates and times are strings in JSON, as in CSV."""
    if dtype.is_temporal():
        return pl.String()
    if isinstance(dtype, _SMALL_INTEGERS):
        return pl.Int64()  # the reader panics for these
    return pl.Float64() if isinstance(dtype, pl.Float32) else dtype


def read_jsonl(lines: Lines, schema: pl.Schema) -> tuple[pl.DataFrame, list[Failure]]:
    raw_schema = pl.Schema({n: _raw_type(t) for n, t in schema.items()})
    lines.drop_blank()
    surrogates = lines.text.str.contains(_SURROGATE)
    if surrogates.any():
        halves = [bool(found and _has_half_pair(text)) for found, text in zip(surrogates, lines.text, strict=True)]
        lines.reject(pl.Series(halves, dtype=pl.Boolean), "half of a surrogate pair, which is no character")
    failed = list(lines.failed)
    starts, text = lines.starts, lines.text

    def parse(data: bytes) -> pl.DataFrame:
        return pl.read_ndjson(data, schema=raw_schema).select(list(raw_schema))

    try:
        frame = parse(lines.joined()) if len(text) else pl.DataFrame(schema=raw_schema)
        if frame.height != len(text):
            raise ValueError("some lines are not one row")
    except Exception:
        items = text.to_list()
        frame, kept, bad = salvage(items, lambda part: parse("\n".join(part).encode()), raw_schema)
        failed += [(int(starts[i]), _json_reason(reason, items[i]), items[i]) for i, reason in bad]
        starts, text = starts[kept], text.gather(kept)
    frame, misfits = _narrow(frame, schema)
    parsed, unparsed = parse_strings(frame, schema)
    for row, reason in unparsed:
        misfits.setdefault(row, reason)
    if misfits and parsed.height + len(misfits) != frame.height:
        keep = pl.Series([True]).new_from_index(0, frame.height).scatter(sorted(misfits), False)
        parsed, _ = parse_strings(frame.filter(keep), schema)
    failed += [(int(starts[row]), reason, text[row]) for row, reason in misfits.items()]
    return parsed, sorted(failed, key=lambda f: f[0])


def _narrow(frame: pl.DataFrame, schema: pl.Schema) -> tuple[pl.DataFrame, dict[int, str]]:
    """Numbers to the narrower types of the schema; ``{row number: reason}`` for the rows whose number is too large."""
    misfits: dict[int, str] = {}
    columns = []
    for name, dtype in schema.items():
        wide = frame.get_column(name)
        if wide.dtype == dtype or dtype.is_temporal():
            columns.append(wide)
            continue
        narrow = wide.cast(dtype, strict=False)
        lost = narrow.is_null() & wide.is_not_null()
        if dtype.is_float():
            lost |= (narrow.is_infinite() & ~wide.is_infinite()).fill_null(False)
        for row in lost.arg_true().to_list():
            misfits.setdefault(row, f"column {name!r}: {wide[row]!r} is not a {dtype}")
        columns.append(narrow)
    return pl.DataFrame(columns), misfits


def _has_half_pair(text: str) -> bool:
    """polars reads half of a surrogate pair as a NUL, which nobody wrote."""
    try:
        json.dumps(json.loads(text), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    except (ValueError, RecursionError):
        return False  # no JSON at all, which the reader says
    return False


def _json_reason(reason: str, text: str) -> str:
    """Why a line is no row, in words that do not change with the parser."""
    if "DepthLimitExceeded" in reason:
        return "nested too deep"
    if "expected to contain JSON object" in reason:
        return "not a JSON object"
    if reason.startswith("error parsing line"):
        try:
            json.loads(text)
        except ValueError as error:
            said = f"{error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else str(error)
            return f"not JSON: {said}"
        except RecursionError:
            return "nested too deep"
        return "not JSON: a value that JSON does not have, or a number that is too large"
    return reason


# ---------------------------------------------------------------- inference


def infer_jsonl(head: bytes) -> dict[str, pl.DataType]:
    good = []
    for line in head.splitlines():
        try:
            if isinstance(json.loads(line), dict):
                good.append(line)
        except (ValueError, RecursionError):
            continue
    if not good:
        return {}
    frame = pl.read_ndjson(b"\n".join(good), infer_schema_length=None)
    return {n: pl.String() if isinstance(t, pl.Null) else t for n, t in frame.schema.items()}


def infer_strings(text: pl.Series) -> pl.DataType:
    """The first type all strings parse to. Tried with our own parser, so that inference and reading cannot disagree."""
    if text.null_count() == len(text):
        return pl.String()
    for dtype in (pl.Int64(), pl.Float64(), pl.Boolean(), pl.Date(), pl.Datetime("us")):
        if not parse_strings(text.to_frame(), pl.Schema({text.name: dtype}))[1]:
            return dtype
    return pl.String()
