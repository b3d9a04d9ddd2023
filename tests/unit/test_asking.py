"""A policy that wants nodes, while the cluster manager's answer is on its way to the controller."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import polars as pl
import pytest

import penstock as ps
from penstock.control.events import (
    NodesInvited,
)
from penstock.control.policies import Decision, Observation, nothing
from penstock.engines import runtime as runtime_module
from penstock.engines.job import Job, start


class Wants:
    """A policy that wants one more node, from the moment that it is told to."""

    name = "wants"

    def __init__(self) -> None:
        self.now = False
        self.coming: list[int] = []

    def decide(self, seen: Observation) -> Decision:
        self.coming.append(seen.coming)
        return Decision("scale_out", "1 is not enough", nodes=1) if self.now else nothing("not yet")


def until(job: Job, met: Callable[[], object]) -> None:
    while not met():
        assert not job.wait(0.01)


def test_nodes_that_were_granted_are_coming_before_the_controller_hears_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runtime_module, "POLICY_S", 0.0)
    flow = ps.Flow("asks")
    source = ps.generator(lambda first, n, rng: pl.DataFrame({"k": ["a"] * n}), schema={"k": str})
    flow.source("in", source).key_by("k").aggregate("count", n=ps.count()).sink("out", ps.discard())
    policy, asked, answered = Wants(), [], threading.Event()
    config = ps.Config(epoch_rows=50, instances=1, control=False, policy=policy, master="spark://host:7077")
    config = config.replace(policy_cool_down_s=0.0, nodes_max=5)

    def request(more: int) -> bool:
        asked.append(more)
        return True

    with start(flow, engine="local", config=config) as job:
        until(job, lambda: policy.coming)
        runtime: Any = job._runtime
        post = runtime.post

        def late(event: Any) -> None:
            if isinstance(event, NodesInvited):
                held.append(event)
                answered.set()
            else:
                post(event)

        held: list[Any] = []
        runtime.engine.request_nodes, runtime.post = request, late
        policy.now = True
        until(job, answered.is_set)
        shown = len(policy.coming)
        until(job, lambda: len(policy.coming) > shown + 5)
        assert set(policy.coming[shown:]) == {1}, "asked for, and granted, though the controller does not know it"
        post(held[0])
        until(job, lambda: runtime.controller.fleet.invited == 1)
        shown = len(policy.coming)
        until(job, lambda: len(policy.coming) > shown + 5)
        assert set(policy.coming[shown + 1 :]) == {1} and asked == [1]
