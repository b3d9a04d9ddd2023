"""Events, commands and the controller's own state as JSON, and back to equal objects.

Nothing here knows which events there are: any dataclass, msgspec struct or plain object of this package is written as
the name of its class and its fields, so that an event added tomorrow is in the journal without a line of code here.
JSON has fewer types than Python; what it lacks carries a mark:

    {"!": "StageDone", "now": 1.5, ...}      an object; fields that have their default are left out
    {"()": [1, 2]}                           a tuple (also "set", "frozenset", "deque", "bytes" in base64)
    {"{}": [[1, "a"], [2, "b"]]}             a dictionary whose keys are not all texts
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import importlib
import json
import numbers
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import msgspec

PACKAGE = "penstock."
EVENTS = "control.events."
"""Classes of this module go by their bare names."""
PLANES = ("control.", "state.")
"""Modules whose classes a journal may name."""
MARK = "!"
PLAIN = "~"
"""An object that is no dataclass: its attributes are under this key."""
_MARKS = frozenset({"()", "{}", "set", "frozenset", "deque", "bytes", "enum"})
_SCALARS = frozenset({str, int, float, bool, type(None)})
_MISSING = object()

BY_VERSION = {"RunStage": "routing", "Flush": "routing"}
"""class -> field of which only the version is written. The epoch's log record has the whole of it."""


@dataclasses.dataclass(frozen=True)
class Unknown:
    """An object of a class that this version does not have, or not with these fields."""

    name: str
    fields: dict[str, Any]


# -- to JSON ---------------------------------------------------------------------------------------------------------


def to_json(value: Any) -> Any:
    """``value`` in lists, dictionaries with texts as keys, and scalars. TypeError for what cannot be written."""
    kind = value.__class__
    if kind in _SCALARS:
        return value
    if kind is list:
        return [to_json(v) for v in value]
    if kind is tuple:
        return {"()": [to_json(v) for v in value]}
    if kind is dict:
        return _mapping(value)
    fields = _fields(kind)
    if fields is not None:
        return _object(value, kind, fields)
    return _rarer(value)


def _mapping(value: Mapping[Any, Any]) -> dict[str, Any]:
    plain = all(k.__class__ is str for k in value) and MARK not in value
    if plain and not (len(value) == 1 and next(iter(value)) in _MARKS):
        return {k: to_json(v) for k, v in value.items()}
    return {"{}": [[to_json(k), to_json(v)] for k, v in value.items()]}


def _object(value: Any, kind: type, fields: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    out: dict[str, Any] = {MARK: _name(kind)}
    by_version = BY_VERSION.get(kind.__name__)
    for name, default in fields:
        found = getattr(value, name)
        if name == by_version:
            found = getattr(found, "version", found)
        if found.__class__ is default.__class__ and found == default:
            continue
        out[name] = to_json(found)
    return out


def _rarer(value: Any) -> Any:
    if isinstance(value, Unknown):
        return {MARK: value.name, **value.fields}
    if isinstance(value, bytes | bytearray | memoryview):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, set | frozenset):
        mark = "set" if isinstance(value, set) else "frozenset"
        return {mark: sorted((to_json(v) for v in value), key=json.dumps)}
    if isinstance(value, deque):
        return {"deque": [to_json(v) for v in value]}
    if isinstance(value, Enum):
        return {"enum": [_name(value.__class__), value.name]}
    if isinstance(value, Mapping):
        return _mapping(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if is_plain(value):
        return {MARK: _name(value.__class__), PLAIN: {k: to_json(v) for k, v in attributes(value).items()}}
    raise TypeError(f"the journal cannot write a {type(value).__name__}")


def is_plain(value: Any) -> bool:
    """An object of ours with attributes that is neither a dataclass nor a struct."""
    kind: Any = type(value)
    ours = f"{kind.__module__}.".startswith(PACKAGE)
    return ours and hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value)


def attributes(value: Any) -> dict[str, Any]:
    """An object's own state. What it only refers to (``LINKS`` of its class) belongs to others."""
    links = getattr(type(value), "LINKS", ())
    return {name: found for name, found in vars(value).items() if name not in links}


