"""Steering a running job from another process: ``penstock status``, ``scale``, ``migrate``, ``rebalance``, ``stop``.

The driver of every job serves a Unix socket from a thread of its own. The socket lies in a directory that only its
owner may enter. Beside it lies a file that only its owner may read, with the process that serves the socket and the
job's secret, which every request must carry. So a user who may steer a job is one who could kill its process anyway,
and nothing is heard from the network. The data takes other ways: a job without a socket runs just the same.

A client sends one line of JSON, gets one line of JSON, and the connection is over. Lines, times and the number of
connections are bounded. Each connection has a thread of its own, so a client that hangs or sends rubbish costs one
thread for a few seconds and nothing else.

A job that was killed leaves its file behind. The next command that looks for jobs sees that the process is gone, says
so, and removes the file. It compares the start time as well as the number of the process: numbers are used again.
"""

from __future__ import annotations

import atexit
import contextlib
import hmac
import json
import os
import re
import secrets
import selectors
import socket
import stat
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from penstock import errors
from penstock.errors import ConfigError, PenstockError
from penstock.observe.status import JobStatus, NodeStatus

REQUEST_BYTES_MAX = 64 * 1024
REPLY_BYTES_MAX = 32 * 1024 * 1024
READ_S = 5.0
"""Seconds until a request must be whole."""
SEND_S = 10.0
ANSWER_S = 60.0
"""Seconds that a client waits for an answer."""
WAIT_S_MAX = 30.0
"""Seconds that one request may wait for the job's end. A client that waits longer asks again."""
CHANGE_S = 10.0
"""Seconds that a change waits for the change before it."""
CONNECTIONS_MAX = 16
LOOK_S = 0.5
"""Seconds between two looks of the server whether its job has ended."""
CLOSE_S = 2.0
SOCKET_PATH_BYTES_MAX = 100
"""Unix allows 104 to 108."""

OVER = frozenset({"stopped", "complete", "failed"})


class SteeringError(PenstockError):
    """A running job could not be reached, or did not accept the request."""


# --- places and files ----------------------------------------------------------------------------------------------


def run_directories(environ: Mapping[str, str] | None = None) -> list[Path]:
    """Where sockets may lie, best first. Clients look in all of them: their environment may not be the job's."""
    environ = os.environ if environ is None else environ
    places = []
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        places.append(Path(runtime) / "penstock")
    with contextlib.suppress(RuntimeError):  # the user has no home directory
        places.append((Path(environ["HOME"]) if environ.get("HOME") else Path.home()) / ".penstock" / "run")
    temporary = environ.get("TMPDIR") or tempfile.gettempdir()
    places.append(Path(temporary) / f"penstock-{os.getuid()}")
    return [place for place in dict.fromkeys(places) if place.is_absolute()]


def _unfit(place: Path) -> str:
    """Why sockets and secrets may not lie in this directory; empty when they may."""
    try:
        found = os.lstat(place)
    except OSError as error:
        return f"{place}: {error.strerror or error}"
    if not stat.S_ISDIR(found.st_mode):
        return f"{place} is no directory"
    if found.st_uid != os.getuid():
        return f"{place} belongs to another user"
    if found.st_mode & 0o077:
        return f"{place} is open to others (mode {stat.S_IMODE(found.st_mode):04o}; it must be 0700)"
    return ""


def _private_directory(environ: Mapping[str, str] | None = None) -> Path:
    """The first place that is, or can be made, ours alone."""
    problems = []
    for place in run_directories(environ):
        if len(os.fsencode(place)) + 40 > SOCKET_PATH_BYTES_MAX:
            problems.append(f"{place} is too long a path for a socket")
            continue
        with contextlib.suppress(OSError):
            if place.parent.name == ".penstock":
                place.parent.mkdir(mode=0o700, exist_ok=True)
            place.mkdir(mode=0o700, exist_ok=True)
        if not (problem := _unfit(place)):
            return place
        problems.append(problem)
    raise SteeringError(f"there is no private directory for the job's socket: {'; '.join(problems)}.")


