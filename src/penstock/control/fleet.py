"""Nodes: which there are, which are to go, which of their cores are used, and which containers live on them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from penstock.control import placement
from penstock.control.concern import Concern
from penstock.control.events import (
    Command,
    CoresRequested,
    LeaveRequested,
    NodesChanged,
    NodesInvited,
    ReleaseNodes,
    Tell,
)
from penstock.control.load import within_slots
from penstock.control.naming import named
from penstock.control.placement import Peer
from penstock.control.records import NodeInfo
from penstock.control.routing import RoutingTable
from penstock.errors import ConfigError
from penstock.ids import Epoch, StageId

if TYPE_CHECKING:
    from penstock.control.controller import Controller

GATHER_S = 10.0
"""When all nodes were lost at once, the first that come back wait this many seconds for each other."""


class Fleet(Concern):
    def __init__(self, core: Controller) -> None:
        super().__init__(core)
        self.nodes: dict[str, NodeInfo] = {}
        self.leaving: set[str] = set()
        self.drained: dict[str, Epoch] = {}
        """Nodes that are to leave and own nothing any more -> the epoch from which on they own nothing."""
        self.released: set[str] = set()
        """Drained nodes that were given back. They are not used again, even if they take a while to go."""
        self.lost_all_at: float | None = None
        """When the last node was lost, until enough have come back."""
        self.short = False
        """All nodes were lost, and too few came back. Containers that do not fit on these have no home until other
        nodes come: a container with a home stays there for good."""
        self.invited = 0
        """Nodes that were asked for and have not come yet."""
        self.nodes_most = 0
        """The most nodes there were at once, without the ones that were given back: this many may come back."""

    @property
    def cores(self) -> Mapping[str, int]:
        """Nodes with a limit -> containers of each stage that work there. The others of that node are vacant."""
        return self.core.routes.table.cores

    # -- what there is -------------------------------------------------------------------------------------------

    def staying(self) -> list[str]:
        return [n for n in self.nodes if n not in self.leaving]

    def room(self) -> dict[str, int]:
        """node -> containers of a stage that it has room for"""
        return {n.name: self.cores.get(n.name, n.cores) for n in self.nodes.values()}

    def limit(self) -> int | None:
        """Containers of a stage that may work, all nodes together. None: there is a node without a limit."""
        staying = self.staying()
        return sum(self.cores[n] for n in staying) if staying and self.cores.keys() >= set(staying) else None

    def check_cores(self, node: str, cores: int) -> None:
        """Refuse a number of cores that the node cannot give."""
        staying = self.staying()
        if node not in staying:
            there = node in self.nodes
            raise ConfigError(
                f"{named([node])} is about to leave." if there else f"there is no node {node}.",
                remedy=f"The nodes are {', '.join(staying)}." if staying else "There is none at the moment.",
            )
        has = self.nodes[node].cores
        if not 1 <= cores <= has:
            raise ConfigError(
                f"{cores} cores of {named([node])} cannot be used: it has {has}.",
                remedy=f"Use 1 to {has}; a whole node is let go with scale_in.",
            )

    def check_instances(self, stage: StageId, instances: int) -> None:
        """Refuse more instances than the job's cores have room for."""
        most = self.limit()
        if most is not None and instances > most:
            raise ConfigError(
                f"stage '{stage}' cannot have {instances} instances: the job is to use {most} cores.",
                remedy="Let it use more cores of its nodes first (set_cores, or penstock scale --cores).",
            )

    def working(self) -> set[int]:
        """Numbers of containers that own slices of some stage."""
        table = self.core.routes.table
        return {c for s in table.owners for c in table.occupied(s)}

    def homeless(self) -> bool:
        """Is there a container with work and no node to do it on?"""
        table = self.core.routes.table
        return any(c not in table.homes_of(s) for s in table.owners for c in table.occupied(s))

    # -- homes of containers -------------------------------------------------------------------------------------

    def assign_homes(self, wanted: Collection[int] | None = None, *, patient: bool = False) -> None:
        """Give containers without a node one, if there is one: all of them, or ``wanted``. A container with a node
        stays there. ``patient``: containers that own nothing wait for a node with room for them. If they shared another
        node they would stay there for good, and the node that comes next would find nothing to do.
        """
        if patient:
            self.assign_homes(self.working())  # first the containers that cannot wait
        table = self.core.routes.table
        count = max([*table.instances.values(), *self.core.resizes.wanted.values()])
        homes = {s: self._homes(s, count, wanted, patient=patient) for s in table.instances}
        if self.short:
            room = self.room()
            fitting = {s: within_slots(sorted(found), found, room) for s, found in homes.items()}
            self.short = any(len(fitting[s]) < len(found) for s, found in homes.items())
            homes = {s: {c: found[c] for c in fitting[s]} for s, found in homes.items()}
        if homes != {s: dict(found) for s, found in table.homes.items()}:
            self.core.routes.amend(homes=homes)

    def _homes(self, stage: StageId, count: int, wanted: Collection[int] | None, *, patient: bool) -> dict[int, str]:
        """container -> node for one stage"""
        staying = {n: self.nodes[n].cores for n in self.staying()}
        current = {c: n for c, n in self.core.routes.table.homes_of(stage).items() if n in self.nodes}
        homes = placement.homes(count, staying, current, self.cores) if staying else current
        homes = {c: n for c, n in homes.items() if c in current or wanted is None or c in wanted}
        if patient:
            living, working = Counter(current.values()), self.working()
            for c, n in list(homes.items()):
                if c not in current:
                    living[n] += 1
                    if c not in working and living[n] > max(self.room()[n], math.ceil(count / self.nodes_most)):
                        del homes[c]
        return homes

    def gathering(self, now: float) -> bool:
        """All nodes were lost, and the first ones back wait for others: the first should not get everything."""
        if self.lost_all_at is None:
            return False
        enough = sum(n.cores for n in self.nodes.values()) >= len(self.working())
        if not enough and (not self.nodes or now - self.lost_all_at <= GATHER_S):
            return True
        self.lost_all_at = None
        self.short = not enough
        self.assign_homes(patient=True)  # if nodes were lost one by one, fewer own something than will come back
        if self.short:
            self._make_do()
        return False

    def _make_do(self) -> None:
        """Not all nodes have come back: the containers that have a home take over all slices."""
        table = self.core.routes.table
        changes: dict[StageId, tuple[int, ...]] = {}
        for stage, before in table.owners.items():
            homes = table.homes_of(stage)
            peers = [Peer(c, n, self.nodes[n].zone) for c, n in homes.items() if c < table.instances[stage]]
            changes[stage] = placement.takeover(before, set(before) - homes.keys(), {}, peers)
        self.core.routes.put(table.change(owners={**table.owners, **changes}))
        self.core.holders.refresh()
        for run in self.core.epochs.in_flight.values():  # all of them are to run again, and none has begun
            run.routing = self.core.routes.table

    # -- nodes come and go ---------------------------------------------------------------------------------------

    def on_nodes_changed(self, event: NodesChanged) -> list[Command]:
        before, self.nodes = set(self.nodes), {n.name: n for n in event.nodes}
        lost, new = before - set(self.nodes), set(self.nodes) - before
        parted = lost <= self.released
        self.nodes_most = max(self.nodes_most, len(before)) - len(lost & self.released)
        self.nodes_most = max(self.nodes_most, len(self.nodes))
        self.leaving &= set(self.nodes)
        self.keep_cores()
        self.core.holders.keep_nodes(self.nodes)
        self.core.balance.keep_nodes(self.nodes)
        out: list[Command] = []
        if self.nodes and self.leaving >= set(self.nodes):
            self.leaving.clear()
            out.append(Tell(text=f"{named(self.nodes)} stays after all: there is no other left"))
        self.drained = {n: e for n, e in self.drained.items() if n in self.leaving}
        self.released &= self.leaving
        if lost:
            gone = self.core.routes.table.homes_on(lost)
            reason = f"lost {named(lost)}" + (f" ({event.reason})" if event.reason else "")
            out += self.core.lose(gone, event.now, reason, parted)
        if not self.nodes:
            self.lost_all_at = event.now
        if new and not self.gathering(event.now):
            out += self._welcome(new)
        return out

    def _welcome(self, new: Collection[str]) -> list[Command]:
        """New nodes take over containers without a home. Nodes for which none is left get containers of their own."""
        core = self.core
        self.assign_homes(patient=True)
        homes = core.routes.table.homes
        spare = sorted(set(new) - {node for found in homes.values() for node in found.values()})
        wanted = spare if core.settings.grows else spare[: self.invited]
        self.invited = max(0, self.invited - len(spare))
        out = core.resizes.grow([self.nodes[n] for n in wanted])
        table = core.routes.table
        for stage in [s.id for s in core.topology.stages if not s.stateful]:
            housed = {c for c in range(table.instances[stage]) if c in table.homes_of(stage)}
            out += core.processes.start(stage, housed - core.processes.up[stage])
        core.balance.respread(f"new {named(new)}")
        return out

    def on_invited(self, event: NodesInvited) -> list[Command]:
        self.invited += event.count
        return []

    def on_leave(self, event: LeaveRequested) -> list[Command]:
        core = self.core
        if not set(self.staying()) - set(event.nodes):
            return [Tell(text="somebody must stay: the nodes are not drained")]
        self.leaving |= set(event.nodes) & set(self.nodes)
        core.balance.respread(f"{named(event.nodes)} to leave")
        core.holders.refresh()
        out = core.waits(f"the departure of {named(event.nodes)}")
        for source in [s.id for s in core.topology.stages if s.is_source]:
            could = set(self.could_read(source, core.routes.table))
            out += core.processes.start(source, could - core.processes.up[source])
        return out

    def keep_all(self) -> set[str]:
        """Nodes that were to leave stay, unless they are empty already. Which."""
        staying, self.leaving = self.leaving - self.drained.keys(), self.leaving & self.drained.keys()
        if staying:
            self.core.holders.refresh()
        return staying

    def let_go(self) -> list[Command]:
        """Give back nodes that were to leave and own nothing any more."""
        core = self.core
        for node in sorted(self.leaving - self.drained.keys()):
            if not self._in_use(node) and not core.moves.by_slice:
                self.drained[node] = core.epochs.next
        going = tuple(n for n, e in self.drained.items() if n not in self.released and core.epochs.published >= e)
        if not going:
            return []
        self.released |= set(going)
        self.invited = 0  # the engine does not wait any more for nodes that have not come
        return [ReleaseNodes(nodes=going)]

    def dismiss(self, node: str) -> dict[StageId, set[int]]:
        """A node is there and of no use, because its disk is full, say. Everybody goes on without its containers, which
        are returned."""
        self.leaving.add(node)
        self.drained[node] = self.core.epochs.next
        self.released.add(node)
        self.invited = 0
        return self.core.routes.table.homes_on({node})

    def on_cores(self, event: CoresRequested) -> list[Command]:
        """This many containers of every stage work on the node. More: they are started first. Fewer: the others are
        emptied. Either way the node's own slices are dealt out anew, and slices of other nodes stay.
        """
        core, node, cores = self.core, event.node, event.cores
        try:
            self.check_cores(node, cores)
        except ConfigError as error:
            return [Tell(text=f"the cores of {named([node])} stay as they are: {error.message.removesuffix('.')}")]
        table = core.routes.table
        core.routes.amend(cores={**table.cores, node: cores})
        core.balance.respread_node(node, f"{cores} cores of {named([node])}")
        here = {s: sorted(found) for s, found in table.homes_on({node}).items()}
        known = (c + 1 for homes in table.homes.values() for c in homes)
        first = max([*table.instances.values(), *core.resizes.wanted.values(), *known])
        fresh = {s: range(first, first + max(0, cores - len(found))) for s, found in here.items()}
        if any(fresh.values()):
            core.routes.amend(homes={s: {**table.homes_of(s), **dict.fromkeys(fresh[s], node)} for s in here})
        out = core.waits(f"the change of the cores of {named([node])} to {cores}")
        for info in core.topology.stages:
            out += core.resizes.open_slots(info, [*here[info.id], *fresh[info.id]][:cores])
        return out

    def keep_cores(self) -> list[Command]:
        """Forget limits of nodes that are gone, or that have fewer cores now. What there is to tell."""
        cores = self.cores
        kept = {n: c for n, c in cores.items() if n in self.nodes and c <= self.nodes[n].cores}
        if kept == dict(cores):
            return []
        self.core.routes.amend(cores=kept)
        gone = named(cores.keys() - kept.keys())
        return [Tell(text=f"the limit on the cores of {gone} is forgotten: no such node, or it has fewer cores")]

    # -- containers that read sources ----------------------------------------------------------------------------

    def reading(self, source: StageId, table: RoutingTable) -> tuple[int, ...]:
        """Containers that read a source: those that stay and have a process; else those that have read until now."""
        up = self.core.processes.up[source]
        could = self.could_read(source, table)
        ready = tuple(c for c in could if c in up)
        homes = table.homes_of(source)
        leaving = (c for c in range(table.instances[source]) if homes.get(c) in self.leaving)
        return ready or tuple(c for c in leaving if c in up) or could

    def could_read(self, source: StageId, table: RoutingTable) -> tuple[int, ...]:
        homes, count = table.homes_of(source), table.instances[source]
        staying = set(self.staying())
        housed = [c for c in range(count) if homes.get(c) in staying]
        if not housed:  # all that used to read it are gone: others do, wherever there is a node
            housed = sorted(c for c, node in homes.items() if node in staying) or sorted(homes) or [0]
        return tuple(within_slots(housed, homes, self.cores)[:count])

    def _in_use(self, node: str) -> bool:
        """Does a container on this node own slices, or read a source?"""
        table = self.core.routes.table
        for info in self.core.topology.stages:
            busy = self.reading(info.id, table) if info.is_source else table.occupied(info.id)
            if any(table.homes_of(info.id).get(c) == node for c in busy):
                return True
        return False

    def validate(self) -> None:
        for node, cores in self.cores.items():
            assert node in self.nodes, f"cores of node {node}, which is gone"
            assert 1 <= cores <= self.nodes[node].cores, f"{cores} cores of node {node}, which has fewer"
        assert self.leaving <= set(self.nodes), "a node that is gone is still to leave"
        assert self.released <= self.drained.keys() <= self.leaving, "a node was given back that was not to leave"
