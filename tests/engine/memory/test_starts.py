"""Who may start: claims, the reservation, and steps that are closed to newcomers."""

import pytest

from engine.memory.starts import REFUSALS_BEFORE_RESERVATION
from policies.sequences import TeamTerms
from tests.engine.step.test_scheduler import Bench
from tests.support.engine.simple_engine import ArrivalOrder, Engine, submit


def test_a_sequence_starts_only_beside_the_most_of_all_started() -> None:
    bench = Bench(blocks=4, block_size=4)
    bench.add(4, 4)
    bench.add(4, 5)
    bench.add(4, 4)
    assert [row.seq_id for row in bench.step().rows] == [0, 2], "3 blocks do not fit beside 2, though 3 are free"
    assert bench.policy.refused == [1]


@pytest.mark.case("K29", "C09")
def test_when_small_ones_pass_a_large_head_it_starts_in_a_bound() -> None:
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
def test_the_one_reservation_goes_to_the_first_refused_so_often() -> None:
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


def test_two_requests_of_sixty_percent_run_one_after_the_other() -> None:
    def steps_of(num_requests: int) -> int:
        engine = Engine(blocks=10, block_size=4)
        for index in range(num_requests):
            engine.core.add(submit(f"r{index}", prompt=8, output=16))
        return len(engine.run())

    assert steps_of(2) <= 2 * steps_of(1)


def test_a_shortage_lasts_until_the_lags_are_back() -> None:
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
