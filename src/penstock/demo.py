"""The demonstration: the most frequent words of a sliding window, rescaled while it runs, and checked at the end.

It is one real job on Spark. A generated stream of words at a fixed rate is counted in hopping windows of event time,
and the top words of each window are kept. Half-way through, the stage that counts gets twice the containers. With
``executors`` the job runs on a small cluster of its own on this machine with that many executors: while it runs, one of
them leaves, then another is asked for and comes, and slices move each time. When the time is up the job stops in good
order, and its output is compared with a plain recount of the same words by polars, which shares no code with the
engine. The figures are printed, and drawn if matplotlib is there.

The result is also returned, and is what ``--json`` prints.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import numpy as np
import polars as pl
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.config import Config
from penstock.connectors import memory, words
from penstock.connectors.generator import WordSource
from penstock.connectors.scratch import open_scratch
from penstock.connectors.sinks import MemorySink
from penstock.control.routing import RoutingTable
from penstock.engines.job import Job, start
from penstock.errors import ConfigError, EngineError
from penstock.extras import installed, need
from penstock.flow import Flow
from penstock.observe.live import UntilDone, await_start, bar, quiet_start, short, watch
from penstock.observe.plot import plot_run
from penstock.observe.status import EpochStatus, JobStatus
from penstock.operators.aggregates import count
from penstock.operators.windows import hopping

SECONDS = 25.0
CLUSTER_SECONDS = 45.0
"""The length with executors, of which a new one takes a while to start."""
SECONDS_MIN, SECONDS_MAX = 5.0, 3600.0
RATE = 200_000.0
"""Words a second. One core of a small laptop counts several times as many, Spark, Java and the view need a share."""
CLUSTER_RATE = 100_000.0
"""Words a second with executors, each of which is a JVM of its own on the same cores."""
EXECUTORS_MIN, EXECUTORS_MAX = 2, 8
EXECUTOR_MB = 1024
LEAVE_AT, COME_AT = 0.2, 0.45
"""When an executor is told to leave, and when another is asked for, as shares of the time."""
EPOCH_ROWS = 1_000_000
"""An epoch takes all that has arrived, up to this: after a slow start the job catches up in large steps."""
VOCABULARY = 20_000
WINDOW_S, EVERY_S = 10, 2
TOP = 20
DISORDER_S = 0.2
LATENESS_S = 1
BEFORE, AFTER = 1, 2
"""Containers of the stage that counts, in the first half and in the second."""
STAGE = "counts"
PLOT = Path("penstock-demo.svg")
FIRST_MOMENT_S = 0.02
RECOUNT_ROWS = 1_000_000
"""Words that the recount reads at a time, so that it needs no more memory than the job did."""


# --- the flow -----------------------------------------------------------------------------------------------------


class ArrivalClock:
    """The source's clock. It stands at the first moment until the workers are up, and then runs.

    A clock that ran from the beginning would pile up words during a slow start, and the first half of the run would
    show how the job catches up. The few words of the first moment are what the workers start with.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._opened: float | None = None
        self._held: float | None = None

    def __call__(self) -> float:
        now = self._clock()
        if self._opened is None:
            self._opened = now
        return min(now, self._opened + FIRST_MOMENT_S) if self._held is None else now - self._held

    def release(self) -> None:
        if self._opened is not None and self._held is None:
            self._held = max(0.0, self._clock() - self._opened - FIRST_MOMENT_S)

    @property
    def zero(self) -> float:
        """Row i arrives i / rate seconds after this."""
        return (self._opened or 0.0) + (self._held or 0.0)


def word_source(rate: float, seed: int, clock: Callable[[], float] = time.monotonic) -> WordSource:
    return words(vocabulary=VOCABULARY, zipf=1.0, rows_per_s=rate, disorder=DISORDER_S, seed=seed, clock=clock)


