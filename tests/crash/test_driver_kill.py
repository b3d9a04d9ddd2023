"""SIGKILL of the driver, anywhere: started again until it is done, it gives the output of an undisturbed run, to the
byte, in Parquet and in a sink of the user's that is idempotent by epoch.

``make test`` hits every step of a commit on the local engine, some on Spark, and 15 random moments on the local one.
``make test-all`` hits every step on Spark too, and 25 random moments on both: starts of Spark take minutes.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import polars as pl
import pytest

import penstock as ps
from tests.crash import driver_job
from tests.scale import THOROUGH, scaled

pytestmark = pytest.mark.crash

SCRIPT = Path(driver_job.__file__)
ROOT = SCRIPT.parents[2]

Output = tuple[dict[str, pl.DataFrame], dict[str, bytes]]


class Nursery:
    """Forks a job process for each start: see ``driver_job.py --serve``."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        single = dict.fromkeys(("POLARS_MAX_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), "1")
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", str(SCRIPT), "--serve"],
            env={**os.environ, **single, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.errors: list[str] = []
        threading.Thread(target=self._drain, daemon=True).start()

    def _drain(self) -> None:
        assert self.process.stderr is not None
        self.errors.extend(self.process.stderr)

    def run(self, place: Path, engine: str, *options: str) -> int:
        """One start of the job; 0 or minus the signal that ended it."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([str(place), "--engine", engine, *options]) + "\n")
        self.process.stdin.flush()
        said = ""
        while not (line := self.process.stdout.readline()).startswith('{"status"'):
            assert line, "the nursery died: " + "".join(self.errors[-30:])
            said += line
        status: int = json.loads(line)["status"]
        assert status in (0, -signal.SIGKILL), "".join(self.errors[-30:])
        if status == 0:
            assert "done: " in said and " 0 recoveries" in said, said
        return status

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(120)


_nurseries = threading.local()
_all: list[Nursery] = []


def run(place: Path, engine: str, *options: str) -> int:
    """In a nursery of this thread's own."""
    if not hasattr(_nurseries, "mine"):
        _nurseries.mine = Nursery()
        _all.append(_nurseries.mine)
    status: int = _nurseries.mine.run(place, engine, *options)
    return status


@pytest.fixture(scope="module", autouse=True)
def nurseries() -> Iterator[None]:
    yield
    for each in _all:
        each.close()
        for pipe in (each.process.stdout, each.process.stderr):
            assert pipe is not None
            pipe.close()


def output(place: Path) -> Output:
    """What readers see, and every published file, with those of the user's own sink."""
    frames = {s.name: ps.read_output(s).sort(pl.all()) for s in sorted((place / "out").iterdir())}
    files = {
        str(f.relative_to(place / "out")): f.read_bytes()
        for f in sorted((place / "out").rglob("*.parquet"))
        if "_staging" not in f.parts
    }
    files |= {f"{driver_job.OWN}/{f.name}": f.read_bytes() for f in sorted((place / driver_job.OWN).iterdir())}
    return frames, files


def check(place: Path, expected: Output) -> None:
    frames, files = output(place)
    for sink, frame in expected[0].items():
        assert frames[sink].equals(frame), f"the rows of '{sink}' are others"
    assert sorted(files) == sorted(expected[1])
    assert [f for f in files if files[f] != expected[1][f]] == [], "same rows, other bytes"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Output:
    place = tmp_path_factory.mktemp("undisturbed")
    assert run(place, "local") == 0
    found = output(place)
    assert sorted(found[0]) == sorted(driver_job.SINKS)
    assert all(frame.height > 50 for frame in found[0].values()), "enough of everything to go wrong"
    assert found[0]["counts"].group_by("word").agg(pl.col("n").max())["n"].sum() == driver_job.ROWS
    own = [data.decode() for name, data in found[1].items() if name.startswith(f"{driver_job.OWN}/")]
    assert sum(len(text.splitlines()) - 1 for text in own) == found[0]["counts"].height, "both sinks have the same"
    return found


@pytest.fixture(scope="module")
def undisturbed_small(tmp_path_factory: pytest.TempPathFactory) -> Output:
    place = tmp_path_factory.mktemp("undisturbed")
    assert run(place, "local", "--small") == 0
    return output(place)


def killed_at_random(place: Path, engine: str, seed: int, kills: int, *options: str) -> int:
    """Kill, start again, kill again. The moment: some microseconds after some step; both are chance."""
    chance = random.Random(seed)
    died = 0
    for _ in range(kills):
        calls, microseconds = chance.randint(1, 40), chance.randint(0, 40_000)
        died += run(place, engine, *options, "--die-within", f"{calls}:{microseconds}") != 0
    assert run(place, engine, *options) == 0
    return died


@pytest.mark.parametrize("step", driver_job.STEPS)
def test_killed_at_each_step_of_a_commit(step: str, undisturbed: Output, tmp_path: Path) -> None:
    assert run(tmp_path, "local", "--die", f"{step}:2") == -signal.SIGKILL, f"'{step}' was not reached"
    assert run(tmp_path, "local") == 0
    check(tmp_path, undisturbed)


@pytest.mark.slow
def test_killed_at_random_moments(undisturbed: Output, tmp_path: Path) -> None:
    """Jobs with five deaths each, two at a time."""
    jobs = scaled(3, 5)

    def one(seed: int) -> int:
        place = tmp_path / str(seed)
        died = killed_at_random(place, "local", seed, 5)
        check(place, undisturbed)
        return died

    with ThreadPoolExecutor(2) as pool:
        deaths = list(pool.map(one, range(jobs)))
    assert sum(deaths) >= 3 * jobs, f"too many of the kills came after the end: {deaths}"


def test_it_survives_dying_at_every_start(undisturbed: Output, tmp_path: Path) -> None:
    """Each start dies in its fourth commit: the job still gets there, because each start gets a little further."""
    starts = 1
    while run(tmp_path, "local", "--die", "after-publish:4") != 0:
        starts += 1
        assert starts < 30, "no progress from start to start"
    assert starts >= 3
    check(tmp_path, undisturbed)


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(scaled(300, 1_200))
def test_killed_at_steps_of_a_commit_on_spark(undisturbed_small: Output, tmp_path: Path) -> None:
    """One job, killed at each step in turn. Its files are those of the local engine, byte for byte. The steps are the
    driver's, the same on every engine, and each start of Spark takes its time: all of them in ``make test-all``."""
    for step in driver_job.STEPS if THOROUGH else ("between-sinks", "after-manifest"):
        assert run(tmp_path, "spark", "--small", "--die", f"{step}:1") != 0, f"the job ended before '{step}'"
    assert run(tmp_path, "spark", "--small") == 0
    check(tmp_path, undisturbed_small)


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(3_600)
def test_killed_at_random_moments_on_spark(undisturbed_small: Output, tmp_path: Path) -> None:
    for seed in range(5):
        place = tmp_path / str(seed)
        killed_at_random(place, "spark", seed, 5, "--small")
        check(place, undisturbed_small)
