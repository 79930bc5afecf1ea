"""How long a step may get, one bound at a time. A step takes 1 ms, 0.1 ms more for each prompt token, 0.5 ms for each
decode row; a block of 16 prompt tokens is 1.6 ms.
"""

from collections.abc import Mapping, Sequence

import pytest

from engine.config import EngineConfig
from engine.step.scheduler import Scheduler
from engine.step.step_time import UNBOUNDED_US, StepTimer, chunk_us, step_us_max
from policies.cost import StepProfile
from policies.sequences import AS_SERVED, Overhead, Served, StepTime, TeamTerms
from tests.engine.step.test_scheduler import Bench, spans
from tests.support.engine.simple_engine import UNIT_PROFILE, ArrivalOrder

PROFILE = StepProfile(
    fixed_us=1000.0, prefill_token_us=100.0, prefill_attention_us=0.0, decode_row_us=500.0, decode_context_us=0.0
)


class Asked(ArrivalOrder):
    """Notes what it is asked and told of time."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, dict[int, int], int]] = []
        self.times: list[StepTime] = []

    def prompt_time_us(self, team_id: int, others: Mapping[int, int], step_us: int) -> int | None:
        self.asked.append((team_id, dict(others), step_us))
        return super().prompt_time_us(team_id, others, step_us)

    def settle(
        self, served: Sequence[Served], now_us: int, overheads: Sequence[Overhead] = (), time: StepTime = AS_SERVED
    ) -> None:
        self.times.append(time)
        super().settle(served, now_us, overheads, time)


class Timed(Bench):
    """A bench whose steps take time, as the profile says."""

    policy: Asked

    def __init__(self, **settings: int | str) -> None:
        super().__init__()
        self.policy = Asked()
        config = EngineConfig(**{"max_batch_size": 4, "memory_preemption": "none", **settings})  # type: ignore[arg-type]
        self.scheduler = Scheduler(config, self.policy, PROFILE, 200)
        self.policy.configure([TeamTerms(0), TeamTerms(1), TeamTerms(2)], 0)


def beside_a_stream(prompt: int, prompt_us: int | None, **settings: int | str) -> Timed:
    """A sequence of team 0 that decodes, and a prompt of team 1 that the policy leaves `prompt_us`."""
    bench = Timed(**settings)
    bench.add(1, 50)
    bench.step()
    bench.add(prompt, 5, team_id=1)
    bench.policy.prompt_us = prompt_us
    return bench


def test_the_bounds_follow_from_the_profile_unless_set() -> None:
    plain = EngineConfig()
    assert (chunk_us(plain, PROFILE), step_us_max(plain, PROFILE)) == (10_000, 45_000)
    chosen = EngineConfig(prefill_chunk_us=7, step_time_max_us=9)
    assert (chunk_us(chosen, PROFILE), step_us_max(chosen, PROFILE)) == (7, 9)
    assert chunk_us(plain, UNIT_PROFILE) == step_us_max(plain, UNIT_PROFILE) == UNBOUNDED_US, "no fixed part"


@pytest.mark.parametrize(("set_us", "end"), [(0, 96), (4_900, 48), (3_199, 16), (1, 16)])
def test_a_row_of_prompt_takes_its_time_at_most_in_whole_blocks(set_us: int, end: int) -> None:
    bench = Timed(prefill_chunk_us=set_us)
    bench.add(400, 1)
    assert spans(bench.step()) == [(0, 0, end)]


def test_a_step_that_is_long_enough_gets_no_further_prompt() -> None:
    """1 + 4.8 ms for the first; 4.2 ms are left, of which two blocks take 3.2; then 1 ms holds no block."""
    bench = Timed(step_time_max_us=10_000, prefill_chunk_us=4_800)
    for _ in range(3):
        bench.add(400, 1)
    assert spans(bench.step()) == [(0, 0, 48), (1, 0, 32)]
    assert bench.policy.left == [0, 1, 2] and bench.policy.refused == []


def test_when_decodes_fill_the_step_one_block_still_runs() -> None:
    bench = beside_a_stream(400, None, step_time_max_us=1)
    assert spans(bench.step()) == [(0, 1, 2), (1, 0, 16)]


def test_prompts_take_what_the_policy_leaves_beside_others() -> None:
    bench = beside_a_stream(200, 5_000)
    assert spans(bench.step()) == [(0, 1, 2), (1, 0, 48)]
    assert bench.policy.asked == [(1, {0: 1_500}, 1_500)], "the decode row, and the fixed part"
    assert bench.policy.times[-1] == StepTime(1_000 + 500 + 4_800, 1_500)


@pytest.mark.parametrize(("prompt", "prompt_us", "end"), [(200, 1_599, None), (200, 1_600, 16), (8, 1_599, 8)])
def test_when_less_than_a_row_is_left_there_is_none(prompt: int, prompt_us: int, end: int | None) -> None:
    """Less than a block is not worth a row, unless it is all that the prompt lacks."""
    bench = beside_a_stream(prompt, prompt_us)
    expected = [(0, 1, 2)] if end is None else [(0, 1, 2), (1, 0, end)]
    assert spans(bench.step()) == expected
    assert bench.policy.left == ([1] if end is None else []) and bench.policy.refused == []


def test_when_a_team_has_used_its_time_its_second_prompt_waits() -> None:
    bench = beside_a_stream(32, 5_000)
    bench.add(64, 5, team_id=1)
    assert spans(bench.step()) == [(0, 1, 2), (1, 0, 32), (2, 0, 16)], "3.2 ms for the first, 1.6 of 1.8 for the second"


def test_when_nobody_else_gets_a_token_there_is_no_limit() -> None:
    bench = Timed()
    bench.add(400, 1)
    bench.add(400, 1, team_id=1)
    bench.policy.prompt_us = 0
    assert spans(bench.step()) == [(0, 0, 96), (1, 0, 96)] and bench.policy.asked == []


def test_a_last_chunk_of_another_team_is_a_token_to_wait_for() -> None:
    bench = Timed()
    bench.add(16, 1)
    bench.add(400, 1, team_id=1)
    bench.policy.prompt_us = 1_700
    assert spans(bench.step()) == [(0, 0, 16), (1, 0, 16)]
    assert bench.policy.asked == [(1, {0: 2_600}, 2_600)]


def test_when_all_prompts_wait_for_what_cannot_run_they_run() -> None:
    """The row that was expected finds no slot in the policy's order; nothing else would run."""
    bench = beside_a_stream(200, 0)
    bench.policy.live.pop(0)  # the policy offers the stream no more
    timer = bench.scheduler._timer
    assert isinstance(timer, StepTimer)
    assert spans(bench.plan()) == [(1, 0, 96)] and timer.is_limited


def test_when_isolation_is_strict_decode_rows_are_bounded_too() -> None:
    """Team 1 has three streams and is left 1 ms: one row costs 0.5 and its part of the fixed time."""
    for isolation, expected in (("batch", [0, 1, 2, 3]), ("strict", [0, 1])):
        bench = Timed(isolation=isolation)
        bench.add(1, 50)
        for _ in range(3):
            bench.add(1, 50, team_id=1)
        bench.step()
        bench.policy.prompt_us = 1_000
        assert [row.seq_id for row in bench.step().rows] == expected
        assert bench.policy.left == ([] if isolation == "batch" else [1, 2, 3])
    assert bench.policy.times[-1] == StepTime(2_000, 2_000, {0: 1_500, 1: 1_500})
