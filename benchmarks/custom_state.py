"""A user's own state in Python, for each word: how often, when last, and the moving average of the gaps between.

All contenders run the same few lines over the same Parquet files of (ts, word), one file a batch of the same size. They
keep a state of three fields for every word, and write to Parquet, exactly once, with two cores and the same memory:

* ``penstock``: ``ps.Operator``, called for each event, with ``ps.Value[Gaps]``;
* ``penstock_batch``: ``ps.BatchOperator``, called with many events, vectorised;
* ``transform_with_state``, ``transform_with_state_pandas``, ``apply_in_pandas``: Spark's three ways, with RocksDB and
  changelog checkpoints. Spark calls them for each word of a batch with all rows of the word. They must sort the rows
  by time themselves, because Spark promises no order. Penstock's operators see a key's events in source order.

**All contenders emit the same rows.** Spark calls a function once for a word and batch, and Penstock for each event. A
row for every call would give each contender a different output. So a row goes out when a word comes for the 10th, 20th,
30th ... time, which depends on the input alone. All of these rows, and the final state of every word in the contender's
own checkpoint, must be those of a plain Python loop over the whole input, to the last bit.

**Batches.** Throughput depends on the size of a batch, for Spark and for Penstock, so ratios are between equal sizes.
The slow contenders get fewer batches, because they would run for an hour otherwise. Ratios compare with Spark's fastest
way.
"""

from __future__ import annotations

import os
import shutil
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl

import penstock as ps
from benchmarks import common
from benchmarks.common import Figures, Row
from penstock.errors import EngineError

SUMMARY = "State of a user's own in Python: events a second, per event and vectorised, against Spark's three ways."

MODULE = "benchmarks.custom_state"
SPARK = ("transform_with_state", "transform_with_state_pandas", "apply_in_pandas")
OURS = {"per_event": "penstock", "batch": "penstock_batch"}
BATCH_WORDS = 100_000
EMIT_EVERY = 10
KEEP, TAKE = 0.9, 0.1
"""Of the moving average: the share of the old average that is kept, and the share of a new gap that is taken."""
RATE_S = 50_000
"""Events in a second of event time."""
OPERATOR = "gaps"
SCHEMA = {"word": pl.String(), "n": pl.Int64(), "last": pl.Float64(), "ema": pl.Float64()}
STATE_SQL = "n long, last double, ema double"
OUTPUT_SQL = f"word string, {STATE_SQL}"

Sizes = dict[int, dict[str, int]]
"""Words a batch -> contender -> number of batches."""
QUICK: Sizes = {
    10_000: {"penstock": 12, "penstock_batch": 12, **dict(zip(SPARK, (4, 2, 2), strict=True))},
}
FULL: Sizes = {
    BATCH_WORDS: {"penstock": 40, "penstock_batch": 40, **dict(zip(SPARK, (4, 2, 2), strict=True))},
    500_000: {"penstock": 24, "penstock_batch": 24, "transform_with_state": 3},
}
ROUNDS = {BATCH_WORDS: 1, 500_000: 2}
"""Spark takes minutes for each batch. The size at which the ratios are taken gets more batches."""


def run(quick: bool, out: Path | None) -> dict[str, Any]:
    """See README.md. Quick: batches of 10,000 words, a few each, one round."""
    sizes = QUICK if quick else FULL
    rows: list[Row] = []
    with common.workplace() as place:
        for batch_words, batches in sizes.items():
            rows += measure(place / str(batch_words), batch_words, batches, rounds=1 if quick else ROUNDS[batch_words])
    notes = [
        "rows_s: words of the batches after the first quarter, by their wall time. Ratios are between equal batches.",
        "vs_spark: against the fastest of transformWithState, transformWithStateInPandas and applyInPandasWithState.",
        f"Each contender gives a row for every {EMIT_EVERY}th event of a word, to Parquet, exactly once.",
        "State is durable after every batch in Structured Streaming, every 2 s in Penstock.",
        "All rows and the final state of every word were compared with a plain Python loop, for each run.",
    ]

    def draw(path: Path) -> None:
        from penstock.observe.plot import plot_bars

        bars = common.medians(rows, "rows_s", group="batch_words")
        plot_bars(bars, path, "A user's own state for each word, local[2]", "events a second")

    return common.finish("custom-state", rows, ratios(rows), notes, out, draw)


