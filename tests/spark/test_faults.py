"""One job on real executors, through every kind of loss, one after another: the output is the undisturbed run's, byte
for byte, in Parquet and in a sink of the user's that overwrites what it is given twice.

Each fault waits for the moment that it is about; what happened is read from the controller, never guessed from time.
The job is the second half of this file: see ``child.py``.
"""

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
from tests.spark.child import Watch, differences, digests, executors, kill, own_digests, paced, run, say

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.slow, pytest.mark.timeout(600)]


FAULTS = {
    "one": 1,
    "two at once": 2,
    "in a checkpoint": 1,
    "in a recovery": 2,
    "in a start": 1,
    "a worker": 0,
    "a hang": 0,
    "all": 3,
    "a bad disk": 0,
}
"""And how many executors are new when it is over. The last is not replaced."""


def test_executors_are_lost_in_every_way(tmp_path: Path) -> None:
    """Backups have a megabyte of memory and come to more: what is rebuilt was on holders' disks."""
    found = run(__file__, tmp_path, ",".join(FAULTS), timeout_s=580)
    assert found["equal"], f"the output differs: {found['differ']}"
    said = found["said"]
    assert said["one"]["backup"] >= 4, "the slices of one node of three, of each stage, had backups"
    assert said["one"]["durable"] == 0, "nothing had to come from the durable store"
    assert all(s["recoveries"] >= 1 for s in said.values())
    assert any("from backups" in notice for notice in found["notices"])
    newcomers = {fault: s["newcomers"] for fault, s in said.items()}
    counts = {fault: len(slices) for fault, slices in newcomers.items()}
    assert counts == FAULTS, newcomers
    assert all(min(slices, default=1) > 0 for slices in newcomers.values()), f"each has its share: {newcomers}"
    assert said["all"]["durable"] > 0, "when all are gone, the durable checkpoint restores"
    assert said["a bad disk"]["backup"] > 0 and said["a bad disk"]["durable"] == 0
    assert any("every task on node" in notice for notice in found["notices"])


# -- the job -----------------------------------------------------------------------------------------------------------

NODES = 3
SETTINGS: dict[str, Any] = dict(instances=NODES, slices=16, epoch_rows=300, checkpoint_interval_s=0.5)
LARGE_KEYS, LARGE_EVERY, LARGE_BYTES = 600, 25, 8_000
"""Keys with a large state, one row in so many: after fifty epochs they come to 4.8 MB, a third of it on each holder, of
which an epoch touches a fiftieth. All one letter, so that what travels is small.
"""


class Chain(ps.Operator):
    """A hash of all events of a key, in their order; with ballast for some. While a file is there, one key hangs."""

    def __init__(self, hangs: str) -> None:
        self.hangs = hangs

    def on_event(self, key: str, event: Any, chain: ps.Value[int], ballast: ps.Value[str], emit: Any) -> None:
        while key == "w7" and os.path.exists(self.hangs):
            time.sleep(0.02)
        if key.startswith("large") and ballast.get() is None:
            ballast.set("x" * LARGE_BYTES)
        chain.set((chain.get(0) * 31 + event.n) % 1_000_003)
        emit(word=key, chain=chain.get())


def word(row: int) -> str:
    return f"w{row * 7919 % 401}" if row % LARGE_EVERY else f"large{row // LARGE_EVERY % LARGE_KEYS}"


def make(first: int, n: int, rng: Any) -> pl.DataFrame:
    i = range(first, first + n)
    return pl.DataFrame({"word": [word(v) for v in i], "n": [v % 10 for v in i], "x": [v / 7 for v in i]})


def build(out: Path, hangs: Path, **pace: Any) -> ps.Flow:
    (out / "own").mkdir(parents=True)

    def own(epoch: int, frame: pl.DataFrame) -> None:  # idempotent: an epoch that comes again replaces itself
        frame.sort(pl.all()).write_ipc(out / "own" / f"{epoch:06d}.arrow")

    flow = ps.Flow("faults")
    words = flow.source("in", ps.generator(make, schema={"word": str, "n": int, "x": float}, **pace))
    sums = words.key_by("word").aggregate("sums", rows=ps.count(), x=ps.sum("x"))
    sums.sink("a", ps.parquet(out / "a", durable=False))
    sums.sink("own", ps.foreach_batch(own))
    words.key_by("word").process("chain", Chain(str(hangs)), schema={"word": str, "chain": int}).sink(
        "b", ps.parquet(out / "b", durable=False)
    )
    return flow


def everything(out: Path) -> dict[tuple[str, int], str]:
    return digests(out, "ab") | own_digests(out)


def spilled(disk: Path) -> int:
    """Processes that have backups on their local disk."""
    return sum(
        Path(folder).name.startswith("penstock-") and any(name.startswith("s-") for name in names)
        for folder, _, names in os.walk(disk)
    )


