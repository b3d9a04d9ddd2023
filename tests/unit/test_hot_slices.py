"""Hot slices: measured by rows, spread by load, and reported with their keys when no move helps."""

from __future__ import annotations

import math
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest

import penstock as ps
from penstock.config import Config
from penstock.connectors.sinks import MemorySink
from penstock.control.events import (
    HotSlices,
    MoveRequested,
    RebalanceRequested,
    RescaleRequested,
)
from penstock.control.load import FLOOR, LOAD_EPOCHS, ROWS_MIN, SliceLoad, shares
from penstock.control.policies import Decision, Move, Observation
from penstock.control.policies import Ring as RingPolicy
from penstock.control.records import TaskReport
from penstock.engines import runtime as runtime_module
from penstock.engines.hot import KEYS_MAX, SAMPLE_ROWS, hottest_keys, rows_by_slice
from penstock.engines.job import start
from penstock.engines.runtime import Runtime
from penstock.observe import metrics as metrics_module
from penstock.observe.journal_codec import from_json, to_json
from penstock.observe.metrics import Metrics
from penstock.observe.report import status_lines
from penstock.observe.status import JobStatus, hot_text
from penstock.operators.base import HASH
from penstock.state.hashing import hash_columns
from penstock.state.slicemap import SliceMap
from penstock.testing import rows as given
from tests.unit.test_controller import COUNT, IN, WIN
from tests.unit.test_migration import Fleet, fleet

# -- what a container measures -----------------------------------------------------------------------------------------


def hashed(words: list[Any]) -> pl.DataFrame:
    frame = pl.DataFrame({"word": words})
    return frame.with_columns(pl.Series(HASH, hash_columns(frame, ["word"]), dtype=pl.UInt64))


def test_rows_of_each_slice_are_counted() -> None:
    frames = [hashed([f"w{i % 50}" for i in range(400)]), hashed(["w1"] * 100), hashed([])]
    expected = Counter(s for f in frames for s in SliceMap(16).of(f[HASH].to_numpy()).tolist())
    assert {s: int(n) for s, n in enumerate(rows_by_slice(frames, SliceMap(16), 1)) if n} == dict(expected)


def test_of_many_rows_a_sample_is_enough() -> None:
    """Keys that come in turn: every n-th row would be the same key."""
    words = [f"w{i % 64}" for i in range(20 * SAMPLE_ROWS)]
    frame = hashed(words)
    exact = np.bincount(SliceMap(8).of(frame[HASH].to_numpy()), minlength=8)
    found = rows_by_slice([frame], SliceMap(8), 7)
    assert found.sum() == pytest.approx(len(words))
    assert np.allclose(found, exact, rtol=0.1)
    assert (rows_by_slice([frame], SliceMap(8), 7) == found).all(), "the same epoch, the same figures"


def test_the_hottest_keys_of_a_slice_by_rows() -> None:
    frames = [hashed(["hot"] * 60 + [f"w{i}" for i in range(200)]), hashed(["hot"] * 20 + ["warm"] * 5)]
    number = int(SliceMap(4).of(frames[0][HASH].to_numpy()[:1])[0])
    here = sum(int((SliceMap(4).of(f[HASH].to_numpy()) == number).sum()) for f in frames)
    keys = hottest_keys(frames, ["word"], SliceMap(4), number, 1)
    assert keys[0] == ("hot", round(80 / here, 4)) and len(keys) == KEYS_MAX
    assert hottest_keys([hashed([])], ["word"], SliceMap(4), 0, 1) == []
    assert hottest_keys(frames, [], SliceMap(4), 0, 1) == [], "without a key there is only one"
    assert len(hottest_keys([hashed(["x" * 500])], ["word"], SliceMap(1), 0, 1)[0][0]) == 80


# -- what the controller makes of it -----------------------------------------------------------------------------------


def reports(*loads: dict[int, int], stage: str = COUNT) -> list[TaskReport]:
    return [TaskReport(stage=stage, epoch=4, attempt=1, index=i, load=load) for i, load in enumerate(loads)]


