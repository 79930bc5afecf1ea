"""The same decoder on CUDA: schedules without batch mix keep their bits, and logits are close to the CPU's."""

from pathlib import Path

import pytest
import torch

from engine.device.attention import Span
from engine.device.kv_cache import KVCache
from engine.device.kv_canary import KVCanary
from engine.device.model import Batch, Model
from engine.device.runner import TorchRunner
from engine.models.config import read_model_config
from engine.models.tiny import write_tiny_model
from engine.plan import BlockCopy, Row, StepPlan
from engine.wire.messages import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def load(path: Path, device: torch.device) -> tuple[Model, KVCache]:
    config = read_model_config(path)
    model = Model.load(path, config, dtype=torch.float32, device=device, max_batch_size=8, max_batch_tokens=256)
    return model, KVCache(config, 32, 16, torch.float32, device, num_host_blocks=16)


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


@pytest.mark.case("I12")
def test_a_swap_changes_no_token(tmp_path: Path) -> None:
    """Out after every token, back to other blocks, while another sequence writes over the old ones."""
    write_tiny_model(tmp_path)
    model, cache = load(tmp_path, torch.device("cuda"))
    assert cache.host_pool is not None and cache.host_pool.is_pinned()
    runner = TorchRunner(model, cache, eos_token_ids=(2,), num_tokens=512, canary=KVCanary(cache.pool))
    sampling = SamplingParams(temperature=0.8, seed=3)

    def generate(swaps: bool) -> list[int]:
        prompt, output, blocks = list(range(10, 60)), [], [0, 1, 2, 3, 4]
        for i in range(10):
            tokens = prompt if i == 0 else [output[-1]]
            row = Row(1, i > 0, 0 if i == 0 else len(prompt) + i - 1, tokens, blocks, True, sampling, i)
            result = runner.execute(StepPlan(i, (row,)))
            assert not result.failed
            output.append(result.token_ids[1])
            if swaps:
                out = BlockCopy(2 * i, 1, tuple((block, 3 * at) for at, block in enumerate(blocks)))
                assert runner.execute(StepPlan(i, (), (out,))).copies_done == [2 * i]
                stranger = Row(2, False, 0, prompt[::-1], blocks, True, sampling, 0)
                runner.execute(StepPlan(i, (stranger,)))
                blocks = [(block + 5) % 32 for block in blocks]
                into = BlockCopy(2 * i + 1, 1, tuple((3 * at, block) for at, block in enumerate(blocks)))
                result = runner.execute(StepPlan(i, (), (), (into,)))
                assert result.copies_done == [2 * i + 1] and result.copy_us > 0
        return output

    assert generate(swaps=True) == generate(swaps=False)
