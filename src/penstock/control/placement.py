"""Where slices, their backups and containers go.

Pure arithmetic: the same arguments give the same answer, whatever the order of ``peers``. What is decided here is only
ever a row of the routing table; bringing state to where the row points is the work of others.

Three wishes pull at a backup's place, and they are granted in this order:

1. **It must outlive its owner**: another node always, another fault zone as long as there is one.
2. **It must be spread**: when a container is lost, its slices should come up on many peers at once. ``chained`` is
   built for that: the l-th backup of a container's m-th slice goes to its peer (m + l) mod N. ``ring`` keeps all of
   a node's backups on its r clockwise neighbours instead: recovery is narrower, but more simultaneous failures are
   survived, and half an arc can change hands between neighbours with nothing to copy.
3. **It should stay where it is**: a backup that moves is copied. What is held now is kept unless that breaks 1, or
   makes the shares of the containers more uneven than a fresh placement by more than one backup.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.control import ring
from penstock.errors import ConfigError, EngineError

Holders = tuple[tuple[int, ...], ...]
"""For each slice the containers that hold its backups, the first choice first."""

LOAD_TOLERANCE = 0.10
"""Loads within a tenth of the mean are even: below that, measuring noise would move slices to and fro."""


@dataclass(frozen=True)
class Peer:
    """A container that may own slices or hold backups."""

    container: int
    node: str
    zone: str = ""
    """The fault zone: host, rack, or what the user's mapping says. Unknown: every node is a zone of its own."""

    @property
    def fault_zone(self) -> Hashable:
        return ("zone", self.zone) if self.zone else ("node", self.node)


class Placement(Protocol):
    """A policy: who holds the backups."""

    @property
    def name(self) -> str: ...

    def holders(
        self, owners: Sequence[int], peers: Sequence[Peer], r: int, previous: Sequence[Sequence[int]] = ()
    ) -> Holders:
        """For each slice up to ``r`` containers of ``peers``, on nodes other than its owner's and each other's.

        Fewer where there are not enough nodes. ``previous``: what is held now, slice by slice.
        """
        ...


def policy(name: str) -> Placement:
    found = _POLICIES.get(name)
    if found is None:
        raise ConfigError(
            f"there is no placement policy '{name}'.", remedy=f"The policies are {', '.join(sorted(_POLICIES))}."
        )
    return found


# -- who holds the backups ---------------------------------------------------------------------------------------------


class _Sites:
    """The peers, looked up in every way that placement needs."""

    def __init__(self, peers: Sequence[Peer]) -> None:
        self.peers = sorted(peers, key=lambda p: p.container)
        self.of = {p.container: p for p in self.peers}
        assert len(self.of) == len(self.peers), "a container is named twice among the peers"
        self.by_node: dict[str, list[int]] = {}
        for p in self.peers:
            self.by_node.setdefault(p.node, []).append(p.container)
        self.zone_of_node = {p.node: p.fault_zone for p in self.peers}
        self.zone = {p.container: p.fault_zone for p in self.peers}

    def allowed(self, owner: int, taken: Sequence[int], candidates: Iterable[int]) -> list[int]:
        """Those of ``candidates`` that may hold one more copy: on a node without one, in the emptiest zone."""
        copies = [c for c in (owner, *taken) if c in self.of]
        nodes = {self.of[c].node for c in copies}
        crowd = Counter(self.zone[c] for c in copies)
        free = [c for c in candidates if c != owner and self.of[c].node not in nodes]
        emptiest = min((crowd[self.zone[c]] for c in free), default=0)
        return [c for c in free if crowd[self.zone[c]] == emptiest]

    def alone(self, owner: int, taken: Sequence[int], candidate: int) -> bool:
        """Would it be the first copy in its zone? Then it is allowed, and nobody else needs to be looked at."""
        zone = self.zone.get(candidate)
        return zone is not None and candidate != owner and all(self.zone.get(c) != zone for c in (owner, *taken))

    def chain(self, owner: int) -> tuple[list[int], int]:
        """The owner's peers in the order of its chain, and how many of them the chain goes round.

        It starts behind the owner, so that the first links of all containers' chains do not meet in one place, and
        zones and nodes take turns, so that neighbouring links are as far apart as they can be. It goes round the
        peers in other zones; the owner's own zone comes behind them, for when those do not suffice.
        """
        me = self.of.get(owner)
        nodes = list(self.by_node)
        first = nodes.index(me.node) if me else 0
        # Containers of one node see the same neighbours: each starts with another container of them.
        rank = self.by_node[me.node].index(owner) if me else 0
        far: dict[Hashable, list[list[int]]] = {}
        near: list[list[int]] = []
        for node in nodes[first:] + nodes[:first]:
            containers = self.by_node[node]
            turned = containers[rank % len(containers) :] + containers[: rank % len(containers)]
            if me is None or self.zone_of_node[node] != me.fault_zone:
                far.setdefault(self.zone_of_node[node], []).append(turned)
            elif node != me.node:
                near.append(turned)
        around = _taking_turns(_taking_turns(zone) for zone in far.values())
        rest = _taking_turns(near)
        return around + rest, len(around) or len(rest)


