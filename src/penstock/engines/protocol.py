"""What an engine must do. Three stand behind this: Spark (the product), local (the oracle), and the simulator.

An engine turns commands into work and answers each with exactly one event through ``post``, also when the work fails
or is cancelled: the controller waits for all of a failed attempt to be gone before it starts the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from penstock.control.events import (
    Compact,
    Event,
    Flush,
    RunStage,
    WarmUp,
)
from penstock.control.records import NodeInfo
from penstock.control.routing import RoutingTable
from penstock.engines.merging import Merging
from penstock.ids import Attempt

Post = Callable[[Event], None]


class Engine(Protocol):
    name: str

    def start(self, post: Post) -> None:
        """Bring up whatever is needed. Raise MachineError or EngineError with a remedy if that is impossible."""

    @property
    def cores(self) -> int:
        """Default parallelism of a stage."""

    @property
    def spark(self) -> Any:
        """The SparkSession, for connectors; None elsewhere."""

    def run_stage(self, command: RunStage, splits: list[dict[str, Any]]) -> None:
        """Answered by StageDone or StageFailed."""

    def flush(self, command: Flush) -> None:
        """Answered by Flushed or StageFailed(stage="flush")."""

    def prepare(self, routing: RoutingTable) -> None:
        """Before the first epoch: bring up in the background what will be needed."""

    def warm_up(self, command: WarmUp) -> None:
        """Answered by WarmedUp, whether it worked or not."""

    def compact(self, command: Compact, run: Callable[[Merging], Event]) -> None:
        """Run ``run`` in the background, with a way to merge files, and post its event."""

    def cancel(self, attempt: Attempt) -> None:
        """Stop what is running of attempts before this one as soon as may be; each still answers."""

    def release(self, epoch: int) -> None:
        """Shuffle files of this epoch may go."""

    def nodes(self) -> tuple[NodeInfo, ...]:
        """The nodes there are now. When they change, NodesChanged is posted."""

    def release_nodes(self, nodes: Sequence[str]) -> None:
        """Nobody needs these nodes any more."""

    def stop(self) -> None: ...
