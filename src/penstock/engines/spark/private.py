"""Every touch of PySpark's private parts, in one place.

Penstock runs Python on raw shuffle blocks, on executors of its choice, in worker processes of its choice. PySpark has
all that inside, but not in its public interface. What is used:

* ``PythonRDD``, ``PairwiseRDD``, ``PythonPartitioner``, ``SimplePythonFunction``: raw bytes through Python and the
  shuffle, without pickling;
* ``SparkContext.submitMapStage``: runs a stage up to its shuffle files, without a result stage after it;
* ``ParallelCollectionRDD`` with location preferences, zipped to a shuffle (``ZippedPartitionsRDD2``): tasks run on the
  executor we name;
* ``PartitionPruningRDD``: one RDD for each slot, so that each may have environment variables, and so a Python worker,
  of its own;
* the daemon of Python workers, ``slots.py`` in its place: a container's process outlives its connections;
* ``launch_gateway``: the driver's JVM with a file mode mask of its own, and without secrets on its command line;
* the context cleaner: shuffle files go when their epoch is done, not when the JVM collects garbage;
* the scheduler's backend: which executors there are, and which of them get no tasks any more.

``self_check`` looks for each of them at start-up, so that another PySpark fails with a sentence and not in the middle
of a job.
"""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import subprocess
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark import SparkContext

SUPPORTED = "4.3"
PARTITIONER_ID = 7_365_737_402
"""Any constant: partitioners with one id and one size are equal, which is what lets shuffles be united partition by
partition.
"""

JVM_END_S = 2.0
"""A JVM whose connections are broken has this long to end."""

SETS_MAX = 1_024
"""Sets of partitions that are remembered. A job that changes its shape makes new ones."""

_BARE_PATH = re.compile(r"(/\S+)")
"""All that Java says of a file that is not there."""
_GONE = re.compile(r"NoSuchFileException: (/\S*(?:blockmgr|spark-|executor-)\S*)")
_LOST_PARTITION = re.compile(r"Lost task (\d+)\.\d+ in stage")
_PROCESS_ENDED = ("Python worker exited unexpectedly", "Python worker process terminated")
_LOST_TASK = re.compile(r"Lost task \S+ in stage \S+ \(TID \d+\) \(\S+ executor (\w+)\)")


def self_check() -> list[str]:
    """Problems with the installed PySpark, each a sentence; none if it fits."""
    try:
        import pyspark
        from pyspark import SparkContext, accumulators, daemon, java_gateway, serializers, taskcontext
        from pyspark.core import broadcast, rdd
    except ImportError as error:
        return [f"PySpark cannot be imported: {error}."]
    problems = []
    if not pyspark.__version__.startswith(SUPPORTED + "."):
        problems.append(f"PySpark {pyspark.__version__} is installed; Penstock needs {SUPPORTED}.")
    for module, names in (
        (rdd, ("_prepare_for_python_RDD", "PipelinedRDD")),
        (serializers, ("NoOpSerializer",)),
        (accumulators, ("_accumulatorRegistry", "AccumulatorParam")),
        (daemon, ("manager",)),
        (broadcast, ("_broadcastRegistry",)),
        (taskcontext, ("TaskContext", "BarrierTaskContext")),
        (java_gateway, ("launch_gateway",)),
        (SparkContext, ("_ensure_initialized", "_gateway")),
        (taskcontext.TaskContext, ("_setTaskContext",)),
    ):
        problems += [f"{module.__name__} has no {n} any more." for n in names if not hasattr(module, n)]
    return problems


def running_context() -> SparkContext | None:
    """The SparkContext of this process, if one runs."""
    from pyspark import SparkContext

    return SparkContext._active_spark_context


def start_jvm(settings: Mapping[str, str], umask: int | None) -> None:
    """Start the driver's JVM, if there is none in this process. These settings are on its command line."""
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway

    if SparkContext._gateway is not None:
        return
    conf = SparkConf()
    for name, value in settings.items():
        conf.set(name, value)
    gateway = launch_gateway(conf, popen_kwargs={} if umask is None else {"umask": umask})
    SparkContext._ensure_initialized(gateway=gateway)


