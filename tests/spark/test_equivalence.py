"""Random flows and inputs, rescaled on the way: Spark's output is the local engine's, row for row, epoch by epoch.

A rescale happens at once (stop and copy), or begins in the middle and goes on while epochs run, to its end or not.
A seed is a flow, its input, its cut into epochs and its rescales. ``PENSTOCK_SEEDS=50`` tries more of them;
``PENSTOCK_SEEDS=17-17`` tries one again.
"""

from __future__ import annotations

import math
import os
import random
import sys
import threading
from typing import Any

import cloudpickle
import polars as pl
import pytest

import penstock as ps
from penstock.connectors.sinks import MemorySink
from penstock.control.controller import Controller
from penstock.control.epochs import Baseline
from penstock.engines.job import Job, start
from penstock.ids import StageId
from penstock.testing import rows

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(300)]

# Workers need not import this file, nor pytest with it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def seeds() -> list[int]:
    wanted = os.environ.get("PENSTOCK_SEEDS", "6")
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

    def __init__(self, seed: int, epochs: tuple[int, int] = (2, 4)) -> None:
        self.random = r = random.Random(seed)
        self.flow = ps.Flow(f"seed-{seed}")
        self.sinks: dict[str, MemorySink] = {}
        self.keyed: list[str] = []
        self.number = 0
        self.epochs = r.randint(*epochs)
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
        count = self.random.randint(60, 200)
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


def heard(controller: Controller, stage: str, instances: int) -> bool:
    """Does it know of the rescale?"""
    known = controller.resizes.get(StageId(stage), controller.routing.instances[StageId(stage)])
    return known == instances


def run(
    flow: ps.Flow, engine: str, rescales: dict[int, dict[str, int]], *, stop_and_copy: bool, **settings: Any
) -> Job:
    """``rescales``: after so many published epochs -> stage -> instances."""
    held: list[Job] = []
    ready, patience = threading.Event(), threading.Event()
    published = 0

    def trip(step: str) -> None:
        nonlocal published
        if step == "after-publish":
            published += 1
            ready.wait()
            wanted = rescales.get(published, {})
            for stage, instances in wanted.items():
                held[0].rescale(stage, instances)
            controller = held[0]._runtime.controller
            assert controller is not None
            if stop_and_copy:
                while len(controller.rescales) < len(wanted):  # processes are up: it happens after this epoch
                    patience.wait(0.001)
            else:
                while controller.warming or any(not heard(controller, s, n) for s, n in wanted.items()):
                    patience.wait(0.001)  # processes are up: slices begin to move with the next epochs

    config = ps.Config(master="local[2]", slices=8, **settings)
    job = start(flow, engine=engine, config=config, trip=trip, baseline=Baseline(stop_and_copy=stop_and_copy))
    held.append(job)
    ready.set()
    assert job.wait(240), "it hangs"
    return job


@pytest.mark.parametrize("seed", seeds())
def test_spark_gives_what_the_local_engine_gives(seed: int, session: Any) -> None:
    outcomes = []
    for engine in ("local", "spark"):
        made = Made(seed)
        r = random.Random(seed + 1_000)
        stages = [*made.keyed, "in"]
        rescales = {r.randint(1, made.epochs - 1): {r.choice(stages): r.randint(1, 3)}}
        interval = r.choice([0.0, 3600.0])
        settings: dict[str, Any] = {"instances": r.randint(1, 2), "checkpoint_interval_s": interval}
        job = run(made.flow, engine, rescales, stop_and_copy=True, **settings)
        assert job.status().recoveries == 0
        assert job.status().routing_version > 1
        outcomes.append((outcome(made.sinks), job.status().late, job.status().rows))
    assert any(rows for epochs in outcomes[0][0].values() for rows in epochs.values())
    assert outcomes[1] == outcomes[0]


def test_from_one_container_to_eight_and_back(session: Any) -> None:
    outcomes = []
    for engine in ("local", "spark"):
        r = random.Random(8)
        sink = MemorySink()
        flow = ps.Flow("eight")
        source = flow.source("in", rows(some_rows(r, 300), epochs=[60] * 5))
        source.key_by("k", "g").aggregate("count", n=ps.count(), s=ps.sum("x")).sink("out", sink)
        rescales = {1: {"count": 8}, 2: {"count": 3}, 3: {"count": 5, "in": 3}}
        settings: dict[str, Any] = {"instances": 1, "epochs_in_flight": 1, "checkpoint_interval_s": 3600.0}
        job = run(flow, engine, rescales, stop_and_copy=True, **settings)
        assert job.status().recoveries == 0
        assert [h["instances"]["count"] for h in job.status().history] == [1, 8, 3, 5, 5, 5]
        outcomes.append(outcome({"out": sink}))
    assert outcomes[1] == outcomes[0]


@pytest.mark.parametrize("seed", seeds()[:3])
def test_slices_that_move_while_epochs_run_do_not_show(seed: int, session: Any) -> None:
    """The local engine runs undisturbed; Spark rescales every stage, up and down, as far as it gets."""
    outcomes = []
    for engine in ("local", "spark"):
        made = Made(seed + 500, epochs=(8, 12))
        r = random.Random(seed + 2_000)
        rescales = {1: {s: r.randint(3, 4) for s in made.keyed}, 5: {s: r.randint(1, 2) for s in made.keyed}}
        settings: dict[str, Any] = {"instances": 2, "checkpoint_interval_s": r.choice([0.0, 3600.0])}
        job = run(made.flow, engine, rescales if engine == "spark" else {}, stop_and_copy=False, **settings)
        assert job.status().recoveries == 0
        outcomes.append((outcome(made.sinks), job.status().late, job.status().rows))
    controller = job._runtime.controller
    assert controller is not None
    assert outcomes[1] == outcomes[0]
    assert controller.migration.ended or controller.migration.moves, "slices were on the move"
