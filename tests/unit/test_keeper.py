"""The keeper on virtual time: what it holds, what it reads, and what it does when the store is away."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest

import penstock as ps
from penstock.connectors.spill import open_spill
from penstock.control.records import SealedDelta
from penstock.engines import keeper as module
from penstock.engines.keeper import ASIDE_MAX_S, REST_S, Keeper
from penstock.engines.sim.schedule import Schedule, SimPool
from penstock.engines.spark import worker
from penstock.engines.spark.engine import SparkEngine, pickle_plan
from penstock.engines.task import pack_blob, read_manifest
from penstock.state import codec
from penstock.state.backup import Commit, cut
from penstock.state.checkpoint import DeltaFile, Manifest, merge_frames
from penstock.state.hashing import hash_columns
from penstock.state.slicemap import SliceMap
from penstock.state.store import MemoryStore
from penstock.state.table import DELETED, HASH
from tests.unit.test_task import Rig

SLICES = 4
SLICEMAP = SliceMap(SLICES)
ALL = frozenset(range(SLICES))
KEYS = np.arange(200)
HASHES = hash_columns(pl.DataFrame({"k": KEYS}), ["k"])
OF_KEY = SLICEMAP.of(HASHES)


class Away(MemoryStore):
    """A store that can be away, and counts what is read."""

    def __init__(self) -> None:
        super().__init__()
        self.away = False
        self.reads: list[str] = []

    def get(self, name: str) -> bytes:
        if self.away:
            raise OSError(errno.ETIMEDOUT, "the store does not answer")
        self.reads.append(name)
        return super().get(name)


class Job:
    """A history of checkpoints, and a keeper that hears of it."""

    def __init__(self, bytes_s: float = 0, wait: Callable[[float], None] | None = None, **settings: Any) -> None:
        self.schedule = Schedule()
        self.pool = SimPool(self.schedule, lambda: 0.001)
        self.store = Away()
        self.manifest = Manifest("j", "f", {}, epoch=0)
        self.manifests = {0: self.manifest}
        self.commits: list[Commit] = []
        self.pieces: dict[str, bytes] = {}
        self.truth: dict[int, int] = {}
        settings = {"memory_max": 10**9, "spill": None, **settings}
        self.keeper = Keeper(
            "j",
            self.store,
            bytes_s=bytes_s,
            pool=self.pool,
            load_manifest=self.load,
            clock=self.schedule.clock,
            wait=wait,
            **settings,
        )

    def load(self, checkpoint: int) -> Manifest:
        if self.store.away:
            raise OSError(errno.ETIMEDOUT, "the store does not answer")
        return self.manifests[checkpoint]

    def checkpoint(self, values: dict[int, int | None]) -> str:
        """Complete a checkpoint in which these keys changed (None: went); the name of its file."""
        before, epoch = self.manifest.epoch, self.manifest.epoch + 1
        keys = np.array(sorted(values), dtype=np.int64)
        frame = pl.DataFrame(
            {
                HASH: HASHES[keys],
                "k": keys,
                "n": [values[k] or 0 for k in keys.tolist()],
                DELETED: [values[k] is None for k in keys.tolist()],
            }
        )
        name = f"state/s/{epoch}"
        meta = {"job": "j", "stage": "s", "kind": "delta", "epoch_from": before, "epoch_to": epoch}
        data = codec.encode(meta, frame, slicemap=SLICEMAP)
        self.store.put(name, data)
        slices = tuple(np.unique(OF_KEY[keys]).tolist())
        file = DeltaFile(name, "s", "delta", before, epoch, slices, frame.height, len(data), codec.checksum(data))
        self.manifest = self.manifests[epoch] = self.manifest.advance(epoch, [file])
        self.commits.append(Commit(before, epoch, {name: list(slices)}))
        self.pieces[name] = cut(data, name, SLICEMAP, [[0]] * SLICES, 0)[0]
        for key, value in values.items():
            self.truth.pop(key, None)
            if value is not None:
                self.truth[key] = value
        return name

    def merge(self) -> str:
        """Another checkpoint, in which all files were merged into a base; they are gone. The name of the base."""
        files = self.manifest.files["s"]
        frames = [codec.decode(MemoryStore.get(self.store, file.name), "")[1] for file in files]
        merged = merge_frames(frames, ["k"], drop_deleted=True)
        data = codec.encode({}, merged, slicemap=SLICEMAP)
        epoch, name = self.manifest.epoch + 1, f"state/s/{self.manifest.epoch}.base"
        self.store.put(name, data)
        for file in files:
            self.store.delete(file.name)
        base = DeltaFile(name, "s", "base", 0, epoch, tuple(ALL), merged.height, len(data), codec.checksum(data))
        self.manifest = self.manifests[epoch] = Manifest("j", "f", {}, epoch=epoch, files={"s": (base,)})
        return name

    def tell(self, want: frozenset[int] = ALL) -> None:
        self.keeper.tell("s", ["k"], SLICEMAP, want, self.manifest.epoch, self.commits[-3:])

    def run(self, seconds: float = 0.5) -> None:
        """Let the background work for so long."""
        reached: list[bool] = []
        self.schedule.after(seconds, lambda: reached.append(True))
        while not reached:
            entry = self.schedule.next()
            assert entry is not None
            entry()

    def taken(self, slices: frozenset[int] = ALL) -> dict[int, int]:
        out: dict[int, int] = {}
        for frames in self.keeper.take("s", slices, self.manifest.epoch).values():
            for frame in frames:
                for _, key, value, deleted in frame.iter_rows():
                    out.pop(key, None)
                    if not deleted:
                        out[key] = value
        return out

    def held(self) -> frozenset[int]:
        checkpoint, slices = self.keeper.held("s")
        assert checkpoint == self.manifest.epoch
        return slices


def every(value: int) -> dict[int, int | None]:
    return dict.fromkeys(range(200), value)


def test_a_job_that_has_just_begun_reads_nothing() -> None:
    job = Job()
    job.tell()
    job.run()
    for value in range(8):
        name = job.checkpoint({**every(value), value: None})
        job.keeper.offer("s", job.pieces[name])
        job.tell()
        job.run()
        assert job.held() == ALL
        assert job.taken() == job.truth
    assert job.store.reads == []
    assert job.keeper.problem() is None


@pytest.mark.parametrize("together", [1, 2, 3, SLICES])
def test_slices_that_are_not_held_are_seeded_and_each_file_is_read_once(
    together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GROUP_ROWS", together * len(KEYS) // SLICES)
    job = Job()
    names = [job.checkpoint(every(1)), job.checkpoint({5: None, 6: 2}), job.checkpoint({6: None, 5: 3})]
    job.tell()
    job.run()
    assert job.held() == ALL and job.taken() == job.truth
    assert sorted(job.store.reads) == sorted(names)
    assert job.keeper.stats()["seeded"] == SLICES


def test_between_two_steps_of_a_seed_there_is_a_rest_as_long_as_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not longer, though, than a step may take that did not wait for the store."""
    monkeypatch.setattr(module, "STEP_ROWS", 10)
    monkeypatch.setattr(module, "GROUP_ROWS", 10)
    monkeypatch.setattr(codec, "BATCH_ROWS", 10)
    now, rests, takes = [0.0], [0.0], iter([0.1, 0.3, 0.1, 5.0])

    def wait(seconds: float) -> None:
        now[0] += seconds
        rests[-1] += seconds

    job = Job(wait=wait)
    job.keeper._clock = lambda: now[0]
    some = module._Seed.add_some

    def slow(seed: Any, key: Any) -> None:
        some(seed, key)
        now[0] += next(takes)
        rests.append(0.0)

    monkeypatch.setattr(module._Seed, "add_some", slow)
    job.checkpoint(every(1))
    job.tell()
    job.run()
    assert job.held() == ALL
    assert rests == pytest.approx([0.0, 0.1, module.IDLE_MAX_S, 0.1, module.IDLE_MAX_S], abs=1e-6)


