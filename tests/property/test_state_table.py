"""KeyedTable against a dict: any sequence of writes, seals, undos, releases and slice moves gives what the dict
gives."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
import numpy as np
import polars as pl
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.state.hashing import hash_columns
from penstock.state.slicemap import SliceMap
from penstock.state.table import DELETED, HASH, KeyedTable, TableSpec, numeric, objects
from tests.property.cuts import examples

SLICES = 5
SLICEMAP = SliceMap(SLICES)


class JsonCodec:
    def encode(self, value: Any, /) -> bytes:
        return json.dumps(value).encode()

    def decode(self, data: bytes, /) -> Any:
        return json.loads(data)


KEYS: dict[str, tuple[pl.Schema, st.SearchStrategy[tuple[Any, ...]]]] = {
    "string": (
        pl.Schema({"s": pl.String()}),
        st.tuples(st.sampled_from([None, "", "a", "b", "é", "a" * 13, "a" * 12 + "b", "c" * 40, *"defghijkl"])),
    ),
    "int": (pl.Schema({"i": pl.Int64()}), st.tuples(st.one_of(st.none(), st.integers(-10, 10)))),
    "float": (pl.Schema({"f": pl.Float64()}), st.tuples(st.sampled_from([None, float("nan"), 0.0, 1.5, float("inf")]))),
    "composite": (
        pl.Schema({"s": pl.String(), "i": pl.Int32()}),
        st.tuples(st.sampled_from([None, "", "x", "y" * 20]), st.sampled_from([None, 0, 1, 2])),
    ),
}

State = dict[str, tuple[tuple[Any, ...], int, list[int] | None]]
"""By the key's repr (so that NaN equals NaN): the key, the number, the object."""


