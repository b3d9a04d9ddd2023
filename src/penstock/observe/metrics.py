"""Counts and rates of a running job, kept from the control records of its tasks. No profiling, no sampling.

Stela's input and execution speeds (S1) come from here: rows in, rows out and busy time of every operator over a
sliding window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low
from typing import Any

from penstock.control.load import shares
from penstock.control.placement import hot_slices
from penstock.control.records import TaskReport
from penstock.ids import StageId
from penstock.observe.status import JobStatus, OperatorStatus, hot_text, straggler_text

WINDOW_S = 10.0
HISTORY_MAX = 4096
STRAGGLER_EPOCHS = 20
"""How far back the times of a container are looked at, and how many of them it takes at least: a quarter."""
STRAGGLER_TIMES = 2.0
STRAGGLER_MS = 20.0
"""Below this nobody waits long enough for a container to care."""
HOT_SHARE = 0.6
"""A slice that takes more of one container's time than this, all by itself, is too hot. Less than all of the time: what
Spark needs between two tasks of a container is no work of the slice's, but bounds it as well."""
HOT_NO_MORE = 0.8
"""It no longer is below this share of that."""


@dataclass
class _Stage:
    rows_in: int = 0
    rows_out: int = 0
    late: int = 0
    bytes_local: int = 0
    bytes_remote: int = 0
    state: dict[int, tuple[int, int]] = field(default_factory=dict)
    recent: deque[tuple[float, int, int, float]] = field(default_factory=deque)
    """(at, rows in, rows out, busy ms)"""
    times: dict[int, deque[tuple[float, int]]] = field(default_factory=dict)
    """container -> (busy ms, rows in) of its last epochs"""
    nodes: dict[int, str] = field(default_factory=dict)


