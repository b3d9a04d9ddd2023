"""Disks that fill up, files that rot, flows that change, two jobs in one directory."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import penstock as ps
from penstock.engines import job as job_module
from penstock.engines.job import Job, start
from penstock.errors import (
    CheckpointError,
    CheckpointInUse,
    CorruptData,
    IncompatibleFlow,
    PenstockError,
    SinkError,
    StorageFull,
)
from penstock.state.checkpoint import Manifest
from penstock.state.codec import decode_header
from penstock.state.store import FailingStore, MemoryStore, Store
from penstock.testing import rows
from tests.scale import THOROUGH

pytestmark = [pytest.mark.crash]

ROWS = 60
FRAME = pl.DataFrame(
    {
        "k": [f"k{i % 7}" for i in range(ROWS)],
        "x": [i / 3 for i in range(ROWS)],
        "t": pl.Series(range(ROWS)).cast(pl.Datetime("us")),
    }
)


class Last(ps.Operator):
    def on_event(self, key: str, event: Any, before: ps.Value[float], emit: Any) -> None:
        emit(k=key, step=event.x - before.get(0.0))
        before.set(event.x)


def build(out: Path, *, sources: int = 1) -> ps.Flow:
    flow = ps.Flow("stored")
    given = flow.source("in", rows(FRAME))
    given.key_by("k").aggregate("sums", n=ps.count(), x=ps.sum("x")).sink("a", ps.parquet(out / "a", durable=False))
    windows = given.key_by("k").window(ps.hopping(20e-6, every=10e-6, on="t")).aggregate("windows", n=ps.count())
    windows.sink("b", ps.parquet(out / "b", durable=False))
    given.key_by("k").process("last", Last(), schema={"k": str, "step": float}).sink(
        "c", ps.parquet(out / "c", durable=False)
    )
    return flow


SETTINGS: dict[str, Any] = {
    "instances": 2,
    "slices": 4,
    "epoch_rows": 10,
    "checkpoint_interval_s": 0.0,
    "deltas_max": 2,
    "manifests_kept": 2,
}


def run(flow: ps.Flow, **settings: Any) -> Job:
    job = start(flow, engine="local", config=ps.Config(**{**SETTINGS, **settings}))
    assert job.wait(120), "it hangs"
    return job


def output(out: Path) -> dict[str, pl.DataFrame]:
    return {sink: ps.read_output(out / sink).sort(pl.all()) for sink in "abc"}


def check(out: Path, expected: dict[str, pl.DataFrame]) -> None:
    found = output(out)
    for sink, frame in expected.items():
        assert found[sink].equals(frame), f"the rows of '{sink}' are others"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pl.DataFrame]:
    place = tmp_path_factory.mktemp("expected")
    run(build(place))
    return output(place)


# -- stores that fail ------------------------------------------------------------------------------------------------


@pytest.fixture
def use_store(monkeypatch: pytest.MonkeyPatch) -> Callable[[Store], None]:
    """Have the next job keep its checkpoints in this store."""
    return lambda store: monkeypatch.setattr(job_module, "MemoryStore", lambda: store)


def writes_of_a_whole_run(use_store: Callable[[Store], None], place: Path) -> int:
    counting = FailingStore(MemoryStore(), 10**9)
    use_store(counting)
    run(build(place))
    return counting.writes


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True], ids=["before it takes effect", "after it took effect"])
def test_the_disk_vanishes_at_each_write(
    after: bool, expected: dict[str, pl.DataFrame], use_store: Callable[[Store], None], tmp_path: Path
) -> None:
    """For every k: the job ends with a clear error or (garbage, merges) goes on; the next one completes the output.
    ``make test`` tries every third, and others before the write takes effect than after it."""
    total = writes_of_a_whole_run(use_store, tmp_path / "counting")
    assert total > 20
    failed = 0
    tried = range(1, total + 1) if THOROUGH else range(1 + after, total + 1, 3)
    for k in tried:
        out = tmp_path / str(k)
        disk = MemoryStore()
        use_store(FailingStore(disk, k, after=after))
        try:
            run(build(out))
        except PenstockError as error:
            failed += 1
            assert "on purpose" in str(error), f"write {k}: {error!r} does not say what happened"
            assert error.remedy
            assert "report it" not in str(error), f"write {k}: {error}"
        use_store(disk)
        run(build(out))
        check(out, expected)
    assert failed > len(tried) // 2


def test_a_write_that_fails_once_is_no_catastrophe(
    expected: dict[str, pl.DataFrame], use_store: Callable[[Store], None], tmp_path: Path
) -> None:
    """A delta that could not be written is written again, after a recovery; the job does not end."""
    disk = MemoryStore()

    class Once(FailingStore):
        failed = False

        def put(self, name: str, data: bytes) -> None:
            if name.endswith(".delta") and not self.failed:
                self.failed = True
                raise OSError(errno.EIO, "a hiccup", name)
            self.inner.put(name, data)

    store = Once(disk, 10**9)
    use_store(store)
    job = run(build(tmp_path))
    assert store.failed
    assert job.status().recoveries == 1
    check(tmp_path, expected)


class FullStore(FailingStore):
    """From its k-th write on there is no room."""

    def _error(self, name: str) -> OSError:
        raise StorageFull(f"No room left to write {name}.", remedy="Free some space.", path=name)


@pytest.mark.parametrize("k", [1, 2, 5, 9, 20])
def test_a_full_disk_is_called_so(
    k: int, expected: dict[str, pl.DataFrame], use_store: Callable[[Store], None], tmp_path: Path
) -> None:
    disk = MemoryStore()
    use_store(FullStore(disk, k))
    with pytest.raises(StorageFull, match="No room left"):
        run(build(tmp_path))
    use_store(disk)
    run(build(tmp_path))
    check(tmp_path, expected)


def test_no_room_for_the_output(
    expected: dict[str, pl.DataFrame],
    use_store: Callable[[Store], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = MemoryStore()
    use_store(disk)
    real = os.replace
    calls = 0

    def full(a: Any, b: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 9:
            raise OSError(errno.ENOSPC, "No space left on device", a)
        real(a, b)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(StorageFull):
            run(build(tmp_path))
    run(build(tmp_path))
    check(tmp_path, expected)


# -- files that rot --------------------------------------------------------------------------------------------------


def stopped(place: Path, epochs: int = 4) -> Path:
    """A job that has stopped in the middle; its checkpoint directory."""
    run(build(place / "out"), checkpoint=str(place / "ck"), epochs_max=epochs)
    return place / "ck"


def resume(place: Path) -> Job:
    return run(build(place / "out"), checkpoint=str(place / "ck"))


def newest(files: list[Path]) -> Path:
    return sorted(files)[-1]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(bytes(data))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [truncate, flip, empty], ids=lambda f: f.__name__)
def test_a_damaged_manifest_is_passed_over(
    damage: Callable[[Path], None], expected: dict[str, pl.DataFrame], tmp_path: Path
) -> None:
    checkpoint = stopped(tmp_path)
    bad = newest(list((checkpoint / "manifests").iterdir()))
    damage(bad)
    job = resume(tmp_path)
    assert any(bad.name in n and "Went back to the whole checkpoint" in n for n in job.notices), job.notices
    check(tmp_path / "out", expected)


@pytest.mark.parametrize("damage", [truncate, flip, remove], ids=lambda f: f.__name__)
def test_a_damaged_state_file_is_passed_over(
    damage: Callable[[Path], None], expected: dict[str, pl.DataFrame], tmp_path: Path
) -> None:
    checkpoint = stopped(tmp_path)
    manifests = sorted((checkpoint / "manifests").iterdir())
    new, old = (names_in(m) for m in (manifests[-1], manifests[-2]))
    only_new = sorted(new - old)
    assert only_new
    damage(checkpoint / only_new[0])
    job = resume(tmp_path)
    assert any("Went back to the whole checkpoint" in n for n in job.notices), job.notices
    check(tmp_path / "out", expected)


def names_in(manifest: Path) -> set[str]:
    body = json.loads(manifest.read_bytes())["body"]
    return {f["name"] for files in body["files"].values() for f in files}


def test_no_whole_checkpoint_left(tmp_path: Path) -> None:
    checkpoint = stopped(tmp_path)
    for manifest in (checkpoint / "manifests").iterdir():
        truncate(manifest)
    before = output_files(tmp_path / "out")
    with pytest.raises(CorruptData, match="no whole checkpoint is left") as error:
        resume(tmp_path)
    assert error.value.remedy
    assert output_files(tmp_path / "out") == before, "and nothing was touched"


class Losing(MemoryStore):
    """What begins like this is gone once the start has seen that all of it is whole."""

    def __init__(self, disk: MemoryStore, prefix: str) -> None:
        super().__init__()
        self.items = dict(disk.items)
        self.prefix = prefix
        self.seen: set[str] = set()

    def get(self, name: str) -> bytes:
        if name.startswith(self.prefix):
            if name in self.seen:
                raise FileNotFoundError(errno.ENOENT, "no such item", name)
            self.seen.add(name)
        return super().get(name)


@pytest.mark.parametrize("prefix", ["state/sums/", "manifests/"])
def test_a_checkpoint_lost_while_the_job_runs_ends_it_at_once(
    prefix: str, expected: dict[str, pl.DataFrame], use_store: Callable[[Store], None], tmp_path: Path
) -> None:
    """Slices that nobody holds, and no file to bring them up from: to try again would not help."""
    disk = MemoryStore()
    use_store(disk)
    run(build(tmp_path), epochs_max=4)
    before = output(tmp_path)
    use_store(Losing(disk, prefix))
    job = start(build(tmp_path), engine="local", config=ps.Config(**SETTINGS))
    with pytest.raises(CheckpointError) as error:
        job.wait(120)
    assert job.status().recoveries == 0
    assert type(error.value) is CheckpointError and str(error.value.evidence["path"]).startswith(prefix)
    for words in ("slices 0, ", "backup", str(error.value.evidence["path"]), "is missing"):
        assert words in error.value.message
    stages = ["sums"] if prefix.startswith("state/") else ["sums", "windows", "last"]
    assert error.value.evidence["stage"] in stages and f"stage '{error.value.evidence['stage']}'" in error.value.message
    assert "start again" in error.value.remedy.lower()
    check(tmp_path, before)
    use_store(disk)
    run(build(tmp_path))
    check(tmp_path, expected)


def test_every_file_of_a_checkpoint_says_which_input_it_reflects(tmp_path: Path) -> None:
    """Deltas and what was merged of them: as far as the sources were read at the file's last epoch."""
    config = {"epoch_rows": 2, "manifests_kept": 100, "checkpoint": str(tmp_path / "ck")}
    run(build(tmp_path / "out"), **config)
    manifests = [Manifest.from_bytes(path.read_bytes()) for path in (tmp_path / "ck" / "manifests").iterdir()]
    read = {m.epoch: {source: known["offset"] for source, known in m.sources.items()} for m in manifests}
    files = {file.name: file for manifest in manifests for file in manifest.all_files()}
    assert {file.kind for file in files.values()} == {"base", "delta"}
    for name, file in files.items():
        header = decode_header((tmp_path / "ck" / name).read_bytes(), name)
        assert header["progress"] == read[file.epoch_to] != {}, name


