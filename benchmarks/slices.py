"""What slices cost: the same word count with its state in 1, 8, 64 and 256 slices.

A slice is the unit that moves, so a stage needs many of them. Many slices must not cost more than one. A slice can live
in one container only, so every contender has one instance of each stage; with two instances the benchmark would measure
parallelism. Stages of two epochs still overlap on the two cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import common, words
from benchmarks.common import Figures

SUMMARY = "What slices cost: the word count with 1, 8, 64 and 256 slices."

MODULE = "benchmarks.slices"
COUNTS = (1, 8, 64, 256)
BATCH_WORDS = 500_000


def run(quick: bool, out: Path | None) -> dict[str, Any]:
    """See README.md. Quick: 8 epochs, one round."""
    batches, rounds = (8, 1) if quick else (30, 5)
    with common.workplace() as place:
        truth = common.write_words(place / "in", batches, BATCH_WORDS)

        def one(contender: str, number: int) -> Figures:
            return words.checked_run(MODULE, contender, place, BATCH_WORDS, batches, truth)

        rows = common.in_turn(list(CONTENDERS), rounds, one)
    ratios = {
        f"slices_{count}_vs_1": common.ratio(rows, "rows_s", f"slices_{count}", "slices_1") for count in COUNTS[1:]
    }
    notes = [
        "Ratios compare the throughput of many slices with that of one: 1.0 means that slices are free.",
        "All contenders have one instance of each stage, because a single slice cannot use two.",
    ]

    def draw(path: Path) -> None:
        from penstock.observe.plot import plot_bars

        plot_bars(common.medians(rows, "rows_s"), path, "Word count by number of slices", "words a second")

    return common.finish("slices", rows, ratios, notes, out, draw)


def _contender(count: int) -> common.Contender:
    def penstock(args: dict[str, Any]) -> Iterator[Figures]:
        return words.penstock({**args, "settings": {"slices": count, "instances": 1}})

    return penstock


CONTENDERS: dict[str, common.Contender] = {f"slices_{count}": _contender(count) for count in COUNTS}

if __name__ == "__main__":
    common.contender_main(MODULE)
