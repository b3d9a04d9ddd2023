"""What a task does, on a worker or in this process: the heart of both engines.

A task runs one stage of one epoch on one container (or one split of a source). It finds its slices in memory at the
version it needs, or loads them from the checkpoint; applies what arrived; runs the stage's steps; writes its parts of
the sinks; and returns one blob of rows for each container downstream and one control record for the driver.

State is a cache. Every table carries the epoch and the attempt it stands at; a mismatch means undo, reload, or an
honest "missing", never a wrong answer.

Containers of one stage also send to each other, from one epoch to the next: pieces of deltas for those who keep
backups, and, when a slice changes its owner, what changed in it since the checkpoint.
"""

from __future__ import annotations

import contextlib
import io
import os
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import polars as pl

from penstock.connectors.base import BadRecord
from penstock.connectors.rows import bad_records_frame
from penstock.control.load import LOAD_EPOCHS
from penstock.control.records import SealedDelta, TaskError, TaskOutput, TaskReport
from penstock.control.topology import at_port
from penstock.engines.hot import hottest_keys, rows_by_slice
from penstock.engines.keeper import Keeper
from penstock.errors import BadRecordError, CheckpointError, EngineError, PenstockError
from penstock.flow import Node
from penstock.frames import pick, rows_where, stacked, with_column, without
from penstock.ids import FIRST_PLAN, PlanVersion, StageId
from penstock.operators.base import (
    BY,
    DUE,
    FOREVER,
    HASH,
    NEVER,
    ORDER,
    PUNCTUATION,
    Applied,
    Arrival,
    Dead,
    StepContext,
    Tick,
    one_zero,
    tags,
    visible,
)
from penstock.operators.event_time import usable_times
from penstock.operators.order import (
    in_tag_order,
    marked,
    marks_of,
    numbered,
    of_origin,
    order_of,
    positions,
    signed,
    stacked_by_tags,
    tag_columns,
    widened,
    with_tags,
)
from penstock.operators.steps import BatchStep
from penstock.plan import Edge, Plan, Stage
from penstock.state.backup import Commit, cut
from penstock.state.checkpoint import DeltaFile, Kind, Manifest
from penstock.state.codec import checksum, decode, encode, read_slices, sort_by_slice
from penstock.state.hashing import hash_columns
from penstock.state.slicemap import SliceMap
from penstock.state.store import Store
from penstock.state.table import Fragment, KeyedTable, TableSpec

DEAD_LETTERS = "__dead_letters"
LOAD_REST_S = 1.0
"""Seconds for which the keeper reads nothing after slices began to come up: an epoch waits for them, and reading copies
would take this process's time. From the epoch of a handover on it reads nothing either: the next epoch needs the slices
at once."""
LOAD_ROWS = 2**16
"""Small files are loaded together, up to this many rows: each load has a fixed price of a millisecond or two."""
WAITING_ROWS_MAX = 2**22
"""The most rows that a table leaves waiting. Their frames stay in memory until the last of their rows is entered."""
WAKE_ROWS, WAKE_SHARE = 2**16, 32
"""Each epoch enters this many waiting rows, or this part of them (one 32nd) if that is more: a few hundredths of a
second."""
WAKE_BETWEEN = 2**13
"""Waiting rows that are entered in one go between two tasks. The next task may have to wait for it."""
FLUSH_WAIT_S = 1.0
"""Seconds that a flush waits for deltas to be written. A store that is away must not hold up the next epoch."""
DEAD_LETTERS_MAX = 10_000
"""Kept of each task and epoch when the flow has no sink for them; all are counted."""
MANIFEST_NAME = "manifests/{:012d}.json"
PEERS = "@peers"
"""Origin of what containers of one stage send to each other."""
PIECE, HANDOVER = 0, 1
MARKS = -1
"""Less the number of a port: in a blob, when time rose in the rows for that port."""


class TaskSpec(msgspec.Struct, kw_only=True):
    """Everything that makes a task repeatable."""

    stage: str
    epoch: int
    attempt: int
    index: int
    plan: PlanVersion = FIRST_PLAN
    """Version of the plan that the epoch runs with."""
    checkpoint: int
    seal: bool
    slicemaps: dict[str, SliceMap]
    """keyed stage -> the slices of its keys; this stage, and those downstream"""
    owners: dict[str, list[int]]
    """keyed stage -> owner of each slice; this stage, and those downstream"""
    instances: dict[str, int]
    split: dict[str, Any] | None = None
    watermark_before: int = 0
    watermark: int = 0
    arrivals: dict[str, list[int]] = {}
    clock_ms: int = 0
    on_error: str = "dead_letter"
    ports: tuple[tuple[int, int], ...] = ()
    copies: list[list[int]] = []
    """for each slice of its stage the containers that keep a copy; empty: nobody does"""
    commits: list[Commit] = []
    sends: bool = False
    """It sends to each of its peers."""
    handover: dict[int, int] = {}
    """slice -> container that owns it from the next epoch on"""
    quiet: bool = False
    """The sinks have this epoch already."""
    hot: tuple[int, ...] = ()
    """Slices whose hottest keys are wanted."""
    progress: dict[str, Any] = {}
    """source -> how far it has been read: what a delta sealed now reflects"""

    @property
    def slicemap(self) -> SliceMap:
        """The slices of this stage's keys."""
        return self.slicemaps[self.stage]


class BlobHeader(msgspec.Struct, array_like=True):
    origin: str
    index: int
    parts: list[tuple[int, int]]
    """(port, bytes)"""


_header_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(BlobHeader)


