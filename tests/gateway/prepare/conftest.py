"""Fixtures of the tests of preparation."""

import json

import pytest

from engine.models.tiny import CHAT_TEMPLATE, tiny_tokenizer
from engine.wire.messages import Hello, ModelInfo
from tests.support.gateway.fake_engine import EOS, VOCAB_SIZE, hello
from tests.support.gateway.harness import MODEL


@pytest.fixture(scope="module")
def greeting(tmp_path_factory: pytest.TempPathFactory) -> Hello:
    """A model whose tokenizer a worker process can load."""
    directory = tmp_path_factory.mktemp("model")
    (directory / "tokenizer.json").write_text(json.dumps(tiny_tokenizer(VOCAB_SIZE)))
    config = {"chat_template": CHAT_TEMPLATE, "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    info = ModelInfo(
        name=MODEL,
        path=str(directory),
        vocab_size=VOCAB_SIZE,
        context_len=2048,
        eos_token_ids=(EOS,),
        dtype="float32",
        device="cpu",
    )
    return hello(model=info)
