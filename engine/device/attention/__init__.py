"""Attention over the paged KV cache: one small interface, one file per backend.

A backend promises that a row's output depends on the row's own sequence alone. It depends neither on the other rows of
the step, nor on how the prompt was cut into chunks, nor on the length of the padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's queries in a step: the positions [start, start + count), and the blocks that hold its KV."""

    start: int
    count: int
    block_table: Sequence[int]

    @property
    def end(self) -> int:
        """The first position after the span. Its queries read the KV of positions [0, end)."""
        return self.start + self.count


class AttentionBackend(Protocol):
    """What the model asks of attention. It calls `plan` once for each step, then `attend` once for each layer."""

    name: str

    def plan(self, decode: Sequence[Span], prefill: Sequence[Span]) -> Any:
        """Indices and masks for a step of decode spans (one token each) and prompt chunks. Only `attend` reads them."""

    def attend(self, layer: int, queries: torch.Tensor, plan: Any) -> torch.Tensor:
        """Outputs [rows, heads, head_dim] for `queries` of the same shape, packed with the decode rows first.

        The caller has already written the step's own keys and values to the cache.
        """
