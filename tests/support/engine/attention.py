"""A filled KV pool, and the configuration of models that tests attend with."""

import random

import torch

from engine.device.attention import AttentionBackend
from engine.device.attention.gather_sdpa import GatherSdpa
from engine.device.attention.paged_native import PagedNative
from engine.device.kv_cache import KVCache
from engine.models.config import ModelConfig, RopeScaling
from tests.support.engine.torch_schedules import BLOCK_SIZE, native_kernels

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


class Filled:
    """A cache with sequences of random keys and values, written through its own interface in layer 1."""

    def __init__(
        self,
        config: ModelConfig,
        lengths: list[int],
        dtype: torch.dtype,
        seed: int = 0,
        num_blocks: int = 64,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.cache = KVCache(config, num_blocks, block_size, dtype, CPU)
        self.generator, self.config, self.dtype = generator, config, dtype
        free = list(range(num_blocks))
        random.Random(seed).shuffle(free)
        self.tables, self.keys, self.values = [], [], []
        for length in lengths:
            table = [free.pop() for _ in range(-(-length // block_size))]
            shape = (length, config.num_kv_heads, config.head_dim)
            keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
            slots = torch.tensor([table[p // block_size] * block_size + p % block_size for p in range(length)])
            self.cache.write(1, self.cache.token_index(slots), keys, values)
            self.tables.append(table)
            self.keys.append(keys)
            self.values.append(values)

    def queries(self, count: int) -> torch.Tensor:
        shape = (count, self.config.num_heads, self.config.head_dim)
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def backend(self, name: str, granularity: int | None = None) -> AttentionBackend:
        if name == "torch":
            return GatherSdpa(self.config, self.cache, granularity)
        angles = torch.arange(self.config.context_len).unsqueeze(1) / (1 + torch.arange(self.config.head_dim // 2))
        self.cos = angles.cos().repeat(1, 2)
        self.sin = torch.cat([-angles.sin(), angles.sin()], dim=1)
        return PagedNative(self.config, self.cache, native_kernels(), self.cos, self.sin)
