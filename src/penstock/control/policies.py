"""Autoscaling: decides what size a job should have, from one look at the job.

A policy is a small class with one method: an ``Observation`` in, a ``Decision`` out. It does nothing itself. The
engine gathers the figures, asks the policy and carries the decision out (``engines/scaling.py``). Every decision says
why, with its figures, for the journal and for ``penstock status``.

A policy sees one observation and has no memory. ``Guarded`` wraps any policy and keeps a restless load from making the
job restless: several observations must agree, decisions keep their distance in time and size, and a job that gave back
what it soon needed again waits longer the next time.

A new policy is one class with ``name`` and ``decide``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from penstock.control import ring as peer_ring
from penstock.control.ring import Pressure, Thresholds

Kind = Literal["scale_out", "scale_in", "rescale", "move", "nothing"]
Direction = Literal["out", "in", "across", ""]

PATIENCE_MAX = 64
"""The longest patience, in cool-downs: 16 minutes by default. A load that swings more slowly than that is followed."""
BUSY_FULL = 0.9
"""A job with a stage that is busier than this gives nothing back."""
URGENT_CONFIRM = 2
"""Observations that must agree before a job grows whose backlog grows."""


@dataclass(frozen=True)
class Limits:
    """What a policy may choose."""

    instances_min: int = 1
    instances_max: int | None = None
    """None: as many as there are cores, if that is known."""
    nodes_min: int = 1
    nodes_max: int | None = None
    """None: nodes are not the policy's to ask for, nor to give back."""


@dataclass(frozen=True)
class Observation:
    """A job at one moment. Rates and shares are over the last few seconds."""

    now: float
    rows_in_s: float
    """Rows that arrive in the sources. Where a source cannot tell, it is what the job processes: then a job at its
    limit grows by steps."""
    rows_s: float
    """Rows of the sources that the job processes."""
    offered_s: Mapping[str, float] = field(default_factory=dict)
    """Rows a second that would come to each stage if no stage held the sources back."""
    capacity_s: Mapping[str, float] = field(default_factory=dict)
    """Rows a second that each stage would get done if it worked all the time."""
    backlog_rows: int | None = None
    """Rows that wait in the sources. None: not known."""
    backlog_growth_s: float = 0.0
    """Rows a second by which they become more."""
    backlog_grows: bool = False
    """They become more by more than chance."""
    latency_ms_p50: float = 0.0
    latency_ms_p99: float = 0.0
    queue: Mapping[str, int] = field(default_factory=dict)
    """Epochs that wait before each stage."""
    busy: Mapping[str, float] = field(default_factory=dict)
    """Share of its instances' time that each stage works, 0 to 1."""
    busy_containers: Mapping[tuple[str, int], float] = field(default_factory=dict)
    load: Mapping[tuple[str, int], float] = field(default_factory=dict)
    """(stage, slice) -> its share of the work, in any unit."""
    input_s: Mapping[str, float] = field(default_factory=dict)
    """Rows a second that come to each stage; of a source, that it reads."""
    edges: Sequence[tuple[str, str]] = ()
    """(upstream, downstream) stages, in topological order."""
    instances: Mapping[str, int] = field(default_factory=dict)
    """Containers of each stage."""
    owners: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Keyed stages: the container of each slice."""
    homes: Mapping[int, str] = field(default_factory=dict)
    """container number -> node. Containers of one number live together unless somebody has moved one of them."""
    nodes: int = 1
    """Nodes of the job, without the nodes that are about to leave."""
    staying: tuple[str, ...] = ()
    """Names of these nodes. They may be given back."""
    coming: int = 0
    """Nodes that were asked for and are not there yet."""
    cores: int | None = None
    """Cores of these nodes together."""
    slots: int | None = None
    """Containers of a stage that may work at all, by what people said of the cores of nodes; None: no limit."""
    usable: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Keyed stages: the containers that may own slices; where it is not known, any."""
    moving: int = 0
    """Slices on their way. While there are any, the figures still describe the old size."""
    limits: Limits = Limits()

    def size(self, stage: str) -> int:
        """The containers of a stage that do something: one may be there without any slices."""
        return len(set(self.owners[stage])) if stage in self.owners else self.instances[stage]

    def busiest(self) -> tuple[str, float]:
        return max(((stage, self.busy.get(stage, 0.0)) for stage in self.instances), key=lambda x: x[1])

    def saturation(self, stage: str) -> float | None:
        """The rate of the whole job at which this stage would be busy all the time; None where nothing tells."""
        busy = self.busy.get(stage, 0.0)
        return self.rows_s / busy if busy > 0 and self.rows_s > 0 else None

    def instances_max(self, stage: str) -> int:
        """The most that the limits, the cores and the slices of the stage allow."""
        most = min(self.limits.instances_max or self.cores or 4096, self.slots or 4096)
        return max(1, min(most, self.instances_ever(stage)))

    def instances_ever(self, stage: str) -> int:
        """The same, were there as many nodes as one likes."""
        most = self.limits.instances_max or 4096
        return min(most, len(self.owners[stage])) if stage in self.owners else most


