"""The KV pool: its layout, and the memory it may take."""

import pytest
import torch

from engine.device.kv_cache import KVAllocationError, KVCache
from tests.support.engine.attention import CPU, config_of


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
