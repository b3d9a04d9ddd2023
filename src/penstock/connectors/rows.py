"""From raw input to typed rows: schemas, text to values, and records that do not fit.

Every source that meets text or foreign rows needs the same three things: a schema the user can write down easily, a
way to turn strings into that schema at full speed, and an honest account of the values that would not go. They are
here once.

**A row's fate may not depend on its neighbours.** A range is replayed under another parallelism after a rescale, so
the row must come out the same whichever rows share its split. So nothing here infers a format from the data, and the
slow paths halve the batch and call the very same function as the fast one.
"""

from __future__ import annotations

import datetime as dt
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

import numpy as np
import polars as pl
import pyarrow as pa

from penstock.connectors.base import BadRecord
from penstock.errors import FlowError

RAW_CHARS_MAX = 500

TimeUnit = Literal["ns", "us", "ms"]

SchemaSpec = pl.Schema | Mapping[str, Any]

_PYTHON_TYPES: dict[type, pl.DataType] = {
    int: pl.Int64(),
    float: pl.Float64(),
    str: pl.String(),
    bool: pl.Boolean(),
    bytes: pl.Binary(),
    dt.datetime: pl.Datetime("us"),
    dt.date: pl.Date(),
    dt.time: pl.Time(),
    dt.timedelta: pl.Duration("us"),
}


def polars_schema(spec: SchemaSpec) -> pl.Schema:
    """A schema from what users write: ``{"word": str, "n": pl.Int32, "at": datetime, "tags": list[str]}``."""
    if not isinstance(spec, Mapping):
        raise FlowError(
            f"A schema must map column names to types, not be a {type(spec).__name__}.",
            remedy='Write for example {"word": str, "ts": pl.Datetime("us")}.',
        )
    if not spec:
        raise FlowError("A schema needs at least one column.", remedy='Write for example {"word": str}.')
    return pl.Schema({_column_name(name): polars_dtype(kind, name) for name, kind in spec.items()})


def polars_dtype(kind: Any, column: str) -> pl.DataType:
    if isinstance(kind, pl.DataType):
        return kind
    if isinstance(kind, type) and not isinstance(kind, types.GenericAlias):
        if issubclass(kind, pl.DataType):
            try:
                return pl.Datetime("us") if kind is pl.Datetime else kind()
            except TypeError:
                raise FlowError(
                    f"Column {column!r}: the type {kind.__name__} needs arguments.",
                    remedy="Write for example pl.List(pl.Int64) instead of pl.List.",
                ) from None
        if kind in _PYTHON_TYPES:
            return _PYTHON_TYPES[kind]
    if get_origin(kind) is list and len(get_args(kind)) == 1:
        return pl.List(polars_dtype(get_args(kind)[0], column))
    known = ", ".join(sorted(t.__name__ for t in _PYTHON_TYPES))
    raise FlowError(
        f"Column {column!r}: {kind!r} is not a type Penstock knows.",
        remedy=f"Use a polars type such as pl.Int64, one of {known}, or list[...] of them.",
        column=column,
    )


def _column_name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise FlowError(f"A column name must be a non-empty string, not {name!r}.", remedy="Rename the column.")
    return name


def bad_records_frame(bad: Sequence[BadRecord]) -> pl.DataFrame:
    """Dead letters as a table: ``source``, ``offset``, ``reason``, ``raw``."""
    columns = ("source", "offset", "reason", "raw")
    return pl.DataFrame(
        {c: [getattr(b, c) for b in bad] for c in columns},
        schema=dict.fromkeys(columns, pl.String),
    )


def clip(raw: bytes | str) -> str:
    """The part of a bad record that its dead letter shows."""
    if isinstance(raw, bytes):
        raw = raw[: RAW_CHARS_MAX * 4].decode("utf-8", errors="replace")
    return raw[:RAW_CHARS_MAX]


# ---------------------------------------------------------------- strings to values

_BOOLEANS = {"true": True, "false": False, "1": True, "0": False}
_DATETIMES = ("%Y-%m-%d %H:%M:%S%.f", "%Y-%m-%d %H:%M")


def parsable(dtype: pl.DataType) -> bool:
    """Can a string become this type? (Nested types and bytes cannot; they are for jsonl and Parquet.)"""
    return dtype.is_numeric() or isinstance(
        dtype, pl.String | pl.Boolean | pl.Date | pl.Datetime | pl.Time | pl.Categorical | pl.Enum | pl.Null
    )


