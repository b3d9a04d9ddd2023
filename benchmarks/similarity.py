"""How the cost of an event follows the size of state: tweet similarity and word counts, after ChronoStream.

**Scale dependent** (its figure 13). Each tweet is compared with the last tweets of the same location, and the tweet
that shares the most words goes out with it. That is a scan of the window, so the time of an event grows in proportion
with the window. With 1, 2, 4 and 8 times the window a straight line must come out (``linear_r2``). The other work of
the engine for each event is the line's offset.

**Scale independent** (its figure 12). Counting words takes the same time for each event however many words there are.
Both contenders get the same number of words a batch, by the same Zipf's law, and so the same number of distinct words a
batch. The larger contender rotates through ten disjoint vocabularies, so that all of its state, ten times as much,
stays in use. ``scale_independent_10x`` is its throughput over that of the smaller: 1.0 says that state costs nothing
but memory. ``top_words_10x`` is the same ratio with a running top 100 after the count.

A seed generates the input, so the benchmark runs anywhere. If the environment variable ``PENSTOCK_DATA`` names a
directory with ``tweets.csv.gz`` (columns location and text), the search also runs over these tweets, and is verified
likewise.
"""

from __future__ import annotations

import csv
import gzip
import os
import re
import shutil
import statistics
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

import penstock as ps
from benchmarks import common
from benchmarks.common import Figures, Row
from penstock.errors import EngineError

SUMMARY = "Cost of an event as state grows: tweet similarity (linear in the window) and word counts (constant)."

MODULE = "benchmarks.similarity"
DATA = "PENSTOCK_DATA"
TWEETS = "tweets.csv.gz"
ROUNDS = 2
LOCATIONS = 32
WORDS_PER_TWEET = 12
TWEET_VOCABULARY = 20_000
WINDOW = 100
"""Tweets of a location in a window, at 1x."""
FACTORS = (1, 2, 4, 8)
SIZES_OF_STATE = ("words_1x", "words_10x", "top_words_1x", "top_words_10x")
SCHEMA = {"location": pl.String(), "i": pl.Int64(), "other": pl.Int64(), "shared": pl.Int64()}


