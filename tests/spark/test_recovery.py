"""Real executors in processes of their own, one of them killed in mid-run: the output is the local engine's.

Each test runs in a child process: ``local-cluster`` starts a Spark of its own, and there is one to a process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.slow, pytest.mark.timeout(420)]

ROOT = Path(__file__).resolve().parents[2]

JOB = """
import json, os, signal, sys, threading
from pathlib import Path

import polars as pl
import psutil

import penstock as ps
from penstock.engines.job import start

place, kill = Path(sys.argv[1]), int(sys.argv[2])


class Chain(ps.Operator):
    def on_event(self, key, event, chain: ps.Value[int], emit):
        chain.set((chain.get(0) * 31 + event.n) % 1_000_003)
        emit(word=key, chain=chain.get())


def make(first, n, rng):
    i = range(first, first + n)
    return pl.DataFrame({"word": [f"w{v * 7919 % 41}" for v in i], "n": [v % 10 for v in i], "x": [v / 7 for v in i]})


def build(out):
    flow = ps.Flow("recovers")
    words = flow.source("in", ps.generator(make, rows=3_000, schema={"word": str, "n": int, "x": float}))
    sums = words.key_by("word").aggregate("sums", rows=ps.count(), x=ps.sum("x"))
    sums.sink("a", ps.parquet(out / "a", durable=False))
    words.key_by("word").process("chain", Chain(), schema={"word": str, "chain": int}).sink(
        "b", ps.parquet(out / "b", durable=False)
    )
    return flow


def outputs(out):
    return {s: ps.read_output(out / s).sort(pl.all()) for s in "ab"}


def executors():
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if any("CoarseGrainedExecutorBackend" in part for part in process.cmdline()):
                found.append(process)
        except psutil.Error:
            pass  # it ended while we looked
    return found


def main():
    settings = dict(instances=2, slices=8, epoch_rows=300, checkpoint_interval_s=0.0)
    ps.run_local(build(place / "local"), **settings)
    config = ps.Config(master="local-cluster[2,1,1024]", checkpoint=str(place / "ck"), **settings)
    published, killed = 0, []

    def trip(step):
        nonlocal published
        published += step == "after-publish"
        if step == "after-publish" and published == kill:
            victim = executors()[0]
            killed.append(victim.pid)
            victim.send_signal(signal.SIGKILL)

    nodes, before, after = set(), {}, {}
    job = start(build(place / "spark"), engine="spark", config=config, trip=trip)
    observe = job._runtime._observe

    def watch(event):
        reports = [r for r in getattr(event, "reports", ()) if r.stage != "in"]
        if not killed:
            nodes.update((r.stage, r.index, r.node) for r in reports)
        (after if killed else before).update({f"{r.stage}:{r.index}": (r.node, r.pid) for r in reports})
        observe(event)

    job._runtime._observe = watch
    assert job.wait(300), "it hangs"
    ours, theirs = outputs(place / "spark"), outputs(place / "local")
    status = job.status()
    print(json.dumps({
        "equal": all(ours[s].equals(theirs[s]) for s in "ab"),
        "rows": {s: ours[s].height for s in "ab"},
        "recoveries": status.recoveries,
        "phase": status.phase,
        "killed": len(killed),
        "nodes": sorted({n for stage, _, n in nodes if stage != "in"}),
        "homes": sorted({(s, i, n) for s, i, n in nodes if s != "in"}),
        "before": before,
        "after": after,
        "remote": sum(o.bytes_remote for o in status.operators),
    }), flush=True)


if __name__ == "__main__":
    main()
"""


def run(place: Path, kill: int) -> dict[str, Any]:
    script = place / "job.py"
    script.write_text(textwrap.dedent(JOB))
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(script), str(place), str(kill)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_an_executor_is_killed_in_mid_run(tmp_path: Path) -> None:
    """Until then containers live on both executors, each where it was; after it, the output is still exact."""
    found = run(tmp_path, 4)
    assert len(found["nodes"]) == 2
    assert len(found["homes"]) == 4, f"a container moved for no reason: {found['homes']}"
    assert found["remote"] > 0, "rows went from one to the other"
    assert found["killed"] == 1
    assert found["equal"], "the output is not what an undisturbed run gives"
    assert found["rows"]["b"] == 3_000
    assert found["phase"] == "complete"
    assert found["recoveries"] >= 1
    alive = {node for node, _ in found["after"].values()}
    stayed = {c: home for c, home in found["before"].items() if home[0] in alive}
    assert len(stayed) == 2, "half of the four containers were on the executor that was not killed"
    # Its process may be another: when a job fails, Spark kills those of its tasks that run, and their workers too.
    assert {c: found["after"][c][0] for c in stayed} == {c: node for c, (node, _) in stayed.items()}
