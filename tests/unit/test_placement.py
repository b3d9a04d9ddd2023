"""Where slices, backups and containers go, on cases small enough to read."""

from __future__ import annotations

from collections import Counter

import pytest

from penstock.control.placement import (
    HotSlices,
    Peer,
    homes,
    hot_slices,
    lost_with,
    policy,
    ring_order,
    schedule,
    spread,
    survivable,
    takeover,
)
from penstock.control.ring import Pressure, Ring, Shift, Thresholds, arrange, crowding, idle, relieve
from penstock.control.routing import RoutingTable, rebalance
from penstock.errors import ConfigError, EngineError
from penstock.ids import ContainerId, StageId


def apart(n: int, zones: str = "") -> list[Peer]:
    """Containers 0 .. n-1, each on a node of its own; ``zones``: a letter for each."""
    return [Peer(c, f"n{c}", zones[c] if zones else "") for c in range(n)]


# -- policies ----------------------------------------------------------------------------------------------------------


def test_policies_by_name() -> None:
    assert policy("chained").name == "chained"
    assert policy("ring").name == "ring"
    with pytest.raises(ConfigError, match=r"no placement policy 'best'.*chained, ring"):
        policy("best")


def test_chained_is_the_papers_rule() -> None:
    """Container 0 has slices 0 to 3 and the peers 1, 2, 3; its m-th slice goes to peer (m + l) mod 3."""
    owners = [0, 0, 0, 0, 1, 2, 3]
    assert policy("chained").holders(owners, apart(4), 1)[:4] == ((2,), (3,), (1,), (2,))
    assert policy("chained").holders(owners, apart(4), 2)[:4] == ((2, 3), (3, 1), (1, 2), (2, 3))


def test_chains_of_containers_start_at_different_peers() -> None:
    """One slice each: were all chains to start at the same peer, it would hold everything."""
    held = policy("chained").holders(range(6), apart(6), 1)
    assert sorted(c for (c,) in held) == list(range(6))


