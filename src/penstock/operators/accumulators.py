"""What aggregates are made of: columns of state that know how to take in rows and how to merge.

An :class:`Accumulator` is one aggregate resolved against a schema. It has two ways to take in rows:

* **associative**: rows are reduced to one *partial* result for each group before the exchange, and partial results may
  be merged in any order and any grouping with the same result to the last bit;
* **row by row**: rows travel as they are and are added in source order.

An operator uses one way for all its aggregates (the first, if all of them can), so an associative accumulator knows
both. Three layouts of state cover everything: :class:`Columns` (numbers that add, or of which the least or greatest
stays), the two kinds of *picks* (the value of one row), and :class:`Objects` (a Python object for each key).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import polars as pl
import pyarrow as pa

from penstock.errors import FlowError
from penstock.operators.base import one_zero
from penstock.state.table import KeyedTable, ObjectCodec, ValueType, numeric, objects


class PlainCodec:
    """Strings, bytes, numbers and lists of them, as MessagePack."""

    def encode(self, value: Any) -> bytes:
        return msgspec.msgpack.encode(value)

    def decode(self, data: bytes) -> Any:
        return msgspec.msgpack.decode(data)


PLAIN = PlainCodec()


class Accumulator(ABC):
    """One aggregate, compiled. Column names begin with ``__`` and the aggregate's name."""

    name: str
    dtype: pl.DataType
    """Of the result."""
    associative: bool
    mergeable: bool = True
    """Two states can become one: what hopping and session windows need."""
    values: dict[str, ValueType]
    """Columns of state."""
    inputs: Sequence[pl.Expr] = ()
    """Hidden columns to work out before either form of partial rows."""

    @abstractmethod
    def partial(self) -> list[pl.Expr]:
        """Aggregations of the rows of a group. Associative only."""

    def encode(self, frame: pl.DataFrame) -> pl.DataFrame:
        """The part of a partial aggregation that is not a polars expression."""
        return frame

    @abstractmethod
    def single(self) -> list[pl.Expr]:
        """What travels of one row."""

    @abstractmethod
    def regroup(self) -> list[pl.Expr]:
        """Aggregations of partial rows. Associative only."""

    @abstractmethod
    def add(self, table: KeyedTable, rows: np.ndarray, frame: pl.DataFrame) -> None:
        """Merge partial results into distinct, touched rows."""

    @abstractmethod
    def add_rows(self, table: KeyedTable, rows: np.ndarray, frame: pl.DataFrame) -> None:
        """Add single rows, in order, to touched rows that may repeat."""

    @abstractmethod
    def raw(self, table: KeyedTable, rows: np.ndarray) -> list[pl.Series]:
        """The state of some rows, as it is."""

    @abstractmethod
    def combine(self, table: KeyedTable, rows: np.ndarray, groups: np.ndarray, count: int) -> list[pl.Series]:
        """The state of ``rows``, merged in their order into groups 0 .. count - 1; leaves the table as it is."""

    @abstractmethod
    def store(self, table: KeyedTable, rows: np.ndarray, raw: pl.DataFrame) -> None:
        """Overwrite the state of distinct, touched rows."""

    @abstractmethod
    def result(self) -> pl.Expr:
        """The result, from raw columns."""

    def layout(self) -> str:
        """What else the state depends on: part of the fingerprint."""
        return ""


# -- numbers that add, least and greatest ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """One column of partial results: how a group of rows becomes one, how two merge, and how it is stored."""

    name: str
    partial: pl.Expr
    """Aggregation of raw input rows (before the exchange)."""
    single: pl.Expr
    """The partial result of one row, for aggregates that must go row by row."""
    merge: str
    """add, min or max."""
    value: ValueType
    dtype: pl.DataType

    @property
    def ufunc(self) -> np.ufunc:
        return np.add if self.merge == "add" else np.minimum if self.merge == "min" else np.maximum

    def merge_expr(self) -> pl.Expr:
        column = pl.col(self.name)
        return column.sum() if self.merge == "add" else column.min() if self.merge == "min" else column.max()


