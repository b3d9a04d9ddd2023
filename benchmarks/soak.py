"""Does a long run stay as it is? Memory, files and epoch time over thousands of small epochs.

Small epochs give many epochs in little time. Leaks grow by the epoch: shuffle files, RDDs, log entries, deltas, records
on the driver. The flow has a running count over 20,000 keys and a window count, so that state is both kept and evicted.
Slopes are taken over the second half, where caches are full and every key has been seen.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from benchmarks import common
from benchmarks.common import Figures, Row
from penstock.observe.status import EpochStatus

SUMMARY = "Memory, files and epoch time over thousands of epochs: what grows."

MODULE = "benchmarks.soak"
EPOCH_ROWS = 2_000
KEYS = 20_000
EVENTS_PER_S = 1_000
SAMPLE_S = 1.0
ROWS_SHOWN = 24

SLOPES = {
    "driver_rss_mb_per_1000": "driver_rss_mb",
    "jvm_rss_mb_per_1000": "jvm_rss_mb",
    "worker_rss_mb_per_1000": "worker_rss_mb",
    "files_per_1000": "files",
    "spark_files_per_1000": "spark_files",
}


def run(quick: bool, out: Path | None) -> dict[str, Any]:
    """See README.md. Quick: 150 epochs, too few for the slopes to mean much."""
    epochs = 150 if quick else 2_000
    common.note(f"{epochs} epochs of {EPOCH_ROWS:,} rows")
    with common.workplace() as work:
        figures = common.run_contender(
            MODULE, "penstock", {"work": str(work), "epochs": epochs}, work, seconds_max=3_600.0
        )
    samples, history = figures["samples"], figures["history"]
    rows: list[Row] = [{"contender": "penstock", "round": 1, **sample} for sample in thinned(samples, ROWS_SHOWN)]
    notes = [
        "Slopes are least squares over the second half of the run, for 1,000 epochs.",
        "A JVM touches its heap bit by bit up to its limit: its memory grows without a leak until then.",
        f"{figures['recoveries']} recoveries, {figures['checkpoints']} checkpoints, "
        f"{figures['state_rows']:,} rows of state at the end, peak memory {figures['memory_mb']} MB.",
    ]
    if quick:
        notes.append("Quick: the second half is still warm-up, so these slopes say that it runs and no more.")

    def draw(path: Path) -> None:
        from penstock.observe.plot import plot_run

        plot_run(history, path, f"{epochs:,} small epochs")

    series = {name: [sample[name] for sample in samples] for name in samples[0]}
    return common.finish("soak", rows, slopes(samples, history), notes, out, draw, series=series)


def slopes(samples: Sequence[Mapping[str, Any]], history: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """The growth of every figure in 1,000 epochs."""
    epochs = [float(sample["epoch"]) for sample in samples]
    found: dict[str, float | None] = {
        name: common.slope_per_1000(epochs, [float(sample[figure]) for sample in samples])
        for name, figure in SLOPES.items()
    }
    found["epoch_ms_per_1000"] = common.slope_per_1000(
        [float(entry["epoch"]) for entry in history], [float(entry["ms"]) for entry in history]
    )
    return found


def thinned(items: Sequence[Any], count: int) -> list[Any]:
    """At most ``count`` values, evenly spread, with the first and the last."""
    if len(items) <= count:
        return list(items)
    return [items[round(k * (len(items) - 1) / (count - 1))] for k in range(count)]


def files_in(folder: Path) -> int:
    return sum(len(names) for _, _, names in os.walk(folder))


def memory_by_role() -> Figures:
    """Memory of this process, of the JVM and of the Python workers below it."""
    me = psutil.Process()
    children = me.children(recursive=True)
    java = [process for process in children if _name(process) == "java"]
    workers = [process for process in children if _name(process).startswith("python")]
    return {
        "driver_rss_mb": round(common.rss_mb([me]), 1),
        "jvm_rss_mb": round(common.rss_mb(java), 1),
        "worker_rss_mb": round(common.rss_mb(workers), 1),
        "workers": len(workers),
    }


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.Error:
        return ""


def penstock(args: dict[str, Any]) -> Iterator[Figures]:
    import penstock as ps

    work = Path(args["work"])
    flow = ps.Flow("soak")
    rows = args["epochs"] * EPOCH_ROWS
    events = flow.source("events", ps.words(vocabulary=KEYS, rows=rows, events_per_s=EVENTS_PER_S, seed=7))
    events.key_by("word").aggregate("counts", n=ps.count()).sink("out", ps.discard())
    windows = events.key_by("word").window(ps.tumbling("20s", on="ts"))
    windows.aggregate("by_window", n=ps.count()).sink("windows", ps.discard())
    job = ps.run(
        flow,
        master=common.MASTER,
        epoch_rows=EPOCH_ROWS,
        checkpoint=str(work / "checkpoint"),
        checkpoint_interval_s=1.0,
        spark={"spark.driver.memory": "1g", "spark.local.dir": str(work / "spark")},
    )
    samples: list[Figures] = []
    history: dict[int, Figures] = {}
    while not job.wait(SAMPLE_S):
        status = job.status()
        history.update({entry.epoch: _plain(entry) for entry in status.history})
        sample = {
            "epoch": status.epoch,
            "at_s": round(status.uptime_s, 1),
            **memory_by_role(),
            "files": files_in(work / "checkpoint"),
            "spark_files": files_in(work / "spark"),
            "state_rows": status.state_rows,
            "epoch_ms": common.rounded(status.epoch_ms),
        }
        # Samples while the job starts or ends say nothing about a long run.
        if status.epoch and job.status().phase == "running" and job.status().epoch < args["epochs"]:
            samples.append(sample)
    status = job.status()
    history.update({entry.epoch: _plain(entry) for entry in status.history})
    assert status.rows == rows, f"{status.rows} rows of {rows}"
    yield {
        "samples": samples,
        "history": [history[epoch] for epoch in sorted(history)],
        "recoveries": status.recoveries,
        "checkpoints": status.checkpoints,
        "state_rows": status.state_rows,
    }


def _plain(entry: EpochStatus) -> Figures:
    """An epoch with its instances as one number, for the picture."""
    return {**msgspec.structs.asdict(entry), "instances": max(entry.instances.values(), default=0)}


CONTENDERS: dict[str, common.Contender] = {"penstock": penstock}

if __name__ == "__main__":
    common.contender_main(MODULE)
