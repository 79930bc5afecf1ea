"""Promotion of the starving: budgets, grants, lane P, and the bound on a pause.

Unit of fairness: work done in lane P by a team, and the longest pause of one sequence, in decode steps.
"""

from dataclasses import replace

import pytest

from policies.bounds import pause_bound_us
from policies.config import PolicyConfig
from policies.sequences import TeamTerms
from tests.support.policies.driver import UNIT, Driver, config

A, B, C = 0, 1, 2


def budget_driver(percent: int = 20, grant: int = 2, **more: object) -> Driver:
    settings = config((1, 2, 4, 8), theta=0, promotion_percent=percent, grant_us=grant * UNIT)
    return Driver(settings, {A: 1}, alpha=10, **more)  # type: ignore[arg-type]


# -- oracles ----------------------------------------------------------------------------------------------------------


def starving_behind_arrivals(percent: int) -> Driver:
    """X1 to X3 (20 steps, level 2) from 0 on, and a one-step job at level 0 in every unit."""
    driver = budget_driver(percent)
    for i in range(3):
        driver.add(A, 0, 20, level=2, label=f"X{i + 1}")
    for time in range(60):
        driver.at(time, lambda: driver.add(A, 0, 1, label="short"))
    return driver.run(until=52)


@pytest.mark.case("O8")
def test_starving_jobs_take_turns_at_the_pace_of_the_budget() -> None:
    driver = starving_behind_arrivals(20)
    assert driver.starts("X1") == [10, 11, 40, 41]
    assert driver.starts("X2") == [20, 21, 50, 51]
    assert driver.starts("X3") == [30, 31]


@pytest.mark.case("O8")
def test_without_a_budget_they_never_run() -> None:
    driver = starving_behind_arrivals(0)
    assert driver.starts("X1") + driver.starts("X2") + driver.starts("X3") == []
    assert [driver.policy.num_promotions(i) for i in range(3)] == [0, 0, 0]


@pytest.mark.case("O8")
def test_long_prompts_get_the_budget_and_not_the_device() -> None:
    """(30, 1) at level 2 every 10 units beside the one-step jobs: three times what the device has. Lane P carries 20 %
    of it; with as good as no bound on the budget it carries nearly all.
    """

    def promoted(percent: int) -> float:
        driver = budget_driver(percent)
        for time in range(0, 3000, 10):
            driver.at(time, lambda: driver.add(A, 30, 1, level=2, label="X"))
        for time in range(3000):
            driver.at(time, lambda: driver.add(A, 0, 1))
        driver.run(until=3000)
        return driver.policy.team_service()[0].promoted_us / UNIT / driver.now

    assert promoted(20) == pytest.approx(0.2, abs=0.015)
    assert promoted(99) > 0.7


@pytest.mark.case("O8b")
def test_a_grant_is_given_to_a_team_above_the_gate() -> None:
    settings = config((1000, 1000), theta=0, promotion_percent=60, grant_us=2 * UNIT)
    driver = Driver(settings, {A: 1, B: 1, C: 1}, slots=2, alpha=10)
    driver.add(C, 0, 1000)
    driver.add(A, 0, 1000)
    driver.add(A, 0, 1000)
    driver.add(B, 0, 1)
    driver.add(C, 0, 20, level=1, label="X")
    driver.run(until=40)
    assert driver.starts("X")[:5] == [10, 11, 22, 23, 34]


@pytest.mark.case("O15")
def test_a_new_arrival_does_not_starve() -> None:
    """It waited for one step: it is not starving at any check, however long the others have waited."""
    driver = budget_driver()
    driver.add(A, 0, 5, level=3, label="old")
    for time in range(40):
        driver.at(time, lambda: driver.add(A, 0, 1, level=1, label="new"))
    newest: list[int] = []
    for _ in range(30):
        driver.step()
        for seq_id, job in driver.live.items():
            if job.arrived >= driver.now - 1 and not job.starts:
                newest.append(seq_id)
                sequence = driver.policy._sequences[seq_id]
                assert not sequence.is_starving and sequence.grant_left == 0
    assert len(newest) > 10
    assert driver.starts("old") == [10, 11, 22, 23]


