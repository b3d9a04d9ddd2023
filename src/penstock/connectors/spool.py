"""What arrives once is kept until it is committed: the spool of a source that cannot be asked again.

A socket, a POST, a user's iterator say everything once. So what arrives is first written as a *segment* below the
checkpoint directory, durably, and only then shown to the planner. From there on it is a replayable source like any
other: offsets are (segment, row), workers read segments from the store, and a segment that a checkpoint covers is
deleted::

    spool/<source>/000000000007.arrow   rows; in its metadata the records that were no rows, and the senders' keys
    spool/<source>/seen.json            the next number, and keys of segments that are gone

One thread writes. Batches that come while it is busy are written together with the next segment, so that a thousand
small senders cost one flush. Segments are created and never replaced, as the epoch log is.
"""

from __future__ import annotations

import io
import json
import re
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import polars as pl
import pyarrow as pa

from penstock.connectors.base import Offset
from penstock.errors import CheckpointInUse, CorruptData, PenstockError, SourceError
from penstock.state.store import Store

SEEN: Final = "seen.json"
KEYS_KEPT: Final = 10_000
"""Keys of senders that are remembered. One that sends again after so many others is not recognised."""

Bad = tuple[str, str]
"""Reason, raw record."""


class SpoolFull(Exception):
    """No room: the job is behind by as much as it may be."""


class SpoolClosed(Exception):
    """The job ends."""


@dataclass(eq=False)
class Batch:
    """What came in one go. ``done`` is set when it is durable, or never will be: then ``error`` says why."""

    frame: pl.DataFrame
    bad: tuple[Bad, ...] = ()
    key: str | None = None
    taken: int = 0
    """Records taken from where they came: what a restart may skip."""
    done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    repeated: bool = False
    """Its key was seen before: kept once."""

    @property
    def weight(self) -> int:
        return max(1, self.frame.height + len(self.bad))

    @property
    def nbytes(self) -> int:
        return int(self.frame.estimated_size()) + sum(len(raw) for _, raw in self.bad)


@dataclass(frozen=True)
class Segment:
    rows: int
    bad: int
    nbytes: int
    keys: tuple[str, ...] = ()
    taken: int = 0

    @property
    def weight(self) -> int:
        return max(1, self.rows + self.bad)


