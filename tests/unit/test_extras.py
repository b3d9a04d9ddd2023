"""Packages of extras: what needs one says so before it starts, and nothing else needs it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import penstock as ps
from penstock import demo, extras
from penstock.errors import MachineError
from penstock.observe.plot import plot_bars

ROOT = Path(__file__).resolve().parents[2]


def missing(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """As on a machine without the package."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(extras, "installed", lambda name: name != package)
    monkeypatch.setattr(demo, "installed", lambda name: name != package)


def test_a_picture_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    missing(monkeypatch, "matplotlib")
    with pytest.raises(MachineError, match="matplotlib") as caught:
        plot_bars([{"label": "a", "value": 1}], tmp_path / "x.svg", "title", "rows")
    assert "penstock[plots]" in caught.value.remedy


def test_the_demonstration_refuses_a_plot_before_it_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    missing(monkeypatch, "matplotlib")
    with pytest.raises(MachineError, match="--plot needs the package matplotlib"):
        demo.run_demo(plot=tmp_path / "x.svg")


def test_the_demonstration_without_matplotlib_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    missing(monkeypatch, "matplotlib")
    targets = []

    def run(master: str, executors: int | None, seconds: float, target: Path | None, *rest: object) -> dict[str, bool]:
        targets.append(target)
        return {"exact": True}

    monkeypatch.setattr(demo, "_run", run)
    demo.run_demo(seconds=5)
    monkeypatch.setattr(demo, "installed", lambda name: True)
    demo.run_demo(seconds=5)
    assert targets == [None, demo.PLOT]


def test_a_sketch_without_datasketches_is_refused_when_the_flow_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.operators import sketches

    missing(monkeypatch, "datasketches")
    sketches._datasketches.cache_clear()
    stream = ps.Flow("f").source("s", ps.words(rows=1)).key_by("word")
    with pytest.raises(MachineError, match="approx_distinct needs the package datasketches") as caught:
        stream.aggregate("n", n=ps.approx_distinct("word"))
    assert "penstock[sketches]" in caught.value.remedy
    sketches._datasketches.cache_clear()


def test_what_an_installed_package_lacks_is_not_taken_for_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "s3fs.py").write_text("import not_there_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "s3fs", raising=False)
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        extras.need("s3fs", "an address of S3")


def test_flows_and_the_demonstration_import_no_extra() -> None:
    modules = ("penstock", "penstock.demo", "penstock.cli", "penstock.engines.spark.engine")
    code = f"import sys; sys.modules.update(dict.fromkeys({sorted(extras.EXTRAS)}))\nimport {', '.join(modules)}\n"
    code += "for name in penstock.__all__: getattr(penstock, name)\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_every_extra_is_declared_and_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {
        re.split(r"[<>=]", need)[0]: extra
        for extra, needs in project["optional-dependencies"].items()
        for need in needs
    }
    assert declared == extras.EXTRAS
    pinned = (ROOT / "requirements-extras.txt").read_text()
    core = (ROOT / "requirements.txt").read_text()
    for package in extras.EXTRAS:
        assert re.search(rf"^{package}==", pinned, re.MULTILINE)
        assert not re.search(rf"^{package}==", core, re.MULTILINE)
    for needed in project["dependencies"]:
        assert re.search(rf"^{re.split(r'[<>=]', needed)[0]}==", core, re.MULTILINE), needed


def test_every_pin_is_exact() -> None:
    for path in ROOT.glob("requirements*.txt"):
        for line in path.read_text().splitlines():
            assert not line or line.startswith("#") or re.fullmatch(r"[A-Za-z0-9._-]+(\[\w+\])?==[\w.]+", line), line
