"""How much each slice of a stage has to do: rows a second, from the reports of its owners.

A slice is hot by the rows that come for it, not by its number of keys: one busy key is as hot as a million quiet ones.
Rows are counted and not time, because a row costs about the same wherever its slice lives, while its time also depends
on the machine. Owners count over a few epochs and then report, so that the figures cost next to nothing. The figures
are smoothed here, so that one odd epoch moves no slice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from penstock.control.records import TaskReport
from penstock.ids import StageId

LOAD_EPOCHS = 4
"""Epochs from one report of an owner to the next."""
SMOOTH_S = 10.0
"""Seconds after which a measurement still counts for about a third (1/e)."""
ROWS_MIN = 32
"""Rows for each slice, on average, below which differences between slices are chance."""
FLOOR = 0.1
"""A slice without rows counts for this share of an average slice: it takes part in checkpoints, and rows may come."""


class SliceLoad:
    """Changed by the controller only. The same reports give the same figures."""

    def __init__(self) -> None:
        self.rates: dict[StageId, dict[int, float]] = {}
        """stage -> slice -> rows a second; slices without any are left out"""
        self.rows: dict[StageId, int] = {}
        self.since: dict[StageId, float] = {}
        """stage -> end of the time that its last report covers"""

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
        """Epochs run again after a failure: the time until the next report says nothing."""
        self.since.clear()

    def of(self, stage: StageId, slices: int) -> list[float] | None:
        """Rows a second of each slice; None while too little was seen."""
        rates = self.rates.get(stage)
        if rates is None or self.rows.get(stage, 0) < ROWS_MIN * slices or not any(rates.values()):
            return None
        return [rates.get(s, 0.0) for s in range(slices)]

    def weights(self, stage: StageId, slices: int) -> list[float] | None:
        """Rows a second of each slice for dealing slices out: every slice counts for something."""
        rates = self.of(stage, slices)
        if rates is None:
            return None
        floor = FLOOR * sum(rates) / slices
        return [rate + floor for rate in rates]


def shares(rates: Sequence[float], owners: Sequence[int], busy: Mapping[int, float]) -> list[float]:
    """For each slice the share of one container's time that it takes: its part, by rows, of its owner's busy share."""
    whole: dict[int, float] = {}
    for s, container in enumerate(owners):
        whole[container] = whole.get(container, 0.0) + rates[s]
    return [busy.get(c, 0.0) * (rates[s] / whole[c]) if whole[c] > 0 else 0.0 for s, c in enumerate(owners)]


def within_slots(containers: Iterable[int], homes: Mapping[int, str], slots: Mapping[str, int]) -> list[int]:
    """The containers that may work. A node with n slots has its first n containers among them, a node without a limit
    all.
    """
    taken: dict[str, int] = {}
    found = []
    for c in containers:
        node = homes.get(c, "")
        taken[node] = taken.get(node, 0) + 1
        if taken[node] <= slots.get(node, taken[node]):
            found.append(c)
    return found
