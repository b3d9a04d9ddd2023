"""Rows that were brought to a table and that nobody has asked for yet.

After a loss or a move a slice may come up with a million rows, of which the next epoch touches a thousand. To enter a
row into the table takes several times as long as to look at its hash. So rows are *brought*: the table keeps the frames
as they are, enters a key when an operator asks for it, and enters the other keys a few at a time.

Rows are found by hash, and all rows with one hash leave together, in their order. Two things are left to the table: of
several rows of one key the last wins, and two keys with the same hash are two keys.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

from penstock.frames import stacked, take
from penstock.state.memory import spans
from penstock.state.slicemap import SliceMap

U64 = NDArray[np.uint64]
Places = NDArray[np.int64]


class WaitingRows:
    """Frames that wait, in the columns of a fragment. Of the rows of a key, the last one in the last frame counts."""

    def __init__(self, frames: Sequence[pl.DataFrame], hash_column: str, deleted_column: str) -> None:
        self._frame = stacked(frames).rechunk()
        hashes = self._frame.get_column(hash_column).to_numpy()
        self._order = np.argsort(hashes)
        self._hashes: U64 = hashes[self._order]
        self._left = np.ones(hashes.size, dtype=np.bool_)
        # One row of each hash stands for its key: the last one, unless that row says that the key was deleted.
        starts = np.flatnonzero(np.concatenate([[True], self._hashes[1:] != self._hashes[:-1]])[: hashes.size])
        last = np.maximum.reduceat(self._order, starts) if hashes.size else self._order
        gone = self._frame.get_column(deleted_column).to_numpy()[last]
        self._counts = np.zeros(hashes.size, dtype=np.bool_)
        self._counts[starts[~gone]] = True
        self._next = 0
        """Place that ``take_some`` has reached: every row before it has left."""

    @property
    def rows(self) -> int:
        """Number of keys that wait. Two keys with the same hash count as one until they are taken."""
        return int(np.count_nonzero(self._counts & self._left))

    @property
    def nbytes(self) -> int:
        return int(self._frame.estimated_size()) + 18 * self._hashes.size

    def hashes(self) -> U64:
        """Hashes of the rows that wait, those of deleted keys included."""
        return self._hashes[self._left]

    def live_hashes(self) -> U64:
        """Hashes of the keys that wait, one for each, without deleted keys."""
        return self._hashes[self._counts & self._left]

    def take(self, hashes: U64) -> pl.DataFrame | None:
        """Take out all rows with these hashes. None: no such row waits."""
        first = np.searchsorted(self._hashes, hashes)
        there = first < self._hashes.size
        there[there] = self._hashes[first[there]] == hashes[there]
        first = np.unique(first[there])
        first = first[self._left[first]]
        if not first.size:
            return None
        end = np.searchsorted(self._hashes, self._hashes[first], side="right")
        return self._leave(spans(first, end - first))

    def take_some(self, count: int) -> pl.DataFrame | None:
        """Take out about ``count`` rows. None: no row waits any more."""
        begin = self._next
        if begin >= self._hashes.size:
            return None
        end = min(begin + count, self._hashes.size)
        if end < self._hashes.size:  # rows with one hash leave together
            end = int(np.searchsorted(self._hashes, self._hashes[end - 1], side="right"))
        self._next = end
        return self._leave(begin + np.flatnonzero(self._left[begin:end]))

    def drop(self, slices: Collection[int], slicemap: SliceMap) -> None:
        """Forget the rows of some slices."""
        self._left &= ~slicemap.mask(self._hashes, slices)

    def _leave(self, places: Places) -> pl.DataFrame:
        """The rows at some places of the sorted hashes, which no longer wait."""
        self._left[places] = False
        return take(self._frame, np.sort(self._order[places]))


__all__ = ["WaitingRows"]
