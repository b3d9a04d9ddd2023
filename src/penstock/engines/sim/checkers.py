"""What must hold whatever happens. Each checker hears of what the world does, and raises ``Violation`` at a wrong.

Some things are wrong at once (two containers apply the same slice); some only show at the end, against the *oracle*:
the same flow over the same epochs, with one container and no disturbance. The checkers know nothing of how faults are
made, and the tests plant a bug for each of them to see that it is caught.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from penstock.control.controller import Controller
from penstock.control.events import (
    CoresRequested,
    Event,
    MoveRequested,
    RescaleRequested,
)
from penstock.engines.task import Container
from penstock.state.backup import COMMITS_KEPT, Backups
from penstock.state.slicemap import SliceMap

UNDO_MAX = 3
"""Epochs that a table can go back to: the last checkpoint, the one being taken, and one that no task has heard of."""
UNSWEPT_MAX = 2
"""Checkpoints since garbage was last collected: the newest, and one whose collection waits behind it."""


class Violation(BaseException):
    """Something happened that must never happen. (No ``Exception``: the code under test catches those.)"""

    def __init__(self, checker: str, message: str) -> None:
        super().__init__(f"{checker}: {message}")
        self.checker = checker
        self.message = message


def canonical(frame: pl.DataFrame) -> list[str]:
    """The rows in an order of their own, to the last bit of every float."""
    return sorted(map(repr, frame.rows()))


@dataclass
class ExactlyOnce:
    """What is published of an epoch never changes, comes in order, and is in the end what the oracle publishes."""

    name = "exactly-once"
    rows: dict[tuple[str, int], list[str]] = field(default_factory=dict)
    """(sink, epoch) -> its rows"""
    published: int = 0

    def on_rows(self, sink: str, epoch: int, rows: list[str]) -> None:
        known = self.rows.setdefault((sink, epoch), rows)
        if known != rows:
            raise Violation(self.name, f"epoch {epoch} of '{sink}' has other rows than before: {_differ(known, rows)}")

    def on_published(self, epoch: int) -> None:
        if epoch > self.published + 1:
            raise Violation(self.name, f"epoch {epoch} is published after {self.published}")
        self.published = max(self.published, epoch)

    def at_end(self, oracle: Mapping[tuple[str, int], list[str]]) -> None:
        for sink, epoch in sorted({*oracle, *self.rows}):
            found, expected = self.rows.get((sink, epoch), []), oracle.get((sink, epoch), [])
            if found != expected:
                raise Violation(
                    self.name, f"epoch {epoch} of '{sink}' is not as undisturbed: {_differ(expected, found)}"
                )


@dataclass
class SingleOwner:
    """A slice is applied by one container of an attempt, which holds the rows of its own slices and no others."""

    name = "single-owner"
    owners: dict[tuple[int, str, int, int], str] = field(default_factory=dict)
    """(attempt, stage, epoch, slice) -> who applied it"""

    def on_applied(self, attempt: int, epoch: int, who: str, held: Container, slicemap: SliceMap) -> None:
        for number in held.slices:
            key = (attempt, held.stage, epoch, number)
            other = self.owners.setdefault(key, who)
            if other != who:
                raise Violation(
                    self.name, f"slice {number} of '{held.stage}' in epoch {epoch} is applied by {other} and by {who}"
                )
        strange = set(slicemap.of(held.table.live_hashes()).tolist()) - held.slices
        if strange:
            raise Violation(self.name, f"{who} holds rows of slices {sorted(strange)}, and owns {sorted(held.slices)}")

    def on_stage_done(self, attempt: int, epoch: int, stage: str, slices: int) -> None:
        left = [s for s in range(slices) if (attempt, stage, epoch, s) not in self.owners]
        if left:
            raise Violation(self.name, f"nobody applied slices {left} of '{stage}' in epoch {epoch}")


@dataclass
class NoLostUpdate:
    """Every row is read once, by an epoch that never changes; the state in the end is the oracle's."""

    name = "no-lost-update"
    records: dict[int, dict[str, Any]] = field(default_factory=dict)
    """epoch -> its record, as it was when it was first published"""

    def on_run(self, epoch: int, record: dict[str, Any] | None, ahead: bool) -> None:
        """``ahead``: the store is away, and the epoch may run before it is logged."""
        if record is None and (not ahead or epoch in self.records):
            raise Violation(self.name, f"epoch {epoch} runs, and nothing of it is in the log")
        if record is not None:
            self._compare(epoch, record, self.records.get(epoch, record))

    def on_publish(self, epoch: int, record: dict[str, Any] | None) -> None:
        if record is None:
            raise Violation(self.name, f"epoch {epoch} is published, and nothing of it is in the log")
        self._compare(epoch, record, self.records.setdefault(epoch, record))

    def _compare(self, epoch: int, record: dict[str, Any], known: dict[str, Any]) -> None:
        for part in ("ranges", "clock_ms", "final"):
            if known[part] != record[part]:
                raise Violation(self.name, f"epoch {epoch} had {part} {known[part]}, and now {record[part]}")

    def at_end(
        self, rows: Mapping[str, int], found: Mapping[str, pl.DataFrame], oracle: Mapping[str, pl.DataFrame]
    ) -> None:
        at = dict.fromkeys(rows, 0)
        clock = 0
        for epoch in sorted(self.records):
            record = self.records[epoch]
            for source, r in record["ranges"].items():
                if r["start"]["row"] != at[source]:
                    raise Violation(self.name, f"'{source}' goes on at {r['start']} in epoch {epoch}, not {at[source]}")
                at[source] = r["end"]["row"]
            if record["clock_ms"] < clock:
                raise Violation(self.name, f"the clock went back in epoch {epoch}")
            clock = record["clock_ms"]
        if at != dict(rows):
            raise Violation(self.name, f"{at} rows were read of {dict(rows)}")
        for stage in sorted({*found, *oracle}):
            mine, theirs = canonical(found[stage]), canonical(oracle[stage])
            if mine != theirs:
                raise Violation(self.name, f"the state of '{stage}' is not as undisturbed: {_differ(theirs, mine)}")


