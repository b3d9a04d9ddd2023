"""How the states of the library lie in a table: from an annotation to columns, and from columns to Python and back.

Two layouts. Any type that msgspec knows is one column of objects, encoded when an undo log or a checkpoint needs them.
A value of numbers is numpy columns: nothing is ever encoded, and objects exist only while an epoch has the key at hand.

What is stored must be of the type that was declared. A restore can only give that type back, and an operator must not
be able to tell that there was one; so anything else is refused when it is stored, not found out after a failure.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import msgspec
import numpy as np

from penstock.errors import FlowError, UserCodeError
from penstock.operators.statelib import (
    Cell,
    CountWindow,
    Expires,
    ExpiringValue,
    Keep,
    List,
    Map,
    Queue,
    Time,
    TimeWindow,
    Value,
)
from penstock.state.table import KeyedTable, ValueType, numeric, objects


def _refuse(value: Any) -> Any:
    raise UserCodeError(
        f"a state holds a {type(value).__name__}, which cannot be stored: {value!r:.100}.",
        remedy="Keep builtins, dataclasses, msgspec.Structs, datetimes, or containers of these; nothing of this epoch "
        "was written.",
        cause=f"cannot store {type(value).__name__}",
    )


class MsgspecCodec:
    """Objects of one declared type, as MessagePack; with a form to put them into before and after, where needed."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]

    def __init__(
        self, kind: Any, outwards: Callable[[Any], Any] | None = None, inwards: Callable[[Any], Any] | None = None
    ) -> None:
        encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder(enc_hook=_refuse).encode
        decode: Callable[[bytes], Any] = msgspec.msgpack.Decoder(kind).decode
        self.encode = encode if outwards is None else lambda value: encode(outwards(value))
        self.decode = decode if inwards is None else lambda data: inwards(decode(data))


def _dues_out(value: tuple[dict[Any, Any], dict[Any, int]]) -> tuple[dict[Any, Any], list[int]]:
    return value[0], [value[1][k] for k in value[0]]


def _dues_in(value: tuple[dict[Any, Any], list[int]]) -> tuple[dict[Any, Any], dict[Any, int]]:
    return value[0], dict(zip(value[0], value[1], strict=True))


_STRUCTURES: tuple[type[Cell], ...] = (Value, Map, List, Queue, CountWindow, TimeWindow)
_NUMBERS: dict[Any, tuple[Any, Any]] = {int: (np.int64, 0), float: (np.float64, 0.0), bool: (np.bool_, False)}
_FITS: dict[Any, tuple[type, ...]] = {
    int: (int, np.integer),
    float: (float, int, np.floating, np.integer),
    bool: (bool, np.bool_),
}


class StateError(ValueError):
    """A value that cannot be stored as declared."""


@dataclasses.dataclass(frozen=True)
class StateSpec:
    """One declared state: its structure, the types in it, and how long it lives."""

    name: str
    structure: type[Cell]
    arguments: tuple[Any, ...]
    keep: Keep | None = None
    expires: Expires | None = None

    @property
    def column(self) -> str:
        return f"__s.{self.name}"

    @property
    def due_column(self) -> str:
        return f"__due.{self.name}"

    def cell(self, time: Time) -> Cell:
        cell = ExpiringValue[Any]() if self.structure is Value and self.expires else self.structure()
        cell._set_up(time, self.expires.after_us if self.expires else 0, self.keep)
        return cell

    def stored_type(self) -> Any:
        """What msgspec encodes."""
        a = self.arguments
        if self.structure is Value:
            return a[0]
        if self.structure is Map:
            plain = dict[a[0], a[1]]  # type: ignore[valid-type]
            return tuple[plain, list[int]] if self.expires else plain
        if self.structure is TimeWindow:
            return tuple[list[int], list[a[0]]]  # type: ignore[valid-type]
        return list[a[0]]  # type: ignore[valid-type]

    def codec(self) -> MsgspecCodec:
        if self.structure is Map and self.expires:
            return MsgspecCodec(self.stored_type(), _dues_out, _dues_in)
        if self.structure in (Queue, CountWindow):
            return MsgspecCodec(self.stored_type(), list, deque)
        return MsgspecCodec(self.stored_type())

    def layout(self) -> Layout:
        fields = number_fields(self.arguments[0]) if self.structure is Value else None
        return NumberColumns(self, fields) if fields else ObjectColumn(self)

    def fingerprint(self) -> list[Any]:
        kind = "" if self.structure is Value else self.structure.__name__
        return [kind, *(type_name(a) for a in self.arguments), *self.layout().fingerprint(), bool(self.expires)]


