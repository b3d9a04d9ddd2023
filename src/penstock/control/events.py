"""Everything that can happen to a job (events), and everything the controller can order (commands).

The controller is ``step(event) -> [command]``: no clock, no threads, no I/O. Events carry ``now``, in seconds of a
monotonic clock. Events and commands are immutable values.
"""

from __future__ import annotations

import msgspec

from penstock.control.records import (
    EpochRecord,
    NodeInfo,
    Offset,
    PeerOrders,
    SourceSpan,
    StageTime,
    TaskError,
    TaskReport,
)
from penstock.control.routing import RoutingTable
from penstock.ids import FIRST_PLAN, Attempt, Epoch, PlanVersion, StageId
from penstock.state.backup import Commit
from penstock.state.checkpoint import CompactionTask, DeltaFile, Manifest

# -- events --------------------------------------------------------------------------------------------------------


class Event(msgspec.Struct, frozen=True, kw_only=True):
    now: float


class Started(Event, frozen=True, kw_only=True):
    """The engine is up. ``restored`` is the last whole checkpoint, ``logged`` the epochs in the log after it."""

    restored: Manifest | None = None
    logged: tuple[EpochRecord, ...] = ()
    attempt: int = 1
    """Greater than any that an earlier start of this job has used."""
    nodes: tuple[NodeInfo, ...] = ()


class Tick(Event, frozen=True, kw_only=True):
    """Time passes."""


class EpochPlanned(Event, frozen=True, kw_only=True):
    epoch: Epoch
    ranges: dict[str, SourceSpan]
    """source -> what the epoch reads of it. A source without new rows is left out."""
    exhausted: tuple[str, ...] = ()
    clock_ms: int = 0


class NothingNew(Event, frozen=True, kw_only=True):
    epoch: Epoch
    exhausted: bool = False
    """No source can ever give another row."""


class EpochLogged(Event, frozen=True, kw_only=True):
    epoch: Epoch
    attempt: Attempt


class StageDone(Event, frozen=True, kw_only=True):
    epoch: Epoch
    stage: StageId
    attempt: Attempt
    reports: tuple[TaskReport, ...]
    elapsed_ms: float = 0.0


class StageFailed(Event, frozen=True, kw_only=True):
    """The engine could not run a stage (an executor died, Spark gave up). Recovery decides."""

    epoch: Epoch
    stage: StageId
    attempt: Attempt
    reason: str
    node: str = ""
    """Where the task failed, as far as that is known."""


class EpochPublished(Event, frozen=True, kw_only=True):
    epoch: Epoch
    attempt: Attempt


class Flushed(Event, frozen=True, kw_only=True):
    """Every container has written what it had to: the deltas of a checkpoint."""

    epoch: Epoch
    attempt: Attempt
    reports: tuple[TaskReport, ...]


class ManifestWritten(Event, frozen=True, kw_only=True):
    epoch: Epoch
    attempt: Attempt


class Compacted(Event, frozen=True, kw_only=True):
    """Checkpoint files merged: ``output`` may take the place of the task's inputs in the next manifest."""

    stage: StageId
    task: CompactionTask
    output: DeltaFile | None
    failed: str | None = None


class NodesChanged(Event, frozen=True, kw_only=True):
    """The nodes there are now. Whoever is not among them is lost."""

    nodes: tuple[NodeInfo, ...]
    reason: str = ""


class Stuck(Event, frozen=True, kw_only=True):
    """These containers have been at one task for too long, without a sign of life."""

    stage: StageId
    epoch: Epoch
    attempt: Attempt
    containers: tuple[int, ...]
    seconds: float


class RescaleRequested(Event, frozen=True, kw_only=True):
    stage: StageId
    instances: int
    targets: dict[int, int] = {}
    """slice -> container, once there is room: these move and no others. Empty: all are spread evenly."""


class MoveRequested(Event, frozen=True, kw_only=True):
    """Move some slices of a stage to other containers, while the job runs."""

    stage: StageId
    targets: dict[int, int]
    """slice -> container"""
    reason: str = "asked for"


class RebalanceRequested(Event, frozen=True, kw_only=True):
    """Spread slices evenly over all containers there are, moving as few as that takes."""

    reason: str = "asked for"


class NodesInvited(Event, frozen=True, kw_only=True):
    """So many more nodes were asked for: when they come, they get containers."""

    count: int


class LeaveRequested(Event, frozen=True, kw_only=True):
    """Drain some nodes, then let them go."""

    nodes: tuple[str, ...]


class CoresRequested(Event, frozen=True, kw_only=True):
    """Use so many cores of a node: as many containers of every stage work there, and share its slices."""

    node: str
    cores: int


class HotSlices(Event, frozen=True, kw_only=True):
    """Slices that keep a container busy all by themselves: what are their hottest keys?"""

    slices: dict[StageId, tuple[int, ...]]


