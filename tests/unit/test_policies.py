"""Autoscaling policies: what each decides for one observation, and how a guarded one follows a load."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from penstock.config import Config
from penstock.control.policies import (
    Decision,
    Guarded,
    Limits,
    Observation,
    Policy,
    RingPolicy,
    SafeRate,
    SliceMove,
    TargetLatency,
)
from penstock.engines.scaling import observation_of, policy_from
from penstock.errors import ConfigError
from penstock.observe.status import ContainerStatus, JobStatus, MoveStatus, NodeStatus, StageStatus


def seen(offered: float, per_instance: float = 1000.0, instances: int = 2, **more: Any) -> Observation:
    """A job of one stage whose instances make ``per_instance`` rows/s each when they are busy all the time."""
    rows = min(offered, per_instance * instances)
    return Observation(
        **{
            "now": 0.0,
            "rows_in_s": offered,
            "rows_s": rows,
            "busy": {"counts": rows / (per_instance * instances)},
            "instances": {"counts": instances},
            **more,
        }
    )


@dataclass
class Model:
    """A job that obeys: its capacity grows with its instances, its latency with how busy it is."""

    load: float
    instances: int = 1
    per_instance: float = 1000.0
    base_ms: float = 100.0
    now: float = 0.0
    decisions: list[Decision] = field(default_factory=list)

    def seen(self) -> Observation:
        capacity = self.per_instance * self.instances
        busy = min(1.0, self.load / capacity)
        latency = self.base_ms / (1.02 - busy)
        return Observation(
            now=self.now,
            rows_in_s=self.load,
            rows_s=min(self.load, capacity),
            latency_ms_p50=latency / 2,
            latency_ms_p99=latency,
            queue={"counts": int(self.load > capacity)},
            busy={"counts": busy},
            instances={"counts": self.instances},
        )

    def run(self, policy: Policy, seconds: float, every_s: float = 1.0) -> list[Decision]:
        before = len(self.decisions)
        for _ in range(int(seconds / every_s)):
            self.now += every_s
            decision = policy.decide(self.seen())
            if decision.kind != "nothing":
                self.decisions.append(decision)
                self.instances = decision.instances["counts"]
        return self.decisions[before:]


# --- the safe rate ------------------------------------------------------------------------------------------------


def test_half_of_saturation_is_safe() -> None:
    assert SafeRate().decide(seen(1000)).kind == "nothing"
    assert SafeRate().decide(seen(1049)).kind == "nothing", "less than 5 % above"
    grown = SafeRate().decide(seen(1100))
    assert (grown.kind, grown.instances, grown.stage) == ("rescale", {"counts": 3}, "counts")
    assert grown.reason == ("counts: 1,100 rows/s come in, 1,000 are safe (50% of 2,000): 2 -> 3 instances.")


def test_it_shrinks_only_where_there_is_a_margin() -> None:
    assert SafeRate().decide(seen(480)).kind == "nothing", "one instance would be less than 5 % above it"
    assert SafeRate().decide(seen(470)).instances == {"counts": 1}
    assert SafeRate().decide(seen(0)).kind == "nothing", "nothing is known of a job that does nothing"
    assert SafeRate().decide(seen(10, instances=8)).instances == {"counts": 1}


def test_a_job_at_its_limit_doubles_when_what_is_offered_is_not_known() -> None:
    saturated = replace(seen(5000), rows_in_s=2000.0)
    assert SafeRate().decide(saturated).instances == {"counts": 4}


def test_what_is_measured_goes_before_the_estimate() -> None:
    def measured(offered: float, capacity: float) -> Decision:
        return SafeRate().decide(seen(1000, offered_s={"counts": offered}, capacity_s={"counts": capacity}))

    assert measured(1000, 4000).kind == "nothing"
    assert measured(1000, 1000).instances == {"counts": 4}
    assert measured(5000, 4000).instances == {"counts": 5}, "what is offered, though 1,000 are processed"
    half_known = seen(1000, offered_s={"counts": 5000.0})
    assert SafeRate().decide(half_known).kind == "nothing", "rows of the stage are not compared with those of the job"


def piling_up(offered: float = 8000.0, **more: Any) -> Observation:
    """One container of two is enough for 1,000 rows a second, and 8,000 come."""
    figures = {"offered_s": {"counts": offered}, "capacity_s": {"counts": 2000.0}}
    return seen(offered, **{**figures, "backlog_grows": True, "backlog_growth_s": 6000.0, **more})


def test_what_piles_up_is_urgent() -> None:
    assert SafeRate().decide(piling_up()).urgent
    assert not SafeRate().decide(piling_up(backlog_grows=False)).urgent
    assert not SafeRate().decide(piling_up(offered_s={})).urgent, "how much comes was not measured"
    guarded = Guarded(SafeRate(), confirm=3, max_step=2.0, limits=Limits(1, 32))
    assert guarded.decide(piling_up(now=1.0)).kind == "nothing", "one look may be chance"
    assert guarded.decide(piling_up(now=2.0)).instances == {"counts": 16}, "two in a row, and in one step"
    again = guarded.decide(piling_up(now=3.0))
    assert again.kind == "nothing" and "cool-down" in again.reason


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"backlog_grows": True, "backlog_growth_s": 50.0}, "the backlog grows by 50 rows a second"),
        ({"busy": {"counts": 0.01, "other": 0.95}, "instances": {"counts": 8, "other": 1}}, "other is busy 95%"),
    ],
)
def test_nothing_is_given_back_while_rows_pile_up_or_a_stage_is_full(more: dict[str, Any], why: str) -> None:
    guarded = Guarded(Shrinks(), cool_down_s=2.0, confirm=1)
    little = seen(10, instances=8)
    assert guarded.decide(replace(little, now=1.0)).instances == {"counts": 4}
    needed = [guarded.decide(replace(little, now=float(at), **more)) for at in range(10, 40)]
    assert {d.kind for d in needed} == {"nothing"} and all(why in d.reason for d in needed)
    since = [guarded.decide(replace(little, now=float(at))).kind for at in range(40, 44)]
    assert since == ["nothing", "rescale", "nothing", "nothing"], "a cool-down of 2 s after the last of them"


class Shrinks:
    name = "shrinks"

    def decide(self, seen: Observation) -> Decision:
        return Decision("rescale", "4 are enough.", stage="counts", instances={"counts": 4})


def test_each_stage_has_its_own_size_and_growing_goes_first() -> None:
    two = Observation(now=0.0, rows_in_s=100.0, rows_s=100.0, busy={"a": 0.9, "b": 0.05}, instances={"a": 2, "b": 4})
    assert SafeRate().decide(two).instances == {"a": 4}
    assert SafeRate().decide(replace(two, busy={"a": 0.5, "b": 0.05})).instances == {"b": 1}


def test_the_figures_of_timestream() -> None:
    """One partition saturates at 28 k/s; sizes are 1, 2, 4, 8; 10 k/s, then 40 k/s, then 10 k/s: 1, 4, 1."""
    model = Model(load=10_000, per_instance=28_000)
    policy = Guarded(SafeRate(sizes=(1, 2, 4, 8)), cool_down_s=10, max_step=4)
    assert model.run(policy, 60) == [] and model.instances == 1
    model.load = 40_000
    assert [d.instances["counts"] for d in model.run(policy, 300)] == [4]
    model.load = 10_000
    model.run(policy, 120)
    assert model.instances == 1 and len(model.decisions) == 2


# --- latency ------------------------------------------------------------------------------------------------------


def test_latency_above_the_target_grows_the_busiest_stage() -> None:
    policy = TargetLatency(500)
    slow = seen(1800, latency_ms_p99=750.0)
    assert policy.decide(slow).instances == {"counts": 3}
    assert "latency p99 750 ms, target 500 ms, busy 90%" in policy.decide(slow).reason
    assert policy.decide(replace(slow, latency_ms_p99=9000.0)).instances == {"counts": 4}, "no more than doubled"
    assert policy.decide(replace(slow, latency_ms_p99=0.0)).kind == "nothing"


def test_latency_that_instances_cannot_help() -> None:
    decision = TargetLatency(500).decide(seen(200, latency_ms_p99=750.0))
    assert decision.kind == "nothing" and "is busy 10%: more would not help" in decision.reason


def test_time_to_spare_is_given_back_if_the_rest_can_carry_it() -> None:
    policy = TargetLatency(500)
    assert policy.decide(seen(400, instances=4, latency_ms_p99=100.0)).instances == {"counts": 2}
    assert policy.decide(seen(2000, instances=4, latency_ms_p99=100.0)).kind == "nothing", "3 would be busy 67 %"
    assert policy.decide(seen(400, instances=4, latency_ms_p99=300.0)).kind == "nothing"
    assert policy.decide(seen(400, instances=4, latency_ms_p99=100.0, queue={"counts": 1})).kind == "nothing"


# --- the ring -----------------------------------------------------------------------------------------------------


def ring_seen(busy: dict[int, float], owners: list[int], queue: int = 2, **more: Any) -> Observation:
    return Observation(
        **{
            "now": 0.0,
            "rows_in_s": 1.0,
            "rows_s": 1.0,
            "queue": {"counts": queue},
            "busy": {"counts": max(busy.values())},
            "busy_containers": {("counts", c): share for c, share in busy.items()},
            "instances": {"counts": len(busy)},
            "owners": {"counts": owners},
            **more,
        }
    )


def test_an_overloaded_container_gives_slices_to_the_next_one_with_room() -> None:
    decision = RingPolicy().decide(ring_seen({0: 1.0, 1: 0.2}, [0] * 8 + [1] * 8))
    assert decision.kind == "move" and decision.stage == "counts"
    # A slice of container 0 is 12.5 %; 40 % would make them equal: three, from the clockwise end of the arc.
    assert decision.moves == tuple(SliceMove("counts", s, 0, 1) for s in (5, 6, 7))
    assert "container 0 is busy 100% with 2 epochs waiting, 1 20%" in decision.reason


def test_queue_and_cpu_must_both_be_high() -> None:
    assert RingPolicy().decide(ring_seen({0: 1.0, 1: 0.2}, [0] * 8 + [1] * 8, queue=0)).kind == "nothing"
    assert RingPolicy().decide(ring_seen({0: 0.7, 1: 0.2}, [0] * 8 + [1] * 8)).kind == "nothing"


def test_a_neighbour_without_room_passes_load_on_first() -> None:
    decision = RingPolicy().decide(ring_seen({0: 1.0, 1: 0.7, 2: 0.1}, [0] * 8 + [1] * 8 + [2] * 8))
    assert [(m.source, m.target) for m in decision.moves] == [(1, 2)] * 3 + [(0, 1)] * 2
    assert {m.slice for m in decision.moves} == {13, 14, 15, 6, 7}


def test_a_new_container_takes_half_the_arc_if_nobody_has_room() -> None:
    decision = RingPolicy().decide(ring_seen({0: 1.0, 1: 0.7}, [0] * 8 + [1] * 8))
    assert (decision.kind, decision.instances) == ("rescale", {"counts": 3})
    assert decision.moves == tuple(SliceMove("counts", s, 0, 2) for s in (4, 5, 6, 7))
    assert "no neighbour has room" in decision.reason and "100%" in decision.reason


def test_the_half_is_one_of_load() -> None:
    load = {("counts", s): 7.0 if s == 7 else 1.0 for s in range(8)}
    decision = RingPolicy().decide(ring_seen({0: 1.0}, [0] * 8, load=load))
    assert [m.slice for m in decision.moves] == [7]


def test_an_empty_container_is_used_before_a_new_one() -> None:
    decision = RingPolicy().decide(ring_seen({0: 1.0, 2: 0.7}, [0] * 8 + [2] * 8, instances={"counts": 3}))
    assert {m.target for m in decision.moves} == {1} and decision.instances == {"counts": 3}
    assert decision.direction(ring_seen({0: 1.0, 2: 0.7}, [0] * 8 + [2] * 8)) == "out"


def test_slices_that_lie_in_no_arcs() -> None:
    decision = RingPolicy().decide(ring_seen({0: 1.0, 1: 0.0}, [0, 1, 0, 0, 1, 0, 0, 0]))
    assert decision.moves == tuple(SliceMove("counts", s, 0, 1) for s in (5, 6, 7))


def test_one_with_little_to_do_gives_everything_to_the_next() -> None:
    decision = RingPolicy().decide(ring_seen({0: 0.1, 1: 0.2, 2: 0.6}, [0, 0, 1, 1, 2, 2], queue=0))
    assert decision.kind == "rescale" and decision.instances == {"counts": 2}
    assert decision.moves == (SliceMove("counts", 0, 0, 1), SliceMove("counts", 1, 0, 1))
    assert "(10%)" in decision.reason and "(20%)" in decision.reason


def test_two_that_would_be_too_much_for_one_stay_two() -> None:
    assert RingPolicy().decide(ring_seen({0: 0.4, 1: 0.4}, [0, 0, 1, 1], queue=0)).kind == "nothing"


def test_ring_limits() -> None:
    full = ring_seen({0: 1.0, 1: 0.9}, [0] * 8 + [1] * 8, cores=2)
    assert (
        RingPolicy().decide(full).kind == "nothing" and "2 containers of 2 allowed" in RingPolicy().decide(full).reason
    )
    more = RingPolicy().decide(replace(full, limits=Limits(nodes_max=2)))
    assert (more.kind, more.nodes) == ("scale_out", 1)
    hot = RingPolicy().decide(ring_seen({0: 1.0}, [0]))
    assert hot.kind == "nothing" and "only one slice" in hot.reason
    idle = ring_seen({0: 0.1, 1: 0.1}, [0, 1], queue=0, limits=Limits(instances_min=2))
    assert RingPolicy().decide(idle).kind == "nothing"


def test_ring_settles_instead_of_passing_slices_to_and_fro() -> None:
    owners = [0] * 12 + [1] * 2 + [2] * 2
    policy = Guarded(RingPolicy(), cool_down_s=5, confirm=1)
    decided = 0
    for now in range(0, 600, 5):
        busy = {c: min(1.0, owners.count(c) / 8) for c in set(owners)}
        decision = policy.decide(ring_seen(busy, owners, queue=int(max(busy.values()) >= 1.0), now=float(now)))
        decided += decision.kind != "nothing"
        for move in decision.moves:
            assert owners[move.slice] == move.source
            owners[move.slice] = move.target
    assert decided <= 6
    assert max(owners.count(c) for c in set(owners)) < 8, "nobody is overloaded any more"


# --- nodes --------------------------------------------------------------------------------------------------------


def test_nodes_are_asked_for_when_cores_do_not_suffice() -> None:
    wide = seen(3500, instances=2, nodes=1, cores=2, limits=Limits(nodes_max=4))
    decision = SafeRate().decide(wide)
    assert (decision.kind, decision.nodes) == ("scale_out", 3)
    assert "rows/s" in decision.reason and "2 cores of 1 nodes" in decision.reason
    alone = SafeRate().decide(replace(wide, limits=Limits()))
    assert alone.kind == "nothing" and "1 to 2 are allowed" in alone.reason
    assert SafeRate().decide(replace(wide, nodes=4, cores=8)).instances == {"counts": 7}
    idle_cores = replace(wide, cores=3, coming=1)
    assert SafeRate().decide(idle_cores).instances == {"counts": 3}, "until they come, what there is must do"


def test_nodes_that_no_instance_may_use_are_not_asked_for() -> None:
    wide = seen(3500, instances=2, nodes=1, cores=2, limits=Limits(instances_max=2, nodes_max=4))
    assert SafeRate().decide(wide).kind == "nothing"
    few_slices = seen(3500, instances=2, nodes=1, cores=2, limits=Limits(nodes_max=4), owners={"counts": [0, 1]})
    assert SafeRate().decide(few_slices).kind == "nothing"
    full = ring_seen({0: 1.0, 1: 0.9}, [0] * 8 + [1] * 8, cores=2, limits=Limits(nodes_max=2))
    assert RingPolicy().decide(full).kind == "scale_out"
    assert RingPolicy().decide(replace(full, coming=1)).kind == "nothing"
    assert RingPolicy().decide(replace(full, limits=Limits(instances_max=2, nodes_max=2))).kind == "nothing"


def test_a_node_without_work_is_given_back() -> None:
    idle = seen(800, instances=2, nodes=2, cores=4, limits=Limits(nodes_max=4))
    decision = SafeRate().decide(idle)
    assert (decision.kind, decision.nodes) == ("scale_in", 1)
    assert SafeRate().decide(replace(idle, limits=Limits(nodes_min=2, nodes_max=4))).kind == "nothing"
    assert SafeRate().decide(replace(idle, limits=Limits())).kind == "nothing"


# --- the guard ----------------------------------------------------------------------------------------------------


def test_observations_in_a_row_must_agree() -> None:
    policy = Guarded(SafeRate(), cool_down_s=10, confirm=3)
    kinds = [policy.decide(seen(load, now=float(i))).kind for i, load in enumerate([1900, 1900, 900, 1900, 1900, 1900])]
    assert kinds == ["nothing"] * 5 + ["rescale"]


def test_what_is_held_back_is_said() -> None:
    policy = Guarded(SafeRate(), cool_down_s=10, confirm=2)
    held = policy.decide(seen(1900, now=0.0))
    assert held.held is not None and held.held.instances == {"counts": 4}
    assert held.reason.startswith("held back (seen 1 of 2 times in a row): rescale counts to 4: counts: 1,900 rows/s")
    assert policy.decide(seen(1900, now=1.0)).kind == "rescale"
    assert "7.0 s of the cool-down are left" in policy.decide(seen(3900, now=4.0, instances=4)).reason
    assert "3 slices are on their way" in policy.decide(seen(3900, now=20.0, instances=4, moving=3)).reason


def test_steps_are_bounded_and_said() -> None:
    policy = Guarded(SafeRate(), confirm=1, max_step=2.0)
    decision = policy.decide(seen(10_000))
    assert decision.instances == {"counts": 4} and decision.reason.endswith("A step at a time: rescale counts to 4.")
    shrunk = Guarded(SafeRate(), confirm=1).decide(seen(100, instances=8))
    assert shrunk.instances == {"counts": 4}


def test_limits_hold_whatever_the_policy_thinks() -> None:
    class Greedy:
        name = "greedy"

        def decide(self, seen: Observation) -> Decision:
            return Decision("rescale", "more than 9000.", instances={"counts": 99})

    guarded = Guarded(Greedy(), confirm=1, limits=Limits(2, 3))
    assert guarded.decide(seen(1)).instances == {"counts": 3}
    assert guarded.decide(seen(1, now=100.0, instances=3)).kind == "nothing"

    class Nodes:
        name = "nodes"

        def decide(self, seen: Observation) -> Decision:
            return Decision("scale_out", "9 more.", nodes=9)

    assert Guarded(Nodes(), confirm=1).decide(seen(1)).kind == "nothing", "nodes are not its to ask for"
    assert Guarded(Nodes(), confirm=1, limits=Limits(nodes_max=3)).decide(seen(1, nodes=2)).nodes == 1
    waiting = Guarded(Nodes(), confirm=1, limits=Limits(nodes_max=9)).decide(seen(1, nodes=2, coming=1))
    assert waiting.kind == "nothing" and "nodes that were asked for have not come: 1" in waiting.reason


@dataclass(frozen=True)
class Always:
    decision: Decision
    name: str = "always"

    def decide(self, seen: Observation) -> Decision:
        return self.decision


def test_a_policy_may_choose_the_nodes_that_go() -> None:
    gone = Decision("scale_in", "2 with the least to do.", which=("c", "a"))
    four = seen(1, nodes=4, staying=("a", "b", "c", "d"))

    def guarded(limits: Limits) -> Decision:
        return Guarded(Always(gone), confirm=1, limits=limits).decide(four)

    assert guarded(Limits(nodes_max=4)) == gone and gone.what() == "remove nodes c, a"
    one = guarded(Limits(nodes_min=3, nodes_max=4))
    assert (one.nodes, one.which) == (1, ("c",)) and one.reason.endswith("A step at a time: remove node c.")
    assert "4 nodes, 4 to 4 allowed" in guarded(Limits(nodes_min=4, nodes_max=4)).reason
    assert "nodes_max is not set" in guarded(Limits()).reason


@pytest.mark.parametrize(
    ("wish", "why"),
    [
        (Decision("rescale", "1.", instances={"sums": 2}), "there is no stage 'sums'"),
        (Decision("move", "1.", stage="in", moves=(SliceMove("in", 0, 0, 1),)), "there is no stage with slices 'in'"),
        (Decision("move", "1.", moves=(SliceMove("counts", 0, 0, 1),)), "moves are those of one stage"),
        (Decision("scale_in", "1.", which=("z",)), "there is no node 'z'"),
    ],
)
def test_what_cannot_be_is_held_back(wish: Decision, why: str) -> None:
    there = seen(1, owners={"counts": [0, 1]}, staying=("a", "b"), nodes=2)
    held = Guarded(Always(wish), confirm=1, limits=Limits(nodes_max=4)).decide(there)
    assert held.kind == "nothing" and held.held == wish and held.reason.startswith(f"held back ({why}")


def test_giving_back_too_early_makes_it_patient() -> None:
    """A load that swings every 40 s: the job follows a few times and then keeps the larger size."""
    model, policy = Model(load=900, instances=2), Guarded(SafeRate(), cool_down_s=10, confirm=3)
    counts = []
    for turn in range(40):
        model.load = 900.0 if turn % 2 else 1900.0
        counts.append(len(model.run(policy, 40)))
    assert sum(counts[:10]) > 0 and sum(counts[20:]) == 0
    assert model.instances == 4
    model.load = 900.0
    model.run(policy, 2000)
    assert model.instances == 2, "a load that stays low is believed in the end"


@pytest.mark.parametrize("policy", [SafeRate(), TargetLatency(500)], ids=lambda p: p.name)
def test_four_times_the_load_and_back(policy: Policy) -> None:
    guarded = Guarded(policy, cool_down_s=10, confirm=3)
    model = Model(load=450)
    model.run(guarded, 200)
    small = model.instances
    model.load *= 4
    up = model.run(guarded, 300)
    large = model.instances
    model.load /= 4
    down = model.run(guarded, 600)
    assert model.instances == small == 1 and 3 <= large <= 4
    assert 1 <= len(up) <= 3 and 1 <= len(down) <= 3
    assert not model.run(guarded, 600), "and there it stays"


# --- settings -----------------------------------------------------------------------------------------------------


def test_settings_name_a_policy() -> None:
    assert policy_from(Config()) is None
    for name in ("safe-rate", "target-latency", "ring"):
        policy = policy_from(
            Config(policy=name, policy_cool_down_s=7, instances_min=2, instances_max=5, nodes_min=3, nodes_max=4)
        )
        assert policy is not None and (policy.name, policy.cool_down_s) == (name, 7.0)
        assert policy.limits == Limits(2, 5, 3, 4)
    latency = policy_from(Config(policy="target-latency", target_latency_ms=250))
    assert latency is not None and isinstance(latency.policy, TargetLatency) and latency.policy.target_ms == 250


def test_ones_own_policy_is_guarded_too() -> None:
    own = Always(Decision("rescale", "more than 9000.", instances={"counts": 99}))
    policy = policy_from(Config(policy=own, instances_max=3))
    assert policy is not None and policy.policy is own and policy.name == "always"
    assert [policy.decide(seen(1, now=float(i))).kind for i in range(3)] == ["nothing", "nothing", "rescale"]


def test_settings_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="nodes_min is 5, more than nodes_max, 4"):
        Config(nodes_min=5, nodes_max=4)
    for nearly in (Always, SafeRate, object(), 3):
        with pytest.raises(ConfigError, match="policy cannot be"):
            Config(policy=nearly)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="instances_min is 5, more than instances_max, 4"):
        Config(instances_min=5, instances_max=4)
    with pytest.raises(ConfigError, match="policy cannot be 'greedy'"):
        Config(policy="greedy")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="control cannot be 'no'"):
        Config(control="no")  # type: ignore[arg-type]


def test_control_as_text() -> None:
    for text, value in [("false", False), ("Off", False), ("1", True), ("yes", True)]:
        assert Config.load(None, environ={"PENSTOCK_CONTROL": text}).control is value
    with pytest.raises(ConfigError, match="control cannot be 'perhaps'"):
        Config.load(None, environ={"PENSTOCK_CONTROL": "perhaps"})


def test_an_observation_from_a_status() -> None:
    status = JobStatus(
        job="j",
        flow="f",
        engine="spark",
        phase="running",
        rows_s=10.0,
        latency_ms_p99=7.0,
        backlog_rows=70,
        stages=(
            StageStatus(id="in", kind="source", offered_s=12.0, backlog_growth_s=2.0, backlog_grows=True),
            StageStatus(
                id="counts",
                kind="keyed",
                inputs=("in",),
                instances=3,
                rows_in_s=8.0,
                offered_s=24.0,
                capacity_s=16.0,
                busy=0.5,
                queue=1,
                owners=(0, 1, 1),
                usable=(0, 1, 2),
                slice_rows_s=(1.0, 2.0, 5.0),
                containers=(ContainerStatus(number=0, busy=0.25), ContainerStatus(number=1, busy=0.75)),
            ),
        ),
        nodes=(
            NodeStatus(name="a", cores=2, containers=(0, 2)),
            NodeStatus(name="b", cores=2, limit=1, containers=(1,), state="suspect"),
            NodeStatus(name="c", cores=2, state="leaving"),
        ),
        nodes_coming=1,
        slots=3,
        moves=(MoveStatus(stage="counts", slice=1, source=0, target=1),),
    )
    observed = observation_of(status, 5.0, coming=2)
    assert (observed.now, observed.rows_in_s, observed.rows_s, observed.cores) == (5.0, 12.0, 10.0, 3)
    assert (observed.offered_s, observed.capacity_s) == ({"in": 12.0, "counts": 24.0}, {"counts": 16.0})
    assert (observed.backlog_rows, observed.backlog_growth_s, observed.backlog_grows) == (70, 2.0, True)
    assert (observed.nodes, observed.staying, observed.moving) == (2, ("a", "b"), 1), "who leaves does not count"
    assert (observed.queue["counts"], observed.busy["counts"]) == (1, 0.5)
    assert observed.input_s == {"in": 0.0, "counts": 8.0} and list(observed.edges) == [("in", "counts")]
    assert observed.load == {("counts", 0): 1.0, ("counts", 1): 2.0, ("counts", 2): 5.0}
    assert observed.busy_containers == {("counts", 0): 0.25, ("counts", 1): 0.75}
    assert observed.homes == {0: "a", 1: "b", 2: "a"} and observed.usable == {"counts": (0, 1, 2)}
    assert (observed.coming, observed.slots) == (3, 3)
    assert observed.size("counts") == 2


def test_every_reason_has_figures() -> None:
    for decision in (
        SafeRate().decide(seen(1900)),
        SafeRate().decide(seen(1000)),
        TargetLatency(500).decide(seen(1900, latency_ms_p99=900.0)),
        RingPolicy().decide(ring_seen({0: 1.0, 1: 0.2}, [0, 0, 1, 1])),
    ):
        assert len(re.findall(r"\d", decision.reason)) >= 2, decision
