"""KeyedTable: the cases that random tests reach seldom, and the costs that must not depend on the size of the state."""

from __future__ import annotations

import mmap
import pickle
from typing import Any

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal

from penstock.state import keys as keys_module
from penstock.state import memory as memory_module
from penstock.state import table as table_module
from penstock.state.hashing import hash_columns
from penstock.state.slicemap import SliceMap
from penstock.state.table import DELETED, HASH, KeyedTable, TableSpec, numeric, objects

WORDS = TableSpec(pl.Schema({"w": pl.String()}), {"n": numeric(np.int64)})


def words(*names: str) -> pl.DataFrame:
    return pl.DataFrame({"w": names}, schema={"w": pl.String})


def many(count: int, start: int = 0) -> pl.DataFrame:
    return words(*(f"word number {i}" for i in range(start, start + count)))


def add(table: KeyedTable, keys: pl.DataFrame, n: int = 1) -> np.ndarray:
    rows, _ = table.upsert(hash_columns(keys, table.spec.key.names()), keys)
    table.column("n")[rows] += n
    return rows


def contents(table: KeyedTable) -> dict[Any, int]:
    rows = table.live_rows()
    keys = table.keys(rows).rows()
    return dict(zip([key for (key,) in keys], table.column("n")[rows].tolist(), strict=True))


def find(table: KeyedTable, keys: pl.DataFrame) -> np.ndarray:
    return table.find(hash_columns(keys, table.spec.key.names()), keys)


class CountingCodec:
    def __init__(self) -> None:
        self.encoded = 0

    def encode(self, value: Any, /) -> bytes:
        self.encoded += 1
        return pickle.dumps(value)

    def decode(self, data: bytes, /) -> Any:
        return pickle.loads(data)


def test_true_hash_collisions_stay_exact() -> None:
    table = KeyedTable(WORDS)
    keys = many(300)
    same = np.full(300, 42, dtype=np.uint64)
    for begin in range(0, 300, 60):
        rows, is_new = table.upsert(same[begin : begin + 60], keys[begin : begin + 60])
        assert is_new.all()
        table.column("n")[rows] = np.arange(begin, begin + 60)
    table.validate()
    rows, is_new = table.upsert(same, keys)
    assert not is_new.any() and table.column("n")[rows].tolist() == list(range(300))
    assert table.find(same[:2], words("absent", "word number 7")).tolist()[0] == -1


def test_the_same_key_twice_in_a_call_is_our_mistake() -> None:
    table = KeyedTable(WORDS)
    with pytest.raises(AssertionError, match="twice"):
        add(table, words("a", "a"))
    table = KeyedTable(WORDS)
    add(table, words("a", "b"))
    with pytest.raises(AssertionError, match="twice"):
        add(table, words("a", "b", "a"))


def test_dead_rows_may_not_be_touched_or_deleted() -> None:
    table = KeyedTable(WORDS)
    rows = add(table, words("a"))
    table.delete(rows)
    with pytest.raises(AssertionError):
        table.touch(rows)
    with pytest.raises(AssertionError):
        table.delete(rows)


def test_growth_over_many_calls_and_chunks() -> None:
    table = KeyedTable(WORDS)
    rng = np.random.default_rng(3)
    expected: dict[str, int] = {}
    keys = many(30_000)
    for _ in range(60):
        chosen = np.unique(rng.integers(0, 30_000, 900))
        add(table, keys[chosen])
        for i in chosen.tolist():
            expected[f"word number {i}"] = expected.get(f"word number {i}", 0) + 1
    assert len(table._keys._pieces) > 1, "this test is about several chunks"
    table.validate()
    assert contents(table) == expected
    found = find(table, keys)
    assert (found >= 0).tolist() == [f"word number {i}" in expected for i in range(30_000)]
    assert table.keys(found[found >= 0]).get_column("w").to_list() == [k for k in keys.get_column("w") if k in expected]


@pytest.mark.parametrize(
    "dtype", [pl.Categorical(), pl.Enum(["a", "b"]), pl.Date(), pl.Boolean(), pl.Binary(), pl.Float32()]
)
def test_key_types(dtype: pl.DataType) -> None:
    samples: dict[Any, list[Any]] = {
        pl.Date: [1, 2],
        pl.Boolean: [True, False],
        pl.Binary: [b"a", b"b"],
        pl.Float32: [0.5, float("nan")],
    }
    values = samples.get(type(dtype), ["a", "b"])
    keys = pl.DataFrame({"k": pl.Series([*values, None]).cast(dtype)})
    table = KeyedTable(TableSpec(keys.schema, {"n": numeric(np.int32)}))
    add(table, keys[:2])
    add(table, keys)
    expected = dict(zip(keys.get_column("k").to_list(), [2, 2, 1], strict=True))
    assert sorted(map(repr, contents(table).items())) == sorted(map(repr, expected.items()))
    copy = KeyedTable(table.spec)
    copy.load(table.seal(1).frame())
    assert sorted(contents(copy).values()) == [1, 2, 2]
    assert copy.keys(copy.live_rows()).schema == keys.schema


