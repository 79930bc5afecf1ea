"""A copy engine that copies as late and as badly as the interface allows, so that any missing fence shows as NaN.

A copy really happens at a random later poll. Until then its destinations hold NaN, and once a copy out is over its
sources do: whoever reads a block too early, gives one away too early or writes one too early, changes tokens.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.device.copy_engine import check, copy_blocks
from engine.plan import BlockCopy


@dataclass(frozen=True)
class _Pending:
    due: int  # the poll that finds it over
    copy: BlockCopy
    source: torch.Tensor
    destination: torch.Tensor
    frees_source: bool


class ChaosCopy:
    """See `engine.device.copy_engine.CopyEngine`. `is_fenced` False is the fault: ids are named before the copies
    happen.
    """

    def __init__(
        self,
        device_pool: torch.Tensor,
        host_pool: torch.Tensor,
        rng: random.Random,
        *,
        max_delay: int = 4,
        is_fenced: bool = True,
    ) -> None:
        self._device, self._host = device_pool, host_pool
        self._rng, self._max_delay, self._is_fenced = rng, max_delay, is_fenced
        self._polls = 0
        self._pending: list[_Pending] = []
        self._told_early: list[int] = []
        self.num_late = 0  # copies that were still in flight when a step ran

    def start(self, out: Sequence[BlockCopy], into: Sequence[BlockCopy]) -> None:
        check(out, into, self._device.shape[0], self._host.shape[0])
        for copies, source, destination in ((out, self._device, self._host), (into, self._host, self._device)):
            for copy in copies:
                destination[[block for _, block in copy.pairs]] = math.nan
                due = self._polls + 1 + self._rng.randint(0, self._max_delay)
                self._pending.append(_Pending(due, copy, source, destination, copies is out))
                if not self._is_fenced:
                    self._told_early.append(copy.copy_id)

    def poll(self) -> list[int]:
        self._polls += 1
        over = [pending for pending in self._pending if pending.due <= self._polls]
        self._pending = [pending for pending in self._pending if pending.due > self._polls]
        self.num_late += len(self._pending)
        self._rng.shuffle(over)
        for pending in over:
            copy_blocks(pending.source, pending.destination, pending.copy.pairs)
            if pending.frees_source:
                pending.source[[block for block, _ in pending.copy.pairs]] = math.nan
        if self._device.is_cuda:
            torch.cuda.synchronize()
        if not self._is_fenced:
            told, self._told_early = self._told_early, []
            return told
        return [pending.copy.copy_id for pending in over]

    def wait(self) -> None:
        if self._pending:
            self._polls = max(self._polls, min(pending.due for pending in self._pending) - 1)
