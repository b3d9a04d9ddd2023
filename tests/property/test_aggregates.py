"""Every aggregate against plain Python, over running and windowed state: no cut, parallelism or restore may show."""

from __future__ import annotations

import math
import random
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import polars as pl
import pytest
from hypothesis import given

import penstock as ps
from penstock import testing
from penstock.connectors.sinks import MemorySink
from penstock.engines.job import start
from penstock.errors import SourceError
from tests.property.cuts import COUNTS, SEEDS, SPECIAL, Cut, examples, maybe, plain, plain_key, run, some_cut

Row = dict[str, Any]
START = datetime(2024, 1, 1)
WINDOW_S = 20


def deep(value: Any) -> Any:
    """``plain``, inside lists and structs too."""
    if isinstance(value, list):
        return [deep(v) for v in value]
    if isinstance(value, dict):
        return {k: deep(v) for k, v in value.items()}
    return plain(value)


@dataclass(frozen=True)
class Near:
    """Equal to what is within a relative error."""

    value: float
    error: float

    def __eq__(self, other: object) -> bool:
        got = float(other) if isinstance(other, str) else other
        if not isinstance(got, float):
            return False
        return got == self.value or abs(got - self.value) <= self.error * abs(self.value)


# -- aggregates of a user's own ----------------------------------------------------------------------------------------


class Longest(ps.Aggregator[str, str]):
    """With merge: aggregated before the exchange."""

    def create(self) -> str:
        return ""

    def add(self, state: str, value: str | None) -> str:
        return self.merge(state, value or "")

    def merge(self, a: str, b: str) -> str:
        return max(a, b, key=lambda v: (len(v), v))

    def result(self, state: str) -> str:
        return state


class Tail(ps.Aggregator[list[str], str]):
    """Without merge: depends on order. Changes its state in place."""

    def create(self) -> list[str]:
        return []

    def add(self, state: list[str], value: Any) -> list[str]:
        state.append(f"{value.s}/{value.i}")
        del state[:-3]
        return state

    def result(self, state: list[str]) -> str:
        return ",".join(state)


class Spread(ps.Aggregator[dict[str, list[int]], int]):
    """Batches and a nested state that merge() takes over in part: states must not be shared."""

    def create(self) -> dict[str, list[int]]:
        return {}

    def add_batch(self, state: dict[str, list[int]], values: pl.Series) -> dict[str, list[int]]:
        for v in values.drop_nulls():
            state.setdefault(str(v % 3), []).append(v)
        return state

    def merge(self, a: dict[str, list[int]], b: dict[str, list[int]]) -> dict[str, list[int]]:
        for k, v in b.items():
            if k in a:
                a[k].extend(v)
            else:
                a[k] = v
        return a

    def result(self, state: dict[str, list[int]]) -> int:
        return sum(len(v) * (int(k) + 1) + sum(v) % 7 for k, v in state.items())


# -- the oracle --------------------------------------------------------------------------------------------------------


def some(rows: Sequence[Row], column: str) -> list[Any]:
    return [r[column] for r in rows if r[column] is not None]


def real(rows: Sequence[Row], column: str) -> list[Any]:
    """Values that can be compared, with one zero."""
    return [v + 0.0 if isinstance(v, float) else v for v in some(rows, column) if v == v]


def welford(rows: Sequence[Row], column: str, ddof: int) -> float | None:
    n, mean, squares = 0, 0.0, 0.0
    for x in map(float, some(rows, column)):
        n += 1
        distance = x - mean
        mean += distance / n
        squares += distance * (x - mean)
    return squares / (n - ddof) if n > ddof else None


def root(value: float | None) -> float | None:
    return None if value is None else math.sqrt(value)


def picked(rows: Sequence[Row], column: str, by: str, last: bool) -> Any:
    """NaN as a value loses; as an order it does not count."""
    pairs = [
        (r[by], r[column] + 0.0 if isinstance(r[column], float) else r[column])
        for r in rows
        if r[column] is not None and r[by] is not None and r[by] == r[by]
    ]
    if not pairs:
        return None
    best = (max if last else min)(w for w, _ in pairs)
    among = [v for w, v in pairs if w == best]
    numbers = [v for v in among if v == v]
    return (max if last else min)(numbers) if numbers else math.nan


