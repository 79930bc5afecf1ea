"""Minimum runs: counted in a sequence's own steps."""

from engine.blocks import BlockPool, BlockTable
from engine.memory.holding import Holding
from engine.memory.min_runs import MinRuns
from engine.request import Request, Sequence
from engine.wire.messages import SamplingParams


def sequence(seq_id: int) -> Sequence:
    request = Request(f"r{seq_id}", 0, 0, (1,), SamplingParams(max_tokens=1), 0)
    return Sequence(seq_id, request, Holding(BlockTable(BlockPool(1), 16), 1), 0)


def test_a_minimum_run_lasts_for_its_own_steps() -> None:
    runs, one, other = MinRuns(), sequence(1), sequence(2)
    runs.begin(one, 2, from_step=7)
    assert (one.memory.min_run_left, one.memory.uploaded_step, len(runs)) == (2, 7, 1)
    runs.ran([other])
    assert one.memory.min_run_left == 2, "a step of others does not count"
    runs.ran([one, other])
    assert (one.memory.min_run_left, len(runs)) == (1, 1)
    runs.ran([one])
    assert (one.memory.min_run_left, len(runs)) == (0, 0)
    runs.ran([one])
    assert one.memory.min_run_left == 0 == other.memory.min_run_left


def test_what_is_forgotten_is_protected_no_more() -> None:
    runs, one, other = MinRuns(), sequence(1), sequence(2)
    runs.begin(one, 3, from_step=1)
    runs.begin(other, 3, from_step=2)
    runs.forget(one)
    runs.forget(one)
    assert (one.memory.min_run_left, other.memory.min_run_left, len(runs)) == (0, 3, 1)
