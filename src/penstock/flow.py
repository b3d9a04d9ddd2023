"""What users write: a flow, built step by step into an immutable graph.

The user gives every step an id. State is kept, metrics are shown and parallelism is changed by these ids. So ids must
be unique, and should stay the same when a flow is edited. A mistake is refused as soon as it is written, and the error
names the step.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import polars as pl

from penstock.connectors.base import Sink, Source
from penstock.errors import FlowError, PenstockError
from penstock.operators.aggregates import Aggregate, FinalAggregate, RunningAggregate
from penstock.operators.base import KeyedOperator, Step
from penstock.operators.batch import BatchOperator, build_operator
from penstock.operators.custom import Operator
from penstock.operators.event_time import CLOCK, Duration, Window, one_of
from penstock.operators.joins import LifetimeJoin, Shape, Within, point, versions
from penstock.operators.lookup import LookupStep, load_table
from penstock.operators.mapreduce import Combiner, Mapper, MapStep, Reduce, check_functions, pair_schema
from penstock.operators.rowwise import INSTEAD, looks_around
from penstock.operators.steps import BatchStep, ExprStep, RowResult, RowStep
from penstock.operators.topk import TopK
from penstock.operators.windows import EMIT, WINDOW_END, WINDOW_START
from penstock.state.hashing import hashable
from penstock.state.slicemap import SLICES_MAX

SchemaLike = Mapping[str, Any] | pl.Schema
IntoExpr = pl.Expr | str

Piped = TypeVar("Piped")

ON_ERROR = ("dead_letter", "fail")


ID_BYTES_MAX = 150
"""File systems take names of 255 bytes, and something is put before and after an id."""


@dataclass(frozen=True)
class Partition:
    """What ``hash_partition`` asks of the stage that follows: its number of instances, and a name for rescaling it."""

    instances: int
    uid: str


@dataclass(frozen=True)
class Node:
    """One step of the graph. At most one of ``source``, ``step``, ``keyed`` and ``sink`` is set. A union has none."""

    id: str
    inputs: tuple[str, ...]
    schema: pl.Schema
    source: Source | None = None
    step: Step | None = None
    keyed: KeyedOperator | None = None
    sink: Sink | None = None
    partition: Partition | None = None
    slices: int | None = None
    """Of a keyed operator: the number of slices of its stage. None: as the settings say."""
    by: str | None = None
    """Of a union: the column of event time by which rows of different sources are put in order, where order matters."""

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
    """The finished and checked flow: its nodes in topological order."""

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
    """The description of a stream computation. ``ps.run(flow)`` runs it on Spark, ``ps.run_local(flow)`` in this
    process.
    """

    def __init__(self, name: str, *, on_error: str = "dead_letter") -> None:
        """``on_error`` says what happens to a record that cannot be read, or for which a function on rows raises.

        ``"dead_letter"`` counts the record and sets it aside (see ``dead_letters``). ``"fail"`` stops the job and shows
        the record.
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
        """Send records that had to be set aside to a sink: rows of source, offset, reason, raw.

        Without a sink they go to ``dead-letters/`` in the checkpoint directory, at most 10,000 of each task and epoch.
        """
        self._dead_letters = sink

    def graph(self) -> Graph:
        """The finished, checked graph."""
        return Graph(self.name, self._nodes, self.on_error, self._dead_letters)

    def explain(self, format: str = "text") -> str:
        """Stages with their fused operators, exchanges and schemas: as ``"text"``, or drawn as ``"svg"``."""
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
        for name in filter(None, (node.id, node.partition.uid if node.partition else None)):
            _check_as_file_name(name)
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
                f"operator '{node.id}': column '{reserved[0]}' begins with two underscores: such names are Penstock's.",
                remedy="Rename the column.",
                operator=node.id,
            )
        self._nodes = (*self._nodes, node)
        return Stream(self, node.id, node.schema, **stream)

    def __repr__(self) -> str:
        return f"Flow({self.name!r}, {len(self._nodes)} steps)"


