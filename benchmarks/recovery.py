"""How long until new output after executors are killed: Penstock against Structured Streaming, on real processes.

Both run the same running count and sum over the same Parquet files on ``local-cluster[N,1,MB]``: N executors, each a
JVM of its own with Python workers below it. A first phase loads distinct keys until the state has the size asked for.
Then a file arrives every second, with rows on random keys of all. One or several executors are killed with SIGKILL at
the same instant, and the clock runs until the next output that had not been committed before. Output that was committed
already and comes a second time does not count, nor does an epoch that was finished when the kill came.

The record of events that the controller sees splits Penstock's time in three. ``detect_s`` goes until the first event
that says that something is lost. ``drain_s`` goes until the last task of the old attempt is gone. ``replay_s`` is for
the epochs that run again, from the last checkpoint up to the first new one. Within ``replay_s``, ``rebuild_s`` is the
longest time that a container took to bring lost slices up, from backups or from the durable checkpoint. ``spark_s`` is
everything but the rebuild.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import psutil

from benchmarks import common
from benchmarks.common import Figures, Row
from penstock.errors import EngineError

SUMMARY = "From the SIGKILL of executors to the next new output, by size of state, against Structured Streaming."

MODULE = "benchmarks.recovery"
OPERATOR = "totals"
KEY, SUM, COUNT = "key", "total", "n"
BYTES_PER_KEY = 73
"""Bytes of ``JobStatus.state_bytes`` for a key with a count and a sum. The rows have the size that a run had."""
FILE_ROWS = 25_000
FEED_S = 1.0
BATCH_FILES = 10
"""The most files that a batch or an epoch takes. A contender catches up at this size with the files that wait."""
BEATS = 60
"""Different files that the second phase takes in turn."""
EXECUTOR_MB = 768
AHEAD_FILES = 10
"""The most files that wait for a contender. A contender that is too slow for the rate gets what it can take."""
SETTLE_S_MAX = 180.0
SPREAD_S_MAX = 120.0
"""Seconds that slices may take to come to a replacement that is up. The next kill is due then all the same."""
RUN_S_MAX = 3_600.0

PENSTOCK, STRUCTURED = "penstock", "structured_rocksdb"


@dataclass(frozen=True)
class Point:
    """One run: a job with its state, and its kills, each with the number of executors that are killed at once."""

    state_mb: int = 200
    backups: int = 1
    interval_s: float = 1.0
    executors: int = 5
    kills: tuple[int, ...] = (1, 1)

    @property
    def keys(self) -> int:
        return self.state_mb * 1_000_000 // BYTES_PER_KEY


BASE = Point(kills=(1, 3, 2, 1))
POINTS = (
    BASE,
    Point(state_mb=50),
    Point(state_mb=1_000),
    Point(backups=2, kills=(1, 3)),
    Point(interval_s=5.0),
    Point(interval_s=15.0),
    Point(executors=3),
)
"""The points vary one axis at a time from the base point: the full product would take a day and say little more. The
base interval is a second, because Structured Streaming makes every batch durable, and its batches take about a second.
"""
PEER_POINTS = (BASE, Point(state_mb=50))
"""Structured Streaming has neither backups nor an interval of checkpoints: it makes each batch durable."""
QUICK = (Point(state_mb=50, kills=(1, 3)),)


def run(quick: bool, out: Path | None) -> dict[str, Any]:
    """See README.md. Quick: 50 MB, one kill of one executor and one of three."""
    points = QUICK if quick else POINTS
    peers = QUICK if quick else PEER_POINTS
    rows: list[Row] = []
    traces: list[dict[str, Any]] = []
    for number, point in enumerate(points, 1):
        with common.workplace() as place:
            write_input(place / "pool", point.keys)
            for contender in (PENSTOCK, STRUCTURED) if point in peers else (PENSTOCK,):
                common.note(f"{number} of {len(points)}, {contender}: {point}")
                found, events = measure(contender, point, number, place)
                rows += found
                traces += events
    notes = [
        "to_next_output_s: from SIGKILL to the first output that had not been committed before.",
        "rebuild_s: the longest time that a container took to bring lost slices up. spark_s: all the other time.",
        "rebuild_cpu_s: processor time of rebuild_s. In the other part of it the container waited for a core while "
        "Spark started new executors.",
        "detect_s + drain_s + replay_s is to_next_output_s: until the loss is seen, until what still ran is gone, and "
        "until the epochs since the last checkpoint have run again and one more is out.",
        "from_backup, from_durable: slices brought up from a peer's copy, or from the checkpoint.",
        f"A file of {FILE_ROWS:,} rows every {FEED_S} s. Structured Streaming makes each batch durable, Penstock each "
        "interval_s; both run as soon as there is input.",
        "In every run the final count and sum of every key were compared with the truth, and no output came twice.",
    ]

    def draw(path: Path) -> None:
        from penstock.observe.plot import plot_bars

        single = [row for row in rows if _is(row, BASE, "state_mb") and row["kills"] == 1]
        bars = common.medians(single, "to_next_output_s", group="state_mb")
        plot_bars(bars, path, "From the loss of an executor to new output, by state in MB", "seconds")

    return common.finish("recovery", rows, ratios(rows), notes, out, draw, traces=traces)


def measure(contender: str, point: Point, seed: int, place: Path) -> tuple[list[Row], list[dict[str, Any]]]:
    """All kills of one run with verified output. A run of Penstock also gives what happened around each kill."""
    work = place / "work"
    args = {**dataclasses.asdict(point), "keys": point.keys, "pool": str(place / "pool"), "work": str(work)}
    figures = common.run_contender(MODULE, contender, {**args, "seed": seed}, work, seconds_max=RUN_S_MAX)
    check_output(work / "out", true_totals(place / "pool", figures["fed"]), contender)
    shutil.rmtree(work, ignore_errors=True)
    shared = {
        "contender": contender,
        "round": 1,
        "state_mb": point.state_mb,
        "backups": point.backups if contender == PENSTOCK else None,
        "interval_s": point.interval_s if contender == PENSTOCK else None,
        "executors": point.executors,
    }
    measured = {
        "state_bytes": figures["state_bytes"],
        "state_rows": figures["state_rows"],
        "batch_ms_p50": figures["batch_ms_p50"],
        "memory_mb": figures["memory_mb"],
    }
    rows = [{**shared, **kill, **measured} for kill in figures["kills"]]
    for row in rows:
        common.note(f"{contender}: " + ", ".join(f"{k} {v}" for k, v in row.items() if v is not None))
    return rows, [
        {**shared, "kill": kill, "events": events} for kill, events in enumerate(figures.get("traces", ()), 1)
    ]


# --- figures ------------------------------------------------------------------------------------------------------


def _is(row: Row, point: Point, *free: str) -> bool:
    """Whether a row is of this point, except for the axes named ``free``. An axis that a contender does not have
    matches.
    """
    axes = ("state_mb", "backups", "interval_s", "executors")
    return all(axis in free or row[axis] is None or row[axis] == getattr(point, axis) for axis in axes)


def _median(rows: Sequence[Row], figure: str) -> float | None:
    found = [float(row[figure]) for row in rows if row.get(figure) is not None]
    return common.rounded(statistics.median(found)) if found else None


def _over(a: float | None, b: float | None) -> float | None:
    return common.rounded(a / b) if a is not None and b else None


def ratios(rows: Sequence[Row]) -> dict[str, float | None]:
    """Medians over all kills of a kind. When a kill hits within an epoch is chance, so pairs of kills mean nothing."""
    ours = [row for row in rows if row["contender"] == PENSTOCK]
    theirs = [row for row in rows if row["contender"] == STRUCTURED]
    # A quick run has no base point, so it compares the points it has.
    base = BASE if any(_is(row, BASE) for row in ours) else Point(state_mb=ours[0]["state_mb"]) if ours else BASE
    found: dict[str, float | None] = {}

    def median(which: Sequence[Row], figure: str, kills: int, *free: str, **where: Any) -> float | None:
        chosen = [row for row in which if row["kills"] == kills and _is(row, base, *free)]
        return _median([row for row in chosen if all(row[k] == v for k, v in where.items())], figure)

    output = "to_next_output_s"
    found["vs_structured_streaming"] = _over(median(theirs, output, 1), median(ours, output, 1))
    for size in sorted({row["state_mb"] for row in ours}):
        suffix = f"_{size}mb"
        mine = median(ours, output, 1, "state_mb", state_mb=size)
        found[f"to_next_output_s{suffix}"] = mine
        found[f"rebuild_s{suffix}"] = median(ours, "rebuild_s", 1, "state_mb", state_mb=size)
        peer = median(theirs, output, 1, "state_mb", state_mb=size)
        found[f"vs_structured_streaming{suffix}"] = _over(peer, mine)
    one = median(ours, output, 1)
    found["two_failures_vs_one"] = _over(median(ours, output, 2), one)
    found["three_failures_vs_one"] = _over(median(ours, output, 3), one)
    found["three_failures_rebuild_vs_one"] = _over(median(ours, "rebuild_s", 3), median(ours, "rebuild_s", 1))
    for kills in (1, 2, 3):
        found[f"rebuild_s_failures_{kills}"] = median(ours, "rebuild_s", kills)
        found[f"rebuild_cpu_s_failures_{kills}"] = median(ours, "rebuild_cpu_s", kills)
    for axis, names in (("executors", "holders"), ("interval_s", "interval"), ("backups", "backups")):
        values = sorted({row[axis] for row in ours})
        for value in values if len(values) > 1 else ():
            where = {axis: value}
            figure = output if axis == "interval_s" else "rebuild_s"
            found[f"{figure}_{names}_{value:g}"] = median(ours, figure, 1, axis, **where)
    return found


def penstock_kill(at: float, trace: Sequence[Mapping[str, Any]]) -> Figures:
    """The figures of one kill at ``at``, from the record of events and commands, in seconds of the same clock.

    A loss is seen when a stage fails, when a container says that its state is gone, or when the nodes have changed.
    """
    before = [entry for entry in trace if entry["at"] <= at]
    after = [entry for entry in trace if entry["at"] > at]
    attempt = max((entry["attempt"] for entry in before if entry.get("attempt")), default=0)
    published = max((entry["epoch"] for entry in before if entry["what"] == "EpochPublished"), default=0)
    seen = next((entry["at"] for entry in after if _says_lost(entry)), None)
    begun: float | None = None
    repeated, rebuild_ms, cpu_ms, attempts = 0, 0.0, 0.0, 0
    sources: Counter[str] = Counter()
    for entry in after:
        if entry.get("attempt", 0) <= attempt:
            if entry["what"] == "EpochPublished":  # the epoch was as good as done when the kill came
                published = max(published, entry["epoch"])
            continue
        attempts = max(attempts, entry["attempt"] - attempt)
        if entry["what"] == "RunStage" and begun is None:
            begun = entry["at"]
        if entry["what"] == "StageDone":
            rebuild_ms = max(rebuild_ms, entry["load_ms"])
            cpu_ms = max(cpu_ms, entry["load_cpu_ms"])
            sources.update(entry["rebuilt"])
        if entry["what"] == "EpochPublished" and entry["epoch"] <= published:
            repeated += 1
        elif entry["what"] == "EpochPublished":
            total = entry["at"] - at
            seen = entry["at"] if seen is None else seen
            begun = seen if begun is None else begun
            return {
                "to_next_output_s": round(total, 3),
                "detect_s": round(seen - at, 3),
                "drain_s": round(begun - seen, 3),
                "replay_s": round(entry["at"] - begun, 3),
                "rebuild_s": round(rebuild_ms / 1000, 3),
                "rebuild_cpu_s": round(cpu_ms / 1000, 3),
                "spark_s": round(total - rebuild_ms / 1000, 3),
                "repeated_epochs": repeated,
                "attempts": attempts,
                "from_backup": sources["backup"],
                "from_durable": sources["durable"],
            }
    raise EngineError("no new output came after a kill", remedy="Look at the contender's log.")


def _says_lost(entry: Mapping[str, Any]) -> bool:
    return entry["what"] in ("StageFailed", "NodesChanged") or bool(entry.get("missing"))


def structured_kill(at: float, batches: Sequence[tuple[float, int]]) -> Figures:
    """The figures of a kill. ``batches`` says when each batch's output was complete, and its number."""
    last = max((number for done, number in batches if done <= at), default=-1)
    done = next((done for done, number in batches if done > at and number > last), None)
    if done is None:
        raise EngineError("no new output came after a kill", remedy="Look at the contender's log.")
    return {"to_next_output_s": round(done - at, 3)}


