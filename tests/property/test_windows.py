"""Windows against an oracle that goes row by row: no cut of the input and no parallelism may show in the result."""

from __future__ import annotations

import math
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Any

import duckdb
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock import testing
from penstock.connectors.sinks import MemorySink
from penstock.engines.job import Job, start

THOROUGH = settings.get_current_profile_name() == "thorough"
START = datetime(1970, 1, 1)


SEEDS = st.integers(0, 2**32 - 1)
COUNTS = st.integers(1, 40)


def examples(count: int) -> settings:
    return settings(max_examples=2_000 if THOROUGH else count)


def plain(value: Any) -> Any:
    """Equal exactly when the bits are: all NaN are one, -0.0 is not 0.0."""
    if isinstance(value, float):
        return "nan" if value != value else repr(value)
    return value


def plain_key(value: Any) -> Any:
    """Keys: all NaN are one key, and -0.0 is 0.0."""
    return plain(value + 0.0) if isinstance(value, float) else value


@dataclass(frozen=True)
class Cut:
    """One way to run a flow: none of it may show in the result."""

    epochs: tuple[int, ...]
    instances: int
    slices: int
    checkpoint_s: float
    in_flight: int
    rescales: tuple[tuple[int, int], ...]
    """(after this epoch, to so many instances)"""


def some_cut(r: random.Random, count: int) -> Cut:
    inner = r.sample(range(1, count), min(count - 1, r.randint(0, 4)))
    ends = [*sorted(inner), count]
    slices = r.choice([1, 3, 8, 64])
    most = min(8, slices)
    return Cut(
        tuple(b - a for a, b in zip([0, *ends], ends, strict=False)),
        r.randint(1, most),
        slices,
        r.choice([0.0, 0.0, 3600.0]),
        r.randint(1, 3),
        tuple((r.randint(1, 4), r.randint(1, most)) for _ in range(r.randint(0, 2))),
    )


def run(build: Callable[[ps.Source], ps.Flow], frame: pl.DataFrame, cut: Cut, keyed: Sequence[str]) -> Job:
    """Run a flow over ``frame`` cut as told, rescaling the stages ``keyed`` on the way."""
    flow = build(testing.rows(frame, epochs=cut.epochs))
    config = ps.Config(
        instances=cut.instances,
        slices=cut.slices,
        checkpoint_interval_s=cut.checkpoint_s,
        epochs_in_flight=cut.in_flight,
    )
    held: list[Job] = []
    ready = threading.Event()
    published = 0

    def trip(step: str) -> None:
        nonlocal published
        if step == "after-publish":
            published += 1
            ready.wait()
            for after, instances in cut.rescales:
                if after == published:
                    for stage in keyed:
                        held[0].rescale(stage, instances)

    job = start(flow, engine="local", config=config, trip=trip)
    held.append(job)
    ready.set()
    assert job.wait(60)
    return job


# -- the oracle ------------------------------------------------------------------------------------------------------

VALUES = ("n", "seen", "total", "whole", "mean", "low", "high", "first", "oldest")


def aggregates() -> dict[str, ps.Aggregate]:
    return {
        "n": ps.count(),
        "seen": ps.count("x"),
        "total": ps.sum("x"),
        "whole": ps.sum("i"),
        "mean": ps.mean("x"),
        "low": ps.min("x"),
        "high": ps.max("x"),
        "first": ps.min("s"),
        "oldest": ps.max("i"),
    }


def integers_only() -> dict[str, ps.Aggregate]:
    """All associative: these are reduced before the exchange."""
    return {"n": ps.count(), "whole": ps.sum("i"), "low": ps.min("x"), "first": ps.min("s"), "mean": ps.mean("i")}


def summed(groups: Sequence[Sequence[float]]) -> float:
    """Each pane by itself in source order, then the panes in time order: what windows.py promises for floats."""
    total = 0.0
    for group in groups:
        part = 0.0
        for x in group:
            part += x
        total += part
    return total


