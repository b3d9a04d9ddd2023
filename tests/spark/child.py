"""Jobs on real executors, in a process of their own: ``local-cluster`` starts a Spark, and there is one to a process.

A test file of this directory holds both halves: the tests, and under ``if __name__ == "__main__"`` the job, which is
run as a script and prints what it found as one line of JSON. Operators that are defined in it travel to executors by
value, as a user's do. The rest of what both halves need is here: the way to run the script, to find the executors, to
wait for something that the controller knows, to compare what sinks have, and to start a cluster's daemons.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import psutil
import pyspark

import penstock as ps
from penstock.control.controller import Controller
from penstock.engines.job import Job

ROOT = Path(__file__).resolve().parents[2]
SPARK_HOME = Path(pyspark.__file__).parent
UP_S = 240.0


def run(script: str, *args: object, timeout_s: float) -> dict[str, Any]:
    """Run a test file as a script, and take what it printed last."""
    done = finish(script, *args, timeout_s=timeout_s)
    assert done.returncode == 0, done.stderr[-4_000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def finish(script: str, *args: object, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a test file as a script to its end, whatever that is."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, script, *map(str, args)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def say(**found: object) -> None:
    """What the script found: its last line."""
    print(json.dumps(found), flush=True)


@contextlib.contextmanager
def daemon(name: str, *args: str, ready: str, work: Path, host: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """One of Spark's daemons, and what ``ready`` matched in its log. Ended with the block."""
    env = {
        **os.environ,
        "SPARK_HOME": str(SPARK_HOME),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_WORKER_DIR": str(work),
        "SPARK_DAEMON_JAVA_OPTS": "-Dspark.decommission.enabled=true -XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    on = ["--host", host, "--port", "0", "--webui-port", "0"]
    command = [str(SPARK_HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", *on, *args]
    process = subprocess.Popen(command, env=env, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True)
    seen: list[str] = []
    found = threading.Event()

    def read() -> None:
        for text in process.stdout or ():
            seen.append(text)
            if re.search(ready, text):
                found.set()
        found.set()  # it ended

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert found.wait(UP_S), f"{name} is not up:\n{''.join(seen[-20:])}"
        match = re.search(ready, "".join(seen))
        assert match, f"{name} ended:\n{''.join(seen[-20:])}"
        yield process, match[0]
    finally:
        process.terminate()
        process.wait(60)
        reader.join(60)
        assert process.stdout is not None
        process.stdout.close()


def executors() -> list[psutil.Process]:
    """Those of this process's Spark, the oldest first."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if any("CoarseGrainedExecutorBackend" in part for part in process.cmdline()):
                found.append(process)
        except psutil.Error:
            pass  # it ended while we looked
    return sorted(found, key=lambda p: float(p.create_time()))


def node_of(executor: psutil.Process) -> str:
    """The name of the node that an executor is: its number."""
    parts: list[str] = executor.cmdline()
    return parts[parts.index("--executor-id") + 1]


def kill(victims: list[psutil.Process]) -> None:
    for victim in victims:
        victim.send_signal(signal.SIGKILL)


class Watch:
    """A running job, watched from within: after every event somebody who waits looks again."""

    def __init__(self, job: Job, limit_s: float) -> None:
        self.job = job
        self.limit_s = limit_s
        self.runtime = job._runtime
        self.on_event: list[Callable[[Any], None]] = []
        self._turned = threading.Condition()
        self._handle = self.runtime.handle
        self.runtime.handle = self._watched  # type: ignore[method-assign]

    def _watched(self, event: Any) -> None:
        self._handle(event)
        for hear in self.on_event:
            hear(event)
        with self._turned:
            self._turned.notify_all()

    @property
    def controller(self) -> Controller:
        assert self.runtime.controller is not None, "the job has not started"
        return self.runtime.controller

    def until(self, what: str, condition: Callable[[Controller], object]) -> None:
        def met() -> bool:
            c = self.runtime.controller
            return self.runtime.ended.is_set() or (c is not None and bool(condition(c)))

        with self._turned:
            ok = self._turned.wait_for(met, self.limit_s)
        if self.runtime.ended.is_set():
            self.job.wait()  # raises what ended it
        assert ok, f"waited in vain for: {what}; {self.job.status()}"


def checkpoint_open(c: Controller) -> bool:
    """Has a checkpoint begun that is not complete yet?"""
    return c.checkpoints.open is not None


def at_rest(c: Controller) -> bool:
    """Is everything done that was asked for: nothing moves, grows, shrinks, is handed over or recovers?"""
    return c.phase == "running" and not (c.moves.by_slice or c.resizes.wanted)


TICK_S = 0.4


def paced(epoch_rows: int, ahead: int = 0) -> dict[str, Any]:
    """For a generator: after ``ahead`` epochs the next come one in each tick, and each is whole, so that they are cut
    as without a pace. Epochs upon epochs would take the processors from executors that are being started.
    """
    began: list[float] = []

    def ticks() -> float:
        now = time.monotonic()
        if not began:
            began.append(now)
            return 0.0
        return float(ahead + (now - began[0]) // TICK_S)

    return {"rows_per_s": epoch_rows, "clock": ticks}


def digests(out: Path, sinks: str) -> dict[tuple[str, int], str]:
    """(sink, epoch) -> a digest of its rows in an order of their own."""
    found = {}
    for sink in sinks:
        for (epoch,), rows in ps.read_output(out / sink).group_by("epoch"):
            buffer = io.BytesIO()
            rows.sort(pl.all()).write_ipc(buffer)
            found[sink, int(epoch)] = hashlib.sha256(buffer.getvalue()).hexdigest()  # type: ignore[call-overload]
    return found


def own_digests(out: Path) -> dict[tuple[str, int], str]:
    """The same of a user's sink that writes a file for each epoch into ``own``, and replaces it if the epoch comes
    again.
    """
    return {("own", int(f.stem)): hashlib.sha256(f.read_bytes()).hexdigest() for f in (out / "own").iterdir()}


def differences(ours: dict[Any, str], theirs: dict[Any, str]) -> list[str]:
    return sorted(map(str, set(ours.items()) ^ set(theirs.items())))[:6]
