"""The journal: nothing is lost on the way to JSON and back, the store may do what it likes, and the story is right."""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
import threading
import types
import typing
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import penstock as ps
from penstock import cli, testing
from penstock.control import events
from penstock.control.controller import Controller
from penstock.control.epochs import Epochs
from penstock.control.events import (
    CancelAll,
    Command,
    EpochLogged,
    EpochPlanned,
    EpochPublished,
    Event,
    Fail,
    Fatal,
    Flush,
    LogEpoch,
    ManifestWritten,
    NodesChanged,
    PublishEpoch,
    RunStage,
    StageDone,
    StageFailed,
    Started,
    StopRequested,
    StoreChanged,
    Stuck,
    Tell,
    Tick,
)
from penstock.control.pacing import Pacer
from penstock.control.records import EpochRecord, NodeInfo, SourceSpan, TaskError, TaskReport
from penstock.control.routing import RoutingTable
from penstock.control.settings import Settings
from penstock.control.topology import StageInfo, Topology
from penstock.engines.job import Job, start
from penstock.ids import Attempt, Epoch, RoutingVersion, StageId
from penstock.observe import journal as journal_module
from penstock.observe.journal import History, Journal, Record, Run, read_history, replay, segments
from penstock.observe.journal_codec import Unknown, from_json, settled, to_json
from penstock.observe.story import as_text, numbers, of_epochs, of_incident, summed_up, tell
from penstock.state.checkpoint import DeltaFile, Manifest
from penstock.state.store import FailingStore, MemoryStore, Store

FRAME = pl.DataFrame({"k": [f"k{i % 5}" for i in range(100)]})
IN, COUNT = StageId("in"), StageId("count")


def there_and_back(value: Any) -> Any:
    return from_json(json.loads(json.dumps(to_json(value))))


# -- encoding --------------------------------------------------------------------------------------------------------


