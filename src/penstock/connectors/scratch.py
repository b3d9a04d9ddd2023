"""Directories that belong to one process and do not outlive it.

Each is called ``penstock-...`` and is for its owner's eyes only. The process holds a lock in it for as long as it
lives, and removes it at the end. A process that is killed removes nothing; whoever makes a directory beside it next
finds the lock free, and removes what is left. A process id alone could not tell the living from the dead: ids come
back, and containers with process spaces of their own may share a disk.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import itertools
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from typing import Final, Self

PREFIX: Final = "penstock-"
_LOCK: Final = ".lock"


class Scratch:
    """A directory of this process alone. Made with ``open_scratch``, or directly at a path that is to be made."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._process = os.getpid()
        self._lock = _make_locked(directory)
        atexit.register(self.clear)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.clear()

    @property
    def kept(self) -> bool:
        return self._lock >= 0

    def clear(self) -> None:
        """Remove the directory with all that is in it. A forked child does nothing: the directory is its parent's."""
        if not self.kept or os.getpid() != self._process:
            return
        _remove(self.directory)
        os.close(self._lock)
        self._lock = -1
        atexit.unregister(self.clear)


def open_scratch(what: str, root: str | None = None) -> Scratch:
    """A new directory of this process under ``root``, or where temporary files go. Those of dead processes go first."""
    root = tempfile.gettempdir() if root is None else root
    os.makedirs(root, exist_ok=True)
    remove_dead(root)
    return Scratch(unused(os.path.join(root, f"{PREFIX}{what}-{os.getpid()}")))


def remove_dead(root: str, prefix: str = PREFIX) -> list[str]:
    """Remove the directories of this user under ``root`` whose process is gone. Returns their names."""
    removed = []
    for name in sorted(name for name in os.listdir(root) if name.startswith(prefix)):
        path = os.path.join(root, name)
        try:
            found = os.lstat(path)
            if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
                continue
            lock = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # it has just gone, or is not one of these directories
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(path)
            removed.append(name)
        except OSError:
            pass  # its process lives
        finally:
            os.close(lock)
    return removed


def unused(path: str) -> str:
    """The path, or with a number after it if there is something: a process may need several directories."""
    names = (path if n == 1 else f"{path}-{n}" for n in itertools.count(1))
    return next(name for name in names if not os.path.lexists(name))


def _remove(path: str) -> None:
    """Remove the lock last: what somebody still writes to meanwhile is then found and removed by the next process."""
    for entry in os.listdir(path):
        inner = os.path.join(path, entry)
        if entry == _LOCK:
            continue
        if os.path.isdir(inner) and not os.path.islink(inner):
            shutil.rmtree(inner, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.remove(inner)
    if os.listdir(path) == [_LOCK]:
        shutil.rmtree(path, ignore_errors=True)


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


__all__ = ["PREFIX", "Scratch", "open_scratch", "remove_dead", "unused"]
