"""A running job, as users hold it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

from penstock.config import Config
from penstock.connectors.retrying import RetryingStore
from penstock.connectors.scratch import open_scratch
from penstock.connectors.store import DirectoryLock, FsspecStore
from penstock.control.controller import Controller
from penstock.control.events import (
    CancelMovesRequested,
    CoresRequested,
    LeaveRequested,
    MoveRequested,
    NodesInvited,
    RebalanceRequested,
    RescaleRequested,
    StopRequested,
)
from penstock.control.routing import RoutingTable
from penstock.engines.local import LocalEngine
from penstock.engines.protocol import Engine
from penstock.engines.runtime import Runtime
from penstock.engines.steering import serve
from penstock.engines.task import Worker
from penstock.errors import ConfigError, FlowError
from penstock.flow import Flow
from penstock.ids import StageId
from penstock.observe.journal import History
from penstock.observe.status import JobStatus
from penstock.plan import Plan, compile_flow
from penstock.state.store import MemoryStore, Store


class Job:
    """A job under way. ``wait`` for its end, ``stop`` it, ``rescale`` its stages, ask its ``status``."""

    def __init__(self, runtime: Runtime, plan: Plan, cleanup: Callable[[], None]) -> None:
        self._runtime = runtime
        self._plan = plan
        self._cleanup = cleanup
        self._cleanup_lock = threading.Lock()
        self._thread = threading.Thread(target=runtime.run, name="penstock-runtime", daemon=True)
        self._thread.start()

    def status(self) -> JobStatus:
        """What the job is doing now."""
        return self._runtime.status()

    @property
    def notices(self) -> list[str]:
        """Things worth saying that were no errors, such as a damaged checkpoint that was passed over."""
        runtime = self._runtime
        away = [runtime.away_notice] if runtime.away_notice else []
        sources = [notice for s in self._plan.sources.values() for notice in getattr(s, "notices", ())]
        parts = (runtime.engine, runtime.metrics, runtime.backlogs)
        found = [notice for part in parts for notice in getattr(part, "notices", ())]
        return [*runtime.notices, *away, *sources, *found]

    @property
    def routing(self) -> RoutingTable | None:
        """Which container owns which slice, now; None while the job starts."""
        controller = self._runtime.controller
        return None if controller is None else controller.routes.table

    def journal(self) -> History:
        """Every step so far, with its cause: the last of them in memory, or all that the checkpoint's store has."""
        return self._runtime.journal.history()

    def wait(self, timeout: float | None = None) -> bool:
        """True when the job has ended, False after the timeout. Raises the error that ended it, if one did."""
        ended = self._runtime.ended.wait(timeout)
        if ended:
            self._thread.join()
            with self._cleanup_lock:  # a second caller waits too: its process may end when this returns
                cleanup, self._cleanup = self._cleanup, _nothing
                cleanup()
            if self._runtime.error is not None:
                raise self._runtime.error
        return ended

    def stop(self) -> None:
        """Finish the epochs under way, take a checkpoint, end. Returns when that is done."""
        self._runtime.post(StopRequested(now=self._runtime.clock()))
        self.wait()

    def rescale(self, uid: str, instances: int) -> None:
        """Change the number of instances of the stage that operator ``uid`` runs in, while it runs. A job that is just
        starting does it when it runs; during a recovery it waits for the end of that.
        """
        stage = self._stage(uid, "rescale")
        controller = self._running()
        if controller is not None:
            controller.routes.table.check(stage, instances)  # refuse here what cannot be
            controller.fleet.check_instances(stage, instances)
        self._runtime.post(RescaleRequested(now=self._runtime.clock(), stage=stage, instances=instances))

    def scale_out(self, nodes: int = 1) -> None:
        """Ask Spark for more executors. Once they are there, slices move to them, while the job runs."""
        if nodes < 1:
            raise ConfigError(f"{nodes} more nodes cannot be asked for.", remedy="Ask for at least 1.")
        request = getattr(self._runtime.engine, "request_nodes", None)
        master = self._runtime.config.master
        if self._running() is None or request is None or master.startswith("local[") or master == "local":
            raise ConfigError(
                "this job runs in one process: there are no nodes to add.",
                remedy="Run it on a cluster (master spark://..., yarn, k8s://... or local-cluster[N,CORES,MB]); "
                "rescale changes the number of containers anywhere.",
            )
        if not request(nodes):
            raise ConfigError(
                f"the cluster manager did not take a request for {nodes} more executors.",
                remedy="See that it can grant them: free workers, cores and memory, the limits of this application.",
            )
        self._runtime.post(NodesInvited(now=self._runtime.clock(), count=nodes))

    def scale_in(self, nodes: int | list[str] = 1) -> None:
        """Let nodes go, a number of them or those named: their slices move away first, while the job runs."""
        status = self._ready()
        known = [n.name for n in status.nodes]
        staying = [n for n in status.nodes if n.state != "leaving"]
        if isinstance(nodes, int):
            fewest = sorted(staying, key=lambda n: (n.slices, -len(n.name), n.name))  # the least to move
            chosen = [n.name for n in fewest[:nodes]]
            if nodes < 1:
                raise ConfigError(f"{nodes} nodes cannot be let go.", remedy="Name them, or give a number from 1 on.")
            count = nodes
        else:
            chosen, count = list(nodes), len(nodes)
            if unknown := [n for n in chosen if n not in known]:
                raise ConfigError(f"there is no node {unknown[0]}.", remedy=f"The nodes are {', '.join(known)}.")
        if count >= len(staying):
            raise ConfigError(
                f"{count} of {len(staying)} nodes cannot go: somebody must stay.", remedy="Use stop to end the job."
            )
        self._runtime.post(LeaveRequested(now=self._runtime.clock(), nodes=tuple(chosen)))

    def set_cores(self, node: str, cores: int) -> None:
        """Use ``cores`` cores of a node, while the job runs: as many containers of every stage work there, and the
        node's slices are dealt out among them by the setting ``schedule``. Slices of other nodes stay where they are.

        It holds until it is set anew or the node leaves. During a recovery it waits for the end of that.
        """
        if isinstance(cores, bool) or not isinstance(cores, int):
            raise ConfigError(f"{cores!r} is no number of cores.", remedy="Use a whole number.")
        self._ready()
        controller = self._running()
        assert controller is not None, "a job that is ready has one"
        controller.fleet.check_cores(node, cores)
        self._runtime.post(CoresRequested(now=self._runtime.clock(), node=node, cores=cores))

    def migrate(self, uid: str, slices: list[int], container: int) -> None:
        """Move some slices of a stage to another of its containers, while it runs."""
        stage = self._stage(uid, "move slices of")
        status = self._ready()
        seen = next(s for s in status.stages if s.id == stage)
        if not seen.owners:
            raise ConfigError(f"'{uid}' is a source: it has no slices.", remedy="Move slices of a keyed stage.")
        if not seen.stateful:
            raise ConfigError(
                f"stage '{stage}' keeps no state: there is nothing to move.",
                remedy="Rescale it, or move slices of a stage that has state.",
            )
        if container not in seen.usable:
            raise ConfigError(
                f"container {container} of '{stage}' cannot take slices: it is not there, or on its way out.",
                remedy=f"The containers that can are {', '.join(map(str, seen.usable))}.",
            )
        count = len(seen.owners)
        if wrong := [s for s in slices if not 0 <= s < count]:
            raise ConfigError(
                f"there is no slice {wrong[0]} in stage '{stage}'.", remedy=f"Its slices go from 0 to {count - 1}."
            )
        moving = {m.slice for m in status.moves if m.stage == stage}
        if busy := [s for s in slices if s in moving]:
            raise ConfigError(
                f"slice {busy[0]} of '{stage}' is on the move already.", remedy="Wait for it, or cancel the moves."
            )
        targets = dict.fromkeys(slices, container)
        self._runtime.post(MoveRequested(now=self._runtime.clock(), stage=stage, targets=targets))

    def rebalance(self) -> None:
        """Spread slices evenly over the containers there are, moving as few as that takes."""
        self._ready()
        self._runtime.post(RebalanceRequested(now=self._runtime.clock()))

    def cancel_moves(self) -> None:
        """Call off every move that has not reached its switch."""
        self._ready()
        self._runtime.post(CancelMovesRequested(now=self._runtime.clock()))

    def _stage(self, uid: str, what: str) -> StageId:
        stage = self._plan.stage_of(uid)
        if stage is None:
            raise ConfigError(
                f"there is no operator '{uid}' to {what}.",
                remedy=f"The stages are {', '.join(s.id for s in self._plan.stages)}.",
            )
        return StageId(stage.id)

    def _running(self) -> Controller | None:
        """None while the job starts. One that has ended takes no orders, and says why."""
        runtime = self._runtime
        if runtime.ended.is_set():
            why = f"failed: {runtime.error.message.removesuffix('.')}" if runtime.error else f"is {runtime.reason}"
            raise ConfigError(
                f"the job {why}. It takes no orders any more.",
                remedy="Run the flow again: with the same checkpoint directory it goes on from there.",
            )
        return runtime.controller

    def _ready(self) -> JobStatus:
        self._running()
        status = self.status()
        if status.phase == "starting":
            raise ConfigError("the job is not running.", remedy="Wait until it runs: its status says so.")
        return status

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if not self._runtime.ended.is_set():
            self.stop()


