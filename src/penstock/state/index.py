"""From the hash of a key to its row, for a whole batch of keys at a time.

The index uses open addressing, with one small index for each part of the table. A part has a power of two of int32
slots, of which at most half are taken. A search visits slots at the distances 1, 3, 6, 10 ..., which reaches every
slot. The slots of all parts lie in one array, so that a batch with keys of every part is still one vector operation.

A part that needs room is entered anew, alone. Each part has a slightly different limit, so that not all of them need
room in the same epoch. Entries are never removed singly, only with their whole part.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.state.memory import Blocks, GrowingArray, power_of_two

Rows = NDArray[np.int64]
U64 = NDArray[np.uint64]

PARTS: Final = 256
_PART_SHIFT: Final = np.uint64(56)
_SLOTS_FIRST: Final = 16
_FULL: Final = 0.375 + 0.125 * ((np.arange(PARTS) * 97) % PARTS) / PARTS
"""The share of a part's slots that may be taken: between three eighths and a half."""


def part_of(hashes: U64) -> NDArray[np.intp]:
    """The part of each hash, by its highest bits. Slices go by the same bits: a slice is a few parts, or a piece of
    one."""
    return (hashes >> _PART_SHIFT).astype(np.intp)


class Index:
    """A slot holds the number of a row plus one, so that zeroed memory is an empty index. Slot 0 is always free: a
    search in a part without keys looks there, and finds nothing."""

    def __init__(self) -> None:
        self._slots = GrowingArray(np.int32)
        self._blocks = Blocks()
        self._blocks.take(_SLOTS_FIRST)
        self._base: Rows = np.zeros(PARTS, dtype=np.int64)
        self._mask: Rows = np.zeros(PARTS, dtype=np.int64)
        # By part: its first slot, its number of slots less one, the slots taken, and how many may be taken.
        self.used: Rows = np.zeros(PARTS, dtype=np.int64)
        self._limit: NDArray[np.float64] = np.zeros(PARTS)

    def nbytes(self) -> int:
        return 4 * int((self._mask + 1).sum())

    def reserve(self, counts: Rows, stored: U64) -> bool:
        """Make room for ``counts`` more rows, by part. True: places found before the call are no longer valid."""
        full = np.flatnonzero(self.used + counts > self._limit)
        if not full.size:
            return False
        slots = self._slots.array
        old = [(int(self._base[p]), int(self._mask[p]) + 1) for p in full.tolist() if self._mask[p]]
        entries = [slots[base : base + size] for base, size in old]
        rows = np.concatenate([np.zeros(0, np.int32), *(e[e > 0] for e in entries)]).astype(np.int64) - 1
        del slots, entries  # the array cannot grow in place while there are views of it
        for base, size in old:
            self._slots.clear(base, base + size)
            self._blocks.give(base, size)
        for p in full.tolist():
            size = max(_SLOTS_FIRST, power_of_two(int((self.used[p] + counts[p]) / _FULL[p]) + 1))
            self._base[p], self._mask[p] = self._blocks.take(size), size - 1
            self._limit[p] = size * _FULL[p]
        self._slots.grow(self._blocks.end)
        hashes = stored.take(rows)
        self._enter(rows, hashes, stored, *self._start(hashes))
        return True

    def drop(self, parts: NDArray[np.intp]) -> None:
        """Remove all entries of some parts."""
        for p in parts.tolist():
            if self._mask[p]:
                base, size = int(self._base[p]), int(self._mask[p]) + 1
                self._slots.clear(base, base + size)
                self._blocks.give(base, size)
        self._base[parts] = self._mask[parts] = self.used[parts] = 0
        self._limit[parts] = 0.0

    def rows(self) -> Rows:
        """Every row in the index, for tests."""
        slots = self._slots.array
        return slots[slots > 0].astype(np.int64) - 1

    def walk(self, hashes: U64, stored: U64) -> tuple[Rows, Rows, Rows]:
        """For each hash the first row with this hash, or -1 if the search ended at a free slot. Also the slot and the
        step that each search reached."""
        pos, step = self._start(hashes)
        rows = self._slots.array.take(pos).astype(np.int64)
        rows -= 1
        equal = stored.take(rows, mode="wrap") == hashes
        equal |= rows < 0
        todo = np.flatnonzero(~equal)
        if todo.size:
            rows[todo] = self.walk_on(hashes, stored, pos, step, todo)
        return rows, pos, step

    def walk_on(self, hashes: U64, stored: U64, pos: Rows, step: Rows, todo: NDArray[np.intp]) -> Rows:
        """Go on with the searches ``todo``, by at least one step. Updates ``pos`` and ``step`` in place."""
        slots = self._slots.array
        out = np.full(todo.size, -1, dtype=np.int64)
        place = np.arange(todo.size)
        p, s, h = pos[todo], step[todo], hashes[todo]
        base, mask = self._region(h)
        while place.size:
            s += 1
            p = base + ((p + s) & mask)
            rows = slots.take(p).astype(np.int64)
            rows -= 1
            over = stored.take(rows, mode="wrap") == h
            over |= rows < 0
            ended = np.flatnonzero(over)
            if ended.size:
                at = place[ended]
                out[at] = rows[ended]
                pos[todo[at]], step[todo[at]] = p[ended], s[ended]
                on = np.flatnonzero(~over)
                place, p, s, h, base, mask = place[on], p[on], s[on], h[on], base[on], mask[on]
        return out

    def insert(self, rows: Rows, hashes: U64, stored: U64, reached: tuple[Rows, Rows] | None = None) -> bool:
        """Enter rows whose keys are known to be absent; there must be room for them. ``reached``: slots and steps where
        ``walk`` ended. True: two of the rows have the same hash. (Equal keys take the same path, so they meet.)"""
        self.used += np.bincount(part_of(hashes), minlength=PARTS)
        return self._enter(rows, hashes, stored, *(reached or self._start(hashes)))

    def _enter(self, rows: Rows, hashes: U64, stored: U64, pos: Rows, step: Rows) -> bool:
        """Enter rows. Rows that want the same slot all write to it. The one found there afterwards has it, and the
        others try their next slot."""
        alike = False
        slots = self._slots.array
        entries = rows.astype(np.int32)
        entries += 1
        base, mask = self._region(hashes)
        while entries.size:
            free = slots.take(pos) == 0
            slots[pos[free]] = entries[free]
            holders = slots.take(pos)
            lost = np.flatnonzero(holders != entries)
            if not lost.size:
                break
            alike = alike or bool((stored[holders[lost] - 1] == stored[entries[lost] - 1]).any())
            entries, step, base, mask = entries[lost], step[lost] + 1, base[lost], mask[lost]
            pos = base + ((pos[lost] + step) & mask)
        return alike

    def _region(self, hashes: U64) -> tuple[Rows, Rows]:
        """The first slot of the part of each hash, and the number of slots less one."""
        part = part_of(hashes)
        return self._base.take(part), self._mask.take(part)

    def _start(self, hashes: U64) -> tuple[Rows, Rows]:
        """The slot where the search for each hash begins, and its step, 0."""
        base, mask = self._region(hashes)
        mask &= hashes.view(np.int64)
        mask += base
        return mask, np.zeros(hashes.size, dtype=np.int64)


__all__ = ["PARTS", "Index", "part_of"]
