"""The native kernels are used only where they compile, load and compute what torch computes; else torch does it all."""

import ctypes
import logging
import shutil
import stat
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from engine.config import EngineConfig
from engine.device.native import build, library
from engine.device.native.build import NativeError, compiler, library_path
from engine.device.native.library import choose, load, query_tile
from engine.device.parts import build as build_engine
from engine.models.store import TINY, cache_root
from engine.models.tiny import write_tiny_model
from engine.wire.messages import SamplingParams
from tests.support.engine.torch_schedules import Job, Progress, make_runner, native_kernels, row_of

CPU = torch.device("cpu")


def fake_compiler(directory: Path, script: str) -> Path:
    path = directory / "cc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", [1, 15, 64, 100, 576])
def test_add_norm_equals_torch(dtype: torch.dtype, hidden: int) -> None:
    kernels = native_kernels()
    generator = torch.Generator().manual_seed(hidden)
    x, delta, weight = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((5, hidden),) * 2 + ((hidden,),)
    )
    total = x + delta
    expected = F.rms_norm(total.float(), (hidden,), weight.float(), 1e-5)
    alone = [kernels.add_norm(x[i : i + 1].clone(), delta[i : i + 1], weight, 1e-5) for i in range(5)]
    got = kernels.add_norm(x, delta, weight, 1e-5)
    assert torch.equal(x, total)
    assert torch.allclose(got.float(), expected, atol=1e-6 if dtype == torch.float32 else 0.0, rtol=1e-2)
    assert torch.equal(torch.cat(alone), got)
    assert torch.equal(kernels.add_norm(total.clone(), None, weight, 1e-5), got)


def test_a_norm_keeps_what_is_not_finite() -> None:
    for bad in (float("nan"), float("inf"), -float("inf")):
        x = torch.ones((2, 40), dtype=torch.bfloat16)
        x[1, 7] = bad
        got = native_kernels().add_norm(x, None, torch.ones(40, dtype=torch.bfloat16), 1e-5)
        assert torch.isfinite(got[0]).all()
        assert torch.isnan(got[1, 7])


@pytest.mark.parametrize("biased", [True, False])
def test_native_bfloat16_logits_are_close_to_float32(tmp_path: Path, biased: bool) -> None:
    write_tiny_model(tmp_path, attention_bias=biased, mlp_bias=biased)
    job = Job(tuple(range(10, 90)), 1, SamplingParams(temperature=0.0))
    wide, torchs, native = (
        make_runner(tmp_path, dtype, native=native).logits([row_of(Progress(job, blocks=list(range(6))), 0, 100)])
        for dtype, native in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True))
    )
    # No further from the truth than torch in bfloat16 is, give or take.
    assert (native - wide).abs().max() <= 1.5 * (torchs - wide).abs().max()


@pytest.mark.parametrize(("group", "expected"), [(1, 64), (3, 32), (4, 16), (8, 8), (71, 1)])
def test_query_tiles_divide_the_key_tile(group: int, expected: int) -> None:
    assert query_tile(group) == expected
    assert library.KEY_TILE % query_tile(group) == 0


def test_off_means_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(library.SWITCH, "off")
    with caplog.at_level(logging.INFO, "engine.device.native.library"):
        assert choose(tmp_path, CPU, 64) is None
    assert [record.getMessage() for record in caplog.records] == ["native kernels are not used: TERAZI_NATIVE is off"]
    assert not (tmp_path / "native").exists()


def test_other_devices_and_huge_heads_mean_torch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "engine.device.native.library"):
        assert choose(tmp_path, torch.device("cuda"), 64) is None
        assert choose(tmp_path, CPU, 1024) is None
    assert "the device is cuda" in caplog.text
    assert "heads of 1024 dimensions" in caplog.text


def test_no_compiler_means_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with caplog.at_level(logging.INFO, "engine.device.native.library"):
        assert choose(tmp_path, CPU, 64) is None
    assert "no C compiler (cc or gcc) is on PATH" in caplog.text


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ('[ "$1" = --version ] && exit 0; echo "kernels.c:1: error: no such" >&2; exit 1', "error: no such"),
        ("exit 4", "failed with status 4"),
        ('[ "$1" = --version ] && exit 0; while [ "$1" != -o ]; do shift; done; echo no >"$2"',
         "cannot be loaded"),
    ],
)  # fmt: skip
def test_a_compiler_that_fails_means_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, script: str, expected: str
) -> None:
    monkeypatch.setenv("CC", str(fake_compiler(tmp_path, script)))
    with caplog.at_level(logging.INFO, "engine.device.native.library"):
        assert choose(tmp_path, CPU, 64) is None
    assert len(caplog.records) == 1
    assert expected in caplog.text


def test_a_cache_that_cannot_be_written_means_torch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    native_kernels()
    (tmp_path / "native").write_text("a file where a directory should be")
    with caplog.at_level(logging.INFO, "engine.device.native.library"):
        assert choose(tmp_path, CPU, 64) is None
    assert "the library cannot be kept" in caplog.text


@pytest.mark.parametrize(
    ("right", "wrong", "expected"),
    [
        ("v = v + load_vec(delta", "v = v - load_vec(delta", "RMSNorm"),
        ("second * sin[d]", "first * sin[d]", "attention"),
        ("x * y * choose", "y * choose", "gated linear"),
        ("position + (row + r) / group + 1 - start", "position + (row + r) / group + 2 - start", "attention"),
    ],
)
@pytest.mark.usefixtures("quick")
def test_the_self_test_finds_a_wrong_library(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    right: str,
    wrong: str,
    expected: str,
) -> None:
    text = build.SOURCE.read_text("utf-8")
    assert right in text
    source = tmp_path / "kernels.c"
    source.write_text(text.replace(right, wrong))
    monkeypatch.setattr(build, "SOURCE", source)
    with caplog.at_level(logging.INFO, "engine.device.native.library"):
        assert choose(tmp_path, CPU, 64) is None
    assert f"computes something else than torch: {expected}" in caplog.text


def test_a_library_with_another_layout_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native_kernels()

    class Longer(ctypes.Structure):
        _fields_ = [*library.Step._fields_, ("more", ctypes.c_int64)]

    monkeypatch.setattr(library, "Step", Longer)
    with pytest.raises(NativeError, match="its Step has another size"):
        load(cache_root(""))


@pytest.mark.parametrize("switch", ["off", "on"])
def test_the_engine_starts_either_way_and_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, switch: str
) -> None:
    native_kernels()
    monkeypatch.setenv(library.SWITCH, switch)
    if switch == "on":
        compiled = library_path(tmp_path, compiler())
        compiled.parent.mkdir()
        shutil.copy(library_path(cache_root(""), compiler()), compiled)
    config = EngineConfig(
        model=TINY,
        cache_dir=str(tmp_path),
        num_threads=1,
        dtype="float32",
        kv_memory_bytes=2**20,
        max_batch_tokens=64,
        max_batch_size=4,
    )
    with caplog.at_level(logging.INFO):
        build_engine(config)
    backend = "attention backend: paged-native" if switch == "on" else "attention backend: gather-sdpa"
    assert caplog.text.count(backend) == 1
    kept = [path.name for path in (tmp_path / "profiles").iterdir()]
    assert [name.endswith("native.json" if switch == "on" else "torch.json") for name in kept] == [True]