def test_keys_of_another_integer_width_are_the_same_keys() -> None:
    table = KeyedTable(TableSpec(pl.Schema({"i": pl.Int64()}), {"n": numeric(np.int64)}))
    add(table, pl.DataFrame({"i": [5]}, schema={"i": pl.Int64}))
    add(table, pl.DataFrame({"i": [5]}, schema={"i": pl.Int32}))
    assert contents(table) == {5: 2}


def test_a_fragment_is_a_copy_from_the_time_of_the_seal() -> None:
    spec = TableSpec(pl.Schema({"w": pl.String()}), {"n": numeric(np.int64), "o": objects(CountingCodec())})
    table = KeyedTable(spec)
    rows = add(table, words("a", "b"))
    table.column("o")[rows[0]] = ["x"]
    fragment = table.seal(1)
    rows = add(table, words("a", "b", "c"), 10)
    table.column("o")[rows[0]].append("y")
    table.delete(rows[1:2])
    frame = fragment.frame()
    assert frame.schema == spec.frame_schema()
    assert frame.select("w", "n", DELETED).rows() == [("a", 1, False), ("b", 1, False)]
    assert pickle.loads(frame.get_column("o")[0]) == ["x"] and frame.get_column("o")[1] is None
    assert table.undo_to(1) and table.column("o")[find(table, words("a", "b"))].tolist() == [["x"], None]


def test_an_object_is_encoded_once_for_each_change() -> None:
    codec = CountingCodec()
    table = KeyedTable(TableSpec(pl.Schema({"w": pl.String()}), {"n": numeric(np.int64), "o": objects(codec)}))
    rows = add(table, words("a", "b"))
    table.column("o")[rows] = ["x", "y"]
    table.seal(1)
    assert codec.encoded == 2
    rows = add(table, words("a"))
    assert codec.encoded == 2, "what it was before this touch was encoded by the seal"
    table.column("o")[rows] = "z"
    table.seal(2)
    assert codec.encoded == 3
    table.seal(3)
    add(table, words("b"))
    assert codec.encoded == 4
    assert table.undo_to(1) and table.column("o")[find(table, words("a", "b"))].tolist() == ["x", "y"]


def test_a_key_that_comes_and_goes_leaves_no_trace_but_a_deleted_one_does() -> None:
    table = KeyedTable(WORDS)
    add(table, words("old"))
    table.seal(1)
    add(table, words("brief"))
    table.delete(find(table, words("brief", "old")))
    assert table.seal(2).frame().select("w", DELETED).rows() == [("old", True)]
    assert table.changes(0).rows == 0
    assert table.changes(1).frame().get_column("w").to_list() == ["old"]


def test_release_and_undo() -> None:
    table = KeyedTable(WORDS, base_epoch=5)
    for epoch in (6, 7, 8):
        add(table, words("a"))
        table.seal(epoch)
    assert table.epochs() == [5, 6, 7, 8]
    table.release(6)
    assert table.epochs() == [6, 7, 8] and not table.undo_to(5) and not table.undo_to(9)
    assert table.undo_to(7) and contents(table) == {"a": 2} and table.epochs() == [6, 7]
    add(table, words("b"))
    table.seal(8)
    assert table.undo_to(6) and contents(table) == {"a": 1}
    table.reset(20)
    assert table.epochs() == [20] and table.rows_live == 0
    with pytest.raises(AssertionError):
        table.seal(20)


def test_sweeping_frees_the_dead_and_keeps_what_undo_needs() -> None:
    table = KeyedTable(WORDS, sweep_rows_min=10)
    add(table, many(5000))
    table.seal(1)
    table.release(1)
    table.delete(find(table, many(4990)))
    table.seal(2)
    table.validate()
    assert table.rows_held == 5000, "undo to 1 must still be possible"
    held = table.nbytes
    assert table.undo_to(1) and len(contents(table)) == 5000
    table.delete(find(table, many(4990)))
    table.seal(3)
    table.release(3)
    table.validate()
    assert table.rows_held == 10 and table.nbytes < held / 10
    assert contents(table) == {f"word number {i}": 1 for i in range(4990, 5000)}
    add(table, many(20, 4980))
    assert table.undo_to(3) and len(contents(table)) == 10


