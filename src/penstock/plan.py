"""From a flow to stages.

A stage is a root (a source or a keyed operator) and the stateless steps after it, up to the next exchange or sink.
Steps that follow a union run in the stage of every input: a union moves no data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import polars as pl

from penstock.connectors.base import Sink, Source
from penstock.errors import FlowError
from penstock.flow import Graph, Node
from penstock.ids import StageId
from penstock.operators.base import BY, KeyedOperator, visible
from penstock.operators.lookup import LookupStep
from penstock.operators.merge import Merge
from penstock.operators.steps import BatchStep, ExprStep


@dataclass(frozen=True)
class Edge:
    """An exchange: rows of ``node`` in ``upstream`` go to the keyed operator at the root of ``downstream``."""

    upstream: StageId
    node: str
    downstream: StageId
    port: int = 0
    tagged: bool = False
    """Rows carry their order (``operators/order.py``)."""
    numbered: bool = False
    """Rows of one cause are numbered, too: somebody must tell them apart behind the exchange."""
    whole: bool = False
    """Rows travel as they are and are prepared behind the exchange, all of them in order."""
    marked: bool = False
    """The watermark at a row is known behind the exchange only: every task tells all of them when time rose."""


@dataclass(frozen=True)
class Stage:
    id: StageId
    index: int
    root: Node
    steps: tuple[Node, ...]
    """Steps and unions, in order."""
    sinks: tuple[Node, ...]
    outs: tuple[Edge, ...]
    ins: tuple[Edge, ...]
    tells: bool = False
    """Somebody behind needs to know in which order its rows are to be seen."""
    by_row: frozenset[str] = frozenset()
    """Functions on batches that get one row at a time: which row caused which must be known."""
    multiplies: bool = False
    """Steps may make several rows of one."""
    depth: int = 0
    """How many tags its inputs have in common, if rows of one cause may come by several ways."""

    @property
    def source(self) -> Source | None:
        return self.root.source

    @property
    def keyed(self) -> KeyedOperator | None:
        return self.root.keyed

    @cached_property
    def stateful(self) -> bool:
        return self.keyed is not None and self.keyed.table() is not None

    @property
    def forks(self) -> bool:
        """Rows take several ways within the stage and come together again: their order must be restored there."""
        return _forks(self.root, self.steps)

    @property
    def operators(self) -> tuple[str, ...]:
        return (self.root.id, *(s.id for s in self.steps), *(s.id for s in self.sinks))


@dataclass(frozen=True)
class Plan:
    graph: Graph
    stages: tuple[Stage, ...]
    by_id: Mapping[StageId, Stage] = field(repr=False)

    @property
    def sources(self) -> dict[str, Source]:
        return {n.id: n.source for n in self.graph.nodes if n.source is not None}

    @property
    def sinks(self) -> dict[str, Node]:
        return {n.id: n for n in self.graph.nodes if n.sink is not None}

    def stage_of(self, operator: str) -> Stage | None:
        """The stage an operator runs in (the first, when a union put it into several), or that has this uid."""
        return next((s for s in self.stages if operator in s.operators or operator == s.root.uid), None)

    @property
    def own_instances(self) -> dict[StageId, int]:
        """Stages that ask for a number of instances of their own."""
        return {s.id: s.root.partition.instances for s in self.stages if s.root.partition is not None}

    @property
    def own_slices(self) -> dict[StageId, int]:
        """Stages that ask for a number of slices of their own."""
        return {s.id: s.root.slices for s in self.stages if s.root.slices is not None}

    def fingerprint(self) -> dict[str, Any]:
        """What the checkpointed state depends on, by stage."""
        return {s.id: s.keyed.fingerprint() for s in self.stages if s.keyed is not None and s.stateful}

    def explain(self) -> str:
        lines = [f"flow {self.graph.name}"]
        for stage in self.stages:
            kind = "source" if stage.source else "keyed"
            key = f" by {', '.join(visible(stage.keyed.key)) or 'nothing: one container'}" if stage.keyed else ""
            uid = f", uid '{stage.root.uid}', from {stage.root.partition.instances}" if stage.root.partition else ""
            own = f", {stage.root.slices} slices" if stage.root.slices is not None else ""
            lines.append(f"  stage {stage.index} '{stage.id}' ({kind}{key}{uid}{own})")
            for node in (stage.root, *stage.steps):
                lines.append(f"    {node.id}: {node.describe()} -> [{columns_text(node.schema)}]")
            for sink in stage.sinks:
                lines.append(f"    {sink.id}: sink {sink.describe()}")
            for edge in stage.outs:
                side = f" (input {edge.port + 1})" if len(self.by_id[edge.downstream].root.inputs) > 1 else ""
                lines.append(f"    exchange {edge.node} -> '{edge.downstream}'{side}")
        return "\n".join(lines)


def compile_flow(graph: Graph, *, order: bool = True) -> Plan:
    """Cut the graph into stages, in topological order. Without ``order`` rows behind keyed stages come in any: to
    measure what it costs, and for nothing else.
    """
    graph, depths = merged_inputs(graph)
    return Plan(graph, *_with_order(_parts(graph), depths, order=order))


_Part = tuple[Node, list[Node], list[Node], list["Edge"]]
"""A root, its steps, its sinks, its exchanges."""


def _parts(graph: Graph) -> list[_Part]:
    parts: list[_Part] = []
    for root in graph.nodes:
        if root.kind not in ("source", "keyed"):
            continue
        reached = {root.id}
        steps: list[Node] = []
        sinks: list[Node] = []
        outs: list[Edge] = []
        for node in graph.nodes:  # topological order
            if not reached.intersection(node.inputs):
                continue
            if node.kind == "sink":
                sinks.append(node)
            elif node.kind == "keyed":
                # One input may feed several ports, and two branches of a stage may feed one join.
                outs += [
                    Edge(StageId(root.id), name, StageId(node.id), port)
                    for port, name in enumerate(node.inputs)
                    if name in reached
                ]
            else:
                steps.append(node)
                reached.add(node.id)
        parts.append((root, steps, sinks, outs))
    return parts


def _with_order(
    parts: Sequence[_Part], depths: Mapping[str, int], *, order: bool
) -> tuple[tuple[Stage, ...], dict[StageId, Stage]]:
    """Stages and edges, with what each must do so that order behind keyed stages is a function of the data alone.

    From the end to the beginning, since order is made and carried only where somebody behind needs it.
    """
    roots = {root.id: root for root, *_ in parts}
    ins: dict[str, list[Edge]] = {root.id: [] for root in roots.values()}
    for *_, outs in parts:
        for edge in outs:
            ins[edge.downstream].append(edge)
    tells: dict[str, bool] = {}
    edges: dict[tuple[str, str, int], Edge] = {}
    for root, _, _, outs in reversed(parts):
        for edge in outs:
            edges[edge.upstream, edge.downstream, edge.port] = _ordered(edge, roots, ins, tells) if order else edge
        tells[root.id] = any(edges[e.upstream, e.downstream, e.port].tagged for e in outs)
    stages = []
    for index, (root, steps, sinks, outs) in enumerate(parts):
        here = tuple(edges[e.upstream, e.downstream, e.port] for e in outs)
        there = tuple(edges[e.upstream, e.downstream, e.port] for e in ins[root.id])
        forks = _forks(root, steps)
        merged = any(len([e for e in ins[edge.downstream] if e.port == edge.port]) > 1 for edge in outs)
        seen = any(t.ordered or t.timed for t in (roots[e.downstream].keyed for e in outs) if t is not None)
        # Rows of a source are in order as they come: who caused them matters only where ways come together again.
        needed = (forks and seen) or (tells[root.id] and (merged or root.keyed is not None))
        several = forks or not all(isinstance(s.step, ExprStep | LookupStep) for s in steps)
        stages.append(
            Stage(
                StageId(root.id),
                index,
                root,
                tuple(steps),
                tuple(sinks),
                here,
                there,
                tells[root.id],
                _batches_by_row(root, steps, sinks, outs) if needed else frozenset(),
                several,
                depths.get(root.id, 0),
            )
        )
    return tuple(stages), {s.id: s for s in stages}


# -- several inputs --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Order:
    """What the tags of a stage's rows mean."""

    clock: str
    """The stage that gave the first ``depth`` of them: rows with tags of one clock can be compared."""
    depth: int
    width: int
    """How many there are at most."""