def test_containers_of_one_node_back_up_to_different_containers() -> None:
    peers = [Peer(c, f"n{c // 2}") for c in range(8)]
    held = policy("chained").holders(range(8), peers, 1)
    assert sorted(c for (c,) in held) == list(range(8))
    assert all(c // 2 != owner // 2 for owner, (c,) in enumerate(held))


def test_a_vacant_container_holds_backups_too() -> None:
    held = policy("chained").holders([0, 0, 1, 1], apart(3), 1)
    assert 2 in {c for one in held for c in one}


@pytest.mark.parametrize("name", ["chained", "ring"])
def test_too_few_nodes_give_fewer_backups(name: str) -> None:
    holders = policy(name).holders
    assert holders([0, 1], [Peer(0, "n"), Peer(1, "n")], 2) == ((), ())
    assert holders([0, 1], apart(2), 3) == ((1,), (0,))
    assert holders([0, 1], apart(2), 0) == ((), ())
    assert holders([], apart(2), 1) == ()
    assert holders([0, 0], [], 1) == ((), ())


@pytest.mark.parametrize("name", ["chained", "ring"])
def test_another_zone_before_another_node(name: str) -> None:
    peers = apart(4, "aaab")
    held = policy(name).holders([0, 0, 1, 2, 3, 3], peers, 1)
    assert held[:4] == ((3,),) * 4
    assert all(c != 3 for one in held[4:] for c in one)
    # A second backup has no third zone to go to: another node will do.
    for owner, mine in zip([0, 3], policy(name).holders([0, 3], peers, 2), strict=True):
        assert len({owner, *mine}) == 3
        assert {peers[c].zone for c in (owner, *mine)} == {"a", "b"}


def test_unknown_zones_count_as_nodes_and_never_as_a_zone_of_that_name() -> None:
    peers = [Peer(0, "x", "a"), Peer(1, "a"), Peer(2, "y", "a")]
    assert policy("chained").holders([0], peers, 1) == ((1,),)


def test_an_owner_that_is_gone_still_gets_backups() -> None:
    for name in ("chained", "ring"):
        held = policy(name).holders([7, 7], apart(3), 2)
        assert all(len(set(one)) == 2 for one in held)


def test_the_ring_puts_backups_on_the_clockwise_neighbours() -> None:
    owners = [0, 0, 1, 1, 2, 2, 3, 3]
    held = policy("ring").holders(owners, apart(4), 2)
    assert held[0] == held[1] == (1, 2)
    assert held[6] == held[7] == (0, 1)
    assert ring_order(owners, apart(4)) == ("n0", "n1", "n2", "n3")


def test_the_ring_follows_the_arcs_and_a_newcomer_disturbs_only_its_neighbours() -> None:
    before = policy("ring").holders([0, 0, 0, 0, 1, 1, 2, 2], apart(3), 1)
    # Node 3 joins mid-way in the arc of node 0.
    after = policy("ring").holders([0, 0, 3, 3, 1, 1, 2, 2], apart(4), 1, before)
    assert after == ((3,), (3,), (1,), (1,), (2,), (2,), (0,), (0,))
    assert after[2:] == before[2:]


def test_a_ring_of_nodes_shares_out_backups_among_a_neighbours_containers() -> None:
    peers = [Peer(c, f"n{c % 2}") for c in range(4)]
    held = policy("ring").holders([0, 0, 0, 0], peers, 1)
    assert held == ((1,), (3,), (1,), (3,))


def test_the_ring_is_reseated_when_neighbours_share_a_zone_needlessly() -> None:
    order = ring_order(range(4), apart(4, "aabb"))
    assert crowding(order, {"n0": "a", "n1": "a", "n2": "b", "n3": "b"}) == (0,)
    # In good order already: as the arcs lie.
    assert ring_order([2, 1, 0, 3], apart(4, "abab")) == ("n2", "n1", "n0", "n3")


def test_seating() -> None:
    assert arrange(["p", "q", "r", "s"], dict(zip("pqrs", "aabc", strict=True))) in {
        ("p", "r", "q", "s"),
        ("p", "s", "q", "r"),
    }
    # Three equal zones, two backups: any three neighbours are in three zones.
    nodes = [f"n{i}" for i in range(6)]
    zone_of = dict(zip(nodes, "aabbcc", strict=True))
    assert crowding(arrange(nodes, zone_of, 2), zone_of, 2) == (0, 0)


# -- keeping what is held ----------------------------------------------------------------------------------------------


def test_a_valid_holder_is_kept() -> None:
    owners = [0, 1, 2, 3]
    assert policy("chained").holders(owners, apart(4), 1) == ((2,), (3,), (0,), (1,))
    held = ((1,), (2,), (3,), (0,))
    assert policy("chained").holders(owners, apart(4), 1, held) == held


def test_holders_that_are_gone_or_own_the_slice_now_are_replaced() -> None:
    peers = apart(4)
    held = policy("chained").holders([0, 1, 2, 3], peers[:3], 1, ((1,), (3,), (2,), (0,)))
    assert held[0] == (1,)
    assert held[3] == (0,)
    assert held[1] in {(0,), (2,)}
    assert held[2] in {(0,), (1,)}


def test_a_holder_in_the_owners_zone_is_given_up_for_one_in_another() -> None:
    assert policy("chained").holders([0], apart(3, "aab"), 1, [(1,)]) == ((2,),)
    # With two backups it is the second choice, whatever its place in the list.
    assert policy("chained").holders([0], apart(4, "aabb"), 2, [(1, 2)]) == ((2, 1),)


def test_keeping_yields_to_balance() -> None:
    """Twelve backups on one of three peers. Afresh it would have four of them; it may keep one more than that."""
    owners, peers = [0] * 12, apart(4)
    fresh = policy("chained").holders(owners, peers, 1)
    held = policy("chained").holders(owners, peers, 1, [(1,)] * 12)
    assert Counter(c for (c,) in fresh) == {1: 4, 2: 4, 3: 4}
    assert Counter(c for (c,) in held) == {1: 5, 2: 4, 3: 3}


def test_a_new_node_takes_its_share_and_no_more() -> None:
    owners = [c for c in range(4) for _ in range(6)]
    before = policy("chained").holders(owners, apart(4), 1)
    after = policy("chained").holders(owners, apart(5), 1, before)
    moved = sum(a != b for a, b in zip(before, after, strict=True))
    assert all(b == a or b == (4,) for a, b in zip(before, after, strict=True))
    # Six each before. Afresh they would be 6, 5, 5, 4, 4 and 21 of them elsewhere; one more apart costs 3 copies.
    assert moved == 3
    assert sorted(Counter(c for (c,) in after).values()) == [3, 5, 5, 5, 6]


# -- what survives -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("r", "n", "most"), [(0, 5, 0), (1, 1, 0), (1, 2, 1), (1, 6, 3), (1, 7, 3), (2, 6, 4), (3, 8, 6), (9, 4, 3)]
)
def test_survivable(r: int, n: int, most: int) -> None:
    assert survivable(r, n) == most


