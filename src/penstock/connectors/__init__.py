"""Sources and sinks. ``base`` says what they are; users call the lower-case functions, as ``ps.files(...)``."""

from __future__ import annotations

from penstock.connectors.base import (
    Backlog,
    BadRecord,
    ReadResult,
    Sink,
    SinkContext,
    Source,
    SourceContext,
    SourceRange,
)
from penstock.connectors.files import files
from penstock.connectors.generator import generator, words
from penstock.connectors.punctuation import punctuated
from penstock.connectors.push import http_push, iterator, socket
from penstock.connectors.rows import bad_records_frame, polars_schema
from penstock.connectors.sinks import (
    console,
    csv,
    discard,
    foreach_batch,
    jsonl,
    memory,
    parquet,
    read_output,
)
from penstock.connectors.spark_sinks import dataframe_writer, spark_table
from penstock.connectors.spark_sources import dataframe, simple_reader, spark_reader

__all__ = [
    "Backlog",
    "BadRecord",
    "ReadResult",
    "Sink",
    "SinkContext",
    "Source",
    "SourceContext",
    "SourceRange",
    "bad_records_frame",
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
    "polars_schema",
    "punctuated",
    "read_output",
    "simple_reader",
    "socket",
    "spark_reader",
    "spark_table",
    "words",
]
