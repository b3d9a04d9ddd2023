"""A task on its own: state at the version it needs or an honest "missing", blobs that say where they come from."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import polars as pl
import pytest

import penstock as ps
from penstock.control.records import SealedDelta
from penstock.engines import task
from penstock.engines.task import MANIFEST_NAME, TaskSpec, Worker, pack_blob, split_by_owner, unpack_blob
from penstock.ids import PlanVersion
from penstock.operators.base import HASH, NEVER
from penstock.plan import compile_flow
from penstock.state.checkpoint import Manifest
from penstock.state.codec import decode_header
from penstock.state.hashing import hash_columns
from penstock.state.slicemap import SliceMap
from penstock.state.store import MemoryStore
from penstock.testing import rows

SLICES = 4
SLICEMAP = SliceMap(SLICES)
FRAME = pl.DataFrame({"k": ["a", "b", "c", "a"], "x": [1, 2, 3, 4]})


class Rig:
    """A worker and what the driver would tell it."""

    def __init__(self) -> None:
        flow = ps.Flow("f")
        flow.source("in", rows(FRAME)).key_by("k").aggregate("count", n=ps.count(), x=ps.sum("x")).sink(
            "o", ps.memory()
        )
        self.store = MemoryStore()
        self.worker = Worker(compile_flow(flow.graph()), "job", self.store)

    def spec(self, stage: str, epoch: int, **changes: Any) -> TaskSpec:
        owners = changes.pop("owners", [0] * SLICES)
        base = TaskSpec(
            stage=stage,
            epoch=epoch,
            attempt=1,
            index=0,
            checkpoint=0,
            seal=False,
            slicemaps={"count": SLICEMAP},
            owners={"count": owners},
            instances={"count": max(owners) + 1},
        )
        base = msgspec.structs.replace(base, watermark_before=NEVER, watermark=NEVER)
        return msgspec.structs.replace(base, **changes)

    def source(self, epoch: int = 1, **changes: Any) -> dict[int, bytes]:
        """What the source sends: container -> blob."""
        changes.setdefault("split", {"first": 0, "last": 4})
        report, out = self.worker.run(self.spec("in", epoch, **changes), [])
        assert report.error is None
        return {container: blob for (_, container), blob in out.items()}

    def count(self, epoch: int, blobs: list[bytes] | None = None, **changes: Any) -> Any:
        """(report, counts by key); one epoch's worth of rows unless blobs are given."""
        if blobs is None:
            blobs = [self.source(epoch)[0]]
        report, _ = self.worker.run(self.spec("count", epoch, **changes), blobs)
        table = report.output.tables.get("o") if report.output else None
        if table is None:
            return report, {}
        frame = pl.read_ipc_stream(table)
        return report, {k: (n, x) for k, n, x in frame.iter_rows()}

    def checkpoint(self, epoch: int, deltas: list[SealedDelta], owners: list[int]) -> None:
        """What the driver writes once all deltas are there."""
        files = tuple(d.file for d in deltas if d.file is not None)
        manifest = Manifest("job", "f", {}, epoch, files={"count": files})
        self.store.put(MANIFEST_NAME.format(epoch), manifest.to_bytes())

    def lose(self) -> None:
        """One epoch, a checkpoint of it, and the container is gone."""
        ran, _ = self.count(1, seal=True)
        self.checkpoint(1, [*ran.deltas, *self.worker.flush(self.spec("count", 1)).deltas], [0] * SLICES)
        self.worker.containers.clear()


def test_blobs_keep_their_origin_and_drop_empty_frames() -> None:
    blob = pack_blob("in", 3, [(0, FRAME), (1, FRAME.clear()), (2, FRAME.head(1))])
    header, frames = unpack_blob(blob)
    assert (header.origin, header.index) == ("in", 3)
    assert [(port, f.height) for port, f in frames] == [(0, 4), (2, 1)]
    assert frames[0][1].equals(FRAME)
    assert unpack_blob(pack_blob("in", 0, []))[1] == []