def test_load_is_rows_a_second_and_smooth() -> None:
    load = SliceLoad()
    load.note(COUNT, reports({0: 10_000, 1: 5}), 1.0)
    assert load.of(COUNT, 4) is None, "over what time these came is not known"
    load.note(COUNT, reports({0: 600}, {1: 200}), 3.0)
    assert load.of(COUNT, 4) == [300.0, 100.0, 0.0, 0.0]
    load.note(COUNT, reports({1: 800}), 5.0)
    first, second, *_ = load.of(COUNT, 4) or []
    assert 200 < first < 300 and 100 < second < 400
    assert load.weights(COUNT, 4) == pytest.approx([x + FLOOR * (first + second) / 4 for x in (first, second, 0, 0)])
    load.forget()
    load.note(COUNT, reports({0: 10**9}), 1000.0)
    assert (load.of(COUNT, 4) or [])[0] == first, "a recovery lies in between"


def test_few_rows_say_nothing() -> None:
    load = SliceLoad()
    load.note(COUNT, reports({0: 1}), 1.0)
    load.note(COUNT, reports({0: 4 * ROWS_MIN - 1}), 2.0)
    assert load.of(COUNT, 4) is None
    load.note(COUNT, reports({0: 1}), 3.0)
    assert load.of(COUNT, 4) is not None
    load.note(COUNT, reports({}), 4.0)


def test_the_time_of_a_container_is_shared_out_by_rows() -> None:
    assert shares([30.0, 10.0, 5.0, 0.0], [0, 0, 1, 2], {0: 0.8, 1: 0.1, 2: 0.5}) == pytest.approx([0.6, 0.2, 0.1, 0])


def loaded(d: Fleet, rates: list[int]) -> None:
    for at in (1.0, 2.0):
        d.controller.balance.load.note(COUNT, reports(dict(enumerate(rates))), d.now + at)


@pytest.mark.parametrize(("schedule", "alone"), [("load", True), ("round_robin", False)])
def test_slices_are_spread_by_load_not_by_number(schedule: str, alone: bool) -> None:
    d = fleet("a", "b", schedule=schedule)
    rates = [9000, 1000, 1000, 1000, 1000, 1000, 1000, 1000]
    loaded(d, rates)
    d.step(RebalanceRequested(now=d.now))
    d.epoch()
    d.until(lambda: not d.controller.moves.by_slice)
    owners = d.controller.routes.table.owners[COUNT]
    sums = Counter({c: sum(r for r, o in zip(rates, owners, strict=True) if o == c) for c in set(owners)})
    assert (max(sums.values()) <= 9000) == alone
    assert Counter(d.controller.routes.table.owners[WIN]) == {0: 4, 1: 4}, "nothing was measured of the other stage"


def test_owners_of_hot_slices_are_asked_for_their_keys_now_and_then() -> None:
    d = fleet("a", "b")
    d.step(HotSlices(now=d.now, slices={COUNT: (3,)}))
    for _ in range(2 * LOAD_EPOCHS):
        d.epoch()
    asked = {e: run.hot for (e, stage), run in d.runs.items() if stage == COUNT}
    assert all(hot == ((3,) if e > 1 and e % LOAD_EPOCHS == 0 else ()) for e, hot in asked.items()) and any(
        asked.values()
    )
    assert not any(run.hot for (_, stage), run in d.runs.items() if stage in (IN, WIN))
    d.step(HotSlices(now=d.now, slices={}))
    for _ in range(LOAD_EPOCHS):
        assert not d.runs[d.epoch(), COUNT].hot
    event = HotSlices(now=1.0, slices={COUNT: (3, 5)})
    assert from_json(to_json(event)) == event


# -- neighbour to neighbour --------------------------------------------------------------------------------------------


def seen(owners: list[int], busy: dict[int, float], load: list[float], **more: Any) -> Observation:
    return Observation(
        now=0.0,
        rows_in_s=100.0,
        rows_s=100.0,
        queue={"counts": 2},
        busy={"counts": 0.9},
        busy_containers={("counts", c): b for c, b in busy.items()},
        load={("counts", s): x for s, x in enumerate(load)},
        instances={"counts": max(owners) + 1},
        owners={"counts": owners},
        cores=8,
        **more,
    )


def test_the_ring_leaves_a_slice_that_is_too_hot_and_moves_the_others() -> None:
    # Slice 3 is at the end that is given away first, and would overload the neighbour as it overloads this one.
    decision = RingPolicy().decide(seen([0, 0, 0, 0, 1, 1], {0: 0.95, 1: 0.2}, [1, 1, 1, 9, 1, 1]))
    assert decision.kind == "move" and {m.slice for m in decision.moves} <= {0, 1, 2} and decision.moves


