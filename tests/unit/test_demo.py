"""The demonstration: its schedule, its measurements and its check, each against something simpler; and one real run."""

from __future__ import annotations

import datetime as dt
import io
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from rich.console import Console

from penstock import demo
from penstock.connectors import memory
from penstock.connectors.generator import WordSource, words
from penstock.demo import AFTER, BEFORE, STAGE, Act, ArrivalClock, Director, Measured
from penstock.engines.job import run_local
from penstock.errors import ConfigError
from penstock.observe.status import EpochStatus, JobStatus, NodeStatus

ROOT = Path(__file__).resolve().parents[2]
START = dt.datetime(2024, 1, 1)


def small_source(rows: int | None = None) -> WordSource:
    return words(vocabulary=60, events_per_s=1000.0, rows=rows, disorder=demo.DISORDER_S)


# --- the check ----------------------------------------------------------------------------------------------------


def counted_by_hand(source: WordSource, rows: int, until: dt.datetime) -> list[tuple[dt.datetime, str, int]]:
    """Row by row, window by window: slow, and too simple to be wrong."""
    windows: dict[dt.datetime, Counter[str]] = {}
    for word, at in source.read("x", {"first": 0, "last": rows}).frame.iter_rows():
        seconds = int((at - START) // dt.timedelta(seconds=demo.EVERY_S)) * demo.EVERY_S
        for end_s in range(seconds + demo.EVERY_S, seconds + demo.WINDOW_S + 1, demo.EVERY_S):
            end = START + dt.timedelta(seconds=end_s)
            if end <= until:
                windows.setdefault(end, Counter())[word] += 1
    out = []
    for end in sorted(windows):
        best = sorted(windows[end].items(), key=lambda entry: (-entry[1], entry[0]))[: demo.TOP]
        out += [(end, word, n) for word, n in best]
    return out


def test_the_recount_is_what_counting_by_hand_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "RECOUNT_ROWS", 7_001)
    source, until = small_source(), START + dt.timedelta(seconds=16)
    assert demo.recount(source, 20_000, until).rows() == counted_by_hand(source, 20_000, until)


def output_of(rows: int) -> pl.DataFrame:
    sink = memory()
    run_local(demo.build_flow(small_source(rows), sink), epoch_rows=3_000)
    return sink.frame()


def test_the_flow_passes_the_check() -> None:
    result = demo.verdict(small_source(), 20_000, output_of(20_000))
    assert result["exact"] is True
    assert result["windows"] == 15  # the last words come at 00:00:20, in windows up to the one that ends at 00:00:28
    assert [entry["n"] for entry in result["top"]] == sorted((entry["n"] for entry in result["top"]), reverse=True)


def test_the_check_sees_one_wrong_count_and_a_missing_window() -> None:
    output = output_of(5_000)
    first = pl.int_range(pl.len()) == 0
    wrong = output.with_columns(n=pl.when(first).then(pl.col("n") + 1).otherwise(pl.col("n")))
    assert demo.verdict(small_source(), 5_000, wrong)["exact"] is False
    missing = output.filter(pl.col("window_end") != START + dt.timedelta(seconds=4))
    assert missing.height < output.height
    assert demo.verdict(small_source(), 5_000, missing)["exact"] is False
    twice = pl.concat([output, output.head(1)])
    assert demo.verdict(small_source(), 5_000, twice)["exact"] is False


def test_no_output_is_no_verdict() -> None:
    assert demo.verdict(small_source(), 10, pl.DataFrame())["exact"] is None


# --- the schedule -------------------------------------------------------------------------------------------------


DEMO = {"job": "demo", "flow": "demo", "engine": "spark"}


class FakeJob:
    def __init__(self) -> None:
        self.epoch = 0
        self.nodes: dict[str, int] = {"driver": 64}
        self.uptime_s = 0.0
        self.stopped = threading.Event()
        self.asked: list[str] = []

    def status(self) -> JobStatus:
        nodes = tuple(NodeStatus(name=name, slices=slices) for name, slices in self.nodes.items())
        return JobStatus(
            job="demo",
            flow="demo",
            engine="spark",
            phase="running",
            epoch=self.epoch,
            nodes=nodes,
            slices=64,
            uptime_s=self.uptime_s,
        )

    def wait(self, timeout: float | None = None) -> bool:
        return self.stopped.is_set()

    def stop(self) -> None:
        self.stopped.set()

    def act(self, share: float, what: str) -> Act:
        return Act(share, what, lambda: self.asked.append(what))


