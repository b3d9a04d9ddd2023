"""Everything Spark can read: Python data sources, and any streaming DataFrame (Kafka, Delta, rate, ...).

Three ways in:

* ``spark_reader``: an object with the methods of ``pyspark.sql.datasource.DataSourceStreamReader``. Its offsets and
  partitions are replayable by contract, so they become ours one to one and its ``read`` runs on the workers.
* ``simple_reader``: the same for ``SimpleDataSourceStreamReader``, which has no partitions.
* ``dataframe``: a streaming DataFrame gives neither offsets nor replay to the outside. So a Structured Streaming
  query *spools* its micro-batches as Parquet below the checkpoint directory, each under its batch id, and we read
  those. A batch that Spark runs again after a failure finds its directory there and is skipped; a batch that a
  checkpoint covers is deleted.

pyspark is imported inside functions only: ``import penstock`` works without it.
"""

from __future__ import annotations

import base64
import inspect
import json
import os
import pickle
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.connectors.base import (
    Backlog,
    BadRecord,
    Offset,
    ReadResult,
    Source,
    SourceContext,
    SourceRange,
    Split,
)
from penstock.connectors.rows import clip, polars_schema, rows_frame, salvage
from penstock.connectors.scratch import Scratch, open_scratch
from penstock.connectors.skips import REASON, read_record_skips
from penstock.connectors.spool import cut, folder_of
from penstock.connectors.store import make_directories, private_opener
from penstock.errors import FlowError, SourceError

# ---------------------------------------------------------------- schemas

_SPARK_TYPES: dict[str, pl.DataType] = {
    "boolean": pl.Boolean(),
    "tinyint": pl.Int8(),
    "byte": pl.Int8(),
    "smallint": pl.Int16(),
    "short": pl.Int16(),
    "int": pl.Int32(),
    "integer": pl.Int32(),
    "bigint": pl.Int64(),
    "long": pl.Int64(),
    "float": pl.Float32(),
    "real": pl.Float32(),
    "double": pl.Float64(),
    "string": pl.String(),
    "binary": pl.Binary(),
    "date": pl.Date(),
    "timestamp": pl.Datetime("us", "UTC"),
    "timestamp_ltz": pl.Datetime("us", "UTC"),
    "timestamp_ntz": pl.Datetime("us"),
    "void": pl.Null(),
}


def spark_schema(schema: Any) -> pl.Schema:
    """A polars schema from a polars schema, a mapping, a Spark ``StructType`` or a DDL string (``"word string, n
    bigint"``)."""
    if isinstance(schema, str):
        return pl.Schema({name: _spark_dtype(kind, name) for name, kind in _ddl_fields(schema)})
    if hasattr(schema, "fields") and hasattr(schema, "simpleString"):
        return pl.Schema({f.name: _spark_dtype(f.dataType.simpleString(), f.name) for f in schema.fields})
    return polars_schema(schema)


def _spark_dtype(text: str, column: str) -> pl.DataType:
    text = text.strip()
    lower = text.lower()
    if lower in _SPARK_TYPES:
        return _SPARK_TYPES[lower]
    if match := re.fullmatch(r"(?:decimal|dec|numeric)\s*(?:\(\s*(\d+)\s*(?:,\s*(\d+)\s*)?\))?", lower):
        return pl.Decimal(int(match[1] or 10), int(match[2] or 0))
    if re.fullmatch(r"(?:var)?char\s*\(\s*\d+\s*\)", lower):
        return pl.String()
    if lower.startswith("interval day"):
        return pl.Duration("us")
    if match := re.fullmatch(r"array\s*<(.*)>", text, re.IGNORECASE | re.DOTALL):
        return pl.List(_spark_dtype(match[1], column))
    if match := re.fullmatch(r"struct\s*<(.*)>", text, re.IGNORECASE | re.DOTALL):
        return pl.Struct({name: _spark_dtype(kind, column) for name, kind in _ddl_fields(match[1])})
    raise FlowError(
        f"Column {column!r}: the Spark type {text!r} has no counterpart here.",
        remedy="Convert it in Spark first, for example a map to an array of structs or to a JSON string.",
        column=column,
    )


