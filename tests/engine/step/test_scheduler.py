"""Packing, one rule at a time, with a policy that ranks by arrival; the books are rechecked after each step."""

import pytest

from engine.config import EngineConfig
from engine.plan import StepPlan, StepResult
from engine.request import Request, Status
from engine.step.scheduler import ArrivalError, Scheduler
from engine.wire.messages import SamplingParams
from policies.sequences import Starving, TeamTerms
from tests.support.engine.simple_engine import UNIT_PROFILE, ArrivalOrder


class Bench:
    """A scheduler driven step by step, where KV stays; tokens come from `token_ids` in turn, or are 65."""

    def __init__(self, blocks: int = 24, eos: tuple[int, ...] = (), **settings: int) -> None:
        self.policy = ArrivalOrder()
        defaults = {"block_size": 16, "max_batch_size": 4, "memory_preemption": "none"}
        config = EngineConfig(**{**defaults, **settings})  # type: ignore[arg-type]
        self.scheduler = Scheduler(config, self.policy, UNIT_PROFILE, blocks, eos_token_ids=eos)
        self.policy.configure([TeamTerms(0), TeamTerms(1)], 0)
        self.now_us = 0

    def add(self, prompt: int, output: int, *, team_id: int = 0, **sampling: object) -> int:
        params = SamplingParams(**{"max_tokens": output, **sampling})  # type: ignore[arg-type]
        request = Request(f"r{self.scheduler.num_live}", team_id, 0, tuple(range(prompt)), params, self.now_us)
        return self.scheduler.add(request, self.now_us).seq_id

    def plan(self) -> StepPlan:
        plan = self.scheduler.schedule(self.now_us)
        assert plan is not None
        return plan

    def apply(self, plan: StepPlan, tokens: dict[int, int] | None = None, failed: dict[int, str] | None = None):
        self.now_us += 1000
        chosen = {row.seq_id: (tokens or {}).get(row.seq_id, 65) for row in plan.rows if row.samples}
        outcome = self.scheduler.apply(plan, StepResult(plan.step_id, 1000, chosen, failed or {}), self.now_us)
        self.scheduler.check()
        return outcome

    def step(self, **kwargs: object) -> StepPlan:
        plan = self.plan()
        self.apply(plan, **kwargs)  # type: ignore[arg-type]
        return plan


def spans(plan: StepPlan) -> list[tuple[int, int, int]]:
    return [(row.seq_id, row.start, row.start + len(row.token_ids)) for row in plan.rows]


def test_chunks_end_at_absolute_multiples_and_decodes_share_the_step() -> None:
    bench = Bench(prefill_chunk_tokens=8)
    bench.add(3, 5)
    bench.add(20, 2)
    assert spans(bench.step()) == [(0, 0, 3), (1, 0, 8)]
    assert spans(bench.step()) == [(0, 3, 4), (1, 8, 16)]
    third = bench.step()
    assert spans(third) == [(0, 4, 5), (1, 16, 20)]
    assert [row.samples for row in third.rows] == [True, True]
    fourth = bench.step()
    assert spans(fourth) == [(0, 5, 6), (1, 20, 21)] and all(row.is_decode for row in fourth.rows)
    assert [row.token_ids for row in fourth.rows] == [(65,), (65,)]
    assert [row.num_generated for row in fourth.rows] == [3, 1]


@pytest.mark.case("O16")
def test_a_prompt_longer_than_the_token_budget_runs_in_several_steps() -> None:
    bench = Bench(max_batch_tokens=5, prefill_chunk_tokens=8)
    bench.add(20, 1)
    assert [spans(bench.step())[0][1:] for _ in range(5)] == [(0, 5), (5, 8), (8, 13), (13, 16), (16, 20)]
    assert bench.scheduler.num_live == 0


def test_the_budgets_rest_is_used_and_the_next_chunk_aligned() -> None:
    bench = Bench(max_batch_tokens=12, prefill_chunk_tokens=8)
    bench.add(16, 1)
    bench.add(16, 1)
    assert spans(bench.step()) == [(0, 0, 8), (1, 0, 4)]
    assert spans(bench.step()) == [(0, 8, 16), (1, 4, 8)]
    assert spans(bench.step()) == [(1, 8, 16)]


def test_slots_bound_the_rows_of_a_step() -> None:
    bench = Bench(max_batch_size=2)
    for _ in range(3):
        bench.add(1, 2)
    assert [row.seq_id for row in bench.step().rows] == [0, 1]
    assert bench.policy.refused == [], "a full step refuses nobody"


@pytest.mark.case("I2")
def test_rows_carry_blocks_for_all_their_tokens() -> None:
    bench = Bench(blocks=8, block_size=4, prefill_chunk_tokens=8)
    bench.add(9, 8)
    sizes = []
    while bench.scheduler.num_live:
        plan = bench.plan()
        (row,) = plan.rows
        sizes.append(len(row.block_table))
        assert len(row.block_table) * 4 >= row.start + len(row.token_ids)
        bench.apply(plan)
    assert sizes == [2, 3, 3, 3, 3, 4, 4, 4, 4], "blocks come as they are needed, none before"