def measure(place: Path, batch_words: int, batches: dict[str, int], rounds: int) -> list[Row]:
    """Run all rounds for one batch size."""
    write_events(place / "in", max(batches.values()), batch_words)
    truths = true_gaps(place / "in", sorted(set(batches.values())))
    work = place / "work"

    def one(contender: str, number: int) -> Figures:
        count = batches[contender]
        args = {"batch_words": batch_words, "batches": count, "work": str(work)}
        args["input"] = str(first_files(place / "in", count))
        figures = common.run_contender(MODULE, contender, args, work)
        check_gaps(work, truths[count], contender)
        shutil.rmtree(work, ignore_errors=True)
        return {"batches": count, **figures}

    return common.in_turn([name for name in CONTENDERS if name in batches], rounds, one, batch_words=batch_words)


def ratios(rows: list[Row]) -> dict[str, float | None]:
    """Penstock / the fastest of Spark's ways. For throughput more is better, for memory less."""
    found: dict[str, float | None] = {}
    largest = max((row["batch_words"] for row in rows), default=0)  # all contenders do best at the largest size
    for size in sorted({row["batch_words"] for row in rows}):
        peer = fastest([row for row in rows if row["batch_words"] == size])
        if peer is None:
            continue
        suffix = "" if size == largest else f"_{size // 1000}k"
        for name, ours in OURS.items():
            found[f"{name}_vs_spark{suffix}"] = common.ratio(rows, "rows_s", ours, peer, batch_words=size)
            found[f"{name}_memory_vs_spark{suffix}"] = common.ratio(rows, "memory_mb", ours, peer, batch_words=size)
    return found


def fastest(rows: Sequence[Row]) -> str | None:
    """The one of Spark's three ways that has the highest median throughput."""
    rates = {name: [row["rows_s"] for row in rows if row["contender"] == name] for name in SPARK}
    return max((name for name in SPARK if rates[name]), key=lambda name: statistics.median(rates[name]), default=None)


# --- input and truth ----------------------------------------------------------------------------------------------


def write_events(folder: Path, files: int, rows_each: int, *, seed: int = 3) -> None:
    """Write Parquet files of (ts, word). Times, in seconds, rise strictly: sorted rows are in source order."""
    folder.mkdir(parents=True)
    common.note(f"writing {files} files of {rows_each:,} words with their times")
    for number in range(files):
        rng = np.random.default_rng([seed, number])
        first = number * rows_each
        ts = (np.arange(first, first + rows_each) + 0.9 * rng.random(rows_each)) / RATE_S
        common.write_batch(pl.DataFrame([pl.Series("ts", ts), common.zipf_words(rows_each, rng)]), folder, number)


def first_files(folder: Path, count: int) -> Path:
    """A directory with the first ``count`` files of another, as links."""
    part = folder.with_name(f"{folder.name}-{count}")
    if not part.exists():
        part.mkdir()
        for path in sorted(folder.glob("*.parquet"))[:count]:
            os.link(path, part / path.name)
    return part


@dataclass(frozen=True)
class Truth:
    """Both sorted: the emitted rows by word and n, the states by word."""

    emitted: pl.DataFrame
    states: pl.DataFrame


def true_gaps(folder: Path, counts: Sequence[int]) -> dict[int, Truth]:
    """The true rows and states after each of ``counts`` files, by a plain loop."""
    states: dict[str, tuple[int, float, float]] = {}
    emitted: list[tuple[Any, ...]] = []
    found: dict[int, Truth] = {}
    for number, path in enumerate(sorted(folder.glob("*.parquet")), 1):
        for ts, word in pl.read_parquet(path).select("ts", "word").iter_rows():
            states[word], emits = advance(states.get(word), [ts])
            emitted += [(word, *row) for row in emits]
        if number in counts:
            final = [(word, *state) for word, state in states.items()]
            found[number] = Truth(*(pl.DataFrame(r, SCHEMA, orient="row").sort("word", "n") for r in (emitted, final)))
    return found


State = tuple[int, float, float]


