"""What the policy's constants promise, beside what was: the longest pause (I8) and the lag between teams (I5).

A sequence *starves* when its team's `starving_after` has passed since its last step. At that moment its pause bound is
worked out, from the sequences of its team that starve before it, and kept beside the longest pause it really had.
"""

import heapq
from collections.abc import Iterable

from engine.request import Sequence
from policies.bounds import gate_width, pause_bound_us, step_width
from policies.config import PolicyConfig
from policies.sequences import TeamTerms

_CACHE_MAX = 10_000
_SLACK = 64


class Promises:
    """Owns the table of teams as the bounds need it, who starves, and each team's longest pause since the last look."""

    def __init__(self, config: PolicyConfig | None, upload_us: int, rate_percent: int = 100) -> None:
        """`config` None: the policy promises nothing. `upload_us` is the way back of the largest sequence's KV,
        `rate_percent` the part of the device's time that swapping leaves.
        """
        self._shares = config
        self._config = config if config is not None and config.promotion_percent else None
        self._upload_us = upload_us
        self._rate_percent = rate_percent
        self._teams: dict[int, TeamTerms] = {}
        self._bounds: dict[tuple[int, int], int] = {}  # by team and the number ahead
        self._due: list[tuple[int, int, Sequence]] = []  # heap of when it starves unless it has run since
        self._starving: dict[int, int] = {}  # by team
        self._longest_us: dict[int, int] = {}  # by team

    def configure(self, teams: Iterable[TeamTerms]) -> None:
        """The table of teams is this from now on."""
        self._teams = {terms.team_id: terms for terms in teams}
        self._bounds.clear()
        self._due = [
            (self._starves_us(sequence), sequence.seq_id, sequence)
            for _, _, sequence in self._due
            if not (sequence.is_finished or sequence.pause.is_starving)
        ]
        heapq.heapify(self._due)

    def bound_us(self, team_id: int, num_ahead: int) -> int:
        """The longest pause before a step of a team's sequence with so many ahead of it, also while blocks are short; 0
        when there is no bound."""
        if self._config is None or team_id not in self._teams:
            return 0
        key = team_id, num_ahead
        found = self._bounds.get(key)
        if found is None:
            if len(self._bounds) >= _CACHE_MAX:
                self._bounds.clear()
            found = self._bounds[key] = pause_bound_us(
                self._config,
                self._teams.values(),
                team_id,
                num_ahead,
                self._upload_us,
                is_short=True,
                rate_percent=self._rate_percent,
            )
        return found

    def lag_bound_us(self, *, is_short: bool) -> float:
        """The most that two able teams' lags may differ: Theta + 2u, and 2 Theta + 4u when blocks are short; 0 when
        nothing bounds it.
        """
        weights = [terms.weight for terms in self._teams.values()]
        if self._shares is None or not weights:
            return 0.0
        theta = gate_width(self._shares, weights)
        if theta is None:
            return 0.0
        width = theta + 2 * step_width(self._shares, weights)
        return float(2 * width if is_short else width)

    def watch(self, sequence: Sequence) -> None:
        """It has arrived: its first pause begins."""
        if self._config is not None:
            self._push(sequence)

    def look(self, now_us: int, num_live: int) -> None:
        """A step begins: who starves by now?"""
        due = self._due
        while due and due[0][0] <= now_us:
            sequence = heapq.heappop(due)[2]
            if sequence.is_finished or sequence.pause.is_starving:
                continue
            if self._starves_us(sequence) > now_us:
                self._push(sequence)
                continue
            team_id = sequence.request.team_id
            ahead = self._starving.get(team_id, 0)
            self._starving[team_id] = ahead + 1
            sequence.pause.is_starving = True
            # One that was promoted may run under its grant still: it is ahead, and not counted as starving.
            sequence.pause.bound_us = max(sequence.pause.bound_us, self.bound_us(team_id, ahead + 1))
        if len(due) > 2 * num_live + _SLACK:
            self._due = [entry for entry in due if not (entry[2].is_finished or entry[2].pause.is_starving)]
            heapq.heapify(self._due)

    def over(self, sequence: Sequence, pause_us: int) -> None:
        """A pause has ended, by a step or by the sequence's end."""
        sequence.pause.longest_us = max(sequence.pause.longest_us, pause_us)
        team_id = sequence.request.team_id
        if pause_us > self._longest_us.get(team_id, 0):
            self._longest_us[team_id] = pause_us
        if sequence.pause.is_starving:
            sequence.pause.is_starving = False
            self._starving[team_id] -= 1
            if not self._starving[team_id]:
                del self._starving[team_id]
            self._push(sequence)  # due at once, and then put to the right time, its step being over

    def take_longest_us(self) -> dict[int, int]:
        """By team, the longest pause that ended since the last call."""
        taken, self._longest_us = self._longest_us, {}
        return taken

    def _starves_us(self, sequence: Sequence) -> int:
        terms = self._teams.get(sequence.request.team_id)
        return sequence.last_us + (terms.starving_after_us if terms is not None else 1_000_000)

    def _push(self, sequence: Sequence) -> None:
        heapq.heappush(self._due, (self._starves_us(sequence), sequence.seq_id, sequence))
