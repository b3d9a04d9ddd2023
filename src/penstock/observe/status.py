"""What a running job says of itself: one immutable snapshot.

The job's loop publishes a ``JobStatus`` several times a second. The command, the live view, policies and tests read
the latest one and nothing else. Rates and shares are over the last seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class ContainerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A container of a stage that owns slices."""

    number: int
    busy: float = 0.0
    """Share of its time that it works, 0 to 1."""
    queue_rows: int = 0
    """Rows that were sent to it and are not processed. An estimate."""


class StageStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of the flow, named after its root operator."""

    id: str
    kind: str
    """source or keyed."""
    operators: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    """The stages that feed it."""
    stateful: bool = False
    instances: int = 1
    """Its containers; of a source, its tasks."""
    working: int = 0
    """Instances that own slices; of a source, all."""
    rows_in: int = 0
    rows_out: int = 0
    rows_in_s: float = 0.0
    rows_out_s: float = 0.0
    offered_s: float | None = None
    """Rows a second that would come if no stage held the sources back; of a source, what arrives. None: not known."""
    capacity_s: float | None = None
    """Rows a second that it would get done if it worked all the time. None: not known."""
    busy: float = 0.0
    """Share of its instances' time that they work. This and the next two add up to one."""
    back_pressured: float = 0.0
    """Share of its time in which rows wait in a source above it and something behind it holds them back."""
    idle: float = 1.0
    selectivity: dict[str, float] = {}
    """stage that feeds it -> rows that come here for each row that comes there"""
    queue: int = 0
    """Epochs that wait before this stage."""
    queue_rows: int = 0
    """Rows that were sent to it and are not processed. An estimate."""
    backlog_rows: int | None = None
    """Of a source: rows that wait in it. None: it cannot tell."""
    backlog_growth_s: float = 0.0
    """Of a source: rows a second by which its backlog grows."""
    backlog_grows: bool = False
    """Of a source: its backlog grows by more than chance."""
    bytes_local: int = 0
    bytes_remote: int = 0
    state_rows: int = 0
    state_bytes: int = 0
    late: int = 0
    containers: tuple[ContainerStatus, ...] = ()
    """Of a keyed stage: the containers that own slices."""
    owners: tuple[int, ...] = ()
    """Of a keyed stage: the container of each slice."""
    usable: tuple[int, ...] = ()
    """Of a keyed stage: the containers that may own slices."""
    slice_rows_s: tuple[float, ...] = ()
    """Of a keyed stage: rows a second that come for each slice. Empty while too little was seen."""


class OperatorStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One operator of the flow, counted since the job's start."""

    id: str
    rows_in: int = 0
    rows_out: int = 0
    busy_ms: float = 0.0


class EpochStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One published epoch."""

    epoch: int
    at_s: float
    """When it was published, in seconds since the job's start."""
    rows: int = 0
    ms: float = 0.0
    """From its plan until it was published."""
    latency_ms: float = 0.0
    """The same from the plan before its own: the longest that a row of it waited."""
    state_rows: int = 0
    instances: dict[str, int] = {}


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the job: a Spark executor, or this process."""

    name: str
    host: str | None = None
    zone: str | None = None
    cores: int | None = None
    limit: int | None = None
    """Cores that the job is to use. None: all."""
    containers: tuple[int, ...] = ()
    """Numbers of the containers that live there."""
    slices: int = 0
    state: str = "up"
    """up, leaving or suspect."""


class MoveStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A slice on its way."""

    stage: str
    slice: int
    source: int
    target: int
    phase: str = "?"
    since_s: float = 0.0
    cause: str = ""


class BackupStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How many slices have their backups."""

    copies: int = 0
    """Backups that every slice should have."""
    slices_current: int = 0
    """Slices that have all of them, current at the last checkpoint."""
    slices_total: int = 0


class StragglerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A container that the others of its stage wait for."""

    stage: str
    container: int
    node: str = ""
    times_slower: float = 1.0
    times_rows: float = 1.0
    """Its rows, in times of the others'. Much more than 1 is skew, about 1 is a slow machine."""

    def __str__(self) -> str:
        where = f" on {self.node}" if self.node else ""
        skewed = self.times_rows >= 1.5
        why = f", with {self.times_rows:g} times the rows" if skewed else ", with no more rows than the others"
        who = f"container {self.container} of '{self.stage}'{where}"
        return f"{who} takes {self.times_slower:g} times as long as the others{why}"


class HotSliceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A slice that is too hot for one container, so that no move helps."""

    stage: str
    slice: int
    container: int
    share: float
    """Share of the container's time that it takes."""
    rows_s: float = 0.0
    keys: tuple[tuple[Any, float], ...] = ()
    """Its hottest keys, each with its share of the slice's rows. Empty until they are known."""

    def __str__(self) -> str:
        keys = ", ".join(f"{key!r} {share:.0%}" for key, share in self.keys)
        who = f"slice {self.slice} of '{self.stage}'"
        said = f"{who} alone takes {self.share:.0%} of the time of container {self.container}"
        return said + (f"; its hottest keys: {keys}" if keys else "")


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A job at one moment."""

    job: str
    flow: str
    engine: str
    phase: str
    """starting, running, recovering, stopping, stopped, complete (its sources have ended) or failed."""
    epoch: int = 0
    """The last epoch whose output is published."""
    checkpoint_epoch: int = 0
    """The last epoch that a complete checkpoint covers."""
    checkpoint_bytes: int = 0
    checkpoints: int = 0
    epochs_in_flight: int = 0
    rows: int = 0
    rows_s: float = 0.0
    """Rows of the sources that were processed in a second."""
    backlog_rows: int | None = None
    """Rows that wait in the sources together. None: one of them cannot tell."""
    epoch_ms: float = 0.0
    """Median time of recent epochs, from start to published."""
    latency_ms_p50: float = 0.0
    latency_ms_p99: float = 0.0
    state_rows: int = 0
    state_bytes: int = 0
    dead_letters: int = 0
    late: int = 0
    recoveries: int = 0
    slices: int = 0
    routing_version: int = 0
    uptime_s: float = 0.0
    watermark: str | None = None
    error: str | None = None
    stages: tuple[StageStatus, ...] = ()
    """In topological order."""
    operators: tuple[OperatorStatus, ...] = ()
    history: tuple[EpochStatus, ...] = ()
    """The last few hundred epochs."""
    nodes: tuple[NodeStatus, ...] = ()
    nodes_coming: int = 0
    """Nodes that were asked for and are not there."""
    slots: int | None = None
    """Containers of a stage that may work at all, by the cores that nodes may use. None: no limit."""
    moves: tuple[MoveStatus, ...] = ()
    backups: BackupStatus | None = None
    """None: the job keeps no backups."""
    policy: str | None = None
    """The policy that scales the job, and what it last said."""
    stragglers: tuple[StragglerStatus, ...] = ()
    hot: tuple[HotSliceStatus, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        fields: dict[str, Any] = msgspec.to_builtins(self, enc_hook=str)
        return fields

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> JobStatus:
        """What ``to_dict`` gave, perhaps by way of JSON. Fields that this version does not know are left out."""
        return msgspec.convert(data, cls)
