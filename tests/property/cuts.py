"""Ways to cut one input into epochs, tasks and containers: what every property of an operator is tried under."""

from __future__ import annotations

import math
import random
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import polars as pl
from hypothesis import settings
from hypothesis import strategies as st

import penstock as ps
from penstock import testing
from penstock.engines.job import Job, start
from tests.scale import scaled

SEEDS = st.integers(0, 2**32 - 1)
COUNTS = st.integers(1, 40)
WAIT_S = 240.0
"""Longer than any of these jobs takes on a machine that is busy with other things."""


THOROUGH = settings.get_current_profile_name() == "thorough"


def examples(count: int) -> settings:
    """This many in ``make test``, ten times as many in ``make test-all``."""
    return settings(max_examples=2_000 if THOROUGH else scaled(count, 10 * count))


def plain(value: Any) -> Any:
    """Equal exactly when the bits are: all NaN are one, -0.0 is not 0.0."""
    if isinstance(value, float):
        return "nan" if value != value else repr(value)
    return value


def plain_key(value: Any) -> Any:
    """Keys: all NaN are one key, and -0.0 is 0.0."""
    return plain(value + 0.0) if isinstance(value, float) else value


@dataclass(frozen=True)
class Cut:
    """One way to run a flow: none of it may show in the result."""

    epochs: tuple[int, ...]
    instances: int
    slices: int
    checkpoint_s: float
    in_flight: int
    rescales: tuple[tuple[int, int], ...]
    """(after this epoch, to so many instances): slices move while epochs run, and may be halfway at the end"""


def some_cut(r: random.Random, count: int) -> Cut:
    rescales = r.randint(0, 2)
    # A rescale takes some epochs: a warm-up, a checkpoint to copy from, the switch.
    inner = r.sample(range(1, count), min(count - 1, r.randint(0, 4) + 6 * rescales))
    ends = [*sorted(inner), count]
    slices = r.choice([1, 3, 8, 64])
    most = min(8, slices)
    return Cut(
        tuple(b - a for a, b in zip([0, *ends], ends, strict=False)),
        r.randint(1, most),
        slices,
        r.choice([0.0, 0.0, 3600.0]),
        r.randint(1, 3),
        tuple((r.randint(1, 6), r.randint(1, most)) for _ in range(rescales)),
    )


def run(build: Callable[[ps.Source], ps.Flow], frame: pl.DataFrame, cut: Cut, keyed: Sequence[str]) -> Job:
    """Run a flow over ``frame`` cut as told, rescaling the stages ``keyed`` on the way."""
    flow = build(testing.rows(frame, epochs=cut.epochs))
    config = ps.Config(
        instances=cut.instances,
        slices=cut.slices,
        checkpoint_interval_s=cut.checkpoint_s,
        epochs_in_flight=cut.in_flight,
    )
    held: list[Job] = []
    ready = threading.Event()
    published = 0

    def trip(step: str) -> None:
        nonlocal published
        if step == "after-publish":
            published += 1
            ready.wait()
            for after, instances in cut.rescales:
                if after == published:
                    for stage in keyed:
                        held[0].rescale(stage, instances)

    job = start(flow, engine="local", config=config, trip=trip)
    held.append(job)
    ready.set()
    assert job.wait(WAIT_S), "it hangs"
    return job


def run_in_two(build: Callable[[ps.Source], ps.Flow], frame: pl.DataFrame, cut: Cut, epochs: int) -> None:
    """Run some epochs, stop, and go on from the checkpoint in a new job with other containers."""
    with tempfile.TemporaryDirectory() as place:
        for instances, epochs_max in ((cut.instances, epochs), (max(1, cut.slices // 2), None)):
            config = ps.Config(
                instances=min(instances, 4),
                slices=cut.slices,
                checkpoint_interval_s=cut.checkpoint_s,
                epochs_in_flight=cut.in_flight,
                checkpoint=place,
                epochs_max=epochs_max,
            )
            assert start(build(testing.rows(frame, epochs=cut.epochs)), engine="local", config=config).wait(WAIT_S)


# -- values that make trouble ------------------------------------------------------------------------------------------

SPECIAL = [math.nan, -0.0, 0.0, math.inf, -math.inf, 0.1, 0.2, 0.3, 1e16, -1e16, 1.0]
KEYS: dict[str, tuple[pl.DataType, list[Any]]] = {
    "word": (pl.String(), ["a", "b", "ü", "", "a longer key than twelve bytes"]),
    "number": (pl.Int64(), [0, -1, 7, 2**62]),
    "real": (pl.Float64(), [math.nan, -0.0, 0.0, 1.5]),
    "day": (pl.Date(), [date(2024, 2, 29), date(1969, 12, 31)]),
    "flag": (pl.Boolean(), [False, True]),
}


def maybe(r: random.Random, value: Any) -> Any:
    """Now and then nothing."""
    return None if r.random() < 0.1 else value
