"""What prompts may take of a step, by hand: D, the parts of it, weights; and what holds whatever the numbers are."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.prompt_time import even_prompt_us

PARTS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 100_000)), min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("step_us", "weight", "others", "expected"),
    [
        (20_000, 1, [(1, 20_000)], 20_000),  # two equal teams: as long again, and each has a half
        (20_000, 4, [(1, 20_000)], 80_000),  # four fifths of a step of 100 ms
        (20_000, 1, [(4, 20_000)], 5_000),  # a fifth of 25 ms
        (20_000, 1, [(1, 10_000), (1, 10_000)], 10_000),  # a third of 30 ms
        (20_000, 1, [(1, 2_000), (1, 18_000)], 16_363),  # (20 - 2) / 2 = 9 of 20 ms: 20 * 9 / 11
        (20_000, 2, [(1, 1_000), (1, 19_000)], 34_545),  # 12.666 of 20 ms
    ],
)
def test_the_even_part_by_hand(step_us: int, weight: int, others: list[tuple[int, int]], expected: int) -> None:
    assert even_prompt_us(step_us, weight, others) == expected


@given(PARTS, st.integers(1, 9))
def test_no_team_that_wants_more_has_less_than_its_part(others: list[tuple[int, int]], weight: int) -> None:
    step_us = sum(part_us for _, part_us in others)
    prompt_us = even_prompt_us(step_us, weight, others)
    part = Fraction(prompt_us, step_us + prompt_us)
    assert 0 <= part < 1
    largest = max(Fraction(part_us, step_us * other_weight) for other_weight, part_us in others)
    assert part / weight <= largest, "nobody lost to a team with more per weight"
    fair = Fraction(weight, weight + sum(w for w, _ in others))
    assert prompt_us + 2 >= step_us * fair / (1 - fair), "never less than by weight alone"


@given(PARTS, st.integers(1, 8))
def test_when_the_weight_is_larger_the_part_is_no_less(others: list[tuple[int, int]], weight: int) -> None:
    step_us = sum(part_us for _, part_us in others)
    assert even_prompt_us(step_us, weight, others) <= even_prompt_us(step_us, weight + 1, others)


@given(PARTS)
def test_the_order_of_the_others_says_nothing(others: list[tuple[int, int]]) -> None:
    step_us = sum(part_us for _, part_us in others)
    assert even_prompt_us(step_us, 3, others) == even_prompt_us(step_us, 3, others[::-1])
