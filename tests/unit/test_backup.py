"""Backups one rule at a time, and the local disk they spill to. Random histories are in tests/property."""

from __future__ import annotations

import errno
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import xxhash

from penstock.connectors.spill import LocalSpill, open_spill, spill_roots
from penstock.state import backup, codec
from penstock.state.backup import Backups, Commit, cut
from penstock.state.checkpoint import merge_frames
from penstock.state.hashing import hash_columns
from penstock.state.slicemap import SliceMap
from penstock.state.store import MemoryStore
from penstock.state.table import DELETED, HASH

SLICES = 4
SLICEMAP = SliceMap(SLICES)
ALL = frozenset(range(SLICES))
BIG = 10**9
KEYS = np.arange(4000)
HASHES = hash_columns(pl.DataFrame({"k": KEYS}), ["k"])
OF_KEY = SLICEMAP.of(HASHES)


def rows(keys: Sequence[int], value: int, *, deleted: bool = False) -> pl.DataFrame:
    at = np.asarray(keys, dtype=np.int64)
    columns = {HASH: HASHES[at], "k": at, "n": np.full(at.size, value), DELETED: np.full(at.size, deleted)}
    return pl.DataFrame(columns)


def in_slice(number: int, count: int) -> list[int]:
    found: list[int] = np.flatnonzero(np.equal(OF_KEY, number))[:count].tolist()
    assert len(found) == count
    return found


def piece(name: str, epoch: int, frame: pl.DataFrame, to: frozenset[int] = ALL, stage: str = "s") -> bytes:
    meta = {"job": "j", "stage": stage, "kind": "delta", "epoch_from": epoch - 1, "epoch_to": epoch}
    meta["progress"] = {"in": {"row": 100 * epoch}}
    return cut((meta, frame), name, SLICEMAP, [[0] if s in to else [9] for s in range(SLICES)], 0)[0]


def altered(slices: int = SLICES, **header: str) -> bytes:
    """A piece that is whole and right, but for this."""
    meta, frame = codec.decode(piece("f", 1, rows([1], 1)), "")
    return codec.encode({**meta, **header}, frame, slicemap=SliceMap(slices))


def of_version(version: int) -> bytes:
    """A piece in another format, whole in itself."""
    body = bytearray(altered()[: -codec._TAIL.size])
    struct.pack_into("<H", body, len(codec.MAGIC), version)
    return bytes(body) + codec._TAIL.pack(xxhash.xxh3_64_intdigest(bytes(body)))


def holding(slices: frozenset[int] = ALL, memory_max: int = BIG, spill: backup.Spill | None = None) -> Backups:
    made = Backups("j", "s", ["k"], SLICEMAP, memory_max, spill)
    made.want(slices)
    for number in slices:
        made.seed(number, 0, [], {})
    return made


def content(made: Backups, number: int, checkpoint: int) -> dict[int, int]:
    frames = made.take([number], checkpoint)[number]
    whole = merge_frames([rows([], 0), *frames], ["k"], drop_deleted=True)
    return dict(zip(whole["k"].to_list(), whole["n"].to_list(), strict=True))


class Disk(MemoryStore):
    def clear(self) -> None:
        self.items.clear()


# ---- pieces --------------------------------------------------------------------------------------------------------


