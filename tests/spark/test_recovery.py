"""Real executors in processes of their own, one of them killed in mid-run, or all of them and the driver: the output is
the local engine's.

The jobs are the second half of this file: see ``child.py``.
"""

import contextlib
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import polars as pl
import psutil
import pytest

import penstock as ps
from penstock.control.events import (
    StageDone,
    StageFailed,
)
from penstock.engines.job import start
from penstock.engines.spark.engine import SparkEngine
from tests.spark.child import differences, digests, executors, finish, kill, run, say

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.slow, pytest.mark.timeout(420)]

ROWS, EPOCH_ROWS, SLICES = 3_000, 300, 8
EPOCHS = ROWS // EPOCH_ROWS
SETTINGS: dict[str, Any] = dict(slices=SLICES, epoch_rows=EPOCH_ROWS, checkpoint_interval_s=0.0)


def test_an_executor_is_killed_in_mid_run(tmp_path: Path) -> None:
    """Until then containers live on both executors, each where it was; after it, the output is still exact."""
    found = run(__file__, "one", tmp_path, 4, timeout_s=400)
    assert len(found["nodes"]) == 2
    assert len(found["homes"]) == 4, f"a container moved for no reason: {found['homes']}"
    assert found["remote"] > 0, "rows went from one to the other"
    assert found["killed"] == 1
    assert found["equal"], "the output is not what an undisturbed run gives"
    assert found["rows"]["b"] == ROWS
    assert found["phase"] == "complete"
    assert found["recoveries"] >= 1
    alive = {node for node, _ in found["after"].values()}
    stayed = {c: home for c, home in found["before"].items() if home[0] in alive}
    assert len(stayed) == 2, "half of the four containers were on the executor that was not killed"
    # Its process may be another: when a job fails, Spark kills those of its tasks that run, and their workers too.
    assert {c: found["after"][c][0] for c in stayed} == {c: node for c, (node, _) in stayed.items()}


def test_a_job_that_is_submitted_while_its_attempt_is_cancelled(tmp_path: Path) -> None:
    """It is not there yet to be cancelled, and half of its tasks are for an executor that died meanwhile: Spark would
    keep them for it for ten minutes, or until another one comes."""
    found = run(__file__, "late", tmp_path, 4, timeout_s=200)
    assert found["late"], "no job came late"
    assert found["ended"] == ["StageFailed"] * len(found["late"]), "it was waited for"
    assert found["phase"] == "complete" and found["recoveries"] >= 1
    assert found["equal"], f"the output differs: {found['differ']}"
    assert found["compared"] == 2 * EPOCHS


def test_everything_is_killed_at_once_and_fewer_machines_go_on(tmp_path: Path) -> None:
    """Three executors and the driver die together after a checkpoint; two executors take up what three left."""
    died = finish(__file__, "all", tmp_path, 3, timeout_s=200)
    assert died.returncode == -signal.SIGKILL, f"it ended before a checkpoint: {died.stderr[-4_000:]}"
    found = run(__file__, "all", tmp_path, 2, timeout_s=200)
    assert found["first"] > 1, "it went on from the checkpoint"
    assert found["durable"] >= 2 * SLICES, "whose slices all came from the durable store: there was nobody to ask"
    assert len(found["nodes"]) == 2 and found["phase"] == "complete"
    assert found["equal"], f"the output differs: {found['differ']}"
    assert found["compared"] == 2 * EPOCHS


# -- the jobs ----------------------------------------------------------------------------------------------------------


class Chain(ps.Operator):
    """A hash of all events of a key, in their order."""

    def on_event(self, key: str, event: Any, chain: ps.Value[int], emit: Any) -> None:
        chain.set((chain.get(0) * 31 + event.n) % 1_000_003)
        emit(word=key, chain=chain.get())


def make(first: int, n: int, rng: Any) -> pl.DataFrame:
    i = range(first, first + n)
    return pl.DataFrame({"word": [f"w{v * 7919 % 41}" for v in i], "n": [v % 10 for v in i], "x": [v / 7 for v in i]})


def build(out: Path) -> ps.Flow:
    flow = ps.Flow("recovers")
    words = flow.source("in", ps.generator(make, rows=ROWS, schema={"word": str, "n": int, "x": float}))
    sums = words.key_by("word").aggregate("sums", rows=ps.count(), x=ps.sum("x"))
    sums.sink("a", ps.parquet(out / "a", durable=False))
    words.key_by("word").process("chain", Chain(), schema={"word": str, "chain": int}).sink(
        "b", ps.parquet(out / "b", durable=False)
    )
    return flow


def outputs(out: Path) -> dict[str, pl.DataFrame]:
    return {s: ps.read_output(out / s).sort(pl.all()) for s in "ab"}


def beside_a_quiet_run(place: Path) -> dict[str, Any]:
    ps.run_local(build(place / "local"), **SETTINGS)
    ours, theirs = digests(place / "spark", "ab"), digests(place / "local", "ab")
    return {"equal": ours == theirs, "differ": differences(ours, theirs), "compared": len(ours)}


