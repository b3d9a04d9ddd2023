"""Event time: durations, the time of each row, and what becomes of rows whose time cannot be right.

Every operator with a watermark reads times through :func:`timed_rows`, so that all of them agree on what a time is.

**Times that cannot be right.** A watermark only goes forward: a single row of the year 55000 would close every window
and make all that follows late. Such rows have one cause, a wrong unit (nanoseconds read as microseconds, microseconds
as milliseconds). So a time before 1870 or from 2200 on is set aside as a dead letter, as is a row without a time. That
costs one minimum and one maximum for each batch. Units that are too *small* (milliseconds read as microseconds) put
rows into January 1970: plausible times, and no harm to anything but the windows they fall into.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

import numpy as np
import polars as pl

from penstock.errors import FlowError
from penstock.operators.aggregates import Aggregate
from penstock.operators.base import NEVER, Dead, KeyedOperator, visible
from penstock.operators.steps import show

Duration = str | timedelta | int | float

_UNITS_US = {"us": 1, "ms": 1000, "s": 1_000_000, "m": 60_000_000, "h": 3_600_000_000, "d": 86_400_000_000}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s|m|h|d)")

TIME_US_MIN: Final = (datetime(1870, 1, 1) - datetime(1970, 1, 1)) // timedelta(microseconds=1)
TIME_US_MAX: Final = (datetime(2200, 1, 1) - datetime(1970, 1, 1)) // timedelta(microseconds=1)
"""Times outside are taken for times in a wrong unit."""
_US_OF: Final = {"ns": 0.001, "us": 1, "ms": 1000}
_LONG_AGO_US: Final = -(2**62)
"""Before every time there is; far enough from the end of the integers to reckon with."""


class Clock:
    """See :data:`CLOCK`."""

    def __repr__(self) -> str:
        return "ps.CLOCK"


CLOCK: Final = Clock()
"""``on=ps.CLOCK``: a row's time is the clock of its epoch, as it was logged: the same again when the epoch runs again.
"""


def microseconds(value: Duration, what: str) -> int:
    """``"30s"``, ``"1h30m"``, ``timedelta``, or a number of seconds."""
    if isinstance(value, timedelta):
        return value // timedelta(microseconds=1)
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e12:
        return round(value * 1_000_000)
    parts = _DURATION.findall(value) if isinstance(value, str) else []
    if not parts or re.sub(r"\s+", "", _DURATION.sub("", str(value))):
        raise FlowError(
            f"{what}: {value!r} is not a duration.",
            remedy="Write it like '30s', '500ms', '1h30m' or '1d', or pass a datetime.timedelta.",
        )
    return sum(round(float(n) * _UNITS_US[u]) for n, u in parts)


def positive(value: Duration, what: str, example: str) -> int:
    """A duration longer than nothing."""
    us = microseconds(value, what)
    if us <= 0:
        raise FlowError(f"{what} must be greater than zero, not {value!r}.", remedy=f"For example {example}.")
    return us


def not_negative(value: Duration, what: str) -> int:
    us = microseconds(value, what)
    if us < 0:
        raise FlowError(f"{what} cannot be negative, but is {value!r}.", remedy=f"Use {what}='0s' or more.")
    return us


def one_of(value: Any, allowed: tuple[str, ...], what: str) -> str:
    if value not in allowed:
        raise FlowError(f"{what}={value!r} is not known.", remedy=f"Use {' or '.join(repr(a) for a in allowed)}.")
    return str(value)


def clamped(watermark: Any) -> Any:
    """A watermark to reckon with: the one before all time is so near the end of the integers that sums overflow."""
    if isinstance(watermark, np.ndarray):
        return np.maximum(watermark, _LONG_AGO_US)
    return max(watermark, _LONG_AGO_US)


def timed_rows(operator: str, frame: pl.DataFrame, on: str) -> tuple[pl.DataFrame, np.ndarray, tuple[Dead, ...]]:
    """The rows that have a time, their times in microseconds, and the others as dead letters."""
    time = frame[on]
    physical = time.cast(pl.Int64)
    low, high = _limits(time.dtype)
    least, greatest = physical.min(), physical.max()
    dead: tuple[Dead, ...] = ()
    if time.null_count() or (least is not None and not (low <= least and greatest < high)):  # type: ignore[operator]
        good = physical.is_between(low, high, closed="left").fill_null(False)
        dead = _dead_letters(operator, frame, on, good)
        frame = frame.filter(good)
        time = frame[on]
    return frame, time.cast(pl.Datetime("us")).cast(pl.Int64).to_numpy(), dead


def usable_times(frame: pl.DataFrame, on: str | None) -> np.ndarray:
    """Times in microseconds, those that cannot be right as before all time: they say nothing of how far time is."""
    assert on is not None
    low, high = _limits(frame.schema[on])
    physical = frame[on].cast(pl.Int64)
    dtype = frame.schema[on]
    if isinstance(dtype, pl.Datetime) and dtype.time_unit == "us" and not physical.null_count() and len(physical):
        plain: np.ndarray = physical.to_numpy()
        if low <= plain.min() and plain.max() < high:
            return plain
    good = physical.is_between(low, high, closed="left").fill_null(False)
    times = pl.select(pl.when(good).then(frame[on])).to_series().cast(pl.Datetime("us")).cast(pl.Int64)
    return times.fill_null(NEVER).to_numpy()


def _limits(dtype: pl.DataType) -> tuple[int, int]:
    """The plausible times, as a column of this type stores them (a cast to microseconds might overflow first)."""
    unit_us = 86_400_000_000 if isinstance(dtype, pl.Date) else _US_OF[dtype.time_unit]  # type: ignore[attr-defined]
    return round(TIME_US_MIN / unit_us), round(TIME_US_MAX / unit_us)


def _dead_letters(operator: str, frame: pl.DataFrame, on: str, good: pl.Series) -> tuple[Dead, ...]:
    rows = np.flatnonzero(~good.to_numpy())
    bad = frame.select(visible(frame.columns))[rows]
    times = frame[on][rows]
    empty = times.is_null().to_list()
    stored = times.to_physical().to_list()
    # Python's datetime ends in the year 9999: a time beyond it is shown as the number it is.
    shown = (bad.with_columns(times.to_physical().alias(on)) if on in bad.columns else bad).iter_rows(named=True)
    return tuple(
        (
            operator,
            f"row {row} of its batch",
            f"no time in column '{on}'" if none else f"time {value} in column '{on}' is implausible: wrong unit?",
            show(record),
        )
        for row, none, value, record in zip(rows.tolist(), empty, stored, shown, strict=True)
    )


class Window(ABC):
    """One kind of window, as ``key_by(...).window(...)`` takes it."""

    on: str | Clock | None
    """The column of event time; None: rows are counted, not timed."""
    lateness_us: int = 0
    hold_us: int = 0
    shared: bool = False
    """Every key has the same windows, and all results of a window come in one epoch: they can be ranked."""

    @abstractmethod
    def aggregate(
        self, id: str, key: Sequence[str], aggregates: Mapping[str, Aggregate], schema: pl.Schema
    ) -> KeyedOperator: ...

    def late(self, id: str, key: Sequence[str], schema: pl.Schema) -> KeyedOperator:
        """The rows that come too late for these windows."""
        from penstock.operators.late import LateRows

        assert isinstance(self.on, str)
        return LateRows(id, key, self, self.on, schema)

    def over_at(self, times_us: np.ndarray) -> np.ndarray:
        """From which watermark on a row of each time comes too late."""
        raise NotImplementedError

    @abstractmethod
    def describe(self) -> str: ...


def seconds(us: int) -> str:
    return f"{us / 1e6:g}s"
