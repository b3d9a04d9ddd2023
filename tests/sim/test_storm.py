"""Storms: worlds in which hundreds of orders come upon each other, and nodes die in between."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from penstock.control.controller import Controller
from penstock.control.events import (
    MoveRequested,
    Tell,
)
from penstock.control.fleet import Fleet
from penstock.control.moves import Move, Moves
from penstock.engines.sim.checkers import Answered, Violation
from penstock.engines.sim.simulate import Campaign, simulate
from penstock.engines.sim.storm import KINDS, ORDERS, SimJob
from penstock.engines.sim.world import World
from penstock.errors import ConfigError
from penstock.ids import Epoch
from tests.scale import scaled

SEEDS = int(os.environ.get("PENSTOCK_STORM_SEEDS", scaled(16, 400)))
EACH = min(SEEDS, 8)
SEEDS_MAX = 12
Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, SEEDS, EACH))
def test_many_storms(first: int) -> None:
    """A storm is 200 orders, three kills and thirty epochs. A thousand of them: `make sim ARGS=--storm`."""
    campaign = Campaign()
    for _ in campaign.run(range(first, first + EACH), storm=True):
        pass
    assert campaign.seeds == EACH
    assert not campaign.violations, "\n".join(campaign.violations[0].lines())
    # Some orders find no driver; most must be heard, and some refused.
    assert campaign.orders > 0.9 * ORDERS * EACH and campaign.refused > 20 * EACH
    assert campaign.kills > 2 * EACH and campaign.recoveries > 2 * EACH and campaign.epochs > 10 * EACH


def test_a_storm_replays_exactly() -> None:
    first, second = (simulate(3, keep_story=True, storm=True) for _ in range(2))
    assert first == second
    assert first.digest != simulate(3).digest
    assert first.replay == "penstock simulate --seed 3 --storm --verbose"


def test_a_storm_replays_exactly_in_another_process() -> None:
    """Another process has another order of its sets of strings: none may show."""
    code = "from penstock.engines.sim.simulate import simulate; print(simulate(5, storm=True).digest)"
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    found = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True).stdout.strip()
    assert found == simulate(5, storm=True).digest.encode()


def test_every_kind_of_order_is_given_and_carried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: Counter[str] = Counter()
    end = Moves._end

    def ended(self: Moves, move: Move, outcome: str, now: float) -> None:
        outcomes[outcome] += 1
        end(self, move, outcome, now)

    monkeypatch.setattr(Moves, "_end", ended)
    given: Counter[str] = Counter()
    for seed in range(3):
        storm = World(seed, stormy=True).run().storm
        assert storm is not None and sum(storm.given.values()) > ORDERS // 2
        given += storm.given
    kinds = {kind.split()[0] for kind in KINDS}
    assert set(given) == kinds, "moves of all kinds are counted as one"
    assert outcomes["done"] > 10 and outcomes["cancelled"] > 10, outcomes


def running(seed: int, *, stormy: bool = False) -> tuple[World, Controller]:
    """A world whose job has just started."""
    world = World(seed, stormy)
    world.schedule.after(0.0, world.start_driver)
    while (controller := world.driver and world.driver.controller) is None or not controller.fleet.nodes:
        what = world.schedule.next()
        assert what is not None
        what()
    return world, controller


def test_an_order_is_taken_or_told() -> None:
    """The checker itself: a move that the controller knows nothing of, with and without a word about it."""
    _, controller = running(1)
    stage = next(iter(controller.routes.table.owners))
    order = MoveRequested(now=0.0, stage=stage, targets={0: 99})
    with pytest.raises(Violation, match="nobody says why"):
        Answered().on_order(order, controller, [])
    Answered().on_order(order, controller, ["there is no container 99"])
    Answered().on_order(
        msgspec.structs.replace(order, targets={0: controller.routes.table.owners[stage][0]}), controller, []
    )


def test_slices_of_a_stage_without_state_are_not_moved() -> None:
    """They were once, which never ended: nobody could ever have a copy of nothing, and no node could leave."""
    world, controller = running(18, stormy=True)
    stage = next(s.id for s in controller.topology.stages if not s.stateful and not s.is_source)
    assert stage == "window-ranking"
    with pytest.raises(ConfigError, match="keeps no state"):
        SimJob(world).migrate(stage, [0], 1)
    words = told(controller, MoveRequested(now=0.0, stage=stage, targets={0: 1}))
    assert words == ["slices of 'window-ranking' stay: it has no state to move"]
    assert not controller.moves.by_slice


def told(controller: Controller, order: MoveRequested) -> list[str]:
    return [c.text for c in controller.step(order) if isinstance(c, Tell)]


def test_a_move_that_came_too_late_is_told() -> None:
    """The container has gone since it was asked for, or the slice is being handed over to another."""
    _, controller = running(1)
    stage = controller.topology.stateful[0].id
    owner = controller.routes.table.owners[stage][0]
    nowhere = told(controller, MoveRequested(now=0.0, stage=stage, targets={0: 99, 1_000: owner}))
    assert nowhere == [f"slices 0, 1000 of '{stage}' stay: no such slice, or no container to take it"]
    assert not controller.moves.by_slice
    controller.moves.by_slice[stage, 0] = Move(stage, 0, owner, owner + 1, "switch", 0.0, "asked for", Epoch(9))
    late = told(controller, MoveRequested(now=0.0, stage=stage, targets={0: owner}))
    assert late == [f"slices 0 of '{stage}' change hands just now: ask again when they have"]


FAILED_ONCE = {
    "a move of slices of a stage without state never ended, and no node could leave": 111,
    "a stage was to shrink while nobody could take its slices, and nobody asked again": 1027,
    "a move waited for a copy that its target had no room for": 492,
}


@pytest.mark.parametrize("seed", FAILED_ONCE.values(), ids=FAILED_ONCE.keys())
def test_a_storm_that_failed_once(seed: int) -> None:
    found = simulate(seed, storm=True)
    assert found.ok, "\n".join(found.lines())


# -- bugs for storms: but for the first, the mixtures of faults give no orders that would show them --------------------


def silent_refusal(patch: pytest.MonkeyPatch) -> None:
    """Slices that cannot move stay, and nobody is told."""
    real = Moves.on_move
    patch.setattr(Moves, "on_move", lambda self, e: [c for c in real(self, e) if not isinstance(c, Tell)])


def cores_of_the_dead(patch: pytest.MonkeyPatch) -> None:
    """What was said of a node's cores is kept when it is gone."""
    real = Fleet.on_nodes_changed

    def on_nodes_changed(self: Fleet, event: Any) -> Any:
        kept = dict(self.cores)
        out = real(self, event)
        self.core.routes.amend(cores={**kept, **self.cores})
        return out

    patch.setattr(Fleet, "on_nodes_changed", on_nodes_changed)