class TableMachine(RuleBasedStateMachine):
    collide = False

    @initialize(kind=st.sampled_from(sorted(KEYS)))
    def start(self, kind: str) -> None:
        self.schema, self.key_strategy = KEYS[kind]
        self.spec = TableSpec(self.schema, {"n": numeric(np.int64, 7), "o": objects(JsonCodec())})
        self.table = KeyedTable(self.spec, base_epoch=10, sweep_rows_min=2)
        self.now: State = {}
        self.past: dict[int, State] = {10: {}}
        self.fragment: State = {}

    def frame(self, keys: list[tuple[Any, ...]]) -> pl.DataFrame:
        return pl.DataFrame(keys, schema=self.schema, orient="row")

    def hashes(self, frame: pl.DataFrame) -> np.ndarray:
        hashes = hash_columns(frame, self.schema.names())
        # Two hashes in all, in different slices: nearly every key is a true collision.
        return (hashes & np.uint64(1)) * np.uint64(0xF000_0000_0000_0000) if self.collide else hashes

    def draw(self, data: st.DataObject) -> list[tuple[Any, ...]]:
        return data.draw(st.lists(self.key_strategy, unique_by=repr, max_size=8))

    def slice_numbers(self, keys: list[tuple[Any, ...]]) -> list[int]:
        return SLICEMAP.of(self.hashes(self.frame(keys))).tolist() if keys else []

    @rule(data=st.data(), add=st.integers(-5, 5))
    def upsert(self, data: st.DataObject, add: int) -> None:
        keys = self.draw(data)
        frame = self.frame(keys)
        rows, is_new = self.table.upsert(self.hashes(frame), frame)
        assert is_new.tolist() == [repr(k) not in self.now for k in keys]
        self.table.column("n")[rows] += add
        column = self.table.column("o")
        for key, row in zip(keys, rows.tolist(), strict=True):
            if column[row] is None:
                column[row] = []
            column[row].append(add)  # in place, as users do
            _, n, o = self.now.get(repr(key), (key, 7, None))
            self.now[repr(key)] = (key, n + add, [*(o or []), add])

    @rule(data=st.data())
    def touch_and_write(self, data: st.DataObject) -> None:
        keys = self.draw(data)
        frame = self.frame(keys)
        rows = self.table.find(self.hashes(frame), frame)
        assert [r >= 0 for r in rows.tolist()] == [repr(k) in self.now for k in keys]
        found = rows[rows >= 0]
        self.table.touch(np.concatenate([found, found]))
        self.table.column("n")[found] = 99
        self.table.column("o")[found] = None
        for key in keys:
            if repr(key) in self.now:
                self.now[repr(key)] = (key, 99, None)

    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        keys = self.draw(data)
        frame = self.frame(keys)
        rows = self.table.find(self.hashes(frame), frame)
        self.table.delete(rows[rows >= 0])
        for key in keys:
            self.now.pop(repr(key), None)

    @rule(step=st.integers(1, 3))
    def seal(self, step: int) -> None:
        before_epoch = max(self.past)
        before = self.past[before_epoch]
        epoch = before_epoch + step
        fragment = self.table.seal(epoch)
        assert (fragment.epoch_from, fragment.epoch_to) == (before_epoch, epoch)
        self.check_delta(fragment.frame(), before)
        self.past[epoch] = dict(self.now)
        since = self.table.epochs()[0]
        self.check_delta(self.table.changes(since).frame(), self.past[since])

    def check_delta(self, frame: pl.DataFrame, before: State) -> None:
        """A delta holds every change, once, and turns the state before into the state now."""
        assert frame.schema == self.spec.frame_schema()
        assert frame.get_column(HASH).to_list() == self.hashes(frame).tolist()
        after = dict(before)
        names = self.schema.names()
        seen = set()
        for row in frame.iter_rows(named=True):
            key = tuple(row[name] for name in names)
            assert repr(key) not in seen
            seen.add(repr(key))
            if row[DELETED]:
                assert row["n"] == 7 and row["o"] is None
                assert after.pop(repr(key), None) is not None, "a tombstone for a key that was never there"
            else:
                after[repr(key)] = (key, row["n"], None if row["o"] is None else json.loads(row["o"]))
        assert repr(by_key(after)) == repr(by_key(self.now))

    @rule(data=st.data())
    def undo(self, data: st.DataObject) -> None:
        epoch = data.draw(st.sampled_from([*self.past, max(self.past) + 1]))
        known = epoch in self.past
        assert self.table.undo_to(epoch) is known
        if known:
            self.now = dict(self.past[epoch])
            self.past = {e: s for e, s in self.past.items() if e <= epoch}

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        epoch = data.draw(st.sampled_from(sorted(self.past)))
        self.table.release(epoch)
        self.past = {e: s for e, s in self.past.items() if e >= epoch}

    @rule(slices=st.sets(st.integers(0, SLICES - 1)))
    def drop(self, slices: set[int]) -> None:
        self.table.drop_slices(slices, SLICEMAP)
        for state in [self.now, *self.past.values()]:
            self.remove_slices(state, slices)

    def remove_slices(self, state: State, slices: set[int]) -> None:
        keys = [key for key, _, _ in state.values()]
        for key, number in zip(keys, self.slice_numbers(keys), strict=True):
            if number in slices:
                del state[repr(key)]

    @rule(data=st.data(), n=st.integers(-3, 3))
    def load(self, data: st.DataObject, n: int) -> None:
        keys = data.draw(st.lists(self.key_strategy, max_size=6))  # the same key may come twice: the last wins
        self.table.load(self.snapshot(data, keys, n))

    def snapshot(self, data: st.DataObject, keys: list[tuple[Any, ...]], n: int) -> pl.DataFrame:
        """Rows to load, some of them tombstones; the states know of them already."""
        gone = data.draw(st.lists(st.booleans(), min_size=len(keys), max_size=len(keys)))
        frame = self.frame(keys)
        values = [n + i for i in range(len(keys))]
        for state in [self.now, *self.past.values()]:
            for key, value, dead in zip(keys, values, gone, strict=True):
                if dead:
                    state.pop(repr(key), None)
                else:
                    state[repr(key)] = (key, value, None if value % 2 else [value])
        return frame.with_columns(
            pl.Series(HASH, self.hashes(frame), dtype=pl.UInt64),
            pl.Series("n", values, dtype=pl.Int64),
            pl.Series("o", [None if v % 2 else json.dumps([v]).encode() for v in values], dtype=pl.Binary),
            pl.Series(DELETED, gone, dtype=pl.Boolean),
        ).select(self.spec.frame_schema().names())

    @rule(data=st.data(), slices=st.sets(st.integers(0, SLICES - 1), min_size=1), n=st.integers(-3, 3))
    def bring(self, data: st.DataObject, slices: set[int], n: int) -> None:
        """Slices that are not here come, in several layers, and are looked at when somebody asks."""
        self.drop(slices)
        layers = []
        for _ in range(data.draw(st.integers(1, 3))):
            drawn = data.draw(st.lists(self.key_strategy, max_size=8))
            keys = [k for k, s in zip(drawn, self.slice_numbers(drawn), strict=True) if s in slices]
            layers.append(self.snapshot(data, keys, n))
        self.table.bring(layers)

    @rule(count=st.one_of(st.none(), st.integers(1, 4)))
    def wake(self, count: int | None) -> None:
        self.table.wake(count)

    @rule(slices=st.sets(st.integers(0, SLICES - 1)))
    def export_and_reload(self, slices: set[int]) -> None:
        exported = self.table.export(slices, SLICEMAP)
        assert not exported.get_column(DELETED).any()
        other = KeyedTable(self.spec)
        other.load(exported)
        expected = dict(self.now)
        self.remove_slices(expected, set(range(SLICES)) - slices)
        assert repr(by_key(read(other))) == repr(by_key(expected))
        assert other.seal(1).rows == 0, "loaded rows are not dirty"

    @precondition(lambda self: hasattr(self, "table"))
    @invariant()
    def agrees(self) -> None:
        self.table.validate()
        assert self.table.epochs() == sorted(self.past)
        if not self.table._waiting:  # to read them all would wake those that wait
            assert self.table.rows_live == len(self.now)
            assert repr(by_key(read(self.table))) == repr(by_key(self.now))
        elif not self.collide:  # those that wait are counted by hash
            assert self.table.rows_live == len(self.now)
            expected = self.hashes(self.frame([key for key, _, _ in self.now.values()]))
            assert sorted(self.table.live_hashes().tolist()) == sorted(expected.tolist())


