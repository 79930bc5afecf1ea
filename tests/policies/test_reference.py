"""The incremental policy and the naive one make the same schedules, step by step and to the last microsecond of lag.

The unit of fairness is a team's lag D. The naive policy (`tests.support.policies.reference`) scans everything at every
pick and computes in fractions.
"""

import math
from dataclasses import replace
from operator import attrgetter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.policies.driver import Driver
from tests.support.policies.reference import Reference, water_fill
from tests.support.policies.scenarios import Scenario, random_scenario, scenarios

EXACT = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))


def same_schedule(scenario: Scenario, steps: int = 60) -> None:
    fast = scenario.driver()
    slow = scenario.driver(instance=Reference(scenario.settings()))
    fast.is_timed = slow.is_timed = scenario.seed % 2 == 1  # decode rows wait for prompts beside them
    for _ in range(steps):
        assert fast.step() == slow.step()
        assert fast.policy.lags() == slow.policy.lags()
        assert [fast.policy.level(s) for s in fast.live] == [slow.policy.level(s) for s in slow.live]
        same_promotions(fast, slow)


def same_promotions(fast: Driver, slow: Driver) -> None:
    """Budgets, queues, grants, who has begun to starve, and who has been promoted how often."""
    reference: Reference = slow.policy  # type: ignore[assignment]
    assert sorted(fast.starving, key=attrgetter("seq_id")) == sorted(slow.starving, key=attrgetter("seq_id"))
    for service in fast.policy.team_service():
        team = reference.teams[service.team_id]
        if reference.config.promotion_percent:
            held = min(team.sigma, team.b + team.rho * (fast.now * fast.unit - reference.begun))
            assert service.budget_us == math.floor(held)
        assert (service.starving, service.exhausted, service.promoted_us) == (
            len(team.fifo),
            team.exhausted,
            team.promoted,
        )
    for seq_id in fast.live:
        assert fast.policy.num_promotions(seq_id) == reference.seqs[seq_id].promotions


@pytest.mark.parametrize("hundred", range(7))
def test_same_schedule_on_full_workloads(hundred: int) -> None:
    for seed in range(100 * hundred, 100 * hundred + 100):
        same_schedule(random_scenario(seed))


@pytest.mark.parametrize("hundred", range(3))
def test_same_schedule_through_outages(hundred: int) -> None:
    """In every second step there is room for nobody, then for all but team 0: all teams turn unable and able again."""
    for seed in range(100 * hundred, 100 * hundred + 100):
        scenario = replace(random_scenario(2 * seed), slots=4)
        fast, slow = scenario.driver(), scenario.driver(instance=Reference(scenario.settings()))
        for step in range(60):
            fast.has_room = slow.has_room = lambda job, step=step: step % 2 == 1 and job.team > 0
            assert fast.step() == slow.step()
            assert fast.policy.lags() == slow.policy.lags()


@settings(EXACT, max_examples=100)
@given(scenarios(infinite=True))
def test_same_schedule_as_the_naive_policy(scenario: Scenario) -> None:
    same_schedule(scenario)


@settings(EXACT, max_examples=100)
@given(scenarios(refusals=True, infinite=True))
def test_same_schedule_with_refusals(scenario: Scenario) -> None:
    same_schedule(scenario)


@settings(EXACT, max_examples=100)
@given(scenarios(refusals=True, skew=True, infinite=True))
def test_same_schedule_when_cost_is_not_work(scenario: Scenario) -> None:
    same_schedule(scenario)


@pytest.mark.case("I14")
@settings(EXACT, max_examples=100)
@given(scenarios(infinite=True, only_infinite=True))
def test_without_a_gate_the_order_is_level_then_lag(scenario: Scenario) -> None:
    """Theta = infinity against the naive order, in which no limit is ever computed."""
    reference = Reference(scenario.settings())
    reference.able = lambda: reference.active()  # type: ignore[method-assign]
    fast, slow = scenario.driver(), scenario.driver(instance=reference)
    for _ in range(60):
        assert fast.step() == slow.step()


amounts = st.dictionaries(st.integers(0, 9), st.tuples(st.integers(0, 50), st.integers(1, 4)), min_size=1, max_size=6)


@settings(EXACT, max_examples=100)
@given(amounts, st.integers(0, 200))
def test_the_reference_itself_is_max_min(table: dict[int, tuple[int, int]], total: int) -> None:
    """Who gets less than it asks for has, but for rounding, the largest part per weight."""
    demand = {team: d for team, (d, _) in table.items()}
    weight = {team: w for team, (_, w) in table.items()}
    total = min(total, sum(demand.values()))
    parts, _ = water_fill(total, demand, weight)
    assert sum(parts.values()) == total
    assert all(0 <= parts[team] <= demand[team] for team in demand)
    for team in demand:
        if parts[team] < demand[team]:
            assert all((parts[other] - 1) / weight[other] <= (parts[team] + 1) / weight[team] for other in demand)