def merged_inputs(graph: Graph) -> tuple[Graph, dict[str, int]]:
    """With a stage that puts rows in order before every operator that depends on order and has several inputs; and how
    many tags the inputs of others have in common.
    """
    orders: dict[str, _Order] = {}
    depths: dict[str, int] = {}
    changed = {n.id: n for n in graph.nodes}
    for root, *_ in _parts(graph):
        keyed = root.keyed
        if keyed is None:
            orders[root.id] = _Order(root.id, 1, 1)
            continue
        ups = {p[0].id: p for p in _parts(graph) if any(e.downstream == root.id and e.port == 0 for e in p[3])}
        given = [orders[u] for u in ups]
        width = max(o.width for o in given) + 1 + (len(ups) > 1)
        clocks = {o.clock for o in given}
        on = _order_column(graph, root, len(clocks) > 1) if len(ups) > 1 and len(root.inputs) == 1 else None
        if on is not None:
            schema = changed[root.inputs[0]].schema
            merge = Merge(f"{root.id}.order", root.id, keyed.keys_at(0), on, schema, tuple(ups), width)
            changed[merge.id] = Node(merge.id, root.inputs, schema, keyed=merge)
            changed[root.id] = replace(root, inputs=(merge.id,))
            width += 4
            given = [_Order(merge.id, width, width)]
        elif len(ups) > 1:
            depths[root.id] = given[0].depth
        if keyed.hands_on and not keyed.timed:
            orders[root.id] = replace(given[0], width=width)
        else:
            width = 2 + width if keyed.hands_on else 2
            orders[root.id] = _Order(root.id, width, width)
    nodes = []
    for node in graph.nodes:
        if (before := changed.get(f"{node.id}.order")) is not None and changed[node.id].inputs == (before.id,):
            nodes.append(before)
        nodes.append(changed[node.id])
    return (replace(graph, nodes=tuple(nodes)) if len(nodes) > len(graph.nodes) else graph), depths


