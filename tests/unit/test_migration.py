"""Slices on the move, nodes that come and go: the controller event by event, as in ``test_controller.py``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from benchmarks.baselines import StopAndCopy
from penstock.control.checkpoints import MOVING_DELTAS
from penstock.control.controller import Controller
from penstock.control.epochs import INPUT_PAUSE_S, MOVING_EPOCH_S
from penstock.control.events import (
    CancelAll,
    CancelMovesRequested,
    Command,
    Compact,
    EpochPlanned,
    EpochPublished,
    Event,
    Finish,
    Flush,
    Flushed,
    LeaveRequested,
    ManifestWritten,
    MoveRequested,
    NodesChanged,
    NodesInvited,
    NothingNew,
    PlanEpoch,
    RebalanceRequested,
    ReleaseEpoch,
    ReleaseNodes,
    RescaleRequested,
    RunStage,
    StageDone,
    StageFailed,
    Started,
    StopRequested,
    StoreChanged,
    Stuck,
    Tell,
    Tick,
    WarmedUp,
    WarmUp,
    WriteManifest,
)
from penstock.control.holders import COMMITS_KEPT
from penstock.control.pacing import Pacer
from penstock.control.records import NodeInfo, SealedDelta, TaskReport
from penstock.control.routing import RoutingTable
from penstock.control.settings import Settings
from penstock.control.topology import StageInfo, Topology
from penstock.ids import Attempt, Epoch, StageId
from penstock.state.checkpoint import Manifest
from tests.unit.test_controller import COUNT, IN, WIN, Driver, delta, one

TOP = StageId("top")


class Fleet(Driver):
    """A job on some nodes, whose containers do what they are told: seal, keep copies, say what is current."""

    def __init__(self, *nodes: str, instances: int | None = None, **settings: Any) -> None:
        settings.setdefault("epochs_in_flight", 1)
        super().__init__(instances=instances or len(nodes), **settings)
        self.nodes = [NodeInfo(n) for n in nodes]
        self.copying = True
        """Copies are current as soon as a container hears of them."""
        self.full: set[int] = set()
        """Containers that have no room for copies."""
        self.writing = True
        """Deltas are written before a task ends."""
        self.warm = True
        """Processes start at once."""
        self.state_bytes = 0
        """Of every container."""
        self.runs: dict[tuple[int, StageId], RunStage] = {}
        self.said: list[str] = []
        self.commands: list[Command] = []

    def started(self) -> Fleet:
        self.start(nodes=tuple(self.nodes))
        return self

    def start(self, restored: Any = None, logged: Any = (), nodes: tuple[NodeInfo, ...] = ()) -> list[Command]:
        return self.step(Started(now=self.now, restored=restored, logged=logged, nodes=nodes))

    def step(self, event: Event) -> list[Command]:
        commands = super().step(event)
        self.commands += commands
        warm: list[WarmedUp] = []
        for command in commands:
            match command:
                case RunStage():
                    self.runs[command.epoch, command.stage] = command
                case Tell():
                    self.said.append(command.text)
                case WarmUp() if self.warm:
                    warm.append(WarmedUp(now=self.now, stage=command.stage, containers=command.containers))
        for answer in warm:
            commands = [*commands, *self.step(answer)]
        return commands

    # -- what happens ------------------------------------------------------------------------------------------------

    def up(self) -> None:
        """All that are being started are there."""
        for stage, container in sorted(self.controller.processes.warming):
            self.step(WarmedUp(now=self.now, stage=stage, containers=(container,)))

    def end(self, epoch: int, stage: StageId) -> list[Command]:
        """A stage is done, on the containers that were told to run."""
        run = self.runs[epoch, stage]
        owners = self.table(run).owners.get(stage, ())
        reports = []
        for index in run.containers or (0,):
            report = TaskReport(
                stage=stage, epoch=epoch, attempt=run.attempt, index=index, state_bytes=self.state_bytes
            )
            if run.containers and self.copying:
                wanted = [s for s, held in enumerate(run.peers.copies) if index in held]
                report.held = (run.checkpoint, [] if index in self.full else wanted)
                report.refused = wanted if index in self.full else []
            if run.seal and self.writing and index in owners:
                report.deltas = [self.delta_of(run, index)]
            reports.append(report)
        return self.step(
            StageDone(now=self.now, epoch=Epoch(epoch), stage=stage, attempt=run.attempt, reports=tuple(reports))
        )

    def delta_of(self, run: RunStage, index: int) -> SealedDelta:
        return delta(run.stage, run.epoch, run.attempt, index, self.table(run).slices_of(run.stage, index))

    def begin(self) -> int:
        """The next epoch, up to its first task."""
        self.now += 0.001
        epoch = self.controller.epochs.next
        self.plan(epoch)
        self.log(epoch, self.controller.attempts.current)
        return epoch

    def finish(self, epoch: int) -> list[Command]:
        for stage in self.topology.stages:
            self.end(epoch, stage.id)
        out = self.step(EpochPublished(now=self.now, epoch=Epoch(epoch), attempt=self.controller.attempts.current))
        for command in [c for c in out if isinstance(c, WriteManifest)]:
            out += self.step(ManifestWritten(now=self.now, epoch=command.epoch, attempt=command.attempt))
        return out

    def epoch(self) -> int:
        """A whole epoch, with its checkpoint if it has one."""
        number = self.begin()
        self.finish(number)
        return number

    def checkpoint(self) -> int:
        self.controller.checkpoints.wanted = True
        number = self.epoch()
        assert self.controller.checkpoints.committed == number
        return number

    def lose(self, *names: str) -> list[Command]:
        self.nodes = [n for n in self.nodes if n.name not in names]
        return self.step(NodesChanged(now=self.now, nodes=tuple(self.nodes)))

    def come(self, *names: str) -> list[Command]:
        self.nodes += [NodeInfo(n) for n in names]
        return self.step(NodesChanged(now=self.now, nodes=tuple(self.nodes)))

    def move(self, *slices: int, to: int) -> list[Command]:
        return self.step(MoveRequested(now=self.now, stage=COUNT, targets=dict.fromkeys(slices, to)))

    def run_again(self) -> None:
        """After a failure: what was under way is gone, and all that is in the log runs once more."""
        for attempt, epoch, stage in sorted(self.controller.attempts.outstanding):
            if attempt != self.controller.attempts.current:
                self.failed(epoch, stage, attempt)
        for epoch in sorted(self.controller.epochs.in_flight):
            self.finish(epoch)

    def until(self, wanted: Callable[[], bool], most: int = 12) -> int:
        """Epochs until something is so; how many."""
        for count in range(most):
            if wanted():
                return count
            self.epoch()
        raise AssertionError(f"not within {most} epochs")

    # -- what is seen ------------------------------------------------------------------------------------------------

    def table(self, run: RunStage) -> RoutingTable:
        return run.routing

    def owners(self, epoch: int, stage: StageId = COUNT) -> tuple[int, ...]:
        return tuple(self.table(self.runs[epoch, stage]).owners[stage])

    @property
    def phases(self) -> dict[int, str]:
        """slice -> phase of its move, of the stage that the tests look at"""
        return {m.slice: m.phase for m in self.controller.moves.of(COUNT)}

    @property
    def outcomes(self) -> list[tuple[int, str]]:
        return [(e.move.slice, e.outcome) for e in self.controller.moves.ended if e.move.stage == COUNT]


def fleet(*nodes: str, **settings: Any) -> Fleet:
    """A job that has taken its first checkpoint."""
    d = Fleet(*nodes, **settings).started()
    d.checkpoint()
    return d


# -- the four phases -------------------------------------------------------------------------------------------------


def test_a_slice_moves_while_epochs_run() -> None:
    d = fleet("a", "b")
    assert d.owners(1) == (0, 0, 0, 0, 1, 1, 1, 1)
    d.now += 1.0
    d.move(0, 3, to=1)
    assert d.phases == {0: "rebuild", 3: "rebuild"}, "the target runs already: nothing to prepare"
    assert d.epoch() == 2
    assert d.runs[2, COUNT].seal and d.controller.checkpoints.committed == 2, "the less changed since, the less is sent"
    assert d.runs[2, COUNT].peers.copies == ((1,), (), (), (1,), (), (), (), ())
    h = d.begin()
    assert d.phases == {0: "handover", 3: "handover"}
    source, target = d.runs[h, IN], h + 1
    assert not source.peers.handover
    released = [c.epoch for c in d.finish(h) if isinstance(c, ReleaseEpoch)]
    handing = d.runs[h, COUNT]
    assert handing.peers.handover == {0: 1, 3: 1} and handing.peers.sends and not handing.seal
    assert d.runs[h, WIN].peers.handover == {} and not d.runs[h, WIN].peers.sends
    assert d.owners(h) == (0, 0, 0, 0, 1, 1, 1, 1), "the old owner serves in the epoch of the handover"
    assert released == [h - 1], "what peers sent is read in the next epoch"
    assert d.begin() == target
    assert [c.epoch for c in d.finish(target) if isinstance(c, ReleaseEpoch)] == [target]
    assert d.owners(target) == (1, 0, 0, 1, 1, 1, 1, 1)
    receiving = d.runs[target, COUNT]
    assert (
        receiving.peers.receives and not receiving.peers.sends and not receiving.peers.handover and not receiving.seal
    )
    assert receiving.checkpoint == 2
    assert d.phases == {0: "release", 3: "release"}
    assert d.epoch() == target + 1
    assert d.runs[target + 1, COUNT].seal and not d.runs[target + 1, COUNT].peers.receives
    assert d.phases == {} and d.outcomes == [(0, "done"), (3, "done")]


def test_the_record_of_an_epoch_says_who_owns_from_it_on() -> None:
    d = fleet("a", "b")
    d.move(0, to=1)
    d.until(lambda: d.phases == {0: "handover"})
    assert d.controller.inputs.log[Epoch(d.controller.epochs.next - 1)].routing is None, "nothing new in epoch h"
    number = d.epoch()
    record = d.controller.inputs.log[Epoch(number)]
    assert record.routing is not None and record.routing.owners[COUNT] == (1, 0, 0, 0, 1, 1, 1, 1)


def test_no_checkpoint_opens_while_slices_switch() -> None:
    d = fleet("a", "b", checkpoint_interval_s=0.0)
    d.move(0, to=1)
    d.until(lambda: not d.phases)
    h = next(e for (e, _), run in d.runs.items() if run.peers.handover)
    seals = {e: run.seal for (e, stage), run in d.runs.items() if stage == COUNT}
    assert not seals[h] and not seals[h + 1], "they were due in every epoch"
    assert seals[h + 2], "and then the move is over"


def test_nothing_is_handed_over_while_a_checkpoint_is_open() -> None:
    d = fleet("a", "b")
    d.writing = False
    d.controller.checkpoints.wanted = True
    d.move(0, to=1)
    for _ in range(3):
        d.epoch()
    assert d.controller.checkpoints.open is not None and d.phases == {0: "rebuild"}
    assert not any(run.peers.handover for run in d.runs.values())


def test_a_copy_that_is_too_far_behind_is_not_switched_to() -> None:
    d = fleet("a", "b")
    d.controller.holders.held[COUNT, 1] = (1, frozenset({0}))  # it was current once, and nothing was heard since
    d.copying = False
    for _ in range(COMMITS_KEPT + 1):
        d.checkpoint()
    d.move(0, to=1)
    for _ in range(3):
        d.epoch()
    assert d.phases == {0: "rebuild"}
    d.copying = True
    assert d.until(lambda: not d.phases) > 1 and d.outcomes == [(0, "done")]


def test_a_target_without_room_for_a_copy_takes_the_slice_from_the_durable_checkpoint() -> None:
    """Storm 492: the move waited for a copy that its target had given up."""
    d = fleet("a", "b")
    d.checkpoint()
    d.full = {1}
    d.step(StoreChanged(now=d.now, away=True))
    d.move(0, to=1)
    for _ in range(4):
        d.epoch()
    assert d.phases == {0: "rebuild"}, "there is nobody to take it from"
    d.step(StoreChanged(now=d.now, away=False))
    d.until(lambda: not d.phases)
    assert d.outcomes == [(0, "done")] and d.controller.routes.table.owners[COUNT][0] == 1


def test_what_is_asked_for_later_waits_for_the_checkpoint_after_the_first_switch() -> None:
    d = fleet("a", "b")
    d.move(0, to=1)
    d.until(lambda: d.phases == {0: "handover"})
    d.move(1, to=1)
    d.writing = False  # the checkpoint after the switch does not come to an end
    for _ in range(5):
        d.epoch()
    assert d.phases == {0: "release", 1: "rebuild"}
    assert sum(bool(run.peers.handover) for run in d.runs.values()) == 1
    d.writing = True
    checkpoint = d.controller.checkpoints.open
    assert checkpoint is not None
    deltas = {s: [d.delta_of(d.runs[checkpoint.epoch, s], i) for i in (0, 1)] for s in (COUNT, WIN)}
    for stage, found in deltas.items():
        number = d.begin() if stage == COUNT else d.controller.epochs.next - 1
        if stage == COUNT:
            d.end(number, IN)
        reports = tuple(
            TaskReport(stage=stage, epoch=number, attempt=1, index=i, deltas=[x]) for i, x in enumerate(found)
        )
        commands = d.step(StageDone(now=d.now, epoch=Epoch(number), stage=stage, attempt=Attempt(1), reports=reports))
    manifest = one(commands, WriteManifest)
    d.step(ManifestWritten(now=d.now, epoch=manifest.epoch, attempt=manifest.attempt))
    d.step(EpochPublished(now=d.now, epoch=Epoch(number), attempt=Attempt(1)))
    d.until(lambda: not d.phases)
    assert d.outcomes == [(0, "done"), (1, "done")]


def test_many_slices_of_several_stages_switch_in_one_epoch() -> None:
    d = fleet("a", "b")
    d.now += 1.0
    d.move(0, 1, to=1)
    d.step(MoveRequested(now=d.now, stage=WIN, targets={7: 0}))
    d.until(lambda: not d.controller.moves.by_slice)
    h = next(e for (e, _), run in d.runs.items() if run.peers.handover)
    assert d.runs[h, COUNT].peers.handover == {0: 1, 1: 1} and d.runs[h, WIN].peers.handover == {7: 0}
    assert d.controller.routes.table.owners == {COUNT: (1, 1, 0, 0, 1, 1, 1, 1), WIN: (0, 0, 0, 0, 1, 1, 1, 0)}


def test_a_move_asked_for_twice() -> None:
    d = fleet("a", "b", "c")
    d.move(0, to=1)
    version = d.controller.moves.by_slice[COUNT, 0]
    d.now += 5.0
    d.move(0, to=1)
    assert d.controller.moves.by_slice[COUNT, 0] == version, "the same move, since when it was asked for first"
    d.move(0, to=2)
    assert d.controller.moves.by_slice[COUNT, 0].target == 2 and d.outcomes == [(0, "cancelled")]
    d.move(0, to=0)
    assert d.phases == {} and d.outcomes == [(0, "cancelled")] * 2, "to stay is to call it off"


@pytest.mark.parametrize(("slices", "to"), [((0,), 0), ((0,), 2), ((0,), -1), ((8, -1), 1)])
def test_a_move_that_cannot_be_changes_nothing(slices: tuple[int, ...], to: int) -> None:
    d = fleet("a", "b")
    d.move(*slices, to=to)
    assert not d.controller.moves.by_slice


def test_slices_spread_evenly_when_asked() -> None:
    d = fleet("a", "b")
    d.move(0, 1, 2, 3, to=1)
    d.until(lambda: not d.phases)
    assert set(d.controller.routes.table.owners[COUNT]) == {1}
    d.step(RebalanceRequested(now=d.now))
    d.until(lambda: not d.phases)
    assert Counter(d.controller.routes.table.owners[COUNT]) == {0: 4, 1: 4}


# -- in each phase -----------------------------------------------------------------------------------------------------

PHASES = ("prepare", "rebuild", "handover", "switch", "release")
TARGET = 2
"""The container of the new node."""


def replaced(phase: str, **settings: Any) -> Fleet:
    """Node c was lost; d takes its place, and slices move to it: so far."""
    d = fleet("a", "b", "c", **settings)
    d.lose("c")
    d.run_again()
    assert TARGET not in d.controller.routes.table.owners[COUNT]
    d.checkpoint()
    d.warm = False
    d.come("d")
    assert d.controller.routes.table.homes_of(COUNT)[TARGET] == "d"
    assert set(d.phases.values()) == {"prepare"}
    if phase == "prepare":
        return d
    d.up()
    d.warm = True
    assert set(d.phases.values()) == {"rebuild"}
    last = "handover" if phase == "switch" else phase
    d.until(lambda: last in d.phases.values())
    if phase == "switch":
        d.begin()  # the epoch of the handover is over; this is the first with new owners
    assert set(d.phases.values()) == {phase}
    return d


def test_a_new_node_gets_a_process_before_it_gets_slices() -> None:
    d = replaced("prepare")
    assert [c.containers for c in d.commands if isinstance(c, WarmUp) and c.stage == COUNT][-1] == (TARGET,)
    assert [c.homes for c in d.commands if isinstance(c, WarmUp) and c.stage == COUNT][-1] == {TARGET: "d"}
    d.epoch()
    assert TARGET not in d.runs[d.controller.epochs.next - 1, COUNT].containers, "epochs go on without it"
    d.step(WarmedUp(now=d.now, stage=COUNT, containers=(TARGET,)))
    number = d.epoch()
    assert d.controller.processes.warming and TARGET not in d.runs[number, COUNT].containers, (
        "others are being started there"
    )
    d.up()
    number = d.epoch()
    assert TARGET in d.runs[number, COUNT].containers and TARGET in d.runs[number, IN].containers


@pytest.mark.parametrize("phase", PHASES)
def test_cancel(phase: str) -> None:
    d = replaced(phase)
    moving = sorted(d.phases)
    d.step(CancelMovesRequested(now=d.now, stage=COUNT))
    early = phase in ("prepare", "rebuild")
    assert d.said[-1] == f"{len(moving) if early else 0} moves cancelled"
    if phase == "switch":
        d.finish(d.controller.epochs.next - 1)
    d.until(lambda: not d.phases)
    assert (TARGET in d.controller.routes.table.owners[COUNT]) is not early
    assert {o for s, o in d.outcomes if s in moving} == ({"cancelled"} if early else {"done"})


def test_cancel_some_slices() -> None:
    d = fleet("a", "b")
    d.move(0, 1, to=1)
    d.step(CancelMovesRequested(now=d.now, stage=COUNT, slices=(1,)))
    assert d.phases == {0: "rebuild"} and d.outcomes == [(1, "cancelled")]
    d.step(CancelMovesRequested(now=d.now, stage=WIN))
    assert d.phases == {0: "rebuild"}
    d.step(CancelMovesRequested(now=d.now))
    assert d.phases == {}


@pytest.mark.parametrize("phase", PHASES)
def test_timeout(phase: str) -> None:
    d = replaced(phase, move_timeout_s=50.0)
    d.now += 51.0
    d.step(Tick(now=d.now))
    early = phase in ("prepare", "rebuild")
    if early:
        assert d.phases == {} and {o for _, o in d.outcomes} == {"timed out"}
    if phase == "switch":
        d.finish(d.controller.epochs.next - 1)
    d.until(lambda: not d.phases)
    assert (TARGET in d.controller.routes.table.owners[COUNT]) is not early


@pytest.mark.parametrize("phase", PHASES)
def test_the_target_is_lost(phase: str) -> None:
    d = replaced(phase)
    early = phase in ("prepare", "rebuild")
    if early:
        d.begin()  # something is under way
    number = d.controller.epochs.next - 1
    d.lose("d")
    assert d.phases == {}
    assert {o for _, o in d.outcomes} == ({"target lost"} if early else {"done"})
    d.run_again()
    assert set(d.controller.routes.table.owners[COUNT]) == {0, 1}, "its slices go back to those who are left"
    again = d.runs[d.controller.checkpoints.committed + 1, COUNT]
    assert set(d.table(again).owners[COUNT]) == {0, 1} and not again.peers.handover and not again.peers.receives
    assert d.epoch() > number


@pytest.mark.parametrize("phase", PHASES)
def test_the_source_is_lost(phase: str) -> None:
    d = replaced(phase)
    early = phase in ("prepare", "rebuild")
    from_a = sorted(m.slice for m in d.controller.moves.of(COUNT) if m.source == 0)
    assert from_a
    if early:
        d.begin()
    d.lose("a")
    assert not set(from_a) & set(d.phases)
    assert {o for s, o in d.outcomes if s in from_a} == ({"overtaken by a recovery"} if early else {"done"})
    d.run_again()
    owners = d.controller.routes.table.owners[COUNT]
    assert 0 not in owners
    if not early:
        assert {owners[s] for s in from_a} == {TARGET}, "what had switched has arrived"
    d.epoch()


@pytest.mark.parametrize("later", [0, 1], ids=["in the epoch of the handover", "in the epoch after it"])
def test_a_failure_while_slices_switch(later: int) -> None:
    """Both can go back to the checkpoint: everything since runs again, with the new owners from the start."""
    d = fleet("a", "b")
    d.move(0, to=1)
    d.epoch()
    for _ in range(8):
        h = d.begin()
        if d.phases == {0: "handover"}:
            break
        d.finish(h)
    if later:
        d.finish(h)
        d.begin()
    committed = d.controller.checkpoints.committed
    assert committed < h - 1, "there is something to run again"
    one(d.failed(h + later, IN), CancelAll)
    assert d.phases == {} and d.outcomes == [(0, "done")]
    assert not d.controller.moves.changing
    d.run_again()
    for epoch in range(committed + 1, h + later + 1):
        run = d.runs[epoch, COUNT]
        assert d.owners(epoch) == (1, 0, 0, 0, 1, 1, 1, 1) and run.attempt == 2
        assert not run.peers.handover and not run.peers.receives
    d.checkpoint()


def test_a_copy_under_way_survives_a_failure() -> None:
    d = fleet("a", "b")
    d.copying = False
    d.move(0, to=1)
    d.epoch()
    number = d.begin()
    d.failed(number, IN)
    assert d.phases == {0: "rebuild"}
    d.copying = True
    d.run_again()
    d.until(lambda: not d.phases)
    assert d.outcomes == [(0, "done")]


# -- rescaling ---------------------------------------------------------------------------------------------------------


def test_up_room_first_then_slices() -> None:
    d = fleet("a", "b", instances=2)
    d.warm = False
    assert one(d.step(RescaleRequested(now=d.now, stage=COUNT, instances=4)), WarmUp).containers == (2, 3)
    before = d.epoch()
    assert d.table(d.runs[before, COUNT]).instances[COUNT] == 2, "epochs go on while processes start"
    d.warm = True
    d.step(WarmedUp(now=d.now, stage=COUNT, containers=(2, 3)))
    number = d.epoch()
    table = d.table(d.runs[number, COUNT])
    assert table.instances[COUNT] == 4 and set(table.owners[COUNT]) == {0, 1}, "room, and nobody in it yet"
    assert set(d.phases.values()) == {"rebuild"}
    d.until(lambda: not d.phases)
    assert Counter(d.controller.routes.table.owners[COUNT]) == {0: 2, 1: 2, 2: 2, 3: 2}
    assert d.controller.attempts.recoveries == 0


def test_down_vacated_first_then_shrunk() -> None:
    d = fleet("a", "b", instances=4)
    d.step(RescaleRequested(now=d.now, stage=COUNT, instances=2))
    assert {m.source for m in d.controller.moves.of(COUNT)} == {2, 3}
    h = d.controller.epochs.next
    while not d.runs.get((h, COUNT)) or not d.runs[h, COUNT].peers.handover:
        h = d.epoch()
        assert d.table(d.runs[h, COUNT]).instances[COUNT] == 4
    d.until(lambda: not d.phases)
    number = d.epoch()
    table = d.table(d.runs[number, COUNT])
    assert table.instances[COUNT] == 2 and Counter(table.owners[COUNT]) == {0: 4, 1: 4}
    assert table.instances[WIN] == 4, "the others stay as they are"
    assert d.controller.resizes.wanted == {}


def test_numbers_do_not_change_in_the_epoch_that_reads_what_was_handed_over() -> None:
    """A container's number is its address in the exchange: a rescale of the same stage waits for that."""
    d = fleet("a", "b")
    d.move(0, to=1)
    d.until(lambda: d.phases == {0: "handover"})
    d.step(RescaleRequested(now=d.now, stage=COUNT, instances=3))
    number = d.epoch()
    assert d.runs[number, COUNT].peers.receives and d.table(d.runs[number, COUNT]).instances[COUNT] == 2
    assert d.table(d.runs[d.epoch(), COUNT]).instances[COUNT] == 3


