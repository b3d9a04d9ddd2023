"""Where the JVM of this process writes: below one directory, which is gone when the process is.

Spark and the libraries in it leave temporary files in many places, and a process that is killed leaves them for good:
native libraries and sockets in Java's temporary directory, blocks in Spark's local directories, a copy of all that was
sent to each executor of a ``local-cluster`` in ``SPARK_HOME/work``. Here all of these are in a scratch directory.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from penstock.connectors.scratch import Scratch, open_scratch

ROOT_CHARS_MAX = 40
"""The path of a Unix socket has room for 103 characters; those of Python workers have 63 below this root."""
LOCAL_DIRS = "SPARK_LOCAL_DIRS"
HOME = "SPARK_HOME"
WRITTEN = ("work", "logs")
"""What Spark writes below its home."""


@functools.cache
def place() -> Path:
    """The scratch directory of this process. One JVM serves all sessions of a process, so it is kept to the end."""
    root = tempfile.gettempdir()
    usable = len(root) <= ROOT_CHARS_MAX and " " not in root  # Java's options are separated by spaces
    return Path(open_scratch("spark", root if usable else "/tmp").directory)


@functools.cache
def _local_scratch(root: str) -> Scratch:
    return open_scratch("blocks", root)


def local_dirs(asked: str) -> str:
    """Spark's local directories: in each that the user asked for one that is removed at the end."""
    found = []
    for root in filter(None, (part.strip() for part in asked.split(","))):
        try:
            found.append(_local_scratch(root).directory)
        except OSError:
            found.append(root)  # Spark says what is wrong with it
    return ",".join(found) or str(place())


@functools.cache
def home(real: Path) -> Path:
    """Spark's home as links to the real one. Only the directories that Spark writes to are not linked."""
    linked = place() / "home"
    linked.mkdir()
    for entry in sorted(real.iterdir()):
        if entry.name not in WRITTEN:
            (linked / entry.name).symlink_to(entry)
    return linked


def real_home(environ: Mapping[str, str] | None = None) -> Path:
    import pyspark

    environ = os.environ if environ is None else environ
    return Path(environ.get(HOME) or pyspark.__path__[0]).absolute()


@contextlib.contextmanager
def in_place(local_dir: str | None, alone: bool) -> Iterator[None]:
    """While this lasts a JVM that is started writes to the scratch directory. ``local_dir``: what the user set as
    ``spark.local.dir``. ``alone``: the JVM needs a home of its own to write to, for its executors run there."""
    before = {name: os.environ.get(name) for name in (LOCAL_DIRS, HOME)}
    os.environ[LOCAL_DIRS] = local_dirs(before[LOCAL_DIRS] or local_dir or "")
    if alone:
        os.environ[HOME] = str(home(real_home()))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


__all__ = ["home", "in_place", "local_dirs", "place", "real_home"]
