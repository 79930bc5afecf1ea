"""From a configuration to an engine that is ready to step.

Checks the settings, builds the parts that differ between a simulated and a real engine, and connects everything. The
engine process and the benchmarks both call these functions, so what is measured is what is served.
"""

import math
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from engine.blocks import blocks_for
from engine.clock import MonotonicClock
from engine.config import ISOLATIONS, MODES, EngineConfig, StartError
from engine.parts import EngineParts
from engine.process.listener import EngineIdentity
from engine.process.samples import ServiceSampler
from engine.step.core import EngineCore
from engine.step.log import StepLog, StepLogStart
from engine.step.pauses import Pauses
from engine.step.scheduler import Scheduler
from engine.step.step_time import chunk_us, longest_step_us
from engine.wire.messages import PROTOCOL_VERSION, Hello, PolicyInfo, ProfileInfo
from policies.catalog import make_policy
from policies.config import PolicyConfig, from_profile
from policies.cost import StepProfile
from policies.eg_mlfq import EgMlfq

TIME_MAX_US = 60_000_000  # of a chunk or a step, as set


def read_config(text: str) -> EngineConfig:
    """The configuration in a JSON document, checked, with the number of threads filled in. Raises StartError."""
    try:
        config = msgspec.json.decode(text, type=EngineConfig)
    except msgspec.DecodeError as error:
        raise StartError(f"--config is not a valid engine configuration: {error}") from error
    if config.kind not in ("sim", "torch"):
        raise StartError(f"engine kind {config.kind!r} is unknown; use torch or sim")
    for name in ("max_batch_size", "max_batch_tokens", "prefill_chunk_tokens", "block_size", "kv_memory_bytes"):
        if getattr(config, name) < 1:
            raise StartError(f"{name} must be at least 1, got {getattr(config, name)}")
    for name in ("max_queued_requests", "max_outbox_bytes", "levels", "fairness_window_ms"):
        if getattr(config, name) < 1:
            raise StartError(f"{name} must be at least 1, got {getattr(config, name)}")
    if config.memory_preemption not in MODES:
        raise StartError(f"memory_preemption {config.memory_preemption!r} is unknown; use {', '.join(MODES)}")
    if config.isolation not in ISOLATIONS:
        raise StartError(f"isolation {config.isolation!r} is unknown; use {' or '.join(ISOLATIONS)}")
    for name, least, most in (
        ("prefill_chunk_us", 0, TIME_MAX_US),
        ("step_time_max_us", 0, TIME_MAX_US),
        ("host_kv_memory_bytes", 0, None),
        ("swap_benefit", 0, None),
        ("swap_min_run_steps", 0, None),
        ("swap_link_percent", 1, 100),
        ("promotion_percent", 0, 99),
        ("step_log_max_bytes", 1, None),
    ):
        value = getattr(config, name)
        if value < least or (most is not None and value > most):
            allowed = f"at least {least}" if most is None else f"from {least} to {most}"
            raise StartError(f"{name} must be {allowed}, got {value}")
    if config.num_threads < 0:
        raise StartError(f"num_threads must not be negative, got {config.num_threads}")
    num_threads = config.num_threads or max(1, len(os.sched_getaffinity(0)) - 1)
    return msgspec.structs.replace(config, num_threads=num_threads)


def policy_config(
    config: EngineConfig, profile: StepProfile, context_len: int, num_device_blocks: int | None = None
) -> PolicyConfig:
    """The policy's constants that follow from the settings, the step profile and the context length in tokens.

    `num_device_blocks` bounds the longest step; None: every slot may have a whole context.
    """
    if num_device_blocks is None:
        num_device_blocks = config.max_batch_size * blocks_for(context_len, config.block_size)
    return from_profile(
        profile,
        levels=config.levels,
        fairness_window_us=config.fairness_window_ms * 1000,
        coast=config.coast,
        chunk_tokens=min(config.prefill_chunk_tokens, config.max_batch_tokens),
        chunk_us=chunk_us(config, profile),
        step_us_max=longest_step_us(config, profile, context_len, num_device_blocks),
        block_size=config.block_size,
        context_len=context_len,
        promotion_percent=config.promotion_percent,
    )


def build_parts(config: EngineConfig) -> EngineParts:
    """The runner of the configured kind, and what comes with it.

    Raises StartError or ModelStoreError for what an operator can mend. A damaged model can raise other errors.
    """
    return _simulated(config) if config.kind == "sim" else _with_torch(config)


def _simulated(config: EngineConfig) -> EngineParts:
    from engine.sim.parts import build

    return build(config)


