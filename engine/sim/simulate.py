"""Replays a trace under a policy, with the production core and scheduler on a virtual clock.

The same trace, settings and profile give the same report, byte for byte. Each policy's schedule is hashed step by step,
so that two runs can be compared.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from engine.blocks import blocks_for
from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.plan import StepPlan, StepResult
from engine.process.assembly import least_rate_percent, policy_config
from engine.sim.runner import COPY_BYTES_PER_SECOND, SimRunner
from engine.sim.workload import TraceRequest
from engine.step.core import EngineCore, Runner
from engine.step.pauses import Pauses
from engine.step.scheduler import Scheduler
from engine.wire.messages import ConfigureTeams, ModelInfo, Refused, SamplingParams, Submit, TeamEntry
from policies.catalog import make_policy
from policies.cost import StepProfile
from policies.eg_mlfq import EgMlfq
from policies.tiers import DEFAULT_TIERS, Tier

DEFAULT_TIER = "silver"
CONTEXT_LEN = 8192  # SmolLM2-135M's
KV_BYTES_PER_TOKEN = 23_040  # SmolLM2-135M's in bfloat16
_VOCAB_SIZE = 128


@dataclass(frozen=True, slots=True)
class _Memory:
    """The KV pools of a run."""

    num_device_blocks: int
    num_host_blocks: int
    block_bytes: int
    block_copy_us: float


class HashingRunner:
    """Passes plans on to a runner, and keeps one digest of all plans it saw, copies included."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._digest = blake2b(digest_size=16)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run the plan, and add to the digest each row's sequence, start and length, and each copy's sequence."""
        rows = ";".join(f"{row.seq_id},{row.start},{len(row.token_ids)}" for row in plan.rows)
        for name, copies in (("out", plan.copies_out), ("in", plan.copies_in)):
            if copies:
                rows += f";{name} " + ",".join(f"{copy.seq_id}:{len(copy.pairs)}" for copy in copies)
        self._digest.update(f"{plan.step_id}:{rows}\n".encode())
        return self._runner.execute(plan)

    def release(self, seq_id: int) -> None:
        """Pass the call on."""
        self._runner.release(seq_id)

    @property
    def schedule_hash(self) -> str:
        return self._digest.hexdigest()


@dataclass(slots=True)
class _Record:
    """What became of one request of the trace."""

    request: TraceRequest
    first_token_us: int | None = None
    ended_us: int | None = None  # None if the request was refused
    refusal: str = ""  # why the request was refused
    output_tokens: int = 0  # fewer than the request asked for if its output was cut
    num_promotions: int = 0
    longest_pause_us: int = 0
    pause_bound_us: int = 0
    pause_of_bound: float = 0.0
    num_preemptions: int = 0
    num_swaps: int = 0
    num_recomputes: int = 0
    device_us: int = 0
    overhead_us: int = 0


@dataclass(slots=True)
class _Run:
    """One policy's run over the whole trace."""

    policy: str
    records: list[_Record] = field(default_factory=list)
    num_steps: int = 0
    ended_us: int = 0
    schedule_hash: str = ""
    entitled_us: dict[str, int] = field(default_factory=dict)
    served_us: dict[str, int] = field(default_factory=dict)
    blocks_out: int = 0
    blocks_in: int = 0
    stall_us: int = 0
    replayed_tokens: int = 0
    refusals: dict[str, int] = field(default_factory=dict)  # requests by reason
    cut_to: str = ""