# --- input and truth ----------------------------------------------------------------------------------------------


def write_input(pool: Path, keys: int, *, beats: int = BEATS, rows: int = FILE_ROWS, seed: int = 5) -> None:
    """Write ``load-*``, each key once, in no order, and ``beat-*``, random keys of all."""
    pool.mkdir(parents=True)
    common.note(f"writing {keys:,} keys")
    rng = np.random.default_rng(seed)
    order = rng.permutation(keys)
    for number, first in enumerate(range(0, keys, rows)):
        _write(order[first : first + rows], rng, pool / f"load-{number:05d}.parquet")
    for number in range(beats):
        _write(rng.integers(0, keys, rows), rng, pool / f"beat-{number:05d}.parquet")


def _write(numbers: np.ndarray[Any, Any], rng: np.random.Generator, path: Path) -> None:
    keys = pl.Series(KEY, numbers).cast(pl.String).str.zfill(10)
    frame = pl.DataFrame({KEY: "user-" + keys, "amount": rng.integers(0, 1_000, len(numbers))})
    frame.write_parquet(path, compression="snappy", row_group_size=-(-len(numbers) // common.ROW_GROUPS))


def true_totals(pool: Path, fed: int) -> pl.DataFrame:
    """Key, n, total after all of ``load-*`` and ``fed`` files of ``beat-*``, taken in turn."""
    beats = sorted(pool.glob("beat-*.parquet"))
    turns, rest = divmod(fed, len(beats))
    totals = (pl.len().cast(pl.Int64).alias(COUNT), pl.col("amount").sum().alias(SUM))
    parts = [pl.read_parquet(pool / "load-*.parquet").group_by(KEY).agg(totals)]
    for number, path in enumerate(beats):
        times = turns + (number < rest)
        if times:
            beat = pl.read_parquet(path).group_by(KEY).agg(totals)
            parts.append(beat.with_columns(pl.col(COUNT) * times, pl.col(SUM) * times))
    return pl.concat(parts).group_by(KEY).agg(pl.col(COUNT).sum(), pl.col(SUM).sum()).sort(KEY)


def check_output(out: Path, truth: pl.DataFrame, contender: str) -> None:
    """Check what a reader of the output sees: no count of a key twice, and the last one of every key is right."""
    rows = pl.read_parquet(out / "**" / "*.parquet", hive_partitioning=False).select(KEY, COUNT, SUM)
    twice = rows.height - rows.select(pl.struct(KEY, COUNT).n_unique()).item()
    # A count only grows, so the last row of a key has the greatest count.
    last = rows.sort(COUNT).unique(KEY, keep="last").sort(KEY).cast({COUNT: pl.Int64, SUM: pl.Int64})
    if twice == 0 and last.equals(truth):
        return
    wrong = truth.join(last, on=KEY, how="full", suffix="_found", coalesce=True).filter(
        pl.col(COUNT).ne_missing(pl.col(f"{COUNT}_found")) | pl.col(SUM).ne_missing(pl.col(f"{SUM}_found"))
    )
    raise EngineError(
        f"contender '{contender}' is not exact after the kills: {twice:,} rows of output came twice, {wrong.height:,} "
        f"of {truth.height:,} keys are wrong, such as {wrong.head(1).to_dicts()}.",
        remedy="Its figures were thrown away. Please report this.",
        contender=contender,
    )


class Feeder(threading.Thread):
    """Puts files where the contender looks for them: all of the load at once, then one every ``FEED_S``.

    A file appears whole, as a hard link. ``taken`` says how many files after the load the contender has processed.
    """

    def __init__(self, pool: Path, into: Path) -> None:
        super().__init__(name="feeder", daemon=True)
        self.pool, self.into = pool, into
        self.taken: Callable[[], int] = lambda: self.fed
        self.beats = sorted(pool.glob("beat-*.parquet"))
        self.fed = 0
        self._over = threading.Event()
        into.mkdir(parents=True)

    def load(self) -> int:
        """How many files."""
        files = sorted(self.pool.glob("load-*.parquet"))
        for path in files:
            os.link(path, self.into / path.name)
        return len(files)

    def run(self) -> None:
        due = time.monotonic()
        while not self._over.wait(max(0.0, due - time.monotonic())):
            due = max(due + FEED_S, time.monotonic())
            if self.fed - self.taken() < AHEAD_FILES:
                os.link(self.beats[self.fed % len(self.beats)], self.into / f"z-{self.fed:06d}.parquet")
                self.fed += 1

    def stop(self) -> None:
        self._over.set()
        self.join()


# --- killing ------------------------------------------------------------------------------------------------------


def executors() -> dict[str, psutil.Process]:
    """Executor id -> its process, of the living executors below this process."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, ValueError):
            line = process.cmdline()
            if any("CoarseGrainedExecutorBackend" in part for part in line) and process.status() != "zombie":
                # Before the launcher's JVM becomes the executor, it has the same words in a longer line.
                found[line[line.index("--executor-id") + 1]] = process
    return found


def choose_victims(alive: Sequence[str], owners: Sequence[str], count: int, rng: np.random.Generator) -> list[str]:
    """Choose victims by chance among the living executors. At least one has slices: nobody misses one without."""
    first = str(rng.choice(owners))
    others = [node for node in alive if node != first]
    return [first, *(str(node) for node in rng.permutation(others)[: count - 1])]


def kill(victims: Sequence[psutil.Process]) -> float:
    """Send SIGKILL to all of them, and give the time by the monotonic clock."""
    at = time.monotonic()
    for process in victims:
        process.send_signal(signal.SIGKILL)
    return at


def wait_for(condition: Callable[[], bool], seconds_max: float, what: str = "") -> bool:
    """Poll a condition, because both engines are asked from outside. With ``what``, a condition that never comes is an
    error.
    """
    limit = time.monotonic() + seconds_max
    pause = threading.Event()
    while not condition():
        if time.monotonic() > limit:
            if what:
                raise EngineError(f"waited {seconds_max:.0f} s in vain until {what}", remedy="See the contender's log.")
            return False
        pause.wait(0.05)
    return True


# --- Penstock -----------------------------------------------------------------------------------------------------


def told(entry: Mapping[str, Any], at: float) -> str:
    """An entry as a line of text: seconds from ``at``, its name, and what there is to say about it."""
    numbers = {name: f"{entry[name]:.0f} ms" for name in ("load_ms", "busy_ms") if entry.get(name)}
    more = {name: entry[name] for name in ("stage", "epoch", "attempt", "rebuilt", "missing") if entry.get(name)}
    said = ", ".join(f"{name.removesuffix('_ms')} {value}" for name, value in {**more, **numbers}.items())
    return f"{entry['at'] - at:+.3f} {entry['what']}: {said}. {str(entry.get('reason') or '')[:160]}".rstrip(" .:")


class Trace:
    """The record of the controller's events and commands, kept beside the runtime's own work."""

    def __init__(self, runtime: Any) -> None:
        self.entries: list[dict[str, Any]] = []
        self._observe, self._execute = runtime._observe, runtime._execute
        runtime._observe, runtime._execute = self.event, self.command

    def event(self, event: Any) -> None:
        what = type(event).__name__
        if what in ("StageDone", "StageFailed", "EpochPublished", "ManifestWritten", "NodesChanged"):
            self.entries.append(self._entry(what, event))
        self._observe(event)

    def command(self, command: Any) -> None:
        what = type(command).__name__
        if what in ("RunStage", "CancelAll"):
            self.entries.append(self._entry(what, command))
        self._execute(command)

    def around(self, at: float) -> list[str]:
        """What happened from a second before ``at`` until now, one line each."""
        return [told(entry, at) for entry in list(self.entries) if entry["at"] > at - 1.0]

    def _entry(self, what: str, item: Any) -> dict[str, Any]:
        # An event is stamped where it happens. Its wait in the queue is part of the measured time.
        entry: dict[str, Any] = {"at": time.monotonic(), "what": what}
        entry |= {name: getattr(item, name) for name in ("epoch", "attempt", "stage", "reason") if hasattr(item, name)}
        reports = getattr(item, "reports", None)
        if reports is not None:
            entry["load_ms"] = max((report.load_ms for report in reports), default=0.0)
            entry["load_cpu_ms"] = max((report.load_cpu_ms for report in reports), default=0.0)
            entry["busy_ms"] = max((report.busy_ms for report in reports), default=0.0)
            entry["missing"] = any(report.missing for report in reports)
            rebuilt: Counter[str] = Counter()
            for report in reports:
                rebuilt.update(report.rebuilt)
            entry["rebuilt"] = dict(rebuilt)
        return entry


def penstock(args: dict[str, Any]) -> Iterator[Figures]:
    import penstock as ps
    from penstock.engines.job import start

    work = Path(args["work"])
    feeder = Feeder(Path(args["pool"]), work / "in")
    feeder.load()
    flow = ps.Flow("recovery")
    source = flow.source("in", ps.files(f"{work}/in/*.parquet", follow=True))
    totals = source.key_by(KEY).aggregate(OPERATOR, **{COUNT: ps.count(), SUM: ps.sum("amount")})
    # Structured Streaming's Parquet writer leaves it to the system when files reach the disk.
    totals.sink("out", ps.parquet(str(work / "out"), durable=False))
    config = ps.Config(
        master=f"local-cluster[{args['executors']},1,{EXECUTOR_MB}]",
        epoch_rows=FILE_ROWS * BATCH_FILES,
        checkpoint=str(work / "checkpoint"),
        checkpoint_interval_s=args["interval_s"],
        backups=args["backups"],
        spark=_spark_settings(work),
    )
    job = start(flow, engine="spark", config=config)
    wait_for(lambda: job.status().phase in ("running", "failed"), SETTLE_S_MAX, "the job runs")
    trace = Trace(job._runtime)
    wait_for(_watch(job, lambda: job.status().rows >= args["keys"]), RUN_S_MAX / 2, "the state is loaded")
    feeder.taken = lambda: (job.status().rows - args["keys"]) // FILE_ROWS
    feeder.start()
    rng = np.random.default_rng([7, args["seed"]])
    kills: list[Figures] = []
    traces: list[list[str]] = []
    for number, count in enumerate(args["kills"]):
        _settle_penstock(job, args, feeder)
        # Kills of one kind are spread evenly over the time from one checkpoint to the next.
        same = [n for n, c in enumerate(args["kills"]) if c == count]
        phase = (same.index(number) + 0.5) / len(same)
        _after_checkpoint(trace, phase * args["interval_s"])
        if not kills:  # by now a checkpoint has released the undo logs of the load
            state = job.status()
        alive = executors()
        owners = sorted(_owners(job) & alive.keys())
        victims = [alive[node] for node in choose_victims(sorted(alive), owners, count, rng)]
        common.note(f"kill {count} of {sorted(alive)}, slices are on {owners}")
        stands = {"nodes_used": len(owners), "backed": common.rounded(_share_current(job))}
        at = kill(victims)
        try:
            wait_for(_watch(job, partial(_output_is_new, at, trace)), SETTLE_S_MAX, "there is new output")
        finally:
            common.note("\n".join(trace.around(at)))
        figures = penstock_kill(at, list(trace.entries))
        kills.append({"kills": count, "phase_s": round(phase * args["interval_s"], 2), **stands, **figures})
        traces.append(trace.around(at))
        common.note(str(kills[-1]))
    feeder.stop()
    rows = args["keys"] + feeder.fed * FILE_ROWS
    wait_for(_watch(job, lambda: job.status().rows >= rows), SETTLE_S_MAX * 4, "all input is published")
    history = [entry.ms for entry in job.status().history if entry.rows == FILE_ROWS]
    job.stop()
    yield {
        "kills": kills,
        "traces": traces,
        "fed": feeder.fed,
        "state_bytes": state.state_bytes,
        "state_rows": state.state_rows,
        "batch_ms_p50": common.rounded(statistics.median(history)) if history else None,
    }


def _spark_settings(work: Path) -> dict[str, str]:
    return {
        "spark.driver.memory": common.DRIVER_MEMORY,
        "spark.executor.memory": f"{EXECUTOR_MB}m",
        "spark.local.dir": str(work / "spark"),
    }


def _watch(job: Any, condition: Callable[[], bool]) -> Callable[[], bool]:
    """The condition, or the error that ended the job."""

    def check() -> bool:
        if job._runtime.ended.is_set():
            job.wait()
            raise EngineError("the job has ended too early", remedy="See the contender's log.")
        return condition()

    return check


def _output_is_new(at: float, trace: Trace) -> bool:
    try:
        penstock_kill(at, list(trace.entries))
    except EngineError:
        return False
    return True


def _settle_penstock(job: Any, args: dict[str, Any], feeder: Feeder) -> None:
    """All executors are there, slices and backups are spread over them again, and no files wait.

    A job that does not come to rest in time is left as it is. The row of the kill says so: ``nodes_used``, ``backed``.
    """
    wait_for(lambda: len(executors()) == args["executors"], SETTLE_S_MAX, "all executors are back")
    wait_for(_watch(job, lambda: len(_owners(job)) == args["executors"]), SPREAD_S_MAX)
    wait_for(_watch(job, lambda: not job.status().moves and _share_current(job) == 1.0), SPREAD_S_MAX)
    wait_for(_watch(job, lambda: feeder.fed - feeder.taken() <= 3), SPREAD_S_MAX)


def _owners(job: Any) -> set[str]:
    """Nodes that own slices."""
    routing = job.routing
    return {routing.homes[c] for c in routing.occupied(OPERATOR) if c in routing.homes}


def _share_current(job: Any) -> float:
    """The share of slices that have all the backups they should have; 1 without backups."""
    backups = job.status().backups
    return backups.slices_current / backups.slices_total if backups else 1.0


def _after_checkpoint(trace: Trace, seconds: float) -> None:
    """Wait for some seconds after the next checkpoint has become whole."""
    begin = time.monotonic()

    def latest() -> float | None:
        found = [e["at"] for e in trace.entries if e["what"] == "ManifestWritten" and e["at"] > begin]
        return found[-1] if found else None

    wait_for(lambda: latest() is not None, SETTLE_S_MAX, "a checkpoint is taken")
    wait_for(lambda: time.monotonic() >= (latest() or 0.0) + seconds, SETTLE_S_MAX)


# --- Structured Streaming -----------------------------------------------------------------------------------------


def structured_rocksdb(args: dict[str, Any]) -> Iterator[Figures]:
    """RocksDB with changelog checkpoints, and a partition of the state for each executor. Everything else is Spark's
    default.
    """
    work = Path(args["work"])
    feeder = Feeder(Path(args["pool"]), work / "in")
    feeder.load()
    spark = _structured_session(args)
    from pyspark.sql import functions as sql

    begun: list[tuple[float, int]] = []
    done: list[tuple[float, int]] = []

    def write(batch: Any, number: int) -> None:
        begun.append((time.monotonic(), number))
        batch.write.mode("overwrite").parquet(f"{work}/out/{number:06d}")
        done.append((time.monotonic(), number))

    rows = spark.readStream.schema(f"{KEY} string, amount bigint").option("maxFilesPerTrigger", BATCH_FILES)
    totals = rows.parquet(str(work / "in")).groupBy(KEY).agg(sql.count("*").alias(COUNT), sql.sum("amount").alias(SUM))
    writer = totals.writeStream.outputMode("update").foreachBatch(write)
    query = writer.option("checkpointLocation", str(work / "checkpoint")).start()
    query.processAllAvailable()
    state = query.lastProgress["stateOperators"][0]
    loaded = len(done)
    intake = Intake(query)
    feeder.taken = lambda: intake.rows() // FILE_ROWS
    feeder.start()
    rng = np.random.default_rng([7, args["seed"]])
    kills = []
    for count in args["kills"]:
        wait_for(lambda: len(executors()) == args["executors"], SETTLE_S_MAX, "all executors are back")
        _settle_structured(query, done, begun, feeder)
        alive = executors()
        victims = [alive[node] for node in rng.permutation(sorted(alive))[:count]]
        at = kill(victims)
        wait_for(partial(_batch_is_new, at, done, query), SETTLE_S_MAX * 2, "there is new output")
        kills.append({"kills": count, **structured_kill(at, list(done))})
        common.note(f"killed {count} of {sorted(alive)}: {kills[-1]}")
    feeder.stop()
    query.processAllAvailable()
    query.stop()
    times = [end - start for (start, _), (end, _) in zip(begun[loaded:], done[loaded:], strict=False)]
    yield {
        "kills": kills,
        "fed": feeder.fed,
        "state_bytes": int(state["memoryUsedBytes"]),
        "state_rows": int(state["numRowsTotal"]),
        "batch_ms_p50": common.rounded(statistics.median(times) * 1000) if times else None,
    }
    spark.stop()


def _structured_session(args: dict[str, Any]) -> Any:
    from pyspark.sql import SparkSession

    work = Path(args["work"])
    conf = {
        **_spark_settings(work),
        **common.ROCKSDB,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.sql.shuffle.partitions": str(args["executors"]),
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.streaming.numRecentProgressUpdates": "20",  # they are read twice a second
    }
    builder: Any = SparkSession.builder
    builder = builder.master(f"local-cluster[{args['executors']},1,{EXECUTOR_MB}]").appName("recovery")
    for key, value in conf.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


class Intake:
    """Rows of all batches since this was made, by the query's own record, which keeps the last few."""

    def __init__(self, query: Any) -> None:
        self.query = query
        self.seen = int(query.lastProgress["batchId"])
        self.total = 0

    def rows(self) -> int:
        for progress in self.query.recentProgress:
            if progress["batchId"] > self.seen and progress["numInputRows"]:
                self.seen = int(progress["batchId"])
                self.total += int(progress["numInputRows"])
        return self.total


def _settle_structured(
    query: Any, done: list[tuple[float, int]], begun: list[tuple[float, int]], feeder: Feeder
) -> None:
    """No files wait, and a batch has just begun, so that its tasks meet the loss."""
    first = len(done)
    wait_for(lambda: _alive(query) and len(done) >= first + 2, SETTLE_S_MAX, "two more batches are out")
    wait_for(lambda: _alive(query) and feeder.fed - feeder.taken() <= 3, SPREAD_S_MAX)
    last = len(begun)
    wait_for(lambda: _alive(query) and len(begun) > last, SETTLE_S_MAX, "a batch begins")


def _alive(query: Any) -> bool:
    if not query.isActive:
        raise EngineError(f"the query has ended: {query.exception()}", remedy="See the contender's log.")
    return True


def _batch_is_new(at: float, done: list[tuple[float, int]], query: Any) -> bool:
    try:
        structured_kill(at, list(done))
    except EngineError:
        return not _alive(query)
    return True


CONTENDERS: dict[str, common.Contender] = {PENSTOCK: penstock, STRUCTURED: structured_rocksdb}

if __name__ == "__main__":
    common.contender_main(MODULE)