def _taking_turns(rows: Iterable[list[int]]) -> list[int]:
    rows = list(rows)
    return [row[i] for i in range(max(map(len, rows), default=0)) for row in rows if i < len(row)]


def _slices_by(owners: Sequence[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for s, owner in enumerate(owners):
        found.setdefault(owner, []).append(s)
    return dict(sorted(found.items()))


class Chained:
    """ChronoStream's chained backup: a lost container's slices are spread evenly over its peers."""

    name = "chained"

    def holders(
        self, owners: Sequence[int], peers: Sequence[Peer], r: int, previous: Sequence[Sequence[int]] = ()
    ) -> Holders:
        sites = _Sites(peers)
        everyone = [p.container for p in sites.peers]
        fresh: list[tuple[int, ...]] = [()] * len(owners)
        total: Counter[int] = Counter()
        for owner, mine in _slices_by(owners).items():
            chain, around = sites.chain(owner)
            place = {c: i for i, c in enumerate(chain)}
            given: Counter[int] = Counter()
            for m, s in enumerate(mine):
                picks: list[int] = []
                for link in range(1, r + 1):
                    pick = chain[(m + link) % around] if chain else owner
                    allowed = [pick] if sites.alone(owner, picks, pick) else sites.allowed(owner, picks, chain)
                    if not allowed:
                        break
                    if pick not in allowed:
                        # The rule knows no zones, and nodes of one container only. Where it cannot be followed, what
                        # it is there for decides: an even spread.
                        pick = min(allowed, key=lambda c: (given[c], total[c], (place[c] - m - link) % len(chain)))
                    picks.append(pick)
                    given[pick] += 1
                    total[pick] += 1
                fresh[s] = tuple(picks)

        def allowed_for(s: int, taken: Sequence[int]) -> list[int]:
            return sites.allowed(owners[s], taken, everyone)

        def surely(s: int, taken: Sequence[int], candidate: int) -> bool:
            return sites.alone(owners[s], taken, candidate)

        return _keeping(previous, fresh, everyone, allowed_for, surely)


class Ring:
    """Floe's peer ring: a node's backups are on its r clockwise neighbours, which are in other fault zones."""

    name = "ring"

    def holders(
        self, owners: Sequence[int], peers: Sequence[Peer], r: int, previous: Sequence[Sequence[int]] = ()
    ) -> Holders:
        sites = _Sites(peers)
        order = ring_order(owners, peers, r)
        seat = {node: i for i, node in enumerate(order)}
        seen: Counter[str] = Counter()
        nodes: list[list[str]] = []
        fresh: list[tuple[int, ...]] = []
        for s, owner in enumerate(owners):
            me = sites.of.get(owner)
            start = seat[me.node] if me else s * len(order) // len(owners)
            walk = [order[(start + d) % len(order)] for d in range(len(order))]
            nth = seen[walk[0]] if walk else 0
            if walk:
                seen[walk[0]] += 1
            picks: list[int] = []
            # One container of each node is enough to ask about it; the owner's own node is never allowed.
            turn = [sites.by_node[node][nth % len(sites.by_node[node])] for node in walk]
            while len(picks) < r:
                pick = next((c for c in turn if sites.alone(owner, picks, c)), None)
                allowed = sites.allowed(owner, picks, turn) if pick is None else [pick]
                if not allowed:
                    break
                picks.append(allowed[0])
            fresh.append(tuple(picks))
            nodes.append([sites.of[c].node for c in picks])

        def allowed_for(s: int, taken: Sequence[int]) -> list[int]:
            # The ring says which nodes; only which of a node's containers is free to choose.
            used = {sites.of[c].node for c in taken}
            return [c for node in nodes[s] if node not in used for c in sites.by_node[node] if c != owners[s]]

        kept = _keeping(previous, fresh, [p.container for p in sites.peers], allowed_for)
        return tuple(
            tuple(sorted(picks, key=lambda c: nodes[s].index(sites.of[c].node))) for s, picks in enumerate(kept)
        )


def ring_order(owners: Sequence[int], peers: Sequence[Peer], r: int = 1) -> tuple[str, ...]:
    """The nodes clockwise: as their arcs lie, unless that needlessly seats neighbours in one fault zone."""
    sites = _Sites(peers)
    in_use = dict.fromkeys(sites.of[c].node for c in owners if c in sites.of)
    order = tuple(in_use | dict.fromkeys(sites.by_node))
    arranged = ring.arrange(order, sites.zone_of_node, r)
    crowded = ring.crowding(order, sites.zone_of_node, r)
    return arranged if ring.crowding(arranged, sites.zone_of_node, r) < crowded else order


_POLICIES: dict[str, Placement] = {p.name: p for p in (Chained(), Ring())}


# -- keeping what is held ----------------------------------------------------------------------------------------------

Allowed = Callable[[int, Sequence[int]], list[int]]
"""Given a slice and those of its holders that are settled: who may be the next."""
Surely = Callable[[int, Sequence[int], int], bool]
"""The same for one candidate, in a moment: if true, it is among the allowed; if false, look there."""


def _keeping(
    previous: Sequence[Sequence[int]],
    fresh: Sequence[tuple[int, ...]],
    everyone: Sequence[int],
    allowed: Allowed,
    surely: Surely = lambda s, taken, candidate: False,
) -> Holders:
    """``fresh``, but with the holders of ``previous`` wherever these are allowed and the balance bears it."""
    if not any(previous) or not everyone:
        return tuple(fresh)
    picks: list[list[int]] = [[] for _ in fresh]
    for s, want in enumerate(fresh):
        waiting = list(previous[s]) if s < len(previous) else []
        # A holder that is second best while the best zone is empty may be in order once that is taken: look again.
        while len(picks[s]) < len(want):
            found = next((c for c in waiting if surely(s, picks[s], c)), None)
            if found is None and waiting:
                may = set(allowed(s, picks[s]))
                found = next((c for c in waiting if c in may), None)
            if found is None:
                break
            waiting.remove(found)
            picks[s].append(found)
    held = Counter(c for slice_picks in picks for c in slice_picks)
    for s, want in enumerate(fresh):
        while len(picks[s]) < len(want):
            may_list = allowed(s, picks[s])
            pick = min(may_list, key=lambda c: (held[c], c not in want, c))
            picks[s].append(pick)
            held[pick] += 1
    _even_out(picks, fresh, everyone, allowed)
    return tuple(tuple(p) for p in picks)


def _unevenness(picks: Iterable[Sequence[int]], everyone: Sequence[int]) -> int:
    held = Counter(c for p in picks for c in p)
    return max(held[c] for c in everyone) - min(held[c] for c in everyone)


def _even_out(
    picks: list[list[int]], fresh: Sequence[tuple[int, ...]], everyone: Sequence[int], allowed: Allowed
) -> None:
    """Moves as few backups as it finds until ``picks`` is within one of as even as ``fresh``.

    A backup goes from a container with most to one with at least two fewer, over others if need be. Where no such
    path is left, slices are placed afresh, one by one: that ends, at the latest, in ``fresh`` itself.
    """
    bound = _unevenness(fresh, everyone) + 1
    settled: set[int] = set()
    while _unevenness(picks, everyone) > bound:
        held = Counter(c for p in picks for c in p)
        most, least = max(held[c] for c in everyone), min(held[c] for c in everyone)
        top, bottom = [c for c in everyone if held[c] == most], {c for c in everyone if held[c] == least}
        lower, higher = {c for c in everyone if held[c] <= most - 2}, [c for c in everyone if held[c] >= least + 2]
        path = _path(picks, settled, top, lower, allowed) or _path(picks, settled, higher, bottom, allowed)
        if path:
            for s, out, into in path:
                picks[s][picks[s].index(out)] = into
            continue
        full = set(top)
        s = min(
            (s for s in range(len(picks)) if s not in settled),
            key=lambda s: (not full.intersection(picks[s]), len(set(picks[s]) - set(fresh[s])), s),
        )
        picks[s] = list(fresh[s])
        settled.add(s)


def _path(
    picks: Sequence[Sequence[int]],
    settled: Collection[int],
    sources: Iterable[int],
    goals: Collection[int],
    allowed: Allowed,
) -> list[tuple[int, int, int]]:
    """The shortest series of moves (slice, from, to) that takes a backup from a source and gives one to a goal."""
    holding: dict[int, list[int]] = {}
    for s, p in enumerate(picks):
        if s not in settled:
            for c in p:
                holding.setdefault(c, []).append(s)
    came: dict[int, tuple[int, int] | None] = dict.fromkeys(sources)
    queue = deque(came)
    while queue:
        u = queue.popleft()
        for s in holding.get(u, ()):
            for v in sorted(allowed(s, [c for c in picks[s] if c != u]), key=lambda c: (len(holding.get(c, ())), c)):
                if v in came:
                    continue
                came[v] = (s, u)
                if v not in goals:
                    queue.append(v)
                    continue
                path = []
                step: tuple[int, int] | None = (s, u)
                while step is not None:
                    path.append((step[0], step[1], v))
                    v = step[1]
                    step = came[v]
                # Two moves within one slice could clash with each other: such a path is none.
                return path[::-1] if len({m[0] for m in path}) == len(path) else []
    return []


# -- what survives -----------------------------------------------------------------------------------------------------


def survivable(r: int, nodes: int) -> int:
    """How many of a ring's nodes may fail at once with nothing lost, no more than ``r`` of them being neighbours.

    Each run of failed nodes, r at most, needs one living node behind it: n * r / (r + 1). Any r nodes at all may fail.
    """
    r = max(0, min(r, nodes - 1))
    return nodes * r // (r + 1)


def lost_with(
    holders: Sequence[Sequence[int]], owners: Sequence[int], dead: Collection[str], peers: Sequence[Peer]
) -> tuple[int, ...]:
    """The slices of which no copy is left when the nodes ``dead`` are gone: only the durable store has them."""
    alive = {p.container for p in peers if p.node not in dead}
    return tuple(
        s for s, (owner, held) in enumerate(zip(owners, holders, strict=True)) if alive.isdisjoint((owner, *held))
    )


# -- who owns the slices -----------------------------------------------------------------------------------------------


def takeover(
    owners: Sequence[int], lost: Collection[int], holding: Mapping[int, Sequence[int]], peers: Sequence[Peer]
) -> tuple[int, ...]:
    """New owners after the containers ``lost`` died; ``holding``: slice -> containers that hold it current.

    Recovery lasts as long as the container with most to bring up: the largest number of slices that one container
    takes over from its backups is as small as can be, and of all such choices the one that leaves the totals most
    even is taken. Slices that nobody holds go to the containers with the fewest slices. The others stay.
    """
    gone = [s for s, owner in enumerate(owners) if owner in lost]
    if not gone:
        return tuple(owners)
    alive = sorted({p.container for p in peers} - set(lost))
    if not alive:
        raise EngineError(
            f"{len(gone)} slices have lost their containers and there is none left to take them over.",
            remedy="Start executors, or run again with the same checkpoint directory once there are some.",
        )
    usable = set(alive)
    choices = {s: sorted(usable.intersection(holding.get(s, ()))) for s in gone}
    kept = Counter(owner for owner in owners if owner not in lost)
    result = list(owners)
    chosen = _share([s for s in gone if choices[s]], choices, kept)
    for s, c in chosen.items():
        result[s] = c
    total = kept + Counter(chosen.values())
    for s in gone:
        if not choices[s]:
            result[s] = min(alive, key=lambda c: (total[c], c))
            total[result[s]] += 1
    return tuple(result)


def _share(slices: Sequence[int], choices: Mapping[int, Sequence[int]], kept: Mapping[int, int]) -> dict[int, int]:
    """Each slice to one of its choices: the smallest maximum first, then the most even totals with ``kept``.

    Both by augmenting paths over the graph "slice s of u could be v's". In the second phase a path from u to v with
    total[u] >= total[v] + 2 lowers the sum of the squares; when there is none left, that sum is minimal.
    """
    chosen: dict[int, int] = {}
    new: Counter[int] = Counter()
    owned: dict[int, list[int]] = {}

    def give(s: int, to: int) -> None:
        if s in chosen:
            new[chosen[s]] -= 1
            owned[chosen[s]].remove(s)
        chosen[s] = to
        new[to] += 1
        owned.setdefault(to, []).append(s)

    def reach(starts: Iterable[int]) -> dict[int, tuple[int, int] | None]:
        """All containers that a slice can be pushed on to from ``starts``, nearest first, and how."""
        came: dict[int, tuple[int, int] | None] = dict.fromkeys(starts)
        queue = deque(came)
        while queue:
            u = queue.popleft()
            for s in owned.get(u, ()):
                for v in choices[s]:
                    if v not in came:
                        came[v] = (s, u)
                        queue.append(v)
        return came

    def push(came: Mapping[int, tuple[int, int] | None], end: int) -> int:
        """Carries out the moves that lead to ``end``; returns where they start."""
        step = came[end]
        while step is not None:
            s, u = step
            give(s, end)
            end, step = u, came[u]
        return end

    limit = max(1, math.ceil(len(slices) / max(1, len({c for s in slices for c in choices[s]}))))
    for s in slices:
        while True:
            came = reach(choices[s])
            room = [c for c in came if new[c] < limit]
            if room:
                give(s, push(came, min(room, key=lambda c: (kept.get(c, 0) + new[c], new[c], c))))
                break
            limit += 1

    def total(c: int) -> int:
        return kept.get(c, 0) + new[c]

    improving = True
    while improving:
        improving = False
        for u in sorted(new, key=lambda c: (-total(c), c)):
            came = reach([u])
            room = [c for c in came if new[c] < limit and total(c) + 2 <= total(u)]
            if room:
                push(came, min(room, key=lambda c: (total(c), c)))
                improving = True
                break
    return chosen


def spread(
    owners: Sequence[int],
    peers: Sequence[Peer],
    load: Sequence[float] | None = None,
    holding: Mapping[int, Sequence[int]] | None = None,
) -> tuple[int, ...]:
    """Balanced owners over ``peers`` with few moves; slices whose owner is not among them always move.

    Without ``load`` every container gets its even share of the slices, with the fewest moves there can be. With it
    (a number for each slice) the sums are brought within about a tenth of their mean, as far as single slices allow.
    ``holding``, slice -> containers with a backup: of equally good moves, those to a holder, with nothing to copy.
    """
    containers = sorted(p.container for p in peers)
    if not containers:
        raise EngineError(
            "there is no container to own the slices.", remedy="Start executors: every stage needs at least one."
        )
    if load is None or not any(load):
        return _even_counts(owners, containers, holding or {})
    assert len(load) == len(owners), f"{len(load)} loads for {len(owners)} slices"
    assert all(x >= 0 for x in load), "a load is negative or not a number"
    return _even_loads(owners, containers, load, holding or {})


class Schedule(Protocol):
    """How slices are dealt out to the slots of a node. Adding one is a class and a line below."""

    @property
    def name(self) -> str: ...

    def assign(
        self,
        owners: Sequence[int],
        slots: Sequence[Peer],
        load: Sequence[float] | None,
        holding: Mapping[int, Sequence[int]] | None = None,
    ) -> tuple[int, ...]:
        """A slot for each slice; ``owners``: where they are now, ``load``: theirs, if it was measured.

        What need not move should stay: a slot is a process of its own, so a slice that moves is copied. Unless it goes
        to one of those ``holding`` a backup of it, which should be preferred where that is as even.
        """
        ...


class RoundRobin:
    """Equally many slices for every slot; those that must move are dealt out one by one."""

    name = "round_robin"

    def assign(
        self,
        owners: Sequence[int],
        slots: Sequence[Peer],
        load: Sequence[float] | None,
        holding: Mapping[int, Sequence[int]] | None = None,
    ) -> tuple[int, ...]:
        return _even_counts(owners, sorted(p.container for p in slots), holding or {}, in_turn=True)


class ByLoad:
    """Equally much work for every slot: the heaviest slices first, each to the slot with least to do.

    As long as nothing was measured, equally many slices.
    """

    name = "load"

    def assign(
        self,
        owners: Sequence[int],
        slots: Sequence[Peer],
        load: Sequence[float] | None,
        holding: Mapping[int, Sequence[int]] | None = None,
    ) -> tuple[int, ...]:
        return spread(owners, slots, load, holding)


_SCHEDULES: dict[str, Schedule] = {s.name: s for s in (RoundRobin(), ByLoad())}


def schedule(name: str) -> Schedule:
    found = _SCHEDULES.get(name)
    if found is None:
        raise ConfigError(f"there is no schedule '{name}'.", remedy=f"The schedules are {', '.join(_SCHEDULES)}.")
    return found


def _even_counts(
    owners: Sequence[int], containers: Sequence[int], holding: Mapping[int, Sequence[int]], in_turn: bool = False
) -> tuple[int, ...]:
    """Everyone keeps what fits in its share, the rest fills the gaps: one container after the other, or in turn."""
    held = Counter(owners)
    share, extra = divmod(len(owners), len(containers))
    # Containers that already have more get the larger shares, so that an uneven division moves nothing needlessly.
    ranked = sorted(containers, key=lambda c: (-held[c], c))
    room = {c: share + (i < extra) - held[c] for i, c in enumerate(ranked)}
    surplus = {c: max(0, -room[c]) if c in room else n for c, n in held.items()}
    result: list[int | None] = list(owners)
    for s in reversed(range(len(owners))):
        if surplus[owners[s]]:
            result[s] = None
            surplus[owners[s]] -= 1
    rows = [[c] * room[c] for c in containers]
    gaps = iter(_taking_turns(rows) if in_turn else [c for row in rows for c in row])
    even = [next(gaps) if c is None else c for c in result]
    return _to_holders(owners, even, containers, [1] * len(owners), (share, share + (extra > 0)), holding)


def _even_loads(
    owners: Sequence[int], containers: Sequence[int], load: Sequence[float], holding: Mapping[int, Sequence[int]]
) -> tuple[int, ...]:
    """The heaviest homeless slices first, to the least loaded; then single moves while somebody is out of bounds.

    Where no single move helps, two slices change places. A slice that is moved twice counts once: fewest moves are
    not promised here (that is bin packing), but on small cases nearly always found.
    """
    result = list(owners)
    sums = dict.fromkeys(containers, 0.0)
    count = Counter(owners)
    for s, c in enumerate(owners):
        if c in sums:
            sums[c] += load[s]
    for s in sorted((s for s, c in enumerate(owners) if c not in sums), key=lambda s: (-load[s], s)):
        c = min(containers, key=lambda c: (sums[c], count[c], c))
        result[s] = c
        sums[c] += load[s]
        count[c] += 1
    mean = _fair_share(load, len(containers))
    placed, loads = np.array(result, dtype=np.int64), np.array(load, dtype=np.float64)
    # Every step brings two sums closer to each other, so it cannot go on for ever; the limit is for rounding.
    for _ in range(4 * len(owners)):
        step = _next_step(placed, sums, loads, mean)
        if not step:
            break
        for s, into in step:
            sums[result[s]] -= load[s]
            sums[into] += load[s]
            result[s] = placed[s] = into
    return _to_holders(owners, result, containers, load, _bounds(mean), holding)


def _to_holders(
    owners: Sequence[int],
    placed: Sequence[int],
    containers: Sequence[int],
    load: Sequence[float],
    bounds: tuple[float, float],
    holding: Mapping[int, Sequence[int]],
) -> tuple[int, ...]:
    """A spread as good as ``placed`` with less to copy: what moves goes to who holds it.

    A slice on the move goes to its holder instead; or changes places with another on the move; or stays, and one of its
    neighbours goes, which is held where it would have gone. So there are no more moves than before. No container gets
    out of ``bounds``, or further out than one of the two was: within them, sums are as even as they need be.
    """
    result = list(placed)
    low, high = bounds
    sums = dict.fromkeys(containers, 0.0)
    coming: dict[int, list[int]] = {c: [] for c in containers}
    staying: dict[int, list[int]] = {c: [] for c in {*containers, *owners}}

    def put(s: int, c: int) -> None:
        result[s] = c
        sums[c] += load[s]
        insort((staying if c == owners[s] else coming)[c], s)

    def lift(s: int) -> None:
        c = result[s]
        sums[c] -= load[s]
        (staying if c == owners[s] else coming)[c].remove(s)

    def bears(a: int, b: int, shift: float) -> bool:
        before, after = (sums[a], sums[b]), (sums[a] - shift, sums[b] + shift)
        return max(after) <= max(high, *before) and min(after) >= min(low, *before)

    def copied(s: int, c: int) -> bool:
        return c != owners[s] and c not in holding.get(s, ())

    def cheaper(s: int) -> Step:
        here, home = result[s], owners[s]
        near = sorted((h for h in holding.get(s, ()) if h in sums), key=lambda h: (sums[h], h))
        for h in near:
            if bears(here, h, load[s]):
                return ((s, h),)
        for h in near:
            for t in coming[h]:
                if (copied(t, h) or not copied(t, here)) and bears(here, h, load[s] - load[t]):
                    return ((s, h), (t, here))
        for t in staying[home]:
            if here in holding.get(t, ()) and bears(here, home, load[s] - load[t]):
                return ((s, home), (t, here))
        return ()

    for s, c in enumerate(placed) if holding else ():
        put(s, c)
    for s in range(len(owners)) if holding else ():
        for t, into in cheaper(s) if copied(s, result[s]) else ():
            lift(t)
            put(t, into)
    return tuple(result)


def _bounds(mean: float) -> tuple[float, float]:
    return mean * (1 - LOAD_TOLERANCE), mean * (1 + LOAD_TOLERANCE)


def _fair_share(load: Sequence[float], containers: int) -> float:
    """The mean that can be had: a slice beyond it keeps a container for itself, the others share the rest."""
    rest = sum(load)
    for x in sorted(load, reverse=True):
        if containers == 1 or x * containers <= rest * (1 + LOAD_TOLERANCE):
            break
        rest -= x
        containers -= 1
    return max(0.0, rest) / containers


Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Step = tuple[tuple[int, int], ...]
"""Slices and where they go: one move, or two that change places."""


def _next_step(owners: Ints, sums: Mapping[int, float], load: Floats, mean: float) -> Step:
    """What helps the heaviest or the lightest most; if nothing does, those next to them. Moves before exchanges.

    All slices of two containers are compared at once: one by one, a thousand slices took the controller seconds.
    """
    low, high = _bounds(mean)
    over = sorted((c for c in sums if sums[c] > high), key=lambda c: (-sums[c], c))
    under = sorted((c for c in sums if sums[c] < low), key=lambda c: (sums[c], c))
    mine = {c: np.flatnonzero(owners == c) for c in sums}

    def excess(x: Floats) -> Floats:
        return np.maximum(0.0, x - high) + np.maximum(0.0, low - x)

    def best(pairs: Iterable[tuple[int, int]], exchange: bool) -> Step:
        found: tuple[tuple[float, float, int, int], Step] | None = None
        for a, b in pairs:
            given, taken = load[mine[a]][:, None], load[mine[b]][None, :] if exchange else np.zeros((1, 1))
            less, more = sums[a] - (given - taken), sums[b] + (given - taken)
            # The higher of the two must fall: then the excess does not grow, and no slice goes to and fro for ever.
            able = np.maximum(less, more) < sums[a] * (1 - 1e-9)
            if not able.any():
                continue
            before = float(excess(np.array([sums[a], sums[b]])).sum())
            gain = np.where(able, excess(less) + excess(more) - before, np.inf)
            uneven = np.where(gain == gain.min(), np.abs(less - mean) + np.abs(more - mean), np.inf)
            i, j = np.unravel_index(int(uneven.argmin()), uneven.shape)  # of equals the first slice
            s = int(mine[a][i])
            rank = (float(gain[i, j]), float(uneven[i, j]), s, b)
            if found is None or rank < found[0]:
                found = (rank, ((s, b), (int(mine[b][j]), a)) if exchange else ((s, b),))
        return found[1] if found else ()

    for exchange in (False, True):
        for i in range(max(len(over), len(under))):
            pairs = [(a, c) for a in over[i : i + 1] for c in sums if c != a]
            pairs += [(c, b) for b in under[i : i + 1] for c in sums if c != b]
            step = best(dict.fromkeys(pairs), exchange)
            if step:
                return step
    return ()


@dataclass(frozen=True)
class HotSlices:
    hot: tuple[int, ...]
    """Much more load than the mean, but a container can carry it: moving its neighbours away helps. Hottest first."""
    too_hot: tuple[int, ...]
    """More than a whole container can carry: no move helps, its keys must be split or pre-aggregated."""


def hot_slices(load: Sequence[float], capacity: float, *, factor: float = 2.0) -> HotSlices:
    """Slices with more than ``factor`` times the mean load, and those with more than a container's ``capacity``.

    By load, not by the number of keys: one busy key is as hot as a million quiet ones.
    """
    mean = sum(load) / len(load) if load else 0.0
    order = sorted(range(len(load)), key=lambda s: (-load[s], s))
    return HotSlices(
        tuple(s for s in order if factor * mean < load[s] <= capacity), tuple(s for s in order if load[s] > capacity)
    )


# -- where containers live ---------------------------------------------------------------------------------------------


def homes(
    containers: int, nodes: Mapping[str, int], current: Mapping[int, str], slots: Mapping[str, int] | None = None
) -> dict[int, str]:
    """Container -> node for containers 0 .. n-1; ``nodes``: the living ones with their number of cores.

    Whoever has a living home stays; the others go, one by one, where there are the fewest containers for each core,
    and of equals to the one with more cores. Without a living node nobody has a home. ``slots``: nodes that are to have
    no more than so many; they get more only if no other node is left.
    """
    slots = slots or {}
    found = {c: current[c] for c in range(containers) if current.get(c) in nodes}
    if not nodes:
        return found
    living = Counter(found.values())
    for c in range(containers):
        if c not in found:
            # Executors are numbered: "10" comes after "9".
            found[c] = min(
                nodes,
                key=lambda n: (
                    living[n] >= slots.get(n, living[n] + 1),
                    living[n] / max(1, nodes[n]),
                    -nodes[n],
                    len(n),
                    n,
                ),
            )
            living[found[c]] += 1
    return dict(sorted(found.items()))
