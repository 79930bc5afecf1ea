"""The real engine process, but for rows that raise.

It is started as `python -m tests.support.engine.poisoned_engine`, in the place of `engine.process.loop`. A
prompt with the ids 500, 499 side by side raises in the model, the seed POISON_SEED in the sampler.
"""

import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from engine.device import runner
from engine.device.model import Batch, Model
from engine.device.sampler import Draw, sample
from engine.process import loop as service
from tests.support.engine.poison import POISON_SEED, POISON_TOKEN

POISON_PROMPT = (POISON_TOKEN, POISON_TOKEN - 1)


def poisoned_forward(self: Model, batch: Batch, *args: Any) -> torch.Tensor:
    if POISON_PROMPT in pairwise(batch.token_ids):
        raise IndexError("index 512 is out of bounds for dimension 0 with size 512")
    return _forward(self, batch, *args)


def poisoned_sample(logits: torch.Tensor, draws: Sequence[Draw], num_tokens: int) -> tuple[list[int], list[str]]:
    if any(draw.sampling.seed == POISON_SEED for draw in draws):
        raise ZeroDivisionError("float division by zero")
    return sample(logits, draws, num_tokens)


_forward = Model.forward

if __name__ == "__main__":
    Model.forward = poisoned_forward  # type: ignore[method-assign]
    runner.sample = poisoned_sample  # type: ignore[attr-defined]
    sys.exit(service.main())
