"""A model's config.json: what this engine cannot serve is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.models.store import ModelStoreError, prepare
from tests.support.engine.models import assert_one_line


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
