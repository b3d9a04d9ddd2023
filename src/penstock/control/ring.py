"""The peer ring: nodes on a circle of slices, each owning the contiguous arc that starts at its place.

A node deals only with its neighbours. Clockwise of it are those that hold its backups, so half an arc, or a whole one,
can go there with nothing to copy; it watches the one counter-clockwise of it, whose backups it holds. Joining and
leaving touch one arc: of K slices on n nodes about K / n change hands, never all of them as with ``hash(key) % n``.

All values are immutable; every change returns a new ring.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

# -- the order: neighbours in different fault zones --------------------------------------------------------------------


def crowding(order: Sequence[str], zone_of: Mapping[str, Hashable], r: int = 1) -> tuple[int, ...]:
    """How many nodes share a zone with their neighbour 1, 2 .. r seats on. Less, compared as tuples, is better."""
    n = len(order)
    reach = min(r, n - 1, len({zone_of[node] for node in order}) - 1)
    return tuple(
        sum(zone_of[order[i]] == zone_of[order[(i + d) % n]] for i in range(n)) for d in range(1, max(1, reach) + 1)
    )


def arrange(nodes: Sequence[str], zone_of: Mapping[str, Hashable], r: int = 1) -> tuple[str, ...]:
    """The nodes, seated so that neighbours are in different zones where that is possible.

    Two ways to seat them, the better one is taken. Every second seat, the largest zone first, separates neighbours
    whenever no zone has more than half the nodes; even distances keep zones of like size apart for r > 1 as well.
    """
    zones: dict[Hashable, list[str]] = {}
    for node in nodes:
        zones.setdefault(zone_of[node], []).append(node)
    by_size = sorted(zones.values(), key=len, reverse=True)
    in_line = [node for zone in by_size for node in zone]
    seats = [*range(0, len(in_line), 2), *range(1, len(in_line), 2)]
    alternate = [node for _, node in sorted(zip(seats, in_line, strict=True))]
    even = sorted(
        ((2 * i + 1) / (2 * len(zone)), z, node) for z, zone in enumerate(by_size) for i, node in enumerate(zone)
    )
    ways = (tuple(node for _, _, node in even), tuple(alternate))
    return min(ways, key=lambda way: crowding(way, zone_of, r))


# -- the arcs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shift:
    """Slices that go from a node to its clockwise neighbour."""

    source: str
    target: str
    slices: tuple[int, ...]


@dataclass(frozen=True)
class Ring:
    nodes: tuple[str, ...]
    """Clockwise."""
    sizes: tuple[int, ...]
    """How many slices each node's arc has. Sizes, not starts: with these an empty arc is no special case."""
    start: int = 0
    """The slice at which the first node's arc begins."""

    def __post_init__(self) -> None:
        assert len(self.nodes) == len(self.sizes) == len(set(self.nodes)) > 0, "one arc for each node"
        assert all(size >= 0 for size in self.sizes)
        assert 0 <= self.start < max(1, self.slices)

    @staticmethod
    def even(slices: int, nodes: Sequence[str]) -> Ring:
        n = len(nodes)
        return Ring(tuple(nodes), tuple((i + 1) * slices // n - i * slices // n for i in range(n)))

    @property
    def slices(self) -> int:
        return sum(self.sizes)

    def arc(self, node: str) -> tuple[int, ...]:
        """The node's slices, clockwise."""
        i = self._seat(node)
        first = self.start + sum(self.sizes[:i])
        return tuple((first + k) % self.slices for k in range(self.sizes[i]))

    def node_of(self) -> tuple[str, ...]:
        """The owning node of each slice."""
        found = [""] * self.slices
        for node in self.nodes:
            for s in self.arc(node):
                found[s] = node
        return tuple(found)

    def owners(self, containers: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
        """The owning container of each slice: a node's arc is cut into even parts for its containers."""
        found = [-1] * self.slices
        for node in self.nodes:
            arc = self.arc(node)
            for k, s in enumerate(arc):
                found[s] = containers[node][k * len(containers[node]) // len(arc)]
        return tuple(found)

    def neighbours(self, node: str, r: int = 1) -> tuple[str, ...]:
        """The next ``r`` nodes clockwise: who holds the node's backups."""
        i, n = self._seat(node), len(self.nodes)
        return tuple(self.nodes[(i + d) % n] for d in range(1, min(r, n - 1) + 1))

    def watches(self, node: str) -> str | None:
        """Whom ``node`` watches: its counter-clockwise neighbour, whose backups it holds."""
        return self.nodes[self._seat(node) - 1] if len(self.nodes) > 1 else None

    def heir(self, node: str, dead: Collection[str], r: int) -> str | None:
        """Who takes over a failed node's arc: the first living of its ``r`` neighbours. None: no copy is left."""
        return next((peer for peer in self.neighbours(node, r) if peer not in dead), None)

    def half(self, node: str, load: Sequence[float] | None = None) -> tuple[int, ...]:
        """The clockwise half of a node's arc: by the number of slices, or by their load. Empty for a single slice."""
        arc = self.arc(node)
        if load is None or not any(load[s] for s in arc):
            return arc[len(arc) - len(arc) // 2 :]
        whole, kept = sum(load[s] for s in arc), 0.0
        cuts = []
        for k in range(1, len(arc)):
            kept += load[arc[k - 1]]
            cuts.append((abs(2 * kept - whole), k))
        return arc[min(cuts)[1] :] if cuts else ()

    def give(self, node: str, slices: int) -> Ring:
        """The last ``slices`` of a node's arc to its clockwise neighbour, whose arc then begins that much earlier."""
        i, n = self._seat(node), len(self.nodes)
        assert 0 <= slices <= self.sizes[i], f"node {node} has {self.sizes[i]} slices, not {slices}"
        assert n > 1 or not slices, "a node alone has no neighbour"
        sizes = list(self.sizes)
        sizes[i] -= slices
        sizes[(i + 1) % n] += slices
        # The circle is cut open before the first node: what that one gains lies before the cut.
        start = (self.start - slices) % self.slices if i == n - 1 and slices else self.start
        return Ring(self.nodes, tuple(sizes), start)

    def join(self, node: str, load: Sequence[float] | None = None, at: str | None = None) -> Ring:
        """A new node mid-way in the arc of ``at``, else in the most loaded arc: it takes the clockwise half."""
        weight = load if load is not None else [1.0] * self.slices
        crowded = at or max(self.nodes, key=lambda n: (sum(weight[s] for s in self.arc(n)), len(self.arc(n))))
        i = self._seat(crowded)
        moved = len(self.half(crowded, load))
        nodes = (*self.nodes[: i + 1], node, *self.nodes[i + 1 :])
        sizes = (*self.sizes[:i], self.sizes[i] - moved, moved, *self.sizes[i + 1 :])
        return Ring(nodes, sizes, self.start)

    def leave(self, node: str) -> Ring:
        """The whole arc to the clockwise neighbour, and the node off the ring."""
        i = self._seat(node)
        assert len(self.nodes) > 1, f"{node} is the last node on the ring"
        empty = self.give(node, self.sizes[i])
        return Ring((*empty.nodes[:i], *empty.nodes[i + 1 :]), (*empty.sizes[:i], *empty.sizes[i + 1 :]), empty.start)

    def fail(self, dead: Collection[str]) -> Ring:
        """All of ``dead`` off the ring at once: their arcs end up with the first living node clockwise of each."""
        after = self
        for node in self.nodes:
            if node in dead:
                after = after.leave(node)
        return after

    def _seat(self, node: str) -> int:
        assert node in self.nodes, f"node {node} is not on the ring"
        return self.nodes.index(node)


# -- the load: what a node decides with its neighbour ------------------------------------------------------------------


@dataclass(frozen=True)
class Pressure:
    queue: float
    """What waits before the node: records, epochs, milliseconds; in the unit of the thresholds."""
    cpu: float
    """The share of its cores that is busy, 0 to 1."""


@dataclass(frozen=True)
class Thresholds:
    """Both high: overloaded. Both low: room for more. The gap between the two keeps load from swinging to and fro."""

    queue_high: float
    queue_low: float
    cpu_high: float = 0.8
    cpu_low: float = 0.5

    def __post_init__(self) -> None:
        assert self.queue_low < self.queue_high and self.cpu_low < self.cpu_high, "low thresholds are below high ones"

    def overloaded(self, p: Pressure) -> bool:
        return p.queue >= self.queue_high and p.cpu >= self.cpu_high

    def room(self, p: Pressure) -> bool:
        return p.queue <= self.queue_low and p.cpu <= self.cpu_low


@dataclass(frozen=True)
class Relief:
    ring: Ring
    """The ring after the shifts."""
    shifts: tuple[Shift, ...]
    stuck: tuple[str, ...]
    """Overloaded nodes that no neighbour can help: here a new node should join."""


def relieve(
    ring: Ring, pressure: Mapping[str, Pressure], thresholds: Thresholds, load: Sequence[float] | None = None
) -> Relief:
    """One round of load balancing; measure again before the next, and repeat until there are no shifts.

    An overloaded node gives half its arc to its clockwise neighbour. One without room asks its own neighbour first,
    and so on; the last of such a chain gives first. A node takes part in one chain a round: after that its
    pressure is no longer known. A node that can give nothing (a single slice) is stuck as well.
    """
    after, shifts, stuck = ring, list[Shift](), list[str]()
    busy: set[str] = set()
    for node in ring.nodes:
        if not thresholds.overloaded(pressure[node]) or node in busy:
            continue
        chain = [node]
        for peer in ring.neighbours(node, len(ring.nodes)):
            if peer in busy or not ring.half(chain[-1], load):
                break
            chain.append(peer)
            if thresholds.room(pressure[peer]):
                break
        if len(chain) < 2 or not thresholds.room(pressure[chain[-1]]):
            # A neighbour that is part of another chain is about to have less, or more: ask again in the next round.
            if not busy.intersection(ring.neighbours(chain[-1])):
                stuck.append(node)
            continue
        for source, target in reversed(list(pairwise(chain))):
            moved = ring.half(source, load)
            after = after.give(source, len(moved))
            shifts.append(Shift(source, target, moved))
        busy.update(chain)
    return Relief(after, tuple(shifts), tuple(stuck))


def idle(ring: Ring, pressure: Mapping[str, Pressure], thresholds: Thresholds) -> str | None:
    """A node that may leave, the smallest arc first: both it and its clockwise neighbour, who takes over, have room."""
    if len(ring.nodes) < 2:
        return None
    able = [n for n in ring.nodes if thresholds.room(pressure[n]) and thresholds.room(pressure[ring.neighbours(n)[0]])]
    return min(able, key=lambda n: len(ring.arc(n)), default=None)
