"""Baselines to compare with. First come, first served: what most engines do, and the control that must fail a fairness
test: a team that sends more gets more.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from policies.accounts import RankedSequence, may_fit, was_taken
from policies.books import MeteredPolicy
from policies.config import PolicyConfig
from policies.sequences import SequenceTerms, Starving, Turn


class Fcfs(MeteredPolicy):
    """Order of arrival over all teams: one level, no gate, nobody is displaced or promoted. Implements
    `policies.policy.Policy`.

    A refused candidate is passed over in this step only, as in every policy, so a large head does not block others.
    """

    name = "fcfs"

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(replace(config, levels=1, quanta_us=(), is_gated=False, coast=False, promotion_percent=0))
        self._queue: dict[RankedSequence, None] = {}
        self._walk: Iterator[RankedSequence] = iter(())
        self._top: RankedSequence | None = None

    def arrive(self, sequence: SequenceTerms, now_us: int) -> int:
        level = super().arrive(sequence, now_us)
        self._queue[self._sequences[sequence.seq_id]] = None
        return level

    def begin(self, now_us: int) -> list[Starving]:
        starving = super().begin(now_us)
        self._walk = iter(self._queue)
        self._top = next(self._walk, None)
        return starving

    def best(self) -> int | None:
        return self._top.seq_id if self._top is not None else None

    def take(self, seq_id: int, work_us: int, cost_us: int | None = None) -> None:
        self._book_taken(self._pop(seq_id), work_us, cost_us)

    def refuse(self, seq_id: int) -> None:
        self._book_refused(self._pop(seq_id))

    def refuse_new(self) -> None:
        super().refuse_new()
        self._walk = filter(was_taken, self._walk)
        if self._top is not None and not self._top.step:
            self._top = next(self._walk, None)

    def leave_prompts(self, team_id: int) -> None:
        self._pass_over(lambda sequence: sequence.has_generated or sequence.team.team_id != team_id)

    def leave_new(self, team_id: int) -> None:
        self._pass_over(lambda sequence: sequence.step > 0 or sequence.team.team_id != team_id)

    def leave_team(self, team_id: int) -> None:
        self._pass_over(lambda sequence: sequence.team.team_id != team_id)

    def _pass_over(self, may_stay: Callable[[RankedSequence], bool]) -> None:
        """Only those that `may_stay` are offered in what is left of this step."""
        self._walk = filter(may_stay, self._walk)
        if self._top is not None and not may_stay(self._top):
            self._top = next(self._walk, None)

    def refuse_away(self) -> None:
        """Pass over them."""
        self._walk = filter(may_fit, self._walk)
        if self._top is not None and not may_fit(self._top):
            self._top = next(self._walk, None)

    def leave(self, seq_id: int, now_us: int) -> None:
        sequence = self._sequences[seq_id]
        super().leave(seq_id, now_us)
        del self._queue[sequence]

    def turns(self, seq_ids: Collection[int], slots: int, now_us: int) -> list[Turn]:
        """In order of arrival, all at once: nobody is displaced, so there is nothing to wait for but room."""
        arrivals = {seq_id: self._sequences[seq_id].arrival for seq_id in seq_ids}
        return [Turn(seq_id, 0) for seq_id in sorted(arrivals, key=lambda seq_id: arrivals[seq_id])]

    def _pop(self, seq_id: int) -> RankedSequence:
        sequence = self._top
        assert sequence is not None and sequence.seq_id == seq_id, f"{seq_id} was not the best"
        self._top = next(self._walk, None)
        return sequence
