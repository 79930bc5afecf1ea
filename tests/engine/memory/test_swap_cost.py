"""The break-even bandwidth between swapping and recomputing, against a hand-worked model."""

import pytest

from engine.memory.swap_cost import break_even_bandwidth, measured_break_even_bandwidth
from policies.cost import StepProfile


@pytest.mark.case("O13")
def test_the_break_even_of_a_llama_8b_on_an_a100() -> None:
    """k = 131,072 bytes a token, 8.03e9 parameters, 45 % of 312e12 operations a second: 2.29 GB/s."""
    assert break_even_bandwidth(131072, 8.03e9, 140.4e12) == pytest.approx(2.29e9, rel=0.001)


def test_at_the_break_even_copying_takes_as_long_as_computing() -> None:
    profile = StepProfile(
        fixed_us=9.0, prefill_token_us=500.0, prefill_attention_us=0.0, decode_row_us=1.0, decode_context_us=1.0
    )
    bandwidth = measured_break_even_bandwidth(23_040, profile)
    num_tokens = 700
    assert 2 * 23_040 * num_tokens / bandwidth == pytest.approx(num_tokens * 500e-6)
    # The same from parameters and operations a second: a prompt token takes 2P of them.
    assert break_even_bandwidth(23_040, 135e6, 2 * 135e6 / 500e-6) == pytest.approx(bandwidth)
    assert measured_break_even_bandwidth(23_040, StepProfile(1.0, 0.0, 0.0, 1.0, 0.0)) == 0.0
