"""Punctuation: a source that says itself how far time has come.

Without it the watermark is a guess, the greatest event time seen less the lateness. A source that knows better sends
punctuation (TimeStream's CTI): "no event earlier than this will follow". Here it comes as rows among the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from penstock.connectors.base import Backlog, BadRecord, Offset, ReadResult, Source, SourceContext, SourceRange, Split
from penstock.errors import FlowError


class PunctuatedSource(Source):
    """See :func:`punctuated`."""

    punctuated = True

    def __init__(self, inner: Source, when: pl.Expr, on: str) -> None:
        self.inner = inner
        self.when = when
        self.on = on
        schema = inner.schema()
        if on not in schema or not isinstance(schema[on], pl.Datetime | pl.Date):
            raise FlowError(
                f"punctuation: column '{on}' is not a time of this source.",
                remedy=f"Name the column with the event time; it has {dict(schema)}.",
            )
        try:
            kind = pl.LazyFrame(schema=schema).select(when.alias("when")).collect_schema()["when"]
        except pl.exceptions.PolarsError as error:
            raise FlowError(
                f"punctuation: when= does not fit the source: {str(error).splitlines()[0]}.",
                remedy=f"It has the columns {', '.join(schema)}.",
            ) from None
        if kind != pl.Boolean:
            raise FlowError(f"punctuation: when= gives {kind}, not true or false.", remedy="Write a comparison.")

    def schema(self) -> pl.Schema:
        return self.inner.schema()

    def initial_offset(self) -> Offset:
        return self.inner.initial_offset()

    def plan(self, start: Offset, rows_max: int) -> SourceRange | None:
        return self.inner.plan(start, rows_max)

    def splits(self, start: Offset, end: Offset, parallelism: int) -> list[Split]:
        return self.inner.splits(start, end, parallelism)

    def read(self, source_id: str, split: Split) -> ReadResult:
        result = self.inner.read(source_id, split)
        frame = result.frame.with_row_index("__n").with_columns(self.when.fill_null(False).alias("__when"))
        rows = frame.filter(~pl.col("__when"))
        said = frame.filter("__when")
        timeless = said.filter(pl.col(self.on).is_null())
        said = said.filter(pl.col(self.on).is_not_null())
        # A promise stands after as many of the remaining rows as came before it.
        before = rows["__n"].search_sorted(said["__n"])
        times = said[self.on].cast(pl.Datetime("us")).to_physical()
        bad = tuple(
            BadRecord(source_id, f"row {n} of {split}", f"punctuation without a time in '{self.on}'", "")
            for n in timeless["__n"]
        )
        marks = tuple(zip(before.to_list(), times.to_list(), strict=True))
        return ReadResult(rows.drop("__n", "__when"), (*result.bad, *bad), marks, result.set_aside)

    def backlog(self, offset: Offset) -> Backlog:
        return self.inner.backlog(offset)

    def exhausted(self, offset: Offset) -> bool:
        return self.inner.exhausted(offset)

    def open(self, context: SourceContext) -> None:
        self.inner.open(context)

    def remember(self, facts: Sequence[object]) -> None:
        self.inner.remember(facts)

    def committed(self, end: Offset) -> None:
        self.inner.committed(end)

    def close(self) -> None:
        self.inner.close()

    def describe(self) -> str:
        return f"{self.inner.describe()}, punctuated"


def punctuated(source: Source, *, when: pl.Expr, on: str) -> PunctuatedSource:
    """A source in which some rows are punctuation: a row for which ``when`` is true promises, by its time in ``on``,
    that no earlier row follows. Such rows drive event time and are not rows of the stream.
    """
    return PunctuatedSource(source, when, on)