def at(values: list[Any], q: float) -> Any:
    return sorted(values)[math.floor(q * (len(values) - 1))] if values else None


def value_order(value: Any) -> tuple[Any, ...]:
    return (1, 0) if value == "nan" else (0, float(value) if isinstance(value, str) else value)


def frequent(rows: Sequence[Row], column: str, k: int) -> list[Any]:
    counts = Counter(plain_key(v) for v in some(rows, column))
    ranked = sorted(counts.items(), key=lambda item: (-item[1], value_order(item[0])))
    return [{"value": v, "count": c, "error": 0} for v, c in ranked[:k]]


def space_saving(rows: Sequence[Row], column: str, k: int, capacity: int) -> list[Any]:
    counts: dict[Any, tuple[int, int]] = {}
    for v in some(rows, column):
        if v in counts:
            counts[v] = (counts[v][0] + 1, counts[v][1])
        elif len(counts) < capacity:
            counts[v] = (1, 0)
        else:
            gone = min(counts, key=lambda w: (counts[w][0], w))
            least = counts.pop(gone)[0]
            counts[v] = (least + 1, least)
    ranked = sorted(counts.items(), key=lambda item: (-item[1][0], item[0]))
    return [{"value": v, "count": c, "error": e} for v, (c, e) in ranked[:k]]


def spread(rows: Sequence[Row]) -> int:
    groups: dict[int, list[int]] = defaultdict(list)
    for v in some(rows, "i"):
        groups[v % 3].append(v)
    return sum(len(v) * (k + 1) + sum(v) % 7 for k, v in groups.items())


def longest(rows: Sequence[Row]) -> str:
    return max(["", *some(rows, "s")], key=lambda v: (len(v), v))


def near(value: Any, error: float) -> Any:
    return None if value is None else Near(float(value), error)


Oracle = Callable[[list[Row]], Any]
QS = [0.0, 0.25, 0.9, 1.0]

ASSOCIATIVE: dict[str, tuple[Callable[[], ps.Aggregate], Oracle]] = {
    "n": (ps.count, len),
    "seen": (lambda: ps.count("x"), lambda rows: len(some(rows, "x"))),
    "whole": (lambda: ps.sum("i"), lambda rows: sum(some(rows, "i"))),
    "middle": (lambda: ps.mean("i"), lambda rows: sum(v := some(rows, "i")) / len(v) if some(rows, "i") else None),
    "low": (lambda: ps.min("x"), lambda rows: min(real(rows, "x"), default=None)),
    "high": (lambda: ps.max("s"), lambda rows: max(some(rows, "s"), default=None)),
    "first_by": (lambda: ps.first("s", by="x"), lambda rows: picked(rows, "s", "x", False)),
    "last_by": (lambda: ps.last("x", by="s"), lambda rows: picked(rows, "x", "s", True)),
    "earliest": (lambda: ps.first("t", by="i"), lambda rows: picked(rows, "t", "i", False)),
    "best": (lambda: ps.top("x", 3), lambda rows: sorted(real(rows, "x"), reverse=True)[:3]),
    "words": (lambda: ps.top("s", 2), lambda rows: sorted(some(rows, "s"), reverse=True)[:2]),
    "kinds": (lambda: ps.distinct("x"), lambda rows: len({plain_key(v) for v in some(rows, "x")})),
    "texts": (lambda: ps.distinct("s"), lambda rows: len(set(some(rows, "s")))),
    "about": (lambda: ps.approx_distinct("x"), lambda rows: len({plain_key(v) for v in some(rows, "x")})),
    "exact": (
        lambda: ps.quantile("x", QS, error=0),
        lambda rows: [at(v, q) for q in QS] if (v := real(rows, "x")) else None,
    ),
    "median": (lambda: ps.quantile("i", 0.5, error=0), lambda rows: at(some(rows, "i"), 0.5)),
    "rough": (lambda: ps.quantile("x", 0.75, error=0.01), lambda rows: near(at(real(rows, "x"), 0.75), 0.01)),
    "longest": (lambda: ps.aggregator(Longest(), "s"), longest),
    "spread": (lambda: ps.aggregator(Spread(), "i"), spread),
}
IN_ORDER: dict[str, tuple[Callable[[], ps.Aggregate], Oracle]] = {
    "total": (lambda: ps.sum("x"), lambda rows: _fold(some(rows, "x"))),
    "wide": (lambda: ps.variance("x"), lambda rows: welford(rows, "x", 1)),
    "deviation": (lambda: ps.std("i", ddof=0), lambda rows: root(welford(rows, "i", 0))),
    "first": (lambda: ps.first("x"), lambda rows: next(iter(some(rows, "x")), None)),
    "last": (lambda: ps.last("s"), lambda rows: next(reversed(some(rows, "s")), None)),
    "all": (lambda: ps.collect("x"), lambda rows: some(rows, "x")),
    "some": (lambda: ps.collect("t", limit=3), lambda rows: some(rows, "t")[:3]),
    "often": (lambda: ps.heavy_hitters("x", 3), lambda rows: frequent(rows, "x", 3)),
    "crowded": (lambda: ps.heavy_hitters("i", 2, capacity=3), lambda rows: space_saving(rows, "i", 2, 3)),
    "tail": (
        lambda: ps.aggregator(Tail(), ["s", "i"], dtype=pl.String),
        lambda rows: ",".join(f"{r['s']}/{r['i']}" for r in rows[-3:]),
    ),
}


