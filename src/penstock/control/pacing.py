"""How many rows the next epoch may have.

The size follows the measured speed, so that an epoch takes about half the target latency: a row waits for the epoch
before its own and then for its own. An epoch has a fixed cost and a cost for each row, and both are estimated. A model
without the fixed cost would shrink epochs for ever on a machine where the fixed cost alone misses the target; with it
the size settles where the fixed cost is half of an epoch. Changes are damped and bounded. A user may ask for a fixed
size.

When several epochs in a row are as large as they may be, rows wait in the source. Small epochs then keep no target,
because the rows wait there instead, longer and longer. So epochs grow until the fixed cost is a tenth of them, and the
job catches up as fast as it can.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MEMORY = 0.9
"""Weight of the older epochs against each new one."""

BEHIND_EPOCHS = 4
"""Full epochs in a row after which rows are taken to wait in the source."""

BEHIND_FACTOR = 8.0
"""The longest such an epoch may take, in times of the target."""


@dataclass(frozen=True)
class Pacer:
    rows_max: int
    floor: int
    ceiling: int
    target_ms: float
    fixed: bool = False
    sums: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0, 0.0)
    """Decaying sums over epochs: 1, rows, rows squared, ms, rows times ms."""
    full: int = 0
    """Epochs in a row that were as large as they might be."""

    @staticmethod
    def start(fixed: int | None, floor: int, ceiling: int, target_latency_ms: float) -> Pacer:
        if fixed is not None:
            return Pacer(fixed, fixed, fixed, target_latency_ms / 2, True)
        return Pacer(max(floor, min(ceiling, 20_000)), floor, ceiling, target_latency_ms / 2)

    def observe(self, rows: int, elapsed_ms: float) -> Pacer:
        """An epoch of ``rows`` took ``elapsed_ms`` from its start to its end."""
        if self.fixed or rows <= 0 or elapsed_ms <= 0:
            return self
        new = (1.0, rows, rows * rows, elapsed_ms, rows * elapsed_ms)
        sums = tuple(MEMORY * old + x for old, x in zip(self.sums, new, strict=True))
        pacer = replace(self, sums=sums, full=self.full + 1 if rows >= 0.9 * self.rows_max else 0)
        wanted = pacer.wanted()
        if wanted > self.rows_max and rows < 0.8 * self.rows_max:
            return pacer  # a small epoch says nothing about how large one could be
        bounded = min(max(wanted, 0.5 * self.rows_max), 2.0 * self.rows_max)
        smooth = 0.5 * self.rows_max + 0.5 * bounded
        return replace(pacer, rows_max=int(min(max(smooth, self.floor), self.ceiling)))

    def wanted(self) -> float:
        """Rows for which an epoch would take the target time, as far as is known."""
        fixed_ms, row_ms = self.costs()
        row_ms = max(row_ms, 1e-9)  # a clock that hardly moved
        epoch_ms = max(self.target_ms, 2 * fixed_ms)
        if self.full >= BEHIND_EPOCHS:
            epoch_ms = max(epoch_ms, min(10 * fixed_ms, BEHIND_FACTOR * self.target_ms))
        return (epoch_ms - fixed_ms) / row_ms

    def costs(self) -> tuple[float, float]:
        """Milliseconds of an epoch, and of each of its rows: a line through the epochs seen."""
        n, r, rr, t, rt = self.sums
        rows, ms = r / n, t / n
        variance = rr / n - rows * rows
        if variance <= (0.05 * rows) ** 2:
            return 0.0, ms / rows  # all of one size: the two parts cannot be told apart
        slope = (rt / n - rows * ms) / variance
        row_ms = min(max(slope, 0.05 * ms / rows), ms / rows)  # neither part is negative, nor the row's nothing
        return ms - row_ms * rows, row_ms