def test_up_and_down_again_before_anything_has_moved() -> None:
    d = fleet("a", "b")
    d.step(RescaleRequested(now=d.now, stage=COUNT, instances=4))
    d.epoch()
    assert d.phases
    d.step(RescaleRequested(now=d.now, stage=COUNT, instances=2))
    d.until(lambda: not d.phases and not d.controller.resizes.wanted)
    d.epoch()
    assert d.controller.routes.table.instances[COUNT] == 2
    assert d.controller.routes.table.owners[COUNT] == (0, 0, 0, 0, 1, 1, 1, 1)


def stateless() -> Fleet:
    d = Fleet("a", "b", instances=2)
    d.topology = Topology(
        (
            StageInfo(IN, True, False, False, 0, 0, ()),
            StageInfo(COUNT, False, True, False, 0, 0, (IN,)),
            StageInfo(TOP, False, False, False, 0, 0, (COUNT,)),
        )
    )
    routing = RoutingTable.initial(8, d.topology.keyed(), 2)
    settings = Settings(epochs_in_flight=1, checkpoint_interval_s=-1.0)
    d.controller = Controller(d.topology, routing, Pacer.start(100, 1, 1_000, 500), settings, Manifest("j", "f", {}, 0))
    return d.started()


@pytest.mark.parametrize(("stage", "instances"), [(TOP, 4), (TOP, 1), (IN, 3)])
def test_a_stage_without_state_is_rescaled_at_once(stage: StageId, instances: int) -> None:
    d = stateless()
    d.checkpoint()
    d.step(RescaleRequested(now=d.now, stage=stage, instances=instances))
    number = d.epoch()
    table = d.table(d.runs[number, stage])
    assert table.instances[stage] == instances
    if stage == TOP:
        assert set(table.owners[TOP]) == set(range(instances)) == set(d.runs[number, TOP].containers)
    assert not d.controller.moves.by_slice and d.runs[number, COUNT].peers.copies == ()


