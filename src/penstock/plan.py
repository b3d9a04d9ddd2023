"""From a flow to stages.

A stage is a root (a source or a keyed operator) and the stateless steps after it, up to the next exchange or sink.
Steps that follow a union run in the stage of every input: a union moves no data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import polars as pl

from penstock.connectors.base import Sink, Source
from penstock.flow import Graph, Node
from penstock.ids import StageId
from penstock.operators.base import KeyedOperator, visible
from penstock.operators.steps import BatchStep


@dataclass(frozen=True)
class Edge:
    """An exchange: rows of ``node`` in ``upstream`` go to the keyed operator at the root of ``downstream``."""

    upstream: StageId
    node: str
    downstream: StageId
    port: int = 0
    ordered: bool = True
    """Rows of a source leave in source order. False: a function on batches made it impossible to tell."""


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
        inside = {self.root.id, *(s.id for s in self.steps)}
        return any(len(inside.intersection(s.inputs)) > 1 for s in self.steps)

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


def compile_flow(graph: Graph) -> Plan:
    """Cut the graph into stages, in topological order."""
    consumers: dict[str, list[Node]] = {n.id: [] for n in graph.nodes}
    for node in graph.nodes:
        for i in node.inputs:
            consumers[i].append(node)
    parts: list[tuple[Node, list[Node], list[Node], list[Edge]]] = []
    for root in graph.nodes:
        if root.kind not in ("source", "keyed"):
            continue
        reached, tagged, ordered = {root.id}, {root.id}, {root.id}
        steps: list[Node] = []
        sinks: list[Node] = []
        outs: list[Edge] = []
        for node in graph.nodes:  # topological order
            sources = [i for i in node.inputs if i in reached]
            if not sources:
                continue
            if node.kind == "sink":
                sinks.append(node)
            elif node.kind == "keyed":
                # One input may feed several ports, and two branches of a stage may feed one join.
                outs += [
                    Edge(StageId(root.id), name, StageId(node.id), port, name in ordered)
                    for port, name in enumerate(node.inputs)
                    if name in reached
                ]
            else:
                steps.append(node)
                reached.add(node.id)
                # A function on batches keeps the order of its rows, we trust, but not the tags that say what it was.
                if tagged.issuperset(sources) and not isinstance(node.step, BatchStep):
                    tagged.add(node.id)
                if ordered.issuperset(sources) and (len(sources) == 1 or node.id in tagged):
                    ordered.add(node.id)
        parts.append((root, steps, sinks, outs))
    all_edges = [e for *_, outs in parts for e in outs]
    stages = tuple(
        Stage(
            StageId(root.id),
            index,
            root,
            tuple(steps),
            tuple(sinks),
            tuple(outs),
            tuple(e for e in all_edges if e.downstream == root.id),
        )
        for index, (root, steps, sinks, outs) in enumerate(parts)
    )
    return Plan(graph, stages, {s.id: s for s in stages})


def columns_text(schema: pl.Schema) -> str:
    """Names and types, short: every time is kept in microseconds."""
    return ", ".join(
        f"{name}: {'Datetime' if isinstance(dtype, pl.Datetime) and dtype.time_zone is None else dtype}"
        for name, dtype in schema.items()
    )


def empty(schema: pl.Schema) -> pl.DataFrame:
    return pl.DataFrame(schema=schema)


__all__ = ["Edge", "Plan", "Sink", "Stage", "compile_flow", "empty"]
