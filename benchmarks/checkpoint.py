"""What checkpoints cost: in throughput, in bytes for each key that was touched, and in the time of single epochs.

The benchmark asks three questions. Does a job that checkpoints every two seconds run as fast as one that never does?

Is a delta as large as what changed, and not as large as the state? For this, 300,000 keys are loaded. Then every epoch
has as many rows as there are keys, all of them on a given share of the keys, and checkpoints follow one another at
once.

Does a checkpoint slow down the epochs beside it? For this, after ChronoStream's comparison, states of several sizes are
checkpointed every two seconds: once with deltas in the background, and once with a synchronous snapshot of everything,
in the same engine. The figures are the average epoch and the worst one.
"""

from __future__ import annotations

import json
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from benchmarks import common, words
from benchmarks.common import Figures, Row
from penstock.connectors.generator import make_vocabulary

SUMMARY = "What checkpoints cost: throughput with and without, bytes by keys touched, the worst epoch by size of state."

MODULE = "benchmarks.checkpoint"
BATCH_WORDS = 500_000
KEYS = common.VOCABULARY
SHARES_PCT = (1, 5, 20, 100)
NEVER_S = 86_400.0
EPOCHS_EACH = 4
STATES_MB = (128, 512, 2048)
BYTES_PER_KEY = 62
"""Bytes of ``JobStatus.state_bytes`` for a key with a count. The rows have the size that a run had."""
EPOCH_ROWS = 200_000
GROWTH_INTERVAL_S = 2.0
FULL_MB_MAX = 1_000
FULL_EPOCHS_MAX = 12
"""Epochs with full snapshots of a state above ``FULL_MB_MAX``."""
SYNC, ASYNC = "penstock_full_snapshots", "penstock_deltas_async"


def run(quick: bool, out: Path | None) -> dict[str, Any]:
    """See README.md. Quick: 12 epochs and one round for the throughput, each share of the keys once, 128 and 512 MB."""
    batches, rounds, repeats = (12, 1, 1) if quick else (24, 1, 1)
    with common.workplace() as place:
        rows = throughput(place, batches, rounds)
        deltas = delta_sizes(place / "deltas", repeats)
    epochs: list[Row] = []
    series: list[dict[str, Any]] = []
    for state_mb in STATES_MB[:2] if quick else STATES_MB:
        with common.workplace() as place:
            found = epoch_times(place, state_mb, 40)
        series += [{key: row[key] for key in ("contender", "state_mb", "round", "epoch_ms")} for row in found]
        epochs += [{key: value for key, value in row.items() if key != "epoch_ms"} for row in found]
    per_key = {f"bytes_per_touched_key_{p}pct": _median(deltas, "bytes_per_touched_key", p) for p in SHARES_PCT}
    known = [value for value in per_key.values() if value]
    _, r2 = common.line([r["touched_keys"] for r in deltas], [r["delta_bytes"] for r in deltas])
    ratios: dict[str, float | None] = {
        "checkpoint_2s_vs_none": common.ratio(rows, "rows_s", "penstock_2s", "penstock_none"),
        **per_key,
        "delta_linear_r2": common.rounded(r2),
        "bytes_per_key_spread": common.rounded(max(known) / min(known)) if known else None,
        **epoch_ratios(epochs),
    }
    notes = [
        "checkpoint_2s_vs_none compares throughput: 1.0 means that checkpoints are free.",
        "bytes_per_key_spread: the largest bytes_per_touched_key / the smallest. 1.0 is exactly proportional.",
        "Merging of deltas was put off in the second part, so that each file is one checkpoint's.",
        "worst_vs_average: the worst epoch / the average epoch, without the first quarter of the epochs. It is the "
        "median over the rounds, at the size of state where it is largest.",
        "full_...: with synchronous full snapshots. States of more than "
        f"{FULL_MB_MAX:,} MB get {FULL_EPOCHS_MAX} epochs instead of 40.",
    ]

    def draw(path: Path) -> None:
        from penstock.observe.plot import plot_bars

        bars = [{"label": f"{p} %", "value": _median(deltas, "delta_bytes", p) or 0.0} for p in SHARES_PCT]
        plot_bars(bars, path, f"Size of a delta by share of {KEYS:,} keys touched", "bytes")

    return common.finish("checkpoint", [*rows, *deltas, *epochs], ratios, notes, out, draw, series=series)


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
    """Write files, one for an epoch: ``keys`` rows on a random share of the keys, in per cent. Give the keys of each
    epoch.

    A checkpoint is taken beside the epochs that follow, so it may cover one epoch or two. Several epochs in a row touch
    the same keys. So checkpoints within these epochs cover the same keys, however many epochs they take.
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
    """A row for each delta of ``files``: epoch_from (exclusive), epoch_to and bytes. Deltas that loaded the state are
    left out.

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
    """Run with checkpoints as often as they go, one epoch at a time. Nothing is merged or deleted."""
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
    """Every delta that a checkpoint wrote: its epochs, by the checkpoints, and its size, by the disk."""
    epochs = sorted(int(path.stem) for path in (checkpoint / "manifests").iterdir())
    before = dict(zip(epochs, [0, *epochs], strict=False))
    found = []
    for path in (checkpoint / "state").rglob("*.delta"):
        epoch = int(path.name.split("-")[0])
        if epoch in before:
            found.append({"epoch_from": before[epoch], "epoch_to": epoch, "bytes": path.stat().st_size})
    return sorted(found, key=json.dumps)


