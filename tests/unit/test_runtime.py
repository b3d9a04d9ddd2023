"""Jobs from start to end with the local engine: what users call, what they see, how it goes wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest

import penstock as ps
from benchmarks.baselines import FullSnapshots, StopAndCopy
from penstock import testing
from penstock.control.controller import Controller
from penstock.control.events import (
    LeaveRequested,
    NodesChanged,
    RescaleRequested,
    RunStage,
    StageFailed,
)
from penstock.control.policies import Decision, Observation, nothing
from penstock.control.records import NodeInfo
from penstock.control.routing import RoutingTable
from penstock.engines import scaling
from penstock.engines.job import Job, start
from penstock.engines.runtime import Runtime, SplitsFound
from penstock.engines.task import Worker
from penstock.errors import BadRecordError, ConfigError, FlowError, SinkError, SourceError, UserCodeError
from penstock.ids import Attempt, Epoch, StageId

FRAME = pl.DataFrame({"k": [f"k{i % 5}" for i in range(100)], "x": list(range(100))})


def counting(source: ps.Source, sink: ps.Sink, **flow: Any) -> ps.Flow:
    out = ps.Flow("counting", **flow)
    out.source("in", source).key_by("k").aggregate("count", n=ps.count()).sink("out", sink)
    return out


def last_counts(frame: pl.DataFrame) -> dict[str, int]:
    return {k: n for k, n in frame.iter_rows()}


def test_run_local_runs_to_the_end() -> None:
    sink = ps.memory()
    ps.run_local(counting(testing.rows(FRAME), sink), epoch_rows=7)
    assert last_counts(sink.frame()) == dict.fromkeys(["k0", "k1", "k2", "k3", "k4"], 20)


def test_status_counts_everything_once() -> None:
    config = ps.Config(epoch_rows=10, instances=2, checkpoint_interval_s=0)
    job = start(counting(testing.rows(FRAME), ps.memory()), engine="local", config=config)
    job.wait()
    status = job.status()
    assert (status.flow, status.engine, status.phase, status.error) == ("counting", "local", "complete", None)
    assert (status.epoch, status.checkpoint_epoch, status.rows) == (11, 11, 100)
    assert status.checkpoints >= 1 and status.checkpoint_bytes > 0
    assert (status.recoveries, status.dead_letters, status.late) == (0, 0, 0)
    assert status.state_rows == 5 and status.state_bytes > 0
    by_id = {o.id: o for o in status.stages}
    assert by_id["in"].rows_in == 100 and by_id["in"].kind == "source"
    assert by_id["count"].rows_out == 50 and by_id["count"].instances == 2
    assert by_id["count"].operators == ("count", "out")
    assert [h.epoch for h in status.history] == list(range(1, 12))
    assert sum(h.rows for h in status.history) == 100


def test_a_job_without_end_is_stopped_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    def make(first: int, n: int, rng: Any) -> pl.DataFrame:
        return pl.DataFrame({"k": [f"k{i % 3}" for i in range(first, first + n)]})

    reached = threading.Event()

    def trip(step: str) -> None:
        if step == "after-publish":
            reached.set()

    config = ps.Config(epoch_rows=10, checkpoint=str(tmp_path), instances=2)
    out = tmp_path / "out"
    ends = []
    for _ in range(2):
        reached.clear()
        flow = counting(ps.generator(make, schema={"k": str}), ps.parquet(out, durable=False))
        job = start(flow, engine="local", config=config, trip=trip)
        assert reached.wait(30)
        job.stop()
        assert job.status().phase == "stopped"
        ends.append(job.status().epoch)
    frame = ps.read_output(out)
    assert ends[1] > ends[0] >= 1
    assert frame["epoch"].unique().sort().to_list() == list(range(1, ends[1] + 1))
    assert frame.group_by("k").agg(pl.col("n").max())["n"].sum() == 10 * ends[1]


def test_what_a_killed_driver_was_writing_is_removed_at_the_start(tmp_path: Path) -> None:
    half = tmp_path / "state" / ".x.123.tmp"
    half.parent.mkdir()
    half.write_bytes(b"half")
    job = start(counting(testing.rows(FRAME), ps.memory()), engine="local", config=ps.Config(checkpoint=str(tmp_path)))
    job.wait()
    assert not half.exists()


def test_a_job_is_a_context_manager() -> None:
    flow = counting(ps.generator(lambda first, n, rng: pl.DataFrame({"k": ["a"] * n}), schema={"k": str}), ps.memory())
    with start(flow, engine="local", config=ps.Config(epoch_rows=10, instances=1)) as job:
        assert not job.wait(0.0)
    assert job.status().phase == "stopped"
    assert job.wait()


def test_rescale_by_any_operator_of_the_stage() -> None:
    held: list[ps.Job] = []
    ready = threading.Event()

    def trip(step: str) -> None:
        if step == "after-publish" and ready.wait(10) and held:
            held.pop().rescale("out", 4)

    sink = ps.memory()
    config = ps.Config(epoch_rows=10, instances=1, slices=8)
    job = start(counting(testing.rows(FRAME), sink), engine="local", config=config, trip=trip)
    held.append(job)
    ready.set()
    job.wait()
    assert {o.id: o.instances for o in job.status().stages} == {"in": 1, "count": 4}
    assert job.status().routing_version > 1
    assert last_counts(sink.frame()) == dict.fromkeys(["k0", "k1", "k2", "k3", "k4"], 20)


@pytest.mark.parametrize(("operator", "instances"), [("nowhere", 2), ("count", 0), ("count", 9)])
def test_a_rescale_that_cannot_be_is_refused_at_the_call(operator: str, instances: int) -> None:
    released = threading.Event()
    flow = counting(testing.rows(FRAME), ps.foreach_batch(lambda epoch, frame: released.wait(10)))
    job = start(flow, engine="local", config=ps.Config(slices=8, instances=1, epoch_rows=10))
    try:
        while job.status().phase == "starting":
            assert not job.wait(0.001)
        with pytest.raises(ConfigError):
            job.rescale(operator, instances)
    finally:
        released.set()
        job.wait()
    assert job.status().phase == "complete"


def test_a_crash_of_the_source_and_a_second_run(tmp_path: Path) -> None:
    source = testing.CrashingSource(testing.rows(FRAME), 50)
    settings = {"epoch_rows": 10, "checkpoint": str(tmp_path / "ck"), "instances": 2}
    with pytest.raises(SourceError, match="on purpose after 50 rows"):
        ps.run_local(counting(source, ps.parquet(tmp_path / "out", durable=False)), **settings)
    ps.run_local(counting(source, ps.parquet(tmp_path / "out", durable=False)), **settings)
    frame = ps.read_output(tmp_path / "out")
    assert frame.group_by("k").agg(pl.col("n").max())["n"].to_list() == [20] * 5
    assert frame["epoch"].max() == 10


def test_the_beginning_of_a_source() -> None:
    sink = ps.memory()
    ps.run_local(counting(testing.stops_after(testing.rows(FRAME), 35), sink), epoch_rows=10)
    assert sum(last_counts(sink.frame()).values()) == 35


# -- errors ----------------------------------------------------------------------------------------------------------


def failing(row: dict[str, Any]) -> dict[str, Any]:
    return {"k": row["k"], "y": 1 // (row["x"] - 42)}


class Fails(ps.Operator):
    def on_event(self, key: str, event: Any, emit: Any) -> None:
        emit(k=key, y=1 // (event.x - 42))


def erroneous(kind: str, on_error: str) -> ps.Flow:
    flow = ps.Flow("erroneous", on_error=on_error)
    stream = flow.source("in", testing.rows(FRAME))
    schema = {"k": str, "y": int}
    if kind == "rows":
        made = stream.map_rows("bad", failing, schema=schema)
    elif kind == "batches":
        made = stream.map_batches(
            "bad", lambda f: pl.DataFrame([failing(r) for r in f.iter_rows(named=True)], schema), schema=schema
        )
    else:
        made = stream.key_by("k").process("bad", Fails(), schema=schema)
    made.sink("out", ps.memory())
    return flow


@pytest.mark.parametrize("kind", ["rows", "batches", "custom"])
def test_a_function_that_raises_is_named_with_its_record(kind: str) -> None:
    with pytest.raises(UserCodeError) as error:
        ps.run_local(erroneous(kind, "fail"), epoch_rows=10, instances=2)
    text = str(error.value)
    assert "operator 'bad' raised ZeroDivisionError" in text
    assert "epoch 5" in text and "'x': 42" in text
    assert error.value.evidence["operator"] == "bad"
    assert error.value.evidence["epoch"] == 5
    assert error.value.remedy


def test_a_function_on_rows_that_raises_costs_one_record() -> None:
    flow = erroneous("rows", "dead_letter")
    dead = ps.memory()
    flow.dead_letters(dead)
    job = start(flow, engine="local", config=ps.Config(epoch_rows=10, instances=2))
    job.wait()
    assert job.status().dead_letters == 1
    (row,) = dead.frame().iter_rows(named=True)
    assert row["source"] == "bad" and "ZeroDivisionError" in row["reason"] and "42" in row["raw"]


def test_on_error_of_the_job_wins_over_the_flows() -> None:
    with pytest.raises(UserCodeError):
        ps.run_local(erroneous("rows", "dead_letter"), epoch_rows=10, on_error="fail")


def test_dead_letters_go_to_the_checkpoint_directory_by_default(tmp_path: Path) -> None:
    ps.run_local(erroneous("rows", "dead_letter"), epoch_rows=10, checkpoint=str(tmp_path))
    (file,) = (tmp_path / "dead-letters").iterdir()
    assert file.name == "000000000005.jsonl"
    assert "ZeroDivisionError" in file.read_text()


def test_a_malformed_record(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"k": "a"}\n{"k": oops}\n{"k": "b"}\n')

    def flow(on_error: str) -> ps.Flow:
        return counting(ps.files(str(tmp_path / "*.jsonl"), schema={"k": str}), ps.memory(), on_error=on_error)

    job = start(flow("dead_letter"), engine="local", config=ps.Config(instances=1))
    job.wait()
    assert job.status().dead_letters == 1
    with pytest.raises(BadRecordError) as error:
        ps.run_local(flow("fail"), instances=1)
    assert "oops" in str(error.value) and "in.jsonl" in str(error.value)


def test_a_sink_that_raises_is_named() -> None:
    def sink(epoch: int, frame: pl.DataFrame) -> None:
        raise RuntimeError("the database is gone")

    with pytest.raises((SinkError, UserCodeError), match="the database is gone") as error:
        ps.run_local(counting(testing.rows(FRAME), ps.foreach_batch(sink)), epoch_rows=10)
    assert "'out'" in str(error.value)


def test_what_is_no_flow_is_refused() -> None:
    with pytest.raises(FlowError, match="is not a flow"):
        ps.run_local("flow.py")  # type: ignore[arg-type]


# -- the testing module ----------------------------------------------------------------------------------------------


def test_collect_swaps_sources_and_sinks(tmp_path: Path) -> None:
    flow = counting(testing.rows(FRAME), ps.parquet(tmp_path / "never"))
    given = pl.DataFrame({"k": ["a", "b", "a"], "x": [0, 0, 0]})
    assert sorted(testing.collect(flow, sources={"in": given}).rows()) == [("a", 2), ("b", 1)]
    assert not (tmp_path / "never").exists()


def test_collect_refuses_what_does_not_fit() -> None:
    flow = counting(testing.rows(FRAME), ps.memory())
    with pytest.raises(FlowError, match="has no source 'out'"):
        testing.collect(flow, sources={"out": FRAME})
    with pytest.raises(FlowError, match="the rows given for source 'in'"):
        testing.collect(flow, sources={"in": FRAME.select("k")})
    with pytest.raises(FlowError, match="has no sink 'nowhere'"):
        testing.collect(flow, "nowhere")
    flow._nodes[0]
    with pytest.raises(FlowError, match="does not cut 100 rows"):
        testing.rows(FRAME, epochs=[50, 49])


def test_rows_cut_as_told() -> None:
    sink = ps.memory()
    ps.run_local(counting(testing.rows(FRAME, epochs=[1, 98, 1]), sink))
    assert {e: f["n"].sum() for e, f in sink.epochs.items()} == {1: 1, 2: sum([20] * 4 + [19]), 3: 20}


def test_a_manual_clock() -> None:
    clock = testing.ManualClock(5.0)
    clock.advance(2.5)
    assert clock() == 7.5
    with pytest.raises(ValueError):
        clock.advance(-1)
    source = ps.generator(
        lambda a, n, r: pl.DataFrame({"k": ["a"] * n}), schema={"k": str}, rows_per_s=10, rows=30, clock=clock
    )
    sink = ps.memory()
    job = start(counting(source, sink), engine="local", config=ps.Config(instances=1, poll_ms=1), clock=clock)
    while not job.wait(0.001):
        clock.advance(0.1)
    assert last_counts(sink.frame()) == {"a": 30}


def test_what_a_policy_decides_is_done_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked once a second of the job's clock; its sentence is in the status and in the notices."""

    class Grows:
        name = "grows"

        def decide(self, seen: Observation) -> Decision:
            if seen.instances["count"] > 1:
                return nothing("it is large enough")
            return Decision("rescale", "it is small", instances={"count": 3})

    monkeypatch.setattr(scaling, "policy_from", lambda config: Grows())
    monkeypatch.setattr(scaling, "POLICY_S", 0.0)
    source = ps.generator(
        lambda first, n, rng: pl.DataFrame({"k": [f"k{i % 50}" for i in range(n)]}), schema={"k": str}
    )
    config = ps.Config(epoch_rows=50, instances=1, slices=8, checkpoint_interval_s=0.0, control=False)
    with start(counting(source, ps.discard()), engine="local", config=config) as job:
        while len(set(job.routing.owners["count"]) if job.routing else ()) < 3:
            assert not job.wait(0.01)
        assert job.status().policy is not None and "large enough" in job.status().policy
    assert any("it is small" in notice for notice in job.notices)