def output_files(out: Path) -> dict[str, bytes]:
    return {str(f): f.read_bytes() for f in sorted(out.rglob("*")) if f.is_file()}


@pytest.mark.parametrize("damage", [truncate, flip], ids=lambda f: f.__name__)
def test_a_damaged_log_entry_is_never_guessed(damage: Callable[[Path], None], tmp_path: Path) -> None:
    """Without it the epochs after the checkpoint could be cut otherwise than those already published."""
    flow = build(tmp_path / "out")
    stop_after = iter(range(10))

    def trip(step: str) -> None:
        if step == "before-manifest" and next(stop_after) == 2:
            raise OSError(errno.EIO, "on purpose")

    config = ps.Config(**{**SETTINGS, "checkpoint": str(tmp_path / "ck")})
    with pytest.raises(PenstockError):
        start(flow, engine="local", config=config, trip=trip).wait()
    damage(newest(list((tmp_path / "ck" / "log").iterdir())))
    with pytest.raises(CorruptData, match="checksum"):
        resume(tmp_path)


def test_a_damaged_job_file(tmp_path: Path) -> None:
    checkpoint = stopped(tmp_path)
    truncate(checkpoint / "job.json")
    with pytest.raises(CorruptData, match=r"job\.json"):
        resume(tmp_path)


