"""Memory for tables that grow to gigabytes: arrays that need not be copied to grow, and blocks of rows inside them.

A container must not stand still because its state has doubled. Copying 40 million rows into larger arrays takes
seconds, so large arrays are memory of their own that the system makes longer by moving pages (``mremap``). Where it
cannot, or where somebody still looks at the array, they are copied like any other.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

MAPPED_BYTES_MIN: Final = 1 << 20
"""Smaller arrays are copied: that is faster than to ask the system for anything."""

_FIRST: Final = 64
_PRIVATE: Final = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
"""0 where there is no such thing: then every array is an ordinary one. Shared memory, the default, cannot be grown."""


class Column:
    """An array that grows. ``array`` is valid until the next ``grow``, and may be longer than was asked for. What was
    never written to, or was cleared, holds ``fill`` (None for objects)."""

    def __init__(self, dtype: Any, fill: Any = 0) -> None:
        self.dtype = np.dtype(dtype)
        self.fill: Any = None if self.dtype.hasobject else np.asarray(fill).astype(self.dtype)[()]
        self.array: Array = self._ordinary(_FIRST)
        # As memory comes from the system:
        self._blank = self.dtype.hasobject or not np.asarray(self.fill).tobytes().strip(b"\0")
        self._size = 0
        self._mapping: mmap.mmap | None = None

    def grow(self, size: int) -> None:
        """To at least ``size`` items."""
        if size > self.array.size:
            self._reserve(max(size, 2 * self.array.size))
        if not self._blank and size > self._size:
            self.array[self._size : size] = self.fill
        self._size = max(size, self._size)

    def clear(self, start: int, stop: int) -> None:
        """Whole pages are given back to the system where that leaves the right thing."""
        first, last = start, start
        if self._mapping is not None and self._blank:
            item = self.dtype.itemsize
            begin, end = -(-start * item // mmap.PAGESIZE), stop * item // mmap.PAGESIZE
            if end - begin > 1 and mmap.PAGESIZE % item == 0 and hasattr(mmap, "MADV_DONTNEED"):
                with contextlib.suppress(OSError):  # then it is written over
                    self._mapping.madvise(mmap.MADV_DONTNEED, begin * mmap.PAGESIZE, (end - begin) * mmap.PAGESIZE)
                    first, last = begin * mmap.PAGESIZE // item, end * mmap.PAGESIZE // item
        self.array[start:first] = self.fill
        self.array[last:stop] = self.fill

    def _reserve(self, size: int) -> None:
        if self.dtype.hasobject or not _PRIVATE or size * self.dtype.itemsize < MAPPED_BYTES_MIN:
            self._move(self._ordinary(size), None)
        elif not self._stretch(size):
            try:
                mapping = mmap.mmap(-1, size * self.dtype.itemsize, flags=_PRIVATE)
            except OSError:  # too many of them, or no memory: numpy has its own ways, and a clear error
                self._move(self._ordinary(size), None)
                return
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # not every system has large pages
                    mapping.madvise(mmap.MADV_HUGEPAGE)
            self._move(np.frombuffer(mapping, dtype=self.dtype), mapping)

    def _stretch(self, size: int) -> bool:
        if self._mapping is None:
            return False
        self.array = self._ordinary(0)  # our own view would be in the way
        try:
            self._mapping.resize(size * self.dtype.itemsize)
            stretched = True
        except (BufferError, SystemError, OSError):  # somebody else's view; no mremap here; no memory in one piece
            stretched = False
        self.array = np.frombuffer(self._mapping, dtype=self.dtype)
        return stretched

    def _move(self, array: Array, mapping: mmap.mmap | None) -> None:
        array[: self.array.size] = self.array
        self.array, self._mapping = array, mapping

    def _ordinary(self, size: int) -> Array:
        return np.empty(size, self.dtype) if self.dtype.hasobject else np.zeros(size, self.dtype)


class Blocks:
    """Gives out blocks of a growing range and takes them back: powers of two, each at a multiple of its size."""

    def __init__(self) -> None:
        self.end = 0
        self._free: dict[int, list[int]] = {}

    def take(self, size: int) -> int:
        """The start of a free block."""
        free = self._free.get(size)
        if free:
            return free.pop()
        while self.end % size:  # what is skipped to begin at a multiple is free for smaller ones
            piece = self.end & -self.end
            self.give(self.end, piece)
            self.end += piece
        start = self.end
        self.end += size
        return start

    def give(self, start: int, size: int) -> None:
        self._free.setdefault(size, []).append(start)


def power_of_two(n: int) -> int:
    """The smallest that is not below ``n``."""
    return 1 << max(0, n - 1).bit_length()


def spans(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """All numbers of the spans, one after the other."""
    total = int(lengths.sum())
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(total, dtype=np.int64)


__all__ = ["Blocks", "Column", "power_of_two", "spans"]