def _ddl_fields(ddl: str) -> list[tuple[str, str]]:
    """``a INT NOT NULL, b ARRAY<STRING> COMMENT 'x', c: double`` to names and types."""
    fields, depth, current = [], 0, ""
    for char in ddl + ",":
        depth += (char in "<(") - (char in ">)")
        if char == "," and depth == 0:
            fields.append(current.strip())
            current = ""
        else:
            current += char
    out = []
    for field in filter(None, fields):
        match = re.fullmatch(r"(`[^`]+`|[^\s:`]+)\s*:?\s*(.+)", field, re.DOTALL)
        if match is None:
            raise FlowError(
                f"{field!r} is not a column of a DDL schema.", remedy='Write for example "word string, n bigint".'
            )
        kind = re.sub(r"(\s+comment\s+(?:'[^']*'|\"[^\"]*\"))$", "", match[2], flags=re.IGNORECASE)
        kind = re.sub(r"\s+not\s+null$", "", kind, flags=re.IGNORECASE)
        out.append((match[1].strip("`"), kind))
    return out


# ---------------------------------------------------------------- Python data sources


def spark_reader(reader: Any, schema: Any) -> ReaderSource:
    """Any object with the methods of ``DataSourceStreamReader``: ``initialOffset``, ``latestOffset`` (with or without
    ``start`` and ``limit``), ``partitions``, ``read``, and if it likes ``commit`` and ``stop``.

    ``schema`` is a polars schema, a Spark ``StructType`` or a DDL string. Rows that do not fit it become dead
    letters. Reader and partitions are pickled to the workers. An epoch is as large as the reader says: only one that
    reports a ``ReadMaxRows`` limit of its own can be asked for less.
    """
    for method in ("initialOffset", "latestOffset", "partitions", "read"):
        _need(reader, method, "spark_reader")
    return ReaderSource(reader, spark_schema(schema))


def simple_reader(reader: Any, schema: Any) -> SimpleReaderSource:
    """Any object with the methods of ``SimpleDataSourceStreamReader``: ``initialOffset``, ``read(start)``,
    ``readBetweenOffsets``.

    It is read once on the driver, to learn where a range ends, and again on a worker: for small inputs.
    """
    for method in ("initialOffset", "read", "readBetweenOffsets"):
        _need(reader, method, "simple_reader")
    return SimpleReaderSource(reader, spark_schema(schema))


def _need(reader: Any, method: str, caller: str) -> None:
    if not callable(getattr(reader, method, None)):
        raise FlowError(
            f"{caller}() got a {type(reader).__name__}, which has no method {method}().",
            remedy="Give an instance of the stream reader, not of the DataSource.",
        )


