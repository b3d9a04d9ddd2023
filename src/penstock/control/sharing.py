"""How the rows of an epoch are shared among several sources.

Equal shares would read one source far ahead in event time where another has 46 times as many rows: joins and windows
then keep the rows of the one until the rows of the other come. So each source gets its part of what waits. Results do
not depend on the shares.
"""

from __future__ import annotations

from collections.abc import Mapping

LEAST_PART = 64
"""Every source gets at least this part of an equal share, for rows may have come to one that seemed to have none."""


def shares(rows_max: int, backlogs: Mapping[str, int | None]) -> dict[str, int]:
    """Rows that each source may give to the next epoch: about ``rows_max`` together, at least one each.

    ``backlogs``: rows that wait in each source. If one of them is not known, or nothing waits, the shares are equal.
    """
    if not backlogs:
        return {}
    total = sum(rows or 0 for rows in backlogs.values())
    if not total or None in backlogs.values():
        return dict.fromkeys(backlogs, max(1, rows_max // len(backlogs)))
    least = max(1, rows_max // (LEAST_PART * len(backlogs)))
    return {name: max(least, round(rows_max * (rows or 0) / total)) for name, rows in backlogs.items()}


__all__ = ["LEAST_PART", "shares"]
