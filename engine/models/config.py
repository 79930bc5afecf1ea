"""What a model directory says of itself: `config.json` as one frozen value. Imports nothing but the standard library.

Only the Llama architecture is known: Llama 1 to 3.x, SmolLM2 and their derivatives. An absent key gets the default of
transformers' LlamaConfig. The rotary positions are read from `rope_parameters`, or from the older `rope_theta` and
`rope_scaling`.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KNOWN_ARCHITECTURES = ("LlamaForCausalLM",)


class ModelConfigError(ValueError):
    """`config.json` is missing, unreadable, or asks for what this engine cannot compute. The message is one line."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How the frequencies of rotary positions are scaled. `kind` is default, linear or llama3, as in transformers."""

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_len: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of one decoder."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_len: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    is_tied: bool  # lm_head is the embedding
    has_attention_bias: bool
    has_mlp_bias: bool
    eos_token_ids: tuple[int, ...]

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes that one token's keys and values take over all layers, with elements of `element_bytes` bytes."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_bytes

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor that a checkpoint of this model must hold, by its Hugging Face name."""
        hidden, q, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for i in range(self.num_layers):
            layer = f"model.layers.{i}."
            attention = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
            mlp = {
                "gate_proj": (self.intermediate_size, hidden),
                "up_proj": (self.intermediate_size, hidden),
                "down_proj": (hidden, self.intermediate_size),
            }
            for part, linears, has_bias in (
                ("self_attn", attention, self.has_attention_bias),
                ("mlp", mlp, self.has_mlp_bias),
            ):
                for name, shape in linears.items():
                    shapes[f"{layer}{part}.{name}.weight"] = shape
                    if has_bias:
                        shapes[f"{layer}{part}.{name}.bias"] = shape[:1]
            shapes[f"{layer}input_layernorm.weight"] = (hidden,)
            shapes[f"{layer}post_attention_layernorm.weight"] = (hidden,)
        shapes["model.norm.weight"] = (hidden,)
        if not self.is_tied:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes


def read_model_config(directory: Path) -> ModelConfig:
    """Read `config.json`, and more end-of-sequence ids from `generation_config.json`. Raises ModelConfigError."""
    path = directory / "config.json"
    document = _read_json(path)
    eos = _token_ids(document.get("eos_token_id"))
    generation = directory / "generation_config.json"
    if generation.is_file():
        eos += tuple(i for i in _token_ids(_read_json(generation).get("eos_token_id")) if i not in eos)
    return parse_model_config(document, eos, str(path))


def parse_model_config(document: Mapping[str, Any], eos: tuple[int, ...], where: str) -> ModelConfig:
    """The configuration in a decoded `config.json` with the end-of-sequence ids `eos`. Raises ModelConfigError.

    `where` is the document's name in error messages.
    """
    architectures = document.get("architectures") or []
    if not any(name in KNOWN_ARCHITECTURES for name in architectures):
        known = ", ".join(KNOWN_ARCHITECTURES)
        found = ", ".join(map(str, architectures)) or "none"
        raise ModelConfigError(f"{where}: architecture {found} is not supported (supported: {known})")
    if document.get("hidden_act", "silu") != "silu":
        raise ModelConfigError(f"{where}: hidden_act {document['hidden_act']!r} is not supported (supported: silu)")
    if document.get("quantization_config"):
        raise ModelConfigError(f"{where}: quantized checkpoints are not supported; use a float checkpoint")
    hidden, heads = _count(document, "hidden_size", where), _count(document, "num_attention_heads", where)
    kv_heads = heads if document.get("num_key_value_heads") is None else _count(document, "num_key_value_heads", where)
    head_dim = hidden // heads if document.get("head_dim") is None else _count(document, "head_dim", where)
    if heads % kv_heads or head_dim % 2:
        raise ModelConfigError(f"{where}: {heads} heads over {kv_heads} KV heads of {head_dim} do not divide evenly")
    theta, scaling = _rope(document, where)
    return ModelConfig(
        vocab_size=_count(document, "vocab_size", where),
        hidden_size=hidden,
        intermediate_size=_count(document, "intermediate_size", where),
        num_layers=_count(document, "num_hidden_layers", where),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        context_len=_count({"max_position_embeddings": 2048, **document}, "max_position_embeddings", where),
        rms_norm_eps=float(document.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        is_tied=bool(document.get("tie_word_embeddings", False)),
        has_attention_bias=bool(document.get("attention_bias", False)),
        has_mlp_bias=bool(document.get("mlp_bias", False)),
        eos_token_ids=eos,
    )


def _rope(document: Mapping[str, Any], where: str) -> tuple[float, RopeScaling]:
    parameters = document.get("rope_parameters") or {}
    scaling = {**(document.get("rope_scaling") or {}), **parameters}
    theta = float(parameters.get("rope_theta", document.get("rope_theta", 10000.0)))
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    if kind == "default":
        return theta, RopeScaling()
    factor = float(scaling.get("factor", 1.0))
    if kind == "linear":
        return theta, RopeScaling(kind="linear", factor=factor)
    if kind == "llama3":
        return theta, RopeScaling(
            kind="llama3",
            factor=factor,
            low_freq_factor=float(scaling["low_freq_factor"]),
            high_freq_factor=float(scaling["high_freq_factor"]),
            original_context_len=int(scaling["original_max_position_embeddings"]),
        )
    raise ModelConfigError(f"{where}: rope type {kind!r} is not supported (supported: default, linear, llama3)")


def rope_inverse_frequencies(config: ModelConfig) -> list[float]:
    """Rotary inverse frequencies [head_dim / 2], in radians per position.

    Sources: Su et al. 2021 (RoFormer); for llama3 scaling, the Llama 3.1 model card.
    """
    plain = [config.rope_theta ** (-2.0 * i / config.head_dim) for i in range(config.head_dim // 2)]
    scaling = config.rope_scaling
    if scaling.kind == "linear":
        return [f / scaling.factor for f in plain]
    if scaling.kind != "llama3":
        return plain
    scaled = []
    for frequency in plain:
        wavelength = 2 * math.pi / frequency
        turns = scaling.original_context_len / wavelength
        if turns > scaling.high_freq_factor:
            scaled.append(frequency)
        elif turns < scaling.low_freq_factor:
            scaled.append(frequency / scaling.factor)
        else:
            smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
            scaled.append((1 - smooth) * frequency / scaling.factor + smooth * frequency)
    return scaled


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ModelConfigError(f"{path} is missing: not a model directory") from None
    except (OSError, ValueError) as error:
        raise ModelConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(document, dict):
        raise ModelConfigError(f"{path} does not hold a JSON object")
    return document


def _count(document: Mapping[str, Any], key: str, where: str) -> int:
    value = document.get(key)
    if not isinstance(value, int) or value <= 0:
        raise ModelConfigError(f"{where}: {key} must be a positive integer, not {value!r}")
    return value


def _token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)
