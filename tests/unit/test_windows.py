"""Windows one operator at a time: what is refused, what is set aside, the clock, and the corners of the arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any

import numpy as np
import polars as pl
import pytest

import penstock as ps
from penstock import testing
from penstock.engines.job import start
from penstock.operators import windows
from penstock.operators.base import FOREVER, HASH, NEVER, ORDER, PUNCTUATION, Arrival, KeyedOperator, Tick
from penstock.operators.event_time import CLOCK, clamped
from penstock.operators.windows import WindowSpec, group_rows
from penstock.state.hashing import hash_columns
from penstock.state.table import KeyedTable

S = 1_000_000
SCHEMA = pl.Schema({"k": pl.String(), "t": pl.Datetime("us"), "x": pl.Int64()})


def events(*rows: tuple[str, float | None]) -> pl.DataFrame:
    """(key, seconds since 1970)"""
    times = pl.Series([None if t is None else round(t * S) for _, t in rows], dtype=pl.Int64)
    return pl.DataFrame({"k": [k for k, _ in rows], "t": times.cast(pl.Datetime("us")), "x": range(len(rows))})


class Bench:
    """One operator, one container: epochs by hand."""

    def __init__(self, operator: KeyedOperator) -> None:
        self.operator = operator
        spec = operator.table()
        self.table = KeyedTable(spec) if spec else None
        self.epoch, self.watermark = 0, NEVER

    def feed(self, frame: pl.DataFrame, watermark: int, clock_us: int = 0) -> list[tuple[Any, ...]]:
        """One epoch of one split; what comes out, times in seconds."""
        self.epoch += 1
        prepared = self.operator.prepare(frame, True, 0, clock_us)
        rows = prepared.frame.drop(PUNCTUATION, strict=False)
        rows = rows.with_columns(pl.Series(HASH, hash_columns(rows, self.operator.key), dtype=pl.UInt64))
        applied = self.operator.apply(
            self.table,
            [Arrival(rows, "in", 0, True, self.watermark)],
            Tick(self.epoch, self.watermark, watermark, clock_us // 1000),
        )
        self.watermark = watermark
        if self.table is not None:
            self.table.seal(self.epoch)
            self.table.validate()
        out = applied.frame.drop(ORDER, strict=False)
        return sorted(
            tuple((v - datetime(1970, 1, 1)).total_seconds() if isinstance(v, datetime) else v for v in row)
            for row in out.rows()
        )


def bench(spec: Any, **over: ps.Aggregate) -> Bench:
    return Bench(spec.aggregate("w", ["k"], over or {"n": ps.count()}, SCHEMA))


# -- what is refused ---------------------------------------------------------------------------------------------------


def keyed() -> ps.KeyedStream:
    return ps.Flow("f").source("in", testing.rows(events(("a", 0)))).key_by("k")


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: ps.tumbling(-1, on="t"), "window size must be greater than zero, not -1"),
        (lambda: ps.tumbling(timedelta(0), on="t"), "greater than zero"),
        (lambda: ps.tumbling(float("nan"), on="t"), "nan is not a duration"),
        (lambda: ps.tumbling(True, on="t"), "True is not a duration"),
        (lambda: ps.tumbling("1 week", on="t"), "'1 week' is not a duration"),
        (lambda: ps.hopping("1s", every="2s", on="t"), "hops further than it is long"),
        (lambda: ps.hopping("1d", every="1ms", on="t"), "86400000 windows"),
        (lambda: ps.tumbling("1s", on="t", emit="sometimes"), "emit='sometimes' is not known"),
        (lambda: ps.tumbling("1s", on="t", empty=0), "empty must be greater than zero"),
        (lambda: ps.tumbling("1s", on="t", emit="updates", empty="1h"), "that nothing has come yet is no update"),
        (lambda: ps.tumbling("1s", on=CLOCK, lateness="1s"), "by the clock nothing is late"),
        (lambda: keyed().window(ps.tumbling("1s", on=3)), "on=3 is neither a column nor ps.CLOCK"),  # type: ignore[arg-type]
        (lambda: keyed().window(ps.session("1s", on="x")), "column 'x' has type Int64, not a time"),
        (lambda: keyed().window(ps.session("1s", on="tt")), "there is no column 'tt'"),
        (
            lambda: keyed().window(ps.tumbling("1s", on=CLOCK)).late("l"),
            "no row is late for tumbling 1s/1s of the clock",
        ),
        (lambda: keyed().window(ps.last_rows(3)).late("l"), "no row is late for last 3 rows"),
        (
            lambda: keyed().window(ps.last_rows(3)).aggregate("w", n=ps.count()).top_k("top", 1, by="n"),
            "'w' is a stream of events",
        ),
        (
            lambda: keyed().window(ps.session("1s", on="t")).aggregate("w", n=ps.count()).top_k("top", 1, by="n"),
            "'w' is a stream of events",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_where_it_is_written(build: Callable[[], Any], said: str) -> None:
    with pytest.raises(ps.PenstockError) as caught:
        build()
    assert said in caught.value.message
    assert caught.value.remedy


def test_a_key_named_like_a_column_of_windows_is_refused() -> None:
    counts = keyed().window(ps.tumbling("1s", on="t")).aggregate("w", n=ps.count())
    with pytest.raises(ps.PenstockError, match="key column 'window_start'"):
        counts.key_by("window_start").window(ps.tumbling("1m", on="window_end"))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (ps.hopping("10s", every="2s", on="t"), "hopping 10s/2s n=count()"),
        (ps.tumbling("1m", on=CLOCK, emit="updates"), "tumbling 60s/60s of the clock updates n=count()"),
        (ps.tumbling("1m", on="t", empty="1h"), "tumbling 60s/60s empty for 3600s n=count()"),
        (ps.session("30m", on="t"), "sessions 1800s n=count()"),
        (ps.last_rows(10, every=5), "last 10 rows every 5 n=count()"),
    ],
)
def test_operators_say_what_they_do(spec: Any, said: str) -> None:
    operator = spec.aggregate("w", ["k"], {"n": ps.count()}, SCHEMA)
    assert operator.describe() == said
    assert operator.fingerprint()["key"] == {"k": "String"}


def test_updates_can_be_ranked_in_each_window() -> None:
    frame = events(("a", 0), ("b", 1), ("b", 2), ("a", 11), ("a", 3), ("a", 4))
    flow = ps.Flow("best")
    spec = ps.tumbling("10s", on="t", lateness="20s", emit="updates")
    counts = flow.source("in", testing.rows(frame, epochs=[3, 3])).key_by("k").window(spec).aggregate("w", n=ps.count())
    assert counts.identity == ("k", "window_start", "window_end")
    counts.top_k("top", 1, by="n", per=["window_start", "window_end"]).sink("out", ps.memory())
    out = testing.collect(flow)
    last = {row["window_start"].second: (row["k"], row["n"]) for row in out.iter_rows(named=True)}
    assert last == {0: ("a", 3), 10: ("a", 1)}


# -- times that cannot be right ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [ps.tumbling("10s", on="t"), ps.session("10s", on="t")], ids=["tumbling", "session"])
def test_a_row_without_a_plausible_time_is_a_dead_letter(spec: Any) -> None:
    """Had it been counted, its time would have ended every window, and the rows after it would be late."""
    frame = events(("a", 1), ("b", None), ("a", 55_000 * 365 * 86_400.0), ("a", 2))
    operator = spec.aggregate("w", ["k"], {"n": ps.count()}, SCHEMA)
    prepared = operator.prepare(frame, True)
    assert prepared.late == 0
    assert prepared.time_max == 2 * S
    (first, second) = prepared.dead
    assert first == ("w", "row 1 of its batch", "no time in column 't'", "{'k': 'b', 't': None, 'x': 1}")
    assert second[:2] == ("w", "row 2 of its batch")
    assert second[2] == "time 1734480000000000000 in column 't' is implausible: wrong unit?"
    assert "1734480000000000000" in second[3]


@pytest.mark.parametrize(
    ("dtype", "good", "bad"),
    [
        (pl.Datetime("ms"), 1_700_000_000_000, 1_700_000_000_000_000),
        (pl.Datetime("ms"), 1_700_000_000_000, 2**62),
        (pl.Datetime("us"), 1_700_000_000_000_000, 1_700_000_000_000_000_000),
        (pl.Datetime("us", "Europe/Zurich"), 1_700_000_000_000_000, 1_700_000_000_000_000_000),
        (pl.Datetime("ns"), 1_700_000_000_000_000_000, 2**63 - 1),
        (pl.Date(), 19_000, 2**31 - 1),
    ],
    ids=str,
)
def test_a_unit_that_is_too_large_shows_in_every_type(dtype: pl.DataType, good: int, bad: int) -> None:
    stored = pl.Int32 if dtype == pl.Date() else pl.Int64
    frame = pl.DataFrame({"k": ["a"] * 3, "t": pl.Series([good, bad, good], dtype=stored).cast(dtype)})
    operator = ps.tumbling("1s", on="t").aggregate("w", ["k"], {"n": ps.count()}, frame.schema)
    prepared = operator.prepare(frame, True)
    assert [d[2].split(" in ")[0] for d in prepared.dead] == [f"time {bad}"]
    assert prepared.frame["__rows"].sum() == 2


def test_the_oldest_and_newest_plausible_times_are_counted() -> None:
    frame = pl.DataFrame({"k": ["a", "a"], "t": [datetime(1870, 1, 1), datetime(2199, 12, 31)], "x": [1, 2]})
    operator = ps.tumbling("1s", on="t").aggregate("w", ["k"], {"n": ps.count()}, SCHEMA)
    assert operator.prepare(frame, True).dead == ()


def test_a_flow_counts_what_it_sets_aside_and_goes_on() -> None:
    frame = pl.concat([events(("a", 1), ("a", None)), events(("a", 2), ("a", 4e12), ("a", 3))])
    flow = ps.Flow("dead")
    dead, out, late = ps.memory(), ps.memory(), ps.memory()
    flow.dead_letters(dead)
    windowed = flow.source("in", testing.rows(frame, epochs=[2, 3])).key_by("k").window(ps.tumbling("10s", on="t"))
    windowed.aggregate("w", n=ps.count()).sink("out", out)
    windowed.late("late").sink("late-out", late)
    job = start(flow, engine="local", config=ps.Config(instances=1))
    job.wait()
    assert job.status().dead_letters == 2 and job.status().late == 0
    assert out.frame()["n"].to_list() == [3]
    assert late.frame().height == 0
    assert sorted(dead.frame()["reason"].to_list()) == [
        "no time in column 't'",
        "time 4000000000000000000 in column 't' is implausible: wrong unit?",
    ]


def test_before_the_first_punctuation_nothing_is_late() -> None:
    """The watermark before all time is at the end of the integers: arithmetic with it must not wrap around."""
    frame = events(("a", 5), ("a", -5), ("a", 7)).with_columns(pl.Series(PUNCTUATION, [NEVER, NEVER, 20 * S]))
    for spec in (ps.hopping("10s", every="5s", on="t", offset="3s"), ps.session("1s", on="t", lateness="1h")):
        prepared = spec.aggregate("w", ["k"], {"n": ps.count()}, SCHEMA).prepare(frame, True)
        assert prepared.late == (1 if isinstance(spec, WindowSpec) else 0)
    assert clamped(NEVER) - 2**60 > -(2**63)
    assert (clamped(np.array([NEVER, 5])) - 2**60 < 0).all()


# -- emission ----------------------------------------------------------------------------------------------------------


def test_a_window_is_emitted_once_and_forgotten() -> None:
    b = bench(ps.hopping("10s", every="5s", on="t"))
    assert b.feed(events(("a", 1), ("a", 6)), 6 * S) == [("a", -5, 5, 1)]
    assert b.feed(events(("b", 7)), 9 * S) == []
    assert b.feed(events(("a", 21)), 21 * S) == [("a", 0, 10, 2), ("a", 5, 15, 1), ("b", 0, 10, 1), ("b", 5, 15, 1)]
    assert b.feed(events(), FOREVER) == [("a", 15, 25, 1), ("a", 20, 30, 1)]
    assert b.table is not None and b.table.rows_live == 0


def test_updates_come_when_something_changed_and_not_again_at_the_end() -> None:
    b = bench(ps.tumbling("10s", on="t", lateness="5s", emit="updates"))
    assert b.feed(events(("a", 1), ("b", 2)), -3 * S) == [("a", 0, 10, 1), ("b", 0, 10, 1)]
    assert b.feed(events(("a", 3)), -2 * S) == [("a", 0, 10, 2)]
    assert b.feed(events(("c", 16)), 11 * S) == [("c", 10, 20, 1)]
    assert b.table is not None and b.table.rows_live == 1
    assert b.feed(events(("a", 4)), 11 * S) == []  # late
    assert b.feed(events(("c", 27), ("c", 28)), FOREVER) == [("c", 20, 30, 2)]
    assert b.table.rows_live == 0


def test_empty_windows_until_a_key_is_silent_for_too_long() -> None:
    over = {"n": ps.count(), "total": ps.sum("x"), "low": ps.min("x"), "mean": ps.mean("x")}
    b = bench(ps.tumbling("10s", on="t", empty="25s"), **over)
    assert b.feed(events(("a", 1)), 1 * S) == []
    assert b.feed(events(("b", 12)), 12 * S) == [("a", 0, 10, 1, 0, 0, 0.0)]
    assert b.feed(events(("b", 41)), 41 * S) == [
        ("a", 10, 20, 0, 0, None, None),
        ("a", 20, 30, 0, 0, None, None),
        ("b", 10, 20, 1, 0, 0, 0.0),
        ("b", 20, 30, 0, 0, None, None),
        ("b", 30, 40, 0, 0, None, None),
    ]
    assert b.feed(events(("a", 65)), 65 * S) == [("b", 40, 50, 1, 0, 0, 0.0), ("b", 50, 60, 0, 0, None, None)]


def test_windows_by_the_clock() -> None:
    """A row's time is the clock of its epoch, whatever its columns say. The watermark of the epoch is that clock."""
    b = bench(ps.tumbling("10s", on=CLOCK))
    assert b.operator.clocked and b.operator.timed
    assert b.feed(events(("a", 999), ("a", None)), 3 * S, 3 * S) == []
    assert b.feed(events(("a", -5)), 9 * S, 9 * S) == []
    assert b.feed(events(("a", 0), ("b", 0)), 10 * S, 10 * S) == [("a", 0, 10, 3)]
    assert b.feed(events(), FOREVER, 12 * S) == [("a", 10, 20, 1), ("b", 10, 20, 1)]


