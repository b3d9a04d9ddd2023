"""The command: flows found or refused with clear words, signals, exit codes, and clean standard output.

The engine is a fake one. What concerns signals and file descriptors runs in a real process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock import cli
from penstock.config import Config
from penstock.errors import ConfigError, EngineError, FlowError, PenstockError
from penstock.observe.status import JobStatus

FLOW = "from penstock.flow import Flow\n"


@pytest.fixture(autouse=True)
def clean_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of its own, and no trace of what a flow's import leaves in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def write(name: str, text: str) -> str:
    Path(name).write_text(textwrap.dedent(text))
    return name


class FakeJob:
    def __init__(self, turns: int = 2, error: PenstockError | None = None) -> None:
        self.turns, self.error, self.stopped = turns, error, False

    def status(self) -> JobStatus:
        phase = "running" if self.turns > 0 else "failed" if self.error else "stopped"
        return JobStatus(job="j", flow="words", engine="local", phase=phase, epoch=7, rows=1234, uptime_s=3.0)

    def wait(self, timeout: float | None = None) -> bool:
        self.turns -= 1
        if self.turns <= 0 and self.error:
            raise self.error
        return self.turns <= 0

    def stop(self) -> None:
        self.stopped = True


class Started:
    """Stands in for ``penstock.engines.job`` and remembers how it was called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.job = FakeJob()
        self.calls: list[tuple[Any, str, Config]] = []
        module = ModuleType("penstock.engines.job")
        module.start = self.start  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "penstock.engines.job", module)

    def start(self, flow: Any, engine: str, config: Config) -> FakeJob:
        self.calls.append((flow, engine, config))
        return self.job


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    return Started(monkeypatch)


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, list(arguments))


# --- finding the flow ---------------------------------------------------------------------------------------------


def refused(target: str) -> PenstockError:
    with pytest.raises(PenstockError) as caught:
        cli.load_flow(target)
    return caught.value


def test_the_only_flow_is_found_whatever_its_name() -> None:
    write("one.py", FLOW + "mine = Flow('a')\nalias = mine\n")
    assert cli.load_flow("one.py").name == "a"


def test_several_flows_need_a_name_unless_one_is_called_flow() -> None:
    write("two.py", FLOW + "a = Flow('a')\nb = Flow('b')\n")
    error = refused("two.py")
    assert isinstance(error, ConfigError)
    assert error.message == "two.py: there are several flows in this file: a, b."
    assert error.remedy == "Say which: penstock run two.py:a"
    assert cli.load_flow("two.py:b").name == "b"
    write("three.py", FLOW + "flow = Flow('main')\nother = Flow('b')\n")
    assert cli.load_flow("three.py").name == "main"


def test_names_that_are_no_flow() -> None:
    write("one.py", FLOW + "mine = Flow('a')\nn = 3\n")
    assert refused("one.py:gone").message == 'one.py: "gone" does not exist.'
    assert refused("one.py:gone").remedy == "Flows there: mine."
    assert refused("one.py:n").message == 'one.py: "n" is no ps.Flow but int.'


def test_files_that_are_none() -> None:
    assert refused("gone.py").message == "gone.py: there is no such file."
    assert refused("gone.py:flow").message == "gone.py: there is no such file."
    assert "not a Python file" in refused(".").message
    write("notes.txt", "")
    assert "not a Python file" in refused("notes.txt").message
    write("empty.py", "x = 1\n")
    assert refused("empty.py").message == "empty.py: there is no flow in this file."


def test_a_syntax_error_shows_its_line() -> None:
    write("broken.py", "import os\nx = (1,\ny = = 2\n")
    error = refused("broken.py")
    assert isinstance(error, FlowError)
    assert error.message.startswith("broken.py:")
    assert "\n    " in error.message and "^" in error.message


def test_an_exception_shows_only_the_users_frames() -> None:
    write("helper.py", "import json\n\ndef parse(text):\n    return json.loads(text)\n")
    write("failing.py", "import helper\n\nvalue = helper.parse('{')\n")
    error = refused("failing.py")
    assert error.message.startswith("failing.py: JSONDecodeError while the file was imported: Expecting property name")
    assert 'File "failing.py", line 3' in error.message and 'File "helper.py", line 4' in error.message
    assert "json/decoder" not in error.message and "importlib" not in error.message and "cli.py" not in error.message
    assert "failing" not in sys.modules


