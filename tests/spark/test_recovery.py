"""The driver and its executors are killed together: what is started again has the output of the local engine.

The job is the second half of this file: see ``child.py``. Executors that die while the driver lives are in
``test_fleet.py``.
"""

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import polars as pl
import psutil
import pytest

import penstock as ps
from penstock.engines.job import start
from tests.scale import scaled
from tests.spark.child import differences, digests, finish, run, say

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.slow, pytest.mark.timeout(600)]

ROWS, EPOCH_ROWS, SLICES = 3_000, 300, 8
EPOCHS = ROWS // EPOCH_ROWS
SETTINGS: dict[str, Any] = dict(slices=SLICES, epoch_rows=EPOCH_ROWS, checkpoint_interval_s=0.0)


def test_everything_is_killed_at_once_and_fewer_machines_go_on(tmp_path: Path) -> None:
    """All executors and the driver die together after a checkpoint; one executor fewer takes up what they left."""
    executors = scaled(2, 3)
    died = finish(__file__, tmp_path, executors, timeout_s=280)
    assert died.returncode == -signal.SIGKILL, f"it ended before a checkpoint: {died.stderr[-4_000:]}"
    found = run(__file__, tmp_path, executors - 1, timeout_s=280)
    assert found["first"] > 1, "it went on from the checkpoint"
    assert found["durable"] >= 2 * SLICES, "whose slices all came from the durable store: there was nobody to ask"
    assert len(found["nodes"]) == executors - 1 and found["phase"] == "complete"
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


def beside_a_quiet_run(place: Path) -> dict[str, Any]:
    ps.run_local(build(place / "local"), **SETTINGS)
    ours, theirs = digests(place / "spark", "ab"), digests(place / "local", "ab")
    return {"equal": ours == theirs, "differ": differences(ours, theirs), "compared": len(ours)}


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
    assert job.wait(240), "it hangs"
    say(
        **beside_a_quiet_run(place),
        phase=job.status().phase,
        nodes=sorted({r.node for r in reports}),
        first=min(r.epoch for r in reports),
        durable=sum(r.rebuilt.get("durable", 0) for r in reports),
    )


if __name__ == "__main__":
    everything(Path(sys.argv[1]), int(sys.argv[2]))
