"""The size of an epoch follows the measured speed: damped, bounded, deaf to epochs that say nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.control.pacing import Pacer


def pacer(rows_max: int = 10_000) -> Pacer:
    return Pacer(rows_max, 100, 1_000_000, 250.0)


def test_it_starts_within_its_bounds() -> None:
    assert Pacer.start(None, 1_000, 1_000_000, 500).rows_max == 20_000
    assert Pacer.start(None, 50_000, 1_000_000, 500).rows_max == 50_000
    assert Pacer.start(None, 10, 5_000, 500).rows_max == 5_000
    assert Pacer.start(None, 10, 5_000, 500).target_ms == 250, "a row waits for the epoch before and for its own"


def test_a_fixed_size_stays() -> None:
    fixed = Pacer.start(777, 1, 10, 500)
    assert fixed.observe(777, 10_000).rows_max == 777


def test_on_target_it_stays() -> None:
    assert pacer().observe(10_000, 250.0).rows_max == 10_000


def test_too_slow_shrinks_and_too_fast_grows_by_half_of_a_factor_of_two_at_most() -> None:
    assert pacer().observe(10_000, 500.0).rows_max == 7_500
    assert pacer().observe(10_000, 1e9).rows_max == 7_500
    assert pacer().observe(10_000, 125.0).rows_max == 15_000
    assert pacer().observe(10_000, 0.001).rows_max == 15_000


def test_a_small_epoch_is_no_reason_to_grow_but_a_slow_one_is_to_shrink() -> None:
    assert pacer().observe(100, 1.0).rows_max == 10_000
    assert pacer().observe(100, 250.0).rows_max == 7_500


@pytest.mark.parametrize(("rows", "ms"), [(0, 10.0), (10, 0.0), (-1, 5.0)])
def test_an_epoch_without_rows_or_time_says_nothing(rows: int, ms: float) -> None:
    assert pacer().observe(rows, ms) == pacer()


@given(st.lists(st.tuples(st.integers(0, 2_000_000), st.floats(0, 1e7)), max_size=50))
def test_it_never_leaves_its_bounds(observed: list[tuple[int, float]]) -> None:
    p = pacer()
    for rows, ms in observed:
        p = p.observe(rows, ms)
        assert 100 <= p.rows_max <= 1_000_000


def test_while_input_waits_epochs_grow_until_their_fixed_cost_hardly_counts() -> None:
    """150 ms an epoch and 40 rows a millisecond. On time: half of an epoch is fixed cost. Behind: a tenth, of what is
    bearable; and back again when there is less than would fit."""
    p = pacer(8_000)
    for rows in [6_000, 5_000] * 30:
        p = p.observe(min(rows, p.rows_max), 150 + min(rows, p.rows_max) / 40)
    assert abs(p.rows_max - 150 * 40) < 2_500
    for _ in range(60):
        p = p.observe(p.rows_max, 150 + p.rows_max / 40)
    assert abs(p.rows_max - (1_500 - 150) * 40) < 1_000
    for _ in range(60):
        p = p.observe(2_000 + p.rows_max % 500, 150 + (2_000 + p.rows_max % 500) / 40)
    assert abs(p.rows_max - 150 * 40) < 1_000


def test_it_finds_a_steady_speed() -> None:
    """A machine that does 40 rows a millisecond plus 20 ms an epoch: 250 ms are 9,200 rows."""
    p = pacer(200_000)
    for _ in range(40):
        p = p.observe(p.rows_max, 20 + p.rows_max / 40)
    assert abs(p.rows_max - 9_200) < 100
