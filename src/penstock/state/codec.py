"""The file format of bases and deltas.

::

    magic "PNSK"  | u16 version | u16 reserved | u32 header length | JSON header | Arrow IPC stream (lz4) | u64 XXH3-64

All integers are little-endian. The checksum covers every byte before it: storage that loses or turns a bit is found
out here, by name, before anything is read from the file. The header carries who wrote what (job, stage, kind, epochs,
progress ...) and, as ``slices``, where each slice's rows lie: rows are sorted by slice, so that a container takes only
its own slices.
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Collection, Mapping
from typing import Any, Final, Literal

import numpy as np
import polars as pl
import xxhash

from penstock.errors import CorruptData
from penstock.state.hashing import slice_of
from penstock.state.table import HASH

MAGIC: Final = b"PNSK"
VERSION: Final = 1
_HEAD: Final = struct.Struct("<4sHHI")
_TAIL: Final = struct.Struct("<Q")

Compression = Literal["lz4", "zstd", "uncompressed"]


def sort_by_slice(frame: pl.DataFrame, slices_total: int) -> tuple[pl.DataFrame, dict[int, list[int]]]:
    """The frame with its rows in the order of their slices (stable), and ``{slice: [offset, length]}``."""
    numbers = slice_of(frame.get_column(HASH).to_numpy(), slices_total)
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
    slices_total: int | None = None,
    compression: Compression = "lz4",
) -> bytes:
    """One file. With ``slices_total`` the rows are sorted by slice and the header gets ``slices`` and
    ``slices_total``."""
    header = dict(meta)
    if slices_total is not None:
        frame, index = sort_by_slice(frame, slices_total)
        header["slices_total"] = slices_total
        header["slices"] = {str(number): place for number, place in index.items()}
    header["rows"] = frame.height
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    out = io.BytesIO()
    out.write(_HEAD.pack(MAGIC, VERSION, 0, len(text)))
    out.write(text)
    frame.rechunk().write_ipc_stream(out, compression=compression)
    body = out.getvalue()
    return body + _TAIL.pack(xxhash.xxh3_64_intdigest(body))


def decode(data: bytes, path: str) -> tuple[dict[str, Any], pl.DataFrame]:
    """Header and rows of a file. ``path`` is for the error only. Raises CorruptData unless every byte is as written."""
    meta, start = _check(data, path)
    try:
        frame = pl.read_ipc_stream(io.BytesIO(memoryview(data)[start : -_TAIL.size]))
    except Exception as error:
        raise _corrupt(path, f"its Arrow part cannot be read ({type(error).__name__})") from error
    if frame.height != meta.get("rows"):
        raise _corrupt(path, f"it has {frame.height} rows where its header says {meta.get('rows')}")
    return meta, frame


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


__all__ = ["checksum", "decode", "decode_header", "encode", "select_slices", "sort_by_slice"]
