"""Placement against brute force: backups outlive their owners, takeovers are as parallel as can be, moves are few."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations, pairwise, product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.control.placement import (
    Peer,
    homes,
    lost_with,
    policy,
    ring_order,
    schedule,
    spread,
    survivable,
    takeover,
)
from penstock.control.ring import Pressure, Ring, Thresholds, arrange, crowding, relieve
from tests.property.cuts import examples

POLICIES = ("chained", "ring")


@st.composite
def clusters(draw: st.DrawFn, nodes_max: int = 6, zoned: bool | None = None) -> list[Peer]:
    """One to three containers on each node; some clusters have zones, in some of these not every node is in one."""
    nodes = draw(st.integers(1, nodes_max))
    zoned = draw(st.booleans()) if zoned is None else zoned
    zones = [draw(st.sampled_from(["", "a", "b", "c"])) if zoned else "" for _ in range(nodes)]
    seats = draw(st.permutations([n for n in range(nodes) for _ in range(draw(st.integers(1, 3)))]))
    return [Peer(c, f"n{n}", zones[n]) for c, n in enumerate(seats)]


@st.composite
def owned(draw: st.DrawFn, nodes_max: int = 6) -> tuple[list[int], list[Peer]]:
    peers = draw(clusters(nodes_max))
    owners = draw(st.lists(st.sampled_from([p.container for p in peers]), min_size=1, max_size=24))
    return owners, peers


def crowd(copies: Sequence[Peer]) -> list[int]:
    """How many copies each zone has, the fullest first. The smaller the better."""
    return sorted(Counter(p.fault_zone for p in copies).values(), reverse=True)


def best_crowd(owner: Peer, peers: Sequence[Peer], r: int) -> list[int]:
    """The same for the best of all choices of one container on each of ``r`` other nodes, or all there are."""
    nodes = {p.node: p for p in peers if p.node != owner.node}
    return min(crowd([owner, *choice]) for choice in combinations(nodes.values(), min(r, len(nodes))))


def shares(held: Sequence[Sequence[int]], peers: Sequence[Peer]) -> list[int]:
    counts = Counter(c for one in held for c in one)
    return [counts[p.container] for p in peers]


def unevenness(held: Sequence[Sequence[int]], peers: Sequence[Peer]) -> int:
    return max(shares(held, peers)) - min(shares(held, peers))


# -- backups -----------------------------------------------------------------------------------------------------------


@examples(60)
@given(owned(), st.integers(0, 3), st.sampled_from(POLICIES), st.data())
def test_backups_are_on_other_nodes_and_as_far_apart_as_zones_allow(
    cluster: tuple[list[int], list[Peer]], r: int, name: str, data: st.DataObject
) -> None:
    owners, peers = cluster
    of = {p.container: p for p in peers}
    some = st.lists(st.integers(0, len(peers)), max_size=3)
    previous = data.draw(st.lists(some, max_size=len(owners)))
    for held in (policy(name).holders(owners, peers, r), policy(name).holders(owners, peers, r, previous)):
        assert len(held) == len(owners)
        for owner, mine in zip(owners, held, strict=True):
            nodes = [of[c].node for c in (owner, *mine)]
            assert len(set(nodes)) == len(nodes) == 1 + min(r, len({p.node for p in peers}) - 1)
            assert crowd([of[c] for c in (owner, *mine)]) == best_crowd(of[owner], peers, r)


@examples(60)
@given(owned(), st.integers(1, 3), st.sampled_from(POLICIES))
def test_any_r_nodes_may_fail(cluster: tuple[list[int], list[Peer]], r: int, name: str) -> None:
    owners, peers = cluster
    nodes = sorted({p.node for p in peers})
    held = policy(name).holders(owners, peers, r)
    for size in range(min(r, len(nodes) - 1) + 1):
        for dead in combinations(nodes, size):
            assert lost_with(held, owners, dead, peers) == ()


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("r", [1, 2, 3])
@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_any_r_of_n_nodes_may_fail_every_pattern(n: int, r: int, name: str) -> None:
    peers = [Peer(c, f"n{c // 2}") for c in range(2 * n)]
    owners = [s * 2 * n // 30 for s in range(30)]
    held = policy(name).holders(owners, peers, r)
    nodes = [f"n{i}" for i in range(n)]
    for size in range(min(r, n - 1) + 1):
        assert all(not lost_with(held, owners, dead, peers) for dead in combinations(nodes, size))


@pytest.mark.parametrize("r", [1, 2, 3])
@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7, 8])
def test_a_ring_survives_every_pattern_without_r_plus_one_neighbours(n: int, r: int) -> None:
    """All 2^n patterns: what is lost is exactly what r + 1 failed neighbours in a row had; the bound is attained."""
    peers = [Peer(c, f"n{c % n}") for c in range(n)]
    owners = [s * n // (2 * n) for s in range(2 * n)]
    held = policy("ring").holders(owners, peers, r)
    order = ring_order(owners, peers, r)
    most = 0
    for pattern in product([False, True], repeat=n):
        dead = {order[i] for i in range(n) if pattern[i]}
        run = any(all(pattern[(i + d) % n] for d in range(min(r, n - 1) + 1)) for i in range(n))
        lost = lost_with(held, owners, dead, peers)
        assert bool(lost) == run
        if not run:
            assert len(dead) <= survivable(r, n)
            most = max(most, len(dead))
    assert most == survivable(r, n)


@pytest.mark.parametrize("pairs", [1, 2, 3, 4])
def test_a_ring_over_two_zones_survives_the_loss_of_either(pairs: int) -> None:
    """Half of all nodes at once, with a single backup. Nodes come in the worst order: one zone after the other."""
    peers = [Peer(c, f"n{c}", "ab"[c >= pairs]) for c in range(2 * pairs)]
    owners = list(range(2 * pairs)) * 3
    held = policy("ring").holders(owners, peers, 1)
    for zone in "ab":
        assert lost_with(held, owners, {p.node for p in peers if p.zone == zone}, peers) == ()


@examples(60)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=7), st.integers(1, 2))
def test_neighbours_differ_in_zone_wherever_some_order_has_it(zones: list[int], r: int) -> None:
    nodes = [f"n{i}" for i in range(len(zones))]
    zone_of = dict(zip(nodes, zones, strict=True))
    order = arrange(nodes, zone_of, r)
    assert sorted(order) == nodes
    largest, n = max(Counter(zones).values()), len(nodes)
    if n > 1 and 2 * largest <= n:
        assert crowding(order, zone_of, r)[0] == 0
    if n > 2 and largest == 1:
        assert not any(crowding(order, zone_of, r))


@examples(60)
@given(st.integers(2, 8), st.integers(1, 40), st.integers(1, 3))
def test_chained_backups_follow_the_rule_and_spread_evenly(n: int, slices: int, r: int) -> None:
    peers = [Peer(c, f"n{c}") for c in range(n)]
    owners = [s % n for s in range(slices)]
    held = policy("chained").holders(owners, peers, r)
    for owner in range(n):
        chain = [(owner + d) % n for d in range(1, n)]
        mine = [held[s] for s in range(slices) if owners[s] == owner]
        for m, holders in enumerate(mine):
            assert holders == tuple(chain[(m + link) % (n - 1)] for link in range(1, min(r, n - 1) + 1))
        for link in range(min(r, n - 1)):
            counts = Counter(holders[link] for holders in mine)
            assert {counts[c] for c in chain} <= {len(mine) // (n - 1), -(-len(mine) // (n - 1))}


@examples(60)
@given(clusters(zoned=False), st.integers(1, 40))
def test_a_lost_containers_slices_are_spread_over_all_peers(peers: list[Peer], slices: int) -> None:
    held = policy("chained").holders([0] * slices, peers, 1)
    others = [p for p in peers if p.node != peers[0].node]
    if others:
        assert {c for (c,) in held} <= {p.container for p in others}
        assert unevenness(held, others) <= 1


# -- keeping what is held ----------------------------------------------------------------------------------------------


@examples(60)
@given(owned(), st.integers(1, 3), st.sampled_from(POLICIES), st.data())
def test_what_is_held_is_kept_within_the_balance(
    cluster: tuple[list[int], list[Peer]], r: int, name: str, data: st.DataObject
) -> None:
    owners, peers = cluster
    fresh = policy(name).holders(owners, peers, r)
    assert policy(name).holders(owners, peers, r, fresh) == fresh
    previous = data.draw(
        st.lists(st.lists(st.integers(0, len(peers)), max_size=3), min_size=len(owners), max_size=len(owners))
    )
    kept = policy(name).holders(owners, peers, r, previous)
    assert unevenness(kept, peers) <= unevenness(fresh, peers) + 1
    again = policy(name).holders(owners, peers, r, kept)
    assert [set(a) for a in again] == [set(k) for k in kept]


@examples(60)
@given(owned(), st.integers(1, 3), st.sampled_from(POLICIES), st.data())
def test_losing_a_node_copies_no_more_than_placing_afresh(
    cluster: tuple[list[int], list[Peer]], r: int, name: str, data: st.DataObject
) -> None:
    owners, peers = cluster
    before = policy(name).holders(owners, peers, r)
    dead = data.draw(st.sampled_from(sorted({p.node for p in peers})))
    alive = [p for p in peers if p.node != dead]
    if not alive:
        return
    lost = {p.container for p in peers if p.node == dead}
    after = takeover(owners, lost, dict(enumerate(before)), alive)
    kept = policy(name).holders(after, alive, r, before)
    fresh = policy(name).holders(after, alive, r)

    def copies(held: Sequence[Sequence[int]]) -> int:
        return sum(len(set(new) - set(old)) for new, old in zip(held, before, strict=True))

    assert copies(kept) <= copies(fresh)


# -- owners ------------------------------------------------------------------------------------------------------------


@examples(60)
@given(st.data())
def test_a_takeover_is_the_best_of_all(data: st.DataObject) -> None:
    n = data.draw(st.integers(2, 5))
    lost = data.draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=n - 1))
    owners = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=8))
    holding = {s: data.draw(st.lists(st.integers(0, n - 1), max_size=3, unique=True)) for s in range(len(owners))}
    peers = [Peer(c, f"n{c}") for c in range(n) if c not in lost]
    after = takeover(owners, lost, holding, peers)

    alive = {p.container for p in peers}
    choices = {s: sorted(alive & set(holding[s])) for s, c in enumerate(owners) if c in lost}
    kept = Counter(c for c in owners if c not in lost)

    def cost(new: Sequence[int]) -> tuple[int, int]:
        counts = Counter(new)
        return max(counts.values(), default=0), sum((kept[c] + counts[c]) ** 2 for c in alive)

    best = min(cost(choice) for choice in product(*(c for c in choices.values() if c)))
    assert cost([after[s] for s, c in choices.items() if c]) == best
    for s, c in enumerate(owners):
        assert after[s] == c if c not in lost else after[s] in (choices[s] or alive)


@examples(60)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=6), st.sets(st.integers(0, 4), min_size=1, max_size=3), st.data()
)
def test_even_counts_take_the_fewest_moves(owners: list[int], containers: set[int], data: st.DataObject) -> None:
    peers = [Peer(c, f"n{c}") for c in sorted(containers)]
    holding = {s: data.draw(st.lists(st.integers(0, 4), max_size=2)) for s in range(len(owners))}

    def uneven(choice: Sequence[int]) -> int:
        counts = Counter(choice)
        return max(counts[c] for c in containers) - min(counts[c] for c in containers)

    def moves(choice: Sequence[int]) -> int:
        return sum(a != b for a, b in zip(owners, choice, strict=True))

    fewest = min(moves(c) for c in product(sorted(containers), repeat=len(owners)) if uneven(c) <= 1)
    for after in (spread(owners, peers), spread(owners, peers, holding=holding)):
        assert set(after) <= containers
        assert uneven(after) <= 1
        assert moves(after) == fewest


LOADS = st.one_of(st.integers(0, 20).map(float), st.floats(0, 1e6, allow_nan=False))


def fair(load: Sequence[float], n: int) -> float:
    """Slices that are more than a fair share by themselves have a container each; the mean is that of the rest."""
    big = [x for x in sorted(load, reverse=True) if x > 0]
    alone = 0
    while alone < n - 1 and alone < len(big) and big[alone] > 1.1 * sum(big[alone:]) / (n - alone):
        alone += 1
    return sum(big[alone:]) / (n - alone)


def test_two_slices_and_three_containers_are_not_left_together() -> None:
    """Each is beyond the fair share of what remains: still they are better apart."""
    assert len(set(spread([0, 0], [Peer(c, f"n{c}") for c in range(3)], [1.0, 1.0]))) == 2


@examples(60)
@given(st.data())
def test_even_loads_as_far_as_single_slices_allow(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 5))
    owners = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=24))
    load = data.draw(st.lists(LOADS, min_size=len(owners), max_size=len(owners)))
    peers = [Peer(c, f"n{c}") for c in range(n)]
    after = spread(owners, peers, load)
    assert set(after) <= set(range(n))
    if not any(load):
        assert after == spread(owners, peers)
        return
    sums = {c: sum(x for x, a in zip(load, after, strict=True) if a == c) for c in range(n)}
    slack = 1e-6 * sum(load)
    mean = fair(load, n)
    heavy, light = max(sums.values()), min(sums.values())
    for s, c in enumerate(after):
        # Out of bounds, yet no single slice of the heaviest, or for the lightest, is small enough to help.
        if sums[c] == heavy > 1.1 * mean + slack and load[s] > slack:
            assert load[s] >= heavy - light - slack
        if light < 0.9 * mean - slack and load[s] > slack:
            assert load[s] >= sums[c] - light - slack
    if all(c < n for c in owners):
        before = {c: sum(x for x, a in zip(load, owners, strict=True) if a == c) for c in range(n)}
        assert heavy <= max(before.values()) + slack
        if all(0.9 * mean <= x <= 1.1 * mean for x in before.values()):
            assert after == tuple(owners)


@pytest.mark.parametrize("name", ["round_robin", "load"])
@examples(100)
@given(st.data())
def test_to_prefer_holders_costs_neither_balance_nor_moves(name: str, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 5))
    owners = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=24))
    load = data.draw(st.none() | st.lists(LOADS, min_size=len(owners), max_size=len(owners)))
    holding = {s: data.draw(st.lists(st.integers(0, 6), max_size=3, unique=True)) for s in range(len(owners))}
    peers = [Peer(c, f"n{c}") for c in range(n)]
    by_load = name == "load" and load is not None and any(load)
    weights = load if load is not None and by_load else [1.0] * len(owners)

    def cost(choice: Sequence[int]) -> tuple[float, float, int, int]:
        sums = [sum(x for x, c in zip(weights, choice, strict=True) if c == k) for k in range(n)]
        moved = [(s, c) for s, c in enumerate(choice) if c != owners[s]]
        return max(sums), -min(sums), len(moved), sum(c not in holding[s] for s, c in moved)

    before = cost(schedule(name).assign(owners, peers, load))
    after = cost(schedule(name).assign(owners, peers, load, holding))
    # Sums within a tenth of their mean are as even as they need be.
    enough = (1.1 * fair(weights, n), -0.9 * fair(weights, n)) if by_load else before[:2]
    slack = 1e-9 * sum(weights)
    assert all(a <= max(b, e) + slack for a, b, e in zip(after[:2], before[:2], enough, strict=True))
    assert after[2] <= before[2] and after[3] <= before[3]


@examples(60)
@given(owned(), st.integers(1, 3), st.sampled_from(POLICIES), st.randoms(use_true_random=False))
def test_the_order_of_the_arguments_says_nothing(
    cluster: tuple[list[int], list[Peer]], r: int, name: str, random: Random
) -> None:
    owners, peers = cluster
    mixed = list(peers)
    random.shuffle(mixed)
    held = policy(name).holders(owners, peers, r)
    assert policy(name).holders(owners, mixed, r) == held
    assert spread(owners, mixed) == spread(owners, peers)
    lost, holding = {owners[0]}, dict(enumerate(held))
    if len(peers) > 1:
        assert takeover(owners, lost, holding, mixed) == takeover(owners, lost, holding, peers)


@examples(60)
@given(
    st.integers(0, 12),
    st.dictionaries(st.sampled_from("abcde"), st.integers(1, 8), min_size=1),
    st.dictionaries(st.integers(0, 12), st.sampled_from("abcdefg")),
)
def test_homes_stay_and_the_rest_evens_out(n: int, nodes: dict[str, int], current: dict[int, str]) -> None:
    found = homes(n, nodes, current)
    assert list(found) == list(range(n))
    assert set(found.values()) <= set(nodes)
    counts = Counter(found.values())
    for c, node in found.items():
        if current.get(c) in nodes:
            assert node == current[c]
        else:
            # Before the last newcomer came, its node had no more for each core than any has now.
            assert all((counts[node] - 1) / nodes[node] <= counts[m] / nodes[m] for m in nodes)
    assert homes(n, dict(reversed(nodes.items())), current) == found


# -- arcs --------------------------------------------------------------------------------------------------------------


@examples(60)
@given(st.integers(1, 64), st.integers(1, 8), st.lists(st.tuples(st.integers(0, 2), st.integers(0, 63)), max_size=12))
def test_arcs_always_cover_the_circle_and_changes_stay_local(
    slices: int, n: int, changes: list[tuple[int, int]]
) -> None:
    ring = Ring.even(slices, [f"n{i}" for i in range(n)])
    for number, (kind, pick) in enumerate(changes):
        before, old = ring.node_of(), ring
        node = ring.nodes[pick % len(ring.nodes)]
        if kind == 0 and len(ring.nodes) > 1:
            moved = ring.half(node)
            ring = ring.give(node, len(moved))
            gainer = old.neighbours(node)[0]
        elif kind == 1:
            gainer = f"x{number}"
            ring = ring.join(gainer)
            assert ring.watches(gainer) == max(old.nodes, key=lambda x: len(old.arc(x)))
            assert len(ring.arc(gainer)) == max(old.sizes) // 2
        elif len(ring.nodes) > 1:
            gainer = old.neighbours(node)[0]
            ring = ring.leave(node)
            assert set(ring.arc(gainer)) == {*old.arc(node), *old.arc(gainer)}
        else:
            continue
        after = ring.node_of()
        assert sorted(s for x in ring.nodes for s in ring.arc(x)) == list(range(slices))
        assert all(a == b or b == gainer for a, b in zip(before, after, strict=True))
        # Arcs begin where the one before ends: contiguous, all around.
        around = [s for x in ring.nodes for s in ring.arc(x)]
        assert all((a + 1) % slices == b for a, b in pairwise(around))


@examples(40)
@given(st.integers(1, 200), st.integers(1, 12))
def test_joining_and_leaving_an_even_ring_moves_k_over_n(slices: int, n: int) -> None:
    ring = Ring.even(slices, [f"n{i}" for i in range(n)])
    per_node = -(-slices // n)

    def moved(other: Ring) -> int:
        return sum(a != b for a, b in zip(ring.node_of(), other.node_of(), strict=True))

    assert moved(ring.join("new")) <= per_node
    if n > 1:
        assert moved(ring.leave("n0")) <= per_node


@examples(40)
@given(st.integers(2, 7), st.data())
def test_a_failed_run_goes_to_the_first_living_neighbour(n: int, data: st.DataObject) -> None:
    nodes = [f"n{i}" for i in range(n)]
    ring = Ring.even(5 * n, nodes)
    dead = data.draw(st.sets(st.sampled_from(nodes), max_size=n - 1))
    after = ring.fail(dead).node_of()
    for node in nodes:
        heir = ring.heir(node, dead, n) if node in dead else node
        assert heir is not None
        assert all(after[s] == heir for s in ring.arc(node))


@examples(60)
@given(st.integers(2, 8), st.integers(1, 6), st.data())
def test_balancing_among_neighbours_ends_with_nobody_overloaded_or_asks_for_a_node(
    n: int, per_node: int, data: st.DataObject
) -> None:
    """Pressure is the load of an arc here; what was measured is measured again after every round."""
    load = [float(x) for x in data.draw(st.lists(st.integers(0, 9), min_size=n * per_node, max_size=n * per_node))]
    limits = Thresholds(queue_high=30, queue_low=12, cpu_high=0.8, cpu_low=0.6)
    ring = Ring.even(n * per_node, [f"n{i}" for i in range(n)])
    for _ in range(4 * n * per_node):
        weight = {x: sum(load[s] for s in ring.arc(x)) for x in ring.nodes}
        pressure = {x: Pressure(w, min(1.0, w / 30)) for x, w in weight.items()}
        relief = relieve(ring, pressure, limits)
        for shift in relief.shifts:
            assert ring.neighbours(shift.source) == (shift.target,)
            assert set(shift.slices) <= set(ring.arc(shift.source))
            assert set(shift.slices) <= set(relief.ring.arc(shift.target))
        moved = sum(a != b for a, b in zip(ring.node_of(), relief.ring.node_of(), strict=True))
        assert moved == sum(len(s.slices) for s in relief.shifts)
        if not relief.shifts:
            over = {x for x in ring.nodes if limits.overloaded(pressure[x])}
            assert over == set(relief.stuck)
            return
        ring = relief.ring
    pytest.fail("load went on swinging between neighbours")
