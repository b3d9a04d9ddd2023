"""A job's status as a page of plain text: what ``penstock status JOB`` prints once and leaves.

The live view draws and redraws; this is for a glance, a log or a bug report. Pure functions of a ``JobStatus``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.observe.live import backlog_text, checkpoint_age_s, duration_text, known, ranges_text, short, size_text
from penstock.observe.status import JobStatus, NodeStatus

STAGE_COLUMNS = (
    "stage",
    "instances",
    "in/s",
    "out/s",
    "offered/s",
    "capacity/s",
    "busy",
    "held back",
    "idle",
    "queue",
    "queue rows",
    "backlog",
    "state rows",
)
MOVES_SHOWN = 20
HOT_SHOWN = 5
STRAGGLERS_SHOWN = 5


def status_lines(status: JobStatus, about: Mapping[str, Any]) -> list[str]:
    """``about``: job_id, pid, host and checkpoint, as far as they are known."""
    lines = [f"{status.job}  {status.phase}", *_facts(status, about), "", *_stages(status)]
    if status.nodes:
        lines += ["", *_nodes(status)]
    if status.moves:
        lines += ["", *_moves(status)]
    if status.stragglers:
        lines += ["", *_stragglers(status)]
    if status.hot:
        lines += ["", *(f"  hot: {one}" for one in status.hot[:HOT_SHOWN])]
    if status.error:
        lines += ["", f"error: {status.error}"]
    return lines


def _facts(status: JobStatus, about: Mapping[str, Any]) -> list[str]:
    facts = [
        ("job", f"id {about.get('job_id') or 'not known yet'}, process {about.get('pid')} on {about.get('host')}"),
        ("flow", f"{status.flow} on {status.engine or '-'}, up {duration_text(status.uptime_s)}"),
        ("epoch", f"{status.epoch}, {status.epochs_in_flight} in flight, {status.epoch_ms:.0f} ms each"),
        ("rate", f"{short(status.rows_s)} rows/s, {short(status.rows)} rows in all"),
        ("backlog", backlog_text(status)),
        ("latency", f"p50 {status.latency_ms_p50:.0f} ms, p99 {status.latency_ms_p99:.0f} ms"),
        ("checkpoint", _checkpoint(status, about)),
        ("state", f"{short(status.state_rows)} rows, {size_text(status.state_bytes)} in {status.slices} slices"),
    ]
    if status.backups:
        b = status.backups
        facts.append(("backups", f"{b.copies} a slice, {b.slices_current} of {b.slices_total} slices current"))
    if status.policy:
        facts.append(("policy", status.policy))
    if status.watermark:
        facts.append(("watermark", status.watermark))
    counts = {"dead letters": status.dead_letters, "late": status.late, "recoveries": status.recoveries}
    if any(counts.values()):
        facts.append(("trouble", ", ".join(f"{name} {count}" for name, count in counts.items() if count)))
    suspects = [node.name for node in status.nodes if node.state == "suspect"]
    if suspects:
        facts.append(("suspects", f"{', '.join(suspects)}: a container there hangs, its slices went elsewhere"))
    return [f"  {name:<10}  {value}" for name, value in facts]


def _checkpoint(status: JobStatus, about: Mapping[str, Any]) -> str:
    where = f" in {about['checkpoint']}" if about.get("checkpoint") else ""
    if not status.checkpoint_epoch:
        return f"none yet{where}"
    age = checkpoint_age_s(status)
    return f"epoch {status.checkpoint_epoch}" + (f", {age:.1f} s old" if age is not None else "") + where


def _stages(status: JobStatus) -> list[str]:
    rows = [
        (
            stage.id,
            str(stage.instances),
            short(stage.rows_in_s),
            short(stage.rows_out_s),
            known(stage.offered_s),
            known(stage.capacity_s),
            f"{stage.busy:.0%}",
            f"{stage.back_pressured:.0%}",
            f"{stage.idle:.0%}",
            str(stage.queue),
            short(stage.queue_rows),
            known(stage.backlog_rows),
            short(stage.state_rows) if stage.state_rows else "-",
        )
        for stage in status.stages
    ]
    return columns(STAGE_COLUMNS, rows)


def _nodes(status: JobStatus) -> list[str]:
    rows = [
        (
            node.name,
            node.host or "-",
            node.zone or "-",
            _cores(node),
            ranges_text(node.containers),
            str(node.slices),
            node.state,
        )
        for node in status.nodes
    ]
    return columns(("node", "host", "zone", "cores", "containers", "slices", "state"), rows)


def _cores(node: NodeStatus) -> str:
    cores = "-" if node.cores is None else str(node.cores)
    return f"{node.limit} of {cores}" if node.limit else cores


def _moves(status: JobStatus) -> list[str]:
    rows = [
        (
            f"{move.stage}/{move.slice}",
            f"{move.source} -> {move.target}",
            move.phase,
            f"{move.since_s:.1f} s",
            move.cause or "-",
        )
        for move in status.moves[:MOVES_SHOWN]
    ]
    lines = columns(("move", "containers", "phase", "for", "cause"), rows)
    if len(status.moves) > MOVES_SHOWN:
        lines.append(f"  ... and {len(status.moves) - MOVES_SHOWN} more")
    return lines


def _stragglers(status: JobStatus) -> list[str]:
    lines = [f"  straggler: {one}" for one in status.stragglers[:STRAGGLERS_SHOWN]]
    if len(status.stragglers) > STRAGGLERS_SHOWN:
        lines.append(f"  ... and {len(status.stragglers) - STRAGGLERS_SHOWN} more")
    return lines


def columns(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Columns of text, two spaces apart."""
    table = [tuple(head), *(tuple(row) for row in rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    return ["  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in table]
