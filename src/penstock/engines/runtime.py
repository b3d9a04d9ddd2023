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
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import polars as pl
import xxhash

from penstock import errors
from penstock.config import Config
from penstock.connectors.base import SinkContext, SourceContext, SourceRange
from penstock.connectors.sinks import encode as encode_rows
from penstock.control.controller import Controller
from penstock.control.epochs import Baseline, Settings
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
    LeaveRequested,
    LogEpoch,
    ManifestWritten,
    MoveRequested,
    NodesInvited,
    NothingNew,
    PlanEpoch,
    PublishEpoch,
    ReleaseEpoch,
    ReleaseNodes,
    RescaleRequested,
    RunStage,
    StageDone,
    Started,
    StoreChanged,
    TaskError,
    Tell,
    Tick,
    WarmUp,
    WriteManifest,
)
from penstock.control.pacing import Pacer
from penstock.control.policies import Observation, Policy, policy_from
from penstock.control.routing import RoutingTable
from penstock.control.topology import StageInfo, Topology
from penstock.engines.merging import Merge, Merging
from penstock.engines.protocol import Engine
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
from penstock.ids import StageId
from penstock.observe import cluster
from penstock.observe.journal import Journal
from penstock.observe.metrics import Metrics
from penstock.observe.status import JobStatus
from penstock.plan import Plan
from penstock.state.checkpoint import Manifest, check_file, garbage
from penstock.state.store import Store

