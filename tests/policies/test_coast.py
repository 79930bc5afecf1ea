"""Coast mode: a team whose requests are all alike goes by arrival. Who coasts, when it starts and stops, and what
others see of it.

Unit of fairness: a team's lag D, in decode steps per unit of weight.
"""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies.catalog import make_policy
from policies.coast import CoastMode
from policies.config import PolicyConfig
from policies.sequences import SequenceTerms, Served, TeamTerms
from tests.support.policies.driver import INFINITE, Driver, Job, config
from tests.support.policies.reference import variation_of
from tests.support.policies.scenarios import COASTS, Scenario, random_scenario, scenarios

A, B = 0, 1
EXACT = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
SOON = {"coast": True, "coast_completions_min": 1}


def is_coasting(driver: Driver, team: int = A) -> bool:
    return {service.team_id: service.is_coasting for service in driver.policy.team_service()}[team]


def run_alone(driver: Driver, sizes: list[int], team: int = A) -> None:
    """Jobs of these many steps, one after the other."""
    for size in sizes:
        driver.add(team, 0, size)
        driver.run()


# -- the order inside a team ------------------------------------------------------------------------------------------


@pytest.mark.case("O3")
@pytest.mark.parametrize(("coast", "expected"), [(False, [15, 16]), (True, [8, 16])])
def test_equal_long_jobs_end_at_8_and_16_when_the_team_coasts(coast: bool, expected: list[int]) -> None:
    """Sixteen jobs of eight steps one by one, and the team knows what its jobs are like."""
    driver = Driver(config(coast=coast), {A: 1})
    run_alone(driver, [8] * 16)
    assert is_coasting(driver) is coast
    start = driver.now
    pair = [driver.add(A, 1, 7), driver.add(A, 1, 7)]
    driver.run()
    done = [(driver.jobs[seq_id].done or 0) - start for seq_id in pair]
    assert done == expected
    assert sum(done) / 2 == (12 if coast else 15.5)


def test_levels_and_quanta_go_on_in_a_coasting_team() -> None:
    """The one in front runs on through all its levels, and is where it would be without coasting."""
    driver = Driver(config(**SOON), {A: 1})
    run_alone(driver, [8])
    first, second = driver.add(A, 0, 20), driver.add(A, 0, 20)
    levels = []
    for _ in range(12):
        levels.append(driver.policy.level(first))
        driver.step()
    assert levels == [0] + [1] * 2 + [2] * 4 + [3] * 5
    assert driver.policy.level(second) == 0


def test_a_team_that_stops_coasting_is_back_to_its_levels() -> None:
    """Over its last two completions: 8 and 8 are alike, 8 and 24 have CV^2 = 0.25; 24 is no veto yet."""
    driver = Driver(config(**SOON, coast_completions=2, coast_below_percent=10, coast_above_percent=20), {A: 1})
    run_alone(driver, [8, 8])
    driver.add(A, 0, 24, label="old")
    driver.at(driver.now + 10, lambda: driver.add(A, 0, 10, label="middle"))
    while driver.step() == ["old"]:
        assert is_coasting(driver) == (driver.jobs[2].done is None)
    assert driver.jobs[2].done == 8 + 8 + 24, "it coasted, and nobody passed the old one"
    driver.add(A, 0, 1, label="new")
    assert driver.step() == ["new"]
    assert driver.step() == ["middle"]


def test_a_change_of_mode_loses_no_sequence() -> None:
    """Sequences in several levels, some half done, while the mode goes to and fro."""
    constants = config(**SOON, coast_completions=3, coast_below_percent=20, coast_above_percent=20)
    driver = Driver(constants, {A: 1}, slots=3)
    for size in (1, 1, 9, 2, 2, 2, 9, 1, 5, 5, 5, 1):
        driver.add(A, size % 2, size)
    modes = set()
    while driver.live:
        driver.step()
        modes.add(is_coasting(driver))
    assert modes == {False, True}
    assert all(job.done is not None for job in driver.jobs.values())


