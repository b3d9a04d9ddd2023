"""Custom operators: a user's Python, per event, with state for each key.

::

    class Gaps(ps.Operator):
        def on_event(self, key: str, event: ps.Event, last: ps.Value[float], emit: ps.Emit) -> None:
            before = last.get()
            if before is not None:
                emit(word=key, gap=event.at - before)
            last.set(event.at)

States are declared by annotation, see :mod:`penstock.operators.statelib`.

**Speed.** The rows of an epoch are sorted by the hash of their key, columns become lists once, and events are made one
after the other as frozen Structs that live for one call. Emitted values go straight into one list for each column; keys
in order of their hash give output that is in canonical order without another sort.

**Time.** With ``on`` the operator has a watermark, timers, and states that expire. Everything follows the watermark *at
the row*: before an event is handled, the timers of its key that are due by then fire, in order of time; after the rows
of the epoch those fire, of all keys, that its watermark has passed. A key's next event is never behind that watermark,
so which of the two calls a timer makes no difference: the cut into epochs does not show. For the same reason a timer
sees the world as of its own time, not as of the watermark that happened to wake it. A timer that an event sets for the
very watermark at it fires at once, behind the event.

**Order.** Where order matters behind the operator, every emitted row is tagged: with the order of the row for which it
was emitted, or with the time of the timer (``order.py``).
"""

from __future__ import annotations

import gc
import inspect
import keyword
import typing
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, tzinfo
from functools import cache
from itertools import islice
from types import CodeType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol
from zoneinfo import ZoneInfo

import msgspec
import numpy as np
import polars as pl

from penstock.errors import FlowError, UserCodeError
from penstock.frames import alike, pick, sorted_by, take, with_column
from penstock.operators.base import (
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
)
from penstock.operators.event_time import Duration, microseconds, timed_rows
from penstock.operators.order import signed, stacked_by_tags, tag_columns, with_tags
from penstock.operators.statelayout import Layout, MsgspecCodec, StateError, StateSpec, declared, is_state
from penstock.operators.statelib import Cell, Time, Timers, from_us
from penstock.operators.steps import show, user_code_error
from penstock.state.table import KeyedTable, TableSpec, ValueType, numeric, objects

_AT, MARK = "__at", "__mark"
_WAKE, _TIMERS = "__wake", "__timers"