class Own:
    """A policy as anybody may write one: it remembers what it was shown."""

    name = "own"

    def __init__(self, decision: Decision) -> None:
        self.decision = decision
        self.seen: list[Observation] = []

    def decide(self, seen: Observation) -> Decision:
        self.seen.append(seen)
        return self.decision


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    """A job whose policy is asked all the time."""
    monkeypatch.setattr(scaling, "POLICY_S", 0.0)

    def begin(policy: Any, **settings: Any) -> Job:
        source = ps.generator(
            lambda first, n, rng: pl.DataFrame({"k": [f"k{i % 50}" for i in range(n)]}), schema={"k": str}
        )
        config = ps.Config(
            epoch_rows=50, instances=1, slices=8, checkpoint_interval_s=0.0, control=False, policy=policy
        ).replace(policy_cool_down_s=0.0, instances_max=2, **settings)
        return start(counting(source, ps.discard()), engine="local", config=config)

    return begin


def until(job: Job, reached: Callable[[], Any]) -> None:
    while not reached():
        assert not job.wait(0.01)


GROW = Decision("rescale", "it is small", instances={"count": 2})


def test_a_policy_of_ones_own_is_shown_the_job_and_obeyed(endless: Callable[..., Job]) -> None:
    policy = Own(GROW)
    with endless(policy) as job:
        until(job, lambda: job.routing and set(job.routing.owners["count"]) == {0, 1})
        shown = len(policy.seen)
        until(job, lambda: len(policy.seen) > shown + 1 and policy.seen[-1].capacity_s.keys() == {"in", "count"})
    seen = policy.seen[-1]
    assert list(seen.edges) == [("in", "count")]
    assert seen.homes == {0: "local", 1: "local"} and seen.staying == ("local",)
    assert seen.input_s["count"] > 0 and seen.capacity_s["count"] > 0