def example(hint: Any) -> Any:
    """Some value of an annotated type that is not empty. New events are covered as they come."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {"a": [1, "x", None, 2.5]}
    if isinstance(hint, typing.NewType):
        return example(hint.__supertype__)
    if origin in (typing.Union, types.UnionType):
        return example(next(a for a in args if a is not type(None)))
    if origin is typing.Literal:
        return args[0]
    if origin is tuple:
        return (example(args[0]),) * 2 if args[1:] == (...,) else tuple(example(a) for a in args)
    if origin in (list, Sequence):
        return [example(args[0])]
    if origin in (dict, Mapping):
        return {example(args[0]): example(args[1])}
    if origin in (set, frozenset):
        return origin([example(args[0])])
    if dataclasses.is_dataclass(hint) or (isinstance(hint, type) and issubclass(hint, msgspec.Struct)):
        hints = typing.get_type_hints(hint)
        names = [f.name for f in dataclasses.fields(hint)] if dataclasses.is_dataclass(hint) else hint.__struct_fields__
        return hint(**{name: example(hints[name]) for name in names})  # type: ignore[operator]
    return {int: 7, float: 0.1, str: "text", bool: True, bytes: b"\x00\xff"}[hint]


CLASSES = [
    c
    for c in vars(events).values()
    if isinstance(c, type) and issubclass(c, Event | Command | TaskReport | TaskError) and c not in (Event, Command)
]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda c: c.__name__)
def test_every_event_and_command_comes_back_equal(kind: type) -> None:
    made = example(kind)
    back = there_and_back(made)
    assert type(back) is kind
    if kind in (RunStage, Flush):
        assert back.routing == made.routing.version, "the log has the table"
        back = msgspec.structs.replace(back, routing=made.routing)
    assert back == made


KEYS = st.one_of(
    st.text(max_size=4), st.integers(), st.tuples(st.text(max_size=2), st.integers()), st.sampled_from("!")
)
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False),
        st.text(max_size=5),
        st.binary(max_size=5),
        st.frozensets(st.integers(), max_size=3),
        st.sets(st.tuples(st.integers(), st.text(max_size=2)), max_size=3),
        st.builds(TaskError, kind=st.text(max_size=3), message=st.text(max_size=3)),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(st.sampled_from(["()", "{}", "set", "bytes", "!", "enum"]), inner, max_size=2),
        st.builds(deque, st.lists(inner, max_size=2)),
        st.builds(lambda x: StageFailed(now=1.5, epoch=Epoch(1), stage=COUNT, attempt=Attempt(1), reason=x), inner),
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(VALUES)
def test_any_value_comes_back_equal_and_of_the_same_type(value: Any) -> None:
    back = there_and_back(value)
    assert back == value and type(back) is type(value)
    assert to_json(back) == to_json(value)


def test_nested_values_of_control() -> None:
    file = DeltaFile("state/a", "count", "delta", 1, 2, (3, 1), 10, 100, "sum")
    manifest = Manifest("job", "flow", {"count": {"keys": 1}}, 7, 3, {"version": 1}, files={"count": (file,)})
    topology = Topology((StageInfo(IN, True, False, False, 0, 0, ()),))
    for value in (manifest, RoutingTable.initial(4, {IN: False, COUNT: True}, 2), Pacer.start(None, 1, 9, 5), topology):
        assert there_and_back(value) == value


def test_what_is_not_known_is_kept_as_it_is() -> None:
    later = {"!": "FromTheFuture", "now": 1.0, "who": {"()": [1]}}
    assert from_json(later) == Unknown("FromTheFuture", {"now": 1.0, "who": (1,)})
    assert from_json({"!": "Tick", "now": 1.0, "mood": "fine"}) == Unknown("Tick", {"now": 1.0, "mood": "fine"})
    with pytest.raises(TypeError, match="cannot write"):
        to_json(threading.Lock())
    with pytest.raises(TypeError, match="cannot write"):
        to_json(lambda: None)


def test_what_a_task_made_for_the_sinks_is_not_part_of_its_report_on_record() -> None:
    """The runtime takes it out of the reports before control, and with it the journal, sees them."""
    assert "output" in TaskReport.__struct_fields__
    with pytest.raises(TypeError, match="parts"):
        PublishEpoch(epoch=Epoch(1), attempt=Attempt(1), parts={})  # type: ignore[call-arg]


def test_a_settled_copy_does_not_change_with_the_original() -> None:
    controller = make_controller()
    copy = settled(vars(controller))["inputs"]
    before = to_json(copy.log), to_json(copy.offsets)
    controller.step(Started(now=0.0))
    controller.step(
        EpochPlanned(now=0.1, epoch=Epoch(1), ranges={"in": SourceSpan(start={"row": 0}, end={"row": 5}, rows=5)})
    )
    assert controller.inputs.log and controller.inputs.offsets
    assert (to_json(copy.log), to_json(copy.offsets)) == before


# -- recording -------------------------------------------------------------------------------------------------------


def make_controller() -> Controller:
    topology = Topology(
        (StageInfo(IN, True, False, False, 0, 0, ()), StageInfo(COUNT, False, True, False, 0, 0, (IN,)))
    )
    routing = RoutingTable.initial(4, topology.keyed(), 1)
    pacer = Pacer.start(100, 1, 1_000, 500)
    return Controller(topology, routing, pacer, Settings(checkpoint_interval_s=1e9), Manifest("job", "flow", {}, 0))


def answers(commands: Sequence[Command], now: float) -> Iterator[Event]:
    """What an engine without faults says."""
    for command in commands:
        match command:
            case events.PlanEpoch():
                ranges = {"in": SourceSpan(start={"row": now}, end={"row": now + 1}, rows=10)}
                yield EpochPlanned(now=now, epoch=command.epoch, ranges=ranges, exhausted=(), clock_ms=int(now))
            case LogEpoch():
                yield EpochLogged(now=now, epoch=command.epoch, attempt=command.attempt)
            case RunStage():
                report = TaskReport(
                    stage=command.stage,
                    epoch=command.epoch,
                    attempt=command.attempt,
                    index=0,
                    rows_in=10,
                )
                yield StageDone(
                    now=now, epoch=command.epoch, stage=command.stage, attempt=command.attempt, reports=(report,)
                )
            case PublishEpoch():
                yield EpochPublished(now=now, epoch=command.epoch, attempt=command.attempt)


def play(journal: Journal, steps: int, start: int = 1) -> Controller:
    """A job of so many steps, on record."""
    controller = make_controller()
    journal.begin(controller, start=start, facts={"flow": "counting"})
    waiting: deque[Event] = deque([Started(now=0.0, restored=None, logged=(), attempt=start * 1000)])
    for number in range(steps):
        event = waiting.popleft() if waiting else Tick(now=number * 0.1)
        commands = controller.step(event)
        journal.record(event, commands)
        waiting.extend(answers(commands, number * 0.1))
    return controller


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every record is a segment, every fourth one a state."""
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 1)
    monkeypatch.setattr(journal_module, "SEGMENTS_PER_SNAPSHOT", 4)


