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
* after a failure everything after the last complete checkpoint runs again, from the log, under a new attempt number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

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
    Fatal,
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
    StoreChanged,
    TaskError,
    TaskReport,
    Tick,
    WarmedUp,
    WarmUp,
    WriteManifest,
)
from penstock.control.pacing import Pacer
from penstock.control.routing import RoutingTable
from penstock.control.topology import StageInfo, Topology, at_port
from penstock.errors import ConfigError
from penstock.ids import NO_EPOCH, Attempt, Epoch, StageId
from penstock.state.checkpoint import DeltaFile, Manifest, plan_compaction

NEVER = -(2**63) + 1
FOREVER = 2**63 - 1
CLOCK = "clock"
"""Among the clocks of edges: the clock of the last epoch (ms), which never goes back."""
RECOVERIES_MAX = 5
"""Recoveries in a row without a new epoch published, or a checkpoint taken, in between."""


@dataclass(frozen=True)
class Settings:
    epochs_in_flight: int = 2
    checkpoint_interval_s: float = 2.0
    """Negative: only when asked (stop, rescale)."""
    idle_epoch_s: float = 20.0
    poll_s: float = 0.02
    deltas_max: int = 8
    epochs_max: int | None = None
    away_epochs: int = 0
    """Epochs that may run ahead of the log while the store is away."""


@dataclass
class EpochRun:
    """One epoch under way."""

    epoch: Epoch
    record: dict[str, Any]
    logged: bool
    seal: bool
    began: float
    running: set[StageId] = field(default_factory=set)
    done: dict[StageId, tuple[TaskReport, ...]] = field(default_factory=dict)
    clocks: dict[str, int] = field(default_factory=dict)
    """edge "up>down" -> greatest event time up to and including this epoch; "@stage#port" -> watermark of an input"""
    watermarks: dict[StageId, int] = field(default_factory=dict)
    publishing: bool = False
    ahead: bool = False
    """It ran before it was logged, because the store was away."""


@dataclass(frozen=True)
class Time:
    """What a stage is told of time for one epoch."""

    before: int
    watermark: int
    arrivals: dict[str, list[int]] = field(default_factory=dict)
    """origin -> watermark of that input before each split of the source that feeds it"""
    ports: tuple[tuple[int, int], ...] = ()
    """With several inputs: watermark before and after, of each."""


@dataclass
class Checkpoint:
    """A checkpoint being taken at ``epoch``."""

    epoch: Epoch
    expected: set[tuple[StageId, int]]
    files: list[DeltaFile] = field(default_factory=list)
    published: bool = False
    flushing: bool = False
    writing: bool = False
    clocks: dict[str, int] = field(default_factory=dict)
    watermarks: dict[StageId, int] = field(default_factory=dict)


