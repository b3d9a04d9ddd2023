"""The live view of a job: what a terminal shows while a flow runs, and its plain and JSON forms.

Everything here reads ``JobStatus`` and nothing else, so the view can be no better informed than ``--json`` or a test.
``render`` is a pure function of a status and a size: a test draws one frame into a recorded console, and what it saw is
what users see. ``LiveView`` only asks, draws and waits.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from penstock.observe.status import EpochStatus, JobStatus, MoveStatus, NodeStatus, StageStatus

FRAME_S = 0.25
LINE_S = 1.0
NODES_SHOWN = 8
CHANGE_CHARS = 100
"""Limits of a plain line: nodes, and characters of what happens to them."""
SPARK_SECONDS = 60.0
"""How far back the sparkline looks."""

_EIGHTHS_UP = " ▁▂▃▄▅▆▇█"
_EIGHTHS_RIGHT = " ▏▎▍▌▋▊▉█"
_BIG_ROWS = 3

# Three rows for each digit, in half blocks: legible from the other end of the room, and only three lines dear.
_BIG = {
    "0": ("█▀█", "█ █", "▀▀▀"),
    "1": ("▀█ ", " █ ", "▀▀▀"),
    "2": ("▀▀█", "█▀▀", "▀▀▀"),
    "3": ("▀▀█", " ▀█", "▀▀▀"),
    "4": ("█ █", "▀▀█", "  ▀"),
    "5": ("█▀▀", "▀▀█", "▀▀▀"),
    "6": ("█▀▀", "█▀█", "▀▀▀"),
    "7": ("▀▀█", "  █", "  ▀"),
    "8": ("█▀█", "█▀█", "▀▀▀"),
    "9": ("█▀█", "▀▀█", "▀▀▀"),
    ".": (" ", " ", "▀"),
}

_PHASE_STYLE = {
    "starting": "cyan",
    "running": "green",
    "recovering": "yellow",
    "stopping": "yellow",
    "stopped": "blue",
    "complete": "blue",
    "failed": "red",
}


class JobLike(Protocol):
    """The part of a job that the views need."""

    def status(self) -> JobStatus: ...

    def wait(self, timeout: float | None = None) -> bool: ...


UntilDone = Callable[[float], bool]
"""Waits up to the given seconds; True when the view should end. A job's ``wait`` is one."""


# --- numbers as people read them ---------------------------------------------------------------------------------


def short(value: float) -> str:
    """Three significant digits and a unit: 1234567 -> '1.23 M'."""
    number, unit = _scaled(value)
    return f"{number} {unit}".strip()


def _scaled(value: float) -> tuple[str, str]:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        # 999.5 and more rounds to four digits: that is the next unit's 1.00.
        if abs(value) >= size * 0.9995:
            return _three_digits(value / size), unit
    return (f"{value:.0f}" if abs(value) >= 10 or value == int(value) else f"{value:.1f}"), ""


def _three_digits(value: float) -> str:
    digits = abs(value)
    return f"{value:.2f}" if digits < 9.995 else f"{value:.1f}" if digits < 99.95 else f"{value:.0f}"


def size_text(size: float) -> str:
    """Bytes, in powers of 1024: '21.4 MiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1023.5:
            return f"{size:.0f} B" if unit == "B" else f"{_three_digits(size)} {unit}"
        size /= 1024
    return f"{_three_digits(size)} TiB"


def duration_text(seconds: float) -> str:
    """'42 s', '3:07', '1:02:03'."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _ms_text(ms: float) -> str:
    return f"{ms:.0f} ms" if ms < 9_999.5 else f"{ms / 1000:.1f} s"


# --- series ------------------------------------------------------------------------------------------------------