def in_store(store: Store, limit_mb: int = 64) -> Journal:
    return Journal(store, limit_mb, wall_ms=lambda: 1_700_000_000_000, threaded=False)


def test_a_journal_in_memory_replays() -> None:
    journal = Journal(None, 64)
    play(journal, 100)
    found = replay(journal.history())
    assert (found.steps, found.difference, found.skipped, found.first) == (100, None, 0, (1, 1))
    assert journal.lost == 0


def test_memory_is_bounded_and_the_replay_begins_at_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "RECORDS_KEPT", 50)
    monkeypatch.setattr(journal_module, "STEPS_PER_SNAPSHOT", 20)
    journal = Journal(None, 64)
    play(journal, 200)
    history = journal.history()
    assert 40 <= len(history) <= 50
    found = replay(history)
    assert found.same and found.steps >= 40 - 20 and found.steps + found.skipped == len(history)
    assert found.first is not None and found.first[1] % 20 == 1


def test_idle_steps_are_not_recorded_but_what_they_changed_is() -> None:
    journal = Journal(None, 64)
    controller = make_controller()
    journal.begin(controller, start=1)
    journal.record(Tick(now=1.0), [])
    controller.epochs.last_plan = 2.0
    journal.record(Tick(now=2.0), [events.PlanEpoch(epoch=Epoch(1), offsets={}, rows_max=5)])
    journal.record(events.NothingNew(now=2.1, epoch=Epoch(1)), [])
    assert len(journal.history()) == 0
    journal.record(StopRequested(now=2.2), [])
    controller.epochs.idle_since = 2.3  # the first time that there is nothing new
    journal.record(events.NothingNew(now=2.3, epoch=Epoch(1)), [])
    journal.record(
        Tick(now=2.4), [events.PlanEpoch(epoch=Epoch(1), offsets={}, rows_max=5, even_if_empty=True)]
    )  # an epoch will begin
    controller.moves.by_slice[COUNT, 1] = None  # type: ignore[assignment]
    journal.record(Tick(now=3.0), [])
    journal.record(Tick(now=3.5), [])
    found = list(journal.history())
    assert [record.event.now for record in found] == [2.2, 2.3, 2.4, 3.0]
    assert [record.raw.get("set") for record in found] == [{"epochs.last_plan": 2.0}, None, None, None]


def test_an_idle_job_replays_and_takes_little_room() -> None:
    """Time passes in steps that are not on record; what depends on it must come out the same."""
    journal = Journal(None, 64)
    controller = make_controller()
    journal.begin(controller, start=1)
    waiting: deque[Event] = deque([Started(now=0.0)])
    for number in range(6_000):
        event = waiting.popleft() if waiting else Tick(now=number * 0.01)
        commands = controller.step(event)
        journal.record(event, commands)
        for command in commands:
            if isinstance(command, events.PlanEpoch) and not command.even_if_empty:
                waiting.append(events.NothingNew(now=number * 0.01, epoch=command.epoch))
            else:
                waiting.extend(answers([command], number * 0.01))
    history = journal.history()
    epochs = [c.epoch for r in history for c in r.commands if isinstance(c, LogEpoch)]
    assert len(epochs) == 2  # one every 20 s without input
    assert len(history) < 30
    assert replay(history).same
    for record in history:
        record.raw.pop("set", None)
    assert not replay(history).same, "the time that passed does not matter?"


def test_a_store_keeps_it_all(small: None) -> None:
    store = MemoryStore()
    for number in (1, 2):
        journal = in_store(store)
        play(journal, 60, start=number)
        journal.close()
    history = read_history(store)
    assert [(run.start, len(run.records)) for run in history.runs] == [(1, 60), (2, 60)]
    assert history.runs[0].facts["flow"] == "counting" and len(history.runs[0].states) > 5
    assert replay(history).steps == 120 and replay(history).same
    assert len(segments(store)) >= 120


