"""First come, first served."""

import pytest

from policies.catalog import make_policy
from policies.config import PolicyConfig
from policies.sequences import TeamTerms, Turn
from tests.support.policies.calls import arrive, run
from tests.support.policies.driver import Driver, config

A = 0


def test_fcfs_is_the_order_of_arrival_over_all_teams() -> None:
    policy = make_policy("fcfs", PolicyConfig())
    policy.configure([TeamTerms(1), TeamTerms(2, weight=100)], 0)
    for seq_id, team in ((5, 1), (3, 2), (4, 1), (1, 2)):
        arrive(policy, seq_id, team=team)
    for _ in range(3):
        assert run(policy, (5, 100_000), (4, 100_000)) == [5, 3, 4, 1]
    policy.leave(3, 0)
    arrive(policy, 2, team=2)
    assert run(policy) == [5, 4, 1, 2]


@pytest.mark.case("O2")
def test_fcfs_does_not_preempt() -> None:
    driver = Driver(config((2, 4, 8)), {A: 1}, policy="fcfs")
    driver.add(A, 1, 9, label="X")
    driver.at(3, lambda: driver.add(A, 1, 1, label="Y"))
    done = driver.run().done()
    assert done == {"X": 10, "Y": 12}
    assert ((done["X"] or 0) - 0 + (done["Y"] or 0) - 3) / 2 == 9.5


def test_fcfs_knows_only_the_order() -> None:
    driver = Driver(config((1, 2), theta=0), {A: 1}, policy="fcfs")
    for _ in range(3):
        driver.add(A, 0, 5)
    assert driver.policy.turns([2, 0, 1], 1, 0) == [Turn(0, 0), Turn(1, 0), Turn(2, 0)]
