"""Requests and their sequences: what was asked, and where it stands.

A `Request` is one HTTP call and never changes. A `Sequence` is one row of a batch: it has one block table and one seed.
Each part of a sequence has one writer:

* `Sequence` itself: the scheduler (`engine.step.scheduler`);
* `Sequence.memory`: the KV memory (`engine.memory`);
* `Sequence.pause`: how long pauses were, and what bounds them (`engine.step.pauses`);
* `Sequence.bill`: the bills (`engine.memory.billing`).

A sequence's status is nobody's to write: it follows from where the KV is, whether the sequence is in the newest step,
and whether it has ended.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from engine.memory.holding import Holding, Place
from engine.wire.messages import FinishReason, SamplingParams


class Status(StrEnum):
    """Where a sequence is. Every live sequence is in exactly one."""

    WAITING = "waiting"  # has no KV yet
    RUNNING = "running"  # in the newest step
    PAUSED = "paused"  # KV on the device, not in the newest step
    SWAPPING_OUT = "swapping_out"  # KV on its way to the host
    SWAPPED = "swapped"  # KV on the host
    SWAPPING_IN = "swapping_in"  # KV on its way back
    DROPPED = "dropped"  # KV gone, will be recomputed
    FINISHED = "finished"  # ended, with a reason; no blocks left


_STATUS_OF: Mapping[Place, Status] = {
    Place.NOWHERE: Status.WAITING,
    Place.GOING_OUT: Status.SWAPPING_OUT,
    Place.HOST: Status.SWAPPED,
    Place.COMING_BACK: Status.SWAPPING_IN,
    Place.LOST: Status.DROPPED,
    Place.RELEASED: Status.FINISHED,
}

TRANSITIONS: Mapping[Status, tuple[Status, ...]] = {
    Status.WAITING: (Status.RUNNING, Status.FINISHED),
    Status.RUNNING: (Status.PAUSED, Status.SWAPPING_OUT, Status.DROPPED, Status.FINISHED),
    Status.PAUSED: (Status.RUNNING, Status.SWAPPING_OUT, Status.DROPPED, Status.FINISHED),
    Status.SWAPPING_OUT: (Status.SWAPPED, Status.DROPPED, Status.FINISHED),
    Status.SWAPPED: (Status.SWAPPING_IN, Status.DROPPED, Status.FINISHED),
    Status.SWAPPING_IN: (Status.PAUSED, Status.DROPPED, Status.FINISHED),
    Status.DROPPED: (Status.RUNNING, Status.FINISHED),
    Status.FINISHED: (),
}


def transition_table() -> str:
    """The legal changes as a Markdown table, as docs/architecture.md shows them."""
    lines = ["| from | to |", "|---|---|"]
    for status, successors in TRANSITIONS.items():
        lines.append(f"| {status.name} | {', '.join(s.name for s in successors) or '(end)'} |")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class Request:
    """One call as it was taken: `max_tokens` is already clamped to the context and the KV pool."""

    request_id: str
    team_id: int
    start_level: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_us: int
    start_by_us: int | None = None  # ends with "timeout" when its first step has not begun by then

    @property
    def total_tokens_max(self) -> int:
        """Prompt and output together, at most."""
        return len(self.prompt_token_ids) + self.sampling.max_tokens


@dataclass(slots=True, eq=False)
class Pause:
    """How long a sequence was kept from running, beside what was promised. Times are microseconds."""

    longest_us: int = 0
    bound_us: int = 0  # the largest bound that held when the sequence began to starve


@dataclass(slots=True, eq=False)
class Bill:
    """What a sequence was charged, in microseconds of device time."""

    device_us: int = 0  # the sum of its charges
    overhead_us: int = 0  # the part of it for copies and replays that its team caused


@dataclass(slots=True, eq=False)
class Sequence:
    """One batch row over its life."""

    seq_id: int
    request: Request
    memory: Holding
    level: int
    pause: Pause = field(default_factory=Pause)
    bill: Bill = field(default_factory=Bill)
    is_running: bool = False  # it is in the newest step
    output_token_ids: list[int] = field(default_factory=list)
    level_path: list[int] = field(default_factory=list)
    first_step_us: int | None = None
    first_token_us: int | None = None
    last_us: int = 0  # when its latest step ended; its arrival before
    ended_us: int | None = None
    num_preemptions: int = 0
    num_promotions: int = 0  # grants it had, once it has ended
    work_us: int = 0  # stand-alone work of its tokens
    finish_reason: FinishReason | None = None
    error: str = ""  # why, for the reason "error"

    @property
    def status(self) -> Status:
        """Where the sequence is."""
        place = self.memory.place
        if place is Place.DEVICE:
            return Status.RUNNING if self.is_running else Status.PAUSED
        return _STATUS_OF[place]

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_computed(self) -> int:
        """Tokens whose KV is in its blocks."""
        return self.memory.num_computed

    @property
    def num_to_fill(self) -> int:
        """Tokens whose KV it needs before it generates: its prompt, or all that had KV before a drop."""
        return max(len(self.request.prompt_token_ids), self.memory.replay_to)

    @property
    def is_half(self) -> bool:
        """Its prompt is not whole yet, or not whole again."""
        return self.memory.num_computed < self.num_to_fill

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)