def parse_strings(frame: pl.DataFrame, schema: pl.Schema) -> tuple[pl.DataFrame, list[tuple[int, str]]]:
    """Parse String columns to ``schema``. Returns the rows that parsed, and ``(row number, reason)`` for the
    other rows.

    Null stays null. Dates and times are ISO 8601 only: a format guessed from the data would depend on the split.
    """
    columns: list[pl.Series] = []
    failed: dict[int, str] = {}
    for name, dtype in schema.items():
        text = frame.get_column(name)
        if text.dtype == dtype:
            columns.append(text)
            continue
        value = _parse_column(text, dtype)
        columns.append(value)
        if value.null_count() > text.null_count():
            # A quoted empty field is no number, but no error either.
            rows = (value.is_null() & (text.str.strip_chars().str.len_bytes() > 0)).arg_true()
            for row, raw in zip(rows.to_list(), text.gather(rows).to_list(), strict=True):
                failed.setdefault(row, f"column {name!r}: {clip(raw)[:80]!r} is not a {dtype}")
        if dtype.is_float() and (endless := value.is_infinite()).any():
            rows = (endless & ~text.str.to_lowercase().str.contains("inf", literal=True)).arg_true()
            for row, raw in zip(rows.to_list(), text.gather(rows).to_list(), strict=True):
                failed.setdefault(row, f"column {name!r}: {clip(raw)[:80]!r} is too large for a {dtype}")
    parsed = pl.DataFrame(columns)
    if failed:
        keep = pl.Series([True]).new_from_index(0, parsed.height).scatter(sorted(failed), False)
        parsed = parsed.filter(keep)
    return parsed, sorted(failed.items())


def _parse_column(text: pl.Series, dtype: pl.DataType) -> pl.Series:
    if isinstance(dtype, pl.String):
        return text
    if isinstance(dtype, pl.Categorical | pl.Enum):
        return text.cast(dtype, strict=False)
    if isinstance(dtype, pl.Datetime):
        return _parse_datetimes(text, dtype)
    text = text.str.strip_chars()
    if isinstance(dtype, pl.Boolean):
        return text.str.to_lowercase().replace_strict(_BOOLEANS, default=None, return_dtype=pl.Boolean)
    if isinstance(dtype, pl.Date):
        return text.str.to_date("%Y-%m-%d", strict=False)
    if isinstance(dtype, pl.Time):
        return text.str.to_time("%H:%M:%S%.f", strict=False)
    return text.cast(dtype, strict=False)


def _parse_datetimes(text: pl.Series, dtype: pl.Datetime) -> pl.Series:
    """ISO 8601 with ``T`` or a blank, fractions optional, or a date alone. A column without a zone takes a ``Z`` too
    and drops it; one with a zone takes offsets, and reads values without one as UTC."""
    unit = dtype.time_unit
    value = _uniform_datetimes(text, unit)
    if value is not None and dtype.time_zone is None:
        return value
    text = text.str.strip_chars()
    plain = text.str.replace("T", " ", literal=True).str.strip_suffix("Z")

    def more(value: pl.Series, attempt: Callable[[], pl.Series]) -> pl.Series:
        # The later formats cost time only where the earlier ones left a hole.
        return (
            value if value.null_count() == text.null_count() else pl.select(pl.coalesce(value, attempt())).to_series()
        )

    if value is None:
        value = plain.str.to_datetime(_DATETIMES[0], time_unit=unit, strict=False)
    value = more(value, lambda: plain.str.to_datetime(_DATETIMES[1], time_unit=unit, strict=False))
    value = more(value, lambda: plain.str.to_date("%Y-%m-%d", strict=False).cast(pl.Datetime(unit)))
    if dtype.time_zone is not None:
        value = value.dt.replace_time_zone("UTC")

        def with_offset() -> pl.Series:
            found = plain.str.to_datetime("%Y-%m-%d %H:%M:%S%.f%z", time_unit=unit, time_zone="UTC", strict=False)
            return found.dt.convert_time_zone("UTC")

        value = more(value, with_offset).dt.convert_time_zone(dtype.time_zone)
    return value.alias(text.name)


