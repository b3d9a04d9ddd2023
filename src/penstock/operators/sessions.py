"""Session windows: a key's rows for as long as they follow one another closely.

A session begins with a row and goes on while rows come less than ``gap`` after one another: it is
``[first row's time, last row's time + gap)``.

**What belongs together does not depend on epochs.** Rows are taken in source order, each with the watermark at the row.
A row whose own ``[time, time + gap)`` is over at its watermark joins the session of its key that it lies in, if that is
still open; else it is late: dropped, and counted. Any other row joins the sessions of its key that it overlaps and that
are still open at its watermark, and may make one of several. A session that is over at a row's watermark never takes
the row, even if both come in the same epoch.

**All at once, all the same.** Sessions as just told are the connected parts of a graph: rows x and y, y the later in
time, are linked when ``max(time of y, watermark at y) < time of x + gap`` (if x came after y, its watermark says
nothing: it is open itself, or it would be late). So sort a key's rows by time; between two neighbours a session ends
exactly when no later row reaches back over the gap, that is when the least ``max(time, watermark)`` of all later rows
is not less than the earlier one's time + gap. A session kept from earlier epochs takes part as its first and its last
row, tied together.

**Sums of floats** are taken in source order too. A row that makes one session of two has their sums added, the earlier
session first, then its own value. Where the rows of a new session were never in two parts, that is plain addition in
order; the rest is replayed row by row (:func:`_replay`).

Several inputs are put into one order before (``merge.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import polars as pl

from penstock.operators.aggregates import Accumulators, Aggregate, count
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
    row_watermarks,
    unique_keys,
)
from penstock.operators.event_time import Duration, Window, clamped, not_negative, one_of, positive, seconds, timed_rows
from penstock.operators.late import WATERMARK, given_late, watermark_at
from penstock.operators.order import order_of
from penstock.operators.windows import EMIT, WINDOW_END, WINDOW_START, mix_low
from penstock.state.hashing import hash_columns
from penstock.state.table import KeyedTable, TableSpec, numeric

_TIME, _SLOT, _SESSION = "__t", "__slot", "__s"


@dataclass(frozen=True)
class SessionSpec(Window):
    """What ``ps.session`` gives."""

    gap_us: int
    on: str
    lateness_us: int = 0
    emit: str = "final"

    @property
    def hold_us(self) -> int:  # type: ignore[override]
        return self.gap_us

    def over_at(self, times_us: np.ndarray) -> np.ndarray:
        return times_us + self.gap_us

    def aggregate(
        self, id: str, key: Sequence[str], aggregates: Mapping[str, Aggregate], schema: pl.Schema
    ) -> KeyedOperator:
        return SessionAggregate(id, key, self, aggregates, schema)

    def late(self, id: str, key: Sequence[str], schema: pl.Schema) -> KeyedOperator:
        return LateForSessions(id, key, self, schema)

    def describe(self) -> str:
        return f"sessions {seconds(self.gap_us)}" + (" updates" if self.emit == "updates" else "")


def session(gap: Duration, *, on: str, lateness: Duration = 0, emit: str = "final") -> SessionSpec:
    """Sessions of each key: rows that come less than ``gap`` after one another, by the event time in column ``on``.

    ``window_start`` is the time of a session's first row, ``window_end`` that of its last plus ``gap``: the moment from
    which it is over. ``lateness`` is how much later than the newest event an older one may still come and be counted.
    ``emit="final"`` gives each session once, when it is over; ``emit="updates"`` gives, for each key with new rows, its
    newest session as it is now (one row of a key replaces another).
    """
    return SessionSpec(
        positive(gap, "gap", "gap='30m'"), on, not_negative(lateness, "lateness"), one_of(emit, EMIT, "emit")
    )


@dataclass(frozen=True)
class _Kept:
    """Sessions that the table has for some keys."""

    rows: np.ndarray
    key: np.ndarray
    """Number of the key."""
    first: np.ndarray
    last: np.ndarray


class SessionAggregate(KeyedOperator):
    """``key_by(...).window(ps.session(...)).aggregate(...)``.

    The open sessions of a key lie in slots 0, 1, ... by their start. There is hardly ever more than one.
    """

    timed = True

    def __init__(
        self, id: str, key: Sequence[str], window: SessionSpec, aggregates: Mapping[str, Aggregate], schema: pl.Schema
    ) -> None:
        self.id = id
        self.key = tuple(key)
        self.window = window
        self.lateness_us = window.lateness_us
        self.hold_us = window.hold_us
        self.accumulators = Accumulators(id, aggregates, schema)
        self.accumulators.require_merge("two sessions may become one")
        self.key_schema = pl.Schema({k: schema[k] for k in key})
        times = {WINDOW_START: pl.Datetime("us"), WINDOW_END: pl.Datetime("us")}
        self.output = pl.Schema({**self.key_schema, **times, **self.accumulators.output})
        self.columns = read_columns(self.accumulators, schema)
        self.identity = self.key if window.emit == "updates" else None
        self.due = None if window.emit == "updates" else WINDOW_END
        self.table_key = pl.Schema({**self.key_schema, _SLOT: pl.Int64()})

    @property
    def ordered(self) -> bool:
        return not self.accumulators.associative

    @property
    def merges(self) -> bool:
        return True  # what is one session depends on the watermarks at its rows, in order

    def time_at(self, port: int) -> str | None:
        return self.window.on

    def table(self) -> TableSpec:
        whole = numeric(np.int64, 0)
        own = {"__first": whole, "__last": whole, "__slots": whole}  # __slots: how many the key has, in slot 0
        return TableSpec(self.table_key, {**self.accumulators.values, **own})

    # -- before the exchange ---------------------------------------------------------------------------------------

    def prepare(self, frame: pl.DataFrame, from_source: bool, port: int = 0, clock_us: int = 0) -> Prepared:
        frame, ts, dead = timed_rows(self.id, frame, self.window.on)
        time_max = int(ts.max()) if ts.size else None
        # Whether a row is late depends on the sessions of its key, which only the container knows.
        marks = row_watermarks(frame, ts, self.lateness_us) if from_source else np.full(ts.size, NEVER, dtype=np.int64)
        hidden = pl.Series(_TIME, ts, dtype=pl.Int64), pl.Series(WATERMARK, marks, dtype=pl.Int64)
        needed = dict.fromkeys((*self.key, *self.columns, *order_of(frame)))
        return Prepared(frame.select(*needed).with_columns(*hidden), time_max, 0, dead)

    # -- in the container ------------------------------------------------------------------------------------------

    def apply(self, table: KeyedTable | None, arrivals: Sequence[Arrival], tick: Tick) -> Applied:
        assert table is not None
        newest, late = self._take_in(table, arrivals, tick)
        out = [self._results(table, newest)] if newest is not None and self.window.emit == "updates" else []
        over = self._over(table, tick)
        if over.size:
            if self.window.emit == "final":
                out.append(self._results(table, over))
            self._forget(table, over)
        nothing = pl.DataFrame(schema={**self.output, ORDER: pl.UInt64()})
        return Applied(out[0] if out else nothing, late.height if late is not None else 0)

    def _take_in(
        self, table: KeyedTable, arrivals: Sequence[Arrival], tick: Tick
    ) -> tuple[np.ndarray | None, pl.DataFrame | None]:
        """Rows into sessions: the row of the table with the newest session of each key they are of; and late rows."""
        arrived = []
        for a in arrivals:
            if a.frame.height:
                marks = np.maximum(a.frame[WATERMARK].to_numpy(), watermark_at(a, tick))
                arrived.append(replace(a, frame=a.frame.with_columns(pl.Series(WATERMARK, marks))))
        if not arrived:
            return None, None
        frame = in_order(arrived)
        late = None
        lonely = self.window.over_at(frame[_TIME].to_numpy()) <= frame[WATERMARK].to_numpy()
        if lonely.any():
            out = lonely & ~self._inside(table, frame, lonely)
            late, frame = frame.filter(out), frame.filter(~out)
        return (self._merge(table, frame) if frame.height else None), late

    def _inside(self, table: KeyedTable, frame: pl.DataFrame, lonely: np.ndarray) -> np.ndarray:
        """Which of the rows that would be over by themselves lie in a session that is open at their watermark."""
        gap = self.window.gap_us
        firsts, key = unique_keys(frame[HASH].to_numpy(), frame.select(self.key))
        asked = np.unique(key[lonely])
        kept = self._kept(table, frame[HASH].to_numpy()[firsts[asked]], frame.select(self.key)[firsts[asked]])
        now: dict[int, list[tuple[int, int]]] = {int(k): [] for k in asked}
        for number, first, last in zip(kept.key.tolist(), kept.first.tolist(), kept.last.tolist(), strict=True):
            now[int(asked[number])].append((first, last))
        rows = np.flatnonzero(np.isin(key, asked))
        ts, marks = frame[_TIME].to_numpy(), frame[WATERMARK].to_numpy()
        inside = np.zeros(len(ts), dtype=np.bool_)
        of_key, at, mark = key[rows].tolist(), ts[rows].tolist(), marks[rows].tolist()
        for row, k, t, w in zip(rows.tolist(), of_key, at, mark, strict=True):
            mine = _joined(now[k], t, w, gap)
            if t + gap <= w:
                inside[row] = bool(mine)
                continue
            whole = [*mine, (t, t)]
            now[k] = [s for s in now[k] if s not in mine]
            now[k].append((min(s[0] for s in whole), max(s[1] for s in whole)))
        return inside

    def _merge(self, table: KeyedTable, frame: pl.DataFrame) -> np.ndarray:
        """Take in rows in source order; the row of the table that has the newest session of each key they are of."""
        gap = self.window.gap_us
        hashes = frame[HASH].to_numpy()
        keys = frame.select(self.key)
        firsts, key = unique_keys(hashes, keys)
        keys, hashes = keys[firsts], hashes[firsts]
        kept = self._kept(table, hashes, keys)
        ts, marks = frame[_TIME].to_numpy(), frame[WATERMARK].to_numpy()
        rows, kepts = ts.size, kept.rows.size
        # Rows, then kept sessions by their first and by their last row, which reaches back to the first.
        all_key = np.concatenate([key, kept.key, kept.key])
        all_time = np.concatenate([ts, kept.first, kept.last])
        reach = np.concatenate([np.maximum(ts, clamped(marks)), kept.first, kept.first])
        number, begins, ends = _parts(all_key, all_time, reach, gap)
        first, last = all_time[begins], all_time[ends]
        part_key = all_key[begins]
        part_of_row, part_of_kept = number[:rows], number[rows : rows + kepts]
        # Parts are numbered by key, then time: so are the slots.
        slots = np.bincount(part_key, minlength=firsts.size)
        of_key = np.cumsum(slots) - slots
        slot = np.arange(first.size) - of_key[part_key]
        state = self._state(table, frame, kept, part_of_row, part_of_kept, first.size)
        target, _ = table.upsert(
            mix_low(hashes[part_key], slot), keys[part_key].with_columns(pl.Series(_SLOT, slot, dtype=pl.Int64))
        )
        gone = ~_among(kept.rows, target)
        if gone.any():
            table.delete(kept.rows[gone])
        self.accumulators.store(table, target, state)
        table.column("__first")[target] = first
        table.column("__last")[target] = last
        table.column("__slots")[target] = np.where(slot == 0, slots[part_key], 0)
        return target[of_key + slots - 1]

    def _kept(self, table: KeyedTable, hashes: np.ndarray, keys: pl.DataFrame) -> _Kept:
        """The open sessions of some keys."""
        rows, numbers = [], []
        ask = np.arange(hashes.size)
        slots = np.ones(hashes.size, dtype=np.int64)
        slot = 0
        while ask.size:
            at = np.full(ask.size, slot, dtype=np.int64)
            found = table.find(mix_low(hashes[ask], at), keys[ask].with_columns(pl.Series(_SLOT, at)))
            there = found >= 0
            ask, found = ask[there], found[there]
            rows.append(found)
            numbers.append(ask)
            if slot == 0:
                slots[ask] = table.column("__slots")[found]
            slot += 1
            ask = ask[slots[ask] > slot]
        row = np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)
        number = np.concatenate(numbers) if numbers else np.zeros(0, dtype=np.int64)
        return _Kept(row, number, table.column("__first")[row], table.column("__last")[row])

    def _state(
        self,
        table: KeyedTable,
        frame: pl.DataFrame,
        kept: _Kept,
        part_of_row: np.ndarray,
        part_of_kept: np.ndarray,
        parts: int,
    ) -> pl.DataFrame:
        """What each part of the graph has come to: kept sessions and new rows together."""
        accumulators = self.accumulators
        scratch = KeyedTable(TableSpec(pl.Schema({_SESSION: pl.Int64()}), accumulators.values))
        numbers = pl.DataFrame({_SESSION: np.arange(parts)})
        targets, _ = scratch.upsert(hash_columns(numbers, [_SESSION]), numbers)
        if accumulators.associative:
            rows = accumulators.partial(frame.with_columns(pl.Series(_SESSION, part_of_row)), [_SESSION])
            if kept.rows.size:
                order = np.argsort(kept.first, kind="stable")
                merged = accumulators.combine(table, kept.rows[order], part_of_kept[order], parts)
                accumulators.store(scratch, targets, merged)
            at = rows[_SESSION].to_numpy()
            accumulators.merge_into(
                scratch, scratch.hashes(targets[at]), rows.select(pl.col(_SESSION).cast(pl.Int64)), rows
            )
            return accumulators.raw(scratch, targets)
        ts, marks = frame[_TIME].to_numpy(), clamped(frame[WATERMARK].to_numpy())
        singles = accumulators.partial(frame, [_TIME])
        twice = _in_two(ts, marks, part_of_row, kept, part_of_kept, parts, self.window.gap_us)
        plain_kept = ~twice[part_of_kept]
        if plain_kept.any():
            accumulators.store(
                scratch, targets[part_of_kept[plain_kept]], accumulators.raw(table, kept.rows[plain_kept])
            )
        plain_rows = ~twice[part_of_row]
        if plain_rows.all():
            accumulators.add_at(scratch, targets[part_of_row], singles)
        else:
            accumulators.add_at(scratch, targets[part_of_row[plain_rows]], singles.filter(plain_rows))
            for part in np.flatnonzero(twice).tolist():
                mine = np.flatnonzero(part_of_row == part)
                old = np.flatnonzero(part_of_kept == part)
                sessions = [(int(kept.first[i]), int(kept.last[i]), int(kept.rows[i])) for i in old.tolist()]
                raw = _replay(accumulators, table, sessions, ts[mine], marks[mine], singles[mine], self.window.gap_us)
                accumulators.store(scratch, targets[part : part + 1], raw)
        return accumulators.raw(scratch, targets)

    # -- out -------------------------------------------------------------------------------------------------------

    def _over(self, table: KeyedTable, tick: Tick) -> np.ndarray:
        if tick.watermark <= tick.watermark_before:
            return np.zeros(0, dtype=np.int64)
        live = table.live_rows()
        over: np.ndarray = live[table.column("__last")[live] <= tick.watermark - self.window.gap_us]
        return over

    def _forget(self, table: KeyedTable, over: np.ndarray) -> None:
        """Delete sessions; where a key has later ones that stay, they move down to slot 0."""
        slots = table.column("__slots")[over]
        heads = over[slots > 1]
        if not heads.size:
            table.delete(over)
            return
        keys = table.keys(heads).select(self.key)
        hashes = hash_columns(keys, self.key)
        kept = self._kept(table, hashes, keys)
        order = np.lexsort((kept.first, kept.key))
        stays = order[~_among(kept.rows[order], over)]
        rows, key = kept.rows[stays], kept.key[stays]
        first, last, raw = kept.first[stays], kept.last[stays], self.accumulators.raw(table, rows)
        table.delete(np.concatenate([over, rows]))
        if not stays.size:
            return
        begin = np.searchsorted(key, key)
        slot = np.arange(key.size) - begin
        target, _ = table.upsert(
            mix_low(hashes[key], slot), keys[key].with_columns(pl.Series(_SLOT, slot, dtype=pl.Int64))
        )
        self.accumulators.store(table, target, raw)
        table.column("__first")[target] = first
        table.column("__last")[target] = last
        table.column("__slots")[target] = np.where(slot == 0, np.searchsorted(key, key, side="right") - begin, 0)

    def _results(self, table: KeyedTable, rows: np.ndarray) -> pl.DataFrame:
        first = table.column("__first")[rows]
        keys = table.keys(rows).select(self.key)
        hashes = hash_columns(keys, self.key)
        order = np.lexsort((first, hashes))
        rows, first = rows[order], first[order]
        end = table.column("__last")[rows] + self.window.gap_us
        frame = pl.DataFrame(
            [
                *keys[order].get_columns(),
                pl.Series(WINDOW_START, first).cast(pl.Datetime("us")),
                pl.Series(WINDOW_END, end).cast(pl.Datetime("us")),
                *self.accumulators.raw(table, rows).get_columns(),
                pl.Series(ORDER, hashes[order], dtype=pl.UInt64),
            ]
        )
        return frame.select(*self.key, WINDOW_START, WINDOW_END, *self.accumulators.results(), ORDER)

    def fingerprint(self) -> dict[str, Any]:
        return {
            "operator": "session",
            "key": {k: str(t) for k, t in self.key_schema.items()},
            "gap": self.window.gap_us,
            "aggregates": self.accumulators.fingerprint(),
        }

    def describe(self) -> str:
        return f"{self.window.describe()} {self.accumulators.describe()}"


def read_columns(accumulators: Accumulators, schema: pl.Schema) -> list[str]:
    """The columns that aggregates read: no others need travel."""
    read = [e for c in accumulators.compiled for e in (*c.inputs, *c.single())]
    if accumulators.associative:
        read += [e for c in accumulators.compiled for e in c.partial()]
    used = {name for e in read for name in e.meta.root_names()}
    return [c for c in schema if c in used]


def _parts(key: np.ndarray, time: np.ndarray, reach: np.ndarray, gap: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The connected parts: the number of each entry's part, by key and time, and an entry with the first and one with
    the last time of each part.

    ``reach``: how far back an entry reaches: it is linked to earlier ones whose time + gap is greater.
    """
    order = np.argsort(time, kind="stable")  # hardly anything to do where rows come in time order
    order = order[stable_order(key[order])]
    key, time, reach = key[order], time[order], reach[order]
    same = key[1:] == key[:-1]
    if bool((same & (reach[1:] < reach[:-1])).any()):  # the least reach of all that follow
        frame = pl.DataFrame({"k": key, "r": reach})
        reach = frame.select(pl.col("r").cum_min(reverse=True).over("k"))["r"].to_numpy()
    new = np.ones(key.size, dtype=np.bool_)
    new[1:] = ~same | (reach[1:] >= time[:-1] + gap)
    number = np.empty(key.size, dtype=np.int64)
    number[order] = np.cumsum(new) - 1
    begins = np.flatnonzero(new)
    ends = np.append(begins[1:], key.size) - 1
    return number, order[begins], order[ends]


