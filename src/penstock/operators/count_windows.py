"""Windows that slide by count: the last n rows of each key.

The rows of a key are numbered from 1, in source order. After every ``every`` rows of a key the aggregate of its last
``size`` rows is given. As with windows of time, rows are added once, into panes of gcd(size, every) rows, and a window
is put together from its panes.

There is no time in it and nothing is late. The number of rows so far is kept for each key for ever: a key costs a few
bytes of state even after its rows are long gone from every window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from penstock.errors import FlowError
from penstock.operators.aggregates import Accumulators, Aggregate
from penstock.operators.base import (
    HASH,
    ORDER,
    Applied,
    Arrival,
    KeyedOperator,
    Prepared,
    Tick,
    in_order,
    unique_keys,
)
from penstock.operators.event_time import Window
from penstock.operators.order import order_of, tag_columns, with_tags
from penstock.operators.sessions import read_columns, stable_order
from penstock.operators.windows import WINDOW_END, WINDOW_START, mix_low
from penstock.state.table import KeyedTable, TableSpec, numeric

ROWS_MAX = 1_000_000
PANES_MAX = 100_000
_PANE = "__pane"
_COUNTER = -1
"""The "pane" that holds the number of a key's rows so far."""
_GATHERED_MAX = 2_000_000
"""Panes read at once: windows that overlap much are put together in several goes."""


@dataclass(frozen=True)
class CountSpec(Window):
    """What ``ps.last_rows`` gives."""

    size: int
    every: int
    partial: bool = False
    on: None = None

    @property
    def pane(self) -> int:
        return math.gcd(self.size, self.every)

    def aggregate(
        self, id: str, key: Sequence[str], aggregates: Mapping[str, Aggregate], schema: pl.Schema
    ) -> KeyedOperator:
        return CountWindowAggregate(id, key, self, aggregates, schema)

    def describe(self) -> str:
        return f"last {self.size} rows every {self.every}"


def last_rows(size: int, *, every: int = 1, partial: bool = False) -> CountSpec:
    """The last ``size`` rows of each key, after each ``every`` rows of it.

    The rows of a key are numbered from 1. ``window_start`` is the number of the first row in the window and
    ``window_end`` one more than that of the last. Only full windows are given, unless ``partial``: then also those of a
    key's first rows, which start at 1. An output row costs ``size / gcd(size, every)`` steps.
    """
    for name, value in (("size", size), ("every", every)):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= ROWS_MAX:
            raise FlowError(
                f"last_rows: {name} must be a number of rows from 1 to {ROWS_MAX}, not {value!r}.",
                remedy="For example ps.last_rows(100, every=10).",
            )
    spec = CountSpec(size, every, bool(partial))
    if every > size:
        raise FlowError(
            f"last_rows: a window of {size} rows every {every}: rows between two windows would be lost.",
            remedy="Make every= at most the size.",
        )
    if size > PANES_MAX * spec.pane:
        raise FlowError(
            f"last_rows: each window would be put together from {size // spec.pane} parts.",
            remedy=f"Make every= a divisor of the size, at least {-(-size // PANES_MAX)}.",
        )
    return spec


