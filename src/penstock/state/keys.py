"""The keys of a table, by number.

Keys are in immutable polars chunks. A chunk is written once, and written anew when most of its keys have gone. It has
room for ``CHUNK`` keys, so the work on one chunk does not grow with the table. While a chunk is being filled it
consists of a few pieces, each more than four times as large as the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import Any, Final

import numpy as np
import polars as pl
from numpy.typing import NDArray

from penstock.frames import alike, frame_of, take
from penstock.state.memory import GrowingArray

Rows = NDArray[np.int64]

CHUNK_BITS: Final = 18
CHUNK: Final = 1 << CHUNK_BITS
TIDIED_AT_ONCE: Final = 2
"""Chunks that one call of ``tidy`` writes anew. One takes some hundredths of a second."""
_FACTOR: Final = 4
"""A piece is joined to the one before it unless that is larger by this factor."""
_SMALL: Final = 4096
"""A piece with at most this many keys is always joined."""


class Keys:
    """Each key has a number, and for each number the row that has the key is known."""

    def __init__(self, schema: pl.Schema) -> None:
        self._schema = schema
        self._chunks: dict[int, list[pl.DataFrame]] = {}
        self._gone: dict[int, int] = {}
        self._open: int | None = None
        self._reusable: list[int] = []
        self._rows = GrowingArray(np.int32)  # by key number: the row plus one, or 0 for a key that has gone
        self._list_pieces()

    @property
    def height(self) -> int:
        return sum(piece.height for piece in self._pieces) - sum(self._gone.values())

    def nbytes(self) -> int:
        return sum(int(piece.estimated_size()) + 4 * piece.height for piece in self._pieces)

    def put(self, keys: pl.DataFrame, rows: Rows) -> NDArray[np.int32]:
        """Add keys, each with its row. Returns the numbers of the keys."""
        numbers = []
        begin = 0
        while begin < keys.height:
            chunk = self._chunk_with_room()
            filled = sum(piece.height for piece in self._chunks[chunk])
            count = min(CHUNK - filled, keys.height - begin)
            self._fill(chunk, keys.slice(begin, count), full=filled + count == CHUNK)
            first = (chunk << CHUNK_BITS) + filled
            self._rows.grow(first + count)
            self._rows.array[first : first + count] = rows[begin : begin + count] + 1
            numbers.append(np.arange(first, first + count, dtype=np.int32))
            begin += count
        self._list_pieces()
        return numbers[0] if len(numbers) == 1 else np.concatenate([np.zeros(0, np.int32), *numbers])

    def moved(self, numbers: NDArray[np.int32], rows: Rows) -> None:
        """Keys that have other rows now."""
        self._rows.array[numbers] = rows + 1

    def drop(self, numbers: NDArray[np.int32]) -> None:
        """Keys that have gone. A chunk goes when all of its keys have."""
        self._rows.array[numbers] = 0
        chunks, counts = np.unique(numbers >> CHUNK_BITS, return_counts=True)
        for chunk, count in zip(chunks.tolist(), counts.tolist(), strict=True):
            self._gone[chunk] += count
            if self._gone[chunk] == sum(piece.height for piece in self._chunks[chunk]):
                self._forget(chunk)
        self._list_pieces()

    def tidy(self, gone_min: int) -> Iterator[tuple[Rows, NDArray[np.int32]]]:
        """Write a few chunks anew of which most keys have gone. Yields rows, with the new numbers of their keys."""
        due = [c for c, gone in self._gone.items() if gone > max(gone_min, sum(p.height for p in self._chunks[c]) // 2)]
        for chunk in due[:TIDIED_AT_ONCE]:
            first = chunk << CHUNK_BITS
            owners = self._rows.array[first : first + sum(piece.height for piece in self._chunks[chunk])]
            stay = np.flatnonzero(owners)
            rows = owners[stay].astype(np.int64) - 1
            keys = self.gather(stay + first)
            owners[:] = 0
            del owners  # the array cannot grow in place while there are views of it
            self._forget(chunk)
            yield rows, self.put(keys, rows)

    def gather(self, numbers: NDArray[Any]) -> pl.DataFrame:
        """The keys with these numbers. Gathers from each piece, then restores the order: polars' own gather from a
        column of many chunks takes ten times as long."""
        if not numbers.size:
            return pl.DataFrame(schema=self._schema)
        if len(self._pieces) == 1:
            return take(self._pieces[0], numbers - self._starts[0])
        piece = (np.searchsorted(self._starts, numbers, side="right") - 1).astype(np.uint16)
        order = np.argsort(piece, kind="stable")  # a radix sort for two bytes
        edges = np.cumsum(np.bincount(piece, minlength=len(self._pieces))).tolist()
        in_order = numbers[order]
        parts = []
        for i, (begin, end) in enumerate(zip([0, *edges[:-1]], edges, strict=True)):
            if end > begin:
                parts.append(take(self._pieces[i], in_order[begin:end] - self._starts[i]))
        if len(parts) == 1:
            return parts[0]  # the stable sort of one piece changed nothing
        back = np.empty(numbers.size, dtype=np.int64)
        back[order] = np.arange(numbers.size)
        return take(pl.concat(parts, rechunk=True), back)

    def snapshot(self) -> Keys:
        """The keys as they are now, to gather from later. It costs nothing: pieces, and the lists of pieces, are never
        changed in place."""
        return copy(self)

    def _chunk_with_room(self) -> int:
        if self._open is None:
            self._open = self._reusable.pop() if self._reusable else len(self._chunks)
            self._chunks[self._open], self._gone[self._open] = [], 0
        return self._open

    def _fill(self, chunk: int, keys: pl.DataFrame, *, full: bool) -> None:
        pieces = [*self._chunks[chunk], keys]
        while len(pieces) > 1 and (full or _should_join(pieces[-2].height, pieces[-1].height)):
            pieces[-2:] = [pl.concat(pieces[-2:], rechunk=False)]
        self._chunks[chunk] = [*self._chunks[chunk][: len(pieces) - 1], detached(pieces[-1])]
        if full:
            self._open = None

    def _forget(self, chunk: int) -> None:
        del self._chunks[chunk], self._gone[chunk]
        self._reusable.append(chunk)
        if self._open == chunk:
            self._open = None

    def _list_pieces(self) -> None:
        pieces, starts = [], []
        for chunk in sorted(self._chunks):
            start = chunk << CHUNK_BITS
            for piece in self._chunks[chunk]:
                pieces.append(piece)
                starts.append(start)
                start += piece.height
        self._pieces = pieces
        self._starts: Rows = np.array(starts, dtype=np.int64)


def _should_join(older: int, newer: int) -> bool:
    return older <= _FACTOR * newer or older <= _SMALL


def same_keys(a: pl.DataFrame, b: pl.DataFrame) -> NDArray[np.bool_]:
    """Row by row, whether two keys are the same. Null equals null, and NaN equals NaN."""
    pairs = zip(a.get_columns(), b.get_columns(), strict=True)
    masks = [alike(left, right) for left, right in pairs]
    same: NDArray[np.bool_] = masks[0] if len(masks) == 1 else np.logical_and.reduce(masks)
    return same


def detached(frame: pl.DataFrame) -> pl.DataFrame:
    """A contiguous copy whose strings share no buffer with the original. Polars strings are views: ten keys taken from
    a batch would otherwise keep the text of the whole batch in memory."""
    frame = frame.rechunk()
    return frame_of(
        [
            pl.Series(c.name, c.to_arrow(), dtype=c.dtype) if c.dtype in (pl.String, pl.Binary) else c
            for c in frame.get_columns()
        ]
    )


__all__ = ["Keys", "detached", "same_keys"]
