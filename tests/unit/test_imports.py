"""What importing costs and drags in. The import contracts look at the code; these look at a fresh interpreter."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

import penstock

SPARK = ("pyspark", "py4j")
HEAVY = (*SPARK, "polars", "pyarrow", "matplotlib", "numpy")


def loaded_after(imports: list[str], suspects: tuple[str, ...]) -> list[str]:
    code = "\n".join(
        [*(f"import {name}" for name in imports), "import sys", f"print([m for m in {suspects!r} if m in sys.modules])"]
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    result: list[str] = eval(done.stdout)
    return result


def modules_of(package: str) -> list[str]:
    found = __import__(package, fromlist=["__path__"])
    return [package, *(module.name for module in pkgutil.walk_packages(found.__path__, package + "."))]


def test_the_probe_sees_what_it_looks_for() -> None:
    assert loaded_after(["json"], ("json", "polars")) == ["json"]


@pytest.mark.parametrize("package", ["penstock.control", "penstock.state", "penstock.operators"])
def test_pure_planes_load_no_spark(package: str) -> None:
    assert loaded_after(modules_of(package), SPARK) == []


def test_the_package_loads_no_spark() -> None:
    assert loaded_after(["penstock"], SPARK) == []
    assert loaded_after(["penstock.flow"], SPARK) == []


def test_the_command_answers_without_heavy_imports() -> None:
    assert loaded_after(["penstock.cli"], HEAVY) == []


def test_everything_public_can_be_reached() -> None:
    for name in getattr(penstock, "__all__", ()):
        assert getattr(penstock, name) is not None, name
