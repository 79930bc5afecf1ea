"""Levels inside a team: skip-join, quanta on work, demotion, and the order of arrival inside a level.

Skip-join MLFQ after FastServe (Wu et al., arXiv 2305.05920, algorithm 1): a sequence joins the first level whose
quantum holds its prefill, and falls one level each time it has used up its quantum. The meter is stand-alone *work*,
never wall time, so strangers in the batch cannot demote anyone.

`place` is one global counter, drawn at arrival and at each demotion. Both append, so every queue is sorted by place
by construction: joining, leaving and demotion are O(1), and nothing is ever sorted.

A coasting team (`policies.coast`) keeps its levels but offers its sequences in order of arrival. That order is kept for
every team, so a change of mode sorts nothing.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING

from policies.config import PolicyConfig
from policies.sequences import Served

if TYPE_CHECKING:
    from policies.shares import TeamShare

NO_QUANTUM = 1 << 62  # the last level's: no sequence does this much work


class RankedSequence:
    """What the policy keeps of one live sequence. Written by `Levels`, and by the policy while it picks."""

    __slots__ = (
        "attained",
        "has_generated",
        "is_refused",
        "level",
        "next_work",
        "place",
        "prefill_work",
        "seq_id",
        "step",
        "team",
        "used",
    )

    def __init__(self, seq_id: int, team: "TeamShare", level: int, place: int, prefill_work: int, next_work: int):
        self.seq_id = seq_id
        self.team = team
        self.level = level
        self.place = place
        self.used = 0  # work done in this level
        self.attained = 0  # work done in all
        self.prefill_work = prefill_work
        self.next_work = next_work  # what its next step will take, as far as the policy can tell
        self.has_generated = False
        self.is_refused = False  # when last tried, its blocks were missing or on their way
        self.step = 0  # the last step it was taken into


was_taken = attrgetter("step")  # true once it was in a step


class LevelQueues:
    """One team's sequences by (level, place), or by arrival while it coasts. `head` is the first of them, None when
    there are none.

    Everything that orders a team's own sequences is in here: a lane above level 0 is one more queue in front.
    """

    __slots__ = ("arrivals", "head", "is_coasting", "queues")

    def __init__(self, config: PolicyConfig) -> None:
        # Dicts as ordered sets: append, remove anywhere, and walk from the front, all O(1) a step.
        self.queues: tuple[dict[RankedSequence, None], ...] = tuple({} for _ in range(config.levels))
        self.arrivals: dict[RankedSequence, None] = {}
        self.head: RankedSequence | None = None
        self.is_coasting = False

    def push(self, sequence: RankedSequence) -> None:
        """Append a newcomer; its place must be the newest."""
        self.arrivals[sequence] = None
        self.queues[sequence.level][sequence] = None
        head = self.head
        if head is None or (sequence.level < head.level and not self.is_coasting):
            self.head = sequence

    def remove(self, sequence: RankedSequence) -> None:
        """Take out, wherever it stands."""
        del self.arrivals[sequence]
        del self.queues[sequence.level][sequence]
        if self.head is sequence:
            self.head = next(self.walk(), None)

    def demote(self, sequence: RankedSequence, place: int) -> None:
        """To the end of the next level, whose newest place is `place`."""
        del self.queues[sequence.level][sequence]
        sequence.level += 1
        sequence.used = 0
        sequence.place = place
        self.queues[sequence.level][sequence] = None
        if self.head is sequence and not self.is_coasting:
            self.head = next(self.walk(), None)

    def set_coasting(self, is_coasting: bool) -> None:
        """Change the order, between steps only."""
        self.is_coasting = is_coasting
        self.head = next(self.walk(), None)

    def walk(self) -> Iterator[RankedSequence]:
        """All sequences, best first. Invalid once the queues change."""
        return iter(self.arrivals) if self.is_coasting else chain.from_iterable(self.queues)


class Levels:
    """The rules of the levels, and the place counter."""

    def __init__(self, config: PolicyConfig) -> None:
        self.last_level = config.levels - 1
        self.quanta = (*config.quanta(), NO_QUANTUM)
        self._decode_work = config.decode_work_us
        self._chunk_work = config.chunk_work_us
        self._next_place = 0

    def join_level(self, prefill_work_us: int, start_level: int) -> int:
        """Skip-join: the first level whose quantum holds the prefill, but not above `start_level`."""
        level = min(start_level, self.last_level)
        while self.quanta[level] < prefill_work_us:
            level += 1
        return level

    def admit(self, seq_id: int, team: "TeamShare", prefill_work_us: int, start_level: int) -> RankedSequence:
        """A new sequence at the end of the level it joins."""
        next_work = min(prefill_work_us, self._chunk_work) if prefill_work_us > 0 else self._decode_work
        level = self.join_level(prefill_work_us, start_level)
        sequence = RankedSequence(seq_id, team, level, self._draw_place(), prefill_work_us, next_work)
        team.levels.push(sequence)
        return sequence

    def charge(self, rows: Iterable[tuple[RankedSequence, Served]]) -> None:
        """Book the work of a step, and demote where the quantum is used up. Never before the first token: a demotion
        in the middle of a prefill would only throw the work already sunk behind newer prompts.
        """
        quanta = self.quanta
        for sequence, row in rows:
            work = row.work_us
            sequence.attained += work
            sequence.used += work
            if row.has_generated:
                if sequence.has_generated:
                    sequence.next_work = work
                else:  # the step that ends the prefill says nothing about a decode step
                    sequence.next_work = self._decode_work
                    sequence.has_generated = True
                if sequence.used >= quanta[sequence.level]:
                    sequence.team.levels.demote(sequence, self._draw_place())
            else:
                left = sequence.prefill_work - sequence.attained
                # A chunk may have been cut short by the step's token budget; the next one is a whole one again.
                sequence.next_work = min(max(work, self._chunk_work), left) if left > 0 else work

    def _draw_place(self) -> int:
        self._next_place += 1
        return self._next_place
