"""The daemon of containers' processes, driven as the JVM drives it: pipes, sockets, and requests to kill."""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from penstock.engines.spark import session, slots

WAIT_S = 120.0
SECRET = "open sesame"
WORKER = """
import os, signal, sys, types

memory = {"tasks": 0, "put off": 0}


def between_tasks():
    memory["put off"] -= 1
    with open(os.environ["TOLD"], "a") as file:
        file.write(f"{os.getpid()} {memory['put off']}\\n")
    return memory["put off"] > 0


def work(command, infile, outfile):
    memory["tasks"] += 1
    if command == "crash":
        os._exit(3)
    if command == "exhausted":
        raise MemoryError
    if command == "put off":
        module = types.ModuleType("penstock.engines.spark.worker")
        module.between_tasks = between_tasks
        sys.modules[module.__name__] = module
        memory["put off"] = 3
    if command == "last":
        os.environ["PENSTOCK_SLOT_IDLE_S"] = "0"
    if command in ("hang", "half"):
        outfile.write(b"started\\n")
        outfile.flush()
    if command == "hang":
        while True:
            signal.pause()
    if command == "half" and not infile.readline():
        raise EOFError
    while command == "flood":
        outfile.write(b"x" * 65536)
    outfile.write(f"{os.getpid()} {memory['tasks']}\\n".encode())


def main(infile, outfile):  # PySpark's ends every failed task with SystemExit
    try:
        work(infile.readline().decode().strip(), infile, outfile)
    except BaseException as error:
        outfile.write(f"{type(error).__name__}\\n".encode())
        sys.exit(-1)
"""


class Jvm:
    """What Spark's side does."""

    def __init__(self, place: Path, unix: bool, environ: dict[str, str]) -> None:
        (place / "fake_worker.py").write_text(WORKER)
        env = {**os.environ, "PYTHONPATH": str(place), slots.SLOT: "run:stage:0", "SPARK_REUSE_WORKER": "1", **environ}
        if unix:
            env |= {"PYTHON_UNIX_DOMAIN_ENABLED": "True", "PYTHON_WORKER_FACTORY_SOCK_DIR": str(place)}
        else:
            env["PYTHON_WORKER_FACTORY_SECRET"] = SECRET
        self.unix = unix
        self.daemon = subprocess.Popen(
            [sys.executable, slots.__file__, "fake_worker"], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.daemon.stdout is not None
        (number,) = struct.unpack("!i", self.daemon.stdout.read(4))
        self.address: str | tuple[str, int] = (
            self.daemon.stdout.read(number).decode() if unix else ("127.0.0.1", number)
        )
        self.connections: list[Connection] = []

    def connect(self, secret: str = SECRET) -> Connection:
        sock = socket.socket(socket.AF_UNIX if self.unix else socket.AF_INET)
        sock.settimeout(WAIT_S)
        sock.connect(self.address)
        connection = Connection(sock)
        self.connections.append(connection)
        (connection.pid,) = struct.unpack("!i", connection.file.read(4))
        if not self.unix:
            sock.sendall(struct.pack("!i", len(secret)) + secret.encode())
            (size,) = struct.unpack("!i", connection.file.read(4))
            connection.answer = connection.file.read(size)
        return connection

    def ask_to_kill(self, pid: int) -> None:
        assert self.daemon.stdin is not None
        self.daemon.stdin.write(struct.pack("!i", pid))
        self.daemon.stdin.flush()

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        assert self.daemon.stdin is not None and self.daemon.stdout is not None
        self.daemon.stdin.close()
        self.daemon.wait(WAIT_S)
        self.daemon.stdout.close()


class Connection:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.file = sock.makefile("rb")
        self.pid = -1
        self.answer = b""

    def send(self, command: str) -> None:
        self.sock.sendall(command.encode() + b"\n")

    def line(self) -> str:
        return self.file.readline().decode().strip()

    def task(self) -> tuple[int, int]:
        """(pid, number of the task in its process)"""
        self.send("task")
        pid, number = self.line().split()
        return int(pid), int(number)

    def close(self) -> None:
        self.file.close()
        self.sock.close()


Start = Callable[..., Jvm]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Jvm] = []

    def begin(unix: bool = True, **environ: str) -> Jvm:
        started.append(Jvm(tmp_path, unix, environ))
        return started[-1]

    yield begin
    for jvm in started:
        jvm.close()


@pytest.fixture
def jvm(start: Start) -> Jvm:
    return start()


def gone(pid: int) -> bool:
    """Whether a process has ended or ends soon."""
    try:
        psutil.Process(pid).wait(WAIT_S)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return False
    return True


