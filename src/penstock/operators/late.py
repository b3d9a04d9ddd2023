"""The rows that come too late for a window, as a stream of their own.

``windows.late("stragglers")`` gives exactly the rows that ``windows.aggregate(...)`` drops: both ask the same question,
whether the last window a row belongs to has ended by the watermark at the row. It can be answered only where the
watermark of the splits before is known, in the container; so all rows travel there, not partial results. Rows without
a time are dead letters of the aggregate, and not among the late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl

from penstock.operators.base import (
    HASH,
    NEVER,
    ORDER,
    Applied,
    Arrival,
    KeyedOperator,
    Prepared,
    Tick,
    canonical,
    in_order,
    row_watermarks,
)
from penstock.operators.event_time import Window, timed_rows
from penstock.operators.order import tag_columns, with_tags
from penstock.state.table import KeyedTable

WATERMARK, _END = "__wm", "__end"


def watermark_at(arrival: Arrival, tick: Tick) -> int:
    """The watermark as of the rows before a task's, as its container knows it."""
    return max(arrival.watermark, tick.watermark_before)


def given_late(frame: pl.DataFrame, schema: pl.Schema, marks: np.ndarray, tick: Tick) -> Applied:
    """Late rows, which come in order, as they go on."""
    out = frame.select(schema.names())
    if not tick.tells:
        return Applied(canonical(out, frame[HASH].to_numpy()))
    return Applied(with_tags(out, [marks, np.ones(frame.height, dtype=np.int64), *tag_columns(frame)]))


class LateRows(KeyedOperator):
    """``key_by(...).window(...).late(id)``. Keeps nothing. Its rows are counted as late by the aggregate, not here."""

    timed = True
    hands_on = True

    def __init__(self, id: str, key: Sequence[str], window: Window, on: str, schema: pl.Schema) -> None:
        self.id = id
        self.key = tuple(key)
        self.window = window
        self.on = on
        self.lateness_us = window.lateness_us
        self.hold_us = window.hold_us
        self.output = schema

    def table(self) -> None:
        return None

    def time_at(self, port: int) -> str | None:
        return self.on

    def prepare(self, frame: pl.DataFrame, from_source: bool, port: int = 0, clock_us: int = 0) -> Prepared:
        frame, ts, _ = timed_rows(self.id, frame, self.on)
        marks = row_watermarks(frame, ts, self.lateness_us) if from_source else np.full(ts.size, NEVER)
        hidden = pl.Series(WATERMARK, marks, dtype=pl.Int64), pl.Series(_END, self.window.over_at(ts), dtype=pl.Int64)
        return Prepared(frame.with_columns(*hidden), int(ts.max()) if ts.size else None)

    def apply(self, table: KeyedTable | None, arrivals: Sequence[Arrival], tick: Tick) -> Applied:
        late: list[Arrival] = []
        for a in arrivals:
            if not a.frame.height:
                continue
            marks = np.maximum(a.frame[WATERMARK].to_numpy(), watermark_at(a, tick))
            over = a.frame[_END].to_numpy() <= marks
            if over.any():
                frame = a.frame.with_columns(pl.Series(WATERMARK, marks)).filter(over)
                late.append(replace(a, frame=frame))
        if not late:
            return Applied(pl.DataFrame(schema={**self.output, ORDER: pl.UInt64()}))
        frame = in_order(late)
        return given_late(frame, self.output, frame[WATERMARK].to_numpy(), tick)

    def fingerprint(self) -> dict[str, Any]:
        return {"operator": "late"}

    def describe(self) -> str:
        return f"late for {self.window.describe()}"


__all__ = ["WATERMARK", "LateRows", "given_late", "watermark_at"]
