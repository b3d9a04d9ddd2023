"""The controller: events in, commands out.

It owns the life of epochs, checkpoints, recovery, rescaling and the end of the job. It does no I/O, has no clock and no
threads, so that tests and the simulator drive the very same code. One method changes its state: ``step``.

The rules it keeps (checked by ``validate``):

* an epoch is logged before any of its stages runs; while the store is away, a bounded number of epochs run *ahead* of
  the log, and those are published only when they are logged: until then nobody but us has seen them;
* stage k of epoch e runs when its upstream stages of e and its own e-1 are done;
* epochs are published in order; one at most ``epochs_in_flight`` of them are under way;
* a checkpoint at e is complete when e is published and every stateful container has written its delta; then a manifest
  is written;
* after a failure everything after the last complete checkpoint runs again, from the log, under a new attempt number;
* slices change their owner between two epochs only: after a failure, or by a move (``migration.py``). While a move
  switches, no checkpoint is open, so that a recovery finds old and new owner at the same checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from penstock.control.epochs import Checkpoint, EpochRun, Settings
from penstock.control.events import (
    CancelAll,
    CancelMovesRequested,
    CollectGarbage,
    Command,
    Compact,
    Compacted,
    CoresRequested,
    EpochLogged,
    EpochPlanned,
    EpochPublished,
    Event,
    Fail,
    Fatal,
    Finish,
    Flush,
    Flushed,
    HotSlices,
    LeaveRequested,
    LogEpoch,
    ManifestWritten,
    MoveRequested,
    NodeInfo,
    NodesChanged,
    NodesInvited,
    NothingNew,
    PlanEpoch,
    PublishEpoch,
    RebalanceRequested,
    ReleaseEpoch,
    RescaleRequested,
    RunStage,
    StageDone,
    StageFailed,
    Started,
    StopRequested,
    StoreChanged,
    Stuck,
    TaskError,
    TaskReport,
    Tick,
    WarmedUp,
    WriteManifest,
)
from penstock.control.pacing import Pacer
from penstock.control.routing import RoutingTable
from penstock.control.shape import Shape
from penstock.control.topology import StageInfo, Topology
from penstock.control.watermarks import NEVER, Time, time_of
from penstock.ids import NO_EPOCH, Attempt, Epoch, StageId
from penstock.state.backup import Commit
from penstock.state.checkpoint import CompactionTask, DeltaFile, Manifest, plan_compaction

CLOCK = "clock"
"""Among the clocks of edges: the clock of the last epoch (ms), which never goes back."""
RECOVERIES_MAX = 5
"""Recoveries in a row without a new epoch published, or a checkpoint taken, in between."""
UNFIT_AFTER = 3
"""Failures in a row that all came from one node, without progress in between: then it is the node's fault."""
COMMITS_KEPT = 6
"""Whoever keeps copies hears of each checkpoint so often."""
MOVING_DELTAS = 4
"""While slices of a stage move, its files are merged only when chains are so many times as long as they may be. A merge
takes processor time that the move, and whoever else is on the machine, needs; and it takes away the files that copies
are being read from."""
CATCH_UP_S = 4.0
"""After a checkpoint the next one waits so long while slices are on the move: for copies to get there, and for as many
switches as there is time for."""
MOVING_EPOCH_S = 0.1
"""Without input, empty epochs run so often while slices are on the move."""
INPUT_PAUSE_S = 1.0
"""Input that stays away so long does not come just now."""


