"""The keyed state of a stage: one columnar table for all the slices that a container holds.

Why one table and not one per slice: an epoch touches keys of every slice, and hundreds of small tables would cost
hundreds of small vector operations. Here the number of slices costs nothing; a slice is only a predicate on the hash,
used when slices move. Every operation of an epoch is O(keys touched), never O(state).

How it is laid out: *rows* are numbered; keys are immutable polars chunks (:class:`_Keys`), values are growable numpy
arrays, and an open-addressing index maps the 64-bit hash to the row (:class:`_Index`). Keys are compared after the
hash, so a true collision of hashes is still exact. Deleting only clears a row's ``live`` bit: the row stays indexed,
so that an undo or a return of the key finds it; dead rows are swept out when they outnumber the live ones.

Fragments: rows touched since the last seal form the *active fragment*. Its log keeps what each first touch replaced.
``seal(epoch)`` ends it, hands out a copy of what changed (to be encoded in the background), and starts the next one;
``undo_to`` replays logs backwards; ``release`` forgets logs once a checkpoint is complete.

``load`` and ``drop_slices`` bring and remove whole slices. They are not recorded: a loaded key counts as having always
had its loaded value, and a dropped one as never having been here, at every epoch that can be undone to. A caller that
undoes to an epoch before a load must therefore drop the loaded slices and load them again; it knows, for it keeps
slice versions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import polars as pl
from numpy.typing import NDArray

from penstock.state.hashing import hashable, slice_of

Rows = NDArray[np.int64]
Mask = NDArray[np.bool_]
U64 = NDArray[np.uint64]
Array = NDArray[Any]

HASH: Final = "__hash"
DELETED: Final = "__deleted"

_ROWS_FIRST: Final = 64
_ROWS_MAX: Final = 2**31 - 1


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
    kept_keys: _Keys
    key_rows: Rows
    values: Mapping[str, Array | list[bytes | None]]
    deleted: Mask

    @property
    def rows(self) -> int:
        return int(self.hashes.size)

    def frame(self) -> pl.DataFrame:
        """Hash, keys, values and the deleted flag, in ``spec.frame_schema()``. Deleted rows have fill values."""
        keys = self.kept_keys.gather(self.key_rows)
        return _build_frame(self.spec, self.hashes, keys, self.values, self.deleted)


class KeyedTable:
    """Keyed state of many slices. One writer; row numbers hold until ``seal``, ``undo_to``, ``release``, ``load``,
    ``drop_slices`` or ``reset``."""

    def __init__(self, spec: TableSpec, base_epoch: int = 0, *, sweep_rows_min: int = 4096) -> None:
        self.spec = spec
        self._sweep_rows_min = sweep_rows_min
        self._objects = tuple(name for name, kind in spec.values.items() if kind.codec)
        self.reset(base_epoch)

    def reset(self, epoch: int) -> None:
        """Empty, as sealed at ``epoch``."""
        self._rows = 0
        self._rows_live = 0
        self._hash: U64 = np.zeros(_ROWS_FIRST, dtype=np.uint64)
        self._live: Mask = np.zeros(_ROWS_FIRST, dtype=np.bool_)
        # _mark[row] is the position of the row's last first-touch, counted over the table's whole life: a row is in the
        # active fragment exactly when its mark is at or after _active_start. So a new fragment needs no clearing.
        # They begin at 1: 0 is "never", so that room for more rows is zeros, which the system gives for nothing.
        self._mark: Rows = np.zeros(_ROWS_FIRST, dtype=np.int64)
        self._columns: dict[str, Array] = {
            name: np.full(_ROWS_FIRST, kind.fill, dtype=kind.dtype) for name, kind in self.spec.values.items()
        }
        self._keys = _Keys(self.spec.key)
        self._index = _Index()
        self._base_epoch = epoch
        self._sealed: list[_Log] = []
        self._marks_given = 1
        self._active_start = 1
        self._active = _Log()
        self._encoded: _Encoded | None = None
        self._object_bytes_mean = 64.0

    # ---- reading ---------------------------------------------------------------------------------------------------

    @property
    def rows_live(self) -> int:
        return self._rows_live

    @property
    def nbytes(self) -> int:
        """An estimate of the memory held: arrays, index, keys, undo logs; objects by the mean of their encoded
        sizes."""
        arrays = [self._hash, self._live, self._mark, self._index.slots, *self._columns.values()]
        held = sum(a.nbytes for a in arrays) + self._keys.nbytes()
        held += int(len(self._objects) * self._rows_live * self._object_bytes_mean)
        return held + sum(log.nbytes() for log in [*self._sealed, self._active])

    def column(self, name: str) -> Array:
        """The live array of a column, indexed by row. Valid until the next call that adds rows; touch before
        writing."""
        return self._columns[name][: self._rows]

    def live_rows(self) -> Rows:
        """Every live row: O(state)."""
        return np.flatnonzero(self._live[: self._rows]).astype(np.int64, copy=False)

    def keys(self, rows: Rows) -> pl.DataFrame:
        return self._keys.gather(rows)

    def hashes(self, rows: Rows) -> U64:
        return self._hash[rows]

    def find(self, hashes: U64, keys: pl.DataFrame) -> Rows:
        """The row of each key, -1 where it is absent. Touches nothing."""
        rows, _, _ = self._probe(hashes, self._conform(keys))
        rows[~self._live[rows]] = -1  # -1 itself reads some row and stays -1 either way
        return rows

    def epochs(self) -> list[int]:
        """The epochs that ``undo_to`` can return to, oldest first."""
        return [self._base_epoch, *(log.epoch for log in self._sealed)]

    # ---- writing ---------------------------------------------------------------------------------------------------

    def upsert(self, hashes: U64, keys: pl.DataFrame) -> tuple[Rows, Mask]:
        """The row of each key, made where absent (with fill values), and which were made. Touches the rows.

        Keys are unique within a call."""
        rows = self._find_or_append(hashes, self._conform(keys))
        assert self.distinct(rows).size == rows.size, "upsert: the same key twice in one call"
        is_new = ~self._live.take(rows)
        self._touch_distinct(rows)
        self._live[rows] = True
        self._rows_live += int(np.count_nonzero(is_new))
        return rows, is_new

    def touch(self, rows: Rows) -> None:
        """Must precede an in-place write: marks the rows as changed and keeps what they were. Repeats do no harm."""
        assert bool(self._live[rows].all()), "touch: a row is not live"
        self._touch_distinct(self.distinct(rows))

    def delete(self, rows: Rows) -> None:
        """Remove live rows. Their keys may come back later, as new."""
        rows = self.distinct(rows)
        assert bool(self._live[rows].all()), "delete: a row is not live"
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
        self._mark[log.rows] = np.arange(self._active_start, self._active_start + log.rows.size, dtype=np.int64)
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
        """The live rows of some slices, in the columns of a fragment. O(state)."""
        rows = self.live_rows()
        rows = rows[self._in_slices(rows, slices, slices_total)]
        values: dict[str, Array | list[bytes | None]] = {}
        for name, kind in self.spec.values.items():
            values[name] = self._encode(name, rows) if kind.codec else self._columns[name][rows]
        deleted = np.zeros(rows.size, dtype=np.bool_)
        return _build_frame(self.spec, self._hash[rows], self._keys.gather(rows), values, deleted)

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
                self._columns[name][rows] = _decode_column(there, name, kind)

    def drop_slices(self, slices: Collection[int], slices_total: int) -> None:
        """Forget some slices altogether: rows, marks and undo information."""
        every = np.arange(self._rows, dtype=np.int64)
        rows = every[self._in_slices(every, slices, slices_total)]
        self._bury(rows[self._live[rows]])
        self._forget_history(rows)
        self._sweep_if_due()

    def load(self, frame: pl.DataFrame) -> None:
        """Apply a snapshot or delta frame: later rows win, deleted ones vanish. Not recorded and not dirty."""
        frame = self._last_of_each_key(frame)
        gone = frame.get_column(DELETED).to_numpy()
        if gone.any():
            rows = self._index_rows(frame.filter(pl.col(DELETED)))
            self._bury(rows[self._live[rows]])
            self._forget_history(rows)
            frame = frame.filter(~pl.col(DELETED))
        rows = self._find_or_append(frame.get_column(HASH).to_numpy(), self._conform(frame))
        self._rows_live += int(np.count_nonzero(~self._live[rows]))
        self._live[rows] = True
        for name, kind in self.spec.values.items():
            self._columns[name][rows] = _decode_column(frame, name, kind)
        self._forget_history(rows)
        self._sweep_if_due()

    # ---- for tests -------------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Check every invariant: O(state), for tests and simulation."""
        n = self._rows
        assert self._rows_live == int(np.count_nonzero(self._live[:n]))
        assert self._keys.height == n and 2 * n <= self._index.slots.size
        taken = self._index.slots[self._index.slots >= 0]
        assert np.array_equal(np.sort(taken), np.arange(n)), "the index does not hold each row once"
        dead = ~self._live[:n]
        for name, kind in self.spec.values.items():
            values = self._columns[name][:n][dead]
            fresh = np.full(values.size, kind.fill, dtype=kind.dtype)
            assert np.array_equal(values, fresh, equal_nan=kind.dtype.kind == "f"), f"a dead row has values in {name}"
        for log in [*self._sealed, self._active]:
            log.settle()
            assert np.unique(log.rows).size == log.rows.size and (log.rows.size == 0 or log.rows.max() < n)
        assert set(np.flatnonzero(self._mark[:n] >= self._active_start)) == set(self._active.rows.tolist())

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _conform(self, keys: pl.DataFrame) -> pl.DataFrame:
        names = self.spec.key.names()
        if keys.columns != names:  # column by column: a select would go through the query engine
            keys = pl.DataFrame([keys.get_column(name) for name in names])
        return keys if keys.schema == self.spec.key else keys.cast(self.spec.key)

    def distinct(self, rows: Rows) -> Rows:
        """``rows`` without repeats, without sorting: each writes its position, the one still there afterwards stays."""
        if rows.size < 2:
            return rows
        scratch = self._index.scratch(self._rows)
        place = np.arange(rows.size, dtype=np.int32)
        scratch[rows] = place
        stays = scratch.take(rows) == place
        return rows if stays.all() else rows[stays]

    def _probe(self, hashes: U64, keys: pl.DataFrame) -> tuple[Rows, Rows, Rows]:
        """The row of each key, dead rows included, or -1 with the free slot (and probe step) where it belongs."""
        assert hashes.size == keys.height
        rows, pos, step = self._index.walk(hashes, self._hash)
        suspects = None if rows.size and int(rows.min()) >= 0 else np.flatnonzero(rows >= 0)
        while suspects is None or suspects.size:
            found = rows if suspects is None else rows[suspects]
            given = keys if suspects is None or suspects.size == rows.size else _take(keys, suspects)
            differs = np.flatnonzero(~_same_keys(self._keys.gather(found), given))
            if not differs.size:
                break
            # True collisions of 64-bit hashes: the key, if it is here at all, lies further along its probe path.
            suspects = differs if suspects is None else suspects[differs]
            rows[suspects] = self._index.walk_on(hashes, self._hash, pos, step, suspects)
            suspects = suspects[rows[suspects] >= 0]
        return rows, pos, step

    def _index_rows(self, frame: pl.DataFrame) -> Rows:
        """Rows of keys that are indexed, live or dead."""
        rows, _, _ = self._probe(frame.get_column(HASH).to_numpy(), self._conform(frame))
        return rows[rows >= 0]

    def _find_or_append(self, hashes: U64, keys: pl.DataFrame) -> Rows:
        """The row of each key; unknown ones get a row that is not live yet."""
        if self._index.make_room(self._rows, hashes.size):
            self._index.rebuild(self._hash[: self._rows], hashes.size)
        rows, pos, step = self._probe(hashes, keys)
        absent = np.flatnonzero(rows < 0)
        if absent.size:
            fresh = np.arange(self._rows, self._rows + absent.size, dtype=np.int64)
            self._append(hashes[absent], keys if absent.size == rows.size else _take(keys, absent))
            rows[absent] = fresh
            alike = self._index.insert(fresh, pos[absent], step[absent], self._hash)
            assert not alike or _all_differ(_take(keys, absent)), "upsert: the same key twice in one call"
        return rows

    def _append(self, hashes: U64, keys: pl.DataFrame) -> None:
        end = self._rows + hashes.size
        assert end < _ROWS_MAX, "too many keys in one table"
        if end > self._hash.size:
            size = max(end, 2 * self._hash.size)
            self._hash = _grown(self._hash, size, 0)
            self._live = _grown(self._live, size, False)
            self._mark = _grown(self._mark, size, 0)
            for name, kind in self.spec.values.items():
                self._columns[name] = _grown(self._columns[name], size, kind.fill)
        self._hash[self._rows : end] = hashes
        self._keys.append(keys)
        self._rows = end

    def _touch_distinct(self, rows: Rows) -> None:
        marks = self._mark.take(rows)
        first = rows[marks < self._active_start] if marks.size and int(marks.max()) >= self._active_start else rows
        if not first.size:
            return
        before: dict[str, Array | list[bytes | None]] = {}
        for name, kind in self.spec.values.items():
            before[name] = self._encode(name, first) if kind.codec else self._columns[name].take(first)
        self._active.add(first, self._live.take(first), before)
        self._mark[first] = np.arange(self._marks_given, self._marks_given + first.size, dtype=np.int64)
        self._marks_given += first.size

    def _encode(self, name: str, rows: Rows) -> list[bytes | None]:
        """Objects of some rows as bytes. A row unchanged since the last seal was encoded there already."""
        codec = self.spec.values[name].codec
        assert codec is not None
        values = self._columns[name][rows].tolist()
        known = self._encoded
        if known is None:
            return [None if value is None else codec.encode(value) for value in values]
        marks = self._mark[rows].tolist()
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
        live = self._live.take(rows)
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
                values[name] = self._columns[name].take(kept)
        deleted = ~(live if keep is None else live[keep])
        hashes = self._hash.take(kept)
        return Fragment(self.spec, epoch_from, epoch_to, hashes, self._keys.snapshot(), kept, values, deleted)

    def _start_fragment(self) -> None:
        self._active = _Log()
        self._active_start = self._marks_given

    def _bury(self, rows: Rows) -> None:
        """Distinct live rows die. Dead rows always hold fill values: a key that comes back starts afresh."""
        self._live[rows] = False
        self._rows_live -= int(rows.size)
        for name, kind in self.spec.values.items():
            self._columns[name][rows] = kind.fill

    def _restore(self, log: _Log) -> None:
        rows = log.rows
        if not rows.size:
            return
        self._rows_live += int(np.count_nonzero(log.was_live)) - int(np.count_nonzero(self._live[rows]))
        self._live[rows] = log.was_live
        for name, kind in self.spec.values.items():
            before = log.before[name]
            self._columns[name][rows] = _decode_list(kind.codec, before) if kind.codec else before

    def _forget_history(self, rows: Rows) -> None:
        """As though the rows had always been what they are now."""
        self._mark[rows] = 0
        logs = [log for log in [*self._sealed, self._active] if log.count()]
        if not rows.size or not logs:
            return
        forgotten = np.zeros(self._rows, dtype=np.bool_)
        forgotten[rows] = True
        for log in logs:
            log.keep(lambda logged: ~forgotten[logged])

    def _in_slices(self, rows: Rows, slices: Collection[int], slices_total: int) -> Mask:
        wanted = np.zeros(slices_total, dtype=np.bool_)
        wanted[list(slices)] = True
        return wanted[slice_of(self._hash[rows], slices_total)]

    def _last_of_each_key(self, frame: pl.DataFrame) -> pl.DataFrame:
        hashes = np.sort(frame.get_column(HASH).to_numpy())
        if hashes.size < 2 or not (hashes[1:] == hashes[:-1]).any():
            return frame  # distinct hashes, hence distinct keys
        return frame.unique(subset=self.spec.key.names(), keep="last", maintain_order=True)

    def _sweep_if_due(self) -> None:
        """Sweep dead rows out once they outnumber the live ones, not counting those that undo logs may still revive:
        each sweep costs O(live + logged) and follows at least as many deletions."""
        logs = [*self._sealed, self._active]
        logged = sum(log.count() for log in logs)
        dead = self._rows - self._rows_live
        if dead - logged <= max(self._rows_live, self._sweep_rows_min):
            return
        keep = self._live[: self._rows].copy()
        for log in logs:
            log.settle()
            keep[log.rows] = True
        stays = np.flatnonzero(keep).astype(np.int64, copy=False)
        moved = np.cumsum(keep, dtype=np.int64) - 1
        for log in logs:
            log.rows = moved[log.rows]
        size = max(_ROWS_FIRST, stays.size)
        self._hash = _grown(self._hash[stays], size, 0)
        self._live = _grown(self._live[stays], size, False)
        self._mark = _grown(self._mark[stays], size, 0)
        for name, kind in self.spec.values.items():
            self._columns[name] = _grown(self._columns[name][stays], size, kind.fill)
        self._keys.keep(stays)
        self._rows = int(stays.size)
        self._index = _Index()
        self._index.rebuild(self._hash[: self._rows], 0)


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


