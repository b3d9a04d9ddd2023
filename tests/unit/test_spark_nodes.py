"""What the Spark engine makes of executors that come and go, with Spark played by a few lines."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

import penstock as ps
from penstock.control.events import (
    NodesChanged,
)
from penstock.control.records import NodeInfo
from penstock.engines.spark import engine as module
from penstock.engines.spark.engine import DRIVER, Output, SparkEngine
from penstock.errors import ConfigError
from penstock.plan import compile_flow
from penstock.state.store import MemoryStore


class FakeJvm:
    """A cluster manager with ``room`` for so many executors."""

    def __init__(self, count: int, room: int) -> None:
        self.room, self.number = room, count
        self.alive = [str(i) for i in range(count)]
        self.marked: set[str] = set()
        self.wanted: list[int] = []
        self.refuses: str | None = None

    def executor_ids(self) -> frozenset[str]:
        return frozenset(self.alive)

    def executors(self) -> dict[str, tuple[str, int]]:
        return {i: ("10.0.0.1", 1) for i in self.alive}

    def decommissioning(self) -> bool:
        return bool(self.marked)

    def unwilling(self) -> frozenset[str]:
        return frozenset(self.marked)

    def want_executors(self, total: int) -> bool:
        if self.refuses:
            raise RuntimeError(self.refuses)
        self.wanted.append(total)
        while len(self.alive) < min(total, self.room):
            self.alive.append(str(self.number))
            self.number += 1
        return True

    def release_executors(self, ids: Sequence[str], total: int) -> bool:
        if self.refuses:
            raise RuntimeError(self.refuses)
        self.wanted.append(total - len(ids))
        return True  # they take a while to go


def engine_on(jvm: FakeJvm, config: ps.Config | None = None, **settings: str) -> tuple[SparkEngine, list[Any]]:
    flow = ps.Flow("f")
    flow.source("in", ps.words(rows=1)).key_by("word").aggregate("n", n=ps.count()).sink("out", ps.memory())
    engine = SparkEngine(compile_flow(flow.graph()), "j", MemoryStore(), "fail", config or ps.Config())
    posted: list[Any] = []
    engine.jvm, engine.post = jvm, posted.append  # type: ignore[assignment]
    conf = SimpleNamespace(get=lambda key, default: settings.get(key, default))
    engine.session = SimpleNamespace(sparkContext=SimpleNamespace(getConf=lambda: conf))
    engine.executors = jvm.executors()
    return engine, posted


def names(event: Any) -> list[str]:
    assert isinstance(event, NodesChanged)
    return [n.name for n in event.nodes]


def test_more_are_asked_for_on_top_of_those_there_are() -> None:
    jvm = FakeJvm(2, room=5)
    engine, posted = engine_on(jvm)
    assert engine.request_nodes(1) and engine.request_nodes(2)
    assert jvm.wanted == [3, 5], "Spark is told totals"
    assert engine._look() and names(posted[-1]) == ["0", "1", "2", "3", "4"]
    engine._look_for_asked()
    assert engine.asked is None and engine.notices == []


def test_what_is_not_granted_is_said_once_and_stays_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    jvm = FakeJvm(2, room=3)
    engine, posted = engine_on(jvm)
    engine.request_nodes(2)
    engine._look()
    engine._look_for_asked()
    assert engine.notices == [], "there is time yet"
    monkeypatch.setattr(module, "GRANT_S", -1.0)
    engine._look_for_asked()
    engine._look_for_asked()
    assert [n for n in engine.notices if n.startswith("1 of 2 executors that were asked for came")] == engine.notices
    assert len(engine.notices) == 1
    jvm.room = 4
    jvm.want_executors(4)  # somebody else's came free
    assert engine._look() and len(names(posted[-1])) == 4
    engine._look_for_asked()
    assert engine.asked is None


def test_who_was_given_back_is_gone_at_once_and_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    jvm = FakeJvm(3, room=3)
    engine, posted = engine_on(jvm)
    engine.request_nodes(1)  # more than there is room for
    engine._release(["1"])
    assert jvm.wanted == [4, 2], "what was asked for and had not come is taken back, too"
    assert engine._look() and names(posted[-1]) == ["0", "2"]
    monkeypatch.setattr(module, "GRANT_S", -1.0)
    engine._look_for_asked()
    assert engine.notices == []
    jvm.alive.remove("1")
    assert not engine._look() and engine.going == set(), "its end is no news"
    engine.request_nodes(1)
    assert jvm.wanted[-1] == 3 and engine._look() and names(posted[-1]) == ["0", "2", "3"]


def test_a_decommissioned_executor_is_lost_before_its_end() -> None:
    jvm = FakeJvm(2, room=2)
    engine, posted = engine_on(jvm)
    assert not engine._look()
    jvm.marked.add("0")
    assert engine._look() and names(posted[-1]) == ["1"] and posted[-1].reason == "decommissioned"
    assert not engine._look(), "said once"
    jvm.alive.remove("0")
    assert not engine._look() and len(posted) == 1


def test_what_an_older_attempt_leaves_late_is_not_read_by_the_new_one() -> None:
    engine, _ = engine_on(FakeJvm(2, 2))
    old, new = Output("old", 1, 2), Output("new", 2, 2)
    engine._new_attempt(1)
    engine._keep_output(7, "in", 1, old)
    engine._new_attempt(2)
    assert engine.outputs == {}
    engine._new_attempt(1)  # a job that had passed every check when it was given up
    engine._keep_output(7, "in", 2, new)
    engine._keep_output(7, "in", 1, old)
    assert engine.outputs == {(7, "in"): new}


def test_a_refusal_is_told() -> None:
    jvm = FakeJvm(2, room=2)
    engine, posted = engine_on(jvm)
    jvm.refuses = "dynamic allocation decides"
    assert not engine.request_nodes(1)
    engine._release(["1"])
    assert [n for n in engine.notices if "dynamic allocation decides" in n] == engine.notices and len(
        engine.notices
    ) == 2
    assert not engine._look() and posted == [] and engine.wanted is None


def test_who_lets_spark_decide_cannot_ask() -> None:
    jvm = FakeJvm(2, room=5)
    engine, _ = engine_on(jvm, **{"spark.dynamicAllocation.enabled": "true"})
    assert not engine.request_nodes(1) and jvm.wanted == []
    assert "spark.dynamicAllocation.enabled" in engine.notices[-1]


@pytest.mark.parametrize(
    ("master", "cores_max", "count"),
    [
        ("spark://a:7077", None, 1),
        ("local-cluster[3,2,1024]", None, 3),
        ("local-cluster[3,2,1024]", "4", 2),
        ("local-cluster[3,2,1024]", "1", 1),
    ],
)
def test_executors_to_wait_for(master: str, cores_max: str | None, count: int) -> None:
    assert module._first_executors(master, cores_max) == count


def test_who_is_gone_is_told_without_listing_those_who_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    jvm = FakeJvm(3, room=3)
    engine, posted = engine_on(jvm)
    jvm.alive.remove("2")
    monkeypatch.setattr(jvm, "executors", lambda: pytest.fail("it takes a tenth of a second"))
    assert engine._look() and names(posted[-1]) == ["0", "1"]


# -- fault zones -------------------------------------------------------------------------------------------------------


class Hosts(FakeJvm):
    """Executors on hosts: 0 on the first, 1 on the second, and so on."""

    def __init__(self, *hosts: str) -> None:
        super().__init__(len(hosts), room=len(hosts))
        self.hosts = hosts

    def executors(self) -> dict[str, tuple[str, int]]:
        return {i: (self.hosts[int(i)], 2) for i in self.alive}


def zones_as(text: str) -> ps.Config:
    return ps.Config.load(None, {}, environ={"PENSTOCK_ZONES": text})


def test_zones_as_text_reach_the_nodes_and_who_is_in_none_has_his_host() -> None:
    config = zones_as("host-a=rack-1; host-b = rack-1 ;")
    assert config.zones == {"host-a": "rack-1", "host-b": "rack-1"}
    engine, posted = engine_on(Hosts("host-a", "host-b", "host-c"), config)
    nodes = (
        NodeInfo("0", "host-a", "rack-1", 2),
        NodeInfo("1", "host-b", "rack-1", 2),
        NodeInfo("2", "host-c", "host-c", 2),
    )
    assert engine.nodes() == nodes
    engine.jvm.alive.remove("0")  # type: ignore[attr-defined]
    assert engine._look() and posted[-1].nodes == nodes[1:], "and stay with them in what the controller is told"


def test_without_zones_a_host_is_one() -> None:
    engine, _ = engine_on(Hosts("host-a", "host-a", "host-b"))
    assert [node.zone for node in engine.nodes()] == ["host-a", "host-a", "host-b"]


def test_in_local_mode_there_is_one_node_and_no_zone() -> None:
    engine, _ = engine_on(Hosts("host-a"), zones_as("host-a=rack-1"))
    engine.executors = {}
    engine.session.sparkContext.defaultParallelism = 3
    assert engine.nodes() == (NodeInfo(DRIVER, cores=3),)


@pytest.mark.parametrize("text", ["host-a", "host-a=", "=rack-1", "host-a=rack-1;host-b"])
def test_zones_that_are_no_pairs_are_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        zones_as(text)
    assert "host-a=rack-1;host-b=rack-2" in caught.value.remedy
