"""Requests and their sequences: what was asked, and how far it has come.

A `Request` is one HTTP call and never changes. A `Sequence` is its row in the batch, with one block table and one seed.
Each part of a sequence has one writer:

* `Sequence` itself: the scheduler (`engine.step.scheduler`);
* `Sequence.memory`: the KV memory (`engine.memory`);
* `Sequence.pause`: how long pauses were, and what bounds them (`engine.step.pauses`);
* `Sequence.bill`: the bills (`engine.memory.billing`).

Nobody writes a sequence's status. It follows from where the KV is, from whether the sequence is in the newest step, and
from whether the sequence has ended.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from engine.memory.holding import Holding, Place
from engine.wire.messages import FinishReason, SamplingParams


class Status(StrEnum):
    """Where a sequence is. A sequence has exactly one status at a time; `TRANSITIONS` says which may follow."""

    WAITING = "waiting"  # has no KV yet
    RUNNING = "running"  # in the newest step
    PAUSED = "paused"  # KV on the device, not in the newest step
    SWAPPING_OUT = "swapping_out"  # KV on its way to the host
    SWAPPED = "swapped"  # KV on the host
    SWAPPING_IN = "swapping_in"  # KV on its way back
    DROPPED = "dropped"  # KV gone; the sequence will compute it again
    FINISHED = "finished"  # ended, with a reason; the sequence holds no blocks


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
    """The legal changes of status as the Markdown table that docs/architecture.md shows."""
    lines = ["| from | to |", "|---|---|"]
    for status, successors in TRANSITIONS.items():
        lines.append(f"| {status.name} | {', '.join(s.name for s in successors) or '(end)'} |")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class Request:
    """One call as the engine took it. `max_tokens` is already clamped to the model's context and to the KV pool."""

    request_id: str
    team_id: int
    start_level: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_us: int
    start_by_us: int | None = None  # the request ends with "timeout" if its first step has not begun by this time

    @property
    def total_tokens_max(self) -> int:
        """The most tokens that prompt and output can have together."""
        return len(self.prompt_token_ids) + self.sampling.max_tokens


@dataclass(slots=True, eq=False)
class Pause:
    """The gaps between the ends of a sequence's steps, and the bounds that were promised for them, in microseconds."""

    longest_us: int = 0  # of all gaps; the first gap is from the arrival to the end of the first step
    bound_us: int = 0  # the largest bound of the episodes of starving that are over; 0 if there was none
    starved_us: int = 0  # when the latest episode of starving began
    promised_us: int = 0  # the bound of the present episode; 0 if the sequence does not starve
    promised_short_us: int = 0  # its bound if KV memory is short in it
    of_bound: float = 0.0  # of the episodes that are over, the largest gap / bound; over 1 is a broken promise


@dataclass(slots=True, eq=False)
class Bill:
    """What a sequence was charged, in microseconds of device time."""

    device_us: int = 0  # the sum of its charges
    overhead_us: int = 0  # the part of device_us for copies and replays that its team caused


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence from its arrival to its end. Times ending in `_us` are microseconds on the engine's clock."""

    seq_id: int
    request: Request
    memory: Holding
    level: int
    pause: Pause = field(default_factory=Pause)
    bill: Bill = field(default_factory=Bill)
    is_running: bool = False  # the sequence is in the newest step
    output_token_ids: list[int] = field(default_factory=list)
    level_path: list[int] = field(default_factory=list)
    first_step_us: int | None = None
    first_token_us: int | None = None
    last_us: int = 0  # when its latest step ended; its arrival while it has had no step
    ended_us: int | None = None
    num_preemptions: int = 0
    num_promotions: int = 0  # promotions granted to the sequence; written at its end
    work_us: int = 0  # a duration: what its tokens so far would have taken alone on the device
    finish_reason: FinishReason | None = None
    error: str = ""  # what went wrong, if the reason is "error"

    @property
    def status(self) -> Status:
        """Where the sequence is, computed from its other fields."""
        place = self.memory.place
        if place is Place.DEVICE:
            return Status.RUNNING if self.is_running else Status.PAUSED
        return _STATUS_OF[place]

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_computed(self) -> int:
        """How many of its tokens have their KV, on the device or on the host."""
        return self.memory.num_computed

    @property
    def num_to_fill(self) -> int:
        """How many tokens need KV before the sequence can generate its next token.

        That is its prompt. After a drop it is every token that had KV before the drop, if those are more.
        """
        return max(len(self.request.prompt_token_ids), self.memory.replay_to)

    @property
    def is_half(self) -> bool:
        """Whether tokens are still to be fed before it generates: of its prompt, or of a replay after a drop."""
        return self.memory.num_computed < self.num_to_fill

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)
