"""What every policy promises, whatever its order (`policies.policy`)."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies.accounts import LevelQueues, RankedSequence
from policies.catalog import POLICIES, make_policy
from policies.config import PolicyConfig
from policies.policy import Policy
from policies.sequences import Served, TeamTerms
from tests.support.policies.calls import arrive, run
from tests.support.policies.scenarios import Scenario, scenarios

EXACT = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))


def test_unknown_teams_and_sequences(policy: Policy) -> None:
    with pytest.raises(KeyError, match="unknown team 9"):
        arrive(policy, 1, team=9)
    arrive(policy, 1)
    with pytest.raises(ValueError, match="here already"):
        arrive(policy, 1)
    for call in (lambda: policy.leave(2, 0), lambda: policy.level(2)):
        with pytest.raises(KeyError):
            call()


def test_a_step_without_candidates(policy: Policy) -> None:
    assert run(policy) == []
    assert policy.team_service() == []


def test_each_candidate_is_offered_once_in_a_step(policy: Policy) -> None:
    for seq_id in range(6):
        arrive(policy, seq_id, team=1 + seq_id % 2)
    assert sorted(run(policy, refuse=(0, 3))) == [1, 2, 4, 5]
    assert sorted(run(policy)) == [0, 1, 2, 3, 4, 5], "the refused are candidates again in the next step"


def test_leaving_while_refused_or_never_run(policy: Policy) -> None:
    for seq_id in range(4):
        arrive(policy, seq_id)
    run(policy, refuse=(0, 1))
    policy.leave(0, 0)
    policy.leave(3, 0)
    assert sorted(run(policy)) == [1, 2]
    policy.leave(1, 0)
    policy.leave(2, 0)
    assert run(policy) == []
    arrive(policy, 9)
    assert run(policy) == [9]


def test_calls_out_of_turn_fail(policy: Policy) -> None:
    with pytest.raises(AssertionError, match="settle without begin"):
        policy.settle([], 0)
    arrive(policy, 1)
    arrive(policy, 2)
    policy.begin(0)
    with pytest.raises(AssertionError, match="before the last step was settled"):
        policy.begin(0)
    with pytest.raises(AssertionError, match="leave within a step"):
        policy.leave(1, 0)
    with pytest.raises(AssertionError, match="2"):
        policy.take(2, 1)
    with pytest.raises(AssertionError, match="2"):
        policy.refuse(2)


def test_service_totals(policy: Policy) -> None:
    """Team 1 (weight 1) has three sequences, team 2 (weight 3) one that is refused; the step costs 900."""
    for seq_id in range(3):
        arrive(policy, seq_id)
    arrive(policy, 3, team=2)
    policy.begin(0)
    order = []
    while (seq_id := policy.best()) is not None and len(order) < 2:
        if seq_id == 3:
            policy.refuse(3)
        else:
            policy.take(seq_id, 450)
            order.append(seq_id)
    policy.settle([Served(seq_id, 450, 450, True) for seq_id in order], 900)
    one, two = policy.team_service()
    assert (one.team_id, one.served_us, one.running, one.waiting, one.backlogged_us) == (1, 900, 2, 1, 900)
    assert (two.team_id, two.served_us, two.running, two.waiting, two.backlogged_us) == (2, 0, 0, 1, 900)
    # Team 2 asks for one more sequence like the largest that ran: 450 of the 675 that its weight would give it.
    assert (one.entitled_us, two.entitled_us) == (450, 450)
    policy.leave(order[0], 0)
    assert policy.team_service()[0].running == 1


@settings(EXACT, max_examples=60)
@given(scenarios(refusals=True, skew=True, infinite=True), st.sampled_from(sorted(POLICIES)))
def test_the_books_balance(scenario: Scenario, name: str) -> None:
    """served = entitled in sum, and both are the cost of all steps."""
    total = 0
    driver = scenario.driver(policy=name)
    costs = driver.costs

    def counted(works: list[int]) -> list[int]:
        nonlocal total
        paid = costs(works)
        total += sum(paid)
        return paid

    driver.costs = counted
    for _ in range(60):
        driver.step()
        service = driver.policy.team_service()
        assert sum(team.served_us for team in service) == total
        assert sum(team.entitled_us for team in service) == total
        assert sum(team.running + team.waiting for team in service) == len(driver.live)
        assert all(team.lag >= 0 for team in service) or scenario.refusals


@pytest.mark.parametrize(("name", "coasts"), [("eg-mlfq", False), ("eg-mlfq", True), ("fcfs", False)])
@pytest.mark.parametrize("theta", [0, 10**9])
def test_a_step_does_not_look_at_the_whole_queue(
    name: str, coasts: bool, theta: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5,000 sequences wait; a step of 8 slots looks at no more of them than slots and teams, and demand up to C."""
    looked_at = 0
    walk = LevelQueues.walk

    def counted(queues: LevelQueues) -> Iterator[RankedSequence]:
        nonlocal looked_at
        for sequence in walk(queues):
            looked_at += 1
            yield sequence

    monkeypatch.setattr(LevelQueues, "walk", counted)
    policy = make_policy(name, PolicyConfig(theta_us=theta, decode_work_us=1000, coast_completions_min=1))
    policy.configure([TeamTerms(team) for team in range(5)], 0)
    for team in range(5 if coasts else 0):
        arrive(policy, -1 - team, team=team)
        policy.begin(0)
        policy.take(-1 - team, 1000)
        policy.settle([Served(-1 - team, 1000, 1000, True, True)], 0)
        policy.leave(-1 - team, 0)
    assert [team.is_coasting for team in policy.team_service()] == [True] * 5 * coasts
    for seq_id in range(5000):
        arrive(policy, seq_id, team=0 if seq_id > 3 else 1 + seq_id)
    for step in range(20):
        looked_at = 0
        policy.begin(step)
        picked = []
        for _ in range(8):
            seq_id = policy.best()
            assert seq_id is not None
            policy.take(seq_id, 1000)
            picked.append(seq_id)
        policy.settle([Served(seq_id, 1000, 1000, True) for seq_id in picked], step)
        assert looked_at <= 8 + 5 + 8