class Event(msgspec.Struct, frozen=True, gc=False):
    """One row: a column is an attribute, or ``event["column"]`` where its name is no identifier."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    _columns: ClassVar[dict[str, str]] = {}
    """Column -> attribute."""

    def __getitem__(self, column: str) -> Any:
        return getattr(self, self._columns[column])


class Emit(Protocol):
    """The type of ``emit``: call it with the columns of the output, by name or in the order of the schema."""

    def __call__(self, *values: Any, **columns: Any) -> None: ...


class Operator:
    """Base of custom operators. Override ``on_event``; keep nothing on ``self`` that changes."""

    def on_event(self, key: Any, event: Any, *args: Any, **kwargs: Any) -> None:
        """Called for each event of a key, in source order.

        ``key`` is the value of the key column, or a tuple of several. Parameters besides it and ``event``: ``emit``;
        states, by their annotation (``ps.Value[T]``, ``ps.Map[K, V]`` ...); and, with ``process(..., on=column)``,
        ``timers: ps.Timers`` and ``time: ps.Time``. Late events come as well: their time is before
        ``time.watermark``.
        """
        raise NotImplementedError

    def on_timer(self, key: Any, at: datetime, *args: Any, **kwargs: Any) -> None:
        """Called when the watermark has passed a time that ``timers.set`` asked for.

        Parameters besides ``key`` and ``at``: as for ``on_event``, and ``name``, the timer's.
        At the end of the input every timer fires once; those set then are not kept.
        """
        raise NotImplementedError


def _plain(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)


def event_type(names: Sequence[str]) -> Any:
    """A class for events with these columns. One that cannot be an attribute goes by its number: ``_2``."""
    columns = {name: name if _plain(name) else f"_{i}" for i, name in enumerate(names)}
    fields = [(attribute, Any) for attribute in columns.values()]
    return msgspec.defstruct("Event", fields, bases=(Event,), namespace={"_columns": columns}, frozen=True, gc=False)


# -- reading a user's class ------------------------------------------------------------------------------------------


class Signature:
    """The parameters of a user's function beyond the first two (and ``self``)."""

    def __init__(
        self, id: str, method: str, function: Callable[..., Any], timed: bool, *, second: str, bound: bool = True
    ) -> None:
        parameters = list(inspect.signature(function).parameters.values())[1 if bound else 0 :]
        example = f"Write def {method}({'self, ' if bound else ''}key, {second}, state: ps.Value[T], emit)."
        if len(parameters) < 2 or any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in parameters):
            raise FlowError(
                f"operator '{id}': {method} must take at least key and {second}, and no * or ** parameters.",
                remedy=example,
                operator=id,
            )
        try:
            hints = typing.get_type_hints(function, include_extras=True)
        except (NameError, AttributeError, TypeError) as error:
            raise FlowError(
                f"operator '{id}': an annotation of {method} cannot be resolved: {error}.",
                remedy="Import or define the state's type at module level.",
                operator=id,
            ) from None
        self.arguments: tuple[str, ...] = tuple(p.name for p in parameters[2:])
        """What to pass, in order: "emit", "timers", "time", "name", or the name of a state."""
        self.states: dict[str, StateSpec] = {}
        roles: list[str] = []
        for name in self.arguments:
            hint = hints.get(name)
            role = "timers" if hint is Timers else "time" if hint is Time else name
            if is_state(hint):
                self.states[name] = declared(id, name, hint, timed)
                role = f"state {name}"
            elif role not in ("emit", "timers", "time") and not (role == "name" and method == "on_timer"):
                raise FlowError(
                    f"operator '{id}': parameter '{name}' of {method} is neither 'emit' nor a state.",
                    remedy="Annotate it, for example state: ps.Value[int].",
                    operator=id,
                )
            if role in ("timers", "time") and not timed:
                raise FlowError(
                    f"operator '{id}': parameter '{name}' of {method} needs event time, and the operator has none.",
                    remedy="Say which column is the time: process(..., on='ts').",
                    operator=id,
                )
            roles.append(role)
        self.roles = tuple(roles)


def read_signatures(id: str, operator: Operator, timed: bool) -> tuple[Signature, Signature | None]:
    """Of ``on_event`` and, if there is one, ``on_timer``."""
    kind = type(operator)
    if kind.on_event is Operator.on_event:
        raise FlowError(
            f"operator '{id}': {kind.__name__} does not define on_event.",
            remedy="Write def on_event(self, key, event, state: ps.Value[T], emit).",
            operator=id,
        )
    event = Signature(id, "on_event", kind.on_event, timed, second="event")
    if kind.on_timer is Operator.on_timer:
        if "timers" in event.roles:
            raise FlowError(
                f"operator '{id}': on_event sets timers, but {kind.__name__} does not define on_timer.",
                remedy="Write def on_timer(self, key, at, state: ps.Value[T], emit).",
                operator=id,
            )
        return event, None
    if not timed:
        raise FlowError(
            f"operator '{id}': on_timer needs event time, and the operator has none.",
            remedy="Say which column is the time: process(..., on='ts').",
            operator=id,
        )
    timer = Signature(id, "on_timer", kind.on_timer, timed, second="at")
    for name, spec in timer.states.items():
        if event.states.get(name, spec) != spec:
            raise FlowError(
                f"operator '{id}': state '{name}' is declared differently in on_event and on_timer.",
                remedy="Give it the same annotation in both.",
                operator=id,
            )
    return event, timer


# -- running it ------------------------------------------------------------------------------------------------------


@cache
def _compiled(text: str) -> CodeType:
    """An outlet is made for every task; what it is called with is that of its operator."""
    return compile(text, "<emit>", "exec")


