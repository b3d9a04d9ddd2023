"""What the benchmarks share: contenders in processes of their own, their memory, the arithmetic, the input.

**Why a process for each contender.** A Python process can hold one Spark context only. A JVM that one contender has
warmed up would favour the next. And memory can be told apart only by process. So a benchmark starts ``python -m
benchmarks.<name> --contender NAME --args JSON``, and the child prints exactly one line of JSON when it has measured.
The parent watches the child's memory until that line comes. What the child does after it is not counted: it writes down
its final state, so that the parent can verify it.

**Why ratios of each round.** Shared machines have slow minutes. Contenders run in turn (A B C A B C), a ratio compares
neighbours in time, and the benchmark reports the median over the rounds. All rounds are in the result.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import importlib
import json
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import psutil

from penstock.connectors.generator import make_vocabulary
from penstock.errors import EngineError

Figures = dict[str, Any]
Row = dict[str, Any]
Contender = Callable[[dict[str, Any]], Iterator[Figures]]
"""A contender yields its figures once. What it does when it is resumed is not measured."""

ROOT = Path(__file__).resolve().parent.parent
MASTER = "local[2]"
DRIVER_MEMORY = "2g"
"""The same for every contender: a JVM takes more memory when it may."""
VOCABULARY = 300_000
ZIPF = 1.0
ROW_GROUPS = 4
"""Row groups of an input file, so that both engines can cut the file in two."""
CONTENDER_S_MAX = 900.0
STATE_STORE = "spark.sql.streaming.stateStore"
ROCKSDB = {
    f"{STATE_STORE}.providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    f"{STATE_STORE}.rocksdb.changelogCheckpointing.enabled": "true",
}
"""The settings of Structured Streaming's other state store, with the checkpoints that cost it least."""

_SAMPLE_S = 0.2
_PSS_EVERY_S = 1.0
_PSS_REST = 50
_PICTURES = (".png", ".svg")


# --- arithmetic ---------------------------------------------------------------------------------------------------


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def ratio(rows: Sequence[Row], figure: str, ours: str, theirs: str, **where: Any) -> float | None:
    """Median over the rounds of ``ours / theirs``, both of the same round. ``where`` selects rows. None: no pair."""
    by_round: dict[Any, dict[str, float]] = {}
    for row in rows:
        if row.get(figure) is not None and all(row.get(key) == value for key, value in where.items()):
            by_round.setdefault(row["round"], {})[row["contender"]] = float(row[figure])
    pairs = [(found[ours], found[theirs]) for found in by_round.values() if ours in found and theirs in found]
    return rounded(statistics.median(a / b for a, b in pairs)) if pairs else None


