"""The load rises to four times its rate and falls again: does the number of instances follow, and what is the latency?

After figure 17 of TimeStream: 10,000 events a second, 40,000 for a while, 10,000 again. Each event costs some Python
work and a wait, as for an answer from elsewhere. At first one instance spends a quarter of its time waiting, so at high
water one instance would have no time left. (It is a wait and not a computation: four instances that compute all the
time would need four cores. The benchmark is about how a job is spread, not how a machine is shared.) A policy
(``safe-rate``) watches the job and rescales it; nobody else does. Beside it runs the same job with one instance and no
policy.

The latency of a file is the time from when it appeared until the output of all its rows was committed. Each file
counts, also the files that wait while the job is too small. A file is there at its time whatever the job does: a job
that falls behind gets no less.
"""

from __future__ import annotations

import os
import shutil
import statistics
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import polars as pl

import penstock as ps
from benchmarks import common, recovery
from benchmarks.common import Figures, Row
from benchmarks.migrate import Output, Recorder, alive
from benchmarks.recovery import COUNT, KEY, SUM, wait_for

SUMMARY = "Load times four and back: instances follow by themselves; latency of every file, with and without a policy."

MODULE = "benchmarks.tide"
OPERATOR = "scored"
EXECUTORS = 4
EXECUTOR_MB = 768
ROWS_S = 10_000
"""Events a second at low water, as in the paper."""
FACTOR = 4
TICK_S = 0.25
KEYS = 20_000
POOL_FILES = 40
BUSY_LOW = 0.25
"""The share of its time that one instance waits for answers at low water."""
WAIT_S_MIN = 0.002
"""Seconds that are saved up before a wait: the waits of single events are too short to be kept."""
SPIKE_S = 30.0
"""Seconds after a change of the load in which a spike counts as its doing."""
RUN_S_MAX = 1_200.0

POLICY, FIXED = "penstock", "penstock_fixed"
LOW, HIGH, EBB = "low", "high", "low again"


@dataclass(frozen=True)
class Tide:
    """Seconds of each part, and of the policy's cool-down."""

    low_s: float = 40.0
    high_s: float = 120.0
    ebb_s: float = 100.0
    cool_down_s: float = 8.0

    def part(self, at_s: float) -> str:
        return LOW if at_s < self.low_s else HIGH if at_s < self.low_s + self.high_s else EBB

    @property
    def turns_s(self) -> tuple[float, float]:
        return self.low_s, self.low_s + self.high_s

    @property
    def seconds(self) -> float:
        return self.low_s + self.high_s + self.ebb_s


FULL = Tide()
QUICK = Tide(12.0, 25.0, 30.0, 4.0)


@dataclass(frozen=True)
class File:
    """One file of input: when it appeared, in seconds since the first, and its rows."""

    at_s: float
    rows: int


def run(quick: bool, out: Path | None) -> dict[str, Any]:
    """See README.md. Quick: a minute, and only the job with the policy."""
    tide = QUICK if quick else FULL
    rows: list[Row] = []
    series: dict[str, dict[str, Any]] = {}
    with common.workplace() as place:
        write_pool(place / "pool")
        for contender in (POLICY,) if quick else (POLICY, FIXED):
            work = place / "work"
            args = {"tide": asdict(tide), "pool": str(place / "pool"), "work": str(work)}
            figures = common.run_contender(MODULE, contender, args, work, seconds_max=RUN_S_MAX)
            recovery.check_output(work / "out", truth_of(place / "pool", figures["fed"]), contender)
            shutil.rmtree(work, ignore_errors=True)
            files = [File(*entry) for entry in figures["files"]]
            outputs = [(float(at), int(epoch)) for at, epoch in figures["outputs"]]
            latencies = file_latencies(files, outputs, {int(e): n for e, n in figures["rows"].items()})
            instances = [(float(at), int(n)) for at, n in figures["instances"]]
            more = {"recoveries": figures["recoveries"], "memory_mb": figures["memory_mb"]}
            rows += [{**row, **more} for row in part_rows(contender, tide, files, latencies, instances)]
            series[contender] = by_second(files, latencies, instances)
            series[contender]["decisions"] = figures["decisions"]
            for row in rows[-3:]:
                common.note(", ".join(f"{k} {v}" for k, v in row.items() if v is not None))
    notes = [
        "latency: from when a file appeared until the output of all its rows was committed; over files.",
        f"spike_ms: the greatest latency of files that appeared up to {SPIKE_S:g} s after the load changed.",
        "followed_s: from the change of the load until another number of containers gave output.",
        "rows_s: what came in. instances: containers of the stage that own slices, at the end of each part.",
        "In every run the final count and sum of every key were compared with the truth, and no output came twice.",
    ]

    def draw(path: Path) -> None:
        from penstock.observe.plot import Panel, plot_series

        offered = {"offered": series[POLICY]["rows_s"]}
        panels = [
            Panel("rows a second", offered),
            Panel("latency, ms", {name: found["latency_ms"] for name, found in series.items()}),
            Panel("instances", {name: found["instances"] for name, found in series.items()}, steps=True),
        ]
        marks = list(zip(tide.turns_s, (f"load x {FACTOR}", "and back"), strict=True))
        plot_series(panels, path, "The number of instances follows the load", marks)

    return common.finish("tide", rows, ratios(rows), notes, out, draw, series=series)


