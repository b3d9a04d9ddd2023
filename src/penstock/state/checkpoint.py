"""What a checkpoint consists of, and how its chains of files stay short. It does no I/O: names and numbers in,
decisions out.

A :class:`Manifest` is a checkpoint: it names, for every stage and in order, the files that hold its state, and for
every source how far it was read. It is written last, atomically. A file that no manifest names does not count.

**Which rows of a file count.** A container writes one file for all its slices, and slices move between containers, so
the files of a stage overlap. In each entry of a manifest, ``slices`` says for *which slices the file still counts*. To
restore a slice, take the entries that list it, in order, and from each file only the rows of that slice. Later rows
win.

When a base or a merged delta takes over some slices, these slices are taken out of the older entries. An entry without
slices is dropped, and its file is garbage. Rows of a slice that an entry no longer lists must be left out: a base holds
no tombstones, so an older row could come back to life.

**Compaction.** When a slice has more than ``deltas_max`` deltas, the newest ones are merged, and older ones with them
as long as the next older delta is no larger than the merged ones together. So sizes along a chain fall geometrically,
and a row is rewritten O(log) times before it gets into a base. When the deltas of a slice together reach ``ratio``
times its base, all of it becomes a new base. No chain is longer than ``deltas_max + 2``, however long the job runs.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal

import polars as pl
import xxhash

from penstock.errors import CorruptData
from penstock.state.table import DELETED

Json = Any
Kind = Literal["base", "delta"]

MERGE_BYTES: Final = 128 * 2**20
"""Bytes of files that one merge reads. Its memory is four times as much, or more."""

MANIFEST_PREFIX: Final = "manifest-"
_HEAD: Final = b'{"checksum":"'
_MIDDLE: Final = b'","body":'
_END: Final = b"}\n"
_DIGITS: Final = 16
_FORMAT: Final = 1


@dataclass(frozen=True)
class DeltaFile:
    """A file of state. ``slices``: the slices that it still counts for. ``slices_written``: the number of slices that
    it was written for."""

    name: str
    stage: str
    kind: Kind
    epoch_from: int
    epoch_to: int
    slices: tuple[int, ...]
    rows: int
    bytes: int
    checksum: str
    slices_written: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "slices", tuple(sorted(self.slices)))
        if not self.slices_written:
            object.__setattr__(self, "slices_written", len(self.slices))

    @property
    def bytes_per_slice(self) -> float:
        """An even share of the file. Keys are spread evenly over slices, so it is near the truth, and it only steers
        compaction."""
        return self.bytes / max(1, self.slices_written)

    def only(self, slices: Collection[int]) -> DeltaFile:
        """The same file, counting for no other slices than these."""
        return replace(self, slices=tuple(s for s in self.slices if s in slices))

    def without(self, slices: Collection[int]) -> DeltaFile:
        """The same file, no longer counting for these slices."""
        return replace(self, slices=tuple(s for s in self.slices if s not in slices))


@dataclass(frozen=True)
class CompactionTask:
    """What a merge does: read from each of ``inputs``, in order, the rows of its ``slices``, merge them, and write one
    file for the ``slices`` of the task."""

    stage: str
    kind: Kind
    inputs: tuple[DeltaFile, ...]
    slices: tuple[int, ...]

    @property
    def drop_deleted(self) -> bool:
        """Whether tombstones go. A base is all there is of its slices: no older row is left for a tombstone to hide."""
        return self.kind == "base"

    @property
    def epoch_from(self) -> int:
        return 0 if self.kind == "base" else min(file.epoch_from for file in self.inputs)

    @property
    def epoch_to(self) -> int:
        return max(file.epoch_to for file in self.inputs)


@dataclass(frozen=True)
class Manifest:
    """One complete checkpoint. Every field but ``files`` is JSON. Nothing in it is ever changed in place."""

    job_id: str
    flow: str
    fingerprint: Mapping[str, Json]
    """The layout of each stage's state. It tells whether an edited flow can take the state over."""
    epoch: int
    attempt: int = 0
    routing: Json = None
    sources: Mapping[str, Json] = field(default_factory=dict)
    """``{source id: {"offset": ..., "facts": [...]}}``"""
    clocks: Json = None
    """The clock and the watermarks."""
    files: Mapping[str, tuple[DeltaFile, ...]] = field(default_factory=dict)
    totals: Json = None

    def to_bytes(self) -> bytes:
        """One line of JSON, ``{"checksum": ..., "body": ...}``; the checksum is over the text of the body."""
        body = asdict(self) | {"format": _FORMAT}
        text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
        return _HEAD + xxhash.xxh3_64_hexdigest(text).encode() + _MIDDLE + text + _END

    @classmethod
    def from_bytes(cls, data: bytes, path: str = "manifest") -> Manifest:
        start = len(_HEAD) + _DIGITS + len(_MIDDLE)
        text = data[start : -len(_END)]
        framed = _HEAD + xxhash.xxh3_64_hexdigest(text).encode() + _MIDDLE + text + _END
        if len(data) < start + len(_END) or framed != data:
            raise _corrupt(path, "it does not match its checksum")
        try:
            body = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _corrupt(path, f"it is no JSON ({type(error).__name__})") from error
        if not isinstance(body, dict):
            raise _corrupt(path, "it is no manifest")
        found = body.pop("format", None)
        if found != _FORMAT:
            raise _corrupt(path, f"it has format {found}, and this Penstock reads format {_FORMAT}")
        try:
            files = {
                stage: tuple(DeltaFile(**{**entry, "slices": tuple(entry["slices"])}) for entry in entries)
                for stage, entries in body.pop("files").items()
            }
            return cls(files=files, **body)
        except (KeyError, TypeError, AttributeError) as error:
            raise _corrupt(path, f"it lacks something ({error})") from error

    @property
    def name(self) -> str:
        return manifest_name(self.epoch, self.attempt)

    def files_for(self, stage: str, slices: Collection[int]) -> list[DeltaFile]:
        """The files to read for some slices, in order. From each file take only the rows of the ``slices`` that its
        returned entry lists."""
        wanted = frozenset(slices)
        narrowed = (file.only(wanted) for file in self.files.get(stage, ()))
        return [file for file in narrowed if file.slices]

    def all_files(self) -> list[DeltaFile]:
        return [file for files in self.files.values() for file in files]

    def names(self) -> frozenset[str]:
        """The name of every file that this checkpoint needs."""
        return frozenset(file.name for file in self.all_files())

    def advance(
        self,
        epoch: int,
        new_files: Iterable[DeltaFile],
        *,
        attempt: int | None = None,
        routing: Json = None,
        sources: Mapping[str, Json] | None = None,
        clocks: Json = None,
        totals: Json = None,
        fingerprint: Mapping[str, Json] | None = None,
    ) -> Manifest:
        """The checkpoint after this one. New files come last, and a base takes its slices over from all files before
        it. Arguments that are not given stay as they were."""
        assert epoch > self.epoch, f"a checkpoint at {epoch} after one at {self.epoch}"
        files = dict(self.files)
        for file in new_files:
            files[file.stage] = _appended(files.get(file.stage, ()), file)
        return replace(
            self,
            epoch=epoch,
            files=files,
            attempt=self.attempt if attempt is None else attempt,
            routing=self.routing if routing is None else routing,
            sources=self.sources if sources is None else sources,
            clocks=self.clocks if clocks is None else clocks,
            totals=self.totals if totals is None else totals,
            fingerprint=self.fingerprint if fingerprint is None else fingerprint,
        )

    def compacted(self, task: CompactionTask, output: DeltaFile) -> Manifest:
        """This checkpoint, with the output of a finished compaction in place of its inputs.

        The task may have been planned on an earlier manifest. Files that came since then stay behind the output. The
        output does not count for slices whose inputs were replaced in the meantime."""
        assert output.stage == task.stage and set(output.slices) <= set(task.slices)
        files = self.files.get(task.stage, ())
        counted = {(file.name, number) for file in files for number in file.slices}
        needed = {(file.name, number) for file in task.inputs for number in file.slices}
        stale = {number for name, number in needed if (name, number) not in counted}
        output = output.without(stale)
        if not output.slices:
            return self
        taken = {file.name: frozenset(file.slices) - stale for file in task.inputs}
        last = max(i for i, file in enumerate(files) if taken.get(file.name))
        kept: list[DeltaFile] = []
        for i, file in enumerate(files):
            narrowed = file.without(taken.get(file.name, frozenset()))
            if narrowed.slices:
                kept.append(narrowed)
            if i == last:
                kept.append(output)
        return replace(self, files={**self.files, task.stage: tuple(kept)})


