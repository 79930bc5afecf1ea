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

from policies.mlfq import Levels, RankedSequence
from policies.promotion import Promotions
from policies.sequences import Turn
from policies.shares import LagMeter, TeamShare


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
        ordered: list[tuple[int, int, int, int, RankedSequence]] = []
        for team, members in wanted.items():
            gate_us = self._gate_us(team, active_weight)
            ahead = self._num_ahead(team, members)
            part = slots * team.weight
            lag = team.lag - team.provisional
            for sequence, work_us in self._work_before(team, members):
                next_us = work_us * active_weight // part if part > active_weight else work_us
                promoted_us = self._promotions.wait_us(sequence, ahead[sequence], now_us)
                if promoted_us is not None:
                    next_us = min(next_us, promoted_us)
                order = sequence.arrival if team.levels.is_coasting else sequence.place
                ordered.append((max(gate_us, next_us), sequence.rank, lag, order, sequence))
        ordered.sort(key=lambda entry: entry[:4])
        return [Turn(sequence.seq_id, enst_us) for enst_us, _, _, _, sequence in ordered]

    def _gate_us(self, team: TeamShare, active_weight: int) -> int:
        meter = self._meter
        if meter.theta is None:
            return 0
        over = team.lag - team.provisional - meter.band()[0] - meter.theta
        return max(0, -(-over * (active_weight - team.weight) // meter.scale))

    def _num_ahead(self, team: TeamShare, members: Iterable[RankedSequence]) -> dict[RankedSequence, int]:
        """How many of the team would get a grant before each of these."""
        budget = self._promotions.budget(team)
        queue = list(budget.queue) if budget is not None else []
        position = {sequence: index for index, sequence in enumerate(queue)}
        return {sequence: position.get(sequence, len(queue)) for sequence in members}

    def _work_before(
        self, team: TeamShare, members: dict[RankedSequence, None]
    ) -> Iterable[tuple[RankedSequence, int]]:
        """For each of these, what the team's sequences before it may still do before its turn."""
        if team.levels.is_coasting:
            yield from self._work_to_the_end(team, members)
            return
        quanta, quanta_before = self._levels.quanta, self._quanta_before
        last = self._levels.last_level
        count = [0] * (last + 1)  # of those before, outside of lane P and minimum runs
        rest = [0] * (last + 1)  # of their quanta
        apart: list[RankedSequence] = []
        left = len(members)
        for sequence in team.levels.walk():
            level = sequence.level
            if sequence in members:
                target = max(0, level - 1) if sequence.min_run_left else level
                work = rest[target] if target == level else 0
                for better in range(target):
                    work += rest[better] + count[better] * (quanta_before[target] - quanta_before[better + 1])
                yield sequence, work + sum([self._work_apart(other, sequence) for other in apart])
                left -= 1
                if not left:
                    return
            if sequence.is_apart:
                apart.append(sequence)
                continue
            count[level] += 1
            rest[level] += sequence.attained if level == last else max(0, quanta[level] - sequence.used)

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
