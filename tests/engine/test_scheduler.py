"""Packing, one rule at a time, with a policy that ranks by arrival; the books are rechecked after each step."""

import pytest

from engine.config import EngineConfig
from engine.memory.starts import REFUSALS_BEFORE_RESERVATION
from engine.plan import StepPlan, StepResult
from engine.request import Request, Status
from engine.step.scheduler import ArrivalError, Scheduler
from engine.wire.messages import SamplingParams
from policies.sequences import Starving, TeamTerms
from tests.engine.support import UNIT_PROFILE, ArrivalOrder, Engine, submit


class Bench:
    """A scheduler driven step by step; tokens come from `token_ids` in turn, or are 65."""

    def __init__(self, blocks: int = 24, eos: tuple[int, ...] = (), **settings: int) -> None:
        self.policy = ArrivalOrder()
        config = EngineConfig(**{"block_size": 16, "max_batch_size": 4, **settings})  # type: ignore[arg-type]
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


def test_what_is_left_of_the_budget_is_used_and_the_next_chunk_is_aligned_again() -> None:
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


def test_a_sequence_starts_only_beside_the_maximum_of_all_started_ones() -> None:
    bench = Bench(blocks=4, block_size=4)
    bench.add(4, 4)
    bench.add(4, 5)
    bench.add(4, 4)
    assert [row.seq_id for row in bench.step().rows] == [0, 2], "3 blocks do not fit beside 2, though 3 are free"
    assert bench.policy.refused == [1]


@pytest.mark.case("K29", "C09")
def test_small_ones_pass_a_large_head_which_still_starts_within_a_bound() -> None:
    bench = Bench(blocks=4, block_size=4, max_batch_size=2)
    bench.add(4, 4)
    large = bench.add(4, 12)  # the whole pool
    started: dict[int, int] = {}
    step = 0
    while large not in started:
        if bench.scheduler.num_live < 4:
            bench.add(3, 5)
        for row in bench.step().rows:
            started.setdefault(row.seq_id, step)
        step += 1
    assert len(started) >= 5, "small ones that fit went on meanwhile"
    assert REFUSALS_BEFORE_RESERVATION < started[large] <= REFUSALS_BEFORE_RESERVATION + 5
    assert max(started.values()) == started[large], "nobody started in the room held for it"


@pytest.mark.case("O16")
def test_a_large_head_blocks_nobody_and_starts_in_time() -> None:
    """A small one comes in each step and holds a block for four: room for the head is never there by itself."""
    bench = Bench(blocks=8, block_size=4, max_batch_size=8)
    for _ in range(4):
        bench.add(1, 3)
        bench.step()
    large = bench.add(4, 28)  # the whole pool
    started: dict[int, int] = {}
    step = 0
    while large not in started and step < 100:
        small = bench.add(1, 3)
        for row in bench.step().rows:
            started.setdefault(row.seq_id, step)
        if step < REFUSALS_BEFORE_RESERVATION:
            assert started[small] == step, "it does not wait behind the head"
        step += 1
    assert REFUSALS_BEFORE_RESERVATION < started[large] <= REFUSALS_BEFORE_RESERVATION + 4


@pytest.mark.case("O17")
def test_two_large_ones_refused_for_long_do_not_deadlock() -> None:
    """Pool of 4 blocks, all taken for 31 steps; then one needs 3 and one 4."""
    bench = Bench(blocks=4, block_size=8)
    first, six, seven = bench.add(1, 31), bench.add(4, 20), bench.add(4, 28)
    ended: list[int] = []
    reserved: list[int | None] = [None]
    for _ in range(100):
        if bench.scheduler.num_live:
            plan = bench.plan()
            ended += [sequence.seq_id for sequence in bench.apply(plan).ended]
            if bench.scheduler.memory.reserved_for != reserved[-1]:
                reserved.append(bench.scheduler.memory.reserved_for)
    assert ended == [first, six, seven]
    assert reserved == [None, six, seven, None], "one after the other, and never both"


