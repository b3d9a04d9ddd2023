"""The cores of nodes change at any time, in the middle of everything: nothing is lost, and in the end they are kept.

The controller in the world of ``test_controller.py``, and random flows on the local engine as in ``test_moves.py``.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import penstock as ps
from penstock.control.events import (
    CoresRequested,
    Event,
    HotSlices,
    StageDone,
)
from penstock.control.load import SliceLoad, shares, within_slots
from penstock.control.placement import Peer, schedule
from penstock.control.records import NodeInfo
from penstock.engines.job import Job, start
from tests.property.cuts import SEEDS, examples
from tests.property.test_controller import SLICES, TOPOLOGY, World
from tests.property.test_moves import seen
from tests.scale import scaled
from tests.spark.test_equivalence import Made


class Cores(World):
    """Nodes have several cores, containers say what their slices have to do, and people change how many are used."""

    asked = 0

    def node_comes(self) -> None:
        super().node_comes()
        name = f"n{self.born}"
        self.nodes[name] = NodeInfo(name, zone=self.nodes[name].zone, cores=self.random.randint(1, 4))

    def disturb(self) -> None:
        r = self.random
        if r.random() > 0.4 or not self.nodes:
            super().disturb()
            return
        self.asked += 1
        node = r.choice(sorted(self.nodes))
        self.step(CoresRequested(now=self.now, node=node, cores=r.randint(0, self.nodes[node].cores + 1)))
        if r.random() < 0.2:
            hot = {s.id: (r.randrange(SLICES),) for s in TOPOLOGY.stateful}
            self.step(HotSlices(now=self.now, slices=hot))

    def run(self, command: Any, routing: Any) -> Event:
        event = super().run(command, routing)
        if isinstance(event, StageDone) and command.stage in {s.id for s in TOPOLOGY.stateful}:
            for report in event.reports:
                report.load = {s: 500 * (1 + s * s) for s in routing.slices_of(command.stage, report.index)}
        return event

    def settle(self) -> None:
        """Faults stop, and everybody who was to go or come has."""
        self.faults = 0.0
        if not self.nodes:
            self.node_comes()
        self.news()
        if self.over is not None:
            self.driver_starts()
        self.turns(400)

    def turns(self, most: int) -> None:
        for _ in range(most):
            self.turn()
            assert self.over is None

    def quiet(self) -> bool:
        c = self.controller
        asked = c.resizes.wanted or c.balance.node_reasons or c.balance.reasons
        idle = not (c.moves.by_slice or asked or c.attempts.recovering)
        return idle and c.phase == "running"

    def until_quiet(self) -> None:
        for _ in range(60):
            self.turns(100)
            if self.quiet():
                return
        c = self.controller
        raise AssertionError(
            f"slices still move: {c.phase} {c.balance.node_reasons} {c.resizes.wanted} "
            f"{list(c.moves.by_slice.values())}"
        )


def world(seed: int, rows: int, faults: float) -> Cores:
    """A slice that takes too long stays where it is: not here, or how it ends would be chance."""
    made = Cores(seed, rows=rows, faults=faults, in_flight=random.Random(seed).randint(1, 3), interval_s=1.0)
    made.settings = made.controller.settings = replace(made.settings, move_timeout_s=600.0)
    return made


@examples(40)
@given(seed=SEEDS, rows=st.integers(0, 120), faults=st.sampled_from([0.02, 0.1, 0.3]), turns=st.integers(0, 500))
def test_whatever_happens_every_row_is_published_once_and_in_order(
    seed: int, rows: int, faults: float, turns: int
) -> None:
    w = world(seed, rows, faults)
    w.live(turns, stop=False)
    w.heal()
    assert w.disk.published == list(range(1, len(w.disk.published) + 1))
    for source, total in w.rows.items():
        ends = [w.disk.ranges[e][source].end["row"] for e in w.disk.published if source in w.disk.ranges[e]]
        assert max(ends, default=0) == total


@pytest.mark.parametrize("seed", range(scaled(30, 300)))
def test_in_the_end_a_node_works_on_the_cores_it_was_told(seed: int) -> None:
    w = world(seed, 10**9, 0.1)
    w.live(10 * (seed % 30), stop=False)
    w.settle()
    w.until_quiet()
    c = w.controller
    names = [n for n in c.fleet.nodes if n not in c.fleet.leaving]
    elsewhere = {s.id: {n: owned(w, s.id, n) for n in names} for s in TOPOLOGY.stateful}
    node = w.random.choice(names)
    wanted = w.random.randint(1, c.fleet.nodes[node].cores)
    had = {s.id: len(owned(w, s.id, node)) for s in TOPOLOGY.stateful}
    w.step(CoresRequested(now=w.now, node=node, cores=wanted))
    w.until_quiet()
    w.turns(100)
    assert c is w.controller and c.fleet.cores[node] == wanted
    for info in TOPOLOGY.stateful:
        containers = [x for x, n in c.routes.table.homes_of(info.id).items() if n == node]
        owners = Counter(x for x in c.routes.table.owners[info.id] if x in containers)
        assert len(owners) <= wanted, "no more than it may"
        assert len(owned(w, info.id, node)) == had[info.id], "the node has the slices that it had"
        for other in names:
            if other != node:
                assert owned(w, info.id, other) == elsewhere[info.id][other], "those of others stay"
        if had[info.id] >= wanted and not {(info.id, x) for x in containers} & c.processes.suspects:
            reach = min(wanted, sum(x < SLICES for x in sorted(containers)))
            assert len(owners) == reach, f"{owners} of {containers}, {wanted} asked for"
        idle = set(containers) - set(within_slots(sorted(containers), c.routes.table.homes_of(info.id), c.fleet.cores))
        assert not idle & {h for held in c.routes.table.holders.get(info.id, ()) for h in held}, "no backups there"


def owned(w: World, stage: Any, node: str) -> list[int]:
    homes = w.controller.routes.table.homes_of(stage)
    return [s for s, c in enumerate(w.controller.routes.table.owners[stage]) if homes.get(c) == node]


def test_cores_are_really_asked_for() -> None:
    worlds = [world(seed, 150, 0.1) for seed in range(8)]
    for w in worlds:
        w.live(400, stop=False)
    assert sum(w.asked for w in worlds) > 30
    assert sum(w.switched for w in worlds) > 5, "slices moved while epochs ran"
    assert any(w.controller.fleet.cores for w in worlds)


# -- jobs ------------------------------------------------------------------------------------------------------------


def run(seed: int, disturbed: bool) -> tuple[Made, Job]:
    made = Made(seed, epochs=(8, 20))
    r = random.Random(seed + 1)
    most = r.randint(2, 4)
    config = ps.Config(
        instances=most,
        slices=6,
        checkpoint_interval_s=r.choice([0.0, 0.0, 3600.0]),
        epochs_in_flight=r.randint(1, 3),
        schedule=r.choice(["load", "round_robin"]),
        control=False,
    )
    held: list[Job] = []
    ready = threading.Event()

    def trip(step: str) -> None:
        if step == "after-publish" and disturbed and r.random() < 0.4:
            ready.wait()
            runtime = held[0]._runtime
            runtime.post(CoresRequested(now=runtime.clock(), node="local", cores=r.randint(1, most)))

    job = start(made.flow, engine="local", config=config, trip=trip)
    held.append(job)
    ready.set()
    assert job.wait(120)
    return made, job


@examples(6)
@given(SEEDS)
def test_the_cores_of_a_job_do_not_show(seed: int) -> None:
    quiet = seen(*run(seed, False))
    made, job = run(seed, True)
    assert job.status().recoveries == 0
    assert seen(made, job) == quiet


# -- schedules and load ----------------------------------------------------------------------------------------------


@examples(60)
@given(st.data())
def test_a_schedule_gives_every_slice_a_slot_and_moves_what_it_must(data: st.DataObject) -> None:
    slots = sorted(data.draw(st.sets(st.integers(0, 8), min_size=1, max_size=5)))
    owners = data.draw(st.lists(st.integers(0, 8), min_size=1, max_size=24))
    load = data.draw(st.none() | st.lists(st.floats(0, 1e6), min_size=len(owners), max_size=len(owners)))
    peers = [Peer(c, "n") for c in slots]
    for name in ("round_robin", "load"):
        found = schedule(name).assign(owners, peers, load)
        assert len(found) == len(owners) and set(found) <= set(slots)
        if name == "round_robin" or load is None or not any(load):
            counts = Counter(found)
            assert max(counts[c] for c in slots) - min(counts[c] for c in slots) <= 1
        assert schedule(name).assign(found, peers, load) == found, "twice is once"


@examples(60)
@given(
    owners=st.lists(st.integers(0, 3), min_size=1, max_size=16),
    busy=st.dictionaries(st.integers(0, 3), st.floats(0, 1)),
    data=st.data(),
)
def test_shares_of_slices_add_up_to_what_their_container_does(
    owners: list[int], busy: dict[int, float], data: st.DataObject
) -> None:
    rates = data.draw(st.lists(st.floats(0, 1e6), min_size=len(owners), max_size=len(owners)))
    found = shares(rates, owners, busy)
    for c in set(owners):
        mine = [s for s, owner in enumerate(owners) if owner == c]
        expected = busy.get(c, 0.0) if sum(rates[s] for s in mine) > 0 else 0.0
        assert abs(sum(found[s] for s in mine) - expected) < 1e-6


def test_nothing_is_known_of_the_load_until_enough_was_seen() -> None:
    load = SliceLoad()
    assert load.of(TOPOLOGY.stateful[0].id, 4) is None
