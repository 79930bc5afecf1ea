"""The maximum pause of each team's requests (I8 of `docs/scheduling.md`), as the admin listener shows it. Pure.

The maximum pause is the longest time that a request can wait for its next step. It bounds one pause, not the whole
answer. It is computed from the constants in the connected engine's greeting and from the present table of teams, for
two lengths of the team's queue:

- full: as many requests as the team's `concurrent` limit allows, or as the engine takes in at all;
- empty: no other request of the team waits before this request.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from engine.wire.messages import Hello
from policies.bounds import pause_bound_us
from policies.config import PolicyConfig
from policies.sequences import TeamTerms
from tenants.snapshot import KnownTeam

_EMPTY = "max_pause_empty_queue_seconds"
NO_ENGINE = "no engine is connected"
NO_TEAM = "no team has this tier"
NO_GRANT = "the tier keeps no grant: promotion_burst_grants is 0"
NO_PROMOTION = "promotion is off: engine.promotion_percent is 0"


@dataclass(frozen=True, slots=True)
class MaxPause:
    """The maximum pause with a full and with an empty queue, in microseconds.

    Both are None when there is no maximum; `reason` then says why.
    """

    queue: int | None  # how many requests of the team at once `full_us` holds for
    full_us: int | None = None
    empty_us: int | None = None
    reason: str | None = None

    def describe(self) -> dict[str, float | int | str | None]:
        """As JSON shows it, with times in seconds."""
        return {
            _EMPTY: None if self.empty_us is None else self.empty_us / 1e6,
            "max_pause_seconds": None if self.full_us is None else self.full_us / 1e6,
            "max_pause_queue": self.queue,
            "max_pause_unknown": self.reason,
        }


class MaxPauses:
    """The maximum pauses under one engine and one table of teams."""

    def __init__(self, hello: Hello | None, teams: Iterable[KnownTeam]) -> None:
        self._hello = hello
        self._teams = {team.team_id: team for team in teams}
        self._table = [team.tier.terms(team.team_id) for team in self._teams.values()]
        self._known: dict[tuple[str, int], MaxPause] = {}  # teams with the same tier and queue have the same pause

    def of_team(self, team_id: int) -> MaxPause:
        """The maximum pause of one team. An archived team, which is not in the table, has none."""
        team = self._teams.get(team_id)
        if self._hello is None or team is None:
            return MaxPause(None, reason=NO_ENGINE if self._hello is None else "the team is archived")
        queue = self._hello.max_queued_requests
        if team.limits.concurrent is not None:
            queue = min(queue, team.limits.concurrent)
        key = (team.tier.name, queue)
        if key not in self._known:
            self._known[key] = self._compute(self._hello, team.tier.terms(team_id), queue)
        return self._known[key]

    def of_tier(self, name: str) -> MaxPause:
        """The longest maximum pause among the tier's teams."""
        pauses = [self.of_team(team.team_id) for team in self._teams.values() if team.tier.name == name]
        if not pauses:
            return MaxPause(None, reason=NO_ENGINE if self._hello is None else NO_TEAM)
        return max(pauses, key=lambda pause: (pause.full_us or 0, pause.queue or 0))

    def moved_from(self, before: "MaxPauses") -> list[dict[str, float | str | None]]:
        """Tiers whose teams have another maximum pause than `before`: with an empty queue, in seconds. A tier that had
        no teams, or has none now, is left out: nobody's pause moves.
        """
        names = sorted({team.tier.name for team in self._teams.values()})
        pairs = [(name, before.of_tier(name), self.of_tier(name)) for name in names]
        return [
            {"tier": name, "from_seconds": old.describe()[_EMPTY], "to_seconds": new.describe()[_EMPTY]}
            for name, old, new in pairs
            if old.reason != NO_TEAM and old.empty_us != new.empty_us
        ]

    def _compute(self, hello: Hello, terms: TeamTerms, queue: int) -> MaxPause:
        constants = hello.constants
        if constants is None:
            return MaxPause(queue, reason=f"the policy {hello.policy} bounds no pause")
        if not constants.promotion_percent:
            return MaxPause(queue, reason=NO_PROMOTION)
        if not terms.promotion_burst_grants:
            return MaxPause(queue, reason=NO_GRANT)
        config = PolicyConfig(
            levels=constants.levels,
            base_quantum_us=constants.base_quantum_us,
            fairness_window_us=constants.fairness_window_us,
            step_cost_max_us=constants.step_cost_max_us,
            promotion_percent=constants.promotion_percent,
            grant_us=constants.grant_us,
            theta_cost_us=constants.theta_cost_us,
            step_us_max=constants.step_us_max,
        )
        full, empty = (
            pause_bound_us(
                config,
                self._table,
                terms.team_id,
                num_ahead,
                constants.upload_max_us,
                is_short=True,
                rate_percent=constants.rate_percent,
            )
            for num_ahead in (max(0, queue - 1), 0)
        )
        return MaxPause(queue, full, empty)
