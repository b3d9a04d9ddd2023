"""The background side of a worker process: keeps backups of peers' slices current, for all stages.

The thread of a task only tells and asks. ``tell`` says what to hold and which checkpoints are complete, and ``offer``
hands over pieces that arrived; both put them into a queue. The work is done in *steps* on an executor with one thread.
A step takes in everything that is queued, then merges or spills a little if that is due, or else reads at most one file
from the durable store, then queues the next step. So a piece or a commit never waits for a large seed, and a step waits
for nothing but the store. Only ``take``, which a recovering task calls, waits: for one step, and no longer than its
time-out.

While the store is away, reading is tried again at a later ``tell``, after a pause that grows. Meanwhile the pieces
alone keep backups current.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Executor, Future
from dataclasses import dataclass, field
from typing import Any, Final

import polars as pl

from penstock.errors import CorruptData
from penstock.state.backup import Backups, Commit, Spill, merge_two, owned
from penstock.state.checkpoint import DeltaFile, Manifest, check_file, merge_frames
from penstock.state.codec import Opened, decode, select_slices, sort_by_slice
from penstock.state.slicemap import SliceMap
from penstock.state.store import Store


@dataclass(frozen=True)
class Budget:
    """What the background work may take from the tasks of its process. Rows, slices and bytes are those of one step,
    for a task may have to wait for the step that is being done."""

    step_rows: int = 2**15
    """Rows that one step reads or copies, and that a group of small slices has. 32,768 rows take about 30 ms."""
    step_slices: int = 64
    """Slices that one step reads, whatever their rows: each has a fixed cost. Of groups of slices, which are merged
    one by one, a step takes a quarter of this number."""
    step_bytes: int = 4 << 20
    """Bytes that one step merges or spills. 4 MiB take about 30 ms. A larger file is a step of its own to read."""
    group_share: int = 64
    """The files of a group of small slices come to at most this part of the memory. In memory they are several times
    as large."""
    patience_s: float = 2.0
    """A piece that did not arrive is read from the store this long after its checkpoint is known to be complete."""
    retry_s: float = 0.5
    """The pause after an error of the store. It doubles with every further error."""
    retry_s_max: float = 30.0
    """The longest pause after an error of the store."""
    wait_s_max: float = 0.05
    """The longest that the thread waits at a time, for what is queued behind waits with it. While a task runs the
    thread looks ten times as often whether the task is over."""
    rest_s_max: float = 0.25
    """After a step of a seed nothing is read for as long as the step took, and for this long at most: tasks share the
    interpreter with it. A running task holds up reading for twice this time. After a pause, the bytes of this time may
    be read at once."""
    recovery_s: float = 3.0
    """After a recovery nothing is read for new copies for this long: the epochs that run again need the store more."""


SEEN_MAX: Final = 256
"""Epochs whose commits a stage remembers, to know which of those it is told are new."""


class Keeper:
    """One in a worker process. ``pool`` has one thread, and nothing else runs on it for long. ``bytes_s`` is the number
    of bytes that may be read from the store in a second (0: no limit). ``wait`` is how that thread waits. None: it does
    not wait, and goes on at a later ``tell``."""

    def __init__(
        self,
        job: str,
        store: Store,
        *,
        memory_max: int,
        spill: Callable[[], Spill] | None,
        bytes_s: float,
        pool: Executor,
        load_manifest: Callable[[int], Manifest],
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] | None = time.sleep,
        budget: Budget | None = None,
    ) -> None:
        self._budget = budget or Budget()
        self._job = job
        self._store = store
        self._memory_max = memory_max
        self._make_spill = spill
        self._pool = pool
        self._load_manifest = load_manifest
        self._clock = clock
        self._wait = wait
        self._rate = _Rate(bytes_s, self._budget.rest_s_max, clock)
        self._lock = threading.Lock()
        # Under the lock: what a task's thread and the pool's share.
        self._told: dict[str, _Told] = {}
        self._stepping = False
        self._due_s: float | None = None
        self._rest_until_s = float("-inf")
        self._idle_until_s = float("-inf")
        self._held: dict[str, tuple[int, frozenset[int]]] = {}
        self._given_up: dict[str, frozenset[int]] = {}
        self._problem: str | None = None
        self._waits: str | None = None
        self._stats: dict[str, int] = {}
        self._closed = False
        # Set by a task's thread and only looked at by the pool's.
        self._in_task = False
        # Of the pool's thread alone.
        self._stages: dict[str, _Stage] = {}
        self._spill: Spill | None = None
        self._spill_problem: str | None = None
        self._fault: str | None = None
        self._turn = 0
        self._counts = dict.fromkeys(("seeded", "fetched", "bytes_read", "store_errors"), 0)

    # ---- from a task's thread --------------------------------------------------------------------------------------

    def tell(
        self,
        stage: str,
        key: Sequence[str],
        slicemap: SliceMap,
        want: frozenset[int],
        checkpoint: int,
        commits: Sequence[Commit],
    ) -> None:
        """Each task says which slices of the stage this process is to hold, the newest checkpoint, and the commits up
        to it that are at hand. This is cheap: what was said before is not queued again."""
        with self._lock:
            told = self._told.get(stage)
            if told is None:
                if not want:
                    return
                told = self._told[stage] = _Told(tuple(key), slicemap)
            told.take_in(want, checkpoint, commits)
            needed = told.news or (self._due_s is not None and self._clock() >= self._due_s)
        if needed:
            self._start()

    def offer(self, stage: str, piece: bytes) -> None:
        """Hand over a piece that arrived. It is dropped if ``tell`` was not called for its stage."""
        with self._lock:
            told = self._told.get(stage)
            if told is None:
                return
            told.pieces.append(piece)
            told.news = True
        self._start()

    def held(self, stage: str) -> tuple[int, frozenset[int]]:
        """The newest known checkpoint, and the slices that are current at it or soon will be, as of the last step.
        ``take`` takes in the deltas that are still on their way."""
        with self._lock:
            return self._held.get(stage, (0, frozenset()))

    def given_up(self, stage: str) -> frozenset[int]:
        """Slices that this process is to hold and has no room for, as of the last step."""
        with self._lock:
            return self._given_up.get(stage, frozenset())

    def rest(self, seconds: float | None = None) -> None:
        """Read nothing for new copies for a while. None: as long as after a recovery."""
        seconds = self._budget.recovery_s if seconds is None else seconds
        with self._lock:
            self._rest_until_s = max(self._rest_until_s, self._clock() + seconds)

    @contextlib.contextmanager
    def in_task(self) -> Iterator[None]:
        """While a task runs, nothing is read for new copies."""
        self._in_task = True
        try:
            yield
        finally:
            self._in_task = False

    def take(
        self, stage: str, slices: Collection[int], checkpoint: int, timeout_s: float = 5.0
    ) -> dict[int, list[pl.DataFrame]]:
        """The frames of the slices that are current at the checkpoint, after everything queued has been taken in. Never
        raises; slices that are not current in time are left out."""
        with self._lock:
            if stage not in self._told or self._closed:
                return {}
        future: Future[dict[int, list[pl.DataFrame]]] | None = None
        try:
            deadline_s = self._clock() + timeout_s / 2
            future = self._pool.submit(self._take, stage, tuple(slices), checkpoint, deadline_s)
            return future.result(timeout_s)
        except (Exception, CancelledError):  # too late, shut down, or a defect here: the durable store has it all
            if future is not None:
                future.cancel()
            return {}

    def problem(self) -> str | None:
        """Why this container cannot hold what it should, in words. Another container would be a better holder."""
        with self._lock:
            return self._problem

    def waits(self) -> str | None:
        """Which backups wait for the store, and why, in words. Another container would have to wait as well."""
        with self._lock:
            return self._waits

    def stats(self) -> dict[str, int]:
        """As of the last step: ``bytes_memory``, ``bytes_spilled``, ``slices_held``, ``slices_wanted``, ``ignored``,
        and in total ``seeded``, ``fetched``, ``bytes_read``, ``store_errors``."""
        with self._lock:
            return dict(self._stats)

    def close(self) -> None:
        """Do no more steps, and remove the files. The pool is left to its owner."""
        with self._lock:
            self._closed = True
            self._told.clear()
        spill = self._spill
        if spill is not None:
            with contextlib.suppress(OSError):
                spill.clear()

    def _start(self) -> None:
        """Queue a step, unless one is queued."""
        with self._lock:
            if self._stepping or self._closed:
                return
            self._stepping = True
        try:
            self._pool.submit(self._step)
        except RuntimeError:
            self._closed = True  # the pool is shut down: the process is ending

    # ---- steps: on the pool's thread -------------------------------------------------------------------------------

    def _step(self) -> None:
        try:
            self._take_in()
            busy = not self._closed and (self._work_some() or self._read_one())
        except Exception as error:
            busy = False
            self._drop_all(error)
        with self._lock:
            self._stepping = False
            self._note()
            more = busy or any(told.news for told in self._told.values())
        if more:
            self._start()

    def _drop_all(self, error: Exception) -> None:
        """Drop all backups after a defect here, or without memory, and say so. The durable store has them all."""
        self._stages.clear()
        if self._spill is not None:
            self._spill.clear()
            self._spill = None  # another is made when it is needed
        self._fault = f"backups were dropped: {type(error).__name__}: {error}"

    def _take(self, stage: str, slices: Sequence[int], checkpoint: int, deadline_s: float) -> dict[int, Any]:
        try:
            taken = self._taken(stage, slices, checkpoint, deadline_s)
        except Exception as error:
            taken = {}
            self._drop_all(error)
        with self._lock:
            self._note()
        if self._unsettled():
            self._start()
        return taken

    def _taken(self, stage: str, slices: Sequence[int], checkpoint: int, deadline_s: float) -> dict[int, Any]:
        self._take_in()
        kept = self._stages.get(stage)
        if kept is None:
            return {}
        # A delta that is missing is soon read, and spares reading all of the slice.
        tried: set[str] = set()
        while self._clock() < deadline_s and not set(slices) <= kept.backups.current(checkpoint):
            name = next((name for name in kept.missing if name not in tried), None)
            if name is None or not self._fetch(kept, name):
                break
            tried.add(name)
        return kept.backups.take(slices, checkpoint)

    def _take_in(self) -> None:
        """Take in everything that is queued."""
        with self._lock:
            news = [(stage, told, told.hand_over()) for stage, told in self._told.items() if told.news]
        for stage, told, (want, checkpoint, commits, pieces) in news:
            kept = self._stages.get(stage)
            if kept is None:
                kept = self._stages[stage] = self._made(stage, told)
            backups = kept.backups
            backups.want(want)
            kept.checkpoint = max(kept.checkpoint, checkpoint)
            for piece in pieces:
                backups.offer(piece)
            for commit in commits:
                backups.commit(commit)
            if kept.seeding is not None:
                kept.seeding.only(want)
            if kept.checkpoint == 0:
                for number in backups.to_seed(0):  # before any input every slice is empty
                    backups.seed(number, 0, [], {})
            self._advance(kept)

    def _made(self, stage: str, told: _Told) -> _Stage:
        if self._make_spill is not None and self._spill is None and self._spill_problem is None:
            try:
                self._spill = self._make_spill()
            except OSError as error:
                self._spill_problem = f"there is no local disk for backups: {error}"
        backups = Backups(self._job, stage, told.key, told.slicemap, self._memory_max, self._spill, eager=False)
        return _Stage(stage, backups)

    def _share(self, backups: Backups) -> int:
        """The memory for one stage: what the other stages leave, and at least a quarter of an even share."""
        others = sum(kept.backups.nbytes for kept in self._stages.values() if kept.backups is not backups)
        return max(self._memory_max // (4 * len(self._stages)), self._memory_max - others)

    def _advance(self, kept: _Stage) -> None:
        kept.backups.memory_max = self._share(kept.backups)
        missing = kept.backups.advance()
        now = self._clock()
        kept.missing = {name: kept.missing.get(name, now) for name in missing}
        kept.unsettled = True

    def _work_some(self) -> bool:
        """Merge and spill a little, if that is due. True: there is more. It comes before anything is read, for
        otherwise memory would have no limit."""
        for kept in self._stages.values():
            if kept.unsettled:
                kept.unsettled = kept.backups.work(self._budget.step_bytes)
                break
        return self._unsettled()

    def _unsettled(self) -> bool:
        return any(kept.unsettled for kept in self._stages.values())

    # ---- reading the store -----------------------------------------------------------------------------------------

    def _read_one(self) -> bool:
        """Read one file for the stage whose turn it is. True: there is more to read."""
        stages = list(self._stages.values())
        now = self._clock()
        if now < self._rest_until_s:
            return False
        ready = [kept for kept in stages if now >= kept.resume_s and self._has_to_read(kept, now)]
        if not ready:
            return False
        pause_s = max(self._rate.pause_s(), self._idle_until_s - now)
        if pause_s <= 0 and self._in_task and now < self._idle_until_s + 2 * self._budget.rest_s_max:
            pause_s = self._budget.wait_s_max / 10
        if pause_s > 0:
            if self._wait is None:
                return False
            self._wait(min(pause_s, self._budget.wait_s_max))
            return True
        self._turn += 1
        kept = ready[self._turn % len(ready)]
        name = self._late(kept, now)
        if name is not None:
            self._fetch(kept, name)
        else:
            self._seed_some(kept)
            done = self._clock()
            self._idle_until_s = done + min(done - now, self._budget.rest_s_max)
        return True

    def _late(self, kept: _Stage, now: float) -> str | None:
        """A missing file whose piece has had time enough to come."""
        return next((name for name, since in kept.missing.items() if now >= since + self._budget.patience_s), None)

    def _has_to_read(self, kept: _Stage, now: float) -> bool:
        if self._late(kept, now) is not None or kept.seeding is not None:
            return True
        return bool(kept.checkpoint > 0 and kept.backups.to_seed(kept.checkpoint))

    def _fetch(self, kept: _Stage, name: str) -> bool:
        """Read a delta whose piece did not come."""
        try:
            data = self._read(name)
            meta, frame = decode(data, name)
        except (FileNotFoundError, CorruptData):
            kept.backups.lose(name)  # merged with others and removed: the slices are seeded again
        except Exception as error:
            self._failed(kept, error)
            return False
        else:
            kept.backups.supply(name, meta, frame)
            self._counts["fetched"] += 1
            kept.went_well()
        self._advance(kept)
        return True

    def _seed_some(self, kept: _Stage) -> None:
        """Read some more slices of the current seed, or begin one. A step does not read all of a large file, for an
        epoch that calls ``take`` waits for the step that is being done."""
        backups = kept.backups
        try:
            seed = kept.seeding
            if seed is None:
                seed = self._begin(kept)
            if seed.files:
                file = seed.files[0]
                if seed.opened is None or seed.opened.path != file.name:
                    data = self._read(file.name)
                    check_file(file, data, file.name)
                    seed.open(Opened(data, file.name))
                    if len(data) > self._budget.step_bytes:
                        return
                seed.add_some(backups.key)
        except Exception as error:
            outdated = kept.seeding is not None and kept.seeding.checkpoint < kept.checkpoint
            kept.seeding = backups.pinned = None
            # Files of a checkpoint that is no longer the last are merged with others, and removed.
            if not (outdated and isinstance(error, FileNotFoundError)):
                self._failed(kept, error)
            return
        backups.memory_max = self._share(backups)
        for number, parts in seed.finished(backups.key).items():
            backups.seed(number, seed.checkpoint, parts, seed.progress)
            self._counts["seeded"] += 1
        seed.limit(backups.memory_max)
        if not seed.slices:
            kept.seeding = None
            kept.went_well()
        self._advance(kept)
        if kept.seeding is None:
            backups.pinned = None

    def _begin(self, kept: _Stage) -> _Seed:
        checkpoint = kept.checkpoint
        slices = kept.backups.to_seed(checkpoint)
        manifest = self._load_manifest(checkpoint)
        progress = {source: read["offset"] for source, read in manifest.sources.items()}
        files = manifest.files_for(kept.stage, slices)
        kept.seeding = _Seed(
            checkpoint, slices, files, progress, kept.backups.slicemap, kept.backups.memory_max, self._budget
        )
        kept.backups.pinned = checkpoint
        return kept.seeding

    def _read(self, name: str) -> bytes:
        data = self._store.get(name)
        self._rate.used(len(data))
        self._counts["bytes_read"] += len(data)
        return data

    def _failed(self, kept: _Stage, error: Exception) -> None:
        kept.pause_s = min(self._budget.retry_s_max, max(self._budget.retry_s, 2 * kept.pause_s))
        kept.resume_s = self._clock() + kept.pause_s
        kept.waits = f"backups of stage '{kept.stage}' wait for the checkpoint store: {error}"
        self._counts["store_errors"] += 1

    def _note(self) -> None:
        """Publish what tasks see of a step. Call it with the lock held."""
        stages = list(self._stages.values())
        self._held = {kept.stage: (kept.checkpoint, kept.backups.within_reach(kept.checkpoint)) for kept in stages}
        self._given_up = {kept.stage: kept.backups.given_up for kept in stages}
        problems = [self._fault, self._spill_problem, *(kept.backups.problem for kept in stages)]
        self._problem = next((problem for problem in problems if problem), None)
        self._waits = next((kept.waits for kept in stages if kept.waits), None)
        self._due_s = min((due for kept in stages for due in self._dues(kept)), default=None)
        self._stats = {
            **self._counts,
            "bytes_memory": sum(kept.backups.nbytes for kept in stages),
            "bytes_spilled": sum(kept.backups.bytes_spilled for kept in stages),
            "slices_held": sum(len(held) for _, held in self._held.values()),
            "slices_wanted": sum(len(kept.backups.wanted) for kept in stages),
            "ignored": sum(kept.backups.ignored for kept in stages),
        }

    def _dues(self, kept: _Stage) -> Iterable[float]:
        """The times at which a stage has something to read, besides what ``tell`` brings."""
        if kept.missing:
            yield max(kept.resume_s, self._rest_until_s, min(kept.missing.values()) + self._budget.patience_s)
        if self._has_to_read(kept, float("-inf")):
            yield max(kept.resume_s, self._rest_until_s)


# ---- inner parts ---------------------------------------------------------------------------------------------------


class _Told:
    """What the tasks of a stage said, and the next step takes in."""

    def __init__(self, key: tuple[str, ...], slicemap: SliceMap) -> None:
        self.key = key
        self.slicemap = slicemap
        self.want: frozenset[int] = frozenset()
        self.checkpoint = -1
        self.commits: list[Commit] = []
        self.pieces: list[bytes] = []
        self.news = False
        self._seen: dict[int, None] = {}

    def take_in(self, want: frozenset[int], checkpoint: int, commits: Sequence[Commit]) -> None:
        fresh = [commit for commit in commits if commit.epoch not in self._seen]
        if want == self.want and checkpoint <= self.checkpoint and not fresh:
            return
        self.want = want
        self.checkpoint = max(checkpoint, self.checkpoint)
        self.commits.extend(fresh)
        self._seen.update((commit.epoch, None) for commit in fresh)
        for epoch in sorted(self._seen)[:-SEEN_MAX]:
            del self._seen[epoch]
        self.news = True

    def hand_over(self) -> tuple[frozenset[int], int, list[Commit], list[bytes]]:
        commits, self.commits = sorted(self.commits, key=lambda commit: commit.epoch), []
        pieces, self.pieces = self.pieces, []
        self.news = False
        return self.want, self.checkpoint, commits, pieces


@dataclass
class _Stage:
    stage: str
    backups: Backups
    checkpoint: int = -1
    missing: dict[str, float] = field(default_factory=dict)
    """File that a commit names and that is not here -> since when."""
    seeding: _Seed | None = None
    unsettled: bool = False
    """There is something to merge or spill."""
    waits: str | None = None
    pause_s: float = 0.0
    resume_s: float = 0.0

    def went_well(self) -> None:
        self.waits = None
        self.pause_s = self.resume_s = 0.0


class _Seed:
    """Slices that are being read from the durable checkpoint. Each file is read once for all of them.

    Small slices are merged in groups, which are split into slices at the end: to merge each delta of hundreds of slices
    by itself costs more than merging their rows.
    """

    def __init__(
        self,
        checkpoint: int,
        slices: Collection[int],
        files: Sequence[DeltaFile],
        progress: Mapping[str, Any],
        slicemap: SliceMap,
        bytes_max: int,
        budget: Budget,
    ) -> None:
        self.budget = budget
        self.checkpoint = checkpoint
        self.slices = set(slices)
        self.files = list(files)
        """Yet to be read, in order."""
        self.progress = progress
        """source -> how far it had been read at the checkpoint"""
        self.slicemap = slicemap
        self.size = self._group_size(bytes_max)
        chosen = sorted(slices)
        self.group = {number: chosen[i - i % self.size] for i, number in enumerate(chosen)}
        """Slice -> the first of those that it travels with."""
        self.parts: dict[int, list[pl.DataFrame]] = {}
        """Group -> the parts that were read, in order. Each part is more than twice as large as the next, so that a row
        is merged a logarithmic number of times, not once for each delta."""
        self.opened: Opened | None = None
        """The first of ``files``, if it has been read."""
        self.added: set[int] = set()
        """The slices that have been taken from ``opened``."""

    def open(self, opened: Opened) -> None:
        self.opened = opened
        self.added.clear()

    def add_some(self, key: Sequence[str]) -> None:
        assert self.opened is not None
        left = self.slices.intersection(self.files[0].slices) - self.added
        groups = self._grouped(self.opened.first(left, self.budget.step_rows)[: self.budget.step_slices])
        groups = dict(itertools.islice(groups.items(), max(1, self.budget.step_slices // 4)))
        some = list(itertools.chain.from_iterable(groups.values()))
        meta, frame = self.opened.read(some)
        for first, together in groups.items():
            rows = select_slices(meta, frame, together)
            if rows.height:
                parts = self.parts.setdefault(first, [])
                parts.append(owned(rows))
                while len(parts) > 1 and parts[-2].height <= 2 * parts[-1].height:
                    newer, older = parts.pop(), parts.pop()
                    parts.append(merge_two(older, newer, key, drop_deleted=not parts))
        self.added.update(some)
        if len(some) == len(left):
            self.files.pop(0)
            self.opened = None

    def finished(self, key: Sequence[str]) -> dict[int, list[pl.DataFrame]]:
        """Remove and return the first few slices for which all files have been read, with what was read of them."""
        waiting = {self.group[number] for file in self.files for number in self.slices.intersection(file.slices)}
        done: dict[int, list[pl.DataFrame]] = {}
        rows = 0
        for first, together in self._grouped(sorted(self.slices)).items():
            if first in waiting:
                continue
            parts = self.parts.get(first, [])
            rows += sum(part.height for part in parts)
            if done and (rows > self.budget.step_rows or len(done) + len(together) > self.budget.step_slices):
                break
            self.parts.pop(first, None)
            done |= self._apart(parts, together, key)
        self.slices.difference_update(done)
        return done

    def _apart(
        self, parts: list[pl.DataFrame], together: Sequence[int], key: Sequence[str]
    ) -> dict[int, list[pl.DataFrame]]:
        """The rows of a group, slice by slice. Rows of slices that are no longer wanted are left out."""
        if self.size == 1 or not parts:
            return {number: parts for number in together}
        whole = parts[0]
        if len(parts) > 1:
            # The small parts are merged first, for each merge into the large one copies all of it.
            whole = merge_two(whole, merge_frames(parts[1:], key, drop_deleted=False), key, drop_deleted=True)
        whole, index = sort_by_slice(whole, self.slicemap)
        return {number: [whole.slice(*index[number])] if number in index else [] for number in together}

    def _grouped(self, slices: Iterable[int]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for number in slices:
            found.setdefault(self.group[number], []).append(number)
        return found

    def only(self, want: Collection[int]) -> None:
        """Leave out all slices but these, and do not read files that only other slices need."""
        self.slices.intersection_update(want)
        left = {self.group[number] for number in self.slices}
        for first in [first for first in self.parts if first not in left]:
            del self.parts[first]
        self.files = [file for file in self.files if self.slices.intersection(file.slices)]

    def _group_size(self, bytes_max: int) -> int:
        """How many slices travel together: so few that a group is soon merged, and is a small part of memory."""
        rows = max((file.rows // file.slices_written for file in self.files), default=0)
        read = sum(file.bytes // file.slices_written for file in self.files)
        by_rows = self.budget.step_rows // max(1, rows)
        by_bytes = bytes_max // (self.budget.group_share * max(1, read))
        return max(1, min(self.budget.step_slices, by_rows, by_bytes))

    def limit(self, bytes_max: int) -> None:
        """Leave out the last groups until what has been read fits into memory. A later seed reads them."""
        sizes = {first: sum(int(part.estimated_size()) for part in parts) for first, parts in self.parts.items()}
        total = sum(sizes.values())
        for first in sorted(sizes, reverse=True)[:-1]:
            if total <= bytes_max:
                return
            total -= sizes[first]
            self.only({earlier for earlier in self.slices if self.group[earlier] < first})


class _Rate:
    """Limits reading to ``bytes_s`` bytes in a second. After a pause, the bytes of ``burst_s`` may be read at once."""

    def __init__(self, bytes_s: float, burst_s: float, clock: Callable[[], float]) -> None:
        self._bytes_s = bytes_s
        self._burst_s = burst_s
        self._clock = clock
        self._free_s = float("-inf")
        """The time from which on the next byte may be read."""

    def used(self, count: int) -> None:
        if self._bytes_s > 0:
            self._free_s = max(self._free_s, self._clock() - self._burst_s) + count / self._bytes_s

    def pause_s(self) -> float:
        return max(0.0, self._free_s - self._clock()) if self._bytes_s > 0 else 0.0


__all__ = ["Budget", "Keeper"]