# -- whose directory -------------------------------------------------------------------------------------------------


def test_a_second_job_in_another_process_is_refused(tmp_path: Path) -> None:
    """While the first runs; once it is gone the directory is free."""
    flow = ps.Flow("held")
    held = ps.generator(lambda first, n, rng: pl.DataFrame({"k": [1] * n}), rows_per_s=1, schema={"k": int})
    flow.source("in", held).key_by("k").aggregate("n", n=ps.count()).sink("out", ps.memory())
    config = ps.Config(checkpoint=str(tmp_path / "ck"), instances=1)
    code = f"""
import penstock as ps
from penstock.testing import rows
flow = ps.Flow("held")
flow.source("in", rows([{{"k": 1}}])).key_by("k").aggregate("n", n=ps.count()).sink("out", ps.memory())
try:
    ps.run_local(flow, checkpoint={str(tmp_path / "ck")!r}, instances=1)
    print("ran")
except ps.PenstockError as error:
    print(type(error).__name__, error)
"""
    job = start(flow, engine="local", config=config)
    try:
        said = python(code)
        assert said.startswith("CheckpointInUse"), said
        assert str(tmp_path / "ck") in said
        with pytest.raises(CheckpointInUse):
            start(flow, engine="local", config=config)
    finally:
        job.stop()
    assert python(code) == "ran"


