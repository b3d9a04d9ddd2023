"""The cores of a node: how many containers work there, who gets their slices, and what is refused.

The controller event by event, with the fleet of ``test_migration.py``; then a job of the local engine.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

import penstock as ps
from benchmarks.baselines import StopAndCopy
from penstock.connectors.sinks import MemorySink
from penstock.control import placement
from penstock.control.events import (
    CancelMovesRequested,
    CoresRequested,
    Flush,
    LeaveRequested,
    MoveRequested,
    NodesChanged,
    RebalanceRequested,
    RescaleRequested,
    Tell,
    WarmedUp,
    WarmUp,
)
from penstock.control.load import within_slots
from penstock.control.placement import Peer, homes, schedule
from penstock.control.records import NodeInfo
from penstock.engines.job import Job, start
from penstock.errors import ConfigError
from penstock.observe import cluster
from penstock.observe.journal_codec import from_json, to_json
from penstock.testing import rows as given
from tests.unit.test_controller import COUNT, IN, WIN
from tests.unit.test_migration import Fleet, flushed, stateless

SLICES = 8


def house(instances: int, *, a: int = 4, b: int = 2, **settings: Any) -> Fleet:
    """Two nodes, a and b, with some cores each, and a first checkpoint."""
    d = Fleet("a", "b", instances=instances, **settings)
    d.nodes = [NodeInfo("a", cores=a), NodeInfo("b", cores=b)]
    d.started()
    d.checkpoint()
    return d


def owners(d: Fleet, stage: Any = COUNT) -> dict[int, int]:
    """container -> how many slices"""
    return dict(sorted(Counter(d.controller.routes.table.owners[stage]).items()))


def on(d: Fleet, node: str) -> list[int]:
    return sorted(c for c, home in d.controller.routes.table.homes_of(COUNT).items() if home == node)


def settle(d: Fleet) -> None:
    """Until nobody moves, and one epoch more."""
    d.epoch()
    d.until(
        lambda: (
            not d.controller.moves.by_slice
            and not d.controller.resizes.wanted
            and not d.controller.balance.node_reasons
        ),
        30,
    )
    d.epoch()


def cores(d: Fleet, node: str, n: int) -> list[Any]:
    return d.step(CoresRequested(now=d.now, node=node, cores=n))


# -- fewer, and more -----------------------------------------------------------------------------------------------


def test_fewer_cores_empty_containers_of_that_node_alone() -> None:
    d = house(4)
    assert (on(d, "a"), on(d, "b")) == ([0, 2, 3], [1])
    before = d.controller.routes.table.owners[COUNT]
    cores(d, "a", 1)
    d.until(lambda: bool(d.phases))
    assert {m.target for m in d.controller.moves.of(COUNT)} == {0}
    assert {m.source for m in d.controller.moves.of(COUNT)} == {2, 3}
    settle(d)
    assert owners(d) == {0: 6, 1: 2} and owners(d, WIN) == {0: 6, 1: 2}
    after = d.controller.routes.table.owners[COUNT]
    assert [s for s, c in enumerate(before) if c == 1] == [s for s, c in enumerate(after) if c == 1]
    last = d.epoch()
    assert d.runs[last, COUNT].containers == (0, 1), "whoever is vacant does not run"
    assert d.controller.routes.table.instances[COUNT] == 4, "its number is kept"
    assert d.controller.attempts.recoveries == 0 and d.controller.fleet.cores == {"a": 1}


def test_more_cores_get_processes_first_then_slices_of_that_node_alone() -> None:
    d = house(2)
    assert (on(d, "a"), on(d, "b")) == ([0], [1])
    before = d.controller.routes.table.owners[COUNT]
    d.warm = False
    warmed = [c for c in cores(d, "a", 3) if isinstance(c, WarmUp)]
    assert [(c.stage, c.containers, c.homes) for c in warmed] == [
        (s, (2, 3), {2: "a", 3: "a"}) for s in (IN, COUNT, WIN)
    ]
    waiting = d.epoch()
    assert d.table(d.runs[waiting, COUNT]).instances[COUNT] == 2 and not d.controller.moves.by_slice
    d.warm = True
    for command in warmed:
        d.step(WarmedUp(now=d.now, stage=command.stage, containers=command.containers))
    settle(d)
    table = d.controller.routes.table
    assert dict(table.instances) == {IN: 4, COUNT: 4, WIN: 4}
    assert [s for s, c in enumerate(before) if c == 1] == [s for s, c in enumerate(table.owners[COUNT]) if c == 1]
    assert owners(d) == {0: 2, 1: 4, 2: 1, 3: 1} and owners(d, WIN) == owners(d)
    assert set(d.runs[d.epoch(), IN].containers) == {0, 1, 2, 3}, "a source is read on them, too"
    assert d.controller.attempts.recoveries == 0


def test_down_and_up_again_takes_the_same_containers() -> None:
    d = house(4)
    for n in (1, 3, 2, 3):
        cores(d, "a", n)
        settle(d)
        assert d.controller.routes.table.instances[COUNT] == 4
        assert sum(owners(d).values()) == SLICES and len([c for c in owners(d) if c in on(d, "a")]) == n
    assert max(owners(d)[c] for c in on(d, "a")) == 2


def test_the_same_number_again_moves_nothing() -> None:
    d = house(4)
    cores(d, "a", 3)
    settle(d)
    assert not d.outcomes
    cores(d, "b", 1)
    settle(d)
    assert not d.outcomes and owners(d) == {0: 2, 1: 2, 2: 2, 3: 2}


def test_a_stage_that_has_nothing_on_the_node_stays_as_it_is() -> None:
    d = house(4)
    d.step(RescaleRequested(now=d.now, stage=WIN, instances=1))
    settle(d)
    assert owners(d, WIN) == {0: SLICES}
    cores(d, "b", 2)
    settle(d)
    assert d.controller.routes.table.instances[WIN] == 1 and owners(d, WIN) == {0: SLICES}
    assert owners(d) == {0: 2, 1: 1, 2: 2, 3: 2, 4: 1}


def test_no_more_containers_than_slices() -> None:
    d = house(7, a=12, b=1)
    cores(d, "a", 12)
    assert [t for t in d.said if "slices" in t], d.said
    settle(d)
    assert d.controller.routes.table.instances[COUNT] == SLICES and len(owners(d)) == SLICES


def test_a_stage_without_state_and_a_source_keep_to_it_at_once() -> None:
    d = stateless()
    d.nodes = [NodeInfo("a", cores=1), NodeInfo("b", cores=1)]
    d.checkpoint()
    d.step(RescaleRequested(now=d.now, stage=IN, instances=4))
    d.step(RescaleRequested(now=d.now, stage=d.topology.stages[2].id, instances=4))
    d.epoch()
    d.step(CoresRequested(now=d.now, node="a", cores=1))
    last = d.epoch()
    working = tuple(within_slots(range(4), d.controller.routes.table.homes_of(COUNT), {"a": 1}))
    assert len(working) == 3
    assert d.runs[last, d.topology.stages[2].id].containers == working
    assert d.runs[last, IN].containers == working


# -- what comes later respects it ----------------------------------------------------------------------------------


def test_a_node_gets_its_share_by_its_slots() -> None:
    d = house(4, b=1)
    cores(d, "a", 1)
    settle(d)
    assert owners(d) == {0: 6, 1: 2}
    d.step(RebalanceRequested(now=d.now))
    settle(d)
    assert owners(d) == {0: 4, 1: 4}
    cores(d, "a", 3)
    settle(d)
    d.step(RebalanceRequested(now=d.now))
    settle(d)
    assert owners(d) == {0: 2, 1: 2, 2: 2, 3: 2}


def test_it_survives_a_recovery() -> None:
    d = house(4)
    cores(d, "a", 2)
    settle(d)
    number = d.begin()
    d.failed(number, IN, d.controller.attempts.current)
    d.run_again()
    settle(d)
    assert d.controller.attempts.recoveries == 1 and d.controller.fleet.cores == {"a": 2}
    assert set(owners(d)) == {0, 1, 2}


def test_slices_of_a_lost_node_go_to_slots_only() -> None:
    d = house(4, backups=1)
    cores(d, "a", 1)
    settle(d)
    assert all(c in (0, 1) for held in d.controller.routes.table.holders[COUNT] for c in held), (
        "nor does it keep backups"
    )
    d.begin()
    d.lose("b")
    d.run_again()
    settle(d)
    assert owners(d) == {0: SLICES}


def test_no_backup_on_the_node_of_its_owner_while_containers_are_emptied() -> None:
    d = house(6, a=3, b=3, backups=1)
    d.copying = False  # so they stay
    cores(d, "a", 1)
    cores(d, "b", 1)
    d.epoch()
    d.epoch()
    assert d.phases
    homes_now = d.controller.routes.table.homes_of(COUNT)
    for owner, held in zip(
        d.controller.routes.table.owners[COUNT], d.controller.routes.table.holders[COUNT], strict=True
    ):
        assert held and all(homes_now[c] != homes_now[owner] for c in held)


def test_a_node_that_goes_takes_its_limit_with_it() -> None:
    d = house(4)
    cores(d, "b", 1)
    cores(d, "a", 1)
    settle(d)
    d.lose("a")
    d.run_again()
    assert d.controller.fleet.cores == {"b": 1}
    d.nodes.append(NodeInfo("a", cores=4))
    d.step(NodesChanged(now=d.now, nodes=tuple(d.nodes)))
    settle(d)
    assert {c for c in owners(d) if c in on(d, "a")} == set(on(d, "a")) and len(on(d, "a")) == 3


def test_a_new_container_goes_where_there_is_room() -> None:
    assert homes(3, {"a": 4, "b": 1}, {0: "a"}) == {0: "a", 1: "b", 2: "a"}
    assert homes(3, {"a": 4, "b": 1}, {0: "a"}, {"a": 1}) == {0: "a", 1: "b", 2: "b"}
    assert homes(2, {"a": 4}, {0: "a"}, {"a": 1}) == {0: "a", 1: "a"}, "rather there than nowhere"


def test_a_rescale_counts_containers_that_work() -> None:
    d = house(4)
    cores(d, "a", 1)
    settle(d)
    d.step(RescaleRequested(now=d.now, stage=COUNT, instances=3))
    settle(d)
    assert len(owners(d)) == 3 and len([c for c in owners(d) if c in on(d, "a")]) == 1
    d.step(RescaleRequested(now=d.now, stage=COUNT, instances=1))
    settle(d)
    assert owners(d) == {0: SLICES} and d.controller.routes.table.instances[COUNT] == 1


# -- what is refused, and what waits -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("node", "n", "why"),
    [
        ("a", 0, "it has 4"),
        ("a", -1, "it has 4"),
        ("a", 5, "it has 4"),
        ("x", 1, "there is no node x"),
        ("b", 1, "about to leave"),
    ],
)
def test_refused_with_its_reason_and_nothing_changes(node: str, n: int, why: str) -> None:
    d = house(4)
    d.step(LeaveRequested(now=d.now, nodes=("b",)))
    settle(d)
    before = d.controller.routes.table
    with pytest.raises(ConfigError, match=why):
        d.controller.fleet.check_cores(node, n)
    out = cores(d, node, n)
    assert [c.text for c in out if isinstance(c, Tell) and why in c.text and "stay as they are" in c.text]
    assert (
        d.controller.routes.table == before and not d.controller.fleet.cores and not d.controller.balance.node_reasons
    )


def test_a_node_that_is_dead_by_the_time_is_refused() -> None:
    d = house(4)
    d.controller.fleet.check_cores("b", 1)
    d.lose("b")
    assert [c for c in cores(d, "b", 1) if isinstance(c, Tell) and "there is no node b" in c.text]
    d.run_again()
    settle(d)
    assert not d.controller.fleet.cores


def test_no_more_instances_than_the_job_has_cores() -> None:
    d = house(4)
    cores(d, "a", 2)
    assert d.controller.fleet.limit() is None
    d.controller.fleet.check_instances(COUNT, 8)  # there is still a node without a limit
    cores(d, "b", 1)
    assert d.controller.fleet.limit() == 3
    with pytest.raises(ConfigError, match="the job is to use 3 cores"):
        d.controller.fleet.check_instances(COUNT, 4)
    assert [c for c in d.step(RescaleRequested(now=d.now, stage=COUNT, instances=4)) if isinstance(c, Tell)]
    assert COUNT not in d.controller.resizes.wanted


@pytest.mark.parametrize(
    ("order", "told", "done"),
    [
        (
            CoresRequested(now=0.0, node="a", cores=1),
            "the change of the cores of node a to 1",
            lambda to: set(to) == {0, 4},
        ),
        (
            RescaleRequested(now=0.0, stage=COUNT, instances=2),
            "the rescale of 'count' to 2",
            lambda to: set(to) == {0, 1},
        ),
        (
            MoveRequested(now=0.0, stage=COUNT, targets={0: 2, 1: 2}),
            "the move of slices 0, 1 of 'count'",
            lambda to: to[:2] == (2, 2),
        ),
        (LeaveRequested(now=0.0, nodes=("a",)), "the departure of node a", lambda to: set(to) == {4}),
    ],
    ids=["set_cores", "rescale", "migrate", "scale_in"],
)
def test_an_order_in_the_middle_of_a_recovery_waits_for_its_end_and_that_is_told(
    order: Any, told: str, done: Callable[[Any], bool]
) -> None:
    d = house(4)
    d.come("c")  # with container 4
    number = d.begin()
    d.lose("b")
    assert d.controller.phase == "recovering"
    before = d.controller.routes.table.owners
    assert not done(before[COUNT])
    d.step(replace(order, now=d.now))
    assert d.said[-1] == f"{told} waits for the end of the recovery"
    assert d.controller.phase == "recovering" and d.controller.routes.table.owners == before
    d.run_again()
    settle(d)
    assert d.controller.epochs.published >= number and d.controller.attempts.recoveries == 1
    assert done(d.controller.routes.table.owners[COUNT])
    d.step(replace(order, now=d.now))
    assert sum("waits for the end" in text for text in d.said) == 1, "now there is nothing to wait for"


def test_a_failure_while_containers_are_emptied() -> None:
    d = house(4)
    cores(d, "a", 1)
    d.until(lambda: "handover" in d.phases.values())
    number = d.begin()
    d.failed(number, IN, d.controller.attempts.current)
    d.run_again()
    settle(d)
    assert owners(d) == {0: 6, 1: 2} and d.controller.attempts.recoveries == 1


def test_a_slice_that_arrives_at_a_container_to_be_emptied_goes_on() -> None:
    d = house(4)
    number = next(s for s, c in enumerate(d.controller.routes.table.owners[COUNT]) if c == 1)
    d.move(number, to=3)
    d.until(lambda: d.phases == {number: "handover"})
    cores(d, "a", 1)
    assert d.controller.balance.node_reasons, "it waits until the slice is there"
    settle(d)
    assert owners(d) == {0: 7, 1: 1} and d.controller.routes.table.owners[COUNT][number] == 0


def test_a_slice_on_its_way_to_such_a_container_is_sent_elsewhere_on_the_node() -> None:
    d = house(4)
    d.copying = False
    number = next(s for s, c in enumerate(d.controller.routes.table.owners[COUNT]) if c == 1)
    d.move(number, to=3)
    cores(d, "a", 1)
    d.epoch()
    assert {m.target for m in d.controller.moves.of(COUNT) if m.slice == number} == {0}


def test_moves_for_cores_can_be_called_off() -> None:
    d = house(4)
    d.copying = False
    cores(d, "a", 1)
    d.epoch()
    assert d.phases
    d.step(CancelMovesRequested(now=d.now))
    d.copying = True
    for _ in range(6):
        d.epoch()
    assert not d.phases and owners(d) == {0: 2, 1: 2, 2: 2, 3: 2}
    assert d.runs[d.controller.epochs.published, COUNT].containers == (0, 1, 2, 3), "who has slices works"
    cores(d, "a", 1)
    settle(d)
    assert owners(d) == {0: 6, 1: 2}


def test_the_way_of_others_everything_stops_for_it() -> None:
    d = house(4, make=StopAndCopy)
    assert owners(d) == {0: 2, 1: 2, 2: 2, 3: 2}
    number = d.begin()
    cores(d, "a", 1)
    d.finish(number)
    flushed(d, [c for c in d.commands if isinstance(c, Flush)][-1])
    assert owners(d) == {0: 4, 1: 4} and not d.controller.balance.node_reasons and not d.controller.moves.by_slice
    d.epoch()
    number = d.begin()
    cores(d, "a", 3)
    d.finish(number)
    flushed(d, [c for c in d.commands if isinstance(c, Flush)][-1])
    assert d.controller.attempts.recoveries == 0 and owners(d) == {0: 2, 1: 2, 2: 2, 3: 2}
    number = d.begin()
    cores(d, "b", 2)  # one that must be started
    d.finish(number)
    flushed(d, [c for c in d.commands if isinstance(c, Flush)][-1])
    assert d.controller.attempts.recoveries == 0 and len(owners(d)) == 5 and len(on(d, "b")) == 2
    d.epoch()


# -- schedules -----------------------------------------------------------------------------------------------------


def slots(*containers: int) -> list[Peer]:
    return [Peer(c, "a") for c in containers]


def test_round_robin_deals_out_what_must_move_one_by_one() -> None:
    assert schedule("round_robin").assign([9, 9, 9, 9, 9, 9], slots(0, 1, 2), None) == (0, 1, 2, 0, 1, 2)
    assert schedule("round_robin").assign([0, 0, 0, 0], slots(0, 1), [9.0, 1.0, 1.0, 1.0]) == (0, 0, 1, 1)
    kept = schedule("round_robin").assign([0, 1, 2, 0, 1, 2], slots(0, 1), None)
    assert kept == (0, 1, 0, 0, 1, 1), "who may stay stays"


def test_by_load_the_heaviest_first_to_whom_has_least() -> None:
    by_load = schedule("load")
    assert by_load.assign([9, 9, 9, 9], slots(0, 1), [4.0, 3.0, 3.0, 2.0]) == (0, 1, 1, 0)
    assert by_load.assign([0, 0, 0, 0], slots(0, 1), [6.0, 2.0, 2.0, 2.0]) == (1, 0, 0, 0), "one move is enough"
    assert by_load.assign([0, 0, 1, 1], slots(0, 1), [5.0, 6.0, 5.0, 5.0]) == (0, 0, 1, 1), "even enough"
    assert by_load.assign([0, 0, 0, 0], slots(0, 1), None) == (0, 0, 1, 1), "nothing measured: equally many"


def test_schedules_have_names() -> None:
    assert {placement.schedule(n).name for n in ("load", "round_robin")} == {"load", "round_robin"}
    with pytest.raises(ConfigError, match="no schedule 'best'"):
        schedule("best")
    with pytest.raises(ConfigError):
        ps.Config(schedule="best")


def test_of_a_node_with_a_limit_the_first_work() -> None:
    at = {0: "a", 1: "b", 2: "a", 3: "a", 4: "b"}
    assert within_slots(range(5), at, {}) == [0, 1, 2, 3, 4]
    assert within_slots(range(5), at, {"a": 2}) == [0, 1, 2, 4]
    assert within_slots(range(5), at, {"a": 1, "b": 1}) == [0, 1]


# -- a job ---------------------------------------------------------------------------------------------------------


def counting(rows: list[dict[str, Any]]) -> tuple[ps.Flow, Any]:
    flow = ps.Flow("cores")
    out = MemorySink()
    words = flow.source("in", given(rows))
    words.key_by("word").aggregate("counts", n=ps.count()).sink("out", out)
    return flow, out


def run(schedule_name: str, *orders: int) -> tuple[Any, Job]:
    """A job of the local engine with four cores; one order for its cores every few epochs."""
    rows = [{"word": f"w{(i * i) % 97}"} for i in range(3000)]
    flow, out = counting(rows)
    held: list[Job] = []
    ready = threading.Event()
    left = list(orders)
    seen: list[int] = []

    def trip(step: str) -> None:
        if step == "after-publish":
            ready.wait()
            job = held[0]
            seen.append(len(set(job.routing.owners["counts"])))
            if len(seen) % 10 == 5 and left:
                job.set_cores("local", left.pop(0))

    config = ps.Config(
        instances=4, slices=12, epoch_rows=50, checkpoint_interval_s=0.0, control=False, schedule=schedule_name
    )
    job = start(flow, engine="local", config=config, trip=trip)
    held.append(job)
    ready.set()
    assert job.wait(60)
    assert job.status().recoveries == 0
    return (out, seen), job


@pytest.mark.parametrize("name", ["load", "round_robin"])
def test_a_job_uses_fewer_cores_and_more_again_and_nobody_sees_it(name: str) -> None:
    (quiet, before), _ = run(name)
    (out, counts), job = run(name, 2, 4, 1)
    assert set(before) == {4}
    assert {1, 2, 4} <= set(counts), counts
    assert out.frame().sort("word", "n").equals(quiet.frame().sort("word", "n"))
    assert job.status().nodes[0].limit == 1 and job.status().nodes[0].cores == 4


def test_a_job_refuses_what_cannot_be() -> None:
    flow, _ = counting([{"word": "a"}])
    job = start(flow, engine="local", config=ps.Config(instances=2, control=False))
    assert job.wait(60)
    with pytest.raises(ConfigError, match="the job is complete"):
        job.set_cores("local", 1)
    with pytest.raises(ConfigError, match="no number of cores"):
        job.set_cores("local", 1.5)  # type: ignore[arg-type]


# -- what is seen of it ----------------------------------------------------------------------------------------------


def test_the_journal_and_the_status_know_of_it() -> None:
    event = CoresRequested(now=1.5, node="a", cores=2)
    assert from_json(to_json(event)) == event
    d = house(4)
    cores(d, "a", 2)
    assert [(n.name, n.cores, n.limit) for n in cluster.nodes(d.controller)] == [("a", 4, 2), ("b", 2, None)]
    again = from_json(to_json(d.controller))
    again.link()
    assert again.fleet.cores == {"a": 2} and again.balance.node_reasons == d.controller.balance.node_reasons
