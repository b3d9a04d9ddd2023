"""Errors travel from executors to the driver, and through the command line, without losing anything."""

from __future__ import annotations

import inspect
import pickle

import pytest

from penstock import errors
from penstock.engines.runtime import raised
from penstock.engines.task import task_error
from penstock.errors import PenstockError

KINDS = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, PenstockError)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda c: c.__name__)
def test_an_error_survives_pickling(kind: type[PenstockError]) -> None:
    error = kind("It broke.", remedy="Mend it.", operator="counts", epoch=3, record="{'a': 1}")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (again.message, again.remedy, again.evidence) == (error.message, error.remedy, error.evidence)
    assert str(again) == "It broke. Mend it."


@pytest.mark.parametrize("kind", KINDS, ids=lambda c: c.__name__)
def test_an_error_survives_a_control_record(kind: type[PenstockError]) -> None:
    error = kind("It broke.", remedy="Mend it.", operator="counts", epoch=3, changes=["a", "b"])
    again = raised(task_error(error))
    assert type(again) is kind
    assert str(again) == str(error)
    assert again.evidence == {"operator": "counts", "epoch": 3, "changes": "['a', 'b']"}


def test_without_a_remedy_the_message_stands_alone() -> None:
    assert str(errors.FlowError("It broke.")) == "It broke."


def test_an_unknown_kind_becomes_an_engine_error() -> None:
    from penstock.control.records import TaskError

    assert type(raised(TaskError(kind="FromTheFuture", message="x"))) is errors.EngineError


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    for kind in KINDS:
        assert kind.__name__ in (errors.__doc__ or "")
    assert issubclass(errors.CorruptData, errors.CheckpointError)
    assert issubclass(errors.CheckpointInUse, errors.CheckpointError)
    assert issubclass(errors.IncompatibleFlow, errors.CheckpointError)
