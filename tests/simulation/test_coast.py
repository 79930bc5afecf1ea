"""Coast mode on loads that take thousands of steps: homogeneous long work, a flood, and the production scheduler.

Decode-only loads with 16 slots, a token a slot and a step; lengths and demand are those of the scheduling page's
figures. Unit of fairness: a team's lag D, in tokens per unit of weight.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings

from engine.config import EngineConfig
from engine.sim.simulate import simulate
from engine.sim.workload import TraceRequest
from engine.step.core import EngineCore
from policies.catalog import make_policy
from policies.config import PolicyConfig
from policies.cost import StepProfile
from policies.sequences import SequenceTerms, Served, TeamTerms
from tests.simulation.test_refuse_new import CONFIG, Pair, newcomers
from tests.support.engine.simple_engine import Engine, submit
from tests.support.policies.driver import Driver, config

SLOTS = 16
# A step lasts the same whatever is in it.
FLAT = StepProfile(
    fixed_us=1000.0, prefill_token_us=0.0, prefill_attention_us=0.0, decode_row_us=0.0, decode_context_us=0.0
)


@dataclass(frozen=True)
class Demand:
    team: int
    load: float  # of the slots
    draw: Callable[[random.Random], int]


@dataclass(frozen=True)
class Outcome:
    mean_jct: dict[int, float]
    mean_slowdown: dict[int, float]
    p99_slowdown: dict[int, float]
    max_gap: float
    coasting: dict[int, bool]


def play(driver: Driver, demands: list[Demand], steps: int, seed: int, num_jobs: int | None = None) -> Outcome:
    """Poisson arrivals for `steps` steps, or of so many jobs and then until all are done."""
    source = random.Random(seed)
    due: list[tuple[int, int, int]] = []
    for demand in demands:
        mean = sum(demand.draw(source) for _ in range(2000)) / 2000
        now = 0.0
        while now < steps:
            now += source.expovariate(demand.load * SLOTS / mean)
            due.append((int(now), demand.team, demand.draw(source)))
    due.sort()
    waiting = due[:num_jobs]
    lengths: list[int] = []
    while driver.now < steps or (num_jobs is not None and driver.live):
        while waiting and waiting[0][0] <= driver.now:
            _, team, length = waiting.pop(0)
            driver.add(team, 0, length)
            lengths.append(length)
        driver.step()
    jct: dict[int, list[int]] = {demand.team: [] for demand in demands}
    slowdown: dict[int, list[float]] = {demand.team: [] for demand in demands}
    for job, length in zip(driver.jobs.values(), lengths, strict=True):
        if job.done is not None:
            jct[job.team].append(job.done - job.arrived)
            slowdown[job.team].append((job.done - job.arrived) / length)
    return Outcome(
        {team: sum(times) / len(times) for team, times in jct.items()},
        {team: sum(ratios) / len(ratios) for team, ratios in slowdown.items()},
        {team: sorted(ratios)[len(ratios) * 99 // 100] for team, ratios in slowdown.items()},
        float(driver.max_gap),
        {service.team_id: service.is_coasting for service in driver.policy.team_service()},
    )


# -- homogeneous long work --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def overload() -> dict[str, Outcome]:
    """One team, answers of 600 to 1200 tokens, 15 % more than the slots can do: until all have ended."""
    demands = [Demand(0, 1.15, lambda source: source.randint(600, 1200))]
    quanta = (16, 32, 64, 128, 256, 512, 1024, 2048)
    return {
        name: play(
            Driver(config(quanta, coast=coast), {0: 1}, slots=SLOTS, policy=policy), demands, 10_000, 1, num_jobs=190
        )
        for name, policy, coast in (
            ("fcfs", "fcfs", False),
            ("levels", "eg-mlfq", False),
            ("coast", "eg-mlfq", True),
        )
    }


@pytest.mark.case("O3")
def test_homogeneous_long_work_ends_as_early_as_under_fcfs(overload: dict[str, Outcome]) -> None:
    fcfs, levels, coast = (overload[name].mean_jct[0] for name in ("fcfs", "levels", "coast"))
    assert overload["coast"].coasting[0] and not overload["levels"].coasting[0]
    assert levels > 1.3 * fcfs, "what levels do to equal long requests"
    assert coast == pytest.approx(fcfs, rel=0.05)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_same_through_the_production_scheduler(seed: int) -> None:
    """Prefill, block tables and the profile's quanta included, on the virtual clock."""
    source = random.Random(seed)
    now = 0.0
    trace = []
    for _ in range(250):
        now += source.expovariate(1.15 * SLOTS / 225) * FLAT.fixed_us
        trace.append(TraceRequest(int(now), "batch", 1, source.randint(150, 300)))
    means = {}
    for name, policy, coast in (("fcfs", "fcfs", True), ("levels", "eg-mlfq", False), ("coast", "eg-mlfq", True)):
        settings = EngineConfig(kind="sim", max_batch_size=SLOTS, coast=coast)
        report = simulate(trace, [policy], profile=FLAT, config=settings, num_device_blocks=100_000)
        means[name] = report["policies"][0]["total"]["jct_seconds"]["mean"]
    assert means["levels"] > 1.5 * means["fcfs"]
    assert means["coast"] == pytest.approx(means["fcfs"], rel=0.05)


