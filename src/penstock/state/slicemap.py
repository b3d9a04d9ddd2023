"""Which slice a key belongs to.

Every place that needs the slice of a key asks a :class:`SliceMap`: the exchange, tables, files, backups and the
measurement of load. None of them knows how the map decides. Today it decides by the hash alone. It is written so that
sorted arrays of single hashes with slices of their own ("pins") can be added here without a change to its callers.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]
Mask = NDArray[np.bool_]

SLICES_MAX: Final = 1 << 16
"""The most slices that a stage can have."""

_32: Final = np.uint64(32)


class SliceMap(msgspec.Struct, frozen=True):
    """The slice of each key of one stage, by the key's hash."""

    count: int
    """Number of slices. It is set at the job's first run and never changes."""

    def __post_init__(self) -> None:
        if not 0 < self.count <= SLICES_MAX:
            raise ValueError(f"a stage cannot have {self.count} slices; it can have 1 to {SLICES_MAX}")

    def of(self, hashes: U64) -> NDArray[np.int32]:
        """The slice of each hash.

        The HIGH bits of the hash decide. The index of a table uses the low bits, and the two must be independent: a
        container holds few slices, and with shared bits its keys would crowd a fraction of the index.
        """
        share = hashes >> _32
        share *= np.uint64(self.count)
        share >>= _32
        return share.astype(np.int32)

    def mask(self, hashes: U64, slices: Collection[int]) -> Mask:
        """For each hash: whether it belongs to one of ``slices``."""
        return self._flags(slices)[self.of(hashes)]

    def of_ranges(self, first: U64, last: U64, slices: Collection[int]) -> tuple[Mask, Mask]:
        """For each range of hashes from ``first`` to ``last``, both included: whether all of its hashes belong to
        ``slices``, and whether any of them may."""
        upto: NDArray[Any] = np.concatenate([[0], np.cumsum(self._flags(slices))])
        low, high = self.of(first).astype(np.intp), self.of(last).astype(np.intp)
        inside = upto[high + 1] - upto[low]
        return inside == high + 1 - low, inside > 0

    def _flags(self, slices: Collection[int]) -> Mask:
        """For each slice: whether it is one of ``slices``."""
        flags = np.zeros(self.count, dtype=np.bool_)
        flags[list(slices)] = True
        return flags


__all__ = ["SLICES_MAX", "SliceMap"]
