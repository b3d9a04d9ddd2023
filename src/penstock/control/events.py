"""Everything that can happen to a job (events), and everything the controller can order (commands).

The controller is ``step(event) -> [command]``: no clock, no threads, no I/O. Events carry ``now``, in seconds of a
monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.ids import Attempt, Epoch, StageId
from penstock.state.backup import Commit
from penstock.state.checkpoint import CompactionTask, DeltaFile, Manifest


class TaskError(msgspec.Struct):
    """What went wrong in a task, so that the driver can raise it again as the same error."""

    kind: str
    message: str
    remedy: str = ""
    evidence: dict[str, Any] = {}


class TaskReport(msgspec.Struct):
    """The control record of one task of one (stage, epoch)."""

    stage: str
    epoch: int
    attempt: int
    index: int
    """Container of a keyed stage, split of a source."""
    rows_in: int = 0
    rows_out: int = 0
    by_operator: dict[str, tuple[int, int, float]] = {}
    """operator -> (rows in, rows out, busy ms)"""
    busy_ms: float = 0.0
    load_ms: float = 0.0
    """Of which slices were brought up."""
    load_cpu_ms: float = 0.0
    """What that took of the cores: the rest was waiting, for the store or for a core."""
    state_rows: int = 0
    state_bytes: int = 0
    late: dict[str, int] = {}
    """keyed stage -> rows that came too late for it, here or on the way to it"""
    dead: int = 0
    time_max: dict[str, int] = {}
    """downstream stage -> greatest event time sent to it (us)"""
    deltas: list[dict[str, Any]] = []
    """Checkpoint files whose writing has finished since the last report."""
    parts: dict[str, Any] = {}
    """sink -> reference of the part written"""
    tables: dict[str, bytes] = {}
    """sink -> rows for a sink that lives on the driver (Arrow IPC)"""
    bytes_out: dict[str, list[int]] = {}
    """downstream stage -> bytes for each container"""
    pid: int = 0
    node: str = ""
    missing: bool = False
    """It did not have its slices at the version it needed, and no checkpoint had them."""
    writing: bool = False
    """Of a flush: deltas are still being written, because the store is slow or away. Ask again."""
    error: TaskError | None = None
    held: tuple[int, list[int]] | None = None
    """Slices of which it has a backup that is, or soon will be, current at a checkpoint, if that changed."""
    refused: list[int] = []
    """Slices that it was to have a backup of and cannot, for want of memory and disk; told together with ``held``."""
    rebuilt: dict[str, int] = {}
    """Slices that it had to bring up, by where they came from: backup, durable."""
    unsent: bool = False
    """It has pieces for backup holders that wait for the next exchange among peers."""
    problem: str = ""
    """Why it cannot hold backups any more (a full disk)."""
    waits: str = ""
    """What of the checkpoint store it cannot read just now for backups to be made."""
    load: dict[int, int] = {}
    """Every few epochs: slice -> rows that came for it since the last time, counted or estimated from a sample."""
    keys: dict[int, list[tuple[str, float]]] = {}
    """slice that it was asked about -> its hottest keys, and the share of its rows that each has"""


class NodeInfo(msgspec.Struct, frozen=True):
    """A node: a Spark executor."""

    name: str
    host: str = ""
    zone: str = ""
    """What fails together: the host, a rack, or what the user says. Unknown: the node alone."""
    cores: int = 1


# -- events --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Event:
    now: float


@dataclass(frozen=True)
class Started(Event):
    """The engine is up. ``restored`` is the last whole checkpoint, ``logged`` the epochs in the log after it."""

    restored: Manifest | None = None
    logged: tuple[dict[str, Any], ...] = ()
    attempt: int = 1
    """Greater than any that an earlier start of this job has used."""
    nodes: tuple[NodeInfo, ...] = ()


@dataclass(frozen=True)
class Tick(Event):
    """Time passes."""


@dataclass(frozen=True)
class EpochPlanned(Event):
    epoch: Epoch
    ranges: dict[str, dict[str, Any]]
    """source -> start, end, rows, facts"""
    exhausted: tuple[str, ...] = ()
    clock_ms: int = 0


@dataclass(frozen=True)
class NothingNew(Event):
    epoch: Epoch
    exhausted: bool = False
    """No source can ever give another row."""


@dataclass(frozen=True)
class EpochLogged(Event):
    epoch: Epoch
    attempt: Attempt


@dataclass(frozen=True)
class StageDone(Event):
    epoch: Epoch
    stage: StageId
    attempt: Attempt
    reports: tuple[TaskReport, ...]
    elapsed_ms: float = 0.0


@dataclass(frozen=True)
class StageFailed(Event):
    """The engine could not run a stage (an executor died, Spark gave up). Recovery decides."""

    epoch: Epoch
    stage: StageId
    attempt: Attempt
    reason: str
    node: str = ""
    """Where the task failed, as far as that is known."""


@dataclass(frozen=True)
class EpochPublished(Event):
    epoch: Epoch
    attempt: Attempt


@dataclass(frozen=True)
class Flushed(Event):
    """Every container has written what it had to: the deltas of a checkpoint."""

    epoch: Epoch
    attempt: Attempt
    reports: tuple[TaskReport, ...]


@dataclass(frozen=True)
class ManifestWritten(Event):
    epoch: Epoch
    attempt: Attempt


@dataclass(frozen=True)
class Compacted(Event):
    """Checkpoint files merged: ``output`` may take the place of the task's inputs in the next manifest."""

    stage: StageId
    task: CompactionTask
    output: DeltaFile | None
    failed: str | None = None


