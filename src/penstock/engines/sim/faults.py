"""What can go wrong, how often, and a store in which it does.

Every seed draws its own mixture: most kinds of fault are off in most seeds, and those that are on may be rare or
frequent. A world in which everything fails all the time only ever tests the first few steps of a recovery.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from penstock.state.store import MemoryStore

ON_PURPOSE = "fails on purpose"
"""In the text of every error that the simulator makes."""


class DriverDied(BaseException):
    """The driver's process is gone, in the middle of what it was doing. No ``except Exception`` can stop that."""


def _often(low: float, high: float, share: float) -> Any:
    """A rate between two bounds, in this share of all seeds; else 0."""

    def draw(r: random.Random) -> float:
        return r.uniform(low, high) if r.random() < share else 0.0

    return draw


@dataclass
class Faults:
    """Rates: ``_s`` a virtual second, the others a chance for each operation."""

    node_crash_s: float = 0.0
    driver_crash_s: float = 0.0
    clock_jump_s: float = 0.0
    store_away_s: float = 0.0
    """The store does not answer for a while: whoever needs it waits."""
    rescale_s: float = 0.0
    stop_s: float = 0.0
    dies_in_write: float = 0.0
    """The driver dies right before or after a write to the store."""
    dies_at_step: float = 0.0
    """The driver dies between two steps of a commit."""
    put_fails: float = 0.0
    """Nothing is written."""
    put_unsure: float = 0.0
    """It is written, and the answer is an error."""
    get_fails: float = 0.0
    delete_fails: float = 0.0
    part_fails: float = 0.0
    commit_fails: float = 0.0
    commit_unsure: float = 0.0
    torn: float = 0.0
    """With a driver's death, the newest checkpoint loses its end."""
    duplicate: float = 0.0
    """A result arrives twice."""
    lost_task: float = 0.0
    """A task ends without a result."""
    lost_slot: float = 0.0
    """A worker process goes away between two tasks, as Spark ends idle ones."""
    zombie: float = 0.0
    """A task of cancelled work goes on for a while, unseen, in a process of its own."""
    hang: float = 0.0
    """A task never ends."""
    spill_fails: float = 0.0
    """A node's local disk does not take what does not fit into memory."""
    move_s: float = 0.0
    """Somebody moves slices, or calls it off."""
    leave_s: float = 0.0
    """Somebody lets a node go."""
    slow_node: float = 0.0
    slow_write: float = 0.0
    slow_answer: float = 0.0

    @staticmethod
    def draw(r: random.Random) -> Faults:
        drawn = Faults(**{name: draw(r) for name, draw in _MIXTURE.items()})
        if drawn.torn:
            drawn.driver_crash_s = max(0.4, drawn.driver_crash_s)  # a power cut that tears files ends the driver
        return drawn

    @staticmethod
    def storm(r: random.Random) -> Faults:
        """Around orders: what makes them late or has them forgotten, and little that fails of itself."""
        return Faults(**{name: draw(r) for name, draw in _STORM.items()})

    def kinds(self) -> list[str]:
        return [f.name for f in fields(self) if getattr(self, f.name) > 0]


_MIXTURE: dict[str, Callable[[random.Random], float]] = {
    "node_crash_s": _often(0.05, 0.8, 0.5),
    "driver_crash_s": _often(0.05, 0.5, 0.4),
    "clock_jump_s": _often(0.2, 2.0, 0.2),
    "store_away_s": _often(0.2, 0.8, 0.3),
    "rescale_s": _often(0.2, 1.5, 0.5),
    "stop_s": _often(0.05, 0.3, 0.25),
    "dies_in_write": _often(0.005, 0.06, 0.3),
    "dies_at_step": _often(0.005, 0.06, 0.3),
    "put_fails": _often(0.005, 0.08, 0.25),
    "put_unsure": _often(0.005, 0.08, 0.25),
    "get_fails": _often(0.005, 0.05, 0.2),
    "delete_fails": _often(0.01, 0.1, 0.15),
    "part_fails": _often(0.005, 0.05, 0.2),
    "commit_fails": _often(0.01, 0.1, 0.2),
    "commit_unsure": _often(0.01, 0.1, 0.2),
    "torn": _often(0.4, 1.0, 0.25),
    "duplicate": _often(0.02, 0.4, 0.35),
    "lost_task": _often(0.005, 0.05, 0.3),
    "lost_slot": _often(0.005, 0.05, 0.25),
    "zombie": _often(0.2, 0.9, 0.4),
    "hang": _often(0.001, 0.01, 0.15),
    "spill_fails": _often(0.05, 0.5, 0.2),
    "move_s": _often(0.3, 3.0, 0.4),
    "leave_s": _often(0.05, 0.4, 0.2),
    "slow_node": _often(0.1, 0.5, 0.3),
    "slow_write": _often(0.1, 0.6, 0.35),
    "slow_answer": _often(0.05, 0.4, 0.3),
}