def pack_blob(origin: str, index: int, frames: Sequence[tuple[int, pl.DataFrame]]) -> bytes:
    """Rows for one container. Frames without rows cost nothing."""
    payloads = [(port, frame_bytes(frame)) for port, frame in frames if frame.height]
    header = _header_encoder.encode(BlobHeader(origin, index, [(p, len(b)) for p, b in payloads]))
    return b"".join([len(header).to_bytes(4, "little"), header, *(b for _, b in payloads)])


def unpack_blob(blob: bytes) -> tuple[BlobHeader, list[tuple[int, pl.DataFrame]]]:
    size = int.from_bytes(blob[:4], "little")
    header = _header_decoder.decode(blob[4 : 4 + size])
    at = 4 + size
    frames = []
    for port, length in header.parts:
        frames.append((port, bytes_frame(blob[at : at + length])))
        at += length
    return header, frames


def pack_for_peer(index: int, items: Sequence[tuple[int, bytes]]) -> bytes:
    """What one container sends to another of its stage: (kind, bytes)."""
    header = _header_encoder.encode(BlobHeader(PEERS, index, [(kind, len(b)) for kind, b in items]))
    return b"".join([len(header).to_bytes(4, "little"), header, *(b for _, b in items)])


def sorted_out(blobs: Sequence[bytes]) -> tuple[list[bytes], list[tuple[int, bytes]]]:
    """Blobs of rows, and what peers sent."""
    rows, items = [], []
    for blob in blobs:
        size = int.from_bytes(blob[:4], "little")
        header = _header_decoder.decode(blob[4 : 4 + size])
        if header.origin != PEERS:
            rows.append(blob)
            continue
        at = 4 + size
        for kind, length in header.parts:
            items.append((kind, blob[at : at + length]))
            at += length
    return rows, items


def frame_bytes(frame: pl.DataFrame) -> bytes:
    buffer = io.BytesIO()
    frame.write_ipc_stream(buffer, compat_level=pl.CompatLevel.newest())
    return buffer.getvalue()


def bytes_frame(data: bytes) -> pl.DataFrame:
    return pl.read_ipc_stream(io.BytesIO(data))


@dataclass(frozen=True)
class Written:
    """A delta that was written, and what backup holders get of it."""

    delta: SealedDelta
    pieces: dict[int, bytes] = field(default_factory=dict)
    """holder -> its piece"""

    @staticmethod
    def of(
        spec: TaskSpec, file: DeltaFile | None, touched: Iterable[int] = (), pieces: dict[int, bytes] | None = None
    ) -> Written:
        delta = SealedDelta(epoch=spec.epoch, attempt=spec.attempt, file=file, touched=tuple(sorted(touched)))
        return Written(delta, pieces or {})


@dataclass
class Container:
    """One container of one keyed stage: its table, the slices that it holds, and the epoch that it stands at."""

    stage: str
    index: int
    table: KeyedTable
    slices: frozenset[int] = frozenset()
    epoch: int = -1
    attempt: int = -1
    pending: list[Future[Written]] = field(default_factory=list)
    """Deltas being written."""
    unsent: list[dict[int, bytes]] = field(default_factory=list)
    """For each delta that was written: holder -> its piece."""
    told: tuple[tuple[int, frozenset[int]], frozenset[int]] | None = None
    """What the driver knows of the copies in this container: ((checkpoint, slices that it has), slices that it cannot
    have)."""
    load: np.ndarray | None = None
    """Rows that came for each slice since the last report of load."""
    woken: int = 0
    """Waiting rows that were entered since the last task."""


class _Loading:
    """Frames on their way into a table, in order. ``put_off``: frames are brought, and their rows entered when they are
    needed, unless there are too many rows. Otherwise frames are loaded, small ones together."""

    def __init__(self, table: KeyedTable, *, put_off: bool) -> None:
        self.table = table
        self.put_off = put_off
        self.frames: list[pl.DataFrame] = []
        self.rows = 0

    def add(self, frame: pl.DataFrame) -> None:
        self.frames.append(frame)
        self.rows += frame.height
        if self.put_off and self.table.rows_waiting + self.rows > WAITING_ROWS_MAX:
            self.put_off = False
        if not self.put_off and self.rows >= LOAD_ROWS:
            self.end()

    def end(self) -> None:
        if not self.frames:
            return
        if self.put_off:
            self.table.bring(self.frames)
        else:
            self.table.load(stacked(self.frames))
        self.frames, self.rows = [], 0


