"""The order of rows behind keyed stages: a function of the data alone, whatever the epochs, containers and sources."""

from __future__ import annotations

import random
from datetime import datetime, timedelta
from typing import Any

import polars as pl

import penstock as ps
from penstock import testing
from penstock.operators.order import marked, marks_of, tag

START = datetime(2026, 1, 1)
SCHEMA = {"ts": pl.Datetime("us"), "user": pl.String, "group": pl.Int64, "x": pl.Float64}


def disordered(count: int, seed: int = 1, disorder_s: float = 4.0) -> pl.DataFrame:
    """Rows some of which come up to ``disorder_s`` too late, with numbers whose sum shows the order of addition."""
    rng = random.Random(seed)
    rows = [
        (
            START + timedelta(seconds=i * 0.05 - rng.random() * disorder_s),
            f"u{rng.randrange(40)}",
            rng.randrange(3),
            rng.uniform(-1, 1) * 10 ** rng.randrange(12),
        )
        for i in range(count)
    ]
    return pl.DataFrame(rows, schema=SCHEMA, orient="row")


class PassOn(ps.Operator):
    """Gives on what it gets, numbered by user."""

    def on_event(self, key: str, event: Any, seen: ps.Value[int], emit: ps.Emit) -> None:
        seen.set(seen.get(0) + 1)
        emit(event.ts, event.user, event.group, event.x)


def passed_on(stream: ps.Stream, **more: Any) -> ps.Stream:
    return stream.key_by("user").process("pass", PassOn(), schema=SCHEMA, **more)


def test_windows_behind_a_custom_operator_do_not_depend_on_the_cut() -> None:
    for more in ({}, {"on": "ts", "lateness": "1s"}):
        flow = ps.Flow("issue")
        windows = passed_on(flow.source("in", testing.rows(disordered(1500))), **more).key_by("group")
        window = ps.tumbling("2s", on="ts", lateness="3s")
        windows.window(window).aggregate(
            "sums", total=ps.sum("x"), first=ps.first("x"), all=ps.collect("x"), n=ps.count()
        ).sink("out", ps.memory())
        run = testing.assert_any_cut(flow, epoch_rows=(7, 100, 1500), instances=(1, 3))
        assert more or run.late["sums"] > 0


def test_values_of_one_row_stay_together() -> None:
    at = [START, START, START - timedelta(seconds=1)]
    rows = pl.DataFrame({"k": ["a"] * 3, "at": at, "low": [1, 2, 9], "high": [8, None, 9], "x": [0.0, -0.0, 1.0]})
    for instances in (1, 3):
        flow = ps.Flow("rows")
        keyed = flow.source("in", testing.rows(rows)).key_by("k")
        row = ps.last_row("low", "high", "x", by="at")
        keyed.aggregate("one", row=row, old=ps.first_row("low", by="at")).sink("out", ps.memory())
        keyed.aggregate("in-order", row=row, all=ps.collect("low")).sink("more", ps.memory())
        found = testing.run(flow, epoch_rows=2, instances=instances).sinks
        expected = {"low": 2, "high": None, "x": 0.0}
        assert found["out"].rows(named=True)[-1] == {"k": "a", "row": expected, "old": {"low": 9}}
        assert found["more"].rows(named=True)[-1] == {"k": "a", "row": expected, "all": [1, 2, 9]}


def test_an_aggregate_of_final_aggregates() -> None:
    """NEXMark's query 4 in the plain way: the mean of the greatest bids."""
    flow = ps.Flow("query-4")
    bids = flow.source("in", testing.rows(disordered(200))).key_by("user", "group")
    highest = bids.aggregate("highest", emit="final", x=ps.max("x"))
    highest.key_by("group").aggregate("mean", emit="final", x=ps.mean("x"), users=ps.count()).sink("out", ps.memory())
    highest.key_by("group").process("order", Seen(), schema={"group": int, "users": str}).sink("seen", ps.memory())
    run = testing.assert_any_cut(flow, epoch_rows=(1, 7, 200), instances=(1, 3), latest_by={"seen": ["group"]})
    assert run.sinks["out"]["users"].sum() == disordered(200).n_unique(["user", "group"])


class Seen(ps.Operator):
    def on_event(self, key: int, event: Any, users: ps.Value[str], emit: ps.Emit) -> None:
        users.set(users.get("") + event.user + " ")
        emit(key, users.get())


def test_the_greatest_time_up_to_a_row_is_that_of_all_tasks() -> None:
    """The quick way, if two tags tell all rows apart, and the thorough way agree with a loop over all rows."""
    for seed in range(60):
        r = random.Random(seed)
        width, spread = r.choice([1, 2, 3]), r.choice([3, 50])
        tasks = []
        for task in range(r.randint(1, 3)):
            tags = sorted({(r.randrange(spread), *(r.randrange(4) for _ in range(width - 1)), task) for _ in range(9)})
            times = [r.randrange(100) for _ in tags]
            frame = pl.DataFrame(tags, schema=[tag(i) for i in range(width + 1)], orient="row")
            tasks.append((frame, times))
        every = sorted((row, t) for frame, times in tasks for row, t in zip(frame.rows(), times, strict=True))
        told = [marks_of(frame, pl.Series(times).to_numpy()) for frame, times in tasks]
        mine = tasks[0][0]
        found = marked(mine, told, "reached")["reached"].to_list()
        assert found == [max(t for other, t in every if other <= row) for row in mine.rows()], seed
