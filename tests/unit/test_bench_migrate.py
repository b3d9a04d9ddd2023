"""The benchmark of live migration, without Spark: its arithmetic, its input, and a whole run with stand-ins."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from benchmarks import common, migrate, recovery, tenant, vertical
from benchmarks.baselines import StopAndCopy
from penstock.control.controller import Controller
from penstock.engines import job as jobs
from penstock.errors import EngineError

EVEN = [(float(n) / 2, n) for n in range(1, 21)]
"""An output every half second, up to 10.0."""


def test_silence_is_counted_from_the_order_and_between_outputs() -> None:
    outputs = [(9.9, 1), (10.4, 2), (12.0, 3), (12.1, 4), (20.0, 5)]
    assert migrate.silence_s(10.0, outputs, 12.1) == pytest.approx(1.6)
    assert migrate.silence_s(10.0, outputs, 20.0) == pytest.approx(7.9)
    assert migrate.silence_s(10.0, outputs, 10.4) == pytest.approx(0.4)
    assert migrate.silence_s(12.1, outputs, 15.0) == pytest.approx(2.9)  # none at all


def test_what_is_usual_is_the_median_before_the_order() -> None:
    outputs = [(0.0, 0), *((t + 10.0, n) for t, n in EVEN), (90.0, 99)]
    assert migrate.usual_gap_s(20.0, outputs) == 0.5
    with pytest.raises(EngineError, match="hardly any output"):
        migrate.usual_gap_s(500.0, outputs)


def test_an_order_is_over_when_the_last_slice_has_moved_and_served() -> None:
    old, half, new = (0, 0, 0, 0), (0, 0, 1, 0), (0, 0, 1, 2)
    owners: dict[int, tuple[int, ...]] = {n: old for _, n in EVEN}
    outputs = [*EVEN, (10.6, 21), (11.0, 22), (11.9, 23), (12.2, 24), (14.0, 25), (14.3, 26)]
    owners |= {21: old, 22: half, 23: half, 24: new, 25: new, 26: new}
    found = migrate.order_figures(10.1, outputs, owners, 12.5)
    assert found == {
        "delay_s": 0.9,  # from 22 to 23; that 25 is late is none of its doing
        "delay_epochs": 1.8,
        "usual_gap_s": 0.5,
        "to_next_output_s": 0.5,
        "served_s": 2.1,
        "done_s": 2.4,
        "moved_slices": 2,
    }
    late = migrate.order_figures(10.1, outputs, owners, 14.2)
    assert late["delay_s"] == 1.8  # it was not done yet


def test_at_rest_the_longest_silence_is_told_with_what_the_host_took_in_it() -> None:
    outputs = [*EVEN, (10.6, 21), (11.8, 22), (12.3, 23), (15.0, 24)]
    stolen = {epoch: 0.01 * epoch for _, epoch in outputs} | {22: 0.5, 23: 0.6, 24: 0.6}
    found = migrate.rest_figures(10.1, outputs, 13.0, stolen)
    assert (found["delay_s"], found["delay_epochs"], found["stolen_s"]) == (1.2, 2.4, pytest.approx(0.29))
    assert found["unstolen_s"] == 0.91
    worse = migrate.rest_figures(10.1, outputs, 13.0, stolen | {22: 1.3, 23: 1.3})  # most of the longest was stolen
    assert (worse["delay_s"], worse["unstolen_s"]) == (1.2, 0.5)
    unknown = migrate.rest_figures(10.1, outputs, 13.0, {})
    assert unknown["stolen_s"] is unknown["unstolen_s"] is None


def test_an_order_without_effect_is_an_error() -> None:
    owners = {n: (0, 0) for n in range(1, 23)}
    with pytest.raises(EngineError, match="moved nothing"):
        migrate.order_figures(10.1, [*EVEN, (10.6, 21)], owners)
    with pytest.raises(EngineError, match="no output"):
        migrate.order_figures(10.1, EVEN, owners)


def test_a_restart_is_over_with_the_first_output_of_the_new_query() -> None:
    # One batch is finished before the query stops; the pause is after it.
    found = migrate.restart_figures(10.1, [*EVEN, (10.8, 21), (45.8, 22), (46.0, 23)], 40.0)
    assert found["delay_s"] == 35.0 and found["served_s"] == 35.7
    with pytest.raises(EngineError, match="after the restart"):
        migrate.restart_figures(10.1, EVEN, 11.0)


def _row(contender: str, keys: int, delay: float, **more: Any) -> dict[str, Any]:
    row = {"contender": contender, "round": 1, "keys": keys, "order": "to 3", "delay_s": delay}
    return {**row, "delay_epochs": delay * 2, "to_next_output_s": delay / 2, **more}


def test_figures_are_medians_by_size() -> None:
    few, many, large = migrate.FEW_KEYS, migrate.MANY_KEYS, migrate.keys_of(600)
    ours = [_row(migrate.PENSTOCK, k, d) for k, d in ((few, 0.1), (many, 0.5), (many, 0.7), (many, 9.0), (large, 0.8))]
    stop = [_row(migrate.STOP, k, d) for k, d in ((many, 2.0), (large, 8.0))]
    theirs = [_row(migrate.STRUCTURED, k, d) for k, d in ((few, 10.0), (many, 35.0))]
    found = migrate.ratios([*ours, *stop, *theirs])
    assert found["vs_offline_repartition"] == found["vs_offline_repartition_3m"] == 50.0
    assert found["vs_offline_repartition_300k"] == 100.0 and found["offline_repartition_s_3m"] == 35.0
    assert found["largest_vs_smallest"] == pytest.approx(0.8 / 0.7, rel=1e-3)  # 300,000 keys are too few to count
    assert found["stop_largest_vs_smallest"] == 4.0 and found["vs_stop_600mb"] == 10.0
    assert found["delay_epochs_max"] == 18.0 and found["delay_epochs_p50"] == 1.4
    assert found["stop_linear_r2"] == 1.0 and found["stop_s_per_gb"] == pytest.approx(6 / 0.454, rel=1e-2)
    assert found["unstolen_epochs_max"] is found["unstolen_largest_vs_smallest"] is None
    told = migrate.ratios([{**row, "unstolen_s": row["delay_s"] / 2, "usual_gap_s": 0.5} for row in ours])
    assert told["unstolen_epochs_max"] == 9.0
    assert told["unstolen_largest_vs_smallest"] == found["largest_vs_smallest"]
    assert migrate.ratios([])["largest_vs_smallest"] is None


def test_sizes_are_of_what_moves() -> None:
    assert [phase.moved_mb for phase in migrate.PHASES] == [15, 50, 146, 600, 2000]
    assert migrate.Phase(migrate.keys_of(50)).moved_mb == 50
    assert all(a.keys < b.keys for a, b in zip(migrate.PHASES, migrate.PHASES[1:], strict=False))


def test_input_grows_by_phases_and_the_truth_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrate, "LOAD_ROWS", 40)
    monkeypatch.setattr(migrate, "FILE_ROWS", 30)
    pool = tmp_path / "pool"
    migrate.write_phases(pool, [migrate.Phase(100), migrate.Phase(150)], beats=2)
    loads = [[pl.read_parquet(p) for p in sorted((pool / n).glob("load-*"))] for n in ("0", "1")]
    beats = [[pl.read_parquet(p) for p in sorted((pool / n).glob("beat-*"))] for n in ("0", "1")]
    assert [[f.height for f in part] for part in loads] == [[40, 40, 20], [40, 10]]
    first = set(pl.concat(loads[0])["key"])
    assert len(first) == 100 and not first & set(pl.concat(loads[1])["key"])
    assert set(pl.concat(beats[0])["key"]) <= first and not set(pl.concat(beats[1])["key"]) <= first
    truth = migrate.truth_of_phases(pool, [3, 1])
    whole = pl.concat([*loads[0], *loads[1], beats[0][0], beats[0][1], beats[0][0], beats[1][0]])
    expected = whole.group_by("key").agg(n=pl.len().cast(pl.Int64), total=pl.col("amount").sum()).sort("key")
    assert truth.counts.tolist() == expected["n"].to_list() and truth.sums.tolist() == expected["total"].to_list()
    assert truth.counts.size == 150 and expected["key"][42] == "user-0000000042"


def test_output_that_came_twice_or_is_wrong_is_found(tmp_path: Path) -> None:
    def write(*epochs: list[tuple[str, int, int]]) -> Path:
        out = tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
        for number, rows in enumerate(epochs):
            (out / f"epoch={number}").mkdir(parents=True)
            schema = {"key": pl.String, "n": pl.Int64, "total": pl.Int64}
            frame = pl.DataFrame(rows, schema, orient="row")
            frame.write_parquet(out / f"epoch={number}" / "part-0.parquet")
        return out

    truth = migrate.Totals(np.array([2, 1]), np.array([7, 5]))
    a, b = "user-0000000000", "user-0000000001"
    one, two = [(a, 1, 3), (b, 1, 5)], [(a, 2, 7)]
    migrate.check_totals(write(one, two), truth, "any")
    migrate.check_totals(write(two, one), truth, "any")  # files may be read in any order
    for wrong in (
        write(one, two, two),
        write(one),
        write(one, [(a, 2, 8)]),
        write(two),
        write(one, two, [("user-0000000002", 1, 1)]),
        write(one, two, [("user-00000000001", 2, 1)]),
        write(one, two, [("x", 1, 1)]),
    ):
        with pytest.raises(EngineError, match="not exact"):
            migrate.check_totals(wrong, truth, "any")


def test_a_feeder_can_be_told_to_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrate, "FEED_S", 0.0)
    recovery.write_input(tmp_path / "pool", 100, beats=2, rows=50)
    feeder = migrate.Feeder(tmp_path / "pool", tmp_path / "in")
    feeder.taken = lambda: 7
    feeder.held = True
    feeder.start()
    feeder.join(0.05)
    assert feeder.fed == 0 and feeder.is_alive()
    feeder.held = False
    recovery.wait_for(lambda: feeder.fed == 7 + recovery.AHEAD_FILES, 10.0, "it feeds as far ahead as it may")
    feeder.stop()
    third = pl.read_parquet(tmp_path / "in" / "z-000002.parquet")
    assert third.equals(pl.read_parquet(tmp_path / "pool" / "beat-00000.parquet"))


def test_a_whole_run_with_stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, list[list[int]]]] = []

    def stand_in(module: str, contender: str, args: dict[str, Any], work: Path, **_: Any) -> dict[str, Any]:
        assert module == migrate.MODULE
        ran.append((contender, args["phases"]))
        seconds = {migrate.PENSTOCK: 0.5, migrate.STOP: 4.0, migrate.STRUCTURED: 30.0}[contender]
        orders = [_row(contender, keys, seconds, moved_mb=1.0) for keys, turns in args["phases"] for _ in range(turns)]
        return {"orders": orders, "traces": [["+0.1 x"]] * len(orders), "fed": [1], "memory_mb": 9, "rss_mb": 9}

    monkeypatch.setattr(common, "run_contender", stand_in)
    for name in ("write_phases", "truth_of_phases", "check_totals"):
        monkeypatch.setattr(migrate, name, lambda *_, **__: None)
    out = tmp_path / "migrate.json"
    result = migrate.run(quick=False, out=out)
    assert [contender for contender, _ in ran] == [migrate.PENSTOCK, migrate.STOP, migrate.STRUCTURED]
    assert result["bench"] == "migrate" and result["ratios"]["vs_offline_repartition"] == 60.0
    assert {"largest_vs_smallest", "stop_largest_vs_smallest", "delay_epochs_max"} <= set(result["ratios"])
    assert json.loads(out.read_text()) == json.loads(json.dumps(result, allow_nan=False))
    assert out.with_suffix(".svg").read_text().lstrip().startswith("<?xml")
    assert result["traces"][0]["events"] == ["+0.1 x"]
    quick = migrate.run(quick=True, out=None)
    assert quick["ratios"]["vs_offline_repartition"] == 60.0


class Started(Exception):
    """As far as the job: there is none here."""


@pytest.mark.parametrize(
    ("contender", "stop_and_copy"),
    [
        (migrate.CONTENDERS[migrate.PENSTOCK], False),
        (migrate.CONTENDERS[migrate.STOP], True),
        (vertical.CONTENDERS[vertical.PENSTOCK], False),
        (vertical.CONTENDERS[vertical.STOP], True),
        (tenant.CONTENDERS[tenant.PENSTOCK], False),
        (tenant.CONTENDERS[tenant.STOP], True),
        (tenant.CONTENDERS[tenant.CORES], False),
        (tenant.CONTENDERS[tenant.CORES_STOP], True),
    ],
)
def test_a_contender_goes_its_own_way(
    contender: common.Contender, stop_and_copy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[type[Controller]] = []

    def start(*_: Any, make_controller: type[Controller], **__: Any) -> None:
        asked.append(make_controller)
        raise Started

    def beside_nobody(args: dict[str, Any], begin: Callable[[], Any]) -> Any:
        begin()
        yield

    monkeypatch.setattr(jobs, "start", start)
    monkeypatch.setattr(tenant, "beside_neighbour", beside_nobody)
    with pytest.raises(Started):
        next(iter(contender({"work": str(tmp_path)})))
    assert asked == [StopAndCopy if stop_and_copy else Controller]
