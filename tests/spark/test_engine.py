"""Flows on Spark as users meet them: bad records, errors in their code, what the status says."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import polars as pl
import pytest

import penstock as ps
from penstock.engines.job import start
from penstock.engines.spark.archive import archive_path, java_options
from penstock.errors import BadRecordError, FlowError, UserCodeError
from penstock.testing import rows

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

cloudpickle.register_pickle_by_value(sys.modules[__name__])

FRAME = pl.DataFrame({"k": [f"k{i % 5}" for i in range(100)], "x": list(range(100))})


def config(**more: Any) -> ps.Config:
    return ps.Config(**{"master": "local[2]", "instances": 1, "slices": 8, "epoch_rows": 50, **more})


def run(flow: ps.Flow, **more: Any) -> ps.Job:
    job = start(flow, engine="spark", config=config(**more))
    assert job.wait(240), "it hangs"
    return job


def no_java(error: BaseException) -> None:
    text = str(error)
    assert "\tat " not in text and "org.apache.spark" not in text and "py4j" not in text.lower(), text
    assert "Traceback" not in text, text


def test_jvms_map_the_archive_of_classes_or_leave_one(session: Any) -> None:
    if not Path("/proc/self/maps").exists():
        pytest.skip("this system does not tell what a process maps")
    if not java_options(archive_path())[0]:
        pytest.skip("there is no directory for the archive that may be written, or it is being written")
    java = session._jvm.java.lang
    maps = Path(f"/proc/{java.ProcessHandle.current().pid()}/maps").read_text()
    given = [a.partition("=") for a in java.management.ManagementFactory.getRuntimeMXBean().getInputArguments()]
    (found,) = [
        (option, path in maps)
        for option, _, path in given
        if option in ("-XX:SharedArchiveFile", "-XX:ArchiveClassesAtExit")
    ]
    assert found in (("-XX:SharedArchiveFile", True), ("-XX:ArchiveClassesAtExit", False)), "Java did not take it"


def test_a_whole_flow_and_what_its_status_says(session: Any, tmp_path: Path) -> None:
    """A running count with three sinks: on the workers, on the driver, and a function."""
    collected, seen = ps.memory(), []
    flow = ps.Flow("whole")
    counts = (
        flow.source("in", rows(FRAME)).where("most", pl.col("x") >= 10).key_by("k").aggregate("count", n=ps.count())
    )
    counts.sink("files", ps.parquet(tmp_path / "out", durable=False))
    counts.sink("memory", collected)
    counts.sink("function", ps.foreach_batch(lambda epoch, frame: seen.append((epoch, frame.height))))
    job = run(flow, instances=2, checkpoint=str(tmp_path / "ck"), checkpoint_interval_s=0.0)
    frame = ps.read_output(tmp_path / "out")
    assert frame.group_by("k").agg(pl.col("n").max()).sort("k").rows() == [(f"k{i}", 18) for i in range(5)]
    assert sorted(collected.frame().rows()) == sorted(frame.drop("epoch").rows())
    assert [s for s in seen if s[1]] == [(1, 5), (2, 5)]
    status = job.status()
    assert (status.flow, status.engine, status.phase, status.error) == ("whole", "spark", "complete", None)
    assert (status.epoch, status.checkpoint_epoch, status.rows, status.recoveries) == (3, 3, 100, 0)
    assert status.checkpoints >= 1 and status.checkpoint_bytes > 0
    assert status.state_rows == 5 and status.state_bytes > 0
    assert status.slices == 8 and status.uptime_s > 0 and status.epoch_ms > 0
    source, count = status.stages
    assert (source.id, source.kind, source.operators) == ("in", "source", ("in", "most"))
    assert (source.rows_in, count.rows_in) == (100, source.rows_out)
    assert count.operators == ("count", "files", "memory", "function") and count.instances == 2
    assert 0 < count.busy <= 1 and 0 < source.busy <= 1
    assert source.bytes_local > 0 and source.bytes_remote == 0, "all on one machine"
    assert session.sparkContext._jsc is not None, "a session that was there before is left running"
    assert any("already running" in n for n in job.notices)


def test_malformed_records_are_set_aside_and_counted(session: Any, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"k": "a"}\n{"k": oops}\n{"k": "b"}\n')
    sink, dead = ps.memory(), ps.memory()
    flow = ps.Flow("dirty")
    flow.source("lines", ps.files(str(tmp_path / "*.jsonl"), schema={"k": str})).sink("out", sink)
    flow.dead_letters(dead)
    job = run(flow)
    assert sorted(sink.frame()["k"]) == ["a", "b"]
    assert job.status().dead_letters == 1
    (row,) = dead.frame().iter_rows(named=True)
    assert row["source"] == "lines" and "oops" in row["raw"] and row["reason"]


def test_a_malformed_record_under_fail_ends_the_job_and_is_shown(session: Any, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"k": "a"}\n{"k": oops}\n')
    flow = ps.Flow("dirty", on_error="fail")
    flow.source("lines", ps.files(str(tmp_path / "*.jsonl"), schema={"k": str})).sink("out", ps.memory())
    with pytest.raises(BadRecordError) as error:
        run(flow)
    assert "source 'lines' has a malformed record" in str(error.value) and "oops" in str(error.value)
    no_java(error.value)


def failing(row: dict[str, Any]) -> dict[str, Any]:
    return {"k": row["k"], "y": 1 // (row["x"] - 77)}


def failing_batch(frame: pl.DataFrame) -> pl.DataFrame:
    return pl.DataFrame([failing(r) for r in frame.iter_rows(named=True)], schema={"k": pl.String, "y": pl.Int64})


class Fails(ps.Operator):
    def on_event(self, key: str, event: Any, seen: ps.Value[int], emit: Any) -> None:
        seen.set(seen.get(0) + 1)
        emit(k=key, y=1 // (event.x - 77))


@pytest.mark.parametrize("kind", ["rows", "batches", "custom"])
def test_an_exception_in_user_code_names_operator_epoch_and_record(kind: str, session: Any) -> None:
    flow = ps.Flow("erroneous", on_error="fail")
    stream = flow.source("in", rows(FRAME))
    if kind == "rows":
        made = stream.map_rows("bad", failing, schema={"k": str, "y": int})
    elif kind == "batches":
        made = stream.map_batches("bad", failing_batch)
    else:
        made = stream.key_by("k").process("bad", Fails(), schema={"k": str, "y": int})
    sink = ps.memory()
    made.sink("out", sink)
    with pytest.raises(UserCodeError) as error:
        run(flow)
    assert "operator 'bad' raised ZeroDivisionError" in str(error.value)
    assert "epoch 2" in str(error.value) and "'x': 77" in str(error.value)
    assert error.value.evidence["operator"] == "bad"
    no_java(error.value)
    assert sorted(sink.epochs) == [1], "nothing of the failed epoch was written"


def test_a_flow_that_cannot_be_pickled_is_refused_before_it_runs(session: Any) -> None:
    lock = threading.Lock()

    def locked(frame: pl.DataFrame) -> pl.DataFrame:
        with lock:
            return frame

    flow = ps.Flow("unpicklable")
    flow.source("in", rows(FRAME)).map_batches("locked", locked).sink("out", ps.memory())
    with pytest.raises(FlowError, match="cannot be sent to Spark's workers") as error:
        run(flow)
    assert "inside the function" in error.value.remedy
    no_java(error.value)


def test_a_stop_and_a_second_start(session: Any, tmp_path: Path) -> None:
    def make(first: int, n: int, rng: Any) -> pl.DataFrame:
        return pl.DataFrame({"k": [f"k{i % 3}" for i in range(first, first + n)]})

    published = threading.Event()

    def trip(step: str) -> None:
        if step == "after-publish":
            published.set()

    ends = []
    for _ in range(2):
        published.clear()
        flow = ps.Flow("endless")
        stream = flow.source("in", ps.generator(make, schema={"k": str})).key_by("k").aggregate("count", n=ps.count())
        stream.sink("out", ps.parquet(tmp_path / "out", durable=False))
        job = start(flow, engine="spark", config=config(epoch_rows=30, checkpoint=str(tmp_path / "ck")), trip=trip)
        assert published.wait(240)
        job.stop()
        assert job.status().phase == "stopped"
        ends.append(job.status().epoch)
    assert ends[1] > ends[0]
    frame = ps.read_output(tmp_path / "out")
    assert frame.group_by("k").agg(pl.col("n").max())["n"].to_list() == [10 * ends[1]] * 3