def test_every_row_goes_to_the_owner_of_its_slice() -> None:
    frame = pl.DataFrame({"k": range(1_000)})
    hashes = hash_columns(frame, ["k"])
    frame = frame.with_columns(pl.Series(HASH, hashes))
    owners = [2, 0, 1, 2]
    shares = split_by_owner(frame, hashes, SLICEMAP, owners, 3)
    assert sum(s.height for s in shares) == 1_000
    for container, share in enumerate(shares):
        found = SLICEMAP.of(share[HASH].to_numpy())
        assert set(np.asarray(owners)[found]) == {container}


def test_a_source_sends_one_blob_to_every_container_even_if_it_has_nothing_for_it() -> None:
    rig = Rig()
    assert sorted(rig.source(owners=[0, 1, 2, 3])) == [0, 1, 2, 3]
    report, out = rig.worker.run(rig.spec("in", 1, owners=[0, 1, 2, 3], split=None), [])
    assert len(out) == 4 and report.rows_in == 0


def test_state_is_kept_from_epoch_to_epoch() -> None:
    rig = Rig()
    assert rig.count(1)[1] == {"a": (2, 5), "b": (1, 2), "c": (1, 3)}
    report, counts = rig.count(2)
    assert counts == {"a": (4, 10), "b": (2, 4), "c": (2, 6)}
    assert (report.rows_in, report.state_rows, report.missing) == (3, 3, False)
    assert report.by_operator["count"][:2] == (3, 3)


def test_an_epoch_that_was_skipped_is_missing_not_wrong() -> None:
    rig = Rig()
    rig.count(1)
    assert rig.count(3)[0].missing
    assert rig.count(2)[1]["a"] == (4, 10), "and what it has is as it was"


def test_a_task_run_twice_is_missing_not_double() -> None:
    rig = Rig()
    blob = rig.source()[0]
    rig.count(1, [blob])
    rig.count(2, [blob])
    assert rig.count(2, [blob])[0].missing


def test_a_new_attempt_goes_back_to_the_checkpoint() -> None:
    rig = Rig()
    rig.count(1, seal=True)
    rig.count(2)
    rig.count(3)
    _, counts = rig.count(2, attempt=2, checkpoint=1)
    assert counts["a"] == (4, 10)
    assert rig.count(3, attempt=2, checkpoint=1)[1]["a"] == (6, 15)


def test_a_delta_says_which_input_it_reflects() -> None:
    rig = Rig()
    rig.count(1)
    ran, _ = rig.count(2, seal=True, progress={"in": {"row": 8}})
    (file,) = (d.file for d in [*ran.deltas, *rig.worker.flush(rig.spec("count", 2)).deltas])
    header = decode_header(rig.store.get(file.name), file.name)
    assert header["progress"] == {"in": {"row": 8}} and header["epoch_to"] == 2


def test_a_new_attempt_from_the_beginning() -> None:
    rig = Rig()
    rig.count(1)
    rig.count(2)
    assert rig.count(1, attempt=2)[1]["a"] == (2, 5)


def test_a_new_attempt_whose_checkpoint_was_never_sealed_here_is_missing() -> None:
    rig = Rig()
    rig.count(1)
    rig.count(2)
    assert rig.count(3, attempt=2, checkpoint=1)[0].missing
    error = rig.count(3, attempt=2, checkpoint=2)[0].error
    assert error is not None and error.kind == "CheckpointError" and "is missing from the checkpoint" in error.message


def test_a_flush_seals_and_waits_for_every_delta() -> None:
    rig = Rig()
    rig.count(1)
    report = rig.worker.flush(rig.spec("count", 1))
    assert [(d.epoch, d.attempt) for d in report.deltas] == [(1, 1)]
    assert rig.store.exists(report.deltas[0].file.name)


def test_a_flush_of_an_earlier_seal_does_not_seal_again() -> None:
    """Epoch 2 ran on while the delta of epoch 1 was being written: that delta is all that is wanted."""
    rig = Rig()
    first, _ = rig.count(1, seal=True)
    second, _ = rig.count(2)
    report = rig.worker.flush(rig.spec("count", 1))
    assert not report.missing
    assert [d.epoch for d in [*first.deltas, *second.deltas, *report.deltas]] == [1]
    assert rig.count(3)[1]["a"] == (6, 15)


