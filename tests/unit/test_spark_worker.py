"""What the process of a slot does around its tasks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from penstock.engines.spark import worker


class Knot:
    """Refers to itself: only a collection ends it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def knot(monkeypatch: pytest.MonkeyPatch) -> Iterator[weakref.ref[Knot]]:
    """Set aside by a task, and then of no use."""
    monkeypatch.setattr(worker, "_tasks", 0)
    monkeypatch.setattr(worker, "_collected", 0)
    made = Knot()
    seen = weakref.ref(made)
    worker._spare_the_collector()
    del made
    yield seen
    gc.unfreeze()


def test_what_tasks_set_aside_is_looked_at_between_them(knot: weakref.ref[Knot]) -> None:
    for _ in range(worker.FULL_COLLECTION_EVERY - 2):
        worker._spare_the_collector()
    assert not worker.between_tasks()
    gc.collect()
    assert knot() is not None, "it is not yet time"
    worker._spare_the_collector()
    assert not worker.between_tasks()
    assert knot() is None


def test_where_nobody_calls_between_tasks_a_task_does_it(knot: weakref.ref[Knot]) -> None:
    for _ in range(2 * worker.FULL_COLLECTION_EVERY - 2):
        worker._spare_the_collector()
    gc.collect()
    assert knot() is not None
    worker._spare_the_collector()
    gc.collect()
    assert knot() is None
