"""Random histories of deltas, with everything that can happen to pieces on the way: what a holder hands out is what the
durable checkpoint would give, or nothing."""

from __future__ import annotations

import errno
import random
from collections import Counter

import hypothesis.strategies as st
import numpy as np
import polars as pl
import pytest
from hypothesis import given

from penstock.state import backup, codec
from penstock.state.backup import Backups, Commit, cut
from penstock.state.checkpoint import DeltaFile, Manifest, merge_frames, plan_compaction
from penstock.state.hashing import hash_columns
from penstock.state.slicemap import SliceMap
from penstock.state.store import MemoryStore
from penstock.state.table import KeyedTable, TableSpec, numeric, objects
from tests.property.cuts import examples

SLICES = 6
SLICEMAP = SliceMap(SLICES)


class Text:
    def encode(self, value: str, /) -> bytes:
        return value.encode()

    def decode(self, data: bytes, /) -> str:
        return data.decode()


SPEC = TableSpec(pl.Schema({"k": pl.String(), "f": pl.Float64()}), {"n": numeric(np.int64), "o": objects(Text())})
KEYS = pl.DataFrame(
    {
        "k": [None, *(f"a key that is longer than a view {i % 9}" for i in range(79))],
        "f": [i / 2 if i % 5 else float("nan") for i in range(80)],
    },
    schema=SPEC.key,
).unique(maintain_order=True)
HASHES = hash_columns(KEYS, ["k", "f"])
HELD = frozenset({1, 2, 4})


class Disk(MemoryStore):
    """A spill that may fail or forget."""

    def __init__(self, rng: random.Random, failing: float) -> None:
        super().__init__()
        self.rng = rng
        self.failing = failing

    def put(self, name: str, data: bytes) -> None:
        if self.rng.random() < self.failing:
            raise OSError(errno.ENOSPC, "no space left")
        super().put(name, data)

    def get(self, name: str) -> bytes:
        data = super().get(name)
        return data[:-1] + b"?" if self.rng.random() < self.failing else data

    def clear(self) -> None:
        self.items.clear()


class World:
    """Two containers that write deltas of random slices, the durable store, and a holder of slices 1, 2 and 4."""

    def __init__(self, rng: random.Random, memory_max: int, failing: float, eager: bool) -> None:
        self.rng = rng
        self.store = MemoryStore()
        self.manifest = Manifest("j", "f", {}, epoch=0)
        self.table = KeyedTable(SPEC)
        self.owner = [rng.randrange(2) for _ in range(SLICES)]
        self.attempt = 0
        self.disk = Disk(rng, failing)
        self.backups = Backups("j", "s", ["k", "f"], SLICEMAP, memory_max, self.disk, eager=eager)
        self.backups.want(HELD)
        self.flying: list[bytes] = []
        self.seen: Counter[str] = Counter()
        self.seeding: tuple[int, Manifest] | None = None

    def work(self) -> None:
        rows = self.rng.sample(range(KEYS.height), self.rng.choice([0, 1, 3, 20]))
        places, _ = self.table.upsert(HASHES[rows], KEYS[rows])
        for row in places.tolist():
            self.table.column("n")[row] = self.rng.randrange(1000)
            self.table.column("o")[row] = "x" * self.rng.choice([1, 40, 200])
        gone = [row for row in places.tolist() if self.rng.random() < 0.3]
        self.table.delete(np.asarray(gone, dtype=np.int64))

    def seal(self, epoch: int) -> list[DeltaFile]:
        """One file for each container; pieces fly to the holder (container 7)."""
        frame = self.table.seal(epoch).frame()
        numbers = SLICEMAP.of(frame.get_column("__hash").to_numpy())
        files = []
        for container in range(2):
            owned = [s for s in range(SLICES) if self.owner[s] == container]
            mine = frame.filter(pl.Series(np.isin(numbers, owned), dtype=pl.Boolean))
            if not mine.height:
                continue
            name = f"state/s/{epoch:012d}-{self.attempt:04d}-{container:04d}.delta"
            meta = {"job": "j", "stage": "s", "kind": "delta", "epoch_from": self.manifest.epoch, "epoch_to": epoch}
            data = codec.encode(meta, mine, slicemap=SLICEMAP)
            self.store.put(name, data)
            listed = (
                owned if self.rng.random() < 0.5 else sorted(int(s) for s in codec.decode_header(data, "")["slices"])
            )
            files.append(
                DeltaFile(name, "s", "delta", self.manifest.epoch, epoch, tuple(listed), mine.height, len(data), "")
            )
            # Now and then the routing table did not (yet) say that we hold all of them.
            holders = [[7] if s in HELD and self.rng.random() < 0.9 else [3] for s in range(SLICES)]
            whole = (meta, mine) if self.rng.random() < 0.5 else data
            self.flying.extend(
                piece for at, piece in cut(whole, name, SLICEMAP, holders, self.attempt).items() if at == 7
            )
        return files

    def arrive(self) -> None:
        self.rng.shuffle(self.flying)
        left = []
        for piece in self.flying:
            luck = self.rng.random()
            if luck < 0.15:
                continue  # lost
            if luck < 0.3:
                left.append(piece)  # late
                continue
            if luck < 0.35:
                assert not self.backups.offer(piece[:-9] + b"?" + piece[-8:])
            for _ in range(1 if luck < 0.9 else 2):
                assert self.backups.offer(piece)
        self.flying = left

    def commit(self, epoch: int, files: list[DeltaFile]) -> None:
        before = self.manifest.epoch
        self.manifest = self.manifest.advance(epoch, files)
        if self.rng.random() < 0.3:
            self.compact()
        if self.rng.random() < 0.05:
            return  # nobody told us
        missing = self.backups.commit(Commit(before, epoch, {f.name: list(f.slices) for f in files}))
        for name in missing if self.rng.random() < 0.5 else ():
            self.backups.supply(name, *codec.decode(self.store.get(name), name))
        if self.rng.random() < 0.5:
            self.backups.advance()

    def compact(self) -> None:
        for i, task in enumerate(plan_compaction(self.manifest.files.get("s", ()), 3)):
            frames = [codec.select_slices(*codec.decode(self.store.get(f.name), ""), f.slices) for f in task.inputs]
            merged = merge_frames(frames, ["k", "f"], task.drop_deleted)
            data = codec.encode({}, merged, slicemap=SLICEMAP)
            name = f"c-{self.manifest.epoch}-{i}"
            self.store.put(name, data)
            out = DeltaFile(name, "s", task.kind, 0, task.epoch_to, task.slices, merged.height, len(data), "")
            self.manifest = self.manifest.compacted(task, out)

    def seed(self) -> None:
        """Begin a seed at the newest checkpoint, or end one that began some checkpoints ago."""
        if self.seeding is None:
            self.seeding = (self.manifest.epoch, self.manifest)
            self.backups.pinned = self.manifest.epoch
            return
        epoch, manifest = self.seeding
        for number in self.backups.to_seed(epoch):
            self.backups.seed(number, epoch, self.durable(manifest, number), {})
        self.seeding = self.backups.pinned = None
        self.backups.advance()

    def durable(self, manifest: Manifest, number: int) -> list[pl.DataFrame]:
        files = manifest.files_for("s", [number])
        return [codec.select_slices(*codec.decode(self.store.get(f.name), ""), [number]) for f in files]

    def check(self) -> None:
        epoch = self.manifest.epoch
        current = self.backups.current(epoch)
        assert current <= self.backups.wanted
        taken = self.backups.take(range(SLICES), epoch)
        assert set(taken) <= current
        for number, frames in taken.items():
            assert contents(frames) == contents(self.durable(self.manifest, number)), f"slice {number} at {epoch}"
            assert len(frames) <= backup.DELTAS_MAX + 1 or not self.backups.eager
        self.seen["taken"] += len(taken)
        self.seen["rows"] += sum(frame.height for frames in taken.values() for frame in frames)
        assert self.backups.take(range(SLICES), epoch + 1) == {}
        if self.rng.random() < 0.5:
            self.backups.advance()
            steps = 0
            while self.backups.work(self.rng.choice([1, 500])) and not self.backups.eager:
                steps += 1
                assert steps < 1_000, "work without end"
            assert self.backups.nbytes <= self.backups.memory_max
            settled = self.backups.take(range(SLICES), epoch)
            assert all(len(frames) <= backup.DELTAS_MAX + 1 for frames in settled.values())
        elif self.rng.random() < 0.5:
            self.backups.work(self.rng.choice([1, 500]))


