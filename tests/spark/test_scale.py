"""Executors that come and go while a flow runs: asked for and given back by us, or added and taken by Spark itself.

Each test runs a job in a child process: there is one Spark to a process. The child reads words at a fixed rate until
all has happened, and is then stopped; what it said must be what the local engine says of the same words.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.spark.child import daemon

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(420)]

ROOT = Path(__file__).resolve().parents[2]

COMMON = """
import json, sys, threading, time
from pathlib import Path

import polars as pl

import penstock as ps
from penstock.engines.job import start

place, master = Path(sys.argv[1]), sys.argv[2]
LIMIT_S = 150.0


class Chain(ps.Operator):
    def on_event(self, key, event, chain: ps.Value[int], emit):
        chain.set((chain.get(0) * 31 + event.n) % 1_000_003)
        emit(word=key, n=event.n, chain=chain.get())


def make(first, n, rng):
    i = range(first, first + n)
    return pl.DataFrame({"word": [f"w{v * 7919 % 41}" for v in i], "n": list(i)})


def build(out, **pace):
    flow = ps.Flow("scales")
    words = flow.source("in", ps.generator(make, schema={"word": str, "n": int}, **pace))
    chained = words.key_by("word").process("chain", Chain(), schema={"word": str, "n": int, "chain": int})
    chained.sink("out", ps.parquet(out, durable=False))
    return flow


def begin(**settings):
    config = ps.Config(
        master=master, checkpoint=str(place / "ck"), slices=12, checkpoint_interval_s=0.5, name="scales", **settings
    )
    return start(build(place / "spark", rows_per_s=1_000), engine="spark", config=config)


def slices(job):
    return {n.name: n.slices for n in job.status().nodes}


def until(job, what, test):
    limit = time.monotonic() + LIMIT_S
    while not test():
        assert not job.wait(0.05), "it ended"
        assert time.monotonic() < limit, f"never {what}: {slices(job)}, {job.notices}"


def epochs(job, more):
    goal = job.status().epoch + more
    until(job, f"epoch {goal}", lambda: job.status().epoch >= goal)


def verdict(job, **facts):
    job.stop()
    status = job.status()
    ps.run_local(build(place / "local", rows=status.rows), slices=12)
    # Everything but the number of the epoch: with rows that come by the clock, that is chance.
    ours, theirs = (ps.read_output(place / p).drop("epoch").sort("n") for p in ("spark", "local"))
    facts |= {"equal": ours.equals(theirs), "rows": ours.height, "recoveries": status.recoveries}
    print(json.dumps(facts | {"notices": job.notices}), flush=True)
"""

OUT_AND_IN = """
from penstock.engines.spark import engine

engine.GRANT_S = 2.0


def main():
    job = begin()
    until(job, "started", lambda: job.status().epoch >= 3)
    first, at_release = slices(job), []
    release = job._runtime.engine.release_nodes

    def watched(nodes):
        at_release.extend(slices(job)[n] for n in nodes)
        release(nodes)

    job._runtime.engine.release_nodes = watched
    job.scale_in(1)
    until(job, "smaller", lambda: len(slices(job)) == 2)
    epochs(job, 5)
    fewer = slices(job)
    job.scale_out(2)
    until(job, "larger", lambda: len(slices(job)) == 3 and all(slices(job).values()))
    until(job, "told of the grant", lambda: any("asked for came" in n for n in job.notices))
    more = slices(job)
    new = max(more, key=int)
    job.scale_in([new])
    until(job, "smaller again", lambda: new not in slices(job))
    epochs(job, 10)
    verdict(job, first=first, fewer=fewer, more=more, last=slices(job), at_release=at_release)


if __name__ == "__main__":
    main()
"""

BY_THEMSELVES = """
def main():
    job = begin()
    until(job, "started", lambda: job.status().epoch >= 3)
    first = slices(job)
    print("another worker, please", flush=True)
    until(job, "larger", lambda: len(slices(job)) == 2 and all(slices(job).values()))
    until(job, "calm", lambda: not job.status().moves)
    more, before = slices(job), job.status().recoveries
    until(job, "backed up", lambda: (b := job.status().backups) is not None and b.slices_current == b.slices_total)
    print("decommission the first, please", flush=True)
    until(job, "smaller", lambda: len(slices(job)) == 1)
    epochs(job, 5)
    verdict(job, first=first, more=more, last=slices(job), before=before)


if __name__ == "__main__":
    main()
"""


@contextlib.contextmanager
def child(place: Path, script: str, master: str) -> Iterator[subprocess.Popen[str]]:
    (place / "job.py").write_text(COMMON + script)
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    with (place / "stderr").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, str(place / "job.py"), str(place), master],
            env={**os.environ, "PYTHONPATH": path, "SPARK_LOCAL_IP": "127.0.0.1"},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def line(process: subprocess.Popen[str], place: Path) -> str:
    """The next thing that the child says."""
    assert process.stdout is not None
    said = process.stdout.readline()
    assert said, (place / "stderr").read_text()[-4_000:]
    return said.strip()


def test_executors_are_asked_for_and_given_back(tmp_path: Path) -> None:
    """Three workers: one of three executors leaves, more come than went and one that came leaves. Nobody recovers."""
    with child(tmp_path, OUT_AND_IN, "local-cluster[3,1,1024]") as process:
        found: dict[str, Any] = json.loads(line(process, tmp_path))
    assert found["equal"] and found["rows"] > 0, "the output is not what an undisturbed run gives"
    assert found["recoveries"] == 0, f"leaving cost a recovery: {found['notices']}"
    assert sorted(found["first"].values()) == [4, 4, 4]
    assert len(found["fewer"]) == 2 and min(found["fewer"].values()) >= 4
    assert found["more"].get("3", 0) >= 2 and sum(found["more"].values()) == 12, "a new one has its share, by load"
    assert found["last"].keys() == found["fewer"].keys() and min(found["last"].values()) >= 4
    assert found["at_release"] == [0, 0], "each was drained before it was given back"
    assert [n for n in found["notices"] if " of 2 executors that were asked for came within " in n]


def test_a_worker_joins_and_another_is_decommissioned(tmp_path: Path) -> None:
    """Spark runs nothing on an executor from the moment that it is decommissioned: its slices come from backups."""
    work = tmp_path / "daemons"
    work.mkdir()
    with contextlib.ExitStack() as stack:
        _, master = stack.enter_context(daemon("master.Master", ready=r"spark://127\.0\.0\.1:\d+", work=work))

        def worker() -> subprocess.Popen[str]:
            size = ["--cores", "1", "--memory", "1g", master]
            up = daemon("worker.Worker", *size, ready="Successfully registered with master", work=work)
            return stack.enter_context(up)[0]

        first = worker()
        process = stack.enter_context(child(tmp_path, BY_THEMSELVES, master))
        assert line(process, tmp_path).startswith("another worker")
        worker()
        assert line(process, tmp_path).startswith("decommission")
        first.send_signal(signal.SIGPWR)
        found: dict[str, Any] = json.loads(line(process, tmp_path))
    assert found["equal"] and found["rows"] > 0, "the output is not what an undisturbed run gives"
    assert found["first"] == {"0": 12} and sorted(found["more"]) == ["0", "1"]
    assert found["last"] == {"1": 12}
    assert found["before"] == 0 and found["recoveries"] == 1
