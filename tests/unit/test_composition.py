"""Putting flows together: split, sub-flows, named partitions, and what explain shows of it."""

from __future__ import annotations

import ast
import threading
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import polars as pl
import pytest

import penstock as ps
from penstock import testing
from penstock.control import controller as control_module
from penstock.control.routing import RoutingTable
from penstock.engines.job import start
from penstock.errors import ConfigError, FlowError, SourceError
from penstock.ids import StageId
from penstock.plan import compile_flow

NUMBERS = pl.DataFrame({"k": ["a", "b", "a", "c"], "x": [1, 2, None, 4]})


def numbers() -> tuple[ps.Flow, ps.Stream]:
    flow = ps.Flow("numbers")
    return flow, flow.source("in", testing.rows(NUMBERS))


def test_split_gives_every_row_to_one_side() -> None:
    flow, stream = numbers()
    big, rest = stream.split("big", pl.col("x") > 1)
    big.sink("big-out", ps.memory())
    rest.sink("rest-out", ps.memory())
    out = testing.run_local(flow)
    assert out["big-out"]["x"].to_list() == [2, 4]
    assert out["rest-out"]["x"].to_list() == [1, None], "null is not true, so it is of the rest"
    assert [n.id for n in flow.graph().nodes] == ["in", "big", "big.rest", "big-out", "rest-out"]


def counted(stream: ps.Stream, name: str) -> ps.Stream:
    return stream.where("keep", pl.col("x").is_not_null()).key_by("k").aggregate("counts", **{name: ps.count()})


def test_a_sub_flow_serves_two_branches() -> None:
    flow, stream = numbers()
    stream.pipe("one", counted, "n").sink("out-one", ps.memory())
    stream.pipe("two", counted, name="m").sink("out-two", ps.memory())
    ids = [n.id for n in flow.graph().nodes]
    assert ids[1:3] == ["one.keep", "one.counts"] and "two.counts" in ids
    assert {s.id for s in compile_flow(flow.graph()).stages} == {"in", "one.counts", "two.counts"}
    out = testing.run_local(flow)
    assert out["out-one"].sort("k").rows() == [("a", 1), ("b", 1), ("c", 1)]
    assert out["out-two"].columns == ["k", "m"]


def test_sub_flows_nest_and_an_error_inside_leaves_no_prefix_behind() -> None:
    _, stream = numbers()

    def outer(s: ps.Stream) -> ps.Stream:
        return s.pipe("inner", lambda t: t.where("w", pl.col("x") > 0))

    assert stream.pipe("outer", outer).id == "outer.inner.w"
    with pytest.raises(FlowError, match="no column 'y'"):
        stream.pipe("broken", lambda s: s.where("w", pl.col("y") > 0))
    assert stream.where("plain", pl.col("x") > 0).id == "plain"


def test_a_named_partition_has_its_own_instances_and_is_a_handle_to_rescale() -> None:
    frame = pl.DataFrame({"k": [f"k{i % 50}" for i in range(4_000)]})
    flow, sink = ps.Flow("handle"), ps.memory()
    stream = flow.source("in", testing.rows(frame, epochs=[100] * 40))
    stream.hash_partition("k", 3, uid="by-k").aggregate("counts", n=ps.count()).sink("out", sink)
    held: list[ps.Job] = []
    ready = threading.Event()
    before: list[RoutingTable | None] = []

    def trip(step: str) -> None:
        if step == "after-publish" and not before:
            ready.wait()
            before.append(held[0].routing)
            with pytest.raises(ps.PenstockError, match="no operator 'by-z'"):
                held[0].rescale("by-z", 2)
            held[0].rescale("by-k", 2)

    config = ps.Config(instances=1, control=False, checkpoint_interval_s=0.0)
    held.append(job := start(flow, engine="local", config=config, trip=trip))
    ready.set()
    assert job.wait(120)
    (first,), last = before, job.routing
    assert first is not None and last is not None and last.version > first.version
    assert [dict(Counter(table.owners[StageId("counts")])) for table in (first, last)] == [
        {0: 22, 1: 21, 2: 21},
        {0: 32, 1: 32},
    ]
    assert {o.id: o.instances for o in job.status().stages} == {"in": 1, "counts": 2}
    counts = sink.frame().group_by("k").agg(pl.col("n").max(), pl.len())
    assert counts.sort("k").rows() == [(k, 80, 40) for k in sorted(f"k{i}" for i in range(50))]