def _check_as_file_name(id: str) -> None:
    """An id names directories, in the checkpoint and in outputs."""
    if not id.strip("."):
        raise FlowError(
            f"'{id}' is not an operator id: it would name another directory.", remedy="Use a letter or digit in it."
        )
    if (size := len(id.encode())) > ID_BYTES_MAX:
        raise FlowError(
            f"the operator id '{id[:40]}...' has {size} bytes, more than {ID_BYTES_MAX}.",
            remedy="Give it a shorter one: it names files.",
        )


def _no_updates(flow: Flow, operator: str, input: str) -> None:
    """Refuse a stream of updates: how many there are depends on how the input was cut, and so would all results."""
    nodes = {n.id: n for n in flow._nodes}
    ways = [input]
    while ways:
        node = nodes[ways.pop()]
        if node.keyed is None:
            ways.extend(node.inputs)
        elif node.keyed.identity is not None:
            raise FlowError(
                f"operator '{operator}': '{node.id}' is a stream of updates, whose rows replace one another. What it "
                "makes of them would depend on how often they were given.",
                remedy=f"Let the rows of '{node.id}' stay: results of windows do, those of aggregate(..., "
                "emit='final') when the input ends, and those of your own key_by(...).process(...).",
                operator=operator,
            )


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


def _names(where: str, columns: Sequence[Any], what: str) -> tuple[str, ...]:
    """Names of columns, given one by one or as a list."""
    flat: list[Any] = []
    for column in columns:
        flat.extend(column if isinstance(column, list | tuple) else [column])
    for column in flat:
        if isinstance(column, pl.Expr):
            name = column.meta.output_name(raise_if_undetermined=False) or what
            if column.meta.is_column() and name:
                raise FlowError(f"{where}: it takes names of columns.", remedy=f"Write '{name}' for pl.col('{name}').")
            raise FlowError(
                f"{where}: it takes names of columns, not an expression.",
                remedy=f"Compute it first: .with_columns('with-{name}', {name}=...), and give its name, '{name}'.",
            )
        if not isinstance(column, str):
            raise FlowError(f"{where}: {column!r} is not the name of a column.", remedy="Write it as text.")
    return tuple(flat)


