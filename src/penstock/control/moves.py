"""Slices on the move: the phases of live migration. One object for each move says everything about it.

``prepare``
    The target's process is being started, if it does not run yet.
``rebuild``
    The target makes a copy of the slice in the background: it is a backup holder from now on, which starts from the
    checkpoint and is kept up to date like any other. If it held a backup before, nothing is copied.
``handover``
    The copy is current at the last checkpoint. In epoch ``switch - 1`` the source sends what changed since.
``switch``
    From epoch ``switch`` on the routing table names the target. The source has served until then, and nobody waits.
``release``
    The target has served an epoch, and the source forgets the slice. A failure before the next checkpoint goes back to
    the checkpoint before, which both can do. When the next one is complete the move is over.

A move can be cancelled, time out or lose its target in the first two phases, and nothing has happened. From the
handover on a recovery carries it through.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.control.concern import Concern
from penstock.control.events import (
    CancelMovesRequested,
    Command,
    MoveRequested,
    Tell,
)
from penstock.control.naming import listed, named
from penstock.ids import Epoch, StageId

if TYPE_CHECKING:
    from penstock.control.controller import Controller

PHASES = ("prepare", "rebuild", "handover", "switch", "release")
OPEN = ("prepare", "rebuild")
"""Phases in which nothing has changed yet: the move can be called off."""
COPYING = ("rebuild", "handover", "switch")
"""Phases in which the target keeps a copy of the slice."""
CHANGING = ("handover", "switch")
"""Phases in which no checkpoint may open: old and new owner would stand at different ones."""
DECIDED = ("handover", "switch", "release")
"""Phases in which the move waits for a checkpoint to be over."""
SWITCH_BYTES = 16 * 2**20
"""State of one stage that a container takes over in one epoch, at least one slice. While the container brings the
slices up it does nothing else, and that must not take longer the more there is to move."""
ENDED_KEPT = 100


@dataclass(frozen=True)
class Move:
    stage: StageId
    slice: int
    source: int
    target: int
    phase: str
    since: float
    """When the move was asked for, in seconds of the events' clock."""
    cause: str
    """Who asked for the move, and why."""
    switch: Epoch | None = None
    """The first epoch in which the target owns the slice."""

    def __str__(self) -> str:
        return f"slice {self.slice} of '{self.stage}' from container {self.source} to {self.target}"


@dataclass(frozen=True)
class EndedMove:
    """A move that is over, and how."""

    move: Move
    outcome: str
    """done, cancelled, timed out, target lost, overtaken by a recovery"""
    at: float


