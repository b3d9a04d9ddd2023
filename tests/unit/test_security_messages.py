"""What goes wrong is said in words, at once, and by name."""

import json
import logging
import shutil
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest
import xxhash

import penstock as ps
from penstock.config import Config
from penstock.connectors.push import json_lines
from penstock.engines.job import start
from penstock.engines.runtime import Runtime
from penstock.engines.spark import private
from penstock.engines.spark.engine import Running, SparkEngine
from penstock.errors import CorruptData, EngineError, FlowError, IncompatibleFlow, UserCodeError
from penstock.operators import topk
from penstock.state.checkpoint import Manifest


def make(first: int, n: int, rng: object) -> pl.DataFrame:
    return pl.DataFrame({"word": [f"w{v % 7}" for v in range(first, first + n)]})


def flow(out: Path) -> ps.Flow:
    made = ps.Flow("words")
    words = made.source("in", ps.generator(make, rows=2_000, schema={"word": str}))
    words.key_by("word").aggregate("counts", n=ps.count()).sink("out", ps.parquet(out, durable=False))
    return made


SETTINGS: dict[str, Any] = dict(slices=4, instances=2, epoch_rows=500, checkpoint_interval_s=0)


# -- ids ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("id", ["..", ".", "...", "x" * 300, "ä" * 100])
def test_an_id_that_is_no_name_of_a_file_is_refused_when_the_flow_is_built(id: str) -> None:
    with pytest.raises(FlowError, match=r"another directory|bytes, more than"):
        ps.Flow("f").source(id, ps.generator(make, rows=10, schema={"word": str}))


# -- JSON --------------------------------------------------------------------------------------------------------------

DEEP = b"[" * 100_000 + b"]" * 100_000


def test_deep_json_is_no_document() -> None:
    with pytest.raises(ValueError, match="too deep"):
        json_lines(DEEP)


def test_deep_json_in_a_file_is_a_bad_record(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'{"word": ' + DEEP + b'}\n{"word": "a"}\n')
    made = ps.Flow("deep")
    made.source("in", ps.files(str(tmp_path / "in.jsonl"))).sink("out", ps.parquet(tmp_path / "out", durable=False))
    ps.run_local(made, instances=1)
    assert ps.read_output(tmp_path / "out")["word"].to_list() == ["a"]


# -- user code ---------------------------------------------------------------------------------------------------------


def leave(rows: pl.DataFrame) -> pl.DataFrame:
    if rows.height:
        raise SystemExit(3)
    return rows


class Leaves(ps.Operator):
    def on_event(self, key: str, event: Any, count: ps.Value[int], emit: Any) -> None:
        raise SystemExit(3)


@pytest.mark.parametrize("keyed", [False, True])
def test_a_function_that_calls_exit_is_named(tmp_path: Path, keyed: bool) -> None:
    made = ps.Flow("leaves")
    words = made.source("in", ps.generator(make, rows=10, schema={"word": str}))
    left = (
        words.key_by("word").process("leave", Leaves(), schema={"word": str})
        if keyed
        else words.map_batches("leave", leave, schema={"word": str})
    )
    left.sink("out", ps.parquet(tmp_path, durable=False))
    with pytest.raises(UserCodeError, match=r"'leave' raised SystemExit: 3 \(epoch 1"):
        ps.run_local(made, instances=1)


def engine() -> Any:
    plan = SimpleNamespace(by_id={"counts": SimpleNamespace(operators=("counts", "shape"))})
    made = SparkEngine(plan, "job", None, "fail", Config())  # type: ignore[arg-type]
    made.jobs = {(5, "counts", 1): Running(0.0, {4: "a", 7: "b"})}
    return made


def test_a_process_that_ends_in_a_task_is_named_at_once() -> None:
    made = engine()
    error = RuntimeError(
        "Job aborted due to stage failure: Task 1 in stage 8.0 failed 1 times, most recent failure: Lost task 1.0 in "
        "stage 8.0 (TID 3) (10.0.0.2 executor 1): org.apache.spark.SparkException: Python worker exited unexpectedly "
        "(crashed). Consider setting ..."
    )
    said = made._process_ended(error, 5, "counts", 1)
    assert "container 7 of stage 'counts' (operators 'counts', 'shape') on node b" in said
    assert "epoch 5" in said
    assert made.notices == [f"{said}. The epoch is run again."]
    assert made._process_ended(RuntimeError("Lost task 1.0 in stage 8.0: something else"), 5, "counts", 1) == ""


def test_a_function_that_does_not_return_is_named_at_once() -> None:
    made = engine()
    made.reports, made.accumulator = [], SimpleNamespace(value=[])
    made.seen = {("counts", 4, "a"), ("counts", 7, "b")}
    posted: list[Any] = []
    made.post = posted.append
    made._look_for_hung()
    assert [type(e).__name__ for e in posted] == ["Stuck"]
    assert (
        "container 4 of stage 'counts' (operators 'counts', 'shape') on node a has been at epoch 5" in made.notices[0]
    )
    assert len(made.notices) == 2


# -- Spark -------------------------------------------------------------------------------------------------------------


def test_a_jvm_that_is_killed_is_told_from_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyspark import SparkContext

    process = subprocess.Popen(["sleep", "600"])
    monkeypatch.setattr(SparkContext, "_gateway", SimpleNamespace(proc=process))
    assert private.jvm_end() == ""
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert private.jvm_end() == f"Spark's JVM (process {process.pid}) was killed by signal 9 (SIGKILL)"
    assert private.jvm_lost() == private.jvm_end()


