"""Streaming MapReduce: ``map(event, emit)`` gives pairs, ``reduce(key, value, state, emit)`` takes them.

::

    def words(line: ps.Event, emit: ps.Emit) -> None:
        for word in line.text.split():
            emit(word, 1)

    def count(word: str, n: int, total: ps.Value[int], emit: ps.Emit) -> None:
        total.set(total.get(0) + n)
        emit(word, total.get())

    lines.map_reduce("counts", map=words, reduce=count, key=str, value=int, schema={"word": str, "n": int})

Unlike in a batch, a reducer does not wait for all mappers: it is called for each pair as it comes, keeps what it needs
of a key in its state, and gives results all the time. In the flow these are two steps: a stateless one, ``counts.map``,
that runs where its input is, and a keyed one, ``counts``, that can be scaled like any other.

A ``combine`` function joins two values of one key before they travel. How many are joined depends on how the input is
cut, so it must not matter: ``reduce`` of two values one after the other has to come to the same as of the combined one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import polars as pl

from penstock.errors import FlowError
from penstock.frames import pick, take
from penstock.operators.base import Step, StepContext, tags, visible
from penstock.operators.custom import Custom, Emit, Operator, Signature, event_type
from penstock.operators.steps import show, user_code_error

VALUE = "value"

Mapper = Callable[[Any, Emit], None]
Combiner = Callable[[Any, Any], Any]


class MapStep(Step):
    """The stateless half: calls ``map`` for each row, and keeps the pairs it emits."""

    def __init__(
        self,
        id: str,
        function: Mapper,
        given: pl.Schema,
        key: Sequence[str],
        schema: pl.Schema,
        combine: Combiner | None,
    ) -> None:
        self.id = id
        self.function = function
        self.given = given
        self.key = tuple(key)
        self.schema = schema
        self.combine = combine
        self._kind: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kind": None}  # a class made here cannot be found by name elsewhere

    def run(self, frame: pl.DataFrame, context: StepContext) -> pl.DataFrame:
        keys, values, made_by = self._pairs(frame, context)
        if self.combine is not None and keys:
            keys, values, firsts = self._combined(keys, values, context)
            made_by = [made_by[i] for i in firsts]
        columns = [keys] if len(self.key) == 1 else [[k[i] for k in keys] for i in range(len(self.key))]
        made = []
        for (name, dtype), items in zip(self.schema.items(), [*columns, values], strict=True):
            try:
                made.append(pl.Series(name, items, dtype=dtype))
            except (pl.exceptions.PolarsError, TypeError, OverflowError, ValueError) as error:
                raise user_code_error(self.id, context.epoch, {name: items[0]}, error) from error
        out = pl.DataFrame(made)
        hidden = tags(frame)
        return out.hstack(take(pick(frame, hidden), np.array(made_by, dtype=np.int64))) if hidden else out

    def _pairs(self, frame: pl.DataFrame, context: StepContext) -> tuple[list[Any], list[Any], list[int]]:
        """Keys, values, and the row that each pair came from. A row whose function raises gives none of its pairs."""
        if self._kind is None:
            self._kind = event_type(self.given.names())
        keys: list[Any] = []
        values: list[Any] = []
        made_by: list[int] = []
        width = len(self.key)

        def emit(key: Any, value: Any) -> None:
            if width > 1 and len(key) != width:
                raise TypeError(f"emit: the key {key!r} does not have {width} parts")
            keys.append(key)
            values.append(value)

        columns = [frame[name].to_list() for name in self.given.names()]
        done = 0
        for i, event in enumerate(map(self._kind, *columns)):
            try:
                self.function(event, emit)  # type: ignore[arg-type]
            except (Exception, SystemExit) as error:
                record = frame.select(visible(frame.columns)).row(i, named=True)
                if context.on_error == "fail":
                    raise user_code_error(self.id, context.epoch, record, error) from error
                reason = f"{type(error).__name__}: {error}"
                context.dead.append((self.id, f"epoch {context.epoch}", reason, show(record)))
                del keys[done:], values[done:]
                continue
            made_by.extend([i] * (len(keys) - done))
            done = len(keys)
        return keys, values, made_by

    def _combined(
        self, keys: list[Any], values: list[Any], context: StepContext
    ) -> tuple[list[Any], list[Any], list[int]]:
        """One value for each key, where it first came."""
        assert self.combine is not None
        joined: dict[Any, Any] = {}
        first: dict[Any, int] = {}
        for i, (key, value) in enumerate(zip(keys, values, strict=True)):
            if key not in joined:
                joined[key], first[key] = value, i
                continue
            try:
                joined[key] = self.combine(joined[key], value)
            except (Exception, SystemExit) as error:
                raise user_code_error(self.id, context.epoch, {"key": key, "value": value}, error) from error
        return list(joined), list(joined.values()), list(first.values())

    def describe(self) -> str:
        return "map"


class Reduce(Custom):
    """The keyed half: a custom operator whose events are the values themselves."""

    def __init__(
        self, id: str, key: Sequence[str], function: Callable[..., None], schema: pl.Schema, output: pl.Schema
    ) -> None:
        self.function = function
        super().__init__(id, key, Operator(), schema, output)

    def read(self) -> tuple[Signature, None]:
        return Signature(self.id, "reduce", self.function, False, second="value", bound=False), None

    @property
    def on_event(self) -> Callable[..., None]:
        return self.function

    def events(self, frame: pl.DataFrame) -> Iterator[Any]:
        return iter(frame[VALUE].to_list())

    def record(self, key: Any, event: Any) -> Any:
        return {"key": key, VALUE: event}

    def describe(self) -> str:
        return "reduce"


def check_functions(id: str, **functions: Any) -> None:
    for name, function in functions.items():
        if function is not None and (not callable(function) or isinstance(function, type)):
            raise FlowError(
                f"operator '{id}': {name}={function!r} is not a function.",
                remedy=f"Pass a function, for example {name}=lambda ....",
                operator=id,
            )


def pair_schema(id: str, key: Any, value: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Names of the key's columns, and types of all columns between map and reduce."""
    if not isinstance(key, dict):
        return ("key",), {"key": key, VALUE: value}
    if VALUE in key or not key:
        raise FlowError(
            f"operator '{id}': a key of several columns needs names, none of which is '{VALUE}'.",
            remedy="For example key={'host': str, 'page': str}.",
            operator=id,
        )
    return tuple(key), {**key, VALUE: value}
