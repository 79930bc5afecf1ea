"""Every width and bound that the policy keeps and promises: Theta, u, the lag between teams, the longest pause.

Whoever needs one has it from here: the lag meter and the gate, the engine's samples, the admin API, the reports. The
weights are those of the configured teams, so that what is enforced is what is printed.

A team that is gone from the table but still has sequences keeps its own weight, and that may be less than any
configured one. One step of such a team moves its D by up to its own step over its own weight, which is more than u. In
the bound of a pair with such a team, the larger of the two takes the place of u: Theta + 2 max(u, step / weight).
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fractions import Fraction

from policies.config import PolicyConfig
from policies.sequences import TeamTerms

GRANT_TIME_PARTS = 4  # a grant of G of work is over when the steps in which it was used have taken this many times G
_WHOLE = 100  # promotion_percent is in percent


@dataclass(frozen=True, slots=True)
class Widths:
    """Differences of D under one table of teams, in cost-microseconds per unit of weight times `scale`: integers, as
    the lag meter keeps D.
    """

    scale: int
    theta: int  # how far ahead of the least D a team may start a step; rounded down, which no comparison of D notices
    step: int  # u: the most that one sequence costs in one step, over the least weight

    @property
    def band(self) -> int:
        """Theta + u: how far above the least D a team may join, or keep when the table changes; and how far below it a
        team stays that cannot run.
        """
        return self.theta + self.step

    @property
    def narrow(self) -> int:
        """Theta + 2u: the most that D of two able teams differs, at any number of slots."""
        return self.theta + 2 * self.step

    @property
    def wide(self) -> int:
        """2 Theta + 4u: the same while sequences are refused for blocks."""
        return 2 * self.narrow


def make_widths(config: PolicyConfig, weights: Collection[int], scale: int) -> Widths | None:
    """The widths for configured teams of these weights; `scale` is a multiple of each weight. None: there is no gate,
    and nothing bounds D. An empty table counts as one team of weight 1.
    """
    if not config.is_gated:
        return None
    least, total = min(weights, default=1), sum(weights) or 1
    if config.theta_us is not None:
        theta = config.theta_us * scale
    else:
        theta = max(config.fairness_window_us * scale // total, config.quantum_cost_us * scale // least)
    return Widths(scale, theta, config.step_cost_max_us * scale // least)


def exact_widths(config: PolicyConfig, weights: Collection[int]) -> Widths | None:
    """The same at a scale at which nothing is rounded. `weights` are those of at least one team."""
    return make_widths(config, weights, math.lcm(sum(weights), *weights))


def lag_bound(config: PolicyConfig, weights: Collection[int], *, is_short: bool = False) -> Fraction | None:
    """The most that D of two able teams differs, at any number of slots: Theta + 2u; None is no bound.

    `is_short`: while sequences are refused for blocks it is twice that, 2 Theta + 4u. Where cost is not known
    beforehand the error of one estimate, times the slots, over the least weight comes on top; so does what copies cost
    a team beyond its rows.
    """
    widths = exact_widths(config, weights)
    return None if widths is None else Fraction(widths.wide if is_short else widths.narrow, widths.scale)


@dataclass(frozen=True, slots=True)
class PauseTerms:
    """The parts of a team's maximum pause that depend on its queue and budget, beside the sum of those that do not.
    Work in microseconds; weights and percents as they are.
    """

    base_us: int
    grant_us: int  # G
    step_us: int  # w
    weight: int
    total: int  # of all weights
    percent: int  # eta
    rate_percent: int  # R
    turn_us: int  # the longest that one grant takes in time, once it may run

    def bound_us(self, num_grants: int, grants_us: int | None = None, held_us: int | None = None) -> int:
        """The longest pause behind so many grants, which give `grants_us` of work, when the budget holds `held_us`.
        None: each gives G, and the budget is as low as it can be.
        """
        given_us = num_grants * self.grant_us if grants_us is None else grants_us
        ahead_us = given_us + num_grants * self.step_us
        missing_us = max(0, ahead_us + self.grant_us - (-self.step_us if held_us is None else held_us))
        # In hundredths of a microsecond over `percent` and the like, each rounded up by itself.
        funding_us = -(-missing_us * _WHOLE * self.total // (self.percent * self.weight))
        serving_us = -(-ahead_us * _WHOLE * self.total // (self.rate_percent * self.weight))
        return self.base_us + max(funding_us, serving_us, num_grants * self.turn_us)


def pause_terms(
    config: PolicyConfig,
    table: Iterable[TeamTerms],
    team_id: int,
    upload_us: int,
    *,
    is_short: bool = False,
    rate_percent: int = _WHOLE,
) -> PauseTerms | None:
    """What the maximum pause of a team's sequences is made of; arguments as of `pause_bound_us`. None: there is no
    bound, for promotion is off or the team may not keep one grant.
    Raises KeyError for a team that is not in the table.
    """
    by_id = {terms.team_id: terms for terms in table}
    team = by_id[team_id]
    percent, grant = config.promotion_percent, config.promotion_grant_us
    weights = [terms.weight for terms in by_id.values()]
    gap = lag_bound(config, weights, is_short=is_short)
    if not percent or gap is None or team.promotion_burst_grants < 1:
        return None
    total, step = sum(weights), config.step_cost_max_us
    lockout = gap * (total - team.weight) * _WHOLE / rate_percent
    sigmas = sum(terms.promotion_burst_grants for terms in by_id.values()) * grant
    crowd = -(-(sigmas + step) * _WHOLE * _WHOLE // ((_WHOLE - percent) * rate_percent))
    base = team.starving_after_us + -(-lockout.numerator // lockout.denominator) + crowd + upload_us
    base += 2 * config.longest_step_us
    turn = GRANT_TIME_PARTS * grant + config.longest_step_us
    return PauseTerms(base, grant, step, team.weight, total, percent, rate_percent, turn)


def pause_bound_us(
    config: PolicyConfig,
    table: Iterable[TeamTerms],
    team_id: int,
    num_ahead: int,
    upload_us: int,
    *,
    is_short: bool = False,
    rate_percent: int = _WHOLE,
) -> int:
    """The longest pause of a sequence of `team_id`, from the end of one of its steps to the end of the next, in
    microseconds, rounded up:

        alpha + band (Phi - phi) / R + funding + (sum of sigma + w) / ((1 - eta) R) + T_in + 2 C

    alpha, phi, rho and sigma are the team's and Phi the sum of weights in `table`; the band is `lag_bound`, Theta + 2u,
    and twice that where blocks may be short (`is_short`); w is the longest step of one sequence, T_in = `upload_us` the
    time its blocks need to come back, C the longest step: one that runs when the sequence begins to starve, and its
    own. R is the least rate of the device in work per time, `rate_percent` hundredths: what swapping leaves of it.

    Funding is the time until the team's budget has paid what goes before and holds a grant. N = `num_ahead` grants of
    G go before; each may cost G + w, for its last step may begin with the least part of it left. With the budget at its
    lowest that is (N + 1) (G + w) / rho. With a budget b it is (N (G + w) + G - b) / rho, and at least the time in
    which the team's share serves the grants before, N (G + w) Phi / (phi R).

    It bounds the pause, not the progress. 0: there is no bound, for promotion is off or the team may not keep one
    grant. Raises KeyError for a team that is not in the table.
    """
    terms = pause_terms(config, table, team_id, upload_us, is_short=is_short, rate_percent=rate_percent)
    return 0 if terms is None else terms.bound_us(num_ahead)
