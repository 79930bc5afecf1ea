"""Copies whose sequence ends, that fail, or that nobody hears of again; the books are rechecked after each step."""

import pytest

from engine.memory.mover import COPY_DEADLINE_US, Mover
from engine.memory.moves import Copies, Move
from engine.plan import BlockCopy, StepPlan
from engine.request import Status
from engine.sim.delayed import DelayedCopies
from engine.sim.runner import SimRunner
from engine.wire.messages import StepDone
from tests.support.engine.simple_engine import UNIT_PROFILE, Engine, submit
from tests.support.engine.swap_bench import STEP_US, Bench, copied, dropped_pair, half_prompts, ran, swapped_pair


@pytest.mark.case("K05", "I15")
@pytest.mark.parametrize("is_out", [True, False])
def test_when_one_ends_in_flight_its_blocks_wait_for_the_copy(is_out: bool) -> None:
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


def test_copies_of_ended_sequences_are_work_and_then_there_is_none() -> None:
    bench, first, second = swapped_pair()
    bench.scheduler.end(first.seq_id, "abort", bench.now_us)
    plan = bench.plan()
    bench.apply(plan, done=())
    bench.scheduler.end(second.seq_id, "abort", bench.now_us)
    assert bench.scheduler.num_live == 0 and bench.scheduler.has_work
    bench.step(done=[plan.copies_in[0].copy_id])
    assert not bench.scheduler.has_work and bench.scheduler.schedule(bench.now_us) is None


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
        assert second.status in (Status.DROPPED, Status.RUNNING) and second.memory.num_recomputes == 1
        while bench.scheduler.num_live:
            bench.step()
        assert second.finish_reason == first.finish_reason == "length" and len(second.output_token_ids) == 12
        assert bench.scheduler.memory.device.num_free == bench.scheduler.memory.host.num_free == 6


@pytest.mark.parametrize("is_out", [True, False])
def test_when_a_copy_fails_the_policy_knows_it_is_not_away(is_out: bool) -> None:
    bench, _first, second = swapped_pair()
    if is_out:
        bench = Bench(blocks=6, host=6, max_batch_size=2)
        _first, second = bench.add(8, 12), bench.add(8, 12, team_id=1)
    plan = bench.plan()
    while not (plan.copies_out if is_out else plan.copies_in):
        bench.apply(plan)
        plan = bench.plan()
    assert bench.policy.away == {second.seq_id}
    bench.apply(plan, done=(), failed=[copy.copy_id for copy in (*plan.copies_out, *plan.copies_in)])
    assert second.status is Status.DROPPED and bench.policy.away == set()


@pytest.mark.case("K09")
def test_a_replay_whose_copy_is_given_up_begins_again() -> None:
    bench, _first, second = dropped_pair()
    at = second.memory.replay_to
    while second.num_computed != 8:
        bench.step()
    copies, swaps = Copies(), bench.scheduler.memory._mover
    assert isinstance(swaps, Mover) and second.is_half
    swaps._carry_out([Move("out", second.seq_id, 0)], copies, bench.scheduler.num_steps)
    bench.step(done=(), failed=[copies.out[0].copy_id])
    assert (second.status, second.num_computed, second.memory.replay_to) == (Status.DROPPED, 0, at)
    starts = []
    while bench.scheduler.num_live:
        starts += [(row.start, row.samples) for row in bench.step().rows if row.seq_id == second.seq_id]
    assert starts[:3] == [(0, False), (8, False), (at, True)] and len(second.output_token_ids) == 12


@pytest.mark.case("K09")
@pytest.mark.parametrize("is_out", [True, False])
def test_when_a_copy_is_never_heard_of_only_its_sequence_ends(is_out: bool) -> None:
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
    assert bench.scheduler.memory.tokens_max == 12
    small = bench.add(4, 4)
    while bench.scheduler.num_live:
        plan = bench.step(done=())
        assert not {p[0 if is_out else 1] for p in copy.pairs} & {b for row in plan.rows for b in row.block_table}
    assert small.finish_reason == "length"
    assert not bench.scheduler.has_work and bench.scheduler.schedule(bench.now_us) is None, "nobody waits for it"


