"""Files as a source: text, CSV, JSON lines and Parquet, from a local disk or any fsspec address, finished or still
growing.

Files are the most replayable input there is, provided they do not change. So a file is taken as **immutable once it is
logged**: its size is noted in the *catalogue*, and a file that is gone or has another size later is an error, never a
quietly different answer. Writers should write under a name that is ignored (``_x``, ``.x``, ``x.tmp``) and rename.

Offsets are ``{"file": index in the catalogue, "at": position in it}``. Positions in Parquet are row numbers. In line
formats they are byte offsets at the start of a record, so a worker seeks straight to its share. A gzip file cannot be
entered in the middle and is one unit. The catalogue must be the same after a restart or indices would mean other files.
The facts that a range logs follow from its offsets and the catalogue:

* ``follow=True``: the files this range is the first to enter. Files that no range has reached may be found in another
  order after a restart, which nobody can notice.
* ``follow=False``: the whole list, with the first range.
* The files of the range that are left out from some position on, and why (``bad``, ``bad_at``).

**A file is looked at before the range that enters it is logged.** What is found unreadable then never wedges the job:
nothing of the file was published, so it may be replaced or taken away, and its facts are taken anew. With
``on_unreadable="dead_letter"`` the verdict is logged as a fact, so a replay gives the same dead letter whatever became
of the file. A file that goes bad after it was logged stops the job, because rows of that file may have been
published; then ``penstock skip`` is the way on (see ``skips.py``).

Where a CSV file may be cut follows from its quotes alone (see ``lines.py``), so the driver scans the bytes up to a cut.

What is out of scope: Parquet files whose schema drifts.
"""

from __future__ import annotations

import csv as python_csv
import gzip
import os
import time
from bisect import bisect_left
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import polars as pl

from penstock.connectors.base import (
    Backlog,
    BadRecord,
    Json,
    Offset,
    ReadResult,
    Source,
    SourceContext,
    SourceRange,
    Split,
)
from penstock.connectors.lines import (
    BOM,
    CsvCuts,
    Failure,
    Lines,
    csv_strings,
    infer_jsonl,
    infer_strings,
    read_csv,
    read_jsonl,
    record_ends,
)
from penstock.connectors.rows import SchemaSpec, clip, parsable, polars_schema
from penstock.connectors.skips import REASON, leave_out_rows, read_skips, told
from penstock.connectors.storage import (
    FoundFile,
    Storage,
    absolute,
    check_parquet,
    is_local,
    pack_path,
    parquet_rows,
    parquet_schema,
    read_parquet_rows,
    unpack_path,
    unpacked_chunks,
)
from penstock.errors import FlowError, SourceError

SAMPLE_BYTES = 64 * 1024
"""Bytes that are read to estimate the length of a line, or to find a line's end. A schema takes four times as many."""

RANGE_FILES_MAX = 4096
"""The most files of one range, however small they are: its splits are shipped to workers."""

LOOKING_SHARE = 0.1
"""The share of the time that may go into listing a store for new files: stores may charge for each request."""

GZIP_RATIO = 4
"""The plain bytes that one gzip byte counts for when work is balanced."""

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
_UTF16: Final = (b"\xff\xfe", b"\xfe\xff")

OnUnreadable = Literal["stop", "dead_letter"]


def files(
    pattern: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    format: str | None = None,
    schema: SchemaSpec | None = None,
    follow: bool = False,
    path: bool = False,
    header: bool = True,
    separator: str | None = None,
    multiline: bool = True,
    on_unreadable: OnUnreadable = "stop",
    storage_options: Mapping[str, Any] | None = None,
) -> FileSource:
    """Read files: a path, a glob, a directory (everything below it), several of them, or fsspec addresses of these.

    ``format`` is ``text`` (one column, ``line``), ``csv``, ``jsonl`` or ``parquet``; left out, the file extension
    says it. ``.gz`` is unpacked. ``schema`` maps columns to types (``{"word": str, "n": pl.Int32}``); left out, it is
    taken from the first file and then stays. ``follow=True`` waits for new files for ever; otherwise the files are
    listed once and the source ends. ``path=True`` adds the column ``path``. ``header`` and ``separator`` are for CSV.

    CSV follows RFC 4180: quoted fields may hold line breaks. To cut a file safely its quotes are counted, so the driver
    reads each byte once before the workers do. ``multiline=False`` is your promise that no field holds a line break:
    then nothing is read beforehand, and each line is a record.

    Records that do not fit the schema become dead letters and never stop the job: a wrong number of fields, values of
    another type or out of its range, JSON that is not an object, text that is not UTF-8, records of more than 16 MiB.
    An absent JSON key and an empty CSV field are null; JSON keys and CSV columns that the schema does not name are
    ignored, as are empty lines. A JSON number in a ``str`` column becomes text.

    A file that cannot be read at all (cut off, damaged, not of its format, gone) stops the job before any row of
    the file is used; correct the file or take it away and start again. ``on_unreadable="dead_letter"`` makes one dead
    letter of the file and goes on; every gzip and Parquet file is then read once by the driver to check it.
    """
    return FileSource(
        pattern,
        format=format,
        schema=schema,
        follow=follow,
        path=path,
        header=header,
        separator=separator,
        multiline=multiline,
        on_unreadable=on_unreadable,
        storage_options=storage_options,
    )


