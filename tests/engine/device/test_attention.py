"""The attention backends against loops in float32, over the shapes they must serve, and the probes of one of them."""

import math

import pytest
import torch

from engine.device.attention import Span
from tests.support.engine.attention import Filled, config_of
from tests.support.engine.torch_schedules import BLOCK_SIZE

BACKENDS = ["torch", "native"]


def reference(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int) -> torch.Tensor:
    """Causal attention by loops: queries [n, heads, dim] at positions start.., keys and values [len, kv_heads, dim]."""
    out = torch.empty(queries.shape)
    group = queries.shape[1] // keys.shape[1]
    for i in range(queries.shape[0]):
        for head in range(queries.shape[1]):
            visible = slice(0, start + i + 1)
            scores = keys[visible, head // group].float() @ queries[i, head].float() / math.sqrt(queries.shape[2])
            out[i, head] = scores.softmax(-1) @ values[visible, head // group].float()
    return out


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("head_dim", [16, 20, 64, 80, 96, 128, 256])
def test_decode_equals_the_loops(group: int, head_dim: int, name: str) -> None:
    lengths = [1, 15, 16, 17, 100]
    filled = Filled(config_of(2, group, head_dim), lengths, torch.float32)
    backend = filled.backend(name)
    spans = [Span(n - 1, 1, table) for n, table in zip(lengths, filled.tables, strict=True)]
    queries = filled.queries(len(lengths))
    out = backend.attend(1, queries, backend.plan(spans, []))
    for i, length in enumerate(lengths):
        expected = reference(queries[i : i + 1], filled.keys[i], filled.values[i], length - 1)
        assert torch.allclose(out[i : i + 1], expected, atol=1e-5)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("count", [1, 2, 31, 33])
@pytest.mark.parametrize("context", [1, 15, 16, 17])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (3, 64), (4, 80), (8, 128), (3, 96)])
def test_prompt_chunks_equal_the_loops(count: int, context: int, group: int, head_dim: int, name: str) -> None:
    """Chunks of `count` tokens after `context - 1` earlier ones, two sequences in one step."""
    length = context - 1 + count
    filled = Filled(config_of(2, group, head_dim), [length, length + 40], torch.float32)
    backend = filled.backend(name)
    spans = [Span(context - 1, count, filled.tables[0]), Span(context + 39, count, filled.tables[1])]
    queries = filled.queries(2 * count)
    out = backend.attend(1, queries, backend.plan([], spans))
    for i, span in enumerate(spans):
        rows = slice(i * count, (i + 1) * count)
        expected = reference(queries[rows], filled.keys[i], filled.values[i], span.start)
        assert torch.allclose(out[rows], expected, atol=1e-5)


@pytest.mark.case("K78")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "granularity"), [("torch", None), ("torch", 0), ("native", None)])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_a_row_has_the_same_bits_alone_and_in_a_mixed_step(
    dtype: torch.dtype, name: str, granularity: int | None, group: int
) -> None:
    lengths = [1, 40, 250, 17, 200, 90]
    filled = Filled(config_of(2, group, 64), lengths, dtype)
    backend = filled.backend(name, granularity)
    decode = [Span(n - 1, 1, t) for n, t in zip(lengths[:4], filled.tables[:4], strict=True)]
    prefill = [Span(30, lengths[4] - 30, filled.tables[4]), Span(0, lengths[5], filled.tables[5])]
    queries = filled.queries(4 + lengths[4] - 30 + lengths[5])
    mixed = backend.attend(1, queries, backend.plan(decode, prefill))
    for i, span in enumerate(decode):
        alone = backend.attend(1, queries[i : i + 1], backend.plan([span], []))
        assert torch.equal(mixed[i : i + 1], alone)
    first = 4
    for span in prefill:
        for offset in range(0, span.count, 23):
            part = Span(span.start + offset, min(23, span.count - offset), span.block_table)
            rows = slice(first + offset, first + offset + part.count)
            assert torch.equal(mixed[rows], backend.attend(1, queries[rows], backend.plan([], [part])))
        first += span.count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("context", "block_size"), [(4097, 16), (700, 5), (513, 256)])
def test_long_contexts_and_other_block_sizes(dtype: torch.dtype, context: int, block_size: int) -> None:
    config = config_of(2, 3, 64, context=4200)
    filled = Filled(config, [context], dtype, num_blocks=4200 // block_size + 1, block_size=block_size)
    backend = filled.backend("native")
    queries = filled.queries(34)
    spans = [Span(context - 1, 1, filled.tables[0]), Span(context - 33, 33, filled.tables[0])]
    out = backend.attend(1, queries, backend.plan(spans[:1], spans[1:]))
    for rows, span in ((slice(0, 1), spans[0]), (slice(1, 34), spans[1])):
        expected = reference(queries[rows], filled.keys[0], filled.values[0], span.start)
        assert torch.allclose(out[rows].float(), expected, atol=1e-5 if dtype == torch.float32 else 2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_after_the_end_are_never_read(dtype: torch.dtype) -> None:
    filled = Filled(config_of(2, 3, 64), [21, 70], dtype)
    backend = filled.backend("native")
    queries = filled.queries(31)
    plan = backend.plan([Span(20, 1, filled.tables[0])], [Span(40, 30, filled.tables[1])])
    expected = backend.attend(1, queries, plan)
    kept = filled.cache.pool.clone()
    filled.cache.pool.fill_(math.nan)
    for table, length in zip(filled.tables, (21, 70), strict=True):
        for position in range(length):
            at = (table[position // BLOCK_SIZE], 1, slice(None), position % BLOCK_SIZE)
            filled.cache.pool[at] = kept[at]
    assert torch.equal(backend.attend(1, queries, plan), expected)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_poisoned_row_is_not_finite_and_harms_no_other(poison: float) -> None:
    filled = Filled(config_of(2, 3, 64), [70, 70], torch.bfloat16)
    backend = filled.backend("native")
    queries = filled.queries(2)
    plan = backend.plan([Span(69, 1, table) for table in filled.tables], [])
    expected = backend.attend(1, queries, plan)
    queries[1] = poison
    got = backend.attend(1, queries, plan)
    assert torch.equal(got[0], expected[0])
    assert not torch.isfinite(got[1]).any()
