"""The order of rows behind keyed stages: a function of the data alone, whatever the epochs, containers and sources."""

from __future__ import annotations

import random
from datetime import datetime, timedelta
from typing import Any

import polars as pl

import penstock as ps
from penstock import testing

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
