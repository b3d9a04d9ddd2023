"""The public names: this list, no more, no less."""

from __future__ import annotations

import penstock as ps

PUBLIC = [
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


def test_the_public_names_are_exactly_these() -> None:
    assert list(ps.__all__) == PUBLIC
    assert dir(ps) == sorted(PUBLIC)


def test_each_can_be_reached_and_says_what_it_is() -> None:
    for name in PUBLIC:
        value = getattr(ps, name)
        if callable(value):
            assert value.__doc__, f"ps.{name} has no docstring"


def test_what_is_not_there_is_refused() -> None:
    assert not hasattr(ps, "compile_flow")


def test_the_testing_module_is_exported_by_itself() -> None:
    from penstock import testing

    for name in testing.__all__:
        assert getattr(testing, name).__doc__, f"testing.{name} has no docstring"
