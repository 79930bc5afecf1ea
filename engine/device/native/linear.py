"""The decoder's matrix products by the native kernels, where they are at least as fast as oneDNN's.

That is bfloat16 on a processor with AVX512_BF16 and no AMX. Measured on Zen 4 (benchmarks/decode_step.py), they are 1.7
times as fast as oneDNN's at one row, where the weights stream from memory, 1.15 times at 32 rows and 1.04 times at 256.
Each output is one chain of additions whatever the number of rows, so there is nothing to probe and no row is padded.
"""

import torch

from engine.device.native.library import Kernels
from engine.device.weights import GateUp, Layer, Linear, Weights
from engine.models.config import ModelConfig


class NativeLinear(Linear):
    """y = x W^T + b over packed rows, with W in the panels that `Kernels.pack_linear` makes."""

    def __init__(self, kernels: Kernels, plain: Linear, *, wide: bool = False) -> None:
        """Pack a copy of the weight of `plain`, which must not be packed yet. `wide`: outputs in float32."""
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
        """Pack a copy of the weights of `plain`, which must not be packed yet."""
        self.out_features, self.in_features, self.bias = plain.out_features, plain.in_features, plain.gate.bias
        self.is_packed = False
        self.kernels = kernels
        self.weight = kernels.pack_linear(list(plain.gate.weight.chunk(2)))

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, intermediate]"""
        return self.kernels.linear(rows, self.weight, self.bias, self.out_features, gated=True)


def linears_pay(kernels: Kernels | None, dtype: torch.dtype, config: ModelConfig) -> bool:
    """Whether the native kernels should compute the matrix products.

    With AMX oneDNN is faster, and types other than bfloat16 and odd widths have no native kernel.
    """
    has_amx = bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)())  # private to torch; absent counts as no
    is_even = not any(size % 2 for size in (config.hidden_size, config.intermediate_size))
    return kernels is not None and kernels.has_linear and dtype == torch.bfloat16 and is_even and not has_amx


def native_weights(kernels: Kernels, weights: Weights) -> Weights:
    """The same weights with every linear replaced by a native linear.

    The plain linears are freed layer by layer, provided that the caller keeps no reference to `weights`.
    """
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
    # Logits stay in float32: 25.20 and 25.30 would both round to bfloat16's 25.25, and greedy would take the lower id.
    head = NativeLinear(kernels, lm_head, wide=True)
    return Weights(embedding=embedding, layers=tuple(layers), norm=norm, lm_head=head)