LOG_NAME = "log/{:012d}.json"
TICK_S = 0.02
ATTEMPTS_PER_START = 1000
HEARTBEAT_S = 10.0
NOTICES_MAX = 200
POLICY_S = 1.0
"""How often a policy is asked."""
REFUSED_S = 600.0
"""A cluster manager that refused nodes is not asked again by a policy for so long."""
CLOCKED_EPOCH_S = 0.5
"""An idle flow with windows by the clock runs an empty epoch this often."""


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
        baseline: Baseline | None = None,
    ) -> None:
        """``heartbeat`` renews the hold on the checkpoint directory. ``trip`` is called with the name of each step of
        a commit: crash tests die there on purpose. ``pool`` makes the executors of planning and publishing, which work
        strictly in order, and ``unique`` names: the simulator has its own. ``baseline`` is how benchmarks compare.
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
        self.logger = pool("penstock-log")
        self.publisher = pool("penstock-publish")
        self.unique = unique
        self.baseline = baseline or Baseline()
        self.engine: Engine | None = None
        self.controller: Controller | None = None
        self.metrics: Metrics | None = None
        self.ranges: dict[tuple[int, str], dict[str, Any]] = {}
        self.notices: list[str] = []
        self.job_id = ""
        self.first_attempt = 1
        self.merged: set[str] = set()
        """Files of merges under way, which no manifest names yet."""
        self.covered: dict[str, dict[str, Any]] = {}
        """source -> offset up to which it was told that nothing will be read again"""
        self.on_published: list[Callable[[int], None]] = []
        self.log_ended = False
        """An epoch could not be logged: the job is about to end."""
        self.away_notice: str | None = None
        """Said while the store is away."""
        self.policy: Policy | None = policy_from(config)
        self.policy_said: str | None = None
        self.asking = 0
        """Nodes that the policy asked for: without an answer, or refused and not to be asked for again yet."""
        self.ask_again_at = math.inf
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
                event = Tick(self.clock())
            if event.now - beat > HEARTBEAT_S:
                beat = event.now
                self.heartbeat()
            self.handle(event)
            if event.now - considered > POLICY_S:
                considered = event.now
                self._look_for_hot(event.now)
                if self.policy is not None:
                    self._consider(self.policy, event.now)

    def _look_for_hot(self, now: float) -> None:
        """Slices that are too hot for one container: their owners are asked for the keys, as long as they are."""
        assert self.controller is not None and self.metrics is not None
        if self.controller.phase != "running" or not (self.controller.load.rates or self.controller.hot):
            return
        hot = self.metrics.find_hot(self.controller, now)
        if hot != self.controller.hot:
            self.post(HotSlices(now, hot))

    def _consider(self, policy: Policy, now: float) -> None:
        """Ask the policy, and do what it says as though somebody had asked for it."""
        assert self.controller is not None and self.metrics is not None
        if self.controller.phase != "running":
            return
        status = self.status()
        controller = self.controller
        owners = {str(stage): slices for stage, slices in controller.routing.owners.items()}
        load: dict[tuple[str, int], float] = {}
        for stage_id in controller.routing.owners:
            for number, rate in enumerate(controller.load.of(stage_id, controller.routing.slices) or ()):
                load[stage_id, number] = rate
        if self.ask_again_at < math.inf:
            self._say_once(
                "the cluster manager did not take a policy's request for more nodes; it is asked again "
                f"{REFUSED_S:g} s later. See that it can grant them, or lower nodes_max."
            )
        if now >= self.ask_again_at:
            self.asking, self.ask_again_at = 0, math.inf
        seen = Observation.of(
            status,
            now,
            edges=tuple(dict.fromkeys((str(up), str(s.id)) for s in controller.topology.stages for up in s.ins)),
            owners=owners,
            homes=dict(controller.routing.homes),
            coming=controller.invited + self.asking,
            busy_containers=self.metrics.busy_containers(status),
            load=load,
            slots=controller.slots(),
            usable={s: [p.container for p in controller.peers(StageId(s))] for s in owners},
        )
        try:
            decision = policy.decide(seen)
        except Exception as error:  # it may be anybody's: the job goes on as it is
            at = traceback.extract_tb(error.__traceback__)[-1]
            self.policy_said = f"{policy.name}: failed with {type(error).__name__}: {error} ({at.filename}:{at.lineno})"
            self._say_once(f"policy {self.policy_said}. The job keeps its size meanwhile: mend the policy.")
            return
        dry, acts = self.config.policy_dry_run, decision.kind != "nothing"
        self.policy_said = f"{policy.name}{' (dry run)' * dry}: {'would ' * (dry and acts)}{decision}"
        if not acts:
            return
        self.notices = [*self.notices[-NOTICES_MAX:], f"policy {self.policy_said}"]
        if dry:
            return
        if decision.kind == "scale_out":
            self._ask_for_nodes(decision.nodes, now)
        if decision.kind == "scale_in":
            staying = [n for n in status.nodes if n["state"] != "leaving"]
            fewest = sorted(staying, key=lambda n: (n["slices"], -len(n["name"]), n["name"]))  # the least to move
            names = decision.which or tuple(n["name"] for n in fewest[: decision.nodes])
            self.post(LeaveRequested(now, names))
        # Slices of a stage without state follow its containers: there is nothing to move.
        if decision.moves and decision.stage is not None and controller.topology[StageId(decision.stage)].stateful:
            self._move(StageId(decision.stage), {m.slice: m.target for m in decision.moves}, decision.reason, now)
            return
        for stage, instances in decision.instances.items():
            self.post(RescaleRequested(now, StageId(stage), instances))

    def _ask_for_nodes(self, count: int, now: float) -> None:
        """As ``job.scale_out`` does, but on a thread of its own: a cluster manager that is away answers in minutes."""
        request = getattr(self.engine, "request_nodes", None)
        master = self.config.master
        self.asking = count
        if request is None or master == "local" or master.startswith("local["):
            self._say_once(
                "this job runs in one process: there are no nodes that a policy could add. Run it on a cluster, or "
                "leave nodes_max out."
            )
            return

        def ask() -> None:
            try:
                taken = request(count)
            except Exception:  # Spark is going: so is the job
                taken = False
            if taken:
                self.post(NodesInvited(self.clock(), count))
                self.asking = 0
            else:
                self.ask_again_at = now + REFUSED_S

        threading.Thread(target=ask, name="penstock-nodes", daemon=True).start()

    def _say_once(self, text: str) -> None:
        if text not in self.notices:
            self.notices = [*self.notices[-NOTICES_MAX:], text]

    def _move(self, stage: StageId, targets: dict[int, int], reason: str, now: float) -> None:
        """Exactly these slices, neighbour to neighbour. A container beyond the last one is made for it; one that is
        emptied goes, or if it is not the last it stays there, vacant, until it is needed again.
        """
        assert self.controller is not None
        routing = self.controller.routing
        room = max(targets.get(s, c) for s, c in enumerate(routing.owners[stage])) + 1
        have = routing.instances[stage]
        if room > have or (room < have and not self.controller.cores):
            self.post(RescaleRequested(now, stage, room, targets))
        else:
            self.post(MoveRequested(now, stage, targets, reason))

    def handle(self, event: Event) -> None:
        """One event: what it means, and what is to be done about it."""
        assert self.controller is not None
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
            {s.id: ("source" if s.source else "keyed", s.operators) for s in self.plan.stages},
        )
        self.engine.start(self.post)
        self.metrics.began = self.clock()
        self.job_id = job_id
        logged = self._read_log(manifest.epoch if manifest else 0)
        self._check_sources({s for record in logged for s in record["ranges"]})
        topology = topology_of(self.plan)
        instances = self.config.instances or self.engine.cores
        routing = RoutingTable.initial(self.config.slices, topology.keyed(), instances, self.plan.own_instances)
        restored = None
        for record in logged:
            if record.get("routing"):  # the flow or the settings may be others than when it was written
                record["routing"] = self._fit_routing(record["routing"], routing).to_json()
        if manifest is not None:
            restored = self._fit(manifest, routing)
            self.metrics.counted_through = manifest.epoch
        c = self.config
        self.controller = Controller(
            topology,
            routing,
            Pacer.start(c.epoch_rows, c.epoch_rows_min, c.epoch_rows_max, c.target_latency_ms),
            Settings(
                c.epochs_in_flight,
                c.checkpoint_interval_s,
                # A window by the clock is over when the clock says so, rows or not.
                min(c.idle_epoch_s, CLOCKED_EPOCH_S) if any(s.clocked for s in topology.stages) else c.idle_epoch_s,
                c.poll_ms / 1000,
                c.deltas_max,
                c.epochs_max,
                c.store_away_epochs,
                c.backups,
                c.placement,
                not self.baseline.stop_and_copy,
                c.move_timeout_s,
                c.instances is None,
                self.baseline.full_snapshots,
                c.schedule,
            ),
            Manifest(job_id, self.plan.graph.name, self.plan.fingerprint(), 0),
        )
        facts: dict[str, list[Any]] = {s: list(v["facts"]) for s, v in (restored.sources if restored else {}).items()}
        for record in logged:
            for source, r in record["ranges"].items():
                facts.setdefault(source, []).extend(r["facts"])
        for id, source in self.plan.sources.items():
            store = self.store if self.checkpoint_url is not None else None
            source.open(SourceContext(id, self.checkpoint_url, self.engine.spark, store))
            source.remember(facts.get(id, []))
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
            facts={"job": job_id, "flow": self.plan.graph.name, "engine": self.engine.name},
        )
        self.post(Started(self.clock(), restored, tuple(logged), self.first_attempt, self.engine.nodes()))

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
        routing = self._fit_routing(manifest.routing, fresh)
        return replace(manifest, routing=routing.to_json(), fingerprint=self.plan.fingerprint())

    def _fit_routing(self, logged: dict[str, Any], fresh: RoutingTable) -> RoutingTable:
        routing = RoutingTable.from_json(logged)
        notice = f"the state has {routing.slices} slices, set at its first run; slices={self.config.slices} is ignored."
        if routing.slices != self.config.slices and notice not in self.notices:
            self.notices.append(notice)
        stages = {s.id for s in self.plan.stages}
        fresh = RoutingTable.initial(
            routing.slices,
            topology_of(self.plan).keyed(),
            self.config.instances or max(fresh.instances.values()),
            self.plan.own_instances,
        )
        routing = RoutingTable(
            routing.version,
            routing.slices,
            {s: routing.owners.get(s, fresh.owners[s]) for s in fresh.owners},
            {s: routing.instances.get(s, fresh.instances[s]) for s in fresh.instances},
        )
        if self.config.instances is not None:
            for stage in stages - self.plan.own_instances.keys():
                wanted = (
                    min(self.config.instances, routing.slices) if stage in routing.owners else self.config.instances
                )
                if routing.instances[stage] != wanted:
                    routing = routing.rescale(stage, wanted)
        return routing

    def _read_log(self, after: int) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = []
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
            data = self.store.get(name)
            checksum, _, body = data.partition(b"\n")
            if xxhash.xxh3_64_hexdigest(body).encode() != checksum:
                raise CorruptData(
                    f"the epoch log {name} does not match its checksum.",
                    remedy="Restore it from a copy: without it the epochs after the checkpoint cannot be repeated.",
                    path=name,
                )
            records.append(json.loads(body))
        return records

    # -- commands ------------------------------------------------------------------------------------------------

    def _execute(self, command: Command) -> None:
        assert self.engine is not None and self.controller is not None
        match command:
            case PlanEpoch():
                self._submit(self.planner, self._plan_epoch, command)
            case LogEpoch():
                for source, r in command.record["ranges"].items():
                    self.ranges[command.epoch, source] = r
                self._submit(self.logger, self._log_epoch, command)
            case RunStage():
                self._run_stage(command)
            case PublishEpoch():
                self._submit(self.publisher, self._publish, command)
            case Flush():
                self.engine.flush(command, self._routing(command.routing))
            case WriteManifest():
                self._submit(self.publisher, self._write_manifest, command)
            case WarmUp():
                self.engine.warm_up(command)
            case Compact():
                self.engine.compact(command, lambda merging: self._compact(command, merging))
            case ReleaseEpoch():
                self.engine.release(command.epoch)
                self.ranges = {k: v for k, v in self.ranges.items() if k[0] >= command.epoch - 64}
            case CollectGarbage():
                self._submit(self.publisher, self._collect_garbage, command)
            case CancelAll():
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
                self.post(Fatal(self.clock(), task_error(error)))
            except Exception as error:
                what = type(command).__name__
                self.post(
                    Fatal(
                        self.clock(),
                        TaskError(
                            "EngineError",
                            f"{what} failed: {type(error).__name__}: {error}.",
                            "The checkpoint is whole: start again once the cause is gone.",
                            {"trace": traceback.format_exc()},
                        ),
                    )
                )

        pool.submit(guarded)

    def _routing(self, version: int) -> RoutingTable:
        assert self.controller is not None
        return self.controller.routings[version]

    def _run_stage(self, command: RunStage) -> None:
        assert self.engine is not None and self.controller is not None
        routing = self._routing(command.routing)
        stage = self.plan.by_id[command.stage]
        splits: list[dict[str, Any]] = []
        if stage.source is not None and command.range is not None:
            r = command.range
            try:
                splits = stage.source.splits(r["start"], r["end"], len(command.containers))
            except PenstockError as error:
                self.post(Fatal(self.clock(), task_error(error)))
                return
        self.engine.run_stage(command, routing, splits)

    def _plan_epoch(self, command: PlanEpoch) -> None:
        ranges: dict[str, dict[str, Any]] = {}
        exhausted = []
        sources = self.plan.sources
        share = max(1, command.rows_max // len(sources))
        for id, source in sources.items():
            start = command.offsets.get(id) or source.initial_offset()
            try:
                found: SourceRange | None = source.plan(start, share)
            except PenstockError:
                raise
            except Exception as error:
                raise SourceError(
                    f"source '{id}' could not say what comes next: {type(error).__name__}: {error}.",
                    remedy="Check that it can be reached; start again with the same checkpoint.",
                    source=id,
                ) from error
            if found is not None:
                ranges[id] = {
                    "start": found.start,
                    "end": found.end,
                    "rows": found.rows_estimate,
                    "facts": list(found.facts),
                }
            if source.exhausted(found.end if found is not None else start):
                exhausted.append(id)
        now = self.clock()
        if not ranges and not command.even_if_empty:
            self.post(NothingNew(now, command.epoch, len(exhausted) == len(sources)))
            return
        assert self.metrics is not None
        self.metrics.planned(command.epoch, now)
        self.post(EpochPlanned(now, command.epoch, ranges, tuple(exhausted), self.wall_ms()))

    def _log_epoch(self, command: LogEpoch) -> None:
        if self.log_ended:
            return
        self.log_ended = True  # unless this one gets there, those after it must not: the log would have a hole
        self.trip("before-log")
        body = json.dumps(command.record).encode()
        checksum = xxhash.xxh3_64_hexdigest(body).encode()
        name, data = LOG_NAME.format(command.epoch), checksum + b"\n" + body
        # Created, never replaced: of two drivers that each believe the directory theirs, one gets no further than here.
        if not self.store.put_if_absent(name, data) and self.store.get(name) != data:
            raise CheckpointInUse(
                f"epoch {command.epoch} was logged by another start of this job.",
                remedy="See that only one is running, and start it again: it takes up what was logged.",
                path=name,
            )
        self.log_ended = False
        self.trip("after-log")
        self.post(EpochLogged(self.clock(), command.epoch, command.attempt))

    def _publish(self, command: PublishEpoch) -> None:
        self.trip("before-publish")
        for id, node in self.plan.sinks.items():
            sink = node.sink
            assert sink is not None
            try:
                if sink.collects:
                    frames = [bytes_frame(b) for b in command.tables.get(id, [])]
                    if frames:
                        sink.write(command.epoch, pl.concat(frames))
                elif command.parts.get(id):
                    sink.commit(command.epoch, command.attempt, command.parts[id])
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
        self._publish_dead_letters(command)
        self.trip("after-publish")
        self.post(EpochPublished(self.clock(), command.epoch, command.attempt))
        for callback in self.on_published:
            callback(command.epoch)

    def _publish_dead_letters(self, command: PublishEpoch) -> None:
        sink = self.plan.graph.dead_letters
        tables = command.tables.get(DEAD_LETTERS, [])
        if sink is None:
            if tables:
                frame = pl.concat([bytes_frame(b) for b in tables])
                self.store.put(f"dead-letters/{command.epoch:012d}.jsonl", encode_rows("jsonl", frame))
        elif sink.collects:
            if tables:
                sink.write(command.epoch, pl.concat([bytes_frame(b) for b in tables]))
        elif command.parts.get(DEAD_LETTERS):
            sink.commit(command.epoch, command.attempt, command.parts[DEAD_LETTERS])

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def _write_manifest(self, command: WriteManifest) -> None:
        manifest = command.manifest
        self.trip("before-manifest")
        self.store.put(MANIFEST_NAME.format(command.epoch), manifest.to_bytes())
        self.trip("after-manifest")
        assert self.metrics is not None
        self.metrics.checkpoints += 1
        self.metrics.checkpoint_bytes = sum(f.bytes for fs in manifest.files.values() for f in fs)
        self.post(ManifestWritten(self.clock(), command.epoch, command.attempt))

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
        merge = Merge(task, tuple(layout.key.names()), meta, name, self.controller.routing.slices)
        try:
            out = merging(self.store, merge)
            self.trip("after-compact")
        except (PenstockError, OSError) as error:
            return Compacted(self.clock(), stage, task, None, str(error))
        return Compacted(self.clock(), stage, task, out)

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
        current = self.controller.manifest.names()
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
        self.post(StoreChanged(self.clock(), away))

    # -- what is seen ----------------------------------------------------------------------------------------------

    def _observe(self, event: Event) -> None:
        assert self.metrics is not None and self.controller is not None
        match event:
            case StageDone() if event.attempt == self.controller.attempt:
                self.metrics.stage_done(event.stage, event.epoch, event.reports, event.now)
                for report in event.reports:
                    for sizes in report.bytes_out.values():
                        self.metrics.exchanged(event.stage, *self._crossing(report.node, sizes))
            case EpochPublished():
                run = self.controller.in_flight.get(event.epoch)
                rows = sum(r.rows_in for s in self.plan.sources for r in run.done.get(StageId(s), ())) if run else 0
                self.metrics.published(event.epoch, rows, event.now, self.controller.routing.instances)

    def _crossing(self, node: str, sizes: list[int]) -> tuple[int, int]:
        """Bytes for containers on the same node, and bytes that leave it."""
        assert self.controller is not None
        homes = self.controller.routing.homes
        local = sum(b for c, b in enumerate(sizes) if homes.get(c) == node)
        return local, sum(sizes) - local

    def status(self) -> JobStatus:
        if self.controller is None or self.metrics is None:
            phase = "failed" if self.error else "starting"
            error = str(self.error) if self.error else None
            return JobStatus(self.config.name or self.plan.graph.name, self.plan.graph.name, "", phase, error=error)
        now = self.clock()
        status = replace(
            self.metrics.status(self.controller, now),
            nodes=cluster.nodes(self.controller),
            moves=cluster.moves(self.controller, now),
            backups=cluster.backups(self.controller),
            policy=self.policy_said or (self.policy.name if self.policy is not None else None),
        )
        if self.error is not None:
            return replace(status, phase="failed", error=str(self.error))
        return replace(status, phase=self.reason) if self.reason else status


def raised(error: TaskError) -> PenstockError:
    """The same error that a task met, as an exception of the same class."""
    kind = getattr(errors, error.kind, errors.EngineError)
    return kind(error.message, remedy=error.remedy, **error.evidence)  # type: ignore[no-any-return]
