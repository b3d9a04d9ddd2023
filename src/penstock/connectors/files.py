"""Files as a source: text, CSV, JSON lines and Parquet, from a local disk or any fsspec address, finished or still
growing.

Files are the most replayable input there is, as long as they do not change. So a file is taken as **immutable once
visible**: its size is noted in the *catalogue* when it is met, and a file that is gone or has another size later is
an error, never a quietly different answer. Writers should write under a name that is ignored (``_x``, ``.x``,
``x.tmp``) and rename.

Offsets are ``{"file": index in the catalogue, "at": position in it}``. Positions in Parquet are row numbers; in line
formats they are byte offsets at the start of a line, so a worker seeks straight to its share. A gzip file cannot be
entered in the middle and is one unit. The catalogue must be the same after a restart or indices would mean other files;
which facts a range must log follows from its offsets alone:

* ``follow=True``: the files this range is the first to enter. Files that no range has reached may be found in another
  order after a restart, which nobody can notice.
* ``follow=False``: the whole list, with the first range.

What is out of scope: quoted line breaks in CSV (a line is a record, so that a file can be cut anywhere), and Parquet
files whose schema drifts.
"""

from __future__ import annotations

import csv as python_csv
import glob
import gzip
import json
import os
import time
import zlib
from bisect import bisect_left
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.connectors.base import BadRecord, Json, Offset, ReadResult, Source, SourceContext, SourceRange, Split
from penstock.connectors.rows import SchemaSpec, clip, parsable, parse_strings, polars_schema, salvage
from penstock.errors import FlowError, SourceError

SAMPLE_BYTES = 64 * 1024
"""Read to estimate the length of a line, to find a line's end, or to infer a schema (four times as much)."""

RANGE_FILES_MAX = 4096
"""A range stops after so many files, however small they are: its splits are shipped to workers."""

LOOKING_SHARE = 0.1
"""Of the time may go into listing a store for new files: each time is a request, which the store may charge for."""

GZIP_RATIO = 4
"""What a gzip byte weighs against a plain one when work is balanced."""

_FORMATS = {
    ".txt": "text",
    ".text": "text",
    ".log": "text",
    ".csv": "csv",
    ".tsv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
}
_BOM = b"\xef\xbb\xbf"


