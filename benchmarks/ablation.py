#!/usr/bin/env python3
"""What memory preemption is worth: one trace on the real engine, with a part of the KV memory that it could use.

    python -m benchmarks.ablation --trace benchmarks/traces/flood60.jsonl [--kv 25 --kv 50] [--mode proactive ...]
        [--policy eg-mlfq] [--slots 64] [--sampling greedy] [--rounds 1] [--limit SECONDS] [--out r.json]

The first run is unconstrained: its pool holds everything. The most blocks it owned at once are 100 percent for `--kv`.
Then each mode runs at each size. With several policies or rounds all of this is repeated for each of them.

Every run is a fresh process with engine core, scheduler, policy and torch runner as the server has them, without HTTP,
on the real clock. Requests arrive at the trace's times, and their lengths are forced. Each request's sampled token ids
are compared with those of the unconstrained run.

`ratio` is the output tokens per second over those of the unconstrained run. `ratio_cpu` is the same by CPU seconds, for
a busy machine.
"""

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from engine.blocks import blocks_for
from engine.clock import MonotonicClock
from engine.config import MODES, EngineConfig
from engine.parts import EngineParts
from engine.plan import StepPlan, StepResult
from engine.process.listener import EngineIdentity
from engine.sim.workload import TraceRequest, read_trace
from engine.step.core import EngineCore
from engine.wire.messages import ConfigureTeams, Finished, SamplingParams, StepDone, Submit, TeamEntry
from gateway.command import print_table
from gateway.demo.policy_run import OTHER_TIER, TEAM_TIERS
from gateway.demo.replay import describe
from policies.cost import StepProfile
from policies.tiers import DEFAULT_TIERS

UNCONSTRAINED = "unconstrained"