def test_our_own_error_keeps_its_kind_and_gets_the_users_line() -> None:
    write("wrong.py", FLOW + "\nflow = Flow('not a name!')\n")
    error = refused("wrong.py")
    assert isinstance(error, FlowError)
    assert error.message.startswith("wrong.py:3: ")


def test_sys_exit_in_the_file_is_an_error() -> None:
    write("leaves.py", "import sys\nsys.exit('no')\n")
    assert "sys.exit while the file was imported: no" in refused("leaves.py").message


def test_the_flows_folder_is_importable_here_and_for_workers(clean_place: Path) -> None:
    folder = clean_place / "flows"
    folder.mkdir()
    (folder / "beside.py").write_text("NAME = 'found'\n")
    (folder / "it.py").write_text(FLOW + "import beside\nflow = Flow(beside.NAME)\n")
    assert cli.load_flow("flows/it.py").name == "found"
    assert os.environ["PYTHONPATH"].split(os.pathsep)[0] == str(folder)


def test_a_flow_named_like_a_module_does_not_replace_it() -> None:
    write("json.py", FLOW + "flow = Flow('a')\n")
    assert cli.load_flow("json.py").name == "a"
    assert sys.modules["json"] is json


def test_functions_of_the_flow_travel_by_value(clean_place: Path) -> None:
    import cloudpickle

    write("carried.py", FLOW + "flow = Flow('a')\ndef double(x):\n    return 2 * x\n")
    cli.load_flow("carried.py")
    blob = cloudpickle.dumps(sys.modules["carried"].double)
    code = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read())(21))"
    done = subprocess.run([sys.executable, "-c", code], input=blob, capture_output=True, cwd="/", env={}, check=True)
    assert done.stdout == b"42\n"


# --- run ----------------------------------------------------------------------------------------------------------


def test_flags_become_settings(started: Started) -> None:
    write("f.py", FLOW + "flow = Flow('a')\n")
    write("c.toml", "[penstock]\npoll_ms = 5\nslices = 4\n")
    result = invoke(
        *(
            "run",
            "f.py",
            "--master",
            "local[2]",
            "--checkpoint",
            "state",
            "--slices",
            "8",
            "--instances",
            "2",
            "--epochs",
            "3",
        ),
        *("--config", "c.toml", "--set", "on-error=fail", "--set", "spark.ui.enabled=false", "--engine", "local"),
    )
    assert result.exit_code == 0, result.output
    [(flow, engine, config)] = started.calls
    assert (flow.name, engine) == ("a", "local")
    assert config == Config(
        master="local[2]",
        checkpoint="state",
        slices=8,
        instances=2,
        epochs_max=3,
        poll_ms=5,
        on_error="fail",
        spark={"spark.ui.enabled": "false"},
    )
    assert "words stopped: 1.23 k rows in 7 epochs, 3 s." in result.stdout


def test_spark_is_the_default_engine(started: Started) -> None:
    write("f.py", FLOW + "flow = Flow('a')\n")
    invoke("run", "f.py")
    assert started.calls[0][1] == "spark"


def test_output_that_is_no_terminal_is_plain(started: Started) -> None:
    write("f.py", FLOW + "flow = Flow('a')\n")
    result = invoke("run", "f.py")
    assert "\x1b" not in result.output
    assert result.stdout.count("words  running") == 2


def test_json_is_json_lines_and_ends_with_the_phase(started: Started) -> None:
    write("f.py", FLOW + "print('noise')\nflow = Flow('a')\n")
    result = invoke("run", "f.py", "--json")
    statuses = [json.loads(line) for line in result.stdout.splitlines() if line != "noise"]
    assert [status["phase"] for status in statuses] == ["running", "running", "stopped"]


def test_a_failed_job_is_one_paragraph_and_a_remedy(started: Started) -> None:
    write("f.py", FLOW + "flow = Flow('a')\n")
    started.job = FakeJob(error=EngineError("The executors are gone [all of them].", remedy="Start some."))
    result = invoke("run", "f.py")
    assert result.exit_code == 1
    assert result.stderr == "error: The executors are gone [all of them].\n-> Start some.\n"
    assert "words  failed" in result.stdout
    verbose = invoke("run", "f.py", "-v")
    assert "Traceback" in verbose.stderr


