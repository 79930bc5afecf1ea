"""The numbers of docs/scheduling.md, computed by the policy: the worked step, its ENSTs, and the example beside each
formula. The page is read here and compared, so neither it nor the rules can change alone.
"""

import re
from fractions import Fraction
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.memory.planner import SwapPlanner
from engine.memory.pools import BURST_US, LinkBudget
from engine.sim.parts import fixed_profile
from engine.step.step_time import step_us_max
from policies.bounds import exact_widths, lag_bound, pause_bound_us
from policies.coast import CoastMode
from policies.config import PolicyConfig
from policies.cost import split_step
from policies.eg_mlfq import EgMlfq
from policies.lag import LagMeter
from policies.levels import Levels
from policies.promotion import Promotions
from policies.prompt_time import even_prompt_us
from policies.sequences import SequenceTerms, Served, TeamTerms
from policies.tiers import DEFAULT_TIERS
from tests.support.policies.reference import water_fill

PAGE = (Path(__file__).parents[2] / "docs" / "scheduling.md").read_text("utf-8")
TEXT = " ".join(PAGE.split())
MS = 1000

TEAMS = ("search", "dev", "reports")
WEIGHTS = (4, 2, 1)
SEQUENCES = {"s1": 0, "d1": 1, "d2": 1, "d3": 1, "r1": 2, "r2": 2, "r3": 2}  # and their teams
PREFILLS = {"s1": 9, "d1": 6, "d2": 9, "d3": 9, "r1": 8, "r2": 8, "r3": 8}  # ms
NAMES = list(SEQUENCES)


def shown(value: Fraction | float) -> str:
    """A number as the page writes it."""
    return f"{float(value):g}".replace("-", "−")


def table(name: str) -> list[list[str]]:
    """The cells of the page's table between these markers, without its head."""
    found = re.search(rf"<!-- {name}:begin -->\n(.*?)\n<!-- {name}:end -->", PAGE, re.DOTALL)
    assert found is not None
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found[1].splitlines()[2:]]


def lags_now(policy: EgMlfq) -> list[Fraction]:
    """D of the three teams in ms, what is picked so far included."""
    meter = policy._meter
    return [Fraction(meter.teams[team].lag, meter.scale) / MS for team in range(3)]


class Example:
    """The three teams of the page, after the earlier step that left their D as it stands there."""

    def __init__(self) -> None:
        self.policy = EgMlfq(
            PolicyConfig(
                levels=3,
                quanta_us=(8 * MS, 16 * MS),
                theta_us=5 * MS,
                step_cost_max_us=9 * MS,
                decode_work_us=9 * MS,
                chunk_work_us=9 * MS,
                coast=False,
                promotion_percent=0,
            )
        )
        self.policy.configure([TeamTerms(team, weight) for team, weight in enumerate(WEIGHTS)], 0)
        for seq_id, (name, team) in enumerate(SEQUENCES.items()):
            self.policy.arrive(SequenceTerms(seq_id, team, 1, 0, PREFILLS[name] * MS, 0, 0), 0)
        self.picks: list[list[str]] = []
        self.run([6, 8])  # the prompts of d1 and r1 use up the step's tokens

    def run(self, costs_ms: list[int]) -> list[str]:
        """A step of as many rows, each costing its estimate. Notes slot, eligible teams, D and pick; says who ran."""
        policy = self.policy
        policy.begin(0)
        self.picks, served = [], []
        for slot, cost in enumerate(costs_ms, start=1):
            seq_id = policy.best()
            assert seq_id is not None
            eligible = sorted({entry[3].team.team_id for entry in policy._eligible})
            lags = ", ".join(map(shown, lags_now(policy)))
            self.picks.append([str(slot), ", ".join(TEAMS[team] for team in eligible), lags, NAMES[seq_id]])
            policy.take(seq_id, cost * MS)
            served.append(Served(seq_id, cost * MS, cost * MS, True))
        ran = [NAMES[row.seq_id] for row in served]
        self.left_out = [name for name in NAMES if name not in ran]
        policy.settle(served, 0)
        return ran

    def totals(self) -> list[tuple[int, int]]:
        """Served and entitled so far, by team."""
        return [(team.served_us, team.entitled_us) for team in self.policy.team_service()]


def test_the_step_starts_at_the_gate_the_page_draws() -> None:
    example = Example()
    lags = lags_now(example.policy)
    assert lags == [-2, 1, 6]
    assert [shown(lag) for lag in lags] == [row[2] for row in table("worked-bill")]
    example.policy.begin(0)
    limit = Fraction(example.policy._limit, example.policy._meter.scale) / MS
    assert f"−2 + 5 = {shown(limit)} ms" in TEXT
    levels = {name: example.policy.level(seq_id) for seq_id, name in enumerate(NAMES)}
    assert levels == {"s1": 1, "d1": 0, "d2": 1, "d3": 1, "r1": 1, "r2": 0, "r3": 0}


