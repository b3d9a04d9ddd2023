"""How slices are spread over containers, and what each of them has to do."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from penstock.control import placement
from penstock.control.concern import Concern
from penstock.control.epochs import EpochRun
from penstock.control.events import (
    Command,
    HotSlices,
    RebalanceRequested,
)
from penstock.control.load import LOAD_EPOCHS, SliceLoad, within_slots
from penstock.control.placement import Peer
from penstock.control.records import TaskReport
from penstock.ids import INSTANCES_MAX, StageId

if TYPE_CHECKING:
    from penstock.control.controller import Controller


class Balance(Concern):
    def __init__(self, core: Controller) -> None:
        super().__init__(core)
        self.schedule = placement.schedule(core.settings.schedule)
        self.load = SliceLoad()
        self.state_bytes: dict[StageId, int] = {}
        """Bytes of state of each stage, as last reported."""
        self.hot: dict[StageId, tuple[int, ...]] = {}
        """Slices whose hottest keys are wanted."""
        self.reasons: set[str] = set()
        """Why slices should be spread anew, when there is somebody to take them."""
        self.node_reasons: dict[str, str] = {}
        """Nodes whose slices should be dealt out anew among their own containers -> why."""
        self.waiting: dict[StageId, tuple[dict[int, int], str]] = {}
        """Moves that wait until their stage has been resized, and why they were asked for."""

    # -- what is known -------------------------------------------------------------------------------------------

    def peers(self, stage: StageId, instances: int | None = None) -> list[Peer]:
        """Containers that may own slices of a stage. ``instances``: also the ones that are to be emptied."""
        core = self.core
        homes, nodes = core.routes.table.homes_of(stage), core.fleet.nodes
        # Containers that are still to come get their share when there is room for them.
        limit = (
            instances if instances is not None else min(core.routes.table.instances[stage], core.resizes.planned(stage))
        )
        able = [
            c
            for c in range(limit)
            if homes.get(c) in nodes
            and homes[c] not in core.fleet.leaving
            and (stage, c) not in core.processes.suspects
        ]
        slots = set(within_slots(able, homes, core.fleet.cores))
        if instances is not None:  # a container that must be emptied still counts while it has something
            slots |= set(core.routes.table.owners.get(stage, ()))
        return [Peer(c, homes[c], nodes[homes[c]].zone) for c in able if c in slots]

    def slice_bytes(self, stage: StageId) -> float:
        """Bytes of state of a slice, on average."""
        return self.state_bytes.get(stage, 0) / self.core.routes.table.slices_in(stage)

    def note(self, stage: StageId, reports: Sequence[TaskReport], now: float) -> None:
        self.load.note(stage, reports, now)
        self.state_bytes[stage] = sum(report.state_bytes for report in reports)

    def on_hot(self, event: HotSlices) -> list[Command]:
        self.hot = {s: tuple(slices) for s, slices in event.slices.items() if slices}
        return []

    def asked_keys(self, run: EpochRun, stage: StageId) -> tuple[int, ...]:
        """Slices whose owners should say in this epoch which keys are the hottest: now and then."""
        first_time = run.epoch > self.core.epochs.published
        return self.hot.get(stage, ()) if first_time and run.epoch % LOAD_EPOCHS == 0 else ()

    # -- wishes --------------------------------------------------------------------------------------------------

    def respread(self, reason: str) -> None:
        self.reasons.add(reason)

    def respread_node(self, node: str, reason: str) -> None:
        self.node_reasons[node] = reason

    def keep_nodes(self, nodes: Collection[str]) -> None:
        """Nodes that are gone have nothing to be dealt out."""
        self.node_reasons = {n: reason for n, reason in self.node_reasons.items() if n in nodes}

    def on_rebalance(self, event: RebalanceRequested) -> list[Command]:
        self.respread(event.reason)
        return self.core.waits("the rebalance")

    def wait_for_room(self, stage: StageId, targets: Mapping[int, int], cause: str) -> None:
        """These moves are to begin when the stage has been resized. They replace what waited before."""
        self.waiting.pop(stage, None)
        if targets:
            self.waiting[stage] = (dict(targets), cause)

    def waits_for_room(self, stage: StageId) -> bool:
        return stage in self.waiting

    def room_made(self, stage: StageId) -> tuple[dict[int, int], str] | None:
        """The moves that waited for this stage, which wait no longer."""
        return self.waiting.pop(stage, None)

    def forget(self, stage: StageId | None) -> None:
        """An order is cancelled: of this stage, or of all."""
        self.waiting = {s: t for s, t in self.waiting.items() if stage not in (None, s)}
        if stage is None:
            self.node_reasons.clear()

    # -- granting them -------------------------------------------------------------------------------------------

    def steer(self, now: float) -> list[Command]:
        """Begin the moves that are due."""
        out: list[Command] = []
        if misplaced := self._misplaced() if not self.reasons else []:
            # Slices of other stages stay where they were put: somebody may have asked for that just now.
            for stage in misplaced:
                out += self.spread(stage, now, "slices that have to go")
        elif self.reasons:
            cause = ", ".join(sorted(self.reasons))
            self.reasons.clear()
            for info in self.core.topology.stateful:
                out += self.spread(info.id, now, cause)
        if self.node_reasons or self.waiting:
            out += self._deal(now)
        return out

    def spread(self, stage: StageId, now: float, cause: str) -> list[Command]:
        """Spread the slices of a stage over all containers that may own some, moving as few as that takes."""
        peers = self.peers(stage)
        if not peers:
            return []
        owners = self.core.routes.table.owners[stage]
        usable = {p.container for p in peers}
        moving = self.core.moves.goals(stage)
        # What is on its way goes on if it can: else it would be copied for nothing.
        planned = [c if (c := moving.get(s, owner)) in usable else owner for s, owner in enumerate(owners)]
        load = self.load.weights(stage, len(owners))
        wanted = self.schedule.assign(planned, peers, load, self.core.holders.holding(stage, usable))
        targets = {s: c for s, c in enumerate(wanted) if c != owners[s] or s in moving}
        return self.core.moves.ask(stage, targets, now, cause)

    def _spread_within(self, stage: StageId, node: str, now: float, cause: str) -> list[Command]:
        """Deal the slices of one node out anew to its containers. Slices of other nodes stay where they are."""
        table = self.core.routes.table
        slots = [p for p in self.peers(stage) if p.node == node]
        owners = table.owners[stage]
        moving = self.core.moves.goals(stage)
        goal = [moving.get(s, owner) for s, owner in enumerate(owners)]
        mine = [s for s, c in enumerate(goal) if table.homes_of(stage).get(c) == node]
        if not slots or not mine:
            return []
        load = self.load.weights(stage, len(owners))
        held = self.core.holders.holding(stage, {p.container for p in slots})
        wanted = self.schedule.assign(
            [goal[s] for s in mine],
            slots,
            load and [load[s] for s in mine],
            {i: held[s] for i, s in enumerate(mine) if s in held},
        )
        targets = {s: c for s, c in zip(mine, wanted, strict=True) if c != owners[s] or s in moving}
        return self.core.moves.ask(stage, targets, now, cause)

    def ask_usable(self, stage: StageId, targets: Mapping[int, int], cause: str, now: float) -> list[Command]:
        """Begin the moves whose slice and target are there."""
        usable = {p.container for p in self.peers(stage)}
        able = {s: c for s, c in targets.items() if c in usable and 0 <= s < self.core.routes.table.slices_in(stage)}
        return self.core.moves.ask(stage, able, now, cause)

    def _deal(self, now: float) -> list[Command]:
        """Begin the moves that waited for room, and deal out anew the slices of nodes whose cores have changed."""
        out: list[Command] = []
        resizes = self.core.resizes
        for stage in [s for s in self.waiting if s not in resizes.wanted]:
            out += self.ask_usable(stage, *self.waiting.pop(stage), now)
        resizes.opening &= resizes.wanted.keys()
        for node in sorted(self.node_reasons) if not resizes.opening else ():
            if not self._landing(node):
                cause = self.node_reasons.pop(node)
                for info in self.core.topology.stateful:
                    out += self._spread_within(info.id, node, now, cause)
        return out

    def _landing(self, node: str) -> bool:
        """Is a slice about to arrive at a container of the node that may not work? The slice must go on from there,
        which can be asked for when it has arrived.
        """
        table = self.core.routes.table
        return any(
            table.homes_of(m.stage).get(m.target) == node and all(p.container != m.target for p in self.peers(m.stage))
            for m in self.core.moves.in_phase("handover", "switch", "release")
        )

    def _misplaced(self) -> list[StageId]:
        """Stages with slices that nobody fetches from a node that is to leave, or a container that is to go. They were
        handed over just when it was told to, their move came to nothing, or there was nobody to take them.
        """
        core, table = self.core, self.core.routes.table
        going = core.fleet.leaving - core.fleet.drained.keys()
        if not going and not core.resizes.wanted:
            return []
        there = table.homes_on(going)
        found = []
        for info in core.topology.stateful:
            limit = core.resizes.wanted.get(info.id, INSTANCES_MAX)
            lost = [s for s, c in enumerate(table.owners[info.id]) if c in there[info.id] or c >= limit]
            if any((info.id, s) not in core.moves.by_slice for s in lost) and self.peers(info.id):
                found.append(info.id)
        return found
