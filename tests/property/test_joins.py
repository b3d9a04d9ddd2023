"""Joins against nested loops over the rows that were in time: no cut, parallelism, restore or replay may show."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import duckdb
import numpy as np
import polars as pl
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock import testing
from penstock.operators.base import DUE, FOREVER, HASH, NEVER, ORDER, Arrival, Tick, one_zero
from penstock.operators.joins import LifetimeJoin, Shape
from penstock.state.hashing import hash_columns
from penstock.state.slicemap import SliceMap
from penstock.state.table import KeyedTable
from tests.property.cuts import examples

SEEDS = st.integers(0, 2**32 - 1)
COUNTS = st.integers(0, 30)
SLICES = 8
SLICEMAP = SliceMap(SLICES)
EPOCH = datetime(1970, 1, 1)


def plain(value: Any) -> Any:
    """As text, equal exactly when the bits are: all NaN are one, -0.0 is not 0.0."""
    if isinstance(value, float):
        return "nan" if value != value else repr(value)
    return repr(value)


def micros(time: datetime) -> int:
    return (time - EPOCH) // timedelta(microseconds=1)


# -- inputs ----------------------------------------------------------------------------------------------------------

WORDS = ["a", "b", "ü", "a longer key than twelve bytes", None]
REALS = [math.nan, -0.0, 0.0, 1.5, None]
SPECIAL = [math.nan, -0.0, 0.0, math.inf, 0.1, None]


def some_side(r: random.Random, count: int, keys: int) -> pl.DataFrame:
    """Rows with every kind of value, in a time that mostly goes on."""
    now = 0
    rows = []
    for _ in range(count):
        now += r.choice([0, 0, 1, 1, 2, 3, 8])
        t = now - r.choice([0, 0, 0, 1, 2, 5, 12])
        until = r.choice([t + 1, t + 2, t + 5, t + 30, t, t - 3, None]) if r.random() < 0.9 else t + 1000
        rows.append(
            {
                "word": r.choice(WORDS[:keys]) if keys < 5 else r.choice(WORDS),
                "real": r.choice(REALS) if keys > 2 else 1.5,
                "t": t if r.random() > 0.05 else None,
                "until": until,
                "ends": r.choice([True, False, False, None]),
                "user": r.choice([1, 2, None]),
                "x": r.choice(SPECIAL),
                "n": r.choice([None, 1, -(2**62)]),
                "s": r.choice([None, "", "xyz", "ß"]),
                "list": r.choice([None, [], [1, None]]),
                "flag": r.choice([None, True, False]),
            }
        )
    schema = {
        "word": pl.String(),
        "real": pl.Float64(),
        "t": pl.Int64(),
        "until": pl.Int64(),
        "ends": pl.Boolean(),
        "user": pl.UInt64(),
        "x": pl.Float64(),
        "n": pl.Int64(),
        "s": pl.String(),
        "list": pl.List(pl.Int16()),
        "flag": pl.Boolean(),
    }
    times = [pl.col(c).cast(pl.Datetime("us")) for c in ("t", "until")]
    return pl.DataFrame(rows, schema=schema, orient="row").with_columns(times)


def some_shape(r: random.Random) -> Shape:
    return r.choice(
        [
            ps.point("t"),
            ps.interval("t", "until"),
            ps.edge("t", "ends"),
            ps.edge("t", "ends", id="user"),
            ps.versions("t"),
        ]
    )


def some_shapes(r: random.Random) -> tuple[Shape, Shape]:
    if r.random() < 0.3:
        before, after = r.choice([(0, 0), (3, 0), (0, 4), (5, 10), (-2, 6), (6, -2)])
        pair = ps.within("t", "t", before=before / 1e6, after=after / 1e6)
        return pair.left, pair.right
    return some_shape(r), some_shape(r)


KEYS = (["word"], ["word", "real"])


# -- the oracle ------------------------------------------------------------------------------------------------------


@dataclass
class Life:
    row: dict[str, Any]
    key: tuple[Any, ...]
    start: int
    end: int
    at: int
    """Position in the source."""


@dataclass
class Expected:
    pairs: Counter[Any] = field(default_factory=Counter)
    late: int = 0
    dead: Counter[Any] = field(default_factory=Counter)


def key_of(row: dict[str, Any], key: Sequence[str]) -> tuple[Any, ...]:
    return tuple(plain(row[k] + 0.0) if isinstance(row[k], float) else row[k] for k in key)


def lifetimes(frame: pl.DataFrame, key: Sequence[str], shape: Shape, lateness: int, out: Expected) -> list[Life]:
    """Row by row: what is in time, and from when to when it lives."""
    high: int | None = None
    lives: list[Life] = []
    closing: set[int] = set()
    for at, row in enumerate(frame.iter_rows(named=True)):
        if row[shape.on] is None:
            out.dead[repr(row)] += 1
            continue
        t = micros(row[shape.on])
        end = FOREVER
        if shape.kind == "interval" and row["until"] is not None:
            end = micros(row["until"])
            if end <= t:
                out.dead[repr(row)] += 1
                continue
        if high is not None and t < high - lateness:
            out.late += 1
            continue
        high = t if high is None else max(high, t)
        start = t - shape.before_us
        if shape.kind in ("point", "span"):
            end = start + shape.length_us
        if shape.kind == "edge" and row["ends"]:
            closing.add(at)
        lives.append(Life(row, key_of(row, key), start, end, at))
    if not shape.follows:
        return lives
    groups: dict[Any, list[Life]] = defaultdict(list)
    for life in lives:
        groups[life.key, tuple(life.row[c] for c in shape.id)].append(life)
    kept = []
    for group in groups.values():
        group.sort(key=lambda life: (life.start, life.at))
        current: Life | None = None
        for life in group:
            if current is not None:
                current.end = life.start
            if life.at in closing:
                if current is None:
                    out.dead[repr(life.row)] += 1
                current = None
            else:
                kept.append(life)
                current = life
    return kept


def expected(
    frames: Sequence[pl.DataFrame], keys: Sequence[Sequence[str]], shapes: Sequence[Shape], how: str, lateness: int
) -> Expected:
    out = Expected()
    left, right = (lifetimes(f, k, s, lateness, out) for f, k, s in zip(frames, keys, shapes, strict=True))
    others = [c for c in frames[1].columns if c not in keys[1]]
    for a in left:
        met = False
        for b in right:
            if a.key == b.key and max(a.start, b.start) < min(a.end, b.end):
                out.pairs[joined(a.row, keys[0], [b.row[c] for c in others])] += 1
                met = True
        if how == "left" and not met:
            out.pairs[joined(a.row, keys[0], [None] * len(others))] += 1
    return out


def joined(row: dict[str, Any], key: Sequence[str], others: list[Any]) -> tuple[Any, ...]:
    mine = [v + 0.0 if c in key and isinstance(v, float) else v for c, v in row.items()]
    return tuple(plain(v) for v in (*mine, *others))


# -- the engine's part, by hand ----------------------------------------------------------------------------------------


@dataclass
class Cut:
    """One way to run: none of it may show in the rows that come out."""

    ends: tuple[tuple[int, ...], tuple[int, ...]]
    """Where each side's epochs end."""
    splits: int
    instances: tuple[int, ...]
    """In each epoch; where it changes, state is written, read and divided anew."""
    restores: tuple[bool, ...]
    collide: bool = False


