"""The file format of bases and deltas.

::

    magic "PNSK"  | u16 version | u16 reserved | u32 header length | JSON header | Arrow IPC stream (lz4) | u64 XXH3-64

All integers are little-endian. The checksum covers every byte before it, and is checked before anything else is read:
an error of the storage is reported here, with the name of the file.

The header says who wrote what (job, stage, kind, epochs, progress ...). Rows are sorted by slice, and ``slices`` in the
header says where the rows of each slice lie, so that a container reads only its own slices. A large file has several
record batches, and no slice is divided between two of them. ``batches`` in the header has the number of rows of each
batch. A reader that wants a few slices decompresses only the batches that these slices are in.
"""

from __future__ import annotations

import io
import json
import struct
from bisect import bisect_left
from collections.abc import Collection, Mapping
from typing import Any, Final, Literal

import numpy as np
import polars as pl
import pyarrow as pa
import xxhash

from penstock.errors import CorruptData
from penstock.state.slicemap import SliceMap
from penstock.state.table import HASH

MAGIC: Final = b"PNSK"
VERSION: Final = 1
_HEAD: Final = struct.Struct("<4sHHI")
_TAIL: Final = struct.Struct("<Q")

BATCH_ROWS: Final = 1 << 14
"""Every record batch but the last has at least this many rows."""

Compression = Literal["lz4", "zstd", "uncompressed"]


def sort_by_slice(frame: pl.DataFrame, slicemap: SliceMap) -> tuple[pl.DataFrame, dict[int, list[int]]]:
    """The frame with its rows in the order of their slices, and where each slice lies: ``{slice: [offset, length]}``.
    Rows of one slice keep their order."""
    numbers = slicemap.of(frame.get_column(HASH).to_numpy())
    if numbers.size and not bool((numbers[1:] >= numbers[:-1]).all()):
        order = np.argsort(numbers, kind="stable")
        frame = frame[order]
        numbers = numbers[order]
    present, offsets, lengths = np.unique(numbers, return_index=True, return_counts=True)
    triples = zip(present.tolist(), offsets.tolist(), lengths.tolist(), strict=True)
    return frame, {number: [offset, length] for number, offset, length in triples}


def encode(
    meta: Mapping[str, Any],
    frame: pl.DataFrame,
    *,
    slicemap: SliceMap | None = None,
    compression: Compression = "lz4",
) -> bytes:
    """The bytes of one file.

    With ``slicemap``, the rows are sorted by slice, and ``slices`` and ``slices_total`` are added to the header.
    Without it, ``slices`` in ``meta``, if given, must say how the rows lie. A large file gets ``batches`` in its
    header."""
    header = dict(meta)
    if slicemap is not None:
        frame, index = sort_by_slice(frame, slicemap)
        header["slices_total"] = slicemap.count
        header["slices"] = {str(number): place for number, place in index.items()}
    batches = _cuts(frame, [offset + length for offset, length in header.get("slices", {}).values()])
    if batches:
        header["batches"] = batches
    header["rows"] = frame.height
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    out = io.BytesIO()
    out.write(_HEAD.pack(MAGIC, VERSION, 0, len(text)))
    out.write(text)
    if batches:
        _write_batches(out, frame, batches, compression)
    else:
        frame.rechunk().write_ipc_stream(out, compression=compression)
    body = out.getvalue()
    return body + _TAIL.pack(xxhash.xxh3_64_intdigest(body))


def _cuts(frame: pl.DataFrame, ends: list[int]) -> list[int]:
    """The number of rows of each record batch. Batches end only at one of ``ends``. Empty: the file stays in one
    piece."""
    if any(dtype in (pl.Categorical, pl.Enum) for dtype in frame.dtypes):
        return []  # every batch would need the dictionary
    rows: list[int] = []
    begin = 0
    for end in ends:
        if end - begin >= BATCH_ROWS or (end == frame.height and rows):
            rows.append(end - begin)
            begin = end
    return rows if len(rows) > 1 else []


def _write_batches(out: io.BytesIO, frame: pl.DataFrame, batches: list[int], compression: Compression) -> None:
    # Strings as offsets and bytes: with views, each batch would carry the text of all batches.
    table: Any = frame.rechunk().to_arrow(compat_level=pl.CompatLevel.oldest())
    options = pa.ipc.IpcWriteOptions(compression=None if compression == "uncompressed" else compression)
    with pa.ipc.new_stream(out, table.schema, options=options) as writer:
        begin = 0
        for rows in batches:
            writer.write_table(table.slice(begin, rows))
            begin += rows


def decode(data: bytes, path: str, only: Collection[int] | None = None) -> tuple[dict[str, Any], pl.DataFrame]:
    """Header and rows of a file. Raises CorruptData unless every byte is as it was written. ``path`` is for the error.

    ``only``: the slices that the caller wants. All their rows are there; other rows may be there or not, as ``slices``
    in the returned header says.
    """
    return Opened(data, path).read(only)