# --- figures ------------------------------------------------------------------------------------------------------


def file_latencies(files: Sequence[File], outputs: Sequence[Output], rows: Mapping[int, int]) -> list[float]:
    """Latencies in ms, one for each file, in order. Files are read in order, so a file is out with the epoch by which
    all rows up to the file's end are out.
    """
    done = list(accumulate(rows.get(epoch, 0) for _, epoch in outputs))
    due = accumulate(file.rows for file in files)
    found = []
    for file, end in zip(files, due, strict=True):
        index = bisect_left(done, end)
        assert index < len(done), f"{end:,} rows came, {done[-1] if done else 0:,} are out"
        found.append(round((outputs[index][0] - file.at_s) * 1000, 1))
    return found


def part_rows(
    contender: str,
    tide: Tide,
    files: Sequence[File],
    latencies: Sequence[float],
    instances: Sequence[tuple[float, int]],
) -> list[Row]:
    """One row for low water, one for high water, and one for low water again."""
    rows: list[Row] = []
    begins = dict(zip((LOW, HIGH, EBB), (0.0, *tide.turns_s), strict=True))
    ends = dict(zip((LOW, HIGH, EBB), (*tide.turns_s, tide.seconds), strict=True))
    for part, begin in begins.items():
        mine = [(f, ms) for f, ms in zip(files, latencies, strict=True) if tide.part(f.at_s) == part]
        times = [ms for _, ms in mine]
        spikes = [ms for f, ms in mine if f.at_s < begin + SPIKE_S]
        before = _instances_at(instances, begin)
        changed = next((at for at, n in instances if at > begin and n != before), None)
        rows.append(
            {
                "contender": contender,
                "round": 1,
                "part": part,
                "rows_s": round(sum(f.rows for f, _ in mine) / (ends[part] - begin)),
                "instances": _instances_at(instances, ends[part]),
                "latency_ms_p50": common.rounded(statistics.median(times)),
                "latency_ms_p99": common.rounded(common.percentile(times, 0.99)),
                "latency_ms_max": common.rounded(max(times)),
                "spike_ms": None if part == LOW else common.rounded(max(spikes)),
                "followed_s": None
                if part == LOW or changed is None or changed > ends[part]
                else round(changed - begin, 1),
            }
        )
    return rows


def _instances_at(instances: Sequence[tuple[float, int]], at_s: float) -> int:
    return next((n for at, n in reversed(instances) if at <= at_s), instances[0][1] if instances else 0)


def ratios(rows: Sequence[Row]) -> dict[str, float | None]:
    """The instances at each load, the spikes, and the latency of the job that does not follow."""
    found: dict[str, float | None] = {}
    names = {LOW: "low", HIGH: "high", EBB: "low_again"}
    ours = {names[row["part"]]: row for row in rows if row["contender"] == POLICY}
    fixed = {names[row["part"]]: row for row in rows if row["contender"] == FIXED}
    for part, row in ours.items():
        found[f"instances_{part}"] = float(row["instances"])
        for figure in ("latency_ms_p50", "latency_ms_p99", "spike_ms", "followed_s"):
            found[f"{figure}_{part}"] = None if row[figure] is None else float(row[figure])
    if "high" in ours:
        found["instances_high_vs_low"] = common.rounded(ours["high"]["instances"] / ours["low"]["instances"])
    if "high" in fixed:
        found["fixed_latency_ms_max"] = float(max(row["latency_ms_max"] for row in fixed.values()))
        worst = max(row["latency_ms_max"] for row in ours.values())
        found["worst_vs_fixed"] = common.rounded(worst / found["fixed_latency_ms_max"])
    return found


