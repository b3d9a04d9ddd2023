"""What the order of rows behind keyed stages costs: four flows, with and without the order tags.

Rows that leave a keyed stage carry the order of the input that caused them, where somebody behind needs it
(``docs/decisions/0019``). The flows run in this process, in the local engine, over rows made beforehand; ``without`` is
the same plan with rows behind keyed stages in any order, which no setting gives.

* ``words``: a running count of words. Nothing needs order, so nothing should be lost.
* ``windows``: sums of floats in windows, from a source. Its order is known without tags.
* ``custom``: a user's own state for each word, to a sink. Nobody behind needs order.
* ``stages``: a user's operator, a second one by another key, and windows with sums of floats behind them: here tags are
  made, carried and sorted by, twice.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import polars as pl

import penstock as ps
from benchmarks import common
from benchmarks.common import Row
from penstock import testing
from penstock.engines.job import start
from penstock.plan import compile_flow

SUMMARY = "The order of rows behind keyed stages: throughput of four flows with and without it."

SCHEMA = {"ts": pl.Datetime("us"), "word": pl.String(), "group": pl.Int64(), "x": pl.Float64()}
ROWS, ROWS_QUICK = 1_000_000, 60_000
EPOCH_ROWS = 100_000
ROUNDS, ROUNDS_QUICK = 7, 1
WORDS = 20_000
RATE_S = 20_000
"""Rows in a second of event time."""


class Average(ps.Operator):
    """A moving average for each word, given on with its row."""

    def on_event(self, key: str, event: Any, mean: ps.Value[float], emit: ps.Emit) -> None:
        now = mean.get(0.0) * 0.9 + event.x * 0.1
        mean.set(now)
        emit(event.ts, event.word, event.group, now)


class Step(ps.Operator):
    """What changed since the last row of the group."""

    def on_event(self, key: int, event: Any, last: ps.Value[float], emit: ps.Emit) -> None:
        emit(event.ts, event.word, event.group, event.x - last.get(0.0))
        last.set(event.x)


def some_rows(count: int) -> pl.DataFrame:
    """Words by Zipf's law, out of order by up to a second."""
    r = np.random.default_rng(1)
    start = (datetime(2026, 1, 1) - datetime(1970, 1, 1)).days * 86_400_000_000
    times = start + np.arange(count) * 1_000_000 // RATE_S - r.integers(0, 1_000_000, count)
    word = np.minimum(r.zipf(1.3, count), WORDS)
    return pl.DataFrame(
        {
            "ts": pl.Series(times).cast(pl.Datetime("us")),
            "word": pl.Series(word).cast(pl.String),
            "group": pl.Series(word % 1_000),
            "x": r.normal(size=count),
        }
    )


def words(stream: ps.Stream) -> ps.Stream:
    return stream.key_by("word").aggregate("counts", n=ps.count())


def windows(stream: ps.Stream) -> ps.Stream:
    return stream.key_by("word").window(ps.tumbling("5s", on="ts", lateness="1s")).aggregate("sums", x=ps.sum("x"))


def custom(stream: ps.Stream) -> ps.Stream:
    return stream.key_by("word").process("average", Average(), schema=SCHEMA)


def stages(stream: ps.Stream) -> ps.Stream:
    steps = custom(stream).key_by("group").process("steps", Step(), schema=SCHEMA)
    window = ps.tumbling("5s", on="ts", lateness="1s")
    return steps.key_by("word").window(window).aggregate("sums", x=ps.sum("x"), last=ps.last("x"))


FLOWS: dict[str, Callable[[ps.Stream], ps.Stream]] = {
    "words": words,
    "windows": windows,
    "custom": custom,
    "stages": stages,
}


def run(quick: bool, out: Path | None) -> dict[str, Any]:
    """See README.md. Quick: 60,000 rows, one round."""
    frame = some_rows(ROWS_QUICK if quick else ROWS)
    rows: list[Row] = []
    for number in range(ROUNDS_QUICK if quick else ROUNDS):
        for name in FLOWS:
            both = [True, False] if number % 2 else [False, True]
            for order in both:
                rate = rows_a_second(name, frame, order=order)
                which = "with" if order else "without"
                rows.append({"contender": which, "flow": name, "round": number, "rows_s": rate})
    notes = [
        "rows_s: rows of the input by the processor time of the whole run, two containers in one process: what others "
        "do on the machine does not count.",
        "Ratios: with the tags by without, median of the rounds; 1.0 means nothing lost.",
    ]

    def draw(path: Path) -> None:
        from penstock.observe.plot import plot_bars

        plot_bars(
            common.medians(rows, "rows_s", group="flow"), path, "Order behind keyed stages", "rows a second of a core"
        )

    return common.finish("order", rows, ratios(rows), notes, out, draw)


def rows_a_second(name: str, frame: pl.DataFrame, *, order: bool) -> float:
    flow = ps.Flow(f"order-{name}")
    FLOWS[name](flow.source("in", testing.rows(frame))).sink("out", ps.discard())
    config = ps.Config(instances=2, slices=8, epoch_rows=EPOCH_ROWS)
    with mock.patch("penstock.engines.job.compile_flow", partial(compile_flow, order=order)):
        began = time.process_time()
        job = start(flow, engine="local", config=config)
        assert job.wait(600)
        return round(frame.height / (time.process_time() - began))


def ratios(rows: list[Row]) -> dict[str, float]:
    """Of each flow: with by without, of neighbours in time, the median over the rounds."""
    found = {}
    for name in FLOWS:
        mine = [r for r in rows if r["flow"] == name]
        pairs = {r["round"]: {s["contender"]: s["rows_s"] for s in mine if s["round"] == r["round"]} for r in mine}
        found[f"{name}_kept"] = round(statistics.median(p["with"] / p["without"] for p in pairs.values()), 3)
    return found


__all__ = ["FLOWS", "ratios", "rows_a_second", "run", "some_rows"]
