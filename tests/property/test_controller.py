"""The controller in virtual time: work ends in any order, containers lose state, drivers die, people rescale and stop.

A tiny engine of dictionaries carries out the commands; what it may assume is checked as it goes:

* an epoch runs only if its record is on disk, and always with the same record;
* a container applies epoch e to a state that has exactly the epochs before e;
* epochs are published in order, without a gap; a checkpoint names only files that exist, and covers published epochs;
* when faults stop, the job ends, and everything that was read was published.

A seed replays exactly. Add a failing one to ``test_seeds_that_failed_once``.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.control.controller import Controller, Settings
from penstock.control.events import (
    CancelAll,
    CollectGarbage,
    Command,
    Compact,
    Compacted,
    EpochLogged,
    EpochPlanned,
    EpochPublished,
    Event,
    Fail,
    Finish,
    Flush,
    Flushed,
    LogEpoch,
    ManifestWritten,
    NothingNew,
    PlanEpoch,
    PublishEpoch,
    ReleaseEpoch,
    RescaleRequested,
    RunStage,
    StageDone,
    StageFailed,
    Started,
    StopRequested,
    TaskReport,
    Tick,
    WarmedUp,
    WarmUp,
    WriteManifest,
)
from penstock.control.pacing import Pacer
from penstock.control.routing import RoutingTable
from penstock.control.topology import StageInfo, Topology
from penstock.ids import StageId
from penstock.state.checkpoint import DeltaFile, Manifest

IN, ALSO, COUNT, WIN, TOP = (StageId(s) for s in ("in", "also", "count", "win", "top"))
TOPOLOGY = Topology(
    (
        StageInfo(IN, True, False, False, 0, 0, ()),
        StageInfo(ALSO, True, False, False, 0, 0, ()),
        StageInfo(COUNT, False, True, False, 0, 0, (IN, ALSO)),
        StageInfo(WIN, False, True, True, 5, 10, (IN,)),
        StageInfo(TOP, False, False, False, 0, 0, (WIN, COUNT)),
    )
)
KEYED = tuple(s.id for s in TOPOLOGY.stages if not s.is_source)
SLICES = 6
MANIFESTS_KEPT = 2


@dataclass
class Disk:
    """What survives the driver."""

    log: dict[int, dict[str, Any]] = field(default_factory=dict)
    manifests: dict[int, Manifest] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    """name -> the epoch that its rows stand at"""
    published: list[int] = field(default_factory=list)
    ranges: dict[int, dict[str, Any]] = field(default_factory=dict)
    """epoch -> its ranges, as it was first run; never forgotten, so that a change would show"""
    starts: int = 0


@dataclass
class Container:
    attempt: int
    epoch: int
    sealed: set[int]
    pending: list[dict[str, Any]]


class World:
    def __init__(self, seed: int, *, rows: int, faults: float, in_flight: int, interval_s: float) -> None:
        self.random = random.Random(seed)
        self.rows = {IN: rows, ALSO: rows // 3}
        self.faults = faults
        self.settings = Settings(in_flight, interval_s, idle_epoch_s=50.0, poll_s=0.5, deltas_max=3)
        self.disk = Disk()
        self.now = 0.0
        self.over: str | None = None
        self.stopped = False
        self.driver_starts()

    # -- the driver's life -------------------------------------------------------------------------------------------

    def driver_starts(self) -> None:
        """From disk alone. Nothing of an earlier driver is heard of again."""
        disk = self.disk
        disk.starts += 1
        self.over = None
        routing = RoutingTable.initial(SLICES, TOPOLOGY.keyed(), self.random.randint(1, 4))
        self.controller = Controller(TOPOLOGY, routing, Pacer.start(7, 1, 9, 500), self.settings, blank())
        self.planner: deque[Callable[[bool], Event | None]] = deque()
        self.publisher: deque[Callable[[bool], Event | None]] = deque()
        self.jobs: list[Callable[[], Event]] = []
        self.containers: dict[tuple[str, int], Container] = {}
        newest = max(disk.manifests, default=None)
        manifest = disk.manifests[newest] if newest is not None else None
        logged = tuple(disk.log[e] for e in sorted(disk.log) if e > (newest or 0))
        self.step(Started(self.now, manifest, logged, disk.starts * 1000))

    def step(self, event: Event) -> None:
        self.now += self.random.random() * 0.2
        object.__setattr__(event, "now", self.now)
        commands = self.controller.step(event)
        self.controller.validate()
        for command in commands:
            self.execute(command)

    def execute(self, command: Command) -> None:
        match command:
            case PlanEpoch():
                self.planner.append(lambda really: self.plan(command))
            case LogEpoch():
                self.planner.append(lambda really: self.log(command, really))
            case RunStage():
                self.check_run(command)
                routing = self.controller.routing
                self.jobs.append(lambda: self.run(command, routing))
            case PublishEpoch():
                self.publisher.append(lambda really: self.publish(command, really))
            case Flush():
                routing = self.controller.routing
                self.jobs.append(lambda: self.flush(command, routing))
            case WriteManifest():
                self.publisher.append(lambda really: self.write_manifest(command, really))
            case CollectGarbage():
                self.publisher.append(lambda really: self.collect_garbage(command, really))
            case WarmUp():
                self.jobs.append(lambda: WarmedUp(self.now, command.stage, command.instances))
            case Compact():
                self.jobs.append(lambda: self.compact(command))
            case Finish():
                self.over = command.reason
            case Fail():
                assert command.error.kind == "EngineError" and "made no progress" in command.error.message
                self.over = "failed"
            case CancelAll() | ReleaseEpoch():
                pass
            case _:
                raise AssertionError(command)

    # -- work --------------------------------------------------------------------------------------------------------

    def plan(self, command: PlanEpoch) -> Event:
        ranges: dict[str, dict[str, Any]] = {}
        ended = []
        for source, total in self.rows.items():
            first = (command.offsets.get(source) or {"row": 0})["row"]
            last = min(total, first + self.random.randint(1, command.rows_max))
            waits = self.faults > 0 and self.random.random() < 0.2
            if last > first and not waits:
                facts = [last] if self.random.random() < 0.5 else []
                ranges[source] = {"start": {"row": first}, "end": {"row": last}, "rows": last - first, "facts": facts}
            if (last if source in ranges else first) >= total:
                ended.append(source)
        if not ranges and not command.even_if_empty:
            return NothingNew(self.now, command.epoch, len(ended) == len(self.rows))
        return EpochPlanned(self.now, command.epoch, ranges, tuple(ended), 1)

    def log(self, command: LogEpoch, really: bool) -> Event | None:
        if not really:
            return None
        kept = self.disk.ranges.get(command.epoch)
        assert kept is None or kept == command.record["ranges"], "an epoch that ran was planned anew"
        self.disk.log[command.epoch] = command.record
        return EpochLogged(self.now, command.epoch, command.attempt)

    def check_run(self, command: RunStage) -> None:
        record = self.disk.log.get(command.epoch)
        assert record is not None, f"epoch {command.epoch} runs without a record"
        assert self.disk.ranges.setdefault(command.epoch, record["ranges"]) == record["ranges"]
        if TOPOLOGY[command.stage].is_source:
            assert command.range == record["ranges"].get(command.stage)
        assert command.watermark >= command.watermark_before
        assert command.checkpoint == 0 or command.checkpoint in self.disk.manifests

    def run(self, command: RunStage, routing: RoutingTable) -> Event:
        if self.bad_luck(0.3):
            return StageFailed(self.now, command.epoch, command.stage, command.attempt, "bad luck")
        info = TOPOLOGY[command.stage]
        count = self.random.randint(1, 3) if info.is_source else routing.instances[command.stage]
        reports = []
        for index in range(count):
            report = TaskReport(command.stage, command.epoch, command.attempt, index)
            if info.is_source and command.range is not None:
                report.time_max = {WIN: command.epoch * 10 + self.random.randint(0, 30)}
            if info.stateful:
                self.apply(command, routing, report)
            reports.append(report)
        return StageDone(self.now, command.epoch, command.stage, command.attempt, tuple(reports))

    def apply(self, command: RunStage, routing: RoutingTable, report: TaskReport) -> None:
        """A container: in memory at the epoch before, or from the checkpoint if it is that epoch's, or missing."""
        key = (command.stage, report.index)
        found = self.containers.get(key)
        if found is not None and found.attempt != command.attempt:
            if command.checkpoint in found.sealed:
                found = Container(command.attempt, command.checkpoint, {command.checkpoint}, [])
            else:
                found = None
        if found is None or found.epoch != command.epoch - 1:
            if command.checkpoint != command.epoch - 1:
                report.missing = True
                return
            self.load(command, routing, report.index)
            found = Container(command.attempt, command.checkpoint, {command.checkpoint}, [])
        self.containers[key] = found
        found.epoch = command.epoch
        if command.seal:
            self.seal(found, command.stage, report.index, routing)
        ready = [d for d in found.pending if self.random.random() < 0.5]
        found.pending = [d for d in found.pending if d not in ready]
        report.deltas = ready

    def load(self, command: RunStage, routing: RoutingTable, index: int) -> None:
        if command.checkpoint == 0:
            return
        manifest = self.disk.manifests[command.checkpoint]
        for number in routing.slices_of(command.stage, index):
            files = manifest.files_for(command.stage, [number])
            assert files and max(self.disk.files[f.name] for f in files) == command.checkpoint, "a slice has a gap"

    def seal(self, container: Container, stage: str, index: int, routing: RoutingTable) -> None:
        epoch, attempt = container.epoch, container.attempt
        name = f"{stage}/{epoch}-{attempt}-{index}"
        slices = tuple(routing.slices_of(StageId(stage), index))
        self.disk.files[name] = epoch
        file = DeltaFile(name, stage, "delta", 0, epoch, slices, 1, self.random.randint(1, 50), "c")
        container.sealed.add(epoch)
        container.pending.append({"epoch": epoch, "attempt": attempt, "file": vars_of(file)})

    def flush(self, command: Flush, routing: RoutingTable) -> Event:
        if self.bad_luck(0.3):
            return StageFailed(self.now, command.epoch, StageId("flush"), command.attempt, "bad luck")
        reports = []
        for stage in TOPOLOGY.stateful:
            for index in range(routing.instances[stage.id]):
                report = TaskReport(stage.id, command.epoch, command.attempt, index)
                reports.append(report)
                found = self.containers.get((stage.id, index))
                sealed = found is not None and command.epoch in found.sealed
                if found is None or found.attempt != command.attempt or not (sealed or found.epoch == command.epoch):
                    report.missing = True
                    continue
                if not sealed:
                    self.seal(found, stage.id, index, routing)
                report.deltas, found.pending = found.pending, []
        return Flushed(self.now, command.epoch, command.attempt, tuple(reports))

    def publish(self, command: PublishEpoch, really: bool) -> Event | None:
        if not really:
            return None
        known = self.disk.published
        assert command.epoch <= len(known) + 1, f"{command.epoch} was published after {known[-1:]}"
        if command.epoch == len(known) + 1:
            known.append(command.epoch)
        return EpochPublished(self.now, command.epoch, command.attempt)

    def write_manifest(self, command: WriteManifest, really: bool) -> Event | None:
        if not really:
            return None
        m = command.manifest
        assert m.epoch <= len(self.disk.published), "a checkpoint of an epoch that is not published"
        assert m.names() <= set(self.disk.files), "a checkpoint of files that do not exist"
        for source in self.rows:
            ends = [self.disk.ranges[e][source] for e in range(1, m.epoch + 1) if source in self.disk.ranges[e]]
            if ends:
                assert m.sources[source]["offset"] == ends[-1]["end"]
                assert m.sources[source]["facts"] == [f for r in ends for f in r["facts"]]
        self.disk.manifests[m.epoch] = m
        return ManifestWritten(self.now, command.epoch, command.attempt)

    def collect_garbage(self, command: CollectGarbage, really: bool) -> Event | None:
        disk = self.disk
        kept = sorted(disk.manifests)[-MANIFESTS_KEPT:]
        disk.manifests = {e: disk.manifests[e] for e in kept}
        disk.log = {e: r for e, r in disk.log.items() if e > kept[0]}
        return None

    def compact(self, command: Compact) -> Event:
        task = command.task
        if self.bad_luck(0.3):
            return Compacted(self.now, command.stage, task, None, "bad luck")
        name = f"merged-{len(self.disk.files)}"
        self.disk.files[name] = task.epoch_to
        size = sum(f.bytes for f in task.inputs)
        out = DeltaFile(name, task.stage, task.kind, task.epoch_from, task.epoch_to, task.slices, 1, size, "c")
        return Compacted(self.now, command.stage, task, out)

    # -- chance ------------------------------------------------------------------------------------------------------

    def bad_luck(self, weight: float = 1.0) -> bool:
        return self.random.random() < self.faults * weight

    def disturb(self) -> None:
        """One of the things that happen to a job."""
        match self.random.randint(0, 4):
            case 0:
                for key in self.random.sample(sorted(self.containers), min(1, len(self.containers))):
                    del self.containers[key]
            case 1:
                self.containers.clear()  # a node is gone
            case 2 | 3:
                stage = self.random.choice(TOPOLOGY.stages).id
                self.step(RescaleRequested(self.now, stage, self.random.randint(1, SLICES)))
            case 4:
                self.driver_dies()

    def driver_dies(self) -> None:
        """At any moment: what it had begun may or may not have reached the disk."""
        for queue in (self.planner, self.publisher):
            for work in list(queue)[: self.random.randint(0, 2)]:
                work(self.random.random() < 0.5)
        self.driver_starts()

    def turn(self) -> None:
        """One thing of those under way ends; which one is chance."""
        ready: list[Callable[[], Event | None]] = []
        if self.planner:
            ready.append(lambda: self.planner.popleft()(True))
        if self.publisher:
            ready.append(lambda: self.publisher.popleft()(True))
        if self.jobs:
            ready.append(lambda: self.jobs.pop(self.random.randrange(len(self.jobs)))())
        ready.append(lambda: Tick(self.now))
        event = self.random.choice(ready)()
        if event is not None:
            self.step(event)

    def live(self, turns: int, *, stop: bool) -> None:
        for _ in range(turns):
            if self.over is not None:
                return
            if self.bad_luck(0.3):
                self.disturb()
            if stop and self.bad_luck(0.02):
                self.stopped = True
                self.step(StopRequested(self.now))
            self.turn()

    def heal(self) -> None:
        """Faults stop: the job must end by itself, if need be after a last start."""
        self.faults = 0.0
        for _ in range(3):
            if self.over in ("stopped", "failed"):
                self.driver_starts()
            for _ in range(20_000):
                if self.over is not None:
                    break
                self.turn()
            if self.over == "complete":
                return
        raise AssertionError(f"the job did not end: {self.over}, {self.controller.phase}")