class Columns(Accumulator):
    """Count, sum, mean, min, max: each column merges by itself.

    ``limbs`` names two columns, high and low, that together hold a sum of 64-bit integers: high * 2**32 + low. Sums
    of either half of 2**31 rows fit in 64 bits; after every merge what low has above 32 bits is carried into high, so
    the pair is exact up to 2**95, and the same however the rows were grouped.
    """

    def __init__(
        self,
        name: str,
        columns: Sequence[Column],
        result: pl.Expr,
        dtype: pl.DataType,
        associative: bool,
        limbs: tuple[str, str] | None = None,
    ) -> None:
        self.name = name
        self.columns = tuple(columns)
        self.dtype = dtype
        self.associative = associative
        self.limbs = limbs
        self.values = {c.name: c.value for c in columns}
        self._result = result

    def partial(self) -> list[pl.Expr]:
        return [c.partial.alias(c.name) for c in self.columns]

    def single(self) -> list[pl.Expr]:
        return [c.single.alias(c.name) for c in self.columns]

    def regroup(self) -> list[pl.Expr]:
        return [c.merge_expr() for c in self.columns]

    def result(self) -> pl.Expr:
        return self._result

    def layout(self) -> str:
        return "halves" if self.limbs else ""

    def add(self, table: KeyedTable, rows: np.ndarray, frame: pl.DataFrame) -> None:
        for c in self.columns:
            column = table.column(c.name)
            if column.dtype == object:
                _merge_objects(column, rows, frame[c.name].to_list(), c.merge)
            elif c.merge == "add":
                column[rows] += frame[c.name].to_numpy()
            else:
                column[rows] = c.ufunc(column[rows], frame[c.name].to_numpy())
        if self.limbs:
            high, low = table.column(self.limbs[0]), table.column(self.limbs[1])
            high[rows] += low[rows] >> 32
            low[rows] &= 0xFFFFFFFF

    def add_rows(self, table: KeyedTable, rows: np.ndarray, frame: pl.DataFrame) -> None:
        """``ufunc.at`` goes one by one, in order: sums of floats have one result."""
        for c in self.columns:
            column = table.column(c.name)
            if column.dtype == object:
                _merge_objects(column, rows, frame[c.name].to_list(), c.merge)
                continue
            with np.errstate(over="ignore", invalid="ignore"):  # inf - inf is NaN, and no surprise
                c.ufunc.at(column, rows, frame[c.name].to_numpy())
        if self.limbs:
            changed = table.distinct(rows)
            high, low = table.column(self.limbs[0]), table.column(self.limbs[1])
            high[changed] += low[changed] >> 32
            low[changed] &= 0xFFFFFFFF

    def raw(self, table: KeyedTable, rows: np.ndarray) -> list[pl.Series]:
        return [_series(c.name, table.column(c.name)[rows], c.dtype) for c in self.columns]

    def combine(self, table: KeyedTable, rows: np.ndarray, groups: np.ndarray, count: int) -> list[pl.Series]:
        merged: dict[str, np.ndarray] = {}
        for c in self.columns:
            state = table.column(c.name)[rows]
            out = np.full(count, c.value.fill, dtype=c.value.dtype)
            if out.dtype == object:
                _merge_objects(out, groups, state.tolist(), c.merge)
            else:
                with np.errstate(over="ignore", invalid="ignore"):
                    c.ufunc.at(out, groups, state)
            merged[c.name] = out
        if self.limbs:
            high, low = merged[self.limbs[0]], merged[self.limbs[1]]
            high += low >> 32
            low &= 0xFFFFFFFF
        return [_series(c.name, merged[c.name], c.dtype) for c in self.columns]

    def store(self, table: KeyedTable, rows: np.ndarray, raw: pl.DataFrame) -> None:
        for c in self.columns:
            write(table, c.name, rows, raw[c.name])


def _series(name: str, values: np.ndarray, dtype: pl.DataType) -> pl.Series:
    return pl.Series(name, values.tolist() if values.dtype == object else values, dtype=dtype)


def write(table: KeyedTable, name: str, rows: np.ndarray, values: pl.Series) -> None:
    column = table.column(name)
    if column.dtype == object:
        column[rows] = as_objects(values.to_list())
    else:
        column[rows] = values.to_numpy()