def test_old_segments_go_and_the_replay_says_where_it_begins(small: None) -> None:
    store = MemoryStore()
    journal = in_store(store)
    assert journal._writer is not None
    journal._writer.limit_bytes = 12_000
    play(journal, 200)
    journal.close()
    assert sum(len(store.get(name)) for name in segments(store)) <= 12_000
    history = read_history(store)
    first = history.runs[0].records[0].step
    assert first > 1 and history.runs[0].records[-1].step == 200
    found = replay(history)
    assert found.same and found.steps > 4 and found.steps + found.skipped == len(history)
    assert found.first is not None and found.first[1] - first == found.skipped <= 5


def test_a_start_makes_room_among_the_segments_of_those_before(small: None) -> None:
    store = MemoryStore()
    play(in_store(store), 100)
    journal = in_store(store)
    assert journal._writer is not None
    journal._writer.limit_bytes = sum(len(v) for v in store.items.values())
    play(journal, 50, start=2)
    assert sum(len(v) for v in store.items.values()) <= journal._writer.limit_bytes
    assert [run.start for run in read_history(store).runs] == [1, 2]


def test_a_store_that_fails_drops_segments_with_a_count(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "UNWRITTEN_BYTES", 2_000)
    store = FailingStore(MemoryStore(), 1)
    journal = in_store(store)
    play(journal, 50)
    dropped = journal.lost
    journal.close()
    assert 30 < dropped < journal.lost, "the newest were still waiting to be written"
    assert journal.lost >= 50 and not segments(store)


def test_segments_wait_for_a_store_that_comes_back(small: None) -> None:
    inner = MemoryStore()

    class Away(FailingStore):
        def _fails(self) -> bool:
            self.writes += 1
            return 10 < self.writes < 40

    journal = in_store(Away(inner, 10**9))
    play(journal, 50)
    journal.close()
    assert journal.lost == 0
    assert replay(read_history(inner)).steps == 50


def test_a_gap_is_named_and_the_replay_goes_on_after_it(small: None) -> None:
    store = MemoryStore()
    journal = in_store(store)
    play(journal, 60)
    journal.close()
    names = segments(store)
    middle = names[30]
    store.items[middle] = store.items[middle][:40]
    odd = names[40]
    store.items[odd] = gzip.compress(b'{"journal": 99, "start": 1}\n')
    history = read_history(store)
    assert [text.split(":")[0] for text in history.damaged] == [middle, odd]
    assert "format 99" in history.damaged[1]
    found = replay(history)
    assert found.same and 0 < found.skipped <= 10 and found.steps + found.skipped == len(history)


def test_a_store_that_hangs_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 1)
    monkeypatch.setattr(journal_module, "PENDING_MAX", 20)
    monkeypatch.setattr(journal_module, "CLOSE_S", 0.01)
    released, entered = threading.Event(), threading.Event()

    class Hangs(MemoryStore):
        def put(self, name: str, data: bytes) -> None:
            entered.set()
            released.wait(60)
            super().put(name, data)

    journal = Journal(Hangs(), 64)
    controller = make_controller()
    journal.begin(controller, start=1)
    assert entered.wait(10)
    for number in range(100):
        journal.record(StopRequested(now=float(number)), [])
    journal.close()
    assert journal.lost == 80
    released.set()
    assert journal._writer is not None and journal._writer._thread is not None
    journal._writer._thread.join(10)
    assert not journal._writer._thread.is_alive()


def test_what_cannot_be_encoded_is_counted_and_harms_nobody(small: None) -> None:
    store = MemoryStore()
    journal = in_store(store)
    controller = make_controller()
    journal.begin(controller, start=1)
    failed = StageFailed(now=1.0, epoch=Epoch(1), stage=COUNT, attempt=Attempt(1), reason=threading.Lock())  # type: ignore[arg-type]
    for event in (failed, StopRequested(now=2.0)):
        controller.steps += 1
        journal.record(event, [])
    journal.close()
    assert journal.lost == 1
    assert [record.step for record in read_history(store)] == [2]


def test_zero_turns_it_off(tmp_path: Path) -> None:
    job = run_job(tmp_path / "ck", journal_mb=0)
    assert not (tmp_path / "ck" / "journal").exists() and len(job.journal()) == 0


