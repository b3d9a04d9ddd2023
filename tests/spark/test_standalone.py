"""A standalone master with two workers, in processes of their own: the cluster that a user starts by hand."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.spark.child import daemon

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]

JOB = """
import json, sys
from pathlib import Path

import polars as pl
import penstock as ps

master, place = sys.argv[1], Path(sys.argv[2])


def make(first, n, rng):
    return pl.DataFrame({"word": [f"w{v * 7919 % 97}" for v in range(first, first + n)]})


def build(out):
    flow = ps.Flow("standalone")
    words = flow.source("in", ps.generator(make, rows=4_000, schema={"word": str}))
    words.key_by("word").aggregate("counts", n=ps.count()).sink("out", ps.parquet(out, durable=False))
    return flow


if __name__ == "__main__":
    settings = dict(instances=2, slices=8, epoch_rows=500)
    ps.run_local(build(place / "local"), **settings)
    nodes = set()
    job = ps.run(build(place / "spark"), master=master, checkpoint=str(place / "ck"), **settings)
    observe = job._runtime._observe

    def watch(event):
        nodes.update(r.node for r in getattr(event, "reports", ()) if r.stage == "counts")
        observe(event)

    job._runtime._observe = watch
    assert job.wait(200), "it hangs"
    ours, theirs = (ps.read_output(place / p).sort(pl.all()) for p in ("spark", "local"))
    print(json.dumps({"equal": ours.equals(theirs), "rows": ours.height, "nodes": sorted(nodes)}), flush=True)
"""


def test_the_same_flow_on_a_standalone_cluster(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    with contextlib.ExitStack() as stack:
        daemons = tmp_path / "daemons"
        daemons.mkdir()
        _, master = stack.enter_context(daemon("master.Master", ready=r"spark://127\.0\.0\.1:\d+", work=daemons))
        for _ in range(2):
            size = ["--cores", "1", "--memory", "1g", master]
            stack.enter_context(
                daemon("worker.Worker", *size, ready="Successfully registered with master", work=daemons)
            )
        path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        done = subprocess.run(
            [sys.executable, str(tmp_path / "job.py"), master, str(tmp_path)],
            env={**os.environ, "PYTHONPATH": path, "SPARK_LOCAL_IP": "127.0.0.1"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-4_000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert result["equal"], "the output is not the local engine's"
    assert result["rows"] > 97
    assert len(result["nodes"]) == 2, "the containers live on both workers' executors"
