"""Guarded policies under arbitrary loads: never too often, never outside the limits, at rest when the load is."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from hypothesis import example, given
from hypothesis import strategies as st

from penstock.control.policies import (
    PATIENCE_MAX,
    Decision,
    Guarded,
    Limits,
    Observation,
    Policy,
    RingPolicy,
    SafeRate,
    TargetLatency,
)
from tests.property.cuts import examples

SLICES = 32
EVERY_S = 1.0
LONG = 1500
policies = st.sampled_from([SafeRate(), TargetLatency(500.0), RingPolicy()])
loads = st.floats(0, 50_000, allow_nan=False)


@dataclass
class World:
    """A job of one stage that obeys: slices with fixed shares of the load, containers of one speed."""

    owners: list[int]
    per_instance: float = 1000.0
    noise: float = 0.0
    now: float = 0.0
    told: bool = True
    """Does it know what is offered? A running job does not."""

    @property
    def size(self) -> int:
        return len(set(self.owners))

    def seen(self, load: float) -> Observation:
        load *= 1 + self.noise * math.sin(7 * self.now)
        share = {c: self.owners.count(c) / SLICES for c in set(self.owners)}
        done = min(load, self.per_instance / max(share.values()))
        busy = {c: done * share[c] / self.per_instance for c in share}
        worst = max(busy.values())
        return Observation(
            now=self.now,
            rows_in_s=load if self.told else done,
            rows_s=done,
            latency_ms_p50=50.0 / (1.02 - worst),
            latency_ms_p99=100.0 / (1.02 - worst),
            queue={"s": int(done < load)},
            busy={"s": sum(busy.values()) / len(busy)},
            busy_containers={("s", c): b for c, b in busy.items()},
            instances={"s": max(self.owners) + 1},
            owners={"s": tuple(self.owners)},
        )

    def obey(self, decision: Decision) -> None:
        if decision.moves:
            for move in decision.moves:
                assert self.owners[move.slice] == move.source != move.target, move
                self.owners[move.slice] = move.target
        elif decision.kind == "rescale":
            self.owners = [s * decision.instances["s"] // SLICES for s in range(SLICES)]

    def step(self, policy: Policy, load: float) -> Decision:
        self.now += EVERY_S
        decision = policy.decide(self.seen(load))
        assert re.search(r"\d", decision.reason), decision
        self.obey(decision)
        return decision


def world(instances: int, noise: float = 0.0) -> World:
    return World([s * instances // SLICES for s in range(SLICES)], noise=noise)


@examples(60)
@given(policies, st.lists(loads, min_size=1, max_size=120), st.floats(0, 20), st.integers(1, 4), st.integers(1, 8))
def test_decisions_keep_their_distance_and_the_limits(
    policy: Policy, series: list[float], cool_down_s: float, confirm: int, start: int
) -> None:
    limits = Limits(2, 6)
    guarded = Guarded(policy, cool_down_s=cool_down_s, confirm=confirm, limits=limits)
    model = world(start)
    last = -math.inf
    for load in series:
        before = model.size
        decision = model.step(guarded, load)
        if decision.kind == "nothing":
            assert model.size == before
            continue
        assert model.now - last >= cool_down_s
        last = model.now
        # It may start outside; then it never goes further out.
        assert min(before, 2) <= model.size <= max(before, 6)
        if decision.kind == "rescale":
            assert before / 2 <= model.size <= before * 2


@examples(30)
@given(
    policies,
    st.floats(100, 8000),
    st.floats(1.0, 8.0),
    st.integers(1, 60),
    st.floats(0, 0.02),
    st.integers(1, 8),
)
@example(TargetLatency(500.0), 2674.0, 1.5, 44, 0.0, 1)  # what a low moment gave back a high one needed, for ever
def test_a_load_that_swings_does_not_swing_the_job(
    policy: Policy, low: float, factor: float, half_period: int, noise: float, start: int
) -> None:
    """However long it swings: the number of changes is bounded by the sizes and the patience, not by time."""
    cool_down_s = 5.0
    guarded = Guarded(policy, cool_down_s=cool_down_s, confirm=3, limits=Limits(1, 16))
    model = world(start, noise)
    decided = []
    for i in range(LONG):
        load = low * factor if (i // half_period) % 2 else low
        if model.step(guarded, load).kind != "nothing":
            decided.append(i)
    # Each swing that is followed costs a way up and one down, and doubles the patience, log2(64) times at most.
    assert len(decided) <= 2 * 16 * (1 + math.log2(PATIENCE_MAX)), len(decided)
    assert not [i for i in decided if i >= 2 * LONG / 3], "in the end it is at rest"


@examples(40)
@given(policies, st.floats(100, 2500), st.integers(1, 4), st.booleans())
def test_four_times_the_load_and_back(policy: Policy, load: float, start: int, told: bool) -> None:
    guarded = Guarded(policy, cool_down_s=5.0, confirm=3, limits=Limits(1, 32))
    model = world(start)
    model.told = told

    def settle(load: float) -> tuple[int, int]:
        """Decisions until the job is at rest, and its size then."""
        decided = quiet = 0
        for _ in range(LONG):
            changed = model.step(guarded, load).kind != "nothing"
            decided, quiet = decided + changed, 0 if changed else quiet + 1
            if quiet == 60 * 5:  # cool-downs: with a load between two sizes it may try again after that
                return decided, model.size
        raise AssertionError("it comes to rest")

    first, small = settle(load)
    up, large = settle(4 * load)
    down, again = settle(load)
    # At a boundary between two sizes a shrink may be regretted, each time with twice the patience.
    regrets = 2 * math.log2(PATIENCE_MAX)
    assert max(first, up, down) <= (24 if isinstance(policy, RingPolicy) else 7) + regrets
    assert large >= small
    capacity = 1000.0
    for size, rate in ((small, load), (large, 4 * load), (again, load)):
        assert rate < capacity * size or size == 32, "it can carry the load"
        if isinstance(policy, SafeRate):
            # Slices are dealt out in whole numbers, so the busiest container has up to one slice more than its share.
            fair = math.ceil(rate / (0.5 * capacity))
            assert fair / 1.06 - 1 <= size <= 1.7 * fair + 1, (size, rate)
        if isinstance(policy, TargetLatency):
            assert size == 1 or rate > 0.15 * capacity * size, "and it is not far too large"


@examples(60)
@given(
    policies,
    st.lists(st.floats(0, 20_000, allow_nan=False), min_size=1, max_size=60),
    st.integers(0, 20),
    st.integers(1, 3),
    st.integers(3, 6),
)
def test_nodes_stay_within_their_limits(policy: Policy, series: list[float], late: int, low: int, high: int) -> None:
    """Those that were asked for count, however late they come."""
    cores = 2
    guarded = Guarded(policy, cool_down_s=2.0, confirm=1, limits=Limits(nodes_min=low, nodes_max=high))
    model, nodes, coming = world(low * cores), low, list[float]()
    for load in [load for load in series for _ in range(5)]:
        model.now += EVERY_S
        nodes += sum(at <= model.now for at in coming)
        coming = [at for at in coming if at > model.now]
        seen = replace(model.seen(load), nodes=nodes, coming=len(coming), cores=nodes * cores)
        decision = guarded.decide(seen)
        assert not (decision.kind == "scale_out" and coming), "nobody is asked twice"
        coming += [model.now + late] * (decision.nodes if decision.kind == "scale_out" else 0)
        nodes -= decision.nodes if decision.kind == "scale_in" else 0
        model.obey(decision)
        assert low <= nodes and nodes + len(coming) <= high
