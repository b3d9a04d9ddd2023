"""The simulated cluster: nodes that hold workers, and an engine that runs the controller's jobs on them.

It does what the Spark engine does, as far as the controller and the state can tell: a container runs in a worker
process of its own, on the node that the routing table names; who is there and who is not becomes known a while after
it happened; what a stage leaves for the next lies on the node that made it, and is lost with it; one task that fails
ends its job; and every job is answered. Tasks run the real ``Worker`` code, and keep backups with the real ``Keeper``.
They take virtual time: a task's effects come at one instant of it, its answer later.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.control.events import (
    Compact,
    Event,
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
from penstock.control.records import NodeInfo, TaskReport
from penstock.control.routing import RoutingTable
from penstock.engines.keeper import Keeper
from penstock.engines.local import flush_specs, task_specs
from penstock.engines.merging import Merging, merge_here
from penstock.engines.protocol import Post
from penstock.engines.sim.checkers import BoundedGrowth, Checkers, Violation
from penstock.engines.sim.faults import Faults
from penstock.engines.sim.outside import Outside
from penstock.engines.sim.schedule import Schedule, SimPool
from penstock.engines.task import TaskSpec, Worker, read_manifest
from penstock.ids import Attempt, Epoch, StageId
from penstock.plan import Plan
from penstock.state.store import Store

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(TaskReport).decode


class SimWorker(Worker):
    """A worker process: the real thing, but for the thread that writes deltas. ``number`` tells processes apart."""

    def __init__(
        self, number: int, pool: SimPool, plan: Plan, job_id: str, store: Store, background: SimPool, spill: SimSpill
    ) -> None:
        super().__init__(plan, job_id, store)
        self.number = number
        self.pool = pool
        self.background = background
        self.writer = pool  # type: ignore[assignment]
        self.spill = spill
        self.keeper = Keeper(
            job_id,
            store,
            memory_max=spill.memory_max,
            spill=lambda: spill,
            bytes_s=0.0,
            pool=background,
            load_manifest=lambda checkpoint: read_manifest(store, checkpoint),
            clock=background.clock,
            wait=None,
        )

    def check_backups(self, who: str, growth: BoundedGrowth) -> None:
        keeper = self.keeper
        assert keeper is not None
        if keeper._fault is not None:  # it goes on without: the store has it all
            raise Violation("sound", f"{who}: {keeper._fault}")
        needed: set[str] = set()
        for kept in keeper._stages.values():
            told = keeper._told.get(kept.stage)
            wanted = kept.backups.wanted if told is None or told.news else told.want
            growth.on_backups(who, kept.backups, wanted, not kept.unsettled)
            needed.update(held.disk.name for held in kept.backups._held.values() if held.disk is not None)
        growth.on_spilled(who, self.spill.items, needed)

    def die(self) -> None:
        self.pool.die()
        self.background.die()


class SimSpill:
    """Local disk, which may fail."""

    def __init__(self, memory_max: int, fails: Callable[[], bool]) -> None:
        self.memory_max = memory_max
        self.fails = fails
        self.items: dict[str, bytes] = {}

    def put(self, name: str, data: bytes) -> None:
        if self.fails():
            raise OSError("no space left on the device, on purpose")
        self.items[name] = data

    def get(self, name: str) -> bytes:
        return self.items[name]

    def delete(self, name: str) -> None:
        self.items.pop(name, None)

    def clear(self) -> None:
        self.items.clear()


class Node:
    """A machine with worker processes. After a crash it is another: same number, nothing in it."""

    def __init__(self, number: int, cores: int = 1, zone: str = "") -> None:
        self.number = number
        self.cores = cores
        self.zone = zone
        self.life = 0
        """Counts its crashes."""
        self.up = True
        self.slow = 1.0
        self.slots: dict[tuple[str, int], SimWorker] = {}

    def crash(self) -> None:
        self.up = False
        self.life += 1
        for worker in self.slots.values():
            worker.die()
        self.slots.clear()

    @property
    def name(self) -> str:
        """After a crash it is another node, as a new executor has a new number."""
        return f"{self.number}.{self.life}"

    def __str__(self) -> str:
        return f"node {self.name}"


@dataclass
class Cluster:
    """What the engines of all drivers have in common: it outlives each of them."""

    schedule: Schedule
    random: random.Random
    faults: Callable[[], Faults]
    plan: Plan
    store: Store
    checkers: Checkers
    outside: Outside
    tell: Callable[[str, str], None]
    record_of: Callable[[int], dict[str, Any] | None]
    nodes: list[Node]
    store_held: Callable[[], float] = lambda: 0.0
    """For how long the store will not answer."""
    workers: int = 0
    """Worker processes started so far."""
    backup_memory: int = 1 << 30
    on_change: Callable[[], None] = lambda: None
    """Somebody should notice that nodes have come or gone."""

    def alive(self) -> list[Node]:
        return [node for node in self.nodes if node.up]

    def duration(self) -> float:
        r = self.random
        return r.uniform(0.003, 0.04) if r.random() < 0.9 else r.uniform(0.04, 0.3)

    def write_delay(self) -> float:
        slow = self.random.random() < self.faults().slow_write
        return self.random.uniform(0.1, 1.5) if slow else self.random.uniform(0.0, 0.05)

    def slot(self, node: Node, job_id: str, stage: str, index: int) -> SimWorker:
        worker = node.slots.get((stage, index))
        if worker is not None and self.random.random() < self.faults().lost_slot:
            self.tell("fault", f"the worker of '{stage}' {index} on {node} is gone")
            worker.die()
            worker = None
        if worker is None:
            self.workers += 1
            pool = SimPool(self.schedule, self.write_delay, self.store_held)
            background = SimPool(self.schedule, self.write_delay)
            spill = SimSpill(self.backup_memory, lambda: self.random.random() < self.faults().spill_fails)
            worker = SimWorker(self.workers, pool, self.plan, job_id, self.store, background, spill)
            node.slots[stage, index] = worker
        return worker

    def check_backups(self) -> None:
        for node in self.nodes:
            for (stage, index), worker in node.slots.items():
                worker.check_backups(f"'{stage}' {index} on {node}", self.checkers.bounded_growth)


@dataclass
class JobRun:
    """One job: all tasks of a (stage, epoch), or of a flush."""

    epoch: int
    stage: str
    attempt: int
    tasks: int
    done: Callable[[tuple[TaskReport, ...]], Event]
    over: bool = False
    slices: int = 0
    reports: dict[tuple[str, int], TaskReport] = field(default_factory=dict)
    waiting: set[tuple[str, int]] = field(default_factory=set)
    """Tasks that have not taken effect."""
    zombies: dict[tuple[str, int], SimWorker] = field(default_factory=dict)
    nodes: dict[tuple[str, int], Node] = field(default_factory=dict)
    """Where each task runs."""
    receives: bool = False
    blobs: list[tuple[str, int, bytes, Node, int]] = field(default_factory=list)
    """(stage, container, blob, where it lies, in which life of that node)"""

    def __str__(self) -> str:
        return f"'{self.stage}' of epoch {self.epoch} (attempt {self.attempt})"


class SimEngine:
    name = "sim"
    spark = None

    def __init__(self, cluster: Cluster, job_id: str, cores: int, in_flight: int) -> None:
        self.cluster = cluster
        self.job_id = job_id
        self.cores = cores
        self.in_flight = in_flight
        self.post: Post = lambda event: None
        self.gone = False
        self.ahead: Callable[[int], bool] = lambda epoch: False
        """May this epoch run before it is logged?"""
        self.attempt = -1
        self.known: dict[str, Node] = {}
        """Nodes that it knows of: news of them come later than they happen."""
        self.running: list[JobRun] = []
        self.outputs: dict[tuple[int, str], list[tuple[str, int, bytes, Node, int]]] = {}
        for node in cluster.nodes:  # processes of an earlier driver are of no use to this one
            node.slots.clear()

    # -- life --------------------------------------------------------------------------------------------------------

    def start(self, post: Post) -> None:
        self.post = post
        self.known = {node.name: node for node in self.cluster.alive()}
        self.cluster.on_change = self._news

    def stop(self) -> None:
        self.vanish()

    def vanish(self) -> None:
        """The driver is gone. Its tasks end with it, or go on for a while without knowing."""
        self.gone = True
        for job in self.running:
            self._abandon(job)
        self.running.clear()
        if self.cluster.random.random() >= self.cluster.faults().zombie:
            for node in self.cluster.nodes:
                for worker in node.slots.values():
                    worker.die()

    def nodes(self) -> tuple[NodeInfo, ...]:
        return tuple(NodeInfo(name, zone=node.zone, cores=node.cores) for name, node in self.known.items())

    def _news(self) -> None:
        """Nodes have come or gone: it takes a while until that is seen."""

        def see() -> None:
            now = {node.name: node for node in self.cluster.alive()}
            if not self.gone and now.keys() != self.known.keys():
                self.known = now
                self.post(NodesChanged(now=self.cluster.schedule.now, nodes=self.nodes()))

        r = self.cluster.random
        self.cluster.schedule.after(r.uniform(0.0, 0.6), see)

    def release_nodes(self, nodes: Sequence[str]) -> None:
        """They go for good, unless somebody starts them again."""
        for node in self.cluster.nodes:
            if node.name in nodes and len(self.cluster.alive()) > 1:
                self.cluster.tell("world", f"{node} is given back")
                node.crash()
                back = functools.partial(self._back, node)
                self.cluster.schedule.after(self.cluster.random.uniform(0.5, 3.0), back)
        self._news()

    def _back(self, node: Node) -> None:
        node.up = True
        self.cluster.on_change()

    def _node(self, homes: Mapping[tuple[StageId, int], str], stage: StageId, index: int) -> Node | None:
        """The node that a container is on; None: it is not there any more."""
        home = homes.get((stage, index))
        if home is None:
            names = sorted(self.known)
            home = names[index % len(names)] if names else ""
        return self.known.get(home)

    def _answer(self, event: Callable[[], Event]) -> None:
        """Post, after a while, once or twice."""
        if self.gone:
            return
        r, faults = self.cluster.random, self.cluster.faults()

        def deliver() -> None:
            if not self.gone:
                self.post(event())

        late = r.uniform(0.1, 1.0) if r.random() < faults.slow_answer else r.uniform(0.0, 0.01)
        self.cluster.schedule.after(late, deliver)
        if r.random() < faults.duplicate:
            self.cluster.schedule.after(late + r.expovariate(r.choice([2.0, 50.0])), deliver)

    # -- commands ----------------------------------------------------------------------------------------------------

    def run_stage(self, command: RunStage, splits: list[dict[str, Any]]) -> None:
        self._new_attempt(command.attempt)
        c = self.cluster
        specs = task_specs(command, c.plan, splits, "dead_letter")

        def done(reports: tuple[TaskReport, ...]) -> Event:
            return StageDone(
                now=c.schedule.now,
                epoch=command.epoch,
                stage=command.stage,
                attempt=command.attempt,
                reports=reports,
                elapsed_ms=1.0,
            )

        job = JobRun(command.epoch, command.stage, command.attempt, len(specs), done, receives=command.peers.receives)
        homes = {(command.stage, c): node for c, node in command.routing.homes_of(command.stage).items()}
        if c.plan.by_id[command.stage].source is not None:  # a split is read where its container is
            places = [(k, homes.get((command.stage, c))) for k, c in enumerate(command.containers)]
            homes = {(command.stage, k): node for k, node in places if node is not None}
        self._launch(job, specs, homes, self._run_task)

    def flush(self, command: Flush) -> None:
        c = self.cluster
        specs = flush_specs(command, c.plan)

        def done(reports: tuple[TaskReport, ...]) -> Event:
            return Flushed(now=c.schedule.now, epoch=command.epoch, attempt=command.attempt, reports=reports)

        job = JobRun(command.epoch, "flush", command.attempt, len(specs), done)
        homes = {(s, c): n for s, found in command.routing.homes.items() for c, n in found.items()}
        self._launch(job, specs, homes, self._flush_task)

    def prepare(self, routing: RoutingTable) -> None:
        pass

    def warm_up(self, command: WarmUp) -> None:
        c = self.cluster
        c.schedule.after(
            c.duration() * 3,
            lambda: self._answer(
                lambda: WarmedUp(now=c.schedule.now, stage=command.stage, containers=command.containers)
            ),
        )

    def compact(self, command: Compact, run: Callable[[Merging], Event]) -> None:
        def work() -> None:
            if not self.gone:
                event = run(merge_here)
                self._answer(lambda: event)

        self.cluster.schedule.after(self.cluster.duration() * 5, work)

    def cancel(self, attempt: Attempt) -> None:
        for job in list(self.running):
            self._fail(job, "cancelled", 0.0)

    def release(self, epoch: int) -> None:
        self.outputs = {k: v for k, v in self.outputs.items() if k[0] > epoch}

    # -- jobs --------------------------------------------------------------------------------------------------------

    def _new_attempt(self, attempt: int) -> None:
        if attempt != self.attempt:
            self.attempt = attempt
            self.outputs.clear()

    def _launch(
        self,
        job: JobRun,
        specs: list[TaskSpec],
        homes: Mapping[tuple[StageId, int], str],
        run: Callable[[JobRun, TaskSpec, Node, SimWorker], TaskReport],
    ) -> None:
        c = self.cluster
        self.running.append(job)
        job.waiting = {(s.stage, s.index) for s in specs}
        if not specs:
            self._complete(job)
        for spec in specs:
            stage = StageId(spec.stage)
            if spec.split is None and (stage, spec.index) not in homes and c.plan.by_id[stage].source is None:
                raise Violation("sound", f"container {spec.index} of '{spec.stage}' has work, and no node to do it on")
            node = self._node(homes, stage, spec.index)
            if node is None:
                self._fail(job, f"the node of '{spec.stage}' {spec.index} is lost", c.random.uniform(0.02, 0.5))
                return
            job.nodes[spec.stage, spec.index] = node
            whole = c.duration() * node.slow
            effect = whole * c.random.random()
            self._later(job, spec, node, node.life, effect, whole - effect, run)

    def _later(
        self,
        job: JobRun,
        spec: TaskSpec,
        node: Node,
        life: int,
        effect: float,
        rest: float,
        run: Callable[[JobRun, TaskSpec, Node, SimWorker], TaskReport],
    ) -> None:
        c = self.cluster
        key = (spec.stage, spec.index)

        def act() -> None:
            if job.stage == "flush" and not job.over and (held := c.store_held()) > 0:
                c.schedule.after(held, act)
                return
            if job.over:
                worker = job.zombies.pop(key, None)
                if worker is not None:
                    self._haunt(job, spec, node, worker, run)
                return
            if node.life != life or not node.up:
                self._fail(job, f"{node} is lost", c.random.uniform(0.02, 0.5))
                return
            if c.random.random() < c.faults().hang:
                self._hang(job, spec, node)
                return
            job.waiting.discard(key)
            if c.random.random() < c.faults().lost_task:
                self._fail(job, f"the task of '{spec.stage}' {spec.index} ended without a result", 0.05)
                return
            try:
                report = run(job, spec, node, c.slot(node, self.job_id, *key))
            except (OSError, MemoryError) as error:
                self._fail(job, repr(error), 0.01)
                return
            c.schedule.after(rest, lambda: end(_decode(_encode(report))))

        def end(report: TaskReport) -> None:
            if job.over:
                return
            if node.life != life:
                self._fail(job, f"{node} is lost, and a result with it", c.random.uniform(0.02, 0.5))
                return
            report.node = str(node)
            job.reports[key] = report
            if len(job.reports) == job.tasks:
                self._complete(job)

        c.schedule.after(effect, act)

    def _hang(self, job: JobRun, spec: TaskSpec, node: Node) -> None:
        """A task that never ends. Somebody notices, and its process is killed with the job."""
        c = self.cluster
        c.tell("fault", f"the task of '{spec.stage}' {spec.index} on {node} hangs")

        def notice() -> None:
            if job.over or self.gone:
                return
            self.post(
                Stuck(
                    now=c.schedule.now,
                    stage=StageId(spec.stage),
                    epoch=Epoch(job.epoch),
                    attempt=Attempt(job.attempt),
                    containers=(spec.index,),
                    seconds=1.0,
                )
            )
            c.schedule.after(1.0, notice)

        c.schedule.after(c.random.uniform(0.5, 1.5), notice)

    def _complete(self, job: JobRun) -> None:
        c = self.cluster
        job.over = True
        self.running.remove(job)
        self.outputs[job.epoch, job.stage] = job.blobs
        reports = tuple(job.reports[k] for k in sorted(job.reports))
        if job.stage != "flush":
            stage = c.plan.by_id[StageId(job.stage)]
            whole = not any(r.missing or r.error for r in reports)
            if stage.stateful and whole and job.slices:
                c.checkers.single_owner.on_stage_done(job.attempt, job.epoch, job.stage, job.slices)
            c.checkers.bounded_growth.on_outputs({e for e, s in self.outputs if s != "flush"}, self.in_flight)
        c.tell("job", f"{job} done")
        self._answer(lambda: job.done(reports))

    def _fail(self, job: JobRun, reason: str, notice: float) -> None:
        """The whole job fails, and is answered once that has been noticed."""
        if job.over:
            return
        self._abandon(job)
        self.running.remove(job)
        c = self.cluster
        c.tell("job", f"{job} failed: {reason}")

        def event() -> Event:
            return StageFailed(
                now=c.schedule.now,
                epoch=Epoch(job.epoch),
                stage=StageId(job.stage),
                attempt=Attempt(job.attempt),
                reason=reason,
            )

        c.schedule.after(notice, lambda: self._answer(event))

    def _abandon(self, job: JobRun) -> None:
        """Tasks under way are killed, their processes with them; or they go on, unseen, in processes left alone."""
        job.over = True
        c = self.cluster
        for key in sorted(job.waiting):
            node = job.nodes.get(key)
            if node is None or key not in node.slots:
                continue
            if c.random.random() < c.faults().zombie:
                job.zombies[key] = node.slots.pop(key)
            elif c.random.random() < 0.5:
                node.slots.pop(key).die()

    def _haunt(
        self,
        job: JobRun,
        spec: TaskSpec,
        node: Node,
        worker: SimWorker,
        run: Callable[[JobRun, TaskSpec, Node, SimWorker], TaskReport],
    ) -> None:
        if not node.up:
            return
        self.cluster.tell("fault", f"a zombie runs '{spec.stage}' {spec.index} of {job}")
        self.cluster.outside.zombie = True
        try:
            run(job, spec, node, worker)
        except OSError:
            pass
        finally:
            self.cluster.outside.zombie = False

    # -- tasks -------------------------------------------------------------------------------------------------------

    def _run_task(self, job: JobRun, spec: TaskSpec, node: Node, worker: SimWorker) -> TaskReport:
        c = self.cluster
        stage = c.plan.by_id[StageId(spec.stage)]
        if not c.outside.zombie:
            c.checkers.no_lost_update.on_run(spec.epoch, c.record_of(spec.epoch), self.ahead(spec.epoch))
        blobs = self._fetch(spec, [e.upstream for e in stage.ins])
        if job.receives:
            blobs += self._fetch(spec, [stage.id], spec.epoch - 1)
        if (spec.epoch + spec.index) % 3 == 0:
            worker.wake_some()  # as a slot's process does while it has no task
        report, out = worker.run(spec, blobs)
        if stage.keyed is not None:
            job.slices = spec.slicemap.count
        for (target, container), blob in out.items():
            job.blobs.append((target, container, blob, node, node.life))
        if stage.stateful and not report.missing and report.error is None:
            who = f"'{spec.stage}' {spec.index} on {node} (life {node.life}, process {worker.number})"
            held = worker.containers[spec.stage, spec.index]
            c.checkers.single_owner.on_applied(spec.attempt, spec.epoch, who, held, spec.slicemap)
            c.checkers.bounded_growth.on_table(who, held.table.epochs())
            c.checkers.sound.on_table(who, held)
        return report

    def _fetch(self, spec: TaskSpec, upstream: list[StageId], epoch: int | None = None) -> list[bytes]:
        """What other tasks sent to this one, in any order."""
        blobs = []
        epoch = spec.epoch if epoch is None else epoch
        for up in dict.fromkeys(upstream):
            if (epoch, up) not in self.outputs:
                raise OSError(f"the output of '{up}' is gone")
            for target, container, blob, node, life in self.outputs[epoch, up]:
                if (target, container) == (spec.stage, spec.index):
                    if node.life != life:
                        raise OSError(f"the output of '{up}' was on {node}, which is lost")
                    blobs.append(blob)
        self.cluster.random.shuffle(blobs)
        return blobs

    def _flush_task(self, job: JobRun, spec: TaskSpec, node: Node, worker: SimWorker) -> TaskReport:
        return worker.flush(spec)


__all__ = ["Cluster", "JobRun", "Node", "SimEngine", "SimWorker"]
