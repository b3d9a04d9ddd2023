"""What the controller knows of a flow: stages and edges, no data types, no code."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.ids import StageId


@dataclass(frozen=True)
class StageInfo:
    id: StageId
    is_source: bool
    stateful: bool
    timed: bool
    lateness_us: int
    hold_us: int
    ins: tuple[StageId, ...]


@dataclass(frozen=True)
class Topology:
    """Stages in topological order."""

    stages: tuple[StageInfo, ...]

    def __getitem__(self, stage: StageId) -> StageInfo:
        return next(s for s in self.stages if s.id == stage)

    @property
    def stateful(self) -> tuple[StageInfo, ...]:
        return tuple(s for s in self.stages if s.stateful)

    def keyed(self) -> dict[StageId, bool]:
        return {s.id: not s.is_source for s in self.stages}
