"""The Spark worker's side: what runs inside a dedicated Python worker process.

Each slot (a container of a stage) has a worker process of its own. An environment variable tells the slots apart. The
process keeps its ``Worker``, and with it the slices, from one task to the next. What changes from epoch to epoch comes
as a local property of the job. The closure never changes, so it is pickled once.
"""

from __future__ import annotations

import gc
import os
import pickle
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from struct import Struct
from typing import Any

import msgspec
from pyspark.accumulators import Accumulator, AccumulatorParam

from penstock.connectors.spill import open_spill
from penstock.control.records import TaskReport
from penstock.engines.keeper import Keeper
from penstock.engines.spark import slots
from penstock.engines.task import TaskSpec, Worker, read_manifest
from penstock.state.store import Store

SLOT = "PENSTOCK_SLOT"
_pack = Struct("!q").pack


class JobSpec(msgspec.Struct):
    """The tasks of one job: the spec that they share, by stage, and what differs between them."""

    mode: str
    specs: dict[str, TaskSpec]
    offsets: dict[str, int]
    """stage -> number of its first container in the shuffle's partitions"""
    splits: dict[int, tuple[int, dict[str, Any] | None]] = {}
    """container that reads a split -> the split's number, and the split"""


_decode = msgspec.json.Decoder(JobSpec).decode
_workers: dict[str, Worker] = {}


class KeepSettings(msgspec.Struct, frozen=True):
    """How a process keeps backups of other containers' slices."""

    memory_max: int
    bytes_s: float


class ReportsParam(AccumulatorParam[list[bytes]]):
    """Control records travel as an accumulator: with the task's result, without a stage of their own."""

    def zero(self, value: list[bytes]) -> list[bytes]:
        return []

    def addInPlace(self, value1: list[bytes], value2: list[bytes]) -> list[bytes]:
        return value1 + value2


def between_tasks() -> bool:
    """Do one step of the work that tasks put off. The process of a slot calls this while it has no task. True: there
    is more to do."""
    return any([worker.wake_some() for worker in _workers.values()])


class SlotTask:
    """The function of one slot. It is small and constant, and is pickled once."""

    def __init__(
        self,
        run_id: str,
        job_id: str,
        stage: str,
        index: int,
        node: str,
        plan: Any,
        store: Store,
        reports: Accumulator[list[bytes]],
        keep: KeepSettings,
    ) -> None:
        self.run_id = run_id
        self.job_id = job_id
        self.stage = stage
        self.index = index
        self.node = node
        self.plan = plan
        self.store = store
        self.reports = reports
        self.keep = keep

    def worker(self) -> Worker:
        if self.run_id not in _workers:
            for old in _workers.values():  # state of an older run, which has ended
                if old.keeper is not None:
                    old.keeper.close()
            _workers.clear()
            plan, kind = pickle.loads(self.plan.value)
            worker: Worker = kind(plan, self.job_id, self.store)
            worker.keeper = Keeper(
                self.job_id,
                self.store,
                memory_max=self.keep.memory_max,
                spill=lambda: open_spill(self.job_id, self.run_id, self.node),
                bytes_s=self.keep.bytes_s,
                pool=ThreadPoolExecutor(1, thread_name_prefix="penstock-keep"),
                load_manifest=lambda checkpoint: read_manifest(self.store, checkpoint),
            )
            _workers[self.run_id] = worker
            # Imported modules are never garbage. PySpark collects after each task, and would walk all their objects
            # again, for 50 ms of CPU.
            gc.freeze()
        return _workers[self.run_id]

    def __call__(self, partition: int, iterator: Iterable[bytes]) -> Iterator[bytes]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        job = _decode(context.getLocalProperty("penstock.spec") or "")
        if job.mode == "warm":
            self.worker()
            return
        if job.mode == "end":
            os.environ[slots.IDLE] = "0"
            return
        spec = msgspec.structs.replace(job.specs[self.stage], index=self.index)
        # Elements of a placement RDD are empty: they place the task, and carry nothing.
        blobs = [blob for blob in iterator if blob]
        worker = self.worker()
        if job.mode == "flush":
            self._report(worker.flush(spec))
            return
        if self.index in job.splits:
            spec.index, spec.split = job.splits[self.index]
        report, out = worker.run(spec, blobs)
        del blobs
        self._report(report)
        for (stage, container), blob in out.items():
            yield _pack(job.offsets[stage] + container)
            yield blob

    def _report(self, report: TaskReport) -> None:
        report.node = self.node
        self.reports.add([msgspec.msgpack.encode(report)])
