"""Aggregates, and the operator that keeps them running for each key.

An aggregate is written as ``ps.sum("amount")`` and compiled, against the schema of its input, to an accumulator (see
``accumulators.py``). Rows are reduced to partial results before the exchange wherever merging is associative, so a hot
key costs one row for each map task.

Addition of floats is **not** associative: (a+b)+c may differ from a+(b+c) in the last bit, so a partial sum before the
exchange would make the result depend on the parallelism. Aggregates over floats therefore travel row by row and are
added in source order: slower, and the same to the last bit at any parallelism, any cut into epochs, any replay. So do
all aggregates that depend on the order of rows. One such aggregate makes all of its operator travel row by row. In a
window made of several panes (hopping), order is by pane first, then source order.

**Nulls** are ignored, as in SQL. Of nothing, counts and sums are 0, lists are empty, everything else is null. **NaN**
counts as a value, except where values are compared: min, max, top, quantile, and the ``by`` of first and last ignore
it. -0.0 and 0.0 are one value wherever values are compared.

**Sums of integers** are exact. One that does not fit in 64 bits is given as the nearest that does: not an error, since
a running sum may come back into range, and whether it was looked at in between must not decide if a job lives.
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from penstock.errors import FlowError
from penstock.frames import pick, stacked, take
from penstock.operators.accumulators import DECIMALS, Accumulator, Column, Columns, Kept, kept
from penstock.operators.aggregators import Aggregator, Defined
from penstock.operators.base import (
    DUE,
    FOREVER,
    HASH,
    ORDER,
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
from penstock.operators.order import order_of
from penstock.operators.picks import Moments, Pick, PickBy, PickRow
from penstock.operators.sketches import ApproxDistinct, Collect, Distinct, HeavyHitters, Quantiles, Top
from penstock.state.hashing import hashable
from penstock.state.table import KeyedTable, TableSpec, ValueType, numeric


@dataclass(frozen=True)
class Aggregate:
    """One aggregate as the user wrote it: ``ps.sum("amount")``."""

    kind: str
    over: pl.Expr | None = None
    label: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.kind}({self.label})"


Columnar = str | pl.Expr


def _expr(column: Columnar) -> tuple[pl.Expr, str]:
    return (pl.col(column), column) if isinstance(column, str) else (column, str(column))


def _at_least(kind: str, name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise FlowError(f"{kind}: {name} must be a whole number of at least {least}, not {value!r}.")


def count(column: Columnar | None = None) -> Aggregate:
    """Number of rows, or of non-null values of a column."""
    if column is None:
        return Aggregate("count")
    return Aggregate("count", *_expr(column))


def sum(column: Columnar) -> Aggregate:
    """Sum of the non-null values; 0 when there is none. Of integers it is Int64, and the nearest value that fits if the
    true sum does not.
    """
    return Aggregate("sum", *_expr(column))


def min(column: Columnar) -> Aggregate:
    """Smallest non-null value."""
    return Aggregate("min", *_expr(column))


def max(column: Columnar) -> Aggregate:
    """Greatest non-null value."""
    return Aggregate("max", *_expr(column))


def mean(column: Columnar) -> Aggregate:
    """Mean of the non-null values."""
    return Aggregate("mean", *_expr(column))


def variance(column: Columnar, ddof: int = 1) -> Aggregate:
    """Variance of the non-null values: squared distances from the mean, over n - ddof. Null if n <= ddof."""
    _at_least("variance", "ddof", ddof, 0)
    return Aggregate("variance", *_expr(column), {"ddof": ddof})


def std(column: Columnar, ddof: int = 1) -> Aggregate:
    """Standard deviation: the square root of the variance."""
    _at_least("std", "ddof", ddof, 0)
    return Aggregate("std", *_expr(column), {"ddof": ddof})


def first(column: Columnar, by: Columnar | None = None) -> Aggregate:
    """First non-null value: in source order, or of the row with the least ``by`` (of several, the least value).

    For several columns of one row use ``first_row``: ``first`` takes each column by itself.
    """
    return Aggregate("first", *_expr(column), {} if by is None else {"by": _expr(by)})


def last(column: Columnar, by: Columnar | None = None) -> Aggregate:
    """Last non-null value: in source order, or of the row with the greatest ``by`` (of several, the greatest value).

    For several columns of one row use ``last_row``: ``last`` takes each column by itself.
    """
    return Aggregate("last", *_expr(column), {} if by is None else {"by": _expr(by)})


def first_row(*columns: Columnar, by: Columnar) -> Aggregate:
    """The values of the row with the least ``by``, as a struct; of several such rows, the one with the least values."""
    return _row("first_row", columns, by)


def last_row(*columns: Columnar, by: Columnar) -> Aggregate:
    """The values of the row with the greatest ``by``, as a struct; of several, the row with the greatest values.

    The values stay together: ``last("a", by="t")`` and ``last("b", by="t")`` may come from two rows of one time.
    """
    return _row("last_row", columns, by)


def _row(kind: str, columns: Sequence[Columnar], by: Columnar) -> Aggregate:
    pairs = [_expr(c) for c in columns]
    names = [e.meta.output_name() for e, _ in pairs]
    if not pairs or len(set(names)) < len(names):
        raise FlowError(
            f"{kind}: it takes the columns that are wanted, each under a name of its own, not {names}.",
            remedy=f'For example ps.{kind}("page", "price", by="at").',
        )
    label = ", ".join(name for _, name in pairs)
    return Aggregate(kind, pairs[0][0], label, {"row": [e for e, _ in pairs], "names": names, "by": _expr(by)})


def collect(column: Columnar, limit: int | None = None) -> Aggregate:
    """List of the non-null values in source order; at most the first ``limit``."""
    if limit is not None:
        _at_least("collect", "limit", limit, 1)
    return Aggregate("collect", *_expr(column), {} if limit is None else {"limit": limit})


def top(column: Columnar, k: int) -> Aggregate:
    """List of the k greatest values, greatest first; equal ones each count."""
    _at_least("top", "k", k, 1)
    return Aggregate("top", *_expr(column), {"k": k})


def distinct(column: Columnar) -> Aggregate:
    """Number of different non-null values, exactly: keeps all of them."""
    return Aggregate("distinct", *_expr(column))


def approx_distinct(column: Columnar, error: float = 0.02) -> Aggregate:
    """Number of different non-null values, about: a HyperLogLog sketch with this relative standard error. Exact as long
    as they are few; a state never takes more than about 1 / error**2 bytes.
    """
    if not isinstance(error, int | float) or not 0.001 <= error <= 0.25:
        raise FlowError(f"approx_distinct: error must be between 0.001 and 0.25, not {error!r}.")
    return Aggregate("approx_distinct", *_expr(column), {"error": float(error)})


def quantile(column: Columnar, q: float | Sequence[float], error: float = 0.01) -> Aggregate:
    """The value that a share ``q`` of the values lie below: q=0.5 is the median. Several q give a list.

    Of n values in order it is the one at place floor(q * (n - 1)), counted from 0. It is within ``error`` of that
    value, relatively; with error=0 it is that value itself, and every different value is kept.
    """
    several = not isinstance(q, int | float)
    shares = tuple(q) if isinstance(q, Sequence) else (q,)
    if not shares or not all(isinstance(s, int | float) and 0 <= s <= 1 for s in shares):
        raise FlowError(f"quantile: q must be between 0 and 1, not {q!r}.", remedy="For the 99th percentile: q=0.99.")
    if not isinstance(error, int | float) or not (error == 0 or 1e-5 <= error <= 0.5):
        raise FlowError(f"quantile: error must be 0 (exact) or between 0.00001 and 0.5, not {error!r}.")
    return Aggregate("quantile", *_expr(column), {"q": shares, "several": several, "error": float(error)})


def heavy_hitters(column: Columnar, k: int, capacity: int | None = None) -> Aggregate:
    """The k most frequent values, as a list of structs: value, count, error. Most frequent first, ties by value.

    Only ``capacity`` values (10 * k, at least 100) are counted at a time. The true count of a value is between
    count - error and count, and error is at most n / capacity for n values. While there are no more than ``capacity``
    different values everything is exact.
    """
    _at_least("heavy_hitters", "k", k, 1)
    room = builtins.max(10 * k, 100) if capacity is None else capacity
    _at_least("heavy_hitters", "capacity", room, k)
    return Aggregate("heavy_hitters", *_expr(column), {"k": k, "capacity": room})


def aggregator(
    aggregator: Aggregator[Any, Any], column: Columnar | Sequence[Columnar], *, dtype: Any = None
) -> Aggregate:
    """An aggregate of your own over one or several columns. ``dtype`` of the result may be left out if ``result`` is
    annotated with int, float, str, bool, bytes, or a time.
    """
    columns = [column] if isinstance(column, str | pl.Expr) else list(column)
    if not columns:
        raise FlowError("aggregator: there is no column.", remedy='For example ps.aggregator(Longest(), "word").')
    pairs = [_expr(c) for c in columns]
    label = ", ".join(name for _, name in pairs)
    options = {"aggregator": aggregator, "columns": [e for e, _ in pairs], "dtype": dtype}
    return Aggregate(type(aggregator).__name__, pairs[0][0], label, options)


_MIN_FILL: dict[str, Any] = {"i": np.iinfo(np.int64).max, "u": np.iinfo(np.uint64).max, "f": np.inf}
_MAX_FILL: dict[str, Any] = {"i": np.iinfo(np.int64).min, "u": 0, "f": -np.inf}
_SMALL = (pl.Int8, pl.Int16, pl.Int32, pl.UInt8, pl.UInt16, pl.UInt32, pl.Boolean)
"""Sums of so few bits do not leave 64: that takes 2**31 rows of the greatest."""
_INT_MAX = pl.lit(2**63 - 1, pl.Int64)
_INT_MIN = pl.lit(-(2**63), pl.Int64)


def _dtype_of(operator: str, aggregate: Aggregate, column: pl.Expr, schema: pl.Schema) -> pl.DataType:
    try:
        resolved = pl.LazyFrame(schema=schema).select(column.alias("x")).collect_schema()
    except pl.exceptions.PolarsError as error:
        raise FlowError(
            f"operator '{operator}': {aggregate} cannot be resolved: {str(error).splitlines()[0]}.",
            remedy=f"Its input has the columns {', '.join(schema.names())}.",
            operator=operator,
        ) from None
    return resolved["x"]


def compile_aggregate(operator: str, name: str, aggregate: Aggregate, schema: pl.Schema) -> Accumulator:
    """Resolve types; refuse what cannot be aggregated, naming the operator."""
    if not isinstance(aggregate, Aggregate):
        raise FlowError(
            f"operator '{operator}': '{name}' is not an aggregate but {type(aggregate).__name__}.",
            remedy="Use ps.count(), ps.sum(column), ps.mean(column), ps.quantile(column, 0.99) ...",
            operator=operator,
        )
    if aggregate.over is None:
        return _count(name, pl.len().cast(pl.Int64), pl.lit(1, pl.Int64))
    x, options = aggregate.over, aggregate.options
    if "aggregator" in options:
        for column in options["columns"]:
            _dtype_of(operator, aggregate, column, schema)
        return Defined(operator, name, options["aggregator"], options["columns"], options["dtype"])
    if "row" in options:
        by, _ = options["by"]
        by_keep = kept(operator, aggregate, _dtype_of(operator, aggregate, by, schema))
        keeps = [kept(operator, aggregate, _dtype_of(operator, aggregate, e, schema)) for e in options["row"]]
        parts = list(zip(options["names"], options["row"], keeps, strict=True))
        return PickRow(name, parts, by, by_keep, aggregate.kind == "last_row")
    dtype = _dtype_of(operator, aggregate, x, schema)
    match aggregate.kind:
        case "count":
            return _count(name, x.count().cast(pl.Int64), x.is_not_null().cast(pl.Int64))
        case "sum" | "mean":
            return _total(operator, name, aggregate, x, dtype)
        case "min" | "max":
            return _extreme(operator, name, aggregate, x, dtype)
        case "variance" | "std":
            if not (dtype.is_integer() or dtype.is_float() or dtype == pl.Boolean):
                raise _not_numbers(operator, aggregate, dtype)
            return Moments(name, x, options["ddof"], aggregate.kind == "std")
        case "approx_distinct":
            if not hashable(dtype):
                raise _cannot_keep(operator, aggregate, dtype)
            return ApproxDistinct(name, x, options["error"])
    keep = kept(operator, aggregate, dtype)
    match aggregate.kind:
        case "first" | "last":
            return _pick(operator, name, aggregate, x, keep, schema)
        case "collect":
            return Collect(name, x, keep, options.get("limit"))
        case "top":
            return Top(name, x, keep, options["k"])
        case "distinct":
            return Distinct(name, x, keep)
        case "quantile":
            exact = options["error"] == 0 and (dtype.is_temporal() or dtype == pl.Boolean)
            if not (dtype.is_integer() or dtype.is_float() or exact):
                raise _not_numbers(operator, aggregate, dtype)
            return Quantiles(name, x, keep, options["q"], options["several"], options["error"])
        case "heavy_hitters":
            return HeavyHitters(name, x, keep, options["k"], options["capacity"])
    raise AssertionError(aggregate.kind)


def _pick(operator: str, name: str, aggregate: Aggregate, x: pl.Expr, keep: Kept, schema: pl.Schema) -> Accumulator:
    is_last = aggregate.kind == "last"
    if "by" not in aggregate.options:
        return Pick(name, x, keep, is_last)
    by, _ = aggregate.options["by"]
    by_keep = kept(operator, aggregate, _dtype_of(operator, aggregate, by, schema))
    return PickBy(name, x, keep, by, by_keep, is_last)


def _adding(name: str, partial: pl.Expr, single: pl.Expr) -> Column:
    return Column(name, partial, single, "add", numeric(np.int64, 0), pl.Int64())


def _count(name: str, partial: pl.Expr, single: pl.Expr) -> Columns:
    a = f"__{name}_a"
    return Columns(name, (_adding(a, partial, single),), pl.col(a), pl.Int64(), True)


def _total(operator: str, name: str, aggregate: Aggregate, x: pl.Expr, dtype: pl.DataType) -> Columns:
    """Sum and mean."""
    a, b, n = f"__{name}_a", f"__{name}_b", f"__{name}_n"
    limbs: tuple[str, str] | None = None
    columns: tuple[Column, ...]
    if dtype in (pl.Int64, pl.UInt64):
        # Halves, so that a sum beyond 64 bits is seen, not wrapped. The unsigned go through 128 bits.
        wide = x if dtype == pl.Int64 else x.cast(pl.Int128)
        high, low = (wide // 2**32).cast(pl.Int64), (wide & 0xFFFFFFFF).cast(pl.Int64)
        columns = (_adding(a, high.sum(), high.fill_null(0)), _adding(b, low.sum(), low.fill_null(0)))
        limbs = (a, b)
        whole = pl.col(a) * 2**32 + pl.col(b)
        total = pl.when(pl.col(a) >= 2**31).then(_INT_MAX).when(pl.col(a) < -(2**31)).then(_INT_MIN).otherwise(whole)
        real = pl.col(a).cast(pl.Float64) * 2.0**32 + pl.col(b)
        result_type: pl.DataType = pl.Int64()
    elif dtype in _SMALL:
        small = x.cast(pl.Int64)
        columns = (_adding(a, small.sum(), small.fill_null(0)),)
        total, real, result_type = pl.col(a), pl.col(a).cast(pl.Float64), pl.Int64()
    elif dtype.is_float():
        f = x.cast(pl.Float64)
        columns = (Column(a, f.sum(), f.fill_null(0.0), "add", numeric(np.float64, 0.0), pl.Float64()),)
        total, real, result_type = pl.col(a), pl.col(a), pl.Float64()
    else:
        raise _not_numbers(operator, aggregate, dtype)
    associative = not dtype.is_float()
    if aggregate.kind == "sum":
        return Columns(name, columns, total, result_type, associative, limbs)
    valid = _adding(n, x.count().cast(pl.Int64), x.is_not_null().cast(pl.Int64))
    ratio = pl.when(pl.col(n) > 0).then(real / pl.col(n))
    return Columns(name, (*columns, valid), ratio, pl.Float64(), associative, limbs)


def _not_numbers(operator: str, aggregate: Aggregate, dtype: pl.DataType) -> FlowError:
    return FlowError(
        f"operator '{operator}': {aggregate} needs numbers, but its column has type {dtype}.",
        remedy=DECIMALS if dtype.is_decimal() else "Cast the column to a number first, or use count, min or max.",
        operator=operator,
    )


def _cannot_keep(operator: str, aggregate: Aggregate, dtype: pl.DataType) -> FlowError:
    return FlowError(
        f"operator '{operator}': {aggregate} cannot tell values of type {dtype} apart.",
        remedy="Use a column of numbers, times, text, bytes or booleans: cast it, or unpack lists and structs first.",
        operator=operator,
    )


def _extreme(operator: str, name: str, aggregate: Aggregate, x: pl.Expr, dtype: pl.DataType) -> Columns:
    """Min and max."""
    smallest = aggregate.kind == "min"
    a, n = f"__{name}_a", f"__{name}_n"
    if dtype.is_nested() or dtype.is_decimal():
        raise FlowError(
            f"operator '{operator}': {aggregate} cannot compare values of type {dtype}.",
            remedy=DECIMALS if dtype.is_decimal() else "Use a column of numbers, times, text or booleans.",
            operator=operator,
        )
    keep = kept(operator, aggregate, dtype)
    y = keep.down(x)
    if keep.value.codec:
        best = Column(a, y.min() if smallest else y.max(), y, aggregate.kind, keep.value, keep.stored)
        return Columns(name, (best,), keep.up(pl.col(a)), dtype, True)
    if dtype.is_float():
        y = one_zero(y.fill_nan(None))
    fill = (_MIN_FILL if smallest else _MAX_FILL)[np.dtype(keep.value.dtype).kind]
    start = pl.lit(fill, keep.stored)
    reduced = (y.min() if smallest else y.max()).fill_null(start)
    best = Column(a, reduced, y.fill_null(start), aggregate.kind, numeric(keep.value.dtype, fill), keep.stored)
    valid = _adding(n, y.count().cast(pl.Int64), y.is_not_null().cast(pl.Int64))
    return Columns(name, (best, valid), pl.when(pl.col(n) > 0).then(keep.up(pl.col(a))), dtype, True)


class Accumulators:
    """All the aggregates of one operator: how its rows are reduced, merged into a table, and read out of it.

    *Partial rows* are what crosses the exchange; *raw* rows are state as it is, one row for each key, whose columns may
    hold Python objects (``pl.Object``): good for taking, filtering, sorting and for ``results()``, never for sending.
    """

    def __init__(self, operator: str, aggregates: Mapping[str, Aggregate], schema: pl.Schema) -> None:
        self.operator = operator
        self.specs = dict(aggregates)
        self.compiled = tuple(compile_aggregate(operator, n, a, schema) for n, a in aggregates.items())
        self.associative = all(c.associative for c in self.compiled)
        """Partial results may be merged in any order before the exchange."""
        self.values: dict[str, ValueType] = {n: v for c in self.compiled for n, v in c.values.items()}
        self.output = pl.Schema({c.name: c.dtype for c in self.compiled})
        self._inputs = [e for c in self.compiled for e in c.inputs]

    def require_merge(self, why: str) -> None:
        """Refuse aggregates whose states cannot be merged, for operators that must (hopping and session windows)."""
        for c in self.compiled:
            if not c.mergeable:
                raise FlowError(
                    f"operator '{self.operator}': '{c.name}' is an aggregate without merge(), and {why}.",
                    remedy="Define merge(self, a, b) in its ps.Aggregator, or use tumbling windows.",
                    operator=self.operator,
                )

    def partial(self, frame: pl.DataFrame, by: list[str], *, count: str | None = None) -> pl.DataFrame:
        """Rows -> partial rows: the columns ``by`` and partial results.

        Associative: one row for each distinct ``by``. Otherwise one for each row, in order, with the hidden column by
        which rows of a keyed stage are put in order. ``count`` names a column for the number of rows in each.
        """
        if self._inputs:
            frame = frame.with_columns(self._inputs)
        if not self.associative:
            order = [c for c in order_of(frame) if c not in by]
            ones = [pl.lit(1, pl.Int64).alias(count)] if count else []
            return frame.select(*by, *order, *(e for c in self.compiled for e in c.single()), *ones)
        lengths = [pl.len().cast(pl.Int64).alias(count)] if count else []
        out = frame.group_by(by).agg(*(e for c in self.compiled for e in c.partial()), *lengths)
        for c in self.compiled:
            out = c.encode(out)
        return out

    def regroup(self, frame: pl.DataFrame, by: list[str], extra_sums: Sequence[str] = ()) -> pl.DataFrame:
        """Merge partial rows that agree on ``by`` and add up the columns ``extra_sums``; drops all others. Associative
        only.
        """
        assert self.associative
        sums = [pl.col(c).sum() for c in extra_sums]
        return frame.group_by(by).agg(*(e for c in self.compiled for e in c.regroup()), *sums)

    def merge_into(self, table: KeyedTable, hashes: np.ndarray, keys: pl.DataFrame, frame: pl.DataFrame) -> np.ndarray:
        """Add partial rows to the table; the rows of the table that changed. Keys may repeat only in the form that is
        not associative; then each changed row is given once, in order of first appearance.
        """
        if self.associative:
            rows, _ = table.upsert(hashes, keys)
            self.add(table, rows, frame)
            return rows
        first, inverse = unique_keys(hashes, keys)
        rows, _ = table.upsert(hashes[first], take(keys, first))
        self.add_at(table, rows[inverse], frame)
        return rows

    def add(self, table: KeyedTable, rows: np.ndarray, frame: pl.DataFrame) -> None:
        """Add partial rows of the form that is associative to touched rows, none of them twice."""
        for c in self.compiled:
            c.add(table, rows, frame)

    def add_at(self, table: KeyedTable, rows: np.ndarray, frame: pl.DataFrame) -> None:
        """Add partial rows of the form that is not associative, in order, to touched rows that may repeat."""
        for c in self.compiled:
            c.add_rows(table, rows, frame)

    def combine(self, table: KeyedTable, rows: np.ndarray, groups: np.ndarray, groups_count: int) -> pl.DataFrame:
        """Raw state of ``rows`` (which may repeat: a pane belongs to several windows), merged in the given order into
        groups 0 .. groups_count - 1: one raw row for each group. The table is only read.
        """
        assert len(rows) == len(groups)
        if groups_count == len(rows) and bool((groups == np.arange(groups_count)).all()):
            return self.raw(table, rows)
        return pl.DataFrame([s for c in self.compiled for s in c.combine(table, rows, groups, groups_count)])

    def store(self, table: KeyedTable, rows: np.ndarray, raw: pl.DataFrame) -> None:
        """Overwrite the state of distinct rows, which must have been touched or upserted in this epoch."""
        for c in self.compiled:
            c.store(table, rows, raw)

    def raw(self, table: KeyedTable, rows: np.ndarray) -> pl.DataFrame:
        """The state of ``rows``, as it is."""
        return pl.DataFrame([s for c in self.compiled for s in c.raw(table, rows)])

    def results(self) -> list[pl.Expr]:
        """Expressions over raw columns that give the results, named: ``raw.select(*accumulators.results())``."""
        return [c.result().alias(c.name) for c in self.compiled]

    def fingerprint(self) -> dict[str, str]:
        parts = ((c.name, (self.specs[c.name].kind, str(c.dtype), c.layout())) for c in self.compiled)
        return {name: ":".join(p for p in part if p) for name, part in parts}

    def describe(self) -> str:
        return ", ".join(f"{name}={spec}" for name, spec in self.specs.items())


class RunningAggregate(KeyedOperator):
    """``key_by(...).aggregate(...)``: emits, each epoch, the new values of the keys that changed (a stream of
    updates).
    """

    scans = False

    def __init__(self, id: str, key: Sequence[str], aggregates: Mapping[str, Aggregate], schema: pl.Schema) -> None:
        self.id = id
        self.key = tuple(key)
        self.identity = self.key
        self.accumulators = Accumulators(id, aggregates, schema)
        self.key_schema = pl.Schema({k: schema[k] for k in key})
        self.output = pl.Schema({**self.key_schema, **self.accumulators.output})

    @property
    def ordered(self) -> bool:
        return not self.accumulators.associative

    def table(self) -> TableSpec:
        return TableSpec(self.key_schema, self.accumulators.values)

    def prepare(self, frame: pl.DataFrame, from_source: bool, port: int = 0, clock_us: int = 0) -> Prepared:
        return Prepared(self.accumulators.partial(frame, list(self.key)))

    def apply(self, table: KeyedTable | None, arrivals: Sequence[Arrival], tick: Tick) -> Applied:
        assert table is not None
        arrivals = [a for a in arrivals if a.frame.height]
        if not arrivals:
            return Applied(pl.DataFrame(schema=self.output))
        if self.accumulators.associative:
            rows = self._merge_all(table, [a.frame for a in arrivals])
        else:
            rows = self._merge(table, in_order(arrivals))
        keys = table.keys(rows)
        out = keys.hstack(self.accumulators.raw(table, rows)).select(*self.key, *self.accumulators.results())
        return Applied(canonical(out, table.hashes(rows)))

    def _merge_all(self, table: KeyedTable, frames: Sequence[pl.DataFrame]) -> np.ndarray:
        """As one after the other, but all keys are looked up at once: in a large table that has a price of its own."""
        if len(frames) == 1:
            return self._merge(table, frames[0])
        arrived = stacked([pick(frame, (HASH, *self.key)) for frame in frames])
        hashes, keys = arrived[HASH].to_numpy(), pick(arrived, self.key)
        first, inverse = unique_keys(hashes, keys)
        rows, _ = table.upsert(hashes[first], take(keys, first))
        begin = 0
        for frame in frames:
            self.accumulators.add(table, rows[inverse[begin : begin + frame.height]], frame)
            begin += frame.height
        return rows

    def _merge(self, table: KeyedTable, frame: pl.DataFrame) -> np.ndarray:
        return self.accumulators.merge_into(table, frame[HASH].to_numpy(), pick(frame, self.key), frame)

    def fingerprint(self) -> dict[str, Any]:
        return {
            "operator": "aggregate",
            "key": {k: str(t) for k, t in self.key_schema.items()},
            "aggregates": self.accumulators.fingerprint(),
        }

    def describe(self) -> str:
        return f"aggregate {self.accumulators.describe()}"


class FinalAggregate(RunningAggregate):
    """``aggregate(..., emit="final")``: each key once, when the input has ended."""

    timed = True
    scans = True
    hold_us = 2**62
    """Until the end nobody behind it learns anything of time from it."""

    def __init__(self, id: str, key: Sequence[str], aggregates: Mapping[str, Aggregate], schema: pl.Schema) -> None:
        super().__init__(id, key, aggregates, schema)
        self.identity = None

    def apply(self, table: KeyedTable | None, arrivals: Sequence[Arrival], tick: Tick) -> Applied:
        assert table is not None
        super().apply(table, arrivals, tick)
        nothing = pl.DataFrame(schema={**self.output, DUE: pl.Int64(), ORDER: pl.UInt64()})
        if tick.watermark != FOREVER or tick.watermark_before == FOREVER:
            return Applied(nothing)
        rows = table.live_rows()
        keys = table.keys(rows)
        out = keys.hstack(self.accumulators.raw(table, rows)).select(*self.key, *self.accumulators.results())
        due = pl.Series(DUE, np.full(len(rows), FOREVER), dtype=pl.Int64)
        return Applied(canonical(out, table.hashes(rows)).hstack([due]) if len(rows) else nothing)

    def fingerprint(self) -> dict[str, Any]:
        return {**super().fingerprint(), "emit": "final"}

    def describe(self) -> str:
        return f"{super().describe()} at the end"


__all__ = [
    "Accumulators",
    "Aggregate",
    "Aggregator",
    "FinalAggregate",
    "RunningAggregate",
    "aggregator",
    "approx_distinct",
    "collect",
    "count",
    "distinct",
    "first",
    "first_row",
    "heavy_hitters",
    "last",
    "last_row",
    "max",
    "mean",
    "min",
    "quantile",
    "std",
    "sum",
    "top",
    "variance",
    "visible",
]
