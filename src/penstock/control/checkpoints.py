"""Checkpoints: when one is taken, what it waits for, and what the last complete one consists of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.control.concern import Concern
from penstock.control.epochs import EpochRun
from penstock.control.events import (
    CollectGarbage,
    Command,
    Compact,
    Compacted,
    Flush,
    Flushed,
    ManifestWritten,
    WriteManifest,
)
from penstock.control.records import TaskReport
from penstock.control.routing import RoutingTable
from penstock.ids import NO_EPOCH, Attempt, Epoch, StageId
from penstock.state.backup import Commit
from penstock.state.checkpoint import CompactionTask, DeltaFile, Manifest, plan_compaction

if TYPE_CHECKING:
    from penstock.control.controller import Controller

MOVING_DELTAS = 4
"""While slices of a stage move, its files are merged only when chains are this many times as long as they may be. A
merge takes processor time that the move, and others on the machine, need; and it takes away the files that copies are
being read from."""
CATCH_UP_S = 4.0
"""While slices are on the move, the next checkpoint waits this many seconds: for copies to get there, and for as many
switches as there is time for."""


@dataclass
class Checkpoint:
    """A checkpoint being taken at ``epoch``."""

    epoch: Epoch
    expected: set[tuple[StageId, int]]
    """Containers that have not told of their delta."""
    files: list[DeltaFile] = field(default_factory=list)
    touched: dict[str, list[int]] = field(default_factory=dict)
    """file -> slices that it has rows of"""
    published: bool = False
    """The sinks have the epoch."""
    flushing: bool = False
    writing: bool = False
    """The manifest is being written."""
    clocks: dict[str, int] = field(default_factory=dict)
    watermarks: dict[StageId, int] = field(default_factory=dict)


class Checkpoints(Concern):
    def __init__(self, core: Controller, blank: Manifest) -> None:
        super().__init__(core)
        self.open: Checkpoint | None = None
        self.opened_at = 0.0
        """When the last checkpoint was begun."""
        self.wanted = False
        """A checkpoint is to be taken with the next epoch, whatever the interval."""
        self.committed = NO_EPOCH
        """The epoch of the last complete checkpoint."""
        self.committed_final = False
        """Its epoch ended a bounded input."""
        self.manifest = blank
        """The last complete checkpoint, with merges of its files that were finished since."""
        self.last_written: tuple[Attempt, Checkpoint] | None = None
        """A failure came while this checkpoint's manifest was being written: it counts, if it gets there."""
        self.compacting: set[StageId] = set()

    def restore(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.committed = Epoch(manifest.epoch)
        self.committed_final = manifest.clocks["final"]

    # -- beginning -------------------------------------------------------------------------------------------------

    def due(self, now: float) -> bool:
        if self.open is not None or self.core.moves.changing:
            return False
        if self.wanted:
            return True
        if self.core.moves.in_phase("rebuild") and now - self.opened_at < CATCH_UP_S:
            return False
        interval = self.core.settings.checkpoint_interval_s
        return interval >= 0 and now - self.opened_at >= interval

    def want_for_moves(self, now: float) -> None:
        """Moves begin. The less has changed since the last checkpoint, the less there is to send at the switch."""
        if now - self.opened_at > self.core.settings.poll_s or self.core.moves.uncommitted:
            self.wanted = True

    def begin(self, epoch: Epoch, table: RoutingTable, now: float) -> None:
        expected = {(s.id, c) for s in self.core.topology.stateful for c in table.occupied(s.id)}
        self.open = Checkpoint(epoch, expected)
        self.opened_at = now
        self.wanted = False

    def begin_at_rest(self, now: float) -> list[Command]:
        """With nothing under way: take a checkpoint of what was published since the last one."""
        self.begin(self.core.epochs.published, self.core.routes.table, now)
        self._complete_epoch(self.core.watermarks.clocks)
        return self.flush()

    def published(self, run: EpochRun) -> None:
        if self.open is not None and self.open.epoch == run.epoch:
            self._complete_epoch(run.clocks)

    def _complete_epoch(self, clocks: dict[str, int]) -> None:
        assert self.open is not None
        self.open.published = True
        self.open.clocks = dict(clocks)
        self.open.watermarks = dict(self.core.watermarks.marks)

    # -- collecting deltas -----------------------------------------------------------------------------------------

    def expects(self, stage: StageId) -> bool:
        """Does the open checkpoint wait for a delta of this stage?"""
        return self.open is not None and any(s == stage for s, _ in self.open.expected)

    def collect(self, reports: Sequence[TaskReport]) -> None:
        if self.open is None:
            return
        for report in reports:
            container = (StageId(report.stage), report.index)
            for delta in report.deltas:
                if (delta.epoch, delta.attempt) != (self.open.epoch, self.core.attempts.current):
                    continue
                if container not in self.open.expected:
                    continue  # the report came twice
                self.open.expected.discard(container)
                if delta.file is not None:
                    self.open.files.append(delta.file)
                    self.open.touched[delta.file.name] = list(delta.touched or delta.file.slices)

    def flush(self) -> list[Command]:
        """Ask the containers for what they have not told of."""
        core, taken = self.core, self.open
        assert taken is not None
        if core.epochs.away or taken.flushing or taken.writing or not taken.expected:
            return []
        taken.flushing = True
        core.attempts.sent(taken.epoch, "flush")
        waiting: dict[StageId, tuple[int, ...]] = {}
        for stage, container in sorted(taken.expected):
            waiting[stage] = (*waiting.get(stage, ()), container)
        return [
            Flush(
                epoch=taken.epoch,
                attempt=core.attempts.current,
                checkpoint=self.committed,
                routing=core.routes.table,
                plan=core.inputs.plan,
                containers=waiting,
                progress=core.inputs.progress(taken.epoch),
            )
        ]

    def on_flushed(self, event: Flushed) -> list[Command]:
        ours = self.core.attempts.answered(event.attempt, event.epoch, "flush")
        if not ours or self.open is None or self.open.epoch != event.epoch:
            return []
        errors = [r.error for r in event.reports if r.error is not None]
        if errors:
            return self.core.give_up(errors[0])
        self.collect(event.reports)
        self.open.flushing = False
        if any(r.writing for r in event.reports):
            return []  # the store is slow or away; it is asked again when nothing else is under way
        if self.open.expected:
            return self.core.recover(event.now, "a container lost the delta of a checkpoint before it was written")
        return []

    # -- completing ------------------------------------------------------------------------------------------------

    def write_manifest(self) -> list[Command]:
        taken = self.open
        if taken is None or taken.writing or taken.expected or not taken.published:
            return []
        taken.writing = True
        self.core.attempts.sent(taken.epoch, "manifest")
        manifest = self._advanced(taken)
        return [WriteManifest(epoch=taken.epoch, attempt=self.core.attempts.current, manifest=manifest)]

    def _advanced(self, taken: Checkpoint) -> Manifest:
        """What the manifest must say for the job to go on from this checkpoint."""
        return self.manifest.advance(
            taken.epoch,
            taken.files,
            attempt=self.core.attempts.current,
            routing=self.core.routes.table.to_json(),
            sources=self.core.inputs.at(taken.epoch),
            clocks={"clocks": taken.clocks, "watermarks": taken.watermarks, "final": self._ends_input(taken.epoch)},
        )

    def _ends_input(self, epoch: Epoch) -> bool:
        record = self.core.inputs.log.get(epoch)
        return self.committed_final or bool(record and record.final)

    def on_manifest(self, event: ManifestWritten) -> list[Command]:
        ours = self.core.attempts.answered(event.attempt, event.epoch, "manifest")
        if self.last_written is not None and event.attempt == self.last_written[0]:
            # Nothing of the new attempt has run yet. Whoever looks at the store sees this checkpoint, and its garbage
            # collection goes by it: so must we.
            (_, taken), self.last_written = self.last_written, None
            out = self._commit(taken, event.now)
            self.core.rewind(event.now)
            return out
        if not ours or self.open is None or self.open.epoch != event.epoch:
            return []
        return self._commit(self.open, event.now)

    def _commit(self, taken: Checkpoint, now: float) -> list[Command]:
        core, before = self.core, self.committed
        self.open = None
        self.committed = taken.epoch
        core.attempts.progressed()
        self.manifest = self._advanced(taken)
        self.committed_final = self._ends_input(taken.epoch)
        core.watermarks.committed(taken.clocks, taken.watermarks)
        for info in core.topology.stateful:
            new = {f.name: taken.touched[f.name] for f in taken.files if f.stage == info.id}
            core.holders.committed(info.id, Commit(before, taken.epoch, new))
        core.moves.committed(taken.epoch, now)
        out: list[Command] = [CollectGarbage(epoch=taken.epoch, ends=core.inputs.committed(taken.epoch))]
        for name, files in self.manifest.files.items():
            stage = StageId(name)
            if stage not in self.compacting:
                for task in self._due_merges(stage, files)[:1]:
                    self.compacting.add(stage)
                    out.append(Compact(stage=stage, task=task))
        return out

    # -- merging files -----------------------------------------------------------------------------------------------

    def _due_merges(self, stage: StageId, files: Sequence[DeltaFile]) -> list[CompactionTask]:
        deltas_max = self.core.settings.deltas_max
        if self.core.moves.of(stage):
            return plan_compaction(files, deltas_max * MOVING_DELTAS, ratio=math.inf)
        return plan_compaction(files, deltas_max)

    def on_compacted(self, event: Compacted) -> list[Command]:
        self.compacting.discard(event.stage)
        if event.failed is None:  # else the old files are still whole; the next manifest tries again
            assert event.output is not None
            self.manifest = self.manifest.compacted(event.task, event.output)
        return []

    # -- after a failure -------------------------------------------------------------------------------------------

    def remember_writing(self, attempt: Attempt) -> None:
        """A recovery begins. A manifest that is being written counts, if it gets there."""
        if self.open is not None and self.open.writing:
            self.last_written = (attempt, self.open)

    def rewind(self, now: float) -> None:
        self.open = None
        self.opened_at = now
