"""Minimum runs: counted in a sequence's own steps, and told to the policy."""

from engine.blocks import BlockPool, BlockTable
from engine.memory.holding import Holding
from engine.memory.min_runs import MinRuns
from engine.request import Request, Sequence
from engine.wire.messages import SamplingParams
from tests.support.engine.simple_engine import ArrivalOrder


def sequence(seq_id: int) -> Sequence:
    request = Request(f"r{seq_id}", 0, 0, (1,), SamplingParams(max_tokens=1), 0)
    return Sequence(seq_id, request, Holding(BlockTable(BlockPool(1), 16), 1), 0)


class Told(ArrivalOrder):
    """Notes what the memory says of minimum runs."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[tuple[int, int]] = []

    def protect(self, seq_id: int, num_steps: int) -> None:
        self.left.append((seq_id, num_steps))


def test_a_minimum_run_lasts_for_its_own_steps() -> None:
    policy = Told()
    runs, first, other = MinRuns(policy), sequence(1), sequence(2)
    runs.begin(first, 2, from_step=7)
    assert (first.memory.min_run_left, first.memory.uploaded_step, len(runs)) == (2, 7, 1)
    runs.step_over([other], 8)
    assert first.memory.min_run_left == 2, "a step of others does not count"
    runs.step_over([first, other], 9)
    assert (first.memory.min_run_left, len(runs)) == (1, 1)
    runs.step_over([first], 10)
    assert (first.memory.min_run_left, len(runs)) == (0, 0)
    runs.step_over([first], 11)
    assert first.memory.min_run_left == 0 == other.memory.min_run_left
    assert policy.left == [(1, 2), (1, 1), (1, 0)], "after every change, and only then"


def test_when_it_is_not_picked_for_long_a_run_lapses() -> None:
    policy = Told()
    runs, idle, other = MinRuns(policy), sequence(1), sequence(2)
    runs.begin(idle, 2, from_step=7)
    runs.step_over([other], 14)
    assert idle.memory.is_protected
    runs.step_over([other], 15)  # 7 + 4 * 2
    assert not idle.memory.is_protected and policy.left == [(1, 2), (1, 0)]


def test_what_is_forgotten_is_protected_no_more() -> None:
    runs, first, other = MinRuns(Told()), sequence(1), sequence(2)
    runs.begin(first, 3, from_step=1)
    runs.begin(other, 3, from_step=2)
    runs.forget(first)
    runs.forget(first)
    assert (first.memory.min_run_left, other.memory.min_run_left, len(runs)) == (0, 3, 1)