@pytest.mark.parametrize("unix", [True, False])
def test_tasks_of_a_connection_and_of_the_next_meet_the_same_process(start: Start, unix: bool) -> None:
    jvm = start(unix)
    first = jvm.connect()
    assert [first.task(), first.task()] == [(first.pid, 1), (first.pid, 2)]
    first.close()
    second = jvm.connect()
    assert second.pid == first.pid
    assert second.task() == (first.pid, 3)


@pytest.mark.parametrize("command", ["half", "flood"])
def test_a_connection_that_is_closed_in_the_middle_of_a_task(jvm: Jvm, command: str) -> None:
    first = jvm.connect()
    first.send(command)
    assert first.file.read(1), "the task has begun"
    first.close()
    assert jvm.connect().task() == (first.pid, 2)


def test_a_connection_to_which_nobody_says_anything(jvm: Jvm) -> None:
    first = jvm.connect()
    first.close()
    assert jvm.connect().task() == (first.pid, 1)


def test_a_task_that_failed_leaves_the_process_but_not_the_connection(jvm: Jvm) -> None:
    first = jvm.connect()
    first.send("half")
    assert first.line() == "started"
    first.sock.shutdown(socket.SHUT_WR)  # its input ends too early, but its output is read
    assert first.line() == "EOFError"
    assert jvm.connect().task() == (first.pid, 2)


def test_the_kill_of_an_idle_worker_is_ignored(jvm: Jvm) -> None:
    first = jvm.connect()
    assert first.task() == (first.pid, 1)
    jvm.ask_to_kill(first.pid)  # perhaps it has only just answered
    jvm.connect()  # by its answer the daemon has read the request
    jvm.ask_to_kill(first.pid)
    first.close()
    assert jvm.connect().task() == (first.pid, 2)


def test_the_kill_of_a_busy_worker_is_obeyed(jvm: Jvm) -> None:
    first = jvm.connect()
    first.send("hang")
    assert first.line() == "started"
    jvm.ask_to_kill(first.pid)
    assert first.line() == "", "closed"
    assert gone(first.pid)
    second = jvm.connect()
    assert second.pid != first.pid
    assert second.task() == (second.pid, 1)


def test_the_kill_of_a_process_that_is_not_the_daemons(jvm: Jvm) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        first = jvm.connect()
        first.send("hang")
        assert first.line() == "started"
        jvm.ask_to_kill(stranger.pid)
        jvm.connect()  # by its answer the daemon has read the request
        assert stranger.poll() is None
        assert psutil.pid_exists(first.pid)
        stranger.communicate(b"\n")


def test_a_connection_that_waits_behind_a_hung_task_goes_to_the_next_process(jvm: Jvm) -> None:
    """It is told a pid at once: until then the JVM could not even ask for the kill."""
    first = jvm.connect()
    first.send("hang")
    assert first.line() == "started"
    second = jvm.connect()
    second.send("task")
    jvm.ask_to_kill(first.pid)
    pid, number = second.line().split()
    assert int(pid) != first.pid
    assert int(number) == 1
    third = jvm.connect()
    assert third.task() == (int(pid), 2)


def test_an_open_connection_without_tasks_does_not_hold_up_another(jvm: Jvm) -> None:
    first = jvm.connect()
    assert first.task() == (first.pid, 1)
    second = jvm.connect()
    assert second.task() == (first.pid, 2)
    assert first.task() == (first.pid, 3)


def test_one_task_at_a_time(jvm: Jvm) -> None:
    first, second = jvm.connect(), jvm.connect()
    first.send("half")
    assert first.line() == "started"
    second.send("task")
    assert not select.select([second.sock], [], [], 0.2)[0]
    first.send("go on")
    assert first.line() == f"{first.pid} 1"
    assert second.line() == f"{first.pid} 2"


def test_what_a_task_put_off_is_done_when_there_is_none(start: Start, tmp_path: Path) -> None:
    told = tmp_path / "told"
    os.mkfifo(told)
    first = start(TOLD=str(told)).connect()
    with os.fdopen(os.open(told, os.O_RDWR)) as lines:
        first.send("put off")
        assert first.line() == f"{first.pid} 1"
        assert [lines.readline() for _ in range(3)] == [f"{first.pid} {left}\n" for left in (2, 1, 0)]
        assert first.task() == (first.pid, 2)


@pytest.mark.parametrize("command", ["crash", "exhausted"])
def test_a_process_that_died_is_replaced(jvm: Jvm, command: str) -> None:
    first = jvm.connect()
    first.send(command)
    assert first.line() == ("MemoryError" if command == "exhausted" else "")
    assert gone(first.pid)
    second = jvm.connect()
    assert second.pid != first.pid
    assert second.task() == (second.pid, 1)


def test_a_process_that_is_idle_for_long_ends(start: Start) -> None:
    jvm = start(PENSTOCK_SLOT_IDLE_S="0.3")
    first = jvm.connect()
    assert first.task() == (first.pid, 1)
    first.close()
    assert gone(first.pid)
    second = jvm.connect()
    assert second.task() == (second.pid, 1)


