"""Load a checked model directory into the tensors the decoder computes with: fused, cast, on the device.

QKV and gate+up are fused here, once. On a CPU the linears are also packed into the layout oneDNN computes in, which saves
1.2 to 2x of every step; those operators are private to torch, so each shape is tried against F.linear first and falls
back to it.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch.nn import functional as F

from engine.model_config import ModelConfig
from engine.model_store import ModelStoreError, weight_files

logger = logging.getLogger(__name__)

PACK_BATCH_HINT = 8  # oneDNN picks the packed layout for about this many rows


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


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer."""

    input_norm: torch.Tensor
    qkv: Linear
    output: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    """A whole decoder."""

    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    lm_head: Linear


def load_weights(
    path: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, *, pack: bool = True
) -> Weights:
    """Read every tensor of the directory. Raises ModelStoreError when one cannot be read or has the wrong shape."""
    tensors = _read_tensors(path, config, dtype, device)
    can_pack = pack and device.type == "cpu"
    checked: dict[tuple[int, ...], bool] = {}

    def linear(*names: str) -> Linear:
        weight = (
            torch.cat([tensors.pop(f"{name}.weight") for name in names])
            if len(names) > 1
            else tensors[f"{names[0]}.weight"]
        )
        biases = [tensors.pop(f"{name}.bias") for name in names if f"{name}.bias" in tensors]
        bias = torch.cat(biases) if biases else None
        shape = tuple(weight.shape)
        if can_pack and shape not in checked:
            checked[shape] = packing_works(weight)
        return Linear(weight, bias, is_packed=checked.get(shape, False))

    layers = []
    for i in range(config.num_layers):
        attention, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        layers.append(
            Layer(
                input_norm=tensors[f"model.layers.{i}.input_layernorm.weight"],
                qkv=linear(attention + "q_proj", attention + "k_proj", attention + "v_proj"),
                output=linear(attention + "o_proj"),
                post_norm=tensors[f"model.layers.{i}.post_attention_layernorm.weight"],
                gate_up=linear(mlp + "gate_proj", mlp + "up_proj"),
                down=linear(mlp + "down_proj"),
            )
        )
        for name in (attention + "o_proj", mlp + "down_proj"):
            del tensors[f"{name}.weight"]
    return Weights(
        embedding=tensors["model.embed_tokens.weight"],
        layers=tuple(layers),
        norm=tensors["model.norm.weight"],
        lm_head=linear("model.embed_tokens" if config.is_tied else "lm_head"),
    )


def packing_works(weight: torch.Tensor) -> bool:
    """Whether the packed linear exists for this weight and agrees with F.linear."""
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
