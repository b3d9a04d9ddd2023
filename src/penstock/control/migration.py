"""Slices on the move: the four phases of live migration, as a small state machine for each slice.

``prepare``
    The target's process is being started, if it does not run yet.
``rebuild``
    The target makes a copy of the slice in the background: it is a backup holder from now on, which starts from the
    checkpoint and is kept up to date like any other. If it held a backup before, nothing is copied.
``switch``
    The copy is current at the last checkpoint. In epoch h the source sends what changed since; from epoch h+1 on the
    routing table names the target. The source serves until then, and nobody waits.
``release``
    The source has forgotten the slice. A failure before the next checkpoint goes back to the one before, which both
    can do; when the next is complete the move is over.

A move can be cancelled, time out or lose its target in the first two phases, and nothing has happened; from the switch
on it is part of the routing table, and a recovery carries it through.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from penstock.ids import Epoch, StageId

PHASES = ("prepare", "rebuild", "switch", "release")


@dataclass(frozen=True)
class Move:
    stage: StageId
    slice: int
    source: int
    target: int
    phase: str
    since: float
    """When it was asked for."""
    cause: str
    switch: Epoch | None = None
    """The first epoch that the target owns the slice in."""

    def __str__(self) -> str:
        return f"slice {self.slice} of '{self.stage}' from container {self.source} to {self.target}"


@dataclass(frozen=True)
class Ended:
    """A move that is over, and how."""

    move: Move
    outcome: str
    """done, cancelled, timed out, target lost, overtaken by a recovery"""
    at: float


class Migration:
    """All moves of a job. Changed by the controller only."""

    def __init__(self) -> None:
        self.moves: dict[tuple[StageId, int], Move] = {}
        self.ended: list[Ended] = []
        """The last few, newest last."""

    def __bool__(self) -> bool:
        return bool(self.moves)

    def ask(self, stage: StageId, owners: Collection[int], targets: Mapping[int, int], now: float, cause: str) -> int:
        """New moves of one stage, slice -> target. Those under way keep their target unless it changes; how many are
        new."""
        count = 0
        current = tuple(owners)
        for number, target in sorted(targets.items()):
            known = self.moves.get((stage, number))
            if known is not None and (known.phase in ("switch", "release") or known.target == target):
                continue
            if known is not None:
                self._end(known, "cancelled", now)
            if current[number] != target:
                self.moves[stage, number] = Move(stage, number, current[number], target, "prepare", now, cause)
                count += 1
        return count

    def up(self, stage: StageId, containers: Collection[int]) -> None:
        """These containers have a process."""
        for key, move in self.moves.items():
            if move.stage == stage and move.phase == "prepare" and move.target in containers:
                self.moves[key] = replace(move, phase="rebuild")

    def targets(self, stage: StageId) -> dict[int, int]:
        """slice -> container that makes a copy of it."""
        return {m.slice: m.target for m in self.moves.values() if m.stage == stage and m.phase in ("rebuild", "switch")}

    def of(self, stage: StageId) -> list[Move]:
        return [m for m in self.moves.values() if m.stage == stage]

    def in_phase(self, *phases: str) -> list[Move]:
        return [m for m in self.moves.values() if m.phase in phases]

    def switch(self, moves: Iterable[Move], epoch: Epoch) -> None:
        for move in moves:
            self.moves[move.stage, move.slice] = replace(move, phase="switch", switch=epoch)

    def published(self, epoch: Epoch) -> None:
        """The target has served its first epoch."""
        for key, move in self.moves.items():
            if move.phase == "switch" and move.switch is not None and move.switch <= epoch:
                self.moves[key] = replace(move, phase="release")

    def committed(self, epoch: Epoch, now: float) -> None:
        for move in self.in_phase("switch", "release"):
            if move.switch is not None and move.switch <= epoch:
                self._end(move, "done", now)

    def cancel(self, stage: StageId | None, slices: Collection[int] | None, now: float) -> int:
        """Those that have not switched; how many."""
        chosen = [
            m
            for m in self.in_phase("prepare", "rebuild")
            if (stage is None or m.stage == stage) and (slices is None or m.slice in slices)
        ]
        for move in chosen:
            self._end(move, "cancelled", now)
        return len(chosen)

    def recall(self, moves: Iterable[Move], now: float) -> None:
        """They were to switch, and there is no next epoch to do so in: the source has not let go."""
        for move in moves:
            if (known := self.moves.get((move.stage, move.slice))) is not None:
                self._end(known, "cancelled", now)

    def expire(self, now: float, timeout_s: float) -> None:
        for move in self.in_phase("prepare", "rebuild"):
            if now - move.since > timeout_s:
                self._end(move, "timed out", now)

    def recovered(self, owners: Mapping[StageId, tuple[int, ...]], usable: Collection[int], now: float) -> None:
        """Everything runs again from the checkpoint, with the newest routing table: what had switched has arrived;
        what lost its source or target is over."""
        for move in list(self.moves.values()):
            if move.phase in ("switch", "release"):
                self._end(move, "done", now)
            elif move.target not in usable:
                self._end(move, "target lost", now)
            elif owners[move.stage][move.slice] != move.source:
                self._end(move, "overtaken by a recovery", now)

    def _end(self, move: Move, outcome: str, now: float) -> None:
        del self.moves[move.stage, move.slice]
        self.ended = [*self.ended[-99:], Ended(move, outcome, now)]