def manifest_name(epoch: int, attempt: int) -> str:
    """The name of a manifest. Names sort by epoch, then by attempt."""
    return f"{MANIFEST_PREFIX}{epoch:012d}-{attempt:06d}.json"


def parse_manifest_name(name: str) -> tuple[int, int] | None:
    """Epoch and attempt. None: the last part of ``name`` is not the name of a manifest."""
    stem = name.rsplit("/", 1)[-1]
    if not (stem.startswith(MANIFEST_PREFIX) and stem.endswith(".json")):
        return None
    parts = stem[len(MANIFEST_PREFIX) : -len(".json")].split("-")
    if len(parts) != 2 or not all(part.isdigit() for part in parts):
        return None
    return int(parts[0]), int(parts[1])


def check_file(file: DeltaFile, data: bytes, path: str) -> None:
    """Check that these bytes are the file that the manifest means. A wrong file that is whole in itself would pass its
    own checksum."""
    if len(data) != file.bytes or xxhash.xxh3_64_hexdigest(data) != file.checksum:
        raise CorruptData(
            f"State file {path} is not the one that its checkpoint names.",
            remedy="Restore the file from a copy, or start again from an older checkpoint.",
            path=path,
        )


def plan_compaction(
    files: Sequence[DeltaFile],
    deltas_max: int = 8,
    ratio: float = 1.0,
    *,
    deltas_min: int = 2,
    bytes_max: int = MERGE_BYTES,
) -> list[CompactionTask]:
    """The compactions that are due in the files of one stage. No two tasks share a slice, so they may run in any order
    or in parallel.

    Slices that share their newest file live in the same container, and are merged together. A task reads no more than
    ``bytes_max``, because a merge has all of it in memory."""
    assert deltas_max >= 2 and deltas_min >= 1
    due: dict[tuple[str, Kind], list[int]] = {}
    reach: dict[tuple[str, Kind], int] = {}
    for number, chain in _chains(files).items():
        found = _due(files, chain, deltas_max, ratio, deltas_min)
        if found is not None:
            kind, first = found
            group = (files[chain[-1]].name, kind)
            due.setdefault(group, []).append(number)
            reach[group] = min(first, reach.get(group, first))
    tasks = []
    for (name, kind), numbers in due.items():
        # The inputs start at the same file for all slices of the task, so that every later delta is an input.
        candidates = [f for f in files[reach[name, kind] :] if kind == "base" or f.kind == "delta"]
        for slices in _portions(sorted(numbers), candidates, bytes_max):
            inputs = tuple(file for file in (f.only(slices) for f in candidates) if file.slices)
            tasks.append(CompactionTask(inputs[0].stage, kind, inputs, tuple(sorted(slices))))
    return tasks


