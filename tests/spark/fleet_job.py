"""The job of ``test_fleet.py``: one flow on three executors, which goes through whatever it is told on standard input.

A line of input is what to do, as JSON: ``{"do": "strike", "fault": "one"}``. The answer is a line of JSON too. Every
answer waits for the thing itself, which is read from the job's status or from the controller, never guessed from time.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl

import penstock as ps
from penstock.control.events import (
    StageDone,
    StageFailed,
)
from penstock.engines.job import Job, start
from penstock.engines.spark import engine as engine_module
from penstock.errors import ConfigError
from tests.scale import scaled
from tests.spark.child import (
    Watch,
    at_rest,
    checkpoint_open,
    differences,
    digests,
    executors,
    kill,
    node_of,
    own_digests,
    paced,
    say,
)

NODES, SLICES = 3, 16
STAGES = ("sums", "chain")
LIMIT_S = 240.0
SETTINGS: dict[str, Any] = dict(instances=NODES, slices=SLICES, epoch_rows=300, checkpoint_interval_s=0.5)
LARGE_KEYS, LARGE_EVERY, LARGE_BYTES = 600, 25, 8_000
"""Keys with a large state: every 25th row has one. After fifty epochs they come to 4.8 MB, a third on each holder, and
an epoch touches a fiftieth. A state is one letter many times, so that it travels small.
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

    flow = ps.Flow("fleet")
    words = flow.source("in", ps.generator(make, schema={"word": str, "n": int, "x": float}, **pace))
    sums = words.key_by("word").aggregate("sums", rows=ps.count(), x=ps.sum("x"))
    sums.sink("a", ps.parquet(out / "a", durable=False))
    sums.sink("own", ps.foreach_batch(own))
    words.key_by("word").process("chain", Chain(str(hangs)), schema={"word": str, "chain": int}).sink(
        "b", ps.parquet(out / "b", durable=False)
    )
    return flow


def spilled(disk: Path) -> int:
    """Processes that have backups on their local disk."""
    return sum(
        Path(folder).name.startswith("penstock-") and any(name.startswith("s-") for name in names)
        for folder, _, names in os.walk(disk)
    )


