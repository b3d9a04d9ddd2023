"""Two and three keyed stages against a few lines of Python that know nothing of epochs, containers or frames.

The reference is the one that ``docs/decisions/0019`` tells: one row after the other through all stages.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import polars as pl
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock import testing
from tests.property.cuts import examples

START = datetime(2026, 1, 1)
SIZES = [1, 2, 3, 4, 6, 8, 10, 12, 30]
"""Windows begin at multiples of these since 1970, and a day is one."""
SCHEMA = {"t": pl.Int64, "at": pl.Datetime("us"), "k": pl.String, "g": pl.Int64, "x": pl.Float64}
Row = tuple[int, str, int, float]
"""Seconds, key, group, number."""


def some_rows(r: random.Random, count: int) -> list[Row]:
    now, rows = 0, []
    for _ in range(count):
        now += r.choice([0, 1, 1, 2, 9])
        x = r.choice([0.1, 1e16, -1e16, r.uniform(-1, 1)])
        rows.append((max(0, now - r.randrange(6)), r.choice("abc"), r.randrange(3), x))
    return rows


def source(rows: list[Row]) -> ps.Source:
    columns = [(t, START + timedelta(seconds=t), k, g, x) for t, k, g, x in rows]
    return testing.rows(pl.DataFrame(columns, schema=SCHEMA, orient="row"))


class Mix(ps.Operator):
    """None, one or two rows for each, which show all that came before."""

    def on_event(self, key: Any, event: Any, n: ps.Value[int], sum: ps.Value[float], emit: ps.Emit) -> None:
        n.set(n.get(0) + 1)
        sum.set(sum.get(0.0) / 2 + event.x)
        for i in range(n.get(0) % 3):
            emit(event.t + i, event.at + timedelta(seconds=i), event.k, (event.g + n.get(0)) % 3, sum.get(0.0))


def mix(rows: Iterator[Row], by: int) -> Iterator[Row]:
    """The same, one by one. ``by``: which part of a row is the key."""
    n: Counter[Any] = Counter()
    total: defaultdict[Any, float] = defaultdict(float)
    for row in rows:
        t, k, g, x = row
        key = row[by]
        n[key] += 1
        total[key] = total[key] / 2 + x
        for i in range(n[key] % 3):
            yield t + i, k, (g + n[key]) % 3, total[key]


class Quiet(ps.Operator):
    """Passes rows on, and tells by a timer when a key has been quiet for three seconds."""

    def on_event(self, key: Any, event: Any, n: ps.Value[int], timers: ps.Timers, time: ps.Time, emit: ps.Emit) -> None:
        n.set(n.get(0) + 1)
        emit(event.t, event.at, event.k, event.g, event.x)
        at = event.at + timedelta(seconds=3)
        if time.watermark is None or at >= time.watermark:
            timers.set(at, "quiet")

    def on_timer(self, key: Any, at: datetime, n: ps.Value[int], emit: ps.Emit) -> None:
        emit(int((at - START).total_seconds()), at, key, n.get(0) % 3, 0.25)


def quiet(rows: list[Row], lateness: int) -> list[tuple[Row, int]]:
    """Rows as they come out, each with the watermark that it stands for. Only one key is due at a time in this."""
    out: list[tuple[Row, int]] = []
    timers: dict[str, int] = {}
    n: Counter[str] = Counter()

    def fire(until: float) -> None:
        for at, key in sorted((at, key) for key, at in timers.items() if at <= until):
            del timers[key]
            out.append(((at, key, n[key] % 3, 0.25), at))

    high = -(10**9)
    for t, k, g, x in rows:
        high = max(high, t)
        mark = high - lateness
        fire(mark)
        n[k] += 1
        out.append(((t, k, g, x), mark))
        if t + 3 >= mark:
            timers[k] = t + 3
        if timers.get(k) == mark:
            del timers[k]
            out.append(((mark, k, n[k] % 3, 0.25), mark))
    fire(10**9)
    return out


def windows(rows: list[tuple[Row, int]], size: int) -> tuple[dict[Any, list[float]], int]:
    """Numbers of each group and window, in order; and how many rows are late. Rows come with their watermarks."""
    found: defaultdict[Any, list[float]] = defaultdict(list)
    late = 0
    for (t, _, g, x), mark in rows:
        end = t // size * size + size
        if end <= mark:
            late += 1
        else:
            found[g, end].append(x)
    return found, late


def total(numbers: list[float]) -> float:
    out = 0.0
    for x in numbers:
        out += x
    return out


def run(flow: ps.Flow, r: random.Random) -> testing.Run:
    return testing.run(flow, epoch_rows=r.choice([1, 3, 10, 100]), instances=r.randint(1, 4))


def windowed(stream: ps.Stream, size: int, lateness: int) -> None:
    window = ps.tumbling(f"{size}s", on="at", lateness=f"{lateness}s")
    stream.key_by("g").window(window).aggregate("w", all=ps.collect("x"), sum=ps.sum("x")).sink("out", ps.memory())


def compare(found: testing.Run, expected: dict[Any, list[float]], late: int) -> None:
    out = found.sinks["out"]
    ends = [int((end - START).total_seconds()) for end in out["window_end"]]
    got = dict(zip(zip(out["g"], ends, strict=True), zip(out["all"].to_list(), out["sum"], strict=True), strict=True))
    assert {k: (list(map(repr, v)), repr(s)) for k, (v, s) in got.items()} == {
        k: (list(map(repr, v)), repr(total(v))) for k, v in expected.items()
    }
    assert found.late.get("w", 0) == late


@given(st.integers(0, 10**9), st.integers(1, 40))
@examples(8)
def test_two_operators_and_windows_behind_them(seed: int, count: int) -> None:
    r = random.Random(seed)
    rows, size, lateness = some_rows(r, count), r.choice(SIZES), r.choice([0, 2])
    flow = ps.Flow("three")
    first = flow.source("in", source(rows)).key_by("k").process("first", Mix(), schema=SCHEMA)
    windowed(first.key_by("g").process("second", Mix(), schema=SCHEMA), size, lateness)
    made = list(mix(mix(iter(rows), 1), 2))
    high, marked = -(10**9), []
    for row in made:
        high = max(high, row[0])
        marked.append((row, high - lateness))
    compare(run(flow, r), *windows(marked, size))


@given(st.integers(0, 10**9), st.integers(1, 40))
@examples(8)
def test_timers_and_windows_behind_them(seed: int, count: int) -> None:
    r = random.Random(seed)
    rows = [(t * 4 + "abc".index(k), k, g, x) for t, k, g, x in some_rows(r, count)]  # no two timers at one time
    size, first_late, then = r.choice(SIZES), r.choice([0, 5, 20]), r.choice([0, 3])
    flow = ps.Flow("timers")
    keyed = flow.source("in", source(rows)).key_by("k")
    told = keyed.process("quiet", Quiet(), schema=SCHEMA, on="at", lateness=f"{first_late}s")
    windowed(told, size, then)
    compare_timers(run(flow, r), rows, size, first_late, then)


def compare_timers(found: testing.Run, rows: list[Row], size: int, first_late: int, then: int) -> None:
    made = quiet(rows, first_late)
    marks = []
    for (t, k, g, x), mark in made:
        by_timer = x == 0.25
        marks.append(((t, k, g, x), mark - then - (1e-6 if by_timer else 0)))
    compare(found, *windows(marks, size))  # type: ignore[arg-type]


@given(st.integers(0, 10**9), st.integers(1, 30), st.integers(1, 30))
@examples(8)
def test_two_sources_come_by_the_time_that_each_had_reached(seed: int, left: int, right: int) -> None:
    r = random.Random(seed)
    both = [some_rows(r, left), some_rows(r, right)]
    flow = ps.Flow("two")
    one, two = (flow.source(name, source(rows)) for name, rows in zip(("one", "two"), both, strict=True))
    united = one.union("both", two, by="at").select("plain", "t", "at", "k", "g", "x")
    united.key_by("k").process("mix", Mix(), schema=SCHEMA).sink("out", ps.memory())
    placed = []
    for number, rows in enumerate(both):
        high = -(10**9)
        for i, row in enumerate(rows):
            high = max(high, row[0])
            placed.append((high, number, i, row))
    expected = list(mix((row for *_, row in sorted(placed, key=lambda p: p[:3])), 1))
    found = [(t, k, g, x) for t, _, k, g, x in run(flow, r).sinks["out"].iter_rows()]
    assert Counter(map(repr, found)) == Counter(map(repr, expected))