class Outlet:
    """Where emitted rows go: one list for each column, and how many rows each key had made by its end."""

    def __init__(self, schema: pl.Schema) -> None:
        self.schema = schema
        self.columns: list[list[Any]] = [[] for _ in schema]
        self.ends: list[int] = []
        self.emit: Emit = self._written_out() if all(map(_plain, schema)) else self._by_name()

    def _written_out(self) -> Emit:
        """A function whose parameters are the columns: Python itself checks and orders what it is called with."""
        appends = {f"append_{i}": column.append for i, column in enumerate(self.columns)}
        names = list(self.schema)
        body = "; ".join(f"append_{i}({name})" for i, name in enumerate(names))
        clash = {n: f"append_{i}" for i, n in enumerate(names) if n in appends}
        if clash:
            return self._by_name()
        scope: dict[str, Any] = dict(appends)
        exec(_compiled(f"def emit({', '.join(names)}): {body}"), scope)
        emit: Emit = scope["emit"]
        return emit

    def _by_name(self) -> Emit:
        names, columns = list(self.schema), self.columns

        def emit(*values: Any, **named: Any) -> None:
            row = {**dict(zip(names, values, strict=False)), **named}
            if len(row) != len(values) + len(named) or set(row) != set(names):
                missing, unknown = [c for c in names if c not in row], [c for c in named if c not in names]
                raise TypeError(f"emit() missing columns {missing}, unknown or repeated columns {unknown}")
            for column, name in zip(columns, names, strict=True):
                column.append(row[name])

        return emit

    def close_key(self) -> None:
        self.ends.append(len(self.columns[0]))

    def frame(self, id: str, epoch: int, hashes: np.ndarray | None) -> pl.DataFrame:
        """All rows, with the hash of the key that made them. ``hashes``: of the keys, in the order closed."""
        made = []
        for (name, dtype), values in zip(self.schema.items(), self.columns, strict=True):
            try:
                made.append(pl.Series(name, values, dtype=dtype))
            except (pl.exceptions.PolarsError, TypeError, OverflowError, ValueError) as error:
                raise user_code_error(id, epoch, _misfit(name, dtype, values), _in_short(name, dtype, error)) from error
        if hashes is None:
            return pl.DataFrame(made)
        counts: np.ndarray = np.diff(np.asarray(self.ends, dtype=np.int64), prepend=0)
        tags = np.repeat(hashes.astype(np.uint64, copy=False), counts)
        return pl.DataFrame([*made, pl.Series(ORDER, tags, dtype=pl.UInt64)])


def _misfit(name: str, dtype: Any, values: list[Any]) -> dict[str, Any]:
    """The first value that does not fit its column."""
    for value in values:
        try:
            pl.Series(name, [value], dtype=dtype)
        except Exception:
            return {name: value}
    return {name: None}


def _in_short(name: str, dtype: Any, error: Exception) -> TypeError:
    return TypeError(f"emit: a value does not fit column '{name}' of type {dtype} ({str(error).splitlines()[0]})")


