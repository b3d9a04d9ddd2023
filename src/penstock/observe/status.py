"""What a running job says of itself. The live view, ``--json`` and tests all read these and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
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
    working: int = 0
    """Of its instances those that own slices; of a source's, all."""


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

    nodes: tuple[dict[str, Any], ...] = ()
    """One entry for each node: name, host, zone, cores, limit (how many of them the job is to use; none: all),
    containers (their numbers), slices (how many), and state: up, leaving or suspect."""
    moves: tuple[dict[str, Any], ...] = ()
    """Slices on their way: stage, slice, source, target, phase, since_s, cause."""
    backups: dict[str, Any] = field(default_factory=dict)
    """r, slices_current, slices_total; empty without backups."""
    policy: str | None = None
    """The policy that scales the job, and what it last said."""
    stragglers: tuple[dict[str, Any], ...] = ()
    """Containers that the others of their stage wait for: stage, container, node, times_slower, times_rows (how many
    times the rows of the others: much more than 1 is skew, about 1 a slow machine)."""

    hot: tuple[dict[str, Any], ...] = ()
    """Slices that are too hot for one container, so that no move helps: stage, slice, container, share (of the
    container's time), rows_s, and keys: the hottest, each with its share of the slice's rows; empty until known."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> JobStatus:
        """What ``to_dict`` gave, perhaps by way of JSON. Fields that this version does not know are left out."""
        known = _known(cls, data)
        known["operators"] = tuple(
            OperatorStatus(**{**_known(OperatorStatus, o), "operators": tuple(o.get("operators", ()))})
            for o in data.get("operators", ())
        )
        for name in ("steps", "history", "nodes", "moves", "stragglers", "hot"):
            known[name] = tuple(data.get(name, ()))
        return cls(**known)


def straggler_text(one: Mapping[str, Any]) -> str:
    """A straggler in words, with what it may come from."""
    where = f" on {one['node']}" if one.get("node") else ""
    rows = one.get("times_rows", 1.0)
    why = f", with {rows:g} times the rows" if rows >= 1.5 else ", with no more rows than the others"
    who = f"container {one['container']} of '{one['stage']}'{where}"
    return f"{who} takes {one['times_slower']:g} times as long as the others{why}"


def hot_text(one: Mapping[str, Any]) -> str:
    """A hot slice in words, with its keys."""
    keys = ", ".join(f"{key!r} {float(share):.0%}" for key, share in one.get("keys", ()))
    who = f"slice {one['slice']} of '{one['stage']}'"
    said = f"{who} alone takes {float(one['share']):.0%} of the time of container {one['container']}"
    return said + (f"; its hottest keys: {keys}" if keys else "")


def _known(kind: type, data: Mapping[str, Any]) -> dict[str, Any]:
    names = {entry.name for entry in fields(kind)}
    return {name: value for name, value in data.items() if name in names}