# -- idle, stop and end ------------------------------------------------------------------------------------------------


def test_while_input_comes_no_empty_epochs_run_between_its_own() -> None:
    d = fleet("a", "b")
    d.move(0, to=1)
    d.epoch()
    came = d.controller.epochs.last_input
    assert came > 0

    def asked(at: float) -> bool:
        out = [*d.step(NothingNew(now=at, epoch=d.controller.epochs.next)), *d.step(Tick(now=at))]
        return any(c.even_if_empty for c in out if isinstance(c, PlanEpoch))

    assert not any(asked(came + k / 20) for k in range(1, 20))
    assert any(asked(came + INPUT_PAUSE_S + k / 20) for k in range(1, 5))


def test_without_input_empty_epochs_carry_the_move() -> None:
    d = fleet("a", "b")
    d.move(0, to=1)
    epochs = 0
    while d.phases:
        d.step(NothingNew(now=d.now, epoch=d.controller.epochs.next))
        while True:
            d.now += 0.01
            plans = [c for c in d.step(Tick(now=d.now)) if isinstance(c, PlanEpoch)]
            if plans and plans[0].even_if_empty:
                break
            if plans:
                d.step(NothingNew(now=d.now, epoch=d.controller.epochs.next))
        number = d.controller.epochs.next
        d.step(EpochPlanned(now=d.now, epoch=number, ranges={}, exhausted=(), clock_ms=1))
        d.log(number)
        d.finish(number)
        epochs += 1
        assert epochs < 10
    assert d.outcomes == [(0, "done")]
    assert d.now < 1 + 20 * MOVING_EPOCH_S, "not at the pace of an idle job"


