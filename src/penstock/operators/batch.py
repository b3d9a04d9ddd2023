"""Custom operators on batches: all keys of an epoch at once, in numpy and polars.

::

    class Gaps(ps.BatchOperator):
        count = ps.column(int)                       # state: one number for each key
        last = ps.column(float, math.nan)

        def on_batch(self, batch: ps.Batch, state: ps.State) -> pl.DataFrame:
            at = batch["at"]
            gap = at - batch.previous(at, state.last)
            state.count += batch.counts
            state.last = batch.last(at)
            return batch.frame.select("word", gap=gap)

What a container got in an epoch comes as one batch, its rows grouped by key: rows of a key are next to one another, in
source order, and a key's state is one place in arrays. Millions of rows a second, because Python is called once.

**Results must not depend on where a batch ends**: an epoch may be cut anywhere. That is the operator's own duty here.
Two things make it easy. ``previous`` reaches back into the state for the first row of each key; and ``scan`` steps
through the rows of every key one by one, in order, so that what it computes is what a loop over events would, to the
last bit. Sums of floats are another place to look: ``np.add.at(state.total, batch.key_index, batch["x"])`` adds one by
one to what is there; adding a batch's own sum would not. ``testing.assert_any_cut``
tries many cuts and compares.

Rows that are given back carry the key columns: by their hash they are brought into an order that does not depend on how
many containers there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import polars as pl

from penstock.errors import FlowError
from penstock.operators.base import (
    HASH,
    NEVER,
    ORDER,
    Applied,
    Arrival,
    KeyedOperator,
    Prepared,
    Tick,
    in_order,
)
from penstock.operators.custom import (
    MARK,
    build_custom,
    check_time,
    group_by_key,
    instance,
    with_marks,
    with_times,
)
from penstock.operators.event_time import Duration
from penstock.operators.order import tag_columns, with_tags
from penstock.operators.statelayout import MsgspecCodec, type_name
from penstock.operators.statelib import from_us
from penstock.operators.steps import user_code_error
from penstock.state.hashing import hash_columns
from penstock.state.table import KeyedTable, TableSpec, ValueType, numeric, objects

_SCAN_WIDTH_MIN: Final = 24
"""Below so many keys a vector operation costs more than as many scalar ones."""


@dataclass(frozen=True)
class Column:
    """See :func:`column`."""

    kind: Any
    default: Any

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """None: Python objects."""
        try:
            dtype = np.dtype(self.kind)
        except TypeError:
            return None
        return dtype if dtype.kind in "biuf" else None

    def value_type(self) -> ValueType:
        return objects(MsgspecCodec(self.kind)) if self.dtype is None else numeric(self.dtype, self.default)


def column(kind: Any, default: Any = None) -> Any:
    """A state of a ``ps.BatchOperator``: one value for each key, over all keys an array.

    ``kind``: int, float, bool or a numpy type of these; or any type msgspec knows, kept as Python objects (None where
    there is none). ``default`` is what a new key has: 0, unless it is given.
    """
    made = Column(kind, default)
    if made.dtype is not None:
        made = Column(kind, 0 if default is None else default)
        try:
            numeric(made.dtype, made.default)
        except (TypeError, ValueError, OverflowError) as error:
            raise FlowError(f"ps.column: {default!r} is no default for {kind}: {error}.") from None
    elif default is not None:
        raise FlowError(
            "ps.column: a column of objects has no default: a new key has None.",
            remedy="Leave the default out, and replace None in on_batch.",
        )
    return made


class Batch:
    """The rows of an epoch, grouped by key; those of one key in source order."""

    def __init__(
        self,
        frame: pl.DataFrame,
        keys: pl.DataFrame,
        starts: np.ndarray,
        watermarks: np.ndarray | None = None,
        clock_ms: int = 0,
    ) -> None:
        self.frame = frame
        """The rows."""
        self.keys = keys
        """The distinct keys, in the order of the state's arrays."""
        self.starts = starts
        """Where the rows of each key begin."""
        self.counts: np.ndarray = np.diff(starts, append=frame.height)
        """How many rows each key has."""
        self.watermarks = watermarks
        """With ``process(..., on=column)``: the watermark at each row, as datetime64[us]; NaT where nothing is known
        yet. It depends on the input alone."""
        self._clock_ms = clock_ms

    @property
    def clock(self) -> datetime:
        """The clock when this epoch was planned, in UTC: logged, so a replay sees the same; but it shows the cut."""
        return from_us(self._clock_ms * 1000, UTC)

    def __len__(self) -> int:
        return self.frame.height

    def __getitem__(self, name: str) -> np.ndarray:
        """A column of the rows as a numpy array."""
        return self.frame[name].to_numpy()

    @cached_property
    def key_index(self) -> np.ndarray:
        """For each row the number of its key."""
        return np.repeat(np.arange(len(self.starts)), self.counts)

    @cached_property
    def ordinal(self) -> np.ndarray:
        """For each row its position among the rows of its key in this batch, from 0."""
        return np.arange(len(self)) - self.starts[self.key_index]

    def previous(self, values: np.ndarray, before: Any) -> np.ndarray:
        """For each row the value at the row before it of the same key; for the first one, ``before`` (an array over the
        keys, as a state is, or one value for all).
        """
        out = np.empty(len(values), dtype=np.result_type(values, before))
        out[1:] = values[:-1]
        out[self.starts] = before
        return out

    def first(self, values: np.ndarray) -> np.ndarray:
        """For each key the value at its first row."""
        return values[self.starts]

    def last(self, values: np.ndarray) -> np.ndarray:
        """For each key the value at its last row."""
        return values[self.starts + self.counts - 1]

    def per_row(self, values: np.ndarray) -> np.ndarray:
        """For each row the value of its key."""
        return values[self.key_index]

    @staticmethod
    def where(condition: Any, yes: Any, no: Any) -> Any:
        """``np.where``, quick for single values too: for use in the function that ``scan`` calls."""
        if isinstance(condition, np.bool_ | bool):
            return yes if condition else no
        return np.where(condition, yes, no)

    def scan(
        self, step: Callable[..., tuple[Any, ...]], state: Sequence[np.ndarray], *rows: np.ndarray
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Step through the rows of each key in order: ``state = step(*state, *values of the row)``.

        ``state`` are arrays over the keys, ``rows`` arrays over the rows. Gives the state after each row (arrays over
        the rows) and after the last (over the keys). ``step`` is called for the first rows of all keys at once, then
        for the second rows, and so on, with arrays; and with single values where few keys are left. Write it with
        arithmetic, comparisons and ``batch.where``, not with ``if``.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            return self._scan(step, state, rows)

    def _scan(
        self, step: Callable[..., tuple[Any, ...]], state: Sequence[np.ndarray], rows: Sequence[np.ndarray]
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        ranked = np.argsort(-self.counts, kind="stable")  # keys with most rows first: each round is a prefix of them
        rank = np.empty_like(ranked)
        rank[ranked] = np.arange(len(ranked))
        widths = len(self.counts) - np.searchsorted(np.sort(self.counts), np.arange(self.counts.max()), side="right")
        edges = np.concatenate(([0], np.cumsum(widths)))
        place = edges[self.ordinal] + rank[self.key_index]  # row -> round by round, so that a round is a slice
        by_round = [_placed(values, place) for values in rows]
        now = [np.array(s[ranked]) for s in state]
        after = [np.empty(len(self), dtype=s.dtype) for s in now]
        wide = int(np.searchsorted(-widths, -_SCAN_WIDTH_MIN, side="right"))
        for begin, end in zip(edges[:wide].tolist(), edges[1 : wide + 1].tolist(), strict=True):
            made = step(*(s[: end - begin] for s in now), *(values[begin:end] for values in by_round))
            for s, new, out in zip(now, made, after, strict=True):
                s[: end - begin] = new
                out[begin:end] = new
        if wide < len(widths):
            self._scan_few(step, ranked[: int(widths[wide])], wide, now, rows, after, place)
        final = [s[rank] for s in now]
        return [out[place] for out in after], final

    def _scan_few(
        self,
        step: Callable[..., tuple[Any, ...]],
        keys: np.ndarray,
        skip: int,
        now: list[np.ndarray],
        rows: Sequence[np.ndarray],
        after: list[np.ndarray],
        place: np.ndarray,
    ) -> None:
        """The rest of the keys that have very many rows, one by one. Numpy's own scalars: they divide by zero and
        overflow as arrays do.
        """
        for k, key in enumerate(keys.tolist()):
            begin, end = int(self.starts[key]) + skip, int(self.starts[key] + self.counts[key])
            at: tuple[Any, ...] = tuple(s[k] for s in now)
            steps = [at := step(*at, *row) for row in zip(*(values[begin:end] for values in rows), strict=True)]
            for i, out in enumerate(after):
                out[place[begin:end]] = [s[i] for s in steps]
                now[i][k] = at[i]


def _placed(values: np.ndarray, place: np.ndarray) -> np.ndarray:
    out = np.empty_like(values)
    out[place] = values
    return out


class State:
    """The state of the batch's keys: each declared column is an array over them, to read and to assign."""

    new: np.ndarray
    """Which keys are seen for the first time."""

    def __init__(self, columns: Mapping[str, np.ndarray], new: np.ndarray) -> None:
        self.__dict__.update(columns)
        self.__dict__["new"] = new
        self.__dict__["_forgotten"] = np.zeros(len(new), dtype=np.bool_)
        self.__dict__["_names"] = tuple(columns)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._names:
            raise AttributeError(f"there is no state '{name}'; declare {name} = ps.column(...) in the class")
        self.__dict__[name] = value

    def forget(self, which: np.ndarray) -> None:
        """Forget keys: ``which`` is true for them. They are new when they come again."""
        self._forgotten[:] |= which


class BatchOperator:
    """Base of custom operators on batches. Declare states with ``ps.column``, override ``on_batch``."""

    def on_batch(self, batch: Batch, state: State) -> pl.DataFrame | None:
        """Called with the rows of an epoch that belong to a container's keys.

        Gives back rows of the declared schema, which has the key columns; or None. Results must not depend on where a
        batch begins and ends.
        """
        raise NotImplementedError


class Batched(KeyedOperator):
    """Runs a user's ``BatchOperator``."""

    scans = False
    hands_on = True

    def __init__(
        self,
        id: str,
        key: Sequence[str],
        operator: BatchOperator,
        schema: pl.Schema,
        output: pl.Schema,
        *,
        on: str | None = None,
        lateness_us: int = 0,
        hold_us: int = 0,
    ) -> None:
        self.id = id
        self.on = on
        self.timed = on is not None
        self.lateness_us = lateness_us
        self.hold_us = hold_us
        self.key = tuple(key)
        self.operator = operator
        self.schema = schema
        self.output = output
        self.columns: dict[str, Column] = {
            name: value
            for kind in reversed(type(operator).__mro__)
            for name, value in vars(kind).items()
            if isinstance(value, Column)
        }
        self._check()

    def _check(self) -> None:
        name = type(self.operator).__name__
        if type(self.operator).on_batch is BatchOperator.on_batch:
            raise FlowError(
                f"operator '{self.id}': {name} does not define on_batch.",
                remedy="Write def on_batch(self, batch: ps.Batch, state: ps.State) -> pl.DataFrame.",
                operator=self.id,
            )
        for k in self.key:
            if self.output.get(k) != self.schema[k]:
                raise FlowError(
                    f"operator '{self.id}': its schema must have the key column '{k}' of type {self.schema[k]}: by it "
                    "the rows of a batch are put in order.",
                    remedy=f"Add '{k}' to schema= and give it back from on_batch.",
                    operator=self.id,
                )
        if "new" in self.columns or "forget" in self.columns:
            raise FlowError(
                f"operator '{self.id}': a state cannot be called 'new' or 'forget'.",
                remedy="Give it another name.",
                operator=self.id,
            )
        for state, declared in self.columns.items():
            try:
                declared.value_type()
            except (TypeError, RuntimeError) as error:
                raise FlowError(
                    f"operator '{self.id}': state '{state}' of type {declared.kind} cannot be stored: {error}.",
                    remedy="Use numbers, builtins, a dataclass, a msgspec.Struct, or containers of these.",
                    operator=self.id,
                ) from None

    @property
    def ordered(self) -> bool:
        return True

    def time_at(self, port: int) -> str | None:
        return self.on

    def table(self) -> TableSpec | None:
        if not self.columns:
            return None
        key = pl.Schema({k: self.schema[k] for k in self.key})
        return TableSpec(key, {f"__s.{name}": c.value_type() for name, c in self.columns.items()})

    def prepare(self, frame: pl.DataFrame, from_source: bool, port: int = 0, clock_us: int = 0) -> Prepared:
        return (
            Prepared(frame) if self.on is None else with_times(self.id, frame, self.on, self.lateness_us, from_source)
        )

    def apply(self, table: KeyedTable | None, arrivals: Sequence[Arrival], tick: Tick) -> Applied:
        arrivals = [a for a in arrivals if a.frame.height]
        if not arrivals:
            return Applied(pl.DataFrame(schema={**self.output, ORDER: pl.UInt64()}))
        ordered = with_marks(arrivals, tick) if self.timed else in_order(arrivals)
        frame, starts = group_by_key(ordered.sort(HASH, maintain_order=True), self.key)
        hashes = frame[HASH].to_numpy()
        marks = frame[MARK].to_numpy() if self.timed else None
        tags = tag_columns(frame) if tick.tells else []
        if tags and marks is not None:
            tags = [marks, np.ones(len(marks), dtype=np.int64), *tags]
        frame = frame.select(self.schema.names())
        batch = Batch(frame, frame.select(self.key)[starts], starts, _as_times(marks), tick.clock_ms)
        new = np.ones(len(starts), dtype=np.bool_)
        columns: dict[str, np.ndarray] = {}
        if table is not None:
            rows, new = table.upsert(hashes[starts], batch.keys)
            columns = {name: table.column(f"__s.{name}")[rows] for name in self.columns}
        state = State(columns, new)
        try:
            out = self._result(self.operator.on_batch(batch, state))
            if table is not None:
                self._store(table, rows, state)
        except (Exception, SystemExit) as error:
            raise user_code_error(self.id, tick.epoch, frame.row(0, named=True), error) from error
        if tags:
            return Applied(self._handed_on(out, tags, hashes, starts))
        return Applied(self._tagged(out, hashes, hashes[starts]))

    def _result(self, given: Any) -> pl.DataFrame:
        if given is None:
            return pl.DataFrame(schema=self.output)
        if isinstance(given, pl.LazyFrame):
            given = given.collect()
        if not isinstance(given, pl.DataFrame):
            raise TypeError(f"on_batch returned {type(given).__name__}, not a polars DataFrame")
        missing = [c for c in self.output if c not in given.columns]
        unknown = [c for c in given.columns if c not in self.output]
        if missing or unknown:
            raise TypeError(f"on_batch returned rows with missing columns {missing}, unknown columns {unknown}")
        if given.schema == self.output:
            return given
        return given.select(pl.col(c).cast(t) for c, t in self.output.items())

    def _store(self, table: KeyedTable, rows: np.ndarray, state: State) -> None:
        for name, declared in self.columns.items():
            value = np.asarray(getattr(state, name), dtype=declared.dtype or object)
            if value.shape not in ((), (len(rows),)):
                raise ValueError(f"state '{name}' has shape {value.shape}, not one value for each of {len(rows)} keys")
            table.column(f"__s.{name}")[rows] = value
        if state._forgotten.any():
            table.delete(rows[state._forgotten])

    def _handed_on(
        self, out: pl.DataFrame, tags: Sequence[np.ndarray], hashes: np.ndarray, starts: np.ndarray
    ) -> pl.DataFrame:
        """With the tags of the row that caused each. What is not one row for each row, as it came, is taken to be
        caused by the last row of its key.
        """
        made = hash_columns(out, self.key)
        if np.array_equal(made, hashes):
            return with_tags(out, tags)
        lasts = np.append(starts[1:], len(hashes)) - 1
        unknown = ~np.isin(made, hashes)
        if unknown.any():
            key = out.select(self.key).row(int(np.argmax(unknown)))
            raise ValueError(f"on_batch gave a row of the key {key}, which is not in its batch: nobody can tell when")
        cause = lasts[np.searchsorted(hashes[lasts], made)]
        return with_tags(out, [values[cause] for values in tags])

    def _tagged(self, out: pl.DataFrame, row_hashes: np.ndarray, key_hashes: np.ndarray) -> pl.DataFrame:
        """With the hash of each row's key, in its order. Rows, or keys, as they came need no sorting."""
        tags = hash_columns(out, self.key)
        tagged = out.with_columns(pl.Series(ORDER, tags, dtype=pl.UInt64))
        if np.array_equal(tags, row_hashes) or np.array_equal(tags, key_hashes):
            return tagged
        return tagged.sort(ORDER, maintain_order=True)

    def fingerprint(self) -> dict[str, Any]:
        return {
            "operator": "batch",
            "key": {k: str(self.schema[k]) for k in self.key},
            "states": {n: str(c.dtype or type_name(c.kind)) for n, c in self.columns.items()},
        }

    def describe(self) -> str:
        return type(self.operator).__name__


def build_operator(
    id: str,
    key: Sequence[str],
    operator: Any,
    schema: pl.Schema,
    output: pl.Schema,
    *,
    on: str | None = None,
    lateness: Duration = 0,
    hold: Duration = 0,
) -> KeyedOperator:
    """What ``KeyedStream.process`` adds to the flow: for events, or for batches."""
    operator = instance(id, operator)
    if not isinstance(operator, BatchOperator):
        return build_custom(id, key, operator, schema, output, on=on, lateness=lateness, hold=hold)
    lateness_us, hold_us = check_time(id, on, lateness, hold, schema)
    return Batched(id, key, operator, schema, output, on=on, lateness_us=lateness_us, hold_us=hold_us)


def _as_times(marks: np.ndarray | None) -> np.ndarray | None:
    if marks is None:
        return None
    return np.where(marks == NEVER, np.datetime64("NaT", "us"), marks.astype("datetime64[us]"))


__all__ = [
    "Batch",
    "BatchOperator",
    "Batched",
    "Column",
    "State",
    "build_operator",
    "column",
]
