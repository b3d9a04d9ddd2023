"""A running count of words: Penstock against Structured Streaming with both of its state stores.

All contenders read the same Parquet files, one file a batch. They keep 300,000 keys of state, take checkpoints and
throw the updates away, with two cores and the same driver memory. Structured Streaming is set up as a user who knows it
would do: two shuffle partitions for two cores, files cut so that both cores read, update mode, no UI. It makes its
state durable with every batch. Penstock does so every two seconds, in the background, and repeats the epochs since then
after a failure.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

from benchmarks import common
from benchmarks.common import Figures, Row

SUMMARY = "Running word count: words a second, batch time and memory, against Structured Streaming."

MODULE = "benchmarks.words"
PEERS = {"default_store": "structured_default", "rocksdb": "structured_rocksdb"}
OPERATOR = "counts"


def run(quick: bool, out: Path | None) -> dict[str, Any]:
    """See README.md. Quick: 12 batches of 500,000 words, one round."""
    sizes = [(500_000, 12)] if quick else [(500_000, 40), (2_000_000, 16)]
    rows: list[Row] = []
    with common.workplace() as place:
        for batch_words, batches in sizes:
            rows += measure(place / str(batch_words), batch_words, batches, rounds=1 if quick else 3)
    notes = [
        "rows_s: words of the batches after the first quarter, by their wall time.",
        "batch_ms: from planned to published (Penstock, two epochs overlap), triggerExecution (Structured Streaming).",
        "State is durable after every batch in Structured Streaming, every 2 s in Penstock.",
        "polars_bare is no contender: the same counting in one process, no engine, no checkpoint.",
        "Every final count of every word was compared with the truth, for each run.",
    ]

    def draw(path: Path) -> None:
        from penstock.observe.plot import plot_bars

        bars = common.medians(rows, "rows_s", group="batch_words")
        plot_bars(bars, path, "Running word count, 300,000 keys, local[2]", "words a second")

    return common.finish("words", rows, ratios(rows), notes, out, draw)


def measure(place: Path, batch_words: int, batches: int, rounds: int) -> list[Row]:
    """All rounds for one batch size."""
    truth = common.write_words(place / "in", batches, batch_words)

    def one(contender: str, number: int) -> Figures:
        return checked_run(MODULE, contender, place, batch_words, batches, truth)

    return common.in_turn(list(CONTENDERS), rounds, one, batch_words=batch_words)


def checked_run(
    module: str, contender: str, place: Path, batch_words: int, batches: int, truth: pl.DataFrame
) -> Figures:
    """Run one contender over the files in ``place / "in"``, and verify its final counts. Nothing is left behind."""
    work = place / "work"
    args = {"input": str(place / "in"), "batch_words": batch_words, "batches": batches, "work": str(work)}
    figures = common.run_contender(module, contender, args, work)
    common.check_counts(pl.read_parquet(work / "counts" / "*.parquet"), truth, contender)
    shutil.rmtree(work, ignore_errors=True)
    return figures


def ratios(rows: list[Row]) -> dict[str, float | None]:
    """Throughput: ours / theirs, more is better. Latency and memory: ours / theirs, less is better."""
    found: dict[str, float | None] = {}
    for size, suffix in ((500_000, ""), (2_000_000, "_2m")):
        for name, peer in PEERS.items():
            found[f"vs_{name}{suffix}"] = common.ratio(rows, "rows_s", "penstock", peer, batch_words=size)
            found[f"latency_vs_{name}{suffix}"] = common.ratio(rows, "batch_ms_p50", "penstock", peer, batch_words=size)
            found[f"memory_vs_{name}{suffix}"] = common.ratio(rows, "memory_mb", "penstock", peer, batch_words=size)
    return found


# --- contenders ---------------------------------------------------------------------------------------------------


def penstock(args: dict[str, Any]) -> Iterator[Figures]:
    """Run the word count with Penstock. Other benchmarks run it with other ``settings``."""
    import penstock as ps

    flow = ps.Flow("words")
    source = flow.source("lines", ps.files(f"{args['input']}/*.parquet"))
    source.key_by("word").aggregate(OPERATOR, n=ps.count()).sink("out", ps.discard())
    yield common.run_penstock(flow, args)
    work = Path(args["work"])
    _save(final_counts(work / "checkpoint"), work)


def final_counts(checkpoint: Path) -> pl.DataFrame:
    """The words and counts in the newest checkpoint."""
    state = common.checkpoint_state(checkpoint, OPERATOR, ["word"])
    (value,) = set(state.columns) - {"word"}
    return state.select("word", n=pl.col(value).cast(pl.Int64))


def structured_default(args: dict[str, Any]) -> Iterator[Figures]:
    return _structured(args, {})


def structured_rocksdb(args: dict[str, Any]) -> Iterator[Figures]:
    return _structured(args, common.ROCKSDB)


def _structured(args: dict[str, Any], settings: dict[str, str]) -> Iterator[Figures]:
    work = Path(args["work"])
    spark = common.structured_session("words", args, settings)
    lines = spark.readStream.schema("word string").option("maxFilesPerTrigger", 1).parquet(args["input"])
    yield common.run_structured(lines.groupBy("word").count().writeStream.format("noop").outputMode("update"), args)
    state = spark.read.format("statestore").load(str(work / "checkpoint"))
    state.selectExpr("key.word as word", "value.count as n").write.parquet(str(work / "counts"))
    spark.stop()


def polars_bare(args: dict[str, Any]) -> Iterator[Figures]:
    """The cost of the counting alone: two threads, no engine, no exchange, no checkpoint."""
    import time

    counts = pl.DataFrame(schema={"word": pl.String(), "n": pl.Int64()})
    ends, times, rows = [], [], []
    for path in sorted(Path(args["input"]).glob("*.parquet")):
        began = time.perf_counter()
        batch = pl.read_parquet(path)
        fresh = batch.group_by("word").agg(n=pl.len().cast(pl.Int64))
        counts = pl.concat([counts, fresh]).group_by("word").agg(pl.col("n").sum())
        ends.append(time.perf_counter())
        times.append((ends[-1] - began) * 1000)
        rows.append(batch.height)
    yield {**common.batch_figures(ends, times, rows, common.warm_up(len(rows))), "state_rows": counts.height}
    _save(counts, Path(args["work"]))


def _save(counts: pl.DataFrame, work: Path) -> None:
    (work / "counts").mkdir()
    counts.write_parquet(work / "counts" / "part.parquet")


CONTENDERS: dict[str, common.Contender] = {
    "penstock": penstock,
    "structured_default": structured_default,
    "structured_rocksdb": structured_rocksdb,
    "polars_bare": polars_bare,
}

if __name__ == "__main__":
    common.contender_main(MODULE)
