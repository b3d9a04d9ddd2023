"""The routing table in force."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.control.concern import Concern
from penstock.control.routing import RoutingTable
from penstock.ids import StageId

if TYPE_CHECKING:
    from penstock.control.controller import Controller


class Routes(Concern):
    """Holds the newest routing table. Epochs under way keep the tables that they were planned with."""

    def __init__(self, core: Controller, table: RoutingTable) -> None:
        super().__init__(core)
        self.table = table

    def put(self, table: RoutingTable) -> None:
        self.table = table

    def amend(self, **changes: Any) -> None:
        """Change some columns of the table. The version grows if an epoch under way knows this one."""
        seen = any(run.routing.version == self.table.version for run in self.core.epochs.in_flight.values())
        self.put(self.table.change(**changes) if seen else replace(self.table, **changes))

    def assign_owners(self, changes: Mapping[StageId, tuple[int, ...]]) -> None:
        """Give the slices of some stages other owners, if any owner is another."""
        if any(owners != self.table.owners[stage] for stage, owners in changes.items()):
            self.put(self.table.change(owners={**self.table.owners, **changes}))

    def validate(self) -> None:
        self.table.validate()