@pytest.mark.parametrize("phase", PHASES)
def test_stop_with_moves_under_way(phase: str) -> None:
    d = replaced(phase)
    d.step(StopRequested(now=d.now))
    ending(d, NothingNew(now=d.now, epoch=d.controller.epochs.next))
    assert (TARGET in d.controller.routes.table.owners[COUNT]) is (phase in ("switch", "release"))


@pytest.mark.parametrize("phase", PHASES)
def test_the_input_ends_with_moves_under_way(phase: str) -> None:
    d = replaced(phase)
    if phase == "switch":
        d.finish(d.controller.epochs.next - 1)
    final = d.controller.epochs.next
    d.step(NothingNew(now=d.now, epoch=final, exhausted=True))
    d.log(final, d.controller.attempts.current)
    ending(d, None)
    assert one(d.commands, Finish).reason == "complete"


def test_stop_in_the_epoch_of_the_handover_leaves_the_slice_where_it_is() -> None:
    """There is no epoch in which it could switch."""
    d = fleet("a", "b")
    d.move(0, to=1)
    d.epoch()
    while d.phases != {0: "handover"}:
        number = d.begin()
        if d.phases != {0: "handover"}:
            d.finish(number)
    d.step(StopRequested(now=d.now))
    ending(d, None)
    manifest = [c for c in d.commands if isinstance(c, WriteManifest)][-1].manifest
    assert manifest.routing["owners"][COUNT] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert manifest.epoch == number
    assert d.outcomes == [(0, "cancelled")]