def _fold(values: Sequence[float]) -> float:
    total = 0.0
    for v in values:
        total += v
    return total


EVERY = {**ASSOCIATIVE, **IN_ORDER}


# -- input -------------------------------------------------------------------------------------------------------------


def some_input(r: random.Random, count: int) -> pl.DataFrame:
    rows = [
        {
            "k": r.choice(["a", "b"]) if r.random() < 0.9 else None,
            "x": maybe(r, r.choice(SPECIAL) if r.random() < 0.7 else r.uniform(-1e9, 1e9)),
            "i": maybe(r, r.randint(-4, 4) if r.random() < 0.7 else r.randint(-(2**40), 2**40)),
            "s": maybe(r, r.choice(["x", "yy", "", "ß", "z"])),
            "t": START + timedelta(seconds=n * 2 + r.randint(0, 9)),
        }
        for n in range(count)
    ]
    schema = {"k": pl.String(), "x": pl.Float64(), "i": pl.Int64(), "s": pl.String(), "t": pl.Datetime("us")}
    return pl.DataFrame(rows, schema=schema)


def choose(r: random.Random, among: Sequence[str]) -> list[str]:
    """A few aggregates; half of the time only such as are reduced before the exchange."""
    pool = [n for n in among if n in ASSOCIATIVE] if r.random() < 0.5 else list(among)
    return r.sample(pool, min(len(pool), r.randint(1, 8)))


def flow(source: ps.Source, sink: ps.Sink, names: Sequence[str], window: Any) -> ps.Flow:
    out = ps.Flow("aggregates")
    keyed = out.source("in", source).key_by("k")
    over = {n: EVERY[n][0]() for n in names}
    stream = keyed.aggregate("agg", **over) if window is None else keyed.window(window).aggregate("agg", **over)
    stream.sink("out", sink)
    return out


def found(sinks: Sequence[MemorySink], names: Sequence[str], windowed: bool) -> dict[Any, list[Any]]:
    """The last result of each key, or each window's, which comes once."""
    out: dict[Any, list[Any]] = {}
    for sink in sinks:
        for epoch in sorted(sink.epochs):
            for row in sink.epochs[epoch].iter_rows(named=True):
                identity = (row["k"], row["window_start"]) if windowed else row["k"]
                assert not windowed or identity not in out, f"{identity} came twice"
                out[identity] = [deep(row[n]) for n in names]
    return out