def test_slices_that_travel_together_may_part_on_the_way() -> None:
    files = [DeltaFile(f"f{i}", "s", "delta", i, i + 1, tuple(ALL), 200, 100, "") for i in range(2)]
    seed = module._Seed(2, ALL, files, {}, SLICEMAP, 10**9)
    assert set(seed.group.values()) == {0}

    def opened(name: str, values: dict[int, int | None]) -> codec.Opened:
        job = Job()
        return codec.Opened(job.store.get(job.checkpoint(values)), name)

    seed.open(opened("f0", every(1)))
    seed.add_some(["k"])
    assert not seed.finished(["k"]), "another file counts for them"
    seed.only({0, 2})
    seed.open(opened("f1", {**dict.fromkeys(range(0, 200, 2), 2), 7: None}))
    seed.add_some(["k"])
    found = seed.finished(["k"])
    assert found.keys() == {0, 2} and not seed.slices and not seed.parts
    for number, (frame,) in found.items():
        keys = [k for k in KEYS.tolist() if OF_KEY[k] == number and k != 7]
        assert sorted(frame.select("k", "n").rows()) == [(k, 1 if k % 2 else 2) for k in keys]


@pytest.mark.parametrize(("memory_max", "reads"), [(10**9, 1), (3_000, 2)])
def test_a_large_file_is_taken_slice_by_slice(monkeypatch: pytest.MonkeyPatch, memory_max: int, reads: int) -> None:
    """Each step takes as much as an epoch may wait for; what does not fit into memory is put off, and read again."""
    monkeypatch.setattr(codec, "BATCH_ROWS", 10)
    monkeypatch.setattr(module, "STEP_ROWS", 10)
    taken: list[int] = []
    first = codec.Opened.first

    def chosen(opened: codec.Opened, slices: Collection[int], rows_max: int) -> list[int]:
        found = first(opened, slices, rows_max)
        taken.append(len(found))
        return found

    monkeypatch.setattr(codec.Opened, "first", chosen)
    job = Job(memory_max=memory_max, spill=Disk)
    name = job.checkpoint(every(1))
    job.tell()
    job.run()
    assert job.held() == ALL
    assert job.store.reads.count(name) == reads and max(taken) == 1 and len(taken) >= SLICES
    assert job.taken() == job.truth


