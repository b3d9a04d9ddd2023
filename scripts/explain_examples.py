"""Writes docs/examples.md and the drawings in docs/img/flows/ from the examples themselves.

    python scripts/explain_examples.py

The page shows what each flow says about itself through ``flow.explain()``, so it cannot be out of date: a test compares
it with the examples. Paths start at the root of the project, so that the page is the same on every machine.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from contextlib import chdir
from pathlib import Path
from types import ModuleType

import penstock as ps

ROOT = Path(__file__).resolve().parent.parent
PAGE = Path("docs/examples.md")
DRAWINGS = Path("docs/img/flows")
HEAD = """\
# Examples

Each example is one file in [examples/](../examples). Its data is in `examples/data/`, and the output that it must give
is in a file beside it. `python examples/NAME.py` runs an example, and so does `penstock run examples/NAME.py`, which
shows the job at work. The results are in `out/`, and a second run resumes from `state/`. `scripts/example_data.py`
invents the data of the applications.

Each section shows what a flow says about itself: `flow.explain()` and `flow.explain("svg")`. A stage is a part of the
flow that runs without an exchange. The key of a keyed stage divides its rows among containers.
`scripts/explain_examples.py` writes this page.
"""
ORDER = (
    ("Beginnings", ("word_count", "top_words", "gaps", "dead_letters")),
    (
        "Applications",
        (
            "top_urls",
            "trending_hashtags",
            "network_monitoring",
            "audience_insight",
            "sentiment_change",
            "tweet_similarity",
            "word_frequencies",
            "card_fraud",
        ),
    ),
)


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"explained_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # type hints of operators are looked up there
    spec.loader.exec_module(module)
    return module


def from_the_root(flow: ps.Flow) -> ps.Flow:
    """The flow, with sources and sinks that name their files from the project's root.

    This happens before the flow is drawn: a drawing cuts long lines, and the length of a path depends on the machine.
    """
    for node in flow.graph().nodes:
        part = node.source or node.sink
        if part is not None:
            text = part.describe().replace(f"{ROOT}{os.sep}", "")
            part.describe = lambda text=text: text  # type: ignore[method-assign, misc]
    return flow


def pages() -> dict[Path, str]:
    """Every file that this script writes, by its path from the root."""
    names = [name for _, group in ORDER for name in group]
    there = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
    assert sorted(names) == there, f"the page names {sorted(names)}, the directory has {there}"
    out: dict[Path, str] = {}
    parts = [HEAD]
    with chdir(ROOT):
        for title, group in ORDER:
            parts.append(f"## {title}\n")
            for name in group:
                module = load(ROOT / "examples" / f"{name}.py")
                flow = from_the_root(module.flow)
                first = (module.__doc__ or "").split("\n")[0]
                drawing = DRAWINGS / f"{name}.svg"
                out[drawing] = flow.explain("svg")
                parts.append(f"### {name}\n\n{first}\n")
                parts.append(f"```sh\npython examples/{name}.py\n```\n")
                parts.append(f"![The stages of {name}](img/flows/{name}.svg)\n")
                parts.append(f"```text\n{flow.explain()}\n```\n")
                parts.append(
                    f"[The file](../examples/{name}.py), and [what it must print](../examples/{name}.expected).\n"
                )
    out[PAGE] = "\n".join(parts)
    return out


def main() -> None:
    written = pages()
    (ROOT / DRAWINGS).mkdir(parents=True, exist_ok=True)
    for path in (ROOT / DRAWINGS).glob("*.svg"):
        if path.relative_to(ROOT) not in written:
            path.unlink()
    for path, text in written.items():
        (ROOT / path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
