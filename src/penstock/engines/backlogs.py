"""Looks at what waits in the sources. The thread that plans epochs looks; the loop takes what was found.

A plan takes rows out of a backlog, so both are counted on the same thread and in order. Between plans the loop has the
sources looked at too: a job that is behind plans seldom, and then it matters most what comes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from penstock.connectors.base import Backlog, Source
from penstock.control.offered import Arrived

LOOK_S = 0.5
"""Seconds between two looks at a source while nothing is planned."""
LOOK_SHARE = 0.05
"""Looking takes no more than this share of the time: a store that lists slowly is asked seldom."""
LOOKS_KEPT = 1024
"""Looks that wait for the loop to take them. Older ones are dropped."""
FULL_SHARE = 0.9
"""A plan that took this share of the rows that it might take leaves some behind, as far as one can tell."""


class Look(msgspec.Struct, frozen=True):
    """What was found in a source, and what a plan took just before it; see ``RateWindow.looked``."""

    source: str
    arrived: Arrived
    took: int | None
    full: bool


class Backlogs:
    """Called by the thread that plans, but for ``due`` and ``take``, which the loop calls."""

    def __init__(self, sources: Mapping[str, Source], clock: Callable[[], float]) -> None:
        self._sources = sources
        self._clock = clock
        self._planned = dict.fromkeys(sources, 0)
        """source -> rows that plans have taken"""
        self._offsets: dict[str, Any] = {}
        self._not_before = dict.fromkeys(sources, -math.inf)
        self._found: deque[Look] = deque(maxlen=LOOKS_KEPT)
        self._due_at = -math.inf
        self._problems: dict[str, str] = {}
        self.waiting: dict[str, int | None] = dict.fromkeys(sources)
        """source -> rows that waited in it at the last look. None: not known."""

    @property
    def notices(self) -> list[str]:
        return list(self._problems.values())

    def planned(self, source: str, offset: Any, took: int, rows_max: int) -> None:
        """A plan took rows of a source, or none; ``offset`` is where it ended."""
        self._offsets[source] = offset
        self._planned[source] += took
        if took or self._clock() >= self._due_at:
            self._look(source, took, took >= FULL_SHARE * rows_max)

    def look(self) -> None:
        """Look at every source that has been planned."""
        for source in self._offsets:
            self._look(source, None, False)

    def due(self, now: float) -> bool:
        """Is it time for a look between plans? The next one is due later."""
        if now < self._due_at:
            return False
        self._due_at = now + LOOK_S
        return bool(self._offsets)

    def take(self) -> list[Look]:
        """What has been found since the last time, oldest first."""
        found = []
        while self._found:
            found.append(self._found.popleft())
        return found

    def _look(self, source: str, took: int | None, full: bool) -> None:
        began = self._clock()
        if began < self._not_before[source]:
            return
        try:
            backlog = self._sources[source].backlog(self._offsets[source])
        except Exception as error:  # it may be anybody's, and the job does not need it
            backlog = Backlog()
            self._problems.setdefault(
                source,
                f"source '{source}' could not say what waits in it ({type(error).__name__}: {error}): "
                "its backlog is not known. Mend its backlog method.",
            )
        self.waiting[source] = backlog.rows
        now = self._clock()
        self._not_before[source] = now + (now - began) * (1 / LOOK_SHARE - 1)
        self._found.append(Look(source, Arrived(now, self._planned[source], backlog.rows), took, full))


__all__ = ["Backlogs", "Look"]
