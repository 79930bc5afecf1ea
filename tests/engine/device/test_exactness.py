"""Generated tokens and logits are bit-equal alone and under any schedule: batch mix, chunking, pauses, block reuse."""

import random
from pathlib import Path

import pytest
import torch

from engine.models.store import SMOLLM2, prepare
from engine.models.tiny import VOCAB_SIZE, write_tiny_model
from engine.plan import StepPlan
from engine.wire.messages import SamplingParams
from tests.support.engine.torch_schedules import (
    Job,
    Progress,
    RecordingRunner,
    make_runner,
    random_jobs,
    row_of,
    run_alone,
    run_schedule,
)

DTYPES = [torch.float32, torch.bfloat16]
NUM_SCHEDULES = 200


@pytest.fixture(scope="module", params=DTYPES, ids=["fp32", "bf16"])
def runner(request: pytest.FixtureRequest, tiny_path: Path, native: bool) -> RecordingRunner:
    return make_runner(tiny_path, request.param, native=native)


def check_schedules(runner: RecordingRunner, jobs: list[Job], num_schedules: int, seed: int) -> float:
    """Run random schedules over `jobs`; returns the average number of slot preemptions."""
    alone = {id(job): run_alone(runner, job) for job in jobs}
    rng = random.Random(seed)
    num_preemptions = 0
    for number in range(num_schedules):
        for progress in run_schedule(runner, rng.sample(jobs, 5), rng, max_rows=3):
            baseline = alone[id(progress.job)]
            assert progress.output == baseline.output, f"tokens differ in schedule {number} of seed {seed}"
            assert progress.logits == baseline.logits, f"logits differ in schedule {number} of seed {seed}"
            num_preemptions += progress.num_preemptions
    return num_preemptions / num_schedules


@pytest.mark.case("I12", "K78")
def test_any_schedule_gives_the_tokens_and_logits_of_a_run_alone(runner: RecordingRunner) -> None:
    jobs = random_jobs(random.Random(1), 20, vocab=VOCAB_SIZE, max_prompt=90, max_output=14)
    assert check_schedules(runner, jobs, NUM_SCHEDULES, seed=2) >= 5


@pytest.mark.case("I12")
def test_plain_linears_keep_the_promise_too(tiny_path: Path, native: bool) -> None:
    runner = make_runner(tiny_path, torch.float32, pack=False, native=native)
    jobs = random_jobs(random.Random(3), 10, vocab=VOCAB_SIZE, max_prompt=70, max_output=10)
    check_schedules(runner, jobs, 20, seed=4)


@pytest.mark.case("I12")
def test_odd_widths_and_head_counts_keep_the_promise(tmp_path: Path, native: bool) -> None:
    """Widths that are no multiple of a vector, and eight query heads on one KV head."""
    write_tiny_model(
        tmp_path,
        hidden_size=56,
        intermediate_size=172,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=20,
        tie_word_embeddings=False,
        vocab_size=515,
    )
    for pack in (True, False):
        runner = make_runner(tmp_path, torch.float32, pack=pack, native=native)
        jobs = random_jobs(random.Random(5), 10, vocab=515, max_prompt=70, max_output=10)
        check_schedules(runner, jobs, 10, seed=6)


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_a_pause_at_a_block_edge_changes_nothing(runner: RecordingRunner, length: int) -> None:
    """Paused in the middle of its prompt and after each token, another sequence runs in between."""
    rng = random.Random(length)
    prompt = tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(length))
    job = Job(prompt, 6, SamplingParams(temperature=0.0))
    other = Progress(Job(prompt[::-1], 40, SamplingParams(temperature=0.0)), blocks=list(range(10, 20)))
    baseline = run_alone(runner, job)
    progress = Progress(job, blocks=list(range(20, 24)))
    chunks = [length // 2, length - length // 2]
    while not progress.is_done:
        for seq_id, current, count in ((0, progress, chunks.pop(0) if chunks else 1), (1, other, 200)):
            row = row_of(current, seq_id, count)
            result = runner.execute(StepPlan(step_id=0, rows=(row,)))
            current.computed += len(row.token_ids)
            if row.samples:
                current.output.append(result.token_ids[seq_id])
    assert progress.output == baseline.output


@pytest.mark.case("K78")
def test_the_place_in_the_batch_does_not_matter(runner: RecordingRunner) -> None:
    """The same request at batch positions 0 to 7, among strangers of other lengths."""
    rng = random.Random(9)
    jobs = random_jobs(rng, 7, vocab=VOCAB_SIZE, max_prompt=80, max_output=2)
    job = Job(tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(21)), 2, SamplingParams(temperature=0.0))
    baseline = run_alone(runner, job)
    for place in range(8):
        mixed = [*jobs[:place], job, *jobs[place:]]
        batch = {i: Progress(j, blocks=list(range(i * 7, i * 7 + 7))) for i, j in enumerate(mixed)}
        for _ in range(2):
            rows = tuple(row_of(progress, i, 200) for i, progress in batch.items())
            result = runner.execute(StepPlan(step_id=0, rows=rows))
            for row in rows:
                batch[row.seq_id].computed += len(row.token_ids)
                batch[row.seq_id].output.append(result.token_ids[row.seq_id])
            batch[place].logits.append(runner.recorded[place])
        assert batch[place].output == baseline.output
        assert batch[place].logits == baseline.logits


@pytest.mark.real_model
@pytest.mark.case("I12", "K78")
def test_any_schedule_of_the_real_model(native: bool) -> None:
    stored = prepare(SMOLLM2)
    runner = make_runner(stored.path, torch.bfloat16, max_batch_tokens=256, native=native)
    jobs = random_jobs(random.Random(7), 8, vocab=stored.config.vocab_size, max_prompt=80, max_output=8)
    assert check_schedules(runner, jobs, 20, seed=8) >= 5
