"""The journal: every step of the controller, with what led to it and what came of it, on record.

The controller is a function of its events. So the events, in order, are the whole story of a job: they can be told to a
person (``story.py``) and played through a real controller again (``replay``), which must then order the same. Idle
steps are the exception: a job without input asks its sources fifty times a second, and a journal of that would push out
what one wants to read. Steps in which time passed, or a source had nothing new once more, are left out; what they
changed (when a source was last asked, say) stands with the next step on record.

Recording must cost the job next to nothing, and must never harm it. The controller's thread only puts references into a
queue: events and commands are values, which nobody changes once they are made. A thread of the journal encodes them and
writes *segments*, compressed lines of JSON, into the checkpoint's store::

    journal/000003-00000012-5321.jsonl.gz     start 3, segment 12, 5,321 bytes

The size is in the name because a store lists only names, and the oldest segments go when all of them together pass
``journal_mb``. Every 64th segment begins with the controller's whole state, from which a replay can start when older
segments are gone. If the store fails, segments wait in memory up to a limit and are then dropped and counted. The
journal goes past the store's retries: it is not to be waited for, and it must not make the store count as away.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import queue
import re
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.connectors.retrying import RetryingStore
from penstock.connectors.store import FsspecStore
from penstock.control.concern import Concern
from penstock.control.controller import Controller
from penstock.control.events import (
    Command,
    Event,
    NothingNew,
    PlanEpoch,
    Tick,
)
from penstock.observe.journal_codec import attributes, from_json, is_plain, settled, to_json
from penstock.state.store import Store
from penstock.version import __version__ as VERSION

FORMAT = 2
PREFIX = "journal/"
SEGMENT_S = 0.5
SEGMENT_BYTES = 256 * 1024
SEGMENTS_PER_SNAPSHOT = 64
STEPS_PER_SNAPSHOT = 500
"""Of a journal in memory."""
RECORDS_KEPT = 2_000
REPORTS_KEPT = 20_000
"""In memory, whichever is reached first: an event of a stage with hundreds of containers has a report of each."""
PENDING_MAX = 10_000
"""Records that wait for the journal's thread: it hangs in the store."""
UNWRITTEN_BYTES = 4 * 1024 * 1024
"""Segments that wait for the store to come back."""
CLOSE_S = 2.0

_NAME = re.compile(r"journal/(\d+)-(\d+)-(\d+)\.jsonl\.gz")
_SCALARS = frozenset({str, int, float, bool, type(None)})


