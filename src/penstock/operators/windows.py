"""Event-time windows, tumbling and hopping, shared by panes.

Time is cut into panes of gcd(size, every); a row is counted once, in its pane, and a window is put together from its
panes when the watermark passes its end.

**What is late does not depend on epochs.** The watermark *at a row* is the greatest event time of the rows up to it in
source order, less the lateness. A row counts for those of its windows that are still open at its own watermark: ``lo``
is the end of the first such window, and rows of one pane with different ``lo`` are kept apart. Before the exchange a
task knows only its own split; the container adds what the splits before it saw (``Arrival.watermark``). So the cut
into epochs or splits changes when a window is emitted, never what is in it. A row whose windows are all closed is
late: dropped, and counted. A row without a time is counted as late too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import polars as pl

from penstock.errors import FlowError
from penstock.operators.aggregates import Accumulators, Aggregate
from penstock.operators.base import (
    HASH,
    NEVER,
    ORDER,
    Applied,
    Arrival,
    KeyedOperator,
    Prepared,
    Tick,
    in_order,
    unique_keys,
)
from penstock.state.hashing import hash_columns
from penstock.state.table import KeyedTable, TableSpec, numeric

WINDOW_START, WINDOW_END = "window_start", "window_end"
_PANE, _LO, _ROWS = "__pane", "__lo", "__rows"
_UNITS_US = {"us": 1, "ms": 1000, "s": 1_000_000, "m": 60_000_000, "h": 3_600_000_000, "d": 86_400_000_000}

Duration = str | timedelta | int | float


def microseconds(value: Duration, what: str) -> int:
    """``"30s"``, ``"1h30m"``, ``timedelta``, or a number of seconds."""
    if isinstance(value, timedelta):
        return round(value.total_seconds() * 1_000_000)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return round(value * 1_000_000)
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*(us|ms|s|m|h|d)", value) if isinstance(value, str) else []
    if not parts or re.sub(r"(\d+(?:\.\d+)?)\s*(us|ms|s|m|h|d)|\s+", "", str(value)):
        raise FlowError(
            f"{what}: {value!r} is not a duration.",
            remedy="Write it like '30s', '500ms', '1h30m' or '1d', or pass a datetime.timedelta.",
        )
    return sum(round(float(n) * _UNITS_US[u]) for n, u in parts)


@dataclass(frozen=True)
class WindowSpec:
    size_us: int
    every_us: int
    on: str
    lateness_us: int

    @property
    def pane_us(self) -> int:
        return math.gcd(self.size_us, self.every_us)

    @property
    def per_row(self) -> int:
        """Greatest number of windows one row belongs to."""
        return -(-self.size_us // self.every_us)


def hopping(size: Duration, *, every: Duration, on: str, lateness: Duration = 0) -> WindowSpec:
    """Windows of ``size`` that start ``every`` so often, by the event time in column ``on``.

    ``lateness`` is how much later than the newest event an older one may still come and be counted.
    """
    spec = WindowSpec(
        microseconds(size, "window size"), microseconds(every, "every"), on, microseconds(lateness, "lateness")
    )
    if spec.size_us <= 0 or spec.every_us <= 0:
        raise FlowError("a window's size and its hop must be greater than zero.", remedy="For example size='30s'.")
    if spec.every_us > spec.size_us:
        raise FlowError(
            "a window hops further than it is long: rows between two windows would be lost.",
            remedy="Make every= at most as long as the size.",
        )
    if spec.lateness_us < 0:
        raise FlowError("lateness cannot be negative.", remedy="Use lateness='0s' or more.")
    return spec


def tumbling(size: Duration, *, on: str, lateness: Duration = 0) -> WindowSpec:
    """Windows of ``size`` that follow one another."""
    return hopping(size, every=size, on=on, lateness=lateness)


class WindowAggregate(KeyedOperator):
    """``key_by(...).window(...).aggregate(...)``: each window once, when the watermark has passed its end."""

    timed = True

    def __init__(
        self,
        id: str,
        key: Sequence[str],
        window: WindowSpec,
        aggregates: Mapping[str, Aggregate],
        schema: pl.Schema,
    ) -> None:
        self.id = id
        self.key = tuple(key)
        self.window = window
        self.lateness_us = window.lateness_us
        self.hold_us = window.size_us
        self.accumulators = Accumulators(id, aggregates, schema)
        self.key_schema = pl.Schema({k: schema[k] for k in key})
        times = {WINDOW_START: pl.Datetime("us"), WINDOW_END: pl.Datetime("us")}
        self.output = pl.Schema({**self.key_schema, **times, **self.accumulators.output})
        self.table_key = pl.Schema({**self.key_schema, _PANE: pl.Int64(), _LO: pl.Int64()})

    def table(self) -> TableSpec:
        # Pane and lo once more as values: numpy finds the rows of a closing window without touching the keys.
        times = {"__p": numeric(np.int64, 0), "__l": numeric(np.int64, 0)}
        return TableSpec(self.table_key, {**self.accumulators.values, **times})

    # -- before the exchange ---------------------------------------------------------------------------------------

    def prepare(self, frame: pl.DataFrame, from_source: bool) -> Prepared:
        w = self.window
        time = frame[w.on]
        timeless = time.null_count()
        if timeless:
            frame = frame.filter(time.is_not_null())
            time = frame[w.on]
        if not frame.height:
            empty = frame.with_columns(pl.lit(0, pl.Int64).alias(_PANE), pl.lit(0, pl.Int64).alias(_LO))
            return Prepared(self._partial(empty), None, timeless)
        ts = time.cast(pl.Datetime("us")).to_physical().to_numpy()
        first_end = ((ts - w.size_us) // w.every_us + 1) * w.every_us + w.size_us
        lo, late = first_end, timeless
        keep: np.ndarray | None = None
        if from_source:
            watermark = np.maximum.accumulate(ts) - w.lateness_us
            if not (watermark < first_end).all():
                lo = np.maximum(first_end, self._next_end(watermark))
                keep = ts // w.every_us * w.every_us + w.size_us > watermark
        frame = frame.with_columns(pl.Series(_PANE, ts // w.pane_us), pl.Series(_LO, lo))
        if keep is not None and not keep.all():
            late += int((~keep).sum())
            frame = frame.filter(pl.Series(keep))
        return Prepared(self._partial(frame), int(ts.max()), late)

    def _partial(self, frame: pl.DataFrame) -> pl.DataFrame:
        by = [*self.key, _PANE, _LO]
        if self.accumulators.associative:
            columns = [acc.partial.alias(acc.name) for acc in self.accumulators.columns]
            return frame.group_by(by).agg(*columns, pl.len().cast(pl.Int64).alias(_ROWS))
        return self.accumulators.partial(frame, by).with_columns(pl.lit(1, pl.Int64).alias(_ROWS))

    def _next_end(self, watermark: Any) -> Any:
        """End of the first window that is still open at a watermark."""
        w = self.window
        return ((watermark - w.size_us) // w.every_us + 1) * w.every_us + w.size_us

    def _last_end(self, pane: np.ndarray) -> np.ndarray:
        w = self.window
        return pane * w.pane_us // w.every_us * w.every_us + w.size_us

    # -- in the container ------------------------------------------------------------------------------------------

    def apply(self, table: KeyedTable | None, arrivals: Sequence[Arrival], tick: Tick) -> Applied:
        assert table is not None
        late = 0
        open_arrivals: list[Arrival] = []
        for a in arrivals:
            if not a.frame.height:
                continue
            frame, dropped = self._hold_back(a.frame, max(a.watermark, tick.watermark_before))
            late += dropped
            if frame.height:
                open_arrivals.append(Arrival(frame, a.origin, a.index, a.from_source, a.watermark, a.port))
        if open_arrivals:
            if self.accumulators.associative:
                for a in open_arrivals:
                    self._merge(table, a.frame)
            else:
                self._merge(table, in_order(open_arrivals))
        if tick.watermark > tick.watermark_before:
            return Applied(self._close(table, tick.watermark_before, tick.watermark), late)
        return Applied(pl.DataFrame(schema={**self.output, ORDER: pl.UInt64()}), late)

    def _hold_back(self, frame: pl.DataFrame, watermark: int) -> tuple[pl.DataFrame, int]:
        """Drop rows whose windows had all closed before this split; move the rest to the first window still open."""
        if watermark == NEVER:
            return frame, 0
        next_end = self._next_end(watermark)
        lo = frame[_LO].to_numpy()
        if (lo >= next_end).all():
            return frame, 0
        keep = self._last_end(frame[_PANE].to_numpy()) > watermark
        late = int(frame[_ROWS].filter(pl.Series(~keep)).sum())
        frame = frame.with_columns(pl.Series(_LO, np.maximum(lo, next_end))).filter(pl.Series(keep))
        if self.accumulators.associative:  # two values of lo may have become one
            by = [HASH, *self.key, _PANE, _LO]
            frame = frame.group_by(by).agg(
                *(acc.merge_expr() for acc in self.accumulators.columns), pl.col(_ROWS).sum()
            )
        return frame, late

    def _merge(self, table: KeyedTable, frame: pl.DataFrame) -> None:
        pane, lo = frame[_PANE].to_numpy(), frame[_LO].to_numpy()
        hashes = mix_low(frame[HASH].to_numpy(), pane, lo)
        self.accumulators.merge_into(table, hashes, frame.select(self.table_key.names()), frame)
        rows = table.find(hashes, frame.select(self.table_key.names()))
        table.column("__p")[rows] = pane
        table.column("__l")[rows] = lo

    def _close(self, table: KeyedTable, before: int, watermark: int) -> pl.DataFrame:
        """Emit every window whose end the watermark has passed since ``before``, then forget the panes no window
        needs.
        """
        w = self.window
        rows = table.live_rows()
        lo = table.column("__l")[rows]
        due = lo <= watermark
        rows, lo = rows[due], lo[due]
        if not len(rows):
            return pl.DataFrame(schema={**self.output, ORDER: pl.UInt64()})
        last = self._last_end(table.column("__p")[rows])
        until = np.minimum(last, watermark)
        picked: list[np.ndarray] = []
        ends: list[np.ndarray] = []
        for j in range(w.per_row):
            end = lo + j * w.every_us
            mask = (end > before) & (end <= until)  # a pane outlives the first of its windows
            picked.append(np.nonzero(mask)[0])
            ends.append(end[mask])
        index, end = np.concatenate(picked), np.concatenate(ends)
        # One gather of keys for all windows a row goes into; panes in time order, so float sums have one order.
        base = table.keys(rows).select(self.key).with_columns(self.accumulators.raw(table, rows))
        frame = base[index].with_columns(pl.Series(WINDOW_END, end))
        if self.accumulators.associative:
            by = [*self.key, WINDOW_END]
            whole = frame.group_by(by).agg(acc.merge_expr() for acc in self.accumulators.columns)
        else:
            order = np.lexsort((lo[index], table.column("__p")[rows][index]))
            whole = self._sum_in_order(frame[order])
        hashes = hash_columns(whole, self.key)
        table.delete(rows[last <= watermark])
        stamp = pl.col(WINDOW_END).cast(pl.Datetime("us"))
        out = whole.with_columns(pl.Series(ORDER, hashes, dtype=pl.UInt64)).sort(ORDER, WINDOW_END, maintain_order=True)
        return out.select(
            *self.key,
            (pl.col(WINDOW_END) - w.size_us).cast(pl.Datetime("us")).alias(WINDOW_START),
            stamp.alias(WINDOW_END),
            *self.accumulators.results(),
            ORDER,
        )

    def _sum_in_order(self, frame: pl.DataFrame) -> pl.DataFrame:
        keys = frame.select(*self.key, WINDOW_END)
        first, inverse = unique_keys(hash_columns(keys, keys.columns), keys)
        scratch = KeyedTable(TableSpec(keys.schema, self.accumulators.values))
        distinct = keys[first]
        rows, _ = scratch.upsert(hash_columns(distinct, distinct.columns), distinct)
        self.accumulators.add_at(scratch, rows[inverse], frame)
        return distinct.with_columns(self.accumulators.raw(scratch, rows))

    def fingerprint(self) -> dict[str, Any]:
        return {
            "operator": "window",
            "key": {k: str(t) for k, t in self.key_schema.items()},
            "window": [self.window.size_us, self.window.every_us],
            "aggregates": self.accumulators.fingerprint(),
        }

    def describe(self) -> str:
        w = self.window
        kind = "tumbling" if w.size_us == w.every_us else "hopping"
        return f"{kind} {w.size_us / 1e6:g}s/{w.every_us / 1e6:g}s " + ", ".join(
            f"{c.name}={c.spec}" for c in self.accumulators.compiled
        )


def mix_low(hashes: np.ndarray, *parts: np.ndarray) -> np.ndarray:
    """Mix further parts of a key into the low half of its hash. The high half, which says the slice, stays."""
    with np.errstate(over="ignore"):
        mixed = hashes.copy()
        for part in parts:
            mixed = (mixed ^ part.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(29)
    high = np.uint64(0xFFFFFFFF00000000)
    return (hashes & high) | (mixed >> np.uint64(32))