def _in_two(
    ts: np.ndarray,
    marks: np.ndarray,
    part: np.ndarray,
    kept: _Kept,
    part_of_kept: np.ndarray,
    parts: int,
    gap: int,
) -> np.ndarray:
    """Which parts were ever more than one session on the way, taking their rows in source order."""
    olds = np.bincount(part_of_kept, minlength=parts)
    low, high = np.zeros(parts, dtype=np.int64), np.zeros(parts, dtype=np.int64)
    low[part_of_kept], high[part_of_kept] = kept.first, kept.last
    order = stable_order(part)
    p, t, reach = part[order], ts[order], np.maximum(ts, marks)[order]
    head = np.ones(p.size, dtype=np.bool_)
    head[1:] = p[1:] != p[:-1]
    # Rows in time order, the first of them next to the kept session if there is one: then all join it in turn, for a
    # later row reaches back no further than an earlier one.
    fits = (reach < high[p] + gap) & (t > low[p] - gap)
    odd = head & (olds[p] > 0) & ~fits
    odd[1:] |= ~head[1:] & (t[1:] < t[:-1])
    twice: np.ndarray = olds > 1
    if not odd.any():
        return twice
    # The others by the least and the greatest time before each row, kept session included.
    doubtful = np.zeros(parts, dtype=np.bool_)
    doubtful[p[odd]] = True
    of = np.flatnonzero(doubtful[p])
    p, t, reach, head = p[of], t[of], reach[of], head[of]
    before = pl.DataFrame({"p": p, "t": t}).select(
        pl.col("t").cum_min().shift(1).over("p").alias("low"), pl.col("t").cum_max().shift(1).over("p").alias("high")
    )
    limits = np.iinfo(np.int64)
    old = olds[p] > 0
    least = np.minimum(before["low"].fill_null(limits.max).to_numpy(), np.where(old, low[p], limits.max))
    most = np.maximum(before["high"].fill_null(limits.min).to_numpy(), np.where(old, high[p], limits.min))
    begins = head & ~old
    least[begins], most[begins] = t[begins], reach[begins]  # joins itself, so to say
    joins = (reach < most + gap) & (t > least - gap)
    twice[p[~joins]] = True
    return twice


