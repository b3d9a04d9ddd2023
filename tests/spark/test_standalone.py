"""A standalone cluster that a user starts by hand: a master, and workers in processes of their own that come and go.

The job runs in a child process: there is one Spark to a process. It reads words at a fixed rate until all has happened,
and is then stopped; what it said must be what the local engine says of the same words.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import penstock as ps
from penstock.control.events import (
    CancelAll,
)
from tests.spark.child import ROOT, daemon, say

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]

LIMIT_S = 240.0
HOSTS = ("127.0.0.1", "localhost")
"""The workers' names for this machine. When the executor of a decommissioned worker ends, Spark forgets the shuffle
files of all executors on a host of that name (``DAGScheduler.handleExecutorLost``). Under one name, an epoch that has
not read those of the executor that stays fails, and the job recovers once more.
"""


class Cluster:
    """A master, a worker, and the job in its child process."""

    def __init__(self, place: Path, stack: contextlib.ExitStack) -> None:
        self.place, self.stack = place, stack
        self.work = place / "daemons"
        self.work.mkdir()
        up = daemon("master.Master", ready=r"spark://127\.0\.0\.1:\d+", work=self.work, host="127.0.0.1")
        _, self.master = stack.enter_context(up)
        self.first = self.worker(HOSTS[0])
        self.process = stack.enter_context(child(place, self.master))
        self.started = self.said()

    def worker(self, host: str) -> subprocess.Popen[str]:
        size = ["--cores", "1", "--memory", "1g", self.master]
        ready = "Successfully registered with master"
        return self.stack.enter_context(daemon("worker.Worker", *size, ready=ready, work=self.work, host=host))[0]

    def said(self) -> dict[str, Any]:
        """The next thing that the child says."""
        assert self.process.stdout is not None
        text = self.process.stdout.readline()
        assert text, (self.place / "stderr").read_text()[-4_000:]
        found: dict[str, Any] = json.loads(text)
        return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with contextlib.ExitStack() as stack:
        yield Cluster(tmp_path_factory.mktemp("standalone"), stack)


def test_a_worker_joins(cluster: Cluster) -> None:
    assert cluster.started["slices"] == {"0": 12}
    cluster.worker(HOSTS[1])
    found = cluster.said()
    assert sorted(found["slices"]) == ["0", "1"] and sum(found["slices"].values()) == 12
    assert found["homes"] == ["0", "1"], "containers of one stage have worked on both workers' executors"
    assert found["recoveries"] == [], "to be joined is no loss"


def test_a_worker_is_decommissioned(cluster: Cluster) -> None:
    """Spark runs nothing on an executor from the moment that it is decommissioned: its slices come from backups."""
    cluster.first.send_signal(signal.SIGPWR)
    found = cluster.said()
    assert found["equal"] and found["rows"] > 0, "the output is not what an undisturbed run gives"
    assert found["slices"] == {"1": 12}
    assert len(found["recoveries"]) == 1 and "decommissioned" in found["recoveries"][0], found["recoveries"]


@contextlib.contextmanager
def child(place: Path, master: str) -> Iterator[subprocess.Popen[str]]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with (place / "stderr").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, __file__, str(place), master],
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


# -- the job -----------------------------------------------------------------------------------------------------------


class Chain(ps.Operator):
    def on_event(self, key: str, event: Any, chain: ps.Value[int], emit: Any) -> None:
        chain.set((chain.get(0) * 31 + event.n) % 1_000_003)
        emit(word=key, n=event.n, chain=chain.get())


def make(first: int, n: int, rng: Any) -> pl.DataFrame:
    i = range(first, first + n)
    return pl.DataFrame({"word": [f"w{v * 7919 % 41}" for v in i], "n": list(i)})


def build(out: Path, **pace: Any) -> ps.Flow:
    flow = ps.Flow("standalone")
    words = flow.source("in", ps.generator(make, schema={"word": str, "n": int}, **pace))
    chained = words.key_by("word").process("chain", Chain(), schema={"word": str, "n": int, "chain": int})
    chained.sink("out", ps.parquet(out, durable=False))
    return flow


def until(job: ps.Job, what: str, met: Callable[[], object]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not met():
        assert not job.wait(0.05), "it ended"
        assert time.monotonic() < limit, f"never {what}: {job.status()}, {job.notices}"


def slices(job: ps.Job) -> dict[str, int]:
    return {node.name: node.slices for node in job.status().nodes}


def whole(job: ps.Job, nodes: int) -> bool:
    """All nodes are there and have slices; nothing moves; every slice has its backup."""
    status, backups = job.status(), job.status().backups
    current = backups is not None and backups.slices_current == backups.slices_total
    return bool(current and not status.moves and len(slices(job)) == nodes and all(slices(job).values()))


def recoveries(job: ps.Job) -> list[str]:
    """Why the job went back to its checkpoint, each time."""
    return [c.reason for record in job.journal() for c in record.commands if isinstance(c, CancelAll)]


def main(place: Path, master: str) -> None:
    job = ps.run(
        build(place / "spark", rows_per_s=1_000),
        master=master,
        checkpoint=str(place / "ck"),
        slices=12,
        checkpoint_interval_s=0.5,
    )
    homes: set[str] = set()
    observe = job._runtime._observe

    def watch(event: Any) -> None:
        homes.update(r.node for r in getattr(event, "reports", ()) if r.stage == "chain" and r.rows_in)
        observe(event)

    job._runtime._observe = watch  # type: ignore[method-assign]
    until(job, "started", lambda: job.status().epoch >= 3)
    say(slices=slices(job))
    until(job, "larger", lambda: whole(job, 2) and len(homes) == 2)
    say(slices=slices(job), homes=sorted(homes), recoveries=recoveries(job))
    until(job, "smaller", lambda: len(slices(job)) == 1)
    goal = job.status().epoch + 5
    until(job, f"epoch {goal}", lambda: job.status().epoch >= goal)
    last = slices(job)
    job.stop()
    rows, causes = job.status().rows, recoveries(job)
    ps.run_local(build(place / "local", rows=rows), slices=12)
    # Everything but the number of the epoch: with rows that come by the clock, that is chance.
    ours, theirs = (ps.read_output(place / p).drop("epoch").sort("n") for p in ("spark", "local"))
    say(equal=ours.equals(theirs), rows=ours.height, slices=last, recoveries=causes)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