def test_lost_with_names_the_slices_without_a_copy() -> None:
    owners, held = [0, 1, 2], [(1,), (2,), (0,)]
    assert lost_with(held, owners, {"n0"}, apart(3)) == ()
    assert lost_with(held, owners, {"n0", "n1"}, apart(3)) == (0,)
    assert lost_with(held, owners, set(), apart(2)) == ()
    assert lost_with([(), (), ()], owners, {"n2"}, apart(3)) == (2,)
    # A holder that is no longer a peer has no copy.
    assert lost_with([(2,), (2,)], [0, 1], {"n0"}, apart(2)) == (0,)


# -- owners ------------------------------------------------------------------------------------------------------------


def test_lost_slices_come_up_on_many_holders_at_once() -> None:
    owners = [0, 0, 0, 0, 1, 2]
    # Both 0 and 1 could take all that is easy; slice 3 is on container 1 only.
    holding = {0: [1, 2], 1: [1, 2], 2: [1], 3: [1]}
    assert takeover(owners, {0}, holding, apart(3)[1:]) == (2, 2, 1, 1, 1, 2)


def test_a_takeover_prefers_who_has_least() -> None:
    assert takeover([0, 1, 1, 2], {0}, {0: [1, 2]}, apart(3)[1:]) == (2, 1, 1, 2)
    # Nobody holds it: the same.
    assert takeover([0, 1, 1, 2], {0}, {}, apart(3)[1:]) == (2, 1, 1, 2)
    # Holders that died with it, or are not peers, do not count.
    assert takeover([0, 1, 1, 2], {0}, {0: [0, 9]}, apart(3)[1:]) == (2, 1, 1, 2)


def test_a_takeover_revises_earlier_choices() -> None:
    # Slice 0 would go to container 1, which has least, but slice 1 has no other.
    assert takeover([0, 0, 2, 2], {0}, {0: [1, 2], 1: [1]}, apart(3)[1:]) == (2, 1, 2, 2)
    # Slices 2 and 3 are on container 3 only, so that two at once cannot be helped; then container 1, with nothing
    # else to do, may as well have two.
    owners = [0, 0, 0, 0, *[2] * 5, *[4] * 9]
    holding = {0: [1, 2, 4], 1: [1, 2], 2: [3], 3: [3]}
    assert takeover(owners, {0}, holding, apart(5)[1:])[:4] == (1, 1, 3, 3)


def test_a_takeover_leaves_alone_what_is_not_lost() -> None:
    assert takeover([5, 5, 1], {3}, {0: [1]}, apart(2)) == (5, 5, 1)
    assert takeover([1, 1], (), {}, []) == (1, 1)


def test_a_takeover_with_nobody_left_says_what_to_do() -> None:
    with pytest.raises(EngineError, match=r"2 slices .*Start executors"):
        takeover([0, 0], {0}, {}, apart(1))