@contextmanager
def no_collection() -> Iterator[None]:
    """The collector would look at every live object again and again while an epoch makes hundreds of thousands."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Custom(KeyedOperator):
    """Runs a user's ``Operator`` over the keys of a container."""

    hands_on = True

    def __init__(
        self,
        id: str,
        key: Sequence[str],
        operator: Operator,
        schema: pl.Schema,
        output: pl.Schema,
        *,
        on: str | None = None,
        lateness_us: int = 0,
        hold_us: int = 0,
    ) -> None:
        self.id = id
        self.key = tuple(key)
        self.operator = operator
        self.schema = schema
        self.output = output
        self.on = on
        self.timed = on is not None
        self.lateness_us = lateness_us
        self.hold_us = hold_us
        self.event, self.timer = self.read()
        self.states = {**self.event.states, **(self.timer.states if self.timer else {})}
        self.wakes = self.timed and bool(
            self.timer or any(s.expires or (s.keep and s.keep.span_us) for s in self.states.values())
        )
        """Something may be due later: a timer, or the end of a state."""
        self.scans = self.wakes
        self._made: tuple[Any, dict[str, Layout]] | None = None

    def read(self) -> tuple[Signature, Signature | None]:
        """What the user's functions take."""
        return read_signatures(self.id, self.operator, self.timed)

    @property
    def on_event(self) -> Callable[..., None]:
        return self.operator.on_event

    def events(self, frame: pl.DataFrame) -> Iterator[Any]:
        """What ``on_event`` gets, row by row."""
        return map(self.made()[0], *(frame[name].to_list() for name in self.schema.names()))

    def record(self, key: Any, event: Any) -> Any:
        """An event, for an error message."""
        return {name: event[name] for name in self.schema.names()}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": None}  # a class made here cannot be found by name elsewhere

    @property
    def ordered(self) -> bool:
        return True

    def time_at(self, port: int) -> str | None:
        return self.on

    def table(self) -> TableSpec | None:
        if not self.states and not self.wakes:
            return None
        key = pl.Schema({k: self.schema[k] for k in self.key})
        values: dict[str, ValueType] = {}
        for spec in self.states.values():
            values |= spec.layout().columns()
            if spec.expires:
                values[spec.due_column] = numeric(np.int64, FOREVER)
        if self.wakes:
            values[_WAKE] = numeric(np.int64, FOREVER)
        if self.timer:
            values[_TIMERS] = objects(MsgspecCodec(list[tuple[int, str | None]]))
        return TableSpec(key, values)

    # -- before the exchange -----------------------------------------------------------------------------------------

    def prepare(self, frame: pl.DataFrame, from_source: bool, port: int = 0, clock_us: int = 0) -> Prepared:
        return (
            Prepared(frame) if self.on is None else with_times(self.id, frame, self.on, self.lateness_us, from_source)
        )

    # -- in the container --------------------------------------------------------------------------------------------

    def apply(self, table: KeyedTable | None, arrivals: Sequence[Arrival], tick: Tick) -> Applied:
        run = _Run(self, table, tick)
        with no_collection():
            made = [run.events(self._sorted([a for a in arrivals if a.frame.height], tick))]
            if self.wakes and tick.watermark != NEVER:
                made.append(run.wake_the_idle())
        frames = [f for f in made if f is not None and f.height]
        dead = tuple(run.dead)
        if tick.tells and frames:
            return Applied(stacked_by_tags(frames), dead=dead)
        if len(frames) == 2:
            return Applied(pl.concat(frames).sort(ORDER, maintain_order=True), dead=dead)
        return Applied(frames[0] if frames else pl.DataFrame(schema={**self.output, ORDER: pl.UInt64()}), dead=dead)

    def _sorted(self, arrivals: Sequence[Arrival], tick: Tick) -> pl.DataFrame | None:
        """All rows by the hash of their key; those of one key in source order."""
        if not arrivals:
            return None
        frame = with_marks(arrivals, tick) if self.timed else in_order(arrivals)
        return sorted_by(frame, HASH)

    def made(self) -> tuple[Any, dict[str, Layout]]:
        """The class of its events and the layouts of its states, made once in each process."""
        if self._made is None:
            layouts = {name: spec.layout() for name, spec in self.states.items()}
            self._made = event_type(self.schema.names()), layouts
        return self._made

    @property
    def zone(self) -> tzinfo | None:
        dtype = self.schema[self.on] if self.on else None
        return ZoneInfo(dtype.time_zone) if isinstance(dtype, pl.Datetime) and dtype.time_zone else None

    def fingerprint(self) -> dict[str, Any]:
        return {
            "operator": "custom",
            "key": {k: str(self.schema[k]) for k in self.key},
            "states": {n: spec.fingerprint() for n, spec in self.states.items()},
            "timers": self.timer is not None,
        }

    def describe(self) -> str:
        return type(self.operator).__name__


def instance(id: str, operator: Any) -> Any:
    """An operator that was given as its class, made."""
    if not isinstance(operator, type):
        return operator
    try:
        return operator()
    except TypeError as error:
        raise FlowError(
            f"operator '{id}': {operator.__name__} cannot be made without arguments: {error}.",
            remedy=f"Pass an instance of it: {operator.__name__}(...).",
            operator=id,
        ) from None


