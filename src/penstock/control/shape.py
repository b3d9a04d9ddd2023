"""The shape of a job: its nodes, where its containers live, who owns slices, who keeps copies, and how that changes.

The half of the controller that answers to nodes that come and go, containers that hang, and people who rescale and
move. It decides rows of the routing table; the other half, ``controller.py``, runs epochs by it and takes checkpoints.
Both are one object with one state: a move waits for a checkpoint, and a checkpoint for a move.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.control import placement
from penstock.control.epochs import Checkpoint, EpochRun, Settings
from penstock.control.events import (
    CancelMovesRequested,
    Command,
    CoresRequested,
    HotSlices,
    LeaveRequested,
    MoveRequested,
    NodeInfo,
    NodesChanged,
    NodesInvited,
    RebalanceRequested,
    ReleaseNodes,
    RescaleRequested,
    Stuck,
    TaskReport,
    Tell,
    WarmedUp,
    WarmUp,
)
from penstock.control.load import LOAD_EPOCHS, SliceLoad, within_slots
from penstock.control.migration import Migration, Move
from penstock.control.placement import Peer
from penstock.control.routing import INSTANCES_MAX, RoutingTable
from penstock.control.topology import StageInfo, Topology
from penstock.errors import ConfigError
from penstock.ids import NO_EPOCH, Attempt, Epoch, StageId
from penstock.state.backup import Commit

GATHER_S = 10.0
"""When all nodes were lost at once, so long may those that come back wait for each other."""
SWITCH_BYTES = 16 * 2**20
"""A container takes over about so much state of a stage in one epoch, and at least one slice: while it brings them up
it does nothing else, and that must not take longer the more there is to move."""
NOT_LIVE = "this baseline does not spread slices while the job runs; rescale a stage, or change a node's cores"


class Shape:
    def __init__(self, topology: Topology, routing: RoutingTable, settings: Settings) -> None:
        self.topology = topology
        self.routing = routing
        self.settings = settings
        self.phase = "starting"
        self.attempt = Attempt(1)
        self.next_epoch = Epoch(1)
        self.published = NO_EPOCH
        self.committed = NO_EPOCH
        self.final = False
        """The epoch that ends a bounded input has been planned."""
        self.in_flight: dict[Epoch, EpochRun] = {}
        self.checkpoint: Checkpoint | None = None
        self.checkpoint_at = 0.0
        self.rescales: list[tuple[StageId, int]] = []
        self.outstanding: set[tuple[Attempt, Epoch, str]] = set()
        """Jobs of this or older attempts that have not come back."""
        self.recovering = False
        self.away = False
        """The store does not answer: epochs are logged when it does again."""
        self.routings: dict[int, RoutingTable] = {}
        """Versions that commands under way refer to."""
        self.policy = placement.policy(settings.placement)
        self.nodes: dict[str, NodeInfo] = {}
        self.leaving: set[str] = set()
        self.drained: dict[str, Epoch] = {}
        """Nodes that are to leave and own nothing any more, from this epoch on."""
        self.released: set[str] = set()
        """Of those, the ones given back. They are not used again, even if they take a while to go."""
        self.lost_all_at: float | None = None
        """When the last node was lost, until enough have come back."""
        self.short = False
        """All nodes were lost, and too few came back: containers that do not fit on these have no home until others
        come. If they had one they would stay there for good."""
        self.invited = 0
        """Nodes that were asked for and have not come yet."""
        self.nodes_most = 0
        """The most nodes there were at once, without those that were given back: so many may come back."""
        self.bad_holders: set[str] = set()
        self.waiting_holders: set[tuple[StageId, int]] = set()
        """Containers that cannot read the checkpoint store just now. What they hold is still good."""
        self.suspects: set[tuple[StageId, int]] = set()
        """Containers that hung, until they answer again."""
        self.up: dict[StageId, set[int]] = {s.id: set() for s in topology.stages}
        """Containers known to have a process."""
        self.warming: set[tuple[StageId, int]] = set()
        self.warmed: set[tuple[StageId, int]] = set()
        """Those that have a process and wait for others on their node to get one."""
        self.held: dict[tuple[StageId, int], tuple[int, frozenset[int]]] = {}
        """What containers say of their copies: slices that are current at a checkpoint."""
        self.refused: dict[tuple[StageId, int], frozenset[int]] = {}
        """Slices that containers say they have no room for a copy of."""
        self.commits: dict[StageId, tuple[Commit, ...]] = {}
        self.unsent: set[StageId] = set()
        self.sent: dict[Epoch, tuple[Mapping[StageId, int], set[StageId]]] = {}
        """Epochs in which containers sent something to their peers: the numbering they used, and the stages."""
        self.migration = Migration()
        self.resizes: dict[StageId, int] = {}
        """Instances asked for, until the stage has them."""
        self.handed: list[Move] = []
        """Moves whose source sends in the last epoch begun: the next one has the new owners."""
        self.switching: Epoch | None = None
        """The first epoch with new owners, until it is published."""
        self.switched = NO_EPOCH
        """The last of them."""
        self.checkpoint_wanted = False
        self.respread: set[str] = set()
        """Why slices should be spread anew, when there is somebody to take them."""
        self.schedule = placement.schedule(settings.schedule)
        self.cores: dict[str, int] = {}
        """Nodes of which not all cores are to be used, or not as many as there happen to be containers: node -> how
        many. So many containers of each stage work there, the others are vacant."""
        self.reslot: dict[str, str] = {}
        """Nodes whose slices should be dealt out anew among their own containers, and why."""
        self.opening: set[StageId] = set()
        """Of the resizes, those that make room for more containers of one node: slices of others stay."""
        self.targets: dict[StageId, tuple[dict[int, int], str]] = {}
        """Moves that wait until their stage has been resized, and why they are to be."""
        self.state_bytes: dict[StageId, int] = {}
        """As of the last reports: how large a slice is on average."""
        self.load = SliceLoad()
        self.hot: dict[StageId, tuple[int, ...]] = {}
        """Slices whose hottest keys are wanted."""

    def _recover(self, now: float, reason: str) -> list[Command]:
        """Everything goes back to the last checkpoint. The other half's."""
        raise NotImplementedError

    # -- requests ------------------------------------------------------------------------------------------------

    def _rescale_requested(self, event: RescaleRequested) -> list[Command]:
        try:
            self.routing.check(event.stage, event.instances)
            self.check_slots(event.stage, event.instances)
        except ConfigError as error:
            return [Tell(error.message.removesuffix("."))]
        wanted = self._numbers(event.stage, event.instances)
        self.resizes[event.stage] = wanted
        self.opening.discard(event.stage)
        self.targets.pop(event.stage, None)
        if event.targets and self.settings.live and self.topology[event.stage].stateful:
            self.targets[event.stage] = (dict(event.targets), f"rescale to {event.instances}")
        self._house()
        out = self._waits(f"the rescale of '{event.stage}' to {event.instances}")
        new = set(range(wanted)) - self._awake(event.stage)
        return out + (self._warm_up(event.stage, new) if new else self._resize(event.stage, event.now))

    def _waits(self, order: str) -> list[Command]:
        """Whoever gave an order in the middle of a recovery is told that it was heard."""
        return [Tell(f"{order} waits for the end of the recovery")] if self.recovering else []

    def _warm_up(self, stage: StageId, containers: Collection[int]) -> list[Command]:
        cold = tuple(c for c in sorted(containers) if (stage, c) not in self.warming | self.warmed)
        if not cold:
            return []
        self.warming |= {(stage, c) for c in cold}
        return [WarmUp(stage, cold, {c: self.routing.homes[c] for c in cold if c in self.routing.homes})]

    def _warmed_up(self, event: WarmedUp) -> list[Command]:
        pairs = {(event.stage, c) for c in event.containers}
        self.warming -= pairs
        self.warmed |= pairs
        # Processes that are being started take up a node's cores: work that is sent there would wait, and all with it.
        starting = {self.routing.homes.get(c) for _, c in self.warming - self.suspects}
        ready = {(s, c) for s, c in self.warmed if self.routing.homes.get(c) not in starting}
        self.warmed -= ready
        if ready & self.suspects:
            self.suspects -= ready
            self.respread.add("a container answers again")
        out: list[Command] = []
        for stage in sorted({s for s, _ in ready}):
            containers = {c for s, c in ready if s == stage}
            self.up[stage] |= containers
            self.migration.up(stage, containers)
            if stage in self.resizes:
                out += self._resize(stage, event.now)
        return out

    def _resize(self, stage: StageId, now: float) -> list[Command]:
        """Everybody who will be needed is there: make room at the next epoch, then move slices."""
        wanted = self.resizes[stage]
        if not self.settings.live:
            self.rescales.append((stage, wanted))
            del self.resizes[stage]
            return []
        if self.topology[stage].stateful and wanted <= self.routing.instances[stage]:
            if stage in self.targets:
                return self._ask_usable(stage, *self.targets.pop(stage), now)
            return self._spread(stage, now, f"rescale to {wanted}")
        return []  # the next epoch makes room

    def _move_requested(self, event: MoveRequested) -> list[Command]:
        """What cannot be is told: since it was asked for, a node may have gone, or the slice."""
        stage = event.stage
        if not self.topology[stage].stateful:  # its slices follow its containers
            return [Tell(f"slices of '{stage}' stay: it has no state to move")]
        self.migration.expire(event.now, self.settings.move_timeout_s)  # one whose time is just up begins anew
        usable = {p.container for p in self.peers(stage)}
        targets = {s: c for s, c in event.targets.items() if c in usable and 0 <= s < self.routing.slices_in(stage)}
        out = self._waits(f"the move of slices {_listed(sorted(targets))} of '{stage}'") if targets else []
        out += self._ask(stage, targets, event.now, event.reason)
        if left := sorted(event.targets.keys() - targets.keys()):
            out.append(Tell(f"slices {_listed(left)} of '{stage}' stay: no such slice, or no container to take it"))
        moves = self.migration.moves
        if late := [s for s, c in sorted(targets.items()) if (m := moves.get((stage, s))) and m.target != c]:
            out.append(Tell(f"slices {_listed(late)} of '{stage}' change hands just now: ask again when they have"))
        return out

    def _rebalance_requested(self, event: RebalanceRequested) -> list[Command]:
        if not self.settings.live:
            return [Tell(f"slices are not rebalanced: {NOT_LIVE}")]
        self.respread.add(event.reason)
        return self._waits("the rebalance")

    def _nodes_invited(self, event: NodesInvited) -> list[Command]:
        self.invited += event.count
        return []

    def _leave_requested(self, event: LeaveRequested) -> list[Command]:
        staying = set(self.nodes) - self.leaving - set(event.nodes)
        if not staying:
            return [Tell("somebody must stay: the nodes are not drained")]
        if not self.settings.live:
            return [Tell(f"the nodes are not drained: {NOT_LIVE}")]
        self.leaving |= set(event.nodes) & set(self.nodes)
        self.respread.add(f"{_named(event.nodes)} to leave")
        self._rehold()
        out = self._waits(f"the departure of {_named(event.nodes)}")
        for source in [s for s in self.topology.stages if s.is_source]:
            out += self._warm_up(source.id, set(self._could_read(source.id, self.routing)) - self.up[source.id])
        return out

    def _cores_requested(self, event: CoresRequested) -> list[Command]:
        """So many containers of every stage work on this node. More: they are started first. Fewer: the others are
        emptied. Either way the node's own slices are dealt out anew, and those of other nodes stay.
        """
        node, cores = event.node, event.cores
        try:
            self.check_cores(node, cores)
        except ConfigError as error:
            return [Tell(f"the cores of {_named([node])} stay as they are: {error.message.removesuffix('.')}")]
        self.cores[node] = cores
        if self.settings.live:
            self.reslot[node] = f"{cores} cores of {_named([node])}"
        homes, instances = self.routing.homes, self.routing.instances
        here = sorted(c for c, home in homes.items() if home == node)
        first = max([*instances.values(), *self.resizes.values(), *(c + 1 for c in homes)])
        fresh = range(first, first + max(0, cores - len(here)))
        if fresh:
            self._amend(homes={**homes, **dict.fromkeys(fresh, node)})
        slots = [*here, *fresh][:cores]
        out = self._waits(f"the change of the cores of {_named([node])} to {cores}")
        for info in self.topology.stages:
            out += self._open_slots(info, slots, event.now)
        return out

    def _open_slots(self, info: StageInfo, slots: Sequence[int], now: float) -> list[Command]:
        """One stage, its containers that are to work on a node: room for all of them, and a process for each."""
        stage, have = info.id, self.routing.instances[info.id]
        planned = self.resizes.get(stage, have)
        if slots[0] >= planned:
            return []  # it does nothing on this node
        most = self.routing.slices_in(stage) if stage in self.routing.owners else INSTANCES_MAX
        wanted = max(planned, min(most, slots[-1] + 1))
        out: list[Command] = []
        if slots[-1] >= wanted:
            out.append(Tell(f"'{stage}' has {most} slices: it cannot use all the cores"))
        if wanted > planned:
            if stage not in self.resizes:
                self.opening.add(stage)
            self.resizes[stage] = wanted
        awake = self._awake(stage) if info.stateful else self.up[stage]
        cold = {c for c in slots if c < wanted} - awake
        out += self._warm_up(stage, cold)
        if not self.settings.live and (wanted == planned or not cold):
            self.resizes[stage] = wanted
            out += self._resize(stage, now)
        return out

    def _hot_slices(self, event: HotSlices) -> list[Command]:
        self.hot = {s: tuple(slices) for s, slices in event.slices.items() if slices}
        return []

    def _cancel_requested(self, event: CancelMovesRequested) -> list[Command]:
        count = self.migration.cancel(event.stage, event.slices, event.now)
        for stage in [s for s in self.resizes if event.stage in (None, s)]:
            del self.resizes[stage]
        self.targets = {s: t for s, t in self.targets.items() if event.stage not in (None, s)}
        if event.stage is not None:
            return [Tell(f"{count} moves cancelled")]
        self.reslot.clear()
        staying, self.leaving = self.leaving - self.drained.keys(), self.leaving & self.drained.keys()
        if staying:
            self._rehold()
        return [Tell(f"{count} moves cancelled" + (f"; {_named(staying)} to stay" if staying else ""))]

    # -- the cores of a node -------------------------------------------------------------------------------------

    def check_cores(self, node: str, cores: int) -> None:
        """Refuse what cannot be."""
        staying = [n for n in self.nodes if n not in self.leaving]
        if node not in staying:
            there = node in self.nodes
            raise ConfigError(
                f"{_named([node])} is about to leave." if there else f"there is no node {node}.",
                remedy=f"The nodes are {', '.join(staying)}." if staying else "There is none at the moment.",
            )
        has = self.nodes[node].cores
        if not 1 <= cores <= has:
            raise ConfigError(
                f"{cores} cores of {_named([node])} cannot be used: it has {has}.",
                remedy=f"Use 1 to {has}; a whole node is let go with scale_in.",
            )

    def slots(self) -> int | None:
        """How many containers of a stage may work, all nodes together; None: there is a node without a limit."""
        staying = [n for n in self.nodes if n not in self.leaving]
        return sum(self.cores[n] for n in staying) if staying and self.cores.keys() >= set(staying) else None

    def check_slots(self, stage: StageId, instances: int) -> None:
        most = self.slots()
        if most is not None and instances > most:
            raise ConfigError(
                f"stage '{stage}' cannot have {instances} instances: the job is to use {most} cores.",
                remedy="Let it use more cores of its nodes first (set_cores, or penstock scale --cores).",
            )

    def _numbers(self, stage: StageId, instances: int) -> int:
        """How many numbers it takes for so many containers that may work: those beyond a node's cores stay vacant."""
        homes = self.routing.homes
        most = self.routing.slices_in(stage) if stage in self.routing.owners else INSTANCES_MAX
        count = instances
        while count < most and len(within_slots(range(count), homes, self.cores)) < instances:
            count += 1
        return count

    def _deal(self, now: float) -> list[Command]:
        """Slices that wait for room in their stage, and nodes whose slices are dealt out anew."""
        out: list[Command] = []
        for stage in [s for s in self.targets if s not in self.resizes]:
            out += self._ask_usable(stage, *self.targets.pop(stage), now)
        self.opening &= self.resizes.keys()
        for node in sorted(self.reslot) if not self.opening else ():
            if not self._landing(node):
                cause = self.reslot.pop(node)
                for info in self.topology.stateful:
                    out += self._spread_within(info.id, node, now, cause)
        return out

    def _landing(self, node: str) -> bool:
        """Is a slice about to arrive at one of the node's containers that may not work? Then it must go on from there,
        and that can be asked for when it is there.
        """
        return any(
            self.routing.homes.get(m.target) == node and all(p.container != m.target for p in self.peers(m.stage))
            for m in self.migration.in_phase("switch", "release")
        )

    def _vacate(self) -> None:
        """Everything stands still: whoever may not work gives all its slices away."""
        self.opening.clear()
        owners = dict(self.routing.owners)
        for stage in owners if self.cores else ():
            peers = self.peers(stage)
            if peers and not set(owners[stage]) <= {p.container for p in peers}:
                held = self.holding(stage, {p.container for p in peers})
                owners[stage] = placement.spread(owners[stage], peers, holding=held)  # type: ignore[assignment]
        if owners != dict(self.routing.owners):
            self._set_routing(self.routing.change(owners=owners))

    def _note_load(self, stage: StageId, reports: Sequence[TaskReport], now: float) -> None:
        self.load.note(stage, reports, now)
        self.state_bytes[stage] = sum(report.state_bytes for report in reports)

    def _asked(self, run: EpochRun, stage: StageId) -> tuple[int, ...]:
        """Slices whose owners should say which keys are the hottest: now and then."""
        return self.hot.get(stage, ()) if run.epoch > self.published and run.epoch % LOAD_EPOCHS == 0 else ()

    # -- nodes and slices ----------------------------------------------------------------------------------------

    def _set_routing(self, routing: RoutingTable) -> None:
        self.routing = routing
        used = {run.routing.version for run in self.in_flight.values()}
        self.routings = {v: r for v, r in self.routings.items() if v in used}
        self.routings[routing.version] = routing

    def _amend(self, **changes: Any) -> None:
        """Another routing table: a new version, if an epoch under way knows this one."""
        seen = any(run.routing.version == self.routing.version for run in self.in_flight.values())
        self._set_routing(self.routing.change(**changes) if seen else replace(self.routing, **changes))

    def _house(self, wanted: Collection[int] | None = None, *, patient: bool = False) -> None:
        """Containers without a node get one, if there is one: all, or some. Who has one stays. ``patient``: those that
        own nothing wait for a node that has room for them. If they shared another's they would stay there for good,
        and who comes next would find nothing to do.
        """
        if patient:
            self._house(self._working())  # first those that cannot wait
        count = max([*self.routing.instances.values(), *self.resizes.values()])
        staying = {n.name: n.cores for n in self.nodes.values() if n.name not in self.leaving}
        current = {c: n for c, n in self.routing.homes.items() if n in self.nodes}
        homes = placement.homes(count, staying, current, self.cores) if staying else current
        homes = {c: n for c, n in homes.items() if c in current or wanted is None or c in wanted}
        if patient:
            living, working = Counter(current.values()), self._working()
            for c, n in list(homes.items()):
                if c not in current:
                    living[n] += 1
                    if c not in working and living[n] > max(self._room()[n], math.ceil(count / self.nodes_most)):
                        del homes[c]
        if self.short:
            self.short = len(fitting := within_slots(sorted(homes), homes, self._room())) < len(homes)
            homes = {c: homes[c] for c in fitting}
        if homes != dict(self.routing.homes) or not self.routings:
            self._amend(homes=homes)

    def _working(self) -> set[int]:
        return {c for s in self.routing.owners for c in self.routing.occupied(s)}

    def _awake(self, stage: StageId) -> set[int]:
        """Containers that have a process, or get one without being asked."""
        return self.up[stage] | set(self.routing.occupied(stage))

    def peers(self, stage: StageId, instances: int | None = None) -> list[Peer]:
        """Containers that may own slices of a stage."""
        homes = self.routing.homes
        have = self.routing.instances[stage]  # those that are still to come get their share when there is room
        limit = instances if instances is not None else min(have, self.resizes.get(stage, have))
        able = [
            c
            for c in range(limit)
            if homes.get(c) in self.nodes and homes[c] not in self.leaving and (stage, c) not in self.suspects
        ]
        slots = set(within_slots(able, homes, self.cores))
        if instances is not None:  # one that must be emptied still counts while it has something
            slots |= set(self.routing.owners.get(stage, ()))
        return [Peer(c, homes[c], self.nodes[homes[c]].zone) for c in able if c in slots]

    def _rehold(self) -> None:
        """Who keeps copies of what, given who owns it now."""
        holders: dict[StageId, tuple[tuple[int, ...], ...]] = {}
        for stage in self.topology.stateful if self.settings.backups else ():
            owners = self.routing.owners[stage.id]
            awake = self._awake(stage.id)
            peers = [p for p in self.peers(stage.id, self.routing.instances[stage.id]) if p.container in awake]
            able = [p for p in peers if p.node not in self.bad_holders]
            homed = all(c in self.routing.homes for c in owners)
            if homed and len({p.node for p in peers}) > 1:
                before = self.routing.holders.get(stage.id, ())
                holders[stage.id] = self.policy.holders(owners, able, self.settings.backups, before)
        if holders != dict(self.routing.holders):
            self._amend(holders=holders)

    def _nodes_changed(self, event: NodesChanged) -> list[Command]:
        before, self.nodes = set(self.nodes), {n.name: n for n in event.nodes}
        lost, new = before - set(self.nodes), set(self.nodes) - before
        parted = lost <= self.released
        self.nodes_most = max(self.nodes_most, len(before)) - len(lost & self.released)
        self.nodes_most = max(self.nodes_most, len(self.nodes))
        self.leaving &= set(self.nodes)
        self.bad_holders &= set(self.nodes)
        self.cores = {n: cores for n, cores in self.cores.items() if n in self.nodes}
        self.reslot = {n: cause for n, cause in self.reslot.items() if n in self.nodes}
        out: list[Command] = []
        if self.nodes and self.leaving >= set(self.nodes):
            self.leaving.clear()
            out.append(Tell(f"{_named(self.nodes)} stays after all: there is no other left"))
        self.drained = {n: e for n, e in self.drained.items() if n in self.leaving}
        self.released &= self.leaving
        if lost:
            gone = {c for c, node in self.routing.homes.items() if node in lost}
            reason = f"lost {_named(lost)}" + (f" ({event.reason})" if event.reason else "")
            out += self._lose({s.id: gone for s in self.topology.stages}, event.now, reason, parted)
        if not self.nodes:
            self.lost_all_at = event.now
        if new and not self._gathering(event.now):
            self._house(patient=True)
            spare = sorted(new - set(self.routing.homes.values()))
            wanted = spare if self.settings.grows else spare[: self.invited]
            self.invited = max(0, self.invited - len(spare))
            out += self._grow([self.nodes[n] for n in wanted])
            for stage in [s for s in self.topology.stages if not s.stateful]:
                housed = {c for c in range(self.routing.instances[stage.id]) if c in self.routing.homes}
                out += self._warm_up(stage.id, housed - self.up[stage.id])
            self.respread.add(f"new {_named(new)}")
        return out

    def _gathering(self, now: float) -> bool:
        """All nodes were lost: the first that comes back should not get everything, so wait a moment for others."""
        if self.lost_all_at is None:
            return False
        enough = sum(n.cores for n in self.nodes.values()) >= len(self._working())
        if not enough and (not self.nodes or now - self.lost_all_at <= GATHER_S):
            return True
        self.lost_all_at = None
        self.short = not enough
        self._house(patient=True)  # if they were lost one by one, fewer own something than there are to come back
        if self.short:
            self._make_do()
        return False

    def _room(self) -> dict[str, int]:
        return {n.name: self.cores.get(n.name, n.cores) for n in self.nodes.values()}

    def _make_do(self) -> None:
        """Not all nodes have come back: the containers that have a home take over all slices."""
        homes, owners = self.routing.homes, dict(self.routing.owners)
        for stage, before in owners.items():
            peers = [Peer(c, n, self.nodes[n].zone) for c, n in homes.items() if c < self.routing.instances[stage]]
            owners[stage] = placement.takeover(before, set(before) - homes.keys(), {}, peers)  # type: ignore[assignment]
        self._set_routing(self.routing.change(owners=owners))
        self._rehold()
        for run in self.in_flight.values():  # all of them are to run again, and none has begun
            run.routing = self.routing

    def _grow(self, nodes: Sequence[NodeInfo]) -> list[Command]:
        """Nodes that no container was left for: every stage gets more of them."""
        cores = sum(n.cores for n in nodes)
        if not cores:
            return []
        for stage, have in self.routing.instances.items():
            limit = self.routing.slices_in(stage) if stage in self.routing.owners else have + cores
            self.resizes[stage] = min(have + cores, limit)
        self._house()
        out: list[Command] = []
        for stage in self.routing.owners:
            out += self._warm_up(stage, set(range(self.resizes[stage])) - self._awake(stage))
        return out

    def _stuck(self, event: Stuck) -> list[Command]:
        if event.attempt != self.attempt or self.recovering:
            return []
        hung = set(event.containers)
        which = ", ".join(map(str, sorted(hung)))
        reason = f"container {which} of '{event.stage}' made no progress for {event.seconds:.1f} s"
        if not hung >= set(self.routing.occupied(event.stage)):
            self.suspects |= {(event.stage, c) for c in hung}
        return self._lose({event.stage: hung}, event.now, reason)

    def _lose(self, lost: Mapping[StageId, set[int]], now: float, reason: str, parted: bool = False) -> list[Command]:
        """Containers are gone: their slices go to who has copies of them, and everybody goes back to the checkpoint.
        Unless they went because we let them go (``parted``): nothing that is under way needs them.
        """
        worked, told = self._take_over(lost)
        if not worked and (parted or not self.outstanding):
            self._adopt()
            return [Tell(f"{reason.removeprefix('lost ')} has left" if parted else f"{reason}; it owned nothing")]
        return [*self._recover(now, reason), *told]

    def _dismiss(self, node: str, now: float, reason: str) -> list[Command]:
        """A node that is there and of no use, because its disk is full, say: everybody goes on without it."""
        self.leaving.add(node)
        self.drained[node] = self.next_epoch
        self.released.add(node)
        self.invited = 0
        gone = {c for c, home in self.routing.homes.items() if home == node}
        _, told = self._take_over({s.id: gone for s in self.topology.stages})
        why = f"every task on {_named([node])} fails, so it is given back, and can be replaced by scale_out: {reason}"
        return [*self._recover(now, reason), Tell(why), *told, ReleaseNodes((node,))]

    def _take_over(self, lost: Mapping[StageId, set[int]]) -> tuple[bool, list[Tell]]:
        """Slices of containers that are gone go to others, and containers that work get a node. Did they own any? And
        what there is to tell of it."""
        self._complete_switch()
        homes = {c: n for c, n in self.routing.homes.items() if n in self.nodes}
        routing = self.routing.change(homes=homes)
        worked = any(set(routing.occupied(s)) & gone for s, gone in lost.items() if s in routing.owners)
        told: list[str] = []
        for stage, gone in lost.items():
            self.up[stage] -= gone
            for container in gone:
                self.held.pop((stage, container), None)
                self.refused.pop((stage, container), None)
        self._set_routing(routing)
        owners = dict(routing.owners)
        for stage, gone in lost.items():
            if stage not in owners or not set(owners[stage]) & gone:
                continue
            awake = set(owners[stage]) | self.up[stage]
            peers = [p for p in self.peers(stage) if p.container in awake - gone]
            if not peers:
                continue  # the container itself comes up again, somewhere
            holding = self.holding(stage, {p.container for p in peers})
            owners[stage] = placement.takeover(owners[stage], gone, holding, peers)  # type: ignore[assignment]
            if self.topology[stage].stateful:
                told.append(self._story(stage, gone, owners[stage], holding))
        if owners != dict(routing.owners):
            self._set_routing(self.routing.change(owners=owners))
        self._house(self._working())
        self._rehold()
        return worked, [Tell(text) for text in told]

    def _adopt(self) -> None:
        """Epochs that have not begun hear of homes and holders that changed since they were planned."""
        for run in self.in_flight.values():
            same = run.routing.owners == self.routing.owners and run.routing.instances == self.routing.instances
            if same and not run.running and not run.done:
                run.routing = self.routing

    def holding(self, stage: StageId, usable: Collection[int]) -> dict[int, list[int]]:
        """slice -> containers with a copy that is current, or behind by no more than they are told of"""
        found: dict[int, list[int]] = {}
        for container in sorted(usable):
            checkpoint, slices = self.held.get((stage, container), (-1, frozenset()))
            for number in slices if self._near(stage, checkpoint) else ():
                found.setdefault(number, []).append(container)
        return found

    def _near(self, stage: StageId, checkpoint: int) -> bool:
        """Is it from this checkpoint to the last one no further than the commits that go with every task?"""
        return checkpoint == self.committed or any(c.before == checkpoint for c in self.commits.get(stage, ()))

    def _story(
        self, stage: StageId, gone: set[int], owners: Sequence[int], holding: Mapping[int, Sequence[int]]
    ) -> str:
        moved = [s for s, c in enumerate(self.routing.owners[stage]) if c in gone]
        backed = sum(owners[s] in holding.get(s, ()) for s in moved)
        to = ", ".join(map(str, sorted({owners[s] for s in moved})))
        text = f"{len(moved)} slices of '{stage}' go to containers {to}: {backed} from backups"
        left = len(moved) - backed
        return text + (f", {left} from the durable checkpoint" if left else "")

    def _spread(self, stage: StageId, now: float, cause: str) -> list[Command]:
        peers = self.peers(stage)
        if not peers:
            return []
        owners = self.routing.owners[stage]
        usable = {p.container for p in peers}
        moving = {m.slice: m.target for m in self.migration.of(stage)}
        # What is on its way goes on if it can: else it would be copied for nothing.
        planned = [c if (c := moving.get(s, owner)) in usable else owner for s, owner in enumerate(owners)]
        load = self.load.weights(stage, len(owners))
        wanted = self.schedule.assign(planned, peers, load, self.holding(stage, usable))
        return self._ask(stage, {s: c for s, c in enumerate(wanted) if c != owners[s] or s in moving}, now, cause)

    def _spread_within(self, stage: StageId, node: str, now: float, cause: str) -> list[Command]:
        """The slices of one node, dealt out anew to its slots. Those of other nodes stay where they are."""
        slots = [p for p in self.peers(stage) if p.node == node]
        owners = self.routing.owners[stage]
        moving = {m.slice: m.target for m in self.migration.of(stage)}
        goal = [moving.get(s, owner) for s, owner in enumerate(owners)]
        mine = [s for s, c in enumerate(goal) if self.routing.homes.get(c) == node]
        if not slots or not mine:
            return []
        load = self.load.weights(stage, len(owners))
        held = self.holding(stage, {p.container for p in slots})
        wanted = self.schedule.assign(
            [goal[s] for s in mine],
            slots,
            load and [load[s] for s in mine],
            {i: held[s] for i, s in enumerate(mine) if s in held},
        )
        targets = {s: c for s, c in zip(mine, wanted, strict=True) if c != owners[s] or s in moving}
        return self._ask(stage, targets, now, cause)

    def _ask_usable(self, stage: StageId, targets: Mapping[int, int], cause: str, now: float) -> list[Command]:
        """As far as it can be."""
        usable = {p.container for p in self.peers(stage)}
        able = {s: c for s, c in targets.items() if c in usable and 0 <= s < self.routing.slices_in(stage)}
        return self._ask(stage, able, now, cause)

    def _ask(self, stage: StageId, targets: Mapping[int, int], now: float, cause: str) -> list[Command]:
        if not self.migration.ask(stage, self.routing.owners[stage], targets, now, cause):
            return []
        if now - self.checkpoint_at > self.settings.poll_s or self.committed < self.switched:
            self.checkpoint_wanted = True  # the less changed since, the less there is to send at the switch
        self.migration.up(stage, self._awake(stage))
        return self._warm_up(stage, {m.target for m in self.migration.in_phase("prepare") if m.stage == stage})

    def _reroute(self, epoch: Epoch, now: float, checkpoint_due: bool) -> dict[StageId, dict[int, int]]:
        """Between two epochs: what was handed over has new owners; what is ready is handed over in this epoch."""
        if self.recovering:
            return {}  # all that runs again does so under one table
        # Numbers of containers stay while something is handed over: they are its address.
        for stage, wanted in list(self.resizes.items()) if not self._complete_switch() else ():
            self._resized(stage, wanted, now)
        for stateless in [s.id for s in self.topology.stages if not s.stateful and not s.is_source]:
            peers = [p for p in self.peers(stateless) if p.container in self._awake(stateless)]
            if peers and {p.container for p in peers} != set(self.routing.occupied(stateless)):
                owners = placement.spread(self.routing.owners[stateless], peers)
                if owners != self.routing.owners[stateless]:
                    self._amend(owners={**self.routing.owners, stateless: owners})
        self._rehold()
        ready = self._ready()
        if not ready or self.checkpoint is not None or self.switching is not None:
            return {}
        if self.committed < self.switched and checkpoint_due:
            return {}  # one switch after the other would put the checkpoint off for ever
        self.handed = ready
        self.switching = self.switched = Epoch(epoch + 1)
        self.migration.switch(ready, self.switching)
        handover: dict[StageId, dict[int, int]] = {}
        for move in ready:
            handover.setdefault(move.stage, {})[move.slice] = move.target
        return handover

    def _ready(self) -> list[Move]:
        if self.final:
            return []
        ready = [m for m in self.migration.in_phase("rebuild") if self._has_copy(m) or self._needs_no_copy(m)]
        taken: Counter[tuple[StageId, int]] = Counter()
        now: list[Move] = []
        for move in ready:
            taken[move.stage, move.target] += 1
            each = self.state_bytes.get(move.stage, 0) / self.routing.slices_in(move.stage)
            if taken[move.stage, move.target] <= max(1, SWITCH_BYTES // max(1, each)):
                now.append(move)
        return now

    def _has_copy(self, move: Move) -> bool:
        checkpoint, slices = self.held.get((move.stage, move.target), (-1, frozenset()))
        return move.slice in slices and self._near(move.stage, checkpoint)

    def _needs_no_copy(self, move: Move) -> bool:
        """A target without room for a copy beside its own slices would never get one: it takes the slice over from the
        durable checkpoint, and the epoch waits for that."""
        return not self.away and move.slice in self.refused.get((move.stage, move.target), ())

    def _complete_switch(self) -> bool:
        if not self.handed:
            return False
        routing = self.routing
        for stage in {m.stage for m in self.handed}:
            routing = routing.moved_to(stage, {m.slice: m.target for m in self.handed if m.stage == stage})
        self.handed = []
        # Holders are found anew for the new owners: an owner is nobody's backup of its own slice.
        self._set_routing(replace(routing, holders={}))
        self._rehold()
        return True

    def _resized(self, stage: StageId, wanted: int, now: float) -> None:
        have = self.routing.instances[stage]
        if any(s == stage for s, _ in self.warming | self.warmed):
            return
        if not self.topology[stage].stateful:
            self._set_routing(self.routing.rescale(stage, wanted))
            del self.resizes[stage]
        elif wanted > have:
            self._set_routing(self.routing.resized(stage, wanted))
            del self.resizes[stage]
            if stage in self.opening:
                self.opening.discard(stage)  # the node's slices are dealt out anew, the others stay
            elif stage not in self.targets:
                self.respread.add(f"rescale of '{stage}' to {wanted}")
        elif max(self.routing.owners[stage]) < wanted and not self.migration.of(stage):
            self._set_routing(self.routing.resized(stage, wanted))
            self.up[stage] = {c for c in self.up[stage] if c < wanted}
            del self.resizes[stage]
        elif not self.migration.of(stage):
            self.respread.add(f"rescale of '{stage}' to {wanted}")  # what was on its way up must come down again

    def _note_peers(self, stage: StageId, reports: Sequence[TaskReport]) -> list[Command]:
        """What containers say of their copies."""
        out: list[Command] = []
        if not self.topology[stage].is_source:  # there, the index is that of a split
            self.up[stage] |= {r.index for r in reports}
        self.unsent.discard(stage)
        for report in reports:
            if report.held is not None:
                self.held[stage, report.index] = (report.held[0], frozenset(report.held[1]))
                self.refused[stage, report.index] = frozenset(report.refused)
            if report.unsent:
                self.unsent.add(stage)
            if report.waits and (stage, report.index) not in self.waiting_holders:
                self.waiting_holders.add((stage, report.index))
                out.append(Tell(f"container {report.index}: {report.waits}"))
            elif not report.waits:
                self.waiting_holders.discard((stage, report.index))
            if report.problem:
                node = self.routing.homes.get(report.index, "")
                if node and node not in self.bad_holders:
                    self.bad_holders.add(node)
                    out.append(Tell(f"{_named([node])} keeps no backups any more: {report.problem}"))
        return out

    def _steer(self, now: float) -> list[Command]:
        """Slices that should move, nodes that may go."""
        out: list[Command] = []
        self.migration.expire(now, self.settings.move_timeout_s)
        misplaced = self._misplaced()
        if (self.respread or misplaced) and self.phase == "running" and not self.recovering and self.settings.live:
            cause = ", ".join(sorted(self.respread)) or "slices that have to go"
            # Slices of other stages stay where they were put: somebody may have asked for that just now.
            stages = [s.id for s in self.topology.stateful] if self.respread else misplaced
            self.respread.clear()
            for stage in stages:
                out += self._spread(stage, now, cause)
        if (self.reslot or self.targets) and self.phase == "running" and not self.recovering and self.settings.live:
            out += self._deal(now)
        for stage_id in sorted({s for s, _ in self.suspects}) if not self.recovering else ():
            out += self._warm_up(stage_id, {c for s, c in self.suspects if s == stage_id})
        for node in sorted(self.leaving - self.drained.keys()):
            if not self._in_use(node) and not self.migration and not self.handed:
                self.drained[node] = self.next_epoch
        going = tuple(n for n, e in self.drained.items() if n not in self.released and self.published >= e)
        if going:
            self.released |= set(going)
            self.invited = 0  # the engine does not wait any more for those that have not come
            out.append(ReleaseNodes(going))
        return out

    def _misplaced(self) -> list[StageId]:
        """Stages with slices that nobody fetches from a node that is to leave, or a container that is to go. They were
        handed over just when it was told to, their move came to nothing, or there was nobody to take them.
        """
        going = self.leaving - self.drained.keys()
        there = {c for c, node in self.routing.homes.items() if node in going}
        found = []
        for stage in self.topology.stateful if there or self.resizes else ():
            limit = self.resizes.get(stage.id, INSTANCES_MAX)
            lost = [s for s, c in enumerate(self.routing.owners[stage.id]) if c in there or c >= limit]
            if any((stage.id, s) not in self.migration.moves for s in lost) and self.peers(stage.id):
                found.append(stage.id)
        return found

    def _in_use(self, node: str) -> bool:
        """Does somebody on this node own slices, or read a source?"""
        reading = {c for s in self.topology.stages if s.is_source for c in self._reading(s.id, self.routing)}
        return any(self.routing.homes.get(c) == node for c in self._working() | reading)

    def _readers(self, run: EpochRun, stage: StageInfo) -> tuple[int, ...]:
        """Containers that read the splits of a source in this epoch."""
        return self._reading(stage.id, run.routing)

    def _reading(self, source: StageId, routing: RoutingTable) -> tuple[int, ...]:
        """Those that stay and have a process, or somebody would wait for one; else those that read until now."""
        could = self._could_read(source, routing)
        ready = tuple(c for c in could if c in self.up[source])
        leaving = (c for c in range(routing.instances[source]) if routing.homes.get(c) in self.leaving)
        return ready or tuple(c for c in leaving if c in self.up[source]) or could

    def _could_read(self, source: StageId, routing: RoutingTable) -> tuple[int, ...]:
        homes = routing.homes
        count = routing.instances[source]
        staying = self.nodes.keys() - self.leaving
        housed = [c for c in range(count) if homes.get(c) in staying]
        if not housed:  # all that used to read it are gone: others do, wherever there is a node
            housed = sorted(c for c, node in homes.items() if node in staying) or sorted(homes) or [0]
        return tuple(within_slots(housed, homes, self.cores)[:count])

    def _copies(self, run: EpochRun, stage: StageInfo) -> tuple[tuple[int, ...], ...]:
        if not stage.stateful:
            return ()
        owners = run.routing.owners[stage.id]
        holders = run.routing.holders.get(stage.id, ((),) * len(owners))
        # An epoch that began before a target had a node cannot reach it.
        usable = {c for c in range(run.routing.instances[stage.id]) if c in run.routing.homes}
        targets = {s: c for s, c in self.migration.targets(stage.id).items() if c in usable}
        copies = tuple(
            tuple(sorted({*held, *([targets[s]] if s in targets else [])} - {owners[s]}))
            for s, held in enumerate(holders)
        )
        return copies if any(copies) else ()

    def homeless(self) -> bool:
        """Is there a container with work and no node to do it on?"""
        return any(c not in self.routing.homes for c in self._working())


def _listed(numbers: Collection[int]) -> str:
    return ", ".join(map(str, numbers))


def _named(nodes: Collection[str]) -> str:
    return ", ".join(f"node {n}" for n in sorted(nodes, key=lambda n: (len(n), n)))
