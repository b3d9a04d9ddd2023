"""The world of one seed: a driver that dies and is started again, nodes that crash, people who rescale and stop.

The driver is the real ``Runtime`` with the real ``Controller``; only its threads are entries of the schedule, and its
clock is the schedule's. The world goes through two phases. First faults happen at will; then the world is *healed*: all
nodes are up, nothing fails any more, and the job must complete. A seed says everything: the same seed gives the same
story, line by line, which ``digest`` sums up.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import msgspec
import xxhash

from penstock.config import Config
from penstock.control.events import (
    CancelAll,
    CancelMovesRequested,
    Command,
    EpochPublished,
    Event,
    LeaveRequested,
    MoveRequested,
    NodesChanged,
    PublishEpoch,
    RebalanceRequested,
    ReleaseNodes,
    RescaleRequested,
    RunStage,
    StageDone,
    StageFailed,
    StopRequested,
    Stuck,
    Tell,
    Tick,
    WarmedUp,
    WarmUp,
)
from penstock.engines.protocol import Engine
from penstock.engines.runtime import LOG_NAME, Runtime
from penstock.engines.sim.checkers import Checkers, Violation
from penstock.engines.sim.engine import Cluster, Node, SimEngine
from penstock.engines.sim.faults import ON_PURPOSE, Disk, DriverDied, Faults, StoreView
from penstock.engines.sim.flows import Scenario, build
from penstock.engines.sim.oracle import final_state, newest, run_undisturbed
from penstock.engines.sim.outside import Outside, SimSink, SimSource
from penstock.engines.sim.schedule import Schedule, SimPool
from penstock.engines.sim.storm import Storm, config_of, scenario_of
from penstock.engines.task import DEAD_LETTERS, MANIFEST_NAME
from penstock.errors import CorruptData, PenstockError
from penstock.ids import Epoch, StageId
from penstock.observe.status import JobStatus
from penstock.plan import Plan, compile_flow
from penstock.state.checkpoint import Manifest
from penstock.state.store import Store

HEALED_S_MAX = 120.0
"""Virtual seconds from the last fault to the end of the job: some 40 epochs of four stages, twice over."""
AFTERMATH_S = 5.0
"""The last faults may be noticed so much later."""
TICK_S = 0.1
JOURNAL_EVERY = 8
"""One seed in so many keeps the drivers' journals: they cost a tenth of its time."""
ZONED = 0.25
"""So many seeds know the fault zones of their nodes, and some crashes there take all of a zone."""
NO_FAULTS = Faults()
GAVE_UP = "made no progress"
"""In the error of a job that failed too often in a row: a fair end while faults go on."""
WALL_MS = 1_700_000_000_000
HARMLESS = {"driver_crash_s", "clock_jump_s", "store_away_s", "rescale_s", "stop_s", "dies_in_write", "dies_at_step"}
HARMLESS |= {"delete_fails", "commit_fails", "commit_unsure", "torn", "duplicate", "spill_fails", "move_s", "zombie"}
HARMLESS |= {"slow_node", "slow_write", "slow_answer"}
"""Faults of which no running work fails: the driver may die of them, but whoever is alive has no reason to go back."""


