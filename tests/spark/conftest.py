"""One Spark session for the tests that run flows in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from penstock.config import Config


@pytest.fixture(scope="session")
def _stop_spark() -> Iterator[None]:
    yield
    from pyspark import SparkContext

    if SparkContext._active_spark_context is not None:
        SparkContext._active_spark_context.stop()


@pytest.fixture
def session(_stop_spark: None) -> Any:
    """A session as Penstock itself would start it; jobs take it over, and leave it running."""
    from penstock.engines.spark.session import open_session

    found, _, _ = open_session(Config(master="local[2]"), "tests")
    return found