class Worker:
    """Holds the containers of one process and runs tasks on them."""

    def __init__(self, plan: Plan, job_id: str, store: Store, keeper: Keeper | None = None) -> None:
        """``keeper`` keeps backups of other containers' slices. Without one, slices that this process takes over come
        from the store when they are needed.
        """
        self.plan = plan
        """The plan of the task that runs, or ran last."""
        self.plans = {FIRST_PLAN: plan}
        """version -> plan. While a flow is replaced, epochs of two plans are under way."""
        self.job_id = job_id
        self.store = store
        self.keeper = keeper
        self.containers: dict[tuple[str, int], Container] = {}
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="penstock-delta")
        self.manifests: dict[int, Manifest] = {}
        self.layouts: dict[tuple[PlanVersion, StageId], TableSpec | None] = {}
        self.failed: Exception | None = None
        """What went wrong since the last task."""

    # -- one task ------------------------------------------------------------------------------------------------

    def run(self, spec: TaskSpec, blobs: Sequence[bytes]) -> tuple[TaskReport, dict[tuple[str, int], bytes]]:
        """(control record, (stage, container) -> blob). Errors of the user or the world come back in the record."""
        report = TaskReport(stage=spec.stage, epoch=spec.epoch, attempt=spec.attempt, index=spec.index, pid=os.getpid())
        began = time.perf_counter()
        try:
            if self.failed is not None:
                error, self.failed = self.failed, None
                raise error
            with self.keeper.in_task() if self.keeper is not None else contextlib.nullcontext():
                out = self._run(spec, blobs, report)
        except PenstockError as error:
            report.error = task_error(error)
            out = {}
        except SystemExit as error:
            report.error = _left(spec, error)
            out = {}
        except (OSError, MemoryError):
            raise  # the world's, perhaps for a moment only: recovery runs it again
        except Exception as error:
            # Ours, or a combination of types that nobody thought of: to run it again would not help.
            report.error = TaskError(
                kind="EngineError",
                message=f"stage '{spec.stage}' failed in epoch {spec.epoch}: {type(error).__name__}: {error}.",
                remedy="Please report it, with the trace that -v shows. The checkpoint is whole.",
                evidence={"trace": traceback.format_exc()},
            )
            out = {}
        report.busy_ms = (time.perf_counter() - began) * 1000 - report.load_ms
        return report, out

    def wake_some(self) -> bool:
        """Between two tasks: enter a few waiting rows. Returns whether more of them wait. An error is kept for the next
        task, which reports it: there is nobody to report it to here."""
        waiting = {key: container for key, container in self.containers.items() if container.table.waits}
        for key, container in list(waiting.items())[:1]:
            try:
                container.table.wake(WAKE_BETWEEN)
            except Exception as error:
                self.failed = error
                del self.containers[key], waiting[key]  # a table with half of its rows
            container.woken += WAKE_BETWEEN
        return any(container.table.waits for container in waiting.values())

    def _run(self, spec: TaskSpec, blobs: Sequence[bytes], report: TaskReport) -> dict[tuple[str, int], bytes]:
        stage = self._stage(spec)
        context = StepContext(spec.epoch, spec.on_error)
        if stage.source is not None:
            root = self._read(stage, spec, report, context)
            container = None
        else:
            blobs, sent = sorted_out(blobs)
            if self.keeper is not None and spec.index in spec.handover.values():
                self.keeper.rest(LOAD_REST_S)
            container = self._container(stage, spec, report, sent)
            if container is None and stage.stateful:
                report.missing = True
                return {}
            root = self._apply(stage, spec, blobs, container, report, context)
        frames = self._steps(stage, root, spec.index, report, context)
        out = self._exchange(stage, spec, frames, report, context)
        if not spec.quiet:
            self._sinks(stage, spec, frames, report, context)
        if container is not None:
            container.epoch = spec.epoch
            if spec.seal:
                self._seal(stage, spec, container)
            report.state_rows = container.table.rows_live
            report.state_bytes = container.table.nbytes
            report.deltas = self._written(container, wait=False)
            if not report.rebuilt:  # in an epoch that somebody waits for they can wait
                due = max(WAKE_ROWS, container.table.rows_waiting // WAKE_SHARE)
                container.table.wake(max(0, due - container.woken))
            container.woken = 0
            out.update(self._to_peers(spec, container))
            self._tell_copies(stage, spec, container, report)
        return out

    def flush(self, spec: TaskSpec) -> TaskReport:
        """Seal at the epoch, unless that was done, and wait until everything is written."""
        report = TaskReport(stage=spec.stage, epoch=spec.epoch, attempt=spec.attempt, index=spec.index, pid=os.getpid())
        try:
            stage = self._stage(spec)
            container = self.containers.get((spec.stage, spec.index))
            sealed = container is not None and spec.epoch in container.table.epochs()
            # It may stand at a later epoch: what was sealed on the way is still being written, and that
            # is all it takes.
            if container is None or container.attempt != spec.attempt or not (sealed or container.epoch == spec.epoch):
                report.missing = True
                return report
            if not sealed:
                self._seal(stage, spec, container)
            report.deltas = self._written(container, wait=True)
            report.writing = bool(container.pending)
            report.state_rows = container.table.rows_live
            report.state_bytes = container.table.nbytes
        except PenstockError as error:
            report.error = task_error(error)
        return report

    def add_plan(self, version: PlanVersion, plan: Plan) -> None:
        """Epochs of this version of the plan may come from now on."""
        self.plans[version] = plan

    def _stage(self, spec: TaskSpec) -> Stage:
        """The stage of a task, in the plan of the task's epoch."""
        if spec.plan not in self.plans:
            raise EngineError(
                f"epoch {spec.epoch} runs with version {spec.plan} of the plan, and this worker has only "
                f"{', '.join(map(str, sorted(self.plans)))}.",
                remedy="Please report it. The checkpoint is whole: start the job again.",
            )
        self.plan = self.plans[spec.plan]
        return self.plan.by_id[StageId(spec.stage)]

    def _layout(self, stage: Stage, version: PlanVersion) -> TableSpec | None:
        """The layout of a stage's table. It takes a while to put together, and every epoch asks for it."""
        if (version, stage.id) not in self.layouts:
            assert stage.keyed is not None
            self.layouts[version, stage.id] = stage.keyed.table()
        return self.layouts[version, stage.id]

    # -- sources -------------------------------------------------------------------------------------------------

    def _read(self, stage: Stage, spec: TaskSpec, report: TaskReport, context: StepContext) -> pl.DataFrame:
        assert stage.source is not None
        if spec.split is None:
            return pl.DataFrame(schema=stage.root.schema)
        began = time.perf_counter()
        result = stage.source.read(stage.root.id, spec.split)
        if result.bad and spec.on_error == "fail":
            bad = result.bad[0]
            raise BadRecordError(
                f"source '{bad.source}' has a malformed record at {bad.offset}: {bad.reason}. The record: {bad.raw!r}.",
                remedy='Mend it, or run with on_error="dead_letter" to set such records aside.',
                source=bad.source,
                offset=bad.offset,
                reason=bad.reason,
                raw=bad.raw,
            )
        context.dead.extend((b.source, b.offset, b.reason, b.raw) for b in (*result.set_aside, *result.bad))
        rows = result.frame.height
        report.rows_in = rows + len(result.set_aside) + len(result.bad)
        report.by_operator[stage.root.id] = (report.rows_in, rows, (time.perf_counter() - began) * 1000)
        frame = result.frame
        if stage.source.punctuated:
            frame, context.punctuation = punctuated_rows(frame, result.punctuation)
        return frame.hstack([positions(spec.index, rows)]) if stage.forks or stage.tells else frame

    # -- state ---------------------------------------------------------------------------------------------------

    def _container(
        self, stage: Stage, spec: TaskSpec, report: TaskReport, sent: Sequence[tuple[int, bytes]]
    ) -> Container | None:
        """The container, standing exactly at the epoch before this one; None if that cannot be."""
        assert stage.keyed is not None
        layout = self._layout(stage, spec.plan)
        if layout is None:
            return None
        if self.keeper is not None:
            for kind, piece in sent:
                if kind == PIECE:
                    self.keeper.offer(spec.stage, piece)
        owned = frozenset(s for s, c in enumerate(spec.owners[spec.stage]) if c == spec.index)
        key = (spec.stage, spec.index)
        found = self.containers.get(key)
        before = spec.epoch - 1
        if found is not None and found.attempt != spec.attempt:
            # A new attempt starts from the checkpoint: go back to it, or forget everything.
            if self.keeper is not None:
                self.keeper.rest()
            found.pending.clear()
            found.unsent.clear()
            found.load = None
            if found.table.undo_to(spec.checkpoint):
                found.epoch, found.attempt = spec.checkpoint, spec.attempt
            else:
                found = None
        if found is not None and found.epoch != before:
            found = None
        if found is not None and found.slices == owned:
            found.table.release(spec.checkpoint)
            return found
        new = owned - found.slices if found is not None else owned
        handed = self._handed_over(spec, sent)
        at_checkpoint = spec.checkpoint == before
        if not at_checkpoint and not new <= handed.keys():
            return None
        began, cpu = time.perf_counter(), time.process_time()
        if found is None:
            table = KeyedTable(layout, base_epoch=spec.checkpoint)
            found = Container(spec.stage, spec.index, table, epoch=before, attempt=spec.attempt)
            self.containers[key] = found
        found.table.release(spec.checkpoint)
        if gone := found.slices - owned:
            found.table.drop_slices(gone, spec.slicemap)
        if new:
            self._load(stage, spec, found.table, new, report)
            for frame in {id(handed[s]): handed[s] for s in new}.values() if not at_checkpoint else ():
                found.table.merge(frame)  # the old owner's changes since the checkpoint: they can be undone
        found.slices = owned
        report.load_ms = (time.perf_counter() - began) * 1000
        report.load_cpu_ms = (time.process_time() - cpu) * 1000
        return found

    def _handed_over(self, spec: TaskSpec, sent: Sequence[tuple[int, bytes]]) -> dict[int, pl.DataFrame]:
        """Slice -> rows that its old owner changed since the checkpoint."""
        found: dict[int, pl.DataFrame] = {}
        for kind, data in sent:
            if kind == HANDOVER:
                meta, frame = decode(data, f"handover of {spec.stage}")
                expected = (spec.stage, spec.epoch - 1, spec.attempt, spec.checkpoint)
                if (meta["stage"], meta["epoch"], meta["attempt"], meta["checkpoint"]) == expected:
                    found.update(dict.fromkeys(meta["handed"], frame))
        return found

    def _load(
        self, stage: Stage, spec: TaskSpec, table: KeyedTable, slices: frozenset[int], report: TaskReport
    ) -> None:
        """Bring slices up as they are in the checkpoint: from a backup in this process, or from the store."""
        assert stage.keyed is not None
        if spec.checkpoint == 0:
            return  # before any input every slice is empty
        taken: dict[int, list[pl.DataFrame]] = {}
        if self.keeper is not None:
            self.keeper.rest(LOAD_REST_S)
            self._keep(stage, spec, self._copies(spec) | slices)
            taken = self.keeper.take(spec.stage, slices, spec.checkpoint)
        loading = _Loading(table, put_off=not stage.keyed.scans)
        for layer in range(max(map(len, taken.values()), default=0)):  # the order of slices is free: they share no rows
            for frames in taken.values():
                if layer < len(frames):
                    loading.add(frames[layer])
        rest = slices - taken.keys()
        for frame in self._durable(spec, rest):
            loading.add(frame)
        loading.end()
        report.rebuilt = {"backup": len(taken), "durable": len(rest)}

    def _durable(self, spec: TaskSpec, slices: frozenset[int]) -> Iterator[pl.DataFrame]:
        """The rows that the durable checkpoint has of some slices, file by file."""
        name = MANIFEST_NAME.format(spec.checkpoint)
        try:
            for file in self._manifest(spec.checkpoint).files_for(spec.stage, slices) if slices else ():
                name = file.name
                yield read_slices(self.store.get(name), name, file.slices)
        except FileNotFoundError as error:  # of the world's, the one that does not pass: to run it again would not help
            few = ", ".join(map(str, sorted(slices)[:8])) + (f" and {len(slices) - 8} more" if len(slices) > 8 else "")
            raise CheckpointError(
                f"stage '{spec.stage}' cannot bring up slices {few} as of epoch {spec.checkpoint}: no backup of them "
                f"is at hand, and {name} is missing from the checkpoint store.",
                remedy="Nothing more was published. See that every machine reaches the same checkpoint directory, and "
                "start again: the job goes back to the last whole checkpoint. If there is none, restore the file "
                "from a copy.",
                stage=spec.stage,
                slices=sorted(slices),
                path=name,
            ) from error

    def _manifest(self, checkpoint: int) -> Manifest:
        if checkpoint not in self.manifests:
            self.manifests = {checkpoint: read_manifest(self.store, checkpoint)}
        return self.manifests[checkpoint]

    # -- peers ---------------------------------------------------------------------------------------------------

    @staticmethod
    def _copies(spec: TaskSpec) -> frozenset[int]:
        """Slices that this container is to keep a copy of."""
        return frozenset(s for s, keepers in enumerate(spec.copies) if spec.index in keepers)

    def _keep(self, stage: Stage, spec: TaskSpec, wanted: frozenset[int]) -> None:
        assert self.keeper is not None and stage.keyed is not None
        layout = self._layout(stage, spec.plan)
        assert layout is not None
        self.keeper.tell(spec.stage, layout.key.names(), spec.slicemap, wanted, spec.checkpoint, spec.commits)

    def _tell_copies(self, stage: Stage, spec: TaskSpec, container: Container, report: TaskReport) -> None:
        wanted = self._copies(spec)
        held, refused = (spec.checkpoint, wanted), frozenset[int]()
        if self.keeper is not None:
            self._keep(stage, spec, wanted)
            checkpoint, slices = self.keeper.held(spec.stage)
            held, refused = (checkpoint, slices & wanted), self.keeper.given_up(spec.stage) & wanted
            report.problem, report.waits = self.keeper.problem() or "", self.keeper.waits() or ""
        if (held, refused) != container.told:
            container.told = (held, refused)
            report.held, report.refused = (held[0], sorted(held[1])), sorted(refused)
        report.unsent = bool(container.unsent)

    def _to_peers(self, spec: TaskSpec, container: Container) -> dict[tuple[str, int], bytes]:
        if not spec.sends:
            return {}
        items: dict[int, list[tuple[int, bytes]]] = {c: [] for c in range(spec.instances[spec.stage])}
        for pieces in container.unsent:
            for target, piece in pieces.items():
                if target in items:
                    items[target].append((PIECE, piece))
        container.unsent = []
        mine = {s: c for s, c in spec.handover.items() if s in container.slices}
        for target in sorted(set(mine.values())):
            slices = sorted(s for s, c in mine.items() if c == target)
            meta = {
                "job": self.job_id,
                "stage": spec.stage,
                "kind": "handover",
                "epoch": spec.epoch,
                "attempt": spec.attempt,
                "checkpoint": spec.checkpoint,
                "handed": slices,
            }
            frame = container.table.unreleased(slices, spec.slicemap)
            items[target].append((HANDOVER, encode(meta, frame, slicemap=spec.slicemap)))
        return {(spec.stage, c): pack_for_peer(spec.index, sent) for c, sent in items.items()}

    def _seal(self, stage: Stage, spec: TaskSpec, container: Container) -> None:
        """End the active fragment and hand it to the background writer. Processing goes on at once."""
        fragment = container.table.seal(spec.epoch)
        if not fragment.rows:
            nothing: Future[Written] = Future()
            nothing.set_result(Written.of(spec, None))
            container.pending.append(nothing)
            return
        name = f"state/{spec.stage}/{spec.epoch:012d}-{spec.attempt:04d}-{spec.index:04d}.delta"
        container.pending.append(self.writer.submit(self._write_delta, name, fragment, spec))

    def _write_delta(self, name: str, fragment: Fragment, spec: TaskSpec) -> Written:
        meta, frame, data, file = delta_file(name, fragment.frame(), self.job_id, spec)
        self.store.put(name, data)
        pieces = cut((meta, frame), name, spec.slicemap, spec.copies, spec.attempt) if spec.copies else {}
        return Written.of(spec, file, map(int, meta["slices"]), pieces)

    def _written(self, container: Container, *, wait: bool) -> list[SealedDelta]:
        """Deltas whose writing has finished. An error of the store surfaces here, in the next record."""
        out = []
        left = []
        deadline = time.monotonic() + FLUSH_WAIT_S
        for future in container.pending:
            if wait or future.done():
                try:
                    written = future.result(max(0.0, deadline - time.monotonic()))
                    if written.pieces:
                        container.unsent.append(written.pieces)
                    out.append(written.delta)
                    continue
                except TimeoutError:
                    if future.done():
                        raise  # the store's own
            left.append(future)
        container.pending = left
        return out

    def _apply(
        self,
        stage: Stage,
        spec: TaskSpec,
        blobs: Sequence[bytes],
        container: Container | None,
        report: TaskReport,
        context: StepContext,
    ) -> pl.DataFrame:
        assert stage.keyed is not None
        arrivals = self._arrivals(stage, spec, blobs, report, context)
        report.rows_in = sum(a.frame.height for a in arrivals)
        if container is not None and not spec.quiet:
            self._measure(spec, container, arrivals, stage.keyed.key, report)
        began = time.perf_counter()
        tick = Tick(spec.epoch, spec.watermark_before, spec.watermark, spec.clock_ms, spec.ports, stage.tells)
        applied: Applied = stage.keyed.apply(container.table if container else None, arrivals, tick)
        report.late[spec.stage] = report.late.get(spec.stage, 0) + applied.late
        self._set_aside(applied.dead, spec, context)
        busy = (time.perf_counter() - began) * 1000
        frame = applied.frame
        report.by_operator[stage.root.id] = (report.rows_in, frame.height, busy)
        frame = in_due_order(frame, stage.keyed.due)
        return frame if stage.tells or stage.forks else without(frame, order_of(frame))

    def _arrivals(
        self, stage: Stage, spec: TaskSpec, blobs: Sequence[bytes], report: TaskReport, context: StepContext
    ) -> list[Arrival]:
        """What came, in an order of its own: blobs come in any."""
        assert stage.keyed is not None
        edges = {(e.upstream, e.port): e for e in stage.ins}
        order = {e.upstream: i for i, e in enumerate(stage.ins)}
        arrivals: list[Arrival] = []
        wholes: dict[tuple[int, StageId], list[tuple[int, pl.DataFrame]]] = {}
        marks: dict[tuple[int, StageId], list[tuple[int, pl.DataFrame]]] = {}
        for blob in blobs:
            header, frames = unpack_blob(blob)
            origin = StageId(header.origin)
            for port, frame in frames:
                if port < 0:
                    marks.setdefault((MARKS - port, origin), []).append((header.index, frame))
                elif edges[origin, port].whole:
                    wholes.setdefault((port, origin), []).append((header.index, frame))
                else:
                    from_source = self.plan.by_id[origin].source is not None
                    before = spec.arrivals.get(at_port(origin, port)) if from_source else None
                    mark = before[header.index] if before else self._before(spec, port)
                    arrivals.append(Arrival(frame, header.origin, header.index, from_source, mark, port))
        arrivals.sort(key=lambda a: (a.port, order[StageId(a.origin)], a.index))
        for (port, origin), found in sorted(wholes.items(), key=lambda item: (item[0][0], order[item[0][1]])):
            edge = edges[origin, port]
            frame = in_tag_order(stacked_by_tags([f for _, f in sorted(found, key=lambda pair: pair[0])]))
            if edge.marked:
                told = [f for _, f in sorted(marks.get((port, origin), []), key=lambda pair: pair[0])]
                frame = marked(frame, told, PUNCTUATION)
            elif stage.keyed.timed:
                frame = self._with_upstream_time(frame, origin)
            ways = [e.upstream for e in stage.ins if e.port == port]
            if len(ways) > 1 and stage.depth:
                frame = of_origin(frame, ways.index(origin), stage.depth)
            prepared = stage.keyed.prepare(frame, True, port, spec.clock_ms * 1000)
            report.late[spec.stage] = report.late.get(spec.stage, 0) + prepared.late
            self._set_aside(prepared.dead, spec, context)
            rows = without(prepared.frame, (PUNCTUATION,))
            if rows.height:
                rows = _with_hashes(rows, stage.keyed.key)
                known = spec.arrivals.get(at_port(origin, port)) if edge.marked else None
                arrivals.append(Arrival(rows, origin, 0, True, known[0] if known else self._before(spec, port), port))
        return arrivals

    @staticmethod
    def _before(spec: TaskSpec, port: int) -> int:
        return spec.ports[port][0] if spec.ports else spec.watermark_before

    def _with_upstream_time(self, frame: pl.DataFrame, origin: StageId) -> pl.DataFrame:
        """Rows of a keyed stage with time, each with how far time had come there, less what its rows may lie behind.

        A result was due when the watermark passed its time: before it was given, time had not come quite so far. What
        the end of the input alone made due says nothing of time.
        """
        keyed = self.plan.by_id[origin].keyed
        assert keyed is not None
        reached, *rest = tag_columns(frame)
        was_due = rest[0] == 0 if keyed.hands_on else np.ones(len(reached), dtype=np.bool_)
        plain = (reached != NEVER) & (reached != FOREVER)
        return with_column(frame, pl.Series(PUNCTUATION, np.where(plain, reached - was_due - keyed.due_hold_us, NEVER)))

    @staticmethod
    def _measure(
        spec: TaskSpec, container: Container, arrivals: Sequence[Arrival], key: Sequence[str], report: TaskReport
    ) -> None:
        """Measure the rows that come for each slice, and the hottest keys of the slices that the driver asks about."""
        frames = [a.frame for a in arrivals]
        rows = rows_by_slice(frames, spec.slicemap, spec.epoch)
        container.load = rows if container.load is None else container.load + rows
        if spec.epoch % LOAD_EPOCHS == 0:
            report.load = {int(s): round(float(container.load[s])) for s in np.flatnonzero(container.load)}
            container.load = None
        for number in container.slices.intersection(spec.hot):
            report.keys[number] = hottest_keys(frames, key, spec.slicemap, number, spec.epoch)

    # -- after the root ------------------------------------------------------------------------------------------

    def _steps(
        self, stage: Stage, root: pl.DataFrame, index: int, report: TaskReport, context: StepContext
    ) -> dict[str, pl.DataFrame]:
        frames = {stage.root.id: root}
        for node in stage.steps:
            began = time.perf_counter()
            inputs = [frames[i] for i in node.inputs if i in frames]
            if node.step is None:
                frame = _union(inputs)
                if node.by is not None and stage.tells:
                    frame = with_column(frame, frame[node.by].cast(pl.Datetime("us")).alias(BY))
                frames[node.id] = frame
                continue
            frame = inputs[0]
            if not frame.height:
                result = _nothing(node, frame)
            elif node.id in stage.by_row:
                assert isinstance(node.step, BatchStep)
                result = node.step.by_row(frame, context)
            else:
                result = node.step.run(frame, context)
                if stage.source is not None and order_of(frame) and not order_of(result):
                    result = result.hstack([positions(index, result.height)])
            busy = (time.perf_counter() - began) * 1000
            report.by_operator[node.id] = (frame.height, result.height, busy)
            frames[node.id] = result
        return frames

    def _exchange(
        self,
        stage: Stage,
        spec: TaskSpec,
        frames: Mapping[str, pl.DataFrame],
        report: TaskReport,
        context: StepContext,
    ) -> dict[tuple[str, int], bytes]:
        out: dict[tuple[str, int], bytes] = {}
        for downstream in dict.fromkeys(e.downstream for e in stage.outs):
            edges = [e for e in stage.outs if e.downstream == downstream]
            shares: list[list[tuple[int, pl.DataFrame]]] = [[] for _ in range(spec.instances[downstream])]
            for edge in edges:
                split, marks = self._split(stage, edge, spec, frames[edge.node], report, context)
                for share, frame in zip(shares, split, strict=True):
                    share.append((edge.port, frame))
                    if marks is not None:
                        share.append((MARKS - edge.port, marks))
            blobs = [pack_blob(spec.stage, spec.index, share) for share in shares]
            report.bytes_out[downstream] = [len(b) for b in blobs]
            out.update({(downstream, c): b for c, b in enumerate(blobs)})
        return out

    def _split(
        self,
        stage: Stage,
        edge: Edge,
        spec: TaskSpec,
        frame: pl.DataFrame,
        report: TaskReport,
        context: StepContext,
    ) -> tuple[list[pl.DataFrame], pl.DataFrame | None]:
        """Prepare rows for the operator downstream, and cut them by the owner of their slice; and what all of its
        containers must know of when time rose, if anything.
        """
        operator = self.plan.by_id[edge.downstream].keyed
        assert operator is not None
        here = at_port(edge.downstream, edge.port)
        punctuated = stage.source is not None and stage.source.punctuated
        if punctuated:  # it alone says how far time has come, rows or not
            report.time_max[here] = context.punctuation
        if not frame.height:
            return [frame] * spec.instances[edge.downstream], None
        if not edge.tagged:
            frame = without(frame, order_of(frame))
        elif edge.numbered and (stage.multiplies or stage.keyed is not None):
            frame = numbered(frame)
        marks = None
        if edge.whole:
            if edge.marked:
                times = usable_times(frame, operator.time_at(edge.port))
                if not punctuated:
                    report.time_max[here] = max(int(times.max()), report.time_max.get(here, NEVER))
                marks = marks_of(frame, frame[PUNCTUATION].to_numpy() if PUNCTUATION in frame.columns else times)
            unused = (PUNCTUATION,) if operator.time_at(edge.port) == BY else (PUNCTUATION, BY)
            rows, key = without(frame, unused), operator.keys_at(edge.port)
        else:
            in_time = edge.tagged and operator.timed and stage.keyed is not None and stage.keyed.timed
            given = self._with_upstream_time(frame, stage.id) if in_time else frame
            prepared = operator.prepare(given, stage.source is not None or in_time, edge.port, spec.clock_ms * 1000)
            if prepared.time_max is not None and not punctuated:
                report.time_max[here] = max(prepared.time_max, report.time_max.get(here, NEVER))
            report.late[edge.downstream] = report.late.get(edge.downstream, 0) + prepared.late
            self._set_aside(prepared.dead, spec, context)
            rows, key = without(prepared.frame, (PUNCTUATION, BY)), operator.key
        rows = _with_hashes(rows, key)
        report.rows_out += rows.height
        hashes = rows[HASH].to_numpy()
        owners, instances = spec.owners[edge.downstream], spec.instances[edge.downstream]
        return split_by_owner(rows, hashes, spec.slicemaps[edge.downstream], owners, instances), marks

    @staticmethod
    def _set_aside(dead: Sequence[Dead], spec: TaskSpec, context: StepContext) -> None:
        """Records that an operator could not use: dead letters, or the end of the job, as the flow says."""
        if dead and spec.on_error == "fail":
            operator, offset, reason, raw = dead[0]
            raise BadRecordError(
                f"operator '{operator}' cannot use a record of epoch {spec.epoch}: {reason}. The record: {raw}.",
                remedy='Mend it, or run with on_error="dead_letter" to set such records aside.',
                operator=operator,
                offset=offset,
                reason=reason,
                raw=raw,
            )
        context.dead.extend((operator, f"epoch {spec.epoch}", reason, raw) for operator, _, reason, raw in dead)

    def _sinks(
        self,
        stage: Stage,
        spec: TaskSpec,
        frames: Mapping[str, pl.DataFrame],
        report: TaskReport,
        context: StepContext,
    ) -> None:
        part = f"{stage.index:02d}-{spec.index:04d}"
        for node in stage.sinks:
            assert node.sink is not None
            began = time.perf_counter()
            frame = _union([frames[i] for i in node.inputs if i in frames])
            frame = pick(frame, visible(frame.columns))
            self._deliver(node.id, node.sink, spec, part, frame, report)
            report.rows_out += frame.height
            report.by_operator[node.id] = (frame.height, frame.height, (time.perf_counter() - began) * 1000)
        if context.dead:
            report.dead = len(context.dead)
            sink = self.plan.graph.dead_letters
            frame = bad_records_frame([BadRecord(*d) for d in context.dead])
            if sink is not None:
                self._deliver(DEAD_LETTERS, sink, spec, part, frame, report)
            else:
                _output(report).tables[DEAD_LETTERS] = frame_bytes(frame.head(DEAD_LETTERS_MAX))

    def _deliver(self, id: str, sink: Any, spec: TaskSpec, part: str, frame: pl.DataFrame, report: TaskReport) -> None:
        if not frame.height:
            return
        if sink.collects:
            _output(report).tables[id] = frame_bytes(frame)
            return
        ref = sink.write_part(spec.epoch, spec.attempt, part, frame)
        if ref is not None:
            _output(report).parts[id] = ref


def _output(report: TaskReport) -> TaskOutput:
    """What the task made for the sinks."""
    if report.output is None:
        report.output = TaskOutput()
    return report.output


def read_manifest(store: Store, checkpoint: int) -> Manifest:
    name = MANIFEST_NAME.format(checkpoint)
    return Manifest.from_bytes(store.get(name), name)


def delta_file(
    name: str, frame: pl.DataFrame, job_id: str, spec: TaskSpec, kind: Kind = "delta"
) -> tuple[dict[str, Any], pl.DataFrame, bytes, DeltaFile]:
    """A fragment as a file: its header, its rows sorted by slice, the bytes, and the descriptor for the manifest."""
    owned = [s for s, c in enumerate(spec.owners[spec.stage]) if c == spec.index]
    frame, index = sort_by_slice(frame, spec.slicemap)
    meta = {
        "job": job_id,
        "stage": spec.stage,
        "kind": kind,
        "epoch_from": spec.checkpoint,
        "epoch_to": spec.epoch,
        "progress": spec.progress,
        "slices_total": spec.slicemap.count,
        "slices": {str(number): place for number, place in index.items()},
    }
    data = encode(meta, frame)
    file = DeltaFile(
        name=name,
        stage=spec.stage,
        kind=kind,
        epoch_from=spec.checkpoint,
        epoch_to=spec.epoch,
        slices=tuple(owned),
        rows=frame.height,
        bytes=len(data),
        checksum=checksum(data),
    )
    return meta, frame, data, file


def split_by_owner(
    rows: pl.DataFrame, hashes: np.ndarray, slicemap: SliceMap, owners: Sequence[int], instances: int
) -> list[pl.DataFrame]:
    """The rows for each container, by the owner of the slice that each row's hash belongs to."""
    if instances == 1:
        return [rows]
    owner = np.asarray(owners, dtype=np.int32)[slicemap.of(hashes)]
    return [rows_where(rows, owner == c) for c in range(instances)]


def _with_hashes(rows: pl.DataFrame, key: Sequence[str]) -> pl.DataFrame:
    """Rows with the hash of their key."""
    schema = rows.schema
    floats = [k for k in key if schema[k].is_float()]
    if floats:  # -0.0 and 0.0 are one key: whichever came first must not show
        rows = rows.with_columns(one_zero(pl.col(k)).alias(k) for k in floats)
    return with_column(rows, pl.Series(HASH, hash_columns(rows, key), dtype=pl.UInt64))


def _nothing(node: Node, frame: pl.DataFrame) -> pl.DataFrame:
    """No rows, with the hidden columns that rows would have: tasks must agree on columns, whatever they get."""
    return pl.DataFrame(schema={**node.schema, **{c: frame.schema[c] for c in tags(frame)}})


def in_due_order(frame: pl.DataFrame, column: str | None) -> pl.DataFrame:
    """What an operator gave: by when rows were due and the hash of their key. Rows with tags of their own are put in
    order where they arrive.
    """
    if order_of(frame):
        return frame
    rows = frame.height
    if DUE in frame.columns:
        due = frame[DUE].to_numpy()
    else:
        due = frame[column].cast(pl.Int64).to_numpy() if column is not None else np.zeros(rows, dtype=np.int64)
    hashes = signed(frame[ORDER].to_numpy()) if ORDER in frame.columns else np.zeros(rows, dtype=np.int64)
    return in_tag_order(with_tags(without(frame, (DUE, ORDER)), [due, hashes]))


def punctuated_rows(frame: pl.DataFrame, marks: Sequence[tuple[int, int]]) -> tuple[pl.DataFrame, int]:
    """Each row with the last punctuation before it; and the last of the split. ``marks``: (rows before it, time)."""
    column = np.full(frame.height, NEVER, dtype=np.int64)
    last = NEVER
    for before, time_us in sorted(marks):
        last = max(last, time_us)
        column[before:] = last
    return with_column(frame, pl.Series(PUNCTUATION, column)), last


def _union(frames: Sequence[pl.DataFrame]) -> pl.DataFrame:
    if len(frames) == 1:
        return frames[0]
    some = [f for f in frames if f.height] or list(frames[:1])
    width = max(len(order_of(f)) for f in some)
    return in_tag_order(stacked_by_tags([widened(f, width) for f in some]))


def _left(spec: TaskSpec, error: SystemExit) -> TaskError:
    """For a function of the user's that calls ``sys.exit``, wherever in a stage: it is told by its place."""
    at = traceback.extract_tb(error.__traceback__)[-1]
    return TaskError(
        kind="UserCodeError",
        message=f"a function in stage '{spec.stage}' called sys.exit({error.code!r}) in epoch {spec.epoch} "
        f"(container {spec.index}; {at.filename}:{at.lineno}, in {at.name}).",
        remedy="Raise an exception, or stop the job with job.stop().",
        evidence={"stage": spec.stage, "epoch": spec.epoch, "cause": "SystemExit"},
    )


def task_error(error: PenstockError) -> TaskError:
    evidence = {k: v if isinstance(v, str | int | float | bool) else str(v) for k, v in error.evidence.items()}
    return TaskError(kind=type(error).__name__, message=error.message, remedy=error.remedy, evidence=evidence)