# -- replaying -------------------------------------------------------------------------------------------------------


def test_another_decision_is_found_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(None, 64)
    play(journal, 40)
    history = journal.history()
    real = Controller.step

    def other(self: Controller, event: Event) -> list[Command]:
        commands = real(self, event)
        if isinstance(event, EpochPublished) and event.epoch == 3:
            commands.pop()
        return commands

    monkeypatch.setattr(Controller, "step", other)
    found = replay(history)
    assert found.difference is not None and not found.same
    assert isinstance(found.difference.record.event, EpochPublished) and found.difference.record.event.epoch == 3
    text = "\n".join(found.difference.lines())
    assert "EpochPublished" in text and "replayed: none" in text and ": the same" in text


def test_another_field_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(None, 64)
    play(journal, 40)
    history = journal.history()
    real = Controller.step

    def other(self: Controller, event: Event) -> list[Command]:
        return [
            msgspec.structs.replace(c, epoch=Epoch(99)) if isinstance(c, LogEpoch) else c for c in real(self, event)
        ]

    monkeypatch.setattr(Controller, "step", other)
    difference = replay(history).difference
    assert difference is not None and "  different in: epoch" in difference.lines()


def test_a_controller_that_breaks_is_on_record(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Controller, event: StopRequested) -> list[Command]:
        raise AssertionError("no")

    with monkeypatch.context() as patch:
        patch.setattr(Controller, "_on_stop", broken)
        released = threading.Event()
        sink = ps.foreach_batch(lambda epoch, frame: released.set())
        job = start(counting(sink), engine="local", config=ps.Config(epoch_rows=1, control=False))
        assert released.wait(20)
        with pytest.raises(ps.PenstockError, match="AssertionError: no"):
            job.stop()
        history = job.journal()
        last = history.runs[0].records[-1]
        assert (last.event.__class__, last.error) == (StopRequested, "AssertionError: no")
        assert replay(history).same  # it breaks again in the same way
    found = replay(history)  # and is mended now
    assert found.difference is not None and "recorded: AssertionError: no" in "\n".join(found.difference.lines())


def counting(sink: Any) -> ps.Flow:
    flow = ps.Flow("counting")
    flow.source("in", testing.rows(FRAME)).key_by("k").aggregate("count", n=ps.count()).sink("out", sink)
    return flow


def run_job(place: Path, **settings: Any) -> Job:
    given = {"epoch_rows": 5, "instances": 2, "slices": 4, "checkpoint_interval_s": 0.0, "control": False}
    job = start(counting(ps.memory()), engine="local", config=ps.Config(checkpoint=str(place), **given | settings))
    assert job.wait(60)
    return job


def test_a_real_job_is_on_record_and_replays(tmp_path: Path) -> None:
    run_job(tmp_path, epochs_max=8)
    job = run_job(tmp_path)
    assert job._runtime.journal.lost == 0
    history = job.journal()
    assert [run.start for run in history.runs] == [1, 2]
    published = [record.event.epoch for record in history if isinstance(record.event, EpochPublished)]
    assert published == list(range(1, 22))
    assert all(command.cause for record in history for command in record.commands)
    found = replay(history)
    assert found.same and found.steps == len(history) > 100 and found.skipped == 0


# -- the story -------------------------------------------------------------------------------------------------------

RANGES = {"in": SourceSpan(start={"row": 0}, end={"row": 1}, rows=1_000)}


def cut(epoch: int, attempt: int = 3000) -> tuple[Event, ...]:
    return (EpochPlanned(now=epoch * 1.0, epoch=Epoch(epoch), ranges=RANGES),)


def record(step: int, event: Any, *commands: Command) -> Record:
    return Record(3, step, 1_700_000_000_000 + int(event.now * 1000), step - 1, event, commands)


def logged(epoch: int) -> LogEpoch:
    record = EpochRecord(
        epoch=Epoch(epoch),
        attempt=Attempt(3000),
        ranges=RANGES,
        clock_ms=0,
        final=False,
        version=RoutingVersion(1),
    )
    return LogEpoch(epoch=Epoch(epoch), attempt=Attempt(3000), record=record)


