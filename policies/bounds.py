"""Every width and bound that the policy promises: Theta, u, the lag between teams, the longest pause.

Whoever prints a promise computes it here: the engine's samples, the admin API, the reports. Weights are those of the
configured teams.
"""

from collections.abc import Collection, Iterable
from fractions import Fraction

from policies.config import PolicyConfig
from policies.sequences import TeamTerms

_WHOLE = 100  # promotion_percent is in percent


def step_width(config: PolicyConfig, weights: Collection[int]) -> Fraction:
    """u, in cost-microseconds per unit of weight: one sequence's most in one step over the least weight."""
    return Fraction(config.step_cost_max_us, min(weights))


def gate_width(config: PolicyConfig, weights: Collection[int]) -> Fraction | None:
    """Theta for a table of teams with these weights, in cost-microseconds per unit of weight; None is infinite."""
    if not config.is_gated:
        return None
    if config.theta_us is not None:
        return Fraction(config.theta_us)
    window = Fraction(config.fairness_window_us, sum(weights))
    return max(window, Fraction(config.quantum_cost_us, min(weights)))


def lag_bound(config: PolicyConfig, weights: Collection[int], *, is_short: bool = False) -> Fraction | None:
    """The most that D of two able teams differs, at any number of slots: Theta + 2u; None is no bound.

    `is_short`: while sequences are refused for blocks it is twice that, 2 Theta + 4u. Where cost is not known
    beforehand the error of one estimate, times the slots, over the least weight comes on top; so does what copies cost
    a team beyond its rows.
    """
    theta = gate_width(config, weights)
    return None if theta is None else (theta + 2 * step_width(config, weights)) * (1 + is_short)


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
