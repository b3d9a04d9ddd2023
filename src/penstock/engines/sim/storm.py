"""A storm: hundreds of orders to a job under load, with nodes that die in between.

The mixtures of ``faults.py`` give an order now and then, and everything else that can go wrong around it. A storm is
about the orders themselves: rescales, moves, cancellations, cores and nodes, so close upon each other that each finds
those before it half done. Many make no sense by the time they arrive: a container that is not there or on its way out,
a slice that is on the move, a node that is dead and nobody knows it yet, two wishes at the same instant. Most go the
way of a user, through ``Job``, which may refuse them with a reason; others are posted straight away, as if the world
had changed between the check and the step, so that the controller must cope with anything.

When all are given the world is healed. Then everything asked for has to come to rest before the end of the input
appears: an order that hangs for ever is a violation too.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.config import Config
from penstock.control.controller import Controller
from penstock.control.events import (
    CancelMovesRequested,
    CoresRequested,
    Event,
    LeaveRequested,
    MoveRequested,
    NodesInvited,
    RebalanceRequested,
    RescaleRequested,
)
from penstock.engines.job import Job
from penstock.engines.sim.checkers import Violation
from penstock.engines.sim.faults import Faults
from penstock.engines.sim.flows import Scenario, stormy
from penstock.errors import ConfigError
from penstock.ids import StageId

if TYPE_CHECKING:
    from penstock.engines.sim.world import World

ORDERS = 200
KILLS = (2, 5)
NODES_MAX = 6
GUSTS = (4, 7)
"""Orders come in gusts, and between them there is time for some to be carried out."""
GUST_S = 0.1
AT_ONCE = 0.2
"""So many orders come at the same instant as the one before."""
UNCHECKED = 0.3
"""So many reach the controller without having been checked."""
SETTLE_S_MAX = 90.0
"""Virtual seconds from the last order until nothing moves any more."""
LOOK_S = 0.2

KINDS = {
    "rescale": 26,
    "move": 26,
    "move twice": 8,
    "move to anywhere": 8,
    "cancel": 10,
    "rebalance": 5,
    "cores": 8,
    "leave": 4,
    "invite": 5,
}


class SimJob(Job):
    """What a user has in hands, for the driver that is there now."""

    def __init__(self, world: World) -> None:
        assert world.driver is not None
        self._runtime = world.driver
        self._plan = world.plan


class Storm:
    """Gives its orders to one world. Their number and times are drawn at the beginning, the rest as it comes."""

    def __init__(self, world: World, orders: int = ORDERS) -> None:
        self.world = world
        self.random = random.Random(f"penstock storm {world.seed}")
        self.orders = orders
        self.given: Counter[str] = Counter()
        self.refused = 0
        self.kills = 0

    # -- how it goes -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        r, world = self.random, self.world
        end = world.scenario.quiet_at
        gusts = [r.uniform(0.1, end - 0.5) for _ in range(r.randint(*GUSTS))]
        times = sorted(min(end, r.choice(gusts) + r.expovariate(1 / GUST_S)) for _ in range(self.orders))
        for i in range(1, self.orders):
            if r.random() < AT_ONCE:
                times[i] = times[i - 1]
        for at in times:
            world.schedule.after(at, self._order)
        for _ in range(r.randint(*KILLS)):
            world.schedule.after(r.uniform(0.3, end), self._kill)
        world.outside.holds_back = True
        world.schedule.after(end + LOOK_S, self._look)

    def _look(self) -> None:
        """Has everything come to rest? Then the end of the input appears."""
        world = self.world
        driver = world.driver
        if driver is not None and driver.controller is not None and at_rest(driver.controller):
            world.tell("world", "everything has come to rest")
            world.outside.holds_back = False
            return
        if world.schedule.now > world.scenario.quiet_at + SETTLE_S_MAX:
            state = "no driver" if driver is None or driver.controller is None else _unrest(driver.controller)
            raise Violation("progress", f"{SETTLE_S_MAX:.0f} s after the last order there is no rest: {state}")
        world.schedule.after(LOOK_S, self._look)

    def _controller(self) -> Controller | None:
        driver = self.world.driver
        return driver.controller if driver is not None else None

    # -- orders ------------------------------------------------------------------------------------------------------

    def _order(self) -> None:
        c = self._controller()
        if c is None or c.phase == "starting":
            return  # nobody is there to hear it
        match self.random.choices(list(KINDS), list(KINDS.values()))[0]:
            case "rescale":
                self._rescale(c)
            case "move":
                self._move(c, 1)
            case "move twice":
                self._move(c, 2)
            case "move to anywhere":
                self._move_anywhere(c)
            case "cancel":
                self._cancel(c)
            case "rebalance":
                self._give("rebalance", lambda job: job.rebalance(), RebalanceRequested(now=self._now))
            case "cores":
                self._cores(c)
            case "leave":
                self._leave(c)
            case "invite":
                self._invite()

    @property
    def _now(self) -> float:
        return self.world.schedule.now

    def _give(self, what: str, order: Callable[[SimJob], None] | None, event: Event) -> None:
        """As a user would, or unchecked."""
        driver = self.world.driver
        assert driver is not None
        self.given[what.split(":")[0]] += 1
        self.world.tell("order", what)
        if order is None or self.random.random() < UNCHECKED:
            driver.post(event)
            return
        try:
            order(SimJob(self.world))
        except ConfigError as error:
            self.refused += 1
            self.world.tell("order", f"refused: {error.message}")
            if not (error.message and error.remedy):
                raise Violation("answered", f"{what}: refused without a reason or a remedy: {error}") from error

    def _rescale(self, c: Controller) -> None:
        r, routing = self.random, c.routes.table
        stage = r.choice(sorted(routing.owners if r.random() < 0.85 else routing.instances))
        instances = r.randint(1, len(c.fleet.nodes) + 2)
        most = routing.slices_in(stage) if stage in routing.owners else instances
        event = RescaleRequested(now=self._now, stage=stage, instances=min(instances, most))
        self._give(f"rescale: '{stage}' to {instances}", lambda job: job.rescale(stage, instances), event)

    def _keyed(self, c: Controller) -> tuple[StageId, list[int]]:
        r, most = self.random, c.routes.table.slices_most
        # The slices are drawn before the stage: what a seed means depends on the order of the draws.
        drawn = r.sample(range(most), r.randint(1, min(4, most)))
        stage = r.choice(sorted(c.routes.table.owners))
        return stage, [number % c.routes.table.slices_in(stage) for number in drawn]

    def _move(self, c: Controller, times: int) -> None:
        """To containers that there are; twice: the same slices to two of them, one order upon the other."""
        stage, slices = self._keyed(c)
        for _ in range(times):
            self._send(stage, slices, self.random.randrange(c.routes.table.instances[stage]))

    def _move_anywhere(self, c: Controller) -> None:
        """To a container that may be vacant, homeless, or not there at all; of slices that may not be there."""
        stage, slices = self._keyed(c)
        if self.random.random() < 0.2:
            slices = [*slices, c.routes.table.slices_in(stage) + 1]
        self._send(stage, slices, self.random.randint(-1, c.routes.table.instances[stage] + 2))

    def _send(self, stage: StageId, slices: list[int], target: int) -> None:
        event = MoveRequested(now=self._now, stage=stage, targets=dict.fromkeys(slices, target))
        what = f"move: slices {slices} of '{stage}' to {target}"
        self._give(what, lambda job: job.migrate(stage, slices, target), event)

    def _cancel(self, c: Controller) -> None:
        r = self.random
        stage, slices = self._keyed(c)
        if r.random() < 0.25:
            self._give("cancel: all", lambda job: job.cancel_moves(), CancelMovesRequested(now=self._now))
            return
        of, some = r.choice([None, stage]), r.choice([None, tuple(slices), tuple(slices)])
        what = f"cancel: slices {some or 'all'} of {of or 'every stage'}"
        self._give(what, None, CancelMovesRequested(now=self._now, stage=of, slices=some))

    def _cores(self, c: Controller) -> None:
        r = self.random
        node = r.choice([*sorted(c.fleet.nodes), "nobody"])
        cores = r.randint(1, (c.fleet.nodes[node].cores if node in c.fleet.nodes else 1) + (r.random() < 0.2))
        event = CoresRequested(now=self._now, node=node, cores=cores)
        self._give(f"cores: {cores} of node {node}", lambda job: job.set_cores(node, cores), event)

    def _leave(self, c: Controller) -> None:
        names = self.random.sample(sorted(c.fleet.nodes), min(len(c.fleet.nodes), self.random.choice([1, 1, 1, 2])))
        event = LeaveRequested(now=self._now, nodes=tuple(names))
        self._give(f"leave: {', '.join(names)}", lambda job: job.scale_in(names), event)

    def _invite(self) -> None:
        """Somebody asks for another node, which comes, or does not."""
        r, cluster = self.random, self.world.cluster
        self._give("invite: one node", None, NodesInvited(now=self._now, count=1))
        if len(cluster.nodes) < NODES_MAX and r.random() < 0.8:
            node = self.world.new_node(len(cluster.nodes), r.choice([1, 2]))
            node.up = False
            cluster.nodes.append(node)
            self.world.schedule.after(r.uniform(0.05, 1.0), lambda: self.world.bring_back(node))

    # -- kills -------------------------------------------------------------------------------------------------------

    def _kill(self) -> None:
        """A node dies; before anybody knows, slices are sent to it."""
        up = self.world.cluster.alive()
        if len(up) < 2 and self.random.random() < 0.7:
            return
        node = self.random.choice(up) if up else None
        if node is None:
            return
        name = node.name
        self.kills += 1
        self.world.crash(node)
        c = self._controller()
        there = sorted(set().union(*c.routes.table.homes_on({name}).values())) if c is not None else []
        if c is None or c.phase == "starting" or not there or self.random.random() < 0.3:
            return
        for _ in range(2):
            stage, slices = self._keyed(c)
            self._send(stage, slices, self.random.choice(there))


def at_rest(c: Controller) -> bool:
    """Nothing of what was asked for is left to do."""
    return c.phase == "running" and not _unrest(c)


def _unrest(c: Controller) -> str:
    """What is still going on."""
    going = {
        "moves": list(map(str, c.moves.by_slice.values())),
        "handed over": len(c.moves.in_phase("handover")),
        "resizes": dict(c.resizes.wanted),
        "warming": sorted(c.processes.warming),
        "to spread": sorted(c.balance.reasons),
        "to leave": sorted(c.fleet.leaving - c.fleet.released),
        "recovering": c.attempts.recovering,
    }
    return ", ".join(f"{name}: {value}" for name, value in going.items() if value)


def scenario_of(seed: int) -> Scenario:
    return stormy(Scenario.draw(seed), random.Random(f"penstock storm scenario {seed}"))


def config_of(config: Config, faults: Faults, r: random.Random) -> Config:
    """Settings under which orders matter: checkpoints often, no early end."""
    # What a seed means depends on the order of the draws.
    config = config.replace(epoch_rows=r.choice([8, 15, 30]), checkpoint_interval_s=r.choice([0.0, 0.2, 0.5, 1.0]))
    return config.replace(
        backups=r.choice([0, 1, 1, 2]),
        epochs_max=None,
        # A target whose disk fails gives up its copy for good: such a move ends when its time is up, not before.
        move_timeout_s=r.choice([1.0, 3.0] if faults.spill_fails else [1.0, 600.0]),
    )


__all__ = ["ORDERS", "SimJob", "Storm", "at_rest", "config_of", "scenario_of"]