def build_flow(source: WordSource, sink: MemorySink) -> Flow:
    """Words, counted over 10 seconds every 2 seconds of event time, the top 20 of each window kept."""
    flow = Flow("demo")
    counted = (
        flow.source("words", source)
        .key_by("word")
        .window(hopping(f"{WINDOW_S}s", every=f"{EVERY_S}s", on="ts", lateness=f"{LATENESS_S}s"))
        .aggregate(STAGE, n=count())
    )
    counted.top_k("top", TOP, by="n").sink("out", sink)
    return flow


# --- the run ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Act:
    """Something that is done to the job after a share of the time."""

    share: float
    what: str
    do: Callable[[], None]
    over: Callable[[JobStatus], bool] = lambda status: True
    """Has the job done what it was told?"""


Seen = tuple[float, Mapping[str, int]]
"""A time in the seconds of the job's history, and how many slices each node had then."""


@dataclass
class Director:
    """Says what happens when: the acts, and the end when the time is up and the last act is over. Time counts from the
    first output, and the end is never later than twice the time.

    It is the ``until_done`` of the view, which calls it a few times a second, so it needs no thread of its own.
    Stopping has one: it waits for the epoch, and the view goes on meanwhile.
    """

    job: Any
    seconds: float
    acts: Sequence[Act]
    first_output: Callable[[], None] = lambda: None
    clock: Callable[[], float] = time.monotonic
    interrupted: threading.Event = field(default_factory=threading.Event)
    began: float | None = None
    done: list[tuple[float, str]] = field(default_factory=list)
    """The acts that were done, each with its time in the seconds of the job's history."""
    seen: list[Seen] = field(default_factory=list)
    """The nodes and their slices, whenever they changed."""
    _stopper: threading.Thread | None = None

    def __call__(self, timeout: float) -> bool:
        self._act()
        ended: bool = self.job.wait(timeout)
        return ended

    def _act(self) -> None:
        now = self.clock()
        if self._stopper is not None:
            return
        if self.interrupted.is_set():
            self._stop()
            return
        status = self.job.status()
        if self.began is None:
            if not status.epoch:
                return
            self.began = now
            self.first_output()
        self._see(status)
        for act in self.acts[len(self.done) :]:
            if now - self.began >= self.seconds * act.share:
                self.done.append((status.uptime_s, act.what))
                act.do()
        late = now - self.began - self.seconds
        if late >= 0 and (all(act.over(status) for act in self.acts) or late >= self.seconds):
            self._stop()

    def _see(self, status: JobStatus) -> None:
        slices = {node.name: node.slices for node in status.nodes}
        if not self.seen or self.seen[-1][1] != slices:
            self.seen.append((status.uptime_s, slices))

    def _stop(self) -> None:
        self._stopper = threading.Thread(target=self._stop_quietly, name="penstock-demo-stop", daemon=True)
        self._stopper.start()

    def _stop_quietly(self) -> None:
        # An error that ends the job is raised by ``wait``, which the view calls.
        with contextlib.suppress(Exception):
            self.job.stop()

    def join(self) -> None:
        if self._stopper is not None:
            self._stopper.join()