@functools.cache
def _fields(kind: type) -> tuple[tuple[str, Any], ...] | None:
    """Names and defaults of the fields of a dataclass or struct, else None."""
    if kind is Unknown:
        return None
    if dataclasses.is_dataclass(kind):
        return tuple((f.name, _default(f, dataclasses.MISSING)) for f in dataclasses.fields(kind) if f.init)
    if issubclass(kind, msgspec.Struct):
        return tuple((f.name, _default(f, msgspec.NODEFAULT)) for f in msgspec.structs.fields(kind))
    return None


def _default(field: Any, missing: Any) -> Any:
    if field.default is not missing:
        return field.default
    return field.default_factory() if field.default_factory is not missing else _MISSING


@functools.cache
def _name(kind: type) -> str:
    full = f"{kind.__module__}.{kind.__qualname__}"
    if not full.startswith(PACKAGE):
        raise TypeError(f"the journal cannot write a {full}")
    return full.removeprefix(PACKAGE).removeprefix(EVENTS)


# -- from JSON -------------------------------------------------------------------------------------------------------


def from_json(value: Any) -> Any:
    """The object that ``to_json`` made this of; a routing table that is written elsewhere stays its version."""
    kind = value.__class__
    if kind in _SCALARS:
        return value
    if kind is list:
        return [from_json(v) for v in value]
    if MARK in value:
        return _made(value)
    if len(value) == 1:
        ((mark, inner),) = value.items()
        if mark in _MARKS:
            return _UNMARKED[mark](inner)
    return {k: from_json(v) for k, v in value.items()}


def _made(value: dict[str, Any]) -> Any:
    name = value[MARK]
    fields = {k: from_json(v) for k, v in value.items() if k != MARK}
    kind = _class(name)
    if kind is None:
        return Unknown(name, fields)
    if PLAIN in fields:
        made = object.__new__(kind)
        made.__dict__.update(fields[PLAIN])
        return made
    try:
        return kind(**fields)
    except (TypeError, ValueError):
        return Unknown(name, fields)


@functools.cache
def _class(name: str) -> Any:
    """The class of ours with this name; None if there is none. A journal may have been changed by somebody: it names
    only data of the pure planes, whose making does nothing."""
    module, _, short = (name if "." in name else EVENTS + name).rpartition(".")
    if not f"{module}.".startswith(PLANES):
        return None
    try:
        found = getattr(importlib.import_module(PACKAGE + module), short, None)
    except ImportError:
        return None
    ours = isinstance(found, type) and found.__module__ == PACKAGE + module
    return found if ours else None


def _enum(inner: list[str]) -> Any:
    kind = _class(inner[0])
    return kind[inner[1]] if kind is not None else Unknown(inner[0], {"name": inner[1]})


_UNMARKED: dict[str, Callable[[Any], Any]] = {
    "()": lambda inner: tuple(from_json(v) for v in inner),
    "{}": lambda inner: {from_json(k): from_json(v) for k, v in inner},
    "set": lambda inner: {from_json(v) for v in inner},
    "frozenset": lambda inner: frozenset(from_json(v) for v in inner),
    "deque": lambda inner: deque(from_json(v) for v in inner),
    "bytes": base64.b64decode,
    "enum": _enum,
}


# -- copies ----------------------------------------------------------------------------------------------------------


def settled(value: Any) -> Any:
    """A copy that later steps of the controller cannot change. What is frozen, and reports of tasks, are values."""
    kind = value.__class__
    if kind in _SCALARS:
        return value
    if kind is dict:
        return {k: settled(v) for k, v in value.items()}
    if kind in (list, tuple, set, frozenset, deque):
        return kind(settled(v) for v in value)
    if dataclasses.is_dataclass(kind):
        return value if vars(kind)["__dataclass_params__"].frozen else _copied(value)
    return _copied(value) if is_plain(value) and not isinstance(value, msgspec.Struct | Enum) else value


def _copied(value: Any) -> Any:
    made = object.__new__(type(value))
    made.__dict__.update({k: settled(v) for k, v in attributes(value).items()})
    return made


__all__ = ["Unknown", "attributes", "from_json", "settled", "to_json"]
