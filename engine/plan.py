"""What one step does, and what came of it: the frozen values that scheduler and runner exchange."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from engine.wire.messages import SamplingParams


class Row(msgspec.Struct, frozen=True):  # making a dataclass takes three times as long, and a step makes up to 64 rows
    """One sequence's part of a step: feed `token_ids` at positions start, start + 1, ..., and maybe sample a token.

    A decode row feeds exactly one token, which an earlier step generated. Every other row feeds a chunk of the prompt.
    When a sequence replays after its KV was dropped, its chunks go on through the tokens it has generated.
    """

    seq_id: int
    is_decode: bool
    start: int  # how many tokens have their KV in the blocks already
    token_ids: Sequence[int]
    block_table: Sequence[int]  # device block ids, enough for start + len(token_ids) tokens
    samples: bool  # the row's last position yields a token
    sampling: SamplingParams
    num_generated: int  # tokens generated before this step; a new token's position is start + len(token_ids)


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Blocks of one sequence to copy: pairs of (source block, destination block).

    The copy is in flight from the plan that holds it until a StepResult names `copy_id`, in `copies_done` or in
    `copies_failed`. While a copy is in flight:

    * nobody reads or writes a destination block;
    * nobody writes a source block;
    * no source or destination block is freed or given to another sequence.
    """

    copy_id: int  # unique for the life of the engine
    seq_id: int
    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: the rows to run and the blocks to copy.

    The runner starts the copies out (device to host), then the copies in, then the forward pass. No row uses a block of
    a copy in flight. A plan without rows only copies. A plan with neither rows nor copies waits until a copy in flight
    is over.
    """

    step_id: int
    rows: tuple[Row, ...]
    copies_out: tuple[BlockCopy, ...] = ()
    copies_in: tuple[BlockCopy, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a runner returns for a plan."""

    step_id: int
    duration_us: int  # measured or simulated time of the step: copies, forward pass and sampling
    token_ids: Mapping[int, int]  # seq_id -> sampled id, for the rows that sample
    failed: Mapping[int, str] = field(default_factory=dict)  # seq_id -> why this row alone failed
    copies_done: Sequence[int] = ()  # ids of complete copies, of this plan or an earlier plan; each is named once
    copy_us: int = 0  # the part of duration_us in which the step stood still for copies
    copies_failed: Sequence[int] = ()  # ids of copies given up, which touch no block any more; each is named once
    # seq_id -> the part of duration_us, copy_us excluded, of the attempts that raised because of this failed row
    blamed_us: Mapping[int, int] = field(default_factory=dict)
    num_raised: int = 0  # how many attempts to run rows raised an exception
