"""What backups on peers cost: throughput for each copy, and bytes of a checkpoint by the size of the state.

The two questions follow the evaluation of streaming MapReduce on Floe. How much throughput does each further copy of
the state take? There it was 15 %. How many bytes go to the peers at a checkpoint? There it was 7 % of the state at an
interval of 2 s.

For the first question, a running count of words goes as fast as it can on three executors, with no, one and two
backups. For the second, all words of the vocabulary are loaded and then come at the fixed rate of the paper. The size
of a checkpoint depends on how many different words have come since the last one, so a figure means nothing without its
rate.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from benchmarks import checkpoint, common, words
from benchmarks.common import Figures, Row
from penstock.connectors.generator import make_vocabulary
from penstock.state.slicemap import SliceMap

SUMMARY = "What backups on peers cost: throughput for each copy, and bytes of a checkpoint by size of state."

MODULE = "benchmarks.replication"
EXECUTORS = 3
EXECUTOR_MB = 1024
BATCH_WORDS = 500_000
COPIES = (0, 1, 2)
INTERVALS_S = (1.0, 2.0, 5.0, 10.0)
WORDS_S = 15_000
"""The rate in the paper's measurement of recovery."""
SEED = 11
WARM_UP_S = 15.0
"""Seconds that are not measured: words that were due while the job was starting come first."""


def run(quick: bool, out: Path | None) -> dict[str, Any]:
    """See README.md. Quick: 12 batches and one round for the throughput, intervals of 1 and 2 s."""
    batches, rounds = (12, 1) if quick else (30, 2)
    with common.workplace() as place:
        rows = throughput(place / "throughput", batches, rounds)
        sizes: list[Row] = []
        for interval in INTERVALS_S[:2] if quick else INTERVALS_S:
            sizes += delta_sizes(place / "sizes", interval, 6)
    notes = [
        "rows_s: words of the batches after the first quarter, by their wall time; checkpoints every 2 s.",
        "lost_per_replica: share of the throughput without backups, median over the rounds; the larger of what one "
        "copy takes and half of what two take.",
        "delta_share: bytes of a checkpoint by those of the whole state in the same form, median of a run's "
        f"checkpoints, at {WORDS_S:,} words a second of a vocabulary of {common.VOCABULARY:,}.",
        "Every final count of every word was compared with the truth, for each run.",
    ]

    def draw(path: Path) -> None:
        from penstock.observe.plot import plot_bars

        bars = common.medians(rows, "rows_s")
        plot_bars(bars, path, f"Running word count on {EXECUTORS} executors, by copies of the state", "words a second")

    return common.finish("replication", [*rows, *sizes], ratios(rows, sizes), notes, out, draw)