def line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Slope and r squared of the least-squares line. Without two different points the slope is 0."""
    if len(xs) < 2 or len(set(xs)) < 2:
        return 0.0, 0.0
    fitted = statistics.linear_regression(xs, ys)
    if len(set(ys)) < 2:
        return 0.0, 1.0
    return fitted.slope, statistics.correlation(xs, ys) ** 2


def slope_per_1000(epochs: Sequence[float], values: Sequence[float]) -> float:
    """How much a value grows in 1,000 epochs, over the second half of a run. In the first half caches fill."""
    half = len(epochs) // 2
    return rounded(line(epochs[half:], values[half:])[0] * 1000)


def rounded(value: float, digits: int = 4) -> float:
    """A value with this number of significant digits: more would pretend to know them."""
    return float(f"{value:.{digits}g}")


def warm_up(batches: int) -> int:
    """The number of first batches that are not measured: a quarter."""
    return max(1, batches // 4)


def batch_figures(ends_s: Sequence[float], batch_ms: Sequence[float], rows: Sequence[int], warm: int) -> Figures:
    """Throughput and batch times after the warm-up. ``ends_s`` says when each batch was done, on any clock."""
    span = ends_s[-1] - ends_s[warm - 1]
    measured = list(batch_ms[warm:])
    return {
        "rows_s": round(sum(rows[warm:]) / span),
        "batch_ms_p50": rounded(statistics.median(measured)),
        "batch_ms_p99": rounded(percentile(measured, 0.99)),
    }


# --- the machine --------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """The machine and the versions with which a figure was taken."""
    return {
        "cores": os.cpu_count() or 1,
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        "java": _java(),
        **{name: _version(name) for name in ("pyspark", "polars", "pyarrow")},
        "os": f"{platform.system()} {platform.release()}",
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _java() -> str:
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else "java"
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return "not found"
    found = re.search(r'version "([^"]+)"', said.stderr + said.stdout)
    return found[1] if found else "unknown"


def taken(rows: Sequence[Row]) -> dict[str, Any]:
    """With which code a result was taken, when, and in how many rounds. ``docs/benchmarks.md`` shows it."""
    import penstock

    rounds: dict[str, int] = {}
    for row in rows:
        name = str(row.get("contender"))
        rounds[name] = max(rounds.get(name, 0), int(row.get("round", 1)))
    return {
        "version": penstock.__version__,
        "commit": _git("rev-parse", "--short=10", "HEAD") or "unknown",
        "changed": bool(_git("status", "--porcelain", "--untracked-files=no", "--", "src", "benchmarks/*.py")),
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "rounds": min(rounds.values(), default=0),
    }


def _git(*words: str) -> str:
    """What git says of the source tree; empty where there is no git or no repository."""
    try:
        said = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ""
    return said.stdout.strip() if said.returncode == 0 else ""


# --- memory -------------------------------------------------------------------------------------------------------


def tree(pid: int) -> list[psutil.Process]:
    """A process and all its descendants."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def rss_mb(processes: Sequence[psutil.Process]) -> float:
    return sum(_memory(process, "rss") for process in processes) / 2**20


def pss_mb(processes: Sequence[psutil.Process]) -> float:
    """MB of a process tree, with pages that several processes share counted once. 0 where the system does not tell."""
    return sum(_memory(process, "pss") for process in processes) / 2**20


def _memory(process: psutil.Process, kind: str) -> int:
    try:
        found = process.memory_info() if kind == "rss" else process.memory_full_info()
    except psutil.Error:  # the process has ended, or is another user's
        return 0
    return int(getattr(found, kind, 0))


def stolen_s() -> float | None:
    """Seconds that the host of a virtual machine took of each of its cores for others since the machine started. None:
    the system does not tell.
    """
    try:
        first = Path("/proc/stat").read_text().split("\n", 1)[0].split()
        return int(first[8]) / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)
    except (OSError, ValueError, IndexError):
        return None


class MemoryWatch(threading.Thread):
    """Peak memory of a process tree, five samples a second.

    PSS counts the pages that forked workers share only once. To read PSS the kernel walks the page tables, and whatever
    wants memory meanwhile may wait. So PSS gets one sample a second, and fewer for a large process: it takes at most a
    fiftieth of the time.
    """

    def __init__(self, pid: int) -> None:
        super().__init__(name="memory-watch", daemon=True)
        self.pid = pid
        self.rss_mb = 0.0
        self.pss_mb = 0.0
        self._over = threading.Event()

    def run(self) -> None:
        due, processes = 0.0, tree(self.pid)
        while not self._over.is_set():
            began = time.monotonic()
            if began >= due:
                processes = tree(self.pid)
                self.pss_mb = max(self.pss_mb, pss_mb(processes))
                due = began + max(_PSS_EVERY_S, _PSS_REST * (time.monotonic() - began))
            self.rss_mb = max(self.rss_mb, rss_mb(processes))
            self._over.wait(_SAMPLE_S)

    def stop(self) -> None:
        self._over.set()

    def figures(self) -> Figures:
        """``memory_mb`` is what we compare: PSS, or RSS where there is no PSS."""
        return {"memory_mb": round(self.pss_mb or self.rss_mb), "rss_mb": round(self.rss_mb)}