def test_endless_new_keys_that_die_do_not_grow_the_table() -> None:
    table = KeyedTable(WORDS, sweep_rows_min=100)
    sizes = []
    for epoch in range(1, 60):
        rows = add(table, many(100, 100 * epoch))
        table.delete(rows[:99])
        table.seal(epoch)
        table.release(epoch)
        sizes.append(table.rows_held)
    assert max(sizes) <= 500 and table.rows_live == 59


def test_slices_are_exported_dropped_and_loaded() -> None:
    table = KeyedTable(WORDS)
    keys = many(1000)
    add(table, keys)
    table.seal(1)
    numbers = SliceMap(16).of(hash_columns(keys, ["w"]))
    exported = table.export([3, 9], SliceMap(16))
    assert exported.height == int(np.isin(numbers, [3, 9]).sum())
    before = contents(table)
    table.drop_slices([3, 9], SliceMap(16))
    assert table.rows_live == 1000 - exported.height and table.seal(2).rows == 0
    table.load(exported)
    assert contents(table) == before and table.seal(3).rows == 0
    assert_frame_equal(table.export([3, 9], SliceMap(16)).sort("w"), exported.sort("w"))


def test_undo_does_not_bring_back_a_dropped_slice() -> None:
    table = KeyedTable(WORDS)
    add(table, many(50))
    table.seal(1)
    add(table, many(50))
    table.drop_slices(range(4), SliceMap(4))
    assert table.undo_to(1) and table.rows_live == 0


def test_a_loaded_row_is_recorded_again_from_its_next_touch() -> None:
    table = KeyedTable(WORDS)
    add(table, words("a"), 5)
    frame = table.export(range(1), SliceMap(1)).with_columns(n=pl.lit(100, dtype=pl.Int64))
    table.load(frame)
    add(table, words("a"), 1)
    assert table.seal(1).frame().get_column("n").to_list() == [101]
    assert table.undo_to(0) and contents(table) == {"a": 100}


def test_a_column_that_an_older_frame_lacks_is_filled() -> None:
    old = KeyedTable(WORDS)
    add(old, words("a", "b"))
    newer = KeyedTable(
        TableSpec(pl.Schema({"w": pl.String()}), {"n": numeric(np.int64), "m": numeric(np.float64, 2.5)})
    )
    newer.load(old.seal(1).frame())
    assert newer.column("m")[newer.live_rows()].tolist() == [2.5, 2.5]


def test_keys_do_not_hold_on_to_the_batch_they_came_from() -> None:
    batch = words(*(f"{i:05d}" + "x" * 1000 for i in range(2000)))
    table = KeyedTable(WORDS)
    add(table, batch[::500])
    arrow: Any = table._keys._pieces[0].get_column("w").to_arrow(compat_level=pl.CompatLevel.newest())
    assert sum(buffer.size for buffer in arrow.buffers()[2:] if buffer is not None) < 10_000


def test_an_epoch_gathers_only_the_keys_it_touches(monkeypatch: pytest.MonkeyPatch) -> None:
    """O(touched): 100 keys of 50,000 must not make anything gather, sort or copy thousands of rows."""
    table = KeyedTable(WORDS)
    add(table, many(50_000))
    table.seal(1)
    table.release(1)
    taken: list[int] = []
    real = keys_module.take

    def counting(frame: pl.DataFrame, rows: Any) -> pl.DataFrame:
        taken.append(len(rows))
        return real(frame, rows)

    monkeypatch.setattr(keys_module, "take", counting)
    monkeypatch.setattr(table_module, "take", counting)
    add(table, many(100, 49_950))
    fragment = table.seal(2)
    assert fragment.rows == 100 and max(taken) <= 4200, "at most the smallest chunk is copied with it"


def test_clashing_or_unusable_columns_are_refused() -> None:
    with pytest.raises(AssertionError):
        TableSpec(pl.Schema({"n": pl.String()}), {"n": numeric(np.int64)})
    with pytest.raises(AssertionError):
        TableSpec(pl.Schema({"l": pl.List(pl.Int64())}), {})
    with pytest.raises(AssertionError):
        TableSpec(pl.Schema({HASH: pl.String()}), {})


def test_empty_calls() -> None:
    table = KeyedTable(WORDS)
    assert add(table, words()).size == 0 and find(table, words()).size == 0
    assert table.seal(1).frame().schema == WORDS.frame_schema()
    assert table.export([0], SliceMap(1)).height == 0
    table.load(table.export([0], SliceMap(1)))
    table.drop_slices([], SliceMap(4))
    table.delete(table.live_rows())
    assert table.undo_to(0)