# -- writing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Item:
    """A line to be: what happened, not yet encoded."""

    step: int
    """Number of the controller's step. Commands name it as their cause."""
    at_ms: int
    after: int = 0
    """Number of the step on record before this one. Steps in between were idle."""
    event: Event | None = None
    commands: Sequence[Command] = ()
    error: str | None = None
    state: dict[str, Any] | None = None
    """The controller after this step."""
    patch: dict[str, Any] = field(default_factory=dict)
    """What idle steps before it changed."""

    @property
    def weight(self) -> int:
        return 1 + len(getattr(self.event, "reports", ()))

    def line(self) -> bytes:
        out: dict[str, Any] = {"n": self.step, "after": self.after, "at": self.at_ms}
        if self.state is not None:
            out["state"] = {name: to_json(value) for name, value in self.state.items()}
        if self.patch:
            out["set"] = self.patch
        if self.event is not None:
            out["event"] = to_json(self.event)
            out["commands"] = [to_json(command) for command in self.commands]
        if self.error is not None:
            out["error"] = self.error
        return json.dumps(out, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


class Journal:
    """``begin`` once, ``record`` after each step of the controller, ``close`` at the end. None of them ever raises.

    Without a store the last records are kept in memory.
    """

    def __init__(
        self,
        store: Store | None,
        limit_mb: int,
        *,
        wall_ms: Callable[[], int] = lambda: int(time.time() * 1000),
        clock: Callable[[], float] = time.monotonic,
        threaded: bool = True,
    ) -> None:
        """``threaded=False`` writes in the caller's thread: for tests."""
        self.on = limit_mb > 0
        self.start = 1
        self._records = 0
        self._last = 0
        """Number of the last step on record."""
        self._lost = 0
        self._facts: dict[str, Any] = {}
        self._wall_ms = wall_ms
        self._controller: Controller | None = None
        self._before = _Surface({}, ())
        self._recorded: dict[str, Any] = {}
        """Scalars of the controller after the last step on record."""
        self._kept: deque[_Item] = deque()
        self._kept_weight = 0
        self._writer: _Writer | None = None
        if store is not None and self.on:
            self._writer = _Writer(_past_retries(store), limit_mb * 1024 * 1024, clock, threaded)

    def begin(self, controller: Controller, *, start: int, facts: dict[str, Any] | None = None) -> None:
        """Before the first step: the controller as it was made. ``facts`` (job, flow ...) are for people."""
        if not self.on:
            return
        self._controller = controller
        self.start = start
        self._facts = {**(facts or {}), "version": VERSION}
        self._before = _surface(controller)
        self._recorded = self._before.scalars
        if self._writer is not None:
            self._writer.begin(start, self._facts)
        self._snapshot()

    def record(self, event: Event, commands: Sequence[Command]) -> None:
        if self._controller is None:
            return
        try:
            self._record(self._controller, event, commands)
        except Exception:  # a job does not end for its diary
            self._lost += 1

    def _record(self, controller: Controller, event: Event, commands: Sequence[Command]) -> None:
        before, now = self._before, _surface(controller)
        self._before = now
        if _idle(event, commands) and now.others == before.others and now.waits_as(before):
            return
        patch = {k: v for k, v in before.scalars.items() if self._recorded.get(k, self) != v}
        self._recorded = now.scalars
        self._records += 1
        self._keep(_Item(controller.steps, self._wall_ms(), self._last, event, commands, patch=patch))
        self._last = controller.steps
        if self._writer is not None:
            if self._writer.snapshot_due:
                self._writer.snapshot_due = False
                self._snapshot()
        elif self._records % STEPS_PER_SNAPSHOT == 0:
            self._snapshot()

    def crashed(self, event: Event, error: BaseException) -> None:
        """The controller could not take this event: the last record of a bug."""
        if self._controller is not None:
            self._keep(
                _Item(
                    self._controller.steps,
                    self._wall_ms(),
                    self._last,
                    event,
                    error=f"{type(error).__name__}: {error}",
                )
            )
            self._last = self._controller.steps

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    @property
    def lost(self) -> int:
        """Records that are nowhere: they could not be encoded, or the store did not take them."""
        return self._lost + (self._writer.lost + self._writer.overflow if self._writer is not None else 0)

    def history(self) -> History:
        """What is on record: in memory, or in the store so far."""
        if self._writer is not None:
            return read_history(self._writer.store)
        run = Run(self.start, self._facts)
        for item in list(self._kept):
            with contextlib.suppress(TypeError):
                run.add(json.loads(item.line()))
        return History([run] if run.records else [])

    def _snapshot(self) -> None:
        state = {name: settled(value) for name, value in vars(self._controller).items()}
        self._keep(_Item(self._last, self._wall_ms(), state=state))

    def _keep(self, item: _Item) -> None:
        if self._writer is not None:
            self._writer.take(item)
            return
        self._kept.append(item)
        self._kept_weight += item.weight
        while len(self._kept) > RECORDS_KEPT or self._kept_weight > REPORTS_KEPT:
            self._kept_weight -= self._kept.popleft().weight


class _Writer:
    """The journal's own thread."""

    def __init__(self, store: Store, limit_bytes: int, clock: Callable[[], float], threaded: bool) -> None:
        self.store = store
        self.threaded = threaded
        self.limit_bytes = limit_bytes
        self.clock = clock
        self.lost = 0
        self.overflow = 0
        """Dropped by the controller's thread, because this one hangs."""
        self.snapshot_due = False
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._start = 0
        self._facts: dict[str, Any] = {}
        self._segment = 0
        self._lines: list[bytes] = []
        self._bytes = 0
        self._since = 0.0
        self._unwritten: deque[tuple[str, bytes, int]] = deque()
        """(name, data, records) that the store has not taken yet"""
        self._written: deque[tuple[str, int]] | None = None
        """(name, bytes) of all that the store has, oldest first; None until it was asked."""

    def begin(self, start: int, facts: dict[str, Any]) -> None:
        self._start, self._facts = start, facts
        if self.threaded:
            self._thread = threading.Thread(target=self._work, name="penstock-journal", daemon=True)
            self._thread.start()

    def take(self, item: _Item) -> None:
        if not self.threaded:
            self._handle(item)
        elif self._queue.qsize() >= PENDING_MAX:
            self.overflow += 1
        else:
            self._queue.put(item)

    def close(self) -> None:
        """Write what there is. A store that hangs is left alone after a while: the thread is a daemon."""
        if not self.threaded:
            self._end()
        elif self._thread is not None:
            self._queue.put(None)
            self._thread.join(CLOSE_S)

    def _work(self) -> None:
        while True:
            wait = SEGMENT_S if self._lines or self._unwritten else None
            try:
                item = self._queue.get(timeout=wait)
            except queue.Empty:
                self._cut()
                continue
            if item is None:
                self._end()
                return
            self._handle(item)

    def _end(self) -> None:
        self._cut()
        self.lost += sum(records for *_, records in self._unwritten)

    def _handle(self, item: _Item) -> None:
        if item.state is not None:
            self._cut()  # a state stands at the beginning of a segment
        self._append(item)
        if self._bytes >= SEGMENT_BYTES or (self._lines and self.clock() - self._since >= SEGMENT_S):
            self._cut()

    def _append(self, item: _Item) -> None:
        try:
            line = item.line()
        except Exception:  # an event that cannot be encoded leaves a gap, which a replay names
            self.lost += 1
            return
        if not self._lines:
            self._since = self.clock()
        self._lines.append(line)
        self._bytes += len(line)

    def _cut(self) -> None:
        """Close the segment under way, and give the store what it has not taken yet."""
        if self._lines:
            self._segment += 1
            head = {"journal": FORMAT, "start": self._start, "segment": self._segment}
            head["lost"] = self.lost + self.overflow
            body = json.dumps(head | self._facts).encode() + b"\n" + b"".join(self._lines)
            data = gzip.compress(body, compresslevel=3, mtime=0)
            name = f"{PREFIX}{self._start:06d}-{self._segment:08d}-{len(data)}.jsonl.gz"
            self._unwritten.append((name, data, len(self._lines)))
            self._lines, self._bytes = [], 0
            if self._segment % SEGMENTS_PER_SNAPSHOT == 0:
                self.snapshot_due = True
        try:
            while self._unwritten:
                name, data, _ = self._unwritten[0]
                _put(self.store, name, data)
                self._unwritten.popleft()
                if self._written is not None:
                    self._written.append((name, len(data)))
                self._trim()
        except Exception:  # whatever a store may raise: the job must not notice
            while sum(len(data) for _, data, _ in self._unwritten) > UNWRITTEN_BYTES:
                self.lost += self._unwritten.popleft()[2]

    def _trim(self) -> None:
        if self._written is None:
            found = [(name, _NAME.fullmatch(name)) for name in sorted(self.store.list(PREFIX))]
            self._written = deque((name, int(match[3])) for name, match in found if match)
        total = sum(size for _, size in self._written)
        while total > self.limit_bytes and len(self._written) > 1:
            name, size = self._written[0]
            self.store.delete(name)
            self._written.popleft()
            total -= size


def _past_retries(store: Store) -> Store:
    return store.inner if isinstance(store, RetryingStore) else store


def _put(store: Store, name: str, data: bytes) -> None:
    if isinstance(store, FsspecStore):
        store.put(name, data, sync=False)  # after a power cut the last second of the journal may be missing
    else:
        store.put(name, data)


@dataclass(frozen=True)
class _Surface:
    """Enough of an object's attributes to see whether a step changed them."""

    scalars: dict[str, Any]
    others: tuple[Any, ...]
    """Who and how long the other attributes are."""

    def waits_as(self, before: _Surface) -> bool:
        """A source has nothing new: still, and not for the first time."""
        return bool(self.scalars.get("epochs.idle_since") == before.scalars.get("epochs.idle_since"))


def _surface(controller: Controller) -> _Surface:
    """An idle step differs from the one before it in nothing but the time, so what it can change besides scalars is a
    routing put in force, a checkpoint opened, a move begun or given up. All of those show here.
    """
    scalars: dict[str, Any] = {}
    others: list[Any] = []
    for name, found in vars(controller).items():
        if isinstance(found, Concern):
            for inner, value in attributes(found).items():
                _look(f"{name}.{inner}", value, scalars, others)
        else:
            _look(name, found, scalars, others)
    return _Surface(scalars, tuple(others))


def _look(name: str, value: Any, scalars: dict[str, Any], others: list[Any]) -> None:
    if value.__class__ in _SCALARS:
        scalars[name] = value
    elif hasattr(value, "__len__"):
        others.append((id(value), len(value)))
    elif is_plain(value):
        inner = [
            v if v.__class__ in _SCALARS else (id(v), len(v) if hasattr(v, "__len__") else 0)
            for v in vars(value).values()
        ]
        others.append((id(value), *inner))
    else:
        others.append(id(value))


def _idle(event: Event, commands: Sequence[Command]) -> bool:
    """Nothing but asking the sources again."""
    if type(event) is Tick:
        return all(type(c) is PlanEpoch and not c.even_if_empty for c in commands)
    return type(event) is NothingNew and not commands


# -- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """One step: the event, and the commands that it led to, each of which names its cause."""

    start: int
    step: int
    at_ms: int
    """Wall clock, in milliseconds."""
    after: int
    """The step on record before this one; steps in between were idle."""
    event: Any
    commands: tuple[Any, ...] = ()
    error: str | None = None
    """The controller raised this instead."""
    raw: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)


