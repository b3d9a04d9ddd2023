"""Random flows and inputs, rescaled on the way: Spark's output is the local engine's, row for row, epoch by epoch.

Slices move as they do for users: while epochs run, on request, to their end. A seed is a flow, its input, its cut into
epochs and what is asked for. ``PENSTOCK_SEEDS=50`` tries more of them; ``PENSTOCK_SEEDS=17-17`` tries one again.
"""

from __future__ import annotations

import math
import os
import random
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle
import polars as pl
import pytest

import penstock as ps
from penstock.connectors.sinks import MemorySink
from penstock.engines.job import Job, start
from penstock.ids import StageId
from penstock.testing import rows
from tests.scale import scaled

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(300)]

# Workers need not import this file, nor pytest with it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def seeds() -> list[int]:
    wanted = os.environ.get("PENSTOCK_SEEDS", str(scaled(2, 20)))
    first, dash, last = wanted.partition("-")
    return list(range(int(first), int(last) + 1)) if dash else list(range(int(wanted)))


class Chain(ps.Operator):
    """The order of events shows in every digit."""

    def on_event(self, key: Any, event: Any, chain: ps.Value[int], total: ps.Value[float], emit: Any) -> None:
        chain.set((chain.get(0) * 31 + event.g + 1) % 1_000_003)
        total.set(total.get(0.0) + (event.x or 0.0))
        if chain.get(0) % 3:
            emit(k=str(key), chain=chain.get(), total=total.get())


def some_rows(r: random.Random, count: int) -> pl.DataFrame:
    values = [None, math.nan, -0.0, 0.1, 0.2, 0.3, 1e16, -1e16, 1.0]
    return pl.DataFrame(
        {
            "k": [r.choice(["a", "b", "c", "d", None, "a key of more than twelve bytes"]) for _ in range(count)],
            "g": [r.randint(0, 9) for _ in range(count)],
            "x": [r.choice(values) for _ in range(count)],
            "t": pl.Series([i * 10 + r.randint(-40, 40) for i in range(count)]).cast(pl.Datetime("us")),
        },
        schema={"k": pl.String(), "g": pl.Int64(), "x": pl.Float64(), "t": pl.Datetime("us")},
    )


def some_cut(r: random.Random, count: int, epochs: int) -> list[int]:
    cuts = sorted(r.sample(range(1, count), epochs - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, count], strict=True)]