def read(table: KeyedTable) -> State:
    rows = table.live_rows()
    keys = table.keys(rows).rows()
    values = zip(keys, table.column("n")[rows].tolist(), table.column("o")[rows].tolist(), strict=True)
    return {repr(key): (key, n, o) for key, n, o in values}


def by_key(state: State) -> list[Any]:
    """To be compared as text: two NaNs differ otherwise."""
    return [state[key] for key in sorted(state)]


class CollidingMachine(TableMachine):
    collide = True


class MovingMachine(RuleBasedStateMachine):
    """Slices change hands between two tables, as in a live migration: together they are what one table would be.

    The new owner has the slice as the last checkpoint has it, and gets what changed since. Nothing moves while a
    checkpoint is open, and everybody can always go back to the last complete one.
    """

    @initialize(kind=st.sampled_from(sorted(KEYS)))
    def start(self, kind: str) -> None:
        self.schema, self.key_strategy = KEYS[kind]
        self.spec = TableSpec(self.schema, {"n": numeric(np.int64, 7), "o": objects(JsonCodec())})
        self.one = KeyedTable(self.spec, sweep_rows_min=2)
        self.two = [KeyedTable(self.spec, sweep_rows_min=2) for _ in range(2)]
        self.owner = dict.fromkeys(range(SLICES), 0)
        self.committed = 0
        self.durable = self.one.export(range(SLICES), SLICEMAP)
        self.opened: int | None = None
        self.files: list[pl.DataFrame] = []

    def every(self) -> list[KeyedTable]:
        return [self.one, *self.two]

    def split(self, keys: list[tuple[Any, ...]]) -> list[tuple[KeyedTable, pl.DataFrame, np.ndarray]]:
        """Keys for the one table, and for the owners of their slices."""
        whole = pl.DataFrame(keys, schema=self.schema, orient="row")
        hashes = hash_columns(whole, self.schema.names())
        owners = np.array([self.owner[s] for s in SLICEMAP.of(hashes).tolist()])
        parts = [(self.one, whole, hashes)]
        for number, table in enumerate(self.two):
            mine = np.flatnonzero(owners == number)
            parts.append((table, whole[mine], hashes[mine]))
        return parts

    @rule(data=st.data(), add=st.integers(-5, 5))
    def write(self, data: st.DataObject, add: int) -> None:
        for table, keys, hashes in self.split(data.draw(st.lists(self.key_strategy, unique_by=repr, max_size=8))):
            rows, _ = table.upsert(hashes, keys)
            table.column("n")[rows] += add
            column = table.column("o")
            for row in rows.tolist():
                column[row] = [*(column[row] or []), add]

    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        for table, keys, hashes in self.split(data.draw(st.lists(self.key_strategy, unique_by=repr, max_size=8))):
            rows = table.find(hashes, keys)
            table.delete(rows[rows >= 0])

    @precondition(lambda self: self.opened is None)
    @rule(slices=st.sets(st.integers(0, SLICES - 1), min_size=1), to=st.integers(0, 1))
    def move(self, slices: set[int], to: int) -> None:
        moving = [s for s in slices if self.owner[s] != to]
        source, target = self.two[1 - to], self.two[to]
        handed = source.unreleased(moving, SLICEMAP)
        source.drop_slices(moving, SLICEMAP)
        inside = np.isin(SLICEMAP.of(self.durable.get_column(HASH).to_numpy()), moving)
        bring_up = target.load if len(moving) % 2 else lambda frame: target.bring([frame])
        bring_up(self.durable.filter(pl.Series(inside)))
        target.merge(handed)
        self.owner.update(dict.fromkeys(moving, to))

    @precondition(lambda self: self.opened is None)
    @rule()
    def seal(self) -> None:
        self.opened = self.committed + 1
        self.one.seal(self.opened)
        self.files = [table.seal(self.opened).frame() for table in self.two]

    @precondition(lambda self: self.opened is not None)
    @rule()
    def commit(self) -> None:
        """What the two wrote, on top of the checkpoint before, is the next one."""
        assert self.opened is not None
        restored = KeyedTable(self.spec)
        for frame in [self.durable, *self.files]:
            restored.load(frame)
        self.committed, self.opened = self.opened, None
        self.durable = restored.export(range(SLICES), SLICEMAP)
        for table in self.every():
            table.release(self.committed)
        before = KeyedTable(self.spec)
        before.load(self.one.export(range(SLICES), SLICEMAP))
        now = KeyedTable(self.spec)
        for frame in [self.durable, *(table.unreleased(range(SLICES), SLICEMAP) for table in self.two)]:
            now.load(frame)
        assert repr(by_key(read(now))) == repr(by_key(read(before))), "the checkpoint, and all that changed since"

    @rule()
    def undo(self) -> None:
        for table in self.every():
            assert table.undo_to(self.committed)
        self.opened = None
        restored = KeyedTable(self.spec)
        restored.load(self.durable)
        assert repr(by_key(read(restored))) == repr(by_key(read(self.one)))

    @precondition(lambda self: hasattr(self, "one"))
    @invariant()
    def together(self) -> None:
        parts = [read(table) for table in self.two]
        for number, table in enumerate(self.two):
            table.validate()
            rows = table.live_rows()
            found = set(SLICEMAP.of(table.hashes(rows)).tolist())
            assert all(self.owner[s] == number for s in found), "it holds rows of slices that are not its own"
        assert repr(by_key(parts[0] | parts[1])) == repr(by_key(read(self.one)))


RUNS = settings(examples(40), stateful_step_count=30)

TestTable = TableMachine.TestCase
TestTable.settings = RUNS
TestCollidingTable = CollidingMachine.TestCase
TestCollidingTable.settings = RUNS
TestMovingSlices = MovingMachine.TestCase
TestMovingSlices.settings = RUNS
