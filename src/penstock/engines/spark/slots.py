"""A daemon for Spark's Python workers in which a container's process outlives its connections.

Spark starts one daemon for each set of environment variables; the daemon forks a worker for each connection of the
JVM. With PySpark's own daemon the worker ends with its connection. A killed task closes its connection (when one
executor dies, Spark aborts the job and kills the tasks on all others), and so does a minute without work; the slices
in the worker's memory are then gone, though nothing was wrong with them. Here a container has one child that lives on
and takes the next connection.

``spark.python.daemon.module`` names this file. It speaks the protocol of ``pyspark.daemon`` to the JVM:

    daemon -> JVM   on stdout: the port, or the path of a Unix socket, that it listens on
    JVM -> daemon   a connection; the answer is a pid, then, on TCP, the exchange of a secret
    JVM -> daemon   on stdin: the pid of a worker to kill; end of file: everything ends

While it has no task, the child does the work that tasks have put off, one step at a time, and listens in between.

The daemon answers at once, even when the child is busy: the JVM holds a lock while it waits, and needs the same lock to
have a hung worker killed. Connections go to the child over a socket pair. Connections that a child has not taken when
it dies go to the next child. A child may have several connections; it runs one task at a time.

Executors need not have Penstock installed. The driver sends them this one file, so it imports the standard library
alone, and PySpark in the child; and a daemon that imports little forks cheaply and has no threads to lose.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import mmap
import os
import select
import signal
import socket
import struct
import sys
import time
import traceback
import uuid
from collections import deque
from collections.abc import Callable
from importlib.machinery import PathFinder
from typing import Any, BinaryIO, NoReturn
from zipimport import zipimporter

SLOT = "PENSTOCK_SLOT"
UMASK = "PENSTOCK_UMASK"
"""The umask of workers, octal. Without it, it is the one that the JVM has."""
IDLE = "PENSTOCK_SLOT_IDLE_S"
IDLE_S_MAX = 180.0
"""A child without connections and work ends after this time, for its flow has ended or left it: a running flow has an
empty epoch every 20 s at the latest. A task that is the last of its container may set the variable ``IDLE`` to 0 in its
own environment, and the child ends with the task."""
WORKER = "penstock.engines.spark.worker"
"""The module of Penstock's own tasks. It is loaded only in processes that run them."""
AUTH_S_MAX = 5.0
TURN_MS = 1_000
GRACE_S = 0.2
"""A task that ends within this time of a request to kill it does not hang."""
BUFFER_BYTES = 65_536
PR_SET_PDEATHSIG = 1
_int = struct.Struct("!i")

Main = Callable[[BinaryIO, BinaryIO], None]


def is_dedicated(slot: str) -> bool:
    """Whether a value of ``PENSTOCK_SLOT`` is a container's (``run:stage:index``), not that of a run's sources."""
    return ":" in slot


def in_task(count: int) -> bool:
    """The child counts beginnings and ends of tasks in a byte that the daemon sees."""
    return count % 2 == 1


# -- the child -----------------------------------------------------------------------------------------------------