def _not_py4j(record: logging.LogRecord) -> bool:
    return "/py4j/" not in record.pathname


def quieten(sc: SparkContext) -> None:
    """Py4J and the server of accumulators print tracebacks when the JVM goes. It is told in words of ours."""
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    logging.getLogger().addFilter(_not_py4j)  # it also logs to the root; a filter that is there is not added again
    server: Any = sc._accumulatorServer
    server.handle_error = lambda *_: None


def jvm_end() -> str:
    """How the driver's JVM ended; empty while it runs, or if it was not started by this process."""
    from pyspark import SparkContext

    process: subprocess.Popen[bytes] | None = getattr(SparkContext._gateway, "proc", None)
    code = None if process is None else process.poll()
    if process is None or code is None:
        return ""
    how = f"was killed by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with code {code}"
    return f"Spark's JVM (process {process.pid}) {how}"


def jvm_lost() -> str:
    """The same, asked after something failed: a connection breaks a moment before its process has ended."""
    from pyspark import SparkContext

    gateway: Any = SparkContext._gateway
    if gateway is None:
        return ""
    try:
        gateway.jvm.java.lang.System.nanoTime()
        return ""
    except Exception:
        if getattr(gateway, "proc", None) is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                gateway.proc.wait(JVM_END_S)
    return jvm_end() or "Spark's JVM does not answer any more"


