"""The hash decides where a key lives, in every process and every checkpoint: its values are pinned here."""

from __future__ import annotations

import datetime as dt

import numpy as np
import polars as pl
import pytest

from penstock.errors import FlowError
from penstock.state import hashing
from penstock.state.hashing import hash_columns
from penstock.state.slicemap import SliceMap

MASK = (1 << 64) - 1


def mix(h: int) -> int:
    h ^= h >> 33
    h = h * int(hashing.MIX_A) & MASK
    h ^= h >> 33
    h = h * int(hashing.MIX_B) & MASK
    return h ^ (h >> 33)


def hash_text(data: bytes) -> int:
    """The definition of the module docstring, one byte string at a time."""
    h = int(hashing.SEED_BYTES) ^ (len(data) * int(hashing.K1) & MASK)
    for i in range(0, len(data), 8):
        h = (h ^ int.from_bytes(data[i : i + 8], "little")) * int(hashing.K2) & MASK
        h ^= h >> 32
    return mix(h)


def one(series: pl.Series) -> int:
    return int(hash_columns(series.to_frame("x"), ["x"])[0])


# Never change these: every checkpoint ever written depends on them.
GOLDEN = [
    (pl.Series([0]), 0xB800BD6C02472607),
    (pl.Series([5]), 0x2314E8D18E17B0A2),
    (pl.Series([-1]), 0xD92529B7DBA27AFA),
    (pl.Series([2**64 - 2], dtype=pl.UInt64), 0xE86D9D4790F7E12D),
    (pl.Series([True]), 0xCB30A855101ADE54),
    (pl.Series([1.5]), 0xFDAA716CA27B8BA9),
    (pl.Series([float("nan")]), 0x7F8ACC9D7E687EF8),
    (pl.Series([""]), 0x898CCD7541E68504),
    (pl.Series(["word"]), 0x90CB013F7378C367),
    (pl.Series(["twelve bytes"]), 0xE1EBEBAD25C8246C),
    (pl.Series(["thirteen byte"]), 0x6DA3E5488836E27D),
    (pl.Series(["müßig"]), 0x63B08A624AB94A9F),
    (pl.Series(["x" * 128]), 0xC95986761682DFE3),
    (pl.Series(["x" * 129]), 0x9F043FD8893EF9E6),
    (pl.Series([b"\x00\xff"]), 0x23040D2813CD84B1),
    (pl.Series([dt.date(2026, 1, 2)]), 0xED727F32D5D07EE3),
    (pl.Series([dt.datetime(2026, 1, 2, 3, 4, 5)]), 0x44658C888019A6B1),
    (pl.Series([None], dtype=pl.String), 0x6C62272E07BB0142),
]


@pytest.mark.parametrize(
    ("series", "expected"), GOLDEN, ids=lambda x: repr(x[0])[:40] if isinstance(x, pl.Series) else ""
)
def test_golden_values(series: pl.Series, expected: int) -> None:
    assert one(series) == expected


def test_golden_combination_depends_on_the_order() -> None:
    frame = pl.DataFrame({"a": ["x"], "b": [1]})
    assert int(hash_columns(frame, ["a", "b"])[0]) == 0x3083690570BAF8BA
    assert int(hash_columns(frame, ["b", "a"])[0]) == 0xEA001C403B1422FE


def test_strings_follow_the_written_definition_at_every_length() -> None:
    texts = ["".join(chr(97 + (i * 7 + k) % 26) for k in range(i)) for i in range(129)]
    hashes = hash_columns(pl.DataFrame({"x": texts}), ["x"])
    assert hashes.tolist() == [hash_text(t.encode()) for t in texts]
    assert hash_columns(pl.DataFrame({"x": [t.encode() for t in texts]}), ["x"]).tolist() == hashes.tolist()


def test_a_row_hashes_alike_alone_in_a_slice_in_chunks_and_among_nulls() -> None:
    texts = ["a", None, "", "b" * 11, "c" * 12, "d" * 13, "e" * 200, "é" * 9] * 3000
    whole = pl.Series("x", texts)
    hashes = hash_columns(whole.to_frame(), ["x"])
    assert [int(hash_columns(pl.DataFrame({"x": [t]}, schema={"x": pl.String}), ["x"])[0]) for t in texts[:8]] == (
        hashes[:8].tolist()
    )
    assert hash_columns(whole[5:10003].to_frame(), ["x"]).tolist() == hashes[5:10003].tolist()
    chunked = pl.concat([whole[:7], whole[7:]], rechunk=False).to_frame()
    assert hash_columns(chunked, ["x"]).tolist() == hashes.tolist()


