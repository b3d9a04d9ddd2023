"""Where a job's slices are, where they are going, and how many have their backups: for the status."""

from __future__ import annotations

from collections import Counter

from penstock.control.controller import Controller
from penstock.observe.status import BackupStatus, MoveStatus, NodeStatus


def nodes(controller: Controller) -> tuple[NodeStatus, ...]:
    routing = controller.routing
    suspects = {container for _, container in controller.suspects}
    slices = Counter(int(container) for owners in routing.owners.values() for container in owners)
    found = []
    for node in controller.nodes.values():
        containers = sorted(c for c, home in routing.homes.items() if home == node.name)
        state = "leaving" if node.name in controller.leaving else "up"
        found.append(
            NodeStatus(
                name=node.name,
                host=node.host,
                zone=node.zone,
                cores=node.cores,
                limit=controller.cores.get(node.name),
                containers=tuple(containers),
                slices=sum(slices[c] for c in containers),
                state="suspect" if state == "up" and suspects & set(containers) else state,
            )
        )
    return tuple(found)


def moves(controller: Controller, now: float) -> tuple[MoveStatus, ...]:
    return tuple(
        MoveStatus(
            stage=m.stage,
            slice=m.slice,
            source=m.source,
            target=m.target,
            phase=m.phase,
            since_s=round(now - m.since, 3),
            cause=m.cause,
        )
        for m in controller.migration.moves.values()
    )


def backups(controller: Controller) -> BackupStatus | None:
    """Slices that have all the backups that they should have, current at the last checkpoint."""
    holders = controller.routing.holders
    if not holders:
        return None
    current = 0
    for stage, slices in holders.items():
        held = controller.holding(stage, range(controller.routing.instances[stage]))
        current += sum(bool(wanted) and set(wanted) <= set(held.get(s, ())) for s, wanted in enumerate(slices))
    total = sum(len(slices) for slices in holders.values())
    return BackupStatus(copies=controller.settings.backups, slices_current=current, slices_total=total)


__all__ = ["backups", "moves", "nodes"]
