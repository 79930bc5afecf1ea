"""What sampling parameters can be: every bound of them in one place, for the gateway, the engine and the sampler.

A number from a client may be any float64; the sampler computes in float32. `float32_temperature` decides what becomes
of a temperature that float32 cannot divide by. Token ids, of prompts and of ends alike, lie in the model's vocabulary.
"""

import math
from collections.abc import Sequence

from engine.wire.messages import SamplingParams

# A power of two between these and its reciprocal are both normal numbers of float32, so that a division neither
# overflows nor depends on whether a device flushes subnormal numbers to zero or multiplies by the reciprocal.
TEMPERATURE_MIN = 2.0**-126
TEMPERATURE_MAX = 2.0**126

SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1
ANY_SEED = -1  # what clients send that cannot leave the field out: the same as no seed


def float32_temperature(temperature: float) -> float:
    """The temperature to divide by in float32; 0 is greedy, which is what is left of a temperature too small for that.

    A temperature above what float32 bears is the largest that it does: the distribution is flat with either.
    """
    return min(temperature, TEMPERATURE_MAX) if temperature >= TEMPERATURE_MIN else 0.0


def foreign_id(token_ids: Sequence[int], vocab_size: int) -> int | None:
    """The position of the first id outside [0, vocab_size); None when all are inside."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return None
    return next(i for i, token_id in enumerate(token_ids) if not 0 <= token_id < vocab_size)


def sampling_fault(sampling: SamplingParams, vocab_size: int) -> str | None:
    """What is out of range in sampling parameters, as a sentence; None when nothing is."""
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
