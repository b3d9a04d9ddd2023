"""Asks a policy what size the job should have, and orders what it says. It reads the job's status and nothing else."""

from __future__ import annotations

import math
import threading
import traceback
from collections.abc import Callable, Mapping

from penstock.config import Config
from penstock.control.events import (
    Event,
    LeaveRequested,
    MoveRequested,
    NodesInvited,
    RescaleRequested,
)
from penstock.control.policies import (
    Decision,
    Guarded,
    Limits,
    Observation,
    Policy,
    RingPolicy,
    SafeRate,
    TargetLatency,
)
from penstock.ids import StageId
from penstock.observe.status import JobStatus

POLICY_S = 1.0
"""Seconds between two questions to a policy."""
REFUSED_S = 600.0
"""Seconds until a cluster manager that refused nodes is asked again by a policy."""


def policy_from(config: Config) -> Guarded | None:
    """The policy that the settings name, or are given, guarded; None if there is none."""
    policies: dict[str, Policy] = {
        "safe-rate": SafeRate(),
        "target-latency": TargetLatency(float(config.target_latency_ms)),
        "ring": RingPolicy(),
    }
    if config.policy is None:
        return None
    return Guarded(
        policies[config.policy] if isinstance(config.policy, str) else config.policy,
        cool_down_s=config.policy_cool_down_s,
        limits=Limits(config.instances_min, config.instances_max, config.nodes_min, config.nodes_max),
    )


def observation_of(status: JobStatus, now: float, coming: int = 0) -> Observation:
    """A status as policies see it. ``coming``: nodes that are asked for beside those that the status knows."""
    nodes = [n for n in status.nodes if n.state != "leaving"]
    keyed = [s for s in status.stages if s.owners]
    sources = [s for s in status.stages if not s.inputs]
    offered = [s.offered_s for s in sources if s.offered_s is not None]
    return Observation(
        now=now,
        rows_in_s=sum(offered) if sources and len(offered) == len(sources) else status.rows_s,
        rows_s=status.rows_s,
        latency_ms_p50=status.latency_ms_p50,
        latency_ms_p99=status.latency_ms_p99,
        offered_s={s.id: s.offered_s for s in status.stages if s.offered_s is not None},
        capacity_s={s.id: s.capacity_s for s in status.stages if s.capacity_s is not None},
        backlog_rows=status.backlog_rows,
        backlog_growth_s=sum(s.backlog_growth_s for s in sources),
        backlog_grows=any(s.backlog_grows for s in sources),
        queue={s.id: s.queue for s in status.stages},
        busy={s.id: s.busy for s in status.stages},
        busy_containers={(s.id, c.number): c.busy for s in keyed for c in s.containers},
        load={(s.id, number): rate for s in keyed for number, rate in enumerate(s.slice_rows_s)},
        input_s={s.id: s.rows_in_s for s in status.stages},
        edges=tuple((before, s.id) for s in status.stages for before in s.inputs),
        instances={s.id: s.instances for s in status.stages},
        owners={s.id: s.owners for s in keyed},
        homes={container: n.name for n in status.nodes for container in n.containers},
        nodes=max(1, len(nodes)),
        staying=tuple(n.name for n in nodes),
        coming=status.nodes_coming + coming,
        cores=sum(n.limit or n.cores for n in nodes if n.cores) or None,
        slots=status.slots,
        usable={s.id: s.usable for s in keyed},
        moving=len(status.moves),
    )