def _order_column(graph: Graph, root: Node, incomparable: bool) -> str | None:
    """By which time the inputs of an operator are put in order; None: there is no need."""
    keyed = root.keyed
    assert keyed is not None
    if keyed.clocked or not keyed.merges:
        return None
    if keyed.timed and (on := keyed.time_at(0)) is not None:
        return on
    if not incomparable:
        return None  # rows of one source: by their position in it
    if _given_order(graph, root):
        return BY
    raise FlowError(
        f"operator '{root.id}' depends on the order of its rows, which those of several sources have not.",
        remedy="Give one when you unite them, a column of event time: .union(id, other, by='ts'). Counts, integer "
        "sums, min, max and distinct need no order.",
        operator=root.id,
    )


def _given_order(graph: Graph, root: Node) -> bool:
    """Whether the last union of sources before an operator says by which time they are put in order."""
    nodes = {n.id: n for n in graph.nodes}
    at = nodes[root.inputs[0]]
    while at.step is not None or (at.kind == "union" and at.by is None):
        at = nodes[at.inputs[0]]
    return at.by is not None


def _forks(root: Node, steps: Sequence[Node]) -> bool:
    inside = {root.id, *(s.id for s in steps)}
    return any(len(inside.intersection(s.inputs)) > 1 for s in steps)


def _batches_by_row(root: Node, steps: Sequence[Node], sinks: Sequence[Node], outs: Sequence[Edge]) -> frozenset[str]:
    """Functions on batches whose rows could not be brought into order with others. Of a source's rows those before the
    first fork can: what such a function gives is numbered afresh.
    """
    trunk, at = set(), root.id
    while root.source is not None:
        users = [s for s in (*steps, *sinks) if at in s.inputs]
        if len(users) != 1 or users[0].sink is not None or any(e.node == at for e in outs):
            break
        at = users[0].id
        if users[0].by is not None:
            break
        trunk.add(at)
    return frozenset(s.id for s in steps if isinstance(s.step, BatchStep) and s.id not in trunk)


def _ordered(
    edge: Edge, roots: Mapping[str, Node], ins: Mapping[str, Sequence[Edge]], tells: Mapping[str, bool]
) -> Edge:
    """What an exchange must do for the order of rows at the operator downstream."""
    target = roots[edge.downstream].keyed
    assert target is not None
    origins = [roots[e.upstream].keyed for e in ins[edge.downstream]]
    timed = target.timed and not target.clocked and target.time_at(edge.port) is not None
    here = roots[edge.upstream].keyed
    behind_keyed = any(o is not None for o in origins)
    untimed = any(o is not None and not o.timed for o in origins)
    whole = behind_keyed and (target.ordered or (timed and untimed))
    hands_on = target.hands_on and tells[edge.downstream]
    marked = whole and timed and (here is None or not here.timed)
    tagged = whole or hands_on or (timed and here is not None)
    return replace(edge, tagged=tagged, numbered=hands_on or marked, whole=whole, marked=marked)


def columns_text(schema: pl.Schema) -> str:
    """Names and types, short: every time is kept in microseconds."""
    return ", ".join(
        f"{name}: {'Datetime' if isinstance(dtype, pl.Datetime) and dtype.time_zone is None else dtype}"
        for name, dtype in schema.items()
    )


def empty(schema: pl.Schema) -> pl.DataFrame:
    return pl.DataFrame(schema=schema)


__all__ = ["Edge", "Plan", "Sink", "Stage", "compile_flow", "empty"]
