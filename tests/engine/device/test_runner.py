"""TorchRunner: one row's fault is its own, and blocks do not leak between owners."""

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine.device.kv_canary import KVCanary
from engine.device.profiling import measure_block_copy_us
from engine.models.tiny import write_tiny_model
from engine.plan import BlockCopy, Row, StepPlan, StepResult
from engine.wire.messages import SamplingParams
from tests.support.engine.chaos_copy import ChaosCopy
from tests.support.engine.torch_schedules import Job, Progress, RecordingRunner, make_runner, row_of, run_alone

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def runner(tiny_path: Path, native: bool) -> RecordingRunner:
    return make_runner(tiny_path, torch.float32, native=native)


def prompt_row(seq_id: int, prompt: Sequence[int], first_block: int) -> Row:
    progress = Progress(Job(tuple(prompt), 1, GREEDY), blocks=list(range(first_block, first_block + 4)))
    return row_of(progress, seq_id, len(prompt))


@pytest.mark.case("K68")
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"token_ids": [5, 512]}, "outside the vocabulary"),
        ({"token_ids": [5, -1]}, "outside the vocabulary"),
        ({"token_ids": []}, "0 tokens"),
        ({"start": 2047, "token_ids": [5, 5]}, "outside the context"),
        ({"block_table": []}, "do not hold"),
        ({"block_table": [64]}, "outside the pool"),
        ({"is_decode": True}, "3 tokens"),
    ],
)
def test_a_row_that_cannot_run_fails_alone(runner: RecordingRunner, change: dict[str, Any], expected: str) -> None:
    good = prompt_row(1, range(10, 40), 0)
    bad = msgspec.structs.replace(prompt_row(2, [5, 6, 7], 8), **change)
    alone = runner.execute(StepPlan(1, (good,)))
    result = runner.execute(StepPlan(2, (bad, good)))
    assert result.token_ids == alone.token_ids
    assert expected in result.failed[2]
    assert result.duration_us > 0


