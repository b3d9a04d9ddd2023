"""The live view, drawn into recorded consoles, and the numbers that it shows."""

from __future__ import annotations

import io
import json
import re

import msgspec
import pytest
from rich.cells import cell_len
from rich.console import Console

from penstock.errors import EngineError
from penstock.observe.live import (
    LiveView,
    bar,
    checkpoint_age_s,
    duration_text,
    json_lines,
    plain_line,
    plain_lines,
    rate_series,
    render,
    short,
    size_text,
    sparkline,
    view_for,
    watch,
)
from penstock.observe.report import STRAGGLERS_SHOWN, status_lines
from penstock.observe.status import EpochStatus, JobStatus, MoveStatus, NodeStatus, StageStatus, StragglerStatus

HISTORY = tuple(
    EpochStatus(epoch=epoch, at_s=epoch * 0.5, rows=1_000_000, ms=400.0, state_rows=10 * epoch, instances={"counts": 2})
    for epoch in range(1, 41)
)
STATUS = JobStatus(
    job="j1",
    flow="top-words",
    engine="spark",
    phase="running",
    epoch=40,
    checkpoint_epoch=36,
    epochs_in_flight=2,
    rows=40_000_000,
    rows_s=2_000_000.0,
    backlog_rows=3_000_000,
    epoch_ms=400.0,
    latency_ms_p50=512.0,
    latency_ms_p99=930.0,
    state_rows=300_000,
    state_bytes=22_000_000,
    slices=64,
    routing_version=3,
    uptime_s=20.0,
    stages=(
        StageStatus(
            id="lines",
            kind="source",
            operators=("lines", "words"),
            instances=2,
            rows_in_s=2e6,
            rows_out_s=14e6,
            busy=0.5,
        ),
        StageStatus(
            id="counts",
            kind="keyed",
            operators=("counts", "top"),
            instances=4,
            rows_in_s=14e6,
            busy=0.97,
            queue=2,
            state_rows=300_000,
        ),
    ),
    history=HISTORY,
)


def lines_of(status: JobStatus, width: int = 80, height: int = 24) -> list[str]:
    console = Console(width=width, height=height, file=io.StringIO(), record=True, color_system=None)
    console.print(render(status, width, height))
    return console.export_text().splitlines()


class FakeJob:
    """Ends after ``turns`` waits; then ``error``, if any, is raised as a job does."""

    def __init__(self, turns: int = 2, error: Exception | None = None, status: JobStatus = STATUS) -> None:
        self.turns, self.error, self.last = turns, error, status

    def status(self) -> JobStatus:
        ended = self.turns <= 0
        return msgspec.structs.replace(self.last, phase=("failed" if self.error else "stopped") if ended else "running")

    def wait(self, timeout: float | None = None) -> bool:
        self.turns -= 1
        if self.turns <= 0 and self.error:
            raise self.error
        return self.turns <= 0


def node(name: str, slices: int, *containers: int, state: str = "up") -> NodeStatus:
    return NodeStatus(
        name=name,
        host="10.0.0.1",
        zone="rack-1",
        cores=len(containers),
        containers=containers,
        slices=slices,
        state=state,
    )


def move(slice: int, source: int, target: int, phase: str = "rebuild") -> MoveStatus:
    return MoveStatus(
        stage="counts", slice=slice, source=source, target=target, phase=phase, since_s=0.5, cause="node 2 to leave"
    )


NODES = (node("0", 24, 0, 3), node("1", 20, 1, 4), node("2", 20, 2, 5, state="leaving"))
MOVES = (*(move(n, 2, n % 2) for n in range(6)), move(9, 5, 0, "switch"))
SCALING = msgspec.structs.replace(STATUS, nodes=NODES, moves=MOVES, policy="ring: nothing: all are busy")


