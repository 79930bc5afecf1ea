"""Swapping changes no token and no logit: any point, any delay of the copies, any place the blocks come back to."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from engine.device.copy_engine import SyncCopy
from engine.device.kv_canary import KVCanary
from engine.memory.mover import Mover
from engine.models.store import SMOLLM2, prepare
from engine.models.tiny import VOCAB_SIZE
from engine.plan import BlockCopy, StepPlan, StepResult
from engine.wire.messages import SamplingParams
from tests.support.engine.chaos_copy import ChaosCopy
from tests.support.engine.random_order import RandomOrder
from tests.support.engine.swap_engine import SwapEngine
from tests.support.engine.swap_schedules import Swapping, SwapSchedule
from tests.support.engine.torch_schedules import (
    Job,
    Progress,
    RecordingRunner,
    make_runner,
    random_jobs,
    row_of,
    run_alone,
)

GREEDY = SamplingParams(temperature=0.0)
NUM_BLOCKS, NUM_HOST_BLOCKS = 40, 64


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
def test_any_schedule_with_swapping_equals_a_run_alone(runner: RecordingRunner, name: str) -> None:
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
def test_a_swap_at_any_block_edge_changes_nothing(runner: RecordingRunner, name: str, length: int) -> None:
    rng = random.Random(length)
    job = Job(tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(length)), 6, GREEDY)
    baseline = run_alone(runner, job)
    USE[name](runner, rng)
    (one,) = SwapSchedule(runner, [job], rng, swap_chance=0.7).run(max_rows=1)
    assert (one.progress.output, one.progress.logits) == (baseline.output, baseline.logits)
    assert one.num_swaps >= 4


@pytest.mark.case("K01", "K04")
def test_a_late_copy_out_carries_what_the_step_before_wrote(runner: RecordingRunner) -> None:
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


@pytest.fixture(scope="module")
def small(tiny_path: Path) -> RecordingRunner:
    """Fourteen blocks, for work that would like three times as many at once."""
    return make_runner(tiny_path, torch.bfloat16, num_blocks=14, num_host_blocks=128)


def make_jobs(count: int, seed: int) -> list[Job]:
    return random_jobs(random.Random(seed), count, vocab=VOCAB_SIZE, max_prompt=60, max_output=60)


def make_engine(runner: RecordingRunner, policy: str = "eg-mlfq", **settings: object) -> SwapEngine:
    """With the guards as low as they go, so that it swaps all it can."""
    order = RandomOrder(23) if policy == "random-order" else None
    return SwapEngine(runner, policy=order, **{"swap_min_run_steps": 1, "swap_benefit": 0, **settings})


@pytest.mark.case("I12", "K04")
@pytest.mark.parametrize("policy", ["eg-mlfq", "random-order"])
@pytest.mark.parametrize("mode", ["proactive", "reactive"])
@pytest.mark.parametrize("name", list(USE))
def test_the_scheduler_swaps_and_no_token_changes(small: RecordingRunner, name: str, mode: str, policy: str) -> None:
    jobs = make_jobs(24, seed=21)
    alone = [run_alone(small, job).output for job in jobs]
    USE[name](small, random.Random(24))
    engine = make_engine(small, policy, memory_preemption=mode)
    assert engine.run(jobs) == alone
    ended = engine.finished.values()
    assert all(f.reason == "length" and f.num_recomputes == 0 for f in ended)
    assert sum(f.num_swaps for f in ended) >= engine.runner.num_in >= 50


@pytest.mark.case("I12")
def test_the_same_without_compiled_kernels_in_float32(tiny_path: Path) -> None:
    runner = make_runner(tiny_path, torch.float32, native=False, num_blocks=14, num_host_blocks=128)
    jobs = make_jobs(10, seed=21)
    alone = [run_alone(runner, job).output for job in jobs]
    use_chaos(runner, random.Random(24))
    engine = make_engine(runner)
    assert engine.run(jobs) == alone
    assert engine.runner.num_in >= 10


@pytest.mark.case("I12")
def test_the_scheduler_over_a_fence_that_is_ignored_changes_tokens(small: RecordingRunner) -> None:
    """The control of the test above."""
    jobs = make_jobs(24, seed=21)
    alone = [run_alone(small, job).output for job in jobs]
    use_chaos(small, random.Random(24), is_fenced=False)
    engine = make_engine(small)
    assert engine.run(jobs) != alone


@pytest.mark.case("K14")
@pytest.mark.parametrize("mode", ["proactive", "none"])
def test_when_preempted_in_a_chunk_it_goes_on_from_there(
    tiny_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One slot, chunks of 32 tokens and steps of 5: prompts are left inside a chunk, for a random other sequence."""
    runner = make_runner(tiny_path, torch.bfloat16, num_blocks=14, num_host_blocks=128)
    jobs = random_jobs(random.Random(71), 16, vocab=VOCAB_SIZE, max_prompt=60, max_output=10)
    alone = [run_alone(runner, job).output for job in jobs]
    use_chaos(runner, random.Random(72))
    engine = make_engine(runner, "random-order", memory_preemption=mode, max_batch_size=1, max_batch_tokens=5)
    for number, job in enumerate(jobs):
        engine.add(str(number), job)
    live, entry, swaps = engine.scheduler.sequences, engine.scheduler.memory._starts, engine.scheduler.memory._mover
    computed: dict[int, list[int]] = {}  # the positions of the tokens that each sequence was given rows for
    execute = engine.runner.execute

    def noting(plan: StepPlan) -> StepResult:
        for row in plan.rows:
            computed.setdefault(row.seq_id, []).extend(range(row.start, row.start + len(row.token_ids)))
        return execute(plan)

    monkeypatch.setattr(engine.runner, "execute", noting)
    in_a_chunk: set[int] = set()
    while engine.core.has_work:
        before = {seq_id: (one.num_computed, one.num_preemptions) for seq_id, one in live.items()}
        engine.step()
        assert min(entry.num_claimed, entry.num_half, entry.kept) >= 0
        assert not isinstance(swaps, Mover) or min(swaps.view.num_promised, swaps.num_dropped) >= 0
        for seq_id, one in live.items():
            start, num_preemptions = before.get(seq_id, (0, 0))
            if one.is_half and start % 32 and one.num_preemptions > num_preemptions:
                in_a_chunk.add(seq_id)
    engine.check_empty()
    assert len(in_a_chunk) >= 5
    for number, job in enumerate(jobs):
        assert computed[number] == list(range(len(job.prompt) + job.num_output - 1)), "each once, and in order"
    assert [engine.ids[str(number)] for number in range(len(jobs))] == alone
    assert all(one.reason == "length" and one.num_recomputes == 0 for one in engine.finished.values())


