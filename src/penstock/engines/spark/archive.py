"""An archive of Spark's classes that every JVM on this machine maps instead of loading them anew.

A JVM of Spark's finds some ten thousand classes in three hundred files, checks and links them: five seconds of a core
for an executor, ten for a driver, and twice as long by the clock where there are few cores. Java can write down what a
JVM has loaded when it ends (JEP 350), for others to map. The first driver on a machine does that, in a directory of the
user's own; those that come later use it, and so do their executors on this machine. An archive that does not fit, of
another Java or with other files, is not used by Java, so that it can never do harm.

``python -m penstock.engines.spark.archive`` makes it at once; ``make setup`` does.
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
"""An archive that nobody used for so long goes when another is made: Java or Spark has been replaced since."""
WRITING_S = 120.0
"""So long at most an archive is being written. It has no head until it is whole."""
HEAD = 4

QUIET = "-Xlog:cds=off,cds+dynamic=off"
"""Java would tell on every start of classes, or archives, that it leaves out."""


def archive_path(environ: Mapping[str, str] | None = None) -> Path | None:
    """Where the archive for this Java and this Spark is, or belongs; None where there can be none."""
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


def java_options(path: Path | None, now: float | None = None) -> tuple[list[str], list[str]]:
    """For the driver's JVM, and for executors on this machine: use the archive, or have the driver leave one."""
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
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        for old in path.parent.glob("spark-*.jsa"):
            if now - old.stat().st_mtime > FORGET_S:
                old.unlink()
    except OSError:
        return [], []  # nobody needs it
    if " " in str(path) or not os.access(path.parent, os.W_OK):
        return [], []  # options are separated by spaces
    return [f"-XX:ArchiveClassesAtExit={path}", QUIET], []


def main(arguments: Sequence[str]) -> None:
    """Make the archive, if there is none: a small job as others will be, whose JVM writes it when the process ends."""
    if arguments:
        from penstock.config import Config
        from penstock.engines.spark.session import open_session

        session, _, _ = open_session(Config(master="local-cluster[1,1,1024]"), "archive")
        session.sparkContext.parallelize(range(2), 2).map(str).collect()
        session.stop()
        return
    path = archive_path()
    driver, executors = java_options(path)
    if executors or not driver:
        return
    print("setup: an archive of Spark's classes, so that Spark starts faster (once, half a minute)", flush=True)
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