# -- the flood --------------------------------------------------------------------------------------------------------

CHAT, CODE, BATCH, SPLITTER = range(4)
# All lengths, quanta and Theta are a quarter of the page's, so that a short run holds as many requests.
FLOOD = [
    Demand(CHAT, 0.25, lambda source: max(1, min(250, round(source.lognormvariate(5.0, 0.8) / 4)))),
    Demand(CODE, 0.10, lambda source: max(1, round(source.expovariate(1 / 7)))),
    Demand(BATCH, 0.25, lambda source: source.randint(150, 300)),
    Demand(SPLITTER, 1.0, lambda source: source.randint(1, 3)),
]
THETA = 32
# D of a team that is served late falls by up to its part of a step, half of it or less where another wants more too.
GAP_MAX = THETA + 1 + SLOTS / 2


def flood(seed: int, policy: str = "eg-mlfq", **settings: int) -> Outcome:
    constants = config((4, 8, 16, 32, 64, 128, 256, 512), theta=THETA, **settings)
    return play(Driver(constants, dict.fromkeys(range(4), 1), slots=SLOTS, policy=policy), FLOOD, 5000, seed)


@pytest.fixture(scope="module")
def levels_only() -> dict[int, Outcome]:
    return {seed: flood(seed) for seed in (1, 2, 3)}


@pytest.mark.case("I5")
def test_a_coasting_batch_team_gains_and_nobody_pays(levels_only: dict[int, Outcome]) -> None:
    """As in the page's table: batch (and the splitter) coast, chat and code are too mixed for these thresholds."""
    batch = []
    for seed, levels in levels_only.items():
        coast = flood(seed, coast=True, coast_below_percent=20, coast_above_percent=40)
        assert coast.coasting == {CHAT: False, CODE: False, BATCH: True, SPLITTER: True}
        for team in (CHAT, CODE):
            assert coast.p99_slowdown[team] <= 1.15 * levels.p99_slowdown[team]
            assert coast.mean_jct[team] <= 1.05 * levels.mean_jct[team]
        assert max(levels.max_gap, coast.max_gap) <= GAP_MAX
        assert coast.mean_jct[BATCH] <= 1.03 * levels.mean_jct[BATCH]
        batch.append((coast.mean_jct[BATCH], levels.mean_jct[BATCH]))
    assert sum(coast for coast, _ in batch) < 0.9 * sum(levels for _, levels in batch)


@pytest.mark.case("I5")
def test_with_the_default_thresholds_a_flood_still_hurts_nobody(levels_only: dict[int, Outcome]) -> None:
    """Chat may coast too, by its own requests: its worst slowdown grows, its mean does not, and both are far from
    FCFS's.
    """
    levels, coast, fcfs = levels_only[1], flood(1, coast=True), flood(1, policy="fcfs")
    assert coast.coasting[BATCH] and coast.coasting[SPLITTER]
    assert coast.mean_jct[BATCH] < levels.mean_jct[BATCH]
    for team in (CHAT, CODE):
        assert coast.mean_jct[team] <= 1.05 * levels.mean_jct[team]
        assert coast.p99_slowdown[team] < 0.1 * fcfs.p99_slowdown[team]
    assert coast.max_gap <= GAP_MAX


