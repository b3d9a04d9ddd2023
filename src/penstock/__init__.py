"""Penstock: elastic, exactly-once, stateful stream processing in Python on Apache Spark.

Names load when they are first used. The command imports this package before anything else, and must not wait for polars
to say ``--help``; nor must the pure planes, which are inside it, meet what the engines import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.config import Config
    from penstock.connectors import (
        BadRecord,
        ReadResult,
        Sink,
        Source,
        SourceRange,
        console,
        csv,
        dataframe,
        dataframe_writer,
        discard,
        files,
        foreach_batch,
        generator,
        jsonl,
        memory,
        parquet,
        punctuated,
        read_output,
        simple_reader,
        spark_reader,
        spark_table,
        words,
    )
    from penstock.engines.job import Job, run, run_local
    from penstock.errors import PenstockError
    from penstock.flow import Flow, KeyedStream, Stream, WindowedStream
    from penstock.observe.status import JobStatus, OperatorStatus
    from penstock.operators.aggregates import Aggregate, count, max, mean, min, sum
    from penstock.operators.custom import Operator, Value
    from penstock.operators.windows import hopping, tumbling

__version__ = "0.1.0"

__all__ = [
    "Aggregate",
    "BadRecord",
    "Config",
    "Flow",
    "Job",
    "JobStatus",
    "KeyedStream",
    "Operator",
    "OperatorStatus",
    "PenstockError",
    "ReadResult",
    "Sink",
    "Source",
    "SourceRange",
    "Stream",
    "Value",
    "WindowedStream",
    "__version__",
    "console",
    "count",
    "csv",
    "dataframe",
    "dataframe_writer",
    "discard",
    "files",
    "foreach_batch",
    "generator",
    "hopping",
    "jsonl",
    "max",
    "mean",
    "memory",
    "min",
    "parquet",
    "punctuated",
    "read_output",
    "run",
    "run_local",
    "simple_reader",
    "spark_reader",
    "spark_table",
    "sum",
    "tumbling",
    "words",
]

_HOMES = {
    "penstock.config": ("Config",),
    "penstock.connectors": (
        "BadRecord",
        "ReadResult",
        "Sink",
        "Source",
        "SourceRange",
        "console",
        "csv",
        "dataframe",
        "dataframe_writer",
        "discard",
        "files",
        "foreach_batch",
        "generator",
        "jsonl",
        "memory",
        "parquet",
        "punctuated",
        "read_output",
        "simple_reader",
        "spark_reader",
        "spark_table",
        "words",
    ),
    "penstock.engines.job": (
        "Job",
        "run",
        "run_local",
    ),
    "penstock.errors": ("PenstockError",),
    "penstock.flow": (
        "Flow",
        "KeyedStream",
        "Stream",
        "WindowedStream",
    ),
    "penstock.observe.status": (
        "JobStatus",
        "OperatorStatus",
    ),
    "penstock.operators.aggregates": (
        "Aggregate",
        "count",
        "max",
        "mean",
        "min",
        "sum",
    ),
    "penstock.operators.custom": (
        "Operator",
        "Value",
    ),
    "penstock.operators.windows": (
        "hopping",
        "tumbling",
    ),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
