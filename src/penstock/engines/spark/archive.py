"""An archive of Spark's classes that the JVMs on this machine map instead of loading each class anew.

A JVM of Spark's finds, checks and links some ten thousand classes in three hundred files, one after the other: five
seconds of CPU for an executor, ten for a driver. Java can write the classes that a JVM has loaded to an archive when
the JVM ends (JEP 350), and other JVMs can map it. The first driver of a user in local mode leaves such an archive in
the user's cache directory; later drivers use it, and so do their executors on this machine. Java does not use an
archive of another Java or of other files, so an outdated one does no harm.

``python -m penstock.engines.spark.archive`` makes the archive at once, for ``make test``, which starts Spark often.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.engines.spark.security import is_private

FORGET_S = 30 * 86_400.0
"""An archive that nobody has used for this long is removed when another is made: Java or Spark has been replaced."""
WRITING_S = 120.0
"""Writing an archive takes at most this long. Java writes its first bytes last."""
HEAD = 4
"""Bytes at the start of a file that are not all zero in a whole archive."""

QUIET = "-Xlog:cds=off,cds+dynamic=off"
"""Without this Java prints on every start which classes, or which archive, it leaves out."""


def archive_path(environ: Mapping[str, str] | None = None) -> Path | None:
    """The path of the archive for this Java and this Spark, whether it is there or not. None: Java or Spark is not
    found."""
    environ = os.environ if environ is None else environ
    import pyspark

    home = environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else shutil.which("java", path=environ.get("PATH"))
    jars = Path(environ.get("SPARK_HOME") or pyspark.__path__[0]) / "jars"
    if java is None:
        return None
    try:
        of_java, of_jars = os.stat(java), jars.stat()
    except OSError:
        return None
    what = (os.path.realpath(java), of_java.st_mtime_ns, of_java.st_size, str(jars), of_jars.st_mtime_ns)
    root = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".cache")
    name = f"spark-{pyspark.__version__}-{hashlib.sha256(repr(what).encode()).hexdigest()[:12]}.jsa"
    return Path(root) / "penstock" / name


def java_options(path: Path | None, leave: bool = True, now: float | None = None) -> tuple[list[str], list[str]]:
    """Options for the driver's JVM and for executors on this machine: use the archive if it is there. If it is not,
    and with ``leave``, the driver writes it at its end."""
    if path is None:
        return [], []
    now = time.time() if now is None else now
    if path.parent.exists() and not is_private(path.parent):
        return [], []  # Java runs what is in an archive, and somebody else could have put it there
    try:
        with path.open("rb") as file:
            whole = any(file.read(HEAD))
        if whole:
            with contextlib.suppress(OSError):
                os.utime(path)
            use = [f"-XX:SharedArchiveFile={path}", QUIET]
            return use, use
        if now - path.stat().st_mtime < WRITING_S:
            return [], []
    except FileNotFoundError:
        pass
    except OSError:
        return [], []
    if not leave:
        return [], []
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        for old in path.parent.glob("spark-*.jsa"):
            if now - old.stat().st_mtime > FORGET_S:
                old.unlink()
    except OSError:
        return [], []  # Spark starts without it, only slower
    if " " in str(path) or not os.access(path.parent, os.W_OK):
        return [], []  # options are separated by spaces
    return [f"-XX:ArchiveClassesAtExit={path}", QUIET], []


def main(arguments: Sequence[str]) -> None:
    """Make the archive, if there is none: a process runs a small job, and its JVM writes the archive at its end."""
    if arguments:
        from penstock.config import Config
        from penstock.engines.spark.session import open_session

        session, _, _ = open_session(Config(master="local[1]"), "archive")
        session.sparkContext.parallelize(range(2), 2).map(str).collect()
        session.stop()
        return
    path = archive_path()
    driver, executors = java_options(path)
    if executors or not driver:
        return
    print("setup: writing an archive of Spark's classes, for the tests (once, half a minute)", flush=True)
    done = subprocess.run([sys.executable, "-m", __spec__.name, "job"], capture_output=True, text=True, check=False)
    until = time.monotonic() + WRITING_S
    while done.returncode == 0 and time.monotonic() < until:
        if java_options(path)[1]:
            return
        time.sleep(0.2)
    said = done.stderr.strip().splitlines()
    print(f"setup: no archive was made, Spark starts without it{f' ({said[-1]})' if said else ''}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
