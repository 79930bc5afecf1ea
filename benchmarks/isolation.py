#!/usr/bin/env python3
"""What another team's flood costs a light team: the light team's p99 time to the first token, alone and beside it.

    python -m benchmarks.isolation [--factor 16] [--rounds 5] [--seconds N] [--slots 16] [--policy eg-mlfq ...]
        [--light-tier gold] [--flood-tier bronze] [--burst 4] [--real [--model smollm2-135m]] [--kv-memory 64MiB]
        [--out r.json]

Both teams send requests of the same kind, and arrivals are Poisson. The light team's requests come in bursts of
`--burst`, as from a page that asks a few things at once. The flood's requests come singly, `--factor` times as many:
more than the device can serve.

Each round has its own arrivals, drawn with the round's number as seed. The light team's arrivals are the same in both
runs of a round. The runs are simulated on the shipped step profile; with `--real` they go over HTTP to a real server.
Prints every round, and the medians.
"""

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.models.store import prepare
from engine.sim.parts import fixed_profile
from engine.sim.simulate import simulate
from engine.sim.workload import TraceRequest
from gateway.command import print_table
from gateway.demo.policy_run import RunOptions, run_policy
from gateway.settings.values import parse_text, setting

LIGHT, FLOOD = "light", "flood"
PROMPT = (32, 512)  # tokens, log-uniform
OUTPUT = (8, 64)


def arrivals(rng: random.Random, team: str, rate: float, burst: int, seconds: float) -> list[TraceRequest]:
    """One team's short and middling requests: Poisson bursts of `burst` requests, `rate` requests/s in the mean."""
    rows, at = [], rng.expovariate(rate / burst)
    while at < seconds:
        for _ in range(burst):
            rows.append(TraceRequest(round(at * 1e6), team, log_uniform(rng, *PROMPT), log_uniform(rng, *OUTPUT)))
        at += rng.expovariate(rate / burst)
    return rows


def log_uniform(rng: random.Random, least: int, most: int) -> int:
    """A whole number whose logarithm is uniform: as often between 32 and 64 as between 256 and 512."""
    return round(math.exp(rng.uniform(math.log(least), math.log(most))))


def traces(seed: int, arguments: argparse.Namespace) -> tuple[list[TraceRequest], list[TraceRequest]]:
    """The light team's trace alone, and the same trace with the flood."""
    rate, seconds = arguments.rate, arguments.seconds
    light = arrivals(random.Random(f"{LIGHT}:{seed}"), LIGHT, rate, arguments.burst, seconds)
    flood = arrivals(random.Random(f"{FLOOD}:{seed}"), FLOOD, rate * arguments.factor, 1, seconds)
    return light, sorted([*light, *flood], key=lambda row: row.at_us)


class Simulated:
    """Plays traces in the simulator."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._tiers = {LIGHT: arguments.light_tier, FLOOD: arguments.flood_tier}
        kv_memory = parse_text(setting("kv_memory"), arguments.kv_memory or "2GiB", "--kv-memory")
        self._config = EngineConfig(
            kind="sim",
            max_batch_size=arguments.slots,
            max_batch_tokens=arguments.batch_tokens,
            kv_memory_bytes=kv_memory,
        )

    def ttft(self, policy: str, trace: Sequence[TraceRequest]) -> dict[str, float]:
        """The light team's times to the first token: mean, p95, p99 and more, in seconds."""
        tiers = {team: self._tiers[team] for team in {row.team for row in trace}}
        report = simulate(trace, [policy], profile=fixed_profile(), config=self._config, team_tiers=tiers)
        (team,) = (team for team in report["policies"][0]["teams"] if team["team"] == LIGHT)
        found: dict[str, float] = team["ttft_seconds"]
        return found


class Real:
    """Plays each trace on a fresh server, over HTTP."""

    def __init__(self, arguments: argparse.Namespace, root: Path) -> None:
        self._options = RunOptions(
            data_root=root,
            engine="torch",
            model=arguments.model,
            max_batch_size=str(arguments.slots),
            vocab_size=prepare(arguments.model).config.vocab_size,
            question="What is the capital of France?",
            kv_memory=arguments.kv_memory,
            max_batch_tokens=str(arguments.batch_tokens),
            team_tiers={LIGHT: arguments.light_tier, FLOOD: arguments.flood_tier},
        )

    def ttft(self, policy: str, trace: Sequence[TraceRequest]) -> dict[str, float]:
        """The light team's times to the first token by the client's clock: mean, p95 and p99, in seconds.

        Raises SystemExit when a request failed.
        """
        run = run_policy(policy, trace, self._options, lambda _: None)
        if run["failed"]:
            raise SystemExit(f"{run['failed']} requests failed: {run['errors']}")
        (team,) = (row for row in run["teams"] if row["team"] == LIGHT)
        return {name: team[f"ttft_{name}"] for name in ("mean", "p95", "p99")}


def measure(
    runs: Simulated | Real, policy: str, seeds: Sequence[int], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row for each round (a seed), and a row of medians. Prints each round's row as it comes."""
    rows = []
    for seed in seeds:
        alone_trace, flooded_trace = traces(seed, arguments)
        alone, flooded = runs.ttft(policy, alone_trace), runs.ttft(policy, flooded_trace)
        rows.append(
            {
                "policy": policy,
                "round": seed,
                "requests": len(alone_trace),
                "alone_p99_s": alone["p99"],
                "flood_p99_s": flooded["p99"],
                "p99_ratio": flooded["p99"] / alone["p99"],
                "alone_mean_s": alone["mean"],
                "flood_mean_s": flooded["mean"],
                "mean_ratio": flooded["mean"] / alone["mean"],
            }
        )
        print_table(rows[-1:])
        sys.stdout.flush()
    names = [name for name in rows[0] if name not in ("policy", "round", "requests")]
    return [
        *rows,
        {"policy": policy, "round": "median"} | {n: statistics.median(row[n] for row in rows) for n in names},
    ]


def main() -> int:
    """Run the benchmark. Always returns 0, for it judges no result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--factor", type=float, default=16.0, help="requests of the flood team for each light one")
    parser.add_argument("--rate", type=float, default=0.5, help="requests/s of the light team")
    parser.add_argument("--burst", type=int, default=4, help="requests of the light team that come at once")
    parser.add_argument("--light-tier", default="gold")
    parser.add_argument("--flood-tier", default="bronze")
    parser.add_argument("--seconds", type=float, help="of arrivals; 300 simulated, 60 real")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--batch-tokens", type=int, default=2048, help="tokens in one step, which bound its time")
    parser.add_argument("--policy", action="append", help="default: eg-mlfq; give the option once for each policy")
    parser.add_argument("--real", action="store_true", help="the real engine behind HTTP instead of the simulator")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--kv-memory", default="", metavar="SIZE")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    arguments.seconds = arguments.seconds or (60.0 if arguments.real else 300.0)
    with tempfile.TemporaryDirectory(prefix="terazi-isolation-") as root:
        runs = Real(arguments, Path(root)) if arguments.real else Simulated(arguments)
        seeds = range(1, arguments.rounds + 1)
        rows = [row for policy in arguments.policy or ["eg-mlfq"] for row in measure(runs, policy, seeds, arguments)]
    where = f"{arguments.factor:g}x flood, {'real engine' if arguments.real else 'simulated'}"
    print_table(rows, list(rows[0]), title=f"light team's time to the first token, alone and beside a {where}")
    if arguments.out:
        given = {name: str(value) for name, value in vars(arguments).items()}
        arguments.out.write_text(json.dumps({"arguments": given, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
