"""What holds in every schedule: levels, the bound on the gap between teams, conservation, and what changes nothing.

Unit of fairness: the team's lag D, in decode steps per unit of weight. The bound is Theta + 2u, u being the most that
one sequence costs in a step over the least weight. FCFS is the control that must break it.
"""

import hashlib
import os
import random
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies.catalog import make_policy
from tests.support.policies.driver import UNIT, Driver, Job, config
from tests.support.policies.scenarios import COASTS, PROMOTIONS, JobPlan, Promotion, Scenario, scenarios

EXACT = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
STEPS = 80


@pytest.mark.case("I3", "I4")
@settings(EXACT, max_examples=100)
@given(scenarios(refusals=True, infinite=True, promotion=True))
def test_levels_only_grow_and_quanta_hold(scenario: Scenario) -> None:
    driver = scenario.driver()
    last: dict[int, int] = {}
    for _ in range(STEPS):
        driver.step()
        for seq_id, job in driver.live.items():
            level = driver.policy.level(seq_id)
            assert 0 <= level < scenario.levels
            assert level >= last.get(seq_id, 0)
            last[seq_id] = level
            if level < scenario.levels - 1:
                used = driver.policy._sequences[seq_id].used / UNIT
                assert used < 2**level + max(1, job.prompt)


@pytest.mark.case("I4")
def test_used_up_quanta_demote_at_once() -> None:
    """Level k lasts exactly q_k units of a sequence that decodes one unit a step."""
    driver = Driver(config((1, 2, 4, 8)), {0: 1})
    driver.add(0, 0, 20)
    levels = []
    for _ in range(12):
        levels.append(driver.policy.level(0))
        driver.step()
    assert levels == [0] + [1] * 2 + [2] * 4 + [3] * 5


def test_no_demotion_before_the_first_token() -> None:
    """A prompt in chunks keeps its level through the prefill, and falls one level with the token that ends it."""
    driver = Driver(config((1, 2, 4, 8, 16)), {0: 1})
    driver.add(0, 4, 10, chunk=1, join_work=0)
    levels = []
    for _ in range(5):
        levels.append(driver.policy.level(0))
        driver.step()
    assert levels == [0, 0, 0, 0, 1]


@pytest.mark.case("I5")
@settings(EXACT, max_examples=300)
@given(scenarios(promotion=True))
def test_the_gap_stays_within_theta_and_two_steps(scenario: Scenario) -> None:
    driver = scenario.driver()
    for _ in range(STEPS):
        driver.step()
        assert driver.max_gap <= (scenario.theta or 0) + 2 * scenario.u


@pytest.mark.case("I5")
@settings(EXACT, max_examples=100)
@given(scenarios(loops=False, skew=True, infinite=True))
def test_a_step_moves_no_lag_in_or_out(scenario: Scenario) -> None:
    """Sum of weight * D is the same before and after a step, to the last microsecond."""
    scenario = replace(scenario, jobs=tuple(replace(job, at=0, decodes=1000) for job in scenario.jobs))
    driver = scenario.driver()
    for _ in range(STEPS):
        driver.step()
        assert sum(scenario.weights[team] * lag for team, lag in driver.policy.lags().items()) == 0


def rivals(policy: str) -> Driver:
    """Team 0 sends twelve jobs, then team 1 sends two; four slots, equal weights."""
    driver = Driver(config((1, 2, 4, 8), theta=2), {0: 1, 1: 1}, slots=4, policy=policy)
    for _ in range(12):
        driver.add(0, 0, 40)
    for _ in range(2):
        driver.add(1, 0, 40)
    for _ in range(60):
        driver.step()
    return driver


@pytest.mark.case("I5")
def test_fcfs_is_the_control_that_breaks_the_bound() -> None:
    fair, unfair = rivals("eg-mlfq"), rivals("fcfs")
    assert fair.max_gap <= 2 + 2
    assert unfair.max_gap > 10 * (2 + 2)
    assert fair.served()[1] == pytest.approx(80, abs=4), "two of four slots, until its two jobs are done"
    assert unfair.served()[1] == 0


@pytest.mark.case("I6")
@settings(EXACT, max_examples=100)
@given(scenarios(refusals=True, infinite=True, promotion=True), st.sampled_from(["eg-mlfq", "fcfs"]))
def test_no_slot_stays_empty_while_a_candidate_is_untried(scenario: Scenario, policy: str) -> None:
    driver = scenario.driver(policy=policy)
    for _ in range(STEPS):
        labels = driver.step()
        assert len(labels) == scenario.slots or driver.left_out == 0


