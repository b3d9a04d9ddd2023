"""Every file in ``examples/`` gives its expected output, and every Python block of the README and the guide runs.

On the local engine all of them, on Spark one as a newcomer would start it and one through the command: which engine
runs a flow must not show in what it puts out.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import pytest

import penstock as ps
from penstock.config import Config
from penstock.engines.job import start

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
BEGINNINGS = {"word_count", "top_words", "gaps", "dead_letters"}
"""Of a dozen lines; the others have hundreds."""
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def load(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example as a module, as ``penstock run`` loads it: its ``__main__`` part does not run."""
    name = f"example_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # dataclasses and type hints look their module up there
    spec.loader.exec_module(module)
    return module


def environment() -> dict[str, str]:
    inherited = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(part for part in (str(ROOT / "src"), inherited) if part)
    # A pipe that is not a terminal has no encoding of its own in a bare container.
    return {**os.environ, "PYTHONPATH": path, "PYTHONUTF8": "1"}


def test_there_are_examples_and_each_has_its_output() -> None:
    assert len(EXAMPLES) >= 12
    assert [path.name for path in EXAMPLES if not path.with_suffix(".expected").is_file()] == []


@pytest.mark.parametrize("small", [False, True], ids=["whole", "in small epochs"])
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_local(
    path: Path,
    small: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    module = load(path, monkeypatch)
    epoch_rows = (3 if path.stem in BEGINNINGS else 20) if small else None
    start(module.flow, engine="local", config=Config(checkpoint="state", epoch_rows=epoch_rows, instances=2)).wait()
    module.show()
    assert capsys.readouterr().out == path.with_suffix(".expected").read_text()


def test_an_example_run_twice_resumes_and_says_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = ROOT / "examples" / "top_words.py"
    for _ in range(2):
        module = load(path, monkeypatch)
        start(module.flow, engine="local", config=Config(checkpoint="state")).wait()
        module.show()
        assert capsys.readouterr().out == path.with_suffix(".expected").read_text()


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("name", ["sentiment_change", "card_fraud"])
def test_spark(
    name: str, session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Joins, and timers."""
    monkeypatch.chdir(tmp_path)
    path = ROOT / "examples" / f"{name}.py"
    module = load(path, monkeypatch)
    cloudpickle.register_pickle_by_value(module)
    try:
        config = Config(master="local[2]", checkpoint="state")
        assert start(module.flow, engine="spark", config=config).wait(240), "it hangs"
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    module.show()
    assert capsys.readouterr().out == path.with_suffix(".expected").read_text()


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["top_words", *(pytest.param(n, marks=pytest.mark.thorough) for n in ("sentiment_change", "card_fraud"))]
)
def test_spark_as_a_script(name: str, tmp_path: Path) -> None:
    """What a newcomer does first: ``python examples/top_words.py``."""
    path = ROOT / "examples" / f"{name}.py"
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=tmp_path,
        env={**environment(), "PENSTOCK_MASTER": "local[2]"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == path.with_suffix(".expected").read_text()


@pytest.mark.spark
@pytest.mark.slow
def test_spark_through_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """``penstock run``: the custom operator's class travels to workers that lack its file."""
    path = ROOT / "examples" / "gaps.py"
    command = [sys.executable, "-m", "penstock.cli", "run", str(path)]
    done = subprocess.run(
        [*command, "--checkpoint", "state/gaps", "--master", "local[2]", "--plain"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tmp_path)
    capfd.readouterr()
    load(path, monkeypatch).show()
    assert capfd.readouterr().out == path.with_suffix(".expected").read_text()


# --- the blocks of the documents -----------------------------------------------------------------------------------


def blocks(document: str) -> list[tuple[int, str]]:
    """(line, code) of each Python block."""
    text = (ROOT / document).read_text(encoding="utf-8")
    return [(text.count("\n", 0, found.start(1)) + 1, found.group(1)) for found in BLOCK.finditer(text)]


@pytest.mark.parametrize("document", ["README.md", "docs/guide.md", "docs/model.md"])
def test_every_block_of_a_document_runs(document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a document run one after another, as a reader would: later ones use what earlier ones made.

    ``ps.run`` runs them on the local engine here. The files a document reads are made by its blocks.
    """
    monkeypatch.chdir(tmp_path)
    jobs: list[ps.Job] = []

    def run(flow: ps.Flow, *, config: str | None = None, **settings: Any) -> ps.Job:
        job = start(flow, engine="local", config=Config.load(config, settings))
        jobs.append(job)
        return job

    monkeypatch.setattr(ps, "run", run)
    found = blocks(document)
    assert found, f"{document} has no Python block"
    # A module, so that classes defined in a block can be found again by their module's name.
    module = ModuleType(f"blocks_of_{Path(document).stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for line, code in found:
        try:
            exec(compile("\n" * (line - 1) + code, document, "exec"), module.__dict__)
        except Exception as error:
            raise AssertionError(f"{document}, line {line}: {type(error).__name__}: {error}") from error
    for job in jobs:
        job.stop()


def test_every_link_of_a_document_leads_somewhere() -> None:
    broken = []
    for document in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text(encoding="utf-8")):
            if "://" not in target and not (document.parent / target).exists():
                broken.append(f"{document.relative_to(ROOT)}: {target}")
    assert broken == []


def test_every_file_that_the_maps_name_is_there() -> None:
    """docs/papers.md and the module map of docs/architecture.md lead to files that exist."""
    package = ROOT / "src" / "penstock"
    missing = []
    for document in ("docs/papers.md", "docs/architecture.md"):
        for name in re.findall(r"`([\w/]+\.(?:py|md))`", (ROOT / document).read_text(encoding="utf-8")):
            homes = [place / name for place in (package, ROOT, ROOT / "tests")]
            # In the module map a row names the directory once: `operators/aggregates.py`, `windows.py`.
            found = any(home.exists() for home in homes) or ("/" not in name and any(package.rglob(name)))
            if not found:
                missing.append(f"{document}: {name}")
    assert missing == []
