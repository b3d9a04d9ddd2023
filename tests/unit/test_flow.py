"""Every way to write a wrong flow is refused at once, naming the step, with what to do about it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import polars as pl
import pytest

import penstock as ps
from penstock.errors import FlowError, SourceError
from penstock.flow import Graph, Node
from penstock.operators.windows import microseconds
from penstock.testing import rows

FRAME = pl.DataFrame(
    {
        "word": ["a"],
        "amount": [1.5],
        "count": [1],
        "ts": pl.Series([0]).cast(pl.Datetime("us")),
        "tags": [["x"]],
    }
)


def source(flow: ps.Flow | None = None, id: str = "in") -> ps.Stream:
    return (flow or ps.Flow("f")).source(id, rows(FRAME))


class NoEvent(ps.Operator):
    pass


class TooFew(ps.Operator):
    def on_event(self, key: Any) -> None:  # type: ignore[override]
        pass


class Unannotated(ps.Operator):
    def on_event(self, key: Any, event: Any, state: Any, emit: Any) -> None:
        pass


class Unstorable(ps.Operator):
    def on_event(self, key: Any, event: Any, state: ps.Value[threading.Lock], emit: Any) -> None:
        pass


class Unresolvable(ps.Operator):
    def on_event(self, key: Any, event: Any, state: ps.Value[Nowhere], emit: Any) -> None:  # type: ignore[name-defined]  # noqa: F821
        pass


def divides(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.head(1 // frame.height)


WRONG: dict[str, tuple[Callable[[], object], str, str]] = {
    # what: (how, what the message says, what the remedy says)
    "select an unknown column": (
        lambda: source().select("pick", "wrod"),
        "operator 'pick': there is no column 'wrod'",
        "Did you mean 'word'",
    ),
    "expression over an unknown column": (
        lambda: source().where("big", pl.col("amont") > 1),
        "operator 'big': there is no column 'amont'",
        "Did you mean 'amount'",
    ),
    "with_columns over an unknown column": (
        lambda: source().with_columns("add", y=pl.col("xyz") + 1),
        "operator 'add': there is no column 'xyz'",
        "The columns are word, amount",
    ),
    "key by an unknown column": (lambda: source().key_by("wort"), "there is no column 'wort'", "Did you mean 'word'"),
    "key by nothing": (lambda: source().key_by(), "after 'in': key_by needs at least one column", ""),
    "key by a list column": (
        lambda: source().key_by("tags"),
        "column 'tags' of type List(String) cannot be a key",
        "floats, text",
    ),
    "key by an expression": (
        lambda: source().key_by(pl.col("word").str.to_lowercase()),
        "key_by after 'in': it takes names of columns, not an expression",
        ".with_columns('with-word', word=...)",
    ),
    "key by a column as an expression": (
        lambda: source().key_by(pl.col("word")),
        "it takes names of columns",
        "Write 'word'",
    ),
    "a sum of decimals": (
        lambda: (
            source()
            .with_columns("d", d=pl.lit("1.5").cast(pl.Decimal(10, 2)))
            .key_by("word")
            .aggregate("s", s=ps.sum("d"))
        ),
        "sum(d) needs numbers",
        "(pl.col('price') * 100).cast(pl.Int64)",
    ),
    "the least decimal": (
        lambda: (
            source()
            .with_columns("d", d=pl.lit("1.5").cast(pl.Decimal(10, 2)))
            .key_by("word")
            .aggregate("s", s=ps.min("d"))
        ),
        "min(d) cannot compare",
        "(pl.col('price') * 100).cast(pl.Int64)",
    ),
    "a key of decimals": (
        lambda: source().with_columns("d", d=pl.lit("1.5").cast(pl.Decimal(10, 2))).key_by("d"),
        "column 'd' of type Decimal(precision=10, scale=2) cannot be a key",
        "cast(pl.String)",
    ),
    "rank by two columns": (
        lambda: source().key_by("word").top_k("top", 3, by=["amount", "word"]),
        "rows are ranked by one column, not by 2",
        "Ties are broken by the other columns",
    ),
    "a window before its key": (
        lambda: source().window(ps.tumbling("1s", on="ts")),
        "windows are kept for each key",
        ".key_by(column).window",
    ),
    "an aggregate over a running aggregate": (
        lambda: (
            source()
            .key_by("word", "amount")
            .aggregate("most", n=ps.count())
            .select("named", "word", "n")
            .key_by("word")
            .aggregate("mean", n=ps.mean("n"))
        ),
        "'most' is a stream of updates",
        "emit='final'",
    ),
    "the greatest of a batch": (
        lambda: source().with_columns("part", share=pl.col("amount") / pl.col("amount").max()),
        "operator 'part': max in with_columns looks at other rows",
        "key_by(...).aggregate",
    ),
    "the sum of others": (
        lambda: source().where("much", pl.col("amount") > pl.col("amount").mean().over("word")),
        "over in where looks at other rows",
        "",
    ),
    "the row before": (
        lambda: source().select("gap", d=pl.when(pl.col("amount") > 1).then(pl.col("amount").shift(1))),
        "shift in select looks at other rows",
        "ps.last_rows",
    ),
    "a running sum": (lambda: source().select("sum", d=pl.col("amount").cum_sum()), "cum_sum in select", ""),
    "a rank": (lambda: source().select("place", d=pl.col("amount").rank()), "rank in select", ""),
    "rank by an unknown column": (
        lambda: source().key_by("word").top_k("top", 3, by="amuont"),
        "operator 'top': there is no column 'amuont'",
        "Did you mean 'amount'",
    ),
    "aggregate an unknown column": (
        lambda: source().key_by("word").aggregate("agg", n=ps.sum("amuont")),
        "operator 'agg': sum(amuont) cannot be resolved",
        "word, amount",
    ),
    "two steps with one id": (
        lambda: source().where("in", pl.col("count") > 0),
        "two steps have the id 'in'",
        "a name of its own",
    ),
    "an id with a space": (
        lambda: source().select("my pick", "word"),
        "'my pick' is not an operator id",
        "letters, digits",
    ),
    "an empty id": (lambda: source().select("", "word"), "'' is not an operator id", "letters, digits"),
    "an id that is no text": (lambda: source().select(3, "word"), "3 is not an operator id", "letters, digits"),  # type: ignore[arg-type]
    "a path as a flow's name": (lambda: ps.Flow("a/b"), "'a/b' is not a flow name", "letters, digits"),
    "an unknown on_error": (
        lambda: ps.Flow("f", on_error="ignore"),
        "on_error='ignore' is not known",
        "dead_letter, fail",
    ),
    "a source that is none": (
        lambda: ps.Flow("f").source("in", [1, 2]),  # type: ignore[arg-type]
        "operator 'in': list is not a source",
        "ps.files",
    ),
    "a sink that is none": (lambda: source().sink("out", "out/"), "operator 'out': str is not a sink", "ps.parquet"),  # type: ignore[arg-type]
    "state without a key": (
        lambda: source().aggregate("agg", n=ps.count()),
        "operator 'agg': an aggregate keeps state",
        ".key_by(column).aggregate('agg'",
    ),
    "a custom operator without a key": (
        lambda: source().process("op", NoEvent()),
        "operator 'op': a custom operator keeps state",
        ".key_by(column).process('op'",
    ),
    "top_k of events without a key": (
        lambda: source().top_k("top", 3, by="amount"),
        "operator 'top': top_k here needs a result to rank",
        "key_by",
    ),
    "top_k of nothing": (
        lambda: source().key_by("word").top_k("top", 0, by="amount"),
        "operator 'top': k must be at least 1",
        "",
    ),
    "rank by a list": (
        lambda: source().key_by("word").top_k("top", 1, by="tags"),
        "operator 'top': rows cannot be ranked by 'tags'",
        "numbers, times or text",
    ),
    "rank per a value that changes": (
        lambda: (
            source().key_by("word").aggregate("agg", n=ps.count(), m=ps.max("count")).top_k("top", 1, by="n", per="m")
        ),
        "operator 'top': 'm' is a result that changes",
        "word",
    ),
    "no aggregate": (
        lambda: source().key_by("word").aggregate("agg"),
        "operator 'agg': there is nothing to aggregate",
        "n=ps.count()",
    ),
    "something that is no aggregate": (
        lambda: source().key_by("word").aggregate("agg", n="count"),  # type: ignore[arg-type]
        "operator 'agg': 'n' is not an aggregate but str",
        "ps.count()",
    ),
    "an aggregate named like the key": (
        lambda: source().key_by("word").aggregate("agg", word=ps.count()),
        "operator 'agg': 'word' is already the name of a key",
        "differently",
    ),
    "an aggregate named like a window's end": (
        lambda: source().key_by("word").window(ps.tumbling("1s", on="ts")).aggregate("agg", window_end=ps.count()),
        "operator 'agg': 'window_end' is already",
        "differently",
    ),
    "the sum of a text": (
        lambda: source().key_by("word").aggregate("agg", n=ps.sum("word")),
        "operator 'agg': sum(word) needs numbers, but its column has type String",
        "Cast",
    ),
    "the mean of a time": (
        lambda: source().key_by("word").aggregate("agg", n=ps.mean("ts")),
        "operator 'agg': mean(ts) needs numbers",
        "Cast",
    ),
    "the least list": (
        lambda: source().key_by("word").aggregate("agg", n=ps.min("tags")),
        "operator 'agg': min(tags) cannot compare",
        "numbers, times",
    ),
    "a window on a number": (
        lambda: source().key_by("word").window(ps.tumbling("1s", on="count")),
        "window after 'in': column 'count' has type Int64, not a time",
        "from_epoch",
    ),
    "a window on an unknown column": (
        lambda: source().key_by("word").window(ps.tumbling("1s", on="tz")),
        "there is no column 'tz'",
        "The columns are word",
    ),
    "a window that is none": (lambda: source().key_by("word").window("30s"), "'30s' is not a window", "ps.tumbling"),  # type: ignore[arg-type]
    "a duration that is none": (
        lambda: ps.tumbling("a while", on="ts"),
        "window size: 'a while' is not a duration",
        "'30s'",
    ),
    "a window of no length": (lambda: ps.tumbling(0, on="ts"), "greater than zero", "size='30s'"),
    "a window that hops over rows": (
        lambda: ps.hopping("1s", every="2s", on="ts"),
        "hops further than it is long",
        "at most",
    ),
    "negative lateness": (lambda: ps.tumbling("1s", on="ts", lateness=-1), "lateness cannot be negative", "0s"),
    "a predicate that is a number": (
        lambda: source().where("w", pl.col("count") + 1),
        "operator 'w': its predicate gives Int64",
        "",
    ),
    "types that do not fit": (
        lambda: source().with_columns("w", y=pl.col("word") - pl.col("ts")),
        "operator 'w': with_columns does not fit its input",
        "word",
    ),
    "a union of different columns": (
        lambda: (lambda s: s.union("u", s.select("less", "word")))(source()),
        "operator 'u': 'in' and 'less' have different columns",
        "Select the same columns",
    ),
    "a union of one": (lambda: source().union("u"), "operator 'u': union needs at least one other", ""),
    "a union with itself": (
        lambda: (lambda s: s.union("u", s))(source()),
        "operator 'u': a stream cannot be united with itself",
        "",
    ),
    "a union with another flow": (
        lambda: source().union("u", source(id="other")),
        "operator 'u': 'other' belongs to another flow",
        "",
    ),
    "a batch function that fails on no rows": (
        lambda: source().map_batches("m", divides),
        "operator 'm': its function raised ZeroDivisionError on an empty batch",
        "schema={column: type}",
    ),
    "a batch function that returns no table": (
        lambda: source().map_batches("m", lambda f: 3),
        "operator 'm': its function raised",
        "schema={column: type}",
    ),
    "a batch function that is none": (lambda: source().map_batches("m", 3), "operator 'm': 3 is not a function", ""),  # type: ignore[arg-type]
    "a row function that is none": (
        lambda: source().map_rows("m", "x", schema={"a": int}),  # type: ignore[arg-type]
        "operator 'm': 'x' is not a function",
        "",
    ),
    "a schema that is none": (
        lambda: source().map_rows("m", lambda r: r, schema={"a": "whatever"}),
        "operator 'm':",
        "",
    ),
    "a reserved column": (
        lambda: source().with_columns("w", __x=pl.lit(1)),
        "operator 'w': column '__x' begins with two underscores",
        "Rename",
    ),
    "an operator without on_event": (
        lambda: source().key_by("word").process("op", NoEvent(), schema={"a": int}),
        "operator 'op': NoEvent does not define on_event",
        "def on_event",
    ),
    "an operator that takes no event": (
        lambda: source().key_by("word").process("op", TooFew(), schema={"a": int}),
        "operator 'op': on_event must take at least key and event",
        "def on_event",
    ),
    "a state without a type": (
        lambda: source().key_by("word").process("op", Unannotated(), schema={"a": int}),
        "operator 'op': parameter 'state' of on_event is neither",
        "ps.Value[int]",
    ),
    "a state that cannot be stored": (
        lambda: source().key_by("word").process("op", Unstorable(), schema={"a": int}),
        "operator 'op': state 'state' of type",
        "dataclass",
    ),
    "a state of an unknown type": (
        lambda: source().key_by("word").process("op", Unresolvable(), schema={"a": int}),
        "operator 'op': an annotation of on_event cannot be resolved",
        "module level",
    ),
    "an operator that is none": (
        lambda: source().key_by("word").process("op", print, schema={"a": int}),  # type: ignore[arg-type]
        "operator 'op': builtin_function_or_method is not a ps.Operator",
        "Derive",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_flow_is_refused_where_it_is_written(what: str) -> None:
    how, says, remedy = WRONG[what]
    with pytest.raises(FlowError) as error:
        how()
    assert says in error.value.message
    assert remedy in error.value.remedy
    assert "\n" not in str(error.value)


def test_a_flow_without_a_sink() -> None:
    flow = ps.Flow("f")
    source(flow)
    with pytest.raises(FlowError, match="flow 'f' has no sink"):
        flow.graph()


def test_a_flow_without_a_source() -> None:
    with pytest.raises(FlowError, match="flow 'f' has no source"):
        ps.Flow("f").graph()


def test_a_result_that_is_not_used() -> None:
    flow = ps.Flow("f")
    stream = source(flow)
    stream.sink("out", ps.memory())
    stream.where("loose", pl.col("count") > 1)
    with pytest.raises(FlowError, match="the result of 'loose' is not used"):
        flow.graph()


def test_a_cycle() -> None:
    schema = pl.Schema({"a": pl.Int64()})
    nodes = (
        Node("in", (), schema, source=rows([{"a": 1}])),
        Node("x", ("in", "y"), schema),
        Node("y", ("x",), schema),
        Node("out", ("y",), schema, sink=ps.memory()),
    )
    with pytest.raises(FlowError, match="the flow has a cycle: 'x' reads from 'y'"):
        Graph("f", nodes)


def test_a_step_that_reads_from_nowhere() -> None:
    schema = pl.Schema({"a": pl.Int64()})
    nodes = (Node("in", (), schema, source=rows([{"a": 1}])), Node("out", ("gone",), schema, sink=ps.memory()))
    with pytest.raises(FlowError, match="operator 'out' reads from 'gone'"):
        Graph("f", nodes)
    with pytest.raises(FlowError, match="two steps have the id 'in'"):
        Graph("f", (nodes[0], nodes[0]))


def test_a_source_that_does_not_know_its_columns_is_named() -> None:
    with pytest.raises(SourceError, match="source 'lines'"):
        ps.Flow("f").source("lines", ps.files("/nowhere/at/all/*.parquet"))


def test_schemas_follow_the_steps() -> None:
    stream = source().select("s", "word", twice=pl.col("amount") * 2)
    assert dict(stream.schema) == {"word": pl.String(), "twice": pl.Float64()}
    counted = stream.key_by("word").aggregate("n", n=ps.count(), top=ps.max("twice"))
    assert dict(counted.schema) == {"word": pl.String(), "n": pl.Int64(), "top": pl.Float64()}
    windows = (
        source(id="b").key_by("word", "count").window(ps.tumbling("1s", on="ts")).aggregate("w", m=ps.mean("amount"))
    )
    assert windows.schema.names() == ["word", "count", "window_start", "window_end", "m"]
    assert windows.top_k("t", 1, by="m").schema.names()[-1] == "rank"


def test_streams_are_values() -> None:
    """A stream used twice is two branches, not one changed twice."""
    flow = ps.Flow("f")
    stream = source(flow)
    stream.where("a", pl.col("count") > 1).sink("one", ps.memory())
    stream.where("b", pl.col("count") < 1).sink("two", ps.memory()).sink("three", ps.memory())
    assert [n.id for n in flow.graph().nodes] == ["in", "a", "one", "b", "two", "three"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("30s", 30_000_000),
        ("500ms", 500_000),
        ("1h30m", 5_400_000_000),
        ("1.5s", 1_500_000),
        (2, 2_000_000),
        ("1 d", 86_400_000_000),
        ("7us", 7),
    ],
)
def test_durations(text: str | int, expected: int) -> None:
    assert microseconds(text, "size") == expected


@pytest.mark.parametrize("text", ["", "s", "30", "30 parsecs", "1h30", True, None])
def test_durations_that_are_none(text: Any) -> None:
    with pytest.raises(FlowError):
        microseconds(text, "size")
