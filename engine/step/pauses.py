"""What the policy's constants promise, beside what was: the longest pause (I8) and the lag between teams (I5).

A pause is what a reader of the stream sees: the gap between the ends of two steps of a sequence, and the first one from
its arrival to the end of its first step. When the policy says that a sequence begins to starve (`policies.promotion`),
an *episode* begins, and its bound is worked out from what goes before the sequence and from its team's budget. The
sequence's next step ends the episode. Then its gap is held against its own bound, and the worst ratio is kept for the
request: one long gap with a short bound shows beside another one whose bound was long.

Two bounds are worked out at the beginning of an episode. The wider one counts when KV memory was short at any time in
the episode: it has the wide band between lags, the rate that swapping leaves, and the way back of the KV.
"""

from collections.abc import Iterable

from engine.request import Sequence
from policies.bounds import PauseTerms, lag_bound, pause_terms
from policies.config import PolicyConfig
from policies.sequences import Starving, TeamTerms

_NEVER = -1


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
        self._terms: dict[tuple[int, bool], PauseTerms | None] = {}  # by team, and whether KV memory is short
        self._least_us: int | None = None  # no gap below it belongs to an episode; None: there are no episodes
        self._short_us = _NEVER  # when KV memory was short last
        self._is_short = False  # now
        self._longest_us: dict[int, int] = {}  # by team

    def configure(self, teams: Iterable[TeamTerms]) -> None:
        """The table of teams is this from now on."""
        self._teams = {terms.team_id: terms for terms in teams}
        self._terms.clear()
        if self._config is not None:
            self._least_us = min((terms.starving_after_us for terms in self._teams.values()), default=None)

    def note_memory(self, *, is_short: bool, now_us: int) -> None:
        """Whether KV memory is short as a step is planned."""
        self._is_short = is_short
        if is_short:
            self._short_us = now_us

    def bound_us(self, team_id: int, num_ahead: int) -> int:
        """The longest pause of a team's sequence with so many ahead of it, whatever its budget; 0 when there is no
        bound.
        """
        terms = self._find(team_id, self._is_short)
        return 0 if terms is None else terms.bound_us(num_ahead)

    def lag_bound_us(self, *, is_short: bool) -> float:
        """The most that two able teams' lags may differ: Theta + 2u, and 2 Theta + 4u when blocks are short; 0 when
        nothing bounds it.
        """
        weights = [terms.weight for terms in self._teams.values()]
        if self._shares is None or not weights:
            return 0.0
        return float(lag_bound(self._shares, weights, is_short=is_short) or 0)

    def starve(self, sequence: Sequence, starving: Starving, now_us: int) -> None:
        """It begins to starve, as the policy says."""
        team_id, pause = sequence.request.team_id, sequence.pause
        terms, short_terms = self._find(team_id, False), self._find(team_id, True)
        if terms is None or short_terms is None:
            return
        before = starving.num_grants, starving.grants_us, starving.held_us
        pause.starved_us = now_us
        pause.promised_us, pause.promised_short_us = terms.bound_us(*before), short_terms.bound_us(*before)

    def over(self, sequence: Sequence, now_us: int) -> None:
        """A gap ends now, with a step of the sequence or with the sequence itself."""
        gap_us = now_us - sequence.last_us
        pause, team_id = sequence.pause, sequence.request.team_id
        if gap_us > pause.longest_us:
            pause.longest_us = gap_us
        if gap_us > self._longest_us.get(team_id, 0):
            self._longest_us[team_id] = gap_us
        if pause.promised_us:
            is_short = self._short_us >= pause.starved_us
            self._judge(sequence, gap_us, pause.promised_short_us if is_short else pause.promised_us)
            pause.promised_us = 0
        elif self._least_us is not None and gap_us >= self._least_us:
            # The holder of a grant does not starve again. Nothing goes before it.
            terms = self._find(team_id, self._short_us >= sequence.last_us)
            if terms is not None and gap_us >= self._teams[team_id].starving_after_us:
                self._judge(sequence, gap_us, terms.bound_us(0))

    def _judge(self, sequence: Sequence, gap_us: int, bound_us: int) -> None:
        pause = sequence.pause
        pause.bound_us = max(pause.bound_us, bound_us)
        pause.of_bound = max(pause.of_bound, gap_us / bound_us)

    def _find(self, team_id: int, is_short: bool) -> PauseTerms | None:
        """What bounds the pauses of a team; None when nothing does."""
        if self._config is None or team_id not in self._teams:
            return None
        key = team_id, is_short
        if key not in self._terms:
            teams = self._teams.values()
            upload_us, rate_percent = (self._upload_us, self._rate_percent) if is_short else (0, 100)
            self._terms[key] = pause_terms(
                self._config, teams, team_id, upload_us, is_short=is_short, rate_percent=rate_percent
            )
        return self._terms[key]

    def take_longest_us(self) -> dict[int, int]:
        """By team, the longest pause that ended since the last call."""
        taken, self._longest_us = self._longest_us, {}
        return taken
