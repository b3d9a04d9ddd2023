"""What was read of each source, and which epochs the log holds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from penstock.control.concern import Concern
from penstock.control.records import EpochRecord, Offset, SourceSpan
from penstock.control.routing import RoutingTable
from penstock.ids import FIRST_PLAN, NO_EPOCH, Epoch, PlanVersion
from penstock.state.checkpoint import Manifest

if TYPE_CHECKING:
    from penstock.control.controller import Controller


class Inputs(Concern):
    def __init__(self, core: Controller) -> None:
        super().__init__(core)
        self.log: dict[Epoch, EpochRecord] = {}
        """Epochs after the last checkpoint: what a recovery runs again."""
        self.logged_through = NO_EPOCH
        """The last epoch whose record is durable."""
        self.offsets: dict[str, Offset | None] = {}
        """source -> where the next epoch goes on reading"""
        self.facts: dict[str, list[Any]] = {}
        """source -> what it must remember of all that was read, to read it again in the same way"""
        self.exhausted: set[str] = set()
        """Sources that can never give another row."""
        self.routing_logged = 0
        """Version of the routing table that the log has last."""
        self.plan = FIRST_PLAN
        """Version of the plan that new epochs run with."""

    def restore(self, manifest: Manifest) -> None:
        self.offsets = {s: v["offset"] for s, v in manifest.sources.items()}
        self.facts = {s: list(v["facts"]) for s, v in manifest.sources.items()}

    def restore_log(self, records: Collection[EpochRecord]) -> RoutingTable | None:
        """Take up the epochs that were logged after the checkpoint. The newest routing table among them."""
        newest: RoutingTable | None = None
        committed = self.core.checkpoints.committed
        for record in records:
            if record.epoch != committed + 1 + len(self.log):
                continue
            self.log[record.epoch] = record
            self.logged_through = record.epoch
            self.plan = record.plan
            newest = record.routing or newest
            self._remember(record.ranges)
            self.core.attempts.at_least(record.attempt + 1)
        return newest

    def begin(self, epoch: Epoch, ranges: Mapping[str, SourceSpan], clock_ms: int) -> EpochRecord:
        """The record of a new epoch, which has the routing table in force if that is new."""
        last = self.log[max(self.log)].clock_ms if self.log else self.core.watermarks.clock_ms
        table = self.core.routes.table
        record = EpochRecord(
            epoch=epoch,
            attempt=self.core.attempts.current,
            ranges=dict(ranges),
            clock_ms=max(clock_ms, last),
            final=self.core.epochs.final,
            version=table.version,
            routing=table if table.version != self.routing_logged else None,
            plan=self.plan,
        )
        self.routing_logged = table.version
        self.log[epoch] = record
        self._read(record)
        self._remember(ranges)
        return record

    def again(self, record: EpochRecord) -> None:
        """The epoch is to run again: sources go on behind it."""
        self._read(record)

    def logged(self, epoch: Epoch) -> None:
        self.logged_through = Epoch(max(self.logged_through, epoch))

    def progress(self, epoch: Epoch) -> dict[str, Offset | None]:
        """How far each source has been read at the end of an epoch: what state that stands there reflects."""
        offsets = dict(self.offsets)
        for later in sorted((e for e in self.log if e > epoch), reverse=True):
            offsets |= {source: span.start for source, span in self.log[later].ranges.items()}
        return offsets

    def at(self, epoch: Epoch) -> dict[str, dict[str, Any]]:
        """For the checkpoint at this epoch: source -> offset and facts."""
        facts = {s: list(f) for s, f in self.facts.items()}
        for later in sorted((e for e in self.log if e > epoch), reverse=True):
            for source, span in self.log[later].ranges.items():
                if span.facts:
                    del facts[source][-len(span.facts) :]
        return {s: {"offset": o, "facts": facts.get(s, [])} for s, o in self.progress(epoch).items()}

    def committed(self, epoch: Epoch) -> dict[str, Offset]:
        """A checkpoint covers the log up to this epoch. source -> offset up to which nothing is read again"""
        covered = [self.log[e] for e in sorted(self.log) if e <= epoch]
        self.log = {e: r for e, r in self.log.items() if e > epoch}
        return {source: span.end for record in covered for source, span in record.ranges.items()}

    def use_plan(self, version: PlanVersion) -> None:
        """New epochs run with this version of the plan."""
        assert version >= self.plan, f"plan {version} is older than {self.plan}"
        self.plan = version

    def _read(self, record: EpochRecord) -> None:
        self.offsets.update({source: span.end for source, span in record.ranges.items()})

    def _remember(self, ranges: Mapping[str, SourceSpan]) -> None:
        for source, span in ranges.items():
            self.facts.setdefault(source, []).extend(span.facts)

    def validate(self) -> None:
        committed = self.core.checkpoints.committed
        assert all(e > committed for e in self.log), "the log keeps epochs that a checkpoint covers"
        assert committed <= self.core.epochs.published or self.log, "a checkpoint covers an epoch that is not published"
