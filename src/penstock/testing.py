"""For tests of flows: rows as a source, every sink in memory, inputs that stop or crash on purpose, a clock you set.

::

    from penstock import testing

    def test_counts():
        out = testing.collect(build_flow(), "out", sources={"lines": pl.DataFrame({"word": ["a", "b", "a"]})})
        assert out.sort("word").rows() == [("a", 2), ("b", 1)]

The flow is the one that production runs: its sources and sinks are swapped for the test, its steps are not touched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, time
from itertools import accumulate, pairwise
from typing import Any

import polars as pl

from penstock.config import Config
from penstock.connectors.base import Backlog, Offset, ReadResult, Sink, Source, SourceContext, SourceRange, Split
from penstock.connectors.sinks import MemorySink
from penstock.engines.job import start
from penstock.errors import FlowError, SourceError
from penstock.flow import Flow
from penstock.operators.windows import WINDOW_END, WINDOW_START


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

    def backlog(self, offset: Offset) -> Backlog:
        return Backlog(rows=self.frame.height - offset["row"])

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

    def backlog(self, offset: Offset) -> Backlog:
        return self.inner.backlog(offset["inner"])

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


@dataclass(frozen=True)
class Run:
    """What became of a run: the rows of each sink, what was late, what was set aside."""

    sinks: dict[str, pl.DataFrame]
    late: dict[str, int]
    """keyed operator -> rows that came too late for it"""
    dead_letters: pl.DataFrame
    """source (or operator), offset, reason, raw"""


def run(flow: Flow, *, sources: Mapping[str, Any] | None = None, **settings: Any) -> Run:
    """Run a bounded flow in this process with every sink in memory.

    Settings are those of ``penstock.Config``; ``instances=4, epoch_rows=10`` shows whether a result depends on either.
    """
    memories = {n.id: MemorySink() for n in flow._nodes if n.sink is not None}
    dead = MemorySink()
    changed = substitute(flow, sources=sources, sinks=memories)
    changed.dead_letters(dead)
    job = start(changed, engine="local", config=Config(**{"instances": 1, **settings}))
    job.wait()
    late = {o.id: o.late for o in job.status().stages if o.late}
    return Run({id: sink.frame() for id, sink in memories.items()}, late, dead.frame())


def run_local(flow: Flow, *, sources: Mapping[str, Any] | None = None, **settings: Any) -> dict[str, pl.DataFrame]:
    """As :func:`run`, but the rows only: sink id -> all its rows."""
    return run(flow, sources=sources, **settings).sinks


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


def assert_windows(found: pl.DataFrame, expected: Sequence[Mapping[str, Any]]) -> None:
    """A windowed result has exactly these rows, in any order. Columns that ``expected`` leaves out are not compared.

    Times may be written as text: ``"2026-01-01 12:00:10"``, or ``"12:00:10"`` on the day of the first window.
    """
    if WINDOW_START not in found.columns or WINDOW_END not in found.columns:
        raise AssertionError(f"this is no result of windows: it has the columns {', '.join(found.columns)}")
    if not expected:
        assert not found.height, f"windows were not expected: {found.rows(named=True)[:10]}"
        return
    names = list(expected[0])
    unknown = [name for row in expected for name in row if name not in found.columns or name not in names]
    assert not unknown, f"expected names the column '{unknown[0]}'; all rows must name the same of {found.columns}"
    day = found[WINDOW_START].min()
    wanted = Counter(tuple(_moment(row[name], found.schema[name], day) for name in names) for row in expected)
    given = Counter(found.select(names).rows())
    problems = [f"missing:    {_named(names, row)}" for row in (wanted - given).elements()]
    problems += [f"unexpected: {_named(names, row)}" for row in (given - wanted).elements()]
    assert not problems, "windows differ:\n  " + "\n  ".join(problems)


def _moment(value: Any, dtype: pl.DataType, day: Any) -> Any:
    if not isinstance(value, str) or not isinstance(dtype, pl.Datetime):
        return value
    if ":" in value and "-" not in value and day is not None:
        return datetime.combine(day.date(), time.fromisoformat(value))
    return datetime.fromisoformat(value)


def _named(names: Sequence[str], row: Sequence[Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in zip(names, row, strict=True))


def assert_late(run: Run, expected: int | Mapping[str, int]) -> None:
    """So many rows came too late: in all, or for each operator named."""
    found = sum(run.late.values()) if isinstance(expected, int) else {k: run.late.get(k, 0) for k in expected}
    wanted = expected if isinstance(expected, int) else dict(expected)
    assert found == wanted, f"late: {run.late or 'none'}, expected {wanted}"


def assert_any_cut(
    flow: Flow,
    *,
    sources: Mapping[str, Any] | None = None,
    epoch_rows: Sequence[int] = (1, 3, 10, 1000),
    instances: Sequence[int] = (1, 3),
    latest_by: Mapping[str, Sequence[str]] | None = None,
) -> Run:
    """The flow gives the same rows however its input is cut into epochs, and at any parallelism.

    Worth a test for every operator of your own. ``latest_by``: for a sink of updates, the columns that say which row
    replaces which; the last ones are compared then. Gives back the run that the others were compared with.
    """
    first: Run | None = None
    for rows_each in epoch_rows:
        for count in instances:
            given = run(flow, sources=sources, epoch_rows=rows_each, instances=count)
            if first is None:
                first = given
                continue
            for id, frame in given.sinks.items():
                by = (latest_by or {}).get(id)
                a, b = _settled(first.sinks[id], by), _settled(frame, by)
                where = f"epochs of {rows_each} rows and {count} instances"
                assert a == b, (
                    f"sink '{id}' differs with {where}:\n  only then: {_but(b, a)}\n  not then:  {_but(a, b)}"
                )
            assert given.late == first.late, f"late with {rows_each} rows an epoch: {given.late}, not {first.late}"
    assert first is not None, "nothing to compare: epoch_rows and instances must not be empty"
    return first


def _settled(frame: pl.DataFrame, latest_by: Sequence[str] | None) -> Counter[str]:
    if latest_by is not None:
        frame = frame.unique(list(latest_by), keep="last", maintain_order=True)
    return Counter(repr(row) for row in frame.rows())


def _but(a: Counter[str], b: Counter[str]) -> str:
    left = list((a - b).elements())
    return ", ".join(left[:5]) + (" …" if len(left) > 5 else "") or "nothing"


__all__ = [
    "CrashingSource",
    "ManualClock",
    "RowsSource",
    "Run",
    "StoppingSource",
    "assert_any_cut",
    "assert_late",
    "assert_windows",
    "collect",
    "rows",
    "run",
    "run_local",
    "stops_after",
    "substitute",
]