def test_when_a_copy_out_is_lost_its_blocks_are_not_awaited() -> None:
    """Three of 8 + 12 tokens on 9 blocks. The copy of the third out is lost; the second makes room at once."""
    bench = Bench(blocks=9, host=9, max_batch_size=3)
    first, second, third = (bench.add(8, 12, team_id=team_id) for team_id in range(3))
    plan = bench.plan()
    while not plan.copies_out:
        bench.apply(plan)
        plan = bench.plan()
    assert copied(plan.copies_out) == [(third.seq_id, 3)] and bench.scheduler.memory._pools.num_incoming == 3
    bench.apply(plan, done=())
    for _ in range(3):
        bench.step(done=())
    bench.now_us += COPY_DEADLINE_US
    assert bench.scheduler.expire(bench.now_us) == [third]
    assert bench.scheduler.memory._pools.num_incoming == 0
    plan = bench.plan()
    assert copied(plan.copies_out) == [(second.seq_id, 3)], "what the lost copy was to free will never come"
    bench.apply(plan)
    assert ran(bench.step()) == [first.seq_id]


@pytest.mark.case("K22")
def test_when_the_pool_shrinks_below_a_lone_sequence_it_ends() -> None:
    """Two on 7 blocks. The copy of the other's 4 is lost, and 3 are left for one that will need 4: there is nobody to
    take blocks from, and it cannot displace itself.
    """
    bench = Bench(blocks=7, host=6, max_batch_size=2)
    lone, other = bench.add(4, 12), bench.add(8, 12, team_id=1)
    plan = bench.plan()
    while not plan.copies_out:
        bench.apply(plan)
        plan = bench.plan()
    assert copied(plan.copies_out) == [(other.seq_id, 4)] and len(lone.memory.table.blocks) == 3
    bench.apply(plan, done=())
    bench.now_us += COPY_DEADLINE_US
    assert bench.scheduler.expire(bench.now_us) == [other, lone]
    assert lone.finish_reason == "error" and "lost" in lone.error and len(lone.output_token_ids) == 9
    later = bench.add(4, 8, team_id=2)  # the server is alive, and has what is left
    bench.until(later, Status.FINISHED)
    memory = bench.scheduler.memory
    assert later.finish_reason == "length" and memory.tokens_max == 12 == memory.device.num_free * 4


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
    assert half.memory.num_recomputes == 0 and grower.finish_reason == "length"
    assert bench.scheduler.memory.device.num_free == 6 and bench.scheduler.memory.host.num_free == 20


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


@pytest.mark.case("K07")
@pytest.mark.parametrize("seed", range(4))
def test_aborts_in_flight_leave_every_block_free(seed: int) -> None:
    engine = Engine(blocks=12, host_blocks=40, block_size=4, max_batch_size=4)
    watch = Watch()
    runner = DelayedCopies(SimRunner(UNIT_PROFILE, engine.clock), seed, max_delay=4, on_plan=watch)
    engine.core._runner = runner
    num_stores = num_aborted_stores = num_aborted_loads = 0
    done: list[StepDone] = []
    for index in range(130):
        engine.core.add(submit(f"r{index}", team_id=index % 4, prompt=5 + index % 7, output=14))
        for _ in range(3):
            done += [message for message in [engine.core.step()] if message is not None]
            engine.scheduler.check()
            for copy in list(runner.in_flight.values()):
                sequence = engine.scheduler.sequences.get(copy.seq_id)
                if sequence is None:
                    continue
                is_load = sequence.status is Status.SWAPPING_IN
                num_stores += not is_load
                if is_load or num_stores % 8 == 0:  # most come to the host, else there is nothing to load
                    engine.core.abort(sequence.request.request_id)
                    num_aborted_loads += is_load
                    num_aborted_stores += not is_load
    done += engine.run()
    assert num_aborted_loads >= 30 and num_aborted_stores >= 10 and watch.num_overlaps > 0
    num_aborts = sum(finished.reason == "abort" for message in done for finished in message.finished)
    assert num_aborts == num_aborted_loads + num_aborted_stores
    assert engine.scheduler.memory.device.num_free == 12 and engine.scheduler.memory.host.num_free == 40