class Connection:
    """One connection of the JVM, and what the JVM believes that the worker behind it knows."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.over = False
        """No further task will come: it is only read to its end."""
        self.broadcasts: dict[int, Any] = {}


class Child:
    """The process of one container: takes connections from the daemon and runs their tasks, one at a time."""

    def __init__(self, control: socket.socket, tasks: mmap.mmap, load: Callable[[], Main]) -> None:
        self.control = control
        self.tasks = tasks
        self.load = load
        self.main: Main | None = None
        self.pid = os.getpid()
        self.reuse = bool(os.environ.get("SPARK_REUSE_WORKER"))
        self.connections: dict[int, Connection] = {}
        self.idle_since = time.monotonic()

    def run(self) -> None:
        """Run tasks until the daemon ends, or until no connection has come for long."""
        pause_ms = TURN_MS
        while True:
            poller = select.poll()
            poller.register(self.control, select.POLLIN)
            for fd in self.connections:
                poller.register(fd, select.POLLIN)
            ready = {fd for fd, _ in poller.poll(pause_ms)}
            if self.control.fileno() in ready and not self._take():
                return
            for fd in ready & self.connections.keys():
                self._turn(self.connections[fd])
            if self._expired():
                return
            pause_ms = self._between_tasks()

    def _between_tasks(self) -> int:
        """Do one step of the work that tasks have put off. Returns how long to listen before the next step: as long as
        this step took, for the containers of a node share its cores."""
        work = put_off()
        began = time.monotonic()
        if work is None or not work():
            return TURN_MS
        return min(TURN_MS, 1 + round(1000 * (time.monotonic() - began)))

    def _expired(self) -> bool:
        limit_s = float(os.environ.get(IDLE, IDLE_S_MAX))
        if limit_s > 0 and self.connections:
            return False  # the JVM closes connections that it has not used for a minute
        return time.monotonic() - self.idle_since >= limit_s

    def _take(self) -> bool:
        """Take one connection from the daemon. False: the daemon is gone."""
        _, fds, _, _ = socket.recv_fds(self.control, 1, 1)
        if not fds:
            return False
        self.connections[fds[0]] = Connection(socket.socket(fileno=fds[0]))
        self.control.sendall(b"t")  # the daemon may let go of its copy
        self.idle_since = time.monotonic()
        return True

    def _turn(self, connection: Connection) -> None:
        """Run the task that waits on this connection, or close the connection if the JVM has closed it."""
        try:
            if connection.over:
                more = bool(connection.sock.recv(BUFFER_BYTES))
            else:
                more = bool(connection.sock.recv(1, socket.MSG_PEEK))
        except OSError:
            more = False
        if not more:
            del self.connections[connection.sock.fileno()]
            connection.sock.close()
        elif not connection.over:
            self._count()
            connection.over = not self._task(connection) or not self.reuse
            self._count()
            gc.collect()  # as PySpark does between tasks
            self.idle_since = time.monotonic()

    def _count(self) -> None:
        self.tasks[0] = (self.tasks[0] + 1) % 256

    def _task(self, connection: Connection) -> bool:
        """Run one task. Returns whether it ended well. If it did not, the JVM knows it or has stopped to listen; the
        process stays."""
        if self.main is None:
            self.main = self.load()
        restore_broadcasts(connection.broadcasts)
        fd = connection.sock.fileno()
        size = int(os.environ.get("SPARK_BUFFER_SIZE", BUFFER_BYTES))
        infile, outfile = os.fdopen(os.dup(fd), "rb", size), os.fdopen(os.dup(fd), "wb", size)
        try:
            self.main(infile, outfile)
            outfile.flush()
            ended_well = True
        except SystemExit as ending:
            if os.getpid() != self.pid:
                raise  # a process that user code forked
            if isinstance(ending.__context__, MemoryError):
                with contextlib.suppress(OSError):
                    outfile.close()
                raise  # its state may be half changed, and a new process has more memory
            ended_well = not ending.code
        except (OSError, EOFError):
            ended_well = False
        finally:
            for file in (infile, outfile):
                with contextlib.suppress(OSError):
                    file.close()
        connection.broadcasts = keep_broadcasts()
        if not ended_well:
            forget_task()
        return ended_well


def load_main() -> Main:
    """The worker's function, by the name that the JVM gives. Only after the fork: it may start threads."""
    found: Main = importlib.import_module(sys.argv[1] if len(sys.argv) > 1 else "pyspark.worker").main
    return found


def put_off() -> Callable[[], bool] | None:
    """The function that does one step of the work that tasks have put off, and says whether there is more."""
    module = sys.modules.get(WORKER)
    found: Callable[[], bool] | None = module.between_tasks if module else None
    return found


def restore_broadcasts(known: dict[int, Any]) -> None:
    """The JVM tells each connection which broadcasts are new or gone since the last task of that connection."""
    known_here = _broadcasts()
    if known_here is not None:
        known_here.clear()
        known_here.update(known)


def keep_broadcasts() -> dict[int, Any]:
    return dict(_broadcasts() or {})


def _broadcasts() -> dict[int, Any] | None:
    module = sys.modules.get("pyspark.core.broadcast")
    found: dict[int, Any] | None = module._broadcastRegistry if module else None
    return found


def forget_task() -> None:
    """A task that failed leaves its context behind: PySpark counts on the process to end."""
    module = sys.modules.get("pyspark.taskcontext")
    if module:
        module.TaskContext._setTaskContext(None)
        module.BarrierTaskContext._setTaskContext(None)


