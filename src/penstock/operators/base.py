"""What an operator is to the engines.

A flow is cut into stages. A stage has a *root*, which is a source or a keyed operator, and *steps*: the stateless
operators that follow it until the next exchange or sink. Engines know only the two interfaces here:

* ``Step`` maps a frame to a frame. It is row-wise as far as results go: cutting its input anywhere changes nothing.
* ``KeyedOperator`` has two halves. ``prepare`` runs before the exchange, on whichever worker made the rows (assign
  panes, aggregate partially); ``apply`` runs in the container that owns the keys, on the table that holds its state.

Both must be pure functions of their arguments: an epoch that runs again gives the same rows. Frames carry hidden
columns whose names begin with ``__``:

* ``__h``: the stable hash of the exchange key;
* ``__o0``, ``__o1`` ...: the order of the input that caused a row (``order.py``), where somebody behind needs it. An
  operator that does not hand on the order of its input gives ``__o``, the hash of the key that made a row, and the task
  makes tags of it and of ``__due``, when the row was due;
* ``__w``: what the rows up to a row have promised, where that is not the greatest event time of the rows themselves:
  the last punctuation of the source, or how far time has come behind a keyed stage;
* ``__by``: the time by which rows of several sources are put in order (``union(by=)``).

**Time.** An operator with ``timed`` has a watermark for each of its ports. The watermark *at a row* is what the rows
before it, in the order of its own source, have promised: the last punctuation, or the greatest event time less the
lateness. Whether a row is late is decided by that alone, so it does not depend on how input is cut into epochs and
splits, nor on how two sources happened to interleave. What closes a window is the least of the watermarks of all
inputs, which is never ahead of any of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from penstock.frames import sorted_by, with_column
from penstock.operators.order import in_tag_order, order_of, stacked_by_tags
from penstock.state.table import KeyedTable, TableSpec

HASH = "__h"
ORDER = "__o"
DUE = "__due"
PUNCTUATION = "__w"
BY = "__by"

NEVER = -(2**63) + 1
"""A watermark before all time: nothing is late, nothing is closed."""
FOREVER = 2**63 - 1
"""The watermark of an input that has ended: everything is closed."""


def visible(columns: Sequence[str]) -> list[str]:
    return [c for c in columns if not c.startswith("__")]


def tags(frame: pl.DataFrame) -> list[str]:
    """The hidden columns that a stateless step hands on."""
    return [*order_of(frame), *(c for c in (PUNCTUATION, BY) if c in frame.columns)]


Dead = tuple[str, str, str, str]
"""A record set aside: operator, offset, reason, raw."""


@dataclass
class StepContext:
    """What a step may use, and where it reports records it had to give up."""

    epoch: int
    on_error: str = "dead_letter"
    dead: list[Dead] = field(default_factory=list)
    punctuation: int = NEVER
    """The last punctuation of this split of a source."""


class Step(ABC):
    """A stateless operator."""

    id: str

    @abstractmethod
    def run(self, frame: pl.DataFrame, context: StepContext) -> pl.DataFrame: ...

    def describe(self) -> str:
        return type(self).__name__.lower()


@dataclass(frozen=True)
class Prepared:
    """Rows ready for the exchange, and the greatest event time among the rows they were made of (microseconds)."""

    frame: pl.DataFrame
    time_max: int | None = None
    late: int = 0
    dead: tuple[Dead, ...] = ()


@dataclass(frozen=True)
class Arrival:
    """One upstream task's rows for this container. Arrivals come sorted by (port, origin, index).

    ``watermark`` is the watermark of its own input as of the rows before this task's, in source order: what makes
    lateness independent of how input is cut into epochs and splits.
    """

    frame: pl.DataFrame
    origin: str
    index: int
    from_source: bool
    watermark: int = NEVER
    port: int = 0


@dataclass(frozen=True)
class Tick:
    """Time, as the log has it."""

    epoch: int
    watermark_before: int = NEVER
    watermark: int = NEVER
    clock_ms: int = 0
    ports: tuple[tuple[int, int], ...] = ()
    """For an operator with several inputs: watermark before and after, of each port."""
    tells: bool = False
    """Somebody behind needs to know which row caused which: rows that are handed on carry their order."""


@dataclass(frozen=True)
class Applied:
    frame: pl.DataFrame
    late: int = 0
    dead: tuple[Dead, ...] = ()


class KeyedOperator(ABC):
    """An operator whose state is partitioned by key."""

    id: str
    key: tuple[str, ...]
    """Columns of the *prepared* rows by which they are exchanged."""
    output: pl.Schema
    identity: tuple[str, ...] | None = None
    """For a stream of updates: the columns that say which earlier row a row replaces."""
    timed: bool = False
    """Has a watermark."""
    clocked: bool = False
    """Its time is the clock of the epoch, as logged, not a column."""
    lateness_us: int = 0
    hold_us: int = 0
    """How far behind the watermark an output row's own time may lie."""
    scans: bool = True
    """It looks at all of its state, and not only at the keys that came: then all of it must be in the table."""
    hands_on: bool = False
    """It gives rows for single rows of its input, in their order."""
    due: str | None = None
    """The output column that says when the watermark let a row go, if there is one: rows go on in that order."""

    @property
    def ordered(self) -> bool:
        """Its results depend on the order in which the rows of a key come."""
        return False

    @property
    def merges(self) -> bool:
        """If it has several inputs, their rows must be brought into one order before it."""
        return self.ordered or self.hands_on

    @property
    def due_hold_us(self) -> int:
        """How far behind the time at which it was due an output row's own time may lie."""
        return self.hold_us

    def keys_at(self, port: int) -> tuple[str, ...]:
        """The key in the rows of an input, before ``prepare``."""
        return self.key

    def time_at(self, port: int) -> str | None:
        """The column of event time in the rows of an input."""
        return None

    @abstractmethod
    def table(self) -> TableSpec | None:
        """The layout of its state; None when nothing is kept from one epoch to the next."""

    @abstractmethod
    def prepare(self, frame: pl.DataFrame, from_source: bool, port: int = 0, clock_us: int = 0) -> Prepared:
        """Before the exchange; behind keyed stages after it, if order matters (``Edge.whole``). ``from_source``: the
        rows are in order, those of one split of a source or of all its rows, so that the watermark at each can be told.
        ``port``: which input. ``clock_us``: the clock of the epoch.
        """

    @abstractmethod
    def apply(self, table: KeyedTable | None, arrivals: Sequence[Arrival], tick: Tick) -> Applied: ...

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """What its state depends on: two flows agree on a state when these are equal."""

    def describe(self) -> str:
        return type(self).__name__.lower()


