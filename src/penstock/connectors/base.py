"""What a source and a sink are.

**A source is replayable by range.** The driver asks it to ``plan`` the next range after an offset; the range is logged;
then it may be cut into ``splits`` for any parallelism, and each split is ``read`` on a worker. The same range must
give the same rows in the same order for ever: map order times row order is the *source order* which every stateful
operator sees, whatever the parallelism.

**A sink is idempotent by epoch.** Workers ``write_part`` into staging, the driver ``commit``s an epoch atomically; to
commit the same epoch again changes nothing. Sinks that only make sense in one place (console, memory, a user's
function) set ``collects`` and receive whole tables on the driver.

Offsets, splits, facts and part references are JSON-able: they are logged and shipped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import polars as pl

Json = Any
Offset = dict[str, Json]
Split = dict[str, Json]
PartRef = dict[str, Json]


@dataclass(frozen=True)
class BadRecord:
    """A record that could not become a row: where it was, why, and what it looked like."""

    source: str
    offset: str
    reason: str
    raw: str


@dataclass(frozen=True)
class ReadResult:
    frame: pl.DataFrame
    bad: tuple[BadRecord, ...] = ()
    punctuation: tuple[tuple[int, int], ...] = ()
    """Promises (see ``Source.punctuated``): after so many rows of the frame, no row earlier than that time (us)."""
    set_aside: tuple[BadRecord, ...] = ()
    """Parts of the input that the user has chosen to go on without: dead letters, even with ``on_error="fail"``."""


@dataclass(frozen=True)
class SourceRange:
    """The next bounded range of a source: ``(start, end]`` in its own offsets.

    ``facts`` is what the source must still know after a restart to read this range again (for example the files it has
    discovered since the last range). Facts are logged with the epoch and handed back by ``remember``.
    """

    start: Offset
    end: Offset
    rows_estimate: int
    facts: tuple[Json, ...] = ()


@dataclass(frozen=True)
class Backlog:
    """What waits in a source, as far as the source can tell. None: not known."""

    rows: int | None = None
    """Rows that wait. An estimate is good enough."""
    bytes: int | None = None


@dataclass(frozen=True)
class SourceContext:
    """What a source gets when the job opens it (driver side)."""

    source_id: str
    checkpoint: str | None
    spark: Any = None
    store: Any = None
    """The store at ``checkpoint``, with the job's retries and time-outs; None without a checkpoint directory."""


class Source(ABC):
    """Replayable by range. Pickled to workers: hold no open files or sockets outside ``open`` and ``close``."""

    punctuated: bool = False
    """Its reads carry punctuation, which alone then drives event time: the greatest time seen says nothing."""

    @abstractmethod
    def schema(self) -> pl.Schema:
        """Columns of the rows, known when the flow is built. Raise SourceError when it cannot be known."""

    @abstractmethod
    def initial_offset(self) -> Offset: ...

    @abstractmethod
    def plan(self, start: Offset, rows_max: int) -> SourceRange | None:
        """The next range of about ``rows_max`` rows after ``start``; None when nothing new is there now."""

    @abstractmethod
    def splits(self, start: Offset, end: Offset, parallelism: int) -> list[Split]:
        """Cut a range into at most ``parallelism`` splits (at least one), contiguous and in source order."""

    @abstractmethod
    def read(self, source_id: str, split: Split) -> ReadResult:
        """Worker side. The frame has exactly ``schema()``."""

    def backlog(self, offset: Offset) -> Backlog:
        """What waits after ``offset`` now. The thread that plans asks once or twice a second, so the answer is cheap: a
        look at what has arrived, never a read of the data. A source that cannot tell leaves this as it is.
        """
        return Backlog()

    def exhausted(self, offset: Offset) -> bool:
        """True when no row can ever come after ``offset`` (a bounded source that has been read)."""
        return False

    def open(self, context: SourceContext) -> None:
        """Driver side, before the first plan."""

    def remember(self, facts: Sequence[Json]) -> None:
        """Driver side, after ``open`` and before the first plan: all facts logged so far, in order."""

    def committed(self, end: Offset) -> None:
        """Driver side: a checkpoint covers everything up to ``end``; it will never be read again."""

    def close(self) -> None:
        """Driver side, at the end of the job."""

    def describe(self) -> str:
        return type(self).__name__


@dataclass(frozen=True)
class SinkContext:
    """What a sink gets when the job opens it (driver side). ``job_id`` is stable over restarts of one checkpoint."""

    sink_id: str
    job_id: str
    schema: pl.Schema
    resumed: bool = False
    spark: Any = None
    options: Mapping[str, Json] = field(default_factory=dict)


class Sink(ABC):
    """Idempotent by epoch. Instances are pickled to workers unless ``collects``."""

    collects: bool = False

    def open(self, context: SinkContext) -> None:
        """Driver side, before the first epoch. Refuse here an output that belongs to another job."""

    def write_part(self, epoch: int, attempt: int, part: str, frame: pl.DataFrame) -> PartRef | None:
        """Worker side: write one task's share into staging. ``part`` is unique within the epoch and stable over
        attempts.
        """
        raise NotImplementedError

    def commit(self, epoch: int, attempt: int, parts: Sequence[PartRef]) -> None:
        """Driver side: publish the epoch atomically. A second commit of an epoch is a no-op."""
        raise NotImplementedError

    def write(self, epoch: int, frame: pl.DataFrame) -> None:
        """Driver side, only with ``collects``: the epoch's whole table."""
        raise NotImplementedError

    def close(self) -> None:
        """Driver side, at the end of the job, failed or not."""

    def describe(self) -> str:
        return type(self).__name__
