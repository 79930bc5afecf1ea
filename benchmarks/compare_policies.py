#!/usr/bin/env python3
"""One trace under FCFS and under EG-MLFQ, in turn, each on a fresh `terazi serve` with the same settings.

    compare_policies.py --trace T.jsonl [--model smollm2-135m] [--max-batch-size 16] [--engine torch] [--rounds 1]

Prints each run's table and the ratios EG-MLFQ / FCFS: mean JCT per team, output tokens/s. With several rounds the order
alternates, so that a machine that warms up or is shared favours neither.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from engine.model_store import prepare
from engine.sim.workload import read_trace
from gateway.demo import POLICIES, QUESTION
from gateway.policy_run import RunOptions, run_policy
from gateway.render import print_table

SHOWN = ("team", "requests", "failed", "ttft_mean", "ttft_p95", "jct_mean", "jct_p95", "slowdown_mean")


def main() -> int:
    """1 when a request failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", required=True, type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--engine", default="torch", choices=["torch", "sim"])
    parser.add_argument("--max-batch-size", default="16")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    trace = read_trace(arguments.trace)
    vocab_size = prepare(arguments.model).config.vocab_size
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="terazi-compare-") as root:
        size = arguments.max_batch_size
        options = RunOptions(Path(root), arguments.engine, arguments.model, size, vocab_size, QUESTION)
        for number in range(arguments.rounds):
            for policy in POLICIES if number % 2 == 0 else reversed(POLICIES):
                run = run_policy(policy, trace, options, lambda _: None)
                runs.append(run)
                speed = f"{run['output_tokens_per_second']:.1f} output tokens/s, {run['wall_seconds']:.1f} s"
                print_table(run["teams"], [*SHOWN, "share", "entitled", "preemptions"], title=f"{policy}: {speed}")
    rows = ratios(runs)
    print_table(rows, title="eg-mlfq over fcfs")
    if arguments.out:
        kept = [{name: value for name, value in run.items() if name not in ("series", "samples")} for run in runs]
        arguments.out.write_text(json.dumps({"ratios": rows, "runs": kept}, indent=1) + "\n")
    return 1 if any(run["failed"] for run in runs) else 0


def ratios(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """EG-MLFQ over FCFS, each the mean of its rounds."""

    def mean(policy: str, team: str, name: str) -> float:
        chosen = [run for run in runs if run["policy"] == policy]
        values = [row[name] for run in chosen for row in run["teams"] if row["team"] == team and row[name] is not None]
        return statistics.fmean(values) if values else float("nan")

    def speed(policy: str) -> float:
        return statistics.fmean(run["output_tokens_per_second"] for run in runs if run["policy"] == policy)

    rows: list[dict[str, Any]] = [
        {"of": f"{name} {team}", "ratio": mean("eg-mlfq", team, name) / mean("fcfs", team, name)}
        for team in dict.fromkeys(row["team"] for run in runs for row in run["teams"])
        for name in ("ttft_mean", "jct_mean", "slowdown_mean")
    ]
    return [*rows, {"of": "output tokens/s", "ratio": speed("eg-mlfq") / speed("fcfs")}]


if __name__ == "__main__":
    sys.exit(main())
