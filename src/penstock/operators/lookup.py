"""Columns of a static table for each row: a join that needs no state and no exchange.

The table is read when the flow is built and travels with it to every worker, so it should be small (a few million rows
at most) and it must not change under a job: a run that resumes with another table gives other rows from then on. For a
table that changes, with its changes in event time, use ``key_by(...).lookup(...)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import polars as pl

from penstock.errors import FlowError
from penstock.operators.base import Step, StepContext, one_zero
from penstock.operators.joins import HOW, right_names
from penstock.state.hashing import hashable

_READERS: dict[str, Callable[[Any], pl.DataFrame]] = {".parquet": pl.read_parquet, ".csv": pl.read_csv}


class LookupStep(Step):
    """``stream.lookup(id, table, on=...)``. Null finds null and NaN finds NaN, as everywhere."""

    def __init__(
        self, id: str, table: pl.DataFrame, on: Sequence[str], schema: pl.Schema, how: str, suffix: str
    ) -> None:
        self.id = id
        self.on = tuple(on)
        self.how = how
        if how not in HOW:
            raise FlowError(
                f"operator '{id}': how={how!r} is not known.", remedy=f"Use one of {', '.join(HOW)}.", operator=id
            )
        _check_keys(id, self.on, schema, table)
        names = right_names(id, schema, table.schema, self.on, suffix)
        self.table = table.select(*self.on, *(pl.col(a).alias(b) for a, b in names.items()))
        self.schema = pl.Schema({**schema, **{c: t for c, t in self.table.schema.items() if c not in self.on}})

    def run(self, frame: pl.DataFrame, context: StepContext) -> pl.DataFrame:
        hidden = [c for c in frame.columns if c.startswith("__")]
        how: Literal["inner", "left"] = "left" if self.how == "left" else "inner"
        out = frame.join(self.table, on=self.on, how=how, nulls_equal=True, maintain_order="left")
        return out.select(*self.schema.names(), *hidden)

    def describe(self) -> str:
        return f"{self.how} lookup by {', '.join(self.on)} in {self.table.height} rows"


def load_table(id: str, table: pl.DataFrame | str | Path) -> pl.DataFrame:
    """A DataFrame as it is; a path to a parquet or CSV file, read now."""
    if isinstance(table, pl.DataFrame):
        return table
    if isinstance(table, pl.LazyFrame):
        return table.collect()
    if not isinstance(table, str | Path):
        raise FlowError(
            f"operator '{id}': {type(table).__name__} is not a table.",
            remedy="Give a polars DataFrame or the path of a parquet or CSV file; for a stream, key_by(...).lookup.",
            operator=id,
        )
    reader = _READERS.get(Path(table).suffix.lower())
    if reader is None:
        raise FlowError(
            f"operator '{id}': '{table}' is neither .parquet nor .csv.",
            remedy="Read it yourself and pass the polars DataFrame.",
            operator=id,
        )
    try:
        return reader(table)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise FlowError(
            f"operator '{id}': the table '{table}' cannot be read: {str(error).splitlines()[0]}.",
            remedy="Check the path and the file.",
            operator=id,
        ) from None


def _check_keys(id: str, on: Sequence[str], schema: pl.Schema, table: pl.DataFrame) -> None:
    if not on:
        raise FlowError(f"operator '{id}': lookup needs at least one column in on=.", operator=id)
    for column in on:
        if column not in table.columns:
            raise FlowError(
                f"operator '{id}': the table has no column '{column}'.",
                remedy=f"Its columns are {', '.join(table.columns)}.",
                operator=id,
            )
        if schema[column] != table.schema[column]:
            raise FlowError(
                f"operator '{id}': '{column}' is {schema[column]} in the stream and {table.schema[column]} in the "
                "table.",
                remedy=f"Cast the table's column: table.with_columns(pl.col('{column}').cast(pl.{schema[column]})).",
                operator=id,
            )
        if not hashable(schema[column]):
            raise FlowError(
                f"operator '{id}': column '{column}' of type {schema[column]} cannot be looked up by.",
                remedy="Use numbers, text, times, booleans or bytes.",
                operator=id,
            )
    keys = table.select(one_zero(pl.col(c)) if schema[c].is_float() else pl.col(c) for c in on)
    repeated = table.filter(keys.is_duplicated())
    if repeated.height:
        raise FlowError(
            f"operator '{id}': the table has {repeated.height} rows whose {', '.join(on)} is not unique, for example "
            f"{repeated.select(on).row(0)}.",
            remedy=f"Keep one row of each: table.unique({list(on)!r}, keep='last', maintain_order=True).",
            operator=id,
        )


__all__ = ["LookupStep", "load_table"]
