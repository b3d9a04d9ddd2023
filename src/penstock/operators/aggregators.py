"""Aggregates that users write.

::

    class Longest(ps.Aggregator[str, str]):
        def create(self) -> str:
            return ""

        def add(self, state: str, value: str) -> str:
            return max(state, value, key=len)

        def merge(self, a: str, b: str) -> str:
            return max(a, b, key=len)

        def result(self, state: str) -> str:
            return state

    words.key_by("user").aggregate("longest", word=ps.aggregator(Longest(), "word"))

With ``merge``, rows are aggregated before the exchange, and a hot key costs one row for each map task; then the result
must not depend on how rows were grouped, nor on the order in which groups are merged. Without it rows travel and are
added in source order, and windows that put states together (hopping, session) cannot be used.

A state is stored as MessagePack, by the type in ``create``'s annotation. A state that would not come back is refused
when it is written, not when it is needed.
"""

from __future__ import annotations

import types
import typing
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from datetime import date, datetime, time, timedelta
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import polars as pl

from penstock.errors import FlowError, UserCodeError
from penstock.operators.accumulators import Objects, as_lists
from penstock.operators.steps import show
from penstock.state.table import KeyedTable, objects

State = TypeVar("State")
Result = TypeVar("Result")


class Aggregator(Generic[State, Result]):
    """Base of user-defined aggregates. Define ``create``, ``result``, and ``add`` or ``add_batch``; ``merge`` if you
    can. Keep nothing on ``self`` that changes.

    Values come as they are, null as None. Over several columns a value is a named tuple, and a batch a DataFrame.
    """

    def create(self) -> State:
        """The state of no rows. Its annotation says how states are stored."""
        raise NotImplementedError

    def add(self, state: State, value: Any) -> State:
        """The state with one more value. May change ``state`` and return it."""
        raise NotImplementedError

    def add_batch(self, state: State, values: Any) -> State:
        """The state with more values (a polars Series), in order: the fast way. How rows are cut into batches must not
        show in the result.
        """
        raise NotImplementedError

    def merge(self, a: State, b: State) -> State:
        """One state of two; ``b``'s rows come after ``a``'s where order is kept. May change both."""
        raise NotImplementedError

    def result(self, state: State) -> Result:
        """The result. Must leave ``state`` as it is; None is null."""
        raise NotImplementedError


_NAMES: dict[Any, pl.DataType] = {
    int: pl.Int64(),
    float: pl.Float64(),
    str: pl.String(),
    bool: pl.Boolean(),
    bytes: pl.Binary(),
    date: pl.Date(),
    datetime: pl.Datetime("us"),
    timedelta: pl.Duration("us"),
    time: pl.Time(),
}


def _defines(aggregator: Aggregator[Any, Any], method: str) -> bool:
    return getattr(type(aggregator), method) is not getattr(Aggregator, method)


def _refuse(operator: str, aggregator: Aggregator[Any, Any], what: str, remedy: str) -> FlowError:
    return FlowError(f"operator '{operator}': {type(aggregator).__name__} {what}.", remedy=remedy, operator=operator)


def _returns(operator: str, aggregator: Aggregator[Any, Any], method: str) -> Any:
    try:
        return typing.get_type_hints(getattr(type(aggregator), method)).get("return")
    except NameError as error:
        raise _refuse(
            operator,
            aggregator,
            f"has an annotation on {method}() that cannot be resolved: {error}",
            "Import or define the type at module level.",
        ) from None


def _state_type(operator: str, aggregator: Aggregator[Any, Any]) -> Any:
    kind = _returns(operator, aggregator, "create")
    if kind is None or isinstance(kind, TypeVar) or kind is type(None):
        raise _refuse(
            operator,
            aggregator,
            "does not say what its state is",
            "Annotate it, for example def create(self) -> list[int].",
        )
    try:
        msgspec.msgpack.Decoder(kind)
    except TypeError as error:
        raise _refuse(
            operator,
            aggregator,
            f"has a state of type {kind}, which cannot be stored: {error}",
            "Use builtins, a dataclass, a msgspec.Struct, or containers of these.",
        ) from None
    return kind


