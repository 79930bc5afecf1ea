"""Widths and bounds, by hand: three teams of weights 4, 2 and 1, times in microseconds."""

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from policies.bounds import gate_width, lag_bound, pause_bound_us, step_width
from policies.config import PolicyConfig
from policies.sequences import TeamTerms

WEIGHTS = (4, 2, 1)
CONFIG = PolicyConfig(fairness_window_us=700_000, base_quantum_us=50_000, step_cost_max_us=70_000, grant_us=100_000)
TABLE = (
    TeamTerms(1, 4, starving_after_us=300_000, promotion_burst_grants=4),
    TeamTerms(2, 2, starving_after_us=1_000_000, promotion_burst_grants=4),
    TeamTerms(3, 1, starving_after_us=3_000_000, promotion_burst_grants=2),
)


def test_the_step_width_is_the_largest_step_over_the_least_weight() -> None:
    assert step_width(CONFIG, WEIGHTS) == 70_000
    assert step_width(CONFIG, (4, 3)) == Fraction(70_000, 3)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 100_000),  # 700,000 / 7
        ({"fairness_window_us": 70_000}, 50_000),  # the first quantum over the least weight is more than 10,000
        ({"theta_us": 7}, 7),
        ({"theta_us": 0}, 0),
        ({"theta_us": 7, "is_gated": False}, None),
    ],
)
def test_the_gate_is_the_window_or_the_first_quantum(changes: dict[str, Any], expected: int | None) -> None:
    assert gate_width(replace(CONFIG, **changes), WEIGHTS) == expected


def test_when_blocks_are_short_the_lag_bound_is_twice_as_wide() -> None:
    assert lag_bound(CONFIG, WEIGHTS) == 100_000 + 2 * 70_000
    assert lag_bound(CONFIG, WEIGHTS, is_short=True) == 480_000
    assert lag_bound(replace(CONFIG, is_gated=False), WEIGHTS, is_short=True) is None


def test_the_pause_bound_is_the_sum_of_its_five_terms() -> None:
    """alpha + 240,000 * 6 / 1 + 2 * 170,000 * 7 / 0.2 + (10 grants + a step) / 0.8 + the upload."""
    assert pause_bound_us(CONFIG, TABLE, 3, 1, 5) == 3_000_000 + 1_440_000 + 11_900_000 + 1_337_500 + 5


def test_when_swapping_takes_half_the_device_two_terms_double() -> None:
    """The lag bound is twice as wide beside, for blocks are short."""
    found = pause_bound_us(CONFIG, TABLE, 3, 1, 5, is_short=True, rate_percent=50)
    assert found == 3_000_000 + 4 * 1_440_000 + 11_900_000 + 2 * 1_337_500 + 5


def test_when_a_term_is_no_whole_number_it_is_rounded_up() -> None:
    """170,000 * 7 / 0.3 is 3,966,666.7 and 1,070,000 / 0.7 is 1,528,571.4."""
    found = pause_bound_us(replace(CONFIG, promotion_percent=30), TABLE, 3, 0, 0)
    assert found == 3_000_000 + 1_440_000 + 3_966_667 + 1_528_572


def test_when_nothing_is_promised_the_pause_bound_is_zero() -> None:
    assert pause_bound_us(replace(CONFIG, promotion_percent=0), TABLE, 3, 1, 5) == 0
    assert pause_bound_us(replace(CONFIG, is_gated=False), TABLE, 3, 1, 5) == 0
    assert pause_bound_us(CONFIG, [TeamTerms(3, promotion_burst_grants=0)], 3, 1, 5) == 0
    with pytest.raises(KeyError):
        pause_bound_us(CONFIG, TABLE, 4, 1, 5)