@pytest.mark.parametrize("nodes", [0, 1, 3, 40])
@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
@pytest.mark.parametrize("stages", [0, 1, 3, 40])
def test_a_frame_fits_the_terminal(width: int, stages: int, nodes: int) -> None:
    many = tuple(
        StageStatus(id=f"stage-{n}-with-a-long-name", kind="keyed", operators=("a", "b"), instances=2, busy=0.3)
        for n in range(stages)
    )
    status = msgspec.structs.replace(
        STATUS, stages=many, dead_letters=3, late=1, recoveries=2, error="x " * 300, flow="f" * 70, epoch=1_234_567
    )
    status = msgspec.structs.replace(
        status,
        nodes=tuple(node(f"executor-{n}-of-many", n, n) for n in range(nodes)),
        moves=MOVES if nodes else (),
        policy="safe-rate: " + "x" * 300 if nodes else None,
    )
    drawn = lines_of(status, width)
    assert len(drawn) <= 23  # the cursor keeps a line
    assert max(cell_len(line) for line in drawn) <= width


def test_a_frame_says_what_matters() -> None:
    drawn = lines_of(STATUS)
    text = "\n".join(drawn)
    assert drawn[0].startswith("top-words  ● running")
    assert "spark · epoch 40 · checkpoint 36 (2 s old) · up 20 s" in drawn[0]
    assert "M rows/s" in text
    assert "epoch time 400 ms   latency p50 512 ms   p99 930 ms   in flight 2" in text
    assert "state 300 k rows, 21.0 MiB" in text
    counts = next(line for line in drawn if line.lstrip().startswith("counts"))
    assert counts.split()[:5] == ["counts", "4", "14.0", "M", "0"]
    assert "97%" in counts and counts.split()[-3:] == ["2", "300", "k"]


def test_troubles_show_only_when_there_are_some() -> None:
    assert not any("dead letters" in line or "late " in line or "recoveries" in line for line in lines_of(STATUS))
    text = "\n".join(lines_of(msgspec.structs.replace(STATUS, dead_letters=3, recoveries=1)))
    assert "dead letters 3   recoveries 1" in text and "late " not in text


def slow(container: int, times_rows: float = 1.0) -> StragglerStatus:
    return StragglerStatus(stage="counts", container=container, node="2", times_slower=3.5, times_rows=times_rows)


def test_stragglers_are_told_with_what_they_may_come_from() -> None:
    status = msgspec.structs.replace(STATUS, stragglers=(slow(1, times_rows=4.0), slow(3)))
    skewed, plain = "with 4 times the rows", "with no more rows than the others"
    assert [skewed in str(one) for one in status.stragglers] == [True, False]
    seen = "\n".join(lines_of(status, 120))
    assert "container 1 of 'counts' on 2 takes 3.5 times as long as the others" in seen and "(and 1 more)" in seen
    told = [line for line in status_lines(status, {}) if "straggler" in line]
    assert told == [f"  straggler: {one!s}" for one in status.stragglers]
    assert skewed in told[0] and plain in told[1]
    assert not [line for line in status_lines(STATUS, {}) if "straggler" in line]


def test_of_many_stragglers_the_worst_are_told_and_the_others_counted() -> None:
    status = msgspec.structs.replace(STATUS, stragglers=tuple(slow(c) for c in range(STRAGGLERS_SHOWN + 2)))
    lines = status_lines(status, {})
    assert sum("straggler:" in line for line in lines) == STRAGGLERS_SHOWN and lines[-1] == "  ... and 2 more"


def test_a_node_whose_container_hangs_is_a_suspect_and_no_straggler() -> None:
    nodes = tuple(
        NodeStatus(name=name, state=state) for name, state in (("0", "up"), ("1", "suspect"), ("2", "suspect"))
    )
    lines = status_lines(msgspec.structs.replace(STATUS, nodes=nodes), {})
    assert [line.split()[:3] for line in lines if "suspects" in line] == [["suspects", "1,", "2:"]]
    assert not [line for line in lines if "straggler" in line]


def test_more_stages_than_lines_are_counted() -> None:
    many = tuple(StageStatus(id=f"s{n}", kind="keyed") for n in range(40))
    drawn = lines_of(msgspec.structs.replace(STATUS, stages=many))
    shown = sum(1 for line in drawn if re.match(r"\s*s\d+ ", line))
    assert f"... and {40 - shown} more" in drawn[-1] and shown > 5


