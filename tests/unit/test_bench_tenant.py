"""The benchmark of a neighbour, without Spark and without a database."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import common, migrate, recovery, tenant
from penstock.errors import EngineError

STEADY = [(float(t), 100.0 * t) for t in range(41)]
"""A hundred a second."""


def test_work_done_is_read_between_what_was_said() -> None:
    counts = [(10.0, 0.0), (11.0, 100.0), (13.0, 200.0)]
    assert tenant.done_by(counts, 10.25) == 25.0 and tenant.done_by(counts, 12.0) == 150.0
    assert tenant.done_by(counts, 10.0) == 0.0 and tenant.done_by(counts, 13.0) == 200.0
    assert tenant.rate_in(counts, 10.5, 12.0) == pytest.approx(100 / 1.5)
    for outside in (9.9, 13.5):
        with pytest.raises(EngineError, match="said nothing"):
            tenant.done_by(counts, outside)


def test_what_is_kept_is_by_the_steady_time_before_and_after() -> None:
    # A hundred a second until 20; none from 22 to 24; else fifty.
    slow = [*STEADY[:21], (22.0, 2100.0), (24.0, 2100.0), (30.0, 2400.0), (40.0, 2900.0)]
    found = tenant.kept_in(slow, 20.0, 30.0, 40.0)
    assert found["beside_s"] == 100.0 and found["beside_after_s"] == 50.0
    assert found["kept"] == pytest.approx(40 / 75, rel=1e-3)
    assert found["kept_worst"] == pytest.approx(50 / 3 / 75, rel=1e-2)  # 3 s of which 2 are lost
    steady = tenant.kept_in(STEADY, 20.0, 30.0, 40.0)
    assert steady == {"beside_s": 100.0, "beside_after_s": 100.0, "kept": 1.0, "kept_worst": 1.0}
    assert tenant.kept_in(STEADY, 20.0, 21.0, 40.0)["kept_worst"] == 1.0  # shorter than a window


def test_lines_of_neighbours() -> None:
    line = "progress: 3.0 s, 812.4 tps, lat 2.4 ms stddev 0.9, 0 failed"
    assert tenant.pgbench_progress(line, 100.0) == pytest.approx(912.4)
    assert tenant.pgbench_progress("pgbench (15.1)", 100.0) is None
    assert tenant.loop_progress("1234\n", 1000.0) == 1234.0 and tenant.loop_progress("Traceback", 0.0) is None


def test_a_neighbour_that_loops_counts_its_rounds(tmp_path: Path) -> None:
    with tenant.loop(tmp_path) as found:
        found.start()
        recovery.wait_for(lambda: len(found.counts) > 1, 60.0, "it has told twice")
        found.stop()
    (first, before), (second, after) = found.counts[:2]
    assert second > first and after > before > 0
    assert (tmp_path / "churn").stat().st_size > 0


def test_without_all_programs_there_is_no_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant.shutil, "which", lambda name, path=None: None if name == "pgbench" else f"/x/{name}")
    assert tenant.postgres_programs() == {}
    monkeypatch.setattr(tenant.shutil, "which", lambda name, path=None: f"/x/{name}")
    monkeypatch.setattr(tenant.os, "geteuid", lambda: 1000)
    assert tenant.postgres_programs()["initdb"] == "/x/initdb"


def test_a_database_is_in_memory_where_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tenant.main_memory(str(tmp_path / "nowhere")) is None
    assert tenant.main_memory(str(tmp_path)) is None, "a directory on the disk"
    monkeypatch.setattr(tenant.os.path, "ismount", lambda place: True)
    monkeypatch.setattr(tenant, "PG_BYTES", 1)
    assert tenant.main_memory(str(tmp_path)) == str(tmp_path)
    monkeypatch.setattr(tenant, "PG_BYTES", 1 << 62)
    assert tenant.main_memory(str(tmp_path)) is None


def test_the_picture_shows_shares_of_the_average() -> None:
    counts = [(0.0, 0.0), (1.0, 100.0), (2.0, 100.0), (3.0, 300.0), (4.0, 400.0)]
    assert tenant.per_second(counts, 0.0, 3.5) == [(0.0, 1.0), (1.0, 0.0), (2.0, 2.0)]
    assert tenant.per_second(counts, 1.0, 1.5) == []


def test_a_whole_run_with_stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {tenant.PENSTOCK: 0.95, tenant.UNLIMITED: 0.8, tenant.STOP: 0.5, tenant.CORES: 0.97, tenant.CORES_STOP: 0.6}

    def stand_in(module: str, contender: str, args: dict[str, Any], work: Path, **_: Any) -> dict[str, Any]:
        assert module == tenant.MODULE
        share = {"kept": kept[contender], "kept_worst": kept[contender] / 2}
        order = {"keys": args["phases"][0][0], "order": "to 3", "delay_s": 1.0, "done_s": 9.0, **share}
        series = {"neighbour": [[0.0, 1.0], [1.0, 0.9]], "containers": [[0.0, 1], [1.0, 3]]}
        return {"orders": [order], "fed": [1], "neighbour": "loop", "series": series, "memory_mb": 9, "rss_mb": 9}

    monkeypatch.setattr(common, "run_contender", stand_in)
    for name in ("write_phases", "truth_of_phases", "check_totals"):
        monkeypatch.setattr(migrate, name, lambda *_, **__: None)
    out = tmp_path / "tenant.json"
    result = tenant.run(quick=False, out=out)
    ratios = result["ratios"]
    assert ratios["neighbour_kept"] == 0.95 and ratios["unlimited_neighbour_kept"] == 0.8
    assert ratios["stop_neighbour_kept"] == 0.5
    assert ratios["cores_neighbour_kept"] == 0.97 and ratios["cores_stop_neighbour_kept"] == 0.6
    assert ratios["neighbour_kept_worst"] == 0.475 and ratios["stop_delay_s"] == 1.0
    assert json.loads(out.read_text()) == json.loads(json.dumps(result, allow_nan=False))
    assert out.with_suffix(".svg").read_text().lstrip().startswith("<?xml")
    assert "unlimited_neighbour_kept" not in tenant.run(quick=True, out=None)["ratios"]
