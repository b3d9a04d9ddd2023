"""The last rows of each key against a list of its rows: no cut of the input and no parallelism may show."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from typing import Any

import polars as pl
import pytest
from hypothesis import given

import penstock as ps
from penstock import testing
from penstock.connectors.sinks import MemorySink
from penstock.operators import count_windows
from tests.property.cuts import COUNTS, SEEDS, SPECIAL, examples, maybe, plain, run, run_in_two, some_cut

OVER: list[dict[str, ps.Aggregate]] = [
    {"n": ps.count(), "total": ps.sum("x"), "low": ps.min("x"), "first": ps.min("s")},
    {"n": ps.count(), "whole": ps.sum("i"), "low": ps.min("x"), "first": ps.min("s")},
]


def values(rows: list[tuple[int, dict[str, Any]]], pane: int) -> dict[str, Any]:
    """Of (number, row). Floats are added pane by pane, and then the panes: what count_windows.py promises."""
    panes: dict[int, float] = defaultdict(float)
    for number, row in rows:
        panes[number // pane] += row["x"] if row["x"] is not None else 0.0
    total = 0.0
    for at in sorted(panes):
        total += panes[at]
    real = [r["x"] + 0.0 for _, r in rows if r["x"] is not None and r["x"] == r["x"]]
    return {
        "n": len(rows),
        "total": total,
        "whole": sum(r["i"] for _, r in rows if r["i"] is not None),
        "low": min(real, default=None),
        "first": min((r["s"] for _, r in rows if r["s"] is not None), default=None),
    }


def oracle(
    rows: list[dict[str, Any]], size: int, every: int, partial: bool, names: list[str]
) -> dict[Any, tuple[Any, ...]]:
    seen: dict[Any, list[tuple[int, dict[str, Any]]]] = defaultdict(list)
    out = {}
    for row in rows:
        mine = seen[row["k"]]
        mine.append((len(mine), row))
        if len(mine) % every == 0 and (partial or len(mine) >= size):
            window = mine[-size:]
            found = values(window, math.gcd(size, every))
            out[row["k"], window[0][0] + 1, len(mine) + 1] = tuple(plain(found[n]) for n in names)
    return out


@given(seed=SEEDS, count=COUNTS)
@examples(25)
def test_the_last_rows_are_those_of_rows_taken_one_by_one(seed: int, count: int) -> None:
    r = random.Random(seed)
    rows = [
        {
            "k": maybe(r, r.choice(["a", "b"])),
            "x": maybe(r, r.choice(SPECIAL) if r.random() < 0.3 else r.uniform(-1e9, 1e9)),
            "i": maybe(r, r.randint(-(2**40), 2**40)),
            "s": maybe(r, r.choice(["x", "yy", ""])),
        }
        for _ in range(count)
    ]
    frame = pl.DataFrame(rows, schema={"k": pl.String(), "x": pl.Float64(), "i": pl.Int64(), "s": pl.String()})
    size = r.randint(1, 12)
    every = r.randint(1, size)
    partial = r.random() < 0.3
    over = r.choice(OVER)
    cut = some_cut(r, count)
    sink = MemorySink()

    def build(source: ps.Source) -> ps.Flow:
        flow = ps.Flow("counts")
        spec = ps.last_rows(size, every=every, partial=partial)
        flow.source("in", source).key_by("k").window(spec).aggregate("w", **over).sink("out", sink)
        return flow

    if r.random() < 0.25:
        run_in_two(build, frame, cut, r.randint(1, 3))
    else:
        run(build, frame, cut, ["w", "in"])
    got = {}
    for row in sink.frame().iter_rows(named=True):
        at = (row["k"], row["window_start"], row["window_end"])
        assert at not in got, f"{at} came twice"
        got[at] = tuple(plain(row[n]) for n in over)
    assert got == oracle(rows, size, every, partial, list(over))


def test_many_windows_are_put_together_in_several_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(count_windows, "_GATHERED_MAX", 7)
    frame = pl.DataFrame({"k": [i % 3 for i in range(60)], "i": range(60)})
    flow = ps.Flow("goes")
    windows = flow.source("in", testing.rows(frame, epochs=[20, 40])).key_by("k").window(ps.last_rows(4, every=2))
    windows.aggregate("w", i=ps.sum("i")).sink("out", ps.memory())
    got = {(k, a): i for k, a, _, i in testing.collect(flow).rows()}
    assert got == {(k, a): sum(k + 3 * (a - 1 + j) for j in range(4)) for k in range(3) for a in range(1, 18, 2)}


def test_panes_are_forgotten() -> None:
    """What stays of a key is its count, and the rows that a later window needs."""
    operator = ps.last_rows(6, every=4).aggregate("w", ["k"], {"n": ps.count()}, pl.Schema({"k": pl.Int64()}))
    from penstock.operators.base import HASH, Arrival, Tick
    from penstock.state.hashing import hash_columns
    from penstock.state.table import KeyedTable

    spec = operator.table()
    assert spec is not None
    table = KeyedTable(spec)
    for epoch in range(1, 30):
        frame = operator.prepare(pl.DataFrame({"k": [1] * (epoch % 5), "x": [0] * (epoch % 5)}), True).frame
        frame = frame.with_columns(pl.Series(HASH, hash_columns(frame, ["k"])))
        operator.apply(table, [Arrival(frame, "in", 0, True)], Tick(epoch))
        table.seal(epoch)
        table.validate()
        assert table.rows_live <= 1 + 6 // 2 + 4 // 2


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: ps.last_rows(0), "size must be a number of rows from 1"),
        (lambda: ps.last_rows(2.5), "size must be a number of rows"),  # type: ignore[arg-type]
        (lambda: ps.last_rows(5, every=0), "every must be a number of rows"),
        (lambda: ps.last_rows(True), "not True"),
        (lambda: ps.last_rows(5, every=6), "rows between two windows would be lost"),
        (lambda: ps.last_rows(1_000_000), "put together from 1000000 parts"),
    ],
)
def test_wrong_windows_are_refused(build: Any, said: str) -> None:
    with pytest.raises(ps.PenstockError, match=said):
        build()
