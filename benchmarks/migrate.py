"""How long output stops when state moves: live migration against stop and copy, and against offline repartition.

The job is a running count and sum over Parquet files on ``local-cluster[3,1,MB]``. A first phase loads distinct keys,
then a file arrives every half second. Under this load the stage is rescaled from three containers to one and back to
three, and each time two thirds of its state change hands. Then more keys are loaded, and so on, up to 2 GB that move.

The figure is the *delay* of an order: the longest time without output from the order until everything has moved and the
new owners have given output of their own. For a live move it is the slowest epoch of the migration, for the others it
is the pause. The contenders are:

``penstock``
    Slices move while the job runs.
``penstock_stop``
    The same engine and orders by stop and copy: finish what runs, take a checkpoint, let the new owners load it.
``structured_repartition``
    Structured Streaming's own way: stop the query, repartition its checkpoint offline, start it again.

No backups are kept. With backups less would have to be copied, and the figures would depend on a lucky placement.
"""

from __future__ import annotations

import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from benchmarks import common, recovery
from benchmarks.common import Figures, Row
from benchmarks.recovery import BYTES_PER_KEY, COUNT, KEY, OPERATOR, SUM, wait_for
from penstock.errors import EngineError

SUMMARY = "From the order to move state to the next output: live, stop and copy, and offline repartition."

MODULE = "benchmarks.migrate"
EXECUTORS = 3
EXECUTOR_MB = 1024
SLICES = 256
"""Slices of the stage, by the guide: a slice of the largest state, 3 GB, has about 12 MB."""
LOAD_ROWS = 250_000
FILE_ROWS = 12_500
FEED_S = 0.5
"""The usual time from one output to the next, as long as a contender keeps up."""
BEATS = 20
USUAL_S = 10.0
"""Seconds before an order in which the usual time between outputs is measured."""
SETTLE_S = 3.0
"""Seconds for which output must have come at its usual pace before an order."""
WATCH_S = 45.0
"""Seconds at each size in which nothing moves, to see how long output stops by itself."""
MOVE_S_MAX = 600.0
RUN_S_MAX = 1_800.0

PENSTOCK, STOP, STRUCTURED = "penstock", "penstock_stop", "structured_repartition"
RESTING = "penstock_at_rest"
"""Not a contender: what ``penstock`` shows when nothing is ordered."""
MANY, FEW = 3, 1
"""Containers of the stage, in turn."""

Output = tuple[float, int]
"""When an output was there, and the number of its epoch or batch."""
Order = tuple[str, Callable[[], None], int]
"""What is ordered, how, and how many containers own slices then."""


@dataclass(frozen=True)
class Phase:
    """State grows to this number of keys; then the orders go there and back this number of times."""

    keys: int
    turns: int = 1

    @property
    def moved_mb(self) -> int:
        return round(self.keys * BYTES_PER_KEY * (MANY - FEW) / MANY / 1e6)


def keys_of(moved_mb: int) -> int:
    """The keys of a state of which this many MB move."""
    return moved_mb * 1_000_000 * MANY // ((MANY - FEW) * BYTES_PER_KEY)


FEW_KEYS, MANY_KEYS = 300_000, 3_000_000
"""The sizes at which Structured Streaming takes part."""
PHASES = (Phase(FEW_KEYS), Phase(keys_of(50), 2), Phase(MANY_KEYS, 2), Phase(keys_of(600)), Phase(keys_of(2_000)))
STOP_PHASES = PHASES[1:4]
PEER_PHASES = (Phase(FEW_KEYS), Phase(MANY_KEYS))
QUICK = (Phase(FEW_KEYS), Phase(keys_of(50)))
SMALLEST_MB = 50
"""The size from which on the figures must be flat. Less state is over within an epoch or two, whatever one does."""


