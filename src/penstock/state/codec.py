"""The file format of bases and deltas.

::

    magic "PNSK"  | u16 version | u16 reserved | u32 header length | JSON header | Arrow IPC stream (lz4) | u64 XXH3-64

All integers are little-endian. The checksum covers every byte before it: storage that loses or turns a bit is found
out here, by name, before anything is read from the file. The header carries who wrote what (job, stage, kind, epochs,
progress ...) and, as ``slices``, where each slice's rows lie: rows are sorted by slice, so that a container takes only
its own slices. A large file is several record batches, none with a part of a slice; their rows are in the header as
``batches``. Who wants a few slices decompresses only the batches that they are in.
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
"""A record batch has at least so many rows, but for the last."""

Compression = Literal["lz4", "zstd", "uncompressed"]


def sort_by_slice(frame: pl.DataFrame, slicemap: SliceMap) -> tuple[pl.DataFrame, dict[int, list[int]]]:
    """The frame with its rows in the order of their slices (stable), and ``{slice: [offset, length]}``."""
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
    """One file. With ``slicemap`` the rows are sorted by slice and the header gets ``slices`` and ``slices_total``;
    without, they are as ``slices`` in ``meta`` says, if it does. Of a large file the header gets ``batches``."""
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
    """Rows of each record batch, with cuts at these places alone; none for a file that stays in one piece."""
    if any(dtype in (pl.Categorical, pl.Enum) for dtype in frame.dtypes):
        return []  # a dictionary, which every batch needs
    rows: list[int] = []
    begin = 0
    for end in ends:
        if end - begin >= BATCH_ROWS or (end == frame.height and rows):
            rows.append(end - begin)
            begin = end
    return rows if len(rows) > 1 else []


def _write_batches(out: io.BytesIO, frame: pl.DataFrame, batches: list[int], compression: Compression) -> None:
    # Not as views: of those, each batch would carry the text of all.
    table: Any = frame.rechunk().to_arrow(compat_level=pl.CompatLevel.oldest())
    options = pa.ipc.IpcWriteOptions(compression=None if compression == "uncompressed" else compression)
    with pa.ipc.new_stream(out, table.schema, options=options) as writer:
        begin = 0
        for rows in batches:
            writer.write_table(table.slice(begin, rows))
            begin += rows


def decode(data: bytes, path: str, only: Collection[int] | None = None) -> tuple[dict[str, Any], pl.DataFrame]:
    """Header and rows of a file. ``path`` is for the error only. Raises CorruptData unless every byte is as written.

    ``only``: of these slices all rows, of others some or none; ``slices`` in the header tells what is there.
    """
    return Opened(data, path).read(only)


class Opened:
    """A file that was checked, to be read some slices at a time."""

    def __init__(self, data: bytes, path: str) -> None:
        self.path = path
        self.meta, start = _check(data, path)
        self._body = memoryview(data)[start : -_TAIL.size]
        self._frame: pl.DataFrame | None = None
        """All rows of a file in one piece, once they were read."""

    def read(self, only: Collection[int] | None = None) -> tuple[dict[str, Any], pl.DataFrame]:
        """As ``decode``."""
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
        """Of these slices the first few, with about so many rows in all; of a file in one piece, all."""
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
    """The batches that some slices are in: a message that is not wanted is not decompressed."""
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
    """The header of a whole file, checked like ``decode``, without reading its rows."""
    return _check(data, path)[0]


def checksum(data: bytes) -> str:
    """A name for these exact bytes, kept in manifests."""
    return xxhash.xxh3_64_hexdigest(data)


def select_slices(meta: Mapping[str, Any], frame: pl.DataFrame, wanted: Collection[int]) -> pl.DataFrame:
    """The rows of the wanted slices, by the header's index."""
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