def test_losing_the_slot_is_counted_and_keeps_the_blocks() -> None:
    bench = Bench(max_batch_size=1)

    class Alternating(ArrivalOrder):
        turn = 0

        def best(self) -> int | None:
            if self._tried:
                return None
            live = sorted(self.live)
            return live[self.turn % len(live)]

        def begin(self, now_us: int) -> list[Starving]:
            self.turn += 1
            return super().begin(now_us)

    alternating = Alternating()
    alternating.configure([TeamTerms(0)], 0)
    bench.policy = bench.scheduler.policy = alternating
    a, b = bench.add(4, 3), bench.add(4, 3)
    order = [bench.step().rows[0].seq_id for _ in range(2)]
    assert order == [b, a]
    sequences = bench.scheduler.sequences
    assert sequences[b].status is Status.PAUSED and sequences[a].status is Status.RUNNING
    assert sequences[b].num_preemptions == 1 and sequences[a].num_preemptions == 0
    assert len(sequences[b].memory.table.blocks) == 1
    bench.step()
    assert sequences[b].status is Status.RUNNING and sequences[a].num_preemptions == 1


def test_ending_by_itself_is_no_preemption() -> None:
    bench = Bench(max_batch_size=1)
    first = bench.scheduler.sequences[bench.add(1, 1)]
    bench.add(1, 1)
    bench.step()
    bench.step()
    assert first.is_finished and first.num_preemptions == 0


@pytest.mark.parametrize(
    ("sampling", "tokens", "reason", "output"),
    [
        ({}, [65, 2], "stop", 2),
        ({"ignore_eos": True}, [65, 2, 65, 65], "length", 4),
        ({"stop_token_ids": (70,)}, [70], "stop", 1),
        ({"stop_token_ids": (70,), "ignore_eos": True}, [2, 70], "stop", 2),
        ({"min_tokens": 3, "stop_token_ids": (70,)}, [2, 70, 2], "stop", 3),
        ({"min_tokens": 2}, [2, 65, 65, 65], "length", 4),
        ({}, [65, 65, 65, 2], "stop", 4),
    ],
)
def test_endings(sampling: dict[str, object], tokens: list[int], reason: str, output: int) -> None:
    bench = Bench(eos=(2, 3))
    sequence = bench.scheduler.sequences[bench.add(3, 4, **sampling)]
    for token in tokens:
        assert not sequence.is_finished
        bench.step(tokens={sequence.seq_id: token})
    assert sequence.finish_reason == reason and sequence.output_token_ids == tokens[:output]
    assert bench.scheduler.memory.device.num_free == 24


@pytest.mark.case("K35")
def test_a_failed_row_ends_alone_and_still_pays_for_its_step() -> None:
    bench = Bench()
    good, bad = bench.add(4, 3), bench.add(4, 3)
    bench.step()
    plan = bench.plan()
    outcome = bench.apply(plan, failed={bad: "out of memory"})
    (ended,) = outcome.ended
    assert ended.seq_id == bad and ended.finish_reason == "error" and ended.error == "out of memory"
    assert sum(bench.policy.charged_us.values()) == 2000, "two steps of 1000 us, all of it charged"
    assert bench.policy.charged_us[bad] > 500
    assert [row.seq_id for row in bench.step().rows] == [good]
    assert bench.scheduler.memory.device.num_owned == 0


def test_charges_of_a_step_sum_to_its_time_and_accumulate() -> None:
    bench = Bench()
    for prompt in (1, 7, 13):
        bench.add(prompt, 5)
    total = 0
    for _ in range(5):
        outcome = bench.apply(bench.plan())
        now = sum(event.device_us for event in outcome.events)
        assert now - total == 1000
        total = now


def test_ending_an_unknown_or_ended_sequence_is_nothing() -> None:
    bench = Bench()
    seq_id = bench.add(1, 1)
    assert bench.scheduler.end(99, "abort", 0) is None
    assert bench.scheduler.end(seq_id, "abort", 0) is not None
    assert bench.scheduler.end(seq_id, "abort", 0) is None
    assert bench.scheduler.schedule(0) is None


def test_arrivals_and_ends_in_an_open_step_are_bugs() -> None:
    bench = Bench()
    seq_id = bench.add(1, 2)
    plan = bench.plan()
    with pytest.raises(AssertionError, match="wait for the end"):
        bench.add(1, 1)
    with pytest.raises(AssertionError, match="while its step runs"):
        bench.scheduler.end(seq_id, "abort", 0)
    with pytest.raises(AssertionError, match="not been applied"):
        bench.plan()
    bench.apply(plan)
    with pytest.raises(AssertionError, match="not the open step"):
        bench.apply(plan)


def test_an_unknown_team_leaves_no_trace() -> None:
    bench = Bench()
    with pytest.raises(ArrivalError):
        bench.scheduler.add(Request("x", 7, 0, (1,), SamplingParams(), 0), 0)
    bench.scheduler.check()
    assert bench.scheduler.num_live == 0 and bench.scheduler.memory.num_waiting == 0


def test_a_request_that_fills_the_pool_alone_runs_to_its_end() -> None:
    bench = Bench(blocks=3, block_size=4, prefill_chunk_tokens=4)
    seq_id = bench.add(5, 7)
    sequence = bench.scheduler.sequences[seq_id]
    steps = 0
    while bench.scheduler.num_live:
        bench.step()
        steps += 1
    assert sequence.finish_reason == "length" and sequence.num_preemptions == 0 and steps == 2 + 6


def test_when_kv_cannot_be_taken_back_nobody_is_displaced() -> None:
    bench = Bench(blocks=16, block_size=4, prefill_chunk_tokens=8, max_batch_size=5)
    sequences = [bench.scheduler.sequences[bench.add(15, 4)] for _ in range(5)]
    while bench.scheduler.num_live:
        bench.step()
    assert all(s.finish_reason == "length" for s in sequences)
    assert sum(s.num_preemptions for s in sequences) == 0
