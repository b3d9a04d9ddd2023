"""Aggregates piece by piece: what travels, what is refused, what sketches promise, and the API that windows use."""

from __future__ import annotations

import math
import pickle
import random
import statistics
from collections import Counter
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from typing import Any

import cloudpickle
import numpy as np
import polars as pl
import pytest

import penstock as ps
from penstock.errors import FlowError, UserCodeError
from penstock.operators.aggregates import Accumulators, RunningAggregate
from penstock.operators.base import HASH, Arrival, Tick, in_order
from penstock.operators.order import tag
from penstock.operators.sketches import ApproxDistinct, LogBuckets, Summary, ordered_bits
from penstock.state.hashing import hash_columns
from penstock.state.table import KeyedTable, TableSpec
from penstock.testing import collect, rows

SCHEMA = pl.Schema(
    {
        "k": pl.String(),
        "i": pl.Int64(),
        "x": pl.Float64(),
        "s": pl.String(),
        "t": pl.Datetime("us"),
        "l": pl.List(pl.Int64()),
        "d": pl.Decimal(10, 2),
    }
)


class Most(ps.Aggregator[int, int]):
    def create(self) -> int:
        return 0

    def add(self, state: int, value: int | None) -> int:
        return max(state, value or 0)

    def merge(self, a: int, b: int) -> int:
        return max(a, b)

    def result(self, state: int) -> int:
        return state


class Truncated(Most):
    def result(self, state: int) -> int:
        return int(state)


class InOrder(ps.Aggregator[str, str]):
    def create(self) -> str:
        return ""

    def add(self, state: str, value: str | None) -> str:
        return state + (value or "-")

    def result(self, state: str) -> str:
        return state


def accumulators(**over: ps.Aggregate) -> Accumulators:
    return Accumulators("agg", over, SCHEMA)


def some_rows(count: int, keys: int = 1, seed: int = 0) -> pl.DataFrame:
    r = random.Random(seed)
    data = [
        {
            "k": f"k{r.randrange(keys)}",
            "i": r.choice([None, *range(9)]),
            "x": r.choice([None, math.nan, r.uniform(-5, 5)]),
            "s": r.choice([None, "a", "b", "c"]),
            "t": datetime(2024, 1, 1) + timedelta(seconds=n),
            "l": None,
            "d": None,
        }
        for n in range(count)
    ]
    return pl.DataFrame(data, schema=SCHEMA)


def aggregate(frame: pl.DataFrame, *, key: str = "k", instances: int = 1, **over: ps.Aggregate) -> dict[str, Any]:
    """The last result of the one key there is."""
    flow = ps.Flow("unit")
    flow.source("in", rows(frame)).key_by(key).aggregate("agg", **over).sink("out", ps.memory())
    return collect(flow, instances=instances).row(-1, named=True)


# -- before the exchange -----------------------------------------------------------------------------------------------

ONE_ROW: dict[str, ps.Aggregate] = {
    "count": ps.count(),
    "count of": ps.count("x"),
    "sum": ps.sum("i"),
    "min": ps.min("x"),
    "max": ps.max("s"),
    "mean": ps.mean("i"),
    "distinct": ps.distinct("x"),
    "approx_distinct": ps.approx_distinct("s"),
    "quantile": ps.quantile("x", [0.5, 0.9]),
    "exact quantile": ps.quantile("x", 0.5, error=0),
    "top": ps.top("x", 3),
    "first by": ps.first("s", by="t"),
    "last by": ps.last("x", by="i"),
    "own": ps.aggregator(Most(), "i"),
}


@pytest.mark.parametrize("name", ONE_ROW)
def test_a_hot_key_costs_one_row_for_each_task(name: str) -> None:
    over = accumulators(a=ONE_ROW[name])
    assert over.associative
    assert over.partial(some_rows(500, keys=3), ["k"]).height == 3


