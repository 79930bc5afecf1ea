"""What differs between a simulated and a real engine, handed to the service as one value."""

from dataclasses import dataclass

from engine.clock import Clock
from engine.step.core import Runner
from engine.wire.messages import ModelInfo
from policies.cost import StepProfile


@dataclass(frozen=True, slots=True)
class EngineParts:
    """A runner with the clock it runs on, its step profile, its model and its KV pools in blocks."""

    runner: Runner
    clock: Clock
    profile: StepProfile
    model: ModelInfo
    num_device_blocks: int
    num_host_blocks: int
    block_bytes: int = 0
    block_copy_us: float = 0.0  # one block, one way: what swapping costs
