"""Orders to leave out input that wedges a job: a file that cannot be read, a record that stops an operator.

``penstock skip`` writes an order beside the log of a job that is stopped; the next start reads it when it opens the
source, and every start after it does the same::

    skips/<source>/000001.json   its checksum, and in JSON what to leave out, from which offset on, and when it was said

What an order leaves out is never read again after the checkpoint that the order was given at, so replays give the same
rows. What a checkpoint covers already stays as it is: ``since`` is the offset of that checkpoint, and an order says
nothing of what comes before it. Each part left out is a dead letter, even with ``on_error="fail"``.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final

import polars as pl
import xxhash

from penstock.connectors.base import BadRecord, Offset, SourceContext
from penstock.connectors.rows import clip
from penstock.connectors.spool import folder_of
from penstock.errors import CheckpointInUse, CorruptData
from penstock.state.store import Store

FOLDER: Final = "skips"
REASON: Final = "left out by order (penstock skip)"


@dataclass(frozen=True)
class Skip:
    """One order. Without ``file`` it is about the record at ``offset``, with it about that record of the file; without
    ``offset`` it is about all of the file that no checkpoint covers."""

    source: str
    file: str | None
    offset: str | None
    since: Offset | None
    """How far the source had been read at the checkpoint that the order was given at; None without a checkpoint."""
    said_at: str
    """When the order was given, in ISO 8601, for people."""

    def __str__(self) -> str:
        where = f"record {self.offset}" if self.offset is not None else "what is left"
        return f"source '{self.source}' leaves out {where}" + (f" of {self.file}" if self.file is not None else "")


def write_skip(store: Store, skip: Skip) -> str:
    """Add an order. Its name in the store, which only the owner of the directory may read."""
    body = json.dumps(asdict(skip)).encode()
    data = xxhash.xxh3_64_hexdigest(body).encode() + b"\n" + body
    prefix = f"{FOLDER}/{folder_of(skip.source)}"
    name = f"{prefix}/{len(store.list(prefix + '/')) + 1:06d}.json"
    if not store.put_if_absent(name, data):
        raise CheckpointInUse(
            f"another order was written as {name} at the same time.", remedy="Give this one again.", path=name
        )
    root = getattr(getattr(store, "inner", store), "root", None)
    if root is not None:
        with contextlib.suppress(OSError):
            os.chmod(os.path.join(root, name), 0o600)
    return name


def read_skips(store: Store | None, source_id: str) -> list[Skip]:
    """The orders for one source, oldest first."""
    if store is None:
        return []
    found: list[Skip] = []
    for name in sorted(store.list(f"{FOLDER}/{folder_of(source_id)}/")):
        checksum, _, body = store.get(name).partition(b"\n")
        try:
            if xxhash.xxh3_64_hexdigest(body).encode() != checksum:
                raise ValueError("its checksum is another")
            skip = Skip(**json.loads(body))
        except (ValueError, TypeError) as error:
            raise CorruptData(
                f"the order {name} is damaged: {error}.",
                remedy="Restore it from a copy: without it, epochs that ran after it cannot be repeated exactly.",
                path=name,
            ) from error
        if skip.source == source_id:  # the names of two sources may share a folder
            found.append(skip)
    return found


def told(skips: Iterable[Skip]) -> list[str]:
    """The orders in force, for a job's notices."""
    return [f"{skip}, by an order of {skip.said_at}; see its dead letters." for skip in skips]


def read_record_skips(context: SourceContext) -> tuple[list[str], list[str]]:
    """For a source without files: the places of the records to leave out, and what to tell of them."""
    orders = [skip for skip in read_skips(context.store, context.source_id) if skip.file is None]
    return [str(skip.offset) for skip in orders if skip.offset is not None], told(orders)


def leave_out_rows(
    frame: pl.DataFrame, rows: Iterable[int], source_id: str, place: Callable[[int], str]
) -> tuple[pl.DataFrame, list[BadRecord]]:
    """The frame without these of its rows, and a dead letter for each; ``place`` names a row by its number here."""
    out = sorted({row for row in rows if 0 <= row < frame.height})
    if not out:
        return frame, []
    letters = [BadRecord(source_id, place(row), REASON, clip(_raw(frame, row))) for row in out]
    keep = pl.Series([True]).new_from_index(0, frame.height).scatter(out, False)
    return frame.filter(keep), letters


def _raw(frame: pl.DataFrame, row: int) -> str:
    values: dict[str, Any] = frame.row(row, named=True)
    return json.dumps(values, default=str, ensure_ascii=False)