class Driver(Runtime):
    """One life of the driver: the real runtime, whose queue of events is in virtual time."""

    def __init__(
        self,
        world: World,
        config: Config,
        make_engine: Callable[[str], Engine],
        store: Store,
    ) -> None:
        self.world = world
        self.dead = False
        self.told_away = False
        self.told: list[str] = []
        """What people were told in the last step."""
        self.inbox: deque[Event] = deque()
        self.pools: list[SimPool] = []
        super().__init__(
            world.plan,
            config,
            store,
            make_engine,
            checkpoint_url=None,
            clock=world.schedule.clock,
            wall_ms=world.wall_ms,
            trip=world.at_step,
            pool=self._pool,
            unique=world.unique,
        )

    def _pool(self, name: str) -> Executor:
        held = (lambda: 0.0) if name == "penstock-plan" else self._held
        pool = SimPool(self.world.schedule, self.world.driver_delay, held)
        self.pools.append(pool)
        return pool

    def _held(self) -> float:
        """Its own threads wait while the store is away; after some tries the controller is told."""
        left = self.world.store_held()
        if left > 0 and not self.told_away:
            self.told_away = True
            self.world.schedule.after(self.world.random.uniform(0.0, 0.3), lambda: self._tell_away(True))
        elif not left and self.told_away:
            self.told_away = False
            self._tell_away(False)
        return left

    def _tell_away(self, away: bool) -> None:
        if not self.dead and self.controller is not None and away == self.told_away:
            self.store_changed(away, "away on purpose")

    def _ahead(self, epoch: int) -> bool:
        run = self.controller.epochs.in_flight.get(Epoch(epoch)) if self.controller is not None else None
        return run is not None and run.ahead

    def post(self, event: Event) -> None:
        if self.dead:
            return
        self.inbox.append(event)
        if len(self.inbox) == 1:
            self.world.schedule.after(self.world.random.uniform(0.0, 0.004), self.take)

    def status(self) -> JobStatus:
        """As of now: there is no loop that publishes a snapshot every now and then."""
        self._publish_status(self.clock(), at_once=True)
        return super().status()

    def take(self) -> None:
        """One event from the inbox."""
        if self.dead or not self.inbox:
            return
        event = self.inbox.popleft()
        if self.inbox:
            self.world.schedule.after(self.world.random.uniform(0.0, 0.004), self.take)
        self.world.on_event(event)
        self.told.clear()
        self.handle(event)
        assert self.controller is not None
        self.world.checkers.answered.on_order(event, self.controller, self.told)
        self.world.checkers.sound.on_step(self.controller)
        if self.reason or self.error is not None:
            self.world.driver_ends(self)

    def _execute(self, command: Command) -> None:
        if isinstance(command, Tell):
            self.told.append(command.text)
        self.world.on_command(command)
        super()._execute(command)

    def tick(self) -> None:
        if self.dead:
            return
        if not self.inbox:
            self.post(Tick(now=self.clock()))
        self.world.schedule.after(TICK_S, self.tick)

    def die(self) -> None:
        self.dead = True
        self.inbox.clear()
        for pool in self.pools:
            pool.die()
        if isinstance(self.engine, SimEngine):
            self.engine.vanish()


