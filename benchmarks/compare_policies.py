#!/usr/bin/env python3
"""One trace under FCFS, under EG-MLFQ and perhaps on a peer, in turn, each on a fresh server with the same slots.

    python -m benchmarks.compare_policies --trace T.jsonl [--model smollm2-135m] [--slots 16] [--rounds 5]
        [--kv-memory 64MiB] [--host-kv-memory 1GiB]
        [--peer-command "python -m vllm.entrypoints.openai.api_server --port 8200 ..." --peer-url http://127.0.0.1:8200]

A peer is another OpenAI-compatible server of the same model. Prints each run's table. Then it prints the ratios
EG-MLFQ / FCFS, peer / FCFS and peer / EG-MLFQ for every figure: the ratio is taken within each round, and the median,
least and most over the rounds are shown. The order of the servers turns with every round, so that a machine that drifts
favours none of them.
"""

import argparse
import asyncio
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from engine.models.store import prepare
from engine.sim.workload import TraceRequest, read_trace
from gateway.command import CommandError, print_table
from gateway.demo.policy_run import RunOptions, run_policy
from gateway.demo.replay import Target, replay, summarise
from gateway.demo.run import POLICIES, QUESTION

SHOWN = ("team", "requests", "failed", "ttft_mean", "ttft_p95", "ttft_p99", "jct_mean", "jct_p95", "slowdown_mean")
COUNTED = ("share", "entitled", "preemptions", "swaps", "recomputes", "promotions")
COMPARED = ("ttft_mean", "ttft_p99", "jct_mean", "jct_p95")
PEER = "peer"
PEER_START_SECONDS = 300


def main() -> int:
    """Run the benchmark. Returns 1 if a request failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", required=True, type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--engine", default="torch", choices=["torch", "sim"])
    parser.add_argument("--slots", "--max-batch-size", default="16", metavar="N", help="sequences in one step")
    parser.add_argument("--kv-memory", default="", metavar="SIZE", help="device memory for the KV cache")
    parser.add_argument("--host-kv-memory", default="", metavar="SIZE", help="host memory for swapped KV")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--weight", action="append", default=[], metavar="TIER=N", help="another weight for a tier")
    parser.add_argument("--peer-command", default="", help="starts an OpenAI-compatible server of the same model")
    parser.add_argument("--peer-url", default="", help="http://HOST:PORT where the peer then listens")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    trace = read_trace(arguments.trace)
    vocab_size = prepare(arguments.model).config.vocab_size
    rounds: list[dict[str, dict[str, Any]]] = []
    names = [*POLICIES, PEER] if arguments.peer_command else list(POLICIES)
    with tempfile.TemporaryDirectory(prefix="terazi-compare-") as root:
        weights = {tier: int(weight) for tier, weight in (pair.rsplit("=", 1) for pair in arguments.weight)}
        options = RunOptions(
            Path(root),
            arguments.engine,
            arguments.model,
            arguments.slots,
            vocab_size,
            QUESTION,
            weights,
            arguments.kv_memory,
            arguments.host_kv_memory,
        )
        for number in range(arguments.rounds):
            runs: dict[str, dict[str, Any]] = {}
            for name in names[number % len(names) :] + names[: number % len(names)]:
                if name == PEER:
                    run = run_peer(arguments.peer_command, arguments.peer_url, trace, vocab_size)
                else:
                    run = run_policy(name, trace, options, lambda _: None)
                runs[name] = {key: value for key, value in run.items() if key not in ("series", "samples")}
                speed = f"{run['output_tokens_per_second']:.1f} output tokens/s, {run['wall_seconds']:.1f} s"
                columns = SHOWN[:-1] if name == PEER else [*SHOWN, *COUNTED]
                print_table(run["teams"], list(columns), title=f"round {number + 1}, {name}: {speed}")
                sys.stdout.flush()
            rounds.append(runs)
            if arguments.out:
                arguments.out.write_text(json.dumps({"rounds": rounds}, indent=1) + "\n")
    tables = {f"{over} over {under}": ratios(rounds, over, under) for over, under in pairs(names)}
    for title, rows in tables.items():
        print_table(rows, title=title)
    if arguments.out:
        arguments.out.write_text(json.dumps({"ratios": tables, "rounds": rounds}, indent=1) + "\n")
    return 1 if any(run["failed"] for runs in rounds for run in runs.values()) else 0


def pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    """The ratios to print, as pairs (numerator, denominator)."""
    return [("eg-mlfq", "fcfs")] + ([(PEER, "fcfs"), (PEER, "eg-mlfq")] if PEER in names else [])


def ratios(rounds: Sequence[dict[str, dict[str, Any]]], over: str, under: str) -> list[dict[str, Any]]:
    """For every figure, the ratios `over` / `under` within each round: their median, least and most."""

    def row(label: str, values: list[float]) -> dict[str, Any]:
        return {"of": label, "median": statistics.median(values), "min": min(values), "max": max(values)}

    rows = []
    for team in [row["team"] for row in rounds[0][over]["teams"]]:
        for name in COMPARED:
            found = [(_cell(runs[over], team, name), _cell(runs[under], team, name)) for runs in rounds]
            values = [a / b for a, b in found if a is not None and b]
            if values:
                rows.append(row(f"{name} {team}", values))
    speeds = [runs[over]["output_tokens_per_second"] / runs[under]["output_tokens_per_second"] for runs in rounds]
    return [*rows, row("output tokens/s", speeds)]


def _cell(run: dict[str, Any], team: str, name: str) -> float | None:
    value: float | None = next(row[name] for row in run["teams"] if row["team"] == team)
    return value


def run_peer(command: str, url: str, trace: Sequence[TraceRequest], vocab_size: int) -> dict[str, Any]:
    """Start the peer, replay the trace against it, and stop it.

    Returns the part of `run_policy`'s document that any OpenAI-compatible server can give. Raises CommandError when the
    peer does not answer within PEER_START_SECONDS.
    """
    address = urlsplit(url)
    with subprocess.Popen(shlex.split(command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            model = _model_of(process, url)
            teams = list(dict.fromkeys(row.team for row in trace))
            keys = dict.fromkeys(teams, "none")
            target = Target(address.hostname or "", address.port or 80, model, keys, vocab_size)
            warm = replay([TraceRequest(0, teams[0], 64, 16)], target)
            asyncio.run(warm)
            summary = summarise(asyncio.run(replay(trace, target)))
        finally:
            process.terminate()
    rows = []
    for team, counts in summary["teams"].items():
        row = {"team": team, "requests": counts["requests"], "failed": counts["failed"]}
        for name in ("ttft", "jct"):
            figures = counts[f"{name}_seconds"] or {}
            row |= {f"{name}_{which}": figures.get(which) for which in ("mean", "p95", "p99")}
        rows.append(row)
    return {**summary, "failed": summary["all"]["failed"], "teams": rows}


def _model_of(process: subprocess.Popen[bytes], url: str) -> str:
    deadline = time.monotonic() + PEER_START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            return str(httpx.get(f"{url}/v1/models", timeout=5, trust_env=False).json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, LookupError):
            time.sleep(1)
    raise CommandError(f"the peer does not answer at {url}")


if __name__ == "__main__":
    sys.exit(main())
