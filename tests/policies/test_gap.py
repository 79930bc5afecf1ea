"""The gap between teams at any number of slots, promotions, minimum runs and coasting included.

Unit of fairness: the largest difference of two able teams' lag D after a step, in decode steps per unit of weight,
against Theta + 2u (`policies.bounds.lag_bound`).
"""

import random
from dataclasses import replace
from fractions import Fraction

import pytest

from policies.bounds import lag_bound
from tests.support.policies.driver import UNIT, Driver, Job, config

STEPS = 400


def crowded(seed: int) -> tuple[Driver, Fraction]:
    """Teams of very different habits on up to 16 slots, and the bound for them in units: one that has been served a lot
    and then asks for little, long jobs that always wait, and bursts of short ones that come and go.
    """
    source = random.Random(seed)
    slots = source.choice([1, 2, 4, 8, 16, 16])
    teams = source.choice([3, 3, 4, 6])
    theta = source.choice([0, 2, 8, 32, 64])
    weights = {team: source.choice([1, 1, 2, 4]) for team in range(teams)}
    settings = replace(
        config((2, 4, 8, 16), theta=theta, u=1, promotion_percent=source.choice([0, 20])),
        grant_us=4 * UNIT,
        coast=source.choice([False, True]),
        coast_completions_min=2,
    )
    driver = Driver(settings, weights, slots, alpha=10)

    def shorts(team: int, number: int) -> None:
        for _ in range(number):
            driver.add(team, 0, source.choice([1, 2]))

    def repeat(job: Job) -> None:
        if floods[job.team]:
            shorts(job.team, 1)

    floods = [source.randrange(4) == 0 for _ in range(teams)]
    driver.on_done.append(repeat)
    shorts(0, source.randint(16, 60))
    driver.add(0, 0, 10**6, level=3)
    for team in range(1, teams):
        habit = "long" if team == 1 else source.choice(["long", "bursts", "burst"])
        if habit == "long":
            for _ in range(source.randint(8, 24)):
                driver.add(team, 0, 10**6, level=3)
        elif habit == "bursts":
            for time in range(source.randint(0, 60), STEPS, source.randint(2, 12)):
                driver.at(time, lambda team=team: shorts(team, source.randint(8, 30)))
        else:
            driver.at(source.randint(0, 60), lambda team=team: shorts(team, source.randint(16, 64)))

    def upload() -> None:
        if source.randrange(20) == 0:
            driver.upload(source.choice(list(driver.live)), 3)

    driver.between = upload
    bound = lag_bound(settings, weights.values())
    assert bound is not None
    return driver, bound / UNIT


@pytest.mark.case("I5")
def test_the_gap_at_up_to_16_slots() -> None:
    """Prints the largest excess over Theta, in u, by the number of slots (`-s`)."""
    excess: dict[int, tuple[float, int]] = {}
    for seed in range(60):
        driver, bound = crowded(seed)
        for _ in range(STEPS):
            driver.step()
        assert driver.max_gap <= bound, f"seed {seed}: {float(driver.max_gap)} > {float(bound)}"
        u = Fraction(1, min(driver.weights.values()))
        over = (driver.max_gap - (bound - 2 * u)) / u
        excess[driver.slots] = max(excess.get(driver.slots, (-1e9, 0)), (float(over), seed))
    print("largest gap, as u over Theta, and its seed, by slots:", dict(sorted(excess.items())))
    assert max(over for over, _ in excess.values()) > 1, "the bound is not idle"


def able_gap(driver: Driver) -> Fraction:
    """Largest difference of D between able teams, or between all while none is able, in units."""
    meter = driver.policy._meter
    lags = [team.lag for team in meter.active if team.is_able] or [team.lag for team in meter.active]
    return Fraction(max(lags) - min(lags), meter.scale) / driver.unit if lags else Fraction(0)


@pytest.mark.case("I5")
def test_the_gap_where_sequences_are_refused() -> None:
    """Rooms that are shut at random: for each try, for a sequence for a while, or for a team for a while. The gap stays
    within 2 Theta + 4u after each step, and when all of a team's sequences fit again between two steps.
    """
    widest = Fraction(0)
    for seed in range(60):
        driver, plain = crowded(seed)
        source = random.Random(seed)
        chance, shut = source.choice([0.2, 0.5, 0.9]), source.choice([0.03, 0.2, 1.0])
        per_team = source.choice([False, True])
        is_open: dict[int, bool] = {}

        def has_room(
            job: Job,
            source: random.Random = source,
            chance: float = chance,
            shut: float = shut,
            per_team: bool = per_team,
            is_open: dict[int, bool] = is_open,
        ) -> bool:
            key = job.team if per_team else id(job)
            if key not in is_open or source.random() < shut:
                is_open[key] = source.random() < chance
            return is_open[key]

        driver.has_room = has_room
        for _ in range(200):
            driver.step()
            gap = able_gap(driver)
            widest = max(widest, gap / plain)
            assert gap <= 2 * plain, f"seed {seed}"
            if source.randrange(10) == 0:
                team = source.choice(list(driver.live.values())).team if driver.live else 0
                for seq_id, job in driver.live.items():
                    if job.team == team:
                        driver.policy.fits_again(seq_id)
                assert able_gap(driver) <= 2 * plain, f"seed {seed}"
    assert widest > Fraction(3, 2), "the bound is not idle"


@pytest.mark.case("I5")
def test_a_satisfied_team_is_not_locked_out_for_what_a_third_one_got() -> None:
    """16 slots. The light team is at the top of the band and asks for one slot of 16. A team of bursts takes what the
    batch team is short of, and leaves. The light team's pause stays within the width of the band, not their number.
    """
    driver = Driver(config((2, 4, 8, 16), theta=16), {0: 1, 1: 1, 2: 1}, slots=16)
    for _ in range(24):
        driver.add(0, 0, 2)
    light = driver.add(0, 0, 10**6, level=3, label="light")
    for _ in range(20):
        driver.add(1, 0, 10**6, level=3)

    def burst() -> None:
        for _ in range(24):
            driver.add(2, 0, 2)

    for time in range(4, 400, 9):
        driver.at(time, burst)
    driver.run(until=400)
    assert driver.max_gap <= 16 + 2
    starts = driver.jobs[light].starts
    longest = max(b - a for a, b in zip(starts, [*starts[1:], 400], strict=True))
    assert longest <= 16 + 2, longest
