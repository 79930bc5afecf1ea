"""What one step does and what came of it: the frozen values between scheduler and runner."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from engine.wire.messages import SamplingParams


class Row(msgspec.Struct, frozen=True):  # a dataclass takes three times as long to make, 64 times a step
    """One sequence's part of a step: feed `token_ids` at positions start, start+1, ... and maybe sample the next one.

    A decode row feeds exactly one token that was generated before; every other row is a chunk of prompt (or, after a
    recompute, of prompt plus generated tokens).
    """

    seq_id: int
    is_decode: bool
    start: int  # tokens whose KV is already in the blocks
    token_ids: Sequence[int]
    block_table: Sequence[int]  # device block ids, enough for start + len(token_ids) tokens
    samples: bool  # the row's last position yields a token
    sampling: SamplingParams
    num_generated: int  # tokens generated so far; the new token's absolute position is start + len(token_ids)


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """One sequence's blocks to move: pairs of (source block, destination block).

    From the plan that holds it until a StepResult names `copy_id` in `copies_done` or `copies_failed`, nobody reads or
    writes the destination, nobody writes the source, and neither is given to anyone else.
    """

    copy_id: int  # unique for the life of the engine
    seq_id: int
    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: who runs, which blocks are copied. The runner starts the copies out, then the copies in, then the
    forward pass; no row uses a block of a copy that is not done. A plan without rows only copies; one without anything
    waits until a copy in flight is done.
    """

    step_id: int
    rows: tuple[Row, ...]
    copies_out: tuple[BlockCopy, ...] = ()
    copies_in: tuple[BlockCopy, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a runner returns for a plan."""

    step_id: int
    duration_us: int  # measured (or simulated) time of the step: copies, forward pass, sampling
    token_ids: Mapping[int, int]  # seq_id -> sampled id, for the rows that sample
    failed: Mapping[int, str] = field(default_factory=dict)  # seq_id -> why this row alone failed
    copies_done: Sequence[int] = ()  # copy ids that are complete, of this plan or earlier ones; each is named once
    copy_us: int = 0  # the part of duration_us that the step stood still for copies
    copies_failed: Sequence[int] = ()  # copy ids given up, which touch no block any more; each is named once
    # seq_id -> the part of duration_us, beside copy_us, that only this failed row caused: attempts that raised
    blamed_us: Mapping[int, int] = field(default_factory=dict)
    num_raised: int = 0  # attempts to run rows that raised
