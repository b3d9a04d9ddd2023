"""Merges files of checkpoints, so that a restart reads fewer files. The live tables are not touched.

On Spark a large merge runs in a process of its own with one thread and a low priority. It takes seconds and much
memory; in the driver it would hold up the epochs that run meanwhile. A small merge takes less time than a process
needs to start, and runs in the driver.
"""

from __future__ import annotations

import os
import pickle
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
"""Where all cores are busy a merge still gets about a tenth of one, so that it comes to its end."""

START = f"import os; os.nice({NICENESS}); from {__name__} import main; main()"
"""The process gives way before it imports anything: its imports take half a second of CPU."""

SMALL_BYTES = 4 * 2**20
"""Bytes of files that are merged in the driver. 4 MiB take 0.1 s; a process takes 0.5 s of CPU to start."""


@dataclass(frozen=True)
class Merge:
    """A merge that is due, with all that it takes to do it."""

    task: CompactionTask
    key: tuple[str, ...]
    meta: Mapping[str, Any]
    name: str
    """The name of the file to write."""
    slicemap: SliceMap
    """The number of slices of the job."""


Merging = Callable[[Store, Merge], DeltaFile]


def merge_here(store: Store, merge: Merge) -> DeltaFile:
    """Read the files, merge them, and write the new file."""
    task = merge.task
    frames = []
    progress = None
    for file in task.inputs:
        meta, frame = decode(store.get(file.name), file.name, file.slices)
        frames.append(select_slices(meta, frame, file.slices))
        if file.epoch_to == task.epoch_to:
            progress = meta.get("progress")  # the merged file reflects what the newest of its inputs reflects
    merged = merge_frames(frames, merge.key, drop_deleted=task.drop_deleted)
    data = encode({**merge.meta, "progress": progress}, merged, slicemap=merge.slicemap)
    store.put(merge.name, data)
    first, last = task.epoch_from, task.epoch_to
    return DeltaFile(
        merge.name, task.stage, task.kind, first, last, task.slices, merged.height, len(data), checksum(data)
    )


class MergeAside:
    """Runs ``merge_here`` in a process for each merge that is not small. The process ends with the job. A half-written
    file has another name than the whole one, and files that no manifest names are removed later.
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
        except Exception:  # a store of the user's own that only this process can reach
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
                process_group=0,  # Ctrl-C at the terminal is for the job, which ends this process when it ends
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
                remedy="Give the driver's machine more memory, if that was the cause. Nothing is lost: until a merge "
                "succeeds, a restart reads more files.",
            )
        if process.returncode != 0:
            return merge_here(store, merge)  # the process could not start, or a module was missing
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
    outcome: DeltaFile | Exception
    store, merge = pickle.load(sys.stdin.buffer)
    try:
        outcome = merge_here(store, merge)
    except (PenstockError, OSError) as error:
        outcome = error
    sys.stdout.buffer.write(pickle.dumps(outcome))
