"""Stores and the directory lock: atomic, explained in our words, and never two jobs in one directory."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.connectors import store as store_module
from penstock.connectors.retrying import HUNG_MAX, RetryingStore, transient
from penstock.connectors.store import LOCK_NAME, DirectoryLock, FsspecStore, local_path
from penstock.errors import CheckpointError, CheckpointInUse, StorageFull, StoreAway
from penstock.state.store import FailingStore, MemoryStore, Store


@pytest.fixture(params=["memory", "local", "fsspec"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "memory":
        return MemoryStore()
    if request.param == "local":
        return FsspecStore(str(tmp_path / "not" / "yet"))
    return FsspecStore(f"memory://{tmp_path.name}/state")


def test_the_protocol(store: Store) -> None:
    assert isinstance(store, Store)
    assert store.list() == [] and not store.exists("a/x")
    store.put("a/x", b"1")
    store.put("a/x", b"2")
    store.put("b", b"")
    assert store.get("a/x") == b"2" and store.get("b") == b"" and store.exists("a/x")
    assert store.put_if_absent("a/y", b"first") is True
    assert store.put_if_absent("a/y", b"second") is False
    assert store.get("a/y") == b"first"
    assert store.list() == ["a/x", "a/y", "b"]
    assert store.list("a/") == ["a/x", "a/y"] == store.list("a") and store.list("a/y") == ["a/y"]
    assert store.list("nowhere/") == []
    store.delete("a/x")
    store.delete("a/x")
    assert store.list() == ["a/y", "b"]
    with pytest.raises(FileNotFoundError):
        store.get("a/x")


def test_only_one_of_many_writers_wins(store: Store) -> None:
    if isinstance(store, FsspecStore) and store.root is None:
        pytest.skip("fsspec's memory file system does not create exclusively")
    barrier = threading.Barrier(8)
    won: list[int] = []

    def run(i: int) -> None:
        barrier.wait()
        if store.put_if_absent("leader", str(i).encode()):
            won.append(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and store.get("leader") == str(won[0]).encode()


def test_stores_travel_to_workers(tmp_path: Path) -> None:
    for url in (str(tmp_path), f"memory://{tmp_path.name}"):
        first = FsspecStore(url, sync=False)
        first.put("x", b"1")
        again = pickle.loads(pickle.dumps(first))
        assert again.get("x") == b"1" and again.sync is False


def test_a_write_that_fails_leaves_the_old_value_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FsspecStore(str(tmp_path))
    store.put("x", b"old")

    def refuse(*_: Any) -> None:
        raise OSError(errno.EIO, "broken")

    for call in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(store_module.os, call, refuse)
            with pytest.raises(OSError, match="broken"):
                store.put("x", b"new")
        assert store.get("x") == b"old" and os.listdir(tmp_path) == ["x"]


def test_without_sync_nothing_is_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(store_module.os, "fsync", flushed.append)
    store = FsspecStore(str(tmp_path))
    store.put("cheap", b"1", sync=False)
    assert flushed == []
    store.put("dear", b"1")
    assert len(flushed) == 2, "the file and its directory"


def test_a_large_file_reaches_the_disk_bit_by_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a small one that somebody waits for waits for all of it."""
    sizes: list[int] = []
    monkeypatch.setattr(store_module, "FLUSH_BYTES", 100)
    monkeypatch.setattr(store_module.os, "fsync", lambda handle: sizes.append(os.fstat(handle).st_size))
    store = FsspecStore(str(tmp_path))
    store.put("x", bytes(range(250)))
    assert sizes[:3] == [100, 200, 250] and len(sizes) == 4
    assert store.get("x") == bytes(range(250))
    sizes.clear()
    store.put("cheap", bytes(range(250)), sync=False)
    store.put("empty", b"", sync=False)
    assert sizes == [] and store.get("cheap") == bytes(range(250)) and store.get("empty") == b""


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, StorageFull),
        (errno.EDQUOT, StorageFull),
        (errno.EROFS, CheckpointError),
        (errno.EACCES, CheckpointError),
    ],
)
@pytest.mark.parametrize("call", ["put", "put_if_absent"])
def test_errors_name_the_path_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, expected: type[Exception]
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(store_module.os, "fsync", refuse)
    with pytest.raises(expected) as caught:
        getattr(FsspecStore(str(tmp_path)), call)("deltas/d1", b"x")
    assert str(tmp_path / "deltas" / "d1") in str(caught.value)
    assert caught.value.remedy and caught.value.evidence["path"]


