"""The controller in virtual time: work ends in any order, nodes come and go, drivers die, people move slices and stop.

A tiny engine of dictionaries carries out the commands; what it may assume is checked as it goes:

* an epoch runs only if its record is on disk, and always with the same record;
* a container applies epoch e to a state that has exactly the epochs before e, and a slice that changed its owner on
  the way was either at a checkpoint or handed over whole;
* what containers sent to each other is read in the next epoch or not at all, and is still there then;
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

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.control.controller import Controller
from penstock.control.events import (
    CancelAll,
    CancelMovesRequested,
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
    LeaveRequested,
    LogEpoch,
    ManifestWritten,
    MoveRequested,
    NodesChanged,
    NothingNew,
    PlanEpoch,
    PublishEpoch,
    RebalanceRequested,
    ReleaseEpoch,
    ReleaseNodes,
    RescaleRequested,
    RunStage,
    StageDone,
    StageFailed,
    Started,
    StopRequested,
    Stuck,
    Tell,
    Tick,
    WarmedUp,
    WarmUp,
    WriteManifest,
)
from penstock.control.pacing import Pacer
from penstock.control.records import NodeInfo, SealedDelta, SourceSpan, TaskReport
from penstock.control.routing import RoutingTable
from penstock.control.settings import Settings
from penstock.control.topology import StageInfo, Topology
from penstock.ids import Attempt, Epoch, StageId
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
    node: str
    attempt: int
    epoch: int
    slices: frozenset[int]
    sealed: set[int]
    pending: list[SealedDelta] = field(default_factory=list)
    copies: dict[int, int] = field(default_factory=dict)
    """slice that it keeps a copy of -> the checkpoint it stands at"""


@dataclass(frozen=True)
class Handed:
    """What a container sends when a slice changes its owner."""

    slice: int
    to: int
    epoch: int
    checkpoint: int


class World:
    def __init__(self, seed: int, *, rows: int, faults: float, in_flight: int, interval_s: float) -> None:
        self.random = r = random.Random(seed)
        self.rows = {IN: rows, ALSO: rows // 3}
        self.faults = faults
        self.settings = Settings(
            epochs_in_flight=in_flight,
            checkpoint_interval_s=interval_s,
            idle_epoch_s=50.0,
            poll_s=0.5,
            deltas_max=3,
            backups=r.randint(0, 2),
            placement=r.choice(["chained", "ring"]),
            move_timeout_s=r.choice([5.0, 600.0]),
        )
        self.nodes: dict[str, NodeInfo] = {}
        self.born = 0
        for _ in range(r.randint(1, 4)):
            self.node_comes()
        self.switched = 0
        """Slices that got another owner with no checkpoint in between."""
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
        self.sent: dict[tuple[int, int, str], list[Handed]] = {}
        """(attempt, epoch, stage) -> what its containers sent to each other"""
        if not self.nodes:
            self.node_comes()
        newest = max(disk.manifests, default=None)
        manifest = disk.manifests[newest] if newest is not None else None
        logged = tuple(disk.log[e] for e in sorted(disk.log) if e > (newest or 0))
        self.step(
            Started(
                now=self.now,
                restored=manifest,
                logged=logged,
                attempt=disk.starts * 1000,
                nodes=tuple(self.nodes.values()),
            )
        )

    def node_comes(self) -> None:
        self.born += 1
        zone = f"z{self.born % 2}" if self.random.random() < 0.5 else ""
        self.nodes[f"n{self.born}"] = NodeInfo(f"n{self.born}", zone=zone, cores=self.random.randint(1, 2))

    def node_goes(self, name: str) -> None:
        """With everything on it. That is heard of later, or never if jobs fail first."""
        del self.nodes[name]
        self.containers = {k: c for k, c in self.containers.items() if c.node != name}

    def news(self) -> None:
        self.jobs.append(lambda: NodesChanged(now=self.now, nodes=tuple(self.nodes.values())))

    def step(self, event: Event) -> None:
        self.now += self.random.random() * 0.2
        msgspec.structs.force_setattr(event, "now", self.now)
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
                self.check_run(command, command.routing)
                self.jobs.append(lambda: self.run(command, command.routing))
            case PublishEpoch():
                self.publisher.append(lambda really: self.publish(command, really))
            case Flush():
                self.jobs.append(lambda: self.flush(command, command.routing))
            case WriteManifest():
                self.publisher.append(lambda really: self.write_manifest(command, really))
            case CollectGarbage():
                self.publisher.append(lambda really: self.collect_garbage(command, really))
            case WarmUp():
                self.jobs.append(lambda: WarmedUp(now=self.now, stage=command.stage, containers=command.containers))
            case Compact():
                self.jobs.append(lambda: self.compact(command))
            case Finish():
                self.over = command.reason
            case Fail():
                assert command.error.kind == "EngineError" and "made no progress" in command.error.message
                self.over = "failed"
            case ReleaseNodes():
                routing = self.controller.routes.table
                for name in set(command.nodes) & set(self.nodes):
                    here = routing.homes_on({name})
                    busy = [s for s in routing.owners if here[s] & set(routing.occupied(s))]
                    assert not busy, f"{name} is let go, and owns slices of {busy}"
                    self.node_goes(name)
                self.news()
            case ReleaseEpoch():
                self.sent = {k: v for k, v in self.sent.items() if k[1] > command.epoch}
            case CancelAll():
                self.sent = {k: v for k, v in self.sent.items() if k[0] >= command.attempt}
            case Tell():
                pass
            case _:
                raise AssertionError(command)

    # -- work --------------------------------------------------------------------------------------------------------

    def plan(self, command: PlanEpoch) -> Event:
        ranges: dict[str, SourceSpan] = {}
        ended = []
        for source, total in self.rows.items():
            first = (command.offsets.get(source) or {"row": 0})["row"]
            last = min(total, first + self.random.randint(1, command.rows_max))
            waits = self.faults > 0 and self.random.random() < 0.2
            if last > first and not waits:
                facts = [last] if self.random.random() < 0.5 else []
                ranges[source] = SourceSpan(start={"row": first}, end={"row": last}, rows=last - first, facts=facts)
            if (last if source in ranges else first) >= total:
                ended.append(source)
        if not ranges and not command.even_if_empty:
            return NothingNew(now=self.now, epoch=command.epoch, exhausted=len(ended) == len(self.rows))
        return EpochPlanned(now=self.now, epoch=command.epoch, ranges=ranges, exhausted=tuple(ended), clock_ms=1)

    def log(self, command: LogEpoch, really: bool) -> Event | None:
        if not really:
            return None
        kept = self.disk.ranges.get(command.epoch)
        assert kept is None or kept == command.record.ranges, "an epoch that ran was planned anew"
        self.disk.log[command.epoch] = command.record
        return EpochLogged(now=self.now, epoch=command.epoch, attempt=command.attempt)

    def check_run(self, command: RunStage, routing: RoutingTable) -> None:
        record = self.disk.log.get(command.epoch)
        assert record is not None, f"epoch {command.epoch} runs without a record"
        assert self.disk.ranges.setdefault(command.epoch, record.ranges) == record.ranges
        if TOPOLOGY[command.stage].is_source:
            assert command.span == record.ranges.get(command.stage)
        assert command.time.watermark >= command.time.before
        assert command.checkpoint == 0 or command.checkpoint in self.disk.manifests
        assert all(c in routing.homes_of(command.stage) for c in command.containers), (
            "a container without a node has work"
        )
        if command.peers.handover:
            assert not command.seal and self.controller.checkpoints.open is None, (
                "a checkpoint while slices change hands"
            )
            assert command.peers.sends
            for number, target in command.peers.handover.items():
                assert target in command.containers and target != routing.owners[command.stage][number]
        for number, held in enumerate(command.peers.copies):
            assert routing.owners[command.stage][number] not in held
        if not TOPOLOGY[command.stage].is_source:
            assert set(routing.occupied(command.stage)) <= set(command.containers)
        if command.peers.receives:
            assert (command.attempt, command.epoch - 1, command.stage) in self.sent, "what peers sent is gone"

    def run(self, command: RunStage, routing: RoutingTable) -> Event:
        if self.bad_luck(0.3):
            return StageFailed(
                now=self.now, epoch=command.epoch, stage=command.stage, attempt=command.attempt, reason="bad luck"
            )
        info = TOPOLOGY[command.stage]
        if any(routing.homes_of(command.stage)[c] not in self.nodes for c in command.containers) or not self.nodes:
            return StageFailed(
                now=self.now,
                epoch=command.epoch,
                stage=command.stage,
                attempt=command.attempt,
                reason="its node is lost",
            )
        if command.peers.sends:
            self.sent[command.attempt, command.epoch, command.stage] = []
        reports = []
        for index in range(self.random.randint(1, 3)) if info.is_source else command.containers:
            report = TaskReport(stage=command.stage, epoch=command.epoch, attempt=command.attempt, index=index)
            if info.is_source and command.span is not None:
                report.time_max = {WIN: command.epoch * 10 + self.random.randint(0, 30)}
            if info.stateful:
                self.apply(command, routing, report)
            reports.append(report)
        return StageDone(
            now=self.now, epoch=command.epoch, stage=command.stage, attempt=command.attempt, reports=tuple(reports)
        )

    def apply(self, command: RunStage, routing: RoutingTable, report: TaskReport) -> None:
        """A container: in memory at the epoch before, or from the checkpoint if it is that epoch's, or missing. Slices
        that are new to it come from the checkpoint, with what their old owner did since if that is not enough."""
        key = (command.stage, report.index)
        owned = frozenset(routing.slices_of(command.stage, report.index))
        home = routing.homes_of(command.stage)[report.index]
        before = command.epoch - 1
        found = self.containers.get(key)
        if found is not None and found.node != home:
            found = None
        if found is not None and found.attempt != command.attempt:
            if command.checkpoint in found.sealed:
                found.attempt, found.epoch, found.pending = command.attempt, command.checkpoint, []
                found.sealed = {command.checkpoint}
            else:
                found = None
        if found is not None and found.epoch != before:
            found = None
        handed = {
            h.slice
            for h in (self.sent.get((command.attempt, before, command.stage), []) if command.peers.receives else [])
            if (h.to, h.epoch, h.checkpoint) == (report.index, before, command.checkpoint)
        }
        new = owned - found.slices if found is not None else owned
        if new and command.checkpoint != before:
            if not new <= handed:
                report.missing = True
                return
            self.switched += len(new)
        self.load(command, new)
        if found is None:
            found = Container(home, command.attempt, before, owned, {command.checkpoint})
        found.slices = owned
        self.containers[key] = found
        found.epoch = command.epoch
        if command.seal:
            self.seal(found, command.stage, report.index)
        for number in [s for s, c in command.peers.handover.items() if s in found.slices]:
            handed_over = Handed(number, command.peers.handover[number], command.epoch, command.checkpoint)
            self.sent[command.attempt, command.epoch, command.stage].append(handed_over)
        ready = [d for d in found.pending if self.random.random() < 0.5]
        found.pending = [d for d in found.pending if d not in ready]
        report.deltas = ready
        self.keep_copies(command, found, report)

    def keep_copies(self, command: RunStage, container: Container, report: TaskReport) -> None:
        """Copies get to the newest checkpoint sooner or later, and are reported as they are."""
        wanted = {s for s, held in enumerate(command.peers.copies) if report.index in held}
        container.copies = {s: v for s, v in container.copies.items() if s in wanted}
        for number in sorted(wanted):
            if self.random.random() < 0.6:
                container.copies[number] = command.checkpoint
        current = sorted(s for s, v in container.copies.items() if v == command.checkpoint)
        report.held = (command.checkpoint, current)
        report.unsent = self.random.random() < 0.1
        if wanted and self.bad_luck(0.05):
            report.problem = "the disk is full"

    def load(self, command: RunStage, slices: frozenset[int]) -> None:
        if command.checkpoint == 0 or not slices:
            return
        manifest = self.disk.manifests[command.checkpoint]
        for number in slices:
            files = manifest.files_for(command.stage, [number])
            assert files and max(self.disk.files[f.name] for f in files) == command.checkpoint, "a slice has a gap"

    def seal(self, container: Container, stage: str, index: int) -> None:
        epoch, attempt = container.epoch, container.attempt
        name = f"{stage}/{epoch}-{attempt}-{index}"
        slices = tuple(sorted(container.slices))
        self.disk.files[name] = epoch
        file = DeltaFile(name, stage, "delta", 0, epoch, slices, 1, self.random.randint(1, 50), "c")
        container.sealed.add(epoch)
        container.pending.append(SealedDelta(epoch=epoch, attempt=attempt, file=file))

    def flush(self, command: Flush, routing: RoutingTable) -> Event:
        if self.bad_luck(0.3):
            return StageFailed(
                now=self.now, epoch=command.epoch, stage=StageId("flush"), attempt=command.attempt, reason="bad luck"
            )
        reports = []
        for stage, containers in command.containers.items():
            for index in containers:
                report = TaskReport(stage=stage, epoch=command.epoch, attempt=command.attempt, index=index)
                reports.append(report)
                found = self.containers.get((stage, index))
                sealed = found is not None and command.epoch in found.sealed
                if found is None or found.attempt != command.attempt or not (sealed or found.epoch == command.epoch):
                    report.missing = True
                    continue
                if not sealed:
                    self.seal(found, stage, index)
                report.deltas, found.pending = found.pending, []
        return Flushed(now=self.now, epoch=command.epoch, attempt=command.attempt, reports=tuple(reports))

    def publish(self, command: PublishEpoch, really: bool) -> Event | None:
        if not really:
            return None
        known = self.disk.published
        assert command.epoch <= len(known) + 1, f"{command.epoch} was published after {known[-1:]}"
        if command.epoch == len(known) + 1:
            known.append(command.epoch)
        return EpochPublished(now=self.now, epoch=command.epoch, attempt=command.attempt)

    def write_manifest(self, command: WriteManifest, really: bool) -> Event | None:
        if not really:
            return None
        m = command.manifest
        assert m.epoch <= len(self.disk.published), "a checkpoint of an epoch that is not published"
        assert m.names() <= set(self.disk.files), "a checkpoint of files that do not exist"
        for stage in TOPOLOGY.stateful:
            there = {s for f in m.files[stage.id] if f.epoch_to == m.epoch for s in f.slices}
            assert there == set(range(SLICES)), f"the checkpoint lacks slices of {stage.id}"
        for source in self.rows:
            ends = [self.disk.ranges[e][source] for e in range(1, m.epoch + 1) if source in self.disk.ranges[e]]
            if ends:
                assert m.sources[source]["offset"] == ends[-1].end
                assert m.sources[source]["facts"] == [f for r in ends for f in r.facts]
        self.disk.manifests[m.epoch] = m
        return ManifestWritten(now=self.now, epoch=command.epoch, attempt=command.attempt)

    def collect_garbage(self, command: CollectGarbage, really: bool) -> Event | None:
        disk = self.disk
        kept = sorted(disk.manifests)[-MANIFESTS_KEPT:]
        disk.manifests = {e: disk.manifests[e] for e in kept}
        disk.log = {e: r for e, r in disk.log.items() if e > kept[0]}
        return None

    def compact(self, command: Compact) -> Event:
        task = command.task
        if self.bad_luck(0.3):
            return Compacted(now=self.now, stage=command.stage, task=task, output=None, failed="bad luck")
        name = f"merged-{len(self.disk.files)}"
        self.disk.files[name] = task.epoch_to
        size = sum(f.bytes for f in task.inputs)
        out = DeltaFile(name, task.stage, task.kind, task.epoch_from, task.epoch_to, task.slices, 1, size, "c")
        return Compacted(now=self.now, stage=command.stage, task=task, output=out)

    # -- chance ------------------------------------------------------------------------------------------------------

    def bad_luck(self, weight: float = 1.0) -> bool:
        return self.random.random() < self.faults * weight

    def disturb(self) -> None:
        """One of the things that happen to a job."""
        r = self.random
        stage = r.choice(TOPOLOGY.stages).id
        stateful = r.choice(TOPOLOGY.stateful).id
        match r.randint(0, 10):
            case 0:
                for key in r.sample(sorted(self.containers), min(1, len(self.containers))):
                    del self.containers[key]  # a process ends
            case 1 | 2 if self.nodes:
                self.node_goes(r.choice(sorted(self.nodes)))
                self.news()
            case 3 if len(self.nodes) < 5:
                self.node_comes()
                self.news()
            case 4 | 5:
                self.step(RescaleRequested(now=self.now, stage=stage, instances=r.randint(1, SLICES)))
            case 6 | 7:
                instances = self.controller.routes.table.instances[stateful]
                targets = {s: r.randrange(instances) for s in r.sample(range(SLICES), r.randint(1, 3))}
                self.step(MoveRequested(now=self.now, stage=stateful, targets=targets))
            case 8:
                self.step(r.choice([RebalanceRequested(now=self.now), CancelMovesRequested(now=self.now)]))
            case 9 if self.nodes:
                if r.random() < 0.5:
                    self.step(LeaveRequested(now=self.now, nodes=(r.choice(sorted(self.nodes)),)))
                elif self.controller.epochs.in_flight:
                    epoch, attempt = min(self.controller.epochs.in_flight), self.controller.attempts.current
                    hung = r.randrange(self.controller.routes.table.instances[stateful])
                    self.step(
                        Stuck(
                            now=self.now,
                            stage=stateful,
                            epoch=Epoch(epoch),
                            attempt=Attempt(attempt),
                            containers=(hung,),
                            seconds=1.0,
                        )
                    )
            case 10:
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
        ready.append(lambda: Tick(now=self.now))
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
                self.step(StopRequested(now=self.now))
            self.turn()

    def heal(self) -> None:
        """Faults stop: the job must end by itself, if need be after a last start."""
        self.faults = 0.0
        if not self.nodes:
            self.node_comes()
        self.news()
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
                assert r.start["row"] == at, f"epoch {epoch} of {source} does not begin where the one before ended"
                at = r.end["row"]
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
    assert world.controller.attempts.recoveries == 0
    assert world.disk.starts == 1


def test_a_seed_replays_exactly() -> None:
    worlds = [live_and_heal(14, 120, 0.1, 3, 1.0, 400, False) for _ in range(2)]
    assert worlds[0].disk == worlds[1].disk
    assert worlds[0].disk.starts > 1, "this seed has deaths of the driver in it"
    assert worlds[0].now == worlds[1].now


def test_the_faults_are_really_met() -> None:
    """Among a few seeds there are recoveries, deaths, rescales and compactions; else the test above is idle."""
    worlds = [live_and_heal(seed, 150, 0.1, 3, 0.0, 600, False) for seed in range(12)]
    assert sum(w.controller.attempts.recoveries for w in worlds) > 0
    assert sum(w.disk.starts > 1 for w in worlds) > 3
    assert any(w.controller.routes.table.version > 2 for w in worlds)
    assert any(n.startswith("merged") for w in worlds for n in w.disk.files)
    assert sum(w.switched for w in worlds) > 5, "slices moved while epochs ran"
