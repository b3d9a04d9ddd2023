"""For tests of flows: rows as a source, every sink in memory, inputs that stop or crash on purpose, a clock you set.

::

    from penstock import testing

    def test_counts():
        out = testing.collect(build_flow(), "out", sources={"lines": pl.DataFrame({"word": ["a", "b", "a"]})})
        assert out.sort("word").rows() == [("a", 2), ("b", 1)]

The flow is the one that production runs: its sources and sinks are swapped for the test, its steps are not touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import polars as pl

from penstock.config import Config
from penstock.connectors.base import Offset, ReadResult, Sink, Source, SourceContext, SourceRange, Split
from penstock.connectors.sinks import MemorySink
from penstock.engines.job import start
from penstock.errors import FlowError, SourceError
from penstock.flow import Flow


class RowsSource(Source):
    """See :func:`rows`."""

    def __init__(self, frame: pl.DataFrame, epochs: Sequence[int] | None = None) -> None:
        self.frame = frame
        self.ends = list(accumulate(epochs)) if epochs is not None else None
        if self.ends is not None and (any(n < 1 for n in epochs or ()) or (self.ends or [0])[-1] != frame.height):
            raise FlowError(
                f"epochs={list(epochs or ())} does not cut {frame.height} rows.",
                remedy="Give the number of rows of each epoch, all above 0; together they are all the rows.",
            )

    def schema(self) -> pl.Schema:
        return self.frame.schema

    def initial_offset(self) -> Offset:
        return {"row": 0}

    def plan(self, start: Offset, rows_max: int) -> SourceRange | None:
        first = start["row"]
        if first >= self.frame.height:
            return None
        last = min(first + rows_max, self.frame.height)
        if self.ends is not None:
            last = next(end for end in self.ends if end > first)
        return SourceRange(start, {"row": last}, last - first)

    def splits(self, start: Offset, end: Offset, parallelism: int) -> list[Split]:
        first, last = start["row"], end["row"]
        cuts = sorted({first + (last - first) * k // parallelism for k in range(parallelism + 1)})
        return [{"first": a, "last": b} for a, b in pairwise(cuts)]

    def read(self, source_id: str, split: Split) -> ReadResult:
        return ReadResult(self.frame[split["first"] : split["last"]])

    def exhausted(self, offset: Offset) -> bool:
        return bool(offset["row"] >= self.frame.height)

    def describe(self) -> str:
        return f"{self.frame.height} given rows"


def rows(data: pl.DataFrame | Sequence[Mapping[str, Any]], *, epochs: Sequence[int] | None = None) -> RowsSource:
    """A source of given rows: a DataFrame, or dicts. ``epochs`` cuts them into epochs of so many rows each."""
    return RowsSource(data if isinstance(data, pl.DataFrame) else pl.DataFrame(data), epochs)


class _Wrapped(Source):
    """A source that passes everything on."""

    def __init__(self, inner: Source) -> None:
        self.inner = inner
        self.punctuated = inner.punctuated

    def schema(self) -> pl.Schema:
        return self.inner.schema()

    def initial_offset(self) -> Offset:
        return {"inner": self.inner.initial_offset(), "rows": 0}

    def plan(self, start: Offset, rows_max: int) -> SourceRange | None:
        found = self.inner.plan(start["inner"], rows_max)
        if found is None:
            return None
        end = {"inner": found.end, "rows": start["rows"] + found.rows_estimate}
        return SourceRange(start, end, found.rows_estimate, found.facts)

    def splits(self, start: Offset, end: Offset, parallelism: int) -> list[Split]:
        return self.inner.splits(start["inner"], end["inner"], parallelism)

    def read(self, source_id: str, split: Split) -> ReadResult:
        return self.inner.read(source_id, split)

    def exhausted(self, offset: Offset) -> bool:
        return self.inner.exhausted(offset["inner"])

    def open(self, context: SourceContext) -> None:
        self.inner.open(context)

    def remember(self, facts: Sequence[Any]) -> None:
        self.inner.remember(facts)

    def committed(self, end: Offset) -> None:
        self.inner.committed(end["inner"])

    def close(self) -> None:
        self.inner.close()


class StoppingSource(_Wrapped):
    """See :func:`stops_after`."""

    def __init__(self, inner: Source, rows: int) -> None:
        super().__init__(inner)
        self.rows = rows

    def plan(self, start: Offset, rows_max: int) -> SourceRange | None:
        left = self.rows - start["rows"]
        return super().plan(start, min(rows_max, left)) if left > 0 else None

    def exhausted(self, offset: Offset) -> bool:
        return bool(offset["rows"] >= self.rows) or super().exhausted(offset)


def stops_after(source: Source, rows: int) -> StoppingSource:
    """The beginning of a source, as if it ended there: about ``rows`` rows (sources plan whole files, say)."""
    return StoppingSource(source, rows)


class CrashingSource(_Wrapped):
    """A source that fails when ``rows`` rows have been planned: once, so that a second run of the flow goes through.

    What is tested is that the job ends with an error, and that running again with the same checkpoint gives the output
    of an undisturbed run.
    """

    def __init__(self, inner: Source, rows: int) -> None:
        super().__init__(inner)
        self.rows = rows
        self.crashed = False

    def plan(self, start: Offset, rows_max: int) -> SourceRange | None:
        if start["rows"] >= self.rows and not self.crashed:
            self.crashed = True
            raise SourceError(
                f"crashed on purpose after {start['rows']} rows.", remedy="Run again with the same checkpoint."
            )
        return super().plan(start, rows_max)


class ManualClock:
    """A clock that stands still until it is told: ``start(flow, clock=clock)``, ``ps.generator(..., clock=clock)``."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError("time does not go back")
        self.now_s += seconds