def simulate(
    trace: Sequence[TraceRequest],
    policies: Iterable[str],
    *,
    profile: StepProfile,
    config: EngineConfig | None = None,
    team_tiers: Mapping[str, str] | None = None,
    tiers: Iterable[Tier] = DEFAULT_TIERS,
    num_device_blocks: int | None = None,
    num_host_blocks: int | None = None,
    block_copy_us: float | None = None,
    context_len: int = CONTEXT_LEN,
) -> dict[str, Any]:
    """Replay `trace` under each policy. Returns {"trace": ..., "policies": [a report for each, in the order given]}.

    * `team_tiers` maps team names to tier names; a team that it lacks is silver.
    * `num_device_blocks` and `num_host_blocks` are the sizes of the KV pools. By default they follow from the bytes in
      `config` and the KV of SmolLM2-135M.
    * `config.memory_preemption` says how blocks are taken from paused sequences.
    * Copying a block takes `block_copy_us`; by default it runs at COPY_BYTES_PER_SECOND.

    Times in reports are seconds. A request is refused if not even one token of output fits beside its prompt. The
    output of any other request is cut to what fits. Both are counted, with the reason.

    Raises ValueError for:

    * an unknown policy or tier;
    * a tier given to a team that the trace lacks;
    * device memory that holds no block, or no request of the trace.
    """
    config = config or EngineConfig(kind="sim")
    block_bytes = config.block_size * KV_BYTES_PER_TOKEN
    memory = _Memory(
        config.kv_memory_bytes // block_bytes if num_device_blocks is None else num_device_blocks,
        config.host_kv_memory_bytes // block_bytes if num_host_blocks is None else num_host_blocks,
        block_bytes,
        block_bytes * 1e6 / COPY_BYTES_PER_SECOND if block_copy_us is None else block_copy_us,
    )
    by_name = {tier.name: tier for tier in tiers}
    tier_of: dict[str, Tier] = {}
    for team in sorted({request.team for request in trace}):
        tier_name = (team_tiers or {}).get(team, DEFAULT_TIER)
        if tier_name not in by_name:
            raise ValueError(f"team {team!r} has tier {tier_name!r}; there are: {', '.join(by_name)}")
        tier_of[team] = by_name[tier_name]
    absent = sorted(set(team_tiers or {}) - set(tier_of))
    if absent:
        raise ValueError(f"the trace has no team {absent[0]!r}; there are: {', '.join(tier_of)}")
    _check_memory(trace, config, memory)
    runs = [_replay(trace, policy, tier_of, config, profile, memory, context_len) for policy in policies]
    return {
        "trace": {
            "num_requests": len(trace),
            "num_teams": len(tier_of),
            "seconds": _seconds(max((request.at_us for request in trace), default=0)),
            "prompt_tokens": sum(request.prompt_tokens for request in trace),
            "output_tokens": sum(request.output_tokens for request in trace),
        },
        "coast": config.coast,
        "memory": {
            "preemption": config.memory_preemption,
            "num_device_blocks": memory.num_device_blocks,
            "num_host_blocks": memory.num_host_blocks,
            "block_bytes": memory.block_bytes,
            "block_copy_us": round(memory.block_copy_us, 3),
        },
        "policies": [_report(run, tier_of, config, profile, memory.block_bytes) for run in runs],
    }


