"""Stateless steps: polars expressions, functions on a batch, functions on a row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import polars as pl

from penstock.errors import UserCodeError
from penstock.frames import pick, take
from penstock.operators.base import PUNCTUATION, Step, StepContext, tags, visible

RAW_CHARS_MAX = 500

RowResult = Mapping[str, Any] | Iterable[Mapping[str, Any]] | None


def show(record: object) -> str:
    text = repr(record)
    return text if len(text) <= RAW_CHARS_MAX else text[: RAW_CHARS_MAX - 1] + "…"


def user_code_error(operator: str, epoch: int, record: object, cause: BaseException) -> UserCodeError:
    return UserCodeError(
        f"operator '{operator}' raised {type(cause).__name__}: {cause} (epoch {epoch}, record {show(record)}).",
        remedy="Fix the function and run again with the same checkpoint: nothing of this epoch was written.",
        operator=operator,
        epoch=epoch,
        record=show(record),
        cause=f"{type(cause).__name__}: {cause}",
    )


class ExprStep(Step):
    """``select``, ``with_columns`` or ``where`` with polars expressions."""

    def __init__(self, id: str, kind: str, exprs: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        self.id = id
        self.kind = kind
        self.exprs = exprs
        self.named = dict(named)

    def run(self, frame: pl.DataFrame, context: StepContext) -> pl.DataFrame:
        try:
            if self.kind == "where":
                return frame.filter(*self.exprs, **self.named)
            if self.kind == "with_columns":
                return frame.with_columns(*self.exprs, **self.named)
            return frame.select(*self.exprs, *tags(frame), **self.named)
        except pl.exceptions.PolarsError as error:
            raise _batch_error(self, frame, context, error) from None

    def describe(self) -> str:
        return self.kind


class BatchStep(Step):
    """A function from a batch to a batch (polars, or Arrow). It may return more or fewer rows."""

    def __init__(self, id: str, function: Callable[[Any], Any], arrow: bool, schema: pl.Schema | None) -> None:
        self.id = id
        self.function = function
        self.arrow = arrow
        self.schema = schema

    def call(self, frame: pl.DataFrame) -> pl.DataFrame:
        given = frame.select(visible(frame.columns))
        result = self.function(given.to_arrow() if self.arrow else given)
        if isinstance(result, pl.LazyFrame):
            result = result.collect()
        out = result if isinstance(result, pl.DataFrame) else pl.from_arrow(result)
        if not isinstance(out, pl.DataFrame):
            raise TypeError(f"the function returned {type(result).__name__}, not a table")
        if self.schema is not None:
            missing = [c for c in self.schema if c not in out.columns]
            if missing:
                raise TypeError(f"the function's result has no column {', '.join(missing)}")
            out = out.select(pl.col(c).cast(t) for c, t in self.schema.items())
        return out

    def run(self, frame: pl.DataFrame, context: StepContext) -> pl.DataFrame:
        try:
            if PUNCTUATION in frame.columns:
                return self._between_punctuation(frame)
            return self.call(frame)
        except (Exception, SystemExit) as error:
            raise _batch_error(self, frame, context, error) from error

    def by_row(self, frame: pl.DataFrame, context: StepContext) -> pl.DataFrame:
        """Called with one row after the other: slow, but what it gives for a row can be put in the row's place."""
        hidden = tags(frame)
        given = frame.select(visible(frame.columns))
        try:
            made = [self.call(given[i]) for i in range(frame.height)]
        except Exception as error:
            raise _batch_error(self, frame, context, error) from error
        causes = np.repeat(np.arange(frame.height), [out.height for out in made])
        return pl.concat(made).hstack(take(pick(frame, hidden), causes))

    def _between_punctuation(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Which rows made a row is the function's secret: so it gets the rows between two punctuations at a time."""
        parts = frame.partition_by(PUNCTUATION, maintain_order=True)
        made = [(self.call(part), part[PUNCTUATION][0]) for part in parts]
        return pl.concat([out.with_columns(pl.lit(mark, pl.Int64).alias(PUNCTUATION)) for out, mark in made])

    def describe(self) -> str:
        return "map_batches"


class RowStep(Step):
    """A function on a row (a dict): returns a dict, several, or None to drop it. The easy way, not the fast one."""

    def __init__(self, id: str, function: Callable[[dict[str, Any]], RowResult], schema: pl.Schema) -> None:
        self.id = id
        self.function = function
        self.schema = schema

    def run(self, frame: pl.DataFrame, context: StepContext) -> pl.DataFrame:
        hidden = tags(frame)
        out: list[tuple[Any, ...]] = []
        made_by: list[int] = []
        names = self.schema.names()
        for i, row in enumerate(pick(frame, visible(frame.columns)).iter_rows(named=True)):
            try:
                result = self.function(row)
                if result is None:
                    continue
                several = [result] if isinstance(result, Mapping) else list(result)
                made = [tuple(r[n] for n in names) for r in several]
            except (Exception, SystemExit) as error:
                if context.on_error == "fail":
                    raise user_code_error(self.id, context.epoch, row, error) from error
                context.dead.append((self.id, f"epoch {context.epoch}", f"{type(error).__name__}: {error}", show(row)))
                continue
            out.extend(made)
            if hidden:
                made_by.extend([i] * len(made))
        try:
            result_frame = pl.DataFrame(out, schema=self.schema, orient="row")
        except (pl.exceptions.PolarsError, TypeError, OverflowError) as error:
            raise user_code_error(self.id, context.epoch, out[0] if out else None, error) from error
        if hidden:
            result_frame = result_frame.hstack(take(pick(frame, hidden), np.array(made_by, dtype=np.int64)))
        return result_frame

    def describe(self) -> str:
        return "map_rows"


def _batch_error(step: Step, frame: pl.DataFrame, context: StepContext, error: BaseException) -> UserCodeError:
    """Name the record: halve the batch until one row alone raises. If none does, show the first row."""
    low, high = 0, frame.height
    while high - low > 1:
        middle = (low + high) // 2
        if _raises(step, frame[low:middle]):
            high = middle
        elif _raises(step, frame[middle:high]):
            low = middle
        else:
            break
    record = frame.select(visible(frame.columns)).row(low, named=True) if frame.height else None
    return user_code_error(step.id, context.epoch, record, error)


def _raises(step: Step, frame: pl.DataFrame) -> bool:
    try:
        if isinstance(step, BatchStep):
            step.call(frame)
        elif isinstance(step, ExprStep):
            method = {"where": frame.filter, "with_columns": frame.with_columns, "select": frame.select}[step.kind]
            method(*step.exprs, **step.named)
    except (Exception, SystemExit):
        return True
    return False
