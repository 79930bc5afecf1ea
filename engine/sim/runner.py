"""A runner that computes no model: steps take as long as the step profile says, tokens come from a hash.

With a `VirtualClock` a simulation runs as fast as Python does; with a `PacedClock` the same engine serves in real time.
"""

import time
from collections.abc import Callable
from hashlib import blake2b
from typing import Protocol

from engine.plan import StepPlan, StepResult
from policies.cost import StepProfile

COPY_BYTES_PER_SECOND = 4 * 1024**3  # between two pools in one machine's memory; a PCIe link is faster


class AdvancingClock(Protocol):
    """A clock that a simulated step can move."""

    def advance(self, by_us: int) -> None:
        """Let `by_us` microseconds pass."""


class PacedClock:
    """Real monotonic time. A simulated step sleeps for as long as it takes."""

    def __init__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        self._sleep = sleep

    def now_us(self) -> int:
        return time.monotonic_ns() // 1000

    def advance(self, by_us: int) -> None:
        """Sleep `by_us` microseconds."""
        self._sleep(by_us / 1e6)


class SimRunner:
    """Takes the modelled time for each step and makes up tokens. The same seed and position give the same token."""

    def __init__(
        self,
        profile: StepProfile,
        clock: AdvancingClock,
        *,
        token_ids: range = range(32, 127),
        end_token_id: int | None = None,
        end_one_in: int = 0,
        block_copy_us: float = 0.0,
    ) -> None:
        """Tokens come from `token_ids`. About one token in `end_one_in` is `end_token_id` instead, if both are given.

        A copy takes `block_copy_us` for each block. It is over with its step, and the device stands still for it.
        Raises ValueError when `token_ids` is empty.
        """
        if not token_ids:
            raise ValueError("the range of token ids is empty")
        self._profile = profile
        self._clock = clock
        self._token_ids = token_ids
        self._end_token_id = end_token_id
        self._end_one_in = end_one_in
        self._block_copy_us = block_copy_us

    def execute(self, plan: StepPlan) -> StepResult:
        """Let the modelled time pass and name the tokens."""
        copies = (*plan.copies_out, *plan.copies_in)
        copy_us = round(self._block_copy_us * sum(len(copy.pairs) for copy in copies))
        duration_us = (step_us(self._profile, plan) if plan.rows else 0) + copy_us
        self._clock.advance(duration_us)
        tokens = {
            row.seq_id: self._token(row.sampling.seed, row.start + len(row.token_ids))
            for row in plan.rows
            if row.samples
        }
        copies_done = tuple(copy.copy_id for copy in copies)
        return StepResult(plan.step_id, duration_us, tokens, copies_done=copies_done, copy_us=copy_us)

    def release(self, seq_id: int) -> None:
        """Nothing is kept for a sequence."""

    def _token(self, seed: int, position: int) -> int:
        digest = blake2b(b"%d:%d" % (seed, position), digest_size=8).digest()
        drawn = int.from_bytes(digest, "little")
        if self._end_token_id is not None and self._end_one_in and drawn % self._end_one_in == 0:
            return self._end_token_id
        return self._token_ids[(drawn >> 16) % len(self._token_ids)]


def step_us(profile: StepProfile, plan: StepPlan) -> int:
    """How many microseconds a plan's rows take by the profile; at least 1.

    That is the fixed part once, and each row's marginal part. Copies are not included.
    """
    total = profile.fixed_us
    for row in plan.rows:
        if row.is_decode:
            total += profile.decode_marginal_us(row.start + 1)
        else:
            total += profile.prefill_marginal_us(row.start, len(row.token_ids))
    return max(1, round(total))
