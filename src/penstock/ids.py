"""Distinct id types, so that a slice is never mistaken for a container.

They cost nothing at run time; mypy keeps them apart.
"""

from __future__ import annotations

from typing import NewType

OperatorId = NewType("OperatorId", str)
"""The stable name a user gives to a step. State survives edits of the flow by it."""

StageId = NewType("StageId", str)
"""A stage is named after the operator at its root: a source or a stateful operator."""

SliceId = NewType("SliceId", int)
"""A fixed share of a stage's keys, 0 .. slices-1."""

ContainerId = NewType("ContainerId", int)
"""The index of a container within its stage, 0 .. instances-1."""

NodeId = NewType("NodeId", str)
"""A Spark executor (``driver`` in local mode)."""

Epoch = NewType("Epoch", int)
"""Number of an epoch; the first is 1. ``0`` means "before any input"."""

RoutingVersion = NewType("RoutingVersion", int)
"""Version of the routing table; it grows with every change."""

PlanVersion = NewType("PlanVersion", int)
"""Version of the plan that an epoch runs with."""

Attempt = NewType("Attempt", int)
"""Counts recoveries and restarts. Work of an older attempt is never accepted."""

NO_EPOCH = Epoch(0)

FIRST_PLAN = PlanVersion(1)

INSTANCES_MAX = 4_096
"""The most containers that a stage can have."""
