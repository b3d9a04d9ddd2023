"""Offered load: worked examples of capacity, offered rate, selectivity, queues and the three shares."""

from __future__ import annotations

import pytest

from penstock.control.offered import (
    ARRIVAL_S,
    WINDOW_S,
    Arrived,
    RateWindow,
    Shares,
    Work,
    arrival,
    capacity,
    offered,
    selectivities,
    shared_out,
    split,
)
from penstock.control.records import TaskReport


def report(
    stage: str, epoch: int, index: int, rows: int, busy_ms: float, sent: dict[str, list[int]] | None = None
) -> TaskReport:
    return TaskReport(
        stage=stage,
        epoch=epoch,
        attempt=1,
        index=index,
        rows_in=rows,
        rows_out=rows,
        busy_ms=busy_ms,
        bytes_out=sent or {},
    )


# -- pure functions ----------------------------------------------------------------------------------------------------


def test_capacity_is_rows_by_busy_time_summed_over_containers() -> None:
    work = {0: Work(1000, 0.5), 1: Work(300, 0.1)}
    assert capacity(work, [0, 1]) == pytest.approx(2000 + 3000)
    assert capacity(work, [0]) == pytest.approx(2000), "a container that owns nothing any more does not count"
    assert capacity(work, [0, 1, 2]) == pytest.approx(7500), "a new one counts as the mean of the others"
    assert capacity(work, [2, 3]) == pytest.approx(5000), "also where all are new"
    assert capacity({0: Work(0, 0.2), 1: Work(10, 0.0)}, [0, 1]) is None, "nobody's speed is known"
    assert capacity({}, [0]) is None


CHAIN = {"in": (), "parse": ("in",), "count": ("parse",)}


def test_what_is_offered_is_what_the_stages_before_can_pass_on() -> None:
    """1,000 rows arrive in a second; each gives 2 words; half of the words are counted."""
    selectivity = {("in", "parse"): 2.0, ("parse", "count"): 0.5}
    free = offered(CHAIN, {"in": 1000.0}, {"in": None, "parse": 5000.0, "count": 100.0}, selectivity)
    assert free == {"in": 1000.0, "parse": 2000.0, "count": 1000.0}, "a slow stage is offered all the same"
    tight = offered(CHAIN, {"in": 1000.0}, {"in": 400.0, "parse": 600.0, "count": 9e9}, selectivity)
    assert tight == {"in": 1000.0, "parse": 800.0, "count": 300.0}, "and passes on no more than its capacity"


def test_several_inputs_are_added() -> None:
    inputs = {"a": (), "b": (), "join": ("a", "b")}
    selectivity = {("a", "join"): 1.0, ("b", "join"): 3.0}
    found = offered(inputs, {"a": 100.0, "b": 10.0}, {"a": None, "b": 5.0}, selectivity)
    assert found["join"] == pytest.approx(100 + 15)
    assert offered(inputs, {"a": 100.0}, {}, {})["join"] == 0.0, "an edge that was never measured passes nothing on"


def test_selectivity_of_several_inputs_is_told_apart_by_bytes() -> None:
    found = selectivities(("a", "b"), {"a": 100, "b": 50}, {"a": 3000, "b": 1000}, 400)
    assert found == {"a": pytest.approx(3.0), "b": pytest.approx(2.0)}
    assert selectivities(("a",), {"a": 0}, {}, 10) == {}
    assert selectivities(("a",), {"a": 10}, {}, 10) == {"a": 1.0}


@pytest.mark.parametrize(
    ("busy", "held", "expected"),
    [
        (0.25, 0.5, Shares(0.25, 0.5, 0.25)),
        (0.8, 0.9, Shares(0.8, pytest.approx(0.2), pytest.approx(0.0))),
        (1.7, 0.3, Shares(1.0, 0.0, 0.0)),
        (-0.1, -0.1, Shares(0.0, 0.0, 1.0)),
    ],
)
def test_the_shares_add_up_to_one(busy: float, held: float, expected: Shares) -> None:
    found = split(busy, held)
    assert found == expected
    assert found.busy + found.back_pressured + found.idle == pytest.approx(1.0)


def test_arrivals_are_what_was_read_and_what_the_backlog_grew_by() -> None:
    found = arrival([Arrived(0.0, 0, 100), Arrived(2.0, 300, 500)])
    assert found is not None and found.rows_s == pytest.approx((300 + 400) / 2)
    assert arrival([Arrived(0.0, 0, 0)]) is None and arrival([]) is None
    assert arrival([Arrived(1.0, 0, 0), Arrived(1.0, 5, 0)]) is None, "there is no time between them"
    unknown = arrival([Arrived(0.0, 0, None), Arrived(2.0, 300, None)])
    assert unknown is not None and (unknown.rows_s, unknown.growing) == (150.0, False)


