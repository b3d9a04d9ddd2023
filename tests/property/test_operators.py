"""Running aggregates, rankings and custom operators against plain Python: cuts and parallelism never show."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import duckdb
import polars as pl
import pytest
from hypothesis import given

import penstock as ps
from penstock import testing
from penstock.connectors.sinks import MemorySink
from tests.property.cuts import COUNTS, KEYS, SEEDS, SPECIAL, Cut, examples, maybe, plain, plain_key, run, some_cut


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
        }
        for _ in range(count)
    ]
    schema = {**{k: KEYS[k][0] for k in KEYS}, "x": pl.Float64(), "i": pl.Int64(), "s": pl.String()}
    return pl.DataFrame(rows, schema=schema), key


def by_key(rows: Iterable[dict[str, Any]], key: Sequence[str]) -> dict[Any, list[dict[str, Any]]]:
    """In source order; also tells apart what a later test groups by."""
    out: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        out[tuple(plain_key(row[k]) for k in key)].append(row)
    return out


def last_updates(sink: MemorySink, key: Sequence[str], names: Sequence[str]) -> dict[Any, tuple[Any, ...]]:
    out = {}
    for epoch in sorted(sink.epochs):
        seen = set()
        for row in sink.epochs[epoch].iter_rows(named=True):
            k = tuple(plain(row[c]) for c in key)
            assert k not in seen, f"two updates of {k} in one epoch"
            seen.add(k)
            out[k] = tuple(plain(row[n]) for n in names)
    return out


def folded(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Every aggregate, one row after the other."""
    total, whole, seen, ints = 0.0, 0, 0, 0
    for row in rows:
        if row["x"] is not None:
            total += row["x"]
            seen += 1
        if row["i"] is not None:
            whole += row["i"]
            ints += 1
    real = [r["x"] + 0.0 for r in rows if r["x"] is not None and r["x"] == r["x"]]
    integers = [r["i"] for r in rows if r["i"] is not None]
    texts = [r["s"] for r in rows if r["s"] is not None]
    return {
        "n": len(rows),
        "seen": seen,
        "total": total,
        "mean": total / seen if seen else None,
        "low": min(real, default=None),
        "high": max(real, default=None),
        "whole": whole,
        "middle": float(whole) / ints if ints else None,
        "least": min(integers, default=None),
        "most": max(integers, default=None),
        "first": min(texts, default=None),
        "last": max(texts, default=None),
    }


EXACT: dict[str, ps.Aggregate] = {
    "n": ps.count(),
    "low": ps.min("x"),
    "high": ps.max("x"),
    "whole": ps.sum("i"),
    "middle": ps.mean("i"),
    "least": ps.min("i"),
    "most": ps.max("i"),
    "first": ps.min("s"),
    "last": ps.max("s"),
}
"""Reduced before the exchange."""
IN_ORDER: dict[str, ps.Aggregate] = {"seen": ps.count("x"), "total": ps.sum("x"), "mean": ps.mean("x"), **EXACT}
"""With sums of floats, which must be added in source order."""


@given(seed=SEEDS, count=COUNTS)
@examples(25)
def test_running_aggregates_end_at_the_same_values_to_the_last_bit(seed: int, count: int) -> None:
    r = random.Random(seed)
    frame, key = some_input(r, count)
    cut = some_cut(r, count)
    over = r.choice([EXACT, IN_ORDER])
    sink = MemorySink()

    def build(source: ps.Source) -> ps.Flow:
        flow = ps.Flow("running")
        flow.source("in", source).key_by(*key).aggregate("agg", **over).sink("out", sink)
        return flow

    run(build, frame, cut, ["agg", "in"])
    expected = {
        k: tuple(plain(folded(rows)[n]) for n in over) for k, rows in by_key(frame.iter_rows(named=True), key).items()
    }
    assert last_updates(sink, key, list(over)) == expected


def greatest(rows: list[dict[str, Any]], k: int, by: str, columns: Sequence[str], descending: bool) -> list[Any]:
    """NaN is above all numbers, nulls come last, the other columns in order break ties."""

    def place(row: dict[str, Any]) -> tuple[Any, ...]:
        def at(value: Any, down: bool) -> tuple[Any, ...]:
            if value is None:
                return (1,)
            number = math.inf if value != value else value
            above = value != value
            return (0, _Down((above, number)) if down else (above, number))

        return (at(row[by], descending), *(at(row[c], False) for c in columns if c != by))

    return sorted(rows, key=place)[:k]


@dataclass(frozen=True)
class _Down:
    value: Any

    def __lt__(self, other: _Down) -> bool:
        return bool(other.value < self.value)


