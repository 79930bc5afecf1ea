"""The CPU time of one step's scheduling: `schedule` and `apply`, policy included, on a simulated engine.

By default there are 64 slots, 100 teams and 1,000 queued requests. A request that ends is replaced, so the queue stays
as long. Three states are timed:

    slots     slots are short and blocks are plenty; KV could be swapped
    blocks    the KV pool is short and nothing is swapped, so every step tries waiting sequences and refuses them
    memory    the same KV pool with a host pool four times its size, and proactive swapping

EG-MLFQ is timed in each state with no team coasting, and with every team coasting.

    python -m benchmarks.scheduler [--policy eg-mlfq] [--steps 2000] [--json]
"""

import argparse
import json
import random
import time
from dataclasses import asdict, dataclass

from benchmarks.policy_pick import complete_one_each, with_coasting
from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.request import Request
from engine.sim.runner import SimRunner
from engine.step.scheduler import Scheduler
from engine.wire.messages import SamplingParams
from policies.cost import StepProfile
from policies.sequences import TeamTerms

PROFILE = StepProfile(
    fixed_us=24_000, prefill_token_us=550, prefill_attention_us=0.05, decode_row_us=900, decode_context_us=1.2
)
PROMPT_MAX, OUTPUT_MEAN, OUTPUT_MAX = 600, 250, 1500  # tokens of a request
TOKENS_MAX = PROMPT_MAX + OUTPUT_MAX
TOKENS_MEAN = 700  # what a request reserves: its prompt and max_tokens
BLOCK_COPY_US = 86.0  # 368,640 bytes at 4 GiB/s
HOST_POOLS = 4  # the host pool's size in device pools


@dataclass(frozen=True)
class Timing:
    """What was measured over the timed steps. Times are microseconds, of CPU except for the modelled step."""

    policy: str
    short_of: str
    is_coasting: bool  # whether every team coasts; else none does
    slots: int
    teams: int
    queued: int
    steps: int
    rows_mean: float
    copies_mean: float  # copies in a step
    p50_us: float
    p99_us: float
    schedule_p50_us: float
    apply_p50_us: float
    modelled_step_p50_us: float


def measure(
    policy_name: str,
    *,
    short_of: str,
    is_coasting: bool,
    slots: int,
    teams: int,
    queued: int,
    steps: int,
    warmup: int,
    seed: int,
) -> Timing:
    """Time `steps` steps of a loaded scheduler, with every team coasting or none."""
    from engine.process.assembly import policy_config
    from policies.catalog import make_policy

    rng = random.Random(seed)
    mode = "none" if short_of == "blocks" else "proactive"
    config = EngineConfig(kind="sim", policy=policy_name, max_batch_size=slots, memory_preemption=mode)
    if short_of == "slots":
        num_blocks = (queued + slots) * TOKENS_MAX // config.block_size  # room for every request
    else:
        num_blocks = slots // 2 * TOKENS_MEAN // config.block_size  # room for as many requests as half the slots
    policy = make_policy(policy_name, with_coasting(policy_config(config, PROFILE, 8192), is_coasting))
    clock = VirtualClock()
    runner = SimRunner(PROFILE, clock, block_copy_us=BLOCK_COPY_US)
    num_blocks = max(num_blocks, TOKENS_MAX // config.block_size + 1)
    scheduler = Scheduler(
        config,
        policy,
        PROFILE,
        num_blocks,
        num_host_blocks=num_blocks * HOST_POOLS,
        block_copy_us=BLOCK_COPY_US,
    )
    policy.configure([TeamTerms(team, weight=(1, 2, 4)[team % 3], start_level=team % 3) for team in range(teams)], 0)
    if is_coasting:
        complete_one_each(policy, teams)
        assert all(service.is_coasting for service in policy.team_service())
    serial = 0

    def refill() -> None:
        nonlocal serial
        while scheduler.num_live < queued + slots:
            num_prompt = rng.randint(16, PROMPT_MAX)
            sampling = SamplingParams(
                seed=serial, max_tokens=min(OUTPUT_MAX, 1 + int(rng.expovariate(1 / OUTPUT_MEAN))), ignore_eos=True
            )
            request = Request(f"r{serial}", rng.randrange(teams), 0, (65,) * num_prompt, sampling, clock.now_us())
            scheduler.add(request, clock.now_us())
            serial += 1

    schedule_us: list[float] = []
    apply_us: list[float] = []
    durations: list[int] = []
    rows = copies = 0
    for index in range(warmup + steps):
        refill()
        t0 = time.thread_time_ns()
        plan = scheduler.schedule(clock.now_us())
        t1 = time.thread_time_ns()
        assert plan is not None
        result = runner.execute(plan)
        t2 = time.thread_time_ns()
        scheduler.apply(plan, result, clock.now_us())
        t3 = time.thread_time_ns()
        if index >= warmup:
            schedule_us.append((t1 - t0) / 1000)
            apply_us.append((t3 - t2) / 1000)
            durations.append(result.duration_us)
            rows += len(plan.rows)
            copies += len(plan.copies_out) + len(plan.copies_in)
    both = sorted(a + b for a, b in zip(schedule_us, apply_us, strict=True))
    return Timing(
        policy=policy_name,
        short_of=short_of,
        is_coasting=is_coasting,
        slots=slots,
        teams=teams,
        queued=queued,
        steps=steps,
        rows_mean=round(rows / steps, 1),
        copies_mean=round(copies / steps, 2),
        p50_us=round(both[len(both) // 2], 1),
        p99_us=round(both[len(both) * 99 // 100], 1),
        schedule_p50_us=round(sorted(schedule_us)[steps // 2], 1),
        apply_p50_us=round(sorted(apply_us)[steps // 2], 1),
        modelled_step_p50_us=sorted(durations)[steps // 2],
    )


def main() -> None:
    """Time each policy in each state, and print a line for each timing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", action="append", help="default: eg-mlfq and fcfs")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--teams", type=int, default=100)
    parser.add_argument("--queued", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    timings = [
        measure(
            name,
            short_of=short_of,
            is_coasting=is_coasting,
            slots=arguments.slots,
            teams=arguments.teams,
            queued=arguments.queued,
            steps=arguments.steps,
            warmup=arguments.warmup,
            seed=arguments.seed,
        )
        for name in arguments.policy or ["eg-mlfq", "fcfs"]
        for is_coasting in ((False, True) if name == "eg-mlfq" else (False,))
        for short_of in ("slots", "blocks", "memory")
    ]
    if arguments.json:
        print(json.dumps([asdict(timing) for timing in timings], indent=2))
        return
    for timing in timings:
        print(
            f"{timing.policy:8}{' coasting' if timing.is_coasting else '':9} short of {timing.short_of:6} "
            f"{timing.rows_mean:5} rows, {timing.copies_mean:5} copies: "
            f"p50 {timing.p50_us:7} us, p99 {timing.p99_us:7} us of CPU "
            f"(schedule {timing.schedule_p50_us}, apply {timing.apply_p50_us}; step {timing.modelled_step_p50_us})"
        )


if __name__ == "__main__":
    main()
