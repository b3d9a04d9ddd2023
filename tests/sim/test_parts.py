"""The parts of the simulator: virtual time, pools without threads, stores that fail."""

from __future__ import annotations

import random

import polars as pl
import pytest

from penstock.engines.sim.checkers import Checkers
from penstock.engines.sim.engine import SimEngine
from penstock.engines.sim.faults import Disk, DriverDied, Faults, StoreView
from penstock.engines.sim.outside import Outside, SimSink
from penstock.engines.sim.schedule import Schedule, SimPool
from penstock.engines.sim.world import World


def run(schedule: Schedule) -> None:
    while (what := schedule.next()) is not None:
        what()


def test_things_happen_in_order_of_time_then_of_making() -> None:
    schedule = Schedule()
    seen: list[tuple[float, str]] = []
    for delay, name in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        schedule.after(delay, lambda name=name: seen.append((schedule.now, name)))  # type: ignore[misc]
    run(schedule)
    assert seen == [(1.0, "a"), (1.0, "b"), (2.0, "c")]


def test_a_pool_works_in_order_and_one_at_a_time() -> None:
    schedule = Schedule()
    pool = SimPool(schedule, lambda: 1.0)
    seen: list[tuple[float, int]] = []
    futures = [pool.submit(lambda i=i: seen.append((schedule.now, i))) for i in range(3)]
    assert not any(f.done() for f in futures)
    run(schedule)
    assert seen == [(1.0, 0), (2.0, 1), (3.0, 2)] and all(f.done() for f in futures)


def test_who_waits_for_a_future_has_it_done() -> None:
    schedule = Schedule()
    pool = SimPool(schedule, lambda: 1.0)
    seen: list[int] = []
    pool.submit(seen.append, 1)
    assert pool.submit(lambda: [*seen, 2]).result() == [1, 2]
    run(schedule)
    assert seen == [1]


def test_an_error_surfaces_at_the_future() -> None:
    pool = SimPool(Schedule(), lambda: 1.0)
    future = pool.submit(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        future.result()


@pytest.mark.parametrize(("cancel", "expected"), [(True, [0]), (False, [0, 1])])
def test_a_pool_that_shuts_down_finishes_what_has_begun(cancel: bool, expected: list[int]) -> None:
    schedule = Schedule()
    pool = SimPool(schedule, lambda: 1.0)
    seen: list[int] = []
    for i in range(2):
        pool.submit(seen.append, i)
    pool.shutdown(wait=True, cancel_futures=cancel)
    run(schedule)
    assert seen == expected


def test_a_dead_pool_does_nothing() -> None:
    schedule = Schedule()
    pool = SimPool(schedule, lambda: 1.0)
    seen: list[int] = []
    pool.submit(seen.append, 1)
    pool.die()
    pool.submit(seen.append, 2)
    run(schedule)
    assert seen == []


def view(dies: bool = False, **rates: float) -> tuple[Disk, StoreView]:
    disk = Disk()
    return disk, StoreView(disk, lambda: Faults(**rates), random.Random(1), lambda kind, text: None, dies)


def test_a_write_fails_with_or_without_effect() -> None:
    disk, store = view(put_fails=1.0)
    with pytest.raises(OSError, match="on purpose"):
        store.put("a", b"1")
    assert disk.items == {}
    disk, store = view(put_unsure=1.0)
    with pytest.raises(OSError, match="took effect"):
        store.put("a", b"1")
    assert disk.items == {"a": b"1"}


def test_reads_and_deletions_fail() -> None:
    disk, store = view(get_fails=1.0, delete_fails=1.0)
    disk.items["a"] = b"1"
    for act in (lambda: store.get("a"), lambda: store.list(), lambda: store.delete("a")):
        with pytest.raises(OSError, match="on purpose"):
            act()
    assert disk.items == {"a": b"1"}


def test_the_driver_dies_in_a_write_before_or_after_its_effect() -> None:
    left = set()
    for number in range(20):
        disk, store = view(dies=True, dies_in_write=1.0)
        store._random.seed(number)
        with pytest.raises(DriverDied):
            store.put("a", b"1")
        left.add(len(disk.items))
    assert left == {0, 1}


def test_only_drivers_die_of_writes() -> None:
    disk, store = view(dies=False, dies_in_write=1.0)
    store.put("a", b"1")
    assert store.put_if_absent("a", b"2") is False and store.put_if_absent("b", b"2")
    assert store.exists("b") and store.list() == ["a", "b"] and store.get("a") == b"1"
    store.delete("a")
    assert disk.items == {"b": b"2"}


def test_a_torn_file_is_shorter() -> None:
    disk = Disk()
    disk.items["a"] = b"12345678"
    disk.tear("a", random.Random(2))
    assert len(disk.items["a"]) < 8


def test_a_commit_clears_the_staging_of_its_sink_up_to_its_epoch() -> None:
    outside = Outside(lambda: 0.0, random.Random(1), Faults, Checkers(), lambda kind, text: None)
    sink, other = (SimSink(id, outside, collects=False) for id in ("out", "out2"))
    rows = pl.DataFrame({"x": [1]})
    for attempt in (1, 2):  # the first was given up
        parts = [sink.write_part(2, attempt, "0", rows)]
    other.write_part(2, 2, "0", rows)
    sink.write_part(3, 2, "0", rows)
    outside.zombie = True
    sink.write_part(1, 1, "0", rows)  # long committed
    sink.commit(2, 2, parts)
    assert sorted(outside.staged) == ["out/3-2/0", "out2/2-2/0"]


def test_in_some_worlds_nodes_have_fault_zones_which_fail_as_a_whole() -> None:
    worlds = [World(seed) for seed in range(40)]
    zoned = [world for world in worlds if any(world.zones)]
    assert 4 < len(zoned) < 20
    assert not any(node.zone for world in worlds if world not in zoned for node in world.cluster.nodes)
    world = next(w for w in zoned if [n.zone for n in w.cluster.nodes].count(w.cluster.nodes[0].zone) > 1)
    engine = SimEngine(world.cluster, "job", 1, 1)
    engine.start(lambda event: None)
    assert [info.zone for info in engine.nodes()] == [node.zone for node in world.cluster.nodes]
    crashes = []
    for _ in range(30):
        world._crash_node()
        crashes.append([node.zone for node in world.cluster.nodes if not node.up])
        for node in world.cluster.nodes:
            node.up = True
    assert {len(set(zones)) for zones in crashes} == {1}
    assert {len(zones) > 1 for zones in crashes} == {True, False}
