"""The runtime: carries out the controller's commands and tells it what happened. One thread, one queue of events.

All I/O of the driver is here: the epoch log, manifests, sources' plans, sinks' commits. Planning and publishing have a
thread each, so that a slow source or sink does not hold up the rest; both work strictly in order.

The checkpoint directory::

    LOCK                         held by the running job
    job.json                     the job's id, the flow's name
    log/000000000012.json        what epoch 12 reads, written before it runs
    manifests/000000000010.json  checkpoint at epoch 10: offsets, routing, clocks, the files of every stage
    state/<stage>/...            deltas and bases
    dead-letters/...             records set aside, unless the flow has a sink for them
    journal/...                  every step of the controller, for people and for replays
"""

from __future__ import annotations

import json
import math
import queue
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import msgspec
import polars as pl

from penstock import errors
from penstock.config import Config
from penstock.connectors.base import Sink, SinkContext, SourceContext, SourceRange
from penstock.connectors.sinks import encode as encode_rows
from penstock.connectors.skips import read_skips, told
from penstock.control.controller import Controller
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
    HotSlices,
    LogEpoch,
    ManifestWritten,
    NodesInvited,
    NothingNew,
    PlanEpoch,
    PublishEpoch,
    ReleaseEpoch,
    ReleaseNodes,
    RunStage,
    StageDone,
    StageFailed,
    Started,
    StoreChanged,
    Tell,
    Tick,
    WarmUp,
    WriteManifest,
)
from penstock.control.pacing import Pacer
from penstock.control.records import EpochRecord, SourceSpan, TaskError, TaskOutput
from penstock.control.routing import RoutingTable
from penstock.control.settings import Settings
from penstock.control.sharing import shares
from penstock.control.topology import StageInfo, Topology
from penstock.engines import epochlog, scaling
from penstock.engines.backlogs import Backlogs
from penstock.engines.merging import Merge, Merging
from penstock.engines.protocol import Engine
from penstock.engines.scaling import Scaler
from penstock.engines.task import DEAD_LETTERS, MANIFEST_NAME, bytes_frame, task_error
from penstock.errors import (
    CheckpointInUse,
    CorruptData,
    IncompatibleFlow,
    PenstockError,
    SinkError,
    SourceError,
    StoreAway,
)
from penstock.ids import FIRST_PLAN, StageId
from penstock.observe.journal import Journal
from penstock.observe.metrics import Metrics, StageFacts, snapshot
from penstock.observe.status import JobStatus
from penstock.plan import Plan
from penstock.state.checkpoint import Manifest, check_file, garbage
from penstock.state.store import Store

LOG_NAME = "log/{:012d}.json"
TICK_S = 0.02
ATTEMPTS_PER_START = 1000
HEARTBEAT_S = 10.0
NOTICES_MAX = 200
STATUS_S = 0.1
"""Seconds between two snapshots of the status."""
STATUS_SHARE = 0.05
"""Making snapshots takes no more than this share of the loop's time."""
CLOCKED_EPOCH_S = 0.5
"""An idle flow with windows by the clock runs an empty epoch this often."""


class SplitsFound(Event, frozen=True, kw_only=True):
    """A source stage can run: what it reads has been cut into shares. The controller does not hear of it."""

    command: RunStage
    splits: list[dict[str, Any]]


def topology_of(plan: Plan) -> Topology:
    return Topology(
        tuple(
            StageInfo(
                s.id,
                s.source is not None,
                s.stateful,
                s.keyed is not None and s.keyed.timed,
                s.keyed.lateness_us if s.keyed else 0,
                s.keyed.hold_us if s.keyed else 0,
                tuple(e.upstream for e in s.ins),
                tuple(e.port for e in s.ins),
                s.keyed is not None and s.keyed.clocked,
            )
            for s in plan.stages
        )
    )


