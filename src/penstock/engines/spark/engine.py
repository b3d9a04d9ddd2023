"""The Spark engine: a (stage, epoch) is one Spark job.

A source stage, and every keyed stage that feeds another, runs up to its shuffle files and no further; a last stage
runs as an ordinary job. Control records come back with the tasks' results. Shuffle partitions are numbered over the
containers of *all* keyed stages, so that every shuffle of a job has the same partitioner, and the inputs of a stage
with several upstream stages are united partition by partition.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import cloudpickle
import msgspec

from penstock.config import Config
from penstock.control.events import (
    Compact,
    Event,
    Fatal,
    Flush,
    Flushed,
    NodesChanged,
    RunStage,
    StageDone,
    StageFailed,
    Stuck,
    WarmedUp,
    WarmUp,
)
from penstock.control.records import NodeInfo, TaskError, TaskReport
from penstock.control.routing import RoutingTable
from penstock.engines.local import flush_specs, task_specs
from penstock.engines.merging import MergeAside, Merging
from penstock.engines.protocol import Post
from penstock.engines.spark import private, security, slots
from penstock.engines.spark.session import check_executors, is_local, open_session, ship_package, single_machine
from penstock.engines.spark.worker import SLOT, JobSpec, KeepSettings, ReportsParam, SlotTask
from penstock.engines.task import Worker
from penstock.errors import EngineError, FlowError
from penstock.ids import Attempt, Epoch, StageId
from penstock.plan import Plan, Stage
from penstock.state.store import Store

DRIVER = "driver"
"""The one node of local mode."""
EXECUTORS_WAIT_S = 60.0
WATCH_S = 0.05
START_S = 120.0
"""A process that is being started counts as hung only after this time."""
GRANT_S = 30.0
"""The user is told of executors that were asked for and have not come within this time. They may still come."""
QUIET_S = 10.0
"""At the end, jobs of attempts that were given up are cancelled again and again for this time at most."""
PLACEMENTS_MAX = 256
"""Placement RDDs that are remembered. A job that changes its shape makes new ones."""
LOSS_NOTICED_S = 0.5
"""A task may fail this long before Spark notices that the executor it failed on, or read from, is dead."""
ONE_THREAD = {
    name: "1"
    for name in (
        "POLARS_MAX_THREADS",
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "MKL_NUM_THREADS",
        "ARROW_NUM_THREADS",
    )
}
KEEP_MEMORY = {
    # Every epoch needs about the memory of the one before. To give it back in between costs a page fault for each page.
    "_RJEM_MALLOC_CONF": "dirty_decay_ms:1000,muzzy_decay_ms:1000",
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
    "MALLOC_MMAP_THRESHOLD_": str(64 << 20),
    "MALLOC_TOP_PAD_": str(4 << 20),
}
_decode_report = msgspec.msgpack.Decoder(TaskReport).decode


@dataclass(frozen=True)
class Output:
    """The shuffle output of a stage in one epoch."""

    shuffled: Any
    shuffle_id: int
    tasks: int


@dataclass
class Running:
    """A Spark job that is running."""

    began: float
    slots: dict[int, str]
    """container -> node"""


@dataclass
class Asked:
    """A request for executors."""

    before: frozenset[str]
    more: int
    at: float
    told: bool = False


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Classes of the user's flow file are pickled by value. What msgspec caches on a dataclass cannot be pickled, and
    is removed: msgspec makes it again."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) and "__msgspec_cache__" in vars(obj):
            del obj.__msgspec_cache__  # type: ignore[attr-defined]
        return super().reducer_override(obj)


def _sounds_like_loss(reason: str) -> bool:
    return any(
        word in reason.lower() for word in ("fetch", "connect", "executor", "shuffle", "lost", "control records")
    )


def _first_executors(master: str, cores_max: str | None) -> int:
    """How many executors the start waits for: all of a ``local-cluster``, one of any other cluster."""
    if not master.startswith("local-cluster"):
        return 1
    workers, cores, _ = (int(part) for part in master.partition("[")[2].rstrip("]").split(","))
    return workers if cores_max is None else max(1, min(workers, int(cores_max) // cores))


def _jvm_lost(said: str) -> EngineError:
    return EngineError(
        f"{said}, and the job with it.",
        remedy="Start the job again: it goes on from its checkpoint. If nobody killed the JVM, the machine may have "
        "had no memory left, or the JVM too little (spark.driver.memory).",
    )


def pickle_plan(plan: Plan, worker: type[Worker] = Worker) -> bytes:
    """The plan, and the class of the workers that run it."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump((plan, worker))
    return buffer.getvalue()


