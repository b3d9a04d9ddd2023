"""Checks whether this machine can run Spark, so that a problem is named before Spark fails in its own words.

``run_checks`` does all checks; ``penstock doctor`` prints them. ``check_machine`` is the short form that the Spark
engine calls when a job starts: it does only the checks whose failure would surely end the job. Checks take what they
look at as arguments (environment, command runner), so tests can show them machines that do not exist.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from penstock.errors import MachineError

Outcome = Literal["ok", "warn", "fail"]

PYTHON_MIN = (3, 11)
JAVA_MIN = 17
SPARK_MINOR = "4.3"
GIB = 1024**3
MEMORY_MIN_GIB = 2.0
DISK_WARN_GIB = 5.0
DISK_MIN_GIB = 0.5
RUN_TIMEOUT_S = 20.0

INSTALL_JAVA = (
    "Install Java 17: apt-get install openjdk-17-jre-headless (Debian, Ubuntu), "
    "dnf install java-17-openjdk-headless (Fedora), brew install openjdk@17 (macOS)."
)


@dataclass(frozen=True)
class Check:
    """What one check found, and what to do unless it is ``ok``."""

    name: str
    outcome: Outcome
    found: str
    remedy: str = ""

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


Runner = Callable[[list[str]], tuple[int, str]]
"""Runs a command and returns its exit code and everything it printed. Raises OSError if it cannot be started."""


def _run(command: list[str]) -> tuple[int, str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return 124, "no answer"
    return done.returncode, done.stdout + done.stderr


def check_machine(master: str = "local[*]") -> None:
    """Raises MachineError for the first thing that would surely end a Spark job here. Takes a fraction of a second."""
    checks: list[Callable[[], Check]] = [check_pyspark, check_java]
    if master.startswith("local"):
        # Elsewhere the executors' memory is not this machine's.
        checks.append(check_memory)
    for check in checks:
        result = check()
        if result.outcome == "fail":
            raise MachineError(f"{result.name}: {result.found}.", remedy=result.remedy, check=result.name)


def run_checks(master: str = "local[*]") -> list[Check]:
    """All checks, in the order in which a job would meet their problems."""
    checks = [
        check_python(),
        check_java(),
        check_pyspark(),
        check_private_parts(),
        *(check_package(name) for name in ("pyarrow", "polars", "numpy")),
        check_executor_python(master),
        check_memory(),
        check_disk(),
        check_cores(master),
        check_host_names(),
        check_writable(),
        check_authentication(master),
        check_private_places(),
    ]
    return checks


# --- Python and its packages --------------------------------------------------------------------------------------


def check_python(version: tuple[int, ...] = sys.version_info[:3]) -> Check:
    text = ".".join(map(str, version))
    if version < PYTHON_MIN:
        return Check("Python", "fail", f"{text}, but 3.11 is needed", "Make the environment with Python 3.11 or newer.")
    return Check("Python", "ok", f"{text} ({sys.executable})")


def check_pyspark(version: str | None = None) -> Check:
    version = version or _version("pyspark")
    if version is None:
        return Check("PySpark", "fail", "not installed", "pip install -r requirements.txt")
    if version.split(".")[:2] != SPARK_MINOR.split("."):
        return Check("PySpark", "fail", f"{version}, but {SPARK_MINOR} is needed", "pip install -r requirements.txt")
    home = os.environ.get("SPARK_HOME")
    if home and not os.path.isdir(os.path.join(home, "jars")):
        return Check("PySpark", "fail", f"SPARK_HOME is {home}, which holds no Spark", "Unset SPARK_HOME.")
    return Check("PySpark", "ok", version + (f" (Spark of {home})" if home else ""))


def check_private_parts() -> Check:
    """The private parts of PySpark that the Spark engine uses. The engine knows them, and checks for them itself."""
    name = "PySpark internals"
    try:
        private = importlib.import_module("penstock.engines.spark.private")
    except ImportError as error:
        # PySpark or a part of it is missing, which another check has reported.
        return Check(name, "warn", f"not checked: {_one_line(error)}", "Correct the other findings first.")
    problems: list[str] = list(private.self_check())
    if problems:
        return Check(
            name, "fail", "; ".join(problems), f"Install PySpark {SPARK_MINOR}.0: pip install -r requirements.txt"
        )
    return Check(name, "ok", "all found")


_PACKAGE_MIN = {"pyarrow": (21,), "polars": (2, 0), "numpy": (2, 0)}


def check_package(name: str, version: str | None = None) -> Check:
    version = version or _version(name)
    if version is None:
        return Check(name, "fail", "not installed", "pip install -r requirements.txt")
    least = _PACKAGE_MIN[name]
    if tuple(int(part) for part in re.findall(r"\d+", version)[: len(least)]) < least:
        needed = ".".join(map(str, least))
        return Check(name, "fail", f"{version}, but {needed} is needed", "pip install -r requirements.txt")
    return Check(name, "ok", version)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


_ASK_PYTHON = (
    "import importlib.util as u, json, sys; "
    "print(json.dumps([list(sys.version_info[:2]), sys.prefix, "
    "[n for n in ('penstock', 'pyarrow', 'polars', 'numpy') if u.find_spec(n) is None]]))"
)


def check_executor_python(
    master: str = "local[*]", environ: Mapping[str, str] | None = None, run: Runner = _run
) -> Check:
    """Executors must run the driver's Python, or they cannot read what the driver pickles."""
    name = "executor Python"
    chosen = (os.environ if environ is None else environ).get("PYSPARK_PYTHON")
    if not chosen:
        if master.startswith("local"):
            return Check(name, "ok", "the driver's (PYSPARK_PYTHON is not set)")
        return Check(
            name,
            "warn",
            f"PYSPARK_PYTHON is not set; every worker machine needs {sys.executable}",
            "Set PYSPARK_PYTHON to a Python with Penstock installed, at the same path on every machine.",
        )
    fix = f"Unset PYSPARK_PYTHON, or set it to {sys.executable}."
    try:
        code, output = run([chosen, "-c", _ASK_PYTHON])
        version, prefix, missing = json.loads(output.strip().splitlines()[-1]) if code == 0 else (None, None, None)
    except (OSError, ValueError, IndexError):
        code, version, prefix, missing = 1, None, None, None
    if code != 0 or version is None:
        return Check(name, "fail", f"PYSPARK_PYTHON is {chosen}, which does not run", fix)
    if tuple(version) != sys.version_info[:2]:
        ours = f"{sys.version_info[0]}.{sys.version_info[1]}"
        return Check(name, "fail", f"{chosen} is {version[0]}.{version[1]}, the driver's is {ours}", fix)
    if missing:
        return Check(name, "fail", f"{chosen} lacks {', '.join(missing)}", fix)
    if prefix != sys.prefix:
        return Check(name, "warn", f"{chosen} is of another environment than the driver's; versions may differ", fix)
    return Check(name, "ok", f"{chosen}, the driver's environment")


