"""A container's process, and the slices in its memory, outlive the jobs that Spark cancels.

Each test runs in a child process: how Spark starts its workers is settled when a session begins.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]

JOB = """
import json, os, sys, threading
from pathlib import Path

import polars as pl
import psutil

import penstock as ps
from penstock.control.events import (
    StageFailed,
)
from penstock.engines.job import start

place, daemon = Path(sys.argv[1]), sys.argv[2]
ROWS, HALF_WAY = 3_000, 1_700
HERE, GO = str(place / "here"), str(place / "go")


class Chain(ps.Operator):
    def on_event(self, key, event, chain: ps.Value[int], emit):
        if event.n == HALF_WAY and os.path.exists(HERE):
            # In the middle of a task: say so, and go on when the job has been cancelled.
            open(HERE, "w").close()
            open(GO).close()
        chain.set((chain.get(0) * 31 + event.n) % 1_000_003)
        emit(word=key, chain=chain.get())


def make(first, n, rng):
    i = range(first, first + n)
    return pl.DataFrame({"word": [f"w{v * 7919 % 41}" for v in i], "n": list(i)})


def build(out):
    flow = ps.Flow("outlives")
    words = flow.source("in", ps.generator(make, rows=ROWS, schema={"word": str, "n": int}))
    chains = words.key_by("word").process("chain", Chain(), schema={"word": str, "chain": int})
    chains.sink("b", ps.parquet(out / "b"))
    # It sends on what it makes: at the first of its rows Spark notices that the task was killed, and closes.
    chains.key_by("word").aggregate("sums", rows=ps.count(), n=ps.sum("chain")).sink("a", ps.parquet(out / "a"))
    return flow


def outputs(out):
    return {s: ps.read_output(out / s).sort(pl.all()) for s in "ab"}


def workers_left():
    found = psutil.Process().children(recursive=True)
    _, alive = psutil.wait_procs([p for p in found if p.is_running() and named_python(p)], timeout=120)
    return [p.pid for p in alive]


def named_python(process):
    try:
        return process.name().startswith("python")
    except psutil.Error:
        return False  # it ended while we looked


def main():
    settings = dict(instances=2, slices=8, epoch_rows=300, checkpoint_interval_s=0.0)
    ps.run_local(build(place / "local"), **settings)
    os.mkfifo(HERE)
    os.mkfifo(GO)
    spark = {"spark.python.daemon.module": daemon} if daemon else {}
    config = ps.Config(master="local[2]", checkpoint=str(place / "ck"), spark=spark, **settings)
    failed, before, after, loads, missing = [], {}, {}, 0, 0
    job = start(build(place / "spark"), engine="spark", config=config)
    observe = job._runtime._observe

    def watch(event):
        nonlocal loads, missing
        if isinstance(event, StageFailed):
            print(event.stage, event.reason, file=sys.stderr)
            if not failed and not os.path.exists(HERE):
                failed.append(event.stage)
                open(GO, "w").close()
        for r in getattr(event, "reports", ()):
            if r.stage != "in":
                (after if failed else before).setdefault(f"{r.stage}:{r.index}", []).append(r.pid)
                if failed:
                    loads += r.load_ms > 0
                    missing += r.missing
        observe(event)

    def cancel():
        open(HERE).close()
        os.unlink(HERE)
        engine = job._runtime.engine
        engine.session.sparkContext.cancelJobGroup(engine._group(engine.attempt))

    job._runtime._observe = watch
    threading.Thread(target=cancel, daemon=True).start()
    assert job.wait(240), "it hangs"
    ours, theirs = outputs(place / "spark"), outputs(place / "local")
    status = job.status()
    print(json.dumps({
        "equal": all(ours[s].equals(theirs[s]) for s in "ab"),
        "rows": ours["b"].height,
        "phase": status.phase,
        "recoveries": status.recoveries,
        "failed": failed,
        "before": {c: sorted(set(p)) for c, p in before.items()},
        "after": {c: sorted(set(p)) for c, p in after.items()},
        "loads": loads,
        "missing": missing,
        "left": workers_left(),
    }), flush=True)


if __name__ == "__main__":
    main()
"""


def run(place: Path, daemon: str) -> dict[str, Any]:
    (place / "job.py").write_text(JOB)
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(place / "job.py"), str(place), daemon],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["equal"], "the output is not what an undisturbed run gives"
    assert found["rows"] == 3_000
    assert found["phase"] == "complete"
    assert found["failed"], "no job was cancelled"
    assert found["recoveries"] >= 1
    assert found["left"] == [], "workers are left behind"
    return found


def test_a_cancelled_job_leaves_the_containers_as_they_are(tmp_path: Path) -> None:
    found = run(tmp_path, "")
    assert len(found["before"]) == 4
    assert all(len(pids) == 1 for pids in found["before"].values()), "one process each"
    assert found["after"] == found["before"]
    assert found["loads"] == 0, "all state was still in memory"
    assert found["missing"] == 0


@pytest.mark.thorough
def test_with_the_daemon_of_pyspark_state_is_loaded_again(tmp_path: Path) -> None:
    """So it is in a session that was started by somebody else."""
    found = run(tmp_path, "pyspark.daemon")
    assert found["after"] != found["before"]
    assert found["loads"] > 0
