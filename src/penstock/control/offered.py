"""What comes for each stage, what each stage could do, and what keeps it from working.

A running job sees only what it processes. When a stage is too slow, back pressure holds the sources back, and every
rate in the flow falls to the rate of that stage. So the load that is offered is worked out from four measured figures:

* the **arrival rate** of a source is the rows that it read plus the growth of its backlog;
* the **selectivity** of an edge is the rows that come out at its end for each row that the stage before it takes in;
* the **capacity** of a stage is rows by busy time, summed over its containers;
* the **offered rate** of a stage is the sum over the stages before it of min(offered, capacity) times selectivity.

The time of a stage has three shares that add up to one. *Busy* is the time that its containers work.
*Back-pressured* is the time in which a source above the stage has rows left over, the stage has no work, and no
stage between them has any either: what holds the rows back lies behind the stage. *Idle* is the rest.

The functions are pure. ``RateWindow`` is fed with the engine's records, each with its time, and keeps no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import zip_longest

import msgspec

from penstock.control.records import TaskReport

WINDOW_S = 10.0
"""Seconds over which rates, shares and selectivities are measured."""
ARRIVAL_S = 4.0
"""Seconds over which arrivals are measured. It is short because a load that rises must be seen before rows pile up."""
LEFT_OVER = 0.1
"""A source is held back when its backlog after a plan is more than this share of the rows that the plan took."""
GROWTH = 0.1
"""A backlog grows when it gains more than this share of what arrives."""
SAMPLES_MAX = 4096
"""Samples of one stage or source that are kept, whatever the window."""
ESTIMATES_KEPT = 64
"""Epochs over which planned rows are compared with the rows that were read."""


class Work(msgspec.Struct, frozen=True):
    """What one container did."""

    rows: int
    busy_s: float


class Shares(msgspec.Struct, frozen=True):
    """The shares of a stage's time. They add up to one."""

    busy: float = 0.0
    back_pressured: float = 0.0
    idle: float = 1.0


class Arrived(msgspec.Struct, frozen=True):
    """One look at a source."""

    at: float
    planned: int
    """Rows that epochs have taken since the job started."""
    waiting: int | None
    """Rows that wait. None: the source cannot tell."""


class Arrival(msgspec.Struct, frozen=True):
    """What comes into a source."""

    rows_s: float
    growth_s: float = 0.0
    """Rows a second by which its backlog grows. Negative: it shrinks."""
    growing: bool = False
    """The backlog grows by more than chance."""


