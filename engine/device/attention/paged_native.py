"""Attention straight from the paged KV pool by compiled kernels: no gather, no padding to the longest row.

The kernels (`engine/device/native/kernels.c`) walk each row's own context in key tiles at absolute positions, so rows
are independent by construction. They never read a slot past a sequence's end, so blocks need not be cleared for a new
owner. One call does rotary positions, KV write and attention of a layer (`attend_fused`).
"""

from collections.abc import Sequence

import torch

from engine.device.attention import Span
from engine.device.kv_cache import KVCache
from engine.device.native.library import Kernels, Piece, StepArguments, step_arguments
from engine.models.config import ModelConfig


class PagedNative:
    """The attention backend for CPUs, where a C compiler is installed."""

    name = "paged-native"

    def __init__(
        self, config: ModelConfig, cache: KVCache, kernels: Kernels, cos: torch.Tensor, sin: torch.Tensor
    ) -> None:
        """`cos`, `sin`: rotary tables [context, head_dim] in float32, the sine's first half negated."""
        self.cache, self.kernels = cache, kernels
        self.heads, self.head_dim = config.num_heads, config.head_dim
        self._cos, self._sin = cos.contiguous(), sin.contiguous()

    def plan(self, decode: Sequence[Span], prefill: Sequence[Span]) -> StepArguments:
        """See AttentionBackend.plan."""
        pieces = [Piece(span.start, span.count, span.block_table) for span in (*decode, *prefill)]
        return step_arguments(pieces, pool=self.cache.pool, cos=self._cos, sin=self._sin, heads=self.heads)

    def attend(self, layer: int, queries: torch.Tensor, plan: StepArguments) -> torch.Tensor:
        """See AttentionBackend.attend."""
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        self.kernels.attend(plan, layer, queries.flatten(1), out)
        return out

    def attend_fused(self, layer: int, qkv: torch.Tensor, plan: StepArguments) -> torch.Tensor:
        """Outputs [rows, heads * head_dim] of one layer. `qkv` is [rows, (heads + 2 kv_heads) * head_dim], not rotated.

        Rotates the queries in place, and writes the step's rotated keys and its values to the cache.
        """
        self.kernels.rotate_write(plan, layer, qkv)
        out = qkv.new_empty((qkv.shape[0], self.heads * self.head_dim))
        self.kernels.attend(plan, layer, qkv, out)
        return out
