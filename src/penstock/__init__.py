"""Penstock: elastic, exactly-once, stateful stream processing in Python on Apache Spark."""

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
