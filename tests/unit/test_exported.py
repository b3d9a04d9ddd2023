"""The public names: this list, no more, no less."""

from __future__ import annotations

import penstock as ps

PUBLIC = [
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


def test_the_public_names_are_exactly_these() -> None:
    assert list(ps.__all__) == PUBLIC
    assert dir(ps) == PUBLIC


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
