"""A job to be killed: a running count, windows, a ranking and a custom operator, into Parquet; the count into a sink of
the user's as well, who writes a file for each epoch, and replaces it if the epoch comes again.

    python driver_job.py DIR [--engine local|spark] [--small] [--checkpoint URL]
        [--die STEP:K | --die-within CALLS:MICROSECONDS]
    python driver_job.py --serve

``--small`` leaves out the windows and runs one instance of each stage, because Spark takes a while to start Python
workers. ``--die`` kills this process with SIGKILL at the K-th time the step of a commit with this name is reached.
``--die-within`` kills it so many microseconds after the CALLS-th step of any name: anywhere, in the middle of whatever
it does then.
Started again with the same DIR it goes on.

``--serve`` reads command lines (JSON) from standard input and forks a process for each, answering with its exit status:
the same as starting it afresh, without two seconds of imports each time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import penstock as ps
from penstock.engines.job import start

ROWS, EPOCH_ROWS = 4_000, 400
SMALL = ("counts", "gaps")
SINKS = (*SMALL, "windows", "ranking")
OWN = "own"
STEPS = (
    "before-log",
    "after-log",
    "before-publish",
    "between-sinks",
    "after-publish",
    "before-manifest",
    "after-manifest",
    "after-compact",
    "after-garbage",
)


class Gaps(ps.Operator):
    """How long a word was away, whenever that is longer than ever before."""

    def on_event(self, key: str, event: Any, longest: ps.Value[int], last: ps.Value[int], emit: Any) -> None:
        before, now = last.get(), event.at
        last.set(now)
        if before is not None and abs(now - before) > longest.get(0):
            longest.set(abs(now - before))
            emit(word=key, gap=abs(now - before))


def build(out: Path, small: bool) -> ps.Flow:
    import polars as pl

    def sink(name: str) -> ps.Sink:
        return ps.parquet(out / name, durable=False)  # SIGKILL is no power cut

    own = out.parent / OWN
    own.mkdir(parents=True, exist_ok=True)

    def overwrite(epoch: int, frame: pl.DataFrame) -> None:
        frame.sort(pl.all()).write_csv(own / f"{epoch:06d}.csv")

    flow = ps.Flow("to-be-killed")
    words = flow.source("words", ps.words(vocabulary=60, rows=ROWS, seed=3, events_per_s=100, disorder=3.0))
    counts = words.key_by("word").aggregate("count", n=ps.count(), last=ps.max("ts"))
    counts.sink("counts", sink("counts"))
    counts.sink("own", ps.foreach_batch(overwrite))
    timed = words.with_columns("at", at=pl.col("ts").dt.epoch("us"))
    timed.key_by("word").process("gap", Gaps(), schema={"word": str, "gap": int}).sink("gaps", sink("gaps"))
    if small:
        return flow
    windows = words.key_by("word").window(ps.hopping("4s", every="2s", on="ts", lateness="1s"))
    per_window = windows.aggregate("window", n=ps.count())
    per_window.sink("windows", sink("windows"))
    per_window.top_k("top", 3, by="n").sink("ranking", sink("ranking"))
    return flow


def config(place: Path, instances: int) -> ps.Config:
    return ps.Config(
        master="local[2]",
        checkpoint=str(place / "checkpoint"),
        epoch_rows=EPOCH_ROWS,
        instances=instances,
        slices=8,
        checkpoint_interval_s=0,
        deltas_max=2,
        manifests_kept=2,
    )


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killer(die_at: str | None, die_within: str | None) -> Callable[[str], None]:
    seen: Counter[str] = Counter()
    lock = threading.Lock()
    merged = threading.Event()

    def trip(step: str) -> None:
        with lock:
            seen[step] += 1
            seen[""] += 1
            here, total = seen[step], seen[""]
        if step == "after-compact":
            merged.set()
        if die_at is not None:
            name, _, count = die_at.partition(":")
            if step == name and here == int(count):
                die()
            if name == "after-compact" and step == "before-publish" and seen["before-compact"]:
                merged.wait(120)  # it takes its time in a process of its own: the job must not end before
        if die_within is not None:
            calls, _, microseconds = die_within.partition(":")
            if total == int(calls):
                threading.Timer(int(microseconds) / 1e6, die).start()

    return trip


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("place", type=Path)
    parser.add_argument("--engine", default="local")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--die")
    parser.add_argument("--die-within")
    parser.add_argument("--checkpoint")
    given = parser.parse_args(arguments)
    settings = config(given.place, 1 if given.small else 2)
    job = start(
        build(given.place / "out", given.small),
        engine=given.engine,
        config=settings.replace(checkpoint=given.checkpoint) if given.checkpoint else settings,
        trip=killer(given.die, given.die_within),
    )
    job.wait()
    print(f"done: epoch {job.status().epoch}, {job.status().recoveries} recoveries", flush=True)


def serve() -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                main(json.loads(line))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        _, status = os.waitpid(child, 0)
        print(json.dumps({"status": os.waitstatus_to_exitcode(status)}), flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        main(sys.argv[1:])