class Layout:
    """The columns of a state in the table, and the way of its values into Python and back."""

    def __init__(self, spec: StateSpec) -> None:
        self.spec = spec

    def columns(self) -> dict[str, ValueType]:
        raise NotImplementedError

    def load(self, table: KeyedTable, rows: np.ndarray) -> list[Any]:
        """The value of each row; None: it has none."""
        raise NotImplementedError

    def store(self, table: KeyedTable, rows: np.ndarray, values: list[Any]) -> np.ndarray:
        """The way back; gives which rows have a value."""
        raise NotImplementedError

    def fingerprint(self) -> list[Any]:
        return []


class ObjectColumn(Layout):
    """Any type that msgspec knows, one object for each key."""

    def columns(self) -> dict[str, ValueType]:
        return {self.spec.column: objects(self.spec.codec())}

    def load(self, table: KeyedTable, rows: np.ndarray) -> list[Any]:
        loaded: list[Any] = table.column(self.spec.column)[rows].tolist()
        return loaded

    def store(self, table: KeyedTable, rows: np.ndarray, values: list[Any]) -> np.ndarray:
        kind = self.spec.arguments[0]
        exact = typing.get_origin(kind) or kind
        if self.spec.structure is Value and isinstance(exact, type) and exact is not object:
            check_types(self.spec, values, exact)
        table.column(self.spec.column)[rows] = np.fromiter(values, dtype=object, count=len(values))
        return np.fromiter((v is not None for v in values), dtype=np.bool_, count=len(values))


def check_types(spec: StateSpec, values: list[Any], kind: type) -> None:
    wrong = set(map(type, values)) - {kind, type(None)}
    if wrong:
        found = next(v for v in values if type(v) in wrong)
        raise StateError(
            f"state '{spec.name}' is declared as {type_name(spec.arguments[0])} and was set to a "
            f"{type(found).__name__}: {found!r}"
        )


class NumberColumns(Layout):
    """A value of numbers: one numpy column for each field, and one that says whether there is a value."""

    def __init__(self, spec: StateSpec, fields: dict[str, tuple[Any, Any]]) -> None:
        super().__init__(spec)
        self.fields = fields
        self.names = {field: f"{spec.column}.{field}" if field else spec.column for field in fields}
        self.present = f"{spec.column}?"
        self.kind = spec.arguments[0]

    def columns(self) -> dict[str, ValueType]:
        # A field that an older checkpoint does not have gets its default, as msgspec would give it.
        values = {self.names[f]: numeric(_NUMBERS[t][0], default) for f, (t, default) in self.fields.items()}
        return {**values, self.present: numeric(np.bool_, False)}

    def load(self, table: KeyedTable, rows: np.ndarray) -> list[Any]:
        lists = [table.column(name)[rows].tolist() for name in self.names.values()]
        values: list[Any] = lists[0] if "" in self.names else list(map(self.kind, *lists))
        present = table.column(self.present)[rows]
        if not present.all():
            for i in np.flatnonzero(~present).tolist():
                values[i] = None
        return values

    def store(self, table: KeyedTable, rows: np.ndarray, values: list[Any]) -> np.ndarray:
        present = np.ones(len(values), dtype=np.bool_)
        if None in values if "" in self.names else any(v is None for v in values):
            present = np.fromiter((v is not None for v in values), dtype=np.bool_, count=len(values))
            absent = rows[~present]
            for field, (_, default) in self.fields.items():
                table.column(self.names[field])[absent] = default
            rows_set, values = rows[present], [v for v in values if v is not None]
        else:
            rows_set = rows
        table.column(self.present)[rows] = present
        if "" not in self.names:
            check_types(self.spec, values, self.kind)
        for field, (kind, _) in self.fields.items():
            numbers = list(map(attrgetter(field), values)) if field else values
            table.column(self.names[field])[rows_set] = self._array(field, kind, numbers)
        return present

    def _array(self, field: str, kind: Any, numbers: list[Any]) -> np.ndarray:
        what = f"field '{field}' of state '{self.spec.name}'" if field else f"state '{self.spec.name}'"
        for found in set(map(type, numbers)):
            if not issubclass(found, _FITS[kind]):
                value = next(n for n in numbers if type(n) is found)
                raise StateError(f"{what} is declared as {kind.__name__} and was set to {value!r}")
        try:
            return np.array(numbers, dtype=_NUMBERS[kind][0])
        except OverflowError:
            value = max(numbers, key=abs)
            raise StateError(
                f"{what} was set to {value}, which does not fit in 64 bits with a sign (declare it "
                f"'{kind.__name__} | str' and set it to a text)"
            ) from None

    def fingerprint(self) -> list[Any]:
        return ["columns"]