# -- what other teams see ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coast", [False, True])
def test_a_coasting_head_shows_the_level_it_is_in(coast: bool) -> None:
    """No gate. Short requests stay in front of others' long ones, and long ones in front of nobody's short ones."""
    driver = Driver(config(theta=INFINITE, coast=coast, coast_completions_min=1), {A: 1, B: 1})
    run_alone(driver, [8])
    old = driver.add(A, 0, 9)
    for _ in range(3):
        driver.step()
    assert driver.policy.level(old) == 2
    driver.add(A, 0, 1, label="A new")
    driver.add(B, 0, 1, level=1, label="B")
    first = [driver.step() for _ in range(2)]
    assert first == ([["B"], ["A"]] if coast else [["A new"], ["B"]])


def test_with_one_level_coasting_changes_nothing() -> None:
    """K = 1: arrival is the order already, and there is no worse level to show."""
    for seed in range(60):
        plain = replace(random_scenario(seed), levels=1, coast=None)
        coasting = replace(plain, coast=COASTS[0])
        one, other = plain.driver(), coasting.driver()
        for _ in range(60):
            assert one.step() == other.step()


@pytest.mark.case("I5")
def test_when_a_flood_coasts_the_others_keep_their_share() -> None:
    driver = Driver(config(theta=4, coast=True), {A: 1, B: 1})

    def again(job: Job) -> None:
        driver.add(job.team, 0, 2 if job.team == A else 30)

    driver.on_done.append(again)
    for _ in range(10):
        driver.add(A, 0, 2)
    for _ in range(2):
        driver.add(B, 0, 30)
    driver.run(until=2000)
    assert is_coasting(driver, A) and is_coasting(driver, B)
    assert driver.max_gap <= 4 + 2
    assert abs(driver.served()[A] - driver.served()[B]) <= 4 + 2


# -- who coasts -------------------------------------------------------------------------------------------------------


def works(values: list[int], **settings: int) -> CoastMode:
    mode = CoastMode(PolicyConfig(**settings))  # type: ignore[arg-type]
    for value in values:
        mode.complete(value)
    return mode


def test_eight_completions_are_needed() -> None:
    assert not works([8] * 7).is_coasting
    assert works([8] * 8).is_coasting


def test_with_ten_times_longer_ones_a_team_does_not_coast() -> None:
    """Four short ones to a long one of ten times the size: CV^2 = 1.65."""
    driver = Driver(config((8, 16, 32, 64), coast=True), {A: 1})
    run_alone(driver, [3, 3, 3, 3, 30] * 12)
    assert not is_coasting(driver)


def test_a_team_coasts_on_its_short_requests_until_its_long_ones_end() -> None:
    """Under levels the short ones end first, and nothing else has been seen; the first long one corrects that."""
    assert works([3] * 16).is_coasting
    assert not works([3] * 16 + [30]).is_coasting


@pytest.mark.parametrize("before", [False, True])
def test_between_the_thresholds_nothing_changes(before: bool) -> None:
    """Hysteresis: at a CV^2 of 4/9 whoever coasts goes on, and whoever does not does not start."""
    completions = [10, 2] * 8
    assert variation_of(completions) == Fraction(4, 9)
    mode = CoastMode(PolicyConfig(coast_completions=16))
    mode._is_alike = before
    for work in completions:
        assert not mode.complete(work)
    assert mode.is_coasting is before


thresholds = st.integers(0, 300)


@settings(EXACT, max_examples=300)
@given(
    st.lists(st.integers(1, 10**9) | st.sampled_from([1, 2, 3, 10, 30]), max_size=60),
    thresholds,
    thresholds,
    st.integers(1, 12),
    st.integers(0, 12),
)
def test_the_estimate_against_the_book(values: list[int], one: int, other: int, least: int, more: int) -> None:
    below, above = sorted((one, other))
    mode = CoastMode(
        PolicyConfig(
            coast_below_percent=below,
            coast_above_percent=above,
            coast_completions_min=least,
            coast_completions=least + more,
        )
    )
    expected = False
    for count, value in enumerate(values, start=1):
        latest = values[max(0, count - least - more) : count]
        before = expected
        if len(latest) >= least:
            variation = variation_of(latest) * 100
            expected = variation < below or (expected and variation <= above)
        assert mode.complete(value) is (before is not expected)
        assert mode.is_coasting is expected