def run(quick: bool, out: Path | None) -> dict[str, Any]:
    """See README.md. Quick: 300,000 keys and 50 MB; Structured Streaming at 300,000 keys."""
    plans: dict[str, Sequence[Phase]] = {PENSTOCK: PHASES, STOP: STOP_PHASES, STRUCTURED: PEER_PHASES}
    if quick:
        plans = {PENSTOCK: QUICK, STOP: QUICK, STRUCTURED: QUICK[:1]}
    rows: list[Row] = []
    traces: list[dict[str, Any]] = []
    for contender, phases in plans.items():
        with common.workplace() as place:
            write_phases(place / "pool", phases)
            found, events = measure(contender, phases, place)
            rows += found
            traces += events
    notes = [
        "delay_s: the longest time without output from the order until all has moved and the new owners have given "
        "output; for Structured Streaming, until the restarted query has.",
        "delay_epochs: delay_s by the usual time from one output to the next before the order.",
        f"at_rest_epochs_max: the longest time without output in {WATCH_S:.0f} s at each size while nothing moves. A "
        "move takes up to minutes, so it meets more of what the machine does by itself.",
        "stolen_s: the part of the longest time without output that the machine's host took from each core for others. "
        "unstolen_s: the longest time without output when that part is left out.",
        "to_next_output_s: from the order to the very next output. served_s: to the first output after the last slice "
        "has changed hands. done_s: until nothing of the move is left, which takes one more checkpoint.",
        f"moved_mb: MB of the state in memory that moved. Penstock has the state in {SLICES} slices.",
        f"A file of {FILE_ROWS:,} rows comes every {FEED_S} s.",
        f"largest_vs_smallest: the largest median of delay_s by size / the smallest, from {SMALLEST_MB} MB on.",
        "In every run the final count and sum of every key were compared with the truth, and no output came twice.",
    ]

    def draw(path: Path) -> None:
        from penstock.observe.plot import plot_bars

        sized = [
            {**row, "size": f"{row['keys'] / 1e6:.3g} M keys"} for row in sorted(rows, key=lambda row: int(row["keys"]))
        ]
        bars = common.medians(sized, "delay_s", group="size")
        plot_bars(bars, path, "Longest time without output while two thirds of the state move", "seconds")

    return common.finish("migrate", rows, ratios(rows), notes, out, draw, traces=traces)


def measure(contender: str, phases: Sequence[Phase], place: Path) -> tuple[list[Row], list[dict[str, Any]]]:
    """All orders of one run with verified output. A run of Penstock also gives what happened meanwhile."""
    figures = run_phases(MODULE, contender, phases, place)
    rows = order_rows(contender, figures)
    kept = ("contender", "keys", "order")
    traces = zip(rows, figures.get("traces", ()), strict=False)
    return rows, [{**{k: row[k] for k in kept}, "events": events} for row, events in traces]


def run_phases(module: str, contender: str, phases: Sequence[Phase], place: Path) -> Figures:
    """A contender's figures, once its output was found exact."""
    work = place / "work"
    args = {"phases": [[p.keys, p.turns] for p in phases], "pool": str(place / "pool"), "work": str(work)}
    common.note(f"{contender}: " + ", ".join(f"{p.keys:,} keys" for p in phases))
    figures = common.run_contender(module, contender, args, work, seconds_max=RUN_S_MAX)
    check_totals(work / "out", truth_of_phases(place / "pool", figures["fed"]), contender)
    shutil.rmtree(work, ignore_errors=True)
    return figures


def order_rows(contender: str, figures: Figures) -> list[Row]:
    """A row for each order."""
    rows = [
        {"contender": name, "round": 1, **order, "memory_mb": figures["memory_mb"]}
        for name, orders in ((contender, figures["orders"]), (RESTING, figures.get("rests", ())))
        for order in orders
    ]
    for row in rows:
        common.note(", ".join(f"{k} {v}" for k, v in row.items() if v is not None))
    return rows


# --- figures ------------------------------------------------------------------------------------------------------


def silence_s(begin: float, outputs: Sequence[Output], until: float) -> float:
    """The longest time without output from ``begin`` to ``until``."""
    times = [begin, *(at for at, _ in outputs if begin < at <= until)]
    return max((b - a for a, b in pairwise(times)), default=until - begin)


def stolen_s(begin: float, outputs: Sequence[Output], until: float, stolen: Mapping[int, float]) -> float | None:
    """What the host took of each core in the longest time without output. ``stolen``: epoch -> seconds in all up to its
    output. None: the machine does not tell.
    """
    gaps = [(b[0] - a[0], a[1], b[1]) for a, b in pairwise(outputs) if b[0] > begin and b[0] <= until]
    if not gaps:
        return None
    _, first, last = max(gaps)
    return round(stolen[last] - stolen[first], 3) if first in stolen and last in stolen else None


def unstolen_s(begin: float, outputs: Sequence[Output], until: float, stolen: Mapping[int, float]) -> float | None:
    """The longest time without output, less what the host took of each core in it. None: the machine does not tell."""
    gaps = [
        b[0] - max(begin, a[0]) - (stolen[b[1]] - stolen[a[1]])
        for a, b in pairwise(outputs)
        if begin < b[0] <= until and a[1] in stolen and b[1] in stolen
    ]
    return round(max(gaps), 3) if gaps else None


