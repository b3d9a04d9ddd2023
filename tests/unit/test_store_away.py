"""The controller while the store is away: epochs run ahead of the log, nothing of them is published before its turn."""

from __future__ import annotations

from penstock.control.events import (
    LogEpoch,
    PlanEpoch,
    PublishEpoch,
    ReleaseEpoch,
    RunStage,
    StoreChanged,
)
from penstock.ids import Epoch
from tests.unit.test_controller import COUNT, IN, WIN, Driver


def run_ahead(driver: Driver, epoch: int) -> None:
    """Planned, not logged, and yet every stage runs."""
    commands = driver.plan(epoch)
    assert LogEpoch in map(type, commands)
    assert [c.stage for c in commands if isinstance(c, RunStage)] == [IN]
    commands = driver.done(epoch, IN)
    assert [c.stage for c in commands if isinstance(c, RunStage)] == [COUNT, WIN]
    driver.done(epoch, COUNT)


def away(epochs: int, **settings: int) -> Driver:
    driver = Driver(away_epochs=epochs, **{"epochs_in_flight": 1, **settings})
    driver.start()
    driver.whole_epoch(1)
    driver.step(StoreChanged(now=driver.now, away=True))
    return driver


def test_epochs_go_on_without_the_log_and_are_published_when_it_is_back() -> None:
    driver = away(epochs=3)
    for epoch in (2, 3, 4):
        run_ahead(driver, epoch)
        commands = driver.done(epoch, WIN)
        assert [type(c) for c in commands] == [PlanEpoch], "the next one is planned, this one is not published"
    assert driver.log(2)[0] == PublishEpoch(epoch=Epoch(2), attempt=driver.controller.attempts.current)
    driver.step(StoreChanged(now=driver.now, away=False))
    assert driver.log(3) == [], "in order"
    commands = driver.published(2)
    assert [type(c) for c in commands] == [ReleaseEpoch, PublishEpoch] and commands[1].epoch == 3


def test_the_number_of_epochs_ahead_is_bounded() -> None:
    driver = away(epochs=2)
    for epoch in (2, 3):
        run_ahead(driver, epoch)
        driver.done(epoch, WIN)
    run_ahead(driver, 4)
    assert driver.done(4, WIN) == [], "two are held, one is under way; no more"
    driver.log(2)
    assert PlanEpoch in map(type, driver.published(2))


def test_epochs_go_on_when_publishing_itself_waits_for_the_store() -> None:
    """Logged and done, but a manifest before it in the queue cannot be written: the next ones need not wait."""
    driver = away(epochs=2)
    for epoch in (2, 3):
        run_ahead(driver, epoch)
        driver.log(epoch)
        assert PlanEpoch in map(type, driver.done(epoch, WIN)), "the next one may begin"
    run_ahead(driver, 4)
    driver.log(4)
    assert driver.done(4, WIN) == [], "and no more than allowed"


def test_without_leave_nothing_runs_ahead() -> None:
    driver = away(epochs=0)
    assert [type(c) for c in driver.plan(2)] == [LogEpoch]
    assert [c.stage for c in driver.log(2) if isinstance(c, RunStage)] == [IN]


def test_while_the_store_answers_an_epoch_waits_for_its_log() -> None:
    driver = Driver(away_epochs=5)
    driver.start()
    assert [type(c) for c in driver.plan(1)][:1] == [LogEpoch]
    assert not driver.controller.epochs.in_flight[Epoch(1)].running


def test_a_failure_meanwhile_runs_the_same_epochs_again_from_memory() -> None:
    driver = away(epochs=3)
    run_ahead(driver, 2)
    driver.done(2, WIN)
    driver.plan(3)
    driver.failed(3, IN)
    record = driver.controller.inputs.log[Epoch(2)]
    again = driver.controller.epochs.in_flight
    assert sorted(again) == [1, 2, 3] and again[Epoch(2)].record is record
    assert [again[Epoch(e)].logged for e in (1, 2, 3)] == [True, False, False]


def test_waiting_for_the_store_does_not_shrink_epochs() -> None:
    driver = away(epochs=3)
    before = driver.controller.epochs.pacer
    run_ahead(driver, 2)
    driver.done(2, WIN)
    driver.now += 1000.0
    driver.log(2)
    driver.published(2)
    assert driver.controller.epochs.pacer == before
