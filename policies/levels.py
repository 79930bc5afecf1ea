"""Levels inside a team: skip-join, quanta on work, demotion, and the order of arrival inside a level.

Skip-join MLFQ after FastServe (Wu et al., arXiv 2305.05920, algorithm 1): a sequence joins the first level whose
quantum holds its prefill, and falls one level each time it has used up its quantum. The meter is stand-alone *work*,
never wall time, so strangers in the batch cannot demote anyone.

`place` is one global counter, drawn at arrival and at each demotion. Both append, so every queue is sorted by place
by construction: joining, leaving and demotion are O(1), and nothing is ever sorted.

A coasting team (`policies.coast`) keeps its levels but offers its sequences in order of arrival. That order is kept for
every team, so a change of mode sorts nothing.

Two kinds of sequence stand elsewhere for a while, and go back to their level and place afterwards:

* *lane P*, above level 0: the one that holds its team's promotion grant (`policies.promotion`);
* the *minimum run*: one whose upload has just ended keeps its slot for `min_run_steps` steps against all but lane P
  and those two levels better, so that copies are not made for nothing (run-to-parity, after EEVDF).

`rank` is the order between teams that follows: 2 * level, but 2 * level - 3 during a minimum run, which lies between
the ranks of those two levels and one level better, and `LANE_P` in lane P.
"""

from collections.abc import Iterable, Iterator
from heapq import merge
from itertools import chain, filterfalse
from operator import attrgetter
from typing import TYPE_CHECKING

from policies.config import PolicyConfig
from policies.sequences import Served

if TYPE_CHECKING:
    from policies.lag import TeamShare
    from policies.promotion import Promotions

NO_QUANTUM = 1 << 62  # the last level's: no sequence does this much work
LANE_P = -4  # below every rank of a level


