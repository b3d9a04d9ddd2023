"""The pure parts of the benchmarks: arithmetic, verification, the shape of results, contenders that are not Spark."""

from __future__ import annotations

import contextlib
import gzip
import importlib
import json
import os
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import psutil
import pytest

import penstock as ps
from benchmarks import (
    checkpoint,
    common,
    custom_state,
    latency,
    order,
    recovery,
    replication,
    similarity,
    soak,
    windows,
)
from benchmarks.baselines import FullSnapshots
from penstock.cli import list_benchmarks
from penstock.engines import job as jobs
from penstock.engines.task import Worker
from penstock.errors import EngineError

MACHINE_KEYS = {"cores", "memory_gb", "python", "java", "pyspark", "polars", "pyarrow", "os"}


# --- arithmetic ---------------------------------------------------------------------------------------------------


def test_percentile_is_a_value_that_was_seen() -> None:
    values = list(range(1, 101))
    assert common.percentile(values, 0.99) == 99
    assert common.percentile(values, 1.0) == 100
    assert common.percentile([7.0], 0.5) == 7.0
    assert common.percentile([3.0, 1.0, 2.0], 0.5) == 2.0


def test_ratio_is_the_median_of_the_ratios_of_rounds() -> None:
    # The ratio of the medians would be 20 / 10: a slow minute of the machine in round 2 hit both and says nothing.
    ours = [(1, 30.0), (2, 4.0), (3, 20.0)]
    theirs = [(1, 10.0), (2, 1.0), (3, 10.0)]
    rows = [{"contender": "a", "round": r, "rows_s": v} for r, v in ours]
    rows += [{"contender": "b", "round": r, "rows_s": v} for r, v in theirs]
    assert common.ratio(rows, "rows_s", "a", "b") == 3.0


def test_ratio_keeps_sizes_apart_and_knows_when_there_is_none() -> None:
    rows = [
        {"contender": "a", "round": 1, "size": 1, "x": 6.0},
        {"contender": "b", "round": 1, "size": 1, "x": 2.0},
        {"contender": "a", "round": 1, "size": 2, "x": 5.0},
        {"contender": "b", "round": 2, "size": 2, "x": 5.0},
    ]
    assert common.ratio(rows, "x", "a", "b", size=1) == 3.0
    assert common.ratio(rows, "x", "a", "b", size=2) is None  # not of the same round
    assert common.ratio(rows, "y", "a", "b") is None


def test_line_through_points() -> None:
    slope, r2 = common.line([0, 1, 2, 3], [5, 7, 9, 11])
    assert slope == pytest.approx(2.0) and r2 == pytest.approx(1.0)
    assert common.line([1], [1]) == (0.0, 0.0)
    assert common.line([1, 2, 3], [4, 4, 4]) == (0.0, 1.0)


def test_slope_is_that_of_the_second_half() -> None:
    epochs = list(range(0, 2000, 100))
    values = [float(e) for e in epochs[:10]] + [1000.0 + (e - 1000) * 0.002 for e in epochs[10:]]
    assert common.slope_per_1000(epochs, values) == pytest.approx(2.0)


def test_batch_figures_leave_the_warm_up_out() -> None:
    found = common.batch_figures([10.0, 11.0, 11.5, 12.0], [9000.0, 1000.0, 500.0, 600.0], [100, 100, 100, 100], 2)
    assert found == {"rows_s": 200, "batch_ms_p50": 550.0, "batch_ms_p99": 600.0}
    assert [common.warm_up(n) for n in (2, 12, 40)] == [1, 3, 10]


def test_medians_for_bars() -> None:
    rows = [{"contender": "a", "size": s, "x": x} for s, x in ((1, 1.0), (1, 9.0), (1, 2.0), (2, 5.0))]
    assert common.medians(rows, "x", group="size") == [
        {"label": "a", "value": 2.0, "group": "1"},
        {"label": "a", "value": 5.0, "group": "2"},
    ]


def test_the_machine_describes_itself() -> None:
    found = common.machine()
    assert set(found) == MACHINE_KEYS
    assert found["cores"] >= 1 and found["memory_gb"] > 0
    json.dumps(found)


# --- input and verification ---------------------------------------------------------------------------------------


def test_words_follow_the_law_and_files_are_batches(tmp_path: Path) -> None:
    truth = common.write_words(tmp_path / "in", 2, 20_000)
    files = sorted((tmp_path / "in").iterdir())
    assert [pl.read_parquet(f).height for f in files] == [20_000, 20_000]
    assert truth["n"].sum() == 40_000
    top = truth.sort("n", descending=True)["n"].to_list()
    assert top[0] / top[1] == pytest.approx(2.0, rel=0.2)  # rank 1 and 2 of Zipf's law with s = 1
    again = common.write_words(tmp_path / "again", 2, 20_000)
    assert again.equals(truth)


def test_wrong_counts_are_found() -> None:
    truth = pl.DataFrame({"word": ["a", "b"], "n": [2, 1]})
    common.check_counts(pl.DataFrame({"word": ["b", "a"], "n": [1, 2]}), truth, "any")
    for wrong in (
        {"word": ["a", "b"], "n": [1, 2]},
        {"word": ["a"], "n": [3]},
        {"word": ["a", "b", "c"], "n": [2, 1, 1]},
    ):
        with pytest.raises(EngineError, match="counted wrongly"):
            common.check_counts(pl.DataFrame(wrong), truth, "any")


def test_structured_streaming_is_read_by_its_own_record() -> None:
    progress = [
        {
            "timestamp": f"2026-01-01T00:00:{10 + n:02d}.500Z",
            "durationMs": {"triggerExecution": 800},
            "numInputRows": 1000,
            "stateOperators": [{"numRowsTotal": 10 * n}],
        }
        for n in range(4)
    ]
    found = common.structured_figures(progress, 4)
    assert found == {"rows_s": 1000, "batch_ms_p50": 800.0, "batch_ms_p99": 800.0, "state_rows": 30}
    with pytest.raises(AssertionError, match="3 batches of 4"):
        common.structured_figures(progress[:3], 4)


# --- contenders ---------------------------------------------------------------------------------------------------


