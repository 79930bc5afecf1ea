"""The step profile and the bill: parts sum to the step, and nobody pays for what another one caused."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.cost import StepProfile, split_step

PROFILE = StepProfile(
    fixed_us=24_000.0,
    prefill_token_us=700.0,
    prefill_attention_us=0.02,
    decode_row_us=900.0,
    decode_context_us=1.0,
)


@settings(derandomize=True, deadline=None, database=None, max_examples=200)
@given(
    st.integers(0, 10**9),
    st.lists(st.floats(0, 1e6, allow_nan=False), max_size=64),
    st.sampled_from([0.0, 0.3, 24_000.0, 1e9]),
)
def test_the_parts_sum_to_the_step(duration: int, marginals: list[float], fixed: float) -> None:
    charges = split_step(duration, marginals, fixed)
    assert len(charges) == len(marginals)
    assert all(charge >= 0 for charge in charges)
    assert not marginals or sum(charges) == duration


def test_the_fixed_part_is_shared_equally_and_the_rest_by_margin() -> None:
    assert split_step(1000, [100.0, 300.0], 600.0) == [400, 600]
    assert split_step(2000, [100.0, 300.0], 600.0) == [800, 1200], "a slower step than the profile says, same parts"
    assert split_step(10, [0.0, 0.0, 0.0], 0.0) == [4, 3, 3]
    assert split_step(10, [], 5.0) == []


def decode_bill(rows: Sequence[float]) -> float:
    """What 16 decoders pay together in a step of these rows besides them, measured as the profile says."""
    decoders = [PROFILE.decode_marginal_us(300)] * 16
    marginals = [*decoders, *rows]
    duration = round(PROFILE.fixed_us + sum(marginals))
    return sum(split_step(duration, marginals, PROFILE.fixed_us)[:16])


def test_decoders_do_not_pay_for_a_chunk_beside_them() -> None:
    alone = decode_bill([])
    beside = decode_bill([PROFILE.prefill_marginal_us(0, 256)])
    assert beside == pytest.approx(alone, rel=0.2)
    # Splitting by stand-alone work, as a naive meter does, bills them several times that.
    works = [PROFILE.decode_work_us(300)] * 16 + [PROFILE.prefill_work_us(0, 256)]
    duration = round(PROFILE.fixed_us + 16 * PROFILE.decode_marginal_us(300) + PROFILE.prefill_marginal_us(0, 256))
    assert sum(split_step(duration, works, 0.0)[:16]) > 2 * alone


@settings(derandomize=True, deadline=None, database=None, max_examples=100)
@given(st.integers(1, 3000), st.lists(st.integers(1, 512), min_size=1, max_size=12))
def test_chunking_a_prompt_changes_no_work(length: int, cuts: list[int]) -> None:
    done = total = 0
    for cut in [*cuts, length]:
        chunk = min(cut, length - done)
        total += PROFILE.prefill_work_us(done, chunk)
        done += chunk
    assert done == length
    assert total == PROFILE.prefill_work_us(0, length)
    assert PROFILE.prefill_work_us(length, 0) == 0
