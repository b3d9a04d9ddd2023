"""How far time has come: the clocks of the edges between stages, and the watermark of each stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.control.concern import Concern
from penstock.control.epochs import EpochRun
from penstock.control.records import NEVER, StageTime
from penstock.control.timing import time_of
from penstock.control.topology import StageInfo
from penstock.ids import Epoch, StageId
from penstock.state.checkpoint import Manifest

if TYPE_CHECKING:
    from penstock.control.controller import Controller

CLOCK = "clock"
"""Among the clocks of edges: the wall clock of the last epoch (ms), which never goes back."""


class Watermarks(Concern):
    """The state is as of the last published epoch. An epoch under way keeps its own, in its ``EpochRun``."""

    def __init__(self, core: Controller) -> None:
        super().__init__(core)
        self.clocks: dict[str, int] = {}
        """edge "up>down" -> greatest event time seen (us); "@stage#port" -> watermark of one input"""
        self.marks: dict[StageId, int] = {}
        """stage -> watermark (us)"""
        self.committed_clocks: dict[str, int] = {}
        self.committed_marks: dict[StageId, int] = {}

    @property
    def clock_ms(self) -> int:
        return self.clocks.get(CLOCK, 0)

    def restore(self, manifest: Manifest) -> None:
        self.committed_clocks = dict(manifest.clocks["clocks"])
        self.committed_marks = {StageId(s): w for s, w in manifest.clocks["watermarks"].items()}

    def rewind(self) -> None:
        """Time is what it was at the last checkpoint."""
        self.clocks = dict(self.committed_clocks)
        self.marks = dict(self.committed_marks)

    def published(self, run: EpochRun) -> None:
        self.clocks, self.marks = run.clocks, {**self.marks, **run.watermarks}

    def committed(self, clocks: dict[str, int], marks: dict[StageId, int]) -> None:
        self.committed_clocks, self.committed_marks = clocks, marks

    def end(self, run: EpochRun) -> None:
        """All stages of the epoch are done: its clocks are complete."""
        before, _ = self._before(run.epoch)
        run.clocks = {**before, **run.clocks, CLOCK: run.record.clock_ms}

    def time(self, run: EpochRun, stage: StageInfo) -> StageTime:
        """What the stage is told of time. Its upstream stages of the epoch are done."""
        clocks_before, marks_before = self._before(run.epoch)
        time = time_of(
            stage,
            {up: self.core.topology[up] for up in stage.ins},
            clocks_before,
            marks_before.get(stage.id, NEVER),
            run.watermarks,
            {up: run.done[up] for up in stage.ins} if stage.timed else {},
            final=run.record.final,
            clock_ms=run.record.clock_ms,
        )
        run.clocks.update(time.clocks)
        return StageTime(before=time.before, watermark=time.watermark, arrivals=time.arrivals, ports=time.ports)

    def _before(self, epoch: Epoch) -> tuple[dict[str, int], dict[StageId, int]]:
        previous = self.core.epochs.in_flight.get(Epoch(epoch - 1))
        if previous is None:
            return self.clocks, self.marks
        return previous.clocks, {**self.marks, **previous.watermarks}
