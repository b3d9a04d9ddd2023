"""How much the tests try. ``make test`` is what every change must pass, in minutes; ``make test-all`` is everything."""

from __future__ import annotations

import os

THOROUGH = os.environ.get("PENSTOCK_THOROUGH", "0") not in ("", "0")


def scaled(few: int, many: int) -> int:
    """``few`` in ``make test``, ``many`` in ``make test-all``."""
    return many if THOROUGH else few