@dataclass
class Run:
    """What is on record of one start of the job."""

    start: int
    facts: dict[str, Any] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    states: dict[int, dict[str, Any]] = field(default_factory=dict)
    """step -> the controller after it, encoded; 0: as it was made"""
    lost: int = 0
    """Records that the job had to drop."""

    def add(self, line: dict[str, Any]) -> None:
        step = int(line["n"])
        if "state" in line:
            self.states[step] = line["state"]
        if "event" in line:
            event, *commands = (from_json(each) for each in (line["event"], *line["commands"]))
            self.records.append(
                Record(
                    self.start,
                    step,
                    int(line["at"]),
                    int(line["after"]),
                    event,
                    tuple(commands),
                    line.get("error"),
                    line,
                )
            )


@dataclass
class History:
    """A journal as read: runs in order of time."""

    runs: list[Run] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    """Segments that could not be read, with the reason; they were skipped."""

    def from_first_state(self) -> None:
        """Of a part of a journal: leave out what comes before the first state, since nothing is known of that time."""
        run = self.runs[0] if self.runs else None
        if run is not None and run.records and run.states and run.records[0].after not in run.states:
            first = min(run.states)
            run.records = [record for record in run.records if record.step > first]

    def __iter__(self) -> Iterator[Record]:
        return (record for run in self.runs for record in run.records)

    def __len__(self) -> int:
        return sum(len(run.records) for run in self.runs)