def gain_by_splitting(seed: int, *, is_gated: bool = True) -> tuple[int, int]:
    """One slot, and equal weights. Team 0 sends its requests whole, or in pieces and in the reverse order; each of the
    others has work for the whole time. The most units that this changes for team 0 at any time, and Theta + u.
    """
    source = random.Random(f"splitting {seed}")
    others = [
        JobPlan(team, source.randint(0, 10), source.choice([0, 0, 1, 3]), 200, source.randint(0, 3), None, None)
        for team in range(1, 1 + source.randint(1, 3))
        for _ in range(source.randint(1, 3))
    ]
    num_teams = 1 + max(job.team for job in others)
    theta = source.choice([0, 1, 3, 20])
    scenario = Scenario(
        weights=(1,) * num_teams,
        slots=1,
        levels=source.randint(1, 4),
        theta=theta if is_gated else None,
        chunk=source.choice([2, 1 << 20]),
        jobs=(),
        refusals=0,
        skew=0,
        seed=seed,
        coast=source.choice([None, *COASTS]),
    )
    mine = [(source.randint(2, 12), source.randint(0, 3)) for _ in range(source.randint(1, 5))]
    pieces = source.randint(1, 4)

    def served(jobs: list[JobPlan]) -> list[int]:
        driver = replace(scenario, jobs=tuple(jobs + others)).driver()
        totals = []
        while driver.now < 200:
            driver.step()
            totals += [driver.served().get(0, 0)] * (driver.now - len(totals))
        return totals[:200]

    whole = [JobPlan(0, 0, 0, size, level, None, None) for size, level in mine]
    split = []
    for size, level in reversed(mine):
        parts = [size // pieces + (i < size % pieces) for i in range(pieces)]
        split += [JobPlan(0, 0, 0, part, level, None, None) for part in parts if part]
    bound = theta + replace(scenario, jobs=tuple(others)).bound
    return max(abs(a - b) for a, b in zip(served(whole), served(split), strict=True)), bound


@pytest.mark.case("I9")
def test_splitting_requests_gains_at_most_the_band() -> None:
    for seed in range(200):
        gain, bound = gain_by_splitting(seed)
        assert gain <= bound, seed


@pytest.mark.case("I9")
def test_without_a_gate_splitting_requests_gains_more() -> None:
    """The control: pieces are short, and by levels alone short ones go first."""
    gains = [gain_by_splitting(seed, is_gated=False) for seed in range(200)]
    assert sum(gain > bound for gain, bound in gains) > 20


@pytest.mark.case("I10")
@settings(EXACT, max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(0, 4), st.integers(0, 2)), min_size=1, max_size=4
    ),
    st.integers(1, 4),
    st.sampled_from([0, 1, 5]),
    st.booleans(),
)
def test_leaving_and_returning_gains_at_most_the_band(
    loops: list[tuple[int, int, int, int]], weight: int, theta: int, coast: bool
) -> None:
    """Closed loops of any size and think time against one team that always has work, over 600 steps. Their jobs are
    alike, so that those of 16 or more coast where they may.
    """
    weights = {0: weight} | {i: loop[0] for i, loop in enumerate(loops, start=1)}
    driver = Driver(config((1, 2, 4, 8), theta=theta, coast=coast), weights)

    def again(job: Job) -> None:
        if job.team:
            _, size, think, level = loops[job.team - 1]
            driver.at(driver.now + think, lambda: driver.add(job.team, 0, size, level))

    driver.on_done.append(again)
    driver.add(0, 0, 10_000)
    for team, (_, size, _, level) in enumerate(loops, start=1):
        driver.add(team, 0, size, level)
    u = Fraction(1, min(weights.values()))
    for _ in range(600):
        driver.step()
        served = driver.served()
        for team in range(1, len(weights)):
            gain = Fraction(served[team], weights[team]) - Fraction(served[0], weight)
            assert gain <= theta + 2 * u


def schedule_hash(scenario: Scenario) -> str:
    driver = scenario.driver()
    for _ in range(STEPS):
        driver.step()
    return hashlib.sha256(repr((driver.trace, sorted(driver.policy.lags().items()))).encode()).hexdigest()


@pytest.mark.case("I11")
@settings(EXACT, max_examples=50)
@given(scenarios(refusals=True, skew=True, infinite=True, promotion=True))
def test_same_log_same_schedule(scenario: Scenario) -> None:
    assert schedule_hash(scenario) == schedule_hash(scenario)


