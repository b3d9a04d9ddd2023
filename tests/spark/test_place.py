"""What Spark leaves on this machine: nothing at the end, and nothing of a killed driver when the next one starts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pyspark
import pytest

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.timeout(180)]

DRIVER = """
import os, signal, sys
import penstock as ps
from penstock.config import Config
from penstock.engines.spark.session import open_session

session, _, _ = open_session(Config(master=sys.argv[1], class_archive=False), "place")
assert session.sparkContext.parallelize(range(4), 2).map(str).collect() == ["0", "1", "2", "3"]
print(session.sparkContext._jvm.java.lang.ProcessHandle.current().pid(), flush=True)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
session.stop()
"""
SYSTEM = "hsperfdata_"
"""Java's own, of all Javas of a user; it looks after them itself."""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """With a short name: there are sockets in it."""
    with TemporaryDirectory(prefix="pk-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


def run(master: str, how: str, temporary: Path) -> int:
    """Run a driver to its end; the process id of its JVM."""
    environ: dict[str, Any] = {**os.environ, "TMPDIR": str(temporary)}
    environ.pop("SPARK_LOCAL_DIRS", None)
    driver = subprocess.run(
        [sys.executable, "-c", DRIVER, master, how], env=environ, capture_output=True, text=True, check=False
    )
    assert driver.returncode == (-signal.SIGKILL if how == "killed" else 0), driver.stderr
    return int(driver.stdout.split()[-1])


def left(temporary: Path) -> list[str]:
    return sorted(entry.name for entry in temporary.iterdir() if not entry.name.startswith(SYSTEM))


def await_end(pid: int) -> None:
    """A JVM ends when it sees that its driver has."""
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(timeout=120)


@pytest.mark.parametrize("master", ["local[2]", "local-cluster[1,1,1024]"])
def test_spark_leaves_nothing_and_the_next_driver_removes_what_a_killed_one_left(master: str, temporary: Path) -> None:
    work = Path(os.environ.get("SPARK_HOME") or pyspark.__path__[0]) / "work"
    before = sorted(work.iterdir()) if work.exists() else []
    jvm = run(master, "killed", temporary)
    (name,) = left(temporary)
    assert name.startswith("penstock-spark-") and (temporary / name).stat().st_mode & 0o077 == 0
    await_end(jvm)
    await_end(run(master, "ended", temporary))
    # What the second JVM wrote in its last moment is for the next driver to remove.
    assert name not in left(temporary) and all(other.startswith("penstock-spark-") for other in left(temporary))
    assert (sorted(work.iterdir()) if work.exists() else []) == before