def segments(store: Store) -> list[str]:
    """Names of the journal's segments, oldest first."""
    return sorted(name for name in store.list(PREFIX) if _NAME.fullmatch(name))


def read_history(store: Store, names: Iterable[str] | None = None) -> History:
    """The journal in a checkpoint's store: all of it, or these segments. A damaged segment is named and skipped."""
    history = History()
    for name in segments(store) if names is None else names:
        try:
            head, *lines = gzip.decompress(store.get(name)).splitlines()
            read = json.loads(head)
            if read["journal"] != FORMAT:
                raise ValueError(f"it has format {read['journal']}, and this Penstock reads format {FORMAT}")
            parsed = [json.loads(line) for line in lines]
        except FileNotFoundError:
            continue  # it was old, and has gone meanwhile
        except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
            history.damaged.append(f"{name}: {error or type(error).__name__}")
            continue
        if not history.runs or history.runs[-1].start != read["start"]:
            facts = {k: v for k, v in read.items() if k not in ("journal", "start", "segment", "lost")}
            history.runs.append(Run(read["start"], facts))
        run = history.runs[-1]
        run.lost = max(run.lost, read["lost"])
        for line in parsed:
            run.add(line)
    return history


# -- replay ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """The first step at which the controller of today ordered something else than the one on record."""

    record: Record
    recorded: tuple[Any, ...]
    replayed: tuple[Any, ...]
    error: str | None = None
    """The controller of today raised this."""

    def lines(self) -> list[str]:
        r = self.record
        out = [f"start {r.start}, step {r.step}: {type(r.event).__name__} {json.dumps(to_json(r.event))[:400]}"]
        if self.error or r.error:
            out.append(f"  recorded: {r.error or f'{len(self.recorded)} commands'}")
            return [*out, f"  replayed: {self.error or f'{len(self.replayed)} commands'}"]
        for number in range(max(len(self.recorded), len(self.replayed))):
            was = to_json(self.recorded[number]) if number < len(self.recorded) else None
            now = to_json(self.replayed[number]) if number < len(self.replayed) else None
            if was == now:
                out.append(f"  command {number + 1}, {type(self.recorded[number]).__name__}: the same")
                continue
            out.append(f"  command {number + 1} recorded: {json.dumps(was) if was else 'none'}")
            out.append(f"  command {number + 1} replayed: {json.dumps(now) if now else 'none'}")
            if was and now and was["!"] == now["!"]:
                fields = sorted(k for k in was.keys() | now.keys() if was.get(k) != now.get(k))
                out.append(f"  different in: {', '.join(fields)}")
        return out


