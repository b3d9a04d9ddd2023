"""Where input files are: local disks by plain calls, everything else by fsspec.

A directory stands for everything below it, a pattern for what matches. Symbolic links to directories are not followed
below either, so that a link to a parent does not give each file many times. Only regular files count: a pipe or a
socket in a directory is not opened, since that could wait for ever.

A local path may hold bytes that are no UTF-8. Python keeps them as surrogates, which neither JSON nor a column of
strings takes: ``pack_path`` makes text for the log and for messages, ``unpack_path`` the path again.
"""

from __future__ import annotations

import glob
import gzip
import os
import stat
import urllib.parse
import zlib
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import SourceError

_PACKED: Final = "bytes:"

CHUNK_BYTES: Final = 1 << 20
"""Bytes of a packed file that are unpacked at a time while it is checked."""


@dataclass(frozen=True)
class FoundFile:
    path: str
    size: int


def is_local(path: str) -> bool:
    return "://" not in path


def absolute(pattern: str) -> str:
    """Workers may run in another directory."""
    pattern = pattern.removeprefix("file://")
    return os.path.abspath(os.path.expanduser(pattern)) if is_local(pattern) else pattern


def pack_path(path: str) -> str:
    """The path as text that any encoder takes. Most paths are such text already."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return _PACKED + urllib.parse.quote_from_bytes(os.fsencode(path))
    return path


def unpack_path(text: str) -> str:
    if text.startswith(_PACKED):
        return os.fsdecode(urllib.parse.unquote_to_bytes(text.removeprefix(_PACKED)))
    return text


class Storage:
    """The few things asked of a file system."""

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

    def list(self, pattern: str, known: Container[str] = ()) -> Iterator[FoundFile]:
        """The files that a path, glob or directory stands for, in no special order, without the known ones.

        A source looks for new files all the time, and does not look at each old one again: old ones never change.
        """
        if not is_local(pattern):
            yield from (file for file in self._list_remote(pattern) if file.path not in known)
            return
        exact = os.path.lexists(pattern)
        for found in glob.iglob(glob.escape(pattern) if exact else pattern, recursive=True):
            if found in known or (not exact and _behind_a_link(pattern, found)):
                continue
            if os.path.isdir(found):
                for folder, subfolders, names in os.walk(found):
                    subfolders[:] = [s for s in subfolders if not _ignored(s)]
                    paths = (os.path.join(folder, n) for n in names if not _ignored(n))
                    yield from _stat_all(path for path in paths if path not in known)
            elif not _ignored(os.path.basename(found)):
                yield from _stat_all([found])

    def _list_remote(self, pattern: str) -> Iterator[FoundFile]:
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
                        yield FoundFile(fs.unstrip_protocol(name), int(info["size"]))

    def size(self, path: str) -> int | None:
        """The file's size now, None when it is gone."""
        try:
            if is_local(path):
                return os.stat(path).st_size
            fs, inner = self._fs(path)
            return int(fs.size(inner))
        except FileNotFoundError:
            return None

    def check(self, path: str, size: int) -> None:
        """Refuse a file that is not what it was when its range was logged."""
        now = self.size(path)
        if now is None:
            raise SourceError(
                f"{pack_path(path)} is gone, but the log says it is part of the input.",
                remedy="Put the file back as it was. Or stop the job and leave out the rest of the file: "
                f"penstock skip JOB --file {pack_path(path)}",
                path=pack_path(path),
                unreadable=True,
            )
        if now != size:
            raise SourceError(
                f"{pack_path(path)} has {now} bytes now and had {size} when it was first seen: visible files must not "
                "change.",
                remedy="Put the old content back, and write new content to other files elsewhere and rename them here. "
                f"Or leave out the rest of the file: penstock skip JOB --file {pack_path(path)}",
                path=pack_path(path),
                unreadable=True,
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

    def guard(self, path: str) -> Guard:
        return Guard(path)


class Guard:
    """Turns what the world throws while a file is read into a SourceError with its path.

    The evidence ``unreadable`` says that the file itself is the cause, and not a network or a disk that may come back.
    """

    def __init__(self, path: str) -> None:
        self.path = pack_path(path)

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        unreadable = True
        if isinstance(error, FileNotFoundError):
            remedy = f"Put the file back as it was, or leave it out: penstock skip JOB --file {self.path}"
        elif isinstance(error, PermissionError):
            remedy = "Give the user that runs the job (and its executors) the right to read it."
        elif isinstance(error, OSError | EOFError | zlib.error | pa.ArrowException | pl.exceptions.PolarsError):
            own = EOFError | zlib.error | gzip.BadGzipFile | pa.ArrowInvalid | pl.exceptions.PolarsError
            parser = isinstance(error, OSError) and error.errno is None and is_local(self.path)  # of Arrow
            unreadable = isinstance(error, own) or parser
            remedy = (
                "Check that the file is complete and of the format the source expects. To go on without it: "
                f'penstock skip JOB --file {self.path}, or on_unreadable="dead_letter".'
            )
        else:
            return
        detail = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise SourceError(
            f"{self.path} cannot be read: {detail}", remedy=remedy, path=self.path, unreadable=unreadable
        ) from error


def _behind_a_link(pattern: str, found: str) -> bool:
    """Did a ``**`` of the pattern go through a link to a directory? Then the file has another name that is shorter."""
    fixed, several, _ = pattern.partition("**")
    if not several:
        return False
    folder = os.path.dirname(found)
    while len(folder) >= len(fixed) and folder != os.path.dirname(folder):
        if os.path.islink(folder):
            return True
        folder = os.path.dirname(folder)
    return False


def _ignored(name: str) -> bool:
    return name.startswith(("_", ".")) or name.endswith(".tmp")


def _stat_all(paths: Iterable[str]) -> Iterator[FoundFile]:
    for path in paths:
        try:
            found = os.stat(path)
        except OSError as error:
            if isinstance(error, PermissionError):
                raise
            continue  # renamed between listing and looking, or a link that leads nowhere: not visible, then
        if stat.S_ISREG(found.st_mode):
            yield FoundFile(path, found.st_size)


# ---------------------------------------------------------------- packed files


def unpacked_chunks(handle: Any) -> Iterator[bytes]:
    """What a gzip file holds, all its members. Raises when it is cut off, damaged, or followed by something else."""
    with gzip.GzipFile(fileobj=handle) as unpacked:
        while chunk := unpacked.read(CHUNK_BYTES):
            yield chunk


# ---------------------------------------------------------------- Parquet


def read_parquet_rows(storage: Storage, path: str, first: int, last: int, columns: list[str]) -> pl.DataFrame:
    """Rows ``first .. last-1``. Only the row groups that hold them are read."""
    with storage.guard(path):
        if is_local(path) and pack_path(path) == path:
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


def parquet_schema(storage: Storage, path: str) -> pl.Schema:
    with storage.guard(path):
        if is_local(path) and pack_path(path) == path:
            return pl.Schema(pl.read_parquet_schema(path))
        with storage.open(path) as handle:
            frame = pl.from_arrow(pq.read_schema(handle).empty_table())
            assert isinstance(frame, pl.DataFrame)
            return frame.schema


def check_parquet(storage: Storage, path: str, columns: list[str]) -> None:
    """Read the whole file once, a row group at a time."""
    with storage.guard(path), storage.open(path) as handle:
        file = pq.ParquetFile(handle)
        for group in range(file.num_row_groups):
            file.read_row_group(group, columns=columns, use_threads=False)