def with_times(id: str, frame: pl.DataFrame, on: str, lateness_us: int, from_source: bool) -> Prepared:
    """Each row with its time and, as far as its split tells, the watermark at it."""
    frame, times, dead = timed_rows(id, frame, on)
    if not len(times):
        marks = times
    elif from_source:
        marks = row_watermarks(frame, times, lateness_us)
    else:
        marks = np.full(len(times), NEVER, dtype=np.int64)
    frame = with_column(frame, pl.Series(_AT, times, dtype=pl.Int64))
    frame = with_column(frame, pl.Series(MARK, marks, dtype=pl.Int64))
    return Prepared(frame, int(times.max()) if len(times) else None, dead=dead)


def with_marks(arrivals: Sequence[Arrival], tick: Tick) -> pl.DataFrame:
    """All rows in order, with the watermark at each, now that it is known what the splits before have seen."""
    marked = []
    for a in arrivals:
        marks = np.maximum(a.frame[MARK].to_numpy(), max(a.watermark, tick.watermark_before))
        marked.append(replace(a, frame=with_column(a.frame, pl.Series(MARK, marks))))
    return in_order(marked)


def build_custom(
    id: str,
    key: Sequence[str],
    operator: Any,
    schema: pl.Schema,
    output: pl.Schema,
    *,
    on: str | None = None,
    lateness: Duration = 0,
    hold: Duration = 0,
) -> KeyedOperator:
    """What ``KeyedStream.process`` adds to the flow, checked."""
    if not isinstance(operator, Operator):
        raise FlowError(
            f"operator '{id}': {type(operator).__name__} is not a ps.Operator.",
            remedy="Derive a class from ps.Operator and pass an instance of it.",
            operator=id,
        )
    lateness_us, hold_us = check_time(id, on, lateness, hold, schema)
    return Custom(id, key, operator, schema, output, on=on, lateness_us=lateness_us, hold_us=hold_us)


def check_time(id: str, on: str | None, lateness: Duration, hold: Duration, schema: pl.Schema) -> tuple[int, int]:
    """Lateness and hold in microseconds; refuses what cannot be."""
    lateness_us, hold_us = _span(id, lateness, "lateness"), _span(id, hold, "hold")
    if on is None and (lateness_us or hold_us):
        raise FlowError(
            f"operator '{id}': lateness and hold mean something only with event time.",
            remedy="Say which column is the time: process(..., on='ts').",
            operator=id,
        )
    if on is None:
        return 0, 0
    if on not in schema:
        raise FlowError(
            f"operator '{id}': there is no column '{on}'.",
            remedy=f"The columns are {', '.join(schema.names())}.",
            operator=id,
        )
    if not isinstance(schema[on], pl.Datetime | pl.Date):
        raise FlowError(
            f"operator '{id}': column '{on}' has type {schema[on]}, not a time.",
            remedy=f"Convert it, for example pl.from_epoch('{on}', time_unit='s').",
            operator=id,
        )
    return lateness_us, hold_us


def _span(id: str, value: Duration, what: str) -> int:
    us = microseconds(value, f"operator '{id}': {what}")
    if us < 0:
        raise FlowError(f"operator '{id}': {what} cannot be negative.", remedy=f"Use {what}='0s' or more.", operator=id)
    return us


_PLAIN_LOOP = """
def loop(call, keys, sizes, events, cells, ends, made, error_of, note{arguments}):
    key = event = None
    count = made.__len__
    try:
        for group, (key, size) in enumerate(zip(keys, sizes)):
            for cell, values in cells:
                cell._data = values[group]
            for event in islice(events, size):
                call(key, event{arguments}){after}
            for cell, values in cells:
                values[group] = cell._take()
            ends.append(len(made))
    except (Exception, SystemExit) as error:
        raise error_of(key, event, error) from error
"""


@cache
def plain_loop(arguments: int, tells: bool) -> Callable[..., None]:
    """The loop over events without time, for functions with this number of arguments: to write them out in the call,
    rather than to pass a tuple with a star, makes the whole operator faster by a sixth. ``tells``: it notes after each
    event how many rows there are.
    """
    scope: dict[str, Any] = {"islice": islice}
    after = "; note(count())" if tells else ""
    exec(_PLAIN_LOOP.format(arguments="".join(f", a{i}" for i in range(arguments)), after=after), scope)
    loop: Callable[..., None] = scope["loop"]
    return loop


