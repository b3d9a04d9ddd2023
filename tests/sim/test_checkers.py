"""Who watches the checkers: a bug is planted in the real code for each of them, and must be caught in some seeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from penstock.control.checkpoints import Checkpoints
from penstock.control.controller import Controller
from penstock.control.epochs import Epochs
from penstock.control.events import (
    CollectGarbage,
    EpochPublished,
    StageDone,
    StageFailed,
)
from penstock.control.holders import Holders
from penstock.control.inputs import Inputs
from penstock.engines.runtime import Runtime
from penstock.engines.sim.outside import SimSink
from penstock.engines.sim.simulate import simulate
from penstock.engines.task import Worker
from penstock.ids import Epoch
from penstock.state.backup import Backups
from penstock.state.checkpoint import Manifest
from penstock.state.table import KeyedTable

SEEDS_MAX = 150
Plant = Callable[[pytest.MonkeyPatch], None]


def no_undo(patch: pytest.MonkeyPatch) -> None:
    """Recovery goes back to the checkpoint in name only."""

    def undo_to(self: KeyedTable, epoch: int) -> bool:
        return epoch in self.epochs()

    patch.setattr(KeyedTable, "undo_to", undo_to)


def arrival_order(patch: pytest.MonkeyPatch) -> None:
    """Blobs are applied as they come: every run of an epoch adds its floats in another order."""
    real = Worker._apply

    def apply(self: Worker, stage: Any, spec: Any, blobs: Any, *rest: Any) -> Any:
        from penstock.engines import task

        kept = task.Arrival
        try:
            task.Arrival = lambda *a: kept(*a[:2], 0, *a[3:])  # type: ignore[assignment,misc]
            return real(self, stage, spec, blobs, *rest)
        finally:
            task.Arrival = kept  # type: ignore[misc]

    patch.setattr(Worker, "_apply", apply)


def forgotten_part(patch: pytest.MonkeyPatch) -> None:
    """A sink gets all parts but the last."""
    real = Runtime._deliver

    def deliver(id: str, sink: Any, command: Any, outputs: Any) -> None:
        having = [n for n, output in enumerate(outputs) if id in output.parts]
        less = [output for n, output in enumerate(outputs) if len(having) < 2 or n != having[-1]]
        real(id, sink, command, less)

    patch.setattr(Runtime, "_deliver", staticmethod(deliver))


def published_out_of_turn(patch: pytest.MonkeyPatch) -> None:
    """An epoch is said to be published when another is."""
    real = Runtime.post

    def handle(self: Runtime, event: Any) -> None:
        if isinstance(event, EpochPublished) and event.epoch % 3 == 0:
            event = msgspec.structs.replace(event, epoch=Epoch(event.epoch + 1))
        real(self, event)

    from penstock.engines.sim.world import Driver

    real = Driver.post
    patch.setattr(Driver, "post", handle)


def kept_slices(patch: pytest.MonkeyPatch) -> None:
    """A container keeps the rows of slices that it gave away."""
    patch.setattr(KeyedTable, "drop_slices", lambda self, slices, total: None)


def two_owners(patch: pytest.MonkeyPatch) -> None:
    """Every container but the first believes that it owns one slice more."""
    real = Worker._container

    def container(self: Worker, stage: Any, spec: Any, *rest: Any) -> Any:
        found = real(self, stage, spec, *rest)
        if found is not None and spec.index:
            found.slices = found.slices | {0}
        return found

    patch.setattr(Worker, "_container", container)


def unsaved_tail(patch: pytest.MonkeyPatch) -> None:
    """A checkpoint leaves out the last of its files."""
    real = Manifest.advance

    def advance(self: Manifest, epoch: int, new_files: Any, **rest: Any) -> Manifest:
        return real(self, epoch, list(new_files)[:-1], **rest)

    patch.setattr(Manifest, "advance", advance)


def replanned(patch: pytest.MonkeyPatch) -> None:
    """A restart does not read the log: epochs that ran are planned anew."""
    patch.setattr(Runtime, "_read_log", lambda self, after: [])


def forgotten_facts(patch: pytest.MonkeyPatch) -> None:
    """A checkpoint does not keep what sources must remember."""
    real = Checkpoints._advanced

    def advanced(self: Checkpoints, taken: Any) -> Manifest:
        made = real(self, taken)
        return replace(made, sources={s: {**v, "facts": []} for s, v in made.sources.items()})

    patch.setattr(Checkpoints, "_advanced", advanced)


def clock_goes_back(patch: pytest.MonkeyPatch) -> None:
    """The clock of an epoch is whatever the machine says."""
    real = Inputs.begin

    def begin(self: Inputs, epoch: Epoch, ranges: Any, clock_ms: int) -> Any:
        record = real(self, epoch, ranges, clock_ms)
        self.log[epoch] = msgspec.structs.replace(record, clock_ms=clock_ms or record.clock_ms)
        return self.log[epoch]

    patch.setattr(Inputs, "begin", begin)


def no_garbage(patch: pytest.MonkeyPatch) -> None:
    """Garbage is never collected."""
    real = Runtime._execute

    def execute(self: Runtime, command: Any) -> None:
        if not isinstance(command, CollectGarbage):
            real(self, command)

    patch.setattr(Runtime, "_execute", execute)


def garbage_stays(patch: pytest.MonkeyPatch) -> None:
    """Garbage is found, and state files stay where they are."""
    from penstock.engines import runtime

    patch.setattr(runtime, "garbage", lambda names, kept, in_flight: [])


def undo_for_ever(patch: pytest.MonkeyPatch) -> None:
    """Tables never forget how to undo."""
    patch.setattr(KeyedTable, "release", lambda self, epoch: None)


def staged_again(patch: pytest.MonkeyPatch) -> None:
    """Epochs that sinks have are staged once more when they run again for their state."""
    real = Worker.run

    def run(self: Worker, spec: Any, blobs: Any) -> Any:
        return real(self, msgspec.structs.replace(spec, quiet=False), blobs)

    patch.setattr(Worker, "run", run)


def dead_parts(patch: pytest.MonkeyPatch) -> None:
    """Staging is cleared when a job starts, and by no commit."""
    real = SimSink._clear
    patch.setattr(SimSink, "_clear", lambda self, up_to=None: real(self) if up_to is None else None)


def unwanted_copies(patch: pytest.MonkeyPatch) -> None:
    """Who is no longer to hold a slice keeps it."""
    patch.setattr(Backups, "want", lambda self, slices: setattr(self, "_wanted", slices))


def pieces_for_ever(patch: pytest.MonkeyPatch) -> None:
    """Pieces of deltas, and files that have served, are never forgotten."""
    patch.setattr(Backups, "_forget_useless", lambda self: None)


def backups_past_the_limit(patch: pytest.MonkeyPatch) -> None:
    """Backups stay in memory, whatever the limit."""
    patch.setattr(Backups, "_spill_to_fit", lambda self, bytes_max: bytes_max)


def spilled_for_ever(patch: pytest.MonkeyPatch) -> None:
    """What was spilled stays on the local disk when a newer version takes its place."""
    real = Backups._release
    patch.setattr(Backups, "_release", lambda self, numbers, runs, disks: real(self, numbers, runs, []))


def stale_results(patch: pytest.MonkeyPatch) -> None:
    """A result of an older attempt is taken for one of this."""
    real = Epochs.on_stage_done

    def on_stage_done(self: Epochs, event: StageDone) -> Any:
        attempts = self.core.attempts
        attempts.outstanding.discard((event.attempt, event.epoch, event.stage))
        if event.epoch in self.in_flight and event.stage not in self.in_flight[event.epoch].done:
            event = msgspec.structs.replace(event, attempt=attempts.current)
        return real(self, event)

    patch.setattr(Epochs, "on_stage_done", on_stage_done)


def too_early(patch: pytest.MonkeyPatch) -> None:
    """An epoch counts as logged when it is planned."""
    real = Epochs._begin

    def begin(self: Epochs, ranges: Any, clock_ms: int, now: float) -> Any:
        out: Any = real(self, ranges, clock_ms, now)
        self.in_flight[out[0].epoch].logged = True
        return out

    patch.setattr(Epochs, "_begin", begin)


def sealed_twice(patch: pytest.MonkeyPatch) -> None:
    """A flush seals what was sealed already."""
    real = Worker.flush

    def flush(self: Worker, spec: Any) -> Any:
        held = self.containers.get((spec.stage, spec.index))
        if held is not None and held.attempt == spec.attempt:
            self._seal(self.plan.by_id[spec.stage], spec, held)
        return real(self, spec)

    patch.setattr(Worker, "flush", flush)


def skipped_epoch(patch: pytest.MonkeyPatch) -> None:
    """Now and then an epoch's number is left out."""
    real = Epochs.on_planned

    def on_planned(self: Epochs, event: Any) -> Any:
        if self.planning and event.epoch % 5 == 0 and event.epoch == self.next:
            self.next = Epoch(self.next + 1)
            event = msgspec.structs.replace(event, epoch=self.next)
        return real(self, event)

    patch.setattr(Epochs, "on_planned", on_planned)