class Metrics:
    """Mutated by the runtime's thread only; ``status`` may be called from any."""

    def __init__(self, job: str, flow: str, engine: str, stages: Mapping[str, tuple[str, tuple[str, ...]]]) -> None:
        self.job, self.flow, self.engine = job, flow, engine
        self.kinds = stages
        self.stages = {s: _Stage() for s in stages}
        self.operators: dict[str, list[float]] = {}
        """operator -> rows in, rows out, busy ms"""
        self.rows = 0
        self.dead = 0
        self.checkpoints = 0
        self.checkpoint_bytes = 0
        self.epochs: deque[dict[str, Any]] = deque(maxlen=HISTORY_MAX)
        self.began = 0.0
        self.counted_through = 0
        self.stragglers: tuple[dict[str, Any], ...] = ()
        self.notices: list[str] = []
        self.hot: tuple[dict[str, Any], ...] = ()
        self.hot_keys: dict[tuple[str, int], list[list[Any]]] = {}
        """(stage, slice) that is too hot -> its hottest keys and their shares"""
        self._told: set[tuple[str, int, str]] = set()
        self._planned: dict[int, float] = {}
        self._previous_plan: dict[int, float] = {}
        self._last_plan = 0.0

    def planned(self, epoch: int, now: float) -> None:
        self._previous_plan[epoch] = self._last_plan or now
        self._planned[epoch] = now
        self._last_plan = now

    def stage_done(self, stage: str, epoch: int, reports: Sequence[TaskReport], now: float) -> None:
        if epoch <= self.counted_through:
            return  # run again after a failure: counted once
        s = self.stages[stage]
        rows_in = sum(r.rows_in for r in reports)
        rows_out = sum(r.rows_out for r in reports)
        busy = sum(r.busy_ms for r in reports)
        s.rows_in += rows_in
        s.rows_out += rows_out
        for r in reports:
            for place, late in r.late.items():
                self.stages[place].late += late
        s.recent.append((now, rows_in, rows_out, busy))
        while s.recent and s.recent[0][0] < now - WINDOW_S:
            s.recent.popleft()
        for r in reports:
            s.state[r.index] = (r.state_rows, r.state_bytes)
            for operator, (a, b, ms) in r.by_operator.items():
                total = self.operators.setdefault(operator, [0, 0, 0.0])
                total[0] += a
                total[1] += b
                total[2] += ms
        present = {r.index for r in reports}
        s.state = {i: v for i, v in s.state.items() if i in present}
        for r in reports:
            for number, keys in r.keys.items():
                self.hot_keys[stage, number] = [[key, share] for key, share in keys]
        self.dead += sum(r.dead for r in reports)
        if self.kinds[stage][0] == "keyed":  # the tasks of a source are splits, another each time
            s.times = {r.index: s.times.get(r.index) or deque(maxlen=STRAGGLER_EPOCHS) for r in reports}
            s.nodes = {r.index: r.node for r in reports}
            for r in reports:
                s.times[r.index].append((r.busy_ms, r.rows_in))

    def busy_containers(self, status: JobStatus) -> dict[tuple[str, int], float]:
        """Share of its time that each container of a keyed stage works: its part of what the stage does."""
        out: dict[tuple[str, int], float] = {}
        for stage in status.operators:
            times = {c: sum(ms for ms, _ in recent) for c, recent in self.stages[stage.id].times.items()}
            whole = sum(times.values())
            for container, ms in times.items() if whole else ():
                out[stage.id, container] = min(1.0, stage.busy * (stage.working or stage.instances) * ms / whole)
        return out

    def find_hot(self, controller: Any, now: float) -> dict[StageId, tuple[int, ...]]:
        """Slices that no move helps: alone, they keep a container busy. What is known of them goes into the status."""
        busy = self.busy_containers(self.status(controller, now))
        before = {(h["stage"], h["slice"]) for h in self.hot}
        found: list[dict[str, Any]] = []
        routing = controller.routes.table
        for stage, owners in routing.owners.items():
            rates = controller.balance.load.of(stage, routing.slices_in(stage))
            if rates is None:
                continue
            share = shares(rates, owners, {c: b for (s, c), b in busy.items() if s == stage})
            for s in hot_slices(share, HOT_SHARE * HOT_NO_MORE).too_hot:
                if share[s] > HOT_SHARE or (stage, s) in before:
                    found.append(
                        {
                            "stage": str(stage),
                            "slice": s,
                            "container": int(owners[s]),
                            "share": round(share[s], 3),
                            "rows_s": round(rates[s], 1),
                            "keys": self.hot_keys.get((stage, s), []),
                        }
                    )
        self.hot = tuple(sorted(found, key=lambda h: -h["share"]))
        known = {(h["stage"], h["slice"]) for h in self.hot}
        self.hot_keys = {k: v for k, v in self.hot_keys.items() if k in known}
        for one in self.hot:
            key = (one["stage"], one["slice"], "hot")
            if one["keys"] and key not in self._told:
                self._told.add(key)
                self.notices.append(hot_text(one) + ".")
        return {
            stage: tuple(sorted(h["slice"] for h in self.hot if h["stage"] == stage))
            for stage in dict.fromkeys(StageId(h["stage"]) for h in self.hot)
        }

    def exchanged(self, stage: str, local: int, remote: int) -> None:
        self.stages[stage].bytes_local += local
        self.stages[stage].bytes_remote += remote

    def published(self, epoch: int, rows: int, now: float, instances: Mapping[StageId, int]) -> None:
        if epoch <= self.counted_through:
            return
        self.counted_through = epoch
        began = self._planned.pop(epoch, now)
        previous = self._previous_plan.pop(epoch, began)
        self.rows += rows
        self.epochs.append(
            {
                "epoch": epoch,
                "at_s": round(now - self.began, 4),
                "rows": rows,
                "ms": round((now - began) * 1000, 2),
                "latency_ms": round((now - previous) * 1000, 2),
                "state_rows": sum(r for s in self.stages.values() for r, _ in s.state.values()),
                "instances": dict(instances),
            }
        )
        self.find_stragglers()

    def find_stragglers(self) -> None:
        """Containers that the others of their stage wait for, epoch after epoch."""
        found: list[dict[str, Any]] = []
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
                        {
                            "stage": id,
                            "container": container,
                            "node": s.nodes.get(container, ""),
                            "times_slower": round(ms / max(usual, 0.1), 1),
                            "times_rows": round(rows[container] / max(median_low(rows.values()), 1), 1),
                        }
                    )
        self.stragglers = tuple(sorted(found, key=lambda f: -f["times_slower"]))
        for one in self.stragglers:
            key = (one["stage"], one["container"], one["node"])
            if key not in self._told:
                self._told.add(key)
                self.notices.append(straggler_text(one) + ".")

    def status(self, controller: Any, now: float) -> JobStatus:
        recent = [e for e in list(self.epochs)[-200:] if e["at_s"] >= now - self.began - WINDOW_S]
        span = max(now - self.began - recent[0]["at_s"], 0.001) if len(recent) > 1 else 0.0
        times = sorted(e["ms"] for e in recent)
        # A row that came right before its epoch was planned waits for that one; one that just missed the plan
        # before, longer.
        waits = sorted(e["latency_ms"] for e in recent if e["rows"])
        typical = sorted((e["ms"] + e["latency_ms"]) / 2 for e in recent if e["rows"])
        operators = []
        for id, (kind, names) in self.kinds.items():
            s = self.stages[id]
            instances = controller.routes.table.instances.get(id, 1)
            working = len(set(getattr(controller.routes.table, "owners", {}).get(id, range(instances))))
            samples = list(s.recent)
            width = max(now - samples[0][0], 0.001) if samples else 1.0
            queue = sum(
                1 for r in list(controller.epochs.in_flight.values()) if id not in r.done and id not in r.running
            )
            operators.append(
                OperatorStatus(
                    id,
                    kind,
                    names,
                    instances,
                    s.rows_in,
                    s.rows_out,
                    sum(x[1] for x in samples) / width,
                    sum(x[2] for x in samples) / width,
                    min(1.0, sum(x[3] for x in samples) / (1000 * width * working)),
                    queue,
                    s.bytes_local,
                    s.bytes_remote,
                    sum(r for r, _ in list(s.state.values())),
                    sum(b for _, b in list(s.state.values())),
                    s.late,
                    working,
                )
            )
        marks = [w for w in list(controller.watermarks.marks.values()) if abs(w) < 2**62]
        return JobStatus(
            self.job,
            self.flow,
            self.engine,
            controller.phase,
            controller.epochs.published,
            controller.checkpoints.committed,
            self.checkpoint_bytes,
            self.checkpoints,
            len(controller.epochs.in_flight),
            self.rows,
            sum(e["rows"] for e in recent[1:]) / span if span else 0.0,
            median(times) if times else 0.0,
            typical[len(typical) // 2] if typical else 0.0,
            waits[min(len(waits) - 1, int(len(waits) * 0.99))] if waits else 0.0,
            sum(o.state_rows for o in operators),
            sum(o.state_bytes for o in operators),
            self.dead,
            sum(o.late for o in operators),
            controller.attempts.recoveries,
            controller.routes.table.slices_most,
            controller.routes.table.version,
            now - self.began if self.began else 0.0,
            _iso(min(marks)) if marks else None,
            None,
            tuple(operators),
            tuple(
                {"id": o, "rows_in": int(a), "rows_out": int(b), "busy_ms": round(ms, 1)}
                for o, (a, b, ms) in list(self.operators.items())
            ),
            tuple(list(self.epochs)[-600:]),
            stragglers=self.stragglers,
            hot=self.hot,
        )


def _iso(microseconds: int) -> str:
    from datetime import UTC, datetime, timedelta

    try:
        return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=microseconds)).isoformat()
    except OverflowError:
        return "ended"
