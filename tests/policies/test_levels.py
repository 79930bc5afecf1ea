"""Levels: where a sequence joins, when it falls, and what it is thought to do next."""

import pytest

from policies.catalog import make_policy
from policies.config import PolicyConfig
from policies.sequences import TeamTerms
from tests.policies.test_oracles import A, three_jobs
from tests.policies.test_policy import arrive
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
