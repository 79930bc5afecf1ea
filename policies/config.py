"""The policy's constants: levels, quanta, the gate's width and the bound on one sequence's part of a step.

Everything here follows from the step profile and the settings, is fixed for the life of a policy, and is an integer,
so that the same configuration and the same events give the same schedule. What also depends on the teams' weights
(Theta, u) is worked out by `policies.bounds` whenever the table of teams changes.
"""

from dataclasses import dataclass

from policies.cost import StepProfile

# The context length (tokens) at which the profiled decode step sets the first quantum: an ordinary chat.
TYPICAL_CONTEXT_LEN = 512
# The prompt (tokens) that still joins the least level its tier allows: an ordinary question.
TYPICAL_PROMPT_LEN = 128
QUANTUM_DECODE_STEPS = 2
GRANT_DECODE_STEPS = 8


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Constants of a policy. Work and cost are integer microseconds. Raises ValueError for values out of range."""

    levels: int = 8  # K; the last level's quantum is infinite
    base_quantum_us: int = 50_000  # q_0, in work; q_k = q_0 * 2^k
    quanta_us: tuple[int, ...] = ()  # when given, the quanta themselves: K of them (the last unused) or K - 1
    fairness_window_us: int = 1_000_000  # tau_f * R_0: Theta is this over the sum of configured weights
    theta_us: int | None = None  # when given, Theta itself, in cost per unit of weight
    theta_cost_us: int | None = None  # Theta is at least this over the least weight; None is q_0
    is_gated: bool = True  # False is Theta = infinity: level order without a gate
    step_cost_max_us: int = 250_000  # the most that one sequence can cost in one step; u is this over the least weight
    step_us_max: int | None = None  # the longest step, by the profile; None is one sequence's longest
    decode_work_us: int = 25_000  # guess at a decode step's work until a sequence has shown one
    chunk_work_us: int = 200_000  # guess at a prompt chunk's work until a sequence has shown one
    coast: bool = True  # teams of like requests go by arrival (`policies.coast`)
    coast_below_percent: int = 25  # CV^2 below which a team starts to coast
    coast_above_percent: int = 50  # CV^2 above which it stops
    coast_completions: int = 256  # latest completions of a team that CV^2 is taken over
    coast_completions_min: int = 8  # fewer say nothing
    promotion_percent: int = 20  # eta: work that all budgets together gain, in percent of time; 0 is none
    grant_us: int | None = None  # G, work of one grant; None is q_2 (the last finite quantum when there are fewer)

    def __post_init__(self) -> None:
        if self.levels < 1:
            raise ValueError(f"levels is {self.levels}; a policy needs at least 1")
        if self.quanta_us and len(self.quanta_us) not in (self.levels - 1, self.levels):
            raise ValueError(f"{len(self.quanta_us)} quanta given for {self.levels} levels")
        if min(self.quanta(), default=1) <= 0:
            raise ValueError("quanta must be positive")
        for name in ("fairness_window_us", "step_cost_max_us", "decode_work_us", "chunk_work_us"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is negative")
        for name in ("theta_us", "theta_cost_us", "step_us_max"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name} is negative")
        if not 0 <= self.promotion_percent < 100:
            raise ValueError("promotion_percent must be from 0 to 99")
        if self.promotion_grant_us < 1:
            raise ValueError("grant_us must be positive")
        if not 0 <= self.coast_below_percent <= self.coast_above_percent:
            raise ValueError("coast_below_percent must be from 0 to coast_above_percent")
        if not 1 <= self.coast_completions_min <= self.coast_completions:
            raise ValueError("coast_completions_min must be from 1 to coast_completions")

    def quanta(self) -> tuple[int, ...]:
        """The quanta of all levels but the last, which has none."""
        if self.quanta_us:
            return self.quanta_us[: self.levels - 1]
        return tuple(self.base_quantum_us << level for level in range(self.levels - 1))

    @property
    def promotion_grant_us(self) -> int:
        """G: `grant_us` or, when that is None, q_2, or the last finite quantum when there are fewer."""
        if self.grant_us is not None:
            return self.grant_us
        quanta = self.quanta()
        return quanta[min(2, len(quanta) - 1)] if quanta else self.base_quantum_us

    @property
    def quantum_cost_us(self) -> int:
        """The least that Theta times the least weight is: `theta_cost_us`, or the cost of q_0 by the profile. Alone on
        the device a sequence pays exactly its work.
        """
        if self.theta_cost_us is not None:
            return self.theta_cost_us
        return self.quanta()[0] if self.levels > 1 else self.base_quantum_us

    @property
    def longest_step_us(self) -> int:
        """C: no step takes longer, by the profile."""
        return self.step_cost_max_us if self.step_us_max is None else self.step_us_max


def from_profile(
    profile: StepProfile,
    *,
    levels: int,
    fairness_window_us: int,
    chunk_tokens: int,
    context_len: int,
    chunk_us: int | None = None,
    step_us_max: int | None = None,
    block_size: int = 16,
    coast: bool = True,
    promotion_percent: int = 20,
) -> PolicyConfig:
    """The default constants (`docs/scheduling.md`): q_0 is the work of a typical prompt, or of two decode steps if that
    is more, so that an ordinary prompt joins the start level of its tier; Theta and the grant stay in decode steps, 2
    and 8, because a longer prompt needs neither. u is the largest chunk at the largest context (or a decode there, if
    that is more). `chunk_tokens` is the most prompt tokens of one sequence in one step.
    """
    chunk = max(1, min(chunk_tokens, context_len))
    decode_work = profile.decode_work_us(min(TYPICAL_CONTEXT_LEN, context_len))
    prefill = profile.prefill_marginal_us(context_len - chunk, chunk)
    if chunk_us is not None:
        block = min(block_size, context_len)
        prefill = min(prefill, max(chunk_us, profile.prefill_marginal_us(context_len - block, block)))
    largest = max(prefill, profile.decode_marginal_us(context_len))
    return PolicyConfig(
        levels=levels,
        base_quantum_us=max(
            QUANTUM_DECODE_STEPS * decode_work, profile.prefill_work_us(0, min(TYPICAL_PROMPT_LEN, context_len))
        ),
        theta_cost_us=QUANTUM_DECODE_STEPS * decode_work,
        grant_us=GRANT_DECODE_STEPS * decode_work,
        fairness_window_us=fairness_window_us,
        step_cost_max_us=round(profile.fixed_us + largest),
        step_us_max=step_us_max,
        decode_work_us=decode_work,
        chunk_work_us=min(profile.prefill_work_us(0, chunk), round(profile.fixed_us) + (chunk_us or 1 << 62)),
        coast=coast,
        promotion_percent=promotion_percent,
    )