class Opened:
    """A file whose checksum was checked, to be read a few slices at a time."""

    def __init__(self, data: bytes, path: str) -> None:
        self.path = path
        self.meta, start = _check(data, path)
        self._body = memoryview(data)[start : -_TAIL.size]
        self._frame: pl.DataFrame | None = None
        """All rows of a file that is in one piece, once they were read."""

    def read(self, only: Collection[int] | None = None) -> tuple[dict[str, Any], pl.DataFrame]:
        """Header and rows, as ``decode`` gives them."""
        try:
            if only is not None and "batches" in self.meta:
                return _read_batches(self.meta, self._body, only)
            if self._frame is None:
                self._frame = pl.read_ipc_stream(io.BytesIO(self._body))
            frame = self._frame
        except Exception as error:
            raise _corrupt(self.path, f"its Arrow part cannot be read ({type(error).__name__})") from error
        if frame.height != self.meta.get("rows"):
            raise _corrupt(self.path, f"it has {frame.height} rows where its header says {self.meta.get('rows')}")
        return self.meta, frame

    def first(self, slices: Collection[int], rows_max: int) -> list[int]:
        """The first of these slices, up to about ``rows_max`` rows. All of them if the file is in one piece."""
        if "batches" not in self.meta:
            return sorted(slices)
        chosen: list[int] = []
        rows = 0
        for number in sorted(slices):
            rows += self.meta["slices"].get(str(number), (0, 0))[1]
            if chosen and rows > rows_max:
                break
            chosen.append(number)
        return chosen


def _read_batches(meta: dict[str, Any], body: memoryview, only: Collection[int]) -> tuple[dict[str, Any], pl.DataFrame]:
    """Header and rows of the batches that some slices are in. Other batches are not decompressed."""
    reader = pa.BufferReader(pa.py_buffer(body))
    schema = pa.ipc.read_schema(pa.ipc.read_message(reader))
    index: dict[str, list[int]] = meta["slices"]
    wanted = sorted(index[str(number)][0] for number in only if str(number) in index)
    batches, begin, there = [], 0, 0
    kept: dict[str, list[int]] = {}
    for rows in meta["batches"]:
        message = pa.ipc.read_message(reader)
        if bisect_left(wanted, begin) < bisect_left(wanted, begin + rows):
            batches.append(pa.ipc.read_record_batch(message, schema))
            inside = {number: place for number, place in index.items() if begin <= place[0] < begin + rows}
            kept |= {number: [offset - begin + there, length] for number, (offset, length) in inside.items()}
            there += rows
        begin += rows
    frame = pl.DataFrame(pa.Table.from_batches(batches, schema))
    return {**meta, "slices": kept, "rows": frame.height}, frame


def read_slices(data: bytes, path: str, wanted: Collection[int]) -> pl.DataFrame:
    """The rows of some slices of a file."""
    meta, frame = decode(data, path, wanted)
    return select_slices(meta, frame, wanted)


def decode_header(data: bytes, path: str) -> dict[str, Any]:
    """The header of a file. The whole file is checked, as by ``decode``, but its rows are not read."""
    return _check(data, path)[0]


def checksum(data: bytes) -> str:
    """The checksum of a file's bytes, as manifests keep it."""
    return xxhash.xxh3_64_hexdigest(data)


def select_slices(meta: Mapping[str, Any], frame: pl.DataFrame, wanted: Collection[int]) -> pl.DataFrame:
    """The rows of the wanted slices. ``slices`` in the header says where they are."""
    index: Mapping[str, list[int]] = meta["slices"]
    parts = [frame.slice(*index[str(number)]) for number in sorted(wanted) if str(number) in index]
    if not parts:
        return frame.clear()
    return parts[0] if len(parts) == 1 else pl.concat(parts, rechunk=False)


def _check(data: bytes, path: str) -> tuple[dict[str, Any], int]:
    if len(data) < _HEAD.size + _TAIL.size:
        raise _corrupt(path, f"it has only {len(data)} bytes")
    magic, version, _, length = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise _corrupt(path, "it does not begin like a Penstock state file")
    (expected,) = _TAIL.unpack_from(data, len(data) - _TAIL.size)
    if xxhash.xxh3_64_intdigest(memoryview(data)[: -_TAIL.size]) != expected:
        raise _corrupt(path, "its checksum is wrong")
    if version != VERSION:
        raise CorruptData(
            f"State file {path} has format version {version}; this Penstock reads version {VERSION}.",
            remedy="Read it with the Penstock version that wrote it.",
            path=path,
        )
    start = _HEAD.size + length
    try:
        meta = json.loads(data[_HEAD.size : start])
    except ValueError as error:
        raise _corrupt(path, "its header is not JSON") from error
    if not isinstance(meta, dict) or start > len(data) - _TAIL.size:
        raise _corrupt(path, "its header is not as long as it says")
    return meta, start


def _corrupt(path: str, why: str) -> CorruptData:
    return CorruptData(
        f"State file {path} is damaged: {why}.",
        remedy="Restore the file from a copy, or start again from an older checkpoint.",
        path=path,
    )


__all__ = ["checksum", "decode", "decode_header", "encode", "read_slices", "select_slices", "sort_by_slice"]
