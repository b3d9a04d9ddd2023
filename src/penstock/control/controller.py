"""The controller: events in, commands out.

It does no I/O, has no clock and no threads, so that tests and the simulator drive the very same code. One method
changes its state: ``step``. Each concern is a part of its own, with its own state and its own ``validate``; the
controller dispatches events to the parts and does what concerns several of them: start, recovery, the end.

The rules it keeps (checked by ``validate``):

* an epoch is logged before any of its stages runs; while the store is away, a bounded number of epochs run *ahead* of
  the log, and those are published only when they are logged: until then nobody but us has seen them;
* stage k of epoch e runs when its upstream stages of e and its own e-1 are done;
* epochs are published in order; at most ``epochs_in_flight`` of them are under way;
* a checkpoint at e is complete when e is published and every stateful container has written its delta; then a manifest
  is written;
* after a failure everything after the last complete checkpoint runs again, from the log, under a new attempt number;
* slices change their owner between two epochs only: after a failure, or by a move (``moves.py``). While slices change
  hands no checkpoint is open, so that a recovery finds old and new owner at the same checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from penstock.control import events as ev
from penstock.control import placement
from penstock.control.attempts import Attempts
from penstock.control.balance import Balance
from penstock.control.checkpoints import Checkpoints
from penstock.control.concern import Concern
from penstock.control.epochs import Epochs
from penstock.control.events import (
    CancelAll,
    Command,
    Event,
    Fail,
    Finish,
    ReleaseNodes,
    Tell,
)
from penstock.control.fleet import Fleet
from penstock.control.holders import Holders
from penstock.control.inputs import Inputs
from penstock.control.moves import Moves
from penstock.control.naming import listed, named
from penstock.control.pacing import Pacer
from penstock.control.processes import Processes
from penstock.control.records import NodeInfo, TaskError
from penstock.control.resizes import Resizes
from penstock.control.routes import Routes
from penstock.control.routing import RoutingTable
from penstock.control.settings import Settings
from penstock.control.topology import Topology
from penstock.control.watermarks import Watermarks
from penstock.ids import Attempt, Epoch, StageId
from penstock.state.checkpoint import Manifest


class Controller:
    def __init__(
        self, topology: Topology, routing: RoutingTable, pacer: Pacer, settings: Settings, blank: Manifest
    ) -> None:
        """``blank`` is the checkpoint before any input: it names the job and the flow."""
        self.topology = topology
        self.settings = settings
        self.phase = "starting"
        """starting, running, stopping, recovering, stopped or failed"""
        self.stopping = False
        """Somebody asked the job to stop."""
        self.steps = 0
        """Steps since the job started: the number of a step is the id that its commands name as their cause."""
        self.routes = Routes(self, routing)
        self.attempts = Attempts(self)
        self.fleet = Fleet(self)
        self.processes = Processes(self)
        self.holders = Holders(self)
        self.moves = Moves(self)
        self.resizes = Resizes(self)
        self.balance = Balance(self)
        self.inputs = Inputs(self)
        self.watermarks = Watermarks(self)
        self.epochs = Epochs(self, pacer)
        self.checkpoints = Checkpoints(self, blank)

    @property
    def concerns(self) -> dict[str, Concern]:
        return {name: part for name, part in vars(self).items() if isinstance(part, Concern)}

    def link(self) -> None:
        """Tell the parts whose they are. A controller that was put together from a recorded state needs it."""
        for part in self.concerns.values():
            part.core = self

    # -- the one mutator -----------------------------------------------------------------------------------------

    def step(self, event: Event) -> list[Command]:
        """What is to be done about the event. Every command names this step as its cause."""
        self.steps += 1
        if self.over:
            return []
        out = self._handler(event)(event)
        if not self.over:
            out += self._advance(event.now)
        for command in out:
            msgspec.structs.force_setattr(command, "cause", self.steps)
        return out

    def _handler(self, event: Event) -> Callable[[Any], list[Command]]:
        match event:
            case ev.Tick():
                return lambda event: []
            case ev.Started():
                return self._on_started
            case ev.EpochPlanned():
                return self.epochs.on_planned
            case ev.NothingNew():
                return self.epochs.on_nothing_new
            case ev.EpochLogged():
                return self.epochs.on_logged
            case ev.StageDone():
                return self.epochs.on_stage_done
            case ev.StageFailed():
                return self.epochs.on_stage_failed
            case ev.EpochPublished():
                return self.epochs.on_published
            case ev.StoreChanged():
                return self.epochs.on_store
            case ev.Flushed():
                return self.checkpoints.on_flushed
            case ev.ManifestWritten():
                return self.checkpoints.on_manifest
            case ev.Compacted():
                return self.checkpoints.on_compacted
            case ev.NodesChanged():
                return self.fleet.on_nodes_changed
            case ev.NodesInvited():
                return self.fleet.on_invited
            case ev.LeaveRequested():
                return self.fleet.on_leave
            case ev.CoresRequested():
                return self.fleet.on_cores
            case ev.WarmedUp():
                return self.processes.on_warmed_up
            case ev.Stuck():
                return self.processes.on_stuck
            case ev.RescaleRequested():
                return self.resizes.on_rescale
            case ev.MoveRequested():
                return self.moves.on_move
            case ev.CancelMovesRequested():
                return self.moves.on_cancel
            case ev.RebalanceRequested():
                return self.balance.on_rebalance
            case ev.HotSlices():
                return self.balance.on_hot
            case ev.StopRequested():
                return self._on_stop
            case ev.Fatal():
                return self._on_fatal
        raise TypeError(f"the controller knows no event {type(event).__name__}")

    # -- start and end -------------------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        return self.phase in ("stopped", "failed")

    @property
    def ending(self) -> bool:
        """No new epoch may begin. A comparison that lets the job come to rest in between adds its own reason."""
        return self.stopping

    def _on_started(self, event: ev.Started) -> list[Command]:
        self.phase = "running"
        if event.restored is not None:
            self.checkpoints.restore(event.restored)
            self.inputs.restore(event.restored)
            self.watermarks.restore(event.restored)
            self.epochs.published = self.checkpoints.committed
            self.attempts.at_least(event.restored.attempt + 1)
            self.routes.put(RoutingTable.from_json(event.restored.routing))
        logged = self.inputs.restore_log(event.logged)
        if logged is not None:
            self.routes.put(logged)
        self.attempts.at_least(event.attempt)
        self.routes.put(self.routes.table.filled())
        self.fleet.nodes = {n.name: n for n in event.nodes or (NodeInfo("local"),)}
        told = self.fleet.keep_cores()
        self.fleet.assign_homes()
        self.holders.refresh()
        for source in [s.id for s in self.topology.stages if s.is_source]:  # the engine starts them
            self.processes.answered(source, range(self.routes.table.instances[source]))
        self.rewind(event.now)
        self.epochs.first = self.epochs.next
        return told

    def _on_stop(self, event: ev.StopRequested) -> list[Command]:
        self.stopping = True
        if self.phase == "running":
            self.phase = "stopping"
        return []

    def _on_fatal(self, event: ev.Fatal) -> list[Command]:
        return self.give_up(event.error)

    def give_up(self, error: TaskError) -> list[Command]:
        self.phase = "failed"
        return [CancelAll(attempt=Attempt(self.attempts.current + 1)), Fail(error=error)]

    def waits(self, order: str) -> list[Command]:
        """Whoever gave an order in the middle of a recovery is told that it was heard."""
        return [Tell(text=f"{order} waits for the end of the recovery")] if self.attempts.recovering else []

    # -- recovery ------------------------------------------------------------------------------------------------

    def rewind(self, now: float) -> None:
        """Go back to the last checkpoint: everything after it is to run again."""
        self.holders.sent.clear()
        self.moves.recovered(now)
        self.balance.load.forget()
        self.checkpoints.rewind(now)
        self.watermarks.rewind()
        self.epochs.rewind(now)

    def recover(self, now: float, reason: str) -> list[Command]:
        self.moves.complete_switch()
        error = self.attempts.begin_recovery(reason)
        if error is not None:
            return self.give_up(error)
        self.checkpoints.remember_writing(self.attempts.current)
        self.attempts.begin_next()
        self.phase = "recovering"
        self.rewind(now)
        return [CancelAll(attempt=self.attempts.current, reason=reason)]

    def lose(self, lost: Mapping[StageId, set[int]], now: float, reason: str, parted: bool = False) -> list[Command]:
        """Containers are gone: their slices go to others that have copies of them, and everybody goes back to the
        checkpoint. ``parted``: they went because we let them go, and nothing that is under way needs them.
        """
        worked, told = self._take_over(lost)
        if not worked and (parted or not self.attempts.outstanding):
            self.epochs.adopt_routing()
            return [Tell(text=f"{reason.removeprefix('lost ')} has left" if parted else f"{reason}; it owned nothing")]
        return [*self.recover(now, reason), *told]

    def dismiss(self, node: str, now: float, reason: str) -> list[Command]:
        """Every task on this node fails: everybody goes on without it."""
        _, told = self._take_over(self.fleet.dismiss(node))
        why = f"every task on {named([node])} fails, so it is given back, and can be replaced by scale_out: {reason}"
        return [*self.recover(now, reason), Tell(text=why), *told, ReleaseNodes(nodes=(node,))]

    def _take_over(self, lost: Mapping[StageId, set[int]]) -> tuple[bool, list[Tell]]:
        """Slices of containers that are gone go to others, and containers that work get a node. Whether the lost ones
        owned any slices, and what there is to tell."""
        self.moves.complete_switch()
        homes = self.routes.table.homes
        living = {s: {c: n for c, n in found.items() if n in self.fleet.nodes} for s, found in homes.items()}
        table = self.routes.table.change(homes=living)
        worked = any(set(table.occupied(s)) & gone for s, gone in lost.items() if s in table.owners)
        told: list[Tell] = []
        self.processes.lost(lost)
        self.holders.lost(lost)
        self.routes.put(table)
        owners = dict(table.owners)
        for stage, gone in lost.items():
            if stage not in owners or not set(owners[stage]) & gone:
                continue
            awake = set(owners[stage]) | self.processes.up[stage]
            peers = [p for p in self.balance.peers(stage) if p.container in awake - gone]
            if not peers:
                continue  # the container itself comes up again, somewhere
            holding = self.holders.holding(stage, {p.container for p in peers})
            owners[stage] = placement.takeover(owners[stage], gone, holding, peers)  # type: ignore[assignment]
            if self.topology[stage].stateful:
                told.append(self._takeover_story(stage, gone, owners[stage], holding))
        self.routes.assign_owners(owners)
        self.fleet.assign_homes(self.fleet.working())
        self.holders.refresh()
        return worked, told

    def _takeover_story(
        self, stage: StageId, gone: set[int], owners: Sequence[int], holding: Mapping[int, Sequence[int]]
    ) -> Tell:
        moved = [s for s, c in enumerate(self.routes.table.owners[stage]) if c in gone]
        backed = sum(owners[s] in holding.get(s, ()) for s in moved)
        to = listed(sorted({owners[s] for s in moved}))
        text = f"{len(moved)} slices of '{stage}' go to containers {to}: {backed} from backups"
        left = len(moved) - backed
        return Tell(text=text + (f", {left} from the durable checkpoint" if left else ""))

    # -- what to do next -----------------------------------------------------------------------------------------

    def _advance(self, now: float) -> list[Command]:
        if self.phase == "starting" or (self.attempts.recovering and not self._recovered(now)):
            return []
        out = self._steer(now)
        out += self.epochs.run_stages(now)
        before = len(self.epochs.in_flight)
        out += self.epochs.publish(now)
        if len(self.epochs.in_flight) < before:
            out += self.epochs.run_stages(now)  # what the sinks have already makes room at once
        out += self._quiesce(now)
        out += self.checkpoints.write_manifest()
        out += self.epochs.plan(now)
        return out

    def _recovered(self, now: float) -> bool:
        """Can epochs run again? Old work must be gone before its containers are used again, and every container with
        work needs a node."""
        if self.attempts.outstanding or self.fleet.gathering(now):
            return False
        if self.fleet.homeless():
            self.fleet.assign_homes(self.fleet.working())
            if self.fleet.homeless():
                return False  # until Spark has another executor for us
        self.epochs.adopt_routing()
        self.attempts.recovering = False
        self.phase = "stopping" if self.stopping else "running"
        return True

    def _steer(self, now: float) -> list[Command]:
        """Slices that should move, containers that should answer, nodes that may go."""
        self.moves.expire(now)
        out = self.balance.steer(now) if self.phase == "running" else []
        return [*out, *self.processes.wake_suspects(), *self.fleet.let_go()]

    def reroute(self, epoch: Epoch, now: float) -> dict[StageId, dict[int, int]]:
        """Between two epochs: what was handed over has new owners; what is ready is handed over in this epoch."""
        if self.attempts.recovering:
            return {}  # all that runs again does so under one table
        due = self.checkpoints.due(now)
        # Numbers of containers stay while something is handed over: they are its address.
        if not self.moves.complete_switch():
            self.resizes.make_room()
        self._spread_stateless()
        self.holders.refresh()
        ready = self.moves.ready()
        if not ready or self.checkpoints.open is not None or self.moves.changing:
            return {}
        if self.moves.uncommitted and due:
            return {}  # one switch after the other would put the checkpoint off for ever
        return self.moves.hand_over(ready, epoch)

    def _spread_stateless(self) -> None:
        """Slices of stages without state follow their containers."""
        changes: dict[StageId, tuple[int, ...]] = {}
        for stage in [s.id for s in self.topology.stages if not s.stateful and not s.is_source]:
            owners = self.routes.table.owners[stage]
            peers = [p for p in self.balance.peers(stage) if p.container in self.processes.awake(stage)]
            if peers and {p.container for p in peers} != set(owners):
                changes[stage] = placement.spread(owners, peers)
        if any(owners != self.routes.table.owners[stage] for stage, owners in changes.items()):
            self.routes.amend(owners={**self.routes.table.owners, **changes})

    def _quiesce(self, now: float) -> list[Command]:
        """With nothing under way: finish a checkpoint, or end."""
        if self.epochs.in_flight or self.epochs.planning:
            return []
        over = self.ending or self.epochs.final or self.epochs.enough()
        if self.checkpoints.open is not None:
            # Deltas come with the reports of the next epoch. Asking for them would make its tasks wait behind us.
            return self.checkpoints.flush() if over or self.epochs.idle_since is not None else []
        if not over:
            return []
        self.moves.recall(now)  # there is no next epoch to switch in
        if self.checkpoints.committed < self.epochs.published:
            return self.checkpoints.begin_at_rest(now)
        return self.at_rest(now)

    def at_rest(self, now: float) -> list[Command]:
        """Nothing is under way, and a checkpoint covers everything: the job is over."""
        self.phase = "stopped"
        return [Finish(reason="stopped" if self.stopping and not self.epochs.final else "complete")]

    # -- invariants ----------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Assert what must always hold. Tests and the simulator call it after each step."""
        for part in self.concerns.values():
            part.validate()
