"""Fixtures for every test. Those that need Spark live beside the tests that use it."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

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


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The data sets that are too large for the repository: speeches.txt.gz, tweets.csv.gz and word lists."""
    place = Path(os.environ.get("PENSTOCK_DATA", ROOT.parent / "shared" / "data"))
    if not place.is_dir():
        pytest.skip(f"no data sets at {place}; set PENSTOCK_DATA to the directory that holds them")
    return place
