"""The controller, event by event: exactly these commands, no engine, no clock, no sleep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from benchmarks.baselines import StopAndCopy
from penstock.control.attempts import RECOVERIES_MAX
from penstock.control.controller import Controller
from penstock.control.events import (
    CancelAll,
    CollectGarbage,
    Command,
    Compact,
    Compacted,
    EpochLogged,
    EpochPlanned,
    EpochPublished,
    Event,
    Fail,
    Fatal,
    Finish,
    Flush,
    Flushed,
    LogEpoch,
    ManifestWritten,
    NothingNew,
    PlanEpoch,
    PublishEpoch,
    ReleaseEpoch,
    RescaleRequested,
    RunStage,
    StageDone,
    StageFailed,
    Started,
    StopRequested,
    Tell,
    Tick,
    WarmedUp,
    WarmUp,
    WriteManifest,
)
from penstock.control.pacing import Pacer
from penstock.control.records import (
    FOREVER,
    NEVER,
    EpochRecord,
    SealedDelta,
    SourceSpan,
    StageTime,
    TaskError,
    TaskReport,
)
from penstock.control.routing import RoutingTable
from penstock.control.settings import Settings
from penstock.control.topology import StageInfo, Topology
from penstock.errors import ConfigError
from penstock.ids import Attempt, Epoch, StageId
from penstock.state.checkpoint import DeltaFile, Manifest

IN, COUNT, WIN = StageId("in"), StageId("count"), StageId("win")
LATENESS, SIZE = 5, 10


class Driver:
    """Feeds a controller and checks its invariants after each step."""

    def __init__(
        self, *, instances: int = 2, chain: bool = False, make: type[Controller] = Controller, **settings: Any
    ) -> None:
        """``chain``: in -> count -> win, else in -> count and in -> win."""
        self.topology = Topology(
            (
                StageInfo(IN, True, False, False, 0, 0, ()),
                StageInfo(COUNT, False, True, False, 0, 0, (IN,)),
                StageInfo(WIN, False, True, True, LATENESS, SIZE, (COUNT,) if chain else (IN,)),
            )
        )
        settings.setdefault("checkpoint_interval_s", -1.0)
        routing = RoutingTable.initial(8, self.topology.keyed(), instances)
        pacer = Pacer.start(100, 1, 1_000, 500)
        self.controller = make(self.topology, routing, pacer, Settings(**settings), Manifest("job", "flow", {}, 0))
        self.now = 0.0

    def step(self, event: Event) -> list[Command]:
        commands = self.controller.step(event)
        self.controller.validate()
        assert all(c.cause == self.controller.steps for c in commands)
        return [msgspec.structs.replace(c, cause=0) for c in commands]

    def start(self, restored: Manifest | None = None, logged: tuple[EpochRecord, ...] = ()) -> list[Command]:
        return self.step(Started(now=self.now, restored=restored, logged=logged))

    def plan(self, epoch: int, *, facts: tuple[Any, ...] = ()) -> list[Command]:
        """The source has 100 more rows."""
        return self.step(
            EpochPlanned(
                now=self.now, epoch=Epoch(epoch), ranges={IN: span(epoch, facts)}, exhausted=(), clock_ms=1_000 + epoch
            )
        )

    def log(self, epoch: int, attempt: int = 1) -> list[Command]:
        return self.step(EpochLogged(now=self.now, epoch=Epoch(epoch), attempt=Attempt(attempt)))

    def done(self, epoch: int, stage: StageId, attempt: int = 1, **fields: Any) -> list[Command]:
        """A stage ends. ``sealed``: its containers have written their deltas for this epoch."""
        sealed = fields.pop("sealed", None)
        count = 1 if stage == IN else self.controller.routes.table.instances[stage]
        reports = []
        for i in range(count):
            deltas = [] if sealed is None else [delta(stage, sealed, attempt, i)]
            reports.append(TaskReport(stage=stage, epoch=epoch, attempt=attempt, index=i, deltas=deltas, **fields))
        return self.step(
            StageDone(now=self.now, epoch=Epoch(epoch), stage=stage, attempt=Attempt(attempt), reports=tuple(reports))
        )

    def failed(self, epoch: int, stage: str, attempt: int = 1) -> list[Command]:
        return self.step(
            StageFailed(
                now=self.now, epoch=Epoch(epoch), stage=StageId(stage), attempt=Attempt(attempt), reason="executor lost"
            )
        )

    def published(self, epoch: int, attempt: int = 1) -> list[Command]:
        return self.step(EpochPublished(now=self.now, epoch=Epoch(epoch), attempt=Attempt(attempt)))

    def written(self, epoch: int, attempt: int = 1) -> list[Command]:
        return self.step(ManifestWritten(now=self.now, epoch=Epoch(epoch), attempt=Attempt(attempt)))

    def flushed(self, epoch: int, attempt: int = 1, missing: bool = False) -> list[Command]:
        reports = [
            TaskReport(
                stage=s,
                epoch=epoch,
                attempt=attempt,
                index=i,
                missing=missing,
                deltas=[] if missing else [delta(s, epoch, attempt, i)],
            )
            for s in (COUNT, WIN)
            for i in range(self.controller.routes.table.instances[s])
        ]
        return self.step(Flushed(now=self.now, epoch=Epoch(epoch), attempt=Attempt(attempt), reports=tuple(reports)))

    def whole_epoch(self, epoch: int, attempt: int = 1, **fields: Any) -> list[Command]:
        """From planned to published; what the last step gave."""
        self.plan(epoch)
        self.log(epoch, attempt)
        for stage in (IN, COUNT, WIN):
            self.done(epoch, stage, attempt, **fields)
        return self.published(epoch, attempt)


def span(epoch: int, facts: tuple[Any, ...] = ()) -> SourceSpan:
    return SourceSpan(start={"row": 100 * epoch - 100}, end={"row": 100 * epoch}, rows=100, facts=list(facts))


def delta(stage: str, epoch: int, attempt: int, index: int, slices: Sequence[int] | None = None) -> SealedDelta:
    file = DeltaFile(
        name=f"state/{stage}/{epoch:012d}-{attempt:04d}-{index:04d}.delta",
        stage=stage,
        kind="delta",
        epoch_from=0,
        epoch_to=epoch,
        slices=tuple([index] if slices is None else slices),
        rows=1,
        bytes=10,
        checksum="c",
    )
    return SealedDelta(epoch=epoch, attempt=attempt, file=file)


def brief(commands: list[Command]) -> list[Any]:
    """Names and what matters of each, so that a test reads as a list."""
    out: list[Any] = []
    for c in commands:
        match c:
            case RunStage():
                out.append(("run", c.stage, c.epoch))
            case (
                PlanEpoch()
                | LogEpoch()
                | PublishEpoch()
                | Flush()
                | WriteManifest()
                | ReleaseEpoch()
                | CollectGarbage()
            ):
                out.append((type(c).__name__, c.epoch))
            case CancelAll():
                out.append(("CancelAll", c.attempt))
            case Finish():
                out.append(("Finish", c.reason))
            case _:
                out.append(type(c).__name__)
    return out


def one(commands: list[Command], kind: type[Command]) -> Any:
    found = [c for c in commands if isinstance(c, kind)]
    assert len(found) == 1, commands
    return found[0]


# -- an epoch's life -------------------------------------------------------------------------------------------------


def test_nothing_happens_before_the_engine_is_up() -> None:
    d = Driver()
    assert d.step(Tick(now=1.0)) == []
    assert d.controller.phase == "starting"


def test_one_epoch_from_plan_to_published() -> None:
    d = Driver(epochs_in_flight=1)
    assert d.start() == [PlanEpoch(epoch=Epoch(1), offsets={}, rows_max=100, even_if_empty=False)]
    planned = d.plan(1)
    record = one(planned, LogEpoch).record
    assert brief(planned) == [("LogEpoch", 1)]
    assert record.ranges == {IN: span(1)}
    assert (record.epoch, record.attempt, record.final, record.clock_ms) == (1, 1, False, 1_001)
    assert record.routing == d.controller.routes.table, "the first epoch says which routing holds"
    run = one(d.log(1), RunStage)
    assert run == RunStage(
        epoch=Epoch(1),
        stage=IN,
        attempt=Attempt(1),
        checkpoint=Epoch(0),
        routing=d.controller.routes.table,
        span=span(1),
        time=StageTime(before=NEVER, watermark=NEVER),
        clock_ms=1_001,
        containers=(0, 1),
        cause=0,
    )
    assert brief(d.done(1, IN)) == [("run", COUNT, 1), ("run", WIN, 1)]
    assert d.done(1, COUNT) == []
    assert brief(d.done(1, WIN)) == [("PublishEpoch", 1)]
    assert brief(d.published(1)) == [("ReleaseEpoch", 1), ("PlanEpoch", 2)]
    assert d.controller.epochs.published == 1


def test_every_command_names_its_cause() -> None:
    d = Driver()
    d.start()
    before = d.controller.steps
    event = EpochPlanned(now=0.0, epoch=Epoch(1), ranges={IN: span(1)}, clock_ms=1_001)
    assert [c.cause for c in d.controller.step(event)] == [before + 1] * 2


def test_nothing_runs_before_it_is_logged() -> None:
    d = Driver(epochs_in_flight=2)
    d.start()
    assert brief(d.plan(1)) == [("LogEpoch", 1), ("PlanEpoch", 2)]
    assert brief(d.plan(2)) == [("LogEpoch", 2)]
    assert d.log(2) == [], "epoch 2 is logged, but epoch 1 is not"
    assert brief(d.log(1)) == [("run", IN, 1)]


def test_stages_of_two_epochs_overlap() -> None:
    """Stage k of epoch e waits for stage k-1 of e and stage k of e-1, and for nothing else."""
    d = Driver(epochs_in_flight=2, chain=True)
    d.start()
    d.plan(1)
    d.log(1)
    d.plan(2)
    assert d.log(2) == [], "the source is still busy with epoch 1"
    assert brief(d.done(1, IN)) == [("run", COUNT, 1), ("run", IN, 2)]
    assert d.done(2, IN) == [], "count is still busy with epoch 1"
    assert brief(d.done(1, COUNT)) == [("run", WIN, 1), ("run", COUNT, 2)]
    assert d.done(2, COUNT) == []
    assert brief(d.done(1, WIN)) == [("PublishEpoch", 1), ("run", WIN, 2)][::-1]
    assert d.done(2, WIN) == [], "epoch 2 is ready, but it is published after epoch 1"
    assert brief(d.published(1)) == [("ReleaseEpoch", 1), ("PublishEpoch", 2), ("PlanEpoch", 3)]


def test_no_more_epochs_than_allowed_are_under_way() -> None:
    d = Driver(epochs_in_flight=3)
    d.start()
    planned = []
    for epoch in (1, 2, 3):
        planned += [c for c in d.plan(epoch) if isinstance(c, PlanEpoch)]
    assert [c.epoch for c in planned] == [2, 3]
    assert d.step(Tick(now=5.0)) == []


def test_offsets_are_those_of_the_last_planned_epoch() -> None:
    d = Driver(epochs_in_flight=2)
    d.start()
    assert one(d.plan(1), PlanEpoch).offsets == {IN: {"row": 100}}


# -- idle, end, stop -------------------------------------------------------------------------------------------------


def test_an_idle_source_is_asked_again_and_gets_an_empty_epoch_now_and_then() -> None:
    d = Driver(poll_s=1.0, idle_epoch_s=10.0)
    d.start()
    assert d.step(NothingNew(now=0.0, epoch=Epoch(1))) == []
    assert d.step(Tick(now=0.5)) == []
    assert one(d.step(Tick(now=1.0)), PlanEpoch) == PlanEpoch(
        epoch=Epoch(1), offsets={}, rows_max=100, even_if_empty=False, cause=0
    )
    d.step(NothingNew(now=1.0, epoch=Epoch(1)))
    assert one(d.step(Tick(now=10.0)), PlanEpoch).even_if_empty
    commands = d.step(EpochPlanned(now=10.0, epoch=Epoch(1), ranges={}, exhausted=(), clock_ms=1))
    assert brief(commands) == [("LogEpoch", 1), ("PlanEpoch", 2)]


def test_a_bounded_input_ends_with_an_epoch_that_closes_every_window() -> None:
    d = Driver(epochs_in_flight=1)
    d.start()
    d.whole_epoch(1)
    final = d.step(NothingNew(now=0.0, epoch=Epoch(2), exhausted=True))
    record = one(final, LogEpoch).record
    assert record.final and record.ranges == {}
    assert one(d.log(2), RunStage).span is None
    windows = next(c for c in d.done(2, IN) if isinstance(c, RunStage) and c.stage == WIN)
    assert windows.time.watermark == FOREVER
    d.done(2, COUNT)
    assert brief(d.done(2, WIN)) == [("PublishEpoch", 2)]
    assert brief(d.published(2)) == [("ReleaseEpoch", 2), ("Flush", 2)]
    assert brief(d.flushed(2)) == [("WriteManifest", 2)]
    assert brief(d.written(2)) == [("CollectGarbage", 2), ("Finish", "complete")]
    assert d.controller.phase == "stopped"
    assert d.step(Tick(now=9.0)) == []


def test_stop_finishes_what_is_under_way_takes_a_checkpoint_and_ends() -> None:
    d = Driver(epochs_in_flight=2)
    d.start()
    d.plan(1)
    assert d.step(StopRequested(now=0.0)) == []
    assert brief(d.plan(2)) == [("LogEpoch", 2)], "an epoch that was being planned is still run"
    assert brief(d.log(1)) == [("run", IN, 1)]
    d.log(2)
    for epoch in (1, 2):
        for stage in (IN, COUNT, WIN):
            d.done(epoch, stage)
    assert brief(d.published(1)) == [("ReleaseEpoch", 1), ("PublishEpoch", 2)]
    assert brief(d.published(2)) == [("ReleaseEpoch", 2), ("Flush", 2)]
    d.flushed(2)
    assert brief(d.written(2)) == [("CollectGarbage", 2), ("Finish", "stopped")]


def test_stop_before_any_input() -> None:
    d = Driver()
    d.start()
    assert d.step(StopRequested(now=0.0)) == [], "a plan is under way"
    assert brief(d.step(NothingNew(now=0.0, epoch=Epoch(1)))) == [("Finish", "stopped")]


def test_so_many_epochs_and_no_more() -> None:
    d = Driver(epochs_in_flight=1, epochs_max=1)
    d.start()
    assert brief(d.whole_epoch(1)) == [("ReleaseEpoch", 1), ("Flush", 1)]
    d.flushed(1)
    assert brief(d.written(1)) == [("CollectGarbage", 1), ("Finish", "complete")]


# -- checkpoints -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_with_deltas_that_arrive_an_epoch_later() -> None:
    """Containers write in the background: the epoch after the sealed one brings the news, and nothing waits for it."""
    d = Driver(epochs_in_flight=2, checkpoint_interval_s=5.0)
    d.start()
    d.now = 5.0
    d.plan(1)
    assert not one(d.log(1), RunStage).seal, "a source has no state"
    d.plan(2)
    sealing = [c for c in d.done(1, IN) if isinstance(c, RunStage)]
    assert [c.seal for c in sealing] == [True, True]
    assert [c.progress for c in sealing] == [{IN: {"row": 100}}] * 2, "where epoch 1 ends, though 2 has been planned"
    d.done(1, COUNT)
    d.done(1, WIN)
    assert brief(d.published(1)) == [("ReleaseEpoch", 1), ("PlanEpoch", 3)], "no waiting for deltas"
    d.log(2)
    runs = [c for c in d.done(2, IN) if isinstance(c, RunStage)]
    assert [(c.seal, c.checkpoint) for c in runs] == [(False, 0)] * 2, "one checkpoint at a time"
    assert d.done(2, COUNT, sealed=1) == []
    commands = d.done(2, WIN, sealed=1)
    assert brief(commands) == [("PublishEpoch", 2), ("WriteManifest", 1)]
    manifest = one(commands, WriteManifest).manifest
    assert manifest.epoch == 1
    assert manifest.sources == {IN: {"offset": {"row": 100}, "facts": []}}, "where epoch 1 ended, not epoch 2"
    assert sorted(manifest.names()) == sorted(delta(s, 1, 1, i).file.name for s in (COUNT, WIN) for i in (0, 1))
    assert brief(d.written(1)) == [("CollectGarbage", 1)]
    assert d.controller.checkpoints.committed == 1
    assert list(d.controller.inputs.log) == [2]
    d.published(2)
    d.plan(3)
    assert one(d.log(3), RunStage).checkpoint == 1


def test_facts_of_later_epochs_stay_out_of_the_manifest() -> None:
    d = Driver(epochs_in_flight=2, checkpoint_interval_s=0.0)
    d.start()
    d.plan(1, facts=("a", "b"))
    d.log(1)
    d.plan(2, facts=("c",))
    d.done(1, IN)
    d.done(1, COUNT, sealed=1)
    d.done(1, WIN, sealed=1)
    manifest = one(d.published(1), WriteManifest).manifest
    assert manifest.sources == {IN: {"offset": {"row": 100}, "facts": ["a", "b"]}}


def test_a_checkpoint_is_flushed_when_no_input_comes() -> None:
    d = Driver(epochs_in_flight=2, checkpoint_interval_s=0.0)
    d.start()
    d.whole_epoch(1)
    commands = d.step(NothingNew(now=0.0, epoch=Epoch(2)))
    everybody = {COUNT: (0, 1), WIN: (0, 1)}
    progress = {IN: {"row": 100}}
    assert one(commands, Flush) == Flush(
        epoch=Epoch(1),
        attempt=Attempt(1),
        checkpoint=Epoch(0),
        routing=d.controller.routes.table,
        containers=everybody,
        progress=progress,
        cause=0,
    )
    assert d.step(Tick(now=0.001)) == [], "once"
    commands = d.flushed(1)
    assert brief([c for c in commands if not isinstance(c, PlanEpoch)]) == [("WriteManifest", 1)]


def test_garbage_says_what_sources_need_not_keep() -> None:
    d = Driver(epochs_in_flight=1, checkpoint_interval_s=0.0)
    d.start()
    d.whole_epoch(1, sealed=1)
    assert one(d.written(1), CollectGarbage).ends == {IN: {"row": 100}}


def test_long_chains_of_deltas_are_merged_and_the_result_is_in_the_next_manifest() -> None:
    d = Driver(epochs_in_flight=1, checkpoint_interval_s=0.0, deltas_max=2)
    d.start()
    compact: list[Compact] = []
    epoch = 0
    while not compact:
        epoch += 1
        d.whole_epoch(epoch, sealed=epoch)
        compact = [c for c in d.written(epoch) if isinstance(c, Compact)]
    task = compact[0].task
    again = [c for c in d.step(Tick(now=0.0)) if isinstance(c, Compact)]
    assert again == [], "one at a time for each stage"
    merged = DeltaFile("merged", task.stage, task.kind, 0, task.epoch_to, task.slices, 1, 1, "c")
    assert d.step(Compacted(now=0.0, stage=compact[0].stage, task=task, output=None, failed="no room")) == []
    assert d.step(Compacted(now=0.0, stage=compact[0].stage, task=task, output=merged)) == []
    epoch += 1
    d.plan(epoch)
    d.log(epoch)
    d.done(epoch, IN)
    d.done(epoch, COUNT, sealed=epoch)
    d.done(epoch, WIN, sealed=epoch)
    manifest = one(d.published(epoch), WriteManifest).manifest
    assert "merged" in manifest.names()
    assert not {f.name for f in task.inputs} & manifest.names()


# -- time ------------------------------------------------------------------------------------------------------------


def test_watermarks_follow_the_greatest_time_before_each_split() -> None:
    d = Driver(epochs_in_flight=1)
    d.start()

    def windows(epoch: int, *times: int | None) -> RunStage:
        d.plan(epoch)
        d.log(epoch)
        reports = tuple(
            TaskReport(stage=IN, epoch=epoch, attempt=1, index=i, time_max={} if t is None else {WIN: t})
            for i, t in enumerate(times)
        )
        commands = d.step(StageDone(now=0.0, epoch=Epoch(epoch), stage=IN, attempt=Attempt(1), reports=reports))
        d.done(epoch, COUNT)
        d.done(epoch, WIN)
        d.published(epoch)
        return next(c for c in commands if isinstance(c, RunStage) and c.stage == WIN)

    first = windows(1, 100, 50, None, 120)
    assert (first.time.before, first.time.watermark) == (NEVER, 115)
    assert first.time.arrivals == {IN: [NEVER, 95, 95, 95]}
    second = windows(2, 90)
    assert (second.time.before, second.time.watermark) == (115, 115), "time does not go back"
    assert second.time.arrivals == {IN: [115]}


def test_a_window_behind_a_keyed_stage_follows_what_that_sent() -> None:
    d = Driver(epochs_in_flight=1, chain=True)
    d.start()
    d.plan(1)
    d.log(1)
    d.done(1, IN)
    run = one(d.done(1, COUNT, time_max={WIN: 50}), RunStage)
    assert (run.time.watermark, run.time.arrivals) == (45, {COUNT: [NEVER, 45]})


# -- rescaling -------------------------------------------------------------------------------------------------------


def test_a_rescale_that_stops_everything_waits_for_a_checkpoint_and_takes_effect_with_the_next_epoch() -> None:
    d = Driver(epochs_in_flight=2, instances=2, make=StopAndCopy)
    d.start()
    d.plan(1)
    d.log(1)
    homes = {2: "local", 3: "local"}
    assert d.step(RescaleRequested(now=0.0, stage=COUNT, instances=4)) == [
        WarmUp(stage=COUNT, containers=(2, 3), homes=homes)
    ]
    assert not d.controller.ending, "epochs go on while processes start"
    assert d.step(WarmedUp(now=0.0, stage=COUNT, containers=(2, 3))) == []
    assert brief(d.plan(2)) == [("LogEpoch", 2)], "no further epoch is planned under the old routing"
    d.log(2)
    for epoch in (1, 2):
        for stage in (IN, COUNT, WIN):
            d.done(epoch, stage)
    d.published(1)
    assert brief(d.published(2)) == [("ReleaseEpoch", 2), ("Flush", 2)]
    assert brief(d.flushed(2)) == [("WriteManifest", 2)]
    assert brief(d.written(2)) == [("CollectGarbage", 2), ("PlanEpoch", 3)]
    assert d.controller.routes.table.instances[COUNT] == 4
    version = d.controller.routes.table.version
    assert version > 1
    record = one(d.plan(3), LogEpoch).record
    assert record.version == version and record.routing == d.controller.routes.table
    assert one(d.log(3), RunStage).routing.version == version
    assert one(d.plan(4), LogEpoch).record.routing is None, "said once"


def test_a_rescale_before_any_input_needs_no_checkpoint() -> None:
    d = Driver(make=StopAndCopy)
    d.start()
    d.step(RescaleRequested(now=0.0, stage=COUNT, instances=5))
    d.step(WarmedUp(now=0.0, stage=COUNT, containers=(2, 3, 4)))
    assert brief(d.step(NothingNew(now=0.0, epoch=Epoch(1)))) == []
    assert d.controller.routes.table.instances[COUNT] == 5
    assert brief(d.step(Tick(now=1.0))) == [("PlanEpoch", 1)]


@pytest.mark.parametrize(("stage", "instances"), [("count", 0), ("count", 9), ("nowhere", 2)])
def test_a_rescale_that_cannot_be_changes_nothing(stage: str, instances: int) -> None:
    d = Driver()
    d.start()
    (told,) = d.step(RescaleRequested(now=0.0, stage=StageId(stage), instances=instances))
    assert isinstance(told, Tell) and ("cannot have" in told.text or "there is no stage" in told.text)
    assert d.controller.resizes.wanted == {}
    with pytest.raises(ConfigError):  # this is what tells whoever asks
        d.controller.routes.table.rescale(StageId(stage), instances)


# -- failure and recovery --------------------------------------------------------------------------------------------


def test_after_a_failure_everything_since_the_checkpoint_runs_again() -> None:
    d = Driver(epochs_in_flight=2, checkpoint_interval_s=0.0)
    d.start()
    d.whole_epoch(1, sealed=1)
    d.written(1)
    d.plan(2)
    d.log(2)
    d.plan(3)
    d.log(3)
    d.done(2, IN)  # now count and win of 2 run, and in of 3
    assert d.failed(2, COUNT) == [CancelAll(attempt=Attempt(2), reason="executor lost")]
    assert d.controller.phase == "recovering"
    assert d.step(Tick(now=1.0)) == [], "old work must be gone first"
    assert d.failed(2, WIN) == []
    again = d.done(3, IN)
    assert brief(again) == [("run", IN, 2)], "the last of the old work is gone"
    run = one(again, RunStage)
    assert (run.attempt, run.checkpoint, run.span) == (2, 1, span(2))
    assert d.controller.phase == "running"
    assert d.controller.attempts.recoveries == 1
    assert brief(d.done(2, IN, attempt=2)) == [("run", COUNT, 2), ("run", WIN, 2), ("run", IN, 3)]


def test_recovery_before_any_checkpoint_starts_from_nothing() -> None:
    d = Driver(epochs_in_flight=1)
    d.start()
    d.whole_epoch(1)
    d.plan(2)
    d.log(2)
    again = d.failed(2, IN)
    assert brief(again) == [("CancelAll", 2), ("run", IN, 1)]
    assert one(again, RunStage).checkpoint == 0


def test_what_was_published_is_run_again_and_not_published_again() -> None:
    """It runs for the state it leaves; the sinks have its output."""
    d = Driver(epochs_in_flight=1)
    d.start()
    d.whole_epoch(1)
    d.plan(2)
    d.log(2)
    assert one(d.failed(2, IN), RunStage).quiet
    d.done(1, IN, attempt=2)
    d.done(1, COUNT, attempt=2)
    again = d.done(1, WIN, attempt=2)
    assert brief(again) == [("ReleaseEpoch", 1), ("run", IN, 2)]
    assert not one(again, RunStage).quiet, "nobody has seen epoch 2"
    assert d.controller.epochs.published == 1


def test_lost_state_is_a_failure() -> None:
    d = Driver(epochs_in_flight=1)
    d.start()
    d.plan(1)
    d.log(1)
    d.done(1, IN)
    assert brief(d.done(1, COUNT, missing=True)) == [("CancelAll", 2)]
    assert brief(d.done(1, WIN)) == [("run", IN, 1)]


def test_events_of_an_older_attempt_change_nothing() -> None:
    d = Driver(epochs_in_flight=1, checkpoint_interval_s=0.0)
    d.start()
    d.plan(1)
    d.log(1)
    d.done(1, IN)
    d.failed(1, COUNT)
    d.failed(1, WIN)
    assert d.controller.attempts.current == 2
    for event in (
        StageDone(
            now=0.0,
            epoch=Epoch(1),
            stage=IN,
            attempt=Attempt(1),
            reports=(TaskReport(stage=IN, epoch=1, attempt=1, index=0),),
        ),
        StageDone(
            now=0.0,
            epoch=Epoch(1),
            stage=IN,
            attempt=Attempt(1),
            reports=(TaskReport(stage=IN, epoch=1, attempt=1, index=0, error=TaskError(kind="X", message="stale")),),
        ),
        StageFailed(now=0.0, epoch=Epoch(1), stage=IN, attempt=Attempt(1), reason="stale"),
        EpochPublished(now=0.0, epoch=Epoch(1), attempt=Attempt(1)),
        Flushed(now=0.0, epoch=Epoch(1), attempt=Attempt(1), reports=()),
        ManifestWritten(now=0.0, epoch=Epoch(1), attempt=Attempt(1)),
    ):
        assert d.step(event) == [], event
    assert d.controller.attempts.recoveries == 1
    assert d.controller.epochs.in_flight[Epoch(1)].running == {IN}


def test_a_delta_that_cannot_be_had_any_more_is_a_failure() -> None:
    d = Driver(epochs_in_flight=1)
    d.start()
    d.whole_epoch(1)
    d.step(StopRequested(now=0.0))
    d.step(NothingNew(now=0.0, epoch=Epoch(2)))
    assert brief(d.flushed(1, missing=True)) == [("CancelAll", 2), ("run", IN, 1)]
    assert d.controller.stopping, "it still ends once that is mended"


def test_a_checkpoint_that_was_being_written_when_work_failed_counts() -> None:
    """It is in the store: garbage is collected by it, and a restart would begin from it."""
    d = Driver(epochs_in_flight=2, checkpoint_interval_s=0.0)
    d.start()
    d.plan(1)
    d.log(1)
    d.plan(2)
    d.log(2)
    d.done(1, IN)
    d.done(1, COUNT, sealed=1)
    d.done(1, WIN, sealed=1)
    assert brief(d.published(1)) == [("ReleaseEpoch", 1), ("WriteManifest", 1), ("PlanEpoch", 3)]
    d.failed(2, IN)
    assert d.controller.phase == "recovering"
    again = d.written(1)
    assert brief(again) == [("CollectGarbage", 1), ("run", IN, 2)], "after it, not from the beginning"
    assert one(again, RunStage).checkpoint == 1
    assert d.controller.checkpoints.committed == 1 and list(d.controller.inputs.log) == [2]
    assert d.written(1) == [], "once"


def test_an_epoch_whose_log_entry_was_under_way_is_not_run_before_it_is_there() -> None:
    d = Driver(epochs_in_flight=2)
    d.start()
    d.plan(1)
    d.log(1)
    d.plan(2)
    d.failed(1, IN)
    d.done(1, IN, attempt=2)
    assert not d.controller.epochs.in_flight[Epoch(2)].logged
    assert brief(d.log(2, attempt=1)) == [("run", IN, 2)], "a record is the same whichever attempt wrote it"


def test_a_rescale_survives_a_failure_right_after_it() -> None:
    d = Driver(epochs_in_flight=1, make=StopAndCopy)
    d.start()
    d.step(RescaleRequested(now=0.0, stage=COUNT, instances=4))
    d.step(WarmedUp(now=0.0, stage=COUNT, containers=(2, 3)))
    d.step(NothingNew(now=0.0, epoch=Epoch(1)))
    d.step(Tick(now=1.0))
    d.plan(1)
    d.log(1)
    d.failed(1, IN)
    assert d.controller.routes.table.instances[COUNT] == 4


def test_a_users_error_ends_the_job() -> None:
    d = Driver(epochs_in_flight=1)
    d.start()
    d.plan(1)
    d.log(1)
    error = TaskError(kind="UserCodeError", message="boom")
    commands = d.done(1, IN, error=error)
    assert commands == [CancelAll(attempt=Attempt(2)), Fail(error=error)]
    assert d.controller.phase == "failed"
    assert d.step(Tick(now=1.0)) == []


def test_an_error_in_the_runtime_ends_the_job() -> None:
    d = Driver()
    d.start()
    error = TaskError(kind="StorageFull", message="no room")
    assert one(d.step(Fatal(now=0.0, error=error)), Fail).error == error


def test_an_error_while_flushing_ends_the_job() -> None:
    d = Driver(epochs_in_flight=1)
    d.start()
    d.whole_epoch(1)
    d.step(StopRequested(now=0.0))
    d.step(NothingNew(now=0.0, epoch=Epoch(2)))
    report = TaskReport(
        stage=COUNT, epoch=1, attempt=1, index=0, error=TaskError(kind="StorageFull", message="no room")
    )
    assert (
        one(d.step(Flushed(now=0.0, epoch=Epoch(1), attempt=Attempt(1), reports=(report,))), Fail).error.kind
        == "StorageFull"
    )


def test_recoveries_without_progress_come_to_an_end() -> None:
    d = Driver(epochs_in_flight=1)
    d.start()
    d.plan(1)
    d.log(1)
    for attempt in range(1, RECOVERIES_MAX + 1):
        assert brief(d.failed(1, IN, attempt)) == [("CancelAll", attempt + 1), ("run", IN, 1)]
    error = one(d.failed(1, IN, RECOVERIES_MAX + 1), Fail).error
    assert error.kind == "EngineError"
    assert "executor lost" in error.message


def test_progress_gives_new_credit() -> None:
    d = Driver(epochs_in_flight=1)
    d.start()
    attempt = 1
    for epoch in range(1, 2 * RECOVERIES_MAX):
        d.plan(epoch)
        d.log(epoch, attempt)
        d.failed(epoch, IN, attempt)
        attempt += 1
        for again in range(1, epoch + 1):
            for stage in (IN, COUNT, WIN):
                d.done(again, stage, attempt)
            d.published(again, attempt)
    assert d.controller.phase == "running"
    assert d.controller.epochs.published == 2 * RECOVERIES_MAX - 1


def test_publishing_the_same_epochs_again_is_no_progress() -> None:
    """A checkpoint that fails each time must end the job, though the epochs before it go through each time."""
    d = Driver(epochs_in_flight=1)
    d.start()
    d.whole_epoch(1)
    d.step(StopRequested(now=0.0))
    d.step(NothingNew(now=0.0, epoch=Epoch(2)))
    for attempt in range(1, RECOVERIES_MAX + 1):
        d.flushed(1, attempt, missing=True)
        for stage in (IN, COUNT):
            d.done(1, stage, attempt + 1)
        assert brief(d.done(1, WIN, attempt + 1)) == [("ReleaseEpoch", 1), ("Flush", 1)]
    assert one(d.flushed(1, RECOVERIES_MAX + 1, missing=True), Fail).error.kind == "EngineError"


# -- restart ---------------------------------------------------------------------------------------------------------


def stopped_at(epoch: int, **settings: Any) -> tuple[Driver, Manifest]:
    d = Driver(epochs_in_flight=1, checkpoint_interval_s=0.0, **settings)
    d.start()
    for e in range(1, epoch + 1):
        d.whole_epoch(e, sealed=e, time_max={WIN: 100 * e})
        d.written(e)
    return d, d.controller.checkpoints.manifest


def test_a_restart_goes_on_after_the_checkpoint_with_a_new_attempt() -> None:
    before, manifest = stopped_at(2)
    assert manifest.epoch == 2
    d = Driver(epochs_in_flight=1)
    plan = one(d.start(manifest), PlanEpoch)
    assert (plan.epoch, plan.offsets) == (3, {IN: {"row": 200}})
    assert d.controller.attempts.current == before.controller.attempts.current + 1
    assert d.controller.epochs.published == d.controller.checkpoints.committed == 2
    d.plan(3)
    assert one(d.log(3, 2), RunStage).checkpoint == 2


def test_a_restart_keeps_time() -> None:
    _, manifest = stopped_at(2)
    d = Driver(epochs_in_flight=1)
    d.start(manifest)
    d.plan(3)
    d.log(3, 2)
    run = next(c for c in d.done(3, IN, 2, time_max={WIN: 1}) if isinstance(c, RunStage) and c.stage == WIN)
    assert (run.time.before, run.time.watermark) == (195, 195)
    assert run.time.arrivals == {IN: [195]}


def test_a_restart_runs_the_logged_epochs_first() -> None:
    before, manifest = stopped_at(1)
    records = []
    before.controller.settings = Settings(epochs_in_flight=3, checkpoint_interval_s=-1)
    for epoch in (2, 3):
        records.append(one(before.plan(epoch), LogEpoch).record)
    d = Driver(epochs_in_flight=2)
    commands = d.start(manifest, tuple(records))
    assert brief(commands) == [("run", IN, 2)]
    run = one(commands, RunStage)
    assert (run.attempt, run.span, run.clock_ms) == (2, span(2), 1_002)
    for stage in (IN, COUNT, WIN):
        d.done(2, stage, 2)
    plan = one(d.published(2, 2), PlanEpoch)
    assert (plan.epoch, plan.offsets) == (4, {IN: {"row": 300}})


def test_a_restart_after_the_end_ends_at_once() -> None:
    d = Driver(epochs_in_flight=1)
    d.start()
    d.whole_epoch(1)
    d.step(NothingNew(now=0.0, epoch=Epoch(2), exhausted=True))
    d.log(2)
    for stage in (IN, COUNT, WIN):
        d.done(2, stage)
    d.published(2)
    d.flushed(2)
    d.written(2)
    again = Driver()
    assert brief(again.start(d.controller.checkpoints.manifest)) == [("Finish", "complete")]


def test_log_entries_with_a_gap_are_not_run() -> None:
    """Entry 3 without entry 2 was never run: an epoch is logged after the one before it."""
    before, manifest = stopped_at(1)
    before.controller.settings = Settings(epochs_in_flight=3, checkpoint_interval_s=-1)
    before.plan(2)
    third = one(before.plan(3), LogEpoch).record
    d = Driver()
    assert brief(d.start(manifest, (third,))) == [("PlanEpoch", 2)]


# -- several inputs, and the epoch clock -----------------------------------------------------------------------------

OTHER, JOIN = StageId("other"), StageId("join")


def driver_of(*stages: StageInfo) -> Driver:
    d = Driver(epochs_in_flight=1)
    d.topology = Topology(stages)
    d.controller = Controller(
        d.topology,
        RoutingTable.initial(8, d.topology.keyed(), 1),
        Pacer.start(100, 1, 1_000, 500),
        Settings(epochs_in_flight=1, checkpoint_interval_s=-1.0),
        Manifest("job", "flow", {}, 0),
    )
    d.start()
    return d


def test_a_join_has_a_watermark_for_each_input_and_goes_by_the_least() -> None:
    d = driver_of(
        StageInfo(IN, True, False, False, 0, 0, ()),
        StageInfo(OTHER, True, False, False, 0, 0, ()),
        StageInfo(JOIN, False, True, True, LATENESS, 0, (IN, OTHER), (0, 1)),
    )

    def joined(epoch: int, left: int, right: int) -> RunStage:
        d.plan(epoch)
        d.log(epoch)
        d.done(epoch, IN, time_max={JOIN: left})
        reports = tuple(
            TaskReport(stage=OTHER, epoch=epoch, attempt=1, index=i, time_max={"join#1": right + i}) for i in range(2)
        )
        commands = d.step(StageDone(now=0.0, epoch=Epoch(epoch), stage=OTHER, attempt=Attempt(1), reports=reports))
        d.done(epoch, JOIN)
        d.published(epoch)
        return one(commands, RunStage)

    first = joined(1, 100, 40)
    assert (first.time.before, first.time.watermark) == (NEVER, 36)
    assert first.time.ports == ((NEVER, 95), (NEVER, 36))
    assert first.time.arrivals == {"in": [NEVER], "other#1": [NEVER, 35]}
    second = joined(2, 90, 200)
    assert second.time.ports == ((95, 95), (36, 196)), "neither side goes back"
    assert (second.time.before, second.time.watermark) == (36, 95)


def test_two_branches_of_one_stage_may_be_the_two_inputs() -> None:
    d = driver_of(
        StageInfo(IN, True, False, False, 0, 0, ()),
        StageInfo(JOIN, False, True, True, 0, 0, (IN, IN), (0, 1)),
    )
    d.plan(1)
    d.log(1)
    run = one(d.done(1, IN, time_max={"join": 70, "join#1": 30}), RunStage)
    assert run.time.ports == ((NEVER, 70), (NEVER, 30))
    assert run.time.watermark == 30


def test_a_stage_by_the_clock_follows_the_log_and_the_clock_never_goes_back() -> None:
    d = driver_of(
        StageInfo(IN, True, False, False, 0, 0, ()),
        StageInfo(WIN, False, True, True, 0, SIZE, (IN,), clocked=True),
    )
    marks = []
    for epoch, clock_ms in ((1, 5_000), (2, 7_000), (3, 6_000)):
        d.step(EpochPlanned(now=0.0, epoch=Epoch(epoch), ranges={IN: span(epoch, ())}, exhausted=(), clock_ms=clock_ms))
        d.log(epoch)
        run = one(d.done(epoch, IN), RunStage)
        marks.append((run.time.before, run.time.watermark, run.clock_ms))
        d.done(epoch, WIN)
        d.published(epoch)
    assert marks == [(NEVER, 5_000_000, 5_000), (5_000_000, 7_000_000, 7_000), (7_000_000, 7_000_000, 7_000)]


@pytest.mark.parametrize(
    "name",
    [
        *("routes", "attempts", "fleet", "processes", "holders", "moves", "resizes", "balance"),
        *("inputs", "watermarks", "epochs", "checkpoints"),
    ],
)
def test_the_controller_validates_each_of_its_concerns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    controller = Driver().controller
    controller.validate()

    def broken() -> None:
        raise AssertionError(f"{name} is broken")

    monkeypatch.setattr(controller.concerns[name], "validate", broken)
    with pytest.raises(AssertionError, match=f"{name} is broken"):
        controller.validate()


def test_the_command_to_run_a_stage_carries_the_routing_of_its_epoch() -> None:
    driver = Driver()
    driver.start()
    driver.plan(1)
    run = one(driver.log(1), RunStage)
    assert run.routing == driver.controller.epochs.in_flight[Epoch(1)].routing == driver.controller.routes.table
