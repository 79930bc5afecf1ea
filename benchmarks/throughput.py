#!/usr/bin/env python3
"""Output tokens per second of three traces on the simulator, with equal tiers and with different ones.

    python -m benchmarks.throughput [--slots 16 ...] [--policy eg-mlfq ...] [--set NAME=VALUE ...]

A trace is played to its end, so the figure counts the tail in which the last requests run with few others. Run it on
two commits to see what a change of the scheduler costs.
"""

import argparse
import sys
from pathlib import Path

import msgspec

from benchmarks.attacks import parse_changed
from engine.config import EngineConfig
from engine.sim.parts import fixed_profile
from engine.sim.simulate import simulate
from engine.sim.workload import read_trace
from gateway.command import print_table

ROOT = Path(__file__).resolve().parents[1]
TRACES = {
    "demo": ROOT / "gateway" / "demo" / "trace.jsonl",
    "flood60": ROOT / "benchmarks" / "traces" / "flood60.jsonl",
    "mixed60": ROOT / "benchmarks" / "traces" / "mixed60.jsonl",
}
TIERS = ("bronze", "silver", "gold")  # of the teams in alphabetical order


def main() -> int:
    """Always 0: it measures, it does not judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", action="append", type=int, help="once for each; 16 and 64")
    parser.add_argument("--policy", action="append", help="once for each; eg-mlfq")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a field of EngineConfig")
    arguments = parser.parse_args()
    changed = parse_changed(arguments.set)
    rows = []
    for name, path in TRACES.items():
        trace = read_trace(path)
        teams = sorted({request.team for request in trace})
        for slots in arguments.slots or [16, 64]:
            config = msgspec.structs.replace(EngineConfig(kind="sim"), **{"max_batch_size": slots, **changed})
            row: dict[str, object] = {"trace": name, "slots": slots}
            for policy in arguments.policy or ["eg-mlfq"]:
                for kind, tiers in (("equal", {}), ("tiers", dict(zip(teams, TIERS, strict=False)))):
                    found = simulate(trace, [policy], profile=fixed_profile(), config=config, team_tiers=tiers)
                    row[f"{policy}, {kind}"] = found["policies"][0]["output_tokens_per_second"]
            rows.append(row)
    print_table(rows, list(rows[0]), title="output tokens per second, simulated")
    return 0


if __name__ == "__main__":
    sys.exit(main())