def test_a_file_in_the_place_of_the_directory_is_explained(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("not a directory")
    with pytest.raises(CheckpointError, match="is a directory"):
        FsspecStore(str(tmp_path / "state")).put("x", b"1")
    with pytest.raises(CheckpointError):
        DirectoryLock(str(tmp_path / "state"))


def test_left_over_temporaries_are_no_names_and_can_be_removed(tmp_path: Path) -> None:
    store = FsspecStore(str(tmp_path))
    store.put("d/x", b"1")
    (tmp_path / "d" / ".x.123.tmp").write_bytes(b"half")
    assert store.list() == ["d/x"]
    assert store.remove_temporaries() == 1 and os.listdir(tmp_path / "d") == ["x"]


@pytest.mark.parametrize("name", ["", "/etc/x", "../x", "a/../../x"])
def test_names_stay_inside(tmp_path: Path, name: str) -> None:
    with pytest.raises(AssertionError):
        FsspecStore(str(tmp_path)).put(name, b"x")


def test_local_addresses() -> None:
    assert local_path("/a/b") == "/a/b" == local_path("file:///a/b")
    assert local_path("x") == os.path.abspath("x")
    assert local_path("s3://b/x") is None


def test_failing_store_fails_from_its_kth_write_on() -> None:
    inner = MemoryStore()
    store = FailingStore(inner, fail_at=2)
    store.put("a", b"1")
    with pytest.raises(OSError, match="write 2"):
        store.put_if_absent("b", b"1")
    with pytest.raises(OSError, match="write 3"):
        store.delete("a")
    assert inner.list() == ["a"] and store.get("a") == b"1"
    once = FailingStore(MemoryStore(), fail_at=1, once=True, after=True)
    with pytest.raises(OSError, match="write 1"):
        once.put("a", b"1")
    once.put("b", b"1")
    assert once.list() == ["a", "b"]


# ---- the lock ----


def test_a_second_job_is_told_who_holds_the_directory(tmp_path: Path) -> None:
    url = str(tmp_path / "state")
    with DirectoryLock(url, job="top-words", started="2026-01-02 03:04") as lock:
        assert lock.held
        with pytest.raises(CheckpointInUse) as caught:
            DirectoryLock(url)
        for part in ("top-words", str(os.getpid()), "2026-01-02 03:04", url):
            assert part in str(caught.value)
        assert FsspecStore(url).list() == [], "the lock is not a name"
    DirectoryLock(url).release()


HOLDER = """
import sys
from penstock.connectors.store import DirectoryLock
lock = DirectoryLock(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


def start_holder(url: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_the_lock_dies_with_its_process(tmp_path: Path) -> None:
    url = str(tmp_path)
    holder = start_holder(url)
    with pytest.raises(CheckpointInUse, match=str(holder.pid)):
        DirectoryLock(url)
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    DirectoryLock(url).release()


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = DirectoryLock(str(tmp_path))
    child_waits, end_child = os.pipe()
    child_up, say_up = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end_child)
        os.write(say_up, b"!")
        os.read(child_waits, 1)  # lives until the test is over
        os._exit(0)
    try:
        assert os.read(child_up, 1) == b"!"
        assert lock._descriptor is not None
        os.close(lock._descriptor)  # what the kernel does when a process dies
        lock._descriptor = None
        DirectoryLock(str(tmp_path)).release()
    finally:
        os.close(end_child)
        os.waitpid(child, 0)
        for end in (child_waits, child_up, say_up):
            os.close(end)


def test_a_lease_is_renewed_lost_and_taken_over(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/lease"
    first = DirectoryLock(url, job="first", lease_s=60, now_s=1000.0)
    first.heartbeat(1050.0)
    with pytest.raises(CheckpointInUse, match="first"):
        DirectoryLock(url, job="second", lease_s=60, now_s=1100.0)
    second = DirectoryLock(url, job="second", lease_s=60, now_s=1111.0)
    with pytest.raises(CheckpointInUse, match="second"):
        first.heartbeat(1112.0)
    assert second.held and not first.held
    first.release()
    assert FsspecStore(url).exists(LOCK_NAME), "only its owner removes a lease"
    second.release()
    DirectoryLock(url, now_s=1113.0).release()


# ---- retries, time-outs, patience ----


class Flaky(MemoryStore):
    """Raises what it is given, one for each call, then works."""

    def __init__(self, *errors: Exception, after: bool = False) -> None:
        super().__init__()
        self.errors = list(errors)
        self.after = after
        self.calls = 0

    def _maybe(self) -> None:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)

    def put(self, name: str, data: bytes) -> None:
        if self.after:
            super().put(name, data)
        self._maybe()
        super().put(name, data)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        if self.after:
            won = super().put_if_absent(name, data)
            self._maybe()
            return won
        self._maybe()
        return super().put_if_absent(name, data)

    def get(self, name: str) -> bytes:
        self._maybe()
        return super().get(name)

    def delete(self, name: str) -> None:
        self._maybe()
        super().delete(name)


class Hand:
    """A clock that only pauses move."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pauses: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


def retrying(inner: Store, hand: Hand, **settings: Any) -> RetryingStore:
    settings = {"retries": 3, "timeout_s": 0.0, "away_s": 60.0, **settings}
    return RetryingStore(inner, clock=lambda: hand.now, sleep=hand.sleep, chance=lambda: 1.0, **settings)


def named(name: str, module: str = "botocore.exceptions", **fields: Any) -> Exception:
    """An error as a package that may not be there would raise it."""
    error: Exception = type(name, (Exception,), {"__module__": module, **fields})("it says")
    return error


def client_error(code: str, status: int) -> Exception:
    return named("ClientError", response={"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}})


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (OSError(errno.EIO, "x"), True),
        (OSError(errno.ESTALE, "x"), True),
        (OSError("no number"), True),
        (TimeoutError(), True),
        (ConnectionResetError(), True),
        (named("EndpointConnectionError"), True),
        (named("ReadTimeoutError"), True),
        (named("ClientOSError", "aiohttp.client_exceptions"), True),
        (client_error("SlowDown", 503), True),
        (client_error("Whatever", 500), True),
        (client_error("TooManyRequests", 429), True),
        (client_error("AccessDenied", 403), False),
        (named("NoCredentialsError"), False),
        (FileNotFoundError(errno.ENOENT, "x"), False),
        (PermissionError("x"), False),
        (OSError(errno.ENOSPC, "x"), False),
        (StorageFull("x"), False),
        (CheckpointError("x"), False),
        (ValueError("ours"), False),
    ],
    ids=repr,
)
def test_which_errors_may_pass(error: Exception, passes: bool) -> None:
    assert transient(error) is passes


def test_what_s3fs_made_of_a_busy_service_may_pass() -> None:
    error = OSError(errno.EINVAL, "the body was cut off")
    error.__cause__ = client_error("IncompleteBody", 400)
    assert transient(error)
    error.__cause__ = client_error("InvalidArgument", 400)
    assert not transient(error)


def test_a_hiccup_is_tried_again_with_growing_pauses() -> None:
    hand, inner = Hand(), Flaky(OSError(errno.EIO, "1"), TimeoutError(), ConnectionResetError())
    store = retrying(inner, hand)
    store.put("x", b"1")
    assert inner.items == {"x": b"1"} and inner.calls == 4
    assert hand.pauses == [0.1, 0.2, 0.4]


def test_chance_is_in_the_pauses() -> None:
    hand = Hand()
    store = RetryingStore(
        Flaky(OSError(errno.EIO, "1")), timeout_s=0, clock=lambda: hand.now, sleep=hand.sleep, chance=lambda: 0.0
    )
    store.put("x", b"1")
    assert hand.pauses == [0.05]


@pytest.mark.parametrize("error", [StorageFull("full"), PermissionError("no"), FileNotFoundError("nothing")], ids=repr)
def test_an_error_that_will_not_pass_is_raised_at_once(error: Exception) -> None:
    hand, inner = Hand(), Flaky(error)
    with pytest.raises(type(error)):
        retrying(inner, hand).get("x")
    assert inner.calls == 1 and hand.pauses == []


def test_deletions_and_listings_are_bounded_by_their_number() -> None:
    hand, inner = Hand(), Flaky(*(OSError(errno.EIO, "down") for _ in range(99)))
    with pytest.raises(StoreAway, match="could not delete x in 4 tries") as caught:
        retrying(inner, hand).delete("x")
    assert inner.calls == 4 and "store_away_s" in caught.value.remedy and "down" in caught.value.message


def test_reads_and_writes_are_bounded_by_time() -> None:
    hand, inner = Hand(), Flaky(*(OSError(errno.EIO, "down") for _ in range(999)))
    began = hand.now
    told: list[tuple[bool, str]] = []
    store = retrying(inner, hand, away_s=60.0)
    store.watch = lambda away, reason: told.append((away, reason))
    with pytest.raises(StoreAway, match="60 s"):
        store.put("x", b"1")
    assert hand.now - began == pytest.approx(60.0), "neither sooner nor a pause later"
    assert max(hand.pauses) <= 5.0 and inner.calls < 30
    assert told == [(True, "OSError: [Errno 5] down"), (False, "")]
    assert inner.items == {}


def test_a_store_that_comes_back_is_told_once_and_the_hold_is_renewed_first() -> None:
    hand, inner = Hand(), Flaky(*(OSError(errno.EIO, "down") for _ in range(8)))
    told: list[Any] = []
    store = retrying(inner, hand)
    store.watch = lambda away, reason: told.append(away)
    store.guard = lambda: told.append("guard")
    store.put("x", b"1")
    assert inner.items == {"x": b"1"}
    assert told == [True, *["guard"] * 5, False]


def test_a_hold_that_was_lost_meanwhile_ends_the_patience() -> None:
    hand, inner = Hand(), Flaky(*(OSError(errno.EIO, "down") for _ in range(8)))
    store = retrying(inner, hand)

    def guard() -> None:
        raise CheckpointInUse("another job has it")

    store.guard = guard
    with pytest.raises(CheckpointInUse):
        store.put("x", b"1")
    assert inner.items == {}


def test_an_answer_that_was_lost_is_no_defeat() -> None:
    hand = Hand()
    store = retrying(Flaky(TimeoutError(), after=True), hand)
    assert store.put_if_absent("x", b"mine") is True, "the first try did it, and its answer was lost"
    assert store.put_if_absent("x", b"mine") is False, "this one found it there"
    other = Flaky(TimeoutError())
    other.items["x"] = b"another's"
    assert retrying(other, hand).put_if_absent("x", b"mine") is False


def test_an_operation_that_hangs_is_left_behind() -> None:
    release, hand = threading.Event(), Hand()
    done = threading.Event()

    class Hangs(MemoryStore):
        calls = 0

        def put(self, name: str, data: bytes) -> None:
            self.calls += 1
            if self.calls == 1:
                release.wait(120)
                done.set()
            super().put(name, data)

    inner = Hangs()
    store = retrying(inner, hand, timeout_s=0.05)
    store.put("x", b"1")
    assert inner.calls == 2 and inner.items == {"x": b"1"}
    release.set()
    assert done.wait(120)


def test_hanging_operations_do_not_pile_up() -> None:
    release, hand = threading.Event(), Hand()
    calls: list[str] = []

    class Hangs(MemoryStore):
        def get(self, name: str) -> bytes:
            calls.append(name)
            release.wait(120)
            return b""

    store = retrying(Hangs(), hand, timeout_s=0.001, away_s=1000.0)
    with pytest.raises(StoreAway, match="hang already"):
        store.get("x")
    assert len(calls) == HUNG_MAX
    release.set()


def test_who_waits_for_the_store_is_woken_at_the_end_of_the_job() -> None:
    away, ended = threading.Event(), threading.Event()
    inner = Flaky(*(OSError(errno.EIO, "down") for _ in range(99999)))
    store = RetryingStore(inner, retries=0, timeout_s=0, away_s=3600.0)
    store.watch = lambda is_away, reason: away.set() if is_away else None

    def wait() -> None:
        with pytest.raises(StoreAway):
            store.put("x", b"1")
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert away.wait(120)
    store.abandon()
    assert ended.wait(120)
    thread.join(120)


def test_a_patient_store_travels_to_workers(tmp_path: Path) -> None:
    store = RetryingStore(FsspecStore(str(tmp_path)), retries=7, away_s=9.0)
    store.watch = lambda away, reason: None
    again = pickle.loads(pickle.dumps(store))
    again.put("x", b"1")
    assert store.get("x") == b"1" and (again.retries, again.away_s) == (7, 9.0)
    assert isinstance(again, Store)
