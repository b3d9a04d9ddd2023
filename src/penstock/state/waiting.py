"""Rows that a table was brought and that nobody has asked for yet.

A slice that comes up, after a loss or a move, may have a million rows, of which the next epoch touches a thousand. To
enter each of them into the table takes several times as long as to look at their hashes. So a table is *brought* them:
it keeps the frames as they are, and takes in a key when somebody asks for it, and the others a few at a time.

Rows are found by hash, and all rows of a hash leave together, in their order: that of several deltas of one key the
last wins, and that two keys with one hash are two keys, is left to the table.
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


class Waiting:
    """Frames in the columns of a fragment, one after the other: of a key the last row counts."""

    def __init__(self, frames: Sequence[pl.DataFrame], hash_column: str, deleted_column: str) -> None:
        self._frame = stacked(frames).rechunk()
        hashes = self._frame.get_column(hash_column).to_numpy()
        self._order = np.argsort(hashes)
        self._hashes: U64 = hashes[self._order]
        self._left = np.ones(hashes.size, dtype=np.bool_)
        # One row of each hash stands for it: the last, unless that says that the key is gone.
        starts = np.flatnonzero(np.concatenate([[True], self._hashes[1:] != self._hashes[:-1]])[: hashes.size])
        last = np.maximum.reduceat(self._order, starts) if hashes.size else self._order
        gone = self._frame.get_column(deleted_column).to_numpy()[last]
        self._counts = np.zeros(hashes.size, dtype=np.bool_)
        self._counts[starts[~gone]] = True
        self._next = 0
        """Of those before it none are left."""

    @property
    def rows(self) -> int:
        """Keys that are waiting. Of two that have one hash, one: they are told apart when they are taken."""
        return int(np.count_nonzero(self._counts & self._left))

    @property
    def nbytes(self) -> int:
        return int(self._frame.estimated_size()) + 18 * self._hashes.size

    def hashes(self) -> U64:
        """Of what is waiting, deleted or not."""
        return self._hashes[self._left]

    def live_hashes(self) -> U64:
        return self._hashes[self._counts & self._left]

    def take(self, hashes: U64) -> pl.DataFrame | None:
        """All rows of these hashes that are waiting."""
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
        """About so many of the rows that are waiting; None: there are no more."""
        begin = self._next
        if begin >= self._hashes.size:
            return None
        end = min(begin + count, self._hashes.size)
        if end < self._hashes.size:  # not in the midst of a hash
            end = int(np.searchsorted(self._hashes, self._hashes[end - 1], side="right"))
        self._next = end
        return self._leave(begin + np.flatnonzero(self._left[begin:end]))

    def drop(self, slices: Collection[int], slicemap: SliceMap) -> None:
        """Forget the rows of some slices."""
        self._left &= ~slicemap.mask(self._hashes, slices)

    def _leave(self, places: Places) -> pl.DataFrame:
        self._left[places] = False
        return take(self._frame, np.sort(self._order[places]))


__all__ = ["Waiting"]
