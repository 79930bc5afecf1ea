"""What the policy's constants promise, beside what was: the longest pause (I8) and the lag between teams (I5).

When the policy says that a sequence begins to starve (`policies.promotion`), its pause bound is worked out, from the
sequences of its team that starve before it, and kept beside the longest pause it really had.
"""

from collections.abc import Iterable

from engine.request import Sequence
from policies.bounds import lag_bound, pause_bound_us
from policies.config import PolicyConfig
from policies.sequences import TeamTerms

_CACHE_MAX = 10_000


class Pauses:
    """Judges pauses. Owns each team's longest pause since the last look, and the bounds under the table of teams."""

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
        self._longest_us: dict[int, int] = {}  # by team

    def configure(self, teams: Iterable[TeamTerms]) -> None:
        """The table of teams is this from now on."""
        self._teams = {terms.team_id: terms for terms in teams}
        self._bounds.clear()

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
        return float(lag_bound(self._shares, weights, is_short=is_short) or 0)

    def starve(self, sequence: Sequence, num_ahead: int) -> None:
        """It begins to starve, as the policy says, behind so many of its team that have not run since they did."""
        # One that was promoted may run under its grant still: it is ahead, and not counted as starving.
        bound_us = self.bound_us(sequence.request.team_id, num_ahead + 1)
        sequence.pause.bound_us = max(sequence.pause.bound_us, bound_us)

    def over(self, sequence: Sequence, pause_us: int) -> None:
        """A pause has ended, by a step or by the sequence's end."""
        sequence.pause.longest_us = max(sequence.pause.longest_us, pause_us)
        team_id = sequence.request.team_id
        if pause_us > self._longest_us.get(team_id, 0):
            self._longest_us[team_id] = pause_us

    def take_longest_us(self) -> dict[int, int]:
        """By team, the longest pause that ended since the last call."""
        taken, self._longest_us = self._longest_us, {}
        return taken
