"""The step profile and what follows from it: stand-alone work of a sequence, and who pays for a measured step.

Work drives levels and quanta and does not depend on the batch. Cost is a step's measured time, split by *marginal*
work, with the fixed part of the step shared equally by its rows; the parts sum to the step exactly.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepProfile:
    """How long steps take on one (model, device, threads, dtype), fitted once. Microseconds.

    A step of rows r takes about fixed_us + sum of marginal(r). Stand-alone: t_p(n) = fixed_us + marginal prefill,
    t_d(ctx) = fixed_us + marginal decode.
    """

    fixed_us: float  # launch, weights streamed once, sampling overhead
    prefill_token_us: float  # each prompt token in the prefill class
    prefill_attention_us: float  # each (prompt token, earlier token) pair
    decode_row_us: float  # each decode row
    decode_context_us: float  # each token of KV that a decode row reads

    def prefill_marginal_us(self, start: int, num_tokens: int) -> float:
        """Marginal time of prompt tokens [start, start + num_tokens)."""
        pairs = num_tokens * start + num_tokens * (num_tokens + 1) / 2
        return self.prefill_token_us * num_tokens + self.prefill_attention_us * pairs

    def decode_marginal_us(self, context_len: int) -> float:
        """Marginal time of one decode row that reads `context_len` tokens of KV."""
        return self.decode_row_us + self.decode_context_us * context_len

    def prefill_work_us(self, start: int, num_tokens: int) -> int:
        """t_p(start + num_tokens) - t_p(start): the first chunk carries the fixed part, so chunking changes no sum."""
        if num_tokens <= 0:
            return 0
        return self._prefill_until_us(start + num_tokens) - self._prefill_until_us(start)

    def _prefill_until_us(self, length: int) -> int:
        return round(self.fixed_us + self.prefill_marginal_us(0, length)) if length > 0 else 0

    def decode_work_us(self, context_len: int) -> int:
        """t_d(context_len): one decode step alone on the device."""
        return max(1, round(self.fixed_us + self.decode_marginal_us(context_len)))


def split_step(duration_us: int, marginals_us: Sequence[float], fixed_us: float) -> list[int]:
    """Charge each row of a step its part of `duration_us`, in whole microseconds that sum to it exactly.

    `marginals_us` are the rows' marginal times, `fixed_us` the profile's fixed part, shared equally. Rounding
    remainders go to the earliest rows.
    """
    if not marginals_us:
        return []
    share = fixed_us / len(marginals_us)
    weights = [m + share for m in marginals_us]
    total = sum(weights)
    if total <= 0:
        weights, total = [1.0] * len(marginals_us), float(len(marginals_us))
    charges = [int(duration_us * w / total) for w in weights]
    for i in range(duration_us - sum(charges)):
        charges[i % len(charges)] += 1
    return charges
