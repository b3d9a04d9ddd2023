"""How the rows of an epoch are shared among sources."""

from __future__ import annotations

from penstock.control.sharing import shares


def test_each_source_gets_its_part_of_what_waits() -> None:
    given = shares(50_000, {"persons": 1_000, "auctions": 3_000, "bids": 46_000})
    assert given == {"persons": 1_000, "auctions": 3_000, "bids": 46_000}


def test_a_source_in_which_nothing_seems_to_wait_is_read_all_the_same() -> None:
    assert shares(12_800, {"a": 0, "b": 100}) == {"a": 100, "b": 12_800}
    assert shares(2, {"a": 0, "b": 100}) == {"a": 1, "b": 2}


def test_shares_are_equal_where_a_backlog_is_not_known_or_nothing_waits() -> None:
    assert shares(100, {"a": None, "b": 1_000}) == {"a": 50, "b": 50}
    assert shares(100, {"a": 0, "b": 0}) == {"a": 50, "b": 50}
    assert shares(1, {"a": None, "b": None}) == {"a": 1, "b": 1}
    assert shares(100, {}) == {}
