"""What the controller knows of a flow: stages and edges, no data types, no code."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.ids import StageId


def at_port(stage: str, port: int) -> str:
    """The name of one of a stage's inputs, or of a stage as the origin of one."""
    return f"{stage}#{port}" if port else stage


@dataclass(frozen=True)
class StageInfo:
    id: StageId
    is_source: bool
    stateful: bool
    timed: bool
    lateness_us: int
    hold_us: int
    ins: tuple[StageId, ...]
    ports: tuple[int, ...] = ()
    """Which input of its operator each of ``ins`` feeds; left out: all the one that it has."""
    clocked: bool = False
    """Its time is the clock of the epoch, not the data's."""

    @property
    def inputs(self) -> tuple[tuple[StageId, int], ...]:
        return tuple(zip(self.ins, self.ports or (0,) * len(self.ins), strict=True))


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
