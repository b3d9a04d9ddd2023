"""What a neighbour on the same machine notices of a migration: live and throttled, live, and stop and copy; and of a
change of cores.

After figures 15 and 17 of ChronoStream. Beside the job of the benchmark ``migrate`` something else works all the time:
PostgreSQL with ``pgbench`` where it is installed, else a process that hashes and writes to the disk. The benchmark
compares its throughput while state moves with its throughput beside the steady job, in ten seconds before the order and
ten seconds after everything has settled. Both sides count, because three containers take more of the machine than one,
and the move does not cause that.

``penstock``
    Slices move while the job runs, and copies are read at no more than ``move_mb_s``.
``penstock_unlimited``
    Slices move while the job runs, without that limit.
``penstock_stop``
    Stop and copy: everything stops, and the new owners load the checkpoint as fast as they can.
``penstock_cores``, ``penstock_cores_stop``
    The orders of the benchmark ``vertical``: cores of one node, slices re-mapped live or by synchronous repartition.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pwd
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import common, migrate, vertical
from benchmarks.common import Figures, Row
from benchmarks.migrate import Phase, keys_of
from benchmarks.recovery import OPERATOR, wait_for
from penstock.errors import EngineError

SUMMARY = "What a database beside the job notices while state moves: live and throttled, live, stop and copy."

MODULE = "benchmarks.tenant"
MOVE_MB_S = 16.0
"""MB a second for each container that makes copies."""
BEFORE_S = 10.0
WORST_S = 3.0
"""Seconds of the window in which the worst time within a migration is looked for."""
EXECUTORS = 3
EXECUTOR_MB = 1024
PG_SCALE = 5
PG_CLIENTS = 2
PG_BYTES = 1 << 30
"""Room for the database, with plenty to spare for its log."""
BLOCK = 1 << 16
SYNC_EVERY = 200

PENSTOCK, UNLIMITED, STOP = "penstock", "penstock_unlimited", "penstock_stop"
CORES, CORES_STOP = "penstock_cores", "penstock_cores_stop"
PREFIXES = {PENSTOCK: "", UNLIMITED: "unlimited_", STOP: "stop_", CORES: "cores_", CORES_STOP: "cores_stop_"}
"""Contender -> the prefix of its figures' names."""

Counts = Sequence[tuple[float, float]]
"""How much the neighbour had done in all, and when."""

Begun = tuple[Any, migrate.Recorder, list[migrate.Order]]
"""A job, its record, and the orders to give it."""

Progress = Callable[[str, float], float | None]
"""Reads a line: from the line and what was done before to what is done now. None for other lines."""

PHASES = (Phase(keys_of(200), 2),)
QUICK = (Phase(keys_of(50)),)


def run(quick: bool, out: Path | None) -> dict[str, Any]:
    """See README.md. Quick: 50 MB, throttled and stopped only."""
    phases = QUICK if quick else PHASES
    rows: list[Row] = []
    series: dict[str, Any] = {}
    with common.workplace() as place:
        migrate.write_phases(place / "pool", phases)
        for contender in (PENSTOCK, STOP) if quick else PREFIXES:
            figures = migrate.run_phases(MODULE, contender, phases, place)
            kind = {"neighbour": figures["neighbour"]}
            rows += [{**row, **kind} for row in migrate.order_rows(contender, figures)]
            series[contender] = figures["series"]
    notes = [
        "kept: the neighbour's throughput from the order until nothing is left of the move, by that beside the steady "
        f"job: the mean of {BEFORE_S:g} s before the order and {BEFORE_S:g} s after all has settled.",
        f"kept_worst: the same for the worst {WORST_S:g} s within that time.",
        "alone_s and beside_s: what the neighbour does in a second without the job, and beside it.",
        f"penstock reads copies at no more than {MOVE_MB_S:g} MB/s in each container; penstock_unlimited as it can.",
        "In every run the final count and sum of every key were compared with the truth, and no output came twice.",
    ]

    def draw(path: Path) -> None:
        from penstock.observe.plot import Panel, plot_series

        lines = {name: found["neighbour"] for name, found in series.items()}
        panels = [
            Panel("neighbour, by its average", lines),
            Panel("containers", {name: found["containers"] for name, found in series.items()}, steps=True),
        ]
        plot_series(panels, path, "A neighbour's throughput while state moves")

    return common.finish("tenant", rows, ratios(rows), notes, out, draw, series=series)