def usual_gap_s(at: float, outputs: Sequence[Output], span_s: float = USUAL_S) -> float:
    """The median time from one output to the next in the last seconds before ``at``."""
    times = [t for t, _ in outputs if at - span_s <= t <= at]
    if len(times) < 3:
        raise EngineError("there is hardly any output before an order", remedy="Look at the contender's log.")
    return statistics.median(b - a for a, b in pairwise(times))


def order_figures(
    at: float, outputs: Sequence[Output], owners: Mapping[int, Sequence[int]], done: float | None = None
) -> Figures:
    """The figures of one order at ``at``, when everything has moved.

    ``owners``: epoch -> the owner of each slice in it. ``done``: when nothing of the move was left.
    """
    before = [epoch for t, epoch in outputs if t <= at]
    after = [(t, epoch) for t, epoch in outputs if t > at]
    if not before or not after:
        raise EngineError("no output came after an order", remedy="Look at the contender's log.")
    old, new = owners[before[-1]], owners[after[-1][1]]
    moved = sum(a != b for a, b in zip(old, new, strict=True))
    if not moved:
        raise EngineError("an order moved nothing", remedy="Look at the contender's log.")
    served = next(t for t, epoch in after if owners[epoch] == new)
    until = max(served, done or served)
    delay, usual = silence_s(at, after, until), usual_gap_s(at, outputs)
    return {
        "delay_s": round(delay, 3),
        "delay_epochs": round(delay / usual, 2),
        "usual_gap_s": round(usual, 3),
        "to_next_output_s": round(after[0][0] - at, 3),
        "served_s": round(served - at, 3),
        "done_s": None if done is None else round(done - at, 3),
        "moved_slices": moved,
    }


def restart_figures(at: float, outputs: Sequence[Output], restarted: float) -> Figures:
    """The figures of an order for a query that stops and starts again. ``restarted`` is when the start was ordered."""
    served = next((t for t, _ in outputs if t > restarted), None)
    if served is None:
        raise EngineError("no output came after the restart", remedy="Look at the contender's log.")
    delay, usual = silence_s(at, outputs, served), usual_gap_s(at, outputs)
    return {
        "delay_s": round(delay, 3),
        "delay_epochs": round(delay / usual, 2),
        "usual_gap_s": round(usual, 3),
        "served_s": round(served - at, 3),
        "done_s": round(served - at, 3),
    }


def rest_figures(at: float, outputs: Sequence[Output], until: float, stolen: Mapping[int, float]) -> Figures:
    """The figures of a time in which nothing moves."""
    delay, usual = silence_s(at, outputs, until), usual_gap_s(at, outputs)
    return {
        "order": "none",
        "delay_s": round(delay, 3),
        "delay_epochs": round(delay / usual, 2),
        "usual_gap_s": round(usual, 3),
        "stolen_s": stolen_s(at, outputs, until, stolen),
        "unstolen_s": unstolen_s(at, outputs, until, stolen),
    }


def _by_size(rows: Sequence[Row], contender: str, figure: str = "delay_s") -> dict[int, float]:
    """keys -> median over the orders at that size"""
    found: dict[int, list[float]] = {}
    for row in rows:
        if row["contender"] == contender and row.get(figure) is not None:
            found.setdefault(int(row["keys"]), []).append(float(row[figure]))
    return {keys: statistics.median(values) for keys, values in sorted(found.items())}


def _spread(by_size: Mapping[int, float]) -> float | None:
    """The largest median by the smallest, for the sizes whose figures must be flat."""
    counted = [value for keys, value in by_size.items() if Phase(keys).moved_mb >= SMALLEST_MB]
    return common.rounded(max(counted) / min(counted)) if counted else None