def is_stopped(pid: int) -> bool:
    """Somebody stopped the process with a signal: it does not even begin with its task."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] in "Tt"
    return False


def die_with_parent(parent: int) -> None:
    """Linux kills us when the daemon is gone, whatever we do then. Elsewhere we see the socket pair's end."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform.startswith("linux") else None
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it went before we asked


# -- the daemon ----------------------------------------------------------------------------------------------------


class Offspring:
    """The daemon's view of its child."""

    def __init__(self, pid: int, control: socket.socket, tasks: mmap.mmap) -> None:
        self.pid = pid
        self.control = control
        self.tasks = tasks


class Daemon:
    def __init__(self) -> None:
        self.listening, self.path = listen()
        self.child: Offspring | None = None
        self.handed: deque[socket.socket] = deque()
        """Connections that the child has not taken yet, oldest first."""
        self.requests = b""

    def announce(self) -> None:
        if self.path:
            name = self.path.encode()
            os.write(1, _int.pack(len(name)) + name)
        else:
            os.write(1, _int.pack(self.listening.getsockname()[1]))

    def run(self) -> None:
        while True:
            poller = select.poll()
            for fd in (0, self.listening.fileno(), *([self.child.control.fileno()] if self.child else [])):
                poller.register(fd, select.POLLIN)
            ready = {fd for fd, _ in poller.poll(TURN_MS)}
            # What the JVM wrote before it connected concerns the connections before.
            while stdin_ready():
                if not self._read_requests():
                    return
            self._look_after_child()
            if self.listening.fileno() in ready:
                self._accept()

    def end(self) -> None:
        """Nothing stays behind, neither the child nor what user code started in it."""
        if self.path:
            with contextlib.suppress(OSError):
                os.remove(self.path)
        if self.child is not None:
            with contextlib.suppress(OSError):
                os.kill(self.child.pid, signal.SIGKILL)
        os.kill(0, signal.SIGHUP)

    # -- requests to kill --------------------------------------------------------------------------------------------

    def _read_requests(self) -> bool:
        """False at the end of the JVM."""
        data = os.read(0, 4_096)
        if not data:
            return False
        self.requests += data
        while len(self.requests) >= _int.size:
            (pid,) = _int.unpack_from(self.requests)
            self.requests = self.requests[_int.size :]
            self._kill(pid)
        return True

    def _kill(self, pid: int) -> None:
        """Of an idle worker it means that the JVM keeps the connection no longer, and is no reason to die. A worker in
        the middle of a task hangs: Spark has waited for it after the task was killed.
        """
        if self.child is None or self.child.pid != pid:
            return
        task = self.child.tasks[0]
        if in_task(task) or is_stopped(pid):
            time.sleep(GRACE_S)
            if self.child.tasks[0] == task:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                self._bury()

    # -- the child -----------------------------------------------------------------------------------------------

    def _look_after_child(self) -> None:
        """Read which connections the child has taken. If it is dead, the others need another child."""
        if self.child is None:
            return
        taken = b""
        with contextlib.suppress(OSError):
            taken = self.child.control.recv(1_024, socket.MSG_DONTWAIT)
        for _ in taken:
            self.handed.popleft().close()
        if os.waitpid(self.child.pid, os.WNOHANG)[0]:
            self._bury()

    def _bury(self) -> None:
        assert self.child is not None
        with contextlib.suppress(OSError):  # a connection that it took in its last moment died with it
            for _ in self.child.control.recv(1_024, socket.MSG_DONTWAIT):
                self.handed.popleft().close()
        self.child.control.close()
        self.child.tasks.close()
        self.child = None
        if self.handed:
            self.child = self._fork()
            for sock in self.handed:
                self._hand(sock)

    def _fork(self) -> Offspring:
        ours, theirs = socket.socketpair()
        tasks = mmap.mmap(-1, 1)
        daemon = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                ours.close()
                self._be_child(theirs, tasks, daemon)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        theirs.close()
        return Offspring(pid, ours, tasks)

    def _be_child(self, control: socket.socket, tasks: mmap.mmap, daemon: int) -> NoReturn:
        die_with_parent(daemon)
        for number in (signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        self.listening.close()
        for sock in self.handed:
            sock.close()
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)  # stdin is the daemon's
        os.close(null)
        try:
            Child(control, tasks, load_main).run()
        except SystemExit:
            os._exit(1)
        os._exit(0)

    # -- connections -------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        failed = 0
        if self.child is None:
            try:
                self.child = self._fork()  # before the connection is there: the child must have no copy of it
            except OSError as error:
                failed = error.errno or 1
        try:
            sock, _ = self.listening.accept()
        except OSError:
            return
        trusted = False
        with contextlib.suppress(OSError):
            sock.settimeout(AUTH_S_MAX)
            sock.sendall(_int.pack(self.child.pid if self.child else -failed))  # a number below zero is no pid
            trusted = self.child is not None and (bool(self.path) or authenticate(sock))
            sock.settimeout(None)
        if trusted:
            self.handed.append(sock)
            self._hand(sock)
        else:
            sock.close()

    def _hand(self, sock: socket.socket) -> None:
        assert self.child is not None
        # If the child is dead this fails; that is found out in the next turn.
        with contextlib.suppress(OSError):
            socket.send_fds(self.child.control, [b"c"], [sock.fileno()])