def substitute(
    flow: Flow, *, sources: Mapping[str, Any] | None = None, sinks: Mapping[str, Sink] | None = None
) -> Flow:
    """The same flow with other sources (a Source, a DataFrame or dicts) and sinks, by id."""
    given = {id: s if isinstance(s, Source) else rows(s) for id, s in (sources or {}).items()}
    others = dict(sinks or {})
    out = Flow(flow.name, on_error=flow.on_error)
    out._dead_letters = flow._dead_letters
    nodes = []
    for node in flow._nodes:
        if node.source is not None and node.id in given:
            source = given.pop(node.id)
            if dict(source.schema()) != dict(node.schema):
                raise FlowError(
                    f"the rows given for source '{node.id}' have {dict(source.schema())}, not {dict(node.schema)}.",
                    remedy="Give the same columns with the same types.",
                    operator=node.id,
                )
            node = replace(node, source=source)
        elif node.sink is not None and node.id in others:
            node = replace(node, sink=others.pop(node.id))
        nodes.append(node)
    for left, kind in ((given, "source"), (others, "sink")):
        if left:
            raise FlowError(f"flow '{flow.name}' has no {kind} '{next(iter(left))}'.", remedy="Check the id.")
    out._nodes = tuple(nodes)
    return out


def run_local(flow: Flow, *, sources: Mapping[str, Any] | None = None, **settings: Any) -> dict[str, pl.DataFrame]:
    """Run a bounded flow in this process with every sink in memory: sink id -> all its rows.

    Settings are those of ``penstock.Config``; ``instances=4, epoch_rows=10`` shows whether a result depends on either.
    """
    memories = {n.id: MemorySink() for n in flow._nodes if n.sink is not None}
    start(
        substitute(flow, sources=sources, sinks=memories), engine="local", config=Config(**{"instances": 1, **settings})
    ).wait()
    return {id: sink.frame() for id, sink in memories.items()}


def collect(
    flow: Flow, sink: str | None = None, *, sources: Mapping[str, Any] | None = None, **settings: Any
) -> pl.DataFrame:
    """Run a bounded flow in this process; the rows of one sink, which may be left out if there is only one."""
    ids = [n.id for n in flow._nodes if n.sink is not None]
    if sink is None and len(ids) == 1:
        sink = ids[0]
    if sink not in ids:
        which = f"no sink '{sink}'" if sink is not None else f"{len(ids)} sinks"
        raise FlowError(f"flow '{flow.name}' has {which}.", remedy=f"Name one of: {', '.join(ids)}.")
    return run_local(flow, sources=sources, **settings)[sink]


__all__ = [
    "CrashingSource",
    "ManualClock",
    "RowsSource",
    "StoppingSource",
    "collect",
    "rows",
    "run_local",
    "stops_after",
    "substitute",
]