# --- contenders ---------------------------------------------------------------------------------------------------


def note(text: str) -> None:
    """Print progress to standard error. Standard output belongs to the result."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """A directory that is removed afterwards."""
    path = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def run_contender(
    module: str, contender: str, args: Mapping[str, Any], work: Path, *, seconds_max: float = CONTENDER_S_MAX
) -> Figures:
    """Run a contender in a process of its own, in directory ``work``, and give its figures with its peak memory."""
    work.mkdir(parents=True, exist_ok=True)
    log = work / "contender.log"
    command = [sys.executable, "-m", module, "--contender", contender, "--args", json.dumps(dict(args))]
    figures: Figures | None = None
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command, cwd=work, env=_environment(), stdout=subprocess.PIPE, stderr=errors, text=True
        )
        watch = MemoryWatch(process.pid)
        limit = threading.Timer(seconds_max, _kill_tree, [process.pid])
        watch.start()
        limit.start()
        try:
            assert process.stdout is not None
            for text in process.stdout:
                if text.startswith('{"contender"'):
                    watch.stop()
                    figures = json.loads(text)
            process.wait()
        finally:
            limit.cancel()
            watch.stop()
            watch.join()
            _kill_tree(process.pid)
            process.stdout.close()  # type: ignore[union-attr]
            process.wait()
    if figures is None or process.returncode != 0:
        said = log.read_text(errors="replace").strip().splitlines()[-15:]
        raise EngineError(
            f"contender '{contender}' of {module} ended with code {process.returncode} and "
            f"{'no figures' if figures is None else 'figures, but then failed'}:\n" + "\n".join(said),
            remedy=f"Run it alone to see more: {sys.executable} -m {module} --contender {contender} --args ...",
            contender=contender,
        )
    del figures["contender"]
    return {**figures, **watch.figures()}


def contender_main(module: str) -> None:
    """The child's side: ``if __name__ == "__main__": common.contender_main("benchmarks.words")``.

    The module is imported under its own name, so that workers can import what is pickled from it.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("--contender", required=True)
    parser.add_argument("--args", default="{}", type=json.loads)
    given = parser.parse_args()
    contenders: Mapping[str, Contender] = importlib.import_module(module).CONTENDERS
    for figures in contenders[given.contender](given.args):
        print(json.dumps({"contender": given.contender, **figures}), flush=True)


def in_turn(contenders: Sequence[str], rounds: int, run: Callable[[str, int], Figures], **also: Any) -> list[Row]:
    """Run all contenders in turn, round after round, and give a row of figures for each run."""
    rows = []
    for number in range(1, rounds + 1):
        for contender in contenders:
            figures = run(contender, number)
            rows.append({"contender": contender, **also, "round": number, **figures})
            shown = ", ".join(f"{key} {value}" for key, value in figures.items() if not isinstance(value, list | dict))
            note(f"round {number} of {rounds}, {contender}: {shown}")
    return rows


def finish(
    bench: str,
    rows: Sequence[Row],
    ratios: Mapping[str, float | None],
    notes: Sequence[str],
    out: Path | None,
    draw: Callable[[Path], Any],
    **more: Any,
) -> dict[str, Any]:
    """The result. With ``out`` it is also written to a file, with a picture beside it. If ``out`` ends like a picture,
    only the picture is written.
    """
    result = {
        "bench": bench,
        "taken": taken(rows),
        "machine": machine(),
        "rows": [dict(row) for row in rows],
        "ratios": {name: value for name, value in ratios.items() if value is not None},
        "notes": list(notes),
        **more,
    }
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.suffix.lower() not in _PICTURES:
            out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        draw(out if out.suffix.lower() in _PICTURES else out.with_suffix(".svg"))
    return result


