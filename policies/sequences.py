"""What a policy sees of sequences and teams: values in, never objects it could change.

All times are integer microseconds on the scheduler's clock, work is integer microseconds of *stand-alone* device time
(from the step profile), cost is integer microseconds of *charged* device time. Integers make schedules exact and
replayable: with floats 86 of 300 reference schedules differed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from policies.team_counters import CountedByPolicy


@dataclass(frozen=True, slots=True)
class TeamTerms:
    """What a team's tier gives it. Changes only by `Policy.configure` (a logged reload)."""

    team_id: int
    weight: int = 1  # phi, a positive integer
    start_level: int = 0  # delta, the least level its sequences join
    starving_after_us: int = 1_000_000  # alpha
    promotion_burst_grants: int = 4  # sigma_g in grants of G work-microseconds each


@dataclass(frozen=True, slots=True)
class SequenceTerms:
    """One sequence at its arrival. `seq_id` is unique for the life of the engine."""

    seq_id: int
    team_id: int
    prompt_len: int  # tokens
    cached_len: int  # tokens of the prompt whose KV is already there
    prefill_work_us: int  # t_p(prompt - cached): decides the join level
    start_level: int  # the caller's floor; the policy takes the larger of this and the team's
    arrival_us: int


@dataclass(frozen=True, slots=True)
class Served:
    """What one sequence did in one executed step."""

    seq_id: int
    work_us: int  # stand-alone work of the tokens computed
    cost_us: int  # its part of the step's measured time; all parts of a step sum to the step
    has_generated: bool  # it has produced at least its first token, this step included
    has_finished: bool = False  # this was its last step: it stopped or reached its length (not: aborted, failed)
    is_decode: bool = False  # a decode row, which other rows of the step made wait


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step's time by the step profile, in whole microseconds: with all its rows, with its decode rows alone, and
    what it would be for the decode rows of one team alone, where a policy is to look at that (`own_us`, by team).
    """

    predicted_us: int
    decode_us: int
    own_us: Mapping[int, int] = field(default_factory=dict)


AS_SERVED = StepTime(1, 1)  # no row has made another one wait


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamService(CountedByPolicy):
    """One team's counters, as the once-a-second service sample reads them: SUM ones are running totals."""

    team_id: int
    backlogged_us: int = 0  # running total of the time it had a sequence left waiting in a step
    lag: float  # D, in cost-microseconds per unit of weight, above the least of the able teams
    is_coasting: bool = False  # its requests go by arrival (`policies.coast`)
    waiting_levels: tuple[int, ...] = ()  # `waiting` by level


@dataclass(frozen=True, slots=True)
class Overhead:
    """What a step cost beside its rows' own new tokens: block copies and replayed tokens, billed to who caused them."""

    team_id: int
    cost_us: int


@dataclass(frozen=True, slots=True)
class Starving:
    """A sequence that has begun to starve: its team's `starving_after` has passed since its last step."""

    seq_id: int
    num_ahead: int  # sequences of its team that began to starve before it, and have not run since
    num_grants: int = field(default=0, compare=False)  # of its team that go before: those ahead, and an open one
    grants_us: int = field(default=0, compare=False)  # work that these grants give
    held_us: int = field(default=0, compare=False)  # the team's budget in work, rounded down; may be negative


@dataclass(frozen=True, slots=True)
class Turn:
    """When a sequence will probably run next: its ENST (FastServe, arXiv 2305.05920, section on KV swapping)."""

    seq_id: int
    enst_us: int  # from now; 0 is at once