def by_second(
    files: Sequence[File], latencies: Sequence[float], instances: Sequence[tuple[float, int]]
) -> dict[str, Any]:
    """Series for the picture: input and greatest latency in each second, and the instances where they change."""
    came: Counter[int] = Counter()
    worst: dict[int, float] = {}
    for file, ms in zip(files, latencies, strict=True):
        second = int(file.at_s)
        came[second] += file.rows
        worst[second] = max(ms, worst.get(second, 0.0))
    end = max(came, default=0)
    changes = [(at, n) for i, (at, n) in enumerate(instances) if i == 0 or instances[i - 1][1] != n]
    steps = [(round(at, 2), float(n)) for at, n in changes]
    return {
        "rows_s": [(float(s), float(came[s])) for s in sorted(came)],
        "latency_ms": [(float(s), worst[s]) for s in sorted(worst)],
        "instances": [*steps, (float(end), steps[-1][1])] if steps else [],
    }


# --- input and truth ----------------------------------------------------------------------------------------------


def write_pool(pool: Path, *, rows_s: int = ROWS_S, files: int = POOL_FILES, keys: int = KEYS, seed: int = 7) -> None:
    """Write ``low-*`` and ``high-*``: files of a tick's rows, on random keys."""
    pool.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    for name, rows in ((LOW, int(rows_s * TICK_S)), (HIGH, int(rows_s * FACTOR * TICK_S))):
        for number in range(files):
            recovery._write(rng.integers(0, keys, rows), rng, pool / f"{name}-{number:03d}.parquet")


def truth_of(pool: Path, fed: Mapping[str, int]) -> pl.DataFrame:
    """Key, n and total after each file was fed the given number of times."""
    totals = (pl.len().cast(pl.Int64).alias(COUNT), pl.col("amount").sum().alias(SUM))
    parts = [
        pl.read_parquet(pool / name).group_by(KEY).agg(totals).with_columns(pl.col(COUNT) * times, pl.col(SUM) * times)
        for name, times in fed.items()
    ]
    return pl.concat(parts).group_by(KEY).agg(pl.col(COUNT).sum(), pl.col(SUM).sum()).sort(KEY)


class TideFeeder(threading.Thread):
    """Puts a file in place in every tick, small at low water and large at high water. It waits for nobody."""

    def __init__(self, pool: Path, into: Path, tide: Tide) -> None:
        super().__init__(name="tide", daemon=True)
        self.tide, self.into = tide, into
        self.pools = {name: sorted(pool.glob(f"{name}-*.parquet")) for name in (LOW, HIGH)}
        self.sizes = {name: pl.read_parquet(files[0]).height for name, files in self.pools.items()}
        self.files: list[File] = []
        self.fed: Counter[str] = Counter()
        self.begin = 0.0

    def run(self) -> None:
        self.begin = time.monotonic()
        pause = threading.Event()
        for number in range(int(self.tide.seconds / TICK_S)):
            pause.wait(max(0.0, self.begin + number * TICK_S - time.monotonic()))
            name = HIGH if self.tide.part(number * TICK_S) == HIGH else LOW
            path = self.pools[name][number % len(self.pools[name])]
            os.link(path, self.into / f"{number:06d}.parquet")
            self.files.append(File(round(time.monotonic() - self.begin, 4), self.sizes[name]))
            self.fed[path.name] += 1


# --- the job ------------------------------------------------------------------------------------------------------


class Totals(msgspec.Struct):
    n: int
    total: int