def _fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> str:
    """A module with one contender, 'it', that the child can import."""
    text = "from benchmarks import common\n" + textwrap.dedent(body)
    text += '\nCONTENDERS = {"it": it}\nif __name__ == "__main__":\n    common.contender_main("fake_bench")\n'
    (tmp_path / "fake_bench.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "fake_bench"


def test_a_contender_runs_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = _fake(
        tmp_path,
        monkeypatch,
        """
        import os
        def it(args):
            print("noise on standard output")
            yield {"x": args["x"] + 1, "pid": os.getpid(), "seen": os.environ.get("PENSTOCK_SLICES")}
            open("after", "w").close()
        """,
    )
    monkeypatch.setenv("PENSTOCK_SLICES", "3")
    found = common.run_contender(module, "it", {"x": 1}, tmp_path / "work")
    assert found["x"] == 2 and found["pid"] != os.getpid()
    assert found["seen"] is None  # a setting of this shell does not change what is measured
    assert found["memory_mb"] > 0 and found["rss_mb"] > 0
    assert (tmp_path / "work" / "after").exists()


def test_memory_after_the_figures_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = _fake(
        tmp_path,
        monkeypatch,
        """
        import threading
        def it(args):
            if args["early"]:
                block = bytearray(b"x") * 300_000_000
                threading.Event().wait(1.0)
            yield {}
            block = bytearray(b"x") * 300_000_000
            threading.Event().wait(1.0)
        """,
    )
    late = common.run_contender(module, "it", {"early": False}, tmp_path / "a")
    early = common.run_contender(module, "it", {"early": True}, tmp_path / "b")
    assert early["rss_mb"] > late["rss_mb"] + 200


def test_a_contender_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = _fake(
        tmp_path,
        monkeypatch,
        """
        def it(args):
            if args["early"]:
                raise ValueError("no such luck")
            yield {"x": 1}
            raise ValueError("too late")
        """,
    )
    with pytest.raises(EngineError, match=r"no figures[\s\S]*no such luck"):
        common.run_contender(module, "it", {"early": True}, tmp_path / "a")
    with pytest.raises(EngineError, match=r"but then failed[\s\S]*too late"):
        common.run_contender(module, "it", {"early": False}, tmp_path / "b")


def test_a_contender_that_hangs_is_ended_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # It imports nothing that takes time, so that the limit comes after it has a child.
    (tmp_path / "hangs.py").write_text(
        "import subprocess, sys, threading\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import threading; threading.Event().wait()'])\n"
        "open('child', 'w').write(str(child.pid))\n"
        "threading.Event().wait()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(EngineError, match="no figures"):
        common.run_contender("hangs", "it", {}, tmp_path / "work", seconds_max=3.0)
    # The child was sent SIGKILL with the rest; the kernel may need a moment to carry it out.
    pid = int((tmp_path / "work" / "child").read_text())
    with contextlib.suppress(psutil.NoSuchProcess):
        child = psutil.Process(pid)
        psutil.wait_procs([child], timeout=120)
    assert not _alive(pid)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_rounds_interleave_contenders() -> None:
    ran: list[tuple[str, int]] = []

    def one(contender: str, number: int) -> dict[str, Any]:
        ran.append((contender, number))
        return {"x": number}

    rows = common.in_turn(["a", "b"], 2, one, size=5)
    assert ran == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert rows[2] == {"contender": "a", "size": 5, "round": 2, "x": 2}


# --- the shape of results -----------------------------------------------------------------------------------------


def _check_shape(result: dict[str, Any], name: str) -> None:
    assert {"bench", "machine", "rows", "ratios", "notes"} <= set(result)
    assert result["bench"] == name and set(result["machine"]) == MACHINE_KEYS
    assert result["rows"] and result["notes"]
    for row in result["rows"]:
        assert "contender" in row and "round" in row
        assert all(value is None or isinstance(value, str | int | float) for value in row.values()), row
    assert result["ratios"] and all(isinstance(value, float) for value in result["ratios"].values())
    json.dumps(result, allow_nan=False)


EXPECTED_RATIOS = {
    "words": {
        f"{kind}vs_{peer}{size}"
        for kind in ("", "latency_", "memory_")
        for peer in ("default_store", "rocksdb")
        for size in ("", "_2m")
    },
    "slices": {"slices_8_vs_1", "slices_64_vs_1", "slices_256_vs_1"},
    "checkpoint": {
        "checkpoint_2s_vs_none",
        "delta_linear_r2",
        "bytes_per_key_spread",
        *(f"bytes_per_touched_key_{share}pct" for share in (1, 5, 20, 100)),
        *(
            f"{prefix}worst_vs_average{size}"
            for prefix in ("", "full_")
            for size in ("", *(f"_{mb}mb" for mb in checkpoint.STATES_MB))
        ),
        *(f"{figure}_epoch_vs_full_{mb}mb" for figure in ("average", "worst") for mb in checkpoint.STATES_MB),
    },
    "recovery": {
        "two_failures_vs_one",
        "three_failures_vs_one",
        "three_failures_rebuild_vs_one",
        "vs_structured_streaming",
        *(f"vs_structured_streaming_{mb}mb" for mb in (50, 200)),
        *(f"{figure}_{mb}mb" for figure in ("to_next_output_s", "rebuild_s") for mb in (50, 200, 1000)),
        *(f"rebuild_s_holders_{n}" for n in (3, 5)),
        *(f"{figure}_failures_{n}" for figure in ("rebuild_s", "rebuild_cpu_s") for n in (1, 2, 3)),
        *(f"rebuild_s_backups_{n}" for n in (1, 2)),
        *(f"to_next_output_s_interval_{s}" for s in (1, 5, 15)),
    },
    "replication": {
        "lost_per_replica",
        "throughput_r1_vs_r0",
        "throughput_r2_vs_r0",
        *(f"delta_share_{interval}s" for interval in (1, 2, 5, 10)),
    },
    "latency": {"p50_ms", "p99_ms", "max_ms"},
    "order": {"words_kept", "windows_kept", "custom_kept", "stages_kept"},
    "windows": {f"{kind}vs_{peer}" for kind in ("", "latency_", "memory_") for peer in ("default_store", "rocksdb")},
    "custom-state": {
        f"{ours}_{kind}vs_spark{size}"
        for ours in ("per_event", "batch")
        for kind in ("", "memory_")
        for size in ("", "_100k")
    },
    "similarity": {
        "linear_r2",
        "us_per_event_and_1x",
        *(f"us_per_event_{factor}x" for factor in (1, 2, 4, 8)),
        "scale_independent_10x",
        "top_words_10x",
    },
    "soak": {*soak.SLOPES, "epoch_ms_per_1000"},
}


def _stand_in(module: str, contender: str, args: dict[str, Any], work: Path, **_: Any) -> dict[str, Any]:
    """What each contender would say, without running it."""
    memory = {"memory_mb": 100, "rss_mb": 120}
    history = [{"epoch": n, "at_s": n / 10, "rows": 10, "ms": 5.0, "instances": 2} for n in range(1, 40)]
    if contender == "penstock_deltas":
        files = [{"epoch_from": n - 1, "epoch_to": n, "bytes": 30 * n} for n in range(1, len(_TOUCHED) + 1)]
        return {"files": files, "state_rows": 300, "state_bytes": 9000, **memory}
    if contender in (checkpoint.ASYNC, checkpoint.SYNC):
        times = [1.0] * (args["epochs"] - 1) + [2.0]
        figures = checkpoint.epoch_figures(times)
        return {**figures, "state_rows": 3, "state_bytes": 9, "checkpoints": 2, "epoch_ms": times, **memory}
    if module == "benchmarks.recovery":
        assert args["backups"] in (1, 2)
        peer = contender == recovery.STRUCTURED
        kills = [{"kills": n, "to_next_output_s": 9.0 if peer else 1.0 + n} for n in args["kills"]]
        kills = (
            kills if peer else [{**kill, "rebuild_s": 0.5, "rebuild_cpu_s": 0.2, "from_backup": 1} for kill in kills]
        )
        return {"kills": kills, "fed": 7, "state_rows": 3, "state_bytes": 9, "batch_ms_p50": 1.0, **memory}
    if contender == "penstock_paced":
        files = [{"epoch_from": 0, "epoch_to": n, "bytes": size} for n, size in enumerate((100, 5, 7, 6, 1), 1)]
        return {"rows": 5, "files": files, "whole_bytes": 100, "state_bytes": 300, **memory}
    if contender == "penstock_peak":
        return {"rows_s": 1000, **memory}
    if contender == "penstock_half":
        assert args["rows_s"] == 500
        return {"rows_s": 500, "p50_ms": 1.0, "p99_ms": 2.0, "max_ms": 3.0, "history": history, **memory}
    if contender == "tweets":
        return {
            "rows_s": 100_000 // args["window"],
            "batch_ms_p50": 2.0,
            "batch_ms_p99": 3.0,
            "state_rows": 3,
            **memory,
        }
    if module == "benchmarks.soak":
        samples = [
            {"epoch": n, "at_s": n / 10, "state_rows": 1, "epoch_ms": 1.0, **dict.fromkeys(soak.SLOPES.values(), n)}
            for n in range(1, 100)
        ]
        return {"samples": samples, "history": history, "recoveries": 0, "checkpoints": 1, "state_rows": 1, **memory}
    return {"rows_s": 1000, "batch_ms_p50": 2.0, "batch_ms_p99": 3.0, "state_rows": 3, **memory}


_TOUCHED = [frozenset(range(100 * n, 100 * n + p)) for n, p in enumerate((100, 1, 5, 20, 100, 1, 5, 20, 100), 1)]


@pytest.mark.parametrize("name", sorted(EXPECTED_RATIOS))
def test_a_whole_benchmark_with_stand_ins(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "run_contender", _stand_in)
    monkeypatch.setattr(common, "write_words", lambda *_, **__: pl.DataFrame())
    monkeypatch.setattr(common, "check_counts", lambda *_: None)
    monkeypatch.setattr(pl, "read_parquet", lambda *_, **__: pl.DataFrame())
    monkeypatch.setattr(checkpoint, "write_touches", lambda *_, **__: _TOUCHED)
    monkeypatch.setattr(checkpoint, "KEYS", 100)
    monkeypatch.setattr(checkpoint.rows_of_deltas, "__kwdefaults__", {"keys": 100})
    monkeypatch.delenv(similarity.DATA, raising=False)
    for bench, function in (
        (windows, "write_events"),
        (windows, "true_windows"),
        (windows, "check_windows"),
        (custom_state, "write_events"),
        (custom_state, "first_files"),
        (custom_state, "check_gaps"),
        (checkpoint, "write_growth"),
        (recovery, "write_input"),
        (recovery, "true_totals"),
        (recovery, "check_output"),
        (replication, "true_counts"),
        (similarity, "write_tweets"),
        (similarity, "true_pairs"),
        (similarity, "check_pairs"),
    ):
        monkeypatch.setattr(bench, function, lambda *_, **__: None)
    monkeypatch.setattr(order, "rows_a_second", lambda *_, **__: 1.0)
    monkeypatch.setattr(custom_state, "true_gaps", lambda _, counts: dict.fromkeys(counts))
    monkeypatch.setattr(similarity, "write_rotating", lambda *_, **__: (1, None))
    module = importlib.import_module(f"benchmarks.{name.replace('-', '_')}")
    out = tmp_path / "results" / f"{name}.json"
    result = module.run(quick=False, out=out)
    _check_shape(result, name)
    assert set(result["ratios"]) == EXPECTED_RATIOS[name]
    assert json.loads(out.read_text()) == json.loads(json.dumps(result))
    assert out.with_suffix(".svg").read_text().lstrip().startswith("<?xml")


def test_out_may_be_a_picture_only(tmp_path: Path) -> None:
    drawn: list[Path] = []
    common.finish("x", [], {"a": None, "b": 1.0}, [], tmp_path / "x.png", drawn.append)
    assert drawn == [tmp_path / "x.png"] and not (tmp_path / "x.json").exists()
    result = common.finish("x", [], {"a": None, "b": 1.0}, [], None, drawn.append)
    assert result["ratios"] == {"b": 1.0} and len(drawn) == 1


def test_the_command_finds_them_all() -> None:
    found = list_benchmarks(common.ROOT)
    elastic = {"migrate", "tenant", "tide", "vertical"}  # with tests of their own: test_bench_*.py
    assert set(found) == set(EXPECTED_RATIOS) | elastic
    assert all(found.values())


# --- single benchmarks --------------------------------------------------------------------------------------------


def test_a_delta_belongs_to_a_share_only_if_its_keys_do() -> None:
    load, one, five = frozenset(range(100)), frozenset({1}), frozenset(range(10, 15))
    touched = [load, load, one, one, five, five]
    files = [
        {"epoch_from": 0, "epoch_to": 2, "bytes": 1000},
        {"epoch_from": 1, "epoch_to": 3, "bytes": 1000},
        {"epoch_from": 3, "epoch_to": 4, "bytes": 7},
        {"epoch_from": 3, "epoch_to": 4, "bytes": 5},
        {"epoch_from": 3, "epoch_to": 5, "bytes": 60},
        {"epoch_from": 4, "epoch_to": 6, "bytes": 50},
    ]
    rows = checkpoint.rows_of_deltas(files, touched, keys=100)
    assert [(r["touched_pct"], r["touched_keys"], r["delta_bytes"]) for r in rows] == [
        (1, 1, 12),
        (None, 6, 60),
        (5, 5, 50),
    ]


def test_touches_are_of_the_share_they_say(tmp_path: Path) -> None:
    touched = checkpoint.write_touches(tmp_path / "in", [100, 5], keys=1000, epochs_each=2)
    frames = [pl.read_parquet(path)["word"] for path in sorted((tmp_path / "in").iterdir())]
    assert [frame.len() for frame in frames] == [1000] * 4
    assert [frame.n_unique() for frame in frames] == [1000, 1000, 50, 50]
    assert set(frames[2]) == set(frames[3])
    assert touched[2] is touched[3] and len(touched[2]) == 50


def test_deltas_on_disk_are_those_of_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "manifests").mkdir()
    (tmp_path / "state" / "counts").mkdir(parents=True)
    for epoch in (2, 3):
        (tmp_path / "manifests" / f"{epoch:012d}.json").touch()
    for name, size in (
        ("000000000002-0000-0001.delta", 10),
        ("000000000003-0000-0001.delta", 20),
        ("000000000004-x.delta", 9),
    ):
        (tmp_path / "state" / "counts" / name).write_bytes(b"x" * size)
    assert checkpoint.deltas_on_disk(tmp_path) == [
        {"epoch_from": 0, "epoch_to": 2, "bytes": 10},
        {"epoch_from": 2, "epoch_to": 3, "bytes": 20},
    ]


def test_latency_is_of_events_from_when_they_were_due() -> None:
    # 10 rows a second from second 100 on: rows 0-9 published at 101, rows 10-29 at 103.5.
    values, weights = latency.event_latencies([(101.0, 9), (103.5, 29)], 100.0, 10.0, 0.0)
    assert weights.sum() == 30
    expected = [1000 - 100 * i for i in range(10)] + [3500 - 100 * i for i in range(10, 30)]
    assert np.allclose(sorted(values), sorted(expected))
    late, heavy = latency.event_latencies([(101.0, 9), (103.5, 29)], 100.0, 10.0, 2.0)
    assert heavy.sum() == 10 and late.max() == pytest.approx(1500)


def test_large_epochs_weigh_what_they_are() -> None:
    values, weights = latency.event_latencies([(1.0, 99_999)], 0.0, 100_000.0, 0.0)
    assert len(values) == latency.POINTS_PER_EPOCH and weights.sum() == pytest.approx(100_000)
    assert latency.weighted_percentile(values, weights, 0.5) == pytest.approx(500, abs=5)
    assert latency.weighted_percentile(values, weights, 1.0) == pytest.approx(1000)
    assert latency.event_latencies([], 0.0, 1.0, 0.0)[0].size == 0


def test_what_is_not_published_counts_with_its_wait_so_far() -> None:
    whole = [(1.0, 9)]
    assert latency.until(whole, 10, 5.0) is whole
    assert latency.until(whole, 20, 5.0) == [(1.0, 9), (5.0, 19)]
    assert latency.until([], 20, 5.0) == [(5.0, 19)]


def test_weighted_percentile_counts_weight() -> None:
    values, weights = np.array([10.0, 1.0, 5.0]), np.array([1.0, 98.0, 1.0])
    assert latency.weighted_percentile(values, weights, 0.5) == 1.0
    assert latency.weighted_percentile(values, weights, 0.99) == 5.0
    assert latency.weighted_percentile(values, weights, 1.0) == 10.0


def test_peak_is_that_of_the_second_half() -> None:
    published = [(float(t), 100 * t if t <= 5 else 500 + 1000 * (t - 5)) for t in range(12)]
    assert latency.peak_rate(published, 10.0) == 1000
    with pytest.raises(AssertionError, match="1 epochs"):
        latency.peak_rate(published[:6], 10.0)


def test_the_clocked_sink_counts_an_epoch_once() -> None:
    sink = latency.ClockedSink()
    part = sink.write_part(1, 0, "0", pl.DataFrame({"last": [3, 9, 4]}))
    assert part == {"last": 9}
    sink.commit(1, 0, [part, {"last": 7}])
    sink.commit(1, 1, [part])
    sink.commit(2, 1, [])
    assert [last for _, last in sink.published] == [9]


def test_the_start_clock_remembers_its_first_reading() -> None:
    clock = latency.StartClock()
    first = clock()
    assert clock() >= first and clock.first == first


def test_thinned_keeps_both_ends() -> None:
    assert soak.thinned([1, 2], 5) == [1, 2]
    thin = soak.thinned(list(range(1000)), 10)
    assert len(thin) == 10 and thin[0] == 0 and thin[-1] == 999


def test_memory_by_role_sees_this_process(tmp_path: Path) -> None:
    found = soak.memory_by_role()
    assert found["driver_rss_mb"] > 1 and found["jvm_rss_mb"] >= 0  # other tests of this process may have a JVM
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "x").touch()
    (tmp_path / "a" / "b" / "y").touch()
    assert soak.files_in(tmp_path) == 2 and soak.files_in(tmp_path / "none") == 0