class _Index:
    """Open addressing from hash to row number: a power of two of int32 slots, at most half of them taken, probed along
    triangular numbers (which visit every slot), a whole batch at a time. Nothing is ever removed; the table
    rebuilds."""

    def __init__(self) -> None:
        self.slots: NDArray[np.int32] = np.full(2 * _ROWS_FIRST, -1, dtype=np.int32)
        self._scratch: NDArray[np.int32] = np.zeros(0, dtype=np.int32)

    def scratch(self, rows: int) -> NDArray[np.int32]:
        """Working space with one cell for each row; its contents mean nothing."""
        if self._scratch.size < rows:
            self._scratch = np.zeros(max(rows, 2 * self._scratch.size), dtype=np.int32)
        return self._scratch

    def make_room(self, rows: int, more: int) -> bool:
        """True when the slots are too few for ``more`` rows on top of ``rows``."""
        return 2 * (rows + more) > self.slots.size

    def rebuild(self, hashes: U64, more: int) -> None:
        wanted = 2 * (hashes.size + more)
        size = max(self.slots.size, 1 << int(wanted - 1).bit_length() if wanted > 1 else 2)
        self.slots = np.full(size, -1, dtype=np.int32)
        rows = np.arange(hashes.size, dtype=np.int64)
        self.insert(rows, self._home(hashes), np.zeros(rows.size, dtype=np.int64), hashes)

    def walk(self, hashes: U64, stored: U64) -> tuple[Rows, Rows, Rows]:
        """For each hash the first row of the same hash, or -1 at a free slot; with the place and step reached."""
        pos = self._home(hashes)
        step = np.zeros(hashes.size, dtype=np.int64)
        rows = self.slots.take(pos).astype(np.int64)
        equal = stored.take(rows, mode="wrap") == hashes
        equal |= rows < 0
        todo = np.flatnonzero(~equal)
        if todo.size:
            rows[todo] = self.walk_on(hashes, stored, pos, step, todo)
        return rows, pos, step

    def walk_on(self, hashes: U64, stored: U64, pos: Rows, step: Rows, todo: NDArray[np.intp]) -> Rows:
        """Go at least one step further for the entries ``todo``. Updates ``pos`` and ``step`` in place."""
        mask = np.int64(self.slots.size - 1)
        out = np.full(todo.size, -1, dtype=np.int64)
        place = np.arange(todo.size)
        p, s, h = pos[todo], step[todo], hashes[todo]
        while place.size:
            s += 1
            p += s
            p &= mask
            rows = self.slots.take(p).astype(np.int64)
            over = stored.take(rows, mode="wrap") == h
            over |= rows < 0
            ended = np.flatnonzero(over)
            if ended.size:
                at = place[ended]
                out[at] = rows[ended]
                pos[todo[at]], step[todo[at]] = p[ended], s[ended]
                on = np.flatnonzero(~over)
                place, p, s, h = place[on], p[on], s[on], h[on]
        return out

    def insert(self, rows: Rows, pos: Rows, step: Rows, stored: U64) -> bool:
        """Enter rows whose keys are known to be absent, from the given places on. Rows that want the same slot all
        write to it; the one that is found there afterwards has it, the others go on. True: one met a row of its own
        hash (equal keys walk the same path, so they would have met)."""
        alike = False
        mask = np.int64(self.slots.size - 1)
        slots = self.slots
        narrow = rows.astype(np.int32)
        while narrow.size:
            free = slots.take(pos) < 0
            slots[pos[free]] = narrow[free]
            holders = slots.take(pos)
            lost = np.flatnonzero(holders != narrow)
            if not lost.size:
                break
            alike = alike or bool((stored[holders[lost]] == stored[narrow[lost]]).any())
            narrow, step = narrow[lost], step[lost] + 1
            pos = (pos[lost] + step) & mask
        return alike

    def _home(self, hashes: U64) -> Rows:
        return (hashes & np.uint64(self.slots.size - 1)).astype(np.int64)


