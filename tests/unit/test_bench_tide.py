"""The benchmark of a load that rises and falls, without Spark; and the picture of several series over time."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest

from benchmarks import common, recovery, tide
from benchmarks.tide import File, Tide
from penstock.observe.plot import Panel, plot_series

SHORT = Tide(2.0, 4.0, 3.0, 1.0)


def test_parts_of_a_tide() -> None:
    assert [SHORT.part(at) for at in (0.0, 1.99, 2.0, 5.99, 6.0, 8.9)] == ["low"] * 2 + ["high"] * 2 + ["low again"] * 2
    assert SHORT.turns_s == (2.0, 6.0) and SHORT.seconds == 9.0


def test_a_file_is_out_with_its_last_row() -> None:
    files = [File(0.0, 10), File(1.0, 10), File(2.0, 10)]
    outputs = [(0.5, 1), (2.5, 2), (4.0, 3), (5.0, 4)]
    # Epoch 1 has half of the first file, epoch 2 the rest and half of the second, 3 nothing.
    assert tide.file_latencies(files, outputs, {1: 5, 2: 10, 3: 0, 4: 15}) == [2500.0, 4000.0, 3000.0]
    assert tide.file_latencies(files, outputs, {1: 10, 2: 20, 3: 0, 4: 0}) == [500.0, 1500.0, 500.0]
    with pytest.raises(AssertionError, match="30 rows came, 29 are out"):
        tide.file_latencies(files, outputs, {1: 10, 2: 19, 3: 0, 4: 0})


def _part_rows(contender: str, instances: list[tuple[float, int]]) -> list[dict[str, Any]]:
    files = [File(float(n), 40 if 2 <= n < 6 else 10) for n in range(9)]
    latencies = [100.0, 120.0, 900.0, 300.0, 110.0, 110.0, 200.0, 90.0, 90.0]
    return tide.part_rows(contender, SHORT, files, latencies, instances)


def test_rows_tell_how_instances_follow_and_how_high_the_spikes_are() -> None:
    low, high, ebb = _part_rows(tide.POLICY, [(0.1, 1), (3.5, 1), (3.9, 2), (5.0, 4), (8.0, 2), (8.5, 1)])
    assert [(r["part"], r["rows_s"], r["instances"]) for r in (low, high, ebb)] == [
        ("low", 10, 1),
        ("high", 40, 4),
        ("low again", 10, 1),
    ]
    assert (low["spike_ms"], high["spike_ms"], ebb["spike_ms"]) == (None, 900.0, 200.0)
    assert (high["followed_s"], ebb["followed_s"]) == (1.9, 2.0)
    assert (high["latency_ms_p50"], high["latency_ms_max"]) == (205.0, 900.0)
    still = _part_rows(tide.FIXED, [(0.1, 1)])
    assert [row["followed_s"] for row in still] == [None] * 3 and {row["instances"] for row in still} == {1}


def test_ratios_of_a_tide() -> None:
    ours = _part_rows(tide.POLICY, [(0.1, 1), (3.9, 4), (8.0, 1)])
    fixed = [{**row, "latency_ms_max": 9000.0} for row in _part_rows(tide.FIXED, [(0.1, 1)])]
    found = tide.ratios([*ours, *fixed])
    assert found["instances_low"] == 1.0 and found["instances_high"] == 4.0 and found["instances_low_again"] == 1.0
    assert found["instances_high_vs_low"] == 4.0 and found["spike_ms_high"] == 900.0
    assert found["fixed_latency_ms_max"] == 9000.0 and found["worst_vs_fixed"] == 0.1
    assert found["followed_s_low"] is None


def test_series_by_second() -> None:
    files = [File(0.1, 10), File(0.6, 10), File(1.1, 20)]
    found = tide.by_second(files, [5.0, 9.0, 7.0], [(0.2, 1), (0.5, 1), (1.0, 2), (1.5, 2)])
    assert found["rows_s"] == [(0.0, 20.0), (1.0, 20.0)] and found["latency_ms"] == [(0.0, 9.0), (1.0, 7.0)]
    assert found["instances"] == [(0.2, 1.0), (1.0, 2.0), (1.0, 2.0)]


def test_the_feeder_gives_more_at_high_water(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tide, "TICK_S", 0.01)
    tide.write_pool(tmp_path / "pool", rows_s=1000, files=3, keys=50)
    (tmp_path / "in").mkdir()
    feeder = tide.TideFeeder(tmp_path / "pool", tmp_path / "in", Tide(0.03, 0.04, 0.02, 1.0))
    feeder.start()
    feeder.join(120)
    assert [file.rows for file in feeder.files] == [10] * 3 + [40] * 4 + [10] * 2
    found = pl.concat([pl.read_parquet(p) for p in sorted((tmp_path / "in").iterdir())])
    expected = found.group_by("key").agg(n=pl.len().cast(pl.Int64), total=pl.col("amount").sum()).sort("key")
    assert tide.truth_of(tmp_path / "pool", feeder.fed).equals(expected)
    assert all(a.at_s <= b.at_s for a, b in zip(feeder.files, feeder.files[1:], strict=False))


def test_waits_are_saved_up_and_what_was_too_much_counts_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def late(seconds: float) -> float:
        asked.append(round(seconds, 6))
        return seconds + 0.001

    times = iter([1.0, 1.5])
    assert tide.waited(0.4, lambda: next(times), asked.append) == 0.5 and asked.pop() == 0.4
    monkeypatch.setattr(tide, "waited", late)
    operator, state = tide.Scored(0.0005), Kept()
    for _ in range(20):
        operator.on_event("a", SimpleNamespace(amount=1), state, lambda **row: None)  # type: ignore[arg-type]
    assert asked == [0.0025] * 3 and state.kept == tide.Totals(20, 20)


class Kept:
    kept: Any = None

    def get(self) -> Any:
        return self.kept

    def set(self, value: Any) -> None:
        self.kept = value


def test_a_whole_run_with_stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stand_in(module: str, contender: str, args: dict[str, Any], work: Path, **_: Any) -> dict[str, Any]:
        length = Tide(**args["tide"])
        files = [(float(n), 10) for n in range(int(length.seconds))]
        outputs = [(n + 0.5, n) for n in range(len(files))]
        high = 4 if contender == tide.POLICY else 1
        instances = [(at, high if length.part(at) == "high" else 1) for at, _ in outputs]
        rows = {str(n): 10 for n in range(len(files))}
        found = {"files": files, "fed": {}, "outputs": outputs, "rows": rows, "instances": instances}
        return {**found, "recoveries": 0, "decisions": ["policy x"], "memory_mb": 9, "rss_mb": 9}

    monkeypatch.setattr(common, "run_contender", stand_in)
    monkeypatch.setattr(tide, "write_pool", lambda *_: None)
    monkeypatch.setattr(tide, "truth_of", lambda *_: None)
    monkeypatch.setattr(recovery, "check_output", lambda *_: None)
    out = tmp_path / "tide.json"
    result = tide.run(quick=False, out=out)
    assert result["ratios"]["instances_high"] == 4.0 and result["ratios"]["latency_ms_p50_high"] == 500.0
    assert len(result["rows"]) == 6 and set(result["series"]) == {tide.POLICY, tide.FIXED}
    assert json.loads(out.read_text()) == json.loads(json.dumps(result, allow_nan=False))
    assert out.with_suffix(".svg").read_text().lstrip().startswith("<?xml")
    assert {row["contender"] for row in tide.run(quick=True, out=None)["rows"]} == {tide.POLICY}


def test_series_are_drawn_with_their_marks(tmp_path: Path) -> None:
    import matplotlib

    lines = {"penstock": [(0.0, 1.0), (9.0, 4.0)], "peer": [(0.0, 2.0), (9.0, 3.0)]}
    panels = [Panel("rows a second", lines), Panel("instances", {"penstock": [(0.0, 1.0)], "empty": []}, steps=True)]
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        text = plot_series(panels, tmp_path / "a.svg", "A tide", [(3.0, "load x 4")]).read_text()
    for part in ("A tide", "load x 4", "rows a second", "instances", "penstock", "peer", "empty"):
        assert part in text
    plot_series([Panel("nothing", {})], tmp_path / "b.png", "Nothing")