class Scored(ps.Operator):
    """A running count and sum of each key, and a wait for each event."""

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s
        self.owed_s = 0.0

    def on_event(self, key: str, event: Any, state: ps.Value[Totals], emit: Any) -> None:
        self.owed_s += self.wait_s
        if self.owed_s > WAIT_S_MIN:
            self.owed_s -= waited(self.owed_s)
        totals = state.get() or Totals(0, 0)
        totals.n += 1
        totals.total += event.amount
        state.set(totals)
        emit(key=key, n=totals.n, total=totals.total)


def waited(seconds: float, clock: Any = time.perf_counter, sleep: Any = time.sleep) -> float:
    """Wait for ``seconds``, and say how long it was."""
    begin = clock()
    sleep(seconds)
    return float(clock() - begin)


def penstock(args: dict[str, Any], policy: Literal["safe-rate"] | None = "safe-rate") -> Iterator[Figures]:
    from penstock.engines.job import start

    tide = Tide(**args["tide"])
    place = Path(args["work"])
    (place / "in").mkdir(parents=True)
    flow = ps.Flow("tide")
    source = flow.source("in", ps.files(f"{place}/in/*.parquet", follow=True, schema={KEY: str, "amount": int}))
    schema = {KEY: pl.String(), COUNT: pl.Int64(), SUM: pl.Int64()}
    scored = source.key_by(KEY).process(OPERATOR, Scored(BUSY_LOW / ROWS_S), schema=schema)
    scored.sink("out", ps.parquet(str(place / "out"), durable=False))
    config = ps.Config(
        master=f"local-cluster[{EXECUTORS},1,{EXECUTOR_MB}]",
        instances=1,
        instances_max=EXECUTORS,
        policy=policy,
        policy_cool_down_s=tide.cool_down_s,
        checkpoint=str(place / "checkpoint"),
        control=False,
        spark={
            "spark.driver.memory": common.DRIVER_MEMORY,
            "spark.executor.memory": f"{EXECUTOR_MB}m",
            "spark.local.dir": str(place / "spark"),
        },
    )
    job = start(flow, engine="spark", config=config)
    wait_for(lambda: job.status().phase in ("running", "failed"), recovery.SETTLE_S_MAX, "the job runs")
    recorder = Recorder(job._runtime, OPERATOR)
    # While processes start, everything looks busy: the policy watches from the first file on.
    scaler = job._runtime.scaler
    watching, scaler.policy = scaler.policy, None
    feeder = TideFeeder(Path(args["pool"]), place / "in", tide)
    warm_up(job, feeder)
    first = job.status().rows
    feeder.start()
    scaler.policy = watching
    wait_for(lambda: alive(job) and not feeder.is_alive(), RUN_S_MAX, "all files have come")
    rows = first + sum(file.rows for file in feeder.files)
    wait_for(lambda: alive(job) and job.status().rows >= rows, RUN_S_MAX / 2, "all input is published")
    status = job.status()
    decisions = [notice for notice in job.notices if notice.startswith("policy ")]
    job.stop()
    outputs = [(round(at - feeder.begin, 4), epoch) for at, epoch in recorder.outputs if at > feeder.begin]
    yield {
        "files": [(file.at_s, file.rows) for file in feeder.files],
        "fed": dict(feeder.fed),
        "outputs": outputs,
        "rows": {epoch: recorder.rows[epoch] for _, epoch in outputs},
        "instances": [(at, len(set(recorder.owners[epoch]))) for at, epoch in outputs],
        "recoveries": status.recoveries,
        "decisions": decisions,
    }


def warm_up(job: Any, feeder: TideFeeder, files: int = 8) -> None:
    """Feed some files one by one, each when the one before is out. First epochs start processes, and do not count."""
    for number, path in enumerate(feeder.pools[LOW][:files]):
        rows = job.status().rows + feeder.sizes[LOW]
        os.link(path, feeder.into / f"000000-{number:02d}.parquet")
        feeder.fed[path.name] += 1
        wait_for(lambda rows=rows: alive(job) and job.status().rows >= rows, recovery.SETTLE_S_MAX, "it is warm")  # type: ignore[misc]


def penstock_fixed(args: dict[str, Any]) -> Iterator[Figures]:
    return penstock(args, policy=None)


CONTENDERS: dict[str, common.Contender] = {POLICY: penstock, FIXED: penstock_fixed}

if __name__ == "__main__":
    common.contender_main(MODULE)
