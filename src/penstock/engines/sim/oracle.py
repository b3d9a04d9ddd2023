"""The oracle: the same flow over the same epochs, in one container, with nothing in its way.

It is the local engine under the same runtime. What epochs the disturbed run cut is its own affair (the cut must not
matter, and other tests see to that); given the cut, every epoch's output and the state in the end are fixed to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor, Future
from typing import Any

import polars as pl

from penstock.config import Config
from penstock.connectors.sinks import MemorySink
from penstock.control.events import (
    Tick,
)
from penstock.control.routing import RoutingTable
from penstock.engines.local import LocalEngine
from penstock.engines.runtime import Runtime
from penstock.engines.sim.checkers import canonical
from penstock.engines.sim.flows import Scenario, build
from penstock.engines.sim.outside import ScriptedSource
from penstock.engines.task import DEAD_LETTERS
from penstock.ids import StageId
from penstock.plan import Plan, compile_flow
from penstock.state.checkpoint import Manifest
from penstock.state.codec import read_slices
from penstock.state.store import MemoryStore, Store
from penstock.state.table import KeyedTable


class AtOnce(Executor):
    """A pool that does its work when it gets it."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        pass


def run_undisturbed(
    scenario: Scenario, records: Mapping[int, dict[str, Any]]
) -> tuple[dict[tuple[str, int], list[str]], dict[str, pl.DataFrame]]:
    """(sink, epoch) -> rows, and stage -> state, after these epochs and the end of the input."""
    script = [records[e] for e in sorted(records) if not records[e]["final"]]
    empty = {"end": None, "rows": 0}
    sinks: dict[str, MemorySink] = {}

    def source(id: str, given: Any) -> ScriptedSource:
        first = next(iter(scenario.inputs)) == id
        return ScriptedSource(
            id, given, [r["ranges"].get(id, empty if first and not r["ranges"] else None) for r in script]
        )

    def sink(id: str) -> MemorySink:
        return sinks.setdefault(id, MemorySink())

    flow, sources = build(scenario, source, sink)
    flow.dead_letters(sink(DEAD_LETTERS))
    plan = compile_flow(flow.graph())
    store = MemoryStore()
    planned = next(iter(sources.values()))
    assert isinstance(planned, ScriptedSource)

    def engine(job_id: str) -> LocalEngine:
        made = LocalEngine(plan, job_id, store, "dead_letter")
        made.worker.writer = AtOnce()  # type: ignore[assignment]
        return made

    runtime = Runtime(
        plan,
        Config(
            slices=scenario.slices,
            instances=1,
            epochs_in_flight=1,
            checkpoint_interval_s=86_400,
            epoch_rows=1_000_000,
            journal_mb=0,
        ),
        store,
        engine,
        checkpoint_url=None,
        clock=lambda: 0.0,
        wall_ms=lambda: int(script[planned.at - 1]["clock_ms"]),
        pool=lambda name: AtOnce(),
    )
    runtime._start()
    while not runtime.reason and runtime.error is None:
        runtime.handle(Tick(now=0.0) if runtime.events.empty() else runtime.events.get())
    if runtime.error is not None:
        raise runtime.error
    runtime._close()
    rows = {(id, e): canonical(f) for id, s in sinks.items() for e, f in s.epochs.items()}
    return rows, final_state(store, plan)


def final_state(store: Store, plan: Plan) -> dict[str, pl.DataFrame]:
    """Every stage's table, as the newest checkpoint has it."""
    manifest = newest(store)
    assert manifest is not None
    out = {}
    for stage in plan.stages:
        if stage.stateful:
            assert stage.keyed is not None
            layout = stage.keyed.table()
            assert layout is not None
            table = KeyedTable(layout)
            slicemap = RoutingTable.from_json(manifest.routing).slicemaps[stage.id]
            slices = range(slicemap.count)
            for file in manifest.files_for(StageId(stage.id), slices):
                table.load(read_slices(store.get(file.name), file.name, file.slices))
            out[str(stage.id)] = table.export(slices, slicemap)
    return out


def newest(store: Store) -> Manifest | None:
    names = store.list("manifests/")
    return Manifest.from_bytes(store.get(names[-1]), names[-1]) if names else None


__all__ = ["AtOnce", "final_state", "newest", "run_undisturbed"]
