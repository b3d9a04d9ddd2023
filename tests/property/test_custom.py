"""The state library, timers and expiry against plain Python that handles rows one by one.

The model knows nothing of epochs, splits, containers or checkpoints; the operator is run with all of them, drawn at
random, and must give the same. What each key sees is compared call by call: every call emits all that it can see.
"""

from __future__ import annotations

import random
from bisect import insort
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Annotated, Any

import msgspec
import numpy as np
import polars as pl
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock import testing
from penstock.operators.base import FOREVER, HASH, NEVER, ORDER, Applied, Arrival, KeyedOperator, Tick
from penstock.operators.batch import Batch
from penstock.operators.custom import Custom
from penstock.state.hashing import hash_columns
from penstock.state.slicemap import SliceMap
from penstock.state.table import KeyedTable
from tests.property.cuts import examples

SEEDS = st.integers(0, 2**32 - 1)
COUNTS = st.integers(1, 60)
EPOCH = datetime(1970, 1, 1)
START = datetime(2026, 1, 1)
SLICES = 8
SLICEMAP = SliceMap(SLICES)


# -- a user's operator that does everything ---------------------------------------------------------------------------


class Pair(msgspec.Struct):
    """Numbers only: kept as columns."""

    n: int
    x: float
    odd: bool = False


@dataclass
class Noted:
    """Not only numbers: kept as an object."""

    n: int
    text: str | None = None


def act(op: int, arg: int, at: datetime, s: dict[str, Any]) -> str:
    """One of many things a user may do, the same to the library and to the model. Says what came of it."""
    back = ""
    match op:
        case 0:
            s["short"].set(arg)
        case 1:
            s["short"].clear()
        case 2:
            s["pair"].set(Pair(arg, arg / 3, arg % 2 == 1))
        case 3:
            before = s["pair"].get(Pair(0, 0.0))
            s["pair"].set(Pair(before.n + arg, before.x * 0.5 + arg, not before.odd))
        case 4:
            s["pair"].clear()
        case 5:
            s["noted"].set(Noted(arg, None if arg % 2 else "ü" * arg))
        case 6:
            s["noted"].clear()
        case 7 | 8:
            s["fading"]["abc"[arg % 3]] = arg
        case 9:
            back = str(s["fading"].pop("abc"[arg % 3], -1))
        case 10:
            s["plain"].set((arg % 4, "x"), [arg])
        case 11:
            if (arg % 4, "x") in s["plain"]:
                del s["plain"][arg % 4, "x"]
        case 12:
            s["items"].append(arg)
        case 13:
            s["items"].extend([arg, arg + 1])
        case 14:
            if len(s["items"]):
                s["items"][-1] = -arg
                if arg % 2:
                    del s["items"][0]
        case 15 | 16:
            s["queue"].push(f"q{arg}")
        case 17:
            back = str(s["queue"].peek())
            if len(s["queue"]):
                back += s["queue"].pop()
        case 18:
            s["latest"].add(arg / 7)
        case 19 | 20:
            s["recent"].add(at - timedelta(seconds=arg % 9), arg)
        case 21:
            s["queue" if arg % 2 else "recent"].clear()
        case 22:
            s["plain"].clear()
            s["items"].clear()
            s["latest"].clear()
    return back


def seen(s: dict[str, Any]) -> str:
    """All that a call can see."""
    return repr(
        [
            s["short"].get(),
            s["pair"].get(),
            s["noted"].get(),
            list(s["fading"].items()),
            list(s["plain"].items()),
            list(s["items"]),
            list(s["queue"]),
            (list(s["latest"]), s["latest"].full),
            list(s["recent"].items()),
        ]
    )