IN_ORDER: dict[str, ps.Aggregate] = {
    "sum of floats": ps.sum("x"),
    "mean of floats": ps.mean("x"),
    "variance": ps.variance("i"),
    "std": ps.std("x"),
    "first": ps.first("s"),
    "last": ps.last("x"),
    "collect": ps.collect("i"),
    "heavy_hitters": ps.heavy_hitters("s", 2),
    "own without merge": ps.aggregator(InOrder(), "s"),
}


@pytest.mark.parametrize("name", IN_ORDER)
def test_what_depends_on_order_travels_row_by_row(name: str) -> None:
    over = accumulators(a=IN_ORDER[name], n=ps.count())
    frame = some_rows(50, keys=3)
    assert not over.associative
    assert over.partial(frame, ["k"])["k"].to_list() == frame["k"].to_list()


def test_the_order_of_rows_from_a_keyed_stage_is_kept() -> None:
    over = accumulators(a=ps.collect("i"))
    frame = some_rows(6).with_columns(pl.Series("i", [0, 1, 2, 3, 4, 5]))
    frame = frame.with_columns(pl.Series(tag(0), [1, 3, 5, 0, 2, 4]))
    partial = over.partial(frame, ["k"])
    tasks = [Arrival(partial[:3], "up", 0, False), Arrival(partial[3:], "up", 1, False)]
    assert in_order(tasks)[:, 2].to_list() == [3, 0, 4, 1, 5, 2]


def test_partial_rows_are_merged_as_if_they_had_been_one_task() -> None:
    over = accumulators(**{n.replace(" ", "_"): a for n, a in ONE_ROW.items()})
    frame = some_rows(200, keys=4)
    parts = [over.partial(frame[a : a + 50], ["k"], count="rows") for a in range(0, 200, 50)]
    regrouped = over.regroup(pl.concat(parts), ["k"], ["rows"])
    assert regrouped.height == 4
    assert regrouped["rows"].sum() == 200
    results = []
    for partials in ([over.partial(frame, ["k"])], parts, parts[::-1], [regrouped]):
        table = new_table(over)
        for p in partials:
            merge(over, table, p)
        results.append(read(over, table))
    assert all(r.equals(results[0], null_equal=True) for r in results[1:])


# -- the API that windows use ------------------------------------------------------------------------------------------


def new_table(over: Accumulators) -> KeyedTable:
    return KeyedTable(TableSpec(pl.Schema({"k": pl.String()}), over.values))


def merge(over: Accumulators, table: KeyedTable, partial: pl.DataFrame) -> np.ndarray:
    return over.merge_into(table, hash_columns(partial, ["k"]), partial.select("k"), partial)


def read(over: Accumulators, table: KeyedTable) -> pl.DataFrame:
    rows = table.live_rows()
    return table.keys(rows).hstack(over.raw(table, rows).select(*over.results())).sort("k")


EVERY = {**{n.replace(" ", "_"): a for n, a in {**ONE_ROW, **IN_ORDER}.items()}}
MERGEABLE = {n: a for n, a in EVERY.items() if n != "own_without_merge"}


