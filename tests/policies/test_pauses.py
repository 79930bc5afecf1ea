"""What promotion promises while everybody wants the device: budgets hold (I7), and no pause exceeds its bound (I8).

Service time at a fixed rate: with cost = work a step of one slot lasts as long as its work, so a unit of work is a unit
of time. Unit of fairness: the longest pause of one sequence, in decode steps, against the bound printed for it.
"""

import random
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies.bounds import PauseTerms, pause_terms
from policies.config import PolicyConfig
from policies.sequences import TeamTerms
from tests.support.policies.driver import UNIT, Driver, Job, config

EXACT = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@dataclass
class Crowd:
    """Teams that together want more than the device, each with long work in low levels and short requests above."""

    seed: int
    slots: int = 1
    teams: int = 3
    percent: int = 20
    grant: int = 4
    alpha: int = 10
    theta: int = 4
    longest: int = 3  # units of the longest atomic step
    long_jobs: int = 6  # of a team, at the most

    def __post_init__(self) -> None:
        source = random.Random(self.seed)
        self.source = source
        self.settings: PolicyConfig = replace(
            config((2, 4, 8, 16), theta=self.theta, u=self.longest, promotion_percent=self.percent),
            grant_us=self.grant * UNIT,
        )
        self.table = [
            TeamTerms(team, source.choice([1, 1, 2]), 0, self.alpha * UNIT, source.choice([1, 2]))
            for team in range(self.teams)
        ]
        self.driver = Driver(self.settings, {}, self.slots)
        self.driver.policy.configure(self.table, 0)
        self.driver.on_done.append(self._again)
        for team in range(self.teams):
            for _ in range(source.randint(1, self.long_jobs)):
                self._add_long(team)
            for _ in range(source.randint(0, 3)):
                self._add_short(team)

    def _add_long(self, team: int) -> None:
        prefill = self.source.choice([0, 0, 3, 9])
        self.driver.add(team, prefill, self.source.randint(10, 60), 3, "long", chunk=self.longest)

    def _add_short(self, team: int) -> None:
        self.driver.add(team, 0, self.source.randint(1, 2), 0, "short")

    def _again(self, job: Job) -> None:
        if job.label == "long":
            self._add_long(job.team)
        else:
            self.driver.at(self.driver.now + self.source.randint(0, 2), lambda: self._add_short(job.team))

    def terms(self, team: int) -> PauseTerms:
        """What the bound is made of."""
        terms = pause_terms(self.settings, self.table, team, 0)
        assert terms is not None
        return terms


@dataclass
class Pause:
    """An episode of starving: the gap between the ends of two steps, and what was promised when it began."""

    length: int
    bound: Fraction


def pauses_of(crowd: Crowd, until: int) -> list[Pause]:
    """All pauses of at least alpha that ended by `until`, and those that are still going on then."""
    driver = crowd.driver
    since: dict[int, int] = {}  # the end of its last step, or its arrival
    promised: dict[int, Fraction] = {}
    is_promoting = driver.policy._promotions.percent > 0
    expected: dict[int, int] = {}  # who begins to starve in this step, and the number ahead
    found: list[Pause] = []

    def look() -> None:
        place = {seq_id: driver.policy._sequences[seq_id].place for seq_id in driver.live}
        waiting = sorted(
            driver.live, key=lambda seq_id: (since.setdefault(seq_id, driver.jobs[seq_id].arrived), place[seq_id])
        )
        expected.clear()
        for seq_id in waiting:
            team = driver.live[seq_id].team
            if seq_id not in promised and driver.now - since[seq_id] >= crowd.alpha:
                ahead = sum(driver.jobs[other].team == team for other in promised)
                promised[seq_id] = Fraction(crowd.terms(team).bound_us(0), UNIT)  # of the holder of a grant
                sequence = driver.policy._sequences[seq_id]
                if is_promoting and not sequence.grant_left:  # one with a grant is not queued again
                    expected[seq_id] = ahead

    def over(seq_id: int, now: int) -> None:
        if seq_id in promised:
            found.append(Pause(now - since[seq_id], promised.pop(seq_id)))

    driver.between = look
    while driver.now < until:
        before = {seq_id: len(job.starts) for seq_id, job in driver.jobs.items()}
        driver.step()
        assert [starving.seq_id for starving in driver.starving] == list(expected)
        for one in driver.starving:
            # The holder of a grant counts once it waits as long, whoever of the two began to wait first.
            assert one.num_ahead - expected[one.seq_id] in (0, 1)
            terms = crowd.terms(driver.jobs[one.seq_id].team)
            assert one.grants_us >= 0 and one.held_us >= -crowd.longest * UNIT
            promised[one.seq_id] = Fraction(terms.bound_us(one.num_grants, one.grants_us, one.held_us), UNIT)
        for seq_id, job in driver.jobs.items():
            if len(job.starts) > before.get(seq_id, 0):
                over(seq_id, driver.now)
                since[seq_id] = driver.now
    for seq_id in list(promised):
        over(seq_id, driver.now)
    return found


