"""Which sampling values can be served, and what becomes of extreme ones."""

import math
import sys

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.device.sampler import Draw, sample
from engine.sampling import TEMPERATURE_MAX, TEMPERATURE_MIN, float32_temperature, sampling_fault
from engine.wire.messages import SamplingParams
from tests.engine.device.test_sampler import draw, tokens

EDGES = (
    *(0.0, -0.0, 5e-324, 1e-320, sys.float_info.min, 1e-300, 1e-46, 1e-45, 1.4e-45, 1e-40, 2.0**-127, TEMPERATURE_MIN),
    *(
        1e-30,
        1e-6,
        0.5,
        1.0,
        2.0,
        math.nextafter(1, 0),
        1e30,
        TEMPERATURE_MAX,
        3.4e38,
        3.5e38,
        1e308,
        sys.float_info.max,
    ),
)


FLOATS = st.one_of(st.sampled_from(EDGES), st.floats(0, allow_nan=False, allow_infinity=False))


LOGITS = st.one_of(
    st.floats(-50, 50, width=32),
    st.sampled_from([-math.inf, -3.3e38, 3.3e38, -1e30, 1e30, 0.0, 1.2e-38, 1e-45]),
    st.floats(-(2.0**127), 2.0**127, width=32),
)


SAMPLING = st.builds(
    SamplingParams,
    temperature=FLOATS,
    top_p=FLOATS.map(lambda p: p if 0 < p <= 1 else 1.0),
    top_k=st.one_of(st.integers(0, 40), st.integers(0, 2**63 - 1)),
    seed=st.one_of(st.integers(-(2**63), 2**63 - 1), st.sampled_from([0, 1, 2**63 - 1, -(2**63)])),
    max_tokens=st.just(2**63 - 1),
    min_tokens=st.integers(0, 2**63 - 1),
    ignore_eos=st.booleans(),
    stop_token_ids=st.lists(st.integers(0, 29), max_size=5).map(tuple),
)


@pytest.mark.case("T01")
@settings(max_examples=200, deadline=None)
@given(
    sampling=SAMPLING,
    logits=st.lists(LOGITS, min_size=30, max_size=30),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    num_generated=st.integers(0, 2**20),
)
@example(SamplingParams(temperature=1e-46), [1.0, 2.0, *[0.0] * 28], torch.float32, 0)
@example(SamplingParams(temperature=1e308), [1.0, -math.inf, *[0.0] * 28], torch.bfloat16, 0)
@example(SamplingParams(temperature=1e308, top_k=3), [1.0, 2.0, *[0.0] * 28], torch.float32, 0)
@example(SamplingParams(temperature=8.5e37, top_k=9), [0.0, -1.0, *[0.0] * 27, 3.3e38], torch.float32, 0)
@example(SamplingParams(temperature=1e-38, top_p=5e-324), [3.3e38, *[-3.3e38] * 29], torch.bfloat16, 0)
def test_whatever_float_is_asked_for_a_row_gets_a_token(
    sampling: SamplingParams, logits: list[float], dtype: torch.dtype, num_generated: int
) -> None:
    """Every field over the whole range of its type. The row's token may come, and the row beside it gets its own."""
    assert sampling_fault(sampling, 30) is None
    row = torch.tensor(logits).to(dtype)
    asked = Draw(sampling, 77, num_generated, (2,))
    banned = {2, *sampling.stop_token_ids} if num_generated < sampling.min_tokens else set()
    possible = [i for i in range(30) if i not in banned and row[i] > -math.inf]
    beside = draw(seed=5, position=9, temperature=0.8)
    plain = torch.linspace(-2, 2, 30).to(dtype)
    ids, errors = sample(torch.stack([row, plain]), [asked, beside], 30)
    assert ids[1:] == tokens(plain.unsqueeze(0), [beside]) and not errors[1]
    if not possible:
        assert errors[0]
        return
    assert errors[0] == "" and ids[0] in possible
    best = max(possible, key=lambda i: (float(row[i]), -i))
    if sampling.temperature < TEMPERATURE_MIN or sampling.top_k == 1:
        assert ids[0] == best
    if sampling.top_k:
        assert sorted((float(row[i]) for i in possible), reverse=True)[: sampling.top_k][-1] <= float(row[ids[0]])
    assert (ids, errors) == sample(torch.stack([row, plain]), [asked, beside], 30), "the same again"


@pytest.mark.case("T01")
def test_what_float32_cannot_divide_by_is_greedy_or_flat() -> None:
    assert [float32_temperature(t) for t in (0.0, -0.0, 5e-324, 1e-46, 1e-45, 1e-38)] == [0.0] * 6
    assert float32_temperature(TEMPERATURE_MIN) == TEMPERATURE_MIN and float32_temperature(0.7) == 0.7
    assert float32_temperature(1e308) == float32_temperature(sys.float_info.max) == TEMPERATURE_MAX
    assert float32_temperature(math.nan) == 0.0
    tiny = torch.finfo(torch.float32).tiny
    for edge in (TEMPERATURE_MIN, TEMPERATURE_MAX):
        narrow = torch.tensor(edge, dtype=torch.float32)
        assert float(narrow) == edge and tiny <= float(1 / narrow) < math.inf
    logits = torch.tensor([[1.0, 3.0, 3.0, -math.inf]])
    assert {tokens(logits, [draw(seed=s, temperature=1e-46)])[0] for s in range(20)} == {1}
    assert {tokens(logits, [draw(seed=s, temperature=1e308)])[0] for s in range(40)} == {0, 1, 2}
