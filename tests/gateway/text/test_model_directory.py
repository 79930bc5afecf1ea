"""What a model's files say of training is not obeyed: prompts are never cut, filled up or changed without a word."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from engine.models.store import SMOLLM2, describe
from engine.models.tiny import SPECIAL_TOKENS, tiny_tokenizer, write_tiny_model
from engine.wire.messages import ModelInfo
from gateway.text.tokenizer import ModelTokenizer

ROOM = 2048
PROMPT = " ".join(["the scales weigh what each team was given"] * 25)
CHAT = [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "x y"}]
TRUNCATION = {"direction": "Right", "max_length": 16, "strategy": "LongestFirst", "stride": 0}
FIXED = {"strategy": {"Fixed": 900}, "direction": "Left", "pad_to_multiple_of": 64, "pad_id": 2, "pad_type_id": 0}
PADDING = FIXED | {"pad_token": SPECIAL_TOKENS[2]}
BYTE_LEVEL = tiny_tokenizer(512)["pre_tokenizer"]


def metaspace(scheme: str) -> dict[str, Any]:
    first = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [first, BYTE_LEVEL]}}


def bos_and_eos() -> dict[str, Any]:
    def special(index: int) -> dict[str, Any]:
        token = SPECIAL_TOKENS[index]
        return {"id": token, "ids": [index], "tokens": [token]}

    parts = [{"SpecialToken": {"id": SPECIAL_TOKENS[i], "type_id": 0}} for i in (1, 2)]
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [parts[0], text, parts[1]],
            "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {SPECIAL_TOKENS[i]: special(i) for i in (1, 2)},
        }
    }


def load(path: Path, context_len: int = ROOM) -> ModelTokenizer:
    return ModelTokenizer.load(
        ModelInfo(
            name="m", path=str(path), vocab_size=0, context_len=context_len, eos_token_ids=(2,), dtype="", device=""
        )
    )


def change(path: Path, **values: Any) -> None:
    document = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps(document | values), "utf-8")


def ids_of(tokenizer: ModelTokenizer) -> tuple[list[int], list[int]]:
    """Of a raw prompt and of a chat."""
    return tokenizer.encode_text(PROMPT, room=ROOM), tokenizer.encode_chat(CHAT, room=ROOM)


@pytest.mark.case("H19")
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("tokenizer.json", {"truncation": TRUNCATION}),
        ("tokenizer.json", {"truncation": TRUNCATION | {"direction": "Left", "stride": 4}}),
        ("tokenizer.json", {"padding": PADDING}),
        ("tokenizer.json", {"padding": PADDING | {"strategy": "BatchLongest"}}),
        ("tokenizer.json", {"truncation": TRUNCATION, "padding": PADDING}),
        ("tokenizer.json", {"model": tiny_tokenizer(512)["model"] | {"dropout": 0.9}}),
        ("tokenizer_config.json", {"model_max_length": 16, "truncation_side": "left", "max_length": 16}),
        ("tokenizer_config.json", {"add_prefix_space": True, "add_bos_token": True, "add_eos_token": True}),
    ],
)
def test_when_files_speak_of_training_then_prompts_stay(tmp_path: Path, name: str, values: dict[str, Any]) -> None:
    write_tiny_model(tmp_path)
    untouched = ids_of(load(tmp_path))
    change(tmp_path / name, **values)
    assert ids_of(load(tmp_path)) == untouched


@pytest.mark.parametrize(
    "values",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"normalizer": {"type": "Prepend", "prepend": "▁"}},
        {"pre_tokenizer": BYTE_LEVEL | {"add_prefix_space": True}},
        metaspace("first"),
        metaspace("always"),
        metaspace("never"),
        bos_and_eos(),
    ],
    ids=["lowercase", "prepend", "prefix_space", "metaspace_first", "metaspace_always", "metaspace_never", "bos_eos"],
)
@pytest.mark.case("H19")
def test_when_files_shape_the_text_then_ids_are_transformers(tmp_path: Path, values: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    write_tiny_model(tmp_path)
    change(tmp_path / "tokenizer.json", truncation=TRUNCATION, padding=PADDING, **values)
    reference = AutoTokenizer.from_pretrained(tmp_path)
    text = reference(PROMPT, truncation=False, padding=False).input_ids
    chat = reference.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert ids_of(load(tmp_path)) == (text, chat)


@pytest.mark.real_model
@pytest.mark.case("H19")
def test_when_the_default_model_is_cut_then_prompts_stay_whole(tmp_path: Path) -> None:
    info = describe(SMOLLM2)
    for file in Path(info.path).iterdir():
        if file.suffix == ".json":
            shutil.copy(file, tmp_path)
    untouched = ids_of(ModelTokenizer.load(info))
    assert min(map(len, untouched)) >= 200
    change(tmp_path / "tokenizer.json", truncation=TRUNCATION, padding=PADDING)
    assert ids_of(load(tmp_path)) == untouched
