"""The policy's constants: what follows from the step profile."""

from dataclasses import replace

import pytest

from policies.config import PolicyConfig, from_profile
from policies.cost import StepProfile
from tests.policies.test_cost import PROFILE


def test_constants_from_the_profile() -> None:
    config = from_profile(PROFILE, levels=8, fairness_window_us=1_000_000, chunk_tokens=256, context_len=8192)
    decode = PROFILE.decode_work_us(512)
    assert decode == 24_000 + 900 + 512
    prompt = PROFILE.prefill_work_us(0, 128)
    assert prompt > 2 * decode, "of a chat's prompt and of two decode steps the longer one is the first quantum"
    assert config.quanta() == tuple(prompt * 2**k for k in range(7))
    assert config.quantum_cost_us == 2 * decode and config.promotion_grant_us == 8 * decode
    assert config.decode_work_us == decode
    assert config.chunk_work_us == PROFILE.prefill_work_us(0, 256)
    # The largest chunk at the end of the largest context.
    pairs = sum(range(8192 - 256 + 1, 8192 + 1))
    assert config.step_cost_max_us == round(24_000 + 700 * 256 + 0.02 * pairs)


def test_a_decode_may_be_the_largest_step() -> None:
    slow_reader = StepProfile(10.0, 1.0, 0.0, 1.0, 100.0)
    config = from_profile(slow_reader, levels=2, fairness_window_us=1, chunk_tokens=4, context_len=1000)
    assert config.step_cost_max_us == 10 + 1 + 100 * 1000


def test_a_context_smaller_than_a_chunk() -> None:
    config = from_profile(PROFILE, levels=1, fairness_window_us=0, chunk_tokens=256, context_len=64)
    assert config.chunk_work_us == PROFILE.prefill_work_us(0, 64)
    assert config.quanta() == ()


@pytest.mark.parametrize(
    "change",
    [
        {"coast_below_percent": 121},
        {"coast_below_percent": -1, "coast_above_percent": 0},
        {"coast_completions_min": 0},
        {"coast_completions": 7},
    ],
)
def test_impossible_thresholds_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="coast_"):
        replace(PolicyConfig(), **change)
