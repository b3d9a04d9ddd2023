"""From event to output, at half the peak rate.

The benchmark first finds the peak: the same flow as fast as it goes, with large epochs. Then it runs with all defaults
at half of the peak rate, from a source that makes row ``i`` due at ``start + i / rate``. The aggregate carries the
greatest row number, so the sink knows which rows an epoch has brought. The driver's clock says when the epoch was
published. A row's latency is the time between the two: the wait until an epoch takes the row, the epoch itself, and the
publication. There is no sampling, and only one clock.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl

from benchmarks import common
from benchmarks.common import Figures
from penstock.connectors.base import PartRef, Sink

SUMMARY = "Latency from event to output at half the peak rate."

MODULE = "benchmarks.latency"
POINTS_PER_EPOCH = 256
PEAK_EPOCH_ROWS = 500_000
"""Epochs of the peak are large: the peak must be what the engine can do, or half of it is too easy."""
GRACE_S = 15.0
"""Seconds that a job that has fallen behind gets. Rows not published by then count with their wait so far."""


def run(quick: bool, out: Path | None) -> dict[str, Any]:
    """See README.md. Quick: 6 s for the peak, 10 s at half of it after 16 s of warm-up."""
    peak_s, warm_s, measured_s, rounds = (6.0, 16.0, 10.0, 1) if quick else (20.0, 20.0, 30.0, 3)
    peaks: list[float] = []

    def one(contender: str, number: int) -> Figures:
        with common.workplace() as work:
            if contender == "penstock_peak":
                figures = common.run_contender(MODULE, contender, {"work": str(work), "seconds": peak_s}, work)
                peaks.append(figures["rows_s"])
                return figures
            rate = peaks[-1] / 2
            args = {"work": str(work), "rows_s": rate, "warm_s": warm_s, "seconds": measured_s}
            return common.run_contender(MODULE, contender, args, work)

    rows = common.in_turn(list(CONTENDERS), rounds, one)
    history = [row.pop("history") for row in rows if "history" in row][-1]
    ratios = {
        name: common.rounded(float(np.median([row[name] for row in rows if name in row])))
        for name in ("p50_ms", "p99_ms", "max_ms")
    }
    notes = [
        "p50_ms, p99_ms and max_ms are of events, not of epochs, each round at half of its own peak; medians.",
        "The epoch size follows target_latency_ms, at its default of 500; a checkpoint every 2 s.",
        f"The peak is that of epochs of {PEAK_EPOCH_ROWS:,} rows.",
        "kept_up: no means that the job fell behind, and that its latencies are lower bounds.",
    ]

    def draw(path: Path) -> None:
        from penstock.observe.plot import plot_run

        plot_run(history, path, "Running word count at half the peak rate")

    return common.finish("latency", rows, ratios, notes, out, draw)


class ClockedSink(Sink):
    """Drops the rows, and notes on the driver when each epoch was published and which row was its last."""

    def __init__(self) -> None:
        self.published: list[tuple[float, int]] = []
        self._done = 0

    def write_part(self, epoch: int, attempt: int, part: str, frame: pl.DataFrame) -> PartRef | None:
        return {"last": int(frame["last"].max())} if frame.height else None  # type: ignore[arg-type]

    def commit(self, epoch: int, attempt: int, parts: Sequence[PartRef]) -> None:
        lasts = [part["last"] for part in parts if part]
        if epoch > self._done and lasts:
            self.published.append((time.monotonic(), max(lasts)))
        self._done = max(self._done, epoch)


class StartClock:
    """A monotonic clock that remembers its first reading, which is the source's zero."""

    def __init__(self) -> None:
        self.first: float | None = None

    def __call__(self) -> float:
        now = time.monotonic()
        if self.first is None:
            self.first = now
        return now