def test_a_process_ends_with_its_last_task_if_that_says_so(jvm: Jvm) -> None:
    first = jvm.connect()
    first.send("last")
    assert first.line() == f"{first.pid} 1"
    assert gone(first.pid)


def test_without_reuse_a_connection_has_one_task(start: Start) -> None:
    jvm = start(SPARK_REUSE_WORKER="")
    first = jvm.connect()
    assert first.task() == (first.pid, 1)
    first.send("task")
    assert jvm.connect().task() == (first.pid, 2)
    assert not select.select([first.sock], [], [], 0.0)[0], "it says nothing to a second"


@pytest.mark.parametrize("busy", [True, False])
def test_everything_ends_with_the_jvm(jvm: Jvm, busy: bool) -> None:
    first = jvm.connect()
    if busy:
        first.send("hang")
        assert first.line() == "started"
    assert jvm.daemon.stdin is not None
    jvm.daemon.stdin.close()
    assert jvm.daemon.wait(WAIT_S) == 0
    assert gone(first.pid)
    assert isinstance(jvm.address, str) and not os.path.exists(jvm.address)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_process_ends_with_the_daemon(jvm: Jvm, number: signal.Signals) -> None:
    first = jvm.connect()
    first.send("hang")
    assert first.line() == "started"
    jvm.daemon.send_signal(number)
    jvm.daemon.wait(WAIT_S)
    assert gone(first.pid)


def test_ctrl_c_is_not_for_workers(jvm: Jvm) -> None:
    first = jvm.connect()
    first.send("half")
    assert first.line() == "started"
    assert os.getpgid(first.pid) == jvm.daemon.pid != os.getpgid(0), "a group of their own"
    os.killpg(jvm.daemon.pid, signal.SIGINT)
    first.send("go on")
    assert first.line() == f"{first.pid} 1"


def test_who_does_not_know_the_secret_is_sent_away(start: Start) -> None:
    jvm = start(unix=False)
    stranger = jvm.connect("guess")
    assert stranger.answer == b"err"
    assert stranger.line() == ""
    friend = jvm.connect()
    assert friend.answer == b"ok"
    assert friend.task() == (friend.pid, 1)


def test_which_slots_are_dedicated() -> None:
    assert slots.is_dedicated("a1b2:counts:0")
    assert not slots.is_dedicated("a1b2")
    assert not slots.is_dedicated("")


def test_it_needs_no_more_than_the_standard_library() -> None:
    """It is sent alone to executors, and must not load, before it forks, what starts threads."""
    code = (
        "import runpy, sys; before = set(sys.modules); runpy.run_path(sys.argv[1]); "
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before} - sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", code, slots.__file__], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# -- what it need not compile ------------------------------------------------------------------------------------------


def pyspark_in(place: Path, version: str, *, packed: bool) -> str:
    files = {"pyspark/__init__.py": "", "pyspark/version.py": f"__version__ = {version!r}\n", "py4j/__init__.py": ""}
    if not packed:
        for name, text in files.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(text)
        return str(place)
    place.mkdir()
    for archive, package in (("pyspark.zip", "pyspark"), ("py4j-0.10-src.zip", "py4j")):
        with zipfile.ZipFile(place / archive, "w") as made:
            for name, text in files.items():
                if name.startswith(package):
                    made.writestr(name, text)
    return str(place / "pyspark.zip")


@pytest.mark.parametrize(("brought", "taken"), [("4.3.0", "installed"), ("4.3.1", "archive")])
def test_pyspark_is_taken_from_an_archive_only_if_it_must_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, brought: str, taken: str
) -> None:
    archive = pyspark_in(tmp_path / "spark", brought, packed=True)
    installed = pyspark_in(tmp_path / "site", "4.3.0", packed=False)
    before = [archive, str(tmp_path / "spark" / "py4j-0.10-src.zip"), "/nowhere", installed]
    monkeypatch.setattr(sys, "path", list(before))
    slots.prefer_installed()
    assert sys.path == (before[2:] if taken == "installed" else before)


def test_without_an_installation_the_archive_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = [pyspark_in(tmp_path / "spark", "4.3.0", packed=True), "/nowhere"]
    monkeypatch.setattr(sys, "path", list(before))
    slots.prefer_installed()
    assert sys.path == before


def test_the_package_is_sent_compiled() -> None:
    sent: list[str] = []
    context: Any = SimpleNamespace(addPyFile=sent.append)
    session.ship_package(context)
    code = "import sys; sys.path.insert(0, sys.argv[1]); import penstock.ids as m; print(m.__file__, m.StageId('a'))"
    said = subprocess.run([sys.executable, "-c", code, *sent], capture_output=True, text=True, check=True).stdout
    assert said == f"{Path(sent[0], 'penstock', 'ids.pyc')} a\n"
