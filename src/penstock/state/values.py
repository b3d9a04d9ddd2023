"""Plain Python values as bytes that can be read without running anything.

A checkpoint lies where others may be able to write. Pickle runs what it is told to run when it is read, so nothing that
is kept is ever pickled. MessagePack holds None, booleans, numbers, text, bytes, lists and dictionaries; the plain types
beyond those are extensions of it with codes of ours. What is read back is what was written, its types included. The
codes are part of the checkpoint's format.
"""

from __future__ import annotations

import datetime as dt
import zoneinfo
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import msgspec
import numpy as np

_INT_MIN, _INT_MAX = -(2**63), 2**64 - 1
_LARGE, _DECIMAL, _TUPLE, _SET, _FROZENSET, _DICT, _DATETIME, _DATE, _TIME, _TIMEDELTA, _NUMPY = range(1, 12)
_NUMPY_KINDS = "biufcmM"
DEPTH_MAX = 200
"""Lists within lists. More would end in Python's own limit, with the value half read."""

_pack = msgspec.msgpack.Encoder().encode


class NotPlain(ValueError):
    """A value of a type that is not kept, or bytes that are no value."""


def encode_value(value: Any) -> bytes:
    """The value as bytes. NotPlain for a type that cannot come back."""
    return _pack(_outwards(value, DEPTH_MAX))


def decode_value(data: bytes) -> Any:
    """The value that ``encode_value`` was given. NotPlain for anything else."""
    try:
        return _unpack(data)
    except (msgspec.MsgspecError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        raise NotPlain(f"these bytes are no value: {error}") from error


class ValueCodec:
    """Any plain value of an object column."""

    def encode(self, value: Any) -> bytes:
        return encode_value(value)

    def decode(self, data: bytes) -> Any:
        return decode_value(data)


VALUES = ValueCodec()


# -- to bytes --------------------------------------------------------------------------------------------------------


def _outwards(value: Any, depth: int) -> Any:
    """The value in what MessagePack has, with extensions for the rest."""
    kind = value.__class__
    if value is None or kind in (bool, float, str, bytes):
        return value
    if kind is int:
        return value if _INT_MIN <= value <= _INT_MAX else _extension(_LARGE, str(value).encode())
    if depth <= 0:
        raise NotPlain(f"a value is nested more than {DEPTH_MAX} deep")
    if kind is list:
        return [_outwards(v, depth - 1) for v in value]
    if kind is dict and all(k.__class__ is str for k in value):
        return {k: _outwards(v, depth - 1) for k, v in value.items()}
    return _rarer(value, depth - 1)


def _rarer(value: Any, depth: int) -> msgspec.msgpack.Ext:
    kind = value.__class__
    if kind in _COLLECTIONS:
        return _extension(_COLLECTIONS[kind], _pack([_outwards(v, depth) for v in value]))
    if kind is dict:
        return _extension(_DICT, _pack([[_outwards(k, depth), _outwards(v, depth)] for k, v in value.items()]))
    if kind is Decimal:
        return _extension(_DECIMAL, str(value).encode())
    if kind is dt.timedelta:
        return _extension(_TIMEDELTA, _pack([value.days, value.seconds, value.microseconds]))
    if kind is dt.date:
        return _extension(_DATE, value.isoformat().encode())
    if kind in _CLOCKS:
        return _extension(_CLOCKS[kind], _pack(_clock(value)))
    if isinstance(value, np.generic) and value.dtype.kind in _NUMPY_KINDS:
        return _extension(_NUMPY, value.dtype.str.encode() + b" " + value.tobytes())
    raise NotPlain(f"a {kind.__module__}.{kind.__qualname__} is no plain value")


def _clock(value: Any) -> list[Any]:
    """A datetime or time without its zone, which of two equal hours it is, and the zone's name or what it is off."""
    zone = value.tzinfo
    if isinstance(zone, zoneinfo.ZoneInfo) and zone.key is not None:
        kept: Any = zone.key
    elif isinstance(zone, dt.timezone):
        kept = zone.utcoffset(None) // _MICROSECOND
    elif zone is None:
        kept = None
    else:
        raise NotPlain(f"a {value.__class__.__name__} in the zone {zone} cannot be kept: turn it into UTC")
    return [value.replace(tzinfo=None, fold=0).isoformat(), value.fold, kept]


def _extension(code: int, data: bytes) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, data)


_COLLECTIONS: dict[type, int] = {tuple: _TUPLE, set: _SET, frozenset: _FROZENSET}
_CLOCKS: dict[type, int] = {dt.datetime: _DATETIME, dt.time: _TIME}
_MICROSECOND = dt.timedelta(microseconds=1)


# -- from bytes ------------------------------------------------------------------------------------------------------


def _inwards(code: int, data: memoryview) -> Any:
    read = _READERS.get(code)
    if read is None:
        raise NotPlain(f"there is no extension {code}")
    return read(bytes(data))


def _numpy(data: bytes) -> Any:
    name, _, raw = data.partition(b" ")
    dtype = np.dtype(name.decode())
    if dtype.kind not in _NUMPY_KINDS or len(raw) != dtype.itemsize:
        raise NotPlain("there is no such number")
    return np.frombuffer(raw, dtype=dtype)[0]


def _at(kind: Any) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        text, fold, kept = _unpack(data)
        zone: dt.tzinfo | None = None
        if isinstance(kept, str):
            zone = zoneinfo.ZoneInfo(kept)
        elif kept is not None:
            zone = dt.timezone(kept * _MICROSECOND)
        return kind.fromisoformat(text).replace(tzinfo=zone, fold=fold)

    return read


_unpack: Callable[[bytes], Any] = msgspec.msgpack.Decoder(ext_hook=_inwards).decode
_READERS: dict[int, Callable[[bytes], Any]] = {
    _LARGE: lambda data: int(data.decode()),
    _DECIMAL: lambda data: Decimal(data.decode()),
    _TUPLE: lambda data: tuple(_unpack(data)),
    _SET: lambda data: set(_unpack(data)),
    _FROZENSET: lambda data: frozenset(_unpack(data)),
    _DICT: lambda data: dict(_unpack(data)),
    _DATETIME: _at(dt.datetime),
    _DATE: lambda data: dt.date.fromisoformat(data.decode()),
    _TIME: _at(dt.time),
    _TIMEDELTA: lambda data: dt.timedelta(*_unpack(data)),
    _NUMPY: _numpy,
}

__all__ = ["DEPTH_MAX", "VALUES", "NotPlain", "ValueCodec", "decode_value", "encode_value"]
