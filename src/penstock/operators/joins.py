"""Joins of two streams in event time: one operator for all of them.

Every row of either side has a *lifetime* ``[start, end)``; two rows of equal key match when their lifetimes overlap.
What differs from join to join is only how a row comes by its lifetime, its :class:`Shape`: a point in time, an
interval with both ends in the row, an edge whose end is told by a later row, a version that holds until the next one,
or a span around a point ("within five seconds").

**What is joined does not depend on epochs.** A row is accepted if its time is not before the watermark *at the row*, of
its own input alone; a late row is dropped and counted. The result is a function of the rows accepted on the two sides:
every overlapping pair once.

**When it is emitted.** Watermark ``w`` promises that rows with a time before ``w`` are late, so everything that starts
before ``w`` is known, and so is every end before ``w``. Let ``w`` be the least over both sides, in terms of starts (a
span that begins 5 s before its event is known 5 s less far). Two lifetimes overlap from the greater of their starts, so
the pairs to emit as the watermark steps from ``w0`` to ``w1`` are those whose greater start is in ``[w0, w1)``, and
whether they overlap can be told: an end that is not known yet is not before ``w1``. A lifetime that ends at or before
``w1`` overlaps nothing that is still to come and is forgotten; in a left join it is emitted with nulls if it met
nothing.

**How far behind the watermark** output may lie (``hold_us``, for windows downstream): the greater start of a pair is
never behind ``w``. In a join of points with anything, that is the point's time; for ``within`` it is ``before`` further
on the left side's scale, and the left time up to ``after`` less. The start of an interval or edge can be any time ago:
window such output by the point's time, or by the greater of the two starts.

Keys are compared as everywhere: null is a key like any other, all NaN are one, -0.0 is 0.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import polars as pl

from penstock.errors import FlowError
from penstock.frames import pick, rows_where, with_column
from penstock.operators.base import (
    DUE,
    FOREVER,
    HASH,
    NEVER,
    ORDER,
    Applied,
    Arrival,
    Dead,
    KeyedOperator,
    Prepared,
    Tick,
    in_order,
    row_watermarks,
    unique_keys,
    visible,
)
from penstock.operators.event_time import TIME_US_MAX, TIME_US_MIN, Duration, microseconds, timed_rows
from penstock.operators.order import order_of
from penstock.operators.rowstore import RowStore, stored_as
from penstock.operators.steps import show
from penstock.operators.windows import mix_low
from penstock.state.hashing import hash_columns, hashable
from penstock.state.table import KeyedTable, TableSpec, ValueType, numeric

HOW = ("inner", "left")
_START, _END, _CLOSES, _FROM = "__start", "__end", "__closes", "__from"
_EPOCH, _NUMBER, _PORT, _KEY, _HIT = "__epoch", "__number", "__port", "__key", "__hit"
_WASTE_MAX = 4
"""Candidates looked at for each row before lifetimes are told apart by their length."""


@dataclass(frozen=True)
class Shape:
    """How the rows of one side come by their lifetimes: ``ps.point``, ``ps.interval``, ``ps.edge``, ``ps.versions``."""

    kind: str
    on: str
    until: str | None = None
    ends: str | None = None
    id: tuple[str, ...] = ()
    before_us: int = 0
    length_us: int = 1

    @property
    def follows(self) -> bool:
        """The end of a lifetime is told by a later row."""
        return self.kind in ("edge", "versions")

    def columns(self) -> list[str]:
        return [c for c in (self.on, self.until, self.ends, *self.id) if c is not None]

    def describe(self) -> str:
        return f"{self.kind}({', '.join(self.columns())})"


@dataclass(frozen=True)
class Within:
    """Two points at most so far apart. Made by ``ps.within``."""

    left: Shape
    right: Shape


def point(on: str) -> Shape:
    """A row lives at the instant in column ``on``."""
    return Shape("point", on)


def interval(start: str, end: str) -> Shape:
    """A row lives from ``start`` up to, but not including, ``end``; a null end is open for ever.

    A row that does not end after it starts becomes a dead letter.
    """
    return Shape("interval", start, until=end)


def edge(on: str, ends: str, id: str | Sequence[str] = ()) -> Shape:
    """A row opens a lifetime at ``on``; a later row of the same key, and of the same ``id`` columns if there are any,
    closes it.

    ``ends`` is a boolean column: true in rows that close. A row that opens while one is open takes its place. A row
    that closes when nothing is open becomes a dead letter. What is joined is the row that opened.
    """
    return Shape("edge", on, ends=ends, id=(id,) if isinstance(id, str) else tuple(id))


def versions(on: str) -> Shape:
    """A row holds from ``on`` until the next row of the same key: a table that changes slowly.

    Of two rows with the same time the later one in the source holds.
    """
    return Shape("versions", on)


def within(left: str, right: str, *, before: Duration = 0, after: Duration = 0) -> Within:
    """The right time is in ``[left - before, left + after]``, both inclusive."""
    before_us, after_us = microseconds(before, "before"), microseconds(after, "after")
    if before_us + after_us < 0:
        raise FlowError(
            "within: the span ends before it begins, so nothing could match.",
            remedy="Make before + after at least zero; one of them may be negative.",
        )
    return Within(Shape("span", left, before_us=before_us, length_us=before_us + after_us + 1), point(right))


@dataclass(frozen=True)
class _Side:
    """One input, with its columns as they are called in the output."""

    name: str
    shape: Shape
    renames: tuple[tuple[str, str], ...]
    """(in the input, in the exchange), keys first"""
    key_count: int
    store: RowStore

    def prepared(self) -> list[pl.Expr]:
        return [pl.col(a).alias(b) for a, b in self.renames]


@dataclass(frozen=True)
class _Lives:
    """Lifetimes in arrays. ``place``: a row of the table, or -1 - the number of a row that came in this epoch."""

    place: np.ndarray
    port: np.ndarray
    hash: np.ndarray
    start: np.ndarray
    end: np.ndarray
    closes: np.ndarray
    origin: np.ndarray
    epoch: np.ndarray
    number: np.ndarray
    hit: np.ndarray

    def __len__(self) -> int:
        return len(self.place)

    def take(self, index: np.ndarray) -> _Lives:
        return _Lives(*(getattr(self, f.name)[index] for f in fields(self)))

    def join(self, other: _Lives) -> _Lives:
        return _Lives(*(np.concatenate([getattr(self, f.name), getattr(other, f.name)]) for f in fields(self)))


class LifetimeJoin(KeyedOperator):
    """``left.key_by(...).join(id, right.key_by(...), ...)`` and ``lookup``. Port 0 is the left side, 1 the right."""

    timed = True

    def __init__(
        self,
        id: str,
        left: tuple[Sequence[str], pl.Schema],
        right: tuple[Sequence[str], pl.Schema],
        shapes: tuple[Shape, Shape],
        *,
        how: str = "inner",
        lateness: Duration = 0,
        suffix: str = "_right",
    ) -> None:
        self.id = id
        self.how = how
        if how not in HOW:
            raise FlowError(
                f"operator '{id}': how={how!r} is not known.", remedy=f"Use one of {', '.join(HOW)}.", operator=id
            )
        self.lateness_us = microseconds(lateness, f"operator '{id}': lateness")
        if self.lateness_us < 0:
            raise FlowError(
                f"operator '{id}': lateness cannot be negative.", remedy="Use lateness='0s' or more.", operator=id
            )
        (left_key, left_schema), (right_key, right_schema) = left, right
        self.key = tuple(left_key)
        self.key_schema = _same_keys(id, left_key, left_schema, right_key, right_schema)
        others = {c: left_schema[c] for c in left_schema if c not in self.key}
        renamed = right_names(id, left_schema, right_schema, right_key, suffix)
        theirs = {renamed[c]: right_schema[c] for c in renamed}
        for shape, schema in zip(shapes, (left_schema, right_schema), strict=True):
            _check_shape(id, shape, schema)
        to_key = dict(zip(right_key, self.key, strict=True))
        self.sides = (
            _Side(
                "left",
                replace(shapes[0], id=tuple(c for c in shapes[0].id if c not in self.key)),
                tuple((c, c) for c in (*self.key, *others)),
                len(self.key),
                RowStore(pl.Schema(others), shared=True),
            ),
            _Side(
                "right",
                replace(shapes[1], id=tuple(renamed[c] for c in shapes[1].id if c not in to_key)),
                (*to_key.items(), *renamed.items()),
                len(self.key),
                RowStore(pl.Schema(theirs), shared=True),
            ),
        )
        self.given = shapes
        self.output = pl.Schema({**left_schema, **theirs})
        self.hold_us = max(0, shapes[0].before_us) + max(0, shapes[0].length_us - 1 - shapes[0].before_us)
        self.follows = any(s.follows for s in shapes)
        self.table_key = pl.Schema({**self.key_schema, _EPOCH: pl.Int64(), _NUMBER: pl.Int64()})

    @property
    def ordered(self) -> bool:
        return True

    @property
    def due_hold_us(self) -> int:
        return self.hold_us - max(0, self.given[0].before_us)  # rows are due by their starts

    def keys_at(self, port: int) -> tuple[str, ...]:
        side = self.sides[port]
        return tuple(given for given, _ in side.renames[: side.key_count])

    def time_at(self, port: int) -> str | None:
        return self.given[port].on

    def table(self) -> TableSpec:
        own: dict[str, ValueType] = {
            _PORT: numeric(np.int8, 0),
            _KEY: numeric(np.uint64, 0),
            _START: numeric(np.int64, 0),
        }
        kinds = {s.kind for s in self.given}
        if "interval" in kinds:
            own[_END] = numeric(np.int64, 0)
        if "edge" in kinds:
            own[_CLOSES] = numeric(np.bool_, False)
        own[_FROM] = numeric(np.int64, 0)
        if self.how == "left":
            own[_HIT] = numeric(np.bool_, False)
        return TableSpec(self.table_key, {**own, **self.sides[0].store.values, **self.sides[1].store.values})

    # -- before the exchange ---------------------------------------------------------------------------------------

    def prepare(self, frame: pl.DataFrame, from_source: bool, port: int = 0, clock_us: int = 0) -> Prepared:
        side, shape = self.sides[port], self.given[port]
        frame, time, dead = timed_rows(self.id, frame, shape.on)
        hidden: dict[str, np.ndarray] = {_START: time - shape.before_us}
        if shape.until is not None:
            end = _ends(frame[shape.until])
            good = end > time
            if not good.all():
                dead += self._endless(frame.filter(pl.Series(~good)), shape)
                frame, time, end = frame.filter(pl.Series(good)), time[good], end[good]
                hidden[_START] = time - shape.before_us
            hidden[_END] = end
        if shape.ends is not None:
            hidden[_CLOSES] = frame[shape.ends].fill_null(False).to_numpy()
        given = (pl.Series(n, v) for n, v in hidden.items())
        out = frame.select(*side.prepared(), *given, *order_of(frame))
        late = 0
        if from_source and len(time):
            early = time >= row_watermarks(frame, time, self.lateness_us)
            late = len(time) - int(early.sum())
            if late:
                out = rows_where(out, early)
        return Prepared(out, int(time.max()) if len(time) else None, late, dead)

    def _endless(self, frame: pl.DataFrame, shape: Shape) -> tuple[Dead, ...]:
        reason = f"it ends ('{shape.until}') before it has begun ('{shape.on}')"
        rows = frame.select(visible(frame.columns)).iter_rows(named=True)
        return tuple((self.id, f"{shape.on} {row[shape.on]}", reason, show(row)) for row in rows)

    # -- in the container ------------------------------------------------------------------------------------------

    def apply(self, table: KeyedTable | None, arrivals: Sequence[Arrival], tick: Tick) -> Applied:
        assert table is not None
        before, now = self._joint(tick)
        frames, late = self._accepted(arrivals, tick)
        new = self._new(frames, tick.epoch)
        nothing = pl.DataFrame(schema={**self.output, DUE: pl.Int64(), ORDER: pl.UInt64()})
        if now <= before:
            self._insert(table, frames, new)
            return Applied(nothing, late)
        settled = new.start < now
        later = new.take(~settled)
        held = self._held(table, new.hash[settled], before, now)
        lives = held.join(new.take(settled))
        if not len(lives):
            self._insert(table, frames, later)
            return Applied(nothing, late)
        rows = _Held(table, frames, self)
        lives, keys, groups = self._sorted(lives, rows)
        stray = self._end_followed(lives, keys, groups, rows)
        dead = self._dead(stray, lives, keys, rows)
        left, right = self._match(lives, groups, before)
        lives.hit[left] = True
        gone = lives.closes | (lives.end <= now)
        if self.how == "left":
            lonely = np.flatnonzero((lives.port == 0) & ~lives.closes & gone & ~lives.hit)
            left = np.concatenate([left, lonely])
            right = np.concatenate([right, np.full(len(lonely), -1, dtype=np.int64)])
        frame = self._output(lives, keys, left, right, rows) if len(left) else nothing
        self._forget(table, lives, gone)
        self._insert(table, frames, later.join(lives.take(~gone & (lives.place < 0))))
        return Applied(frame, late, dead)

    def _joint(self, tick: Tick) -> tuple[int, int]:
        """The watermark before and after this epoch, in terms of starts."""
        ports = tick.ports or ((tick.watermark_before, tick.watermark),) * 2
        both = [
            [m if m in (NEVER, FOREVER) else m - s.before_us for m in marks]
            for marks, s in zip(ports, self.given, strict=True)
        ]
        before = min(b for b, _ in both)
        return before, max(before, min(n for _, n in both))

    def _accepted(self, arrivals: Sequence[Arrival], tick: Tick) -> tuple[tuple[pl.DataFrame, ...], int]:
        """The rows of each port that are not late, in order."""
        late = 0
        kept: tuple[list[Arrival], list[Arrival]] = ([], [])
        for a in arrivals:
            if not a.frame.height:
                continue
            frame = a.frame
            mark = max(a.watermark, tick.ports[a.port][0] if tick.ports else tick.watermark_before)
            if mark != NEVER:
                keep = frame[_START].to_numpy() + self.given[a.port].before_us >= mark
                if not keep.all():
                    late += int((~keep).sum())
                    frame = rows_where(frame, keep)
            frame = with_column(frame, pl.Series(_FROM, np.full(frame.height, _origin(a.origin), dtype=np.int64)))
            if frame.height:
                kept[a.port].append(replace(a, frame=frame))
        return tuple(in_order(k) if k else pl.DataFrame() for k in kept), late

    def _new(self, frames: Sequence[pl.DataFrame], epoch: int) -> _Lives:
        """Lifetimes of the rows that came, numbered within each key: what tells rows of a key apart, for ever."""
        counts = [f.height for f in frames]
        total = sum(counts)
        port = np.repeat(np.arange(2, dtype=np.int8), counts)

        def gathered(name: str, fill: Any, dtype: Any) -> np.ndarray:
            parts = [
                f[name].to_numpy() if name in f.columns else np.full(f.height, fill, dtype) for f in frames if f.height
            ]
            return np.concatenate(parts) if parts else np.zeros(0, dtype)

        hashes = gathered(HASH, 0, np.uint64)
        start = gathered(_START, 0, np.int64)
        return _Lives(
            place=-1 - np.arange(total, dtype=np.int64),
            port=port,
            hash=hashes,
            start=start,
            end=self._ends(port, start, gathered(_END, FOREVER, np.int64)),
            closes=gathered(_CLOSES, False, np.bool_),
            origin=gathered(_FROM, 0, np.int64),
            epoch=np.full(total, epoch, dtype=np.int64),
            number=_running_number(hashes),
            hit=np.zeros(total, dtype=np.bool_),
        )

    def _ends(self, port: np.ndarray, start: np.ndarray, given: np.ndarray) -> np.ndarray:
        """The end of each lifetime as far as its own row tells."""
        end = given.copy()
        for p, shape in enumerate(self.given):
            mine = port == p
            if shape.kind in ("point", "span"):
                end[mine] = start[mine] + shape.length_us
            elif shape.follows:
                end[mine] = FOREVER
        return end

    def _held(self, table: KeyedTable, fresh_hashes: np.ndarray, before: int, now: int) -> _Lives:
        """Lifetimes in the state that this step concerns: those that begin in it, those with a key that has one, and
        those that end.
        """
        rows = table.live_rows()
        start = table.column(_START)[rows]
        known = start < now
        rows, start = rows[known], start[known]
        port, hashes = table.column(_PORT)[rows], table.column(_KEY)[rows]
        given = table.column(_END)[rows] if _END in table.spec.values else np.full(len(rows), FOREVER, dtype=np.int64)
        end = self._ends(port, start, given)
        wanted = np.unique(np.concatenate([fresh_hashes, hashes[start >= before]]))
        concerned = (end <= now) | pl.Series(hashes).is_in(pl.Series(wanted).implode()).to_numpy()
        rows, start, port, hashes, end = (x[concerned] for x in (rows, start, port, hashes, end))
        sequence = table.keys(rows)

        def flag(name: str, dtype: Any) -> np.ndarray:
            return table.column(name)[rows] if name in table.spec.values else np.zeros(len(rows), dtype)

        return _Lives(
            place=rows,
            port=port,
            hash=hashes,
            start=start,
            end=end,
            closes=flag(_CLOSES, np.bool_),
            origin=flag(_FROM, np.int64),
            epoch=sequence[_EPOCH].to_numpy(),
            number=sequence[_NUMBER].to_numpy(),
            hit=flag(_HIT, np.bool_),
        )

    def _sorted(self, lives: _Lives, rows: _Held) -> tuple[_Lives, pl.DataFrame, np.ndarray]:
        """By key, start, and position in the source; with the keys, and for each row the number of its key."""
        order = np.lexsort((lives.number, lives.epoch, lives.origin, lives.start, lives.hash))
        lives = lives.take(order)
        keys = rows.keys(lives.place)
        changes = np.empty(len(lives), dtype=np.bool_)
        changes[0] = True
        np.not_equal(lives.hash[1:], lives.hash[:-1], out=changes[1:])
        groups = np.cumsum(changes) - 1
        if keys.equals(keys[np.flatnonzero(changes)[groups]], null_equal=True):
            return lives, keys, groups
        # Two different keys share a 64-bit hash: rare enough to be slow, never wrong.
        names = [(int(h), repr(row)) for h, row in zip(lives.hash, keys.iter_rows(), strict=True)]
        number = {name: i for i, name in enumerate(sorted(set(names)))}  # as text: NaN is not equal to itself
        groups = np.asarray([number[name] for name in names], dtype=np.int64)
        order = np.argsort(groups, kind="stable")
        return lives.take(order), keys[order], groups[order]

    def _end_followed(self, lives: _Lives, keys: pl.DataFrame, groups: np.ndarray, rows: _Held) -> np.ndarray:
        """Where a later row tells the end, let it; the rows that close what was not open."""
        stray: list[np.ndarray] = [np.zeros(0, dtype=np.int64)]
        for p, side in enumerate(self.sides):
            if not side.shape.follows:
                continue
            mine = np.flatnonzero(lives.port == p)
            if not len(mine):
                continue
            same_id = groups[mine]
            if side.shape.id:
                named = rows.payload(p, lives.place[mine]).select(side.shape.id)
                named = named.with_columns(pl.Series(_KEY, same_id))
                _, same_id = unique_keys(hash_columns(named, named.columns), named)
                order = np.argsort(same_id, kind="stable")
                mine, same_id = mine[order], same_id[order]
            follows = same_id[1:] == same_id[:-1]
            lives.end[mine[:-1][follows]] = lives.start[mine[1:][follows]]
            opened = np.zeros(len(mine), dtype=np.bool_)
            opened[1:] = follows & ~lives.closes[mine[:-1]]
            stray.append(mine[lives.closes[mine] & ~opened])
        return np.sort(np.concatenate(stray))

    def _dead(self, stray: np.ndarray, lives: _Lives, keys: pl.DataFrame, rows: _Held) -> tuple[Dead, ...]:
        dead: list[Dead] = []
        for p, (side, shape) in enumerate(zip(self.sides, self.given, strict=True)):
            mine = stray[lives.port[stray] == p]
            if not len(mine):
                continue
            whole = keys[mine].with_columns(rows.payload(p, lives.place[mine]).get_columns())
            back = whole.select(pl.col(b).alias(a) for a, b in side.renames)
            reason = f"it ends what was not begun ('{shape.ends}' is true)"
            for row in back.iter_rows(named=True):
                dead.append((self.id, f"{shape.on} {row[shape.on]}", reason, show(row)))
        return tuple(dead)

    def _match(self, lives: _Lives, groups: np.ndarray, before: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions of all pairs that overlap and of which one begins in this step, as the later of the two."""
        real = ~lives.closes & (lives.end > lives.start)
        fresh = real & (lives.start >= before)
        on = [lives.port == p for p in range(2)]
        left_under, right_fresh = _starting_inside(
            groups, lives.start, lives.end, np.flatnonzero(real & on[0]), np.flatnonzero(fresh & on[1]), ties=True
        )
        right_under, left_fresh = _starting_inside(
            groups, lives.start, lives.end, np.flatnonzero(real & on[1]), np.flatnonzero(fresh & on[0]), ties=False
        )
        return np.concatenate([left_under, left_fresh]), np.concatenate([right_fresh, right_under])

    def _output(
        self, lives: _Lives, keys: pl.DataFrame, left: np.ndarray, right: np.ndarray, rows: _Held
    ) -> pl.DataFrame:
        # The watermark from which on a pair is known to meet, or a left row to meet nothing; then key, time and source,
        # as positions are.
        due = np.where(right >= 0, np.maximum(lives.start[left], lives.start[right]) + 1, lives.end[left])
        order = np.lexsort((right, left, due))
        left, right, due = left[order], right[order], due[order]
        ours, at = np.unique(left, return_inverse=True)
        frame = keys[ours].with_columns(rows.payload(0, lives.place[ours]).get_columns())[at]
        met = right >= 0
        theirs, at = np.unique(right[met], return_inverse=True)
        found = rows.payload(1, lives.place[theirs])
        if found.width and not met.all():
            empty = pl.DataFrame({c: [None] for c in found.columns}, schema=found.schema)
            found = pl.concat([found, empty], rechunk=True)
            index = np.full(len(right), len(theirs), dtype=np.int64)
            index[met] = at
            at = index
        if found.width:
            frame = frame.with_columns(found[at].get_columns())
        tags = [pl.Series(DUE, due, dtype=pl.Int64), pl.Series(ORDER, lives.hash[left], dtype=pl.UInt64)]
        return pick(frame, self.output).hstack(tags)

    def _forget(self, table: KeyedTable, lives: _Lives, gone: np.ndarray) -> None:
        stored = lives.place >= 0
        if self.how == "left":
            hit = lives.place[stored & ~gone & lives.hit & (lives.port == 0)]
            hit = hit[~table.column(_HIT)[hit]]
            table.touch(hit)
            table.column(_HIT)[hit] = True
        table.delete(lives.place[stored & gone])

    def _insert(self, table: KeyedTable, frames: Sequence[pl.DataFrame], lives: _Lives) -> None:
        if not len(lives):
            return
        lives = lives.take(np.argsort(-1 - lives.place, kind="stable"))
        numbers = [pl.Series(_EPOCH, lives.epoch), pl.Series(_NUMBER, lives.number)]
        keys = _Held(table, frames, self).keys(lives.place).hstack(numbers)
        rows, _ = table.upsert(mix_low(lives.hash, lives.epoch, lives.number), keys)
        own = {
            _PORT: lives.port,
            _KEY: lives.hash,
            _START: lives.start,
            _END: lives.end,
            _CLOSES: lives.closes,
            _FROM: lives.origin,
            _HIT: lives.hit,
        }
        for name, values in own.items():
            if name in table.spec.values:
                table.column(name)[rows] = values
        for p, side in enumerate(self.sides):
            mine = lives.port == p
            if mine.any():
                whole = frames[p][_number_in(frames, p, lives.place[mine])]
                side.store.write(table, rows[mine], whole)

    # -- about itself ----------------------------------------------------------------------------------------------

    def fingerprint(self) -> dict[str, Any]:
        return {
            "operator": "join",
            "key": {k: str(t) for k, t in self.key_schema.items()},
            "how": self.how,
            "shapes": [[s.kind, s.on, s.until, s.ends, list(s.id), s.before_us, s.length_us] for s in self.given],
            "columns": [{c: str(t) for c, t in s.store.schema.items()} for s in self.sides],
            **stored_as(v for s in self.sides for v in s.store.values.values()),
        }

    def describe(self) -> str:
        left, right = self.given
        if left.kind == "span":
            after = left.length_us - 1 - left.before_us
            what = f"{right.on} within -{left.before_us / 1e6:g}s..+{after / 1e6:g}s of {left.on}"
        else:
            what = f"{left.describe()} with {right.describe()}"
        return f"{self.how} join of {what}"


