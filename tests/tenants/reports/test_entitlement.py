"""What teams are entitled to, from the policy's steps to the report, against a water-filling by brute force.

The test drives the policy with random sequences, steps and costs, notes each step's demands by the rule of
docs/scheduling.md, and looks for the one level of water among all sets of teams that it could satisfy.
"""

import random
from collections import defaultdict
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import chain, combinations

import pytest

from engine.process.samples import ServiceSampler
from gateway.openai.booking import sample_rows
from policies.config import PolicyConfig
from policies.eg_mlfq import EgMlfq
from policies.sequences import Overhead, SequenceTerms, Served, TeamTerms
from tenants import reports
from tenants.reports.periods import Period
from tenants.rows import SampleRow, ServiceSampleRow
from tests.support.tenants import histories
from tests.support.tenants.stores import NOW_US, Store

pytestmark = pytest.mark.anyio
SECOND_US = 1_000_000
SLOTS = 4
CONFIG = PolicyConfig()


def water_fill(total: int, demand: dict[int, int], weight: dict[int, int]) -> dict[int, Fraction]:
    """e = min(demand, weight * v) with sum e = total, by trying every set of satisfied teams."""
    teams = list(demand)
    for satisfied in chain.from_iterable(combinations(teams, size) for size in range(len(teams) + 1)):
        thirsty = [team for team in teams if team not in satisfied]
        rest = total - sum(demand[team] for team in satisfied)
        if not thirsty:
            if rest == 0:
                return {team: Fraction(demand[team]) for team in teams}
            continue
        level = Fraction(rest, sum(weight[team] for team in thirsty))
        if all(demand[team] <= weight[team] * level for team in satisfied) and all(
            demand[team] >= weight[team] * level for team in thirsty
        ):
            return {team: Fraction(demand[team]) if team in satisfied else weight[team] * level for team in teams}
    raise AssertionError("no level satisfies the demands")


@dataclass
class Live:
    """One sequence as the test sees it."""

    team_id: int
    steps_left: int
    next_work: int
    has_generated: bool = False


@dataclass
class Account:
    """Cost for a microsecond of work as the test sees it, from the latest steps of all teams."""

    cost_average: int = 1
    work_average: int = 1

    def expected(self, work_us: int) -> int:
        return work_us * self.cost_average // self.work_average

    def learn(self, cost_us: int, work_us: int) -> None:
        self.cost_average += cost_us - (self.cost_average >> 3)
        self.work_average += work_us - (self.work_average >> 3)


@dataclass
class Second:
    """What one interval should hold, by team."""

    num_steps: int = 0
    entitled: dict[int, Fraction] = field(default_factory=lambda: defaultdict(Fraction))
    served: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    backlogged: set[int] = field(default_factory=set)


