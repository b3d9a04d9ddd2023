"""Records that control passes on or writes: what a task reports, what an epoch reads, what a stage is told of time."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.control.routing import RoutingTable
from penstock.ids import FIRST_PLAN, Attempt, Epoch, PlanVersion, RoutingVersion
from penstock.state.checkpoint import DeltaFile

NEVER = -(2**63) + 1
"""The watermark before any event (microseconds)."""
FOREVER = 2**63 - 1
"""The watermark after the last event (microseconds)."""


class TaskError(msgspec.Struct, kw_only=True):
    """An error that a task met. The driver raises it again as the same class."""

    kind: str
    """Name of the class in ``penstock.errors``."""
    message: str
    remedy: str = ""
    evidence: dict[str, Any] = {}


class SealedDelta(msgspec.Struct, kw_only=True, frozen=True):
    """A delta that a container has finished writing."""

    epoch: int
    attempt: int
    file: DeltaFile | None
    """None: nothing had changed, so there is no file."""
    touched: tuple[int, ...] = ()
    """Slices that the file has rows of."""


class TaskOutput(msgspec.Struct, kw_only=True):
    """What a task made for the sinks. The runtime keeps it until the epoch is published; control never sees it."""

    parts: dict[str, Any] = {}
    """sink -> reference of the part that the task wrote"""
    tables: dict[str, bytes] = {}
    """sink -> rows for a sink that lives on the driver (Arrow IPC)"""


class TaskReport(msgspec.Struct, kw_only=True):
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
    """Time that the task worked, without ``load_ms``."""
    load_ms: float = 0.0
    """Time in which the task brought slices up."""
    load_cpu_ms: float = 0.0
    """Processor time of bringing slices up. The rest of ``load_ms`` was waiting, for the store or for a core."""
    state_rows: int = 0
    state_bytes: int = 0
    late: dict[str, int] = {}
    """keyed stage -> rows that came too late for it, here or on the way to it"""
    dead: int = 0
    """Records that were set aside."""
    time_max: dict[str, int] = {}
    """downstream stage -> greatest event time sent to it (us)"""
    deltas: list[SealedDelta] = []
    """Deltas whose writing has finished since the last report."""
    output: TaskOutput | None = None
    bytes_out: dict[str, list[int]] = {}
    """downstream stage -> bytes for each container"""
    pid: int = 0
    node: str = ""
    missing: bool = False
    """The container did not have its slices at the version it needed, and no checkpoint had them."""
    writing: bool = False
    """Of a flush: deltas are still being written, because the store is slow or away. The controller asks again."""
    error: TaskError | None = None
    held: tuple[int, list[int]] | None = None
    """(checkpoint, slices): the backups that the container has, current at this checkpoint. None: as told before."""
    refused: list[int] = []
    """Slices that the container has no room for a backup of. Told together with ``held``."""
    rebuilt: dict[str, int] = {}
    """Slices that the container had to bring up, by where they came from: backup, durable."""
    unsent: bool = False
    """The container has pieces for backup holders, which wait for the next exchange among peers."""
    problem: str = ""
    """Why the container cannot hold backups any more, such as a full disk."""
    waits: str = ""
    """What the container cannot read from the checkpoint store just now, so that a backup is not made yet."""
    load: dict[int, int] = {}
    """slice -> rows that came for it since the last time, counted or estimated. Only every few epochs."""
    keys: dict[int, list[tuple[str, float]]] = {}
    """slice that the controller asked about -> its hottest keys, each with its share of the slice's rows"""


class NodeInfo(msgspec.Struct, frozen=True):
    """A node: a Spark executor."""

    name: str
    host: str = ""
    zone: str = ""
    """What fails together: the host, a rack, or what the user says. Unknown: the node alone."""
    cores: int = 1


Offset = dict[str, Any]
"""A place in a source: the source's own JSON."""


class SourceSpan(msgspec.Struct, kw_only=True, frozen=True):
    """What one epoch reads of one source. Offsets and facts are the source's own JSON."""

    start: Offset
    end: Offset
    rows: int
    """An estimate."""
    facts: list[Any] = []
    """What the source must remember of this span, to read it again in the same way."""


class EpochRecord(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The log's entry of an epoch, written before the epoch runs."""

    epoch: Epoch
    attempt: Attempt
    ranges: dict[str, SourceSpan]
    """source -> what the epoch reads of it"""
    clock_ms: int
    """Wall clock of the epoch. It never goes back from one epoch to the next."""
    final: bool
    """The sources have ended: this epoch closes every window."""
    version: RoutingVersion
    """Routing version that the epoch was planned with."""
    routing: RoutingTable | None = None
    """The routing table, where the epoch before had another version."""
    plan: PlanVersion = FIRST_PLAN
    """Version of the plan that the epoch runs with."""

    @property
    def rows(self) -> int:
        return sum(span.rows for span in self.ranges.values())


class StageTime(msgspec.Struct, kw_only=True, frozen=True):
    """What a stage is told of time for one epoch. Watermarks are in microseconds."""

    before: int = NEVER
    """Watermark when the epoch begins."""
    watermark: int = NEVER
    """Watermark when the epoch ends."""
    arrivals: dict[str, list[int]] = {}
    """upstream source -> watermark of that input before each of its splits"""
    ports: tuple[tuple[int, int], ...] = ()
    """With several inputs: watermark before and after, of each."""


class PeerOrders(msgspec.Struct, kw_only=True, frozen=True):
    """What containers of one stage do for each other in one epoch."""

    copies: tuple[tuple[int, ...], ...] = ()
    """slice -> containers that keep a copy of it: backup holders, and targets of moves. Empty: nobody."""
    sends: bool = False
    """Containers send to their peers, which read it in the next epoch."""
    receives: bool = False
    """Peers have sent in the epoch before."""
    handover: dict[int, int] = {}
    """slice -> container that owns it from the next epoch on. Its owner sends what changed since the checkpoint."""