def test_tracebacks_of_py4j_stay_away_from_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    """It logs to the root, from its own file."""
    private.quieten(SimpleNamespace(_accumulatorServer=SimpleNamespace()))  # type: ignore[arg-type]
    code = compile("import logging; logging.error('from py4j')", "/site-packages/py4j/java_gateway.py", "exec")
    root = logging.getLogger()
    handler = logging.StreamHandler()
    root.addHandler(handler)
    try:
        exec(code)
        logging.error("from elsewhere")
    finally:
        root.removeHandler(handler)
        root.removeFilter(private._not_py4j)
    said = capfd.readouterr().err
    assert "from elsewhere" in said and "from py4j" not in said


def test_what_fails_because_the_engine_is_gone_is_put_down_to_that(tmp_path: Path) -> None:
    gone = EngineError("Spark's JVM is gone.")
    runtime = Runtime.__new__(Runtime)
    runtime.error, runtime.engine = None, SimpleNamespace(lost=lambda: gone)  # type: ignore[assignment]
    runtime.ended = SimpleNamespace(set=lambda: None)  # type: ignore[assignment]
    runtime._close = lambda: None  # type: ignore[method-assign]

    def start() -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    runtime.clock = lambda: 0.0
    runtime._publish_status = lambda now, at_once=False: None  # type: ignore[method-assign]
    runtime._start = start  # type: ignore[method-assign]
    runtime.run()
    assert runtime.error is gone


@pytest.mark.parametrize(
    "text",
    [
        "/tmp/blockmgr-1/0c/shuffle_0.index",
        "Job aborted: java.nio.file.NoSuchFileException: /tmp/blockmgr-1/0c/shuffle_0.index\n\tat java.base",
    ],
)
def test_a_lost_local_directory_is_no_bare_path(text: str) -> None:
    said = private.short_reason(RuntimeError(text))
    assert said.startswith("/tmp/blockmgr-1/0c/shuffle_0.index is missing") and "SPARK_LOCAL_DIRS" in said


# -- checkpoints -------------------------------------------------------------------------------------------------------


def spoil(checkpoint: Path) -> None:
    for manifest in (checkpoint / "manifests").iterdir():
        manifest.write_bytes(manifest.read_bytes()[:-20])


def test_with_the_log_from_the_first_epoch_on_a_damaged_manifest_is_made_again(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    forget = Runtime._forget

    def keep(self: Runtime) -> None:
        if not kept.exists():
            shutil.copytree(tmp_path / "checkpoint", kept)
        forget(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Runtime, "_forget", keep)
        ps.run_local(flow(tmp_path / "out"), checkpoint=str(tmp_path / "checkpoint"), **SETTINGS)
    whole = ps.read_output(tmp_path / "out")
    spoil(kept)
    config = Config(checkpoint=str(kept), control=False, **SETTINGS)
    job = start(flow(tmp_path / "out"), engine="local", config=config)
    job.wait()
    assert any("log is there from epoch 1" in notice for notice in job.notices)
    assert ps.read_output(tmp_path / "out").equals(whole)


def test_without_it_the_message_says_what_is_there(tmp_path: Path) -> None:
    ps.run_local(flow(tmp_path / "out"), checkpoint=str(tmp_path / "checkpoint"), **SETTINGS)
    spoil(tmp_path / "checkpoint")
    with pytest.raises(CorruptData, match=r"the log (begins with epoch \d+|is empty)"):
        ps.run_local(flow(tmp_path / "out"), checkpoint=str(tmp_path / "checkpoint"), **SETTINGS)


def test_a_checkpoint_with_pickles_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def best() -> ps.Flow:
        made = ps.Flow("best")
        words = made.source("in", ps.generator(nested, rows=20, schema={"word": str, "n": pl.List(pl.Int64), "m": int}))
        words.key_by("word").top_k("best", 3, by="m").sink("out", ps.parquet(tmp_path / "out", durable=False))
        return made

    def nested(first: int, n: int, rng: object) -> pl.DataFrame:
        return make(first, n, rng).with_columns(n=pl.lit([1], pl.List(pl.Int64)), m=pl.int_range(pl.len()))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(topk, "stored_as", lambda columns: {})
        ps.run_local(best(), checkpoint=str(tmp_path / "checkpoint"), **SETTINGS)
    with pytest.raises(IncompatibleFlow, match="operator 'best' was kept as pickles"):
        ps.run_local(best(), checkpoint=str(tmp_path / "checkpoint"), **SETTINGS)


@pytest.mark.parametrize("body", [DEEP, b"[]", b"{}", b'{"format": 1, "files": {"a": [1]}}', b"\xff"])
def test_a_forged_manifest_is_damaged(body: bytes) -> None:
    whole = Manifest("job", "flow", {}, 1).to_bytes()
    checksum = json.loads(whole)["checksum"].encode()
    start = whole.index(b'"body"') + len(b'"body":')
    start += whole[start:].index(b"{")
    forged = whole[:start].replace(checksum, xxhash.xxh3_64_hexdigest(body).encode()) + body + whole[-2:]
    with pytest.raises(CorruptData):
        Manifest.from_bytes(forged)