@dataclass(frozen=True)
class NodesChanged(Event):
    """The nodes there are now. Whoever is not among them is lost."""

    nodes: tuple[NodeInfo, ...]
    reason: str = ""


@dataclass(frozen=True)
class Stuck(Event):
    """These containers have been at one task for too long, without a sign of life."""

    stage: StageId
    epoch: Epoch
    attempt: Attempt
    containers: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class RescaleRequested(Event):
    stage: StageId
    instances: int
    targets: dict[int, int] = field(default_factory=dict)
    """slice -> container, once there is room: these move and no others. Empty: all are spread evenly."""


@dataclass(frozen=True)
class MoveRequested(Event):
    """Move some slices of a stage to other containers, while the job runs."""

    stage: StageId
    targets: dict[int, int]
    """slice -> container"""
    reason: str = "asked for"


@dataclass(frozen=True)
class RebalanceRequested(Event):
    """Spread slices evenly over all containers there are, moving as few as that takes."""

    reason: str = "asked for"


@dataclass(frozen=True)
class NodesInvited(Event):
    """So many more nodes were asked for: when they come, they get containers."""

    count: int


@dataclass(frozen=True)
class LeaveRequested(Event):
    """Drain some nodes, then let them go."""

    nodes: tuple[str, ...]


@dataclass(frozen=True)
class CoresRequested(Event):
    """Use so many cores of a node: as many containers of every stage work there, and share its slices."""

    node: str
    cores: int


@dataclass(frozen=True)
class HotSlices(Event):
    """Slices that keep a container busy all by themselves: what are their hottest keys?"""

    slices: dict[StageId, tuple[int, ...]]


@dataclass(frozen=True)
class CancelMovesRequested(Event):
    stage: StageId | None = None
    slices: tuple[int, ...] | None = None


@dataclass(frozen=True)
class WarmedUp(Event):
    """Slots that will be used are up (or could not be: then they start when they are needed)."""

    stage: StageId
    containers: tuple[int, ...]


@dataclass(frozen=True)
class StoreChanged(Event):
    """The store of the checkpoint has gone away, or has come back."""

    away: bool


@dataclass(frozen=True)
class StopRequested(Event):
    pass


@dataclass(frozen=True)
class Fatal(Event):
    """Something went wrong that running again would not mend (user code, a full disk, a sink refusing)."""

    error: TaskError


# -- commands ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    cause: str = field(kw_only=True, default="")
    """The event that led to it, for the journal."""


@dataclass(frozen=True)
class PlanEpoch(Command):
    epoch: Epoch
    offsets: dict[str, dict[str, Any] | None]
    rows_max: int
    even_if_empty: bool = False