@pytest.mark.parametrize("change", [{"epoch": 2}, {"attempt": 2}, {"index": 1}], ids=str)
def test_a_flush_that_does_not_fit_is_missing(change: dict[str, int]) -> None:
    rig = Rig()
    rig.count(1)
    assert rig.worker.flush(rig.spec("count", **{"epoch": 1, **change})).missing


def test_an_empty_fragment_writes_no_file() -> None:
    rig = Rig()
    rig.count(1, seal=True)
    ran, _ = rig.count(2, [pack_blob("in", 0, [])], seal=True)
    flushed = rig.worker.flush(rig.spec("count", 2))
    assert SealedDelta(epoch=2, attempt=1, file=None) in [*ran.deltas, *flushed.deltas]


def test_slices_move_through_the_checkpoint() -> None:
    """Two containers become three on another worker: nothing but files goes between them."""
    rig = Rig()
    old = [0, 0, 1, 1]
    blobs = rig.source(owners=old)
    deltas = []
    for index in (0, 1):
        rig.count(1, [blobs[index]], index=index, owners=old)
        deltas += rig.worker.flush(rig.spec("count", 1, index=index, owners=old)).deltas
    rig.checkpoint(1, deltas, old)
    other = Rig()
    other.store.items = rig.store.items
    new = [0, 2, 1, 2]
    blobs = other.source(2, owners=new)
    counts: dict[str, Any] = {}
    for index in (0, 1, 2):
        report, found = other.count(2, [blobs[index]], index=index, owners=new, checkpoint=1)
        assert not report.missing
        assert not counts.keys() & found.keys(), "a key in two containers"
        counts |= found
    assert counts == {"a": (4, 10), "b": (2, 4), "c": (2, 6)}


def test_a_container_that_keeps_some_slices_loads_only_the_new_ones() -> None:
    rig = Rig()
    first = [0, 0, 1, 1]
    blobs = rig.source(owners=first)
    deltas = []
    for index in (0, 1):
        rig.count(1, [blobs[index]], index=index, owners=first)
        deltas += rig.worker.flush(rig.spec("count", 1, index=index, owners=first)).deltas
    rig.checkpoint(1, deltas, first)
    report, counts = rig.count(2, [rig.source(2)[0]], checkpoint=1)
    assert counts == {"a": (4, 10), "b": (2, 4), "c": (2, 6)}
    assert report.load_ms > 0


def test_rows_of_slices_that_come_up_are_taken_in_as_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "WAKE_ROWS", 1)
    rig = Rig()
    rig.lose()
    only_a = rig.source(2, split={"first": 0, "last": 1})[0]
    report, counts = rig.count(2, [only_a], attempt=2, checkpoint=1)
    table = rig.worker.containers["count", 0].table
    assert counts == {"a": (3, 6)} and report.state_rows == 3
    assert (table.rows_held, table.rows_waiting) == (1, 2), "nobody has asked for the others"
    rig.count(3, [only_a], attempt=2, checkpoint=1)
    assert (table.rows_held, table.rows_waiting) == (2, 1), "they come a few with each epoch"
    report, counts = rig.count(4, attempt=2, checkpoint=1)
    assert counts == {"a": (6, 12), "b": (2, 4), "c": (2, 6)} and report.state_rows == 3


def test_rows_that_wait_are_taken_in_between_tasks_and_then_not_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "WAKE_ROWS", 1)
    monkeypatch.setattr(task, "WAKE_BETWEEN", 1)
    rig = Rig()
    assert not rig.worker.wake_some(), "nothing waits"
    rig.lose()
    rig.count(2, [], attempt=2, checkpoint=1)
    table = rig.worker.containers["count", 0].table
    assert (table.rows_held, table.rows_waiting) == (0, 3)
    assert rig.worker.wake_some()
    assert (table.rows_held, table.rows_waiting) == (1, 2)
    rig.count(3, [], attempt=2, checkpoint=1)
    assert (table.rows_held, table.rows_waiting) == (1, 2), "what was done between tasks is not done in the next"
    rig.count(4, [], attempt=2, checkpoint=1)
    assert (table.rows_held, table.rows_waiting) == (2, 1), "without time in between an epoch does it"
    while rig.worker.wake_some():
        pass
    report, counts = rig.count(5, attempt=2, checkpoint=1)
    assert (table.rows_held, table.rows_waiting) == (3, 0)
    assert counts == {"a": (4, 10), "b": (2, 4), "c": (2, 6)} and report.state_rows == 3