class _Keys:
    """The key columns by row: immutable chunks, each more than four times the next, so that there are O(log rows) of
    them and a row is copied O(log rows) times in its life."""

    FACTOR: Final = 4
    SMALL: Final = 4096

    def __init__(self, schema: pl.Schema) -> None:
        self._schema = schema
        self._chunks: list[pl.DataFrame] = []
        self._starts: Rows = np.zeros(0, dtype=np.int64)
        self.height = 0

    def nbytes(self) -> int:
        return sum(int(chunk.estimated_size()) for chunk in self._chunks)

    def append(self, keys: pl.DataFrame) -> None:
        chunks = [*self._chunks, keys]
        while len(chunks) > 1 and self._should_join(chunks[-2].height, chunks[-1].height):
            chunks[-2:] = [pl.concat(chunks[-2:], rechunk=False)]
        self._set([*self._chunks[: len(chunks) - 1], _detached(chunks[-1])])

    def _should_join(self, older: int, newer: int) -> bool:
        return older <= self.FACTOR * newer or older <= self.SMALL

    def gather(self, rows: Rows) -> pl.DataFrame:
        """Keys of some rows. By chunk, then back into order: polars' own gather from a chunked column takes ten times
        as long."""
        if len(self._chunks) == 1:
            return _take(self._chunks[0], rows)
        if not rows.size:
            return pl.DataFrame(schema=self._schema)
        chunk = np.searchsorted(self._starts, rows, side="right") - 1
        order = np.argsort(chunk.astype(np.uint8), kind="stable")  # a radix sort for one byte
        edges = np.cumsum(np.bincount(chunk, minlength=len(self._chunks))).tolist()
        sorted_rows = rows[order]
        parts = []
        for i, (begin, end) in enumerate(zip([0, *edges[:-1]], edges, strict=True)):
            if end > begin:
                parts.append(_take(self._chunks[i], sorted_rows[begin:end] - self._starts[i]))
        if len(parts) == 1:
            return parts[0]  # the stable sort of one chunk changed nothing
        back = np.empty(rows.size, dtype=np.int64)
        back[order] = np.arange(rows.size)
        return _take(pl.concat(parts, rechunk=True), back)

    def snapshot(self) -> _Keys:
        """The keys as they are now, whatever comes after: the chunks themselves are never changed."""
        return copy(self)

    def keep(self, rows: Rows) -> None:
        self._set([_detached(self.gather(rows))] if rows.size else [])

    def _set(self, chunks: list[pl.DataFrame]) -> None:
        heights = [chunk.height for chunk in chunks]
        self._chunks = chunks
        self._starts = np.cumsum([0, *heights[:-1]], dtype=np.int64)
        self.height = sum(heights)


