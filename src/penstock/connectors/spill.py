"""Local disk for what a process keeps of its peers' state and cannot hold in memory.

One scratch directory for each process, ``penstock-<job>-<run>-<node>-<pid>``, under the first place that can be written
to: where Spark keeps its own local files, the directory for temporary files, ``/tmp``.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

import xxhash

from penstock.connectors.scratch import PREFIX, Scratch, remove_dead, unused
from penstock.connectors.store import private_opener

_TEMPORARY: Final = ".tmp"


class LocalSpill(Scratch):
    """Files in a scratch directory. Files are written under another name first, so that one is whole or not there."""

    def put(self, name: str, data: bytes) -> None:
        path = self._path(name)
        try:
            with open(path + _TEMPORARY, "wb", opener=private_opener) as file:
                file.write(data)
            os.replace(path + _TEMPORARY, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.remove(path + _TEMPORARY)  # half a file is of no use, and the disk may be full
            raise

    def get(self, name: str) -> bytes:
        with open(self._path(name), "rb") as file:
            return file.read()

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.remove(self._path(name))

    def _path(self, name: str) -> str:
        if not self.kept:
            raise OSError(errno.EBADF, "the spill directory was removed", self.directory)
        return os.path.join(self.directory, "s-" + quote(name, safe=""))


def open_spill(
    job: str, run: str, node: str, *, root: str | None = None, environ: Mapping[str, str] = os.environ
) -> LocalSpill:
    """A new directory of this process. Those of dead processes are removed first."""
    roots = [root] if root is not None else spill_roots(environ)
    mine = "-".join(_part(text) for text in (job, run, node, str(os.getpid())))
    failure: OSError | None = None
    for place in roots:
        try:
            os.makedirs(place, mode=0o700, exist_ok=True)
            remove_dead(place)
            return LocalSpill(unused(os.path.join(place, PREFIX + mine)))
        except OSError as error:
            failure = failure or error
    raise OSError(
        errno.EACCES,
        f"none of {', '.join(roots)} can be written to, for backups that do not fit into memory ({failure})",
    )


def spill_roots(environ: Mapping[str, str]) -> list[str]:
    """Places to try, best first: Spark's local directories are on disks meant for such files."""
    places = [*environ.get("SPARK_LOCAL_DIRS", "").split(","), environ.get("TMPDIR", ""), "/tmp"]
    return list(dict.fromkeys(os.path.abspath(place.strip()) for place in places if place.strip()))


def _part(text: str) -> str:
    """A part of a directory's name: without the dash that separates parts, so that no job's name begins another's.
    Letters are kept, and long names end in a sum of the rest."""
    safe = quote(text, safe="").replace("-", "%2D")
    return safe if len(safe) <= 60 else f"{safe[:40]}%{xxhash.xxh3_64_hexdigest(safe.encode())}"


__all__ = ["LocalSpill", "open_spill", "spill_roots"]