class Zoo(ps.Operator):
    def on_event(
        self,
        key: str,
        event: ps.Event,
        short: Annotated[ps.Value[int], ps.expires("7s")],
        pair: ps.Value[Pair],
        noted: ps.Value[Noted],
        fading: Annotated[ps.Map[str, int], ps.expires("5s")],
        plain: ps.Map[tuple[int, str], list[int]],
        items: ps.List[int],
        queue: Annotated[ps.Queue[str], ps.expires("9s")],
        latest: Annotated[ps.CountWindow[float], ps.keep(3)],
        recent: Annotated[ps.TimeWindow[int], ps.keep("6s")],
        timers: ps.Timers,
        time: ps.Time,
        emit: ps.Emit,
    ) -> None:
        states = {k: v for k, v in locals().items() if k not in ("self", "key", "event", "emit")}
        back = act(event.op, event.arg, event.at, states)
        plan_timers(event.op, event.arg, event.at, timers)
        emit(key, event.id, f"{back}|{time.watermark}|{seen(states)}|{list(timers)}")

    def on_timer(
        self,
        key: str,
        at: datetime,
        name: str | None,
        short: Annotated[ps.Value[int], ps.expires("7s")],
        pair: ps.Value[Pair],
        noted: ps.Value[Noted],
        fading: Annotated[ps.Map[str, int], ps.expires("5s")],
        plain: ps.Map[tuple[int, str], list[int]],
        items: ps.List[int],
        queue: Annotated[ps.Queue[str], ps.expires("9s")],
        latest: Annotated[ps.CountWindow[float], ps.keep(3)],
        recent: Annotated[ps.TimeWindow[int], ps.keep("6s")],
        timers: ps.Timers,
        time: ps.Time,
        emit: ps.Emit,
    ) -> None:
        states = {k: v for k, v in locals().items() if k not in ("self", "key", "at", "name", "emit")}
        back = react(at, name, states, timers)
        emit(key, -1, f"{at}|{name}|{back}|{time.watermark}|{seen(states)}|{list(timers)}")


def plan_timers(op: int, arg: int, at: datetime, timers: Any) -> None:
    if op in (0, 5, 12, 19, 23):
        timers.set(at + timedelta(seconds=arg - 3), None if arg % 3 else "named")
    if op == 24:
        timers.cancel("named")
        timers.cancel(at + timedelta(seconds=3))


def react(at: datetime, name: str | None, s: dict[str, Any], timers: Any) -> str:
    back = ""
    if at.second % 3 == 0:
        s["short"].set(at.second)
        s["fading"]["t"] = at.second
        s["queue"].push("timer")
    if at.second % 3 == 1:
        back = act(17, 0, at, s)
        s["recent"].add(at, at.second)
    if at.second % 4 == 0:
        timers.set(at + timedelta(seconds=at.second % 5), name)
    return back


# -- the model: one row after the other -------------------------------------------------------------------------------


class ModelValue:
    def __init__(self, model: Model, after: int | None = None) -> None:
        self.model, self.after, self.value, self.touched = model, after, None, NEVER

    def get(self, default: Any = None) -> Any:
        if self.after and self.value is not None and self.touched + self.after <= self.model.watermark:
            self.clear()
        return default if self.value is None else self.value

    def set(self, value: Any) -> None:
        self.get()
        self.value, self.touched = value, max(self.touched, self.model.now)

    def clear(self) -> None:
        self.value, self.touched = None, NEVER


class ModelMap(dict):  # type: ignore[type-arg]
    """Entries with the time they were last set."""

    def __init__(self, model: Model, after: int | None = None) -> None:
        self.model, self.after, self.touched = model, after, {}

    def __setitem__(self, k: Any, v: Any) -> None:
        super().__setitem__(k, v)
        self.touched[k] = max(self.touched.get(k, NEVER), self.model.now)

    set = __setitem__

    def __delitem__(self, k: Any) -> None:
        super().__delitem__(k)
        self.touched.pop(k)

    def pop(self, k: Any, default: Any = None) -> Any:  # type: ignore[override]
        self.touched.pop(k, None)
        return super().pop(k, default)

    def clear(self) -> None:
        super().clear()
        self.touched.clear()

    def expire(self) -> None:
        for k in [k for k in self if self.after and self.touched[k] + self.after <= self.model.watermark]:
            del self[k]