def nodes(*names: str) -> tuple[NodeInfo, ...]:
    return tuple(NodeInfo(name) for name in names)


def incident_history() -> History:
    a0, a1 = Attempt(3000), Attempt(3001)
    restored = Manifest("job", "flow", {}, 117)
    steps: list[tuple[Any, ...]] = [
        (Started(now=0.0, restored=restored, logged=(), attempt=3000, nodes=nodes("1", "2", "3")),),
        *((EpochPublished(now=0.5 + e / 1000, epoch=Epoch(e), attempt=a0),) for e in (118,)),
        (ManifestWritten(now=0.6, epoch=Epoch(118), attempt=a0),),
        (EpochPlanned(now=0.7, epoch=Epoch(119), ranges=RANGES), logged(119)),
        (EpochPlanned(now=0.8, epoch=Epoch(120), ranges=RANGES), logged(120)),
        (EpochPublished(now=0.9, epoch=Epoch(119), attempt=a0),),
        (
            NodesChanged(now=1.0, nodes=nodes("1", "2"), reason="executor exited"),
            CancelAll(attempt=a1, reason="lost 3"),
            Tell(text="16 slices of 'count' go to containers 0, 1: 14 from backups, 2 from the durable checkpoint"),
        ),
        (StageFailed(now=1.1, epoch=Epoch(120), stage=COUNT, attempt=a0, reason="cancelled"),),
        (
            StageDone(
                now=1.3,
                epoch=Epoch(119),
                stage=COUNT,
                attempt=a1,
                reports=tuple(
                    TaskReport(stage="count", epoch=119, attempt=a1, index=i, rebuilt={"backup": 7, "durable": 1})
                    for i in range(2)
                ),
            ),
        ),
        (EpochPublished(now=1.4, epoch=Epoch(119), attempt=a1),),
        (EpochPublished(now=1.84, epoch=Epoch(120), attempt=a1),),
        (EpochPublished(now=2.0, epoch=Epoch(121), attempt=a1),),
        (EpochPublished(now=2.1, epoch=Epoch(122), attempt=a1),),
        (ManifestWritten(now=2.2, epoch=Epoch(122), attempt=a1),),
        (EpochPublished(now=2.3, epoch=Epoch(123), attempt=a1),),
        (StopRequested(now=3.0), events.Finish(reason="stopped")),
    ]
    run = Run(3, {"flow": "words"}, [record(n, *step) for n, step in enumerate(steps, 1)])
    return History([run])


def told(history: History) -> list[str]:
    return [("→ " if line.effect else "") + line.text for line in tell(history)]


def test_the_story_of_a_lost_node() -> None:
    lines = of_incident(tell(incident_history()))
    assert [("→ " if line.effect else "") + line.text for line in lines] == [
        "node 3 lost (executor exited)",
        "→ recovery 1: attempt 3001 from checkpoint 118",
        "→ epochs 119, 120 run again",
        "→ 16 slices of 'count' go to containers 0, 1: 14 from backups, 2 from the durable checkpoint",
        "slices of 'count' are up: 14 from backups, 2 from the durable checkpoint",
        "epoch 119 published again: it had been, nothing changes",
        "epoch 120 published 0.84 s after the loss",
    ]


def test_the_whole_story_sums_up_routine() -> None:
    lines = summed_up(tell(incident_history()))
    texts = [line.text for line in lines]
    assert texts[0] == "start 3 of 'words', from checkpoint 117"
    assert "epochs 121 to 123 published: 0 rows, the slowest in 0.00 s; 1 checkpoints, the last at epoch 122" in texts
    assert texts[-2:] == ["asked: stop", "the job is stopped"]
    assert len(lines) < len(tell(incident_history()))


def test_lines_are_aligned_and_effects_set_in() -> None:
    shown = list(as_text(tell(incident_history())))
    assert len(shown[0]) == len("2023-11-14")
    (at,) = [i for i, text in enumerate(shown) if "node 3 lost" in text]
    assert shown[at].split("  ")[0].count(":") == 2 and shown[at][12:14] == "  "
    assert shown[at + 1].startswith(" " * 15 + "→ recovery 1")