@pytest.mark.case("K07", "K10")
@pytest.mark.parametrize("name", list(USE))
def test_aborts_at_any_point_harm_nobody_and_give_every_block_back(small: RecordingRunner, name: str) -> None:
    """Also of sequences in the middle of their prompt and of those with a copy in flight, either way."""
    jobs = make_jobs(40, seed=31)
    alone = [run_alone(small, job).output for job in jobs]
    rng = random.Random(32)
    USE[name](small, rng)
    engine = make_engine(small, "random-order")
    moments: set[str] = set()
    for step in range(3000):
        if step % 3 == 0 and step // 3 < len(jobs):
            engine.add(str(step // 3), jobs[step // 3])
        if step >= 3 * len(jobs) and not engine.core.has_work:
            break
        if rng.random() < 0.15 and engine.core.request_ids:
            victim = rng.choice(sorted(engine.core.request_ids))
            moments |= {s.status for s in engine.scheduler.sequences.values() if s.request.request_id == victim}
            engine.core.abort(victim)
        engine.step()
    engine.check_empty()
    assert len(engine.finished) == len(jobs)
    aborted = {request_id for request_id, f in engine.finished.items() if f.reason == "abort"}
    assert len(aborted) >= 12 and moments >= {"running", "swapped"}
    assert name == "sync" or moments & {"swapping_out", "swapping_in"}
    for i, output in enumerate(alone):
        ids = engine.ids[str(i)]
        assert ids == (output[: len(ids)] if str(i) in aborted else output)


@pytest.mark.case("K17", "K11")
@pytest.mark.parametrize(
    ("mode", "num_host_blocks", "num_jobs", "least"),
    [("recompute", 0, 60, 20), ("proactive", 3, 24, 1), ("reactive", 5, 24, 1)],
)
def test_what_cannot_be_swapped_is_computed_again_and_nothing_is_lost(
    tiny_path: Path, mode: str, num_host_blocks: int, num_jobs: int, least: int
) -> None:
    """No host pool, or one that is too small: sequences lose their KV and go on where they were. Copies are late, and
    host blocks are wanted by others while they are read.

    Recomputing need not keep the bits of bfloat16; in float32 this model's tokens survive it.
    """
    runner = make_runner(tiny_path, torch.float32, num_blocks=14, num_host_blocks=num_host_blocks)
    jobs = make_jobs(num_jobs, seed=41)
    alone = [run_alone(runner, job).output for job in jobs]
    if num_host_blocks:
        use_chaos(runner, random.Random(42))
    engine = make_engine(runner, memory_preemption=mode)
    assert engine.run(jobs) == alone
    ended = engine.finished.values()
    assert all(f.reason == "length" for f in ended)
    assert sum(f.num_recomputes for f in ended) >= least
    assert engine.runner.num_replayed > 10
    assert (sum(f.num_swaps for f in ended) > 0) == (num_host_blocks > 0)


def test_the_canary_ends_only_the_request_whose_kv_was_changed(
    small: RecordingRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = make_jobs(16, seed=51)
    alone = [run_alone(small, job).output for job in jobs]
    for is_changed in (False, True):
        engine_of_copies = use_chaos(small, random.Random(1))
        monkeypatch.setattr(small, "canary", KVCanary(small.cache.pool))
        engine = make_engine(small)
        if is_changed:
            change_one_byte(engine_of_copies, small, number=10, monkeypatch=monkeypatch)
        outputs = engine.run(jobs)
        wrong = [i for i, f in enumerate(engine.finished[str(i)] for i in range(len(jobs))) if f.reason != "length"]
        assert len(wrong) == is_changed
        for i in wrong:
            assert engine.finished[str(i)].reason == "error"
            assert "KV canary: 1 of" in engine.finished[str(i)].message
            assert outputs[i] == alone[i][: len(outputs[i])]
        assert all(outputs[i] == alone[i] for i in range(len(jobs)) if i not in wrong)


def change_one_byte(
    engine: ChaosCopy, runner: RecordingRunner, *, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Just before the copy in with this number starts, one bit of one of its host blocks flips."""
    start, seen = engine.start, 0
    assert runner.cache.host_pool is not None
    content = runner.cache.host_pool.view(torch.uint8).view(runner.cache.num_host_blocks, -1)

    def changing(out: Sequence[BlockCopy], into: Sequence[BlockCopy]) -> None:
        nonlocal seen
        for copy in into:
            seen += 1
            if seen == number:
                content[copy.pairs[-1][0], 5] ^= 16
        start(out, into)

    monkeypatch.setattr(engine, "start", changing)


@pytest.mark.real_model
@pytest.mark.case("I12")
def test_under_random_swapping_the_real_model_keeps_its_logits() -> None:
    """bfloat16, greedy and seeded, copies late."""
    stored = prepare(SMOLLM2)
    runner = make_runner(
        stored.path, torch.bfloat16, max_batch_tokens=256, num_blocks=NUM_BLOCKS, num_host_blocks=NUM_HOST_BLOCKS
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


@pytest.mark.real_model
@pytest.mark.case("I12", "K04")
def test_the_scheduler_swaps_the_real_model_and_no_token_changes() -> None:
    """bfloat16, greedy and seeded, in a pool a third of what the work would like."""
    stored = prepare(SMOLLM2)
    runner = make_runner(stored.path, torch.bfloat16, max_batch_tokens=256, num_blocks=8, num_host_blocks=60)
    jobs = random_jobs(random.Random(61), 10, vocab=stored.config.vocab_size, max_prompt=60, max_output=30)
    assert {job.sampling.temperature for job in jobs} >= {0.0, 1.0}
    alone = [run_alone(runner, job).output for job in jobs]
    engine = make_engine(runner, "random-order")
    assert engine.run(jobs) == alone
    assert sum(f.num_swaps for f in engine.finished.values()) >= 8
    assert not any(f.num_recomputes for f in engine.finished.values())
