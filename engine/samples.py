"""Once a second: what each active team got since the last sample, as the fairness report is built from.

Reads the policy's running totals; owns only what it saw last. Lags are looked at several times in an interval, so their
least and largest are those of the looks, not of every step: reading a hundred teams costs as much as a step's picks.
"""

from engine.messages import ServiceSamples, TeamSample
from policies.policy import Policy
from policies.sequences import TeamService

INTERVAL_US = 1_000_000
LOOK_US = 100_000


class ServiceSampler:
    """Turns running totals into deltas. `look` often, `take` once an interval."""

    def __init__(self, policy: Policy, now_us: int) -> None:
        self._policy = policy
        self._taken_us = now_us
        self._looked_us = now_us
        self._last: dict[int, TeamService] = {}
        self._lags: dict[int, tuple[float, float]] = {}

    def due_in_us(self, now_us: int) -> int:
        """Microseconds until the next sample; 0 when it is due."""
        return max(0, self._taken_us + INTERVAL_US - now_us)

    def restart(self, now_us: int) -> None:
        """Begin an interval now: after idleness, which belongs to no interval."""
        self._taken_us = self._looked_us = now_us

    def look(self, now_us: int) -> None:
        """Note the lags, at most once every LOOK_US."""
        if now_us - self._looked_us < LOOK_US:
            return
        self._looked_us = now_us
        for team in self._policy.team_service():
            low, high = self._lags.get(team.team_id, (team.lag, team.lag))
            self._lags[team.team_id] = (min(low, team.lag), max(high, team.lag))

    def take(self, now_us: int) -> ServiceSamples | None:
        """The interval that ends now; None when no team got, wanted or waited for anything in it."""
        teams: list[TeamSample] = []
        for team in self._policy.team_service():
            last = self._last.get(team.team_id)
            served_us = team.served_us - (last.served_us if last else 0)
            entitled_us = team.entitled_us - (last.entitled_us if last else 0)
            backlogged_us = team.backlogged_us - (last.backlogged_us if last else 0)
            promotions = team.promotions - (last.promotions if last else 0)
            self._last[team.team_id] = team
            if not (served_us or entitled_us or backlogged_us or promotions or team.waiting or team.running):
                continue
            low, high = self._lags.get(team.team_id, (team.lag, team.lag))
            teams.append(
                TeamSample(
                    team_id=team.team_id,
                    served_us=served_us,
                    entitled_us=entitled_us,
                    backlogged_ms=team.backlogged_us // 1000 - (last.backlogged_us // 1000 if last else 0),
                    waiting=team.waiting,
                    running=team.running,
                    lag_min_us=min(low, team.lag),
                    lag_max_us=max(high, team.lag),
                    promotions=promotions,
                )
            )
        interval_ms = (now_us - self._taken_us) // 1000
        self._taken_us = now_us
        self._lags.clear()
        return ServiceSamples(interval_ms=interval_ms, teams=tuple(teams)) if teams else None