def never_recovered(patch: pytest.MonkeyPatch) -> None:
    """Work that failed is waited for."""
    real = Epochs.on_stage_failed

    def on_stage_failed(self: Epochs, event: StageFailed) -> Any:
        waited = set(self.core.attempts.outstanding)
        out = real(self, event)
        self.core.attempts.outstanding = waited
        return out

    patch.setattr(Epochs, "on_stage_failed", on_stage_failed)


# -- slices on the move, backups and nodes ---------------------------------------------------------------------------


def lost_handover(patch: pytest.MonkeyPatch) -> None:
    """What the old owner sends at the switch does not arrive: the state is safe, and everybody has to go back."""
    real = Worker._handed_over

    def handed_over(self: Worker, spec: Any, sent: Any) -> Any:
        return {} if spec.epoch % 2 else real(self, spec, sent)

    patch.setattr(Worker, "_handed_over", handed_over)


def empty_handover(patch: pytest.MonkeyPatch) -> None:
    """The old owner sends its slice, but not what changed since the checkpoint."""
    real = KeyedTable.unreleased
    patch.setattr(KeyedTable, "unreleased", lambda self, slices, total: real(self, slices, total).clear())


def unrecorded_handover(patch: pytest.MonkeyPatch) -> None:
    """What is handed over is loaded like a checkpoint: the next delta does not have it, and no undo takes it back."""
    patch.setattr(KeyedTable, "merge", KeyedTable.load)