@pytest.mark.case("K35")
def test_an_allocation_failure_fails_only_the_row_that_causes_it(
    runner: RecordingRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [prompt_row(i, range(10 + i, 40 + i), 4 * i) for i in range(4)]
    expected = runner.execute(StepPlan(1, tuple(rows))).token_ids
    forward = runner.model.forward

    def failing(batch: Any, *args: Any) -> torch.Tensor:
        if 12 in batch.token_ids[:1] or len(batch.prefill) > 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory\nmore lines")
        return forward(batch, *args)

    monkeypatch.setattr(runner.model, "forward", failing)
    result = runner.execute(StepPlan(2, tuple(rows)))
    assert result.failed == {2: "RuntimeError: DefaultCPUAllocator: can't allocate memory"}
    assert result.token_ids == {i: token for i, token in expected.items() if i != 2}


def test_a_step_without_rows_is_empty(runner: RecordingRunner) -> None:
    result = runner.execute(StepPlan(7, ()))
    assert (result.step_id, result.token_ids, result.failed) == (7, {}, {})


def test_a_chunk_that_does_not_end_the_prompt_yields_no_token(runner: RecordingRunner) -> None:
    progress = Progress(Job(tuple(range(10, 50)), 1, GREEDY), blocks=[0, 1, 2])
    assert runner.execute(StepPlan(1, (row_of(progress, 1, 20),))).token_ids == {}


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
def test_a_reused_block_shows_nothing_of_its_former_owner(runner: RecordingRunner, poison: float) -> None:
    """A canary: every block is filled with what would spoil any sum, then handed to new owners."""
    job = Job(tuple(range(20, 61)), 8, GREEDY)
    baseline = run_alone(runner, job)
    runner.cache.pool[: runner.cache.num_blocks] = poison
    again = run_alone(runner, job)
    assert (again.output, again.logits) == (baseline.output, baseline.logits)
    runner.cache.pool.zero_()


def test_only_the_owners_blocks_are_written(runner: RecordingRunner) -> None:
    runner.cache.pool.fill_(7)
    runner.cache.pool[runner.cache.null_block] = 0
    progress = Progress(Job(tuple(range(20, 61)), 1, GREEDY), blocks=[5, 9, 2])
    runner.execute(StepPlan(1, (row_of(progress, 1, 100),)))
    untouched = [block for block in range(runner.cache.num_blocks) if block not in progress.blocks]
    assert bool((runner.cache.pool[untouched] == 7).all())
    assert not runner.cache.pool[runner.cache.null_block].any()
    runner.cache.pool.zero_()


@pytest.fixture
def swapper(tmp_path: Path) -> RecordingRunner:
    """A runner with a host pool of its own."""
    write_tiny_model(tmp_path)
    return make_runner(tmp_path, torch.float32, num_host_blocks=8, native=False)


def test_rows_that_replay_write_their_kv_and_yield_no_token(runner: RecordingRunner) -> None:
    """After a drop: prompt and output go through as one prompt row, then decoding goes on as if nothing had been."""
    job = Job(tuple(range(20, 60)), 12, GREEDY)
    progress = Progress(job, blocks=list(range(4)))
    while len(progress.output) < 6:
        step(runner, progress)
    dropped = Progress(job, blocks=[9, 12, 10, 11], computed=progress.computed, output=list(progress.output))
    ids = [*job.prompt, *progress.output[:-1]]
    first = msgspec.structs.replace(
        row_of(dropped, 1, 1), is_decode=False, samples=False, start=0, token_ids=ids[:30], num_generated=6
    )
    second = msgspec.structs.replace(first, start=30, token_ids=ids[30:])
    for row in (first, second):
        assert runner.execute(StepPlan(1, (row,))).token_ids == {}
    for one in (progress, dropped):
        while not one.is_done:
            step(runner, one)
    assert dropped.output == progress.output  # in float32 no two logits of this model are close enough to tell


def step(runner: RecordingRunner, progress: Progress) -> None:
    row = row_of(progress, 1, 1000)
    progress.output.append(runner.execute(StepPlan(1, (row,))).token_ids[1])
    progress.computed += len(row.token_ids)


def test_a_result_names_the_copies_that_are_over_and_their_time(swapper: RecordingRunner) -> None:
    row = prompt_row(1, range(10, 40), 0)
    assert (swapper.execute(StepPlan(1, (row,))).copies_done, swapper.execute(StepPlan(1, (row,))).copy_us) == ([], 0)
    result = swapper.execute(StepPlan(2, (row,), (BlockCopy(5, 2, ((9, 0),)),), (BlockCopy(6, 3, ((4, 11),)),)))
    assert result.copies_done == [5, 6]
    assert 0 < result.copy_us < result.duration_us
    only_copies = swapper.execute(StepPlan(3, (), (BlockCopy(7, 2, ((9, 0),)),)))
    assert only_copies.copies_done == [7]
    assert 0 <= only_copies.copy_us <= only_copies.duration_us
    nothing = swapper.execute(StepPlan(4, ()))
    assert (nothing.copies_done, nothing.token_ids, nothing.duration_us >= 1) == ([], {}, True)


def test_a_plan_without_anything_waits_for_a_copy_in_flight(swapper: RecordingRunner) -> None:
    assert swapper.cache.host_pool is not None
    swapper.copies = ChaosCopy(swapper.cache.pool[:64], swapper.cache.host_pool, random.Random(8), max_delay=50)
    copies = tuple(BlockCopy(i, i, ((i, i),)) for i in range(4))
    done = list(swapper.execute(StepPlan(1, (), copies)).copies_done)
    num_plans = 0
    while len(done) < 4:
        over = swapper.execute(StepPlan(2 + num_plans, ())).copies_done
        assert over, "came back before a copy was over"
        done += over
        num_plans += 1
    assert sorted(done) == [0, 1, 2, 3]
    assert num_plans >= 1


def test_copies_without_a_host_pool_are_a_bug(runner: RecordingRunner) -> None:
    for plan in (StepPlan(1, (), (BlockCopy(1, 1, ((0, 0),)),)), StepPlan(1, (), (), (BlockCopy(1, 1, ((0, 0),)),))):
        with pytest.raises(AssertionError, match="no host pool"):
            runner.execute(plan)


def test_kv_that_came_back_changed_fails_its_sequence_and_no_other(swapper: RecordingRunner) -> None:
    """The canary's self-test: one bit of one byte on the host."""
    assert swapper.cache.host_pool is not None
    swapper.canary = KVCanary(swapper.cache.pool)
    ones = {
        seq_id: Progress(Job(tuple(range(20, 60)), 9, GREEDY), blocks=[8 * seq_id + i for i in range(4)])
        for seq_id in (1, 2)
    }

    def execute(*plan: Any) -> StepResult:
        result = swapper.execute(StepPlan(1, tuple(row_of(ones[i], i, 100) for i in ones), *plan))
        for i, token_id in result.token_ids.items():
            ones[i].computed = 40 + len(ones[i].output)
            ones[i].output.append(token_id)
        return result

    execute()
    pairs = {1: ((8, 0), (9, 1), (10, 2)), 2: ((16, 3), (17, 4), (18, 5))}
    swapper.execute(StepPlan(2, (), tuple(BlockCopy(i, i, pairs[i]) for i in (1, 2))))
    swapper.cache.host_pool.view(torch.uint8)[4, 1, 0, 3, 1, 7] ^= 4
    back = tuple(BlockCopy(10 + i, i, tuple((host, device) for device, host in pairs[i])) for i in (1, 2))
    assert swapper.execute(StepPlan(3, (), (), back)).copies_done == [11, 12]
    for _ in range(2):
        result = execute()
        assert result.failed == {2: "KV canary: 1 of 3 blocks changed between swap-out and swap-in (host block 4)"}
        assert list(result.token_ids) == [1]
    swapper.release(2)
    assert execute().failed == {}


@pytest.mark.case("K54")
def test_ids_the_tokenizer_lacks_are_never_sampled(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, vocab_size=640)
    runner = make_runner(tmp_path, torch.float32)
    runner.num_tokens = 512
    job = Job((5, 6, 7), 60, SamplingParams(temperature=3.0, seed=1))
    assert max(run_alone(runner, job).output) < 512


class CountedCopies:
    """Takes made-up time: 30 us for a block out, 10 us for one in, four times that on its first visit, and now and then
    a busy neighbour's millisecond."""

    def __init__(self) -> None:
        self.now_ns = self.num_started = 0
        self.visited: set[tuple[bool, int]] = set()

    def start(self, out: Sequence[BlockCopy], into: Sequence[BlockCopy]) -> None:
        for copy in (*out, *into):
            for block, _ in copy.pairs:
                at = (bool(out), block)
                self.now_ns += (30_000 if out else 10_000) * (1 if at in self.visited else 4)
                self.visited.add(at)
        self.num_started += 1
        self.now_ns += 1_000_000 * (self.num_started % 5 == 0)

    def poll(self) -> list[int]:
        return [0]

    def wait(self) -> None:
        pass


@pytest.mark.parametrize(("num_blocks", "num_host_blocks"), [(64, 64), (1, 1), (64, 3), (5, 64)])
def test_a_blocks_copy_is_timed_without_first_visits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_blocks: int, num_host_blocks: int
) -> None:
    write_tiny_model(tmp_path)
    swapper = make_runner(tmp_path, torch.float32, num_blocks=num_blocks, num_host_blocks=num_host_blocks, native=False)
    copies = CountedCopies()
    swapper.copies = copies
    monkeypatch.setattr("engine.device.profiling.time.perf_counter_ns", lambda: copies.now_ns)
    measured_us = measure_block_copy_us(swapper)
    assert measured_us == 20.0
    assert {block for _, block in copies.visited} <= set(range(min(num_blocks, num_host_blocks)))
    swapper.cache.num_host_blocks = 0
    assert measure_block_copy_us(swapper) == 0.0