def test_the_memory_watch_ends_when_told() -> None:
    watch = common.MemoryWatch(os.getpid())
    watch.start()
    watch.stop()
    watch.join(120)
    assert not watch.is_alive() and threading.current_thread() is not watch


# --- windows ------------------------------------------------------------------------------------------------------


def test_events_of_windows_are_disordered_but_never_late(tmp_path: Path) -> None:
    windows.write_events(tmp_path / "in", 3, 4_000)
    ts = pl.concat([pl.read_parquet(path) for path in sorted((tmp_path / "in").iterdir())])["ts"].dt.epoch("us")
    behind = ts.cum_max() - ts
    assert behind.max() > 500_000  # type: ignore[operator]
    assert behind.max() < windows.LATENESS_S * 1_000_000  # type: ignore[operator]
    # The last closed window ends two hops before the end of the input: one for lateness, and windows end with hops.
    assert windows.closed_until(3) == windows.BEGIN_US + 4_000_000
    assert ts.max() - 1_000_000 >= windows.closed_until(3)  # type: ignore[operator]


def test_penstock_and_duckdb_agree_on_windows(tmp_path: Path) -> None:
    windows.write_events(tmp_path / "in", 7, 3_000)
    truth = windows.true_windows(tmp_path / "in")
    assert truth.group_by("end_us").len()["len"].max() == windows.K
    out = ps.memory()
    flow = ps.Flow("windows")
    window = ps.hopping("10s", every="2s", on="ts", lateness="1s")
    counts = flow.source("words", ps.files(f"{tmp_path}/in/*.parquet")).key_by("word").window(window)
    counts.aggregate("counts", n=ps.count()).top_k("top", windows.K, by="n").sink("out", out)
    ps.run_local(flow, epoch_rows=3_000)
    found = out.frame().with_columns(end_us=pl.col("window_end").dt.epoch("us"))
    windows.check_windows(found, truth, windows.closed_until(7), "penstock")
    assert set(found["end_us"]) == set(truth["end_us"])  # at the end of the input every window is closed
    until = windows.closed_until(7)
    closed = found.filter(pl.col("end_us") <= until)
    windows.check_windows(closed, truth, until, "structured")  # who gives closed windows only is right too