def test_a_file_is_cut_by_holder() -> None:
    frame = rows([*in_slice(0, 2), *in_slice(2, 3), *in_slice(3, 1)], 5)
    meta = {"job": "j", "stage": "s", "kind": "delta", "epoch_from": 3, "epoch_to": 4, "progress": {"in": {"row": 9}}}
    data = codec.encode(meta, frame, slicemap=SLICEMAP)
    holders = [[1, 2], [3], [1], []]
    pieces = cut(data, "file", SLICEMAP, holders, 7)
    assert sorted(pieces) == [1, 2], "container 3 holds a slice that did not change"
    header, got = codec.decode(pieces[1], "")
    assert {**meta, "name": "file", "attempt": 7, "slices_total": SLICES}.items() <= header.items()
    assert set(header["slices"]) == {"0", "2"}
    assert sorted(got["k"]) == sorted([*in_slice(0, 2), *in_slice(2, 3)])
    assert sorted(codec.decode(pieces[2], "")[1]["k"]) == in_slice(0, 2)
    assert cut((meta, frame), "file", SLICEMAP, holders, 7) == pieces, "rows that are at hand need not be encoded first"


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"not a piece",
        piece("f", 1, rows([1], 1))[:-1],
        altered(job="other"),
        altered(stage="other"),
        altered(kind="base"),
        altered(slices=2 * SLICES),
        of_version(codec.VERSION + 1),
        codec.encode({"job": "j", "stage": "s", "kind": "delta"}, rows([1], 1), slicemap=SLICEMAP),
        codec.encode({}, rows([1], 1)),
    ],
)
def test_what_is_not_ours_is_ignored_and_counted(damaged: bytes) -> None:
    made = holding()
    assert not made.offer(damaged)
    assert made.ignored == 1 and made.nbytes == 0
    for same in (altered(), of_version(codec.VERSION)):
        assert made.offer(same), "nothing else is wrong with what was ignored"
    assert made.ignored == 1 and made.nbytes > 0


def test_pieces_of_a_checkpoint_that_never_was_are_dropped() -> None:
    made = holding()
    made.offer(piece("given-up", 1, rows([1], 1)))
    made.offer(piece("kept", 1, rows([1], 2)))
    assert made.commit(Commit(0, 1, {"kept": [int(OF_KEY[1])]})) == []
    assert content(made, int(OF_KEY[1]), 1) == {1: 2}
    before = made.nbytes
    made.offer(piece("given-up", 1, rows([1], 1)))
    made.offer(piece("kept", 1, rows([1], 2)))
    assert made.nbytes == before


# ---- coming forward ------------------------------------------------------------------------------------------------


def test_a_slice_that_did_not_change_comes_forward_with_the_others() -> None:
    made = holding()
    assert made.commit(Commit(0, 1, {})) == []
    assert made.current(1) == ALL and made.take([0], 1) == {0: []}
    assert made.current(0) == frozenset() and made.take([0], 0) == {}


def test_a_missing_file_is_named_and_holds_up_only_its_slices() -> None:
    made = holding()
    frame = rows(in_slice(1, 3), 4)
    commit = Commit(0, 1, {"f": [1, 2]})
    assert made.commit(commit) == ["f"]
    assert made.current(1) == {0, 3}
    meta, whole = codec.decode(codec.encode({}, frame, slicemap=SLICEMAP), "")
    made.supply("f", meta, whole)
    assert made.commit(commit) == []
    assert made.current(1) == ALL
    assert content(made, 1, 1) == dict.fromkeys(in_slice(1, 3), 4) and content(made, 2, 1) == {}


def test_a_piece_without_a_slice_that_changed_is_not_taken_for_the_whole() -> None:
    """The routing table by which the writer cut did not yet name us as a holder of slice 1."""
    made = holding()
    frame = rows([*in_slice(0, 1), *in_slice(1, 1)], 4)
    made.offer(piece("f", 1, frame, to=frozenset({0})))
    assert made.commit(Commit(0, 1, {"f": [0, 1, 2]})) == ["f"]
    assert made.current(1) == {0, 2, 3}, "that slice 2 did not change, the piece does say"


def test_what_was_used_is_not_taken_for_unchanged_when_a_slice_is_seeded_again() -> None:
    made = holding()
    made.offer(piece("f", 1, rows([*in_slice(0, 1), *in_slice(1, 1)], 4)))
    assert made.commit(Commit(0, 1, {"f": [0, 1], "g": [1]})) == ["g"]
    made.seed(0, 0, [], {})
    assert sorted(made.advance()) == ["f", "g"]
    assert made.current(1) == {2, 3}


def test_commits_in_a_row_are_caught_up_with_after_a_seed() -> None:
    made = Backups("j", "s", ["k"], SLICEMAP, BIG, None)
    made.want(frozenset({0}))
    key = in_slice(0, 1)[0]
    assert made.to_seed(3) == {0}
    made.pinned = 3
    for epoch in range(4, 4 + 2 * backup.COMMITS_KEPT):
        made.offer(piece(f"f{epoch}", epoch, rows([key], epoch)))
        made.commit(Commit(epoch - 1, epoch, {f"f{epoch}": [0]}))
    made.seed(0, 3, [rows(in_slice(0, 2), 1)], {})
    assert made.to_seed(epoch) == frozenset(), "it is on its way"
    assert made.advance() == []
    assert content(made, 0, epoch) == {key: epoch, in_slice(0, 2)[1]: 1}


