"""The journal in words: what happened to a job, why, and what was done about it.

``tell`` goes through the records of a journal in order. It says of each record what a person who runs the job wants to
know. Most steps are routine (a stage is done, so the next one runs) and get no words. An epoch gets one line when it is
published. An event or command for which this module has no words is shown with its name and fields.

An *incident* goes from the first sign of a failure to the next epoch that is published for the first time. From that
moment on readers of the output notice nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from penstock.observe.journal import History, Record, Run, read_history, segments
from penstock.observe.journal_codec import Unknown, from_json, to_json
from penstock.state.store import Store

GENERIC_MAX = 160
SEGMENTS_READ = 128
"""Segments that are read first: about a minute. Every 64th segment begins with the controller's state."""
QUIET_LINES = 3
"""Up to this many lines of routine in a row are shown one by one."""


@dataclass(frozen=True)
class Line:
    """One line of the story."""

    at_ms: int
    text: str
    start: int
    step: int
    effect: bool = False
    """The line tells of a command that the controller gave because of the line above."""
    epoch: int | None = None
    incident: int | None = None
    routine: str = ""
    """``epoch`` or ``checkpoint``: the line may be summed up with its neighbours."""
    rows: int = 0
    seconds: float = 0.0


# -- telling ---------------------------------------------------------------------------------------------------------


def tell(history: History, *, everything: bool = False) -> list[Line]:
    """The whole story; with ``everything`` the routine too."""
    lines: list[Line] = []
    incidents = 0
    for run in history.runs:
        teller = Teller(run, incidents, everything)
        for record in run.records:
            lines += teller.tell(record)
        incidents = teller.incidents
    return lines


