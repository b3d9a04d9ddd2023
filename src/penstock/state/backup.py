"""The backups that one process holds of other containers' slices, for one stage.

A backup is a cache of committed state. Each slice has a *version*: the checkpoint that it stands at. A slice whose
version is exactly the checkpoint asked for is *current*, and is handed out. Any other slice is not handed out: it is
then restored from the durable store. So a backup may be missing, but is never wrong.

**How a slice comes forward.** A writer cuts each delta file into one piece for each holder (:func:`cut`). Pieces arrive
in any order. A piece may arrive twice or never, or belong to an attempt that was given up. Pieces are kept unread. A
:class:`Commit` says which files a checkpoint added, and for which slices. It brings every slice that stands at the
checkpoint before it forward, once all rows of these files for the slice are here. Files are told apart by their names
alone, and no two attempts share a name. The caller is told the names of files that are missing, and reads them from the
durable store (:meth:`Backups.supply`).

**What it costs.** A delta stays as it arrived, one frame for all slices in it (:class:`_Run`), until a slice has too
many deltas. Then its newest deltas are merged, and older ones with them as long as the next older is no larger than the
merged ones together. When the deltas of a slice come to half of its base, they are merged into the base, and tombstones
go. So a row is rewritten O(log) times, and merging a delta into a large backup costs a few times the delta on average.

Slices with the same deltas, as most have, are merged together: hundreds of small frames would cost hundreds of small
operations. A frame of which most slices have been merged elsewhere is copied, without these slices. Parts of a frame
share its buffers, and one row must not keep the memory of a million rows.

**Memory.** Above ``memory_max`` the largest slices go to a :class:`Spill`, merged, with a header that says what they
are. Their later deltas stay in memory until these are large, too. A spill that fails costs the backup, not the job.

**Little by little.** Merging and spilling is done by :meth:`Backups.work`, apart from bringing slices forward. An owner
may need a slice at once, and the merges that are due for a large backup take seconds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import msgspec
import numpy as np
import polars as pl
from numpy.typing import NDArray

from penstock.errors import PenstockError
from penstock.state.checkpoint import merge_frames
from penstock.state.codec import decode, decode_header, encode, select_slices, sort_by_slice
from penstock.state.keys import detached
from penstock.state.slicemap import SliceMap
from penstock.state.table import DELETED, HASH

DELTAS_MAX: Final = 4
"""Deltas that a slice may have before its newest ones are merged."""
BASE_RATIO: Final = 0.5
"""Deltas that reach this share of their base are merged into it. So a backup takes up to half as much again as the
state."""
COMMITS_KEPT: Final = 16
"""Commits that are remembered for slices that are behind. A slice that is further behind is seeded again."""
SMALL_BYTES: Final = 64 * 1024
"""Deltas below this size are not merged into their base, however small it is: a merge has a fixed price, too."""
SHED_TO: Final = 0.875
"""When memory is over its limit, slices are spilled until this share of the limit is in use. Otherwise each further
delta would spill something."""


class Commit(msgspec.Struct):
    """One completed checkpoint, for one stage."""

    before: int
    """The checkpoint before it."""
    epoch: int
    files: dict[str, list[int]]
    """The delta files that the checkpoint added, in order -> the slices of each. A slice in none of them did not
    change. Only slices with rows in the file should be listed: a holder without a piece of a listed file reads the
    file."""


class Spill(Protocol):
    """A place for backups that do not fit into memory: names with whole values, which go with the process. Its methods
    raise OSError."""

    def put(self, name: str, data: bytes) -> None: ...

    def get(self, name: str) -> bytes: ...

    def delete(self, name: str) -> None: ...

    def clear(self) -> None: ...


def cut(
    data: bytes | tuple[Mapping[str, Any], pl.DataFrame],
    name: str,
    slicemap: SliceMap,
    holders: Sequence[Sequence[int]],
    attempt: int,
) -> dict[int, bytes]:
    """Container -> its piece of a delta file, for each container that holds backups of slices with rows in it.

    ``data``: the file, or its header and rows (in any order if the header has no ``slices``). ``holders``: for each
    slice the containers that hold a backup."""
    meta, frame = decode(data, name) if isinstance(data, bytes) else data
    total = slicemap.count
    assert len(holders) == total, f"holders of {len(holders)} slices, of a stage with {total}"
    if "slices" in meta:
        assert meta["slices_total"] == total, f"{name} has {meta['slices_total']} slices, the routing table {total}"
    else:
        frame, index = sort_by_slice(frame, slicemap)
        meta = {**meta, "slices": {str(number): place for number, place in index.items()}}
    changed = sorted(int(number) for number in meta["slices"])
    shares: dict[int, list[int]] = {}
    for number in changed:
        for container in holders[number]:
            shares.setdefault(container, []).append(number)
    names = ("job", "stage", "kind", "epoch_from", "epoch_to")
    header = {
        **{n: meta[n] for n in names},
        "progress": meta.get("progress"),
        "name": name,
        "attempt": attempt,
        "changed": _bitmap(changed),
    }
    # Holders of the same slices get the same bytes. There are few different sets of slices.
    made: dict[tuple[int, ...], bytes] = {}
    pieces = {}
    for container, numbers in shares.items():
        share = tuple(numbers)
        if share not in made:
            made[share] = encode(header, select_slices(meta, frame, share), slicemap=slicemap)
        pieces[container] = made[share]
    return pieces


class Backups:
    """Backups of one stage in one process. It is for one thread, and does no I/O but through ``spill``."""

    def __init__(
        self,
        job: str,
        stage: str,
        key: Sequence[str],
        slicemap: SliceMap,
        memory_max: int,
        spill: Spill | None,
        *,
        eager: bool = True,
    ) -> None:
        """``eager``: merge and spill as soon as it is due, so that nobody need call ``work``."""
        self.eager = eager
        self.job = job
        self.stage = stage
        self.key = list(key)
        self.slicemap = slicemap
        self.memory_max = memory_max
        self.spill = spill
        self.ignored = 0
        """Number of pieces that were not meant for these backups, or could not be read."""
        self.problem: str | None = None
        """Why backups were given up, in words. None: all is well."""
        self.pinned: int | None = None
        """A checkpoint at which slices are being seeded: all commits after it are kept."""
        self._wanted: frozenset[int] = frozenset()
        self._held: dict[int, _Slice] = {}
        self._pieces: dict[str, list[_Piece]] = {}
        self._open: dict[str, _OpenFile] = {}
        self._commits: dict[int, _KnownCommit] = {}
        self._newest = -1
        self._given_up: set[int] = set()
        self._unmerged: set[int] = set()
        """Slices that got deltas, and have not been looked at for merging since then."""
        self._progress: dict[int, Any] = {}
        """Checkpoint that a known commit leads to -> how far each source had been read, from the header of a delta."""
        self._shedding = False

    # ---- what is held ----------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Memory held by frames and pieces."""
        return self._frame_bytes() + self._piece_bytes()

    @property
    def bytes_spilled(self) -> int:
        return sum(held.disk.size for held in self._held.values() if held.disk is not None)

    @property
    def wanted(self) -> frozenset[int]:
        return self._wanted

    @property
    def given_up(self) -> frozenset[int]:
        """Wanted slices that there is no room for. They are tried again when the wanted slices change."""
        return frozenset(self._given_up)

    def want(self, slices: frozenset[int]) -> None:
        """Hold these slices from now on, and drop all others."""
        if slices == self._wanted:
            return
        self._wanted = frozenset(slices)
        self._given_up.clear()  # there may be room now
        self.problem = None
        for number in [n for n in self._held if n not in self._wanted]:
            self._drop(number)
        self._forget_useless()

    def to_seed(self, checkpoint: int) -> frozenset[int]:
        """Wanted slices that the known commits cannot bring to ``checkpoint``: they must be seeded."""
        reaches: dict[int, bool] = {}
        out = set()
        for number in self._wanted - self._given_up:
            held = self._held.get(number)
            if held is None:
                out.add(number)
                continue
            if held.version not in reaches:
                reaches[held.version] = self._reaches(held.version, checkpoint)
            if not reaches[held.version]:
                out.add(number)
        return frozenset(out)

    def current(self, checkpoint: int) -> frozenset[int]:
        """Slices that stand exactly at ``checkpoint``."""
        return frozenset(number for number, held in self._held.items() if held.version == checkpoint)

    def within_reach(self, checkpoint: int) -> frozenset[int]:
        """Slices that are current, or will be once pieces that known commits ask for have arrived or been read."""
        versions = {held.version for held in self._held.values()}
        near = {version for version in versions if version == checkpoint or self._reaches(version, checkpoint)}
        return frozenset(number for number, held in self._held.items() if held.version in near)

    def take(self, slices: Collection[int], checkpoint: int) -> dict[int, list[pl.DataFrame]]:
        """Slice -> its frames in order, for each slice that is current at ``checkpoint``. Later rows win; tombstones
        are rows, too."""
        out = {}
        for number in slices:
            held = self._held.get(number)
            if held is None or held.version != checkpoint:
                continue
            base = self._base(number)
            if number not in self._held:
                continue
            frames = [] if base is None else [base]
            out[number] = frames + [run.part(number) for run in held.deltas]
        return out

    # ---- what comes in ---------------------------------------------------------------------------------------------

    def offer(self, piece: bytes) -> bool:
        """Take in a piece that arrived. False: it is not meant for these backups, or damaged, and was ignored."""
        try:
            meta = decode_header(piece, "a piece of a delta")
            ours = meta["job"] == self.job and meta["stage"] == self.stage and meta["kind"] == "delta"
            ours = ours and meta["slices_total"] == self.slicemap.count
            arrived = _Piece(
                piece, int(meta["epoch_to"]), frozenset(map(int, meta["slices"])), _from_bitmap(meta["changed"])
            )
            name = meta["name"]
        except (PenstockError, KeyError, TypeError, ValueError, AttributeError):
            ours = False
        if not ours:
            self.ignored += 1
            return False
        before = self._pieces.get(name, [])
        if any(arrived.slices <= one.slices for one in before) or not self._useful(name, arrived):
            return True  # it is here already, or is of no use any more
        if 2 * (self._piece_bytes() + len(piece)) > self.memory_max:
            return True  # pieces of a checkpoint that never completes must not fill the memory: the file can be read
        self._pieces[name] = [*before, arrived]
        return True

    def commit(self, commit: Commit) -> list[str]:
        """A checkpoint is complete: slices that stand at the checkpoint before it come forward.

        Returns the names of files that some slices lack. ``supply`` them, and call ``advance``."""
        assert commit.before < commit.epoch, f"a checkpoint at {commit.epoch} after {commit.before}"
        self._commits[commit.before] = _KnownCommit(commit)
        self._newest = max(self._newest, commit.epoch)
        return self.advance()

    def supply(self, name: str, meta: Mapping[str, Any], frame: pl.DataFrame) -> None:
        """Take in a whole delta file, read from the durable store."""
        assert meta["slices_total"] == self.slicemap.count
        index = {int(number): place for number, place in meta["slices"].items()}
        file = self._open.setdefault(name, _OpenFile())
        mine = {n: (p[0], p[1]) for n, p in index.items() if n in self._wanted and n not in file.runs}
        file.add(_Run.of(frame, mine))
        file.changed = frozenset(index)
        self._progress[int(meta.get("epoch_to", -1))] = meta.get("progress")

    def seed(self, slice: int, epoch: int, frames: Sequence[pl.DataFrame], progress: Mapping[str, Any]) -> None:
        """Take in a slice as the durable checkpoint at ``epoch`` has it. ``progress``: how far each source had been
        read then. ``advance`` brings the slice forward from there."""
        if slice not in self._wanted:
            return
        self._drop(slice)
        held = _Slice(epoch, progress)
        base: pl.DataFrame | None = None
        if frames:
            # The small frames are merged first: each merge into the large one copies all of it.
            base = merge_two(None, frames[0], self.key, drop_deleted=True)
            if len(frames) > 1:
                later = merge_frames(frames[1:], self.key, drop_deleted=False)
                base = merge_two(base, later, self.key, drop_deleted=True)
        if base is not None and base.height:
            held.set_base(owned(base))
        self._held[slice] = held
        if self.eager:
            self.work()

    def advance(self) -> list[str]:
        """Bring every slice as far forward as the known commits and the files at hand allow. Returns the names of
        missing files."""
        missing: dict[str, None] = {}
        for number, held in self._held.items():
            start = held.version
            while (known := self._commits.get(held.version)) is not None:
                runs, lacking = self._rows_for(number, known)
                if lacking:
                    missing.update(dict.fromkeys(lacking))
                    break
                held.deltas.extend(runs)
                held.version = known.epoch
                # A checkpoint without a file for these slices says nothing of progress, and they are as they were.
                held.progress = self._progress.get(known.epoch, held.progress)
            if held.version != start and held.deltas:
                self._unmerged.add(number)
        if self.eager:
            self.work()
        self._forget_useless()
        return list(missing)

    def work(self, bytes_max: float = math.inf) -> bool:
        """Merge and spill what is due: about ``bytes_max`` bytes, and at least one slice. True: more is due."""
        left = self._merge_due(bytes_max)
        return left <= 0 or self._spill_to_fit(left) <= 0

    def lose(self, name: str) -> None:
        """A file no longer exists, because it was merged with others. Slices that wait for it are dropped, and will be
        seeded again."""
        for number, held in list(self._held.items()):
            known = self._commits.get(held.version)
            if known is not None and name in self._rows_for(number, known)[1]:
                self._drop(number)

    # ---- coming forward --------------------------------------------------------------------------------------------

    def _rows_for(self, number: int, known: _KnownCommit) -> tuple[list[_Run], list[str]]:
        """The rows that a commit adds to a slice, and the names of files that are missing for it."""
        runs: list[_Run] = []
        lacking: list[str] = []
        for name in known.by_slice.get(number, ()):
            file = self._decode_pieces(name)
            if number in file.runs:
                runs.append(file.runs[number])
            elif file.changed is None or number in file.changed:
                lacking.append(name)
        return runs, lacking

    def _decode_pieces(self, name: str) -> _OpenFile:
        """What is here of a file. Its pieces are decoded now, when its checkpoint is complete, and no sooner."""
        file = self._open.get(name, _OpenFile())
        for piece in self._pieces.pop(name, ()):
            try:
                meta, frame = decode(piece.data, name)
                places = {int(number): (place[0], place[1]) for number, place in meta["slices"].items()}
            except (PenstockError, KeyError, TypeError, ValueError):
                self.ignored += 1
                continue
            mine = {n: p for n, p in places.items() if n in self._wanted and n not in file.runs}
            file.add(_Run.of(frame, mine))
            file.changed = piece.changed
            self._open[name] = file
            self._progress[piece.epoch] = meta.get("progress")
        return file

    def _reaches(self, version: int, checkpoint: int) -> bool:
        """Whether the known commits lead from one checkpoint to the other."""
        while version < checkpoint:
            known = self._commits.get(version)
            if known is None:
                return False
            version = known.epoch
        return True

    def _useful(self, name: str, piece: _Piece) -> bool:
        """Whether a wanted slice may still need a piece."""
        if not any(number in self._wanted and self._version(number) < piece.epoch for number in piece.slices):
            return False
        return piece.epoch > self._newest or any(name in known.names for known in self._commits.values())

    def _version(self, number: int) -> int:
        held = self._held.get(number)
        return -1 if held is None else held.version

    def _forget_useless(self) -> None:
        """Forget commits that no slice needs, pieces of checkpoints that were never completed, and files that all
        slices have used."""
        pinned = self._newest if self.pinned is None else self.pinned
        for before in sorted(self._commits)[:-COMMITS_KEPT]:
            if before < pinned:
                del self._commits[before]
        for name, pieces in list(self._pieces.items()):
            left = [piece for piece in pieces if self._useful(name, piece)]
            if left:
                self._pieces[name] = left
            else:
                del self._pieces[name]
        known_epochs = {known.epoch for known in self._commits.values()}
        self._progress = {epoch: p for epoch, p in self._progress.items() if epoch in known_epochs}
        epochs = {name: known.epoch for known in self._commits.values() for name in known.names}
        for name, file in list(self._open.items()):
            epoch = epochs.get(name, -1)
            for number in [n for n in file.runs if n not in self._wanted or self._version(n) >= epoch]:
                run = file.runs.pop(number)
                held = self._held.get(number)
                if held is None or run not in held.deltas:
                    run.release([number])
            if all(n not in self._wanted or self._version(n) >= epoch for n in file.changed or ()):
                del self._open[name]

    # ---- merging ---------------------------------------------------------------------------------------------------

    def _merge_due(self, bytes_max: float) -> float:
        """Merge the deltas that are due, up to about ``bytes_max``. Returns how many of these bytes are left. Slices
        with the same deltas are merged together, and so go on having the same deltas."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for number in sorted(self._unmerged):
            if number in self._held and self._held[number].deltas:
                groups.setdefault(tuple(id(run) for run in self._held[number].deltas), []).append(number)
            else:
                self._unmerged.discard(number)
        left = bytes_max
        for group in groups.values():
            runs = self._held[group[0]].deltas
            sizes = [sum(run.share(number) for number in group) for run in runs]
            base = sum(self._held[number].base_bytes for number in group)
            if sum(sizes) >= max(BASE_RATIO * base, SMALL_BYTES * len(group)):
                while group and left > 0:
                    some, left = self._take_portion(group, runs, left, with_base=True)
                    self._merge_all(some)
            elif len(sizes) > DELTAS_MAX:
                count = _newest_to_merge(sizes)
                while group and left > 0:
                    some, left = self._take_portion(group, runs[-count:], left)
                    self._merge_all([number for number in some if not self._held[number].base_bytes])
                    self._merge_newest([n for n in some if n in self._held and self._held[n].deltas], count)
            else:
                self._unmerged.difference_update(group)
            if left <= 0:
                break
        return left

    def _take_portion(
        self, group: list[int], runs: Sequence[_Run], left: float, *, with_base: bool = False
    ) -> tuple[list[int], float]:
        """Take the first slices out of a group, up to ``left`` bytes of these runs. They count as merged. Returns them,
        and the bytes that are left."""
        some = []
        while group and left > 0:
            number = group.pop(0)
            left -= sum(run.share(number) for run in runs) + (self._held[number].base_bytes if with_base else 0)
            some.append(number)
        self._unmerged.difference_update(some)
        return some, left

    def _merge_all(self, numbers: Sequence[int]) -> None:
        """Merge the deltas of slices into their bases. All of the slices have the same deltas."""
        if not numbers:
            return
        runs = list(self._held[numbers[0]].deltas)
        disks = []
        for number in numbers:
            held = self._held[number]
            base = self._base(number)
            if number not in self._held:
                continue
            newer = merge_frames([run.part(number) for run in runs], self.key, drop_deleted=False)
            merged = owned(merge_two(base, newer, self.key, drop_deleted=True))
            # The old files go after the slice is whole again: an error must not leave half a slice.
            if held.disk is not None:
                disks.append(held.disk)
            held.deltas, held.disk = [], None
            held.set_base(merged if merged.height else None)
        self._release(numbers, runs, disks)

    def _merge_newest(self, numbers: Sequence[int], count: int) -> None:
        """Merge the newest ``count`` deltas into one. All of the slices have the same deltas."""
        if not numbers:
            return
        runs = self._held[numbers[0]].deltas[-count:]
        newer = merge_frames([run.parts(numbers) for run in runs], self.key, drop_deleted=False)
        newer, index = sort_by_slice(newer, self.slicemap)
        run = _Run.of(owned(newer), {number: (place[0], place[1]) for number, place in index.items()})
        for number in numbers:
            held = self._held[number]
            held.deltas = [*held.deltas[:-count], run]
        self._release(numbers, runs, [])

    def _release(self, numbers: Collection[int], runs: Iterable[_Run], disks: Iterable[_OnDisk]) -> None:
        """Some slices no longer need these runs and files."""
        for run in runs:
            for file in self._open.values():
                for number in numbers:
                    if file.runs.get(number) is run:
                        del file.runs[number]
            run.release(numbers)
        for disk in disks:
            assert self.spill is not None
            try:
                self.spill.delete(disk.name)
            except OSError as error:
                self.problem = f"a file of a backup of stage '{self.stage}' cannot be removed: {error}"

    # ---- memory and disk -------------------------------------------------------------------------------------------

    def _frame_bytes(self) -> int:
        runs = {id(run): run.nbytes for held in self._held.values() for run in held.deltas}
        runs |= {id(run): run.nbytes for file in self._open.values() for run in file.runs.values()}
        in_memory = sum(held.base_bytes for held in self._held.values() if held.disk is None)
        return in_memory + sum(runs.values())

    def _piece_bytes(self) -> int:
        return sum(len(piece.data) for pieces in self._pieces.values() for piece in pieces)

    def _spill_to_fit(self, bytes_max: float) -> float:
        """Spill the largest slices until the rest fits, up to about ``bytes_max``. Returns how many of these bytes are
        left."""
        left = self.nbytes
        self._shedding |= left > self.memory_max
        limit = int(self.memory_max * SHED_TO)
        if not self._shedding:
            return bytes_max
        sizes = {number: held.memory(number) for number, held in self._held.items()}
        for number in sorted(sizes, key=lambda n: (-sizes[n], n)):
            if left <= limit:
                left = self.nbytes  # slices share frames, so their sizes were an estimate
            if left <= limit or not sizes[number]:
                break
            if bytes_max <= 0:
                return bytes_max
            self._spill(number)
            left -= sizes[number]
            bytes_max -= sizes[number]
        self._shedding = False
        if self.nbytes > self.memory_max:
            self._give_up_waiting()
        return bytes_max

    def _give_up_waiting(self) -> None:
        """Only files that wait for other files are left in memory, and still too much. Read again they would be as
        large, so their slices are given up."""
        for file in self._open.values():
            for number, run in list(file.runs.items()):
                held = self._held.get(number)
                if held is None or run not in held.deltas:
                    self._give_up(number, f"they need more than {self.memory_max:,} bytes of memory")
                    run.release([number])
                    file.runs.pop(number, None)
        for name in [name for name, file in self._open.items() if not file.runs]:
            del self._open[name]

    def _spill(self, number: int) -> None:
        if self.spill is None:
            self._give_up(number, f"they need more than {self.memory_max:,} bytes of memory")
            return
        if self._held[number].deltas:
            self._merge_all([number])
        held = self._held.get(number)
        if held is None or held.base is None:
            return
        name = f"{self.stage}/{number:05d}-{held.version:012d}"
        meta = {"job": self.job, "stage": self.stage, "slice": number, "epoch": held.version}
        data = encode({**meta, "progress": held.progress}, held.base)
        try:
            self.spill.put(name, data)
        except (OSError, PenstockError) as error:
            self._give_up(number, f"they do not fit into memory, and the local disk failed ({error})")
            return
        held.disk = _OnDisk(name, held.version, len(data))
        held.base = None  # base_bytes stays: it decides when the deltas have outgrown the base

    def _base(self, number: int) -> pl.DataFrame | None:
        """The base of a slice, from memory or disk. If it cannot be read, the slice is dropped."""
        held = self._held[number]
        if held.disk is None:
            return held.base
        assert self.spill is not None
        disk = held.disk
        try:
            meta, frame = decode(self.spill.get(disk.name), disk.name)
            found = (meta.get("job"), meta.get("stage"), meta.get("slice"), meta.get("epoch"))
            if found != (self.job, self.stage, number, disk.epoch):
                raise OSError(f"{disk.name} belongs to another backup: {found}")
        except (OSError, PenstockError) as error:
            # It is not given up: it can be seeded again.
            self.problem = f"a backup of slice {number} of stage '{self.stage}' is lost: {error}"
            self._drop(number)
            return None
        return frame

    def _give_up(self, number: int, why: str) -> None:
        self.problem = f"backups of stage '{self.stage}' were given up, as {why}; the durable checkpoint has them all"
        self._drop(number)
        self._given_up.add(number)

    def _drop(self, number: int) -> None:
        held = self._held.pop(number, None)
        if held is not None:
            self._release([number], held.deltas, [] if held.disk is None else [held.disk])


def _newest_to_merge(sizes: Sequence[int]) -> int:
    """How many of the newest deltas to merge: two, and more as long as the next older is no larger than these
    together."""
    count, merged = 2, sum(sizes[-2:])
    while count < len(sizes) and sizes[-count - 1] <= merged:
        merged += sizes[-count - 1]
        count += 1
    return count


def merge_two(
    older: pl.DataFrame | None, newer: pl.DataFrame, key: Sequence[str], *, drop_deleted: bool
) -> pl.DataFrame:
    """``merge_frames`` of a large older frame and a small newer one, ten times as fast: keys are compared only where
    hashes are the same."""
    if older is None:
        return merge_frames([newer], key, drop_deleted)
    if older.schema != newer.schema or 4 * newer.height > older.height:
        return merge_frames([older, newer], key, drop_deleted)
    met = older.get_column(HASH).is_in(newer.get_column(HASH).implode())
    apart = older.filter(~met)
    if drop_deleted:
        apart = apart.filter(~pl.col(DELETED))
    return pl.concat([apart, merge_frames([older.filter(met), newer], key, drop_deleted)], rechunk=False)


def owned(frame: pl.DataFrame) -> pl.DataFrame:
    """A copy that shares no buffer with another frame."""
    if frame.n_chunks() == 1:  # rechunk would copy nothing, and a view of numbers would stay one
        frame = frame[np.arange(frame.height, dtype=np.uint32)]
    return detached(frame)


# ---- inner parts ---------------------------------------------------------------------------------------------------


class _Run:
    """Rows of several slices in one frame, as a delta brought them. A slice releases its part when it has merged it."""

    def __init__(self, frame: pl.DataFrame, places: dict[int, tuple[int, int]]) -> None:
        self.frame = frame
        self.places = places
        self.nbytes = int(frame.estimated_size())
        self.rows = sum(length for _, length in places.values())

    @classmethod
    def of(cls, frame: pl.DataFrame, places: Mapping[int, tuple[int, int]]) -> _Run:
        run = cls(frame, dict(places))
        run._shrink_if_due()
        return run

    def part(self, number: int) -> pl.DataFrame:
        return self.frame.slice(*self.places[number])

    def parts(self, numbers: Collection[int]) -> pl.DataFrame:
        """The rows of some slices together."""
        if self.rows == self.frame.height and len(numbers) == len(self.places):
            return self.frame
        return self.frame[self._rows_of(numbers)]

    def share(self, number: int) -> int:
        """About how many bytes the rows of a slice take."""
        return self.nbytes * self.places[number][1] // max(1, self.frame.height)

    def release(self, numbers: Iterable[int]) -> None:
        """Slices no longer need their rows in this frame."""
        for number in numbers:
            place = self.places.pop(number, None)
            self.rows -= 0 if place is None else place[1]
        self._shrink_if_due()

    def _rows_of(self, numbers: Iterable[int]) -> NDArray[np.uint32]:
        spans = [self.places[number] for number in numbers]
        ranges = [np.arange(offset, offset + length, dtype=np.uint32) for offset, length in spans]
        return np.concatenate([np.zeros(0, dtype=np.uint32), *ranges])

    def _shrink_if_due(self) -> None:
        """Copy the rows that are still needed when they are less than half of the frame."""
        if 2 * self.rows >= self.frame.height:
            return
        self.frame = detached(self.frame[self._rows_of(self.places)])
        ends = list(itertools.accumulate(length for _, length in self.places.values()))
        self.places = {n: (end - p[1], p[1]) for (n, p), end in zip(self.places.items(), ends, strict=True)}
        self.nbytes = int(self.frame.estimated_size())


@dataclass(frozen=True)
class _Piece:
    data: bytes
    epoch: int
    slices: frozenset[int]
    changed: frozenset[int]
    """All slices with rows in the file, whether this piece has them or not."""


@dataclass
class _OpenFile:
    """What is here of a committed file."""

    runs: dict[int, _Run] = field(default_factory=dict)
    changed: frozenset[int] | None = None
    """The slices with rows in the file. None: not known. A slice that is not in ``runs`` was not sent to this holder,
    or has been used. One that is seeded again must not count as unchanged."""

    def add(self, run: _Run) -> None:
        self.runs.update(dict.fromkeys(run.places, run))


class _KnownCommit:
    """A commit, by slice: the files that each slice needs."""

    def __init__(self, commit: Commit) -> None:
        self.epoch = commit.epoch
        self.names = frozenset(commit.files)
        self.by_slice: dict[int, list[str]] = {}
        for name, numbers in commit.files.items():
            for number in numbers:
                self.by_slice.setdefault(number, []).append(name)


@dataclass(frozen=True)
class _OnDisk:
    name: str
    epoch: int
    size: int


@dataclass
class _Slice:
    version: int
    progress: Mapping[str, Any] | None
    """source -> how far it had been read: the input that the slice reflects. None: the delta's header did not say."""
    base: pl.DataFrame | None = None
    base_bytes: int = 0
    """Size of the base, in memory or on disk."""
    disk: _OnDisk | None = None
    deltas: list[_Run] = field(default_factory=list)

    def set_base(self, frame: pl.DataFrame | None) -> None:
        self.base = frame
        self.base_bytes = 0 if frame is None else int(frame.estimated_size())

    def memory(self, number: int) -> int:
        """About how many bytes of memory the slice takes."""
        in_memory = self.base_bytes if self.disk is None else 0
        return in_memory + sum(run.share(number) for run in self.deltas)


def _bitmap(numbers: Iterable[int]) -> str:
    """Numbers as the bits of a hexadecimal text, which is short for tens of thousands of slices, too."""
    return f"{sum(1 << number for number in numbers):x}"


def _from_bitmap(text: str) -> frozenset[int]:
    bits = bin(int(text, 16))[:1:-1]
    return frozenset(number for number, bit in enumerate(bits) if bit == "1")


__all__ = ["Backups", "Commit", "Spill", "cut", "merge_two", "owned"]