def _one_column(operator: str, by: Any) -> str:
    names = _names(f"operator '{operator}': by", [by], "rank")
    if len(names) != 1:
        raise FlowError(
            f"operator '{operator}': rows are ranked by one column, not by {len(names)}.",
            remedy="Ties are broken by the other columns, in their order: .select(...) them as you want it. Or compute "
            "one column to rank by.",
            operator=operator,
        )
    return names[0]


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
    """The columns that say which earlier row a row replaces. None: the stream is not one of updates."""
    windowed: bool = False
    partition: Partition | None = field(default=None, repr=False)
    slices: int | None = field(default=None, repr=False)
    """What ``key_by`` or ``hash_partition`` asked for."""

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

        The function sees some rows at a time, and must not depend on which rows come together. Without ``schema`` the
        function is called on no rows, to find the schema of its output.
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
        """Apply a function to each row, a dict. It returns a dict, several dicts, or None to drop the row.

        Python runs for each row. Prefer expressions or ``map_batches`` where speed matters.
        """
        if not callable(function):
            raise FlowError(f"operator '{id}': {function!r} is not a function.", operator=id)
        declared = _schema(id, schema)
        return self._step(id, RowStep(id, function, declared), declared)

    def union(self, id: str, *others: Stream, by: str | None = None) -> Stream:
        """The rows of several streams with the same columns.

        Rows of different sources have no order among them. Operators with event time put them in order by that, others
        by the time in column ``by``: first those whose source has come less far, then by stream, in the order given.
        Operators for which order does not matter need none.
        """
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
        if by is not None:
            _check_columns(id, [by], self.schema)
            if not isinstance(self.schema[by], pl.Datetime | pl.Date):
                raise FlowError(
                    f"operator '{id}': column '{by}' has type {self.schema[by]}, not a time.",
                    remedy=f"Convert it, for example pl.from_epoch('{by}', time_unit='s').",
                    operator=id,
                )
        return self.flow._add(Node(id, inputs, self.schema, by=by))

    def split(self, id: str, predicate: pl.Expr) -> tuple[Stream, Stream]:
        """Two streams: ``id`` has the rows for which a predicate is true, and ``id.rest`` the rows where it is false or
        null.
        """
        rest = ~predicate.fill_null(False)
        return self.where(id, predicate), self.where(f"{id}.rest", rest)

    def pipe(self, name: str, function: Callable[..., Piped], /, *args: Any, **named: Any) -> Piped:
        """Apply a sub-flow: a function from a stream to a stream (or to several).

        The ids of its steps get ``name.`` before them, so that one function can serve several branches.
        """
        before = self.flow._prefix
        self.flow._prefix = f"{before}{name}."
        try:
            return function(self, *args, **named)
        finally:
            self.flow._prefix = before

    def lookup(
        self,
        id: str,
        table: pl.DataFrame | str | Path,
        *,
        on: str | Sequence[str],
        how: str = "left",
        suffix: str = "_right",
    ) -> Stream:
        """Add the columns of a static table, found by the columns ``on``: a DataFrame, or a parquet or CSV file.

        The file is read now, and the table travels with the flow. ``how="inner"`` drops rows that find nothing. Use
        ``key_by(...).lookup(...)`` for a table that changes in event time.
        """
        columns = (on,) if isinstance(on, str) else tuple(on)
        _check_columns(id, columns, self.schema)
        step = LookupStep(id, load_table(id, table), columns, self.schema, how, suffix)
        node = Node(id, (self.id,), step.schema, step=step)
        return self.flow._add(node, identity=self.identity, windowed=self.windowed)

    def _expr(self, id: str, kind: str, exprs: Sequence[Any], named: Mapping[str, Any]) -> Stream:
        for expr in (*exprs, *named.values()):
            if (around := looks_around(expr)) is not None:
                raise FlowError(
                    f"operator '{id}': {around} in {kind} looks at other rows than its own.",
                    remedy=INSTEAD,
                    operator=id,
                )
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

    def key_by(self, *columns: str | Sequence[str], slices: int | None = None) -> KeyedStream:
        """Partition by the values of columns; what follows keeps state for each key.

        Null is a key like any other; all NaN are one key, and -0.0 is 0.0.

        ``slices`` is the number of slices of the stage that follows, in place of the setting of that name. Its
        instances can grow up to it. It cannot be changed for state that is there already.
        """
        columns = _names(f"key_by after '{self.id}'", columns, "key")
        if not columns:
            raise FlowError(f"after '{self.id}': key_by needs at least one column.")
        _check_columns(f"key_by after '{self.id}'", columns, self.schema)
        for column in columns:
            dtype = self.schema[column]
            if not hashable(dtype):
                as_text = f".with_columns('as-text', {column}=pl.col('{column}').cast(pl.String))"
                raise FlowError(
                    f"after '{self.id}': column '{column}' of type {dtype} cannot be a key.",
                    remedy=f"Write {as_text} before it."
                    if dtype.is_decimal() or dtype.is_integer()
                    else "Key by integers, floats, text, times, booleans or bytes.",
                )
        if slices is not None and (type(slices) is not int or not 1 <= slices <= SLICES_MAX):
            raise FlowError(f"after '{self.id}': key_by with {slices!r} slices.", remedy=f"Use 1 to {SLICES_MAX}.")
        return KeyedStream(replace(self, slices=slices), tuple(columns))

    def hash_partition(self, key: str | Sequence[str], n: int, uid: str, *, slices: int | None = None) -> KeyedStream:
        """``key_by``, with ``n`` instances of the stage that follows, to begin with, and a name for it.

        The name is a handle on the running job: ``job.rescale(uid, 8)``.
        """
        if not isinstance(n, int) or n < 1:
            raise FlowError(f"after '{self.id}': hash_partition into {n!r} instances.", remedy="Use 1 or more.")
        if not isinstance(uid, str) or not uid or not all(c.isalnum() or c in "-_." for c in uid):
            raise FlowError(f"{uid!r} is not a uid.", remedy="Use letters, digits, '-', '_' and '.', e.g. 'by-word'.")
        keyed = self.key_by(*([key] if isinstance(key, str) else key), slices=slices)
        if slices is not None and n > slices:
            raise FlowError(
                f"stage '{uid}': {n} instances need as many slices, and it has slices={slices}.",
                remedy="Use more slices, as many as the instances that the stage may ever have, or fewer instances.",
            )
        return replace(keyed, stream=replace(keyed.stream, partition=Partition(n, self.flow._prefix + uid)))

    def top_k(self, id: str, k: int, *, by: str, per: str | Sequence[str] = (), descending: bool = True) -> Stream:
        """The k greatest rows by a column: of each window after a windowed aggregate, else of each ``per``, or all."""
        by = _one_column(id, by)
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
        if not isinstance(operator, TopK):
            _no_updates(self.flow, operator.id, self.id)
        node = Node(operator.id, (self.id,), operator.output, keyed=operator)
        node = replace(node, partition=self.partition, slices=self.slices)
        return self.flow._add(node, identity=operator.identity, windowed=windowed)

    def aggregate(self, id: str, **aggregates: Aggregate) -> Stream:
        """Refused: an aggregate needs ``key_by`` first."""
        raise FlowError(
            f"operator '{id}': an aggregate keeps state, and state needs a key.",
            remedy=f"Write .key_by(column).aggregate('{id}', ...).",
            operator=id,
        )

    def window(self, spec: Window) -> Stream:
        """Always refused: say by which key first."""
        raise FlowError(
            f"window after '{self.id}': windows are kept for each key.",
            remedy="Write .key_by(column).window(...). For one window over all rows, make a constant column first: "
            ".with_columns('all', every=pl.lit(0)).key_by('every').",
            operator=self.id,
        )

    def process(self, id: str, operator: Operator, **_: Any) -> Stream:
        """Refused: a custom operator needs ``key_by`` first."""
        raise FlowError(
            f"operator '{id}': a custom operator keeps state, and state needs a key.",
            remedy=f"Write .key_by(column).process('{id}', ...).",
            operator=id,
        )

    def map_reduce(
        self,
        id: str,
        *,
        map: Mapper,
        reduce: Callable[..., None],
        key: Any,
        value: Any,
        schema: SchemaLike,
        combine: Combiner | None = None,
    ) -> Stream:
        """Streaming MapReduce.

        ``map(event, emit)`` calls ``emit(key, value)`` any number of times. ``reduce(key, value, <states>, emit)`` is
        called for each pair, with states annotated as in ``ps.Operator``. ``key`` and ``value`` are types; a mapping of
        names to types makes a key of several parts. ``combine(a, b)`` may join two values of a key before they travel.
        Two steps are added: ``<id>.map`` and ``<id>``.
        """
        check_functions(id, map=map, reduce=reduce, combine=combine)
        names, columns = pair_schema(id, key, value)
        pairs, declared = _schema(id, columns), _schema(id, schema)
        reducer = Reduce(id, names, reduce, pairs, declared)
        mapper = MapStep(f"{id}.map", map, self.schema, names, pairs, combine)
        return self._step(mapper.id, mapper, pairs).key_by(*names).stream._keyed(reducer)

    # -- out ---------------------------------------------------------------------------------------------------------

    def sink(self, id: str, sink: Sink) -> Stream:
        """Send the rows to a sink, exactly once. The result is the same stream, so that it can have several sinks."""
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

    def aggregate(self, id: str, *, emit: str = "updates", **aggregates: Aggregate) -> Stream:
        """Running aggregates: each epoch gives the new values of the keys that changed, a stream of updates.

        ``emit="final"`` gives each key once, when the input has ended: rows that stay, for aggregates of aggregates and
        for joins.
        """
        self._check(id, aggregates, self.key)
        kind = RunningAggregate if one_of(emit, EMIT, f"operator '{id}': emit") == "updates" else FinalAggregate
        operator = kind(id, self.key, aggregates, self.stream.schema)
        return self.stream._keyed(operator)

    def window(self, spec: Window) -> WindowedStream:
        """Cut each key's rows into windows: ``ps.tumbling``, ``ps.hopping``, ``ps.session`` or ``ps.last_rows``."""
        where = f"window after '{self.stream.id}'"
        if not isinstance(spec, Window):
            raise FlowError(
                f"{where}: {spec!r} is not a window.",
                remedy="Use ps.tumbling(...), ps.hopping(...), ps.session(...) or ps.last_rows(...).",
            )
        taken = [k for k in self.key if k in (WINDOW_START, WINDOW_END)]
        if taken:
            raise FlowError(
                f"{where}: the key column '{taken[0]}' has the name of a column that windows add.",
                remedy="Rename it before key_by.",
            )
        if isinstance(spec.on, str):
            _check_columns(where, [spec.on], self.stream.schema)
            dtype = self.stream.schema[spec.on]
            if not isinstance(dtype, pl.Datetime | pl.Date):
                raise FlowError(
                    f"{where}: column '{spec.on}' has type {dtype}, not a time.",
                    remedy=f"Convert it, for example pl.from_epoch('{spec.on}', time_unit='s').",
                )
        elif spec.on is not None and spec.on is not CLOCK:
            raise FlowError(
                f"{where}: on={spec.on!r} is neither a column nor ps.CLOCK.", remedy="Name the column of event time."
            )
        return WindowedStream(self, spec)

    def process(
        self,
        id: str,
        operator: Operator | BatchOperator | type[Operator | BatchOperator],
        *,
        schema: SchemaLike,
        on: str | None = None,
        lateness: Duration = 0,
        hold: Duration = 0,
    ) -> Stream:
        """A custom operator with state for each key, on events or on batches. ``schema`` is the schema of its output.

        ``on`` names the column of event time, which timers, expiry and ``ps.Time`` need. ``lateness`` is how much later
        than the newest event an older event may come before the watermark passes it. ``hold`` is how far behind the
        watermark the times of emitted rows may lie; windows after this operator need it.
        """
        built = build_operator(
            id, self.key, operator, self.stream.schema, _schema(id, schema), on=on, lateness=lateness, hold=hold
        )
        return self.stream._keyed(built)

    def join(
        self,
        id: str,
        right: KeyedStream,
        *,
        overlap: tuple[Shape, Shape] | None = None,
        within: Within | None = None,
        how: str = "inner",
        lateness: Duration = 0,
        suffix: str = "_right",
    ) -> Stream:
        """Pairs of rows of both sides with equal keys whose lifetimes overlap. Each pair comes once.

        ``overlap`` says how long the rows of the left and of the right side live: ``ps.point(on)``,
        ``ps.interval(start, end)``, ``ps.edge(on, ends)``, ``ps.versions(on)``. ``within=ps.within(...)`` joins points
        that are close in time. ``how="left"`` also gives left rows that met nothing, with nulls, when they can meet
        nothing any more. ``lateness`` is how much later than the newest row of its own side an older row may come. The
        output has the columns of the left side, then the columns of the right side without its key. A name that both
        sides have gets ``suffix``.
        """
        if isinstance(within, Within) and overlap is None:
            overlap, within = (within.left, within.right), None
        shapes = overlap if isinstance(overlap, tuple) and within is None else ()
        if len(shapes) != 2 or not all(isinstance(s, Shape) for s in shapes):
            raise FlowError(
                f"operator '{id}': it does not say how rows meet.",
                remedy="Give either overlap=(shape of the left side, shape of the right side), each one of ps.point, "
                "ps.interval, ps.edge, ps.versions; or within=ps.within(left, right, before=..., after=...).",
                operator=id,
            )
        return self._two(id, right, shapes, how, lateness, suffix)

    def lookup(
        self,
        id: str,
        table: KeyedStream,
        *,
        on: str,
        version: str,
        how: str = "left",
        lateness: Duration = 0,
        suffix: str = "_right",
    ) -> Stream:
        """For each event the row of a changing table with the same key that was valid at the event's time ``on``.

        A row of the table is valid from its time ``version`` until the next row of its key. An event waits until the
        watermark of the table has passed it too.
        """
        return self._two(id, table, (point(on), versions(version)), how, lateness, suffix)

    def _two(
        self, id: str, right: KeyedStream, shapes: tuple[Shape, Shape], how: str, lateness: Duration, suffix: str
    ) -> Stream:
        if not isinstance(right, KeyedStream):
            raise FlowError(
                f"operator '{id}': the right side is a {type(right).__name__}, not a keyed stream.",
                remedy="Write right.key_by(column). For a static table, use stream.lookup(id, table, on=...).",
                operator=id,
            )
        left, other = self.stream, right.stream
        if other.flow is not left.flow:
            raise FlowError(f"operator '{id}': '{other.id}' belongs to another flow.", operator=id)
        for stream, shape in ((left, shapes[0]), (other, shapes[1])):
            _no_updates(stream.flow, id, stream.id)
            _check_columns(id, shape.columns(), stream.schema)
        sides = ((self.key, left.schema), (right.key, other.schema))
        operator = LifetimeJoin(id, *sides, shapes, how=how, lateness=lateness, suffix=suffix)
        asked = {stream.slices for stream in (left, other)} - {None}
        if len(asked) > 1:
            raise FlowError(
                f"operator '{id}': the left side has slices={left.slices}, the right side slices={other.slices}.",
                remedy="Both sides meet in one stage: give its number of slices on one side, or the same on both.",
                operator=id,
            )
        slices = next(iter(asked), None)
        return left.flow._add(Node(id, (left.id, other.id), operator.output, keyed=operator, slices=slices))

    def top_k(self, id: str, k: int, *, by: str, descending: bool = True) -> Stream:
        """The k greatest events of each key so far."""
        by = _one_column(id, by)
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
    spec: Window

    def aggregate(self, id: str, **aggregates: Aggregate) -> Stream:
        """Aggregates of each key and window, with ``window_start`` and ``window_end``.

        Each window comes once, when it is over. With ``emit="updates"`` a window comes whenever its result has changed.
        """
        self.keyed._check(id, aggregates, (*self.keyed.key, WINDOW_START, WINDOW_END))
        stream = self.keyed.stream
        operator = self.spec.aggregate(id, self.keyed.key, aggregates, stream.schema)
        return stream._keyed(operator, windowed=self.spec.shared)

    def late(self, id: str) -> Stream:
        """The rows that come too late for these windows and that ``aggregate`` drops, as they are in the input.

        Only the container knows which rows are late. So every row travels, and the whole input is exchanged.
        """
        if not isinstance(self.spec.on, str):
            raise FlowError(
                f"operator '{id}': no row is late for {self.spec.describe()}.",
                remedy="Only windows by a column of event time have late rows.",
                operator=id,
            )
        stream = self.keyed.stream
        return stream._keyed(self.spec.late(id, self.keyed.key, stream.schema))
