"""When will it run? ENST by hand, and the minimum run after an upload.

Unit of fairness: one team's lag D, in decode steps per unit of weight.
"""

import pytest

from policies.sequences import Served
from tests.support.policies.driver import UNIT, Driver, config
from tests.support.policies.scenarios import random_scenario

A, B = 0, 1


def enst(driver: Driver, *seq_ids: int, slots: int = 2) -> list[tuple[int, float]]:
    turns = driver.policy.turns(seq_ids, slots, driver.now * UNIT)
    return [(turn.seq_id, turn.enst_us / UNIT) for turn in turns]


def four(d_team: int = A, *, theta: int = 0, weight: int = 1) -> tuple[Driver, int, int, int, int]:
    """O11's: a at level 0, b at 1, c and d at 2; at time 8, c starves in 9 units and d in 1."""
    weights = {A: weight} if d_team == A else {A: weight, B: 1}
    settings = config((1, 2, 4), theta=theta, u=6, promotion_percent=20, grant_us=UNIT)
    driver = Driver(settings, weights, slots=2, alpha=9)
    d = driver.add(d_team, 0, 9, level=2, label="d")
    driver.now = 8
    a = driver.add(A, 0, 9, level=0, label="a")
    b = driver.add(A, 0, 9, level=1, label="b")
    c = driver.add(A, 0, 9, level=2, label="c")
    return driver, a, b, c, d


@pytest.mark.case("O11")
def test_the_soonest_of_promotion_and_what_is_before() -> None:
    driver, a, b, c, d = four()
    assert enst(driver, a, b, c, d) == [(a, 0), (b, 0.5), (d, 1), (c, 2.5)]
    assert [seq_id for seq_id, _ in enst(driver, b, c, d)] == [b, d, c], "uploads; victims are the other way round"


@pytest.mark.case("O11")
def test_a_locked_out_team_comes_last() -> None:
    """D of d's team is 6 above the other's; the gap closes at 1 unit a unit."""
    driver, _, b, c, d = four(d_team=B)
    policy = driver.policy
    policy.begin(8 * UNIT)
    while (best := policy.best()) is not None and best != d:
        policy.refuse(best)
    policy.take(d, UNIT)
    policy.settle([Served(d, UNIT, 6 * UNIT, True)], 8 * UNIT)
    for seq_id in (1, b, c):
        policy.fits_again(seq_id)
    assert policy.lags() == {A: -3 * UNIT, B: 3 * UNIT}
    turns = dict(enst(driver, b, c, d))
    assert turns[d] == 6
    # Its team has one slot of the two: c waits for the 1 + 2 of a and the 2 of b.
    assert (turns[b], turns[c]) == (1, 5)
    assert [seq_id for seq_id, _ in enst(driver, b, c, d)] == [b, c, d]


@pytest.mark.case("O11")
@pytest.mark.parametrize(
    ("weight", "theta", "turn"),
    [(1, 0, 6), (1, 2, 4), (1, 5, 1), (1, 6, 0), (1, 7, 0), (2, 0, 12), (2, 2, 8), (2, 6, 0)],
)
def test_a_locked_out_team_waits_for_what_is_above_the_band(weight: int, theta: int, turn: int) -> None:
    """d's team is 6 ahead, and Theta of that is allowed: T_gate = (6 - Theta) x the others' weight. Then it is next."""
    driver, _, _, _, d = four(B, theta=theta, weight=weight)
    policy = driver.policy
    policy.begin(8 * UNIT)
    while (best := policy.best()) is not None and best != d:
        policy.refuse(best)
    policy.take(d, UNIT)
    policy.settle([Served(d, UNIT, 6 * UNIT, True)], 8 * UNIT)
    lags = policy.lags()
    assert lags[B] - lags[A] == 6 * UNIT
    assert dict(enst(driver, d)) == {d: turn}


def test_the_last_level_counts_as_much_as_was_attained() -> None:
    """X and Y in the last level; X has done 3 units, so Y's turn is 3 units off on one slot."""
    driver = Driver(config((1,), theta=0), {A: 1})
    x, y = driver.add(A, 0, 9), driver.add(A, 0, 9)
    driver.run(until=3)
    assert enst(driver, x, y, slots=1) == [(x, 0), (y, 3)]


def test_used_quanta_and_promotion_queues_count() -> None:
    driver = Driver(config((4, 8, 16), theta=0, promotion_percent=10, grant_us=2 * UNIT), {A: 1}, alpha=5)
    first = driver.add(A, 0, 30, level=0)
    others = [driver.add(A, 0, 30, level=2) for _ in range(3)]
    driver.run(until=3)
    # first: 1 of 4 left, then the 8 of level 1. The others are promoted after 2 more units, or 20 and 40 later.
    assert enst(driver, first, *others, slots=1) == [(first, 0), (others[0], 2), (others[1], 2), (others[2], 2)]
    driver.run(until=6)
    assert driver.policy._sequences[others[0]].grant_left == UNIT
    assert enst(driver, *others, slots=1)[0] == (others[0], 0), "in lane P"


