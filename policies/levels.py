"""Levels inside a team: skip-join, quanta on work, demotion, and the order of arrival inside a level.

Skip-join MLFQ after FastServe (Wu et al., arXiv 2305.05920, algorithm 1): a sequence joins the first level whose
quantum holds its prefill, and falls one level each time it has used up its quantum. The meter is stand-alone *work*,
never wall time, so strangers in the batch cannot demote anyone.

A coasting team (`policies.coast`) keeps its levels but offers its sequences in order of arrival. That order is kept for
every team, so a change of mode sorts nothing.

Two kinds of sequence stand elsewhere for a while, and go back to their level and place afterwards:

* *lane P*, above level 0: the one that holds its team's promotion grant (`policies.promotion`);
* the *minimum run*: a sequence whose KV has just come back keeps its slot against all but lane P and those two levels
  better, so that copies are not made for nothing (run-to-parity, after EEVDF). How long, the memory says and counts
  (`Policy.protect`).

Ranks and places are described in `policies.accounts`.
"""

from collections.abc import Iterable

from policies.accounts import RankedSequence, TeamShare
from policies.config import PolicyConfig
from policies.promotion import Promotions
from policies.sequences import Served

NO_QUANTUM = 1 << 62  # the last level's: no sequence does this much work


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

    def admit(self, seq_id: int, team: TeamShare, prefill_work_us: int, start_level: int) -> RankedSequence:
        """A new sequence at the end of the level it joins."""
        next_work = min(prefill_work_us, self._chunk_work) if prefill_work_us > 0 else self._decode_work
        level = self.join_level(prefill_work_us, start_level)
        sequence = RankedSequence(seq_id, team, level, self._draw_place(), prefill_work_us, next_work)
        team.levels.push(sequence)
        return sequence

    def charge(self, rows: Iterable[tuple[RankedSequence, Served]], now_us: int, promotions: Promotions) -> None:
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
            if sequence.is_apart and promotions.pay(sequence, work):
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

    def _draw_place(self) -> int:
        self._next_place += 1
        return self._next_place
