"""The keyed state of a stage: one columnar table for all the slices that a container holds.

Why one table and not one per slice: an epoch touches keys of every slice, and hundreds of small tables would cost
hundreds of small vector operations. Here the number of slices costs nothing; a slice is only a predicate on the hash,
used when slices move. Every operation of an epoch is O(keys touched), never O(state).

How it is laid out: *rows* are numbered; keys are immutable polars chunks (:class:`Keys`), values are growable numpy
arrays, and an open-addressing index maps the 64-bit hash to the row (:class:`Index`). Keys are compared after the
hash, so a true collision of hashes is still exact. Deleting only clears a row's ``live`` bit: the row stays indexed,
so that an undo or a return of the key finds it; dead rows are swept out when they outnumber the live ones.

Parts: rows are given out in blocks, and each block belongs to one of 256 *parts*, by the highest bits of the hash. So
whatever cannot be done row by row (making room in the index, sweeping, bringing and removing slices) is done part by
part: it takes as long as a part is large, however large the table. A batch knows nothing of it.

Fragments: rows touched since the last seal form the *active fragment*. Its log keeps what each first touch replaced.
``seal(epoch)`` ends it, hands out a copy of what changed (to be encoded in the background), and starts the next one;
``undo_to`` replays logs backwards; ``release`` forgets logs once a checkpoint is complete.

``load`` and ``drop_slices`` bring and remove whole slices. They are not recorded: a loaded key counts as having always
had its loaded value, and a dropped one as never having been here, at every epoch that can be undone to. A caller that
undoes to an epoch before a load must therefore drop the loaded slices and load them again; it knows, for it keeps
slice versions.

``bring`` is ``load`` put off (:class:`Waiting`): a key that was brought is taken in when it is asked for, which nobody
can tell from its having been loaded at once. Whoever wants to see every row wakes them all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import polars as pl
from numpy.typing import NDArray

from penstock.errors import CorruptData
from penstock.frames import frame_of, pick, rows_where, stacked, take
from penstock.state.hashing import hashable, slice_of
from penstock.state.index import PARTS, Index, part_of
from penstock.state.keys import Keys, same_keys
from penstock.state.memory import Blocks, Column, power_of_two, spans
from penstock.state.waiting import Waiting

Rows = NDArray[np.int64]
Mask = NDArray[np.bool_]
U64 = NDArray[np.uint64]
Array = NDArray[Any]

HASH: Final = "__hash"
DELETED: Final = "__deleted"

_ROWS_MAX: Final = 2**31 - 1
_BLOCK_ROWS_MIN: Final = 8
_BLOCK_ROWS_MAX: Final = 1 << 14
_SWEPT_AT_ONCE: Final = 1 << 18
"""Rows that a sweep looks at: what is left waits for the next one."""
_WOKEN_AT_ONCE: Final = 1 << 18
"""Rows that were brought and are taken in together."""


class ObjectCodec(Protocol):
    """Turns the Python objects of a column into bytes and back. Never sees None, which stands for "absent"."""

    def encode(self, value: Any, /) -> bytes: ...

    def decode(self, data: bytes, /) -> Any: ...


@dataclass(frozen=True)
class ValueType:
    """The type of a value column: a numpy dtype with the value of fresh rows, or Python objects with a codec."""

    dtype: np.dtype[Any]
    fill: Any = None
    codec: ObjectCodec | None = None


def numeric(dtype: Any, fill: Any = 0) -> ValueType:
    """A column of numpy values; ``fill`` is what a new key starts from."""
    resolved = np.dtype(dtype)
    assert not resolved.hasobject, "objects need a codec: use objects(codec)"
    return ValueType(resolved, np.asarray(fill).astype(resolved)[()])


def objects(codec: ObjectCodec) -> ValueType:
    """A column of Python objects (None: absent), encoded by ``codec`` in fragments and undo logs."""
    return ValueType(np.dtype(object), None, codec)


@dataclass(frozen=True)
class TableSpec:
    """Names and types of a table's columns."""

    key: pl.Schema
    values: Mapping[str, ValueType]

    def __post_init__(self) -> None:
        names = [HASH, *self.key.names(), *self.values, DELETED]
        assert self.key.names(), "a table needs a key"
        assert len(set(names)) == len(names), f"column names clash: {names}"
        assert all(hashable(t) for t in self.key.dtypes()), f"not all of these can be keys: {self.key}"

    def frame_schema(self) -> pl.Schema:
        """Columns of fragments and exports: hash, keys, values (objects as Binary), deleted."""
        schema: dict[str, Any] = {HASH: pl.UInt64(), **self.key}
        for name, kind in self.values.items():
            schema[name] = pl.Binary() if kind.codec else pl.Series(np.empty(0, dtype=kind.dtype)).dtype
        schema[DELETED] = pl.Boolean()
        return pl.Schema(schema)