def ratios(rows: Sequence[Row], sizes: Sequence[Row]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    lost = []
    for copies in COPIES[1:]:
        kept = common.ratio(rows, "rows_s", contender_of(copies), contender_of(0))
        found[f"throughput_r{copies}_vs_r0"] = kept
        if kept is not None:
            lost.append((1 - kept) / copies)
    # A loss within the noise counts as none: a negative share would read like a gain.
    found["lost_per_replica"] = common.rounded(max(0.0, *lost)) if lost else None
    for interval in INTERVALS_S:
        shares = [row["delta_share"] for row in sizes if row["interval_s"] == interval]
        found[f"delta_share_{interval:g}s"] = common.rounded(statistics.median(shares)) if shares else None
    return found


def contender_of(copies: int) -> str:
    return f"penstock_r{copies}"


# --- throughput ---------------------------------------------------------------------------------------------------


def throughput(place: Path, batches: int, rounds: int) -> list[Row]:
    truth = common.write_words(place / "in", batches, BATCH_WORDS)

    def one(contender: str, number: int) -> Figures:
        return words.checked_run(MODULE, contender, place, BATCH_WORDS, batches, truth)

    return common.in_turn([contender_of(copies) for copies in COPIES], rounds, one)


def _counting(args: dict[str, Any], copies: int) -> Iterator[Figures]:
    import penstock as ps

    work = Path(args["work"])
    flow = ps.Flow("words")
    source = flow.source("lines", ps.files(f"{args['input']}/*.parquet"))
    source.key_by("word").aggregate(words.OPERATOR, n=ps.count()).sink("out", ps.discard())
    job = ps.run(
        flow,
        master=f"local-cluster[{EXECUTORS},1,{EXECUTOR_MB}]",
        backups=copies,
        epoch_rows=args["batch_words"],
        checkpoint=str(work / "checkpoint"),
        checkpoint_interval_s=2.0,
        spark={
            "spark.driver.memory": common.DRIVER_MEMORY,
            "spark.executor.memory": f"{EXECUTOR_MB}m",
            "spark.local.dir": str(work / "spark"),
        },
    )
    job.wait()
    status = job.status()
    history = [entry for entry in status.history if entry.rows]
    assert len(history) == args["batches"], f"{len(history)} epochs of {args['batches']}"
    figures = common.batch_figures(
        [entry.at_s for entry in history],
        [entry.ms for entry in history],
        [entry.rows for entry in history],
        common.warm_up(len(history)),
    )
    yield {
        **figures,
        "state_rows": status.state_rows,
        "state_bytes": status.state_bytes,
        "checkpoints": status.checkpoints,
        "recoveries": status.recoveries,
    }
    _save_counts(work)


def penstock_r0(args: dict[str, Any]) -> Iterator[Figures]:
    return _counting(args, 0)


def penstock_r1(args: dict[str, Any]) -> Iterator[Figures]:
    return _counting(args, 1)


def penstock_r2(args: dict[str, Any]) -> Iterator[Figures]:
    return _counting(args, 2)


# --- bytes of a checkpoint ----------------------------------------------------------------------------------------


def delta_sizes(place: Path, interval: float, checkpoints: int) -> list[Row]:
    """A row for each checkpoint after the one that has the whole vocabulary."""
    work, vocabulary = place / "work", place / "vocabulary"
    if not vocabulary.exists():
        vocabulary.mkdir(parents=True)
        common.write_batch(vocabulary_frame(), vocabulary, 0)
    args = {"vocabulary": str(vocabulary), "work": str(work), "checkpoints": checkpoints, "interval_s": interval}
    figures = common.run_contender(MODULE, "penstock_paced", args, work)
    truth = true_counts(figures["rows"])
    common.check_counts(pl.read_parquet(work / "counts" / "*.parquet"), truth, "penstock_paced")
    shutil.rmtree(work, ignore_errors=True)
    found = rows_of_sizes(figures["files"], figures["whole_bytes"], interval, checkpoints)
    for row in found:
        common.note(f"checkpoint: {row}")
    return found


def rows_of_sizes(files: Sequence[Mapping[str, Any]], whole_bytes: int, interval: float, count: int) -> list[Row]:
    """The ``files`` (epoch_to and bytes of each delta) of the last ``count`` checkpoints before the very last one.

    The first checkpoints have the vocabulary, and the words that were due while the job was starting. The last one is
    taken when the job ends, and not after a whole interval.
    """
    by_checkpoint: dict[int, int] = {}
    for file in files:
        by_checkpoint[file["epoch_to"]] = by_checkpoint.get(file["epoch_to"], 0) + file["bytes"]
    measured = sorted(by_checkpoint)[-count - 1 : -1]
    return [
        {
            "contender": "penstock_paced",
            "round": number,
            "interval_s": interval,
            "delta_bytes": by_checkpoint[epoch],
            "whole_bytes": whole_bytes,
            "delta_share": common.rounded(by_checkpoint[epoch] / whole_bytes),
        }
        for number, epoch in enumerate(measured, 1)
    ]


def true_counts(rows: int) -> pl.DataFrame:
    """The true counts of the vocabulary once, and of the words that the generator gives. The source makes the words,
    and no engine counts them.
    """
    made = paced_words(rows, None).read("words", {"first": 0, "last": rows}).frame.select("word")
    whole = pl.concat([vocabulary_frame(), made])
    return whole.group_by("word").agg(n=pl.len().cast(pl.Int64)).sort("word")


def vocabulary_frame() -> pl.DataFrame:
    return pl.DataFrame({"word": make_vocabulary(common.VOCABULARY)}, schema={"word": pl.String})


def paced_words(rows: int | None, rows_s: float | None) -> Any:
    import penstock as ps

    return ps.generator(common.numbered_words, rows=rows, rows_per_s=rows_s, seed=SEED)


def penstock_paced(args: dict[str, Any]) -> Iterator[Figures]:
    """Run the job without merging or deleting files, so that the files of each checkpoint can be looked at."""
    import penstock as ps

    work = Path(args["work"])
    flow = ps.Flow("paced")
    all_words = flow.source("vocabulary", ps.files(f"{args['vocabulary']}/*.parquet"))
    coming = flow.source("words", paced_words(None, WORDS_S)).select("plain", "word")
    both = all_words.union("both", coming)
    both.key_by("word").aggregate(words.OPERATOR, n=ps.count()).sink("out", ps.discard())
    job = ps.run(
        flow,
        master=common.MASTER,
        epoch_rows_max=common.VOCABULARY,
        checkpoint=str(work / "checkpoint"),
        checkpoint_interval_s=args["interval_s"],
        manifests_kept=1_000,
        deltas_max=1_000,
        spark={"spark.driver.memory": common.DRIVER_MEMORY, "spark.local.dir": str(work / "spark")},
    )
    wanted = args["checkpoints"] + 2 + round(WARM_UP_S / args["interval_s"])
    while job.status().checkpoints < wanted and not job.wait(0.1):
        pass
    job.stop()
    yield {
        "rows": job.status().rows - common.VOCABULARY,
        "files": checkpoint.deltas_on_disk(work / "checkpoint"),
        "whole_bytes": whole_bytes(work / "checkpoint"),
        "state_bytes": job.status().state_bytes,
    }
    _save_counts(work)


def whole_bytes(folder: Path) -> int:
    """The bytes that a checkpoint of the whole state would take, in the form of a delta."""
    from penstock.state.checkpoint import Manifest, merge_frames
    from penstock.state.codec import encode, read_slices

    newest = max((folder / "manifests").iterdir())
    frames = []
    for file in Manifest.from_bytes(newest.read_bytes(), str(newest)).files[words.OPERATOR]:
        frames.append(read_slices((folder / file.name).read_bytes(), file.name, file.slices))
    whole = merge_frames(frames, ["word"], drop_deleted=True)
    return len(encode({}, whole, slicemap=SliceMap(64)))


def _save_counts(work: Path) -> None:
    (work / "counts").mkdir()
    words.final_counts(work / "checkpoint").write_parquet(work / "counts" / "part.parquet")


CONTENDERS: dict[str, common.Contender] = {
    "penstock_r0": penstock_r0,
    "penstock_r1": penstock_r1,
    "penstock_r2": penstock_r2,
    "penstock_paced": penstock_paced,
}

if __name__ == "__main__":
    common.contender_main(MODULE)