class Scaler:
    """A job's policy, and what it asked for. Used by the loop's thread."""

    def __init__(
        self,
        config: Config,
        post: Callable[[Event], None],
        say: Callable[[str], None],
        clock: Callable[[], float],
        request_nodes: Callable[[], Callable[[int], bool] | None],
    ) -> None:
        """``post`` takes orders, ``say`` notices. ``request_nodes`` gives the engine's way to ask a cluster for nodes,
        if it has one.
        """
        self.policy: Policy | None = policy_from(config)
        self.said: str | None = None
        """What the policy said last."""
        self._config = config
        self._post = post
        self._say = say
        self._clock = clock
        self._told: set[str] = set()
        self._asking = 0
        """Nodes that the policy asked for: without an answer, or refused and not to be asked for again yet."""
        self._ask_again_at = math.inf
        self._invitation: NodesInvited | None = None
        """The event that tells the controller of the nodes that were asked for."""
        self._request_nodes = request_nodes

    @property
    def about(self) -> str | None:
        """For the status: what the policy said last, or its name. None without a policy."""
        return self.said or (self.policy.name if self.policy is not None else None)

    def consider(self, status: JobStatus, now: float) -> None:
        """Ask the policy, and order what it says as though somebody had asked for it."""
        policy = self.policy
        if policy is None or status.phase != "running":
            return
        if self._ask_again_at < math.inf:
            self._say_once(
                "the cluster manager did not take a policy's request for more nodes; it is asked again "
                f"{REFUSED_S:g} s later. See that it can grant them, or lower nodes_max."
            )
        if now >= self._ask_again_at:
            self._asking, self._ask_again_at = 0, math.inf
        try:
            decision = policy.decide(observation_of(status, now, self._asking))
        except Exception as error:  # it may be anybody's: the job goes on as it is
            at = traceback.extract_tb(error.__traceback__)[-1]
            self.said = f"{policy.name}: failed with {type(error).__name__}: {error} ({at.filename}:{at.lineno})"
            self._say_once(f"policy {self.said}. The job keeps its size meanwhile: mend the policy.")
            return
        dry, acts = self._config.policy_dry_run, decision.kind != "nothing"
        self.said = f"{policy.name}{' (dry run)' * dry}: {'would ' * (dry and acts)}{decision}"
        if not acts:
            return
        self._say(f"policy {self.said}")
        if not dry:
            self._order(decision, status, now)

    def invited(self, event: NodesInvited) -> None:
        """The controller is about to hear of nodes that are to come. From then on the status counts those that the
        policy asked for. Until then they count here: counted nowhere, they would be asked for again.
        """
        if event is self._invitation:
            self._asking, self._invitation = 0, None

    def _order(self, decision: Decision, status: JobStatus, now: float) -> None:
        if decision.kind == "scale_out":
            self._ask_for_nodes(decision.nodes, now)
        if decision.kind == "scale_in":
            staying = [n for n in status.nodes if n.state != "leaving"]
            fewest = sorted(staying, key=lambda n: (n.slices, -len(n.name), n.name))  # the least to move
            self._post(LeaveRequested(now=now, nodes=decision.which or tuple(n.name for n in fewest[: decision.nodes])))
        if decision.moves and decision.stage is not None:
            stage = next(s for s in status.stages if s.id == decision.stage)
            if stage.stateful:  # slices of a stage without state follow its containers: there is nothing to move
                targets = {m.slice: m.target for m in decision.moves}
                limited = any(n.limit is not None for n in status.nodes)
                self._move(stage.id, stage.owners, stage.instances, targets, decision.reason, limited, now)
                return
        for name, instances in decision.instances.items():
            self._post(RescaleRequested(now=now, stage=StageId(name), instances=instances))

    def _move(
        self,
        stage: str,
        owners: tuple[int, ...],
        instances: int,
        targets: Mapping[int, int],
        reason: str,
        limited: bool,
        now: float,
    ) -> None:
        """Exactly these slices, neighbour to neighbour. A container beyond the last one is made for it. One that is
        emptied goes, or if it is not the last it stays there, vacant, until it is needed again. ``limited``: a node
        has a limit of cores, and vacant containers are left there.
        """
        room = max(targets.get(s, c) for s, c in enumerate(owners)) + 1
        if room > instances or (room < instances and not limited):
            self._post(RescaleRequested(now=now, stage=StageId(stage), instances=room, targets=dict(targets)))
        else:
            self._post(MoveRequested(now=now, stage=StageId(stage), targets=dict(targets), reason=reason))

    def _ask_for_nodes(self, count: int, now: float) -> None:
        """As ``job.scale_out`` does, but on a thread of its own: a cluster manager that is away answers in minutes."""
        request, master = self._request_nodes(), self._config.master
        self._asking = count
        if request is None or master == "local" or master.startswith("local["):
            self._say_once(
                "this job runs in one process: there are no nodes that a policy could add. Run it on a cluster, or "
                "leave nodes_max out."
            )
            return

        def ask() -> None:
            try:
                taken = request(count)
            except Exception:  # Spark is going: so is the job
                taken = False
            if taken:
                self._invitation = NodesInvited(now=self._clock(), count=count)
                self._post(self._invitation)
            else:
                self._ask_again_at = now + REFUSED_S

        threading.Thread(target=ask, name="penstock-nodes", daemon=True).start()

    def _say_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._say(text)
