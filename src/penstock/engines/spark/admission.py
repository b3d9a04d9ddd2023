"""When Spark may start executors: not while the survivors of a loss are busy with it.

A standalone master starts a new executor the moment one is gone. Its JVM takes seconds of processor time; where
executors share a machine, it takes them from those that bring up the lost slices. So the master is told that no
executor is wanted, which leaves alone those that run, and every few seconds, for a moment, how many really are: then it
starts what there is room for. After a loss that moment waits for the next new output, or for ``HOLD_S_MAX``.
"""

from __future__ import annotations

ALL = 2**31 - 1
"""As many executors as there is room for: what a master assumes that was told nothing."""
EVERY_S = 2.0
"""A worker that joins the cluster gets an executor this much later at most."""
HOLD_S_MAX = 10.0
"""Output may stop for another reason than the loss, and a job that has lost nodes needs others all the same."""


def has_master(master: str) -> bool:
    """Is it Spark's own cluster manager, which replaces executors without being asked?"""
    return master.startswith(("local-cluster", "spark://"))


class Admission:
    """What the engine's watcher asks. Times are of its clock."""

    def __init__(self, now: float) -> None:
        self._next = now
        self._lost_at: float | None = None
        self._awaited = -1
        self._seen = -1

    def lost(self, now: float) -> None:
        """Executors are gone."""
        if self._lost_at is None:
            self._lost_at, self._awaited = now, self._seen + 1

    def output(self, epoch: int) -> None:
        """An epoch is out; it may have been before."""
        self._seen = max(self._seen, epoch)

    def due(self, now: float, survivors: bool) -> bool:
        """Is it time to let executors in? To be called by one thread, which then does."""
        if self._lost_at is not None:
            if survivors and self._seen < self._awaited and now - self._lost_at < HOLD_S_MAX:
                return False
            self._lost_at, self._next = None, now
        if now < self._next:
            return False
        self._next = now + EVERY_S
        return True
