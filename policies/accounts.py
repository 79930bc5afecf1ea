"""What a policy keeps of each live sequence and of each team, and the order of a team's own sequences.

`Levels`, `LagMeter`, `Promotions` and the policy that picks write these; each field says whose it is where that is not
plain. `place` is one global counter, drawn at arrival and at each demotion. Both append, so every queue is sorted by
place by construction: joining, leaving and demotion are O(1), and nothing is ever sorted. `rank` is the order between
teams that follows: 2 * level, but 2 * level - 3 during a minimum run, which lies between the ranks of those two levels
and one level better, and `LANE_P` in lane P.
"""

from collections.abc import Iterator
from heapq import merge
from itertools import chain, filterfalse
from operator import attrgetter

from policies.coast import CoastMode
from policies.config import PolicyConfig
from policies.sequences import TeamTerms
from policies.team_counters import POLICY_TOTALS

LANE_P = -4  # below every rank of a level


class RankedSequence:
    """What the policy keeps of one live sequence. Written by `Levels`, and by the policy while it picks."""

    __slots__ = (
        "arrival",
        "attained",
        "grant_left",
        "grant_unused",
        "has_generated",
        "is_apart",
        "is_away",
        "is_exhausted",
        "is_refused",
        "is_starving",
        "last_cost",
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
        self.last_cost = 0  # what its latest decode row would cost by the step profile; 0 before the first
        self.has_generated = False
        self.is_away = False  # its KV is on the host, or on the way there or back
        self.is_refused = False  # when last tried, its blocks were missing or on their way
        self.step = 0  # the last step it was taken into
        self.min_run_left = 0  # steps in which it still keeps its slot, as the memory says
        self.grant_left = 0  # work it may still do in lane P
        self.grant_unused = 0  # what was left of a grant that it handed back
        self.last_service = 0  # when its last step ended; its arrival until then
        self.is_starving = False  # in its team's promotion queue
        self.is_exhausted = False  # since it starves, it has found the budget too small
        self.num_promotions = 0


was_taken = attrgetter("step")  # true once it was in a step
_is_apart = attrgetter("is_apart")
_by_rank = attrgetter("rank", "place")
_by_arrival = attrgetter("arrival")


has_token = attrgetter("has_generated")  # true once it has produced a token


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


class TeamShare:
    """One team's account. Written by `LagMeter`, and by the policy while it picks."""

    __slots__ = (
        "backlogged_us",
        "coast",
        "is_configured",
        "lag",
        "left_at",
        "levels",
        "num_away",
        "num_live",
        "num_refused",
        "num_started",
        "num_taken",
        "provisional",
        "step_cost",
        "step_decode",
        "step_overhead",
        "team_id",
        "terms",
        "totals",
        "unit",
        "was_active",
        "weight",
    )

    def __init__(self, terms: TeamTerms, config: PolicyConfig) -> None:
        self.team_id = terms.team_id
        self.terms = terms
        self.weight = terms.weight
        self.is_configured = True
        self.levels = LevelQueues(config)
        self.coast = CoastMode(config)
        self.unit = 1  # scale / weight: what a microsecond of cost adds to `lag`
        self.lag = 0  # D times scale, with `provisional` while a step is being picked
        self.provisional = 0  # the part of `lag` that is only expected so far
        self.left_at = 0  # virtual time, times scale, when it last became inactive
        self.num_live = 0
        self.num_refused = 0  # of the live ones, those refused when last tried
        self.num_away = 0  # of the live ones, those whose KV is not on the device
        self.num_started = 0  # of the live ones, those taken at least once
        self.num_taken = 0  # of the live ones, those in the latest step
        self.step_cost = 0  # of its rows, and its overheads
        self.step_decode = 0  # the part of `step_cost` that is for decode rows
        self.step_overhead = 0
        # The declared counters that are running totals, by name. A counter that is not declared is a KeyError.
        self.totals = dict.fromkeys(POLICY_TOTALS, 0)
        self.backlogged_us = 0
        self.was_active = False

    @property
    def is_able(self) -> bool:
        """It has a sequence that was not refused when last tried."""
        return self.num_live > self.num_refused
