"""Operations on frames that do not start the query engine of polars.

``select``, ``with_columns``, ``drop`` and ``filter`` each make a query, run it and collect the result. The fixed cost
does not matter for a million rows, and is most of the work for the few rows of a small epoch. These functions work
column by column, and copy nothing that polars would not copy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

import numpy as np
import polars as pl
from numpy.typing import NDArray

FEW_ROWS: Final = 1024
"""Up to this number of rows a query costs more than taking the rows by number."""


def frame_of(columns: Sequence[pl.Series]) -> pl.DataFrame:
    """Columns of one length as a frame. ``pl.DataFrame`` is slower, for it accepts many types and tells them apart."""
    return columns[0].to_frame().hstack(list(columns[1:])) if columns else pl.DataFrame()


def pick(frame: pl.DataFrame, names: Iterable[str]) -> pl.DataFrame:
    """These columns, in this order."""
    return frame_of([frame.get_column(name) for name in names])


def without(frame: pl.DataFrame, names: Collection[str]) -> pl.DataFrame:
    """All columns but these, whether it has them or not."""
    kept = [name for name in frame.columns if name not in names]
    return frame if len(kept) == frame.width else pick(frame, kept)


def with_column(frame: pl.DataFrame, column: pl.Series) -> pl.DataFrame:
    """The column at the end, or in the place of the one of its name."""
    return frame.with_columns(column) if column.name in frame.columns else frame.hstack([column])


def take(frame: pl.DataFrame, rows: NDArray[Any]) -> pl.DataFrame:
    index = pl.Series(rows.astype(np.uint32))
    return frame_of([column[index] for column in frame.get_columns()])


def rows_where(frame: pl.DataFrame, mask: NDArray[np.bool_]) -> pl.DataFrame:
    count = int(np.count_nonzero(mask))
    if count in (0, frame.height):
        return frame if count else frame.clear()
    return take(frame, np.flatnonzero(mask)) if frame.height <= FEW_ROWS else frame.filter(pl.Series(mask))


def stacked(frames: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """The frames one below the other. A column that a frame lacks, such as a file of an older flow, is null there."""
    same = all(frame.columns == frames[0].columns for frame in frames)
    return pl.concat(frames, how="vertical" if same else "diagonal")


def sorted_by(frame: pl.DataFrame, name: str) -> pl.DataFrame:
    """The frame sorted by a column of numbers without nulls. Rows with equal values keep their order."""
    values = frame.get_column(name).to_numpy()
    if (values[1:] >= values[:-1]).all():
        return frame
    few = frame.height <= FEW_ROWS
    return take(frame, np.argsort(values, kind="stable")) if few else frame.sort(name, maintain_order=True)


def alike(left: pl.Series, right: pl.Series) -> NDArray[np.bool_]:
    """For each row, whether the two values are equal. Null equals null, and NaN equals NaN."""
    nulls = left.null_count() or right.null_count()
    return (left.eq_missing(right) if nulls else left == right).to_numpy()


__all__ = [
    "FEW_ROWS",
    "alike",
    "frame_of",
    "pick",
    "rows_where",
    "sorted_by",
    "stacked",
    "take",
    "with_column",
    "without",
]
