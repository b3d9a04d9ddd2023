"""Checkpoints on S3, and on a disk, that fail, hang, dawdle and go away: the output is that of an undisturbed run.

S3 is moto's server, on this machine.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import penstock as ps
from penstock.connectors import retrying as retrying_module
from penstock.connectors import store as store_module
from penstock.connectors.store import DirectoryLock, FsspecStore
from penstock.engines import job as job_module
from penstock.engines.job import Job, start
from penstock.errors import CheckpointError, CheckpointInUse, StoreAway
from penstock.state.store import FailingStore, Store
from penstock.testing import rows
from tests.crash import driver_job

pytestmark = pytest.mark.crash

BUCKET = "state"
ROWS = 80
FRAME = pl.DataFrame({"k": [f"k{i % 7}" for i in range(ROWS)], "x": list(range(ROWS))})
SETTINGS: dict[str, Any] = {
    "instances": 2,
    "slices": 4,
    "epoch_rows": 10,
    "checkpoint_interval_s": 0.0,
    "deltas_max": 2,
    "manifests_kept": 2,
    "epochs_in_flight": 1,
}


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    """What a process needs to find the server."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    _, port = moto.get_host_and_port()
    yield {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": "something",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1",
    }
    moto.stop()


@pytest.fixture
def s3(server: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """An empty place on S3."""
    import s3fs

    for name, value in server.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    fs = s3fs.S3FileSystem()
    if not fs.exists(BUCKET):
        fs.mkdir(BUCKET)
    return f"s3://{BUCKET}/{tmp_path.name}"


@pytest.fixture(params=["local", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "checkpoint") if request.param == "local" else request.getfixturevalue("s3")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying_module, "PAUSE_S", 0.001)
    monkeypatch.setattr(retrying_module, "PAUSE_S_MAX", 0.01)


@pytest.fixture
def behind(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Store], Store]], None]:
    """Put something between the retries and the store itself."""

    def put(wrap: Callable[[Store], Store]) -> None:
        monkeypatch.setattr(job_module, "FsspecStore", lambda url: wrap(FsspecStore(url)))

    return put


def build(out: Path, saw: Callable[[pl.DataFrame], pl.DataFrame] = lambda frame: frame) -> ps.Flow:
    flow = ps.Flow("stored")
    stream = flow.source("in", rows(FRAME)).flat_map("saw", saw, schema=dict(FRAME.schema))
    counted = stream.key_by("k").aggregate("sums", n=ps.count(), x=ps.sum("x"))
    counted.sink("out", ps.parquet(out, durable=False))
    return flow


def begin(flow: ps.Flow, url: str, **settings: Any) -> Job:
    return start(flow, engine="local", config=ps.Config(**{**SETTINGS, "checkpoint": url, **settings}))


def run(flow: ps.Flow, url: str, **settings: Any) -> Job:
    job = begin(flow, url, **settings)
    assert job.wait(120), "it hangs"
    return job


def output(out: Path) -> pl.DataFrame:
    return ps.read_output(out).sort(pl.all())


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> pl.DataFrame:
    place = tmp_path_factory.mktemp("expected")
    run(build(place / "out"), str(place / "checkpoint"))
    return output(place / "out")


# ---- the store itself ----


def test_s3_is_a_store(s3: str) -> None:
    store = FsspecStore(s3)
    assert store.list() == [] and not store.exists("a/x")
    store.put("a/x", b"1")
    store.put("a/x", b"2")
    assert store.get("a/x") == b"2" and store.exists("a/x")
    assert store.put_if_absent("a/y", b"first") is True
    assert store.put_if_absent("a/y", b"second") is False
    assert store.list() == ["a/x", "a/y"] and store.list("a/y") == ["a/y"] and store.list("b/") == []
    data, tag = store.get_tagged("a/x")
    assert data == b"2" and store.put_if_tagged("a/x", b"3", tag)
    assert not store.put_if_tagged("a/x", b"4", tag) and store.get("a/x") == b"3"
    store.delete("a/x")
    store.delete("a/x")
    with pytest.raises(FileNotFoundError):
        store.get("a/x")
    assert store.list() == ["a/y"]


