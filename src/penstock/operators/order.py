"""The order of rows behind keyed stages: hidden columns that say which input caused a row.

A row that leaves a stage whose order matters behind it carries *tags*: whole numbers in the hidden columns ``__o0``,
``__o1`` and so on. Rows are compared by the first column, then by the second, and so on. Tags depend on the data alone,
and the tags of an epoch are never below those of an earlier epoch, so that sorting the rows of each epoch by their tags
gives one and the same sequence for every cut into epochs (``docs/decisions/0019``). The columns of a row that

* leaves a **source** are its position in the source: the split and the row in it;
* was emitted for **one row** by an operator without time are the tags of that row;
* was emitted for one row by an operator **with time** are the watermark at that row, 1, and the tags of the row;
* was emitted by a **timer** are the timer's time, 0, and the hash of the key;
* is the **result of a window** or of a join are the time at which it was due, and the hash of the key.

Where an operator that emits several rows for one row stands before another, the exchange appends a running number.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

from penstock.frames import pick, take, with_column, without

TAG = "__o"
SPLIT_BITS = 40
"""A position is the number of the split, then the number of the row in it, in this many bits."""
DIGITS_FEW = 3
TIME = "__t"
"""The greatest event time up to a row, in a frame of marks."""

Ints = NDArray[np.int64]


def tag(number: int) -> str:
    return f"{TAG}{number}"


def order_of(frame: pl.DataFrame) -> list[str]:
    """The hidden columns that say in which order rows are to be seen, the first one first."""
    return sorted((c for c in frame.columns if c.startswith(TAG) and c[len(TAG) :].isdigit()), key=_number)


def _number(name: str) -> int:
    return int(name[len(TAG) :])


def with_tags(frame: pl.DataFrame, columns: Sequence[Ints]) -> pl.DataFrame:
    """The frame with these tags, in the place of those that it has."""
    frame = without(frame, order_of(frame))
    return frame.hstack([pl.Series(tag(i), values, dtype=pl.Int64) for i, values in enumerate(columns)])


def tag_columns(frame: pl.DataFrame) -> list[Ints]:
    return [frame[name].to_numpy() for name in order_of(frame)]


def signed(hashes: NDArray[np.uint64]) -> Ints:
    """Hashes as tags: any order will do, as long as it is always the same."""
    return hashes.view(np.int64)


def positions(index: int, rows: int) -> pl.Series:
    """The positions of the rows of a split."""
    return pl.Series(tag(0), np.arange(rows, dtype=np.int64) + (index << SPLIT_BITS))


def numbered(frame: pl.DataFrame) -> pl.DataFrame:
    """One more tag, that tells rows of equal tags apart: they are in order among themselves."""
    number = np.arange(frame.height, dtype=np.int64)
    return frame.hstack([pl.Series(tag(len(order_of(frame))), number)])


def in_tag_order(frame: pl.DataFrame) -> pl.DataFrame:
    """Sorted by the tags; rows of equal tags keep their order."""
    if frame.height < 2:
        return frame
    varying: list[Ints] = []
    for name in order_of(frame):
        values = frame[name].to_numpy()
        steps = values[1:] >= values[:-1]
        if not varying and steps.all():
            if (values[1:] > values[:-1]).all():
                return frame
            if values[0] == values[-1]:
                continue
        elif (values == values[0]).all():
            continue
        varying.append(values)
    if not varying or _sorted(varying):
        return frame
    order = _stable_order(varying[0])
    if len(varying) > 1:
        first = varying[0][order]
        if (first[1:] == first[:-1]).any():  # most often one column tells all
            order = np.lexsort(varying[::-1])
    return take(frame, order)


def _stable_order(values: Ints) -> Ints:
    """As a stable ``argsort``: 16 bits at a time where few of them vary, for which numpy has a radix sort."""
    bits = (values - values.min()).view(np.uint64)
    digits = [d for d in ((bits >> np.uint64(16 * i)).astype(np.uint16) for i in range(4)) if (d != d[0]).any()]
    if len(digits) > DIGITS_FEW:
        return np.argsort(values, kind="stable")
    order = np.argsort(digits[0], kind="stable")
    for digit in digits[1:]:
        order = order[np.argsort(digit[order], kind="stable")]
    return order


def _sorted(columns: Sequence[Ints]) -> bool:
    """Whether rows are in order of these columns."""
    ahead = np.zeros(len(columns[0]) - 1, dtype=np.bool_)
    for values in columns:
        if not (ahead | (values[1:] >= values[:-1])).all():
            return False
        ahead |= values[1:] > values[:-1]
    return True


def stacked_by_tags(frames: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """Frames of one set of columns, one below the other. Tags that only some have are 0 in the others."""
    if len(frames) == 1:
        return frames[0]
    width = max(len(order_of(f)) for f in frames)
    padded = [widened(f, width) for f in frames]
    return pl.concat([padded[0], *(pick(f, padded[0].columns) for f in padded[1:])])


def widened(frame: pl.DataFrame, width: int) -> pl.DataFrame:
    have = len(order_of(frame))
    zeros = [pl.Series(tag(i), np.zeros(frame.height, dtype=np.int64)) for i in range(have, width)]
    return frame.hstack(zeros) if zeros else frame


def of_origin(frame: pl.DataFrame, number: int, depth: int) -> pl.DataFrame:
    """With the number of its origin behind the first ``depth`` tags: rows of one cause that come by several ways."""
    columns = tag_columns(widened(frame, depth))
    return with_tags(frame, [*columns[:depth], np.full(frame.height, number, dtype=np.int64), *columns[depth:]])


# -- watermarks behind keyed stages without time -----------------------------------------------------------------------


def marks_of(frame: pl.DataFrame, times: Ints) -> pl.DataFrame:
    """The tags of the rows at which the greatest time so far rises, and that time: all that others need to know."""
    rows = in_tag_order(pick(frame, order_of(frame)).hstack([pl.Series(TIME, times)]))
    reached = np.maximum.accumulate(rows[TIME].to_numpy())
    rises = np.ones(len(reached), dtype=np.bool_)
    rises[1:] = reached[1:] > reached[:-1]
    return take(with_column(rows, pl.Series(TIME, reached)), np.flatnonzero(rises))


def marked(frame: pl.DataFrame, marks: Sequence[pl.DataFrame], column: str) -> pl.DataFrame:
    """Rows in order, each with the greatest time up to it in ``column``, by the marks of all tasks upstream."""
    if (found := _placed(frame, marks)) is not None:
        at, times = found
        reached = np.full(frame.height, np.iinfo(np.int64).min)
        np.maximum.at(reached, at, times)
        return with_column(frame, pl.Series(column, np.maximum.accumulate(reached)))
    rows = pick(frame, order_of(frame)).hstack([pl.Series(TIME, np.full(frame.height, np.iinfo(np.int64).min))])
    ours = np.concatenate([np.zeros(sum(m.height for m in marks), dtype=np.bool_), np.ones(frame.height, np.bool_)])
    whole = stacked_by_tags([*marks, rows]).hstack([pl.Series("__ours", ours)])  # a row's own mark comes before it
    whole = in_tag_order(whole)
    reached = np.maximum.accumulate(whole[TIME].to_numpy())[whole["__ours"].to_numpy()]
    return with_column(frame, pl.Series(column, reached))


def _placed(frame: pl.DataFrame, marks: Sequence[pl.DataFrame]) -> tuple[Ints, Ints] | None:
    """The first row that is not before each mark, for marks that are not behind all rows, and their times. None if it
    takes more than the first two tags to tell.
    """
    names = order_of(frame)[:2]
    if len(names) < 2 or not marks:
        return None
    told = stacked_by_tags(marks)
    if len(order_of(told)) != len(order_of(frame)):
        return None
    first, second = (frame[name].to_numpy() for name in names)
    mark, next_mark = (told[name].to_numpy() for name in names)
    ties = (first[1:] == first[:-1]) & (second[1:] == second[:-1])
    if ties.any():
        return None
    low, high = np.searchsorted(first, mark, side="left"), np.searchsorted(first, mark, side="right")
    if (high - low > 1).any():
        return None
    alone = high > low
    near = np.minimum(low, len(first) - 1)
    same = np.flatnonzero(alone & (second[near] == next_mark))
    for name in order_of(frame)[2:]:
        if (frame[name].to_numpy()[near[same]] != told[name].to_numpy()[same]).any():
            return None
    at = low + (alone & (second[near] < next_mark))
    inside = at < len(first)
    return at[inside], told[TIME].to_numpy()[inside]


__all__ = [
    "in_tag_order",
    "marked",
    "marks_of",
    "numbered",
    "of_origin",
    "order_of",
    "positions",
    "signed",
    "stacked_by_tags",
    "tag_columns",
    "widened",
    "with_tags",
]