_STORM: dict[str, Callable[[random.Random], float]] = {
    "driver_crash_s": _often(0.03, 0.15, 0.25),
    "store_away_s": _often(0.1, 0.3, 0.15),
    "dies_at_step": _often(0.002, 0.01, 0.1),
    "put_fails": _often(0.002, 0.01, 0.1),
    "get_fails": _often(0.002, 0.01, 0.1),
    "torn": _often(0.2, 0.5, 0.1),
    "duplicate": _often(0.02, 0.4, 0.35),
    "lost_task": _often(0.001, 0.005, 0.25),
    "lost_slot": _often(0.002, 0.02, 0.25),
    "zombie": _often(0.2, 0.9, 0.4),
    "hang": _often(0.0005, 0.002, 0.15),
    "spill_fails": _often(0.05, 0.5, 0.2),
    "slow_node": _often(0.1, 0.5, 0.3),
    "slow_write": _often(0.1, 0.4, 0.3),
    "slow_answer": _often(0.05, 0.3, 0.3),
}


class Disk:
    """What outlives every process: names and whole values, written through ``StoreView``."""

    def __init__(self) -> None:
        self.memory = MemoryStore()

    @property
    def items(self) -> dict[str, bytes]:
        return self.memory.items

    def tear(self, name: str, r: random.Random) -> None:
        """A power cut took the end of a file that was thought to be durable."""
        data = self.items[name]
        self.items[name] = data[: r.randrange(len(data))] if data else b""


class StoreView:
    """The store, as one process sees it. ``dies``: whether its process may die of a write (the driver does)."""

    def __init__(
        self, disk: Disk, faults: Callable[[], Faults], r: random.Random, tell: Callable[[str, str], None], dies: bool
    ) -> None:
        self._disk = disk
        self._faults = faults
        self._random = r
        self._tell = tell
        self._dies = dies

    def _error(self, what: str, name: str) -> OSError:
        self._tell("fault", f"{what} of {name} {ON_PURPOSE}")
        return OSError(errno.EIO, f"{what} {ON_PURPOSE}", name)

    def _write(self, what: str, name: str, effect: Callable[[], Any], fails: float, unsure: float) -> Any:
        faults, r = self._faults(), self._random
        if self._dies and r.random() < faults.dies_in_write:
            if r.random() < 0.5:
                effect()
            self._tell("fault", f"the driver dies in {what} of {name}")
            raise DriverDied
        if r.random() < fails:
            raise self._error(what, name)
        result = effect()
        if r.random() < unsure:
            raise self._error(f"{what} (which took effect)", name)
        return result

    def put(self, name: str, data: bytes) -> None:
        f = self._faults()
        self._write("put", name, lambda: self._disk.memory.put(name, data), f.put_fails, f.put_unsure)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        f = self._faults()
        effect = lambda: self._disk.memory.put_if_absent(name, data)  # noqa: E731
        return bool(self._write("put", name, effect, f.put_fails, f.put_unsure))

    def delete(self, name: str) -> None:
        f = self._faults()
        self._write("delete", name, lambda: self._disk.memory.delete(name), f.delete_fails, 0.0)

    def get(self, name: str) -> bytes:
        if self._random.random() < self._faults().get_fails:
            raise self._error("get", name)
        return self._disk.memory.get(name)

    def exists(self, name: str) -> bool:
        return self._disk.memory.exists(name)

    def list(self, prefix: str = "") -> list[str]:
        if self._random.random() < self._faults().get_fails:
            raise self._error("list", prefix)
        return self._disk.memory.list(prefix)


__all__ = ["ON_PURPOSE", "Disk", "DriverDied", "Faults", "StoreView"]
