"""Memory for tables that grow to gigabytes: arrays that grow without a copy, and blocks of rows inside the arrays.

A container must not stand still because its state has doubled, and copying 40 million rows into larger arrays takes
seconds. So a large array has a memory mapping of its own, which the system makes longer by moving pages (``mremap``).
Where the system cannot do that, or where somebody still holds a view of the array, the array is copied.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

MAPPED_BYTES_MIN: Final = 1 << 20
"""Arrays below this size are ordinary ones. To copy them is faster than a call to the system."""

_FIRST: Final = 64
_PRIVATE: Final = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
"""Flags of a private mapping. 0: this system has none, and every array is an ordinary one. (A shared mapping, which is
Python's default, cannot grow.)"""


class GrowingArray:
    """An array that grows. ``array`` is valid until the next ``grow``, and may be longer than the size asked for. Items
    that were never written, or were cleared, hold ``fill`` (None for objects)."""

    def __init__(self, dtype: Any, fill: Any = 0) -> None:
        self.dtype = np.dtype(dtype)
        self.fill: Any = None if self.dtype.hasobject else np.asarray(fill).astype(self.dtype)[()]
        self.array: Array = self._ordinary(_FIRST)
        # Whether the zeros that the system gives are the fill value already.
        self._blank = self.dtype.hasobject or not np.asarray(self.fill).tobytes().strip(b"\0")
        self._size = 0
        self._mapping: mmap.mmap | None = None

    def grow(self, size: int) -> None:
        """Make it at least ``size`` items long."""
        if size > self.array.size:
            self._reserve(max(size, 2 * self.array.size))
        if not self._blank and size > self._size:
            self.array[self._size : size] = self.fill
        self._size = max(size, self._size)

    def clear(self, start: int, stop: int) -> None:
        """Set items to ``fill``. Whole pages go back to the system where its zeros are the fill value."""
        first, last = start, start
        if self._mapping is not None and self._blank:
            item = self.dtype.itemsize
            begin, end = -(-start * item // mmap.PAGESIZE), stop * item // mmap.PAGESIZE
            if end - begin > 1 and mmap.PAGESIZE % item == 0 and hasattr(mmap, "MADV_DONTNEED"):
                with contextlib.suppress(OSError):  # the pages stay, and are written over below
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
            except OSError:  # too many mappings, or no memory: numpy has other ways, and a clear error
                self._move(self._ordinary(size), None)
                return
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # not every system has large pages
                    mapping.madvise(mmap.MADV_HUGEPAGE)
            self._move(np.frombuffer(mapping, dtype=self.dtype), mapping)

    def _stretch(self, size: int) -> bool:
        if self._mapping is None:
            return False
        self.array = self._ordinary(0)  # a mapping with a view cannot be resized: ours goes first
        try:
            self._mapping.resize(size * self.dtype.itemsize)
            stretched = True
        except (BufferError, SystemError, OSError):  # another view; no mremap; no memory in one piece
            stretched = False
        self.array = np.frombuffer(self._mapping, dtype=self.dtype)
        return stretched

    def _move(self, array: Array, mapping: mmap.mmap | None) -> None:
        array[: self.array.size] = self.array
        self.array, self._mapping = array, mapping

    def _ordinary(self, size: int) -> Array:
        return np.empty(size, self.dtype) if self.dtype.hasobject else np.zeros(size, self.dtype)


class Blocks:
    """Gives out blocks of a growing range of rows, and takes them back. The size of a block is a power of two, and a
    block starts at a multiple of its size."""

    def __init__(self) -> None:
        self.end = 0
        self._free: dict[int, list[int]] = {}

    def take(self, size: int) -> int:
        """The start of a free block."""
        free = self._free.get(size)
        if free:
            return free.pop()
        while self.end % size:  # the rows skipped to reach a multiple become smaller free blocks
            piece = self.end & -self.end
            self.give(self.end, piece)
            self.end += piece
        start = self.end
        self.end += size
        return start

    def give(self, start: int, size: int) -> None:
        """Take a block back."""
        self._free.setdefault(size, []).append(start)


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below ``n``."""
    return 1 << max(0, n - 1).bit_length()


def spans(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """All numbers of the spans, one span after the other."""
    total = int(lengths.sum())
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(total, dtype=np.int64)


__all__ = ["Blocks", "GrowingArray", "power_of_two", "spans"]