@dataclass(frozen=True)
class _Held:
    """Rows by their place: in the table, or in the frames that came in this epoch."""

    table: KeyedTable
    frames: Sequence[pl.DataFrame]
    join: LifetimeJoin

    def keys(self, places: np.ndarray) -> pl.DataFrame:
        names = list(self.join.key)
        came = [pick(f, names) for f in self.frames if f.height]
        stored = places >= 0
        parts = []
        if stored.any():
            parts.append(pick(self.table.keys(places[stored]), names))
        if not stored.all():
            new = pl.concat(came, rechunk=True) if len(came) > 1 else came[0]
            parts.append(new[-1 - places[~stored]])
        return _in_places(parts, stored)

    def payload(self, port: int, places: np.ndarray) -> pl.DataFrame:
        store = self.join.sides[port].store
        names = store.schema.names()
        if not names:
            return pl.DataFrame()
        stored = places >= 0
        parts = []
        if stored.any() or not len(places):
            parts.append(pl.DataFrame(store.read(self.table, places[stored])))
        if not stored.all():
            parts.append(pick(self.frames[port], names)[_number_in(self.frames, port, places[~stored])])
        return _in_places(parts, stored)


def _in_places(parts: Sequence[pl.DataFrame], stored: np.ndarray) -> pl.DataFrame:
    """Stored and new rows back into one order."""
    if len(parts) == 1:
        return parts[0]
    back = np.empty(len(stored), dtype=np.int64)
    back[np.concatenate([np.flatnonzero(stored), np.flatnonzero(~stored)])] = np.arange(len(stored))
    return pl.concat(parts, rechunk=True)[back]