def medians(rows: Sequence[Row], figure: str, *, group: str | None = None) -> list[dict[str, Any]]:
    """Median of a figure for each contender (and group), as ``plot_bars`` wants it."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row.get(figure) is not None:
            found.setdefault((row["contender"], str(row[group]) if group else ""), []).append(float(row[figure]))
    return [
        {"label": label, "value": statistics.median(values), **({"group": name} if group else {})}
        for (label, name), values in found.items()
    ]


def _environment() -> dict[str, str]:
    """The child's environment: it can import what we can, and no Penstock setting of this shell changes what is
    measured.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PENSTOCK_")}
    paths = [str(ROOT), str(ROOT / "src"), *(path for path in sys.path if path and os.path.exists(path))]
    # No contender's polars may use more than two cores.
    return {**kept, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "POLARS_MAX_THREADS": "2"}


def _kill_tree(pid: int) -> None:
    for process in reversed(tree(pid)):
        with contextlib.suppress(psutil.Error):
            process.kill()


# --- the two engines ------------------------------------------------------------------------------------------------


def run_penstock(flow: Any, args: Mapping[str, Any], *, warm: int | None = None) -> Figures:
    """Run a flow to its end, ``batches`` epochs of ``batch_words`` rows, and give its figures.

    ``args`` has work, batch_words and batches, and ``settings`` that differ from those of all benchmarks.
    """
    import penstock as ps

    work = Path(args["work"])
    job = ps.run(
        flow,
        master=MASTER,
        epoch_rows=args["batch_words"],
        checkpoint=str(work / "checkpoint"),
        spark={"spark.driver.memory": DRIVER_MEMORY, "spark.local.dir": str(work / "spark")},
        **{"checkpoint_interval_s": 2.0, **args.get("settings", {})},
    )
    job.wait()
    status = job.status()
    history = [entry for entry in status.history if entry.rows]
    assert len(history) == args["batches"], f"{len(history)} epochs of {args['batches']}"
    figures = batch_figures(
        [entry.at_s for entry in history],
        [entry.ms for entry in history],
        [entry.rows for entry in history],
        warm_up(len(history)) if warm is None else warm,
    )
    checkpoints = {"checkpoints": status.checkpoints, "checkpoint_mb": round(status.checkpoint_bytes / 1e6, 1)}
    # At its end a flow has closed and forgotten all windows, so the rows it held are in its history.
    return {**figures, "state_rows": history[-1].state_rows, **checkpoints}


def checkpoint_state(checkpoint: Path, operator: str, key: Sequence[str]) -> pl.DataFrame:
    """The state of an operator in the newest checkpoint, put together from its files as a recovery does."""
    from penstock.state.checkpoint import Manifest, merge_frames
    from penstock.state.codec import read_slices
    from penstock.state.table import DELETED, HASH

    newest = max((checkpoint / "manifests").iterdir())
    frames = []
    for file in Manifest.from_bytes(newest.read_bytes(), str(newest)).files[operator]:
        frames.append(read_slices((checkpoint / file.name).read_bytes(), file.name, file.slices))
    return merge_frames(frames, list(key), drop_deleted=True).drop(HASH, DELETED)


def structured_session(name: str, args: Mapping[str, Any], settings: Mapping[str, str]) -> Any:
    """A session for Structured Streaming, set up as a user who knows it would do, with the same memory as ours."""
    from pyspark.sql import SparkSession

    conf = {
        "spark.driver.memory": DRIVER_MEMORY,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.local.dir": str(Path(args["work"]) / "spark"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        # By default Spark adds 4 MB to the size of every file before it cuts, and one core would read a batch alone.
        "spark.sql.files.openCostInBytes": "65536",
        # Streaming queries with state switch this off themselves, with a warning.
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.streaming.numRecentProgressUpdates": str(args["batches"] + 10),
        **settings,
    }
    builder: Any = SparkSession.builder
    builder = builder.master(MASTER).appName(name)
    for key, value in conf.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def run_structured(writer: Any, args: Mapping[str, Any], *, warm: int | None = None) -> Figures:
    """Run a query to the end of its input, with checkpoints, and give its figures."""
    checkpoint = str(Path(args["work"]) / "checkpoint")
    query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    query.awaitTermination()
    progress = [p for p in query.recentProgress if p["numInputRows"]]
    return structured_figures(progress, args["batches"], warm=warm)


