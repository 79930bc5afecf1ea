"""Linear layers by the native kernels."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from engine.device.native.library import Kernels
from engine.device.native.linear import NativeGateUp, NativeLinear, linears_pay
from engine.device.weights import GateUp, Linear
from engine.models.config import read_model_config
from engine.models.tiny import write_tiny_model
from tests.support.engine.torch_schedules import native_kernels


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
