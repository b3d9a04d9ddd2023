"""A stable, vectorised hash of key columns.

Every process, on every machine and in every version, must send a key to the same slice: the hash is part of the
checkpoint format. It is therefore written out here, over little-endian bytes, instead of taken from a library whose
next release may change it (polars' and Python's own hashes promise nothing). ``tests/unit/test_state_hashing.py``
holds golden values; if one of them changes, every existing checkpoint becomes unreadable.

The definition, for one column:

- integers, booleans, dates, times, datetimes and durations: ``mix(v ^ SEED_INT)`` with ``v`` the physical value as a
  64-bit two's complement word, so that Int32 5 and Int64 5 agree;
- floats: ``mix(bits ^ SEED_FLOAT)`` of the float64 bits, with one zero and one NaN;
- strings and binary: ``h = SEED_BYTES ^ (length * K1)``, then for every 8-byte little-endian word (the last padded
  with zeros) ``h = (h ^ w) * K2; h ^= h >> 32``, then ``mix(h)``. Above ``LONG_BYTES`` the words are replaced by the
  one word XXH3-64 of the bytes: the loop over words stays short however long a single key is;
- null: ``NULL_HASH``.

Several columns: ``h = mix(h * K3 + next)``, which depends on their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
import polars as pl
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from penstock.errors import FlowError

U64 = NDArray[np.uint64]

K1: Final = np.uint64(0x9E3779B97F4A7C15)
K2: Final = np.uint64(0xD6E8FEB86659FD93)
K3: Final = np.uint64(0xA0761D6478BD642F)
MIX_A: Final = np.uint64(0xFF51AFD7ED558CCD)
MIX_B: Final = np.uint64(0xC4CEB9FE1A85EC53)
SEED_INT: Final = np.uint64(0x2545F4914F6CDD1D)
SEED_FLOAT: Final = np.uint64(0x1B873593CC9E2D51)
SEED_BYTES: Final = np.uint64(0x8EBC6AF09C88C6E3)
NULL_HASH: Final = np.uint64(0x6C62272E07BB0142)
NO_COLUMNS_HASH: Final = np.uint64(0x27D4EB2F165667C5)
NAN_BITS: Final = np.uint64(0x7FF8000000000000)

LONG_BYTES: Final = 128
"""Longer values are hashed by XXH3."""
INLINE_BYTES: Final = 12
"""Values up to this length lie inside the 16-byte views of polars."""
BLOCK_ROWS: Final = 8192
"""Rows that are hashed together. Temporaries of this size stay in the cache, which is several times as fast."""

_32: Final = np.uint64(32)
_33: Final = np.uint64(33)
_LENGTH: Final = np.uint64(0xFFFFFFFF)


def hash_columns(frame: pl.DataFrame, columns: Sequence[str]) -> U64:
    """The 64-bit hash of each row's ``columns``, in their order. No columns: one constant for every row."""
    if not columns:
        return np.full(frame.height, NO_COLUMNS_HASH, dtype=np.uint64)
    hashes = _hash_series(frame.get_column(columns[0]))
    for name in columns[1:]:
        hashes *= K3
        hashes += _hash_series(frame.get_column(name))
        _mix(hashes)
    return hashes


@lru_cache
def hashable(dtype: pl.DataType) -> bool:
    """True when a column of this type may be part of a key."""
    return (
        (dtype.is_integer() and dtype not in _WIDE)
        or dtype.is_float()
        or dtype.is_temporal()
        or dtype in (pl.Boolean, pl.String, pl.Binary, pl.Categorical, pl.Enum, pl.Null)
    )


_WIDE: Final = tuple(t for t in (getattr(pl, name, None) for name in ("Int128", "UInt128")) if t is not None)


def _mix(h: U64) -> None:
    """Murmur3's 64-bit finaliser, in place: every input bit reaches every output bit."""
    h ^= h >> _33
    h *= MIX_A
    h ^= h >> _33
    h *= MIX_B
    h ^= h >> _33