@pytest.mark.case("I11")
def test_same_schedule_in_another_process() -> None:
    """Neither the seed of string hashes nor addresses of objects may show."""
    script = (
        "from tests.policies.test_invariants import schedule_hash\n"
        "from tests.support.policies.scenarios import JobPlan, Scenario\n"
        "jobs = tuple(JobPlan(i % 4, i, i % 3, 5 + i, i % 3, None, i % 2 or None) for i in range(20))\n"
        "print(schedule_hash(Scenario((1, 2, 3, 1), 4, 4, 2, 2, jobs, 30, 1, 1)))\n"
    )
    root = Path(__file__).parents[2]
    hashes = {
        subprocess.run(
            [sys.executable, "-c", script],
            cwd=root,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(hashes) == 1


def skip_join_mlfq(
    quanta: list[int], jobs: list[tuple[int, int]], slots: int, steps: int, promotion: Promotion | None = None
) -> list[list[str]]:
    """MLFQ for one team, by sorting: a job joins by its prefill, runs by (level, place), and falls at its quantum. With
    a budget, the one that has starved longest runs first for the length of a grant.
    """
    place = now = 0
    fifo: list[dict] = []
    held = Fraction(promotion.burst * promotion.grant) if promotion else Fraction(0)
    queue = []
    for i, (prefill, decodes) in enumerate(jobs):
        level = next((k for k, q in enumerate(quanta[:-1]) if q >= prefill), len(quanta) - 1)
        queue.append({"level": level, "place": (place := place + 1), "used": 0, "p": prefill, "n": decodes, "id": i})
    for job in queue:
        job.update(last=0, grant=0)
    batches = []
    for _ in range(steps):
        if promotion:
            due = [
                job for job in queue if now - job["last"] >= promotion.alpha and job not in fifo and job["grant"] <= 0
            ]
            fifo += sorted(due, key=lambda job: (job["last"], job["place"]))
            if fifo and held >= promotion.grant and all(job["grant"] <= 0 for job in queue):
                fifo.pop(0)["grant"] = promotion.grant
        batch = sorted(queue, key=lambda job: (job["grant"] <= 0, job["level"], job["place"]))[:slots]
        if batch:
            batches.append([f"j{job['id']}" for job in batch])
        length = max([job["p"] or 1 for job in batch], default=1)
        now += length
        for job in batch:
            work = job["p"] or 1
            job["n"] -= 0 if job["p"] else 1
            job["p"] = 0
            job["last"] = now
            if job in fifo:
                fifo.remove(job)
            if job["grant"] > 0:
                job["grant"] -= work
                held -= work
                continue
            job["used"] += work
            if job["level"] < len(quanta) - 1 and job["used"] >= quanta[job["level"]]:
                job.update(level=job["level"] + 1, used=0, place=(place := place + 1))
        queue = [job for job in queue if job["n"] > 0]
        if promotion:
            held = min(Fraction(promotion.burst * promotion.grant), held + Fraction(promotion.percent * length, 100))
    return batches


some_jobs = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12)), min_size=1, max_size=10)


@pytest.mark.case("I14")
@settings(EXACT, max_examples=100)
@given(
    some_jobs,
    st.integers(1, 4),
    st.sampled_from([0, 3, None]),
    st.integers(1, 4),
    st.integers(1, 5),
    st.sampled_from([None, *PROMOTIONS]),
)
def test_one_team_is_skip_join_mlfq_for_every_theta(
    jobs: list[tuple[int, int]], levels: int, theta: int | None, slots: int, weight: int, promotion: Promotion | None
) -> None:
    quanta = [2**k for k in range(levels)]
    settings = config(quanta, theta=theta, u=9)
    if promotion is not None:
        settings = replace(settings, promotion_percent=promotion.percent, grant_us=promotion.grant * UNIT)
    alpha, burst = (promotion.alpha, promotion.burst) if promotion else (None, 1)
    driver = Driver(settings, {0: weight}, slots=slots, alpha=alpha, burst=burst)
    for i, (prefill, decodes) in enumerate(jobs):
        driver.add(0, prefill, decodes, label=f"j{i}")
    for _ in range(60):
        driver.step()
    assert [labels for _, labels in driver.trace] == skip_join_mlfq(quanta, jobs, slots, 60, promotion)


@pytest.mark.case("I14")
@settings(EXACT, max_examples=60)
@given(some_jobs, st.sampled_from([0, 3, None]), st.integers(1, 4))
def test_one_level_and_one_team_is_fcfs(jobs: list[tuple[int, int]], theta: int | None, slots: int) -> None:
    traces = []
    for policy in ("eg-mlfq", "fcfs"):
        driver = Driver(config((1,), theta=theta, u=9), {0: 1}, slots=slots, policy=policy)
        for i, (prefill, decodes) in enumerate(jobs):
            driver.at(i // 2, partial(driver.add, 0, prefill, decodes, label=f"j{i}"))
        traces.append(driver.run().trace)
    assert traces[0] == traces[1]
    assert [labels[0] for _, labels in traces[0]] == sorted(
        (labels[0] for _, labels in traces[0]), key=lambda label: int(label[1:])
    )


@pytest.mark.case("I16")
@settings(EXACT, max_examples=60)
@given(scenarios(refusals=True, promotion=True), st.integers(2, 7))
def test_scaling_cost_or_weights_changes_nothing(scenario: Scenario, factor: int) -> None:
    """All costs and Theta times a factor; or all weights times a factor and Theta (and u) by its inverse."""
    plain = scenario.driver()
    costly = scenario.driver(unit=UNIT * factor)
    heavy = replace(scenario, weights=tuple(weight * factor for weight in scenario.weights))
    narrow = replace(scenario.settings(), theta_us=(scenario.settings().theta_us or 0) // factor)
    assert UNIT % factor == 0, "so that Theta over the factor is a whole number"
    heavier = heavy.driver(instance=make_policy("eg-mlfq", narrow))
    for _ in range(STEPS):
        expected = plain.step()
        assert costly.step() == expected
        assert heavier.step() == expected
        assert costly.policy.lags() == {team: lag * factor for team, lag in plain.policy.lags().items()}
        assert heavier.policy.lags() == {team: lag / factor for team, lag in plain.policy.lags().items()}