def test_nodes_their_slices_and_what_moves_are_seen() -> None:
    drawn = lines_of(SCALING)
    table = drawn[next(i for i, line in enumerate(drawn) if line.split()[:1] == ["node"]) :]
    assert [line.split()[:3] for line in table[1:]] == [["0", "0,3", "24"], ["1", "1,4", "20"], ["2", "2,5", "20"]]
    assert [line.split()[-2:] for line in table[1:]] == [["+4", "up"], ["+3", "up"], ["-7", "leaving"]]
    text = "\n".join(drawn)
    assert "moves 6 rebuild, 1 switch: counts 2 -> 0 (3), counts 2 -> 1 (3) and 1 more" in text
    assert "policy ring: nothing: all are busy" in text
    calm = lines_of(msgspec.structs.replace(STATUS, nodes=NODES[:1]))
    assert not any(line.split()[:1] in (["node"], ["moves"], ["policy"]) for line in calm), "one node is no news"


def test_of_many_nodes_those_are_shown_that_something_happens_to() -> None:
    quiet = tuple(node(f"q{n}", 1, 100 + n) for n in range(40))
    drawn = lines_of(msgspec.structs.replace(SCALING, nodes=(*quiet, *NODES)))
    names = [line.split()[0] for line in drawn if re.match(r" (\d|q\d+) +\d", line)]
    assert names[:3] == ["0", "1", "2"] and names[3:] == [f"q{n}" for n in range(len(names) - 3)]
    assert drawn[-1] == f" ... and {43 - len(names)} nodes more"


def test_a_plain_line_names_nodes_and_moves() -> None:
    line = plain_line(SCALING)
    assert "slices 0=24 1=20 2=20(leaving) | moves 6 rebuild, 1 switch: counts 2 -> 0 (3)" in line and line.isascii()
    many = plain_line(msgspec.structs.replace(SCALING, nodes=tuple(node(str(n), 1, n) for n in range(50))))
    assert "7=1 and 42 nodes more" in many
    assert len(plain_line(msgspec.structs.replace(SCALING, policy="word " * 200))) < len(line) + 100


def test_wide_frames_name_the_operators() -> None:
    assert any("lines > words" in line for line in lines_of(STATUS, 120))
    assert not any("lines > words" in line for line in lines_of(STATUS, 80))


def test_a_long_name_is_cut_before_the_phase() -> None:
    head = lines_of(msgspec.structs.replace(STATUS, flow="a-very-long-name-" * 6))[0]
    assert "…  ● running" in head and head.endswith("up 20 s")


def test_a_job_that_has_done_nothing_yet() -> None:
    status = JobStatus(job="j", flow="f", engine="local", phase="starting")
    assert "no checkpoint yet" in lines_of(status)[0]
    assert plain_line(status).startswith("    0 s  f  starting    epoch 0 | checkpoint - | 0 rows/s | 0 rows | ")


def test_checkpoint_age() -> None:
    assert checkpoint_age_s(STATUS) == 2.0
    assert checkpoint_age_s(msgspec.structs.replace(STATUS, history=HISTORY[-2:])) is None


def test_rates_are_by_time_and_lose_no_rows() -> None:
    assert rate_series(HISTORY, 10, 20.0, 20.0) == pytest.approx([1.9e6, *[2e6] * 9], rel=0.06)
    uneven = [
        EpochStatus(epoch=1, at_s=1.0, rows=100, ms=1000),
        EpochStatus(epoch=2, at_s=4.0, rows=300, ms=500),
        EpochStatus(epoch=3, at_s=4.0, rows=7, ms=500),
    ]
    series = rate_series(uneven, 8, 8.0, 8.0)
    assert series == pytest.approx([100, 100, 100, 107, 0, 0, 0, 0])
    assert sum(series) * 1.0 == pytest.approx(407)
    # What is older than the window is left out, not squeezed in.
    assert rate_series(uneven, 2, 2.0, 8.0) == [0.0, 0.0]
    assert rate_series((), 4, 2.0, 8.0) == [0.0] * 4
    assert rate_series(uneven, 0, 2.0, 8.0) == []


