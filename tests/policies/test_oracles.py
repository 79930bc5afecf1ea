"""Schedules worked out by hand: a unit of fairness is one team's lag D, in decode steps per unit of weight.

The names O1, O2, ... are those of the scheduling page; a step is one unit unless it is a prefill.
"""

from fractions import Fraction

import pytest

from policies.catalog import make_policy
from policies.config import PolicyConfig
from policies.sequences import SequenceTerms, Served, TeamTerms
from tests.support.policies.driver import INFINITE, UNIT, Driver, Job, config

A, B, F, G, H = 0, 1, 5, 6, 7


def mean(done: dict[str, int | None]) -> float:
    return sum(t or 0 for t in done.values()) / len(done)


# -- levels, inside one team ------------------------------------------------------------------------------------------


def three_jobs(driver: Driver, skip_join: bool = True) -> dict[str, int | None]:
    for label, prefill, decodes in (("A", 4, 2), ("B", 1, 1), ("C", 1, 2)):
        driver.add(A, prefill, decodes, label=label, join_work=None if skip_join else 0)
    return driver.run().done()


@pytest.mark.case("O1")
def test_skip_join_against_naive_and_fcfs() -> None:
    assert three_jobs(Driver(config(), {A: 1}, policy="fcfs")) == {"A": 6, "B": 8, "C": 11}
    assert three_jobs(Driver(config(), {A: 1}), skip_join=False) == {"A": 8, "B": 9, "C": 11}
    means = [
        mean(three_jobs(Driver(config(), {A: 1}))),
        mean(three_jobs(Driver(config(), {A: 1}, policy="fcfs"))),
        mean(three_jobs(Driver(config(), {A: 1}), skip_join=False)),
    ]
    assert means == [pytest.approx(19 / 3), pytest.approx(25 / 3), pytest.approx(28 / 3)]


@pytest.mark.case("O2")
def test_a_short_arrival_preempts() -> None:
    driver = Driver(config((2, 4, 8)), {A: 1})
    x = driver.add(A, 1, 9, label="X")
    driver.at(3, lambda: driver.add(A, 1, 1, label="Y"))
    levels = {}
    while driver.live or driver.future:
        driver.step()
        if x in driver.live:
            levels[driver.now] = driver.policy.level(x)
    assert driver.starts("Y") == [3, 4]
    assert driver.done() == {"X": 12, "Y": 5}
    assert [level for _, level in sorted(levels.items())] == [0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2]
    assert min(t for t, level in levels.items() if level == 1) == 2
    assert min(t for t, level in levels.items() if level == 2) == 8


@pytest.mark.case("O3")
@pytest.mark.parametrize(("policy", "expected"), [("eg-mlfq", {"X": 15, "Y": 16}), ("fcfs", {"X": 8, "Y": 16})])
def test_equal_long_jobs_are_what_levels_are_bad_at(policy: str, expected: dict[str, int]) -> None:
    driver = Driver(config(), {A: 1}, policy=policy)
    driver.add(A, 1, 7, label="X")
    driver.add(A, 1, 7, label="Y")
    assert driver.run().done() == expected


@pytest.mark.case("O14")
def test_a_cobatched_prefill_demotes_nobody_else() -> None:
    """The decode's own work is 5 ms; its step lasts 200 ms and it pays a part of that, but its level does not move."""
    policy = make_policy("eg-mlfq", PolicyConfig(levels=4, base_quantum_us=50_000, decode_work_us=5_000))
    policy.configure([TeamTerms(A), TeamTerms(B)], 0)
    policy.arrive(SequenceTerms(1, A, 8, 0, 5_000, 0, 0), 0)
    policy.arrive(SequenceTerms(2, B, 8, 0, 9_000_000, 0, 0), 0)
    for step in range(9):
        policy.begin(step)
        while (seq_id := policy.best()) is not None:
            policy.take(seq_id, {1: 5_000, 2: 200_000}[seq_id])
        policy.settle([Served(1, 5_000, 30_000, True), Served(2, 200_000, 170_000, False)], step)
        assert policy.level(1) == 0
    policy.begin(9)
    policy.take(policy.best() or 0, 5_000)
    policy.settle([Served(1, 5_000, 5_000, True)], 9)
    assert policy.level(1) == 1, "50 ms of its own work is its quantum"


# -- the gate between teams -------------------------------------------------------------------------------------------


@pytest.mark.case("O5")
def test_shares_follow_weights() -> None:
    driver = Driver(config((1000, 1000)), {A: 2, B: 1})
    driver.add(A, 0, 100)
    driver.add(B, 0, 100)
    driver.run(until=9)
    assert "".join(labels[0] for _, labels in driver.trace) == "ABAABAABA"


@pytest.mark.case("O6")
def test_a_joiner_gets_its_share_at_once_and_no_more() -> None:
    driver = Driver(config((1000, 1000)), {A: 1, B: 1})
    driver.add(A, 0, 100)
    driver.at(10, lambda: driver.add(B, 0, 100))
    driver.run(until=30)
    after = [labels[0] for start, labels in driver.trace if start >= 10]
    assert after in (["A", "B"] * 10, ["B", "A"] * 10)


def closed_loop(steps: int, size: int, think: int) -> dict[int, int]:
    driver = Driver(config((1, 2, 4, 8), u=1), {A: 1, B: 1})

    def again(job: Job) -> None:
        if job.team == A:
            driver.at(driver.now + think, lambda: driver.add(A, 0, size))

    driver.on_done.append(again)
    driver.add(B, 0, 10 * steps, level=2)
    driver.add(A, 0, size)
    return driver.run(until=steps).served()


