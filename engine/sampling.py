"""The bounds of all sampling parameters, in one place for the gateway, the engine and the sampler.

A client may send any float64, but the sampler computes in float32. `float32_temperature` decides what becomes of a
temperature by which float32 cannot divide. Every token id, in a prompt or in `stop_token_ids`, must lie in the model's
vocabulary.
"""

import math
from collections.abc import Sequence

from engine.wire.messages import SamplingParams

# Between these two powers of two, a temperature and its reciprocal are both normal numbers of float32. So a division
# cannot overflow, and does not depend on whether a device flushes subnormal numbers or multiplies by the reciprocal.
TEMPERATURE_MIN = 2.0**-126
TEMPERATURE_MAX = 2.0**126

SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1
ANY_SEED = -1  # means "no seed", for clients that cannot leave the field out


def float32_temperature(temperature: float) -> float:
    """The temperature that the sampler divides by in float32, or 0 for greedy sampling.

    A temperature below TEMPERATURE_MIN becomes 0: its distribution is one token. A temperature above TEMPERATURE_MAX
    becomes TEMPERATURE_MAX: the distribution is flat with both.
    """
    return min(temperature, TEMPERATURE_MAX) if temperature >= TEMPERATURE_MIN else 0.0


def foreign_id(token_ids: Sequence[int], vocab_size: int) -> int | None:
    """The position of the first id outside [0, vocab_size), or None if all ids are inside."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return None
    return next(i for i, token_id in enumerate(token_ids) if not 0 <= token_id < vocab_size)


def sampling_fault(sampling: SamplingParams, vocab_size: int) -> str | None:
    """A sentence about the first sampling parameter that is out of range, or None if all are in range."""
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        return f"temperature must be finite and not negative, got {sampling.temperature}"
    if not 0 < sampling.top_p <= 1:
        return f"top_p must lie in (0, 1], got {sampling.top_p}"
    if sampling.top_k < 0:
        return f"top_k must not be negative, got {sampling.top_k}"
    if not SEED_MIN <= sampling.seed <= SEED_MAX:
        return f"seed must have 64 bits with its sign, got {sampling.seed}"
    if sampling.max_tokens < 1:
        return f"max_tokens must be at least 1, got {sampling.max_tokens}"
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        return f"min_tokens must lie in [0, max_tokens], got {sampling.min_tokens}"
    position = foreign_id(sampling.stop_token_ids, vocab_size)
    if position is not None:
        return f"stop_token_ids must lie in [0, {vocab_size}), got {sampling.stop_token_ids[position]}"
    return None
