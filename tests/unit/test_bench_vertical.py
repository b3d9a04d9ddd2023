"""The benchmark of cores given and taken, without Spark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import common, migrate, vertical

SERIES = {"outputs": [[0.5, 10], [1.0, 30], [3.5, 20]], "containers": [[0.5, 4], [1.0, 5], [3.5, 3]]}


def _rows(contender: str, keys: int, seconds: tuple[float, float, float]) -> list[dict[str, Any]]:
    return [
        {
            "contender": contender,
            "round": 1,
            "keys": keys,
            "order": vertical.order_name(*order),
            "delay_s": delay,
            "delay_epochs": delay * 2,
        }
        for order, delay in zip(vertical.ORDERS, seconds, strict=True)
    ]


def test_gaps_and_rates_show_a_pause() -> None:
    assert vertical.gaps(SERIES["outputs"]) == [(1.0, 0.5), (3.5, 2.5)]
    assert vertical.rates(SERIES["outputs"]) == [(0.0, 10.0), (1.0, 30.0), (2.0, 0.0), (3.0, 20.0)]
    assert vertical.gaps([]) == [] and vertical.rates([]) == []


def test_figures_by_size_and_by_order() -> None:
    small, large = (vertical.phase_of(mb).keys for mb in (100, 400))
    ours = _rows(vertical.PENSTOCK, small, (0.5, 0.6, 0.9)) + _rows(vertical.PENSTOCK, large, (0.7, 0.8, 0.7))
    stop = _rows(vertical.STOP, small, (2.0, 3.0, 4.0)) + _rows(vertical.STOP, large, (9.0, 7.0, 8.0))
    found = vertical.ratios(ours + stop)
    assert found["delay_s_100mb"] == 0.6 and found["delay_s_400mb"] == 0.7 and found["stop_delay_s_400mb"] == 8.0
    assert found["vs_stop_100mb"] == 5.0 and found["largest_vs_smallest"] == pytest.approx(0.7 / 0.6, rel=1e-3)
    assert found["stop_largest_vs_smallest"] == pytest.approx(8 / 3, rel=1e-3)
    assert found["delay_s_2_to_3"] == 0.6 and found["delay_s_3_to_1"] == 0.7 and found["delay_s_1_to_2"] == 0.8
    assert found["delay_epochs_max"] == 1.8 and found["delay_epochs_p50"] == 1.4
    assert vertical.ratios([])["delay_epochs_max"] is None


def test_a_whole_run_with_stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stand_in(module: str, contender: str, args: dict[str, Any], work: Path, **_: Any) -> dict[str, Any]:
        assert module == vertical.MODULE
        seconds = (0.5, 0.5, 0.5) if contender == vertical.PENSTOCK else (5.0, 5.0, 5.0)
        orders = [row for keys, _ in args["phases"] for row in _rows(contender, keys, seconds)]
        return {"orders": orders, "fed": [1], "series": SERIES, "memory_mb": 9, "rss_mb": 9}

    monkeypatch.setattr(common, "run_contender", stand_in)
    for name in ("write_phases", "truth_of_phases", "check_totals"):
        monkeypatch.setattr(migrate, name, lambda *_, **__: None)
    out = tmp_path / "vertical.json"
    result = vertical.run(quick=False, out=out)
    assert result["ratios"]["vs_stop_1000mb"] == 10.0 and len(result["rows"]) == 18
    assert json.loads(out.read_text()) == json.loads(json.dumps(result, allow_nan=False))
    assert out.with_suffix(".svg").read_text().lstrip().startswith("<?xml")
    assert vertical.run(quick=True, out=None)["ratios"]["vs_stop_50mb"] == 10.0