def some_cut(r: random.Random, counts: tuple[int, int], epochs: int | None = None) -> Cut:
    epochs = epochs or r.randint(1, 6)
    ends = tuple((*sorted(r.randint(0, n) for _ in range(epochs - 1)), n) for n in counts)
    return Cut(
        (ends[0], ends[1]),
        r.randint(1, 3),
        tuple(r.randint(1, 3) for _ in range(epochs + 1)),
        tuple(r.random() < 0.3 for _ in range(epochs + 1)),
        r.random() < 0.2,
    )


class Driver:
    """Does what task.py and the controller do for one keyed stage with two inputs."""

    def __init__(self, join: LifetimeJoin, cut: Cut) -> None:
        self.join = join
        self.cut = cut
        spec = join.table()
        assert spec is not None
        self.spec = spec
        self.tables: list[KeyedTable] = [KeyedTable(self.spec) for _ in range(cut.instances[0])]
        self.seen = [NEVER, NEVER]
        self.late = 0
        self.dead: Counter[Any] = Counter()
        self.outputs: list[pl.DataFrame] = []
        self.rows_most = 0

    def run(self, frames: Sequence[pl.DataFrame]) -> Driver:
        firsts = [0, 0]
        for epoch, ends in enumerate(zip(*self.cut.ends, strict=True), 1):
            parts = [f[a:b] for f, a, b in zip(frames, firsts, ends, strict=True)]
            self.epoch(epoch, parts, final=False)
            firsts = list(ends)
        self.epoch(len(self.cut.ends[0]) + 1, [f[:0] for f in frames], final=True)
        return self

    def behind(self, time: int) -> int:
        return time if time == NEVER else time - self.join.lateness_us

    def epoch(self, epoch: int, parts: Sequence[pl.DataFrame], *, final: bool) -> None:
        count = self.cut.instances[epoch - 1]
        before = [self.behind(s) for s in self.seen]
        arrivals: list[list[Arrival]] = [[] for _ in range(count)]
        for port, part in enumerate(parts):
            edges = sorted({part.height * i // self.cut.splits for i in range(self.cut.splits + 1)})
            for index, (a, b) in enumerate(pairwise(edges)):
                prepared = self.join.prepare(part[a:b], True, port)
                mark = self.behind(self.seen[port])
                self.seen[port] = max(self.seen[port], prepared.time_max if prepared.time_max is not None else NEVER)
                self.late += prepared.late
                self.dead.update(d[3] for d in prepared.dead)
                rows = prepared.frame
                floats = [k for k in self.join.key if rows.schema[k].is_float()]
                rows = rows.with_columns(one_zero(pl.col(k)).alias(k) for k in floats)
                hashes = hash_columns(rows, self.join.key)
                if self.cut.collide:
                    hashes = hashes % np.uint64(2) << np.uint64(40)
                rows = rows.with_columns(pl.Series(HASH, hashes, dtype=pl.UInt64))
                owner = SLICEMAP.of(hashes) % count
                for c in range(count):
                    arrivals[c].append(
                        Arrival(rows.filter(pl.Series(owner == c)), f"in{port}", index, True, mark, port)
                    )
        marks = [FOREVER if final else self.behind(s) for s in self.seen]
        tick = Tick(epoch, min(before), min(marks), 0, tuple(zip(before, marks, strict=True)))
        self.place(epoch, count)
        out = []
        for table, mine in zip(self.tables, arrivals, strict=True):
            applied = self.join.apply(table, mine, tick)
            if self.cut.restores[epoch - 1]:  # the epoch runs again from where it began
                assert table.undo_to(epoch - 1)
                again = self.join.apply(table, mine, tick)
                assert again.frame.equals(applied.frame) and again.late == applied.late and again.dead == applied.dead
            table.validate()
            self.late += applied.late
            self.dead.update(d[3] for d in applied.dead)
            assert applied.frame.columns == [*self.join.output, DUE, ORDER]
            assert applied.frame.drop(DUE, ORDER).schema == self.join.output
            out.append(applied.frame)
            table.seal(epoch)
        self.outputs.append(pl.concat(out).sort(DUE, ORDER, maintain_order=True))
        self.check_state(tick)

    def place(self, epoch: int, count: int) -> None:
        """Another number of containers, or the same from a checkpoint."""
        if len(self.tables) == count and not self.cut.restores[epoch - 1]:
            return
        stored = pl.concat([t.export(range(SLICES), SLICEMAP) for t in self.tables])
        self.tables = []
        for c in range(count):
            table = KeyedTable(self.spec, base_epoch=epoch - 1)
            owner = SLICEMAP.of(stored["__hash"].to_numpy()) % count
            table.load(stored.filter(pl.Series(owner == c)).sample(fraction=1, shuffle=True, seed=epoch))
            self.tables.append(table)

    def check_state(self, tick: Tick) -> None:
        """Nothing is kept that cannot match any more."""
        _, now = self.join._joint(tick)
        for table in self.tables:
            rows = table.live_rows()
            for port, (side, shape) in enumerate(zip(self.join.sides, self.join.given, strict=True)):
                mine = rows[(table.column("__port")[rows] == port) & (table.column("__start")[rows] < now)]
                if shape.follows:
                    group = table.keys(mine).select(self.join.key).with_columns(side.store.read(table, mine))
                    group = group.select(*self.join.key, *side.shape.id)
                    assert not group.is_duplicated().any()
                    if shape.kind == "edge":
                        assert not table.column("__closes")[mine].any()
                elif shape.kind == "interval":
                    assert (table.column("__end")[mine] > now).all()
                else:
                    assert (table.column("__start")[mine] + shape.length_us > now).all()
            if now == FOREVER:
                assert table.rows_live == 0

    def rows(self) -> Counter[Any]:
        return Counter(tuple(plain(v) for v in row) for f in self.outputs for row in f.drop(DUE, ORDER).iter_rows())


def renamed(frame: pl.DataFrame) -> pl.DataFrame:
    """The right side: other names for its keys, and one of them that clashes."""
    return frame.rename({"word": "word2", "real": "real2", "s": "word", "n": "other"})


def some_join(r: random.Random, keys: Sequence[str], shapes: tuple[Shape, Shape]) -> LifetimeJoin:
    left = some_side(r, 0, 5)
    return LifetimeJoin(
        "join",
        (keys, left.schema),
        ([f"{k}2" for k in keys], renamed(left).schema),
        shapes,
        how=r.choice(["inner", "left"]),
        lateness=r.choice([0, 0, 2, 6, 100]) / 1e6,
    )


@given(seed=SEEDS, lefts=COUNTS, rights=COUNTS)
@examples(60)
def test_a_join_is_the_pairs_that_overlap(seed: int, lefts: int, rights: int) -> None:
    r = random.Random(seed)
    keys = r.choice(KEYS)
    shapes = some_shapes(r)
    join = some_join(r, keys, shapes)
    many = r.choice([1, 2, 5])
    frames = (some_side(r, lefts, many), renamed(some_side(r, rights, many)))
    found = Driver(join, some_cut(r, (lefts, rights))).run(frames)
    wanted = expected(frames, (keys, [f"{k}2" for k in keys]), shapes, join.how, join.lateness_us)
    assert found.rows() == wanted.pairs
    assert found.late == wanted.late
    assert found.dead.total() == wanted.dead.total()


@given(seed=SEEDS, lefts=COUNTS, rights=COUNTS)
@examples(20)
def test_the_rows_of_an_epoch_do_not_depend_on_the_parallelism(seed: int, lefts: int, rights: int) -> None:
    r = random.Random(seed)
    keys = r.choice(KEYS)
    join = some_join(r, keys, some_shapes(r))
    frames = (some_side(r, lefts, 5), renamed(some_side(r, rights, 5)))
    one = some_cut(r, (lefts, rights))
    other = some_cut(r, (lefts, rights), len(one.ends[0]))
    other.ends, other.collide = one.ends, one.collide
    a, b = Driver(join, one).run(frames), Driver(join, other).run(frames)
    for x, y in zip(a.outputs, b.outputs, strict=True):
        assert x.equals(y, null_equal=True)
    assert a.dead == b.dead


# -- in a flow ---------------------------------------------------------------------------------------------------------


def run_flow(flow: ps.Flow, r: random.Random, sources: dict[str, Any]) -> testing.Run:
    return testing.run(
        flow,
        sources=sources,
        instances=r.randint(1, 3),
        slices=r.choice([3, 8]),
        checkpoint_interval_s=r.choice([0.0, 3600.0]),
        epochs_in_flight=r.randint(1, 3),
    )


def cut_rows(r: random.Random, frame: pl.DataFrame) -> testing.RowsSource:
    inner = sorted(r.sample(range(1, frame.height), min(frame.height - 1, r.randint(0, 4)))) if frame.height else []
    ends = [*inner, frame.height] if frame.height else []
    return testing.rows(frame, epochs=[b - a for a, b in zip([0, *ends], ends, strict=False)])


@given(seed=SEEDS, lefts=st.integers(1, 30), rights=st.integers(1, 30))
@examples(15)
def test_a_flow_joins_the_same(seed: int, lefts: int, rights: int) -> None:
    """Two sources that are cut each in its own way, on the engine."""
    r = random.Random(seed)
    keys = r.choice(KEYS)
    theirs = [f"{k}2" for k in keys]
    shapes, how, lateness = some_shapes(r), r.choice(["inner", "left"]), r.choice([0, 3, 50])
    frames = (some_side(r, lefts, 5), renamed(some_side(r, rights, 5)))
    flow = ps.Flow("two")
    left = flow.source("left", testing.rows(frames[0])).key_by(*keys)
    right = flow.source("right", testing.rows(frames[1])).key_by(*theirs)
    left.join("join", right, overlap=shapes, how=how, lateness=lateness / 1e6).sink("out", ps.memory())
    found = run_flow(flow, r, {"left": cut_rows(r, frames[0]), "right": cut_rows(r, frames[1])})
    wanted = expected(frames, (keys, theirs), shapes, how, lateness)
    assert Counter(tuple(plain(v) for v in row) for row in found.sinks["out"].iter_rows()) == wanted.pairs
    assert sum(found.late.values()) == wanted.late
    assert found.dead_letters.height == wanted.dead.total()


@given(seed=SEEDS, lefts=st.integers(1, 40), rights=st.integers(1, 40))
@examples(12)
def test_windows_after_a_join_lose_nothing(seed: int, lefts: int, rights: int) -> None:
    """``hold_us``: no output lies further behind than windows downstream are told to expect."""
    r = random.Random(seed)
    before, after = r.choice([(0, 0), (3, 0), (0, 4), (5, 10), (-2, 6), (6, -2)])
    how = r.choice(["inner", "left"])
    lateness = r.choice([0, 5])
    frames = [some_side(r, n, 2).select("word", "t") for n in (lefts, rights)]
    kinds: list[dict[str, Any]] = [
        {"within": ps.within("t", "t2", before=before / 1e6, after=after / 1e6)},
        {"overlap": (ps.point("t"), ps.versions("t2"))},
    ]
    kind = r.choice(kinds)
    flow = ps.Flow("windows")
    left = flow.source("left", cut_rows(r, frames[0])).key_by("word")
    right = flow.source("right", cut_rows(r, frames[1].rename({"t": "t2"}))).key_by("word")
    joined = left.join("join", right, how=how, lateness=lateness / 1e6, **kind)
    joined.sink("pairs", ps.memory())
    joined.key_by("word").window(ps.tumbling(5e-6, on="t")).aggregate("w", n=ps.count()).sink("out", ps.memory())
    found = run_flow(flow, r, {})
    assert found.sinks["out"]["n"].sum() == found.sinks["pairs"].height
    assert found.late.get("w", 0) == 0


def disorderly(r: random.Random, count: int, name: str) -> pl.DataFrame:
    seconds = [i * 0.37 + r.uniform(-2, 2) for i in range(count)]
    return pl.DataFrame(
        {
            "k": [r.randint(0, 5) for _ in seconds],
            "ts": pl.Series([round(s * 1e6) for s in seconds]).cast(pl.Datetime("us")),
            name: range(count),
        }
    )


def test_duckdb_agrees_on_within() -> None:
    r = random.Random(1)
    clicks, views = disorderly(r, 3000, "click"), disorderly(r, 3000, "view")
    for how in ("inner", "left"):
        flow = ps.Flow("within")
        left = flow.source("clicks", testing.rows(clicks)).key_by("k")
        right = flow.source("views", testing.rows(views)).key_by("k")
        near = ps.within("ts", "ts", before="5s", after="1s")
        left.join("join", right, within=near, how=how, lateness="10s").sink("out", ps.memory())
        ours = testing.run(flow, instances=3, epoch_rows=500)
        assert not ours.late
        theirs = duckdb.sql(
            f"select c.k, c.ts, click, v.ts, view from clicks c {how} join views v on c.k = v.k "
            "and v.ts between c.ts - interval 5 seconds and c.ts + interval 1 second"
        ).fetchall()
        assert Counter(ours.sinks["out"].rows()) == Counter(theirs)
        assert len(theirs) > 3000


def test_duckdb_agrees_on_the_version_at_a_time() -> None:
    r = random.Random(2)
    events, prices = disorderly(r, 3000, "event"), disorderly(r, 1000, "price")
    flow = ps.Flow("asof")
    left = flow.source("events", testing.rows(events)).key_by("k")
    right = flow.source("prices", testing.rows(prices)).key_by("k")
    left.lookup("price", right, on="ts", version="ts", lateness="10s").sink("out", ps.memory())
    ours = testing.run(flow, instances=3, epoch_rows=400)
    theirs = duckdb.sql(
        "select e.k, e.ts, event, p.ts, price from events e asof left join prices p on e.k = p.k and e.ts >= p.ts"
    ).fetchall()
    assert Counter(ours.sinks["out"].rows()) == Counter(theirs)