def forget_jvm() -> None:
    """After the end of the JVM: another session of this process begins with another one."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    context = SparkContext._active_spark_context
    with warnings.catch_warnings(), contextlib.suppress(Exception):
        warnings.simplefilter("ignore")
        if context is not None:
            context.stop()
    SparkContext._active_spark_context = SparkContext._gateway = SparkContext._jvm = None
    SparkSession._instantiatedSession = None  # type: ignore[assignment]


class Jvm:
    """Handles to the JVM's classes, looked up once: py4j resolves a dotted name with one call for each dot."""

    def __init__(self, sc: SparkContext) -> None:
        self.sc = sc
        jvm: Any = sc._jvm
        self.jvm = jvm
        self.jsc: Any = sc._jsc
        self.scala: Any = sc._jsc.sc()
        self.gateway: Any = sc._gateway
        self.PythonRDD = jvm.PythonRDD
        self.PairwiseRDD = jvm.PairwiseRDD
        self.PythonPartitioner = jvm.org.apache.spark.api.python.PythonPartitioner
        self.Function = jvm.SimplePythonFunction
        self.Pruning = jvm.org.apache.spark.rdd.PartitionPruningRDD
        self.Collection = jvm.org.apache.spark.rdd.ParallelCollectionRDD
        self.JavaRDD = jvm.org.apache.spark.api.java.JavaRDD
        self.JavaPairRDD = jvm.org.apache.spark.api.java.JavaPairRDD
        self.PythonUtils = jvm.org.apache.spark.api.python.PythonUtils
        self.ArrayList = jvm.java.util.ArrayList
        self.HashMap = jvm.java.util.HashMap
        self.Zipped = jvm.org.apache.spark.rdd.ZippedPartitionsRDD2
        # Spark takes Kryo for byte arrays, and makes a new one for each block of each task: a sixth of an executor's
        # time in small epochs. Java's serializer costs nothing to make, and writes bytes as well.
        self.serializer = jvm.org.apache.spark.serializer.JavaSerializer(self.scala.getConf())
        self._partitioners: dict[int, Any] = {}
        self._sets: dict[tuple[int, ...], Any] = {}
        self._zip: Any = None
        self._decommissioning: Any = None
        self._lock = threading.Lock()
        self.any_tag = self.jsc.emptyRDD().classTag()

    # -- functions -------------------------------------------------------------------------------------------------

    def function(self, call: Callable[[int, Iterable[bytes]], Iterable[bytes]], env: dict[str, str]) -> Any:
        """A Python function on raw bytes, to run in workers that have exactly this environment."""
        from pyspark.core.rdd import _prepare_for_python_RDD
        from pyspark.serializers import NoOpSerializer

        with self._lock:  # it collects broadcast variables in a set that all threads share
            command = (call, None, NoOpSerializer(), NoOpSerializer())
            pickled, broadcasts, environment, includes = _prepare_for_python_RDD(self.sc, command)
        return self.Function(
            bytearray(pickled),
            {**environment, **env},
            includes,
            self.sc.pythonExec,
            self.sc.pythonVer,
            broadcasts,
            self.sc._javaAccumulator,
        )

    # -- RDDs ------------------------------------------------------------------------------------------------------

    def placed(self, elements: int, locations: Sequence[str | None]) -> Any:
        """An RDD with one partition for each location (``executor_<host>_<id>``), preferably computed there. Each
        partition has this number of empty elements."""
        data = self.ArrayList()
        for _ in range(elements * len(locations)):
            data.add(bytearray())
        prefs = self.HashMap()
        for i, location in enumerate(locations):
            if location is not None:
                prefs.put(i, self.PythonUtils.toSeq([location]))
        scala_map = self.PythonUtils.toScalaMap(prefs)
        return self.Collection(self.scala, self.PythonUtils.toSeq(data), len(locations), scala_map, self.any_tag)

    def python(self, parent: Any, function: Any) -> Any:
        return self.PythonRDD(parent, function, False, False).asJavaRDD()

    def union(self, rdds: Sequence[Any]) -> Any:
        """Partitions one after another."""
        if len(rdds) == 1:
            return rdds[0]
        array = self.gateway.new_array(self.JavaRDD, len(rdds))
        for i, each in enumerate(rdds):
            array[i] = each
        return self.jsc.union(array)

    def shuffle(self, rdd: Any, partitions: int) -> Any:
        """Alternating packed partition numbers and blobs -> the shuffled pair RDD."""
        if partitions not in self._partitioners:
            self._partitioners[partitions] = self.PythonPartitioner(partitions, PARTITIONER_ID)
        shuffled = self.PairwiseRDD(rdd.rdd()).asJavaPairRDD().partitionBy(self._partitioners[partitions])
        shuffled.rdd().setSerializer(self.serializer)
        return shuffled

    def together(self, shuffles: Sequence[Any]) -> Any:
        """Several shuffles with equal partitioners as one: partition i of the result is all their partitions i."""
        if len(shuffles) == 1:
            return shuffles[0]
        array = self.gateway.new_array(self.JavaPairRDD, len(shuffles))
        for i, each in enumerate(shuffles):
            array[i] = each
        return self.jsc.union(array)

    def blobs(self, shuffled: Any) -> Any:
        return self.PythonRDD.valueOfPair(shuffled).rdd()

    def partitions(self, rdd: Any, *indices: int) -> Any:
        """These partitions alone, in their order."""
        chosen = self._sets.get(indices)
        if chosen is None:  # a Set of Int is a function from Int to Boolean, which is what pruning wants
            chosen = self.PythonUtils.toSeq(list(indices)).toSet()
            if len(self._sets) >= SETS_MAX:
                self._sets.clear()
            self._sets[indices] = chosen
        return self.Pruning.create(rdd, chosen)

    def zipped(self, placed: Any, pruned: Any) -> Any:
        """Pairs (empty, blob); where the tasks run is decided by the first."""
        if self._zip is None:
            # Each call of zip searches its function for references, which reads class files. The function is always the
            # same one.
            zipped = self.JavaRDD(placed, self.any_tag).zip(self.JavaRDD(pruned, self.any_tag)).rdd()
            self._zip = zipped.f()
            return zipped
        return self.Zipped(self.scala, self._zip, placed, pruned, False, self.any_tag, self.any_tag, self.any_tag)

    # -- jobs ------------------------------------------------------------------------------------------------------

    def run_to_shuffle(self, shuffled: Any) -> int:
        """Run a stage up to its shuffle files. Returns the shuffle's id, for ``forget``."""
        dependency = shuffled.rdd().dependencies().head()
        self.scala.submitMapStage(dependency).get()
        return int(dependency.shuffleId())

    def forget_shuffle(self, shuffle: int) -> None:
        cleaner = self.scala.cleaner()
        if cleaner.isDefined():
            cleaner.get().doCleanupShuffle(shuffle, False)

    def executor_ids(self) -> frozenset[str]:
        """Executors that are alive by Spark's scheduler, which is the first to know."""
        # As one text: to iterate costs a call to the JVM for each element and ten for the end, and this is called many
        # times a second.
        return frozenset(self.scala.getExecutorIds().mkString(",").split(",")) - {""}

    def executors(self) -> dict[str, tuple[str, int]]:
        """Executor id -> host and cores; none in local mode."""
        alive = self.executor_ids()
        found = {}
        for summary in self._list(self.scala.statusStore().executorList(True)):
            if str(summary.id()) in alive:
                found[str(summary.id())] = (str(summary.hostPort().rsplit(":", 1)[0]), int(summary.totalCores()))
        return found

    def unwilling(self) -> frozenset[str]:
        """Executors that are alive and get no more tasks: they were given back, or are being decommissioned."""
        backend = self.scala.schedulerBackend()
        return frozenset(i for i in self.executor_ids() if not backend.isExecutorActive(i))

    def decommissioning(self) -> bool:
        """Whether an executor is being decommissioned. One call to the JVM; ``unwilling`` takes many."""
        if self._decommissioning is None:
            try:
                self._decommissioning = self.scala.schedulerBackend().executorsPendingDecommission()
            except Exception:  # this backend does not tell: such an executor counts as lost when it is gone
                self._decommissioning = self.ArrayList()
        return not self._decommissioning.isEmpty()

    def want_executors(self, total: int) -> bool:
        """Tell the cluster manager how many executors there should be. True: it took the request.

        ``requestExecutors`` will not do: it starts from zero, although executors came without being asked for.
        """
        return bool(self.scala.requestTotalExecutors(total, 0, self.PythonUtils.toScalaMap(self.HashMap())))

    def release_executors(self, ids: Sequence[str], total: int) -> bool:
        """Give these executors back, of ``total`` that there are. They are not replaced."""
        self.want_executors(total)  # Spark subtracts those it kills from the number that it was last asked for
        return bool(self.scala.killExecutors(self.PythonUtils.toSeq(list(ids))))

    def _list(self, scala_seq: Any) -> Any:
        return self.jvm.scala.jdk.javaapi.CollectionConverters.asJava(scala_seq)

    def job_group(self, group: str, pool: str, spec: str) -> None:
        """Local properties of the calling thread: they go with every task of the jobs it submits."""
        self.sc.setLocalProperty("spark.jobGroup.id", group)
        self.sc.setLocalProperty("spark.job.interruptOnCancel", "false")
        self.sc.setLocalProperty("spark.scheduler.pool", pool)
        self.sc.setLocalProperty("penstock.spec", spec)