def process_start(pid: int) -> str | None:
    """When a process began, as text to compare; None when there is no such process (any more)."""
    try:
        # The name is in parentheses and may hold anything; what follows begins with the state. Field 22 is the start.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return None if fields[0] in ("Z", "X") else f"{boot}:{fields[19]}"
    except (OSError, IndexError):
        if Path("/proc/self/stat").exists():
            return None
    asked = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or None


@dataclass(frozen=True)
class Contact:
    """What the file beside a socket says."""

    name: str
    job_id: str
    """Empty while the job starts."""
    pid: int
    process_start: str
    host: str
    checkpoint: str | None
    socket: str
    secret: str
    since: float
    """Wall clock."""
    file: str = ""

    def __repr__(self) -> str:
        return f"Contact({self.said()})"  # never the secret

    def said(self) -> str:
        where = f", checkpoint {self.checkpoint}" if self.checkpoint else ""
        return f"'{self.name}' (id {self.job_id or 'not known yet'}, process {self.pid} on {self.host}{where})"

    def public(self) -> dict[str, Any]:
        fields = asdict(self)
        del fields["secret"], fields["socket"], fields["file"], fields["process_start"]
        return fields

    def elsewhere(self) -> bool:
        return self.host != socket.gethostname()

    def alive(self) -> bool:
        """Whether the process that wrote the file still runs. A process of another machine (a shared home) counts as
        running.
        """
        return self.elsewhere() or process_start(self.pid) == self.process_start

    def is_called(self, target: str) -> bool:
        if target in (self.name, self.job_id, str(self.pid)):
            return True
        return self.checkpoint is not None and _place(target) == _place(self.checkpoint)


def _place(url: str) -> str:
    return url.rstrip("/") if "://" in url else os.path.realpath(url)


def _write_contact(contact: Contact) -> None:
    """Whole or not at all, and never readable by others, not even for a moment."""
    fields = asdict(contact)
    del fields["file"]
    temporary = f"{contact.file}.{secrets.token_hex(4)}"
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(fields, file)
    os.replace(temporary, contact.file)


def _read_contact(path: Path) -> Contact:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise ValueError("it is no file of ours that only we can read")
        fields = json.loads(file.read(REQUEST_BYTES_MAX))
    # The socket lies beside the file, whatever the file says.
    contact = Contact(**{**fields, "file": str(path), "socket": str(path.with_suffix(".sock"))})
    texts = (contact.name, contact.job_id, contact.process_start, contact.host, contact.secret)
    if not all(isinstance(text, str) for text in texts) or not isinstance(contact.pid, int):
        raise ValueError("its fields are of the wrong kind")
    return contact


@dataclass(frozen=True)
class Listing:
    """The jobs of this user that run now, the jobs whose process turned out to be gone, and what is worth saying."""

    jobs: tuple[Contact, ...]
    gone: tuple[Contact, ...] = ()
    notes: tuple[str, ...] = ()

    def said(self, but: str | None = None) -> list[str]:
        """What is worth saying, in a line each; not of jobs that are called ``but``."""
        gone = [contact for contact in self.gone if but is None or not contact.is_called(but)]
        return [*self.notes, *([_left_behind(gone)] if gone else [])]


def _left_behind(gone: Sequence[Contact]) -> str:
    if len(gone) == 1:
        return f"job {gone[0].said()} is not running: its process is gone. The file it left behind was removed."
    names = ", ".join(sorted({contact.name for contact in gone}))
    return f"{len(gone)} jobs ({names}) are not running: their processes are gone. The files they left were removed."


def running_jobs(environ: Mapping[str, str] | None = None) -> Listing:
    """Looks in all places, and removes the files of processes that are gone."""
    jobs, gone, notes = [], [], []
    for place in run_directories(environ):
        if not os.path.lexists(place):
            continue
        if problem := _unfit(place):
            notes.append(f"{problem}: jobs there were not looked at.")
            continue
        for path in sorted(place.glob("*.json")):
            try:
                contact = _read_contact(path)
            except FileNotFoundError:
                continue  # its job has just ended
            except (OSError, ValueError, TypeError) as error:
                notes.append(f"{path} was passed over: {error}.")
                continue
            if contact.alive():
                jobs.append(contact)
                continue
            _remove(contact)
            gone.append(contact)
    return Listing(tuple(sorted(jobs, key=lambda c: (c.name, c.since))), tuple(gone), tuple(notes))


