"""Attempts: which one runs, what of older ones is still out, and whether recoveries get the job any further."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.control.concern import Concern
from penstock.control.records import TaskError
from penstock.ids import Attempt, Epoch

if TYPE_CHECKING:
    from penstock.control.controller import Controller

RECOVERIES_MAX = 5
"""Recoveries in a row without progress after which the job gives up."""
UNFIT_AFTER = 3
"""Failures in a row on one node, without progress in between, after which the node counts as unfit."""


class Attempts(Concern):
    """Every recovery begins a new attempt. Work of an older attempt is never accepted."""

    def __init__(self, core: Controller) -> None:
        super().__init__(core)
        self.current = Attempt(1)
        self.outstanding: set[tuple[Attempt, Epoch, str]] = set()
        """Jobs, of this attempt and older ones, that have not come back."""
        self.recovering = False
        self.recoveries = 0
        """Recoveries since the job started."""
        self.fruitless = 0
        """Recoveries in a row without progress: an epoch published for the first time, or a checkpoint."""
        self.failed_on: list[str] = []
        """Nodes on which the last tasks failed, since there was progress."""

    def at_least(self, attempt: int) -> None:
        self.current = Attempt(max(self.current, attempt))

    def sent(self, epoch: Epoch, what: str) -> None:
        """A job of this attempt is on its way. Exactly one answer will come."""
        self.outstanding.add((self.current, epoch, what))

    def answered(self, attempt: Attempt, epoch: Epoch, what: str) -> bool:
        """A job has come back. Whether its attempt is the one that runs."""
        self.outstanding.discard((attempt, epoch, what))
        return attempt == self.current

    def progressed(self) -> None:
        self.fruitless = 0
        self.failed_on = []

    def failed(self, node: str) -> bool:
        """A task failed on this node. Whether the node is unfit: every task there fails, and others could go on."""
        if node:
            self.failed_on = [*self.failed_on[1 - UNFIT_AFTER :], node]
        staying = self.core.fleet.staying()
        unfit = node in staying and len(staying) > 1 and self.failed_on == [node] * UNFIT_AFTER
        if unfit:
            self.failed_on = []
        return unfit

    def begin_recovery(self, reason: str) -> TaskError | None:
        """A new attempt begins. The error, if one more would be in vain."""
        self.recoveries += 1
        self.fruitless += 1
        if self.fruitless > RECOVERIES_MAX:
            return TaskError(
                kind="EngineError",
                message=f"{RECOVERIES_MAX} recoveries in a row made no progress; the last failure was: {reason}",
                remedy="Look at the executors' logs; start again with the same checkpoint once the cause is gone.",
            )
        return None

    def begin_next(self) -> None:
        self.current = Attempt(self.current + 1)
        self.recovering = True
