"""Steering a job from another process: real sockets, real second processes, and everything that may be wrong."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

import penstock as ps
from penstock import cli
from penstock.config import Config
from penstock.control.routing import RoutingTable
from penstock.engines import steering
from penstock.engines.job import start
from penstock.engines.steering import (
    RemoteJob,
    SteeringError,
    SteeringServer,
    find_job,
    parse_counts,
    parse_slices,
    process_start,
    running_jobs,
)
from penstock.errors import ConfigError
from penstock.ids import StageId
from penstock.observe.status import JobStatus, MoveStatus, NodeStatus, StageStatus
from penstock.testing import rows


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A short one: the path of a socket has 104 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="pc-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Places of our own for sockets: other jobs of this user must not be seen, nor see ours."""
    for name in ("home", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "home" / ".penstock" / "run"
    steering.close_all()


class FakeJob:
    def __init__(self, **changes: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.ended = threading.Event()
        self.seen = JobStatus(
            job="words",
            flow="words",
            engine="local",
            phase="running",
            epoch=7,
            slices=16,
            stages=(StageStatus(id="counts", kind="keyed", operators=("counts", "big"), instances=2),),
            nodes=(
                NodeStatus(name="n1", host="a", cores=2, containers=(0,), slices=8),
                NodeStatus(name="n2", host="b", zone="z", cores=2, containers=(1,), slices=8),
            ),
            moves=(MoveStatus(stage="counts", slice=3, source=0, target=1, phase="copying", since_s=1.5),),
        )
        self.seen = msgspec.structs.replace(self.seen, **changes)
        self.routing = RoutingTable.initial(16, {StageId("counts"): True}, 2)

    def status(self) -> JobStatus:
        return self.seen

    def rescale(self, uid: str, instances: int) -> None:
        self.calls.append(("rescale", uid, instances))

    def scale_out(self, nodes: int) -> None:
        self.calls.append(("scale_out", nodes))

    def scale_in(self, nodes: int | list[str]) -> None:
        self.calls.append(("scale_in", nodes))

    def set_cores(self, node: str, cores: int) -> None:
        self.calls.append(("set_cores", node, cores))

    def migrate(self, uid: str, slices: list[int], container: int) -> None:
        if container > 1:
            raise ConfigError(f"stage '{uid}' has no container {container}.", remedy="Use 0 or 1.")
        self.calls.append(("migrate", uid, slices, container))

    def rebalance(self) -> None:
        self.calls.append(("rebalance",))

    def cancel_moves(self) -> None:
        self.calls.append(("cancel_moves",))

    def stop(self) -> None:
        self.calls.append(("stop",))
        self.seen = msgspec.structs.replace(self.seen, phase="stopped", epoch=9)
        self.ended.set()


def served(job: FakeJob | None = None, **about: Any) -> tuple[FakeJob, SteeringServer]:
    job = job or FakeJob()
    settings: dict[str, Any] = {"name": "words", "job_id": lambda: "abc123", "ended": job.ended.is_set, **about}
    return job, SteeringServer(job, **settings)


def say(server: SteeringServer, line: bytes) -> dict[str, Any]:
    """Whatever bytes, straight to the socket; what came back."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20)
        connection.connect(server.contact.socket)
        with contextlib.suppress(BrokenPipeError):
            connection.sendall(line)
        with connection.makefile("rb") as answer:
            return dict(json.loads(answer.readline()))


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "penstock.cli", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, list(arguments))


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


# --- files --------------------------------------------------------------------------------------------------------


def mode(path: str | Path) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


def test_only_the_owner_can_read_what_is_there(place: Path) -> None:
    before = os.umask(0)
    try:
        _, server = served(checkpoint="/state")
    finally:
        os.umask(before)
    assert (mode(place), mode(place.parent)) == (0o700, 0o700)
    assert mode(server.contact.file) == 0o600 and mode(server.contact.socket) == 0o600
    written = json.loads(Path(server.contact.file).read_text())
    assert written["pid"] == os.getpid() and written["process_start"] == process_start(os.getpid())
    assert (written["name"], written["job_id"], written["checkpoint"]) == ("words", "abc123", "/state")
    assert len(written["secret"]) == 64 and written["socket"] == server.contact.socket
    assert written["secret"] not in repr(server.contact) and "secret" not in server.contact.public()


def test_the_runtime_directory_is_preferred_and_an_open_one_is_not_trusted(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    _, first = served()
    assert Path(first.contact.file).parent == tmp_path / "penstock"
    first.close()
    (tmp_path / "penstock").chmod(0o755)
    _, second = served()
    assert Path(second.contact.file).parent == place
    place.chmod(0o750)
    _, third = served()
    assert Path(third.contact.file).parent == tmp_path / "tmp" / f"penstock-{os.getuid()}"
    assert [c.file for c in running_jobs().jobs] == [third.contact.file]
    assert sum("open to others" in note for note in running_jobs().notes) == 2


def test_a_symbolic_link_is_no_private_directory(place: Path, tmp_path: Path) -> None:
    place.parent.mkdir(mode=0o700)
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    place.symlink_to(tmp_path / "elsewhere")
    _, server = served()
    assert Path(server.contact.file).parent != place and list((tmp_path / "elsewhere").iterdir()) == []


def test_a_path_too_long_for_a_socket_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    _, server = served()
    assert not server.contact.file.startswith(str(deep))


def test_no_place_at_all_is_a_notice_and_no_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name in ("HOME", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path / "file"))
    server, problem = steering.serve(FakeJob(), name="words")
    assert server is None
    assert problem.startswith("the job cannot be steered from other processes: there is no private directory")


def test_everything_is_removed_at_the_end(place: Path) -> None:
    _, server = served()
    assert len(list(place.iterdir())) == 2
    server.close()
    server.close()
    assert list(place.iterdir()) == [] and running_jobs().jobs == ()


def test_a_job_that_ends_unwatched_takes_its_files_away(place: Path) -> None:
    job, _ = served()
    job.ended.set()
    until(lambda: list(place.iterdir()) == [])


def test_the_id_is_written_once_it_is_known() -> None:
    known: list[str] = []
    _, server = served(job_id=lambda: known[0] if known else "")
    assert find_job("words").job_id == ""
    known.append("fff000")
    until(lambda: find_job("words").job_id == "fff000")
    assert mode(server.contact.file) == 0o600


# --- finding ------------------------------------------------------------------------------------------------------


def test_by_name_id_process_and_directory(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    _, server = served(checkpoint=str(tmp_path / "state"))
    for target in ("words", "abc123", str(os.getpid()), "state", "./state/", str(tmp_path / "state")):
        assert find_job(target).file == server.contact.file, target
    with pytest.raises(ConfigError, match="there is no running job 'other'") as caught:
        find_job("other")
    assert "Running now: 'words' (id abc123" in caught.value.remedy


def test_by_url() -> None:
    _, server = served(checkpoint="s3://bucket/state")
    assert find_job("s3://bucket/state/").file == server.contact.file


def test_two_of_one_name_must_be_told_apart() -> None:
    _, one = served(job_id=lambda: "one1")
    _, two = served(job_id=lambda: "two2", checkpoint="/b")
    with pytest.raises(ConfigError, match="'words' is not one job but 2") as caught:
        find_job("words")
    assert "id one1" in caught.value.message and "checkpoint /b" in caught.value.message
    assert find_job("one1").file == one.contact.file and find_job("/b").file == two.contact.file


def test_nothing_runs() -> None:
    with pytest.raises(ConfigError) as caught:
        find_job("words")
    assert caught.value.remedy == "No job of yours is running on this machine."


def stale(server: SteeringServer, **changes: Any) -> Path:
    """A file such as a killed job leaves: the same, of a process that is gone."""
    fields = json.loads(Path(server.contact.file).read_text()) | changes
    path = Path(server.contact.file).with_name("left-behind.json")
    path.write_text(json.dumps(fields))
    path.chmod(0o600)
    path.with_suffix(".sock").write_text("")
    return path


def test_a_file_whose_process_is_gone_is_removed_and_said_so() -> None:
    _, server = served()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    path = stale(server, pid=gone.pid, name="old")
    with pytest.raises(SteeringError, match=r"'old' .* is not running: its process is gone. The file .* was removed"):
        find_job("old")
    assert not path.exists() and not path.with_suffix(".sock").exists()
    with pytest.raises(ConfigError, match="no running job 'old'"):
        find_job("old")
    assert find_job("words").file == server.contact.file


def test_many_that_were_killed_are_one_line() -> None:
    _, server = served()
    for number in range(5):
        stale(server, process_start="another time", name=f"old-{number % 2}").rename(
            Path(server.contact.file).with_name(f"left-{number}.json")
        )
    said: list[str] = []
    assert find_job("words", note=said.append).file == server.contact.file
    assert said == [
        "5 jobs (old-0, old-1) are not running: their processes are gone. The files they left were removed."
    ]
    assert running_jobs().said() == []


def test_a_process_number_used_again_does_not_revive_a_job() -> None:
    _, server = served()
    stale(server, process_start="another time", name="old")
    notes: list[str] = []
    assert find_job("words", note=notes.append).file == server.contact.file
    assert len(notes) == 1 and "'old'" in notes[0] and "was removed" in notes[0]


def test_a_file_of_another_machine_is_left_alone() -> None:
    _, server = served()
    path = stale(server, host="elsewhere", process_start="x", name="far")
    with pytest.raises(SteeringError, match="runs on another machine") as caught:
        find_job("far")
    assert caught.value.remedy == "Run the command on elsewhere." and path.exists()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"name": 3}'])
def test_rubbish_among_the_files_is_passed_over(text: str) -> None:
    _, server = served()
    path = Path(server.contact.file).with_name("a-rubbish.json")
    path.write_text(text)
    path.chmod(0o600)
    listing = running_jobs()
    assert [c.name for c in listing.jobs] == ["words"] and path.exists()
    assert len(listing.notes) == 1 and "a-rubbish.json was passed over" in listing.notes[0]


def test_a_file_that_others_can_read_is_not_believed() -> None:
    _, server = served()
    os.chmod(server.contact.file, 0o644)
    assert running_jobs().jobs == ()


def test_start_times_of_processes() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    began = process_start(child.pid)
    assert began and began == process_start(child.pid) and began != process_start(1)
    child.kill()
    until(lambda: process_start(child.pid) is None)  # a zombie counts as gone
    child.communicate()
    assert process_start(child.pid) is None


# --- who asks, and how --------------------------------------------------------------------------------------------


def test_a_wrong_secret_is_refused() -> None:
    job, server = served()
    remote = RemoteJob(replace(server.contact, secret="0" * 64))
    for verb in ("status", "stop", "rebalance"):
        with pytest.raises(SteeringError, match="the secret is not this job's"):
            remote.request(verb)
    assert job.calls == []
    assert server.contact.secret not in json.dumps(say(server, b'{"secret": "", "do": "status"}\n'))


@pytest.mark.parametrize(
    "line",
    [b"\n", b"GET / HTTP/1.1\r\n\r\n", b"\xff\xfe\n", b"[]\n", b"3\n", b'{"secret": 3, "do": "stop"}\n', b"[" * 9999],
)
def test_rubbish_is_refused_and_harms_nobody(line: bytes) -> None:
    job, server = served()
    answer = say(server, line if line.endswith(b"\n") else line + b"\n")
    assert answer["ok"] is False and "not of the form" in answer["error"]["message"]
    assert RemoteJob(server.contact).status().epoch == 7 and job.calls == []


def test_too_long_a_line_is_refused() -> None:
    _, server = served()
    answer = say(server, b"x" * (steering.REQUEST_BYTES_MAX + 2) + b"\n")
    assert "longer than 65,536 bytes" in answer["error"]["message"]
    with pytest.raises(ConfigError, match="too long"):
        RemoteJob(server.contact).request("scale", remove=["n" * steering.REQUEST_BYTES_MAX])


def test_clients_that_hang_cost_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steering, "READ_S", 0.5)
    _, server = served()
    silent = [socket.socket(socket.AF_UNIX) for _ in range(4)]
    for each in silent:
        each.settimeout(20)
        each.connect(server.contact.socket)
        each.sendall(b'{"secret": ')
    assert RemoteJob(server.contact).status().epoch == 7
    for each in silent:
        with each, each.makefile("rb") as answer:
            assert "no whole request came within 0.5 s" in json.loads(answer.readline())["error"]["message"]
    until(lambda: not server._workers)


def test_the_number_of_clients_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steering, "CONNECTIONS_MAX", 2)
    _, server = served()
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            silent = stack.enter_context(socket.socket(socket.AF_UNIX))
            silent.connect(server.contact.socket)
        until(lambda: len(server._workers) == 2)
        with pytest.raises(SteeringError, match="too many others"):
            RemoteJob(server.contact).status()
    until(lambda: not server._workers)
    assert RemoteJob(server.contact).status().epoch == 7


def test_a_client_that_leaves_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    _, server = served()
    for text in (b"", b'{"secr', json.dumps({"secret": server.contact.secret, "do": "status"}).encode() + b"\n"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(server.contact.socket)
            connection.sendall(text)
    until(lambda: not server._workers)
    assert RemoteJob(server.contact).status().epoch == 7


def test_a_job_that_does_not_answer() -> None:
    job, server = served()
    held = threading.Event()
    job.rebalance = held.wait  # type: ignore[assignment]
    with pytest.raises(SteeringError, match=r"did not answer within 0\.3 s"):
        RemoteJob(server.contact, answer_s=0.3).change("rebalance")
    assert RemoteJob(server.contact).status().epoch == 7, "questions are answered meanwhile"
    held.set()


def test_what_a_job_raises_comes_back_as_it_was() -> None:
    job, server = served()
    remote = RemoteJob(server.contact)
    with pytest.raises(ConfigError) as caught:
        remote.change("migrate", stage="counts", slices=[1], container=5)
    assert (caught.value.message, caught.value.remedy) == ("stage 'counts' has no container 5.", "Use 0 or 1.")
    job.rebalance = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(SteeringError, match="the job met ZeroDivisionError: division by zero"):
        remote.change("rebalance")
    assert remote.status().phase == "running"


# --- what is asked ------------------------------------------------------------------------------------------------


def test_each_verb_is_a_call_on_the_job() -> None:
    job, server = served()
    remote = RemoteJob(server.contact)
    assert remote.status() == job.seen
    said = remote.change("scale", stages={"big": 4})
    assert said == "stage counts: 2 -> 4 instances, 8 of 16 slices move."
    assert remote.change("scale", nodes=1) == "nodes: 2 -> 3."
    assert remote.change("scale", nodes=-1) == "nodes: 2 -> 1."
    assert "the slices of n2 go to the other nodes" in remote.change("scale", remove=["n2"])
    assert remote.change("scale", cores={"n1": 4}) == "node n1: 2 -> 4 cores."
    assert "3 slices of counts are on the way to container 1" in remote.change(
        "migrate", stage="counts", slices=[5, 3, 4], container=1
    )
    remote.change("rebalance")
    remote.change("cancel")
    assert job.calls == [
        ("rescale", "big", 4),
        ("scale_out", 1),
        ("scale_in", 1),
        ("scale_in", ["n2"]),
        ("set_cores", "n1", 4),
        ("migrate", "counts", [3, 4, 5], 1),
        ("rebalance",),
        ("cancel_moves",),
    ]


def test_a_dry_run_says_and_changes_nothing() -> None:
    job, server = served()
    remote = RemoteJob(server.contact)
    for asked in ({"stages": {"counts": 4}}, {"nodes": 1}, {"remove": ["n1"]}, {"cores": {"n1": 4}}):
        assert remote.change("scale", dry_run=True, **asked).endswith("Nothing was changed: a dry run.")
    assert job.calls == []


@pytest.mark.parametrize(
    ("verb", "asked", "part"),
    [
        ("dance", {}, "a job cannot 'dance'"),
        ("scale", {}, "nothing to scale"),
        ("scale", {"nodes": 0}, "0 nodes more"),
        ("scale", {"nodes": -2}, "the job has 2 nodes: 2 cannot leave"),
        ("scale", {"nodes": "1"}, "cannot be '1'"),
        ("scale", {"nodes": True}, "cannot be True"),
        ("scale", {"remove": ["n9"]}, "there is no node 'n9'"),
        ("scale", {"cores": {"n9": 1}}, "there is no node 'n9'"),
        ("scale", {"cores": {"n1": 0}}, "cannot be 0"),
        ("scale", {"stages": {"gone": 1}}, "there is no stage or operator 'gone'"),
        ("scale", {"stages": {"counts": 17}}, "only 16 slices"),
        ("scale", {"stages": [3]}, "stages cannot be"),
        ("migrate", {"stage": "gone", "slices": [1], "container": 0}, "there is no stage or operator 'gone'"),
        ("migrate", {"stage": "counts", "slices": [], "container": 0}, "no slices"),
        ("migrate", {"stage": "counts", "slices": [16], "container": 0}, "there is no slice 16"),
        ("migrate", {"stage": "counts", "slices": [1], "container": -1}, "cannot be -1"),
    ],
)
def test_what_cannot_be_is_refused(verb: str, asked: dict[str, Any], part: str) -> None:
    job, server = served()
    with pytest.raises(ConfigError) as caught:
        RemoteJob(server.contact).change(verb, **asked)
    assert part in caught.value.message and caught.value.remedy
    assert job.calls == []


def test_a_job_that_lacks_a_method_says_so() -> None:
    class Older:
        def status(self) -> JobStatus:
            return FakeJob().seen

    server = SteeringServer(Older(), name="words")
    with pytest.raises(ConfigError, match="this job cannot migrate slices"):
        RemoteJob(server.contact).change("migrate", stage="counts", slices=[1], container=1)


@pytest.mark.parametrize("phase", ["starting", "stopping", "stopped", "failed", "complete"])
def test_changes_need_a_job_that_runs(phase: str) -> None:
    job, server = served(FakeJob(phase=phase))
    with pytest.raises(SteeringError, match=phase):
        RemoteJob(server.contact).change("rebalance")
    assert job.calls == []


@pytest.mark.parametrize(
    ("verb", "asked", "waits"),
    [
        ("scale", {"stages": {"counts": 4}}, True),
        ("scale", {"remove": ["n2"]}, True),
        ("scale", {"cores": {"n1": 1}}, True),
        ("scale", {"cores": {"n1": 1}, "dry_run": True}, False),
        ("migrate", {"stage": "counts", "slices": [1], "container": 1}, True),
        ("rebalance", {}, True),
        ("cancel", {}, False),
    ],
)
def test_in_the_middle_of_a_recovery_the_answer_says_that_a_change_waits(
    verb: str, asked: dict[str, Any], waits: bool
) -> None:
    job, server = served(FakeJob(phase="recovering"))
    recovering = RemoteJob(server.contact).change(verb, **asked)
    assert ("this waits for the end of that" in recovering) is waits
    assert bool(job.calls) is not asked.get("dry_run", False)
    job.seen = msgspec.structs.replace(job.seen, phase="running")
    assert "recovering" not in RemoteJob(server.contact).change(verb, **asked)


def test_stop_and_wait_see_the_end() -> None:
    job, server = served()
    remote = RemoteJob(server.contact)
    assert remote.wait(0.0) is False
    remote.stop(wait=True)
    assert (remote.status().phase, remote.status().epoch, job.calls) == ("stopped", 9, [("stop",)])


def test_waiting_for_a_job_that_fails_raises_its_error() -> None:
    job, server = served()
    job.seen = msgspec.structs.replace(job.seen, phase="failed", error="The disk is full.")
    job.ended.set()
    with pytest.raises(SteeringError, match=r"the job failed: The disk is full\."):
        RemoteJob(server.contact).wait()


def test_a_job_that_ended_between_two_questions() -> None:
    _, server = served()
    remote = RemoteJob(server.contact)
    remote.status()
    server.close()
    assert remote.wait(5.0) is True and remote.status().phase == "stopped"


def test_a_server_answers_who_waits_before_it_closes() -> None:
    job, server = served()
    seen: list[bool] = []
    waiting = threading.Thread(target=lambda: seen.append(RemoteJob(server.contact).wait(30)))
    waiting.start()
    until(lambda: len(server._workers) == 1)
    job.stop()
    server.close()
    waiting.join(10)
    assert seen == [True]


@pytest.mark.parametrize(
    ("text", "slices"), [("3", [3]), ("3,5,8-12", [3, 5, 8, 9, 10, 11, 12]), (" 2 - 3 , 0,2", [0, 2, 3])]
)
def test_slices_as_text(text: str, slices: list[int]) -> None:
    assert parse_slices(text) == slices


@pytest.mark.parametrize("text", ["", "a", "3,", "5-3", "-1", "1-", "0-99999999"])
def test_text_that_names_no_slices(text: str) -> None:
    with pytest.raises(ConfigError, match="names no slices"):
        parse_slices(text)


def test_counts_as_text() -> None:
    assert parse_counts(["a=1", "b=c=2"], "--stage") == {"a": 1, "b=c": 2}
    for wrong in ("a", "=1", "a=", "a=x", "a=-1"):
        with pytest.raises(ConfigError, match="not of the form"):
            parse_counts([wrong], "--stage")


# --- the command --------------------------------------------------------------------------------------------------


def test_status_lists_and_shows() -> None:
    assert invoke("status").stdout == "No job of yours is running on this machine.\n"
    served(checkpoint="/state")
    listed = invoke("status")
    assert listed.exit_code == 0 and "words  abc123" in listed.stdout and "running" in listed.stdout
    assert json.loads(invoke("status", "--json").stdout)[0]["phase"] == "running"
    shown = invoke("status", "words").stdout
    for part in ("words  running", "id abc123", "none yet in /state", "counts", "n2", "counts/3", "0 -> 1", "copying"):
        assert part in shown, part
    as_json = json.loads(invoke("status", "words", "--json").stdout)
    assert as_json["epoch"] == 7 and as_json["about"]["job_id"] == "abc123" and "secret" not in str(as_json)


def test_status_watches_until_the_end() -> None:
    job, _ = served()
    threading.Timer(0.2, job.stop).start()
    result = invoke("status", "words", "--watch", "--json")
    phases = [json.loads(line)["phase"] for line in result.stdout.splitlines()]
    assert result.exit_code == 0 and phases[0] == "running" and phases[-1] == "stopped"


def test_commands_reach_the_job() -> None:
    job, _ = served()
    for arguments in (
        ("scale", "words", "--nodes", "-1"),
        ("scale", "words", "--nodes", "+2", "--dry-run"),
        ("scale", "words", "--remove", "n2"),
        ("scale", "words", "--stage", "counts=4"),
        ("scale", "words", "--cores", "n1=1"),
        ("migrate", "words", "counts", "3,8-9", "--to", "1"),
        ("rebalance", "words"),
        ("rebalance", "words", "--cancel"),
        ("stop", "words"),
    ):
        result = invoke(*arguments)
        assert result.exit_code == 0 and result.stdout.strip(), (arguments, result.output)
    until(lambda: ("stop",) in job.calls)
    assert job.calls == [
        ("scale_in", 1),
        ("scale_in", ["n2"]),
        ("rescale", "counts", 4),
        ("set_cores", "n1", 1),
        ("migrate", "counts", [3, 8, 9], 1),
        ("rebalance",),
        ("cancel_moves",),
        ("stop",),
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (("status", "gone"), 2, "there is no running job 'gone'"),
        (("status", "--watch"), 2, "--watch needs the job"),
        (("scale", "words"), 2, "exactly one of"),
        (("scale", "words", "--nodes", "+1", "--stage", "counts=2"), 2, "exactly one of"),
        (("scale", "words", "--nodes", "3"), 2, "neither +N nor -N"),
        (("scale", "words", "--remove", "n9"), 2, "there is no node 'n9'"),
        (("migrate", "words", "counts", "x", "--to", "1"), 2, "names no slices"),
        (("migrate", "words", "counts", "1", "--to", "7"), 2, "has no container 7"),
    ],
)
def test_errors_are_a_line_and_a_remedy(arguments: tuple[str, ...], code: int, part: str) -> None:
    served()
    result = invoke(*arguments)
    assert result.exit_code == code and part in result.stderr and "Traceback" not in result.stderr
    assert result.stderr.startswith("error: ") and len(result.stderr.splitlines()) == 2


def test_a_second_process_with_a_wrong_secret_is_told_so() -> None:
    job, server = served()
    path = Path(server.contact.file)
    fields = json.loads(path.read_text()) | {"secret": "f" * 64}
    path.write_text(json.dumps(fields))
    result = command("stop", "words")
    assert result.returncode == 1
    assert result.stderr.startswith("error: the secret is not this job's.") and "Traceback" not in result.stderr
    assert job.calls == []


# --- real jobs ----------------------------------------------------------------------------------------------------


FLOW = """
import polars as pl
import penstock as ps

def numbers(first, n, rng):
    return pl.DataFrame({"n": range(first, first + n)}).with_columns(k=pl.col("n") % 5)

flow = ps.Flow("endless")
source = flow.source("numbers", ps.generator(numbers, rows_per_s=2000))
source.key_by("k").aggregate("sums", n=ps.sum("n")).sink("out", ps.discard())
"""


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """``penstock run`` of an endless flow on the local engine, in a process of its own."""
    Path("endless.py").write_text(FLOW)
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.cli", "run", "endless.py", "--engine", "local", "--plain", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.extend(process.stdout or ()))
    reader.start()
    try:
        # The first line is of the view, which begins once signals mean "stop" and not "never mind".
        until(lambda: (said and any(c.job_id for c in running_jobs().jobs)) or process.poll() is not None, 60)
        assert process.poll() is None, "".join(said)
        yield process
    finally:
        process.kill()
        process.wait()
        reader.join()
        assert process.stdout is not None
        process.stdout.close()


def test_a_real_job_is_asked_rescaled_and_stopped_from_another_process(place: Path) -> None:
    with running("--checkpoint", "state", "--instances", "1", "--slices", "8") as process:
        until(lambda: RemoteJob(find_job("endless")).status().epoch > 1)
        shown = command("status", "state")
        assert shown.returncode == 0, shown.stderr
        assert "endless  running" in shown.stdout and str(process.pid) in shown.stdout and "sums" in shown.stdout
        dry = command("scale", "endless", "--stage", "sums=2", "--dry-run")
        assert dry.stdout.startswith("stage sums: 1 -> 2 instances, 4 of 8 slices move."), dry.stderr
        assert command("scale", "endless", "--stage", "sums=2").returncode == 0
        remote = RemoteJob(find_job("endless"))
        until(lambda: {o.id: o.instances for o in remote.status().stages}["sums"] == 2)
        stopped = command("stop", "state", "--wait")
        assert stopped.returncode == 0, stopped.stderr
        assert stopped.stdout.startswith("endless stopped after epoch ")
        assert process.wait(30) == 0
        assert list(place.iterdir()) == []
    assert command("status", "endless").returncode == 2


def test_whoever_waits_for_a_job_waits_until_it_has_tidied_up() -> None:
    # The main thread returns from ``wait`` and the process ends: an answer that is still being written would be lost.
    flow = ps.Flow("short")
    source = flow.source("numbers", rows([{"k": 1}]))
    source.key_by("k").aggregate("rows", n=ps.count()).sink("out", ps.discard())
    job = start(flow, engine="local", config=Config(control=False))
    tidying, go_on, seen = threading.Event(), threading.Event(), []

    def tidy() -> None:
        tidying.set()
        assert go_on.wait(20)
        seen.append("tidied up")

    job._cleanup = tidy

    def wait() -> None:
        job.wait()
        seen.append("returned")

    first, second = threading.Thread(target=wait), threading.Thread(target=wait)
    first.start()
    assert tidying.wait(20)
    second.start()
    second.join(0.2)  # the wrong way returns at once
    go_on.set()
    first.join()
    second.join()
    assert seen == ["tidied up", "returned", "returned"]


def test_ctrl_c_once_and_twice_leave_nothing_behind(place: Path) -> None:
    with running() as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0 and list(place.iterdir()) == []
    with running() as process:
        # Both at once: whether the first had time to end the job or the second cut it short, the files must be gone.
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        assert list(place.iterdir()) == []


def test_a_killed_job_is_stale() -> None:
    with running() as process:
        remote = RemoteJob(find_job("endless"))
        remote.status()
        process.kill()
        process.wait()
        with pytest.raises(SteeringError, match="was killed: its process is gone"):
            remote.wait(5)
        with pytest.raises(ConfigError, match="no running job"):
            find_job("endless")


def test_a_job_without_control_is_not_found(place: Path) -> None:
    scope: dict[str, Any] = {}
    exec(textwrap.dedent(FLOW), scope)
    with start(scope["flow"], engine="local", config=Config(control=False)) as job:
        until(lambda: job.status().epoch > 0)
        assert not place.exists() and running_jobs().jobs == ()


def test_a_job_of_this_process_is_gone_when_wait_returns(place: Path) -> None:
    scope: dict[str, Any] = {}
    exec(textwrap.dedent(FLOW), scope)
    job = start(scope["flow"], engine="local", config=Config(name="mine"))
    remote = RemoteJob(find_job("mine"))
    until(lambda: remote.status().epoch > 0)
    job.stop()
    assert list(place.iterdir()) == [] and not [t for t in threading.enumerate() if t.name == "penstock-steering"]
