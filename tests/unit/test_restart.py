"""A job that starts again: what its log says of nodes, cores and plans."""

from __future__ import annotations

from pathlib import Path

import msgspec
import polars as pl
import pytest

import penstock as ps
from penstock import testing
from penstock.control.events import Started, Tell
from penstock.control.records import EpochRecord, NodeInfo
from penstock.control.routing import RoutingTable
from penstock.engines import epochlog
from penstock.engines.job import start
from penstock.errors import IncompatibleFlow
from penstock.ids import Epoch, PlanVersion
from tests.unit.test_controller import COUNT, IN, Driver, span


def restarted(table: RoutingTable, *nodes: NodeInfo) -> tuple[Driver, list[str]]:
    """A job whose log has this table, on these nodes; and what people are told."""
    d = Driver()
    record = EpochRecord(
        epoch=Epoch(1), attempt=d.controller.attempts.current, ranges={IN: span(1)}, clock_ms=1, final=False,
        version=table.version, routing=table,
    )  # fmt: skip
    commands = d.step(Started(now=0.0, logged=(record,), nodes=nodes))
    return d, [c.text for c in commands if isinstance(c, Tell)]


def a_table(*nodes: str, **cores: int) -> RoutingTable:
    table = Driver().controller.routes.table
    homes = {stage: dict(enumerate(nodes)) for stage in table.instances}
    return table.change(homes=homes, cores=cores)


def test_containers_stay_on_nodes_that_are_there() -> None:
    d, told = restarted(a_table("b", "a"), NodeInfo("a"), NodeInfo("b"))
    table = d.controller.routes.table
    assert table.homes_of(COUNT) == {0: "b", 1: "a"} and told == []


def test_containers_whose_node_is_gone_get_another_and_nothing_else_changes() -> None:
    before = a_table("gone", "a", gone=1)
    d, told = restarted(before, NodeInfo("a", cores=2))
    table = d.controller.routes.table
    assert table.homes_of(COUNT) == {0: "a", 1: "a"} and table.owners == before.owners
    assert told == ["the limit on the cores of node gone is forgotten: no such node, or it has fewer cores"]
    assert d.controller.fleet.cores == {}


def test_a_limit_on_cores_outlives_the_driver() -> None:
    d, told = restarted(a_table("a", "b", a=1), NodeInfo("a", cores=2), NodeInfo("b", cores=2))
    assert d.controller.fleet.cores == {"a": 1} and told == []
    assert [p.node for p in d.controller.balance.peers(COUNT)] == ["a", "b"]


def test_an_epoch_of_a_plan_that_is_not_there_is_refused(tmp_path: Path) -> None:
    def flow() -> ps.Flow:
        made = ps.Flow("f")
        frame = pl.DataFrame({"k": ["a"] * 40})
        made.source("in", testing.rows(frame, epochs=[10] * 4)).key_by("k").aggregate("n", n=ps.count()).sink(
            "out", ps.memory()
        )
        return made

    config = ps.Config(checkpoint=str(tmp_path), control=False, epochs_max=2, manifests_kept=1)
    assert start(flow(), engine="local", config=config).wait(120)
    last = max((tmp_path / "manifests").iterdir())
    number = int(last.name.split(".")[0])
    record = EpochRecord(
        epoch=Epoch(number + 1), attempt=Driver().controller.attempts.current, ranges={}, clock_ms=1, final=False,
        version=Driver().controller.routes.table.version,
    )  # fmt: skip
    log = tmp_path / "log"
    log.mkdir(exist_ok=True)
    later = msgspec.structs.replace(record, plan=PlanVersion(2))
    (log / f"{number + 1:012d}.json").write_bytes(epochlog.encode(later))
    with pytest.raises(IncompatibleFlow, match=rf"epoch {number + 1} ran with version 2 of the flow's plan"):
        start(flow(), engine="local", config=config).wait(120)
