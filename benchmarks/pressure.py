#!/usr/bin/env python3
"""Do the promises hold under memory pressure? Counts violations over seeds, and says how near each came to its bound.

    python -m benchmarks.pressure [--seeds 5000] [--first 0] [--jobs 2] [--json]

Each seed is a random load on the simulator (`tests/support/simulation/pressure.py`). The load first runs with room for
everything, and the most blocks it holds at once are counted. Then it runs with a device pool of 25 % and a host pool of
10 % of these blocks, and every step is checked (`tests/support/simulation/pressure_checks.py`). The exit status is 1 if
any promise was violated.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from tests.support.simulation.pressure_checks import IDS, Outcome
from tests.support.simulation.pressure_run import run

_FORGIVEN: dict[str, Callable[[Outcome], int]] = {
    "debt cut": lambda outcome: outcome.forgiven_us,
    "credit taken from teams that could not run": lambda outcome: outcome.lifted_us,
}


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The figures over all seeds, as benchmarks/README.md publishes them."""
    ends: Counter[str] = Counter()
    for outcome in outcomes:
        ends.update(outcome.ends)
    return {
        "seeds": len(outcomes),
        "first_seed": outcomes[0].seed,
        "steps": sum(outcome.steps for outcome in outcomes),
        "requests": dict(ends),
        "violations": {name: sum(outcome.violations.get(name, (0, ""))[0] for outcome in outcomes) for name in IDS},
        "violating_seeds": {
            name: [outcome.seed for outcome in outcomes if name in outcome.violations][:20] for name in IDS
        },
        "swaps": sum(outcome.swaps for outcome in outcomes),
        "recomputes": sum(outcome.recomputes for outcome in outcomes),
        "forced_moves": sum(outcome.forced for outcome in outcomes),
        "copies_lost": sum(outcome.lost for outcome in outcomes),
        "promotions": sum(outcome.promotions for outcome in outcomes),
        "starved": sum(outcome.starved for outcome in outcomes),
        "starved_beyond_their_pause_bound": sum(outcome.over_bound for outcome in outcomes),
        "pause_largest": _part(outcomes, lambda outcome: outcome.pause_of_bound),
        "pool_is_one_request": sum(outcome.is_floored for outcome in outcomes),
        "gap_largest": {
            name: _largest(
                [outcome for outcome in outcomes if outcome.is_exact == is_exact], lambda outcome: outcome.gap_of_bound
            )
            for name, is_exact in (("costs known", True), ("costs estimated", False))
        },
        "forgiven": {
            name: {
                "part_of_device_time": round(
                    sum(key(outcome) for outcome in outcomes) / sum(outcome.device_us for outcome in outcomes), 5
                ),
                "largest": round(max(key(outcome) / max(1, outcome.device_us) for outcome in outcomes), 3),
                "seeds": sum(key(outcome) > 0 for outcome in outcomes),
            }
            for name, key in _FORGIVEN.items()
        },
        "lockout_largest": _part(outcomes, lambda outcome: outcome.lockout_of_bound),
        "link_largest": _part(outcomes, lambda outcome: outcome.link_of_bound),
        "steps_without_a_row": max(outcome.rowless_steps for outcome in outcomes),
    }


def _part(outcomes: Sequence[Outcome], key: Callable[[Outcome], float]) -> dict[str, float]:
    worst = max(outcomes, key=key)
    return {"part_of_bound": round(key(worst), 3), "seed": worst.seed}


def _largest(outcomes: Sequence[Outcome], key: Callable[[Outcome], float]) -> dict[str, Any]:
    worst = max(outcomes, key=key)
    return {
        "part_of_bound": round(worst.gap_of_bound, 3),
        "seed": worst.seed,
        "mode": worst.mode,
        "gap_us": round(worst.gap_us),
        "theta_us": round(worst.theta_us),
        "u_us": round(worst.step_us),
        "row_and_overhead_us": round(worst.largest_us),
        "error_us": round(worst.error_us),
        "gap_less_theta_in_u": round(worst.excess_in_steps, 2),
    }


def main() -> int:
    """Run the seeds on `--jobs` processes and print the figures. Returns 1 if any promise was violated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    began = time.perf_counter()
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    with ProcessPoolExecutor(arguments.jobs) as executor:
        outcomes = list(executor.map(run, seeds, chunksize=10))
    figures = summary(outcomes)
    if arguments.json:
        print(json.dumps(figures, indent=1))
    else:
        for name, value in figures.items():
            print(f"{name}: {value}")
        print(f"{time.perf_counter() - began:.0f} s")
    for outcome in outcomes:
        for name, (count, first) in outcome.violations.items():
            print(f"seed {outcome.seed} ({outcome.mode}): {name} {count} times, first {first}", file=sys.stderr)
    return 1 if any(outcome.violations for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
