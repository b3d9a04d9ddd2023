"""Merging files of checkpoints, here and in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import polars as pl
import pytest

from penstock.connectors.store import FsspecStore
from penstock.engines import merging
from penstock.engines.merging import Merge, MergeAside, merge_here
from penstock.errors import CorruptData, PenstockError
from penstock.state.checkpoint import CompactionTask, DeltaFile
from penstock.state.codec import checksum, decode_header, encode
from penstock.state.slicemap import SliceMap
from penstock.state.store import MemoryStore, Store
from penstock.state.table import DELETED, HASH


def written(store: Store, name: str, epoch: int, keys: range) -> DeltaFile:
    columns = {"k": list(keys), "n": [epoch] * len(keys), DELETED: [False] * len(keys)}
    frame = pl.DataFrame(columns).with_columns(pl.col("k").hash(7).alias(HASH))
    data = encode({"stage": "s", "progress": {"in": 100 * epoch}}, frame, slicemap=SliceMap(2))
    store.put(name, data)
    return DeltaFile(name, "s", "delta", epoch, epoch, (0, 1), frame.height, len(data), checksum(data))


def merge(store: Store) -> Merge:
    files = (written(store, "state/s/1.delta", 1, range(6)), written(store, "state/s/2.delta", 2, range(4, 9)))
    task = CompactionTask("s", "base", files, (0, 1))
    return Merge(task, ("k",), {"stage": "s", "kind": "base"}, "state/s/merged.base", SliceMap(2))


def test_aside_is_the_same_as_here(tmp_path: Path) -> None:
    store = FsspecStore(str(tmp_path))
    asked = merge(store)
    here = merge_here(store, asked)
    data = store.get(asked.name)
    store.delete(asked.name)
    aside = MergeAside(small_bytes=0)
    assert aside(store, asked) == here and here.rows == 9
    assert store.get(asked.name) == data
    assert aside._running == set()


def test_a_merged_file_says_which_input_it_reflects(tmp_path: Path) -> None:
    """That of the newest file in it, also when it is merged again."""
    store = FsspecStore(str(tmp_path))
    asked = merge(store)
    base = merge_here(store, asked)
    assert decode_header(store.get(base.name), "")["progress"] == {"in": 200}
    later = written(store, "state/s/3.delta", 3, range(2))
    again = Merge(
        CompactionTask("s", "base", (base, later), (0, 1)), ("k",), asked.meta, "state/s/again.base", SliceMap(2)
    )
    MergeAside(small_bytes=0)(store, again)
    assert decode_header(store.get(again.name), "")["progress"] == {"in": 300}


def test_a_small_merge_starts_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FsspecStore(str(tmp_path))
    asked = merge(store)
    monkeypatch.setattr("subprocess.Popen", None)
    assert MergeAside()(store, asked).rows == 9 and store.exists(asked.name)


def test_what_goes_wrong_aside_is_said_here(tmp_path: Path) -> None:
    store = FsspecStore(str(tmp_path))
    asked = merge(store)
    store.put("state/s/1.delta", b"rubbish")
    with pytest.raises(CorruptData, match=r"1\.delta"):
        MergeAside(small_bytes=0)(store, asked)
    store.delete("state/s/1.delta")
    with pytest.raises((PenstockError, OSError), match=r"1\.delta"):
        MergeAside(small_bytes=0)(store, asked)


class OfThisProcess(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.unpicklable = threading.Lock()


def test_a_store_that_only_this_process_has_is_merged_here() -> None:
    store = OfThisProcess()
    asked = merge(store)
    assert MergeAside(small_bytes=0)(store, asked).rows == 9 and store.exists(asked.name)


def test_a_process_that_does_not_start_is_no_reason_not_to_merge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FsspecStore(str(tmp_path))
    asked = merge(store)
    monkeypatch.setattr(merging.sys, "executable", "/bin/false")
    assert MergeAside(small_bytes=0)(store, asked).rows == 9 and store.exists(asked.name)


def instead_of_python(command: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = place / "script"
    script.write_text(f"#!/bin/sh\n{command}\n")
    script.chmod(0o700)
    monkeypatch.setattr(merging.sys, "executable", str(script))


def test_a_merge_gives_way_before_it_imports_anything() -> None:
    """Starting takes half a second of CPU, which epochs would wait for."""
    told = merging.START.split("from penstock")[0] + "import sys; print(os.nice(0), *sys.modules)"
    said = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    niceness, *loaded = said.stdout.split()
    assert int(niceness) >= merging.NICENESS
    assert not {"penstock", "polars", "numpy"} & set(loaded)


def test_ctrl_c_at_the_terminal_does_not_reach_a_merge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FsspecStore(str(tmp_path))
    asked = merge(store)
    instead_of_python(f"ps -o pgid= -p $$ > {tmp_path}/group; exit 1", tmp_path, monkeypatch)
    MergeAside(small_bytes=0)(store, asked)
    assert int((tmp_path / "group").read_text()) != os.getpgrp()


def test_a_merge_that_is_killed_is_not_tried_in_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was too large for a process of its own would take the job with it."""
    store = FsspecStore(str(tmp_path))
    asked = merge(store)
    instead_of_python("kill -KILL $$", tmp_path, monkeypatch)
    with pytest.raises(PenstockError, match="signal 9"):
        MergeAside(small_bytes=0)(store, asked)
    assert not store.exists(asked.name)


def test_the_end_of_the_job_ends_a_merge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FsspecStore(str(tmp_path))
    asked = merge(store)
    instead_of_python("exec sleep 600", tmp_path, monkeypatch)
    aside = MergeAside(small_bytes=0)
    refused: list[str] = []

    def work() -> None:
        try:
            aside(store, asked)
        except PenstockError as error:
            refused.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    while not aside._running:
        thread.join(0.01)
    aside.close()
    thread.join(120)
    assert not thread.is_alive() and not store.exists(asked.name)
    with pytest.raises(PenstockError, match="the job is over"):
        aside(store, asked)
    assert len(refused) == 1