def test_epochs_and_what_happened_between() -> None:
    texts = [line.text for line in of_epochs(tell(incident_history()), 120, 121)]
    assert texts[0] == "epoch 120 published 0.84 s after the loss" and texts[-1].startswith("epoch 121 published")
    assert of_epochs(tell(incident_history()), 900, 901) == []


@pytest.mark.parametrize(
    ("event", "commands", "expected"),
    [
        (
            Stuck(now=1.0, stage=COUNT, epoch=Epoch(4), attempt=Attempt(3000), containers=(2,), seconds=31.04),
            (),
            ["container 2 of 'count' has made no progress for 31.0 s (epoch 4)"],
        ),
        (StoreChanged(now=1.0, away=True), (), ["the checkpoint store does not answer"]),
        (
            StageFailed(now=1.0, epoch=Epoch(4), stage=COUNT, attempt=Attempt(3000), reason="a\n  b"),
            (),
            ["'count' in epoch 4 failed: a b"],
        ),
        (
            StageDone(
                now=1.0,
                epoch=Epoch(4),
                stage=COUNT,
                attempt=Attempt(3000),
                reports=(TaskReport(stage="count", epoch=4, attempt=3000, index=1, missing=True),),
            ),
            (),
            ["container 1 of 'count' in epoch 4 had lost its state"],
        ),
        (
            Fatal(now=1.0, error=TaskError(kind="SinkError", message="no room")),
            (CancelAll(attempt=Attempt(3001)), Fail(error=TaskError(kind="SinkError", message="no room"))),
            ["error: no room", "→ the job fails: no room"],
        ),
        (
            events.MoveRequested(now=1.0, stage=COUNT, targets={1: 2, 2: 3, 3: 3}),
            (events.WarmUp(stage=COUNT, containers=(2, 3)),),
            ["asked: 3 slices of 'count' to containers 2, 3 (asked for)", "→ containers 2, 3 of 'count' are started"],
        ),
        (
            events.LeaveRequested(now=1.0, nodes=("a", "b")),
            (events.ReleaseNodes(nodes=("a",)),),
            ["asked: nodes a, b to leave", "→ node a is given back to Spark"],
        ),
        (
            events.Flushed(now=1.0, epoch=Epoch(4), attempt=Attempt(3000), reports=()),
            (CancelAll(attempt=Attempt(3001), reason="a delta was lost"),),
            ["a delta was lost", "→ recovery 1: attempt 3001 from the beginning"],
        ),
        (Unknown("Omen", {"now": 1.0, "of": "rain", "size": 3}), (), ["Omen: of rain, size 3"]),
        (Tick(now=1.0), (), []),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, Event) else None,
)
def test_words(event: Any, commands: tuple[Command, ...], expected: list[str]) -> None:
    made = Record(3, 1, 1_700_000_000_000, 0, event, commands)
    assert told(History([Run(3, {}, [made])])) == expected


def test_the_store_is_away_until_it_is_back() -> None:
    """An epoch that was logged before may still be published meanwhile: that does not end the incident."""
    steps = [
        StoreChanged(now=1.0, away=True),
        EpochPublished(now=1.5, epoch=Epoch(1), attempt=Attempt(3000)),
        StoreChanged(now=4.0, away=False),
        EpochPublished(now=4.25, epoch=Epoch(2), attempt=Attempt(3000)),
        EpochPublished(now=4.5, epoch=Epoch(3), attempt=Attempt(3000)),
        StageFailed(now=5.0, epoch=Epoch(4), stage=COUNT, attempt=Attempt(3000), reason="gone"),
    ]
    lines = tell(History([Run(3, {}, [record(n, event) for n, event in enumerate(steps, 1)])]))
    assert [line.incident for line in lines] == [1, 1, 1, 1, None, 2]
    assert lines[3].text == "epoch 2 published 3.25 s after the store went away"
    assert [line.text for line in of_incident(lines)] == ["'count' in epoch 4 failed: gone"]
    assert len(of_incident(lines, 1)) == 4 and of_incident(lines, 7) == []


def test_numbers() -> None:
    assert numbers([3, 1, 2, 7, 9, 10]) == "1 to 3, 7, 9, 10"
    assert numbers([]) == ""


