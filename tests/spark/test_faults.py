"""One job on real executors, through every kind of loss, one after another: the output is the undisturbed run's, byte
for byte, in Parquet and in a sink of the user's that overwrites what it is given twice.

Each fault waits for the moment that it is about; what happened is read from the controller, never guessed from time.
The job is the second half of this file: see ``child.py``.
"""

import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import penstock as ps
from penstock.control.controller import Controller
from penstock.engines.job import start
from tests.spark.child import Watch, differences, digests, executors, kill, run, say

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.slow, pytest.mark.timeout(600)]


def test_executors_are_lost_in_every_way(tmp_path: Path) -> None:
    found = run(__file__, tmp_path, "one,two at once,in a checkpoint,in a recovery", timeout_s=580)
    assert found["equal"], f"the output differs: {found['differ']}"
    said = found["said"]
    assert said["one"]["backup"] >= 4, "the slices of one node of three, of each stage, had backups"
    assert said["one"]["durable"] == 0, "nothing had to come from the durable store"
    assert all(s["recoveries"] >= 1 for s in said.values())
    assert any("from backups" in notice for notice in found["notices"])


def test_a_start_a_process_a_hang_and_everything_at_once(tmp_path: Path) -> None:
    found = run(__file__, tmp_path, "in a start,a worker,a hang,all", timeout_s=580)
    assert found["equal"], f"the output differs: {found['differ']}"
    assert found["said"]["all"]["durable"] > 0, "when all are gone, the durable checkpoint restores"


# -- the job -----------------------------------------------------------------------------------------------------------

NODES = 3
SETTINGS: dict[str, Any] = dict(instances=NODES, slices=16, epoch_rows=300, checkpoint_interval_s=0.5)


class Chain(ps.Operator):
    """A hash of all events of a key, in their order. While a file is there, one of the keys hangs."""

    def __init__(self, hangs: str) -> None:
        self.hangs = hangs

    def on_event(self, key: str, event: Any, chain: ps.Value[int], emit: Any) -> None:
        while key == "w7" and os.path.exists(self.hangs):
            time.sleep(0.02)
        chain.set((chain.get(0) * 31 + event.n) % 1_000_003)
        emit(word=key, chain=chain.get())


def make(first: int, n: int, rng: Any) -> pl.DataFrame:
    i = range(first, first + n)
    return pl.DataFrame({"word": [f"w{v * 7919 % 401}" for v in i], "n": [v % 10 for v in i], "x": [v / 7 for v in i]})


def build(out: Path, hangs: Path) -> ps.Flow:
    (out / "own").mkdir(parents=True)

    def own(epoch: int, frame: pl.DataFrame) -> None:  # idempotent: an epoch that comes again replaces itself
        frame.sort(pl.all()).write_ipc(out / "own" / f"{epoch:06d}.arrow")

    flow = ps.Flow("faults")
    words = flow.source("in", ps.generator(make, schema={"word": str, "n": int, "x": float}))
    sums = words.key_by("word").aggregate("sums", rows=ps.count(), x=ps.sum("x"))
    sums.sink("a", ps.parquet(out / "a", durable=False))
    sums.sink("own", ps.foreach_batch(own))
    words.key_by("word").process("chain", Chain(str(hangs)), schema={"word": str, "chain": int}).sink(
        "b", ps.parquet(out / "b", durable=False)
    )
    return flow


def everything(out: Path) -> dict[tuple[str, int], str]:
    own = {("own", int(f.stem)): hashlib.sha256(f.read_bytes()).hexdigest() for f in (out / "own").iterdir()}
    return digests(out, "ab") | own


class Faults:
    """The faults by name; each returns when it has happened."""

    def __init__(self, watch: Watch, hangs: Path) -> None:
        self.watch = watch
        self.hangs = hangs
        self.rebuilt: list[dict[str, int]] = []
        self.pids: dict[tuple[str, int], int] = {}
        watch.on_event.append(self._hear)

    def _hear(self, event: Any) -> None:
        for report in getattr(event, "reports", ()):
            self.pids[report.stage, report.index] = report.pid
            if report.rebuilt:
                self.rebuilt.append(dict(report.rebuilt))

    def whole(self, c: Controller) -> bool:
        """All nodes are there, nothing moves, and every slice has its backup."""
        if len(c.nodes) < NODES or c.migration.moves:
            return False
        backups = self.watch.job.status().backups
        return bool(backups.get("slices_current") == backups.get("slices_total", -1))

    def strike(self, fault: str) -> dict[str, int]:
        self.watch.until("everybody has slices and backups", self.whole)
        c = self.watch.controller
        past, recoveries, before = c.published, c.recoveries, len(self.rebuilt)
        strikes: dict[str, Callable[[], None]] = {
            "one": lambda: kill(executors()[:1]),
            "two at once": lambda: kill(executors()[:2]),
            "in a checkpoint": self._in_a_checkpoint,
            "in a recovery": self._in_a_recovery,
            "in a start": self._in_a_start,
            "a worker": lambda: os.kill(self.pids["sums", 0], signal.SIGKILL),
            "a hang": self._a_hang,
            "all": lambda: kill(executors()),
        }
        strikes[fault]()
        self.watch.until(
            f"output after {fault}",
            lambda c: c.recoveries > recoveries and c.published > past + 2 and c.phase == "running",
        )
        return {
            "recoveries": c.recoveries - recoveries,
            "backup": sum(r.get("backup", 0) for r in self.rebuilt[before:]),
            "durable": sum(r.get("durable", 0) for r in self.rebuilt[before:]),
        }

    def _in_a_checkpoint(self) -> None:
        self.watch.until("a checkpoint is open", lambda c: c.checkpoint is not None)
        kill(executors()[:1])

    def _loss(self) -> None:
        recoveries = self.watch.controller.recoveries
        kill(executors()[:1])
        self.watch.until("the recovery", lambda c: c.recoveries > recoveries)

    def _in_a_recovery(self) -> None:
        self._loss()
        kill(executors()[:1])

    def _in_a_start(self) -> None:
        self._loss()
        self.watch.until("another executor comes", lambda c: len(c.nodes) >= NODES)
        kill(executors()[-1:])

    def _a_hang(self) -> None:
        """User code that does not come back, in the container that has this key."""
        self.hangs.touch()
        self.watch.until("it is noticed", lambda c: c.suspects)
        self.hangs.unlink()


def main(place: Path, names: list[str]) -> None:
    hangs = place / "hangs"
    config = ps.Config(
        master=f"local-cluster[{NODES},1,1024]",
        checkpoint=str(place / "ck"),
        backups=1,
        hang_s=8.0,
        control=False,
        **SETTINGS,
    )
    job = start(build(place / "spark", hangs), engine="spark", config=config)
    watch = Watch(job, 150)
    faults = Faults(watch, hangs)
    watch.until("a first checkpoint", lambda c: c.committed > 0)
    said = {name: faults.strike(name) for name in names}
    watch.until("everybody is back", faults.whole)
    job.stop()
    status = job.status()
    ps.run_local(build(place / "local", hangs), epochs_max=status.epoch, **SETTINGS)
    ours, theirs = everything(place / "spark"), everything(place / "local")
    say(
        equal=ours == theirs,
        differ=differences(ours, theirs),
        epochs=status.epoch,
        said=said,
        notices=job.notices[-20:],
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(","))