def test_wrong_settings_and_files_are_usage_errors(started: Started) -> None:
    write("f.py", FLOW + "flow = Flow('a')\n")
    for arguments, part in [
        (["run", "gone.py"], "there is no such file"),
        (["run", "f.py", "--slices", "0"], "slices cannot be 0."),
        (["run", "f.py", "--set", "slcies=3"], 'Did you mean "slices"?'),
        (["run", "f.py", "--config", "gone.toml"], "gone.toml: there is no such file."),
    ]:
        result = invoke(*arguments)
        assert (result.exit_code, part in result.stderr) == (2, True), (arguments, result.stderr)
        assert "Traceback" not in result.stderr
    assert invoke("run").exit_code == 2
    assert invoke("run", "f.py", "--engine", "flink").exit_code == 2
    assert started.calls == []


def test_a_bug_of_ours_is_no_traceback_either(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    write("f.py", FLOW + "flow = Flow('a')\n")
    monkeypatch.setattr(started.job, "wait", lambda timeout=None: 1 / 0)
    result = invoke("run", "f.py")
    assert result.exit_code == 1
    assert "error: ZeroDivisionError: division by zero" in result.stderr and "Traceback" not in result.stderr
    assert started.job.stopped, "the view broke, so the job was stopped in good order"


def test_resume_hint() -> None:
    hint = cli.resume_hint(["/x/penstock", "run", "my flow.py", "--checkpoint", "st"], "st")
    assert hint == "Resume with: penstock run 'my flow.py' --checkpoint st"
    assert "--checkpoint DIR" in cli.resume_hint(["penstock", "run", "f.py"], None)


# --- signals and descriptors, in a real process -------------------------------------------------------------------

HARNESS = """
import os, signal, sys, threading
from types import ModuleType
from penstock.observe.status import JobStatus

class Job:
    def __init__(self):
        self.done, self.phase = threading.Event(), "running"
    def status(self):
        return JobStatus(job="j", flow="words", engine="spark", phase=self.phase, epoch=7)
    def wait(self, timeout=None):
        return self.done.wait(0.02)
    def stop(self):
        self.phase = "stopping"
        if "hang" in os.environ.get("FAKE", ""):
            threading.Event().wait()
        self.phase = "stopped"
        self.done.set()
        if "tidy" in os.environ.get("FAKE", ""):
            # Long enough for a command that does not wait for it to be gone: late only when the code is wrong.
            threading.Event().wait(0.3)
            open("tidied", "w").close()

def start(flow, engine, config):
    if "slow-start" in os.environ.get("FAKE", ""):
        print("starting", flush=True)
        threading.Event().wait()
    signal.signal(signal.SIGINT, signal.SIG_DFL)   # PySpark meddles with it as well
    os.write(1, b"noise of the JVM\\n")
    print("noise of a function")
    return Job()

module = ModuleType("penstock.engines.job")
module.start = start
sys.modules["penstock.engines.job"] = module
from penstock.cli import main
main()
"""


@contextlib.contextmanager
def launch(*arguments: str, fake: str = "") -> Iterator[subprocess.Popen[str]]:
    write("f.py", FLOW + "flow = Flow('a')\n")
    write("harness.py", HARNESS)
    source = str(Path(cli.__file__).resolve().parents[1])
    environ = {**os.environ, "PYTHONPATH": source, "FAKE": fake, "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "harness.py", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(stream: Any, part: str) -> str:
    for line in stream:
        if part in line:
            return str(line)
    raise AssertionError(f"the output ended without {part!r}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_stops_in_good_order_and_says_how_to_resume(number: int) -> None:
    with launch("run", "f.py", "--checkpoint", "st") as process:
        read_until(process.stdout, "running")
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "words stopped: 0 rows in 7 epochs" in out
    assert err.splitlines() == [
        "Stopping after this epoch. Ctrl-C again stops at once.",
        "Resume with: penstock run f.py --checkpoint st",
    ]


def test_the_command_waits_for_the_job_to_tidy_up() -> None:
    with launch("run", "f.py", fake="tidy") as process:
        read_until(process.stdout, "running")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert Path("tidied").exists()
    assert "--checkpoint DIR" in err


def test_the_second_signal_stops_at_once() -> None:
    with launch("run", "f.py", "--checkpoint", "st", fake="hang") as process:
        read_until(process.stdout, "running")
        process.send_signal(signal.SIGINT)
        read_until(process.stderr, "Stopping after this epoch")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Stopped." in err and "Traceback" not in err


def test_a_signal_while_starting_ends_the_command() -> None:
    with launch("run", "f.py", fake="slow-start") as process:
        read_until(process.stdout, "starting")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in err


def test_json_keeps_standard_output_to_itself() -> None:
    with launch("run", "f.py", "--json") as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=120)
    statuses = [json.loads(line) for line in [first, *out.splitlines()]]
    assert statuses[0]["phase"] == "running" and statuses[-1]["phase"] == "stopped"
    assert "noise of the JVM" in err and "noise of a function" in err


# --- bench, doctor, demo, version ---------------------------------------------------------------------------------

BENCH = """
    import os
    from benchmarks._sizes import ROWS
    SUMMARY = "Running word count against its peers."
    def run(quick, out):
        print("progress")
        return {"bench": "words", "machine": {"cores": 2}, "ratios": {"penstock / structured streaming": 3.456},
                "rows": [{"engine": "penstock", "rows_s": 2.5e6, "quick": quick, "out": str(out)}], "n": ROWS}
"""


@pytest.fixture
def benchmarks(clean_place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The repository has a package of this name as well, which other tests may have imported.
    for name in [name for name in sys.modules if name.split(".")[0] == "benchmarks"]:
        monkeypatch.delitem(sys.modules, name)
    Path("benchmarks").mkdir()
    write("benchmarks/__init__.py", "")  # a package without it would lose against the repository's
    write("benchmarks/words.py", BENCH)
    write("benchmarks/_sizes.py", "ROWS = 10\n")
    write("benchmarks/helpers.py", "def other(): ...\n")


@pytest.mark.usefixtures("benchmarks")
def test_bench_list_shows_only_benchmarks() -> None:
    assert invoke("bench", "--list").stdout.strip().split(maxsplit=1) == [
        "words",
        "Running word count against its peers.",
    ]
    assert json.loads(invoke("bench", "--list", "--json").stdout) == {"words": "Running word count against its peers."}


@pytest.mark.usefixtures("benchmarks")
def test_bench_prints_tables() -> None:
    result = invoke("bench", "words", "--quick")
    assert result.exit_code == 0, result.output
    assert "2.50 M" in result.stdout and "3.46" in result.stdout and "yes" in result.stdout


@pytest.mark.usefixtures("benchmarks")
def test_bench_json_is_one_object_and_nothing_else() -> None:
    result = invoke("bench", "words", "--json", "--out", "x.json")
    assert json.loads(result.stdout)["rows"] == [
        {"engine": "penstock", "rows_s": 2.5e6, "quick": False, "out": "x.json"}
    ]
    assert result.stdout.count("\n") == 1
    assert "progress" in result.stderr


@pytest.mark.usefixtures("benchmarks")
def test_bench_names_what_there_is() -> None:
    result = invoke("bench", "wrods")
    assert (result.exit_code, result.stderr) == (2, 'error: There is no benchmark "wrods".\n-> Benchmarks: words.\n')
    assert invoke("bench").exit_code == 2


def test_bench_outside_of_a_checkout(monkeypatch: pytest.MonkeyPatch, clean_place: Path) -> None:
    monkeypatch.setattr(cli, "__file__", str(clean_place / "a" / "b" / "cli.py"))
    result = invoke("bench", "words")
    assert result.exit_code == 2
    assert "this is no checkout of it" in result.stderr


def test_doctor_exit_code_follows_the_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock import doctor

    good, bad = doctor.Check("Python", "ok", "3.11"), doctor.Check("Java", "fail", "not found", "Install it.")
    monkeypatch.setattr(doctor, "run_checks", lambda master: [good])
    result = invoke("doctor")
    assert result.exit_code == 0 and "Ready." in result.stdout
    monkeypatch.setattr(doctor, "run_checks", lambda master: [good, bad])
    result = invoke("doctor")
    assert result.exit_code == 1 and "-> Install it." in result.stdout and "Not ready: 1 to correct." in result.stdout
    result = invoke("doctor", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["ok"] is False and found["checks"][1]["remedy"] == "Install it."


def test_demo_passes_its_flags_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    module = ModuleType("penstock.demo")
    module.run_demo = lambda **flags: calls.append(flags)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "penstock.demo", module)
    assert invoke("demo", "--seconds", "5", "--plot", "run.png", "--json").exit_code == 0
    assert calls == [{"master": None, "seconds": 5.0, "plot": Path("run.png"), "view": "json", "executors": None}]


def test_version_and_help() -> None:
    assert invoke("--version").stdout.startswith("penstock")
    listing = invoke("--help").stdout
    assert all(verb in listing for verb in ("run", "demo", "bench", "doctor"))