class RankedSequence:
    """What the policy keeps of one live sequence. Written by `Levels`, and by the policy while it picks."""

    __slots__ = (
        "arrival",
        "attained",
        "grant_left",
        "has_generated",
        "is_apart",
        "is_away",
        "is_exhausted",
        "is_refused",
        "is_starving",
        "last_service",
        "level",
        "min_run_left",
        "next_work",
        "num_promotions",
        "place",
        "prefill_work",
        "rank",
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
        self.arrival = place  # the place it arrived with: its order in a coasting team
        self.rank = 2 * level
        self.is_apart = False  # in lane P or in a minimum run
        self.used = 0  # work done in this level
        self.attained = 0  # work done in all
        self.prefill_work = prefill_work
        self.next_work = next_work  # what its next step will take, as far as the policy can tell
        self.has_generated = False
        self.is_away = False  # its KV is on the host, or on the way there or back
        self.is_refused = False  # when last tried, its blocks were missing or on their way
        self.step = 0  # the last step it was taken into
        self.min_run_left = 0  # steps in which it still keeps its slot
        self.grant_left = 0  # work it may still do in lane P
        self.last_service = 0  # when its last step ended; its arrival until then
        self.is_starving = False  # in its team's promotion queue
        self.is_exhausted = False  # since it starves, it has found the budget too small
        self.num_promotions = 0


was_taken = attrgetter("step")  # true once it was in a step
_is_apart = attrgetter("is_apart")
_by_rank = attrgetter("rank", "place")
_by_arrival = attrgetter("arrival")


def may_fit(sequence: RankedSequence) -> bool:
    """Not one that is away and was refused when last tried."""
    return not (sequence.is_away and sequence.is_refused)


class LevelQueues:
    """One team's sequences by (rank, place), or by arrival while it coasts. `head` is the first of them, None when
    there are none.

    Everything that orders a team's own sequences is in here. Those in lane P or in a minimum run also stay in the
    queue of their level, and are left out when it is walked: so each goes back to its place by a change of `rank`.
    """

    __slots__ = ("arrivals", "granted", "head", "is_coasting", "kept", "queues")

    def __init__(self, config: PolicyConfig) -> None:
        # Dicts as ordered sets: append, remove anywhere, and walk from the front, all O(1) a step.
        self.queues: tuple[dict[RankedSequence, None], ...] = tuple({} for _ in range(config.levels))
        self.arrivals: dict[RankedSequence, None] = {}
        self.head: RankedSequence | None = None
        self.is_coasting = False
        self.granted: RankedSequence | None = None  # in lane P
        self.kept: dict[RankedSequence, None] = {}  # in a minimum run

    def push(self, sequence: RankedSequence) -> None:
        """Append a newcomer; its place must be the newest."""
        self.arrivals[sequence] = None
        self.queues[sequence.level][sequence] = None
        head = self.head
        if head is None or (sequence.rank < head.rank and not self.is_coasting):
            self.head = sequence

    def remove(self, sequence: RankedSequence) -> None:
        """Take out, wherever it stands."""
        del self.arrivals[sequence]
        del self.queues[sequence.level][sequence]
        if sequence.is_apart:
            self.kept.pop(sequence, None)
            if self.granted is sequence:
                self.granted = None
        if self.head is sequence:
            self.head = next(self.walk(), None)

    def demote(self, sequence: RankedSequence, place: int) -> None:
        """To the end of the next level, whose newest place is `place`."""
        del self.queues[sequence.level][sequence]
        sequence.level += 1
        sequence.rank += 2
        sequence.used = 0
        sequence.place = place
        self.queues[sequence.level][sequence] = None
        if self.head is sequence and not self.is_coasting:
            self.head = next(self.walk(), None)

    def set_coasting(self, is_coasting: bool) -> None:
        """Change the order, between steps only."""
        self.is_coasting = is_coasting
        self.head = next(self.walk(), None)

    def grant(self, sequence: RankedSequence) -> None:
        """Into lane P, which must be empty."""
        assert self.granted is None
        self.granted = self.head = sequence
        sequence.rank = LANE_P
        sequence.is_apart = True

    def end_grant(self, sequence: RankedSequence) -> None:
        """Out of lane P, back to its level and place."""
        self.granted = None
        self._put_back(sequence)

    def keep(self, sequence: RankedSequence) -> None:
        """Start its minimum run."""
        self.kept[sequence] = None
        self._put_back(sequence)

    def end_keep(self, sequence: RankedSequence) -> None:
        """End its minimum run."""
        self.kept.pop(sequence, None)
        self._put_back(sequence)

    def _put_back(self, sequence: RankedSequence) -> None:
        if sequence is self.granted:
            return
        is_kept = sequence in self.kept
        sequence.is_apart = is_kept
        sequence.rank = 2 * sequence.level - 3 * is_kept
        self.head = next(self.walk(), None)

    def walk(self) -> Iterator[RankedSequence]:
        """All sequences, best first. Invalid once the queues change."""
        queue = iter(self.arrivals) if self.is_coasting else chain.from_iterable(self.queues)
        granted = self.granted
        if granted is None and not self.kept:
            return queue
        queue = filterfalse(_is_apart, queue)
        if self.kept:
            # In a coasting team levels order nothing, so nobody is two levels better.
            order = _by_arrival if self.is_coasting else _by_rank
            kept = sorted([sequence for sequence in self.kept if sequence is not granted], key=order)
            queue = chain(kept, queue) if self.is_coasting else merge(kept, queue, key=_by_rank)
        return queue if granted is None else chain((granted,), queue)


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

    def charge(self, rows: Iterable[tuple[RankedSequence, Served]], now_us: int, promotions: "Promotions") -> None:
        """Book the work of a step that ended at `now_us`, and demote where the quantum is used up. Never before the
        first token: a demotion in the middle of a prefill would only throw the work already sunk behind newer prompts.

        In lane P the budget pays, and what was used of the quantum stays as it was.
        """
        quanta = self.quanta
        for sequence, row in rows:
            work = row.work_us
            sequence.attained += work
            sequence.last_service = now_us
            if sequence.is_starving:
                promotions.end_starving(sequence)
            if sequence.is_apart and self._step_apart(sequence, work, promotions):
                self._foresee(sequence, work, row.has_generated)
                continue
            sequence.used += work
            if row.has_generated and sequence.has_generated:
                if work:  # replayed tokens are no work
                    sequence.next_work = work
            else:
                self._foresee(sequence, work, row.has_generated)
            if sequence.used >= quanta[sequence.level] and row.has_generated:
                sequence.team.levels.demote(sequence, self._draw_place())

    def _foresee(self, sequence: RankedSequence, work: int, has_generated: bool) -> None:
        """After a step of this work: what will the next one take?"""
        if has_generated and not sequence.has_generated:
            # The step that ends the prefill says nothing about a decode step.
            sequence.next_work = self._decode_work
            sequence.has_generated = True
        elif has_generated:
            sequence.next_work = work or sequence.next_work
        else:
            left = sequence.prefill_work - sequence.attained
            # A chunk may have been cut short by the step's token budget; the next one is a whole one again.
            sequence.next_work = min(max(work, self._chunk_work), left) if left > 0 else work

    def _step_apart(self, sequence: RankedSequence, work: int, promotions: "Promotions") -> bool:
        """A step of a sequence in lane P or in a minimum run. Returns whether the promotion budget has paid for it."""
        if sequence.min_run_left:
            sequence.min_run_left -= 1
            if not sequence.min_run_left:
                sequence.team.levels.end_keep(sequence)
        return promotions.pay(sequence, work)

    def _draw_place(self) -> int:
        self._next_place += 1
        return self._next_place