def test_wrong_windows_are_found() -> None:
    truth = pl.DataFrame({"end_us": [2, 2, 4], "rank": [1, 2, 1], "word": ["a", "b", "a"], "n": [5, 3, 7]})
    windows.check_windows(truth, truth, 4, "any")
    windows.check_windows(truth.head(2), truth, 2, "any")
    swapped = truth.with_columns(word=pl.Series(["b", "a", "a"]))
    for wrong in (truth.head(2), truth.head(1), swapped, pl.concat([truth, truth.head(1)])):
        with pytest.raises(EngineError, match="ranked wrongly"):
            windows.check_windows(wrong, truth, 4, "any")


# --- a user's own state -------------------------------------------------------------------------------------------


def test_gaps_by_hand() -> None:
    state, emits = custom_state.advance(None, [1.0])
    assert (state, emits) == ((1, 1.0, 0.0), [])
    state, emits = custom_state.advance(state, [3.0, 4.0])
    assert state == (3, 4.0, pytest.approx(0.9 * 2.0 + 0.1 * 1.0))
    state, emits = custom_state.advance((9, 4.0, 2.0), [6.0])
    assert emits == [state] == [(10, 6.0, pytest.approx(2.0))]


@pytest.mark.parametrize("operator", [custom_state.PerEvent, custom_state.Vectorised])
def test_our_operators_agree_with_the_loop_to_the_last_bit(operator: Any, tmp_path: Path) -> None:
    custom_state.write_events(tmp_path / "in", 3, 4_000)
    truth = custom_state.true_gaps(tmp_path / "in", [2, 3])
    assert truth[2].states["n"].sum() == 8_000 and truth[3].states["n"].sum() == 12_000
    assert truth[2].emitted.height > 100
    part = custom_state.first_files(tmp_path / "in", 2)
    assert [path.name for path in sorted(part.iterdir())] == ["00000.parquet", "00001.parquet"]
    work = tmp_path / "work"
    flow = ps.Flow("gaps")
    keyed = flow.source("words", ps.files(f"{part}/*.parquet")).key_by("word")
    out = ps.memory()
    keyed.process(custom_state.OPERATOR, operator(), schema=custom_state.SCHEMA).sink("out", out)
    ps.run_local(flow, epoch_rows=1_700, checkpoint=str(work / "checkpoint"))
    out.frame().write_parquet(work / "emitted.parquet")
    state = common.checkpoint_state(work / "checkpoint", custom_state.OPERATOR, ["word"])
    custom_state.plain_states(state).write_parquet(work / "states.parquet")
    custom_state.check_gaps(work, truth[2], "any")
    with pytest.raises(EngineError, match="wrong emitted"):
        custom_state.check_gaps(work, truth[3], "any")
    off = truth[2].states.with_columns(pl.col("ema") * (1 + 1e-15))
    off.write_parquet(work / "states.parquet")
    with pytest.raises(EngineError, match="wrong states"):
        custom_state.check_gaps(work, truth[2], "any")