def test_the_picks_are_those_of_the_page() -> None:
    example = Example()
    example.run([9, 9, 9])
    assert [row[:4] for row in table("worked-picks")] == example.picks


def test_the_bill_is_that_of_the_page() -> None:
    example = Example()
    before, lags_before = example.totals(), lags_now(example.policy)
    ran = example.run([9, 9, 9])
    after, lags_after = example.totals(), lags_now(example.policy)
    rows = []
    demands = {}
    for team, (name, weight) in enumerate(zip(TEAMS, WEIGHTS, strict=True)):
        served, entitled = (new - old for new, old in zip(after[team], before[team], strict=True))
        assert served == 9 * MS * sum(SEQUENCES[one] == team for one in ran)
        demands[team] = served + 9 * MS * sum(SEQUENCES[one] == team for one in example.left_out)
        values = (weight, lags_before[team], served / MS, demands[team] / MS, entitled / MS, lags_after[team])
        rows.append([name, *(shown(value) for value in values)])
    assert rows == table("worked-bill")
    by_the_book, satisfied = water_fill(27 * MS, demands, dict(enumerate(WEIGHTS)))
    assert [by_the_book[team] for team in range(3)] == [after[team][1] - before[team][1] for team in range(3)]
    assert satisfied == {0}, "search"
    for lags in (lags_before, lags_after):
        assert sum(weight * lag for weight, lag in zip(WEIGHTS, lags, strict=True)) == 0
    example.policy.begin(0)
    assert {entry[3].team.team_id for entry in example.policy._eligible} == {0, 2}, "reports is let in, dev waits"


def test_the_next_turns_are_those_of_the_page() -> None:
    example = Example()
    example.run([9, 9, 9])
    turns = example.policy.turns([seq_id for seq_id, name in enumerate(NAMES) if name[0] == "d"], 3, 0)
    assert [(NAMES[turn.seq_id], turn.enst_us / MS) for turn in turns] == [("d2", 5), ("d3", 7), ("d1", 23)]
    assert "stand as d2, d3, d1" in TEXT and "their ENSTs are 5, 7 and 23 ms" in TEXT


CONFIG = PolicyConfig()  # a decode step of 25 ms and a largest step of 250 ms
TIERS = {tier.name: tier.terms(team_id) for team_id, tier in enumerate(DEFAULT_TIERS)}


def test_widths_of_the_page() -> None:
    assert [terms.weight for terms in TIERS.values()] == list(WEIGHTS)
    widths = exact_widths(CONFIG, WEIGHTS)
    assert widths is not None
    theta, u = Fraction(widths.theta, widths.scale), Fraction(widths.step, widths.scale)
    narrow, wide = lag_bound(CONFIG, WEIGHTS), lag_bound(CONFIG, WEIGHTS, is_short=True)
    assert narrow is not None and wide is not None
    assert f"Θ = 1,000 / 7 = {float(theta / MS):.1f} ms" in TEXT
    assert f"u = 250 / 1 = {shown(u / MS)} ms" in TEXT
    assert f"Θ + 2u = {float(narrow / MS):,.1f} ms, and 2Θ + 4u = {float(wide / MS):,.1f} ms" in TEXT
    assert f"4 × 642.9 ms = {float(4 * narrow / MS / 1000):.2f} s" in TEXT