def files(
    pattern: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    format: str | None = None,
    schema: SchemaSpec | None = None,
    follow: bool = False,
    path: bool = False,
    header: bool = True,
    separator: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> FileSource:
    """Read files: a path, a glob, a directory (everything below it), several of them, or fsspec addresses of these.

    ``format`` is ``text`` (one column, ``line``), ``csv``, ``jsonl`` or ``parquet``; left out, the file extension
    says it. ``.gz`` is unpacked. ``schema`` maps columns to types (``{"word": str, "n": pl.Int32}``); left out, it is
    taken from the first file and then stays. ``follow=True`` waits for new files for ever; otherwise the files are
    listed once and the source ends. ``path=True`` adds the column ``path``. ``header`` and ``separator`` are for CSV.

    Lines that do not fit the schema become dead letters and never stop the job: a wrong number of fields, values of
    another type, JSON that is not an object, text that is not UTF-8. An absent JSON key and an empty CSV field are
    null; JSON keys and CSV columns that the schema does not name are ignored, as are empty lines. A JSON number in a
    ``str`` column is kept as its text.
    """
    return FileSource(
        pattern,
        format=format,
        schema=schema,
        follow=follow,
        path=path,
        header=header,
        separator=separator,
        storage_options=storage_options,
    )


@dataclass(frozen=True)
class _File:
    path: str
    size: int


@dataclass(frozen=True)
class _Meta:
    """What planning needs to know of a file. ``units`` are its positions: bytes, or rows of Parquet."""

    units: int
    rows: float
    whole: bool = False
    columns: tuple[str, ...] | None = None

    @property
    def weight(self) -> int:
        return self.units * GZIP_RATIO if self.whole else self.units


class FileSource(Source):
    """See :func:`files`."""

    def __init__(
        self,
        pattern: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        format: str | None,
        schema: SchemaSpec | None,
        follow: bool,
        path: bool,
        header: bool,
        separator: str | None,
        storage_options: Mapping[str, Any] | None,
    ) -> None:
        patterns = [pattern] if isinstance(pattern, str | os.PathLike) else list(pattern)
        if not patterns:
            raise FlowError("files() got an empty list of paths.", remedy="Name at least one path, glob or directory.")
        self.patterns = tuple(_absolute(os.fspath(p)) for p in patterns)
        self.follow = follow
        self._storage = Storage(dict(storage_options or {}))
        self._path_column = path
        self._header = header
        self.format = _check_format(format) if format else self._guess_format()
        self._separator = separator or ("\t" if self.patterns[0].removesuffix(".gz").endswith(".tsv") else ",")
        if self.format == "csv" and (len(self._separator.encode()) != 1 or self._separator in '"\r\n'):
            raise FlowError(
                f"{self._separator!r} cannot separate CSV fields.",
                remedy='Give one ASCII character, such as separator=";".',
            )
        self._declared = polars_schema(schema) if schema is not None else None
        self._data_schema: pl.Schema | None = None
        self._reset()
        if self._declared is not None:
            self._check_declared(self._declared)

    def _reset(self) -> None:
        self._files: list[_File] = []
        self._index: dict[str, int] = {}
        self._listed = False
        self._look_again_s = float("-inf")
        self._metas: dict[int, _Meta] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Workers need no catalogue: their splits say everything, and a closure should stay small."""
        self._rows_schema()
        return {**self.__dict__, "_files": [], "_index": {}, "_metas": {}, "_listed": False}

    # ------------------------------------------------------------ schema

    def schema(self) -> pl.Schema:
        columns = dict(self._rows_schema())
        if self._path_column:
            columns["path"] = pl.String()
        return pl.Schema(columns)

    def _rows_schema(self) -> pl.Schema:
        if self._data_schema is None:
            if self.format == "text":
                self._data_schema = pl.Schema({"line": pl.String()})
            else:
                self._data_schema = self._declared or self._infer_schema()
                if self._path_column and "path" in self._data_schema:
                    raise FlowError(
                        f"{self.describe()} has a column 'path' of its own.",
                        remedy="Leave out path=True, or rename the column.",
                    )
        return self._data_schema

    def _check_declared(self, schema: pl.Schema) -> None:
        if self.format == "text" and schema != pl.Schema({"line": pl.String()}):
            raise FlowError(
                "Text files have one column, 'line', of strings.",
                remedy="Leave out schema=, or give format='csv' or 'jsonl'.",
            )
        if self.format == "csv":
            for name, dtype in schema.items():
                if not parsable(dtype):
                    raise FlowError(
                        f"Column {name!r}: a CSV field cannot be a {dtype}.", remedy="Declare it as str and convert it."
                    )

    def _infer_schema(self) -> pl.Schema:
        for file in self._list():
            if file.size == 0:
                continue
            if self.format == "parquet":
                return _parquet_schema(self._storage, file.path)
            inferred = self._infer_lines(file)
            if inferred:
                return pl.Schema(inferred)
        raise SourceError(
            f"No file matches {self._patterns_text()} yet, so its columns are unknown.",
            remedy='Give them, for example schema={"word": str, "n": int}.',
            pattern=self._patterns_text(),
        )

    def _infer_lines(self, file: _File) -> dict[str, pl.DataType]:
        head = self._head(file.path, 4 * SAMPLE_BYTES)
        if self.format == "jsonl":
            return _infer_jsonl(head)
        columns = self._csv_columns(file.path, head)
        if self._header:
            head = head.partition(b"\n")[2]
        lines = Lines(head, 0)
        frame, _ = _csv_strings(lines, columns, columns, self._separator)
        return {name: _infer_strings(frame.get_column(name)) for name in columns}

    def _guess_format(self) -> str:
        for name in (*self.patterns, *(f.path for f in self._list())):
            stem = name.lower().removesuffix(".gz")
            extension = os.path.splitext(stem)[1]
            if extension in _FORMATS:
                return _FORMATS[extension]
        raise FlowError(
            f"The format of {self._patterns_text()} cannot be told from its name.",
            remedy="Give format='text', 'csv', 'jsonl' or 'parquet'.",
        )

    # ------------------------------------------------------------ the catalogue

    def _patterns_text(self) -> str:
        return ", ".join(self.patterns)

    def _list(self, known: Container[str] = ()) -> list[_File]:
        found: dict[str, _File] = {}
        for pattern in self.patterns:
            for file in self._storage.list(pattern, known):
                found[file.path] = file
        return [found[path] for path in sorted(found)]

    def _discover(self) -> bool:
        """Add files not yet in the catalogue, by name. True when there were any."""
        began = time.monotonic()
        if began < self._look_again_s:
            return False
        before = len(self._files)
        for file in self._list(self._index):
            self._index[file.path] = len(self._files)
            self._files.append(file)
        self._listed = True
        if not all(is_local(pattern) for pattern in self.patterns):
            done = time.monotonic()
            self._look_again_s = done + (done - began) * (1 / LOOKING_SHARE - 1)
        return len(self._files) > before

    def _ensure_listed(self) -> None:
        if self._listed:
            return
        self._discover()
        if not self._files and not self.follow:
            raise SourceError(
                f"No file matches {self._patterns_text()}.",
                remedy="Check the path; or give follow=True to wait for files to come.",
                pattern=self._patterns_text(),
            )

    def _file(self, index: int) -> _File:
        if index >= len(self._files):
            raise SourceError(
                f"The log speaks of file {index} of {self._patterns_text()}, but only {len(self._files)} are known.",
                remedy="The checkpoint belongs to another input; start with a new checkpoint directory.",
            )
        return self._files[index]

    def _meta(self, index: int) -> _Meta:
        meta = self._metas.get(index)
        if meta is None:
            meta = self._metas[index] = self._examine(self._file(index))
        return meta

    def _examine(self, file: _File) -> _Meta:
        if self.format == "parquet":
            return self._examine_parquet(file)
        if file.size == 0:
            return _Meta(units=0, rows=0.0)
        head = self._head(file.path, SAMPLE_BYTES)
        columns = self._csv_columns(file.path, head) if self.format == "csv" else None
        lines = head.count(b"\n") + (not head.endswith(b"\n"))
        line_bytes = max(1.0, len(head) / max(1, lines))
        whole = file.path.endswith(".gz")
        size = file.size * GZIP_RATIO if whole else file.size
        return _Meta(units=file.size, rows=max(1.0, size / line_bytes), whole=whole, columns=columns)

    def _examine_parquet(self, file: _File) -> _Meta:
        self._storage.check(file.path, file.size)
        expected, actual = self._rows_schema(), _parquet_schema(self._storage, file.path)
        for name, dtype in expected.items():
            if name not in actual:
                raise SourceError(
                    f"{file.path} has no column {name!r} (expected a {dtype}).",
                    remedy="Take the file away, or declare only the columns all files have: schema={...}.",
                    path=file.path,
                    column=name,
                )
            if actual[name] != dtype:
                raise SourceError(
                    f"{file.path}: column {name!r} is a {actual[name]}, not a {dtype}.",
                    remedy="Rewrite the file with the right type, or take it away.",
                    path=file.path,
                    column=name,
                )
        rows = parquet_rows(self._storage, file.path)
        return _Meta(units=rows, rows=float(rows))

    def _head(self, path: str, size: int) -> bytes:
        """The first bytes of a file, unpacked, cut after a line end if there is one."""
        if path.endswith(".gz"):
            with self._storage.guard(path), self._storage.open(path) as raw, gzip.GzipFile(fileobj=raw) as unpacked:
                head: bytes = unpacked.read(size)
        else:
            head = self._storage.read(path, 0, size)
        end = head.rfind(b"\n") + 1
        return head[:end].removeprefix(_BOM) if end and len(head) == size else head.removeprefix(_BOM)

    def _csv_columns(self, path: str, head: bytes) -> tuple[str, ...]:
        first = head.partition(b"\n")[0].decode("utf-8", errors="replace").rstrip("\r")
        names = next(python_csv.reader([first], delimiter=self._separator), [])
        declared = self._declared or self._data_schema
        if not self._header:
            return tuple(declared) if declared else tuple(f"column_{i + 1}" for i in range(len(names)))
        names = [name.strip() for name in names]
        if len(set(names)) != len(names):
            raise SourceError(
                f"{path}: the header names a column twice: {first[:200]}",
                remedy="Correct the header, or give header=False and a schema.",
                path=path,
            )
        for name in declared or ():
            if name not in names:
                raise SourceError(
                    f"{path}: the header has no column {name!r}; it reads: {first[:200]}",
                    remedy="Correct the file or the schema; if the file has no header, give header=False.",
                    path=path,
                    column=name,
                )
        return tuple(names)

    # ------------------------------------------------------------ driver side

    def open(self, context: SourceContext) -> None:
        self._reset()
        self._rows_schema()

    def remember(self, facts: Sequence[Json]) -> None:
        for fact in facts:
            if fact["i"] < len(self._files):
                continue  # the same range was logged again
            assert fact["i"] == len(self._files), "facts come in order and without gaps"
            self._index[fact["path"]] = len(self._files)
            self._files.append(_File(fact["path"], fact["size"]))
        if facts and not self.follow:
            self._listed = True

    def initial_offset(self) -> Offset:
        return {"file": 0, "at": 0}

    def exhausted(self, offset: Offset) -> bool:
        if self.follow:
            return False
        self._ensure_listed()
        return all(self._meta(i).units == 0 for i in range(offset["file"], len(self._files)))

    def plan(self, start: Offset, rows_max: int) -> SourceRange | None:
        self._ensure_listed()
        index, at = start["file"], start["at"]
        end: Offset | None = None
        rows, files_taken, looked = 0.0, 0, not self.follow
        while rows < rows_max and files_taken < RANGE_FILES_MAX:
            if index >= len(self._files):
                # Listing a big directory takes time: only when what is known does not fill the range.
                if looked or not self._discover():
                    break
                looked = True
                continue
            meta = self._meta(index)
            rest = meta.rows * (1 - at / meta.units) if meta.units else 0.0
            if rest > rows_max - rows and not (meta.whole and end is None):
                if not meta.whole:
                    wanted = at + max(1, int((rows_max - rows) * meta.units / meta.rows))
                    at = self._align(index, wanted, meta.units)
                    index, at = (index + 1, 0) if at >= meta.units else (index, at)
                    end, rows = {"file": index, "at": at}, float(rows_max)
                break
            index, at, rows, files_taken = index + 1, 0, rows + rest, files_taken + 1
            if meta.units:
                end = {"file": index, "at": 0}
        if end is None:
            return None
        return SourceRange(dict(start), end, max(1, round(rows)), self._facts(start, end))

    def _facts(self, start: Offset, end: Offset) -> tuple[Json, ...]:
        if self.follow:
            first = start["file"] + (start["at"] > 0)
            last = end["file"] + (end["at"] > 0)
        else:
            first, last = (0, len(self._files)) if start == self.initial_offset() else (0, 0)
        facts = []
        for i in range(first, last):
            fact: dict[str, Json] = {"i": i, "path": self._files[i].path, "size": self._files[i].size}
            if self.format == "parquet" and i in self._metas:
                fact["rows"] = self._metas[i].units
            facts.append(fact)
        return tuple(facts)

    def _align(self, index: int, position: int, limit: int) -> int:
        """The first place a file may be cut at or after ``position``."""
        if self.format == "parquet" or position >= limit:
            return min(position, limit)
        file, at = self._file(index), max(position - 1, 0)
        while at < limit:
            chunk = self._storage.read(file.path, at, min(at + SAMPLE_BYTES, limit))
            if not chunk:
                break
            found = chunk.find(b"\n")
            if found >= 0:
                return min(at + found + 1, limit)
            at += len(chunk)
        return limit

    def splits(self, start: Offset, end: Offset, parallelism: int) -> list[Split]:
        pieces: list[tuple[int, int, int]] = []
        for i in range(start["file"], end["file"] + (end["at"] > 0)):
            first = start["at"] if i == start["file"] else 0
            last = end["at"] if i == end["file"] else self._meta(i).units
            if last > first:
                pieces.append((i, first, last))
        groups = self._cut(pieces, parallelism)
        return [{"pieces": [self._piece(*p) for p in group]} for group in groups]

    def _cut(self, pieces: list[tuple[int, int, int]], parallelism: int) -> list[list[tuple[int, int, int]]]:
        """Share out pieces in order: a cut at every 1/parallelism of the weight, moved to where the file allows one."""
        weights = [self._meta(i).weight if self._meta(i).whole else b - a for i, a, b in pieces]
        total = sum(weights)
        targets = [total * k / parallelism for k in range(1, parallelism)]
        groups: list[list[tuple[int, int, int]]] = [[]]
        done, next_target = 0, 0

        def new_group() -> None:
            if groups[-1]:
                groups.append([])

        for (i, first, last), weight in zip(pieces, weights, strict=True):
            stop = bisect_left(targets, done + weight)
            inside = targets[next_target:stop]
            next_target = stop
            if self._meta(i).whole:
                before = [t for t in inside if t - done < weight / 2]
                if before:
                    new_group()
                groups[-1].append((i, first, last))
                if len(before) < len(inside):
                    new_group()
            else:
                at = first
                for target in inside:
                    cut = self._align(i, first + int(target - done), last)
                    if cut > at:
                        groups[-1].append((i, at, cut))
                        at = cut
                    new_group()
                if at < last:
                    groups[-1].append((i, at, last))
            done += weight
        if len(groups) > 1 and not groups[-1]:
            groups.pop()
        return groups

    def _piece(self, index: int, first: int, last: int) -> dict[str, Json]:
        file, meta = self._file(index), self._meta(index)
        piece: dict[str, Json] = {"path": file.path, "size": file.size, "from": first, "to": last}
        if meta.columns is not None:
            piece["columns"] = list(meta.columns)
        return piece

    def committed(self, end: Offset) -> None:
        for index in [i for i in self._metas if i < end["file"]]:
            del self._metas[index]

    def close(self) -> None:
        self._metas.clear()

    def describe(self) -> str:
        return f"{self.format} files {self._patterns_text()}" + (" (followed)" if self.follow else "")

    # ------------------------------------------------------------ worker side

    def read(self, source_id: str, split: Split) -> ReadResult:
        frames: list[pl.DataFrame] = []
        bad: list[BadRecord] = []
        for piece in split["pieces"]:
            self._storage.check(piece["path"], piece["size"])
            frame, failed = self._read_piece(piece)
            bad.extend(BadRecord(source_id, f"{piece['path']}:{at}", reason, clip(raw)) for at, reason, raw in failed)
            if self._path_column:
                frame = frame.with_columns(pl.lit(piece["path"]).alias("path"))
            frames.append(frame)
        schema = self.schema()
        return ReadResult(pl.concat(frames) if frames else pl.DataFrame(schema=schema), tuple(bad))

    def _read_piece(self, piece: Mapping[str, Json]) -> tuple[pl.DataFrame, list[Failure]]:
        path, first, last = piece["path"], piece["from"], piece["to"]
        schema = self._rows_schema()
        if self.format == "parquet":
            return read_parquet_rows(self._storage, path, first, last, list(schema)), []
        data = self._unpack(path) if path.endswith(".gz") else self._storage.read(path, first, last)
        if first == 0 and data.startswith(_BOM):
            data, first = data[3:], 3
        if self.format == "csv" and piece["from"] == 0 and self._header:
            end = data.find(b"\n") + 1 or len(data)
            data, first = data[end:], first + end
        lines = Lines(data, first)
        if self.format == "text":
            return pl.DataFrame({"line": lines.text}), lines.failed
        if self.format == "csv":
            return _read_csv(lines, tuple(piece["columns"]), schema, self._separator)
        return _read_jsonl(lines, schema)

    def _unpack(self, path: str) -> bytes:
        with self._storage.guard(path):
            packed = self._storage.read(path, 0, None)
            return gzip.decompress(packed)


# ---------------------------------------------------------------- lines

Failure = tuple[int, str, bytes | str]
"""Byte offset, reason, raw record."""


class Lines:
    """The lines of a piece of a file, without their ends, as a polars Series; those that are not UTF-8 apart.

    The Arrow offsets are the positions of the line ends, so the text is never touched line by line.
    """

    def __init__(self, data: bytes, base: int) -> None:
        self.data = data
        self.failed: list[Failure] = []
        ends = np.flatnonzero(np.frombuffer(data, np.uint8) == 10) + 1
        tail = [len(data)] if data and not data.endswith(b"\n") else []
        bounds = np.concatenate(([0], ends, tail)).astype(np.int64)
        self.starts = bounds[:-1] + base
        """Byte offset in the file of each line."""
        try:
            data.decode("utf-8")
        except UnicodeDecodeError:
            bounds = self._drop_undecodable(bounds, base)
        self.whole = not self.failed
        """True when ``data`` is exactly these lines."""
        array = pa.LargeStringArray.from_buffers(len(bounds) - 1, pa.py_buffer(bounds), pa.py_buffer(self.data))
        text = pl.Series("line", array, dtype=pl.String).str.strip_suffix("\n")
        self.text = text.str.strip_suffix("\r") if b"\r" in self.data else text

    def _drop_undecodable(self, bounds: np.ndarray[Any, Any], base: int) -> np.ndarray[Any, Any]:
        good: list[bytes] = []
        keep: list[int] = []
        for i, (first, last) in enumerate(pairwise(bounds.tolist())):
            line = self.data[first:last]
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

    def drop_blank(self) -> None:
        filled = self.text.str.strip_chars().str.len_bytes() > 0
        if not filled.all():
            self.select(filled)

    def joined(self) -> bytes:
        if self.whole:
            return self.data
        return "\n".join(self.text.to_list()).encode()


def _csv_strings(
    lines: Lines, columns: Sequence[str], wanted: Sequence[str], separator: str
) -> tuple[pl.DataFrame, list[Failure]]:
    """Fields as strings. A line is checked for its shape first, so that the parser proper meets only good ones."""
    lines.drop_blank()
    failed: list[Failure] = []
    text = lines.text
    fields = text.str.count_matches(separator, literal=True)
    quoted = text.str.contains('"', literal=True)
    well_formed = pl.Series([True]).new_from_index(0, len(text))
    if quoted.any():
        sep = pl.escape_regex(separator)
        field = rf'(?:"(?:[^"]|"")*"|[^"{sep}]*)'
        well_formed = ~quoted | text.str.contains(rf"^{field}(?:{sep}{field})*$")
        bare = text.str.replace_all(r'"(?:[^"]|"")*"', "").str.count_matches(separator, literal=True)
        fields = pl.select(pl.when(quoted).then(bare).otherwise(fields)).to_series()
    good = well_formed & (fields == len(columns) - 1)
    if not good.all():
        for row in (~good).arg_true().to_list():
            reason = f"{fields[row] + 1} fields, expected {len(columns)}" if well_formed[row] else "misplaced quotes"
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
    assert frame.height == len(lines.text), "a well-formed line is one row"
    return frame.select(wanted), failed


def _read_csv(
    lines: Lines, columns: Sequence[str], schema: pl.Schema, separator: str
) -> tuple[pl.DataFrame, list[Failure]]:
    frame, failed = _csv_strings(lines, columns, list(schema), separator)
    parsed, misfits = parse_strings(frame, schema)
    failed = lines.failed + failed + [(int(lines.starts[row]), reason, lines.text[row]) for row, reason in misfits]
    return parsed, sorted(failed, key=lambda f: f[0])


def _read_jsonl(lines: Lines, schema: pl.Schema) -> tuple[pl.DataFrame, list[Failure]]:
    # Dates and times are strings in JSON: they go the same way as in CSV.
    raw_schema = pl.Schema({n: pl.String() if t.is_temporal() else t for n, t in schema.items()})
    lines.drop_blank()
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
        failed += [(int(starts[i]), _json_reason(reason), items[i]) for i, reason in bad]
        starts, text = starts[kept], text.gather(kept)
    parsed, misfits = parse_strings(frame, schema)
    failed += [(int(starts[row]), reason, text[row]) for row, reason in misfits]
    return parsed, sorted(failed, key=lambda f: f[0])


def _json_reason(reason: str) -> str:
    return "not a JSON object: " + reason if "expected to contain JSON object" in reason else reason


def _infer_jsonl(head: bytes) -> dict[str, pl.DataType]:
    good = []
    for line in head.splitlines():
        try:
            if isinstance(json.loads(line), dict):
                good.append(line)
        except (ValueError, RecursionError):  # nested too deep for Python is bad in the same way
            continue
    if not good:
        return {}
    frame = pl.read_ndjson(b"\n".join(good), infer_schema_length=None)
    return {n: pl.String() if isinstance(t, pl.Null) else t for n, t in frame.schema.items()}


def _infer_strings(text: pl.Series) -> pl.DataType:
    """The first type all strings parse to. Tried with our own parser, so that inference and reading cannot disagree."""
    if text.null_count() == len(text):
        return pl.String()
    for dtype in (pl.Int64(), pl.Float64(), pl.Boolean(), pl.Date(), pl.Datetime("us")):
        if not parse_strings(text.to_frame(), pl.Schema({text.name: dtype}))[1]:
            return dtype
    return pl.String()


# ---------------------------------------------------------------- Parquet


def read_parquet_rows(storage: Storage, path: str, first: int, last: int, columns: list[str]) -> pl.DataFrame:
    """Rows ``first .. last-1``. Only the row groups that hold them are read."""
    with storage.guard(path):
        if is_local(path):
            # glob and hive off: a name is a name, even when it is "epoch=12/part-[0].parquet".
            scan = pl.scan_parquet(path, glob=False, hive_partitioning=False)
            return scan.select(columns).slice(first, last - first).collect()
        with storage.open(path) as handle:
            file = pq.ParquetFile(handle)
            groups, skipped, position = [], 0, 0
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if position + rows <= first:
                    skipped += rows
                elif position < last:
                    groups.append(group)
                position += rows
            table = file.read_row_groups(groups, columns=columns, use_threads=False)
        frame = pl.from_arrow(table.slice(first - skipped, last - first))
        assert isinstance(frame, pl.DataFrame)
        return frame.select(columns)


def parquet_rows(storage: Storage, path: str) -> int:
    with storage.guard(path), storage.open(path) as handle:
        return int(pq.read_metadata(handle).num_rows)


def _parquet_schema(storage: Storage, path: str) -> pl.Schema:
    with storage.guard(path):
        if is_local(path):
            return pl.Schema(pl.read_parquet_schema(path))
        with storage.open(path) as handle:
            frame = pl.from_arrow(pq.read_schema(handle).empty_table())
            assert isinstance(frame, pl.DataFrame)
            return frame.schema


# ---------------------------------------------------------------- where files are


def is_local(path: str) -> bool:
    return "://" not in path


def _absolute(pattern: str) -> str:
    """Workers may run in another directory."""
    pattern = pattern.removeprefix("file://")
    return os.path.abspath(os.path.expanduser(pattern)) if is_local(pattern) else pattern


def _check_format(format: str) -> str:
    known = {"text", "csv", "jsonl", "parquet"}
    name = {"ndjson": "jsonl", "json": "jsonl", "txt": "text", "lines": "text"}.get(format, format)
    if name not in known:
        raise FlowError(
            f"{format!r} is not a file format Penstock reads.", remedy=f"Use one of {', '.join(sorted(known))}."
        )
    return name


class Storage:
    """The few things asked of a file system. Plain calls for local paths, fsspec for the rest."""

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options = dict(options or {})

    def _fs(self, path: str) -> tuple[Any, str]:
        import fsspec

        try:
            fs, inner = fsspec.core.url_to_fs(path, **self.options)
        except (ImportError, ValueError) as error:
            raise SourceError(
                f"The address {path} cannot be opened: {error}",
                remedy="Install the fsspec package it needs.",
                path=path,
            ) from error
        return fs, str(inner)

    def list(self, pattern: str, known: Container[str] = ()) -> Iterator[_File]:
        """The files a path, glob or directory stands for, in no special order, but for those known. A source looks for
        new ones all the time, and must not look at each of the old ones again: they never change."""
        if not is_local(pattern):
            yield from (file for file in self._list_remote(pattern) if file.path not in known)
            return
        for found in glob.iglob(glob.escape(pattern) if os.path.exists(pattern) else pattern, recursive=True):
            if found in known:
                continue
            if os.path.isdir(found):
                for folder, subfolders, names in os.walk(found):
                    subfolders[:] = [s for s in subfolders if not _ignored(s)]
                    paths = (os.path.join(folder, n) for n in names if not _ignored(n))
                    yield from _stat_all(path for path in paths if path not in known)
            elif not _ignored(os.path.basename(found)):
                yield from _stat_all([found])

    def _list_remote(self, pattern: str) -> Iterator[_File]:
        fs, inner = self._fs(pattern)
        with self.guard(pattern):
            fs.invalidate_cache()
            roots = fs.glob(inner) if glob.has_magic(inner) else [inner]
            for root in roots:
                if not fs.exists(root):
                    continue
                base = str(root).rstrip("/")
                for name, info in fs.find(base, detail=True).items():
                    below = name[len(base) :].strip("/") or name.rpartition("/")[2]
                    if not any(_ignored(part) for part in below.split("/")):
                        yield _File(fs.unstrip_protocol(name), int(info["size"]))

    def check(self, path: str, size: int) -> None:
        """Refuse a file that is not what it was when its range was logged."""
        try:
            if is_local(path):
                now = os.stat(path).st_size
            else:
                fs, inner = self._fs(path)
                now = int(fs.size(inner))
        except FileNotFoundError:
            raise SourceError(
                f"{path} is gone, but the log says it is part of the input.",
                remedy="Put the file back as it was, or start with a new checkpoint directory.",
                path=path,
            ) from None
        if now != size:
            raise SourceError(
                f"{path} has {now} bytes now and had {size} when it was first seen: visible files must not change.",
                remedy="Put the old content back. Write new content to other files elsewhere and rename them here.",
                path=path,
            )

    def open(self, path: str) -> Any:
        if is_local(path):
            return open(path, "rb")
        fs, inner = self._fs(path)
        return fs.open(inner, "rb")

    def read(self, path: str, first: int, last: int | None) -> bytes:
        with self.guard(path), self.open(path) as handle:
            handle.seek(first)
            return bytes(handle.read() if last is None else handle.read(last - first))

    def guard(self, path: str) -> _Guard:
        return _Guard(path)


class _Guard:
    """Turns what the world throws while a file is read into a SourceError with its path."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, FileNotFoundError):
            remedy = "Put the file back as it was, or start with a new checkpoint directory."
        elif isinstance(error, PermissionError):
            remedy = "Give the user that runs the job (and its executors) the right to read it."
        elif isinstance(error, OSError | EOFError | zlib.error | pa.ArrowException | pl.exceptions.PolarsError):
            remedy = "Check that the file is complete and of the format the source expects."
        else:
            return
        detail = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise SourceError(f"{self.path} cannot be read: {detail}", remedy=remedy, path=self.path) from error


def _ignored(name: str) -> bool:
    return name.startswith(("_", ".")) or name.endswith(".tmp")


def _stat_all(paths: Any) -> Iterator[_File]:
    for path in paths:
        try:
            yield _File(path, os.stat(path).st_size)
        except FileNotFoundError:
            continue  # renamed between listing and looking: not visible, then