def test_the_fastest_of_sparks_counts() -> None:
    rates = {"transform_with_state": (10, 30, 20), "apply_in_pandas": (15, 15, 90), "penstock": (400, 600, 500)}
    rows: list[dict[str, Any]] = [
        {"contender": name, "round": n, "rows_s": rate, "memory_mb": 1, "batch_words": 100_000}
        for name, values in rates.items()
        for n, rate in enumerate(values)
    ]
    assert custom_state.fastest(rows) == "transform_with_state"
    assert custom_state.ratios(rows)["per_event_vs_spark"] == 25.0
    assert custom_state.fastest([]) is None
    assert set(custom_state.QUICK[10_000]) == set(custom_state.FULL[100_000]) == set(custom_state.CONTENDERS)


# --- similarity ---------------------------------------------------------------------------------------------------


def test_similar_tweets_by_hand(tmp_path: Path) -> None:
    tweets = [(0, "x", "a b c"), (1, "y", "a b c"), (2, "x", "C, d"), (3, "x", "b a d"), (4, "x", "d e"), (5, "x", "c")]
    frame = pl.DataFrame(tweets, {"i": pl.Int64, "location": pl.String, "text": pl.String}, orient="row")
    (tmp_path / "in").mkdir()
    common.write_batch(frame, tmp_path / "in", 0)
    truth = similarity.true_pairs(tmp_path / "in", 2)
    # 3 shares two words with 0 and one with 2; 4 shares d with both 2 and 3: the later; 0 and 2 have left 5's window.
    assert truth.rows() == [("x", 2, 0, 1), ("x", 3, 0, 2), ("x", 4, 3, 1), ("x", 5, 4, 0)]
    out = ps.memory()
    flow = ps.Flow("similarity")
    keyed = flow.source("tweets", ps.files(f"{tmp_path}/in/*.parquet")).key_by("location")
    keyed.process("similar", similarity.Similar(2), schema=similarity.SCHEMA).sink("out", out)
    ps.run_local(flow, epoch_rows=2)
    similarity.check_pairs(out.frame(), truth, "any")
    with pytest.raises(EngineError, match="wrong pairs"):
        similarity.check_pairs(truth.with_columns(shared=9), truth, "any")


