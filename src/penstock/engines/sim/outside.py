"""The outside of a job, which outlives all of its processes: a source that appears bit by bit, and sinks that commit.

They keep what a real connector would keep and no more, and they are strict: a range whose facts are not remembered, or
rows that a checkpoint has covered, cannot be read again.
"""

from __future__ import annotations

import errno
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import polars as pl

from penstock.connectors.base import (
    Offset,
    PartRef,
    ReadResult,
    Sink,
    SinkContext,
    Source,
    SourceContext,
    SourceRange,
    Split,
)
from penstock.engines.sim.checkers import Checkers, Violation, canonical
from penstock.engines.sim.faults import ON_PURPOSE, Faults
from penstock.engines.sim.flows import SCHEMA, Input


@dataclass(frozen=True)
class Part:
    """What a task has staged for a sink."""

    sink: str
    epoch: int
    rows: list[str]
    stray: bool
    """Of work that was given up, which may write at any time."""


@dataclass
class Outside:
    """What connectors share."""

    clock: Callable[[], float]
    random: random.Random
    faults: Callable[[], Faults]
    checkers: Checkers
    tell: Callable[[str, str], None]
    zombie: bool = False
    """What runs now belongs to work that was given up: nobody will hear of its result."""
    committed_row: dict[str, int] = field(default_factory=dict)
    staged: dict[str, Part] = field(default_factory=dict)
    """By name."""
    holds_back: bool = False
    """The last rows of every source do not appear yet."""


class SimSource(Source):
    """Rows that appear in chunks. Where a chunk ends is a fact: it is found once, logged, and remembered."""

    def __init__(self, id: str, given: Input, outside: Outside) -> None:
        self.id = id
        self.given = given
        self.outside = outside
        self.known: list[int] = []

    def schema(self) -> pl.Schema:
        return SCHEMA

    def initial_offset(self) -> Offset:
        return {"row": 0}

    def open(self, context: SourceContext) -> None:
        self.known = []

    def remember(self, facts: Sequence[Any]) -> None:
        self.known = list(facts)
        if self.known != list(self.given.ends[: len(self.known)]):
            raise Violation("no-lost-update", f"source '{self.id}' is to remember {self.known} of {self.given.ends}")

    def plan(self, start: Offset, rows_max: int) -> SourceRange | None:
        o = self.outside
        first: int = start["row"]
        seen = sum(at <= o.clock() for at in self.given.appears)
        seen = min(seen, len(self.given.ends) - o.holds_back)
        facts = self.given.ends[len(self.known) : seen]
        self.known += facts
        there = self.known[-1] if self.known else 0
        if first > there or (facts and self.given.ends[len(self.known) - len(facts)] <= first):
            raise Violation("no-lost-update", f"source '{self.id}' stands at {first} and remembers {self.known}")
        if first == there:
            return None
        last = min(there, first + o.random.randint(min(5, rows_max), rows_max))
        return SourceRange(start, {"row": last}, last - first, tuple(facts))

    def splits(self, start: Offset, end: Offset, parallelism: int) -> list[Split]:
        first, last = start["row"], end["row"]
        if last > (self.known[-1] if self.known else 0):
            raise Violation("no-lost-update", f"source '{self.id}' is to read to {last}, and remembers {self.known}")
        count = min(parallelism, last - first) - 1
        inner = self.outside.random.sample(range(first + 1, last), count) if count > 0 else []
        return [{"first": a, "last": b} for a, b in pairwise([first, *sorted(inner), last])]

    def read(self, source_id: str, split: Split) -> ReadResult:
        gone = self.outside.committed_row.get(self.id, 0)
        if split["first"] < gone and not self.outside.zombie:
            raise Violation(
                "no-lost-update", f"source '{self.id}' is to read {split}, and may have forgotten up to {gone}"
            )
        return ReadResult(self.given.rows[split["first"] : split["last"]])

    def exhausted(self, offset: Offset) -> bool:
        return bool(offset["row"] >= self.given.rows.height)

    def committed(self, end: Offset) -> None:
        self.outside.committed_row[self.id] = max(self.outside.committed_row.get(self.id, 0), end["row"])


class SimSink(Sink):
    """Parts in staging, and commits by epoch; or, with ``collects``, whole tables from the driver."""

    def __init__(self, id: str, outside: Outside, collects: bool) -> None:
        self.id = id
        self.outside = outside
        self.collects = collects

    def open(self, context: SinkContext) -> None:
        self._clear()  # whatever was staged and not committed belongs to nobody

    def write_part(self, epoch: int, attempt: int, part: str, frame: pl.DataFrame) -> PartRef | None:
        o = self.outside
        if o.random.random() < o.faults().part_fails:
            raise self._error("writing a part")
        name = f"{self.id}/{epoch}-{attempt}/{part}"
        o.staged[name] = Part(self.id, epoch, canonical(frame), o.zombie)
        return {"name": name}

    def commit(self, epoch: int, attempt: int, parts: Sequence[PartRef]) -> None:
        o = self.outside
        if o.random.random() < o.faults().commit_fails:
            raise self._error("committing")
        names = [p["name"] for p in parts]
        lost = [name for name in names if name not in o.staged]
        if lost:
            raise Violation("exactly-once", f"parts {lost} of epoch {epoch} are not in staging")
        self._publish(epoch, [row for name in names for row in o.staged[name].rows])
        self._clear(epoch)

    def write(self, epoch: int, frame: pl.DataFrame) -> None:
        if self.outside.random.random() < self.outside.faults().commit_fails:
            raise self._error("writing")
        self._publish(epoch, canonical(frame))

    def _publish(self, epoch: int, rows: list[str]) -> None:
        o = self.outside
        o.tell("sink", f"'{self.id}' has epoch {epoch}: {len(rows)} rows")
        o.checkers.exactly_once.on_rows(self.id, epoch, sorted(rows))
        if o.random.random() < o.faults().commit_unsure:
            raise self._error("committing (which took effect)")

    def _clear(self, up_to: float = math.inf) -> None:
        """Remove from staging what nobody will commit any more, as a directory of files does."""
        for name, part in list(self.outside.staged.items()):
            if part.sink == self.id and part.epoch <= up_to:
                del self.outside.staged[name]

    def _error(self, what: str) -> OSError:
        self.outside.tell("fault", f"{what} to '{self.id}' {ON_PURPOSE}")
        return OSError(errno.EIO, f"{what} {ON_PURPOSE}", self.id)


class ScriptedSource(Source):
    """The rows of a source in the very ranges that another run read."""

    def __init__(self, id: str, given: Input, script: Sequence[dict[str, Any] | None]) -> None:
        self.id = id
        self.given = given
        self.script = script
        """for each epoch its range, or None"""
        self.at = 0

    def schema(self) -> pl.Schema:
        return SCHEMA

    def initial_offset(self) -> Offset:
        return {"row": 0}

    def plan(self, start: Offset, rows_max: int) -> SourceRange | None:
        self.at += 1
        r = self.script[self.at - 1] if self.at <= len(self.script) else None
        return None if r is None else SourceRange(start, r["end"] or start, r["rows"])

    def splits(self, start: Offset, end: Offset, parallelism: int) -> list[Split]:
        return [{"first": start["row"], "last": end["row"]}]

    def read(self, source_id: str, split: Split) -> ReadResult:
        return ReadResult(self.given.rows[split["first"] : split["last"]])

    def exhausted(self, offset: Offset) -> bool:
        return self.at >= len(self.script)


__all__ = ["Outside", "Part", "ScriptedSource", "SimSink", "SimSource"]