def structured_figures(progress: Sequence[Any], batches: int, *, warm: int | None = None) -> Figures:
    """The figures of a run by Structured Streaming's own record of each batch."""
    assert len(progress) == batches, f"{len(progress)} batches of {batches}"
    times = [float(p["durationMs"]["triggerExecution"]) for p in progress]
    begins = [dt.datetime.fromisoformat(p["timestamp"]).timestamp() for p in progress]
    ends = [begin + ms / 1000 for begin, ms in zip(begins, times, strict=True)]
    rows = [int(p["numInputRows"]) for p in progress]
    figures = batch_figures(ends, times, rows, warm_up(batches) if warm is None else warm)
    return {**figures, "state_rows": progress[-1]["stateOperators"][0]["numRowsTotal"]}


# --- input --------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _words() -> tuple[pl.Series, np.ndarray[Any, Any]]:
    """The words and the cumulative probabilities of their ranks."""
    cumulative = np.cumsum(np.arange(1, VOCABULARY + 1, dtype=np.float64) ** -ZIPF)
    cumulative /= cumulative[-1]
    cumulative[-1] = 1.0
    return pl.Series("word", make_vocabulary(VOCABULARY), dtype=pl.String), cumulative


def zipf_words(rows: int, rng: np.random.Generator) -> pl.Series:
    """Words by Zipf's law: the r-th word of the vocabulary comes with a weight of 1 / r."""
    vocabulary, cumulative = _words()
    return vocabulary.gather(np.searchsorted(cumulative, rng.random(rows), side="right").astype(np.uint32))


def numbered_words(first: int, rows: int, rng: np.random.Generator) -> pl.DataFrame:
    """Words with the numbers of their rows, for ``ps.generator``."""
    return pl.DataFrame({"word": zipf_words(rows, rng), "i": np.arange(first, first + rows, dtype=np.int64)})


def write_batch(frame: pl.DataFrame, folder: Path, number: int) -> None:
    """Write one file, which is one batch."""
    frame.write_parquet(
        folder / f"{number:05d}.parquet", compression="snappy", row_group_size=-(-frame.height // ROW_GROUPS)
    )


def write_words(folder: Path, files: int, rows_each: int, *, seed: int = 1) -> pl.DataFrame:
    """Write Parquet files of words, each one batch. Give the true final counts: word, n."""
    folder.mkdir(parents=True)
    note(f"writing {files} files of {rows_each:,} words")
    counts: list[pl.DataFrame] = []
    for number in range(files):
        words = zipf_words(rows_each, np.random.default_rng([seed, number]))
        frame = pl.DataFrame({"word": words})
        write_batch(frame, folder, number)
        counts.append(frame.group_by("word").agg(n=pl.len().cast(pl.Int64)))
    return pl.concat(counts).group_by("word").agg(pl.col("n").sum()).sort("word")


def check_counts(found: pl.DataFrame, truth: pl.DataFrame, contender: str) -> None:
    """Refuse a wrong answer, whose figures are worth nothing: every count of every word must be right."""
    have = found.select("word", pl.col("n").cast(pl.Int64)).sort("word")
    if have.equals(truth):
        return
    wrong = truth.join(have, on="word", how="full", suffix="_found", coalesce=True).filter(
        pl.col("n").ne_missing(pl.col("n_found"))
    )
    raise EngineError(
        f"contender '{contender}' counted wrongly: {have['n'].sum():,} words in {have.height:,} keys, "
        f"where {truth['n'].sum():,} in {truth.height:,} are right; {wrong.height:,} keys differ, such as "
        f"{wrong.head(1).to_dicts()}.",
        remedy="Its figures were thrown away. Please report this.",
        contender=contender,
    )