def run(quick: bool, out: Path | None) -> dict[str, Any]:
    """See README.md. Quick: windows half as long, fewer events, no top words, one round."""
    rounds = 1 if quick else ROUNDS
    window, batch, batches = (WINDOW // 2, 2_000, 3) if quick else (WINDOW, 8_000, 6)
    keys, words, count = (30_000, 100_000, 8) if quick else (common.VOCABULARY, 500_000, 20)
    with common.workplace() as place:
        rows = measure_tweets(place / "tweets", window, batch, batches, rounds)
        contenders = [name for name in SIZES_OF_STATE if not (quick and name.startswith("top"))]
        rows += measure_words(place / "words", contenders, keys, words, count, rounds)
        real = os.environ.get(DATA)
        found = real is not None and (Path(real) / TWEETS).exists()
        if found:
            rows += measure_real(place / "real", Path(str(real)) / TWEETS, window)
    notes = [
        "tweets: us_per_event over the batches after windows are full; wall time of two containers together.",
        f"windows of {', '.join(str(window * f) for f in FACTORS)} tweets for each of {LOCATIONS} locations.",
        f"words: {words:,} words a batch, of {keys:,} and {keys * 10:,} words of state.",
        "Every pair of tweets and every final count were compared with a plain Python or polars computation.",
        f"real_tweets: those of {TWEETS}." if found else f"No real tweets: {DATA} names no directory with {TWEETS}.",
    ]

    def draw(path: Path) -> None:
        from penstock.observe.plot import plot_bars

        bars = common.medians([r for r in rows if r["contender"] == "tweets"], "us_per_event", group="factor")
        plot_bars(bars, path, "Tweet similarity: window 1x, 2x, 4x, 8x", "microseconds an event")

    return common.finish("similarity", rows, ratios(rows), notes, out, draw)


def ratios(rows: list[Row]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    by_factor = {f: [r["us_per_event"] for r in rows if r.get("factor") == f] for f in FACTORS}
    points = [(f, statistics.median(values)) for f, values in by_factor.items() if values]
    slope, r2 = common.line([f for f, _ in points], [us for _, us in points])
    found["linear_r2"] = common.rounded(r2)
    found["us_per_event_and_1x"] = common.rounded(slope)
    for f, us in points:
        found[f"us_per_event_{f}x"] = common.rounded(us)
    found["scale_independent_10x"] = common.ratio(rows, "rows_s", "words_10x", "words_1x")
    found["top_words_10x"] = common.ratio(rows, "rows_s", "top_words_10x", "top_words_1x")
    return found


# --- tweets: scale dependent --------------------------------------------------------------------------------------


def measure_tweets(place: Path, window: int, batch: int, batches: int, rounds: int) -> list[Row]:
    """In each round run the four windows in turn. The first batches fill the windows and are not measured."""
    rows: list[Row] = []
    work = place / "work"
    for number in range(1, rounds + 1):
        for factor in FACTORS:
            fill = -(-LOCATIONS * window * factor // batch)
            folder = place / f"in-{factor}"
            if not folder.exists():
                write_tweets(folder, fill + batches, batch)
            args = {"input": str(folder), "window": window * factor, "batch_words": batch, "work": str(work)}
            args |= {"batches": fill + batches, "warm": fill}
            figures = tweets_run(args, work, "tweets")
            rows.append({"contender": "tweets", "factor": factor, "round": number, **figures})
            common.note(f"round {number} of {rounds}, window {window * factor}: {figures['us_per_event']} us an event")
    return rows


def measure_real(place: Path, tweets: Path, window: int) -> list[Row]:
    """Run once over the tweets of a file. This is no claim about speed: the locations are as skewed as the world's."""
    frame = read_tweets(tweets)
    (place / "in").mkdir(parents=True)
    batch = -(-frame.height // 4)
    for number, first in enumerate(range(0, frame.height, batch)):
        common.write_batch(frame.slice(first, batch), place / "in", number)
    args = {"input": str(place / "in"), "window": window, "batch_words": batch, "batches": 4, "warm": 1}
    figures = tweets_run({**args, "work": str(place / "work")}, place / "work", "real_tweets")
    common.note(f"{frame.height:,} real tweets: {figures['us_per_event']} us an event")
    return [{"contender": "real_tweets", "round": 1, **figures}]


def tweets_run(args: dict[str, Any], work: Path, contender: str) -> Figures:
    figures = common.run_contender(MODULE, "tweets", args, work)
    check_pairs(pl.read_parquet(work / "pairs.parquet"), true_pairs(Path(args["input"]), args["window"]), contender)
    shutil.rmtree(work, ignore_errors=True)
    return {"window": args["window"], **figures, "us_per_event": common.rounded(1e6 / figures["rows_s"])}


def write_tweets(folder: Path, files: int, rows_each: int, *, seed: int = 4) -> None:
    """Write Parquet files of (i, location, words). Locations take turns in a random order, so all windows fill
    together.
    """
    folder.mkdir(parents=True)
    common.note(f"writing {files} files of {rows_each:,} tweets")
    weights = np.arange(1, TWEET_VOCABULARY + 1, dtype=np.float64) ** -1.0
    cumulative = np.cumsum(weights / weights.sum())
    names = np.array([f"place-{n:02d}" for n in range(LOCATIONS)])
    for number in range(files):
        rng = np.random.default_rng([seed, number])
        turns = -(-rows_each // LOCATIONS)
        where = np.concatenate([rng.permutation(LOCATIONS) for _ in range(turns)])[:rows_each]
        ranks = np.searchsorted(cumulative, rng.random((rows_each, WORDS_PER_TWEET)), side="right")
        texts = [" ".join(f"w{rank}" for rank in row) for row in ranks.tolist()]
        first = number * rows_each
        frame = pl.DataFrame({"i": np.arange(first, first + rows_each), "location": names[where], "text": texts})
        common.write_batch(frame, folder, number)


def read_tweets(path: Path) -> pl.DataFrame:
    """The tweets of a file that name their location: i, location, text."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as lines:
        found = [(row["location"].strip().lower(), row["text"]) for row in csv.DictReader(lines)]
    kept = [(i, location, text) for i, (location, text) in enumerate(p for p in found if p[0])]
    return pl.DataFrame(kept, {"i": pl.Int64(), "location": pl.String(), "text": pl.String()}, orient="row")


def words_of(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


def most_similar(words: set[str], window: Any) -> tuple[int, int]:
    """The tweet of a window that shares the most words, and how many. Of several such tweets it is the latest."""
    best, shared = -1, -1
    for other, theirs in window:
        common_words = len(words & theirs)
        if common_words >= shared:
            best, shared = other, common_words
    return best, shared


class Similar(ps.Operator):
    """Compares each tweet with the last ones of its location, then remembers it."""

    def __init__(self, window: int) -> None:
        self.window = window

    def on_event(self, key: str, event: Any, recent: ps.List[tuple[int, set[str]]], emit: Any) -> None:
        words = words_of(event.text)
        if recent:
            other, shared = most_similar(words, recent)
            emit(location=key, i=event.i, other=other, shared=shared)
        if len(recent) == self.window:
            del recent[0]
        recent.append((event.i, words))


def tweets(args: dict[str, Any]) -> Iterator[Figures]:
    work = Path(args["work"])
    flow = ps.Flow("similarity")
    source = flow.source("tweets", ps.files(f"{args['input']}/*.parquet"))
    pairs = source.key_by("location").process("similar", Similar(args["window"]), schema=SCHEMA)
    pairs.sink("out", ps.parquet(str(work / "out")))
    yield common.run_penstock(flow, args, warm=args["warm"])
    ps.read_output(str(work / "out")).select(*SCHEMA).write_parquet(work / "pairs.parquet")


def true_pairs(folder: Path, window: int) -> pl.DataFrame:
    """The same search without an engine."""
    recent: dict[str, deque[tuple[int, set[str]]]] = {}
    found: list[tuple[Any, ...]] = []
    for path in sorted(folder.glob("*.parquet")):
        for i, location, text in pl.read_parquet(path).select("i", "location", "text").iter_rows():
            words = words_of(text)
            tweets = recent.setdefault(location, deque(maxlen=window))
            if tweets:
                found.append((location, i, *most_similar(words, tweets)))
            tweets.append((i, words))
    return pl.DataFrame(found, SCHEMA, orient="row").sort("i")


def check_pairs(found: pl.DataFrame, truth: pl.DataFrame, contender: str) -> None:
    have = found.sort("i")
    if have.equals(truth):
        return
    wrong = truth.join(have, on="i", how="full", suffix="_found", coalesce=True).filter(
        pl.col("other").ne_missing(pl.col("other_found")) | pl.col("shared").ne_missing(pl.col("shared_found"))
    )
    raise EngineError(
        f"contender '{contender}' found wrong pairs: {have.height:,} where {truth.height:,} are right; "
        f"{wrong.height:,} differ, such as {wrong.sort('i').head(1).to_dicts()}.",
        remedy="Its figures were thrown away. Please report this.",
        contender=contender,
    )


# --- words: scale independent -------------------------------------------------------------------------------------


def measure_words(
    place: Path, contenders: list[str], keys: int, batch_words: int, batches: int, rounds: int
) -> list[Row]:
    """Run counts and running top 100, with ``keys`` and ten times as many words of state."""
    truths = {}
    loads = {}
    for factor in (1, 10):
        loads[factor], truths[factor] = write_rotating(place / f"in-{factor}", keys, factor, batch_words, batches)
    work = place / "work"

    def one(contender: str, number: int) -> Figures:
        name, factor = contender.rsplit("_", 1)
        times = int(factor[:-1])
        args = {"input": str(place / f"in-{times}"), "batch_words": batch_words, "work": str(work)}
        args |= {"batches": loads[times] + batches, "warm": loads[times] + common.warm_up(batches)}
        figures = common.run_contender(MODULE, name, args, work)
        common.check_counts(pl.read_parquet(work / "counts.parquet"), truths[times], contender)
        shutil.rmtree(work, ignore_errors=True)
        return figures

    return common.in_turn(contenders, rounds, one)


def write_rotating(
    folder: Path, keys: int, factor: int, batch_words: int, batches: int, *, seed: int = 5
) -> tuple[int, pl.DataFrame]:
    """Write every word once, in batches, then words by Zipf's law over ``keys`` ranks, in one vocabulary after another.

    Give the number of batches of the first part, and the true counts.
    """
    folder.mkdir(parents=True)
    load = -(-keys * factor // batch_words)
    common.note(f"writing {load} files with {keys * factor:,} words once, and {batches} files of {batch_words:,} words")
    cumulative = np.cumsum(np.arange(1, keys + 1, dtype=np.float64) ** -common.ZIPF)
    cumulative /= cumulative[-1]
    counts = np.zeros(keys * factor, dtype=np.int64)
    for number in range(load + batches):
        rng = np.random.default_rng([seed, number])
        if number < load:
            numbers = np.arange(number * batch_words, (number + 1) * batch_words) % (keys * factor)
        else:
            ranks = np.searchsorted(cumulative, rng.random(batch_words), side="right").clip(max=keys - 1)
            numbers = ranks * factor + number % factor
        counts += np.bincount(numbers, minlength=keys * factor)
        common.write_batch(pl.DataFrame({"word": word_names(numbers)}), folder, number)
    truth = pl.DataFrame({"word": word_names(np.arange(keys * factor)), "n": counts})
    return load, truth.sort("word")


def word_names(numbers: np.ndarray) -> pl.Series:
    return pl.Series("word", numbers.astype(np.int64)).cast(pl.String).str.zfill(10)


def _counts(args: dict[str, Any], k: int | None) -> Iterator[Figures]:
    work = Path(args["work"])
    flow = ps.Flow("counts")
    source = flow.source("words", ps.files(f"{args['input']}/*.parquet"))
    counts = source.key_by("word").aggregate("counts", n=ps.count())
    (counts if k is None else counts.top_k("top", k, by="n")).sink("out", ps.discard())
    yield common.run_penstock(flow, args, warm=args["warm"])
    state = common.checkpoint_state(work / "checkpoint", "counts", ["word"])
    (value,) = set(state.columns) - {"word"}
    state.select("word", n=pl.col(value)).write_parquet(work / "counts.parquet")


def words(args: dict[str, Any]) -> Iterator[Figures]:
    return _counts(args, None)


def top_words(args: dict[str, Any]) -> Iterator[Figures]:
    return _counts(args, 100)


CONTENDERS: dict[str, common.Contender] = {"tweets": tweets, "words": words, "top_words": top_words}

if __name__ == "__main__":
    common.contender_main(MODULE)
