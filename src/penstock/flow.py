"""What users write: a flow, built step by step into an immutable graph.

Every step has an id that the user gives. Ids are the names under which state is kept, metrics are shown and
parallelism is changed, so they must be unique and should stay the same when a flow is edited. Everything that can be
known to be wrong is refused as soon as it is written, naming the step.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import polars as pl

from penstock.connectors.base import Sink, Source
from penstock.errors import FlowError, PenstockError
from penstock.operators.aggregates import Aggregate, RunningAggregate
from penstock.operators.base import KeyedOperator, Step
from penstock.operators.custom import Custom, Operator
from penstock.operators.steps import BatchStep, ExprStep, RowResult, RowStep
from penstock.operators.topk import TopK
from penstock.operators.windows import WINDOW_END, WINDOW_START, WindowAggregate, WindowSpec

SchemaLike = Mapping[str, Any] | pl.Schema
IntoExpr = pl.Expr | str

Piped = TypeVar("Piped")

ON_ERROR = ("dead_letter", "fail")


@dataclass(frozen=True)
class Partition:
    """What ``hash_partition`` asks of the stage that follows: how many instances, and a name to change that by."""

    instances: int
    uid: str


@dataclass(frozen=True)
class Node:
    """One step of the graph. Exactly one of ``source``, ``step``, ``keyed``, ``sink`` is set; none of them: a union."""

    id: str
    inputs: tuple[str, ...]
    schema: pl.Schema
    source: Source | None = None
    step: Step | None = None
    keyed: KeyedOperator | None = None
    sink: Sink | None = None
    partition: Partition | None = None

    @property
    def kind(self) -> str:
        for name in ("source", "keyed", "sink"):
            if getattr(self, name) is not None:
                return name
        return "step" if self.step is not None else "union"

    @property
    def uid(self) -> str | None:
        return self.partition.uid if self.partition else None

    def describe(self) -> str:
        for part in (self.source, self.step, self.keyed, self.sink):
            if part is not None:
                return part.describe()
        return "union"


@dataclass(frozen=True)
class Graph:
    """The finished flow: nodes in topological order, checked."""

    name: str
    nodes: tuple[Node, ...]
    on_error: str = "dead_letter"
    dead_letters: Sink | None = None

    def __post_init__(self) -> None:
        ids: set[str] = set()
        for node in self.nodes:
            for name in (node.id, *([node.partition.uid] if node.partition else [])):
                if name in ids:
                    raise FlowError(f"two steps have the id '{name}'.", remedy="Give each a name of its own.")
                ids.add(name)
        seen: set[str] = set()
        for node in self.nodes:
            for i in node.inputs:
                if i not in ids:
                    raise FlowError(f"operator '{node.id}' reads from '{i}', which is not in this flow.")
                if i not in seen:
                    raise FlowError(
                        f"the flow has a cycle: '{node.id}' reads from '{i}', which comes after it.",
                        remedy="A flow is a graph without cycles; keep what must come back as state of an operator.",
                    )
            seen.add(node.id)
        if not any(n.source for n in self.nodes):
            raise FlowError(f"flow '{self.name}' has no source.", remedy="Begin with flow.source(id, ps.files(...)).")
        if not any(n.sink for n in self.nodes):
            raise FlowError(
                f"flow '{self.name}' has no sink: its results would go nowhere.",
                remedy="End each branch with .sink(id, ps.parquet(...)), or another sink.",
            )
        used = {i for n in self.nodes for i in n.inputs}
        loose = [n.id for n in self.nodes if n.sink is None and n.id not in used]
        if loose:
            raise FlowError(
                f"the result of '{loose[0]}' is not used.",
                remedy="Give it a sink, or remove the step.",
                operator=loose[0],
            )

    def node(self, id: str) -> Node:
        return next(n for n in self.nodes if n.id == id)


class Flow:
    """A stream computation, described. ``ps.run(flow)`` runs it on Spark, ``ps.run_local(flow)`` in this process."""

    def __init__(self, name: str, *, on_error: str = "dead_letter") -> None:
        """``on_error``: what to do with a record that cannot be read, or for which a function on rows raises.

        ``"dead_letter"`` counts it and sets it aside (see ``dead_letters``); ``"fail"`` stops the job and shows it.
        """
        if not name or not all(c.isalnum() or c in "-_." for c in name):
            raise FlowError(f"'{name}' is not a flow name.", remedy="Use letters, digits, '-', '_' and '.'.")
        if on_error not in ON_ERROR:
            raise FlowError(f"on_error={on_error!r} is not known.", remedy=f"Use one of {', '.join(ON_ERROR)}.")
        self.name = name
        self.on_error = on_error
        self._nodes: tuple[Node, ...] = ()
        self._prefix = ""
        self._dead_letters: Sink | None = None

    def source(self, id: str, source: Source) -> Stream:
        """Read from a source."""
        if not isinstance(source, Source):
            raise FlowError(
                f"operator '{id}': {type(source).__name__} is not a source.",
                remedy="Use ps.files(...), ps.generator(...), ps.words(...), ps.spark_reader(...), ps.dataframe(...).",
                operator=id,
            )
        try:
            schema = source.schema()
        except PenstockError as error:
            raise type(error)(f"source '{id}': {error.message}", remedy=error.remedy, **error.evidence) from None
        return self._add(Node(id, (), schema, source=source))

    def dead_letters(self, sink: Sink) -> None:
        """Where records go that had to be set aside: rows of source, offset, reason, raw.

        Without it they go to ``dead-letters/`` in the checkpoint directory, 10,000 of each task and epoch at most.
        """
        self._dead_letters = sink

    def graph(self) -> Graph:
        """The finished, checked graph."""
        return Graph(self.name, self._nodes, self.on_error, self._dead_letters)

    def explain(self, format: str = "text") -> str:
        """Operators, how they are fused into stages, exchanges and schemas: as ``"text"``, or drawn as ``"svg"``."""
        from penstock.plan import compile_flow

        plan = compile_flow(self.graph())
        if format == "svg":
            from penstock.observe.diagram import draw

            return draw(plan)
        if format != "text":
            raise FlowError(f"a flow cannot be explained as '{format}'.", remedy="Use 'text' or 'svg'.")
        return plan.explain()

    def _add(self, node: Node, **stream: Any) -> Stream:
        if self._prefix and isinstance(node.id, str) and node.id:
            node = replace(node, id=self._prefix + node.id)
            for part in (node.step, node.keyed):
                if part is not None:
                    part.id = node.id
        if not isinstance(node.id, str) or not node.id or not all(c.isalnum() or c in "-_." for c in node.id):
            raise FlowError(
                f"{node.id!r} is not an operator id.", remedy="Use letters, digits, '-', '_' and '.', e.g. 'counts'."
            )
        if any(n.id == node.id for n in self._nodes):
            raise FlowError(
                f"two steps have the id '{node.id}'.", remedy="Give each a name of its own.", operator=node.id
            )
        if node.partition is not None and any(node.partition.uid in (n.id, n.uid) for n in self._nodes):
            uid = node.partition.uid
            raise FlowError(f"two steps have the id '{uid}'.", remedy="Give each a name of its own.", operator=node.id)
        reserved = [c for c in node.schema if c.startswith("__")]
        if reserved:
            raise FlowError(
                f"operator '{node.id}': column '{reserved[0]}' begins with two underscores: those are Penstock's.",
                remedy="Rename the column.",
                operator=node.id,
            )
        self._nodes = (*self._nodes, node)
        return Stream(self, node.id, node.schema, **stream)

    def __repr__(self) -> str:
        return f"Flow({self.name!r}, {len(self._nodes)} steps)"


def _check_columns(operator: str, columns: Iterable[str], schema: pl.Schema) -> None:
    for column in columns:
        if column not in schema:
            near = difflib.get_close_matches(column, schema.names(), 1)
            hint = f"Did you mean '{near[0]}'? " if near else ""
            raise FlowError(
                f"operator '{operator}': there is no column '{column}'.",
                remedy=f"{hint}The columns are {', '.join(schema.names())}.",
                operator=operator,
            )


def _schema(operator: str, given: SchemaLike) -> pl.Schema:
    from penstock.connectors import polars_schema

    try:
        return polars_schema(given)
    except PenstockError as error:
        raise FlowError(f"operator '{operator}': {error.message}", remedy=error.remedy, operator=operator) from None


@dataclass(frozen=True)
class Stream:
    """A stream of rows. Immutable: every method gives a new stream."""

    flow: Flow = field(repr=False)
    id: str
    schema: pl.Schema
    identity: tuple[str, ...] | None = None
    """For a stream of updates: the columns that say which earlier row a row replaces."""
    windowed: bool = False
    partition: Partition | None = field(default=None, repr=False)

    # -- stateless ---------------------------------------------------------------------------------------------------

    def select(self, id: str, *exprs: IntoExpr, **named: IntoExpr) -> Stream:
        """Keep and compute columns, by name or polars expression."""
        return self._expr(id, "select", exprs, named)

    def with_columns(self, id: str, *exprs: IntoExpr, **named: IntoExpr) -> Stream:
        """Add or replace columns."""
        return self._expr(id, "with_columns", exprs, named)

    def where(self, id: str, *predicates: pl.Expr) -> Stream:
        """Keep the rows for which every predicate is true."""
        return self._expr(id, "where", predicates, {})

    def map_batches(
        self, id: str, function: Callable[[Any], Any], *, schema: SchemaLike | None = None, arrow: bool = False
    ) -> Stream:
        """Apply a function from a polars DataFrame (or, with ``arrow``, a pyarrow Table) to another.

        It sees some rows at a time and must not depend on which. The output's schema is found by calling it on no rows,
        unless it is given.
        """
        if not callable(function):
            raise FlowError(f"operator '{id}': {function!r} is not a function.", operator=id)
        declared = _schema(id, schema) if schema is not None else None
        step = BatchStep(id, function, arrow, declared)
        if declared is None:
            try:
                declared = step.call(pl.DataFrame(schema=self.schema)).schema
            except Exception as error:
                raise FlowError(
                    f"operator '{id}': its function raised {type(error).__name__} on an empty batch: {error}.",
                    remedy="Make it work on no rows, or give schema={column: type} for its output.",
                    operator=id,
                ) from error
            step.schema = declared
        return self._step(id, step, declared)

    flat_map = map_batches

    def map_rows(self, id: str, function: Callable[[dict[str, Any]], RowResult], *, schema: SchemaLike) -> Stream:
        """Apply a function to each row, given as a dict; it returns a dict, several, or None to drop the row.

        Easy, but Python runs for each row: prefer expressions or ``map_batches`` where speed matters.
        """
        if not callable(function):
            raise FlowError(f"operator '{id}': {function!r} is not a function.", operator=id)
        declared = _schema(id, schema)
        return self._step(id, RowStep(id, function, declared), declared)

    def union(self, id: str, *others: Stream) -> Stream:
        """The rows of several streams with the same columns."""
        if not others:
            raise FlowError(f"operator '{id}': union needs at least one other stream.", operator=id)
        for other in others:
            if other.flow is not self.flow:
                raise FlowError(f"operator '{id}': '{other.id}' belongs to another flow.", operator=id)
            if dict(other.schema) != dict(self.schema):
                raise FlowError(
                    f"operator '{id}': '{self.id}' and '{other.id}' have different columns: "
                    f"{dict(self.schema)} and {dict(other.schema)}.",
                    remedy="Select the same columns with the same types before the union.",
                    operator=id,
                )
        inputs = (self.id, *(o.id for o in others))
        if len(set(inputs)) != len(inputs):
            raise FlowError(f"operator '{id}': a stream cannot be united with itself.", operator=id)
        return self.flow._add(Node(id, inputs, self.schema))

    def split(self, id: str, predicate: pl.Expr) -> tuple[Stream, Stream]:
        """The rows for which a predicate is true, and the others (false, or null): under ``id`` and ``id.rest``."""
        rest = ~predicate.fill_null(False)
        return self.where(id, predicate), self.where(f"{id}.rest", rest)

    def pipe(self, name: str, function: Callable[..., Piped], /, *args: Any, **named: Any) -> Piped:
        """Apply a sub-flow: a function from a stream to a stream (or to several).

        Its steps' ids get ``name.`` before them, so that one function can serve several branches.
        """
        before = self.flow._prefix
        self.flow._prefix = f"{before}{name}."
        try:
            return function(self, *args, **named)
        finally:
            self.flow._prefix = before

    def _expr(self, id: str, kind: str, exprs: Sequence[Any], named: Mapping[str, Any]) -> Stream:
        lazy = pl.LazyFrame(schema=self.schema)
        method = {"select": lazy.select, "with_columns": lazy.with_columns, "where": lazy.filter}[kind]
        try:
            if kind == "where":
                for predicate in exprs:
                    dtype = lazy.select(predicate.alias("p")).collect_schema()["p"]
                    if dtype != pl.Boolean:
                        raise FlowError(
                            f"operator '{id}': its predicate gives {dtype}, not true or false.", operator=id
                        )
            schema = method(*exprs, **named).collect_schema()
        except pl.exceptions.ColumnNotFoundError as error:
            # polars: unable to find column "wrod"; valid columns: [...]
            _check_columns(id, re.findall(r'"([^"]*)"', str(error))[:1], self.schema)
            raise FlowError(f"operator '{id}': {str(error).splitlines()[0]}.", operator=id) from None
        except FlowError:
            raise
        except Exception as error:
            raise FlowError(
                f"operator '{id}': {kind} does not fit its input: {str(error).splitlines()[0]}.",
                remedy=f"Its input has {dict(self.schema)}.",
                operator=id,
            ) from None
        step = ExprStep(id, kind, tuple(exprs), dict(named))
        keeps = kind == "where" or (self.identity is not None and all(c in schema for c in self.identity))
        windowed = self.windowed and WINDOW_START in schema and WINDOW_END in schema
        node = Node(id, (self.id,), schema, step=step)
        return self.flow._add(node, identity=self.identity if keeps else None, windowed=windowed)

    def _step(self, id: str, step: Step, schema: pl.Schema) -> Stream:
        return self.flow._add(Node(id, (self.id,), schema, step=step))

    # -- keyed -------------------------------------------------------------------------------------------------------

    def key_by(self, *columns: str) -> KeyedStream:
        """Partition by the values of columns; what follows keeps state for each key.

        Null is a key like any other; all NaN are one key, and -0.0 is 0.0.
        """
        if not columns:
            raise FlowError(f"after '{self.id}': key_by needs at least one column.")
        _check_columns(f"key_by after '{self.id}'", columns, self.schema)
        for column in columns:
            dtype = self.schema[column]
            if dtype.is_nested() or dtype == pl.Object:
                raise FlowError(
                    f"after '{self.id}': column '{column}' of type {dtype} cannot be a key.",
                    remedy="Key by numbers, text, times, booleans or bytes.",
                )
        return KeyedStream(self, tuple(columns))

    def hash_partition(self, key: str | Sequence[str], n: int, uid: str) -> KeyedStream:
        """``key_by``, with ``n`` instances of the stage that follows, to begin with, and a name for it.

        The name is a handle on the running job: ``job.rescale(uid, 8)``.
        """
        if not isinstance(n, int) or n < 1:
            raise FlowError(f"after '{self.id}': hash_partition into {n!r} instances.", remedy="Use 1 or more.")
        if not isinstance(uid, str) or not uid or not all(c.isalnum() or c in "-_." for c in uid):
            raise FlowError(f"{uid!r} is not a uid.", remedy="Use letters, digits, '-', '_' and '.', e.g. 'by-word'.")
        keyed = self.key_by(*([key] if isinstance(key, str) else key))
        return replace(keyed, stream=replace(self, partition=Partition(n, self.flow._prefix + uid)))

    def top_k(self, id: str, k: int, *, by: str, per: str | Sequence[str] = (), descending: bool = True) -> Stream:
        """The k greatest rows by a column: of each window after a windowed aggregate, else of each ``per``, or all."""
        group = (per,) if isinstance(per, str) else tuple(per)
        _check_columns(id, (by, *group), self.schema)
        if self.windowed:
            group = (*group, WINDOW_START, WINDOW_END)
        elif self.identity is None:
            raise FlowError(
                f"operator '{id}': top_k here needs a result to rank: '{self.id}' is a stream of events.",
                remedy="Put an aggregate before it, or use key_by(...).top_k(...) for the greatest events of each key.",
                operator=id,
            )
        elif not set(group) <= set(self.identity):
            changing = next(g for g in group if g not in self.identity)
            raise FlowError(
                f"operator '{id}': '{changing}' is a result that changes: rows would stay in groups they have left.",
                remedy=f"Rank per {', '.join(self.identity)}, or over all.",
                operator=id,
            )
        operator = TopK(
            id,
            k,
            by,
            group,
            self.schema,
            identity=self.identity,
            whole_groups=self.windowed,
            descending=descending,
        )
        return self._keyed(operator, windowed=self.windowed)

    def _keyed(self, operator: KeyedOperator, *, windowed: bool = False) -> Stream:
        node = Node(operator.id, (self.id,), operator.output, keyed=operator, partition=self.partition)
        return self.flow._add(node, identity=operator.identity, windowed=windowed)

    def aggregate(self, id: str, **aggregates: Aggregate) -> Stream:
        """Always refused: say by which key first."""
        raise FlowError(
            f"operator '{id}': an aggregate keeps state, and state needs a key.",
            remedy=f"Write .key_by(column).aggregate('{id}', ...).",
            operator=id,
        )

    def process(self, id: str, operator: Operator, **_: Any) -> Stream:
        """Always refused: say by which key first."""
        raise FlowError(
            f"operator '{id}': a custom operator keeps state, and state needs a key.",
            remedy=f"Write .key_by(column).process('{id}', ...).",
            operator=id,
        )

    # -- out ---------------------------------------------------------------------------------------------------------

    def sink(self, id: str, sink: Sink) -> Stream:
        """Send the rows to a sink, exactly once. Gives back the same stream, so that it can have several."""
        if not isinstance(sink, Sink):
            raise FlowError(
                f"operator '{id}': {type(sink).__name__} is not a sink.",
                remedy="Use ps.parquet(path), ps.csv(path), ps.jsonl(path), ps.memory(), ps.foreach_batch(f) ...",
                operator=id,
            )
        self.flow._add(Node(id, (self.id,), self.schema, sink=sink))
        return self


@dataclass(frozen=True)
class KeyedStream:
    """A stream partitioned by key."""

    stream: Stream
    key: tuple[str, ...]

    def aggregate(self, id: str, **aggregates: Aggregate) -> Stream:
        """Running aggregates: each epoch gives the new values of the keys that changed."""
        self._check(id, aggregates, self.key)
        operator = RunningAggregate(id, self.key, aggregates, self.stream.schema)
        return self.stream._keyed(operator)

    def window(self, spec: WindowSpec) -> WindowedStream:
        """Cut each key's rows into event-time windows: ``ps.tumbling(...)`` or ``ps.hopping(...)``."""
        where = f"window after '{self.stream.id}'"
        if not isinstance(spec, WindowSpec):
            raise FlowError(f"{where}: {spec!r} is not a window.", remedy="Use ps.tumbling(...) or ps.hopping(...).")
        _check_columns(where, [spec.on], self.stream.schema)
        dtype = self.stream.schema[spec.on]
        if not isinstance(dtype, pl.Datetime | pl.Date):
            raise FlowError(
                f"{where}: column '{spec.on}' has type {dtype}, not a time.",
                remedy=f"Convert it, for example pl.from_epoch('{spec.on}', time_unit='s').",
            )
        return WindowedStream(self, spec)

    def process(self, id: str, operator: Operator, *, schema: SchemaLike) -> Stream:
        """A custom operator with state for each key; ``schema`` is what it emits."""
        if isinstance(operator, type) and issubclass(operator, Operator):
            operator = operator()
        if not isinstance(operator, Operator):
            raise FlowError(
                f"operator '{id}': {type(operator).__name__} is not a ps.Operator.",
                remedy="Derive a class from ps.Operator and pass an instance of it.",
                operator=id,
            )
        return self.stream._keyed(Custom(id, self.key, operator, self.stream.schema, _schema(id, schema)))

    def top_k(self, id: str, k: int, *, by: str, descending: bool = True) -> Stream:
        """The k greatest events of each key so far."""
        _check_columns(id, [by], self.stream.schema)
        operator = TopK(
            id, k, by, self.key, self.stream.schema, identity=None, whole_groups=False, descending=descending
        )
        return self.stream._keyed(operator)

    @staticmethod
    def _check(id: str, aggregates: Mapping[str, Aggregate], taken: Sequence[str]) -> None:
        if not aggregates:
            raise FlowError(
                f"operator '{id}': there is nothing to aggregate.", remedy="For example n=ps.count().", operator=id
            )
        for name in aggregates:
            if name in taken:
                raise FlowError(
                    f"operator '{id}': '{name}' is already the name of a key column.",
                    remedy="Name the aggregate differently.",
                    operator=id,
                )


@dataclass(frozen=True)
class WindowedStream:
    """A keyed stream cut into windows."""

    keyed: KeyedStream
    spec: WindowSpec

    def aggregate(self, id: str, **aggregates: Aggregate) -> Stream:
        """Aggregates of each key and window, once, when the watermark has passed the window's end.

        Adds ``window_start`` and ``window_end``.
        """
        self.keyed._check(id, aggregates, (*self.keyed.key, WINDOW_START, WINDOW_END))
        stream = self.keyed.stream
        operator = WindowAggregate(id, self.keyed.key, self.spec, aggregates, stream.schema)
        return stream._keyed(operator, windowed=True)
