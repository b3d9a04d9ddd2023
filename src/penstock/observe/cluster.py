"""Where a job's slices are, where they are going, and how many have their backups: for the status."""

from __future__ import annotations

from penstock.control.controller import Controller
from penstock.observe.status import BackupStatus, MoveStatus, NodeStatus


def nodes(controller: Controller) -> tuple[NodeStatus, ...]:
    routing = controller.routes.table
    found = []
    for node in controller.fleet.nodes.values():
        here = routing.homes_on({node.name})
        suspect = any(container in here[stage] for stage, container in controller.processes.suspects)
        state = "leaving" if node.name in controller.fleet.leaving else "up"
        found.append(
            NodeStatus(
                name=node.name,
                host=node.host,
                zone=node.zone,
                cores=node.cores,
                limit=controller.fleet.cores.get(node.name),
                containers=tuple(sorted(set().union(*here.values()))),
                slices=sum(c in here[stage] for stage, owners in routing.owners.items() for c in owners),
                state="suspect" if state == "up" and suspect else state,
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
        for m in controller.moves.by_slice.values()
    )


def backups(controller: Controller) -> BackupStatus | None:
    """Slices that have all the backups that they should have, current at the last checkpoint."""
    holders = controller.routes.table.holders
    if not holders:
        return None
    current = 0
    for stage, slices in holders.items():
        held = controller.holders.holding(stage, range(controller.routes.table.instances[stage]))
        current += sum(bool(wanted) and set(wanted) <= set(held.get(s, ())) for s, wanted in enumerate(slices))
    total = sum(len(slices) for slices in holders.values())
    return BackupStatus(copies=controller.settings.backups, slices_current=current, slices_total=total)


__all__ = ["backups", "moves", "nodes"]