def advance(state: State | None, times: Iterable[float]) -> tuple[State, list[State]]:
    """What a user of Spark writes: the state after more events of a word, in order, and the rows to emit.

    ``state`` is (count, last seen, moving average of gaps). The average is 0 until there is a gap.
    """
    n, last, ema = state if state is not None else (0, 0.0, 0.0)
    emits: list[State] = []
    for ts in times:
        if n == 1:
            ema = ts - last
        elif n > 1:
            ema = KEEP * ema + TAKE * (ts - last)
        n += 1
        last = ts
        if n % EMIT_EVERY == 0:
            emits.append((n, last, ema))
    return (n, last, ema), emits


def check_gaps(work: Path, truth: Truth, contender: str) -> None:
    """Check the rows that a contender emitted and the states it ended with, to the last bit."""
    for what, right in (("emitted", truth.emitted), ("states", truth.states)):
        have = pl.read_parquet(work / f"{what}.parquet").select(*SCHEMA).sort("word", "n")
        if have.equals(right):
            continue
        wrong = right.join(have, on=["word", "n"], how="full", suffix="_found", coalesce=True).filter(
            pl.col("last").ne_missing(pl.col("last_found")) | pl.col("ema").ne_missing(pl.col("ema_found"))
        )
        raise EngineError(
            f"contender '{contender}' has wrong {what}: {have.height:,} rows, where {right.height:,} are right; "
            f"{wrong.height:,} differ, such as {wrong.sort('word', 'n').head(1).to_dicts()}.",
            remedy="Its figures were thrown away. Please report this.",
            contender=contender,
        )


# --- ours ---------------------------------------------------------------------------------------------------------


class Gaps(msgspec.Struct):
    n: int
    last: float
    ema: float


class PerEvent(ps.Operator):
    """Three fields of state, changed with every event."""

    def on_event(self, key: str, event: Any, state: ps.Value[Gaps], emit: Any) -> None:
        gaps = state.get()
        ts = event.ts
        if gaps is None:
            state.set(Gaps(1, ts, 0.0))
            return
        gap = ts - gaps.last
        gaps.ema = gap if gaps.n == 1 else KEEP * gaps.ema + TAKE * gap
        gaps.last = ts
        gaps.n += 1
        state.set(gaps)
        if gaps.n % EMIT_EVERY == 0:
            emit(word=key, n=gaps.n, last=ts, ema=gaps.ema)


class Vectorised(ps.BatchOperator):
    """The same state on arrays. What a row adds is computed first; only the recursion goes row by row."""

    n = ps.column(int)
    last = ps.column(float)
    ema = ps.column(float)

    def on_batch(self, batch: ps.Batch, state: ps.State) -> pl.DataFrame:
        ts = batch["ts"]
        before = batch.per_row(state.n) + batch.ordinal
        gap = ts - batch.previous(ts, state.last)
        keep = np.where(before > 1, KEEP, 0.0)
        take = np.where(before > 1, TAKE * gap, np.where(before == 1, gap, 0.0))
        (ema,), (state.ema,) = batch.scan(_step, [state.ema], keep, take)
        state.n = state.n + batch.counts
        state.last = batch.last(ts)
        due = np.flatnonzero((before + 1) % EMIT_EVERY == 0)
        words = batch.frame["word"].gather(due)
        return pl.DataFrame({"word": words, "n": before[due] + 1, "last": ts[due], "ema": ema[due]})


def _step(ema: Any, keep: Any, take: Any) -> tuple[Any]:
    return (keep * ema + take,)


def penstock(args: dict[str, Any]) -> Iterator[Figures]:
    return _penstock(args, PerEvent())


def penstock_batch(args: dict[str, Any]) -> Iterator[Figures]:
    return _penstock(args, Vectorised())


def _penstock(args: dict[str, Any], operator: Any) -> Iterator[Figures]:
    work = Path(args["work"])
    flow = ps.Flow("custom-state")
    source = flow.source("words", ps.files(f"{args['input']}/*.parquet"))
    source.key_by("word").process(OPERATOR, operator, schema=SCHEMA).sink("out", ps.parquet(str(work / "out")))
    yield common.run_penstock(flow, args)
    ps.read_output(str(work / "out")).write_parquet(work / "emitted.parquet")
    plain_states(common.checkpoint_state(work / "checkpoint", OPERATOR, ["word"])).write_parquet(
        work / "states.parquet"
    )