def ratios(rows: Sequence[Row]) -> dict[str, float | None]:
    """Largest by smallest, of medians by size. A quick run has fewer keys, so it compares at the sizes it has."""
    ours, stop, theirs = (_by_size(rows, name) for name in (PENSTOCK, STOP, STRUCTURED))
    found: dict[str, float | None] = {}
    shared = sorted(set(ours) & set(theirs))
    headline = MANY_KEYS if MANY_KEYS in shared else shared[-1] if shared else None
    if headline is not None:
        found["vs_offline_repartition"] = common.rounded(theirs[headline] / ours[headline])
    for keys in shared:
        found[f"vs_offline_repartition_{_short(keys)}"] = common.rounded(theirs[keys] / ours[keys])
        found[f"offline_repartition_s_{_short(keys)}"] = common.rounded(theirs[keys])
    found["largest_vs_smallest"] = _spread(ours)
    next_output = _by_size(rows, PENSTOCK, "to_next_output_s")
    found["next_output_largest_vs_smallest"] = _spread(next_output)
    found["stop_largest_vs_smallest"] = _spread(stop)
    epochs = [float(row["delay_epochs"]) for row in rows if row["contender"] == PENSTOCK]
    found["delay_epochs_p50"] = common.rounded(statistics.median(epochs)) if epochs else None
    found["delay_epochs_max"] = common.rounded(max(epochs)) if epochs else None
    told = [row for row in rows if row["contender"] == PENSTOCK and row.get("unstolen_s") is not None]
    unstolen = [float(row["unstolen_s"]) / float(row["usual_gap_s"]) for row in told]
    found["unstolen_epochs_max"] = common.rounded(max(unstolen)) if unstolen else None
    found["unstolen_largest_vs_smallest"] = _spread(_by_size(rows, PENSTOCK, "unstolen_s"))
    resting = [float(row["delay_epochs"]) for row in rows if row["contender"] == RESTING]
    found["at_rest_epochs_max"] = common.rounded(max(resting)) if resting else None
    for keys, value in ours.items():
        found[f"delay_s_{Phase(keys).moved_mb}mb"] = common.rounded(value)
        if keys in stop:
            found[f"stop_delay_s_{Phase(keys).moved_mb}mb"] = common.rounded(stop[keys])
            found[f"vs_stop_{Phase(keys).moved_mb}mb"] = common.rounded(stop[keys] / value)
    if len(stop) > 1:
        moved_gb = [keys * BYTES_PER_KEY * (MANY - FEW) / MANY / 1e9 for keys in stop]
        slope, r2 = common.line(moved_gb, list(stop.values()))
        found["stop_s_per_gb"], found["stop_linear_r2"] = common.rounded(slope), common.rounded(r2)
    return found


def _short(keys: int) -> str:
    return f"{keys // 1_000_000}m" if keys % 1_000_000 == 0 else f"{keys // 1_000}k"


# --- input and truth ----------------------------------------------------------------------------------------------


def write_phases(pool: Path, phases: Sequence[Phase], *, beats: int = BEATS, seed: int = 5) -> None:
    """A directory for each phase. ``load-*`` has its new keys, and ``beat-*`` random keys of all so far."""
    total = phases[-1].keys
    common.note(f"writing {total:,} keys")
    rng = np.random.default_rng(seed)
    order = rng.permutation(total)
    before = 0
    for number, phase in enumerate(phases):
        folder = pool / str(number)
        folder.mkdir(parents=True)
        for part, first in enumerate(range(before, phase.keys, LOAD_ROWS)):
            recovery._write(order[first : min(first + LOAD_ROWS, phase.keys)], rng, folder / f"load-{part:05d}.parquet")
        for part in range(beats):
            chosen = order[rng.integers(0, phase.keys, FILE_ROWS)]
            recovery._write(chosen, rng, folder / f"beat-{part:05d}.parquet")
        before = phase.keys


@dataclass(frozen=True)
class Totals:
    """Count and sum of every key, by its number. Tens of millions of keys as text would take minutes to compare."""

    counts: np.ndarray[Any, Any]
    sums: np.ndarray[Any, Any]


def key_numbers(keys: pl.Series) -> np.ndarray[Any, Any]:
    """The number in ``user-0000000042``, or -1 for what is no key of ours."""
    numbers = keys.str.strip_prefix("user-").cast(pl.Int64, strict=False)
    same = ("user-" + numbers.cast(pl.String).str.zfill(10)).eq_missing(keys)
    return numbers.fill_null(-1).to_numpy() if same.all() else np.where(same, numbers.fill_null(-1), -1)


