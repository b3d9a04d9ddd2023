"""The ways of others, in the same engine: what benchmarks compare Penstock with. No setting leads here.

``StopAndCopy`` is passed to ``penstock.engines.job.start`` as ``make_controller``, ``FullSnapshots`` as ``worker``.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from penstock.control import placement
from penstock.control.balance import Balance
from penstock.control.controller import Controller
from penstock.control.events import (
    Command,
)
from penstock.control.resizes import Resizes
from penstock.control.routing import RoutingTable
from penstock.control.topology import StageInfo
from penstock.engines.task import Container, TaskSpec, Worker, Written, delta_file
from penstock.ids import StageId
from penstock.plan import Stage


class StandstillResizes(Resizes):
    """Rescales that wait until no epoch is in flight and a checkpoint covers everything."""

    def __init__(self, core: StopAndCopy) -> None:
        super().__init__(core)
        self.due: list[tuple[StageId, int]] = []

    def carry_out(self, stage: StageId, now: float) -> list[Command]:
        if stage in self.wanted:
            self.due.append((stage, self.wanted.pop(stage)))
        return []

    def open_slots(self, info: StageInfo, slots: Sequence[int]) -> list[Command]:
        """Other cores of a node also wait for the standstill, and for the processes that a larger stage needs."""
        stage, before = info.id, self.planned(info.id)
        out = super().open_slots(info, slots)
        if slots[0] < before and (self.planned(stage) == before or not self.core.processes.starting(stage)):
            self.due.append((stage, self.planned(stage)))
            self.wanted.pop(stage, None)
        return out

    def make_room(self) -> None:
        """Stages get their new number of containers at rest only."""


class StandstillBalance(Balance):
    """The slices of a node with other cores are dealt out anew at the standstill, not by moves."""

    def respread_node(self, node: str, reason: str) -> None:
        """``StopAndCopy.at_rest`` does it."""


class StopAndCopy(Controller):
    """For a rescale, or other cores of a node, everything stops, a checkpoint is taken, and the new owners load it."""

    resizes: StandstillResizes

    def __init__(self, topology: Any, routing: RoutingTable, pacer: Any, settings: Any, blank: Any) -> None:
        super().__init__(topology, routing, pacer, settings, blank)
        self.resizes = StandstillResizes(self)
        self.balance = StandstillBalance(self)

    @property
    def ending(self) -> bool:
        return super().ending or bool(self.resizes.due)

    def at_rest(self, now: float) -> list[Command]:
        over = super().ending or self.epochs.final or self.epochs.enough()
        for stage, instances in self.resizes.due:
            self.moves.cancel(stage, None, now)  # their targets may be among the containers that go
            self.routes.put(self.routes.table.rescale(stage, instances))
        if self.resizes.due:
            self.resizes.due.clear()
            self.fleet.assign_homes()
            self._vacate()
            self.holders.refresh()
        return super().at_rest(now) if over else []

    def _vacate(self) -> None:
        """Containers that may not work give all their slices away."""
        self.resizes.opening.clear()
        owners = dict(self.routes.table.owners)
        for stage in owners if self.fleet.cores else ():
            peers = self.balance.peers(stage)
            if peers and not set(owners[stage]) <= {p.container for p in peers}:
                held = self.holders.holding(stage, {p.container for p in peers})
                owners[stage] = placement.spread(owners[stage], peers, holding=held)  # type: ignore[assignment]
        self.routes.assign_owners(owners)


class FullSnapshots(Worker):
    """A checkpoint writes the whole state before the epoch goes on."""

    def _seal(self, stage: Stage, spec: TaskSpec, container: Container) -> None:
        container.table.seal(spec.epoch)
        whole = container.table.export(container.slices, spec.slicemap)
        name = f"state/{spec.stage}/{spec.epoch:012d}-{spec.attempt:04d}-{spec.index:04d}.base"
        *_, data, file = delta_file(name, whole, self.job_id, spec, kind="base")
        self.store.put(name, data)
        ready: Future[Written] = Future()
        ready.set_result(Written.of(spec, file))
        container.pending.append(ready)