def test_a_takeover_after_chained_backup_is_as_even_as_can_be() -> None:
    peers = apart(5)
    owners = [s % 5 for s in range(40)]
    held = policy("chained").holders(owners, peers, 1)
    after = takeover(owners, {2}, dict(enumerate(held)), [p for p in peers if p.container != 2])
    assert sorted(Counter(b for a, b in zip(owners, after, strict=True) if a != b).values()) == [2, 2, 2, 2]


def test_spread_does_for_counts_what_the_routing_table_does() -> None:
    for slices in (7, 16):
        owners = RoutingTable.initial(slices, {StageId("s"): True}, 3).owners[StageId("s")]
        for n in (1, 2, 4, 5):
            wanted = rebalance(owners, n)
            got = spread(owners, apart(n))
            assert Counter(got) == Counter(wanted)
            assert sum(a != b for a, b in zip(owners, got, strict=True)) == sum(
                a != b for a, b in zip(owners, wanted, strict=True)
            )


def test_spread_moves_to_holders_where_it_can() -> None:
    owners = [0, 0, 0, 0]
    assert spread(owners, apart(2)) == (0, 0, 1, 1)
    assert spread(owners, apart(2), holding={0: [1], 1: [1]}) == (1, 1, 0, 0)
    # Nothing moves merely because a backup is there.
    assert spread([0, 0, 1, 1], apart(2), holding={0: [1], 1: [1]}) == (0, 0, 1, 1)
    load = [1.0, 1.0, 1.0, 1.0]
    assert spread(owners, apart(2), load, holding={2: [1], 1: [1]}) == (0, 1, 1, 0)


@pytest.mark.parametrize("name", ["round_robin", "load"])
@pytest.mark.parametrize("load", [None, [5.0, 1.0, 1.0, 5.0, 1.0, 1.0, 4.0, 6.0]], ids=["counts", "loads"])
def test_slices_of_a_container_that_leaves_go_to_their_holders(name: str, load: list[float] | None) -> None:
    owners = [9, 9, 9, 9, 0, 0, 1, 1]
    holding = {0: [1], 1: [0], 2: [1], 3: [0]}
    for change in (lambda c: c, lambda c: 1 - c):  # whichever they would go to anyway
        held = {s: [change(c) for c in at] for s, at in holding.items()}
        after = schedule(name).assign(owners, apart(2), load, held)
        if load is None or name == "round_robin":
            assert after == tuple(held[s][0] if s in held else c for s, c in enumerate(owners))
        else:
            sums = [sum(x for x, c in zip(load, after, strict=True) if c == p) for p in (0, 1)]
            copied = [s for s in held if after[s] not in held[s]]
            assert max(sums) <= 1.1 * sum(load) / 2 and len(copied) <= 1, (after, sums)


def test_slices_change_places_on_their_way_to_get_to_their_holders() -> None:
    # The only one that 1 holds, of two that 0 and 1 take: the other has a backup at both of them.
    assert spread([9, 9, 0, 1], apart(2), holding={0: [0, 1], 1: [0]}) == (1, 0, 0, 1)
    # A holder that has its share already gets no more.
    assert spread([9, 9, 0, 0], apart(2), holding={0: [0], 1: [0]}) == (1, 1, 0, 0)


def test_slices_of_strangers_always_move() -> None:
    assert spread([9, 0, 1], apart(2)) in {(0, 0, 1), (1, 0, 1)}
    assert set(spread([9, 9, 8], apart(3), [5.0, 1.0, 1.0])) == {0, 1, 2}


def test_spread_by_load_moves_the_fewest_it_can() -> None:
    # One slice has half the load: one move, where counts would need two.
    assert spread([0, 0, 0, 0], apart(2), [6, 2, 2, 2]) == (1, 0, 0, 0)
    # Within a tenth of the mean: nothing moves.
    assert spread([0, 0, 1, 1], apart(2), [5, 6, 5, 5]) == (0, 0, 1, 1)
    # No load known: counts.
    assert spread([0, 0, 0, 0], apart(2), [0, 0, 0, 0]) == (0, 0, 1, 1)