def _portions(numbers: Sequence[int], files: Sequence[DeltaFile], bytes_max: int) -> Iterator[frozenset[int]]:
    """Slices in groups of at most ``bytes_max``. A slice that is larger is a group of its own."""
    sizes = dict.fromkeys(numbers, 0.0)
    for file in files:
        for number in sizes.keys() & set(file.slices):
            sizes[number] += file.bytes_per_slice
    group: list[int] = []
    total = 0.0
    for number in numbers:
        if group and total + sizes[number] > bytes_max:
            yield frozenset(group)
            group, total = [], 0.0
        group.append(number)
        total += sizes[number]
    yield frozenset(group)


def merge_frames(frames: Sequence[pl.DataFrame], key: Sequence[str], drop_deleted: bool) -> pl.DataFrame:
    """The last row of each key, over frames in order. ``drop_deleted``: leave tombstones out, as for a base."""
    assert frames
    alike = all(frame.schema == frames[0].schema for frame in frames)
    whole = pl.concat(frames, how="vertical" if alike else "diagonal_relaxed", rechunk=False)
    merged = whole if len(frames) == 1 else whole.unique(subset=list(key), keep="last", maintain_order=True)
    return merged.filter(~pl.col(DELETED)) if drop_deleted else merged


def garbage(
    all_names: Iterable[str], manifests_kept: Iterable[Manifest], *, in_flight: Collection[str] = ()
) -> list[str]:
    """State files that no kept manifest needs. Manifests themselves are never listed. ``in_flight``: files that were
    written for a checkpoint or a compaction that has no manifest yet."""
    needed = frozenset(in_flight).union(*(manifest.names() for manifest in manifests_kept))
    return sorted(name for name in all_names if name not in needed and parse_manifest_name(name) is None)