def test_of_many_creators_one_wins(s3: str) -> None:
    barrier = threading.Barrier(6)
    won: list[int] = []

    def create(i: int) -> None:
        store = FsspecStore(s3)
        barrier.wait()
        if store.put_if_absent("leader", str(i).encode()):
            won.append(i)

    threads = [threading.Thread(target=create, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and FsspecStore(s3).get("leader") == str(won[0]).encode()


def test_what_will_not_pass_is_said_at_once(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="bucket does not exist"):
        run(build(tmp_path / "out"), "s3://there-is-none/x")
    with pytest.raises(CheckpointError, match="no address that fsspec knows"):
        run(build(tmp_path / "out"), "gopher://x/y")
    fs = FsspecStore(s3)._remote()[0]

    def forbidden(*_: Any, **__: Any) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(fs, "pipe_file", forbidden)
    with pytest.raises(CheckpointError, match="may not be written"):
        FsspecStore(s3).put("x", b"1")


# ---- one job for each place ----


def test_two_jobs_in_one_place_are_refused_on_s3_too(s3: str, tmp_path: Path) -> None:
    with DirectoryLock(s3, job="first", now_s=time.time()), pytest.raises(CheckpointInUse, match="first"):
        begin(build(tmp_path / "out"), s3)
    run(build(tmp_path / "out"), s3)
    assert not FsspecStore(s3).exists(store_module.LOCK_NAME), "given back at the end"


def test_of_two_that_take_over_one_gets_it(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have read the same expired lease; the second to write finds it changed."""
    DirectoryLock(s3, job="dead", now_s=1000.0)
    taken: list[DirectoryLock] = []
    honest = FsspecStore.put_if_tagged

    def late(self: FsspecStore, name: str, data: bytes, tag: str | None) -> bool:
        monkeypatch.setattr(FsspecStore, "put_if_tagged", honest)
        taken.append(DirectoryLock(s3, job="quick", now_s=2000.0))
        return self.put_if_tagged(name, data, tag)

    monkeypatch.setattr(FsspecStore, "put_if_tagged", late)
    with pytest.raises(CheckpointInUse, match="quick"):
        DirectoryLock(s3, job="slow", now_s=2000.0)
    taken[0].heartbeat(2001.0)
    taken[0].release()


HOLDER = """
import sys, time
from penstock.connectors.store import DirectoryLock
lock = DirectoryLock(sys.argv[1], job="held", now_s=time.time())
print("held", flush=True)
sys.stdin.read()
"""


def test_a_lease_whose_process_is_gone_is_taken_at_once(s3: str, server: dict[str, str]) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, s3],
        env={**os.environ, **server},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with pytest.raises(CheckpointInUse, match=str(holder.pid)):
        DirectoryLock(s3, now_s=time.time())
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    DirectoryLock(s3, now_s=time.time()).release()


def test_a_lease_that_another_took_ends_the_job(s3: str, tmp_path: Path) -> None:
    """Its log records are created, never replaced: whatever the lease says, only one of two jobs gets on."""
    store = FsspecStore(s3)
    out = tmp_path / "out"
    intruded = threading.Event()

    def saw(frame: pl.DataFrame) -> pl.DataFrame:
        if not intruded.is_set() and 25 in frame["x"]:
            intruded.set()
            store.put("log/000000000004.json", b"a record of another driver")
        return frame

    with pytest.raises(CheckpointInUse, match="epoch 4 was logged by another start"):
        run(build(out, saw), s3)
    assert store.get("log/000000000004.json") == b"a record of another driver"


# ---- killed and resumed ----


@pytest.mark.slow
def test_a_job_on_s3_is_killed_and_goes_on(s3: str, server: dict[str, str], tmp_path: Path) -> None:
    script = Path(driver_job.__file__)
    path = os.pathsep.join([str(script.parents[2] / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])

    def life(place: Path, *options: str) -> int:
        done = subprocess.run(
            [sys.executable, "-W", "error", str(script), str(place), "--small", *options],
            env={**os.environ, **server, "PYTHONPATH": path, "POLARS_MAX_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        return done.returncode

    def found(place: Path) -> dict[str, bytes]:
        files = (f for f in sorted((place / "out").rglob("*.parquet")) if "_staging" not in f.parts)
        return {str(f.relative_to(place)): f.read_bytes() for f in files}

    assert life(tmp_path / "undisturbed") == 0
    for step in ("after-log:3", "after-publish:2", "before-manifest:2"):
        assert life(tmp_path / "killed", "--checkpoint", s3, "--die", step) == -signal.SIGKILL
    assert life(tmp_path / "killed", "--checkpoint", s3) == 0
    assert found(tmp_path / "killed") == found(tmp_path / "undisturbed")
    assert not (tmp_path / "killed" / "checkpoint").exists(), "all of it was on S3"


# ---- errors ----


@pytest.mark.parametrize("after", [False, True], ids=["before it takes effect", "after it took effect"])
def test_a_write_that_fails_once_is_not_noticed(
    url: str, after: bool, expected: pl.DataFrame, behind: Callable[..., None], tmp_path: Path
) -> None:
    """For many k on a disk, for some on S3: the k-th write fails, the job does not."""
    counting: list[FailingStore] = []

    def wrap(fail_at: int) -> Callable[[Store], Store]:
        def make(inner: Store) -> Store:
            counting.append(FailingStore(inner, fail_at, once=True, after=after))
            return counting[-1]

        return make

    behind(wrap(10**9))
    run(build(tmp_path / "count"), f"{url}/count")
    total = counting[-1].writes
    assert total > 25
    for k in range(1 + after, total + 1, 25 if url.startswith("s3") else 5):
        behind(wrap(k))
        job = run(build(tmp_path / str(k)), f"{url}/{k}")
        assert job.status().recoveries == 0 and output(tmp_path / str(k)).equals(expected), f"write {k}"


class Every(FailingStore):
    """Every n-th operation fails, reads and listings too."""

    def __init__(self, inner: Store, n: int, error: Callable[[], Exception]) -> None:
        super().__init__(inner, 10**9)
        self.n, self.error, self.count = n, error, 0
        self.lock = threading.Lock()

    def _fails(self) -> bool:
        with self.lock:
            self.count += 1
            fails = self.count % self.n == 0
        if fails:
            raise self.error()
        return False

    def get(self, name: str) -> bytes:
        self._fails()
        return self.inner.get(name)

    def list(self, prefix: str = "") -> list[str]:
        self._fails()
        return self.inner.list(prefix)


@pytest.mark.parametrize("error", [lambda: OSError(errno.EBUSY, "SlowDown"), TimeoutError], ids=["busy", "time-out"])
def test_every_third_operation_fails(
    url: str, error: Callable[[], Exception], expected: pl.DataFrame, behind: Callable[..., None], tmp_path: Path
) -> None:
    behind(lambda inner: Every(inner, 3, error))
    job = run(build(tmp_path / "out"), url)
    assert output(tmp_path / "out").equals(expected) and job.status().recoveries == 0


class Gate(FailingStore):
    """Away while ``shut`` is set."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner, 10**9)
        self.shut = threading.Event()

    def _fails(self) -> bool:
        if self.shut.is_set():
            raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody is there")
        return False

    def get(self, name: str) -> bytes:
        self._fails()
        return self.inner.get(name)

    def list(self, prefix: str = "") -> list[str]:
        self._fails()
        return self.inner.list(prefix)


class Watched:
    """A flow that shuts the gate at one row, and tells when it has seen another."""

    def __init__(self, behind: Callable[..., None], out: Path, shut_at: int, tell_at: int) -> None:
        self.gates: list[Gate] = []
        self.seen = threading.Event()

        def wrap(inner: Store) -> Store:
            self.gates.append(Gate(inner))
            return self.gates[-1]

        def saw(frame: pl.DataFrame) -> pl.DataFrame:
            if shut_at in frame["x"]:
                self.gates[-1].shut.set()
            if tell_at in frame["x"]:
                self.seen.set()
            return frame

        behind(wrap)
        self.flow = build(out, saw)


def test_processing_goes_on_while_the_store_is_away_and_nothing_is_published(
    url: str, expected: pl.DataFrame, behind: Callable[..., None], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    watched = Watched(behind, out, shut_at=25, tell_at=65)
    job = begin(watched.flow, url, store_retries=1)
    assert watched.seen.wait(120), "epochs stand still while the store is away"
    assert any("does not answer" in notice for notice in job.notices)
    assert job.status().epoch <= 3, "an epoch was published that is not in the log"
    assert ps.read_output(out)["epoch"].max() <= 3
    watched.gates[-1].shut.clear()
    assert job.wait(120)
    assert output(out).equals(expected) and job.status().recoveries == 0
    assert not any("does not answer" in notice for notice in job.notices), "and when it is over, that is not said"


def test_a_store_that_stays_away_ends_the_job_cleanly(
    url: str, expected: pl.DataFrame, behind: Callable[..., None], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    watched = Watched(behind, out, shut_at=25, tell_at=65)
    with pytest.raises(StoreAway, match="did not answer") as caught:
        run(watched.flow, url, store_retries=1, store_away_s=0.3)
    assert "start again" in caught.value.remedy
    behind(lambda inner: inner)
    run(build(out), url)
    assert output(out).equals(expected)


def test_slow_writes_of_state_do_not_hold_up_epochs(
    url: str, expected: pl.DataFrame, behind: Callable[..., None], tmp_path: Path
) -> None:
    """The first delta is not written before four more epochs have been through."""
    seen = threading.Event()

    class Slow(FailingStore):
        def put(self, name: str, data: bytes) -> None:
            if name.endswith(".delta"):
                assert seen.wait(120), "epochs wait for a delta"
            super().put(name, data)

    def saw(frame: pl.DataFrame) -> pl.DataFrame:
        if 55 in frame["x"]:
            seen.set()
        return frame

    behind(lambda inner: Slow(inner, 10**9))
    run(build(tmp_path / "out", saw), url, epochs_in_flight=2)
    assert output(tmp_path / "out").equals(expected)


def test_a_write_that_hangs_is_timed_out_and_tried_again(
    url: str, expected: pl.DataFrame, behind: Callable[..., None], tmp_path: Path
) -> None:
    release = threading.Event()
    hung: list[str] = []

    class Hangs(FailingStore):
        """The first write of each kind never answers, though it takes effect when it is too late."""

        def _hang(self, name: str) -> None:
            kind = name.partition("/")[0]
            if kind not in hung:
                hung.append(kind)
                release.wait(120)

        def put(self, name: str, data: bytes) -> None:
            self._hang(name)
            super().put(name, data)

        def put_if_absent(self, name: str, data: bytes) -> bool:
            self._hang(name)
            return super().put_if_absent(name, data)

    behind(lambda inner: Hangs(inner, 10**9))
    run(build(tmp_path / "out"), url, store_timeout_s=0.5)
    release.set()
    assert {*hung} - {"journal"} == {"job.json", "log", "manifests", "state"}
    assert output(tmp_path / "out").equals(expected)