def plain_states(state: pl.DataFrame) -> pl.DataFrame:
    """Word and the three fields. Numbers are kept in columns whose names end in the names of the fields."""
    fields = {field: next(c for c in state.columns if c.endswith(f".{field}")) for field in ("n", "last", "ema")}
    return state.select("word", **{field: pl.col(column) for field, column in fields.items()})


# --- Spark's ------------------------------------------------------------------------------------------------------


def transform_with_state(args: dict[str, Any]) -> Iterator[Figures]:
    def build(lines: Any) -> Any:
        from pyspark.sql import Row as SparkRow
        from pyspark.sql.streaming import StatefulProcessor

        class Processor(StatefulProcessor):
            def init(self, handle: Any) -> None:
                self.state = handle.getValueState(OPERATOR, STATE_SQL)

            def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
                state, emits = advance(self.state.get(), sorted(row.ts for row in rows))
                self.state.update(state)
                for n, last, ema in emits:
                    yield SparkRow(word=key[0], n=n, last=last, ema=ema)

            def close(self) -> None:
                pass

        return lines.groupBy("word").transformWithState(Processor(), OUTPUT_SQL, "Append", "None")

    return _structured(args, build, "value.*", stateVarName=OPERATOR)


def transform_with_state_pandas(args: dict[str, Any]) -> Iterator[Figures]:
    def build(lines: Any) -> Any:
        import pandas as pd  # type: ignore[import-untyped]
        from pyspark.sql.streaming import StatefulProcessor

        class Processor(StatefulProcessor):
            def init(self, handle: Any) -> None:
                self.state = handle.getValueState(OPERATOR, STATE_SQL)

            def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
                times = sorted(ts for frame in rows for ts in frame["ts"].tolist())
                state, emits = advance(self.state.get(), times)
                self.state.update(state)
                if emits:
                    yield pd.DataFrame([(key[0], *row) for row in emits], columns=list(SCHEMA))

            def close(self) -> None:
                pass

        return lines.groupBy("word").transformWithStateInPandas(Processor(), OUTPUT_SQL, "Append", "None")

    return _structured(args, build, "value.*", stateVarName=OPERATOR)


def apply_in_pandas(args: dict[str, Any]) -> Iterator[Figures]:
    def build(lines: Any) -> Any:
        import pandas as pd

        def gaps(key: Any, frames: Any, state: Any) -> Iterator[Any]:
            times = sorted(ts for frame in frames for ts in frame["ts"].tolist())
            new, emits = advance(state.get if state.exists else None, times)
            state.update(new)
            if emits:
                yield pd.DataFrame([(key[0], *row) for row in emits], columns=list(SCHEMA))

        return lines.groupBy("word").applyInPandasWithState(gaps, OUTPUT_SQL, STATE_SQL, "append", "NoTimeout")

    return _structured(args, build, "value.groupState.*")


def _structured(args: dict[str, Any], build: Any, state: str, **reader: str) -> Iterator[Figures]:
    """``state`` says where Spark's reader of states, called with the options ``reader``, has the three fields."""
    work = Path(args["work"])
    spark = common.structured_session("custom-state", args, common.ROCKSDB)
    lines = spark.readStream.schema("ts double, word string").option("maxFilesPerTrigger", 1).parquet(args["input"])
    writer = build(lines).writeStream.format("parquet").outputMode("append").option("path", str(work / "out"))
    yield common.run_structured(writer, args)
    states = spark.read.format("statestore").options(**reader).load(str(work / "checkpoint"))
    states.selectExpr("key.word", state).write.parquet(str(work / "states"))
    spark.stop()
    for what, folder in (("emitted", work / "out"), ("states", work / "states")):
        pl.concat([pl.read_parquet(path) for path in folder.glob("*.parquet")]).write_parquet(work / f"{what}.parquet")


CONTENDERS: dict[str, common.Contender] = {
    "penstock": penstock,
    "penstock_batch": penstock_batch,
    "transform_with_state": transform_with_state,
    "transform_with_state_pandas": transform_with_state_pandas,
    "apply_in_pandas": apply_in_pandas,
}

if __name__ == "__main__":
    common.contender_main(MODULE)
