"""Random jobs: an input, a small flow over it, and settings. All of it drawn from the seed, none of it from the faults.

Flows are small, since a thousand of them must run in two minutes, and of many kinds: running aggregates whose sums of
floats show any change of order, windows with late rows, custom operators with timers, rankings, two keyed stages in a
row, several sources into one stage, joins, windows by the clock, records that become dead letters.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import polars as pl

from penstock.config import Config
from penstock.connectors.base import Sink, Source
from penstock.flow import Flow, KeyedStream, Stream
from penstock.operators.aggregates import count, max, sum
from penstock.operators.custom import Emit, Operator
from penstock.operators.event_time import CLOCK
from penstock.operators.joins import within
from penstock.operators.statelib import Timers, Value
from penstock.operators.windows import hopping

SCHEMA = pl.Schema({"k": pl.String(), "g": pl.Int64(), "x": pl.Float64(), "t": pl.Datetime("us")})
BRANCHES = ("running", "windows", "custom", "timers", "ranking", "chain", "window-ranking", "clock", "join")
KEYED = ("running", "windows", "custom", "timers", "ranked", "first", "second", "clock", "join", "counted")
"""Operators that may have a number of slices of their own."""
START_US = 1_700_000_000_000_000


class Steps(Operator):
    """What changed since the key's last event: wrong at once when an event is lost, repeated or out of order."""

    def on_event(self, key: str, event: Any, last: Value[float], seen: Value[int], emit: Emit) -> None:
        number = seen.get(0) + 1
        emit(k=key, number=number, step=event.x - last.get(0.0))
        last.set(event.x)
        seen.set(number)


class Silence(Operator):
    """Says when a key has been silent for a while, by a timer."""

    def on_event(self, key: str, event: Any, seen: Value[int], timers: Timers, emit: Emit) -> None:
        seen.set(seen.get(0) + 1)
        timers.set(event.t + timedelta(seconds=4), "silent")

    def on_timer(self, key: str, at: Any, seen: Value[int], emit: Emit) -> None:
        emit(k=key, at=at, events=seen.get(0))


@dataclass(frozen=True)
class Input:
    """One source: its rows, and the chunks in which they appear, with the time of each."""

    rows: pl.DataFrame
    ends: tuple[int, ...]
    appears: tuple[float, ...]