def test_the_ring_takes_only_containers_that_may_work() -> None:
    crowded = seen([0, 0, 3, 3], {0: 0.95, 3: 0.95}, [1, 1, 1, 1], usable={"counts": [0, 2, 3]})
    assert {m.target for m in RingPolicy().decide(crowded).moves} == {2}
    full = seen([0, 0, 3, 3], {0: 0.95, 3: 0.95}, [1, 1, 1, 1], usable={"counts": [0, 3]})
    assert {m.target for m in RingPolicy().decide(full).moves} == {4}
    held = seen([0, 0, 3, 3], {0: 0.95, 3: 0.95}, [1, 1, 1, 1], usable={"counts": [0, 3]}, slots=2)
    assert RingPolicy().decide(held).kind == "nothing"


class Says:
    name = "says"

    def __init__(self, decision: Decision) -> None:
        self.decision = decision

    def decide(self, seen: Observation) -> Decision:
        return self.decision


def considered(d: Fleet, decision: Decision) -> list[Any]:
    """What the runtime posts for a decision."""
    posted: list[Any] = []
    fake = SimpleNamespace(
        controller=d.controller,
        metrics=SimpleNamespace(busy_containers=lambda status: {}),
        status=lambda: JobStatus("j", "f", "sim", "running"),
        config=Config(),
        notices=[],
        policy_said=None,
        asking=0,
        ask_again_at=math.inf,
        post=posted.append,
    )
    fake._move = lambda *a: Runtime._move(fake, *a)  # type: ignore[arg-type]
    Runtime._consider(fake, Says(decision), d.now)  # type: ignore[arg-type]
    return posted


def half(*slices: int, source: int, target: int, instances: int) -> Decision:
    moves = tuple(Move(COUNT, s, source, target) for s in slices)
    return Decision("rescale", "hot", stage=COUNT, instances={COUNT: instances}, moves=moves)


def test_a_new_container_takes_half_an_arc_and_no_other_slice_moves() -> None:
    d = fleet("a", "b")
    assert d.controller.routes.table.owners[COUNT] == (0, 0, 0, 0, 1, 1, 1, 1)
    (asked,) = considered(d, half(2, 3, source=0, target=2, instances=3))
    assert asked == RescaleRequested(now=d.now, stage=COUNT, instances=3, targets={2: 2, 3: 2})
    d.step(asked)
    d.epoch()
    d.until(lambda: not d.controller.moves.by_slice and not d.controller.balance.waiting)
    assert d.controller.routes.table.owners[COUNT] == (0, 0, 2, 2, 1, 1, 1, 1)


def test_the_neighbour_takes_a_whole_arc_and_the_last_container_goes() -> None:
    d = fleet("a", "b", "c", "d")
    (asked,) = considered(d, half(6, 7, source=3, target=0, instances=3))
    assert asked == RescaleRequested(now=d.now, stage=COUNT, instances=3, targets={6: 0, 7: 0})
    d.step(asked)
    d.epoch()
    d.until(lambda: not d.controller.moves.by_slice and not d.controller.resizes.wanted)
    assert d.controller.routes.table.owners[COUNT] == (0, 0, 1, 1, 2, 2, 0, 0)
    assert d.controller.routes.table.instances[COUNT] == 3
    (asked,) = considered(d, half(2, 3, source=1, target=2, instances=2))
    assert isinstance(asked, MoveRequested) and asked.targets == {2: 2, 3: 2}, "one in the middle stays, vacant"


# -- what people see --------------------------------------------------------------------------------------------------


def hot_metrics(share: float, busy_ms: float = 1000.0) -> tuple[Metrics, Any]:
    """Ten seconds in which the containers of a stage worked; slice 3 has this share of the rows of container 1."""
    m = Metrics("j", "f", "sim", {"count": ("keyed", ("count",))})
    owners = (0, 0, 1, 1)
    rates = [10.0, 10.0, 100.0 * (1 - share), 100.0 * share]
    controller = SimpleNamespace(
        routes=SimpleNamespace(
            table=SimpleNamespace(
                owners={COUNT: owners}, instances={COUNT: 2}, slices_in=lambda stage: 4, slices_most=4, version=1
            )
        ),
        balance=SimpleNamespace(load=SimpleNamespace(of=lambda stage, slices: rates)),
        epochs=SimpleNamespace(in_flight={}, published=0),
        watermarks=SimpleNamespace(marks={}),
        phase="running",
        checkpoints=SimpleNamespace(committed=0),
        attempts=SimpleNamespace(recoveries=0),
    )
    for epoch in range(1, 11):
        m.stage_done(
            "count",
            epoch,
            [
                TaskReport(stage="count", epoch=epoch, attempt=1, index=c, busy_ms=ms)
                for c, ms in ((0, 50.0), (1, busy_ms))
            ],
            epoch,
        )
    return m, controller