# -- rules of a grant -------------------------------------------------------------------------------------------------


def test_back_at_the_home_level_with_the_quantum_unchanged() -> None:
    """X has used 1 of the 4 of level 2. Its grant of 2 uses none of it, so 3 more steps take it down."""
    driver = budget_driver()
    x = driver.add(A, 0, 30, level=2, label="X")
    driver.run(until=1)
    for time in range(1, 22):
        driver.at(time, lambda: driver.add(A, 0, 1, label="short"))
    driver.run(until=13)
    sequence = driver.policy._sequences[x]
    assert driver.starts("X") == [0, 11, 12], "it starves at 1 + 10"
    assert (sequence.level, sequence.used, sequence.attained) == (2, UNIT, 3 * UNIT)
    assert driver.policy.num_promotions(x) == 1
    while sequence.used < 4 * UNIT and sequence.level == 2:
        driver.step()
    assert driver.policy.level(x) == 3
    outside = len(driver.starts("X")) - driver.policy.team_service()[0].promoted_us // UNIT
    assert outside == 4, "the quantum was used up by the four steps outside of lane P"


def test_a_step_without_a_grant_ends_the_starving() -> None:
    """Two wait for the budget; one of them gets a slot by level. It is not in the queue any more."""
    driver = budget_driver(percent=1)
    first = driver.add(A, 0, 50, level=2, label="X")
    second = driver.add(A, 0, 50, level=2, label="Y")
    for time in range(30):
        driver.at(time, lambda: driver.add(A, 0, 1, label="short"))
    driver.run(until=20)
    service = driver.policy.team_service()[0]
    assert driver.starts("X") == [10, 11], "a full bucket pays one grant"
    assert (service.promotions, service.starving) == (1, 1)
    driver.abort(first)
    driver.run(until=60)
    assert driver.starts("Y"), "the short ones are over, so it runs by level"
    assert driver.policy.team_service()[0].starving == 0
    assert not driver.policy._sequences[second].is_starving


def test_exhausted_counts_each_starving_episode_once() -> None:
    driver = budget_driver(percent=1)
    for label in ("X", "Y", "Z"):
        driver.add(A, 0, 50, level=2, label=label)
    for time in range(100):
        driver.at(time, lambda: driver.add(A, 0, 1, label="short"))
    driver.run(until=11)
    assert driver.policy.team_service()[0].exhausted == 0, "the first grant is open"
    driver.run(until=90)
    service = driver.policy.team_service()[0]
    assert (service.promotions, service.exhausted) == (1, 1), "the head waits for the budget; the others wait for it"
    assert service.budget_us == int(0.01 * (90 - 10) * UNIT)


