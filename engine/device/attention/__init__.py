"""Attention over the paged KV cache: one small interface, one file per backend.

A backend promises that a row's output depends only on its own sequence: not on the other rows of the step, not on how
its prompt was cut into chunks, not on how far padding reaches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's queries in a step: positions [start, start + count), and the blocks that hold its KV."""

    start: int
    count: int
    block_table: Sequence[int]

    @property
    def end(self) -> int:
        """The first position after the span; KV of [0, end) is read."""
        return self.start + self.count


class AttentionBackend(Protocol):
    """`plan` once per step, `attend` once per layer."""

    name: str

    def plan(self, decode: Sequence[Span], prefill: Sequence[Span]) -> Any:
        """Indices and masks of a step: decode spans of one token each, then prompt chunks. Opaque to the caller."""

    def attend(self, layer: int, queries: torch.Tensor, plan: Any) -> torch.Tensor:
        """Outputs [rows, heads, head_dim] for `queries` of the same shape, packed decode rows first.

        The step's own keys and values are in the cache already.
        """