def test_sparkline() -> None:
    assert sparkline([0, 1, 4, 8]) == [" ▁▄█"]
    assert sparkline([0, 8, 16, 24, 12], rows=3) == ["   █ ", "  ██▄", " ████"]
    assert sparkline([1, 1e9]) == ["▁█"], "a trickle is not nothing"
    assert sparkline([0, 0]) == ["  "]
    assert sparkline([]) == [""]


def test_bar() -> None:
    assert bar(0.0, 4) == "    "
    assert bar(0.5, 4) == "██  "
    assert bar(0.53, 4) == "██▏ "
    assert bar(7.0, 4) == "████"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1.26, "1.3"),
        (999, "999"),
        (999.6, "1.00 k"),
        (12_345, "12.3 k"),
        (999_949, "1.00 M"),
        (2.5e9, "2.50 G"),
    ],
)
def test_short(value: float, text: str) -> None:
    assert short(value) == text


def test_sizes_and_durations() -> None:
    assert [size_text(n) for n in (0, 1023, 1024, 1024**2 * 10, 1024**4 * 3)] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "10.0 MiB",
        "3.00 TiB",
    ]
    assert [duration_text(s) for s in (0, 59.9, 60, 3723)] == ["0 s", "59 s", "1:00", "1:02:03"]


def test_plain_lines_have_no_control_codes_and_end_with_the_last_phase() -> None:
    lines = list(plain_lines(FakeJob(turns=3)))
    assert len(lines) == 4
    assert all(line.isascii() and line.isprintable() for line in lines)
    assert "stopped" in lines[-1] and "running" in lines[0]
    assert "instances lines=2 counts=4" in lines[0]


def test_json_lines_are_statuses() -> None:
    statuses = [json.loads(line) for line in json_lines(FakeJob(turns=2))]
    assert [status["phase"] for status in statuses] == ["running", "running", "stopped"]
    assert statuses[0]["stages"][1]["id"] == "counts"
    assert "history" not in statuses[0]


def test_lines_of_a_failure_end_with_it_and_raise() -> None:
    seen = []
    with pytest.raises(EngineError, match="broke"):
        watch(FakeJob(turns=2, error=EngineError("broke")), "json", write=seen.append)
    assert [json.loads(line)["phase"] for line in seen] == ["running", "running", "failed"]


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=80, height=24, color_system="standard", _environ={})


def test_live_view_draws_until_done_and_leaves_the_last_frame() -> None:
    console = terminal()
    LiveView(FakeJob(turns=3), console).run()
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert output.count("top-words") == 5, "one at the start, one a wait, one when the display closes"
    assert "stopped" in output[output.rindex("top-words") :]
    assert output.rstrip().endswith("\x1b[?25h"), "the cursor is back"


def test_live_view_shows_the_failure_and_raises_it() -> None:
    console = terminal()
    with pytest.raises(EngineError, match="broke"):
        LiveView(FakeJob(turns=1, error=EngineError("broke")), console).run()
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert "failed" in output[output.rindex("top-words") :]


def test_live_view_obeys_another_end() -> None:
    waits: list[float] = []

    def until_done(seconds: float) -> bool:
        waits.append(seconds)
        return len(waits) == 2

    LiveView(FakeJob(turns=99), terminal()).run(until_done)
    assert len(waits) == 2


def test_which_view() -> None:
    assert view_for(terminal(), as_json=True) == "json"
    assert view_for(terminal(), plain=True) == "plain"
    assert view_for(Console(file=io.StringIO())) == "plain"
    dumb = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    assert view_for(dumb) == "plain"
    latin = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    assert view_for(Console(file=latin, force_terminal=True, _environ={})) == "plain"
    assert view_for(terminal()) == "live"