class CancelMovesRequested(Event, frozen=True, kw_only=True):
    stage: StageId | None = None
    slices: tuple[int, ...] | None = None


class WarmedUp(Event, frozen=True, kw_only=True):
    """Slots that will be used are up (or could not be: then they start when they are needed)."""

    stage: StageId
    containers: tuple[int, ...]


class StoreChanged(Event, frozen=True, kw_only=True):
    """The store of the checkpoint has gone away, or has come back."""

    away: bool


class StopRequested(Event, frozen=True, kw_only=True):
    pass


class Fatal(Event, frozen=True, kw_only=True):
    """Something went wrong that running again would not mend (user code, a full disk, a sink refusing)."""

    error: TaskError


# -- commands ------------------------------------------------------------------------------------------------------


class Command(msgspec.Struct, frozen=True, kw_only=True):
    cause: int = 0
    """Number of the controller's step that ordered it. The journal's record of that step has the event."""


class PlanEpoch(Command, frozen=True, kw_only=True):
    epoch: Epoch
    offsets: dict[str, Offset | None]
    """source -> where it goes on reading; None: at its beginning"""
    rows_max: int
    even_if_empty: bool = False


class LogEpoch(Command, frozen=True, kw_only=True):
    epoch: Epoch
    attempt: Attempt
    record: EpochRecord


class RunStage(Command, frozen=True, kw_only=True):
    """Run one stage of one epoch. The command holds everything that makes its tasks repeatable."""

    epoch: Epoch
    stage: StageId
    attempt: Attempt
    checkpoint: Epoch
    """A container whose state is not in memory loads this checkpoint, if it is the one right before the epoch."""
    routing: RoutingTable
    plan: PlanVersion = FIRST_PLAN
    seal: bool = False
    """The epoch is to be checkpointed."""
    span: SourceSpan | None = None
    """What a source reads. None: nothing."""
    time: StageTime = StageTime()
    clock_ms: int = 0
    containers: tuple[int, ...] = ()
    """Containers that run: of a keyed stage those with slices, or that will have some; of a source, one a split."""
    peers: PeerOrders = PeerOrders()
    commits: tuple[Commit, ...] = ()
    """The last checkpoints, for containers that keep copies."""
    quiet: bool = False
    """The sinks have the epoch already. It runs again for the state that it leaves."""
    hot: tuple[int, ...] = ()
    """Slices whose owners are to say which keys are the hottest."""
    progress: dict[str, Offset | None] = {}
    """With ``seal``: source -> how far it has been read. It goes into the header of what is written."""


class PublishEpoch(Command, frozen=True, kw_only=True):
    """Hand the epoch's rows to the sinks. The runtime has them: it takes them from the tasks' reports."""

    epoch: Epoch
    attempt: Attempt


class Flush(Command, frozen=True, kw_only=True):
    """Have every container seal at ``epoch`` (unless it has) and finish writing its deltas."""

    epoch: Epoch
    attempt: Attempt
    checkpoint: Epoch
    routing: RoutingTable
    plan: PlanVersion = FIRST_PLAN
    containers: dict[StageId, tuple[int, ...]] = {}
    """Containers that have not yet said that they are done."""
    progress: dict[str, Offset | None] = {}


class WriteManifest(Command, frozen=True, kw_only=True):
    epoch: Epoch
    attempt: Attempt
    manifest: Manifest


class Compact(Command, frozen=True, kw_only=True):
    stage: StageId
    task: CompactionTask


class WarmUp(Command, frozen=True, kw_only=True):
    """Start slots that will be used, while epochs go on: starting Python takes seconds, switching none."""

    stage: StageId
    containers: tuple[int, ...]
    homes: dict[int, str] = {}


class ReleaseNodes(Command, frozen=True, kw_only=True):
    """These nodes own and hold nothing any more: give them back to Spark."""

    nodes: tuple[str, ...]


class Tell(Command, frozen=True, kw_only=True):
    """Something that people should know of: the journal keeps it, the status shows it."""

    text: str


class ReleaseEpoch(Command, frozen=True, kw_only=True):
    """Nobody needs this epoch's shuffle files any more."""

    epoch: Epoch


class CollectGarbage(Command, frozen=True, kw_only=True):
    """``epoch`` is covered by a whole checkpoint."""

    epoch: Epoch
    ends: dict[str, Offset]
    """source -> offset that will never be read again"""


class CancelAll(Command, frozen=True, kw_only=True):
    """Stop whatever of older attempts still runs."""

    attempt: Attempt
    reason: str = ""
    """The failure that led to it. Empty: the job gives up."""


class Finish(Command, frozen=True, kw_only=True):
    """The job is over: stopped or complete."""

    reason: str


class Fail(Command, frozen=True, kw_only=True):
    error: TaskError