class Made:
    """A flow made of a seed, with a sink in memory at every end."""

    def __init__(self, seed: int, epochs: tuple[int, int], rows: tuple[int, int] = (60, 200)) -> None:
        self.random = r = random.Random(seed)
        self.flow = ps.Flow(f"seed-{seed}")
        self.sinks: dict[str, MemorySink] = {}
        self.keyed: list[str] = []
        self.number = 0
        self.epochs = r.randint(*epochs)
        self.rows = rows
        stream = self.source("in")
        if r.random() < 0.3:
            stream = stream.union(self.id("union"), self.source("also"), by="t")
        for _ in range(r.randint(0, 2)):
            stream = self.stateless(stream)
        kinds = ["running", "window", "best", "custom", "again"]
        for kind in r.sample(kinds, 2):
            self.end(getattr(self, kind)(stream))
        if r.random() < 0.4:
            self.end(stream)

    def id(self, kind: str) -> str:
        self.number += 1
        return f"{kind}-{self.number}"

    def source(self, id: str) -> ps.Stream:
        count = self.random.randint(*self.rows)
        return self.flow.source(
            id, rows(some_rows(self.random, count), epochs=some_cut(self.random, count, self.epochs))
        )

    def end(self, stream: ps.Stream) -> None:
        id = self.id("out")
        self.sinks[id] = MemorySink()
        stream.sink(id, self.sinks[id])

    def stateless(self, stream: ps.Stream) -> ps.Stream:
        match self.random.randint(0, 4):
            case 0:
                return stream.where(self.id("where"), pl.col("g") < 8)
            case 1:
                return stream.with_columns(self.id("with"), x=pl.col("x") * 3 + pl.col("g"))
            case 2:
                return stream.map_rows(self.id("rows"), several, schema=dict(stream.schema))
            case 3:
                return stream.map_batches(self.id("batches"), lambda f: f.with_columns(g=pl.col("g") + 1))
            case _:
                low = stream.where(self.id("low"), pl.col("g") < 5)
                high = stream.where(self.id("high"), pl.col("g") >= 5).select(self.id("pick"), "k", "g", "x", "t")
                return low.union(self.id("diamond"), high)

    def key(self) -> list[str]:
        return self.random.choice([["k"], ["g"], ["k", "g"], ["x"]])

    def made(self, kind: str) -> str:
        self.keyed.append(self.id(kind))
        return self.keyed[-1]

    def running(self, stream: ps.Stream) -> ps.Stream:
        keyed = stream.key_by(*self.key())
        counts = keyed.aggregate(self.made("running"), n=ps.count(), s=ps.sum("x"), m=ps.mean("g"), top=ps.max("t"))
        return counts.top_k(self.made("ranking"), 3, by="n") if self.random.random() < 0.4 else counts

    def window(self, stream: ps.Stream) -> ps.Stream:
        every = self.random.choice([50, 100])
        spec = ps.hopping(100e-6, every=every * 1e-6, on="t", lateness=self.random.choice([0, 30e-6]))
        counts = (
            stream.key_by("k").window(spec).aggregate(self.made("window"), n=ps.count(), s=ps.sum("x"), lo=ps.min("x"))
        )
        return counts.top_k(self.made("best"), 2, by="n") if self.random.random() < 0.4 else counts

    def best(self, stream: ps.Stream) -> ps.Stream:
        return stream.key_by(*self.key()).top_k(self.made("top"), 2, by=self.random.choice(["t", "g"]))

    def custom(self, stream: ps.Stream) -> ps.Stream:
        schema = {"k": str, "chain": int, "total": float}
        return stream.key_by("k").process(self.made("custom"), Chain(), schema=schema)

    def again(self, stream: ps.Stream) -> ps.Stream:
        """Two exchanges, the second with sums of floats."""
        counts = stream.key_by("k", "g").aggregate(self.made("first"), emit="final", n=ps.count(), s=ps.sum("x"))
        return counts.key_by("g").aggregate(self.made("second"), updates=ps.count(), s=ps.sum("s"))


def several(row: dict[str, Any]) -> list[dict[str, Any]] | None:
    if row["g"] == 3:
        return None
    return [row, {**row, "g": 11}] if row["g"] == 4 else [row]


def plain(value: Any) -> str:
    return "nan" if isinstance(value, float) and value != value else repr(value)


Outcome = dict[str, dict[int, list[tuple[str, ...]]]]


def outcome(sinks: dict[str, MemorySink]) -> Outcome:
    """sink -> epoch -> its rows, sorted; floats to the last bit."""
    return {
        id: {e: sorted(tuple(map(plain, row)) for row in f.iter_rows()) for e, f in sink.epochs.items() if f.height}
        for id, sink in sinks.items()
    }


# -- what users ask for while it runs ----------------------------------------------------------------------------------

SLICES = 8
LONG: dict[str, Any] = {"epochs": (1_500, 1_500), "rows": (8_000, 8_000)}
"""Input for minutes: the job is stopped when everything that was asked for has been done."""
WAIT_S = 240.0


def until(job: Job, what: str, reached: Callable[[], object]) -> None:
    limit = time.monotonic() + WAIT_S
    while not reached():
        assert not job.wait(0.02), f"the input ended before {what}"
        assert time.monotonic() < limit, f"waited in vain for {what}: {job.status()}"


def rescaled(job: Job, wanted: Mapping[str, int]) -> None:
    """Ask for these numbers of instances, and wait until each is there and owns slices, and nothing moves."""

    def done() -> bool:
        status, routing = job.status(), job.routing
        assert routing is not None
        instances = {s.id: s.instances for s in status.stages}
        owners = {str(stage): set(found) for stage, found in routing.owners.items()}
        return not status.moves and all(
            instances[s] == n and owners.get(s, set(range(n))) == set(range(n)) for s, n in wanted.items()
        )

    for stage, instances in wanted.items():
        job.rescale(stage, instances)
    until(job, f"{wanted} instances", done)