def test_slices_that_a_last_file_completes_are_not_made_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEP_ROWS", 10)
    monkeypatch.setattr(module, "GROUP_ROWS", 10)
    job = Job()
    job.checkpoint(every(1))
    job.checkpoint({5: 2})
    made: list[int] = []
    seeds = module.Keeper._seed_some

    def counted(keeper: module.Keeper, kept: Any) -> None:
        before = keeper._counts["seeded"]
        seeds(keeper, kept)
        made.append(keeper._counts["seeded"] - before)

    monkeypatch.setattr(module.Keeper, "_seed_some", counted)
    job.tell()
    job.run()
    assert job.held() == ALL and job.taken() == job.truth
    assert sum(made) == SLICES and max(made) == 1


def test_while_a_task_runs_nothing_is_read_for_new_copies_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEP_ROWS", 1)
    monkeypatch.setattr(module, "GROUP_ROWS", 1)
    waits: list[float] = []
    job = Job(wait=waits.append)
    job.checkpoint(every(1))

    def seeded() -> int:
        return job.keeper._counts["seeded"]

    job.tell()
    with job.keeper.in_task():
        job.run(ASIDE_MAX_S / 2)
        assert seeded() <= 1 and max(waits) <= module.WAIT_MAX_S, "a step at most was on its way"
        job.run((SLICES + 1) * 2 * ASIDE_MAX_S)
        assert job.held() == ALL, "a task without an end does not keep a copy from being made"
    job.checkpoint(every(2))
    job.tell(frozenset())
    job.run()
    before = seeded()
    job.tell()
    job.run(ASIDE_MAX_S)
    assert seeded() == before + SLICES and job.taken() == job.truth, "between tasks it goes on at once"