def event_latencies(
    published: Sequence[tuple[float, int]], start: float, rows_s: float, warm_s: float
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Latencies in ms, and how many events each latency stands for. Events due in the first ``warm_s`` are left out.

    An epoch has the rows after the last row of the epoch before. Within an epoch latency falls evenly from the first
    row to the last, so a few hundred points describe it.
    """
    values, weights = [], []
    first = 0
    for at, last in published:
        begin = max(first, int(np.ceil(warm_s * rows_s)))
        count = last + 1 - begin
        if count > 0:
            points = np.linspace(begin, last, min(count, POINTS_PER_EPOCH))
            values.append((at - start - points / rows_s) * 1000)
            weights.append(np.full(len(points), count / len(points)))
        first = max(first, last + 1)
    if not values:
        return np.empty(0), np.empty(0)
    return np.concatenate(values), np.concatenate(weights)


def until(published: list[tuple[float, int]], rows: int, now: float) -> list[tuple[float, int]]:
    """The latencies, with the unpublished ones of ``rows`` as if they were published now: none can have been faster."""
    last = published[-1][1] if published else -1
    return published if last >= rows - 1 else [*published, (now, rows - 1)]


def weighted_percentile(values: np.ndarray[Any, Any], weights: np.ndarray[Any, Any], share: float) -> float:
    """The smallest value that at least ``share`` of the weight does not exceed."""
    order = np.argsort(values)
    sums = np.cumsum(weights[order])
    at = int(np.searchsorted(sums, share * sums[-1] * (1 - 1e-12)))
    return float(values[order][min(at, len(values) - 1)])


# --- contenders ---------------------------------------------------------------------------------------------------


def _start(args: dict[str, Any], settings: dict[str, Any], **source: Any) -> tuple[Any, ClockedSink]:
    import penstock as ps

    work = Path(args["work"])
    sink = ClockedSink()
    flow = ps.Flow("latency")
    stream = flow.source("events", ps.generator(common.numbered_words, seed=5, **source))
    stream.key_by("word").aggregate("counts", n=ps.count(), last=ps.max("i")).sink("out", sink)
    job = ps.run(
        flow,
        master=common.MASTER,
        checkpoint=str(work / "checkpoint"),
        spark={"spark.driver.memory": common.DRIVER_MEMORY, "spark.local.dir": str(work / "spark")},
        **settings,
    )
    return job, sink


def penstock_peak(args: dict[str, Any]) -> Iterator[Figures]:
    """Run as fast as it goes for some seconds after the first epoch. The rate is that of the second half."""
    job, sink = _start(args, {"epoch_rows": PEAK_EPOCH_ROWS})
    while not sink.published and not job.wait(0.1):
        pass
    job.wait(args["seconds"])
    job.stop()
    yield {"rows_s": peak_rate(sink.published, args["seconds"])}


def peak_rate(published: Sequence[tuple[float, int]], seconds: float) -> int:
    """Rows a second in the second half of the ``seconds`` after the first epoch."""
    begin = published[0][0]
    inside = [(at, last) for at, last in published if begin + seconds / 2 <= at <= begin + seconds]
    assert len(inside) >= 2, f"{len(inside)} epochs in {seconds / 2} s"
    return round((inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0]))


def penstock_half(args: dict[str, Any]) -> Iterator[Figures]:
    """Run at a given rate until the source ends, or the job is too far behind."""
    rate, warm_s, seconds = float(args["rows_s"]), float(args["warm_s"]), float(args["seconds"])
    rows = int(rate * (warm_s + seconds))
    clock = StartClock()
    job, sink = _start(args, {}, rows=rows, rows_per_s=rate, clock=clock)
    while clock.first is None and not job.wait(0.1):
        pass
    assert clock.first is not None
    job.wait(clock.first + warm_s + seconds + GRACE_S - time.monotonic())
    seen = list(sink.published)
    published = until(seen, rows, time.monotonic())
    job.stop()
    status = job.status()
    values, weights = event_latencies(published, clock.first, rate, warm_s)
    # The instances of each stage, as one number for the picture.
    history = [{**msgspec.structs.asdict(e), "instances": max(e.instances.values(), default=0)} for e in status.history]
    yield {
        "rows_s": round(rate),
        "p50_ms": common.rounded(weighted_percentile(values, weights, 0.50)),
        "p99_ms": common.rounded(weighted_percentile(values, weights, 0.99)),
        "max_ms": common.rounded(float(values.max())),
        "events": round(float(weights.sum())),
        "epochs": len(sink.published),
        "kept_up": published is seen,
        "epoch_ms_p50": common.rounded(float(np.median([entry["ms"] for entry in history]))),
        "checkpoints": status.checkpoints,
        "history": history,
    }


CONTENDERS: dict[str, common.Contender] = {"penstock_peak": penstock_peak, "penstock_half": penstock_half}

if __name__ == "__main__":
    common.contender_main(MODULE)