def _hash_series(series: pl.Series) -> U64:
    dtype = series.dtype
    if not hashable(dtype):
        raise FlowError(
            f"Column {series.name!r} of type {dtype} cannot be a key.",
            remedy="Use numbers, strings, binary, booleans, dates or times; cast or unpack the column first.",
            column=series.name,
        )
    if dtype == pl.Null:
        return np.full(series.len(), NULL_HASH, dtype=np.uint64)
    if dtype in (pl.Categorical, pl.Enum):
        series = series.cast(pl.String)
    nulls = series.is_null().to_numpy() if series.null_count() else None
    if series.dtype in (pl.String, pl.Binary):
        hashes = _hash_bytes(series)
    elif dtype.is_float():
        hashes = _hash_floats(series)
    else:
        hashes = _hash_integers(series)
    if nulls is not None:
        hashes[nulls] = NULL_HASH
    return hashes


def _without_nulls(series: pl.Series) -> pl.Series:
    return series.fill_null(0) if series.null_count() else series


def _hash_integers(series: pl.Series) -> U64:
    if series.dtype == pl.Boolean:
        series = series.cast(pl.UInt8)
    elif not series.dtype.is_integer():
        series = series.to_physical()
    values = _without_nulls(series).to_numpy()
    # To 64 bits first (sign-extended), to unsigned afterwards: -1 is the same key in every width.
    words = values if values.dtype == np.uint64 else values.astype(np.int64, copy=False).view(np.uint64)
    hashes: U64 = words ^ SEED_INT
    _mix(hashes)
    return hashes


def _hash_floats(series: pl.Series) -> U64:
    values = _without_nulls(series.cast(pl.Float64)).to_numpy() + 0.0  # -0.0 + 0.0 is 0.0; always a fresh array
    hashes: U64 = values.view(np.uint64)
    hashes[np.isnan(values)] = NAN_BITS
    hashes ^= SEED_FLOAT
    _mix(hashes)
    return hashes


def _hash_bytes(series: pl.Series) -> U64:
    """Hashes of strings or binary values. Most keys have at most 12 bytes, which lie inside the views: there is nothing
    to gather for them."""
    low, high = _views(series)
    hashes: U64 = np.empty(series.len(), dtype=np.uint64)
    for begin in range(0, hashes.size, BLOCK_ROWS):
        block = slice(begin, begin + BLOCK_ROWS)
        hashes[block] = _hash_inline(low[block], high[block])
    outside = np.flatnonzero((low & _LENGTH) > INLINE_BYTES)
    if outside.size:
        hashes[outside] = _hash_gathered(series.gather(outside) if outside.size < hashes.size else series)
    return hashes


def _views(series: pl.Series) -> tuple[U64, U64]:
    """Both halves of each Arrow view: the length with the first 4 bytes, and the next 8 bytes. Unused bytes are
    zero."""
    array: Any = series.rechunk().to_arrow(compat_level=pl.CompatLevel.newest())
    if not len(array):
        return np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.uint64)
    words = np.frombuffer(array.buffers()[1], dtype="<u8", count=2 * (array.offset + len(array)))
    pairs = words.astype(np.uint64, copy=False).reshape(-1, 2)[array.offset :]
    return pairs[:, 0], pairs[:, 1]


def _hash_inline(low: U64, high: U64) -> U64:
    """Hashes of values of at most 12 bytes, from their views. For longer values the result means nothing."""
    lengths = low & _LENGTH
    hashes: U64 = lengths * K1
    hashes ^= SEED_BYTES
    first = low >> _32
    first |= high << _32
    first ^= hashes
    first *= K2
    first ^= first >> _32
    np.copyto(hashes, first, where=lengths > 0)
    second = high >> _32
    second ^= first
    second *= K2
    second ^= second >> _32
    np.copyto(hashes, second, where=lengths > 8)
    _mix(hashes)
    return hashes


def _hash_gathered(series: pl.Series) -> U64:
    """Hashes of values of any length, from words gathered out of the data buffer."""
    starts, lengths, data = _byte_layout(series)
    words = _Words(data)
    hashes: U64 = np.empty(lengths.size, dtype=np.uint64)
    for begin in range(0, lengths.size, BLOCK_ROWS):
        block = slice(begin, begin + BLOCK_ROWS)
        hashes[block] = _hash_block(words, data, starts[block], lengths[block])
    return hashes


