"""Random schedules for a TorchRunner, built straight as StepPlans: what a scheduler might do, and worse.

Sequences are paused and resumed at will (their KV stays), prompts are cut at random places, blocks are handed out in
random order and reused as soon as a sequence ends. The tests compare tokens and logits with the same jobs run alone.
"""

import functools
import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from engine.device.kv_cache import KVCache
from engine.device.model import Model
from engine.device.native.build import NativeError
from engine.device.native.library import Kernels, load
from engine.device.runner import TorchRunner
from engine.models.config import read_model_config
from engine.models.store import cache_root
from engine.plan import Row, StepPlan
from engine.wire.messages import SamplingParams

BLOCK_SIZE = 16

# Tests share their cores; a second thread would wait for a core more than it helps.
torch.set_num_threads(1)


@dataclass(frozen=True)
class Job:
    """One request."""

    prompt: tuple[int, ...]
    num_output: int
    sampling: SamplingParams


@dataclass
class Progress:
    """One request on its way."""

    job: Job
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    output: list[int] = field(default_factory=list)
    logits: list[str] = field(default_factory=list)  # a hash for each output token
    num_preemptions: int = 0
    is_in_last_step: bool = False

    @property
    def is_done(self) -> bool:
        return len(self.output) == self.job.num_output


class RecordingRunner(TorchRunner):
    """Keeps a hash of the logits of each row that samples, by seq_id."""

    def _run(self, rows: Sequence[Row]) -> tuple[dict[int, int], dict[int, str]]:
        self.recorded: dict[int, str] = getattr(self, "recorded", {})
        forward = self.model.forward

        def recording(batch: object, *args: object) -> torch.Tensor:
            logits = forward(batch, *args)  # type: ignore[arg-type]
            sampled = [r for r in rows if r.is_decode and r.samples] + [
                r for r in rows if not r.is_decode and r.samples
            ]
            for row, values in zip(sampled, logits, strict=True):
                bits = values.view(torch.int16 if values.dtype == torch.bfloat16 else torch.int32)
                self.recorded[row.seq_id] = hashlib.sha256(bits.numpy().tobytes()).hexdigest()
            return logits

        self.model.forward = recording  # type: ignore[method-assign]
        try:
            return super()._run(rows)
        finally:
            self.model.forward = forward  # type: ignore[method-assign]


@functools.cache
def _kernels() -> Kernels | str:
    try:
        return load(cache_root(""))
    except NativeError as error:
        return str(error)


def native_kernels() -> Kernels:
    """The compiled kernels; skips the test where there is no compiler."""
    kernels = _kernels()
    if isinstance(kernels, str):
        pytest.skip(f"no native kernels: {kernels}")
    return kernels


def make_runner(
    path: Path,
    dtype: torch.dtype,
    *,
    num_blocks: int = 64,
    max_batch_size: int = 8,
    max_batch_tokens: int = 512,
    pack: bool = True,
    block_size: int = BLOCK_SIZE,
    native: bool | None = None,
    num_host_blocks: int = 0,
) -> RecordingRunner:
    """A runner over a model directory on the CPU. `native`: with compiled kernels or not; None: where they compile."""
    if native is None:
        native = isinstance(_kernels(), Kernels)
    config = read_model_config(path)
    device = torch.device("cpu")
    model = Model.load(
        path,
        config,
        dtype=dtype,
        device=device,
        max_batch_size=max_batch_size,
        max_batch_tokens=max_batch_tokens,
        pack=pack,
        kernels=native_kernels() if native else None,
    )
    cache = KVCache(config, num_blocks, block_size, dtype, device, num_host_blocks=num_host_blocks)
    return RecordingRunner(model, cache, eos_token_ids=config.eos_token_ids, num_tokens=config.vocab_size)


