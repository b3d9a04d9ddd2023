"""Starting Spark the way Penstock needs it, or taking over a session that is already there."""

from __future__ import annotations

import atexit
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
from penstock.engines.spark import archive, private, security, slots
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
    # Who asks a dead executor for a block would else ask again for a quarter of a minute. Recovery is faster.
    "spark.shuffle.io.maxRetries": "2",
    "spark.shuffle.io.retryWait": "100ms",
    # A connection that broke is an executor that is gone. Else a standalone master is given 5 s to say so first.
    "spark.standalone.executorRemoveDelayOnDisconnection": "0s",
    # An executor that is to go says so first, and is not just gone.
    "spark.decommission.enabled": "true",
    "spark.shuffle.sort.bypassMergeThreshold": "1024",
    "spark.python.worker.reuse": "true",
    # A killed task may need a moment to its end. A worker that is killed in the middle has lost its slices.
    "spark.python.task.killTimeout": "3s",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # The status store keeps the last jobs even without a UI: a run that never ends must not fill the driver.
    "spark.ui.retainedJobs": "20",
    "spark.ui.retainedStages": "20",
    "spark.ui.retainedTasks": "200",
    "spark.sql.ui.retainedExecutions": "10",
    "spark.ui.liveUpdate.period": "10s",
    # What an epoch leaves goes when it is done. A collection that is asked for stops the driver for 0.2 s.
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
"""On one machine the JVMs share its cores with the Python workers, and move bytes for them. The optimising compiler and
a concurrent collector take more of these cores, for minutes, than their work gives back."""

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
    mapped, mapped_by_executors = archive.java_options(archive.archive_path() if config.class_archive else None)
    java = [f"-Dlog4j2.configurationFile={_quiet_logging()}", *mapped]
    if single_machine(config.master):
        java += LOCAL_JVM
        settings["spark.executor.extraJavaOptions"] = " ".join((*LOCAL_JVM, *mapped_by_executors))
    settings["spark.shuffle.compress"] = "false" if single_machine(config.master) else "true"
    if single_machine(config.master):
        settings.update(security.protection(config.master))
    elif config.master.startswith("k8s://"):
        settings[security.AUTHENTICATE] = "true"  # Spark makes a secret for each application there
    settings.update(config.spark)
    daemon = None if DAEMON in settings else _use_slots(settings, config.master)
    java.append(settings.get("spark.driver.extraJavaOptions", ""))  # of two flags that disagree, Java takes the last
    settings["spark.driver.extraJavaOptions"] = " ".join(java).strip()
    try:
        # On the JVM's command line, which everybody can read, is what is no secret. The rest it is told when it runs.
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
    """Have containers' processes outlive their connections. Returns the file that executors elsewhere need.

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
    """The daemon as a module of its own: as one of the package it would load all of that before it forks."""
    directory = Path(tempfile.mkdtemp(prefix="penstock-slots-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    # The engine gives containers the driver's path for theirs.
    sys.path.append(str(directory))
    return Path(shutil.copyfile(slots.__file__, directory / f"{DAEMON_MODULE}.py"))


def _quiet_logging() -> str:
    """Spark greets with warnings before its log level can be set. Errors that matter come to the user as ours."""
    path = Path(tempfile.mkdtemp(prefix="penstock-log4j-")) / "log4j2.properties"
    path.write_text(LOG4J)
    atexit.register(shutil.rmtree, path.parent, ignore_errors=True)
    return str(path)


def ship_package(sc: SparkContext) -> None:
    """Send this very package to the executors: they need no installation of it. It goes compiled, too: Python keeps
    nothing that it compiles from an archive, and every container's process would do it anew."""
    source = Path(__file__).resolve().parents[2]
    target = Path(tempfile.mkdtemp(prefix="penstock-ship-")) / "penstock-shipped.zip"
    atexit.register(shutil.rmtree, target.parent, ignore_errors=True)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(source.rglob("*.py")):
            name = Path("penstock") / path.relative_to(source)
            archive.write(path, name)
            archive.writestr(str(name.with_suffix(".pyc")), _compiled(path))
    sc.addPyFile(str(target))


def _compiled(path: Path) -> bytes:
    """A module as Python keeps it, in the form that is taken without a look at the source (PEP 552)."""
    code = SourceFileLoader(path.stem, str(path)).get_code(path.stem)  # from its cache, if it is there
    unchecked = (1).to_bytes(4, "little")
    return MAGIC_NUMBER + unchecked + source_hash(path.read_bytes()) + marshal.dumps(code)


def check_executors(sc: SparkContext, executors: int) -> None:
    """Every executor must have our Python and package versions: say so at the start, not in the middle."""
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
