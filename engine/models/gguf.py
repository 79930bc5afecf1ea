"""Turn a Llama-architecture GGUF file into the files that transformers and this engine load.

A GGUF file holds what llama.cpp computes with, so three things must be changed:

* the rows of attn_q and attn_k are permuted for interleaved rotary pairs, and are put back in order;
* quantised blocks are dequantised;
* the tokenizer is only metadata, from which tokenizer.json is written.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

from engine.models.safetensors_file import write_safetensors

LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CONTROL, USER_DEFINED = 3, 4  # GGUF's types of added tokens, which are found in the text before BPE's merges


class ConversionError(ValueError):
    """The GGUF file is of a kind that this converter does not know. The message is one line."""


def convert_gguf(source: Path, target: Path) -> None:
    """Write model.safetensors, config.json, tokenizer.json and tokenizer_config.json of `source` into `target`.

    `target` is an existing directory. Raises ConversionError for a file of another architecture or tokenizer, OSError
    when a file cannot be written.
    """
    reader = GGUFReader(str(source))
    meta = dict(reader.fields.items())

    def value(name: str, default: Any = None) -> Any:
        return meta[name].contents() if name in meta else default

    if value("general.architecture") != "llama":
        raise ConversionError(f"{source}: GGUF architecture {value('general.architecture')} is not supported (llama)")
    heads, kv_heads = value("llama.attention.head_count"), value("llama.attention.head_count_kv")
    tensors: dict[str, np.ndarray] = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        name = _hf_name(tensor.name)
        if ".q_proj." in name or ".k_proj." in name:
            values = unpermute(values, heads if ".q_proj." in name else kv_heads)
        tensors[name] = values
    write_safetensors(target / "model.safetensors", tensors, "BF16")
    hidden = value("llama.embedding_length")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": int(tensors["model.embed_tokens.weight"].shape[0]),
        "hidden_size": hidden,
        "intermediate_size": value("llama.feed_forward_length"),
        "num_hidden_layers": value("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": value("llama.attention.key_length", hidden // heads),
        "hidden_act": "silu",
        "max_position_embeddings": value("llama.context_length"),
        "rms_norm_eps": float(f"{value('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(value("llama.rope.freq_base", 10000.0)),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "bos_token_id": value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": value("tokenizer.ggml.eos_token_id"),
        "pad_token_id": value("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "bfloat16",
    }
    _write_json(target / "config.json", config)
    tokens = value("tokenizer.ggml.tokens")
    kinds = value("tokenizer.ggml.token_type")
    document = tokenizer_document(
        model=value("tokenizer.ggml.model"),
        pre=value("tokenizer.ggml.pre"),
        tokens=tokens,
        kinds=kinds,
        merges=value("tokenizer.ggml.merges"),
    )
    _write_json(target / "tokenizer.json", document)
    _write_json(
        target / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": value("tokenizer.chat_template"),
            "add_bos_token": bool(value("tokenizer.ggml.add_bos_token", False)),
            "bos_token": tokens[config["bos_token_id"]],
            "eos_token": tokens[config["eos_token_id"]],
            "unk_token": tokens[value("tokenizer.ggml.unknown_token_id", config["eos_token_id"])],
            "pad_token": tokens[config["pad_token_id"]],
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
        },
    )


def unpermute(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's order of the rows of q and k, within each head of d rows.

    llama.cpp puts a rotary pair side by side, at rows (2i, 2i + 1). It goes back to rows (i, i + d/2).
    """
    rows = values.shape[0]
    paired = values.reshape(num_heads, rows // num_heads // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2).reshape(values.shape))


def tokenizer_document(
    *, model: str, pre: str, tokens: list[str], kinds: list[int], merges: list[str]
) -> dict[str, Any]:
    """A `tokenizers` JSON document for a byte-level BPE vocabulary. Raises ConversionError for any other tokenizer."""
    if model != "gpt2" or pre != "smollm":
        raise ConversionError(f"GGUF tokenizer {model}/{pre} is not supported (supported: gpt2/smollm)")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": i,
                "content": tokens[i],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind == CONTROL,
            }
            for i, kind in enumerate(kinds)
            if kind in (CONTROL, USER_DEFINED)
        ],
        "normalizer": None,
        # llama.cpp's "smollm": each digit is a piece of its own, and GPT-2's pattern cuts the rest.
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in merges],
        },
    }


def _hf_name(name: str) -> str:
    parts = name.removesuffix(".weight").split(".")
    if parts[0] == "blk" and parts[2] in LAYER_NAMES:
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.weight"
    if name.endswith(".weight") and parts[0] in TOP_NAMES:
        return f"{TOP_NAMES[parts[0]]}.weight"
    raise ConversionError(f"GGUF tensor {name} has no place in a Llama model")


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n", "utf-8")
