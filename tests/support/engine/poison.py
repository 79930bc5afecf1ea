"""Rows that raise: by a token in what they feed, or by their seed when they are sampled. Nothing else can tell them."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from engine.device import runner as runner_module
from engine.device.model import Batch
from engine.device.sampler import Draw, sample

POISON_TOKEN = 500  # in the vocabulary of the tiny model; no prompt of the tests has it
POISON_SEED = 666_000_666

RAISED: tuple[Callable[[], Exception], ...] = (
    lambda: RuntimeError("a torch error\nwith more lines"),
    lambda: RuntimeError(),
    lambda: IndexError("index out of range"),
    lambda: ValueError("value"),
    lambda: KeyError("key"),
    lambda: ZeroDivisionError("float division by zero"),
    lambda: OverflowError("int too large to convert to float"),
    lambda: MemoryError(),
    lambda: RecursionError("maximum recursion depth exceeded"),
    lambda: NotImplementedError("no kernel"),
    lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    lambda: torch.linalg.LinAlgError("linalg"),
    lambda: SystemError(),
)


class Poison:
    """Makes one runner's model and the sampler raise for poisoned rows; `is_broken` for all rows. Counts attempts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: Any, make: Callable[[], BaseException]) -> None:
        self.num_forwards = 0
        self.is_broken = False
        self.is_on = True
        self.token = POISON_TOKEN
        self._make = make
        self._forward = model.forward
        monkeypatch.setattr(model, "forward", self.forward)
        monkeypatch.setattr(runner_module, "sample", self.sample)

    def forward(self, batch: Batch, *args: Any) -> torch.Tensor:
        self.num_forwards += 1
        if self.is_broken:
            raise self._make()
        logits: torch.Tensor = self._forward(batch, *args)  # what a failed attempt has written by then is written again
        if self.is_on and self.token in batch.token_ids:
            raise self._make()
        return logits

    def sample(self, logits: torch.Tensor, draws: Sequence[Draw], num_tokens: int) -> tuple[list[int], list[str]]:
        if self.is_on and any(draw.sampling.seed == POISON_SEED for draw in draws):
            raise self._make()
        return sample(logits, draws, num_tokens)