def test_generated_tweets_fill_all_windows_together(tmp_path: Path) -> None:
    similarity.write_tweets(tmp_path / "in", 2, similarity.LOCATIONS * 5)
    frame = pl.concat([pl.read_parquet(path) for path in sorted((tmp_path / "in").iterdir())])
    assert frame["i"].to_list() == list(range(similarity.LOCATIONS * 10))
    assert set(frame.group_by("location").len()["len"]) == {10}


def test_ten_times_the_state_is_the_same_work(tmp_path: Path) -> None:
    found = {f: similarity.write_rotating(tmp_path / str(f), 500, f, 2_000, 10) for f in (1, 10)}
    assert [load for load, _ in found.values()] == [1, 3]
    assert [truth.height for _, truth in found.values()] == [500, 5_000]
    assert all(truth["n"].min() >= 1 for _, truth in found.values())  # type: ignore[operator]
    distinct = {
        f: [pl.read_parquet(path)["word"].n_unique() for path in sorted((tmp_path / str(f)).iterdir())[-10:]]
        for f in (1, 10)
    }
    assert np.mean(distinct[1]) == pytest.approx(np.mean(distinct[10]), rel=0.05)
    last = [set(pl.read_parquet(path)["word"]) for path in sorted((tmp_path / "10").iterdir())[-2:]]
    assert not last[0] & last[1]  # one vocabulary after another


def test_real_tweets_are_read_where_they_are(tmp_path: Path) -> None:
    with gzip.open(tmp_path / similarity.TWEETS, "wt", encoding="utf-8") as file:
        file.write('created,location,text\nx, NYC ,"one, two"\ny,,three\nz,nyc,four\n')
    found = similarity.read_tweets(tmp_path / similarity.TWEETS)
    assert found.rows() == [(0, "nyc", "one, two"), (1, "nyc", "four")]


# --- recovery -----------------------------------------------------------------------------------------------------


def _trace() -> list[dict[str, Any]]:
    """Checkpoint at epoch 4; epochs 5 and 6 are out, 7 is under way when the kill comes at 100."""
    done = {"what": "StageDone", "stage": "totals", "missing": False, "load_ms": 0.0, "load_cpu_ms": 0.0, "rebuilt": {}}
    return [
        {"at": 99.0, "what": "EpochPublished", "epoch": 5, "attempt": 1},
        {"at": 99.5, "what": "RunStage", "epoch": 7, "attempt": 1, "stage": "totals"},
        {"at": 100.1, "what": "EpochPublished", "epoch": 6, "attempt": 1},
        {"at": 100.3, "what": "NodesChanged"},
        {"at": 100.4, "what": "StageFailed", "epoch": 7, "attempt": 1, "stage": "totals"},
        {"at": 100.4, "what": "CancelAll", "attempt": 2},
        {"at": 100.9, "what": "RunStage", "epoch": 5, "attempt": 2, "stage": "in"},
        {
            **done,
            "at": 101.5,
            "epoch": 5,
            "attempt": 2,
            "load_ms": 400.0,
            "load_cpu_ms": 150.0,
            "rebuilt": {"backup": 3, "durable": 1},
        },
        {"at": 101.6, "what": "EpochPublished", "epoch": 5, "attempt": 2},
        {"at": 101.7, "what": "EpochPublished", "epoch": 6, "attempt": 2},
        {**done, "at": 101.9, "epoch": 7, "attempt": 2, "load_ms": 20.0},
        {"at": 102.0, "what": "EpochPublished", "epoch": 7, "attempt": 2},
        {**done, "at": 103.0, "epoch": 8, "attempt": 2, "load_ms": 900.0, "rebuilt": {"durable": 9}},
        {"at": 103.1, "what": "EpochPublished", "epoch": 8, "attempt": 2},
    ]


def test_a_kill_is_over_with_the_first_output_that_is_new() -> None:
    assert recovery.penstock_kill(100.0, _trace()) == {
        "to_next_output_s": 2.0,
        "detect_s": 0.3,
        "drain_s": 0.6,
        "replay_s": 1.1,
        "rebuild_s": 0.4,
        "rebuild_cpu_s": 0.15,
        "spark_s": 1.6,
        "repeated_epochs": 2,
        "attempts": 1,
        "from_backup": 3,
        "from_durable": 1,
    }


def test_the_record_of_a_kill_is_told_in_lines() -> None:
    lines = [recovery.told(entry, 100.0) for entry in _trace()]
    assert lines[0] == "-1.000 EpochPublished: epoch 5, attempt 1" and lines[3] == "+0.300 NodesChanged"
    done = "+1.500 StageDone: stage totals, epoch 5, attempt 2, rebuilt {'backup': 3, 'durable': 1}, load 400 ms"
    assert lines[7] == done
    failed = {"at": 1.0, "what": "StageFailed", "stage": "in", "reason": "lost"}
    assert recovery.told(failed, 0.5) == "+0.500 StageFailed: stage in. lost"


