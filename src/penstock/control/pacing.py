"""How many rows the next epoch may have.

The size follows the measured speed, so that an epoch takes about half the target latency: a row waits for the epoch
before its own and then for its own. Changes are damped and bounded; a fixed size can be asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Pacer:
    rows_max: int
    floor: int
    ceiling: int
    target_ms: float
    fixed: bool = False

    @staticmethod
    def start(fixed: int | None, floor: int, ceiling: int, target_latency_ms: float) -> Pacer:
        if fixed is not None:
            return Pacer(fixed, fixed, fixed, target_latency_ms / 2, True)
        return Pacer(max(floor, min(ceiling, 20_000)), floor, ceiling, target_latency_ms / 2)

    def observe(self, rows: int, elapsed_ms: float) -> Pacer:
        """An epoch of ``rows`` took ``elapsed_ms`` from its start to its end."""
        if self.fixed or rows <= 0 or elapsed_ms <= 0:
            return self
        wanted = rows * self.target_ms / elapsed_ms
        if wanted > self.rows_max and rows < 0.8 * self.rows_max:
            return self  # a small epoch says nothing about how large one could be
        bounded = min(max(wanted, 0.5 * self.rows_max), 2.0 * self.rows_max)
        smooth = 0.5 * self.rows_max + 0.5 * bounded
        return replace(self, rows_max=int(min(max(smooth, self.floor), self.ceiling)))