class Controller(Shape):
    def __init__(
        self, topology: Topology, routing: RoutingTable, pacer: Pacer, settings: Settings, blank: Manifest
    ) -> None:
        """``blank`` is the checkpoint before any input: it names the job and the flow."""
        super().__init__(topology, routing, settings)
        self.manifest = blank
        """The last complete checkpoint, with merges of its files that were finished since."""
        self.pacer = pacer
        self.first_epoch = Epoch(1)
        """The first epoch of this run."""
        self.offsets: dict[str, dict[str, Any] | None] = {}
        self.exhausted: set[str] = set()
        self.clocks: dict[str, int] = {}
        self.watermarks: dict[StageId, int] = {}
        self.facts: dict[str, list[Any]] = {}
        self.log: dict[Epoch, dict[str, Any]] = {}
        """Logged epochs after the last checkpoint: what a recovery runs again."""
        self.last_written: tuple[Attempt, Checkpoint] | None = None
        """A failure came while this checkpoint's manifest was being written: it counts, if it gets there."""
        self.committed_clocks: dict[str, int] = {}
        self.committed_watermarks: dict[StageId, int] = {}
        self.committed_final = False
        self.logged_through = NO_EPOCH
        self.planning = False
        self.idle_since: float | None = None
        self.last_input = float("-inf")
        self.last_plan = -1e9
        self.stopping = False
        self.recoveries = 0
        self.fruitless = 0
        self.failed_on: list[str] = []
        """Where the last tasks failed, since there was progress."""
        self.compacting: set[StageId] = set()
        self.routing_logged = 0

    # -- the one mutator -----------------------------------------------------------------------------------------

    def step(self, event: Event) -> list[Command]:
        if self.phase in ("stopped", "failed"):
            return []
        out: list[Command] = []
        handler = {
            Started: self._started,
            EpochPlanned: self._planned,
            NothingNew: self._nothing_new,
            EpochLogged: self._logged,
            StageDone: self._stage_done,
            StageFailed: self._stage_failed,
            EpochPublished: self._epoch_published,
            Flushed: self._flushed,
            ManifestWritten: self._manifest_written,
            Compacted: self._compacted,
            NodesChanged: self._nodes_changed,
            Stuck: self._stuck,
            RescaleRequested: self._rescale_requested,
            MoveRequested: self._move_requested,
            RebalanceRequested: self._rebalance_requested,
            NodesInvited: self._nodes_invited,
            LeaveRequested: self._leave_requested,
            CoresRequested: self._cores_requested,
            HotSlices: self._hot_slices,
            CancelMovesRequested: self._cancel_requested,
            WarmedUp: self._warmed_up,
            StopRequested: self._stop_requested,
            StoreChanged: self._store_changed,
            Fatal: self._fatal,
            Tick: lambda e: [],
        }[type(event)]
        out += handler(event)  # type: ignore[operator]
        if self.phase not in ("stopped", "failed"):
            out += self._advance(event.now)
        cause = type(event).__name__
        for command in out:
            if not command.cause:
                object.__setattr__(command, "cause", cause)
        return out

    # -- start and recovery --------------------------------------------------------------------------------------

    def _started(self, event: Started) -> list[Command]:
        self.phase = "running"
        self.checkpoint_at = event.now
        if event.restored is not None:
            self.manifest = event.restored
            self.committed = self.published = Epoch(self.manifest.epoch)
            self.next_epoch = Epoch(self.committed + 1)
            self.attempt = Attempt(self.manifest.attempt + 1)
            self.routing = RoutingTable.from_json(self.manifest.routing)
            self.offsets = {s: v["offset"] for s, v in self.manifest.sources.items()}
            self.facts = {s: list(v["facts"]) for s, v in self.manifest.sources.items()}
            clocks = self.manifest.clocks
            self.committed_clocks = dict(clocks["clocks"])
            self.committed_watermarks = {StageId(s): w for s, w in clocks["watermarks"].items()}
            self.committed_final = clocks["final"]
        for record in event.logged:
            epoch = Epoch(record["epoch"])
            if epoch == self.committed + 1 + len(self.log):
                self.log[epoch] = record
                self.routing = RoutingTable.from_json(record["routing"]) if record.get("routing") else self.routing
                self.logged_through = epoch
                for source, r in record["ranges"].items():
                    self.facts.setdefault(source, []).extend(r["facts"])
                self.attempt = Attempt(max(self.attempt, record["attempt"] + 1))
        self.attempt = Attempt(max(self.attempt, event.attempt))
        self.routing = self.routing.filled()
        self.nodes = {n.name: n for n in event.nodes or (NodeInfo("local"),)}
        self._house()
        self._rehold()
        for source in [s for s in self.topology.stages if s.is_source]:
            self.up[source.id] = set(range(self.routing.instances[source.id]))  # the engine starts them
        self._rewind(event.now)
        self.first_epoch = self.next_epoch
        return []

    def _rewind(self, now: float) -> None:
        """Put everything after the last checkpoint back to "logged, not run", under the newest routing table: which
        container does what never shows in the output.
        """
        self.in_flight.clear()
        self.sent.clear()
        self.switching = None
        self.switched = NO_EPOCH  # all owners start from the checkpoint
        self.migration.recovered(self.routing.owners, self.routing.homes, now)
        self.load.forget()
        self.checkpoint = None
        self.checkpoint_at = now
        self.clocks = dict(self.committed_clocks)
        self.watermarks = dict(self.committed_watermarks)
        self.final = self.committed_final
        for epoch, record in sorted(self.log.items()):
            run = EpochRun(epoch, record, epoch <= self.logged_through, False, now, routing=self.routing)
            self.in_flight[epoch] = run
            self.next_epoch = Epoch(epoch + 1)
            self.offsets.update({s: r["end"] for s, r in record["ranges"].items()})
            self.final = self.final or record["final"]
        if not self.log:
            self.next_epoch = Epoch(self.committed + 1)

    def _recover(self, now: float, reason: str) -> list[Command]:
        self._complete_switch()
        self.recoveries += 1
        self.fruitless += 1
        if self.fruitless > RECOVERIES_MAX:
            return self._give_up(
                TaskError(
                    "EngineError",
                    f"{RECOVERIES_MAX} recoveries in a row made no progress; the last failure was: {reason}",
                    "Look at the executors' logs; start again with the same checkpoint once the cause is gone.",
                )
            )
        if self.checkpoint is not None and self.checkpoint.writing:
            self.last_written = (self.attempt, self.checkpoint)
        self.attempt = Attempt(self.attempt + 1)
        self.recovering = True
        self.phase = "recovering"
        self._rewind(now)
        return [CancelAll(self.attempt, cause=f"failure: {reason}")]

    def _progressed(self) -> None:
        self.fruitless = 0
        self.failed_on = []

    def _give_up(self, error: TaskError) -> list[Command]:
        self.phase = "failed"
        return [CancelAll(Attempt(self.attempt + 1)), Fail(error)]

    def _fatal(self, event: Fatal) -> list[Command]:
        return self._give_up(event.error)

    # -- epochs --------------------------------------------------------------------------------------------------

    def _planned(self, event: EpochPlanned) -> list[Command]:
        if not self.planning or event.epoch != self.next_epoch:
            return []
        self.planning = False
        self.idle_since = None
        if event.ranges:
            self.last_input = event.now
        self.exhausted |= set(event.exhausted)
        return self._begin(event.ranges, event.clock_ms, event.now)

    def _begin(self, ranges: dict[str, dict[str, Any]], clock_ms: int, now: float) -> list[Command]:
        epoch = self.next_epoch
        last = max(self.log.values(), key=lambda r: int(r["epoch"]), default={"clock_ms": self.clocks.get(CLOCK, 0)})
        clock_ms = max(clock_ms, last["clock_ms"])
        handover = self._reroute(epoch, now, self._checkpoint_due(now))
        new_routing = self.routing.version != self.routing_logged
        record: dict[str, Any] = {
            "epoch": epoch,
            "attempt": self.attempt,
            "ranges": ranges,
            "clock_ms": clock_ms,
            "final": self.final,
            "version": self.routing.version,
            "routing": self.routing.to_json() if new_routing else None,
        }
        self.routing_logged = self.routing.version
        self.offsets.update({s: r["end"] for s, r in ranges.items()})
        for source, r in ranges.items():
            self.facts.setdefault(source, []).extend(r["facts"])
        self.log[epoch] = record
        self.in_flight[epoch] = EpochRun(epoch, record, False, False, now, routing=self.routing, handover=handover)
        self.next_epoch = Epoch(epoch + 1)
        return [LogEpoch(epoch, self.attempt, record)]

    def _nothing_new(self, event: NothingNew) -> list[Command]:
        if not self.planning or event.epoch != self.next_epoch:
            return []
        self.planning = False
        if event.exhausted and not self.final:
            self.final = True  # one more epoch, without rows, whose watermark closes every window
            return self._begin({}, 0, event.now)
        if self.idle_since is None:
            self.idle_since = event.now
        return []

    def _logged(self, event: EpochLogged) -> list[Command]:
        # Whatever the attempt: the record is the same, and it is on disk now.
        self.logged_through = Epoch(max(self.logged_through, event.epoch))
        if event.epoch in self.in_flight:
            self.in_flight[event.epoch].logged = True
        return []

    def _stage_done(self, event: StageDone) -> list[Command]:
        self.outstanding.discard((event.attempt, event.epoch, event.stage))
        if event.attempt != self.attempt or event.epoch not in self.in_flight:
            return []
        errors = [r.error for r in event.reports if r.error is not None]
        if errors:
            return self._give_up(errors[0])
        if any(r.missing for r in event.reports):
            return self._recover(event.now, f"a container of '{event.stage}' had lost its state")
        run = self.in_flight[event.epoch]
        run.running.discard(event.stage)
        run.done[event.stage] = tuple(sorted(event.reports, key=lambda r: r.index))
        self._collect_deltas(event.reports)
        self._note_load(event.stage, event.reports, event.now)
        return self._note_peers(event.stage, event.reports)

    def _stage_failed(self, event: StageFailed) -> list[Command]:
        self.outstanding.discard((event.attempt, event.epoch, event.stage))
        if event.attempt != self.attempt:
            return []
        if event.node:
            self.failed_on = [*self.failed_on[1 - UNFIT_AFTER :], event.node]
        others = self.nodes.keys() - self.leaving - {event.node}
        if event.node in self.nodes.keys() - self.leaving and others and self.failed_on == [event.node] * UNFIT_AFTER:
            self.failed_on = []
            return self._dismiss(event.node, event.now, event.reason)
        return self._recover(event.now, event.reason)

    def _epoch_published(self, event: EpochPublished) -> list[Command]:
        self.outstanding.discard((event.attempt, event.epoch, "publish"))
        run = self.in_flight.get(event.epoch)
        if event.attempt != self.attempt or run is None:
            return []
        return self._over(run, event.now)

    def _over(self, run: EpochRun, now: float) -> list[Command]:
        """All sinks have this epoch."""
        del self.in_flight[run.epoch]
        if run.epoch > self.published:
            self._progressed()  # what is published again after a failure is no progress
        self.published = Epoch(max(self.published, run.epoch))
        self.clocks, self.watermarks = run.clocks, {**self.watermarks, **run.watermarks}
        rows = sum(r["rows"] for r in run.record["ranges"].values())
        if not run.ahead:  # the time it waited for the store says nothing of its size
            self.pacer = self.pacer.observe(rows, (now - run.began) * 1000)
        if self.checkpoint is not None and self.checkpoint.epoch == run.epoch:
            self._note_published(run)
        if self.switching is not None and run.epoch >= self.switching:
            self.switching = None
            if not self._ready():
                self.checkpoint_wanted = True  # then the moves are over, and copies of the rest catch up
            self.migration.published(run.epoch)
        # What containers sent to their peers is read in the next epoch.
        sent = bool(run.sends)
        self.sent = {e: s for e, s in self.sent.items() if e >= run.epoch}
        return [ReleaseEpoch(Epoch(run.epoch - sent))]

    def _note_published(self, run: EpochRun) -> None:
        assert self.checkpoint is not None
        self.checkpoint.published = True
        self.checkpoint.clocks = dict(run.clocks)
        self.checkpoint.watermarks = dict(self.watermarks)

    # -- watermarks ----------------------------------------------------------------------------------------------

    def _before(self, epoch: Epoch) -> tuple[dict[str, int], dict[StageId, int]]:
        previous = self.in_flight.get(Epoch(epoch - 1))
        if previous is None:
            return self.clocks, self.watermarks
        return previous.clocks, {**self.watermarks, **previous.watermarks}

    def _time(self, run: EpochRun, stage: StageInfo) -> Time:
        clocks_before, marks_before = self._before(run.epoch)
        time = time_of(
            stage,
            {up: self.topology[up] for up in stage.ins},
            clocks_before,
            marks_before.get(stage.id, NEVER),
            run.watermarks,
            {up: run.done[up] for up in stage.ins} if stage.timed else {},
            final=run.record["final"],
            clock_ms=run.record["clock_ms"],
        )
        run.clocks.update(time.clocks)
        return time

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def _checkpoint_due(self, now: float) -> bool:
        if self.checkpoint is not None or self.switching is not None:
            return False
        interval = self.settings.checkpoint_interval_s
        if self.checkpoint_wanted:
            return True
        if self.migration.in_phase("rebuild") and now - self.checkpoint_at < CATCH_UP_S:
            return False
        return interval >= 0 and now - self.checkpoint_at >= interval

    def _open_checkpoint(self, epoch: Epoch, routing: RoutingTable, now: float) -> None:
        expected = {(s.id, c) for s in self.topology.stateful for c in routing.occupied(s.id)}
        self.checkpoint = Checkpoint(epoch, expected)
        self.checkpoint_at = now
        self.checkpoint_wanted = False

    def _collect_deltas(self, reports: Sequence[TaskReport]) -> None:
        if self.checkpoint is None:
            return
        for report in reports:
            for delta in report.deltas:
                if delta["epoch"] != self.checkpoint.epoch or delta["attempt"] != self.attempt:
                    continue
                if (StageId(report.stage), report.index) not in self.checkpoint.expected:
                    continue  # the report came twice
                self.checkpoint.expected.discard((StageId(report.stage), report.index))
                if delta["file"] is not None:
                    file = DeltaFile(**delta["file"])
                    self.checkpoint.files.append(file)
                    self.checkpoint.touched[file.name] = delta.get("touched", list(file.slices))

    def _flushed(self, event: Flushed) -> list[Command]:
        self.outstanding.discard((event.attempt, event.epoch, "flush"))
        if event.attempt != self.attempt or self.checkpoint is None or self.checkpoint.epoch != event.epoch:
            return []
        errors = [r.error for r in event.reports if r.error is not None]
        if errors:
            return self._give_up(errors[0])
        self._collect_deltas(event.reports)
        self.checkpoint.flushing = False
        if any(r.writing for r in event.reports):
            return []  # the store is slow or away; it is asked again when nothing else is under way
        if self.checkpoint.expected:
            return self._recover(event.now, "a container lost the delta of a checkpoint before it was written")
        return []

    def _manifest_written(self, event: ManifestWritten) -> list[Command]:
        self.outstanding.discard((event.attempt, event.epoch, "manifest"))
        if self.last_written is not None and event.attempt == self.last_written[0]:
            # Nothing of the new attempt has run yet. Whoever looks at the store sees this checkpoint, and its garbage
            # collection goes by it: so must we.
            (_, done), self.last_written = self.last_written, None
            out = self._commit(done, event.now)
            self._rewind(event.now)
            return out
        if event.attempt != self.attempt or self.checkpoint is None or self.checkpoint.epoch != event.epoch:
            return []
        return self._commit(self.checkpoint, event.now)

    def _commit(self, done: Checkpoint, now: float) -> list[Command]:
        before = self.committed
        self.checkpoint = None
        self.committed = done.epoch
        self._progressed()
        self.manifest = self._advanced(done)
        self.committed_clocks, self.committed_watermarks = done.clocks, done.watermarks
        record = self.log.get(done.epoch)
        self.committed_final = self.committed_final or bool(record and record["final"])
        for info in self.topology.stateful:
            new = {f.name: done.touched[f.name] for f in done.files if f.stage == info.id}
            commit = Commit(before, done.epoch, new)
            self.commits[info.id] = (*self.commits.get(info.id, ())[1 - COMMITS_KEPT :], commit)
        self.migration.committed(done.epoch, now)
        ends = {s: r["end"] for e in sorted(self.log) if e <= done.epoch for s, r in self.log[e]["ranges"].items()}
        self.log = {e: r for e, r in self.log.items() if e > done.epoch}
        out: list[Command] = [CollectGarbage(done.epoch, ends)]
        for stage, files in self.manifest.files.items():
            if StageId(stage) not in self.compacting:
                for task in self._due_merges(StageId(stage), files)[:1]:
                    self.compacting.add(StageId(stage))
                    out.append(Compact(StageId(stage), task))
        return out

    def _due_merges(self, stage: StageId, files: Sequence[DeltaFile]) -> list[CompactionTask]:
        if self.migration.of(stage):
            return plan_compaction(files, self.settings.deltas_max * MOVING_DELTAS, ratio=math.inf)
        return plan_compaction(files, self.settings.deltas_max)

    def _compacted(self, event: Compacted) -> list[Command]:
        self.compacting.discard(event.stage)
        if event.failed is not None:
            return []  # the old files are still whole; the next manifest tries again
        assert event.output is not None
        self.manifest = self.manifest.compacted(event.task, event.output)
        return []

    def _advanced(self, checkpoint: Checkpoint) -> Manifest:
        """What the manifest must say for the job to go on from this checkpoint."""
        facts = {s: list(f) for s, f in self.facts.items()}
        for epoch in sorted(self.log, reverse=True):  # back to where the sources stood at the checkpoint
            if epoch <= checkpoint.epoch:
                break
            for source, r in self.log[epoch]["ranges"].items():
                if r["facts"]:
                    del facts[source][-len(r["facts"]) :]
        offsets = self._progress(checkpoint.epoch)
        record = self.log.get(checkpoint.epoch)
        final = self.committed_final or bool(record and record["final"])
        return self.manifest.advance(
            checkpoint.epoch,
            checkpoint.files,
            attempt=self.attempt,
            routing=self.routing.to_json(),
            sources={s: {"offset": o, "facts": facts.get(s, [])} for s, o in offsets.items()},
            clocks={"clocks": checkpoint.clocks, "watermarks": checkpoint.watermarks, "final": final},
        )

    def _progress(self, epoch: Epoch) -> dict[str, Any]:
        """How far each source has been read at the end of an epoch: what state that stands there reflects."""
        offsets = dict(self.offsets)
        for later in sorted((e for e in self.log if e > epoch), reverse=True):
            offsets |= {source: r["start"] for source, r in self.log[later]["ranges"].items()}
        return offsets

    # -- requests ------------------------------------------------------------------------------------------------

    def _stop_requested(self, event: StopRequested) -> list[Command]:
        self.stopping = True
        if self.phase == "running":
            self.phase = "stopping"
        return []

    def _store_changed(self, event: StoreChanged) -> list[Command]:
        self.away = event.away
        return []

    # -- what to do next -----------------------------------------------------------------------------------------

    def _allowed(self) -> int:
        """Epochs that may be under way. Those that wait for nothing but the store come on top, up to a limit: for their
        log, or to be published behind a manifest that cannot be written or read now.
        """
        done = len(self.topology.stages)
        waiting = sum((self.away or not r.logged) and len(r.done) == done for r in self.in_flight.values())
        return self.settings.epochs_in_flight + min(waiting, self.settings.away_epochs)

    def _advance(self, now: float) -> list[Command]:
        if self.phase == "starting":
            return []
        if self.recovering:
            if self.outstanding:
                return []  # old work must be gone before its containers are used again
            if self._gathering(now):
                return []
            if self.homeless():
                self._house(self._working())
                if self.homeless():
                    return []  # until Spark has another executor for us
            self._adopt()
            self.recovering = False
            self.phase = "stopping" if self.stopping else "running"
        out: list[Command] = self._steer(now)
        out += self._run_stages(now)
        before = len(self.in_flight)
        out += self._publish(now)
        if len(self.in_flight) < before:
            out += self._run_stages(now)  # what the sinks have already makes room at once
        out += self._quiesce(now)
        out += self._write_manifest()
        out += self._plan(now)
        return out

    def _run_stages(self, now: float) -> list[Command]:
        out: list[Command] = []
        for epoch in sorted(self.in_flight)[: self._allowed()]:
            run = self.in_flight[epoch]
            if not run.logged:
                if not self.away or not self.settings.away_epochs:
                    break
                run.ahead = True
            previous = self.in_flight.get(Epoch(epoch - 1))
            for stage in self.topology.stages:
                if stage.id in run.done or stage.id in run.running:
                    continue
                if any(up not in run.done for up in stage.ins):
                    continue
                if previous is not None and stage.id not in previous.done:
                    continue
                if not run.running and not run.done and self._checkpoint_due(now):
                    run.seal = True
                    self._open_checkpoint(epoch, run.routing, now)
                out.append(self._run_stage(run, stage))
        return out

    def _run_stage(self, run: EpochRun, stage: StageInfo) -> RunStage:
        time = self._time(run, stage)
        if stage.timed:
            run.watermarks[stage.id] = time.watermark
        run.running.add(stage.id)
        self.outstanding.add((self.attempt, run.epoch, stage.id))
        copies = self._copies(run, stage)
        handover = run.handover.get(stage.id, {})
        pieces = stage.id in self.unsent or (
            self.checkpoint is not None and any(s == stage.id for s, _ in self.checkpoint.expected)
        )
        if handover or (copies and pieces):
            run.sends.add(stage.id)
            self.sent[run.epoch] = (run.routing.instances, run.sends)
        numbering, senders = self.sent.get(Epoch(run.epoch - 1), ({}, set()))
        keepers = {c for held in copies for c in held}
        return RunStage(
            run.epoch,
            stage.id,
            self.attempt,
            self.committed,
            run.routing.version,
            run.seal and stage.stateful,
            run.record["ranges"].get(stage.id) if stage.is_source else None,
            time.before,
            time.watermark,
            time.arrivals,
            run.record["clock_ms"],
            time.ports,
            self._readers(run, stage)
            if stage.is_source
            else tuple(sorted({*run.routing.occupied(stage.id), *keepers})),
            copies,
            self.commits.get(stage.id, ()) if copies else (),
            stage.id in run.sends,
            stage.id in senders and numbering == run.routing.instances,
            handover,
            self.settings.full_snapshots,
            run.epoch <= self.published,
            self._asked(run, stage.id),
            self._progress(run.epoch) if run.seal and stage.stateful else {},
        )

    def _publish(self, now: float) -> list[Command]:
        out: list[Command] = []
        for epoch in sorted(self.in_flight):
            run = self.in_flight[epoch]
            if run.publishing:
                return out
            if len(run.done) < len(self.topology.stages):
                return out
            if not run.logged:
                return out  # if the driver died now, the epoch might be cut otherwise the next time
            clocks_before, _ = self._before(epoch)
            run.clocks = {**clocks_before, **run.clocks, CLOCK: run.record["clock_ms"]}
            if epoch <= self.published:  # run again after a failure, for the state it leaves: the sinks have it
                out += self._over(run, now)
                continue
            run.publishing = True
            parts: dict[str, list[Any]] = {}
            tables: dict[str, list[bytes]] = {}
            for stage in self.topology.stages:
                for report in run.done[stage.id]:
                    for sink, part in report.parts.items():
                        parts.setdefault(sink, []).append(part)
                    for sink, table in report.tables.items():
                        tables.setdefault(sink, []).append(table)
            self.outstanding.add((self.attempt, epoch, "publish"))
            return [*out, PublishEpoch(epoch, self.attempt, parts, tables)]
        return out

    def _quiesce(self, now: float) -> list[Command]:
        """With nothing under way: finish a checkpoint, change the routing, or end."""
        if self.in_flight or self.planning:
            return []
        over = self.stopping or self.final or self._enough()
        if self.checkpoint is not None:
            # Deltas come with the reports of the next epoch. Asking for them would make its tasks wait behind us.
            return self._flush() if over or self.rescales or self.idle_since is not None else []
        if (over or self.rescales) and self.handed:  # there is no next epoch to switch in
            self.migration.recall(self.handed, now)
            self.handed = []
            self.switching = None
        if self.rescales or over:
            if self.committed < self.published:
                self._open_checkpoint(self.published, self.routing, now)
                assert self.checkpoint is not None
                self.checkpoint.published = True
                self.checkpoint.clocks = dict(self.clocks)
                self.checkpoint.watermarks = dict(self.watermarks)
                return self._flush()
            for stage, instances in self.rescales:
                self.migration.cancel(stage, None, now)  # their targets may be among those that go
                self._set_routing(self.routing.rescale(stage, instances))
            if self.rescales:
                self._house()
                if self.short:  # some of the containers that slices were dealt out to wait for nodes
                    self._make_do()
                self._vacate()
                self._rehold()
            self.rescales.clear()
            if over:
                self.phase = "stopped"
                return [Finish("stopped" if self.stopping and not self.final else "complete")]
        return []

    def _flush(self) -> list[Command]:
        assert self.checkpoint is not None
        if self.away or self.checkpoint.flushing or self.checkpoint.writing or not self.checkpoint.expected:
            return []
        self.checkpoint.flushing = True
        self.outstanding.add((self.attempt, self.checkpoint.epoch, "flush"))
        waiting: dict[StageId, tuple[int, ...]] = {}
        for stage, container in sorted(self.checkpoint.expected):
            waiting[stage] = (*waiting.get(stage, ()), container)
        epoch = self.checkpoint.epoch
        return [
            Flush(
                epoch,
                self.attempt,
                self.committed,
                self.routing.version,
                waiting,
                self._progress(Epoch(epoch)),
                self.settings.full_snapshots,
            )
        ]

    def _write_manifest(self) -> list[Command]:
        c = self.checkpoint
        if c is None or c.writing or c.expected or not c.published:
            return []
        c.writing = True
        self.outstanding.add((self.attempt, c.epoch, "manifest"))
        return [WriteManifest(c.epoch, self.attempt, self._advanced(c))]

    def _enough(self) -> bool:
        limit = self.settings.epochs_max
        return limit is not None and self.next_epoch >= self.first_epoch + limit

    def _plan(self, now: float) -> list[Command]:
        if self.planning or self.recovering or self.stopping or self.final or self.rescales or self._enough():
            return []
        if self.phase != "running" or len(self.in_flight) >= self._allowed():
            return []
        if self.idle_since is not None and now - self.last_plan < self.settings.poll_s:
            return []
        heartbeat = self.idle_since is not None and now - self.idle_since >= self.settings.idle_epoch_s
        changing = self.migration or self.handed or self.resizes or self.leaving - self.released
        if self.idle_since is not None and changing:
            # Slices move with epochs. While input comes, its epochs will do: others would only take its time.
            silent = now - self.last_input >= INPUT_PAUSE_S
            heartbeat = heartbeat or (silent and now - self.idle_since >= MOVING_EPOCH_S)
        self.planning = True
        self.last_plan = now
        return [PlanEpoch(self.next_epoch, dict(self.offsets), self.pacer.rows_max, heartbeat)]

    # -- invariants ----------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Check what must always hold. Called after each step in tests and simulation."""
        self.routing.validate()
        epochs = sorted(self.in_flight)
        if epochs:
            assert epochs == list(range(epochs[0], epochs[0] + len(epochs))), f"an epoch was skipped: {epochs}"
        assert self.committed <= self.published or self.log, "a checkpoint covers an epoch that was not published"
        for epoch, run in self.in_flight.items():
            assert run.logged or run.ahead or not (run.running or run.done), f"epoch {epoch} ran before it was logged"
            assert run.logged or not run.publishing, f"epoch {epoch} is published before it was logged"
            assert not (run.running & run.done.keys()), f"a stage of epoch {epoch} runs twice"
            previous = self.in_flight.get(Epoch(epoch - 1))
            for stage in (*run.running, *run.done):
                assert previous is None or stage in previous.done, f"'{stage}' of {epoch} overtook {epoch - 1}"
        assert self.switching is None or self.checkpoint is None, "a checkpoint is open while slices change hands"
        assert all(e > self.committed for e in self.log), "the log keeps epochs that a checkpoint covers"
        for node, cores in self.cores.items():
            assert node in self.nodes, f"cores of node {node}, which is gone"
            assert 1 <= cores <= self.nodes[node].cores, f"{cores} cores of node {node}, which has fewer"