def _hash_block(words: _Words, data: NDArray[np.uint8], starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> U64:
    hashes: U64 = lengths.astype(np.uint64)
    hashes *= K1
    hashes ^= SEED_BYTES
    shortest, longest = int(lengths.min()), int(lengths.max())
    every = shortest > 0 and longest <= LONG_BYTES
    rows = None if every else np.flatnonzero((lengths > 0) & (lengths <= LONG_BYTES))
    _absorb_words(hashes, words, starts, lengths, rows)
    if longest > LONG_BYTES:
        _absorb_long(hashes, data, starts, lengths)
    _mix(hashes)
    return hashes


def _absorb_words(
    hashes: U64, words: _Words, starts: NDArray[np.int64], lengths: NDArray[np.int64], rows: NDArray[np.intp] | None
) -> None:
    """Mix the words of each value into its hash. ``rows``: only these; None: every row. Each turn of the loop takes one
    word of every row that still has bytes."""
    whole = rows is None
    at = starts if rows is None else starts[rows]
    left = lengths if rows is None else lengths[rows]
    h = hashes if rows is None else hashes[rows]
    while h.size:
        h ^= words.take(at, left)
        h *= K2
        h ^= h >> _32
        if not whole:
            hashes[rows] = h
        more = np.flatnonzero(left > 8)
        if not more.size:
            return
        rows = more if rows is None else rows[more]
        whole = False
        at, left, h = at[more] + 8, left[more] - 8, h[more]


def _absorb_long(hashes: U64, data: NDArray[np.uint8], starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
    """Mix the XXH3 of each long value into its hash."""
    rows = np.flatnonzero(lengths > LONG_BYTES)
    view = data.data
    ends = starts[rows] + lengths[rows]
    digests = [xxhash.xxh3_64_intdigest(view[a:b]) for a, b in zip(starts[rows].tolist(), ends.tolist(), strict=True)]
    h = hashes[rows] ^ np.array(digests, dtype=np.uint64)
    h *= K2
    h ^= h >> _32
    hashes[rows] = h


class _Words:
    """Reads 8 bytes at any address out of a byte buffer, for many addresses at once.

    numpy is slow at unaligned reads, so each read is put together from the two aligned words that it lies in."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        count = data.size // 8 + 2
        padded = np.zeros(count * 8, dtype=np.uint8)
        padded[: data.size] = data
        self._words: U64 = padded.view("<u8").astype(np.uint64, copy=False)

    def take(self, at: NDArray[np.int64], left: NDArray[np.int64]) -> U64:
        """The word at each address. Of a word only the first ``left`` bytes count; the others are zero."""
        index = at >> 3
        shift = (at & 7).astype(np.uint64)
        shift <<= np.uint64(3)
        low = self._words.take(index)
        low >>= shift
        index += 1
        high = self._words.take(index)
        # x << (64 - shift), in two steps: for shift 0 it is a shift by 64, which is undefined.
        high <<= np.uint64(1)
        np.subtract(np.uint64(63), shift, out=shift)
        high <<= shift
        low |= high
        unused = np.maximum(8 - left, 0).astype(np.uint64)
        unused <<= np.uint64(3)
        mask = np.uint64(0xFFFFFFFFFFFFFFFF) >> unused
        low &= mask
        return low


def _byte_layout(series: pl.Series) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8]]:
    """Start and length of every value, and the byte buffer that they are in. A null has length 0."""
    if series.n_chunks() > 1:
        series = series.rechunk()
    array: Any = series.to_arrow()
    wanted = pa.large_string() if series.dtype == pl.String else pa.large_binary()
    if array.type != wanted:
        array = array.cast(wanted)
    _, offset_buffer, data_buffer = array.buffers()
    n = len(array)
    if n == 0 or offset_buffer is None:
        empty = np.zeros(0, dtype=np.int64)
        return empty, empty, np.zeros(0, dtype=np.uint8)
    offsets = np.frombuffer(offset_buffer, dtype=np.int64, count=array.offset + n + 1)[array.offset :]
    data = np.frombuffer(data_buffer, dtype=np.uint8) if data_buffer is not None else np.zeros(0, dtype=np.uint8)
    first, last = int(offsets[0]), int(offsets[-1])
    starts = offsets[:-1] - first
    return starts, np.diff(offsets), data[first:last]


__all__ = ["hash_columns", "hashable"]
