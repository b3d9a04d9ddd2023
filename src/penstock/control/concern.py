"""What the parts of the controller have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.control.controller import Controller


class Concern:
    """A part of the controller. It owns the state of one concern, and asks the other parts through ``core``.

    Only a part's own methods change its state. ``core`` is a link, not state: copies and the journal leave it out.
    """

    LINKS = frozenset({"core"})

    def __init__(self, core: Controller) -> None:
        self.core = core

    def validate(self) -> None:
        """Assert what must hold of this part after every step."""
