"""Sessions against an oracle that takes rows one by one: no cut of the input and no parallelism may show."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from datetime import datetime, timedelta
from typing import Any

import polars as pl
import pytest
from hypothesis import given

import penstock as ps
from penstock import testing
from penstock.connectors.sinks import MemorySink
from tests.property.cuts import COUNTS, SEEDS, SPECIAL, examples, maybe, plain, run, run_in_two, some_cut

START = datetime(1970, 1, 1)
IN_ORDER = {"n": ps.count(), "total": ps.sum("x"), "mean": ps.mean("x"), "low": ps.min("x"), "first": ps.min("s")}
ASSOCIATIVE = {"n": ps.count(), "whole": ps.sum("i"), "low": ps.min("x"), "high": ps.max("i"), "first": ps.min("s")}


def micro(us: int) -> timedelta:
    return timedelta(microseconds=us)


class Session:
    """One session of the oracle. Sums grow as told: row by row, and two sums become one when two sessions do."""

    def __init__(self) -> None:
        self.first, self.last, self.total = math.inf, -math.inf, 0.0
        self.rows: list[dict[str, Any]] = []

    def add(self, t: int, row: dict[str, Any]) -> None:
        self.first, self.last = min(self.first, t), max(self.last, t)
        self.total += row["x"] if row["x"] is not None else 0.0
        self.rows.append(row)

    def absorb(self, other: Session) -> None:
        self.first, self.last = min(self.first, other.first), max(self.last, other.last)
        self.total += other.total
        self.rows += other.rows

    def values(self, gap: int) -> dict[str, Any]:
        xs = [r["x"] for r in self.rows if r["x"] is not None]
        real = [x + 0.0 for x in xs if x == x]
        ints = [r["i"] for r in self.rows if r["i"] is not None]
        texts = [r["s"] for r in self.rows if r["s"] is not None]
        return {
            "end": self.last + gap,
            "n": len(self.rows),
            "total": self.total,
            "mean": self.total / len(xs) if xs else None,
            "whole": sum(ints),
            "low": min(real, default=None),
            "high": max(ints, default=None),
            "first": min(texts, default=None),
        }


def oracle(
    rows: list[dict[str, Any]], gap: int, lateness: int
) -> tuple[dict[Any, list[Session]], list[dict[str, Any]], int]:
    """Sessions of each key by their start; the late rows; and how many have no time."""
    sessions: dict[Any, list[Session]] = defaultdict(list)
    high, late, timeless = -math.inf, [], 0
    for row in rows:
        if row["t"] is None:
            timeless += 1
            continue
        t = (row["t"] - START) // micro(1)
        high = max(high, t)
        watermark = high - lateness
        if t + gap <= watermark:  # over by itself: one that is open may still take it in
            inside = [s for s in sessions[row["k"]] if s.first <= t <= s.last and s.last + gap > watermark]
            if inside:
                inside[0].add(t, row)
            else:
                late.append(row)
            continue
        mine = [s for s in sessions[row["k"]] if s.last + gap > watermark and t < s.last + gap and s.first < t + gap]
        mine.sort(key=lambda s: s.first)
        home = mine[0] if mine else Session()
        for other in mine[1:]:
            home.absorb(other)
            sessions[row["k"]].remove(other)
        if not mine:
            sessions[row["k"]].append(home)
        home.add(t, row)
    for found in sessions.values():
        found.sort(key=lambda s: s.first)
    return sessions, late, timeless


def some_rows(r: random.Random, count: int, tangled: bool = False) -> pl.DataFrame:
    """``tangled``: one key, great disorder, and floats whose sum shows in which order they were added."""
    disorder = 60 if tangled else r.choice([0, 5, 30])
    keys = ["a"] if tangled else ["a", "b", "ü"]
    special = 0.0 if tangled else 0.7
    rows = [
        {
            "k": maybe(r, r.choice(keys)),
            "x": maybe(r, r.choice(SPECIAL) if r.random() < special else r.uniform(-1e9, 1e9)),
            "i": maybe(r, r.randint(-(2**40), 2**40)),
            "s": maybe(r, r.choice(["x", "yy", ""])),
            "t": maybe(r, START + micro(i * 4 + r.randint(-disorder, disorder // 3))),
        }
        for i in range(count)
    ]
    schema = {"k": pl.String(), "x": pl.Float64(), "i": pl.Int64(), "s": pl.String(), "t": pl.Datetime("us")}
    return pl.DataFrame(rows, schema=schema)


def got(sink: MemorySink, names: list[str]) -> dict[Any, tuple[Any, ...]]:
    out = {}
    for row in sink.frame().iter_rows(named=True):
        at = (row["k"], (row["window_start"] - START) // micro(1))
        assert at not in out, f"{at} came twice"
        end = (row["window_end"] - START) // micro(1)
        out[at] = (end, *(plain(row[n]) for n in names))
    return out


@given(seed=SEEDS, count=COUNTS)
@examples(25)
def test_sessions_are_those_of_rows_taken_one_by_one(seed: int, count: int) -> None:
    r = random.Random(seed)
    tangled = r.random() < 0.3
    frame = some_rows(r, count, tangled)
    gap, lateness = r.randint(1, 30), 100 if tangled else r.choice([0, 3, 20, 100])
    over = IN_ORDER if tangled else r.choice([IN_ORDER, ASSOCIATIVE])
    cut = some_cut(r, count)
    sink, late_sink = MemorySink(), MemorySink()

    def build(source: ps.Source) -> ps.Flow:
        flow = ps.Flow("sessions")
        windows = flow.source("in", source).key_by("k").window(ps.session(micro(gap), on="t", lateness=micro(lateness)))
        windows.aggregate("w", **over).sink("out", sink)
        windows.late("late").sink("late-out", late_sink)
        return flow

    sessions, late, timeless = oracle(frame.to_dicts(), gap, lateness)
    expected = {}
    for key, found in sessions.items():
        for s in found:
            values = s.values(gap)
            expected[key, s.first] = (values["end"], *(plain(values[n]) for n in over))
    if r.random() < 0.25:
        run_in_two(build, frame, cut, r.randint(1, 3))
    else:
        job = run(build, frame, cut, ["w", "in", "late"])
        assert job.status().late == len(late)
        assert job.status().dead_letters == timeless
    assert got(sink, list(over)) == expected
    assert _sorted(late_sink.frame().to_dicts()) == _sorted(late)


def _sorted(rows: list[dict[str, Any]]) -> list[str]:
    return sorted(repr({k: plain(v) for k, v in row.items()}) for row in rows)


@given(seed=SEEDS, count=COUNTS)
@examples(20)
def test_updates_end_with_the_newest_session_of_each_key(seed: int, count: int) -> None:
    r = random.Random(seed)
    frame = some_rows(r, count)
    gap, lateness = r.randint(1, 30), r.choice([0, 3, 20, 100])
    over = r.choice([IN_ORDER, ASSOCIATIVE])
    sink = MemorySink()

    def build(source: ps.Source) -> ps.Flow:
        flow = ps.Flow("sessions")
        spec = ps.session(micro(gap), on="t", lateness=micro(lateness), emit="updates")
        flow.source("in", source).key_by("k").window(spec).aggregate("w", **over).sink("out", sink)
        return flow

    run(build, frame, some_cut(r, count), ["w", "in"])
    last = {}
    for row in sink.frame().iter_rows(named=True):
        begin, end = ((row[c] - START) // micro(1) for c in ("window_start", "window_end"))
        last[row["k"]] = (begin, end, *(plain(row[n]) for n in over))
    expected = {}
    for key, found in oracle(frame.to_dicts(), gap, lateness)[0].items():
        if found:
            values = found[-1].values(gap)
            expected[key] = (found[-1].first, values["end"], *(plain(values[n]) for n in over))
    assert last == expected


@pytest.mark.parametrize("epochs", [(5,), (1, 1, 1, 1, 1), (2, 3), (3, 2), (4, 1)], ids=str)
def test_sums_of_floats_grow_together_as_their_sessions_do(epochs: tuple[int, ...]) -> None:
    """Two sessions, then a row between them: (1e16 - 1e16 + 1) + 1 + 1, and not 1e16 + 1 - 1e16 + 1 + 1."""
    times = pl.Series([0, 30, 5, 14, 22]).cast(pl.Datetime("us"))
    frame = pl.DataFrame({"k": ["a"] * 5, "t": times, "x": [1e16, 1.0, -1e16, 1.0, 1.0]})
    flow = ps.Flow("floats")
    spec = ps.session(micro(10), on="t", lateness="1s")
    windows = flow.source("in", testing.rows(frame, epochs=epochs)).key_by("k").window(spec)
    windows.aggregate("w", x=ps.sum("x")).sink("out", ps.memory())
    assert testing.collect(flow)["x"].to_list() == [3.0]


def test_a_session_that_is_over_at_a_row_does_not_take_it() -> None:
    """Even if both come in one epoch: the row of 100 ends the session at 0, lateness or not, for all that follow."""
    times = [0, 15, 4, 12]
    frame = pl.DataFrame({"k": ["a", "b", "a", "a"], "t": pl.Series(times).cast(pl.Datetime("us"))})
    for epochs in ([4], [1, 1, 1, 1]):
        flow = ps.Flow("over")
        windows = flow.source("in", testing.rows(frame, epochs=epochs)).key_by("k")
        spec = ps.session(micro(10), on="t", lateness=micro(4))
        windows.window(spec).aggregate("w", n=ps.count()).sink("out", ps.memory())
        out = testing.collect(flow).filter(pl.col("k") == "a").sort("window_start")
        # At 4 the watermark is 11: [0, 10) is over, [4, 14) is not; 12 joins the latter.
        assert [((a - START) // micro(1), (b - START) // micro(1), n) for _, a, b, n in out.rows()] == [
            (0, 10, 1),
            (4, 22, 2),
        ]


def test_a_row_at_the_very_end_begins_the_next_session() -> None:
    """The same at any lateness: ends are exclusive, as everywhere."""
    frame = pl.DataFrame({"k": ["a"] * 3, "t": pl.Series([0, 9, 19]).cast(pl.Datetime("us"))})
    for lateness in (0, 50):
        flow = ps.Flow("end")
        spec = ps.session(micro(10), on="t", lateness=micro(lateness))
        flow.source("in", testing.rows(frame)).key_by("k").window(spec).aggregate("w", n=ps.count()).sink(
            "out", ps.memory()
        )
        assert sorted(testing.collect(flow)["n"].to_list()) == [1, 2]


def test_a_window_after_sessions() -> None:
    """Counted by the time at which they were over: none is late, however long."""
    frame = pl.DataFrame(
        {"k": [f"k{i % 7 // 2}" for i in range(400)], "t": pl.Series(range(400)).cast(pl.Datetime("us"))}
    )
    results = []
    for epochs in ((400,), (9,) * 44 + (4,)):
        flow = ps.Flow("after")
        keyed = flow.source("in", testing.rows(frame, epochs=epochs)).key_by("k")
        sessions = keyed.window(ps.session(micro(5), on="t")).aggregate("s", n=ps.count())
        hours = sessions.key_by("k").window(ps.tumbling(micro(50), on="window_end"))
        hours.aggregate("w", sessions=ps.count(), n=ps.sum("n")).sink("out", ps.memory())
        hours.late("late").sink("late-out", ps.memory())
        out = testing.run_local(flow, instances=2)
        assert out["late-out"].height == 0
        assert out["out"]["n"].sum() == 400
        results.append(out["out"].sort("k", "window_start"))
    assert results[0].equals(results[1])


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: ps.session(0, on="t"), "gap must be greater than zero"),
        (lambda: ps.session("soon", on="t"), "gap: 'soon' is not a duration"),
        (lambda: ps.session("1s", on="t", lateness=-1), "lateness cannot be negative"),
        (lambda: ps.session("1s", on="t", emit="often"), "emit='often' is not known"),
    ],
)
def test_wrong_sessions_are_refused(build: Any, said: str) -> None:
    with pytest.raises(ps.PenstockError, match=said):
        build()
