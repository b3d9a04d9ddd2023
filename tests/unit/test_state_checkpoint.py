"""Manifests and compaction plans."""

from __future__ import annotations

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from penstock.errors import CorruptData
from penstock.state.checkpoint import (
    CompactionTask,
    DeltaFile,
    Kind,
    Manifest,
    check_file,
    garbage,
    manifest_name,
    merge_frames,
    parse_manifest_name,
    plan_compaction,
)
from penstock.state.codec import checksum
from penstock.state.table import DELETED


def file(name: str, slices: tuple[int, ...], size: int = 10, kind: Kind = "delta", epoch: int = 1) -> DeltaFile:
    return DeltaFile(name, "s", kind, epoch - 1, epoch, slices, rows=size, bytes=size, checksum="0")


def manifest(*files: DeltaFile) -> Manifest:
    return Manifest(
        job_id="j",
        flow="top-wörds",
        fingerprint={"s": "f1"},
        epoch=3,
        attempt=2,
        routing={"version": 1},
        sources={"lines": {"offset": {"n": 4}, "facts": ["a"]}},
        clocks={"now": 1.5, "watermarks": {"s": None}},
        files={"s": files},
        totals={"rows": 5},
    )


def shape(files: tuple[DeltaFile, ...]) -> list[tuple[str, tuple[int, ...]]]:
    return [(f.name, f.slices) for f in files]


def test_manifest_round_trip() -> None:
    before = manifest(file("b", (0, 1), kind="base"), file("d", (1,)))
    assert Manifest.from_bytes(before.to_bytes()) == before


def test_every_damage_to_a_manifest_is_found() -> None:
    data = manifest(file("d", (1,))).to_bytes()
    for position in range(len(data)):
        for flip in (0x01, 0x20, 0xFF):
            damaged = bytearray(data)
            damaged[position] ^= flip
            with pytest.raises(CorruptData, match="ckpt/m1"):
                Manifest.from_bytes(bytes(damaged), "ckpt/m1")
        with pytest.raises(CorruptData):
            Manifest.from_bytes(data[:position], "ckpt/m1")


def test_manifest_names_sort_and_parse() -> None:
    assert manifest_name(9, 3) < manifest_name(10, 0) < manifest_name(10, 1)
    assert parse_manifest_name("x/" + manifest_name(10, 1)) == (10, 1) and manifest().name == manifest_name(3, 2)
    assert parse_manifest_name("delta-1.arrow") is None and parse_manifest_name("manifest-x-1.json") is None


def test_advance_appends_and_a_new_base_takes_its_slices_over() -> None:
    first = manifest(file("d1", (0, 1, 2)), file("d2", (1,)))
    after = first.advance(4, [file("d3", (0, 2)), file("b1", (1, 2), kind="base"), file("none", ())], clocks={"now": 2})
    assert shape(after.files["s"]) == [("d1", (0,)), ("d3", (0,)), ("b1", (1, 2))]
    assert after.epoch == 4 and after.clocks == {"now": 2} and after.sources == first.sources
    assert shape(tuple(after.files_for("s", [0, 1]))) == [("d1", (0,)), ("d3", (0,)), ("b1", (1,))]
    assert after.files_for("other", [0]) == []
    with pytest.raises(AssertionError):
        after.advance(4, [])


def test_nothing_is_due_below_the_limits() -> None:
    chain = [file("b", (0, 1), 1000, "base"), *(file(f"d{i}", (0, 1)) for i in range(8))]
    assert plan_compaction(chain) == [] and plan_compaction([]) == []


def test_more_than_deltas_max_are_merged_newest_first() -> None:
    chain = [file("b", (0, 1), 1000, "base"), file("large", (0, 1), 400), *(file(f"d{i}", (0, 1)) for i in range(8))]
    (task,) = plan_compaction(chain)
    assert task.kind == "delta" and task.slices == (0, 1) and not task.drop_deleted
    assert [f.name for f in task.inputs] == [f"d{i}" for i in range(8)], "the large one is left for later"
    after = manifest(*chain).compacted(task, file("m", (0, 1), 80))
    assert shape(after.files["s"]) == [("b", (0, 1)), ("large", (0, 1)), ("m", (0, 1))]


def test_deltas_as_large_as_their_base_become_a_base() -> None:
    chain = [file("b", (0, 1), 100, "base"), file("d1", (0, 1), 60), file("d2", (0, 1), 40)]
    (task,) = plan_compaction(chain)
    assert task == CompactionTask("s", "base", tuple(chain), (0, 1)) and task.drop_deleted
    assert plan_compaction(chain, ratio=1.01) == []
    assert plan_compaction(chain, deltas_min=3) == []