# --- Java ---------------------------------------------------------------------------------------------------------


def parse_java_version(text: str) -> int | None:
    """The major version in what ``java -version`` prints: 17 of '17.0.15', 8 of '1.8.0_292'."""
    match = re.search(r'version "(?:1\.)?(\d+)', text)
    return int(match[1]) if match else None


def check_java(
    environ: Mapping[str, str] | None = None, run: Runner = _run, which: Callable[[str], str | None] = shutil.which
) -> Check:
    """Finds Java as Spark does: in JAVA_HOME when it is set, right or wrong, else on the PATH."""
    home = (os.environ if environ is None else environ).get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else which("java")
    if java is None:
        return Check("Java", "fail", "not found", INSTALL_JAVA)
    fix = f"Unset JAVA_HOME, or set it to a Java of {JAVA_MIN} or newer." if home else INSTALL_JAVA
    try:
        code, output = run([java, "-version"])
    except OSError:
        what = f"JAVA_HOME is {home}, which has no bin/java that runs" if home else f"{java} does not run"
        return Check("Java", "fail", what, fix)
    major = parse_java_version(output)
    if code != 0 or major is None:
        # macOS has a stub that only asks to install Java.
        first = output.strip().splitlines()[:1]
        return Check("Java", "fail", f"{java} does not tell its version ({first[0] if first else 'no output'})", fix)
    if major < JAVA_MIN:
        return Check("Java", "fail", f"{java} is version {major}, but {JAVA_MIN} is needed", fix)
    return Check("Java", "ok", f"{major} ({java})")


# --- the machine --------------------------------------------------------------------------------------------------


def check_memory(available: int | None = None) -> Check:
    if available is None:
        import psutil

        available = int(psutil.virtual_memory().available)
    gib = available / GIB
    if gib < MEMORY_MIN_GIB:
        return Check(
            "memory",
            "fail",
            f"{gib:.1f} GiB available, but {MEMORY_MIN_GIB:g} are needed",
            "Close other programs or use a larger machine.",
        )
    return Check("memory", "ok", f"{gib:.1f} GiB available")


def check_disk(free: int | None = None) -> Check:
    """Spark's shuffle files go to the temporary directory unless SPARK_LOCAL_DIRS says otherwise."""
    place = (os.environ.get("SPARK_LOCAL_DIRS") or tempfile.gettempdir()).split(",")[0]
    if free is None:
        try:
            free = shutil.disk_usage(place).free
        except OSError as error:
            return Check("disk", "fail", f"{place}: {error.strerror}", "Set SPARK_LOCAL_DIRS to a directory with room.")
    gib = free / GIB
    outcome: Outcome = "ok" if gib >= DISK_WARN_GIB else "warn" if gib >= DISK_MIN_GIB else "fail"
    remedy = "" if outcome == "ok" else "Make room, or set SPARK_LOCAL_DIRS to a directory on a larger disk."
    return Check("disk", outcome, f"{gib:.1f} GiB free in {place}", remedy)