@dataclass
class World:
    seed: int
    stormy: bool = False
    """Orders upon orders, instead of faults of every kind."""
    story: list[tuple[float, str, str]] = field(default_factory=list)
    checkers: Checkers = field(default_factory=Checkers)
    starts: int = 0
    deaths: int = 0
    recoveries: int = 0
    healed_at: float | None = None
    complete: bool = False
    jump_ms: int = 0
    away_until: float = 0.0
    driver: Driver | None = None

    def __post_init__(self) -> None:
        self.random = random.Random(f"penstock world {self.seed}")
        self.scenario = scenario_of(self.seed) if self.stormy else Scenario.draw(self.seed)
        self.faults = Faults.storm(self.random) if self.stormy else Faults.draw(self.random)
        self.zoning = random.Random(f"penstock zones {self.seed}")
        self.zones = [f"zone-{n}" for n in range(self.zoning.choice([2, 3]))] if self.zoning.random() < ZONED else [""]
        self.schedule = Schedule()
        self.disk = Disk()
        self.outside = Outside(self.schedule.clock, self.random, self._faults_now, self.checkers, self.tell)
        self.plan = self._plan()
        self.cluster = Cluster(
            self.schedule,
            self.random,
            self._faults_now,
            self.plan,
            self._view(dies=False),
            self.checkers,
            self.outside,
            self.tell,
            self._record,
            [self.new_node(n, self.random.choice([1, 2]) if self.stormy else 1) for n in range(self.scenario.nodes)],
            self.store_held,
            backup_memory=self.random.choice([1, 2_000, 1 << 30]),
        )
        self.storm = Storm(self) if self.stormy else None

    def new_node(self, number: int, cores: int) -> Node:
        return Node(number, cores, self.zoning.choice(self.zones))

    def _plan(self) -> Plan:
        def sink(id: str) -> SimSink:
            return SimSink(id, self.outside, self.scenario.collects)

        flow, _ = build(self.scenario, lambda id, given: SimSource(id, given, self.outside), sink)
        flow.dead_letters(sink(DEAD_LETTERS))
        return compile_flow(flow.graph())

    def _view(self, dies: bool) -> StoreView:
        return StoreView(self.disk, self._faults_now, self.random, self.tell, dies)

    def _faults_now(self) -> Faults:
        return self.faults if self.healed_at is None else NO_FAULTS

    # -- what the driver is given --------------------------------------------------------------------------------------

    def store_held(self) -> float:
        """For how long the store will not answer."""
        return max(0.0, self.away_until - self.schedule.now) if self.healed_at is None else 0.0

    def wall_ms(self) -> int:
        return WALL_MS + int(self.schedule.now * 1000) + self.jump_ms

    def unique(self) -> str:
        return f"{self.random.getrandbits(128):032x}"

    def driver_delay(self) -> float:
        r = self.random
        return r.uniform(0.05, 0.6) if r.random() < self._faults_now().slow_answer else r.uniform(0.001, 0.03)

    def at_step(self, step: str) -> None:
        if step == "after-manifest":
            self.checkers.bounded_growth.on_checkpoint()
        if step == "after-garbage":
            self._check_garbage()
        if self.random.random() < self._faults_now().dies_at_step:
            self.tell("fault", f"the driver dies at step {step}")
            raise DriverDied

    def _check_garbage(self) -> None:
        assert self.driver is not None and self.driver.controller is not None
        store = self.disk.memory
        kept = [Manifest.from_bytes(store.get(name), name) for name in store.list("manifests/")]
        needed = frozenset(self.driver.controller.checkpoints.manifest.names() | self.driver.merged).union(
            *(m.names() for m in kept)
        )
        oldest = min(m.epoch for m in kept)
        self.checkers.bounded_growth.on_swept(store.list(), needed, oldest, self.driver.config.manifests_kept)
        self._check_staging(oldest)
        self.cluster.check_backups()

    def _check_staging(self, covered: int) -> None:
        running = {name: part.epoch for name, part in self.outside.staged.items() if not part.stray}
        self.checkers.bounded_growth.on_staged(running, covered)

    def _record(self, epoch: int) -> dict[str, Any] | None:
        """What the log on disk says of an epoch."""
        data = self.disk.items.get(LOG_NAME.format(epoch))
        return None if data is None else dict(msgspec.json.decode(data.partition(b"\n")[2]))

    # -- the story -----------------------------------------------------------------------------------------------------

    def tell(self, kind: str, text: str) -> None:
        self.story.append((self.schedule.now, kind, text))

    def digest(self) -> str:
        return xxhash.xxh3_64_hexdigest(
            "\n".join(f"{now:.6f} {kind} {text}" for now, kind, text in self.story).encode()
        )

    def on_event(self, event: Event) -> None:
        match event:
            case Tick():
                return
            case StageDone() | StageFailed():
                detail = f" '{event.stage}' of epoch {event.epoch} (attempt {event.attempt})"
            case NodesChanged():
                detail = f": {', '.join(n.name for n in event.nodes) or 'none'}"
            case MoveRequested():
                detail = f": slices {event.targets} of '{event.stage}'"
            case RescaleRequested():
                detail = f": '{event.stage}' to {event.instances}"
            case LeaveRequested():
                detail = f": {', '.join(event.nodes)}"
            case WarmedUp():
                detail = f": {event.containers} of '{event.stage}'"
            case Stuck():
                detail = f": {event.containers} of '{event.stage}' in epoch {event.epoch} (attempt {event.attempt})"
            case EpochPublished():
                detail = f" {event.epoch}"
                self.checkers.exactly_once.on_published(event.epoch)
            case _:
                detail = f" {event.epoch}" if hasattr(event, "epoch") else ""
        number = self.driver.controller.steps + 1 if self.driver and self.driver.controller else 0
        self.tell("event", f"{type(event).__name__}{detail} (step {number})")

    def on_command(self, command: Command) -> None:
        match command:
            case PublishEpoch():
                detail = f" {command.epoch}"
                self.checkers.no_lost_update.on_publish(command.epoch, self._record(command.epoch))
            case RunStage():
                detail = f" '{command.stage}' of epoch {command.epoch} (attempt {command.attempt})"
                detail += f" from checkpoint {command.checkpoint}" + (", sealing" if command.seal else "")
                detail += f", on {command.containers}" if command.containers else ""
                detail += f", handing over {command.peers.handover}" if command.peers.handover else ""
            case CancelAll():
                self.recoveries += 1
                self.checkers.bounded_growth.on_failure()
                detail = f": attempt {command.attempt}"
                if self._calm() and command.reason:
                    self.checkers.progress.on_recovery(command.reason)
            case ReleaseNodes():
                detail = f": {', '.join(command.nodes)}"
            case WarmUp():
                detail = f": {command.containers} of '{command.stage}'"
            case Tell():
                detail = f": {command.text}"
            case _:
                detail = f" {command.epoch}" if hasattr(command, "epoch") else ""
        self.tell("command", f"{type(command).__name__}{detail} <- step {command.cause}")

    def _calm(self) -> bool:
        """Is there nothing that a running job could fail of?"""
        if self.faults.leave_s or self.stormy:  # a node that is let go takes with it what it did for others
            return False
        over = self.healed_at is not None and self.schedule.now > self.healed_at + AFTERMATH_S
        return over or set(self.faults.kinds()) <= HARMLESS

    # -- the driver's life ---------------------------------------------------------------------------------------------

    def start_driver(self) -> None:
        if self.complete or self.driver is not None:
            return
        if self.store_held() or not self.cluster.alive():
            self.schedule.after(self.store_held() + 0.01, self.start_driver)
            return
        self.starts += 1
        config = self.scenario.config(self.random)
        if self.stormy:
            config = config_of(config, self.faults, self.random)
        if self.faults.torn:  # there must be an older checkpoint to go back to
            config = config.replace(checkpoint_interval_s=0.1, manifests_kept=config.manifests_kept + 1)
        if self.seed % JOURNAL_EVERY:
            config = config.replace(journal_mb=0)
        settings = f"instances {config.instances}, {config.epochs_in_flight} in flight"
        self.tell(
            "world", f"driver {self.starts} starts: {settings}, a checkpoint every {config.checkpoint_interval_s} s"
        )

        in_flight = config.epochs_in_flight + config.store_away_epochs

        def engine(job_id: str) -> SimEngine:
            made = SimEngine(self.cluster, job_id, len(self.cluster.nodes), in_flight)
            made.ahead = driver._ahead
            return made

        self.driver = driver = Driver(self, config, engine, self._view(dies=True))
        try:
            driver._start()
        except (PenstockError, OSError) as error:
            driver.error = error if isinstance(error, PenstockError) else PenstockError(str(error))
            self.driver_ends(driver)
            return
        driver.tick()

    def driver_ends(self, driver: Driver) -> None:
        """It completed, was stopped, or gave up with an error. All of that is in good order: it closes what it has."""
        self.tell("world", f"driver {self.starts} ends: {driver.error or driver.reason}")
        if driver.error is not None:
            message = str(driver.error)
            self.checkers.sound.on_error(message, ON_PURPOSE in message or GAVE_UP in message)
            self.checkers.bounded_growth.on_failure()
            if self.healed_at is not None and self.schedule.now > self.healed_at + AFTERMATH_S:
                self.checkers.progress.on_error(message)
        driver._close()
        driver.die()
        self.driver = None
        assert driver.controller is not None or driver.error is not None
        if driver.reason == "complete" and driver.controller is not None and driver.controller.epochs.final:
            self.complete = True
        else:
            self.schedule.after(self.random.uniform(0.01, 0.5), self.start_driver)

    def kill_driver(self) -> None:
        if self.driver is None:
            return
        self.deaths += 1
        self.checkers.bounded_growth.on_failure()
        self.tell("world", f"driver {self.starts} is dead")
        self.driver.die()
        self.driver = None
        if self.random.random() < self._faults_now().torn:
            self._tear()
        self.schedule.after(self.random.uniform(0.05, 0.5), self.start_driver)

    def _tear(self) -> None:
        """The newest checkpoint loses a file, if there is an older one to go back to."""
        names = self.disk.memory.list("manifests/")
        if len(names) < 2:
            return
        try:
            manifests = [Manifest.from_bytes(self.disk.items[n], n) for n in names[-2:]]
        except CorruptData:
            return  # the last death tore it, and no driver has lived to write another
        only = sorted(manifests[1].names() - manifests[0].names())
        name = self.random.choice([MANIFEST_NAME.format(manifests[1].epoch), *only])
        self.tell("fault", f"{name} is torn")
        self.disk.tear(name, self.random)

    # -- what people and machines do -----------------------------------------------------------------------------------

    def _now_and_then(self, rate: float, what: Callable[[], None]) -> None:
        """``what``, at random times, until the world is healed."""

        def again() -> None:
            if self.healed_at is None:
                what()
                self.schedule.after(self.random.expovariate(rate), again)

        if rate > 0:
            self.schedule.after(self.random.expovariate(rate), again)

    def _crash_node(self) -> None:
        up = self.cluster.alive()
        if not up:
            return
        struck = self.random.choice(up)
        whole_zone = struck.zone and self.zoning.random() < 0.5
        for node in [n for n in up if n.zone == struck.zone] if whole_zone else [struck]:
            self.crash(node)

    def crash(self, node: Node) -> None:
        self.tell("fault", f"{node} crashes")
        node.crash()
        self.cluster.on_change()
        self.schedule.after(self.random.uniform(0.1, 2.0), lambda: self.bring_back(node))

    def bring_back(self, node: Node) -> None:
        node.up = True
        self.tell("world", f"{node} is there")
        self.cluster.on_change()

    def _jump(self) -> None:
        self.jump_ms += int(self.random.choice([-1, 1]) * self.random.expovariate(1 / 30_000))
        self.tell("fault", f"the clock jumps to {self.wall_ms()}")

    def _away(self) -> None:
        self.away_until = self.schedule.now + self.random.uniform(0.3, 3.0)
        self.tell("fault", f"the store is away until {self.away_until:.3f}")

    def _rescale(self) -> None:
        if self.driver is not None and self.driver.controller is not None:
            keyed = [s for s in self.plan.stages if s.keyed is not None]
            stage = self.random.choice(keyed if self.random.random() < 0.8 else self.plan.stages).id
            now = self.driver.controller.routes.table.instances[stage]
            instances = self.random.choice([n for n in range(1, 5) if n != now])
            self.tell("world", f"rescale '{stage}' to {instances}")
            self.driver.post(RescaleRequested(now=self.schedule.now, stage=StageId(stage), instances=instances))

    def _move(self) -> None:
        """Somebody moves slices, spreads them, or calls it all off."""
        driver = self.driver
        if driver is None or driver.controller is None or driver.controller.phase == "starting":
            return
        r, now = self.random, self.schedule.now
        stage = r.choice([s for s in self.plan.stages if s.stateful]).id
        routing = driver.controller.routes.table
        what = r.random()
        if what < 0.07:
            self.tell("world", "cancel moves")
            driver.post(CancelMovesRequested(now=now))
        elif what < 0.25:
            self.tell("world", "rebalance")
            driver.post(RebalanceRequested(now=now))
        else:
            count = routing.slices_in(stage)
            slices = r.sample(range(count), r.randint(1, min(4, count)))
            target = r.randrange(routing.instances[StageId(stage)])
            self.tell("world", f"move slices {slices} of '{stage}' to {target}")
            driver.post(MoveRequested(now=now, stage=StageId(stage), targets=dict.fromkeys(slices, target)))

    def _leave(self) -> None:
        driver = self.driver
        if driver is not None and driver.controller is not None and driver.controller.fleet.nodes:
            node = self.random.choice(sorted(driver.controller.fleet.nodes))
            self.tell("world", f"let node {node} go")
            driver.post(LeaveRequested(now=self.schedule.now, nodes=(node,)))

    def _stop(self) -> None:
        if self.driver is not None and self.driver.controller is not None:
            self.tell("world", "stop")
            self.driver.post(StopRequested(now=self.schedule.now))

    def _die(self) -> None:
        if self.driver is not None:
            self.tell("fault", "the driver is killed")
            self.kill_driver()

    def _heal(self) -> None:
        self.healed_at = self.schedule.now
        self.tell("world", "healed: no more faults")
        for node in self.cluster.nodes:
            node.up = True
            node.slow = 1.0
        self.cluster.on_change()

    # -- one run -------------------------------------------------------------------------------------------------------

    def run(self) -> World:
        """To the end of the job, and the last checks. Raises ``Violation``."""
        self.tell(
            "world", f"flow {', '.join(self.scenario.branches)}; faults {', '.join(self.faults.kinds()) or 'none'}"
        )
        if any(self.zones):
            self.tell("world", ", ".join(f"{node} in {node.zone}" for node in self.cluster.nodes))
        for node in self.cluster.nodes:
            if self.random.random() < self.faults.slow_node:
                node.slow = self.random.uniform(2.0, 6.0)
        f = self.faults
        self._now_and_then(f.node_crash_s, self._crash_node)
        self._now_and_then(f.driver_crash_s, self._die)
        self._now_and_then(f.clock_jump_s, self._jump)
        self._now_and_then(f.store_away_s, self._away)
        self._now_and_then(f.rescale_s, self._rescale)
        self._now_and_then(f.move_s, self._move)
        self._now_and_then(f.leave_s, self._leave)
        self._now_and_then(f.stop_s, self._stop)
        if self.storm is not None:
            self.storm.begin()
        self.schedule.after(self.scenario.quiet_at, self._heal)
        self.schedule.after(0.0, self.start_driver)
        while not self.complete:
            what = self.schedule.next()
            assert what is not None
            if self.healed_at is not None and self.schedule.now > self.healed_at + HEALED_S_MAX:
                self.checkers.progress.on_late(self.schedule.now - self.healed_at)
            try:
                what()
            except DriverDied:
                self.kill_driver()
            except Exception as error:
                raise Violation("sound", f"{type(error).__name__}: {error}") from error
        self._final_checks()
        return self

    def _final_checks(self) -> None:
        self._check_staging(self.epochs())
        rows, state = run_undisturbed(self.scenario, self.checkers.no_lost_update.records)
        self.checkers.exactly_once.at_end(rows)
        heights = {id: given.rows.height for id, given in self.scenario.inputs.items()}
        assert newest(self.disk.memory) is not None
        self.checkers.no_lost_update.at_end(heights, final_state(self.disk.memory, self.plan), state)

    def epochs(self) -> int:
        return max(self.checkers.no_lost_update.records, default=0)


__all__ = ["HEALED_S_MAX", "Driver", "Violation", "World"]