def expected(frame: pl.DataFrame, names: Sequence[str], windowed: bool) -> dict[Any, list[Any]]:
    groups: dict[Any, list[Row]] = defaultdict(list)
    for row in frame.iter_rows(named=True):
        start = START + (row["t"] - START) // timedelta(seconds=WINDOW_S) * timedelta(seconds=WINDOW_S)
        groups[(row["k"], start) if windowed else row["k"]].append(row)
    return {g: [deep(EVERY[n][1](rows)) for n in names] for g, rows in groups.items()}


# -- properties --------------------------------------------------------------------------------------------------------


@given(seed=SEEDS, count=COUNTS)
@examples(25)
def test_running(seed: int, count: int) -> None:
    r = random.Random(seed)
    frame, names, sink = some_input(r, count), choose(r, list(EVERY)), MemorySink()
    run(lambda source: flow(source, sink, names, None), frame, some_cut(r, count), ["agg", "in"])
    assert found([sink], names, False) == expected(frame, names, False)


@given(seed=SEEDS, count=COUNTS)
@examples(25)
def test_tumbling(seed: int, count: int) -> None:
    r = random.Random(seed)
    frame, names, sink = some_input(r, count), choose(r, list(EVERY)), MemorySink()
    window = ps.tumbling(timedelta(seconds=WINDOW_S), on="t", lateness="1h")
    run(lambda source: flow(source, sink, names, window), frame, some_cut(r, count), ["agg", "in"])
    assert found([sink], names, True) == expected(frame, names, True)


@given(seed=SEEDS, count=COUNTS)
@examples(25)
def test_hopping_windows_of_several_panes(seed: int, count: int) -> None:
    """Against an uncut run, to the last bit; what does not depend on order also against the oracle."""
    r = random.Random(seed)
    frame = some_input(r, count)
    names = choose(r, [n for n in EVERY if n != "tail"])
    window = ps.hopping(timedelta(seconds=WINDOW_S), every=timedelta(seconds=5), on="t", lateness="1h")
    cuts = [Cut((count,), 1, 1, 3600.0, 1, ()), some_cut(r, count)]
    results = []
    for cut in cuts:
        sink = MemorySink()
        run(lambda source, sink=sink: flow(source, sink, names, window), frame, cut, ["agg", "in"])  # type: ignore[misc]
        results.append(found([sink], names, True))
    assert results[0] == results[1]
    whole = expected(frame, names, True)
    for identity, values in whole.items():
        for name, value, got in zip(names, values, results[0][identity], strict=True):
            if name in ASSOCIATIVE:
                assert value == got, name


@given(seed=SEEDS, count=COUNTS)
@examples(20)
def test_a_restore_in_the_middle(seed: int, count: int) -> None:
    r = random.Random(seed)
    frame, names = some_input(r, count), choose(r, list(EVERY))
    windowed = r.random() < 0.5
    window = ps.tumbling(timedelta(seconds=WINDOW_S), on="t", lateness="1h") if windowed else None
    source = testing.CrashingSource(testing.rows(frame, epochs=some_cut(r, count).epochs), r.randint(0, count - 1))
    sinks = [MemorySink(), MemorySink()]
    with tempfile.TemporaryDirectory() as directory:
        config = ps.Config(instances=r.randint(1, 3), slices=8, checkpoint=directory, checkpoint_interval_s=0.0)
        first = start(flow(source, sinks[0], names, window), engine="local", config=config)
        try:
            first.wait(120)
        except SourceError:
            assert start(flow(source, sinks[1], names, window), engine="local", config=config).wait(120)
    assert found(sinks, names, windowed) == expected(frame, names, windowed)


def test_the_oracle_sees_a_difference() -> None:
    """The comparison itself: one row less, and it fails."""
    frame, sink = some_input(random.Random(1), 30), MemorySink()
    names = list(EVERY)
    run(lambda source: flow(source, sink, names, None), frame, Cut((30,), 1, 1, 3600.0, 1, ()), ["agg"])
    assert found([sink], names, False) == expected(frame, names, False)
    with pytest.raises(AssertionError):
        assert found([sink], names, False) == expected(frame[:-1], names, False)
