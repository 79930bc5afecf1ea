"""Widths are computed in one place, from the configured teams: what is enforced is what is printed."""

import ast
import random
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from policies.bounds import Widths, exact_widths, lag_bound, make_widths, pause_bound_us, pause_terms
from policies.config import PolicyConfig
from policies.lag import LagMeter
from policies.sequences import TeamTerms
from tests.support.policies.driver import UNIT, Driver, config

ROOT = Path(__file__).parents[2]
BOUNDS = ROOT / "policies" / "bounds.py"
A, B, GONE = 0, 1, 2


def test_when_widths_are_scaled_only_theta_is_rounded_down() -> None:
    rng = random.Random(5)
    for _ in range(200):
        weights = [rng.randint(1, 9) for _ in range(rng.randint(1, 5))]
        settings = PolicyConfig(
            fairness_window_us=rng.randrange(10**6),
            base_quantum_us=rng.randint(1, 10**5),
            step_cost_max_us=rng.randrange(10**5),
        )
        meter = LagMeter(settings)
        meter.configure([TeamTerms(team_id, weight) for team_id, weight in enumerate(weights)])
        exact, kept = exact_widths(settings, weights), meter.widths
        assert exact is not None and kept is not None
        theta = max(Fraction(settings.fairness_window_us, sum(weights)), Fraction(settings.quanta()[0], min(weights)))
        u = Fraction(settings.step_cost_max_us, min(weights))
        assert Fraction(exact.theta, exact.scale) == theta and Fraction(kept.step, kept.scale) == u
        assert kept.theta == theta * kept.scale // 1
        assert lag_bound(settings, weights) == theta + 2 * u
        assert lag_bound(settings, weights, is_short=True) == 2 * theta + 4 * u


def test_when_there_is_no_gate_nothing_is_bounded() -> None:
    settings = PolicyConfig(is_gated=False)
    assert make_widths(settings, [1], 1) is None and lag_bound(settings, [1]) is None
    assert make_widths(PolicyConfig(theta_us=3, step_cost_max_us=4), [], 2) == Widths(2, 6, 8), "an empty table"


def with_a_gone_team(theta: int, weights: tuple[int, int], slots: int) -> Driver:
    """Two configured teams, and one of weight 1 that is gone from the table with sequences of its own."""
    table = {A: weights[0], B: weights[1]}
    driver = Driver(config((4, 8, 16), theta=theta), {**table, GONE: 1}, slots)
    for team in (A, B, GONE, GONE):
        driver.add(team, 0, 10**6)
    driver.policy.configure([TeamTerms(team, weight) for team, weight in table.items()], 0)
    return driver


def add_shorts(driver: Driver, source: random.Random) -> None:
    """Now and then a short job of a configured team."""
    for time in range(0, 120, 7):
        driver.at(time, lambda: driver.add(source.choice([A, B]), 0, 2))


def test_when_a_team_is_gone_its_weight_widens_nothing() -> None:
    meter = with_a_gone_team(3, (4, 6), 1).policy._meter
    bound = lag_bound(meter._config, [4, 6])
    assert meter.widths is not None and Fraction(meter.widths.narrow, meter.scale) == bound
    assert meter.widths == make_widths(meter._config, [4, 6], meter.scale)


def test_when_a_gone_team_weighs_less_its_own_step_bounds_it() -> None:
    """Its step over its weight takes the place of u in pairs with it; the configured teams keep theirs."""
    beyond = 0
    for seed in range(24):
        source = random.Random(seed)
        theta, slots = source.choice([0, 1, 4]), source.choice([1, 1, 2, 4])
        weights = source.choice([4, 6, 8]), source.choice([4, 8])
        driver = with_a_gone_team(theta, weights, slots)
        add_shorts(driver, source)
        narrow = Fraction(theta) + Fraction(2, min(weights))
        for _ in range(120):
            driver.step()
            lags = {team: lag / UNIT for team, lag in driver.policy.lags().items()}
            assert abs(lags[A] - lags[B]) <= narrow
            gap = max(lags.values()) - min(lags.values())
            assert gap <= theta + 2 * Fraction(1, 1)
            beyond += gap > narrow
    assert beyond > 0, "the configured teams' bound does not hold for it"


# -- one place --------------------------------------------------------------------------------------------------------

WORDS = {"theta", "theta_us", "widths", "lag_bound", "step_max", "step_width", "step_cost_max_us"}
ATTRIBUTES = WORDS | {"narrow", "wide"}


def is_width(node: ast.expr) -> bool:
    """A width is in this expression."""
    for one in ast.walk(node):
        if (isinstance(one, ast.Name) and one.id in WORDS) or (
            isinstance(one, ast.Attribute) and one.attr in ATTRIBUTES
        ):
            return True
    return False


