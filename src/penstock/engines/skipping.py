"""``penstock skip``: give an order to a job that is stopped, by its checkpoint directory.

What the job has logged says which source a file belongs to, and how far the newest checkpoint goes. The order itself,
and what a start does with it, is in ``connectors/skips.py``.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from typing import Any

from penstock.connectors.base import Offset
from penstock.connectors.skips import Skip, read_skips, write_skip
from penstock.connectors.storage import absolute, pack_path
from penstock.connectors.store import DirectoryLock, FsspecStore, local_path
from penstock.errors import ConfigError
from penstock.state.checkpoint import Manifest
from penstock.state.store import Store


@dataclass
class _Input:
    """What is on record of one source."""

    since: Offset | None = None
    """How far the newest checkpoint goes."""
    end: Offset | None = None
    """How far the log goes."""
    files: dict[str, int] = field(default_factory=dict)
    """path -> its index in the catalogue"""

    def learn(self, facts: list[Any]) -> None:
        for fact in facts:
            if isinstance(fact, dict) and {"i", "path"} <= fact.keys():
                self.files[fact["path"]] = fact["i"]


def order_skip(
    place: str, *, source: str | None, file: str | None, offset: str | None, now_s: float | None = None
) -> list[str]:
    """Write the order and return what to tell the user. Raises CheckpointInUse while the job runs."""
    if file is None and offset is None:
        raise ConfigError("skip needs --file or --offset.", remedy="For example: penstock skip state/ --file in/a.csv")
    store = _store(place)
    now_s = time.time() if now_s is None else now_s
    with DirectoryLock(store, job="penstock skip", now_s=now_s):
        inputs = _inputs(store)
        path = None if file is None else _path(file, inputs)
        id = _source(inputs, source, path)
        known = inputs[id]
        record = None if offset is None else _record(offset, known, path)
        warnings = _check(id, known, path, record)
        said_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now_s))
        skip = Skip(id, path, record, known.since, said_at)
        name = write_skip(store, skip)
    return [
        f"{skip}: written as {name}. The next start of the job does so and puts out a dead letter for it.",
        *warnings,
    ]


def list_skips(place: str) -> list[str]:
    """The orders that a job has, one text for each."""
    store = _store(place)
    return [f"{skip}, said at {skip.said_at}" for id in sorted(_inputs(store)) for skip in read_skips(store, id)]


def _store(place: str) -> FsspecStore:
    root = local_path(place)
    store = FsspecStore(place)
    if (root is not None and not os.path.isdir(root)) or not store.exists("job.json"):
        raise ConfigError(f"{place}: no job has kept its state here.", remedy="Give a job's checkpoint directory.")
    return store


def _inputs(store: Store) -> dict[str, _Input]:
    """The sources that the newest checkpoint and the log know."""
    found: dict[str, _Input] = {}
    names = sorted(store.list("manifests/"))
    covered = 0
    if names:
        manifest = Manifest.from_bytes(store.get(names[-1]), names[-1])
        covered = manifest.epoch
        for id, known in manifest.sources.items():
            found[id] = _Input(known["offset"], known["offset"])
            found[id].learn(known["facts"])
    for name in sorted(store.list("log/")):
        if int(name.split("/")[-1].split(".")[0]) > covered:
            record = json.loads(store.get(name).partition(b"\n")[2])
            for id, logged in record["ranges"].items():
                known = found.setdefault(id, _Input())
                known.end = logged["end"]
                known.learn(logged["facts"])
    return found


def _path(file: str, inputs: dict[str, _Input]) -> str:
    """The file as the catalogue names it."""
    if any(file in known.files for known in inputs.values()):
        return file
    return pack_path(absolute(file))


def _source(inputs: dict[str, _Input], source: str | None, path: str | None) -> str:
    if source is not None:
        if source not in inputs:
            known = ", ".join(sorted(inputs)) or "none"
            raise ConfigError(f"nothing is logged of a source '{source}'.", remedy=f"The sources are: {known}.")
        return source
    having = [id for id, known in inputs.items() if path is not None and path in known.files]
    if not having and path is not None:
        raise ConfigError(
            f"{path}: no source has logged this file, so nothing waits for it.",
            remedy="Correct it or take it away, and start the job again; or name its source: --source ID.",
        )
    candidates = having or list(inputs)
    if len(candidates) != 1:
        raise ConfigError(
            "it is not clear which source is meant.", remedy=f"Add --source, one of {', '.join(sorted(candidates))}."
        )
    return candidates[0]


def _record(offset: str, known: _Input, path: str | None) -> str:
    shape = set(known.end or known.since or {})
    if path is not None or shape == {"row"}:
        if not (offset.isascii() and offset.isdecimal()):
            what = "a byte of a text file, or a row of a Parquet file" if path is not None else "the number of a row"
            raise ConfigError(f"--offset {offset}: not a whole number.", remedy=f"Give {what}.")
    elif shape == {"segment", "row"}:
        first, _, second = offset.partition(":")
        if not (first.isdecimal() and second.removeprefix("bad").isdecimal()):
            raise ConfigError(
                f"--offset {offset}: not a place in this source.",
                remedy="Give SEGMENT:ROW, or SEGMENT:badN as dead letters and errors say it.",
            )
    elif shape == {"file", "at"}:
        raise ConfigError("this source reads files.", remedy="Name the file too: --file F.")
    return offset


def _check(id: str, known: _Input, path: str | None, record: str | None) -> list[str]:
    """Refuse an order about what a checkpoint covers, and tell what an order cannot undo."""
    since, end = known.since, known.end
    if path is not None and path in known.files:
        index = known.files[path]
        at = int(record) if record is not None else None
        if since is not None and (
            index < since["file"] or (index == since["file"] and at is not None and at < since["at"])
        ):
            raise ConfigError(
                f"the newest checkpoint covers that part of {path} already: it is not read again.",
                remedy="There is nothing to leave out.",
            )
        if end is not None and (index, at or 0) < (end["file"], end["at"]):
            return [
                "Epochs after the newest checkpoint have it in their input and run again without it. If they have put "
                "rows of it out already, those stay in the output."
            ]
    elif since is not None and record is not None and since.keys() == {"row"} and int(record) < since["row"]:
        raise ConfigError(
            f"the newest checkpoint covers row {record} of '{id}' already: it is not read again.",
            remedy="There is nothing to leave out.",
        )
    return []


__all__ = ["list_skips", "order_skip"]