@pytest.mark.case("O17")
def test_there_is_one_reservation_and_it_goes_to_the_first_refused_more_than_sixteen_times() -> None:
    bench = Bench(blocks=8, block_size=4)
    bench.add(4, 24)  # 7 blocks
    large, larger = bench.add(4, 12), bench.add(4, 16)
    for _ in range(REFUSALS_BEFORE_RESERVATION):
        bench.step()
    assert bench.scheduler.memory.reserved_for is None
    bench.step()
    assert bench.scheduler.memory.reserved_for == large
    fits_free_but_not_beside = bench.add(1, 2)
    bench.step()
    assert bench.policy.refused == [large, larger, fits_free_but_not_beside]
    bench.scheduler.end(0, "abort", bench.now_us)
    plan = bench.step()
    assert [row.seq_id for row in plan.rows] == [large]
    assert bench.scheduler.memory.reserved_for == larger, "refused as often, and the next in order"


def test_when_a_sequence_ends_the_refused_ones_that_fit_are_told() -> None:
    """A policy that counts a team as unable to run does not try it again behind better levels unless it hears so."""
    heard: list[int] = []

    class Listening(ArrivalOrder):
        def fits_again(self, seq_id: int) -> None:
            super().fits_again(seq_id)  # not while it picks
            heard.append(seq_id)

    bench = Bench(blocks=4, block_size=4)
    bench.policy = bench.scheduler.policy = bench.scheduler.memory._policy = Listening()
    bench.policy.configure([TeamTerms(0), TeamTerms(1)], 0)
    first = bench.add(4, 8)  # 3 blocks
    large, larger = bench.add(4, 8, team_id=1), bench.add(4, 12, team_id=1)
    bench.step(), bench.step()
    assert bench.policy.refused == [large, larger] and heard == []
    bench.scheduler.end(first, "abort", bench.now_us)
    bench.plan()
    assert heard == [large], "the oldest of its team"


def test_when_many_steps_were_closed_a_newcomer_saw_none() -> None:
    bench = Bench(blocks=1, block_size=256)
    bench.add(1, 200)
    before = bench.add(1, 200)
    for _ in range(REFUSALS_BEFORE_RESERVATION + 4):
        bench.step()
    assert bench.scheduler.memory.reserved_for == before
    bench.scheduler.end(before, "abort", bench.now_us)
    newcomer = bench.add(1, 200)
    for _ in range(REFUSALS_BEFORE_RESERVATION):
        bench.step()
        assert bench.scheduler.memory.reserved_for is None
    bench.step()
    assert bench.scheduler.memory.reserved_for == newcomer


def test_when_a_step_closes_after_a_refusal_it_counts_once() -> None:
    """In each step the large one is refused by itself; then a small one takes the last block, and the step closes."""
    bench = Bench(blocks=2, block_size=64)
    bench.add(1, 60)
    large = bench.add(64, 4)
    for _ in range(REFUSALS_BEFORE_RESERVATION):
        small = bench.add(1, 1)
        assert [row.seq_id for row in bench.step().rows] == [0, small] and large in bench.policy.refused
        assert bench.scheduler.memory.reserved_for is None
    bench.add(1, 1)
    bench.step()
    assert bench.scheduler.memory.reserved_for == large


@pytest.mark.case("K44")
def test_an_aborted_holder_leaves_no_reservation() -> None:
    bench = Bench(blocks=8, block_size=4)
    bench.add(4, 24)
    large = bench.add(4, 12)
    for _ in range(REFUSALS_BEFORE_RESERVATION + 1):
        bench.step()
    small = bench.add(1, 2)
    bench.step()
    assert bench.policy.refused == [large, small] and bench.scheduler.memory.reserved_for == large
    bench.scheduler.end(large, "abort", bench.now_us)
    assert bench.scheduler.memory.reserved_for is None
    assert small in {row.seq_id for row in bench.step().rows}


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


def test_two_requests_of_sixty_percent_of_the_pool_each_run_one_after_the_other() -> None:
    def steps_of(num_requests: int) -> int:
        engine = Engine(blocks=10, block_size=4)
        for index in range(num_requests):
            engine.core.add(submit(f"r{index}", prompt=8, output=16))
        return len(engine.run())

    assert steps_of(2) <= 2 * steps_of(1)


def test_a_shortage_lasts_until_the_lags_are_back_and_is_told_for_the_whole_interval() -> None:
    bench = Bench(blocks=4)
    shortage = bench.scheduler.memory.take_shortage
    assert not shortage()
    bench.add(16, 32)
    bench.add(16, 32)
    bench.step()
    assert shortage(), "one was refused"
    assert not shortage(), "and none since"
    bench.policy.is_wide = True
    assert shortage(), "lags still lie in the wide band"
    bench.policy.is_wide = False
    assert shortage(), "they did when the interval began"
    assert not shortage()