def _remove(contact: Contact) -> None:
    for path in (contact.file, contact.socket):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def find_job(
    target: str, environ: Mapping[str, str] | None = None, note: Callable[[str], None] = lambda text: None
) -> Contact:
    """The job of this name, id, process number or checkpoint directory: one, or a refusal that says which there are.

    ``note`` is told what else came to light.
    """
    listing = running_jobs(environ)
    for text in listing.said(but=target):  # of that one the refusal below speaks
        note(text)
    found = [contact for contact in listing.jobs if contact.is_called(target)]
    if len(found) > 1:
        choices = "; ".join(contact.said() for contact in found)
        one = found[0]
        raise ConfigError(
            f"'{target}' is not one job but {len(found)}: {choices}.",
            remedy=f"Name it by its id, process number or checkpoint directory, such as {one.job_id or one.pid}.",
        )
    if found:
        if found[0].elsewhere():
            raise SteeringError(
                f"job {found[0].said()} runs on another machine.", remedy=f"Run the command on {found[0].host}."
            )
        return found[0]
    known = ", ".join(contact.said() for contact in listing.jobs)
    remedy = f"Running now: {known}." if known else "No job of yours is running on this machine."
    for contact in listing.gone:
        if contact.is_called(target):
            raise SteeringError(
                _left_behind([contact]),
                remedy=f"Start it again with penstock run. {remedy}",
            )
    raise ConfigError(f"there is no running job '{target}'.", remedy=remedy)


# --- the wire ------------------------------------------------------------------------------------------------------


def _read_line(connection: socket.socket, bytes_max: int, seconds: float) -> bytes:
    """One whole line. The time is for all of it, so that a client that sends a byte now and then gets no more."""
    deadline = time.monotonic() + seconds
    chunks: list[bytes] = []
    size = 0
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        chunk = connection.recv(65536)
        if not chunk:
            raise EOFError
        line, newline, _ = chunk.partition(b"\n")
        size += len(line)
        if size > bytes_max:
            raise OverflowError
        chunks.append(line)
        if newline:
            return b"".join(chunks)


def _failure(error: PenstockError) -> dict[str, Any]:
    return {
        "ok": False,
        "error": {"kind": type(error).__name__, "message": error.message, "remedy": error.remedy},
    }


def _raised(error: Mapping[str, Any]) -> PenstockError:
    kind = getattr(errors, str(error.get("kind")), SteeringError)
    if not (isinstance(kind, type) and issubclass(kind, PenstockError)):
        kind = SteeringError
    return kind(str(error.get("message", "the job refused.")), remedy=str(error.get("remedy", "")))


# --- the server ----------------------------------------------------------------------------------------------------

_open_servers: weakref.WeakSet[SteeringServer] = weakref.WeakSet()


def close_all() -> None:
    """Removes what the jobs of this process have put into the run directory: a process is about to end."""
    for server in list(_open_servers):
        with contextlib.suppress(Exception):
            server.close(wait=False)


atexit.register(close_all)