@dataclass(frozen=True)
class SliceMove:
    """A slice that is to change its owner."""

    stage: str
    slice: int
    source: int
    target: int


@dataclass(frozen=True)
class Decision:
    kind: Kind
    reason: str
    """A sentence, with the figures."""
    stage: str | None = None
    instances: Mapping[str, int] = field(default_factory=dict)
    """rescale: stage -> its new number of containers that own slices (of tasks, for a source)."""
    nodes: int = 0
    """scale_out, scale_in: how many nodes more, or fewer."""
    which: tuple[str, ...] = ()
    """scale_in: exactly these nodes, the first ones first if not all may go. Empty: the nodes with fewest slices."""
    moves: tuple[SliceMove, ...] = ()
    """Exactly these slices change their owner. A rescale without them spreads the slices evenly."""
    urgent: bool = False
    """Rows pile up, and how many come is measured. It takes fewer observations, and the size is reached in one step."""
    held: Decision | None = None
    """nothing: what would have been done, had ``Guarded`` not held it back."""

    def direction(self, seen: Observation) -> Direction:
        if self.kind == "nothing":
            return ""
        if self.kind == "rescale":
            grows = any(n > seen.size(stage) for stage, n in self.instances.items())
            return "out" if grows else "in"
        directions: dict[str, Direction] = {"scale_out": "out", "scale_in": "in"}
        return directions.get(self.kind, "across")

    def what(self) -> str:
        if self.kind == "rescale":
            return "rescale " + ", ".join(f"{stage} to {n}" for stage, n in self.instances.items())
        if self.kind == "move":
            return f"move {len(self.moves)} slice{'s' * (len(self.moves) != 1)} of {self.stage}"
        if self.kind == "nothing":
            return "nothing"
        if self.kind == "scale_in" and self.which:
            return f"remove node{'s' * (len(self.which) != 1)} {', '.join(self.which)}"
        return f"{'add' if self.kind == 'scale_out' else 'remove'} {self.nodes} node{'s' * (self.nodes != 1)}"

    def __str__(self) -> str:
        return f"{self.what()}: {self.reason}"


def nothing(reason: str, held: Decision | None = None) -> Decision:
    return Decision("nothing", reason, held=held)


class Policy(Protocol):
    @property
    def name(self) -> str: ...

    def decide(self, seen: Observation) -> Decision: ...


# -- by size -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Wish:
    instances: int
    why: str