def handed_over_too_early(patch: pytest.MonkeyPatch) -> None:
    """The last delta only is handed over, not all since the last complete checkpoint."""
    real = KeyedTable.unreleased

    def unreleased(self: KeyedTable, slices: Any, total: int) -> Any:
        sealed, self._sealed = self._sealed, []
        active, self._active = self._active, type(self._active)()
        try:
            return real(self, slices, total)
        finally:
            self._sealed, self._active = sealed, active

    patch.setattr(KeyedTable, "unreleased", unreleased)


def checkpoint_at_the_switch(patch: pytest.MonkeyPatch) -> None:
    """Checkpoints open whenever they are due."""

    def due(self: Checkpoints, now: float) -> bool:
        interval = self.core.settings.checkpoint_interval_s
        return self.open is None and (self.wanted or 0 <= interval <= now - self.opened_at)

    patch.setattr(Checkpoints, "due", due)


def stale_backups(patch: pytest.MonkeyPatch) -> None:
    """A backup counts as current although a piece of the last delta has not come."""
    real = Backups._rows_for
    patch.setattr(Backups, "_rows_for", lambda self, number, known: (real(self, number, known)[0], []))


def untouched(patch: pytest.MonkeyPatch) -> None:
    """Holders are told that a checkpoint changed nothing."""
    from penstock.control import checkpoints

    real = checkpoints.Commit
    patch.setattr(checkpoints, "Commit", lambda before, epoch, files: real(before, epoch, {f: [] for f in files}))


def homeless_work(patch: pytest.MonkeyPatch) -> None:
    """Epochs that run again after all nodes were lost know only of those."""
    patch.setattr(Epochs, "adopt_routing", lambda self: None)


def unreachable_target(patch: pytest.MonkeyPatch) -> None:
    """The target of a move gets work before it has a node."""

    def copies(self: Holders, run: Any, stage: Any) -> Any:
        if not stage.stateful:
            return ()
        targets = self.core.moves.copies(stage.id)
        held = run.routing.holders.get(stage.id, ((),) * run.routing.slices_in(stage.id))
        owners = run.routing.owners[stage.id]
        return tuple(
            tuple(sorted({*h, *([targets[s]] if s in targets else [])} - {owners[s]})) for s, h in enumerate(held)
        )

    patch.setattr(Holders, "copies", copies)


# -- bugs that were there once, and that seeds have found ------------------------------------------------------------


def unheard_manifest(patch: pytest.MonkeyPatch) -> None:
    """A checkpoint that was being written when work failed is not taken note of, though it is in the store."""
    real = Controller.recover

    def recover(self: Controller, now: float, reason: str) -> Any:
        out = real(self, now, reason)
        self.checkpoints.last_written = None
        return out

    patch.setattr(Controller, "recover", recover)


def counted_twice(patch: pytest.MonkeyPatch) -> None:
    """The delta of a report that is delivered twice enters a checkpoint twice."""

    def collect(self: Checkpoints, reports: Any) -> None:
        for report in reports if self.open is not None else ():
            for delta in report.deltas:
                assert self.open is not None
                if delta.epoch == self.open.epoch and delta.attempt == self.core.attempts.current:
                    self.open.expected.discard((report.stage, report.index))
                    if delta.file is not None:
                        self.open.files.append(delta.file)
                        self.open.touched[delta.file.name] = list(delta.touched)

    patch.setattr(Checkpoints, "collect", collect)