def computed_widths(source: str) -> Iterator[str]:
    """Where widths are multiplied or divided by something, or added to each other."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.BinOp):
            sides = [is_width(node.left), is_width(node.right)]
            is_scaled = isinstance(node.op, ast.Mult | ast.Div | ast.FloorDiv | ast.LShift) and any(sides)
            if is_scaled or all(sides):
                yield f"{node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("package", ["policies", "engine", "gateway", "tenants"])
def test_no_other_module_computes_widths(package: str) -> None:
    paths = [path for path in sorted((ROOT / package).rglob("*.py")) if path != BOUNDS]
    found = {str(path.relative_to(ROOT)): list(computed_widths(path.read_text("utf-8"))) for path in paths}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        "2 * (theta + 2 * step_max)",
        "least + self.widths.theta + self.widths.step",
        "lag_bound(a, b) * 2",
        "widths.step / 2",
    ],
)
def test_when_a_width_is_computed_elsewhere_it_is_seen(source: str) -> None:
    assert list(computed_widths(source))
    assert list(computed_widths(BOUNDS.read_text("utf-8")))


# -- by hand: three teams of weights 4, 2 and 1, times in microseconds

WEIGHTS = (4, 2, 1)
CONFIG = PolicyConfig(fairness_window_us=700_000, base_quantum_us=50_000, step_cost_max_us=70_000, grant_us=100_000)
TABLE = (
    TeamTerms(1, 4, starving_after_us=300_000, promotion_burst_grants=4),
    TeamTerms(2, 2, starving_after_us=1_000_000, promotion_burst_grants=4),
    TeamTerms(3, 1, starving_after_us=3_000_000, promotion_burst_grants=2),
)


def widths(**changes: Any) -> Widths:
    found = exact_widths(replace(CONFIG, **changes), WEIGHTS)
    assert found is not None
    return found


def test_the_step_width_is_the_largest_step_over_the_least_weight() -> None:
    found = widths()
    assert Fraction(found.step, found.scale) == 70_000
    other = exact_widths(CONFIG, (4, 3))
    assert other is not None and Fraction(other.step, other.scale) == Fraction(70_000, 3)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 100_000),  # 700,000 / 7
        ({"fairness_window_us": 70_000}, 50_000),  # the first quantum over the least weight is more than 10,000
        ({"theta_us": 7}, 7),
        ({"theta_us": 0}, 0),
    ],
)
def test_the_gate_is_the_window_or_the_first_quantum(changes: dict[str, Any], expected: int) -> None:
    found = widths(**changes)
    assert Fraction(found.theta, found.scale) == expected
    assert exact_widths(replace(CONFIG, is_gated=False, **changes), WEIGHTS) is None


def test_when_blocks_are_short_the_lag_bound_is_twice_as_wide() -> None:
    assert lag_bound(CONFIG, WEIGHTS) == 100_000 + 2 * 70_000
    assert lag_bound(CONFIG, WEIGHTS, is_short=True) == 480_000
    assert lag_bound(replace(CONFIG, is_gated=False), WEIGHTS, is_short=True) is None


def test_the_pause_bound_is_the_sum_of_its_six_terms() -> None:
    """alpha + 240,000 * 6 / 1 + 2 * 170,000 * 7 / 0.2 + (10 grants + a step) / 0.8 + the upload + two longest steps."""
    assert pause_bound_us(CONFIG, TABLE, 3, 1, 5) == 3_000_000 + 1_440_000 + 11_900_000 + 1_337_500 + 5 + 140_000
    longer = replace(CONFIG, step_us_max=400_000)
    assert pause_bound_us(longer, TABLE, 3, 1, 5) == 3_000_000 + 1_440_000 + 11_900_000 + 1_337_500 + 5 + 800_000


def test_when_the_budget_holds_more_the_pause_bound_is_less() -> None:
    """Two grants go before and one is not used up: 2 * 170,000 - 40,000 of work, and a grant; the budget has 150,000.
    With a full budget the team's share serves what goes before, 300,000 * 7.
    """
    terms = pause_terms(CONFIG, TABLE, 3, 5)
    assert terms is not None
    base_us = 3_000_000 + 1_440_000 + 1_337_500 + 5 + 140_000
    assert terms.bound_us(2, 160_000, 150_000) == base_us + (300_000 + 100_000 - 150_000) * 35
    assert terms.bound_us(2, 160_000, 400_000) == base_us + 300_000 * 7


def test_when_grants_run_beside_long_prompts_each_takes_its_time() -> None:
    """Of the fastest team: ten grants before, all paid. Each ends after 4 G and a step."""
    terms = pause_terms(CONFIG, TABLE, 1, 0)
    assert terms is not None
    served_us = -(-10 * 170_000 * 7 // 4)
    assert terms.bound_us(10, None, 10**9) - terms.bound_us(0, None, 10**9) == max(served_us, 10 * 470_000)


def test_when_swapping_takes_half_the_device_two_terms_double() -> None:
    """The lag bound is twice as wide beside, for blocks are short."""
    found = pause_bound_us(CONFIG, TABLE, 3, 1, 5, is_short=True, rate_percent=50)
    assert found == 3_000_000 + 4 * 1_440_000 + 11_900_000 + 2 * 1_337_500 + 5 + 140_000


def test_when_a_term_is_no_whole_number_it_is_rounded_up() -> None:
    """170,000 * 7 / 0.3 is 3,966,666.7 and 1,070,000 / 0.7 is 1,528,571.4."""
    found = pause_bound_us(replace(CONFIG, promotion_percent=30), TABLE, 3, 0, 0)
    assert found == 3_000_000 + 1_440_000 + 3_966_667 + 1_528_572 + 140_000


def test_when_nothing_is_promised_the_pause_bound_is_zero() -> None:
    assert pause_bound_us(replace(CONFIG, promotion_percent=0), TABLE, 3, 1, 5) == 0
    assert pause_bound_us(replace(CONFIG, is_gated=False), TABLE, 3, 1, 5) == 0
    assert pause_bound_us(CONFIG, [TeamTerms(3, promotion_burst_grants=0)], 3, 1, 5) == 0
    with pytest.raises(KeyError):
        pause_bound_us(CONFIG, TABLE, 4, 1, 5)