def stable_order(numbers: np.ndarray) -> np.ndarray:
    """As a stable ``argsort`` of small numbers from 0 on: 16 bits at a time, for which numpy has a radix sort."""
    order = np.argsort(numbers.astype(np.uint16), kind="stable")
    if numbers.size and int(numbers.max()) >> 16:
        order = order[np.argsort((numbers >> 16).astype(np.uint16)[order], kind="stable")]
    return order


def _among(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Which of some rows of a table are among others."""
    if not rows.size or not others.size:
        return np.zeros(rows.size, dtype=np.bool_)
    marked = np.zeros(max(int(rows.max()), int(others.max())) + 1, dtype=np.bool_)
    marked[others] = True
    found: np.ndarray = marked[rows]
    return found


Open = TypeVar("Open", tuple[int, int], tuple[int, int, int])
"""First and last time of a session, and perhaps where it is kept."""


def _joined(sessions: Sequence[Open], t: int, w: int, gap: int) -> list[Open]:
    """The sessions that a row of time ``t`` joins at watermark ``w``: those that are open and that it overlaps; if it
    would be over by itself, the one that it lies in.
    """
    if t + gap <= w:
        return [s for s in sessions if s[0] <= t <= s[1] and w < s[1] + gap]
    return [s for s in sessions if max(t, w) < s[1] + gap and t > s[0] - gap]


def _replay(
    accumulators: Accumulators,
    table: KeyedTable,
    sessions: list[tuple[int, int, int]],
    ts: np.ndarray,
    marks: np.ndarray,
    singles: pl.DataFrame,
    gap: int,
) -> pl.DataFrame:
    """Rows that end up in one session, taken one by one, as sessions come and grow together: the state of the one.

    ``sessions``: (first, last, row of the table).
    """
    scratch = KeyedTable(TableSpec(pl.Schema({_SESSION: pl.Int64()}), accumulators.values))
    numbers = pl.DataFrame({_SESSION: np.arange(len(sessions) + ts.size)})
    rows, _ = scratch.upsert(hash_columns(numbers, [_SESSION]), numbers)
    now: list[tuple[int, int, int]] = []
    for i, (first, last, row) in enumerate(sessions):
        accumulators.store(scratch, rows[i : i + 1], accumulators.raw(table, np.array([row])))
        now.append((first, last, i))
    for n, (t, w) in enumerate(zip(ts.tolist(), marks.tolist(), strict=True)):
        mine = sorted(_joined(now, t, w, gap))
        slot = mine[0][2] if mine else len(sessions) + n
        if len(mine) > 1:
            joined = rows[np.array([s[2] for s in mine])]
            merged = accumulators.combine(scratch, joined, np.zeros(joined.size, dtype=np.int64), 1)
            accumulators.store(scratch, rows[slot : slot + 1], merged)
        accumulators.add_at(scratch, rows[slot : slot + 1], singles[n])
        whole = [*mine, (t, t, slot)]
        now = [s for s in now if s not in mine]
        now.append((min(s[0] for s in whole), max(s[1] for s in whole), slot))
    assert len(now) == 1, "a part of the graph that is no session"
    return accumulators.raw(scratch, rows[now[0][2] : now[0][2] + 1])


class LateForSessions(SessionAggregate):
    """``window(ps.session(...)).late(id)``: keeps the same sessions, and gives the rows that none of them takes."""

    hands_on = True

    def __init__(self, id: str, key: Sequence[str], window: SessionSpec, schema: pl.Schema) -> None:
        super().__init__(id, key, replace(window, emit="final"), {"n": count()}, schema)
        self.output = schema
        self.columns = schema.names()
        self.due = None

    def prepare(self, frame: pl.DataFrame, from_source: bool, port: int = 0, clock_us: int = 0) -> Prepared:
        return replace(super().prepare(frame, from_source, port, clock_us), dead=())  # those of the aggregate

    def apply(self, table: KeyedTable | None, arrivals: Sequence[Arrival], tick: Tick) -> Applied:
        assert table is not None
        _, late = self._take_in(table, arrivals, tick)
        over = self._over(table, tick)
        if over.size:
            self._forget(table, over)
        if late is None or not late.height:
            return Applied(pl.DataFrame(schema={**self.output, ORDER: pl.UInt64()}))
        return given_late(late, self.output, late[WATERMARK].to_numpy(), tick)

    def describe(self) -> str:
        return f"late for {self.window.describe()}"


__all__ = ["LateForSessions", "SessionAggregate", "SessionSpec", "session"]
