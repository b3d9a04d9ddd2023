"""Keys to slices: the function that exchange, tables, files and backups share."""

from __future__ import annotations

import pickle

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.state.slicemap import SLICES_MAX, SliceMap

HASHES = st.lists(st.integers(0, 2**64 - 1), max_size=50)
COUNTS = st.integers(1, 70) | st.sampled_from([1000, SLICES_MAX])


def array(hashes: list[int]) -> np.ndarray:
    return np.array(hashes, dtype=np.uint64)


@pytest.mark.parametrize(
    ("count", "slices"),
    [(1, [0, 0, 0, 0]), (4, [0, 0, 2, 3]), (64, [0, 4, 32, 63]), (1000, [0, 71, 500, 999])],
)
def test_a_slice_is_a_range_of_the_high_bits_for_all_time(count: int, slices: list[int]) -> None:
    """Checkpoints depend on these values."""
    hashes = array([0, 0x123456789ABCDEF0, 1 << 63, 2**64 - 1])
    found = SliceMap(count).of(hashes)
    assert found.tolist() == slices and found.dtype == np.int32
    assert hashes.tolist() == [0, 0x123456789ABCDEF0, 1 << 63, 2**64 - 1], "the caller's array stays as it is"


@given(COUNTS, HASHES)
def test_every_hash_has_one_slice(count: int, hashes: list[int]) -> None:
    assert SliceMap(count).of(array(hashes)).tolist() == [(h >> 32) * count >> 32 for h in hashes]


@given(COUNTS, HASHES, st.data())
def test_the_mask_tells_who_belongs_to_some_slices(count: int, hashes: list[int], data: st.DataObject) -> None:
    slices = data.draw(st.sets(st.integers(0, count - 1)))
    slicemap = SliceMap(count)
    expected = [s in slices for s in slicemap.of(array(hashes)).tolist()]
    assert slicemap.mask(array(hashes), slices).tolist() == expected


@given(st.integers(1, 70), st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=8), st.data())
def test_a_range_of_hashes_is_inside_outside_or_both(count: int, cuts: list[int], data: st.DataObject) -> None:
    slices = data.draw(st.sets(st.integers(0, count - 1)))
    edges = sorted({0, *cuts, 2**64})
    first, last = array(edges[:-1]), array([e - 1 for e in edges[1:]])
    slicemap = SliceMap(count)
    whole, some = slicemap.of_ranges(first, last, slices)
    for i, (low, high) in enumerate(zip(slicemap.of(first).tolist(), slicemap.of(last).tolist(), strict=True)):
        inside = [s in slices for s in range(low, high + 1)]
        assert (bool(whole[i]), bool(some[i])) == (all(inside), any(inside))


@pytest.mark.parametrize("count", [0, -1, SLICES_MAX + 1])
def test_a_number_of_slices_that_cannot_be_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"cannot have {count} slices"):
        SliceMap(count)
    with pytest.raises(msgspec.ValidationError, match=f"cannot have {count} slices"):
        msgspec.json.decode(msgspec.json.encode({"count": count}), type=SliceMap)


def test_it_travels_to_workers_and_to_processes() -> None:
    slicemap = SliceMap(12)
    assert msgspec.json.decode(msgspec.json.encode(slicemap), type=SliceMap) == slicemap
    assert pickle.loads(pickle.dumps(slicemap)) == slicemap
    assert len({slicemap, SliceMap(12), SliceMap(13)}) == 2