def test_a_dry_run_says_what_it_would_do_and_does_nothing(endless: Callable[..., Job]) -> None:
    policy = Own(GROW)
    with endless(policy, policy_dry_run=True) as job:
        said = "policy own (dry run): would rescale count to 2: it is small"
        until(job, lambda: job.notices)
        shown = len(policy.seen)
        until(job, lambda: len(policy.seen) > shown + 20)
        assert job.notices.count(said) > 3
        assert job.status().policy is not None and job.status().policy.startswith("own (dry run): ")
        assert "rescale count to 2: it is small" in job.status().policy
        assert job.routing is not None and set(job.routing.owners["count"]) == {0}
    assert not [record for record in job.journal() if isinstance(record.event, RescaleRequested)]


def test_a_policy_that_fails_does_not_end_the_job(endless: Callable[..., Job]) -> None:
    class Broken(Own):
        def decide(self, seen: Observation) -> Decision:
            super().decide(seen)
            raise ZeroDivisionError("by nought")

    policy = Broken(GROW)
    with endless(policy) as job:
        until(job, lambda: len(policy.seen) > 3)
        assert "own: failed with ZeroDivisionError: by nought" in (job.status().policy or "")
    (told,) = [notice for notice in job.notices if "policy own" in notice]
    assert "test_runtime.py:" in told and "keeps its size" in told


