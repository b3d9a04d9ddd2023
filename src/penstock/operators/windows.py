"""Windows of time, tumbling and hopping: of the event time in a column, or of the clock.

Time is cut into panes of gcd(size, every); a row is counted once, in its pane, and a window is put together from its
panes when the watermark passes its end.

**What is late does not depend on epochs.** The watermark *at a row* is the greatest event time of the rows up to it in
source order, less the lateness. A row counts for those of its windows that are still open at its own watermark: ``lo``
is the end of the first such window, and rows of one pane with different ``lo`` are kept apart. Before the exchange a
task knows only its own split; the container adds what the splits before it saw (``Arrival.watermark``). So the cut
into epochs or splits changes when a window is emitted, never what is in it. A row whose windows are all closed is
late: dropped, and counted.

**Updates.** With ``emit="updates"`` the present result of a window is given whenever it has changed. State is then kept
by window instead of by pane, for a window that is read in every epoch must not be put together in every epoch.

**Empty windows.** With ``empty=`` panes are kept that much longer than they are counted. A window in which a key has
no rows is given for the key while one of its panes is kept; which windows those are follows from the rows alone.

**The clock.** With ``on=ps.CLOCK`` the time of a row is the clock of its epoch, which is logged: an epoch that runs
again gives the same windows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from penstock.errors import FlowError
from penstock.frames import pick, rows_where, with_column
from penstock.operators.aggregates import Accumulators, Aggregate
from penstock.operators.base import (
    FOREVER,
    HASH,
    NEVER,
    ORDER,
    Applied,
    Arrival,
    KeyedOperator,
    Prepared,
    Tick,
    in_order,
    row_watermarks,
)
from penstock.operators.event_time import (
    CLOCK,
    Clock,
    Duration,
    Window,
    clamped,
    microseconds,
    not_negative,
    one_of,
    positive,
    seconds,
    timed_rows,
)
from penstock.operators.late import watermark_at
from penstock.state.hashing import hash_columns
from penstock.state.table import KeyedTable, TableSpec, numeric

WINDOW_START, WINDOW_END = "window_start", "window_end"
EMIT = ("final", "updates")
WINDOWS_PER_ROW_MAX = 10_000
_PANE, _LO, _ROWS, _END = "__pane", "__lo", "__rows", "__end"
_PAIRS_FEW = 8
"""Up to so many distinct (pane, lo) in a split, each is reduced by itself: polars groups by one column much faster."""


@dataclass(frozen=True)
class WindowSpec(Window):
    """What ``ps.tumbling`` and ``ps.hopping`` give. Ends of windows are the multiples of ``every`` plus size and
    offset.
    """

    size_us: int
    every_us: int
    on: str | Clock
    lateness_us: int = 0
    emit: str = "final"
    empty_us: int = 0
    offset_us: int = 0

    @property
    def shared(self) -> bool:  # type: ignore[override]
        return self.emit == "final"

    @property
    def hold_us(self) -> int:  # type: ignore[override]
        return self.size_us

    @property
    def pane_us(self) -> int:
        return math.gcd(self.size_us, self.every_us)

    # In what follows times are counted from the offset: see ``shifted``.

    def first_end(self, ts: Any) -> Any:
        """End of the first window a time belongs to; also, of the first window still open at a watermark."""
        return ((clamped(ts) - self.size_us) // self.every_us + 1) * self.every_us + self.size_us

    def last_end(self, ts: Any) -> Any:
        return ts // self.every_us * self.every_us + self.size_us

    def shifted(self, watermark: int) -> int:
        """A watermark, counted from the offset."""
        return watermark if watermark in (NEVER, FOREVER) else watermark - self.offset_us

    def over_at(self, times_us: np.ndarray) -> np.ndarray:
        ends: np.ndarray = self.last_end(times_us - self.offset_us) + self.offset_us
        return ends

    def aggregate(
        self, id: str, key: Sequence[str], aggregates: Mapping[str, Aggregate], schema: pl.Schema
    ) -> KeyedOperator:
        kind = WindowUpdates if self.emit == "updates" else WindowAggregate
        return kind(id, key, self, aggregates, schema)

    def describe(self) -> str:
        kind = "tumbling" if self.size_us == self.every_us else "hopping"
        parts = [f"{kind} {seconds(self.size_us)}/{seconds(self.every_us)}"]
        if self.on is CLOCK:
            parts.append("of the clock")
        if self.emit != "final":
            parts.append(self.emit)
        if self.empty_us:
            parts.append(f"empty for {seconds(self.empty_us)}")
        return " ".join(parts)


def hopping(
    size: Duration,
    *,
    every: Duration,
    on: str | Clock,
    lateness: Duration = 0,
    emit: str = "final",
    empty: Duration | None = None,
    offset: Duration = 0,
) -> WindowSpec:
    """Windows of ``size`` that start ``every`` so often, by the event time in column ``on`` or by ``ps.CLOCK``.

    ``lateness`` is how much later than the newest event an older one may still come and be counted. ``emit="final"``
    gives each window once, when it is over; ``emit="updates"`` gives its present result whenever that has changed.
    ``empty="1h"`` gives the windows in which a key has no rows, too, until it has been silent for an hour. Windows
    start at multiples of ``every`` since 1970 plus ``offset``.
    """
    spec = WindowSpec(
        positive(size, "window size", "size='30s'"),
        positive(every, "every", "every='10s'"),
        on,
        not_negative(lateness, "lateness"),
        one_of(emit, EMIT, "emit"),
        0 if empty is None else positive(empty, "empty", "empty='1h'"),
        microseconds(offset, "offset"),
    )
    if spec.every_us > spec.size_us:
        raise FlowError(
            "a window hops further than it is long: rows between two windows would be lost.",
            remedy="Make every= at most as long as the size.",
        )
    if spec.size_us > WINDOWS_PER_ROW_MAX * spec.every_us:
        raise FlowError(
            f"every row would belong to {-(-spec.size_us // spec.every_us)} windows.",
            remedy=f"Make every= longer: at most {WINDOWS_PER_ROW_MAX} windows may overlap.",
        )
    if spec.empty_us and emit != "final":
        raise FlowError(
            "empty= needs emit='final': that nothing has come yet is no update.",
            remedy="Leave out one of the two.",
        )
    if on is CLOCK and spec.lateness_us:
        raise FlowError("by the clock nothing is late.", remedy="Leave out lateness=, or use a column of event time.")
    return spec


def tumbling(
    size: Duration,
    *,
    on: str | Clock,
    lateness: Duration = 0,
    emit: str = "final",
    empty: Duration | None = None,
    offset: Duration = 0,
) -> WindowSpec:
    """Windows of ``size`` that follow one another. The rest is as in :func:`hopping`."""
    return hopping(size, every=size, on=on, lateness=lateness, emit=emit, empty=empty, offset=offset)


class _Windows(KeyedOperator):
    """What windows have in common: up to the container, and into it."""

    timed = True

    def __init__(
        self, id: str, key: Sequence[str], window: WindowSpec, aggregates: Mapping[str, Aggregate], schema: pl.Schema
    ) -> None:
        self.id = id
        self.key = tuple(key)
        self.window = window
        self.clocked = window.on is CLOCK
        self.lateness_us = window.lateness_us
        self.hold_us = window.hold_us
        self.accumulators = Accumulators(id, aggregates, schema)
        self.key_schema = pl.Schema({k: schema[k] for k in key})
        times = {WINDOW_START: pl.Datetime("us"), WINDOW_END: pl.Datetime("us")}
        self.output = pl.Schema({**self.key_schema, **times, **self.accumulators.output})

    @property
    def ordered(self) -> bool:
        return not self.accumulators.associative

    def time_at(self, port: int) -> str | None:
        return self.window.on if isinstance(self.window.on, str) else None

    # -- before the exchange ---------------------------------------------------------------------------------------

    def prepare(self, frame: pl.DataFrame, from_source: bool, port: int = 0, clock_us: int = 0) -> Prepared:
        w = self.window
        if isinstance(w.on, Clock):
            shifted = np.full(frame.height, clock_us - w.offset_us, dtype=np.int64)
            return Prepared(self._partial(frame, shifted // w.pane_us, w.first_end(shifted)))
        frame, ts, dead = timed_rows(self.id, frame, w.on)
        if not frame.height:
            return Prepared(self._partial(frame, ts, ts), dead=dead)
        time_max = int(ts.max())
        watermark = row_watermarks(frame, ts, w.lateness_us) if from_source else None
        if w.offset_us:
            ts = ts - w.offset_us
            watermark = None if watermark is None else clamped(watermark) - w.offset_us
        lo = w.first_end(ts)
        late = 0
        if watermark is not None and not (watermark < lo).all():
            lo = np.maximum(lo, w.first_end(watermark))
            keep = w.last_end(ts) > watermark
            if not keep.all():
                late = int(np.count_nonzero(~keep))
                frame, ts, lo = rows_where(frame, keep), ts[keep], lo[keep]
        return Prepared(self._partial(frame, ts // w.pane_us, lo), time_max, late, dead)

    def _partial(self, frame: pl.DataFrame, pane: np.ndarray, lo: np.ndarray) -> pl.DataFrame:
        """Partial rows by key, pane and lo."""
        by = [*self.key, _PANE, _LO]
        pairs = _few_pairs(pane, lo) if self.accumulators.associative else None
        if pairs is None:
            frame = with_column(with_column(frame, pl.Series(_PANE, pane)), pl.Series(_LO, lo))
            return self.accumulators.partial(frame, by, count=_ROWS)
        parts = []
        for one_pane, one_lo, rows in pairs:
            chosen = frame if rows is None else rows_where(frame, rows)
            part = self.accumulators.partial(chosen, list(self.key), count=_ROWS)
            pair = (pl.Series(name, np.full(part.height, value)) for name, value in ((_PANE, one_pane), (_LO, one_lo)))
            parts.append(part.hstack(list(pair)))
        return pl.concat(parts) if len(parts) > 1 else parts[0]

    # -- in the container ------------------------------------------------------------------------------------------

    def _open_rows(self, arrivals: Sequence[Arrival], tick: Tick) -> tuple[list[pl.DataFrame], int]:
        """What counts for windows that are open, to be merged frame by frame; and how many rows are late."""
        late = 0
        arrived: list[Arrival] = []
        for a in arrivals:
            if not a.frame.height:
                continue
            frame, dropped = self._hold_back(a.frame, self.window.shifted(watermark_at(a, tick)))
            late += dropped
            if frame.height:
                arrived.append(Arrival(frame, a.origin, a.index, a.from_source, a.watermark, a.port))
        if self.accumulators.associative or not arrived:
            return [a.frame for a in arrived], late
        return [in_order(arrived)], late

    def _hold_back(self, frame: pl.DataFrame, watermark: int) -> tuple[pl.DataFrame, int]:
        """Drop rows whose windows had all closed before this split; move the rest to the first window still open."""
        if watermark == NEVER:
            return frame, 0
        next_end = self.window.first_end(watermark)
        lo = frame[_LO].to_numpy()
        if (lo >= next_end).all():
            return frame, 0
        keep = self._last_end(frame[_PANE].to_numpy()) > watermark
        late = int(frame[_ROWS].filter(pl.Series(~keep)).sum())
        frame = rows_where(with_column(frame, pl.Series(_LO, np.maximum(lo, next_end))), keep)
        if self.accumulators.associative:  # two values of lo may have become one
            frame = self.accumulators.regroup(frame, [HASH, *self.key, _PANE, _LO], [_ROWS])
        return frame, late

    def _last_end(self, pane: np.ndarray) -> np.ndarray:
        ends: np.ndarray = self.window.last_end(pane * self.window.pane_us)
        return ends

    def _passed(self, tick: Tick) -> tuple[int, int] | None:
        """First and last end of a window between the watermark before and now; None if there is none."""
        w = self.window
        if tick.watermark <= tick.watermark_before:
            return None
        first = w.first_end(w.shifted(tick.watermark_before))
        last = FOREVER if tick.watermark == FOREVER else w.first_end(w.shifted(tick.watermark)) - w.every_us
        return (first, last) if first <= last else None

    def _results(self, keys: pl.DataFrame, ends: np.ndarray, raw: pl.DataFrame, hashes: np.ndarray) -> pl.DataFrame:
        w = self.window
        end = pl.Series(WINDOW_END, ends + w.offset_us).cast(pl.Datetime("us"))
        start = pl.Series(WINDOW_START, ends + (w.offset_us - w.size_us)).cast(pl.Datetime("us"))
        order = pl.Series(ORDER, hashes, dtype=pl.UInt64)
        frame = pl.DataFrame([*keys.get_columns(), start, end, *raw.get_columns(), order])
        return frame.select(*self.key, WINDOW_START, WINDOW_END, *self.accumulators.results(), ORDER)

    def _nothing(self, late: int) -> Applied:
        return Applied(pl.DataFrame(schema={**self.output, ORDER: pl.UInt64()}), late)

    def fingerprint(self) -> dict[str, Any]:
        w = self.window
        more = {"offset": w.offset_us} if w.offset_us else {}
        return {
            "operator": "window" if w.emit == "final" else "window updates",
            "key": {k: str(t) for k, t in self.key_schema.items()},
            "window": [w.size_us, w.every_us],
            "aggregates": self.accumulators.fingerprint(),
            **more,
        }

    def describe(self) -> str:
        return f"{self.window.describe()} {self.accumulators.describe()}"


class WindowAggregate(_Windows):
    """``emit="final"``: each window once, when the watermark has passed its end."""

    due = WINDOW_END

    def __init__(
        self, id: str, key: Sequence[str], window: WindowSpec, aggregates: Mapping[str, Aggregate], schema: pl.Schema
    ) -> None:
        super().__init__(id, key, window, aggregates, schema)
        if window.size_us != window.pane_us:
            self.accumulators.require_merge("a hopping window is put together from its panes")
        self.table_key = pl.Schema({**self.key_schema, _PANE: pl.Int64(), _LO: pl.Int64()})

    def table(self) -> TableSpec:
        # Pane, lo and the key's hash once more as values: numpy finds and groups the rows of a closing window without
        # touching the keys.
        own = {"__p": numeric(np.int64, 0), "__l": numeric(np.int64, 0), "__k": numeric(np.uint64, 0)}
        return TableSpec(self.table_key, {**self.accumulators.values, **own})

    def apply(self, table: KeyedTable | None, arrivals: Sequence[Arrival], tick: Tick) -> Applied:
        assert table is not None
        frames, late = self._open_rows(arrivals, tick)
        for frame in frames:
            self._merge(table, frame)
        passed = self._passed(tick)
        out = self._close(table, *passed) if passed else None
        return self._nothing(late) if out is None else Applied(out, late)

    def _merge(self, table: KeyedTable, frame: pl.DataFrame) -> None:
        keys = pick(frame, self.table_key)
        pane, lo, key_hash = frame[_PANE].to_numpy(), frame[_LO].to_numpy(), frame[HASH].to_numpy()
        hashes = mix_low(key_hash, pane, lo)
        rows = self.accumulators.merge_into(table, hashes, keys, frame)
        if not self.accumulators.associative:  # rows of the table, each once: find out what they are
            stored = table.keys(rows)
            pane, lo, key_hash = stored[_PANE].to_numpy(), stored[_LO].to_numpy(), hash_columns(stored, self.key)
        table.column("__p")[rows] = pane
        table.column("__l")[rows] = lo
        table.column("__k")[rows] = key_hash

    def _close(self, table: KeyedTable, first: int, last: int) -> pl.DataFrame | None:
        """Emit the windows that end from ``first`` to ``last``, then forget the panes no window needs."""
        w = self.window
        rows = table.live_rows()
        lo = table.column("__l")[rows]
        due = lo <= last
        if not due.all():
            rows, lo = rows[due], lo[due]
        if not rows.size:
            return None
        pane = table.column("__p")[rows]
        counted_until = self._last_end(pane)
        kept_until = counted_until + w.empty_us // w.every_us * w.every_us
        if not self.accumulators.associative:  # panes in time order, so that sums of floats have one order
            order = np.lexsort((lo, pane))
            rows, lo, counted_until, kept_until = rows[order], lo[order], counted_until[order], kept_until[order]
        index, ends = _ends(np.maximum(lo, first), np.minimum(kept_until, last), w.every_us)
        out = self._put_together(table, rows, index, ends, ends <= counted_until[index]) if index.size else None
        table.delete(rows[kept_until <= last])
        return out

    def _put_together(
        self, table: KeyedTable, rows: np.ndarray, index: np.ndarray, ends: np.ndarray, counted: np.ndarray
    ) -> pl.DataFrame:
        """``rows[index]`` belong to the windows that end at ``ends``, where ``counted``; else the key is only known."""
        rows = rows[index]  # a row may be in several windows
        keys = pick(table.keys(rows), self.key)
        hashes = table.column("__k")[rows]
        representative = group_rows(hashes, ends)
        if not keys.equals(keys[representative], null_equal=True):
            representative = _exact_groups(keys, ends)
        firsts = np.flatnonzero(representative == np.arange(rows.size))
        one = int(ends.min()) == int(ends.max())
        order = np.argsort(hashes[firsts]) if one else np.lexsort((ends[firsts], hashes[firsts]))
        firsts = firsts[order]  # the canonical order of the output
        number = np.empty(rows.size, dtype=np.int64)
        number[firsts] = np.arange(firsts.size)
        groups = number[representative]
        if not counted.all():
            rows, groups = rows[counted], groups[counted]
        raw = self.accumulators.combine(table, rows, groups, firsts.size)
        return self._results(keys[firsts], ends[firsts], raw, hashes[firsts])


class WindowUpdates(_Windows):
    """``emit="updates"``: each epoch, the present results of the windows that changed in it."""

    def __init__(
        self, id: str, key: Sequence[str], window: WindowSpec, aggregates: Mapping[str, Aggregate], schema: pl.Schema
    ) -> None:
        super().__init__(id, key, window, aggregates, schema)
        self.identity = (*self.key, WINDOW_START, WINDOW_END)
        self.table_key = pl.Schema({**self.key_schema, _END: pl.Int64()})

    def table(self) -> TableSpec:
        return TableSpec(self.table_key, {**self.accumulators.values, "__e": numeric(np.int64, 0)})

    def apply(self, table: KeyedTable | None, arrivals: Sequence[Arrival], tick: Tick) -> Applied:
        assert table is not None
        frames, late = self._open_rows(arrivals, tick)
        changed = [self._merge(table, frame) for frame in frames]
        out = None
        if changed:
            rows = table.distinct(np.concatenate(changed)) if len(changed) > 1 else changed[0]
            out = self._present(table, rows)
        passed = self._passed(tick)
        if passed:
            live = table.live_rows()
            table.delete(live[table.column("__e")[live] <= passed[1]])
        return self._nothing(late) if out is None else Applied(out, late)

    def _merge(self, table: KeyedTable, frame: pl.DataFrame) -> np.ndarray:
        index, ends = _ends(frame[_LO].to_numpy(), self._last_end(frame[_PANE].to_numpy()), self.window.every_us)
        if not self.accumulators.associative:  # windows of one row in any order, rows of one window in theirs
            order = np.argsort(index, kind="stable")
            index, ends = index[order], ends[order]
        frame = frame[index].with_columns(pl.Series(_END, ends))
        if self.accumulators.associative:
            frame = self.accumulators.regroup(frame, [HASH, *self.key, _END])
        hashes = mix_low(frame[HASH].to_numpy(), frame[_END].to_numpy())
        rows = self.accumulators.merge_into(table, hashes, frame.select(self.table_key.names()), frame)
        end = frame[_END] if self.accumulators.associative else table.keys(rows)[_END]
        table.column("__e")[rows] = end.to_numpy()
        return rows

    def _present(self, table: KeyedTable, rows: np.ndarray) -> pl.DataFrame:
        keys = table.keys(rows)
        ends, hashes = keys[_END].to_numpy(), hash_columns(keys, self.key)
        order = np.lexsort((ends, hashes))
        raw = self.accumulators.raw(table, rows[order])
        return self._results(keys.select(self.key)[order], ends[order], raw, hashes[order])


def _few_pairs(pane: np.ndarray, lo: np.ndarray) -> list[tuple[int, int, np.ndarray | None]] | None:
    """The distinct (pane, lo), each with a mask of its rows (None: all of them); None when they are many."""
    if not pane.size:
        return None
    pairs: list[tuple[int, int, np.ndarray | None]] = []
    left = np.ones(pane.size, dtype=np.bool_)
    while True:
        at = int(np.argmax(left))
        if not left[at]:
            return pairs
        if len(pairs) == _PAIRS_FEW:
            return None
        mask = (pane == pane[at]) & (lo == lo[at])
        pairs.append((int(pane[at]), int(lo[at]), None if mask.all() else mask))
        left &= ~mask


def _ends(first: np.ndarray, last: np.ndarray, every_us: int) -> tuple[np.ndarray, np.ndarray]:
    """For each row the ends of windows from its first to its last: index of the row, and end."""
    counts = np.maximum((last - first) // every_us + 1, 0)
    if not counts.size or int(counts.max()) <= 1:
        index = np.flatnonzero(counts)
        return index, first[index]
    index = np.repeat(np.arange(counts.size), counts)
    step = np.arange(index.size) - np.repeat(np.cumsum(counts) - counts, counts)
    return index, first[index] + step * every_us


def group_rows(hashes: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """For each entry one entry with the same hash and end, the same one for all of a group.

    An open-addressing table, a whole batch at a time: all entries write themselves where they belong, the one found
    there afterwards speaks for those equal to it, the others go on. A fraction of the time of a sort.
    """
    size = hashes.size
    slots = np.full(1 << max(int(2 * size - 1).bit_length(), 1), -1, dtype=np.int32)
    mask = np.int64(slots.size - 1)
    with np.errstate(over="ignore"):
        place = hashes ^ (ends.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
        place ^= place >> np.uint64(32)
    at = place.view(np.int64) & mask
    slots[at] = np.arange(size, dtype=np.int32)
    out = slots.take(at)
    differs = hashes.take(out) != hashes
    differs |= ends.take(out) != ends
    left = np.flatnonzero(differs)
    at, step = at[left], 0
    while left.size:
        step += 1
        at = (at + step) & mask
        free = slots[at] < 0
        slots[at[free]] = left[free]
        holder = slots[at]
        same = (hashes[holder] == hashes[left]) & (ends[holder] == ends[left])
        out[left[same]] = holder[same]
        left, at = left[~same], at[~same]
    return out


def _exact_groups(keys: pl.DataFrame, ends: np.ndarray) -> np.ndarray:
    """As ``group_rows``, by the keys themselves: two of them share a 64-bit hash."""
    whole = keys.with_columns(pl.Series(_END, ends), pl.int_range(pl.len(), dtype=pl.Int64).alias("__i"))
    return whole.select(pl.col("__i").first().over([*keys.columns, _END]))["__i"].to_numpy()


def mix_low(hashes: np.ndarray, *parts: np.ndarray) -> np.ndarray:
    """Mix further parts of a key into the low half of its hash. The high half, which says the slice, stays."""
    with np.errstate(over="ignore"):
        mixed = hashes.copy()
        for part in parts:
            mixed = (mixed ^ part.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(29)
    high = np.uint64(0xFFFFFFFF00000000)
    return (hashes & high) | (mixed >> np.uint64(32))


__all__ = [
    "CLOCK",
    "WINDOW_END",
    "WINDOW_START",
    "Duration",
    "WindowAggregate",
    "WindowSpec",
    "WindowUpdates",
    "hopping",
    "microseconds",
    "tumbling",
]
