"""The routing table: which container of a stage owns which slice, on which node it lives, and who keeps copies.

One immutable, versioned value. Version v takes effect at an epoch, by the log; nobody ever sees half of one. Each
keyed stage has a number of slices, set once for the life of a job. Everything else may change between two epochs.

A container's number is its place in the exchanges between stages, so it does not change when its node goes: a container
may be *vacant* (it owns nothing) until it gets another node, or slices again. The whole table is in the log. Nodes come
and go with Spark's executors: at a start, containers whose node is gone get another one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.errors import ConfigError
from penstock.ids import INSTANCES_MAX, ContainerId, RoutingVersion, SliceId, StageId
from penstock.state.slicemap import SliceMap


@dataclass(frozen=True)
class RoutingTable:
    version: RoutingVersion
    slicemaps: Mapping[StageId, SliceMap]
    """Keyed stages: the slice of each key."""
    owners: Mapping[StageId, tuple[ContainerId, ...]]
    """Keyed stages: the owner of each slice."""
    instances: Mapping[StageId, int]
    """All stages, sources too."""
    homes: Mapping[StageId, Mapping[int, str]] = field(default_factory=dict)
    """stage -> container -> node. Containers that are left out have no node."""
    holders: Mapping[StageId, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    """Stateful stages: the containers that keep a backup of each slice."""
    cores: Mapping[str, int] = field(default_factory=dict)
    """Nodes with a limit -> containers of each stage that work there. The other containers of the node are vacant."""

    @staticmethod
    def initial(
        slices: int,
        stages: Mapping[StageId, bool],
        instances: int,
        own_instances: Mapping[StageId, int] | None = None,
        own_slices: Mapping[StageId, int] | None = None,
    ) -> RoutingTable:
        """The first version. ``stages``: id -> is it keyed. ``slices`` and ``instances`` hold for every stage that has
        no number of its own in ``own_slices`` or ``own_instances``.

        Slices are dealt out in contiguous arcs.
        """
        slicemaps = {s: SliceMap((own_slices or {}).get(s, slices)) for s, keyed in stages.items() if keyed}
        counts = {stage: (own_instances or {}).get(stage, instances) for stage in stages}
        counts = {s: min(n, slicemaps[s].count) if s in slicemaps else n for s, n in counts.items()}
        owners = {
            stage: tuple(ContainerId(s * counts[stage] // m.count) for s in range(m.count))
            for stage, m in slicemaps.items()
        }
        return RoutingTable(RoutingVersion(1), slicemaps, owners, counts)

    def slices_in(self, stage: StageId) -> int:
        """The number of slices of a keyed stage."""
        return self.slicemaps[stage].count

    @property
    def slices_most(self) -> int:
        """The number of slices of the stage that has most; 0 without a keyed stage."""
        return max((m.count for m in self.slicemaps.values()), default=0)

    def homes_of(self, stage: StageId) -> Mapping[int, str]:
        """container of the stage -> node"""
        return self.homes.get(stage, {})

    def homes_on(self, nodes: Collection[str]) -> dict[StageId, set[int]]:
        """The containers of each stage that live on these nodes."""
        return {s: {c for c, node in self.homes_of(s).items() if node in nodes} for s in self.instances}

    def slices_of(self, stage: StageId, container: int) -> tuple[SliceId, ...]:
        return tuple(SliceId(s) for s, c in enumerate(self.owners[stage]) if c == container)

    def occupied(self, stage: StageId) -> tuple[int, ...]:
        """Containers of a stage that have something to do: those with slices, or all of a source's."""
        return tuple(sorted(set(self.owners[stage]))) if stage in self.owners else tuple(range(self.instances[stage]))

    def copies_on(self, stage: StageId, container: int) -> frozenset[int]:
        """Slices that a container is to keep a backup of."""
        return frozenset(s for s, held in enumerate(self.holders.get(stage, ())) if container in held)

    def change(self, **changes: Any) -> RoutingTable:
        """The next version."""
        return replace(self, version=RoutingVersion(self.version + 1), **changes)

    def moved_to(self, stage: StageId, moves: Mapping[int, int]) -> RoutingTable:
        """Some slices of a stage with other owners."""
        owners = tuple(ContainerId(moves.get(s, c)) for s, c in enumerate(self.owners[stage]))
        return self.change(owners={**self.owners, stage: owners})

    def resized(self, stage: StageId, instances: int) -> RoutingTable:
        """Room for so many containers; slices stay where they are."""
        self.check(stage, instances)
        return self.change(instances={**self.instances, stage: instances})

    def rescale(self, stage: StageId, instances: int) -> RoutingTable:
        """A new version with another number of instances of one stage, moving as few slices as balance allows."""
        self.check(stage, instances)
        owners = dict(self.owners)
        if stage in owners:
            owners[stage] = rebalance(owners[stage], instances)
        return self.change(owners=owners, instances={**self.instances, stage: instances})

    def check(self, stage: StageId, instances: int) -> None:
        """Refuse what cannot be."""
        if stage not in self.instances:
            raise ConfigError(
                f"there is no stage '{stage}' to rescale.",
                remedy=f"The stages are {', '.join(self.instances)}.",
            )
        if not 1 <= instances <= INSTANCES_MAX:
            raise ConfigError(f"a stage cannot have {instances} instances.", remedy=f"Use 1 to {INSTANCES_MAX}.")
        if stage in self.owners and instances > self.slices_in(stage):
            raise ConfigError(
                f"stage '{stage}' cannot have {instances} instances: it has only {self.slices_in(stage)} slices.",
                remedy="Slices are set at the first run; choose as many as the cores that the job may ever use.",
            )

    def moved(self, other: RoutingTable) -> int:
        """How many slices have another owner in ``other``."""
        return sum(
            a != b for stage, mine in self.owners.items() for a, b in zip(mine, other.owners[stage], strict=True)
        )

    def validate(self) -> None:
        for stage, owners in self.owners.items():
            count = self.slices_in(stage)
            assert len(owners) == count, f"stage {stage} has {len(owners)} of {count} slices"
            assert set(owners) <= set(range(self.instances[stage])), f"stage {stage}: an owner that is not there"
        for stage, holders in self.holders.items():
            for number, held in enumerate(holders):
                assert self.owners[stage][number] not in held, f"stage {stage}: the owner of {number} is its own backup"

    def filled(self) -> RoutingTable:
        """For a new start: every container has slices again."""
        owners = {s: rebalance(o, self.instances[s]) for s, o in self.owners.items()}
        return self if owners == dict(self.owners) else self.change(owners=owners)

    def to_json(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "slices": {s: m.count for s, m in self.slicemaps.items()},
            "owners": {s: list(o) for s, o in self.owners.items()},
            "instances": dict(self.instances),
            "homes": {s: {str(c): node for c, node in homes.items()} for s, homes in self.homes.items()},
            "holders": {s: [list(held) for held in holders] for s, holders in self.holders.items()},
            "cores": dict(self.cores),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> RoutingTable:
        slices = data["slices"]
        if isinstance(slices, int):  # as before stages had numbers of their own: it holds for all of them
            slices = dict.fromkeys(data["owners"], slices)
        return RoutingTable(
            RoutingVersion(data["version"]),
            {StageId(s): SliceMap(n) for s, n in slices.items()},
            {StageId(s): tuple(ContainerId(c) for c in o) for s, o in data["owners"].items()},
            {StageId(s): n for s, n in data["instances"].items()},
            {StageId(s): {int(c): node for c, node in homes.items()} for s, homes in data.get("homes", {}).items()},
            {StageId(s): tuple(tuple(held) for held in holders) for s, holders in data.get("holders", {}).items()},
            dict(data.get("cores", {})),
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