def _nothing() -> None:
    """Cleaning up happens once."""


def start(
    flow: Flow,
    *,
    engine: str = "spark",
    config: Config | None = None,
    worker: type[Worker] = Worker,
    **hooks: Any,
) -> Job:
    """Check everything that can be checked, then run the flow in the background. ``worker`` and ``hooks``, which are
    the runtime's, are for tests and benchmarks: a clock, steps to die at, a controller or a worker to compare with.
    """
    config = config or Config()
    if not isinstance(flow, Flow):
        raise FlowError(f"{flow!r} is not a flow.", remedy="Pass the ps.Flow object.")
    plan = compile_flow(flow.graph())
    on_error = config.on_error or flow.on_error
    store: Store
    cleanups: list[Callable[[], None]] = []
    url = config.checkpoint
    if url is None and engine == "local":
        store = MemoryStore()
    else:
        if url is None:
            # Without a checkpoint directory the job still recovers from lost executors, but not from the driver's end.
            scratch = open_scratch("job")
            url = scratch.directory
            cleanups.append(scratch.clear)
        elif "://" not in url:
            url = os.path.abspath(url)
        lock = DirectoryLock(url, job=config.name or flow.name, now_s=time.time())
        cleanups.append(lock.release)
        lock.keep(time.time)
        hooks["heartbeat"] = lock.check
        files = FsspecStore(url)
        if getattr(files, "root", None) is not None:
            files.remove_temporaries()  # what a killed driver was writing
        retrying = RetryingStore(
            files,
            retries=config.store_retries,
            timeout_s=config.store_timeout_s,
            away_s=config.store_away_s,
        )
        retrying.guard = lambda: lock.heartbeat(time.time())
        store = retrying

    def make_engine(job_id: str) -> Engine:
        if engine == "local":
            return LocalEngine(plan, job_id, store, on_error, config.instances or 1, worker)
        if engine == "spark":
            from penstock.engines.spark.engine import SparkEngine

            return SparkEngine(plan, job_id, store, on_error, config, worker)
        raise ConfigError(f"there is no engine '{engine}'.", remedy="Use spark or local.")

    def cleanup() -> None:
        for each in reversed(cleanups):
            each()

    runtime = Runtime(plan, config, store, make_engine, checkpoint_url=url, **hooks)
    if isinstance(store, RetryingStore):
        store.watch = runtime.store_changed
    job = Job(runtime, plan, cleanup)
    if config.control:
        server, problem = serve(
            job,
            name=config.name or flow.name,
            checkpoint=config.checkpoint and url,
            job_id=lambda: runtime.job_id,
            ended=runtime.ended.is_set,
        )
        if server is not None:
            cleanups.append(server.close)
        else:
            runtime.notices.append(problem)
    return job


def run(flow: Flow, *, config: str | None = None, **settings: Any) -> Job:
    """Run a flow on Spark, in the background. Settings are those of ``penstock.Config``: master, checkpoint, slices
    ...
    """
    return start(flow, engine="spark", config=Config.load(config, settings))


def run_local(flow: Flow, **settings: Any) -> None:
    """Run a flow in this process, without Spark, until its sources are exhausted: the oracle, and the way to test
    flows.
    """
    start(flow, engine="local", config=Config(**{"control": False, **settings})).wait()