def truth_of_phases(pool: Path, fed: Sequence[int]) -> Totals:
    """The true counts and sums after the phases, with this number of files of ``beat-*``, taken in turn, in each."""
    parts: list[tuple[Path, int]] = []
    for number, count in enumerate(fed):
        beats = sorted((pool / str(number)).glob("beat-*.parquet"))
        turns, rest = divmod(count, len(beats))
        parts += [(path, 1) for path in sorted((pool / str(number)).glob("load-*.parquet"))]
        parts += [(path, turns + (n < rest)) for n, path in enumerate(beats)]
    counts, sums = np.zeros(0, np.int64), np.zeros(0, np.int64)
    for path, times in parts:
        frame = pl.read_parquet(path)
        keys, amounts = key_numbers(frame[KEY]), frame["amount"].to_numpy()
        if (size := int(keys.max(initial=-1)) + 1) > counts.size:
            counts, sums = (np.concatenate([x, np.zeros(size - x.size, np.int64)]) for x in (counts, sums))
        np.add.at(counts, keys, times)
        np.add.at(sums, keys, amounts * times)
    return Totals(counts, sums)


def check_totals(out: Path, truth: Totals, contender: str) -> None:
    """Check what a reader of the output sees: no count of a key twice, and the last one of every key is right."""
    rows = pl.read_parquet(out / "**" / "*.parquet", hive_partitioning=False).select(KEY, COUNT, SUM)
    keys, counts, sums = key_numbers(rows[KEY]), rows[COUNT].to_numpy(), rows[SUM].to_numpy()
    del rows
    order = np.lexsort((counts, keys))
    keys, counts, sums = keys[order], counts[order], sums[order]
    twice = int(np.count_nonzero((keys[1:] == keys[:-1]) & (counts[1:] == counts[:-1])))
    # A count only grows, so the last row of a key has the greatest count.
    last = np.append(keys[1:] != keys[:-1], True) if keys.size else np.zeros(0, np.bool_)
    keys, counts, sums = keys[last], counts[last], sums[last]
    strange = int(np.count_nonzero((keys < 0) | (keys >= truth.counts.size)))
    found = Totals(np.zeros_like(truth.counts), np.zeros_like(truth.sums))
    if not strange:
        found.counts[keys], found.sums[keys] = counts, sums
    wrong = np.flatnonzero((found.counts != truth.counts) | (found.sums != truth.sums))
    if twice or strange or wrong.size:
        raise EngineError(
            f"contender '{contender}' is not exact: {twice:,} rows came twice, {strange:,} keys were never fed, "
            f"{wrong.size:,} of {truth.counts.size:,} keys are wrong, such as {wrong[:3].tolist()}.",
            remedy="Its figures were thrown away. Please report this.",
            contender=contender,
        )


class Feeder(recovery.Feeder):
    """Puts a file in place every ``FEED_S``, at this benchmark's own pace. It can be told to wait."""

    def __init__(self, pool: Path, into: Path) -> None:
        super().__init__(pool, into)
        self.held = False

    def run(self) -> None:
        due = time.monotonic()
        while not self._over.wait(max(0.0, due - time.monotonic())):
            due = max(due + FEED_S, time.monotonic())
            if not self.held and self.fed - self.taken() < recovery.AHEAD_FILES:
                os.link(self.beats[self.fed % len(self.beats)], self.into / f"z-{self.fed:06d}.parquet")
                self.fed += 1


def wait_for_output(outputs: Callable[[], Sequence[Output]], check: Callable[[], object] = lambda: None) -> None:
    """Return right after an output, so that every order meets the same moment of an epoch."""
    last = outputs()[-1][1]

    def newer() -> bool:
        check()
        return outputs()[-1][1] > last

    wait_for(newer, recovery.SETTLE_S_MAX, "there is output")


# --- Penstock -----------------------------------------------------------------------------------------------------


class Recorder(recovery.Trace):
    """Also records when each epoch's output was there, and who owned its slices."""

    def __init__(self, runtime: Any, stage: str = OPERATOR) -> None:
        self.runtime, self.stage = runtime, stage
        self.outputs: list[Output] = []
        self.owners: dict[int, tuple[int, ...]] = {}
        self.rows: dict[int, int] = {}
        """epoch -> rows of input"""
        self.stolen: dict[int, float] = {}
        """epoch -> seconds that the host had taken of each core in all"""
        super().__init__(runtime)

    def event(self, event: Any) -> None:
        if type(event).__name__ == "EpochPublished":
            run = self.runtime.controller.epochs.in_flight.get(event.epoch)
            reports = [r for name in self.runtime.plan.sources for r in run.done.get(name, ())] if run else []
            rows = sum(report.rows_in for report in reports)
            # While slices move, epochs also run without input. They are no output, and would hide a pause.
            if rows and event.epoch > (self.outputs[-1][1] if self.outputs else 0):
                self.rows[event.epoch] = rows
                self.outputs.append((event.now, event.epoch))
                if (stolen := common.stolen_s()) is not None:
                    self.stolen[event.epoch] = stolen
        super().event(event)

    def command(self, command: Any) -> None:
        if type(command).__name__ == "RunStage" and command.stage == self.stage:
            self.owners[command.epoch] = tuple(self.runtime.controller.routings[command.routing].owners[self.stage])
        super().command(command)

    def served_by(self, count: int, before: Sequence[int]) -> bool:
        """The newest output is that of the right number of owners, and the owners are the new ones."""
        owners = self.owners.get(self.outputs[-1][1], ())
        final = tuple(self.runtime.controller.routes.table.owners[self.stage])
        return len(set(owners)) == count and owners == final != tuple(before)


