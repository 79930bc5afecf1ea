"""Under memory pressure the promises hold: 300 seeds in every run of the tests, 5,000 more in `make test-slow`.

`tests.support.simulation.pressure` says what the load is, `tests.support.simulation.pressure_checks` what is checked.
The sweep runs once; each test reads from it what was violated. `python -m benchmarks.pressure` prints the figures.
"""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context

import pytest

from tests.support.simulation.pressure_checks import Outcome
from tests.support.simulation.pressure_run import run

FAST = range(300)
SLOW = range(300, 5300)
SWEEPS = [
    pytest.param(FAST, id="300"),
    pytest.param(SLOW, id="5000", marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
]


@cache
def sweep(seeds: range) -> list[Outcome]:
    """Each seed once; many seeds on two cores."""
    if len(seeds) <= len(FAST):
        return list(map(run, seeds))
    with ProcessPoolExecutor(2, get_context("spawn")) as executor:
        return list(executor.map(run, seeds, chunksize=25))


def violations(seeds: range, *names: str) -> Iterator[str]:
    """In words: for each seed that has any, the first of each name."""
    for outcome in sweep(seeds):
        for name in names:
            if name in outcome.violations:
                count, first = outcome.violations[name]
                yield f"seed {outcome.seed} ({outcome.mode}): {name} {count} times, first {first}"


def check(seeds: range, *names: str) -> None:
    """Zero violations."""
    found = list(violations(seeds, *names))
    assert not found, f"{len(found)} of {len(seeds)} seeds: " + "; ".join(found[:5])


@pytest.mark.parametrize("seeds", SWEEPS)
def test_the_load_presses(seeds: range) -> None:
    """Enough is moved, dropped, forced, promoted and cut off for the other tests to mean something."""
    outcomes = sweep(seeds)
    assert not any("crash" in outcome.violations for outcome in outcomes), list(violations(seeds, "crash"))
    assert sum(outcome.swaps for outcome in outcomes) > 3 * len(seeds)
    assert sum(outcome.recomputes for outcome in outcomes) > len(seeds)
    assert sum(outcome.forced > 0 for outcome in outcomes) > len(seeds) // 10
    assert sum(outcome.lost for outcome in outcomes) > len(seeds) // 50
    assert sum(outcome.promotions for outcome in outcomes) > len(seeds)
    assert sum(outcome.is_exact for outcome in outcomes) > len(seeds) // 3
    for reason in ("abort", "timeout"):
        assert sum(outcome.ends.get(reason, 0) for outcome in outcomes) > len(seeds)


@pytest.mark.case("I1")
@pytest.mark.parametrize("seeds", SWEEPS)
def test_every_block_has_one_owner_and_every_sequence_one_status(seeds: range) -> None:
    check(seeds, "I1")


@pytest.mark.case("I2", "I12")
@pytest.mark.parametrize("seeds", SWEEPS)
def test_when_memory_is_short_tokens_are_those_with_room(seeds: range) -> None:
    check(seeds, "I2", "I12")


@pytest.mark.case("I5")
@pytest.mark.parametrize("seeds", SWEEPS)
def test_able_teams_stay_within_two_theta_and_four_steps(seeds: range) -> None:
    check(seeds, "I5")


@pytest.mark.case("I6")
@pytest.mark.parametrize("seeds", SWEEPS)
def test_what_fits_is_not_left_out_while_there_is_a_slot(seeds: range) -> None:
    check(seeds, "I6")


@pytest.mark.case("I13")
@pytest.mark.parametrize("seeds", SWEEPS)
def test_the_link_stays_within_its_budget(seeds: range) -> None:
    check(seeds, "I13")


@pytest.mark.case("I15")
@pytest.mark.parametrize("seeds", SWEEPS)
def test_every_request_ends_once_and_leaves_nothing(seeds: range) -> None:
    check(seeds, "I15")


@pytest.mark.parametrize("seeds", SWEEPS)
def test_nothing_deadlocks_and_no_team_is_locked_out(seeds: range) -> None:
    check(seeds, "O17", "O17b")


@pytest.mark.parametrize("seeds", SWEEPS)
def test_charges_overheads_and_what_is_carried_sum_to_the_time(seeds: range) -> None:
    check(seeds, "charges")
