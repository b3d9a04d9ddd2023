"""What waits in a source: what each source says of it, and how the driver looks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl

import penstock as ps
from penstock import testing
from penstock.connectors.base import Backlog, SourceContext
from penstock.connectors.punctuation import punctuated
from penstock.connectors.spool import Batch, Spool
from penstock.engines.backlogs import LOOK_S, Backlogs
from penstock.state.store import MemoryStore

CONTEXT = SourceContext("in", None)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


# -- sources -----------------------------------------------------------------------------------------------------------


def numbers(first: int, n: int, rng: Any) -> pl.DataFrame:
    return pl.DataFrame({"x": range(first, first + n)})


def test_a_generator_with_a_rate_has_the_rows_that_are_due() -> None:
    clock = Clock()
    source = ps.generator(numbers, schema={"x": int}, rows=250, rows_per_s=100, clock=clock)
    source.open(CONTEXT)
    source.plan({"row": 0}, 10)
    clock.now = 2.0
    assert source.backlog({"row": 0}) == Backlog(rows=200)
    assert source.backlog({"row": 150}) == Backlog(rows=50)
    clock.now = 9.0
    assert source.backlog({"row": 150}) == Backlog(rows=100), "it has no more than 250"


def test_a_generator_without_a_rate_has_what_is_left_of_it() -> None:
    assert ps.generator(numbers, schema={"x": int}, rows=250).backlog({"row": 200}) == Backlog(rows=50)
    assert ps.generator(numbers, schema={"x": int}).backlog({"row": 200}) == Backlog(), "it has no end"


def test_given_rows_and_sources_around_others() -> None:
    source = testing.rows([{"x": n} for n in range(10)])
    assert source.backlog({"row": 4}) == Backlog(rows=6)
    assert testing.stops_after(source, 8).backlog({"inner": {"row": 4}, "rows": 4}) == Backlog(rows=6)
    timed = testing.rows(pl.DataFrame({"x": [1, 2], "t": [0, 1]}).with_columns(pl.col("t").cast(pl.Datetime("us"))))
    assert punctuated(timed, when=pl.col("x") > 1, on="t").backlog({"row": 1}) == Backlog(rows=1)


def test_files_are_counted_by_bytes_and_rows_estimated_by_what_was_planned(tmp_path: Path) -> None:
    for n in range(3):
        (tmp_path / f"{n}.txt").write_text("12345678\n9abcdef\n")  # 17 bytes, 2 lines
    source = ps.files(tmp_path / "*.txt", follow=True)
    source.open(CONTEXT)
    assert source.backlog({"file": 0, "at": 0}) == Backlog(), "nothing has been listed yet"
    found = source.plan({"file": 0, "at": 0}, 2)
    assert found is not None and found.end == {"file": 1, "at": 0}
    assert source.backlog(found.end) == Backlog(rows=4, bytes=34)
    assert source.backlog({"file": 1, "at": 17}).bytes == 17, (
        "of a file that was not planned, what was read is not known"
    )
    (tmp_path / "3.txt").write_text("12345678\n9abcdef\n" * 10)
    assert source.backlog(found.end) == Backlog(rows=24, bytes=204), "files that come are seen without a plan"
    later = source.plan(found.end, 24)
    assert later is not None and later.end == {"file": 4, "at": 0}
    assert len(later.facts) == 3, "what a look has found is logged with the range that reads it"
    assert source.backlog(later.end) == Backlog(rows=0, bytes=0)


def test_a_file_that_is_half_read_counts_by_what_is_left(tmp_path: Path) -> None:
    (tmp_path / "0.txt").write_text("1234567\n" * 100)
    source = ps.files(tmp_path / "0.txt")
    source.open(CONTEXT)
    found = source.plan({"file": 0, "at": 0}, 25)
    assert found is not None and found.end["at"] == 200
    assert source.backlog(found.end) == Backlog(rows=75, bytes=600)


def test_what_was_pushed_waits_until_it_is_read() -> None:
    schema = pl.Schema({"x": pl.Int64()})
    spool = Spool(MemoryStore(), "spool/in", schema, rows_max=1000, bytes_max=1 << 20)
    start = {"segment": 0, "row": 0}
    try:
        assert spool.after(start) == (0, 0)
        batch = spool.append(Batch(pl.DataFrame({"x": [1, 2, 3, 4]})), wait=True)
        batch.done.wait(10)
        rows, size = spool.after(start)
        assert rows == 4 and size > 0
        planned = spool.plan(start, 3)
        assert planned is not None and planned == ({"segment": 0, "row": 3}, 3)
        assert spool.after(planned[0])[0] == 1 and 0 < spool.after(planned[0])[1] < size
        assert spool.after({"segment": 1, "row": 0}) == (0, 0)
    finally:
        spool.close()


# -- the driver --------------------------------------------------------------------------------------------------------


class Told(testing.RowsSource):
    """A source that says what it is told to say, after some time."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(pl.DataFrame({"x": [1]}))
        self.clock, self.waits, self.takes_s, self.asked = clock, 0, 0.0, 0

    def backlog(self, offset: Any) -> Backlog:
        self.asked += 1
        self.clock.now += self.takes_s
        if self.waits < 0:
            raise OSError("it is away")
        return Backlog(rows=self.waits)


def test_plans_are_counted_with_what_waits_after_them() -> None:
    clock = Clock()
    source = Told(clock)
    backlogs = Backlogs({"in": source}, clock)
    assert not backlogs.due(0.0), "nothing has been planned"
    source.waits = 50
    backlogs.planned("in", {"row": 100}, 100, 100)
    clock.now, source.waits = 1.0, 80
    backlogs.look()
    clock.now, source.waits = 2.0, 0
    backlogs.planned("in", {"row": 180}, 80, 100)
    looks = backlogs.take()
    assert [(k.arrived.at, k.arrived.planned, k.arrived.waiting) for k in looks] == [
        (0, 100, 50),
        (1, 100, 80),
        (2, 180, 0),
    ]
    assert [(k.took, k.full) for k in looks] == [(100, True), (None, False), (80, False)]
    assert backlogs.take() == []


def test_looks_between_plans_keep_their_distance_and_slow_sources_are_asked_seldom() -> None:
    clock = Clock()
    source = Told(clock)
    backlogs = Backlogs({"in": source}, clock)
    backlogs.planned("in", {"row": 0}, 10, 100)
    assert backlogs.due(1.0) and not backlogs.due(1.0 + LOOK_S / 2) and backlogs.due(1.0 + LOOK_S)
    source.takes_s = 1.0
    clock.now = 10.0
    backlogs.look()
    before = source.asked
    clock.now = 29.0
    backlogs.look()
    backlogs.planned("in", {"row": 10}, 10, 100)
    assert source.asked == before, "1 s in 20 is enough"
    clock.now = 31.0
    backlogs.look()
    assert source.asked == before + 1
    assert backlogs.take()[-1].arrived.planned == 20, "what was planned meanwhile is counted"


def test_a_source_that_fails_to_tell_is_said_once_and_ends_nothing() -> None:
    clock = Clock()
    source = Told(clock)
    source.waits = -1
    backlogs = Backlogs({"in": source}, clock)
    backlogs.planned("in", {"row": 0}, 10, 100)
    backlogs.planned("in", {"row": 10}, 10, 100)
    assert [k.arrived.waiting for k in backlogs.take()] == [None, None]
    (told,) = backlogs.notices
    assert "source 'in' could not say what waits in it (OSError: it is away)" in told
