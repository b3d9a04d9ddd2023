"""One job on real executors, through every kind of loss, one after another: the output is the undisturbed run's, byte
for byte, in Parquet and in a sink of the user's that overwrites what it is given twice.

The job runs in a child process: ``local-cluster`` starts a Spark of its own, and there is one to a process. Each fault
waits for the moment that it is about; what happened is read from the controller, never guessed from time.
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

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]

JOB = """
import hashlib, io, json, os, signal, sys, threading, time
from pathlib import Path

import polars as pl
import psutil

import penstock as ps
from penstock.engines.job import start

place, faults = Path(sys.argv[1]), sys.argv[2].split(",")
NODES, LIMIT_S = 4, 150


HANGS = str(place / "hangs")


class Chain(ps.Operator):
    def on_event(self, key, event, chain: ps.Value[int], emit):
        while key == "w7" and os.path.exists(HANGS):
            time.sleep(0.02)
        chain.set((chain.get(0) * 31 + event.n) % 1_000_003)
        emit(word=key, chain=chain.get())


def make(first, n, rng):
    i = range(first, first + n)
    return pl.DataFrame({"word": [f"w{v * 7919 % 401}" for v in i], "n": [v % 10 for v in i], "x": [v / 7 for v in i]})


def build(out):
    (out / "own").mkdir(parents=True)

    def own(epoch, frame):  # idempotent: an epoch that comes again replaces itself
        frame.sort(pl.all()).write_ipc(out / "own" / f"{epoch:06d}.arrow")

    flow = ps.Flow("faults")
    words = flow.source("in", ps.generator(make, schema={"word": str, "n": int, "x": float}))
    sums = words.key_by("word").aggregate("sums", rows=ps.count(), x=ps.sum("x"))
    sums.sink("a", ps.parquet(out / "a", durable=False))
    sums.sink("own", ps.foreach_batch(own))
    words.key_by("word").process("chain", Chain(), schema={"word": str, "chain": int}).sink(
        "b", ps.parquet(out / "b", durable=False)
    )
    return flow


def digest(out):
    found = {}
    for sink in "ab":
        frame = ps.read_output(out / sink)
        for (epoch,), rows in frame.group_by("epoch"):
            buffer = io.BytesIO()
            rows.sort(pl.all()).write_ipc(buffer)
            found[sink, epoch] = hashlib.sha256(buffer.getvalue()).hexdigest()
    for file in (out / "own").iterdir():
        found["own", int(file.stem)] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def executors():
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if any("CoarseGrainedExecutorBackend" in part for part in process.cmdline()):
                found.append(process)
        except psutil.Error:
            pass  # it ended while we looked
    return sorted(found, key=lambda p: p.create_time())


settings = dict(instances=NODES, slices=16, epoch_rows=300, checkpoint_interval_s=0.5)
master, checkpoint = f"local-cluster[{NODES},1,1024]", str(place / "ck")
config = ps.Config(master=master, checkpoint=checkpoint, backups=1, hang_s=8.0, control=False, **settings)
job = start(build(place / "spark"), engine="spark", config=config)
runtime = job._runtime
turned = threading.Condition()
rebuilt, reports = [], {}
handle = runtime.handle


def watched(event):
    handle(event)
    for report in getattr(event, "reports", ()):
        reports[report.stage, report.index] = report
        if report.rebuilt:
            rebuilt.append(dict(report.rebuilt))
    with turned:
        turned.notify_all()


runtime.handle = watched


def until(what, condition):
    with turned:
        ok = turned.wait_for(lambda: runtime.ended.is_set() or condition(runtime.controller), LIMIT_S)
    if runtime.ended.is_set():
        job.wait()
    assert ok, f"waited in vain for: {what}; {job.status()}"


def whole(c):
    if not c or len(c.nodes) < NODES or c.migration.moves:
        return False
    backups = job.status().backups
    return backups.get("slices_current") == backups.get("slices_total", -1)


def fresh(c, past):
    return c.published > past + 2 and c.phase == "running"


def kill(count=1):
    for victim in executors()[:count]:
        victim.send_signal(signal.SIGKILL)


said = {}
until("a first checkpoint", lambda c: c and c.committed > 0)
for fault in faults:
    until("everybody has slices and backups", whole)
    c = runtime.controller
    past, recoveries, before = c.published, c.recoveries, len(rebuilt)
    if fault == "one":
        kill()
    elif fault == "two at once":
        kill(2)
    elif fault == "in a checkpoint":
        until("a checkpoint is open", lambda c: c.checkpoint is not None)
        kill()
    elif fault == "in a recovery":
        kill()
        until("the recovery", lambda c: c.recoveries > recoveries)
        kill()
    elif fault == "in a start":
        kill()
        lost = len(c.nodes)
        until("the loss", lambda c: c.recoveries > recoveries)
        until("another executor comes", lambda c: len(c.nodes) >= NODES)
        executors()[-1].send_signal(signal.SIGKILL)
    elif fault == "a worker":
        os.kill(reports["sums", 0].pid, signal.SIGKILL)
    elif fault == "a hang":
        Path(HANGS).touch()  # user code that does not come back, in the container that has this key
        until("it is noticed", lambda c: c.suspects)
        Path(HANGS).unlink()
    elif fault == "all":
        kill(NODES)
    until(f"output after {fault}", lambda c: c.recoveries > recoveries and fresh(c, past))
    said[fault] = {
        "recoveries": runtime.controller.recoveries - recoveries,
        "backup": sum(r.get("backup", 0) for r in rebuilt[before:]),
        "durable": sum(r.get("durable", 0) for r in rebuilt[before:]),
    }
until("everybody is back", whole)
job.stop()
status = job.status()
ps.run_local(build(place / "local"), epochs_max=status.epoch, **settings)
ours, theirs = digest(place / "spark"), digest(place / "local")
print(json.dumps({
    "equal": ours == theirs,
    "differ": sorted(map(str, set(ours.items()) ^ set(theirs.items())))[:6],
    "epochs": status.epoch,
    "said": said,
    "notices": job.notices[-20:],
}), flush=True)
"""


def run(place: Path, faults: str) -> dict[str, Any]:
    script = place / "job.py"
    script.write_text(textwrap.dedent(JOB))
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(script), str(place), faults],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_executors_are_lost_in_every_way(tmp_path: Path) -> None:
    found = run(tmp_path, "one,two at once,in a checkpoint,in a recovery")
    assert found["equal"], f"the output differs: {found['differ']}"
    said = found["said"]
    assert said["one"]["backup"] >= 4, "the slices of one node of four, of each stage, had backups"
    assert said["one"]["durable"] == 0, "nothing had to come from the durable store"
    assert all(s["recoveries"] >= 1 for s in said.values())
    assert any("from backups" in notice for notice in found["notices"])


def test_a_start_a_process_a_hang_and_everything_at_once(tmp_path: Path) -> None:
    found = run(tmp_path, "in a start,a worker,a hang,all")
    assert found["equal"], f"the output differs: {found['differ']}"
    assert found["said"]["all"]["durable"] > 0, "when all are gone, the durable checkpoint restores"
