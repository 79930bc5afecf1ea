"""Attention by the native kernels."""

import pytest
import torch

from engine.device.attention import Span
from engine.device.attention.paged_native import PagedNative
from engine.device.model import rotate
from tests.support.engine.attention import Filled, config_of
from tests.support.engine.torch_schedules import BLOCK_SIZE


@pytest.mark.case("K78")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 128), (3, 64), (8, 20)])
def test_native_bits_depend_on_the_position_alone(dtype: torch.dtype, group: int, head_dim: int) -> None:
    """A chunk, a generated token and two threads: one result, so recomputing a prompt changes nothing either."""
    filled = Filled(config_of(2, group, head_dim), [200], dtype)
    backend = filled.backend("native")
    queries = filled.queries(200)
    table = filled.tables[0]
    whole = backend.attend(1, queries, backend.plan([], [Span(0, 200, table)]))
    singly = backend.attend(1, queries, backend.plan([Span(i, 1, table) for i in range(200)], []))
    assert torch.equal(whole, singly)
    torch.set_num_threads(2)
    try:
        assert torch.equal(whole, backend.attend(1, queries, backend.plan([], [Span(0, 200, table)])))
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [20, 64, 96])
def test_fused_rotation_and_write_equal_the_plain_ones(dtype: torch.dtype, head_dim: int) -> None:
    filled = Filled(config_of(2, 3, head_dim), [40, 9], dtype)
    backend = filled.backend("native")
    assert isinstance(backend, PagedNative)
    spans = [Span(8, 1, filled.tables[1]), Span(5, 30, filled.tables[0])]
    qkv = torch.randn((31, 10, head_dim), generator=filled.generator).to(dtype)
    positions = torch.tensor([8, *range(5, 35)])
    rotated = rotate(qkv[:, :8], filled.cos[positions].unsqueeze(1), filled.sin[positions].unsqueeze(1))
    plain = filled.cache.pool.clone()
    slots = [
        span.block_table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
        for span in spans
        for p in range(span.start, span.end)
    ]
    filled.cache.write(1, filled.cache.token_index(torch.tensor(slots)), rotated[:, 6:], qkv[:, 8:])
    written = filled.cache.pool.clone()
    expected = backend.attend(1, rotated[:, :6].contiguous(), backend.plan(spans[:1], spans[1:]))
    filled.cache.pool.copy_(plain)
    got = backend.attend_fused(1, qkv.flatten(1), backend.plan(spans[:1], spans[1:]))
    assert torch.equal(filled.cache.pool, written)
    assert torch.equal(got, expected.flatten(1))
