"""The 100 most frequent words of the last 10 seconds, every 2: Penstock against Structured Streaming.

All contenders read the same Parquet files of (ts, word), one file a batch. With every batch event time goes forward by
the hop, so each batch closes one window, of five batches. Rows come up to 0.9 s out of order, and lateness is a second,
so no row is late. Every window comes once, complete, with its 100 words ranked, and is written to Parquet exactly once.

**The peer does what its users do.** Structured Streaming cannot rank the result of an aggregation within one query, so
``foreachBatch`` does the ranking. In append mode a window comes whole, in the batch after its watermark has passed.
Spark's optimiser takes the 100 best words of each partition before the exchange, as Penstock does. The directory of a
batch is overwritten, which makes the output exactly once. Structured Streaming closes a window one batch later than
Penstock, because its watermark moves between batches.

**Ties** are decided by the word, for all contenders. DuckDB ranks the whole input in one query, and every window of
every contender must be the same.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from benchmarks import common
from benchmarks.common import Figures, Row
from penstock.errors import EngineError

SUMMARY = "Top 100 words of hopping windows: words a second, batch time and memory, against Structured Streaming."

MODULE = "benchmarks.windows"
PEERS = {"default_store": "structured_default", "rocksdb": "structured_rocksdb"}
BATCH_WORDS = 500_000
SIZE_S, EVERY_S, LATENESS_S, DISORDER_S = 10, 2, 1.0, 0.9
K = 100
BEGIN_US = 1_767_225_600_000_000
"""2026-01-01 is a multiple of the hop, so ends of windows and ends of batches fall together."""
FILL = SIZE_S // EVERY_S + 1
"""Batches until windows open and close at a constant rate. They are never measured."""
COLUMNS = ["end_us", "rank", "word", "n"]


def run(quick: bool, out: Path | None) -> dict[str, Any]:
    """See README.md. Quick: 9 batches of 50,000 words, one round."""
    batch_words, batches, rounds = (50_000, 9, 1) if quick else (BATCH_WORDS, 20, 2)
    with common.workplace() as place:
        rows = measure(place, batch_words, batches, rounds)
    notes = [
        f"Windows of {SIZE_S} s every {EVERY_S} s, top {K} of each. One closes with each batch.",
        f"rows_s: words of the batches after the first {warm_up(batches)}, by their wall time.",
        "batch_ms: from planned to published (Penstock, two epochs overlap), triggerExecution (Structured Streaming).",
        "State is durable after every batch in Structured Streaming, every 2 s in Penstock. Output is Parquet, once.",
        "Every window of every run was compared with DuckDB's ranking of the whole input.",
    ]

    def draw(path: Path) -> None:
        from penstock.observe.plot import plot_bars

        title = f"Top {K} words of hopping windows, {SIZE_S} s / {EVERY_S} s, local[2]"
        plot_bars(common.medians(rows, "rows_s"), path, title, "words a second")

    return common.finish("windows", rows, ratios(rows), notes, out, draw)


def warm_up(batches: int) -> int:
    return max(FILL, common.warm_up(batches))


def measure(place: Path, batch_words: int, batches: int, rounds: int) -> list[Row]:
    """Run all rounds over one input."""
    write_events(place / "in", batches, batch_words)
    truth = true_windows(place / "in")
    work = place / "work"
    args = {"input": str(place / "in"), "batch_words": batch_words, "batches": batches, "work": str(work)}

    def one(contender: str, number: int) -> Figures:
        figures = common.run_contender(MODULE, contender, args, work)
        check_windows(pl.read_parquet(work / "windows.parquet"), truth, closed_until(batches), contender)
        shutil.rmtree(work, ignore_errors=True)
        return figures

    return common.in_turn(list(CONTENDERS), rounds, one, batch_words=batch_words)


def ratios(rows: list[Row]) -> dict[str, float | None]:
    """Throughput: ours / theirs, more is better. Latency and memory: ours / theirs, less is better."""
    found: dict[str, float | None] = {}
    for name, peer in PEERS.items():
        found[f"vs_{name}"] = common.ratio(rows, "rows_s", "penstock", peer)
        found[f"latency_vs_{name}"] = common.ratio(rows, "batch_ms_p50", "penstock", peer)
        found[f"memory_vs_{name}"] = common.ratio(rows, "memory_mb", "penstock", peer)
    return found


# --- input and truth ----------------------------------------------------------------------------------------------


def write_events(folder: Path, files: int, rows_each: int, *, seed: int = 2) -> None:
    """Write Parquet files of (ts, word). Rows are evenly spread over the hop, then each is up to ``DISORDER_S``
    earlier.
    """
    folder.mkdir(parents=True)
    common.note(f"writing {files} files of {rows_each:,} words with their times")
    for number in range(files):
        rng = np.random.default_rng([seed, number])
        turn = BEGIN_US + number * EVERY_S * 1_000_000 + np.arange(rows_each) * (EVERY_S * 1_000_000) // rows_each
        ts = turn - rng.integers(0, int(DISORDER_S * 1_000_000), rows_each)
        ts[-1] = turn[-1]  # so the time at the end of a file does not depend on luck
        times = pl.Series("ts", ts, dtype=pl.Int64).cast(pl.Datetime("us", "UTC"))
        common.write_batch(pl.DataFrame([times, common.zipf_words(rows_each, rng)]), folder, number)


def closed_until(batches: int) -> int:
    """The end of the last window that all contenders have given by the end of the input, in microseconds.

    The last event comes a moment before the end of the last batch's hop. The watermark is a second of lateness before
    that.
    """
    last = BEGIN_US + batches * EVERY_S * 1_000_000 - int(LATENESS_S * 1_000_000) - 1
    return last // (EVERY_S * 1_000_000) * (EVERY_S * 1_000_000)


def true_windows(folder: Path) -> pl.DataFrame:
    """The words of every window, by DuckDB over the whole input: end_us, rank, word, n."""
    import duckdb

    size, every = SIZE_S * 1_000_000, EVERY_S * 1_000_000
    query = f"""
        WITH panes AS (
            SELECT word, epoch_us(ts) // {every} AS pane, count(*) AS n
            FROM read_parquet('{folder}/*.parquet') GROUP BY ALL
        ), windows AS (
            SELECT word, (pane + 1 + hop) * {every} AS end_us, sum(n)::BIGINT AS n
            FROM panes, range({size // every}) AS hops(hop) GROUP BY ALL
        )
        SELECT end_us::BIGINT AS end_us, word, n,
               row_number() OVER (PARTITION BY end_us ORDER BY n DESC, word) AS rank
        FROM windows QUALIFY rank <= {K}
    """
    with duckdb.connect(config={"threads": 2}) as connection:
        return as_windows(pl.DataFrame(connection.sql(query).to_arrow_table()))


def as_windows(frame: pl.DataFrame) -> pl.DataFrame:
    types = pl.Schema({"end_us": pl.Int64(), "rank": pl.Int64(), "word": pl.String(), "n": pl.Int64()})
    return frame.select(COLUMNS).cast(types).sort("end_us", "rank")


def check_windows(found: pl.DataFrame, truth: pl.DataFrame, until_us: int, contender: str) -> None:
    """Check that every closed window is there, and that every window has the right words at the right ranks."""
    have = as_windows(found)
    ends = set(have["end_us"].to_list())
    due = truth.filter((pl.col("end_us") <= until_us) | pl.col("end_us").is_in(sorted(ends)))
    if have.equals(due):
        return
    wrong = due.join(have, on=["end_us", "rank"], how="full", suffix="_found", coalesce=True).filter(
        pl.col("word").ne_missing(pl.col("word_found")) | pl.col("n").ne_missing(pl.col("n_found"))
    )
    example = wrong.sort("end_us", "rank").head(1).to_dicts() or "a row given twice"
    raise EngineError(
        f"contender '{contender}' ranked wrongly: it gave {have.height:,} rows of {len(ends):,} windows, where "
        f"{due.height:,} of {due['end_us'].n_unique():,} are right; {wrong.height:,} differ, such as {example}.",
        remedy="Its figures were thrown away. Please report this.",
        contender=contender,
    )


# --- contenders ---------------------------------------------------------------------------------------------------


def penstock(args: dict[str, Any]) -> Iterator[Figures]:
    import penstock as ps

    output = Path(args["work"]) / "out"
    flow = ps.Flow("windows")
    source = flow.source("words", ps.files(f"{args['input']}/*.parquet"))
    window = ps.hopping(f"{SIZE_S}s", every=f"{EVERY_S}s", on="ts", lateness=f"{LATENESS_S}s")
    counts = source.key_by("word").window(window).aggregate("counts", n=ps.count())
    counts.top_k("top", K, by="n").sink("out", ps.parquet(str(output)))
    yield common.run_penstock(flow, args, warm=warm_up(args["batches"]))
    found = ps.read_output(str(output)).with_columns(end_us=pl.col("window_end").dt.epoch("us"))
    found.select(COLUMNS).write_parquet(Path(args["work"]) / "windows.parquet")


def structured_default(args: dict[str, Any]) -> Iterator[Figures]:
    return _structured(args, {})


def structured_rocksdb(args: dict[str, Any]) -> Iterator[Figures]:
    return _structured(args, common.ROCKSDB)


def _structured(args: dict[str, Any], settings: dict[str, str]) -> Iterator[Figures]:
    spark = common.structured_session("windows", args, settings)
    from pyspark.sql import Window
    from pyspark.sql import functions as sql

    output = Path(args["work"]) / "out"
    rank = sql.row_number().over(Window.partitionBy("window").orderBy(sql.desc("count"), "word"))

    def write_top(batch: Any, number: int) -> None:
        top = batch.withColumn("rank", rank).where(f"rank <= {K}")
        columns = top.selectExpr("unix_micros(window.end) AS end_us", "rank", "word", "count AS n")
        columns.write.mode("overwrite").parquet(f"{output}/{number:05d}")

    lines = spark.readStream.schema("ts timestamp, word string").option("maxFilesPerTrigger", 1).parquet(args["input"])
    window = sql.window("ts", f"{SIZE_S} seconds", f"{EVERY_S} seconds")
    counts = lines.withWatermark("ts", f"{LATENESS_S} seconds").groupBy(window, "word").count()
    writer = counts.writeStream.outputMode("append").foreachBatch(write_top)
    yield common.run_structured(writer, args, warm=warm_up(args["batches"]))
    spark.stop()
    parts = [pl.read_parquet(path) for path in sorted(output.glob("*/*.parquet"))]
    pl.concat(parts).select(COLUMNS).write_parquet(Path(args["work"]) / "windows.parquet")


CONTENDERS: dict[str, common.Contender] = {
    "penstock": penstock,
    "structured_default": structured_default,
    "structured_rocksdb": structured_rocksdb,
}

if __name__ == "__main__":
    common.contender_main(MODULE)