def python(code: str) -> str:
    path = os.pathsep.join(p for p in sys.path if p)
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_output_of_another_job_is_refused(tmp_path: Path) -> None:
    run(build(tmp_path))
    with pytest.raises(SinkError, match="another job"):
        run(build(tmp_path))


# -- flows that change -----------------------------------------------------------------------------------------------


def changed(how: str, out: Path) -> ps.Flow:
    """The flow of ``build`` after an edit."""
    flow = ps.Flow("other" if how == "name" else "stored")
    source = flow.source("renamed" if how == "source" else "in", rows(FRAME))
    given = source.with_columns("extra", y=pl.col("x") * 2) if how == "stateless" else source
    sums = {"n": ps.count(), "x": ps.max("x") if how == "aggregate" else ps.sum("x")}
    running = given.key_by("t" if how == "key" else "k").aggregate("totals" if how == "id" else "sums", **sums)
    size = 40e-6 if how == "window" else 20e-6
    windows = given.key_by("k").window(ps.hopping(size, every=10e-6, on="t")).aggregate("windows", n=ps.count())
    operator: ps.Operator = Whole() if how == "state" else Last()
    last = given.key_by("k").process("last", operator, schema={"k": str, "step": float})
    for id, stream in (("a", running), ("b", windows), ("c", last)):
        stream.sink(id, ps.parquet(out / id, durable=False))
    if how == "new sink":
        running.sink("more", ps.memory())
    if how == "new operator":
        given.key_by("k").aggregate("new", n=ps.count()).sink("more", ps.memory())
    if how == "new source":
        flow.source("second", rows(FRAME[:5])).sink("more", ps.memory())
    return flow


