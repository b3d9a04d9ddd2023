"""Windows against an oracle that goes row by row: no cut of the input and no parallelism may show in the result."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import duckdb
import polars as pl
import pytest
from hypothesis import given

import penstock as ps
from penstock import testing
from penstock.connectors.sinks import MemorySink
from tests.property.cuts import (
    COUNTS,
    KEYS,
    SEEDS,
    SPECIAL,
    Cut,
    examples,
    maybe,
    plain,
    plain_key,
    run,
    run_in_two,
    some_cut,
)

START = datetime(1970, 1, 1)

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
    offset: int = 0,
    empty: int = 0,
    one_pane: bool = False,
) -> tuple[dict[Any, tuple[Any, ...]], list[dict[str, Any]], int]:
    """(key, window start) -> values; the late rows; and how many rows have no time. Times in microseconds."""
    windows: dict[Any, list[tuple[Any, ...]]] = defaultdict(list)
    high, late, timeless = -math.inf, [], 0
    for row in rows:
        if row["t"] is None:
            timeless += 1
            continue
        t = (row["t"] - START) // timedelta(microseconds=1)
        high = max(high, t)
        earliest = (t - offset - size) // every * every + offset
        starts = [s for s in range(earliest, t + 1, every) if s <= t < s + size]
        still_open = [s for s in starts if s + size > high - lateness]
        if not still_open:
            late.append(row)
            continue
        for s in range(starts[-1] + every, starts[-1] + empty + 1, every):
            windows[tuple(plain_key(row[k]) for k in key), s]  # the key is known there, rows or not
        for s in still_open:
            pane = (t - offset) // math.gcd(size, every)
            entry = (0 if one_pane else pane, 0 if one_pane else still_open[0] + size, row["x"], row["i"], row["s"])
            windows[tuple(plain_key(row[k]) for k in key), s].append(entry)
    return {w: expected_values(found, list(over), over) for w, found in windows.items()}, late, timeless


# -- generated input -------------------------------------------------------------------------------------------------


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
@examples(25)
def test_a_window_holds_exactly_its_rows_however_the_input_is_cut(seed: int, count: int) -> None:
    r = random.Random(seed)
    frame, key = some_input(r, count)
    size = r.randint(1, 24)
    every = r.randint(max(1, size // 4), size)
    lateness = r.choice([0, 3, 20, 200])
    offset = r.choice([0, 0, 1, -7, 100])
    empty = r.choice([0, 0, every, 40])
    over = r.choice([aggregates, integers_only])()
    cut = some_cut(r, count)
    sink, late_sink = MemorySink(), MemorySink()

    def build(source: ps.Source) -> ps.Flow:
        flow = ps.Flow("windows")
        spec = ps.hopping(
            micro(size),
            every=micro(every),
            on="t",
            lateness=micro(lateness),
            offset=micro(offset),
            empty=micro(empty) if empty else None,
        )
        windows = flow.source("in", source).key_by(*key).window(spec)
        windows.aggregate("w", **over).sink("out", sink)
        windows.late("late").sink("late-out", late_sink)
        return flow

    expected, late, timeless = oracle(frame.to_dicts(), key, size, every, lateness, over, offset, empty)
    if r.random() < 0.25:
        run_in_two(build, frame, cut, r.randint(1, 3))
    else:
        job = run(build, frame, cut, ["w", "in", "late"])
        assert job.status().late == len(late)
        assert job.status().dead_letters == timeless
    assert emitted(sink, key, list(over)) == expected
    assert as_text(late_sink.frame().to_dicts()) == as_text(late)


def as_text(rows: Sequence[dict[str, Any]]) -> list[str]:
    return sorted(repr({k: plain_key(v) if k == "real" else plain(v) for k, v in row.items()}) for row in rows)


@given(seed=SEEDS, count=COUNTS)
@examples(20)
def test_the_last_update_of_a_window_is_its_result(seed: int, count: int) -> None:
    r = random.Random(seed)
    frame, key = some_input(r, count)
    size = r.randint(1, 24)
    every = r.randint(max(1, size // 4), size)
    lateness = r.choice([0, 3, 20, 200])
    over = r.choice([aggregates, integers_only])()
    sink = MemorySink()

    def build(source: ps.Source) -> ps.Flow:
        flow = ps.Flow("updates")
        spec = ps.hopping(micro(size), every=micro(every), on="t", lateness=micro(lateness), emit="updates")
        flow.source("in", source).key_by(*key).window(spec).aggregate("w", **over).sink("out", sink)
        return flow

    cut = some_cut(r, count)
    if r.random() < 0.25:
        run_in_two(build, frame, cut, r.randint(1, 3))
    else:
        run(build, frame, cut, ["w", "in"])
    last = {}
    for row in sink.frame().iter_rows(named=True):
        window = (tuple(plain(row[k]) for k in key), (row["window_start"] - START) // micro(1))
        last[window] = tuple(plain(row[n]) for n in over)
    # Row by row, and not by panes: as though every window had one pane.
    assert last == oracle(frame.to_dicts(), key, size, every, lateness, over, one_pane=True)[0]


@given(seed=SEEDS, count=COUNTS)
@examples(15)
def test_of_several_sources_each_has_its_own_watermark(seed: int, count: int) -> None:
    """A row is late by the rows before it in its own source, however far the other one is; the slower one closes."""
    r = random.Random(seed)
    left, key = some_input(r, count)
    right = left.sample(fraction=1.0, shuffle=True, seed=seed % 1000).with_columns(
        pl.col("t") + micro(r.randint(0, 60))
    )
    size = r.randint(1, 24)
    every = r.randint(max(1, size // 4), size)
    lateness = r.choice([0, 3, 20])
    sink = MemorySink()
    cut = some_cut(r, count)

    def build(source: ps.Source) -> ps.Flow:
        flow = ps.Flow("two")
        other = testing.rows(right, epochs=some_cut(r, count).epochs)
        both = flow.source("in", source).union("both", flow.source("other", other))
        spec = ps.hopping(micro(size), every=micro(every), on="t", lateness=micro(lateness))
        both.key_by(*key).window(spec).aggregate("w", n=ps.count(), whole=ps.sum("i")).sink("out", sink)
        return flow

    job = run(build, left, cut, ["w", "in"])
    counted: dict[Any, list[int]] = defaultdict(lambda: [0, 0])
    late = 0
    for source in (left, right):
        found, dropped, _ = oracle(source.to_dicts(), key, size, every, lateness, integers_only())
        late += len(dropped)
        for window, (n, whole, *_rest) in found.items():
            counted[window][0] += n
            counted[window][1] += whole
    assert emitted(sink, key, ["n", "whole"]) == {w: tuple(v) for w, v in counted.items()}
    assert job.status().late == late


@given(seed=SEEDS, count=COUNTS)
@examples(15)
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
    windows, *_ = oracle(frame.to_dicts(), key, size, size, 5, over)
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