def test_many_sequences_may_leave_from_the_middle() -> None:
    policy = make_policy("eg-mlfq", PolicyConfig())
    policy.configure([TeamTerms(1)], 0)
    for seq_id in range(2000):
        arrive(policy, seq_id)
    for seq_id in range(1, 1999):
        policy.leave(seq_id, 0)
    assert run(policy) == [0, 1999]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"levels": 0}, "levels is 0"),
        ({"levels": 4, "quanta_us": (1, 2)}, "2 quanta given for 4 levels"),
        ({"levels": 2, "quanta_us": (0, 2)}, "quanta must be positive"),
        ({"theta_us": -1}, "theta_us is negative"),
        ({"step_cost_max_us": -1}, "step_cost_max_us is negative"),
    ],
)
def test_impossible_constants_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(PolicyConfig(), **change)


@pytest.mark.parametrize(("leave", "left"), [("leave_prompts", [1, 4]), ("leave_new", [1, 2, 4]), ("leave_team", [4])])
def test_when_a_team_is_passed_over_others_go_on(policy: Policy, leave: str, left: list[int]) -> None:
    """Of team 1, sequence 1 has produced a token, 2 has computed a part of its prompt, 3 has not begun. Passed over is
    not refused: team 1 is as able as before, and all are candidates again in the next step.
    """
    for seq_id, team in ((1, 1), (2, 1), (4, 2)):
        arrive(policy, seq_id, team=team)
    policy.begin(0)
    while (seq_id := policy.best()) is not None:
        policy.take(seq_id, 1, 1)
    policy.settle([Served(seq_id, 1, 1, seq_id != 2) for seq_id in (1, 2, 4)], 0)
    arrive(policy, 3)
    policy.begin(0)
    offered = []
    has_left = False
    while (seq_id := policy.best()) is not None:
        if not has_left and seq_id != 4:
            getattr(policy, leave)(1)
            has_left = True
            continue
        policy.take(seq_id, 1, 1)
        offered.append(seq_id)
    assert sorted(offered) == left
    policy.settle([Served(seq_id, 1, 1, True) for seq_id in offered], 0)
    assert sorted(run(policy)) == [1, 2, 3, 4]