def rate_series(history: Sequence[EpochStatus], buckets: int, seconds: float, until_s: float) -> list[float]:
    """Rows a second in ``buckets`` equal shares of the ``seconds`` before ``until_s``.

    Epochs end at odd times and overlap, so one bar an epoch would lie about time. An epoch's rows are spread evenly
    over the time since the epoch before it was published.
    """
    if buckets <= 0 or seconds <= 0:
        return []
    rows = [0.0] * buckets
    width = seconds / buckets
    begin = until_s - seconds
    before: float | None = None
    for entry in history:
        at = entry.at_s
        since = before if before is not None else at - max(entry.ms / 1000, 1e-3)
        span = max(at - since, 1e-3)
        first = max(0, int((at - span - begin) // width))
        for index in range(first, min(buckets - 1, int((at - begin) // width)) + 1):
            low, high = begin + index * width, begin + (index + 1) * width
            share = max(0.0, min(high, at) - max(low, at - span)) / span
            rows[index] += share * entry.rows
        before = at
    return [count / width for count in rows]


def sparkline(values: Sequence[float], rows: int = 1) -> list[str]:
    """The values as bars of block characters, ``rows`` lines high, top line first. Any value above zero is seen."""
    top = max(values, default=0.0)
    levels = [0 if top <= 0 or value <= 0 else max(1, round(value / top * rows * 8)) for value in values]
    return ["".join(_EIGHTHS_UP[min(8, max(0, level - row * 8))] for level in levels) for row in reversed(range(rows))]


def bar(share: float, width: int) -> str:
    """A horizontal bar for a share of 0..1, in eighths of a character."""
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS_RIGHT[rest] if rest else "")).ljust(width)


# --- the frame ---------------------------------------------------------------------------------------------------


def render(status: JobStatus, width: int = 80, height: int = 24) -> RenderableType:
    """One frame of the live view that fits ``width`` x ``height``."""
    parts: list[RenderableType] = [_header(status, width), Rule(style="bright_black"), _rate(status, width), Text("")]
    facts = _facts(status, width)
    parts += facts
    error_rows = 0
    if status.error:
        error_rows = 2
        # Words wrap early, so a little less than two full lines is sure to fit into two.
        parts.append(Text(_cut(" ".join(status.error.split()), width * error_rows - 20), style="red"))
    # Header, rule, rate, two blank lines, the table's heading, the line that the cursor keeps: the rest is for the
    # stages and the nodes.
    free = max(1, height - (2 + _BIG_ROWS + 1 + len(facts) + error_rows + 3))
    nodes = _node_rows(status, free)
    if status.stages:
        parts += [Text(""), _stages(status.stages, width, max(1, free - (nodes + 1 if nodes else 0)))]
    if nodes:
        parts.append(_nodes(status, width, nodes))
    return Group(*parts)


def _node_rows(status: JobStatus, free: int) -> int:
    """Lines for nodes, besides their heading: what the stages leave, or else up to half; none for the one node there
    is.
    """
    if len(status.nodes) < 2:
        return 0
    rows = max(free - len(status.stages) - 1, free // 2 - 1)
    return min(len(status.nodes), rows) if rows >= 2 else 0


def _header(status: JobStatus, width: int) -> Text:
    style = _PHASE_STYLE.get(status.phase, "white")
    facts = [f"epoch {status.epoch}", _checkpoint_text(status), f"up {duration_text(status.uptime_s)}"]
    right = " · ".join([status.engine, *facts])
    phase_cells = len(status.phase) + 6
    if len(status.flow) + phase_cells + len(right) > width:
        right = " · ".join(facts)
    # The phase matters more than the end of a long name.
    name = _cut(status.flow, max(6, width - phase_cells - len(right)))
    left = Text.assemble((name, "bold"), "  ", ("● ", style), (status.phase, f"bold {style}"), "  ")
    line = Text.assemble(left, " " * (width - left.cell_len - len(right)), (right, "bright_black"))
    line.truncate(width, overflow="ellipsis")
    return line


def _checkpoint_text(status: JobStatus) -> str:
    if not status.checkpoint_epoch:
        return "no checkpoint yet"
    age = checkpoint_age_s(status)
    return f"checkpoint {status.checkpoint_epoch}" + (f" ({age:.0f} s old)" if age is not None else "")


def checkpoint_age_s(status: JobStatus) -> float | None:
    """Seconds since the last checkpointed epoch was published; None when the history no longer has it."""
    for entry in reversed(status.history):
        if entry.epoch == status.checkpoint_epoch:
            return max(0.0, status.uptime_s - entry.at_s)
    return None


def _rate(status: JobStatus, width: int) -> Table:
    number, unit = _scaled(status.rows_s)
    glyphs = [_BIG[char] for char in number if char in _BIG]
    digits = [" ".join(glyph[row] for glyph in glyphs) for row in range(_BIG_ROWS)]
    label = f"{unit} rows/s".strip()
    # A fixed width keeps the sparkline in its place while the number's length changes.
    left = 28
    buckets = max(0, width - left - 2)
    seconds = min(SPARK_SECONDS, max(10.0, status.uptime_s))
    series = rate_series(status.history, buckets, seconds, _series_end_s(status))
    grid = Table.grid(padding=0)
    grid.add_column(width=left, no_wrap=True)
    grid.add_column(width=buckets, no_wrap=True)
    colour = _PHASE_STYLE.get(status.phase, "white")
    for row, line in enumerate(sparkline(series, _BIG_ROWS)):
        tail = f"  {label}" if row == _BIG_ROWS - 1 else ""
        grid.add_row(Text.assemble("  ", (digits[row], f"bold {colour}"), (tail, "bold")), Text(line, style=colour))
    return grid


def _series_end_s(status: JobStatus) -> float:
    """The end of the last epoch, unless the next is overdue: half an epoch would look like a collapse."""
    last = status.history[-1].at_s if status.history else 0.0
    patience_s = max(1.0, 2 * status.epoch_ms / 1000)
    return last if status.uptime_s - last < patience_s else status.uptime_s


def _facts(status: JobStatus, width: int) -> list[Text]:
    lines = [
        [
            ("epoch time", _ms_text(status.epoch_ms)),
            ("latency p50", _ms_text(status.latency_ms_p50)),
            ("p99", _ms_text(status.latency_ms_p99)),
            ("in flight", str(status.epochs_in_flight)),
            ("backlog", backlog_text(status)),
        ],
        [
            ("state", f"{short(status.state_rows)} rows, {size_text(status.state_bytes)}"),
            ("slices", str(status.slices)),
            ("routing", f"v{status.routing_version}"),
            ("rows", short(status.rows)),
        ],
    ]
    if status.watermark:
        lines[1].append(("watermark", status.watermark))
    texts = [_fact_line(line, "", width) for line in lines]
    texts += [_fact_line([fact], "", width) for fact in _changes(status)]
    seen = [(name, short(count)) for name, count in _troubles(status)]
    if seen:
        texts.append(_fact_line(seen, "yellow", width))
    if status.stragglers:
        more = f" (and {len(status.stragglers) - 1} more)" if len(status.stragglers) > 1 else ""
        slow = _cut(str(status.stragglers[0]), max(0, width - 4 - len(more))) + more
        texts.append(Text(f"  {slow}", style="yellow"))
    return texts


def backlog_text(status: JobStatus) -> str:
    """The rows that wait in the sources, and how fast they become more."""
    if status.backlog_rows is None:
        return "not known"
    growth_s = sum(stage.backlog_growth_s for stage in status.stages if stage.backlog_grows)
    return f"{short(status.backlog_rows)} rows" + (f", {short(growth_s)} more a second" if growth_s > 0 else "")


def _changes(status: JobStatus) -> list[tuple[str, str]]:
    """What is being done to the job's shape, and what its policy last thought of that."""
    changes = []
    if status.moves:
        changes.append(("moves", moves_text(status.moves)))
    if status.policy:
        changes.append(("policy", status.policy))
    return changes


def moves_text(moves: Sequence[MoveStatus]) -> str:
    """All moves under way in one line: how many in which phase, between whom, and why."""
    phases = Counter(move.phase for move in moves)
    ways = Counter(f"{move.stage} {move.source} -> {move.target}" for move in moves)
    causes = list(dict.fromkeys(move.cause for move in moves if move.cause))
    counted = ", ".join(f"{count} {phase}" for phase, count in phases.items())
    between = ", ".join(f"{way} ({count})" for way, count in ways.most_common(2))
    more = f" and {len(ways) - 2} more" if len(ways) > 2 else ""
    return f"{counted}: {between}{more}" + (f"; {causes[0]}" if causes else "")


def _troubles(status: JobStatus) -> list[tuple[str, int]]:
    """What should be zero and is not."""
    counts = [("dead letters", status.dead_letters), ("late", status.late), ("recoveries", status.recoveries)]
    return [(name, count) for name, count in counts if count]


def _fact_line(facts: Sequence[tuple[str, str]], style: str, width: int) -> Text:
    line = Text("  ")
    for index, (name, value) in enumerate(facts):
        if index:
            line.append("   ")
        line.append(f"{name} ", style=style or "bright_black")
        line.append(value, style=f"bold {style}".strip())
    line.truncate(width, overflow="ellipsis")
    return line


def _stages(stages: Sequence[StageStatus], width: int, rows_max: int) -> Table:
    wide, very_wide = width >= 110, width >= 150
    bar_width = 12 if very_wide else 6
    # Two columns stay free for the "^C" that terminals echo: a wrapped line would leave a copy of the frame behind.
    table = Table(box=None, padding=(0, 1), pad_edge=True, header_style="bright_black", width=width - 2)
    table.add_column("stage", no_wrap=True, ratio=1, overflow="ellipsis")
    if wide:
        table.add_column("operators", no_wrap=True, ratio=2, overflow="ellipsis", style="bright_black")
    table.add_column("inst", justify="right", no_wrap=True)
    table.add_column("in/s", justify="right", no_wrap=True, width=6)
    table.add_column("out/s", justify="right", no_wrap=True, width=6)
    if wide:
        table.add_column("offered", justify="right", no_wrap=True, width=7)
        table.add_column("capacity", justify="right", no_wrap=True, width=8)
    table.add_column("busy", no_wrap=True, width=bar_width + 5)
    table.add_column("held", justify="right", no_wrap=True, width=4)
    if wide:
        table.add_column("idle", justify="right", no_wrap=True, width=4)
    table.add_column("queue", justify="right", no_wrap=True)
    table.add_column("state", justify="right", no_wrap=True, width=18 if very_wide else 8)
    fits = len(stages) <= rows_max
    shown = stages if fits else stages[: max(0, rows_max - 1)]
    for stage in shown:
        cells: list[RenderableType] = [Text(stage.id, style="bold")]
        if wide:
            cells.append(Text(" > ".join(stage.operators)))
        cells += [
            str(stage.instances),
            short(stage.rows_in_s),
            short(stage.rows_out_s),
            *((known(stage.offered_s), known(stage.capacity_s)) if wide else ()),
            _busy(stage.busy, bar_width),
            Text(f"{stage.back_pressured:.0%}", style="yellow" if stage.back_pressured >= 0.5 else "bright_black"),
            *((Text(f"{stage.idle:.0%}", style="bright_black"),) if wide else ()),
            Text(str(stage.queue), style="yellow" if stage.queue else "bright_black"),
            _state_text(stage, very_wide),
        ]
        table.add_row(*cells)
    if not fits:
        table.add_row(Text(f"... and {len(stages) - len(shown)} more", style="bright_black"))
    return table


def _nodes(status: JobStatus, width: int, rows_max: int) -> RenderableType:
    """One line for each node: its containers, its slices, and how many slices move to it (+) and from it (-)."""
    fits = len(status.nodes) <= rows_max
    # Where not all nodes have a line, the nodes that change go first.
    shown = status.nodes if fits else sorted(status.nodes, key=lambda n: _calm(n, status.moves))[: rows_max - 1]
    most = max(1, *(node.slices for node in status.nodes))
    table = Table(box=None, padding=(0, 1), pad_edge=True, header_style="bright_black", width=width - 2)
    table.add_column("node", no_wrap=True, ratio=1, overflow="ellipsis")
    table.add_column("containers", no_wrap=True, ratio=1, overflow="ellipsis")
    table.add_column("slices", justify="right", no_wrap=True, width=6)
    table.add_column("", no_wrap=True, width=20)
    table.add_column("moving", justify="right", no_wrap=True, width=8)
    table.add_column("", no_wrap=True, width=7)
    for node in shown:
        state = node.state
        colour = {"up": "cyan", "leaving": "yellow", "suspect": "red"}.get(state, "white")
        host = f" {node.host}" if node.host and width >= 110 else ""
        table.add_row(
            Text.assemble((node.name, "bold"), (host, "bright_black")),
            ranges_text(node.containers),
            str(node.slices),
            Text(bar(node.slices / most, 20), style=f"{colour} on grey19"),
            _moving(status.moves, set(node.containers)),
            Text(state, style="bright_black" if state == "up" else colour),
        )
    if fits:
        return table
    return Group(table, Text(f" ... and {len(status.nodes) - len(shown)} nodes more", style="bright_black"))


def _calm(node: NodeStatus, moves: Sequence[MoveStatus]) -> bool:
    return node.state == "up" and not _moving(moves, set(node.containers))


def _moving(moves: Sequence[MoveStatus], containers: set[int]) -> Text:
    coming = sum(move.target in containers and move.source not in containers for move in moves)
    going = sum(move.source in containers and move.target not in containers for move in moves)
    return Text(" ".join([f"+{coming}"] * bool(coming) + [f"-{going}"] * bool(going)), style="yellow")


def ranges_text(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> '0-2,5'."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts) or "-"


def _busy(share: float, width: int) -> Text:
    style = "green" if share < 0.7 else "yellow" if share < 0.9 else "red"
    return Text.assemble((bar(share, width), f"{style} on grey19"), f" {min(share, 9.99):4.0%}")


def known(figure: float | None) -> str:
    """A figure, or a dash for one that is not known."""
    return "-" if figure is None else short(figure)


def _state_text(stage: StageStatus, wide: bool) -> Text:
    if not stage.state_rows and not stage.state_bytes:
        return Text("-", style="bright_black")
    return Text(f"{short(stage.state_rows)}, {size_text(stage.state_bytes)}" if wide else short(stage.state_rows))


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: max(0, length - 1)] + "…"


# --- the three ways to watch --------------------------------------------------------------------------------------


class LiveView:
    """Draws a job's status into a terminal until the job, or ``until_done``, says that it is over."""

    def __init__(self, job: JobLike, console: Console | None = None) -> None:
        self.job = job
        self.console = console or Console()

    def frame(self) -> RenderableType:
        return render(self.job.status(), self.console.width, self.console.height)

    def run(self, until_done: UntilDone | None = None) -> None:
        """Returns when done, the last frame left on the screen; raises what ``until_done`` does: the job's error."""
        until_done = until_done or self.job.wait
        with Live(self.frame(), console=self.console, auto_refresh=False, vertical_overflow="crop") as live:
            try:
                done = False
                while not done:
                    done = until_done(FRAME_S)
                    live.update(self.frame(), refresh=True)
            except BaseException:
                live.update(self.frame(), refresh=True)
                raise


def plain_line(status: JobStatus) -> str:
    """One status as one line of plain text: no colours, no control codes, no characters beyond ASCII of our own."""
    parts = [
        f"epoch {status.epoch}",
        f"checkpoint {status.checkpoint_epoch or '-'}",
        f"{short(status.rows_s)} rows/s",
        f"{short(status.rows)} rows",
        f"epoch time {_ms_text(status.epoch_ms)}",
        f"latency p50 {_ms_text(status.latency_ms_p50)} p99 {_ms_text(status.latency_ms_p99)}",
    ]
    if status.state_rows:
        parts.append(f"state {short(status.state_rows)} rows {size_text(status.state_bytes)}")
    parts += [f"{name} {count}" for name, count in _troubles(status)]
    if len(status.nodes) > 1:
        parts.append("slices " + " ".join(_node_text(node) for node in status.nodes[:NODES_SHOWN]))
        if len(status.nodes) > NODES_SHOWN:
            parts[-1] += f" and {len(status.nodes) - NODES_SHOWN} nodes more"
    parts += [f"{name} {textwrap.shorten(text, CHANGE_CHARS, placeholder=' ...')}" for name, text in _changes(status)]
    if status.stages:
        parts.append("instances " + " ".join(f"{stage.id}={stage.instances}" for stage in status.stages))
    return f"{duration_text(status.uptime_s):>7}  {status.flow}  {status.phase:<10}  " + " | ".join(parts)


def _node_text(node: NodeStatus) -> str:
    return f"{node.name}={node.slices}" + (f"({node.state})" if node.state != "up" else "")


def plain_lines(job: JobLike, until_done: UntilDone | None = None, every_s: float = LINE_S) -> Iterator[str]:
    """A line about every second and one at the end; then raises what ``until_done`` raises."""
    return _lines(job, until_done, every_s, plain_line)


def json_line(status: JobStatus) -> str:
    """One status as one line of JSON. The history is left out: a reader of the lines has it already."""
    fields = status.to_dict()
    del fields["history"]
    return json.dumps(fields, separators=(",", ":"))


def json_lines(job: JobLike, until_done: UntilDone | None = None, every_s: float = LINE_S) -> Iterator[str]:
    return _lines(job, until_done, every_s, json_line)


def _lines(
    job: JobLike, until_done: UntilDone | None, every_s: float, line: Callable[[JobStatus], str]
) -> Iterator[str]:
    until_done = until_done or job.wait
    while True:
        yield line(job.status())
        try:
            done = until_done(every_s)
        except BaseException:
            # The last line still tells how the job ended; the error follows it.
            yield line(job.status())
            raise
        if done:
            yield line(job.status())
            return


def view_for(console: Console, *, plain: bool = False, as_json: bool = False) -> str:
    """Which of "json", "plain" and "live" suits: control codes only go to a terminal that can show them."""
    if as_json:
        return "json"
    utf = (console.encoding or "").lower().replace("-", "").startswith("utf")
    return "live" if console.is_terminal and not console.is_dumb_terminal and utf and not plain else "plain"


def watch(
    job: JobLike,
    view: str,
    console: Console | None = None,
    until_done: UntilDone | None = None,
    write: Callable[[str], Any] | None = None,
) -> None:
    """Watches a job by ``view``: "live", "plain" or "json". ``write`` takes the lines of the last two."""
    if view == "live":
        LiveView(job, console).run(until_done)
        return
    lines = json_lines(job, until_done) if view == "json" else plain_lines(job, until_done)
    for line in lines:
        if write is not None:
            write(line)
        else:
            print(line, flush=True)


@contextlib.contextmanager
def quiet_start() -> Iterator[None]:
    """Java and Spark write a dozen harmless lines to standard error as they start; they are shown only on failure.

    The descriptor itself is turned, since the JVM inherits that and not Python's ``sys.stderr``.
    """
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            yield
        except Exception:
            os.dup2(saved, 2)
            said.seek(0)
            os.write(2, said.read())
            raise
        finally:
            os.dup2(saved, 2)
            os.close(saved)


def await_start(job: JobLike, interrupted: threading.Event | None = None) -> None:
    """Returns when Spark is up and the job runs, or has ended; raises what ended it."""
    while job.status().phase == "starting" and not (interrupted is not None and interrupted.is_set()):
        if job.wait(0.05):
            return
