"""The same decoder on CUDA: schedules without batch mix keep their bits, and logits are close to the CPU's."""

from pathlib import Path

import pytest
import torch

from engine.attention import Span
from engine.kv_cache import KVCache
from engine.messages import SamplingParams
from engine.model import Batch, Model
from engine.model_config import read_model_config
from engine.plan import Row, StepPlan
from engine.runner import TorchRunner
from engine.tiny import write_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def load(path: Path, device: torch.device) -> tuple[Model, KVCache]:
    config = read_model_config(path)
    model = Model.load(path, config, dtype=torch.float32, device=device, max_batch_size=8, max_batch_tokens=256)
    return model, KVCache(config, 32, 16, torch.float32, device)


def test_logits_are_close_to_the_cpus(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    ids = list(range(10, 90))
    batch = Batch(ids, (), (Span(0, len(ids), range(5)),), [len(ids) - 1])
    logits = []
    for device in (torch.device("cpu"), torch.device("cuda")):
        model, cache = load(tmp_path, device)
        logits.append(model.forward(batch, cache, model.attention(cache)).cpu())
    assert (logits[0] - logits[1]).abs().max() < 1e-2


def test_a_pause_changes_no_token(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    model, cache = load(tmp_path, torch.device("cuda"))
    runner = TorchRunner(model, cache, eos_token_ids=(2,), num_tokens=512)
    sampling = SamplingParams(temperature=0.8, seed=3)

    def generate(other: bool) -> list[int]:
        prompt, output = list(range(10, 60)), []
        for i in range(10):
            tokens = prompt if i == 0 else [output[-1]]
            row = Row(1, i > 0, 0 if i == 0 else len(prompt) + i - 1, tokens, range(5), True, sampling, i)
            output.append(runner.execute(StepPlan(i, (row,))).token_ids[1])
            if other:
                runner.execute(StepPlan(i, (Row(2, False, 0, prompt[::-1], range(8, 13), True, sampling, 0),)))
        return output

    assert generate(other=True) == generate(other=False)