class CountingRunner:
    """Passes plans on, and adds up what their copies moved and how long the steps took."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.num_steps = self.busy_us = self.stall_us = self.blocks_out = self.blocks_in = self.num_in = 0

    def execute(self, plan: StepPlan) -> StepResult:
        """Run the plan and count it."""
        result: StepResult = self._inner.execute(plan)
        self.num_steps += 1
        self.busy_us += result.duration_us
        self.stall_us += result.copy_us
        self.num_in += len(plan.copies_in)
        self.blocks_out += sum(len(copy.pairs) for copy in plan.copies_out)
        self.blocks_in += sum(len(copy.pairs) for copy in plan.copies_in)
        return result

    def release(self, seq_id: int) -> None:
        """Pass the call on."""
        self._inner.release(seq_id)


class Play:
    """One trace played on one core: when each request had its first token and its end, and the ids it got.

    Times are microseconds from the start. Lists are in the order of the trace; `finished` is by the same index.
    """

    def __init__(self, core: EngineCore, trace: Sequence[TraceRequest], seed: int, sampling: str, vocab: int) -> None:
        self._core, self._clock = core, MonotonicClock()
        self._trace, self._seed, self._sampling, self._vocab = trace, seed, sampling, vocab
        self.first_us = [0] * len(trace)
        self.ended_us = [0] * len(trace)
        self.ids: list[list[int]] = [[] for _ in trace]
        self.finished: dict[int, Finished] = {}
        self.peak_blocks = 0

    def run(self) -> None:
        """Play the trace, open loop: a request is handed in at its time, or right after the step that runs then.

        Raises SystemExit when a request is refused.
        """
        team_ids = {team: number for number, team in enumerate(sorted({row.team for row in self._trace}), start=1)}
        self._core.configure(ConfigureTeams(teams=tuple(_terms(team, team_ids[team]) for team in team_ids)))
        pool = self._core.scheduler.memory.device
        start_us, arrived = self._clock.now_us(), 0
        while arrived < len(self._trace) or self._core.has_work:
            now_us = self._clock.now_us() - start_us
            while arrived < len(self._trace) and self._trace[arrived].at_us <= now_us:
                refused = self._core.add(self._submit(arrived, team_ids[self._trace[arrived].team]))
                if refused is not None:
                    raise SystemExit(f"request {arrived} was refused: {refused.message}")
                arrived += 1
            if not self._core.has_work:
                time.sleep(max(0, self._trace[arrived].at_us - now_us) / 1e6)
                continue
            done = self._core.step()
            self.peak_blocks = max(self.peak_blocks, pool.num_owned)
            if done is not None:
                self._book(done, self._clock.now_us() - start_us)

    def _submit(self, index: int, team_id: int) -> Submit:
        row, rng = self._trace[index], random.Random(f"{self._seed}:{index}")
        low, high = (1000, 40000) if self._vocab > 40000 else (self._vocab // 4, self._vocab // 2)
        tier = _tier(row.team)
        return Submit(
            request_id=str(index),
            team_id=team_id,
            start_level=tier.start_level,
            prompt_token_ids=tuple(rng.randrange(low, high) for _ in range(row.prompt_tokens)),
            sampling=SamplingParams(
                temperature=0.0 if self._sampling == "greedy" else 0.8,
                top_p=1.0 if self._sampling == "greedy" else 0.95,
                seed=self._seed * 1_000_003 + index,
                max_tokens=row.output_tokens,
                ignore_eos=True,
            ),
        )

    def _book(self, done: StepDone, now_us: int) -> None:
        for event in done.tokens:
            if event.token_ids:
                index = int(event.request_id)
                self.first_us[index] = self.first_us[index] or now_us
                self.ids[index] += event.token_ids
        for finished in done.finished:
            index = int(finished.request_id)
            self.ended_us[index] = now_us
            self.finished[index] = finished


def _tier(team: str) -> Any:
    name = TEAM_TIERS.get(team, OTHER_TIER)
    return next(tier for tier in DEFAULT_TIERS if tier.name == name)


def _terms(team: str, team_id: int) -> TeamEntry:
    terms = _tier(team).terms(team_id)
    return TeamEntry(
        team_id=team_id,
        weight=terms.weight,
        start_level=terms.start_level,
        starving_after_us=terms.starving_after_us,
        promotion_burst_grants=terms.promotion_burst_grants,
    )


def play(name: str, config: EngineConfig, trace: list[TraceRequest], seed: int, sampling: str) -> dict[str, Any]:
    """Play the trace once in this process. Returns a document that JSON can hold."""
    # The engine process builds its parts with the same functions, so what is measured is what is served.
    from engine.process.assembly import assemble, build_parts

    parts = build_parts(config)
    runner = CountingRunner(parts.runner)
    parts = EngineParts(**{**{f: getattr(parts, f) for f in EngineParts.__slots__}, "runner": runner})
    core, _, _ = assemble(config, parts, EngineIdentity("ablation", 1), print)
    started_cpu = time.process_time()
    played = Play(core, trace, seed, sampling, parts.model.vocab_size)
    played.run()
    cpu = time.process_time() - started_cpu
    core.scheduler.check()
    wall, tokens = max(played.ended_us) / 1e6, sum(map(len, played.ids))
    failed = sorted({f.message or f.reason for f in played.finished.values() if f.reason not in ("stop", "length")})
    return {
        "run": name,
        "policy": config.policy,
        "slots": config.max_batch_size,
        "device_blocks": parts.num_device_blocks,
        "host_blocks": parts.num_host_blocks if name != UNCONSTRAINED else 0,
        "peak_blocks": played.peak_blocks,
        "block_bytes": parts.block_bytes,
        "wall_seconds": wall,
        "cpu_seconds": cpu,
        "busy_seconds": runner.busy_us / 1e6,
        "steps": runner.num_steps,
        "output_tokens": tokens,
        "output_tokens_per_second": tokens / wall,
        "output_tokens_per_cpu_second": tokens / cpu,
        "preemptions": sum(f.num_preemptions for f in played.finished.values()),
        "swaps_out": sum(f.num_swaps for f in played.finished.values()),
        "swaps_in": runner.num_in,
        "recomputes": sum(f.num_recomputes for f in played.finished.values()),
        "promotions": sum(f.num_promotions for f in played.finished.values()),
        "bytes_out": runner.blocks_out * parts.block_bytes,
        "bytes_in": runner.blocks_in * parts.block_bytes,
        "stall_seconds": runner.stall_us / 1e6,
        "stall_share": runner.stall_us / max(1, runner.busy_us),
        "longest_pause_seconds": max(f.longest_pause_us for f in played.finished.values()) / 1e6,
        "failed": len(trace) - sum(f.reason in ("stop", "length") for f in played.finished.values()),
        "errors": failed[:5],
        "teams": [_team_row(name, team, played, trace) for team in sorted({row.team for row in trace})],
        "ids": [blake2b(repr(ids).encode(), digest_size=8).hexdigest() for ids in played.ids],
        "link": _link(parts),
    }


def _team_row(name: str, team: str, played: Play, trace: Sequence[TraceRequest]) -> dict[str, Any]:
    at = [i for i, row in enumerate(trace) if row.team == team]
    ttft = describe([(played.first_us[i] - trace[i].at_us) / 1e6 for i in at]) or {}
    jct = describe([(played.ended_us[i] - trace[i].at_us) / 1e6 for i in at]) or {}
    ends = [played.finished[i] for i in at]
    return {
        "run": name,
        "team": team,
        "requests": len(at),
        "ttft_mean": ttft["mean"],
        "ttft_p99": ttft["p99"],
        "jct_mean": jct["mean"],
        "jct_p99": jct["p99"],
        "preemptions": sum(f.num_preemptions for f in ends),
        "swaps": sum(f.num_swaps for f in ends),
        "recomputes": sum(f.num_recomputes for f in ends),
        "longest_pause": max(f.longest_pause_us for f in ends) / 1e6,
        "device_seconds": sum(f.device_us for f in ends) / 1e6,
    }


def _link(parts: EngineParts) -> dict[str, float]:
    """The host link as the engine measured it at start, and the bandwidth above which swapping beats recomputing."""
    tokens = parts.block_bytes // max(1, EngineConfig().block_size)
    speed = parts.block_bytes / parts.block_copy_us * 1e6 if parts.block_copy_us else 0.0
    return {
        "block_copy_us": parts.block_copy_us,
        "measured_gb_per_second": speed / 1e9,
        "break_even_gb_per_second": break_even_bandwidth(tokens, parts.profile) / 1e9,
    }


def break_even_bandwidth(kv_bytes_per_token: float, profile: StepProfile) -> float:
    """The bandwidth in bytes per second above which swapping beats recomputing; 0 when a prompt token takes no time.

    With k bytes of KV a token, and t seconds to compute a prompt token, the way out and back takes 2k / bandwidth and
    the recomputation t. Example: an 8B model on an A100 has k = 131,072 and t = 114.4 us, which gives 2.29 GB/s. With
    a clean host copy, which needs no way out, half of it is enough.
    """
    if profile.prefill_token_us <= 0:
        return 0.0
    return 2e6 * kv_bytes_per_token / profile.prefill_token_us


def apart(config: EngineConfig, name: str, trace: list[TraceRequest], seed: int, sampling: str) -> dict[str, Any]:
    """`play` in a process of its own, so that nothing of an earlier run is left."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(play, name, config, trace, seed, sampling).result()