def _appended(files: tuple[DeltaFile, ...], new: DeltaFile) -> tuple[DeltaFile, ...]:
    assert all(new.name != file.name for file in files), f"{new.name} is in the checkpoint already"
    if not new.slices:
        return files
    if new.kind == "base":
        narrowed = (file.without(frozenset(new.slices)) for file in files)
        files = tuple(file for file in narrowed if file.slices)
    return (*files, new)


def _chains(files: Sequence[DeltaFile]) -> dict[int, list[int]]:
    """For each slice, the positions of the files that count for it, in order."""
    chains: dict[int, list[int]] = {}
    for position, file in enumerate(files):
        for number in file.slices:
            chain = chains.setdefault(number, [])
            assert file.kind == "delta" or not chain, f"slice {number}: {file.name} is a base, and older files count"
            chain.append(position)
    return chains


def _due(
    files: Sequence[DeltaFile], chain: Sequence[int], deltas_max: int, ratio: float, deltas_min: int
) -> tuple[Kind, int] | None:
    """The kind of compaction that one slice needs, and the position of its first input. None: it needs none."""
    has_base = files[chain[0]].kind == "base"
    deltas = chain[1:] if has_base else chain
    if len(deltas) < deltas_min:
        return None
    sizes = [files[position].bytes_per_slice for position in deltas]
    if has_base and sum(sizes) >= ratio * files[chain[0]].bytes_per_slice:
        return "base", chain[0]
    if len(deltas) <= deltas_max:
        return None
    if not has_base:
        return "base", chain[0]
    count = max(2, deltas_max // 2)
    merged = sum(sizes[-count:])
    while count < len(deltas) and sizes[-count - 1] <= merged:
        merged += sizes[-count - 1]
        count += 1
    return "delta", deltas[-count]


def _corrupt(path: str, why: str) -> CorruptData:
    return CorruptData(
        f"Checkpoint manifest {path} is damaged: {why}.",
        remedy="Remove it to go on from the checkpoint before it, or restore it from a copy.",
        path=path,
    )


__all__ = [
    "CompactionTask",
    "DeltaFile",
    "Manifest",
    "check_file",
    "garbage",
    "manifest_name",
    "merge_frames",
    "parse_manifest_name",
    "plan_compaction",
]