def test_after_an_undo_objects_are_not_taken_from_the_seal_that_was_undone() -> None:
    table = KeyedTable(
        TableSpec(pl.Schema({"w": pl.String()}), {"n": numeric(np.int64), "o": objects(CountingCodec())})
    )
    for epoch, value in ((1, "one"), (2, "two")):
        rows = add(table, words("a"))
        table.column("o")[rows] = value
        table.seal(epoch)
    for _ in range(2):
        assert table.undo_to(1) and table.column("o")[table.live_rows()].tolist() == ["one"]
        rows = add(table, words("a"))
        table.column("o")[rows] = "lost"


def test_a_sweep_keeps_the_dead_that_an_undo_may_revive() -> None:
    table = KeyedTable(WORDS, sweep_rows_min=10)
    add(table, many(60))
    table.seal(1)
    table.release(1)
    table.delete(find(table, many(30, 20)))
    table.seal(2)
    add(table, many(500, 1000))
    assert table.undo_to(2)  # leaves 500 dead rows that nobody needs, beside 30 that undo to 1 needs
    table.validate()
    assert table.rows_held == 60 and table.rows_live == 30
    assert table.undo_to(1) and contents(table) == {f"word number {i}": 1 for i in range(60)}


def crowded(keys: pl.DataFrame) -> np.ndarray:
    """Hashes of two parts alone, so that a few thousand keys fill many blocks."""
    hashes = hash_columns(keys, ["w"])
    return (hashes >> np.uint64(8)) | ((hashes & np.uint64(1)) << np.uint64(63))


def test_many_blocks_chunks_and_mappings_agree_with_a_dict(monkeypatch: pytest.MonkeyPatch) -> None:
    """What happens to millions of keys, with the limits so low that thousands do."""
    for module, name, value in (
        (keys_module, "CHUNK_BITS", 8),
        (keys_module, "CHUNK", 256),
        (memory_module, "MAPPED_BYTES_MIN", 4096),
        (table_module, "_BLOCK_ROWS_MAX", 128),
        (table_module, "_SWEPT_AT_ONCE", 500),
    ):
        monkeypatch.setattr(module, name, value)
    chance = np.random.default_rng(5)
    spec = TableSpec(WORDS.key, {"n": numeric(np.int64), "low": numeric(np.float64, np.inf)})
    table = KeyedTable(spec, sweep_rows_min=10)
    state: dict[str, int] = {}
    sealed = dict(state)
    for epoch in range(1, 80):
        begin = int(chance.integers(0, 6000))
        keys = many(int(chance.integers(1, 400)), begin)
        rows, _ = table.upsert(crowded(keys), keys)
        table.column("n")[rows] += epoch
        table.column("low")[rows] = np.minimum(table.column("low")[rows], epoch)
        for word in keys["w"].to_list():
            state[word] = state.get(word, 0) + epoch
        gone = many(int(chance.integers(1, 500)), int(chance.integers(0, 6000)))
        rows = table.find(crowded(gone), gone)
        table.delete(rows[rows >= 0])
        for word in gone["w"].to_list():
            state.pop(word, None)
        what = chance.integers(0, 6)
        if what == 0:
            assert table.undo_to(table.epochs()[-1])
            state = dict(sealed)
        elif what == 1:  # a slice leaves and comes back, whole parts or the half of one
            total = int(chance.choice([2, 512]))
            leaving = [int(chance.integers(0, total))]
            frame = table.export(leaving, SliceMap(total))
            table.drop_slices(leaving, SliceMap(total))
            table.validate()
            assert table.rows_live == len(state) - frame.height
            table.load(frame)
            sealed = {w: n for w, n in sealed.items() if w not in state or n == state[w]}
            table.seal(epoch)
            sealed = dict(state)
        else:
            table.seal(epoch)
            sealed = dict(state)
        if what > 3:
            table.release(table.epochs()[-1])
        table.validate()
        assert contents(table) == state
    assert len(table._keys._pieces) > 2 and table._hash._mapping is not None, "this test is about many of them"