# --- single epochs ------------------------------------------------------------------------------------------------


def epoch_times(place: Path, state_mb: int, epochs: int, rounds: int = 1) -> list[Row]:
    """Run the same epochs over the same state, checkpointed in the two ways. Full snapshots of a large state take
    minutes for a few epochs, so they get fewer epochs.
    """
    load = -(-state_mb * 1_000_000 // (BYTES_PER_KEY * EPOCH_ROWS))
    keys = load * EPOCH_ROWS  # epochs go by rows, not by files, so the rows of a file must fill whole epochs
    truth = write_growth(place / "in", keys, epochs)

    def one(contender: str, number: int) -> Figures:
        work = place / "work"
        many = min(epochs, FULL_EPOCHS_MAX) if contender == SYNC and state_mb > FULL_MB_MAX else epochs
        args = {"input": str(place / "in"), "work": str(work), "load": load, "epochs": many}
        figures = common.run_contender(MODULE, contender, args, work, seconds_max=2 * common.CONTENDER_S_MAX)
        unread = sorted((place / "in").glob("*.parquet"))[load + many :]
        common.check_counts(pl.read_parquet(work / "counts" / "*.parquet"), without(truth, unread), contender)
        shutil.rmtree(work, ignore_errors=True)
        return figures

    return common.in_turn([ASYNC, SYNC], rounds, one, state_mb=state_mb)


def write_growth(folder: Path, keys: int, epochs: int, *, rows: int = EPOCH_ROWS, seed: int = 9) -> pl.DataFrame:
    """Write files, one for an epoch: first every key once, then random keys of all. Give the true counts: word, n."""
    folder.mkdir(parents=True)
    common.note(f"writing {keys:,} keys and {epochs} epochs")
    rng = np.random.default_rng(seed)
    order = rng.permutation(keys)
    batches = [order[first : first + rows] for first in range(0, keys, rows)]
    batches += [rng.integers(0, keys, rows) for _ in range(epochs)]
    counts = np.zeros(keys, dtype=np.int64)
    for number, batch in enumerate(batches):
        common.write_batch(_names(batch), folder, number)
        counts += np.bincount(batch, minlength=keys)
    return _names(np.arange(keys)).with_columns(n=pl.Series(counts)).sort("word")


def without(truth: pl.DataFrame, unread: Sequence[Path]) -> pl.DataFrame:
    """The true counts before these files."""
    if not unread:
        return truth
    rest = pl.concat([pl.read_parquet(path, columns=["word"]) for path in unread]).group_by("word").len("less")
    less = truth.join(rest, on="word", how="left", maintain_order="left")
    return less.select("word", n=pl.col("n") - pl.col("less").fill_null(0))


def _names(numbers: np.ndarray[Any, Any]) -> pl.DataFrame:
    return pl.DataFrame({"word": "user-" + pl.Series(numbers).cast(pl.String).str.zfill(10)})


def epoch_figures(epoch_ms: Sequence[float]) -> Figures:
    """Figures of ``epoch_ms``, the times of all epochs in order. A quarter of them is warm-up: the first one restores
    the state.
    """
    measured = epoch_ms[common.warm_up(len(epoch_ms)) :]
    average, worst = statistics.fmean(measured), max(measured)
    return {
        "epoch_ms_average": common.rounded(average),
        "epoch_ms_p99": common.rounded(common.percentile(measured, 0.99)),
        "epoch_ms_worst": common.rounded(worst),
        "worst_vs_average": common.rounded(worst / average),
        "p99_vs_average": common.rounded(common.percentile(measured, 0.99) / average),
    }


def epoch_ratios(rows: Sequence[Row]) -> dict[str, float | None]:
    """Medians over the rounds for each size. The headline is the size where the figure is largest."""
    found: dict[str, float | None] = {}
    for contender, prefix in ((ASYNC, ""), (SYNC, "full_")):
        of_size = {
            size: statistics.median(
                row["worst_vs_average"] for row in rows if (row["contender"], row["state_mb"]) == (contender, size)
            )
            for size in dict.fromkeys(row["state_mb"] for row in rows if row["contender"] == contender)
        }
        found[f"{prefix}worst_vs_average"] = common.rounded(max(of_size.values())) if of_size else None
        found |= {f"{prefix}worst_vs_average_{size}mb": common.rounded(value) for size, value in of_size.items()}
    for size in dict.fromkeys(row["state_mb"] for row in rows):
        for figure in ("average", "worst"):
            name = f"{figure}_epoch_vs_full_{size}mb"
            found[name] = common.ratio(rows, f"epoch_ms_{figure}", ASYNC, SYNC, state_mb=size)
    return found


def _growing(args: dict[str, Any], full_snapshots: bool) -> Iterator[Figures]:
    import cloudpickle

    import penstock as ps
    from benchmarks import baselines
    from penstock.engines.job import start
    from penstock.engines.task import Worker

    work = Path(args["work"])
    flow = ps.Flow("growth")
    source = flow.source("lines", ps.files(f"{args['input']}/*.parquet"))
    source.key_by("word").aggregate(words.OPERATOR, n=ps.count()).sink("out", ps.discard())
    settings: dict[str, Any] = dict(
        master=common.MASTER,
        epoch_rows=EPOCH_ROWS,
        # One container and one epoch at a time leave a core free for the work beside epochs, as on most machines.
        instances=1,
        epochs_in_flight=1,
        checkpoint=str(work / "checkpoint"),
        spark={"spark.driver.memory": common.DRIVER_MEMORY, "spark.local.dir": str(work / "spark")},
    )
    # The first run loads the state and leaves one checkpoint. The next run goes on from it and is measured.
    ps.run(flow, epochs_max=args["load"], checkpoint_interval_s=NEVER_S, **settings).wait()
    begin, epochs = time.monotonic(), args["epochs"]
    config = ps.Config.load(overrides={**settings, "epochs_max": epochs, "checkpoint_interval_s": GROWTH_INTERVAL_S})
    cloudpickle.register_pickle_by_value(baselines)  # executors do not have the benchmarks
    job = start(flow, config=config, worker=baselines.FullSnapshots if full_snapshots else Worker)
    job.wait()
    common.note(f"{epochs} epochs in {time.monotonic() - begin:.0f} s, restoring included")
    status = job.status()
    history = [entry for entry in status.history if entry.rows]
    assert len(history) == epochs, f"{len(history)} epochs of {epochs}"
    times = [entry.ms for entry in history]
    yield {
        **epoch_figures(times),
        "state_bytes": status.state_bytes,
        "state_rows": status.state_rows,
        "checkpoints": status.checkpoints,
        "epoch_ms": times,
    }
    (work / "counts").mkdir()
    words.final_counts(work / "checkpoint").write_parquet(work / "counts" / "part.parquet")


def penstock_deltas_async(args: dict[str, Any]) -> Iterator[Figures]:
    return _growing(args, full_snapshots=False)


def penstock_full_snapshots(args: dict[str, Any]) -> Iterator[Figures]:
    return _growing(args, full_snapshots=True)


CONTENDERS: dict[str, common.Contender] = {
    ASYNC: penstock_deltas_async,
    SYNC: penstock_full_snapshots,
    "penstock_2s": penstock_2s,
    "penstock_none": penstock_none,
    "penstock_deltas": penstock_deltas,
}

if __name__ == "__main__":
    common.contender_main(MODULE)