def test_a_rescale_that_stops_everything_calls_off_the_moves_of_its_stage() -> None:
    d = fleet("a", "b", "c", make=StopAndCopy)
    d.move(0, to=2)
    d.step(MoveRequested(now=d.now, stage=WIN, targets={0: 2}))
    while d.phases != {0: "handover"}:
        number = d.begin()
        if d.phases != {0: "handover"}:
            d.finish(number)
    d.step(MoveRequested(now=d.now, stage=COUNT, targets={1: 2}))
    d.step(RescaleRequested(now=d.now, stage=COUNT, instances=2))
    d.finish(number)
    flush = [c for c in d.commands if isinstance(c, Flush)][-1]
    flushed(d, flush)
    assert d.outcomes == [(0, "cancelled"), (1, "cancelled")]
    assert d.controller.routes.table.instances[COUNT] == 2 and set(d.controller.routes.table.owners[COUNT]) == {0, 1}
    d.epoch()


def flushed(d: Fleet, flush: Flush) -> None:
    reports = []
    for stage, containers in flush.containers.items():
        for index in containers:
            made = delta(stage, flush.epoch, flush.attempt, index, flush.routing.slices_of(stage, index))
            reports.append(
                TaskReport(stage=stage, epoch=flush.epoch, attempt=flush.attempt, index=index, deltas=[made])
            )
    for command in d.step(Flushed(now=d.now, epoch=flush.epoch, attempt=flush.attempt, reports=tuple(reports))):
        if isinstance(command, WriteManifest):
            d.step(ManifestWritten(now=d.now, epoch=command.epoch, attempt=command.attempt))


def ending(d: Fleet, event: Event | None) -> None:
    """To the end of the job: what is under way is done, flushed and written."""
    if d.controller.epochs.in_flight:
        for epoch in sorted(d.controller.epochs.in_flight):
            d.finish(epoch)
    if event is not None:
        d.step(event)
    for _ in range(3):
        flush = next((c for c in reversed(d.commands) if isinstance(c, Flush)), None)
        if d.controller.phase == "stopped" or flush is None:
            break
        flushed(d, flush)
    assert d.controller.phase == "stopped"
    assert [c for c in d.commands if isinstance(c, Finish)]


# -- nodes that leave --------------------------------------------------------------------------------------------------


def test_a_node_is_drained_before_it_is_given_back() -> None:
    d = fleet("a", "b", "c")
    d.step(LeaveRequested(now=d.now, nodes=("b",)))
    while not (gone := [c for c in d.commands if isinstance(c, ReleaseNodes)]):
        number = d.epoch()
        assert number < 20
    assert [c.nodes for c in gone] == [("b",)]
    assert all(1 not in owners for owners in d.controller.routes.table.owners.values())
    assert 1 not in d.runs[number, COUNT].containers, "an epoch without it has been published"
    d.begin()
    assert d.controller.attempts.outstanding, "an epoch is under way"
    d.lose("b")
    assert d.controller.attempts.recoveries == 0 and d.said[-1] == "node b has left"


@pytest.mark.parametrize("schedule", ["load", "round_robin"])
@pytest.mark.parametrize("node", ["a", "b", "c", "d"])
def test_slices_of_a_node_that_leaves_go_where_they_are_held(node: str, schedule: str) -> None:
    d = fleet("a", "b", "c", "d", backups=1, schedule=schedule)
    d.epoch()  # copies are current, and that was said
    holders, owners = d.controller.routes.table.holders[COUNT], d.controller.routes.table.owners[COUNT]
    (gone,) = (c for c, home in d.controller.routes.table.homes_of(COUNT).items() if home == node)
    d.step(LeaveRequested(now=d.now, nodes=(node,)))
    moves = d.controller.moves.of(COUNT)
    assert {m.slice for m in moves} == {s for s, c in enumerate(owners) if c == gone}
    assert all(m.target in holders[m.slice] for m in moves), "nothing is copied"
    d.until(lambda: any(isinstance(c, ReleaseNodes) for c in d.commands), most=20)
    assert sorted(Counter(d.controller.routes.table.owners[COUNT]).values()) == [2, 3, 3]


def test_a_node_is_drained_of_what_it_is_given_while_it_is_told_to_leave() -> None:
    d = fleet("a", "b", "c")
    to = next(c for c, n in d.controller.routes.table.homes_of(COUNT).items() if n == "c")
    mine = [s for s, c in enumerate(d.controller.routes.table.owners[COUNT]) if c != to][:2]
    d.move(*mine, to=to)
    d.until(lambda: "handover" in d.phases.values())
    d.step(LeaveRequested(now=d.now, nodes=("c",)))
    d.until(lambda: any(isinstance(c, ReleaseNodes) for c in d.commands), most=20)
    assert to not in d.controller.routes.table.owners[COUNT]


def test_a_node_is_drained_though_a_move_takes_too_long() -> None:
    d = fleet("a", "b", "c", move_timeout_s=5.0)
    d.copying = False
    d.step(LeaveRequested(now=d.now, nodes=("c",)))
    d.epoch()
    assert d.phases
    d.now += 6.0
    d.epoch()
    assert "timed out" in [outcome for _, outcome in d.outcomes]
    d.copying = True
    d.until(lambda: any(isinstance(c, ReleaseNodes) for c in d.commands), most=20)


def test_a_container_is_emptied_though_there_was_nobody_to_take_its_slices_at_first() -> None:
    d = fleet("a", "b", "c")
    d.step(RescaleRequested(now=d.now, stage=COUNT, instances=2))
    d.controller.balance.reasons.clear()  # what a recovery in between does: nobody had a process just then
    d.until(lambda: d.controller.routes.table.instances[COUNT] == 2, most=20)
    assert set(d.controller.routes.table.owners[COUNT]) == {0, 1} and not d.controller.resizes.wanted