@dataclass(frozen=True)
class Scenario:
    seed: int
    inputs: dict[str, Input]
    branches: tuple[str, ...]
    lateness_s: int
    dead: bool
    """Some rows cannot be mapped."""
    collects: bool
    """Sinks live on the driver."""
    slices: int
    quiet_at: float
    """When faults end."""
    nodes: int
    own_slices: Mapping[str, int] = field(default_factory=dict)
    """operator -> number of slices of its stage; others have ``slices``"""

    @staticmethod
    def draw(seed: int) -> Scenario:
        r = random.Random(f"penstock scenario {seed}")
        quiet_at = r.uniform(2.0, 10.0)
        names = ["in", "also"][: 1 + (r.random() < 0.3)]
        keys = r.randint(1, 12)
        inputs = {name: _input(r, r.randint(20, 100 // len(names)), keys, quiet_at) for name in names}
        branches = r.sample(BRANCHES, 1 + (r.random() < 0.25))
        return Scenario(
            seed,
            inputs,
            tuple(branches),
            r.choice([0, 1, 5]),
            r.random() < 0.3,
            r.random() < 0.3,
            r.choice([1, 2, 4, 8]),
            quiet_at,
            r.randint(1, 4),
            _own_slices(seed),
        )

    def config(self, r: random.Random) -> Config:
        """Settings for one start of the job; different ones at the next."""
        # What a seed means depends on the order of the draws.
        config = Config(
            slices=self.slices,
            instances=r.choice([None, 1, 2, 2, 3]),
            epoch_rows=r.choice([15, 30, 60, 200]),
            epochs_in_flight=r.choice([1, 2, 2, 3]),
            checkpoint_interval_s=r.choice([0.0, 0.3, 1.0, 1.0, 3.0]),
            idle_epoch_s=r.choice([1.5, 10.0, 10.0]),
            manifests_kept=r.choice([1, 2, 3]),
            deltas_max=r.choice([2, 3]),
            poll_ms=100,
            epochs_max=r.choice([None] * 7 + [3]),
            store_away_epochs=r.choice([0, 2, 5]),
            backups=r.choice([0, 1, 1, 2]),
            placement="chained" if r.random() < 0.5 else "ring",
        )
        return config.replace(move_timeout_s=r.choice([1.0, 600.0]))


def _own_slices(seed: int) -> dict[str, int]:
    """Every fifth seed has stages with different numbers of slices. No other draw depends on these."""
    r = random.Random(f"penstock slices {seed}")
    return {name: r.choice([2, 3, 6, 16]) for name in KEYED if r.random() < 0.7} if seed % 5 == 3 else {}


def _input(r: random.Random, count: int, keys: int, quiet_at: float) -> Input:
    disorder = r.choice([0.0, 2.0, 10.0])
    skew = r.choice([1.0, 3.0])
    at = 0.0
    rows = []
    for _ in range(count):
        at += r.expovariate(2.0)
        number = int(keys * r.random() ** skew)
        time_us = START_US + int((at - r.random() * disorder) * 1e6)
        rows.append((f"k{number}", number % 3, r.choice([0.1, 1e16, -1e16, r.uniform(-5, 5)]), time_us))
    frame = pl.DataFrame(rows, schema=list(SCHEMA), orient="row").cast(SCHEMA)
    inner = r.sample(range(1, count), min(count - 1, r.randint(0, 4)))
    ends = (*sorted(inner), count)
    # The last rows may come after the faults: what was spoilt before must not show then either.
    appears = sorted(r.uniform(0.0, quiet_at) if r.random() < 0.8 else 0.0 for _ in ends)
    appears[0] = 0.0 if r.random() < 0.8 else appears[0]  # faults before there is anything to spoil prove nothing
    return Input(frame, ends, tuple(appears))


def stormy(scenario: Scenario, r: random.Random) -> Scenario:
    """The same flow under load for as long as orders are given: rows appear all the time, and slices abound."""
    quiet_at = r.uniform(5.0, 9.0)
    inputs = {}
    for name in scenario.inputs:
        count = r.randint(150, 250) // len(scenario.inputs)
        rows = _input(r, count, r.randint(6, 24), quiet_at).rows
        ends = (*sorted(r.sample(range(1, count), 30 // len(scenario.inputs))), count)
        inputs[name] = Input(rows, ends, tuple(sorted(r.uniform(0.0, quiet_at) for _ in ends)))
    return replace(scenario, inputs=inputs, slices=r.choice([4, 8, 12]), quiet_at=quiet_at, nodes=r.randint(2, 4))


def build(
    scenario: Scenario, make_source: Callable[[str, Input], Source], make_sink: Callable[[str], Sink]
) -> tuple[Flow, dict[str, Source]]:
    """The flow, and its sources by id."""
    flow = Flow("simulated")
    sources = {name: make_source(name, given) for name, given in scenario.inputs.items()}
    streams = [flow.source(name, source) for name, source in sources.items()]
    if scenario.branches == ("join",) and len(streams) > 1:
        _join(streams[0], streams[1], scenario).sink("join-out", make_sink("join-out"))
        return flow, sources
    stream = streams[0].union("both", *streams[1:], by="t") if len(streams) > 1 else streams[0]
    if scenario.dead:
        stream = stream.map_rows("checked", _checked, schema=dict(SCHEMA))
    elif scenario.seed % 2:
        stream = stream.where("some", pl.col("x") != 0.1)
    for branch in scenario.branches:
        _branch(branch, stream, scenario).sink(f"{branch}-out", make_sink(f"{branch}-out"))
    return flow, sources


def _checked(row: dict[str, Any]) -> dict[str, Any]:
    if row["x"] > 4.5 and row["x"] < 5:
        raise ValueError("on purpose")
    return row


def _join(left: Stream, right: Stream, scenario: Scenario) -> Stream:
    near = within("t", "t", before="2s", after="1s")
    by_key = left.key_by("k", slices=scenario.own_slices.get("join"))
    joined = by_key.join("join", right.key_by("k"), within=near, lateness=f"{scenario.lateness_s}s")
    return joined.select("pairs", "k", "t", "t_right", both=pl.col("x") + pl.col("x_right"))


def _branch(branch: str, stream: Stream, scenario: Scenario) -> Stream:
    lateness = f"{scenario.lateness_s}s"

    def keyed(operator: str, rows: Stream = stream, key: str = "k") -> KeyedStream:
        return rows.key_by(key, slices=scenario.own_slices.get(operator))

    match branch:
        case "running":
            return keyed("running").aggregate("running", n=count(), x=sum("x"), high=max("x"))
        case "windows":
            windows = hopping("4s", every="2s", on="t", lateness=lateness)
            return keyed("windows").window(windows).aggregate("windows", n=count(), x=sum("x"))
        case "custom":
            schema: dict[str, Any] = {"k": str, "number": int, "step": float}
            return keyed("custom").process("custom", Steps(), schema=schema)
        case "timers":
            schema = {"k": str, "at": pl.Datetime("us"), "events": int}
            return keyed("timers").process("timers", Silence(), schema=schema, on="t", lateness=lateness)
        case "ranking":
            return keyed("ranked").aggregate("ranked", n=count(), x=sum("x")).top_k("ranking", 3, by="n")
        case "chain":
            schema = {"k": str, "number": int, "step": float}
            steps = keyed("first").process("first", Steps(), schema=schema)
            return keyed("second", steps, "number").aggregate("second", n=count(), high=max("step"))
        case "clock":
            windows = hopping("2s", every="2s", on=CLOCK)
            return keyed("clock").window(windows).aggregate("clock", n=count(), x=sum("x"))
        case "join":
            return _join(*stream.split("half", pl.col("g") == 0), scenario)
        case _:
            windows = hopping("4s", every="4s", on="t", lateness=lateness)
            counted = keyed("counted").window(windows).aggregate("counted", n=count())
            return counted.top_k("window-ranking", 2, by="n")


__all__ = ["BRANCHES", "SCHEMA", "Input", "Scenario", "build", "stormy"]