class Spool:
    """The driver's side. ``append`` from any thread; ``plan`` and ``evict`` from the runtime's."""

    def __init__(
        self,
        store: Store,
        prefix: str,
        schema: pl.Schema,
        *,
        rows_max: int,
        bytes_max: int,
        linger_s: float = 0.0,
        keys_kept: int = KEYS_KEPT,
    ) -> None:
        self.store = store
        self.prefix = prefix
        self.schema = schema
        self.rows_max, self.bytes_max, self.linger_s, self.keys_kept = rows_max, bytes_max, linger_s, keys_kept
        self.wake = threading.Condition()
        self.segments: dict[int, Segment] = {}
        """Durable, not deleted."""
        self.keys: OrderedDict[str, None] = OrderedDict()
        """Of batches that are durable, oldest first."""
        self.coming: dict[str, Batch] = {}
        """Batches with a key that are being written."""
        self.waiting: deque[Batch] = deque()
        self.writing: list[Batch] = []
        self.next = 0
        self.planned = 0
        """Segments below this number are in some epoch."""
        self.taken = 0
        self.finished = False
        """Nothing will come any more."""
        self.error: Exception | None = None
        self.closing = False
        self._load()
        self._thread = threading.Thread(target=self._write_all, name=f"penstock-spool: {prefix}", daemon=True)
        self._thread.start()

    def name(self, number: int) -> str:
        return f"{self.prefix}/{number:012d}.arrow"

    def _load(self) -> None:
        """After a restart: the segments that are still there, and what was known of those that are gone."""
        try:
            seen = json.loads(self.store.get(f"{self.prefix}/{SEEN}"))
            self.next, self.taken = int(seen["next"]), int(seen["taken"])
            self.keys.update(dict.fromkeys(seen["keys"]))
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptData(
                f"{self.prefix}/{SEEN} is damaged.",
                remedy="Restore it from a copy, or start anew with another checkpoint directory.",
                path=f"{self.prefix}/{SEEN}",
            ) from error
        for name in self.store.list(f"{self.prefix}/"):
            if not name.endswith(".arrow"):
                continue
            number = int(name.rpartition("/")[2].removesuffix(".arrow"))
            data = self.store.get(name)
            frame, meta = decode_segment(data, name)
            self.segments[number] = Segment(
                frame.height, len(meta["bad"]), len(data), tuple(meta["keys"]), int(meta["taken"])
            )
            self.next = max(self.next, number + 1)
            self.taken = max(self.taken, int(meta["taken"]))
            self._know(meta["keys"])

    def _know(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.keys[key] = None
            self.keys.move_to_end(key)
        while len(self.keys) > self.keys_kept:
            self.keys.popitem(last=False)

    # -- what arrives --------------------------------------------------------------------------------------------

    def append(self, batch: Batch, *, wait: bool) -> Batch:
        """Hand over a batch; the batch to wait for, which is another one if its key is on its way already.

        Without room: waits for it, or raises SpoolFull.
        """
        with self.wake:
            while True:
                if self.error is not None:
                    raise self.error
                if self.closing:
                    raise SpoolClosed
                if batch.key is not None and batch.key in self.keys:
                    batch.repeated = True
                    batch.done.set()
                    return batch
                if batch.key is not None and batch.key in self.coming:
                    return self.coming[batch.key]
                if self._has_room(batch):
                    break
                if not wait:
                    raise SpoolFull
                self.wake.wait()
            self.waiting.append(batch)
            if batch.key is not None:
                self.coming[batch.key] = batch
            self.wake.notify_all()
            return batch

    def _has_room(self, batch: Batch) -> bool:
        rows, size = self.backlog()
        return rows == 0 or (rows + batch.weight <= self.rows_max and size + batch.nbytes <= self.bytes_max)

    def backlog(self) -> tuple[int, int]:
        """Records and bytes that no epoch has taken up yet."""
        unplanned = [s for n, s in self.segments.items() if n >= self.planned]
        held = [*self.waiting, *self.writing]
        rows = sum(s.weight for s in unplanned) + sum(b.weight for b in held)
        return rows, sum(s.nbytes for s in unplanned) + sum(b.nbytes for b in held)

    def after(self, offset: Offset) -> tuple[int, int]:
        """Records and bytes that wait after an offset, durable or not yet."""
        with self.wake:
            number, row = offset["segment"], offset["row"]
            behind = [s for n, s in self.segments.items() if n >= number]
            begun = self.segments.get(number) if row else None
            held = [*self.waiting, *self.writing]
            rows = sum(s.weight for s in behind) + sum(b.weight for b in held)
            size = sum(s.nbytes for s in behind) + sum(b.nbytes for b in held)
        if begun is not None:  # the first rows of this segment are read, and with them what was no row
            rows -= row + begun.bad
            size -= begun.nbytes * row // max(1, begun.rows)
        return rows, size

    def finish(self, error: Exception | None = None) -> None:
        """Nothing more will come; with an error, the job is told once it has read what did come."""
        with self.wake:
            self.wake.wait_for(lambda: self.closing or self.error is not None or not (self.waiting or self.writing))
            self.finished = error is None
            self.error = self.error or error
            self.wake.notify_all()

    def _write_all(self) -> None:
        while True:
            with self.wake:
                self.wake.wait_for(lambda: self.waiting or self.closing)
                if self.linger_s and not self.closing:
                    self.wake.wait_for(self._enough, self.linger_s)
                if not self.waiting:
                    return
                self.writing = list(self.waiting)
                self.waiting.clear()
            error = self._write(self.writing)
            with self.wake:
                if error is not None:  # nor will those behind it be kept
                    self.writing += self.waiting
                    self.waiting.clear()
                for batch in self.writing:
                    if batch.key is not None:
                        self.coming.pop(batch.key, None)
                    batch.error = error
                    batch.done.set()
                self.writing = []
                self.error = self.error or error
                self.wake.notify_all()
                if error is not None:
                    return

    def _enough(self) -> bool:
        return self.closing or sum(b.weight for b in self.waiting) >= self.rows_max // 8

    def _write(self, batches: Sequence[Batch]) -> Exception | None:
        """One segment; nobody sees it before it is durable."""
        number = self.next
        name = self.name(number)
        keys = [b.key for b in batches if b.key is not None]
        taken = self.taken + sum(b.taken for b in batches)
        frame = pl.concat([b.frame for b in batches])
        bad = [list(each) for b in batches for each in b.bad]
        data = encode_segment(frame, {"bad": bad, "keys": keys, "taken": taken})
        try:
            if not self.store.put_if_absent(name, data) and self.store.get(name) != data:
                raise CheckpointInUse(
                    f"{name} was written by another start of this job.",
                    remedy="See that only one is running, and start it again: it takes up what was kept.",
                    path=name,
                )
        except PenstockError as error:
            return error
        except Exception as error:
            return SourceError(
                f"what arrived could not be kept in {name}: {type(error).__name__}: {error}.",
                remedy="It was not acknowledged. Start again once the store can be written.",
                path=name,
            )
        with self.wake:
            self.segments[number] = Segment(frame.height, len(bad), len(data), tuple(keys), taken)
            self.next, self.taken = number + 1, taken
            self._know(keys)
        return None

    # -- the source's side ---------------------------------------------------------------------------------------

    def plan(self, start: Offset, rows_max: int) -> tuple[Offset, int] | None:
        """End and rows of the next range; None when nothing is there. A segment larger than the rest is cut."""
        with self.wake:
            number, row, rows = start["segment"], start["row"], 0
            while rows < rows_max and (found := self.segments.get(number)) is not None:
                left = found.rows - row
                if left > rows_max - rows:
                    row += rows_max - rows
                    rows = rows_max
                else:
                    # What was no row comes with the first part of its segment.
                    rows += left + (found.bad if row == 0 else 0)
                    number, row = number + 1, 0
            self.planned = max(self.planned, number)
            self.wake.notify_all()
            if (number, row) == (start["segment"], start["row"]):
                if self.error is not None:
                    raise self.error
                return None
            return {"segment": number, "row": row}, max(1, rows)

    def exhausted(self, offset: Offset) -> bool:
        with self.wake:
            return self.finished and not self.waiting and not self.writing and offset["segment"] not in self.segments

    def pieces(self, start: Offset, end: Offset) -> list[tuple[str, int, int, bool]]:
        """(name, first row, row behind the last, whether its bad records are due) of each segment in a range."""
        out = []
        for number in range(start["segment"], end["segment"] + 1):
            first = start["row"] if number == start["segment"] else 0
            if number == end["segment"] and end["row"] == 0:
                break
            found = self.segments.get(number)
            if found is None:
                raise SourceError(
                    f"{self.name(number)} is not in the spool.",
                    remedy="The spool was changed by hand; start with a new checkpoint directory.",
                    path=self.name(number),
                )
            last = end["row"] if number == end["segment"] else found.rows
            out.append((self.name(number), first, last, first == 0 and found.bad > 0))
        return out

    def evict(self, end: Offset) -> None:
        """Delete what a checkpoint covers. First what must be known of it for ever, then the segments."""
        with self.wake:
            gone = [n for n in self.segments if n < end["segment"]]
            if not gone:
                return
            seen = {"next": self.next, "taken": max(self.segments[n].taken for n in gone), "keys": list(self.keys)}
        self.store.put(f"{self.prefix}/{SEEN}", json.dumps(seen).encode())
        for number in gone:
            self.store.delete(self.name(number))
            with self.wake:
                del self.segments[number]

    def close(self) -> None:
        """What was handed over is still written; what comes now is refused."""
        with self.wake:
            self.closing = True
            self.wake.notify_all()
        self._thread.join(timeout=60)
        with self.wake:
            for batch in (*self.writing, *self.waiting):
                batch.error = batch.error or SpoolClosed()
                batch.done.set()
            self.waiting.clear()


def encode_segment(frame: pl.DataFrame, meta: dict[str, Any]) -> bytes:
    table = frame.to_arrow(compat_level=pl.CompatLevel.newest())
    table = table.replace_schema_metadata({"penstock": json.dumps(meta)})
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def decode_segment(data: bytes, name: str) -> tuple[pl.DataFrame, dict[str, Any]]:
    try:
        table = pa.ipc.open_file(pa.py_buffer(data)).read_all()
        meta = json.loads(table.schema.metadata[b"penstock"])
    except (pa.ArrowException, ValueError, KeyError, TypeError) as error:
        raise CorruptData(
            f"{name} is damaged: {error}.",
            remedy="Restore it from a copy: what it held was acknowledged and is nowhere else.",
            path=name,
        ) from error
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame, meta


def folder_of(source_id: str) -> str:
    """A source's name as that of a directory."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", source_id)


def cut(pieces: Sequence[tuple[str, int]], parallelism: int) -> list[list[dict[str, Any]]]:
    """Share out files with so many rows each, in order, into at most ``parallelism`` parts of about equal size."""
    total = sum(n for _, n in pieces)
    bounds = [total * k // parallelism for k in range(parallelism + 1)]
    parts = [list(_between(pieces, first, last)) for first, last in pairwise(bounds) if last > first]
    return parts or [[]]


def _between(pieces: Sequence[tuple[str, int]], first: int, last: int) -> list[dict[str, Any]]:
    position, out = 0, []
    for path, rows in pieces:
        a, b = max(first - position, 0), min(last - position, rows)
        if a < b:
            out.append({"path": path, "from": a, "to": b})
        position += rows
    return out


__all__ = ["Batch", "Spool", "SpoolClosed", "SpoolFull", "cut", "decode_segment", "encode_segment", "folder_of"]
