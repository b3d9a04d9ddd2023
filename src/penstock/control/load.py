"""How much each slice of a stage has to do: rows a second, from the reports of its owners.

A slice is hot by what comes for it, not by how many keys it has: one busy key is as hot as a million quiet ones. Rows,
not time: a row costs about the same wherever its slice lives, while the time it takes is also the machine's doing.
Owners count for a few epochs and report then, so that the figures cost next to nothing; they are smoothed here, so that
one odd epoch moves nobody.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from penstock.control.records import TaskReport
from penstock.ids import StageId

LOAD_EPOCHS = 4
"""Owners report every so many epochs."""
SMOOTH_S = 10.0
"""What was measured so long ago still counts for a third."""
ROWS_MIN = 32
"""Below so many rows for each slice, on average, differences between slices are chance."""
FLOOR = 0.1
"""A slice without rows counts for this share of an average one: it takes part in checkpoints, and rows may come."""


class SliceLoad:
    """Changed by the controller only, from the reports alone: the same reports give the same figures."""

    def __init__(self) -> None:
        self.rates: dict[StageId, dict[int, float]] = {}
        """stage -> slice -> rows a second; slices without any are left out"""
        self.rows: dict[StageId, int] = {}
        self.since: dict[StageId, float] = {}
        """When what was reported last ends."""

    def note(self, stage: StageId, reports: Sequence[TaskReport], now: float) -> None:
        counts: dict[int, int] = {}
        for report in reports:
            for number, rows in report.load.items():
                counts[number] = counts.get(number, 0) + rows
        if not counts:
            return
        before = self.since.get(stage)
        self.since[stage] = now
        if before is None or now <= before:
            return  # over what time these came is not known
        span = now - before
        keep = math.exp(-span / SMOOTH_S)
        old = self.rates.get(stage)
        if old is None:
            old, keep = {}, 0.0
        self.rates[stage] = {s: keep * old.get(s, 0.0) + (1 - keep) * counts.get(s, 0) / span for s in {*old, *counts}}
        self.rows[stage] = self.rows.get(stage, 0) + sum(counts.values())

    def forget(self) -> None:
        """What ran before runs again: the time until the next report says nothing."""
        self.since.clear()

    def of(self, stage: StageId, slices: int) -> list[float] | None:
        """Rows a second of each slice; None as long as too little was seen."""
        rates = self.rates.get(stage)
        if rates is None or self.rows.get(stage, 0) < ROWS_MIN * slices or not any(rates.values()):
            return None
        return [rates.get(s, 0.0) for s in range(slices)]

    def weights(self, stage: StageId, slices: int) -> list[float] | None:
        """The same, for dealing slices out: nobody counts for nothing."""
        rates = self.of(stage, slices)
        if rates is None:
            return None
        floor = FLOOR * sum(rates) / slices
        return [rate + floor for rate in rates]


def shares(rates: Sequence[float], owners: Sequence[int], busy: Mapping[int, float]) -> list[float]:
    """For each slice the share of one container's time that it takes: the busy share of its owner, by rows."""
    whole: dict[int, float] = {}
    for s, container in enumerate(owners):
        whole[container] = whole.get(container, 0.0) + rates[s]
    return [busy.get(c, 0.0) * (rates[s] / whole[c]) if whole[c] > 0 else 0.0 for s, c in enumerate(owners)]


def within_slots(containers: Iterable[int], homes: Mapping[int, str], slots: Mapping[str, int]) -> list[int]:
    """Those that may work: of a node with a limit the first so many, of the others all."""
    taken: dict[str, int] = {}
    found = []
    for c in containers:
        node = homes.get(c, "")
        taken[node] = taken.get(node, 0) + 1
        if taken[node] <= slots.get(node, taken[node]):
            found.append(c)
    return found