class Whole(ps.Operator):
    def on_event(self, key: str, event: Any, before: ps.Value[str], emit: Any) -> None:
        emit(k=key, step=0.0)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("name", "flow 'stored', not to 'other'"),
        ("source", "source 'in' is gone"),
        ("aggregate", "operator 'sums': aggregates was"),
        ("key", "operator 'sums': key was"),
        ("id", "operator 'sums' is gone"),
        ("window", "operator 'windows': window was"),
        ("state", "operator 'last': states was"),
    ],
)
def test_a_flow_that_its_state_cannot_follow_is_refused(
    how: str, says: str, expected: dict[str, pl.DataFrame], tmp_path: Path
) -> None:
    checkpoint = stopped(tmp_path)
    with pytest.raises(IncompatibleFlow) as error:
        run(changed(how, tmp_path / "out"), checkpoint=str(checkpoint))
    assert says in str(error.value)
    assert error.value.remedy
    resume(tmp_path)
    check(tmp_path / "out", expected)


@pytest.mark.parametrize("how", ["new sink", "stateless", "new operator", "new source"])
@pytest.mark.parametrize("when", ["after a stop", "after a crash", "before the first checkpoint"])
def test_a_flow_that_can_go_on_does(how: str, when: str, expected: dict[str, pl.DataFrame], tmp_path: Path) -> None:
    """Also with epochs in the log, which name the routing of the flow as it was."""
    checkpoint = str(tmp_path / "ck")
    if when == "after a stop":
        stopped(tmp_path)
    else:
        crash_at = 2 if when == "after a crash" else 1  # the first checkpoint, and the one at the end, are certain
        count = 0

        def trip(step: str) -> None:
            nonlocal count
            count += step == "before-manifest"
            if count == crash_at:
                raise OSError(errno.EIO, "on purpose")

        config = ps.Config(**{**SETTINGS, "checkpoint": checkpoint})
        with pytest.raises(PenstockError, match="on purpose"):
            start(build(tmp_path / "out"), engine="local", config=config, trip=trip).wait()
    flow = changed(how, tmp_path / "out")
    job = run(flow, checkpoint=checkpoint)
    assert job.status().phase == "complete"
    if how != "new source":  # which shares the epochs' rows, and so cuts them otherwise
        check(tmp_path / "out", expected)
    frames = output(tmp_path / "out")
    assert frames["a"].group_by("k").agg(pl.col("n").max())["n"].sum() == ROWS
    assert frames["b"]["n"].sum() == 2 * ROWS
    assert frames["c"].height == ROWS


@pytest.mark.parametrize("settings", [{"instances": 4}, {"instances": 1}, {"slices": 64}, {"epoch_rows": 25}], ids=str)
@pytest.mark.parametrize("crash", [False, True], ids=["stopped", "crashed"])
def test_other_settings_after_a_restart(settings: dict[str, Any], crash: bool, tmp_path: Path) -> None:
    """Everything but the number of slices may change; that stays, with a notice."""
    checkpoint = str(tmp_path / "ck")
    if crash:
        calls = 0

        def trip(step: str) -> None:
            nonlocal calls
            calls += 1
            if calls == 23:
                raise OSError(errno.EIO, "on purpose")

        config = ps.Config(**{**SETTINGS, "checkpoint": checkpoint})
        with pytest.raises(PenstockError, match="on purpose"):
            start(build(tmp_path / "out"), engine="local", config=config, trip=trip).wait()
    else:
        stopped(tmp_path)
    job = run(build(tmp_path / "out"), checkpoint=checkpoint, **settings)
    assert any("slices=64 is ignored" in n for n in job.notices) == ("slices" in settings)
    if "instances" in settings:
        wanted = settings["instances"]
        assert {o.id: o.instances for o in job.status().stages} == dict.fromkeys(
            ("in", "sums", "windows", "last"), wanted
        )
    frames = output(tmp_path / "out")
    assert frames["a"].group_by("k").agg(pl.col("n").max())["n"].sum() == ROWS
    assert frames["b"]["n"].sum() == 2 * ROWS
    assert frames["c"].group_by("k").agg(pl.col("step").sum()).height == 7
    assert frames["c"].height == ROWS


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(CheckpointError):
        run(build(tmp_path / "out"), checkpoint=str(tmp_path / "file" / "ck"))
