"""Scheduler, memory and planner together, one mechanism at a time; the books are rechecked after each step."""

import itertools
from collections.abc import Iterable

import pytest

from engine.config import EngineConfig
from engine.messages import SamplingParams, StepDone
from engine.plan import BlockCopy, StepPlan, StepResult
from engine.request import Request, Sequence, Status
from engine.scheduler import Scheduler, StepOutcome
from engine.sim.delayed import DelayedCopies
from engine.sim.runner import SimRunner
from engine.swap_planner import Move
from engine.swapping import COPY_DEADLINE_US, Copies
from policies.config import PolicyConfig
from policies.eg_mlfq import EgMlfq
from policies.sequences import TeamTerms
from tests.engine.support import UNIT_PROFILE, ArrivalOrder, Engine, submit, team

STEP_US = 1000


class Ranked(ArrivalOrder):
    """Ranks by a list that the test may change between steps; ENST is a second for each place."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[int] = []

    def rank(self) -> list[int]:
        return [*(i for i in self.order if i in self.live), *(i for i in sorted(self.live) if i not in self.order)]

    def best(self) -> int | None:
        return next((seq_id for seq_id in self.rank() if seq_id not in self._tried), None)

    def turns(self, seq_ids, slots, now_us):  # type: ignore[no-untyped-def]
        turns = {turn.seq_id: turn for turn in super().turns(seq_ids, 1, now_us)}
        rank = [seq_id for seq_id in self.rank() if seq_id in turns]
        return [type(turns[i])(i, place * 1_000_000) for place, i in enumerate(rank)]


class Bench:
    """A scheduler driven step by step; every copy is over at the end of its step unless it is held back."""

    def __init__(self, blocks: int = 6, host: int = 6, **settings: int | str) -> None:
        self.policy = Ranked()
        defaults: dict[str, int | str] = {"block_size": 4, "max_batch_size": 4, "swap_min_run_steps": 0}
        config = EngineConfig(**{**defaults, **settings})  # type: ignore[arg-type]
        self.scheduler = Scheduler(config, self.policy, UNIT_PROFILE, blocks, num_host_blocks=host, block_copy_us=10.0)
        self.scheduler.configure([TeamTerms(team_id) for team_id in range(3)], 0)
        self.now_us = 0
        self.held: list[int] = []  # copies to report with the next `apply`
        self.total_us = 0

    def add(self, prompt: int, output: int, team_id: int = 0) -> Sequence:
        params = SamplingParams(max_tokens=output)
        request = Request(f"r{self.scheduler.num_live}", team_id, 0, tuple(range(prompt)), params, self.now_us)
        return self.scheduler.add(request, self.now_us)

    def plan(self) -> StepPlan:
        plan = self.scheduler.schedule(self.now_us)
        assert plan is not None
        return plan

    def apply(
        self, plan: StepPlan, *, copy_us: int = 0, done: Iterable[int] | None = None, failed: Iterable[int] = ()
    ) -> StepOutcome:
        self.now_us += STEP_US
        self.total_us += STEP_US
        chosen = {row.seq_id: 65 for row in plan.rows if row.samples}
        copies = [copy.copy_id for copy in (*plan.copies_out, *plan.copies_in)]
        over = copies if done is None else list(done)
        result = StepResult(
            plan.step_id, STEP_US, chosen, copies_done=over, copy_us=copy_us, copies_failed=tuple(failed)
        )
        outcome = self.scheduler.apply(plan, result, self.now_us)
        self.scheduler.check()
        return outcome

    def step(self, **kwargs: object) -> StepPlan:
        plan = self.plan()
        self.apply(plan, **kwargs)  # type: ignore[arg-type]
        return plan

    def until(self, sequence: Sequence, status: Status) -> StepPlan:
        """Step until `sequence` has the status in an applied step; the plan that did it."""
        for _ in range(200):
            plan = self.step()
            if sequence.status is status:
                return plan
        raise AssertionError(f"{sequence.seq_id} never became {status}")


def ran(plan: StepPlan) -> list[int]:
    return [row.seq_id for row in plan.rows]


def copied(copies: tuple[BlockCopy, ...]) -> list[tuple[int, int]]:
    return [(copy.seq_id, len(copy.pairs)) for copy in copies]


def test_more_start_than_the_device_would_hold_to_their_ends() -> None:
    """3 + 1 blocks for now each, 6 and 6 there are: two start, where 8 blocks to their ends would let one."""
    bench = Bench(blocks=9, host=0)
    bench.add(8, 20), bench.add(8, 20)
    assert ran(bench.step()) == [0], "without a host pool nothing can be taken back"
    bench = Bench(blocks=9, host=3)
    assert [bench.add(8, 20).num_claim for _ in range(3)] == [3, 3, 3]
    assert ran(bench.step()) == [0, 1, 2]
    assert bench.scheduler.memory_preemption == "proactive"


def test_a_newcomer_waits_when_device_and_host_together_are_claimed() -> None:
    bench = Bench(blocks=6, host=2, max_batch_size=8)
    for _ in range(3):
        bench.add(4, 20)  # claims 2
    assert ran(bench.step()) == [0, 1, 2]
    bench.add(8, 4)
    assert ran(bench.step()) == [0, 1, 2], "5th block each now, and 9 + 3 > 8"


def test_half_prefilled_prompts_fit_the_device_together() -> None:
    bench = Bench(blocks=8, host=50, prefill_chunk_tokens=4)
    bench.add(20, 4), bench.add(16, 4)
    assert ran(bench.step()) == [0], "5 and 4 blocks of prompt"
    for _ in range(4):
        bench.step()
    assert bench.scheduler.sequences[0].output_token_ids
    bench.policy.order = [1, 0]
    plan = bench.until(bench.scheduler.sequences[1], Status.RUNNING)
    assert 1 in ran(plan)


@pytest.mark.case("K01")
def test_growth_takes_the_blocks_of_who_ranks_behind_and_its_newest_block_was_written_before() -> None:
    bench = Bench(blocks=6, host=6, max_batch_size=2, memory_preemption="reactive")
    first, second = bench.add(8, 12), bench.add(8, 12)
    assert ran(bench.step()) == [0, 1]
    while bench.scheduler.pool.num_free:
        bench.step()
    plan = bench.plan()
    while not plan.copies_out:
        written = {row.seq_id: row.start + len(row.token_ids) for row in plan.rows}
        bench.apply(plan)
        plan = bench.plan()
    assert copied(plan.copies_out) == [(1, 3)] and ran(plan) == [], "the step before found no block for the first"
    assert second.num_computed == written[1] and second.status is Status.SWAPPING_OUT
    assert second.num_swaps == 1 and second.num_preemptions == 1
    bench.apply(plan)
    assert second.status is Status.SWAPPED
    assert ran(bench.step()) == [0] and first.status is Status.RUNNING


def swapped_pair(**settings: int | str) -> tuple[Bench, Sequence, Sequence]:
    """Two of 8 + 12 tokens on 6 blocks: the second was moved out for the first, and the copy is over."""
    bench = Bench(**{"blocks": 6, "host": 6, "max_batch_size": 2, **settings})  # type: ignore[arg-type]
    first, second = bench.add(8, 12), bench.add(8, 12, team_id=1)
    bench.until(second, Status.SWAPPED)
    return bench, first, second


@pytest.mark.case("I2")
def test_what_is_away_or_moving_is_in_no_plan() -> None:
    bench, first, second = swapped_pair()
    for _ in range(40):
        plan = bench.plan()
        moving = {copy.seq_id for copy in (*plan.copies_out, *plan.copies_in)}
        assert not moving & set(ran(plan))
        for row in plan.rows:
            assert len(row.block_table) * 4 >= row.start + len(row.token_ids)
        away = {s.seq_id for s in bench.scheduler.sequences.values() if s.status not in (Status.RUNNING, Status.PAUSED)}
        assert not away & set(ran(plan))
        bench.apply(plan)
        if not bench.scheduler.num_live:
            break
    assert first.finish_reason == second.finish_reason == "length"
    assert second.num_swaps >= 1 and second.num_recomputes == 0
    assert len(first.output_token_ids) == len(second.output_token_ids) == 12


def test_it_comes_back_when_there_is_room_and_goes_on_where_it_was() -> None:
    bench, first, second = swapped_pair()
    at = second.num_computed
    plan = bench.plan()
    while not plan.copies_in:
        bench.apply(plan)
        plan = bench.plan()
    assert copied(plan.copies_in) == [(1, 3)] and second.status is Status.SWAPPING_IN
    assert first.is_finished, "there was no room before"
    bench.apply(plan)
    assert second.status is Status.PAUSED
    (row,) = bench.step().rows
    assert row.seq_id == 1 and row.start == at and row.is_decode


@pytest.mark.case("K05", "I15")
@pytest.mark.parametrize("is_out", [True, False])
def test_ended_in_flight_its_blocks_are_given_to_nobody_until_the_copy_is_over(is_out: bool) -> None:
    bench, first, second = swapped_pair()
    if is_out:
        bench = Bench(blocks=6, host=6, max_batch_size=2)
        first, second = bench.add(8, 12), bench.add(8, 12, team_id=1)
    plan = bench.plan()
    while not (plan.copies_out if is_out else plan.copies_in):
        bench.apply(plan)
        plan = bench.plan()
    (copy,) = plan.copies_out if is_out else plan.copies_in
    bench.apply(plan, done=())
    assert bench.scheduler.end(second.seq_id, "abort", bench.now_us) is second and second.is_finished
    bench.scheduler.check()
    busy = {pair[0 if is_out else 1] for pair in copy.pairs}
    bench.add(20, 4, team_id=2)
    for _ in range(3):
        plan = bench.plan()
        assert not busy & {block for row in plan.rows for block in row.block_table}
        bench.apply(plan, done=())
    bench.step(done=[copy.copy_id])
    bench.scheduler.end(first.seq_id, "abort", bench.now_us)
    bench.until(bench.scheduler.sequences[2], Status.FINISHED)
    memory = bench.scheduler.memory
    assert memory.device.num_free == 6 and memory.host.num_free == 6


def test_with_only_copies_in_flight_the_plan_is_to_wait() -> None:
    bench, first, second = swapped_pair()
    bench.scheduler.end(first.seq_id, "abort", bench.now_us)
    plan = bench.plan()
    assert copied(plan.copies_in) == [(1, 3)] and plan.rows == ()
    bench.apply(plan, done=())
    waiting = bench.plan()
    assert waiting == StepPlan(waiting.step_id, ())
    bench.apply(waiting, done=[plan.copies_in[0].copy_id])
    assert ran(bench.step()) == [1]
    assert second.device_us + first.device_us + sum(bench.scheduler.bills.carried_us.values()) == bench.total_us


def test_copies_of_ended_sequences_are_work_and_then_there_is_none() -> None:
    bench, first, second = swapped_pair()
    bench.scheduler.end(first.seq_id, "abort", bench.now_us)
    plan = bench.plan()
    bench.apply(plan, done=())
    bench.scheduler.end(second.seq_id, "abort", bench.now_us)
    assert bench.scheduler.num_live == 0 and bench.scheduler.has_work
    bench.step(done=[plan.copies_in[0].copy_id])
    assert not bench.scheduler.has_work and bench.scheduler.schedule(bench.now_us) is None


def dropped_pair() -> tuple[Bench, Sequence, Sequence]:
    """As `swapped_pair`, but the host is too small for the second, so its KV is dropped."""
    bench = Bench(blocks=6, host=2, max_batch_size=2, prefill_chunk_tokens=8)
    first, second = bench.add(8, 12), bench.add(8, 12, team_id=1)
    bench.until(second, Status.DROPPED)
    return bench, first, second


def test_with_a_full_host_kv_is_dropped_and_computed_again_without_a_token() -> None:
    bench, first, second = dropped_pair()
    at, output = second.replay_to, list(second.output_token_ids)
    assert second.num_computed == 0 and at == 8 + len(output) - 1 and second.num_recomputes == 1
    assert bench.scheduler.num_dropped == 1 and second.table.blocks == []
    plan = bench.plan()
    while 1 not in ran(plan):
        bench.apply(plan)
        plan = bench.plan()
    replays = []
    while True:
        row = next(row for row in plan.rows if row.seq_id == 1)
        if row.is_decode:
            break
        assert not row.samples and row.num_generated == len(output)
        replays.append((row.start, tuple(row.token_ids)))
        bench.apply(plan)
        plan = bench.plan()
    whole = (*second.request.prompt_token_ids, *output)[:at]
    assert replays == [(0, whole[:8]), (8, whole[8:])], "chunks end where chunks end"
    assert row.start == at and row.token_ids == (output[-1],)
    bench.apply(plan)
    bench.until(second, Status.FINISHED)
    assert len(second.output_token_ids) == 12 and first.finish_reason == "length"


def test_a_replay_costs_its_victim_nothing_and_its_causer_all_of_it() -> None:
    bench, first, second = dropped_pair()
    work_us, device_us, overhead_us = second.work_us, second.device_us, first.overhead_us
    plan = bench.plan()
    while 1 not in ran(plan):
        bench.apply(plan)
        plan = bench.plan()
    bench.apply(plan)
    assert (second.work_us, second.device_us, second.overhead_us) == (work_us, device_us, 0)
    counts = bench.scheduler.bills.take_counts()[0, 1]
    assert counts.recomputes == 1 and counts.billed_us > 0 and bench.scheduler.bills.replayed_tokens == 8
    assert first.is_finished and first.overhead_us == overhead_us, "it has ended, so its team carries it"
    assert bench.scheduler.bills.carried_us == {0: counts.billed_us} == bench.policy.overhead_us
    late = bench.add(1, 1)
    bench.until(late, Status.FINISHED)
    assert late.overhead_us >= counts.billed_us and bench.scheduler.bills.carried_us == {}


def test_copy_time_is_billed_by_blocks_to_who_made_room_and_on_the_way_back_too() -> None:
    bench = Bench(blocks=6, host=6, max_batch_size=2)
    first, second = bench.add(8, 12), bench.add(8, 12, team_id=1)
    plan = bench.plan()
    while not plan.copies_out:
        bench.apply(plan)
        plan = bench.plan()
    before_us = first.device_us
    outcome = bench.apply(plan, copy_us=300)
    assert plan.rows == () and first.device_us == before_us + STEP_US, "nothing ran: all of it was the copy's"
    assert [(event.request_id, event.token_ids) for event in outcome.events] == [("r0", ())]
    assert first.overhead_us == STEP_US and second.overhead_us == 0
    while not plan.copies_in:
        device_us = {s.seq_id: s.device_us for s in (first, second)}
        plan = bench.plan()
        copy_us = 400 if plan.copies_in else 0
        bench.apply(plan, copy_us=copy_us)
    assert second.device_us == device_us[1], "the way back is not its bill"
    assert bench.scheduler.bills.stall_us == STEP_US + (400 if plan.rows else STEP_US)
    counts = bench.scheduler.bills.take_counts()
    assert counts[0, 1].swaps_out == counts[0, 1].swaps_in == 1
    assert counts[0, 1].blocks_out == counts[0, 1].blocks_in == 3
    while bench.scheduler.num_live:
        bench.step()
    carried_us = sum(bench.scheduler.bills.carried_us.values())
    assert first.device_us + second.device_us + carried_us == bench.total_us
    assert sum(bench.policy.charged_us.values()) + sum(bench.policy.overhead_us.values()) == bench.total_us


def test_a_lost_slot_is_put_on_who_gained_one() -> None:
    bench = Bench(blocks=20, max_batch_size=1)
    one = bench.add(1, 9)
    bench.step()
    other = bench.add(1, 9, team_id=2)
    bench.policy.order = [1, 0]
    bench.step()
    assert one.num_preemptions == 1 and other.num_preemptions == 0
    assert {pair: counts.preemptions for pair, counts in bench.scheduler.bills.take_counts().items()} == {(2, 0): 1}


@pytest.mark.case("K09")
def test_a_copy_that_is_given_up_is_computed_again() -> None:
    for is_out in (True, False):
        bench, first, second = swapped_pair()
        if is_out:
            bench = Bench(blocks=6, host=6, max_batch_size=2)
            first, second = bench.add(8, 12), bench.add(8, 12, team_id=1)
        plan = bench.plan()
        while not (plan.copies_out if is_out else plan.copies_in):
            bench.apply(plan)
            plan = bench.plan()
        (copy,) = plan.copies_out if is_out else plan.copies_in
        bench.apply(plan, done=())
        bench.step(done=(), failed=[copy.copy_id])
        assert second.status in (Status.DROPPED, Status.RUNNING) and second.num_recomputes == 1
        while bench.scheduler.num_live:
            bench.step()
        assert second.finish_reason == first.finish_reason == "length" and len(second.output_token_ids) == 12
        assert bench.scheduler.memory.device.num_free == bench.scheduler.memory.host.num_free == 6


def half_prompts(device: int, prompts: tuple[int, ...]) -> tuple[Bench, Sequence, list[Sequence]]:
    """A decoding sequence, and others that have two chunks of their prompts; one slot, which the first takes from now
    on, growing into the others' blocks.
    """
    bench = Bench(blocks=device, host=20, max_batch_size=1, prefill_chunk_tokens=4, swap_benefit=1000)
    grower = bench.add(4, 4 * device - 4)
    half = []
    for prompt in prompts:
        half.append(bench.add(prompt, 4, team_id=1))
        bench.policy.order = [half[-1].seq_id]
        bench.step(), bench.step()
    bench.policy.order = [grower.seq_id]
    return bench, grower, half


@pytest.mark.case("K09")
def test_a_replay_whose_copy_is_given_up_begins_again_and_ends_where_it_was() -> None:
    bench, _first, second = dropped_pair()
    at = second.replay_to
    while second.num_computed != 8:
        bench.step()
    copies, swaps = Copies(), bench.scheduler._swaps
    assert swaps is not None and second.is_half
    second.move_to(Status.PAUSED)
    swaps._carry_out([Move("out", second.seq_id, 0)], copies, bench.scheduler.num_steps)
    bench.step(done=(), failed=[copies.out[0].copy_id])
    assert (second.status, second.num_computed, second.replay_to) == (Status.DROPPED, 0, at)
    starts = []
    while bench.scheduler.num_live:
        starts += [(row.start, row.samples) for row in bench.step().rows if row.seq_id == second.seq_id]
    assert starts[:3] == [(0, False), (8, False), (at, True)] and len(second.output_token_ids) == 12


def test_the_planner_is_shown_what_a_move_would_copy() -> None:
    bench, _first, second = swapped_pair()
    bench.until(second, Status.PAUSED)
    swaps = bench.scheduler._swaps
    assert swaps is not None

    def view() -> tuple[int, int, int, int]:
        (one,), away = swaps.view.sequences((), bench.scheduler.num_steps)
        assert away == [] and one.seq_id == second.seq_id
        return one.num_blocks, one.num_dirty, one.num_host, one.num_spare

    held = len(second.table.blocks)
    assert second.num_computed == 12 and view() == (4, 0, 3, 1), "a block more for its next token"
    bench.step()
    assert view() == (held, 1, 3, 0), "full blocks stay clean, the new one is not on the host"
    bench.step()
    assert view() == (held, 1, 3, 0)


@pytest.mark.case("K09")
@pytest.mark.parametrize("is_out", [True, False])
def test_a_copy_nobody_hears_of_again_ends_its_sequence_and_holds_up_nobody(is_out: bool) -> None:
    bench, first, second = swapped_pair()
    if is_out:
        bench = Bench(blocks=6, host=6, max_batch_size=2)
        first, second = bench.add(8, 12), bench.add(8, 12, team_id=1)
    plan = bench.plan()
    while not (plan.copies_out if is_out else plan.copies_in):
        bench.apply(plan)
        plan = bench.plan()
    (copy,) = plan.copies_out if is_out else plan.copies_in
    bench.apply(plan, done=())
    if not is_out:
        assert bench.step(done=()).rows == (), "there is nothing to do but to wait"
    bench.now_us += COPY_DEADLINE_US - 2 * STEP_US
    assert bench.scheduler.expire(bench.now_us - STEP_US) == []
    bench.now_us += 2 * STEP_US
    assert second in bench.scheduler.expire(bench.now_us)
    assert second.finish_reason == "error" and "lost" in second.error
    assert first.finish_reason == ("error" if is_out else "length"), "3 blocks are left, and it needs 5"
    assert bench.scheduler.tokens_max == 12
    small = bench.add(4, 4)
    while bench.scheduler.num_live:
        plan = bench.step(done=())
        assert not {p[0 if is_out else 1] for p in copy.pairs} & {b for row in plan.rows for b in row.block_table}
    assert small.finish_reason == "length"
    assert not bench.scheduler.has_work and bench.scheduler.schedule(bench.now_us) is None, "nobody waits for it"


@pytest.mark.case("K10")
@pytest.mark.parametrize("is_aborted", [True, False])
def test_half_a_prompt_is_stored_up_to_what_was_computed(is_aborted: bool) -> None:
    bench, grower, (half,) = half_prompts(6, (16,))
    plan = bench.plan()
    while not plan.copies_out:
        bench.apply(plan)
        plan = bench.plan()
    assert copied(plan.copies_out) == [(half.seq_id, 2)] and half.num_computed == 8
    bench.apply(plan, done=())
    if is_aborted:
        bench.scheduler.end(half.seq_id, "abort", bench.now_us)
    bench.step(done=[plan.copies_out[0].copy_id])
    starts = []
    while bench.scheduler.num_live:
        starts += [row.start for row in bench.step().rows if row.seq_id == half.seq_id]
    assert starts == ([] if is_aborted else [8, 12, 16, 17, 18]), "it goes on where it was"
    assert half.num_recomputes == 0 and grower.finish_reason == "length"
    assert bench.scheduler.memory.device.num_free == 6 and bench.scheduler.memory.host.num_free == 20


@pytest.mark.case("K25")
def test_two_half_prompts_on_the_host_come_back_with_room_for_the_whole_of_them() -> None:
    bench, grower, half = half_prompts(9, (16, 16))
    bench.until(half[0], Status.SWAPPED)
    assert half[1].status is Status.SWAPPED and half[0].is_half and half[1].is_half
    blocker = bench.add(12, 24, team_id=2)  # 9 blocks in the end
    bench.policy.order = [grower.seq_id, blocker.seq_id]
    while bench.scheduler.num_live:
        bench.step()
        back = [one for one in half if one.status in (Status.PAUSED, Status.RUNNING) and one.is_half]
        assert len(back) * 4 <= 9
    assert {s.finish_reason for s in (grower, blocker, *half)} == {"length"}
    assert not any(s.num_recomputes for s in half)


@pytest.mark.case("O17")
def test_two_large_ones_refused_for_long_do_not_deadlock_either_with_swapping() -> None:
    """Pool of 4 blocks; D needs 3, B needs 4; both are refused past 16 while small ones hold the pool."""
    for host in (1, 8):
        bench = Bench(blocks=4, host=host, max_batch_size=8)
        holders = [bench.add(4, 12), bench.add(4, 12)]
        bench.step()
        large = [bench.add(8, 4), bench.add(12, 4)]
        reserved: set[int | None] = set()
        for _ in range(300):
            if not bench.scheduler.num_live:
                break
            bench.step()
            reserved.add(bench.scheduler.reserved_for)
        assert all(s.finish_reason == "length" for s in (*holders, *large)), host


def test_a_swapped_one_refused_more_than_sixteen_times_holds_the_reservation() -> None:
    bench, first, second = swapped_pair(max_batch_size=4, host=30)
    bench.policy.order = [first.seq_id]
    held: list[int] = []
    for index in range(100):
        if index % 2 == 0:  # one always ends before the last has: the room for 3 blocks is never there by itself
            bench.policy.order.append(bench.add(4, 7, team_id=2).seq_id)
        bench.step()
        if bench.scheduler.reserved_for == second.seq_id:
            held.append(index)
        if second.status is not Status.SWAPPED:
            break
    assert held and second.status is Status.PAUSED and second.num_swaps == 1


class Watch:
    """What a runner sees of the copies in flight, plan by plan: no block is used twice."""

    def __init__(self) -> None:
        self.num_waits = self.num_overlaps = 0

    def __call__(self, plan: StepPlan, in_flight: dict[int, BlockCopy]) -> None:
        moving = {copy.seq_id for copy in in_flight.values()}
        new = {copy.seq_id for copy in (*plan.copies_out, *plan.copies_in)}
        rows = {row.seq_id for row in plan.rows}
        assert not (rows & moving or rows & new or moving & new), "one thing at a time with one sequence"
        self.num_waits += not (rows or new)
        self.num_overlaps += bool(rows and moving)


def test_the_core_runs_plans_without_rows_and_its_messages_say_where_kv_is() -> None:
    engine = Engine(blocks=6, host_blocks=6, block_copy_us=100.0, block_size=4, max_batch_size=2)
    for name in ("a", "b"):
        engine.core.add(submit(name, prompt=8, output=12))
    done = engine.run()
    assert any(message.num_running == 0 and message.duration_us == 300 for message in done), "only the copy of 3"
    assert {message.num_swapped for message in done} == {0, 1}
    assert any(message.num_free_host_blocks == 3 for message in done)
    ended = {finished.request_id: finished for message in done for finished in message.finished}
    assert ended["b"].num_swaps >= 1 and ended["a"].num_swaps == 0
    assert ended["a"].overhead_us == ended["b"].overhead_us == 300, (
        "the way out; the way back, when the first had ended"
    )
    assert sum(f.device_us for f in ended.values()) == sum(message.duration_us for message in done)
    assert ended["b"].work_us == ended["a"].work_us == 8 * 10 + 11 * 1000
    assert ended["b"].longest_pause_us > ended["a"].longest_pause_us


@pytest.mark.case("K07")
@pytest.mark.parametrize("seed", range(4))
def test_fifty_aborts_in_flight_leave_every_block_free(seed: int) -> None:
    engine = Engine(blocks=12, host_blocks=40, block_size=4, max_batch_size=4)
    watch = Watch()
    runner = DelayedCopies(SimRunner(UNIT_PROFILE, engine.clock), seed, max_delay=4, on_plan=watch)
    engine.core._runner = runner
    num_aborted = 0
    done: list[StepDone] = []
    for index in range(130):
        engine.core.add(submit(f"r{index}", team_id=index % 4, prompt=5 + index % 7, output=14))
        for _ in range(3):
            done += [message for message in [engine.core.step()] if message is not None]
            engine.scheduler.check()
            for copy in list(runner.in_flight.values()):
                sequence = engine.scheduler.sequences.get(copy.seq_id)
                if sequence is not None and num_aborted < 50:
                    engine.core.abort(sequence.request.request_id)
                    num_aborted += 1
    done += engine.run()
    assert num_aborted == 50 and watch.num_overlaps > 0
    assert sum(finished.reason == "abort" for message in done for finished in message.finished) == 50
    assert engine.scheduler.memory.device.num_free == 12 and engine.scheduler.memory.host.num_free == 40


def test_one_that_cannot_run_makes_no_plan_and_no_busy_loop() -> None:
    bench, first, second = swapped_pair()
    for sequence in (first, second):
        bench.scheduler.end(sequence.seq_id, "abort", bench.now_us)
    assert bench.scheduler.schedule(bench.now_us) is None and not bench.scheduler.has_work


@pytest.mark.case("O17b")
@pytest.mark.parametrize("mode", ["none", "proactive"])
def test_a_team_that_never_fits_opens_the_gate_for_nobody(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """B=1, Theta=0, K=1: F's only request is refused every time. B runs from 0; A comes at 300. B and A then share."""
    policy = EgMlfq(PolicyConfig(levels=1, theta_us=0, promotion_percent=0, step_cost_max_us=1000, coast=False))
    engine = Engine(
        blocks=1000,
        host_blocks=1000,
        policy=policy,
        max_batch_size=1,
        context_len=4096,
        teams=tuple(team(i) for i in range(3)),
        memory_preemption=mode,
    )
    entry = engine.scheduler._entry
    fits = entry.fits
    monkeypatch.setattr(entry, "fits", lambda s, free: s.request.team_id != 0 and fits(s, free))
    monkeypatch.setattr(entry, "_reserve_for", lambda policy, sequence: None)
    engine.core.add(submit("f", team_id=0, output=4))
    engine.core.add(submit("b", team_id=1, output=900))
    ran_at: list[int] = []
    for index in range(700):
        if index == 300:
            engine.core.add(submit("a", team_id=2, output=900))
        message = engine.core.step()
        assert message is not None
        if any(event.request_id == "b" and event.token_ids for event in message.tokens):
            ran_at.append(index)
    after = [index for index in ran_at if index >= 303]  # A's prompt is one short step
    assert max(later - earlier for earlier, later in itertools.pairwise(after)) <= 2 and len(after) >= 198
