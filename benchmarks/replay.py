#!/usr/bin/env python3
"""Replay a trace of several teams, open loop, against any OpenAI-compatible server. Prints TTFT and JCT by team.

    replay.py --url http://127.0.0.1:8080 --model smollm2-135m --trace T.jsonl --key support=trz-... --key dev=trz-... \
        [--out r.json]

TTFT is the time to the first token, JCT the time to the whole answer. Every request streams /v1/completions with token
ids and a forced output length, so two servers do the same work.
"""

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from engine.sim.workload import read_trace
from gateway.command import print_table
from gateway.demo.replay import Target, replay, summarise


def rows_of(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """A table row for each team, and a row for all teams together. Times are seconds."""
    rows = []
    for team, counts in [*summary["teams"].items(), ("TOTAL", summary["all"])]:
        row: dict[str, Any] = {"team": team, "requests": counts["requests"], "failed": counts["failed"]}
        for name in ("ttft", "jct"):
            figures = counts[f"{name}_seconds"] or {}
            row |= {f"{name}_{statistic}": figures.get(statistic) for statistic in ("mean", "p50", "p95", "p99")}
        rows.append(row)
    return rows


def main() -> int:
    """Replay the trace and print the table. Returns 1 if a request failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="http://HOST:PORT")
    parser.add_argument("--model", required=True)
    parser.add_argument("--trace", required=True, type=Path)
    parser.add_argument("--key", action="append", default=[], metavar="TEAM=KEY")
    parser.add_argument("--default-key", default="none", help="for teams without --key")
    parser.add_argument("--vocab-size", type=int, default=49152)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    trace = read_trace(arguments.trace)
    keys = {row.team: arguments.default_key for row in trace} | dict(pair.split("=", 1) for pair in arguments.key)
    address = urlsplit(arguments.url)
    target = Target(address.hostname or "", address.port or 80, arguments.model, keys, arguments.vocab_size)
    summary = summarise(asyncio.run(replay(trace, target, seed=arguments.seed)))
    if arguments.out:
        arguments.out.write_text(json.dumps(summary, indent=1) + "\n")
    print_table(rows_of(summary), title=f"{arguments.trace}: {summary['output_tokens_per_second']:.1f} output tokens/s")
    for error in summary["errors"]:
        print(error, file=sys.stderr)
    return 1 if summary["all"]["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