def test_after_a_recovery_nothing_is_read_for_a_while_and_then_all_is() -> None:
    job = Job()
    job.checkpoint(every(1))
    job.keeper.rest()
    job.tell()
    job.run(REST_S / 2)
    job.tell()
    assert job.store.reads == [], "the epochs that run again come first"
    job.run(REST_S)
    job.tell()
    job.run()
    assert job.held() == ALL and job.taken() == job.truth


@pytest.mark.parametrize("holder", [True, False], ids=["to a holder", "to a stranger"])
def test_a_move_to_who_holds_the_slices_reads_nothing_from_the_store(holder: bool) -> None:
    """Two processes: the owner's, and that of container 1, which takes all slices over after epoch 3."""
    job, rig, other = Job(), Rig(), Rig()
    rig.store = rig.worker.store = other.store = other.worker.store = job.store  # type: ignore[assignment]
    rig.worker.job_id = other.worker.job_id = "j"
    keeper = other.worker.keeper = job.keeper
    two, copies = {"count": 2}, [[1] if holder else []] * SLICES
    nothing = pack_blob("in", 0, [])

    deltas: list[SealedDelta] = []  # of the owner, told by whichever report came after they were written

    def both(epoch: int, sent: list[bytes], **told: Any) -> list[bytes]:
        """An epoch; what the owner sent to its peer."""
        spec = rig.spec("count", epoch, instances=two, copies=copies, sends=True, **told)
        report, out = rig.worker.run(spec, [rig.source(epoch)[0]])
        assert not report.missing
        deltas.extend(report.deltas)
        report, _ = other.count(epoch, [nothing, *sent], index=1, **{**told, "instances": two, "copies": copies})
        assert not report.missing
        job.run()
        return [out["count", 1]]

    sent = both(1, [], seal=True)
    deltas += rig.worker.flush(rig.spec("count", 1)).deltas
    (written,) = deltas
    assert written.file is not None
    rig.checkpoint(1, deltas, [])
    job.manifests[1] = read_manifest(job.store, 1)
    job.store.reads.clear()
    commits = [Commit(0, 1, {written.file.name: written.touched})]
    sent = both(2, sent, checkpoint=1, commits=commits)
    sent = both(3, sent, checkpoint=1, commits=commits, handover=dict.fromkeys(range(SLICES), 1))
    assert keeper.held("count") == ((1, ALL) if holder else (0, frozenset()))
    before = keeper.stats()

    moved = {"index": 1, "owners": [1] * SLICES, "checkpoint": 1, "commits": commits}
    report, counts = other.count(4, [rig.source(4)[0], *sent], **moved)
    assert counts == {"a": (8, 20), "b": (4, 8), "c": (4, 12)}
    assert report.rebuilt == ({"backup": SLICES, "durable": 0} if holder else {"backup": 0, "durable": SLICES})
    assert bool(job.store.reads) is not holder
    if holder:
        job.run()
        after = keeper.stats()
        assert [after[what] for what in ("bytes_read", "seeded")] == [0, 0] == [before["bytes_read"], before["seeded"]]


def test_the_settings_for_copies_reach_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_workers", {})
    plan, store = Rig().worker.plan, MemoryStore()
    settings = SparkEngine(plan, "j", store, "fail", ps.Config(backup_memory_mb=7, move_mb_s=5)).keep
    pickled = SimpleNamespace(value=pickle_plan(plan))
    keeper = worker.SlotTask("run", "j", "count", 0, "n", pickled, store, None, settings).worker().keeper  # type: ignore[arg-type]
    assert keeper is not None and (keeper._memory_max, keeper._rate._bytes_s) == (7 * 2**20, 5e6)