def test_who_calls_the_moves_off_lets_the_node_stay() -> None:
    d = fleet("a", "b", "c")
    d.copying = False
    d.step(LeaveRequested(now=d.now, nodes=("c",)))
    d.epoch()
    assert d.phases
    d.step(CancelMovesRequested(now=d.now))
    assert d.said[-1].endswith("moves cancelled; node c to stay")
    d.copying = True
    for _ in range(6):
        d.epoch()
    assert not d.phases and not d.controller.fleet.leaving
    assert not any(isinstance(c, ReleaseNodes) for c in d.commands)


def test_a_source_is_read_elsewhere_before_its_node_is_given_back() -> None:
    d = fleet("a", "b")
    d.step(RescaleRequested(now=d.now, stage=IN, instances=1))
    d.epoch()
    assert d.runs[d.epoch(), IN].containers == (0,)
    d.controller.processes.up[IN] -= {1}  # it has read nothing for a while
    d.warm = False
    assert (IN, (1,)) in [
        (c.stage, c.containers) for c in d.step(LeaveRequested(now=d.now, nodes=("a",))) if isinstance(c, WarmUp)
    ]
    d.until(lambda: not d.phases and 0 not in d.controller.routes.table.owners[COUNT], most=20)
    for _ in range(3):
        assert d.runs[d.epoch(), IN].containers == (0,), "until the other is there nobody waits for it"
    assert not any(isinstance(c, ReleaseNodes) for c in d.commands)
    d.up()
    assert d.runs[d.epoch(), IN].containers == (1,)
    d.until(lambda: any(isinstance(c, ReleaseNodes) for c in d.commands), most=5)