def test_an_epoch_that_was_done_before_the_loss_was_seen_is_no_recovery() -> None:
    trace = [entry for entry in _trace() if entry["at"] < 101.8]
    with pytest.raises(EngineError, match="no new output"):  # 6 came after the kill, of the old attempt
        recovery.penstock_kill(100.0, trace)


def test_a_second_failure_belongs_to_the_same_kill() -> None:
    again = [
        {"at": 101.55, "what": "StageFailed", "epoch": 5, "attempt": 2, "stage": "totals"},
        {"at": 101.56, "what": "CancelAll", "attempt": 3},
        {"at": 104.0, "what": "EpochPublished", "epoch": 7, "attempt": 3},
    ]
    found = recovery.penstock_kill(100.0, [*(entry for entry in _trace() if entry["at"] < 101.55), *again])
    assert (found["to_next_output_s"], found["attempts"], found["repeated_epochs"]) == (4.0, 2, 0)


def test_victims_differ_and_one_of_them_has_slices() -> None:
    for seed in range(20):
        found = recovery.choose_victims(["1", "2", "3", "4"], ["3"], 3, np.random.default_rng(seed))
        assert len(set(found)) == 3 and found[0] == "3" and set(found) <= {"1", "2", "3", "4"}
    assert recovery.choose_victims(["1"], ["1"], 1, np.random.default_rng(0)) == ["1"]


def test_structured_streamings_next_batch() -> None:
    batches = [(1.0, 0), (2.0, 1), (7.5, 2), (8.0, 3)]
    assert recovery.structured_kill(2.5, batches) == {"to_next_output_s": 5.0}
    with pytest.raises(EngineError, match="no new output"):
        recovery.structured_kill(9.0, batches)


def test_the_truth_of_recovery_counts_files_as_often_as_they_were_fed(tmp_path: Path) -> None:
    recovery.write_input(tmp_path / "pool", 100, beats=2, rows=40)
    pool = tmp_path / "pool"
    assert len(list(pool.glob("load-*"))) == 3
    truth = recovery.true_totals(pool, 5)
    parts = [pl.read_parquet(path) for path in sorted(pool.glob("load-*"))]
    first, second = (pl.read_parquet(path) for path in sorted(pool.glob("beat-*")))
    whole = pl.concat([*parts, first, second, first, second, first])
    expected = whole.group_by("key").agg(n=pl.len().cast(pl.Int64), total=pl.col("amount").sum()).sort("key")
    assert truth.equals(expected) and truth.height == 100


def test_output_that_came_twice_or_is_wrong_is_found(tmp_path: Path) -> None:
    def write(*epochs: dict[str, list[Any]]) -> Path:
        out = tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
        for number, rows in enumerate(epochs):
            (out / f"epoch={number}").mkdir(parents=True)
            pl.DataFrame(rows).write_parquet(out / f"epoch={number}" / "part-0.parquet")
        return out

    truth = pl.DataFrame({"key": ["a", "b"], "n": [2, 1], "total": [7, 5]})
    one: dict[str, list[Any]] = {"key": ["a", "b"], "n": [1, 1], "total": [3, 5]}
    two: dict[str, list[Any]] = {"key": ["a"], "n": [2], "total": [7]}
    recovery.check_output(write(one, two), truth, "any")
    for wrong in (write(one, two, two), write(one), write(one, {**two, "total": [8]}), write(two)):
        with pytest.raises(EngineError, match="not exact"):
            recovery.check_output(wrong, truth, "any")


def test_the_feeder_gives_the_load_at_once_and_then_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "FEED_S", 0.0)
    recovery.write_input(tmp_path / "pool", 100, beats=2, rows=50)
    feeder = recovery.Feeder(tmp_path / "pool", tmp_path / "in")
    assert feeder.load() == 2
    feeder.start()
    recovery.wait_for(lambda: feeder.fed >= 3, 10.0, "three files are there")
    feeder.stop()
    names = sorted(path.name for path in (tmp_path / "in").iterdir())
    assert names[:2] == ["load-00000.parquet", "load-00001.parquet"] and len(names) == 2 + feeder.fed
    third = pl.read_parquet(tmp_path / "in" / "z-000002.parquet")
    assert third.equals(pl.read_parquet(tmp_path / "pool" / "beat-00000.parquet"))
    with pytest.raises(EngineError, match="in vain until pigs fly"):
        recovery.wait_for(lambda: False, 0.0, "pigs fly")


def test_figures_of_recovery_vary_one_axis_at_a_time() -> None:
    def row(contender: str, seconds: float, kills: int = 1, **axes: Any) -> dict[str, Any]:
        ours = contender == recovery.PENSTOCK
        shared = {"state_mb": 200, "backups": 1 if ours else None, "interval_s": 1.0 if ours else None, "executors": 5}
        figures = {"kills": kills, "to_next_output_s": seconds, "rebuild_s": seconds / 4 if ours else None}
        return {"contender": contender, "round": 1, **shared, **figures, **axes}

    ours, theirs = recovery.PENSTOCK, recovery.STRUCTURED
    rows = [row(ours, 1.0), row(ours, 2.0), row(ours, 9.0), row(ours, 3.0, 3), row(theirs, 8.0), row(theirs, 99.0, 3)]
    rows += [row(ours, 4.0, executors=3), row(ours, 6.0, interval_s=15.0), row(ours, 5.0, state_mb=50)]
    found = {name: value for name, value in recovery.ratios(rows).items() if value is not None}
    assert found == {
        "vs_structured_streaming": 4.0,
        "vs_structured_streaming_200mb": 4.0,
        "to_next_output_s_50mb": 5.0,
        "to_next_output_s_200mb": 2.0,
        "rebuild_s_50mb": 1.25,
        "rebuild_s_200mb": 0.5,
        "three_failures_vs_one": 1.5,
        "three_failures_rebuild_vs_one": 1.5,
        "rebuild_s_failures_1": 0.5,
        "rebuild_s_failures_3": 0.75,
        "rebuild_s_holders_3": 1.0,
        "rebuild_s_holders_5": 0.5,
        "to_next_output_s_interval_1": 2.0,
        "to_next_output_s_interval_15": 6.0,
    }
    quick = [row(ours, 2.0, state_mb=50), row(ours, 3.0, 3, state_mb=50), row(theirs, 8.0, state_mb=50)]
    assert recovery.ratios(quick)["vs_structured_streaming"] == 4.0
    assert recovery.ratios(quick)["three_failures_vs_one"] == 1.5
    assert recovery.ratios([]) is not None