class _ReaderBase(Source):
    def __init__(self, reader: Any, schema: pl.Schema) -> None:
        self._reader = reader
        self._schema = schema
        self._skipped: list[str] = []
        self.notices: list[str] = []

    def open(self, context: SourceContext) -> None:
        self._skipped, self.notices = read_record_skips(context)

    def schema(self) -> pl.Schema:
        return self._schema

    def initial_offset(self) -> Offset:
        return dict(self._call(self._reader.initialOffset))

    def committed(self, end: Offset) -> None:
        if callable(getattr(self._reader, "commit", None)):
            self._call(self._reader.commit, end)

    def close(self) -> None:
        if callable(getattr(self._reader, "stop", None)):
            self._call(self._reader.stop)

    def describe(self) -> str:
        return f"reader {type(self._reader).__name__}"

    def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        try:
            return method(*args)
        except Exception as error:
            name = f"{type(self._reader).__name__}.{getattr(method, '__name__', '?')}"
            raise SourceError(
                f"{name} failed: {type(error).__name__}: {error}",
                remedy="Correct the reader or its input and start the job again; it goes on from its checkpoint.",
                cause=repr(error),
            ) from error

    def _fit(self, source_id: str, place: str, items: Iterable[Any], skipped: Iterable[str] = ()) -> ReadResult:
        """Tuples, Rows or RecordBatches to a frame of the schema. A record's place is ``place`` and its number."""
        frames: list[pl.DataFrame] = []
        bad: list[BadRecord] = []
        set_aside: list[BadRecord] = []
        orders = frozenset(skipped)
        rows: list[Any] = []
        seen = 0

        def flush() -> None:
            frame, _, failed = salvage(rows, lambda part: rows_frame(part, self._schema), self._schema)
            first = seen - len(rows)
            bad.extend(BadRecord(source_id, f"{place}:{first + i}", why, clip(repr(rows[i]))) for i, why in failed)
            frames.append(frame)
            rows.clear()

        for item in items:
            if isinstance(item, pa.RecordBatch | pa.Table):
                flush()
                rows_of = [i for i in range(item.num_rows) if f"{place}:{seen + i}" in orders] if orders else []
                kept: Sequence[int] = range(item.num_rows)
                if rows_of:
                    kept = [i for i in kept if i not in rows_of]
                for i in rows_of:
                    raw = repr(item.slice(i, 1).to_pylist()[0])
                    set_aside.append(BadRecord(source_id, f"{place}:{seen + i}", REASON, clip(raw)))
                frame, failed = _fit_batch(item.take(kept) if rows_of else item, self._schema)
                bad.extend(BadRecord(source_id, f"{place}:{seen + kept[i]}", why, clip(raw)) for i, why, raw in failed)
                frames.append(frame)
                seen += item.num_rows
            elif orders and f"{place}:{seen}" in orders:
                flush()
                set_aside.append(BadRecord(source_id, f"{place}:{seen}", REASON, clip(repr(item))))
                seen += 1
            else:
                rows.append(item)
                seen += 1
        flush()
        return ReadResult(pl.concat(frames), tuple(bad), set_aside=tuple(set_aside))


def _drain(method: Callable[..., Iterable[Any]], *args: Any) -> list[Any]:
    """Read to the end at once: an error in the middle of an iterator is the reader's, and should be named so."""
    return list(method(*args))


def _fit_batch(batch: pa.RecordBatch | pa.Table, schema: pl.Schema) -> tuple[pl.DataFrame, list[tuple[int, str, str]]]:
    raw = pl.from_arrow(batch)
    assert isinstance(raw, pl.DataFrame)
    missing = [name for name in schema if name not in raw.columns]
    if missing:
        raise SourceError(
            f"The reader gave a batch without column {missing[0]!r}; it has {', '.join(raw.columns)}.",
            remedy="Correct the reader or the declared schema.",
            column=missing[0],
        )
    raw = raw.select(list(schema))
    if raw.schema == schema:
        return raw, []
    try:
        frame = raw.cast(schema, strict=False)
    except pl.exceptions.PolarsError as error:
        raise SourceError(
            f"The reader gave a batch of other types: {error}", remedy="Correct the reader or the declared schema."
        ) from error
    failed: dict[int, str] = {}
    for name, dtype in schema.items():
        if frame[name].null_count() > raw[name].null_count():
            for row in (frame[name].is_null() & raw[name].is_not_null()).arg_true().to_list():
                failed.setdefault(row, f"column {name!r}: {raw[name][row]!r} is not a {dtype}")
    if failed:
        keep = pl.Series([True]).new_from_index(0, frame.height).scatter(sorted(failed), False)
        frame = frame.filter(keep)
    return frame, [(row, why, repr(raw.row(row))) for row, why in sorted(failed.items())]


