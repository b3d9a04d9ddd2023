"""The Spark engine: a (stage, epoch) is one Spark job.

A source stage, and every keyed stage that feeds another, runs up to its shuffle files and no further; a last stage
runs as an ordinary job. Control records come back with the tasks' results. Shuffle partitions are numbered over the
containers of *all* keyed stages, so that every shuffle of a job has the same partitioner, and the inputs of a stage
with several upstream stages are united partition by partition.
"""

from __future__ import annotations

import io
import os
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import cloudpickle
import msgspec

from penstock.config import Config
from penstock.control.events import (
    Compact,
    Event,
    Flush,
    Flushed,
    RunStage,
    StageDone,
    StageFailed,
    TaskReport,
    WarmedUp,
    WarmUp,
)
from penstock.control.routing import RoutingTable
from penstock.engines.local import flush_specs, task_specs
from penstock.engines.protocol import Post
from penstock.engines.spark import private
from penstock.engines.spark.session import check_executors, is_local, open_session, ship_package, single_machine
from penstock.engines.spark.worker import SLOT, JobSpec, ReportsParam, SlotTask
from penstock.errors import EngineError, FlowError
from penstock.ids import Attempt, Epoch, StageId
from penstock.plan import Plan, Stage
from penstock.state.store import Store

EXECUTORS_WAIT_S = 60.0
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
    # Every epoch needs about the memory of the one before: giving it back in between costs a page fault for each page.
    "_RJEM_MALLOC_CONF": "dirty_decay_ms:1000,muzzy_decay_ms:1000",
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
    "MALLOC_MMAP_THRESHOLD_": str(64 << 20),
    "MALLOC_TOP_PAD_": str(4 << 20),
}
_decode_report = msgspec.msgpack.Decoder(TaskReport).decode


@dataclass(frozen=True)
class Output:
    """What a stage of an epoch left in the shuffle."""

    shuffled: Any
    shuffle_id: int
    tasks: int


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Classes of the user's flow file travel by value; what msgspec caches on a dataclass cannot, and it makes it
    anew.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) and "__msgspec_cache__" in vars(obj):
            del obj.__msgspec_cache__  # type: ignore[attr-defined]
        return super().reducer_override(obj)


def pickle_plan(plan: Plan) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(plan)
    return buffer.getvalue()


