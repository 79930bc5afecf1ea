"""The lag meter on its own: Theta and u from the weights, reloads, exactness, joining.

Unit of fairness: D, cost-microseconds per unit of weight.
"""

from fractions import Fraction

import pytest

from policies.config import PolicyConfig
from policies.eg_mlfq import EgMlfq
from policies.lag import LagMeter
from policies.sequences import AS_SERVED, SequenceTerms, Served, TeamTerms
from tests.support.policies.driver import Driver, config


def meter(**settings: object) -> LagMeter:
    return LagMeter(PolicyConfig(**settings))  # type: ignore[arg-type]


def terms(*weights: int) -> list[TeamTerms]:
    return [TeamTerms(team_id, weight) for team_id, weight in enumerate(weights)]


def test_theta_and_u_follow_the_configured_weights() -> None:
    shares = meter(fairness_window_us=1_000_000, base_quantum_us=50_000, step_cost_max_us=250_000)
    shares.configure(terms(4, 2, 2))
    assert shares.widths is not None
    assert Fraction(shares.widths.theta, shares.scale) == 125_000, "tau_f * R_0 over the sum of weights"
    assert Fraction(shares.widths.step, shares.scale) == 125_000, "250 ms over the least weight"
    shares.configure(terms(*[1] * 100))
    assert Fraction(shares.widths.theta, shares.scale) == 50_000, "never less than the cost of the first quantum"


def test_theta_may_be_given_or_infinite() -> None:
    given = meter(theta_us=7)
    given.configure(terms(3, 2))
    assert given.widths is not None and given.widths.theta == 7 * given.scale == 42
    infinite = meter(is_gated=False)
    infinite.configure(terms(3, 2))
    assert infinite.widths is None


@pytest.mark.case("C08")
@pytest.mark.parametrize("weight", [0, -1])
def test_weights_are_positive(weight: int) -> None:
    with pytest.raises(ValueError, match="positive integers"):
        meter().configure(terms(1, weight))


def test_a_team_stands_in_the_table_once() -> None:
    with pytest.raises(ValueError, match="twice"):
        meter().configure([TeamTerms(1), TeamTerms(1, weight=2)])


def policy_with(weights: tuple[int, ...], **settings: int) -> EgMlfq:
    policy = EgMlfq(PolicyConfig(**{"theta_us": 10**9, "step_cost_max_us": 0, **settings}))  # type: ignore[arg-type]
    policy.configure(terms(*weights), 0)
    for team in range(len(weights)):
        for i in range(3):
            policy.arrive(SequenceTerms(10 * team + i, team, 1, 0, 0, 0, 0), 0)
    return policy


def serve(policy: EgMlfq, cost: int, only_team: int = 0) -> None:
    """A step of one sequence of `only_team`."""
    policy.begin(0)
    while (seq_id := policy.best()) is not None:
        if seq_id // 10 == only_team:
            policy.take(seq_id, 1)
            policy.settle([Served(seq_id, 1, cost, True)], 0)
            return
        policy.refuse(seq_id)
    raise AssertionError("no candidate of that team")


def test_new_weights_keep_every_lag_exactly() -> None:
    policy = policy_with((2, 3))
    serve(policy, 99)
    before = policy.lags()
    # 99 between weights 2 and 3 is 39.6 and 59.4: whole microseconds 39 and 59, the rest to the lowest id.
    assert before == {0: Fraction(99 - 40, 2), 1: Fraction(-59, 3)}
    for weights in ((7, 5), (1, 1), (997, 991), (2, 3)):
        policy.configure(terms(*weights), 0)
        assert policy.lags() == before


def test_the_scale_does_not_grow_with_every_reload() -> None:
    policy = policy_with((2, 3))
    serve(policy, 100)
    for weight in range(1, 200):
        policy.configure(terms(weight, 3), 0)
    policy.configure(terms(2, 3), 0)
    assert policy._meter.scale == 6


