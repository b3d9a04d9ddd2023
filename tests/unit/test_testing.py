"""What users test their flows with must itself be able to fail."""

from __future__ import annotations

from datetime import datetime, timedelta

import polars as pl
import pytest

import penstock as ps
from penstock import testing

NOON = datetime(2026, 1, 1, 12)
EVENTS = pl.DataFrame(
    {"ts": [NOON, NOON + timedelta(seconds=3), NOON + timedelta(seconds=30), NOON], "k": ["a", "a", "b", "a"]},
    schema={"ts": pl.Datetime("us"), "k": pl.String},
)


def windows() -> ps.Flow:
    flow = ps.Flow("windows")
    keyed = flow.source("in", testing.rows(EVENTS)).key_by("k")
    keyed.window(ps.tumbling("10s", on="ts")).aggregate("counts", n=ps.count()).sink("out", ps.memory())
    return flow


EXPECTED = [
    {"k": "a", "window_start": "12:00:00", "n": 2},
    {"k": "b", "window_start": "2026-01-01 12:00:30", "n": 1},
]


def test_windows_and_late_rows_are_as_said() -> None:
    run = testing.run(windows(), epoch_rows=2)
    testing.assert_windows(run.sinks["out"], EXPECTED)
    testing.assert_late(run, 1)
    testing.assert_late(run, {"counts": 1})
    assert not run.dead_letters.height


def test_a_window_too_many_too_few_or_another_is_told() -> None:
    found = testing.run(windows()).sinks["out"]
    with pytest.raises(AssertionError, match="unexpected: k=b"):
        testing.assert_windows(found, EXPECTED[:1])
    with pytest.raises(AssertionError, match=r"missing: .*k=a.*n=3\n  unexpected: k=a.*n=2"):
        testing.assert_windows(found, [{**EXPECTED[0], "n": 3}, EXPECTED[1]])
    with pytest.raises(AssertionError, match=r"missing: .*k=b"):
        testing.assert_windows(found, [*EXPECTED, EXPECTED[1]])
    with pytest.raises(AssertionError, match="not expected"):
        testing.assert_windows(found, [])
    with pytest.raises(AssertionError, match="the column 'm'"):
        testing.assert_windows(found, [{"m": 1}])
    with pytest.raises(AssertionError, match="no result of windows"):
        testing.assert_windows(EVENTS, EXPECTED)


def test_a_wrong_number_of_late_rows_is_told() -> None:
    run = testing.run(windows())
    with pytest.raises(AssertionError, match=r"late: {'counts': 1}, expected 2"):
        testing.assert_late(run, 2)
    with pytest.raises(AssertionError, match=r"expected {'counts': 0}"):
        testing.assert_late(run, {"counts": 0})


def test_a_flow_that_keeps_the_law_passes_at_any_cut() -> None:
    run = testing.assert_any_cut(windows())
    testing.assert_windows(run.sinks["out"], EXPECTED)


def test_a_flow_that_depends_on_where_a_batch_ends_is_caught() -> None:
    flow = ps.Flow("breaks-the-law")
    stream = flow.source("in", testing.rows(EVENTS))
    stream.map_batches("height", lambda batch: batch.with_columns(n=pl.lit(batch.height))).sink("out", ps.memory())
    with pytest.raises(AssertionError, match="sink 'out' differs with epochs of"):
        testing.assert_any_cut(flow)


def test_updates_are_compared_by_their_last_rows() -> None:
    flow = ps.Flow("updates")
    stream = flow.source("in", testing.rows(EVENTS))
    stream.key_by("k").aggregate("counts", n=ps.count()).sink("out", ps.memory())
    with pytest.raises(AssertionError, match="differs"):
        testing.assert_any_cut(flow)
    testing.assert_any_cut(flow, latest_by={"out": ["k"]})
