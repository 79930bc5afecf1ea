"""Attention by gathering: how rows are grouped and padded."""

import random
from itertools import pairwise

import pytest
import torch

from engine.device.attention.gather_sdpa import CALL_TOKENS, length_groups, padding_granularity
from tests.support.engine.attention import CPU, config_of


def test_one_long_row_does_not_stretch_the_others() -> None:
    assert length_groups([]) == []
    assert length_groups([64, 64, 64]) == [[0, 1, 2]]
    assert length_groups([64, 2048, 128]) == [[1], [0, 2]]
    assert length_groups([64, 128]) == [[0, 1]]  # a second call would cost more than the padding


@pytest.mark.parametrize("seed", range(20))
def test_length_groups_cost_the_least(seed: int) -> None:
    """Against every way to cut the sorted rows."""
    rng = random.Random(seed)
    lengths = [64 * rng.randint(1, 12) for _ in range(rng.randint(1, 8))]
    groups = length_groups(lengths)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))

    def cost(parts: list[list[int]]) -> int:
        return sum(CALL_TOKENS + len(part) * max(part) for part in parts if part)

    ordered = sorted(lengths)
    cuts = [[i for i in range(1, len(lengths)) if mask >> i & 1] for mask in range(0, 2 ** len(lengths), 2)]
    every = ([ordered[a:b] for a, b in pairwise([0, *cut, len(lengths)])] for cut in cuts)
    assert cost([[lengths[row] for row in group] for group in groups]) == min(map(cost, every))


def test_the_padding_probe_finds_something_or_says_none() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert padding_granularity(config_of(3, 3, 64), dtype, CPU) in (0, 16, 32, 64, 128, 256, 512)