def forgets_too_early(patch: pytest.MonkeyPatch) -> None:
    """Sources may forget what the newest checkpoint covers; when it is damaged, the job goes back to an older one."""
    real = Runtime._collect_garbage

    def collect_garbage(self: Runtime, command: CollectGarbage) -> None:
        for id, end in command.ends.items():
            self.plan.sources[id].committed(end)
        real(self, command)

    patch.setattr(Runtime, "_collect_garbage", collect_garbage)


def hole_in_the_log(patch: pytest.MonkeyPatch) -> None:
    """An epoch is logged although the one before it could not be."""
    patch.setattr(Runtime, "log_ended", property(lambda self: False, lambda self, value: None), raising=False)


def undo_kept_by_a_rescale(patch: pytest.MonkeyPatch) -> None:
    """A container whose slices have changed keeps its undo logs."""
    real, release = Worker._container, KeyedTable.release
    kept: list[KeyedTable] = []

    def container(self: Worker, stage: Any, spec: Any, *rest: Any) -> Any:
        found = self.containers.get((spec.stage, spec.index))
        owned = frozenset(s for s, c in enumerate(spec.owners[spec.stage]) if c == spec.index)
        if found is not None and found.slices != owned:
            kept.append(found.table)
        return real(self, stage, spec, *rest)

    def keep(self: KeyedTable, epoch: int) -> None:
        if not any(self is table for table in kept):
            release(self, epoch)

    patch.setattr(Worker, "_container", container)
    patch.setattr(KeyedTable, "release", keep)


PLANTED: list[tuple[Plant, set[str], int]] = [
    (no_undo, {"exactly-once", "no-lost-update", "sound"}, 0),
    (arrival_order, {"exactly-once"}, 0),
    (forgotten_part, {"exactly-once"}, 0),
    (published_out_of_turn, {"exactly-once"}, 0),
    (kept_slices, {"single-owner", "exactly-once"}, 20),
    (two_owners, {"single-owner"}, 0),
    (unsaved_tail, {"no-lost-update", "exactly-once"}, 0),
    (replanned, {"no-lost-update", "sound"}, 0),
    (forgotten_facts, {"no-lost-update"}, 0),
    (clock_goes_back, {"no-lost-update"}, 0),
    (no_garbage, {"bounded-growth"}, 0),
    (garbage_stays, {"bounded-growth"}, 0),
    (undo_for_ever, {"bounded-growth"}, 0),
    (staged_again, {"bounded-growth"}, 20),
    (dead_parts, {"bounded-growth"}, 0),
    (unwanted_copies, {"bounded-growth"}, 10),
    (pieces_for_ever, {"bounded-growth"}, 10),
    (backups_past_the_limit, {"bounded-growth"}, 5),
    (spilled_for_ever, {"bounded-growth"}, 110),
    (stale_results, {"sound", "exactly-once", "single-owner", "no-lost-update"}, 20),
    (too_early, {"no-lost-update", "sound"}, 0),
    (sealed_twice, {"sound"}, 0),
    (skipped_epoch, {"sound", "exactly-once"}, 0),
    (never_recovered, {"progress"}, 0),
    (counted_twice, {"sound"}, 20),
    (forgets_too_early, {"no-lost-update"}, 38),
    (hole_in_the_log, {"sound", "no-lost-update"}, 351),
    (undo_kept_by_a_rescale, {"bounded-growth"}, 38),
    (lost_handover, {"progress"}, 460),
    (empty_handover, {"exactly-once", "no-lost-update"}, 25),
    (unrecorded_handover, {"exactly-once", "no-lost-update", "sound"}, 50),
    (handed_over_too_early, {"exactly-once", "no-lost-update"}, 50),
    (checkpoint_at_the_switch, {"sound"}, 0),
    (stale_backups, {"exactly-once", "no-lost-update"}, 180),
    (untouched, {"exactly-once", "no-lost-update"}, 40),
    (homeless_work, {"sound"}, 0),
    (unreachable_target, {"sound"}, 215),
    (unheard_manifest, {"no-lost-update", "sound"}, 1_798),
]
"""A bug, the checkers that may be the first to see it, and a seed from which on it does not take long."""


@pytest.mark.parametrize(("plant", "checkers", "first"), PLANTED, ids=[plant.__name__ for plant, *_ in PLANTED])
def test_a_planted_bug_is_caught(plant: Plant, checkers: set[str], first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        plant(patch)
        found = next(o for o in map(simulate, range(first, first + SEEDS_MAX)) if not o.ok)
    assert found.checker in checkers, f"{found.checker}: {found.message}"
    assert found.story
    assert simulate(found.seed).ok, "the seed fails without the bug as well"