class SteeringServer:
    """Serves one job until ``close``, or until ``ended`` says that it is over."""

    def __init__(
        self,
        job: Any,
        *,
        name: str,
        checkpoint: str | None = None,
        job_id: Callable[[], str] = lambda: "",
        ended: Callable[[], bool] = lambda: False,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._requests = Requests(job, ended)
        self._job_id = job_id
        self._ended = ended
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._workers: set[threading.Thread] = set()
        stem = f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)[:20]}-{secrets.token_hex(4)}"
        place = _private_directory(environ)
        self.contact = Contact(
            name=name,
            job_id=job_id(),
            pid=self._pid,
            process_start=process_start(self._pid) or "",
            host=socket.gethostname(),
            checkpoint=checkpoint,
            socket=str(place / f"{stem}.sock"),
            secret=secrets.token_hex(32),
            since=time.time(),
            file=str(place / f"{stem}.json"),
        )
        self._wake_read, self._wake_write = socket.socketpair()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(self.contact.socket)
            os.chmod(self.contact.socket, 0o600)
            self._listener.listen(CONNECTIONS_MAX)
            self._listener.setblocking(False)
            _write_contact(self.contact)
        except BaseException:
            _remove(self.contact)
            self._shut_sockets()
            raise
        _open_servers.add(self)
        self._thread = threading.Thread(target=self._serve, name="penstock-steering", daemon=True)
        self._thread.start()

    def close(self, *, wait: bool = True) -> None:
        """Take the files away, so that no client finds the job any more, and let the answers under way go out."""
        with self._lock:
            first, self._closed = not self._closed, True
        if first and os.getpid() == self._pid:  # a forked child has no business with its parent's files
            _remove(self.contact)
            _open_servers.discard(self)
            with contextlib.suppress(OSError):
                self._wake_write.send(b"x")
        if not wait:
            return
        deadline = time.monotonic() + CLOSE_S
        for thread in (self._thread, *self._workers_now()):
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _workers_now(self) -> list[threading.Thread]:
        with self._lock:
            return list(self._workers)

    def _serve(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._listener, selectors.EVENT_READ)
                selector.register(self._wake_read, selectors.EVENT_READ)
                while not self._closed:
                    ready = selector.select(LOOK_S)
                    if self._closed:
                        break
                    if any(key.fileobj is self._listener for key, _ in ready):
                        self._accept()
                    self._look_around()
        finally:
            self.close(wait=False)
            self._shut_sockets()

    def _shut_sockets(self) -> None:
        for each in (self._listener, self._wake_read, self._wake_write):
            each.close()

    def _look_around(self) -> None:
        if self._ended():
            self.close(wait=False)
        elif not self.contact.job_id and (job_id := self._job_id()):
            known = replace(self.contact, job_id=job_id)
            with self._lock:
                if self._closed:
                    return
                with contextlib.suppress(OSError):  # it can still be found by its name
                    _write_contact(known)
                self.contact = known

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            time.sleep(0.01)  # the client has gone again, or there are too many open files: either passes
            return
        connection.setblocking(True)
        with self._lock:
            full = len(self._workers) >= CONNECTIONS_MAX
            if not full:
                worker = threading.Thread(
                    target=self._converse, args=(connection,), name="penstock-steering-client", daemon=True
                )
                self._workers.add(worker)
        if not full:
            worker.start()
            return
        busy = SteeringError("too many others are asking the job.", remedy="Try again in a few seconds.")
        with connection, contextlib.suppress(OSError):
            connection.settimeout(0.1)
            connection.sendall(json.dumps(_failure(busy)).encode() + b"\n")

    def _converse(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError, EOFError):
                try:
                    line = _read_line(connection, REQUEST_BYTES_MAX, READ_S)
                except TimeoutError:
                    reply = _failure(SteeringError(f"no whole request came within {READ_S:g} s."))
                except OverflowError:
                    reply = _failure(SteeringError(f"the request is longer than {REQUEST_BYTES_MAX:,} bytes."))
                else:
                    reply = self._reply(line)
                connection.settimeout(SEND_S)
                connection.sendall(json.dumps(reply, default=str).encode() + b"\n")
        finally:
            with self._lock:
                self._workers.discard(threading.current_thread())

    def _reply(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
            secret = request["secret"].encode()
            verb, arguments = str(request["do"]), dict(request.get("with", {}))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return _failure(SteeringError("the request is not of the form that this job understands."))
        if not hmac.compare_digest(secret, self.contact.secret.encode()):
            return _failure(
                SteeringError(
                    "the secret is not this job's.",
                    remedy=f"It is in {self.contact.file}, which only the owner of the job can read.",
                )
            )
        try:
            return {"ok": True, "result": self._requests.carry_out(verb, arguments)}
        except PenstockError as error:
            return _failure(error)
        except Exception as error:  # the job goes on, whatever a request met
            return _failure(SteeringError(f"the job met {type(error).__name__}: {error}."))


class Requests:
    """What the verbs mean: calls on the job. One change at a time; questions are answered meanwhile."""

    def __init__(self, job: Any, ended: Callable[[], bool]) -> None:
        self._job = job
        self._ended = ended
        self._changing = threading.Lock()

    def carry_out(self, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        verbs: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "status": self._status,
            "wait": self._wait,
            "stop": self._stop,
            "scale": self._change(self._scale),
            "migrate": self._change(self._migrate),
            "rebalance": self._change(self._rebalance),
            "cancel": self._change(self._cancel, at_once=True),
        }
        if verb not in verbs:
            raise ConfigError(f"a job cannot '{verb}'.", remedy=f"It can {', '.join(verbs)}.")
        return verbs[verb](arguments)

    # -- questions

    def _status(self, _: Mapping[str, Any]) -> dict[str, Any]:
        return {"status": self._job.status().to_dict(), "notices": list(getattr(self._job, "notices", ()))}

    def _wait(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        deadline = time.monotonic() + min(float(arguments.get("seconds", 0.0)), WAIT_S_MAX)
        while not (over := self._ended()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return {"ended": over, **self._status({})}

    # -- changes

    def _change(
        self, act: Callable[[Mapping[str, Any]], str], at_once: bool = False
    ) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
        def change(arguments: Mapping[str, Any]) -> dict[str, Any]:
            if not self._changing.acquire(timeout=CHANGE_S):
                raise SteeringError("another change is being made to the job.", remedy="Try again when it is done.")
            try:
                phase = self._job.status().phase
                if phase == "starting":
                    raise SteeringError("the job is starting.", remedy="Try again when it runs.")
                if phase in OVER or phase == "stopping":
                    raise SteeringError(f"the job is {phase}: it takes no changes any more.")
                said = act(arguments)
                if phase == "recovering" and not at_once and arguments.get("dry_run") is not True:
                    said += " The job is recovering: this waits for the end of that, and nothing moves before."
                return {"said": said}
            finally:
                self._changing.release()

        return change

    def _call(self, method: str, what: str, *arguments: Any) -> Any:
        function = getattr(self._job, method, None)
        if function is None:
            raise ConfigError(
                f"this job cannot {what}.", remedy="The version of Penstock that it was started with does not know how."
            )
        return function(*arguments)

    def _stop(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """``stop`` returns at the job's end, so it has a thread of its own. A client that wants to see the end waits in
        the same request: the next one might come too late.
        """

        def stop() -> None:
            with contextlib.suppress(Exception):  # an error in stopping is raised by the job's ``wait``
                self._job.stop()

        if not self._ended():
            threading.Thread(target=stop, name="penstock-steering-stop", daemon=True).start()
        said = {"said": "stopping: the epochs under way are finished and a checkpoint is taken."}
        return {**said, **self._wait(arguments)} if "seconds" in arguments else said

    def _scale(self, arguments: Mapping[str, Any]) -> str:
        dry = arguments.get("dry_run") is True
        status: JobStatus = self._job.status()
        said = []
        for uid, count in _mapping(arguments, "stages").items():
            number = _whole(count, f"the instances of '{uid}'", 1)
            said.append(self._rescale_said(status, uid, number))
            if not dry:
                self._call("rescale", "rescale a stage", uid, number)
        if "nodes" in arguments:
            number = _whole(arguments["nodes"], "the number of nodes to add or remove", None)
            if number == 0:
                raise ConfigError("0 nodes more is no change.", remedy="Use --nodes +1 or --nodes -1, for example.")
            said.append(_nodes_said(status, number))
            if not dry:
                if number > 0:
                    self._call("scale_out", "add nodes", number)
                else:
                    self._call("scale_in", "give nodes back", -number)
        if names := [str(name) for name in arguments.get("remove", ())]:
            for name in names:
                _node(status, name)
            said.append(f"the slices of {', '.join(names)} go to the other nodes, then it leaves.")
            if not dry:
                self._call("scale_in", "give nodes back", names)
        for name, count in _mapping(arguments, "cores").items():
            number = _whole(count, f"the cores of '{name}'", 1)
            node = _node(status, name)
            used = (node.limit or node.cores or "?") if node else "?"
            said.append(f"node {name}: {used} -> {number} cores.")
            if not dry:
                self._call("set_cores", "change the cores of a node", name, number)
        if not said:
            raise ConfigError("nothing to scale was named.", remedy="Use --nodes, --remove, --stage or --cores.")
        return " ".join([*said, "Nothing was changed: a dry run."] if dry else said)

    def _rescale_said(self, status: JobStatus, uid: str, number: int) -> str:
        stage = _stage(status, uid)
        if stage is None:
            return f"'{uid}': {number} instances."
        said = f"stage {stage[0]}: {stage[1]} -> {number} instances"
        routing = getattr(self._job, "routing", None)
        if routing is None or stage[0] not in routing.owners:
            return f"{said}."
        changed = routing.rescale(stage[0], number)  # refuses what cannot be
        return f"{said}, {routing.moved(changed)} of {routing.slices_in(stage[0])} slices move."

    def _migrate(self, arguments: Mapping[str, Any]) -> str:
        status: JobStatus = self._job.status()
        uid = str(arguments.get("stage", ""))
        _stage(status, uid)
        given = arguments.get("slices", ())
        if not isinstance(given, list) or not given:
            raise ConfigError("no slices to move were named.", remedy="Name them as in 3,5,8-12.")
        chosen = sorted({_whole(each, "a slice", 0) for each in given})
        if status.slices and chosen[-1] >= status.slices:
            raise ConfigError(
                f"there is no slice {chosen[-1]}: the job has {status.slices}.",
                remedy=f"Use 0 to {status.slices - 1}.",
            )
        container = _whole(arguments.get("container"), "the container", 0)
        self._call("migrate", "migrate slices", uid, chosen, container)
        count = f"{len(chosen)} slice{'s' if len(chosen) > 1 else ''}"
        return f"{count} of {uid} are on the way to container {container}; penstock status shows them until they are."

    def _rebalance(self, _: Mapping[str, Any]) -> str:
        self._call("rebalance", "rebalance itself")
        return "rebalancing: slices move in the background; penstock status shows them."

    def _cancel(self, _: Mapping[str, Any]) -> str:
        self._call("cancel_moves", "cancel moves")
        return "moves that have not taken effect were cancelled."


def _whole(value: Any, what: str, low: int | None) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or (low is not None and value < low):
        least = "" if low is None else f" of {low} or more"
        raise ConfigError(f"{what} cannot be {value!r}.", remedy=f"Use a whole number{least}.")
    return value


def _mapping(arguments: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = arguments.get(name, {})
    if not isinstance(value, dict):
        raise ConfigError(f"{name} cannot be {value!r}.", remedy="It maps names to numbers.")
    return value


def _stage(status: JobStatus, uid: str) -> tuple[str, int] | None:
    """Id and instances of the stage that operator ``uid`` runs in; None while no stages are known."""
    for stage in status.stages:
        if uid == stage.id or uid in stage.operators:
            return stage.id, stage.instances
    if not status.stages:
        return None
    raise ConfigError(
        f"there is no stage or operator '{uid}' in this job.",
        remedy=f"The stages are {', '.join(stage.id for stage in status.stages)}.",
    )


def _node(status: JobStatus, name: str) -> NodeStatus | None:
    for node in status.nodes:
        if node.name == name:
            return node
    if not status.nodes:
        return None
    raise ConfigError(
        f"there is no node '{name}' in this job.",
        remedy=f"The nodes are {', '.join(node.name for node in status.nodes)}.",
    )


def _nodes_said(status: JobStatus, number: int) -> str:
    if not status.nodes:
        return f"nodes: {number:+d}."
    now = len(status.nodes)
    if now + number < 1:
        raise ConfigError(
            f"the job has {now} node{'s' if now > 1 else ''}: {-number} cannot leave.",
            remedy="At least one stays; penstock stop ends the job.",
        )
    return f"nodes: {now} -> {now + number}."


def serve(job: Any, **about: Any) -> tuple[SteeringServer | None, str]:
    """A server for the job, or None and why there is none: that is no reason for a job not to run."""
    try:
        return SteeringServer(job, **about), ""
    except (OSError, PenstockError) as error:
        return None, f"the job cannot be steered from other processes: {error}"


# --- the client ----------------------------------------------------------------------------------------------------


class RemoteJob:
    """A job of another process. It has the ``status`` and ``wait`` that the live view needs, and the verbs."""

    def __init__(self, contact: Contact, answer_s: float = ANSWER_S) -> None:
        self.contact = contact
        self._answer_s = answer_s
        self._last: JobStatus | None = None
        self._over = False

    def status(self) -> JobStatus:
        if not self._over:
            try:
                self._last = JobStatus.from_dict(self.request("status")["status"])
            except _Vanished:
                self._ended_unseen()
        if self._last is None:
            raise self._gone()
        return self._last

    def wait(self, timeout: float | None = None) -> bool:
        """True when the job has ended; raises when it failed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._over:
            left = WAIT_S_MAX if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                seen = self.request("wait", seconds=min(left, WAIT_S_MAX))
            except _Vanished:
                self._ended_unseen()
                break
            self._saw(seen)
            if deadline is not None and time.monotonic() >= deadline:
                break
        if self._over and self._last is not None and self._last.phase == "failed":
            raise SteeringError(f"the job failed: {self._last.error or 'it did not say why'}")
        return self._over

    def stop(self, *, wait: bool = False) -> str:
        if not wait:
            return str(self.request("stop")["said"])
        seen = self.request("stop", seconds=WAIT_S_MAX)
        self._saw(seen)
        self.wait()
        return str(seen["said"])

    def _saw(self, seen: Mapping[str, Any]) -> None:
        self._last, self._over = JobStatus.from_dict(seen["status"]), seen["ended"]

    def change(self, verb: str, **arguments: Any) -> str:
        return str(self.request(verb, **arguments)["said"])

    def request(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """The job's answer; raises its refusal."""
        line = json.dumps({"secret": self.contact.secret, "do": verb, "with": arguments}).encode() + b"\n"
        if len(line) > REQUEST_BYTES_MAX:
            raise ConfigError("the request is too long.", remedy="Name fewer things at a time.")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(self._answer_s)
            try:
                connection.connect(self.contact.socket)
                with contextlib.suppress(BrokenPipeError):  # it may have answered before it heard us out
                    connection.sendall(line)
                reply = json.loads(_read_line(connection, REPLY_BYTES_MAX, self._answer_s))
            except (ConnectionError, FileNotFoundError, EOFError):
                raise self._gone() from None
            except TimeoutError:
                raise SteeringError(
                    f"job {self.contact.said()} did not answer within {self._answer_s:g} s.",
                    remedy="Its process may be stopped or very busy; look at it with ps.",
                ) from None
            except (OSError, ValueError, OverflowError) as error:
                raise SteeringError(f"job {self.contact.said()} could not be understood: {error}.") from None
        if not reply.get("ok"):
            raise _raised(reply.get("error", {}))
        return dict(reply["result"])

    def _gone(self) -> PenstockError:
        if not self.contact.alive() or not os.path.exists(self.contact.file):
            return _Vanished(f"job {self.contact.said()} is not running any more.")
        return SteeringError(
            f"job {self.contact.said()} does not answer, though its process is there.",
            remedy="It may be ending just now: try again in a few seconds.",
        )

    def _ended_unseen(self) -> None:
        """The job is gone. Without its file it ended in good order; with it, it was killed."""
        self._over = True
        if os.path.exists(self.contact.file):
            _remove(self.contact)
            raise SteeringError(
                f"job {self.contact.said()} was killed: its process is gone.",
                remedy="Start it again with penstock run; with a checkpoint directory it resumes.",
            ) from None
        if self._last is not None and self._last.phase not in OVER:
            self._last = msgspec.structs.replace(self._last, phase="stopped")


class _Vanished(SteeringError):
    """The job's process is gone, or its file is."""


def parse_slices(text: str) -> list[int]:
    """``3,5,8-12`` as numbers."""

    def numbers() -> Iterator[int]:
        for part in text.split(","):
            low, dash, high = part.strip().partition("-")
            first, last = int(low), int(high) if dash else int(low)
            if not 0 <= first <= last < 65_536:
                raise ValueError(part)
            yield from range(first, last + 1)

    try:
        return sorted(set(numbers()))
    except ValueError:
        raise ConfigError(f"'{text}' names no slices.", remedy="Write them as in 3,5,8-12.") from None


def parse_counts(assignments: Sequence[str], flag: str) -> dict[str, int]:
    """``counts=4`` of a flag that may be repeated."""
    counts = {}
    for assignment in assignments:
        name, equals, number = assignment.rpartition("=")
        if not equals or not name or not number.isdecimal():
            raise ConfigError(
                f"{flag} {assignment}: not of the form NAME=NUMBER.", remedy=f"For example: {flag} counts=4"
            )
        counts[name] = int(number)
    return counts