def test_a_reload_clips_to_the_new_band() -> None:
    """Eight more teams narrow Theta from 200/2 to 200/10; u stays 10."""
    policy = EgMlfq(PolicyConfig(fairness_window_us=200, base_quantum_us=1, step_cost_max_us=10))
    policy.configure(terms(1, 1), 0)
    for seq_id in (0, 1, 10, 11):
        policy.arrive(SequenceTerms(seq_id, seq_id // 10, 1, 0, 0, 0, 0), 0)
    serve(policy, 80)
    assert policy.lags() == {0: 40, 1: -40}
    policy.configure(terms(1, 1), 0)
    assert policy.lags() == {0: 40, 1: -40}, "the same table is no reload"
    policy.configure(terms(*[1] * 10), 0)
    assert policy.lags() == {0: -40 + 20 + 10, 1: -40}, "min D + Theta + u"


def test_a_vanished_team_finishes_what_it_has() -> None:
    policy = policy_with((1, 1))
    policy.configure([TeamTerms(1)], 0)
    with pytest.raises(KeyError, match="unknown team 0"):
        policy.arrive(SequenceTerms(99, 0, 1, 0, 0, 0, 0), 0)
    serve(policy, 50)
    assert [team.team_id for team in policy.team_service()] == [0, 1]
    for i in range(3):
        policy.leave(i, 0)
    policy.configure([TeamTerms(1), TeamTerms(2)], 0)
    policy.configure([TeamTerms(1)], 0)
    assert [team.team_id for team in policy.team_service()] == [1], "accounts of the gone do not pile up"


def test_alone_again_all_lags_are_forgotten() -> None:
    policy = policy_with((1, 1))
    serve(policy, 50)
    for seq_id in (0, 1, 2, 10, 11, 12):
        policy.leave(seq_id, 0)
    policy.arrive(SequenceTerms(50, 0, 1, 0, 0, 0, 0), 0)
    policy.arrive(SequenceTerms(51, 1, 1, 0, 0, 0, 0), 0)
    assert policy.lags() == {0: 0, 1: 0}


def test_time_away_works_off_debt_but_earns_no_credit() -> None:
    policy = policy_with((1, 1))
    serve(policy, 100)
    assert policy.lags() == {0: 50, 1: -50}
    for seq_id in (0, 1, 2):
        policy.leave(seq_id, 0)
    serve(policy, 30, only_team=1)  # alone: all of it is its entitlement, and virtual time goes on by 30
    policy.arrive(SequenceTerms(3, 0, 1, 0, 0, 0, 0), 0)
    assert policy.lags() == {0: 20, 1: -50}
    policy.leave(3, 0)
    serve(policy, 1000, only_team=1)
    policy.arrive(SequenceTerms(4, 0, 1, 0, 0, 0, 0), 0)
    assert policy.lags() == {0: -50, 1: -50}


def test_a_single_long_chunk_is_expected_in_the_pick() -> None:
    """Inside one step a team's lag grows by what each pick will cost, so equal teams share the slots of one step."""
    policy = policy_with((1, 1), theta_us=0)
    policy.begin(0)
    order = []
    for _ in range(6):
        seq_id = policy.best()
        assert seq_id is not None
        policy.take(seq_id, 1000)
        order.append(seq_id // 10)
    assert order == [0, 1, 0, 1, 0, 1]


def test_what_a_row_is_expected_to_cost_follows_all_recent_rows() -> None:
    """Rows are charged half of what the profile says. One ratio for all: a row of either team is expected to cost half
    of its own model, whether it is a prompt of 1,000 us or a decode of 100.
    """
    policy = policy_with((1, 1), theta_us=0)
    for _ in range(60):
        policy.begin(0)
        picked = []
        for _ in range(2):
            seq_id = policy.best()
            assert seq_id is not None
            policy.take(seq_id, 9000, 1000 if seq_id < 10 else 100)
            picked.append(seq_id)
        policy.settle([Served(s, 9000, 500 if s < 10 else 50, True) for s in picked], 0)
    meter = policy._meter
    assert meter.expected_cost(1000) == pytest.approx(500, abs=10)
    assert meter.expected_cost(100) == pytest.approx(50, abs=2)


def test_a_chunk_cut_short_still_demands_a_whole_one() -> None:
    """Team 0 (weight 3) had its first chunk cut to 10 us. Left out of a step of two pieces of 200 us, it could have
    used a whole chunk of 400: its part is three quarters of the step, not the 200 of one largest piece.
    """
    policy = EgMlfq(PolicyConfig(theta_us=0, decode_work_us=100, chunk_work_us=400, step_cost_max_us=400))
    policy.configure(terms(3, 1), 0)
    policy.arrive(SequenceTerms(0, 0, 64, 0, 2000, 0, 0), 0)
    for seq_id in (10, 11):
        policy.arrive(SequenceTerms(seq_id, 1, 1, 0, 0, 0, 0), 0)

    def step(*picks: tuple[int, int, bool]) -> int:
        """Runs these (seq_id, work = cost, has_generated) and returns what team 0 was entitled to."""
        before = policy.team_service()[0].entitled_us
        waiting = {seq_id: (work, generated) for seq_id, work, generated in picks}
        policy.begin(0)
        served = []
        while (seq_id := policy.best()) is not None:
            if seq_id in waiting:
                work, generated = waiting[seq_id]
                policy.take(seq_id, work)
                served.append(Served(seq_id, work, work, generated))
            else:
                policy.refuse(seq_id)
        policy.settle(served, 0)
        return policy.team_service()[0].entitled_us - before

    step((0, 10, False))
    assert step((10, 200, True), (11, 200, True)) == 300


def test_who_leaves_before_the_very_first_step_takes_nothing_with_it() -> None:
    """The first step's number is 1, and 0 is that of one never taken: such a one was counted as out of step 0."""
    driver = Driver(config((1, 2), theta=0), {0: 1, 1: 1})
    gone = driver.add(0, 0, 50)
    driver.add(0, 0, 50)
    driver.add(1, 0, 50)
    driver.abort(gone)
    for _ in range(20):
        driver.step()
    assert driver.served() == {0: 10, 1: 10}
    assert driver.max_gap <= 2


def test_what_the_bound_costs_is_counted_as_cost() -> None:
    """Theta 10, u 1 over the least weight: the wide band is 24, the floor of those that cannot run 11 below."""
    lags = meter(theta_us=10, step_cost_max_us=1)
    lags.configure([TeamTerms(0, weight=1), TeamTerms(1, weight=3), TeamTerms(2, weight=1)])
    behind, ahead, unable = (lags.teams[team_id] for team_id in range(3))
    for team in (behind, ahead, unable):
        lags.enter(team)
    ahead.lag = 30 * lags.scale
    unable.lag = -100 * lags.scale
    assert not lags.is_short
    lags.num_refused = unable.num_refused = 1
    lags.settle(lags.active, 1, 0, 0, AS_SERVED)
    assert [team.lag / lags.scale for team in (behind, ahead, unable)] == [0, 24, -11]
    assert (lags.forgiven_us, lags.lifted_us) == (6 * 3, 89), "times the weight"
    lags.num_refused = unable.num_refused = unable.lag = 0
    lags.settle(lags.active, 2, 0, 0, AS_SERVED)
    assert lags.is_short, "nobody is refused, and 24 is more than the narrow band"
    ahead.lag = 0
    lags.settle(lags.active, 3, 0, 0, AS_SERVED)
    assert not lags.is_short and (lags.forgiven_us, lags.lifted_us) == (18, 89)