def as_objects(values: Sequence[Any]) -> np.ndarray:
    out = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):  # not out[:] = values: numpy would look inside lists
        out[i] = value
    return out


def _merge_objects(column: np.ndarray, target: np.ndarray, values: Sequence[Any], merge: str) -> None:
    for row, value in zip(target.tolist(), values, strict=True):
        if value is None:
            continue
        old = column[row]
        if old is None or (value < old if merge == "min" else value > old):
            column[row] = value


# -- values as they are kept -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kept:
    """How values of a type are kept and travel: as 64-bit numbers, text or bytes."""

    dtype: pl.DataType
    stored: pl.DataType

    def down(self, x: pl.Expr) -> pl.Expr:
        if self.dtype.is_temporal():
            return x.to_physical().cast(self.stored)
        return x.cast(self.stored)

    def up(self, x: pl.Expr) -> pl.Expr:
        if self.dtype == pl.Date:
            return x.cast(pl.Int32).cast(self.dtype)
        return x.cast(self.dtype)

    def restore(self, values: pl.Series) -> pl.Series:
        """From lists of kept values, too."""
        return values.to_frame("x").select(self.up(pl.col("x")))["x"]

    @property
    def value(self) -> ValueType:
        if self.stored == pl.Float64:
            return numeric(np.float64, 0.0)
        if self.stored == pl.UInt64:
            return numeric(np.uint64, 0)
        return numeric(np.int64, 0) if self.stored == pl.Int64 else objects(PLAIN)


_TOO_WIDE = tuple(t for t in (getattr(pl, n, None) for n in ("Int128", "UInt128")) if t is not None)


DECIMALS = (
    "Decimals are not aggregated. For exact results count in whole units, (pl.col('price') * 100).cast(pl.Int64); else "
    ".cast(pl.Float64)."
)


def kept(operator: str, aggregate: object, dtype: pl.DataType) -> Kept:
    """How to keep values of a column, or a FlowError."""
    if dtype.is_unsigned_integer() and dtype not in _TOO_WIDE:
        return Kept(dtype, pl.UInt64())
    if (dtype.is_integer() and dtype not in _TOO_WIDE) or dtype.is_temporal() or dtype == pl.Boolean:
        return Kept(dtype, pl.Int64())
    if dtype.is_float():
        return Kept(dtype, pl.Float64())
    if dtype in (pl.String, pl.Categorical, pl.Enum):
        return Kept(dtype, pl.String())
    if dtype == pl.Binary:
        return Kept(dtype, pl.Binary())
    raise FlowError(
        f"operator '{operator}': {aggregate} cannot keep values of type {dtype}.",
        remedy=DECIMALS
        if dtype.is_decimal()
        else "Use a column of numbers, times, text, bytes or booleans: cast it, or unpack lists and structs first.",
        operator=operator,
    )