@dataclass(frozen=True)
class Fragment:
    """What changed in ``(epoch_from, epoch_to]``: a private copy, safe to read in another thread.

    Of the keys it is only said where they are. They never change, so to copy them, about a third of the work, is left
    to whoever reads the fragment.
    """

    spec: TableSpec
    epoch_from: int
    epoch_to: int
    hashes: U64
    kept_keys: Keys
    key_numbers: NDArray[np.int32]
    values: Mapping[str, Array | list[bytes | None]]
    deleted: Mask

    @property
    def rows(self) -> int:
        return int(self.hashes.size)

    def frame(self) -> pl.DataFrame:
        """Hash, keys, values and the deleted flag, in ``spec.frame_schema()``. Deleted rows have fill values."""
        keys = self.kept_keys.gather(self.key_numbers)
        return _build_frame(self.spec, self.hashes, keys, self.values, self.deleted)


class KeyedTable:
    """Keyed state of many slices. One writer; row numbers hold until ``seal``, ``undo_to``, ``release``, ``load``,
    ``drop_slices`` or ``reset``; arrays of columns until the next call that looks for keys or rows."""

    def __init__(self, spec: TableSpec, base_epoch: int = 0, *, sweep_rows_min: int = 4096) -> None:
        self.spec = spec
        self._sweep_rows_min = sweep_rows_min
        self._objects = tuple(name for name, kind in spec.values.items() if kind.codec)
        self.reset(base_epoch)

    def reset(self, epoch: int) -> None:
        """Empty, as sealed at ``epoch``."""
        self._hash = Column(np.uint64)
        self._live = Column(np.bool_)
        # mark[row] is the position of the row's last first-touch, counted over the table's whole life: a row is in the
        # active fragment exactly when its mark is at or after _active_start. So a new fragment needs no clearing.
        # They begin at 1: 0 is "never", as memory comes from the system.
        self._mark = Column(np.int64)
        self._key = Column(np.int32)
        self._values = {name: Column(kind.dtype, kind.fill) for name, kind in self.spec.values.items()}
        self._keys = Keys(self.spec.key)
        self._index = Index()
        self._scratch: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
        # By part: its blocks, the next row and how many follow it, rows given out, and those of them that are live.
        self._blocks = Blocks()
        self._blocks_of: dict[int, list[tuple[int, int]]] = {}
        self._next: Rows = np.zeros(PARTS, dtype=np.int64)
        self._room: Rows = np.zeros(PARTS, dtype=np.int64)
        self._given: Rows = np.zeros(PARTS, dtype=np.int64)
        self._alive: Rows = np.zeros(PARTS, dtype=np.int64)
        self._base_epoch = epoch
        self._sealed: list[_Log] = []
        self._marks_given = 1
        self._active_start = 1
        self._active = _Log()
        self._encoded: _Encoded | None = None
        self._object_bytes_mean = 64.0
        self._waiting: list[Waiting] = []

    # ---- reading ---------------------------------------------------------------------------------------------------

    @property
    def rows_live(self) -> int:
        return int(self._alive.sum()) + self.rows_waiting

    @property
    def rows_waiting(self) -> int:
        """Of the live ones, those that were brought and not yet taken in."""
        return sum(waiting.rows for waiting in self._waiting)

    @property
    def waits(self) -> bool:
        """Whether ``wake`` has anything to do."""
        return bool(self._waiting)

    @property
    def rows_held(self) -> int:
        """Live ones and dead ones that were not swept out yet."""
        return int(self._given.sum())

    @property
    def nbytes(self) -> int:
        """An estimate of the memory held: arrays, index, keys, undo logs; objects by the mean of their encoded
        sizes."""
        held = self.rows_held * sum(int(column.dtype.itemsize) for column in self._every_column())
        held += self._index.nbytes() + self._keys.nbytes()
        held += int(len(self._objects) * int(self._alive.sum()) * self._object_bytes_mean)
        held += sum(waiting.nbytes for waiting in self._waiting)
        return held + sum(log.nbytes() for log in [*self._sealed, self._active])

    def column(self, name: str) -> Array:
        """The live array of a column, indexed by row. Valid until the next call that adds rows, as any may that looks
        for keys; touch before writing. Rows that are not live hold the fill value, and rows that wait are not in it."""
        return self._values[name].array[: self._blocks.end]

    def live_rows(self) -> Rows:
        """Every live row: O(state)."""
        self.wake()
        return np.flatnonzero(self._live.array[: self._blocks.end]).astype(np.int64, copy=False)

    def keys(self, rows: Rows) -> pl.DataFrame:
        return self._keys.gather(self._key.array.take(rows))

    def hashes(self, rows: Rows) -> U64:
        return self._hash.array[rows]

    def live_hashes(self) -> U64:
        """Of every live row, those that wait included: O(state)."""
        here = self._hash.array[: self._blocks.end][self._live.array[: self._blocks.end]]
        return np.concatenate([here, *(waiting.live_hashes() for waiting in self._waiting)])

    def find(self, hashes: U64, keys: pl.DataFrame) -> Rows:
        """The row of each key, -1 where it is absent. Touches nothing."""
        self._call(hashes)
        rows, _, _ = self._probe(hashes, self._conform(keys))
        rows[~self._live.array[rows]] = -1  # -1 itself reads some row and stays -1 either way
        return rows

    def epochs(self) -> list[int]:
        """The epochs that ``undo_to`` can return to, oldest first."""
        return [self._base_epoch, *(log.epoch for log in self._sealed)]

    # ---- writing ---------------------------------------------------------------------------------------------------

    def upsert(self, hashes: U64, keys: pl.DataFrame) -> tuple[Rows, Mask]:
        """The row of each key, made where absent (with fill values), and which were made. Touches the rows.

        Keys are unique within a call."""
        self._call(hashes)
        rows, _ = self._find_or_append(hashes, self._conform(keys))
        assert self.distinct(rows).size == rows.size, "upsert: the same key twice in one call"
        is_new = ~self._live.array.take(rows)
        self._touch_distinct(rows)
        self._live.array[rows] = True
        self._count_live(hashes[is_new], 1)
        return rows, is_new

    def touch(self, rows: Rows) -> None:
        """Must precede an in-place write: marks the rows as changed and keeps what they were. Repeats do no harm."""
        assert bool(self._live.array[rows].all()), "touch: a row is not live"
        self._touch_distinct(self.distinct(rows))

    def delete(self, rows: Rows) -> None:
        """Remove live rows. Their keys may come back later, as new."""
        rows = self.distinct(rows)
        assert bool(self._live.array[rows].all()), "delete: a row is not live"
        self._touch_distinct(rows)
        self._bury(rows)

    # ---- fragments -------------------------------------------------------------------------------------------------

    def seal(self, epoch: int) -> Fragment:
        """End the active fragment at ``epoch`` and return a copy of what it changed. O(rows touched)."""
        last = self.epochs()[-1]
        assert epoch > last, f"seal({epoch}) after {last}"
        log = self._active
        log.settle()
        log.epoch = epoch
        # Positions in the log again without gaps, so that _Encoded can be looked up by mark.
        self._mark.array[log.rows] = np.arange(self._active_start, self._active_start + log.rows.size, dtype=np.int64)
        self._marks_given = self._active_start + log.rows.size
        encoded = {name: self._encode(name, log.rows) for name in self._objects}
        fragment = self._copy_changes(log.rows, log.was_live, encoded, last, epoch)
        self._encoded = _Encoded(self._active_start, self._marks_given, encoded) if encoded else None
        self._sealed.append(log)
        self._start_fragment()
        self._sweep_if_due()
        return fragment

    def changes(self, since: int) -> Fragment:
        """All that changed between the seal at ``since`` and the last seal, as one fragment: what several merged
        fragments would give, for a checkpoint that covers many epochs. Only right after a seal."""
        assert not self._active.count(), "changes: the active fragment is not sealed"
        epochs = self.epochs()
        logs = self._sealed[epochs.index(since) :]
        if not logs:
            return self._copy_changes(np.zeros(0, np.int64), np.zeros(0, np.bool_), {}, since, since)
        rows, first = np.unique(np.concatenate([log.rows for log in logs]), return_index=True)
        was_live = np.concatenate([log.was_live for log in logs])[first]
        encoded = {name: self._encode(name, rows) for name in self._objects}
        return self._copy_changes(rows, was_live, encoded, since, epochs[-1])

    def undo_to(self, epoch: int) -> bool:
        """Return exactly to the state right after the seal at ``epoch``. False: that is no longer (or not yet)
        known."""
        if epoch not in self.epochs():
            return False
        undone = [log for log in self._sealed if log.epoch > epoch]
        self._active.settle()
        for log in [self._active, *reversed(undone)]:
            self._restore(log)
        del self._sealed[len(self._sealed) - len(undone) :]
        self._encoded = None
        self._start_fragment()
        self._sweep_if_due()
        return True

    def release(self, epoch: int) -> None:
        """A checkpoint at ``epoch`` is complete: forget how to undo fragments sealed at or before it."""
        covered = [log for log in self._sealed if log.epoch <= epoch]
        if covered:
            self._base_epoch = covered[-1].epoch
            del self._sealed[: len(covered)]
            self._sweep_if_due()

    # ---- slices ----------------------------------------------------------------------------------------------------

    def export(self, slices: Collection[int], slices_total: int) -> pl.DataFrame:
        """The live rows of some slices, in the columns of a fragment."""
        self.wake()
        whole, pieces = _parts_of_slices(slices, slices_total)
        cut = self._rows_of(pieces)
        rows = np.concatenate([self._rows_of(whole), cut[self._in_slices(cut, slices, slices_total)]])
        rows = rows[self._live.array[rows]]
        values: dict[str, Array | list[bytes | None]] = {}
        for name, kind in self.spec.values.items():
            values[name] = self._encode(name, rows) if kind.codec else self._values[name].array[rows]
        deleted = np.zeros(rows.size, dtype=np.bool_)
        return _build_frame(self.spec, self._hash.array[rows], self.keys(rows), values, deleted)

    def unreleased(self, slices: Collection[int], slices_total: int) -> pl.DataFrame:
        """What changed in some slices since the last release, as a fragment's columns: all that somebody who has them
        as they were then still lacks. O(rows touched since)."""
        logs = [log for log in [*self._sealed, self._active] if log.count()]
        for log in logs:
            log.settle()
        rows = np.concatenate([np.zeros(0, np.int64), *(log.rows for log in logs)])
        rows, first = np.unique(rows, return_index=True)
        was_live = np.concatenate([np.zeros(0, np.bool_), *(log.was_live for log in logs)])[first]
        inside = self._in_slices(rows, slices, slices_total)
        rows, was_live = rows[inside], was_live[inside]
        encoded = {name: self._encode(name, rows) for name in self._objects}
        return self._copy_changes(rows, was_live, encoded, self._base_epoch, self._base_epoch).frame()

    def merge(self, frame: pl.DataFrame) -> None:
        """Apply what ``unreleased`` gave elsewhere. Recorded: it belongs to the active fragment, can be undone, and is
        in the next seal."""
        gone = frame.filter(pl.col(DELETED))
        if gone.height:
            rows = self.find(gone.get_column(HASH).to_numpy(), gone)
            self.delete(rows[rows >= 0])
        there = frame.filter(~pl.col(DELETED))
        if there.height:
            rows, _ = self.upsert(there.get_column(HASH).to_numpy(), there)
            for name, kind in self.spec.values.items():
                self._values[name].array[rows] = _decode_column(there, name, kind)

    def drop_slices(self, slices: Collection[int], slices_total: int) -> None:
        """Forget some slices altogether: rows, marks and undo information."""
        for waiting in self._waiting:
            waiting.drop(slices, slices_total)
        whole, pieces = _parts_of_slices(slices, slices_total)
        cut = self._rows_of(pieces)
        cut = cut[self._in_slices(cut, slices, slices_total)]
        self._bury(cut[self._live.array[cut]])
        rows = self._rows_of(whole)
        self._forget_history(np.concatenate([cut, rows]))
        self._drop_parts(whole, rows)
        self._sweep_if_due()

    def load(self, frame: pl.DataFrame) -> None:
        """Apply a snapshot or delta frame: later rows win, deleted ones vanish. Not recorded and not dirty."""
        self._call(frame.get_column(HASH).to_numpy())
        self._take_in(frame)
        self._sweep_if_due()

    def bring(self, frames: Sequence[pl.DataFrame]) -> None:
        """As to load these one after the other, of slices that nothing is held of; but a row is taken in when it is
        asked for, or by ``wake``."""
        if any(frame.height for frame in frames):
            self._waiting.append(Waiting(frames, HASH, DELETED))

    def wake(self, count: int | None = None) -> None:
        """Take in about so many of the rows that are waiting, or all. Row numbers hold."""
        while self._waiting and (count is None or count > 0):
            frame = self._waiting[0].take_some(_WOKEN_AT_ONCE if count is None else min(count, _WOKEN_AT_ONCE))
            if frame is None:
                del self._waiting[0]
                continue
            self._take_in(frame)
            count = None if count is None else count - frame.height

    def _call(self, hashes: U64) -> None:
        """Those of these hashes that are waiting are wanted now."""
        found = [frame for waiting in self._waiting if (frame := waiting.take(hashes)) is not None]
        if found:  # together: what was brought at different times has no key in common
            self._take_in(stacked(found))

    def _take_in(self, frame: pl.DataFrame) -> None:
        """Enter rows, and move none: whoever has row numbers keeps them."""
        frame = self._last_of_each_key(frame)
        gone = frame.get_column(DELETED).to_numpy()
        if gone.any():
            rows = self._index_rows(rows_where(frame, gone))
            self._bury(rows[self._live.array[rows]])
            self._forget_history(rows)
            frame = rows_where(frame, ~gone)
        hashes = frame.get_column(HASH).to_numpy()
        rows, were_there = self._find_or_append(hashes, self._conform(frame))
        self._count_live(hashes[~self._live.array[rows]], 1)
        self._live.array[rows] = True
        for name, kind in self.spec.values.items():
            self._values[name].array[rows] = _decode_column(frame, name, kind)
        self._forget_history(rows[were_there])

    # ---- for tests -------------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Check every invariant: O(state), for tests and simulation."""
        every = self._rows_of(np.arange(PARTS))
        hashes = self._hash.array[every]
        alive = self._live.array[every]
        live = np.flatnonzero(self._live.array[: self._blocks.end])
        assert np.array_equal(live, np.sort(every[alive])), "live rows outside of every block"
        for waiting in self._waiting:
            assert not np.isin(waiting.hashes(), hashes[alive]).any(), "a row that waits is here already"
        assert np.array_equal(self._given, np.bincount(part_of(hashes), minlength=PARTS))
        assert np.array_equal(self._alive, np.bincount(part_of(hashes[alive]), minlength=PARTS))
        assert np.array_equal(self._given, self._index.used) and self._keys.height == every.size
        assert np.array_equal(np.sort(self._index.rows()), np.sort(every)), "the index does not hold each row once"
        for name, kind in self.spec.values.items():
            values = self._values[name].array[every[~alive]]
            fresh = np.full(values.size, kind.fill, dtype=kind.dtype)
            assert np.array_equal(values, fresh, equal_nan=kind.dtype.kind == "f"), f"a dead row has values in {name}"
        held = set(every.tolist())
        for log in [*self._sealed, self._active]:
            log.settle()
            logged = log.rows.tolist()
            assert len(set(logged)) == len(logged) and held.issuperset(logged)
        marked = every[self._mark.array[every] >= self._active_start]
        assert set(marked.tolist()) == set(self._active.rows.tolist())

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _conform(self, keys: pl.DataFrame) -> pl.DataFrame:
        names = self.spec.key.names()
        if keys.columns != names:
            keys = pick(keys, names)
        return keys if keys.schema == self.spec.key else keys.cast(self.spec.key)

    def distinct(self, rows: Rows) -> Rows:
        """``rows`` without repeats, without sorting: each writes its position, the one still there afterwards stays."""
        if rows.size < 2:
            return rows
        if self._scratch.size < self._blocks.end:  # one cell for each row; its contents mean nothing
            self._scratch = np.zeros(max(self._blocks.end, 2 * self._scratch.size), dtype=np.int32)
        scratch = self._scratch
        place = np.arange(rows.size, dtype=np.int32)
        scratch[rows] = place
        stays = scratch.take(rows) == place
        return rows if stays.all() else rows[stays]

    def _probe(self, hashes: U64, keys: pl.DataFrame) -> tuple[Rows, Rows, Rows]:
        """The row of each key, dead rows included, or -1 with the free slot (and probe step) where it belongs."""
        assert hashes.size == keys.height
        rows, pos, step = self._index.walk(hashes, self._hash.array)
        suspects = None if rows.size and int(rows.min()) >= 0 else np.flatnonzero(rows >= 0)
        while suspects is None or suspects.size:
            found = rows if suspects is None else rows[suspects]
            given = keys if suspects is None or suspects.size == rows.size else take(keys, suspects)
            differs = np.flatnonzero(~same_keys(self.keys(found), given))
            if not differs.size:
                break
            # True collisions of 64-bit hashes: the key, if it is here at all, lies further along its probe path.
            suspects = differs if suspects is None else suspects[differs]
            rows[suspects] = self._index.walk_on(hashes, self._hash.array, pos, step, suspects)
            suspects = suspects[rows[suspects] >= 0]
        return rows, pos, step

    def _index_rows(self, frame: pl.DataFrame) -> Rows:
        """Rows of keys that are indexed, live or dead."""
        rows, _, _ = self._probe(frame.get_column(HASH).to_numpy(), self._conform(frame))
        return rows[rows >= 0]

    def _find_or_append(self, hashes: U64, keys: pl.DataFrame) -> tuple[Rows, Mask]:
        """The row of each key, and which had one; the others get a row that is not live yet and in no log."""
        rows, pos, step = self._probe(hashes, keys)
        known = rows >= 0
        absent = np.flatnonzero(~known)
        if not absent.size:
            return rows, known
        if absent.size < rows.size:
            hashes, keys = hashes[absent], take(keys, absent)
        counts = np.bincount(part_of(hashes), minlength=PARTS)
        if self._index.reserve(counts, self._hash.array):
            _, pos, step = self._probe(hashes, keys)
        else:
            pos, step = pos[absent], step[absent]
        fresh = self._append(hashes, counts)
        self._key.array[fresh] = self._keys.put(keys, fresh)
        alike = self._index.insert(fresh, hashes, self._hash.array, (pos, step))
        assert not alike or _all_differ(keys), "upsert: the same key twice in one call"
        rows[absent] = fresh
        return rows, known

    def _append(self, hashes: U64, counts: Rows) -> Rows:
        """New rows, not live yet, of keys with these hashes: so many in each part."""
        short = np.flatnonzero(counts > self._room)
        easy = np.flatnonzero((counts > 0) & (counts <= self._room))
        parts, starts, lengths = easy, self._next[easy], counts[easy]
        self._next[easy] += lengths
        self._room[easy] -= lengths
        if short.size:
            made = [(p, start, n) for p in short.tolist() for start, n in self._take_rows(p, int(counts[p]))]
            of_part, begin, length = (np.array(column, dtype=np.int64) for column in zip(*made, strict=True))
            parts = np.concatenate([parts, of_part])
            order = np.argsort(parts, kind="stable")
            starts = np.concatenate([starts, begin])[order]
            lengths = np.concatenate([lengths, length])[order]
        self._given += counts
        rows = np.empty(hashes.size, dtype=np.int64)
        rows[np.argsort(part_of(hashes).astype(np.uint8), kind="stable")] = spans(starts, lengths)
        self._hash.array[rows] = hashes
        return rows

    def _take_rows(self, part: int, count: int) -> list[tuple[int, int]]:
        """Starts and lengths of the next ``count`` rows of a part, in new blocks where its last one is full."""
        taken = [(int(self._next[part]), int(self._room[part]))] if self._room[part] else []
        count -= int(self._room[part])
        while count:
            wanted = power_of_two(max(count, int(self._given[part]) // 4))
            size = min(max(wanted, _BLOCK_ROWS_MIN), _BLOCK_ROWS_MAX)
            start = self._blocks.take(size)
            self._blocks_of.setdefault(part, []).append((start, size))
            assert self._blocks.end < _ROWS_MAX, "too many keys in one table"
            for column in self._every_column():
                column.grow(self._blocks.end)
            used = min(size, count)
            taken.append((start, used))
            count -= used
            self._next[part], self._room[part] = start + used, size - used
        return taken

    def _every_column(self) -> list[Column]:
        return [self._hash, self._live, self._mark, self._key, *self._values.values()]

    def _rows_of(self, parts: NDArray[np.intp]) -> Rows:
        """All rows of some parts, dead ones too."""
        starts, lengths = [], []
        for p in filter(self._blocks_of.__contains__, parts.tolist()):
            starts += [start for start, _ in self._blocks_of[p]]
            lengths += [size for _, size in self._blocks_of[p]]
            lengths[-1] -= int(self._room[p])
        return spans(np.array(starts, dtype=np.int64), np.array(lengths, dtype=np.int64))

    def _drop_parts(self, parts: NDArray[np.intp], rows: Rows) -> None:
        """All their rows and blocks."""
        self._keys.drop(self._key.array[rows])
        self._index.drop(parts)
        for p in parts.tolist():
            for start, size in self._blocks_of.pop(p, ()):
                for column in self._every_column():
                    column.clear(start, start + size)
                self._blocks.give(start, size)
        for counted in (self._next, self._room, self._given, self._alive):
            counted[parts] = 0

    def _count_live(self, hashes: U64, sign: int) -> None:
        if hashes.size:
            self._alive += sign * np.bincount(part_of(hashes), minlength=PARTS)

    def _touch_distinct(self, rows: Rows) -> None:
        marks = self._mark.array.take(rows)
        first = rows[marks < self._active_start] if marks.size and int(marks.max()) >= self._active_start else rows
        if not first.size:
            return
        before: dict[str, Array | list[bytes | None]] = {}
        for name, kind in self.spec.values.items():
            before[name] = self._encode(name, first) if kind.codec else self._values[name].array.take(first)
        self._active.add(first, self._live.array.take(first), before)
        self._mark.array[first] = np.arange(self._marks_given, self._marks_given + first.size, dtype=np.int64)
        self._marks_given += first.size

    def _encode(self, name: str, rows: Rows) -> list[bytes | None]:
        """Objects of some rows as bytes. A row unchanged since the last seal was encoded there already."""
        codec = self.spec.values[name].codec
        assert codec is not None
        values = self._values[name].array[rows].tolist()
        known = self._encoded
        if known is None:
            return [None if value is None else codec.encode(value) for value in values]
        marks = self._mark.array[rows].tolist()
        done = known.columns[name]
        return [
            None
            if value is None
            else done[mark - known.start]
            if known.start <= mark < known.end
            else codec.encode(value)
            for value, mark in zip(values, marks, strict=True)
        ]

    def _copy_changes(
        self, rows: Rows, was_live: Mask, encoded: Mapping[str, list[bytes | None]], epoch_from: int, epoch_to: int
    ) -> Fragment:
        live = self._live.array.take(rows)
        seen = was_live | live  # a key that came and went within the fragment concerns nobody
        keep = None if seen.all() else np.flatnonzero(seen)
        kept = rows if keep is None else rows[keep]
        values: dict[str, Array | list[bytes | None]] = {}
        for name, kind in self.spec.values.items():
            if kind.codec:
                column = encoded.get(name, [])
                values[name] = column if keep is None else [column[i] for i in keep.tolist()]
                sizes = [len(item) for item in column[:1000] if item is not None]
                if sizes:
                    self._object_bytes_mean = 64.0 + sum(sizes) / len(sizes)
            else:
                values[name] = self._values[name].array.take(kept)
        deleted = ~(live if keep is None else live[keep])
        hashes, numbers = self._hash.array.take(kept), self._key.array.take(kept)
        return Fragment(self.spec, epoch_from, epoch_to, hashes, self._keys.snapshot(), numbers, values, deleted)

    def _start_fragment(self) -> None:
        self._active = _Log()
        self._active_start = self._marks_given

    def _bury(self, rows: Rows) -> None:
        """Distinct live rows die. Dead rows always hold fill values: a key that comes back starts afresh."""
        self._live.array[rows] = False
        self._count_live(self._hash.array[rows], -1)
        for name, kind in self.spec.values.items():
            self._values[name].array[rows] = kind.fill

    def _restore(self, log: _Log) -> None:
        rows = log.rows
        if not rows.size:
            return
        hashes = self._hash.array[rows]
        self._count_live(hashes[self._live.array[rows]], -1)
        self._count_live(hashes[log.was_live], 1)
        self._live.array[rows] = log.was_live
        for name, kind in self.spec.values.items():
            before = log.before[name]
            self._values[name].array[rows] = _decode_list(kind.codec, before) if kind.codec else before

    def _forget_history(self, rows: Rows) -> None:
        """As though the rows had always been what they are now."""
        self._mark.array[rows] = 0
        logs = [log for log in [*self._sealed, self._active] if log.count()]
        if not rows.size or not logs:
            return
        forgotten = self._flagged(rows)
        for log in logs:
            log.keep(lambda logged: ~forgotten[logged])

    def _flagged(self, rows: Rows) -> Mask:
        """By row, whether it is among these. Only the memory of those that are asked for is ever real."""
        flags = np.zeros(self._blocks.end, dtype=np.bool_)
        flags[rows] = True
        return flags

    def _in_slices(self, rows: Rows, slices: Collection[int], slices_total: int) -> Mask:
        wanted = np.zeros(slices_total, dtype=np.bool_)
        wanted[list(slices)] = True
        return wanted[slice_of(self._hash.array[rows], slices_total)]

    def _last_of_each_key(self, frame: pl.DataFrame) -> pl.DataFrame:
        hashes = np.sort(frame.get_column(HASH).to_numpy())
        if hashes.size < 2 or not (hashes[1:] == hashes[:-1]).any():
            return frame  # distinct hashes, hence distinct keys
        return frame.unique(subset=self.spec.key.names(), keep="last", maintain_order=True)

    def _sweep_if_due(self) -> None:
        """Sweep dead rows out once they outnumber the live ones, not counting those that undo logs may still revive:
        the parts with most of them first, and no more at a time than an epoch does not notice."""
        logged = sum(log.count() for log in [*self._sealed, self._active])
        alive = int(self._alive.sum())
        if self.rows_held - alive - logged > max(alive, self._sweep_rows_min):
            dead = self._given - self._alive
            due = np.argsort(-dead, kind="stable")[: np.count_nonzero(dead)]
            self._sweep(due[: max(1, np.count_nonzero(np.cumsum(self._given[due]) <= _SWEPT_AT_ONCE))])
        for rows, numbers in self._keys.tidy(self._sweep_rows_min):
            self._key.array[rows] = numbers

    def _sweep(self, parts: NDArray[np.intp]) -> None:
        """Move what must stay of some parts into new blocks."""
        logs = [*self._sealed, self._active]
        for log in logs:
            log.settle()
        rows = self._rows_of(parts)
        keep = self._live.array[rows] | self._flagged(np.concatenate([log.rows for log in logs]))[rows]
        stays = np.sort(rows[keep])
        columns = self._every_column()
        kept = [column.array[stays] for column in columns]
        hashes, numbers = self._hash.array[stays], self._key.array[stays]
        alive = self._alive[parts]
        # Dropped with the parts are the keys of the others alone.
        self._drop_parts(parts, rows[~keep])
        self._alive[parts] = alive
        counts = np.bincount(part_of(hashes), minlength=PARTS)
        self._index.reserve(counts, self._hash.array)
        moved = self._append(hashes, counts)
        for column, values in zip(columns, kept, strict=True):
            column.array[moved] = values
        self._keys.moved(numbers, moved)
        self._index.insert(moved, hashes, self._hash.array)
        for log in logs if stays.size else ():
            place = np.searchsorted(stays, log.rows)
            log.rows = np.where(stays.take(place, mode="clip") == log.rows, moved.take(place, mode="clip"), log.rows)


def _parts_of_slices(slices: Collection[int], slices_total: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The parts that hold nothing else, and those that hold other slices as well."""
    wanted = np.zeros(slices_total, dtype=np.bool_)
    wanted[list(slices)] = True
    upto = np.concatenate([[0], np.cumsum(wanted)])
    edges = np.arange(PARTS + 1, dtype=np.uint64) << np.uint64(56)
    first = slice_of(edges[:-1], slices_total).astype(np.intp)
    last = slice_of(edges[1:] - np.uint64(1), slices_total).astype(np.intp)
    inside = upto[last + 1] - upto[first]
    whole = inside == last + 1 - first
    return np.flatnonzero(whole), np.flatnonzero((inside > 0) & ~whole)


@dataclass
class _Log:
    """The undo log of one fragment: the rows it touched first, and what they were before. Each row is in it once."""

    epoch: int = -1
    rows: Rows = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    was_live: Mask = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    before: dict[str, Any] = field(default_factory=dict)
    _parts: list[tuple[Rows, Mask, dict[str, Any]]] = field(default_factory=list)

    def add(self, rows: Rows, was_live: Mask, before: dict[str, Any]) -> None:
        self._parts.append((rows, was_live, before))

    def count(self) -> int:
        return int(self.rows.size) + sum(int(rows.size) for rows, _, _ in self._parts)

    def settle(self) -> None:
        """Join the parts that were added."""
        if not self._parts:
            return
        parts = self._parts if not self.rows.size else [(self.rows, self.was_live, self.before), *self._parts]
        self._parts = []
        if len(parts) == 1:
            self.rows, self.was_live, self.before = parts[0]
            return
        self.rows = np.concatenate([rows for rows, _, _ in parts])
        self.was_live = np.concatenate([was_live for _, was_live, _ in parts])
        self.before = {name: _joined([before[name] for _, _, before in parts]) for name in parts[0][2]}

    def keep(self, wanted: Any) -> None:
        self.settle()
        stays = wanted(self.rows)
        if stays.all():
            return
        self.rows, self.was_live = self.rows[stays], self.was_live[stays]
        places = np.flatnonzero(stays)
        self.before = {
            name: [column[i] for i in places.tolist()] if isinstance(column, list) else column[places]
            for name, column in self.before.items()
        }

    def nbytes(self) -> int:
        parts = [(self.rows, self.was_live, self.before), *self._parts]
        total = 0
        for rows, was_live, before in parts:
            total += rows.nbytes + was_live.nbytes
            total += sum(64 * len(c) if isinstance(c, list) else c.nbytes for c in before.values())
        return total


@dataclass(frozen=True)
class _Encoded:
    """Object columns as the last seal encoded them, by mark: the next first touch of those rows needs the same
    bytes."""

    start: int
    end: int
    columns: Mapping[str, list[bytes | None]]


def _all_differ(keys: pl.DataFrame) -> bool:
    return bool(keys.n_unique() == keys.height)


def _joined(parts: list[Any]) -> Any:
    if isinstance(parts[0], list):
        return [item for part in parts for item in part]
    return np.concatenate(parts)


def _decode_list(codec: ObjectCodec, items: Any) -> Array:
    out = np.empty(len(items), dtype=object)
    try:
        for i, item in enumerate(items):
            out[i] = None if item is None else codec.decode(item)
    except (ValueError, TypeError, LookupError, ArithmeticError) as error:
        raise CorruptData(
            f"a value in a stored state cannot be read: {error}.",
            remedy="The checkpoint was changed, or written by another version: restore it from a copy, or start anew "
            "with another checkpoint directory.",
        ) from error
    return out


def _decode_column(frame: pl.DataFrame, name: str, kind: ValueType) -> Array:
    """A frame's values for the table. A column that an older checkpoint does not have is filled."""
    if name not in frame.columns:
        return np.full(frame.height, kind.fill, dtype=kind.dtype)
    column = frame.get_column(name)
    if kind.codec:
        return _decode_list(kind.codec, column.to_list())
    if column.null_count():
        column = column.fill_null(kind.fill.item())
    return column.to_numpy().astype(kind.dtype, copy=False)


def _build_frame(
    spec: TableSpec, hashes: U64, keys: pl.DataFrame, values: Mapping[str, Any], deleted: Mask
) -> pl.DataFrame:
    columns = [pl.Series(HASH, hashes, dtype=pl.UInt64), *keys.get_columns()]
    for name, kind in spec.values.items():
        columns.append(pl.Series(name, values[name], dtype=pl.Binary() if kind.codec else None))
    columns.append(pl.Series(DELETED, deleted, dtype=pl.Boolean))
    return frame_of(columns)


__all__ = [
    "DELETED",
    "HASH",
    "Fragment",
    "KeyedTable",
    "ObjectCodec",
    "TableSpec",
    "ValueType",
    "numeric",
    "objects",
]