class ModelList(list):  # type: ignore[type-arg]
    """A list, a queue, a window of so many: touched as a whole."""

    def __init__(self, model: Model, after: int | None = None, most: int | None = None) -> None:
        self.model, self.after, self.most, self.touched = model, after, most, NEVER

    def push(self, value: Any) -> None:
        self.append(value)
        self.touched = max(self.touched, self.model.now)
        while self.most and len(self) > self.most:
            super().pop(0)

    add = push
    full = property(lambda self: len(self) == self.most)

    def pop(self) -> Any:  # type: ignore[override]
        value = super().pop(0)
        self.touched = max(self.touched, self.model.now) if self else NEVER
        return value

    def peek(self) -> Any:
        return self[0] if self else None

    def clear(self) -> None:
        super().clear()
        self.touched = NEVER

    def expire(self) -> None:
        if self.after and self and self.touched + self.after <= self.model.watermark:
            self.clear()


class ModelRecent:
    """All that was ever added; looked at through the last so long."""

    def __init__(self, model: Model, span: int) -> None:
        self.model, self.span, self.all = model, span, []

    def add(self, at: datetime, value: Any) -> None:
        insort(self.all, (us(at), value), key=lambda pair: pair[0])

    def items(self) -> list[tuple[datetime, Any]]:
        newest = max([at for at, _ in self.all] + [self.model.watermark])
        return [(EPOCH + timedelta(microseconds=at), v) for at, v in self.all if newest - at <= self.span]

    def clear(self) -> None:
        self.all = []


class ModelTimers:
    def __init__(self, model: Model) -> None:
        self.model, self.all, self.ended, self.firing = model, [], False, False

    def set(self, at: datetime, name: str | None = None) -> None:
        if us(at) < self.model.watermark or (self.firing and us(at) == self.model.watermark):
            self.model.refused.append((self.model.key, at.isoformat(), name))
        elif not self.ended:
            same = [t for t in self.all if (t[1] == name if name else t == (us(at), None))]
            if name is None and same:
                return
            self.all = [t for t in self.all if t not in same] + [(us(at), name)]

    def cancel(self, which: Any) -> None:
        self.all = [t for t in self.all if (t[1] != which if isinstance(which, str) else t != (us(which), None))]

    def __iter__(self) -> Iterator[tuple[datetime, str | None]]:
        return iter([(EPOCH + timedelta(microseconds=at), n) for at, n in sorted(self.all, key=lambda t: t[0])])


def us(at: datetime) -> int:
    return (at - EPOCH) // timedelta(microseconds=1)