@pytest.mark.case("O6b")
@pytest.mark.parametrize(("size", "think", "slack"), [(1, 0, 0), (1, 1, 0), (4, 0, 2), (4, 1, 2)])
def test_leaving_and_returning_forgives_no_debt(size: int, think: int, slack: int) -> None:
    served = closed_loop(1000, size, think)
    assert served[A] + served[B] == 1000
    assert abs(served[A] - 500) <= slack, served


@pytest.mark.case("O6c")
def test_long_steps_count_in_the_demand() -> None:
    driver = Driver(config(u=200), {A: 1, B: 1})
    for _ in range(120):
        driver.add(A, 200, 1)
    driver.add(B, 0, 90_000)
    served = driver.run(until=20_000).served()
    assert abs(served[A] - served[B]) <= 200, served


@pytest.mark.case("O6d")
def test_long_steps_beside_decodes_get_their_half() -> None:
    driver = Driver(config((8, 16, 32, 64), u=20), {A: 1, F: 1}, slots=16)
    for _ in range(20):
        driver.add(A, 0, 100_000)
    driver.add(F, 200_000, 1, chunk=20)
    for _ in range(2000):
        driver.step()
    served = driver.served()
    assert served[F] / (served[A] + served[F]) == pytest.approx(0.5, abs=0.01)


def splitting(theta: int | None, pieces: int) -> dict[str, int | None]:
    driver = Driver(config(theta=theta), {A: 1, B: 1})
    for _ in range(pieces):
        driver.add(A, 0, 8 // pieces)
    driver.add(B, 0, 8)
    return driver.run().done()


@pytest.mark.case("O7", "I9")
@pytest.mark.parametrize(("theta", "pieces", "done_a"), [(0, 8, 15), (0, 1, 15), (INFINITE, 8, 9), (INFINITE, 1, 15)])
def test_splitting_gains_nothing_behind_the_gate(theta: int | None, pieces: int, done_a: int) -> None:
    assert splitting(theta, pieces) == {"A": done_a, "B": 16}


@pytest.mark.case("O9")
def test_two_slots_three_to_one() -> None:
    driver = Driver(config((1000, 1000)), {A: 3, B: 1}, slots=2)
    for _ in range(6):
        driver.add(A, 0, 100)
    driver.add(B, 0, 100)
    for _ in range(4):
        driver.step()
    assert [sorted(labels) for _, labels in driver.trace] == [["A", "B"], ["A", "A"], ["A", "B"], ["A", "A"]]


@pytest.mark.case("O9b")
def test_a_share_that_cannot_be_used_is_not_banked() -> None:
    driver = Driver(config((1000, 1000)), {G: 1, H: 1}, slots=4)
    driver.add(G, 0, 1000)
    for _ in range(8):
        driver.add(H, 0, 1000)

    def more() -> None:
        for _ in range(20):
            driver.add(G, 0, 1000)

    driver.at(50, more)
    for _ in range(150):
        driver.step()
    batches = ["".join(sorted(labels)) for _, labels in driver.trace]
    assert batches[:50] == ["GHHH"] * 50
    assert batches[50:] == ["GGHH"] * 100


@pytest.mark.case("O10")
@pytest.mark.parametrize(("theta", "starts"), [(0, [10, 12, 14]), (4, [10, 11, 12])])
def test_a_chat_wakes_up_beside_a_batch_job(theta: int, starts: list[int]) -> None:
    driver = Driver(config((4, 8, 16), theta=theta), {A: 1, B: 1})
    driver.add(B, 0, 1000, level=2)
    driver.at(10, lambda: driver.add(A, 0, 3))
    assert driver.run(until=20).starts("A") == starts


@pytest.mark.case("C01")
def test_idle_shares_belong_to_the_busy() -> None:
    """Ten equal teams, one of them busy: it has the whole device. A second one comes: half each from the next step."""
    driver = Driver(config((1000, 1000)), dict.fromkeys(range(10), 1))
    driver.add(0, 0, 1000)
    driver.at(20, lambda: driver.add(1, 0, 1000))
    driver.run(until=60)
    assert driver.starts("A")[:20] == list(range(20))
    assert driver.served() == {0: 40, 1: 20}


@pytest.mark.case("C05")
@pytest.mark.parametrize("slots", [1, 2])
def test_a_burst_is_charged_as_it_is_picked(slots: int) -> None:
    """B sends 100 requests at once; after its first, the waiting one of A, which was served less, goes next, in the
    same step if there is a slot.
    """
    driver = Driver(config((1000, 1000)), {A: 1, B: 1}, slots=slots)
    for _ in range(100):
        driver.add(B, 0, 1)
    driver.add(A, 0, 1)
    driver.step()
    driver.step()
    order = [label for _, labels in driver.trace for label in labels]
    assert order[:2] == ["B", "A"]


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.case("O17b")
def test_a_team_that_could_not_run_gets_no_more_than_the_band_back() -> None:
    """The floor: D of a team that cannot run stays within Theta + u below the others."""
    driver = Driver(config((1000,), theta=3), {A: 1, F: 1}, has_room=lambda job: job.team != F)
    driver.add(F, 0, 900)
    driver.add(A, 0, 900)
    driver.run(until=200)
    assert driver.gap() == 4
    driver.has_room = lambda job: True
    driver.run(until=212)
    assert driver.served()[F] <= 12 // 2 + 4


def test_the_meter_of_an_oracle_is_exact() -> None:
    driver = Driver(config((1000, 1000)), {A: 2, B: 1})
    driver.add(A, 0, 100)
    driver.add(B, 0, 100)
    driver.step()
    assert {team: lag / UNIT for team, lag in driver.policy.lags().items()} == {A: Fraction(1, 6), B: Fraction(-1, 3)}