def test_slices_change_places_where_no_single_move_helps() -> None:
    owners, load = [0, 0, 1, 1], [6.0, 6.0, 4.0, 4.0]
    after = spread(owners, apart(2), load)
    assert {sum(x for x, c in zip(load, after, strict=True) if c == k) for k in (0, 1)} == {10.0}


def test_a_slice_beyond_its_share_gets_a_container_and_the_rest_is_even() -> None:
    after = spread([0, 0, 0, 0, 0], apart(3), [100, 3, 3, 3, 3])
    assert sorted(Counter(after).values()) == [1, 2, 2]
    assert Counter(after)[after[0]] == 1


def test_a_slice_beyond_its_share_does_not_make_the_rest_look_uneven() -> None:
    owners = [0, *[1] * 10, *[2] * 12]
    assert spread(owners, apart(3), [100, *[1] * 22]) == tuple(owners)


def test_spread_over_nobody_says_what_to_do() -> None:
    with pytest.raises(EngineError, match="no container to own"):
        spread([ContainerId(0)], [])


def test_hot_slices_by_load() -> None:
    assert hot_slices([1, 1, 9, 1, 30, 1], capacity=20) == HotSlices(hot=(), too_hot=(4,))
    assert hot_slices([1, 1, 9, 1, 12, 1], capacity=20) == HotSlices(hot=(4, 2), too_hot=())
    assert hot_slices([1, 1, 9, 1, 30, 1], capacity=20, factor=1.2) == HotSlices(hot=(2,), too_hot=(4,))
    assert hot_slices([], capacity=1) == hot_slices([2, 2], capacity=2) == HotSlices((), ())


# -- homes -------------------------------------------------------------------------------------------------------------


def test_homes_go_where_there_is_most_room() -> None:
    assert homes(3, {"a": 1, "b": 1, "c": 1}, {}) == {0: "a", 1: "b", 2: "c"}
    # Twice the cores, twice the containers.
    assert Counter(homes(6, {"small": 1, "large": 2}, {}).values()) == {"large": 4, "small": 2}
    # Few containers still are on different nodes, so that they can back each other up.
    assert set(homes(2, {"a": 8, "b": 1}, {}).values()) == {"a", "b"}


def test_homes_on_living_nodes_stay() -> None:
    current = {0: "a", 1: "a", 2: "dead", 3: "b", 7: "b"}
    assert homes(5, {"a": 1, "b": 1, "10": 1, "9": 1}, current) == {0: "a", 1: "a", 2: "9", 3: "b", 4: "10"}
    assert homes(2, {}, {0: "a"}) == {}


# -- arcs --------------------------------------------------------------------------------------------------------------


def test_arcs() -> None:
    ring = Ring.even(8, ["a", "b", "c"])
    assert [ring.arc(n) for n in "abc"] == [(0, 1), (2, 3, 4), (5, 6, 7)]
    assert ring.node_of() == tuple("aabbbccc")
    assert ring.neighbours("b", 2) == ("c", "a")
    assert ring.neighbours("b", 9) == ("c", "a")
    assert ring.watches("a") == "c"
    assert Ring.even(2, ["a"]).watches("a") is None
    assert ring.owners({"a": [0], "b": [1, 4], "c": [2, 5]}) == (0, 0, 1, 1, 4, 2, 2, 5)


def test_half_an_arc_goes_clockwise() -> None:
    ring = Ring.even(8, ["a", "b"])
    assert ring.half("a") == (2, 3)
    assert ring.give("a", 2).node_of() == tuple("aabbbbbb")
    # Past the end of the circle, to the first node.
    assert ring.give("b", 2).node_of() == tuple("aaaabbaa")
    assert ring.give("b", 2).arc("a") == (6, 7, 0, 1, 2, 3)
    assert Ring.even(2, ["a", "b"]).half("a") == ()
    # By load: where it halves.
    assert ring.half("a", [9, 1, 1, 1, 0, 0, 0, 0]) == (1, 2, 3)