def test_only_what_is_wanted_is_held() -> None:
    job = Job()
    job.checkpoint(every(1))
    job.tell(frozenset({1, 2}))
    job.run()
    assert job.held() == {1, 2}
    job.tell(frozenset({2}))
    job.run()
    assert job.held() == {2}
    assert set(job.keeper.take("s", ALL, 1)) == {2}
    job.tell(frozenset())
    job.run()
    assert job.held() == frozenset()


def test_telling_the_same_again_costs_nothing() -> None:
    job = Job()
    job.checkpoint(every(1))
    job.tell()
    job.run()
    job.tell()
    assert not job.pool._queue


def test_commits_during_a_seed_are_caught_up_with() -> None:
    """The seed ends at the checkpoint it began with; pieces and commits that came meanwhile bring it on."""
    job = Job(bytes_s=1)  # so slow that only one file is read at a time, when it is told
    for value in range(3):
        job.checkpoint(every(value))
    job.tell()
    job.run()
    assert len(job.store.reads) == 1
    for value in range(10, 15):
        name = job.checkpoint({value: value, value + 1: None})
        job.keeper.offer("s", job.pieces[name])
        job.tell()
        job.run(10_000)
    while job.held() != ALL:
        job.tell()
        job.run(10_000)
    assert job.taken() == job.truth
    assert len(job.store.reads) == 3, "what came as pieces was read as well"


def test_a_piece_that_comes_late_is_waited_for_and_one_that_never_comes_is_read() -> None:
    job = Job()
    job.tell()
    job.run()
    late = job.checkpoint(every(1))
    job.tell()
    job.run()
    assert job.held() == ALL, "it is on its way"
    assert job.store.reads == []
    job.keeper.offer("s", job.pieces[late])
    job.run()
    assert job.taken() == job.truth and job.store.reads == []
    lost = job.checkpoint(every(2))
    job.tell()
    job.run(module.PATIENCE_S + 1)
    assert job.store.reads == []
    job.tell()
    job.run()
    assert job.store.reads == [lost]
    assert job.held() == ALL and job.taken() == job.truth


def test_who_takes_does_not_wait_for_a_late_piece() -> None:
    job = Job()
    job.tell()
    name = job.checkpoint(every(1))
    job.tell()
    assert job.taken() == job.truth
    assert job.store.reads == [name]


def test_a_file_that_was_merged_away_means_a_new_seed() -> None:
    job = Job()
    job.tell()
    job.run()
    name = job.checkpoint(every(1))
    job.tell()
    job.run()
    # Merged into a base, with a later checkpoint; the delta is garbage.
    data = codec.encode({}, codec.decode(job.store.get(name), "")[1], slicemap=SLICEMAP)
    job.store.put("base", data)
    job.store.delete(name)
    file = DeltaFile("base", "s", "base", 0, 1, tuple(ALL), 200, len(data), codec.checksum(data))
    job.manifests[1] = job.manifest = Manifest("j", "f", {}, epoch=1, files={"s": (file,)})
    job.run(module.PATIENCE_S + 1)
    job.tell()
    job.run()
    assert job.held() == ALL and job.taken() == job.truth


def test_the_store_away_is_tried_again_with_growing_pauses_and_pieces_still_count() -> None:
    job = Job()
    job.checkpoint(every(1))
    job.tell(frozenset({0, 1}))
    job.run()
    assert job.held() == {0, 1}
    job.store.away = True
    for value in range(2, 40):
        name = job.checkpoint({value: value})
        job.keeper.offer("s", job.pieces[name])
        job.tell()
        job.run(1.0)
    assert job.held() == {0, 1}, "what is held stays current without the store"
    assert 5 <= job.keeper.stats()["store_errors"] <= 8
    assert "does not answer" in (job.keeper.waits() or "")
    assert job.keeper.problem() is None, "a store that is away makes no bad holder"
    assert set(job.keeper.take("s", ALL, job.manifest.epoch)) == {0, 1}
    job.store.away = False
    job.run(module.PAUSE_MAX_S)
    job.tell()
    job.run()
    assert job.held() == ALL and job.taken() == job.truth
    assert job.keeper.waits() is None


