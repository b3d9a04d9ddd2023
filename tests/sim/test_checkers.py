"""Who watches the checkers: a bug is planted in the real code for each of them, and must be caught in some seeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from penstock.control.controller import Controller
from penstock.control.events import CollectGarbage, EpochPublished, StageDone, StageFailed
from penstock.engines.runtime import Runtime
from penstock.engines.sim.simulate import simulate
from penstock.engines.task import Worker
from penstock.state.checkpoint import DeltaFile, Manifest
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
    real = Runtime._publish

    def publish(self: Runtime, command: Any) -> None:
        less = {sink: parts[:-1] or parts for sink, parts in command.parts.items()}
        real(self, replace(command, parts=less))

    patch.setattr(Runtime, "_publish", publish)


def published_out_of_turn(patch: pytest.MonkeyPatch) -> None:
    """An epoch is said to be published when another is."""
    real = Runtime.post

    def handle(self: Runtime, event: Any) -> None:
        if isinstance(event, EpochPublished) and event.epoch % 3 == 0:
            event = replace(event, epoch=event.epoch + 1)
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

    def container(self: Worker, stage: Any, spec: Any, report: Any) -> Any:
        found = real(self, stage, spec, report)
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
    real = Controller._advanced

    def advanced(self: Controller, checkpoint: Any) -> Manifest:
        made = real(self, checkpoint)
        return replace(made, sources={s: {**v, "facts": []} for s, v in made.sources.items()})

    patch.setattr(Controller, "_advanced", advanced)


def clock_goes_back(patch: pytest.MonkeyPatch) -> None:
    """The clock of an epoch is whatever the machine says."""
    real = Controller._begin

    def begin(self: Controller, ranges: Any, clock_ms: int, now: float) -> Any:
        out = real(self, ranges, clock_ms, now)
        out[0].record["clock_ms"] = clock_ms or out[0].record["clock_ms"]
        return out

    patch.setattr(Controller, "_begin", begin)


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


def stale_results(patch: pytest.MonkeyPatch) -> None:
    """A result of an older attempt is taken for one of this."""
    real = Controller._stage_done

    def stage_done(self: Controller, event: StageDone) -> Any:
        self.outstanding.discard((event.attempt, event.epoch, event.stage))
        if event.epoch in self.in_flight and event.stage not in self.in_flight[event.epoch].done:
            event = replace(event, attempt=self.attempt)
        return real(self, event)

    patch.setattr(Controller, "_stage_done", stage_done)


def too_early(patch: pytest.MonkeyPatch) -> None:
    """An epoch counts as logged when it is planned."""
    real = Controller._begin

    def begin(self: Controller, ranges: Any, clock_ms: int, now: float) -> Any:
        out = real(self, ranges, clock_ms, now)
        self.in_flight[out[0].epoch].logged = True
        return out

    patch.setattr(Controller, "_begin", begin)


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
    real = Controller._planned

    def planned(self: Controller, event: Any) -> Any:
        if self.planning and event.epoch % 5 == 0 and event.epoch == self.next_epoch:
            self.next_epoch = type(self.next_epoch)(self.next_epoch + 1)
            event = replace(event, epoch=self.next_epoch)
        return real(self, event)

    patch.setattr(Controller, "_planned", planned)


def never_recovered(patch: pytest.MonkeyPatch) -> None:
    """Work that failed is waited for."""
    real = Controller._stage_failed

    def stage_failed(self: Controller, event: StageFailed) -> Any:
        waited = set(self.outstanding)
        out = real(self, event)
        self.outstanding = waited
        return out

    patch.setattr(Controller, "_stage_failed", stage_failed)


# -- bugs that were there once, and that seeds have found ------------------------------------------------------------


def counted_twice(patch: pytest.MonkeyPatch) -> None:
    """The delta of a report that is delivered twice enters a checkpoint twice."""

    def collect_deltas(self: Controller, reports: Any) -> None:
        for report in reports if self.checkpoint is not None else ():
            for delta in report.deltas:
                if delta["epoch"] == self.checkpoint.epoch and delta["attempt"] == self.attempt:
                    self.checkpoint.expected.discard((report.stage, report.index))
                    if delta["file"] is not None:
                        self.checkpoint.files.append(DeltaFile(**delta["file"]))

    patch.setattr(Controller, "_collect_deltas", collect_deltas)


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
    """A container whose slices change keeps its undo logs."""
    real = Worker._container

    def container(self: Worker, stage: Any, spec: Any, report: Any) -> Any:
        found = self.containers.get((spec.stage, spec.index))
        owned = frozenset(s for s, c in enumerate(spec.owners[spec.stage]) if c == spec.index)
        if found is None or found.slices == owned:
            return real(self, stage, spec, report)
        release, KeyedTable.release = KeyedTable.release, lambda self, epoch: None  # type: ignore[method-assign]
        try:
            return real(self, stage, spec, report)
        finally:
            KeyedTable.release = release  # type: ignore[method-assign]

    patch.setattr(Worker, "_container", container)


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
    (stale_results, {"sound", "exactly-once", "single-owner", "no-lost-update"}, 20),
    (too_early, {"no-lost-update", "sound"}, 0),
    (sealed_twice, {"sound"}, 0),
    (skipped_epoch, {"sound", "exactly-once"}, 0),
    (never_recovered, {"progress"}, 0),
    (counted_twice, {"sound"}, 20),
    (forgets_too_early, {"no-lost-update"}, 15),
    (hole_in_the_log, {"sound", "no-lost-update"}, 10),
    (undo_kept_by_a_rescale, {"bounded-growth"}, 110),
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
