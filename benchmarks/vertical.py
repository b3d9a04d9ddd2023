"""Cores of a node given to a job and taken away while it runs: slices re-mapped, against synchronous repartition.

After figure 16 of ChronoStream: two nodes, with two cores of each in use at first. One node's cores go from 2 to 3, to
1, and back to 2, under load, at several sizes of state. ``penstock`` deals the node's own slices out anew among its
containers while everything runs. ``penstock_stop`` carries out the same orders in the same engine by synchronous
repartition: it finishes what runs, takes a checkpoint, deals out all slices, and loads.

The delay of an order is defined as in the benchmark ``migrate``: the longest time without output from the order until
the containers of the new schedule have given output and nothing is left to do.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import common, migrate
from benchmarks.common import Figures, Row
from benchmarks.migrate import Phase
from benchmarks.recovery import BYTES_PER_KEY

SUMMARY = "Cores of a node from 2 to 3 to 1 under load: delay by size of state, against synchronous repartition."

MODULE = "benchmarks.vertical"
NODES, NODE_CORES = 2, 3
EXECUTOR_MB = 1024
AT_FIRST = 2
"""Cores of each node in use at first."""
ORDERS = ((2, 3), (3, 1), (1, 2))
"""Orders: from and to this number of cores of one node."""

PENSTOCK, STOP = "penstock", "penstock_stop"


def phase_of(state_mb: int) -> Phase:
    return Phase(state_mb * 1_000_000 // BYTES_PER_KEY)


PHASES = (phase_of(100), phase_of(400), phase_of(1_000))
QUICK = (phase_of(50),)


def run(quick: bool, out: Path | None) -> dict[str, Any]:
    """See README.md. Quick: 50 MB."""
    phases = QUICK if quick else PHASES
    rows: list[Row] = []
    series: dict[str, Any] = {}
    with common.workplace() as place:
        migrate.write_phases(place / "pool", phases)
        for contender in (PENSTOCK, STOP):
            figures = migrate.run_phases(MODULE, contender, phases, place)
            rows += migrate.order_rows(contender, figures)
            series[contender] = figures["series"]
    notes = [
        "delay_s: the longest time without output from the order until the new schedule serves and nothing moves.",
        "delay_epochs: the same by the usual time from one output to the next before the order.",
        f"{NODES} executors of {NODE_CORES} cores, {AT_FIRST} of each in use at first; the orders concern one of them.",
        "series: at the largest state, when each output was there, seconds since the first order, and its rows.",
        "In every run the final count and sum of every key were compared with the truth, and no output came twice.",
    ]

    def draw(path: Path) -> None:
        from penstock.observe.plot import Panel, plot_series

        panels = [
            Panel("rows a second", {name: rates(found["outputs"]) for name, found in series.items()}),
            Panel("since the last output, s", {name: gaps(found["outputs"]) for name, found in series.items()}),
            Panel("containers", {name: found["containers"] for name, found in series.items()}, steps=True),
        ]
        title = f"Cores of one node from 2 to 3 to 1 to 2, {round(phases[-1].keys * BYTES_PER_KEY / 1e6)} MB of state"
        plot_series(panels, path, title)

    return common.finish("vertical", rows, ratios(rows), notes, out, draw, series=series)


# --- figures ------------------------------------------------------------------------------------------------------


def gaps(outputs: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """For each output but the first: its time, and the time since the output before."""
    return [(b[0], round(b[0] - a[0], 3)) for a, b in pairwise(outputs)]


def rates(outputs: Sequence[Sequence[float]], width_s: float = 1.0) -> list[tuple[float, float]]:
    """Rows a second in each second, with 0 for a second without output."""
    if not outputs:
        return []
    first, last = int(outputs[0][0] // width_s), int(outputs[-1][0] // width_s)
    sums = dict.fromkeys(range(first, last + 1), 0.0)
    for at, rows in outputs:
        sums[int(at // width_s)] += rows
    return [(bucket * width_s, total / width_s) for bucket, total in sums.items()]


def ratios(rows: Sequence[Row]) -> dict[str, float | None]:
    """By size the median over the orders, by order the median over the sizes."""
    ours, stop = (migrate._by_size(rows, name) for name in (PENSTOCK, STOP))
    found: dict[str, float | None] = {}
    for name, by_size in (("", ours), ("stop_", stop)):
        for keys, value in by_size.items():
            found[f"{name}delay_s_{_mb(keys)}mb"] = common.rounded(value)
        if len(by_size) > 1:
            found[f"{name}largest_vs_smallest"] = common.rounded(max(by_size.values()) / min(by_size.values()))
    for keys in ours.keys() & stop.keys():
        found[f"vs_stop_{_mb(keys)}mb"] = common.rounded(stop[keys] / ours[keys])
    for before, after in ORDERS:
        mine = [r["delay_s"] for r in rows if r["contender"] == PENSTOCK and r["order"] == order_name(before, after)]
        found[f"delay_s_{before}_to_{after}"] = common.rounded(statistics.median(mine)) if mine else None
    epochs = [float(row["delay_epochs"]) for row in rows if row["contender"] == PENSTOCK]
    found["delay_epochs_p50"] = common.rounded(statistics.median(epochs)) if epochs else None
    found["delay_epochs_max"] = common.rounded(max(epochs)) if epochs else None
    return found


def _mb(keys: int) -> int:
    return round(keys * BYTES_PER_KEY / 1e6)


def order_name(before: int, after: int) -> str:
    return f"{before} to {after}"


# --- the job ------------------------------------------------------------------------------------------------------


def begin(args: dict[str, Any], stop_and_copy: bool) -> tuple[Any, migrate.Recorder, list[migrate.Order]]:
    """A job, its record, and the orders to give it."""
    job, recorder = migrate.start_totals(
        args,
        master=f"local-cluster[{NODES},{NODE_CORES},{EXECUTOR_MB}]",
        instances=NODES * AT_FIRST,
        epoch_rows=migrate.LOAD_ROWS,
        backups=0,
        stop_and_copy=stop_and_copy,
    )
    node = job.status().nodes[0].name
    elsewhere = (NODES - 1) * AT_FIRST
    orders: list[migrate.Order] = [
        (order_name(before, after), partial(job.set_cores, node, after), elsewhere + after) for before, after in ORDERS
    ]
    return job, recorder, orders


def penstock(args: dict[str, Any], stop_and_copy: bool = False) -> Iterator[Figures]:
    job, recorder, orders = begin(args, stop_and_copy)
    figures = migrate.go_through(job, recorder, args, orders)
    job.stop()
    first = figures["began"][-len(ORDERS)] - migrate.SETTLE_S
    shown = [(round(at - first, 3), epoch) for at, epoch in recorder.outputs if at >= first]
    series = {
        "outputs": [(at, recorder.rows[epoch]) for at, epoch in shown],
        "containers": [(at, len(set(recorder.owners[epoch]))) for at, epoch in shown],
    }
    yield {**figures, "series": series}


def penstock_stop(args: dict[str, Any]) -> Iterator[Figures]:
    return penstock(args, stop_and_copy=True)


CONTENDERS: dict[str, common.Contender] = {PENSTOCK: penstock, STOP: penstock_stop}

if __name__ == "__main__":
    common.contender_main(MODULE)
