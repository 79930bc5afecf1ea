"""ENST, the estimated next scheduling time: when a sequence that is not running will probably run (FastServe, arXiv
2305.05920, its section on KV swapping). The swap planner uploads the smallest first and offloads the largest first.

    ENST(i) = max(T_gate(team), min(T_promote(i), T_exec(i)))

* T_exec: what the sequences before i in its team may still do before they are behind it, over the slots that the
  team's part of the device comes to (at least one). One in a better level may use up its quantum and those of the
  levels down to i's; one in the same level the rest of its quantum; in the last level, which has none, as much again
  as it has done.
  A coasting team runs each to its end, so there it is what a typical request of the team has left.
* T_promote: when i starves and its team's budget can pay a grant for it.
* T_gate: while a team is over the gate, the gap closes at (1 / sum of the other active teams' weights) per microsecond.

FastServe's formula is the case of one team. An estimate in microseconds at one microsecond of work for a microsecond of
the device; it orders candidates and is compared with copy times, nothing is promised about it.
"""

from collections.abc import Iterable
from itertools import accumulate
from operator import attrgetter

from policies.accounts import RankedSequence, TeamShare
from policies.lag import LagMeter
from policies.levels import Levels
from policies.promotion import Promotions
from policies.sequences import Turn

_by_rank = attrgetter("rank", "place")


class TurnEstimator:
    """Computes ENSTs from the policy's books. Keeps nothing, changes nothing."""

    def __init__(self, levels: Levels, meter: LagMeter, promotions: Promotions) -> None:
        self._levels = levels
        self._meter = meter
        self._promotions = promotions
        self._quanta_before = (0, *accumulate(levels.quanta[:-1]))  # by level, the quanta of the levels above it

    def turns(self, sequences: Iterable[RankedSequence], slots: int, now_us: int) -> list[Turn]:
        """Soonest first; ties in the order they would be picked."""
        wanted: dict[TeamShare, dict[RankedSequence, None]] = {}
        for sequence in sequences:
            wanted.setdefault(sequence.team, {})[sequence] = None
        active_weight = sum(team.weight for team in self._meter.active)
        wait_us = self._promotions.wait_us
        ordered: list[tuple[int, int, int, int, RankedSequence]] = []
        for team, members in wanted.items():
            gate_us = self._gate_us(team, active_weight)
            ahead = self._num_ahead(team)
            part = slots * team.weight
            lag = team.lag - team.provisional
            is_coasting = team.levels.is_coasting
            for sequence, work_us in self._work_before(team, members):
                next_us = work_us * active_weight // part if part > active_weight else work_us
                if next_us > gate_us:
                    promoted_us = wait_us(sequence, ahead.get(sequence, len(ahead)), now_us)
                    if promoted_us is not None and promoted_us < next_us:
                        next_us = promoted_us
                order = sequence.arrival if is_coasting else sequence.place  # no two have the same
                ordered.append((next_us if next_us > gate_us else gate_us, sequence.rank, lag, order, sequence))
        ordered.sort()
        return [Turn(sequence.seq_id, enst_us) for enst_us, _, _, _, sequence in ordered]

    def _gate_us(self, team: TeamShare, active_weight: int) -> int:
        meter = self._meter
        if meter.widths is None:
            return 0
        over = team.lag - team.provisional - meter.band()[0] - meter.widths.theta
        return max(0, -(-over * (active_weight - team.weight) // meter.scale))

    def _num_ahead(self, team: TeamShare) -> dict[RankedSequence, int]:
        """How many of the team would get a grant before each of those that starve."""
        budget = self._promotions.budget(team)
        return {sequence: index for index, sequence in enumerate(budget.queue)} if budget is not None else {}

    def _work_before(
        self, team: TeamShare, members: dict[RankedSequence, None]
    ) -> Iterable[tuple[RankedSequence, int]]:
        """For each of these, what the team's sequences before it may still do before its turn."""
        if team.levels.is_coasting:
            yield from self._work_to_the_end(team, members)
            return
        quanta, quanta_before = self._levels.quanta, self._quanta_before
        last = self._levels.last_level
        queues, granted = team.levels.queues, team.levels.granted
        kept = sorted([one for one in team.levels.kept if one is not granted], key=_by_rank)
        apart = [granted] if granted is not None else []  # with those of `kept` that a level comes after
        if granted is not None and granted in members:
            yield granted, 0
        num_wanted = [0] * (last + 1)
        for sequence in members:
            num_wanted[sequence.level] += not sequence.is_apart
        deepest = max([sequence.level for sequence in members], default=-1)
        whole: list[tuple[int, int]] = []  # of each level before: its sequences, and the rest of their quanta
        num_passed = 0  # of `kept`
        for level in range(deepest + 1):
            quantum = quanta[level]
            above = 0
            for better, (count, rest) in enumerate(whole):
                above += rest + count * (quanta_before[level] - quanta_before[better + 1])
            while num_passed < len(kept) and kept[num_passed].level <= level + 1:
                sequence = kept[num_passed]
                if sequence in members:
                    yield sequence, above + sum([self._work_apart(other, sequence) for other in apart])
                apart.append(sequence)
                num_passed += 1
            queue = queues[level]
            left = num_wanted[level]
            if not left:
                plain = [one.used for one in queue if not one.is_apart]
                whole.append((len(plain), sum([quantum - used for used in plain if used < quantum])))
                continue
            count = rest = 0
            for sequence in queue:
                if sequence.is_apart:
                    continue
                if left and sequence in members:
                    work = above + rest
                    if apart:
                        work += sum([self._work_apart(other, sequence) for other in apart])
                    yield sequence, work
                    left -= 1
                    if not left and level == deepest:
                        return
                count += 1
                if level == last:
                    rest += sequence.attained
                elif sequence.used < quantum:
                    rest += quantum - sequence.used
            whole.append((count, rest))

    def _work_apart(self, other: RankedSequence, sequence: RankedSequence) -> int:
        """What `other`, in lane P or in its minimum run, may do before `sequence`, and after that by its level."""
        special = max(other.grant_left, other.min_run_left * other.next_work)
        level, target = other.level, sequence.level
        if (level, other.place) > (target, sequence.place):
            return special
        if level == self._levels.last_level:
            return special + other.attained
        own = max(0, self._levels.quanta[level] - other.used)
        if level < target:
            own += self._quanta_before[target] - self._quanta_before[level + 1]
        return other.grant_left + own

    def _work_to_the_end(
        self, team: TeamShare, members: dict[RankedSequence, None]
    ) -> Iterable[tuple[RankedSequence, int]]:
        typical = team.coast.mean_work_us()
        left = len(members)
        work = 0
        for sequence in team.levels.walk():
            if sequence in members:
                yield sequence, work
                left -= 1
                if not left:
                    return
            work += max(sequence.next_work, typical - sequence.attained)