def test_time_counts_from_the_first_output_and_the_rescale_comes_half_way() -> None:
    job, now = FakeJob(), [100.0]
    outputs: list[float] = []
    director = Director(job, 20.0, [job.act(0.5, "x")], lambda: outputs.append(now[0]), clock=lambda: now[0])
    assert not director(0) and director.began is None  # Spark may take its time
    now[0], job.epoch = 150.0, 1
    assert not director(0) and outputs == [150.0]
    now[0] = 159.9
    assert not director(0) and job.asked == []
    now[0], job.uptime_s = 160.0, 12.5
    assert not director(0) and job.asked == ["x"] and director.done == [(12.5, "x")]
    now[0] = 169.9
    assert not director(0) and job.asked == ["x"]
    now[0] = 170.0
    director(0)
    director.join()
    assert job.stopped.is_set() and director(0)


@pytest.mark.parametrize("over", [True, False])
def test_it_ends_when_its_last_act_is_over_or_after_twice_the_time(over: bool) -> None:
    job, now, done = FakeJob(), [0.0], []
    act = replace(job.act(0.5, "x"), over=lambda status: bool(done))
    director = Director(job, 20.0, [act], clock=lambda: now[0])
    job.epoch = 1
    director(0)
    for now[0] in (10.0, 20.0, 39.9):
        director(0)
        assert job.asked == ["x"] and director._stopper is None
    if over:
        done.append(True)
    else:
        now[0] = 40.0
    director(0)
    director.join()
    assert job.stopped.is_set()


def test_an_interrupt_ends_it_without_a_rescale() -> None:
    job = FakeJob()
    director = Director(job, 20.0, [job.act(0.0, "x")], clock=lambda: 0.0)
    director.interrupted.set()
    director(0)
    director.join()
    assert job.stopped.is_set() and job.asked == []


def test_executors_that_leave_and_come_are_seen() -> None:
    job, now = FakeJob(), [0.0]
    director = Director(job, 10.0, [job.act(0.2, "out"), job.act(0.4, "in")], clock=lambda: now[0])
    job.epoch = 1
    for at, nodes in enumerate(
        [
            {"0": 22, "1": 21, "2": 21},
            {"0": 22, "1": 21, "2": 21},
            {"0": 22, "1": 21, "2": 21},
            {"0": 32, "1": 32, "2": 0},
            {"0": 32, "1": 32},
            {"0": 32, "1": 32, "3": 0},
            {"0": 22, "1": 21, "3": 21},
        ]
    ):
        now[0] = job.uptime_s = float(at)
        job.nodes = nodes
        director(0)
    assert director.done == [(2.0, "out"), (4.0, "in")] and job.asked == ["out", "in"]
    assert [at for at, _ in director.seen] == [0.0, 3.0, 4.0, 5.0, 6.0]
    assert demo.changes(director.seen) == [
        (3.0, "2 is drained"),
        (4.0, "2 has left"),
        (5.0, "3 is there"),
        (6.0, "3 has 21 slices"),
    ]
    history = tuple(entry(i, float(i), 10, 3) for i in range(1, 8))
    status = JobStatus(**DEMO, phase="stopped", epoch=7, rows=70, slices=64, history=history)
    found = Measured(status, 0.0, 0.0, 10.0, 0, False, director.done, director.seen).executors()
    assert found is not None
    assert [e["what"] for e in found["events"]] == [
        "out",
        "2 is drained",
        "2 has left",
        "in",
        "3 is there",
        "3 has 21 slices",
    ]
    assert (found["pause_ms"], found["epoch_gap_ms"], found["slices"]) == (1000.0, 1000.0, 64)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"executors": 1}, "cannot run on 1 executors"),
        ({"executors": 99}, "cannot run on 99 executors"),
        ({"executors": 3, "master": "local[2]"}, "a cluster of its own"),
    ],
)
def test_executors_that_make_no_sense_are_refused(flags: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        demo.run_demo(view="plain", **flags)


@pytest.mark.parametrize("seconds", [0.0, 4.9, 1e9, float("nan")])
def test_a_length_that_makes_no_sense_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match="cannot run for"):
        demo.run_demo(seconds=seconds, view="plain")


