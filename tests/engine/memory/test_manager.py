"""The memory's one door with scheduler and planner, one mechanism at a time; the books are rechecked each step."""

import itertools

import pytest

from engine.memory.mover import AWAY_TRIED, Mover
from engine.memory.moves import Copies, Move
from engine.memory.starts import REFUSALS_BEFORE_RESERVATION
from engine.plan import StepPlan
from engine.request import Status
from policies.config import PolicyConfig
from policies.cost import StepProfile
from policies.eg_mlfq import EgMlfq
from tests.support.engine.simple_engine import Engine, submit, team
from tests.support.engine.swap_bench import Bench, copied, dropped_pair, half_prompts, ran, swapped_pair


def test_more_start_than_the_device_would_hold_to_their_ends() -> None:
    """3 + 1 blocks for now each, 6 and 6 there are: two start, where 8 blocks to their ends would let one."""
    bench = Bench(blocks=9, host=3, memory_preemption="none")
    bench.add(8, 20), bench.add(8, 20)
    assert ran(bench.step()) == [0], "nothing can be taken back"
    bench = Bench(blocks=9, host=3)
    assert [bench.add(8, 20).memory.num_claim for _ in range(3)] == [3, 3, 3]
    assert ran(bench.step()) == [0, 1, 2]
    assert bench.scheduler.memory.mode == "proactive"


@pytest.mark.parametrize("mode", ["proactive", "reactive", "recompute"])
def test_when_there_is_no_host_pool_kv_is_computed_again(mode: str) -> None:
    bench = Bench(blocks=9, host=0, memory_preemption=mode)
    sequences = [bench.add(8, 20), bench.add(8, 20)]
    assert bench.scheduler.memory.mode == "recompute"
    while bench.scheduler.num_live:
        assert bench.step().copies_out == ()
    assert [one.finish_reason for one in sequences] == ["length", "length"]
    assert sum(one.memory.num_recomputes for one in sequences) > 0


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
def test_growth_takes_the_blocks_of_who_ranks_behind_newest_block() -> None:
    bench = Bench(blocks=6, host=6, max_batch_size=2, memory_preemption="reactive")
    first, second = bench.add(8, 12), bench.add(8, 12)
    assert ran(bench.step()) == [0, 1]
    while bench.scheduler.memory.device.num_free:
        bench.step()
    plan = bench.plan()
    while not plan.copies_out:
        written = {row.seq_id: row.start + len(row.token_ids) for row in plan.rows}
        bench.apply(plan)
        plan = bench.plan()
    assert copied(plan.copies_out) == [(1, 3)] and ran(plan) == [], "the step before found no block for the first"
    assert second.num_computed == written[1] and second.status is Status.SWAPPING_OUT
    assert second.memory.num_swaps == 1 and second.num_preemptions == 1
    bench.apply(plan)
    assert second.status is Status.SWAPPED
    assert ran(bench.step()) == [0] and first.status is Status.RUNNING


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
    assert second.memory.num_swaps >= 1 and second.memory.num_recomputes == 0
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


@pytest.mark.case("K26")
def test_when_the_slot_is_taken_a_finished_load_still_lands() -> None:
    """One slot. A load is over while newcomers of a better rank hold the slot; it is noticed at once, and the sequence
    runs as soon as the slot is free, without another load.
    """
    bench = Bench(blocks=8, host=8, max_batch_size=1)
    grower, loaded = bench.add(8, 24), bench.add(8, 12, team_id=1)
    for sequence in (grower, loaded):
        bench.policy.order = [sequence.seq_id]
        assert ran(bench.step()) == [sequence.seq_id]
    bench.policy.order = [grower.seq_id]
    bench.until(loaded, Status.SWAPPED)
    bench.scheduler.end(grower.seq_id, "abort", bench.now_us)
    plan = bench.plan()
    assert plan.rows == () and copied(plan.copies_in) == [(loaded.seq_id, 2)]
    bench.apply(plan, done=())
    newcomers = [bench.add(4, 4) for _ in range(2)]
    bench.policy.order = [one.seq_id for one in newcomers]
    assert ran(bench.step(done=())) == [newcomers[0].seq_id] and loaded.status is Status.SWAPPING_IN
    assert ran(bench.step(done=[copy.copy_id for copy in plan.copies_in])) == [newcomers[0].seq_id]
    assert loaded.status is Status.PAUSED and bench.scheduler.memory.num_away == 0
    order = []
    while bench.scheduler.num_live:
        plan = bench.step()
        assert plan.copies_in == plan.copies_out == ()
        order += ran(plan)
    assert order == [newcomers[0].seq_id] * 2 + [newcomers[1].seq_id] * 4 + [loaded.seq_id] * 11
    assert loaded.finish_reason == "length" and loaded.memory.num_swaps == 1


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
    carried_us = sum(bench.scheduler.memory.bills.carried_us.values())
    assert second.bill.device_us + first.bill.device_us + carried_us == bench.total_us


