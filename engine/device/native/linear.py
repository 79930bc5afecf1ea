"""The decoder's matrix products by the native kernels, where they are at least as fast as oneDNN's.

That is bfloat16 on a processor with AVX512_BF16 and no AMX: measured on Zen 4 (benchmarks/decode_step.py), 1.7x at one
row, where the weights stream from memory, 1.15x at 32 and 1.04x at 256. Each output is one chain of additions whatever
the number of rows, so there is nothing to probe and no row is ever padded.
"""

import torch

from engine.device.native.library import Kernels
from engine.device.weights import GateUp, Layer, Linear, Weights
from engine.models.config import ModelConfig


class NativeLinear(Linear):
    """y = x W^T + b over packed rows, with W in panels (terazi_pack_linear)."""

    def __init__(self, kernels: Kernels, plain: Linear, *, wide: bool = False) -> None:
        """Packs a copy of the weight of `plain`, which is not packed yet. `wide`: outputs in float32."""
        self.wide = wide
        self.out_features, self.in_features, self.bias = plain.out_features, plain.in_features, plain.bias
        self.is_packed = False  # not in oneDNN's layout
        self.kernels = kernels
        self.weight = kernels.pack_linear([plain.weight])

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, in] -> [rows, out]"""
        return self.kernels.linear(rows, self.weight, self.bias, self.out_features, wide=self.wide)


class NativeGateUp(GateUp):
    """silu(x Wg^T) * (x Wu^T) over packed rows, in one pass over both weights."""

    def __init__(self, kernels: Kernels, plain: GateUp) -> None:
        """Packs a copy of the weights of `plain`, which is not packed yet."""
        self.out_features, self.in_features, self.bias = plain.out_features, plain.in_features, plain.gate.bias
        self.is_packed = False
        self.kernels = kernels
        self.weight = kernels.pack_linear(list(plain.gate.weight.chunk(2)))

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, intermediate]"""
        return self.kernels.linear(rows, self.weight, self.bias, self.out_features, gated=True)


def linears_pay(kernels: Kernels | None, dtype: torch.dtype, config: ModelConfig) -> bool:
    """Whether matrix products should be native: oneDNN's AMX kernels are faster, and other types have no kernel."""
    has_amx = bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)())  # private: a missing one counts as no
    is_even = not any(size % 2 for size in (config.hidden_size, config.intermediate_size))
    return kernels is not None and kernels.has_linear and dtype == torch.bfloat16 and is_even and not has_amx


def native_weights(kernels: Kernels, weights: Weights) -> Weights:
    """The same weights with every linear replaced. Frees the plain ones layer by layer if the caller holds none."""
    layers, embedding, norm, lm_head = list(weights.layers), weights.embedding, weights.norm, weights.lm_head
    del weights
    for i, layer in enumerate(layers):
        layers[i] = Layer(
            input_norm=layer.input_norm,
            qkv=NativeLinear(kernels, layer.qkv),
            output=NativeLinear(kernels, layer.output),
            post_norm=layer.post_norm,
            gate_up=NativeGateUp(kernels, layer.gate_up),
            down=NativeLinear(kernels, layer.down),
        )
        del layer
    # Logits of 25.26 and 25.36 round to one bfloat16, and a greedy choice between them would be the lower id.
    head = NativeLinear(kernels, lm_head, wide=True)
    return Weights(embedding=embedding, layers=tuple(layers), norm=norm, lm_head=head)
