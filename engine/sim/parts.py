"""The parts of a simulated engine that serves in real time. A model's configuration is read, but no weights."""

from pathlib import Path

from engine.config import EngineConfig, StartError
from engine.device.profiling import read_profile
from engine.models.config import read_model_config
from engine.models.store import describe
from engine.parts import EngineParts
from engine.sim.runner import COPY_BYTES_PER_SECOND, PacedClock, SimRunner
from policies.cost import StepProfile

KV_ELEMENT_BYTES = 2  # as if the model were served in bfloat16


def fixed_profile() -> StepProfile:
    """The step profile that ships with the engine. Simulations use it on every machine."""
    return read_profile()


def printable_token_ids(vocab_size: int) -> range:
    """Ids that are most likely plain text: after the special and the single-byte tokens, before the rare tokens."""
    return range(400, 8000) if vocab_size >= 8000 else range(vocab_size // 2, vocab_size)


def build(config: EngineConfig) -> EngineParts:
    """A runner that sleeps the modelled time, with the KV pools that the real model would have.

    Raises StartError when `kv_memory_bytes` holds no block, and ModelStoreError when the model cannot be described.
    """
    model = describe(config.model, config.cache_dir, dtype="bfloat16", device="sim", num_threads=config.num_threads)
    block_bytes = read_model_config(Path(model.path)).kv_bytes_per_token(KV_ELEMENT_BYTES) * config.block_size
    if config.kv_memory_bytes < block_bytes:
        had = config.kv_memory_bytes
        raise StartError(f"--kv-memory of {had} bytes holds no block of {block_bytes} bytes; raise it")
    profile = fixed_profile()
    clock = PacedClock()
    block_copy_us = block_bytes * 1e6 / COPY_BYTES_PER_SECOND
    return EngineParts(
        runner=SimRunner(profile, clock, token_ids=printable_token_ids(model.vocab_size), block_copy_us=block_copy_us),
        clock=clock,
        profile=profile,
        model=model,
        num_device_blocks=config.kv_memory_bytes // block_bytes,
        num_host_blocks=config.host_kv_memory_bytes // block_bytes,
        block_bytes=block_bytes,
        block_copy_us=block_copy_us,
    )