def test_a_column_grows_in_place_or_is_copied() -> None:
    column = memory_module.GrowingArray(np.int64)
    column.grow(memory_module.MAPPED_BYTES_MIN)
    column.array[:100] = np.arange(100)
    mapping = column._mapping
    column.grow(4 * column.array.size)
    assert column._mapping is mapping and mapping is not None, "it was copied"
    seen = column.array[:100]
    column.grow(2 * column.array.size)
    assert column._mapping is not mapping, "somebody looks at it: it must stay where it is"
    assert seen.tolist() == column.array[:100].tolist() == list(range(100))
    column.array[:] = 7
    column.clear(100, 100_000)
    assert column.array[98:100].tolist() == [7, 7] and column.array[100_000] == 7
    assert not column.array[100:100_000].any()


def test_a_system_without_large_pages_or_mappings_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError("no such advice")

    def none(*_: Any, **__: Any) -> mmap.mmap:
        raise OSError("cannot allocate memory")

    for stand_in, mapped in ((Plain, True), (none, False)):
        monkeypatch.setattr(memory_module.mmap, "mmap", stand_in)
        column = memory_module.GrowingArray(np.int64)
        column.grow(memory_module.MAPPED_BYTES_MIN)
        assert (column._mapping is not None) is mapped
        column.array[:] = 7
        column.clear(100, 100_000)
        assert not column.array[100:100_000].any() and column.array[99] == column.array[100_000] == 7


def test_a_column_holds_its_fill_wherever_nothing_was_written() -> None:
    made = memory_module.GrowingArray
    for column, fill in ((made(np.float64, np.inf), np.inf), (made(object), None)):
        for size in (10, 100, 300_000):
            column.grow(size)
            assert set(column.array[:size].tolist()) == {fill}
            column.array[5:size] = 1
            column.clear(0, size)


def snapshot(n: int, *names: str, gone: bool = False) -> pl.DataFrame:
    keys = words(*names)
    values = [pl.Series("n", [n] * keys.height), pl.Series(DELETED, [gone] * keys.height)]
    return pl.DataFrame([pl.Series(HASH, hash_columns(keys, ["w"])), *keys.get_columns(), *values])


def test_rows_that_were_brought_wait_until_somebody_asks() -> None:
    """Three layers: the last row of a key counts, and a tombstone takes it away."""
    table = KeyedTable(WORDS)
    table.bring([snapshot(1, "a", "b", "c"), snapshot(2, "b", "d"), snapshot(3, "c", gone=True)])
    assert (table.rows_live, table.rows_waiting, table.rows_held) == (3, 3, 0)
    rows = find(table, words("b", "c", "x"))
    assert table.column("n")[rows[:1]].tolist() == [2] and rows[1:].tolist() == [-1, -1]
    assert table.rows_waiting == 2, "nobody asked for the others"
    assert sorted(table.live_hashes()) == sorted(hash_columns(words("a", "b", "d"), ["w"]))
    table.validate()
    assert table.seal(1).rows == 0, "to ask for a row does not make it dirty"
    assert contents(table) == {"a": 1, "b": 2, "d": 2} and table.rows_waiting == 0


def test_rows_that_wait_are_undone_and_dropped_as_if_they_were_here() -> None:
    table = KeyedTable(WORDS)
    table.bring([snapshot(5, "a", "b", "c")])
    _, new = table.upsert(hash_columns(words("a"), ["w"]), words("a"))
    assert not new.any(), "it has been here all the time"
    add(table, words("a"), 4)
    assert table.undo_to(0)
    assert table.column("n")[find(table, words("a"))].tolist() == [5]
    table.drop_slices(range(4), SliceMap(4))
    assert table.rows_live == 0 and contents(table) == {}


def test_rows_that_are_loaded_over_those_that_wait_win() -> None:
    table = KeyedTable(WORDS)
    table.bring([snapshot(5, "a", "b")])
    table.load(snapshot(6, "b", "c"))
    assert contents(table) == {"a": 5, "b": 6, "c": 6}


def test_a_frame_without_a_column_that_others_have_may_be_brought() -> None:
    table = KeyedTable(WORDS)
    table.bring([snapshot(5, "a", "b").drop("n"), snapshot(6, "b")])
    assert contents(table) == {"a": 0, "b": 6}


def test_waking_moves_no_rows_and_leaves_nothing_behind() -> None:
    table = KeyedTable(WORDS)
    names = many(1_000)["w"].to_list()
    table.bring([snapshot(1, *names[:600]), snapshot(2, *names[300:])])
    some = words(*names[::100])
    rows = add(table, some, 0)
    before = table.nbytes
    for _ in range(200):
        table.wake(10)
    assert table.rows_waiting == 0 and not table._waiting and table.nbytes < before
    assert find(table, some).tolist() == rows.tolist()
    assert contents(table) == {name: 1 if i < 300 else 2 for i, name in enumerate(names)}
    table.validate()
