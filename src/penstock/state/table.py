"""The keyed state of a stage: one columnar table for all the slices that a container holds.

Why one table, and not one for each slice: an epoch touches keys of every slice, and hundreds of small tables would
cost hundreds of small vector operations. Here the number of slices costs nothing. The table asks a
:class:`~penstock.state.slicemap.SliceMap` which rows belong to a slice, and only when slices move. Every operation of
an epoch takes time in proportion to the keys it touches, never to the size of the state.

**Rows.** Rows are numbered. Keys are immutable polars chunks (:class:`Keys`), values are numpy arrays that grow, and
an open-addressing index leads from the 64-bit hash to the row (:class:`Index`). The keys themselves are compared after
their hashes, so two keys with the same hash stay two keys. To delete a row only clears its ``live`` bit: the row stays
in the index, so that an undo, or the key if it comes back, finds it. Dead rows are swept out when they outnumber the
live ones.

**Parts.** Rows are given out in blocks, and each block belongs to one of 256 *parts*, by the highest bits of the hash.
Work that cannot be done row by row is done part by part: making room in the index, sweeping, bringing and removing
slices. Such work takes as long as a part is large, however large the table is. Operators know nothing of parts.

**Fragments.** Rows touched since the last seal form the *active fragment*. Its log keeps the values that the first
touch of each row replaced. ``seal(epoch)`` ends the fragment, hands out a copy of the changes, which is encoded in the
background, and starts the next fragment. ``undo_to`` replays logs backwards. ``release`` forgets logs once a checkpoint
is complete.

**Slices that come and go.** ``load`` and ``drop_slices`` bring and remove whole slices, and are not recorded. At every
epoch that the table can be undone to, a loaded key counts as having had its loaded value, and a dropped key as never
having been there. So a caller that undoes to an epoch before a load must drop the loaded slices and load them again.
It knows which, because it keeps the versions of its slices.

``bring`` does the same as ``load``, later (:class:`WaitingRows`): a key that was brought is entered when somebody asks
for it, and nobody can tell the difference. Methods that look at every row enter all waiting rows first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import polars as pl
from numpy.typing import NDArray

from penstock.errors import CorruptData
from penstock.frames import frame_of, pick, rows_where, stacked, take
from penstock.state.hashing import hashable
from penstock.state.index import PARTS, Index, part_of
from penstock.state.keys import Keys, same_keys
from penstock.state.memory import Blocks, GrowingArray, power_of_two, spans
from penstock.state.slicemap import SliceMap
from penstock.state.waiting import WaitingRows

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
"""Rows that one sweep looks at. Other dead rows wait for the next sweep."""
_WOKEN_AT_ONCE: Final = 1 << 18
"""Waiting rows that are entered together."""


class ObjectCodec(Protocol):
    """Turns the Python objects of a column into bytes and back. It never gets None, which stands for an absent
    value."""

    def encode(self, value: Any, /) -> bytes: ...

    def decode(self, data: bytes, /) -> Any: ...


@dataclass(frozen=True)
class ValueType:
    """The type of a value column: a numpy dtype with the value of fresh rows, or Python objects with a codec."""

    dtype: np.dtype[Any]
    fill: Any = None
    codec: ObjectCodec | None = None


def numeric(dtype: Any, fill: Any = 0) -> ValueType:
    """A column of numpy values. A new key starts with ``fill``."""
    resolved = np.dtype(dtype)
    assert not resolved.hasobject, "objects need a codec: use objects(codec)"
    return ValueType(resolved, np.asarray(fill).astype(resolved)[()])


def objects(codec: ObjectCodec) -> ValueType:
    """A column of Python objects, where None stands for an absent value. Fragments and undo logs hold them encoded."""
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
        """The columns of fragments and exports: hash, keys, values (objects as Binary), deleted."""
        schema: dict[str, Any] = {HASH: pl.UInt64(), **self.key}
        for name, kind in self.values.items():
            schema[name] = pl.Binary() if kind.codec else pl.Series(np.empty(0, dtype=kind.dtype)).dtype
        schema[DELETED] = pl.Boolean()
        return pl.Schema(schema)


@dataclass(frozen=True)
class Fragment:
    """What changed after ``epoch_from``, up to ``epoch_to``: a private copy, safe to read in another thread.

    It has only the numbers of the keys. Keys never change, so copying them, about a third of the work, is left to the
    reader of the fragment.
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
        """The changes in the columns of ``spec.frame_schema()``. Deleted rows have fill values."""
        keys = self.kept_keys.gather(self.key_numbers)
        return _build_frame(self.spec, self.hashes, keys, self.values, self.deleted)