class ReaderSource(_ReaderBase):
    """See :func:`spark_reader`."""

    def plan(self, start: Offset, rows_max: int) -> SourceRange | None:
        end = self._latest(start, rows_max)
        if end is None or end == start:
            return None
        return SourceRange(dict(start), dict(end), _distance(start, end) or rows_max)

    def _latest(self, start: Offset, rows_max: int) -> Offset | None:
        latest = self._reader.latestOffset
        try:
            takes = len(inspect.signature(latest).parameters)
        except (TypeError, ValueError):
            takes = 0
        # Before Spark 4.2 it took no arguments.
        arguments = (dict(start), self._limit(rows_max)) if takes else ()
        end = self._call(latest, *arguments)
        return None if end is None else dict(end)

    def _limit(self, rows_max: int) -> Any:
        """A reader must honour the kind of limit it reports itself, and ReadAllAvailable. No other may be passed."""
        from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

        default = (
            self._reader.getDefaultReadLimit() if hasattr(self._reader, "getDefaultReadLimit") else ReadAllAvailable()
        )
        if isinstance(default, ReadMaxRows):
            return ReadMaxRows(min(default.max_rows, rows_max))
        return default

    def splits(self, start: Offset, end: Offset, parallelism: int) -> list[Split]:
        partitions = list(self._call(self._reader.partitions, dict(start), dict(end)))
        packed = [base64.b64encode(pickle.dumps(p)).decode() for p in partitions]
        count = max(1, min(parallelism, len(packed)))
        cuts = [round(len(packed) * k / count) for k in range(count + 1)]
        place = json.dumps(end, sort_keys=True)
        return [{"first": a, "partitions": packed[a:b], "end": place, "skip": self._skipped} for a, b in pairwise(cuts)]

    def read(self, source_id: str, split: Split) -> ReadResult:
        frames = [pl.DataFrame(schema=self._schema)]
        bad: list[BadRecord] = []
        set_aside: list[BadRecord] = []
        for i, packed in enumerate(split["partitions"], split["first"]):
            partition = pickle.loads(base64.b64decode(packed))
            items = self._call(_drain, self._reader.read, partition)
            result = self._fit(source_id, f"{split['end']}:{i}", items, split.get("skip", ()))
            frames.append(result.frame)
            bad.extend(result.bad)
            set_aside.extend(result.set_aside)
        return ReadResult(pl.concat(frames), tuple(bad), set_aside=tuple(set_aside))


def _distance(start: Offset, end: Offset) -> int:
    """Rows between two offsets, if they look like counters. For display only; 0 when nobody knows."""
    total = 0
    for key, value in end.items():
        before = start.get(key, 0)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            total += _distance(dict(before), dict(value))
        elif isinstance(value, int) and isinstance(before, int):
            total += max(0, value - before)
    return total


class SimpleReaderSource(_ReaderBase):
    """See :func:`simple_reader`."""

    def plan(self, start: Offset, rows_max: int) -> SourceRange | None:
        rows, end = self._call(self._reader.read, dict(start))
        if end == start:
            return None
        return SourceRange(dict(start), dict(end), sum(1 for _ in rows))

    def splits(self, start: Offset, end: Offset, parallelism: int) -> list[Split]:
        return [{"start": dict(start), "end": dict(end), "skip": self._skipped}]

    def read(self, source_id: str, split: Split) -> ReadResult:
        items = self._call(_drain, self._reader.readBetweenOffsets, split["start"], split["end"])
        return self._fit(source_id, json.dumps(split["end"], sort_keys=True), items, split.get("skip", ()))


# ---------------------------------------------------------------- streaming DataFrames


def dataframe(
    sdf: Any,
    *,
    trigger: Mapping[str, Any] | None = None,
    unread_max: int = 4,
    options: Mapping[str, str] | None = None,
) -> DataFrameSource:
    """Any streaming DataFrame of Spark.

    Its micro-batches are spooled as Parquet in ``<checkpoint>/spool/<source id>``, which executors must be able to
    read. Spark waits while ``unread_max`` batches are unread. ``trigger`` is given to ``writeStream.trigger``; with
    ``{"availableNow": True}`` the source ends when the query does. An epoch is made of whole micro-batches: limit
    them in the source (``maxFilesPerTrigger``, ``maxOffsetsPerTrigger``, ...). Without a checkpoint directory the
    spool is a temporary one, and such a job cannot be restarted.
    """
    if not getattr(sdf, "isStreaming", False):
        raise FlowError(
            "dataframe() needs a streaming DataFrame.",
            remedy="Make it with spark.readStream; for stored data use ps.files.",
        )
    return DataFrameSource(sdf, dict(trigger or {}), unread_max, dict(options or {}))


