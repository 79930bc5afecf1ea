"""Time of a decode step and of prefill on this CPU, as JSON: what the engine's speed rests on.

    python benchmarks/decode_step.py [--dtype bfloat16 --dtype float32] [--threads 1] [--context 256]

Each figure is the median of several steps of the real runner, sampling included, beside the CPU seconds they took (on a
shared machine the wall time says more about the neighbours).
"""

import argparse
import json
import os
import statistics
import time
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from engine.config import EngineConfig
from engine.profiling import StepShape, device_name, plan_of
from engine.service_torch import build

BATCH_SIZES = (1, 8, 16, 32, 64)


def measure(runner: Any, shape: StepShape, repeats: int) -> dict[str, float]:
    plan = plan_of(shape, runner.cache.block_size)
    runner.execute(plan)
    wall, cpu = [], []
    for _ in range(repeats):
        started, started_cpu = time.perf_counter(), time.process_time()
        runner.execute(plan)
        cpu.append(time.process_time() - started_cpu)
        wall.append(time.perf_counter() - started)
    seconds, cpu_seconds = statistics.median(wall), statistics.median(cpu)
    tokens = shape.decode_rows + shape.prefill_tokens
    return {
        "ms": round(seconds * 1e3, 2),
        "cpu_ms": round(cpu_seconds * 1e3, 2),
        "tokens_per_second": round(tokens / seconds, 1),
        "tokens_per_cpu_second": round(tokens / cpu_seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", action="append", choices=["bfloat16", "float32"])
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
        parts = build(EngineConfig(model=args.model, dtype=dtype, device="cpu", num_threads=args.threads))
        decode = {
            str(size): measure(parts.runner, StepShape(decode_rows=size, decode_context=args.context), args.repeats)
            for size in BATCH_SIZES
        }
        prefill = {
            str(count): measure(parts.runner, StepShape(prefill_tokens=count), args.repeats)
            for count in (16, 64, 256, 1024)
        }
        report["results"][dtype] = {"decode_by_batch_size": decode, "prefill_by_tokens": prefill}
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
