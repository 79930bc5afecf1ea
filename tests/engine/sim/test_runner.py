"""The simulated runner: modelled time, made-up tokens that are the same wherever they are made."""

import pytest

from engine.clock import VirtualClock
from engine.plan import Row, StepPlan
from engine.sim.runner import PacedClock, SimRunner, step_us
from engine.wire.messages import SamplingParams
from policies.cost import StepProfile

PROFILE = StepProfile(
    fixed_us=100.0, prefill_token_us=10.0, prefill_attention_us=1.0, decode_row_us=20.0, decode_context_us=0.5
)


def decode(seq_id: int, start: int, seed: int = 7) -> Row:
    return Row(seq_id, True, start, (65,), [0], True, SamplingParams(seed=seed), 1)


def prefill(seq_id: int, start: int, num_tokens: int, *, samples: bool) -> Row:
    return Row(seq_id, False, start, (65,) * num_tokens, [0], samples, SamplingParams(seed=7), 0)


def test_a_step_takes_its_fixed_part_and_each_rows_marginal_part() -> None:
    clock = VirtualClock(1000)
    plan = StepPlan(3, (decode(1, 9), prefill(2, 4, 2, samples=False), prefill(3, 0, 1, samples=True)))
    result = SimRunner(PROFILE, clock).execute(plan)
    assert result.duration_us == round(100 + (20 + 10 * 0.5) + (20 + (2 * 4 + 3)) + (10 + 1)) == step_us(PROFILE, plan)
    assert clock.now_us() == 1000 + result.duration_us
    assert result.step_id == 3 and set(result.token_ids) == {1, 3}


def test_tokens_depend_on_seed_and_position_alone() -> None:
    runner = SimRunner(PROFILE, VirtualClock())
    together = runner.execute(StepPlan(0, (decode(1, 5), decode(2, 6), decode(3, 5, seed=8)))).token_ids
    alone = SimRunner(PROFILE, VirtualClock()).execute(StepPlan(9, (decode(4, 6),))).token_ids
    assert together[2] == alone[4]
    many = [runner.execute(StepPlan(0, (decode(1, i),))).token_ids[1] for i in range(200)]
    assert len(set(many)) > 50


def test_tokens_stay_in_their_range_and_end_only_when_asked_to() -> None:
    def drawn(**kwargs: int) -> list[int]:
        runner = SimRunner(PROFILE, VirtualClock(), token_ids=range(10, 20), **kwargs)
        return [runner.execute(StepPlan(0, (decode(1, i),))).token_ids[1] for i in range(1000)]

    assert set(drawn()) == set(range(10, 20))
    ending = drawn(end_token_id=2, end_one_in=10)
    assert set(ending) == {2, *range(10, 20)} and 50 < ending.count(2) < 200


def test_an_empty_range_of_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="range of token ids is empty"):
        SimRunner(PROFILE, VirtualClock(), token_ids=range(0))


def test_real_time_passes_by_sleeping() -> None:
    slept: list[float] = []
    clock = PacedClock(slept.append)
    before = clock.now_us()
    SimRunner(PROFILE, clock).execute(StepPlan(0, (decode(1, 9),)))
    assert slept == [125 / 1e6] and clock.now_us() >= before
