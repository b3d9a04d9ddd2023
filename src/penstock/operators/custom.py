"""Custom operators: a user's Python, per event, with state per key.

::

    class Gaps(ps.Operator):
        def on_event(self, key, event, state: ps.Value[float], emit):
            last = state.get()
            if last is not None:
                emit(word=key, gap=event.at - last)
            state.set(event.at)

Each parameter annotated ``ps.Value[T]`` is a state of its own. ``T`` may be anything msgspec can encode: builtins,
dataclasses, Structs, datetimes. Users write no serialisation code.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import polars as pl

from penstock.errors import FlowError
from penstock.operators.base import (
    HASH,
    Applied,
    Arrival,
    KeyedOperator,
    Prepared,
    Tick,
    canonical,
    in_order,
    unique_keys,
    visible,
)
from penstock.operators.steps import user_code_error
from penstock.state.table import KeyedTable, TableSpec, objects

T = TypeVar("T")


class Value(Generic[T]):
    """One value for each key: get, set, delete."""

    __slots__ = ("_value",)

    def __init__(self) -> None:
        self._value: T | None = None

    @typing.overload
    def get(self) -> T | None: ...
    @typing.overload
    def get(self, default: T) -> T: ...
    def get(self, default: T | None = None) -> T | None:
        """The value of this key, or the default when it has none."""
        return default if self._value is None else self._value

    def set(self, value: T) -> None:
        if value is None:
            raise ValueError("a state cannot be set to None; use delete()")
        self._value = value

    def delete(self) -> None:
        self._value = None


class Operator:
    """Base of custom operators. Override ``on_event``; keep nothing on ``self`` that changes."""

    def on_event(self, key: Any, event: Any, *args: Any, **kwargs: Any) -> None:
        """Called for each event of a key, in source order.

        Parameters besides ``key`` and ``event``: ``emit`` (call it with the output's columns by name) and any number
        annotated ``ps.Value[T]``.
        """
        raise NotImplementedError


class MsgspecCodec:
    """Objects of one declared type, as MessagePack."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind

    def encode(self, value: Any) -> bytes:
        return msgspec.msgpack.encode(value)

    def decode(self, data: bytes) -> Any:
        return msgspec.msgpack.decode(data, type=self.kind)


def _state_parameters(id: str, operator: Operator) -> dict[str, Any]:
    """Name -> type of each ``Value[T]`` parameter of ``on_event``."""
    function = type(operator).on_event
    if function is Operator.on_event:
        raise FlowError(
            f"operator '{id}': {type(operator).__name__} does not define on_event.",
            remedy="Write def on_event(self, key, event, state: ps.Value[T], emit).",
            operator=id,
        )
    parameters = list(inspect.signature(function).parameters.values())[1:]
    if len(parameters) < 2:
        raise FlowError(
            f"operator '{id}': on_event must take at least key and event.",
            remedy="Write def on_event(self, key, event, state: ps.Value[T], emit).",
            operator=id,
        )
    try:
        hints = typing.get_type_hints(function)
    except NameError as error:
        raise FlowError(
            f"operator '{id}': an annotation of on_event cannot be resolved: {error}.",
            remedy="Import or define the state's type at module level.",
            operator=id,
        ) from None
    states: dict[str, Any] = {}
    for parameter in parameters[2:]:
        if parameter.name == "emit":
            continue
        hint = hints.get(parameter.name)
        if hint is Value:
            states[parameter.name] = Any
        elif typing.get_origin(hint) is Value:
            states[parameter.name] = typing.get_args(hint)[0]
        else:
            raise FlowError(
                f"operator '{id}': parameter '{parameter.name}' of on_event is neither 'emit' nor a state.",
                remedy="Annotate it, for example state: ps.Value[int].",
                operator=id,
            )
    for name, kind in states.items():
        try:
            msgspec.msgpack.Decoder(Any if isinstance(kind, TypeVar) else kind)
        except TypeError as error:
            raise FlowError(
                f"operator '{id}': state '{name}' of type {kind} cannot be stored: {error}.",
                remedy="Use builtins, a dataclass, a msgspec.Struct, or containers of these.",
                operator=id,
            ) from None
    return states


class Custom(KeyedOperator):
    """Runs a user's ``Operator`` over the keys of a container."""

    def __init__(self, id: str, key: Sequence[str], operator: Operator, schema: pl.Schema, output: pl.Schema) -> None:
        self.id = id
        self.key = tuple(key)
        self.operator = operator
        self.schema = schema
        self.output = output
        self.states = _state_parameters(id, operator)
        names = list(inspect.signature(type(operator).on_event).parameters)[3:]
        self.arguments = tuple(names)

    def table(self) -> TableSpec | None:
        if not self.states:
            return None
        key = pl.Schema({k: self.schema[k] for k in self.key})
        return TableSpec(key, {name: objects(MsgspecCodec(kind)) for name, kind in self.states.items()})

    def prepare(self, frame: pl.DataFrame, from_source: bool) -> Prepared:
        return Prepared(frame)

    def apply(self, table: KeyedTable | None, arrivals: Sequence[Arrival], tick: Tick) -> Applied:
        arrivals = [a for a in arrivals if a.frame.height]
        if not arrivals:
            return Applied(pl.DataFrame(schema=self.output))
        frame = in_order(arrivals)
        hashes = frame[HASH].to_numpy()
        keys = frame.select(self.key)
        first, inverse = unique_keys(hashes, keys)
        cells = {name: Value[Any]() for name in self.states}
        rows = columns = None
        if table is not None:
            rows, _ = table.upsert(hashes[first], keys[first])
            columns = {name: table.column(name) for name in cells}
        out: list[tuple[Any, ...]] = []
        made_by: list[int] = []
        self._run(frame, inverse, len(first), rows, columns, cells, out, made_by, tick.epoch)
        if table is not None and columns is not None and rows is not None:
            emptied = np.ones(len(rows), dtype=bool)
            for column in columns.values():
                emptied &= np.array([value is None for value in column[rows]], dtype=bool)
            if emptied.any():
                table.delete(rows[emptied])
        try:
            result = pl.DataFrame(out, schema=self.output, orient="row")
        except (pl.exceptions.PolarsError, TypeError, OverflowError) as error:
            raise user_code_error(self.id, tick.epoch, out[0] if out else None, error) from error
        return Applied(canonical(result, hashes[first][np.asarray(made_by, dtype=np.int64)]))

    def _run(
        self,
        frame: pl.DataFrame,
        inverse: np.ndarray,
        keys_count: int,
        rows: np.ndarray | None,
        columns: dict[str, np.ndarray] | None,
        cells: dict[str, Value[Any]],
        out: list[tuple[Any, ...]],
        made_by: list[int],
        epoch: int,
    ) -> None:
        names = visible(frame.columns)
        event_type: Any = namedtuple("Event", names, rename=True)  # type: ignore[misc]
        make = event_type._make
        order = np.argsort(inverse, kind="stable")
        bounds = np.searchsorted(inverse[order], np.arange(keys_count + 1))
        events = frame.select(names)[order].rows()
        single = names.index(self.key[0]) if len(self.key) == 1 else None
        positions = [names.index(k) for k in self.key]
        expected = self.output.names()
        width = len(expected)
        group = 0

        def emit(**values: Any) -> None:
            if len(values) != width:
                unknown = [v for v in values if v not in expected]
                missing = [c for c in expected if c not in values]
                raise TypeError(f"emit: missing columns {missing}, unknown columns {unknown}")
            out.append(tuple([values[c] for c in expected]))
            made_by.append(group)

        arguments = {**cells, "emit": emit}
        call: Callable[..., None] = self.operator.on_event
        extra = tuple(arguments[a] for a in self.arguments)
        pairs = [(cells[n], columns[n]) for n in cells] if columns is not None else []
        row_list = rows.tolist() if rows is not None else None
        limits = bounds.tolist()
        for group in range(keys_count):
            begin, end = limits[group], limits[group + 1]
            head = events[begin]
            key = head[single] if single is not None else tuple(head[p] for p in positions)
            if row_list is not None:
                row = row_list[group]
                for cell, column in pairs:
                    cell._value = column[row]
            for event in events[begin:end]:
                try:
                    call(key, make(event), *extra)
                except Exception as error:
                    record = dict(zip(names, event, strict=True))
                    raise user_code_error(self.id, epoch, record, error) from error
            if row_list is not None:
                for cell, column in pairs:
                    column[row] = cell._value

    def fingerprint(self) -> dict[str, Any]:
        return {
            "operator": "custom",
            "key": {k: str(self.schema[k]) for k in self.key},
            "states": {n: _type_name(t) for n, t in self.states.items()},
        }

    def describe(self) -> str:
        return type(self.operator).__name__


def _type_name(kind: Any) -> str:
    if isinstance(kind, types.GenericAlias) or typing.get_origin(kind) is not None:
        return str(kind)
    return str(getattr(kind, "__name__", kind))
