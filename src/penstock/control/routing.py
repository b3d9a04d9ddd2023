"""The routing table: which container of a stage owns which slice.

One immutable, versioned value. Version v takes effect at an epoch, by the log; nobody ever sees half of one. The
number of slices is set once for the life of a job; everything else may change between two epochs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import ConfigError
from penstock.ids import ContainerId, RoutingVersion, SliceId, StageId

INSTANCES_MAX = 1024


@dataclass(frozen=True)
class RoutingTable:
    version: RoutingVersion
    slices: int
    owners: Mapping[StageId, tuple[ContainerId, ...]]
    """Keyed stages: the owner of each slice."""
    instances: Mapping[StageId, int]
    """All stages, sources too."""

    @staticmethod
    def initial(
        slices: int, stages: Mapping[StageId, bool], instances: int, own: Mapping[StageId, int] | None = None
    ) -> RoutingTable:
        """``stages``: id -> is it keyed; ``own``: those that ask for a number of instances of their own.

        Slices are dealt out in contiguous arcs.
        """
        counts = {stage: (own or {}).get(stage, instances) for stage in stages}
        counts = {stage: min(n, slices) if stages[stage] else n for stage, n in counts.items()}
        return RoutingTable(
            RoutingVersion(1),
            slices,
            {
                stage: tuple(ContainerId(s * counts[stage] // slices) for s in range(slices))
                for stage, keyed in stages.items()
                if keyed
            },
            counts,
        )

    def slices_of(self, stage: StageId, container: int) -> tuple[SliceId, ...]:
        return tuple(SliceId(s) for s, c in enumerate(self.owners[stage]) if c == container)

    def rescale(self, stage: StageId, instances: int) -> RoutingTable:
        """A new version with another number of instances of one stage, moving as few slices as balance allows."""
        if stage not in self.instances:
            raise ConfigError(
                f"there is no stage '{stage}' to rescale.",
                remedy=f"The stages are {', '.join(self.instances)}.",
            )
        if not 1 <= instances <= INSTANCES_MAX:
            raise ConfigError(f"a stage cannot have {instances} instances.", remedy=f"Use 1 to {INSTANCES_MAX}.")
        if stage in self.owners and instances > self.slices:
            raise ConfigError(
                f"stage '{stage}' cannot have {instances} instances: it has only {self.slices} slices.",
                remedy="Slices are set at the first run; choose as many as the cores that the job may ever use.",
            )
        owners = dict(self.owners)
        if stage in owners:
            owners[stage] = rebalance(owners[stage], instances)
        return RoutingTable(RoutingVersion(self.version + 1), self.slices, owners, {**self.instances, stage: instances})

    def moved(self, other: RoutingTable) -> int:
        """How many slices have another owner in ``other``."""
        return sum(
            a != b for stage, mine in self.owners.items() for a, b in zip(mine, other.owners[stage], strict=True)
        )

    def validate(self) -> None:
        for stage, owners in self.owners.items():
            assert len(owners) == self.slices, f"stage {stage} has {len(owners)} of {self.slices} slices"
            assert set(owners) == set(range(self.instances[stage])), f"stage {stage}: a container without slices"

    def to_json(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "slices": self.slices,
            "owners": {s: list(o) for s, o in self.owners.items()},
            "instances": dict(self.instances),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> RoutingTable:
        return RoutingTable(
            RoutingVersion(data["version"]),
            data["slices"],
            {StageId(s): tuple(ContainerId(c) for c in o) for s, o in data["owners"].items()},
            {StageId(s): n for s, n in data["instances"].items()},
        )


def rebalance(owners: tuple[ContainerId, ...], instances: int) -> tuple[ContainerId, ...]:
    """Even shares with the fewest moves: everyone keeps what fits in its share, the rest fills the gaps in order."""
    total = len(owners)
    share = [total // instances + (1 if c < total % instances else 0) for c in range(instances)]
    # Containers that already hold more get the larger shares, so that an uneven division moves nothing needlessly.
    held = [0] * instances
    for c in owners:
        if c < instances:
            held[c] += 1
    ranked = sorted(range(instances), key=lambda c: (-held[c], c))
    room = dict(zip(ranked, sorted(share, reverse=True), strict=True))
    result: list[int] = [-1] * total
    for s, c in enumerate(owners):
        if c < instances and room[c] > 0:
            result[s] = c
            room[c] -= 1
    gaps = [c for c in range(instances) for _ in range(room[c])]
    fill = iter(gaps)
    return tuple(ContainerId(c if c >= 0 else next(fill)) for c in result)