def test_combine_and_store() -> None:
    """Panes 0, 1, 2 of a key as rows of a table; windows {0, 1}, {1, 2} and {2} share them."""
    over = accumulators(**MERGEABLE)
    frame = some_rows(90).with_columns((pl.int_range(pl.len()) // 30).cast(pl.String).alias("k"))
    table = new_table(over)
    merge(over, table, over.partial(frame, ["k"]))
    before = read(over, table)
    order = table.keys(table.live_rows())["k"].to_list()
    pane = {k: table.live_rows()[i] for i, k in enumerate(order)}
    picked = np.array([pane[k] for k in ("0", "1", "1", "2", "2")])
    raw = over.combine(table, picked, np.array([0, 0, 1, 1, 2]), 3)
    out = raw.select(*over.results())
    assert out.schema == over.output
    assert read(over, table).equals(before, null_equal=True), "combine wrote to the table"

    def whole(panes: list[str]) -> dict[str, Any]:
        alone = new_table(over)
        rows = frame.filter(pl.col("k").is_in(panes)).with_columns(pl.lit("all").alias("k"))
        merge(over, alone, over.partial(rows, ["k"]))
        return read(over, alone).row(0, named=True)

    for i, panes in enumerate([["0", "1"], ["1", "2"], ["2"]]):
        got, exact = out.row(i, named=True), whole(panes)
        for name in over.output:
            floats = name in ("sum_of_floats", "mean_of_floats", "variance", "std")
            same = repr(got[name]) == repr(exact[name])
            assert same or (floats and math.isclose(got[name], exact[name], rel_tol=1e-12)) or _nan(got[name]), name

    table.touch(picked[:1])
    over.store(table, picked[:1], raw[:1])
    stored = over.raw(table, picked[:1]).select(*over.results())
    assert stored.equals(out[:1], null_equal=True)
    assert read(over, table).filter(pl.col("k") != "0").equals(before.filter(pl.col("k") != "0"), null_equal=True)


def _nan(value: Any) -> bool:
    return isinstance(value, float) and value != value


def test_groups_without_rows_and_states_without_values() -> None:
    over = accumulators(**MERGEABLE)
    frame = some_rows(3).with_columns(pl.lit(None, t).alias(c) for c, t in SCHEMA.items() if c != "k")
    table = new_table(over)
    merge(over, table, over.partial(frame, ["k"]))
    alone = over.raw(table, table.live_rows()).select(*over.results()).row(0, named=True)
    combined = over.combine(table, table.live_rows(), np.array([1]), 3).select(*over.results())
    assert repr(combined.row(1, named=True)) == repr(alone)
    nothing = {**alone, "count": 0}
    assert repr(combined.row(0, named=True)) == repr(nothing) == repr(combined.row(2, named=True))
    lists = {"top": [], "collect": [], "heavy_hitters": []}
    zeros = dict.fromkeys(["count_of", "sum", "distinct", "approx_distinct", "own"], 0)
    assert alone == {**dict.fromkeys(alone), **lists, **zeros, "count": 3, "sum_of_floats": 0.0}


def test_states_survive_undo_and_restore() -> None:
    """What is changed in place is what the undo log must bring back."""
    over = accumulators(**EVERY)
    frame = some_rows(120, keys=3)
    table = new_table(over)
    merge(over, table, over.partial(frame[:60], ["k"]))
    fragment = table.seal(1)
    before = read(over, table)
    merge(over, table, over.partial(frame[60:], ["k"]))
    after = read(over, table)
    assert not after.equals(before, null_equal=True)
    table.seal(2)
    assert table.undo_to(1)
    assert read(over, table).equals(before, null_equal=True)
    restored = new_table(over)
    restored.load(fragment.frame())
    for one in (table, restored):
        merge(over, one, over.partial(frame[60:], ["k"]))
        assert read(over, one).equals(after, null_equal=True)


def test_the_fingerprint_changes_with_what_the_state_depends_on() -> None:
    def of(one: ps.Aggregate) -> Any:
        return accumulators(a=one).fingerprint()

    assert of(ps.top("x", 3)) != of(ps.top("x", 4))
    assert of(ps.quantile("x", 0.5)) != of(ps.quantile("x", 0.5, error=0.02))
    assert of(ps.quantile("x", 0.5)) == of(ps.quantile("x", 0.9))
    assert of(ps.approx_distinct("x")) != of(ps.approx_distinct("x", error=0.1))
    assert of(ps.first("s")) != of(ps.first("s", by="t"))
    assert of(ps.aggregator(Most(), "i")) != of(ps.aggregator(InOrder(), "i"))


def test_a_running_aggregate_describes_itself() -> None:
    operator = RunningAggregate("agg", ["k"], {"n": ps.count(), "p": ps.quantile("x", 0.9)}, SCHEMA)
    assert operator.describe() == "aggregate n=count(), p=quantile(x)"
    assert operator.apply(new_table(operator.accumulators), [], Tick(1)).frame.height == 0
    partial = operator.prepare(some_rows(9), True).frame
    partial = partial.with_columns(pl.Series(HASH, hash_columns(partial, ["k"])))
    assert (
        operator.apply(new_table(operator.accumulators), [Arrival(partial, "in", 0, True)], Tick(1)).frame.height == 1
    )


def test_an_operator_travels_to_the_workers() -> None:
    """Expressions with Python in them, codecs and users' classes are pickled with the plan."""
    operator = RunningAggregate("agg", ["k"], EVERY, SCHEMA)
    copy: RunningAggregate = pickle.loads(cloudpickle.dumps(operator))
    frames = []
    for one in (operator, copy):
        table = new_table(one.accumulators)
        merge(one.accumulators, table, one.prepare(some_rows(40, keys=2), True).frame)
        frames.append(read(one.accumulators, table))
    assert frames[0].equals(frames[1], null_equal=True)
    assert copy.fingerprint() == operator.fingerprint()


# -- sums of integers --------------------------------------------------------------------------------------------------

BIG = 2**63 - 1


def ints(values: list[int | None], dtype: Any = pl.Int64) -> pl.DataFrame:
    return pl.DataFrame({"k": ["a"] * len(values), "i": pl.Series(values, dtype=dtype)})


@pytest.mark.parametrize("instances", [1, 3])
@pytest.mark.parametrize("in_order", [False, True])
def test_a_sum_that_does_not_fit_is_the_nearest_that_does(instances: int, in_order: bool) -> None:
    def total(values: list[int | None], dtype: Any = pl.Int64) -> Any:
        over: dict[str, ps.Aggregate] = {"a": ps.sum("i"), "m": ps.mean("i")}
        got = aggregate(ints(values, dtype), instances=instances, **over, **({"l": ps.last("i")} if in_order else {}))
        whole = sum(v for v in values if v is not None)
        assert got["m"] == float(whole) / sum(v is not None for v in values)
        return got["a"]

    assert total([BIG, 1]) == BIG
    assert total([BIG, BIG, None, BIG]) == BIG
    assert total([-BIG, -2, -BIG]) == -(2**63)
    assert total([BIG, 1, -1]) == BIG
    assert total([BIG, BIG, -BIG, -5]) == BIG - 5
    assert total([-1, -1, None, 2**40, -3]) == 2**40 - 5
    assert total([2**64 - 1, 1], pl.UInt64) == BIG
    assert total([2**63 - 2, 1], pl.UInt64) == BIG
    assert total([-128, 127, -128], pl.Int8) == -129
    assert total([2**32 - 1, 2**32 - 1], pl.UInt32) == 2**33 - 2


# -- variance ----------------------------------------------------------------------------------------------------------


def test_variance_keeps_its_digits() -> None:
    """The square of the mean is 1e18 times the variance: a difference of sums of squares would have none left."""
    values = [1e9 + v for v in (4.0, 7.0, 13.0, 16.0)]
    frame = pl.DataFrame({"k": ["a"] * 4, "x": values})
    assert aggregate(frame, v=ps.variance("x"))["v"] == 30.0
    assert aggregate(frame, v=ps.variance("x", ddof=0))["v"] == 22.5
    assert aggregate(frame[:1], v=ps.variance("x"), w=ps.std("x", ddof=0)) == {"k": "a", "v": None, "w": 0.0}


def test_variance_of_many_keys_is_that_of_each_alone() -> None:
    """Many short runs go by numpy, the long ones by a loop: the same to the last bit."""
    r = random.Random(5)
    data = [{"k": f"k{min(int(r.expovariate(0.05)), 60)}", "x": r.uniform(-1e6, 1e6)} for _ in range(3000)]
    flow = ps.Flow("unit")
    flow.source("in", rows(pl.DataFrame(data))).key_by("k").aggregate("agg", v=ps.variance("x")).sink("o", ps.memory())
    got = dict(collect(flow).iter_rows())
    for key in {d["k"] for d in data}:
        values = [d["x"] for d in data if d["k"] == key]
        alone = aggregate(pl.DataFrame({"k": [key] * len(values), "x": values}), v=ps.variance("x"))["v"]
        assert got[key] == alone
        if len(values) > 1:
            assert math.isclose(alone, statistics.variance(values), rel_tol=1e-12)


# -- types -------------------------------------------------------------------------------------------------------------

TYPES: dict[str, tuple[pl.DataType, list[Any]]] = {
    "small": (pl.Int8(), [3, -1, 2]),
    "unsigned": (pl.UInt64(), [2**64 - 1, 0, 2**63]),
    "single": (pl.Float32(), [0.5, -1.5, 2.25]),
    "flag": (pl.Boolean(), [True, False, True]),
    "day": (pl.Date(), [date(2024, 2, 29), date(1969, 12, 31), date(2000, 1, 1)]),
    "hour": (pl.Time(), [time(3), time(1), time(2, 0, 0, 5)]),
    "span": (pl.Duration("ms"), [timedelta(seconds=3), timedelta(0), timedelta(days=-1)]),
    "zoned": (pl.Datetime("us", "UTC"), [datetime(2024, 1, d) for d in (3, 1, 2)]),
    "text": (pl.String(), ["b", "ä", ""]),
    "bytes": (pl.Binary(), [b"b", b"\xff", b""]),
    "enum": (pl.Enum(["low", "mid", "top"]), ["top", "low", "mid"]),
    "category": (pl.Categorical(), ["b", "a", "c"]),
}


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("in_order", [False, True])
def test_values_come_back_in_their_own_type(name: str, in_order: bool) -> None:
    dtype, values = TYPES[name]
    series = pl.Series("v", values, dtype=pl.Datetime("us") if name == "zoned" else None).cast(dtype)
    frame = pl.DataFrame({"k": ["a"] * 3, "n": [0, 1, 2]}).with_columns(series)
    over: dict[str, ps.Aggregate] = {
        "low": ps.min("v"),
        "high": ps.max("v"),
        "first": ps.first("v", by="n"),
        "last": ps.last("n", by="v"),
        "top": ps.top("v", 2),
        "kinds": ps.distinct("v"),
        "about": ps.approx_distinct("v"),
    }
    if in_order:
        over |= {"one": ps.first("v"), "all": ps.collect("v"), "often": ps.heavy_hitters("v", 1)}
    flow = ps.Flow("unit")
    stream = flow.source("in", rows(frame)).key_by("k").aggregate("agg", **over)
    stream.sink("out", ps.memory())
    out = collect(flow, instances=2)
    assert out.schema == stream.schema
    assert out["low"].dtype == out["first"].dtype == dtype and out["top"].dtype == pl.List(dtype)
    row = out.row(-1, named=True)
    given = series.to_list()
    kinds = len(set(given))
    assert (row["low"], row["high"]) == (min(given), max(given))
    assert row["first"] == given[0]
    assert row["top"] == sorted(given, reverse=True)[:2]
    assert (row["kinds"], row["about"]) == (kinds, kinds)
    if in_order:
        assert row["one"] == given[0]
        assert row["all"] == given
        assert row["often"] == [{"value": given[0] if kinds < 3 else min(given), "count": 4 - kinds, "error": 0}]


def test_nanoseconds_are_not_lost() -> None:
    ns = pl.Series("v", [1, 1_700_000_000_000_000_007], dtype=pl.Int64).cast(pl.Datetime("ns"))
    frame = pl.DataFrame({"k": ["a"] * 2}).with_columns(ns)
    flow = ps.Flow("unit")
    over = {"l": ps.last("v"), "c": ps.collect("v"), "q": ps.quantile("v", 1.0, error=0)}
    flow.source("in", rows(frame)).key_by("k").aggregate("agg", **over).sink("out", ps.memory())
    out = collect(flow)
    assert out["l"].to_physical().to_list() == out["q"].to_physical().to_list() == [1_700_000_000_000_000_007]
    assert out["c"].explode().to_physical().to_list() == [1, 1_700_000_000_000_000_007]


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "says"),
    [
        (ps.sum("s"), "needs numbers"),
        (ps.mean("t"), "needs numbers"),
        (ps.variance("s"), "needs numbers"),
        (ps.quantile("s", 0.5), "needs numbers"),
        (ps.quantile("t", 0.5), "needs numbers"),
        (ps.min("l"), "cannot compare"),
        (ps.max("d"), "cannot compare"),
        (ps.first("l"), "cannot keep values of type List"),
        (ps.last("i", by="l"), "cannot keep values of type List"),
        (ps.collect("d"), "cannot keep"),
        (ps.top("l", 2), "cannot keep"),
        (ps.distinct("l"), "cannot keep"),
        (ps.approx_distinct("l"), "cannot tell"),
        (ps.heavy_hitters("l", 2), "cannot keep"),
        (ps.sum("nope"), "cannot be resolved"),
        (ps.first("i", by="nope"), "cannot be resolved"),
        (ps.aggregator(Most(), ["i", "nope"]), "cannot be resolved"),
    ],
)
def test_types_that_cannot_be_aggregated(one: ps.Aggregate, says: str) -> None:
    with pytest.raises(FlowError, match=says) as caught:
        accumulators(a=one)
    assert "operator 'agg'" in str(caught.value) and caught.value.remedy


