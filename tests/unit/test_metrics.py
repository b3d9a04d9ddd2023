"""Rates of each operator over a sliding window, from control records alone (S1)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.control.records import TaskReport
from penstock.observe.metrics import WINDOW_S, Metrics


def controller(**routing: int) -> Any:
    return SimpleNamespace(
        routes=SimpleNamespace(table=SimpleNamespace(instances=routing, slices_most=64, version=1)),
        epochs=SimpleNamespace(in_flight={}, published=2),
        watermarks=SimpleNamespace(marks={}),
        phase="running",
        checkpoints=SimpleNamespace(committed=1),
        attempts=SimpleNamespace(recoveries=0),
    )


def report(index: int, rows_in: int, rows_out: int, busy_ms: float) -> TaskReport:
    return TaskReport(
        stage="counts",
        epoch=1,
        attempt=1,
        index=index,
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


def epochs_of(m: Metrics, busy_ms: dict[int, float], epochs: int = 20, rows: dict[int, int] | None = None) -> None:
    first = m.counted_through + 1
    for epoch in range(first, first + epochs):
        reports = [report(c, (rows or {}).get(c, 100), 10, ms) for c, ms in busy_ms.items()]
        for r in reports:
            r.node = f"node-{r.index}"
        m.stage_done("counts", epoch, reports, now=float(epoch))
        m.published(epoch, 100, float(epoch), {})


def test_a_container_that_the_others_wait_for_is_named_once() -> None:
    m = metrics()
    epochs_of(m, {0: 30.0, 1: 28.0, 2: 90.0, 3: 31.0})
    status = m.status(controller(counts=4), now=30.0)
    assert status.stragglers == (
        {"stage": "counts", "container": 2, "node": "node-2", "times_slower": 3.0, "times_rows": 1.0},
    )
    epochs_of(m, {0: 30.0, 1: 28.0, 2: 90.0, 3: 31.0})
    assert m.notices == [
        "container 2 of 'counts' on node-2 takes 3 times as long as the others, with no more rows than the others."
    ]
    epochs_of(m, {0: 30.0, 1: 28.0, 2: 30.0, 3: 31.0})
    assert m.status(controller(counts=4), now=99.0).stragglers == ()


def test_skew_is_told_apart_from_a_slow_machine() -> None:
    m = metrics()
    epochs_of(m, {0: 30.0, 1: 90.0}, rows={0: 100, 1: 300})
    assert [(s["container"], s["times_slower"], s["times_rows"]) for s in m.stragglers] == [(1, 3.0, 3.0)]
    assert m.notices[0].endswith("with 3 times the rows.")


@pytest.mark.parametrize(
    "busy_ms",
    [
        {0: 1.0, 1: 1.0, 2: 19.0},  # nobody notices
        {0: 30.0, 1: 30.0, 2: 59.0},
        {0: 90.0},
    ],
    ids=["small", "not twice", "alone"],
)
def test_no_straggler(busy_ms: dict[int, float]) -> None:
    m = metrics()
    epochs_of(m, busy_ms)
    assert m.stragglers == () and m.notices == []


def test_one_slow_epoch_makes_no_straggler_and_few_say_nothing() -> None:
    m = metrics()
    epochs_of(m, {0: 30.0, 1: 900.0}, epochs=4)
    assert m.stragglers == ()
    epochs_of(m, {0: 30.0, 1: 30.0}, epochs=8)
    assert m.stragglers == ()


def test_a_container_that_is_gone_is_no_straggler() -> None:
    m = metrics()
    epochs_of(m, {0: 30.0, 1: 28.0, 2: 90.0})
    assert m.stragglers
    epochs_of(m, {0: 30.0, 1: 28.0}, epochs=1)
    assert m.stragglers == ()


def test_splits_of_a_source_are_no_containers() -> None:
    m = Metrics("job", "flow", "local", {"counts": ("source", ("counts",))})
    epochs_of(m, {0: 30.0, 1: 90.0})
    assert m.stragglers == ()
