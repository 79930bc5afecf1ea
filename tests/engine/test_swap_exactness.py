"""Swapping changes no token and no logit: any point, any delay of the copies, any place the blocks come back to."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.copy_engine import SyncCopy
from engine.messages import SamplingParams
from engine.model_store import SMOLLM2, prepare
from engine.plan import BlockCopy, StepPlan
from engine.tiny import VOCAB_SIZE, write_tiny_model
from tests.engine.chaos_copy import ChaosCopy
from tests.engine.swap_schedules import Swapping, SwapSchedule
from tests.engine.torch_schedules import Job, Progress, RecordingRunner, make_runner, random_jobs, row_of, run_alone

GREEDY = SamplingParams(temperature=0.0)
NUM_BLOCKS, NUM_HOST_BLOCKS = 40, 64


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_tiny_model(path)
    return path


@pytest.fixture(scope="module", params=[False, True], ids=["torch", "native"])
def native(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def runner(request: pytest.FixtureRequest, tiny_path: Path, native: bool) -> RecordingRunner:
    return make_runner(tiny_path, request.param, native=native, num_blocks=NUM_BLOCKS, num_host_blocks=NUM_HOST_BLOCKS)


def use_sync(runner: RecordingRunner, rng: random.Random) -> SyncCopy:
    assert runner.cache.host_pool is not None
    runner.copies = SyncCopy(runner.cache.pool[: runner.cache.num_blocks], runner.cache.host_pool)
    return runner.copies


def use_chaos(runner: RecordingRunner, rng: random.Random, *, is_fenced: bool = True, max_delay: int = 4) -> ChaosCopy:
    assert runner.cache.host_pool is not None
    device_pool = runner.cache.pool[: runner.cache.num_blocks]
    runner.copies = ChaosCopy(device_pool, runner.cache.host_pool, rng, is_fenced=is_fenced, max_delay=max_delay)
    return runner.copies


USE: dict[str, Callable[[RecordingRunner, random.Random], object]] = {"sync": use_sync, "chaos": use_chaos}


def differing(alone: dict[int, Progress], swapped: list[Swapping]) -> int:
    """How many of them have other tokens or other logits than alone."""
    pairs = [(one.progress, alone[id(one.progress.job)]) for one in swapped]
    return sum((one.output, one.logits) != (base.output, base.logits) for one, base in pairs)


@pytest.mark.case("I12", "K03")
@pytest.mark.parametrize("name", list(USE))
def test_any_schedule_with_swapping_gives_the_tokens_and_logits_of_a_run_alone(
    runner: RecordingRunner, name: str
) -> None:
    """Swapped between chunks of the prompt, after the prompt, between any two tokens; several at once."""
    jobs = random_jobs(random.Random(11), 12, vocab=VOCAB_SIZE, max_prompt=80, max_output=10)
    alone = {id(job): run_alone(runner, job) for job in jobs}
    rng = random.Random(12)
    num_swaps = num_late = 0
    for number in range(30):
        engine = USE[name](runner, rng)
        swapped = SwapSchedule(runner, rng.sample(jobs, 5), rng, swap_chance=0.3).run(max_rows=4)
        assert differing(alone, swapped) == 0, f"schedule {number}"
        num_swaps += sum(one.num_swaps for one in swapped)
        num_late += getattr(engine, "num_late", 0)
    assert num_swaps >= 300
    assert (num_late > 100) == (name == "chaos")


@pytest.mark.case("I12")
def test_a_fence_that_is_ignored_changes_tokens(tiny_path: Path) -> None:
    """The control: with ids named before the copies have happened, the same schedules go wrong."""
    runner = make_runner(tiny_path, torch.float32, num_blocks=NUM_BLOCKS, num_host_blocks=NUM_HOST_BLOCKS)
    jobs = random_jobs(random.Random(11), 12, vocab=VOCAB_SIZE, max_prompt=80, max_output=10)
    alone = {id(job): run_alone(runner, job) for job in jobs}
    rng = random.Random(12)
    num_wrong = 0
    for _ in range(5):
        use_chaos(runner, rng, is_fenced=False)
        try:
            swapped = SwapSchedule(runner, rng.sample(jobs, 5), rng, swap_chance=0.3).run(max_rows=4)
        except AssertionError:  # NaN logits fail the row
            num_wrong += 1
        else:
            num_wrong += differing(alone, swapped) > 0
    assert num_wrong == 5


@pytest.mark.case("K20", "K15")
@pytest.mark.parametrize("name", list(USE))
@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_a_swap_at_a_block_edge_after_each_chunk_and_each_token_changes_nothing(
    runner: RecordingRunner, name: str, length: int
) -> None:
    rng = random.Random(length)
    job = Job(tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(length)), 6, GREEDY)
    baseline = run_alone(runner, job)
    USE[name](runner, rng)
    (one,) = SwapSchedule(runner, [job], rng, swap_chance=0.7).run(max_rows=1)
    assert (one.progress.output, one.progress.logits) == (baseline.output, baseline.logits)
    assert one.num_swaps >= 4


@pytest.mark.case("K01", "K04")
def test_a_copy_out_carries_what_the_step_before_it_wrote_however_late_it_happens(runner: RecordingRunner) -> None:
    """The copy is planned right after the step that fills the block; other sequences go on writing meanwhile."""
    rng = random.Random(4)
    use_chaos(runner, rng, max_delay=6)
    host_pool = runner.cache.host_pool
    assert host_pool is not None
    one = Progress(Job(tuple(range(20, 57)), 4, GREEDY), blocks=[3, 8, 5])
    other = Progress(Job(tuple(range(60, 97)), 30, GREEDY), blocks=[0, 1, 2, 4, 6])
    runner.execute(StepPlan(0, (row_of(one, 1, 100),)))
    written = runner.cache.pool[one.blocks].clone()
    copy = BlockCopy(9, 1, ((3, 30), (8, 31), (5, 2)))
    done: list[int] = []
    for step in range(1, 10):
        row = row_of(other, 2, 100)
        result = runner.execute(StepPlan(step, (row,), (copy,) if step == 1 else ()))
        other.computed += len(row.token_ids)
        other.output.append(result.token_ids[2])
        done += result.copies_done
    assert done == [9]
    assert torch.equal(host_pool[[30, 31, 2]].view(torch.int16), written.view(torch.int16))
    assert runner.cache.pool[one.blocks].isnan().all()


@pytest.mark.real_model
@pytest.mark.case("I12")
def test_the_real_model_keeps_its_tokens_and_logits_under_random_swapping(native: bool) -> None:
    """bfloat16, greedy and seeded, copies late."""
    stored = prepare(SMOLLM2)
    runner = make_runner(
        stored.path, torch.bfloat16, max_batch_tokens=256, native=native, num_blocks=NUM_BLOCKS, num_host_blocks=64
    )
    jobs = random_jobs(random.Random(7), 6, vocab=stored.config.vocab_size, max_prompt=80, max_output=8)
    assert {job.sampling.temperature for job in jobs} >= {0.0, 1.0}
    alone = {id(job): run_alone(runner, job) for job in jobs}
    rng = random.Random(8)
    num_swaps = 0
    for number in range(6):
        use_chaos(runner, rng)
        swapped = SwapSchedule(runner, rng.sample(jobs, 4), rng, swap_chance=0.3).run(max_rows=4)
        assert differing(alone, swapped) == 0, f"schedule {number}"
        num_swaps += sum(one.num_swaps for one in swapped)
    assert num_swaps >= 40
