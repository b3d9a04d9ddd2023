"""Made-up input, as replayable as a file: row ``i`` is a pure function of ``(seed, i)``.

Rows are made in blocks of a fixed size, each with a random generator of its own seeded by ``(seed, block)``. Whatever
range and parallelism a row is asked for in, it is cut out of the same block.

A rate is kept by the clock alone: ``rows_per_s`` times the seconds since the job opened the source. Only *how many*
rows there are by now depends on time, never what is in them.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import islice, pairwise, product
from typing import Any

import numpy as np
import polars as pl

from penstock.connectors.base import Backlog, Offset, ReadResult, Source, SourceContext, SourceRange, Split
from penstock.connectors.rows import SchemaSpec, polars_schema
from penstock.connectors.skips import leave_out_rows, read_record_skips
from penstock.errors import FlowError, UserCodeError

BLOCK_ROWS = 8192

BatchFunction = Callable[[int, int, np.random.Generator], Any]


def generator(
    fn: BatchFunction | Mapping[str, BatchFunction],
    *,
    schema: SchemaSpec | None = None,
    rows: int | None = None,
    rows_per_s: float | None = None,
    seed: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> GeneratorSource:
    """Rows from a function: ``fn(first, n, rng) -> pl.DataFrame`` of ``n`` rows, numbers ``first`` to ``first+n-1``.

    ``fn`` may also map column names to such functions that return one column each. It must depend on its arguments
    only. ``rows`` ends the source, ``rows_per_s`` slows it down. Without ``schema`` the first block says it.
    """
    return GeneratorSource(fn, schema=schema, rows=rows, rows_per_s=rows_per_s, seed=seed, clock=clock)


def words(
    *,
    vocabulary: int | Sequence[str] = 10_000,
    zipf: float = 1.0,
    rows: int | None = None,
    rows_per_s: float | None = None,
    seed: int = 0,
    start: dt.datetime = dt.datetime(2024, 1, 1),
    events_per_s: float | None = None,
    disorder: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
) -> WordSource:
    """A stream of words: ``word`` (the r-th of the vocabulary comes with a weight of 1 / r**zipf) and ``ts``.

    Event time starts at ``start`` and advances by ``1 / events_per_s`` a row (``rows_per_s`` if left out, else 1000 a
    second); each row is up to ``disorder`` seconds late.
    """
    return WordSource(
        vocabulary=vocabulary,
        zipf=zipf,
        rows=rows,
        rows_per_s=rows_per_s,
        seed=seed,
        start=start,
        events_per_s=events_per_s or rows_per_s or 1000.0,
        disorder=disorder,
        clock=clock,
    )


class _NumberedSource(Source):
    """A source whose offsets are row numbers: everything but the rows."""

    def __init__(self, *, rows: int | None, rows_per_s: float | None, seed: int, clock: Callable[[], float]) -> None:
        if rows is not None and rows < 0:
            raise FlowError(f"rows={rows} is negative.", remedy="Give a number of rows, or None for no end.")
        if rows_per_s is not None and rows_per_s <= 0:
            raise FlowError(f"rows_per_s={rows_per_s} is not above 0.", remedy="Give a rate, or None for no limit.")
        if seed < 0:
            raise FlowError(f"seed={seed} is negative.", remedy="Give 0 or more.")
        self.rows, self.rows_per_s, self.seed = rows, rows_per_s, seed
        self._clock: Callable[[], float] | None = clock
        self._opened_at: float | None = None
        self._resumed_at: int | None = None
        self._skipped: list[int] = []
        self.notices: list[str] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_clock": None}

    def initial_offset(self) -> Offset:
        return {"row": 0}

    def open(self, context: SourceContext) -> None:
        assert self._clock is not None, "opened on the driver, where the clock is"
        self._opened_at, self._resumed_at = self._clock(), None
        skipped, self.notices = read_record_skips(context)
        self._skipped = [int(row) for row in skipped]

    def exhausted(self, offset: Offset) -> bool:
        return self.rows is not None and offset["row"] >= self.rows

    def plan(self, start: Offset, rows_max: int) -> SourceRange | None:
        first: int = start["row"]
        last = first + rows_max
        if self.rows is not None:
            last = min(last, self.rows)
        if self.rows_per_s is not None:
            last = min(last, self._available(first))
        if last <= first:
            return None
        return SourceRange(dict(start), {"row": last}, last - first)

    def _available(self, first: int) -> int:
        assert self._clock is not None and self.rows_per_s is not None
        now = self._clock()
        if self._opened_at is None:
            self._opened_at = now
        if self._resumed_at is None:
            self._resumed_at = first
        return self._resumed_at + int((now - self._opened_at) * self.rows_per_s)

    def backlog(self, offset: Offset) -> Backlog:
        """With a rate, the rows that are due by now. Without one, all rows that are left."""
        first: int = offset["row"]
        due = self._available(first) if self.rows_per_s is not None else self.rows
        if due is None:
            return Backlog()
        return Backlog(rows=max(0, (due if self.rows is None else min(due, self.rows)) - first))

    def splits(self, start: Offset, end: Offset, parallelism: int) -> list[Split]:
        first, last = start["row"], end["row"]
        # Cut between blocks where there are enough of them: a block cut in two is made twice.
        grain = BLOCK_ROWS if last - first >= 2 * parallelism * BLOCK_ROWS else 1
        inner = {round((first + (last - first) * k / parallelism) / grain) * grain for k in range(1, parallelism)}
        cuts = [first, *sorted(c for c in inner if first < c < last), last]
        splits: list[Split] = [{"first": a, "last": b} for a, b in pairwise(cuts)]
        if self._skipped:
            for split in splits:
                split["skip"] = [row for row in self._skipped if split["first"] <= row < split["last"]]
        return splits

    def _result(self, source_id: str, split: Split, frame: pl.DataFrame) -> ReadResult:
        first = split["first"]
        rows = [row - first for row in split.get("skip", ())]
        frame, letters = leave_out_rows(frame, rows, source_id, lambda row: str(first + row))
        return ReadResult(frame, set_aside=tuple(letters))

    def _rng(self, block: int) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, block])))


class GeneratorSource(_NumberedSource):
    """See :func:`generator`."""

    def __init__(
        self,
        fn: BatchFunction | Mapping[str, BatchFunction],
        *,
        schema: SchemaSpec | None,
        rows: int | None,
        rows_per_s: float | None,
        seed: int,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(rows=rows, rows_per_s=rows_per_s, seed=seed, clock=clock)
        self._fn = dict(fn) if isinstance(fn, Mapping) else fn
        self._schema = polars_schema(schema) if schema is not None else None

    def schema(self) -> pl.Schema:
        if self._schema is None:
            self._schema = self._call("generator", 0).schema
        return self._schema

    def __getstate__(self) -> dict[str, Any]:
        self.schema()
        return super().__getstate__()

    def read(self, source_id: str, split: Split) -> ReadResult:
        first, last = split["first"], split["last"]
        frames = []
        for block in range(first // BLOCK_ROWS, -(-last // BLOCK_ROWS)):
            base = block * BLOCK_ROWS
            frame = self._call(source_id, block)
            frames.append(frame.slice(max(first - base, 0), min(last - base, BLOCK_ROWS) - max(first - base, 0)))
        return self._result(source_id, split, pl.concat(frames) if frames else pl.DataFrame(schema=self.schema()))

    def _call(self, source_id: str, block: int) -> pl.DataFrame:
        first, rng = block * BLOCK_ROWS, self._rng(block)
        try:
            if isinstance(self._fn, dict):
                frame = pl.DataFrame({name: column(first, BLOCK_ROWS, rng) for name, column in self._fn.items()})
            else:
                frame = self._fn(first, BLOCK_ROWS, rng)
            if not isinstance(frame, pl.DataFrame):
                raise TypeError(f"it returned a {type(frame).__name__}, not a polars DataFrame")
            if frame.height != BLOCK_ROWS:
                raise ValueError(f"it returned {frame.height} rows when asked for {BLOCK_ROWS}")
            if self._schema is not None:
                frame = frame.select(list(self._schema)).cast(self._schema)
            return frame
        except Exception as error:
            raise UserCodeError(
                f"The function of source {source_id!r} failed for the rows from {first}: {error}",
                remedy="It is called as fn(first, n, rng) and must return a DataFrame of n rows of the schema.",
                operator=source_id,
                cause=repr(error),
            ) from error

    def describe(self) -> str:
        return f"generator, {_pace(self)}"


class WordSource(_NumberedSource):
    """See :func:`words`. Random numbers come block by block, the rest is done once for the whole range."""

    def __init__(
        self,
        *,
        vocabulary: int | Sequence[str],
        zipf: float,
        rows: int | None,
        rows_per_s: float | None,
        seed: int,
        start: dt.datetime,
        events_per_s: float,
        disorder: float,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(rows=rows, rows_per_s=rows_per_s, seed=seed, clock=clock)
        self.vocabulary = vocabulary if isinstance(vocabulary, int) else tuple(vocabulary)
        if not self.vocabulary or (isinstance(self.vocabulary, int) and self.vocabulary < 1):
            raise FlowError(
                "words() needs a vocabulary of at least one word.", remedy="Give vocabulary=10_000, or a list."
            )
        if zipf < 0 or disorder < 0 or events_per_s <= 0:
            raise FlowError(
                f"words(): zipf={zipf} and disorder={disorder} must be 0 or more, events_per_s={events_per_s} above 0.",
                remedy="Leave them out for the defaults.",
            )
        self.zipf, self.disorder, self.events_per_s = zipf, disorder, events_per_s
        naive = start if start.tzinfo is None else start.astimezone(dt.UTC).replace(tzinfo=None)
        self._start_us = (naive - dt.datetime(1970, 1, 1)) // dt.timedelta(microseconds=1)

    def schema(self) -> pl.Schema:
        return pl.Schema({"word": pl.String(), "ts": pl.Datetime("us")})

    def read(self, source_id: str, split: Split) -> ReadResult:
        first, last = split["first"], split["last"]
        table, cumulative = _tables(self.vocabulary, self.zipf)
        blocks = range(first // BLOCK_ROWS, -(-last // BLOCK_ROWS))
        columns = 2 if self.disorder else 1
        uniform = np.empty((columns, len(blocks) * BLOCK_ROWS))
        for i, block in enumerate(blocks):
            uniform[:, i * BLOCK_ROWS : (i + 1) * BLOCK_ROWS] = self._rng(block).random((columns, BLOCK_ROWS))
        cut = slice(first - blocks.start * BLOCK_ROWS, last - blocks.start * BLOCK_ROWS)
        ranks = np.searchsorted(cumulative, uniform[0, cut], side="right")
        at = np.arange(first, last, dtype=np.float64) * (1e6 / self.events_per_s)
        if self.disorder:
            at -= uniform[1, cut] * (self.disorder * 1e6)
        frame = pl.DataFrame(
            {
                "word": table.gather(ranks.astype(np.uint32)),
                "ts": pl.Series(at.astype(np.int64) + self._start_us).cast(pl.Datetime("us")),
            }
        )
        return self._result(source_id, split, frame)

    def describe(self) -> str:
        size = self.vocabulary if isinstance(self.vocabulary, int) else len(self.vocabulary)
        return f"words out of {size}, {_pace(self)}"


def _pace(source: _NumberedSource) -> str:
    rate = f"{source.rows_per_s:g} rows/s" if source.rows_per_s else "as fast as it goes"
    return rate if source.rows is None else f"{source.rows} rows, {rate}"


@lru_cache(maxsize=8)
def _tables(vocabulary: int | tuple[str, ...], zipf: float) -> tuple[pl.Series, np.ndarray[Any, Any]]:
    """The vocabulary and the cumulative probabilities of its words; built once in each process."""
    table = pl.Series(
        "word", make_vocabulary(vocabulary) if isinstance(vocabulary, int) else vocabulary, dtype=pl.String
    )
    weights = np.arange(1, len(table) + 1, dtype=np.float64) ** -zipf
    cumulative = np.cumsum(weights)
    cumulative /= cumulative[-1]
    cumulative[-1] = 1.0  # a uniform number is below 1, so no rank is ever out of the table
    return table, cumulative


_COMMON = """
the of and to in is that it was for on are with as his they at be this from have or by one had not but what all were
when we there can an your which their said if do will each about how up out them then she many some so these would
other into has more her two like him see time could no make than first been its who now people my made over did down
only way find use may water long little very after words called just where most know get through back much before go
good new write our used me man too any day same right look think also around another came come work three word must
because does part even place well such here take why things help put years different away again off went old number
great tell men say small every found still between name should home big give air line set own under read last never
left end along while might next sound below saw something thought both few those always looked show large often
together asked house world going want school important until form food keep children feet land side without boy once
animals life enough took sometimes four head above kind began almost live page got earth need far hand high year
mother light country father let night picture being study second soon story since white ever paper hard near sentence
better best across during today however sure knew try told young sun thing whole hear example heard several change
answer room sea against top turned learn point city play toward five himself usually river flow stream spring
"""


def make_vocabulary(size: int) -> list[str]:
    """Readable words, always the same: common English ones first, then made of syllables."""
    found = dict.fromkeys(islice(_COMMON.split(), size))
    syllables = [c + v for c, v in product("bdfgklmnprstvz", "aeiou")]
    length = 2
    while len(found) < size:
        for parts in product(syllables, repeat=length):
            found.setdefault("".join(parts))
            if len(found) == size:
                break
        length += 1
    return list(found)
