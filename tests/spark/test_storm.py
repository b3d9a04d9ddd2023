"""A storm on real executors: orders to rescale, move and call off, drawn from a seed and given while rows flow, with
executors killed in between. Whatever the job makes of them, its output is the undisturbed run's, byte for byte, in
Parquet and in a sink of the user's that overwrites what it is given twice.

Orders come as people give them: some one after the other without a pause, some while the job recovers, some that
cannot be (a container that is not there, a slice that is on the move, a node that is dead and nobody knows it yet).
Each is taken, or refused with a reason.
"""

import os
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import penstock as ps
from penstock.engines.job import Job, start
from penstock.errors import ConfigError
from tests.spark.child import Watch, differences, digests, executors, kill, node_of, own_digests, paced, run, say

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.slow]

NODES, SLICES = 3, 12
STAGES = ("sums", "chain")
SETTINGS: dict[str, Any] = dict(instances=NODES, slices=SLICES, epoch_rows=200, checkpoint_interval_s=0.5)


class Chain(ps.Operator):
    """A hash of all events of a key, in their order."""

    def on_event(self, key: str, event: Any, chain: ps.Value[int], emit: Any) -> None:
        chain.set((chain.get(0) * 31 + event.n) % 1_000_003)
        emit(word=key, chain=chain.get())


def make(first: int, n: int, rng: Any) -> pl.DataFrame:
    i = range(first, first + n)
    return pl.DataFrame({"word": [f"w{v * 7919 % 401}" for v in i], "n": [v % 10 for v in i], "x": [v / 7 for v in i]})


def build(out: Path, **pace: Any) -> ps.Flow:
    (out / "own").mkdir(parents=True)

    def own(epoch: int, frame: pl.DataFrame) -> None:  # idempotent: an epoch that comes again replaces itself
        frame.sort(pl.all()).write_ipc(out / "own" / f"{epoch:06d}.arrow")

    flow = ps.Flow("storm")
    words = flow.source("in", ps.generator(make, schema={"word": str, "n": int, "x": float}, **pace))
    sums = words.key_by("word").aggregate("sums", rows=ps.count(), x=ps.sum("x"))
    sums.sink("a", ps.parquet(out / "a", durable=False))
    chain = words.key_by("word").process("chain", Chain(), schema={"word": str, "chain": int})
    chain.sink("b", ps.parquet(out / "b", durable=False))
    chain.sink("own", ps.foreach_batch(own))
    return flow


class Storm:
    """Draws orders and gives them. What came of each is counted: taken, or refused for which reason."""

    def __init__(self, job: Job, watch: Watch, seed: int) -> None:
        self.job = job
        self.watch = watch
        self.random = random.Random(seed)
        self.given: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.kills = 0

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
        self.watch.until("all nodes", lambda c: len(c.nodes) == NODES and c.phase == "running")
        c = self.watch.controller
        before, stage, victim = c.recoveries, r.choice(STAGES), r.choice(executors())
        node = node_of(victim)
        kill([victim])
        self.kills += 1
        for target in [container for container, home in c.routing.homes.items() if home == node]:
            slices = r.sample(range(SLICES), 2)
            self._give("to the dead", lambda s=slices, t=target: self.job.migrate(stage, s, t))  # type: ignore[misc]
        self._give("rescale", lambda: self.job.rescale(stage, r.randint(1, NODES)))
        if r.random() < 0.5:  # else the next orders come before the loss is known
            self.watch.until("the loss", lambda c: c.recoveries > before or len(c.nodes) < NODES)

    def pause(self) -> None:
        epochs = self.random.choice([0, 0, 1, 1, 2, 4])
        past = self.watch.controller.epochs.published
        self.watch.until("the next epochs", lambda c: c.published >= past + epochs)

    def _give(self, what: str, order: Callable[[], None]) -> None:
        self.given[what] += 1
        try:
            order()
        except ConfigError as error:  # nothing else may come back from an order
            assert error.remedy, error
            self.refused[error.message.split("'")[-1].strip(" 0123456789.")] += 1


def main(place: Path, seed: int, orders: int, kills: int) -> None:
    config = ps.Config(
        master=f"local-cluster[{NODES},1,1024]", checkpoint=str(place / "ck"), backups=1, control=False, **SETTINGS
    )
    job = start(build(place / "spark", **paced(SETTINGS["epoch_rows"])), engine="spark", config=config)
    watch = Watch(job, 150)
    ended: set[Any] = set()
    watch.on_event.append(lambda event: ended.update(watch.controller.moves.ended))
    storm = Storm(job, watch, seed)
    watch.until("a first checkpoint", lambda c: c.committed > 0)
    strikes = {round((k + 1) * orders / (kills + 1)) for k in range(kills)}
    for number in range(orders):
        storm.order()
        if number in strikes:
            storm.kill()
        storm.pause()
    watch.until(
        "everything has come to rest",
        lambda c: len(c.nodes) == NODES and c.phase == "running" and not (c.migration or c.resizes or c.handed),
    )
    job.stop()
    status = job.status()
    ps.run_local(build(place / "local"), epochs_max=status.epoch, **SETTINGS)
    ours, theirs = (digests(place / one, "ab") | own_digests(place / one) for one in ("spark", "local"))
    say(
        equal=ours == theirs,
        differ=differences(ours, theirs),
        epochs=status.epoch,
        compared=len(ours),
        kills=storm.kills,
        recoveries=status.recoveries,
        given=storm.given,
        refused=storm.refused,
        moves=Counter(e.outcome for e in ended),
        versions=watch.controller.routes.table.version,
        notices=job.notices[-20:],
    )


def check(found: dict[str, Any], orders: int, kills: int) -> None:
    assert found["equal"], f"the output differs: {found['differ']}; {found}"
    assert found["compared"] == 3 * found["epochs"], "every epoch of every sink"
    assert sum(found["given"].values()) >= orders and found["kills"] == kills
    assert found["recoveries"] >= kills
    # Orders of which nothing comes would leave the output alone as well.
    assert found["moves"].get("done", 0) >= orders // 5, found
    assert found["refused"], "some orders cannot be, and are refused with a reason"


@pytest.mark.timeout(240)
def test_a_short_storm(tmp_path: Path) -> None:
    """25 orders and two kills: half a minute of them, after a start."""
    check(run(__file__, tmp_path, 1, 25, 2, timeout_s=220), 25, 2)


@pytest.mark.timeout(1_800)
@pytest.mark.skipif(not os.environ.get("PENSTOCK_SLOW"), reason="the whole storm takes minutes: PENSTOCK_SLOW=1")
def test_a_whole_storm(tmp_path: Path) -> None:
    found = run(__file__, tmp_path, int(os.environ.get("PENSTOCK_STORM_SEED", "2")), 200, 6, timeout_s=1_780)
    print(found)
    check(found, 200, 6)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