def as_lists(flat: pl.Series, lengths: Sequence[int] | np.ndarray) -> pl.Series:
    """Cut a series into lists of these lengths."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    lists = pl.Series(pl.from_arrow(pa.LargeListArray.from_arrays(offsets, flat.to_arrow())))
    return lists if lists.dtype == pl.List(flat.dtype) else lists.cast(pl.List(flat.dtype))


def one_nan(x: pl.Expr) -> pl.Expr:
    """Every NaN the same NaN, and -0.0 as 0.0: values that are equal have equal bits."""
    return pl.when(x.is_nan()).then(pl.lit(float("nan"))).otherwise(one_zero(x))


# -- Python objects ----------------------------------------------------------------------------------------------------


class Objects(Accumulator):
    """A Python object for each key (None: nothing yet). Travels as a list: of values, or of encoded states.

    Lists have the virtue that partial rows are merged by joining them. An object belongs to its row and changes in
    place, but only in rows that are touched; ``combine`` gives fresh objects where it merges.
    """

    codec: ObjectCodec = PLAIN

    def __init__(self, name: str, dtype: pl.DataType, associative: bool) -> None:
        self.name = name
        self.dtype = dtype
        self.associative = associative
        self.column = f"__{name}_o"
        self.values = {self.column: objects(self.codec)}

    # What a kind of object must know:

    @abstractmethod
    def fresh(self) -> Any: ...

    @abstractmethod
    def extend(self, state: Any, values: Any) -> Any:
        """The state with the values of some rows, in order."""

    def absorb(self, state: Any, items: Any) -> Any:
        """The state with the items of a partial result."""
        return self.extend(state, items)

    @abstractmethod
    def join(self, state: Any, other: Any) -> Any:
        """The state with another, later one, which stays as it is."""

    def copy(self, state: Any) -> Any:
        return state.copy()

    @abstractmethod
    def results(self, states: list[Any]) -> pl.Series: ...

    # What follows from it:

    def regroup(self) -> list[pl.Expr]:
        return [pl.col(self.column).list.explode(keep_nulls=False, empty_as_null=False).alias(self.column)]

    def slices(self, values: pl.Series) -> Callable[[int, int], Any]:
        """Access to a run of values: here as a list."""
        whole = values.to_list()
        return lambda begin, end: whole[begin:end]

    def add(self, table: KeyedTable, rows: np.ndarray, frame: pl.DataFrame) -> None:
        column = table.column(self.column)
        partial = frame[self.column]
        lengths = partial.list.len().to_numpy().astype(np.int64)
        flat = self.slices(partial.list.explode(keep_nulls=False, empty_as_null=False))
        ends = np.cumsum(lengths)
        for row, begin, end in zip(rows.tolist(), (ends - lengths).tolist(), ends.tolist(), strict=True):
            if begin < end:
                old = column[row]
                column[row] = self.absorb(self.fresh() if old is None else old, flat(begin, end))

    def add_rows(self, table: KeyedTable, rows: np.ndarray, frame: pl.DataFrame) -> None:
        column = table.column(self.column)
        values = frame[self.column]
        if values.null_count():
            rows, values = rows[values.is_not_null().to_numpy()], values.drop_nulls()
        for row, chunk in self.runs(rows, values):
            old = column[row]
            column[row] = self.extend(self.fresh() if old is None else old, chunk)

    def runs(self, rows: np.ndarray, values: pl.Series) -> Iterator[tuple[int, Any]]:
        """Each distinct row with its values, in order."""
        if not len(rows):
            return
        order = np.argsort(rows, kind="stable")
        ordered = rows[order]
        starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
        take = self.slices(values.gather(order))
        for row, begin, end in zip(
            ordered[starts].tolist(), starts.tolist(), [*starts[1:].tolist(), len(rows)], strict=True
        ):
            yield row, take(begin, end)

    def raw(self, table: KeyedTable, rows: np.ndarray) -> list[pl.Series]:
        return [self._as_series(table.column(self.column)[rows].tolist())]

    def _as_series(self, states: list[Any]) -> pl.Series:
        return pl.Series(self.column, states, dtype=pl.Object)

    def combine(self, table: KeyedTable, rows: np.ndarray, groups: np.ndarray, count: int) -> list[pl.Series]:
        column = table.column(self.column)
        out: list[Any] = [None] * count
        owned = [False] * count
        for row, group in zip(rows.tolist(), groups.tolist(), strict=True):
            state = column[row]
            if state is None:
                continue
            if out[group] is None:
                out[group] = state
                continue
            if not owned[group]:
                out[group], owned[group] = self.copy(out[group]), True
            out[group] = self.join(out[group], state)
        return [self._as_series(out)]

    def store(self, table: KeyedTable, rows: np.ndarray, raw: pl.DataFrame) -> None:
        states = raw[self.column].to_list()
        table.column(self.column)[rows] = as_objects([None if s is None else self.copy(s) for s in states])

    def result(self) -> pl.Expr:
        def read(states: pl.Series) -> pl.Series:
            return self.results(states.to_list())

        return pl.col(self.column).map_batches(read, return_dtype=self.dtype)


__all__ = [
    "PLAIN",
    "Accumulator",
    "Column",
    "Columns",
    "Kept",
    "Objects",
    "PlainCodec",
    "as_lists",
    "as_objects",
    "kept",
    "one_nan",
    "write",
]
