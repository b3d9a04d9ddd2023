"""The routing table: even shares, the fewest moves, never a container without slices."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.control.routing import INSTANCES_MAX, RoutingTable, rebalance
from penstock.errors import ConfigError
from penstock.ids import ContainerId, StageId

KEYED, SOURCE = StageId("counts"), StageId("in")


def table(slices: int = 8, instances: int = 2) -> RoutingTable:
    return RoutingTable.initial(slices, {SOURCE: False, KEYED: True}, instances)


def test_the_first_table_deals_out_contiguous_arcs() -> None:
    t = table(8, 3)
    assert t.owners[KEYED] == (0, 0, 0, 1, 1, 1, 2, 2)
    assert t.slices_of(KEYED, 1) == (3, 4, 5)
    assert t.instances == {SOURCE: 3, KEYED: 3}
    assert t.version == 1
    t.validate()


def test_a_keyed_stage_has_no_more_containers_than_slices_but_a_source_may() -> None:
    t = table(2, 5)
    assert t.instances == {SOURCE: 5, KEYED: 2}
    t.validate()


def test_rescaling_gives_a_new_version_and_leaves_the_old_one() -> None:
    t = table()
    u = t.rescale(KEYED, 4)
    assert (t.version, u.version) == (1, 2)
    assert t.instances[KEYED] == 2 and u.instances[KEYED] == 4
    assert t.moved(u) == 4, "two containers give half of theirs away"
    assert u.moved(u) == 0


def test_a_source_is_rescaled_without_slices() -> None:
    t = table().rescale(SOURCE, 7)
    assert t.instances == {SOURCE: 7, KEYED: 2}
    t.validate()


@pytest.mark.parametrize(
    ("stage", "instances", "says"),
    [
        ("counts", 0, "cannot have 0 instances"),
        ("counts", -1, "cannot have -1 instances"),
        ("counts", 9, "only 8 slices"),
        ("in", INSTANCES_MAX + 1, "cannot have"),
        ("count", 2, "there is no stage 'count'"),
    ],
)
def test_what_cannot_be_is_refused_with_a_remedy(stage: str, instances: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        table().rescale(StageId(stage), instances)
    assert error.value.remedy


def test_it_survives_the_log() -> None:
    t = table(16, 3).rescale(KEYED, 5)
    assert RoutingTable.from_json(json.loads(json.dumps(t.to_json()))) == t


def test_stages_may_have_numbers_of_slices_of_their_own() -> None:
    other = StageId("other")
    t = RoutingTable.initial(8, {SOURCE: False, KEYED: True, other: True}, 4, {KEYED: 6}, {KEYED: 3})
    t.validate()
    assert {s: len(o) for s, o in t.owners.items()} == {KEYED: 3, other: 8}
    assert t.instances == {SOURCE: 4, KEYED: 3, other: 4}, "a stage has no more containers than slices"
    assert (t.slices_in(KEYED), t.slices_in(other), t.slices_most) == (3, 8, 8)
    assert t.rescale(other, 8).instances[other] == 8
    with pytest.raises(ConfigError, match="stage 'counts' cannot have 4 instances: it has only 3 slices"):
        t.rescale(KEYED, 4)
    assert RoutingTable.from_json(json.loads(json.dumps(t.to_json()))) == t


def test_a_log_from_before_stages_had_numbers_of_their_own_is_read() -> None:
    t = RoutingTable.initial(8, {SOURCE: False, KEYED: True, StageId("other"): True}, 3)
    before = {**t.to_json(), "slices": 8}
    assert RoutingTable.from_json(json.loads(json.dumps(before))) == t


def test_validate_sees_an_owner_that_is_not_there_and_a_backup_at_the_owner() -> None:
    t = table()
    with pytest.raises(AssertionError, match="an owner that is not there"):
        RoutingTable(t.version, t.slicemaps, {KEYED: (ContainerId(9),) * 8}, t.instances).validate()
    with pytest.raises(AssertionError, match="its own backup"):
        t.change(holders={KEYED: tuple((c,) for c in t.owners[KEYED])}).validate()
    vacant = RoutingTable(t.version, t.slicemaps, {KEYED: (ContainerId(0),) * 8}, t.instances)
    vacant.validate()
    assert vacant.occupied(KEYED) == (0,)
    assert set(vacant.filled().owners[KEYED]) == set(range(t.instances[KEYED])), "a new start uses everybody"


def test_validate_counts_slices() -> None:
    t = table()
    with pytest.raises(AssertionError, match="4 of 8 slices"):
        RoutingTable(t.version, t.slicemaps, {KEYED: (ContainerId(0), ContainerId(1)) * 2}, t.instances).validate()


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, list[int]]:
    slices = draw(st.integers(1, 64))
    return slices, draw(st.lists(st.integers(1, slices), min_size=1, max_size=8))


@given(histories())
def test_every_rescale_is_balanced_and_moves_the_least(history: tuple[int, list[int]]) -> None:
    slices, steps = history
    owners = table(slices, steps[0]).owners[KEYED]
    for instances in steps[1:]:
        before, owners = owners, rebalance(owners, instances)
        share = Counter(owners)
        assert set(share) == set(range(instances)), "every container has slices"
        assert max(share.values()) - min(share.values()) <= 1, "even shares"
        moved = sum(a != b for a, b in zip(before, owners, strict=True))
        assert moved == least_moves(before, instances)


def least_moves(owners: tuple[ContainerId, ...], instances: int) -> int:
    """Whoever had most keeps the larger shares; all else must move."""
    held = sorted((Counter(owners)[ContainerId(c)] for c in range(instances)), reverse=True)
    low, larger = divmod(len(owners), instances)
    return len(owners) - sum(min(h, low + (i < larger)) for i, h in enumerate(held))