def test_a_slice_too_far_behind_is_to_be_seeded_again() -> None:
    made = holding()
    made.commit(Commit(0, 1, {"lost": [0]}))
    for epoch in range(2, 2 + backup.COMMITS_KEPT):
        assert made.to_seed(epoch - 1) == frozenset()
        made.commit(Commit(epoch - 1, epoch, {}))
    assert made.to_seed(epoch) == {0}


def test_a_slice_whose_file_can_no_longer_be_had_is_to_be_seeded_again() -> None:
    made = holding()
    made.commit(Commit(0, 1, {"lost": [0]}))
    assert made.to_seed(1) == frozenset()
    made.lose("lost")
    assert made.to_seed(1) == {0} and made.current(1) == {1, 2, 3}


def test_a_deleted_key_stays_deleted_through_merges() -> None:
    made = holding(frozenset({0}))
    keys = in_slice(0, 20)
    made.seed(0, 0, [rows(keys, 1)], {})
    for epoch in range(1, 15):
        frame = rows([keys[epoch]], 0, deleted=True) if epoch % 2 else rows([keys[0]], epoch)
        made.offer(piece(f"f{epoch}", epoch, frame))
        made.commit(Commit(epoch - 1, epoch, {f"f{epoch}": [0]}))
        expected = {key: 1 for key in keys if key not in keys[1 : epoch + 1 : 2]}
        assert content(made, 0, epoch) == expected | {keys[0]: epoch - epoch % 2 or 1}
        assert len(made.take([0], epoch)[0]) <= backup.DELTAS_MAX + 1


# ---- memory --------------------------------------------------------------------------------------------------------


def test_the_cost_of_a_delta_does_not_grow_with_the_backup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows written by merging, for each row that came: a logarithm, for a backup eight times as large. Merging into
    the base whenever there are too many deltas would write some fifty."""
    written = 0
    kept = backup.owned

    def counting(frame: pl.DataFrame) -> pl.DataFrame:
        nonlocal written
        written += frame.height
        return kept(frame)

    monkeypatch.setattr(backup, "owned", counting)
    monkeypatch.setattr(backup, "SMALL_BYTES", 1)
    costs = []
    for size in (500, 4000):
        made = Backups("j", "s", ["k"], SLICEMAP, BIG, None)
        made.want(ALL)
        for number in ALL:
            made.seed(number, 0, [rows(np.flatnonzero(OF_KEY[:size] == number).tolist(), 1)], {})
        rng = np.random.default_rng(0)
        written = came = 0
        for epoch in range(1, size // 5):
            made.offer(piece(f"f{epoch}", epoch, rows(rng.choice(size, 20, replace=False).tolist(), epoch)))
            assert made.commit(Commit(epoch - 1, epoch, {f"f{epoch}": list(ALL)})) == []
            came += 20
            assert made.nbytes <= 2.5 * rows(range(size), 1).estimated_size() + 4000
        costs.append(written / came)
    assert costs[1] < 3 * costs[0] and costs[1] < 8, costs


def spans_of(frame: pl.DataFrame, name: str) -> list[tuple[int, int]]:
    """Where in memory a column's buffers lie."""
    table = frame.to_arrow(compat_level=pl.CompatLevel.newest())
    buffers = [buffer for chunk in table.column(name).chunks for buffer in chunk.buffers() if buffer is not None]
    return [(buffer.address, buffer.address + buffer.size) for buffer in buffers]


def test_a_part_does_not_keep_the_whole_alive() -> None:
    text = pl.Series("t", ["x" * 1000] * 4000)
    whole = rows(range(4000), 1).insert_column(2, text)
    part = backup.owned(whole.slice(10, 5))
    assert part.equals(whole.slice(10, 5))
    for name in ("n", "t"):
        spans = [spans_of(frame, name) for frame in (whole, part)]
        assert not any(a < d and c < b for a, b in spans[0] for c, d in spans[1]), f"{name} shares a buffer"
    assert not any(b - a > 10_000 for a, b in spans_of(part, "t"))
    run = backup._Run.of(whole, {0: (10, 5), 1: (1000, 2500)})
    assert run.nbytes > 3_000_000
    run.release([1])
    assert run.nbytes < 10_000 and run.part(0).equals(whole.slice(10, 5))