class Moves(Concern):
    """All moves of a job."""

    def __init__(self, core: Controller) -> None:
        super().__init__(core)
        self.by_slice: dict[tuple[StageId, int], Move] = {}
        self.ended: list[EndedMove] = []
        """The last moves that are over, newest last."""

    # -- what there is -------------------------------------------------------------------------------------------

    def of(self, stage: StageId) -> list[Move]:
        return [m for m in self.by_slice.values() if m.stage == stage]

    def in_phase(self, *phases: str) -> list[Move]:
        return [m for m in self.by_slice.values() if m.phase in phases]

    def copies(self, stage: StageId) -> dict[int, int]:
        """slice -> container that makes a copy of it for a move"""
        return {m.slice: m.target for m in self.in_phase(*COPYING) if m.stage == stage}

    def goals(self, stage: StageId) -> dict[int, int]:
        """slice -> container that it is on its way to"""
        return {m.slice: m.target for m in self.of(stage)}

    @property
    def changing(self) -> bool:
        """Do slices change hands in an epoch that is not published yet?"""
        return any(m.phase in CHANGING for m in self.by_slice.values())

    @property
    def uncommitted(self) -> bool:
        """Have slices changed hands since the last checkpoint?"""
        return any(m.phase in DECIDED for m in self.by_slice.values())

    # -- asking --------------------------------------------------------------------------------------------------

    def on_move(self, event: MoveRequested) -> list[Command]:
        """Whatever cannot be done is told: since the move was asked for, a node may have gone, or the slice."""
        core, stage = self.core, event.stage
        if not core.topology[stage].stateful:  # its slices follow its containers
            return [Tell(text=f"slices of '{stage}' stay: it has no state to move")]
        self.expire(event.now)  # a move whose time is just up begins anew
        usable = {p.container for p in core.balance.peers(stage)}
        targets = {
            s: c for s, c in event.targets.items() if c in usable and 0 <= s < core.routes.table.slices_in(stage)
        }
        out = core.waits(f"the move of slices {listed(sorted(targets))} of '{stage}'") if targets else []
        out += self.ask(stage, targets, event.now, event.reason)
        if left := sorted(event.targets.keys() - targets.keys()):
            out.append(Tell(text=f"slices {listed(left)} of '{stage}' stay: no such slice, or no container to take it"))
        if late := [s for s, c in sorted(targets.items()) if (m := self.by_slice.get((stage, s))) and m.target != c]:
            out.append(Tell(text=f"slices {listed(late)} of '{stage}' change hands just now: ask again when they have"))
        return out

    def ask(self, stage: StageId, targets: Mapping[int, int], now: float, cause: str) -> list[Command]:
        """Begin moves, slice -> target. Moves under way keep their target unless it changes."""
        core = self.core
        owners = core.routes.table.owners[stage]
        new = 0
        for number, target in sorted(targets.items()):
            known = self.by_slice.get((stage, number))
            if known is not None and (known.phase not in OPEN or known.target == target):
                continue
            if known is not None:
                self._end(known, "cancelled", now)
            if owners[number] != target:
                self.by_slice[stage, number] = Move(stage, number, owners[number], target, "prepare", now, cause)
                new += 1
        if not new:
            return []
        core.checkpoints.want_for_moves(now)
        self.target_up(stage, core.processes.awake(stage))
        return core.processes.start(stage, {m.target for m in self.in_phase("prepare") if m.stage == stage})

    def on_cancel(self, event: CancelMovesRequested) -> list[Command]:
        count = self.cancel(event.stage, event.slices, event.now)
        self.core.resizes.forget(event.stage)
        self.core.balance.forget(event.stage)
        if event.stage is not None:
            return [Tell(text=f"{count} moves cancelled")]
        staying = self.core.fleet.keep_all()
        return [Tell(text=f"{count} moves cancelled" + (f"; {named(staying)} to stay" if staying else ""))]

    def cancel(self, stage: StageId | None, slices: Collection[int] | None, now: float) -> int:
        """Call off moves that have not been decided. How many."""
        chosen = [
            m
            for m in self.in_phase(*OPEN)
            if (stage is None or m.stage == stage) and (slices is None or m.slice in slices)
        ]
        for move in chosen:
            self._end(move, "cancelled", now)
        return len(chosen)

    # -- what happens to them --------------------------------------------------------------------------------------

    def target_up(self, stage: StageId, containers: Collection[int]) -> None:
        """These containers have a process."""
        self._advance([m for m in self.of(stage) if m.phase == "prepare" and m.target in containers], "rebuild")

    def ready(self) -> list[Move]:
        """Moves that can be handed over in the next epoch."""
        core = self.core
        if core.epochs.final:
            return []
        taken: Counter[tuple[StageId, int]] = Counter()
        now: list[Move] = []
        for move in self.in_phase("rebuild"):
            if not core.holders.can_take_over(move.stage, move.slice, move.target):
                continue
            taken[move.stage, move.target] += 1
            each = core.balance.slice_bytes(move.stage)
            if taken[move.stage, move.target] <= max(1, SWITCH_BYTES // max(1, each)):
                now.append(move)
        return now

    def hand_over(self, moves: Iterable[Move], epoch: Epoch) -> dict[StageId, dict[int, int]]:
        """Their sources send in this epoch. stage -> slice -> the owner from the next epoch on."""
        handover: dict[StageId, dict[int, int]] = {}
        for move in moves:
            self.by_slice[move.stage, move.slice] = replace(move, phase="handover", switch=Epoch(epoch + 1))
            handover.setdefault(move.stage, {})[move.slice] = move.target
        return handover

    def complete_switch(self) -> bool:
        """The targets own what was handed over to them. Whether there was anything."""
        handed = self.in_phase("handover")
        if not handed:
            return False
        table = self.core.routes.table
        for stage in sorted({m.stage for m in handed}):
            table = table.moved_to(stage, {m.slice: m.target for m in handed if m.stage == stage})
        self._advance(handed, "switch")
        # Holders are found anew for the new owners: an owner is nobody's backup of its own slice.
        self.core.routes.put(replace(table, holders={}))
        self.core.holders.refresh()
        return True

    def recall(self, now: float) -> None:
        """There is no next epoch to switch in: the sources have not let go."""
        for move in self.in_phase("handover"):
            self._end(move, "cancelled", now)

    def published(self, epoch: Epoch) -> bool:
        """The targets have served their first epoch. Whether there are any such targets."""
        served = [m for m in self.in_phase(*CHANGING) if m.switch is not None and m.switch <= epoch]
        self._advance(served, "release")
        return bool(served)

    def committed(self, epoch: Epoch, now: float) -> None:
        for move in self.in_phase(*DECIDED):
            if move.switch is not None and move.switch <= epoch:
                self._end(move, "done", now)

    def expire(self, now: float) -> None:
        for move in self.in_phase(*OPEN):
            if now - move.since > self.core.settings.move_timeout_s:
                self._end(move, "timed out", now)

    def recovered(self, now: float) -> None:
        """Everything runs again from the checkpoint, with the newest routing table: what had switched has arrived;
        what lost its source or target is over."""
        table = self.core.routes.table
        for move in list(self.by_slice.values()):
            if move.phase in DECIDED:
                self._end(move, "done", now)
            elif move.target not in table.homes_of(move.stage):
                self._end(move, "target lost", now)
            elif table.owners[move.stage][move.slice] != move.source:
                self._end(move, "overtaken by a recovery", now)

    def _advance(self, moves: Iterable[Move], phase: str) -> None:
        for move in moves:
            self.by_slice[move.stage, move.slice] = replace(move, phase=phase)

    def _end(self, move: Move, outcome: str, now: float) -> None:
        del self.by_slice[move.stage, move.slice]
        self.ended = [*self.ended[1 - ENDED_KEPT :], EndedMove(move, outcome, now)]

    def validate(self) -> None:
        for (stage, number), move in self.by_slice.items():
            assert (move.stage, move.slice) == (stage, number), f"{move} is kept as another slice's"
            assert move.phase in PHASES, f"{move} is in phase {move.phase}"
            assert (move.switch is None) == (move.phase in OPEN), f"{move}, {move.phase}: switch is {move.switch}"
        assert not self.changing or self.core.checkpoints.open is None, "a checkpoint is open while slices change hands"