# -- through the engine -----------------------------------------------------------------------------------------------


def engine_with(constants: PolicyConfig) -> Engine:
    return Engine(policy=make_policy("eg-mlfq", constants), blocks=1000, max_batch_size=2)


def is_coasting(core: EngineCore) -> bool:
    return core.scheduler.policy.team_service()[0].is_coasting


def test_the_scheduler_counts_what_finished_and_not_what_was_aborted() -> None:
    constants = PolicyConfig(coast_completions_min=4)
    engine = engine_with(constants)
    for i in range(40):
        assert engine.core.add(submit(f"aborted{i}", prompt=4, output=8)) is None
        engine.core.step()
        engine.core.abort(f"aborted{i}")
        engine.core.step()
    assert not is_coasting(engine.core)
    for i in range(4):
        assert not is_coasting(engine.core)
        assert engine.core.add(submit(f"finished{i}", prompt=4, output=8)) is None
        engine.run()
    assert is_coasting(engine.core)
    for i in range(40):
        assert engine.core.add(submit(f"late{i}", prompt=4, output=1 + 7 * i % 60)) is None
        engine.core.step()
        engine.core.abort(f"late{i}")
        engine.core.step()
        assert is_coasting(engine.core)


def test_the_setting_switches_it_off() -> None:
    trace = [TraceRequest(20_500 * i, "only", 8, 40) for i in range(60)]
    hashes = {}
    for name, policy, coast in (("on", "eg-mlfq", True), ("off", "eg-mlfq", False)):
        settings = EngineConfig(kind="sim", max_batch_size=2, coast=coast)
        report = simulate(trace, [policy], profile=FLAT, config=settings)
        hashes[name] = report["policies"][0]["schedule_hash"]
    assert hashes["on"] != hashes["off"]
    few = trace[:8]
    short = [
        simulate(few, ["eg-mlfq"], profile=FLAT, config=EngineConfig(kind="sim", max_batch_size=2, coast=coast))
        for coast in (True, False)
    ]
    assert short[0]["policies"] == short[1]["policies"], "eight requests are too few to know"


# -- refusals ---------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, derandomize=True)
@given(before=newcomers, after=newcomers)
def test_both_ways_of_refusing_pick_the_same_while_teams_coast(
    before: list[tuple[int, int]], after: list[tuple[int, int]]
) -> None:
    pair = Pair("eg-mlfq", slots=100, constants=replace(CONFIG, coast_completions_min=1))
    pair.let_coast(range(3))  # team 3 does not
    pair.arrive(before)
    assert len(pair.both(is_closed=False)[0]) == len(before)
    pair.arrive(after)
    pair.both(is_closed=True)
    for is_closed in (True, True, False):
        first, second = pair.both(is_closed=is_closed)
        assert first == second and len(first) == len(before) + (0 if is_closed else len(after))
    assert pair.one_by_one.team_service() == pair.at_once.team_service()
    assert [team.is_coasting for team in pair.at_once.team_service()][:3] == [True] * 3


def test_a_coasting_teams_refused_head_is_passed_over_once() -> None:
    policy = make_policy("eg-mlfq", PolicyConfig(coast_completions_min=1))
    policy.configure([TeamTerms(0)], 0)
    policy.arrive(SequenceTerms(0, 0, 8, 0, 0, 0, 0), 0)
    policy.begin(0)
    policy.take(0, 1000)
    policy.settle([Served(0, 1000, 1000, True, True)], 0)
    policy.leave(0, 0)
    for seq_id, level in ((1, 5), (2, 0), (3, 3)):
        policy.arrive(SequenceTerms(seq_id, 0, 8, 0, 0, level, 0), 0)
    orders = []
    for _ in range(2):
        policy.begin(0)
        assert policy.best() == 1
        policy.refuse(1)
        taken = []
        while (best := policy.best()) is not None:
            policy.take(best, 1000)
            taken.append(best)
        policy.settle([Served(seq_id, 1000, 1000, True) for seq_id in taken], 0)
        orders.append(taken)
    assert orders == [[2, 3], [2, 3]]