def test_a_story_that_begins_in_the_middle_knows_the_nodes() -> None:
    history = incident_history()
    run = history.runs[0]
    controller = make_controller()
    controller.step(Started(now=0.0, attempt=3000, nodes=nodes("1", "2", "3")))
    controller.checkpoints.committed, controller.epochs.published = Epoch(118), Epoch(119)
    run.states[6] = {name: to_json(value) for name, value in settled(vars(controller)).items()}
    run.records = run.records[3:]
    history.from_first_state()
    assert told(history)[0] == "node 3 lost (executor exited)"


# -- the command -----------------------------------------------------------------------------------------------------


def invoke(*args: Any) -> Any:
    return CliRunner().invoke(cli.app, ["journal", *map(str, args)])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("journal")
    run_job(where, epochs_max=8)
    run_job(where)
    return where


def test_the_command_tells_the_story(place: Path) -> None:
    done = invoke(place)
    assert done.exit_code == 0, done.output
    assert "start 1 of 'counting', from the beginning" in done.stdout
    assert "start 2 of 'counting', from checkpoint 8" in done.stdout
    assert "→ the job is complete" in done.stdout
    assert len(invoke(place, "--last", 2).stdout.splitlines()) == 3  # and the day
    assert "epoch 9 published: 5 rows" in invoke(place, "--epoch", "9..10").stdout
    assert invoke(place, "--since", "1h").stdout.count("start ") == 2
    assert re.search(r"RunStage: cause \d+, epoch 1,", invoke(place, "--all", "--last", 10_000).stdout)


def test_the_command_without_an_incident(place: Path) -> None:
    done = invoke(place, "--incident")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "There is no incident on record.\n")
    assert invoke(place, "--incident", 3).stderr == "There is no incident 3 on record.\n"


def test_the_command_as_json(place: Path) -> None:
    lines = [json.loads(line) for line in invoke(place, "--json", "--last", 3).stdout.splitlines()]
    assert len(lines) == 3 and lines[-1]["commands"][-1]["!"] == "Finish"
    assert [line["after"] for line in lines[1:]] == [line["n"] for line in lines[:-1]]


def test_the_command_replays(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = invoke(place, "--replay")
    assert done.exit_code == 0 and done.stdout.endswith(" steps, all the same.\n")
    assert json.loads(invoke(place, "--replay", "--json").stdout)["same"] is True
    monkeypatch.setattr(Epochs, "plan", lambda self, now: [])
    done = invoke(place, "--replay")
    assert done.exit_code == 1 and "Different at" in done.stdout and "replayed: none" in done.stdout


def test_the_command_follows(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_job(tmp_path, epochs_max=4)
    polls: list[float] = []

    def sleep(seconds: float) -> None:
        polls.append(seconds)
        if len(polls) == 1:
            run_job(tmp_path, epochs_max=4)
        if len(polls) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(cli.time, "sleep", sleep)
    done = invoke(tmp_path, "--follow")
    assert done.exit_code == 0
    after = done.stdout.split("start 2 of 'counting', from checkpoint 4")[1]
    assert "epoch 8 published" in after and "→ the job is complete" in after


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere"], "there is no such directory"),
        (["."], "no job has kept its state here"),
        (["PLACE", "--since", "soon"], "not a length of time"),
        (["PLACE", "--epoch", "9..3"], "not a range of epochs"),
        (["PLACE", "--epoch", "9", "--incident"], "exclude each other"),
        (["PLACE", "5"], "belongs to --incident"),
    ],
)
def test_the_command_refuses_in_words(
    args: list[str], message: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = invoke(*(str(place) if a == "PLACE" else a for a in args))
    assert done.exit_code == 2 and message in " ".join(done.stderr.split()) and done.stdout == ""


def test_the_command_without_a_journal(tmp_path: Path) -> None:
    run_job(tmp_path, journal_mb=0)
    done = invoke(tmp_path)
    assert done.exit_code == 2 and "no journal here yet" in " ".join(done.stderr.split())


def test_the_command_names_a_damaged_segment(tmp_path: Path) -> None:
    run_job(tmp_path, epochs_max=4)
    run_job(tmp_path)
    first = sorted((tmp_path / "journal").iterdir())[0]
    first.write_bytes(first.read_bytes()[:-20])
    done = invoke(tmp_path)
    assert done.exit_code == 0 and f"skipped journal/{first.name}" in done.stderr.replace("\n", "")
    assert "start 2" in done.stdout
