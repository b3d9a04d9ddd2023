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
from penstock.connectors.store import LOCK_NAME, DirectoryLock, FsspecStore, local_path
from penstock.errors import CheckpointError, CheckpointInUse, StorageFull
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
