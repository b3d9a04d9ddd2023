"""Who keeps copies of slices, how current the copies are, and what containers of one stage send to each other."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from penstock.control import placement
from penstock.control.concern import Concern
from penstock.control.epochs import EpochRun
from penstock.control.events import (
    Command,
    Tell,
)
from penstock.control.naming import named
from penstock.control.records import PeerOrders, TaskReport
from penstock.control.topology import StageInfo
from penstock.ids import Epoch, StageId
from penstock.state.backup import Commit

if TYPE_CHECKING:
    from penstock.control.controller import Controller

COMMITS_KEPT = 6
"""Checkpoints that each task tells its container's copies of. A copy further behind is read from the store."""


class Holders(Concern):
    def __init__(self, core: Controller) -> None:
        super().__init__(core)
        self.policy = placement.policy(core.settings.placement)
        self.bad_nodes: set[str] = set()
        """Nodes that cannot keep copies."""
        self.waiting: set[tuple[StageId, int]] = set()
        """Containers that cannot read the checkpoint store just now. The copies that they have are still good."""
        self.held: dict[tuple[StageId, int], tuple[int, frozenset[int]]] = {}
        """container -> (checkpoint, slices of which its copies stand at that checkpoint), as it has told"""
        self.refused: dict[tuple[StageId, int], frozenset[int]] = {}
        """container -> slices that it has no room for a copy of"""
        self.commits: dict[StageId, tuple[Commit, ...]] = {}
        """The last checkpoints of each stage, oldest first."""
        self.unsent: set[StageId] = set()
        """Stages with containers that have something to send to their peers."""
        self.sent: dict[Epoch, tuple[Mapping[StageId, int], set[StageId]]] = {}
        """Epochs in which containers sent something to their peers: the numbering they used, and the stages."""

    # -- who keeps what ------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Find holders for all slices, given who owns them now."""
        core, table = self.core, self.core.routes.table
        holders: dict[StageId, tuple[tuple[int, ...], ...]] = {}
        for info in core.topology.stateful if core.settings.backups else ():
            owners = table.owners[info.id]
            awake = core.processes.awake(info.id)
            peers = [p for p in core.balance.peers(info.id, table.instances[info.id]) if p.container in awake]
            able = [p for p in peers if p.node not in self.bad_nodes]
            homed = all(c in table.homes_of(info.id) for c in owners)
            if homed and len({p.node for p in peers}) > 1:
                before = table.holders.get(info.id, ())
                holders[info.id] = self.policy.holders(owners, able, core.settings.backups, before)
        if holders != dict(table.holders):
            core.routes.amend(holders=holders)

    def copies(self, run: EpochRun, stage: StageInfo) -> tuple[tuple[int, ...], ...]:
        """For each slice the containers that keep a copy: backup holders, and targets of moves. Empty: nobody."""
        if not stage.stateful:
            return ()
        table = run.routing
        owners = table.owners[stage.id]
        holders = table.holders.get(stage.id, ((),) * len(owners))
        # An epoch that began before a target had a node cannot reach it.
        usable = {c for c in range(table.instances[stage.id]) if c in table.homes_of(stage.id)}
        targets = {s: c for s, c in self.core.moves.copies(stage.id).items() if c in usable}
        copies = tuple(
            tuple(sorted({*held, *([targets[s]] if s in targets else [])} - {owners[s]}))
            for s, held in enumerate(holders)
        )
        return copies if any(copies) else ()

    def keep_nodes(self, nodes: Collection[str]) -> None:
        self.bad_nodes &= set(nodes)

    # -- how current copies are ----------------------------------------------------------------------------------

    def holding(self, stage: StageId, usable: Collection[int]) -> dict[int, list[int]]:
        """slice -> containers with a copy that is current, or behind by no more than they are told of"""
        found: dict[int, list[int]] = {}
        for container in sorted(usable):
            checkpoint, slices = self.held.get((stage, container), (-1, frozenset()))
            for number in slices if self._near(stage, checkpoint) else ():
                found.setdefault(number, []).append(container)
        return found

    def can_take_over(self, stage: StageId, number: int, target: int) -> bool:
        """Has the target a copy of the slice? A target without room for a copy beside its own slices never gets one: it
        takes the slice over from the durable checkpoint, and the epoch waits for that."""
        checkpoint, slices = self.held.get((stage, target), (-1, frozenset()))
        if number in slices and self._near(stage, checkpoint):
            return True
        return not self.core.epochs.away and number in self.refused.get((stage, target), ())

    def _near(self, stage: StageId, checkpoint: int) -> bool:
        """Is it from this checkpoint to the last one no further than the commits that go with every task?"""
        committed = self.core.checkpoints.committed
        return checkpoint == committed or any(c.before == checkpoint for c in self.commits.get(stage, ()))

    def lost(self, lost: Mapping[StageId, set[int]]) -> None:
        for stage, gone in lost.items():
            for container in gone:
                self.held.pop((stage, container), None)
                self.refused.pop((stage, container), None)

    def committed(self, stage: StageId, commit: Commit) -> None:
        self.commits[stage] = (*self.commits.get(stage, ())[1 - COMMITS_KEPT :], commit)

    def note(self, stage: StageId, reports: Sequence[TaskReport]) -> list[Command]:
        """What containers say of their copies."""
        out: list[Command] = []
        self.unsent.discard(stage)
        for report in reports:
            container = (stage, report.index)
            if report.held is not None:
                self.held[container] = (report.held[0], frozenset(report.held[1]))
                self.refused[container] = frozenset(report.refused)
            if report.unsent:
                self.unsent.add(stage)
            if report.waits and container not in self.waiting:
                self.waiting.add(container)
                out.append(Tell(text=f"container {report.index}: {report.waits}"))
            elif not report.waits:
                self.waiting.discard(container)
            node = self.core.routes.table.homes_of(stage).get(report.index, "") if report.problem else ""
            if node and node not in self.bad_nodes:
                self.bad_nodes.add(node)
                out.append(Tell(text=f"{named([node])} keeps no backups any more: {report.problem}"))
        return out

    # -- what containers of one stage send to each other ------------------------------------------------------------

    def orders(self, run: EpochRun, stage: StageInfo) -> PeerOrders:
        """What the stage's containers do for each other in this epoch."""
        copies = self.copies(run, stage)
        handover = run.handover.get(stage.id, {})
        pieces = stage.id in self.unsent or self.core.checkpoints.expects(stage.id)
        if handover or (copies and pieces):
            run.sends.add(stage.id)
            self.sent[run.epoch] = (run.routing.instances, run.sends)
        numbering, senders = self.sent.get(Epoch(run.epoch - 1), ({}, set()))
        return PeerOrders(
            copies=copies,
            sends=stage.id in run.sends,
            receives=stage.id in senders and numbering == run.routing.instances,
            handover=handover,
        )

    def forget_sent(self, before: Epoch) -> None:
        """What was sent in epochs before this one has been read."""
        self.sent = {e: s for e, s in self.sent.items() if e >= before}


def keepers(orders: PeerOrders) -> Iterable[int]:
    """Containers that keep a copy of some slice."""
    return {c for held in orders.copies for c in held}
