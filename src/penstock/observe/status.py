"""What a running job says of itself. The live view, ``--json`` and tests all read these and nothing else."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class OperatorStatus:
    """One stage of the flow, named after its root operator. Rates are over the last few seconds."""

    id: str
    kind: str
    operators: tuple[str, ...]
    instances: int
    rows_in: int = 0
    rows_out: int = 0
    rows_in_s: float = 0.0
    rows_out_s: float = 0.0
    busy: float = 0.0
    """Share of its instances' time spent working, 0..1."""
    queue: int = 0
    """Epochs that wait before this stage."""
    bytes_local: int = 0
    bytes_remote: int = 0
    state_rows: int = 0
    state_bytes: int = 0
    late: int = 0


@dataclass(frozen=True)
class JobStatus:
    job: str
    flow: str
    engine: str
    phase: str
    """starting, running, recovering, stopping, stopped, complete (its sources have ended) or failed."""
    epoch: int = 0
    """The last epoch whose output is published."""
    checkpoint_epoch: int = 0
    """The last epoch a complete checkpoint covers."""
    checkpoint_bytes: int = 0
    checkpoints: int = 0
    epochs_in_flight: int = 0
    rows: int = 0
    rows_s: float = 0.0
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
    operators: tuple[OperatorStatus, ...] = ()
    steps: tuple[dict[str, Any], ...] = ()
    """One entry for each operator of the flow: id, rows_in, rows_out, busy_ms, since the start."""
    history: tuple[dict[str, Any], ...] = field(default=(), repr=False)
    """One entry for each recent epoch: epoch, at_s, rows, ms, state_rows, instances."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
