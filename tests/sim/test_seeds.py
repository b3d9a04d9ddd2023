"""Hundreds of worlds, and those that were once found broken."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from penstock.engines.sim.flows import BRANCHES, Scenario
from penstock.engines.sim.simulate import Campaign, simulate
from penstock.engines.sim.world import World
from tests.scale import scaled

SEEDS = int(os.environ.get("PENSTOCK_SIM_SEEDS", scaled(200, 5_000)))
EACH = min(SEEDS, 100)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, SEEDS, EACH))
def test_many_seeds(first: int) -> None:
    """A seed is two or three driver starts, a recovery or two and six epochs, each in a mess. More: `make sim`."""
    campaign = Campaign()
    for _ in campaign.run(range(first, first + EACH)):
        pass
    assert campaign.seeds == EACH
    assert not campaign.violations, "\n".join(campaign.violations[0].lines())
    # Worlds in which nothing happens would pass as well.
    assert campaign.recoveries > EACH // 2 and campaign.deaths > EACH // 3 and campaign.epochs > 4 * EACH


def test_a_seed_replays_exactly() -> None:
    for seed in (1, 4, 9):
        first, second = simulate(seed, keep_story=True), simulate(seed, keep_story=True)
        assert first == second
        assert len(first.story) > 20


def test_a_seed_replays_exactly_in_another_process() -> None:
    """Another process has another order of its sets of strings: none may show."""
    seed = 14
    code = f"from penstock.engines.sim.simulate import simulate; print(simulate({seed}).digest)"
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": salt}, capture_output=True, check=True
        ).stdout.strip()
        for salt in ("1", "2")
    }
    assert found == {simulate(seed).digest.encode()}


def test_seeds_differ() -> None:
    assert len({simulate(seed).digest for seed in range(5)}) == 5


def test_every_kind_of_flow_and_fault_is_drawn() -> None:
    drawn = {branch for seed in range(200) for branch in Scenario.draw(seed).branches}
    assert drawn == set(BRANCHES)
    worlds = [World(seed) for seed in range(60)]
    kinds = {kind for world in worlds for kind in world.faults.kinds()}
    assert kinds == set(vars(worlds[0].faults))


def test_some_worlds_have_stages_with_different_numbers_of_slices() -> None:
    asked: dict[int, set[int]] = {}
    for seed in range(100):
        world = World(seed)
        counts = {stage.id: world.scenario.slices for stage in world.plan.stages if stage.keyed is not None}
        asked[seed] = set((counts | world.plan.own_slices).values())
    assert sum(len(counts) > 1 for counts in asked.values()) >= 5
    assert {seed % 5 for seed, counts in asked.items() if len(counts) > 1} == {3}, "other seeds mean what they meant"


# -- seeds that failed once, each with what was wrong ------------------------------------------------------------------
# (test_checkers.py has the bugs themselves, to see that these or other seeds would find them again.)

FAILED_ONCE = {
    "the delta of a report that came twice was in the checkpoint twice": 22,
    "sources forgot what a checkpoint older than the damaged one would read again": 40,
    "an epoch was logged after one that could not be, and taken up with another cut before it": 14,
    "a container kept its undo logs when its slices changed": 41,
    "a checkpoint that was being written when work failed was in the store, and nobody took note of it": 1230,
    "after all nodes were lost, epochs ran again on containers that had no node": 0,
    "the target of a move had work before it had a node": 217,
    "a rescale dealt slices out to containers that were waiting for nodes": 3265,
    "a move was asked for again in the moment in which its time was up": 289,
    "as the time of a move was up, slices of another stage, just asked for, were spread anew": 1744,
    "the same, with one that was to go where it had been": 2886,
}


@pytest.mark.parametrize("seed", FAILED_ONCE.values(), ids=FAILED_ONCE.keys())
def test_a_seed_that_failed_once(seed: int) -> None:
    found = simulate(seed)
    assert found.ok, "\n".join(found.lines())
