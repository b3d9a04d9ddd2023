"""Every error Penstock raises, in one tree.

::

    PenstockError
    |-- FlowError            the flow itself is wrong: raised while it is being built
    |-- ConfigError          a setting, flag or file has a wrong value
    |-- MachineError         Java, PySpark, memory, packages: the machine is not ready
    |-- SourceError          an input is missing, unreadable or not what it was
    |-- SinkError            an output cannot be written, or belongs to another job
    |-- UserCodeError        a user's function raised; names operator, epoch and record
    |-- BadRecordError       a malformed record, under ``on_error="fail"``
    |-- CheckpointError      the checkpoint directory cannot be used
    |   |-- CheckpointInUse      another job holds it
    |   |-- CorruptData          a file does not match its checksum or its header
    |   |-- StoreAway            the store did not answer for longer than the job may go on without it
    |   `-- IncompatibleFlow     the flow changed in a way its state cannot follow
    |-- StorageFull          no room left on a device that Penstock writes to
    `-- EngineError          Spark failed in a way that Penstock could not recover from

Messages say what happened, where, and what to do. ``remedy`` is the last part, kept apart so that the command line
can set it on a line of its own. All of them survive pickling, because they travel from Spark executors to the driver.
"""

from __future__ import annotations

from typing import Any


class PenstockError(Exception):
    """Base of all errors. ``evidence`` holds the facts (operator, epoch, path, record ...)."""

    def __init__(self, message: str, *, remedy: str = "", **evidence: Any) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.evidence = evidence

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}".strip()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.remedy, self.evidence))


def _rebuild(cls: type[PenstockError], message: str, remedy: str, evidence: dict[str, Any]) -> PenstockError:
    return cls(message, remedy=remedy, **evidence)


class FlowError(PenstockError):
    """The flow is wrong; raised while it is being built, naming the operator."""


class ConfigError(PenstockError):
    """A setting, a flag or a configuration file has a wrong value."""


class MachineError(PenstockError):
    """Java, PySpark, memory or packages: the machine is not ready."""


class SourceError(PenstockError):
    """An input is missing, unreadable, or no longer what it was when its range was logged."""


class SinkError(PenstockError):
    """An output cannot be written, or belongs to another job."""


class UserCodeError(PenstockError):
    """A user's function raised. Evidence: ``operator``, ``epoch``, ``record``, ``cause``."""


class BadRecordError(PenstockError):
    """A malformed record under ``on_error="fail"``. Evidence: ``source``, ``offset``, ``reason``, ``raw``."""


class CheckpointError(PenstockError):
    """The checkpoint directory cannot be used."""


class CheckpointInUse(CheckpointError):
    """Another live job holds the checkpoint directory."""


class CorruptData(CheckpointError):
    """A file does not match its checksum or header. Evidence: ``path``."""


class StoreAway(CheckpointError):
    """The store did not answer for longer than ``store_away_s``. Evidence: ``path``, ``tries``."""


class IncompatibleFlow(CheckpointError):
    """The flow changed in a way its state cannot follow. Evidence: ``changes``."""


class StorageFull(PenstockError):
    """No room left on a device Penstock writes to. Evidence: ``path``."""


class EngineError(PenstockError):
    """The engine failed in a way that Penstock could not recover from."""
