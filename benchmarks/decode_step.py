"""The time of a decode step and of prefill on this CPU, as JSON.

    python benchmarks/decode_step.py [--dtype bfloat16 --dtype float32] [--threads 1] [--context 256]
        [--native on --native off]

Steps run on the real runner, sampling included. Each shape shows the median wall time of several steps, their least
wall time, and their median CPU time. On a shared machine the wall time says more about the neighbours. With both values
of --native the steps alternate in one process, so that a disturbance meets both. The rows of a "mixed" batch have, in
turn, contexts from an eighth of --context to four times --context.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from engine.config import EngineConfig
from engine.device.native.library import SWITCH
from engine.device.parts import build
from engine.device.profiling import device_name
from engine.plan import Row, StepPlan
from engine.wire.messages import SamplingParams

BATCH_SIZES = (1, 8, 16, 32, 64)
PROMPTS = (16, 64, 256, 1024)
MIX = (8, 4, 2, 1, 0.5, 0.25)  # contexts of a mixed batch: --context divided by these, in turn


def plan_of(block_size: int, *, contexts: Sequence[int] = (), prompt: int = 0) -> StepPlan:
    """A step on the pool's first blocks: a decode row for each of `contexts` (tokens of KV), or a prompt chunk."""
    rows, next_block = [], 0
    for seq_id, end in enumerate(contexts or [prompt]):
        count = -(-end // block_size)
        rows.append(
            Row(
                seq_id=seq_id,
                is_decode=not prompt,
                start=0 if prompt else end - 1,
                token_ids=[10 + i % 50 for i in range(prompt or 1)],
                block_table=list(range(next_block, next_block + count)),
                samples=True,
                sampling=SamplingParams(temperature=0.0),
                num_generated=0,
            )
        )
        next_block += count
    return StepPlan(step_id=0, rows=tuple(rows))


def measure(runners: dict[str, Any], plan: StepPlan, repeats: int) -> dict[str, dict[str, float]]:
    """Wall and CPU time of the plan with each runner, in turn. The first step of each is not counted."""
    wall: dict[str, list[float]] = {name: [] for name in runners}
    cpu: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(1 + repeats):
        for name, runner in runners.items():
            started, started_cpu = time.perf_counter(), time.process_time()
            runner.execute(plan)
            cpu[name].append(time.process_time() - started_cpu)
            wall[name].append(time.perf_counter() - started)
    tokens = sum(len(row.token_ids) for row in plan.rows)
    result = {}
    for name in runners:
        seconds, cpu_seconds = statistics.median(wall[name][1:]), statistics.median(cpu[name][1:])
        result[name] = {
            "ms": round(seconds * 1e3, 2),
            "least_ms": round(min(wall[name][1:]) * 1e3, 2),
            "cpu_ms": round(cpu_seconds * 1e3, 2),
            "tokens_per_second": round(tokens / seconds, 1),
            "tokens_per_cpu_second": round(tokens / cpu_seconds, 1),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", action="append", choices=["bfloat16", "float32"])
    parser.add_argument("--native", action="append", choices=["on", "off"], help="compiled kernels (default: on)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    report: dict[str, Any] = {
        "model": args.model,
        "device": device_name("cpu"),
        "torch": torch.__version__,
        "threads": args.threads,
        "context": args.context,
        "results": {},
    }
    for dtype in args.dtype or ["bfloat16", "float32"]:
        runners = {}
        for native in args.native or ["on"]:
            os.environ[SWITCH] = native
            config = EngineConfig(
                model=args.model, dtype=dtype, device="cpu", num_threads=args.threads, max_batch_tokens=1024
            )
            runners[f"native {native}"] = build(config).runner
        block_size = next(iter(runners.values())).cache.block_size
        mixed = [max(1, int(args.context / MIX[i % len(MIX)])) for i in range(max(BATCH_SIZES))]
        report["results"][dtype] = {
            "decode_by_batch_size": {
                str(size): measure(runners, plan_of(block_size, contexts=[args.context] * size), args.repeats)
                for size in BATCH_SIZES
            },
            "decode_mixed_by_batch_size": {
                str(size): measure(runners, plan_of(block_size, contexts=mixed[:size]), args.repeats)
                for size in BATCH_SIZES[1:]
            },
            "prefill_by_tokens": {
                str(count): measure(runners, plan_of(block_size, prompt=count), args.repeats) for count in PROMPTS
            },
        }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