def check_cores(master: str = "local[*]", cores: int | None = None) -> Check:
    if cores is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    asked = re.fullmatch(r"local\[(\d+).*\]", master)
    if asked and int(asked[1]) > cores:
        return Check("cores", "warn", f"{cores}, but {master} asks for {asked[1]}", f"Use local[{cores}] or local[*].")
    if cores < 2:
        return Check("cores", "warn", "1; stages cannot overlap", "Two or more cores make flows faster.")
    return Check("cores", "ok", str(cores))


def check_host_names(
    resolve: Callable[[str], str] = socket.gethostbyname,
    host: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Check:
    """Spark looks up the address of its host name when it starts, and its Python workers that of localhost."""
    host = host or socket.gethostname()
    try:
        loopback = resolve("localhost")
    except OSError:
        return Check(
            "host names", "fail", "localhost has no address", "Add the line '127.0.0.1 localhost' to /etc/hosts."
        )
    fixed = (os.environ if environ is None else environ).get("SPARK_LOCAL_IP")
    if fixed:
        return Check("host names", "ok", f"localhost is {loopback}; SPARK_LOCAL_IP is {fixed}")
    try:
        return Check("host names", "ok", f"localhost is {loopback}, {host} is {resolve(host)}")
    except OSError:
        remedy = f"Set SPARK_LOCAL_IP=127.0.0.1, or add the line '127.0.1.1 {host}' to /etc/hosts."
        return Check("host names", "fail", f"this host's name, {host}, has no address", remedy)


def check_writable(directory: str | None = None) -> Check:
    place = directory or os.getcwd()
    try:
        # Trying is the only sure way: permissions, read-only mounts and quotas all show.
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"penstock")
    except OSError as error:
        return Check(
            "current directory",
            "warn",
            f"{place}: {error.strerror}",
            "Write outputs and checkpoints to another directory.",
        )
    return Check("current directory", "ok", f"{place} can be written to")


# --- who else gets in ---------------------------------------------------------------------------------------------

_ADMINISTRATOR = (
    "The cluster's administrator sets spark.authenticate=true and spark.authenticate.secret for the master and the "
    "workers, and you the same in [penstock.spark] of a penstock.toml that only you can read: see docs/security.md."
)


def check_authentication(master: str = "local[*]", settings: Mapping[str, str] | None = None) -> Check:
    """Whether others can give orders to the Spark that jobs run on. ``settings`` are those of penstock.toml."""
    name = "authentication"
    if settings is None:
        settings = _spark_settings()
    asked = settings.get("spark.authenticate", "").lower()
    if master.startswith("local"):
        if asked == "false":
            return Check(
                name, "warn", "spark.authenticate is off: every user of this machine can run code as you",
                "Leave spark.authenticate out.",
            )  # fmt: skip
        return Check(name, "ok", "every session has a secret of its own")
    if asked == "true" or master.startswith("k8s://"):
        if settings.get("spark.network.crypto.enabled", settings.get("spark.ssl.rpc.enabled", "")).lower() != "true":
            return Check(
                name, "warn", "connections are authenticated and not encrypted",
                "Set spark.network.crypto.enabled=true, for the master and the workers too, where others share the "
                "network: see docs/security.md.",
            )  # fmt: skip
        return Check(name, "ok", "connections are authenticated and encrypted")
    if master == "yarn":
        remedy = "Set spark.authenticate=true; YARN makes a secret for each job. See docs/security.md."
    else:
        remedy = _ADMINISTRATOR
    return Check(name, "warn", f"whoever reaches {master} or the job's ports can run code as you", remedy)


def _spark_settings() -> Mapping[str, str]:
    from penstock.config import Config
    from penstock.errors import ConfigError

    try:
        return Config.load().spark
    except ConfigError:
        return {}  # the job will say what is wrong with it


def check_private_places(environ: Mapping[str, str] | None = None) -> Check:
    """Places of ours from which code is loaded, or a job steered: nobody else may write there."""
    name = "private places"
    environ = os.environ if environ is None else environ
    home = environ.get("HOME") or os.path.expanduser("~")
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    for place in (home, cache, os.path.join(cache, "penstock"), os.path.join(home, ".penstock")):
        try:
            found = os.stat(place)
        except OSError:
            continue
        if found.st_uid not in (os.geteuid(), 0) or found.st_mode & 0o002:
            return Check(name, "warn", f"others can write to {place}", f"Run chmod go-w {place}, as its owner.")
    return Check(name, "ok", "only you can write to them")


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def report(checks: list[Check]) -> dict[str, Any]:
    """The JSON form of ``penstock doctor --json``."""
    return {"ok": all(check.outcome != "fail" for check in checks), "checks": [check.to_dict() for check in checks]}
