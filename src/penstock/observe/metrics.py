"""Counts and rates of a running job, kept from the control records of its tasks. No profiling, no sampling.

``Metrics`` counts. ``snapshot`` puts its figures and the controller's state together into the one status that
everybody reads; it is the only place outside the controller that looks into it for the status.
"""

from __future__ import annotations

import datetime as dt
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low

from penstock.control.controller import Controller
from penstock.control.load import shares
from penstock.control.offered import Arrived, RateWindow, StageRates
from penstock.control.placement import hot_slices
from penstock.control.records import TaskReport
from penstock.ids import StageId
from penstock.observe import cluster
from penstock.observe.status import (
    ContainerStatus,
    EpochStatus,
    HotSliceStatus,
    JobStatus,
    OperatorStatus,
    StageStatus,
    StragglerStatus,
)

WINDOW_S = 10.0
"""Seconds over which the job's rate and latency are measured."""
HISTORY_MAX = 4096
"""Epochs that are kept."""
HISTORY_SHOWN = 600
"""Epochs that a status has."""
STRAGGLER_EPOCHS = 20
"""Epochs over which the times of containers are compared. A quarter of them is enough to compare."""
STRAGGLER_TIMES = 2.0
"""A container that takes this many times as long as the others is a straggler."""
STRAGGLER_MS = 20.0
"""Below this time of an epoch nobody waits long enough for a container to care."""
HOT_SHARE = 0.6
"""A slice that alone takes more than this share of its container's time is too hot. The limit is less than all of the
time because the engine needs some of it between two tasks."""
HOT_NO_MORE = 0.8
"""A hot slice stays hot until its share is below this part of the limit."""
ENDED_US = 2**62
"""Watermarks beyond this stand for the time before the first event, or after the last."""


@dataclass(frozen=True)
class StageFacts:
    """What is known of a stage before it runs."""

    kind: str
    """source or keyed"""
    operators: tuple[str, ...]
    inputs: tuple[str, ...] = ()
    stateful: bool = False


@dataclass
class _Stage:
    rows_in: int = 0
    rows_out: int = 0
    late: int = 0
    bytes_local: int = 0
    bytes_remote: int = 0
    state: dict[int, tuple[int, int]] = field(default_factory=dict)
    """container -> (rows, bytes)"""
    times: dict[int, deque[tuple[float, int]]] = field(default_factory=dict)
    """container -> (busy ms, rows in) of its last epochs"""
    nodes: dict[int, str] = field(default_factory=dict)


@dataclass
class _Operator:
    rows_in: int = 0
    rows_out: int = 0
    busy_ms: float = 0.0