def test_a_job_that_has_ended_refuses_to_be_rescaled_and_says_why() -> None:
    flow, stream = numbers()
    stream.key_by("k").aggregate("counts", n=ps.count()).sink("out", ps.memory())
    job = start(flow, engine="local", config=ps.Config(control=False))
    assert job.wait(120)
    with pytest.raises(ConfigError, match=r"the job is complete\. It takes no orders any more\."):
        job.rescale("counts", 2)
    source = testing.CrashingSource(testing.rows(NUMBERS), 1)
    flow = ps.Flow("crashing")
    flow.source("in", source).key_by("k").aggregate("counts", n=ps.count()).sink("out", ps.memory())
    job = start(flow, engine="local", config=ps.Config(control=False, epoch_rows=1))
    with pytest.raises(SourceError):
        job.wait(120)
    with pytest.raises(ConfigError, match=r"the job failed: .*on purpose after 1 rows"):
        job.rescale("counts", 2)


@pytest.mark.parametrize("n", [0, -1, 1.5])
def test_a_partition_needs_instances(n: float) -> None:
    _, stream = numbers()
    with pytest.raises(FlowError, match="hash_partition into"):
        stream.hash_partition("k", n, uid="u")  # type: ignore[arg-type]


def test_a_uid_is_an_id_like_any_other() -> None:
    _, stream = numbers()
    with pytest.raises(FlowError, match="two steps have the id 'in'"):
        stream.hash_partition("k", 2, uid="in").aggregate("counts", n=ps.count())
    with pytest.raises(FlowError, match="is not a uid"):
        stream.hash_partition("k", 2, uid="a b")


def two_stages() -> ps.Flow:
    flow, stream = numbers()
    counts = stream.where("keep", pl.col("x") > 0).hash_partition("k", 2, uid="by-k").aggregate("counts", n=ps.count())
    counts.top_k("top", 2, by="n").sink("out", ps.memory())
    return flow


def test_explain_tells_stages_exchanges_and_fused_steps() -> None:
    text = two_stages().explain()
    assert text.splitlines()[1:4] == [
        "  stage 0 'in' (source)",
        "    in: 4 given rows -> [k: String, x: Int64]",
        "    keep: where -> [k: String, x: Int64]",
    ]
    assert "stage 1 'counts' (keyed by k, uid 'by-k', from 2)" in text
    assert "stage 2 'top' (keyed by nothing: one container)" in text
    assert "exchange keep -> 'counts'" in text


def test_explain_draws_the_same() -> None:
    drawn = ElementTree.fromstring(two_stages().explain("svg"))
    space = "{http://www.w3.org/2000/svg}"
    texts = ["".join(t.itertext()) for t in drawn.iter(f"{space}text")]
    assert "stage 1 · by k · by-k" in texts and "keep: where" in texts and "→ out: memory" in texts
    assert len([r for r in drawn.iter(f"{space}rect") if "box" in r.get("class", "")]) == 3
    assert len([p for p in drawn.iter(f"{space}path") if p.get("class") == "wire"]) == 2


def test_explain_escapes_what_users_wrote() -> None:
    flow, stream = numbers()
    stream.key_by("k").aggregate("counts", n=ps.sum(pl.col("x") & 1)).sink("out", ps.memory())
    ElementTree.fromstring(flow.explain("svg"))


def test_explain_knows_two_formats() -> None:
    with pytest.raises(FlowError, match="as 'png'"):
        two_stages().explain("png")


# -- the parts of control ----------------------------------------------------------------------------------------------


def test_no_class_of_control_does_too_much() -> None:
    """At most 30 methods, and 20 attributes set by a class that has methods; plain records may have more fields."""
    seen = 0
    for path in sorted(Path(control_module.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ClassDef):
                continue
            methods = [n for n in node.body if isinstance(n, ast.FunctionDef)]
            own = {
                t.attr
                for n in ast.walk(node)
                if isinstance(n, ast.Assign | ast.AnnAssign)
                for t in (n.targets if isinstance(n, ast.Assign) else [n.target])
                if isinstance(t, ast.Attribute) and isinstance(t.value, ast.Name) and t.value.id == "self"
            }
            seen += 1
            assert len(methods) <= 30, f"{path.name}: {node.name} has {len(methods)} methods"
            assert len(own) <= 20, f"{path.name}: {node.name} has {len(own)} attributes"
    assert seen > 40
