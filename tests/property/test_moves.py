"""Slices that move while epochs run: whatever is asked, whenever, the output and the state are as without it.

Random flows on the local engine, with random moves, rescales and changes of mind after random epochs. Some moves come
to their end, some are called off, and some are under way when the input ends.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from typing import Any

from hypothesis import given

import penstock as ps
from penstock.control.events import (
    CancelMovesRequested,
    MoveRequested,
    RebalanceRequested,
    RescaleRequested,
)
from penstock.engines.job import Job, start
from penstock.engines.sim.checkers import canonical
from penstock.engines.sim.oracle import final_state
from penstock.ids import StageId
from tests.property.cuts import SEEDS, examples
from tests.spark.test_equivalence import Made, outcome

SLICES = 6


def run(seed: int, disturbed: bool) -> tuple[Made, Job]:
    """One job; if ``disturbed``, people are busy with it all the time."""
    made = Made(seed, epochs=(8, 20))
    r = random.Random(seed + 1)
    config = ps.Config(
        instances=r.randint(1, 3),
        slices=SLICES,
        checkpoint_interval_s=r.choice([0.0, 0.0, 3600.0]),
        epochs_in_flight=r.randint(1, 3),
    )
    held: list[Job] = []
    ready = threading.Event()

    def trip(step: str) -> None:
        if step == "after-publish" and disturbed and r.random() < 0.3:
            ready.wait()
            ask(held[0], r)

    job = start(made.flow, engine="local", config=config, trip=trip)
    held.append(job)
    ready.set()
    assert job.wait(120)
    return made, job


def ask(job: Job, r: random.Random) -> None:
    runtime = job._runtime
    assert runtime.controller is not None
    stages = [s for s in runtime.plan.stages if s.keyed is not None]
    stage = StageId(r.choice(stages).id)
    now = runtime.clock()
    instances = runtime.controller.routes.table.instances[stage]
    what = r.random()
    if what < 0.5:
        targets = {s: r.randrange(instances) for s in r.sample(range(SLICES), r.randint(1, SLICES))}
        runtime.post(MoveRequested(now=now, stage=stage, targets=targets))
    elif what < 0.8:
        runtime.post(RescaleRequested(now=now, stage=stage, instances=r.randint(1, 5)))
    elif what < 0.9:
        runtime.post(RebalanceRequested(now=now))
    else:
        runtime.post(CancelMovesRequested(now=now, stage=r.choice([None, stage])))


def seen(made: Made, job: Job) -> tuple[Any, ...]:
    runtime = job._runtime
    state = {stage: canonical(frame) for stage, frame in final_state(runtime.store, runtime.plan).items()}
    return outcome(made.sinks), job.status().late, job.status().rows, state


@examples(10)
@given(SEEDS)
def test_moves_do_not_show(seed: int) -> None:
    quiet = seen(*run(seed, False))
    made, job = run(seed, True)
    assert job.status().recoveries == 0
    assert seen(made, job) == quiet


def test_moves_really_happen() -> None:
    """To their end, called off, and halfway when the input ends; else the test above is idle."""
    ends: Counter[str] = Counter()
    for seed in range(12):
        _, job = run(seed, True)
        controller = job._runtime.controller
        assert controller is not None
        ends.update(e.outcome for e in controller.moves.ended)
        ends["under way"] += len(controller.moves.by_slice)
    assert ends["done"] > 5
    assert ends["cancelled"] > 0 and ends["under way"] > 0, ends
