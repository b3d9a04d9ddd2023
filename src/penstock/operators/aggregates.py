"""Running aggregates: count, sum, min, max, mean.

Each aggregate is a few *accumulators*: columns that hold a partial result and know how to merge. Rows are reduced to
partial results before the exchange wherever merging is associative, so a hot key costs one row for each map task.

Addition of floats is **not** associative: (a+b)+c may differ from a+(b+c) in the last bit, so a partial sum before the
exchange would make the result depend on the parallelism. Aggregates over floats therefore travel row by row and are
added in source order: slower, and the same to the last bit at any parallelism, any cut into epochs, any replay.

Nulls are ignored, as in SQL; min, max and mean of nothing are null, the sum of nothing is 0. NaN counts as a value for
sum and mean; min and max ignore it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import polars as pl

from penstock.errors import FlowError
from penstock.operators.base import (
    HASH,
    Applied,
    Arrival,
    KeyedOperator,
    Prepared,
    Tick,
    canonical,
    in_order,
    one_zero,
    unique_keys,
    visible,
)
from penstock.state.table import KeyedTable, TableSpec, ValueType, numeric, objects


@dataclass(frozen=True)
class Aggregate:
    """One aggregate as the user wrote it: ``ps.sum("amount")``."""

    kind: str
    over: pl.Expr | None = None
    label: str = ""

    def __str__(self) -> str:
        return f"{self.kind}({self.label})"


def _expr(column: str | pl.Expr) -> tuple[pl.Expr, str]:
    return (pl.col(column), column) if isinstance(column, str) else (column, str(column))


def count(column: str | pl.Expr | None = None) -> Aggregate:
    """Number of rows, or of non-null values of a column."""
    if column is None:
        return Aggregate("count")
    return Aggregate("count", *_expr(column))


def sum(column: str | pl.Expr) -> Aggregate:
    """Sum of the non-null values; 0 when there is none."""
    return Aggregate("sum", *_expr(column))


def min(column: str | pl.Expr) -> Aggregate:
    """Smallest non-null value."""
    return Aggregate("min", *_expr(column))


def max(column: str | pl.Expr) -> Aggregate:
    """Greatest non-null value."""
    return Aggregate("max", *_expr(column))


def mean(column: str | pl.Expr) -> Aggregate:
    """Mean of the non-null values."""
    return Aggregate("mean", *_expr(column))


class _TextCodec:
    """Strings in object columns (min and max of text)."""

    def encode(self, value: Any) -> bytes:
        return msgspec.msgpack.encode(value)

    def decode(self, data: bytes) -> Any:
        return msgspec.msgpack.decode(data)


@dataclass(frozen=True)
class Accumulator:
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

    def merge_expr(self) -> pl.Expr:
        column = pl.col(self.name)
        return column.sum() if self.merge == "add" else column.min() if self.merge == "min" else column.max()


@dataclass(frozen=True)
class Compiled:
    """One aggregate resolved against a schema: its accumulators, and how they become the result."""

    name: str
    spec: Aggregate
    accumulators: tuple[Accumulator, ...]
    result: pl.Expr
    dtype: pl.DataType
    associative: bool


_MIN_FILL: dict[str, Any] = {"i": np.iinfo(np.int64).max, "u": np.iinfo(np.uint64).max, "f": np.inf}
_MAX_FILL: dict[str, Any] = {"i": np.iinfo(np.int64).min, "u": 0, "f": -np.inf}


def _dtype_of(operator: str, aggregate: Aggregate, schema: pl.Schema) -> pl.DataType:
    assert aggregate.over is not None
    try:
        resolved = pl.LazyFrame(schema=schema).select(aggregate.over.alias("x")).collect_schema()
    except pl.exceptions.PolarsError as error:
        raise FlowError(
            f"operator '{operator}': {aggregate} cannot be resolved: {str(error).splitlines()[0]}.",
            remedy=f"Its input has the columns {', '.join(schema.names())}.",
            operator=operator,
        ) from None
    return resolved["x"]


def compile_aggregate(operator: str, name: str, aggregate: Aggregate, schema: pl.Schema) -> Compiled:
    """Resolve types; refuse what cannot be aggregated, naming the operator."""
    if not isinstance(aggregate, Aggregate):
        raise FlowError(
            f"operator '{operator}': '{name}' is not an aggregate but {type(aggregate).__name__}.",
            remedy="Use ps.count(), ps.sum(column), ps.min(column), ps.max(column) or ps.mean(column).",
            operator=operator,
        )
    a, b = f"__{name}_a", f"__{name}_b"
    int64 = pl.Int64()
    if aggregate.over is None:
        n = Accumulator(a, pl.len().cast(pl.Int64), pl.lit(1, pl.Int64), "add", numeric(np.int64, 0), int64)
        return Compiled(name, aggregate, (n,), pl.col(a), int64, True)
    x = aggregate.over
    dtype = _dtype_of(operator, aggregate, schema)
    valid = Accumulator(b, x.count().cast(pl.Int64), x.is_not_null().cast(pl.Int64), "add", numeric(np.int64, 0), int64)
    if aggregate.kind == "count":
        n = Accumulator(a, valid.partial, valid.single, "add", numeric(np.int64, 0), int64)
        return Compiled(name, aggregate, (n,), pl.col(a), int64, True)
    if aggregate.kind in ("sum", "mean"):
        if dtype.is_integer() or dtype == pl.Boolean:
            wide: pl.Expr = x.cast(pl.Int64)
            total = Accumulator(a, wide.sum(), wide.fill_null(0), "add", numeric(np.int64, 0), int64)
        elif dtype.is_float():
            wide = x.cast(pl.Float64)
            total = Accumulator(a, wide.sum(), wide.fill_null(0.0), "add", numeric(np.float64, 0.0), pl.Float64())
        else:
            raise FlowError(
                f"operator '{operator}': {aggregate} needs numbers, but its column has type {dtype}.",
                remedy="Cast the column to a number first, or use count, min or max.",
                operator=operator,
            )
        associative = not dtype.is_float()
        if aggregate.kind == "sum":
            return Compiled(name, aggregate, (total,), pl.col(a), total.dtype, associative)
        ratio = pl.when(pl.col(b) > 0).then(pl.col(a).cast(pl.Float64) / pl.col(b))
        return Compiled(name, aggregate, (total, valid), ratio, pl.Float64(), associative)
    smallest = aggregate.kind == "min"
    fills = _MIN_FILL if smallest else _MAX_FILL
    if dtype.is_integer() or dtype.is_temporal() or dtype == pl.Boolean:
        signed = not dtype.is_unsigned_integer()
        kind, wide_type = ("i", pl.Int64()) if signed else ("u", pl.UInt64())
        physical = x.to_physical().cast(wide_type) if dtype.is_temporal() else x.cast(wide_type)
        fill = fills[kind]
        value = numeric(np.int64 if signed else np.uint64, fill)
        back = pl.col(a)
        if dtype.is_temporal() and dtype.to_python() is not None:
            back = back.cast(pl.Int32).cast(dtype) if dtype == pl.Date else back.cast(dtype)
        else:
            back = back.cast(dtype)
        acc_type: pl.DataType = wide_type
    elif dtype.is_float():
        physical, fill = one_zero(x.cast(pl.Float64).fill_nan(None)), fills["f"]
        value, back, acc_type = numeric(np.float64, fill), pl.col(a).cast(dtype), pl.Float64()
        valid = Accumulator(
            b,
            physical.count().cast(pl.Int64),
            physical.is_not_null().cast(pl.Int64),
            "add",
            numeric(np.int64, 0),
            int64,
        )
    elif dtype == pl.String:
        best = Accumulator(a, x.min() if smallest else x.max(), x, aggregate.kind, objects(_TextCodec()), pl.String())
        return Compiled(name, aggregate, (best,), pl.col(a), pl.String(), True)
    else:
        raise FlowError(
            f"operator '{operator}': {aggregate} cannot compare values of type {dtype}.",
            remedy="Use a column of numbers, times, text or booleans.",
            operator=operator,
        )
    reduced = (physical.min() if smallest else physical.max()).fill_null(pl.lit(fill, acc_type))
    best = Accumulator(a, reduced, physical.fill_null(pl.lit(fill, acc_type)), aggregate.kind, value, acc_type)
    return Compiled(name, aggregate, (best, valid), pl.when(pl.col(b) > 0).then(back), dtype, True)


class Accumulators:
    """All the aggregates of one operator: how its rows are reduced, merged into a table, and read out of it."""

    def __init__(self, operator: str, aggregates: Mapping[str, Aggregate], schema: pl.Schema) -> None:
        self.compiled = tuple(compile_aggregate(operator, n, a, schema) for n, a in aggregates.items())
        self.columns = tuple(acc for c in self.compiled for acc in c.accumulators)
        self.associative = all(c.associative for c in self.compiled)
        self.values = {acc.name: acc.value for acc in self.columns}
        self.output = pl.Schema({c.name: c.dtype for c in self.compiled})

    def partial(self, frame: pl.DataFrame, by: list[str]) -> pl.DataFrame:
        """Rows -> one partial result for each group, or for each row where order matters."""
        if self.associative:
            return frame.group_by(by).agg(acc.partial.alias(acc.name) for acc in self.columns)
        return frame.select(*by, *(acc.single.alias(acc.name) for acc in self.columns))

    def merge_into(self, table: KeyedTable, hashes: np.ndarray, keys: pl.DataFrame, frame: pl.DataFrame) -> np.ndarray:
        """Add partial results to the table; the rows of the table that changed, possibly repeated."""
        if self.associative:
            rows, _ = table.upsert(hashes, keys)
            self._add(table, rows, frame)
            return rows
        first, inverse = unique_keys(hashes, keys)
        rows, _ = table.upsert(hashes[first], keys[first])
        self.add_at(table, rows[inverse], frame)
        return rows

    def _add(self, table: KeyedTable, rows: np.ndarray, frame: pl.DataFrame) -> None:
        """Merge into distinct rows: plain fancy indexing is enough, and fast."""
        for acc in self.columns:
            column = table.column(acc.name)
            if column.dtype == object:
                _merge_objects(column, rows, frame[acc.name].to_list(), acc.merge)
                continue
            values = frame[acc.name].to_numpy()
            if acc.merge == "add":
                column[rows] += values
            elif acc.merge == "min":
                column[rows] = np.minimum(column[rows], values)
            else:
                column[rows] = np.maximum(column[rows], values)

    def add_at(self, table: KeyedTable, rows: np.ndarray, frame: pl.DataFrame) -> None:
        """Merge into rows that may repeat. ``ufunc.at`` goes one by one, in order: one result at any parallelism."""
        for acc in self.columns:
            column = table.column(acc.name)
            if column.dtype == object:
                _merge_objects(column, rows, frame[acc.name].to_list(), acc.merge)
                continue
            ufunc = np.add if acc.merge == "add" else np.minimum if acc.merge == "min" else np.maximum
            with np.errstate(over="ignore", invalid="ignore"):  # inf - inf is NaN, and no surprise
                ufunc.at(column, rows, frame[acc.name].to_numpy())

    def raw(self, table: KeyedTable, rows: np.ndarray) -> list[pl.Series]:
        return [
            pl.Series(acc.name, table.column(acc.name)[rows].tolist(), dtype=acc.dtype)
            if table.column(acc.name).dtype == object
            else pl.Series(acc.name, table.column(acc.name)[rows], dtype=acc.dtype)
            for acc in self.columns
        ]

    def results(self) -> list[pl.Expr]:
        return [c.result.alias(c.name) for c in self.compiled]

    def fingerprint(self) -> dict[str, str]:
        return {c.name: f"{c.spec.kind}:{c.dtype}" for c in self.compiled}


def _merge_objects(column: np.ndarray, target: np.ndarray, values: Sequence[Any], merge: str) -> None:
    for row, value in zip(target.tolist(), values, strict=True):
        if value is None:
            continue
        old = column[row]
        if old is None or (value < old if merge == "min" else value > old):
            column[row] = value


class RunningAggregate(KeyedOperator):
    """``key_by(...).aggregate(...)``: emits, each epoch, the new values of the keys that changed (a stream of
    updates).
    """

    def __init__(self, id: str, key: Sequence[str], aggregates: Mapping[str, Aggregate], schema: pl.Schema) -> None:
        self.id = id
        self.key = tuple(key)
        self.identity = self.key
        self.accumulators = Accumulators(id, aggregates, schema)
        self.key_schema = pl.Schema({k: schema[k] for k in key})
        self.output = pl.Schema({**self.key_schema, **self.accumulators.output})

    def table(self) -> TableSpec:
        return TableSpec(self.key_schema, self.accumulators.values)

    def prepare(self, frame: pl.DataFrame, from_source: bool) -> Prepared:
        return Prepared(self.accumulators.partial(frame, list(self.key)))

    def apply(self, table: KeyedTable | None, arrivals: Sequence[Arrival], tick: Tick) -> Applied:
        assert table is not None
        arrivals = [a for a in arrivals if a.frame.height]
        if not arrivals:
            return Applied(pl.DataFrame(schema=self.output))
        if self.accumulators.associative:
            touched = [self._merge(table, a.frame) for a in arrivals]
            rows = table.distinct(np.concatenate(touched)) if len(touched) > 1 else touched[0]
        else:
            rows = self._merge(table, in_order(arrivals))
        keys = table.keys(rows)
        out = keys.with_columns(self.accumulators.raw(table, rows)).select(*self.key, *self.accumulators.results())
        return Applied(canonical(out, table.hashes(rows)))

    def _merge(self, table: KeyedTable, frame: pl.DataFrame) -> np.ndarray:
        return self.accumulators.merge_into(table, frame[HASH].to_numpy(), frame.select(self.key), frame)

    def fingerprint(self) -> dict[str, Any]:
        return {
            "operator": "aggregate",
            "key": {k: str(t) for k, t in self.key_schema.items()},
            "aggregates": self.accumulators.fingerprint(),
        }

    def describe(self) -> str:
        return "aggregate " + ", ".join(f"{c.name}={c.spec}" for c in self.accumulators.compiled)


__all__ = ["Aggregate", "RunningAggregate", "count", "max", "mean", "min", "sum", "visible"]