def _take(frame: pl.DataFrame, rows: NDArray[Any]) -> pl.DataFrame:
    index = pl.Series(rows.astype(np.uint32))
    return pl.DataFrame([column[index] for column in frame.get_columns()])


def _same_keys(a: pl.DataFrame, b: pl.DataFrame) -> Mask:
    """Row by row; null equals null and NaN equals NaN."""
    pairs = zip(a.get_columns(), b.get_columns(), strict=True)
    masks = [left.eq_missing(right).to_numpy() for left, right in pairs]
    same: Mask = masks[0] if len(masks) == 1 else np.logical_and.reduce(masks)
    return same


def _all_differ(keys: pl.DataFrame) -> bool:
    return bool(keys.n_unique() == keys.height)


def _detached(frame: pl.DataFrame) -> pl.DataFrame:
    """One contiguous copy that shares no buffer. Polars strings are views: without this, ten keys taken from a batch
    would keep the whole batch's text in memory."""
    frame = frame.rechunk()
    return frame.with_columns(
        [
            pl.Series(name, frame.get_column(name).to_arrow(), dtype=dtype)
            for name, dtype in frame.schema.items()
            if dtype in (pl.String, pl.Binary)
        ]
    )


def _grown(array: Array, size: int, fill: Any) -> Array:
    """A copy with room for more. Zeros are left to the system, which gives memory when it is first written to."""
    zeros = array.dtype.kind != "O" and fill == 0
    grown = np.zeros(size, dtype=array.dtype) if zeros else np.full(size, fill, dtype=array.dtype)
    grown[: array.size] = array
    return grown


def _joined(parts: list[Any]) -> Any:
    if isinstance(parts[0], list):
        return [item for part in parts for item in part]
    return np.concatenate(parts)


def _decode_list(codec: ObjectCodec, items: Any) -> Array:
    out = np.empty(len(items), dtype=object)
    for i, item in enumerate(items):
        out[i] = None if item is None else codec.decode(item)
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
    return pl.DataFrame(columns)


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