@dataclass(frozen=True)
class Replay:
    steps: int
    """Steps that were played and compared."""
    difference: Difference | None = None
    skipped: int = 0
    """Steps that could not be: what led to them is no longer on record."""
    first: tuple[int, int] | None = None
    """(start, step) of the first one played"""
    written_by: tuple[str, ...] = ()
    """Versions that wrote the journal, if others than this one."""

    @property
    def same(self) -> bool:
        return self.difference is None


def replay(history: History | Run) -> Replay:
    """Play the recorded events through real controllers and compare each step's commands with the recorded ones."""
    runs = history.runs if isinstance(history, History) else [history]
    steps = skipped = 0
    first: tuple[int, int] | None = None
    others = {str(run.facts["version"]) for run in runs if run.facts.get("version", VERSION) != VERSION}
    for run in runs:
        controller: Controller | None = None
        expected = -1
        for record in run.records:
            if record.after != expected:
                controller = _controller_at(run, record.after)
            if controller is None:
                skipped += 1
                continue
            expected = record.step
            steps += 1
            first = first or (record.start, record.step)
            for name, value in record.raw.get("set", {}).items():
                part, _, field_name = name.rpartition(".")
                setattr(getattr(controller, part) if part else controller, field_name, value)
            difference = _compare(controller, record)
            if difference is not None:
                return Replay(steps, difference, skipped, first, tuple(sorted(others)))
    return Replay(steps, None, skipped, first, tuple(sorted(others)))


def _controller_at(run: Run, step: int) -> Controller | None:
    if step not in run.states:
        return None
    controller = Controller.__new__(Controller)
    controller.__dict__.update({name: from_json(value) for name, value in run.states[step].items()})
    controller.link()
    return controller


def _compare(controller: Controller, record: Record) -> Difference | None:
    error: str | None = None
    replayed: tuple[Any, ...] = ()
    try:
        replayed = tuple(controller.step(record.event))
    except Exception as raised:  # a controller that breaks on a recorded event is what one wants to hear of
        error = f"{type(raised).__name__}: {raised}"
    same = error == record.error and [to_json(c) for c in replayed] == [to_json(c) for c in record.commands]
    return None if same else Difference(record, record.commands, replayed, error)


__all__ = ["Difference", "History", "Journal", "Record", "Replay", "Run", "read_history", "replay", "segments"]