class DataFrameSource(Source):
    """See :func:`dataframe`. Offsets are ``{"batch": number of batches consumed}``."""

    def __init__(self, sdf: Any, trigger: dict[str, Any], unread_max: int, options: dict[str, str]) -> None:
        self._sdf = sdf
        self._schema = spark_schema(sdf.schema)
        self._trigger, self._options, self._unread_max = trigger, options, unread_max
        self._query: Any = None
        self._root = ""
        self._temporary: Scratch | None = None
        self._closing = False
        self._planned = 0
        self._wake = threading.Condition()
        self._rows: dict[int, list[tuple[str, int]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Workers read Parquet; the query stays on the driver."""
        return {"_schema": self._schema, "_sdf": None, "_query": None}

    def schema(self) -> pl.Schema:
        return self._schema

    def initial_offset(self) -> Offset:
        return {"batch": 0}

    # ------------------------------------------------------------ the query that spools

    def open(self, context: SourceContext) -> None:
        base = context.checkpoint
        if base is None:
            self._temporary = open_scratch("spool")
            base = self._temporary.directory
        base = base.removeprefix("file://")
        if "://" in base:
            raise SourceError(
                f"A streaming DataFrame is spooled with renames, which {base} does not have.",
                remedy="Put the checkpoint directory on a shared file system.",
                path=base,
            )
        self._root = os.path.join(os.path.abspath(base), "spool", folder_of(context.source_id))
        make_directories(self._root)
        for name in os.listdir(self._root):
            if name.startswith("_writing-"):
                shutil.rmtree(os.path.join(self._root, name), ignore_errors=True)
        self._closing, self._rows = False, {}
        self._planned = self._deleted()
        writer = self._sdf.writeStream.foreachBatch(self._spool).option(
            "checkpointLocation", os.path.join(self._root, "_spark")
        )
        if self._options:
            writer = writer.options(**self._options)
        if self._trigger:
            writer = writer.trigger(**self._trigger)
        self._query = writer.start()

    def _batch_path(self, batch: int) -> str:
        return os.path.join(self._root, f"batch={batch}")

    def _spool(self, frame: Any, batch: int) -> None:
        """Called by Spark, in a thread of the driver, once for each micro-batch, and again for one it is not sure
        of."""
        with self._wake:
            # What is unread when this batch arrives: all batches before it that no range has taken.
            self._wake.wait_for(lambda: self._closing or batch - self._planned < self._unread_max)
            if self._closing:
                raise RuntimeError("the job is closing; this batch is written after a restart")
        target = self._batch_path(batch)
        if os.path.exists(target) or batch < self._deleted():
            return
        writing = os.path.join(self._root, f"_writing-{batch}")
        shutil.rmtree(writing, ignore_errors=True)
        frame.write.mode("overwrite").parquet("file://" + writing)
        os.rename(writing, target)

    def _deleted(self) -> int:
        """Batches below this number were consumed for good."""
        try:
            with open(os.path.join(self._root, "_deleted")) as file:
                return int(file.read())
        except FileNotFoundError:
            return 0

    def _raise_failure(self) -> None:
        error = self._query.exception() if self._query is not None else None
        if error is not None:
            raise SourceError(
                f"The Spark query behind the source failed: {error}",
                remedy="Correct what it says and start the job again; it goes on from its checkpoint.",
                cause=str(error),
            )

    # ------------------------------------------------------------ driver side

    def _files(self, batch: int) -> list[tuple[str, int]] | None:
        """Part files of a batch with their rows, None when it is not there (yet)."""
        if batch not in self._rows:
            folder = self._batch_path(batch)
            if not os.path.exists(folder):
                return None
            names = sorted(n for n in os.listdir(folder) if n.endswith(".parquet") and not n.startswith(("_", ".")))
            paths = [os.path.join(folder, n) for n in names]
            self._rows[batch] = [(p, int(pq.read_metadata(p).num_rows)) for p in paths]
        return self._rows[batch]

    def plan(self, start: Offset, rows_max: int) -> SourceRange | None:
        batch, rows = start["batch"], 0
        while (files := self._files(batch)) is not None:
            size = sum(n for _, n in files)
            if batch > start["batch"] and rows + size > rows_max:
                break
            batch, rows = batch + 1, rows + size
        if batch == start["batch"]:
            self._raise_failure()
        with self._wake:
            self._planned = max(self._planned, batch)
            self._wake.notify_all()
        return None if batch == start["batch"] else SourceRange(dict(start), {"batch": batch}, max(1, rows))

    def backlog(self, offset: Offset) -> Backlog:
        """Rows of the micro-batches that lie in the spool. What Spark itself has not read yet is not known."""
        rows, batch = 0, offset["batch"]
        while (files := self._files(batch)) is not None:
            rows, batch = rows + sum(n for _, n in files), batch + 1
        return Backlog(rows)

    def exhausted(self, offset: Offset) -> bool:
        if self._query is None or self._query.isActive:
            return False
        self._raise_failure()
        return self._files(offset["batch"]) is None

    def splits(self, start: Offset, end: Offset, parallelism: int) -> list[Split]:
        pieces: list[tuple[str, int]] = []
        for batch in range(start["batch"], end["batch"]):
            files = self._files(batch)
            if files is None:
                raise SourceError(
                    f"Batch {batch} is not in the spool {self._root}.",
                    remedy="The spool was changed by hand; start with a new checkpoint directory.",
                    path=self._batch_path(batch),
                )
            pieces.extend(files)
        return [{"pieces": part} for part in cut(pieces, parallelism)]

    def committed(self, end: Offset) -> None:
        if end["batch"] <= self._deleted():
            return
        # First the number, then the files: a batch Spark is not sure of must not be spooled once more.
        target = os.path.join(self._root, "_deleted")
        with open(target + ".tmp", "w", opener=private_opener) as file:
            file.write(str(end["batch"]))
        os.replace(target + ".tmp", target)
        for name in os.listdir(self._root):
            if name.startswith("batch=") and int(name.removeprefix("batch=")) < end["batch"]:
                shutil.rmtree(os.path.join(self._root, name), ignore_errors=True)
        self._rows = {b: f for b, f in self._rows.items() if b >= end["batch"]}

    def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if self._query is not None:
            self._query.stop()
            self._query = None
        if self._temporary is not None:
            self._temporary.clear()
            self._temporary = None

    def describe(self) -> str:
        return "streaming DataFrame"

    # ------------------------------------------------------------ worker side

    def read(self, source_id: str, split: Split) -> ReadResult:
        frames = [pl.DataFrame(schema=self._schema)]
        for piece in split["pieces"]:
            try:
                # Spark writes timestamps as INT96 unless told otherwise; pyarrow can read them as microseconds.
                table = pq.read_table(
                    piece["path"],
                    columns=list(self._schema),
                    coerce_int96_timestamp_unit="us",
                    use_threads=False,
                    partitioning=None,
                )
            except (OSError, pa.ArrowException) as error:
                raise SourceError(
                    f"{piece['path']} cannot be read: {error}",
                    remedy="The spool must be on a file system that executors see too, and not be changed by hand.",
                    path=piece["path"],
                ) from error
            frame = pl.from_arrow(table.slice(piece["from"], piece["to"] - piece["from"]))
            assert isinstance(frame, pl.DataFrame)
            frames.append(_to_schema(frame, self._schema))
        return ReadResult(pl.concat(frames))


def _to_schema(frame: pl.DataFrame, schema: pl.Schema) -> pl.DataFrame:
    """INT96 comes without its zone: it is UTC."""
    columns = []
    for name, dtype in schema.items():
        have, column = frame.schema[name], pl.col(name)
        if isinstance(dtype, pl.Datetime) and isinstance(have, pl.Datetime) and dtype.time_zone and not have.time_zone:
            column = column.dt.replace_time_zone("UTC")
        columns.append(column.cast(dtype))
    return frame.select(columns)
