"""The settings that the controller goes by."""

from __future__ import annotations

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    epochs_in_flight: int = 2
    """Epochs that may be under way at the same time."""
    checkpoint_interval_s: float = 2.0
    """Seconds between two checkpoints. Negative: only when the job stops or a move needs one."""
    idle_epoch_s: float = 20.0
    """A job without input runs an empty epoch after this many seconds, so that time goes on."""
    poll_s: float = 0.02
    """Seconds between two questions to sources that had nothing new."""
    deltas_max: int = 8
    """Deltas of a slice beyond this number are merged."""
    epochs_max: int | None = None
    """The job ends after this many epochs. None: it goes on."""
    away_epochs: int = 0
    """Epochs that may run ahead of the log while the store does not answer."""
    backups: int = 0
    """Copies of each slice on other nodes, as far as there are nodes."""
    placement: str = "chained"
    """Name of the rule that chooses the holders of backups."""
    move_timeout_s: float = 600.0
    """A move that has not switched after this many seconds is given up."""
    grows: bool = True
    """True: every new node gets containers. False: only nodes that were asked for, or that replace a lost one, do."""
    schedule: str = "load"
    """Name of the rule that deals slices out to containers."""