@dataclass
class Teller:
    """Puts the records of one run into words, and remembers what the next record needs."""

    run: Run
    incidents: int
    everything: bool = False
    attempt: int = 0
    committed: int = 0
    published: int = 0
    nodes: set[str] | None = None
    owners: dict[str, Sequence[int]] = field(default_factory=dict)
    began: dict[int, tuple[float, int]] = field(default_factory=dict)
    """epoch -> (when it was planned, its rows)"""
    logged: set[int] = field(default_factory=set)
    away: bool = False
    incident: tuple[int, float, str, int] | None = None
    """The incident under way: its number, when it began, what it was, and the last epoch published before it."""

    def __post_init__(self) -> None:
        """Where the story begins in the middle, the controller's state of that time says what was known."""
        state = self.run.states.get(self.run.records[0].after) if self.run.records else None
        if state is None:
            return
        parts = {name: from_json(part) for name, part in state.items()}
        self.attempt, self.committed = parts["attempts"].current, parts["checkpoints"].committed
        self.published, self.away = parts["epochs"].published, parts["epochs"].away
        self.nodes = set(parts["fleet"].nodes) or None
        self.logged = set(parts["inputs"].log)
        self.owners = dict(parts["routes"].table.owners)

    def tell(self, record: Record) -> list[Line]:
        event = record.event
        reasons = [c.reason for c in record.commands if type(c).__name__ == "CancelAll"]
        self._open_incident(event, record.error, bool(reasons))
        number = self.incident[0] if self.incident else None
        said = self._event(event, record.error)
        if said is None and reasons:  # nothing that looks like a failure, but the controller knew better
            said = _said(_one_line(reasons[0]))
        first = said or Line(0, "", 0, 0)
        effects: list[str] = []
        for command in record.commands:
            told = self._command(command, record)
            effects += told or ([_generic(command)] if self.everything else [])
        if said is None and (effects or self.everything):
            said = Line(0, _generic(event), 0, 0)
        out = [] if said is None else [said, *(replace(first, text=t, effect=True, routine="") for t in effects)]
        return [
            replace(line, at_ms=record.at_ms, start=record.start, step=record.step, incident=number) for line in out
        ]

    # -- incidents -----------------------------------------------------------------------------------------------------

    def _open_incident(self, event: Any, error: str | None, recovers: bool) -> None:
        what = "the error" if error else self._failure(event) or ("the failure" if recovers else "")
        if what and self.incident is None:
            self.incidents += 1
            self.incident = (self.incidents, event.now, what, self.published)

    def _failure(self, event: Any) -> str:
        match type(event).__name__:
            case "NodesChanged" if self._lost(event):
                return "the loss"
            case "StageFailed" if self._current(event):
                return "the failure"
            case "Stuck" if self._current(event):
                return "it got stuck"
            case "StoreChanged" if event.away:
                return "the store went away"
            case "StageDone" if self._current(event) and any(r.error or r.missing for r in event.reports):
                return "the failure"
            case "Fatal":
                return "the error"
        return ""

    def _current(self, event: Any) -> bool:
        """Whether an answer is of the present attempt. Answers of cancelled work come later and mean nothing."""
        return event.attempt >= self.attempt

    def _lost(self, event: Any) -> list[str]:
        return sorted((self.nodes or set()) - {n.name for n in event.nodes})

    # -- events --------------------------------------------------------------------------------------------------------

    def _event(self, event: Any, error: str | None) -> Line | None:
        if isinstance(event, Unknown):
            return _said(_generic(event))
        if error is not None:
            return _said(f"the controller broke on {_generic(event)}: {error}")
        name = type(event).__name__
        teller = getattr(self, f"_on_{name}", None)
        if teller is not None:
            found: Line | None = teller(event)
            return found
        return None if name in _QUIET_EVENTS else _said(_generic(event))

    def _on_Started(self, event: Any) -> Line:
        flow = f" of '{self.run.facts['flow']}'" if "flow" in self.run.facts else ""
        self.nodes = {n.name for n in getattr(event, "nodes", ())} or None
        logged = [r.epoch for r in event.logged]
        if event.restored is not None:
            self.committed = self.published = event.restored.epoch
            text = f"start {self.run.start}{flow}, from checkpoint {self.committed}"
        else:
            text = f"start {self.run.start}{flow}, from the beginning"
        self.attempt = event.attempt
        self.logged = set(logged)
        again = f"; {_epochs(logged)} {_runs(logged)} again from the log" if logged else ""
        left_out = "".join(f"; {said.removesuffix('.')}" for said in self.run.facts.get("skips", ()))
        return _said(text + again + left_out)

    def _on_EpochPlanned(self, event: Any) -> None:
        self.began[event.epoch] = (event.now, sum(span.rows for span in event.ranges.values()))

    def _on_StageDone(self, event: Any) -> Line | None:
        if not self._current(event):
            return None
        where = f"'{event.stage}' in epoch {event.epoch}"
        for report in event.reports:
            if report.error is not None:
                return _said(f"task {report.index} of {where} failed: {report.error.message}", event.epoch)
        missing = [r.index for r in event.reports if r.missing]
        if missing:
            return _said(f"{_containers(missing)} of {where} had lost {_its(missing)} state", event.epoch)
        sources: dict[str, int] = {}
        for report in event.reports:
            for source, count in getattr(report, "rebuilt", {}).items():
                sources[source] = sources.get(source, 0) + count
        if any(sources.values()):
            words = {"backup": "from backups", "durable": "from the durable checkpoint"}
            came = ", ".join(f"{count} {words.get(s, f'from {s}')}" for s, count in sorted(sources.items()) if count)
            return _said(f"slices of '{event.stage}' are up: {came}", event.epoch)
        return None

    def _on_StageFailed(self, event: Any) -> Line | None:
        if not self._current(event):
            return None
        what = "writing a checkpoint" if event.stage == "flush" else f"'{event.stage}'"
        return _said(f"{what} in epoch {event.epoch} failed: {_one_line(event.reason)}", event.epoch)

    def _on_Stuck(self, event: Any) -> Line:
        who = f"{_containers(event.containers)} of '{event.stage}'"
        has = "have" if len(event.containers) > 1 else "has"
        return _said(f"{who} {has} made no progress for {event.seconds:.1f} s (epoch {event.epoch})", event.epoch)

    def _on_NodesChanged(self, event: Any) -> Line:
        names = {n.name for n in event.nodes}
        lost, new = self._lost(event), sorted(names - (self.nodes or set()))
        known, self.nodes = self.nodes is not None, names
        why = f" ({_one_line(event.reason)})" if event.reason else ""
        if not known:
            return _said(f"nodes: {', '.join(sorted(names)) or 'none'}")
        parts = [f"{_nodes(lost)} lost"] if lost else []
        parts += [f"{_nodes(new)} joined"] if new else []
        return _said((", ".join(parts) or "the nodes are the same") + why)

    def _on_StoreChanged(self, event: Any) -> Line:
        self.away = event.away
        return _said(f"the checkpoint store {'does not answer' if event.away else 'is back'}")

    def _on_EpochPublished(self, event: Any) -> Line | None:
        if not self._current(event):
            return None
        cut, rows = self.began.pop(event.epoch, (None, 0))
        if event.epoch <= self.published:
            return _said(f"epoch {event.epoch} published again: it had been, nothing changes", event.epoch)
        self.published = event.epoch
        text = f"epoch {event.epoch} published"
        if self.incident is not None and not self.away:
            _, began, what, _ = self.incident
            self.incident = None
            return _said(f"{text} {event.now - began:.2f} s after {what}", event.epoch)
        took = event.now - cut if cut is not None else 0.0
        if cut is not None:
            text += f": {rows:,} rows in {took:.2f} s"
        return Line(0, text, 0, 0, epoch=event.epoch, routine="epoch", rows=rows, seconds=took)

    def _on_ManifestWritten(self, event: Any) -> Line | None:
        if not self._current(event):
            return None
        self.committed = event.epoch
        self.logged = {e for e in self.logged if e > event.epoch}
        return Line(0, f"checkpoint {event.epoch} is complete", 0, 0, epoch=event.epoch, routine="checkpoint")

    def _on_Compacted(self, event: Any) -> Line | None:
        return None if event.failed is None else _said(f"files of '{event.stage}' were not merged: {event.failed}")

    def _on_RescaleRequested(self, event: Any) -> Line:
        return _said(f"asked: {event.instances} instances of '{event.stage}'")

    def _on_WarmedUp(self, event: Any) -> Line:
        who = getattr(event, "containers", None)
        return _said(f"{_containers(who)} of '{event.stage}' {_are(who)} up" if who else f"'{event.stage}' is warm")

    def _on_MoveRequested(self, event: Any) -> Line:
        to = _containers(event.targets.values())
        return _said(f"asked: {_slices(event.targets)} of '{event.stage}' to {to} ({_one_line(event.reason)})")

    def _on_RebalanceRequested(self, event: Any) -> Line:
        return _said(f"asked: slices spread evenly ({_one_line(event.reason)})")

    def _on_CoresRequested(self, event: Any) -> Line:
        return _said(f"asked: {event.cores} cores of {_nodes([event.node])}")

    def _on_HotSlices(self, event: Any) -> Line:
        found = "; ".join(f"{_slices(slices)} of '{stage}'" for stage, slices in event.slices.items())
        return _said(f"too hot for one container: {found}" if found else "no slice is too hot for one container now")

    def _on_LeaveRequested(self, event: Any) -> Line:
        return _said(f"asked: {_nodes(event.nodes)} to leave")

    def _on_CancelMovesRequested(self, event: Any) -> Line:
        return _said("asked: moves cancelled" + (f" of '{event.stage}'" if event.stage else ""))

    def _on_StopRequested(self, event: Any) -> Line:
        return _said("asked: stop")

    def _on_Fatal(self, event: Any) -> Line:
        return _said(f"error: {_one_line(event.error.message)}")

    # -- commands ------------------------------------------------------------------------------------------------------

    def _command(self, command: Any, record: Record) -> list[str]:
        name = type(command).__name__
        match name:
            case "CancelAll":
                return self._recovery(command, record)
            case "LogEpoch":
                self.logged.add(command.epoch)
                self.began.setdefault(command.epoch, (record.event.now, command.record.rows))
                return self._routing(command)
            case "RunStage":
                self.attempt = max(self.attempt, command.attempt)
                self.committed = max(self.committed, command.checkpoint)
                handed = command.peers.handover
                if handed:
                    to = _containers(handed.values())
                    return [f"{_slices(handed)} of '{command.stage}' handed over to {to} in epoch {command.epoch}"]
                return []
            case "WarmUp":
                who = getattr(command, "containers", None)
                return [f"{_containers(who)} of '{command.stage}' {_are(who)} started" if who else "slots are started"]
            case "ReleaseNodes":
                return [f"{_nodes(command.nodes)} {'are' if len(command.nodes) > 1 else 'is'} given back to Spark"]
            case "Tell":
                return [_one_line(command.text)]
            case "Finish":
                return [f"the job is {command.reason}"]
            case "Fail":
                return [f"the job fails: {_one_line(command.error.message)}"]
        return [] if name in _QUIET_COMMANDS else [_generic(command)]

    def _recovery(self, command: Any, record: Record) -> list[str]:
        if any(type(c).__name__ == "Fail" for c in record.commands):
            return []
        self.attempt = command.attempt
        again = sorted(e for e in self.logged if e > self.committed)
        number = command.attempt - self.run.start * 1000
        where = f"checkpoint {self.committed}" if self.committed else "the beginning"
        out = [f"recovery {number}: attempt {command.attempt} from {where}"]
        return [*out, f"{_epochs(again)} {_runs(again)} again"] if again else out

    def _routing(self, command: Any) -> list[str]:
        routing = command.record.routing
        if routing is None:
            return []
        before, self.owners = self.owners, routing.owners
        out = []
        for stage, owners in routing.owners.items():
            moved = [c for was, c in zip(before.get(stage, ()), owners, strict=False) if was != c]
            if moved:
                to = _containers(moved)
                out.append(f"from epoch {command.epoch} on {len(moved)} slices of '{stage}' belong to {to}")
        return out


