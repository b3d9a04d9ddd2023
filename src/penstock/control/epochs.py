"""The life of epochs: planned, logged, run stage by stage, published in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.control.concern import Concern
from penstock.control.events import (
    Command,
    EpochLogged,
    EpochPlanned,
    EpochPublished,
    LogEpoch,
    NothingNew,
    PlanEpoch,
    PublishEpoch,
    ReleaseEpoch,
    RunStage,
    StageDone,
    StageFailed,
    StoreChanged,
)
from penstock.control.pacing import Pacer
from penstock.control.records import EpochRecord, SourceSpan, TaskReport
from penstock.control.routing import RoutingTable
from penstock.control.topology import StageInfo
from penstock.ids import NO_EPOCH, Epoch, StageId

if TYPE_CHECKING:
    from penstock.control.controller import Controller

MOVING_EPOCH_S = 0.1
"""Seconds between two empty epochs while slices are on the move and there is no input."""
INPUT_PAUSE_S = 1.0
"""A source without new rows for this many seconds counts as idle."""


@dataclass(kw_only=True)
class EpochRun:
    """One epoch under way."""

    epoch: Epoch
    record: EpochRecord
    began: float
    routing: RoutingTable
    logged: bool = False
    seal: bool = False
    """The epoch is to be checkpointed."""
    ahead: bool = False
    """The epoch ran before it was logged, because the store was away."""
    publishing: bool = False
    running: set[StageId] = field(default_factory=set)
    done: dict[StageId, tuple[TaskReport, ...]] = field(default_factory=dict)
    clocks: dict[str, int] = field(default_factory=dict)
    """edge "up>down" -> greatest event time up to and including this epoch; "@stage#port" -> watermark of an input"""
    watermarks: dict[StageId, int] = field(default_factory=dict)
    handover: dict[StageId, dict[int, int]] = field(default_factory=dict)
    """stage -> slice -> container that owns it from the next epoch on"""
    sends: set[StageId] = field(default_factory=set)
    """Stages whose containers sent something to their peers."""


class Epochs(Concern):
    def __init__(self, core: Controller, pacer: Pacer) -> None:
        super().__init__(core)
        self.pacer = pacer
        self.in_flight: dict[Epoch, EpochRun] = {}
        self.next = Epoch(1)
        self.first = Epoch(1)
        """The first epoch of this start of the job."""
        self.published = NO_EPOCH
        """The last epoch that all sinks have."""
        self.final = False
        """The epoch that ends a bounded input has been planned."""
        self.away = False
        """The store does not answer: epochs are logged when it does again."""
        self.planning = False
        """Sources were asked for the next epoch and have not answered."""
        self.idle_since: float | None = None
        """When sources first had nothing new. None: the last time they had something."""
        self.last_input = float("-inf")
        self.last_plan = float("-inf")

    # -- from planned to logged ------------------------------------------------------------------------------------

    def allowed(self) -> int:
        """Epochs that may be under way. Epochs that wait for nothing but the store come on top, up to a limit: for
        their log, or to be published behind a manifest that cannot be written or read now.
        """
        stages, settings = len(self.core.topology.stages), self.core.settings
        waiting = sum((self.away or not r.logged) and len(r.done) == stages for r in self.in_flight.values())
        return settings.epochs_in_flight + min(waiting, settings.away_epochs)

    def enough(self) -> bool:
        """Has the job run as many epochs as it was to?"""
        limit = self.core.settings.epochs_max
        return limit is not None and self.next >= self.first + limit

    def plan(self, now: float) -> list[Command]:
        """Ask the sources for the next epoch."""
        core = self.core
        if self.planning or self.final or self.enough() or core.ending or core.phase != "running":
            return []
        if len(self.in_flight) >= self.allowed():
            return []
        if self.idle_since is not None and now - self.last_plan < core.settings.poll_s:
            return []
        heartbeat = self.idle_since is not None and now - self.idle_since >= core.settings.idle_epoch_s
        changing = core.moves.by_slice or core.resizes.wanted or core.fleet.leaving - core.fleet.released
        if self.idle_since is not None and changing:
            # Slices move with epochs. While input comes, its epochs will do: others would only take its time.
            silent = now - self.last_input >= INPUT_PAUSE_S
            heartbeat = heartbeat or (silent and now - self.idle_since >= MOVING_EPOCH_S)
        self.planning = True
        self.last_plan = now
        offsets = dict(core.inputs.offsets)
        return [PlanEpoch(epoch=self.next, offsets=offsets, rows_max=self.pacer.rows_max, even_if_empty=heartbeat)]

    def on_planned(self, event: EpochPlanned) -> list[Command]:
        if not self.planning or event.epoch != self.next:
            return []
        self.planning = False
        self.idle_since = None
        if event.ranges:
            self.last_input = event.now
        self.core.inputs.exhausted |= set(event.exhausted)
        return self._begin(event.ranges, event.clock_ms, event.now)

    def on_nothing_new(self, event: NothingNew) -> list[Command]:
        if not self.planning or event.epoch != self.next:
            return []
        self.planning = False
        if event.exhausted and not self.final:
            self.final = True  # one more epoch, without rows, whose watermark closes every window
            return self._begin({}, 0, event.now)
        if self.idle_since is None:
            self.idle_since = event.now
        return []

    def _begin(self, ranges: Mapping[str, SourceSpan], clock_ms: int, now: float) -> list[Command]:
        core, epoch = self.core, self.next
        handover = core.reroute(epoch, now)
        record = core.inputs.begin(epoch, ranges, clock_ms)
        run = EpochRun(epoch=epoch, record=record, began=now, routing=core.routes.table, handover=handover)
        self.in_flight[epoch] = run
        self.next = Epoch(epoch + 1)
        return [LogEpoch(epoch=epoch, attempt=core.attempts.current, record=record)]

    def on_logged(self, event: EpochLogged) -> list[Command]:
        # Whatever the attempt: the record is the same, and it is durable now.
        self.core.inputs.logged(event.epoch)
        if event.epoch in self.in_flight:
            self.in_flight[event.epoch].logged = True
        return []

    def on_store(self, event: StoreChanged) -> list[Command]:
        self.away = event.away
        return []

    # -- running ---------------------------------------------------------------------------------------------------

    def run_stages(self, now: float) -> list[Command]:
        """Run every stage whose upstream stages, and whose own epoch before, are done."""
        out: list[Command] = []
        for epoch in sorted(self.in_flight)[: self.allowed()]:
            run = self.in_flight[epoch]
            if not run.logged:
                if not self.away or not self.core.settings.away_epochs:
                    break
                run.ahead = True
            previous = self.in_flight.get(Epoch(epoch - 1))
            for stage in self.core.topology.stages:
                if stage.id in run.done or stage.id in run.running:
                    continue
                if any(up not in run.done for up in stage.ins):
                    continue
                if previous is not None and stage.id not in previous.done:
                    continue
                if not run.running and not run.done and self.core.checkpoints.due(now):
                    run.seal = True
                    self.core.checkpoints.begin(epoch, run.routing, now)
                out.append(self._run_stage(run, stage))
        return out

    def _run_stage(self, run: EpochRun, stage: StageInfo) -> RunStage:
        core = self.core
        time = core.watermarks.time(run, stage)
        if stage.timed:
            run.watermarks[stage.id] = time.watermark
        run.running.add(stage.id)
        core.attempts.sent(run.epoch, stage.id)
        orders = core.holders.orders(run, stage)
        if stage.is_source:
            containers = core.fleet.reading(stage.id, run.routing)
        else:
            keepers = {c for held in orders.copies for c in held}
            containers = tuple(sorted({*run.routing.occupied(stage.id), *keepers}))
        seal = run.seal and stage.stateful
        return RunStage(
            epoch=run.epoch,
            stage=stage.id,
            attempt=core.attempts.current,
            checkpoint=core.checkpoints.committed,
            routing=run.routing,
            plan=run.record.plan,
            seal=seal,
            span=run.record.ranges.get(stage.id) if stage.is_source else None,
            time=time,
            clock_ms=run.record.clock_ms,
            containers=containers,
            peers=orders,
            commits=core.holders.commits.get(stage.id, ()) if orders.copies else (),
            quiet=run.epoch <= self.published,
            hot=core.balance.asked_keys(run, stage.id),
            progress=core.inputs.progress(run.epoch) if seal else {},
        )

    def on_stage_done(self, event: StageDone) -> list[Command]:
        core = self.core
        if not core.attempts.answered(event.attempt, event.epoch, event.stage) or event.epoch not in self.in_flight:
            return []
        errors = [r.error for r in event.reports if r.error is not None]
        if errors:
            return core.give_up(errors[0])
        if any(r.missing for r in event.reports):
            return core.recover(event.now, f"a container of '{event.stage}' had lost its state")
        run = self.in_flight[event.epoch]
        run.running.discard(event.stage)
        run.done[event.stage] = tuple(sorted(event.reports, key=lambda r: r.index))
        core.checkpoints.collect(event.reports)
        core.balance.note(event.stage, event.reports, event.now)
        if not core.topology[event.stage].is_source:  # there, the index is that of a split
            core.processes.answered(event.stage, [r.index for r in event.reports])
        return core.holders.note(event.stage, event.reports)

    def on_stage_failed(self, event: StageFailed) -> list[Command]:
        core = self.core
        if not core.attempts.answered(event.attempt, event.epoch, event.stage):
            return []
        if core.attempts.failed(event.node):
            return core.dismiss(event.node, event.now, event.reason)
        return core.recover(event.now, event.reason)

    # -- published -------------------------------------------------------------------------------------------------

    def publish(self, now: float) -> list[Command]:
        """Publish the first epoch under way, if all its stages are done."""
        out: list[Command] = []
        for epoch in sorted(self.in_flight):
            run = self.in_flight[epoch]
            if run.publishing or len(run.done) < len(self.core.topology.stages):
                return out
            if not run.logged:
                return out  # if the driver died now, the epoch might be cut otherwise the next time
            self.core.watermarks.end(run)
            if epoch > self.published:
                run.publishing = True
                self.core.attempts.sent(epoch, "publish")
                return [*out, PublishEpoch(epoch=epoch, attempt=self.core.attempts.current)]
            out += self._over(run, now)  # it ran again for the state that it leaves: the sinks have it
        return out

    def on_published(self, event: EpochPublished) -> list[Command]:
        ours = self.core.attempts.answered(event.attempt, event.epoch, "publish")
        run = self.in_flight.get(event.epoch)
        return self._over(run, event.now) if ours and run is not None else []

    def _over(self, run: EpochRun, now: float) -> list[Command]:
        """All sinks have this epoch."""
        core = self.core
        del self.in_flight[run.epoch]
        if run.epoch > self.published:
            core.attempts.progressed()  # what is published again after a failure is no progress
        self.published = Epoch(max(self.published, run.epoch))
        core.watermarks.published(run)
        if not run.ahead:  # the time it waited for the store says nothing of its size
            self.pacer = self.pacer.observe(run.record.rows, (now - run.began) * 1000)
        core.checkpoints.published(run)
        if core.moves.published(run.epoch) and not core.moves.ready():
            core.checkpoints.wanted = True  # then the moves are over, and copies of the rest catch up
        # What containers sent to their peers is read in the next epoch.
        core.holders.forget_sent(run.epoch)
        return [ReleaseEpoch(epoch=Epoch(run.epoch - bool(run.sends)))]

    # -- after a failure -------------------------------------------------------------------------------------------

    def rewind(self, now: float) -> None:
        """Put everything after the last checkpoint back to "logged, not run", under the newest routing table: which
        container does what never shows in the output.
        """
        core = self.core
        self.in_flight.clear()
        self.final = core.checkpoints.committed_final
        self.next = Epoch(core.checkpoints.committed + 1)
        for epoch, record in sorted(core.inputs.log.items()):
            logged = epoch <= core.inputs.logged_through
            run = EpochRun(epoch=epoch, record=record, began=now, routing=core.routes.table, logged=logged)
            self.in_flight[epoch] = run
            self.next = Epoch(epoch + 1)
            core.inputs.again(record)
            self.final = self.final or record.final

    def adopt_routing(self) -> None:
        """Epochs that have not begun hear of homes and holders that changed since they were planned."""
        table = self.core.routes.table
        for run in self.in_flight.values():
            same = run.routing.owners == table.owners and run.routing.instances == table.instances
            if same and not run.running and not run.done:
                run.routing = table

    def validate(self) -> None:
        epochs = sorted(self.in_flight)
        if epochs:
            assert epochs == list(range(epochs[0], epochs[0] + len(epochs))), f"an epoch was skipped: {epochs}"
        for epoch, run in self.in_flight.items():
            assert run.logged or run.ahead or not (run.running or run.done), f"epoch {epoch} ran before it was logged"
            assert run.logged or not run.publishing, f"epoch {epoch} is published before it was logged"
            assert not (run.running & run.done.keys()), f"a stage of epoch {epoch} runs twice"
            previous = self.in_flight.get(Epoch(epoch - 1))
            for stage in (*run.running, *run.done):
                assert previous is None or stage in previous.done, f"'{stage}' of {epoch} overtook {epoch - 1}"
