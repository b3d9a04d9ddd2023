"""Outputs: directories of Parquet, CSV or JSON lines; memory, the console, a function, nothing.

**How an epoch appears.** Workers write parts into ``_staging/<epoch>-<attempt>/``; the driver renames that directory to
``epoch=000000000012``: one atomic operation, so a reader sees all of an epoch or nothing. An epoch that is there
already has been committed before, by an attempt that died before it could say so; its rerun is dropped. Names that
start with ``_`` are invisible to Spark, DuckDB, polars and ``ps.files``, so the directory can be read by any of them
while the job writes it.

Object stores cannot rename. There, parts are written under their final names and a small ``_committed/<epoch>.json``
that lists them is the atomic switch. ``read_output`` reads both layouts and only what is committed.

**Whose directory it is.** ``_penstock.json`` names the job and the sink. A directory that belongs to somebody else,
or holds anything else, is refused when the job starts: mixing two jobs' epochs would lose data without a word.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import io
import json
import os
import re
import shutil
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

import polars as pl
import pyarrow as pa

from penstock.connectors.base import Json, PartRef, Sink, SinkContext
from penstock.connectors.rows import parsable, parse_strings
from penstock.errors import SinkError, StorageFull, UserCodeError

MARKER = "_penstock.json"
STAGING = "_staging"
COMMITTED = "_committed"
LAYOUT_VERSION = 1

_EXTENSIONS = {"parquet": "parquet", "csv": "csv", "jsonl": "jsonl"}
_DATETIME_FORMAT = "%Y-%m-%dT%H:%M:%S%.6f"
_TIME_FORMAT = "%H:%M:%S%.6f"


def parquet(
    path: str | os.PathLike[str], *, durable: bool = True, storage_options: Mapping[str, Any] | None = None
) -> DirectorySink:
    """Parquet files, a directory for each epoch: ``path/epoch=000000000012/part-0.parquet``.

    ``durable=False`` leaves out ``fsync``: faster on slow disks, and a power cut (not a crash of the job) may lose
    epochs.
    """
    return DirectorySink("parquet", path, durable, storage_options)


def csv(
    path: str | os.PathLike[str], *, durable: bool = True, storage_options: Mapping[str, Any] | None = None
) -> DirectorySink:
    """CSV files with a header, a directory for each epoch. Times are ISO 8601 with microseconds; null is an empty
    field."""
    return DirectorySink("csv", path, durable, storage_options)


def jsonl(
    path: str | os.PathLike[str], *, durable: bool = True, storage_options: Mapping[str, Any] | None = None
) -> DirectorySink:
    """JSON lines, a directory for each epoch. Times are ISO 8601 with microseconds; NaN and infinity become null."""
    return DirectorySink("jsonl", path, durable, storage_options)


def epoch_name(epoch: int) -> str:
    return f"epoch={epoch:012d}"


class DirectorySink(Sink):
    """See :func:`parquet`, :func:`csv`, :func:`jsonl`."""

    def __init__(
        self,
        format: str,
        path: str | os.PathLike[str],
        durable: bool = True,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        text = os.fspath(path).removeprefix("file://")
        self.format = format
        self.durable = durable
        self._store: _LocalStore | _RemoteStore = (
            _RemoteStore(text.rstrip("/"), dict(storage_options or {}))
            if "://" in text
            else _LocalStore(os.path.abspath(os.path.expanduser(text)), durable)
        )
        self.path = self._store.root

    def open(self, context: SinkContext) -> None:
        if self.format == "csv":
            for name, dtype in context.schema.items():
                if not parsable(dtype) and not isinstance(dtype, pl.Duration):
                    raise SinkError(
                        f"Sink {context.sink_id!r}: a CSV file cannot hold column {name!r} of type {dtype}.",
                        remedy="Use ps.jsonl or ps.parquet, or convert the column.",
                    )
        with _Guard(self.path):
            self._claim(context)
            self._store.clean()

    def _claim(self, context: SinkContext) -> None:
        marker = _read_marker(self._store)
        wanted = {"job_id": context.job_id, "sink_id": context.sink_id, "kind": self.format}
        if marker is not None:
            if marker.get("job_id") != context.job_id:
                raise SinkError(
                    f"{self.path} holds the output of another job ({marker.get('job_id')}).",
                    remedy="Choose another directory, delete this one, or resume that job with its checkpoint.",
                    path=self.path,
                )
            different = {k: marker.get(k) for k, v in wanted.items() if marker.get(k) != v}
            if different:
                raise SinkError(
                    f"{self.path} belongs to sink {marker.get('sink_id')!r} of this job ({marker.get('kind')}), "
                    f"not to {context.sink_id!r} ({self.format}).",
                    remedy="Give each sink a directory of its own.",
                    path=self.path,
                )
            return
        if self._store.occupied():
            raise SinkError(
                f"{self.path} is not empty and was not written by this job.",
                remedy="Choose another directory, delete it, or resume the job that wrote it with its checkpoint.",
                path=self.path,
            )
        fields = {"version": LAYOUT_VERSION, **wanted, "schema": _pack_schema(context.schema)}
        self._store.put(MARKER, json.dumps(fields, indent=1, sort_keys=True).encode())

    def write_part(self, epoch: int, attempt: int, part: str, frame: pl.DataFrame) -> PartRef | None:
        if frame.height == 0:
            return None
        name = f"part-{part}.{_EXTENSIONS[self.format]}"
        data = encode(self.format, frame)
        with _Guard(self.path):
            file = self._store.put_part(epoch, attempt, name, data)
        return {"file": file, "rows": frame.height, "bytes": len(data)}

    def commit(self, epoch: int, attempt: int, parts: Sequence[PartRef]) -> None:
        with _Guard(self.path):
            self._store.commit(epoch, attempt, [p["file"] for p in parts if p])

    def describe(self) -> str:
        return f"{self.format} in {self.path}"


def encode(format: str, frame: pl.DataFrame) -> bytes:
    """A frame as the bytes of a file. The same rows give the same bytes: no clock, no chunk layout in them."""
    frame = frame.rechunk()
    out = io.BytesIO()
    if format == "parquet":
        frame.write_parquet(out, compression="zstd", statistics=True)
    elif format == "csv":
        frame.with_columns(_plain_times(frame)).write_csv(out)
    else:
        frame.with_columns(_plain_times(frame)).write_ndjson(out)
    return out.getvalue()


def _plain_times(frame: pl.DataFrame) -> list[pl.Expr]:
    """Times in one fixed form; those with a zone in UTC, with a Z."""
    out = []
    for name, dtype in frame.schema.items():
        column = pl.col(name)
        if isinstance(dtype, pl.Datetime):
            zoned = dtype.time_zone is not None
            column = column.dt.convert_time_zone("UTC") if zoned else column
            out.append(column.dt.to_string(_DATETIME_FORMAT + ("Z" if zoned else "")))
        elif isinstance(dtype, pl.Time):
            out.append(column.dt.to_string(_TIME_FORMAT))
        elif isinstance(dtype, pl.Duration):
            out.append(column.dt.total_microseconds())
    return out


def _pack_schema(schema: pl.Schema) -> str:
    arrow = pl.DataFrame(schema=schema).to_arrow(compat_level=pl.CompatLevel.oldest()).schema
    return base64.b64encode(arrow.serialize().to_pybytes()).decode()


def _unpack_schema(packed: str) -> pl.Schema:
    frame = pl.from_arrow(pa.ipc.read_schema(pa.py_buffer(base64.b64decode(packed))).empty_table())
    assert isinstance(frame, pl.DataFrame)
    return frame.schema


def _natural(name: str) -> list[tuple[int, int, str]]:
    """part-2 before part-10."""
    return [(0, int(t), "") if t.isdigit() else (1, 0, t) for t in re.split(r"(\d+)", name) if t]


# ---------------------------------------------------------------- reading back


def read_output(
    path: str | os.PathLike[str], *, epoch_column: str = "epoch", storage_options: Mapping[str, Any] | None = None
) -> pl.DataFrame:
    """All committed epochs of a ``parquet``, ``csv`` or ``jsonl`` sink, in order, with the epoch in a first column."""
    text = os.fspath(path).removeprefix("file://")
    store: _LocalStore | _RemoteStore = (
        _RemoteStore(text.rstrip("/"), dict(storage_options or {}))
        if "://" in text
        else _LocalStore(os.path.abspath(text), False)
    )
    marker = _read_marker(store)
    if marker is None:
        raise SinkError(
            f"{text} is not the output of a Penstock job: it has no {MARKER}.",
            remedy="Check the path; it is the one given to ps.parquet, ps.csv or ps.jsonl.",
            path=text,
        )
    schema = _unpack_schema(marker["schema"])
    if epoch_column in schema:
        raise SinkError(
            f"{text} has a column {epoch_column!r} of its own.",
            remedy="Choose another name for the epochs: read_output(..., epoch_column='_epoch').",
        )
    frames = []
    for epoch, files in store.epochs():
        for file in sorted(files, key=_natural):
            with _Guard(text):
                frame = decode(marker["kind"], store.get(file), schema)
            frames.append(frame.select(pl.lit(epoch, dtype=pl.Int64).alias(epoch_column), pl.all()))
    if not frames:
        return pl.DataFrame(schema={epoch_column: pl.Int64(), **schema})
    return pl.concat(frames)


def decode(format: str, data: bytes, schema: pl.Schema) -> pl.DataFrame:
    if format == "parquet":
        return pl.read_parquet(io.BytesIO(data), hive_partitioning=False).select(list(schema))
    durations = [n for n, t in schema.items() if isinstance(t, pl.Duration)]
    if format == "csv":
        text = pl.read_csv(data, infer_schema=False)
        plain = pl.Schema({n: pl.Int64() if n in durations else t for n, t in schema.items()})
    else:
        plain = pl.Schema({n: pl.Int64() if n in durations else t for n, t in schema.items()})
        text = pl.read_ndjson(data, schema={n: pl.String() if t.is_temporal() else t for n, t in plain.items()})
    frame, misfits = parse_strings(text, plain)
    if misfits:
        raise SinkError(f"A file of the output has been changed: row {misfits[0][0]}, {misfits[0][1]}.")
    units = [
        (pl.col(n) * 1000 if _unit(schema[n]) == "ns" else pl.col(n)) for n in durations if _unit(schema[n]) != "ms"
    ]
    units += [pl.col(n) // 1000 for n in durations if _unit(schema[n]) == "ms"]
    return frame.with_columns(units).cast({n: schema[n] for n in durations}).select(list(schema))


def _unit(dtype: pl.DataType) -> str:
    assert isinstance(dtype, pl.Duration)
    return str(dtype.time_unit)


def _read_marker(store: _LocalStore | _RemoteStore) -> dict[str, Json] | None:
    try:
        marker: dict[str, Json] = json.loads(store.get(MARKER))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        raise SinkError(
            f"{store.root}/{MARKER} is damaged.",
            remedy="Choose another directory, or delete this one.",
            path=store.root,
        ) from None
    return marker


# ---------------------------------------------------------------- stores


class _LocalStore:
    """A directory on a file system with atomic renames."""

    def __init__(self, root: str, durable: bool) -> None:
        self.root = root
        self.durable = durable

    def _at(self, *names: str) -> str:
        return os.path.join(self.root, *names)

    def occupied(self) -> bool:
        return os.path.exists(self.root) and any(not n.startswith(".") for n in os.listdir(self.root))

    def clean(self) -> None:
        """Staging of attempts that died."""
        shutil.rmtree(self._at(STAGING), ignore_errors=True)

    def get(self, name: str) -> bytes:
        with open(self._at(name), "rb") as file:
            return file.read()

    def put(self, name: str, data: bytes) -> None:
        """Write under another name and rename: never a half file, even when two attempts of a task write it at once."""
        target = self._at(name)
        folder, base = os.path.split(target)
        os.makedirs(folder, exist_ok=True)
        temporary = os.path.join(folder, f".{base}.{uuid.uuid4().hex}.tmp")
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                if self.durable:
                    os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            if os.path.exists(temporary):
                os.unlink(temporary)
            raise

    def put_part(self, epoch: int, attempt: int, name: str, data: bytes) -> str:
        self.put(os.path.join(STAGING, f"{epoch}-{attempt}", name), data)
        return name

    def commit(self, epoch: int, attempt: int, files: Sequence[str]) -> None:
        final, staged = self._at(epoch_name(epoch)), self._at(STAGING, f"{epoch}-{attempt}")
        if files and not os.path.exists(final):
            present = set(os.listdir(staged)) if os.path.exists(staged) else set()
            missing = sorted(set(files) - present)
            if missing:
                raise SinkError(
                    f"Epoch {epoch}: {', '.join(missing)} is not in {staged}.",
                    remedy="Executors must see the driver's directory: use a shared file system or an object store.",
                    path=staged,
                )
            for extra in present - set(files):
                os.unlink(os.path.join(staged, extra))
            if self.durable:
                _sync_directory(staged)
            os.rename(staged, final)
            if self.durable:
                _sync_directory(self.root)
        self._drop_staging(epoch)

    def _drop_staging(self, epoch: int) -> None:
        """Of this epoch and all before it: a task that was given up may write when its epoch is long committed."""
        staging = self._at(STAGING)
        for name in os.listdir(staging) if os.path.exists(staging) else ():
            number = name.partition("-")[0]
            if number.isdigit() and int(number) <= epoch:
                shutil.rmtree(os.path.join(staging, name), ignore_errors=True)

    def epochs(self) -> list[tuple[int, list[str]]]:
        out = []
        for name in sorted(n for n in os.listdir(self.root) if n.startswith("epoch=")):
            files = [os.path.join(name, f) for f in os.listdir(self._at(name)) if f.startswith("part-")]
            out.append((int(name.removeprefix("epoch=")), files))
        return out


def _sync_directory(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class _RemoteStore:
    """An object store, through fsspec: no renames, but a single object appears at once."""

    def __init__(self, root: str, options: dict[str, Any]) -> None:
        self.root = root
        self.options = options

    def _fs(self) -> tuple[Any, str]:
        import fsspec

        try:
            fs, inner = fsspec.core.url_to_fs(self.root, **self.options)
        except (ImportError, ValueError) as error:
            raise SinkError(
                f"The address {self.root} cannot be opened: {error}", remedy="Install the fsspec package it needs."
            ) from error
        return fs, str(inner).rstrip("/")

    def occupied(self) -> bool:
        fs, root = self._fs()
        fs.invalidate_cache()
        return bool(fs.exists(root) and fs.find(root))

    def clean(self) -> None:
        """Nothing: parts of dead attempts are in no marker, and go when their epoch is committed."""

    def get(self, name: str) -> bytes:
        fs, root = self._fs()
        return bytes(fs.cat_file(f"{root}/{name}"))

    def put(self, name: str, data: bytes) -> None:
        fs, root = self._fs()
        target = f"{root}/{name}"
        fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        fs.pipe_file(target, data)

    def put_part(self, epoch: int, attempt: int, name: str, data: bytes) -> str:
        # The attempt is in the name: a task of an older one that is still alive cannot overwrite what is committed.
        stem, _, extension = name.rpartition(".")
        file = f"{epoch_name(epoch)}/{stem}.a{attempt}.{extension}"
        self.put(file, data)
        return file

    def commit(self, epoch: int, attempt: int, files: Sequence[str]) -> None:
        fs, root = self._fs()
        marker = f"{COMMITTED}/{epoch:012d}.json"
        if fs.exists(f"{root}/{marker}"):  # by an attempt that died before it could say so, or clean up
            files = json.loads(self.get(marker))["files"]
        elif files:
            self.put(marker, json.dumps({"epoch": epoch, "files": sorted(files, key=_natural)}).encode())
        fs.invalidate_cache()
        listed = {f.rpartition("/")[2] for f in files}
        with contextlib.suppress(OSError):  # what is in no marker costs room and no more: a job must not fail of it
            for name in fs.find(f"{root}/{epoch_name(epoch)}"):
                if str(name).rpartition("/")[2] not in listed:
                    fs.rm_file(name)

    def epochs(self) -> list[tuple[int, list[str]]]:
        fs, root = self._fs()
        fs.invalidate_cache()
        folder = f"{root}/{COMMITTED}"
        out = []
        for name in sorted(fs.find(folder)) if fs.exists(folder) else ():
            marker = json.loads(fs.cat_file(name))
            out.append((int(marker["epoch"]), [str(f) for f in marker["files"]]))
        return out


class _Guard:
    """Names the output in what the world throws while it is written or read."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, OSError):
            return
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(
                f"No room left on the device of {self.path}.",
                remedy="Make room and start the job again: it goes on from its checkpoint.",
                path=self.path,
            ) from error
        raise SinkError(
            f"{self.path} cannot be used: {error}",
            remedy="Check that it is a directory the job and its executors may write to.",
            path=self.path,
        ) from error


