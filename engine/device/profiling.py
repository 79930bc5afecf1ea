"""Measure the step profile: how long steps of this model take on this device. It is kept under the cache root.

About ten step shapes are run through the real runner, each once in every round. The least time of each shape is kept,
for a disturbance only ever adds to a step's time. Rounds keep a single disturbance from hitting all tries of one shape.
The least times are then fitted to the five parts of `policies.cost.StepProfile`, by non-negative least squares of
relative errors, so that no part comes out negative.
"""

import json
import logging
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from engine.plan import BlockCopy, Row, StepPlan
from engine.wire.messages import SamplingParams
from policies.cost import StepProfile

if TYPE_CHECKING:
    from engine.device.copy_engine import CopyEngine
    from engine.device.runner import TorchRunner

logger = logging.getLogger(__name__)

PROFILE_VERSION = 2  # raise this when the shapes, the estimate or the fit change
NUM_ROUNDS = 6
COPY_BYTES = 64 * 1024**2  # more than a processor's caches hold: KV that is swapped has long left the caches
COPY_PIECE = 8  # blocks timed at a time
FIXED_PROFILE = Path(__file__).with_name("step_profile_fixed.json")


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """What a profile is valid for: a stored profile is used only if its whole key is the same."""

    model_sha256: str
    device: str
    num_threads: int
    dtype: str
    torch_version: str = ""
    kernels: str = "torch"  # or "native"
    version: int = PROFILE_VERSION

    def path(self, root: Path) -> Path:
        """Where the profile is kept under the cache root."""
        device = "".join(c if c.isalnum() else "-" for c in self.device)
        name = f"{self.model_sha256[:16]}-{device}-{self.num_threads}-{self.dtype}-{self.kernels}.json"
        return root / "profiles" / name


@dataclass(frozen=True, slots=True)
class StepShape:
    """One kind of step to time: a prompt chunk, some equal decode rows, or both. All fields count tokens or rows."""

    prefill_start: int = 0
    prefill_tokens: int = 0
    decode_rows: int = 0
    decode_context: int = 0  # tokens of KV that each decode row reads, its own token included

    def features(self) -> list[float]:
        """The factors of StepProfile's five parts in this step's time, in the order of StepProfile's fields.

        A chunk of n tokens from position s has n*s + n*(n+1)/2 pairs of a query with a key: 4 from 10 have 50.
        """
        n = self.prefill_tokens
        pairs = n * self.prefill_start + n * (n + 1) / 2
        return [1.0, n, pairs, self.decode_rows, self.decode_rows * self.decode_context]


def device_name(device_type: str) -> str:
    """The name of the processor (or the device type), so that a cache carried to another machine is measured again."""
    if device_type != "cpu":
        return device_type
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return f"cpu {line.partition(':')[2].strip()}"
    except OSError:
        pass
    return f"cpu {platform.processor() or platform.machine()}"


def load_or_measure(runner: "TorchRunner", key: ProfileKey, root: Path, max_batch_size: int) -> StepProfile:
    """The stored profile for `key`, or else a fresh measurement, which is then stored.

    A damaged file counts as no stored profile. If the file cannot be written, a warning is logged.
    """
    path = key.path(root)
    stored = _read(path, key)
    if stored is not None:
        return stored
    shapes = step_shapes(runner, max_batch_size)
    durations = measure_all(runner, shapes)
    profile = fit(shapes, durations)
    logger.info("measured step profile: %s", profile)
    try:
        _write(path, key, profile, shapes, durations)
    except OSError as error:
        logger.warning("the step profile could not be kept at %s: %s", path, error)
    return profile


def read_profile(path: Path = FIXED_PROFILE) -> StepProfile:
    """The profile in a file: by default the profile that ships for tests and the simulator.

    Raises OSError, ValueError or KeyError for a file that holds no profile.
    """
    document = json.loads(path.read_text("utf-8"))
    return StepProfile(**document["profile"])


def step_shapes(runner: "TorchRunner", max_batch_size: int) -> list[StepShape]:
    """The shapes to time: those that fit the model's context, the KV pool and `max_batch_size`."""
    capacity = runner.cache.num_blocks * runner.cache.block_size
    context = min(runner.model.config.context_len, capacity)
    prefills = [(0, 16), (0, 64), (0, 256), (768, 256)]
    decodes = [(1, 64), (1, 1024), (8, 64), (8, 512), (16, 256), (32, 64)]
    shapes = [StepShape(prefill_start=start, prefill_tokens=n) for start, n in prefills if start + n <= context]
    shapes += [
        StepShape(decode_rows=rows, decode_context=length)
        for rows, length in decodes
        if rows <= max_batch_size and length <= context and rows * (length + runner.cache.block_size) <= capacity
    ]
    return shapes or [StepShape(prefill_tokens=1), StepShape(decode_rows=1, decode_context=1)]