def row_of(progress: Progress, seq_id: int, count: int) -> Row:
    """The next step of a sequence: `count` prompt tokens, or one decode row."""
    job = progress.job
    is_decode = progress.computed >= len(job.prompt)
    tokens = [progress.output[-1]] if is_decode else list(job.prompt[progress.computed : progress.computed + count])
    end = progress.computed + len(tokens)
    return Row(
        seq_id=seq_id,
        is_decode=is_decode,
        start=progress.computed,
        token_ids=tokens,
        block_table=tuple(progress.blocks),
        samples=end >= len(job.prompt),
        sampling=job.sampling,
        num_generated=len(progress.output),
    )


def run_alone(runner: RecordingRunner, job: Job) -> Progress:
    """The baseline: the whole prompt at once, then one token after the other, nobody else there."""
    progress = Progress(job)
    needed = -(-(len(job.prompt) + job.num_output) // runner.cache.block_size)
    progress.blocks = list(range(needed))
    while not progress.is_done:
        _step(runner, {0: progress}, [row_of(progress, 0, len(job.prompt))])
    return progress


def run_schedule(runner: RecordingRunner, jobs: Sequence[Job], rng: random.Random, max_rows: int) -> list[Progress]:
    """Run the jobs under one random schedule; returns how each fared."""
    size = runner.cache.block_size
    free = list(range(runner.cache.num_blocks))
    rng.shuffle(free)
    running = {seq_id: Progress(job) for seq_id, job in enumerate(jobs)}
    arrivals = {seq_id: rng.randrange(0, 8) for seq_id in running}
    step = 0
    while not all(p.is_done for p in running.values()):
        live = [i for i, p in running.items() if not p.is_done and arrivals[i] <= step]
        step += 1
        if not live:
            continue
        picked = rng.sample(live, min(len(live), rng.randint(1, max_rows)))
        rows = []
        for seq_id in picked:
            progress = running[seq_id]
            left = len(progress.job.prompt) - progress.computed
            count = rng.randint(1, left) if left > 0 and rng.random() < 0.7 else max(left, 1)
            while len(progress.blocks) * size < progress.computed + count:
                progress.blocks.append(free.pop())
            rows.append(row_of(progress, seq_id, count))
        for seq_id in live:
            progress = running[seq_id]
            if progress.is_in_last_step and seq_id not in picked:
                progress.num_preemptions += 1
            progress.is_in_last_step = seq_id in picked
        _step(runner, running, rows)
        for seq_id in picked:
            if running[seq_id].is_done:
                runner.release(seq_id)
                free.extend(running[seq_id].blocks)
                running[seq_id].blocks = []
                rng.shuffle(free)
    return list(running.values())


def _step(runner: RecordingRunner, running: dict[int, Progress], rows: Sequence[Row]) -> None:
    result = runner.execute(StepPlan(step_id=0, rows=tuple(rows)))
    assert not result.failed, result.failed
    for row in rows:
        progress = running[row.seq_id]
        progress.computed += len(row.token_ids)
        assert (row.seq_id in result.token_ids) == row.samples
        if row.samples:
            progress.output.append(result.token_ids[row.seq_id])
            progress.logits.append(runner.recorded[row.seq_id])


def random_jobs(rng: random.Random, count: int, *, vocab: int, max_prompt: int, max_output: int) -> list[Job]:
    """Jobs of mixed lengths, half greedy, half sampled in different ways."""
    jobs = []
    for _ in range(count):
        length = rng.choice([1, 15, 16, 17, rng.randint(1, max_prompt), rng.randint(1, max_prompt)])
        sampling = rng.choice(
            [
                SamplingParams(temperature=0.0),
                SamplingParams(temperature=0.0),
                SamplingParams(temperature=1.0, seed=rng.randrange(2**32)),
                SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=rng.randrange(2**32)),
            ]
        )
        prompt = tuple(rng.randrange(3, vocab) for _ in range(length))
        jobs.append(Job(prompt=prompt, num_output=rng.randint(2, max_output), sampling=sampling))
    return jobs