def test_a_budget_may_go_below_zero_and_works_it_off() -> None:
    driver = budget_driver()
    driver.add(A, 30, 1, level=2, label="X")
    for time in range(60):
        driver.at(time, lambda: driver.add(A, 0, 1, label="short"))
    driver.run(until=40)
    service = driver.policy.team_service()[0]
    assert driver.starts("X")[0] == 10
    assert (service.promoted_us, service.budget_us) == (30 * UNIT, 2 * UNIT - 30 * UNIT + 30 * UNIT // 5)


@pytest.mark.parametrize("ends", ["abort", "finish"])
def test_a_grant_ends_with_its_sequence(ends: str) -> None:
    """The next one gets its own as soon as the budget can pay."""
    driver = budget_driver(grant=4)
    x = driver.add(A, 0, 1 if ends == "finish" else 50, level=2, label="X")
    driver.add(A, 0, 50, level=2, label="Y")
    for time in range(60):
        driver.at(time, lambda: driver.add(A, 0, 1, label="short"))
    driver.at(11, lambda: driver.abort(x))
    driver.run(until=40)
    assert driver.starts("X") == [10]
    assert driver.starts("Y")[:1] == [15], "one of the four units of the bucket was used, and comes back by 15"


def test_a_coasting_team_gets_its_grants_too() -> None:
    """By arrival the last of five equal jobs waits for the four before it; starving, it goes first."""
    settings = config((1, 2, 4, 8), theta=0, promotion_percent=20, grant_us=2 * UNIT, coast=True)
    settings = replace(settings, coast_below_percent=10**9, coast_above_percent=10**9, coast_completions_min=1)
    driver = Driver(settings, {A: 1}, alpha=10)
    driver.add(A, 0, 10, label="first")
    driver.run()
    for i in range(5):
        driver.add(A, 0, 30, label=f"J{i}")
    driver.run(until=33)
    assert driver.policy.team_service()[0].is_coasting
    assert driver.starts("J1") == [20, 21]
    assert driver.starts("J2") == [30, 31]
    assert driver.starts("J0") == [*range(10, 20), *range(22, 30), 32]


def test_lane_p_obeys_the_gate() -> None:
    """C is far over its share: its grant is there, and is used only when the gate lets it run."""
    settings = config((1000, 1000), theta=0, promotion_percent=60, grant_us=2 * UNIT)
    driver = Driver(settings, {A: 1, C: 1}, alpha=10, costs=lambda works: works)
    driver.add(C, 0, 200, label="C")
    driver.add(C, 0, 200, level=1, label="X")
    driver.add(A, 0, 200, label="A")
    driver.run(until=60)
    served = driver.served()
    assert abs(served[A] - served[C]) <= 1
    assert driver.starts("X")[:2] == [10, 12]


def test_aborts_leave_nothing_behind() -> None:
    """A storm of arrivals and aborts does not grow the policy's books."""
    driver = budget_driver()
    for _ in range(5000):
        driver.abort(driver.add(A, 0, 1))
    promotions = driver.policy._promotions
    assert len(promotions._due) <= 200
    driver.add(A, 0, 1)
    driver.run()


def test_reloads_change_rate_and_burst() -> None:
    """Twice the weight in the table: half the rate. A smaller burst cuts what the bucket holds."""
    driver = budget_driver()
    policy = driver.policy
    assert policy.team_service() == []
    driver.add(A, 0, 10)
    assert policy.team_service()[0].budget_us == 2 * UNIT
    policy.configure([TeamTerms(A, 1, 0, 10 * UNIT, 5), TeamTerms(B, 1, 0, 10 * UNIT, 5)], 0)
    assert policy.team_service()[0].budget_us == 2 * UNIT
    driver.run(until=10)
    assert policy.team_service()[0].budget_us == 2 * UNIT + UNIT, "0.1 * 10"
    policy.configure([TeamTerms(A, 1, 0, 10 * UNIT, 1)], 10 * UNIT)
    assert policy.team_service()[0].budget_us == 2 * UNIT


# -- the bound on a pause ---------------------------------------------------------------------------------------------


@pytest.mark.case("I8")
def test_the_bound_by_hand() -> None:
    """10 + (Theta 3 + 2 * 4 / 1) * (6 - 2) + (2 + 1) * (5 + 4) / (0.2 * 2 / 6) + (3 * 2 * 5 + 4) / 0.8 + 7 + 2 * 4."""
    settings = PolicyConfig(theta_us=3, step_cost_max_us=4, grant_us=5, promotion_percent=20)
    table = [TeamTerms(team, weight, 0, 10, 2) for team, weight in ((1, 2), (2, 1), (3, 3))]
    assert pause_bound_us(settings, table, 1, num_ahead=2, upload_us=7) == 10 + 44 + 405 + 43 + 7 + 8
    assert pause_bound_us(replace(settings, grant_us=1), table, 1, 0, 0) == 10 + 44 + 75 + 13 + 8
    assert pause_bound_us(settings, table, 1, 2, 7, is_short=True) == 10 + 88 + 405 + 43 + 7 + 8, (
        "the band is twice as wide"
    )
    assert pause_bound_us(settings, table, 1, 2, 7, rate_percent=40) == 10 + 110 + 405 + 107 + 7 + 8, (
        "swapping takes 60 %"
    )
    assert pause_bound_us(replace(settings, promotion_percent=0), table, 1, 2, 7) == 0, "no promotion, no bound"
    with pytest.raises(KeyError):
        pause_bound_us(settings, table, 9, 0, 0)
