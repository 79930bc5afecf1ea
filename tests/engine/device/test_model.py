"""The decoder against transformers: each switch of the Llama family on a tiny model, and the text of the real one."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from engine.models.store import SMOLLM2, check_directory, prepare
from engine.models.tiny import write_tiny_model
from engine.plan import StepPlan
from engine.wire.messages import SamplingParams
from tests.support.engine.torch_schedules import Job, Progress, RecordingRunner, make_runner, row_of

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHAPES: dict[str, dict[str, Any]] = {
    "as it ships": {},
    "multi-head": {"num_key_value_heads": 4},
    "one KV head": {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 16},
    "three to one": {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2},
    "explicit head_dim": {"head_dim": 24},
    "no head_dim": {"head_dim": None},
    "untied": {"tie_word_embeddings": False},
    "linear rope": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "llama3 rope": {"rope_scaling": LLAMA3, "rope_theta": 500000.0},
    "rope_parameters": {"rope_parameters": {**LLAMA3, "rope_theta": 500000.0}},
    "attention bias": {"attention_bias": True},
    "mlp bias": {"mlp_bias": True},
    "larger eps": {"rms_norm_eps": 1e-2},
}
PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Explain what a GPU does.",
    "List three colours.",
    "Count from one to ten.",
    "Say hello in Spanish.",
    "What is two plus two?",
    "Tell me a short story about a cat.",
    "Name a planet.",
    "Why is the sky blue?",
    "Write a haiku.",
    "Who wrote Hamlet?",
    "What is a prime number?",
    "Give me a recipe for pancakes.",
    "Describe a tree.",
    "What day comes after Monday?",
    "How do birds fly?",
    "Define gravity.",
    "What is a computer?",
    "Recommend a book.",
)


def transformers_model(path: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    return model.eval()


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("name", SHAPES)
def test_logits_equal_transformers(name: str, native: bool, tmp_path: Path) -> None:
    """Packed and plain linears, with and without native kernels."""
    overrides = dict(SHAPES[name])
    write_tiny_model(tmp_path, **overrides)
    check_directory(tmp_path)
    ids = [(7 * i) % 500 + 3 for i in range(150)]
    with torch.inference_mode():
        expected = transformers_model(tmp_path)(torch.tensor([ids])).logits[0]
    for pack in (True, False):
        runner = make_runner(tmp_path, torch.float32, pack=pack, native=native)
        check_logits(runner, ids, expected)


def check_logits(runner: RecordingRunner, ids: list[int], expected: torch.Tensor) -> None:
    job = Job(tuple(ids), 1, SamplingParams(temperature=0.0))
    progress = Progress(job, blocks=list(range(12)))
    for stop in (1, 17, 100, 149):  # one row is compared at the end of each chunk
        row = row_of(progress, 0, stop - progress.computed)
        got = runner.logits([msgspec.structs.replace(row, samples=True)])[0]
        progress.computed = stop
        assert (got - expected[stop - 1]).abs().max() <= 1e-4
    # The last token as a decode row.
    progress.output = [ids[149]]
    progress.job = Job(tuple(ids[:149]), 2, job.sampling)
    got = runner.logits([row_of(progress, 0, 1)])[0]
    assert (got - expected[149]).abs().max() <= 1e-4


def test_a_sharded_checkpoint_loads_the_same(tmp_path: Path) -> None:
    """transformers writes the shards, so its own names and index are what is read."""
    whole, sharded = tmp_path / "whole", tmp_path / "sharded"
    whole.mkdir()
    write_tiny_model(whole)
    transformers_model(whole).save_pretrained(sharded, max_shard_size="200KB")
    (sharded / "tokenizer.json").write_bytes((whole / "tokenizer.json").read_bytes())
    assert len(list(sharded.glob("*.safetensors"))) > 1
    check_directory(sharded)
    ids = tuple(range(3, 60))
    job = Job(ids, 1, SamplingParams(temperature=0.0))
    logits = [
        make_runner(path, torch.float32).logits([row_of(Progress(job, blocks=[0, 1, 2, 3]), 0, 100)])
        for path in (whole, sharded)
    ]
    assert torch.equal(*logits)


def greedy(runner: RecordingRunner, prompts: list[list[int]], num_output: int) -> list[list[int]]:
    """All prompts together, greedy and without stopping at eos."""
    jobs = [Job(tuple(p), num_output, SamplingParams(temperature=0.0, ignore_eos=True)) for p in prompts]
    size = runner.cache.block_size
    batch: dict[int, Progress] = {}
    next_block = 0
    for seq_id, job in enumerate(jobs):
        count = -(-(len(job.prompt) + num_output) // size)
        batch[seq_id] = Progress(job, blocks=list(range(next_block, next_block + count)))
        next_block += count
    for _ in range(num_output):
        rows = tuple(row_of(progress, seq_id, 10_000) for seq_id, progress in batch.items())
        result = runner.execute(StepPlan(step_id=0, rows=rows))
        assert not result.failed
        for row in rows:
            batch[row.seq_id].computed += len(row.token_ids)
            batch[row.seq_id].output.append(result.token_ids[row.seq_id])
    return [progress.output for progress in batch.values()]


def check_greedy(prompts: tuple[str, ...], num_output: int, *, native: bool) -> None:
    """Equal to transformers; at a first difference its two best logits must have been a tie within 1e-3."""
    stored = prepare(SMOLLM2)
    tokenizer = Tokenizer.from_file(str(stored.path / "tokenizer.json"))
    encoded = [
        tokenizer.encode(f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n").ids for prompt in prompts
    ]
    runner = make_runner(
        stored.path, torch.float32, num_blocks=len(prompts) * 8, max_batch_size=len(prompts), native=native
    )
    ours = greedy(runner, encoded, num_output)
    model = transformers_model(stored.path)
    with torch.inference_mode():
        for prompt, output in zip(encoded, ours, strict=True):
            # One forced pass gives transformers' choice at every position, given the same earlier tokens.
            logits = model(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
            for i, token_id in enumerate(output):
                best = logits[i].topk(2)
                if int(best.indices[0]) != token_id:
                    assert token_id == int(best.indices[1])
                    assert float(best.values[0] - best.values[1]) < 1e-3
                    break  # from here on the two texts are different ones


@pytest.mark.real_model
@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
def test_greedy_text_of_the_real_model_equals_transformers(native: bool) -> None:
    check_greedy(PROMPTS[:8], 64, native=native)


@pytest.mark.real_model
@pytest.mark.slow
def test_on_twenty_prompts_greedy_text_equals_transformers() -> None:
    check_greedy(PROMPTS, 64, native=True)