def expected_values(
    rows: list[tuple[Any, ...]], names: Sequence[str], over: dict[str, ps.Aggregate]
) -> tuple[Any, ...]:
    """rows: (pane, lo, x, i, s) in source order."""
    panes: dict[tuple[int, int], list[float]] = defaultdict(list)
    for pane, lo, x, *_ in rows:
        if x is not None:
            panes[pane, lo].append(x)
    xs = [r[2] for r in rows if r[2] is not None]
    real = [x + 0.0 for x in xs if x == x]
    ints = [r[3] for r in rows if r[3] is not None]
    texts = [r[4] for r in rows if r[4] is not None]
    total = summed([panes[p] for p in sorted(panes)])
    means = {"x": total / len(xs) if xs else None, "i": float(sum(ints)) / len(ints) if ints else None}
    found = {
        "n": len(rows),
        "seen": len(xs),
        "total": total,
        "whole": sum(ints),
        "mean": means[over["mean"].label],
        "low": min(real, default=None),
        "high": max(real, default=None),
        "first": min(texts, default=None),
        "oldest": max(ints, default=None),
    }
    return tuple(plain(found[n]) for n in names)


def oracle(
    rows: list[dict[str, Any]],
    key: Sequence[str],
    size: int,
    every: int,
    lateness: int,
    over: dict[str, ps.Aggregate],
) -> tuple[dict[Any, tuple[Any, ...]], int]:
    """(key, window start) -> values, and how many rows were late. Times in microseconds."""
    windows: dict[Any, list[tuple[Any, ...]]] = defaultdict(list)
    high, late = -math.inf, 0
    for row in rows:
        if row["t"] is None:
            late += 1
            continue
        t = (row["t"] - START) // timedelta(microseconds=1)
        high = max(high, t)
        starts = [s for s in range((t - size) // every * every, t + 1, every) if s <= t < s + size]
        still_open = [s for s in starts if s + size > high - lateness]
        if not still_open:
            late += 1
        for s in still_open:
            pane = t // math.gcd(size, every)
            entry = (pane, still_open[0] + size, row["x"], row["i"], row["s"])
            windows[tuple(plain_key(row[k]) for k in key), s].append(entry)
    return {w: expected_values(found, list(over), over) for w, found in windows.items()}, late


# -- generated input -------------------------------------------------------------------------------------------------

SPECIAL = [math.nan, -0.0, 0.0, math.inf, -math.inf, 0.1, 0.2, 0.3, 1e16, -1e16, 1.0]
KEYS: dict[str, tuple[pl.DataType, list[Any]]] = {
    "word": (pl.String(), ["a", "b", "ü", "", "a longer key than twelve bytes"]),
    "number": (pl.Int64(), [0, -1, 7, 2**62]),
    "real": (pl.Float64(), [math.nan, -0.0, 0.0, 1.5]),
    "day": (pl.Date(), [date(2024, 2, 29), date(1969, 12, 31)]),
    "flag": (pl.Boolean(), [False, True]),
}


def maybe(r: random.Random, value: Any) -> Any:
    """Now and then nothing."""
    return None if r.random() < 0.1 else value


def some_input(r: random.Random, count: int) -> tuple[pl.DataFrame, tuple[str, ...]]:
    """Rows with every kind of value, and the columns to key by.

    Drawn from a seed and not by Hypothesis, whose small and repetitive examples hardly ever have windows that overlap,
    late rows and several keys at once; it still chooses, and shrinks, the number of rows.
    """
    key = tuple(r.sample(sorted(KEYS), r.randint(1, 2)))
    rows = [
        {
            **{k: maybe(r, r.choice(KEYS[k][1])) if k in key else None for k in KEYS},
            "x": maybe(r, r.choice(SPECIAL) if r.random() < 0.7 else r.uniform(-1e9, 1e9)),
            "i": maybe(r, r.randint(-(2**40), 2**40)),
            "s": maybe(r, r.choice(["x", "yy", "", "ß"])),
            "t": maybe(r, START + micro(i * 3 + r.randint(-25, 10))),
        }
        for i in range(count)
    ]
    schema: dict[str, Any] = {k: KEYS[k][0] for k in KEYS}
    schema |= {"x": pl.Float64(), "i": pl.Int64(), "s": pl.String(), "t": pl.Datetime("us")}
    return pl.DataFrame(rows, schema=schema), key


def micro(us: int) -> timedelta:
    return timedelta(microseconds=us)


def emitted(sink: MemorySink, key: Sequence[str], names: Sequence[str]) -> dict[Any, tuple[Any, ...]]:
    out: dict[Any, tuple[Any, ...]] = {}
    for row in sink.frame().iter_rows(named=True):
        window = (tuple(plain(row[k]) for k in key), (row["window_start"] - START) // micro(1))
        assert window not in out, f"{window} came twice"
        out[window] = tuple(plain(row[n]) for n in names)
    return out


@given(seed=SEEDS, count=COUNTS)
@examples(60)
def test_a_window_holds_exactly_its_rows_however_the_input_is_cut(seed: int, count: int) -> None:
    r = random.Random(seed)
    frame, key = some_input(r, count)
    size = r.randint(1, 24)
    every = r.randint(max(1, size // 4), size)
    lateness = r.choice([0, 3, 20, 200])
    over = r.choice([aggregates, integers_only])()
    cut = some_cut(r, count)
    sink = MemorySink()

    def build(source: ps.Source) -> ps.Flow:
        flow = ps.Flow("windows")
        spec = ps.hopping(micro(size), every=micro(every), on="t", lateness=micro(lateness))
        flow.source("in", source).key_by(*key).window(spec).aggregate("w", **over).sink("out", sink)
        return flow

    job = run(build, frame, cut, ["w", "in"])
    expected, late = oracle(frame.to_dicts(), key, size, every, lateness, over)
    assert emitted(sink, key, list(over)) == expected
    assert job.status().late == late


@given(seed=SEEDS, count=COUNTS)
@examples(25)
def test_the_best_of_each_window(seed: int, count: int) -> None:
    """A window's rows all come in one epoch, wherever its keys live."""
    r = random.Random(seed)
    frame, key = some_input(r, count)
    size = r.randint(1, 24)
    k = r.randint(1, 3)
    descending = r.random() < 0.5
    cut = some_cut(r, count)
    sink = MemorySink()

    def build(source: ps.Source) -> ps.Flow:
        flow = ps.Flow("best")
        windows = flow.source("in", source).key_by(*key).window(ps.tumbling(micro(size), on="t", lateness=micro(5)))
        counted = windows.aggregate("w", n=ps.count(), whole=ps.sum("i"))
        counted.top_k("top", k, by="n", descending=descending).sink("out", sink)
        return flow

    run(build, frame, cut, ["w", "top"])
    over = {"n": ps.count(), "whole": ps.sum("i"), "mean": ps.mean("i")}
    windows, _ = oracle(frame.to_dicts(), key, size, size, 5, over)
    best: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    for (row_key, begin), (n, whole, _) in windows.items():
        best[begin].append((-n if descending else n, in_key_order(row_key), row_key, whole))
    expected = [
        (begin, rank, row_key, abs(n), whole)
        for begin, found in best.items()
        for rank, (n, _, row_key, whole) in enumerate(sorted(found, key=lambda r: r[:2])[:k], 1)
    ]
    got = [
        ((r["window_start"] - START) // micro(1), r["rank"], tuple(plain(r[c]) for c in key), r["n"], r["whole"])
        for r in sink.frame().iter_rows(named=True)
    ]
    assert sorted(got, key=repr) == sorted(expected, key=repr)


def in_key_order(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """Ascending, NaN after all numbers, nulls last: how ties are broken."""
    return tuple((2, 0) if v is None else (1, 0) if v == "nan" else (0, float(v) if _number(v) else v) for v in key)


def _number(value: Any) -> bool:
    return isinstance(value, str) and value in ("0.0", "1.5")


@pytest.mark.parametrize(
    ("dtype", "unit_us"),
    [
        (pl.Datetime("ms"), 1_000),
        (pl.Datetime("us"), 1),
        (pl.Datetime("ns"), 1),
        (pl.Datetime("us", "Europe/Zurich"), 1),
        (pl.Date(), 86_400_000_000),
    ],
    ids=str,
)
def test_every_kind_of_time(dtype: pl.DataType, unit_us: int) -> None:
    times = [-3, -2, -1, 0, 1, 4, 5, 6]
    physical = pl.Series("t", times, dtype=pl.Int64) * (1_000 if dtype == pl.Datetime("ns") else 1)
    frame = pl.DataFrame(
        {
            "k": ["a"] * len(times),
            "t": physical.cast(pl.Int32).cast(dtype) if dtype == pl.Date() else physical.cast(dtype),
        }
    )
    flow = ps.Flow("times")
    windows = flow.source("in", testing.rows(frame)).key_by("k").window(ps.tumbling(micro(2 * unit_us), on="t"))
    windows.aggregate("w", n=ps.count()).sink("out", ps.memory())
    out = testing.collect(flow).sort("window_start")
    starts = [-4, -2, 0, 4, 6]
    assert [(w - START) // micro(unit_us) for w in out["window_start"]] == starts
    assert out["n"].to_list() == [1, 2, 2, 2, 1]


def test_a_window_after_a_window() -> None:
    """The watermark of the second is behind the first's by a whole window: its rows carry their window's start."""
    frame = pl.DataFrame({"k": [f"k{i % 3}" for i in range(300)], "t": pl.Series(range(300)).cast(pl.Datetime("us"))})

    def build(source: ps.Source) -> ps.Flow:
        flow = ps.Flow("twice")
        small = (
            flow.source("in", source).key_by("k").window(ps.tumbling(micro(10), on="t")).aggregate("a", n=ps.count())
        )
        large = small.key_by("k").window(ps.tumbling(micro(60), on="window_start")).aggregate("b", n=ps.sum("n"))
        large.sink("out", sink)
        return flow

    for epochs in ((300,), (7,) * 42 + (6,)):
        sink = MemorySink()
        job = run(build, frame, Cut(epochs, 3, 8, 0.0, 2, ()), [])
        assert sorted(sink.frame()["n"].to_list()) == [20] * 15
        assert job.status().late == 0


def test_duckdb_agrees_on_a_larger_input() -> None:
    """Someone else's idea of hopping windows. Nothing is late here: lateness is a matter of order, which SQL lacks."""
    rows, size, every = 20_000, 10_000, 4_000
    i = pl.Series(range(rows))
    frame = pl.DataFrame(
        {
            "k": (i * 7919 % 53).cast(pl.String),
            "x": (i * 104_729 % 1_000).cast(pl.Float64) / 7,
            "t": (i * 10 + (i * 31_337 % 2_000)).cast(pl.Datetime("us")),
        }
    )
    flow = ps.Flow("windows")
    spec = ps.hopping(micro(size), every=micro(every), on="t", lateness="1s")
    stream = flow.source("in", testing.rows(frame)).key_by("k").window(spec)
    stream.aggregate("w", n=ps.count(), total=ps.sum("x"), high=ps.max("x")).sink("out", ps.memory())
    ours = testing.collect(flow, instances=3, epoch_rows=3_000, checkpoint_interval_s=0)
    query = f"""
        select k, w as begin_us, count(*) n, sum(x) total, max(x) high
        from (select *, epoch_us(t) u from frame),
             lateral (select unnest(range(((u - {size}) // {every}) * {every}, u + 1, {every})) as w)
        where w <= u and u < w + {size} group by all
    """
    found = duckdb.sql(query)
    assert found is not None
    theirs = found.pl()
    ours = ours.with_columns(begin_us=pl.col("window_start").dt.epoch("us"))
    both = ours.join(theirs, on=["k", "begin_us"], how="full", suffix="_duck")
    assert both.height == ours.height == theirs.height
    assert (both["n"] == both["n_duck"]).all()
    assert (both["high"] == both["high_duck"]).all()
    assert ((both["total"] - both["total_duck"]).abs() < 1e-6).all()