def ranking(frame: pl.DataFrame, group: Sequence[str]) -> dict[Any, list[tuple[Any, ...]]]:
    """The last ranking of each group: group -> its rows by rank, values compared as keys are (-0.0 is 0.0)."""
    out: dict[Any, dict[int, tuple[Any, ...]]] = defaultdict(dict)
    for row in frame.iter_rows(named=True):
        rank = row.pop("rank")
        out[tuple(plain_key(row[g]) for g in group)][rank] = tuple(plain_key(v) for v in row.values())
    return {g: [ranks[r] for r in sorted(ranks)] for g, ranks in out.items()}


@given(seed=SEEDS, count=COUNTS)
@examples(20)
def test_the_greatest_events_of_each_key(seed: int, count: int) -> None:
    r = random.Random(seed)
    frame, key = some_input(r, count)
    cut = some_cut(r, count)
    k = r.randint(1, 4)
    by = r.choice(["x", "i", "s"])
    descending = r.random() < 0.5
    sink = MemorySink()

    def build(source: ps.Source) -> ps.Flow:
        flow = ps.Flow("best")
        flow.source("in", source).key_by(*key).top_k("top", k, by=by, descending=descending).sink("out", sink)
        return flow

    run(build, frame, cut, ["top"])
    expected = {
        g: [tuple(plain_key(v) for v in row.values()) for row in greatest(rows, k, by, frame.columns, descending)]
        for g, rows in by_key(frame.iter_rows(named=True), key).items()
    }
    assert ranking(sink.frame(), key) == expected


@given(seed=SEEDS, count=COUNTS)
@examples(20)
def test_a_ranking_of_running_aggregates(seed: int, count: int) -> None:
    """Values rise and fall; the last ranking is that of the last values."""
    r = random.Random(seed)
    frame, key = some_input(r, count)
    cut = some_cut(r, count)
    k = r.randint(1, 4)
    over: dict[str, ps.Aggregate] = {n: IN_ORDER[n] for n in ("n", "mean", "whole", "least", "first")}
    by = r.choice([*over])
    per = r.choice([(), key[:1]])
    descending = r.random() < 0.5
    sink = MemorySink()

    def build(source: ps.Source) -> ps.Flow:
        flow = ps.Flow("ranking")
        counts = flow.source("in", source).key_by(*key).aggregate("agg", **over)
        counts.top_k("top", k, by=by, per=per, descending=descending).sink("out", sink)
        return flow

    run(build, frame, cut, ["agg", "top"])
    values = [
        {**{c: rows[0][c] for c in key}, **{n: folded(rows)[n] for n in over}}
        for rows in by_key(frame.iter_rows(named=True), key).values()
    ]
    expected = {
        g: [tuple(plain_key(v) for v in row.values()) for row in greatest(rows, k, by, [*key, *over], descending)]
        for g, rows in by_key(values, per).items()
    }
    assert ranking(sink.frame(), per) == expected


# -- custom operators ------------------------------------------------------------------------------------------------


class Fold(ps.Operator):
    """Order matters in all of it: a chain of digits, the last text, and a sum that only exact order gives."""

    def on_event(
        self, key: Any, event: Any, chain: ps.Value[int], seen: ps.Value[list[str]], total: ps.Value[float], emit: Any
    ) -> None:
        if event.i is not None and event.i % 7 == 0:
            chain.delete()
            total.delete()
            seen.delete()
            return
        chain.set((chain.get(0) * 31 + (event.i or 1)) % 1_000_003)
        seen.set([*seen.get([]), event.s or "-"][-3:])
        total.set(total.get(0.0) + (event.x or 0.0))
        if chain.get(0) % 2:
            emit(chain=chain.get(), seen="".join(seen.get([])), total=total.get())