def _check_memory(trace: Sequence[TraceRequest], config: EngineConfig, memory: _Memory) -> None:
    """Raises ValueError when the device's blocks hold nothing that could run."""
    if memory.num_device_blocks < 1:
        raise ValueError(
            f"--kv-memory of {config.kv_memory_bytes} bytes holds no block of {memory.block_bytes} bytes; raise it"
        )
    room = memory.num_device_blocks * config.block_size
    least = min((request.prompt_tokens for request in trace), default=0)
    if trace and least + 1 > room:
        num_bytes = -(-(least + 1) // config.block_size) * memory.block_bytes
        raise ValueError(
            f"--kv-memory holds {room} tokens and not even one request of the trace: the shortest prompt with a "
            f"token of output has {least + 1}; give at least {num_bytes} bytes"
        )


def isolated_us(profile: StepProfile, config: EngineConfig, prompt_tokens: int, output_tokens: int) -> int:
    """How many microseconds a request takes alone on an idle engine. A slowdown is a request's time over this time."""
    total = start = 0
    chunk = config.prefill_chunk_tokens
    while start < prompt_tokens:
        end = min(prompt_tokens, (start // chunk + 1) * chunk, start + config.max_batch_tokens)
        total += max(1, round(profile.fixed_us + profile.prefill_marginal_us(start, end - start)))
        start = end
    for context_len in range(prompt_tokens + 1, prompt_tokens + output_tokens):
        total += max(1, round(profile.fixed_us + profile.decode_marginal_us(context_len)))
    return total


def _replay(
    trace: Sequence[TraceRequest],
    policy_name: str,
    tier_of: Mapping[str, Tier],
    config: EngineConfig,
    profile: StepProfile,
    memory: _Memory,
    context_len: int,
) -> _Run:
    clock = VirtualClock()
    runner = HashingRunner(SimRunner(profile, clock, block_copy_us=memory.block_copy_us))
    constants = policy_config(config, profile, context_len, memory.num_device_blocks)
    policy = make_policy(policy_name, constants)
    model = ModelInfo(
        name="sim", path="", vocab_size=_VOCAB_SIZE, context_len=context_len, eos_token_ids=(), dtype="", device="sim"
    )
    scheduler = Scheduler(
        config,
        policy,
        profile,
        memory.num_device_blocks,
        num_host_blocks=memory.num_host_blocks,
        block_copy_us=memory.block_copy_us,
        pauses=Pauses(
            constants if policy_name == EgMlfq.name else None,
            math.ceil(blocks_for(context_len, config.block_size) * memory.block_copy_us),
            least_rate_percent(config),
        ),
    )
    core = EngineCore(config, scheduler, runner, clock, model)
    team_ids = {team: team_id for team_id, team in enumerate(tier_of)}
    core.configure(ConfigureTeams(teams=tuple(_entry(team_ids[team], tier) for team, tier in tier_of.items())))

    run = _Run(policy_name, [_Record(request) for request in trace])
    arrived = 0
    while arrived < len(trace) or core.has_work:
        while arrived < len(trace) and trace[arrived].at_us <= clock.now_us():
            refused = core.add(_submit(arrived, trace[arrived], team_ids))
            if refused is not None:
                run.records[arrived].refusal = _why(refused, scheduler, context_len)
            arrived += 1
        if not core.has_work:
            if arrived < len(trace):  # else the last requests were refused, and nothing is left to do
                clock.advance_to(trace[arrived].at_us)
            continue
        done = core.step()
        if done is None:
            continue
        run.num_steps += 1
        for event in done.tokens:
            record = run.records[int(event.request_id)]
            if event.token_ids and record.first_token_us is None:
                record.first_token_us = clock.now_us()
        for finished in done.finished:
            record = run.records[int(finished.request_id)]
            record.ended_us = clock.now_us()
            record.output_tokens = finished.output_tokens
            record.num_promotions = finished.num_promotions
            record.longest_pause_us = finished.longest_pause_us
            record.pause_bound_us = finished.pause_bound_us
            record.pause_of_bound = finished.pause_of_bound
            record.num_preemptions = finished.num_preemptions
            record.num_swaps = finished.num_swaps
            record.num_recomputes = finished.num_recomputes
            record.device_us = finished.device_us
            record.overhead_us = finished.overhead_us
            run.ended_us = clock.now_us()
    run.schedule_hash = runner.schedule_hash
    run.refusals = dict(Counter(record.refusal for record in run.records if record.refusal))
    run.cut_to = _room(scheduler, context_len)
    bills = scheduler.memory.bills
    for counts in bills.take_counts().values():
        run.blocks_out += counts.blocks_out
        run.blocks_in += counts.blocks_in
    run.stall_us, run.replayed_tokens = bills.stall_us, bills.replayed_tokens
    names = list(tier_of)
    for service in policy.team_service():
        run.served_us[names[service.team_id]] = service.served_us
        run.entitled_us[names[service.team_id]] = service.entitled_us
    return run


def _room(scheduler: Scheduler, context_len: int) -> str:
    """What bounds the prompt and the output of a request together, as text with the number of tokens."""
    if scheduler.memory.tokens_max < context_len:
        return f"the KV memory ({scheduler.memory.tokens_max} tokens)"
    return f"the model's context ({context_len} tokens)"


def _why(refused: Refused, scheduler: Scheduler, context_len: int) -> str:
    """Why a request was refused, in the same words for all requests that were refused for the same reason."""
    if refused.code == "context_length_exceeded":
        return f"the prompt and one token of output are more than {_room(scheduler, context_len)}"
    return refused.message


def _submit(index: int, request: TraceRequest, team_ids: Mapping[str, int]) -> Submit:
    return Submit(
        request_id=str(index),
        team_id=team_ids[request.team],
        prompt_token_ids=(0,) * request.prompt_tokens,
        sampling=SamplingParams(seed=index, max_tokens=request.output_tokens, ignore_eos=True),
    )


def _entry(team_id: int, tier: Tier) -> TeamEntry:
    terms = tier.terms(team_id)
    return TeamEntry(
        team_id=team_id,
        weight=terms.weight,
        start_level=terms.start_level,
        starving_after_us=terms.starving_after_us,
        promotion_burst_grants=terms.promotion_burst_grants,
    )


def _report(
    run: _Run, tier_of: Mapping[str, Tier], config: EngineConfig, profile: StepProfile, block_bytes: int
) -> dict[str, Any]:
    served_us = sum(run.served_us.values())
    teams = []
    for team, tier in tier_of.items():
        records = [record for record in run.records if record.request.team == team]
        share, entitled = run.served_us.get(team, 0), run.entitled_us.get(team, 0)
        teams.append(
            {
                "team": team,
                "tier": tier.name,
                "weight": tier.weight,
                "share": _ratio(share, served_us),
                "entitled_share": _ratio(entitled, served_us),
                **_figures(records, config, profile),
            }
        )
    output_tokens = sum(r.output_tokens for r in run.records)
    total = _figures(run.records, config, profile)
    cut = {f"prompt and output are more than {run.cut_to}": total["num_cut"]} if total["num_cut"] else {}
    return {
        "policy": run.policy,
        "schedule_hash": run.schedule_hash,
        "num_steps": run.num_steps,
        "seconds": _seconds(run.ended_us),
        "output_tokens": output_tokens,
        "output_tokens_per_second": _ratio(output_tokens * 1_000_000, run.ended_us),
        "bytes_out": run.blocks_out * block_bytes,
        "bytes_in": run.blocks_in * block_bytes,
        "stall_seconds": _seconds(run.stall_us),
        "replayed_tokens": run.replayed_tokens,
        "refused": run.refusals,
        "cut": cut,
        "total": total,
        "teams": teams,
    }


def _figures(records: Sequence[_Record], config: EngineConfig, profile: StepProfile) -> dict[str, Any]:
    ended = [record for record in records if record.ended_us is not None]
    first_us: list[int] = []
    whole_us: list[int] = []
    slowdowns: list[float] = []
    for record in ended:
        assert record.ended_us is not None and record.first_token_us is not None
        request = record.request
        alone_us = isolated_us(profile, config, request.prompt_tokens, record.output_tokens)
        first_us.append(record.first_token_us - request.at_us)
        whole_us.append(record.ended_us - request.at_us)
        slowdowns.append((record.ended_us - request.at_us) / alone_us)
    return {
        "num_requests": len(records),
        "num_refused": len(records) - len(ended),
        "num_cut": sum(record.output_tokens < record.request.output_tokens for record in ended),
        "num_preemptions": sum(record.num_preemptions for record in ended),
        "num_swaps": sum(record.num_swaps for record in ended),
        "num_recomputes": sum(record.num_recomputes for record in ended),
        "num_promotions": sum(record.num_promotions for record in ended),
        "longest_pause_seconds": _seconds(max((record.longest_pause_us for record in ended), default=0)),
        "pause_bound_seconds": _seconds(max((record.pause_bound_us for record in ended), default=0)),
        "pause_of_bound": max((record.pause_of_bound for record in ended), default=0.0),
        "device_seconds": _seconds(sum(record.device_us for record in ended)),
        "overhead_device_seconds": _seconds(sum(record.overhead_us for record in ended)),
        "ttft_seconds": _distribution([us / 1_000_000 for us in first_us]),
        "jct_seconds": _distribution([us / 1_000_000 for us in whole_us]),
        "slowdown": _distribution(slowdowns),
    }


def _distribution(values: Sequence[float]) -> dict[str, float] | None:
    """The mean, and the median and the tail by nearest rank: p50 of [1, 2, 3, 4] is 2. None without values."""
    if not values:
        return None
    ordered = sorted(values)

    def rank(percent: int) -> float:
        return round(ordered[max(0, -(-len(ordered) * percent // 100) - 1)], 6)

    mean = round(sum(ordered) / len(ordered), 6)
    return {"mean": mean, "p50": rank(50), "p95": rank(95), "p99": rank(99), "max": round(ordered[-1], 6)}


def _ratio(part: int, whole: int) -> float:
    return round(part / whole, 6) if whole else 0.0


def _seconds(us: int) -> float:
    return round(us / 1_000_000, 6)
