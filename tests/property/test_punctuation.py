"""Punctuation drives time: against an oracle that goes row by row, however the input is cut."""

from __future__ import annotations

import random
from datetime import datetime, timedelta

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock import testing
from penstock.connectors.sinks import MemorySink
from penstock.engines.job import start
from penstock.errors import FlowError
from tests.property.cuts import examples

START = datetime(2026, 1, 1)
SIZE_S = 10


def stream(seed: int) -> list[tuple[int, bool, str]]:
    """(second, is it punctuation, key). Some rows break the promise that was made."""
    rng = random.Random(seed)
    rows, now = [], 0
    for _ in range(rng.randrange(1, 60)):
        now += rng.randrange(0, 4)
        if rng.random() < 0.2:
            rows.append((now - rng.randrange(0, 8), True, "cti"))
        else:
            rows.append((now + rng.randrange(-12, 30), False, rng.choice("ab")))
    return rows


def oracle(rows: list[tuple[int, bool, str]]) -> tuple[dict[tuple[str, int], int], int]:
    counts: dict[tuple[str, int], int] = {}
    late, promised = 0, None
    for second, punctuation, key in rows:
        if punctuation:
            promised = second if promised is None else max(promised, second)
            continue
        end = second // SIZE_S * SIZE_S + SIZE_S
        if promised is not None and end <= promised:
            late += 1
            continue
        counts[key, end] = counts.get((key, end), 0) + 1
    return counts, late


def frame_of(rows: list[tuple[int, bool, str]]) -> pl.DataFrame:
    return pl.DataFrame(
        {
            "ts": [START + timedelta(seconds=s) for s, _, _ in rows],
            "cti": [p for _, p, _ in rows],
            "k": [k for _, _, k in rows],
        },
        schema={"ts": pl.Datetime("us"), "cti": pl.Boolean, "k": pl.String},
    )


def same(batch: pl.DataFrame) -> pl.DataFrame:
    return batch


def halves(row: dict[str, object]) -> list[dict[str, object]]:
    return [row]


@examples(20)
@given(st.integers(0, 10**9), st.integers(1, 7), st.integers(1, 3))
def test_lateness_follows_the_promise_whatever_the_cut(seed: int, epoch_rows: int, instances: int) -> None:
    rows = stream(seed)
    flow = ps.Flow("punctuated")
    source = ps.punctuated(testing.rows(frame_of(rows)), when=pl.col("cti"), on="ts")
    words = flow.source("in", source).map_batches("same", same).select("two", "ts", "k")
    words = words.map_rows("rows", halves, schema={"ts": datetime, "k": str})
    counts = words.key_by("k").window(ps.tumbling(f"{SIZE_S}s", on="ts")).aggregate("n", n=ps.count())
    memory = MemorySink()
    counts.sink("out", memory)
    job = start(flow, engine="local", config=ps.Config(instances=instances, epoch_rows=epoch_rows))
    job.wait()
    found = {
        (k, round((end - START).total_seconds())): n
        for k, end, n in memory.frame().select("k", "window_end", "n").iter_rows()
    }
    expected, late = oracle(rows)
    assert found == expected
    assert job.status().late == late


def test_time_stands_still_without_a_promise() -> None:
    rows = [(0, False, "a"), (100, False, "a"), (5, False, "a"), (200, True, "cti"), (50, False, "a")]
    flow = ps.Flow("still")
    source = ps.punctuated(testing.rows(frame_of(rows), epochs=[1] * 5), when=pl.col("cti"), on="ts")
    windows = flow.source("in", source).key_by("k").window(ps.tumbling("10s", on="ts"))
    memory = MemorySink()
    windows.aggregate("n", n=ps.count()).sink("out", memory)
    job = start(flow, engine="local", config=ps.Config(instances=1))
    job.wait()
    assert memory.frame()["n"].to_list() == [2, 1], "5 s came 95 s behind, and was not late; 50 s was"
    assert job.status().late == 1


def test_a_punctuation_without_a_time_is_set_aside() -> None:
    frame = pl.DataFrame(
        {"ts": [START, None], "cti": [False, True]}, schema={"ts": pl.Datetime("us"), "cti": pl.Boolean}
    )
    flow = ps.Flow("timeless")
    source = ps.punctuated(testing.rows(frame), when=pl.col("cti"), on="ts")
    flow.source("in", source).sink("out", ps.memory())
    job = start(flow, engine="local", config=ps.Config(instances=1))
    job.wait()
    assert job.status().dead_letters == 1


def test_what_does_not_fit_the_source_is_refused() -> None:
    source = testing.rows(frame_of([(0, False, "a")]))
    with pytest.raises(FlowError, match="column 'k' is not a time"):
        ps.punctuated(source, when=pl.col("cti"), on="k")
    with pytest.raises(FlowError, match="when= does not fit"):
        ps.punctuated(source, when=pl.col("nope"), on="ts")
    with pytest.raises(FlowError, match="not true or false"):
        ps.punctuated(source, when=pl.col("ts"), on="ts")
