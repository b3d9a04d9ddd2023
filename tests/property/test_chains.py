"""Stages in a row: what the second sees must not depend on which results of the first came in one epoch."""

from __future__ import annotations

import random
from datetime import datetime, timedelta

import polars as pl
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock import testing
from penstock.operators import topk
from penstock.operators.topk import TopK
from tests.property.cuts import examples

START = datetime(2026, 1, 1)


def readings(seed: int) -> pl.DataFrame:
    rng = random.Random(seed)
    now, rows = 0.0, []
    for _ in range(rng.randrange(1, 80)):
        now += rng.choice([0, 0, 1, 1, 3, 40])
        rows.append(
            (
                START + timedelta(seconds=now - rng.randrange(0, 4)),
                rng.choice("abcdef"),
                rng.uniform(-1, 1) * 10 ** rng.randrange(9),
            )
        )
    return pl.DataFrame(rows, schema={"ts": pl.Datetime("us"), "k": pl.String, "x": pl.Float64}, orient="row")


class Trail(ps.Operator):
    """Tells the order in which results came."""

    def on_event(self, key: object, event: object, seen: ps.Value[str], emit: ps.Emit) -> None:
        seen.set(seen.get("") + event.k + str(event.window_end.second))  # type: ignore[attr-defined]
        emit(parity=key, trail=seen.get())


@examples(8)
@given(st.integers(0, 10**9), st.sampled_from(["tumbling", "hopping", "session"]))
def test_results_of_windows_go_on_in_one_order(seed: int, kind: str) -> None:
    """Order-sensitive operators of another key after windows: sums of floats, and a trail of what came."""
    window = {
        "tumbling": ps.tumbling("10s", on="ts", lateness="3s"),
        "hopping": ps.hopping("10s", every="5s", on="ts", lateness="3s"),
        "session": ps.session("4s", on="ts", lateness="3s"),
    }[kind]
    flow = ps.Flow("chain")
    sums = flow.source("in", testing.rows(readings(seed))).key_by("k").window(window).aggregate("sums", x=ps.sum("x"))
    tagged = sums.with_columns("parity", parity=pl.col("window_start").dt.day() % 2)
    tagged.key_by("parity").aggregate("total", x=ps.sum("x"), all=ps.collect("x")).sink("totals", ps.memory())
    tagged.key_by("parity").process("trail", Trail(), schema={"parity": int, "trail": str}).sink("trails", ps.memory())
    testing.assert_any_cut(
        flow, epoch_rows=(1, 4, 1000), instances=(1, 3), latest_by={"totals": ["parity"], "trails": ["parity"]}
    )


@examples(60)
@given(st.integers(0, 10**9))
def test_sifting_before_the_sort_changes_no_ranking(seed: int) -> None:
    rng = random.Random(seed)
    dtype = rng.choice([pl.Int64(), pl.Float64(), pl.String()])
    rows = []
    for _ in range(rng.randrange(0, 60)):
        value = None if rng.random() < 0.2 else rng.randrange(6)
        if value is not None and dtype == pl.Float64():
            value = float("nan") if rng.random() < 0.1 else float(value)
        rows.append((rng.choice([None, "a", "b"]), str(value) if dtype == pl.String() and value is not None else value))
    frame = pl.DataFrame(rows, schema={"g": pl.String(), "v": dtype}, orient="row").with_row_index("i")
    for group in ((), ("g",)):
        ranking = TopK(
            "t",
            rng.randrange(1, 6),
            "v",
            group,
            frame.schema,
            identity=None,
            whole_groups=True,
            descending=rng.random() < 0.5,
        )
        before = topk.FEW
        try:
            topk.FEW = 10**9
            sorted_only = ranking._best(frame)
            topk.FEW = -1
            sifted = ranking._best(frame)
        finally:
            topk.FEW = before
        assert sifted.sort("i").equals(sorted_only.sort("i"))