@contextlib.contextmanager
def interrupts(interrupted: threading.Event) -> Iterator[None]:
    """The first Ctrl-C ends the demonstration early and in good order, the second at once."""

    def handle(number: int, frame: FrameType | None) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_demo(
    master: str | None = None,
    seconds: float | None = None,
    plot: Path | None = None,
    view: str = "live",
    *,
    executors: int | None = None,
    rate: float | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Runs the demonstration and gives back what was measured. ``view`` is "live", "plain" or "json"."""
    length = (SECONDS if executors is None else CLUSTER_SECONDS) if seconds is None else float(seconds)
    if not SECONDS_MIN <= length <= SECONDS_MAX:
        raise ConfigError(
            f"the demonstration cannot run for {length:g} seconds.",
            remedy=f"Allowed: {SECONDS_MIN:g} to {SECONDS_MAX:g}; a window is {WINDOW_S} s long.",
        )
    master = _master(master, executors)
    if rate is None:
        rate = RATE if executors is None else CLUSTER_RATE
    if plot is not None:
        need("matplotlib", "--plot")
    target = plot or (PLOT if installed("matplotlib") else None)
    from penstock.cli import _standard_output

    console = Console(stderr=True) if view == "json" else Console()
    with _standard_output(view == "json") as write:
        result = _run(master, executors, length, target, view, rate, seed, console)
        if write is not None:
            write(json.dumps(result))
    if result.get("exact") is False:
        raise EngineError(
            "the demonstration's windows differ from a recount of the same words.",
            remedy="This must never happen. Please report it, with what --json prints.",
        )
    return result


def _master(master: str | None, executors: int | None) -> str:
    if executors is None:
        return master or "local[*]"
    if master is not None:
        raise ConfigError(
            "the demonstration with executors makes a cluster of its own.", remedy="Leave out --master, or --executors."
        )
    if not EXECUTORS_MIN <= executors <= EXECUTORS_MAX:
        raise ConfigError(
            f"the demonstration cannot run on {executors} executors.",
            remedy=f"Allowed: {EXECUTORS_MIN} to {EXECUTORS_MAX}; one of them leaves and somebody must stay.",
        )
    return f"local-cluster[{executors},1,{EXECUTOR_MB}]"


def _run(
    master: str,
    executors: int | None,
    seconds: float,
    target: Path | None,
    view: str,
    rate: float,
    seed: int,
    console: Console,
) -> dict[str, Any]:
    clock = ArrivalClock()
    sink = memory()
    flow = build_flow(word_source(rate, seed, clock), sink)
    interrupted = threading.Event()
    # A directory of the demonstration's own, for it goes even when a second Ctrl-C cuts everything short.
    with open_scratch("demo") as scratch:
        settings = {
            "master": master,
            "instances": BEFORE if executors is None else None,
            "epoch_rows": EPOCH_ROWS,
            "checkpoint": scratch.directory,
            "name": "demo",
        }
        config = Config.load(None, settings)
        with interrupts(interrupted):
            job = _begin(flow, config, console, view, interrupted)
            routings: list[RoutingTable] = []
            acts = _acts(job, routings, executors)
            director = Director(job, seconds, acts, clock.release, interrupted=interrupted)
            _watch(job, view, console, director)
            director.join()
        # Seconds of the status's history count from where its uptime does: that moment, by our clock.
        status, now = job.status(), time.monotonic()
        origin = now - status.uptime_s
        after = _routing(job)
    moved = routings[0].moved(after) if routings else 0
    measured = Measured(status, clock.zero, origin, rate, moved, interrupted.is_set(), director.done, director.seen)
    result = measured.result()
    if status.history:
        result |= verdict(word_source(rate, seed), status.rows, sink.frame())
        result["plot"] = str(draw(status.history, target, result)) if target is not None else None
    if view != "json":
        report(result, console)
    return result


def _acts(job: Job, routings: list[RoutingTable], executors: int | None) -> list[Act]:
    if executors is None:
        return [Act(0.5, f"{STAGE} to {AFTER}", lambda: _rescale(job, routings), _rescaled)]
    return [
        Act(LEAVE_AT, "one is to leave", lambda: job.scale_in(1)),
        Act(COME_AT, "one is asked for", lambda: job.scale_out(1)),
    ]


def _begin(flow: Flow, config: Config, console: Console, view: str, interrupted: threading.Event) -> Job:
    text = f"Starting Spark on {config.master} ..."
    waiting: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if view == "live":
        waiting = console.status(text, spinner="dots")
    elif view == "plain":
        console.print(text, highlight=False)
    with waiting, quiet_start():
        job = start(flow, engine="spark", config=config)
        await_start(job, interrupted)
    return job


def _watch(job: Job, view: str, console: Console, director: UntilDone) -> None:
    if view == "json":
        while not director(0.25):
            pass
    else:
        watch(job, view, console, director)


def _routing(job: Job) -> RoutingTable:
    routing = job.routing
    assert routing is not None, "the job has started"
    return routing


def _rescale(job: Job, routings: list[RoutingTable]) -> None:
    routings.append(_routing(job))
    job.rescale(STAGE, AFTER)


def _rescaled(status: JobStatus) -> bool:
    return not status.moves and any(o.id == STAGE and o.instances == AFTER for o in status.stages)


# --- what came of it ----------------------------------------------------------------------------------------------

WARM_UP_S = 3.0
"""Figures leave out this time after the first output, in which Java's compiler is still at work."""
POINTS = 20
"""Rows of each epoch, evenly spread, whose latencies stand for those of all its rows."""


@dataclass(frozen=True)
class Measured:
    """The figures of the run, from the job's history and the source's clock."""

    status: JobStatus
    zero: float
    """Row i arrives i / rate seconds after this moment."""
    origin: float
    """The zero of the history's seconds, by the same clock."""
    rate: float
    moved: int
    interrupted: bool
    done: Sequence[tuple[float, str]] = ()
    seen: Sequence[Seen] = ()

    def result(self) -> dict[str, Any]:
        s = self.status
        p50, p99 = self.latency_ms()
        return {
            "demo": "top words of a sliding window",
            "interrupted": self.interrupted,
            "epochs": s.epoch,
            "rows": s.rows,
            "rows_s": round(self.rows_s(), 1),
            "rows_s_asked": self.rate,
            "latency_ms_p50": round(p50, 1),
            "latency_ms_p99": round(p99, 1),
            "late": s.late,
            "recoveries": s.recoveries,
            "checkpoints": s.checkpoints,
            "rescale": self.rescale(),
            "executors": self.executors(),
        }

    def _steady(self) -> list[EpochStatus]:
        history = self.status.history
        return [e for e in history if e.at_s >= history[0].at_s + WARM_UP_S] or list(history)

    def rows_s(self) -> float:
        steady = self._steady()
        if len(steady) < 2:
            return 0.0
        return float(sum(e.rows for e in steady[1:]) / max(steady[-1].at_s - steady[0].at_s, 1e-3))

    def latency_ms(self) -> tuple[float, float]:
        """Median and 99th percentile, over rows, of the time from a row's arrival to its epoch's output.

        A row arrives when the rate says so, whether or not anybody was ready to read it: waiting counts.
        """
        through = self.status.rows - sum(e.rows for e in self.status.history)
        steady = {e.epoch for e in self._steady()}
        waits: list[np.ndarray] = []
        weights: list[np.ndarray] = []
        for entry in self.status.history:
            rows = entry.rows
            if rows and entry.epoch in steady:
                row = through + rows * (np.arange(POINTS) + 0.5) / POINTS
                waits.append(self.origin + entry.at_s - (self.zero + row / self.rate))
                weights.append(np.full(POINTS, rows / POINTS))
            through += rows
        if not waits:
            return 0.0, 0.0
        wait, weight = np.concatenate(waits), np.concatenate(weights)
        order = np.argsort(wait)
        share = np.cumsum(weight[order]) / weight.sum()
        median, last = (wait[order][np.searchsorted(share, q)] * 1000 for q in (0.5, 0.99))
        return float(median), float(last)

    def rescale(self) -> dict[str, Any] | None:
        """The epoch at which the stage got its new containers, how many slices moved, and how long output paused."""
        history = self.status.history
        after = next((i for i, e in enumerate(history) if e.instances[STAGE] == AFTER), 0)
        if not after:
            return None
        gaps = [b.at_s - a.at_s for a, b in pairwise(history)]
        return {
            "stage": STAGE,
            "from": BEFORE,
            "to": AFTER,
            "epoch": history[after].epoch,
            "at_s": history[after - 1].at_s,
            "slices": self.status.slices,
            "slices_moved": self.moved,
            "pause_ms": round((history[after].at_s - history[after - 1].at_s) * 1000, 1),
            "epoch_gap_ms": round(float(np.median(gaps)) * 1000, 1),
        }

    def executors(self) -> dict[str, Any] | None:
        """Which executors left and came, the slices of each, and the longest time without output since the first
        act."""
        if not self.done or max((len(slices) for _, slices in self.seen), default=0) < 2:
            return None
        history = self.status.history
        gaps = [(b.at_s, b.at_s - a.at_s) for a, b in pairwise(history)]
        since = [gap for at, gap in gaps if at >= self.done[0][0]]
        events = sorted([*self.done, *changes(self.seen)])
        return {
            "events": [{"at_s": round(at, 2), "what": what} for at, what in events],
            "nodes": [{"at_s": round(at, 2), "slices": dict(slices)} for at, slices in self.seen],
            "slices": sum(self.seen[0][1].values()),
            "pause_ms": round(max(since, default=0.0) * 1000, 1),
            "epoch_gap_ms": round(float(np.median([gap for _, gap in gaps])) * 1000, 1) if gaps else 0.0,
        }


def changes(seen: Sequence[Seen]) -> list[tuple[float, str]]:
    """What happened to nodes, read from the slices of each over time: a node was emptied, left, came, or got slices."""
    found = []
    for (_, before), (at, after) in pairwise(seen):
        found += [(at, f"{name} has left") for name in before if name not in after]
        found += [(at, f"{name} is there") for name in after if name not in before]
        for name in before.keys() & after.keys():
            if before[name] and not after[name]:
                found.append((at, f"{name} is drained"))
            elif after[name] and not before[name]:
                found.append((at, f"{name} has {after[name]} slices"))
    return found


def recount(source: WordSource, rows: int, until: dt.datetime) -> pl.DataFrame:
    """The top words of every window that ends by ``until``, from the first ``rows`` words, without the engine."""
    panes: list[pl.DataFrame] = []
    for first in range(0, rows, RECOUNT_ROWS):
        frame = source.read("recount", {"first": first, "last": min(rows, first + RECOUNT_ROWS)}).frame
        panes.append(frame.group_by("word", pl.col("ts").dt.truncate(f"{EVERY_S}s").alias("pane")).agg(n=pl.len()))
    counts = pl.concat(panes).group_by("word", "pane").agg(pl.col("n").sum())
    # A pane of two seconds is part of the windows that end 2, 4, 6, 8 and 10 seconds after it begins.
    shares = [
        counts.with_columns(window_end=pl.col("pane") + pl.duration(seconds=EVERY_S * hop))
        for hop in range(1, WINDOW_S // EVERY_S + 1)
    ]
    windows = pl.concat(shares).filter(pl.col("window_end") <= until)
    sums = windows.group_by("window_end", "word").agg(pl.col("n").sum().cast(pl.Int64))
    ranked = sums.sort("window_end", "n", "word", descending=[False, True, False])
    return ranked.group_by("window_end", maintain_order=True).head(TOP).select("window_end", "word", "n")


def verdict(source: WordSource, rows: int, output: pl.DataFrame) -> dict[str, Any]:
    """Whether every window in the output has exactly the words and counts of a recount, and the words of the last."""
    if not output.height:
        return {"windows": 0, "exact": None, "top": []}
    said = output.sort("window_end", "rank").select("window_end", "word", "n")
    last = said["window_end"].max()
    assert isinstance(last, dt.datetime)
    top = said.filter(pl.col("window_end") == last)
    return {
        "windows": said["window_end"].n_unique(),
        "exact": said.equals(recount(source, rows, last)),
        "window_end": last.isoformat(),
        "top": [{"word": word, "n": n} for _, word, n in top.iter_rows()],
    }


def draw(epochs: Sequence[EpochStatus], target: Path, result: Mapping[str, Any]) -> Path:
    """The run as a picture, what was done to it marked."""
    title = f"top words, {short(result['rows_s_asked'])} words a second"
    history: list[dict[str, Any]] = msgspec.to_builtins(epochs)
    executors = result["executors"]
    if executors:
        marks = [(float(event["at_s"]), str(event["what"])) for event in executors["events"]]
        seen = [(float(entry["at_s"]), len(entry["slices"])) for entry in executors["nodes"]]
        counted = [{**e, "instances": _at(seen, float(e["at_s"]))} for e in history]
        return plot_run(counted, target, title, marks, counted="executors")
    rescale = result["rescale"]
    marks = [(float(rescale["at_s"]), f"{STAGE}: {BEFORE} -> {AFTER} containers")] if rescale else []
    return plot_run([{**e, "instances": e["instances"][STAGE]} for e in history], target, title, marks)


def _at(seen: Sequence[tuple[float, int]], at: float) -> int:
    return next((count for since, count in reversed(seen) if since <= at), seen[0][1])


def report(result: Mapping[str, Any], console: Console) -> None:
    """Print what a person wants to know at the end."""
    console.print()
    if result.get("top"):
        console.print(_top_table(result, console))
        console.print()
    for name, value in _facts(result):
        console.print(Text.assemble((f"{name:>10}  ", "bright_black"), value), soft_wrap=True)


def _top_table(result: Mapping[str, Any], console: Console) -> Table:
    # A bar of block characters needs a terminal or file that can hold them.
    blocks = (console.encoding or "").lower().startswith("utf")
    table = Table(
        title=f"top words of the {WINDOW_S} s before {result['window_end'].split('T')[1]}",
        title_justify="left",
        title_style="bold",
        header_style="bright_black",
        box=None,
        padding=(0, 1),
    )
    for name, justify in (("rank", "right"), ("word", "left"), ("count", "right"), ("", "left")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    most = max(entry["n"] for entry in result["top"])
    width = max(10, min(40, console.width - 36))
    for rank, entry in enumerate(result["top"], 1):
        share = entry["n"] / most
        drawn = bar(share, width) if blocks else "#" * round(share * width)
        table.add_row(str(rank), Text(entry["word"], style="bold"), f"{entry['n']:,}", Text(drawn, style="cyan"))
    return table


def _facts(result: Mapping[str, Any]) -> Iterator[tuple[str, Text]]:
    if not result["epochs"]:
        yield "stopped", Text("before the first output")
        return
    if result["interrupted"]:
        yield "stopped", Text("early, so the figures are of a short run", style="yellow")
    yield "speed", Text(f"{short(result['rows_s'])} rows/s ({short(result['rows_s_asked'])} asked for), "
                        f"{short(result['rows'])} rows in {result['epochs']} epochs, "
                        f"{result['checkpoints']} checkpoints")  # fmt: skip
    yield (
        "latency",
        Text(
            f"p50 {result['latency_ms_p50']:.0f} ms, p99 {result['latency_ms_p99']:.0f} ms, "
            "from a word's arrival to its epoch's output"
        ),
    )
    rescale = result["rescale"]
    if rescale:
        yield (
            "rescale",
            Text(
                f"{STAGE} from {rescale['from']} to {rescale['to']} containers at epoch {rescale['epoch']}: "
                f"{rescale['slices_moved']} of {rescale['slices']} slices moved"
            ),
        )
        yield (
            "",
            Text(f"the next output came after {rescale['pause_ms']:.0f} ms; {rescale['epoch_gap_ms']:.0f} ms is usual"),
        )
    executors = result["executors"]
    if executors:
        begin = executors["events"][0]["at_s"]
        told = "; ".join(f"{event['what']} ({event['at_s'] - begin:+.1f} s)" for event in executors["events"])
        yield "executors", Text(told)
        yield (
            "",
            Text(
                f"the longest time without output since then was {executors['pause_ms']:.0f} ms; "
                f"{executors['epoch_gap_ms']:.0f} ms is usual"
            ),
        )
    if result.get("exact") is not None:
        yield (
            "check",
            (
                Text(
                    f"exact: all {result['windows']} windows equal a recount of the same words by polars", style="green"
                )
                if result["exact"]
                else Text(f"WRONG: the {result['windows']} windows differ from a recount by polars", style="bold red")
            ),
        )
    if "plot" in result:
        yield "plot", Text(result["plot"] or "not drawn: pip install 'penstock[plots]' brings what draws it")
