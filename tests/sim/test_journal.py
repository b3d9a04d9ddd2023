"""Under faults of every kind, each driver's journal plays through a fresh controller to the very same commands."""

from __future__ import annotations

import os

import pytest

from penstock.engines.sim import world
from penstock.engines.sim.world import Driver, World
from penstock.observe import journal as journal_module
from penstock.observe.journal import replay
from penstock.observe.story import tell
from tests.scale import scaled

SEEDS = int(os.environ.get("PENSTOCK_JOURNAL_SEEDS", scaled(10, 100)))


@pytest.fixture
def drivers(monkeypatch: pytest.MonkeyPatch) -> list[Driver]:
    """Every life of the driver, as they come."""
    lives: list[Driver] = []

    class Kept(Driver):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)  # type: ignore[arg-type]
            lives.append(self)

    monkeypatch.setattr(world, "Driver", Kept)
    monkeypatch.setattr(world, "JOURNAL_EVERY", 1)
    monkeypatch.setenv("POLARS_MAX_THREADS", "1")
    return lives


def test_every_journal_replays(drivers: list[Driver]) -> None:
    steps = 0
    for seed in range(SEEDS):
        drivers.clear()
        World(seed).run()
        for number, driver in enumerate(drivers, 1):
            where = f"seed {seed}, driver {number}"
            assert driver.journal.lost == 0, where
            found = replay(driver.journal.history())
            assert found.difference is None, "\n".join([where, *found.difference.lines()])
            assert found.skipped == 0, where
            steps += found.steps
    assert steps > 25 * SEEDS


def test_a_replay_may_begin_in_the_middle(drivers: list[Driver], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "STEPS_PER_SNAPSHOT", 8)
    begun = 0
    for seed in (1, 4, 9, 17):
        World(seed).run()
    for driver in drivers:
        for run in driver.journal.history().runs:
            whole = list(run.records)
            for step in sorted(run.states)[1:]:
                run.records = [record for record in whole if record.step > step]
                found = replay(run)
                assert found.difference is None, "\n".join([f"from step {step}", *found.difference.lines()])
                assert found.skipped == 0 and found.steps == len(run.records)
                begun += 1
    assert begun > 20


def test_every_failure_is_told(drivers: list[Driver]) -> None:
    recoveries = told = 0
    for seed in range(8):
        drivers.clear()
        World(seed).run()
        for driver in drivers:
            lines = tell(driver.journal.history())
            recoveries += driver.controller.attempts.recoveries if driver.controller is not None else 0
            told += sum(line.text.startswith("recovery ") for line in lines)
            assert all(line.incident is not None for line in lines if line.text.startswith("recovery "))
    assert told == recoveries > 0