def migrated(job: Job, stage: str, r: random.Random) -> None:
    """Move a slice or two to another container, and wait until it has them, and nothing moves."""
    routing = job.routing
    assert routing is not None
    owners = list(routing.owners[StageId(stage)])
    source, target = r.sample(sorted(set(owners)), 2)
    slices = [s for s, c in enumerate(owners) if c == source][:2]
    job.migrate(stage, slices, target)

    def done() -> bool:
        now = job.routing
        assert now is not None
        return all(now.owners[StageId(stage)][s] == target for s in slices) and not job.status().moves

    until(job, f"slices {slices} of {stage} on container {target}", done)


def running(flow: ps.Flow, **settings: Any) -> Job:
    job = start(flow, engine="spark", config=ps.Config(master="local[2]", control=False, **settings))
    until(job, "the first epoch", lambda: job.status().epoch >= 1)
    return job


def stopped(job: Job) -> tuple[int, int, int]:
    """The job's last epoch, and what it says of late rows and of all rows."""
    past = job.status().epoch
    until(job, "epochs after the last move", lambda: job.status().epoch >= past + 2)
    job.stop()
    status = job.status()
    assert (status.phase, status.recoveries) == ("stopped", 0)
    return status.epoch, status.late, status.rows


def undisturbed(flow: ps.Flow, epochs: int, **settings: Any) -> tuple[int, int, int]:
    """The same epochs on the local engine, and nobody asks for anything."""
    job = start(flow, engine="local", config=ps.Config(control=False, epochs_max=epochs, **settings))
    assert job.wait(WAIT_S), "it hangs"
    return job.status().epoch, job.status().late, job.status().rows


@pytest.mark.parametrize("seed", seeds())
def test_slices_that_move_while_epochs_run_do_not_show(seed: int, session: Any) -> None:
    """Every keyed stage grows, some slices of one change places, a source is rescaled, and every stage shrinks."""
    made, quiet = Made(seed + 500, **LONG), Made(seed + 500, **LONG)
    r = random.Random(seed + 2_000)
    settings: dict[str, Any] = {"instances": 2, "slices": SLICES, "checkpoint_interval_s": r.choice([0.0, 3600.0])}
    job = running(made.flow, **settings)
    rescaled(job, {stage: r.randint(3, 4) for stage in made.keyed})
    migrated(job, r.choice(made.keyed), r)
    rescaled(job, {"in": r.choice([1, 3]), **{stage: r.randint(1, 2) for stage in made.keyed}})
    ended = stopped(job)
    assert undisturbed(quiet.flow, ended[0], **settings) == ended
    ours, theirs = outcome(made.sinks), outcome(quiet.sinks)
    assert any(rows for epochs in theirs.values() for rows in epochs.values())
    assert ours == theirs


def test_from_one_container_to_eight_and_back(session: Any) -> None:
    frame = some_rows(random.Random(8), 20_000)
    sinks = [MemorySink(), MemorySink()]

    def flow(sink: MemorySink) -> ps.Flow:
        made = ps.Flow("eight")
        source = made.source("in", rows(frame, epochs=[20] * 1_000))
        source.key_by("k", "g").aggregate("count", n=ps.count(), s=ps.sum("x")).sink("out", sink)
        return made

    settings: dict[str, Any] = {
        "instances": 1,
        "slices": SLICES,
        "epochs_in_flight": 1,
        "checkpoint_interval_s": 3600.0,
    }
    job = running(flow(sinks[0]), **settings)
    for wanted in ({"count": 8}, {"count": 3}, {"count": 5, "in": 3}):
        rescaled(job, wanted)
    ended = stopped(job)
    assert undisturbed(flow(sinks[1]), ended[0], **settings) == ended
    assert outcome({"out": sinks[0]}) == outcome({"out": sinks[1]})
