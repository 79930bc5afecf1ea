#!/usr/bin/env python3
"""Make gateway/demo/trace.jsonl: 60 seconds of three teams' requests.

    make_demo_trace.py AzureLLMInferenceTrace_conv.csv AzureLLMInferenceTrace_code.csv OUT.jsonl

Source: Azure LLM inference trace 2023, https://github.com/Azure/AzurePublicDataset (Patel et al., "Splitwise: Efficient
Generative LLM Inference Using Phase Splitting", ISCA 2024), licence CC-BY-4.0. The trace has lengths and times, no text
and no tenants. It is changed so that a 135M model on two cores is overloaded for a while:

    support   conversation rows with 4-60 output tokens: some of one real minute, at their times; output <= 40
    dev       code rows: some of one real minute, at their times; output 4-48
    reports   conversation rows with >= 250 output tokens, in bursts of 12 every 20 s (the bursts are ours); output
              half of the original plus 120, at most 400
    prompts   an eighth of the original length (cut at 2,048 or 4,096 tokens) plus 8 tokens; reports plus 16
"""

import csv
import json
import random
import sys
from datetime import datetime
from pathlib import Path

SECONDS = 60.0
SEED = 20231116
SUPPORT_REQUESTS = 120
DEV_REQUESTS = 30
BURST_SECONDS = 20
BURST_SIZE = 12


def read(path: Path) -> list[tuple[float, int, int]]:
    """Each row of a CSV file as (seconds since the first row, prompt tokens, output tokens)."""
    with path.open() as file:
        rows = [
            (datetime.fromisoformat(r["TIMESTAMP"][:26]), int(r["ContextTokens"]), int(r["GeneratedTokens"]))
            for r in csv.DictReader(file)
        ]
    return [((at - rows[0][0]).total_seconds(), prompt, output) for at, prompt, output in rows]


def minute(rows: list[tuple[float, int, int]], count: int, rng: random.Random) -> list[tuple[float, int, int]]:
    """`count` random rows of one random minute of the trace, in order, at their own times within that minute."""
    last = rows[-1][0] - SECONDS
    while True:
        start = rng.uniform(0, last)
        window = [(t - start, prompt, output) for t, prompt, output in rows if start <= t < start + SECONDS]
        if len(window) >= count:
            return sorted(rng.sample(window, count))


def make(conversation: list[tuple[float, int, int]], code: list[tuple[float, int, int]]) -> list[dict[str, object]]:
    """The new trace's rows in order of time."""
    rng = random.Random(SEED)
    arrivals: list[tuple[float, str, int, int]] = []
    short = [row for row in conversation if 4 <= row[2] <= 60]
    arrivals += [(t, "support", min(p, 2048) // 8 + 8, min(o, 40)) for t, p, o in minute(short, SUPPORT_REQUESTS, rng)]
    arrivals += [(t, "dev", min(p, 4096) // 8 + 8, max(4, min(o, 48))) for t, p, o in minute(code, DEV_REQUESTS, rng)]
    long = [row for row in conversation if row[2] >= 250]
    for burst in range(int(SECONDS) // BURST_SECONDS):
        for _ in range(BURST_SIZE):
            _, prompt, output = rng.choice(long)
            at = burst * BURST_SECONDS + rng.random()
            arrivals.append((at, "reports", min(prompt, 4096) // 8 + 16, min(output // 2 + 120, 400)))
    return [
        {"t": round(t, 3), "team": team, "prompt_tokens": prompt, "output_tokens": output}
        for t, team, prompt, output in sorted(arrivals)
    ]


def main() -> None:
    conversation, code, out = (Path(argument) for argument in sys.argv[1:4])
    rows = make(read(conversation), read(code))
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokens = sum(int(str(row["output_tokens"])) for row in rows)
    print(f"{out}: {len(rows)} requests, {tokens} output tokens")


if __name__ == "__main__":
    main()