def start_totals(args: Mapping[str, Any], *, stop_and_copy: bool = False, **settings: Any) -> tuple[Any, Recorder]:
    """The running count and sum over ``in/*/*.parquet``, started and recorded."""
    import penstock as ps
    from benchmarks.baselines import StopAndCopy
    from penstock.control.controller import Controller
    from penstock.engines.job import start

    work = Path(args["work"])
    (work / "in").mkdir(parents=True)
    flow = ps.Flow("totals")
    schema = {KEY: str, "amount": int}
    source = flow.source("in", ps.files(f"{work}/in/*/*.parquet", follow=True, schema=schema))
    totals = source.key_by(KEY).aggregate(OPERATOR, **{COUNT: ps.count(), SUM: ps.sum("amount")})
    totals.sink("out", ps.parquet(str(work / "out"), durable=False))
    spark = {
        "spark.driver.memory": common.DRIVER_MEMORY,
        "spark.executor.memory": f"{EXECUTOR_MB}m",
        "spark.local.dir": str(work / "spark"),
    }
    config = ps.Config(checkpoint=str(work / "checkpoint"), control=False, spark=spark, **settings)
    controller = StopAndCopy if stop_and_copy else Controller
    job = start(flow, engine="spark", config=config, make_controller=controller)
    wait_for(lambda: job.status().phase in ("running", "failed"), recovery.SETTLE_S_MAX, "the job runs")
    return job, Recorder(job._runtime)


def alive(job: Any) -> bool:
    """The condition, or the error that ended the job."""
    return recovery._watch(job, lambda: True)()


def begin_phase(job: Any, pool: Path, into: Path, rows_before: int, load: int) -> Feeder:
    """Load the keys that are new, wait until they are in, then feed."""
    feeder = Feeder(pool, into)
    feeder.load()
    wait_for(lambda: alive(job) and job.status().rows >= rows_before + load, RUN_S_MAX, "the state is loaded")
    feeder.taken = lambda: (job.status().rows - rows_before - load) // FILE_ROWS
    feeder.start()
    return feeder


def end_phase(job: Any, feeder: Feeder, rows_before: int, load: int) -> int:
    """Wait until there is no more input and all of it is out. Give the rows so far."""
    feeder.stop()
    rows = rows_before + load + feeder.fed * FILE_ROWS
    wait_for(lambda: alive(job) and job.status().rows >= rows, recovery.SETTLE_S_MAX * 4, "all input is published")
    return rows


def settle(job: Any, recorder: Recorder, feeder: Feeder, rest_s: float) -> None:
    """Nothing moves, nothing has piled up, and a checkpoint has what was loaded, for long enough to be usual."""
    wait_for(lambda: alive(job) and not job.status().moves, MOVE_S_MAX, "nothing moves")
    wait_for(lambda: alive(job) and feeder.fed - feeder.taken() <= 2, recovery.SETTLE_S_MAX)
    first = job.status().checkpoints
    wait_for(lambda: alive(job) and job.status().checkpoints >= first + 2, MOVE_S_MAX, "checkpoints are taken")
    begin = time.monotonic()
    wait_for(lambda: alive(job) and time.monotonic() - begin >= rest_s, MOVE_S_MAX)
    wait_for_output(lambda: recorder.outputs, partial(alive, job))


