"""Starting Spark the way Penstock needs it, or taking over a session that is already there."""

from __future__ import annotations

import functools
import json
import marshal
import os
import shutil
import sys
import tempfile
import zipfile
from importlib.machinery import SourceFileLoader
from importlib.util import MAGIC_NUMBER, source_hash
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.config import Config
from penstock.doctor import check_machine
from penstock.engines.spark import archive, place, private, security, slots
from penstock.errors import EngineError, MachineError

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

DEFAULTS = {
    # Loopback TCP between JVM and Python costs a delayed acknowledgement, 40 ms, for each task.
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.scheduler.mode": "FAIR",
    "spark.task.maxFailures": "1",
    "spark.stage.maxConsecutiveAttempts": "1",
    "spark.excludeOnFailure.enabled": "false",
    # Where a stage task runs is our decision, not the shuffle's.
    "spark.shuffle.reduceLocality.enabled": "false",
    "spark.locality.wait": "10min",
    # Spark asks a dead executor for a block again for 15 s. Recovery is faster.
    "spark.shuffle.io.maxRetries": "2",
    "spark.shuffle.io.retryWait": "100ms",
    # An executor whose connection broke is gone. By default Spark waits 5 s for the master to say so.
    "spark.standalone.executorRemoveDelayOnDisconnection": "0s",
    # An executor that is about to be taken away says so first.
    "spark.decommission.enabled": "true",
    "spark.shuffle.sort.bypassMergeThreshold": "1024",
    "spark.python.worker.reuse": "true",
    # A killed task gets this time to end by itself. A worker that is killed in the middle of a task loses its slices.
    "spark.python.task.killTimeout": "3s",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # The status store keeps the last jobs even without a UI: a run that never ends must not fill the driver.
    "spark.ui.retainedJobs": "20",
    "spark.ui.retainedStages": "20",
    "spark.ui.retainedTasks": "200",
    "spark.sql.ui.retainedExecutions": "10",
    "spark.ui.liveUpdate.period": "10s",
    # Shuffle files are removed epoch by epoch, so Spark need not collect garbage for them: that stops the driver 0.2 s.
    "spark.cleaner.periodicGC.interval": "10min",
    "spark.rdd.compress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}

DAEMON = "spark.python.daemon.module"
DAEMON_MODULE = "penstock_slots"
PYTHONPATH = "spark.executorEnv.PYTHONPATH"

LOCAL_JVM = (
    "-XX:TieredStopAtLevel=1",
    "-XX:+UseSerialGC",
    "-Xmn64m",
    "-XX:MinHeapFreeRatio=10",
    "-XX:MaxHeapFreeRatio=30",
)
"""On one machine the JVMs only move bytes for the Python workers, and share the cores with them. The optimising
compiler and a concurrent collector would take more CPU, for minutes, than they save."""

LOG4J = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n%ex{none}
# Failures of tasks, executors and connections are events of ours: the controller decides, the status tells.
logger.spark.name = org.apache.spark
logger.spark.level = off
logger.netty.name = io.netty
logger.netty.level = off
"""


def is_local(master: str) -> bool:
    return master == "local" or master.startswith("local[")


def single_machine(master: str) -> bool:
    return is_local(master) or master.startswith("local-cluster")


def open_session(config: Config, name: str) -> tuple[SparkSession, bool, list[str]]:
    """The session, whether it is ours to stop, and notices."""
    check_machine(config.master)
    problems = private.self_check()
    if problems:
        raise MachineError(problems[0], remedy=f"Install it: pip install 'pyspark=={private.SUPPORTED}.0'.")
    from pyspark.sql import SparkSession

    existing = private.running_context()
    if existing is not None:
        missing = [k for k in ("spark.python.unix.domain.socket.enabled",) if existing.getConf().get(k) != DEFAULTS[k]]
        notices = [f"using the Spark session that is already running on {existing.master}."]
        notices += [f"it would be faster with {k}={DEFAULTS[k]}." for k in missing]
        if existing.getConf().get(security.AUTHENTICATE, "false") != "true":
            notices.append("it does not authenticate (spark.authenticate): others who reach its ports can control it.")
        return SparkSession.builder.getOrCreate(), False, notices
    # Executors must run this very Python: another one would lack polars, or unpickle other bytecode.
    if single_machine(config.master):
        os.environ["PYSPARK_PYTHON"] = sys.executable
    else:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings = dict(DEFAULTS)
    if not single_machine(config.master):
        del settings["spark.driver.host"], settings["spark.driver.bindAddress"]
    else:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")  # or Spark warns about the host's name
    path = archive.archive_path() if config.class_archive else None
    mapped, mapped_by_executors = archive.java_options(path, leave=is_local(config.master))
    temporary = f"-Djava.io.tmpdir={place.place()}"
    java = [f"-Dlog4j2.configurationFile={_quiet_logging()}", temporary, *mapped]
    if single_machine(config.master):
        java += LOCAL_JVM
        settings["spark.executor.extraJavaOptions"] = " ".join((*LOCAL_JVM, temporary, *mapped_by_executors))
    settings["spark.shuffle.compress"] = "false" if single_machine(config.master) else "true"
    if single_machine(config.master):
        settings.update(security.protection(config.master))
    elif config.master.startswith("k8s://"):
        settings[security.AUTHENTICATE] = "true"  # Spark makes a secret for each application there
    settings.update(config.spark)
    daemon = None if DAEMON in settings else _use_slots(settings, config.master)
    java.append(settings.get("spark.driver.extraJavaOptions", ""))  # of two flags that disagree, Java takes the last
    settings["spark.driver.extraJavaOptions"] = " ".join(java).strip()
    # An archive fits only the paths that it was made with, and those of the linked home are gone with this process.
    leaves_archive = bool(mapped) and not mapped_by_executors
    own_home = single_machine(config.master) and not leaves_archive
    try:
        with place.in_place(settings.get("spark.local.dir"), own_home):
            # Everybody can read the JVM's command line, so it has no secrets. The JVM is told them when it runs.
            private.start_jvm(
                {"spark.master": config.master, "spark.app.name": name, **security.without_secrets(settings)},
                security.PRIVATE_UMASK if single_machine(config.master) else None,
            )
            builder: Any = SparkSession.builder.master(config.master).appName(name)
            for key, value in settings.items():
                builder = builder.config(key, value)
            session = builder.getOrCreate()
    except Exception as error:
        raise EngineError(
            f"Spark did not start on {config.master}: {private.short_reason(error)}.",
            remedy="Check the address and that the master runs; 'penstock doctor' looks at this machine.",
            master=config.master,
        ) from None
    if daemon is not None and not single_machine(config.master):
        session.sparkContext.addFile(str(daemon))
    return session, True, []


def _use_slots(settings: dict[str, str], master: str) -> Path:
    """Have the processes of containers outlive their connections. Returns the file that executors elsewhere need.

    Every Python worker of the application is then started by ``python -m penstock_slots``, so that file must be found
    before anything of ours is on a path. On this machine the path is told in the environment; an executor elsewhere
    finds it in its working directory, where files go that are added to the context, and where ``-m`` looks first.
    """
    file = _slots_file()
    settings[DAEMON] = DAEMON_MODULE
    if single_machine(master):
        known = settings.get(PYTHONPATH, "").split(os.pathsep)
        settings[PYTHONPATH] = os.pathsep.join([*filter(None, known), str(file.parent)])
    return file


@functools.cache
def _slots_file() -> Path:
    """The daemon as a module of its own. As a module of the package it would load the package before it forks."""
    directory = Path(tempfile.mkdtemp(prefix="slots-", dir=place.place()))
    # The engine gives containers the driver's path for theirs.
    sys.path.append(str(directory))
    return Path(shutil.copyfile(slots.__file__, directory / f"{DAEMON_MODULE}.py"))


def _quiet_logging() -> str:
    """Spark greets with warnings before its log level can be set. Errors that matter come to the user as ours."""
    path = place.place() / "log4j2.properties"
    path.write_text(LOG4J)
    return str(path)


def ship_package(sc: SparkContext) -> None:
    """Send this package to the executors, which need not have it installed. It is sent compiled: Python does not keep
    what it compiles from an archive, so the process of each container would compile it again."""
    source = Path(__file__).resolve().parents[2]
    target = Path(tempfile.mkdtemp(prefix="ship-", dir=place.place())) / "penstock-shipped.zip"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(source.rglob("*.py")):
            name = Path("penstock") / path.relative_to(source)
            archive.write(path, name)
            archive.writestr(str(name.with_suffix(".pyc")), _compiled(path))
    sc.addPyFile(str(target))


def _compiled(path: Path) -> bytes:
    """A compiled module in the form that Python loads without comparing it with the source (PEP 552)."""
    code = SourceFileLoader(path.stem, str(path)).get_code(path.stem)  # from its cache, if it is there
    unchecked = (1).to_bytes(4, "little")
    return MAGIC_NUMBER + unchecked + source_hash(path.read_bytes()) + marshal.dumps(code)


def check_executors(sc: SparkContext, executors: int) -> None:
    """Check at the start that every executor has the driver's versions of Python and packages."""
    here = _describe()
    try:
        found = sc.parallelize(range(executors * 2), executors * 2).map(lambda _: json.dumps(_describe())).collect()
    except Exception as error:
        raise MachineError(
            f"the executors cannot run Python tasks: {private.short_reason(error)}.",
            remedy="They need the same Python and packages as the driver; set spark.pyspark.python to it.",
        ) from None
    for text in sorted(set(found)):
        there = json.loads(text)
        for name, version in here.items():
            if there.get(name) != version:
                raise MachineError(
                    f"executor on {there['host']} has {name} {there.get(name)}, the driver has {version}.",
                    remedy="Install the same versions on all machines (pip install -r requirements.txt), "
                    "or point spark.pyspark.python to an environment that has them.",
                    package=name,
                )


def _describe() -> dict[str, str]:
    """Versions that must agree between driver and executors."""
    import platform
    import sys
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": ".".join(map(str, sys.version_info[:2])), "host": platform.node()}
    for package in ("pyspark", "polars", "pyarrow", "numpy", "msgspec", "xxhash", "fsspec"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