def test_a_backlog_that_goes_up_and_down_with_the_epochs_does_not_grow() -> None:
    """100 rows come in a second; every second an epoch takes them all."""
    saw = [Arrived(t / 2, 100 * (t // 2), 50 * (t % 2)) for t in range(9)]
    found = arrival(saw)
    assert found is not None and found.rows_s == pytest.approx(100.0) and not found.growing
    behind = arrival([Arrived(look.at, look.planned, 40 * t) for t, look in enumerate(saw)])
    assert behind is not None and behind.growing and behind.growth_s == pytest.approx(80.0)
    ahead = arrival([Arrived(look.at, look.planned, 400 - 40 * t) for t, look in enumerate(saw)])
    assert ahead is not None and not ahead.growing and ahead.growth_s < 0


def test_a_load_that_has_just_risen_counts_as_it_is_now() -> None:
    """100 rows come in a second, then 400; the job reads 100 in a second."""
    risen = [Arrived(float(t), 100 * t, 300 * max(0, t - 2)) for t in range(5)]
    found = arrival(risen)
    assert found is not None and found.growing and found.rows_s == pytest.approx(400.0)
    burst = [Arrived(float(t), 100 * t + 600 * (t > 2), 0) for t in range(5)]
    found = arrival(burst)
    assert found is not None and not found.growing and found.rows_s == pytest.approx(250.0), "it was read at once"


def test_a_source_that_begins_to_tell_has_no_sudden_arrivals() -> None:
    found = arrival([Arrived(0.0, 0, None), Arrived(1.0, 0, 1000), Arrived(2.0, 100, 900)])
    assert found is not None and found.rows_s == 0.0


def test_rows_are_shared_out_by_bytes() -> None:
    assert shared_out(100.0, [300, 0, 100]) == {0: 75, 2: 25}
    assert shared_out(100.0, [0, 0]) == {} and shared_out(100.0, []) == {}


# -- the window --------------------------------------------------------------------------------------------------------

FLOW = {"in": (), "count": ("in",)}
WORKING = {"in": [0], "count": [0, 1]}


def one_epoch(window: RateWindow, epoch: int, at: float, *, rows: int = 1000, busy_ms: float = 400.0) -> None:
    """Planned at ``at``, read 0.1 s later, counted 0.9 s later. Two of three bytes go to container 0."""
    window.planned(epoch, {"in": rows}, at)
    window.stage_done("in", epoch, 1, [report("in", epoch, 0, rows, 50.0, {"count": [200, 100]})], at + 0.1)
    counted = [report("count", epoch, c, rows // 4, busy_ms) for c in (0, 1)]
    window.stage_done("count", epoch, 1, counted, at + 0.9)
    window.published(epoch, at + 0.9)


def test_the_load_that_is_offered_shows_while_back_pressure_holds_the_source_back() -> None:
    """3,000 rows arrive in a second, 1,000 are processed. Each row gives half a row, and 1,250 of those can be counted
    in a second: by two containers that need 0.4 s for 250 each."""
    window = RateWindow(FLOW)
    for epoch in range(8):
        window.looked("in", Arrived(float(epoch), 1000 * epoch, 2000 * epoch), took=1000)
        one_epoch(window, epoch + 1, float(epoch))
    rates = window.rates(8.0, WORKING)
    assert rates["in"].offered_s == pytest.approx(3000.0)
    assert rates["count"].selectivity == {"in": pytest.approx(0.5)}
    assert rates["count"].capacity_s == pytest.approx(1250.0)
    assert rates["count"].offered_s == pytest.approx(1500.0)
    assert rates["count"].rows_in_s == pytest.approx(4000 / 7.1), "since the first of eight epochs was done"
    found = window.arrivals(8.0)["in"]
    assert found.growing and found.growth_s == pytest.approx(2000.0)
    # From 0.1 s to 0.9 s of every second the source has nothing to do and rows left over, but for the first second.
    assert rates["in"].shares.back_pressured == pytest.approx(7 * 0.8 / 8)
    assert rates["count"].shares.back_pressured == 0.0, "nothing behind it holds anything back"
    for stage in rates.values():
        assert stage.shares.busy + stage.shares.back_pressured + stage.shares.idle == pytest.approx(1.0)


def test_a_stage_in_the_middle_is_held_back_by_one_behind_it_and_idle_behind_a_slow_one() -> None:
    inputs = {"in": (), "fast": ("in",), "slow": ("fast",), "last": ("slow",)}
    window = RateWindow(inputs)
    window.looked("in", Arrived(0.0, 100, 900), took=100)
    window.planned(1, {"in": 100}, 0.0)
    for at, stage in ((1.0, "in"), (2.0, "fast"), (10.0, "slow")):
        window.stage_done(stage, 1, 1, [report(stage, 1, 0, 100, 10.0)], at)
    rates = window.rates(10.0, {s: [0] for s in inputs})
    assert [round(rates[s].shares.back_pressured, 2) for s in inputs] == [0.9, 0.8, 0.0, 0.0]


def test_a_job_without_anything_left_over_is_idle() -> None:
    window = RateWindow(FLOW)
    for epoch in range(8):
        window.looked("in", Arrived(float(epoch), 1000 * epoch, 50), took=1000)
        one_epoch(window, epoch + 1, float(epoch), busy_ms=40.0)
    rates = window.rates(8.0, WORKING)
    assert {s: r.shares.back_pressured for s, r in rates.items()} == {"in": 0.0, "count": 0.0}
    assert rates["count"].shares.idle > 0.9


def test_a_source_that_cannot_tell_is_held_back_while_its_plans_are_full() -> None:
    for full, expected in ((True, 0.9), (False, 0.0)):
        window = RateWindow(FLOW)
        window.looked("in", Arrived(0.0, 100, None), took=100, full=full)
        window.planned(1, {"in": 100}, 0.0)
        window.stage_done("in", 1, 1, [report("in", 1, 0, 100, 10.0)], 1.0)
        rates = window.rates(10.0, WORKING)
        window.stage_done("count", 1, 1, [report("count", 1, 0, 100, 10.0)], 10.0)
        rates = window.rates(10.0, WORKING)
        assert rates["in"].shares.back_pressured == pytest.approx(expected)
        assert window.backlog() == {"in": None}


def test_rows_on_their_way_are_the_queue_of_their_container() -> None:
    window = RateWindow(FLOW)
    one_epoch(window, 1, 0.0)
    window.planned(2, {"in": 1200}, 1.0)
    window.stage_done("in", 2, 1, [report("in", 2, 0, 1200, 50.0, {"count": [200, 100]})], 1.1)
    assert window.rates(1.5, WORKING)["count"].queue_rows == {0: 400, 1: 200}
    window.stage_done("count", 2, 1, [report("count", 2, c, 300, 50.0) for c in (0, 1)], 1.9)
    assert window.rates(2.0, WORKING)["count"].queue_rows == {}


def test_after_a_failure_what_was_done_is_to_be_done_again() -> None:
    window = RateWindow(FLOW)
    one_epoch(window, 1, 0.0)
    window.planned(2, {"in": 1200}, 1.0)
    window.stage_done("in", 2, 1, [report("in", 2, 0, 1200, 50.0, {"count": [200, 100]})], 1.1)
    window.planned(3, {"in": 1200}, 1.2)
    window.stage_done("in", 3, 2, [report("in", 3, 0, 1200, 50.0, {"count": [100, 0]})], 2.1)
    assert window.rates(2.5, WORKING)["count"].queue_rows == {0: 600}, "what epoch 2 had sent is gone"


def test_old_records_leave_the_window() -> None:
    window = RateWindow(FLOW)
    window.looked("in", Arrived(0.0, 0, 0), took=0)
    one_epoch(window, 1, 0.0)
    rates = window.rates(WINDOW_S + 2, WORKING)
    assert rates["count"].rows_in_s == 0.0 and rates["count"].capacity_s is None
    assert rates["count"].shares == Shares(0.0, 0.0, 1.0)
    for at in (0.0, 1.0, 20.0, 20.0 + ARRIVAL_S):
        window.looked("in", Arrived(at, round(100 * at), 0))
    assert window.arrivals(20.0 + ARRIVAL_S)["in"].rows_s == pytest.approx(100.0)


def test_estimates_of_a_plan_are_set_right_by_what_was_read() -> None:
    """A text file of short lines: the plan says 500 rows, 1,000 are read."""
    window = RateWindow(FLOW)
    for epoch in range(4):
        window.looked("in", Arrived(float(epoch), 500 * epoch, 0), took=500)
        window.planned(epoch + 1, {"in": 500}, float(epoch))
        window.stage_done("in", epoch + 1, 1, [report("in", epoch + 1, 0, 1000, 50.0)], epoch + 0.5)
    assert window.arrivals(4.0)["in"].rows_s == pytest.approx(1000.0)