# --- figures ------------------------------------------------------------------------------------------------------


def done_by(counts: Counts, at: float) -> float:
    """How much the neighbour had done at a moment, interpolated between its reports before and after."""
    if not counts or not counts[0][0] <= at <= counts[-1][0]:
        raise EngineError("the neighbour said nothing at the time asked for", remedy="Look at the contender's log.")
    index = min(bisect_right([when for when, _ in counts], at), len(counts) - 1)
    (a, before), (b, after) = counts[index - 1], counts[index]
    return before + (after - before) * (at - a) / (b - a)


def rate_in(counts: Counts, begin: float, end: float) -> float:
    """The neighbour's work in a second, from ``begin`` to ``end``."""
    return (done_by(counts, end) - done_by(counts, begin)) / (end - begin)


def kept_in(counts: Counts, at: float, done: float, rested: float) -> Figures:
    """The neighbour's throughput during a move, by its throughput beside the steady job: before the order at ``at``,
    and in the last seconds before ``rested``.
    """
    before, after = rate_in(counts, at - BEFORE_S, at), rate_in(counts, rested - BEFORE_S, rested)
    usual = (before + after) / 2
    width = min(WORST_S, done - at)
    steps = max(1, int((done - at - width) / 0.5) + 1)
    worst = min(rate_in(counts, at + 0.5 * n, at + 0.5 * n + width) for n in range(steps))
    return {
        "beside_s": common.rounded(before),
        "beside_after_s": common.rounded(after),
        "kept": common.rounded(rate_in(counts, at, done) / usual),
        "kept_worst": common.rounded(worst / usual),
    }