class Faults:
    """The faults by name; each returns when it has happened."""

    def __init__(self, watch: Watch, hangs: Path) -> None:
        self.watch = watch
        self.hangs = hangs
        self.rebuilt: list[dict[str, int]] = []
        self.pids: dict[tuple[str, int], int] = {}
        self.nodes = NODES
        """So many are there when all is well."""
        watch.on_event.append(self._hear)

    def _hear(self, event: Any) -> None:
        for report in getattr(event, "reports", ()):
            self.pids[report.stage, report.index] = report.pid
            if report.rebuilt:
                self.rebuilt.append(dict(report.rebuilt))

    def whole(self, c: Controller) -> bool:
        """All nodes are there and have slices, those who came late too; nothing moves; every slice has its backup."""
        if len(c.nodes) != self.nodes or c.migration.moves:
            return False
        status = self.watch.job.status()
        backups = status.backups
        current = backups.get("slices_current") == backups.get("slices_total", -1)
        return bool(current and all(node.slices for node in status.nodes))

    def strike(self, fault: str) -> dict[str, Any]:
        c = self.watch.controller
        past, recoveries, before, nodes = c.published, c.recoveries, len(self.rebuilt), set(c.nodes)
        strikes: dict[str, Callable[[], None]] = {
            "one": lambda: kill(executors()[:1]),
            "two at once": lambda: kill(executors()[:2]),
            "in a checkpoint": self._in_a_checkpoint,
            "in a recovery": self._in_a_recovery,
            "in a start": self._in_a_start,
            "a worker": lambda: os.kill(self.pids["sums", 0], signal.SIGKILL),
            "a hang": self._a_hang,
            "all": lambda: kill(executors()),
            "a bad disk": self._a_bad_disk,
        }
        strikes[fault]()
        self.watch.until(
            f"output after {fault}",
            lambda c: c.recoveries > recoveries and c.published > past + 2 and c.phase == "running",
        )
        rebuilt = self.rebuilt[before:]  # what moves later is another matter
        self.watch.until(f"everybody has slices and backups after {fault}", self.whole)
        slices = {node.name: node.slices for node in self.watch.job.status().nodes}
        return {
            "recoveries": c.recoveries - recoveries,
            "newcomers": [count for node, count in slices.items() if node not in nodes],
            "backup": sum(r.get("backup", 0) for r in rebuilt),
            "durable": sum(r.get("durable", 0) for r in rebuilt),
        }

    def _in_a_checkpoint(self) -> None:
        self.watch.until("a checkpoint is open", lambda c: c.checkpoint is not None)
        kill(executors()[:1])

    def _loss(self) -> None:
        recoveries = self.watch.controller.attempts.recoveries
        kill(executors()[:1])
        self.watch.until("the recovery", lambda c: c.recoveries > recoveries)

    def _in_a_recovery(self) -> None:
        self._loss()
        kill(executors()[:1])

    def _in_a_start(self) -> None:
        self._loss()
        self.watch.until("another executor comes", lambda c: len(c.nodes) >= NODES)
        kill(executors()[-1:])

    def _a_bad_disk(self) -> None:
        """An executor that answers, and cannot write a single block any more."""
        for folder in executors()[0].environ()["SPARK_EXECUTOR_DIRS"].split(os.pathsep):
            for blocks in Path(folder).glob("blockmgr-*"):
                blocks.rename(blocks.with_name(f"away-{blocks.name}"))
                blocks.touch()
        self.nodes = NODES - 1

    def _a_hang(self) -> None:
        """User code that does not come back, in the container that has this key."""
        self.hangs.touch()
        self.watch.until("it is noticed", lambda c: c.suspects)
        self.hangs.unlink()


def main(place: Path, names: list[str]) -> None:
    hangs, disk = place / "hangs", place / "disk"
    disk.mkdir()
    os.environ["SPARK_LOCAL_DIRS"] = str(disk)
    config = ps.Config(
        master=f"local-cluster[{NODES},1,1024]",
        checkpoint=str(place / "ck"),
        backups=1,
        backup_memory_mb=1,
        hang_s=8.0,
        control=False,
        **SETTINGS,
    )
    loaded = LARGE_KEYS * LARGE_EVERY // SETTINGS["epoch_rows"]
    pace = paced(SETTINGS["epoch_rows"], ahead=loaded + 1)
    job = start(build(place / "spark", hangs, **pace), engine="spark", config=config)
    watch = Watch(job, 150)
    faults = Faults(watch, hangs)
    watch.until("everything is loaded, and backed up", lambda c: c.committed > loaded and faults.whole(c))
    watch.until("every holder has more than fits into its memory", lambda c: spilled(disk) >= NODES)
    said = {name: faults.strike(name) for name in names}
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