class Model:
    """One key."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.watermark = self.now = NEVER
        self.refused: list[Any] = []
        self.out: list[tuple[int, str]] = []
        s = 1_000_000
        self.states: dict[str, Any] = {
            "short": ModelValue(self, 7 * s),
            "pair": ModelValue(self),
            "noted": ModelValue(self),
            "fading": ModelMap(self, 5 * s),
            "plain": ModelMap(self),
            "items": ModelList(self),
            "queue": ModelList(self, 9 * s),
            "latest": ModelList(self, most=3),
            "recent": ModelRecent(self, 6 * s),
        }
        self.timers = ModelTimers(self)

    def reach(self, watermark: int) -> None:
        self.watermark = watermark
        for state in self.states.values():
            if isinstance(state, ModelMap | ModelList):
                state.expire()
            elif isinstance(state, ModelValue):
                state.get()

    def shown(self) -> str:
        mark = None if self.watermark == NEVER else EPOCH + timedelta(microseconds=self.watermark)
        return f"{mark}|{seen(self.states)}|{list(self.timers)}"

    def fire(self, watermark: int, *, end: bool = False) -> None:
        self.timers.ended = end
        while due := sorted((t for t in self.timers.all if t[0] <= watermark), key=lambda t: t[0]):
            self.timers.all.remove(due[0])
            self.reach(due[0][0])
            self.now = self.watermark
            at = EPOCH + timedelta(microseconds=due[0][0])
            self.timers.firing = True
            back = react(at, due[0][1], self.states, self.timers)
            self.timers.firing = False
            self.out.append((-1, f"{at}|{due[0][1]}|{back}|{self.shown()}"))

    def event(self, row: dict[str, Any], watermark: int) -> None:
        self.fire(watermark)
        self.reach(watermark)
        self.now = max(us(row["at"]), watermark)
        back = act(row["op"], row["arg"], row["at"], self.states)
        plan_timers(row["op"], row["arg"], row["at"], self.timers)
        self.out.append((row["id"], f"{back}|{self.shown()}"))
        self.fire(watermark)  # what was set for this very watermark


def one_by_one(frame: pl.DataFrame, lateness: int) -> dict[str, Model]:
    models: dict[str, Model] = {}
    newest = NEVER
    for row in frame.iter_rows(named=True):
        newest = max(newest, us(row["at"]))
        models.setdefault(row["k"], Model(row["k"])).event(row, newest - lateness)
    for model in models.values():
        model.fire(newest - lateness)
        model.fire(FOREVER - 1, end=True)  # the input has ended: what is set now is not kept
    return models


# -- the operator, with epochs, splits, containers and restores -------------------------------------------------------


class Engine:
    """The least engine: it cuts, exchanges, undoes, moves; nothing of that may show."""

    def __init__(self, operator: KeyedOperator, r: random.Random) -> None:
        self.operator, self.r = operator, r
        self.instances = r.randint(1, 3)
        self.tables = [self._table(0) for _ in range(self.instances)]
        self.newest = self.watermark = NEVER
        self.epoch = 0
        self.out: list[pl.DataFrame] = []
        self.dead: list[Any] = []

    def _table(self, epoch: int) -> KeyedTable:
        layout = self.operator.table()
        assert layout is not None
        return KeyedTable(layout, epoch, sweep_rows_min=2)

    def run(self, frame: pl.DataFrame) -> None:
        at = 0
        while at < frame.height:
            size = self.r.randint(1, max(1, frame.height // 2))
            self._one(frame[at : at + size])
            at += size
            if self.r.random() < 0.3:
                self._one(frame[:0])
            if self.r.random() < 0.4:
                self._move()
        self._one(frame[:0], end=True)

    def _one(self, frame: pl.DataFrame, end: bool = False) -> None:
        before, self.epoch = self.watermark, self.epoch + 1
        ends = sorted({self.r.randint(0, frame.height) for _ in range(2)} | {0, frame.height})
        arrivals: list[list[Arrival]] = [[] for _ in self.tables]
        for index, (a, b) in enumerate(pairwise(ends)):
            prepared = self.operator.prepare(frame[a:b], True)
            mark = NEVER if self.newest == NEVER else self.newest - self.operator.lateness_us
            self.newest = max(self.newest, NEVER if prepared.time_max is None else prepared.time_max)
            hashes = hash_columns(prepared.frame, self.operator.key)
            rows = prepared.frame.with_columns(pl.Series(HASH, hashes, dtype=pl.UInt64))
            owner = SLICEMAP.of(hashes) % self.instances
            for i, given_to in enumerate(arrivals):
                given_to.append(Arrival(rows.filter(pl.Series(owner == i)), "source", index, True, mark))
        if self.operator.timed:
            self.watermark = NEVER if self.newest == NEVER else self.newest - self.operator.lateness_us
            self.watermark = FOREVER if end else self.watermark
        tick = Tick(self.epoch, before, self.watermark)
        made = [self._apply(t, a, tick) for t, a in zip(self.tables, arrivals, strict=True)]
        whole = pl.concat([m.frame for m in made]).sort(ORDER, maintain_order=True)
        self.out.append(whole.drop(ORDER))
        for m in made:
            assert m.frame[ORDER].is_sorted()
            self.dead.extend(m.dead)

    def _apply(self, table: KeyedTable, arrivals: Sequence[Arrival], tick: Tick) -> Applied:
        """Perhaps twice: the second time after an undo, as after a failure."""
        applied = self.operator.apply(table, arrivals, tick)
        if self.r.random() < 0.3:
            if self.r.random() < 0.5:
                table.seal(tick.epoch)
            assert table.undo_to(tick.epoch - 1)
            again = self.operator.apply(table, arrivals, tick)
            assert again.frame.equals(applied.frame) and again.dead == applied.dead
        table.seal(tick.epoch)
        table.validate()
        return applied

    def _move(self) -> None:
        """Everything into new containers, as many as may be, by way of what a checkpoint holds."""
        held = [t.export(range(SLICES), SLICEMAP) for t in self.tables]
        self.instances = self.r.randint(1, 3)
        self.tables = [self._table(self.epoch) for _ in range(self.instances)]
        for frame in held:
            owner = SLICEMAP.of(frame["__hash"].to_numpy()) % self.instances
            for i, table in enumerate(self.tables):
                table.load(frame.filter(pl.Series(owner == i)))


def some_rows(r: random.Random, count: int) -> pl.DataFrame:
    """Times go forward by seconds, now and then back or far ahead."""
    now, rows = START, []
    ops = r.sample(range(26), r.randint(3, 26))
    for i in range(count):
        now += timedelta(seconds=r.choice([0, 0, 1, 1, 2, 3, 11 if r.random() < 0.3 else 1]))
        at = now - timedelta(seconds=r.choice([0, 0, 0, 1, 3, 8]), milliseconds=r.choice([0, 0, 500]))
        rows.append({"k": r.choice("abcd"), "at": at, "op": r.choice(ops), "arg": r.randint(0, 9), "id": i})
    return pl.DataFrame(rows, schema={"k": str, "at": pl.Datetime("us"), "op": int, "arg": int, "id": int})


OUT = pl.Schema({"k": pl.String(), "id": pl.Int64(), "saw": pl.String()})


@given(SEEDS, COUNTS)
@examples(25)
def test_every_structure_timer_and_expiry_is_as_in_plain_python_row_by_row(seed: int, count: int) -> None:
    r = random.Random(seed)
    frame = some_rows(r, count)
    lateness = r.choice([0, 0, 2_000_000, 5_000_000])
    engine = Engine(Custom("zoo", ["k"], Zoo(), frame.schema, OUT, on="at", lateness_us=lateness), r)
    engine.run(frame)
    models = one_by_one(frame, lateness)
    got: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for k, id, saw in pl.concat(engine.out).rows():
        got[k].append((id, saw))
    for k, model in models.items():
        assert got[k] == model.out
    refused = [repr({"key": k, "at": at, "name": n}) for model in models.values() for k, at, n in model.refused]
    assert sorted(raw for _, _, _, raw in engine.dead) == sorted(refused)


@given(SEEDS, COUNTS)
@examples(12)
def test_keys_with_nothing_left_are_forgotten(seed: int, count: int) -> None:
    """At the end of time the states that expire have; a key has a row exactly if one of the others holds something."""
    r = random.Random(seed)
    frame = some_rows(r, count)
    engine = Engine(Custom("zoo", ["k"], Zoo(), frame.schema, OUT, on="at"), r)
    engine.run(frame)
    models = one_by_one(frame, 0)
    left = []
    for k, model in models.items():
        lasting = [model.states[name] for name in ("pair", "noted", "plain", "items", "latest")]
        if any(s.get() if isinstance(s, ModelValue) else len(s) for s in lasting):
            left.append(k)
    held = sorted(k for t in engine.tables for k in t.keys(t.live_rows())["k"].to_list())
    assert held == sorted(left)


# -- through the engine that users run --------------------------------------------------------------------------------


@given(SEEDS, COUNTS)
@examples(10)
def test_the_same_through_a_flow(seed: int, count: int) -> None:
    r = random.Random(seed)
    frame = some_rows(r, count)
    flow = ps.Flow("zoo")
    schema = {"k": str, "id": int, "saw": str}
    source = flow.source("rows", testing.rows(frame))
    source.key_by("k").process("zoo", Zoo(), schema=schema, on="at", lateness="2s").sink("out", ps.memory())
    inner = sorted(r.sample(range(1, count), min(count - 1, r.randint(0, 4))))
    epochs = [b - a for a, b in zip([0, *inner], [*inner, count], strict=True)]
    out = testing.collect(
        flow, sources={"rows": testing.rows(frame, epochs=epochs)}, instances=r.randint(1, 4), slices=8
    )
    got: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for k, id, saw in out.rows():
        got[k].append((id, saw))
    for k, model in one_by_one(frame, 2_000_000).items():
        assert got[k] == model.out


class Alarm(ps.Operator):
    """On results of windows: how long was it quiet?"""

    def on_event(
        self, key: str, event: ps.Event, quiet: ps.Value[int], timers: ps.Timers, time: ps.Time, emit: ps.Emit
    ) -> None:
        emit(key, event.window_end, event.n, quiet.get(0), str(time.watermark))
        quiet.clear()
        timers.set(event.window_end + timedelta(seconds=2), "quiet")

    def on_timer(self, key: str, at: datetime, quiet: ps.Value[int], timers: ps.Timers, emit: ps.Emit) -> None:
        quiet.set(quiet.get(0) + 1)
        emit(key, at, -1, quiet.get(0), "")
        timers.set(at + timedelta(seconds=2), "quiet")


@given(SEEDS, COUNTS)
@examples(10)
def test_timers_after_windows_do_not_show_the_cut(seed: int, count: int) -> None:
    r = random.Random(seed)
    frame = some_rows(r, count)
    flow = ps.Flow("alarms")
    windows = flow.source("rows", testing.rows(frame)).key_by("k").window(ps.tumbling("3s", on="at"))
    # Windows of several keys meet in one: they must come in order of time, not of the keys they are from.
    group = pl.when(pl.col("k").is_in(["a", "b", "c"])).then(pl.lit("x")).otherwise(pl.lit("y"))
    counts = windows.aggregate("counts", n=ps.count()).with_columns("groups", g=group)
    schema = {"g": str, "at": datetime, "n": int, "quiet": int, "mark": str}
    alarms = counts.key_by("g").process("alarms", Alarm, schema=schema, on="window_end", hold="3s")
    alarms.sink("out", ps.memory())

    def by_key(epochs: list[int], instances: int) -> dict[str, list[Any]]:
        out = testing.collect(flow, sources={"rows": testing.rows(frame, epochs=epochs)}, instances=instances, slices=8)
        got: dict[str, list[Any]] = defaultdict(list)
        for k, *row in out.rows():
            got[k].append(row)
        return got

    assert by_key([count], 1) == by_key([1] * count, r.randint(1, 4))


# -- batches ----------------------------------------------------------------------------------------------------------


class Smooth(ps.BatchOperator):
    """Count, last, and a moving average of gaps, as a scan; a sum, one by one; the texts seen, as objects."""

    count = ps.column(int)
    last = ps.column(float, -1.0)
    mean = ps.column(float)
    total = ps.column(float)
    texts = ps.column(list[int])

    def on_batch(self, batch: ps.Batch, state: ps.State) -> pl.DataFrame:
        def step(count: Any, last: Any, mean: Any, at: Any) -> tuple[Any, Any, Any]:
            return count + 1, at, batch.where(count == 0, 0.0, mean + (at - last - mean) * 0.1)

        x = batch["x"]
        gap = x - batch.previous(x, state.last)
        (n, _, mean), final = batch.scan(step, [state.count, state.last, state.mean], x)
        state.count, state.last, state.mean = final
        assert (state.last == batch.last(x)).all()
        np.add.at(state.total, batch.key_index, x)
        for i, k in enumerate(batch.key_index.tolist()):
            state.texts[k] = [*(state.texts[k] or []), int(x[i])][-3:]
        ends = state.count >= 7
        out = batch.frame.select("k", n=n, mean=mean, gap=gap)
        state.forget(ends & (batch.counts == 1))
        return out


@given(SEEDS, st.integers(2, 200))
@examples(20)
def test_a_scan_is_a_loop_over_events(seed: int, count: int) -> None:
    r = random.Random(seed)
    keys = [r.choice("aaaaabcdefghijklmnopqrstuvwxyzäöüßéèçñ0123456789") for _ in range(count)]
    frame = pl.DataFrame({"k": keys, "x": [r.uniform(-9, 9) for _ in range(count)]}).sort("k", maintain_order=True)
    starts = np.flatnonzero(np.concatenate(([True], (frame["k"][1:] != frame["k"][:-1]).to_numpy())))
    batch = Batch(frame, frame.select("k")[starts], starts)
    begin = np.array([r.uniform(-1, 1) for _ in starts])
    (after,), (final,) = batch.scan(lambda s, x: (s * 0.3 + x / s,), [begin], batch["x"])
    expected, last = [], {}
    for k, x in frame.rows():
        s = last.get(k, begin[len(last)] if k not in last else None)
        last[k] = np.float64(s) * 0.3 + x / np.float64(s)
        expected.append(last[k])
    assert after.tolist() == expected
    assert final.tolist() == list(last.values())
    assert batch.ordinal.tolist() == [i - int(starts[k]) for i, k in enumerate(batch.key_index.tolist())]


class Steady(Smooth):
    def on_batch(self, batch: ps.Batch, state: ps.State) -> pl.DataFrame:
        out = super().on_batch(batch, state)
        state._forgotten[:] = False
        return out.with_columns(
            total=batch.per_row(state.total), texts=pl.Series([str(t) for t in batch.per_row(state.texts)])
        )


SMOOTH = {"k": pl.String(), "n": pl.Int64(), "mean": pl.Float64(), "gap": pl.Float64()}


@given(SEEDS, st.integers(2, 30))
@examples(10)
def test_a_batch_operator_is_independent_of_cuts_and_restores(seed: int, count: int) -> None:
    r = random.Random(seed)
    frame = pl.DataFrame({"k": [r.choice("abc") for _ in range(count)], "x": [r.uniform(0, 9) for _ in range(count)]})
    schema = {**SMOOTH, "total": pl.Float64(), "texts": pl.String()}
    flow = ps.Flow("smooth")
    flow.source("rows", testing.rows(frame)).key_by("k").process("smooth", Steady, schema=schema).sink(
        "out", ps.memory()
    )
    cut = [1] * count
    many = testing.collect(flow, sources={"rows": testing.rows(frame, epochs=cut)}, instances=3, slices=8)
    once = testing.collect(flow)
    for k in "abc":
        a, b = many.filter(pl.col("k") == k), once.filter(pl.col("k") == k)
        assert a.select(list(SMOOTH)).equals(b.select(list(SMOOTH)))
        assert a[-1:].equals(b[-1:])


# -- map and reduce ---------------------------------------------------------------------------------------------------


def pairs(line: ps.Event, emit: ps.Emit) -> None:
    for word in line.text.split():
        emit(word, len(line.text))


def add(word: str, n: int, total: ps.Value[int], emit: ps.Emit) -> None:
    total.set(total.get(0) + n)
    emit(word, total.get())


@given(SEEDS, COUNTS, st.booleans())
@examples(10)
def test_map_reduce_is_a_loop(seed: int, count: int, combined: bool) -> None:
    r = random.Random(seed)
    lines = [" ".join(r.choice("abcde") for _ in range(r.randint(0, 4))) for _ in range(count)]
    flow = ps.Flow("counts")
    out = flow.source("lines", testing.rows(pl.DataFrame({"text": lines}))).map_reduce(
        "counts",
        map=pairs,
        reduce=add,
        key=str,
        value=int,
        schema={"word": str, "n": int},
        combine=(lambda a, b: a + b) if combined else None,
    )
    out.sink("out", ps.memory())
    frame = testing.collect(flow, instances=r.randint(1, 4), epoch_rows=r.randint(1, count))
    expected: dict[str, list[int]] = defaultdict(list)
    for line in lines:
        for word in line.split():
            expected[word].append(len(line) + (expected[word][-1] if expected[word] else 0))
    got: dict[str, list[int]] = defaultdict(list)
    for word, n in frame.rows():
        got[word].append(n)
    if combined:
        assert {w: ns[-1] for w, ns in got.items()} == {w: ns[-1] for w, ns in expected.items()}
    else:
        assert got == expected