def _resize(seen: Observation, wishes: Mapping[str, _Wish], content: str) -> Decision:
    """A decision for stages that wish for another number of instances. Growing goes first.

    More containers than cores need more nodes, which are asked for first where that is allowed. Until they come, the
    job makes do with its cores. When no stage has a wish, a node whose cores no stage uses is given back. ``content``:
    what to say when all is well.
    """
    limits, per_node = seen.limits, max(1, (seen.cores or seen.nodes) // max(1, seen.nodes))
    growing = {stage: w for stage, w in wishes.items() if w.instances > seen.size(stage)}
    if growing:
        useful = {stage: min(w.instances, seen.instances_ever(stage)) for stage, w in growing.items()}
        stage = max(useful, key=lambda s: useful[s])
        most, room = useful[stage], (limits.nodes_max or 0) - seen.nodes
        if seen.cores is not None and most > seen.cores and room > 0 and not seen.coming:
            more = min(room, math.ceil((most - seen.cores) / per_node))
            why = f"{stage}: {growing[stage].why}"
            reason = f"{why}: {most} instances wished for on {seen.cores} cores of {seen.nodes} nodes."
            return Decision("scale_out", reason, nodes=more)
        return _clamped(seen, growing)
    shrinking = {stage: w for stage, w in wishes.items() if w.instances < seen.size(stage)}
    if shrinking:
        return _clamped(seen, shrinking)
    if limits.nodes_max is not None and seen.cores is not None and seen.nodes > limits.nodes_min:
        used = max((seen.size(stage) for stage in seen.instances), default=1)
        if used <= seen.cores - per_node:
            reason = f"no stage has more than {used} instances, and {seen.cores} cores are on {seen.nodes} nodes."
            return Decision("scale_in", reason, nodes=1)
    return nothing(content)


def _clamped(seen: Observation, wishes: Mapping[str, _Wish]) -> Decision:
    changes: dict[str, int] = {}
    reasons: list[str] = []
    for stage, wish in wishes.items():
        now = seen.size(stage)
        high = seen.instances_max(stage)
        low = min(seen.limits.instances_min, high)
        wanted = max(low, min(high, wish.instances))
        said = f"{stage}: {wish.why}: {now} -> {wish.instances} instances"
        if wanted != wish.instances:
            said += f", but {low} to {high} are allowed"
        reasons.append(said)
        # A limit may lie on the other side of the present size. A wish to grow is no reason to shrink to it.
        if (wanted - now) * (wish.instances - now) > 0:
            changes[stage] = wanted
    reason = "; ".join(reasons) + "."
    if not changes:
        return nothing(reason)
    return Decision("rescale", reason, stage=next(iter(changes)), instances=changes)


@dataclass(frozen=True)
class SafeRate:
    """Keeps what is offered to every stage at a safe share of the stage's capacity (TimeStream): half of it.

    What is offered, not what is processed: back pressure holds the sources back when a stage is too slow.

    More than 5 % above the safe rate it grows to the size whose safe rate covers the input. It shrinks only to a size
    whose safe rate is 5 % above the input: literally "a 5 % difference", whole instances would seldom sit still.
    """

    share: float = 0.5
    margin: float = 0.05
    sizes: tuple[int, ...] = ()
    """Only these numbers of instances, if any are named: 1, 2, 4, 8 for instance. Above the last, any."""
    name: str = "safe-rate"

    def decide(self, seen: Observation) -> Decision:
        wishes, content = {}, []
        for stage in seen.instances:
            now = seen.size(stage)
            offered, saturation = self._load(seen, stage)
            if saturation is None:
                content.append(f"{stage}: nothing is known of its speed, busy {seen.busy.get(stage, 0.0):.0%}")
                continue
            safe = self.share * saturation
            why = f"{offered:,.0f} rows/s come in, {safe:,.0f} are safe ({self.share:.0%} of {saturation:,.0f})"
            wanted = now
            if offered > (1 + self.margin) * safe:
                wanted = self._size(math.ceil(_up(now * offered / safe)))
            elif offered < (1 - self.margin) * safe * (now - 1) / now:
                wanted = min(now, self._size(math.ceil(_up(now * offered / (safe * (1 - self.margin))))))
            if wanted != now:
                wishes[stage] = _Wish(wanted, why)
            else:
                content.append(f"{stage}: {why}")
        decision = _resize(seen, wishes, "; ".join(content) + "." if content else "there are no stages.")
        measured = all(stage in seen.offered_s for stage in decision.instances)
        urgent = seen.backlog_grows and measured and decision.direction(seen) == "out"
        return replace(decision, urgent=True) if urgent else decision

    @staticmethod
    def _load(seen: Observation, stage: str) -> tuple[float, float | None]:
        """What is offered to a stage and where it saturates, in rows a second of the same kind: those of the stage
        where both were measured, else those of the whole job.
        """
        if stage in seen.offered_s and stage in seen.capacity_s:
            return seen.offered_s[stage], seen.capacity_s[stage]
        return max(seen.rows_in_s, seen.rows_s), seen.saturation(stage)

    def _size(self, wanted: int) -> int:
        return min((size for size in self.sizes if size >= wanted), default=max(1, wanted))


def _up(x: float) -> float:
    """A little less than x, so that rounding up keeps a whole number that arithmetic missed by a hair."""
    return x - 1e-9 * abs(x)


@dataclass(frozen=True)
class TargetLatency:
    """Grows the busiest stages while the slowest rows take longer than the target, shrinks where time is to spare.

    Latency with little work to do has other causes than too few instances: then nothing is added. And nothing is given
    back unless what remains would still be below ``busy_goal``.
    """

    target_ms: float
    low: float = 0.5
    """Below this share of the target there is time to spare."""
    busy_goal: float = 0.6
    busy_little: float = 0.4
    step: float = 2.0
    name: str = "target-latency"

    def decide(self, seen: Observation) -> Decision:
        p99, stages = seen.latency_ms_p99, seen.instances
        if p99 <= 0 or not stages:
            return nothing(f"no latency has been measured yet; the target is {self.target_ms:,.0f} ms.")
        worst, busy = seen.busiest()
        waiting = max(seen.queue.values(), default=0)
        said = f"latency p99 {p99:,.0f} ms, target {self.target_ms:,.0f} ms"
        if p99 > self.target_ms:
            if busy < self.busy_little:
                return nothing(f"{said}, but the busiest stage, {worst}, is busy {busy:.0%}: more would not help.")
            wishes = {}
            for stage in stages:
                now, mine = seen.size(stage), seen.busy.get(stage, 0.0)
                if mine < 0.9 * busy:
                    continue
                factor = min(self.step, max(p99 / self.target_ms, mine / self.busy_goal))
                wishes[stage] = _Wish(
                    max(now + 1, math.ceil(_up(now * factor))), f"{said}, busy {mine:.0%}, queue {waiting}"
                )
            return _resize(seen, wishes, "")
        wishes = {}
        if p99 < self.low * self.target_ms and not waiting:
            for stage in stages:
                now, mine = seen.size(stage), seen.busy.get(stage, 0.0)
                fits = max(1, math.ceil(_up(now * mine / self.busy_goal)), math.ceil(now / self.step))
                if fits < now:
                    wishes[stage] = _Wish(fits, f"{said}, busy {mine:.0%} of {self.busy_goal:.0%}")
        return _resize(seen, wishes, f"{said}; the busiest stage, {worst}, is busy {busy:.0%}.")


# -- by the ring -------------------------------------------------------------------------------------------------------


RING_THRESHOLDS = Thresholds(queue_high=1.0, queue_low=0.5, cpu_high=0.8, cpu_low=0.5)


@dataclass(frozen=True)
class RingPolicy:
    """Containers form a ring and pass slices to their neighbours (Floe). An overloaded container gives up to half its
    arc to the next one clockwise, which may have to pass load on first. If no neighbour has room, a new container takes
    half the arc. A container that has as little to do as the next one gives everything to it and is empty.

    Two things are added to the paper. A container gives no more than makes the two equal: half of an arc could overload
    the neighbour, and come back. And a neighbour takes over a whole arc only if the two together stay well below the
    high threshold.

    An epoch waits for the slowest container of a stage. So the queue before the stage counts as the queue of its busy
    containers; no epoch waits for a container with time to spare.
    """

    thresholds: Thresholds = RING_THRESHOLDS
    name: str = "ring"

    def decide(self, seen: Observation) -> Decision:
        said = []
        shrinking: list[Decision] = []
        for stage in sorted(seen.owners):
            view = _StageRing(seen, stage, self.thresholds)
            decision = view.relieve()
            if decision.kind != "nothing":
                return decision
            said.append(decision.reason)
            if (smaller := view.shrink()) is not None:
                shrinking.append(smaller)
        return shrinking[0] if shrinking else nothing("; ".join(said) + "." if said else "there are no keyed stages.")


class _StageRing:
    """The containers of a stage that own slices, as a ring.

    Slices need not lie in arcs: a rescale deals them out otherwise. So the ring is one of places, in the order of
    the containers, and ``slice_at`` tells which slice is in a place.
    """

    def __init__(self, seen: Observation, stage: str, thresholds: Thresholds) -> None:
        self.seen, self.stage, self.thresholds = seen, stage, thresholds
        owned: dict[int, list[int]] = {}
        for s, c in enumerate(seen.owners[stage]):
            owned.setdefault(c, []).append(s)
        self.slice_at = [s for slices in owned.values() for s in slices]
        self.load = [max(0.0, seen.load.get((stage, s), 1.0)) for s in self.slice_at]
        self.ring = peer_ring.Ring(tuple(str(c) for c in owned), tuple(len(slices) for slices in owned.values()))
        waiting = float(seen.queue.get(stage, 0))
        self.pressure = {}
        for c in owned:
            cpu = seen.busy_containers.get((stage, c), seen.busy.get(stage, 0.0))
            self.pressure[str(c)] = Pressure(waiting if cpu >= thresholds.cpu_high else 0.0, cpu)

    def figures(self, node: str) -> str:
        p = self.pressure[node]
        return f"container {node} is busy {p.cpu:.0%} with {p.queue:.0f} epochs waiting"

    def relieve(self) -> Decision:
        relief = peer_ring.relieve(self.ring, self.pressure, self.thresholds, self.load)
        cpu = {node: p.cpu for node, p in self.pressure.items()}
        moves: list[SliceMove] = []
        helped: list[str] = []
        for shift in relief.shifts:  # the last of a chain comes first
            chosen = self._balancing(shift, cpu)
            if chosen and shift.source not in helped:
                helped.append(shift.source)
            moves += self._moves(chosen, shift.source, int(shift.target))
        overloaded = [n for n in self.ring.nodes if self.thresholds.overloaded(self.pressure[n])]
        if moves:
            chain = ", ".join(f"{self.figures(s.source)}, {s.target} {self._cpu(s.target)}" for s in relief.shifts)
            return Decision("move", f"{self.stage}: {chain}.", stage=self.stage, moves=tuple(moves))
        if overloaded:
            return self._split(max(overloaded, key=lambda n: self.pressure[n].cpu))
        worst = max(self.ring.nodes, key=lambda n: self.pressure[n].cpu)
        return nothing(f"{self.stage}: no container is overloaded, {self.figures(worst)}")

    def _cpu(self, node: str) -> str:
        return f"{self.pressure[node].cpu:.0%}"

    def _balancing(self, shift: peer_ring.Shift, cpu: dict[str, float]) -> list[int]:
        """Places from the clockwise end of the arc that bring the two closest; ``cpu`` becomes what it will be."""
        arc = self.ring.arc(shift.source)
        whole = sum(self.load[p] for p in arc)
        spare = (cpu[shift.source] - cpu[shift.target]) / 2
        chosen: list[int] = []
        rest = [place for place in reversed(arc) if place not in shift.slices]
        for place in (*reversed(shift.slices), *rest):
            if place in rest and any(p in chosen for p in shift.slices):
                break  # no more than half, unless all of that half is too hot to be moved: then what is next to it
            part = cpu_part(self.pressure[shift.source].cpu, self.load[place], whole, len(arc))
            if part > spare or (place in rest and not part):
                continue
            spare -= part
            chosen.append(place)
            cpu[shift.source] -= part
            cpu[shift.target] += part
        return sorted(chosen)

    def _moves(self, places: Sequence[int], source: str, target: int) -> list[SliceMove]:
        return [SliceMove(self.stage, self.slice_at[place], int(source), target) for place in places]

    def _split(self, node: str) -> Decision:
        """A new container mid-way in the arc; one that is empty serves as well."""
        seen, stage = self.seen, self.stage
        why = f"{stage}: {self.figures(node)}, and no neighbour has room"
        half = self.ring.half(node, self.load)
        active = len(self.ring.nodes)
        if not half:
            return nothing(f"{why}, but it has only one slice: its keys would have to be split")
        if active >= seen.instances_max(stage):
            allowed = seen.instances_max(stage)
            full = seen.cores is not None and seen.cores <= active < seen.instances_ever(stage)
            if full and (seen.limits.nodes_max or 0) > seen.nodes and not seen.coming:
                return Decision("scale_out", f"{why}; {active} containers on {seen.cores} cores.", nodes=1)
            return nothing(f"{why}, but {active} containers of {allowed} allowed are in use")
        taken = {int(n) for n in self.ring.nodes}
        usable = seen.usable.get(stage)
        new = next((c for c in (range(active + 1) if usable is None else usable) if c not in taken), None)
        if new is None:
            new = max(seen.instances[stage], *(c + 1 for c in taken))
        reason = f"{why}: container {new} takes {len(half)} of its {len(self.ring.arc(node))} slices."
        return Decision(
            "rescale",
            reason,
            stage=stage,
            instances={stage: active + 1},
            moves=tuple(self._moves(half, node, new)),
        )

    def shrink(self) -> Decision | None:
        active = len(self.ring.nodes)
        if active <= max(1, self.seen.limits.instances_min):
            return None
        able = []
        for node in self.ring.nodes:
            peer = self.ring.neighbours(node)[0]
            mine, other = self.pressure[node], self.pressure[peer]
            both = mine.cpu + other.cpu
            fits = both <= (self.thresholds.cpu_low + self.thresholds.cpu_high) / 2
            if self.thresholds.room(mine) and self.thresholds.room(other) and fits:
                able.append((both, node, peer))
        if not able:
            return None
        both, node, peer = min(able)
        arc = self.ring.arc(node)
        reason = (
            f"{self.stage}: containers {node} ({self._cpu(node)}) and {peer} ({self._cpu(peer)}) have little to do: "
            f"{peer} takes all {len(arc)} slices of {node}, {both:.0%} in all."
        )
        moves = tuple(self._moves(arc, node, int(peer)))
        return Decision("rescale", reason, stage=self.stage, instances={self.stage: active - 1}, moves=moves)


def cpu_part(cpu: float, load: float, whole: float, slices: int) -> float:
    """What a slice takes of its container's busy share."""
    return cpu * load / whole if whole > 0 else cpu / slices


# -- the guard ---------------------------------------------------------------------------------------------------------


class Guarded:
    """Any policy, kept from haste. What it holds back it says.

    * Nothing while slices are on their way, nor until ``cool_down_s`` after the last decision; and no nodes are asked
      for while others that were have not come.
    * Nothing that cannot be: a stage or a node that is not there.
    * ``confirm`` observations in a row must agree on the direction; two for an urgent decision.
    * No size outside the limits, no more than ``max_step`` times the size, up or down, at once; an urgent decision is
      not cut into steps.
    * Nothing is given back while the backlog of the sources grows, or a stage is over 90 % busy.
    * To give back needs patience: the job must have been too large for the whole of a cool-down. Each time that what
      was given back is wanted again within 64 cool-downs, the patience doubles, up to as many; else it halves. So a
      load that swings makes the job change a few times and then stay at the larger size.

    It remembers; its clock is that of the observations.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        cool_down_s: float = 15.0,
        confirm: int = 3,
        limits: Limits | None = None,
        max_step: float = 2.0,
    ) -> None:
        assert confirm >= 1 and max_step > 1 and cool_down_s >= 0
        self.policy = policy
        self.cool_down_s = cool_down_s
        self.confirm = confirm
        self.limits = limits
        self.max_step = max_step
        self._decided_at: float | None = None
        self._given_back_at: float | None = None
        self._patience = 1
        self._direction: Direction = ""
        self._agreed = 0
        self._since = 0.0
        self._modest: Decision | None = None
        """The least that was wished to be given back since then."""

    @property
    def name(self) -> str:
        return self.policy.name

    def decide(self, seen: Observation) -> Decision:
        if self.limits is not None:
            seen = replace(seen, limits=self.limits)
        wish = self.policy.decide(seen)
        if (wrong := _impossible(wish, seen)) is not None:
            return self._hold(wish, wrong)
        direction = wish.direction(seen)
        if direction != self._direction:
            self._begin_anew(direction, seen.now)
        if not direction:
            return wish
        if direction == "in" and (needed := _needed(seen)) is not None:
            self._begin_anew(direction, seen.now)
            return self._hold(wish, needed)
        since_last = math.inf if self._decided_at is None else seen.now - self._decided_at
        if since_last < self.cool_down_s:
            # Figures of the time before the last change count for nothing.
            self._begin_anew(direction, seen.now)
            return self._hold(wish, f"{self.cool_down_s - since_last:.1f} s of the cool-down are left")
        if seen.moving:
            self._begin_anew(direction, seen.now)
            return self._hold(wish, f"{seen.moving} slices are on their way")
        self._agreed += 1
        if direction == "in":
            # Of a load that swings, a low moment must not decide what the high ones have to do with.
            wish = self._modest = wish if self._modest is None else self._in_common(self._modest, wish)
        confirm = min(self.confirm, URGENT_CONFIRM) if wish.urgent else self.confirm
        if self._agreed < confirm:
            return self._hold(wish, f"seen {self._agreed} of {confirm} times in a row")
        patient_s = self._patience * self.cool_down_s
        if direction == "in" and seen.now - self._since < patient_s and self._decided_at is not None:
            left = patient_s - (seen.now - self._since)
            return self._hold(wish, f"it must last {patient_s:g} s before anything is given back, {left:.1f} s more")
        step = self._stepped(wish, seen)
        if step.kind == "nothing":
            return step
        self._remember(direction, seen.now)
        return step

    def _hold(self, wish: Decision, why: str) -> Decision:
        return nothing(f"held back ({why}): {wish}", wish)

    def _remember(self, direction: Direction, now: float) -> None:
        if direction == "out" and self._given_back_at is not None:
            regretted = now - self._given_back_at < PATIENCE_MAX * self.cool_down_s
            self._patience = min(PATIENCE_MAX, 2 * self._patience) if regretted else max(1, self._patience // 2)
            self._given_back_at = None
        if direction == "in":
            self._given_back_at = now
        self._decided_at = now
        self._begin_anew("", now)

    def _begin_anew(self, direction: Direction, now: float) -> None:
        self._direction, self._agreed, self._since, self._modest = direction, 0, now, None

    def _in_common(self, modest: Decision, wish: Decision) -> Decision:
        """What both would give back, in the words of the newer."""
        if modest.kind != wish.kind:
            return wish
        if wish.kind == "rescale":
            both = {s: max(modest.instances[s], n) for s, n in wish.instances.items() if s in modest.instances}
            return self._smaller(wish, both != dict(wish.instances), instances=both)
        if wish.kind == "scale_in" and not wish.which:
            return self._smaller(wish, modest.nodes < wish.nodes, nodes=min(modest.nodes or wish.nodes, wish.nodes))
        return wish

    def _stepped(self, wish: Decision, seen: Observation) -> Decision:
        """The same decision, no larger than a step and within the limits: whatever the policy thought of them."""
        limits = seen.limits
        if wish.kind in ("scale_out", "scale_in"):
            if limits.nodes_max is None:
                return self._hold(wish, "nodes are not the policy's: nodes_max is not set")
            if wish.kind == "scale_out" and seen.coming:
                return self._hold(wish, f"nodes that were asked for have not come: {seen.coming}")
            wanted = len(wish.which) or wish.nodes
            room = limits.nodes_max - seen.nodes if wish.kind == "scale_out" else seen.nodes - limits.nodes_min
            nodes = min(wanted, max(1, int(seen.nodes * (self.max_step - 1))), room)
            if nodes <= 0:
                return self._hold(wish, f"{seen.nodes} nodes, {limits.nodes_min} to {limits.nodes_max} allowed")
            return self._smaller(wish, nodes != wanted, nodes=nodes, which=wish.which[:nodes])
        if wish.kind != "rescale":
            return wish
        changes: dict[str, int] = {}
        for stage, wanted in wish.instances.items():
            now = seen.size(stage)
            most = wanted if wish.urgent else max(now + 1, int(now * self.max_step))
            least = min(now - 1, math.ceil(now / self.max_step))
            high = seen.instances_max(stage)
            size = max(min(limits.instances_min, high), least, min(high, most, wanted))
            if (size - now) * (wanted - now) > 0:
                changes[stage] = size
        if not changes:
            return self._hold(wish, f"{limits.instances_min} to {limits.instances_max or 'all'} instances allowed")
        return self._smaller(wish, changes != dict(wish.instances), instances=changes)

    def _smaller(self, wish: Decision, differs: bool, **fields: Any) -> Decision:
        if not differs:
            return wish
        smaller = replace(wish, **fields)
        said = wish.reason.partition(" A step at a time:")[0]
        return replace(smaller, reason=f"{said} A step at a time: {smaller.what()}.")


def _needed(seen: Observation) -> str | None:
    """Why nothing can be given back, whatever a policy says."""
    if seen.backlog_grows:
        return f"the backlog grows by {seen.backlog_growth_s:,.0f} rows a second"
    if seen.instances and (worst := seen.busiest())[1] > BUSY_FULL:
        return f"{worst[0]} is busy {worst[1]:.0%}"
    return None


def _impossible(wish: Decision, seen: Observation) -> str | None:
    """Why a decision, of somebody's own policy perhaps, cannot be carried out."""
    known: tuple[tuple[str, set[str], Collection[str]], ...] = (
        ("stage", set(wish.instances), seen.instances),
        ("stage with slices", {m.stage for m in wish.moves}, seen.owners),
        ("node", set(wish.which), seen.staying),
    )
    for what, named, there in known:
        if unknown := sorted(named - set(there)):
            return f"there is no {what} '{unknown[0]}'"
    if any(m.stage != wish.stage for m in wish.moves):
        return "moves are those of one stage, which the decision names"
    return None