@pytest.mark.parametrize(
    "make",
    [
        lambda: ps.top("x", 0),
        lambda: ps.collect("x", limit=0),
        lambda: ps.variance("x", ddof=-1),
        lambda: ps.std("x", ddof=0.5),  # type: ignore[arg-type]
        lambda: ps.quantile("x", 99),
        lambda: ps.quantile("x", []),
        lambda: ps.quantile("x", 0.5, error=-0.1),
        lambda: ps.approx_distinct("x", error=0),
        lambda: ps.heavy_hitters("x", 10, capacity=5),
        lambda: ps.aggregator(Most(), []),
    ],
)
def test_options_that_make_no_sense(make: Any) -> None:
    with pytest.raises(FlowError):
        make()


# -- sketches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 30, 150, 193, 380, 386, 900, 5000])
def test_an_estimate_depends_on_the_set_of_values_alone(count: int) -> None:
    sketch = ApproxDistinct("a", pl.col("x"), 0.02)
    hashes = hash_columns(pl.DataFrame({"x": range(count)}), ["x"]).view(np.int64).tolist()
    estimates = set()
    for seed in range(6):
        r = random.Random(seed)
        values = [*hashes, *r.choices(hashes, k=count // 2)]
        r.shuffle(values)
        ends = [*sorted(r.sample(range(len(values)), min(len(values), 5))), len(values)]
        state = sketch.fresh()
        for begin, end in zip([0, *ends], ends, strict=False):
            part = values[begin:end]
            match r.randrange(3):
                case 0:
                    state = sketch.extend(state, part)
                case 1:
                    state = sketch.absorb(state, [sketch.codec.encode(sketch.extend(sketch.fresh(), part))])
                case 2:
                    state = sketch.join(sketch.copy(state), sketch.extend(sketch.fresh(), part))
        estimates.add(sketch.results([state])[0])
    assert len(estimates) == 1
    assert abs(estimates.pop() - count) <= 0.05 * count


def test_every_value_is_within_the_error_of_its_bucket() -> None:
    r = random.Random(3)
    for error in (0.3, 0.01, 1e-4, 1e-5):
        buckets = LogBuckets(error)
        values = [r.choice([-1, 1]) * 10 ** r.uniform(-300, 300) for _ in range(2000)]
        values += [5e-324, 1e-310, 1.0, 2.0, math.nextafter(2.0, 0), math.nextafter(1.0, 2), 1.7976931348623157e308]
        places = buckets.of(np.array(values))
        for value, place in zip(values, places.tolist(), strict=True):
            if abs(value) > 1e-307:  # below, floats themselves are further apart
                assert abs(buckets.middle(place) - value) <= error * abs(value), (value, error)
        order = np.argsort(values)
        assert (np.diff(places[order]) >= 0).all()
    special = LogBuckets(0.01).of(np.array([0.0, -0.0, math.inf, -math.inf]))
    assert [LogBuckets(0.01).middle(b) for b in special.tolist()] == [0.0, 0.0, math.inf, -math.inf]


def test_ordered_bits_are_in_order() -> None:
    values = np.array([-math.inf, -1e300, -1.0, -5e-324, 0.0, 5e-324, 1.0, math.inf, math.nan])
    assert (np.diff(ordered_bits(values)) > 0).all()


def test_heavy_hitters_keep_their_bounds() -> None:
    r = random.Random(4)
    values = [int(r.paretovariate(0.8)) for _ in range(20_000)]
    true = Counter(values)
    summary = Summary()
    for n, value in enumerate(values):
        if n % 3000 == 0:
            summary = summary.copy()  # without its heap, as after a restore
        summary.offer(value, 100)
    assert len(summary.counts) == 100
    for value, (count, error) in summary.counts.items():
        assert count - error <= true[value] <= count
        assert error <= len(values) / 100
    assert {v for v, n in true.items() if n > len(values) / 100} <= set(summary.counts)


def test_joined_heavy_hitters_keep_their_bounds() -> None:
    r = random.Random(4)
    parts = [[int(r.paretovariate(0.8)) + shift for _ in range(5000)] for shift in (0, 0, 7)]
    true = Counter(v for p in parts for v in p)
    whole = Summary()
    for part in parts:
        one = Summary()
        for value in part:
            one.offer(value, 60)
        whole.join(one, 60)
    assert len(whole.counts) == 60
    for value, (count, error) in whole.counts.items():
        assert count - error <= true[value] <= count


# -- aggregates of one's own -------------------------------------------------------------------------------------------


@dataclass
class Point:
    n: int
    name: str


class Named(ps.Aggregator[Point, float | None]):
    def create(self) -> Point:
        return Point(0, "")

    def add(self, state: Point, value: Any) -> Point:
        state.n += value.i or 0
        state.name = value.s or state.name
        return state

    def result(self, state: Point) -> float | None:
        return state.n / 2 if state.name else None


def test_several_columns_and_a_dataclass() -> None:
    frame = pl.DataFrame({"k": ["a"] * 3, "i": [1, None, 4], "s": [None, "x", None]})
    assert aggregate(frame, a=ps.aggregator(Named(), ["i", "s"])) == {"k": "a", "a": 2.5}
    assert aggregate(frame[:1], a=ps.aggregator(Named(), ["i", "s"])) == {"k": "a", "a": None}
    doubled = ps.aggregator(Most(), pl.col("i") * 2)
    assert aggregate(frame, a=doubled)["a"] == 8


def test_a_batch_over_several_columns_is_a_frame() -> None:
    class Weighted(ps.Aggregator[int, int]):
        def create(self) -> int:
            return 0

        def add_batch(self, state: int, values: pl.DataFrame) -> int:
            return state + int((values["i"] * values["w"]).sum())

        def merge(self, a: int, b: int) -> int:
            return a + b

        def result(self, state: int) -> int:
            return state

    frame = pl.DataFrame({"k": ["a"] * 4, "i": [1, 2, None, 4], "w": [1, 10, 100, 1000]})
    assert aggregate(frame, instances=2, a=ps.aggregator(Weighted(), ["i", "w"]))["a"] == 4021


def own(**methods: Any) -> ps.Aggregator[Any, Any]:
    """Most, with some methods replaced; None takes one away."""
    base: dict[str, Any] = {
        "create": Most.create,
        "add": Most.add,
        "merge": Most.merge,
        "result": Most.result,
        **methods,
    }
    made: Any = type("Own", (ps.Aggregator,), {k: v for k, v in base.items() if v is not None})
    return made()


def unannotated(self: Any) -> Any:
    return 0


def creates_text(self: Any) -> int:
    return "zero"  # type: ignore[return-value]


def creates_either(self: Any) -> list[int] | set[int]:
    return []


def fails(self: Any, *_: Any) -> Any:
    raise ZeroDivisionError("oh")


del unannotated.__annotations__["return"]


@pytest.mark.parametrize(
    ("methods", "says"),
    [
        ({"create": None}, "does not define create"),
        ({"result": None}, "does not define result"),
        ({"add": None}, "neither add"),
        ({"create": unannotated}, "does not say what its state is"),
        ({"create": creates_text}, "cannot create a state of type int"),
        ({"create": creates_either}, "cannot be stored"),
        ({"create": fails}, "does not say|cannot create"),
        ({"result": unannotated}, "does not say what type its result has"),
    ],
)
def test_definitions_that_are_refused(methods: dict[str, Any], says: str) -> None:
    with pytest.raises(FlowError, match=says) as caught:
        accumulators(a=ps.aggregator(own(**methods), "i"))
    assert "operator 'agg'" in str(caught.value) and caught.value.remedy


def test_what_is_no_aggregator_is_refused() -> None:
    with pytest.raises(FlowError, match=r"not a ps\.Aggregator"):
        accumulators(a=ps.aggregator(Most, "i"))  # type: ignore[arg-type]
    with pytest.raises(FlowError, match="no type"):
        accumulators(a=ps.aggregator(Most(), "i", dtype="whole"))
    with pytest.raises(FlowError, match="not an aggregate"):
        accumulators(a=Most())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("methods", "says"),
    [
        ({"add": fails}, r"add\(\) of Own \('a'\) raised ZeroDivisionError: oh"),
        ({"merge": fails}, r"merge\(\) of Own"),
        ({"result": fails, "dtype": pl.Int64}, r"result\(\) of Own"),
        ({"add": lambda self, state, value: None}, "returned None, not a state"),
        ({"add": lambda self, state, value: "text"}, "state that is not int"),
        ({"add": lambda self, state, value: 1.5, "merge": None, "result": Truncated.result}, "state that is not int"),
        ({"result": lambda self, state: "text", "dtype": pl.Int64}, "returned 'text', which is not Int64"),
    ],
)
def test_what_a_users_code_does_wrong_is_named(methods: dict[str, Any], says: str) -> None:
    dtype = methods.pop("dtype", None)
    frame = pl.DataFrame({"k": ["a"] * 40, "i": range(40)})
    flow = ps.Flow("unit")
    one = ps.aggregator(own(**methods), "i", dtype=dtype)
    flow.source("in", rows(frame)).key_by("k").aggregate("agg", a=one).sink("out", ps.memory())
    with pytest.raises(UserCodeError, match=says) as caught:
        collect(flow, instances=2, epoch_rows=10)
    assert str(caught.value).startswith("operator 'agg'")
    assert caught.value.evidence["operator"] == "agg" and caught.value.remedy
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_overlapping_windows_need_merge() -> None:
    keyed = ps.Flow("unit").source("in", rows(some_rows(3))).key_by("k")
    keyed.window(ps.tumbling("5s", on="t")).aggregate("fine", a=ps.aggregator(InOrder(), "s"))
    with pytest.raises(FlowError, match=r"without merge\(\)"):
        keyed.window(ps.hopping("5s", every="1s", on="t")).aggregate("agg", a=ps.aggregator(InOrder(), "s"))