@dataclass(frozen=True)
class _File(FoundFile):
    """A file of the catalogue."""

    units: int | None = None
    """Its positions as they were logged; None when they follow from its size."""
    bad: str | None = None
    """Why it is left out from position ``bad_at`` on."""
    bad_at: int = 0


@dataclass(frozen=True)
class _Meta:
    """What planning needs to know of a file. ``units`` are its positions: bytes, or rows of Parquet."""

    units: int
    rows: float
    columns: tuple[str, ...] | None = None


@dataclass(frozen=True)
class _Skipped:
    """An order to leave out a file, or one record of a file, from an offset on."""

    path: str
    record: int | None
    since: tuple[int, int]


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
        multiline: bool,
        on_unreadable: OnUnreadable,
        storage_options: Mapping[str, Any] | None,
    ) -> None:
        patterns = [pattern] if isinstance(pattern, str | os.PathLike) else list(pattern)
        if not patterns:
            raise FlowError("files() got an empty list of paths.", remedy="Name at least one path, glob or directory.")
        self.patterns = tuple(absolute(os.fspath(p)) for p in patterns)
        self.follow = follow
        self._storage = Storage(dict(storage_options or {}))
        self._path_column = path
        self._header = header
        self._multiline = multiline
        if on_unreadable not in ("stop", "dead_letter"):
            raise FlowError(f"on_unreadable={on_unreadable!r} is not known.", remedy='Write "stop" or "dead_letter".')
        self._on_unreadable = on_unreadable
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
        self._bytes_before = [0]
        """Bytes of all files of the catalogue before each index."""
        self._rows_per_byte: float | None = None
        self._cuts: dict[int, CsvCuts] = {}
        self._checked: set[int] = set()
        """Files that were read to the end to see that this is possible."""
        self._amended: set[int] = set()
        """Files of which something else is known now than when they were listed."""
        self._skips: list[_Skipped] = []
        self.notices: list[str] = []

    def __getstate__(self) -> dict[str, Any]:
        """Workers need no catalogue: their splits say everything, and a closure should stay small."""
        self._rows_schema()
        return {
            **self.__dict__,
            "_files": [],
            "_index": {},
            "_metas": {},
            "_cuts": {},
            "_checked": set(),
            "_amended": set(),
            "_skips": [],
            "_listed": False,
            "_bytes_before": [0],
        }

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
        problem: SourceError | None = None
        for file in self._list():
            if file.size == 0:
                continue
            try:
                if self.format == "parquet":
                    return parquet_schema(self._storage, file.path)
                inferred = self._infer_lines(file)
            except SourceError as error:
                problem = problem or error  # the next file may tell as well
                continue
            if inferred:
                return pl.Schema(inferred)
        if problem is not None:
            raise problem
        raise SourceError(
            f"No file matches {self._patterns_text()} yet, so its columns are unknown.",
            remedy='Give them, for example schema={"word": str, "n": int}.',
            pattern=self._patterns_text(),
        )

    def _infer_lines(self, file: FoundFile) -> dict[str, pl.DataType]:
        head = self._head(file.path, 4 * SAMPLE_BYTES)
        if self.format == "jsonl":
            return infer_jsonl(head)
        columns = self._csv_columns(file.path, head)
        ends = self._ends(head)
        if len(ends) and len(head) > 2 * SAMPLE_BYTES:
            head = head[: int(ends[-1])]  # the last record of a sample may be cut off
        lines = Lines(head, 0, ends)
        if self._header and len(lines.text):
            lines.select(pl.Series([False] + [True] * (len(lines.text) - 1)))
        frame, _ = csv_strings(lines, columns, columns, self._separator)
        return {name: infer_strings(frame.get_column(name)) for name in columns}

    def _ends(self, data: bytes) -> Any:
        """Where the records of CSV data end that begins with one; None for lines."""
        if self.format == "csv" and self._multiline:
            return record_ends(data, self._separator)
        return None

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

    def _list(self, known: Container[str] = ()) -> list[FoundFile]:
        found: dict[str, FoundFile] = {}
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
            self._files.append(_File(file.path, file.size))
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

    def _units(self, index: int) -> int:
        """The positions of a file, without a look at it where that is possible."""
        file = self._file(index)
        if file.units is not None:
            return file.units
        return self._meta(index).units if self.format == "parquet" else file.size

    def _left_out(self, index: int, first: int) -> str | None:
        """Why the file is left out from this position on, if it is."""
        file = self._file(index)
        for skip in self._skips:
            if skip.record is None and skip.path == pack_path(file.path) and (index, first) >= skip.since:
                return REASON
        return file.bad if file.bad is not None and first >= file.bad_at else None

    def _is_whole(self, index: int, first: int) -> bool:
        """True for what cannot be cut."""
        return self._file(index).path.endswith(".gz") or self._left_out(index, first) is not None

    def _meta(self, index: int) -> _Meta:
        meta = self._metas.get(index)
        if meta is None:
            meta = self._metas[index] = self._examine(self._file(index))
        return meta

    def _enter(self, index: int, at: int) -> _Meta | None:
        """Look at a file before a range takes more of it. None when that changed the catalogue."""
        file = self._file(index)
        patient = self._on_unreadable == "dead_letter"
        try:
            if at == 0 and (patient or is_local(file.path)):
                # No range has entered it, so it may have been replaced since it was listed.
                size = self._storage.size(file.path)
                if size is not None and size != file.size:
                    file = self._amend(index, _File(file.path, size))
            elif patient:
                self._storage.check(file.path, file.size)
            meta = self._meta(index)
            if at == 0 and index not in self._checked:
                meta = self._check(index, meta)
            return meta
        except SourceError as error:
            if at == 0 and self.follow and self._storage.size(file.path) is None:
                self._forget(index)
                return None
            if not patient or not error.evidence.get("unreadable"):
                raise
            units = (1 if self.format == "parquet" else max(1, file.size)) if at == 0 else self._units(index)
            self._amend(index, replace(file, bad=error.message, bad_at=at, units=units))
            return None

    def _check(self, index: int, meta: _Meta) -> _Meta:
        """Read a file that may turn out to be unreadable only in its midst."""
        file = self._file(index)
        patient = self._on_unreadable == "dead_letter"
        if file.size and file.path.endswith(".gz") and (patient or is_local(file.path)):
            lines = 0
            with self._storage.guard(file.path), self._storage.open(file.path) as handle:
                for chunk in unpacked_chunks(handle):
                    lines += chunk.count(b"\n")
            meta = self._metas[index] = replace(meta, rows=float(max(1, lines)))
        elif self.format == "parquet" and patient:
            check_parquet(self._storage, file.path, list(self._rows_schema()))
        self._checked.add(index)
        return meta

    def _amend(self, index: int, file: _File) -> _File:
        """Replace what the catalogue says of a file; the next range that touches it logs that."""
        self._files[index] = file
        self._amended.add(index)
        for known in (self._metas, self._cuts):
            known.pop(index, None)
        self._checked.discard(index)
        return file

    def _forget(self, index: int) -> None:
        """Take a file that went before any range entered it out of the catalogue."""
        del self._files[index]
        self._index = {file.path: i for i, file in enumerate(self._files)}
        for known in (self._metas, self._cuts):
            for i in [i for i in known if i >= index]:
                del known[i]
        self._checked = {i for i in self._checked if i < index}
        self._amended = {i for i in self._amended if i < index}

    def _examine(self, file: _File) -> _Meta:
        if self.format == "parquet":
            return self._examine_parquet(file)
        if file.size == 0:
            return _Meta(units=0, rows=0.0)
        head = self._head(file.path, SAMPLE_BYTES)
        columns = self._csv_columns(file.path, head) if self.format == "csv" and head else None
        lines = head.count(b"\n") + (not head.endswith(b"\n"))
        line_bytes = max(1.0, len(head) / max(1, lines))
        size = file.size * GZIP_RATIO if file.path.endswith(".gz") else file.size
        return _Meta(units=file.size, rows=max(1.0, size / line_bytes), columns=columns)

    def _examine_parquet(self, file: _File) -> _Meta:
        self._storage.check(file.path, file.size)
        expected, actual = self._rows_schema(), parquet_schema(self._storage, file.path)
        path = pack_path(file.path)
        for name, dtype in expected.items():
            if name not in actual:
                raise SourceError(
                    f"{path} has no column {name!r} (expected a {dtype}).",
                    remedy="Take the file away, or declare only the columns all files have: schema={...}.",
                    path=path,
                    column=name,
                    unreadable=True,
                )
            if actual[name] != dtype:
                raise SourceError(
                    f"{path}: column {name!r} is a {actual[name]}, not a {dtype}.",
                    remedy="Rewrite the file with the right type, or take it away.",
                    path=path,
                    column=name,
                    unreadable=True,
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
        if head.startswith(_UTF16):
            raise SourceError(
                f"{pack_path(path)} is UTF-16 text, and Penstock reads UTF-8.",
                remedy="Convert the file: iconv -f UTF-16 -t UTF-8.",
                path=pack_path(path),
                unreadable=True,
            )
        end = head.rfind(b"\n") + 1
        return (head[:end] if end and len(head) == size else head).removeprefix(BOM)

    def _csv_columns(self, path: str, head: bytes) -> tuple[str, ...]:
        ends = self._ends(head)
        end = head.find(b"\n") + 1 if ends is None else int(ends[0]) if len(ends) else 0
        first = (head[:end] if end else head).removesuffix(b"\n").removesuffix(b"\r").decode("utf-8", errors="replace")
        declared = self._declared or self._data_schema

        def wrong(what: str, remedy: str) -> SourceError:
            message = f"{pack_path(path)}: the header {what}; it reads: {first[:200]!r}"
            return SourceError(message, remedy=remedy, path=pack_path(path), unreadable=True)

        try:
            names = next(python_csv.reader([first], delimiter=self._separator), [])
        except python_csv.Error as error:
            raise wrong(
                f"cannot be read ({error})", "Lines must end with a line feed, alone or after a carriage return."
            ) from None
        if not self._header:
            return tuple(declared) if declared else tuple(f"column_{i + 1}" for i in range(len(names)))
        names = [name.strip() for name in names]
        if len(set(names)) != len(names):
            raise wrong("names a column twice", "Correct the header, or give header=False and a schema.")
        for name in declared or ():
            if name not in names:
                raise wrong(
                    f"has no column {name!r}",
                    "Correct the file or the schema; if the file has no header, give header=False.",
                )
        return tuple(names)

    # ------------------------------------------------------------ driver side

    def open(self, context: SourceContext) -> None:
        self._reset()
        self._rows_schema()
        orders = [skip for skip in read_skips(context.store, context.source_id) if skip.file is not None]
        for skip in orders:
            since = (skip.since["file"], skip.since["at"]) if skip.since else (0, 0)
            record = None if skip.offset is None else int(skip.offset)
            self._skips.append(_Skipped(str(skip.file), record, since))
        self.notices = told(orders)

    def remember(self, facts: Sequence[Json]) -> None:
        for fact in facts:
            path, index = unpack_path(fact["path"]), fact["i"]
            assert index <= len(self._files), "facts come in order and without gaps"
            file = _File(path, fact["size"], fact.get("rows"), fact.get("bad"), fact.get("bad_at", 0))
            if index < len(self._files):
                self._files[index] = file  # the same range was logged again, or a later one knew more
                continue
            self._index[path] = index
            self._files.append(file)
        if facts and not self.follow:
            self._listed = True

    def initial_offset(self) -> Offset:
        return {"file": 0, "at": 0}

    def exhausted(self, offset: Offset) -> bool:
        if self.follow:
            return False
        self._ensure_listed()
        try:
            return all(self._units(i) == 0 for i in range(offset["file"], len(self._files)))
        except SourceError:
            return False  # the next plan says what is wrong

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
            if self._left_out(index, at) is not None:
                if self._units(index):
                    end = {"file": index + 1, "at": 0}
                index, at, rows, files_taken = index + 1, 0, rows + 1, files_taken + 1
                continue
            try:
                meta = self._enter(index, at)
            except SourceError:
                if end is None:
                    raise
                break  # what comes before it is read first
            if meta is None:
                continue
            whole = self._is_whole(index, at)
            rest = meta.rows * (1 - at / meta.units) if meta.units else 0.0
            if rest > rows_max - rows and not (whole and end is None):
                if not whole:
                    wanted = at + max(1, int((rows_max - rows) * meta.units / meta.rows))
                    at = self._align(index, at, wanted, meta.units)
                    index, at = (index + 1, 0) if at >= meta.units else (index, at)
                    end, rows = {"file": index, "at": at}, float(rows_max)
                break
            index, at, rows, files_taken = index + 1, 0, rows + rest, files_taken + 1
            if meta.units:
                end = {"file": index, "at": 0}
        if end is None:
            return None
        return SourceRange(dict(start), end, max(1, round(rows)), self._facts(start, end))

    def backlog(self, offset: Offset) -> Backlog:
        """Files that are listed and not read, new ones included. No file is opened: bytes are counted, and rows are
        estimated by the rows per byte of the files that were planned last."""
        if not self._listed:
            return Backlog()
        if self.follow:
            self._discover()
        for file in self._files[len(self._bytes_before) - 1 :]:
            self._bytes_before.append(self._bytes_before[-1] + file.size)
        metas = dict(self._metas)  # a copy, because the thread that cuts splits adds to it
        index = offset["file"]
        size = self._bytes_before[-1] - self._bytes_before[min(index, len(self._bytes_before) - 1)]
        if offset["at"] and index < len(self._files):
            begun = metas.get(index)
            read = offset["at"] / begun.units if begun is not None and begun.units else 1.0
            size -= round(self._files[index].size * read)
        planned = sum(self._files[i].size for i in metas)
        if planned:
            self._rows_per_byte = sum(meta.rows for meta in metas.values()) / planned
        if self._rows_per_byte is None:
            return Backlog(None if size else 0, size)
        return Backlog(round(size * self._rows_per_byte), size)

    def _facts(self, start: Offset, end: Offset) -> tuple[Json, ...]:
        if self.follow:
            first = start["file"] + (start["at"] > 0)
            entered = range(first, end["file"] + (end["at"] > 0))
        else:
            entered = range(len(self._files)) if start == self.initial_offset() else range(0)
        touched = range(start["file"], end["file"] + (end["at"] > 0))
        indices = sorted({*entered, *(i for i in self._amended if i in touched)})
        facts = []
        for i in indices:
            file = self._files[i]
            fact: dict[str, Json] = {"i": i, "path": pack_path(file.path), "size": file.size}
            if file.units is not None:
                fact["rows"] = file.units
            elif self.format == "parquet" and i in self._metas:
                fact["rows"] = self._metas[i].units
            if file.bad is not None:
                fact |= {"bad": file.bad, "bad_at": file.bad_at}
            facts.append(fact)
        return tuple(facts)

    def _align(self, index: int, start: int, position: int, limit: int) -> int:
        """The first place a file may be cut at or after ``position``. A record begins at ``start``."""
        if self.format == "parquet" or position >= limit:
            return min(position, limit)
        file, at = self._file(index), max(position - 1, 0)
        if self.format == "csv" and self._multiline:
            if index not in self._cuts:
                self._cuts[index] = CsvCuts(lambda a, b: self._storage.read(file.path, a, b), self._separator)
            self._cuts[index].know(start)
            return self._cuts[index].first_from(position, limit)
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
            last = end["at"] if i == end["file"] else self._units(i)
            if last > first:
                pieces.append((i, first, last))
        groups = self._cut(pieces, parallelism)
        return [{"pieces": [self._piece(*p) for p in group]} for group in groups]

    def _cut(self, pieces: list[tuple[int, int, int]], parallelism: int) -> list[list[tuple[int, int, int]]]:
        """Share out pieces in order: a cut at every 1/parallelism of the weight, moved to where the file allows one."""
        whole = [self._is_whole(i, first) for i, first, _ in pieces]
        weights = [(b - a) * GZIP_RATIO if w else b - a for (_, a, b), w in zip(pieces, whole, strict=True)]
        total = sum(weights)
        targets = [total * k / parallelism for k in range(1, parallelism)]
        groups: list[list[tuple[int, int, int]]] = [[]]
        done, next_target = 0, 0

        def new_group() -> None:
            if groups[-1]:
                groups.append([])

        for (i, first, last), weight, uncut in zip(pieces, weights, whole, strict=True):
            stop = bisect_left(targets, done + weight)
            inside = targets[next_target:stop]
            next_target = stop
            if uncut:
                before = [t for t in inside if t - done < weight / 2]
                if before:
                    new_group()
                groups[-1].append((i, first, last))
                if len(before) < len(inside):
                    new_group()
            else:
                at = first
                for target in inside:
                    cut = self._align(i, at, first + int(target - done), last)
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
        file = self._file(index)
        path = pack_path(file.path)
        piece: dict[str, Json] = {"path": path, "size": file.size, "from": first, "to": last}
        if (reason := self._left_out(index, first)) is not None:
            return {**piece, "out": reason}
        columns = self._meta(index).columns if self.format == "csv" else None
        if columns is not None:
            piece["columns"] = list(columns)
        records = [
            skip.record
            for skip in self._skips
            if skip.record is not None and skip.path == path and (index, first) >= skip.since
        ]
        if records:
            inside = [r for r in records if path.endswith(".gz") or first <= r < last]
            piece["skip"] = inside
        return piece

    def committed(self, end: Offset) -> None:
        for known in (self._metas, self._cuts):
            for index in [i for i in known if i < end["file"]]:
                del known[index]
        self._checked = {i for i in self._checked if i >= end["file"]}
        self._amended = {i for i in self._amended if i >= end["file"]}

    def close(self) -> None:
        self._metas.clear()
        self._cuts.clear()

    def describe(self) -> str:
        return f"{self.format} files {self._patterns_text()}" + (" (followed)" if self.follow else "")

    # ------------------------------------------------------------ worker side

    def read(self, source_id: str, split: Split) -> ReadResult:
        frames: list[pl.DataFrame] = []
        bad: list[BadRecord] = []
        set_aside: list[BadRecord] = []
        for piece in split["pieces"]:
            path, shown = unpack_path(piece["path"]), piece["path"]
            if "out" in piece:
                set_aside.append(BadRecord(source_id, f"{shown}:{piece['from']}", piece["out"], ""))
                continue
            self._storage.check(path, piece["size"])
            frame, failed = self._read_piece(path, piece)
            for at, reason, raw in failed:
                letter = BadRecord(source_id, f"{shown}:{at}", reason, clip(raw))
                (set_aside if reason == REASON else bad).append(letter)
            if self._path_column:
                frame = frame.with_columns(pl.lit(shown).alias("path"))
            frames.append(frame)
        schema = self.schema()
        rows = pl.concat(frames) if frames else pl.DataFrame(schema=schema)
        return ReadResult(rows, tuple(bad), set_aside=tuple(set_aside))

    def _read_piece(self, path: str, piece: Mapping[str, Json]) -> tuple[pl.DataFrame, list[Failure]]:
        first, last = piece["from"], piece["to"]
        schema = self._rows_schema()
        skipped = piece.get("skip", [])
        if self.format == "parquet":
            frame = read_parquet_rows(self._storage, path, first, last, list(schema))
            frame, letters = leave_out_rows(frame, [r - first for r in skipped], "", lambda row: str(first + row))
            return frame, [(int(letter.offset), letter.reason, letter.raw) for letter in letters]
        data = self._unpack(path) if path.endswith(".gz") else self._storage.read(path, first, last)
        if piece["from"] == 0 and data.startswith(BOM):
            data, first = data[len(BOM) :], first + len(BOM)
        ends = self._ends(data)
        if self.format == "csv" and piece["from"] == 0 and self._header:
            header = data.find(b"\n") + 1 if ends is None else int(ends[0]) if len(ends) else 0
            header = header or len(data)
            data, first = data[header:], first + header
            ends = None if ends is None else ends[1:] - header
        lines = Lines(data, first, ends)
        lines.leave_out(skipped, REASON)
        if self.format == "text":
            return pl.DataFrame({"line": lines.text}), lines.failed
        if self.format == "csv":
            return read_csv(lines, tuple(piece.get("columns", ())), schema, self._separator)
        return read_jsonl(lines, schema)

    def _unpack(self, path: str) -> bytes:
        with self._storage.guard(path), self._storage.open(path) as handle:
            return b"".join(unpacked_chunks(handle))


def _check_format(format: str) -> str:
    known = {"text", "csv", "jsonl", "parquet"}
    name = {"ndjson": "jsonl", "json": "jsonl", "txt": "text", "lines": "text"}.get(format, format)
    if name not in known:
        raise FlowError(
            f"{format!r} is not a file format Penstock reads.", remedy=f"Use one of {', '.join(sorted(known))}."
        )
    return name


__all__ = ["FileSource", "files"]