@dataclass(frozen=True)
class LogEpoch(Command):
    epoch: Epoch
    attempt: Attempt
    record: dict[str, Any]


@dataclass(frozen=True)
class RunStage(Command):
    """Run one stage of one epoch. Everything a task needs to be repeatable is in here."""

    epoch: Epoch
    stage: StageId
    attempt: Attempt
    checkpoint: Epoch
    """State not in memory comes from this checkpoint, if it is the one right before this epoch."""
    routing: int
    seal: bool
    """This epoch is to be checkpointed."""
    range: dict[str, Any] | None
    watermark_before: int
    watermark: int
    arrivals: dict[str, list[int]]
    """upstream source stage -> watermark before each of its splits"""
    clock_ms: int
    ports: tuple[tuple[int, int], ...] = ()
    """with several inputs: watermark before and after, of each"""
    containers: tuple[int, ...] = ()
    """Containers that run: of a keyed stage those with slices, or that will have some; of a source, one a split."""
    copies: tuple[tuple[int, ...], ...] = ()
    """For each slice the containers that keep a copy: backup holders, targets of moves. Empty: nobody."""
    commits: tuple[Commit, ...] = ()
    """The last checkpoints, for whoever keeps copies."""
    sends: bool = False
    """Containers send to their peers of the same stage, who read it in the next epoch."""
    receives: bool = False
    """They did so in the epoch before."""
    handover: dict[int, int] = field(default_factory=dict)
    """slice -> container that owns it from the next epoch on: its owner sends what changed since the checkpoint"""
    full: bool = False
    """A checkpoint writes the whole state before the epoch goes on."""
    quiet: bool = False
    """The sinks have this epoch already: it runs again for the state that it leaves."""
    hot: tuple[int, ...] = ()
    """Slices whose owners are to say which keys are the hottest."""
    progress: dict[str, Any] = field(default_factory=dict)
    """With ``seal``: source -> how far it has been read. It goes into the header of what is written."""


@dataclass(frozen=True)
class PublishEpoch(Command):
    epoch: Epoch
    attempt: Attempt
    parts: dict[str, list[Any]]
    tables: dict[str, list[bytes]]


@dataclass(frozen=True)
class Flush(Command):
    """Have every container seal at ``epoch`` (unless it has) and finish writing its deltas."""

    epoch: Epoch
    attempt: Attempt
    checkpoint: Epoch
    routing: int
    containers: dict[StageId, tuple[int, ...]] = field(default_factory=dict)
    """Those that have not yet said that they are done."""
    progress: dict[str, Any] = field(default_factory=dict)
    full: bool = False
    """All of the state, not what changed: see ``Baseline``."""


@dataclass(frozen=True)
class WriteManifest(Command):
    epoch: Epoch
    attempt: Attempt
    manifest: Manifest


@dataclass(frozen=True)
class Compact(Command):
    stage: StageId
    task: CompactionTask


@dataclass(frozen=True)
class WarmUp(Command):
    """Start slots that will be used, while epochs go on: starting Python takes seconds, switching none."""

    stage: StageId
    containers: tuple[int, ...]
    homes: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ReleaseNodes(Command):
    """These nodes own and hold nothing any more: give them back to Spark."""

    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Tell(Command):
    """Something that people should know of: the journal keeps it, the status shows it."""

    text: str


@dataclass(frozen=True)
class ReleaseEpoch(Command):
    """Nobody needs this epoch's shuffle files any more."""

    epoch: Epoch


@dataclass(frozen=True)
class CollectGarbage(Command):
    """``epoch`` is covered by a whole checkpoint."""

    epoch: Epoch
    ends: dict[str, dict[str, Any]]
    """source -> offset that will never be read again"""


@dataclass(frozen=True)
class CancelAll(Command):
    """Stop whatever of older attempts still runs."""

    attempt: Attempt


@dataclass(frozen=True)
class Finish(Command):
    """The job is over: stopped or complete."""

    reason: str


@dataclass(frozen=True)
class Fail(Command):
    error: TaskError
