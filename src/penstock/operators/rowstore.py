"""Whole rows of a stream, of any polars types, as columns of a :class:`KeyedTable`.

Joins and rankings keep the rows they were given. A table's columns are numpy arrays, which have no null, or Python
objects, which cost a call each when they are written to a checkpoint. So everything that is a number underneath
(integers, floats, booleans, dates and times) lies in a numpy column beside a column that says where it is *absent*;
text, bytes and nested values are objects with a codec. What is read back is what was written, to the last bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import polars as pl

from penstock.state.table import KeyedTable, ObjectCodec, ValueType, numeric, objects
from penstock.state.values import VALUES

ABSENT = "__absent_"
"""Prefix of the column that says where a column of numbers is null."""


class TextCodec:
    """Text as UTF-8: the fastest there is, and readable in a dump of the state."""

    def encode(self, value: str) -> bytes:
        return value.encode()

    def decode(self, data: bytes) -> str:
        return data.decode()


class BytesCodec:
    """Bytes as they are."""

    def encode(self, value: bytes) -> bytes:
        return value

    def decode(self, data: bytes) -> bytes:
        return bytes(data)


TEXT = TextCodec()
BYTES = BytesCodec()

_NARROW = (pl.Int8, pl.Int16, pl.Int32, pl.Int64, pl.UInt8, pl.UInt16, pl.UInt32)
_AS_THEY_ARE: tuple[tuple[type[pl.DataType], Any], ...] = (
    (pl.UInt64, np.uint64),
    (pl.Float32, np.float32),
    (pl.Float64, np.float64),
    (pl.Boolean, np.bool_),
)


def value_type(dtype: pl.DataType) -> ValueType:
    """How values of a polars type are kept in a table."""
    if dtype in _NARROW or dtype.is_temporal():
        return numeric(np.int64, 0)
    for kind, array in _AS_THEY_ARE:
        if dtype == kind:
            return numeric(array, 0)
    codec: ObjectCodec = VALUES
    if dtype == pl.String:
        codec = TEXT
    elif dtype == pl.Binary:
        codec = BYTES
    return objects(codec)


def stored_as(columns: Iterable[ValueType]) -> dict[str, str]:
    """For a stage's fingerprint: how nested values and decimals are kept, if there are any. They once were pickled,
    and a state that is read must not be able to run anything."""
    return {"values": "plain"} if any(c.codec is VALUES for c in columns) else {}


class RowStore:
    """Where the columns of a schema lie in a table.

    ``shared``: columns are named after their kind and number ("the second of the floats") and not after the column.
    Two streams whose rows lie in one table then use the same arrays, and neither pays for the columns of the other.
    """

    def __init__(self, schema: pl.Schema, *, shared: bool = False) -> None:
        self.schema = schema
        self.values: dict[str, ValueType] = {}
        self._places: list[tuple[str, pl.DataType, str, str | None]] = []
        used: Counter[str] = Counter()
        for name, dtype in schema.items():
            kept = value_type(dtype)
            place = name
            if shared:
                kind = type(kept.codec).__name__ if kept.codec else kept.dtype.name
                place = f"__{kind}_{used[kind]}"
                used[kind] += 1
            self.values[place] = kept
            absent = None if kept.codec else ABSENT + place
            if absent is not None:
                self.values[absent] = numeric(np.bool_, False)
            self._places.append((name, dtype, place, absent))

    def write(self, table: KeyedTable, rows: np.ndarray, frame: pl.DataFrame) -> None:
        """Keep a frame's rows in rows of the table that were just upserted or touched."""
        for name, dtype, place, absent in self._places:
            values = frame[name]
            column = table.column(place)
            if absent is None:
                column[rows] = as_objects(values)
                continue
            nulls = values.null_count()
            physical = values.to_physical() if dtype.is_temporal() else values
            if nulls:
                physical = physical.fill_null(False if dtype == pl.Boolean else 0)
                table.column(absent)[rows] = values.is_null().to_numpy()
            else:
                table.column(absent)[rows] = False
            column[rows] = physical.to_numpy()

    def read(self, table: KeyedTable, rows: np.ndarray) -> list[pl.Series]:
        """The columns as they were written, in the order of the schema."""
        return [self._stored(table, *place, rows) for place in self._places]

    def _stored(
        self, table: KeyedTable, name: str, dtype: pl.DataType, place: str, absent: str | None, rows: np.ndarray
    ) -> pl.Series:
        column = table.column(place)
        if absent is None:
            return from_objects(name, column[rows].tolist(), dtype)
        values = pl.Series(name, column[rows]).cast(dtype)
        missing = table.column(absent)[rows]
        return values.set(pl.Series(missing), None) if missing.any() else values


def as_objects(values: pl.Series) -> np.ndarray:
    """An array of Python objects. Nested values go as what they are underneath: Python's own times lose nanoseconds."""
    out = np.empty(len(values), dtype=object)
    out[:] = (values.to_physical() if values.dtype.is_nested() else values).to_list()
    return out


def from_objects(name: str, values: list[Any], dtype: pl.DataType) -> pl.Series:
    if dtype.is_nested():
        physical = pl.Series(name, [], dtype=dtype).to_physical().dtype
        return pl.Series(name, values, dtype=physical).cast(dtype)
    return pl.Series(name, values, dtype=dtype)


__all__ = ["ABSENT", "BYTES", "TEXT", "RowStore", "as_objects", "from_objects", "stored_as", "value_type"]
