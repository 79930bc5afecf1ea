"""Values between the swap planner (`engine.memory.planner`), what it is shown (`engine.memory.view`) and who carries
its moves out (`engine.memory.mover`).
"""

from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from engine.plan import BlockCopy
from engine.request import Sequence


class Kind(StrEnum):
    """What a sequence needs blocks for."""

    GROW = "grow"  # it has KV on the device and cannot take its next tokens
    UPLOAD = "upload"  # its KV is on the host
    START = "start"  # it has no KV, or lost it


class Need(msgspec.Struct, frozen=True):
    """A sequence that was refused for want of `num_blocks` device blocks."""

    seq_id: int
    team_id: int
    kind: Kind
    num_blocks: int


class Holder(msgspec.Struct, frozen=True):
    """The holder of the reservation, as the planner sees it."""

    seq_id: int
    ahead: frozenset[int] = frozenset()  # teams that the gate would hold back for the holder's
    large: frozenset[int] = frozenset()  # of these, teams that hold more than their share of the blocks


class Resident(msgspec.Struct, frozen=True):
    """A sequence with all its KV on the device and no copy in flight."""

    seq_id: int
    team_id: int
    num_blocks: int
    num_spare: int = 0  # of these, blocks without KV yet
    num_dirty: int = 0  # blocks that a move out would copy
    num_host: int = 0  # host blocks it has
    is_whole: bool = True  # fully prefilled, nothing to replay
    num_computed: int = 0
    attained_us: int = 0
    is_protected: bool = False  # G2
    is_idle: bool = True  # it was not in the latest step
    replay_us: int = 0  # what computing its KV again would take; only asked for where KV is dropped

    @property
    def num_new_host(self) -> int:
        return max(0, self.num_blocks - self.num_spare - self.num_host)


class Away(msgspec.Struct, frozen=True):
    """A sequence with its KV on the host."""

    seq_id: int
    team_id: int
    num_blocks: int  # host blocks: what an upload copies
    num_wanted: int  # device blocks it wants free to come back: its own and those of its next tokens
    is_whole: bool = True
    num_computed: int = 0


class Pools(msgspec.Struct, frozen=True):
    """Blocks, in this moment."""

    free: int
    incoming: int  # device blocks that copies in flight will free
    promised: int  # missing blocks of the prompts that are half computed
    reserve: int  # G4: growth of the next steps
    host_free: int
    link_us: int  # G3: what the link may still be used


class Move(msgspec.Struct, frozen=True):
    """`kind` is out, in, drop, or forget (a clean host copy). Room is made for `for_seq` of `team_id`, which pays."""

    kind: str
    seq_id: int
    team_id: int
    for_seq: int = -1


@dataclass(slots=True)
class Copies:
    """The copies of the next plan, and the sequences of the newest step whose KV they take away."""

    out: list[BlockCopy] = field(default_factory=list)
    back: list[BlockCopy] = field(default_factory=list)
    displaced: list[Sequence] = field(default_factory=list)
