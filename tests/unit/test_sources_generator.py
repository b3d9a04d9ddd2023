"""Generators: row i is a function of the seed and i, whatever the cut; the clock decides only how many there are."""

from __future__ import annotations

import datetime as dt
import pickle
from itertools import pairwise

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from penstock.connectors import SourceContext, generator, words
from penstock.connectors.base import Source
from penstock.connectors.generator import BLOCK_ROWS, make_vocabulary
from penstock.errors import FlowError, UserCodeError

CONTEXT = SourceContext("gen", None)


def numbers(first: int, n: int, rng: np.random.Generator) -> pl.DataFrame:
    return pl.DataFrame({"i": np.arange(first, first + n), "x": rng.random(n)})


def read(source: Source, first: int, last: int, parallelism: int = 1) -> pl.DataFrame:
    splits = source.splits({"row": first}, {"row": last}, parallelism)
    assert len(splits) <= parallelism
    worker = pickle.loads(pickle.dumps(source))
    return pl.concat([worker.read("gen", split).frame for split in splits])


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 5 * BLOCK_ROWS), max_size=5), parallelism=st.integers(1, 5), ready_made=st.booleans()
)
def test_every_cut_gives_the_whole(cuts: list[int], parallelism: int, ready_made: bool) -> None:
    total = 5 * BLOCK_ROWS + 17
    source: Source = words(rows=total, seed=3, disorder=2.0) if ready_made else generator(numbers, rows=total, seed=3)
    whole = read(source, 0, total)
    assert whole.height == total
    bounds = sorted({0, total, *cuts})
    parts = [read(source, a, b, parallelism) for a, b in pairwise(bounds)]
    assert_frame_equal(pl.concat(parts), whole)


def test_the_seed_matters() -> None:
    assert not read(generator(numbers, seed=1), 0, 10).equals(read(generator(numbers, seed=2), 0, 10))
    assert not read(words(seed=1), 0, 10).equals(read(words(seed=2), 0, 10))


def test_blocks_differ() -> None:
    for source, column in ((generator(numbers), "x"), (words(), "word")):
        frame = read(source, 0, 2 * BLOCK_ROWS)
        assert not frame[:BLOCK_ROWS][column].equals(frame[BLOCK_ROWS:][column])


def test_bounded() -> None:
    source = generator(numbers, rows=25)
    source.open(CONTEXT)
    at, sizes = source.initial_offset(), []
    while not source.exhausted(at):
        planned = source.plan(at, 10)
        assert planned is not None
        sizes.append(planned.rows_estimate)
        at = planned.end
    assert sizes == [10, 10, 5]
    assert source.plan(at, 10) is None


def test_the_rate_follows_the_clock_from_where_it_resumed() -> None:
    now = [100.0]
    source = words(rows_per_s=10, clock=lambda: now[0])
    source.open(CONTEXT)
    at = {"row": 1000}  # resumed
    assert source.plan(at, 50) is None
    now[0] += 2.5
    planned = source.plan(at, 50)
    assert planned is not None and planned.end == {"row": 1025}
    assert source.plan(planned.end, 50) is None
    now[0] += 1000
    planned = source.plan(planned.end, 50)
    assert planned is not None and planned.end == {"row": 1075}, "a backlog comes in ranges of the size asked for"
    assert not source.exhausted(planned.end)


def test_columns_and_schema() -> None:
    source = generator(
        {"i": lambda first, n, rng: np.arange(first, first + n), "x": lambda first, n, rng: rng.integers(0, 9, n)}
    )
    assert source.schema() == pl.Schema({"i": pl.Int64(), "x": pl.Int64()})
    narrow = generator(numbers, schema={"x": float, "i": pl.Int32})
    assert read_here(narrow, 5, 7).schema == pl.Schema({"x": pl.Float64(), "i": pl.Int32()})
    assert read_here(narrow, 5, 7)["i"].to_list() == [5, 6]


def read_here(source: Source, first: int, last: int) -> pl.DataFrame:
    return source.read("gen", {"first": first, "last": last}).frame


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda first, n, rng: 1 / 0, "division by zero"),
        (lambda first, n, rng: [1], "not a polars DataFrame"),
        (lambda first, n, rng: pl.DataFrame({"i": [1]}), "1 rows when asked for 8192"),
    ],
)
def test_a_function_that_fails(fn: object, message: str) -> None:
    source = generator(fn, schema={"i": int})  # type: ignore[arg-type]
    with pytest.raises(UserCodeError, match=message) as caught:
        read_here(source, 0, 1)
    assert caught.value.evidence["operator"] == "gen"


def test_words_have_zipf_frequencies_and_event_time() -> None:
    source = words(vocabulary=["a", "b", "c"], zipf=1.0, events_per_s=10, start=dt.datetime(2024, 5, 1), disorder=0.0)
    frame = read(source, 0, 60_000)
    counts = dict(frame.group_by("word").len().rows())
    for word, share in (("a", 6 / 11), ("b", 3 / 11), ("c", 2 / 11)):
        assert counts[word] == pytest.approx(60_000 * share, rel=0.03)
    assert frame["ts"][:2].to_list() == [dt.datetime(2024, 5, 1), dt.datetime(2024, 5, 1, 0, 0, 0, 100_000)]
    late = read(words(events_per_s=10, disorder=3.0), 0, 1000)["ts"]
    on_time = read(words(events_per_s=10), 0, 1000)["ts"]
    delay = (on_time - late).dt.total_microseconds()
    assert delay.min() >= 0 and 2_500_000 < delay.max() <= 3_000_001  # type: ignore[operator]


def test_the_vocabulary() -> None:
    vocabulary = make_vocabulary(20_000)
    assert len(set(vocabulary)) == 20_000
    assert vocabulary[:4] == ["the", "of", "and", "to"] and "stream" in vocabulary[:400]
    assert vocabulary[:500] == make_vocabulary(500), "a larger vocabulary only adds words"
    assert all(w.isalpha() and w.islower() for w in vocabulary)
    assert len(pickle.dumps(words(vocabulary=300_000))) < 2000


def test_wrong_arguments() -> None:
    for wrong in ({"rows": -1}, {"rows_per_s": 0}, {"seed": -1}, {"vocabulary": 0}, {"zipf": -1.0}, {"vocabulary": []}):
        with pytest.raises(FlowError) as caught:
            words(**wrong)  # type: ignore[arg-type]
        assert caught.value.remedy