def vars_of(file: DeltaFile) -> dict[str, Any]:
    names = ("name", "stage", "kind", "epoch_from", "epoch_to", "slices", "rows", "bytes", "checksum")
    return {n: getattr(file, n) for n in names}


def blank() -> Manifest:
    return Manifest("job", "flow", {}, 0)


def live_and_heal(
    seed: int, rows: int, faults: float, in_flight: int, interval_s: float, turns: int, stop: bool
) -> World:
    world = World(seed, rows=rows, faults=faults, in_flight=in_flight, interval_s=interval_s)
    world.live(turns, stop=stop)
    world.heal()
    disk = world.disk
    assert disk.published == list(range(1, len(disk.published) + 1))
    for source, total in world.rows.items():
        at = 0
        for epoch in disk.published:
            r = disk.ranges[epoch].get(source)
            if r is not None:
                assert r["start"]["row"] == at, f"epoch {epoch} of {source} does not begin where the one before ended"
                at = r["end"]["row"]
        assert at == total, f"{total - at} rows of {source} were never published"
    assert max(disk.manifests) == len(disk.published), "the last checkpoint covers everything"
    return world


@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(0, 150),
    faults=st.sampled_from([0.0, 0.02, 0.1, 0.3]),
    in_flight=st.integers(1, 4),
    interval_s=st.sampled_from([0.0, 1.0, 5.0, -1.0]),
    turns=st.integers(0, 600),
    stop=st.booleans(),
)
def test_whatever_happens_every_row_is_published_once_and_in_order(
    seed: int, rows: int, faults: float, in_flight: int, interval_s: float, turns: int, stop: bool
) -> None:
    live_and_heal(seed, rows, faults, in_flight, interval_s, turns, stop)


@pytest.mark.parametrize("seed", range(10))
def test_without_faults_there_is_no_recovery(seed: int) -> None:
    world = live_and_heal(seed, 100, 0.0, 3, 1.0, 0, False)
    assert world.controller.recoveries == 0
    assert world.disk.starts == 1


def test_a_seed_replays_exactly() -> None:
    worlds = [live_and_heal(7, 120, 0.1, 3, 1.0, 400, False) for _ in range(2)]
    assert worlds[0].disk == worlds[1].disk
    assert worlds[0].disk.starts > 1, "this seed has deaths of the driver in it"
    assert worlds[0].now == worlds[1].now


def test_the_faults_are_really_met() -> None:
    """Among a few seeds there are recoveries, deaths, rescales and compactions; else the test above is idle."""
    worlds = [live_and_heal(seed, 150, 0.1, 3, 0.0, 600, False) for seed in range(12)]
    assert sum(w.controller.recoveries for w in worlds) > 0
    assert sum(w.disk.starts > 1 for w in worlds) > 3
    assert any(w.controller.routing.version > 2 for w in worlds)
    assert any(n.startswith("merged") for w in worlds for n in w.disk.files)
