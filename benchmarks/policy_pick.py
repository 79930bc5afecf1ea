"""The CPU time that a policy takes in one step: begin, a pick for each slot, settle, leave and arrive.

    python -m benchmarks.policy_pick [--teams 100] [--queued 1000] [--slots 64] [--steps 2000] [--theta-ms N]

A sequence that ends is replaced by a new sequence of a random team, so the number of live sequences stays the same.
Each policy is timed with no team coasting. EG-MLFQ is also timed with every team coasting.
Prints the CPU microseconds (process_time) of a step as p1, p50 and p99. The p1 is the cost of a step when nothing else
runs on the core's other thread. All figures include the loop that stands in for the scheduler's picking.
"""

import argparse
import random
import time
from dataclasses import replace

from policies.catalog import make_policy
from policies.config import PolicyConfig, from_profile
from policies.cost import StepProfile, split_step
from policies.policy import Policy
from policies.sequences import SequenceTerms, Served, TeamTerms

PROFILE = StepProfile(24_000.0, 700.0, 0.02, 900.0, 1.0)
CHUNK = 256
MAX_BATCH_TOKENS = 2048


def with_coasting(config: PolicyConfig, everybody: bool) -> PolicyConfig:
    """`config` with thresholds so that no team coasts, or every team coasts from its first completion on."""
    if not everybody:
        return replace(config, coast_below_percent=0)
    return replace(config, coast_completions_min=1, coast_below_percent=10**9, coast_above_percent=10**9)


def complete_one_each(policy: Policy, teams: int) -> None:
    """Let every team complete one sequence. These sequences have ids below 0."""
    for team in range(teams):
        seq_id = -1 - team
        policy.arrive(SequenceTerms(seq_id, team, 1, 0, 1, 0, 0), 0)
        policy.begin(0)
        policy.take(seq_id, 1)
        policy.settle([Served(seq_id, 1, 1, True, True)], 0)
        policy.leave(seq_id, 0)


class Load:
    """A stand-in for the scheduler that does as little as possible, so that the policy's time shows."""

    def __init__(self, name: str, config: PolicyConfig, teams: int, seed: int = 1) -> None:
        self.random = random.Random(seed)
        self.policy = make_policy(name, config)
        self.num_teams = teams
        self.policy.configure(
            [TeamTerms(i, weight=(1, 2, 4)[i % 3], start_level=(2, 1, 0)[i % 3]) for i in range(teams)], 0
        )
        self.prompt: dict[int, int] = {}  # seq_id -> prompt tokens left to feed
        self.output: dict[int, int] = {}  # seq_id -> output tokens left to generate
        self.context: dict[int, int] = {}  # seq_id -> tokens with KV
        self.next_id = 0
        self.now = 0

    def arrive(self) -> int:
        """Add a sequence of a random team. Returns the CPU nanoseconds of the policy's `arrive`."""
        prompt = self.random.choice((16, 64, 256, 700))
        self.next_id += 1
        seq_id = self.next_id
        self.prompt[seq_id], self.output[seq_id], self.context[seq_id] = (
            prompt,
            self.random.choice((4, 20, 100, 400)),
            0,
        )
        work = PROFILE.prefill_work_us(0, prompt)
        team = self.random.randrange(self.num_teams)
        terms = SequenceTerms(seq_id, team, prompt, 0, work, 0, self.now)
        start = time.process_time_ns()
        self.policy.arrive(terms, self.now)
        return time.process_time_ns() - start

    def step(self, slots: int) -> int:
        """Run one step. Returns the CPU nanoseconds of the policy's calls and of the picking loop around them."""
        policy = self.policy
        works: dict[int, int] = {}
        plan: list[tuple[int, int, bool]] = []
        tokens = MAX_BATCH_TOKENS
        # Computed before the clock starts, so that its time is not counted.
        upcoming = {s: self._next(s) for s in self.prompt}
        start = time.process_time_ns()
        policy.begin(self.now)
        while len(plan) < slots and tokens > 0:
            seq_id = policy.best()
            if seq_id is None:
                break
            num_tokens, work, _ = upcoming[seq_id]
            if num_tokens > tokens:
                policy.refuse(seq_id)
                continue
            policy.take(seq_id, work)
            tokens -= num_tokens
            plan.append((seq_id, num_tokens, self.prompt[seq_id] == 0))
            works[seq_id] = work
        spent = time.process_time_ns() - start
        marginals = [upcoming[seq_id][2] for seq_id, _, _ in plan]
        duration = round(PROFILE.fixed_us + sum(marginals))
        self.now += duration
        served, ended = [], []
        for (seq_id, num_tokens, is_decode), cost in zip(
            plan, split_step(duration, marginals, PROFILE.fixed_us), strict=True
        ):
            self.context[seq_id] += num_tokens
            if not is_decode:
                self.prompt[seq_id] -= num_tokens
            generated = self.prompt[seq_id] == 0
            self.output[seq_id] -= generated
            served.append(Served(seq_id, works[seq_id], cost, generated, self.output[seq_id] <= 0))
            if self.output[seq_id] <= 0:
                ended.append(seq_id)
        start = time.process_time_ns()
        policy.settle(served, self.now)
        for seq_id in ended:
            policy.leave(seq_id, self.now)
        spent += time.process_time_ns() - start
        for seq_id in ended:
            del self.prompt[seq_id], self.output[seq_id], self.context[seq_id]
            spent += self.arrive()
        return spent

    def _next(self, seq_id: int) -> tuple[int, int, float]:
        context = self.context[seq_id]
        if self.prompt[seq_id]:
            n = min(CHUNK, self.prompt[seq_id])
            return n, PROFILE.prefill_work_us(context, n), PROFILE.prefill_marginal_us(context, n)
        return 1, PROFILE.decode_work_us(context), PROFILE.decode_marginal_us(context)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--teams", type=int, default=100)
    parser.add_argument("--queued", type=int, default=1000)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--theta-ms", type=int, default=None, help="Theta; by default it follows from the weights")
    args = parser.parse_args()
    config = from_profile(PROFILE, levels=8, fairness_window_us=1_000_000, chunk_tokens=CHUNK, context_len=8192)
    if args.theta_ms is not None:
        config = replace(config, theta_us=args.theta_ms * 1000)
    for name, everybody in (("eg-mlfq", False), ("eg-mlfq", True), ("fcfs", False)):
        load = Load(name, with_coasting(config, everybody), args.teams)
        if everybody:
            complete_one_each(load.policy, args.teams)
        for _ in range(args.queued + args.slots):
            load.arrive()
        for _ in range(300):
            load.step(args.slots)
        times = sorted(load.step(args.slots) / 1000 for _ in range(args.steps))
        p1, p50, p99 = (times[len(times) * percent // 100] for percent in (1, 50, 99))
        print(
            f"{name}{' all coasting' if everybody else ''}: p1 {p1:.0f} us, p50 {p50:.0f} us, p99 {p99:.0f} us "
            f"CPU per step ({args.slots} slots, {args.teams} teams, {args.queued} queued, {args.steps} steps)"
        )


if __name__ == "__main__":
    main()
