"""One job on three real executors, through all that can happen to them, one thing after another: nodes leave and come,
are lost in every way, and people give orders meanwhile. Its output is the undisturbed run's, byte for byte, in Parquet
and in a sink of the user's that overwrites what it is given twice.

The job runs in a process of its own (``fleet_job.py``) for all tests of this file, which need each other's order: a
cluster takes longer to start than most faults take to get over. A fault is a test; what only ``make test-all`` has is
marked ``thorough``.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.scale import scaled
from tests.spark import fleet_job
from tests.spark.child import ROOT
from tests.spark.fleet_job import NODES, SLICES, STAGES

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.slow, pytest.mark.timeout(scaled(600, 3_600))]

ALL_SLICES = len(STAGES) * SLICES


class Fleet:
    """The child process. What it is asked to do is done when it answers."""

    def __init__(self, place: Path) -> None:
        self.errors = place / "stderr"
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, fleet_job.__file__, str(place)],
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.broken = ""
        """What failed first: nothing can be said of the tests after it."""
        self._answer("the start")

    def ask(self, do: str, **how: Any) -> dict[str, Any]:
        if self.broken:
            pytest.fail(f"the job of these tests failed before, at {self.broken}")
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **how}) + "\n")
        self.process.stdin.flush()
        return self._answer(f"{do} {how}")

    def _answer(self, what: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        self.broken = what
        text = self.process.stdout.readline()
        assert text, f"it ended at {what}: {self.errors.read_text()[-4_000:]}"
        found: dict[str, Any] = json.loads(text)
        assert "failed" not in found, f"{what}: {found['failed']}"
        self.broken = ""
        return found

    def end(self) -> None:
        for process in (*psutil.Process(self.process.pid).children(recursive=True), self.process):
            with contextlib.suppress(psutil.Error):  # it may have ended by itself
                process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Backups have a megabyte of memory and come to more: what is rebuilt was on holders' disks."""
    found = Fleet(tmp_path_factory.mktemp("fleet"))
    yield found
    found.end()


def test_containers_stay_where_they_are(fleet: Fleet) -> None:
    found = fleet.ask("settle")
    assert len(found["nodes"]) == NODES
    assert len(found["homes"]) == NODES * len(STAGES), f"a container moved for no reason: {found['homes']}"
    assert found["remote"] > 0, "rows went from one node to another"
    assert found["recoveries"] == 0


def test_a_node_is_given_back(fleet: Fleet) -> None:
    found = fleet.ask("give_back")
    assert found["recoveries"] == 0, "to leave is no loss"
    assert found["after"].keys() < found["before"].keys() and len(found["after"]) == NODES - 1
    assert sum(found["after"].values()) == ALL_SLICES and min(found["after"].values()) >= ALL_SLICES // 4
    assert found["at_release"] == [0], "it was drained before it was given back"


def test_more_nodes_are_asked_for_than_there_are(fleet: Fleet) -> None:
    found = fleet.ask("ask_for", more=2, come=1)
    (new,) = found["after"].keys() - found["before"].keys()
    assert found["recoveries"] == 0 and len(found["after"]) == NODES
    assert sum(found["after"].values()) == ALL_SLICES and found["after"][new] >= ALL_SLICES // 8, "its share, by load"
    assert [notice for notice in found["notices"] if notice.startswith(("0 of 2 ", "1 of 2 "))], found["notices"]


@pytest.mark.thorough
def test_one_that_came_leaves_and_another_comes(fleet: Fleet) -> None:
    found = fleet.ask("give_back", newest=True)
    assert found["before"].keys() - found["after"].keys() == {max(found["before"], key=int)}
    assert found["recoveries"] == 0 and found["at_release"] == [0]
    assert fleet.ask("ask_for", more=1, come=1)["recoveries"] == 0


THOROUGH_ONLY = {"two at once": 2, "in a checkpoint": 1, "in a start": 1, "a hang": 0, "all": 3}
FAULTS = {"one": 1, "late": 1, "in a recovery": 2, "a worker": 0}
"""fault -> executors that are new when it is over"""


@pytest.mark.parametrize(
    ("fault", "newcomers"),
    [
        *FAULTS.items(),
        *(pytest.param(fault, new, marks=pytest.mark.thorough) for fault, new in THOROUGH_ONLY.items()),
    ],
)
def test_executors_are_lost(fault: str, newcomers: int, fleet: Fleet) -> None:
    found = fleet.ask("strike", fault=fault)
    assert found["recoveries"] >= 1
    assert len(found["newcomers"]) == newcomers, found["newcomers"]
    assert all(found["newcomers"].values()), f"each has its share: {found['newcomers']}"
    assert all(before == after for _, _, before, after in found["stayed"]), f"survivors stay: {found['stayed']}"
    assert len(found["stayed"]) == len(STAGES) * (NODES - newcomers), found["stayed"]
    if fault == "one":
        assert found["backup"] >= 4, "the slices of one node of three, of each stage, had backups"
        assert found["durable"] == 0, "nothing had to come from the durable store"
        assert any("from backups" in notice for notice in found["notices"])
    if fault == "late":
        assert found["late"] > 0, "no job came late"
        assert found["ended"] == ["StageFailed"] * found["late"], "it was waited for"
    if fault == "all":
        assert found["durable"] > 0, "when all are gone, the durable checkpoint restores"


@pytest.mark.thorough
def test_an_executor_whose_disk_breaks_is_given_back(fleet: Fleet) -> None:
    """The job goes on with two, as what it says tells how to come by a third again."""
    found = fleet.ask("strike", fault="a bad disk")
    assert found["newcomers"] == {} and found["recoveries"] >= 1
    assert found["backup"] > 0 and found["durable"] == 0
    assert any("every task on node" in notice and "scale_out" in notice for notice in found["notices"])
    again = fleet.ask("ask_for", more=1, come=1)
    assert again["recoveries"] == 0 and len(again["after"]) == NODES


def test_a_storm_of_orders(fleet: Fleet) -> None:
    """Orders as people give them, while executors are killed: each is taken, or refused with a reason."""
    orders, kills = scaled(12, 200), scaled(1, 6)
    found = fleet.ask("storm", seed=int(os.environ.get("PENSTOCK_STORM_SEED", "2")), orders=orders, kills=kills)
    assert sum(found["given"].values()) >= orders and found["kills"] == kills
    assert found["recoveries"] >= kills
    # Orders of which nothing comes would leave the output alone as well.
    assert found["moves"].get("done", 0) >= orders // 5, found
    assert found["refused"], "some orders cannot be, and are refused with a reason"


def test_nothing_of_it_shows_in_the_output(fleet: Fleet) -> None:
    found = fleet.ask("finish")
    assert found["equal"], f"the output differs: {found['differ']}"
    assert found["compared"] == 3 * found["epochs"] > 0, "every epoch of every sink"
