"""Another user of the machine tries to get into a job on ``local-cluster``: every port, page, socket, file is refused.

The job is the second half of this file (see ``child.py``); the other user is ``intruder.py``. Before the job ends, its
JVM is killed, and what the job says of that is looked at.
"""

import json
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import polars as pl
import psutil
import pytest

import penstock as ps
from penstock.config import Config
from penstock.engines.job import start
from penstock.engines.spark import place, security
from penstock.errors import EngineError
from tests.spark.child import Watch, finish, paced, say

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(300)]

MASTER = "local-cluster[2,1,1024]"
INTRUDER = Path(__file__).with_name("intruder.py")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    done = finish(__file__, tmp_path_factory.mktemp("security"), timeout_s=250)
    assert done.returncode == 0, done.stderr[-4_000:]
    return {**json.loads(done.stdout.splitlines()[-1]), "stderr": done.stderr}


def test_another_user_gets_in_nowhere(job: dict[str, Any]) -> None:
    attempts: dict[str, str] = job["attempts"]
    assert {what: came for what, came in attempts.items() if came.startswith("in")} == {}
    tried = [what.split(" ")[0] for what in attempts]
    for kind in ("port", "page", "py4j", "socket", "file", "listing", "planting", "no", "a"):
        assert tried.count(kind) > 1, f"nothing was tried of the kind '{kind}'"
    assert sum(came == "refused: 403" for came in attempts.values()) >= 3 * 3, "the master's and two workers' pages"
    assert sum(came == "refused: no challenge" for came in attempts.values()) >= 6, "Spark's own ports"


def test_no_secret_is_where_others_can_read(job: dict[str, Any]) -> None:
    assert job["processes"] >= 5
    assert job["on command lines"] == []


def test_nothing_that_the_job_made_is_open_to_others(job: dict[str, Any]) -> None:
    assert job["open"] == {}


def test_a_killed_jvm_is_told_in_one_line(job: dict[str, Any]) -> None:
    assert job["error"].startswith("Spark's JVM (process ") and "was killed by signal 9 (SIGKILL)" in job["error"]
    assert "Start the job again" in job["error"]
    for word in ("Traceback", "py4j", "netty", "\tat "):
        assert word not in job["stderr"], job["stderr"][-3_000:]


# -- the job -----------------------------------------------------------------------------------------------------------


def make(first: int, n: int, rng: object) -> pl.DataFrame:
    return pl.DataFrame({"word": [f"w{v % 97}" for v in range(first, first + n)]})


def build(out: Path) -> ps.Flow:
    flow = ps.Flow("private")
    words = flow.source("in", ps.generator(make, rows=100_000_000, schema={"word": str}, **paced(500)))
    words.key_by("word").aggregate("counts", n=ps.count()).sink("out", ps.parquet(out, durable=False))
    return flow


def listening(processes: list[psutil.Process]) -> list[int]:
    found = {c.laddr.port for p in processes for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    return sorted(found)


def sockets() -> list[str]:
    """The paths of Unix sockets below our own directories."""
    places = (str(place.place()), os.environ["XDG_RUNTIME_DIR"])
    with open("/proc/net/unix") as file:
        paths = {line.split()[-1] for line in file}
    return sorted(p for p in paths if p.startswith(places))


def below(*roots: Path) -> tuple[list[str], list[str]]:
    """Files and directories."""
    found = [p for root in roots for p in (root, *root.rglob("*"))]
    return [str(p) for p in found if p.is_file()], [str(p) for p in found if p.is_dir()]


def opened_to_others(paths: list[str]) -> dict[str, str]:
    modes = {path: stat.S_IMODE(os.lstat(path).st_mode) for path in paths if os.path.exists(path)}
    return {path: oct(mode) for path, mode in modes.items() if mode & 0o077}


def main(place: Path) -> None:
    os.umask(0o022)  # as most users have it
    place.chmod(0o755)
    for parent in place.parents:
        if parent.stat().st_mode & 0o005 != 0o005 and parent != Path("/"):
            parent.chmod(0o755)  # the way there is open: what is inside must shut itself
    checkpoint, local = place / "checkpoint", place / "local"
    local.mkdir()
    config = Config(
        master=MASTER,
        checkpoint=str(checkpoint),
        instances=2,
        slices=8,
        epoch_rows=500,
        checkpoint_interval_s=0.5,
        spark={"spark.local.dir": str(local)},
    )
    started = start(build(place / "out"), config=config)
    watch = Watch(started, 90)
    watch.until("two checkpoints", lambda c: c.checkpoints.manifest.epoch > 1 and c.epochs.published > 3)
    conf = started._runtime.engine.session.sparkContext.getConf()  # type: ignore[union-attr]
    secrets = [conf.get(name) for name in (security.SECRET, security.PAGES_KEY)]
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    shown = [p.pid for p in processes if any(s in part for s in secrets for part in p.cmdline())]
    files, directories = below(checkpoint, *local.iterdir())
    # A file of Spark's may go while it is looked at, and where an outer directory is shut an inner one need not be.
    own = opened_to_others([p for p in (*files, *directories) if p.startswith(str(checkpoint))])
    ports = listening(processes)
    todo = {
        "spark": [port for port in ports if speaks_spark(port)],
        "pages": ports,
        "py4j": ports,
        "sockets": sockets(),
        "files": files[:400],
        "directories": directories[:100],
        "program": [port for port in ports if speaks_spark(port)],
    }
    done = subprocess.run(
        [sys.executable, str(INTRUDER)], input=json.dumps(todo), capture_output=True, text=True, timeout=150, check=True
    )
    jvm = next(p for p in psutil.Process().children() if p.name() == "java")
    ended = threading.Thread(target=jvm.send_signal, args=(signal.SIGKILL,))
    ended.start()
    error = ""
    try:
        started.wait(60)
    except EngineError as found:
        error = str(found)
    say(**{
        "attempts": json.loads(done.stdout.splitlines()[-1]),
        "processes": len(processes),
        "on command lines": shown,
        "open": own,
        "error": error,
    })  # fmt: skip


def speaks_spark(port: int) -> bool:
    """Is it a port of Spark's protocol? Pages answer HTTP, and Py4J's gateway text."""
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/")
        connection.getresponse()
        return False
    except http.client.BadStatusLine as error:
        return "py4j" not in str(error)
    except OSError:
        return True
    finally:
        connection.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
