"""Tensors on their way into a file."""

import numpy as np

from engine.models.safetensors_file import bfloat16_bits


def test_bfloat16_rounds_to_nearest_even() -> None:
    import torch

    values = np.random.RandomState(0).standard_normal(5000).astype(np.float32) * 100
    values[:3] = [1.00390625, 1.01171875, 0.0]  # two exact ties
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(bfloat16_bits(values), expected)
