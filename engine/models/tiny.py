"""A tiny random model, `tiny-random`: the same bytes on every machine, made in a second without a network.

Three Llama layers with grouped-query attention and tied embeddings, and a small byte-level BPE whose merges are counted
from the text below. Its output means nothing, but every token depends on all before it, which is what tests need.
"""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from engine.models.config import parse_model_config
from engine.models.safetensors_file import write_safetensors

SEED = 20_240_607
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 512
CONTEXT_LEN = 2048
TEXT = """the scales weigh what each team was given and what each team was owed and a short answer does not wait behind
a long one when many teams share one machine the work of every step is written down and paid for by the team that caused
it a request enters the gateway with a key and leaves with tokens and one row in the ledger system user assistant hello
world in between it waits runs pauses and runs again but the words it gets are the same as if it had been alone
please explain write list describe tell me about what which where why how would could should number colour story
question answer because before after between never always people water light music morning window garden"""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tiny_model(target: Path, *, dtype: str = "F32", seed: int = SEED, **overrides: Any) -> None:
    """Write the model into directory `target`; `overrides` replace keys of config.json (for tests of other shapes)."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT_LEN,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        **overrides,
    }
    shapes = parse_model_config(config, (2,), "tiny").tensor_shapes()
    # RandomState's stream is frozen by numpy's compatibility policy; Generator's is not.
    random = np.random.RandomState(seed)
    tensors = {}
    for name in sorted(shapes):
        values = random.standard_normal(shapes[name]).astype(np.float32)
        if name.endswith("norm.weight"):
            values = 1 + 0.1 * values
        elif len(shapes[name]) == 2 and "embed_tokens" not in name:
            values = values * np.float32(1.6 / shapes[name][1] ** 0.5)
        tensors[name] = values.astype(np.float32)
    write_safetensors(target / "model.safetensors", tensors, "BF16" if dtype == "BF16" else "F32")
    documents = {
        "config.json": config,
        "tokenizer.json": tiny_tokenizer(config["vocab_size"]),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": CHAT_TEMPLATE,
            "add_bos_token": False,
            "bos_token": SPECIAL_TOKENS[1],
            "eos_token": SPECIAL_TOKENS[2],
            "unk_token": SPECIAL_TOKENS[0],
            "pad_token": SPECIAL_TOKENS[2],
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
        },
    }
    for name, document in documents.items():
        (target / name).write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n", "utf-8")


def tiny_tokenizer(vocab_size: int) -> dict[str, Any]:
    """A `tokenizers` JSON document: specials, the 256 bytes, then merges in order of frequency (Sennrich 2016)."""
    vocab = [*SPECIAL_TOKENS, *(byte_symbol(byte) for byte in range(256))]
    words = [["Ġ", *word] for word in TEXT.split()]
    merges: list[tuple[str, str]] = []
    while len(vocab) < min(vocab_size, VOCAB_SIZE):
        pairs = Counter(pair for word in words for pair in pairwise(word))
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        vocab.append("".join(best))
        words = [_merged(word, best) for word in words]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": i,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for i, token in enumerate(SPECIAL_TOKENS)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(vocab)},
            "merges": [list(merge) for merge in merges],
        },
    }


def byte_symbol(byte: int) -> str:
    """GPT-2's printable stand-in for a byte: itself where it is printable Latin-1, else a code point from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    return chr(256 + sum(1 for other in range(byte) if other not in printable))


def _merged(word: list[str], pair: tuple[str, str]) -> list[str]:
    result: list[str] = []
    for symbol in word:
        if result and (result[-1], symbol) == pair:
            result[-1] += symbol
        else:
            result.append(symbol)
    return result