@pytest.mark.parametrize("taken", [True, False])
def test_a_policy_asks_the_cluster_for_nodes(endless: Callable[..., Job], taken: bool) -> None:
    asked: list[int] = []

    def request(more: int) -> bool:
        asked.append(more)
        return taken

    policy = Own(nothing("not yet"))
    with endless(policy, nodes_max=3, master="spark://host:7077") as job:
        until(job, lambda: policy.seen)
        job._runtime.engine.request_nodes = request  # type: ignore[union-attr]
        policy.decision = Decision("scale_out", "1 is not enough", nodes=1)
        until(job, lambda: policy.seen[-1].coming == 1)
        shown = len(policy.seen)
        until(job, lambda: len(policy.seen) > shown + 5)
        assert asked == [1], "what was asked for, or refused, is not asked for again"
        controller = job._runtime.controller
        assert controller is not None and controller.fleet.invited == int(taken)
    assert any("policy own: add 1 node: 1 is not enough" in notice for notice in job.notices)
    assert sum("did not take a policy's request" in notice for notice in job.notices) == int(not taken)


def test_where_there_are_no_nodes_it_is_said_once(endless: Callable[..., Job]) -> None:
    policy = Own(Decision("scale_out", "1 is not enough", nodes=1))
    with endless(policy, nodes_max=3) as job:
        until(job, lambda: policy.seen and policy.seen[-1].coming)
        shown = len(policy.seen)
        until(job, lambda: len(policy.seen) > shown + 5)
    assert len([notice for notice in job.notices if "there are no nodes that a policy could add" in notice]) == 1


