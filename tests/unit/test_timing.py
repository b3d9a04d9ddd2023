"""Watermarks of stages, worked out from reports."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.control.records import FOREVER, NEVER
from penstock.control.timing import behind, time_of
from penstock.control.topology import StageInfo
from penstock.ids import StageId

IN, ALSO, KEYED, WIN = map(StageId, ("in", "also", "keyed", "win"))
SOURCE = StageInfo(IN, True, False, False, 0, 0, ())
OTHER = StageInfo(ALSO, True, False, False, 0, 0, ())
UNTIMED = StageInfo(KEYED, False, True, False, 0, 0, (IN,))
TIMED = StageInfo(KEYED, False, True, True, 0, 7, (IN,))


@dataclass
class Report:
    time_max: dict[str, int] = field(default_factory=dict)


def test_each_task_starts_from_what_those_before_it_have_seen() -> None:
    stage = StageInfo(WIN, False, True, True, 5, 0, (IN,))
    reports = {IN: [Report({WIN: 100}), Report(), Report({WIN: 90}), Report({WIN: 120})]}
    time = time_of(stage, {IN: SOURCE}, {"in>win": 40}, 35, {}, reports, final=False, clock_ms=0)
    assert time.arrivals == {IN: [35, 95, 95, 95]}
    assert (time.before, time.watermark, time.clocks) == (35, 115, {"in>win": 120})


def test_behind_a_keyed_stage_without_time_the_greatest_time_before_the_epoch_is_told() -> None:
    stage = StageInfo(WIN, False, True, True, 5, 0, (KEYED,))
    given = {KEYED: [Report({WIN: 50}), Report({WIN: 30})]}
    time = time_of(stage, {KEYED: UNTIMED}, {"keyed>win": 20}, 15, {}, given, final=False, clock_ms=0)
    assert (time.arrivals[KEYED][0], time.watermark) == (15, 45)


def test_behind_a_keyed_stage_with_time_its_watermark_counts_less_what_rows_may_lie_behind() -> None:
    stage = StageInfo(WIN, False, True, True, 5, 0, (KEYED,))
    time = time_of(stage, {KEYED: TIMED}, {}, NEVER, {KEYED: 100}, {KEYED: [Report()]}, final=False, clock_ms=0)
    assert (time.watermark, time.arrivals) == (100 - 7 - 5, {})


def test_the_slowest_input_counts_and_the_end_closes_all() -> None:
    stage = StageInfo(WIN, False, True, True, 0, 0, (IN, ALSO), (0, 1))
    ups = {IN: SOURCE, ALSO: OTHER}
    reports = {IN: [Report({WIN: 10})], ALSO: [Report({"win#1": 4})]}
    time = time_of(stage, ups, {}, NEVER, {}, reports, final=False, clock_ms=0)
    assert (time.watermark, time.ports) == (4, ((NEVER, 10), (NEVER, 4)))
    last = {IN: [Report()], ALSO: [Report()]}
    over = time_of(stage, ups, time.clocks, time.watermark, {}, last, final=True, clock_ms=0)
    assert (over.before, over.watermark, over.ports) == (4, FOREVER, ((10, FOREVER), (4, FOREVER)))
    assert behind(NEVER, 3) == NEVER and behind(FOREVER, 3) == FOREVER and behind(5, 3) == 2


def test_the_clock_never_goes_back() -> None:
    stage = StageInfo(WIN, False, True, True, 0, 0, (IN,), clocked=True)
    assert time_of(stage, {IN: SOURCE}, {}, 5_000, {}, {}, final=False, clock_ms=4).watermark == 5_000
    assert time_of(stage, {IN: SOURCE}, {}, 5_000, {}, {}, final=False, clock_ms=6).watermark == 6_000