def test_the_largest_slices_are_spilled_and_come_back() -> None:
    disk = Disk()
    made = holding(memory_max=20_000, spill=disk)
    made.seed(0, 0, [rows(in_slice(0, 900), 1)], {})
    made.seed(1, 0, [rows(in_slice(1, 10), 1)], {})
    assert [name.split("/")[1][:5] for name in disk.items] == ["00000"]
    assert made.nbytes < 20_000 and made.bytes_spilled == sum(map(len, disk.items.values()))
    key = in_slice(0, 1)[0]
    made.offer(piece("f", 1, rows([key], 7)))
    made.commit(Commit(0, 1, {"f": [0]}))
    assert content(made, 0, 1) == dict.fromkeys(in_slice(0, 900), 1) | {key: 7}
    made.want(frozenset({1}))
    assert not disk.items and made.bytes_spilled == 0


def test_a_spilled_slice_says_which_input_it_reflects() -> None:
    disk = Disk()
    made = holding(memory_max=20_000, spill=disk)
    for epoch in (1, 2):
        name = f"f{epoch}"
        made.commit(Commit(epoch - 1, epoch, {name: [0]}))
        made.supply(name, *codec.decode(piece(name, epoch, rows(in_slice(0, 900), epoch)), name))
        made.advance()
    (data,) = disk.items.values()
    header = codec.decode_header(data, "")
    assert (header["epoch"], header["progress"]) == (2, {"in": {"row": 200}})
    for epoch in range(3, 3 + 2 * backup.COMMITS_KEPT):
        made.offer(piece(f"f{epoch}", epoch, rows(in_slice(0, 1), epoch)))
        made.commit(Commit(epoch - 1, epoch, {f"f{epoch}": [0]}))
    assert len(made._progress) <= backup.COMMITS_KEPT, "progress of checkpoints that nothing comes to is forgotten"


def test_a_seeded_slice_says_which_input_it_reflects_also_when_deltas_passed_it_by() -> None:
    disk = Disk()
    made = holding(spill=disk)
    for number in (0, 1):
        made.seed(number, 3, [rows(in_slice(number, 9), 1)], {"in": {"row": 300}})
    made.offer(piece("f4", 4, rows(in_slice(1, 9), 4)))
    made.commit(Commit(3, 4, {"f4": [1]}))
    made.commit(Commit(4, 5, {"of slices that are not here": [2]}))
    assert made.current(5) == {0, 1}
    made.memory_max = 0
    made.work()
    headers = [codec.decode_header(data, "") for data in disk.items.values()]
    found = {header["slice"]: (header["epoch"], header["progress"]["in"]["row"]) for header in headers}
    assert found == {0: (5, 300), 1: (5, 400)}, "since then nothing came for them"


@pytest.mark.parametrize("how", ["gone", "damaged", "another slice's", "another epoch's"])
def test_a_spilled_slice_that_is_not_what_it_was_is_not_handed_out(how: str) -> None:
    disk = Disk()
    made = holding(memory_max=0, spill=disk)
    made.seed(0, 1, [rows(in_slice(0, 9), 1)], {})
    (name,) = disk.items
    meta, frame = codec.decode(disk.items[name], "")
    if how == "gone":
        del disk.items[name]
    elif how == "damaged":
        disk.items[name] = disk.items[name][:-20]
    else:
        other = {"slice": 1} if how.endswith("slice's") else {"epoch": 0}
        disk.items[name] = codec.encode({**meta, **other}, frame)
    assert made.current(1) == {0}
    assert made.take([0], 1) == {}
    assert made.current(1) == frozenset() and 0 in made.to_seed(1)
    assert "slice 0 of stage 's' is lost" in (made.problem or "")