def test_when_the_host_is_full_kv_is_dropped_and_computed_again() -> None:
    bench, first, second = dropped_pair()
    at, output = second.memory.replay_to, list(second.output_token_ids)
    assert second.num_computed == 0 and at == 8 + len(output) - 1 and second.memory.num_recomputes == 1
    assert bench.scheduler.memory.num_dropped == 1 and second.memory.table.blocks == []
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


@pytest.mark.case("K25")
def test_two_half_prompts_come_back_with_room_for_the_whole() -> None:
    bench, grower, half = half_prompts(9, (16, 16))
    bench.until(half[0], Status.SWAPPED)
    assert half[1].status is Status.SWAPPED and half[0].is_half and half[1].is_half
    blocker = bench.add(12, 24, team_id=3)  # 9 blocks in the end
    bench.policy.order = [grower.seq_id, blocker.seq_id]
    num_back = 0
    while bench.scheduler.num_live:
        plan = bench.step()
        back = [one for one in half if one.status in (Status.PAUSED, Status.RUNNING) and one.is_half]
        assert all(len(one.memory.table.blocks) == 4 for one in back), "its blocks are copied, and four kept for it"
        num_back += len(plan.copies_in)
    assert num_back >= 2
    assert {s.finish_reason for s in (grower, blocker, *half)} == {"length"}
    assert not any(s.memory.num_recomputes for s in half)


@pytest.mark.case("O17")
def test_with_swapping_two_large_refused_ones_do_not_deadlock() -> None:
    """Pool of 4 blocks; D needs 3, B needs 4; both are refused past 16 while small ones hold the pool."""
    for host in (1, 8):
        bench = Bench(blocks=4, host=host, max_batch_size=8)
        holders = [bench.add(4, 12), bench.add(4, 12)]
        bench.step()
        large = [bench.add(8, 4), bench.add(12, 4, team_id=1)]
        reserved: list[int | None] = [None]
        for _ in range(300):
            if not bench.scheduler.num_live:
                break
            bench.step()
            if bench.scheduler.memory.reserved_for != reserved[-1]:
                reserved.append(bench.scheduler.memory.reserved_for)
        assert reserved == [None, large[0].seq_id, large[1].seq_id, None], "one after the other, and never both"
        assert all(s.finish_reason == "length" for s in (*holders, *large)), host


def test_a_swapped_one_refused_often_holds_the_reservation() -> None:
    bench, first, second = swapped_pair(max_batch_size=4, host=30)
    bench.policy.order = [first.seq_id]
    held: list[int] = []
    for index in range(100):
        if index % 2 == 0:  # one always ends before the last has: the room for 3 blocks is never there by itself
            bench.policy.order.append(bench.add(4, 7, team_id=2).seq_id)
        plan = bench.plan()
        if second.status is Status.SWAPPING_IN:
            break
        bench.apply(plan)
        if bench.scheduler.memory.reserved_for == second.seq_id:
            held.append(index)
    assert held and copied(plan.copies_in) == [(second.seq_id, 3)]
    assert bench.scheduler.memory.reserved_for is None, "it has its blocks"
    assert [bench.scheduler.sequences[i].first_step_us for i in ran(plan)] == [bench.now_us], (
        "a new one starts beside it"
    )
    bench.apply(plan)
    assert second.status is Status.PAUSED and second.memory.num_swaps == 1