def finish(policy_name: str, constants: PolicyConfig, outcomes: list[tuple[int, str]]) -> tuple[bool, list[int]]:
    """Sequences of one team that do `work` in one step and then finish, are aborted, or are aborted unserved. Returns
    whether the team coasts afterwards, and the order of two jobs in levels 1 and 0.
    """
    policy = make_policy(policy_name, constants)
    policy.configure([TeamTerms(A)], 0)
    for seq_id, (work, outcome) in enumerate(outcomes):
        policy.arrive(SequenceTerms(seq_id, A, 8, 0, 0, 0, 0), 0)
        policy.begin(0)
        if outcome != "unserved":
            assert policy.best() == seq_id
            policy.take(seq_id, work)
        served = [] if outcome == "unserved" else [Served(seq_id, work, work, True, outcome == "finished")]
        policy.settle(served, 0)
        policy.leave(seq_id, 0)
    for seq_id, level in ((1000, 1), (1001, 0)):
        policy.arrive(SequenceTerms(seq_id, A, 8, 0, 0, level, 0), 0)
    policy.begin(0)
    order = []
    while (best := policy.best()) is not None:
        order.append(best)
        policy.take(best, 1)
    return policy.team_service()[0].is_coasting, order


ALIKE = [(1000, "finished")] * 16
UNLIKE = [(work, "finished") for work in [1, 1, 1, 1, 10] * 4]


@pytest.mark.parametrize(
    ("outcomes", "coasts"),
    [
        (ALIKE, True),
        (UNLIKE, False),
        ([(1000, "aborted")] * 100, False),
        ([(1000, "unserved")] * 100, False),
        (ALIKE + [(10**6 if i % 5 == 0 else 1, "aborted") for i in range(600)], True),
        (ALIKE + [(1, "unserved")] * 600, True),
        (UNLIKE + [(1000, "aborted")] * 600, False),
    ],
)
def test_only_finished_sequences_count(outcomes: list[tuple[int, str]], coasts: bool) -> None:
    """A storm of aborts neither starts nor stops coasting, whatever the aborted had done."""
    assert finish("eg-mlfq", PolicyConfig(), outcomes) == (coasts, [1000, 1001] if coasts else [1001, 1000])


@pytest.mark.parametrize(("name", "constants"), [("fcfs", PolicyConfig()), ("eg-mlfq", PolicyConfig(coast=False))])
def test_who_has_no_coast_mode(name: str, constants: PolicyConfig) -> None:
    is_on, order = finish(name, constants, ALIKE)
    assert not is_on
    assert order == ([1000, 1001] if name == "fcfs" else [1001, 1000])


# -- the scenarios of the invariants really coast ---------------------------------------------------------------------


def test_random_scenarios_coast_and_stop() -> None:
    """The tests of invariants and of the naive policy would prove nothing about coasting if nobody did."""
    started = stopped = 0
    for seed in range(100):
        driver = random_scenario(seed).driver()
        before: dict[int, bool] = {}
        for _ in range(60):
            driver.step()
            now = {team.team_id: team.is_coasting for team in driver.policy.team_service()}
            started += sum(now[team] and not before.get(team, False) for team in now)
            stopped += sum(not now[team] and before.get(team, False) for team in now)
            before = now
    assert started > 80 and stopped > 30


@settings(EXACT, max_examples=60)
@given(scenarios(refusals=True, infinite=True))
def test_inside_a_coasting_team_the_order_is_by_arrival(scenario: Scenario) -> None:
    """Whom a coasting team runs in a step are its earliest, in that order; those without room are passed over."""
    driver = replace(scenario, coast=COASTS[0]).driver()
    for _ in range(60):
        driver._deliver()
        live = dict(driver.live)
        has_room = {seq_id: driver.has_room(job) for seq_id, job in live.items()}
        coasting = {team.team_id for team in driver.policy.team_service() if team.is_coasting}
        labels = driver.step()
        for team in coasting:
            able = [job.label for seq_id, job in sorted(live.items()) if job.team == team and has_room[seq_id]]
            ran = [label for label in labels if label in able]
            assert ran == able[: len(ran)]