@dataclass
class BoundedGrowth:
    """What is kept is what is still needed: files, log, shuffle outputs, staging, backups, and how to undo."""

    name = "bounded-growth"
    unswept: int = 0
    """Checkpoints written since garbage was last collected."""
    failures: int = 0
    """Deaths and recoveries since then: each may cost a collection."""

    def on_failure(self) -> None:
        self.failures += 1

    def on_checkpoint(self) -> None:
        self.unswept += 1
        if self.unswept > UNSWEPT_MAX + self.failures:
            raise Violation(self.name, f"{self.unswept} checkpoints since garbage was collected")

    def on_swept(self, names: Iterable[str], needed: Collection[str], oldest: int, kept: int) -> None:
        """Garbage was collected. ``needed``: files of the checkpoints kept; ``oldest``: the first of them."""
        self.unswept = self.failures = 0
        manifests = 0
        for name in names:
            place, _, last = name.rpartition("/")
            if place == "manifests":
                manifests += 1
            elif place == "log" and int(last.split(".")[0]) <= oldest:
                raise Violation(self.name, f"{name} stays, and checkpoint {oldest} covers it")
            elif name.startswith("state/") and name not in needed and int(last.split("-")[0]) <= oldest:
                raise Violation(self.name, f"{name} stays, and no checkpoint needs it")
        if manifests > kept:
            raise Violation(self.name, f"{manifests} checkpoints stay, not {kept}")

    def on_staged(self, parts: Mapping[str, int], covered: int) -> None:
        """What running work has staged, with its epoch. All sinks have the epochs that a checkpoint has covered."""
        left = [name for name, epoch in parts.items() if epoch <= covered]
        if left:
            raise Violation(self.name, f"{left} stay in staging, and epoch {covered} is published")

    def on_backups(self, who: str, backups: Backups, wanted: Collection[int], settled: bool) -> None:
        """What a process keeps of other containers' slices: those ``wanted``, and no more deltas of them than it needs
        to bring them forward. ``settled``: it has nothing to merge or to spill."""
        held, newest = backups._held, backups._newest
        if strange := held.keys() - set(wanted):
            raise Violation(self.name, f"{who} keeps copies of slices {sorted(strange)}, and nobody wants them")
        if len(backups._commits) > COMMITS_KEPT and backups.pinned is None:
            raise Violation(self.name, f"{who} remembers {len(backups._commits)} checkpoints")
        if settled and backups.nbytes > backups.memory_max:
            raise Violation(self.name, f"{who} has {backups.nbytes} bytes of backups, not {backups.memory_max}")
        if any(number not in held or held[number].version < newest for number in wanted):
            return  # some may need what has come
        past = [name for name, pieces in backups._pieces.items() if any(p.epoch <= newest for p in pieces)]
        if past := sorted({*past, *backups._open}):
            raise Violation(self.name, f"{who} keeps {past}, and all its copies are at checkpoint {newest}")

    def on_spilled(self, who: str, files: Collection[str], needed: Collection[str]) -> None:
        if left := sorted(set(files) - set(needed)):
            raise Violation(self.name, f"{who} has {left} on its disk, and no backup needs them")

    def on_table(self, who: str, epochs: list[int]) -> None:
        if len(epochs) > UNDO_MAX:
            raise Violation(self.name, f"{who} keeps how to undo {epochs}")

    def on_outputs(self, epochs: Collection[int], in_flight: int) -> None:
        if len(epochs) > in_flight + 2:  # one more waits for what containers sent to their peers
            raise Violation(self.name, f"shuffle outputs of epochs {sorted(epochs)} with {in_flight} in flight")