class Runtime:
    def __init__(
        self,
        plan: Plan,
        config: Config,
        store: Store,
        make_engine: Callable[[str], Engine],
        *,
        checkpoint_url: str | None,
        clock: Callable[[], float] = time.monotonic,
        wall_ms: Callable[[], int] = lambda: int(time.time() * 1000),
        trip: Callable[[str], None] = lambda step: None,
        heartbeat: Callable[[], None] = lambda: None,
        pool: Callable[[str], Executor] = lambda name: ThreadPoolExecutor(1, thread_name_prefix=name),
        unique: Callable[[], str] = lambda: uuid.uuid4().hex,
        make_controller: type[Controller] = Controller,
    ) -> None:
        """``heartbeat`` renews the hold on the checkpoint directory. ``trip`` is called with the name of each step of
        a commit: crash tests die there on purpose. ``pool`` makes the executors of planning and publishing, which work
        strictly in order, and ``unique`` names: the simulator has its own. Benchmarks that compare the controller with
        other ways of rescaling pass theirs as ``make_controller``.
        """
        self.plan = plan
        self.config = config
        self.store = store
        self.make_engine = make_engine
        self.checkpoint_url = checkpoint_url
        self.clock = clock
        self.wall_ms = wall_ms
        self.trip = trip
        self.heartbeat = heartbeat
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.ended = threading.Event()
        self.error: PenstockError | None = None
        self.reason = ""
        self.planner = pool("penstock-plan")
        self.splitter = pool("penstock-splits")
        self.logger = pool("penstock-log")
        self.publisher = pool("penstock-publish")
        self.unique = unique
        self.make_controller = make_controller
        self.engine: Engine | None = None
        self.controller: Controller | None = None
        self.metrics: Metrics | None = None
        self.outputs: dict[int, dict[tuple[str, int], TaskOutput]] = {}
        """epoch -> (stage, task) -> what it made for the sinks, until the epoch is published"""
        self.notices: list[str] = []
        self.job_id = ""
        self.first_attempt = 1
        self.merged: set[str] = set()
        """Files of merges under way, which no manifest names yet."""
        self.covered: dict[str, dict[str, Any]] = {}
        """source -> offset up to which it was told that nothing will be read again"""
        self.manifest_bytes: dict[int, int] = {}
        """epoch -> bytes of the checkpoint that was just written there"""
        self.on_published: list[Callable[[int], None]] = []
        self.log_ended = False
        """An epoch could not be logged: the job is about to end."""
        self.away_notice: str | None = None
        """Said while the store is away."""
        self.scaler = Scaler(config, self.post, self._say, clock, lambda: getattr(self.engine, "request_nodes", None))
        self.backlogs = Backlogs(plan.sources, clock)
        self.snapshot = JobStatus(job=config.name or plan.graph.name, flow=plan.graph.name, engine="", phase="starting")
        """What the job says of itself. The loop puts another in its place; anybody may read it."""
        self._publish_again_at = -math.inf
        durable = checkpoint_url is not None and config.checkpoint is not None
        self.journal = Journal(store if durable else None, config.journal_mb, wall_ms=wall_ms)

    # -- life ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Start, work until the end, clean up. Never raises: the outcome is in ``error`` and ``reason``."""
        try:
            self._start()
            self._loop()
        except PenstockError as error:
            self.error = error
        except OSError as error:
            self.error = errors.CheckpointError(
                f"the checkpoint directory could not be read or written: {error}.",
                remedy="What it holds is whole: start again once the cause is gone.",
                trace=traceback.format_exc(),
            )
        except BaseException as error:
            trace = traceback.format_exc()
            self.error = errors.EngineError(
                f"an error that Penstock did not expect: {type(error).__name__}: {error}.",
                remedy="Please report it, with the trace that -v shows. The checkpoint is whole.",
                trace=trace,
            )
        finally:
            # Whatever fails because the engine is gone fails in a way of its own: say what it comes from.
            lost = getattr(self.engine, "lost", None)
            if self.error is not None and lost is not None:
                self.error = lost() or self.error
            self._close()
            self._publish_status(self.clock(), at_once=True)
            self.ended.set()

    def post(self, event: Event) -> None:
        self.events.put(event)

    def _loop(self) -> None:
        assert self.controller is not None
        beat = considered = self.clock()
        while not self.reason and self.error is None:
            try:
                event = self.events.get(timeout=TICK_S)
            except queue.Empty:
                event = Tick(now=self.clock())
            if event.now - beat > HEARTBEAT_S:
                beat = event.now
                self.heartbeat()
            self.handle(event)
            if self.backlogs.due(event.now):
                self.planner.submit(self.backlogs.look)
            self._publish_status(event.now)
            if event.now - considered > scaling.POLICY_S:
                considered = event.now
                self._publish_status(event.now, at_once=True)
                self._look_for_hot(self.snapshot)
                self.scaler.consider(self.snapshot, event.now)

    def _look_for_hot(self, status: JobStatus) -> None:
        """Slices that are too hot for one container: their owners are asked for the keys, as long as they are."""
        assert self.controller is not None and self.metrics is not None
        if status.phase != "running" or not (self.controller.balance.load.rates or self.controller.balance.hot):
            return
        hot = self.metrics.find_hot(status)
        if hot != self.controller.balance.hot:
            self.post(HotSlices(now=self.clock(), slices=hot))

    def _say(self, text: str) -> None:
        self.notices = [*self.notices[-NOTICES_MAX:], text]

    def handle(self, event: Event) -> None:
        """One event: what it means, and what is to be done about it."""
        assert self.controller is not None
        if isinstance(event, SplitsFound):
            self._run_splits(event)
            return
        self._take_outputs(event)
        self._observe(event)
        try:
            commands = self.controller.step(event)
        except Exception as error:
            self.journal.crashed(event, error)
            raise
        self.journal.record(event, commands)
        for command in commands:
            self._execute(command)

    def _close(self) -> None:
        if self.error is None and self.away_notice is None:
            self.publisher.shutdown(wait=True)  # what the last checkpoint made superfluous goes too
        if callable(abandon := getattr(self.store, "abandon", None)):
            abandon()  # who still waits for the store waits for nothing
        self.planner.shutdown(wait=True, cancel_futures=True)
        self.splitter.shutdown(wait=True, cancel_futures=True)
        self.logger.shutdown(wait=True, cancel_futures=True)
        self.publisher.shutdown(wait=True, cancel_futures=True)
        for close in (
            *(s.close for s in self.plan.sources.values()),
            *(n.sink.close for n in self.plan.sinks.values() if n.sink is not None),
            *((self.plan.graph.dead_letters.close,) if self.plan.graph.dead_letters is not None else ()),
            *((self.engine.stop,) if self.engine is not None else ()),
        ):
            try:
                close()
            except Exception as error:  # the job is over: say it, do not hide the real outcome
                self.notices.append(f"while closing: {type(error).__name__}: {error}")
        self.journal.close()

    # -- start ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        job_id = self._job_id()
        manifest = self._latest_manifest()
        if manifest is not None:
            self._check_flow(manifest)
            self._check_sources(manifest.sources)
        self.engine = self.make_engine(job_id)
        self.metrics = Metrics(
            self.config.name or self.plan.graph.name,
            self.plan.graph.name,
            self.engine.name,
            {
                s.id: StageFacts(
                    "source" if s.source else "keyed",
                    s.operators,
                    tuple(dict.fromkeys(e.upstream for e in s.ins)),
                    s.stateful,
                )
                for s in self.plan.stages
            },
        )
        self.engine.start(self.post)
        self.metrics.began = self.clock()
        self.job_id = job_id
        logged = self._read_log(manifest.epoch if manifest else 0)
        self._check_sources({s for record in logged for s in record.ranges})
        topology = topology_of(self.plan)
        instances = self.config.instances or self.engine.cores
        own = self.plan.own_instances, self.plan.own_slices
        routing = RoutingTable.initial(self.config.slices, topology.keyed(), instances, *own)
        restored = None
        # The flow or the settings may be others than when the log was written.
        logged = [
            record
            if record.routing is None
            else msgspec.structs.replace(record, routing=self._fit_routing(record.routing, routing))
            for record in logged
        ]
        if manifest is not None:
            restored = self._fit(manifest, routing)
            self.metrics.counted_through = manifest.epoch
        c = self.config
        self.controller = self.make_controller(
            topology,
            routing,
            Pacer.start(c.epoch_rows, c.epoch_rows_min, c.epoch_rows_max, c.target_latency_ms),
            self._settings(topology),
            Manifest(job_id, self.plan.graph.name, self.plan.fingerprint(), 0),
        )
        facts: dict[str, list[Any]] = {s: list(v["facts"]) for s, v in (restored.sources if restored else {}).items()}
        for record in logged:
            for id, span in record.ranges.items():
                facts.setdefault(id, []).extend(span.facts)
        for name, source in self.plan.sources.items():
            store = self.store if self.checkpoint_url is not None else None
            source.open(SourceContext(name, self.checkpoint_url, self.engine.spark, store))
            source.remember(facts.get(name, []))
        self.engine.prepare(RoutingTable.from_json(restored.routing) if restored else routing)
        resumed = manifest is not None or bool(logged)
        for id, node in self.plan.sinks.items():
            assert node.sink is not None
            node.sink.open(SinkContext(id, job_id, node.schema, resumed, self.engine.spark))
        if self.plan.graph.dead_letters is not None:
            schema = pl.Schema({c: pl.String() for c in ("source", "offset", "reason", "raw")})
            self.plan.graph.dead_letters.open(SinkContext(DEAD_LETTERS, job_id, schema, resumed, self.engine.spark))
        self.journal.begin(
            self.controller,
            start=self.first_attempt // ATTEMPTS_PER_START,
            facts={"job": job_id, "flow": self.plan.graph.name, "engine": self.engine.name, **self._left_out()},
        )
        self.post(
            Started(
                now=self.clock(),
                restored=restored,
                logged=tuple(logged),
                attempt=self.first_attempt,
                nodes=self.engine.nodes(),
            )
        )

    def _settings(self, topology: Topology) -> Settings:
        c = self.config
        # A window by the clock is over when the clock says so, rows or not.
        clocked = any(s.clocked for s in topology.stages)
        return Settings(
            epochs_in_flight=c.epochs_in_flight,
            checkpoint_interval_s=c.checkpoint_interval_s,
            idle_epoch_s=min(c.idle_epoch_s, CLOCKED_EPOCH_S) if clocked else c.idle_epoch_s,
            poll_s=c.poll_ms / 1000,
            deltas_max=c.deltas_max,
            epochs_max=c.epochs_max,
            away_epochs=c.store_away_epochs,
            backups=c.backups,
            placement=c.placement,
            move_timeout_s=c.move_timeout_s,
            grows=c.instances is None,
            schedule=c.schedule,
        )

    def _left_out(self) -> dict[str, list[str]]:
        """For the journal: what the sources leave out by orders of ``penstock skip``."""
        said = told(skip for id in self.plan.sources for skip in read_skips(self.store, id))
        return {"skips": said} if said else {}

    def _job_id(self) -> str:
        try:
            known = json.loads(self.store.get("job.json"))
        except FileNotFoundError:
            known = {"job": self.unique()[:12], "flow": self.plan.graph.name, "format": 1, "starts": 0}
        except ValueError:
            raise CorruptData(
                "job.json in the checkpoint directory is damaged.",
                remedy="Restore it from a copy, or start with an empty checkpoint directory.",
                path="job.json",
            ) from None
        if known["flow"] != self.plan.graph.name:
            raise IncompatibleFlow(
                f"the checkpoint belongs to flow '{known['flow']}', not to '{self.plan.graph.name}'.",
                remedy="Use another checkpoint directory, or give the flow its old name.",
            )
        # What a start that was killed may still be writing must never be taken for ours.
        known["starts"] = starts = int(known["starts"]) + 1
        self.first_attempt = starts * ATTEMPTS_PER_START
        self.store.put("job.json", json.dumps(known).encode())
        return str(known["job"])

    def _latest_manifest(self) -> Manifest | None:
        """The newest checkpoint that is whole: every file there, every checksum right."""
        names = sorted(self.store.list("manifests/"), reverse=True)
        problems: list[str] = []
        for name in names:
            try:
                manifest = Manifest.from_bytes(self.store.get(name), name)
                for files in manifest.files.values():
                    for file in files:
                        check_file(file, self.store.get(file.name), file.name)
            except FileNotFoundError as error:
                problems.append(f"{name}: {error.filename or error} is missing")
                continue
            except CorruptData as error:
                problems.append(f"{name}: {error.message}")
                continue
            if problems:
                self.notices.append(
                    f"{'; '.join(problems)} Went back to the whole checkpoint at epoch {manifest.epoch}; "
                    "the epochs after it run again from the log."
                )
                for bad in names[: len(problems)]:
                    self.store.delete(bad)
            return manifest
        if problems:
            logged = min((int(n.split("/")[-1].split(".")[0]) for n in self.store.list("log/")), default=0)
            if logged != 1:
                rest = f"the log begins with epoch {logged}" if logged else "the log is empty"
                raise CorruptData(
                    f"no whole checkpoint is left: {'; '.join(problems)}; and {rest}: the state before cannot be "
                    "worked out again from what is there.",
                    remedy="Restore the files that are named from a copy (one whole checkpoint is enough), or start "
                    "anew with another checkpoint and output directory.",
                    path=names[0],
                )
            self.notices.append(
                f"{'; '.join(problems)} No whole checkpoint is left, but the log is there from epoch 1 on: all epochs "
                "run again from it, and sinks ignore what they have."
            )
            for bad in names:
                self.store.delete(bad)
        return None

    def _check_flow(self, manifest: Manifest) -> None:
        """Refuse a flow whose state cannot follow, saying what changed."""
        now = self.plan.fingerprint()
        changes = []
        for stage, was in manifest.fingerprint.items():
            if stage not in now:
                changes.append(f"operator '{stage}' is gone, and its state with it")
                continue
            for part in sorted(set(was) | set(now[stage])):
                a, b = was.get(part), now[stage].get(part)
                if part == "values" and a is None:
                    changes.append(f"operator '{stage}' was kept as pickles, which could run code and are not read")
                elif json.loads(json.dumps(a)) != json.loads(json.dumps(b)):
                    changes.append(f"operator '{stage}': {part} was {a}, is {b}")
        if changes:
            raise IncompatibleFlow(
                f"the flow changed in a way its state cannot follow: {'; '.join(changes)}.",
                remedy="Undo the change, give the changed operator a new id together with a new checkpoint directory, "
                "or start anew with another checkpoint directory.",
                changes=changes,
            )

    def _check_sources(self, known: Iterable[str]) -> None:
        gone = sorted(s for s in known if s not in self.plan.sources)
        if gone:
            raise IncompatibleFlow(
                f"the flow changed in a way its checkpoint cannot follow: source '{gone[0]}' is gone.",
                remedy="Keep the source under its old id, or start anew with another checkpoint directory.",
                changes=[f"source '{s}' is gone" for s in gone],
            )

    def _fit(self, manifest: Manifest, fresh: RoutingTable) -> Manifest:
        """The checkpoint, with a routing that fits the flow and the settings of today."""
        routing = self._fit_routing(RoutingTable.from_json(manifest.routing), fresh)
        return replace(manifest, routing=routing.to_json(), fingerprint=self.plan.fingerprint())

    def _fit_routing(self, routing: RoutingTable, fresh: RoutingTable) -> RoutingTable:
        self._check_slices(routing)
        stages = {s.id for s in self.plan.stages}
        routing = RoutingTable(
            routing.version,
            {s: routing.slicemaps.get(s, fresh.slicemaps[s]) for s in fresh.owners},
            {s: routing.owners.get(s, fresh.owners[s]) for s in fresh.owners},
            {s: routing.instances.get(s, fresh.instances[s]) for s in fresh.instances},
            {s: homes for s, homes in routing.homes.items() if s in stages},
            cores=routing.cores,
        )
        if self.config.instances is not None:
            for stage in stages - self.plan.own_instances.keys():
                wanted = self.config.instances
                if stage in routing.owners:
                    wanted = min(wanted, routing.slices_in(stage))
                if routing.instances[stage] != wanted:
                    routing = routing.rescale(stage, wanted)
        return routing

    def _check_slices(self, routing: RoutingTable) -> None:
        """The slices of a stage are set at its first run: its files and backups are cut by them."""
        kept: dict[int, list[str]] = {}
        for stage, slicemap in routing.slicemaps.items():
            own = self.plan.own_slices.get(stage)
            if own is not None and own != slicemap.count:
                raise IncompatibleFlow(
                    f"stage '{stage}' has {slicemap.count} slices, set at its first run; the flow says slices={own}.",
                    remedy=f"Write slices={slicemap.count}, or start anew with another checkpoint directory.",
                    changes=[f"stage '{stage}': slices was {slicemap.count}, is {own}"],
                )
            if own is None and slicemap.count != self.config.slices:
                kept.setdefault(slicemap.count, []).append(f"'{stage}'")
        for count, stages in kept.items():
            ignored = f"slices={self.config.slices} is ignored"
            notice = f"the state of {', '.join(stages)} has {count} slices, set at its first run; {ignored}."
            if notice not in self.notices:
                self.notices.append(notice)

    def _read_log(self, after: int) -> list[EpochRecord]:
        records: list[EpochRecord] = []
        for name in sorted(self.store.list("log/")):
            number = int(name.split("/")[-1].split(".")[0])
            if number <= after:
                continue
            if number != after + 1 + len(records):
                raise CorruptData(
                    f"the epoch log lacks what comes before {name}.",
                    remedy="Restore it from a copy: without it the epochs after the checkpoint cannot be repeated.",
                    path=name,
                )
            record = epochlog.decode(self.store.get(name), name)
            if record.plan != FIRST_PLAN:
                raise IncompatibleFlow(
                    f"epoch {record.epoch} ran with version {record.plan} of the flow's plan, and the checkpoint "
                    f"directory has only version {FIRST_PLAN}.",
                    remedy="Restore the whole checkpoint directory from one copy, or start anew with another one.",
                )
            records.append(record)
        return records

    # -- commands ------------------------------------------------------------------------------------------------

    def _execute(self, command: Command) -> None:
        assert self.engine is not None and self.controller is not None
        match command:
            case PlanEpoch():
                self._submit(self.planner, self._plan_epoch, command)
            case LogEpoch():
                self._submit(self.logger, self._log_epoch, command)
            case RunStage():
                self._run_stage(command)
            case PublishEpoch():
                made = self.outputs.pop(command.epoch, {})
                self._submit(self.publisher, lambda command: self._publish(command, made), command)
            case Flush():
                self.engine.flush(command)
            case WriteManifest():
                self._submit(self.publisher, self._write_manifest, command)
            case WarmUp():
                self.engine.warm_up(command)
            case Compact():
                self.engine.compact(command, lambda merging: self._compact(command, merging))
            case ReleaseEpoch():
                self.engine.release(command.epoch)
            case CollectGarbage():
                self._submit(self.publisher, self._collect_garbage, command)
            case CancelAll():
                self.outputs.clear()  # all that is not published runs again
                self.engine.cancel(command.attempt)
            case ReleaseNodes():
                self.engine.release_nodes(command.nodes)
            case Tell():
                self.notices = [*self.notices[-NOTICES_MAX:], f"{command.text}."]
            case Finish():
                self.reason = command.reason
            case Fail():
                self.error = raised(command.error)

    def _submit(self, pool: Executor, work: Callable[[Any], None], command: Any) -> None:
        def guarded() -> None:
            try:
                work(command)
            except PenstockError as error:
                self.post(Fatal(now=self.clock(), error=task_error(error)))
            except Exception as error:
                what = type(command).__name__
                self.post(
                    Fatal(
                        now=self.clock(),
                        error=TaskError(
                            kind="EngineError",
                            message=f"{what} failed: {type(error).__name__}: {error}.",
                            remedy="The checkpoint is whole: start again once the cause is gone.",
                            evidence={"trace": traceback.format_exc()},
                        ),
                    )
                )

        pool.submit(guarded)

    def _run_stage(self, command: RunStage) -> None:
        assert self.engine is not None
        if command.span is None:
            self.engine.run_stage(command, [])
        else:
            self._submit(self.splitter, self._find_splits, command)

    def _find_splits(self, command: RunStage) -> None:
        """Cut what a source reads in an epoch into shares. A source may look at files for that."""
        source, span = self.plan.by_id[command.stage].source, command.span
        assert source is not None and span is not None
        splits = source.splits(span.start, span.end, len(command.containers))
        self.post(SplitsFound(now=self.clock(), command=command, splits=splits))

    def _run_splits(self, found: SplitsFound) -> None:
        assert self.engine is not None and self.controller is not None
        command = found.command
        if command.attempt == self.controller.attempts.current:
            self.engine.run_stage(command, found.splits)
            return
        # A recovery has begun meanwhile. What the stage sent would meet what the new attempt sends.
        self.post(
            StageFailed(
                now=self.clock(),
                epoch=command.epoch,
                stage=command.stage,
                attempt=command.attempt,
                reason="cancelled before it began",
            )
        )

    def _plan_epoch(self, command: PlanEpoch) -> None:
        ranges: dict[str, SourceSpan] = {}
        exhausted = []
        sources = self.plan.sources
        # With a fixed size of epochs their cut is the same each time, whatever waits.
        fixed = self.config.epoch_rows is not None
        given = shares(command.rows_max, dict.fromkeys(sources) if fixed else self.backlogs.waiting)
        for id, source in sources.items():
            start = command.offsets.get(id) or source.initial_offset()
            try:
                found: SourceRange | None = source.plan(start, given[id])
            except PenstockError:
                raise
            except Exception as error:
                raise SourceError(
                    f"source '{id}' could not say what comes next: {type(error).__name__}: {error}.",
                    remedy="Check that it can be reached; start again with the same checkpoint.",
                    source=id,
                ) from error
            taken = found.rows_estimate if found is not None else 0
            self.backlogs.planned(id, found.end if found is not None else start, taken, given[id])
            if found is not None:
                ranges[id] = SourceSpan(
                    start=found.start, end=found.end, rows=found.rows_estimate, facts=list(found.facts)
                )
            if source.exhausted(found.end if found is not None else start):
                exhausted.append(id)
        now = self.clock()
        if not ranges and not command.even_if_empty:
            self.post(NothingNew(now=now, epoch=command.epoch, exhausted=len(exhausted) == len(sources)))
            return
        self.post(
            EpochPlanned(
                now=now, epoch=command.epoch, ranges=ranges, exhausted=tuple(exhausted), clock_ms=self.wall_ms()
            )
        )

    def _log_epoch(self, command: LogEpoch) -> None:
        if self.log_ended:
            return
        self.log_ended = True  # unless this one gets there, those after it must not: the log would have a hole
        self.trip("before-log")
        name, data = LOG_NAME.format(command.epoch), epochlog.encode(command.record)
        # Created, never replaced: of two drivers that each believe the directory theirs, one gets no further than here.
        if not self.store.put_if_absent(name, data) and self.store.get(name) != data:
            raise CheckpointInUse(
                f"epoch {command.epoch} was logged by another start of this job.",
                remedy="See that only one is running, and start it again: it takes up what was logged.",
                path=name,
            )
        self.log_ended = False
        self.trip("after-log")
        self.post(EpochLogged(now=self.clock(), epoch=command.epoch, attempt=command.attempt))

    def _publish(self, command: PublishEpoch, made: Mapping[tuple[str, int], TaskOutput]) -> None:
        """``made``: (stage, task) -> what it made for the sinks."""
        self.trip("before-publish")
        outputs = [made[key] for key in sorted(made, key=lambda key: (self.plan.by_id[StageId(key[0])].index, key[1]))]
        for id, node in self.plan.sinks.items():
            sink = node.sink
            assert sink is not None
            try:
                self._deliver(id, sink, command, outputs)
            except PenstockError:
                raise
            except Exception as error:
                raise SinkError(
                    f"sink '{id}' could not write epoch {command.epoch}: {type(error).__name__}: {error}.",
                    remedy="Start with the same checkpoint once it can be written: the epoch is repeated exactly.",
                    sink=id,
                    epoch=command.epoch,
                ) from error
            self.trip("between-sinks")
        dead = self.plan.graph.dead_letters
        if dead is not None:
            self._deliver(DEAD_LETTERS, dead, command, outputs)
        elif tables := [out.tables[DEAD_LETTERS] for out in outputs if DEAD_LETTERS in out.tables]:
            frame = pl.concat([bytes_frame(table) for table in tables])
            self.store.put(f"dead-letters/{command.epoch:012d}.jsonl", encode_rows("jsonl", frame))
        self.trip("after-publish")
        self.post(EpochPublished(now=self.clock(), epoch=command.epoch, attempt=command.attempt))
        for callback in self.on_published:
            callback(command.epoch)

    @staticmethod
    def _deliver(id: str, sink: Sink, command: PublishEpoch, outputs: Sequence[TaskOutput]) -> None:
        """Give one sink its rows of the epoch, or the parts that tasks have written, in order."""
        if sink.collects:
            frames = [bytes_frame(out.tables[id]) for out in outputs if id in out.tables]
            if frames:
                sink.write(command.epoch, pl.concat(frames))
        elif parts := [out.parts[id] for out in outputs if id in out.parts]:
            sink.commit(command.epoch, command.attempt, parts)

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def _write_manifest(self, command: WriteManifest) -> None:
        manifest = command.manifest
        self.trip("before-manifest")
        self.store.put(MANIFEST_NAME.format(command.epoch), manifest.to_bytes())
        self.trip("after-manifest")
        self.manifest_bytes[command.epoch] = sum(f.bytes for fs in manifest.files.values() for f in fs)
        self.post(ManifestWritten(now=self.clock(), epoch=command.epoch, attempt=command.attempt))

    def _compact(self, command: Compact, merging: Merging) -> Event:
        assert self.controller is not None
        task, stage = command.task, command.stage
        keyed = self.plan.by_id[stage].keyed
        layout = keyed and keyed.table()
        assert layout
        first, last = task.epoch_from, task.epoch_to
        meta = {"job": self.job_id, "stage": stage, "kind": task.kind, "epoch_from": first, "epoch_to": last}
        name = f"state/{stage}/{last:012d}-{self.unique()[:8]}.{task.kind}"
        self.merged.add(name)
        self.trip("before-compact")
        merge = Merge(task, tuple(layout.key.names()), meta, name, self.controller.routes.table.slicemaps[stage])
        try:
            out = merging(self.store, merge)
            self.trip("after-compact")
        except (PenstockError, OSError) as error:
            return Compacted(now=self.clock(), stage=stage, task=task, output=None, failed=str(error))
        return Compacted(now=self.clock(), stage=stage, task=task, output=out)

    def _collect_garbage(self, command: CollectGarbage) -> None:
        try:
            self._forget()
        except StoreAway:
            return  # it will still be there at the next checkpoint
        self.trip("after-garbage")

    def _forget(self) -> None:
        """Forget what no recovery can need: the last few checkpoints stay, with the log after the oldest of them."""
        names = sorted(self.store.list("manifests/"))
        keep, drop = names[-self.config.manifests_kept :], names[: -self.config.manifests_kept]
        for name in drop:
            self.store.delete(name)
        kept = [Manifest.from_bytes(self.store.get(name), name) for name in keep]
        first = min(kept, key=lambda m: m.epoch)
        oldest = first.epoch
        for name in self.store.list("log/"):
            if int(name.split("/")[-1].split(".")[0]) <= oldest:
                self.store.delete(name)
        assert self.controller is not None
        current = self.controller.checkpoints.manifest.names()
        self.merged -= current
        for name in garbage(self.store.list("state/"), kept, in_flight=current | self.merged):
            # A newer file that no manifest names yet may belong to the checkpoint under way.
            if int(name.split("/")[-1].split("-")[0]) <= oldest:
                self.store.delete(name)
        # A damaged checkpoint sends the job back to an older one: what that would read again must not be forgotten.
        for id, covered in first.sources.items():
            if id in self.plan.sources and covered["offset"] is not None and self.covered.get(id) != covered["offset"]:
                self.covered[id] = covered["offset"]
                self.plan.sources[id].committed(covered["offset"])

    def store_changed(self, away: bool, reason: str) -> None:
        """The store tells, from whatever thread meets it first."""
        if away:
            self.away_notice = (
                f"the checkpoint store does not answer ({reason}); epochs go on for up to "
                f"{self.config.store_away_s:g} s, and what they give is published when it is back."
            )
        else:
            self.away_notice = None
        self.post(StoreChanged(now=self.clock(), away=away))

    # -- what is seen ----------------------------------------------------------------------------------------------

    def _take_outputs(self, event: Event) -> None:
        """Keep what tasks made for the sinks. Control does not see it."""
        assert self.controller is not None
        if not isinstance(event, StageDone):
            return
        current = event.attempt == self.controller.attempts.current
        wanted = current and event.epoch in self.controller.epochs.in_flight
        for report in event.reports:
            if report.output is not None and wanted:
                self.outputs.setdefault(event.epoch, {})[report.stage, report.index] = report.output
            report.output = None

    def _observe(self, event: Event) -> None:
        assert self.metrics is not None and self.controller is not None
        match event:
            case StageDone() if event.attempt == self.controller.attempts.current:
                self.metrics.stage_done(event.stage, event.epoch, event.reports, event.now)
                for report in event.reports:
                    for downstream, sizes in report.bytes_out.items():
                        crossing = self._crossing(StageId(downstream), report.node, sizes)
                        self.metrics.exchanged(event.stage, *crossing)
            case EpochPlanned():
                self.metrics.planned(event.epoch, {s: span.rows for s, span in event.ranges.items()}, event.now)
            case NodesInvited():
                self.scaler.invited(event)
            case ManifestWritten():
                self.metrics.checkpointed(self.manifest_bytes.pop(event.epoch, 0))
            case EpochPublished():
                run = self.controller.epochs.in_flight.get(event.epoch)
                rows = sum(r.rows_in for s in self.plan.sources for r in run.done.get(StageId(s), ())) if run else 0
                self.metrics.published(event.epoch, rows, event.now, self.controller.routes.table.instances)

    def _crossing(self, stage: StageId, node: str, sizes: list[int]) -> tuple[int, int]:
        """Of what a task on a node sent to each container of a stage: bytes that stay on the node, and bytes that leave
        it."""
        assert self.controller is not None
        homes = self.controller.routes.table.homes_of(stage)
        local = sum(b for c, b in enumerate(sizes) if homes.get(c) == node)
        return local, sum(sizes) - local

    def status(self) -> JobStatus:
        return self.snapshot

    def _publish_status(self, now: float, *, at_once: bool = False) -> None:
        """Put a new snapshot in the place of the last one, when it is time for it or the phase is another."""
        for look in self.backlogs.take():
            if self.metrics is not None:
                self.metrics.looked(look.source, look.arrived, look.took, look.full)
        error = str(self.error) if self.error is not None else None
        if self.controller is None or self.metrics is None:
            phase = "failed" if self.error is not None else "starting"
            self.snapshot = msgspec.structs.replace(self.snapshot, phase=phase, error=error)
            return
        phase = "failed" if self.error is not None else self.reason or self.controller.phase
        if not at_once and phase == self.snapshot.phase and now < self._publish_again_at:
            return
        began = self.clock()
        made = snapshot(self.metrics, self.controller, now, self.scaler.about)
        self.snapshot = msgspec.structs.replace(made, phase=phase, error=error)
        took_s = self.clock() - began
        self._publish_again_at = began + max(STATUS_S, took_s / STATUS_SHARE)


def raised(error: TaskError) -> PenstockError:
    """The same error that a task met, as an exception of the same class."""
    kind = getattr(errors, error.kind, errors.EngineError)
    return kind(error.message, remedy=error.remedy, **error.evidence)  # type: ignore[no-any-return]
