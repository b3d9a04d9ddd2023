"""The archive of Spark's classes: which one, when it is used, when it is made. Java itself is in tests/spark."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from penstock.engines.spark.archive import FORGET_S, HEAD, WRITING_S, archive_path, java_options

WHOLE = b"\xa8\xba\x0b\xf0 and more"


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    java = tmp_path / "java" / "bin" / "java"
    jars = tmp_path / "spark" / "jars"
    java.parent.mkdir(parents=True)
    jars.mkdir(parents=True)
    java.write_text("a Java")
    return {
        "JAVA_HOME": str(tmp_path / "java"),
        "SPARK_HOME": str(tmp_path / "spark"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }


def test_another_java_or_spark_has_another_archive(environ: dict[str, str], tmp_path: Path) -> None:
    first = archive_path(environ)
    assert first is not None and first == archive_path(environ)
    assert first.parent == tmp_path / "cache" / "penstock" and first.suffix == ".jsa"
    (tmp_path / "java" / "bin" / "java").write_text("another Java")
    second = archive_path(environ)
    (tmp_path / "spark" / "jars" / "more.jar").write_text("")
    os.utime(tmp_path / "spark" / "jars", ns=(1, 1))
    assert len({first, second, archive_path(environ)}) == 3


def test_without_java_there_is_none(environ: dict[str, str], tmp_path: Path) -> None:
    assert archive_path({**environ, "JAVA_HOME": str(tmp_path / "nowhere")}) is None
    assert archive_path({k: v for k, v in environ.items() if k != "JAVA_HOME"} | {"PATH": str(tmp_path)}) is None
    assert java_options(None) == ([], [])


def test_the_first_driver_leaves_one_and_later_ones_use_it(environ: dict[str, str]) -> None:
    path = archive_path(environ)
    assert path is not None
    assert java_options(path, leave=False) == ([], []) and not path.parent.exists()
    driver, executors = java_options(path)
    assert driver[0] == f"-XX:ArchiveClassesAtExit={path}" and executors == []
    path.write_bytes(WHOLE)
    driver, executors = java_options(path)
    assert driver == executors and driver[0] == f"-XX:SharedArchiveFile={path}"


def test_one_that_is_being_written_is_left_alone_and_one_that_never_was_finished_is_made_again(
    environ: dict[str, str],
) -> None:
    path = archive_path(environ)
    assert path is not None
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(HEAD) + b"half of it")
    now = path.stat().st_mtime
    assert java_options(path, now=now + 1) == ([], [])
    assert java_options(path, now=now + WRITING_S + 1)[0][0].startswith("-XX:ArchiveClassesAtExit=")


def test_archives_that_nobody_used_for_long_go(environ: dict[str, str]) -> None:
    path = archive_path(environ)
    assert path is not None
    path.parent.mkdir(parents=True)
    old, recent = path.with_name("spark-4.2.0-0.jsa"), path.with_name("spark-4.2.1-0.jsa")
    for file in (old, recent):
        file.write_bytes(WHOLE)
    os.utime(old, (time.time() - FORGET_S - 60,) * 2)
    java_options(path)
    assert not old.exists() and recent.exists()


def test_a_directory_that_cannot_be_used_is_no_error(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    assert java_options(archive_path(environ)) == ([], [])
    spaced = archive_path({**environ, "XDG_CACHE_HOME": str(tmp_path / "a b")})
    assert java_options(spaced) == ([], []), "options are separated by spaces"