@pytest.mark.parametrize("dtype", [pl.Int8, pl.Int16, pl.Int32, pl.UInt8, pl.UInt16, pl.UInt32, pl.UInt64])
def test_integers_agree_in_every_width(dtype: type[pl.DataType]) -> None:
    assert one(pl.Series([5], dtype=dtype)) == one(pl.Series([5], dtype=pl.Int64))
    if dtype.is_signed_integer():
        assert one(pl.Series([-5], dtype=dtype)) == one(pl.Series([-5], dtype=pl.Int64))


def test_floats_have_one_zero_one_nan_and_agree_in_both_widths() -> None:
    assert one(pl.Series([-0.0])) == one(pl.Series([0.0]))
    odd_nan = np.array([0x7FF8_0000_0000_0001, 0xFFF8_0000_0000_0000], dtype=np.uint64).view(np.float64)
    hashes = hash_columns(pl.DataFrame({"x": odd_nan}), ["x"])
    assert set(hashes.tolist()) == {one(pl.Series([float("nan")]))}
    assert one(pl.Series([1.5], dtype=pl.Float32)) == one(pl.Series([1.5], dtype=pl.Float64))


def test_hashing_leaves_its_input_alone() -> None:
    frame = pl.DataFrame({"f": [-0.0, 1.0], "i": [1, 2], "s": ["a", "b"]})
    before = [str(frame.get_column("f")[0]), frame.rows()]
    hash_columns(frame, ["f", "i", "s"])
    assert [str(frame.get_column("f")[0]), frame.rows()] == before


def test_nulls_differ_from_values_and_agree_across_types() -> None:
    null = one(pl.Series([None], dtype=pl.Int64))
    assert null == one(pl.Series([None], dtype=pl.String)) == one(pl.Series([None], dtype=pl.Null))
    assert null not in (one(pl.Series([0])), one(pl.Series([""])))


def test_categoricals_hash_as_their_text() -> None:
    assert one(pl.Series(["b"], dtype=pl.Categorical)) == one(pl.Series(["b"]))
    assert one(pl.Series(["b"], dtype=pl.Enum(["a", "b"]))) == one(pl.Series(["b"]))


@pytest.mark.parametrize("series", [pl.Series([[1]]), pl.Series([{"a": 1}]), pl.Series([object()], dtype=pl.Object)])
def test_other_types_are_refused_by_name(series: pl.Series) -> None:
    with pytest.raises(FlowError, match="'who'"):
        hash_columns(series.to_frame("who"), ["who"])


def test_empty_frames_and_no_columns() -> None:
    empty = pl.DataFrame(schema={"s": pl.String, "i": pl.Int64, "f": pl.Float64})
    assert hash_columns(empty, ["s", "i", "f"]).size == 0
    assert len(set(hash_columns(pl.DataFrame({"s": ["a", "b"]}), []).tolist())) == 1


@pytest.mark.parametrize(
    "frame", [pl.DataFrame({"k": [f"word{i}" for i in range(60_000)]}), pl.DataFrame({"k": range(60_000)})]
)
@pytest.mark.parametrize("slices", [1, 7, 64, 1000])
def test_slices_are_even_and_independent_of_the_low_bits(frame: pl.DataFrame, slices: int) -> None:
    hashes = hash_columns(frame, ["k"])
    assert np.unique(hashes).size == hashes.size
    numbers = SliceMap(slices).of(hashes)
    assert numbers.dtype == np.int32 and numbers.min() >= 0 and numbers.max() < slices
    mean = hashes.size / slices
    counts = np.bincount(numbers, minlength=slices)
    # Six standard deviations of a binomial: a fair hash passes always, a poor one never.
    assert np.abs(counts - mean).max() <= 6 * np.sqrt(mean)
    inside = hashes[numbers == 0] & np.uint64(15)
    if slices <= 64:
        low = np.bincount(inside.astype(np.int64), minlength=16)
        assert np.abs(low - inside.size / 16).max() <= 6 * np.sqrt(inside.size / 16)
