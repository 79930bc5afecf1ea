"""Build what the engine process needs to serve a real model. Torch is imported inside functions, when they are called.

This is the only module through which `engine.process` reaches torch.
"""

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.config import EngineConfig, StartError
from engine.models.store import ModelStoreError, cache_root, model_info, prepare
from engine.wire.messages import ModelInfo
from policies.cost import StepProfile

if TYPE_CHECKING:
    import torch

    from engine.device.runner import TorchRunner

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TorchParts:
    """A loaded model, ready to run steps."""

    runner: "TorchRunner"
    profile: StepProfile
    model_info: ModelInfo
    num_device_blocks: int
    num_host_blocks: int
    block_bytes: int
    block_copy_us: float  # time to copy one block one way; 0 without a host pool


def build(config: EngineConfig) -> TorchParts:
    """Load the model, allocate the KV pools, read or measure the step profile, and time a block copy.

    A host pool that the machine's memory cannot hold is made smaller, with a warning: the default size must not keep a
    small machine from serving. Raises StartError.
    """
    # An OpenMP thread that spins while it waits steals the core that its neighbour needs. On busy cores each small
    # matrix product then takes a tick of the operating system's scheduler. Set this before torch starts OpenMP.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch

    from engine.device.kv_cache import KVAllocationError, KVCache, block_bytes
    from engine.device.kv_canary import KVCanary
    from engine.device.model import Model
    from engine.device.native.library import choose
    from engine.device.profiling import ProfileKey, device_name, load_or_measure, measure_block_copy_us
    from engine.device.runner import TorchRunner

    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    num_threads = config.num_threads or max(1, len(os.sched_getaffinity(0)) - 1)
    torch.set_num_threads(num_threads)
    try:
        stored = prepare(config.model, config.cache_dir)
        per_block = block_bytes(stored.config, config.block_size, dtype)
        num_blocks = config.kv_memory_bytes // per_block
        if num_blocks < 1:
            raise StartError(
                f"--kv-memory of {config.kv_memory_bytes} bytes does not hold one KV block of {per_block} bytes; "
                "raise it"
            )
        cache = KVCache(
            stored.config,
            num_blocks,
            config.block_size,
            dtype,
            device,
            num_host_blocks=_num_host_blocks(config, device, num_blocks, per_block),
        )
        kernels = choose(cache_root(config.cache_dir), device, stored.config.head_dim)
        model = Model.load(
            stored.path,
            stored.config,
            dtype=dtype,
            device=device,
            max_batch_size=config.max_batch_size,
            max_batch_tokens=config.max_batch_tokens,
            kernels=kernels,
        )
    except (ModelStoreError, KVAllocationError) as error:
        raise StartError(str(error)) from None
    if num_blocks * config.block_size < stored.config.context_len:
        logger.warning(
            "the KV pool holds %d tokens, less than one context of %d: longer requests are refused",
            num_blocks * config.block_size,
            stored.config.context_len,
        )
    runner = TorchRunner(
        model,
        cache,
        eos_token_ids=stored.config.eos_token_ids,
        num_tokens=stored.num_tokens,
        canary=KVCanary(cache.pool) if config.kv_canary and cache.host_pool is not None else None,
    )
    dtype_name = str(dtype).removeprefix("torch.")
    key = ProfileKey(
        model_sha256=stored.sha256,
        device=device_name(device.type) if device.type == "cpu" else torch.cuda.get_device_name(device),
        num_threads=num_threads,
        dtype=dtype_name,
        torch_version=torch.__version__,
        kernels="torch" if kernels is None else "native",
    )
    profile = load_or_measure(runner, key, cache_root(config.cache_dir), config.max_batch_size)
    return TorchParts(
        runner=runner,
        profile=profile,
        model_info=model_info(stored, dtype=dtype_name, device=device.type, num_threads=num_threads),
        num_device_blocks=num_blocks,
        num_host_blocks=cache.num_host_blocks,
        block_bytes=per_block,
        block_copy_us=measure_block_copy_us(runner),
    )


def _num_host_blocks(config: EngineConfig, device: "torch.device", num_device_blocks: int, per_block: int) -> int:
    """How many blocks the host pool gets: what the setting holds, or fewer if the machine's memory is short.

    0 if `memory_preemption` does not swap.
    """
    import torch

    from engine.device.kv_cache import available_bytes, host_blocks_that_fit

    if config.memory_preemption not in ("proactive", "reactive"):
        return 0
    num_wanted = config.host_kv_memory_bytes // per_block
    available = available_bytes(torch.device("cpu"))
    if available is not None and device.type == "cpu":
        available -= num_device_blocks * per_block  # the device pool's pages, of the same memory, are not taken yet
    num_blocks = host_blocks_that_fit(num_wanted, per_block, available)
    if num_blocks < num_wanted:
        logger.warning(
            "--host-kv-memory of %d MiB is more than the machine can spare: the host KV pool gets %d MiB (%d blocks)",
            config.host_kv_memory_bytes >> 20,
            num_blocks * per_block >> 20,
            num_blocks,
        )
    return num_blocks


def choose_device(name: str) -> "torch.device":
    """The device that the setting names. "auto" is CUDA if torch sees such a device, else CPU. Raises StartError."""
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise StartError(f"device {name!r} is not known; use auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise StartError("device cuda was asked for, but torch sees none; use --device cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def choose_dtype(name: str, device: "torch.device") -> "torch.dtype":
    """The type of the weights that the setting names. Raises StartError.

    "auto" is bfloat16 if the device multiplies bfloat16 natively, else float32. A CPU with AVX512_BF16 or AMX is about
    twice as fast in bfloat16 as in float32, at every batch size (benchmarks/decode_step.py). A CPU with neither
    emulates bfloat16, which is slower than float32.
    """
    import torch

    if name not in ("auto", "float32", "bfloat16"):
        raise StartError(f"dtype {name!r} is not known; use auto, float32 or bfloat16")
    if name != "auto":
        return torch.float32 if name == "float32" else torch.bfloat16
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    return torch.bfloat16 if cpu_has_bfloat16() else torch.float32


def cpu_has_bfloat16() -> bool:
    """Whether this CPU has instructions for bfloat16 products (AVX512_BF16 or AMX)."""
    import torch

    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # private to torch; an absent check counts as no
    return any(bool(getattr(torch.cpu, check, bool)()) for check in checks)
