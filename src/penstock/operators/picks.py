"""Aggregates that keep a few numbers or one row's value: variance, first, last.

**Variance** is Welford's recurrence, row by row in source order: it subtracts the running mean before it squares, so
values that are large and close together keep their digits, and no cut of the input shows in the last bit. Panes of a
window are put together by Chan's formula, in time order.

**First and last** without an order column depend on the order of rows, so rows travel. With one (``by=``) the winner is
a minimum or maximum of (order, value), which is associative: of rows with the same order, ``first`` takes the least
value and ``last`` the greatest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

from penstock.operators.accumulators import Accumulator, Kept, one_nan, write
from penstock.operators.base import one_zero
from penstock.state.table import KeyedTable, numeric

_FEW = 16
"""Below so many keys at once a plain loop beats numpy."""


class Moments(Accumulator):
    """Number, mean and sum of squared distances from it."""

    associative = False

    def __init__(self, name: str, x: pl.Expr, ddof: int, root: bool) -> None:
        self.name = name
        self.dtype = pl.Float64()
        self.x = x.cast(pl.Float64)
        self.ddof = ddof
        self.root = root
        self.column, self.n, self.mean, self.squares = (f"__{name}_{c}" for c in "xnms")
        self.values = {
            self.n: numeric(np.int64, 0),
            self.mean: numeric(np.float64, 0.0),
            self.squares: numeric(np.float64, 0.0),
        }

    def partial(self) -> list[pl.Expr]:
        raise NotImplementedError("goes row by row")

    def regroup(self) -> list[pl.Expr]:
        raise NotImplementedError("goes row by row")

    def add(self, table: KeyedTable, rows: np.ndarray, frame: pl.DataFrame) -> None:
        raise NotImplementedError("goes row by row")

    def single(self) -> list[pl.Expr]:
        return [self.x.alias(self.column)]

    def add_rows(self, table: KeyedTable, rows: np.ndarray, frame: pl.DataFrame) -> None:
        values = frame[self.column]
        if values.null_count():
            rows, values = rows[values.is_not_null().to_numpy()], values.drop_nulls()
        if not len(rows):
            return
        targets, starts, counts, order = runs_by_length(rows)
        x = values.to_numpy()[order]
        n, mean, squares = (table.column(c)[targets] for c in (self.n, self.mean, self.squares))
        done = 0
        with np.errstate(over="ignore", invalid="ignore"):
            while (live := _longer_than(counts, done)) >= _FEW:
                step = x[starts[:live] + done]
                n[:live] += 1
                distance = step - mean[:live]
                mean[:live] += distance / n[:live]
                squares[:live] += distance * (step - mean[:live])
                done += 1
        for i in range(live):  # a few hot keys are left: the same steps, one by one
            begin = int(starts[i])
            n[i], mean[i], squares[i] = _welford(
                int(n[i]), float(mean[i]), float(squares[i]), x[begin + done : begin + int(counts[i])].tolist()
            )
        for name, state in ((self.n, n), (self.mean, mean), (self.squares, squares)):
            table.column(name)[targets] = state

    def raw(self, table: KeyedTable, rows: np.ndarray) -> list[pl.Series]:
        return [pl.Series(c, table.column(c)[rows]) for c in self.values]

    def combine(self, table: KeyedTable, rows: np.ndarray, groups: np.ndarray, count: int) -> list[pl.Series]:
        some = table.column(self.n)[rows] > 0
        rows, groups = rows[some], groups[some]
        out = {c: np.zeros(count, dtype=t.dtype) for c, t in self.values.items()}
        n, mean, squares = out.values()
        if len(rows):
            targets, starts, counts, order = runs_by_length(groups)
            for step in range(int(counts[0])):
                live = _longer_than(counts, step)
                group, row = targets[:live], rows[order[starts[:live] + step]]
                self._chan(table, row, group, n, mean, squares)
        return [pl.Series(c, a) for c, a in out.items()]

    def _chan(
        self,
        table: KeyedTable,
        row: np.ndarray,
        group: np.ndarray,
        n: np.ndarray,
        mean: np.ndarray,
        squares: np.ndarray,
    ) -> None:
        n_b, mean_b, squares_b = (table.column(c)[row] for c in self.values)
        n_a = n[group]
        total = n_a + n_b
        with np.errstate(over="ignore", invalid="ignore"):
            apart = mean_b - mean[group]
            # A group's first pane is taken as it is, to the last bit.
            mean[group] = np.where(n_a == 0, mean_b, mean[group] + apart * (n_b / total))
            squares[group] = np.where(
                n_a == 0, squares_b, squares[group] + squares_b + apart * apart * (n_a * (n_b / total))
            )
        n[group] = total

    def store(self, table: KeyedTable, rows: np.ndarray, raw: pl.DataFrame) -> None:
        for c in self.values:
            write(table, c, rows, raw[c])

    def result(self) -> pl.Expr:
        variance = pl.col(self.squares) / (pl.col(self.n) - self.ddof)
        return pl.when(pl.col(self.n) > self.ddof).then(variance.sqrt() if self.root else variance)


def _welford(n: int, mean: float, squares: float, values: Sequence[float]) -> tuple[int, float, float]:
    for x in values:
        n += 1
        distance = x - mean
        mean += distance / n
        squares += distance * (x - mean)
    return n, mean, squares


def runs_by_length(targets: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Rows grouped by target, in order within each: (target, start, count) of each group, longest first, and the order
    of rows that starts refer to.
    """
    order = np.argsort(targets, kind="stable")
    ordered = targets[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    counts = np.diff(np.r_[starts, len(ordered)])
    longest = np.argsort(-counts, kind="stable")
    return ordered[starts][longest], starts[longest], counts[longest], order


def _longer_than(counts: np.ndarray, length: int) -> int:
    """How many of ``counts``, which fall, are greater."""
    return int(np.searchsorted(-counts, -length, side="left"))


class Pick(Accumulator):
    """The first or last non-null value, by source order."""

    associative = False

    def __init__(self, name: str, x: pl.Expr, keep: Kept, last: bool) -> None:
        self.name = name
        self.dtype = keep.dtype
        self.keep = keep
        self.x = keep.down(x)
        self.last = last
        self.column, self.seen = f"__{name}_v", f"__{name}_n"
        self.values = {self.column: keep.value, self.seen: numeric(np.bool_, False)}

    def partial(self) -> list[pl.Expr]:
        raise NotImplementedError("goes row by row")

    def regroup(self) -> list[pl.Expr]:
        raise NotImplementedError("goes row by row")

    def add(self, table: KeyedTable, rows: np.ndarray, frame: pl.DataFrame) -> None:
        raise NotImplementedError("goes row by row")

    def single(self) -> list[pl.Expr]:
        return [self.x.alias(self.column)]

    def _picked(self, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Each distinct target, and the position that wins."""
        if not self.last:
            return np.unique(targets, return_index=True)
        found, position = np.unique(targets[::-1], return_index=True)
        return found, len(targets) - 1 - position

    def add_rows(self, table: KeyedTable, rows: np.ndarray, frame: pl.DataFrame) -> None:
        values = frame[self.column]
        if values.null_count():
            rows, values = rows[values.is_not_null().to_numpy()], values.drop_nulls()
        target, position = self._picked(rows)
        if not self.last:
            fresh = ~table.column(self.seen)[target]
            target, position = target[fresh], position[fresh]
        write(table, self.column, target, values.gather(position))
        table.column(self.seen)[target] = True

    def raw(self, table: KeyedTable, rows: np.ndarray) -> list[pl.Series]:
        seen = table.column(self.seen)[rows]
        return [_present(self.column, table.column(self.column)[rows], seen, self.keep), pl.Series(self.seen, seen)]

    def combine(self, table: KeyedTable, rows: np.ndarray, groups: np.ndarray, count: int) -> list[pl.Series]:
        some = table.column(self.seen)[rows]
        rows, groups = rows[some], groups[some]
        target, position = self._picked(groups)
        values = np.full(count, self.keep.value.fill, dtype=self.keep.value.dtype)
        values[target] = table.column(self.column)[rows[position]]
        seen = np.zeros(count, dtype=np.bool_)
        seen[target] = True
        return [_present(self.column, values, seen, self.keep), pl.Series(self.seen, seen)]

    def store(self, table: KeyedTable, rows: np.ndarray, raw: pl.DataFrame) -> None:
        write(table, self.column, rows, _filled(raw[self.column], self.keep))
        write(table, self.seen, rows, raw[self.seen])

    def result(self) -> pl.Expr:
        return self.keep.up(pl.col(self.column))


def _present(name: str, values: np.ndarray, seen: np.ndarray, keep: Kept) -> pl.Series:
    if values.dtype == object:
        return pl.Series(name, values.tolist(), dtype=keep.stored)
    series = pl.Series(name, values, dtype=keep.stored)
    return series if seen.all() else series.set(pl.Series(~seen), None)


def _filled(values: pl.Series, keep: Kept) -> pl.Series:
    return values if keep.value.codec else values.fill_null(0)


class PickBy(Accumulator):
    """The value of the row that comes first or last in the order of another column."""

    associative = True

    def __init__(self, name: str, x: pl.Expr, keep: Kept, by: pl.Expr, by_keep: Kept, last: bool) -> None:
        self.name = name
        self.dtype = keep.dtype
        self.keep, self.by_keep = keep, by_keep
        self.last = last
        self.column, self.by, self.seen = f"__{name}_v", f"__{name}_w", f"__{name}_n"
        value, order = keep.down(x), by_keep.down(by)
        if keep.stored == pl.Float64:
            value = one_zero(value)
        if by_keep.stored == pl.Float64:
            order = one_zero(order.fill_nan(None))
        both = value.is_not_null() & order.is_not_null()
        self.inputs = [pl.when(both).then(value).alias(self.column), pl.when(both).then(order).alias(self.by)]
        self.values = {self.column: keep.value, self.by: by_keep.value, self.seen: numeric(np.bool_, False)}

    def partial(self) -> list[pl.Expr]:
        """NaN as a value loses to any other of the same order, here and wherever partial results meet."""
        value, order = pl.col(self.column), pl.col(self.by)
        best = order.max() if self.last else order.min()
        among = value.filter(order == best)
        return [(among.max() if self.last else among.min()).alias(self.column), best.alias(self.by)]

    def regroup(self) -> list[pl.Expr]:
        return self.partial()

    def single(self) -> list[pl.Expr]:
        return [pl.col(self.column), pl.col(self.by)]

    def add(self, table: KeyedTable, rows: np.ndarray, frame: pl.DataFrame) -> None:
        self.add_rows(table, rows, frame)

    def add_rows(self, table: KeyedTable, rows: np.ndarray, frame: pl.DataFrame) -> None:
        changed = table.distinct(rows)
        before = self._frame(table, changed, changed)
        new = frame.select(pl.Series("__t", rows), self.column, self.by)
        best = pl.concat([before, new]).filter(pl.col(self.by).is_not_null()).group_by("__t").agg(self.partial())
        target = best["__t"].to_numpy()
        write(table, self.column, target, best[self.column])
        write(table, self.by, target, best[self.by])
        table.column(self.seen)[target] = True

    def _frame(self, table: KeyedTable, rows: np.ndarray, targets: np.ndarray) -> pl.DataFrame:
        seen = table.column(self.seen)[rows]
        value = _present(self.column, table.column(self.column)[rows], seen, self.keep)
        order = _present(self.by, table.column(self.by)[rows], seen, self.by_keep)
        return pl.DataFrame([pl.Series("__t", targets), value, order])

    def raw(self, table: KeyedTable, rows: np.ndarray) -> list[pl.Series]:
        return self._frame(table, rows, rows).drop("__t").get_columns()

    def combine(self, table: KeyedTable, rows: np.ndarray, groups: np.ndarray, count: int) -> list[pl.Series]:
        best = self._frame(table, rows, groups).group_by("__t").agg(self.partial())
        every = pl.DataFrame({"__t": np.arange(count, dtype=groups.dtype)})
        return every.join(best, on="__t", how="left", maintain_order="left").drop("__t").get_columns()

    def layout(self) -> str:
        return f"by {self.by_keep.dtype}"

    def store(self, table: KeyedTable, rows: np.ndarray, raw: pl.DataFrame) -> None:
        write(table, self.column, rows, _filled(raw[self.column], self.keep))
        write(table, self.by, rows, _filled(raw[self.by], self.by_keep))
        table.column(self.seen)[rows] = raw[self.by].is_not_null().to_numpy()

    def result(self) -> pl.Expr:
        return self.keep.up(pl.col(self.column))


class PickRow(Accumulator):
    """Several values of the one row that comes first or last in the order of another column, as a struct.

    Of rows of equal order the one with the least or greatest values wins: by the first column, then the second, and so
    on, null before all others. The values stay those of one row.
    """

    associative = True

    def __init__(
        self, name: str, xs: Sequence[tuple[str, pl.Expr, Kept]], by: pl.Expr, by_keep: Kept, last: bool
    ) -> None:
        self.name = name
        self.names = [n for n, _, _ in xs]
        self.keeps = [k for _, _, k in xs]
        self.by_keep = by_keep
        self.dtype = pl.Struct({n: k.dtype for n, _, k in xs})
        self.last = last
        self.columns = [f"__{name}_v{i}" for i in range(len(xs))]
        self.absent = [f"__{name}_a{i}" for i in range(len(xs))]
        self.by, self.seen = f"__{name}_w", f"__{name}_n"
        order = by_keep.down(by)
        if by_keep.stored == pl.Float64:
            order = one_zero(order.fill_nan(None))
        self.inputs = [order.alias(self.by)]
        for column, (_, x, keep) in zip(self.columns, xs, strict=True):
            value = one_nan(keep.down(x)) if keep.stored == pl.Float64 else keep.down(x)
            self.inputs.append(value.alias(column))
        self.values = {self.by: by_keep.value, self.seen: numeric(np.bool_, False)}
        for column, absent, keep in zip(self.columns, self.absent, self.keeps, strict=True):
            self.values |= {column: keep.value, absent: numeric(np.bool_, False)}

    def partial(self) -> list[pl.Expr]:
        order = pl.col(self.by)
        best = order.max() if self.last else order.min()
        among = [pl.col(c).filter(order == best) for c in self.columns]
        ranked = [x.sort_by(among, nulls_last=False) for x in among]
        picked = [(x.last() if self.last else x.first()).alias(c) for x, c in zip(ranked, self.columns, strict=True)]
        return [*picked, best.alias(self.by)]

    def regroup(self) -> list[pl.Expr]:
        return self.partial()

    def single(self) -> list[pl.Expr]:
        return [*map(pl.col, self.columns), pl.col(self.by)]

    def add(self, table: KeyedTable, rows: np.ndarray, frame: pl.DataFrame) -> None:
        self.add_rows(table, rows, frame)

    def add_rows(self, table: KeyedTable, rows: np.ndarray, frame: pl.DataFrame) -> None:
        changed = table.distinct(rows)
        new = frame.select(pl.Series("__t", rows), *self.columns, self.by)
        both = pl.concat([self._frame(table, changed, changed), new])
        best = both.filter(pl.col(self.by).is_not_null()).group_by("__t").agg(self.partial())
        self._write(table, best["__t"].to_numpy(), best)

    def _write(self, table: KeyedTable, target: np.ndarray, best: pl.DataFrame) -> None:
        for column, absent, keep in zip(self.columns, self.absent, self.keeps, strict=True):
            write(table, column, target, _filled(best[column], keep))
            table.column(absent)[target] = best[column].is_null().to_numpy()
        write(table, self.by, target, _filled(best[self.by], self.by_keep))
        table.column(self.seen)[target] = best[self.by].is_not_null().to_numpy()

    def _frame(self, table: KeyedTable, rows: np.ndarray, targets: np.ndarray) -> pl.DataFrame:
        seen = table.column(self.seen)[rows]
        values = [
            _present(column, table.column(column)[rows], seen & ~table.column(absent)[rows], keep)
            for column, absent, keep in zip(self.columns, self.absent, self.keeps, strict=True)
        ]
        order = _present(self.by, table.column(self.by)[rows], seen, self.by_keep)
        return pl.DataFrame([pl.Series("__t", targets), *values, order])

    def raw(self, table: KeyedTable, rows: np.ndarray) -> list[pl.Series]:
        return self._frame(table, rows, rows).drop("__t").get_columns()

    def combine(self, table: KeyedTable, rows: np.ndarray, groups: np.ndarray, count: int) -> list[pl.Series]:
        best = self._frame(table, rows, groups).group_by("__t").agg(self.partial())
        every = pl.DataFrame({"__t": np.arange(count, dtype=groups.dtype)})
        return every.join(best, on="__t", how="left", maintain_order="left").drop("__t").get_columns()

    def layout(self) -> str:
        return f"by {self.by_keep.dtype}"

    def store(self, table: KeyedTable, rows: np.ndarray, raw: pl.DataFrame) -> None:
        self._write(table, rows, raw)

    def result(self) -> pl.Expr:
        parts = zip(self.names, self.columns, self.keeps, strict=True)
        whole = pl.struct([keep.up(pl.col(column)).alias(name) for name, column, keep in parts])
        return pl.when(pl.col(self.by).is_not_null()).then(whole)


__all__ = ["Moments", "Pick", "PickBy", "PickRow"]