def test_costs_and_levels_of_the_page() -> None:
    assert split_step(90 * MS, [5 * MS] * 3 + [55 * MS], 20 * MS) == [10 * MS] * 3 + [60 * MS]
    assert split_step(90 * MS, [25 * MS] * 3 + [75 * MS], 0) == [15 * MS] * 3 + [45 * MS], "by stand-alone work"
    assert "5 + 20/4 = 10 ms" in TEXT and "55 + 20/4 = 60 ms" in TEXT and "would pay 15 ms each" in TEXT
    quanta = CONFIG.quanta()
    assert CONFIG.levels == 8 and quanta[0] == 2 * CONFIG.decode_work_us
    assert [quantum // MS for quantum in (*quanta[:3], quanta[-1])] == [50, 100, 200, 3200]
    assert "50, 100, 200, … 3,200 ms" in TEXT
    assert f"120 ms joins level {Levels(CONFIG).join_level(120 * MS, 0)}" in TEXT
    starts = {name: Levels(CONFIG).join_level(30 * MS, terms.start_level) for name, terms in TIERS.items()}
    assert f"30 ms joins level {starts['gold']} for gold (start level {TIERS['gold'].start_level})" in TEXT
    assert f"and level {starts['bronze']} for bronze (start level {TIERS['bronze'].start_level})" in TEXT
    coast = CoastMode(CONFIG)
    for work in [300 * MS, 500 * MS] * 4:
        coast.complete(work)
    assert coast.is_coasting and "CV² = 0.0625" in TEXT
    assert Fraction(10_000, 400**2) == Fraction(625, 10_000)


def test_promotion_figures_of_the_page() -> None:
    meter, promotions = LagMeter(CONFIG), Promotions(CONFIG)
    meter.configure(TIERS.values())
    promotions.configure(meter.teams.values(), 0)
    rates, bursts = {}, {}
    for name, terms in TIERS.items():
        budget = promotions.budget(meter.teams[terms.team_id])
        assert budget is not None
        rates[name], bursts[name] = Fraction(budget.rate, budget.unit), budget.held_us(0) // MS
    grant = promotions.grant_us
    assert sum(rates.values()) == Fraction(CONFIG.promotion_percent, 100)
    assert f"| {grant // MS} ms |" in TEXT
    for name in ("gold", "bronze"):
        assert f"{name} {float(rates[name] * 100):.1f} %: a grant in {shown(grant / rates[name] / 10**6)} s" in TEXT
    assert f"gold {bursts['gold']} ms, bronze {bursts['bronze']} ms" in TEXT
    flowed, step = round(rates["gold"] * 10_000), CONFIG.step_cost_max_us // MS
    total = bursts["gold"] + flowed + step
    assert f"{bursts['gold']} + {flowed:,} + {step} = {total:,} ms" in TEXT


def test_the_pause_bound_of_the_page() -> None:
    def bound(**more: object) -> float:
        return pause_bound_us(CONFIG, TIERS.values(), TIERS["gold"].team_id, 0, 0, **more) / 10**6  # type: ignore[arg-type]

    assert f"= {bound(is_short=True, rate_percent=40):.1f} s. With R = 1 and B = Θ + 2u it is {bound():.1f} s" in TEXT
    band = lag_bound(CONFIG, WEIGHTS, is_short=True)
    assert band is not None
    terms = [0.3, float(band) / 10**6 * 3 / 0.4, 0.45 / (0.2 * 4 / 7), 2.25 / (0.8 * 0.4), 2 * 0.25]
    assert sum(terms) == pytest.approx(bound(is_short=True, rate_percent=40), abs=1e-5)
    assert " + ".join(f"{term:.2f}" for term in terms) in TEXT
    assert f"| {float(band) / 10**6:.3f} s |" in TEXT


def test_guard_figures_of_the_page() -> None:
    planner = SwapPlanner("proactive", gamma=2, min_run_steps=8, copy_us=lambda num_blocks: 300 * num_blocks)
    assert planner.pays(12 * MS, 10, 10) and not planner.pays(12 * MS - 1, 10, 10)
    assert "copies of 3 ms each way its turn must be 12 ms away" in TEXT
    link = LinkBudget(1000.0, 60)
    used = 0
    for now_us in range(0, 1_000_001, 1000):
        while link.left_us(now_us) > 0:
            link.use(1)
            used += link.copy_us(1)
    assert BURST_US == 100 * MS and 700 * MS <= used <= 700 * MS + 1000
    assert "at most 100 + 600 ms and one copy" in TEXT


def test_the_example_in_seconds_of_the_page() -> None:
    profile = fixed_profile()
    step_us = profile.fixed_us + 8 * profile.decode_marginal_us(512)
    config, step = EngineConfig(), round(step_us)
    assert f"D = {step_us / 1e6:.4f} s a step: {1e6 / step_us:.0f} tokens a second" in TEXT
    even_us = even_prompt_us(step, 1, [(1, step)])
    one, two = (profile.prefill_marginal_us(0, tokens) / 1e6 for tokens in (16, 32))
    assert f"{even_us / 1e6:.4f} s: two blocks would take {two:.4f} s" in TEXT and one < even_us / 1e6 < two
    assert f"16 tokens, which takes {one:.4f} s" in TEXT
    assert f"each chat keeps {1e6 / (step_us + even_us):.1f} tokens a second" in TEXT
    gold, bronze = (even_prompt_us(step, weight, [(other, step)]) / 1e6 for weight, other in ((1, 4), (4, 1)))
    assert f"P is {gold:.4f} s, a quarter of D; with 1 : 4 it is {bronze:.4f} s" in TEXT
    assert f"{step_us_max(config, profile) / 1e6:.3f} s" in TEXT and "45 × its fixed time" in TEXT
    for tokens, said in ((16, "over by"), (48, "under by")):
        total = step_us + profile.prefill_marginal_us(0, tokens)
        assert f"T = {total / 1e6:.4f} s" in TEXT
        assert f"{said} {abs(step_us - total / 2) / 1e6:.4f} s" in TEXT
