"""How the rows of an epoch are shared among several sources.

Equal shares would read one source far ahead in event time where another has 46 times as many rows: joins and windows
then keep the rows of the one until the other comes. So each source gets what brings all of them to one event time; if
that is not known, its share of the backlog; else an equal share. Results do not depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LEAST_PART = 64
"""Every source gets at least this part of an equal share: rows may have come to one that seemed to have none."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where a source stands."""

    rows: int = 0
    """Rows read so far."""
    first_us: int | None = None
    """The least watermark known of it: event time when it began."""
    reached_us: int | None = None
    """The greatest event time read so far."""
    backlog: int | None = None
    """Rows that wait, if the source knows."""

    @property
    def rate(self) -> float | None:
        """Rows for each microsecond of event time."""
        if self.first_us is None or self.reached_us is None or self.reached_us <= self.first_us or not self.rows:
            return None
        return self.rows / (self.reached_us - self.first_us)


def shares(rows_max: int, sources: Mapping[str, Standing]) -> dict[str, int]:
    """Rows that each source may give to the next epoch: about ``rows_max`` together, at least one each."""
    if not sources:
        return {}
    least = max(1, rows_max // (LEAST_PART * len(sources)))
    wanted = _by_event_time(rows_max, sources) or _by_backlog(rows_max, sources)
    if wanted is None:
        wanted = dict.fromkeys(sources, rows_max / len(sources))
    return {name: max(least, round(rows)) for name, rows in wanted.items()}


def _by_event_time(rows_max: int, sources: Mapping[str, Standing]) -> dict[str, float] | None:
    """What brings all sources to one event time; those that are ahead of it get nothing."""
    rates = {name: s.rate for name, s in sources.items()}
    known = {name: rate for name, rate in rates.items() if rate is not None}
    if len(known) < len(sources):
        return None
    reached = {name: s.reached_us or 0 for name, s in sources.items()}
    behind = sorted(sources, key=lambda name: reached[name])
    moving: list[str] = []
    target = 0.0
    for i, name in enumerate(behind):
        moving.append(name)
        rate = sum(known[m] for m in moving)
        target = (rows_max + sum(known[m] * reached[m] for m in moving)) / rate
        if i + 1 == len(behind) or target <= reached[behind[i + 1]]:
            break
    return {name: max(0.0, known[name] * (target - reached[name])) if name in moving else 0.0 for name in sources}


def _by_backlog(rows_max: int, sources: Mapping[str, Standing]) -> dict[str, float] | None:
    backlogs = {name: s.backlog for name, s in sources.items()}
    total = sum(b for b in backlogs.values() if b is not None)
    if any(b is None for b in backlogs.values()) or not total:
        return None
    return {name: rows_max * (b or 0) / total for name, b in backlogs.items()}


__all__ = ["Standing", "shares"]
