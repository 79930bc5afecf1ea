"""Requests and their sequences: what was asked, where it stands, and the one table of legal status changes.

A `Request` is one HTTP call and never changes. A `Sequence` is one row of a batch: it has one status, one block table
and one seed. Only the scheduler writes a sequence's status, and only through `Sequence.move_to`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from engine.blocks import BlockTable
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


TRANSITIONS: Mapping[Status, tuple[Status, ...]] = {
    Status.WAITING: (Status.RUNNING, Status.FINISHED),
    Status.RUNNING: (Status.PAUSED, Status.FINISHED),
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
class Sequence:
    """One batch row over its life. `num_computed` counts tokens whose KV is in its blocks."""

    seq_id: int
    request: Request
    table: BlockTable
    num_blocks_max: int  # what prompt and clamped max tokens will occupy
    level: int
    status: Status = Status.WAITING
    num_computed: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    level_path: list[int] = field(default_factory=list)
    device_us: int = 0  # sum of its charges
    first_step_us: int | None = None
    first_token_us: int | None = None
    ended_us: int | None = None
    num_preemptions: int = 0
    num_refusals: int = 0  # steps since it last ran in which it was refused by itself: its blocks did not fit
    num_closed_before: int = 0  # the count of closed steps when it came
    finish_reason: FinishReason | None = None
    error: str = ""  # why, for the reason "error"
    num_claim: int = 0  # blocks it must be able to have to start (engine.memory.starts)
    num_claimed: int = 0  # blocks it counts for while it is started
    num_promised: int = 0  # blocks of its half-computed prompt that it does not have yet, while it is on the device
    num_wanted: int = 0  # device blocks it wanted when it was last refused
    replay_to: int = 0  # tokens that had KV when it was dropped: computed again, without sampling
    displaced_by: int | None = None  # the team that pays its way back, while it is away or replaying
    displaced_for: int = -1  # the sequence that room was made for
    num_swaps: int = 0  # times it was moved to the host
    num_promotions: int = 0  # grants it had, once it has ended
    num_recomputes: int = 0  # times its KV was dropped
    work_us: int = 0  # stand-alone work of its tokens
    overhead_us: int = 0  # the part of device_us for copies and replays that its team caused
    last_us: int = 0  # when its latest step ended; its arrival before
    longest_pause_us: int = 0
    pause_bound_us: int = 0  # largest bound that held when it began to starve
    is_starving: bool = False  # its team's starving_after has passed since `last_us`
    min_run_left: int = 0  # steps it is safe in since its upload
    uploaded_step: int | None = None  # the step before which its latest upload ended

    def move_to(self, status: Status) -> None:
        """Change status; anything outside `TRANSITIONS` is a bug."""
        assert status in TRANSITIONS[self.status], f"sequence {self.seq_id}: {self.status} -> {status}"
        self.status = status

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def is_started(self) -> bool:
        """It has KV somewhere."""
        return self.status is not Status.WAITING and self.status is not Status.DROPPED

    @property
    def num_to_fill(self) -> int:
        """Tokens whose KV it needs before it generates: its prompt, or all that had KV before a drop."""
        return max(len(self.request.prompt_token_ids), self.replay_to)

    @property
    def is_half(self) -> bool:
        """Its prompt is not whole yet, or not whole again."""
        return self.num_computed < self.num_to_fill

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)
