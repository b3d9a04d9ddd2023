"""Random deltas, moves of slices between containers and compactions: any slice restores to what a dict says, from the
manifest and its files alone; chains stay short; garbage is never needed."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import numpy as np
import polars as pl
from hypothesis import given

from penstock.state import codec
from penstock.state.checkpoint import (
    CompactionTask,
    DeltaFile,
    Kind,
    Manifest,
    check_file,
    garbage,
    merge_frames,
    plan_compaction,
)
from penstock.state.hashing import hash_columns
from penstock.state.slicemap import SliceMap
from penstock.state.store import MemoryStore
from penstock.state.table import DELETED, HASH, KeyedTable, TableSpec, numeric
from tests.property.cuts import examples

SLICES = 6
SLICEMAP = SliceMap(SLICES)
DELTAS_MAX = 3
SPEC = TableSpec(pl.Schema({"k": pl.Int64()}), {"n": numeric(np.int64)})
KEYS = pl.DataFrame({"k": range(60)}, schema={"k": pl.Int64})
HASHES = hash_columns(KEYS, ["k"])
SLICE_OF_KEY = SLICEMAP.of(HASHES).tolist()


def write(
    store: MemoryStore, name: str, frame: pl.DataFrame, kind: Kind, slices: tuple[int, ...], epochs: tuple[int, int]
) -> DeltaFile:
    data = codec.encode({"stage": "s", "kind": kind}, frame, slicemap=SLICEMAP)
    assert store.put_if_absent(name, data)
    return DeltaFile(name, "s", kind, *epochs, slices, frame.height, len(data), codec.checksum(data))


def read(store: MemoryStore, file: DeltaFile) -> pl.DataFrame:
    data = store.get(file.name)
    check_file(file, data, file.name)
    return codec.select_slices(*codec.decode(data, file.name), file.slices)


def restore(store: MemoryStore, manifest: Manifest, slices: list[int]) -> dict[int, int]:
    table = KeyedTable(SPEC)
    for file in manifest.files_for("s", slices):
        table.load(read(store, file))
    rows = table.live_rows()
    return dict(zip(table.keys(rows).get_column("k").to_list(), table.column("n")[rows].tolist(), strict=True))


def compact(store: MemoryStore, task: CompactionTask, name: str) -> DeltaFile:
    merged = merge_frames([read(store, file) for file in task.inputs], ["k"], task.drop_deleted)
    return write(store, name, merged, task.kind, task.slices, (task.epoch_from, task.epoch_to))


@examples(8)
@given(seed=st.integers(0, 2**32), late=st.booleans(), ratio=st.sampled_from([0.5, 1.0, 4.0]), partial=st.booleans())
def test_any_slice_restores_from_any_kept_checkpoint(seed: int, late: bool, ratio: float, partial: bool) -> None:
    rng = random.Random(seed)
    store = MemoryStore()
    manifest = Manifest("j", "f", {}, epoch=0)
    truth: dict[int, int] = {}
    history = {0: (manifest, dict(truth))}
    owner = [rng.randrange(3) for _ in range(SLICES)]
    pending: list[tuple[CompactionTask, DeltaFile]] = []
    for epoch in range(1, 25):
        if rng.random() < 0.3:
            owner[rng.randrange(SLICES)] = rng.randrange(3)
        changed = rng.sample(range(60), rng.choice([0, 1, 5, 30]))
        files = []
        for container in range(3):
            slices = tuple(s for s in range(SLICES) if owner[s] == container)
            mine = [k for k in changed if SLICE_OF_KEY[k] in slices]
            if partial:  # a writer may list only the slices that changed, or all that it holds
                slices = tuple({SLICE_OF_KEY[k] for k in mine})
            gone = [k in truth and rng.random() < 0.4 for k in mine]
            values = [rng.randrange(1000) for _ in mine]
            for key, value, dead in zip(mine, values, gone, strict=True):
                truth[key] = value
                if dead:
                    del truth[key]
            frame = pl.DataFrame(
                {HASH: HASHES[mine], "k": mine, "n": values, DELETED: gone}, schema=SPEC.frame_schema()
            )
            files.append(write(store, f"d-{epoch}-{container}", frame, "delta", slices, (epoch - 1, epoch)))
        manifest = manifest.advance(epoch, files)
        for task, output in pending:
            manifest = manifest.compacted(task, output)
        bytes_max = rng.choice((1, 4_000, 10**9))
        pending = [
            (task, compact(store, task, f"c-{epoch}-{i}"))
            for i, task in enumerate(plan_compaction(manifest.files["s"], DELTAS_MAX, ratio, bytes_max=bytes_max))
        ]
        if not late:  # otherwise it takes effect after the next checkpoint, as a background job does
            for task, output in rng.sample(pending, len(pending)):
                manifest = manifest.compacted(task, output)
            pending = []
        manifest = Manifest.from_bytes(manifest.to_bytes())
        history[epoch] = (manifest, dict(truth))
        for old in list(history)[:-2]:
            del history[old]
        in_flight = [output.name for _, output in pending]
        for name in garbage(store.list(), [kept for kept, _ in history.values()], in_flight=in_flight):
            store.delete(name)
        for number in range(SLICES):
            chain = manifest.files_for("s", [number])
            assert len(chain) <= DELTAS_MAX + 2 + late
        for kept, expected in history.values():
            assert restore(store, kept, list(range(SLICES))) == expected
            wanted = rng.sample(range(SLICES), 2)
            assert restore(store, kept, wanted) == {k: v for k, v in expected.items() if SLICE_OF_KEY[k] in wanted}
    assert len(manifest.files["s"]) <= SLICES * (DELTAS_MAX + 2 + late)