def carry_out(
    job: Any, recorder: Recorder, order: Callable[[], None], what: str, owners: int
) -> tuple[Figures, list[str]]:
    """Order it, and wait until the right number of containers own slices and nothing moves any more. Give the figures,
    and what happened until the new owners had served.
    """
    state, before = job.status(), recorder.owners[recorder.outputs[-1][1]]
    at = time.monotonic()
    order()
    wait_for(
        lambda: alive(job) and recorder.served_by(owners, before) and not job.status().moves,
        MOVE_S_MAX,
        f"{owners} containers give output",
    )
    done = time.monotonic()
    wait_for_output(lambda: recorder.outputs, partial(alive, job))
    figures = order_figures(at, list(recorder.outputs), dict(recorder.owners), done)
    until = at + max(figures["served_s"], figures["done_s"])
    outputs, stolen = list(recorder.outputs), dict(recorder.stolen)
    figures["stolen_s"] = stolen_s(at, outputs, until, stolen)
    figures["unstolen_s"] = unstolen_s(at, outputs, until, stolen)
    figures["moved_mb"] = round(state.state_bytes * figures["moved_slices"] / state.slices / 1e6, 1)
    limit = at + figures["served_s"] + 1.0
    events = [recovery.told(e, at) for e in list(recorder.entries) if at - 1.0 < e["at"] <= limit]
    return {"order": what, "state_mb": round(state.state_bytes / 1e6, 1), **figures}, events[:400]


def watch(job: Any, recorder: Recorder, seconds: float) -> Figures:
    """Give the figures of some seconds in which nothing is ordered."""
    at = time.monotonic()
    wait_for(lambda: alive(job) and time.monotonic() - at >= seconds, MOVE_S_MAX)
    return rest_figures(at, list(recorder.outputs), time.monotonic(), dict(recorder.stolen))


def go_through(
    job: Any,
    recorder: Recorder,
    args: Mapping[str, Any],
    orders: Sequence[Order],
    *,
    rest_s: float = SETTLE_S,
    rest_after: bool = False,
    watch_s: float = 0.0,
) -> Figures:
    """Run all phases: load, feed, and give each order in turn, each after some seconds at rest. With ``rest_after``
    there is also a rest after the last order. With ``watch_s`` nothing is ordered for this time before the first order.
    """
    work, pool = Path(args["work"]), Path(args["pool"])
    found: list[Figures] = []
    rests: list[Figures] = []
    began: list[float] = []
    traces: list[list[str]] = []
    fed: list[int] = []
    rows = keys_before = 0
    for number, (keys, turns) in enumerate(args["phases"]):
        load = keys - keys_before
        begin = time.monotonic()
        feeder = begin_phase(job, pool / str(number), work / "in" / str(number), rows, load)
        common.note(f"{load:,} more keys took {time.monotonic() - begin:.1f} s")
        if watch_s:
            settle(job, recorder, feeder, rest_s)
            rests.append({"keys": keys, **watch(job, recorder, watch_s)})
            common.note(str(rests[-1]))
        for what, order, owners in tuple(orders) * turns:
            settle(job, recorder, feeder, rest_s)
            began.append(time.monotonic())
            figures, events = carry_out(job, recorder, order, what, owners)
            found.append({"keys": keys, **figures})
            traces.append(events)
            common.note(str(found[-1]))
        if rest_after:
            settle(job, recorder, feeder, rest_s)
        rested = time.monotonic()
        rows = end_phase(job, feeder, rows, load)
        fed.append(feeder.fed)
        keys_before = keys
    return {"orders": found, "rests": rests, "began": began, "rested": rested, "traces": traces, "fed": fed}


def penstock(args: dict[str, Any], stop_and_copy: bool = False) -> Iterator[Figures]:
    job, recorder = start_totals(
        args,
        master=f"local-cluster[{EXECUTORS},1,{EXECUTOR_MB}]",
        instances=MANY,
        epoch_rows=LOAD_ROWS,
        slices=SLICES,
        backups=0,
        stop_and_copy=stop_and_copy,
    )
    orders = [(f"to {n}", partial(job.rescale, OPERATOR, n), n) for n in (FEW, MANY)]
    figures = go_through(job, recorder, args, orders, watch_s=0.0 if stop_and_copy else WATCH_S)
    job.stop()
    yield figures


def penstock_stop(args: dict[str, Any]) -> Iterator[Figures]:
    return penstock(args, stop_and_copy=True)


# --- Structured Streaming -----------------------------------------------------------------------------------------