# --- the measurements ---------------------------------------------------------------------------------------------


def entry(epoch: int, at_s: float, rows: int, containers: int = BEFORE) -> EpochStatus:
    return EpochStatus(epoch=epoch, at_s=at_s, rows=rows, ms=100.0, instances={"words": 1, STAGE: containers})


def measured(*history: EpochStatus, rate: float = 1000.0) -> Measured:
    rows = sum(e.rows for e in history)
    status = JobStatus(
        job="demo",
        flow="demo",
        engine="spark",
        phase="stopped",
        epoch=len(history),
        rows=rows,
        slices=64,
        history=tuple(history),
    )
    # The first row arrives two seconds after the zero of the history.
    return Measured(status, zero=102.0, origin=100.0, rate=rate, moved=32, interrupted=False)


def test_latency_is_from_a_rows_arrival_to_its_epochs_output() -> None:
    # Rows 0..999 arrive in the seconds 2 to 3 and are out at 3.5: 0.5 to 1.5 s; the next thousand likewise.
    p50, p99 = measured(entry(1, 3.5, 1000), entry(2, 4.5, 1000)).latency_ms()
    assert p50 == pytest.approx(1000, abs=30)
    assert p99 == pytest.approx(1490, abs=30)


def test_the_start_does_not_count() -> None:
    slow_start = [entry(1, 20.0, 1000), *(entry(i + 2, 20.5 + i, 1000) for i in range(25))]
    run = measured(*slow_start)
    assert run.rows_s() == pytest.approx(1000)
    with_start = [e.at_s for e in run._steady()]
    assert min(with_start) >= 20.0 + demo.WARM_UP_S


def test_the_rescale_is_found_in_the_history() -> None:
    rescale = measured(
        entry(1, 1.0, 10), entry(2, 2.0, 10), entry(3, 3.75, 10, AFTER), entry(4, 4.75, 10, AFTER)
    ).rescale()
    assert rescale is not None
    assert (rescale["epoch"], rescale["at_s"], rescale["slices_moved"]) == (3, 2.0, 32)
    assert (rescale["pause_ms"], rescale["epoch_gap_ms"]) == (1750.0, 1000.0)
    assert measured(entry(1, 1.0, 10), entry(2, 2.0, 10)).rescale() is None


def test_the_clock_holds_the_words_back_until_the_workers_are_up() -> None:
    now = [5.0]
    clock = ArrivalClock(lambda: now[0])
    assert clock() == 5.0
    now[0] = 9.0
    assert clock() == pytest.approx(5.0 + demo.FIRST_MOMENT_S)
    clock.release()
    assert clock() == pytest.approx(5.0 + demo.FIRST_MOMENT_S)
    now[0] = 10.0
    clock.release()  # once is enough
    assert clock() == pytest.approx(6.0 + demo.FIRST_MOMENT_S)
    # A source of 1000 rows a second shows row 1000 when its clock is one second past its opening.
    assert clock() - 5.0 == pytest.approx(now[0] - clock.zero)


# --- what is shown ------------------------------------------------------------------------------------------------


