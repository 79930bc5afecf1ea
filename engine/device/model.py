"""A generic Llama decoder over packed rows: one forward pass serves decode rows and prompt chunks of many sequences.

Rows are `[tokens, hidden]`, decode rows first. A row's logits are a function of its own sequence alone, because:

* every row-wise function goes through its row classes;
* rotary positions use separate multiplications and additions, since fused ones may round differently at the end of a
  vector;
* attention keeps sequences apart.

Where native kernels are loaded, they compute the norms, rotary positions and attention. In bfloat16 they can compute
the matrix products too (`engine.device.native.linear`).
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

from engine.device.attention import AttentionBackend, Span
from engine.device.attention.gather_sdpa import GatherSdpa
from engine.device.attention.paged_native import PagedNative
from engine.device.kv_cache import KVCache
from engine.device.native.library import Kernels
from engine.device.native.linear import NativeGateUp, NativeLinear, linears_pay, native_weights
from engine.device.row_classes import (
    UNBOUND_CLASSES,
    RowClasses,
    RowFn,
    cancelling,
    decode_counts,
    prefill_counts,
    probe,
)
from engine.device.weights import GateUp, Linear, Weights, load_weights
from engine.models.config import ModelConfig, rope_inverse_frequencies

logger = logging.getLogger(__name__)

# layer, qkv [rows, (heads + 2 kv_heads) * head_dim] -> [rows, heads * head_dim]
AttendFn = Callable[[int, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Batch:
    """The packed rows of one forward pass, decode rows first."""

    token_ids: list[int]
    decode: tuple[Span, ...]
    prefill: tuple[Span, ...]
    sample_rows: list[int]  # indices of the rows whose logits are wanted


class Model:
    """Weights, rotary tables and row classes of one decoder. Holds no sequence state."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        max_batch_size: int,
        max_batch_tokens: int,
        device: torch.device,
        kernels: Kernels | None = None,
    ) -> None:
        """`kernels` are compiled for this CPU; with None torch computes everything. Probes the row classes."""
        self.config = config
        self.weights = weights
        self.kernels = kernels
        self.dtype, self.device = weights.embedding.dtype, device
        self._set_rotary_tables()
        self.classes = self._probe(max_batch_size, max_batch_tokens)

    @classmethod
    def load(
        cls,
        path: Path,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_batch_size: int,
        max_batch_tokens: int,
        pack: bool = True,
        kernels: Kernels | None = None,
    ) -> "Model":
        """Read a checked model directory. With `pack`, linears are brought into their fastest layout.

        Raises ModelStoreError when the weights cannot be read.
        """
        is_native = pack and linears_pay(kernels, dtype, config)
        weights = load_weights(path, config, dtype, device, pack=pack and not is_native)
        return cls(
            config,
            native_weights(kernels, weights) if is_native and kernels is not None else weights,
            max_batch_size=max_batch_size,
            max_batch_tokens=max_batch_tokens,
            device=device,
            kernels=kernels,
        )

    def attention(self, cache: KVCache) -> AttentionBackend:
        """The attention backend for this model on its device. Logs its name."""
        backend: AttentionBackend = (
            GatherSdpa(self.config, cache)
            if self.kernels is None
            else PagedNative(self.config, cache, self.kernels, self._cos, self._sin)
        )
        logger.info("attention backend: %s", backend.name)
        return backend

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KVCache, attention: AttentionBackend) -> torch.Tensor:
        """Logits [len(sample_rows), vocab] in the dtype that lm_head returns. Writes the KV of every row to `cache`."""
        num_decode = len(batch.decode)
        attend = self._attend_fn(batch, cache, attention)
        x = self.weights.embedding[torch.tensor(batch.token_ids, device=self.device)]
        delta: torch.Tensor | None = None  # what the latest layer adds to x; the next norm adds it
        for i, layer in enumerate(self.weights.layers):
            x, normed = self._add_norm(x, delta, layer.input_norm, num_decode)
            attended = attend(i, self._run("qkv", layer.qkv, normed, num_decode))
            x, normed = self._add_norm(
                x, self._run("output", layer.output, attended, num_decode), layer.post_norm, num_decode
            )
            gate_up = self._run("gate_up", layer.gate_up, normed, num_decode)
            delta = self._run("down", layer.down, gate_up, num_decode)
        count = len(batch.sample_rows)
        if not count:
            return x.new_zeros((0, self.config.vocab_size))
        sampled = torch.tensor(batch.sample_rows, device=self.device)
        # All sampled rows run in the decode class, whether they end a prompt or not.
        _, normed = self._add_norm(x[sampled], None if delta is None else delta[sampled], self.weights.norm, count)
        return self._run("lm_head", self.weights.lm_head, normed, count)

    def _attend_fn(self, batch: Batch, cache: KVCache, attention: AttentionBackend) -> AttendFn:
        """Rotary positions, KV write and attention of this step."""
        plan = attention.plan(batch.decode, batch.prefill)
        if isinstance(attention, PagedNative):
            native = attention
            return lambda layer, qkv: native.attend_fused(layer, qkv, plan)
        spans = (*batch.decode, *batch.prefill)
        slots, fresh = _slots(spans, cache.block_size)
        if fresh:
            cache.clear(torch.tensor(fresh, device=self.device))
        token_index = cache.token_index(torch.tensor(slots, device=self.device))
        positions = torch.tensor([p for s in spans for p in range(s.start, s.end)], device=self.device)
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)
        num_heads, turned = self.config.num_heads, self.config.num_heads + self.config.num_kv_heads

        def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            heads = qkv.view(qkv.shape[0], -1, self.config.head_dim)
            rotated = rotate(heads[:, :turned], cos, sin)
            cache.write(layer, token_index, rotated[:, num_heads:], heads[:, turned:])
            return attention.attend(layer, rotated[:, :num_heads], plan).flatten(1)

        return attend

    def _add_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, num_decode: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x + delta, and the norm of that sum. May change `x` in place."""
        if self.kernels is not None:
            return x, self.kernels.add_norm(x, delta, weight, self.config.rms_norm_eps)
        x = x if delta is None else x + delta
        return x, self._run("norm", self._norm(weight), x, num_decode)

    def _run(self, name: str, fn: RowFn, rows: torch.Tensor, num_decode: int) -> torch.Tensor:
        return self.classes[name].run(fn, rows, num_decode)

    def _norm(self, weight: torch.Tensor) -> RowFn:
        return lambda rows: F.rms_norm(rows, (rows.shape[-1],), weight, self.config.rms_norm_eps)

    def _set_rotary_tables(self) -> None:
        frequencies = torch.tensor(rope_inverse_frequencies(self.config), dtype=torch.float32)
        angles = torch.arange(self.config.context_len, dtype=torch.float32).unsqueeze(1) * frequencies
        # [context, head_dim]: the sine carries the sign of the rotated half.
        self._cos = torch.cat([angles.cos(), angles.cos()], dim=-1).to(self.device)
        self._sin = torch.cat([-angles.sin(), angles.sin()], dim=-1).to(self.device)

    @torch.inference_mode()
    def _probe(self, max_batch_size: int, max_batch_tokens: int) -> dict[str, RowClasses]:
        """Row classes by function name. Libraries choose a kernel by shape, so the first layer stands for all."""
        config, layer = self.config, self.weights.layers[0]
        decode, prefill = decode_counts(max_batch_size), prefill_counts(max_batch_tokens)
        rows = max(decode[-1], prefill[-1])
        sample = torch.randn((rows, config.hidden_size), generator=torch.Generator().manual_seed(0))
        classes = {
            "norm": probe("norm", self._norm(layer.input_norm), sample.to(self.device, self.dtype), decode, prefill)
        }
        for name, linear, counts in (
            ("qkv", layer.qkv, prefill),
            ("output", layer.output, prefill),
            ("gate_up", layer.gate_up, prefill),
            ("down", layer.down, prefill),
            ("lm_head", self.weights.lm_head, ()),
        ):
            if isinstance(linear, NativeLinear | NativeGateUp):
                classes[name] = UNBOUND_CLASSES
                continue
            inputs, weight = cancelling(linear.in_features, linear.out_features, max([*decode, *counts]))
            inputs, weight = inputs.to(self.device, self.dtype), weight.to(self.device, self.dtype)
            # The probe leaves biases out: a bias is added once, to the finished sum.
            twin: RowFn = (
                GateUp(weight, weight.flip(0), is_packed=linear.is_packed)
                if isinstance(linear, GateUp)
                else Linear(weight, is_packed=linear.is_packed)
            )
            classes[name] = probe(name, twin, inputs, decode, counts)
        return classes


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of [tokens, heads, head_dim] in float32, returned in the input's dtype."""
    wide = heads.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos).add_(torch.cat([second, first], dim=-1).mul_(sin)).to(heads.dtype)


def _slots(spans: Sequence[Span], block_size: int) -> tuple[list[int], list[int]]:
    """Cache slots of the spans' tokens, and the blocks that get their first token in this step."""
    slots: list[int] = []
    fresh: list[int] = []
    for span in spans:
        for position in range(span.start, span.end):
            block = span.block_table[position // block_size]
            if position % block_size == 0:
                fresh.append(block)
            slots.append(block * block_size + position % block_size)
    return slots, fresh