class Controller:
    def __init__(
        self, topology: Topology, routing: RoutingTable, pacer: Pacer, settings: Settings, blank: Manifest
    ) -> None:
        """``blank`` is the checkpoint before any input: it names the job and the flow."""
        self.manifest = blank
        """The last complete checkpoint, with merges of its files that were finished since."""
        self.topology = topology
        self.routing = routing
        self.pacer = pacer
        self.settings = settings
        self.phase = "starting"
        self.attempt = Attempt(1)
        self.first_epoch = Epoch(1)
        """The first epoch of this run."""
        self.next_epoch = Epoch(1)
        self.published = NO_EPOCH
        self.committed = NO_EPOCH
        self.offsets: dict[str, dict[str, Any] | None] = {}
        self.exhausted: set[str] = set()
        self.final = False
        """The epoch that ends a bounded input has been planned."""
        self.clocks: dict[str, int] = {}
        self.watermarks: dict[StageId, int] = {}
        self.facts: dict[str, list[Any]] = {}
        self.log: dict[Epoch, dict[str, Any]] = {}
        """Logged epochs after the last checkpoint: what a recovery runs again."""
        self.in_flight: dict[Epoch, EpochRun] = {}
        self.checkpoint: Checkpoint | None = None
        self.checkpoint_at = 0.0
        self.committed_clocks: dict[str, int] = {}
        self.committed_watermarks: dict[StageId, int] = {}
        self.committed_final = False
        self.logged_through = NO_EPOCH
        self.planning = False
        self.idle_since: float | None = None
        self.last_plan = -1e9
        self.rescales: list[tuple[StageId, int]] = []
        self.stopping = False
        self.away = False
        """The store does not answer: epochs are logged when it does again."""
        self.outstanding: set[tuple[Attempt, Epoch, str]] = set()
        """Jobs of this or older attempts that have not come back."""
        self.recovering = False
        self.recoveries = 0
        self.fruitless = 0
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
            RescaleRequested: self._rescale_requested,
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
                self.logged_through = epoch
                for source, r in record["ranges"].items():
                    self.facts.setdefault(source, []).extend(r["facts"])
                self.attempt = Attempt(max(self.attempt, record["attempt"] + 1))
        self.attempt = Attempt(max(self.attempt, event.attempt))
        self._rewind(event.now)
        self.first_epoch = self.next_epoch
        return []

    def _rewind(self, now: float) -> None:
        """Put everything after the last checkpoint back to "logged, not run"."""
        self.in_flight.clear()
        self.checkpoint = None
        self.checkpoint_at = now
        self.clocks = dict(self.committed_clocks)
        self.watermarks = dict(self.committed_watermarks)
        self.final = self.committed_final
        for epoch, record in sorted(self.log.items()):
            self.in_flight[epoch] = EpochRun(epoch, record, epoch <= self.logged_through, False, now)
            self.next_epoch = Epoch(epoch + 1)
            self.offsets.update({s: r["end"] for s, r in record["ranges"].items()})
            self.final = self.final or record["final"]
            self.routing = RoutingTable.from_json(record["routing"]) if record.get("routing") else self.routing
        if not self.log:
            self.next_epoch = Epoch(self.committed + 1)

    def _recover(self, now: float, reason: str) -> list[Command]:
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
        self.attempt = Attempt(self.attempt + 1)
        self.recovering = True
        self.phase = "recovering"
        self._rewind(now)
        return [CancelAll(self.attempt, cause=f"failure: {reason}")]

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
        self.exhausted |= set(event.exhausted)
        return self._begin(event.ranges, event.clock_ms, event.now)

    def _begin(self, ranges: dict[str, dict[str, Any]], clock_ms: int, now: float) -> list[Command]:
        epoch = self.next_epoch
        last = max(self.log.values(), key=lambda r: int(r["epoch"]), default={"clock_ms": self.clocks.get(CLOCK, 0)})
        clock_ms = max(clock_ms, last["clock_ms"])
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
        self.in_flight[epoch] = EpochRun(epoch, record, False, False, now)
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
        return []

    def _stage_failed(self, event: StageFailed) -> list[Command]:
        self.outstanding.discard((event.attempt, event.epoch, event.stage))
        if event.attempt != self.attempt:
            return []
        return self._recover(event.now, event.reason)

    def _epoch_published(self, event: EpochPublished) -> list[Command]:
        self.outstanding.discard((event.attempt, event.epoch, "publish"))
        run = self.in_flight.get(event.epoch)
        if event.attempt != self.attempt or run is None:
            return []
        del self.in_flight[event.epoch]
        if event.epoch > self.published:
            self.fruitless = 0  # what is published again after a failure is no progress
        self.published = Epoch(max(self.published, event.epoch))
        self.clocks, self.watermarks = run.clocks, {**self.watermarks, **run.watermarks}
        rows = sum(r["rows"] for r in run.record["ranges"].values())
        if not run.ahead:  # the time it waited for the store says nothing of its size
            self.pacer = self.pacer.observe(rows, (event.now - run.began) * 1000)
        if self.checkpoint is not None and self.checkpoint.epoch == event.epoch:
            self._note_published(run)
        return [ReleaseEpoch(event.epoch)]

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
        if not stage.timed:
            return Time(NEVER, NEVER)
        clocks_before, marks_before = self._before(run.epoch)
        before = marks_before.get(stage.id, NEVER)
        final = run.record["final"]
        if stage.clocked:
            return Time(before, max(before, FOREVER if final else run.record["clock_ms"] * 1000))
        by_port: dict[int, int] = {}
        arrivals: dict[str, list[int]] = {}
        for up, port in stage.inputs:
            here = at_port(stage.id, port)
            edge = f"{up}>{here}"
            seen = clocks_before.get(edge, NEVER)
            prefix: list[int] = []
            for report in run.done[up]:
                prefix.append(_behind(seen, stage.lateness_us))
                seen = max(seen, report.time_max.get(here, NEVER))
            run.clocks[edge] = seen
            info = self.topology[up]
            if info.is_source:
                arrivals[at_port(up, port)] = prefix
            if info.timed:
                mark = _behind(run.watermarks[up], info.hold_us + stage.lateness_us)
            else:
                mark = FOREVER if final else _behind(seen, stage.lateness_us)
            by_port[port] = min(mark, by_port.get(port, FOREVER))
        ports: list[tuple[int, int]] = []
        for port, mark in sorted(by_port.items()) if len(by_port) > 1 else ():
            name = f"@{at_port(stage.id, port)}"
            earlier = clocks_before.get(name, NEVER)
            run.clocks[name] = max(earlier, mark)
            ports.append((earlier, run.clocks[name]))
        return Time(before, max(before, min(by_port.values())), arrivals, tuple(ports))

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def _checkpoint_due(self, now: float) -> bool:
        interval = self.settings.checkpoint_interval_s
        return interval >= 0 and self.checkpoint is None and now - self.checkpoint_at >= interval

    def _open_checkpoint(self, epoch: Epoch, now: float) -> None:
        expected = {(s.id, c) for s in self.topology.stateful for c in range(self.routing.instances[s.id])}
        self.checkpoint = Checkpoint(epoch, expected)
        self.checkpoint_at = now

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
                    self.checkpoint.files.append(DeltaFile(**delta["file"]))

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
        if event.attempt != self.attempt or self.checkpoint is None or self.checkpoint.epoch != event.epoch:
            return []
        done = self.checkpoint
        self.checkpoint = None
        self.committed = done.epoch
        self.fruitless = 0
        self.manifest = self._advanced(done)
        self.committed_clocks, self.committed_watermarks = done.clocks, done.watermarks
        record = self.log.get(done.epoch)
        self.committed_final = self.committed_final or bool(record and record["final"])
        ends = {s: r["end"] for e in sorted(self.log) if e <= done.epoch for s, r in self.log[e]["ranges"].items()}
        self.log = {e: r for e, r in self.log.items() if e > done.epoch}
        out: list[Command] = [CollectGarbage(done.epoch, ends)]
        for stage, files in self.manifest.files.items():
            if StageId(stage) not in self.compacting:
                for task in plan_compaction(files, deltas_max=self.settings.deltas_max)[:1]:
                    self.compacting.add(StageId(stage))
                    out.append(Compact(StageId(stage), task))
        return out

    def _compacted(self, event: Compacted) -> list[Command]:
        self.compacting.discard(event.stage)
        if event.failed is not None:
            return []  # the old files are still whole; the next manifest tries again
        assert event.output is not None
        self.manifest = self.manifest.compacted(event.task, event.output)
        return []

    def _advanced(self, checkpoint: Checkpoint) -> Manifest:
        """What the manifest must say for the job to go on from this checkpoint."""
        offsets = dict(self.offsets)
        facts = {s: list(f) for s, f in self.facts.items()}
        for epoch in sorted(self.log, reverse=True):  # back to where the sources stood at the checkpoint
            if epoch <= checkpoint.epoch:
                break
            for source, r in self.log[epoch]["ranges"].items():
                offsets[source] = r["start"]
                if r["facts"]:
                    del facts[source][-len(r["facts"]) :]
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

    # -- requests ------------------------------------------------------------------------------------------------

    def _rescale_requested(self, event: RescaleRequested) -> list[Command]:
        try:
            self.routing.rescale(event.stage, event.instances)
        except ConfigError:
            return []  # whoever asked was told already
        return [WarmUp(event.stage, event.instances)]

    def _warmed_up(self, event: WarmedUp) -> list[Command]:
        self.rescales.append((event.stage, event.instances))
        return []

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
        """Epochs that may be under way. Those that wait for nothing but the log come on top, up to a limit."""
        waiting = sum(not r.logged and len(r.done) == len(self.topology.stages) for r in self.in_flight.values())
        return self.settings.epochs_in_flight + min(waiting, self.settings.away_epochs)

    def _advance(self, now: float) -> list[Command]:
        if self.phase == "starting":
            return []
        if self.recovering:
            if self.outstanding:
                return []  # old work must be gone before its containers are used again
            self.recovering = False
            self.phase = "stopping" if self.stopping else "running"
        out: list[Command] = []
        out += self._run_stages(now)
        out += self._publish()
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
                    self._open_checkpoint(epoch, now)
                out.append(self._run_stage(run, stage))
        return out

    def _run_stage(self, run: EpochRun, stage: StageInfo) -> RunStage:
        time = self._time(run, stage)
        if stage.timed:
            run.watermarks[stage.id] = time.watermark
        run.running.add(stage.id)
        self.outstanding.add((self.attempt, run.epoch, stage.id))
        return RunStage(
            run.epoch,
            stage.id,
            self.attempt,
            self.committed,
            self.routing.version,
            run.seal and stage.stateful,
            run.record["ranges"].get(stage.id) if stage.is_source else None,
            time.before,
            time.watermark,
            time.arrivals,
            run.record["clock_ms"],
            time.ports,
        )

    def _publish(self) -> list[Command]:
        for epoch in sorted(self.in_flight):
            run = self.in_flight[epoch]
            if run.publishing:
                return []
            if len(run.done) < len(self.topology.stages):
                return []
            if not run.logged:
                return []  # if the driver died now, the epoch might be cut otherwise the next time
            clocks_before, _ = self._before(epoch)
            run.clocks = {**clocks_before, **run.clocks, CLOCK: run.record["clock_ms"]}
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
            return [PublishEpoch(epoch, self.attempt, parts, tables)]
        return []

    def _quiesce(self, now: float) -> list[Command]:
        """With nothing under way: finish a checkpoint, change the routing, or end."""
        if self.in_flight or self.planning:
            return []
        if self.checkpoint is not None:
            return self._flush()
        over = self.stopping or self.final or self._enough()
        if self.rescales or over:
            if self.committed < self.published:
                self._open_checkpoint(self.published, now)
                assert self.checkpoint is not None
                self.checkpoint.published = True
                self.checkpoint.clocks = dict(self.clocks)
                self.checkpoint.watermarks = dict(self.watermarks)
                return self._flush()
            for stage, instances in self.rescales:
                self.routing = self.routing.rescale(stage, instances)
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
        return [Flush(self.checkpoint.epoch, self.attempt, self.committed, self.routing.version)]

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
        assert all(e > self.committed for e in self.log), "the log keeps epochs that a checkpoint covers"


def _behind(time: int, by: int) -> int:
    return time if time in (NEVER, FOREVER) else time - by