def test_without_a_base_a_long_chain_becomes_one() -> None:
    chain = [file(f"d{i}", (0,)) for i in range(9)]
    (task,) = plan_compaction(chain)
    assert task.kind == "base" and len(task.inputs) == 9


def test_a_large_state_is_merged_in_portions() -> None:
    every = (0, 1, 2, 3, 4)
    chain = [file("b", every, 500, "base"), file("d1", every, 300), file("d2", every, 200)]
    tasks = plan_compaction(chain, bytes_max=450)
    assert [task.slices for task in tasks] == [(0, 1), (2, 3), (4,)], "200 bytes a slice"
    assert all(shape(task.inputs) == [(name, task.slices) for name in ("b", "d1", "d2")] for task in tasks)
    assert [task.slices for task in plan_compaction(chain, bytes_max=1)] == [(0,), (1,), (2,), (3,), (4,)]
    (one, *_) = tasks
    after = manifest(*chain).compacted(one, file("m", one.slices, kind="base"))
    assert plan_compaction(after.files["s"], bytes_max=450) == tasks[1:]


def test_slices_that_moved_leave_the_rest_of_their_old_files_alone() -> None:
    """Slice 1 moved from container a to b; b's files are due, a's are not."""
    chain = [file("a1", (0, 1), 1000, "base"), file("b1", (2,), 1000, "base")]
    chain += [file("a2", (0, 1))] + [file(f"b{i}", (1, 2)) for i in range(2, 11)]
    (task,) = plan_compaction(chain)
    assert task.kind == "delta" and task.slices == (1, 2)
    assert shape(task.inputs) == [("a2", (1,)), *((f"b{i}", (1, 2)) for i in range(2, 11))]
    after = manifest(*chain).compacted(task, file("m", (1, 2)))
    assert shape(after.files["s"]) == [("a1", (0, 1)), ("b1", (2,)), ("a2", (0,)), ("m", (1, 2))]


def test_a_compaction_that_comes_late_keeps_what_came_meanwhile() -> None:
    chain = [file("b", (0, 1), 10, "base"), file("d1", (0, 1)), file("d2", (0, 1))]
    (task,) = plan_compaction(chain)
    current = manifest(*chain).advance(4, [file("d3", (0, 1)), file("b2", (1,), kind="base")])
    after = current.compacted(task, file("m", (0, 1), kind="base"))
    assert shape(after.files["s"]) == [("m", (0,)), ("d3", (0,)), ("b2", (1,))]
    replaced = manifest(*chain).advance(4, [file("b3", (0, 1), kind="base")])
    assert replaced.compacted(task, file("m", (0, 1), kind="base")) == replaced


def test_merge_frames_lets_the_last_writer_win() -> None:
    one = pl.DataFrame(
        {"k": ["a", "b", None], "f": [0.0, 1.0, float("nan")], "n": [1, 1, 1], DELETED: [False, False, False]}
    )
    two = pl.DataFrame({"k": ["b", None], "f": [1.0, float("nan")], "n": [0, 2], DELETED: [True, False]})
    merged = merge_frames([one, two], ["k", "f"], drop_deleted=False)
    assert merged.select("k", "n", DELETED).rows() == [("a", 1, False), ("b", 0, True), (None, 2, False)]
    assert_frame_equal(merge_frames([one, two], ["k", "f"], drop_deleted=True), merged.filter(~pl.col(DELETED)))


def test_merge_frames_fills_columns_that_older_files_lack() -> None:
    old = pl.DataFrame({"k": ["a", "b"], DELETED: [False, False]})
    new = pl.DataFrame({"k": ["b"], "n": [5], DELETED: [False]})
    rows = merge_frames([old, new], ["k"], False).sort("k").select("k", "n").rows()
    assert rows == [("a", None), ("b", 5)]


def test_garbage_is_what_no_kept_manifest_names() -> None:
    kept = [manifest(file("d1", (0,))), manifest(file("d2", (0,)))]
    names = ["d0", "d1", "d2", "d3", manifest_name(1, 0)]
    assert garbage(names, kept) == ["d0", "d3"]
    assert garbage(names, kept, in_flight=["d3"]) == ["d0"]
    assert garbage(["d0"], []) == ["d0"]


def test_check_file_tells_one_whole_file_from_another() -> None:
    data = b"contents"
    good = DeltaFile("n", "s", "delta", 0, 1, (0,), 1, len(data), checksum(data))
    check_file(good, data, "p")
    with pytest.raises(CorruptData, match="p"):
        check_file(good, b"contentz", "p")