def _result_type(operator: str, aggregator: Aggregator[Any, Any], dtype: Any) -> pl.DataType:
    if dtype is not None:
        try:
            return pl.Series([], dtype=dtype).dtype
        except (TypeError, ValueError, pl.exceptions.PolarsError):
            raise _refuse(
                operator, aggregator, f"is given dtype={dtype!r}, which is no type", "For example dtype=pl.Float64."
            ) from None
    kind = _returns(operator, aggregator, "result")
    some = [a for a in typing.get_args(kind) if a is not type(None)]
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        kind = some[0] if len(some) == 1 else None
    if kind not in _NAMES:
        raise _refuse(
            operator,
            aggregator,
            "does not say what type its result has",
            "Pass dtype=, for example dtype=pl.List(pl.String), or annotate result() with int, float, str ...",
        )
    return _NAMES[kind]


class StateCodec:
    """States of a declared type. What is encoded is decoded once, to see that it will come back."""

    def __init__(self, what: str, operator: str, kind: Any) -> None:
        self.what = what
        self.operator = operator
        self.kind = kind

    def encode(self, value: Any) -> bytes:
        try:
            data = msgspec.msgpack.encode(value)
            msgspec.msgpack.decode(data, type=self.kind)
        except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
            raise UserCodeError(
                f"operator '{self.operator}': {self.what} has a state that is not {_name(self.kind)}: {error} "
                f"(state {show(value)}).",
                remedy="Return such a state from add(), add_batch() and merge(), or change create()'s annotation.",
                operator=self.operator,
                record=show(value),
                cause=f"{type(error).__name__}: {error}",
            ) from error
        return data

    def decode(self, data: bytes) -> Any:
        return msgspec.msgpack.decode(data, type=self.kind)


def _name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)


