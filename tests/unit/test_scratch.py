"""Scratch directories: of one process, for its owner alone, gone with it or when the next one comes."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.connectors import scratch
from penstock.connectors.scratch import Scratch, open_scratch, remove_dead
from penstock.engines.spark import place as places

KILLED = """
import os, signal, sys
from penstock.connectors.scratch import open_scratch
made = open_scratch("x", sys.argv[1])
os.makedirs(made.directory + "/deep/er")
open(made.directory + "/deep/er/file", "w").close()
print(made.directory, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(root: Path) -> Path:
    """The directory of a process that was killed."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(root)], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    found = Path(done.stdout.strip())
    assert (found / "deep/er/file").exists()
    return found


def test_it_is_for_its_owner_alone_and_goes_at_the_end(tmp_path: Path) -> None:
    made = open_scratch("x", str(tmp_path))
    path = Path(made.directory)
    assert path.parent == tmp_path and stat.S_IMODE(path.stat().st_mode) == 0o700
    (path / "file").write_text("")
    (path / "link").symlink_to(tmp_path)
    made.clear()
    made.clear()
    assert list(tmp_path.iterdir()) == []


def test_it_goes_when_the_process_ends(tmp_path: Path) -> None:
    code = KILLED.replace("os.kill(os.getpid(), signal.SIGKILL)", "")
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, check=True)
    assert list(tmp_path.iterdir()) == []


def test_those_of_the_dead_go_when_the_next_is_made(tmp_path: Path) -> None:
    living = open_scratch("x", str(tmp_path))
    dead = killed(tmp_path)
    again = open_scratch("x", str(tmp_path))
    assert not dead.exists() and Path(living.directory).exists() and Path(again.directory).exists()
    assert living.directory != again.directory
    living.clear()
    again.clear()


def test_what_is_not_a_scratch_directory_of_this_user_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "penstock-mine").mkdir()
    (tmp_path / "penstock-file").write_text("")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / ".lock").write_text("")
    (tmp_path / "penstock-link").symlink_to(tmp_path / "elsewhere")
    outside = tmp_path / "outside"
    outside.write_text("")
    (tmp_path / "penstock-trap").mkdir()
    (tmp_path / "penstock-trap" / ".lock").symlink_to(outside)
    assert remove_dead(str(tmp_path)) == []
    assert (tmp_path / "elsewhere" / ".lock").exists() and outside.exists()
    dead = killed(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert remove_dead(str(tmp_path)) == [] and dead.exists()


def test_what_cannot_be_removed_now_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A JVM that is about to end may still write."""
    made = open_scratch("x", str(tmp_path))
    path = Path(made.directory)
    (path / "busy").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(scratch.shutil, "rmtree", lambda path, ignore_errors: None)
        made.clear()
    assert sorted(entry.name for entry in path.iterdir()) == [".lock", "busy"]
    assert remove_dead(str(tmp_path)) == [path.name] and not path.exists()


def test_a_forked_child_leaves_it_to_its_parent(tmp_path: Path) -> None:
    made = Scratch(str(tmp_path / "d"))
    child = os.fork()
    if child == 0:
        made.clear()
        os._exit(0)
    os.waitpid(child, 0)
    assert Path(made.directory).exists()
    made.clear()


# -- where the JVM writes ----------------------------------------------------------------------------------------------


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As in a process that has started no Spark yet."""
    made = Scratch(str(tmp_path / "place"))
    monkeypatch.setattr(places, "place", lambda: Path(made.directory))
    monkeypatch.setattr(places, "home", places.home.__wrapped__)
    return tmp_path


def test_a_linked_home_has_everything_but_what_spark_writes(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fresh / "spark"
    for name in ("bin", "jars", "work", "logs"):
        (real / name).mkdir(parents=True)
    (real / "jars" / "a.jar").write_text("classes")
    monkeypatch.setenv("SPARK_HOME", str(real))
    monkeypatch.delenv("SPARK_LOCAL_DIRS", raising=False)
    with places.in_place(None, alone=True):
        home = Path(os.environ["SPARK_HOME"])
        assert sorted(entry.name for entry in home.iterdir()) == ["bin", "jars"]
        assert (home / "jars" / "a.jar").read_text() == "classes"
        assert os.environ["SPARK_LOCAL_DIRS"] == str(fresh / "place")
    assert os.environ["SPARK_HOME"] == str(real) and "SPARK_LOCAL_DIRS" not in os.environ


def test_local_directories_of_the_user_get_one_each(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fresh / "file").write_text("in the way")
    monkeypatch.setattr(places, "_local_scratch", places._local_scratch.__wrapped__)
    first, second, third = places.local_dirs(f"{fresh}/a, {fresh}/b,{fresh}/file").split(",")
    assert Path(first).parent == fresh / "a" and Path(second).parent == fresh / "b" and third == f"{fresh}/file"
    monkeypatch.setenv("SPARK_LOCAL_DIRS", "")
    with places.in_place(f"{fresh}/c", alone=False):
        assert Path(os.environ["SPARK_LOCAL_DIRS"]).parent == fresh / "c"
    assert os.environ["SPARK_LOCAL_DIRS"] == ""


def test_a_temporary_directory_with_a_long_name_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A Unix socket could not be in it."""
    asked: list[str] = []

    def made(what: str, root: str) -> Scratch:
        asked.append(root)
        return Scratch(str(tmp_path / f"d{len(asked)}"))

    monkeypatch.setattr(places, "open_scratch", made)
    for root in ("/tmp/" + 40 * "x", "/tmp/a b", "/var/tmp"):
        monkeypatch.setattr(places.tempfile, "gettempdir", lambda root=root: root)
        places.place.__wrapped__()
    assert asked == ["/tmp", "/tmp", "/var/tmp"]