def test_a_flow_by_the_clock() -> None:
    frame = events(("a", 1), ("b", 2), ("a", None))
    flow = ps.Flow("clock")
    windowed = flow.source("in", testing.rows(frame, epochs=[1, 2])).key_by("k").window(ps.tumbling("3650d", on=CLOCK))
    windowed.aggregate("w", n=ps.count()).top_k("top", 2, by="n").sink("out", ps.memory())
    out = testing.collect(flow)
    assert out.select("k", "n", "rank").rows() == [("a", 2, 1), ("b", 1, 2)]
    now = datetime.now(UTC).replace(tzinfo=None)
    assert (out["window_start"] <= now).all() and (out["window_end"] > now).all()


def test_windows_begin_at_the_offset() -> None:
    """A day that begins at 22:00 UTC."""
    frame = pl.DataFrame({"k": ["a", "a"], "t": [datetime(2024, 5, 1, 21, 59), datetime(2024, 5, 1, 22)], "x": [1, 2]})
    flow = ps.Flow("days")
    windowed = flow.source("in", testing.rows(frame)).key_by("k").window(ps.tumbling("1d", on="t", offset="22h"))
    windowed.aggregate("w", n=ps.count()).sink("out", ps.memory())
    assert sorted(testing.collect(flow)["window_start"].to_list()) == [
        datetime(2024, 4, 30, 22),
        datetime(2024, 5, 1, 22),
    ]


