"""From a flow to stages: what is fused, what is exchanged, and what explain says of it."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

import penstock as ps
from penstock.errors import FlowError
from penstock.plan import Plan, compile_flow
from penstock.testing import rows

FRAME = pl.DataFrame({"k": ["a"], "x": [1.0], "t": pl.Series([0]).cast(pl.Datetime("us"))})


class Echo(ps.Operator):
    def on_event(self, key: Any, event: Any, seen: ps.Value[int], emit: Any) -> None:
        emit(k=key)


class Stateless(ps.Operator):
    def on_event(self, key: Any, event: Any, emit: Any) -> None:
        emit(k=key)


def shape(plan: Plan) -> dict[str, tuple[list[str], list[str], list[tuple[str, str]]]]:
    """stage -> (steps, sinks, exchanges)"""
    return {
        s.id: ([n.id for n in s.steps], [n.id for n in s.sinks], [(e.node, e.downstream) for e in s.outs])
        for s in plan.stages
    }


def planned(flow: ps.Flow) -> Plan:
    return compile_flow(flow.graph())


def test_stateless_steps_run_where_their_rows_are() -> None:
    flow = ps.Flow("f")
    stream = flow.source("in", rows(FRAME)).where("w", pl.col("x") > 0).select("s", "k").map_batches("m", lambda f: f)
    stream.sink("out", ps.memory())
    plan = planned(flow)
    assert shape(plan) == {"in": (["w", "s", "m"], ["out"], [])}
    assert not plan.stages[0].stateful and not plan.stages[0].forks
    assert plan.fingerprint() == {}


def test_a_key_begins_a_stage() -> None:
    flow = ps.Flow("f")
    counts = flow.source("in", rows(FRAME)).key_by("k").aggregate("count", n=ps.count())
    counts.where("many", pl.col("n") > 1).sink("out", ps.memory())
    counts.top_k("top", 3, by="n").sink("best", ps.memory())
    plan = planned(flow)
    assert shape(plan) == {
        "in": ([], [], [("in", "count")]),
        "count": (["many"], ["out"], [("count", "top")]),
        "top": ([], ["best"], []),
    }
    assert [s.index for s in plan.stages] == [0, 1, 2]
    assert list(plan.fingerprint()) == ["count", "top"]
    assert plan.stage_of("many") is plan.by_id[plan.stages[1].id]
    assert plan.stage_of("nowhere") is None


def test_a_union_moves_no_data() -> None:
    """Steps after it run in the stage of each input; the keyed stage has two upstream stages."""
    flow = ps.Flow("f")
    left, right = flow.source("left", rows(FRAME)), flow.source("right", rows(FRAME))
    both = left.union("both", right).with_columns("twice", y=pl.col("x") * 2)
    both.key_by("k").aggregate("count", n=ps.count()).sink("out", ps.memory())
    both.sink("raw", ps.memory())
    plan = planned(flow)
    assert shape(plan) == {
        "left": (["both", "twice"], ["raw"], [("twice", "count")]),
        "right": (["both", "twice"], ["raw"], [("twice", "count")]),
        "count": ([], ["out"], []),
    }
    assert [e.upstream for e in plan.stages[2].ins] == ["left", "right"]


def test_a_diamond_within_a_stage_is_one_exchange() -> None:
    flow = ps.Flow("f")
    source = flow.source("in", rows(FRAME))
    both = source.where("a", pl.col("x") > 0).union("both", source.where("b", pl.col("x") <= 0))
    both.key_by("k").aggregate("count", n=ps.count()).sink("out", ps.memory())
    plan = planned(flow)
    assert shape(plan)["in"] == (["a", "b", "both"], [], [("both", "count")])
    assert len(plan.stages[1].ins) == 1


@pytest.mark.parametrize("over, by_row", [(ps.count(), False), (ps.sum("x"), True)])
def test_a_batch_function_in_a_diamond_gets_single_rows_if_order_matters(over: ps.Aggregate, by_row: bool) -> None:
    """Nobody could tell what order its rows are to be in among others."""
    flow = ps.Flow("f")
    source = flow.source("in", rows(FRAME)).map_batches("before", lambda f: f)
    other = source.where("b", pl.col("x") <= 0).map_batches("m", lambda f: f)
    both = source.where("a", pl.col("x") > 0).union("both", other)
    both.key_by("k").aggregate("out", n=over).sink("sink", ps.memory())
    stage = planned(flow).stages[0]
    assert stage.forks
    assert stage.by_row == (frozenset({"m"}) if by_row else frozenset())


def test_a_diamond_of_keyed_stages() -> None:
    flow = ps.Flow("f")
    source = flow.source("in", rows(FRAME))
    one = source.key_by("k").process("one", Echo(), schema={"k": str})
    two = source.key_by("k").process("two", Echo(), schema={"k": str})
    one.union("both", two).key_by("k").aggregate("count", n=ps.count()).sink("out", ps.memory())
    plan = planned(flow)
    assert [s.id for s in plan.stages] == ["in", "one", "two", "count"]
    assert [e.upstream for e in plan.by_id[plan.stages[3].id].ins] == ["one", "two"]


def test_what_keeps_state_and_what_does_not() -> None:
    flow = ps.Flow("f")
    source = flow.source("in", rows(FRAME))
    windows = source.key_by("k").window(ps.tumbling("1s", on="t")).aggregate("win", n=ps.count())
    windows.top_k("best", 2, by="n").sink("a", ps.memory())
    source.key_by("k").process("plain", Stateless(), schema={"k": str}).sink("b", ps.memory())
    source.key_by("k").top_k("events", 2, by="x").sink("c", ps.memory())
    stateful = {s.id: s.stateful for s in planned(flow).stages}
    assert stateful == {"in": False, "win": True, "best": False, "plain": False, "events": True}


def test_fingerprints_say_what_state_depends_on_and_no_more() -> None:
    def fingerprint(aggregate: ps.Aggregate, key: str, sink: str) -> Any:
        flow = ps.Flow("f")
        flow.source("in", rows(FRAME)).key_by(key).aggregate("c", n=aggregate).sink(sink, ps.memory())
        return planned(flow).fingerprint()

    same = fingerprint(ps.sum("x"), "k", "out")
    assert same == fingerprint(ps.sum(pl.col("x") * 2), "k", "other")
    assert same != fingerprint(ps.sum("x"), "t", "out")
    assert same != fingerprint(ps.max("x"), "k", "out")


def test_explain_names_everything() -> None:
    flow = ps.Flow("shop")
    orders = flow.source("orders", rows(FRAME)).where("paid", pl.col("x") > 0)
    per_key = orders.key_by("k").window(ps.hopping("30s", every="10s", on="t")).aggregate("sales", total=ps.sum("x"))
    per_key.sink("out", ps.memory())
    assert flow.explain().splitlines() == [
        "flow shop",
        "  stage 0 'orders' (source)",
        "    orders: 1 given rows -> [k: String, x: Float64, t: Datetime]",
        "    paid: where -> [k: String, x: Float64, t: Datetime]",
        "    exchange paid -> 'sales'",
        "  stage 1 'sales' (keyed by k)",
        "    sales: hopping 30s/10s total=sum(x) -> [k: String, "
        "window_start: Datetime, "
        "window_end: Datetime, total: Float64]",
        "    out: sink memory",
    ]


def carried(flow: ps.Flow) -> set[tuple[str, str]]:
    """Exchanges whose rows carry their order."""
    return {(s.id, e.downstream) for s in planned(flow).stages for e in s.outs if e.tagged}


def test_order_is_carried_where_somebody_behind_needs_it_and_nowhere_else() -> None:
    window = ps.tumbling("1s", on="t")
    flow = ps.Flow("f")
    source = flow.source("in", rows(FRAME))
    source.key_by("k").aggregate("counts", n=ps.count()).sink("a", ps.memory())
    source.key_by("k").window(window).aggregate("sums", x=ps.sum("x")).sink("b", ps.memory())
    source.key_by("k").process("last", Echo(), schema={"k": str}).sink("c", ps.memory())
    source.key_by("k").process("first", Echo(), schema={"k": str}).key_by("k").aggregate("n", n=ps.count()).sink(
        "d", ps.memory()
    )
    assert carried(flow) == set()
    flow = ps.Flow("g")
    first = flow.source("in", rows(FRAME)).key_by("k").process("first", Echo(), schema={"k": str})
    first.key_by("k").aggregate("all", all=ps.collect("k")).sink("a", ps.memory())
    assert carried(flow) == {("in", "first"), ("first", "all")}


def test_several_sources_are_put_in_order_only_before_an_operator_that_needs_it() -> None:
    def united(by: str | None) -> tuple[ps.Flow, ps.Stream]:
        flow = ps.Flow("f")
        left, right = flow.source("left", rows(FRAME)), flow.source("right", rows(FRAME))
        return flow, left.union("both", right, by=by)

    flow, both = united(None)
    both.key_by("k").window(ps.tumbling("1s", on="t")).aggregate("win", n=ps.count()).sink("a", ps.memory())
    assert [s.id for s in planned(flow).stages] == ["left", "right", "win"]
    flow, both = united(None)
    both.key_by("k").window(ps.tumbling("1s", on="t")).aggregate("win", x=ps.sum("x")).sink("a", ps.memory())
    assert [s.id for s in planned(flow).stages] == ["left", "right", "win.order", "win"]
    flow, both = united("t")
    both.select("names", "k").key_by("k").process("own", Echo(), schema={"k": str}).sink("a", ps.memory())
    assert [s.id for s in planned(flow).stages] == ["left", "right", "own.order", "own"]
    flow, both = united(None)
    both.key_by("k").process("own", Echo(), schema={"k": str}).sink("a", ps.memory())
    with pytest.raises(FlowError, match="operator 'own' depends on the order of its rows") as error:
        planned(flow)
    assert "by='ts'" in str(error.value.remedy)


def test_ways_from_one_source_need_no_column_to_meet() -> None:
    flow = ps.Flow("f")
    source = flow.source("in", rows(FRAME)).select("names", "k")
    one = source.key_by("k").process("one", Echo(), schema={"k": str})
    one.union("both", source).key_by("k").aggregate("all", all=ps.collect("k")).sink("out", ps.memory())
    plan = planned(flow)
    assert [s.id for s in plan.stages] == ["in", "one", "all"]
    assert plan.stages[2].depth == 1 and all(e.whole for e in plan.stages[2].ins)