def test_what_goes_wrong_between_tasks_is_told_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.lose()
    rig.count(2, [], attempt=2, checkpoint=1)
    with monkeypatch.context() as patch:
        patch.setattr(rig.worker.containers["count", 0].table, "wake", lambda count: 1 // 0)
        assert not rig.worker.wake_some()
    assert not rig.worker.containers, "a table with half of its rows is of no use"
    report, _ = rig.worker.run(rig.spec("count", 3, attempt=2, checkpoint=1), [])
    assert report.error is not None and "ZeroDivisionError" in report.error.message
    report, counts = rig.count(2, attempt=3, checkpoint=1)
    assert counts == {"a": (4, 10), "b": (2, 4), "c": (2, 6)} and report.error is None


def test_more_rows_than_may_wait_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "WAITING_ROWS_MAX", 2)
    rig = Rig()
    rig.lose()
    assert rig.count(2, [], attempt=2, checkpoint=1)[0].state_rows == 3
    table = rig.worker.containers["count", 0].table
    assert (table.rows_held, table.rows_waiting) == (3, 0)


def test_a_container_that_stands_elsewhere_is_loaded_afresh() -> None:
    rig = Rig()
    ran, _ = rig.count(1, seal=True)
    rig.checkpoint(1, [*ran.deltas, *rig.worker.flush(rig.spec("count", 1)).deltas], [0] * SLICES)
    for _ in range(2):  # the second time it stands at epoch 2 already, where it must not be used again
        report, counts = rig.count(2, checkpoint=1)
        assert not report.missing
        assert counts == {"a": (4, 10), "b": (2, 4), "c": (2, 6)}


def test_arrivals_are_put_in_order_whatever_order_they_come_in() -> None:
    """Sums of floats show it: 1e16 + 1 - 1e16 is 0 or 2 by order."""
    values = [1e16, 1.0, -1e16, 1.0]
    frame = pl.DataFrame({"k": ["a"] * 4, "x": values})
    sums = []
    for order in ((0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0)):
        flow = ps.Flow("f")
        flow.source("in", rows(frame)).key_by("k").aggregate("count", x=ps.sum("x")).sink("o", ps.memory())
        rig = Rig()
        rig.worker = Worker(compile_flow(flow.graph()), "job", rig.store)
        blobs = [rig.source(split={"first": i, "last": i + 1}, index=i)[0] for i in range(4)]
        report, _ = rig.worker.run(rig.spec("count", 1), [blobs[i] for i in order])
        sums.append(pl.read_ipc_stream(report.output.tables["o"])["x"][0])
    assert sums == [((1e16 + 1.0) - 1e16) + 1.0] * 3


def test_a_worker_holds_two_plans_and_each_epoch_runs_with_its_own() -> None:
    rig = Rig()
    other = ps.Flow("f")
    counts = other.source("in", rows(FRAME)).key_by("k").aggregate("count", n=ps.count(), x=ps.sum("x"))
    counts.where("often", pl.col("n") > 1).sink("o", ps.memory())
    rig.worker.add_plan(PlanVersion(2), compile_flow(other.graph()))
    assert rig.count(1, plan=2)[1] == {"a": (2, 5)}, "it puts out what came twice"
    assert rig.count(2)[1] == {"a": (4, 10), "b": (2, 4), "c": (2, 6)}, "the state is the same"
    blobs = [rig.source(3, plan=2, split={"first": 1, "last": 2})[0]]
    assert rig.count(3, blobs, plan=2)[1] == {"b": (3, 6)}


def test_a_plan_that_a_worker_does_not_have_is_named() -> None:
    rig = Rig()
    report, _ = rig.count(1, plan=3)
    assert report.error.kind == "EngineError" and "version 3 of the plan" in report.error.message
