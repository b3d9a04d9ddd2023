"""Several sources share an epoch."""

from __future__ import annotations

import pytest

from penstock.control.sharing import Standing, shares

HOUR = 3_600_000_000


def test_sources_come_to_one_event_time() -> None:
    few = Standing(rows=100, first_us=0, reached_us=HOUR)
    many = Standing(rows=4_600, first_us=0, reached_us=HOUR)
    found = shares(4_700, {"few": few, "many": many})
    assert found == {"few": 100, "many": 4_600}


def test_one_that_is_ahead_waits() -> None:
    ahead = Standing(rows=100, first_us=0, reached_us=10 * HOUR)
    late = Standing(rows=100, first_us=0, reached_us=HOUR)
    found = shares(1_010, {"ahead": ahead, "late": late})
    assert found == {"ahead": 10, "late": 1_000}, "nine hours of the late one alone, then an hour of both"


def test_far_ahead_it_gets_the_least_there_is() -> None:
    ahead = Standing(rows=100, first_us=0, reached_us=1_000 * HOUR)
    late = Standing(rows=100, first_us=0, reached_us=HOUR)
    assert shares(1_280, {"ahead": ahead, "late": late}) == {"ahead": 10, "late": 1_280}


@pytest.mark.parametrize("backlogs, expected", [((30, 10), (750, 250)), ((0, 0), (500, 500)), ((None, 5), (500, 500))])
def test_without_times_the_backlog_counts(backlogs: tuple[int | None, int | None], expected: tuple[int, int]) -> None:
    given = {name: Standing(backlog=b) for name, b in zip("ab", backlogs, strict=True)}
    assert tuple(shares(1_000, given).values()) == expected


def test_nobody_gets_nothing() -> None:
    assert shares(10, {}) == {}
    assert shares(1, {"a": Standing(), "b": Standing()}) == {"a": 1, "b": 1}