def folded_by_hand(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    chain, seen, total = 0, [""][:0], 0.0
    out = []
    for row in rows:
        if row["i"] is not None and row["i"] % 7 == 0:
            chain, seen, total = 0, [], 0.0
            continue
        chain = (chain * 31 + (row["i"] or 1)) % 1_000_003
        seen = [*seen, row["s"] or "-"][-3:]
        total += row["x"] or 0.0
        if chain % 2:
            out.append((chain, "".join(seen), plain(total)))
    return out


@given(seed=SEEDS, count=COUNTS)
@examples(20)
def test_a_custom_operator_sees_each_keys_events_in_source_order(seed: int, count: int) -> None:
    r = random.Random(seed)
    frame, key = some_input(r, count)
    cut = some_cut(r, count)
    sink = MemorySink()

    def build(source: ps.Source) -> ps.Flow:
        flow = ps.Flow("custom")
        stream = flow.source("in", source).with_columns("id", who=pl.struct(key).map_elements(repr_key, pl.String))
        stream.key_by("who").process("fold", Tagged(), schema=TAGGED).sink("out", sink)
        return flow

    run(build, frame, cut, ["fold", "in"])
    expected = {
        repr_key(dict(zip(key, k, strict=True))): folded_by_hand(rows)
        for k, rows in by_key(frame.iter_rows(named=True), key).items()
    }
    got: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
    for who, *values in sink.frame().iter_rows():
        got[who].append(tuple(plain(v) for v in values))
    assert got == {k: v for k, v in expected.items() if v}


def repr_key(values: dict[str, Any]) -> str:
    return "|".join(str(plain_key(v)) for v in values.values())


class Tagged(Fold):
    """As Fold, with the key in what it emits."""

    def on_event(
        self, key: Any, event: Any, chain: ps.Value[int], seen: ps.Value[list[str]], total: ps.Value[float], emit: Any
    ) -> None:
        super().on_event(key, event, chain, seen, total, lambda **values: emit(who=key, **values))


TAGGED = {"who": str, "chain": int, "seen": str, "total": float}


@given(seed=SEEDS, count=COUNTS)
@examples(15)
def test_order_survives_a_second_exchange(seed: int, count: int) -> None:
    """Aggregate, then a diamond, then an order-sensitive operator under another key, with the epochs given.

    What comes out of a keyed stage in one epoch has an order of its own, the same at any parallelism.
    """
    r = random.Random(seed)
    frame, key = some_input(r, count)
    first = some_cut(r, count)
    second = some_cut(r, count)
    batches = r.random() < 0.5
    outcomes = []
    for cut in (first, Cut(first.epochs, second.instances, second.slices, 0.0, 1, second.rescales)):
        sink, sums = MemorySink(), MemorySink()

        def build(source: ps.Source, sink: MemorySink = sink, sums: MemorySink = sums) -> ps.Flow:
            flow = ps.Flow("second")
            counts = (
                flow.source("in", source)
                .key_by(*key)
                .aggregate("agg", emit="final", n=ps.count(), x=ps.sum("x"), s=ps.min("s"))
            )
            odd = counts.where("odd", pl.col("n") % 2 == 1)
            even = counts.where("even", pl.col("n") % 2 == 0)
            if batches:
                odd = odd.map_batches("same", lambda frame: frame)
            both = odd.union("both", even).with_columns("i", i=pl.col("n"), group=pl.col("s").is_null())
            both.key_by("group").process("fold", Fold(), schema={k: v for k, v in TAGGED.items() if k != "who"}).sink(
                "out", sink
            )
            both.key_by("group").aggregate("sums", total=ps.sum("x")).sink("sums-out", sums)
            return flow

        run(build, frame, cut, ["agg", "fold"])
        outcomes.append(
            [
                {e: sorted(tuple(map(plain, r)) for r in f.iter_rows()) for e, f in each.epochs.items()}
                for each in (sink, sums)
            ]
        )
    assert outcomes[0] == outcomes[1]


@given(seed=SEEDS, count=COUNTS)
@examples(15)
def test_a_diamond_restores_source_order(seed: int, count: int) -> None:
    """Rows that took different ways within a stage come together in the order the source gave them."""
    r = random.Random(seed)
    frame, _ = some_input(r, count)
    cut = some_cut(r, count)
    sink, times = MemorySink(), MemorySink()
    frame = frame.with_columns(t=pl.Series([i * 7 % 23 for i in range(frame.height)]).cast(pl.Datetime("us")))

    def build(source: ps.Source) -> ps.Flow:
        flow = ps.Flow("diamond")
        stream = flow.source("in", source).with_columns("one", who=pl.lit("all"))
        low = stream.where("low", pl.col("i").fill_null(0) < 0)
        high = stream.where("high", pl.col("i").fill_null(0) >= 0).map_rows(
            "same", lambda row: row, schema=stream.schema
        )
        both = low.union("both", high)
        both.key_by("who").process("fold", Tagged(), schema=TAGGED).sink("out", sink)
        both.key_by("who").window(ps.tumbling(1e-5, on="t")).aggregate("w", n=ps.count()).sink("windows", times)
        return flow

    job = run(build, frame, cut, ["fold", "in"])
    got = [tuple(plain(v) for v in row[1:]) for row in sink.frame().iter_rows()]
    assert got == folded_by_hand(list(frame.iter_rows(named=True)))
    high_us, late = -1, 0
    windows: dict[int, int] = defaultdict(int)
    for i in range(frame.height):
        high_us = max(high_us, i * 7 % 23)
        if i * 7 % 23 // 10 * 10 + 10 > high_us:
            windows[i * 7 % 23 // 10 * 10] += 1
        else:
            late += 1
    assert sorted(times.frame()["n"].to_list()) == sorted(windows.values())
    assert job.status().late == late


def test_values_that_are_null_are_ranked_last_and_stay_null() -> None:
    """Numbers are kept in numpy arrays, which have no null of their own."""
    frame = pl.DataFrame({"k": ["a", "b", "c", "b"], "i": pl.Series([5, None, -3, None], dtype=pl.Int64)})
    flow = ps.Flow("nulls")
    least = flow.source("in", testing.rows(frame, epochs=[2, 2])).key_by("k").aggregate("agg", least=ps.min("i"))
    least.top_k("top", 3, by="least").sink("out", ps.memory())
    out = testing.collect(flow, instances=2, checkpoint_interval_s=0)
    assert out.tail(3).rows() == [("a", 5, 1), ("c", -3, 2), ("b", None, 3)]


def test_a_float_group_may_be_nan() -> None:
    frame = pl.DataFrame({"g": [math.nan, -0.0, 0.0, None, math.nan], "x": [1, 2, 3, 4, 5]})
    flow = ps.Flow("nan")
    flow.source("in", testing.rows(frame, epochs=[2, 3])).key_by("g").top_k("top", 1, by="x").sink("out", ps.memory())
    got = ranking(testing.collect(flow, instances=2), ["g"])
    assert got == {("nan",): [("nan", 5)], ("0.0",): [("0.0", 3)], (None,): [(None, 4)]}


@pytest.mark.parametrize("dtype", [pl.UInt64(), pl.Int8(), pl.UInt8(), pl.Float32(), pl.Boolean()], ids=str)
def test_extremes_of_narrow_and_unsigned_columns(dtype: pl.DataType) -> None:
    top = {pl.UInt64(): 2**64 - 1, pl.Int8(): 127, pl.UInt8(): 255, pl.Float32(): 3.0, pl.Boolean(): True}[dtype]
    frame = pl.DataFrame(
        {"k": [1, 1, 1, 2], "v": pl.Series([None, top, False if top is True else 0, None], dtype=dtype)}
    )
    flow = ps.Flow("extremes")
    keyed = flow.source("in", testing.rows(frame, epochs=[1, 1, 2])).key_by("k")
    keyed.aggregate("agg", low=ps.min("v"), high=ps.max("v")).sink("out", ps.memory())
    out = testing.collect(flow, instances=2, checkpoint_interval_s=0).group_by("k").last().sort("k")
    assert out.schema["low"] == dtype
    assert out.rows() == [(1, 0, top), (2, None, None)]


def test_extremes_of_times() -> None:
    days = pl.Series("d", [date(1969, 12, 31), None, date(2024, 2, 29)])
    frame = pl.DataFrame(
        {"k": [1, 1, 1], "d": days, "t": days.cast(pl.Datetime("ms")), "u": days.cast(pl.Datetime("ns"))}
    )
    flow = ps.Flow("times")
    keyed = flow.source("in", testing.rows(frame, epochs=[1, 2])).key_by("k")
    keyed.aggregate("agg", **{f"{f.__name__}_{c}": f(c) for c in "dtu" for f in (ps.min, ps.max)}).sink(
        "o", ps.memory()
    )
    last = testing.collect(flow, instances=2).tail(1).row(0, named=True)
    for column in "dtu":
        assert last[f"min_{column}"] == frame[column][0]
        assert last[f"max_{column}"] == frame[column][2]


def test_duckdb_agrees_on_a_larger_input() -> None:
    i = pl.Series(range(30_000))
    frame = pl.DataFrame(
        {
            "k": pl.Series([f"k{v % 211}" if v % 7 else None for v in i]),
            "n": (i * 7919 % 1_000).cast(pl.Int64),
            "x": (i * 104_729 % 10_007).cast(pl.Float64) / 3,
        }
    )
    flow = ps.Flow("running")
    keyed = flow.source("in", testing.rows(frame)).key_by("k")
    keyed.aggregate("agg", rows=ps.count(), n=ps.sum("n"), x=ps.sum("x"), low=ps.min("x")).sink("out", ps.memory())
    ours = testing.collect(flow, instances=3, epoch_rows=4_000, checkpoint_interval_s=0)
    last = {row[0]: row[1:] for row in ours.iter_rows()}
    theirs = (
        duckdb.connect().execute("select k, count(*), sum(n)::bigint, sum(x), min(x) from frame group by k").fetchall()
    )
    assert len(last) == len(theirs)
    for k, rows, n, x, low in theirs:
        assert last[k][:2] == (rows, n) and last[k][3] == low
        assert last[k][2] == pytest.approx(x, rel=1e-12)