# -- grouping ----------------------------------------------------------------------------------------------------------


def test_group_rows_agrees_with_a_dict() -> None:
    rng = np.random.default_rng(7)
    for count in (0, 1, 2, 500):
        hashes = rng.integers(0, 40, count).astype(np.uint64) << np.uint64(58)  # all at few places of the table
        ends = rng.integers(0, 3, count)
        speaker = group_rows(hashes, ends)
        groups: dict[Any, set[int]] = {}
        for h, e, s in zip(hashes.tolist(), ends.tolist(), speaker.tolist(), strict=True):
            groups.setdefault((h, e), set()).add(s)
        assert all(len(s) == 1 for s in groups.values())
        assert len({next(iter(s)) for s in groups.values()}) == len(groups)


def test_two_keys_of_one_hash_stay_two(monkeypatch: pytest.MonkeyPatch) -> None:
    def clash(frame: pl.DataFrame, columns: Sequence[str]) -> np.ndarray:
        return np.full(frame.height, 42, dtype=np.uint64)

    monkeypatch.setattr(windows, "hash_columns", clash)
    monkeypatch.setitem(globals(), "hash_columns", clash)
    b = bench(ps.hopping("10s", every="5s", on="t"))
    b.feed(events(("a", 1), ("b", 2), ("a", 6)), 6 * S)
    assert b.feed(events(), 12 * S) == [("a", 0, 10, 2), ("b", 0, 10, 1)]


def test_dates_make_windows_of_days() -> None:
    frame = pl.DataFrame({"k": ["a"] * 3, "t": [date(2024, 5, 1), date(2024, 5, 1), date(2024, 5, 2)]})
    flow = ps.Flow("dates")
    windowed = flow.source("in", testing.rows(frame)).key_by("k").window(ps.tumbling("1d", on="t"))
    windowed.aggregate("w", n=ps.count()).sink("out", ps.memory())
    assert sorted(testing.collect(flow)["n"].to_list()) == [1, 2]