@pytest.mark.parametrize(("num_early", "factor"), [(3, 1), (4, 2)])
def test_when_uploads_go_out_soon_again_then_the_guards_double(num_early: int, factor: int) -> None:
    """A small one leads, so that it stays; beside it there is room for one of two that take turns. So many of their 32
    uploads are moved out again within 2m = 8 steps.
    """
    bench = Bench(blocks=5, host=20, block_size=512, max_batch_size=1, swap_min_run_steps=4, swap_benefit=1)
    leader = bench.add(1, 511)
    for _ in range(250):
        bench.step()
    pair = [bench.add(1025, 511), bench.add(1025, 511)]  # 3 blocks each
    for one in pair:
        bench.policy.order = [one.seq_id]
        bench.until(one, Status.RUNNING)
        while one.is_half:
            bench.step()
    planner = bench.scheduler.memory._mover._planner  # type: ignore[union-attr]
    num_uploads = 0
    while num_uploads < 32:
        assert (planner.gamma, planner.min_run_steps) == (1, 4)
        (away,) = [one for one in pair if one.status is Status.SWAPPED]
        bench.policy.order = [away.seq_id, *(one.seq_id for one in pair if one is not away)]
        bench.until(away, Status.PAUSED)
        num_uploads += 1
        for _ in range(4 if num_uploads <= num_early else 10):
            bench.step()
    assert (planner.gamma, planner.min_run_steps) == (factor, 4 * factor)
    assert leader.memory.num_swaps == 0


def test_when_many_are_away_a_team_that_was_not_asked_may_claim() -> None:
    """17 on the host, the last of them of another team: 16 are refused one by one, and the last with all the rest."""
    bench = Bench(blocks=24, host=40, block_size=64, max_batch_size=32, memory_preemption="reactive")
    small = [bench.add(1, 60, team_id=0 if index < AWAY_TRIED else 2) for index in range(AWAY_TRIED + 1)]
    bench.step()
    copies, swaps = Copies(), bench.scheduler.memory._mover
    assert isinstance(swaps, Mover)
    moves = [Move("out", one.seq_id, one.request.team_id) for one in small]
    swaps._carry_out(moves, copies, bench.scheduler.num_steps)
    bench.step(done=[copy.copy_id for copy in copies.out])
    large = bench.add(24 * 64 - 40, 40, team_id=1)  # the whole device
    bench.policy.order = [large.seq_id]
    bench.until(large, Status.RUNNING)
    asked: list[set[int]] = []
    bench.policy.claimant = lambda team_ids, holder: asked.append(set(team_ids))  # type: ignore[method-assign, assignment, func-returns-value]
    for _ in range(REFUSALS_BEFORE_RESERVATION + 1):
        bench.step()
        assert bench.policy.refused[-1] == small[-1].seq_id and small[-1].memory.num_refusals == 0
    assert asked and all(team_ids == {0, 2} for team_ids in asked)


def test_the_core_runs_plans_without_rows_and_says_where_kv_is() -> None:
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


def test_one_that_cannot_run_makes_no_plan_and_no_busy_loop() -> None:
    bench, first, second = swapped_pair()
    for sequence in (first, second):
        bench.scheduler.end(sequence.seq_id, "abort", bench.now_us)
    assert bench.scheduler.schedule(bench.now_us) is None and not bench.scheduler.has_work


@pytest.mark.case("O17b")
@pytest.mark.parametrize("mode", ["none", "proactive"])
def test_a_team_that_never_fits_opens_the_gate_for_nobody(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """B=1, Theta=0, K=1: F's only request is refused every time. B runs from 0; A comes at 300. From then on B's
    starts are never more than 2 steps apart: A gets nothing of what F could not use.
    """
    policy = EgMlfq(PolicyConfig(levels=1, theta_us=0, promotion_percent=0, step_cost_max_us=1000, coast=False))
    engine = Engine(
        blocks=1000,
        host_blocks=1000,
        policy=policy,
        profile=StepProfile(0.0, 1000.0, 0.0, 1000.0, 0.0),  # a token of prompt is one unit, as one of output
        max_batch_size=1,
        context_len=4096,
        teams=tuple(team(i) for i in range(3)),
        memory_preemption=mode,
    )
    entry = engine.scheduler.memory._starts
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
    assert ran_at[:300] == list(range(300))
    assert max(later - earlier for earlier, later in itertools.pairwise(ran_at[299:])) <= 2
    assert len(ran_at[300:]) in (199, 200, 201)