def stateless_moves(patch: pytest.MonkeyPatch) -> None:
    """Slices of a stage without state are to be copied, which never ends."""
    real = Moves.on_move

    def on_move(self: Moves, event: MoveRequested) -> Any:
        if self.core.topology[event.stage].stateful:
            return real(self, event)
        usable = {p.container for p in self.core.balance.peers(event.stage)}
        targets = {
            s: c for s, c in event.targets.items() if c in usable and s < self.core.routes.table.slices_in(event.stage)
        }
        return [*self.ask(event.stage, targets, event.now, event.reason), Tell(text="as you wish")]

    patch.setattr(Moves, "on_move", on_move)


PLANTED: list[tuple[Plant, set[str], int]] = [
    (silent_refusal, {"answered"}, 0),
    (cores_of_the_dead, {"sound"}, 0),
    (stateless_moves, {"progress"}, 18),
]
"""A bug, the checkers that may be the first to see it, and a storm from which on it does not take long."""


@pytest.mark.parametrize(("plant", "checkers", "first"), PLANTED, ids=[plant.__name__ for plant, *_ in PLANTED])
def test_a_planted_bug_is_caught(plant: Plant, checkers: set[str], first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        plant(patch)
        found = next(o for s in range(first, first + SEEDS_MAX) if not (o := simulate(s, storm=True)).ok)
    assert found.checker in checkers, f"{found.checker}: {found.message}"
    assert found.story
    assert simulate(found.seed, storm=True).ok, "the storm fails without the bug as well"