def _number_in(frames: Sequence[pl.DataFrame], port: int, places: np.ndarray) -> np.ndarray:
    """The position in a port's frame of rows that came in this epoch."""
    return -1 - places - sum(f.height for f in frames[:port])


def _starting_inside(
    groups: np.ndarray, start: np.ndarray, end: np.ndarray, under: np.ndarray, fresh: np.ndarray, *, ties: bool
) -> tuple[np.ndarray, np.ndarray]:
    """All pairs (u, f) of one group such that f starts in the lifetime of u: ``start[u] <= start[f] < end[u]``
    (without ``ties``: ``start[u] < start[f]``). Positions are in order of group and start.

    For each f, those u are looked at that start at most the greatest length before it. One long lifetime would make
    that everything; so where much is looked at for little, long and short ones are looked at apart. With lengths within
    a factor of two, half of what is looked at is found.
    """
    if not len(under) or not len(fresh):
        none = np.zeros(0, dtype=np.int64)
        return none, none
    starts, rank = np.unique(start[under], return_inverse=True)
    place = (groups[under] << 32) | rank
    queries = groups[fresh] << 32
    until = np.searchsorted(place, queries | np.searchsorted(starts, start[fresh], side="right" if ties else "left"))
    is_open = end[under] == FOREVER
    length = np.where(is_open, FOREVER, np.where(is_open, start[under], end[under]) - start[under])
    longest = int(length.max())
    if longest == FOREVER:
        since = np.searchsorted(place, queries)
    else:
        since = np.searchsorted(place, queries | np.searchsorted(starts, start[fresh] - longest, side="right"))
    counts = np.maximum(until - since, 0)
    total = int(counts.sum())
    shortest = int(length.min())
    if total > _WASTE_MAX * (len(under) + len(fresh)) and longest > 2 * shortest:
        half = shortest * 2 ** max(1, (longest // shortest).bit_length() // 2)
        short = length <= half
        parts = [_starting_inside(groups, start, end, part, fresh, ties=ties) for part in (under[short], under[~short])]
        return np.concatenate([u for u, _ in parts]), np.concatenate([f for _, f in parts])
    at = np.arange(total) + np.repeat(since - (np.cumsum(counts) - counts), counts)
    u, f = under[at], np.repeat(fresh, counts)
    inside = start[f] < end[u]
    return (u, f) if inside.all() else (u[inside], f[inside])


def _running_number(hashes: np.ndarray) -> np.ndarray:
    """For each row, how many before it have the same hash."""
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    first = np.searchsorted(ordered, ordered, side="left")
    number = np.empty(len(hashes), dtype=np.int64)
    number[order] = np.arange(len(hashes)) - first
    return number


def _ends(until: pl.Series) -> np.ndarray:
    """Ends in microseconds. Null is for ever, and so is the year 9999 that some write instead: no row lives then."""
    physical = until.to_physical().cast(pl.Int64)
    per_us = {"ns": (1, 1000), "us": (1, 1), "ms": (1000, 1)}
    unit = (86_400_000_000, 1) if isinstance(until.dtype, pl.Date) else per_us[until.dtype.time_unit]  # type: ignore[attr-defined]
    low, high = (bound * unit[1] // unit[0] for bound in (TIME_US_MIN - 1, TIME_US_MAX))
    open_ended = (physical >= high).fill_null(True).to_numpy()
    given = physical.fill_null(0).clip(low, high).to_numpy() * unit[0] // unit[1]
    return np.where(open_ended, FOREVER, given)


def _origin(stage: str) -> int:
    """A number for an upstream stage that is the same for ever."""
    return int(hash_columns(pl.DataFrame({"stage": [stage]}), ["stage"]).view(np.int64)[0])


# -- checks when the flow is built -----------------------------------------------------------------------------------


def _same_keys(
    id: str, left_key: Sequence[str], left: pl.Schema, right_key: Sequence[str], right: pl.Schema
) -> pl.Schema:
    if len(left_key) != len(right_key):
        raise FlowError(
            f"operator '{id}': the left side is keyed by {', '.join(left_key)}, the right by {', '.join(right_key)}.",
            remedy="Key both sides by as many columns, in the same order.",
            operator=id,
        )
    for a, b in zip(left_key, right_key, strict=True):
        if left[a] != right[b]:
            raise FlowError(
                f"operator '{id}': key '{a}' of the left side is {left[a]}, key '{b}' of the right is {right[b]}.",
                remedy=f"Cast one of them, for example .with_columns('cast', pl.col('{b}').cast(pl.{left[a]})).",
                operator=id,
            )
    return pl.Schema({k: left[k] for k in left_key})


def right_names(id: str, left: pl.Schema, right: pl.Schema, right_key: Sequence[str], suffix: str) -> dict[str, str]:
    """What the right side's columns, other than its key, are called in the output."""
    others = [c for c in right if c not in right_key]
    names = {c: c + suffix if c in left else c for c in others}
    taken = set(left)
    for column, name in names.items():
        if name in taken:
            raise FlowError(
                f"operator '{id}': column '{column}' of the right side would be called '{name}', which is taken.",
                remedy="Give another suffix=, or rename or drop the column before the join.",
                operator=id,
            )
        taken.add(name)
    return names


def _check_shape(id: str, shape: Shape, schema: pl.Schema) -> None:
    for column in (shape.on, shape.until):
        if column is not None and not isinstance(schema[column], pl.Datetime | pl.Date):
            raise FlowError(
                f"operator '{id}': column '{column}' has type {schema[column]}, not a time.",
                remedy=f"Convert it, for example pl.from_epoch('{column}', time_unit='s').",
                operator=id,
            )
    if shape.ends is not None and schema[shape.ends] != pl.Boolean:
        raise FlowError(
            f"operator '{id}': column '{shape.ends}' has type {schema[shape.ends]}, not Boolean.",
            remedy="It says which rows close a lifetime: compute it, for example ends=pl.col('kind') == 'logout'.",
            operator=id,
        )
    for column in shape.id:
        if not hashable(schema[column]):
            raise FlowError(
                f"operator '{id}': column '{column}' of type {schema[column]} cannot be an id.",
                remedy="Use numbers, text, times, booleans or bytes.",
                operator=id,
            )


__all__ = ["LifetimeJoin", "Shape", "Within", "edge", "interval", "point", "right_names", "versions", "within"]