class Fleet:
    """What can be done to the job. Each method is one ``do``, and returns the facts that the test asserts."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.hangs, disk = place / "hangs", place / "disk"
        disk.mkdir()
        os.environ["SPARK_LOCAL_DIRS"] = str(disk)
        engine_module.GRANT_S = 2.0
        config = ps.Config(
            master=f"local-cluster[{NODES},1,1024]",
            checkpoint=str(place / "ck"),
            backups=1,
            backup_memory_mb=1,
            hang_s=float(scaled(60, 15)),
            control=False,
            **SETTINGS,
        )
        loaded = LARGE_KEYS * LARGE_EVERY // SETTINGS["epoch_rows"]
        pace = paced(SETTINGS["epoch_rows"], ahead=loaded + 1)
        self.job: Job = start(build(place / "spark", self.hangs, **pace), engine="spark", config=config)
        self.watch = Watch(self.job, LIMIT_S)
        self.rebuilt: list[dict[str, int]] = []
        self.pids: dict[tuple[str, int], int] = {}
        self.homes: dict[tuple[str, int], str] = {}
        self.seen: set[tuple[str, int, str]] = set()
        self.nodes = NODES
        """How many nodes there are when all is well."""
        self.watch.on_event.append(self._hear)
        self._until("everything is loaded, and backed up", lambda s: s.checkpoint_epoch > loaded and self._whole())
        self.watch.until("every holder has more than fits into its memory", lambda c: spilled(disk) >= NODES)

    def _hear(self, event: Any) -> None:
        for report in getattr(event, "reports", ()):
            if report.stage in STAGES:
                self.pids[report.stage, report.index] = report.pid
                self.homes[report.stage, report.index] = report.node
                self.seen.add((report.stage, report.index, report.node))
            if report.rebuilt:
                self.rebuilt.append(dict(report.rebuilt))

    # -- looking ---------------------------------------------------------------------------------------------------

    def _until(self, what: str, met: Callable[[Any], object]) -> None:
        self.watch.until(what, lambda c: met(self.job.status()))

    def _slices(self) -> dict[str, int]:
        return {node.name: node.slices for node in self.job.status().nodes}

    def _whole(self) -> bool:
        """All nodes are there and have slices; nothing moves; every slice has its backup."""
        status = self.job.status()
        backups = status.backups
        current = backups is not None and backups.slices_current == backups.slices_total
        return bool(
            current
            and not status.moves
            and len(status.nodes) == self.nodes
            and all(node.slices and node.state == "up" for node in status.nodes)
        )

    def _all_is_well(self) -> dict[str, int]:
        self.watch.until("all nodes have slices, and all slices backups", lambda c: self._whole())
        return self._slices()

    def _epochs(self, more: int) -> None:
        goal = self.job.status().epoch + more
        self._until(f"epoch {goal}", lambda s: s.epoch >= goal)

    # -- what is done ----------------------------------------------------------------------------------------------

    def settle(self) -> dict[str, Any]:
        """From the start until now, with nothing done to it."""
        status = self.job.status()
        return {
            "nodes": sorted({node for _, _, node in self.seen}),
            "homes": sorted(self.seen),
            "remote": sum(s.bytes_remote for s in status.stages),
            "recoveries": status.recoveries,
        }

    def give_back(self, newest: bool = False) -> dict[str, Any]:
        """One node leaves: which one is the job's choice, or the newest."""
        at_release: list[int] = []
        engine: Any = self.job._runtime.engine
        release = engine.release_nodes

        def watched(nodes: Any) -> None:
            slices = self._slices()
            at_release.extend(slices[node] for node in nodes)
            release(nodes)

        engine.release_nodes = watched
        before = self._slices()
        recoveries = self.job.status().recoveries
        self.job.scale_in([max(before, key=int)] if newest else 1)
        self.nodes -= 1
        after = self._all_is_well()
        del engine.release_nodes
        self._epochs(3)
        recoveries = self.job.status().recoveries - recoveries
        return {"before": before, "after": after, "at_release": at_release, "recoveries": recoveries}

    def ask_for(self, more: int, come: int) -> dict[str, Any]:
        """More nodes are asked for than there is room for."""
        before, recoveries, told = self._slices(), self.job.status().recoveries, len(self.job.notices)
        self.job.scale_out(more)
        self.nodes += come
        after = self._all_is_well()
        if come < more:
            self.watch.until("a word on those that did not come", lambda c: self._granted(told))
        self._epochs(3)
        recoveries = self.job.status().recoveries - recoveries
        return {"before": before, "after": after, "recoveries": recoveries, "notices": self._granted(told)}

    def _granted(self, told: int) -> list[str]:
        return [notice for notice in self.job.notices[told:] if "asked for came within" in notice]

    def strike(self, fault: str) -> dict[str, Any]:
        """One fault, and everything until all is well again."""
        c = self.watch.controller
        self._all_is_well()
        status = self.job.status()
        before, homes, pids = set(self._slices()), dict(self.homes), dict(self.pids)
        past, recoveries, rebuilt = status.epoch, status.recoveries, len(self.rebuilt)
        strikes: dict[str, Callable[[], dict[str, Any] | None]] = {
            "one": lambda: kill(executors()[:1]),
            "two at once": lambda: kill(executors()[:2]),
            "late": self._late,
            "in a checkpoint": self._in_a_checkpoint,
            "in a recovery": self._in_a_recovery,
            "in a start": self._in_a_start,
            "a worker": lambda: os.kill(pids["sums", 0], signal.SIGKILL),
            "a hang": self._a_hang,
            "all": lambda: kill(executors()),
            "a bad disk": self._a_bad_disk,
        }
        said = strikes[fault]() or {}
        self.watch.until(
            f"output after {fault}",
            lambda c: c.attempts.recoveries > recoveries and c.epochs.published > past + 2 and c.phase == "running",
        )
        found = self.rebuilt[rebuilt:]  # what moves later is another matter
        slices = self._all_is_well()
        return {
            **said,
            "recoveries": c.attempts.recoveries - recoveries,
            "newcomers": {node: count for node, count in slices.items() if node not in before},
            "stayed": [
                [*container, node, self.homes[container]] for container, node in sorted(homes.items()) if node in slices
            ],
            "backup": sum(r.get("backup", 0) for r in found),
            "durable": sum(r.get("durable", 0) for r in found),
            "notices": self.job.notices[-20:],
        }

    def _late(self) -> dict[str, Any]:
        """An executor is killed. What is about to be submitted waits until all is cancelled, and is submitted
        nevertheless: it is not there yet to be cancelled, and a third of its tasks are for the dead executor.
        """
        engine: Any = self.job._runtime.engine
        tasks, cancel = engine._tasks, engine.cancel
        victims = executors()[:1]
        late: set[tuple[int, int]] = set()
        ended: dict[tuple[int, int], str] = {}
        cancelled = threading.Event()

        def held(stage: Any, command: Any, *args: Any) -> Any:
            found = tasks(stage, command, *args)
            if stage.source is not None and not cancelled.is_set():
                late.add((command.epoch, command.attempt))
                while victims:
                    kill([victims.pop()])
                assert cancelled.wait(LIMIT_S), "nothing was cancelled"
            return found

        def watched(attempt: Any) -> None:
            cancel(attempt)
            cancelled.set()

        def hear(event: Any) -> None:
            if isinstance(event, StageDone | StageFailed) and event.stage == "in":
                ended[event.epoch, event.attempt] = type(event).__name__

        engine._tasks, engine.cancel = held, watched
        self.watch.on_event.append(hear)
        self.watch.until("what came late has ended", lambda c: cancelled.is_set() and late <= ended.keys())
        del engine._tasks, engine.cancel
        self.watch.on_event.remove(hear)
        return {"late": len(late), "ended": [ended[job] for job in sorted(late)]}

    def _in_a_checkpoint(self) -> None:
        self.watch.until("a checkpoint is open", checkpoint_open)
        kill(executors()[:1])

    def _loss(self) -> None:
        recoveries = self.watch.controller.attempts.recoveries
        kill(executors()[:1])
        self.watch.until("the recovery", lambda c: c.attempts.recoveries > recoveries)

    def _in_a_recovery(self) -> None:
        self._loss()
        kill(executors()[:1])

    def _in_a_start(self) -> None:
        self._loss()
        self.watch.until("another executor comes", lambda c: len(c.fleet.nodes) >= NODES)
        kill(executors()[-1:])

    def _a_bad_disk(self) -> None:
        """An executor that answers, and cannot write a single block any more. It is given back, not replaced."""
        for folder in executors()[0].environ()["SPARK_EXECUTOR_DIRS"].split(os.pathsep):
            for blocks in Path(folder).glob("blockmgr-*"):
                blocks.rename(blocks.with_name(f"away-{blocks.name}"))
                blocks.touch()
        self.nodes -= 1

    def _a_hang(self) -> None:
        """User code that does not come back, in the container that has this key."""
        self.hangs.touch()
        self._until("it is noticed", lambda s: any(node.state == "suspect" for node in s.nodes))
        self.hangs.unlink()

    def storm(self, seed: int, orders: int, kills: int) -> dict[str, Any]:
        recoveries = self.job.status().recoveries
        return {**Storm(self, seed).rage(orders, kills), "recoveries": self.job.status().recoveries - recoveries}

    def finish(self) -> dict[str, Any]:
        """Stop, and compare every epoch of every sink with a run in which nothing happened."""
        self.job.stop()
        status = self.job.status()
        ps.run_local(build(self.place / "local", self.hangs), epochs_max=status.epoch, **SETTINGS)
        ours, theirs = (digests(self.place / one, "ab") | own_digests(self.place / one) for one in ("spark", "local"))
        return {
            "equal": ours == theirs,
            "differ": differences(ours, theirs),
            "epochs": status.epoch,
            "compared": len(ours),
        }


