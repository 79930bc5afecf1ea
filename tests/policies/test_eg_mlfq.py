"""The gate: which teams may pick, at any width."""

from itertools import pairwise

import pytest

from tests.support.policies.driver import INFINITE, Driver, Job, config

A, B, F = 0, 1, 5


def flood(driver: Driver, jobs_of_a: int | None = None) -> Driver:
    """Team A: one-step jobs at level 0, always a second one waiting (or a given number); team B: six steps at L2."""

    def again(job: Job) -> None:
        if job.team == A:
            driver.add(A, 0, 1)

    if jobs_of_a is None:
        driver.on_done.append(again)
    for _ in range(jobs_of_a or 2):
        driver.add(A, 0, 1)
    driver.add(B, 0, 6, level=2)
    return driver


@pytest.mark.case("O4")
def test_the_gate_opens_for_theta_and_then_alternates() -> None:
    driver = flood(Driver(config(theta=4), {A: 1, B: 1})).run(until=16)
    assert driver.starts("B") == [5, 7, 9, 11, 13, 15]
    assert driver.jobs[2].done == 16
    assert driver.max_gap == 5


@pytest.mark.case("O4")
def test_theta_zero_is_strict_fair_share() -> None:
    driver = flood(Driver(config(theta=0), {A: 1, B: 1})).run(until=12)
    assert driver.starts("B") == [1, 3, 5, 7, 9, 11]
    assert driver.jobs[2].done == 12


@pytest.mark.case("O4")
def test_theta_infinite_is_level_order() -> None:
    driver = flood(Driver(config(theta=INFINITE), {A: 1, B: 1}), jobs_of_a=40).run()
    assert driver.starts("B") == [40, 41, 42, 43, 44, 45]


@pytest.mark.case("O16")
@pytest.mark.parametrize("policy", ["eg-mlfq", "fcfs"])
def test_a_refused_head_blocks_nobody(policy: str) -> None:
    driver = Driver(config(), {A: 1, B: 1}, slots=4, policy=policy, has_room=lambda job: job.label != "big")
    driver.add(A, 0, 1, label="big")
    driver.add(A, 0, 3, label="small")
    driver.add(B, 0, 3, label="other")
    driver.run(until=3)
    assert driver.starts("small") == [0, 1, 2]
    assert driver.starts("other") == [0, 1, 2]
    assert driver.starts("big") == []
    driver.has_room = lambda job: True
    driver.run()
    assert driver.starts("big") == [3], "refusal is for one step: it runs once there is room"


@pytest.mark.case("O17b")
def test_a_team_that_cannot_run_does_not_open_the_gate() -> None:
    driver = Driver(config((1000,)), {A: 1, B: 1, F: 1}, has_room=lambda job: job.team != F)
    driver.add(F, 0, 900)
    driver.add(B, 0, 2000)
    driver.at(300, lambda: driver.add(A, 0, 900))
    driver.run(until=1000)
    starts = driver.starts("B")
    assert starts[:300] == list(range(300))
    assert max(b - a for a, b in pairwise(starts[299:])) <= 2
