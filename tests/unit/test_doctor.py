"""The checks of the machine, shown machines that do not exist."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from penstock import doctor
from penstock.errors import MachineError

JAVA_17 = 'openjdk version "17.0.15" 2025-04-15\nOpenJDK Runtime Environment\n'
JAVA_8 = 'java version "1.8.0_292"\n'
GIB = doctor.GIB


def says(text: str, code: int = 0) -> doctor.Runner:
    return lambda command: (code, text)


def absent(command: list[str]) -> tuple[int, str]:
    raise FileNotFoundError(command[0])


@pytest.mark.parametrize(
    ("text", "major"),
    [(JAVA_17, 17), (JAVA_8, 8), ('openjdk version "21" 2023-09-19', 21), ('openjdk version "25-ea"', 25), ("?", None)],
)
def test_java_versions(text: str, major: int | None) -> None:
    assert doctor.parse_java_version(text) == major


def test_java_is_found_as_spark_finds_it() -> None:
    commands: list[list[str]] = []

    def run(command: list[str]) -> tuple[int, str]:
        commands.append(command)
        return 0, JAVA_17

    assert doctor.check_java({}, run, lambda name: "/bin/java") == doctor.Check("Java", "ok", "17 (/bin/java)")
    assert doctor.check_java({"JAVA_HOME": "/opt/j"}, run, lambda name: "/bin/java").outcome == "ok"
    assert commands == [["/bin/java", "-version"], ["/opt/j/bin/java", "-version"]]


def test_java_missing_old_or_elsewhere() -> None:
    missing = doctor.check_java({}, says(""), lambda name: None)
    assert (missing.outcome, missing.found) == ("fail", "not found")
    assert "openjdk-17-jre-headless" in missing.remedy and "brew" in missing.remedy and "dnf" in missing.remedy
    old = doctor.check_java({}, says(JAVA_8), lambda name: "/bin/java")
    assert (old.outcome, old.found) == ("fail", "/bin/java is version 8, but 17 is needed")
    wrong_home = doctor.check_java({"JAVA_HOME": "/nowhere"}, absent, lambda name: "/bin/java")
    assert wrong_home.outcome == "fail" and "JAVA_HOME is /nowhere" in wrong_home.found
    assert wrong_home.remedy.startswith("Unset JAVA_HOME")
    stub = doctor.check_java({}, says("The operation couldn't be completed.", 1), lambda name: "/usr/bin/java")
    assert stub.outcome == "fail" and "couldn't be completed" in stub.found


def test_versions() -> None:
    assert doctor.check_python((3, 10, 2)).outcome == "fail"
    assert doctor.check_python((3, 11, 0)).outcome == "ok"
    assert doctor.check_pyspark("4.3.7").outcome == "ok"
    for other in ("4.2.0", "4.30.0", "5.0.0", "4.4.0.dev1"):
        assert doctor.check_pyspark(other).outcome == "fail", other
    assert doctor.check_package("polars", "1.35.2").outcome == "fail"
    assert doctor.check_package("numpy").outcome == "ok"


def test_a_spark_home_without_spark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    check = doctor.check_pyspark("4.3.0")
    assert (check.outcome, check.remedy) == ("fail", "Unset SPARK_HOME.")


def answer(minor: int, prefix: str, missing: list[str]) -> doctor.Runner:
    return says("warning first\n" + json.dumps([[3, minor], prefix, missing]))


def test_executor_python() -> None:
    ours = sys.version_info[1]
    environ = {"PYSPARK_PYTHON": "/p"}

    def outcome(run: doctor.Runner) -> str:
        return doctor.check_executor_python("local[2]", environ, run).outcome

    assert outcome(answer(ours, sys.prefix, [])) == "ok"
    assert outcome(answer(ours, "/elsewhere", [])) == "warn"
    assert outcome(answer(ours + 1, sys.prefix, [])) == "fail"
    assert outcome(answer(ours, sys.prefix, ["polars"])) == "fail"
    assert outcome(says("boom", 1)) == "fail"
    assert outcome(says("", 0)) == "fail"
    assert outcome(absent) == "fail"
    assert doctor.check_executor_python("local[2]", {}).outcome == "ok"
    assert doctor.check_executor_python("spark://h:7077", {}).outcome == "warn"


def test_executor_python_for_real() -> None:
    check = doctor.check_executor_python("local[2]", {"PYSPARK_PYTHON": sys.executable})
    assert check.outcome in ("ok", "fail")
    assert "does not run" not in check.found


def test_memory_disk_and_cores() -> None:
    assert doctor.check_memory(3 * GIB).outcome == "ok"
    assert doctor.check_memory(GIB).found == "1.0 GiB available, but 2 are needed"
    assert [doctor.check_disk(free).outcome for free in (50 * GIB, GIB, GIB // 4)] == ["ok", "warn", "fail"]
    assert doctor.check_cores("local[8]", 2).outcome == "warn"
    assert doctor.check_cores("local[2]", 2).outcome == "ok"
    assert doctor.check_cores("local[*]", 1).outcome == "warn"


def test_host_names() -> None:
    def no_host(name: str) -> str:
        if name == "box":
            raise OSError(name)
        return "127.0.0.1"

    def nothing(name: str) -> str:
        raise OSError(name)

    assert doctor.check_host_names(no_host, "localhost", {}).outcome == "ok"
    lost = doctor.check_host_names(no_host, "box", {})
    assert lost.outcome == "fail" and "SPARK_LOCAL_IP=127.0.0.1" in lost.remedy
    assert doctor.check_host_names(no_host, "box", {"SPARK_LOCAL_IP": "127.0.0.1"}).outcome == "ok"
    assert doctor.check_host_names(nothing, "box", {}).found == "localhost has no address"


def test_writable(tmp_path: Path) -> None:
    assert doctor.check_writable(str(tmp_path)).outcome == "ok"
    assert doctor.check_writable(str(tmp_path / "gone")).outcome == "warn"
    assert list(tmp_path.iterdir()) == []


def test_check_machine_raises_the_first_hard_failure_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    good = doctor.Check("x", "ok", "")
    monkeypatch.setattr(doctor, "check_pyspark", lambda: good)
    monkeypatch.setattr(doctor, "check_java", lambda: good)
    monkeypatch.setattr(
        doctor, "check_memory", lambda: doctor.Check("memory", "fail", "1.0 GiB available", "Buy some.")
    )
    with pytest.raises(MachineError) as caught:
        doctor.check_machine("local[2]")
    assert (caught.value.message, caught.value.remedy) == ("memory: 1.0 GiB available.", "Buy some.")
    doctor.check_machine("spark://elsewhere:7077")
    monkeypatch.setattr(doctor, "check_java", lambda: doctor.Check("Java", "fail", "not found", "Install it."))
    with pytest.raises(MachineError, match="Java: not found"):
        doctor.check_machine("spark://elsewhere:7077")


def test_every_problem_has_a_remedy() -> None:
    checks = doctor.run_checks()
    assert all(check.remedy for check in checks if check.outcome != "ok")
    assert len({check.name for check in checks}) == len(checks) == 15
    assert json.loads(json.dumps(doctor.report(checks)))["checks"][0]["name"] == "Python"


def test_who_else_can_give_orders() -> None:
    def outcome(master: str, **settings: str) -> str:
        found = {f"spark.{name.replace('_', '.')}": value for name, value in settings.items()}
        return doctor.check_authentication(master, found).outcome

    assert outcome("local[*]") == outcome("local-cluster[2,1,1024]") == "ok"
    assert outcome("local[2]", authenticate="false") == "warn"
    assert outcome("spark://h:7077") == outcome("yarn") == "warn"
    assert outcome("spark://h:7077", authenticate="true") == "warn", "not encrypted"
    assert outcome("spark://h:7077", authenticate="true", network_crypto_enabled="true") == "ok"
    assert "docs/security.md" in doctor.check_authentication("spark://h:7077", {}).remedy


def test_places_that_others_can_write_to(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / ".cache" / "penstock").mkdir(parents=True, mode=0o700)
    home.chmod(0o700)
    (home / ".cache").chmod(0o700)
    assert doctor.check_private_places({"HOME": str(home)}).outcome == "ok"
    (home / ".cache" / "penstock").chmod(0o777)
    check = doctor.check_private_places({"HOME": str(home)})
    assert check.outcome == "warn" and "penstock" in check.found