def _with_torch(config: EngineConfig) -> EngineParts:
    from engine.device.parts import build

    parts = build(config)
    return EngineParts(
        runner=parts.runner,
        clock=MonotonicClock(),
        profile=parts.profile,
        model=parts.model_info,
        num_device_blocks=parts.num_device_blocks,
        num_host_blocks=parts.num_host_blocks,
        block_bytes=parts.block_bytes,
        block_copy_us=parts.block_copy_us,
    )


def assemble(
    config: EngineConfig, parts: EngineParts, identity: EngineIdentity, tell: Callable[[str], None]
) -> tuple[EngineCore, ServiceSampler, Hello]:
    """The core with its policy and scheduler, the sampler that reads their totals, and the engine's first message.

    `tell` gets one line if the step log stops. Raises StartError, or StepLogError when the step log cannot be opened.
    """
    constants = policy_config(config, parts.profile, parts.model.context_len, parts.num_device_blocks)
    try:
        policy = make_policy(config.policy, constants)
    except ValueError as error:
        raise StartError(str(error)) from None
    has_bounds = policy.name == EgMlfq.name
    upload_us = _upload_max_us(config, parts)
    rate_percent = least_rate_percent(config) if upload_us else 100
    scheduler = Scheduler(
        config,
        policy,
        parts.profile,
        parts.num_device_blocks,
        eos_token_ids=parts.model.eos_token_ids,
        num_host_blocks=parts.num_host_blocks,
        block_copy_us=parts.block_copy_us,
        pauses=Pauses(constants if has_bounds else None, upload_us, rate_percent),
    )
    step_log = _open_step_log(config, scheduler, identity, tell)
    core = EngineCore(config, scheduler, parts.runner, parts.clock, parts.model, step_log)
    profile = parts.profile
    hello = Hello(
        protocol_version=PROTOCOL_VERSION,
        engine_id=identity.engine_id,
        epoch=identity.epoch,
        pid=os.getpid(),
        kind=config.kind,
        policy=policy.name,
        model=parts.model,
        profile=ProfileInfo(
            fixed_us=profile.fixed_us,
            prefill_token_us=profile.prefill_token_us,
            prefill_attention_us=profile.prefill_attention_us,
            decode_row_us=profile.decode_row_us,
            decode_context_us=profile.decode_context_us,
        ),
        block_size=config.block_size,
        num_device_blocks=parts.num_device_blocks,
        num_host_blocks=parts.num_host_blocks,
        max_batch_size=config.max_batch_size,
        max_batch_tokens=config.max_batch_tokens,
        max_queued_requests=config.max_queued_requests,
        block_bytes=parts.block_bytes,
        block_copy_us=parts.block_copy_us,
        memory_preemption=scheduler.memory.mode,
        constants=_policy_info(constants, upload_us, rate_percent) if has_bounds else None,
    )
    return core, ServiceSampler(policy, parts.clock.now_us(), scheduler, parts.block_bytes), hello


def _upload_max_us(config: EngineConfig, parts: EngineParts) -> int:
    """T_in of the largest sequence: the time to copy all its KV back, in microseconds. 0 if KV never leaves the device.

    With 512 blocks of context and 86 us for each block that is 44,032 us.
    """
    if config.memory_preemption not in ("proactive", "reactive") or not parts.num_host_blocks:
        return 0
    num_blocks = min(parts.num_device_blocks, blocks_for(parts.model.context_len, config.block_size))
    return math.ceil(num_blocks * parts.block_copy_us)


def least_rate_percent(config: EngineConfig) -> int:
    """The percent of the device's time that swapping leaves for computing, as long as no move is forced."""
    return max(1, 100 - config.swap_link_percent)


def _policy_info(constants: PolicyConfig, upload_us: int, rate_percent: int) -> PolicyInfo:
    return PolicyInfo(
        levels=constants.levels,
        base_quantum_us=constants.base_quantum_us,
        fairness_window_us=constants.fairness_window_us,
        step_cost_max_us=constants.step_cost_max_us,
        promotion_percent=constants.promotion_percent,
        grant_us=constants.promotion_grant_us,
        upload_max_us=upload_us,
        rate_percent=rate_percent,
        theta_cost_us=constants.theta_cost_us,
        step_us_max=constants.step_us_max,
    )


def _open_step_log(
    config: EngineConfig, scheduler: Scheduler, identity: EngineIdentity, tell: Callable[[str], None]
) -> StepLog | None:
    """The step log that the settings ask for, or None. Raises StepLogError."""
    if not config.step_log:
        return None
    memory = scheduler.memory
    start = StepLogStart(
        engine_id=identity.engine_id,
        epoch=identity.epoch,
        num_device_blocks=memory.device.num_blocks,
        num_host_blocks=memory.host.num_blocks,
        block_size=config.block_size,
    )
    return StepLog(Path(config.step_log), config.step_log_max_bytes, start, tell)