def test_a_seed_whose_checkpoint_was_superseded_meanwhile_goes_on_from_the_newer_one() -> None:
    """A large state takes longer to read than files of old checkpoints are kept."""
    job = Job(bytes_s=1)
    for value in range(3):
        job.checkpoint(every(value))
    job.tell()
    job.run()
    assert len(job.store.reads) == 1, "a seed is under way"
    merged = job.merge()
    for _ in range(4):
        job.tell()
        job.run(10_000)
    assert job.held() == ALL and job.taken() == job.truth
    assert merged in job.store.reads
    assert job.keeper.stats()["store_errors"] == 0 and job.keeper.waits() is None


def test_a_seed_of_many_deltas_is_their_sum() -> None:
    """Also with keys that went and came again, in deltas of all sizes."""
    job = Job()
    rng = np.random.default_rng(3)
    for number in range(60):
        keys = rng.choice(KEYS, size=200 if number == 0 else int(rng.integers(1, 40)), replace=False)
        job.checkpoint({int(key): None if rng.random() < 0.3 else number for key in keys})
    job.tell()
    job.run()
    assert len(job.store.reads) == 60
    assert job.held() == ALL and job.taken() == job.truth


def test_a_seed_that_is_no_longer_wanted_is_not_read_to_its_end() -> None:
    job = Job(bytes_s=1)
    for value in range(3):
        job.checkpoint(every(value))
    job.tell()
    job.run()
    job.tell(frozenset())
    job.run(10_000)
    job.tell(frozenset())
    job.run(10_000)
    assert len(job.store.reads) == 1


def test_a_damaged_file_is_never_used() -> None:
    job = Job()
    name = job.checkpoint(every(1))
    other = codec.encode({}, codec.decode(job.store.get(name), "")[1].with_columns(n=pl.lit(9)), slicemap=SLICEMAP)
    job.store.put(name, other)  # whole in itself, but not the one that the checkpoint means
    job.tell()
    job.run()
    assert job.held() == frozenset() and job.taken() == {}
    assert job.keeper.waits() is not None


def test_a_limited_bandwidth_is_kept() -> None:
    waited: list[float] = []
    job = Job(bytes_s=1000, wait=lambda s: waited.append(s) or job.schedule.after(s, lambda: None))  # type: ignore[func-returns-value]
    for value in range(4):
        job.checkpoint(every(value))
    size = sum(len(job.store.items[f"state/s/{n}"]) for n in (1, 2, 3))
    began = job.schedule.now
    job.tell()
    while not job.keeper.held("s")[1]:
        job.run(0.1)
    assert job.schedule.now - began >= size / 1000 - module.BURST_S - 0.2
    assert max(waited) <= module.WAIT_MAX_S


class Disk(MemoryStore):
    def clear(self) -> None:
        self.items.clear()


def test_what_does_not_fit_is_spilled_and_close_removes_it() -> None:
    disk = Disk()
    job = Job(memory_max=3000, spill=lambda: disk)
    job.checkpoint(every(1))
    job.tell()
    job.run()
    assert job.held() == ALL and job.taken() == job.truth
    stats = job.keeper.stats()
    assert stats["bytes_memory"] <= 3000 and stats["bytes_spilled"] > 0
    job.keeper.close()
    assert not disk.items
    assert job.keeper.take("s", ALL, 1) == {}
    job.tell()
    job.run()


