"""Which containers have a process, which are being started, and which hang."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from penstock.control.concern import Concern
from penstock.control.events import (
    Command,
    Stuck,
    WarmedUp,
    WarmUp,
)
from penstock.ids import StageId

if TYPE_CHECKING:
    from penstock.control.controller import Controller


class Processes(Concern):
    def __init__(self, core: Controller) -> None:
        super().__init__(core)
        self.up: dict[StageId, set[int]] = {s.id: set() for s in core.topology.stages}
        """Containers known to have a process."""
        self.warming: set[tuple[StageId, int]] = set()
        """Containers whose process is being started."""
        self.warmed: set[tuple[StageId, int]] = set()
        """Containers that have a process and wait until others on their node have one."""
        self.suspects: set[tuple[StageId, int]] = set()
        """Containers that hung, until they answer again."""

    def awake(self, stage: StageId) -> set[int]:
        """Containers that have a process, or get one without being asked."""
        return self.up[stage] | set(self.core.routes.table.occupied(stage))

    def starting(self, stage: StageId) -> bool:
        return any(s == stage for s, _ in self.warming | self.warmed)

    def start(self, stage: StageId, containers: Collection[int]) -> list[Command]:
        """Start these containers' processes, unless they are being started."""
        cold = tuple(c for c in sorted(containers) if (stage, c) not in self.warming | self.warmed)
        if not cold:
            return []
        self.warming |= {(stage, c) for c in cold}
        homes = self.core.routes.table.homes_of(stage)
        return [WarmUp(stage=stage, containers=cold, homes={c: homes[c] for c in cold if c in homes})]

    def wake_suspects(self) -> list[Command]:
        """Ask containers that hung for a sign of life."""
        out: list[Command] = []
        for stage in sorted({s for s, _ in self.suspects}):
            out += self.start(stage, {c for s, c in self.suspects if s == stage})
        return out

    def lost(self, lost: Mapping[StageId, set[int]]) -> None:
        for stage, gone in lost.items():
            self.up[stage] -= gone

    def answered(self, stage: StageId, containers: Collection[int]) -> None:
        """These containers have done a task."""
        self.up[stage] |= set(containers)

    def limit(self, stage: StageId, instances: int) -> None:
        """The stage has no more containers than this."""
        self.up[stage] = {c for c in self.up[stage] if c < instances}

    def on_warmed_up(self, event: WarmedUp) -> list[Command]:
        pairs = {(event.stage, c) for c in event.containers}
        self.warming -= pairs
        self.warmed |= pairs
        # A process that is being started takes up its node's cores. Work sent to the node would wait, and with that
        # work the whole epoch.
        table = self.core.routes.table
        starting = {table.homes_of(s).get(c) for s, c in self.warming - self.suspects}
        ready = {(s, c) for s, c in self.warmed if table.homes_of(s).get(c) not in starting}
        self.warmed -= ready
        if ready & self.suspects:
            self.suspects -= ready
            self.core.balance.respread("a container answers again")
        out: list[Command] = []
        for stage in sorted({s for s, _ in ready}):
            containers = {c for s, c in ready if s == stage}
            self.up[stage] |= containers
            self.core.moves.target_up(stage, containers)
            out += self.core.resizes.carry_out(stage, event.now)
        return out

    def on_stuck(self, event: Stuck) -> list[Command]:
        if event.attempt != self.core.attempts.current or self.core.attempts.recovering:
            return []
        hung = set(event.containers)
        which = ", ".join(map(str, sorted(hung)))
        reason = f"container {which} of '{event.stage}' made no progress for {event.seconds:.1f} s"
        if not hung >= set(self.core.routes.table.occupied(event.stage)):
            self.suspects |= {(event.stage, c) for c in hung}
        return self.core.lose({event.stage: hung}, event.now, reason)