def in_order(arrivals: Sequence[Arrival]) -> pl.DataFrame:
    """All rows of an epoch in an order that does not depend on the parallelism: by their tags, or as a source has them:
    by task, then position. The tags stay.
    """
    whole = stacked_by_tags([a.frame for a in arrivals])
    return in_tag_order(whole)


def row_watermarks(frame: pl.DataFrame, times_us: np.ndarray, lateness_us: int) -> np.ndarray:
    """The watermark at each row of a split of a source, as far as the split itself tells."""
    given = PUNCTUATION in frame.columns  # what has been promised up to each row
    reached = frame[PUNCTUATION].to_numpy() if given else np.maximum.accumulate(times_us)
    return np.where(reached == NEVER, reached, reached - lateness_us)


def one_zero(x: pl.Expr) -> pl.Expr:
    """-0.0 as 0.0: the two are equal, and which of them came first must not show. (Polars leaves out an added 0.0.)"""
    return pl.when(x == 0.0).then(x.abs()).otherwise(x)


def unique_keys(hashes: np.ndarray, keys: pl.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """First position of each distinct key, in order of first appearance, and for every row the number of its key."""
    leader = _first_alike(hashes)
    leads = np.zeros(len(hashes), dtype=np.bool_)
    leads[leader] = True
    first = np.flatnonzero(leads)
    inverse = (np.cumsum(leads) - 1)[leader]
    same = keys.equals(keys[first[inverse]], null_equal=True) if len(first) < len(hashes) else True
    if same:
        return first, inverse
    # Two different keys share a 64-bit hash: rare enough to be slow, never wrong.
    numbers: dict[Any, int] = {}
    firsts: list[int] = []
    out = np.empty(len(hashes), dtype=np.int64)
    for i, values in enumerate(keys.iter_rows()):
        row = tuple("\0nan" if value != value else value for value in values)  # all NaN are one key
        if row not in numbers:
            numbers[row] = len(firsts)
            firsts.append(i)
        out[i] = numbers[row]
    return np.asarray(firsts, dtype=np.int64), out


def _first_alike(hashes: np.ndarray) -> np.ndarray:
    """For each row the first row of the same hash: through a scratch table, at a third of the cost of a sort.

    All rows write themselves into the slot of their hash, the first ones last; who finds a row of its own hash there
    is done, the others (another hash has their slot) try again among themselves.
    """
    bits = max(int(2 * len(hashes)).bit_length(), 1)
    slots = np.empty(1 << bits, dtype=np.int64)
    with np.errstate(over="ignore"):
        slot = ((hashes * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(64 - bits)).astype(np.int64)
    out = np.empty(len(hashes), dtype=np.int64)
    left = np.arange(len(hashes))
    while left.size:
        at = slot[left]
        slots[at[::-1]] = left[::-1]
        found = slots[at]
        same = hashes[found] == hashes[left]
        out[left[same]] = found[same]
        left = left[~same]
    return out


def canonical(frame: pl.DataFrame, hashes: np.ndarray) -> pl.DataFrame:
    """Tag rows with the hash of their key and sort by it, so that output does not depend on where state happened to
    lie.
    """
    return sorted_by(with_column(frame, pl.Series(ORDER, hashes, dtype=pl.UInt64)), ORDER)