class SparkEngine:
    name = "spark"

    def __init__(
        self, plan: Plan, job_id: str, store: Store, on_error: str, config: Config, worker: type[Worker] = Worker
    ) -> None:
        self.plan = plan
        self.worker = worker
        self.job_id = job_id
        self.store = store
        self.on_error = on_error
        self.config = config
        self.run_id = uuid.uuid4().hex
        self.notices: list[str] = []
        self.session: Any = None
        self.owned = False
        self.jvm: private.Jvm
        self.executors: dict[str, tuple[str, int]] = {}
        """node -> host and cores; none in local mode"""
        self.going: set[str] = set()
        """Executors that are about to go: they were given back, or are being decommissioned."""
        self.wanted: int | None = None
        """The number of executors that Spark was last asked for. None: as many as it gives."""
        self.asked: Asked | None = None
        self.jobs: dict[tuple[int, str, int], Running] = {}
        self.seen: set[tuple[str, int, str]] = set()
        """Slots that have answered: stage, container, node."""
        self.over = threading.Event()
        self.watcher: threading.Thread | None = None
        self.attempt = -1
        self.slots: dict[tuple[str, int, str], Any] = {}
        self.placements: dict[tuple[int, tuple[str | None, ...]], Any] = {}
        self.warming: dict[StageId, Future[None]] = {}
        self.source_tasks: dict[tuple[str, tuple[tuple[int, str], ...]], Any] = {}
        self.outputs: dict[tuple[int, str], Output] = {}
        self.group = f"penstock-{self.run_id}"
        self.under_way: Counter[Attempt] = Counter()
        """attempt -> the number of its jobs that have not ended"""
        self.cancelled = Attempt(0)
        """Attempts before this one are over."""
        self.pool = ThreadPoolExecutor(16, thread_name_prefix="penstock-job")
        self.merge_aside = MergeAside()
        self.lock = threading.Lock()
        self.looking = threading.Lock()
        self.asking = threading.Lock()
        """A lock of its own, for a cluster manager may take long to answer."""
        self.keep = KeepSettings(config.backup_memory_mb << 20, config.move_mb_s * 1e6)
        self.reports: list[bytes] = []
        self.misses = 0
        self.post: Post = lambda event: None

    # -- life ------------------------------------------------------------------------------------------------------

    @property
    def spark(self) -> Any:
        return self.session

    @property
    def cores(self) -> int:
        return max(1, int(self.session.sparkContext.defaultParallelism))

    def start(self, post: Post) -> None:
        self.post = post
        self.session, self.owned, self.notices = open_session(self.config, self.config.name or self.plan.graph.name)
        sc = self.session.sparkContext
        self.jvm = private.Jvm(sc)
        private.quieten(sc)
        master = sc.master
        if not is_local(master):
            self._await_executors(master)
            ship_package(sc)
            check_executors(sc, len(self.jvm.executor_ids()))
        try:
            pickled = pickle_plan(self.plan, self.worker)
        except Exception as error:
            raise FlowError(
                f"the flow cannot be sent to Spark's workers: {type(error).__name__}: {error}.",
                remedy="A function of the flow refers to something that cannot be pickled (an open file, a connection, "
                "a lock); make it inside the function instead.",
            ) from error
        self.plan_broadcast = sc.broadcast(pickled)
        self.accumulator = sc.accumulator([], ReportsParam())
        self.env = {**ONE_THREAD, **KEEP_MEMORY}
        if single_machine(master):
            # Workers on this machine can import what the driver can import.
            self.env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p and os.path.exists(p))
            # The JVM's own is stricter, and the output that workers write is the user's.
            self.env[slots.UMASK] = f"{security.umask():o}"
        self.executors = self.jvm.executors()
        self.watcher = threading.Thread(target=self._watch, name="penstock-watch", daemon=True)
        self.watcher.start()

    def _await_executors(self, master: str) -> None:
        wanted = _first_executors(master, self.session.sparkContext.getConf().get("spark.cores.max"))
        limit = time.monotonic() + EXECUTORS_WAIT_S
        settled = threading.Event()
        while time.monotonic() < limit:
            if len(self.jvm.executors()) >= wanted:
                return
            settled.wait(0.1)
        raise EngineError(
            f"no executor came up on {master} within {EXECUTORS_WAIT_S:.0f} s.",
            remedy="Check that the master has workers with free cores and memory that can reach this machine.",
        )

    def stop(self) -> None:
        self.over.set()
        if self.watcher is not None:
            self.watcher.join()
        self.merge_aside.close()
        self.pool.shutdown(wait=False, cancel_futures=True)
        limit = time.monotonic() + QUIET_S
        gone = self.session is not None and private.jvm_lost()
        with contextlib.suppress(Exception):  # Spark is gone, and its jobs with it
            while not gone and self._cancel_old() and time.monotonic() < limit:
                time.sleep(WATCH_S)  # the watcher is gone, and a job may just be on its way
        self.pool.shutdown(wait=True)
        if gone:
            private.forget_jvm()
        elif self.session is not None and self.owned:
            self.session.stop()
        elif self.session is not None:
            self._end_slots()

    def lost(self) -> EngineError | None:
        """Why nothing works any more: Spark's JVM is gone. None: it is there."""
        said = private.jvm_lost() if self.session is not None else ""
        return _jvm_lost(said) if said else None

    def _end_slots(self) -> None:
        """End the processes of the containers, for the session is the user's and goes on."""
        try:
            self.jvm.job_group(f"{self.group}-end", "end", msgspec.json.encode(JobSpec("end", {}, {})).decode())
            self._run_alone([key for key in self.slots if key[2] == DRIVER or key[2] in self.executors])
        except Exception as error:  # without work they end by themselves after three minutes
            self.notices.append(f"ending the containers' processes failed: {private.short_reason(error)}")

    # -- nodes -----------------------------------------------------------------------------------------------------

    def nodes(self) -> tuple[NodeInfo, ...]:
        if not self.executors:
            return (NodeInfo(DRIVER, cores=self.cores),)
        return tuple(
            NodeInfo(node, host, self.config.zones.get(host, host), cores)
            for node, (host, cores) in sorted(self.executors.items(), key=lambda e: (len(e[0]), e[0]))
        )

    def request_nodes(self, more: int) -> bool:
        """Ask Spark for more executors. Those that it cannot grant now come when there is room."""
        if self._by_load():
            self.notices.append("Spark decides itself how many executors there are (spark.dynamicAllocation.enabled)")
            return False
        with self.asking:
            have = frozenset(self.executors)
            wanted = (len(have) if self.wanted is None else max(self.wanted, len(have))) + more
            try:
                taken = self.jvm.want_executors(wanted)
            except Exception as error:
                self.notices.append(f"Spark was not asked for more executors: {private.short_reason(error)}")
                return False
            if taken:
                self.wanted = wanted
                waiting = self.asked.more if self.asked is not None else 0
                before = self.asked.before if self.asked is not None else have
                self.asked = Asked(before, waiting + more, time.monotonic())
            return taken

    def _by_load(self) -> bool:
        conf = self.session.sparkContext.getConf()
        return bool(conf.get("spark.dynamicAllocation.enabled", "false").lower() == "true")

    def release_nodes(self, nodes: Sequence[str]) -> None:
        self.pool.submit(self._release, list(nodes))

    def _release(self, nodes: list[str]) -> None:
        """Give executors back. Earlier requests for more that were not granted are taken back, too."""
        with self.asking:
            have = self.executors
            known = [n for n in nodes if n in have]
            try:
                taken = not known or self.jvm.release_executors(known, len(have))
                reason = "it did not take the request"
            except Exception as error:
                taken, reason = False, private.short_reason(error)
            if not taken:
                self.notices.append(f"executor {', '.join(known)} could not be given back to Spark: {reason}")
                return
            self.wanted, self.asked = len(have) - len(known), None
        with self.looking:
            self.going |= set(known)

    def _watch(self) -> None:
        """Look for executors that are lost or new, and for tasks that hang."""
        while not self.over.wait(WATCH_S):
            if said := private.jvm_end():
                error = _jvm_lost(said)
                task_error = TaskError(kind="EngineError", message=error.message, remedy=error.remedy)
                self.post(Fatal(now=time.monotonic(), error=task_error))
                return
            try:
                if self.executors or not is_local(self.session.sparkContext.master):
                    self._look()
                    self._look_for_asked()
                self._cancel_old()
                self._look_for_hung()
            except Exception as error:  # Spark is ending, or is gone and the next stage says so
                if not self.over.is_set():
                    self.notices.append(f"watching executors failed: {private.short_reason(error)}")
                    return

    def _look(self) -> bool:
        """Post an event if executors came or went. Returns whether any did."""
        with self.looking:
            there = self.jvm.executor_ids()
            self.going &= there
            reason = ""
            if self.jvm.decommissioning() and (marked := self.jvm.unwilling() - self.going):
                # Spark runs nothing more there, not even a handover, so these executors count as lost at once.
                self.going |= marked
                reason = "decommissioned"
            if there - self.going == self.executors.keys():
                return False
            # To list executors takes 0.1 s. It is not needed if executors have only gone.
            known = self.executors if there - self.going <= self.executors.keys() else self.jvm.executors()
            found = {name: known[name] for name in known if name in there and name not in self.going}
            if found.keys() == self.executors.keys():
                return False  # Spark does not know everything yet of one that is new
            self.executors = found
            self.post(NodesChanged(now=time.monotonic(), nodes=self.nodes() if found else (), reason=reason))
            return True

    def _look_for_asked(self) -> None:
        """Tell the user, once, of executors that were asked for and did not come."""
        asked = self.asked
        if asked is None:
            return
        came = len(self.executors.keys() - asked.before)
        if came >= asked.more:
            self.asked = None
        elif not asked.told and time.monotonic() - asked.at > GRANT_S:
            asked.told = True
            self.notices.append(
                f"{came} of {asked.more} executors that were asked for came within {GRANT_S:.0f} s. The job goes on; "
                "the others are taken as soon as Spark grants them (free cores and memory on its workers, "
                "spark.cores.max)."
            )

    def _look_for_hung(self) -> None:
        if not self.config.hang_s:
            return
        now = time.monotonic()
        with self.lock:
            old = [(key, job) for key, job in self.jobs.items() if now - job.began > self.config.hang_s]
        for (epoch, stage, attempt), job in old:
            silent = set(job.slots) - self._reported(stage, epoch, attempt)
            if any((stage, i, job.slots[i]) not in self.seen for i in silent) and now - job.began < START_S:
                continue  # a process that is being started
            job.began = now  # said once; again if it goes on
            for index in sorted(silent):
                self.notices.append(
                    f"{self._container(stage, index, job.slots[index])} has been at epoch {epoch} for more than "
                    f"{self.config.hang_s:g} s: a function that does not return? Its slices go to others (hang_s)."
                )
            event = Stuck(
                now=now,
                stage=StageId(stage),
                epoch=Epoch(epoch),
                attempt=Attempt(attempt),
                containers=tuple(sorted(silent)),
                seconds=self.config.hang_s,
            )
            self.post(event)

    # -- placement -------------------------------------------------------------------------------------------------

    def _node(self, homes: Mapping[int, str], index: int) -> str:
        """The node of container ``index``. Splits of a source beyond its containers are dealt out in turn."""
        home = homes.get(index)
        if home is None or home not in self.executors:
            nodes = sorted(set(homes.values()) & self.executors.keys()) or sorted(self.executors)
            return nodes[index % len(nodes)] if nodes else DRIVER
        return home

    def _location(self, node: str) -> str | None:
        host = self.executors.get(node)
        return f"executor_{host[0]}_{node}" if host is not None else None

    def _slot(self, stage: str, index: int, node: str) -> Any:
        """The Python function of a slot. It has an environment of its own, and so a worker process of its own."""
        key = (stage, index, node)
        with self.lock:
            found = self.slots.get(key)
        if found is None:
            task = SlotTask(
                self.run_id,
                self.job_id,
                stage,
                index,
                node,
                self.plan_broadcast,
                self.store,
                self.accumulator,
                self.keep,
            )
            # A container must find its own process again. Tasks of sources keep no state, so any idle worker would do.
            # But a process of their own outlives a job that fails, and starting another takes longer than recovering.
            dedicated = self.plan.by_id[StageId(stage)].stateful or bool(self.executors)
            slot = f"{self.run_id}:{stage}:{index}" if dedicated else self.run_id
            env = {**self.env, SLOT: slot}
            found = self.jvm.function(task, env)
            with self.lock:
                self.slots[key] = found
        return found

    def _placed(self, elements: int, nodes: Sequence[str]) -> Any:
        key = (elements, tuple(self._location(node) for node in nodes))
        with self.lock:
            found = self.placements.get(key)
        if found is None:
            found = self.jvm.placed(*key)
            with self.lock:
                if len(self.placements) >= PLACEMENTS_MAX:
                    self.placements.clear()
                self.placements[key] = found
        return found

    # -- commands --------------------------------------------------------------------------------------------------

    def run_stage(self, command: RunStage, splits: list[dict[str, Any]]) -> None:
        self.pool.submit(self._guard, command.epoch, command.stage, command.attempt, self._run, command, splits)

    def flush(self, command: Flush) -> None:
        self.pool.submit(self._guard, command.epoch, StageId("flush"), command.attempt, self._flush, command)

    def prepare(self, routing: RoutingTable) -> None:
        """Start the Python workers of all stages at once, rather than one stage after another in the first epoch."""
        for stage in self.plan.stages:
            containers = range(routing.instances[stage.id])
            self.warming[stage.id] = self.pool.submit(self._warm, stage.id, containers, routing.homes_of(stage.id))

    def warm_up(self, command: WarmUp) -> None:
        def work() -> None:
            self._warm(command.stage, command.containers, command.homes)
            self.post(WarmedUp(now=time.monotonic(), stage=command.stage, containers=command.containers))

        self.pool.submit(work)

    def _warm(self, stage: StageId, containers: Iterable[int], homes: Mapping[int, str]) -> None:
        try:
            # In a job group of its own, which a recovery does not cancel: processes are needed after it, too.
            self.jvm.job_group(f"{self.group}-warm", "warm-up", msgspec.json.encode(JobSpec("warm", {}, {})).decode())
            self._run_alone([(stage, i, self._node(homes, i)) for i in containers])
        except Exception as error:
            self.notices.append(f"starting the workers of '{stage}' ahead failed: {private.short_reason(error)}")

    def _alone(self, stage: str, index: int, node: str) -> Any:
        """A task of a slot that gets no input."""
        return self.jvm.python(self._placed(1, [node]), self._slot(stage, index, node))

    def _run_alone(self, slots: Iterable[tuple[str, int, str]]) -> None:
        """Run tasks that nobody cancels: one job for each node, all at once. In one job for all nodes, the tasks for a
        node that is lost would wait for it as long as another node lives.
        """
        by_node: dict[str, list[Any]] = {}
        for stage, index, node in slots:
            by_node.setdefault(node, []).append(self._alone(stage, index, node))
        for job in [self.jvm.union(tasks).countAsync() for tasks in by_node.values()]:
            job.get()

    def compact(self, command: Compact, run: Callable[[Merging], Event]) -> None:
        self.pool.submit(lambda: self.post(run(self.merge_aside)))

    def cancel(self, attempt: Attempt) -> None:
        self.cancelled = attempt
        self._cancel_old()

    def _cancel_old(self) -> bool:
        """Cancel the jobs of older attempts. Returns whether there were any. To be called until there are none: a job
        that is just being submitted cannot be cancelled yet. If it ran on, its tasks for an executor that is gone would
        wait until ``spark.locality.wait`` is over, and the recovery with them.
        """
        with self.lock:
            old = [attempt for attempt, jobs in self.under_way.items() if jobs and attempt < self.cancelled]
        for attempt in old:
            self.session.sparkContext.cancelJobGroup(self._group(attempt))
        return bool(old)

    def _group(self, attempt: Attempt) -> str:
        """The group of an attempt's jobs."""
        return f"{self.group}-{attempt}"

    def release(self, epoch: int) -> None:
        with self.lock:
            old = [k for k in self.outputs if k[0] <= epoch]
            gone = [self.outputs.pop(k) for k in old]
        for output in gone:
            self.pool.submit(self.jvm.forget_shuffle, output.shuffle_id)

    def _guard(self, epoch: Epoch, stage: StageId, attempt: Attempt, work: Callable[..., Event], *args: Any) -> None:
        """Post exactly one event for each command, whatever happens."""
        with self.lock:
            self.under_way[attempt] += 1
        try:
            if attempt < self.cancelled:
                raise EngineError("cancelled before it began")
            event = work(*args)
        except Exception as error:
            reason = private.short_reason(error)
            self._look_again(reason)  # who decides what to do next should know who is there
            reason = self._process_ended(error, epoch, stage, attempt) or reason
            event = StageFailed(
                now=time.monotonic(),
                epoch=epoch,
                stage=stage,
                attempt=attempt,
                reason=reason,
                node=private.failed_on(error),
            )
        with self.lock:
            self.jobs.pop((epoch, stage, attempt), None)
            self.under_way[attempt] -= 1
        self.post(event)

    def _container(self, stage: str, index: int, node: str) -> str:
        """A container as users know it: by its stage, and the operators that run in it."""
        operators = ", ".join(f"'{name}'" for name in self.plan.by_id[StageId(stage)].operators)
        return f"container {index} of stage '{stage}' (operators {operators}) on node {node}"

    def _process_ended(self, error: Exception, epoch: int, stage: str, attempt: int) -> str:
        """Whose Python process ended in the middle of a task, said at once; empty if none did, or for good reason."""
        number = private.process_ended(error)
        with self.lock:
            job = self.jobs.get((epoch, stage, attempt))
        if number is None or job is None or attempt < self.cancelled or number >= len(job.slots):
            return ""
        index, node = list(job.slots.items())[number]
        said = (
            f"the Python process of {self._container(stage, index, node)} ended in the middle of epoch {epoch}: "
            "a function, or a library that it uses, ended it (os._exit), crashed, or had no memory left"
        )
        self.notices.append(f"{said}. The epoch is run again.")
        return said

    def _look_again(self, reason: str) -> None:
        """A task may meet a dead executor before Spark has noticed its death."""
        limit = time.monotonic() + (LOSS_NOTICED_S if _sounds_like_loss(reason) and self.executors else 0.0)
        try:
            while not self._look() and time.monotonic() < limit and not self.over.wait(0.02):
                pass
        except Exception as error:
            self.notices.append(f"looking at executors failed: {private.short_reason(error)}")

    # -- jobs ------------------------------------------------------------------------------------------------------

    def _run(self, command: RunStage, splits: list[dict[str, Any]]) -> Event:
        began = time.monotonic()
        self._new_attempt(command.attempt)
        stage = self.plan.by_id[command.stage]
        warming = self.warming.pop(stage.id, None)
        if warming is not None:
            warming.result()
        offsets, partitions = self._numbering(command.routing)
        specs = task_specs(command, self.plan, splits, self.on_error)
        containers = command.containers[: len(specs)]
        read = {c: (s.index, s.split) for c, s in zip(containers, specs, strict=True)} if stage.source else {}
        job = JobSpec("run", {command.stage: specs[0]}, offsets, read)
        self.jvm.job_group(self._group(command.attempt), f"stage-{stage.index}", msgspec.json.encode(job).decode())
        slots = {
            s.index: self._node(command.routing.homes_of(command.stage), c)
            for s, c in zip(specs, containers, strict=True)
        }
        with self.lock:
            self.jobs[command.epoch, command.stage, command.attempt] = Running(time.monotonic(), slots)
        tasks = self._tasks(stage, command, containers, offsets)
        if stage.outs or command.peers.sends:
            shuffled = self.jvm.shuffle(tasks, partitions)
            shuffle_id = self.jvm.run_to_shuffle(shuffled)
            self._keep_output(command.epoch, command.stage, command.attempt, Output(shuffled, shuffle_id, len(specs)))
        else:
            tasks.count()
        reports = self._collect(command.stage, command.epoch, command.attempt, len(specs))
        self.seen |= {(stage.id, i, node) for i, node in slots.items()}
        elapsed = (time.monotonic() - began) * 1000
        return StageDone(
            now=time.monotonic(),
            epoch=command.epoch,
            stage=command.stage,
            attempt=command.attempt,
            reports=reports,
            elapsed_ms=elapsed,
        )

    def _tasks(
        self,
        stage: Stage,
        command: RunStage,
        indices: Sequence[int],
        offsets: Mapping[str, int],
    ) -> Any:
        """One RDD for each slot, united. The RDDs of a source do not depend on the epoch, and are made once."""
        nodes = [self._node(command.routing.homes_of(stage.id), i) for i in indices]
        key = (stage.id, tuple(zip(indices, nodes, strict=True)))
        if stage.source is not None:
            with self.lock:
                known = self.source_tasks.get(key)
            if known is not None:
                return known
            tasks = self.jvm.union([self._alone(stage.id, i, n) for i, n in zip(indices, nodes, strict=True)])
            with self.lock:
                self.source_tasks[key] = tasks
            return tasks
        with self.lock:
            ups = [self.outputs[command.epoch, up] for up in dict.fromkeys(e.upstream for e in stage.ins)]
            if command.peers.receives:
                ups.append(self.outputs[command.epoch - 1, stage.id])
        blobs = self.jvm.blobs(self.jvm.together([u.shuffled for u in ups]))
        numbers = [offsets[stage.id] + i for i in indices]
        if self.executors:
            sent = sum(u.tasks for u in ups)
            where = dict(sorted(zip(numbers, nodes, strict=True)))
            blobs = self.jvm.zipped(self._placed(sent, [*where.values()]), self.jvm.partitions(blobs, *where))
            numbers = [[*where].index(number) for number in numbers]
        parents = [self.jvm.partitions(blobs, number) for number in numbers]
        slots = [self._slot(stage.id, i, n) for i, n in zip(indices, nodes, strict=True)]
        return self.jvm.union([self.jvm.python(p, slot) for p, slot in zip(parents, slots, strict=True)])

    def _flush(self, command: Flush) -> Event:
        specs = flush_specs(command, self.plan)
        job = JobSpec("flush", {s.stage: s for s in specs}, {})
        self.jvm.job_group(self._group(command.attempt), "flush", msgspec.json.encode(job).decode())
        tasks = [
            self._alone(s.stage, s.index, self._node(command.routing.homes_of(StageId(s.stage)), s.index))
            for s in specs
        ]
        if tasks:
            self.jvm.union(tasks).count()
        reports: tuple[TaskReport, ...] = ()
        for stage in dict.fromkeys(s.stage for s in specs):
            count = sum(s.stage == stage for s in specs)
            reports += self._collect(stage, command.epoch, command.attempt, count)
        return Flushed(now=time.monotonic(), epoch=command.epoch, attempt=command.attempt, reports=reports)

    def _numbering(self, routing: RoutingTable) -> tuple[dict[str, int], int]:
        """Stage -> number of its first container among all containers, and the number of all containers."""
        offsets: dict[str, int] = {}
        total = 0
        for stage in self.plan.stages:
            if stage.keyed is not None:
                offsets[stage.id] = total
                total += routing.instances[stage.id]
        return offsets, total

    def _new_attempt(self, attempt: int) -> None:
        """What the attempt before left behind is of no use. A job of that one may still begin, and changes nothing."""
        with self.lock:
            if attempt > self.attempt:
                self.attempt = attempt
                self.outputs.clear()
                self.source_tasks.clear()

    def _keep_output(self, epoch: int, stage: str, attempt: int, output: Output) -> None:
        """A job of an attempt that was given up may still come to its end: the new attempt must not read its files."""
        with self.lock:
            if attempt == self.attempt:
                self.outputs[epoch, stage] = output

    def _reported(self, stage: str, epoch: int, attempt: int) -> set[int]:
        """The tasks of a running job that have ended."""
        with self.lock:
            reports = [_decode_report(data) for data in [*self.reports, *self.accumulator.value]]
        return {r.index for r in reports if (r.stage, r.epoch, r.attempt) == (stage, epoch, attempt)}

    def _collect(self, stage: str, epoch: int, attempt: int, count: int) -> tuple[TaskReport, ...]:
        """The control records of a job that has just ended. Spark delivers them before it reports the end."""
        with self.lock:
            self.reports += self.accumulator.value
            self.accumulator.value = []
            mine: dict[int, TaskReport] = {}
            rest = []
            for data in self.reports:
                report = _decode_report(data)
                if (report.stage, report.epoch, report.attempt) == (stage, epoch, attempt):
                    mine[report.index] = report
                elif report.attempt >= attempt:
                    rest.append(data)
            self.reports = rest
        if len(mine) != count:
            raise EngineError(f"{count - len(mine)} of {count} control records of '{stage}' were lost")
        self.misses += sum(r.missing for r in mine.values())
        return tuple(mine[i] for i in sorted(mine))
