"""A standalone master with two workers, in processes of their own: the cluster that a user starts by hand."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyspark
import pytest

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
SPARK_HOME = Path(pyspark.__file__).parent
UP_S = 60.0

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


@contextlib.contextmanager
def spark_class(name: str, *args: str, ready: str, work: Path) -> Iterator[str]:
    """One of Spark's daemons; gives what ``ready`` matched in its log. Ended with the block."""
    env = {
        **os.environ,
        "SPARK_HOME": str(SPARK_HOME),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOG_DIR": str(work),
        "SPARK_WORKER_DIR": str(work),
    }
    command = [str(SPARK_HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", *args]
    process = subprocess.Popen(command, env=env, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    seen: list[str] = []
    found = threading.Event()

    def read() -> None:
        for line in process.stdout or ():
            seen.append(line)
            if re.search(ready, line):
                found.set()
        found.set()  # it ended

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert found.wait(UP_S), f"{name} is not up:\n{''.join(seen[-20:])}"
        match = re.search(ready, "".join(seen))
        assert match, f"{name} ended:\n{''.join(seen[-20:])}"
        yield match[0]
    finally:
        process.terminate()
        process.wait(30)
        reader.join(10)
        process.stdout.close()


def test_the_same_flow_on_a_standalone_cluster(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    with contextlib.ExitStack() as stack:
        daemons = tmp_path / "daemons"
        daemons.mkdir()
        on = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
        master = stack.enter_context(spark_class("master.Master", *on, ready=r"spark://127\.0\.0\.1:\d+", work=daemons))
        for _ in range(2):
            worker = ["--cores", "1", "--memory", "1g", *on, master]
            stack.enter_context(
                spark_class("worker.Worker", *worker, ready="Successfully registered with master", work=daemons)
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