def _uniform_datetimes(text: pl.Series, unit: TimeUnit) -> pl.Series | None:
    """``YYYY-MM-DD hh:mm:ss`` (or with a ``T``, or a ``Z`` behind) with 0, 3 or 6 decimals, all of one width, by
    arithmetic on the digits: several times as fast as a parser. None for anything else; the parser then gives the
    same for what would have passed here.
    """
    size = len(text)
    if size == 0 or text.null_count() or unit == "ns":
        return None
    widths = text.str.len_bytes()
    width = int(widths[0])
    if width not in (19, 20, 23, 24, 26, 27) or not (widths == width).all():
        return None
    _, offsets, data = text.to_arrow(compat_level=pl.CompatLevel.oldest()).cast(pa.large_string()).buffers()
    first = int(np.frombuffer(offsets, np.int64, 1)[0])
    letters = np.ascontiguousarray(np.frombuffer(data, np.uint8, size * width, first).reshape(size, width).T)
    zulu = width in (20, 24, 27)
    marks = {4: "-", 7: "-", 13: ":", 16: ":"} | ({width - 1: "Z"} if zulu else {}) | ({19: "."} if width > 20 else {})
    if not all((letters[place] == ord(mark)).all() for place, mark in marks.items()):
        return None
    if not ((letters[10] == ord(" ")) | (letters[10] == ord("T"))).all():
        return None
    digits = letters - np.uint8(ord("0"))  # what is no digit wraps round to more than 9
    places = [p for p in range(width) if p not in marks and p != 10]
    if any(digits[p].max() > 9 for p in places):
        return None

    def number(start: int, stop: int) -> np.ndarray[Any, Any]:
        total: np.ndarray[Any, Any] = digits[start].astype(np.int32)
        for place in range(start + 1, stop):
            total *= 10
            total += digits[place]
        return total

    year, month, day = number(0, 4), number(5, 7), number(8, 10)
    hour, minute, second = number(11, 13), number(14, 16), number(17, 19)
    if month.min() < 1 or month.max() > 12 or year.min() < 1 or hour.max() > 23 or max(minute.max(), second.max()) > 59:
        return None
    month_number = (year - 1970) * 12 + month - 1
    low = int(month_number.min())
    if int(month_number.max()) - low > 120_000:
        return None
    # A table of the months in sight is cheaper than calendar arithmetic for each row.
    table = np.arange(low, int(month_number.max()) + 2).astype("datetime64[M]").astype("datetime64[D]").astype(np.int32)
    index = month_number - low
    starts = table[index]
    if day.min() < 1 or (day > table[index + 1] - starts).any():
        return None
    micros = (starts + (day - 1)).astype(np.int64) * 86_400_000_000
    micros += ((hour * 60 + minute) * 60 + second).astype(np.int64) * 1_000_000
    if width > 20:
        micros += number(20, width - zulu) * (1000 if width < 26 else 1)
    return pl.Series(text.name, micros).cast(pl.Datetime("us")).cast(pl.Datetime(unit))


# ---------------------------------------------------------------- halving


def salvage(
    items: Sequence[Any], parse: Callable[[Sequence[Any]], pl.DataFrame], schema: pl.Schema
) -> tuple[pl.DataFrame, list[int], list[tuple[int, str]]]:
    """Parse a batch that may hold bad items: the whole at once, and halves of it where that fails.

    Returns the frame, the item number of each of its rows, and ``(item number, reason)`` of the bad ones. ``parse``
    must raise for a batch with a bad item and give one row for each item otherwise. k bad items cost about k log n
    calls.
    """
    good: list[pl.DataFrame] = []
    kept: list[int] = []
    bad: list[tuple[int, str]] = []

    def go(first: int, last: int) -> None:
        try:
            frame = parse(items[first:last])
            if frame.height != last - first:
                raise ValueError(f"{last - first} records became {frame.height} rows")
        except Exception as error:
            if last - first == 1:
                bad.append((first, str(error).strip().splitlines()[0][:200] if str(error).strip() else repr(error)))
                return
            middle = (first + last) // 2
            go(first, middle)
            go(middle, last)
            return
        good.append(frame)
        kept.extend(range(first, last))

    if items:
        go(0, len(items))
    return (pl.concat(good) if good else pl.DataFrame(schema=schema)), kept, bad


def rows_frame(rows: Sequence[Any], schema: pl.Schema) -> pl.DataFrame:
    """Tuples to a frame, strictly: polars' own row constructor turns 1.5 into 1 for an integer column, which loses
    data."""
    width = len(schema)
    for row in rows:
        if not isinstance(row, tuple | list):
            raise TypeError(f"a row must be a tuple, not a {type(row).__name__}")
        if len(row) != width:
            raise ValueError(f"{len(row)} values where the schema has {width} columns")
    columns = list(zip(*rows, strict=True)) if rows else [()] * width
    series = []
    for (name, dtype), values in zip(schema.items(), columns, strict=True):
        _check_kinds(name, dtype, values)
        series.append(pl.Series(name, values, dtype=dtype, strict=True))
    return pl.DataFrame(series)


def _check_kinds(name: str, dtype: pl.DataType, values: Sequence[Any]) -> None:
    """What polars would convert without a word even when strict: bool to number, number to string and the like."""
    kinds = set(map(type, values)) - {type(None)}
    allowed: tuple[type, ...] | None = None
    if dtype.is_integer():
        allowed = (int,)
    elif dtype.is_float():
        allowed = (int, float)
    elif isinstance(dtype, pl.String | pl.Categorical | pl.Enum):
        allowed = (str,)
    elif isinstance(dtype, pl.Boolean):
        allowed = (bool,)
    if allowed is None:
        return
    for kind in kinds:
        numpy_scalar = kind.__module__ == "numpy"
        if not numpy_scalar and (not issubclass(kind, allowed) or (kind is bool and bool not in allowed)):
            raise TypeError(f"column {name!r}: a {kind.__name__} is not a {dtype}")
