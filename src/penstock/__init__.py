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
        http_push,
        iterator,
        jsonl,
        memory,
        parquet,
        punctuated,
        read_output,
        simple_reader,
        socket,
        spark_reader,
        spark_table,
        words,
    )
    from penstock.engines.job import Job, run, run_local
    from penstock.errors import PenstockError
    from penstock.flow import Flow, KeyedStream, Stream, WindowedStream
    from penstock.observe.status import JobStatus, OperatorStatus, StageStatus
    from penstock.operators.aggregates import (
        Aggregate,
        Aggregator,
        aggregator,
        approx_distinct,
        collect,
        count,
        distinct,
        first,
        first_row,
        heavy_hitters,
        last,
        last_row,
        max,
        mean,
        min,
        quantile,
        std,
        sum,
        top,
        variance,
    )
    from penstock.operators.batch import Batch, BatchOperator, State, column
    from penstock.operators.count_windows import last_rows
    from penstock.operators.custom import Emit, Event, Operator
    from penstock.operators.event_time import CLOCK
    from penstock.operators.joins import edge, interval, point, versions, within
    from penstock.operators.sessions import session
    from penstock.operators.statelib import (
        CountWindow,
        List,
        Map,
        Queue,
        Time,
        Timers,
        TimeWindow,
        Value,
        expires,
        keep,
    )
    from penstock.operators.windows import hopping, tumbling

from penstock.version import __version__

__all__ = [
    "CLOCK",
    "Aggregate",
    "Aggregator",
    "BadRecord",
    "Batch",
    "BatchOperator",
    "Config",
    "CountWindow",
    "Emit",
    "Event",
    "Flow",
    "Job",
    "JobStatus",
    "KeyedStream",
    "List",
    "Map",
    "Operator",
    "OperatorStatus",
    "PenstockError",
    "Queue",
    "ReadResult",
    "Sink",
    "Source",
    "SourceRange",
    "StageStatus",
    "State",
    "Stream",
    "Time",
    "TimeWindow",
    "Timers",
    "Value",
    "WindowedStream",
    "__version__",
    "aggregator",
    "approx_distinct",
    "collect",
    "column",
    "console",
    "count",
    "csv",
    "dataframe",
    "dataframe_writer",
    "discard",
    "distinct",
    "edge",
    "expires",
    "files",
    "first",
    "first_row",
    "foreach_batch",
    "generator",
    "heavy_hitters",
    "hopping",
    "http_push",
    "interval",
    "iterator",
    "jsonl",
    "keep",
    "last",
    "last_row",
    "last_rows",
    "max",
    "mean",
    "memory",
    "min",
    "parquet",
    "point",
    "punctuated",
    "quantile",
    "read_output",
    "run",
    "run_local",
    "session",
    "simple_reader",
    "socket",
    "spark_reader",
    "spark_table",
    "std",
    "sum",
    "top",
    "tumbling",
    "variance",
    "versions",
    "within",
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
        "http_push",
        "iterator",
        "jsonl",
        "memory",
        "parquet",
        "punctuated",
        "read_output",
        "simple_reader",
        "socket",
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
        "StageStatus",
    ),
    "penstock.operators.aggregates": (
        "Aggregate",
        "Aggregator",
        "aggregator",
        "approx_distinct",
        "collect",
        "count",
        "distinct",
        "first",
        "first_row",
        "heavy_hitters",
        "last",
        "last_row",
        "max",
        "mean",
        "min",
        "quantile",
        "std",
        "sum",
        "top",
        "variance",
    ),
    "penstock.operators.batch": (
        "Batch",
        "BatchOperator",
        "State",
        "column",
    ),
    "penstock.operators.count_windows": ("last_rows",),
    "penstock.operators.custom": (
        "Emit",
        "Event",
        "Operator",
    ),
    "penstock.operators.event_time": ("CLOCK",),
    "penstock.operators.joins": (
        "edge",
        "interval",
        "point",
        "versions",
        "within",
    ),
    "penstock.operators.sessions": ("session",),
    "penstock.operators.statelib": (
        "CountWindow",
        "List",
        "Map",
        "Queue",
        "Time",
        "TimeWindow",
        "Timers",
        "Value",
        "expires",
        "keep",
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
