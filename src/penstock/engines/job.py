"""A running job, as users hold it."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from penstock.config import Config
from penstock.connectors.retrying import RetryingStore
from penstock.connectors.store import DirectoryLock, FsspecStore
from penstock.control.events import RescaleRequested, StopRequested
from penstock.control.routing import RoutingTable
from penstock.engines.local import LocalEngine
from penstock.engines.protocol import Engine
from penstock.engines.runtime import Runtime
from penstock.errors import ConfigError, FlowError
from penstock.flow import Flow
from penstock.ids import StageId
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
        return [*runtime.notices, *away, *sources, *getattr(runtime.engine, "notices", ())]

    @property
    def routing(self) -> RoutingTable | None:
        """Which container owns which slice, now; None while the job starts."""
        controller = self._runtime.controller
        return None if controller is None else controller.routing

    def wait(self, timeout: float | None = None) -> bool:
        """True when the job has ended, False after the timeout. Raises the error that ended it, if one did."""
        ended = self._runtime.ended.wait(timeout)
        if ended:
            self._thread.join()
            with self._cleanup_lock:
                cleanup, self._cleanup = self._cleanup, _nothing
            cleanup()
            if self._runtime.error is not None:
                raise self._runtime.error
        return ended

    def stop(self) -> None:
        """Finish the epochs under way, take a checkpoint, end. Returns when that is done."""
        self._runtime.post(StopRequested(self._runtime.clock()))
        self.wait()

    def rescale(self, uid: str, instances: int) -> None:
        """Change the number of instances of the stage that operator ``uid`` runs in, at the next epoch boundary."""
        stage = self._plan.stage_of(uid)
        if stage is None:
            raise ConfigError(
                f"there is no operator '{uid}' to rescale.",
                remedy=f"The stages are {', '.join(s.id for s in self._plan.stages)}.",
            )
        controller = self._runtime.controller
        if controller is not None:
            controller.routing.rescale(stage.id, instances)  # refuse here what cannot be
        self._runtime.post(RescaleRequested(self._runtime.clock(), StageId(stage.id), instances))

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if not self._runtime.ended.is_set():
            self.stop()


def _nothing() -> None:
    """Cleaning up happens once."""


def start(flow: Flow, *, engine: str = "spark", config: Config | None = None, **hooks: Any) -> Job:
    """Check everything that can be checked, then run the flow in the background."""
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
            url = tempfile.mkdtemp(prefix="penstock-")
            cleanups.append(lambda: shutil.rmtree(str(url), ignore_errors=True))
        elif "://" not in url:
            url = os.path.abspath(url)
        lock = DirectoryLock(url, job=config.name or flow.name, now_s=time.time())
        cleanups.append(lock.release)
        lock.keep(time.time)
        hooks["heartbeat"] = lock.check
        retrying = RetryingStore(
            FsspecStore(url),
            retries=config.store_retries,
            timeout_s=config.store_timeout_s,
            away_s=config.store_away_s,
        )
        retrying.guard = lambda: lock.heartbeat(time.time())
        store = retrying

    def make_engine(job_id: str) -> Engine:
        if engine == "local":
            return LocalEngine(plan, job_id, store, on_error, config.instances or 1)
        if engine == "spark":
            from penstock.engines.spark.engine import SparkEngine

            return SparkEngine(plan, job_id, store, on_error, config)
        raise ConfigError(f"there is no engine '{engine}'.", remedy="Use spark or local.")

    def cleanup() -> None:
        for each in reversed(cleanups):
            each()

    runtime = Runtime(plan, config, store, make_engine, checkpoint_url=url, **hooks)
    if isinstance(store, RetryingStore):
        store.watch = runtime.store_changed
    return Job(runtime, plan, cleanup)


def run(flow: Flow, *, config: str | None = None, **settings: Any) -> Job:
    """Run a flow on Spark, in the background. Settings are those of ``penstock.Config``: master, checkpoint, slices
    ...
    """
    return start(flow, engine="spark", config=Config.load(config, settings))


def run_local(flow: Flow, **settings: Any) -> None:
    """Run a flow in this process, without Spark, until its sources are exhausted: the oracle, and the way to test
    flows.
    """
    start(flow, engine="local", config=Config(**settings)).wait()