@dataclass
class Sound:
    """The controller's and the tables' own invariants, after each step; and no error that nobody caused."""

    name = "sound"

    def on_step(self, controller: Controller) -> None:
        try:
            controller.validate()
        except AssertionError as error:
            raise Violation(self.name, str(error)) from error

    def on_table(self, who: str, held: Container) -> None:
        try:
            held.table.validate()
        except AssertionError as error:
            raise Violation(self.name, f"the table of {who}: {error}") from error

    def on_error(self, message: str, expected: bool) -> None:
        if not expected:
            raise Violation(self.name, f"the job ended with an error that no fault explains: {message}")


@dataclass
class Answered:
    """An order is taken, or somebody says why not."""

    name = "answered"

    def on_order(self, event: Event, c: Controller, told: Collection[str]) -> None:
        if told or c.phase in ("starting", "stopped", "failed"):
            return
        match event:
            case MoveRequested():
                moves, owners = c.moves.by_slice, c.routes.table.owners[event.stage]
                for number, target in event.targets.items():
                    move = moves.get((event.stage, number))
                    there = move.target if move else owners[number] if number < len(owners) else None
                    if there != target:
                        raise Violation(
                            self.name,
                            f"slice {number} of '{event.stage}' was to go to {target}, and nobody says why it does not",
                        )
            case RescaleRequested():
                waits = event.stage in c.resizes.wanted
                if not waits and c.routes.table.instances[event.stage] != event.instances and not c.fleet.cores:
                    raise Violation(
                        self.name, f"'{event.stage}' was to have {event.instances} instances, and nobody says why not"
                    )
            case CoresRequested():
                if c.fleet.cores.get(event.node) != event.cores:
                    raise Violation(self.name, f"{event.cores} cores of {event.node}, and nobody says why not")


@dataclass
class Progress:
    """Once faults have ended, the job completes, in time and without a failure."""

    name = "progress"

    def on_late(self, seconds: float) -> None:
        raise Violation(self.name, f"the job has not completed {seconds:.0f} s after the last fault")

    def on_error(self, message: str) -> None:
        raise Violation(self.name, f"the job failed after the last fault: {message}")

    def on_recovery(self, cause: str) -> None:
        """Called when nothing was there to fail."""
        raise Violation(self.name, f"everything since the checkpoint runs again, and nobody knows why: {cause}")


@dataclass
class Checkers:
    exactly_once: ExactlyOnce = field(default_factory=ExactlyOnce)
    single_owner: SingleOwner = field(default_factory=SingleOwner)
    no_lost_update: NoLostUpdate = field(default_factory=NoLostUpdate)
    bounded_growth: BoundedGrowth = field(default_factory=BoundedGrowth)
    sound: Sound = field(default_factory=Sound)
    progress: Progress = field(default_factory=Progress)
    answered: Answered = field(default_factory=Answered)


def _differ(expected: list[str], found: list[str]) -> str:
    lacking = [row for row in expected if row not in found]
    extra = [row for row in found if row not in expected]
    parts = [f"{len(found)} rows, not {len(expected)}"]
    parts += [f"lacks {lacking[0]}"] if lacking else []
    parts += [f"has {extra[0]}"] if extra else []
    return "; ".join(parts)


__all__ = [
    "Answered",
    "BoundedGrowth",
    "Checkers",
    "ExactlyOnce",
    "NoLostUpdate",
    "Progress",
    "SingleOwner",
    "Sound",
    "Violation",
    "canonical",
]
