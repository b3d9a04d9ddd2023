"""Stages that are to have another number of containers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.control.concern import Concern
from penstock.control.events import (
    Command,
    RescaleRequested,
    Tell,
)
from penstock.control.load import within_slots
from penstock.control.records import NodeInfo
from penstock.control.topology import StageInfo
from penstock.errors import ConfigError
from penstock.ids import INSTANCES_MAX, StageId

if TYPE_CHECKING:
    from penstock.control.controller import Controller


class Resizes(Concern):
    """A stage that grows gets processes first, then room for the containers, then slices. A stage that shrinks loses
    its slices first, and gives the room up when the last slice has left."""

    def __init__(self, core: Controller) -> None:
        super().__init__(core)
        self.wanted: dict[StageId, int] = {}
        """stage -> number of containers, until the stage has them"""
        self.opening: set[StageId] = set()
        """Stages that get room for more containers of one node: slices of other nodes stay."""

    def planned(self, stage: StageId) -> int:
        return self.wanted.get(stage, self.core.routes.table.instances[stage])

    def most(self, stage: StageId) -> int:
        """The most containers that the stage can have."""
        table = self.core.routes.table
        return table.slices_in(stage) if stage in table.owners else INSTANCES_MAX

    def on_rescale(self, event: RescaleRequested) -> list[Command]:
        core, stage = self.core, event.stage
        try:
            core.routes.table.check(stage, event.instances)
            core.fleet.check_instances(stage, event.instances)
        except ConfigError as error:
            return [Tell(text=error.message.removesuffix("."))]
        wanted = self._numbers(stage, event.instances)
        self.wanted[stage] = wanted
        self.opening.discard(stage)
        targets = event.targets if core.topology[stage].stateful else {}
        core.balance.wait_for_room(stage, targets, f"rescale to {event.instances}")
        core.fleet.assign_homes()
        out = core.waits(f"the rescale of '{stage}' to {event.instances}")
        new = set(range(wanted)) - core.processes.awake(stage)
        return out + (core.processes.start(stage, new) if new else self.carry_out(stage, event.now))

    def carry_out(self, stage: StageId, now: float) -> list[Command]:
        """Every container that will be needed has a process. A stage that shrinks moves its slices; a stage that grows
        gets room at the next epoch, and then its slices move."""
        if stage not in self.wanted:
            return []
        if not self.core.topology[stage].stateful or self.wanted[stage] > self.core.routes.table.instances[stage]:
            return []
        waiting = self.core.balance.room_made(stage)
        if waiting is not None:
            return self.core.balance.ask_usable(stage, *waiting, now)
        return self.core.balance.spread(stage, now, f"rescale to {self.wanted[stage]}")

    def open_slots(self, info: StageInfo, slots: Sequence[int]) -> list[Command]:
        """The containers of one stage that are to work on a node: room for all of them, and a process for each."""
        stage, planned, most = info.id, self.planned(info.id), self.most(info.id)
        if slots[0] >= planned:
            return []  # the stage does nothing on this node
        wanted = max(planned, min(most, slots[-1] + 1))
        out: list[Command] = []
        if slots[-1] >= wanted:
            out.append(Tell(text=f"'{stage}' has {most} slices: it cannot use all the cores"))
        if wanted > planned:
            if stage not in self.wanted:
                self.opening.add(stage)
            self.wanted[stage] = wanted
        processes = self.core.processes
        awake = processes.awake(stage) if info.stateful else processes.up[stage]
        return out + processes.start(stage, {c for c in slots if c < wanted} - awake)

    def grow(self, nodes: Sequence[NodeInfo]) -> list[Command]:
        """Nodes that no container was left for: every stage gets as many more containers as these have cores."""
        cores = sum(n.cores for n in nodes)
        if not cores:
            return []
        table, processes = self.core.routes.table, self.core.processes
        for stage, have in table.instances.items():
            self.wanted[stage] = min(have + cores, self.most(stage) if stage in table.owners else have + cores)
        self.core.fleet.assign_homes()
        out: list[Command] = []
        for stage in table.owners:
            out += processes.start(stage, set(range(self.wanted[stage])) - processes.awake(stage))
        return out

    def make_room(self) -> None:
        """Between two epochs: stages that are ready for it get their new number of containers."""
        for stage in list(self.wanted):
            if not self.core.processes.starting(stage):
                self._make_room(stage, self.wanted[stage])

    def _make_room(self, stage: StageId, wanted: int) -> None:
        core, table = self.core, self.core.routes.table
        if not core.topology[stage].stateful:
            core.routes.put(table.rescale(stage, wanted))
            del self.wanted[stage]
        elif wanted > table.instances[stage]:
            core.routes.put(table.resized(stage, wanted))
            del self.wanted[stage]
            if stage in self.opening:
                self.opening.discard(stage)  # the node's slices are dealt out anew, the others stay
            elif not core.balance.waits_for_room(stage):
                core.balance.respread(f"rescale of '{stage}' to {wanted}")
        elif max(table.owners[stage]) < wanted and not core.moves.of(stage):
            core.routes.put(table.resized(stage, wanted))
            core.processes.limit(stage, wanted)
            del self.wanted[stage]
        elif not core.moves.of(stage):
            core.balance.respread(f"rescale of '{stage}' to {wanted}")  # what was on its way up must come down again

    def forget(self, stage: StageId | None) -> None:
        """An order is cancelled: of this stage, or of all."""
        for known in [s for s in self.wanted if stage in (None, s)]:
            del self.wanted[known]

    def _numbers(self, stage: StageId, instances: int) -> int:
        """The container count that leaves ``instances`` usable containers, after those beyond a node's cores."""
        homes, cores = self.core.routes.table.homes_of(stage), self.core.fleet.cores
        count = instances
        while count < self.most(stage) and len(within_slots(range(count), homes, cores)) < instances:
            count += 1
        return count