def listen() -> tuple[socket.socket, str]:
    """The socket that the JVM connects to, and its path if it is a Unix socket."""
    path = ""
    if os.environ.get("PYTHON_UNIX_DOMAIN_ENABLED", "false").lower() == "true":
        path = os.path.join(os.environ["PYTHON_WORKER_FACTORY_SOCK_DIR"], f".{uuid.uuid4()}.sock")
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(path)
    elif os.environ.get("SPARK_PREFER_IPV6", "false").lower() == "true":
        listening = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        listening.bind(("::1", 0))
    else:
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listening.bind(("127.0.0.1", 0))
    listening.listen(socket.SOMAXCONN)
    listening.setblocking(False)  # a connection may be gone before it is accepted
    return listening, path


def authenticate(sock: socket.socket) -> bool:
    """On TCP, where any user of the machine may connect, the JVM shows that it knows the secret."""
    secret = os.environ["PYTHON_WORKER_FACTORY_SECRET"].encode()
    (size,) = _int.unpack(_read(sock, _int.size))
    known = 0 <= size <= 4_096 and _read(sock, size) == secret
    answer = b"ok" if known else b"err"
    sock.sendall(_int.pack(len(answer)) + answer)
    return known


def _read(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise ConnectionError("closed before the secret was there")
        data += part
    return data


def stdin_ready() -> bool:
    poller = select.poll()
    poller.register(0, select.POLLIN)
    return bool(poller.poll(0))


def _terminated(number: int, frame: object) -> NoReturn:
    sys.exit(1)


def prefer_installed() -> None:
    """Import PySpark as it is installed on this machine, if it has the version that Spark brings in an archive. Python
    does not keep what it compiles from an archive, so every process would compile it again, which takes a second."""
    archives = [p for p in sys.path if os.path.basename(p) == "pyspark.zip" or _is_py4j(os.path.basename(p))]
    rest = [p for p in sys.path if p not in archives]
    found = PathFinder.find_spec("pyspark", rest)
    if found is None or found.origin is None or PathFinder.find_spec("py4j", rest) is None:
        return
    with contextlib.suppress(OSError, ImportError, StopIteration):
        with open(os.path.join(os.path.dirname(found.origin), "version.py"), "rb") as file:
            installed = file.read()
        brought = next(p for p in archives if os.path.basename(p) == "pyspark.zip")
        if zipimporter(brought).get_data(os.path.join("pyspark", "version.py")) == installed:
            sys.path[:] = rest


def _is_py4j(name: str) -> bool:
    return name.startswith("py4j-") and name.endswith("-src.zip")


def keep_sockets_private() -> None:
    """A daemon's socket asks for no secret, so that only its owner may connect to it. Workers write what users want
    written, with the umask that the driver has, if it says which.
    """
    before = os.umask(0o077)
    wanted = int(os.environ.get(UMASK, f"{before:o}"), 8)
    os.register_at_fork(after_in_child=lambda: os.umask(wanted))


def manager() -> None:
    """What ``python -m`` runs."""
    keep_sockets_private()
    prefer_installed()
    if not is_dedicated(os.environ.get(SLOT, "")):
        from pyspark.daemon import manager as stock

        stock()
        return
    # A session, and so a process group, of its own: Ctrl-C at the driver's terminal is for the driver, and the group is
    # ended together.
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _terminated)
    daemon = Daemon()
    try:
        daemon.announce()
        daemon.run()
    finally:
        daemon.end()


if __name__ == "__main__":
    manager()
