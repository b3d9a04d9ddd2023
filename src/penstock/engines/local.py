"""The local engine: the same controller, the same operators, one process, one thread, no Spark.

It is the oracle that the equivalence tests compare with, and what ``ps.run_local`` gives to users for tests of their
own flows. It has containers and slices like Spark's, so that rescaling can be tried here too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from penstock.control.events import (
    Compact,
    Event,
    Flush,
    Flushed,
    NodeInfo,
    RunStage,
    StageDone,
    StageFailed,
    TaskReport,
    WarmedUp,
    WarmUp,
)
from penstock.control.routing import RoutingTable
from penstock.engines.merging import Merging, merge_here
from penstock.engines.protocol import Post
from penstock.engines.task import TaskSpec, Worker
from penstock.ids import Attempt, StageId
from penstock.plan import Plan
from penstock.state.store import Store


def task_specs(
    command: RunStage, plan: Plan, routing: RoutingTable, splits: list[dict[str, Any]], on_error: str
) -> list[TaskSpec]:
    """One spec for each task of a stage: each split of a source, each container of a keyed stage."""
    stage = plan.by_id[command.stage]
    wanted = {e.downstream for e in stage.outs} | ({stage.id} if stage.keyed is not None else set())
    base = TaskSpec(
        command.stage,
        command.epoch,
        command.attempt,
        0,
        command.checkpoint,
        command.seal,
        {s: routing.slicemaps[s] for s in wanted},
        {s: list(routing.owners[s]) for s in wanted},
        {s: routing.instances[s] for s in wanted},
        None,
        command.watermark_before,
        command.watermark,
        command.arrivals,
        command.clock_ms,
        on_error,
        command.ports,
        [list(held) for held in command.copies],
        list(command.commits),
        command.sends,
        command.handover,
        command.full,
        command.quiet,
        command.hot,
        command.progress,
    )
    if stage.source is not None:
        return [replace_spec(base, index=i, split=s) for i, s in enumerate(splits or [None])]  # type: ignore[list-item]
    return [replace_spec(base, index=i) for i in command.containers]


def flush_specs(command: Flush, plan: Plan, routing: RoutingTable) -> list[TaskSpec]:
    return [
        TaskSpec(
            stage.id,
            command.epoch,
            command.attempt,
            index,
            command.checkpoint,
            True,
            {stage.id: routing.slicemaps[stage.id]},
            {stage.id: list(routing.owners[stage.id])},
            {stage.id: routing.instances[stage.id]},
            full=command.full,
            progress=command.progress,
        )
        for stage in plan.stages
        for index in command.containers.get(stage.id, ())
    ]


def replace_spec(spec: TaskSpec, **changes: Any) -> TaskSpec:
    return msgspec.structs.replace(spec, **changes)


class LocalEngine:
    name = "local"
    spark = None

    def __init__(self, plan: Plan, job_id: str, store: Store, on_error: str, cores: int = 1) -> None:
        self.plan = plan
        self.on_error = on_error
        self.cores = cores
        self.worker = Worker(plan, job_id, store)
        self.blobs: dict[tuple[int, str, int], list[bytes]] = {}
        """(epoch, stage, container) -> what upstream tasks sent"""
        self.sent: dict[tuple[int, str, int], list[bytes]] = {}
        """The same, for what containers of one stage sent to each other."""
        self.post: Post = lambda event: None

    def start(self, post: Post) -> None:
        self.post = post

    def run_stage(self, command: RunStage, routing: RoutingTable, splits: list[dict[str, Any]]) -> None:
        began = time.monotonic()
        reports: list[TaskReport] = []
        try:
            for spec in task_specs(command, self.plan, routing, splits, self.on_error):
                inputs = self.blobs.get((command.epoch, command.stage, spec.index), [])
                if command.receives:
                    inputs = [*inputs, *self.sent.get((command.epoch - 1, command.stage, spec.index), [])]
                report, out = self.worker.run(spec, inputs)
                report.node = "local"
                reports.append(report)
                for (stage, container), blob in out.items():
                    place = self.sent if stage == command.stage else self.blobs
                    place.setdefault((command.epoch, stage, container), []).append(blob)
        except (OSError, MemoryError) as error:
            self.post(StageFailed(time.monotonic(), command.epoch, command.stage, command.attempt, repr(error)))
            return
        elapsed = (time.monotonic() - began) * 1000
        now = time.monotonic()
        self.post(StageDone(now, command.epoch, command.stage, command.attempt, tuple(reports), elapsed))

    def flush(self, command: Flush, routing: RoutingTable) -> None:
        try:
            reports = tuple(self.worker.flush(spec) for spec in flush_specs(command, self.plan, routing))
        except (OSError, MemoryError) as error:
            self.post(StageFailed(time.monotonic(), command.epoch, StageId("flush"), command.attempt, repr(error)))
            return
        self.post(Flushed(time.monotonic(), command.epoch, command.attempt, reports))

    def prepare(self, routing: RoutingTable) -> None:
        pass

    def warm_up(self, command: WarmUp) -> None:
        self.post(WarmedUp(time.monotonic(), command.stage, command.containers))

    def compact(self, command: Compact, run: Callable[[Merging], Event]) -> None:
        self.post(run(merge_here))

    def cancel(self, attempt: Attempt) -> None:
        self.blobs.clear()
        self.sent.clear()

    def release(self, epoch: int) -> None:
        self.blobs = {k: v for k, v in self.blobs.items() if k[0] > epoch}
        self.sent = {k: v for k, v in self.sent.items() if k[0] > epoch}

    def nodes(self) -> tuple[NodeInfo, ...]:
        return (NodeInfo("local", cores=self.cores),)

    def release_nodes(self, nodes: Sequence[str]) -> None:
        pass

    def stop(self) -> None:
        self.blobs.clear()
        self.worker.writer.shutdown(wait=True)


__all__ = ["LocalEngine", "StageId", "flush_specs", "task_specs"]