class Query:
    """A query that can be stopped, repartitioned and started again. RocksDB with changelog checkpoints."""

    def __init__(self, args: Mapping[str, Any]) -> None:
        self.work = Path(args["work"])
        self.checkpoint = str(self.work / "checkpoint")
        self.spark = recovery._structured_session({"work": args["work"], "executors": EXECUTORS})
        self.outputs: list[Output] = []
        self.query: Any = None
        self._seen, self._rows = -1, 0
        self._counting = threading.Lock()

    def start(self) -> None:
        from pyspark.sql import functions as sql

        source = self.spark.readStream.schema(f"{KEY} string, amount bigint")
        rows = source.option("maxFilesPerTrigger", recovery.BATCH_FILES).parquet(str(self.work / "in" / "*"))
        totals = rows.groupBy(KEY).agg(sql.count("*").alias(COUNT), sql.sum("amount").alias(SUM))
        writer = totals.writeStream.outputMode("update").foreachBatch(self._write)
        self.query = writer.option("checkpointLocation", self.checkpoint).start()

    def _write(self, batch: Any, number: int) -> None:
        batch.write.mode("overwrite").parquet(f"{self.work}/out/{number:06d}")
        self.outputs.append((time.monotonic(), number))

    def alive(self) -> bool:
        return recovery._alive(self.query)

    def rows(self) -> int:
        """Rows of all batches so far, by its own record, which keeps the last few and begins anew at a start."""
        with self._counting:
            for progress in self.query.recentProgress:
                if progress["batchId"] > self._seen:
                    self._seen = int(progress["batchId"])
                    self._rows += int(progress["numInputRows"])
            return self._rows

    def repartition(self, partitions: int, feeder: Feeder) -> Figures:
        """Stop, repartition, and start until there is output. A batch that is cut off cannot be repartitioned, so input
        is held back until the query has none left, and comes again as soon as it has stopped.
        """
        at = time.monotonic()
        feeder.held = True
        self.query.processAllAvailable()
        self.rows()
        self.query.stop()
        feeder.held = False
        stopped = time.monotonic()
        self.spark._streamingCheckpointManager.repartition(self.checkpoint, partitions)
        ready = time.monotonic()
        self.start()
        count = len(self.outputs)
        wait_for(lambda: self.alive() and len(self.outputs) > count, MOVE_S_MAX, "the restarted query gives output")
        parts = {
            "stop_s": round(stopped - at, 3),
            "repartition_s": round(ready - stopped, 3),
            "start_s": round(self.outputs[count][0] - ready, 3),
        }
        return {"order": f"to {partitions}", **restart_figures(at, list(self.outputs), ready), **parts}


def structured_repartition(args: dict[str, Any]) -> Iterator[Figures]:
    """Go from as many partitions of the state as executors to twice as many, and back."""
    work = Path(args["work"])
    (work / "in").mkdir(parents=True)
    query = Query(args)
    orders: list[Figures] = []
    fed: list[int] = []
    for number, (keys, turns) in enumerate(args["phases"]):
        feeder = Feeder(Path(args["pool"]) / str(number), work / "in" / str(number))
        feeder.load()
        if query.query is None:
            query.start()
        query.query.processAllAvailable()
        common.note(f"{query.query.lastProgress['stateOperators'][0]['numRowsTotal']:,} keys are loaded")
        feeder.taken = partial(_files_taken, query, query.rows())
        feeder.start()
        for partitions in (2 * EXECUTORS, EXECUTORS) * turns:
            _settle_query(query, feeder)
            figures = query.repartition(partitions, feeder)
            moved = round(keys * BYTES_PER_KEY / 1e6, 1)
            orders.append({"keys": keys, "moved_mb": moved, "state_mb": moved, **figures})
            common.note(str(orders[-1]))
        feeder.stop()
        query.query.processAllAvailable()
        fed.append(feeder.fed)
    query.query.stop()
    yield {"orders": orders, "fed": fed}
    query.spark.stop()


def _files_taken(query: Query, rows_before: int) -> int:
    return (query.rows() - rows_before) // FILE_ROWS


def _settle_query(query: Query, feeder: Feeder) -> None:
    """Nothing waits as input, and batches have come at their usual pace."""
    wait_for(lambda: query.alive() and feeder.fed - feeder.taken() <= 3, recovery.SETTLE_S_MAX)
    first = len(query.outputs)
    wait_for(lambda: query.alive() and len(query.outputs) >= first + 6, MOVE_S_MAX, "batches are out")
    wait_for_output(lambda: query.outputs, query.alive)


CONTENDERS: dict[str, common.Contender] = {
    PENSTOCK: penstock,
    STOP: penstock_stop,
    STRUCTURED: structured_repartition,
}

if __name__ == "__main__":
    common.contender_main(MODULE)