def test_a_new_node_mid_way_in_the_most_loaded_arc() -> None:
    ring = Ring.even(8, ["a", "b"])
    load = [0, 0, 0, 0, 4, 1, 1, 2]
    assert ring.join("new", load).node_of() == ("a", "a", "a", "a", "b", "new", "new", "new")
    assert ring.join("new", at="a").node_of() == ("a", "a", "new", "new", "b", "b", "b", "b")
    assert ring.join("new", at="a").nodes == ("a", "new", "b")


def test_a_leaving_nodes_arc_goes_to_its_neighbour() -> None:
    ring = Ring.even(6, ["a", "b", "c"])
    assert ring.leave("a").node_of() == tuple("bbbbcc")
    assert ring.leave("c").node_of() == tuple("aabbaa")
    assert ring.leave("c").nodes == ("a", "b")
    assert ring.fail({"b", "c"}).node_of() == tuple("aaaaaa")


def test_who_takes_over() -> None:
    ring = Ring.even(8, ["a", "b", "c", "d"])
    assert ring.heir("b", {"b"}, 1) == "c"
    assert ring.heir("b", {"b", "c"}, 2) == "d"
    assert ring.heir("b", {"b", "c"}, 1) is None


LIMITS = Thresholds(queue_high=100, queue_low=10)
BUSY, CALM, WARM = Pressure(200, 0.9), Pressure(0, 0.1), Pressure(50, 0.9)


def test_an_overloaded_node_shares_with_its_neighbour_only() -> None:
    ring = Ring.even(12, ["a", "b", "c"])
    relief = relieve(ring, {"a": BUSY, "b": CALM, "c": CALM}, LIMITS)
    assert relief.shifts == (Shift("a", "b", (2, 3)),)
    assert relief.ring.node_of() == tuple("aabbbbbbcccc")
    assert relief.stuck == ()


def test_a_neighbour_without_room_passes_load_on_first() -> None:
    ring = Ring.even(12, ["a", "b", "c"])
    relief = relieve(ring, {"a": BUSY, "b": WARM, "c": CALM}, LIMITS)
    assert relief.shifts == (Shift("b", "c", (6, 7)), Shift("a", "b", (2, 3)))
    assert relief.ring.node_of() == tuple("aabbbbcccccc")


def test_nobody_with_room_asks_for_a_node() -> None:
    ring = Ring.even(12, ["a", "b", "c"])
    relief = relieve(ring, {"a": BUSY, "b": WARM, "c": WARM}, LIMITS)
    assert (relief.shifts, relief.stuck, relief.ring) == ((), ("a",), ring)
    # A single slice cannot be halved, and a node alone has no neighbour.
    assert relieve(Ring.even(2, ["a", "b"]), {"a": BUSY, "b": CALM}, LIMITS).stuck == ("a",)
    assert relieve(Ring.even(2, ["a"]), {"a": BUSY}, LIMITS).stuck == ("a",)


def test_both_queue_and_cpu_must_be_high() -> None:
    ring = Ring.even(4, ["a", "b"])
    for one in (Pressure(200, 0.1), Pressure(0, 0.9), WARM):
        assert relieve(ring, {"a": one, "b": CALM}, LIMITS).shifts == ()


def test_a_node_is_part_of_one_chain_a_round() -> None:
    ring = Ring.even(16, ["a", "b", "c", "d"])
    relief = relieve(ring, {"a": BUSY, "b": CALM, "c": BUSY, "d": WARM}, LIMITS)
    # The chain c, d, a would end at b, which a gives to already: c waits for the next round and is not stuck.
    assert relief.shifts == (Shift("a", "b", (2, 3)),)
    assert relief.stuck == ()


def test_who_may_leave() -> None:
    ring = Ring(("a", "b", "c"), (4, 2, 3))
    assert idle(ring, {"a": CALM, "b": CALM, "c": CALM}, LIMITS) == "b"
    assert idle(ring, {"a": CALM, "b": CALM, "c": WARM}, LIMITS) == "a"
    assert idle(ring, {"a": CALM, "b": WARM, "c": WARM}, LIMITS) is None
    assert idle(Ring.even(2, ["a"]), {"a": CALM}, LIMITS) is None