# ---------------------------------------------------------------- sinks on the driver


def memory() -> MemorySink:
    """Keep the output in the driver's memory: for tests and notebooks."""
    return MemorySink()


class MemorySink(Sink):
    """See :func:`memory`. ``frame()`` is everything, ``epochs`` the table of each epoch."""

    collects = True

    def __init__(self) -> None:
        self.epochs: dict[int, pl.DataFrame] = {}
        self._schema: pl.Schema | None = None

    def open(self, context: SinkContext) -> None:
        self._schema = context.schema
        if not context.resumed:
            self.epochs.clear()  # another run starts at epoch 1 again

    def write(self, epoch: int, frame: pl.DataFrame) -> None:
        self.epochs.setdefault(epoch, frame)

    def frame(self) -> pl.DataFrame:
        if not self.epochs:
            return pl.DataFrame(schema=self._schema)
        return pl.concat([self.epochs[e] for e in sorted(self.epochs)])

    def describe(self) -> str:
        return "memory"


class _OncePerEpoch(Sink):
    """Collecting sinks with an effect: an epoch this process has done is not done again.

    Epochs come in order, so the highest number is all there is to remember. Across a restart of the driver nobody can
    know whether the effect of the last epoch happened: a user's function gets the epoch number to tell.
    """

    collects = True

    def __init__(self) -> None:
        self._sink_id = type(self).__name__
        self._done = 0

    def open(self, context: SinkContext) -> None:
        self._sink_id = context.sink_id
        if not context.resumed:
            self._done = 0

    def write(self, epoch: int, frame: pl.DataFrame) -> None:
        if epoch > self._done:
            self.effect(epoch, frame)
            self._done = epoch

    def effect(self, epoch: int, frame: pl.DataFrame) -> None:
        raise NotImplementedError


