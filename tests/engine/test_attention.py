"""The attention backend against loops in float32, over the shapes it must serve, and its probes."""

import math
import random

import pytest
import torch

from engine.attention import Span
from engine.attention.gather_sdpa import GatherSdpa, padding_granularity
from engine.kv_cache import KVAllocationError, KVCache
from engine.model_config import ModelConfig, RopeScaling
from tests.engine.torch_schedules import BLOCK_SIZE

CPU = torch.device("cpu")


def config_of(kv_heads: int, group: int, head_dim: int, context: int = 256) -> ModelConfig:
    return ModelConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_layers=2,
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        context_len=context,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=RopeScaling(),
        is_tied=True,
        has_attention_bias=False,
        has_mlp_bias=False,
        eos_token_ids=(),
    )


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


class Filled:
    """A cache with sequences of random keys and values, written through its own interface in layer 1."""

    def __init__(self, config: ModelConfig, lengths: list[int], dtype: torch.dtype, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.cache = KVCache(config, 64, BLOCK_SIZE, dtype, CPU)
        self.generator, self.config, self.dtype = generator, config, dtype
        free = list(range(64))
        random.Random(seed).shuffle(free)
        self.tables, self.keys, self.values = [], [], []
        for length in lengths:
            table = [free.pop() for _ in range(-(-length // BLOCK_SIZE))]
            shape = (length, config.num_kv_heads, config.head_dim)
            keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
            slots = torch.tensor([table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(length)])
            self.cache.write(1, self.cache.token_index(slots), keys, values)
            self.tables.append(table)
            self.keys.append(keys)
            self.values.append(values)

    def queries(self, count: int) -> torch.Tensor:
        shape = (count, self.config.num_heads, self.config.head_dim)
        return torch.randn(shape, generator=self.generator).to(self.dtype)


@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_decode_equals_the_loops(group: int, head_dim: int) -> None:
    lengths = [1, 15, 16, 17, 100]
    filled = Filled(config_of(2, group, head_dim), lengths, torch.float32)
    backend = GatherSdpa(filled.config, filled.cache)
    spans = [Span(n - 1, 1, table) for n, table in zip(lengths, filled.tables, strict=True)]
    queries = filled.queries(len(lengths))
    out = backend.attend(1, queries, backend.plan(spans, []))
    for i, length in enumerate(lengths):
        expected = reference(queries[i : i + 1], filled.keys[i], filled.values[i], length - 1)
        assert torch.allclose(out[i : i + 1], expected, atol=1e-5)


@pytest.mark.parametrize("count", [1, 2, 31, 33])
@pytest.mark.parametrize("context", [1, 15, 16, 17])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (3, 64), (4, 80), (8, 128), (3, 96)])
def test_prompt_chunks_equal_the_loops(count: int, context: int, group: int, head_dim: int) -> None:
    """Chunks of `count` tokens after `context - 1` earlier ones, two sequences in one step."""
    length = context - 1 + count
    filled = Filled(config_of(2, group, head_dim), [length, length + 40], torch.float32)
    backend = GatherSdpa(filled.config, filled.cache)
    spans = [Span(context - 1, count, filled.tables[0]), Span(context + 39, count, filled.tables[1])]
    queries = filled.queries(2 * count)
    out = backend.attend(1, queries, backend.plan([], spans))
    for i, span in enumerate(spans):
        rows = slice(i * count, (i + 1) * count)
        expected = reference(queries[rows], filled.keys[i], filled.values[i], span.start)
        assert torch.allclose(out[rows], expected, atol=1e-5)


@pytest.mark.case("K78")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("granularity", [None, 0])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_a_row_has_the_same_bits_alone_and_in_a_mixed_step(
    dtype: torch.dtype, granularity: int | None, group: int
) -> None:
    lengths = [1, 40, 130, 17, 200, 90]
    filled = Filled(config_of(2, group, 64), lengths, dtype)
    backend = GatherSdpa(filled.config, filled.cache, granularity)
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


def test_the_padding_probe_finds_something_or_says_none() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert padding_granularity(config_of(3, 3, 64), dtype, CPU) in (0, 16, 32, 64, 128, 256, 512)


def test_layers_and_blocks_do_not_overlap() -> None:
    config = config_of(2, 1, 16)
    cache = KVCache(config, 3, 4, torch.float32, CPU)
    for layer in range(2):
        for slot in range(12):
            value = float(1000 * layer + slot)
            ones = torch.ones((1, 2, 16))
            cache.write(layer, cache.token_index(torch.tensor([slot])), ones * value, -ones * value)
    for layer in range(2):
        keys, values = cache.gather(layer, cache.block_index(torch.tensor([2, 0, 1])))
        expected = [1000.0 * layer + slot for slot in (8, 9, 10, 11, 0, 1, 2, 3, 4, 5, 6, 7)]
        assert keys[:, 0, 0].tolist() == expected
        assert values[:, 1, 15].tolist() == [-value for value in expected]
    assert cache.pool[0].is_contiguous()
    assert not cache.pool[cache.null_block].any()


@pytest.mark.case("K77")
def test_a_pool_larger_than_the_memory_is_refused_with_numbers() -> None:
    with pytest.raises(KVAllocationError, match=r"needs \d+ MiB.*lower --kv-memory"):
        KVCache(config_of(8, 1, 128), 2**36, 16, torch.float32, CPU)