class StageRates(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one stage over the window."""

    rows_in_s: float = 0.0
    rows_out_s: float = 0.0
    offered_s: float | None = None
    """Rows a second that the stage would get if nothing behind it held the sources back. None: nothing has come."""
    capacity_s: float | None = None
    """Rows a second that its containers would get done if they worked all the time. None: nothing was measured."""
    shares: Shares = Shares()
    selectivity: dict[str, float] = {}
    """stage before it -> rows that come here for each row that comes there"""
    queue_rows: dict[int, int] = {}
    """container -> rows that were sent to it in epochs under way and are not processed"""


# -- pure functions ----------------------------------------------------------------------------------------------------


def capacity(work: Mapping[int, Work], containers: Collection[int]) -> float | None:
    """Rows a second of the given containers together, if all of them worked all the time.

    A container of which nothing is known counts as the mean of the others. None: nothing is known of any.
    """
    speeds = {c: w.rows / w.busy_s for c, w in work.items() if w.rows > 0 and w.busy_s > 0}
    here = [speeds[c] for c in containers if c in speeds] or list(speeds.values())
    return sum(here) / len(here) * len(containers) if here else None


def offered(
    inputs: Mapping[str, Sequence[str]],
    arrivals: Mapping[str, float],
    capacities: Mapping[str, float | None],
    selectivity: Mapping[tuple[str, str], float],
) -> dict[str, float]:
    """Rows a second that every stage would get.

    ``inputs`` has the stages in topological order, each with the stages before it. ``arrivals`` has the rate of every
    source. A stage passes on no more than its capacity. An edge without a measured selectivity passes on nothing.
    """
    found: dict[str, float] = {}
    for stage, before in inputs.items():
        if not before:
            found[stage] = arrivals.get(stage, 0.0)
            continue
        total = 0.0
        for parent in before:
            limit = capacities.get(parent)
            passed = found[parent] if limit is None else min(found[parent], limit)
            total += passed * selectivity.get((parent, stage), 0.0)
        found[stage] = total
    return found


def split(busy: float, held: float) -> Shares:
    """The three shares, from the busy share and the share of time in which the stage was held back without work."""
    busy = min(1.0, max(0.0, busy))
    held = min(1.0 - busy, max(0.0, held))
    return Shares(busy, held, 1.0 - busy - held)


def arrival(looks: Sequence[Arrived]) -> Arrival | None:
    """The arrival rate between the first and the last look. None: there are not two looks with time between them.

    A backlog rises between two plans and falls with each, so its growth is not the difference of any two looks: it is
    measured from the least backlog of the earlier half of the time to the least one of the later half. While it grows
    the rate is that of the later half if that is greater, because the load may just have risen.
    """
    looks = [look for look in looks if look.waiting is not None] or looks  # a source may begin to tell later
    if len(looks) < 2 or looks[-1].at <= looks[0].at:
        return None
    first, last = looks[0], looks[-1]
    whole_s = _came(first, last) / (last.at - first.at)
    middle = (first.at + last.at) / 2
    early = [look for look in looks if look.at <= middle and look.waiting is not None]
    late = [look for look in looks if look.at > middle and look.waiting is not None]
    if not early or not late:
        return Arrival(whole_s)
    low, high = (min(part, key=lambda look: look.waiting or 0) for part in (early, late))
    gained = (high.waiting or 0) - (low.waiting or 0)
    growing = gained > max(1.0, GROWTH * _came(first, last) / 2)
    late_s = _came(early[-1], last) / (last.at - early[-1].at)
    return Arrival(max(whole_s, late_s) if growing else whole_s, gained / (high.at - low.at), growing)


def _came(first: Arrived, last: Arrived) -> float:
    """Rows that arrived between two looks. Estimates may be off, but rows do not go back."""
    return max(0.0, last.planned - first.planned + (last.waiting or 0) - (first.waiting or 0))


def shared_out(rows: float, sizes: Sequence[int]) -> dict[int, int]:
    """Rows by container, in proportion to the bytes that went to each."""
    whole = sum(sizes)
    return {c: round(rows * size / whole) for c, size in enumerate(sizes) if size} if whole else {}


def selectivities(
    before: Sequence[str], rows_in: Mapping[str, int], sent: Mapping[str, int], arrived: int
) -> dict[str, float]:
    """For each stage before a stage the rows that arrive for each row that it took in.

    ``rows_in`` and ``sent`` are of the stages before, over some epochs: rows taken in, bytes sent here. ``arrived`` is
    the rows that came here in the same epochs. With several stages before, rows are told apart by bytes.
    """
    whole = sum(sent.get(p, 0) for p in before)
    found = {}
    for parent in before:
        if rows_in.get(parent, 0) > 0:
            part = sent.get(parent, 0) / whole if whole else 1 / len(before)
            found[parent] = arrived * part / rows_in[parent]
    return found


# -- the window --------------------------------------------------------------------------------------------------------


class _Done(msgspec.Struct, frozen=True):
    """One epoch of one stage."""

    at: float
    epoch: int
    rows_in: int
    rows_out: int
    work: dict[int, Work]
    sent: dict[str, list[int]]
    """downstream stage -> bytes for each container"""


class _Run(msgspec.Struct):
    """An epoch under way."""

    planned: dict[str, int]
    """source -> rows that the plan estimated"""
    done: dict[str, _Done] = {}


class RateWindow:
    """The engine's records of the last seconds, and the figures of every stage that follow from them."""

    def __init__(self, inputs: Mapping[str, Sequence[str]]) -> None:
        """``inputs``: the stages in topological order, each with the stages before it; a source has none."""
        self.inputs = {stage: tuple(dict.fromkeys(before)) for stage, before in inputs.items()}
        self.above: dict[str, frozenset[str]] = {}
        """stage -> all stages before it, directly or not"""
        for stage, before in self.inputs.items():
            self.above[stage] = frozenset(before).union(*(self.above[p] for p in before))
        self.done: dict[str, deque[_Done]] = {s: deque(maxlen=SAMPLES_MAX) for s in self.inputs}
        self.held: dict[str, deque[tuple[float, float]]] = {s: deque(maxlen=SAMPLES_MAX) for s in self.inputs}
        """stage -> (end, seconds) of the times in which it was held back without work"""
        sources = [s for s, before in self.inputs.items() if not before]
        self.looks: dict[str, deque[Arrived]] = {s: deque(maxlen=SAMPLES_MAX) for s in sources}
        self.estimates: dict[str, deque[tuple[int, int]]] = {s: deque(maxlen=ESTIMATES_KEPT) for s in sources}
        """source -> (rows planned, rows read) of its last epochs"""
        self.left_over: dict[str, bool] = dict.fromkeys(sources, False)
        """source -> it had rows left over when an epoch was planned last"""
        self.under_way: dict[int, _Run] = {}
        self.attempt = 0
        self._began: float | None = None
        self._counted_to = 0.0

    # -- records, in the order of their times

    def planned(self, epoch: int, rows: Mapping[str, int], now: float) -> None:
        self._advance(now)
        self.under_way[epoch] = _Run(dict(rows))

    def looked(self, source: str, look: Arrived, took: int | None = None, full: bool = False) -> None:
        """A look at a source. ``took``: rows that a plan took just before it; None: there was no plan. ``full``: the
        plan took as much as it might, which tells of rows left over where the source cannot.
        """
        self._advance(look.at)
        self.looks[source].append(look)
        if took is not None:
            self.left_over[source] = full if look.waiting is None else look.waiting > LEFT_OVER * max(1, took)

    def stage_done(self, stage: str, epoch: int, attempt: int, reports: Iterable[TaskReport], now: float) -> None:
        self._advance(now)
        if attempt > self.attempt:  # all epochs since the checkpoint run again
            self.attempt = attempt
            for run in self.under_way.values():
                run.done.clear()
        rows_in = rows_out = 0
        work: dict[int, Work] = {}
        sent: dict[str, list[int]] = {}
        for r in reports:
            rows_in, rows_out = rows_in + r.rows_in, rows_out + r.rows_out
            work[r.index] = Work(r.rows_in, r.busy_ms / 1000)
            for downstream, sizes in r.bytes_out.items():
                sent[downstream] = [a + b for a, b in zip_longest(sent.get(downstream, ()), sizes, fillvalue=0)]
        done = _Done(now, epoch, rows_in, rows_out, work, sent)
        self.done[stage].append(done)
        run = self.under_way.setdefault(epoch, _Run({}))
        run.done[stage] = done
        if run.planned.get(stage):
            self.estimates[stage].append((run.planned[stage], rows_in))

    def published(self, epoch: int, now: float) -> None:
        self._advance(now)
        self.under_way.pop(epoch, None)

    def _advance(self, now: float) -> None:
        """Count the time since the record before for the stages that were held back in it."""
        if self._began is None:
            self._began = self._counted_to = now
        seconds, self._counted_to = now - self._counted_to, max(now, self._counted_to)
        if seconds <= 0 or not self.under_way or not any(self.left_over.values()):
            return
        pending = self._pending()
        for stage, above in self.above.items():
            sources = above & self.looks.keys() or {stage}
            if stage not in pending and not above & pending and any(self.left_over[s] for s in sources):
                self.held[stage].append((now, seconds))

    def _pending(self) -> set[str]:
        """Stages that have an epoch to work on: the stages before them have done it, and they have not."""
        return {
            stage
            for run in self.under_way.values()
            for stage, before in self.inputs.items()
            if stage not in run.done and all(p in run.done for p in before)
        }

    # -- figures

    def backlog(self) -> dict[str, int | None]:
        """Rows that wait in every source. None: the source cannot tell."""
        return {source: looks[-1].waiting if looks else None for source, looks in self.looks.items()}

    def arrivals(self, now: float) -> dict[str, Arrival]:
        """What came into every source during the last seconds, in rows as they are read."""
        found = {}
        for source, looks in self.looks.items():
            while len(looks) > 2 and looks[1].at < now - ARRIVAL_S:
                looks.popleft()
            seen = arrival(looks)
            if seen is not None:
                planned = sum(rows for rows, _ in self.estimates[source])
                read = sum(rows for _, rows in self.estimates[source])
                factor = read / planned if planned and read else 1.0  # plans are estimates
                found[source] = Arrival(seen.rows_s * factor, seen.growth_s * factor, seen.growing)
        return found

    def rates(self, now: float, working: Mapping[str, Collection[int]]) -> dict[str, StageRates]:
        """The figures of every stage. ``working``: its containers that own slices, all tasks of a source."""
        self._forget(now - WINDOW_S)
        capacities = {s: capacity(_work(done), working[s]) for s, done in self.done.items()}
        selectivity = self._selectivity()
        arriving = self.arrivals(now)
        read = {s: _per_second(self.done[s], now, lambda d: d.rows_in) for s in self.inputs}
        sources = {s: arriving[s].rows_s if s in arriving else read[s] for s in self.looks}
        demand = offered(self.inputs, sources, capacities, selectivity)
        span = min(WINDOW_S, max(now - (self._began if self._began is not None else now), 1e-3))
        found = {}
        for s, before in self.inputs.items():
            busy_s = _per_second(self.done[s], now, lambda d: sum(w.busy_s for w in d.work.values()))
            known = s in arriving or any((p, s) in selectivity for p in before)
            found[s] = StageRates(
                rows_in_s=read[s],
                rows_out_s=_per_second(self.done[s], now, lambda d: d.rows_out),
                offered_s=demand[s] if known else None,
                capacity_s=capacities[s],
                shares=split(busy_s / max(1, len(working[s])), sum(held for _, held in self.held[s]) / span),
                selectivity={p: selectivity[p, s] for p in before if (p, s) in selectivity},
                queue_rows=self._queue(s, selectivity),
            )
        return found

    def _forget(self, before: float) -> None:
        for done in self.done.values():
            while done and done[0].at < before:
                done.popleft()
        for held in self.held.values():
            while held and held[0][0] < before:
                held.popleft()

    def _selectivity(self) -> dict[tuple[str, str], float]:
        """Of every edge, over the epochs that both of its ends have done."""
        found = {}
        for stage, before in self.inputs.items():
            ends = [{d.epoch: d for d in self.done[s]} for s in (stage, *before)]
            common = set(ends[0]).intersection(*ends[1:])
            here, *parents = ends
            rows_in = {p: sum(end[e].rows_in for e in common) for p, end in zip(before, parents, strict=True)}
            sent = {
                p: sum(sum(end[e].sent.get(stage, ())) for e in common) for p, end in zip(before, parents, strict=True)
            }
            arrived = sum(here[e].rows_in for e in common)
            for parent, ratio in selectivities(before, rows_in, sent, arrived).items():
                found[parent, stage] = ratio
        return found

    def _queue(self, stage: str, selectivity: Mapping[tuple[str, str], float]) -> dict[int, int]:
        """Rows of epochs under way that the stages before have sent and the stage has not processed."""
        found: dict[int, int] = {}
        for run in self.under_way.values():
            if stage in run.done:
                continue
            for parent in self.inputs[stage]:
                done = run.done.get(parent)
                if done is not None and stage in done.sent:
                    rows = done.rows_in * selectivity.get((parent, stage), 0.0)
                    for container, n in shared_out(rows, done.sent[stage]).items():
                        found[container] = found.get(container, 0) + n
        return found


def _work(done: Iterable[_Done]) -> dict[int, Work]:
    """What every container did in all."""
    found: dict[int, Work] = {}
    for each in done:
        for container, work in each.work.items():
            before = found.get(container, Work(0, 0.0))
            found[container] = Work(before.rows + work.rows, before.busy_s + work.busy_s)
    return found


def _per_second(done: Sequence[_Done], now: float, what: Callable[[_Done], float]) -> float:
    """A figure of the epochs since the first one of the window, by the time since then."""
    return sum(map(what, done)) / max(now - done[0].at, 1e-3) if done else 0.0