def console(rows: int = 10, *, file: TextIO | None = None) -> ConsoleSink:
    """Print the first rows of each epoch that has any."""
    return ConsoleSink(rows, file)


class ConsoleSink(_OncePerEpoch):
    """See :func:`console`."""

    def __init__(self, rows: int = 10, file: TextIO | None = None) -> None:
        super().__init__()
        self.rows, self._file = rows, file

    def effect(self, epoch: int, frame: pl.DataFrame) -> None:
        if frame.height == 0:
            return
        shown = min(self.rows, frame.height)
        with pl.Config(tbl_hide_dataframe_shape=True, tbl_rows=shown, tbl_hide_column_data_types=True):
            text = str(frame.head(shown))
        more = f" ({frame.height - shown} more rows)" if frame.height > shown else ""
        print(f"{self._sink_id}, epoch {epoch}{more}\n{text}", file=self._file or sys.stdout, flush=True)

    def describe(self) -> str:
        return "console"


def foreach_batch(fn: Callable[[int, pl.DataFrame], object]) -> ForeachSink:
    """Call ``fn(epoch, frame)`` on the driver for each epoch that has rows.

    After a restart the last epochs may come again with the same number and rows: make ``fn`` idempotent by epoch.
    """
    return ForeachSink(fn)


class ForeachSink(_OncePerEpoch):
    """See :func:`foreach_batch`."""

    def __init__(self, fn: Callable[[int, pl.DataFrame], object]) -> None:
        super().__init__()
        self._fn = fn

    def effect(self, epoch: int, frame: pl.DataFrame) -> None:
        call_user(self._fn, self._sink_id, epoch, frame)

    def describe(self) -> str:
        return f"function {getattr(self._fn, '__name__', type(self._fn).__name__)}"


