"""Where a job's slices are, where they are going, and how many have their backups: for the status."""

from __future__ import annotations

from typing import Any

from penstock.control.controller import Controller


def nodes(controller: Controller) -> tuple[dict[str, Any], ...]:
    routing = controller.routes.table
    suspects = list(controller.processes.suspects)
    out = []
    for node in list(controller.fleet.nodes.values()):
        here = routing.homes_on({node.name})
        suspect = any(c in here[stage] for stage, c in suspects)
        state = "leaving" if node.name in controller.fleet.leaving else "suspect" if suspect else "up"
        out.append(
            {
                "name": node.name,
                "host": node.host,
                "zone": node.zone,
                "cores": node.cores,
                "limit": controller.fleet.cores.get(node.name),
                "containers": sorted(set().union(*here.values())),
                "slices": sum(c in here[stage] for stage, owners in routing.owners.items() for c in owners),
                "state": state,
            }
        )
    return tuple(out)


def moves(controller: Controller, now: float) -> tuple[dict[str, Any], ...]:
    return tuple(
        {
            "stage": m.stage,
            "slice": m.slice,
            "source": m.source,
            "target": m.target,
            "phase": m.phase,
            "since_s": round(now - m.since, 3),
            "cause": m.cause,
        }
        for m in list(controller.moves.by_slice.values())
    )


def backups(controller: Controller) -> dict[str, Any]:
    """How many slices have all the backups that they should have, current at the last checkpoint."""
    holders = controller.routes.table.holders
    if not holders:
        return {}
    current = 0
    for stage, slices in holders.items():
        held = controller.holders.holding(stage, range(controller.routes.table.instances[stage]))
        current += sum(bool(wanted) and set(wanted) <= set(held.get(s, ())) for s, wanted in enumerate(slices))
    total = sum(len(slices) for slices in holders.values())
    return {"r": controller.settings.backups, "slices_current": current, "slices_total": total}


__all__ = ["backups", "moves", "nodes"]
