"""Copies that are late, out of order or lost: each is told of once, and not before it is over."""

from engine.clock import VirtualClock
from engine.plan import BlockCopy, StepPlan
from engine.sim.delayed import DelayedCopies
from engine.sim.runner import SimRunner
from policies.cost import StepProfile

PROFILE = StepProfile(
    fixed_us=1.0, prefill_token_us=1.0, prefill_attention_us=0.0, decode_row_us=1.0, decode_context_us=0.0
)


def runner(**options: int) -> DelayedCopies:
    return DelayedCopies(SimRunner(PROFILE, VirtualClock()), 3, **options)


def plan(*copy_ids: int) -> StepPlan:
    return StepPlan(0, (), tuple(BlockCopy(copy_id, copy_id, ((0, 1),)) for copy_id in copy_ids))


def test_without_delay_a_copy_is_over_in_its_own_step() -> None:
    one = runner(max_delay=0)
    result = one.execute(plan(1, 2))
    assert sorted(result.copies_done) == [1, 2] and not one.in_flight


def test_every_copy_ends_once_within_its_delay() -> None:
    one = runner(max_delay=3)
    ended: list[int] = []
    for step in range(40):
        result = one.execute(plan(step))
        ended += result.copies_done
        assert not result.copies_failed
        assert set(one.in_flight).isdisjoint(ended)
        assert all(copy_id >= step - 2 for copy_id in one.in_flight), "3 steps after its own at most"
    assert len(ended) == len(set(ended)) and sorted([*ended, *one.in_flight]) == list(range(40))
    assert ended != sorted(ended), "not in order"


def test_a_plan_without_anything_waits_for_the_soonest() -> None:
    one = runner(max_delay=5)
    in_flight = 8 - len(one.execute(plan(*range(8))).copies_done)
    while in_flight:
        done = one.execute(plan()).copies_done
        assert done
        in_flight -= len(done)


def test_a_lost_copy_is_reported_as_failed() -> None:
    one = runner(max_delay=2, lose_one_in=1)
    result = one.execute(plan(1))
    assert not result.copies_done and not result.copies_failed
    assert list(one.execute(plan()).copies_failed) == [1] and not one.in_flight
