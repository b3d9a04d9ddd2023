"""What Penstock makes on a disk is for its owner alone, and command lines hold no secrets."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest

import penstock as ps
from penstock.config import Config
from penstock.connectors.spill import open_spill
from penstock.connectors.store import DirectoryLock, FsspecStore
from penstock.engines.spark import archive, security, slots
from penstock.observe.journal_codec import Unknown, from_json


@pytest.fixture(params=[0o000, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(root: Path) -> dict[str, str]:
    """The files and directories below that somebody else could read or write."""
    found = {str(p.relative_to(root)): stat.S_IMODE(p.lstat().st_mode) for p in root.rglob("*")}
    return {name: oct(mode) for name, mode in found.items() if mode & 0o077}


def make(first: int, n: int, rng: object) -> pl.DataFrame:
    return pl.DataFrame({"word": [f"w{v % 7}" for v in range(first, first + n)]})


def test_a_job_leaves_nothing_that_others_can_read(tmp_path: Path, umask: int) -> None:
    checkpoint = tmp_path / "made" / "checkpoint"
    flow = ps.Flow("private")
    words = flow.source("in", ps.generator(make, rows=2_000, schema={"word": str}))
    words.key_by("word").aggregate("counts", n=ps.count()).sink("out", ps.jsonl(tmp_path / "out"))
    ps.run_local(flow, checkpoint=str(checkpoint), slices=4, instances=2, epoch_rows=500, checkpoint_interval_s=0)
    names = {p.name for p in checkpoint.iterdir()}
    assert {"LOCK", "job.json", "state", "manifests"} <= names, "the job wrote a checkpoint"
    assert any("journal" in name for name in names), names
    assert modes(tmp_path / "made") == {}
    assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == 0o700


def test_a_directory_that_was_there_stays_as_it_is(tmp_path: Path, umask: int) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o775)
    with DirectoryLock(str(shared)):
        FsspecStore(str(shared)).put("log/1.json", b"{}")
    assert modes(tmp_path) == {"shared": "0o775"}


def test_backups_on_a_disk_are_private(tmp_path: Path, umask: int) -> None:
    spill = open_spill("job", "run", "node", root=str(tmp_path))
    spill.put("piece", b"a slice")
    assert modes(tmp_path) == {}
    spill.clear()


def test_no_secret_is_on_a_command_line() -> None:
    settings = {**security.protection("local-cluster[2,1,1024]"), "spark.ssl.keyPassword": "p", "spark.x": "y"}
    secret = {settings[security.SECRET], settings[security.PAGES_KEY], "p"}
    shown = security.without_secrets(settings)
    assert not secret & set(shown.values())
    assert shown["spark.authenticate"] == "true" and shown["spark.x"] == "y"


def test_every_session_has_secrets_of_its_own() -> None:
    one, other = (security.protection("local-cluster[1,1,512]") for _ in range(2))
    for name in (security.SECRET, security.PAGES_KEY):
        assert one[name] != other[name] and len(one[name]) >= 32


def test_sockets_lie_where_nobody_else_may_go() -> None:
    directory = Path(security.protection("local[2]")[security.SOCKETS])
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert len(os.fsencode(directory)) <= 60, "Spark's name of a socket takes 42 of 103 bytes"


def test_a_daemon_makes_its_socket_for_its_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int
) -> None:
    monkeypatch.setenv("PYTHON_UNIX_DOMAIN_ENABLED", "true")
    monkeypatch.setenv("PYTHON_WORKER_FACTORY_SOCK_DIR", str(tmp_path))
    monkeypatch.setenv(slots.UMASK, "26")
    in_child = []
    monkeypatch.setattr(os, "register_at_fork", lambda after_in_child: in_child.append(after_in_child))
    slots.keep_sockets_private()
    listening, path = slots.listen()
    listening.close()
    assert stat.S_IMODE(os.stat(path).st_mode) & 0o077 == 0
    in_child[0]()
    assert security.umask() == 0o26, "workers write the user's output, with the user's umask"


def test_an_archive_of_classes_that_others_can_replace_is_not_used(tmp_path: Path) -> None:
    """Java runs what is in it."""
    path = tmp_path / "cache" / "spark.jsa"
    path.parent.mkdir(mode=0o700)
    path.write_bytes(b"head and more")
    assert archive.java_options(path)[1]
    path.parent.chmod(0o777)
    assert archive.java_options(path) == ([], [])


def test_the_settings_of_a_user_win() -> None:
    config = Config(spark={"spark.authenticate": "false"})
    assert {**security.protection("local[2]"), **config.spark}["spark.authenticate"] == "false"


@pytest.mark.parametrize(
    "name",
    [
        "engines.spark.slots.Daemon",
        "engines.merging.MergeAside",
        "connectors.store.DirectoryLock",
        "state.store.Protocol",
        "control.controller.deque",
    ],
)
def test_a_journal_makes_no_objects_but_of_its_own_kinds(name: str) -> None:
    assert isinstance(from_json({"!": name}), Unknown)