# --- replication --------------------------------------------------------------------------------------------------


def test_what_a_replica_costs_is_a_share_of_the_throughput_without() -> None:
    rates = {"penstock_r0": (100, 50), "penstock_r1": (95, 50), "penstock_r2": (70, 35)}
    rows: list[dict[str, Any]] = [
        {"contender": name, "round": n, "rows_s": rate}
        for name, values in rates.items()
        for n, rate in enumerate(values)
    ]
    found = replication.ratios(rows, [])
    assert found["throughput_r1_vs_r0"] == 0.975 and found["throughput_r2_vs_r0"] == 0.7
    assert found["lost_per_replica"] == pytest.approx(0.15)
    faster = [{**row, "rows_s": 100 + row["round"]} for row in rows]
    assert replication.ratios(faster, [])["lost_per_replica"] == 0.0
    assert replication.ratios([], [])["lost_per_replica"] is None


def test_checkpoints_are_measured_after_the_load_and_before_the_end() -> None:
    sizes = ((1, 40), (2, 99), (2, 1), (3, 6), (3, 2), (5, 6), (6, 2))
    files = [{"epoch_to": epoch, "bytes": size} for epoch, size in sizes]
    rows = replication.rows_of_sizes(files, 200, 2.0, 2)
    assert [(row["delta_bytes"], row["delta_share"]) for row in rows] == [(8, 0.04), (6, 0.03)]
    assert replication.ratios([], rows)["delta_share_2s"] == 0.035


def test_paced_words_are_counted_without_an_engine() -> None:
    truth = replication.true_counts(5_000)
    assert truth.height == common.VOCABULARY and truth["n"].sum() == common.VOCABULARY + 5_000
    assert replication.true_counts(5_000).equals(truth)


# --- epochs beside a checkpoint -----------------------------------------------------------------------------------


def test_epochs_that_restore_are_not_measured() -> None:
    found = checkpoint.epoch_figures([500.0, 10.0, 10.0, 40.0])
    assert found["epoch_ms_average"] == 20.0 and found["epoch_ms_worst"] == 40.0
    assert found["worst_vs_average"] == 2.0 and found["epoch_ms_p99"] == 40.0


def test_the_worst_size_is_the_headline() -> None:
    rows: list[dict[str, Any]] = [
        {
            "contender": name,
            "state_mb": mb,
            "round": n,
            "worst_vs_average": v,
            "epoch_ms_average": a,
            "epoch_ms_worst": v,
        }
        for name, mb, a, values in (
            (checkpoint.ASYNC, 128, 1.0, (1.0, 1.2, 1.1)),
            (checkpoint.ASYNC, 256, 1.0, (1.3, 9.0, 1.2)),
            (checkpoint.SYNC, 128, 4.0, (6.0, 5.0, 7.0)),
        )
        for n, v in enumerate(values)
    ]
    found = checkpoint.epoch_ratios(rows)
    assert found["worst_vs_average"] == 1.3 and found["full_worst_vs_average"] == 6.0
    assert found["worst_vs_average_128mb"] == 1.1 and found["average_epoch_vs_full_128mb"] == 0.25
    assert found["average_epoch_vs_full_256mb"] is None


def test_growth_is_every_key_and_then_random_ones(tmp_path: Path) -> None:
    truth = checkpoint.write_growth(tmp_path / "in", 250, 2, rows=100)
    frames = [pl.read_parquet(path) for path in sorted((tmp_path / "in").iterdir())]
    assert [frame.height for frame in frames] == [100, 100, 50, 100, 100]
    whole = pl.concat(frames).group_by("word").agg(n=pl.len().cast(pl.Int64)).sort("word")
    assert whole.equals(truth) and truth.height == 250
    unread = sorted((tmp_path / "in").iterdir())[4:]
    before = pl.concat(frames[:4]).group_by("word").agg(n=pl.len().cast(pl.Int64)).sort("word")
    assert checkpoint.without(truth, unread).equals(before) and checkpoint.without(truth, []) is truth


@pytest.mark.parametrize(("contender", "full"), [(checkpoint.ASYNC, False), (checkpoint.SYNC, True)])
def test_only_the_measured_run_takes_full_snapshots(
    contender: str, full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int | None, type[Worker] | None]] = []

    class Over(Exception):
        """The run that is measured would begin."""

    class Loaded:
        def wait(self) -> None:
            if len(asked) == 2:
                raise Over

    def start(*_: Any, config: ps.Config, worker: type[Worker] | None = None, **__: Any) -> Loaded:
        asked.append((config.epochs_max, worker))
        return Loaded()

    monkeypatch.setattr(jobs, "start", start)
    pl.DataFrame({"word": ["a"]}).write_parquet(tmp_path / "input.parquet")
    args = {"work": str(tmp_path), "input": str(tmp_path), "load": 3, "epochs": 5}
    with pytest.raises(Over):
        next(iter(checkpoint.CONTENDERS[contender](args)))
    assert asked == [(3, None), (5, FullSnapshots if full else Worker)]


def test_order_is_measured_with_and_without(tmp_path: Path) -> None:
    frame = order.some_rows(2_000)
    assert frame.schema == pl.Schema(order.SCHEMA)
    assert all(order.rows_a_second("stages", frame, order=with_it) > 0 for with_it in (True, False))
    rows = [
        {"contender": which, "flow": name, "round": 0, "rows_s": rate}
        for name in order.FLOWS
        for which, rate in (("with", 95), ("without", 100))
    ]
    assert order.ratios(rows) == dict.fromkeys(("words_kept", "windows_kept", "custom_kept", "stages_kept"), 0.95)
