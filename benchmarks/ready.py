"""Seconds from starting Python to a model ready for its first step, from a warm cache, as JSON.

    python benchmarks/ready.py [--runs 3]

Each run is a fresh interpreter. The first run fills the cache with the model, the kernels and the step profile, if they
are not there yet. It is reported by itself and does not count as warm.
"""

import argparse
import json
import subprocess
import sys
import time

CODE = """
import json, sys, time
from engine.config import EngineConfig
from engine.device.parts import build
parts = build(EngineConfig(model=sys.argv[1]))
print(json.dumps({"cpu_seconds": time.process_time(), "dtype": parts.model_info.dtype,
                  "threads": parts.model_info.num_threads}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    runs = []
    for number in range(args.runs + 1):
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", CODE, args.model], capture_output=True, text=True, check=True)
        seconds = time.perf_counter() - started
        if number:
            runs.append({"seconds": round(seconds, 2), **json.loads(done.stdout)})
        else:
            first = round(seconds, 2)
    print(json.dumps({"model": args.model, "first_seconds": first, "warm": runs}, indent=1))


if __name__ == "__main__":
    main()
