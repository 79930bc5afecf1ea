"""The tiny model that tests and the demo use."""

from pathlib import Path

from tokenizers import Tokenizer

from engine.models.store import TINY, describe, file_sha256
from tests.support.engine.models import TEXTS


def test_the_tiny_model_has_the_same_bytes_each_time(tmp_path: Path, tiny: Path) -> None:
    again = Path(describe(TINY, str(tmp_path)).path)
    for name in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"):
        assert file_sha256(tiny / name) == file_sha256(again / name)
    tokenizer = Tokenizer.from_file(str(again / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 512
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert len(tokenizer.encode(" the team waits").ids) < 10  # the merges work
