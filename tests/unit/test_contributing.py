"""``docs/contributing.md`` keeps its promise: each thing it adds is one file and one test, and they work.

The blocks are written where their first line says, below a directory of the test's own, and the packages of Penstock
look for modules there too. So the code on the page is imported under the names that the page gives it.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "contributing.md"
BLOCK = re.compile(r"^```python\n# (\S+\.py)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILES = dict(BLOCK.findall(PAGE.read_text(encoding="utf-8")))
TESTS = [name for name in FILES if name.startswith("tests/")]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's files in a tree that extends the packages of ``penstock``."""
    known = set(sys.modules)
    for name, code in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code, encoding="utf-8")
        if name.startswith("src/"):
            package = importlib.import_module(".".join(Path(name).parent.parts[1:]))
            monkeypatch.setattr(package, "__path__", [*package.__path__, str(path.parent)])
    yield tmp_path  # type: ignore[misc]
    for module in set(sys.modules) - known:
        if str(getattr(sys.modules[module], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[module]
            package, _, child = module.rpartition(".")
            if hasattr(sys.modules.get(package), child):
                delattr(sys.modules[package], child)


def test_each_thing_is_one_new_file_and_one_test() -> None:
    assert len(FILES) == 6 and len(TESTS) == 3
    assert [name for name in FILES if (ROOT / name).exists()] == []


@pytest.mark.parametrize("name", TESTS)
def test_the_tests_of_the_page_pass(name: str, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location(f"page_{Path(name).stem}", tree / name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tests = {key: value for key, value in vars(module).items() if key.startswith("test_")}
    assert len(tests) >= 2
    given = {"tmp_path": tree, "monkeypatch": monkeypatch}
    for test in tests.values():
        test(**{key: given[key] for key in test.__code__.co_varnames[: test.__code__.co_argcount]})