def test_a_full_disk_costs_the_backup_and_is_told() -> None:
    class Full(Disk):
        def put(self, name: str, data: bytes) -> None:
            raise OSError(errno.ENOSPC, "no space left on device")

    for spill, words in ((Full(), "no space left on device"), (None, "bytes of memory")):
        made = holding(memory_max=5_000, spill=spill)
        made.seed(0, 1, [rows(in_slice(0, 900), 1)], {})
        made.seed(1, 1, [rows(in_slice(1, 9), 1)], {})
        assert made.current(1) == {1} and made.take([0], 1) == {}
        assert made.to_seed(1) == {2, 3}, "it would not fit a second time either"
        assert words in (made.problem or "")
        made.want(frozenset({0}))
        assert made.to_seed(1) == {0} and made.problem is None


def test_pieces_do_not_fill_the_memory() -> None:
    made = holding(memory_max=20_000)
    for attempt in range(50):
        assert made.offer(piece(f"f{attempt}", 1, rows(range(200), attempt)))
        assert made.nbytes <= 20_000
    assert made.commit(Commit(0, 1, {"f49": [0, 1, 2, 3]})) == ["f49"]


# ---- the local disk ------------------------------------------------------------------------------------------------


def test_a_spill_keeps_whole_values_and_is_gone_afterwards(tmp_path: Path) -> None:
    spill = open_spill("my-job", "run/1", "node", root=str(tmp_path))
    assert os.path.basename(spill.directory) == f"penstock-my%2Djob-run%2F1-node-{os.getpid()}"
    spill.put("stage/0", b"one")
    spill.put("stage/0", b"two")
    assert spill.get("stage/0") == b"two"
    spill.delete("stage/0")
    spill.delete("stage/0")
    with pytest.raises(FileNotFoundError):
        spill.get("stage/0")
    spill.clear()
    spill.clear()
    assert os.listdir(tmp_path) == []
    with pytest.raises(OSError, match="was removed"):
        spill.put("stage/0", b"late")


def test_two_of_one_process_do_not_meet(tmp_path: Path) -> None:
    one, two = (open_spill("j", "r", "n", root=str(tmp_path)) for _ in range(2))
    one.put("x", b"1")
    two.put("x", b"2")
    assert one.get("x") == b"1"
    one.clear()
    assert two.get("x") == b"2"
    two.clear()


def test_a_child_that_is_forked_leaves_it_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spill = LocalSpill(str(tmp_path / "d"))
    spill.put("x", b"1")
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        spill.clear()
    assert spill.get("x") == b"1"
    spill.clear()


def test_directories_of_the_dead_are_removed_whatever_job_they_are_of(tmp_path: Path) -> None:
    living = open_spill("j", "r1", "n", root=str(tmp_path))
    other = open_spill("j-2", "r1", "n", root=str(tmp_path))
    code = (
        "import os, signal; from penstock.connectors.spill import open_spill\n"
        f"s = open_spill('j', 'r0', 'n', root={str(tmp_path)!r}); s.put('x', b'1'); print(s.directory, flush=True)\n"
        f"t = open_spill('j-2', 'r0', 'n', root={str(tmp_path)!r}); print(t.directory, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    died = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert died.returncode == -signal.SIGKILL, died.stderr
    dead, dead_other = died.stdout.split()
    assert os.path.exists(dead) and os.path.exists(dead_other)
    fresh = open_spill("j", "r2", "n", root=str(tmp_path))
    assert not os.path.exists(dead) and not os.path.exists(dead_other)
    assert all(os.path.isdir(spill.directory) for spill in (living, other, fresh))
    for spill in (living, other, fresh):
        spill.clear()


def test_the_first_place_that_can_be_written_to_is_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    places = {"SPARK_LOCAL_DIRS": f"{tmp_path}/file/x, {tmp_path}/good", "TMPDIR": str(tmp_path)}
    assert spill_roots(places) == [f"{tmp_path}/file/x", f"{tmp_path}/good", str(tmp_path), "/tmp"]
    spill = open_spill("j", "r", "n", environ=places)
    assert spill.directory.startswith(f"{tmp_path}/good/penstock-j-r-n-")
    spill.clear()
    with pytest.raises(OSError, match="can be written to"):
        open_spill("j", "r", "n", root=f"{tmp_path}/file/x")