def failed_on(error: BaseException) -> str:
    """The executor whose task failed, as Spark names it: "Lost task 0.0 in stage 5.0 (TID 7) (10.0.0.2 executor 1)".
    Empty: it does not say, as with a lost shuffle block."""
    found = _LOST_TASK.search(str(error))
    return found[1] if found else ""


def process_ended(error: BaseException) -> int | None:
    """The number of the task whose Python process ended under it, among the job's tasks; None: it is another error."""
    text = str(error)
    found = _LOST_PARTITION.search(text)
    return int(found[1]) if found and any(words in text for words in _PROCESS_ENDED) else None


def short_reason(error: BaseException) -> str:
    """One line of what Spark said, without its stack traces."""
    java = getattr(error, "java_exception", None)
    seen = 0
    text = str(error)
    while java is not None and seen < 10:
        message = java.getMessage()
        if message:
            text = str(message)
        java = java.getCause()
        seen += 1
    if gone := _GONE.search(str(error)) or _BARE_PATH.fullmatch(text.strip()):
        return (
            f"{gone[1]} is missing: a directory of Spark's on a local disk was removed or cleared "
            "(SPARK_LOCAL_DIRS, or the one for temporary files)"
        )
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    # Of a Python traceback the last line that is not Java's says most.
    python = [line for line in lines if not line.startswith(("at ", "SQLSTATE", "Driver stacktrace", "..."))]
    traced = any(line.startswith("Traceback") for line in lines)
    picked = python[-1] if traced and python else lines[0]
    return picked[:500]