def test_what_is_due_is_spilled_little_by_little_and_who_takes_waits_for_none_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "WORK_BYTES", 1)
    disk = Disk()
    job = Job(memory_max=500, spill=lambda: disk)
    job.checkpoint(every(1))
    job.tell()
    spilled = []
    step = job.keeper._step

    def counted() -> None:
        before = len(disk.items)
        step()
        spilled.append(len(disk.items) - before)

    monkeypatch.setattr(job.keeper, "_step", counted)
    job.run()
    assert max(spilled) == 1 and sum(spilled) >= 3 and job.keeper.stats()["bytes_memory"] <= 500
    name = job.checkpoint(every(2))
    job.keeper.offer("s", job.pieces[name])
    job.tell()
    names = set(disk.items)
    assert job.taken() == job.truth
    assert set(disk.items) - names == set(), "to take slices, others were spilled first"
    job.run()
    assert job.taken() == job.truth and job.keeper.stats()["bytes_memory"] <= 500


def test_no_local_disk_is_told_and_what_fits_is_held() -> None:
    def none() -> Disk:
        raise OSError(errno.EROFS, "read-only")

    job = Job(memory_max=3000, spill=none)
    job.checkpoint(every(1))
    job.tell()
    job.run()
    assert frozenset() < job.held() < ALL
    assert job.keeper.given_up("s") == ALL - job.held(), "whoever moves slices here must know that they do not come"
    assert "read-only" in (job.keeper.problem() or "")
    reads = len(job.store.reads)
    job.tell()
    job.run()
    assert len(job.store.reads) == reads, "what was given up for want of room is read again and again"


def test_two_stages_share_the_memory() -> None:
    job = Job(memory_max=6000, spill=Disk)
    name = job.checkpoint(every(1))
    piece = job.pieces[name].replace(b'"stage":"s"', b'"stage":"t"')
    files = job.manifest.files["s"]
    job.manifests[1] = Manifest("j", "f", {}, epoch=1, files={"s": files, "t": files})
    job.tell()
    job.keeper.tell("t", ["k"], SLICEMAP, ALL, 1, [])
    job.keeper.offer("t", piece)
    job.run()
    assert job.held() == ALL and job.keeper.held("t") == (1, ALL)
    assert job.keeper.stats()["bytes_memory"] <= 6000
    assert job.keeper.stats()["ignored"] == 1


def test_take_never_raises_nor_waits_longer_than_it_says() -> None:
    """On a real thread that hangs in the store."""
    import threading

    hang = threading.Event()

    class Hanging(MemoryStore):
        def get(self, name: str) -> bytes:
            hang.wait(60)
            raise OSError(errno.ETIMEDOUT, "gone")

    def load(checkpoint: int) -> Manifest:
        file = DeltaFile("x", "s", "delta", 0, 1, (0,), 1, 1, "")
        return Manifest("j", "f", {}, epoch=1, files={"s": (file,)})

    pool = ThreadPoolExecutor(1)
    keeper = Keeper("j", Hanging(), memory_max=1, spill=None, bytes_s=0, pool=pool, load_manifest=load)
    try:
        assert keeper.take("s", [0], 1) == {}
        keeper.tell("s", ["k"], SLICEMAP, ALL, 1, [])
        assert keeper.take("s", [0], 1, timeout_s=0.05) == {}
        keeper.tell("s", ["k"], SLICEMAP, ALL, 1, [])
        assert keeper.held("s")[1] == frozenset()
    finally:
        hang.set()
        keeper.close()
        pool.shutdown()
    keeper.tell("s", ["k"], SLICEMAP, ALL, 2, [])
    assert keeper.take("s", [0], 2) == {}


def test_a_fault_of_ours_drops_backups_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    job.checkpoint(every(1))
    job.tell()
    job.run()
    assert job.held() == ALL
    with monkeypatch.context() as patch:
        patch.setattr(module.Backups, "advance", lambda self: 1 / 0)
        job.checkpoint(every(2))
        job.tell()
        job.run()
        assert job.keeper.held("s")[1] == frozenset()
        assert "ZeroDivisionError" in (job.keeper.problem() or "")
    job.checkpoint(every(3))
    job.tell()
    job.run()
    assert job.held() == ALL and job.taken() == job.truth


