"""What differs between a simulated engine and a real engine, handed to `engine.process` as one value."""

from dataclasses import dataclass

from engine.clock import Clock
from engine.step.core import Runner
from engine.wire.messages import ModelInfo
from policies.cost import StepProfile


@dataclass(frozen=True, slots=True)
class EngineParts:
    """A runner, the clock it runs on, its step profile, its model, and the sizes of its KV pools in blocks."""

    runner: Runner
    clock: Clock
    profile: StepProfile
    model: ModelInfo
    num_device_blocks: int
    num_host_blocks: int
    block_bytes: int = 0
    block_copy_us: float = 0.0  # time to copy one block one way, device to host or back
