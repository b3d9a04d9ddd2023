"""State files: what goes in comes out, and no damaged byte goes unseen."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from polars.testing import assert_frame_equal

from penstock.errors import CorruptData
from penstock.state import codec
from penstock.state.hashing import hash_columns
from penstock.state.slicemap import SliceMap
from penstock.state.table import DELETED, HASH


def sample(rows: int) -> pl.DataFrame:
    keys = pl.DataFrame({"w": [f"w{i}" for i in range(rows)]}, schema={"w": pl.String})
    hashes = pl.Series(HASH, hash_columns(keys, ["w"]), dtype=pl.UInt64)
    values = [
        pl.Series("n", np.arange(rows), dtype=pl.Int64),
        pl.Series("o", [None if i % 3 else bytes([i % 256]) for i in range(rows)], dtype=pl.Binary),
        pl.Series(DELETED, [i % 5 == 0 for i in range(rows)], dtype=pl.Boolean),
    ]
    return keys.insert_column(0, hashes).with_columns(values)


META = {"job": "j", "stage": "counts", "kind": "delta", "epoch_from": 3, "epoch_to": 5, "progress": {"lines": [1, 2]}}


@pytest.mark.parametrize("rows", [0, 1, 1000])
def test_round_trip(rows: int) -> None:
    frame = sample(rows)
    meta, back = codec.decode(codec.encode(META, frame), "a/b")
    assert_frame_equal(back, frame)
    assert {k: meta[k] for k in META} == META and meta["rows"] == rows


def test_equal_input_gives_equal_bytes() -> None:
    frame = sample(100)
    assert codec.encode(META, frame, slicemap=SliceMap(4)) == codec.encode(
        dict(reversed(META.items())), frame, slicemap=SliceMap(4)
    )


def test_a_few_rows_of_a_large_frame_make_a_small_file() -> None:
    """Polars strings share buffers; a file must not drag the whole buffer along."""
    large = pl.DataFrame({"s": [f"much longer than twelve bytes {i}" for i in range(50_000)]})
    assert len(codec.encode({}, large[::10_000])) < 2_000


def test_slices_are_sorted_indexed_and_selected() -> None:
    frame = sample(500)
    data = codec.encode(META, frame, slicemap=SliceMap(8))
    meta, back = codec.decode(data, "x")
    assert codec.decode_header(data, "x") == meta
    numbers = SliceMap(8).of(frame.get_column(HASH).to_numpy())
    for wanted in ([], [3], [6, 1], range(8)):
        expected = frame.filter(pl.Series(np.isin(numbers, list(wanted))))
        assert_frame_equal(codec.select_slices(meta, back, wanted).sort("n"), expected)
    assert sum(length for _, length in meta["slices"].values()) == 500
    assert codec.select_slices(meta, back, [99]).schema == frame.schema


def test_a_few_slices_of_a_large_file_are_read_without_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "BATCH_ROWS", 100)
    frame = sample(5_000)
    data = codec.encode(META, frame, slicemap=SliceMap(16))
    meta, whole = codec.decode(data, "x")
    assert sum(meta["batches"]) == 5_000 and len(meta["batches"]) > 10
    read: list[int] = []
    real = pa.ipc.read_record_batch

    def counting(*arguments: Any) -> Any:
        read.append(1)
        return real(*arguments)

    monkeypatch.setattr(pa.ipc, "read_record_batch", counting)
    for wanted in ([], [3], [15, 0], [99, 7], range(16)):
        read.clear()
        found = codec.read_slices(data, "x", wanted)
        assert_frame_equal(found, codec.select_slices(meta, whole, wanted))
        assert len(read) == len([w for w in wanted if w < 16]), "each slice is a batch here"
    some, rows = codec.decode(data, "x", [3])
    assert some["rows"] == rows.height < 500 and list(some["slices"]) == ["3"]
    damaged = bytearray(data)
    damaged[-200] ^= 1
    with pytest.raises(CorruptData, match="checksum"):
        codec.read_slices(bytes(damaged), "x", [3])


def test_rows_that_lie_by_slice_already_are_cut_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "BATCH_ROWS", 100)
    frame, index = codec.sort_by_slice(sample(1000), SliceMap(8))
    given = {**META, "slices_total": 8, "slices": {str(number): place for number, place in index.items()}}
    assert codec.encode(given, frame) == codec.encode(META, sample(1000), slicemap=SliceMap(8))
    assert len(codec.decode_header(codec.encode(given, frame), "a/b")["batches"]) > 3


def test_columns_with_a_dictionary_stay_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "BATCH_ROWS", 10)
    frame = sample(300).with_columns(e=pl.Series(["a", "b"] * 150, dtype=pl.Enum(["a", "b"])))
    data = codec.encode(META, frame, slicemap=SliceMap(4))
    assert "batches" not in codec.decode_header(data, "x")
    numbers = SliceMap(4).of(frame.get_column(HASH).to_numpy())
    assert_frame_equal(codec.read_slices(data, "x", [1]), frame.filter(pl.Series(numbers == 1)))


@pytest.fixture(scope="module")
def small() -> bytes:
    return codec.encode(META, sample(3), slicemap=SliceMap(2))


def test_every_flipped_byte_is_found(small: bytes) -> None:
    for position in range(len(small)):
        for flip in (0x01, 0x80, 0xFF):
            damaged = bytearray(small)
            damaged[position] ^= flip
            with pytest.raises(CorruptData) as caught:
                codec.decode(bytes(damaged), "state/f1")
            assert caught.value.evidence["path"] == "state/f1" and "state/f1" in str(caught.value)


def test_every_truncation_and_extension_is_found(small: bytes) -> None:
    for length in range(len(small)):
        with pytest.raises(CorruptData, match="state/f2"):
            codec.decode(small[:length], "state/f2")
    with pytest.raises(CorruptData):
        codec.decode(small + b"\0", "state/f2")


def test_an_unknown_version_with_a_right_checksum_says_so(small: bytes) -> None:
    body = bytearray(small[:-8])
    body[4] = 9
    data = bytes(body) + int(codec.checksum(bytes(body)), 16).to_bytes(8, "little")
    with pytest.raises(CorruptData, match="version 9"):
        codec.decode(data, "p")
