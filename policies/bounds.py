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
    """The longest pause before a step of a sequence of `team_id`, in microseconds, rounded up:

        alpha + band (Phi - phi) / R + (N + 1) (G + w) / rho + (sum of sigma + w) / ((1 - eta) R) + T_in

    alpha, phi, rho and sigma are the team's and Phi the sum of weights in `table`; the band is `lag_bound`, Theta + 2u,
    and twice that where blocks may be short (`is_short`); w is the longest step of one sequence, N = `num_ahead` those
    of the team that starved before it and have not run since, T_in = `upload_us` the time its blocks need to come back.
    A grant may cost the budget G + w, for its last step may begin with the least part of it left. R is the least rate
    of the device in work per time, `rate_percent` hundredths: what swapping leaves of it. It bounds the pause, not the
    progress. 0: there is no bound, for promotion is off or the team may not keep one grant.
    Raises KeyError for a team that is not in the table.
    """
    by_id = {terms.team_id: terms for terms in table}
    team = by_id[team_id]
    percent, grant = config.promotion_percent, config.promotion_grant_us
    weights = [terms.weight for terms in by_id.values()]
    gap = lag_bound(config, weights, is_short=is_short)
    if not percent or gap is None or team.promotion_burst_grants < 1:
        return 0
    total, step = sum(weights), config.step_cost_max_us
    lockout = gap * (total - team.weight) * _WHOLE / rate_percent
    sigmas = sum(terms.promotion_burst_grants for terms in by_id.values()) * grant
    # In hundredths of a microsecond over `percent` and the like, each term rounded up by itself.
    funding = -(-(num_ahead + 1) * (grant + step) * _WHOLE * total // (percent * team.weight))
    crowd = -(-(sigmas + step) * _WHOLE * _WHOLE // ((_WHOLE - percent) * rate_percent))
    return team.starving_after_us + -(-lockout.numerator // lockout.denominator) + funding + crowd + upload_us