def shown(result: dict[str, Any], encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    text = io.TextIOWrapper(raw, encoding=encoding)
    demo.report(result, Console(file=text, width=100))
    text.flush()
    return raw.getvalue().decode(encoding)


def test_the_report_says_it_all() -> None:
    run = measured(*(entry(i, i * 0.5, 500, BEFORE if i < 10 else AFTER) for i in range(1, 20)))
    result = run.result() | demo.verdict(small_source(), 5_000, output_of(5_000)) | {"plot": "x.svg"}
    text = shown(result)
    assert "exact: all 8 windows" in text
    assert "counts from 1 to 2 containers at epoch 10: 32 of 64 slices moved" in text
    assert "█" in text and "x.svg" in text
    assert json.loads(json.dumps(result)) == result
    assert "WRONG" in shown(result | {"exact": False})
    assert "early" in shown(result | {"interrupted": True}) and "early" not in text
    assert "#" in shown(result, "ascii")  # no character that the output cannot hold


def test_nothing_to_report() -> None:
    assert "before the first output" in shown(measured().result())


def test_the_picture_marks_the_rescale(tmp_path: Path) -> None:
    run = measured(*(entry(i, i * 0.5, 500, BEFORE if i < 10 else AFTER) for i in range(1, 20)))
    drawn = demo.draw(run.status.history, tmp_path / "run.svg", run.result())
    assert f"{STAGE}: {BEFORE} -&gt; {AFTER} containers" in drawn.read_text()


def test_the_picture_and_the_report_tell_of_executors(tmp_path: Path) -> None:
    history = tuple(entry(i, float(i), 500, 3) for i in range(1, 20))
    status = JobStatus(**DEMO, phase="stopped", epoch=19, rows=9_500, slices=64, history=history)
    seen = [(0.5, {"0": 32, "1": 32}), (6.0, {"0": 64}), (12.0, {"0": 64, "2": 0}), (14.0, {"0": 32, "2": 32})]
    run = Measured(status, 0.0, 0.0, 500.0, 0, False, [(4.0, "one is to leave"), (8.0, "one is asked for")], seen)
    result = run.result()
    drawn = demo.draw(history, tmp_path / "run.svg", result).read_text()
    assert "1 has left" in drawn and "2 has 32 slices" in drawn and "executors" in drawn
    text = " ".join(shown(result).split())
    assert "executors one is to leave (+0.0 s); 1 has left (+2.0 s); one is asked for (+4.0 s); 2 is there" in text
    assert "the longest time without output since then was 1000 ms; 1000 ms is usual" in text


# --- the real thing -----------------------------------------------------------------------------------------------


def real_run(place: Path, *options: str) -> dict[str, Any]:
    """The command in an empty directory, with a place of its own for Spark's files: one JSON object comes of it, and a
    picture, and nothing is left behind.
    """
    scratch = place / "tmp"
    scratch.mkdir()
    path = os.pathsep.join(p for p in (str(ROOT / "src"), os.environ.get("PYTHONPATH", "")) if p)
    done = subprocess.run(
        [sys.executable, "-m", "penstock.cli", "demo", *options, "--json", "--plot", str(place / "run.png")],
        cwd=place,
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(scratch), "SPARK_LOCAL_DIRS": str(scratch)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (place / "run.png").stat().st_size > 10_000
    assert sorted(p.name for p in place.iterdir()) == ["run.png", "tmp"]
    assert [p.name for p in scratch.iterdir() if p.name.startswith("penstock")] == []
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.spark
@pytest.mark.slow
def test_it_runs_on_spark_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """A minute for a real run: exact over a rescale, one JSON object on standard output, a clean directory after it."""
    result = real_run(tmp_path, "--master", "local[2]", "--seconds", "15")
    assert result["exact"] is True and result["windows"] > 0
    moved = result["rescale"]["slices_moved"]
    assert 24 <= moved <= 40, "about half of the 64, by load"
    assert result["late"] == 0 and result["recoveries"] == 0


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.thorough
def test_with_executors_one_leaves_another_comes_and_output_goes_on(tmp_path: Path) -> None:
    """A minute for real executors: more than half of the 30 s is for the Java of the one that comes."""
    result = real_run(tmp_path, "--executors", "2", "--seconds", "30")
    assert result["exact"] is True and result["windows"] > 0
    assert result["late"] == 0 and result["recoveries"] == 0, "to leave is no loss"
    seen = result["executors"]
    told = [event["what"] for event in seen["events"]]
    acts = [what for what in told if what in ("one is to leave", "one is asked for")]
    assert acts == ["one is to leave", "one is asked for"], told
    first, last = seen["nodes"][0]["slices"], seen["nodes"][-1]["slices"]
    assert len(first) == 2 and all(first.values())
    left, came = first.keys() - last.keys(), last.keys() - first.keys()
    assert len(left) == len(came) == 1, told
    gone, new = left.pop(), came.pop()
    assert told.index("one is to leave") < told.index(f"{gone} has left") < told.index(f"{new} is there"), told
    after = next(entry["slices"] for entry in seen["nodes"] if gone not in entry["slices"])
    assert sum(after.values()) == seen["slices"], "it was drained before it went"
    assert seen["epoch_gap_ms"] <= seen["pause_ms"] < 6_000, f"output went on: {seen}"