class KeyedTable:
    """Keyed state of many slices, for one writer.

    Row numbers are valid until ``seal``, ``undo_to``, ``release``, ``load``, ``drop_slices`` or ``reset`` is called,
    and arrays of columns until the next call that looks for keys or rows."""

    def __init__(self, spec: TableSpec, base_epoch: int = 0, *, sweep_rows_min: int = 4096) -> None:
        self.spec = spec
        self._sweep_rows_min = sweep_rows_min
        self._objects = tuple(name for name, kind in spec.values.items() if kind.codec)
        self.reset(base_epoch)

    def reset(self, epoch: int) -> None:
        """Make the table empty, as though it was sealed at ``epoch``."""
        self._hash = GrowingArray(np.uint64)
        self._live = GrowingArray(np.bool_)
        # mark[row] is the position of the row's last first touch, counted over the whole life of the table. A row is in
        # the active fragment exactly when its mark is at or after _active_start, so a new fragment clears nothing.
        # Marks begin at 1, because memory from the system is zero, which means "never".
        self._mark = GrowingArray(np.int64)
        self._key = GrowingArray(np.int32)
        self._values = {name: GrowingArray(kind.dtype, kind.fill) for name, kind in self.spec.values.items()}
        self._keys = Keys(self.spec.key)
        self._index = Index()
        self._scratch: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
        # By part: its blocks, its next free row, the free rows from there on, its rows in use, and its live rows.
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
        self._waiting: list[WaitingRows] = []

    # ---- reading ---------------------------------------------------------------------------------------------------

    @property
    def rows_live(self) -> int:
        """Number of live rows, waiting ones included."""
        return int(self._alive.sum()) + self.rows_waiting

    @property
    def rows_waiting(self) -> int:
        """Number of live rows that were brought and not entered yet."""
        return sum(waiting.rows for waiting in self._waiting)

    @property
    def waits(self) -> bool:
        """Whether ``wake`` has something to do."""
        return bool(self._waiting)

    @property
    def rows_held(self) -> int:
        """Number of rows in use: live ones, and dead ones that were not swept out yet."""
        return int(self._given.sum())

    @property
    def nbytes(self) -> int:
        """An estimate of the memory held by arrays, index, keys and undo logs. Objects count by the mean of their
        encoded sizes."""
        held = self.rows_held * sum(int(column.dtype.itemsize) for column in self._every_column())
        held += self._index.nbytes() + self._keys.nbytes()
        held += int(len(self._objects) * int(self._alive.sum()) * self._object_bytes_mean)
        held += sum(waiting.nbytes for waiting in self._waiting)
        return held + sum(log.nbytes() for log in [*self._sealed, self._active])

    def column(self, name: str) -> Array:
        """The array of a column, by row number, to read and write. Call ``touch`` before writing.

        It is valid until the next call that looks for keys, because such a call may add rows. Rows that are not live
        hold the fill value. Waiting rows are not in it."""
        return self._values[name].array[: self._blocks.end]

    def live_rows(self) -> Rows:
        """Every live row. Takes time in proportion to the state."""
        self.wake()
        return np.flatnonzero(self._live.array[: self._blocks.end]).astype(np.int64, copy=False)

    def keys(self, rows: Rows) -> pl.DataFrame:
        return self._keys.gather(self._key.array.take(rows))

    def hashes(self, rows: Rows) -> U64:
        return self._hash.array[rows]

    def live_hashes(self) -> U64:
        """The hash of every live row, waiting ones included. Takes time in proportion to the state."""
        here = self._hash.array[: self._blocks.end][self._live.array[: self._blocks.end]]
        return np.concatenate([here, *(waiting.live_hashes() for waiting in self._waiting)])

    def find(self, hashes: U64, keys: pl.DataFrame) -> Rows:
        """The row of each key, or -1 for an absent key. Touches nothing."""
        self._wake_for(hashes)
        rows, _, _ = self._probe(hashes, self._conform(keys))
        rows[~self._live.array[rows]] = -1  # -1 itself reads some row and stays -1 either way
        return rows

    def epochs(self) -> list[int]:
        """The epochs that ``undo_to`` can return to, oldest first."""
        return [self._base_epoch, *(log.epoch for log in self._sealed)]

    # ---- writing ---------------------------------------------------------------------------------------------------

    def upsert(self, hashes: U64, keys: pl.DataFrame) -> tuple[Rows, Mask]:
        """The row of each key, and which rows are new. An absent key gets a row with fill values. Touches the rows.

        No key may come twice in one call."""
        self._wake_for(hashes)
        rows, _ = self._find_or_append(hashes, self._conform(keys))
        assert self.distinct(rows).size == rows.size, "upsert: the same key twice in one call"
        is_new = ~self._live.array.take(rows)
        self._touch_distinct(rows)
        self._live.array[rows] = True
        self._count_live(hashes[is_new], 1)
        return rows, is_new

    def touch(self, rows: Rows) -> None:
        """Call it before writing to rows: it marks them as changed, and keeps what they were. Repeats do no harm."""
        assert bool(self._live.array[rows].all()), "touch: a row is not live"
        self._touch_distinct(self.distinct(rows))

    def delete(self, rows: Rows) -> None:
        """Remove live rows. Their keys may come back later, as new keys."""
        rows = self.distinct(rows)
        assert bool(self._live.array[rows].all()), "delete: a row is not live"
        self._touch_distinct(rows)
        self._make_dead(rows)

    # ---- fragments -------------------------------------------------------------------------------------------------

    def seal(self, epoch: int) -> Fragment:
        """End the active fragment at ``epoch``, and return a copy of its changes."""
        last = self.epochs()[-1]
        assert epoch > last, f"seal({epoch}) after {last}"
        log = self._active
        log.settle()
        log.epoch = epoch
        # Number the log without gaps, so that encoded objects can be looked up by mark.
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
        """All changes between the seal at ``since`` and the last seal, as one fragment, for a checkpoint that covers
        many epochs. Equal to the merged fragments of these epochs. To be called right after a seal."""
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
        """Return exactly to the state right after the seal at ``epoch``. False: the table does not know that state any
        more, or not yet, and nothing changed."""
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
        """A checkpoint at ``epoch`` is complete: forget how to undo the fragments sealed up to it."""
        covered = [log for log in self._sealed if log.epoch <= epoch]
        if covered:
            self._base_epoch = covered[-1].epoch
            del self._sealed[: len(covered)]
            self._sweep_if_due()

    # ---- slices ----------------------------------------------------------------------------------------------------

    def export(self, slices: Collection[int], slicemap: SliceMap) -> pl.DataFrame:
        """The live rows of some slices, in the columns of a fragment."""
        self.wake()
        whole, pieces = _parts_of_slices(slices, slicemap)
        cut = self._rows_of(pieces)
        rows = np.concatenate([self._rows_of(whole), cut[slicemap.mask(self._hash.array[cut], slices)]])
        rows = rows[self._live.array[rows]]
        values: dict[str, Array | list[bytes | None]] = {}
        for name, kind in self.spec.values.items():
            values[name] = self._encode(name, rows) if kind.codec else self._values[name].array[rows]
        deleted = np.zeros(rows.size, dtype=np.bool_)
        return _build_frame(self.spec, self._hash.array[rows], self.keys(rows), values, deleted)

    def unreleased(self, slices: Collection[int], slicemap: SliceMap) -> pl.DataFrame:
        """What changed in some slices since the last release, in the columns of a fragment. A container that has the
        slices as they were at the release is up to date once it has merged these rows."""
        logs = [log for log in [*self._sealed, self._active] if log.count()]
        for log in logs:
            log.settle()
        rows = np.concatenate([np.zeros(0, np.int64), *(log.rows for log in logs)])
        rows, first = np.unique(rows, return_index=True)
        was_live = np.concatenate([np.zeros(0, np.bool_), *(log.was_live for log in logs)])[first]
        inside = slicemap.mask(self._hash.array[rows], slices)
        rows, was_live = rows[inside], was_live[inside]
        encoded = {name: self._encode(name, rows) for name in self._objects}
        return self._copy_changes(rows, was_live, encoded, self._base_epoch, self._base_epoch).frame()

    def merge(self, frame: pl.DataFrame) -> None:
        """Apply rows that ``unreleased`` of another table gave. Unlike a load it is recorded: the changes belong to the
        active fragment, can be undone, and are in the next seal."""
        gone = frame.filter(pl.col(DELETED))
        if gone.height:
            rows = self.find(gone.get_column(HASH).to_numpy(), gone)
            self.delete(rows[rows >= 0])
        there = frame.filter(~pl.col(DELETED))
        if there.height:
            rows, _ = self.upsert(there.get_column(HASH).to_numpy(), there)
            for name, kind in self.spec.values.items():
                self._values[name].array[rows] = _decode_column(there, name, kind)

    def drop_slices(self, slices: Collection[int], slicemap: SliceMap) -> None:
        """Forget some slices altogether: their rows, marks and undo logs."""
        for waiting in self._waiting:
            waiting.drop(slices, slicemap)
        whole, pieces = _parts_of_slices(slices, slicemap)
        cut = self._rows_of(pieces)
        cut = cut[slicemap.mask(self._hash.array[cut], slices)]
        self._make_dead(cut[self._live.array[cut]])
        rows = self._rows_of(whole)
        self._forget_history(np.concatenate([cut, rows]))
        self._drop_parts(whole, rows)
        self._sweep_if_due()

    def load(self, frame: pl.DataFrame) -> None:
        """Apply a base or a delta: later rows win, and deleted keys vanish. It is not recorded, and no row counts as
        changed."""
        self._wake_for(frame.get_column(HASH).to_numpy())
        self._enter(frame)
        self._sweep_if_due()

    def bring(self, frames: Sequence[pl.DataFrame]) -> None:
        """The same as to load these frames one after the other, but each row is entered when somebody asks for it, or
        by ``wake``. The table must hold nothing of their slices."""
        if any(frame.height for frame in frames):
            self._waiting.append(WaitingRows(frames, HASH, DELETED))

    def wake(self, count: int | None = None) -> None:
        """Enter about ``count`` of the waiting rows; None: all of them. Row numbers stay valid."""
        while self._waiting and (count is None or count > 0):
            frame = self._waiting[0].take_some(_WOKEN_AT_ONCE if count is None else min(count, _WOKEN_AT_ONCE))
            if frame is None:
                del self._waiting[0]
                continue
            self._enter(frame)
            count = None if count is None else count - frame.height

    def _wake_for(self, hashes: U64) -> None:
        """Enter the waiting rows that have one of these hashes."""
        found = [frame for waiting in self._waiting if (frame := waiting.take(hashes)) is not None]
        if found:  # together: frames brought at different times have no key in common
            self._enter(stacked(found))

    def _enter(self, frame: pl.DataFrame) -> None:
        """Enter rows that were loaded or brought. No row moves, so row numbers stay valid."""
        frame = self._last_of_each_key(frame)
        gone = frame.get_column(DELETED).to_numpy()
        if gone.any():
            rows = self._index_rows(rows_where(frame, gone))
            self._make_dead(rows[self._live.array[rows]])
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
        """Check every invariant, for tests and the simulator. Takes time in proportion to the state."""
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
        """The key columns of a frame, in the order and with the types of the table."""
        names = self.spec.key.names()
        if keys.columns != names:
            keys = pick(keys, names)
        return keys if keys.schema == self.spec.key else keys.cast(self.spec.key)

    def distinct(self, rows: Rows) -> Rows:
        """``rows`` without repeats. Faster than sorting: each row writes its position to a cell, and the last writer
        stays."""
        if rows.size < 2:
            return rows
        if self._scratch.size < self._blocks.end:  # one cell for each row, whatever it holds
            self._scratch = np.zeros(max(self._blocks.end, 2 * self._scratch.size), dtype=np.int32)
        scratch = self._scratch
        place = np.arange(rows.size, dtype=np.int32)
        scratch[rows] = place
        stays = scratch.take(rows) == place
        return rows if stays.all() else rows[stays]

    def _probe(self, hashes: U64, keys: pl.DataFrame) -> tuple[Rows, Rows, Rows]:
        """The row of each key, dead rows included, or -1. Also the slot of the index, and the step, that each search
        reached: there an absent key is to be entered."""
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
        """The rows of those keys that the index has, live or dead."""
        rows, _, _ = self._probe(frame.get_column(HASH).to_numpy(), self._conform(frame))
        return rows[rows >= 0]

    def _find_or_append(self, hashes: U64, keys: pl.DataFrame) -> tuple[Rows, Mask]:
        """The row of each key, and which keys had one. Other keys get a row that is not live yet, and in no log."""
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
        """New rows, not live yet, for keys with these hashes. ``counts``: their number by part."""
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
        """Starts and lengths of the next ``count`` free rows of a part. Takes new blocks when its last block is
        full."""
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

    def _every_column(self) -> list[GrowingArray]:
        return [self._hash, self._live, self._mark, self._key, *self._values.values()]

    def _rows_of(self, parts: NDArray[np.intp]) -> Rows:
        """All rows of some parts, dead ones included."""
        starts, lengths = [], []
        for p in filter(self._blocks_of.__contains__, parts.tolist()):
            starts += [start for start, _ in self._blocks_of[p]]
            lengths += [size for _, size in self._blocks_of[p]]
            lengths[-1] -= int(self._room[p])
        return spans(np.array(starts, dtype=np.int64), np.array(lengths, dtype=np.int64))

    def _drop_parts(self, parts: NDArray[np.intp], rows: Rows) -> None:
        """Forget some parts: their keys, blocks and index. ``rows``: all rows in them whose keys go."""
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
        """Rows with these hashes have become live (``sign`` 1) or dead (-1)."""
        if hashes.size:
            self._alive += sign * np.bincount(part_of(hashes), minlength=PARTS)

    def _touch_distinct(self, rows: Rows) -> None:
        """Log what distinct rows were, where this fragment has not touched them yet."""
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
        """The objects of some rows as bytes. The last seal has encoded the rows that have not changed since."""
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
        """The rows as they are now, as a fragment."""
        live = self._live.array.take(rows)
        seen = was_live | live  # a key that came and went within the fragment is left out
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

    def _make_dead(self, rows: Rows) -> None:
        """Make distinct live rows dead. Dead rows always hold fill values, so that a key that comes back starts
        afresh."""
        self._live.array[rows] = False
        self._count_live(self._hash.array[rows], -1)
        for name, kind in self.spec.values.items():
            self._values[name].array[rows] = kind.fill

    def _restore(self, log: _Log) -> None:
        """Give the rows of a log the values that they had before it."""
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
        """Remove rows from the undo logs, as though they had always been what they are now."""
        self._mark.array[rows] = 0
        logs = [log for log in [*self._sealed, self._active] if log.count()]
        if not rows.size or not logs:
            return
        forgotten = self._flagged(rows)
        for log in logs:
            log.keep(lambda logged: ~forgotten[logged])

    def _flagged(self, rows: Rows) -> Mask:
        """For every row of the table, whether it is one of ``rows``. The system gives memory only to pages that are
        used."""
        flags = np.zeros(self._blocks.end, dtype=np.bool_)
        flags[rows] = True
        return flags

    def _last_of_each_key(self, frame: pl.DataFrame) -> pl.DataFrame:
        hashes = np.sort(frame.get_column(HASH).to_numpy())
        if hashes.size < 2 or not (hashes[1:] == hashes[:-1]).any():
            return frame  # distinct hashes, hence distinct keys
        return frame.unique(subset=self.spec.key.names(), keep="last", maintain_order=True)

    def _sweep_if_due(self) -> None:
        """Sweep dead rows out once they outnumber the live ones. Rows that an undo may revive do not count.

        The parts with most dead rows come first, up to ``_SWEPT_AT_ONCE`` rows: longer work would delay the epoch."""
        logged = sum(log.count() for log in [*self._sealed, self._active])
        alive = int(self._alive.sum())
        if self.rows_held - alive - logged > max(alive, self._sweep_rows_min):
            dead = self._given - self._alive
            due = np.argsort(-dead, kind="stable")[: np.count_nonzero(dead)]
            self._sweep(due[: max(1, np.count_nonzero(np.cumsum(self._given[due]) <= _SWEPT_AT_ONCE))])
        for rows, numbers in self._keys.tidy(self._sweep_rows_min):
            self._key.array[rows] = numbers

    def _sweep(self, parts: NDArray[np.intp]) -> None:
        """Move the rows of some parts that must stay into new blocks, and drop the others."""
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
        # Rows that stay keep their keys; only the keys of the others go with the parts.
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


def _parts_of_slices(slices: Collection[int], slicemap: SliceMap) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The parts that hold nothing but these slices, and the parts that hold some of them and others as well."""
    edges = np.arange(PARTS + 1, dtype=np.uint64) << np.uint64(56)
    whole, some = slicemap.of_ranges(edges[:-1], edges[1:] - np.uint64(1), slices)
    return np.flatnonzero(whole), np.flatnonzero(some & ~whole)


@dataclass
class _Log:
    """The undo log of one fragment: the rows that it touched, each once, and what they were before."""

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
        """Join what was added into one array for each column."""
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

    def keep(self, wanted: Callable[[Rows], Mask]) -> None:
        """Keep only the rows for which ``wanted`` is true."""
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
    """Object columns as the last seal encoded them, by mark. The next first touch of these rows logs the same bytes."""

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
    """The values of a frame's column. A column that an older checkpoint does not have gets the fill value."""
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
