"""``docs/benchmarks.md`` is what ``benchmarks/pages.py`` writes from the results; every figure on it is explained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import common, pages

MACHINE = {"cores": 2, "memory_gb": 8.0, "python": "3.11.7", "java": "17", "pyspark": "4.3.0"}


def result(**more: Any) -> dict[str, Any]:
    rows = [{"contender": "penstock", "round": n, "batch_words": 10, "rows_s": 1000 * n} for n in (1, 2, 6)]
    empty = {"contender": "other", "round": 1, "seconds": 3.0}
    return {"bench": "words", "machine": MACHINE, "rows": [*rows, empty], "ratios": {}, "notes": ["A note."], **more}


def test_the_page_is_up_to_date() -> None:
    assert pages.PAGE.read_text(encoding="utf-8") == pages.page(), "run make bench-page"


def test_the_figures_of_the_readme_are_up_to_date() -> None:
    readme = pages.README.read_text(encoding="utf-8")
    assert readme == pages.with_figures(readme, pages.headlines()), "run make bench-page"


def test_every_ratio_on_the_page_says_what_it_means() -> None:
    for path in sorted(pages.RESULTS.glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        shown = pages.SECTIONS[found["bench"]]
        assert [name for name in found["ratios"] if not pages.meaning(shown, name)] == [], path.name


def test_every_table_of_a_result_has_lines() -> None:
    for path in sorted(pages.RESULTS.glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        for table in pages.SECTIONS[found["bench"]].tables:
            assert list(pages.table_lines(table, found["rows"])), f"{path.name}: {table.figures}"


def test_a_table_shows_medians_and_leaves_out_rows_without_its_figure() -> None:
    lines = list(pages.table_lines(pages.Table(("batch_words",), ("rows_s", "memory_mb"), "Speed"), result()["rows"]))
    assert lines == [
        "**Speed**",
        "",
        "| contender | batch words | rows a second | memory, MB | runs |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| `penstock` | 10 | 2,000 |  | 3 |",
    ]
    assert list(pages.table_lines(pages.Table((), ("latency_ms",)), result()["rows"])) == []


def test_ratios_of_one_meaning_share_a_line() -> None:
    shown = pages.Section((), {"slow_*": "slower is worse"})
    lines = list(pages.ratio_lines(shown, {"slow_1": 0.5, "other": 12345.6, "slow_2": 2.0}))
    assert lines[2:] == ["| slower is worse | `slow_1` 0.5, `slow_2` 2 |", "|  | `other` 12,346 |"]


def test_a_result_says_with_which_code_it_was_taken() -> None:
    assert pages.taken(result()).startswith("*Version 0.1.0, date unknown. 2 cores, 8 GB. Python 3.11.7, Java 17,")
    kept = pages.taken(result(recorded={"commit": "abc", "date": "2026-01-02"}))
    assert kept.startswith("*Committed on 2026-01-02 with abc; the commit that ran was not recorded. 2 cores")
    about = {"version": "1.2", "commit": "def", "changed": True, "date": "2026-01-03", "rounds": 1}
    assert pages.taken(result(taken=about)).startswith("*Version 1.2, commit def with changes, 2026-01-03. 1 round. 2")


def test_a_benchmark_that_the_page_does_not_know_gets_a_section_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "new.json").write_text(json.dumps(result(bench="new", ratios={"vs_old": 2.0})))
    text = pages.page(tmp_path)
    assert "## new" in text and "`vs_old` 2" in text and "- A note." in text
    assert "No result so far: `words`, `windows`," in text


def test_a_new_result_records_the_code_and_its_rounds() -> None:
    rows = [{"contender": "a", "round": 3}, {"contender": "a", "round": 1}, {"contender": "b", "round": 2}]
    found = common.taken(rows)
    assert set(found) == {"version", "commit", "changed", "date", "rounds"}
    assert found["rounds"] == 2 and len(found["date"]) == 10
    assert common.finish("x", rows, {}, [], None, print)["taken"] == found
