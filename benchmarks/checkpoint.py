"""What checkpoints cost: in throughput, and in bytes for each key that was touched.

Two questions. Does a job that checkpoints every two seconds run as fast as one that never does? And is a delta as large
as what changed, and not as large as the state? For the second, 300,000 keys are loaded; then every epoch has as many
rows as there are keys, but all of them on a given share of the keys, and checkpoints follow one another at once.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from benchmarks import common, words
from benchmarks.common import Figures, Row
from penstock.connectors.generator import make_vocabulary

SUMMARY = "What checkpoints cost: throughput with and without, and bytes of delta by keys touched."

MODULE = "benchmarks.checkpoint"
BATCH_WORDS = 500_000
KEYS = common.VOCABULARY
SHARES_PCT = (1, 5, 20, 100)
NEVER_S = 86_400.0
EPOCHS_EACH = 4


def run(quick: bool, out: Path | None) -> dict[str, Any]:
    """See README.md. Quick: 12 epochs and one round for the throughput, each share of the keys once."""
    batches, rounds, repeats = (12, 1, 1) if quick else (80, 4, 5)
    with common.workplace() as place:
        rows = throughput(place, batches, rounds)
        deltas = delta_sizes(place / "deltas", repeats)
    per_key = {f"bytes_per_touched_key_{p}pct": _median(deltas, "bytes_per_touched_key", p) for p in SHARES_PCT}
    known = [value for value in per_key.values() if value]
    _, r2 = common.line([r["touched_keys"] for r in deltas], [r["delta_bytes"] for r in deltas])
    ratios: dict[str, float | None] = {
        "checkpoint_2s_vs_none": common.ratio(rows, "rows_s", "penstock_2s", "penstock_none"),
        **per_key,
        "delta_linear_r2": common.rounded(r2),
        "bytes_per_key_spread": common.rounded(max(known) / min(known)) if known else None,
    }
    notes = [
        "checkpoint_2s_vs_none is of throughput: 1.0 means that checkpoints are free.",
        "bytes_per_key_spread: the largest bytes_per_touched_key by the smallest; 1.0 is exactly proportional.",
        "Merging of deltas was put off in the second part, so that each file is one checkpoint's.",
    ]

    def draw(path: Path) -> None:
        from penstock.observe.plot import plot_bars

        bars = [{"label": f"{p} %", "value": _median(deltas, "delta_bytes", p) or 0.0} for p in SHARES_PCT]
        plot_bars(bars, path, f"Size of a delta by share of {KEYS:,} keys touched", "bytes")

    return common.finish("checkpoint", [*rows, *deltas], ratios, notes, out, draw)


def _median(rows: Sequence[Row], figure: str, share: int) -> float | None:
    found = [float(row[figure]) for row in rows if row["touched_pct"] == share]
    return common.rounded(statistics.median(found)) if found else None


# --- throughput ---------------------------------------------------------------------------------------------------


def throughput(place: Path, batches: int, rounds: int) -> list[Row]:
    truth = common.write_words(place / "in", batches, BATCH_WORDS)

    def one(contender: str, number: int) -> Figures:
        return words.checked_run(MODULE, contender, place, BATCH_WORDS, batches, truth)

    return common.in_turn(["penstock_2s", "penstock_none"], rounds, one)


def penstock_2s(args: dict[str, Any]) -> Iterator[Figures]:
    return words.penstock({**args, "settings": {"checkpoint_interval_s": 2.0}})


def penstock_none(args: dict[str, Any]) -> Iterator[Figures]:
    return words.penstock({**args, "settings": {"checkpoint_interval_s": NEVER_S}})


# --- sizes of deltas ----------------------------------------------------------------------------------------------


def delta_sizes(place: Path, repeats: int) -> list[Row]:
    """A row for each checkpoint: how many keys were touched since the last one, and how large its delta is."""
    shares = [100, *(share for _ in range(repeats) for share in SHARES_PCT)]  # the first loads the state
    touched = write_touches(place / "in", shares)
    work = place / "work"
    args = {"input": str(place / "in"), "work": str(work)}
    figures = common.run_contender(MODULE, "penstock_deltas", args, work)
    state = {"state_keys": figures["state_rows"], "state_bytes": figures["state_bytes"]}
    rows = [{**row, **state} for row in rows_of_deltas(figures["files"], touched)]
    for row in rows:
        common.note(f"delta: {row}")
    return rows


def write_touches(
    folder: Path, shares: Sequence[int], *, keys: int = KEYS, epochs_each: int = EPOCHS_EACH, seed: int = 3
) -> list[frozenset[int]]:
    """Files, one for an epoch: ``keys`` rows on a random share of the keys, in per cent. Gives the keys of each epoch.

    A checkpoint is taken beside the epochs that follow, so it may cover one of them or two. Several epochs in a row
    touch the very same keys: checkpoints within them cover the same keys, however many epochs they take.
    """
    folder.mkdir(parents=True)
    vocabulary = pl.Series("word", make_vocabulary(keys))
    rng = np.random.default_rng(seed)
    touched: list[frozenset[int]] = []
    for share in shares:
        chosen = rng.permutation(keys)[: keys * share // 100]
        same = frozenset(chosen.tolist())
        for _ in range(epochs_each):
            ranks = rng.permutation(np.resize(chosen, keys))
            frame = pl.DataFrame({"word": vocabulary.gather(ranks.astype(np.uint32))})
            path = folder / f"{len(touched):05d}.parquet"
            frame.write_parquet(path, compression="snappy", row_group_size=-(-keys // 2))
            touched.append(same)
    return touched


def rows_of_deltas(
    files: Sequence[Mapping[str, Any]], touched: Sequence[frozenset[int]], *, keys: int = KEYS
) -> list[Row]:
    """``files``: epoch_from (exclusive), epoch_to and bytes of every delta. Those that loaded the state are left out.

    A checkpoint over epochs of several key sets is sized by the keys of all of them, and belongs to no one share.
    """
    by_range: dict[tuple[int, int], int] = {}
    for file in files:
        span = (int(file["epoch_from"]), int(file["epoch_to"]))
        by_range[span] = by_range.get(span, 0) + int(file["bytes"])
    rows: list[Row] = []
    seen: dict[int | None, int] = {}
    for (first, last), size in sorted(by_range.items()):
        covered = touched[first:last]
        if any(same is touched[0] for same in covered):
            continue
        count = len(frozenset().union(*covered))
        share = round(100 * count / keys) if all(same is covered[0] for same in covered) else None
        seen[share] = seen.get(share, 0) + 1
        rows.append(
            {
                "contender": f"penstock_delta_{share}pct" if share else "penstock_delta_mixed",
                "round": seen[share],
                "touched_pct": share,
                "touched_keys": count,
                "delta_bytes": size,
                "bytes_per_touched_key": common.rounded(size / count),
            }
        )
    return rows


def penstock_deltas(args: dict[str, Any]) -> Iterator[Figures]:
    """Checkpoints as often as they go, one epoch at a time, nothing merged and nothing thrown away."""
    import penstock as ps

    work = Path(args["work"])
    flow = ps.Flow("touches")
    source = flow.source("lines", ps.files(f"{args['input']}/*.parquet"))
    source.key_by("word").aggregate(words.OPERATOR, n=ps.count()).sink("out", ps.discard())
    job = ps.run(
        flow,
        master=common.MASTER,
        epoch_rows=KEYS,
        epochs_in_flight=1,
        checkpoint=str(work / "checkpoint"),
        checkpoint_interval_s=0.0,
        manifests_kept=1_000,
        deltas_max=1_000,
        spark={"spark.driver.memory": common.DRIVER_MEMORY, "spark.local.dir": str(work / "spark")},
    )
    job.wait()
    status = job.status()
    yield {
        "state_rows": status.state_rows,
        "state_bytes": status.state_bytes,
        "files": deltas_on_disk(work / "checkpoint"),
    }


def deltas_on_disk(checkpoint: Path) -> list[dict[str, int]]:
    """Every delta that a checkpoint wrote: the epochs it covers, by the checkpoints, and its size, by the disk."""
    epochs = sorted(int(path.stem) for path in (checkpoint / "manifests").iterdir())
    before = dict(zip(epochs, [0, *epochs], strict=False))
    found = []
    for path in (checkpoint / "state").rglob("*.delta"):
        epoch = int(path.name.split("-")[0])
        if epoch in before:
            found.append({"epoch_from": before[epoch], "epoch_to": epoch, "bytes": path.stat().st_size})
    return sorted(found, key=json.dumps)


CONTENDERS: dict[str, common.Contender] = {
    "penstock_2s": penstock_2s,
    "penstock_none": penstock_none,
    "penstock_deltas": penstock_deltas,
}

if __name__ == "__main__":
    common.contender_main(MODULE)
