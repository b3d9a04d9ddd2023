"""Rates of each operator over a sliding window, from control records alone (S1)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.control.events import TaskReport
from penstock.observe.metrics import WINDOW_S, Metrics


def controller(**routing: int) -> Any:
    return SimpleNamespace(
        routing=SimpleNamespace(instances=routing, slices=64, version=1),
        in_flight={},
        watermarks={},
        phase="running",
        published=2,
        committed=1,
        recoveries=0,
    )


def report(index: int, rows_in: int, rows_out: int, busy_ms: float) -> TaskReport:
    return TaskReport(
        "counts",
        1,
        1,
        index,
        rows_in=rows_in,
        rows_out=rows_out,
        busy_ms=busy_ms,
        state_rows=10,
        by_operator={"counts": (rows_in, rows_out, busy_ms)},
    )


def metrics() -> Metrics:
    return Metrics("job", "flow", "local", {"counts": ("keyed", ("counts", "out"))})


def test_input_and_execution_speed_over_the_window() -> None:
    m = metrics()
    m.stage_done("counts", 1, [report(0, 1000, 100, 200.0), report(1, 3000, 300, 200.0)], now=10.0)
    m.stage_done("counts", 2, [report(0, 2000, 200, 300.0), report(1, 2000, 200, 300.0)], now=12.0)
    (stage,) = m.status(controller(counts=2), now=14.0).operators
    assert (stage.rows_in, stage.rows_out) == (8000, 800)
    assert stage.rows_in_s == pytest.approx(2000.0)  # 8,000 rows in the 4 s since the first sample
    assert stage.rows_out_s == pytest.approx(200.0)
    assert stage.busy == pytest.approx(1.0 / (4.0 * 2))  # 1,000 ms of the 8 s that two instances had
    assert stage.state_rows == 20


def test_old_samples_leave_the_window_and_totals_stay() -> None:
    m = metrics()
    m.stage_done("counts", 1, [report(0, 1000, 100, 200.0)], now=0.0)
    m.stage_done("counts", 2, [report(0, 500, 50, 100.0)], now=WINDOW_S + 5)
    (stage,) = m.status(controller(counts=1), now=WINDOW_S + 6).operators
    assert stage.rows_in == 1500
    assert stage.rows_in_s == pytest.approx(500.0)


def test_an_epoch_that_runs_again_is_counted_once() -> None:
    m = metrics()
    m.stage_done("counts", 1, [report(0, 1000, 100, 200.0)], now=1.0)
    m.published(1, 1000, 1.5, {})
    m.stage_done("counts", 1, [report(0, 1000, 100, 200.0)], now=2.0)
    m.published(1, 1000, 2.5, {})
    status = m.status(controller(counts=1), now=3.0)
    assert (status.rows, status.operators[0].rows_in) == (1000, 1000)
    assert status.steps == ({"id": "counts", "rows_in": 1000, "rows_out": 100, "busy_ms": 200.0},)
