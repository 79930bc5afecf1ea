"""Load a checked model directory into the tensors the decoder computes with: fused, cast, on the device.

Q, K and V are fused here, once. On a CPU the linears are also packed into oneDNN's layout, which makes them 1.2 to 2
times as fast. The packing operators are private to torch, so each shape is first compared with F.linear. A shape that
does not agree keeps F.linear.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch.nn import functional as F

from engine.models.config import ModelConfig
from engine.models.store import ModelStoreError, weight_files

logger = logging.getLogger(__name__)

PACK_BATCH_HINT = 8  # the number of rows for which oneDNN picks its packed layout
ELEMENTWISE_GRAIN = 32768  # at::internal::GRAIN_SIZE: smaller tensors are not split between threads


class Linear:
    """y = x W^T + b over packed rows, with W in oneDNN's layout where that works."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, is_packed: bool = False) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.is_packed = is_packed
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_BATCH_HINT) if is_packed else weight

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, in] -> [rows, out]"""
        if self.is_packed:
            packed: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")
            return packed
        return F.linear(rows, self.weight, self.bias)


class GateUp:
    """silu(x Wg^T) * (x Wu^T) over packed rows: the first half of the MLP.

    Packed, there are two matrix products with activation and multiplication inside, as fast as one fused product.

    Plain, there is one fused product, and torch's silu needs care: it rounds differently in the last few elements of
    the vector that one thread works on. Two things keep these elements the same in every row. The gate is a strided
    view, so a vector is a row. And the rows are cut into tensors below torch's grain size, which are not split between
    threads.
    """

    def __init__(self, gate: torch.Tensor, up: torch.Tensor, *, is_packed: bool, **biases: torch.Tensor | None) -> None:
        """`biases` are gate_bias and up_bias, both or neither. The weights are [intermediate, hidden]."""
        gate_bias, up_bias = biases.get("gate_bias"), biases.get("up_bias")
        self.is_packed = is_packed
        self.out_features, self.in_features = gate.shape
        if is_packed:
            self.gate, self.up = Linear(gate, gate_bias, is_packed=True), Linear(up, up_bias, is_packed=True)
        else:
            bias = None if gate_bias is None or up_bias is None else torch.cat([gate_bias, up_bias])
            self.gate = self.up = Linear(torch.cat([gate, up]), bias)
        self._tile = max(1, (ELEMENTWISE_GRAIN - 1) // self.out_features)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, intermediate]"""
        if self.is_packed:
            gate = torch.ops.mkldnn._linear_pointwise(rows, self.gate.weight, self.gate.bias, "swish", [], "")
            fused: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(
                rows, gate, self.up.weight, self.up.bias, "mul"
            )
            return fused
        gate, up = self.gate(rows).chunk(2, dim=-1)
        return torch.cat([F.silu(part) for part in gate.split(self._tile)]).mul_(up)


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one decoder layer."""

    input_norm: torch.Tensor
    qkv: Linear
    output: Linear
    post_norm: torch.Tensor
    gate_up: GateUp
    down: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a whole decoder."""

    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    lm_head: Linear


def load_weights(
    path: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, *, pack: bool = True
) -> Weights:
    """Read every tensor of the directory. `pack` allows oneDNN's layout on a CPU.

    Raises ModelStoreError when a tensor is missing, cannot be read or has the wrong shape.
    """
    tensors = _read_tensors(path, config, dtype, device)
    can_pack = pack and device.type == "cpu"
    checked: dict[torch.Size, bool] = {}

    def may_pack(weight: torch.Tensor) -> bool:
        if can_pack and weight.shape not in checked:
            checked[weight.shape] = packing_works(weight)
        return checked.get(weight.shape, False)

    def take(name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A linear's weight and bias, removed from `tensors` so that they are freed once fused or packed.

        The embedding stays, since tied models use it twice.
        """
        if name == "model.embed_tokens":
            return tensors[f"{name}.weight"], None
        return tensors.pop(f"{name}.weight"), tensors.pop(f"{name}.bias", None)

    def linear(*names: str) -> Linear:
        weights, biases = zip(*map(take, names), strict=True)
        weight = weights[0] if len(names) == 1 else torch.cat(weights)
        present = [bias for bias in biases if bias is not None]
        return Linear(weight, torch.cat(present) if present else None, is_packed=may_pack(weight))

    def gate_up(mlp: str) -> GateUp:
        (gate, gate_bias), (up, up_bias) = take(mlp + "gate_proj"), take(mlp + "up_proj")
        return GateUp(gate, up, is_packed=may_pack(gate), gate_bias=gate_bias, up_bias=up_bias)

    layers = []
    for i in range(config.num_layers):
        attention, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        layers.append(
            Layer(
                input_norm=tensors[f"model.layers.{i}.input_layernorm.weight"],
                qkv=linear(attention + "q_proj", attention + "k_proj", attention + "v_proj"),
                output=linear(attention + "o_proj"),
                post_norm=tensors[f"model.layers.{i}.post_attention_layernorm.weight"],
                gate_up=gate_up(mlp),
                down=linear(mlp + "down_proj"),
            )
        )
    return Weights(
        embedding=tensors["model.embed_tokens.weight"],
        layers=tuple(layers),
        norm=tensors["model.norm.weight"],
        lm_head=linear("model.embed_tokens" if config.is_tied else "lm_head"),
    )


def packing_works(weight: torch.Tensor) -> bool:
    """Whether torch can pack this weight, and the packed linear agrees with F.linear up to rounding."""
    rows = torch.randn((4, weight.shape[1]), generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    try:
        packed = Linear(weight, is_packed=True)(rows)
    except (RuntimeError, AttributeError) as error:
        logger.info("packed linears are not available here: %s", error)
        return False
    plain = F.linear(rows, weight)
    tolerance = (2e-2 if weight.dtype == torch.bfloat16 else 1e-4) * float(plain.abs().max())
    return bool((packed.float() - plain.float()).abs().max() <= tolerance)


def _read_tensors(path: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    expected: Mapping[str, tuple[int, ...]] = config.tensor_shapes()
    tensors: dict[str, torch.Tensor] = {}
    try:
        for file in weight_files(path):
            with safe_open(str(file), framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    if name in expected:
                        tensors[name] = opened.get_tensor(name).to(device=device, dtype=dtype)
    except (OSError, SafetensorError) as error:
        raise ModelStoreError(f"weights of {path} cannot be read: {error}; fetch the model again") from None
    for name, shape in expected.items():
        if name not in tensors or tuple(tensors[name].shape) != shape:
            raise ModelStoreError(f"{path}: tensor {name} is missing or not of shape {shape}; fetch the model again")
    return tensors