def ratios(rows: Sequence[Row]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for contender, prefix in PREFIXES.items():
        mine = [row for row in rows if row["contender"] == contender]
        for figure in ("kept", "kept_worst", "delay_s", "done_s"):
            values = [float(row[figure]) for row in mine if row.get(figure) is not None]
            name = f"{prefix}neighbour_{figure}" if figure.startswith("kept") else f"{prefix}{figure}"
            found[name] = common.rounded(statistics.median(values)) if values else None
    return found


def per_second(counts: Counts, begin: float, end: float) -> list[tuple[float, float]]:
    """For the picture: the neighbour's throughput in each second, by the average of all seconds."""
    seconds = range(int(end - begin))
    values = [rate_in(counts, begin + s, begin + s + 1) for s in seconds]
    average = statistics.fmean(values) if values else 0.0
    return [(float(s), round(value / average, 3)) for s, value in zip(seconds, values, strict=True)] if average else []


# --- neighbours ---------------------------------------------------------------------------------------------------


class Neighbour(threading.Thread):
    """Reads what a process says of its progress, one line at a time, and when."""

    def __init__(
        self, kind: str, process: subprocess.Popen[str], progress: Callable[[str, float], float | None]
    ) -> None:
        super().__init__(name="neighbour", daemon=True)
        self.kind, self.process, self.progress = kind, process, progress
        self.counts: list[tuple[float, float]] = []

    def run(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            total = self.progress(line, self.counts[-1][1] if self.counts else 0.0)
            if total is not None:
                self.counts.append((time.monotonic(), total))

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()
        self.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


def loop_progress(line: str, before: float) -> float | None:
    """Each line is the number of rounds so far."""
    return float(line) if line.strip().isdigit() else None


PG_LINE = re.compile(r"progress: ([\d.]+) s, ([\d.]+) tps")


def pgbench_progress(line: str, before: float) -> float | None:
    """``progress: 3.0 s, 812.4 tps, lat ...``, one each second."""
    found = PG_LINE.match(line)
    return before + float(found[2]) if found else None


def churn(path: str) -> None:
    """The neighbour where there is no database: hash a block, write it, and now and then make sure that it is on the
    disk.
    """
    block, rounds, said = bytes(BLOCK), 0, time.monotonic()
    with open(path, "wb") as file:
        while True:
            block = (hashlib.sha256(block).digest() * (BLOCK // 32))[:BLOCK]
            file.write(block)
            rounds += 1
            if rounds % SYNC_EVERY == 0:
                file.flush()
                os.fsync(file.fileno())
                file.seek(0)
            if time.monotonic() - said >= 0.5:
                said = time.monotonic()
                print(rounds, flush=True)


@contextlib.contextmanager
def neighbour(work: Path) -> Iterator[Neighbour]:
    """The neighbour works until the end of the block."""
    with contextlib.ExitStack() as stack:
        programs = postgres_programs()
        found = stack.enter_context(pgbench(programs)) if programs else stack.enter_context(loop(work))
        found.start()
        stack.callback(found.stop)
        wait_for(lambda: len(found.counts) > 2, 60.0, "the neighbour is at work")
        yield found


@contextlib.contextmanager
def loop(work: Path) -> Iterator[Neighbour]:
    code = f"from benchmarks.tenant import churn; churn({str(work / 'churn')!r})"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    yield Neighbour("loop", process, loop_progress)


def postgres_programs() -> dict[str, str]:
    """Name -> path of the programs that are needed. Empty if one is missing or only root is here."""
    places = [*os.environ.get("PATH", "").split(os.pathsep), *map(str, Path("/usr/lib/postgresql").glob("*/bin"))]
    search = os.pathsep.join(places)
    found = {name: shutil.which(name, path=search) for name in ("initdb", "postgres", "pgbench", "pg_isready")}
    if os.geteuid() == 0 and _user() is None:
        return {}
    return {name: path for name, path in found.items() if path} if all(found.values()) else {}


def _user() -> str | None:
    """PostgreSQL refuses to run as root. Then it runs as its own user, if there is one."""
    if os.geteuid() != 0:
        return None
    with contextlib.suppress(KeyError):
        return pwd.getpwnam("postgres").pw_name
    return None


def main_memory(place: str = "/dev/shm") -> str | None:
    """A directory whose files lie in memory, if there is one with room. The paper's neighbour is a database in main
    memory. Each transaction would wait for a shared disk, which swings more than what is to be measured.
    """
    with contextlib.suppress(OSError):
        if os.path.ismount(place) and os.access(place, os.W_OK) and shutil.disk_usage(place).free >= PG_BYTES:
            return place
    return None


@contextlib.contextmanager
def pgbench(programs: dict[str, str]) -> Iterator[Neighbour]:
    """A database of its own in a directory that is removed afterwards, reached by a socket there."""
    place = Path(tempfile.mkdtemp(prefix="penstock-pg-", dir=main_memory()))
    user = _user()
    # They get a session of their own, as a neighbour has: Linux shares the cores between sessions first.
    as_user: dict[str, Any] = {"cwd": place, "text": True, "start_new_session": True}
    if user is not None:
        os.chown(place, pwd.getpwnam(user).pw_uid, pwd.getpwnam(user).pw_gid)
        as_user |= {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}
    data = str(place / "data")
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    where = ["-h", str(place), "-p", "5432"]
    server = None
    try:
        subprocess.run([programs["initdb"], "-D", data, "-A", "trust"], check=True, **as_user, **quiet)
        settings = ["-c", "listen_addresses=", "-c", f"unix_socket_directories={place}", "-c", "shared_buffers=64MB"]
        server = subprocess.Popen([programs["postgres"], "-D", data, *settings], **as_user, **quiet)
        ready = [programs["pg_isready"], *where]
        wait_for(lambda: subprocess.run(ready, **as_user, **quiet).returncode == 0, 60.0, "the database is up")
        bench = [programs["pgbench"], *where]
        subprocess.run([*bench, "-i", "-q", "-s", str(PG_SCALE), "postgres"], check=True, **as_user, **quiet)
        forever = ["-c", str(PG_CLIENTS), "-j", "1", "-T", "100000", "-P", "1", "postgres"]
        process = subprocess.Popen(
            [*bench, *forever], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=1, **as_user
        )
        yield Neighbour("pgbench", process, pgbench_progress)
    finally:
        if server is not None:
            server.terminate()
            server.wait()
        shutil.rmtree(place, ignore_errors=True)


# --- the job ------------------------------------------------------------------------------------------------------


def beside_neighbour(args: dict[str, Any], begin: Callable[[], Begun]) -> Iterator[Figures]:
    """Start the neighbour, then the job. Give the orders, and measure what each order cost the neighbour."""
    with neighbour(Path(args["work"])) as other:
        first_s = time.monotonic()
        wait_for(lambda: time.monotonic() - first_s > BEFORE_S, BEFORE_S * 2)
        alone = rate_in(other.counts, max(first_s, other.counts[0][0]), other.counts[-1][0])
        job, recorder, orders = begin()
        figures = migrate.go_through(job, recorder, args, orders, rest_s=BEFORE_S, rest_after=True)
        end = time.monotonic()
        wait_for(lambda: other.counts[-1][0] > end, 30.0, "the neighbour has told of it")
        job.stop()
        counts = list(other.counts)
    rested = [*figures["began"][1:], figures["rested"]]
    for order, at, then in zip(figures["orders"], figures["began"], rested, strict=True):
        order |= {"alone_s": common.rounded(alone), **kept_in(counts, at, at + order["done_s"], then)}
    first = figures["began"][0] - BEFORE_S
    owners = [(at - first, len(set(recorder.owners[epoch]))) for at, epoch in recorder.outputs if first <= at <= end]
    series = {"neighbour": per_second(counts, first, end), "containers": [(round(at, 2), n) for at, n in owners]}
    yield {**figures, "neighbour": other.kind, "series": series}


def begin_rescales(args: dict[str, Any], stop_and_copy: bool, move_mb_s: float) -> Begun:
    """The orders of the benchmark ``migrate``: three containers, one, three."""
    job, recorder = migrate.start_totals(
        args,
        master=f"local-cluster[{EXECUTORS},1,{EXECUTOR_MB}]",
        instances=migrate.MANY,
        epoch_rows=migrate.LOAD_ROWS,
        backups=0,
        stop_and_copy=stop_and_copy,
        move_mb_s=move_mb_s,
    )
    return job, recorder, [(f"to {n}", partial(job.rescale, OPERATOR, n), n) for n in (migrate.FEW, migrate.MANY)]


def penstock(args: dict[str, Any], stop_and_copy: bool = False, move_mb_s: float = MOVE_MB_S) -> Iterator[Figures]:
    return beside_neighbour(args, partial(begin_rescales, args, stop_and_copy, move_mb_s))


def penstock_unlimited(args: dict[str, Any]) -> Iterator[Figures]:
    return penstock(args, move_mb_s=0.0)


def penstock_stop(args: dict[str, Any]) -> Iterator[Figures]:
    return penstock(args, stop_and_copy=True)


def penstock_cores(args: dict[str, Any], stop_and_copy: bool = False) -> Iterator[Figures]:
    return beside_neighbour(args, partial(vertical.begin, args, stop_and_copy))


def penstock_cores_stop(args: dict[str, Any]) -> Iterator[Figures]:
    return penstock_cores(args, stop_and_copy=True)


CONTENDERS: dict[str, common.Contender] = {
    PENSTOCK: penstock,
    UNLIMITED: penstock_unlimited,
    STOP: penstock_stop,
    CORES: penstock_cores,
    CORES_STOP: penstock_cores_stop,
}

if __name__ == "__main__":
    common.contender_main(MODULE)