class Storm:
    """Draws orders and gives them. What came of each is counted: taken, or refused for which reason."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self.job, self.watch, self.nodes = fleet.job, fleet.watch, fleet.nodes
        self.random = random.Random(seed)
        self.given: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.kills = 0

    def rage(self, orders: int, kills: int) -> dict[str, Any]:
        ended: set[Any] = set()

        def hear(event: Any) -> None:
            ended.update(self.watch.controller.moves.ended)

        before = set(self.watch.controller.moves.ended)
        self.watch.on_event.append(hear)
        strikes = {round((k + 1) * orders / (kills + 1)) for k in range(kills)}
        for number in range(orders):
            self.order()
            if number in strikes:
                self.kill()
            self.pause()
        self.watch.until("everything has come to rest", lambda c: len(c.fleet.nodes) == self.nodes and at_rest(c))
        self.watch.on_event.remove(hear)
        moves = Counter(e.outcome for e in ended - before)
        return {"given": self.given, "refused": self.refused, "kills": self.kills, "moves": moves}

    def order(self) -> None:
        r = self.random
        what = r.choices(["rescale", "migrate", "twice", "nowhere", "cancel", "rebalance"], [30, 35, 10, 5, 12, 8])[0]
        stage = r.choice(STAGES)
        slices = r.sample(range(SLICES), r.randint(1, 4))
        routing = self.job.routing
        assert routing is not None
        containers = range(routing.instances[stage])  # type: ignore[index]
        match what:
            case "rescale":
                self._give(what, lambda: self.job.rescale(stage, r.randint(1, NODES + 1)))
            case "migrate":
                self._give(what, lambda: self.job.migrate(stage, slices, r.choice(containers)))
            case "twice":
                for target in r.choices(containers, k=2):
                    self._give(what, lambda target=target: self.job.migrate(stage, slices, target))  # type: ignore[misc]
            case "nowhere":
                self._give(what, lambda: self.job.migrate(stage, slices, len(containers) + r.randrange(3)))
            case "cancel":
                self._give(what, self.job.cancel_moves)
            case "rebalance":
                self._give(what, self.job.rebalance)

    def kill(self) -> None:
        """An executor dies, and before anybody knows slices are sent there, and a stage is rescaled."""
        r = self.random
        self.watch.until("all nodes", lambda c: len(c.fleet.nodes) == self.nodes and c.phase == "running")
        c = self.watch.controller
        before, stage, victim = c.attempts.recoveries, r.choice(STAGES), r.choice(executors())
        node = node_of(victim)
        kill([victim])
        self.kills += 1
        doomed = next((n.containers for n in self.job.status().nodes if n.name == node), [])
        for target in doomed:
            slices = r.sample(range(SLICES), 2)
            self._give("to the dead", lambda s=slices, t=target: self.job.migrate(stage, s, t))  # type: ignore[misc]
        self._give("rescale", lambda: self.job.rescale(stage, r.randint(1, NODES)))
        if r.random() < 0.5:  # else the next orders come before the loss is known
            self.watch.until("the loss", lambda c: c.attempts.recoveries > before or len(c.fleet.nodes) < self.nodes)

    def pause(self) -> None:
        epochs = self.random.choice([0, 0, 1, 1, 2, 4])
        past = self.watch.controller.epochs.published
        self.watch.until("the next epochs", lambda c: c.epochs.published >= past + epochs)

    def _give(self, what: str, order: Callable[[], None]) -> None:
        self.given[what] += 1
        try:
            order()
        except ConfigError as error:  # nothing else may come back from an order
            assert error.remedy, error
            self.refused[error.message.split("'")[-1].strip(" 0123456789.")] += 1


def main(place: Path) -> None:
    fleet = Fleet(place)
    say(ready=True)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            said = getattr(fleet, asked.pop("do"))(**asked)
        except Exception:
            said = {"failed": f"{traceback.format_exc()}\n{fleet.job.status()}\n{fleet.job.notices[-20:]}"}
        say(**said)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
