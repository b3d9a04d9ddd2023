"""Pictures are drawn, in both kinds, from full and from empty histories, without a display or a warning."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.observe.plot import plot_bars, plot_run

HISTORY = [
    {"epoch": n, "at_s": n * 0.4, "rows": 1000 * n, "ms": 200 + n, "state_rows": n, "instances": 2 if n < 5 else 4}
    for n in range(1, 20)
]


def test_a_run_as_svg_carries_its_words(tmp_path: Path) -> None:
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        path = plot_run(HISTORY, tmp_path / "sub" / "run.svg", "A run", [(2.0, "rescale 2 to 4"), (7.5, "killed")])
    text = path.read_text()
    assert all(part in text for part in ("A run", "rescale 2 to 4", "killed", "rows a second", "instances"))


def test_a_run_as_png(tmp_path: Path) -> None:
    assert plot_run(HISTORY, tmp_path / "run.png", "A run").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_epochs(tmp_path: Path) -> None:
    assert plot_run([], tmp_path / "run.png", "Nothing yet").stat().st_size > 0


def test_bars_plain_and_grouped(tmp_path: Path) -> None:
    import matplotlib

    rows = [{"label": "Penstock", "value": 3.4e6}, {"label": "Peer", "value": 1.2e6}]
    grouped = [{**row, "group": group} for row in rows for group in ("small", "large")][:3]
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        plain = plot_bars(rows, tmp_path / "a.svg", "Words", "words a second").read_text()
        text = plot_bars(grouped, tmp_path / "b.svg", "Words", "words a second").read_text()
    assert "3.40 M" in plain and "1.20 M" in plain
    assert "small" in text and "large" in text and "Penstock" in text
    plot_bars([], tmp_path / "c.png", "Nothing", "")


def test_other_kinds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.png or \.svg"):
        plot_run(HISTORY, tmp_path / "run.gif", "A run")