def ablate(arguments: argparse.Namespace, policy: str, trace: list[TraceRequest], seed: int) -> list[dict[str, Any]]:
    """The unconstrained run, then each mode at each size, each with its ratios to the unconstrained run."""
    base = EngineConfig(model=arguments.model, policy=policy, max_batch_size=arguments.slots, dtype=arguments.dtype)
    if arguments.host_kv_memory:
        base = msgspec.structs.replace(base, host_kv_memory_bytes=arguments.host_kv_memory << 20)
    needs = [blocks_for(row.prompt_tokens + row.output_tokens, base.block_size) for row in trace]
    per_block = _block_bytes(base)
    free = msgspec.structs.replace(base, kv_memory_bytes=sum(needs) * per_block, memory_preemption="none")
    runs = [apart(free, UNCONSTRAINED, trace, seed, arguments.sampling)]
    show(runs[0], runs[0])
    for percent in [] if arguments.only_unconstrained else arguments.kv:
        num_blocks = max(runs[0]["peak_blocks"] * percent // 100, *needs)
        for mode in arguments.mode:
            config = msgspec.structs.replace(base, kv_memory_bytes=num_blocks * per_block, memory_preemption=mode)
            runs.append(apart(config, f"{mode} {percent} %", trace, seed, arguments.sampling))
            show(runs[-1], runs[0])
    return runs


def _block_bytes(config: EngineConfig) -> int:
    import torch

    from engine.device.kv_cache import block_bytes
    from engine.device.parts import choose_device, choose_dtype
    from engine.models.store import prepare

    dtype = choose_dtype(config.dtype, choose_device(config.device))
    assert isinstance(dtype, torch.dtype)
    return block_bytes(prepare(config.model, config.cache_dir).config, config.block_size, dtype)


def show(run: dict[str, Any], free: dict[str, Any]) -> None:
    """Add to `run` how it compares with `free`, the unconstrained run, and print a line."""
    run["differing_ids"] = sum(ids != free_ids for ids, free_ids in zip(run["ids"], free["ids"], strict=True))
    run["throughput_ratio"] = run["output_tokens_per_second"] / free["output_tokens_per_second"]
    run["cpu_throughput_ratio"] = run["output_tokens_per_cpu_second"] / free["output_tokens_per_cpu_second"]
    print(
        f"{run['policy']} {run['run']}: {run['wall_seconds']:.1f} s, {run['output_tokens_per_second']:.1f} tokens/s "
        f"({run['throughput_ratio']:.3f}, by CPU time {run['cpu_throughput_ratio']:.3f}), "
        f"{run['swaps_out']} swap-outs, {run['recomputes']} recomputes, "
        f"{run['differing_ids']} requests with other ids",
        file=sys.stderr,
        flush=True,
    )


def print_runs(runs: Sequence[dict[str, Any]], title: str) -> None:
    """Print two tables, one row for each run and one row for each team in a run; then a line about the host link."""
    rows = [
        {
            "run": run["run"],
            "blocks": run["device_blocks"],
            "tokens/s": run["output_tokens_per_second"],
            "ratio": run["throughput_ratio"],
            "ratio_cpu": run["cpu_throughput_ratio"],
            "swaps_out": run["swaps_out"],
            "swaps_in": run["swaps_in"],
            "recomputes": run["recomputes"],
            "MiB_out": run["bytes_out"] / 2**20,
            "MiB_in": run["bytes_in"] / 2**20,
            "stall_s": run["stall_seconds"],
            "stall_%": 100 * run["stall_share"],
            "preemptions": run["preemptions"],
            "longest_pause": run["longest_pause_seconds"],
            "other_ids": run["differing_ids"],
            "failed": run["failed"],
        }
        for run in runs
    ]
    print_table(rows, title=title)
    print_table([row for run in runs for row in run["teams"]], title="per team, seconds")
    link = next((run["link"] for run in runs if run["link"]["block_copy_us"]), None)
    if link is not None:
        print(
            f"one block's copy: {link['block_copy_us']:.1f} us, {link['measured_gb_per_second']:.2f} GB/s; "
            f"swapping beats recomputing above {link['break_even_gb_per_second']:.3f} GB/s"
        )


def main() -> int:
    """Run the benchmark. Returns 1 if a request failed, or a token changed in a run that does not recompute."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=Path(__file__).parent / "traces" / "flood60.jsonl")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--policy", action="append", default=[], help="eg-mlfq (the default), fcfs")
    parser.add_argument("--mode", action="append", default=[], choices=MODES, help="default: all")
    parser.add_argument("--kv", action="append", default=[], type=int, metavar="PERCENT", help="default: 25 and 50")
    parser.add_argument("--only-unconstrained", action="store_true", help="one run for each policy, no ablation")
    parser.add_argument("--host-kv-memory", type=int, default=0, metavar="MIB", help="default: the engine's")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--sampling", choices=["greedy", "seeded"], default="greedy")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only-team", default="", metavar="TEAM", help="this team's requests alone, at their times")
    parser.add_argument("--limit", type=float, default=0.0, metavar="SECONDS", help="cut the trace, for a quick look")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    arguments.mode = arguments.mode or list(MODES)
    arguments.kv = arguments.kv or [25, 50]
    trace = [row for row in read_trace(arguments.trace) if not arguments.limit or row.at_us < arguments.limit * 1e6]
    trace = [row for row in trace if arguments.only_team in ("", row.team)]
    rounds: list[list[dict[str, Any]]] = []
    for number in range(arguments.rounds):
        for policy in arguments.policy or ["eg-mlfq"]:
            runs = ablate(arguments, policy, trace, arguments.seed)
            rounds.append(runs)
            print_runs(runs, f"round {number + 1}, {policy}, {arguments.slots} slots, {len(trace)} requests")
            if arguments.out:
                arguments.out.write_text(json.dumps({"rounds": rounds}, indent=1) + "\n")
    print_medians(rounds)
    print_policies(rounds)
    swapped = [run for runs in rounds for run in runs if "recompute" not in run["run"]]
    return 1 if any(run["failed"] for runs in rounds for run in runs) or any(r["differing_ids"] for r in swapped) else 0


def print_medians(rounds: Sequence[Sequence[dict[str, Any]]]) -> None:
    """Print each run's ratio to the unconstrained run of its round: the median, least and most over the rounds."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for runs in rounds:
        for run in runs[1:]:
            ratios.setdefault((run["policy"], run["run"]), []).append(run["throughput_ratio"])
    if any(len(values) > 1 for values in ratios.values()):
        rows = [
            {"policy": key[0], "run": key[1], "median": statistics.median(v), "least": min(v), "most": max(v)}
            for key, v in ratios.items()
        ]
        print_table(rows, title="tokens/s over the unconstrained run of the same round")


def print_policies(rounds: Sequence[Sequence[dict[str, Any]]]) -> None:
    """Print, by team, each policy's unconstrained runs over those of the last policy: the median over the rounds."""
    free: dict[str, list[dict[str, Any]]] = {}
    for runs in rounds:
        free.setdefault(runs[0]["policy"], []).append(runs[0])
    *others, last = free
    rows = []
    for policy in others:
        for at, team in enumerate(row["team"] for row in free[last][0]["teams"]):
            row: dict[str, Any] = {"policy": f"{policy} over {last}", "team": team}
            for figure in ("ttft_mean", "ttft_p99", "jct_mean", "jct_p99"):
                pairs = zip(free[policy], free[last], strict=True)
                row[figure] = statistics.median(
                    run["teams"][at][figure] / last_run["teams"][at][figure] for run, last_run in pairs
                )
            rows.append(row)
    if rows:
        print_table(rows, title="ratios of the unconstrained runs, median over the rounds")


if __name__ == "__main__":
    sys.exit(main())
