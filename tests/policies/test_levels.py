"""Levels: where a sequence joins, when it falls, and what it is thought to do next."""

import pytest

from policies.accounts import TeamShare
from policies.catalog import make_policy
from policies.config import PolicyConfig
from policies.levels import Levels
from policies.promotion import Promotions
from policies.sequences import Served, TeamTerms
from tests.policies.test_oracles import A, three_jobs
from tests.support.policies.calls import arrive
from tests.support.policies.driver import Driver, config


def test_start_levels_and_skip_join() -> None:
    policy = make_policy("eg-mlfq", PolicyConfig(levels=4, base_quantum_us=100))
    policy.configure([TeamTerms(1), TeamTerms(2, start_level=2), TeamTerms(3, start_level=7)], 0)
    joined = [
        arrive(policy, 1, work=100),
        arrive(policy, 2, work=101),
        arrive(policy, 3, work=10_000),
        arrive(policy, 4, team=2, work=100),
        arrive(policy, 5, team=2, work=401),
        arrive(policy, 6, work=0, start_level=1),
        arrive(policy, 7, team=2, start_level=1),
        arrive(policy, 8, team=3),
    ]
    assert joined == [0, 1, 3, 2, 3, 1, 2, 3]
    fcfs = make_policy("fcfs", PolicyConfig(levels=4, base_quantum_us=100))
    fcfs.configure([TeamTerms(1, start_level=2)], 0)
    assert arrive(fcfs, 1, work=10_000, start_level=3) == 0


@pytest.mark.case("O1")
def test_skip_join_runs_short_prompts_first() -> None:
    driver = Driver(config(), {A: 1})
    assert three_jobs(driver) == {"A": 11, "B": 3, "C": 5}
    assert [labels[0] for _, labels in driver.trace] == ["B", "C", "B", "C", "C", "A", "A", "A"]


CONFIG = PolicyConfig(levels=3, base_quantum_us=100, decode_work_us=7, chunk_work_us=200)


def served(work_us: int, has_generated: bool) -> Served:
    return Served(1, work_us, work_us, has_generated)


@pytest.mark.parametrize(
    ("prefill", "start", "level"),
    [(0, 0, 0), (100, 0, 0), (101, 0, 1), (200, 0, 1), (201, 0, 2), (10**9, 0, 2), (0, 1, 1), (0, 9, 2)],
)
def test_it_joins_the_first_level_that_holds_its_prefill(prefill: int, start: int, level: int) -> None:
    assert Levels(CONFIG).join_level(prefill, start) == level


def test_when_the_quantum_is_used_up_it_falls_after_its_first_token() -> None:
    levels, promotions = Levels(CONFIG), Promotions(CONFIG)
    one = levels.admit(1, TeamShare(TeamTerms(1), CONFIG), 90, 0)
    for work, has_generated, level, used in [
        (60, False, 0, 60),
        (60, False, 0, 120),  # more than the quantum, and no token yet
        (0, True, 1, 0),
        (199, True, 1, 199),
        (1, True, 2, 0),
        (10**9, True, 2, 10**9),  # the last level has no quantum
    ]:
        levels.charge([(one, served(work, has_generated))], 5, promotions)
        assert (one.level, one.used) == (level, used)
    assert one.attained == 60 + 60 + 199 + 1 + 10**9 and one.last_service == 5


def test_the_next_step_is_foreseen_from_the_last_one() -> None:
    levels, promotions = Levels(CONFIG), Promotions(CONFIG)
    one = levels.admit(1, TeamShare(TeamTerms(1), CONFIG), 500, 0)
    assert one.next_work == 200, "a whole chunk"
    for work, has_generated, foreseen in [
        (50, False, 200),  # a chunk cut short says nothing
        (300, False, 150),  # that much is left
        (150, True, 7),  # a prefill's end says nothing of a decode
        (9, True, 9),
        (0, True, 9),  # replayed tokens are no work
    ]:
        levels.charge([(one, served(work, has_generated))], 0, promotions)
        assert one.next_work == foreseen
