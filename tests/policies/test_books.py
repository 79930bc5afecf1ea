"""The books that every policy keeps: who is charged, who waits, and who was over-served."""

from policies.catalog import make_policy
from policies.config import PolicyConfig
from policies.sequences import Overhead, SequenceTerms, Served, TeamTerms
from tests.support.policies.driver import Driver, config
from tests.support.policies.scenarios import random_scenario

A, B = 0, 1


def served_with(policy_teams: int, overheads: list[Overhead]) -> dict[int, tuple[int, int, int]]:
    """Team 0 runs a step of 100 beside waiting sequences of all teams but the last; (served, overhead, entitled)."""
    policy = make_policy("eg-mlfq", PolicyConfig(theta_us=10**6, step_cost_max_us=0, decode_work_us=100))
    policy.configure([TeamTerms(team) for team in range(policy_teams)], 0)
    for team in range(policy_teams - 1):
        for i in range(2):
            policy.arrive(SequenceTerms(10 * team + i, team, 1, 0, 0, 0, 0), 0)
    policy.begin(0)
    policy.take(0, 100)
    policy.settle([Served(0, 100, 100, True)], 100, overheads)
    lags = policy.lags()
    assert sum(lags.values()) == 0, "between those who are active nothing comes or goes"
    totals = {team.team_id: team for team in policy.team_service()}
    assert sum(team.served_us for team in totals.values()) == 100 + sum(o.cost_us for o in overheads)
    return {team_id: (team.served_us, team.overhead_us, team.entitled_us) for team_id, team in totals.items()}


def test_copies_count_as_service_of_who_caused_them() -> None:
    """The step costs 160 in all, 80 for each of the two active teams."""
    assert served_with(3, [Overhead(1, 60)]) == {0: (100, 0, 80), 1: (60, 60, 80)}
    assert served_with(3, [Overhead(1, 40), Overhead(1, 20), Overhead(0, 10)]) == {0: (110, 10, 85), 1: (60, 60, 85)}


def test_a_team_that_has_left_takes_the_bill_along_as_debt() -> None:
    assert served_with(3, [Overhead(2, 30)]) == {0: (100, 0, 50), 1: (0, 0, 50), 2: (30, 30, 0)}
    policy = make_policy("eg-mlfq", PolicyConfig(theta_us=10**6))
    policy.configure([TeamTerms(0), TeamTerms(1)], 0)
    policy.arrive(SequenceTerms(0, 0, 1, 0, 0, 0, 0), 0)
    policy.begin(0)
    policy.take(0, 5)
    policy.settle([Served(0, 5, 5, True)], 5, [Overhead(1, 1000)])
    policy.arrive(SequenceTerms(1, 1, 1, 0, 0, 0, 0), 5)
    assert policy.lags() == {0: 0, 1: 1000 - 5}, "less the virtual time that went by"


def test_a_bill_for_a_team_that_is_gone_is_booked_all_the_same() -> None:
    assert served_with(3, [Overhead(99, 7)])[99] == (7, 7, 0)


def test_estimates_do_not_learn_from_overheads() -> None:
    """A team's expected cost follows its rows alone; replayed rows, of work 0, say nothing."""
    policy = make_policy("eg-mlfq", PolicyConfig())
    policy.configure([TeamTerms(0)], 0)
    policy.arrive(SequenceTerms(0, 0, 1, 0, 0, 0, 0), 0)
    for step in range(50):
        policy.begin(step)
        work = 100 if step % 2 else 0
        policy.take(0, work, work)
        policy.settle([Served(0, work, work, True)], step, [Overhead(0, 5000)])
    assert policy._meter.expected_cost(100) == 100  # type: ignore[attr-defined]
    assert policy.team_service()[0].overhead_us == 50 * 5000


def test_waiting_by_level_adds_up() -> None:
    for seed in range(30):
        driver = random_scenario(seed).driver()
        for _ in range(30):
            driver.step()
            for team in driver.policy.team_service():
                assert sum(team.waiting_levels) == team.waiting
                assert all(number >= 0 for number in team.waiting_levels)


def test_the_most_over_served_first() -> None:
    driver = Driver(config((1000,), theta=100), {A: 1, B: 1, 2: 1}, slots=1)
    for team in (A, B, 2):
        driver.add(team, 0, 100)
    driver.step()
    assert driver.policy.over_served([2, A, B]) == [A, B, 2]
    assert driver.policy.over_served([2, B]) == [B, 2]