crowds = st.builds(
    Crowd,
    seed=st.integers(0, 10**6),
    slots=st.sampled_from([1, 1, 2, 4]),
    teams=st.integers(1, 4),
    percent=st.sampled_from([5, 20, 60]),
    grant=st.sampled_from([1, 4, 9]),
    alpha=st.sampled_from([3, 10, 30]),
    theta=st.sampled_from([0, 4, 30]),
    longest=st.sampled_from([1, 3, 9]),
)


@pytest.mark.case("I7")
@settings(EXACT, max_examples=40)
@given(crowds)
def test_promoted_work_stays_within_the_budget(crowd: Crowd) -> None:
    """In every window: at most sigma + rho * its length + one step."""
    driver = crowd.driver
    weights = sum(terms.weight for terms in crowd.table)
    series: dict[int, list[tuple[int, int]]] = {terms.team_id: [(0, 0)] for terms in crowd.table}
    while driver.now < 300:
        driver.step()
        for service in driver.policy.team_service():
            series[service.team_id].append((driver.now * UNIT, service.promoted_us))
    for terms in crowd.table:
        rho = Fraction(crowd.percent * terms.weight, 100 * weights)
        sigma = terms.promotion_burst_grants * crowd.grant * UNIT
        # done - rho * time, less its least value so far: the most that any window ending here has above its rate.
        least = above = Fraction(0)
        for time, done in series[terms.team_id]:
            level = done - rho * time
            least = min(least, level)
            above = max(above, level - least)
        assert above <= sigma + crowd.longest * UNIT


@pytest.mark.case("I8")
@settings(EXACT, max_examples=40)
@given(crowds)
def test_no_pause_exceeds_its_bound(crowd: Crowd) -> None:
    for pause in pauses_of(crowd, 600):
        assert pause.length <= pause.bound


FAMILIES = ({}, {"slots": 4}, {"teams": 1}, {"theta": 30}, {"teams": 2, "alpha": 30, "long_jobs": 12})


@pytest.mark.case("I8")
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_the_printed_bound_says_something(family: dict[str, int]) -> None:
    """The largest bound printed is at most 10 times the longest pause seen over the seeds. Prints the ratio (`-s`)."""
    pauses = [pause for seed in range(5) for pause in pauses_of(Crowd(seed, **family), 1000)]
    longest = max(pause.length for pause in pauses)
    largest = max(pause.bound for pause in pauses)
    print(f"{family}: {len(pauses)} pauses, longest {longest}, bound {float(largest)}: {float(largest / longest):.2f}")
    assert longest <= largest <= 10 * longest


def test_without_promotion_pauses_exceed_it() -> None:
    """The control: the same crowd, with short requests that never stop and nobody promoted."""
    bounds: list[Pause] = []
    for percent in (20, 0):
        crowd = Crowd(3, teams=1, percent=20, long_jobs=3)
        crowd.driver = Driver(replace(crowd.settings, promotion_percent=percent), {0: 1}, alpha=crowd.alpha)
        crowd.driver.add(0, 0, 50, 3, "long")
        for time in range(900):
            crowd.driver.at(time, lambda driver=crowd.driver: driver.add(0, 0, 1, 0, "short"))
        bounds.append(max(pauses_of(crowd, 900), key=lambda pause: pause.length))
    promoted, starved = bounds
    assert promoted.length <= promoted.bound
    assert starved.length > 10 * starved.bound