def test_a_slice_too_hot_for_one_container_is_reported_with_its_keys() -> None:
    m, controller = hot_metrics(0.9)
    assert m.find_hot(controller, 10.5) == {COUNT: (3,)}
    assert [(h["slice"], h["container"], h["keys"]) for h in m.hot] == [(3, 1, [])] and not m.notices
    m.stage_done(
        "count",
        12,
        [TaskReport(stage="count", epoch=12, attempt=1, index=1, busy_ms=1000.0, keys={3: [("the", 0.7), ("a", 0.1)]})],
        11,
    )
    m.find_hot(controller, 11.0)
    status = m.status(controller, 11.0)
    assert status.hot[0]["keys"] == [["the", 0.7], ["a", 0.1]] and status.hot[0]["share"] > 0.8
    assert JobStatus.from_dict(status.to_dict()) == status
    assert len(m.notices) == 1 and "'the' 70%" in m.notices[0]
    m.find_hot(controller, 11.1)
    assert len(m.notices) == 1, "said once"
    lines = [line for line in status_lines(status, {}) if "hot:" in line]
    assert lines == [f"  hot: {hot_text(status.hot[0])}"]


@pytest.mark.parametrize(("share", "busy_ms"), [(0.5, 1000.0), (0.9, 300.0)])
def test_what_a_move_could_help_or_nobody_suffers_from_is_not_reported(share: float, busy_ms: float) -> None:
    m, controller = hot_metrics(share, busy_ms)
    assert m.find_hot(controller, 10.5) == {} and m.hot == ()


def test_a_slice_that_cools_down_is_forgotten_but_not_at_once() -> None:
    m, controller = hot_metrics(0.9)
    m.find_hot(controller, 10.5)
    m.hot_keys["count", 3] = [["the", 0.7]]
    cooler, other = hot_metrics(0.55)
    assert cooler.find_hot(other, 10.5) == {}, "it would not have been found like this"
    controller.balance.load = other.balance.load
    assert m.find_hot(controller, 10.5) == {COUNT: (3,)}
    controller.balance.load = SimpleNamespace(of=lambda stage, slices: [10.0, 10.0, 60.0, 40.0])
    assert m.find_hot(controller, 10.5) == {} and not m.hot_keys


class Each(ps.Operator):
    """Every row counts: nothing is summed up before the exchange."""

    def on_event(self, key: Any, event: Any, n: ps.Value[int], emit: Any) -> None:
        n.set(n.get(0) + 1)
        emit(n=n.get())


def test_a_job_finds_its_hot_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "HOT_SHARE", 0.02)  # on one thread nobody has all the time
    monkeypatch.setattr(runtime_module, "POLICY_S", 0.0)
    words = ["hot" if i % 4 else f"w{i % 101}" for i in range(4000)]
    flow, sink = ps.Flow("skewed"), MemorySink()
    source = flow.source("in", given([{"word": w} for w in words]))
    source.key_by("word").process("each", Each(), schema={"n": pl.Int64}).sink("out", sink)
    held: list[Any] = []
    ready = threading.Event()
    found: list[Any] = []

    def trip(step: str) -> None:
        if step == "after-publish":
            ready.wait()
            found.extend(h for h in held[0].status().hot if h["keys"])

    config = ps.Config(instances=2, slices=8, epoch_rows=100, control=False)
    job = start(flow, engine="local", config=config, trip=trip)
    held.append(job)
    ready.set()
    assert job.wait(60)
    assert found, "it was never reported"
    number = int(SliceMap(8).of(hash_columns(pl.DataFrame({"word": ["hot"]}), ["word"]))[0])
    last = [h for h in found if h["slice"] == number][-1]
    assert last["stage"] == "each" and last["keys"][0][0] == "hot" and last["keys"][0][1] > 0.7
    rates = job._runtime.controller.balance.load.of("each", 8)  # type: ignore[union-attr]
    assert rates is not None and rates[number] == max(rates) and rates[number] > 0.7 * sum(rates)
    assert any("slice" in notice and "'hot'" in notice for notice in job.notices)