def contents(frames: list[pl.DataFrame]) -> Counter[tuple[object, ...]]:
    table = KeyedTable(SPEC)
    for frame in frames:
        table.load(frame)
    table.validate()
    rows = table.live_rows()
    keys = [(k, str(f)) for k, f in table.keys(rows).iter_rows()]
    values = zip(table.column("n")[rows].tolist(), table.column("o")[rows].tolist(), strict=True)
    return Counter((*key, *value) for key, value in zip(keys, values, strict=True))


def live(seed: int, memory_max: int, failing: float, eager: bool, epochs: int = 40) -> World:
    rng = random.Random(seed)
    world = World(rng, memory_max, failing, eager)
    for number in HELD:
        world.backups.seed(number, 0, [], {})
    files: list[DeltaFile] = []
    for epoch in range(1, epochs):
        world.work()
        if rng.random() < 0.2:
            world.owner[rng.randrange(SLICES)] = rng.randrange(2)
        luck = rng.random()
        if luck < 0.15:  # given up after its deltas were written: back to the checkpoint, as another attempt
            world.seal(epoch)
            world.arrive()
            assert world.table.undo_to(world.manifest.epoch)
            world.attempt += 1
            files = []
            continue
        if luck < 0.25:  # a seal that is completed together with the next one
            files += world.seal(epoch)
            world.arrive()
            continue
        files += world.seal(epoch)
        world.arrive()
        world.commit(epoch, files)
        files = []
        world.table.release(epoch)
        if rng.random() < 0.3:
            world.arrive()
            world.backups.advance()
        if rng.random() < 0.3:
            world.seed()
        if rng.random() < 0.1:
            world.backups.want(frozenset(rng.sample(sorted(HELD), 2)))
            world.backups.want(HELD)
        world.check()
    return world


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backup, "SMALL_BYTES", 200)
    monkeypatch.setattr(backup, "COMMITS_KEPT", 4)


@examples(20)
@given(
    seed=st.integers(0, 2**32),
    memory_max=st.sampled_from([0, 4_000, 10_000, 10**9]),
    failing=st.sampled_from([0, 0.1]),
    eager=st.booleans(),
)
def test_what_is_taken_is_what_the_checkpoint_has(seed: int, memory_max: int, failing: float, eager: bool) -> None:
    live(seed, memory_max, failing, eager)


def test_the_histories_are_worth_something() -> None:
    """Enough is held, spilled and merged for the comparison to mean something."""
    worlds = [live(seed, memory_max, 0.0, seed % 2 == 0) for seed in range(8) for memory_max in (4_000, 10**9)]
    assert sum(world.seen["taken"] for world in worlds) > 16 * 10
    assert sum(world.seen["rows"] for world in worlds) > 16 * 100
    assert any(world.disk.items for world in worlds)
