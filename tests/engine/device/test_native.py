"""The native kernels are used only where they compile, load and compute what torch computes; else torch does it all."""

import ctypes
import logging
import shutil
import stat
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from engine.config import EngineConfig
from engine.device.native import build, library
from engine.device.native.build import NativeError, compile_library, compiler, is_whole, library_path
from engine.device.native.library import Kernels, choose, load, query_tile, self_test
from engine.device.native.linear import NativeGateUp, NativeLinear, linears_pay
from engine.device.parts import build as build_engine
from engine.device.weights import GateUp, Linear
from engine.models.config import read_model_config
from engine.models.store import TINY, cache_root
from engine.models.tiny import write_tiny_model
from engine.wire.messages import SamplingParams
from tests.support.engine.torch_schedules import Job, Progress, make_runner, native_kernels, row_of

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(library.SWITCH, raising=False)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile without optimisation: seconds less, the same code."""
    native_kernels()
    monkeypatch.setattr(build, "FLAGS", tuple("-O1" if flag == "-O3" else flag for flag in build.FLAGS))


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


def needs_linear() -> Kernels:
    kernels = native_kernels()
    if not kernels.has_linear:
        pytest.skip("this processor has no AVX512_BF16")
    return kernels


@pytest.mark.case("K78")
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("in_features", "out_features"), [(2, 1), (34, 63), (576, 64), (160, 200)])
def test_a_linear_equals_torch_and_its_rows_stand_alone(in_features: int, out_features: int, has_bias: bool) -> None:
    kernels = needs_linear()
    generator = torch.Generator().manual_seed(in_features)
    gate, up, bias = (
        torch.randn(shape, generator=generator).to(torch.bfloat16)
        for shape in ((out_features, in_features), (out_features, in_features), (2 * out_features,))
    )
    rows = torch.randn((70, in_features), generator=generator).to(torch.bfloat16)
    halves = bias.chunk(2) if has_bias else (None, None)
    linear = NativeLinear(kernels, Linear(gate, halves[0]))
    gate_up = NativeGateUp(kernels, GateUp(gate, up, is_packed=False, gate_bias=halves[0], up_bias=halves[1]))
    products = [
        F.linear(rows.float(), weight.float(), None if part is None else part.float())
        for weight, part in ((gate, halves[0]), (up, halves[1]))
    ]
    wide = NativeLinear(kernels, Linear(gate, halves[0]), wide=True)
    assert torch.allclose(wide(rows), products[0], rtol=1e-4, atol=1e-3), "not rounded to bfloat16"
    assert torch.equal(wide(rows).to(torch.bfloat16), linear(rows))
    for fn, expected in ((linear, products[0]), (gate_up, F.silu(products[0]) * products[1])):
        got = fn(rows)
        assert torch.allclose(got.float(), expected, rtol=1e-2, atol=1e-4)
        for count in (1, 2, 5, 6, 7, 13, 64):
            assert torch.equal(fn(rows[70 - count :].clone()), got[70 - count :])
        torch.set_num_threads(2)
        try:
            assert torch.equal(fn(rows), got)
        finally:
            torch.set_num_threads(1)


def test_a_gated_linear_survives_any_gate() -> None:
    """Both tails of silu: 0 far to the left, the gate itself far to the right, and what is not finite shows."""
    weight = torch.zeros((2, 2), dtype=torch.bfloat16)
    weight[0, 0] = weight[1, 1] = 1
    gate_up = NativeGateUp(needs_linear(), GateUp(weight[:1], weight[1:], is_packed=False))
    gates = torch.tensor([-1e30, -200.0, -1.0, 0.0, 1.0, 200.0, 1e30], dtype=torch.bfloat16)
    rows = torch.stack([gates, torch.full_like(gates, 2.0)], dim=1)
    assert torch.allclose(gate_up(rows)[:, 0].float(), 2 * F.silu(gates.float()), rtol=1e-2, atol=1e-6)
    rows[:, 0] = float("nan")
    assert torch.isnan(gate_up(rows)).all()


def test_native_linears_are_left_to_amx_and_to_float32(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kernels = needs_linear()
    write_tiny_model(tmp_path)
    config = read_model_config(tmp_path)
    odd = replace(config, intermediate_size=161)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert linears_pay(kernels, torch.bfloat16, config)
    assert not linears_pay(kernels, torch.float32, config)
    assert not linears_pay(kernels, torch.bfloat16, odd)
    assert not linears_pay(None, torch.bfloat16, config)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert not linears_pay(kernels, torch.bfloat16, config)


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


@pytest.mark.usefixtures("quick")
def test_it_is_compiled_once_and_a_damaged_file_is_compiled_again(tmp_path: Path) -> None:
    load(tmp_path)
    path = library_path(tmp_path, compiler())
    assert [path] == list((tmp_path / "native").iterdir())
    whole, written = path.read_bytes(), path.stat().st_mtime_ns
    load(tmp_path)
    assert path.stat().st_mtime_ns == written
    for damaged in (b"", whole[: len(whole) // 2], whole[:5000] + b"x" + whole[5001:]):
        path.unlink()  # a mapped file may not change under the process
        path.write_bytes(damaged)
        assert not is_whole(path)
        assert self_test(load(tmp_path)) == ""
        assert is_whole(path)


@pytest.mark.usefixtures("quick")
def test_two_starts_at_once_end_with_one_whole_library(tmp_path: Path) -> None:
    path = library_path(tmp_path, compiler())
    threads = [threading.Thread(target=compile_library, args=(path, compiler())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path] == list(path.parent.iterdir())
    assert is_whole(path)
    Kernels(path)


def test_another_source_compiler_or_processor_is_another_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = fake_compiler(tmp_path, "echo cc 1.0")
    paths = {library_path(tmp_path, str(found))}
    fake_compiler(tmp_path, "echo cc 1.1")
    paths.add(library_path(tmp_path, str(found)))
    monkeypatch.setattr(build, "processor", lambda: "flags: sse2")
    paths.add(library_path(tmp_path, str(found)))
    source = tmp_path / "other.c"
    source.write_text("int x;")
    monkeypatch.setattr(build, "SOURCE", source)
    paths.add(library_path(tmp_path, str(found)))
    assert len(paths) == 4


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