@pytest.mark.parametrize(("which", "chosen"), [((), "b"), (("c",), "c")])
def test_a_policy_gives_nodes_back(endless: Callable[..., Job], which: tuple[str, ...], chosen: str) -> None:
    policy = Own(nothing("not yet"))
    with endless(policy, nodes_max=3) as job:
        runtime = job._runtime
        until(job, lambda: policy.seen)
        runtime.post(NodesChanged(now=runtime.clock(), nodes=tuple(NodeInfo(n, cores=1) for n in "abc")))
        until(job, lambda: policy.seen[-1].staying == ("a", "b", "c"))
        assert runtime.controller is not None
        assert runtime.controller.routes.table.homes_of(StageId("count")) == {0: "a"}
        policy.decision = Decision("scale_in", "1 has nothing to do", nodes=1, which=which)
        until(job, lambda: len(policy.seen[-1].staying) < 3)
    (first, *_) = [record.event for record in job.journal() if isinstance(record.event, LeaveRequested)]
    assert first.nodes == (chosen,)


@pytest.mark.parametrize("interval_s", [0.0, 1_000.0])  # with every epoch; only when the job ends
@pytest.mark.parametrize(
    ("make_controller", "worker", "files"),
    [(Controller, Worker, {".delta"}), (StopAndCopy, FullSnapshots, {".base"})],
)
def test_the_ways_of_others_are_there_for_comparison(
    make_controller: type[Controller], worker: type[Worker], files: set[str], interval_s: float, tmp_path: Path
) -> None:
    sink = ps.memory()
    config = ps.Config(
        epoch_rows=10, checkpoint=str(tmp_path), checkpoint_interval_s=interval_s, deltas_max=1_000, control=False
    )
    flow = counting(testing.rows(FRAME), sink)
    job = start(flow, engine="local", config=config, worker=worker, make_controller=make_controller)
    job.wait()
    assert last_counts(sink.frame()) == dict.fromkeys(["k0", "k1", "k2", "k3", "k4"], 20)
    controller = job._runtime.controller
    assert type(controller) is make_controller
    assert {path.suffix for path in (tmp_path / "state" / "count").iterdir()} == files


def test_users_cannot_ask_for_the_ways_of_others() -> None:
    flow = counting(testing.rows(FRAME), ps.memory())
    for setting in (
        {"make_controller": StopAndCopy},
        {"worker": FullSnapshots},
        {"moves": "stop"},
        {"checkpoints": "full"},
    ):
        for run in (ps.run, ps.run_local):
            with pytest.raises((ConfigError, TypeError), match=next(iter(setting))):
                run(flow, **setting)


def test_shares_of_a_source_that_were_found_after_a_recovery_began_do_not_run() -> None:
    """They did once, and the local engine counted their rows twice: those of the old attempt, and those of the new."""
    runtime = Runtime.__new__(Runtime)
    ran: list[int] = []
    posted: list[Any] = []
    runtime.engine = SimpleNamespace(run_stage=lambda command, splits: ran.append(command.attempt))  # type: ignore[assignment]
    runtime.controller = SimpleNamespace(attempts=SimpleNamespace(current=2))  # type: ignore[assignment]
    runtime.clock = lambda: 0.0
    runtime.post = posted.append  # type: ignore[method-assign]
    for attempt in (1, 2):
        command = RunStage(
            epoch=Epoch(3),
            stage=StageId("in"),
            attempt=Attempt(attempt),
            checkpoint=Epoch(0),
            routing=RoutingTable.initial(1, {StageId("in"): False}, 1),
        )
        runtime.handle(SplitsFound(now=0.0, command=command, splits=[]))
    assert ran == [2]
    assert [(type(e), e.epoch, e.stage, e.attempt) for e in posted] == [(StageFailed, 3, "in", 1)]
