"""What the controller keeps of epochs and checkpoints under way, and the settings it goes by."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from penstock.control.events import TaskReport
from penstock.control.routing import RoutingTable
from penstock.ids import Epoch, StageId
from penstock.state.checkpoint import DeltaFile


@dataclass(frozen=True)
class Baseline:
    """The ways of others, in the same engine: for comparison, in benchmarks and tests only. No setting leads here."""

    stop_and_copy: bool = False
    """For a rescale, or other cores of a node, everything stops, a checkpoint is taken, and the new owners load it."""
    full_snapshots: bool = False
    """Checkpoints write all of the state while everything waits."""


@dataclass(frozen=True)
class Settings:
    epochs_in_flight: int = 2
    checkpoint_interval_s: float = 2.0
    """Negative: only when asked (stop, rescale)."""
    idle_epoch_s: float = 20.0
    poll_s: float = 0.02
    deltas_max: int = 8
    epochs_max: int | None = None
    away_epochs: int = 0
    """Epochs that may run ahead of the log while the store is away."""
    backups: int = 0
    """Copies of each slice on other nodes, as far as there are nodes."""
    placement: str = "chained"
    live: bool = True
    """Slices move while epochs run. False: see ``Baseline.stop_and_copy``."""
    move_timeout_s: float = 600.0
    grows: bool = True
    """Nodes that come get containers. False: only those that were asked for, or that take a lost one's place."""
    full_snapshots: bool = False
    """See ``Baseline``."""
    schedule: str = "load"
    """How slices are dealt out to the slots of a node, and to all containers."""


@dataclass
class EpochRun:
    """One epoch under way."""

    epoch: Epoch
    record: dict[str, Any]
    logged: bool
    seal: bool
    began: float
    running: set[StageId] = field(default_factory=set)
    done: dict[StageId, tuple[TaskReport, ...]] = field(default_factory=dict)
    clocks: dict[str, int] = field(default_factory=dict)
    """edge "up>down" -> greatest event time up to and including this epoch; "@stage#port" -> watermark of an input"""
    watermarks: dict[StageId, int] = field(default_factory=dict)
    publishing: bool = False
    ahead: bool = False
    """It ran before it was logged, because the store was away."""
    routing: RoutingTable = None  # type: ignore[assignment]
    handover: dict[StageId, dict[int, int]] = field(default_factory=dict)
    """stage -> slice -> container that owns it from the next epoch on"""
    sends: set[StageId] = field(default_factory=set)
    """Stages whose containers sent something to their peers."""


@dataclass
class Checkpoint:
    """A checkpoint being taken at ``epoch``."""

    epoch: Epoch
    expected: set[tuple[StageId, int]]
    files: list[DeltaFile] = field(default_factory=list)
    touched: dict[str, list[int]] = field(default_factory=dict)
    """file -> slices that it has rows of"""
    published: bool = False
    flushing: bool = False
    writing: bool = False
    clocks: dict[str, int] = field(default_factory=dict)
    watermarks: dict[StageId, int] = field(default_factory=dict)