class CountWindowAggregate(KeyedOperator):
    """``key_by(...).window(ps.last_rows(...)).aggregate(...)``."""

    hands_on = True

    def __init__(
        self, id: str, key: Sequence[str], window: CountSpec, aggregates: Mapping[str, Aggregate], schema: pl.Schema
    ) -> None:
        self.id = id
        self.key = tuple(key)
        self.window = window
        self.accumulators = Accumulators(id, aggregates, schema)
        if window.size != window.pane:
            self.accumulators.require_merge("a sliding window is put together from its parts")
        self.columns = read_columns(self.accumulators, schema)
        self.key_schema = pl.Schema({k: schema[k] for k in key})
        numbers = {WINDOW_START: pl.Int64(), WINDOW_END: pl.Int64()}
        self.output = pl.Schema({**self.key_schema, **numbers, **self.accumulators.output})
        self.table_key = pl.Schema({**self.key_schema, _PANE: pl.Int64()})

    @property
    def ordered(self) -> bool:
        return True

    def table(self) -> TableSpec:
        return TableSpec(self.table_key, {**self.accumulators.values, "__n": numeric(np.int64, 0)})

    def prepare(self, frame: pl.DataFrame, from_source: bool, port: int = 0, clock_us: int = 0) -> Prepared:
        return Prepared(frame.select(*dict.fromkeys((*self.key, *self.columns, *order_of(frame)))))

    def apply(self, table: KeyedTable | None, arrivals: Sequence[Arrival], tick: Tick) -> Applied:
        assert table is not None
        arrivals = [a for a in arrivals if a.frame.height]
        if not arrivals:
            return Applied(pl.DataFrame(schema={**self.output, ORDER: pl.UInt64()}))
        frame = in_order(arrivals)
        hashes, keys = frame[HASH].to_numpy(), frame.select(self.key)
        firsts, key = unique_keys(hashes, keys)
        keys, hashes = keys[firsts], hashes[firsts]
        counters, _ = table.upsert(*self._table_keys(hashes, keys, np.full(firsts.size, _COUNTER)))
        before = table.column("__n")[counters]
        more = np.bincount(key, minlength=firsts.size)
        table.column("__n")[counters] = before + more
        self._add(table, frame, hashes, keys, key, before[key] + _rank(key))
        out, window_key, end = self._windows(table, hashes, keys, before, before + more)
        if tick.tells:  # the row that filled a window caused it
            begins = np.cumsum(more) - more
            cause = stable_order(key)[begins[window_key] + end - 1 - before[window_key]]
            out = with_tags(out.drop(ORDER), [values[cause] for values in tag_columns(frame)])
        self._forget(table, hashes, keys, before, before + more)
        return Applied(out)

    def _table_keys(self, hashes: np.ndarray, keys: pl.DataFrame, pane: np.ndarray) -> tuple[np.ndarray, pl.DataFrame]:
        return mix_low(hashes, pane), keys.with_columns(pl.Series(_PANE, pane, dtype=pl.Int64))

    def _add(
        self,
        table: KeyedTable,
        frame: pl.DataFrame,
        hashes: np.ndarray,
        keys: pl.DataFrame,
        key: np.ndarray,
        number: np.ndarray,
    ) -> None:
        """Each row into its pane; ``number`` counts from 0."""
        frame = frame.with_columns(pl.Series(_PANE, number // self.window.pane), pl.Series("__key", key))
        part = self.accumulators.partial(frame, ["__key", _PANE])
        of = part["__key"].to_numpy()
        self.accumulators.merge_into(table, *self._table_keys(hashes[of], keys[of], part[_PANE].to_numpy()), part)

    def _windows(
        self, table: KeyedTable, hashes: np.ndarray, keys: pl.DataFrame, before: np.ndarray, after: np.ndarray
    ) -> tuple[pl.DataFrame, np.ndarray, np.ndarray]:
        """The windows that are full; of each the number of its key, and of its last row."""
        w = self.window
        counts = after // w.every - before // w.every
        key = np.repeat(np.arange(counts.size), counts)
        end = (before // w.every + 1)[key] * w.every + _rank(key) * w.every
        if not w.partial:
            key, end = key[end >= w.size], end[end >= w.size]
        order = np.lexsort((end, hashes[key]))  # the canonical order of the output
        key, end = key[order], end[order]
        begin = np.maximum(end - w.size, 0)
        step = max(1, _GATHERED_MAX // (w.size // w.pane))
        parts = [
            self._some_windows(table, hashes, keys, key[i : i + step], begin[i : i + step], end[i : i + step])
            for i in range(0, key.size, step)
        ]
        out = pl.concat(parts) if parts else pl.DataFrame(schema={**self.output, ORDER: pl.UInt64()})
        return out, key, end

    def _some_windows(
        self,
        table: KeyedTable,
        hashes: np.ndarray,
        keys: pl.DataFrame,
        key: np.ndarray,
        begin: np.ndarray,
        end: np.ndarray,
    ) -> pl.DataFrame:
        pane = self.window.pane
        counts = (end - begin) // pane
        window = np.repeat(np.arange(key.size), counts)
        panes = (begin // pane)[window] + _rank(window)
        # Windows overlap: look each pane of a key up once.
        span_first, span_count = _spans(key, begin // pane, end // pane, hashes.size)
        offset = np.cumsum(span_count) - span_count
        owner = np.repeat(np.arange(hashes.size), span_count)
        every = span_first[owner] + _rank(owner)
        rows = table.find(*self._table_keys(hashes[owner], keys[owner], every))
        index = offset[key[window]] + panes - span_first[key[window]]
        raw = self.accumulators.combine(table, rows[index], window, key.size)
        frame = pl.DataFrame(
            [
                *keys[key].get_columns(),
                pl.Series(WINDOW_START, begin + 1),
                pl.Series(WINDOW_END, end + 1),
                *raw.get_columns(),
                pl.Series(ORDER, hashes[key], dtype=pl.UInt64),
            ]
        )
        return frame.select(*self.key, WINDOW_START, WINDOW_END, *self.accumulators.results(), ORDER)

    def _forget(
        self, table: KeyedTable, hashes: np.ndarray, keys: pl.DataFrame, before: np.ndarray, after: np.ndarray
    ) -> None:
        """Delete the panes before the next window of each key."""
        first, last = self._oldest_pane(before), np.minimum(self._oldest_pane(after), -(-after // self.window.pane))
        owner = np.repeat(np.arange(first.size), np.maximum(last - first, 0))
        if owner.size:
            rows = table.find(*self._table_keys(hashes[owner], keys[owner], first[owner] + _rank(owner)))
            table.delete(rows)

    def _oldest_pane(self, count: np.ndarray) -> np.ndarray:
        """The first pane that a window after ``count`` rows needs."""
        w = self.window
        panes: np.ndarray = np.maximum((count // w.every + 1) * w.every - w.size, 0) // w.pane
        return panes

    def fingerprint(self) -> dict[str, Any]:
        return {
            "operator": "last rows",
            "key": {k: str(t) for k, t in self.key_schema.items()},
            "window": [self.window.size, self.window.every],
            "aggregates": self.accumulators.fingerprint(),
        }

    def describe(self) -> str:
        return f"{self.window.describe()} {self.accumulators.describe()}"


def _rank(groups: np.ndarray) -> np.ndarray:
    """For each entry, how many of its group come before it."""
    order = stable_order(groups)
    counts = np.bincount(groups) if groups.size else np.zeros(0, dtype=np.int64)
    rank = np.empty(groups.size, dtype=np.int64)
    rank[order] = np.arange(groups.size) - np.repeat(np.cumsum(counts) - counts, counts)
    return rank


def _spans(key: np.ndarray, first: np.ndarray, last: np.ndarray, keys: int) -> tuple[np.ndarray, np.ndarray]:
    """For each key the first of its panes that any window needs, and how many from there on."""
    low = np.full(keys, np.iinfo(np.int64).max)
    high = np.full(keys, -1)
    np.minimum.at(low, key, first)
    np.maximum.at(high, key, last)
    low = np.where(high < 0, 0, low)
    return low, np.maximum(high - low, 0)


__all__ = ["CountSpec", "CountWindowAggregate", "last_rows"]