def one(place: Path, kill_at: int) -> None:
    """``kill_at``: how many epochs are published before an executor is killed."""
    ps.run_local(build(place / "local"), instances=2, **SETTINGS)
    config = ps.Config(master="local-cluster[2,1,1024]", checkpoint=str(place / "ck"), instances=2, **SETTINGS)
    published, killed = 0, []

    def trip(step: str) -> None:
        nonlocal published
        published += step == "after-publish"
        if step == "after-publish" and published == kill_at:
            victim = executors()[0]
            killed.append(victim.pid)
            kill([victim])

    homes: set[tuple[str, int, str]] = set()
    before: dict[str, tuple[str, int]] = {}
    after: dict[str, tuple[str, int]] = {}
    job = start(build(place / "spark"), engine="spark", config=config, trip=trip)
    observe = job._runtime._observe

    def watch(event: Any) -> None:
        reports = [r for r in getattr(event, "reports", ()) if r.stage != "in"]
        if not killed:
            homes.update((r.stage, r.index, r.node) for r in reports)
        (after if killed else before).update({f"{r.stage}:{r.index}": (r.node, r.pid) for r in reports})
        observe(event)

    job._runtime._observe = watch  # type: ignore[method-assign]
    assert job.wait(300), "it hangs"
    ours, theirs = outputs(place / "spark"), outputs(place / "local")
    status = job.status()
    say(
        equal=all(ours[s].equals(theirs[s]) for s in "ab"),
        rows={s: ours[s].height for s in "ab"},
        recoveries=status.recoveries,
        phase=status.phase,
        killed=len(killed),
        nodes=sorted({n for _, _, n in homes}),
        homes=sorted(homes),
        before=before,
        after=after,
        remote=sum(o.bytes_remote for o in status.stages),
    )


def late(place: Path, kill_at: int) -> None:
    """After ``kill_at`` epochs an executor is killed. What is about to be submitted then waits until all is cancelled,
    and is submitted nevertheless.
    """
    config = ps.Config(master="local-cluster[2,1,1024]", checkpoint=str(place / "ck"), instances=2, **SETTINGS)
    killed, cancelled = threading.Event(), threading.Event()
    came_late: list[tuple[int, int]] = []
    ended: list[str] = []
    tasks, cancel = SparkEngine._tasks, SparkEngine.cancel

    def held(self: Any, stage: Any, command: Any, *args: Any) -> Any:
        found = tasks(self, stage, command, *args)
        if stage.source is not None and command.epoch > kill_at and not cancelled.is_set():
            if not killed.is_set():
                killed.set()
                kill(executors()[:1])
            assert cancelled.wait(60), "nothing was cancelled"
            came_late.append((command.epoch, command.attempt))
        return found

    def watched(self: Any, attempt: Any) -> None:
        cancel(self, attempt)
        cancelled.set()

    SparkEngine._tasks, SparkEngine.cancel = held, watched  # type: ignore[method-assign]
    job = start(build(place / "spark"), engine="spark", config=config)
    observe = job._runtime._observe

    def watch(event: Any) -> None:
        if (
            isinstance(event, StageDone | StageFailed)
            and event.stage == "in"
            and (event.epoch, event.attempt) in came_late
        ):
            ended.append(type(event).__name__)
        observe(event)

    job._runtime._observe = watch  # type: ignore[method-assign]
    assert job.wait(100), f"it hangs: {job.status()}"
    say(
        **beside_a_quiet_run(place),
        phase=job.status().phase,
        recoveries=job.status().recoveries,
        late=came_late,
        ended=ended,
    )


def everything(place: Path, nodes: int) -> None:
    """The first start dies after its first checkpoint, with all that it has started. The second one ends in peace."""
    again = (place / "ck").exists()

    def trip(step: str) -> None:
        if step == "after-manifest" and not again:
            for process in psutil.Process().children(recursive=True):  # Java, the executors, their Python
                with contextlib.suppress(psutil.Error):
                    process.kill()
            os.kill(os.getpid(), signal.SIGKILL)

    config = ps.Config(master=f"local-cluster[{nodes},1,1024]", checkpoint=str(place / "ck"), backups=1, **SETTINGS)
    job = start(build(place / "spark"), engine="spark", config=config, trip=trip)
    observe = job._runtime._observe
    reports: list[Any] = []

    def watch(event: Any) -> None:
        reports.extend(r for r in getattr(event, "reports", ()) if r.stage != "in")
        observe(event)

    job._runtime._observe = watch  # type: ignore[method-assign]
    assert job.wait(150), "it hangs"
    say(
        **beside_a_quiet_run(place),
        phase=job.status().phase,
        nodes=sorted({r.node for r in reports}),
        first=min(r.epoch for r in reports),
        durable=sum(r.rebuilt.get("durable", 0) for r in reports),
    )


if __name__ == "__main__":
    {"one": one, "all": everything, "late": late}[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