class Defined(Objects):
    """Runs a user's ``Aggregator``."""

    def __init__(
        self, operator: str, name: str, aggregator: Aggregator[Any, Any], columns: Sequence[pl.Expr], dtype: Any
    ) -> None:
        if not isinstance(aggregator, Aggregator):
            raise FlowError(
                f"operator '{operator}': '{name}' is given a {type(aggregator).__name__}, not a ps.Aggregator.",
                remedy="Derive a class from ps.Aggregator and pass an instance of it.",
                operator=operator,
            )
        for method in ("create", "result"):
            if not _defines(aggregator, method):
                raise _refuse(operator, aggregator, f"does not define {method}()", f"Write def {method}(self, ...).")
        self.batches = _defines(aggregator, "add_batch")
        if not self.batches and not _defines(aggregator, "add"):
            raise _refuse(
                operator,
                aggregator,
                "defines neither add() nor add_batch()",
                "Write def add(self, state, value), which returns the new state.",
            )
        self.operator = operator
        self.aggregator = aggregator
        self.kind = _state_type(operator, aggregator)
        self.what = f"{type(aggregator).__name__} ('{name}')"
        self.codec = StateCodec(self.what, operator, self.kind)
        super().__init__(name, _result_type(operator, aggregator, dtype), associative=_defines(aggregator, "merge"))
        self.mergeable = self.associative
        self.values = {self.column: objects(self.codec)}
        self.several = len(columns) > 1
        names = [c.meta.output_name() for c in columns]
        self.make: Any = namedtuple("Row", names, rename=True)._make if self.several else None  # type: ignore[misc, attr-defined]
        self.x = pl.struct(columns) if self.several else columns[0]
        self._try_create()

    def _try_create(self) -> None:
        try:
            state = self.aggregator.create()
            self.codec.encode(state)
        except Exception as error:
            cause = error.evidence["cause"] if isinstance(error, UserCodeError) else f"{type(error).__name__}: {error}"
            raise _refuse(
                self.operator,
                self.aggregator,
                f"cannot create a state of type {_name(self.kind)}: {cause}",
                "Let create() return a state of the type in its annotation.",
            ) from error
        if state is None:
            raise _refuse(self.operator, self.aggregator, "creates None as a state", "Use an empty value instead.")

    def layout(self) -> str:
        return f"{type(self.aggregator).__name__}/{_name(self.kind)}"

    # -- expressions -------------------------------------------------------------------------------------------------

    def partial(self) -> list[pl.Expr]:
        return [self.x.alias(self.column)]

    def single(self) -> list[pl.Expr]:
        return [self.x.alias(self.column)]

    def encode(self, frame: pl.DataFrame) -> pl.DataFrame:
        lists = frame[self.column]
        ends = np.cumsum(lists.list.len().to_numpy().astype(np.int64)).tolist()
        take = self.slices(lists.explode(empty_as_null=False))
        made = [
            self.codec.encode(self.extend(self.fresh(), take(begin, end)))
            for begin, end in zip([0, *ends], ends, strict=False)
        ]
        one_each = as_lists(pl.Series(made, dtype=pl.Binary()), np.ones(len(made), dtype=np.int64))
        return frame.with_columns(one_each.alias(self.column))

    # -- the user's code ---------------------------------------------------------------------------------------------

    def _call(self, method: str, record: object, *arguments: Any) -> Any:
        try:
            out = getattr(self.aggregator, method)(*arguments)
        except Exception as error:
            raise self._failed(method, record, f"raised {type(error).__name__}: {error}") from error
        if out is None and method != "result":
            raise self._failed(method, record, "returned None, not a state")
        return out

    def _failed(self, method: str, record: object, what: str) -> UserCodeError:
        error = UserCodeError(
            f"operator '{self.operator}': {method}() of {self.what} {what} (record {show(record)}).",
            remedy="Fix it and run again with the same checkpoint: nothing of this epoch was written.",
            operator=self.operator,
            record=show(record),
            cause=what,
        )
        return _through_polars(error) if method == "result" else error

    def slices(self, values: pl.Series) -> Callable[[int, int], Any]:
        whole: Any
        if self.batches:
            whole = values.struct.unnest() if self.several else values
            return lambda begin, end: whole[begin:end]
        whole = values.to_list()
        if self.several:
            whole = [self.make(v.values()) for v in whole]
        return lambda begin, end: whole[begin:end]

    def fresh(self) -> Any:
        return self._call("create", None)

    def extend(self, state: Any, values: Any) -> Any:
        if self.batches:
            return self._call("add_batch", _first(values), state, values)
        for value in values:
            state = self._call("add", value, state, value)
        return state

    def join(self, state: Any, other: Any) -> Any:
        if not self.mergeable:
            raise self._failed("merge", other, "is not defined, but two states meet")
        # A copy: what merge() takes over from the other state must not be shared with it.
        return self._call("merge", other, state, self.copy(other))

    def copy(self, state: Any) -> Any:
        return self.codec.decode(self.codec.encode(state))

    def add(self, table: KeyedTable, rows: np.ndarray, frame: pl.DataFrame) -> None:
        column = table.column(self.column)
        for row, items in zip(rows.tolist(), frame[self.column].to_list(), strict=True):
            for item in items:
                other, state = self.codec.decode(item), column[row]
                column[row] = other if state is None else self._call("merge", other, state, other)

    def add_rows(self, table: KeyedTable, rows: np.ndarray, frame: pl.DataFrame) -> None:
        column = table.column(self.column)
        for row, chunk in self.runs(rows, frame[self.column]):
            old = column[row]
            column[row] = self.extend(self.fresh() if old is None else old, chunk)

    def results(self, states: list[Any]) -> pl.Series:
        found = [self._call("result", s, self.fresh() if s is None else s) for s in states]
        try:
            return pl.Series(found, dtype=self.dtype, strict=True)
        except (TypeError, ValueError, OverflowError, pl.exceptions.PolarsError):
            for state, value in zip(states, found, strict=True):
                self._check(state, value)
            raise

    def _check(self, state: Any, value: Any) -> None:
        try:
            pl.Series([value], dtype=self.dtype, strict=True)
        except (TypeError, ValueError, OverflowError, pl.exceptions.PolarsError):
            raise self._failed("result", state, f"returned {show(value)}, which is not {self.dtype}") from None


def _through_polars(error: UserCodeError) -> UserCodeError:
    """An error to raise inside an expression. Polars makes such an error anew, from its type and a longer text; this
    one's type makes the same error of any text.
    """

    class Carried(UserCodeError):
        def __init__(self, *_: Any) -> None:
            super().__init__(error.message, remedy=error.remedy, **error.evidence)

        def __reduce__(self) -> tuple[Any, ...]:
            return error.__reduce__()

    Carried.__name__ = Carried.__qualname__ = "UserCodeError"
    return Carried()


def _first(values: Any) -> Any:
    rows: Iterator[Any] = iter(values.head(1).rows() if isinstance(values, pl.DataFrame) else values.head(1))
    return next(rows, None)


__all__ = ["Aggregator", "Defined"]
