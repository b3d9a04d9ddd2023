"""Local disk for what a process keeps of its peers' state and cannot hold in memory.

One directory for each process, ``penstock-<job>-<run>-<node>-<pid>``, under the first place that can be written to:
where Spark keeps its own local files, the directory for temporary files, ``/tmp``. Nothing in it outlives the
process: it is removed at the end, and if the process was killed, by the next one of the same job on that machine. To
tell the living from the dead, each process holds a lock in its directory for as long as it lives; a process id alone
would not do, for ids come back, and containers with process spaces of their own may share a disk.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Final
from urllib.parse import quote

import xxhash

from penstock.connectors.store import private_opener

_PREFIX: Final = "penstock-"
_LOCK: Final = "lock"
_TEMPORARY: Final = ".tmp"


class LocalSpill:
    """A directory of this process alone. Made with :func:`open_spill`, or directly for a directory that is to be
    made. Files are written under another name first, so that one is whole or not there."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._process = os.getpid()
        self._lock = _make_locked(directory)
        atexit.register(self.clear)

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

    def clear(self) -> None:
        """Remove everything, the directory too. Not from a child that was forked: it is its parent's."""
        if self._lock < 0 or os.getpid() != self._process:
            return
        shutil.rmtree(self.directory, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1
        atexit.unregister(self.clear)

    def _path(self, name: str) -> str:
        if self._lock < 0:
            raise OSError(errno.EBADF, "the spill directory was removed", self.directory)
        return os.path.join(self.directory, "s-" + quote(name, safe=""))


def open_spill(
    job: str, run: str, node: str, *, root: str | None = None, environ: Mapping[str, str] = os.environ
) -> LocalSpill:
    """A fresh directory for this process; those of dead processes of the same job are removed first."""
    roots = [root] if root is not None else spill_roots(environ)
    mine = "-".join(_part(text) for text in (job, run, node, str(os.getpid())))
    failure: OSError | None = None
    for place in roots:
        try:
            os.makedirs(place, mode=0o700, exist_ok=True)
            remove_dead(place, job)
            return LocalSpill(_unused(os.path.join(place, _PREFIX + mine)))
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


def remove_dead(root: str, job: str) -> list[str]:
    """Remove the directories of this job whose process is gone; their names."""
    removed = []
    for name in _directories(root, job):
        path = os.path.join(root, name)
        try:
            lock = os.open(os.path.join(path, _LOCK), os.O_RDWR)
        except OSError:
            continue  # just going, or another user's
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
            removed.append(name)
        except OSError:
            pass  # it lives
        finally:
            os.close(lock)
    return removed


def _unused(path: str) -> str:
    """A process may run a job twice, one after the other or side by side."""
    names = (path if n == 1 else f"{path}-{n}" for n in itertools.count(1))
    return next(name for name in names if not os.path.exists(name))


def _directories(root: str, job: str) -> Sequence[str]:
    prefix = f"{_PREFIX}{_part(job)}-"
    return sorted(name for name in os.listdir(root) if name.startswith(prefix))


def _make_locked(directory: str) -> int:
    """Make the directory with its lock taken. It gets its name only then, or another process could find it unlocked
    and take it for a dead one's."""
    with _aside(directory) as made:
        lock = os.open(os.path.join(made, _LOCK), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(made, directory)
        except OSError:
            os.close(lock)
            raise
    return lock


@contextlib.contextmanager
def _aside(directory: str) -> Iterator[str]:
    made = tempfile.mkdtemp(prefix=".making-", dir=os.path.dirname(directory))
    try:
        yield made
    except OSError:
        shutil.rmtree(made, ignore_errors=True)
        raise


def _part(text: str) -> str:
    """A part of a directory's name: without the dash that separates parts, so that no job's name begins another's.
    Letters are kept, and long names end in a sum of the rest."""
    safe = quote(text, safe="").replace("-", "%2D")
    return safe if len(safe) <= 60 else f"{safe[:40]}%{xxhash.xxh3_64_hexdigest(safe.encode())}"


__all__ = ["LocalSpill", "open_spill", "remove_dead", "spill_roots"]