def test_a_coasting_team_runs_each_to_its_end() -> None:
    settings = config((1, 2, 4), theta=0, coast=True)
    driver = Driver(settings, {A: 1})
    for _ in range(8):
        driver.add(A, 0, 10)
    driver.run()
    assert driver.policy.team_service()[0].is_coasting
    jobs = [driver.add(A, 0, 10) for _ in range(3)]
    driver.run(until=84)
    assert enst(driver, *jobs, slots=1) == [(jobs[0], 0), (jobs[1], 6), (jobs[2], 16)]


def test_asking_changes_nothing() -> None:
    """Random workloads, asked about everybody before each step and in the middle of it."""
    for seed in range(40):
        plain, asked = random_scenario(seed).driver(), random_scenario(seed).driver()
        room = asked.has_room

        def ask(driver: Driver = asked) -> None:
            turns = driver.policy.turns(list(driver.live), driver.slots, driver.now * UNIT)
            assert sorted(turn.seq_id for turn in turns) == sorted(driver.live)
            assert [turn.enst_us for turn in turns] == sorted(turn.enst_us for turn in turns)
            assert all(turn.enst_us >= 0 for turn in turns)
            driver.policy.over_served({job.team for job in driver.live.values()})

        asked.has_room = lambda job, room=room, ask=ask: (ask(), room(job))[1]  # type: ignore[misc, func-returns-value]
        for _ in range(25):
            ask(asked)
            assert plain.step() == asked.step()
        assert plain.policy.lags() == asked.policy.lags()


# -- the minimum run --------------------------------------------------------------------------------------------------


def kept(level: int, challenger: int, promotion: int = 0, team: int = A) -> list[str]:
    """X at `level` has just been uploaded; then one at level `challenger` comes. Who runs in the next five steps?"""
    settings = config((100, 200, 400, 800), theta=100, promotion_percent=promotion, grant_us=UNIT)
    driver = Driver(settings, {A: 1, B: 1}, alpha=4)
    x = driver.add(A, 0, 50, level=level, label="X")
    driver.upload(x, 3)
    driver.add(team, 0, 50, level=challenger, label="Y")
    return [driver.step()[0] for _ in range(5)]


@pytest.mark.parametrize("team", [A, B])
def test_an_upload_keeps_its_slot_for_the_minimum_run(team: int) -> None:
    assert kept(2, 1, team=team) == ["X", "X", "X", "Y", "Y"], "one level better does not displace it"
    assert kept(0, 0, team=team)[:3] == ["X", "X", "X"]
    assert kept(1, 0, team=team) == ["X", "X", "X", "Y", "Y"]


@pytest.mark.parametrize("team", [A, B])
def test_two_levels_better_displace_it(team: int) -> None:
    assert kept(2, 0, team=team) == ["Y"] * 5
    assert kept(3, 1, team=team) == ["Y"] * 5


def test_lane_p_displaces_it() -> None:
    driver = Driver(config((100, 200), theta=0, promotion_percent=20, grant_us=UNIT), {A: 1}, alpha=4)
    x = driver.add(A, 0, 50, label="X")
    driver.add(A, 0, 50, level=1, label="Y")
    driver.upload(x, 9)
    driver.run(until=8)
    assert driver.starts("Y") == [4]


def test_its_own_teams_ineligibility_displaces_it() -> None:
    driver = Driver(config((100, 200), theta=0), {A: 1, B: 1})
    x = driver.add(A, 0, 50, label="X")
    driver.add(B, 0, 50, level=1, label="Y")
    driver.upload(x, 9)
    assert [driver.step()[0] for _ in range(4)] == ["X", "Y", "X", "Y"]


def test_when_a_minimum_run_ends_the_level_counts_again() -> None:
    """X is demoted once in its run of three steps; Y waits two levels above where X ends."""
    driver = Driver(config((1, 2, 4, 8), theta=0), {A: 1})
    x = driver.add(A, 0, 50, label="X")
    driver.upload(x, 1)
    driver.upload(x, 3)
    driver.add(A, 0, 50, label="Y")
    assert [driver.step()[0] for _ in range(4)] == ["X", "X", "X", "Y"]
    assert driver.policy.level(x) == 2


def test_when_the_memory_ends_a_minimum_run_early_so_does_the_policy() -> None:
    driver = Driver(config((100, 200, 400), theta=0), {A: 1})
    x = driver.add(A, 0, 50, level=1, label="X")
    driver.upload(x, 3)
    driver.add(A, 0, 50, label="Y")
    assert driver.step() == ["X"]
    driver.policy.protect(x, 0)
    assert driver.step() == ["Y"]
    driver.upload(x, 2)
    driver.abort(x)
    driver.run(until=8)


def test_a_coasting_team_keeps_an_upload_running_too() -> None:
    settings = config((1, 2, 4), theta=0, coast=True)
    driver = Driver(settings, {A: 1})
    for _ in range(8):
        driver.add(A, 0, 10)
    driver.run()
    driver.add(A, 0, 10, label="first")
    second = driver.add(A, 0, 10, label="second")
    driver.upload(second, 3)
    assert [driver.step()[0] for _ in range(4)] == ["second", "second", "second", "first"]


# -- overheads --------------------------------------------------------------------------------------------------------