@dataclass
class _Slot:
    """One state over the keys at hand."""

    spec: StateSpec
    layout: Layout
    cell: Cell
    values: list[Any]
    dues: list[int] | None


class _Run:
    """One epoch of one container."""

    def __init__(self, custom: Custom, table: KeyedTable | None, tick: Tick) -> None:
        self.custom = custom
        self.table = table
        self.tick = tick
        self.limit = min(tick.watermark, FOREVER - 1)
        self.tells = tick.tells
        self.time = Time(custom.zone, tick.clock_ms)
        self.timers = Timers(self.time, self._refuse)
        self.cells = {name: spec.cell(self.time) for name, spec in custom.states.items()}
        self.dead: list[Dead] = []
        self.key: Any = None
        self.firing: int | None = None
        """The time of the timer that is being called."""
        self._start(None, 0)

    def _refuse(self, at: int, name: str | None) -> None:
        moment = from_us(at, self.time._zone).isoformat()
        raw = show({"key": self.key, "at": moment, "name": name})
        reason = f"a timer was set for {moment}, which the watermark had passed: it was at {self.time.watermark}"
        self.dead.append((self.custom.id, f"epoch {self.tick.epoch}", reason, raw))

    # -- state in and out --------------------------------------------------------------------------------------------

    def _start(self, rows: np.ndarray | None, count: int) -> None:
        """Make ready for the keys of these rows: their states as lists, and an outlet of their own."""
        self.rows = rows
        self.outlet = Outlet(self.custom.output)
        self.causes: list[int] = []
        """Of each emitted row the row that caused it, or, of a timer, -1 less the number of the key."""
        self.moments: list[int] = []
        """Of each emitted row the watermark at the row that caused it, or the time of the timer."""
        self.slots: list[_Slot] = []
        self.wakes: list[int] = [FOREVER] * count
        self.timer_lists: list[list[tuple[int, str | None]] | None] = [None] * count
        given: dict[str, Any] = {"emit": self.outlet.emit, "timers": self.timers, "time": self.time, "name": None}
        given |= {f"state {name}": cell for name, cell in self.cells.items()}
        self.on_event_arguments = tuple(given[role] for role in self.custom.event.roles)
        timer = self.custom.timer
        self.on_timer_arguments = [given[role] for role in timer.roles] if timer else []
        self.name_at = timer.roles.index("name") if timer and "name" in timer.roles else None
        if self.table is None or rows is None:
            return
        _, layouts = self.custom.made()
        for name, spec in self.custom.states.items():
            dues = self.table.column(spec.due_column)[rows].tolist() if spec.expires else None
            layout = layouts[name]
            self.slots.append(_Slot(spec, layout, self.cells[name], layout.load(self.table, rows), dues))
        if self.custom.wakes:
            self.wakes = self.table.column(_WAKE)[rows].tolist()
        if timer:
            self.timer_lists = self.table.column(_TIMERS)[rows].tolist()

    def _store(self) -> None:
        """Everything back into the table; keys that have nothing left are forgotten."""
        table, rows = self.table, self.rows
        if table is None or rows is None:
            return
        alive = np.zeros(len(rows), dtype=np.bool_)
        for slot in self.slots:
            try:
                alive |= slot.layout.store(table, rows, slot.values)
            except StateError as error:
                raise user_code_error(self.custom.id, self.tick.epoch, None, error) from error
            if slot.dues is not None:
                table.column(slot.spec.due_column)[rows] = slot.dues
        if self.custom.wakes:
            table.column(_WAKE)[rows] = self.wakes
        if self.custom.timer:
            kept = [items or None for items in self.timer_lists]
            table.column(_TIMERS)[rows] = np.fromiter(kept, dtype=object, count=len(kept))
            alive |= np.fromiter((items is not None for items in kept), dtype=np.bool_, count=len(kept))
        if not alive.all():
            table.delete(rows[~alive])

    def _put(self, group: int, key: Any) -> None:
        self.key = key
        self.time._wake = self.wakes[group]
        self.timers._items = self.timer_lists[group] or []
        for slot in self.slots:
            slot.cell._put(slot.values[group], slot.dues[group] if slot.dues is not None else FOREVER)

    def _take(self, group: int) -> None:
        self.wakes[group] = self._next_wake()
        self.timer_lists[group] = self.timers._items
        for slot in self.slots:
            slot.values[group] = slot.cell._take()
            if slot.dues is not None:
                slot.dues[group] = slot.cell._due
        self.outlet.close_key()

    def _next_wake(self) -> int:
        items = self.timers._items
        return min([items[0][0] if items else FOREVER, *(slot.cell._next_due() for slot in self.slots)])

    # -- the keys of this epoch --------------------------------------------------------------------------------------

    def events(self, frame: pl.DataFrame | None) -> pl.DataFrame | None:
        """Handle the rows of the epoch, which come sorted by the hash of their key."""
        if frame is None:
            return None
        frame, starts = group_by_key(frame, self.custom.key)
        hashes = frame[HASH].to_numpy()[starts]
        keys = take(pick(frame, self.custom.key), starts)
        rows = self.table.upsert(hashes, keys)[0] if self.table is not None else None
        self._start(rows, len(starts))
        sizes = np.diff(starts, append=frame.height).tolist()
        events = self.custom.events(frame)
        if self.custom.timed:
            moments = zip(frame[_AT].to_list(), frame[MARK].to_list(), strict=True)
            self._run_timed(key_values(keys), sizes, events, moments)
        else:
            self._run_plain(key_values(keys), sizes, events)
        self._store()
        return self._made(hashes, tag_columns(frame))

    def _made(self, hashes: np.ndarray, tags: Sequence[np.ndarray]) -> pl.DataFrame:
        """The rows emitted, with their order. ``tags``: of the rows handled."""
        if not self.tells:
            return self.outlet.frame(self.custom.id, self.tick.epoch, hashes)
        out = self.outlet.frame(self.custom.id, self.tick.epoch, None)
        causes = np.asarray(self.causes, dtype=np.int64)
        if not self.custom.timed:
            return with_tags(out, [values[causes] for values in tags])
        by_timer = causes < 0
        hash_of = signed(hashes)[np.where(by_timer, -1 - causes, 0)]
        found = [values[np.where(by_timer, 0, causes)] for values in tags] or [np.zeros(len(causes), dtype=np.int64)]
        first = np.where(by_timer, hash_of, found[0])
        rest = [np.where(by_timer, 0, values) for values in found[1:]]
        return with_tags(out, [np.asarray(self.moments, dtype=np.int64), (~by_timer).astype(np.int64), first, *rest])

    def _note(self, cause: int, moment: int) -> None:
        """What was emitted since the last call was caused by this."""
        more = len(self.outlet.columns[0]) - len(self.causes)
        if more:
            self.causes.extend([cause] * more)
            self.moments.extend([moment] * more)

    def _run_plain(self, keys: list[Any], sizes: list[int], events: Iterator[Any]) -> None:
        cells = [(slot.cell, slot.values) for slot in self.slots]
        ends, made = self.outlet.ends, self.outlet.columns[0]
        loop = plain_loop(len(self.on_event_arguments), self.tells)
        after = array("q")
        call = self.custom.on_event
        loop(call, keys, sizes, events, cells, ends, made, self._error, after.append, *self.on_event_arguments)
        if self.tells:
            so_far: np.ndarray = np.frombuffer(after, dtype=np.int64)
            made_by: np.ndarray = np.diff(so_far, prepend=0)
            self.causes = np.repeat(np.arange(len(after)), made_by)  # type: ignore[assignment]

    def _run_timed(
        self, keys: list[Any], sizes: list[int], events: Iterator[Any], moments: Iterator[tuple[int, int]]
    ) -> None:
        call = self.custom.on_event
        arguments = self.on_event_arguments
        time, limit, tells = self.time, self.limit, self.tells
        key = event = None
        row = -1
        try:
            for group, (key, size) in enumerate(zip(keys, sizes, strict=True)):
                self._put(group, key)
                for event in islice(events, size):
                    at, mark = next(moments)
                    row += 1
                    if mark >= time._wake:
                        self._advance(key, mark, -1 - group)
                    time._watermark = mark
                    time._now = at if at > mark else mark
                    call(key, event, *arguments)
                    if tells:
                        self._note(row, mark)
                    if mark >= time._wake:  # it has set a timer for this very watermark
                        self._advance(key, mark, row)
                if limit >= time._wake:
                    self._advance(key, limit, -1 - group)
                self._take(group)
        except (Exception, SystemExit) as error:
            raise self._error(key, event, error) from error

    # -- timers and expiry -------------------------------------------------------------------------------------------

    def wake_the_idle(self) -> pl.DataFrame | None:
        """Keys for which something is due though they had no event."""
        assert self.table is not None
        rows = np.flatnonzero(self.table.column(_WAKE) <= self.limit).astype(np.int64)  # dead rows never wake
        if not len(rows):
            return None
        hashes = self.table.hashes(rows)
        order = np.argsort(hashes, kind="stable")
        rows, hashes = rows[order], hashes[order]
        self.table.touch(rows)
        self._start(rows, len(rows))
        try:
            for group, key in enumerate(key_values(self.table.keys(rows))):
                self._put(group, key)
                self._advance(key, self.limit, -1 - group)
                self._take(group)
        except (Exception, SystemExit) as error:
            raise self._error(None, None, error) from error
        self._store()
        return self._made(hashes, [])

    def _advance(self, key: Any, limit: int, cause: int) -> None:
        """Fire the timers of this key that are due by ``limit``, then forget what has expired by then.

        Each timer sees the states as of its own time: what expires later is still there. ``cause``: see ``causes``.
        """
        time, timers = self.time, self.timers
        arguments = self.on_timer_arguments
        timers._closing = self.tick.watermark == FOREVER and limit == self.limit
        while timers._items and timers._items[0][0] <= limit:
            at, name = timers._items.pop(0)
            self._expire(at)
            time._watermark = time._now = self.firing = at
            if self.name_at is not None:
                arguments[self.name_at] = name
            timers._firing = True
            self.custom.operator.on_timer(key, from_us(at, time._zone), *arguments)
            timers._firing = False
            self.firing = None
            if self.tells:
                self._note(cause, at)
        timers._closing = False
        self._expire(limit)
        time._wake = self._next_wake()

    def _expire(self, watermark: int) -> None:
        for slot in self.slots:
            slot.cell._expire(watermark)

    def _error(self, key: Any, event: Any, error: BaseException) -> UserCodeError:
        if self.firing is not None:
            record: Any = {"key": self.key, "timer": from_us(self.firing, self.time._zone).isoformat()}
        else:
            record = self.custom.record(key, event) if event is not None else None
        return user_code_error(self.custom.id, self.tick.epoch, record, error)


def group_by_key(frame: pl.DataFrame, key: Sequence[str]) -> tuple[pl.DataFrame, np.ndarray]:
    """Rows sorted by hash, and where each key begins. Two keys of one hash are rare, and told apart."""
    hashes = frame[HASH].to_numpy()
    starts = np.flatnonzero(np.concatenate(([True], hashes[1:] != hashes[:-1])))
    n = frame.height
    differs = np.zeros(n - 1, dtype=np.bool_)
    for name in key:
        column = frame[name]
        differs |= ~alike(column.slice(1), column.slice(0, n - 1))
    if np.count_nonzero(differs) == len(starts) - 1:  # equal keys have equal hashes: every start is a difference
        return frame, starts
    first, inverse = unique_keys(hashes, pick(frame, key))
    order = np.argsort(inverse, kind="stable")
    return frame[order], np.searchsorted(inverse[order], np.arange(len(first)))


def key_values(keys: pl.DataFrame) -> list[Any]:
    """What users see as the key: one value, or a tuple of several."""
    return keys.to_series().to_list() if keys.width == 1 else keys.rows()