class Run:
    """A policy under random load, the samples of it, and what they should say."""

    def __init__(self, seed: int, weights: dict[int, int]) -> None:
        self.rng = random.Random(seed)
        self.weights = weights
        self.policy = EgMlfq(CONFIG)
        self.policy.configure([TeamTerms(team_id, weight=weight) for team_id, weight in weights.items()], 0)
        self.sampler = ServiceSampler(self.policy, 0)
        self.live: dict[int, Live] = {}
        self.account = Account()
        self.now_us = 0
        self.num_arrived = 0
        self.second = Second()
        self.expected: list[Second] = []
        self.rows: list[SampleRow] = []
        self.num_satisfied = 0  # times a team with sequences left out was entitled to all it demanded, and to no more

    def play(self, seconds: int) -> None:
        while len(self.expected) < seconds:
            self.arrive()
            self.step()
            if self.sampler.due_in_us(self.now_us) == 0:
                samples = self.sampler.take(self.now_us)
                if samples is not None:
                    self.expected.append(self.second)
                    self.rows += sample_rows(samples, NOW_US + self.now_us)
                self.second = Second()

    def arrive(self) -> None:
        # Teams come and go: in each stretch of two seconds only some of them send anything.
        stretch = random.Random(self.now_us // (2 * SECOND_US))
        senders = [team_id for team_id in self.weights if stretch.random() < 0.6]
        for team_id in senders:
            if self.rng.random() < 0.25:
                self.num_arrived += 1
                work_us = self.rng.randrange(1, 20_000)
                self.live[self.num_arrived] = Live(
                    team_id, self.rng.randrange(1, 30), min(work_us, CONFIG.chunk_work_us)
                )
                terms = SequenceTerms(self.num_arrived, team_id, 10, 0, work_us, 0, self.now_us)
                self.policy.arrive(terms, self.now_us)

    def step(self) -> None:
        policy, rng = self.policy, self.rng
        policy.begin(self.now_us)
        planned = dict(self.live)
        taken: list[int] = []
        while len(taken) < SLOTS and (seq_id := policy.best()) is not None:
            if rng.random() < 0.15:  # its blocks are missing
                policy.refuse(seq_id)
            else:
                policy.take(seq_id, planned[seq_id].next_work)
                taken.append(seq_id)
        # Costs have little to do with work, so that one's own expectation matters as well as the largest cost.
        served = [
            Served(
                seq_id, planned[seq_id].next_work, rng.randrange(3_000, 9_000), True, planned[seq_id].steps_left == 1
            )
            for seq_id in taken
        ]
        overheads = [Overhead(planned[taken[0]].team_id, rng.randrange(8_000))] if taken and rng.random() < 0.2 else []
        self.now_us += sum(row.cost_us for row in served) + sum(one.cost_us for one in overheads) or 50_000
        policy.settle(served, self.now_us, overheads)
        self.note(planned, served, overheads)
        for row in served:
            live = planned[row.seq_id]
            live.next_work = row.work_us if live.has_generated else CONFIG.decode_work_us
            live.has_generated = True
            live.steps_left -= 1
            if live.steps_left == 0:
                policy.leave(row.seq_id, self.now_us)
                del self.live[row.seq_id]

    def note(self, planned: dict[int, Live], served: list[Served], overheads: list[Overhead]) -> None:
        if not served:
            return
        second = self.second
        second.num_steps += 1
        largest = max(row.cost_us for row in served)
        active = sorted({live.team_id for live in planned.values()})
        cost, work, demand = dict.fromkeys(active, 0), dict.fromkeys(active, 0), dict.fromkeys(active, 0)
        for row in served:
            cost[planned[row.seq_id].team_id] += row.cost_us
            work[planned[row.seq_id].team_id] += row.work_us
        for one in overheads:
            cost[one.team_id] += one.cost_us
        self.account.learn(sum(row.cost_us for row in served), sum(work.values()))
        for team_id in active:
            left_out = [
                live
                for seq_id, live in planned.items()
                if live.team_id == team_id and all(row.seq_id != seq_id for row in served)
            ]
            if left_out:
                second.backlogged.add(team_id)
            expected = self.account.expected
            demand[team_id] = cost[team_id] + sum(max(largest, expected(live.next_work)) for live in left_out)
            second.served[team_id] += cost[team_id]
        entitled = water_fill(sum(cost.values()), demand, {team_id: self.weights[team_id] for team_id in active})
        for team_id, part in entitled.items():
            second.entitled[team_id] += part
            self.num_satisfied += part == demand[team_id] > cost[team_id]


def test_the_water_level_of_known_cases() -> None:
    """Of this file's own oracle."""
    assert water_fill(12, {1: 9, 2: 9}, {1: 2, 2: 1}) == {1: 8, 2: 4}
    assert water_fill(12, {1: 3, 2: 99, 3: 99}, {1: 2, 2: 1, 3: 2}) == {1: 3, 2: 3, 3: 6}
    assert water_fill(4, {1: 1, 2: 8}, {1: 1, 2: 1}) == {1: 1, 2: 3}  # 1 of 4 slots is all it asks for


@pytest.mark.parametrize("seed", range(3))
async def test_samples_and_report_are_entitled_to_what_brute_force_finds(store: Store, seed: int) -> None:
    tiers = ("gold", "silver", "silver", "bronze")
    names = {await store.team(f"team-{i}", tier): f"team-{i}" for i, tier in enumerate(tiers)}
    run = Run(seed, {team_id: histories.WEIGHTS[tier] for team_id, tier in zip(names, tiers, strict=True)})
    run.play(seconds=12)
    samples: dict[int, dict[int, ServiceSampleRow]] = defaultdict(dict)
    for row in run.rows:
        if isinstance(row, ServiceSampleRow):
            samples[row.at_us][row.team_id] = row
    moments = sorted(samples)
    assert len(moments) == len(run.expected) == 12
    for at_us, second in zip(moments, run.expected, strict=True):
        found = samples[at_us]
        assert {team_id for team_id, row in found.items() if row.entitled_us} == {
            team_id for team_id, part in second.entitled.items() if part >= 1
        }
        for team_id, part in second.entitled.items():
            assert abs(found[team_id].entitled_us - part) <= second.num_steps  # whole microseconds in each step
            assert found[team_id].served_us == second.served[team_id]
        assert sum(row.entitled_us for row in found.values()) == sum(second.served.values())
        assert {team_id for team_id, row in found.items() if row.backlogged_ms} == second.backlogged
    assert run.num_satisfied > 0
    await histories.book_samples(store, run.rows)
    first, last = 2, 10
    async with store.database.session() as connection:
        report = await reports.fairness_report(connection, Period(moments[first], moments[last]))
    for line in report["data"]:
        team_id = next(team_id for team_id, name in names.items() if name == line["team"])
        backlogged = [second for second in run.expected[first:last] if team_id in second.backlogged]
        if not backlogged:
            assert line["entitled"] is line["satisfaction"] is None
            continue
        own = sum(second.entitled[team_id] for second in backlogged)
        everybody = sum(sum(second.entitled.values()) for second in backlogged)
        served = sum(second.served[team_id] for second in backlogged)
        rounded = sum(second.num_steps for second in backlogged)
        assert line["entitled"] == pytest.approx(float(own / everybody), abs=float(rounded / everybody))
        assert line["share"] == pytest.approx(served / sum(sum(second.served.values()) for second in backlogged))
        assert line["satisfaction"] == pytest.approx(float(served / own), rel=float(rounded / own))
    assert sum(line["entitled"] is not None for line in report["data"]) >= 2