def call_user(fn: Callable[[int, Any], object], sink_id: str, epoch: int, table: Any) -> None:
    try:
        fn(epoch, table)
    except Exception as error:
        raise UserCodeError(
            f"The function of sink {sink_id!r} failed in epoch {epoch}: {type(error).__name__}: {error}",
            remedy="Correct it and start the job again: the epoch is given to it once more.",
            operator=sink_id,
            epoch=epoch,
            cause=repr(error),
        ) from error


def discard() -> DiscardSink:
    """Count rows on the workers and drop them: for benchmarks."""
    return DiscardSink()


class DiscardSink(Sink):
    """See :func:`discard`. ``rows`` is the number dropped so far."""

    def __init__(self) -> None:
        self.rows = 0
        self._done = 0

    def open(self, context: SinkContext) -> None:
        if not context.resumed:
            self.rows = self._done = 0

    def write_part(self, epoch: int, attempt: int, part: str, frame: pl.DataFrame) -> PartRef | None:
        return {"rows": frame.height} if frame.height else None

    def commit(self, epoch: int, attempt: int, parts: Sequence[PartRef]) -> None:
        if epoch > self._done:
            self.rows += sum(p["rows"] for p in parts if p)
            self._done = epoch

    def describe(self) -> str:
        return "nowhere (counted)"