_QUIET_EVENTS = frozenset({"Tick", "EpochLogged", "EpochPlanned", "NothingNew", "Flushed"})
_QUIET_COMMANDS = frozenset(
    {
        "PlanEpoch",
        "LogEpoch",
        "RunStage",
        "PublishEpoch",
        "Flush",
        "WriteManifest",
        "Compact",
        "ReleaseEpoch",
        "CollectGarbage",
    }
)


# -- words -----------------------------------------------------------------------------------------------------------


def _said(text: str, epoch: int | None = None) -> Line:
    return Line(0, text, 0, 0, epoch=epoch)


def _generic(value: Any) -> str:
    """Name and fields of an event or command for which there are no words."""
    fields = dict(to_json(value))
    name = fields.pop("!")
    fields.pop("now", None)
    shown = ", ".join(f"{k} {v}" for k, v in fields.items() if isinstance(v, str | int | float))
    text = f"{name}: {shown}" if shown else str(name)
    return text if len(text) <= GENERIC_MAX else text[: GENERIC_MAX - 1] + "…"


def _one_line(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= 300 else flat[:299] + "…"


def numbers(values: Iterable[int]) -> str:
    """'1, 2, 5 to 9'"""
    out: list[str] = []
    ordered = sorted(set(values))
    begin = 0
    for i, value in enumerate(ordered):
        if i + 1 < len(ordered) and ordered[i + 1] == value + 1:
            continue
        group = ordered[begin : i + 1]
        out += [f"{group[0]} to {group[-1]}"] if len(group) > 2 else [str(v) for v in group]
        begin = i + 1
    return ", ".join(out)


def _containers(values: Iterable[int]) -> str:
    found = set(values)
    return f"container{'s' if len(found) > 1 else ''} {numbers(found)}"


def _slices(values: Iterable[int]) -> str:
    found = set(values)
    return f"slice {numbers(found)}" if len(found) == 1 else f"{len(found)} slices"


def _epochs(values: Iterable[int]) -> str:
    found = set(values)
    return f"epoch{'s' if len(found) > 1 else ''} {numbers(found)}"


def _runs(values: Sequence[int]) -> str:
    return "run" if len(values) > 1 else "runs"


def _are(values: Sequence[int] | None) -> str:
    return "are" if values and len(values) > 1 else "is"


def _its(values: Sequence[int]) -> str:
    return "their" if len(values) > 1 else "its"


def _nodes(names: Sequence[str]) -> str:
    return f"node{'s' if len(names) > 1 else ''} {', '.join(names)}"


# -- choosing and showing --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wanted:
    """Which part of the story a user asks for."""

    last: int | None = None
    """The number of lines."""
    since_ms: int | None = None
    epochs: tuple[int, int] | None = None
    incident: int | None = None
    """The incident's number; 0 is the last one."""
    everything: bool = False

    def covered_by(self, lines: Sequence[Line]) -> bool:
        """Whether these newest lines go back far enough."""
        if not lines:
            return False
        if self.incident is not None:
            return self.incident == 0 and lines[0].incident is None and bool(incidents(lines))
        if self.epochs is not None:
            return any(line.epoch is not None and line.epoch < self.epochs[0] for line in lines)
        if self.since_ms is not None:
            return lines[0].at_ms < self.since_ms
        return len(self.choose(lines)) >= (self.last or 0)

    def choose(self, lines: Sequence[Line]) -> list[Line]:
        found = list(lines)
        if self.incident is not None:
            found = of_incident(found, self.incident or None)
        if self.epochs is not None:
            found = of_epochs(found, *self.epochs)
        if self.since_ms is not None:
            found = [line for line in found if line.at_ms >= self.since_ms]
        if self.epochs is None and not self.everything:
            found = summed_up(found)
        return found[-self.last :] if self.last is not None else found


def newest(store: Store, wanted: Wanted) -> tuple[History, list[Line]]:
    """The end of a journal that holds what is wanted, and the whole story of that part."""
    names = segments(store)
    count = SEGMENTS_READ
    while True:
        history = read_history(store, names[-count:])
        if count < len(names):
            history.from_first_state()
        lines = tell(history, everything=wanted.everything)
        if count >= len(names) or wanted.covered_by(lines):
            return history, lines
        count *= 4


def of_incident(lines: Sequence[Line], number: int | None = None) -> list[Line]:
    """The lines of the last incident, or of the incident with this number."""
    known = incidents(lines)
    wanted = (known[-1] if known else None) if number is None else number
    return [line for line in lines if wanted is not None and line.incident == wanted]


def incidents(lines: Iterable[Line]) -> list[int]:
    return sorted({line.incident for line in lines if line.incident is not None})


def of_epochs(lines: Sequence[Line], first: int, last: int) -> list[Line]:
    """All lines from the first to the last one that is about these epochs."""
    within = [i for i, line in enumerate(lines) if line.epoch is not None and first <= line.epoch <= last]
    return list(lines[within[0] : within[-1] + 1]) if within else []


def summed_up(lines: Iterable[Line]) -> list[Line]:
    """The lines, with every long stretch of nothing but epochs and checkpoints in one line."""
    out: list[Line] = []
    quiet: list[Line] = []
    for line in [*lines, None]:
        if line is not None and line.routine and line.incident is None and (not quiet or quiet[0].start == line.start):
            quiet.append(line)
            continue
        out += quiet if len(quiet) <= QUIET_LINES else [_sum(quiet)]
        quiet = []
        if line is not None:
            if line.routine and line.incident is None:
                quiet.append(line)
            else:
                out.append(line)
    return out


def _sum(lines: Sequence[Line]) -> Line:
    epochs = [line for line in lines if line.routine == "epoch"]
    checkpoints = [line.epoch for line in lines if line.routine == "checkpoint"]
    parts = []
    if epochs:
        rows, slowest = sum(e.rows for e in epochs), max(e.seconds for e in epochs)
        which = numbers(e.epoch for e in epochs if e.epoch is not None)
        parts.append(f"epochs {which} published: {rows:,} rows, the slowest in {slowest:.2f} s")
    if checkpoints:
        parts.append(f"{len(checkpoints)} checkpoints, the last at epoch {checkpoints[-1]}")
    return replace(lines[-1], text="; ".join(parts))


def as_text(lines: Iterable[Line]) -> Iterator[str]:
    """Lines for a terminal: local time, the day when it changes, and commands indented below their cause."""
    day = ""
    before: tuple[int, int] | None = None
    for line in lines:
        at = datetime.fromtimestamp(line.at_ms / 1000)
        if f"{at:%Y-%m-%d}" != day:
            day = f"{at:%Y-%m-%d}"
            yield day
        stamp = f"{at:%H:%M:%S}.{line.at_ms % 1000:03d}"
        if line.effect and before == (line.start, line.step):
            yield f"{'':{len(stamp)}}   → {line.text}"
        else:
            yield f"{stamp}  {line.text}"
        before = (line.start, line.step)


__all__ = ["Line", "Teller", "Wanted", "as_text", "incidents", "newest", "numbers", "of_incident", "summed_up", "tell"]
