"""Fixtures for every test, and which of them run."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.scale import THOROUGH

ROOT = Path(__file__).resolve().parent.parent

# Jobs of tests, and those that tests kill, leave their sockets here and not beside the user's own.
os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="pk-")
atexit.register(shutil.rmtree, os.environ["XDG_RUNTIME_DIR"], ignore_errors=True)

# Shared machines stall now and then: a deadline for each example would test them and not us; every test has a timeout.
# The same examples each time, so that a change is judged by what it changed; the profile "random" looks for others.
settings.register_profile("penstock", deadline=None, print_blob=True, derandomize=True)
settings.register_profile("random", settings.get_profile("penstock"), derandomize=False)
settings.register_profile("thorough", settings.get_profile("random"), max_examples=2_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "penstock"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not THOROUGH and item.get_closest_marker("thorough"):
            item.add_marker(pytest.mark.skip(reason="in make test-all only: PENSTOCK_THOROUGH=1"))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The data sets that are too large for the repository: speeches.txt.gz, tweets.csv.gz and word lists."""
    place = Path(os.environ.get("PENSTOCK_DATA", ROOT.parent / "shared" / "data"))
    if not place.is_dir():
        pytest.skip(f"no data sets at {place}; set PENSTOCK_DATA to the directory that holds them")
    return place


@pytest.fixture(scope="session")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The one Spark session of this process, as Penstock itself starts it; jobs take it over, and leave it running."""
    from penstock.config import Config
    from penstock.engines.spark.session import open_session

    settings = {
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
    }
    found, ours, _ = open_session(Config(master="local[2]", spark=settings), "tests")
    assert ours, "another test has left a session behind"
    yield found
    found.stop()