@pytest.mark.parametrize(("megabytes", "switches"), [(1, 1), (64, 2), (2000, 4)])
def test_a_container_takes_over_so_much_state_at_a_time(megabytes: int, switches: int) -> None:
    d = fleet("a", "b")  # of 8 slices each has 4
    d.state_bytes = megabytes * 2**20 // 2
    d.epoch()
    mine = [s for s, c in enumerate(d.controller.routes.table.owners[COUNT]) if c == 0]
    d.move(*mine, to=1)
    seen = []
    for _ in range(40):
        seen.append(d.owners(d.epoch()).count(1))
        if not d.phases:
            break
    steps = sorted(set(seen))
    assert steps[-1] == 8 and len(steps) == switches + 1, steps
    assert {b - a for a, b in pairwise(steps)} == {4 // switches}


@pytest.mark.parametrize(("epoch_s", "checkpoints"), [(0.001, 2), (1.0, 3), (5.0, 5)])
def test_switches_follow_each_other_until_a_checkpoint_is_due(epoch_s: float, checkpoints: int) -> None:
    """One after the asking, one at the end; in between as time goes, at most one for each switch."""
    d = fleet("a", "b", checkpoint_interval_s=2.0)
    d.state_bytes = 2**30  # a slice of 256 MB is a switch of its own
    d.epoch()
    before = d.controller.checkpoints.committed
    mine = [s for s, c in enumerate(d.controller.routes.table.owners[COUNT]) if c == 0]
    d.now += 1.0
    d.move(*mine, to=1)
    committed, handovers = [before], 0
    for _ in range(40):
        d.now += epoch_s
        handovers += bool(d.runs[d.epoch(), COUNT].peers.handover)
        if d.controller.checkpoints.committed != committed[-1]:
            committed.append(d.controller.checkpoints.committed)
        if not d.phases:
            break
    assert handovers == len(mine) == 4
    assert len(committed) - 1 == checkpoints
    assert d.controller.checkpoints.committed == max(e for e, _ in d.runs), (
        "it came as soon as there was nothing more to switch"
    )


def test_somebody_must_stay() -> None:
    d = fleet("a", "b")
    d.step(LeaveRequested(now=d.now, nodes=("a", "b")))
    assert d.controller.fleet.leaving == set() and "somebody must stay" in d.said[-1]
    d.step(LeaveRequested(now=d.now, nodes=("a",)))
    d.step(LeaveRequested(now=d.now, nodes=("b",)))
    assert d.controller.fleet.leaving == {"a"} and "somebody must stay" in d.said[-1]


def test_a_node_that_was_to_leave_stays_when_the_others_are_lost() -> None:
    d = fleet("a", "b")
    d.step(LeaveRequested(now=d.now, nodes=("a",)))
    d.begin()
    d.lose("b")
    assert d.controller.fleet.leaving == set() and "node a stays after all: there is no other left" in d.said
    d.run_again()
    assert set(d.controller.routes.table.homes_of(COUNT).values()) == {"a"}
    d.epoch()


def test_a_node_that_was_given_back_gets_nothing_more() -> None:
    """It may take a while to go, and more may be asked of the job in the meantime."""
    d = fleet("a", "b", "c")
    d.step(LeaveRequested(now=d.now, nodes=("b",)))
    d.until(lambda: any(isinstance(c, ReleaseNodes) for c in d.commands), most=20)
    d.step(RebalanceRequested(now=d.now))
    d.step(LeaveRequested(now=d.now, nodes=("b",)))
    for _ in range(4):
        number = d.epoch()
        assert 1 not in d.runs[number, COUNT].containers
    assert sum(isinstance(c, ReleaseNodes) for c in d.commands) == 1
    d.lose("b")
    d.come("b")  # started again under the same name
    d.until(lambda: 1 in d.controller.routes.table.owners[COUNT], most=20)


def test_a_node_that_leaves_keeps_no_backups() -> None:
    d = fleet("a", "b", "c", backups=1)
    d.step(LeaveRequested(now=d.now, nodes=("c",)))
    number = d.epoch()
    table = d.table(d.runs[number, COUNT])
    assert all(2 not in held for held in table.holders[COUNT])


# -- nodes that are lost -----------------------------------------------------------------------------------------------


def test_lost_slices_come_up_where_they_are_held() -> None:
    d = fleet("a", "b", "c", backups=1)
    d.epoch()  # copies are current at the checkpoint, and that was said
    holders = d.controller.routes.table.holders[COUNT]
    owners = d.controller.routes.table.owners[COUNT]
    lost = [s for s, c in enumerate(owners) if c == 2]
    d.begin()
    commands = d.lose("c")
    assert one(commands, CancelAll).reason == "lost node c"
    new = d.controller.routes.table.owners[COUNT]
    assert all(new[s] in holders[s] for s in lost)
    assert all(new[s] == c for s, c in enumerate(owners) if c != 2), "nobody else is disturbed"
    told = next(text for text in d.said if "'count'" in text)
    assert told.startswith(f"{len(lost)} slices of 'count' go to containers ")
    assert told.endswith(f"{len(lost)} from backups")
    d.run_again()
    assert d.controller.checkpoints.committed == 1 and 2 not in d.runs[2, COUNT].containers


def test_a_copy_that_the_last_commits_bring_up_to_date_counts() -> None:
    d = fleet("a", "b", "c", backups=1)
    d.epoch()
    d.copying = False
    d.checkpoint()
    d.begin()
    d.lose("c")
    assert next(text for text in d.said if "'count'" in text).endswith(" from backups")


@pytest.mark.parametrize("stale", [False, True], ids=["nobody holds them", "copies are too far behind"])
def test_slices_that_nobody_holds_come_from_the_durable_checkpoint(stale: bool) -> None:
    d = fleet("a", "b", "c", backups=int(stale))
    d.epoch()
    d.copying = False
    for _ in range(COMMITS_KEPT + 1 if stale else 0):
        d.checkpoint()
    lost = d.controller.routes.table.owners[COUNT].count(2)  # type: ignore[arg-type]
    d.begin()
    d.lose("c")
    told = next(text for text in d.said if "'count'" in text)
    assert told.endswith(f"0 from backups, {lost} from the durable checkpoint")


def test_a_node_that_owned_nothing_costs_no_recovery() -> None:
    d = fleet("a", "b", "c", instances=2)
    d.step(CancelMovesRequested(now=d.now))
    d.lose("c")
    assert d.controller.attempts.recoveries == 0
    assert d.said[-1] == "lost node c; it owned nothing"


def failing(d: Fleet, epoch: int, *nodes: str) -> list[Command]:
    """The next attempts all fail, there."""
    said: list[Command] = []
    for node in nodes:
        c = d.controller
        said = d.step(
            StageFailed(
                now=d.now,
                epoch=Epoch(epoch),
                stage=IN,
                attempt=c.attempts.current,
                reason="no space left on device",
                node=node,
            )
        )
    return said


def test_a_node_on_which_every_task_fails_is_given_back() -> None:
    d = fleet("a", "b", "c", backups=1)
    d.until(lambda: bool(d.controller.holders.held))
    number = d.begin()
    assert not [c for c in failing(d, number, "c", "c") if isinstance(c, ReleaseNodes)]
    said = failing(d, number, "c")
    assert one(said, ReleaseNodes).nodes == ("c",)
    one(said, CancelAll)
    assert any(text.startswith("every task on node c fails") and "no space left" in text for text in d.said)
    assert not d.controller.routes.table.slices_of(COUNT, 2), "its slices come up elsewhere"
    assert "c" not in {d.controller.routes.table.homes_of(COUNT)[i] for i in one(said, RunStage).containers}
    recoveries = d.controller.attempts.recoveries
    d.run_again()
    d.lose("c")
    assert d.controller.attempts.recoveries == recoveries and d.said[-1] == "node c has left"
    d.checkpoint()


def test_giving_nodes_back_takes_back_what_was_asked_for_and_never_came() -> None:
    d = fleet("a", "b")
    d.step(NodesInvited(now=d.now, count=2))
    d.step(LeaveRequested(now=d.now, nodes=("b",)))
    d.until(lambda: bool(d.controller.fleet.released))
    assert d.controller.fleet.invited == 0, "the engine does not wait for them any more, and a policy may ask again"


@pytest.mark.parametrize("nodes", [("c", "b", "c", "c"), ("c", "c", "gone"), ("", "", "")])
def test_failures_of_several_nodes_are_no_nodes_fault(nodes: tuple[str, ...]) -> None:
    d = fleet("a", "b", "c")
    said = failing(d, d.begin(), *nodes)
    assert not [c for c in said if isinstance(c, ReleaseNodes)] and d.controller.phase == "running"


def test_progress_makes_a_node_fit_again_and_the_last_one_stays() -> None:
    d = fleet("a", "b")
    number = d.begin()
    failing(d, number, "a", "a")
    d.finish(number)
    number = d.begin()
    assert not [c for c in failing(d, number, "a", "a") if isinstance(c, ReleaseNodes)]
    d = fleet("a")
    said = failing(d, d.begin(), "a", "a", "a", "a")
    assert not [c for c in said if isinstance(c, ReleaseNodes)] and d.controller.phase == "running"


def test_without_any_node_the_job_waits_for_one() -> None:
    d = fleet("a", "b")
    number = d.begin()
    one(d.lose("a", "b"), CancelAll)
    assert d.controller.phase == "recovering"
    assert d.failed(number, IN) == [], "the last of the old work is gone, and there is nobody to do it again"
    d.now += 60.0
    assert d.step(Tick(now=d.now)) == []
    run = one(d.come("c"), RunStage)
    assert (run.epoch, run.stage, run.attempt) == (number, IN, 2)
    assert dict(d.table(run).homes_of(COUNT)) == {0: "c"}
    d.finish(number)
    assert d.runs[number, COUNT].containers == (0,), "it has one core"
    d.checkpoint()


def test_when_all_are_lost_one_by_one_each_that_comes_back_gets_its_share() -> None:
    """Seen on executors: of three that came back, the first two took the containers of all, for good."""
    d = fleet("a", "b", "c", backups=1, grows=False)
    d.until(lambda: bool(d.controller.holders.held))
    number = d.begin()
    for node in ("a", "b", "c"):
        d.lose(node)
    d.failed(number, IN)
    d.come("d", "e")
    d.come("f")
    assert sorted(d.controller.routes.table.homes_of(COUNT).values()) == ["d", "e", "f"]
    d.run_again()
    d.until(lambda: not d.controller.moves.by_slice and len(set(d.controller.routes.table.owners[COUNT])) == 3)


def test_of_two_nodes_that_come_back_one_after_the_other_each_gets_its_share() -> None:
    """The first must not take the containers of both: one of them would stay with it, or with who survived, for good,
    and the second would find nothing to do.
    """
    d = fleet("a", "b", "c", backups=1, grows=False)
    d.until(lambda: bool(d.controller.holders.held))
    d.lose("a", "b")
    d.run_again()
    assert set(d.controller.routes.table.homes_of(COUNT).values()) == {"c"}
    d.come("d")
    d.until(lambda: not d.controller.moves.by_slice and len(set(d.controller.routes.table.owners[COUNT])) == 2)
    assert sorted(d.controller.routes.table.homes_of(COUNT).values()) == ["c", "d"], (
        "the third container waits for its node"
    )
    d.come("e")
    d.until(lambda: not d.controller.moves.by_slice and len(set(d.controller.routes.table.owners[COUNT])) == 3)
    assert sorted(d.controller.routes.table.homes_of(COUNT).values()) == ["c", "d", "e"]


def test_who_shared_a_node_before_does_so_again() -> None:
    """Two nodes of one core with two containers each: a loss does not make it three for good."""
    d = fleet("a", "b", instances=4, backups=1, grows=False)
    d.until(lambda: bool(d.controller.holders.held))
    d.lose("b")
    d.run_again()
    d.come("c")
    assert sorted(d.controller.routes.table.homes_of(COUNT).values()) == ["a", "a", "c", "c"]


def test_after_the_loss_of_all_nodes_each_that_comes_takes_its_share() -> None:
    d = fleet("a", "b", "c", backups=1, grows=False)
    number = d.begin()
    d.lose("a", "b", "c")
    d.failed(number, IN)
    d.now += 60.0
    d.come("d")
    d.run_again()
    d.checkpoint()
    assert d.controller.routes.table.homes_of(COUNT) == {0: "d"}
    d.come("e")
    d.until(lambda: not d.phases and len(set(d.controller.routes.table.owners[COUNT])) == 2, most=20)
    assert d.controller.routes.table.homes_of(COUNT) == {0: "d", 1: "e"}
    d.come("f")
    d.until(lambda: not d.phases and len(set(d.controller.routes.table.owners[COUNT])) == 3, most=20)
    assert d.controller.routes.table.homes_of(COUNT) == {0: "d", 1: "e", 2: "f"} and not d.controller.fleet.short
    assert d.controller.routes.table.instances[COUNT] == 3
    assert all(held for held in d.controller.routes.table.holders[COUNT])


def test_a_node_lost_while_slices_switch_and_copies_are_kept() -> None:
    """Holders are found anew for the new owners, of which one is gone."""
    d = fleet("a", "b", "c", backups=1)
    d.move(0, to=1)
    for _ in range(8):
        number = d.begin()
        if d.phases == {0: "handover"}:
            break
        d.finish(number)
    d.lose("a")
    assert d.controller.routes.table.owners[COUNT][0] == 1
    assert 0 not in d.controller.routes.table.owners[COUNT]
    d.run_again()
    d.epoch()


def test_new_nodes_get_containers_and_slices() -> None:
    d = fleet("a", "b")
    d.come("c")
    d.until(lambda: d.controller.routes.table.instances[COUNT] == 3 and not d.controller.moves.by_slice)
    assert d.controller.routes.table.homes_of(COUNT) == {0: "a", 1: "b", 2: "c"}
    assert sorted(Counter(d.controller.routes.table.owners[COUNT]).values()) == [2, 3, 3]
    assert d.controller.attempts.recoveries == 0


# -- containers that hang, holders that are full -----------------------------------------------------------------------


def test_a_container_that_hangs_loses_its_slices_and_is_tried_again() -> None:
    d = fleet("a", "b")
    d.warm = False
    number = d.begin()
    d.end(number, IN)
    commands = d.step(
        Stuck(now=d.now, stage=COUNT, epoch=Epoch(number), attempt=Attempt(1), containers=(1,), seconds=7.25)
    )
    assert one(commands, CancelAll).reason == "container 1 of 'count' made no progress for 7.2 s"
    d.run_again()
    assert set(d.owners(number)) == {0} and d.runs[number, COUNT].containers == (0,)
    assert set(d.owners(number, WIN)) == {0, 1}, "of that stage only"
    probe = [c for c in d.commands if isinstance(c, WarmUp) and c.stage == COUNT]
    assert [c.containers for c in probe] == [(1,)], "once"
    d.checkpoint()
    assert not d.phases, "it has not answered"
    d.warm = True
    d.step(WarmedUp(now=d.now, stage=COUNT, containers=(1,)))
    d.until(lambda: not d.phases)
    assert Counter(d.controller.routes.table.owners[COUNT]) == {0: 4, 1: 4}


def test_if_all_of_a_stage_hang_they_get_their_slices_back() -> None:
    d = fleet("a", "b")
    number = d.begin()
    d.end(number, IN)
    d.step(Stuck(now=d.now, stage=COUNT, epoch=Epoch(number), attempt=Attempt(1), containers=(0, 1), seconds=7.0))
    d.run_again()
    assert d.owners(number) == (0, 0, 0, 0, 1, 1, 1, 1) and d.controller.processes.suspects == set()


def test_stale_news_of_a_hang_change_nothing() -> None:
    d = fleet("a", "b")
    number = d.begin()
    assert (
        d.step(Stuck(now=d.now, stage=COUNT, epoch=Epoch(number), attempt=Attempt(9), containers=(1,), seconds=7.0))
        == []
    )
    d.failed(number, IN)
    d.run_again()
    assert (
        d.step(Stuck(now=d.now, stage=COUNT, epoch=Epoch(number), attempt=Attempt(1), containers=(1,), seconds=7.0))
        == []
    )
    assert d.controller.attempts.recoveries == 1


def test_who_cannot_hold_backups_gets_no_more_of_them() -> None:
    d = fleet("a", "b", "c", backups=1)
    number = d.begin()
    d.end(number, IN)
    assert any(2 in held for held in d.controller.routes.table.holders[COUNT])
    run = d.runs[number, COUNT]
    reports = tuple(
        TaskReport(stage=COUNT, epoch=number, attempt=1, index=i, problem="the disk is full" if i == 2 else "")
        for i in run.containers
    )
    d.step(StageDone(now=d.now, epoch=Epoch(number), stage=COUNT, attempt=Attempt(1), reports=reports))
    assert d.said == ["node c keeps no backups any more: the disk is full"]
    d.end(number, WIN)
    d.step(EpochPublished(now=d.now, epoch=Epoch(number), attempt=Attempt(1)))
    holders = d.table(d.runs[d.epoch(), COUNT]).holders[COUNT]
    assert all(2 not in held and len(held) == 1 for held in holders)
    assert 2 in d.controller.routes.table.owners[COUNT], "it still works"


def test_who_waits_for_the_store_still_holds_what_it_has() -> None:
    d = fleet("a", "b", "c", backups=1)
    for waits in ("the store does not answer", "the store does not answer", "", ""):
        number = d.begin()
        d.end(number, IN)
        run = d.runs[number, COUNT]
        reports = tuple(
            TaskReport(stage=COUNT, epoch=number, attempt=1, index=i, waits=waits if i == 2 else "")
            for i in run.containers
        )
        d.step(StageDone(now=d.now, epoch=Epoch(number), stage=COUNT, attempt=Attempt(1), reports=reports))
        d.end(number, WIN)
        d.step(EpochPublished(now=d.now, epoch=Epoch(number), attempt=Attempt(1)))
    assert d.said == ["container 2: the store does not answer"], "once"
    assert any(2 in held for held in d.controller.routes.table.holders[COUNT])
    assert d.controller.holders.waiting == set()


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_deltas_come_with_the_next_epoch_and_are_asked_for_only_when_there_is_none() -> None:
    """A task that waits for them would make those of the next epoch wait."""
    d = fleet("a", "b")
    d.writing = False
    d.controller.checkpoints.wanted = True
    sealed = d.epoch()
    assert d.controller.checkpoints.open is not None and d.controller.checkpoints.open.epoch == sealed
    d.epoch()
    assert not any(isinstance(c, Flush) for c in d.commands), "there is input: nobody asks"
    d.step(NothingNew(now=d.now, epoch=d.controller.epochs.next))
    flush = one(d.commands, Flush)
    assert flush.epoch == sealed and flush.containers == {COUNT: (0, 1), WIN: (0, 1)}


def test_while_slices_move_files_are_merged_only_when_there_are_very_many() -> None:
    d = Fleet("a", "b", deltas_max=2).started()
    d.copying = False  # the move takes its time
    d.move(0, to=1)

    def merges() -> set[StageId]:
        return {c.stage for c in d.commands if isinstance(c, Compact)}

    for _ in range(2 * MOVING_DELTAS):
        d.checkpoint()
    assert COUNT in d.controller.checkpoints.manifest.files and d.controller.moves.of(COUNT)
    assert merges() == {WIN}, "nothing of that stage moves"
    d.checkpoint()
    assert merges() == {WIN, COUNT}, "chains are bounded all the same"


def test_when_slices_have_moved_files_are_merged_again() -> None:
    d = Fleet("a", "b", deltas_max=2).started()
    d.copying = False
    d.move(0, to=1)
    for _ in range(4):
        d.checkpoint()
    d.step(CancelMovesRequested(now=d.now, stage=COUNT, slices=None))
    d.commands.clear()
    d.checkpoint()
    assert COUNT in {c.stage for c in d.commands if isinstance(c, Compact)}