class SparkEngine:
    name = "spark"

    def __init__(self, plan: Plan, job_id: str, store: Store, on_error: str, config: Config) -> None:
        self.plan = plan
        self.job_id = job_id
        self.store = store
        self.on_error = on_error
        self.config = config
        self.run_id = uuid.uuid4().hex
        self.notices: list[str] = []
        self.session: Any = None
        self.owned = False
        self.jvm: private.Jvm
        self.nodes: list[tuple[str, str | None]] = [("driver", None)]
        self.homes: dict[int, str] = {}
        """container -> node. It stays as long as the node lives: the others' state is of use after a loss."""
        self.nodes_of_attempt = -1
        self.slots: dict[tuple[str, int, str], Any] = {}
        self.placements: dict[tuple[int, str | None], Any] = {}
        self.warming: dict[StageId, Future[None]] = {}
        self.instances: dict[StageId, int] = {}
        """Instances of each stage in the last epoch that ran."""
        self.source_tasks: dict[tuple[str, int], Any] = {}
        self.outputs: dict[tuple[int, str], Output] = {}
        self.group = f"penstock-{self.run_id}"
        self.pool = ThreadPoolExecutor(16, thread_name_prefix="penstock-job")
        self.lock = threading.Lock()
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
        master = sc.master
        if not is_local(master):
            self._await_executors(master)
            ship_package(sc)
            check_executors(sc, len(self.jvm.executors()))
        try:
            pickled = pickle_plan(self.plan)
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
            # Modules that the driver can import, workers on this machine can too.
            self.env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p and os.path.exists(p))
        self._refresh_nodes()

    def _await_executors(self, master: str) -> None:
        wanted = int(master.split("[")[1].split(",")[0]) if master.startswith("local-cluster") else 1
        limit = time.monotonic() + EXECUTORS_WAIT_S
        settled = threading.Event()
        while time.monotonic() < limit:
            found = self.jvm.executors()
            if "driver" not in found and len(found) >= wanted:
                return
            settled.wait(0.1)
        raise EngineError(
            f"no executor came up on {master} within {EXECUTORS_WAIT_S:.0f} s.",
            remedy="Check that the master has workers with free cores and memory that can reach this machine.",
        )

    def _refresh_nodes(self) -> None:
        executors = self.jvm.executors()
        alone = list(executors) == ["driver"]
        with self.lock:
            self.nodes = [("driver", None)] if alone else sorted(executors.items(), key=lambda e: (len(e[0]), e[0]))
            names = {node for node, _ in self.nodes}
            self.homes = {container: node for container, node in self.homes.items() if node in names}

    def stop(self) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)
        if self.session is not None and self.owned:
            self.session.stop()

    # -- placement -------------------------------------------------------------------------------------------------

    def _node(self, index: int) -> tuple[str, str | None]:
        """Where container ``index`` of every stage lives; those that have no home yet go where there are fewest."""
        with self.lock:
            for container in range(index + 1):
                if container not in self.homes:
                    taken = Counter(self.homes.values())
                    self.homes[container] = min((node for node, _ in self.nodes), key=lambda node: taken[node])
            home = self.homes[index]
            return next((node, place) for node, place in self.nodes if node == home)

    def _slot(self, stage: str, index: int) -> Any:
        """The Python function of a slot. Its environment is its own, and so is its worker process."""
        node, _ = self._node(index)
        key = (stage, index, node)
        with self.lock:
            found = self.slots.get(key)
        if found is None:
            task = SlotTask(self.run_id, self.job_id, stage, index, self.plan_broadcast, self.store, self.accumulator)
            # Tasks of sources keep nothing, so any idle worker will do; a container's must find its own process again.
            dedicated = self.plan.by_id[StageId(stage)].stateful
            slot = f"{self.run_id}:{stage}:{index}" if dedicated else self.run_id
            env = {**self.env, SLOT: slot, "PENSTOCK_NODE": node}
            found = self.jvm.function(task, env)
            with self.lock:
                self.slots[key] = found
        return found

    def _placed(self, elements: int, index: int) -> Any:
        key = (elements, self._node(index)[1])
        with self.lock:
            found = self.placements.get(key)
        if found is None:
            found = self.jvm.placed(*key)
            with self.lock:
                self.placements[key] = found
        return found

    # -- commands --------------------------------------------------------------------------------------------------

    def run_stage(self, command: RunStage, routing: RoutingTable, splits: list[dict[str, Any]]) -> None:
        self.pool.submit(
            self._guard, command.epoch, command.stage, command.attempt, self._run, command, routing, splits
        )

    def flush(self, command: Flush, routing: RoutingTable) -> None:
        self.pool.submit(self._guard, command.epoch, StageId("flush"), command.attempt, self._flush, command, routing)

    def prepare(self, routing: RoutingTable) -> None:
        """Start the Python workers of all stages at once, rather than one stage after another in the first epoch."""
        for stage in self.plan.stages:
            self.warming[stage.id] = self.pool.submit(self._warm, stage.id, range(routing.instances[stage.id]))

    def warm_up(self, command: WarmUp) -> None:
        def work() -> None:
            # Slots in use must be left alone: a second task would start a second process beside theirs.
            self._warm(command.stage, range(self.instances.get(command.stage, 0), command.instances))
            self.post(WarmedUp(time.monotonic(), command.stage, command.instances))

        self.pool.submit(work)

    def _warm(self, stage: StageId, indices: range) -> None:
        try:
            self.jvm.job_group(self.group, "warm-up", msgspec.json.encode(JobSpec("warm", {}, {})).decode())
            tasks = [self.jvm.python(self._placed(1, i), self._slot(stage, i)) for i in indices]
            if tasks:
                self.jvm.union(tasks).count()
        except Exception as error:
            self.notices.append(f"starting the workers of '{stage}' ahead failed: {private.short_reason(error)}")

    def compact(self, command: Compact, run: Callable[[], Event]) -> None:
        self.pool.submit(lambda: self.post(run()))

    def cancel(self) -> None:
        self.session.sparkContext.cancelJobGroup(self.group)

    def release(self, epoch: int) -> None:
        with self.lock:
            old = [k for k in self.outputs if k[0] <= epoch]
            gone = [self.outputs.pop(k) for k in old]
        for output in gone:
            self.pool.submit(self.jvm.forget_shuffle, output.shuffle_id)

    def node_of(self, container: int) -> str:
        return self._node(container)[0]

    def _guard(self, epoch: Epoch, stage: StageId, attempt: Attempt, work: Callable[..., Event], *args: Any) -> None:
        """Exactly one event for each command, whatever happens."""
        try:
            event = work(*args)
        except Exception as error:
            event = StageFailed(time.monotonic(), epoch, stage, attempt, private.short_reason(error))
        self.post(event)

    # -- jobs ------------------------------------------------------------------------------------------------------

    def _run(self, command: RunStage, routing: RoutingTable, splits: list[dict[str, Any]]) -> Event:
        began = time.monotonic()
        self._new_attempt(command.attempt)
        stage = self.plan.by_id[command.stage]
        warming = self.warming.pop(stage.id, None)
        if warming is not None:
            warming.result()
        self.instances[stage.id] = routing.instances[stage.id]
        offsets, partitions = self._numbering(routing)
        specs = task_specs(command, self.plan, routing, splits, self.on_error)
        job = JobSpec("run", {command.stage: specs[0]}, offsets, splits)
        self.jvm.job_group(self.group, f"stage-{stage.index}", msgspec.json.encode(job).decode())
        tasks = self._tasks(stage, command, len(specs), offsets)
        if stage.outs:
            shuffled = self.jvm.shuffle(tasks, partitions)
            shuffle_id = self.jvm.run_to_shuffle(shuffled)
            with self.lock:
                self.outputs[command.epoch, command.stage] = Output(shuffled, shuffle_id, len(specs))
        else:
            tasks.count()
        reports = self._collect(command.stage, command.epoch, command.attempt, len(specs))
        elapsed = (time.monotonic() - began) * 1000
        return StageDone(time.monotonic(), command.epoch, command.stage, command.attempt, reports, elapsed)

    def _tasks(self, stage: Stage, command: RunStage, count: int, offsets: Mapping[str, int]) -> Any:
        """One RDD for each slot, united. Those of a source never change: nothing of an epoch is in them."""
        if stage.source is not None:
            with self.lock:
                known = self.source_tasks.get((stage.id, count))
            if known is not None:
                return known
            parents = [self._placed(1, i) for i in range(count)]
        else:
            with self.lock:
                ups = [self.outputs[command.epoch, up] for up in dict.fromkeys(e.upstream for e in stage.ins)]
            blobs = self.jvm.blobs(self.jvm.together([u.shuffled for u in ups]))
            parents = [self.jvm.partition(blobs, offsets[stage.id] + i) for i in range(count)]
            if self.nodes[0][1] is not None:
                sent = sum(u.tasks for u in ups)
                parents = [self.jvm.zipped(self._placed(sent, i), p) for i, p in enumerate(parents)]
        tasks = self.jvm.union([self.jvm.python(p, self._slot(stage.id, i)) for i, p in enumerate(parents)])
        if stage.source is not None:
            with self.lock:
                self.source_tasks[stage.id, count] = tasks
        return tasks

    def _flush(self, command: Flush, routing: RoutingTable) -> Event:
        specs = flush_specs(command, self.plan, routing)
        job = JobSpec("flush", {s.stage: s for s in specs}, {})
        self.jvm.job_group(self.group, "flush", msgspec.json.encode(job).decode())
        tasks = [self.jvm.python(self._placed(1, s.index), self._slot(s.stage, s.index)) for s in specs]
        if tasks:
            self.jvm.union(tasks).count()
        reports: tuple[TaskReport, ...] = ()
        for stage in dict.fromkeys(s.stage for s in specs):
            count = sum(s.stage == stage for s in specs)
            reports += self._collect(stage, command.epoch, command.attempt, count)
        return Flushed(time.monotonic(), command.epoch, command.attempt, reports)

    def _numbering(self, routing: RoutingTable) -> tuple[dict[str, int], int]:
        """Stage -> number of its first container among all containers, and how many there are."""
        offsets: dict[str, int] = {}
        total = 0
        for stage in self.plan.stages:
            if stage.keyed is not None:
                offsets[stage.id] = total
                total += routing.instances[stage.id]
        return offsets, total

    def _new_attempt(self, attempt: int) -> None:
        """After a failure the executors may be others."""
        with self.lock:
            if attempt == self.nodes_of_attempt:
                return
            self.nodes_of_attempt = attempt
            self.outputs.clear()
            self.source_tasks.clear()
        self._refresh_nodes()

    def _collect(self, stage: str, epoch: int, attempt: int, count: int) -> tuple[TaskReport, ...]:
        """The control records of a job that has just ended: Spark hands them over before it says so."""
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