def measure_all(runner: "TorchRunner", shapes: Sequence[StepShape], rounds: int = NUM_ROUNDS) -> list[int]:
    """The least time of each shape's step, in microseconds. Overwrites the pool's first blocks: call before serving."""
    plans = [plan_of(shape, runner.cache.block_size) for shape in shapes]
    for plan in plans:
        runner.execute(plan)  # not timed: the first run of a shape also sets up kernels
    times = [[runner.execute(plan).duration_us for plan in plans] for _ in range(rounds)]
    return [min(column) for column in zip(*times, strict=True)]


def measure_block_copy_us(runner: "TorchRunner") -> float:
    """The time to copy one block one way, in microseconds; 0 without a host pool.

    Overwrites the first blocks of both pools: call before serving. Measured at each start and not stored, since it
    takes some ten milliseconds.

    Each direction is copied twice, and the first pass only makes the system provide the pages: on a virtual machine the
    first copy to a page of the host takes four times as long. In the second pass a few blocks are timed at a time, and
    the median is taken, so that a busy neighbour does not count. More is copied than the caches hold. The result is
    the mean of the two directions.
    """
    cache = runner.cache
    if runner.copies is None or not cache.num_host_blocks:
        return 0.0
    block_bytes = cache.pool[0].numel() * cache.pool.itemsize
    count = min(2 * max(COPY_PIECE, COPY_BYTES // block_bytes), cache.num_blocks, cache.num_host_blocks)
    # Every second block, since the blocks that a pool in use hands out are seldom neighbours.
    pairs = [(block, block) for block in range(0, count, 2)]
    medians = []
    for is_out in (True, False):
        for _ in range(2):
            times = [
                _copy_ns(runner.copies, tuple(pairs[at : at + COPY_PIECE]), is_out) / len(pairs[at : at + COPY_PIECE])
                for at in range(0, len(pairs), COPY_PIECE)
            ]
        medians.append(statistics.median(times))
    return sum(medians) / 2 / 1000


def _copy_ns(copies: "CopyEngine", pairs: tuple[tuple[int, int], ...], is_out: bool) -> int:
    copy = (BlockCopy(0, 0, pairs),)
    started = time.perf_counter_ns()
    copies.start(copy if is_out else (), () if is_out else copy)
    while not copies.poll():
        copies.wait()
    return time.perf_counter_ns() - started


def plan_of(shape: StepShape, block_size: int) -> StepPlan:
    """A greedy step of this shape on the pool's first blocks."""
    rows = []
    next_block = 0
    lengths = [(shape.prefill_start, shape.prefill_tokens)] if shape.prefill_tokens else []
    lengths += [(shape.decode_context - 1, 1)] * shape.decode_rows
    for seq_id, (start, count) in enumerate(lengths):
        num_blocks = -(-(start + count) // block_size)
        rows.append(
            Row(
                seq_id=seq_id,
                is_decode=not (shape.prefill_tokens and seq_id == 0),
                start=start,
                token_ids=[10 + i % 50 for i in range(count)],
                block_table=range(next_block, next_block + num_blocks),
                samples=True,
                sampling=SamplingParams(temperature=0.0),
                num_generated=0,
            )
        )
        next_block += num_blocks
    return StepPlan(step_id=0, rows=tuple(rows))


def fit(shapes: Sequence[StepShape], durations_us: Sequence[int]) -> StepProfile:
    """Non-negative least squares of relative errors.

    Tries every subset of the five parts, with the others at 0, and takes the best whose parts are all non-negative. So
    the result is exact.
    """
    durations = np.asarray(durations_us, dtype=float)
    features = np.array([shape.features() for shape in shapes]) / durations[:, None]
    target = np.ones(len(durations))
    best, best_error = np.zeros(features.shape[1]), float(target @ target)
    for columns in _subsets(range(features.shape[1])):
        part, *_ = np.linalg.lstsq(features[:, columns], target, rcond=None)
        error = float(np.sum((features[:, columns] @ part - target) ** 2))
        if (part >= 0).all() and error < best_error:
            best, best_error = np.zeros(features.shape[1]), error
            best[list(columns)] = part
    return StepProfile(*(float(f"{value:.6g}") for value in best))


def _subsets(columns: Iterable[int]) -> list[tuple[int, ...]]:
    everything = list(columns)
    return [subset for size in range(1, len(everything) + 1) for subset in combinations(everything, size)]


def _read(path: Path, key: ProfileKey) -> StepProfile | None:
    try:
        document = json.loads(path.read_text("utf-8"))
        profile = StepProfile(**{name: float(value) for name, value in document["profile"].items()})
        is_same = document["key"] == asdict(key)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return profile if is_same else None


def _write(
    path: Path, key: ProfileKey, profile: StepProfile, shapes: Sequence[StepShape], durations_us: Sequence[int]
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "key": asdict(key),
        "profile": asdict(profile),
        "measured": [
            {**asdict(shape), "duration_us": duration} for shape, duration in zip(shapes, durations_us, strict=True)
        ],
    }
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
        json.dump(document, file, indent=1)
    os.replace(file.name, path)