def test_a_seeded_slice_has_the_progress_of_its_checkpoint_in_its_header() -> None:
    disk = Disk()
    job = Job(memory_max=0, spill=lambda: disk)
    job.checkpoint(every(1))
    sources = {"in": {"offset": {"row": 70}, "facts": ["of no use here"]}}
    job.manifests[1] = replace(job.manifest, sources=sources)
    job.tell()
    job.run()
    assert job.held() == ALL and len(disk.items) == SLICES
    assert [codec.decode_header(data, "")["progress"] for data in disk.items.values()] == [{"in": {"row": 70}}] * SLICES


# ---- real disks ----------------------------------------------------------------------------------------------------

BROKEN = {"full": errno.ENOSPC, "read-only": errno.EROFS, "limited": errno.EFBIG}
MOUNT = 'mount -t tmpfs -o size=256k none "$0" && exec "$@"'


@pytest.mark.parametrize("how", BROKEN)
def test_a_disk_that_really_breaks_costs_backups_and_nothing_else(how: str, tmp_path: Path) -> None:
    """In a process of its own: with a small disk, if that can be had, or with a limit to the size of files."""
    path = os.pathsep.join([str(Path(__file__).parents[2]), *(p for p in sys.path if p)])
    call = f"import sys; from {__name__} import on_a_disk_that_breaks as run; run(*sys.argv[1:])"
    command = [sys.executable, "-c", call, str(tmp_path), how]
    if how != "limited":
        mounting = ["unshare", "--map-root-user", "--mount", "sh", "-c", MOUNT, str(tmp_path)]
        try:
            subprocess.run([*mounting, "true"], check=True, capture_output=True, timeout=30)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"a disk cannot be mounted here: {error}")
        command = [*mounting, *command]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr


def on_a_disk_that_breaks(root: str, how: str) -> None:
    spill = open_spill("j", "run", "node", root=root)
    job = Job(memory_max=4000, spill=lambda: spill)
    job.checkpoint(every(1))
    break_disk(spill.directory, how)
    job.tell()
    job.run()
    held = job.held()
    problem = job.keeper.problem() or ""
    assert "local disk failed" in problem and os.strerror(BROKEN[how]) in problem, problem
    assert frozenset() < held < ALL, f"what fits into memory is held, no more: {held}"
    assert os.listdir(spill.directory) == ["lock"], "half a file was left"
    for value in range(2, 6):  # what is held comes forward as ever
        name = job.checkpoint({value: value})
        job.keeper.offer("s", job.pieces[name])
        job.tell()
        job.run()
        assert frozenset() < job.held() <= held
        assert job.taken() == {key: n for key, n in job.truth.items() if OF_KEY[key] in job.held()}
    mend_disk(spill.directory, how)
    job.tell(frozenset())  # holders are chosen anew, and this is one again
    job.run()
    job.tell()
    job.run()
    assert job.held() == ALL and job.taken() == job.truth and job.keeper.problem() is None
    assert not job.keeper.given_up("s")
    assert job.keeper.stats()["bytes_spilled"] > 0
    break_disk(spill.directory, how)  # with slices on it
    name = job.checkpoint(every(7))
    job.keeper.offer("s", job.pieces[name])
    job.tell()
    job.run()
    held = job.held()
    assert held == ALL or job.keeper.problem()
    assert held and job.taken() == {key: n for key, n in job.truth.items() if OF_KEY[key] in held}
    mend_disk(spill.directory, how)
    job.keeper.close()
    assert os.listdir(root) == []
    print("went on")


def break_disk(directory: str, how: str) -> None:
    if how == "limited":
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    elif how == "read-only":
        # Its lock is open for writing, so that the disk itself will not turn; but it can be seen through one that has.
        subprocess.run(["mount", "--bind", directory, directory], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", directory], check=True)
    else:
        with open(f"{directory}-filler", "wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(bytes(4096))


def mend_disk(directory: str, how: str) -> None:
    if how == "limited":
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    elif how == "read-only":
        subprocess.run(["umount", directory], check=True)
    else:
        os.remove(f"{directory}-filler")