class Metrics:
    """Changed and read by the runtime's thread only."""

    def __init__(self, job: str, flow: str, engine: str, stages: Mapping[str, StageFacts]) -> None:
        """``stages`` in topological order."""
        self.job, self.flow, self.engine = job, flow, engine
        self.facts = dict(stages)
        self.stages = {s: _Stage() for s in stages}
        self.window = RateWindow({s: facts.inputs for s, facts in stages.items()})
        self.operators: dict[str, _Operator] = {}
        self.rows = 0
        self.dead = 0
        self.checkpoints = 0
        self.checkpoint_bytes = 0
        self.epochs: deque[EpochStatus] = deque(maxlen=HISTORY_MAX)
        self.began = 0.0
        self.counted_through = 0
        self.stragglers: tuple[StragglerStatus, ...] = ()
        self.notices: list[str] = []
        self.hot: tuple[HotSliceStatus, ...] = ()
        self.hot_keys: dict[tuple[str, int], tuple[tuple[object, float], ...]] = {}
        """(stage, slice) that is too hot -> its hottest keys and their shares"""
        self._told: set[tuple[str, int, str]] = set()
        self._planned: dict[int, tuple[float, float]] = {}
        """epoch -> when it was planned, and when the epoch before it was"""
        self._last_plan: float | None = None

    # -- what happens

    def planned(self, epoch: int, rows: Mapping[str, int], now: float) -> None:
        """``rows``: the rows that the epoch takes of each source, as far as the plan could tell."""
        self._planned[epoch] = (now, now if self._last_plan is None else self._last_plan)
        self._last_plan = now
        self.window.planned(epoch, rows, now)

    def looked(self, source: str, look: Arrived, took: int | None, full: bool) -> None:
        """What a look at a source's backlog has found; see ``RateWindow.looked``."""
        self.window.looked(source, look, took, full)

    def stage_done(self, stage: str, epoch: int, reports: Sequence[TaskReport], now: float) -> None:
        if epoch <= self.counted_through:
            return  # run again after a failure: counted once
        attempt = max((r.attempt for r in reports), default=0)
        self.window.stage_done(stage, epoch, attempt, reports, now)
        s = self.stages[stage]
        s.rows_in += sum(r.rows_in for r in reports)
        s.rows_out += sum(r.rows_out for r in reports)
        self.dead += sum(r.dead for r in reports)
        s.state = {r.index: (r.state_rows, r.state_bytes) for r in reports}
        for r in reports:
            for place, late in r.late.items():
                self.stages[place].late += late
            for operator, (rows_in, rows_out, ms) in r.by_operator.items():
                total = self.operators.setdefault(operator, _Operator())
                total.rows_in += rows_in
                total.rows_out += rows_out
                total.busy_ms += ms
            for number, keys in r.keys.items():
                self.hot_keys[stage, number] = tuple((key, share) for key, share in keys)
        if self.facts[stage].kind == "keyed":  # the tasks of a source are splits, another each time
            s.times = {r.index: s.times.get(r.index) or deque(maxlen=STRAGGLER_EPOCHS) for r in reports}
            s.nodes = {r.index: r.node for r in reports}
            for r in reports:
                s.times[r.index].append((r.busy_ms, r.rows_in))

    def exchanged(self, stage: str, local: int, remote: int) -> None:
        self.stages[stage].bytes_local += local
        self.stages[stage].bytes_remote += remote

    def published(self, epoch: int, rows: int, now: float, instances: Mapping[StageId, int]) -> None:
        self.window.published(epoch, now)
        if epoch <= self.counted_through:
            return
        self.counted_through = epoch
        began, before = self._planned.pop(epoch, (now, now))
        self.rows += rows
        self.epochs.append(
            EpochStatus(
                epoch=epoch,
                at_s=round(now - self.began, 4),
                rows=rows,
                ms=round((now - began) * 1000, 2),
                latency_ms=round((now - before) * 1000, 2),
                state_rows=sum(r for s in self.stages.values() for r, _ in s.state.values()),
                instances={str(stage): count for stage, count in instances.items()},
            )
        )
        self._find_stragglers()

    def checkpointed(self, size: int) -> None:
        """A checkpoint of ``size`` bytes is complete."""
        self.checkpoints += 1
        self.checkpoint_bytes = size

    # -- what stands out

    def find_hot(self, status: JobStatus) -> dict[StageId, tuple[int, ...]]:
        """Slices that no move helps: alone, they keep a container busy. The next status shows what is known of them."""
        before = {(h.stage, h.slice) for h in self.hot}
        found: list[HotSliceStatus] = []
        for stage in status.stages:
            if not stage.slice_rows_s:
                continue
            share = shares(stage.slice_rows_s, stage.owners, {c.number: c.busy for c in stage.containers})
            for s in hot_slices(share, HOT_SHARE * HOT_NO_MORE).too_hot:
                if share[s] > HOT_SHARE or (stage.id, s) in before:
                    found.append(
                        HotSliceStatus(
                            stage=stage.id,
                            slice=s,
                            container=stage.owners[s],
                            share=round(share[s], 3),
                            rows_s=round(stage.slice_rows_s[s], 1),
                            keys=self.hot_keys.get((stage.id, s), ()),
                        )
                    )
        self.hot = tuple(sorted(found, key=lambda h: -h.share))
        known = {(h.stage, h.slice) for h in self.hot}
        self.hot_keys = {k: v for k, v in self.hot_keys.items() if k in known}
        for one in self.hot:
            if one.keys:
                self._tell((one.stage, one.slice, "hot"), f"{one}.")
        return {
            StageId(stage): tuple(sorted(h.slice for h in self.hot if h.stage == stage))
            for stage in dict.fromkeys(h.stage for h in self.hot)
        }

    def _find_stragglers(self) -> None:
        """Containers that the others of their stage wait for, epoch after epoch."""
        found: list[StragglerStatus] = []
        for id, s in self.stages.items():
            typical = {c: median(ms for ms, _ in t) for c, t in s.times.items() if len(t) >= STRAGGLER_EPOCHS // 4}
            if len(typical) < 2:
                continue
            # The lower one of two in the middle, or of two containers none could ever be twice as slow as the median.
            usual = median_low(typical.values())
            for container, ms in typical.items():
                if ms > STRAGGLER_MS and ms > STRAGGLER_TIMES * usual:
                    rows = {c: median(n for _, n in s.times[c]) for c in typical}
                    found.append(
                        StragglerStatus(
                            stage=id,
                            container=container,
                            node=s.nodes.get(container, ""),
                            times_slower=round(ms / max(usual, 0.1), 1),
                            times_rows=round(rows[container] / max(median_low(rows.values()), 1), 1),
                        )
                    )
        self.stragglers = tuple(sorted(found, key=lambda f: -f.times_slower))
        for one in self.stragglers:
            self._tell((one.stage, one.container, one.node), f"{one}.")

    def _tell(self, key: tuple[str, int, str], text: str) -> None:
        """A notice, once."""
        if key not in self._told:
            self._told.add(key)
            self.notices.append(text)


# -- the snapshot ------------------------------------------------------------------------------------------------------


def snapshot(metrics: Metrics, controller: Controller, now: float, policy: str | None = None) -> JobStatus:
    """The status of a job now. Called by the runtime's thread, which alone changes what is read here."""
    window = metrics.window
    working = {s: _working(controller, s) for s in metrics.facts}
    rates = window.rates(now, working)
    stages = tuple(_stage(metrics, controller, s, rates[s], working[s], now) for s in metrics.facts)
    backlogs = window.backlog().values()
    recent = [e for e in list(metrics.epochs)[-200:] if e.at_s >= now - metrics.began - WINDOW_S]
    span = max(now - metrics.began - recent[0].at_s, 0.001) if len(recent) > 1 else 0.0
    # A row that came right before its epoch was planned waits for that one; one that just missed the plan before,
    # longer.
    waits = sorted(e.latency_ms for e in recent if e.rows)
    typical = sorted((e.ms + e.latency_ms) / 2 for e in recent if e.rows)
    marks = [w for w in controller.watermarks.marks.values() if abs(w) < ENDED_US]
    return JobStatus(
        job=metrics.job,
        flow=metrics.flow,
        engine=metrics.engine,
        phase=controller.phase,
        epoch=controller.epochs.published,
        checkpoint_epoch=controller.checkpoints.committed,
        checkpoint_bytes=metrics.checkpoint_bytes,
        checkpoints=metrics.checkpoints,
        epochs_in_flight=len(controller.epochs.in_flight),
        rows=metrics.rows,
        rows_s=sum(e.rows for e in recent[1:]) / span if span else 0.0,
        backlog_rows=None if None in backlogs else sum(rows or 0 for rows in backlogs),
        epoch_ms=median(e.ms for e in recent) if recent else 0.0,
        latency_ms_p50=typical[len(typical) // 2] if typical else 0.0,
        latency_ms_p99=waits[min(len(waits) - 1, int(len(waits) * 0.99))] if waits else 0.0,
        state_rows=sum(s.state_rows for s in stages),
        state_bytes=sum(s.state_bytes for s in stages),
        dead_letters=metrics.dead,
        late=sum(s.late for s in stages),
        recoveries=controller.attempts.recoveries,
        slices=controller.routes.table.slices_most,
        routing_version=controller.routes.table.version,
        uptime_s=now - metrics.began if metrics.began else 0.0,
        watermark=_iso(min(marks)) if marks else None,
        stages=stages,
        operators=tuple(
            OperatorStatus(id=id, rows_in=o.rows_in, rows_out=o.rows_out, busy_ms=round(o.busy_ms, 1))
            for id, o in metrics.operators.items()
        ),
        history=tuple(metrics.epochs)[-HISTORY_SHOWN:],
        nodes=cluster.nodes(controller),
        nodes_coming=controller.fleet.invited,
        slots=controller.fleet.limit(),
        moves=cluster.moves(controller, now),
        backups=cluster.backups(controller),
        policy=policy,
        stragglers=metrics.stragglers,
        hot=metrics.hot,
    )


def _working(controller: Controller, stage: str) -> tuple[int, ...]:
    """The containers of a stage that have something to do."""
    owners = controller.routes.table.owners.get(StageId(stage))
    return (
        tuple(sorted(set(owners))) if owners else tuple(range(controller.routes.table.instances.get(StageId(stage), 1)))
    )


def _stage(
    metrics: Metrics, controller: Controller, id: str, rates: StageRates, working: Sequence[int], now: float
) -> StageStatus:
    facts, s, stage = metrics.facts[id], metrics.stages[id], StageId(id)
    routing = controller.routes.table
    keyed = stage in routing.owners
    arrival = metrics.window.arrivals(now).get(id)
    times = {c: sum(ms for ms, _ in recent) for c, recent in s.times.items()}
    whole = sum(times.values())
    # A container's part of what the stage does is its part of the time of the last epochs.
    busy = {c: min(1.0, rates.shares.busy * len(working) * ms / whole) for c, ms in times.items()} if whole else {}
    return StageStatus(
        id=id,
        kind=facts.kind,
        operators=facts.operators,
        inputs=facts.inputs,
        stateful=facts.stateful,
        instances=routing.instances.get(stage, 1),
        working=len(working),
        rows_in=s.rows_in,
        rows_out=s.rows_out,
        rows_in_s=rates.rows_in_s,
        rows_out_s=rates.rows_out_s,
        offered_s=rates.offered_s,
        capacity_s=rates.capacity_s,
        busy=rates.shares.busy,
        back_pressured=rates.shares.back_pressured,
        idle=rates.shares.idle,
        selectivity=rates.selectivity,
        queue=sum(stage not in run.done and stage not in run.running for run in controller.epochs.in_flight.values()),
        queue_rows=sum(rates.queue_rows.values()),
        backlog_rows=metrics.window.backlog().get(id),
        backlog_growth_s=arrival.growth_s if arrival is not None else 0.0,
        backlog_grows=arrival is not None and arrival.growing,
        bytes_local=s.bytes_local,
        bytes_remote=s.bytes_remote,
        state_rows=sum(rows for rows, _ in s.state.values()),
        state_bytes=sum(size for _, size in s.state.values()),
        late=s.late,
        containers=tuple(
            ContainerStatus(number=c, busy=busy.get(c, 0.0), queue_rows=rates.queue_rows.get(c, 0)) for c in working
        )
        if keyed
        else (),
        owners=tuple(routing.owners[stage]) if keyed else (),
        usable=tuple(p.container for p in controller.balance.peers(stage)) if keyed else (),
        slice_rows_s=tuple(controller.balance.load.of(stage, routing.slices_in(stage)) or ()) if keyed else (),
    )


def _iso(microseconds: int) -> str:
    try:
        return (dt.datetime(1970, 1, 1, tzinfo=dt.UTC) + dt.timedelta(microseconds=microseconds)).isoformat()
    except OverflowError:
        return "ended"