def number_fields(kind: Any) -> dict[str, tuple[Any, Any]] | None:
    """Field -> (type, default) if all fields are int, float or bool and the class only holds them; else None.

    A bare float or bool counts as one field without a name. A bare int does not: it may have 64 bits without a sign.
    """
    if kind is float or kind is bool:
        return {"": (kind, _NUMBERS[kind][1])}
    if not isinstance(kind, type) or hasattr(kind, "__post_init__"):
        return None
    if dataclasses.is_dataclass(kind):
        fields = [(f.name, f.default) for f in dataclasses.fields(kind)]
    elif issubclass(kind, msgspec.Struct):
        fields = [(f.name, f.default) for f in msgspec.structs.fields(kind)]
    else:
        return None
    try:
        hints = typing.get_type_hints(kind)
        parameters = inspect.signature(kind).parameters.values()
    except (NameError, TypeError, ValueError):
        return None
    if not fields or [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] != [n for n, _ in fields]:
        return None
    if any(hints.get(name) not in _NUMBERS for name, _ in fields):
        return None
    return {
        name: (hints[name], default if isinstance(default, int | float) else _NUMBERS[hints[name]][1])
        for name, default in fields
    }


def type_name(kind: Any) -> str:
    if typing.get_origin(kind) is not None:
        return str(kind)
    return str(getattr(kind, "__name__", kind))


# -- reading annotations ---------------------------------------------------------------------------------------------


def is_state(hint: Any) -> bool:
    """True for an annotation that declares a state."""
    if typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    return hint in _STRUCTURES or typing.get_origin(hint) in _STRUCTURES


def declared(operator: str, name: str, hint: Any, timed: bool) -> StateSpec:
    """The state that an annotation declares. Anything wrong with it is a FlowError naming the operator."""
    extras: Sequence[Any] = ()
    if typing.get_origin(hint) is typing.Annotated:
        hint, *extras = typing.get_args(hint)
    structure = typing.get_origin(hint) or hint
    width = 2 if structure is Map else 1
    arguments = tuple(Any if isinstance(a, TypeVar) else a for a in typing.get_args(hint)) or (Any,) * width
    kept = next((e for e in extras if isinstance(e, Keep)), None)
    expiry = next((e for e in extras if isinstance(e, Expires)), None)
    where = f"operator '{operator}': state '{name}'"
    if structure is CountWindow and (kept is None or kept.count is None):
        raise FlowError(
            f"{where} does not say how many values it keeps.",
            remedy="Write Annotated[ps.CountWindow[float], ps.keep(10)].",
            operator=operator,
        )
    if structure is TimeWindow and (kept is None or kept.span_us is None):
        raise FlowError(
            f"{where} does not say how long it keeps values.",
            remedy='Write Annotated[ps.TimeWindow[float], ps.keep("10m")].',
            operator=operator,
        )
    if kept is not None and structure not in (CountWindow, TimeWindow):
        raise FlowError(
            f"{where}: ps.keep is for windows, not for a {structure.__name__}.",
            remedy="Use ps.CountWindow or ps.TimeWindow, or ps.expires(...) to forget what is old.",
            operator=operator,
        )
    if expiry is not None and not timed:
        raise FlowError(
            f"{where} expires, but the operator has no event time.",
            remedy="Say which column is the time: process(..., on='ts').",
            operator=operator,
        )
    spec = StateSpec(name, structure, arguments, kept, expiry)
    try:
        spec.codec()
    except (TypeError, RuntimeError) as error:
        raise FlowError(
            f"{where} of type {', '.join(map(str, arguments))} cannot be stored: {error}.",
            remedy="Use builtins, a dataclass, a msgspec.Struct, or containers of these.",
            operator=operator,
        ) from None
    return spec


__all__ = [
    "Layout",
    "MsgspecCodec",
    "StateError",
    "StateSpec",
    "declared",
    "is_state",
    "number_fields",
    "type_name",
]
