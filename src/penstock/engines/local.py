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
    RunStage,
    StageDone,
    StageFailed,
    WarmedUp,
    WarmUp,
)
from penstock.control.records import NodeInfo, TaskReport
from penstock.control.routing import RoutingTable
from penstock.engines.merging import Merging, merge_here
from penstock.engines.protocol import Post
from penstock.engines.task import TaskSpec, Worker
from penstock.ids import Attempt, StageId
from penstock.plan import Plan
from penstock.state.store import Store


def task_specs(command: RunStage, plan: Plan, splits: list[dict[str, Any]], on_error: str) -> list[TaskSpec]:
    """One spec for each task of a stage: each split of a source, each container of a keyed stage."""
    stage, routing = plan.by_id[command.stage], command.routing
    wanted = {e.downstream for e in stage.outs} | ({stage.id} if stage.keyed is not None else set())
    base = TaskSpec(
        stage=command.stage,
        epoch=command.epoch,
        attempt=command.attempt,
        index=0,
        plan=command.plan,
        checkpoint=command.checkpoint,
        seal=command.seal,
        slicemaps={s: routing.slicemaps[s] for s in wanted},
        owners={s: list(routing.owners[s]) for s in wanted},
        instances={s: routing.instances[s] for s in wanted},
        watermark_before=command.time.before,
        watermark=command.time.watermark,
        arrivals=command.time.arrivals,
        ports=command.time.ports,
        clock_ms=command.clock_ms,
        on_error=on_error,
        copies=[list(held) for held in command.peers.copies],
        commits=list(command.commits),
        sends=command.peers.sends,
        handover=command.peers.handover,
        quiet=command.quiet,
        hot=command.hot,
        progress=command.progress,
    )
    if stage.source is not None:
        return [replace_spec(base, index=i, split=s) for i, s in enumerate(splits or [None])]  # type: ignore[list-item]
    return [replace_spec(base, index=i) for i in command.containers]


def flush_specs(command: Flush, plan: Plan) -> list[TaskSpec]:
    routing = command.routing
    return [
        TaskSpec(
            stage=stage.id,
            epoch=command.epoch,
            attempt=command.attempt,
            index=index,
            plan=command.plan,
            checkpoint=command.checkpoint,
            seal=True,
            slicemaps={stage.id: routing.slicemaps[stage.id]},
            owners={stage.id: list(routing.owners[stage.id])},
            instances={stage.id: routing.instances[stage.id]},
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

    def __init__(
        self, plan: Plan, job_id: str, store: Store, on_error: str, cores: int = 1, worker: type[Worker] = Worker
    ) -> None:
        self.plan = plan
        self.on_error = on_error
        self.cores = cores
        self.worker = worker(plan, job_id, store)
        self.blobs: dict[tuple[int, str, int], list[bytes]] = {}
        """(epoch, stage, container) -> what upstream tasks sent"""
        self.sent: dict[tuple[int, str, int], list[bytes]] = {}
        """The same, for what containers of one stage sent to each other."""
        self.post: Post = lambda event: None

    def start(self, post: Post) -> None:
        self.post = post

    def run_stage(self, command: RunStage, splits: list[dict[str, Any]]) -> None:
        began = time.monotonic()
        reports: list[TaskReport] = []
        try:
            for spec in task_specs(command, self.plan, splits, self.on_error):
                inputs = self.blobs.get((command.epoch, command.stage, spec.index), [])
                if command.peers.receives:
                    inputs = [*inputs, *self.sent.get((command.epoch - 1, command.stage, spec.index), [])]
                report, out = self.worker.run(spec, inputs)
                report.node = "local"
                reports.append(report)
                for (stage, container), blob in out.items():
                    place = self.sent if stage == command.stage else self.blobs
                    place.setdefault((command.epoch, stage, container), []).append(blob)
        except (OSError, MemoryError) as error:
            self.post(
                StageFailed(
                    now=time.monotonic(),
                    epoch=command.epoch,
                    stage=command.stage,
                    attempt=command.attempt,
                    reason=repr(error),
                )
            )
            return
        elapsed = (time.monotonic() - began) * 1000
        now = time.monotonic()
        self.post(
            StageDone(
                now=now,
                epoch=command.epoch,
                stage=command.stage,
                attempt=command.attempt,
                reports=tuple(reports),
                elapsed_ms=elapsed,
            )
        )

    def flush(self, command: Flush) -> None:
        try:
            reports = tuple(self.worker.flush(spec) for spec in flush_specs(command, self.plan))
        except (OSError, MemoryError) as error:
            self.post(
                StageFailed(
                    now=time.monotonic(),
                    epoch=command.epoch,
                    stage=StageId("flush"),
                    attempt=command.attempt,
                    reason=repr(error),
                )
            )
            return
        self.post(Flushed(now=time.monotonic(), epoch=command.epoch, attempt=command.attempt, reports=reports))

    def prepare(self, routing: RoutingTable) -> None:
        pass

    def warm_up(self, command: WarmUp) -> None:
        self.post(WarmedUp(now=time.monotonic(), stage=command.stage, containers=command.containers))

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
