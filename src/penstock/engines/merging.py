"""Merging files of checkpoints: fewer to read at a restart. The live tables are not touched.

On Spark a large merge happens in a process of its own that gives way to all others and keeps to one core: it may take
seconds, and in the driver it would take them, on all cores, from the epochs that go on meanwhile. A small one takes
less than a process takes to start.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import penstock
from penstock.errors import PenstockError
from penstock.state.checkpoint import CompactionTask, DeltaFile, merge_frames
from penstock.state.codec import checksum, decode, encode, select_slices
from penstock.state.slicemap import SliceMap
from penstock.state.store import Store

NICENESS = 10
"""About a tenth of a core where all are busy: a merge that never ends would be no better."""

START = f"""
import contextlib, os
os.setsid()
os.nice({NICENESS})
with contextlib.suppress(OSError):
    with open("/proc/self/autogroup", "w") as file:
        file.write("{NICENESS}")
from {__name__} import main
main()
"""
"""Gives way before it imports anything: half a second of a core, which epochs would wait for. Where Linux shares its
cores between sessions first (autogroup), a process is nice only to its own: so it has one for itself, which is nice.
"""

SMALL_BYTES = 4 * 2**20
"""Of files. So much is merged in a tenth of a second; a process takes half a second of a core to start."""


@dataclass(frozen=True)
class Merge:
    task: CompactionTask
    key: tuple[str, ...]
    meta: Mapping[str, Any]
    name: str
    """Of the file to be written."""
    slicemap: SliceMap
    """Of the stage."""


Merging = Callable[[Store, Merge], DeltaFile]


def merge_here(store: Store, merge: Merge) -> DeltaFile:
    task = merge.task
    frames = []
    progress = None
    for file in task.inputs:
        meta, frame = decode(store.get(file.name), file.name, file.slices)
        frames.append(select_slices(meta, frame, file.slices))
        if file.epoch_to == task.epoch_to:
            progress = meta.get("progress")  # what the newest reflects, all of them together do
    merged = merge_frames(frames, merge.key, drop_deleted=task.drop_deleted)
    data = encode({**merge.meta, "progress": progress}, merged, slicemap=merge.slicemap)
    store.put(merge.name, data)
    first, last = task.epoch_from, task.epoch_to
    return DeltaFile(
        merge.name, task.stage, task.kind, first, last, task.slices, merged.height, len(data), checksum(data)
    )


class MergeAside:
    """``merge_here``, in a process for each merge that is not small. It ends with the job; a file half-written has a
    name of its own, and one that nobody names any more is removed with the others.
    """

    def __init__(self, small_bytes: int = SMALL_BYTES) -> None:
        self.small_bytes = small_bytes
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._closed = False

    def __call__(self, store: Store, merge: Merge) -> DeltaFile:
        if sum(f.bytes for f in merge.task.inputs) < self.small_bytes:
            return merge_here(store, merge)
        try:
            asked = pickle.dumps((store, merge))
        except Exception:  # a file system of the user's own: here we can reach it
            return merge_here(store, merge)
        path = os.pathsep.join(p for p in (str(Path(penstock.__file__).parents[1]), *sys.path) if p)
        with self._lock:
            if self._closed:
                raise PenstockError("the job is over: nothing is merged any more.")
            process = subprocess.Popen(
                [sys.executable, "-c", START],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "POLARS_MAX_THREADS": "1", "PYTHONPATH": path},
            )
            self._running.add(process)
        try:
            answer, _ = process.communicate(asked)
        finally:
            with self._lock:
                self._running.discard(process)
        if self._closed:
            raise PenstockError("the job is over: nothing is merged any more.")
        if process.returncode < 0:
            raise PenstockError(
                f"the process that merges files of checkpoints was ended by signal {-process.returncode}.",
                remedy="Give the driver's machine more memory, if it was that. Until a merge succeeds a restart reads "
                "more files; nothing is lost.",
            )
        if process.returncode != 0:
            return merge_here(store, merge)  # it could not start, or could not find what it needs
        outcome: DeltaFile | PenstockError | OSError = pickle.loads(answer)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for process in self._running:
                process.kill()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the job, which ends us when it ends
    outcome: DeltaFile | Exception
    store, merge = pickle.load(sys.stdin.buffer)
    try:
        outcome = merge_here(store, merge)
    except (PenstockError, OSError) as error:
        outcome = error
    sys.stdout.buffer.write(pickle.dumps(outcome))
