"""About once a second: what each active team got since the last sample. The fairness report is built from this.

The sampler reads the running totals of the policy and the scheduler, and owns only the totals that it saw last. It
looks at the lags ten times in an interval. So their least and largest values are those of the looks, not of every
step: reading a hundred teams costs as much as a step's picks.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from engine.step.scheduler import Scheduler
from engine.wire.messages import Interference, ServiceSamples, TeamSample
from policies import team_counters
from policies.policy import Policy
from policies.sequences import TeamService
from policies.team_counters import POLICY_COUNTERS, POLICY_TOTALS

INTERVAL_US = 1_000_000
LOOK_US = 100_000

_NOTHING = TeamService(team_id=-1, lag=0.0)


class ServiceSampler:
    """Turns running totals into deltas. The caller calls `look` after every step, and `take` once an interval."""

    def __init__(self, policy: Policy, now_us: int, scheduler: Scheduler | None = None, block_bytes: int = 0) -> None:
        """`scheduler` gives swaps, pauses and interference; without it these figures are 0."""
        self._policy = policy
        self._scheduler = scheduler
        self._block_bytes = block_bytes
        self._taken_us = now_us
        self._looked_us = now_us
        self._last: dict[int, TeamService] = {}
        self._lags: dict[int, tuple[float, float]] = {}
        self._stall_us = 0
        self._replayed_tokens = 0
        self._num_raised = 0

    def due_in_us(self, now_us: int) -> int:
        """Microseconds until the next sample; 0 when it is due."""
        return max(0, self._taken_us + INTERVAL_US - now_us)

    def restart(self, now_us: int) -> None:
        """Begin an interval now. Called after the engine was idle, since idle time belongs to no interval."""
        self._taken_us = self._looked_us = now_us

    def look(self, now_us: int) -> None:
        """Note the teams' lags, at most once every LOOK_US."""
        if now_us - self._looked_us < LOOK_US:
            return
        self._looked_us = now_us
        for team in self._policy.team_service():
            low, high = self._lags.get(team.team_id, (team.lag, team.lag))
            self._lags[team.team_id] = (min(low, team.lag), max(high, team.lag))

    def take(self, now_us: int) -> ServiceSamples | None:
        """The sample of the interval that ends now, or None if no team got, wanted or waited for anything in it.

        Also called right before the table of teams changes. Then the policy may close the account of a team that has
        left, and the team's totals begin at 0 again when it comes back.
        """
        interference = self._interference()
        scheduler = self._scheduler
        totals = {team.team_id: team for team in self._policy.team_service()}
        figures = self._counted_here(totals, interference)
        teams: list[TeamSample] = []
        for team_id, team in totals.items():
            last = self._last_of(team)
            counted = team_counters.values(team, POLICY_COUNTERS)
            for name in POLICY_TOTALS:
                counted[name] -= getattr(last, name)
            sample = TeamSample(team_id=team_id, waiting_levels=team.waiting_levels, **counted, **figures[team_id])
            if (
                any(counted[name] for name in POLICY_TOTALS)  # else what was counted would be told never
                or team.backlogged_us > last.backlogged_us
                or sample.longest_pause_us
                or team.waiting
                or team.running
            ):
                teams.append(sample)
        self._last = totals
        interval_ms = (now_us - self._taken_us) // 1000
        self._taken_us = now_us
        self._lags.clear()
        if not (teams or interference):
            return None
        if scheduler is None:
            return ServiceSamples(interval_ms=interval_ms, teams=tuple(teams))
        stall_us, self._stall_us = scheduler.memory.bills.stall_us - self._stall_us, scheduler.memory.bills.stall_us
        replayed = scheduler.memory.bills.replayed_tokens - self._replayed_tokens
        self._replayed_tokens = scheduler.memory.bills.replayed_tokens
        num_raised = scheduler.memory.bills.num_raised
        raised, self._num_raised = num_raised - self._num_raised, num_raised
        return ServiceSamples(
            interval_ms=interval_ms,
            teams=tuple(teams),
            interference=interference,
            lag_bound_us=scheduler.pauses.lag_bound_us(is_short=scheduler.memory.take_shortage()),
            stall_us=stall_us,
            replayed_tokens=replayed,
            num_raised=raised,
        )

    def _last_of(self, team: TeamService) -> TeamService:
        """What was seen last of its totals: nothing, if they belong to a new account."""
        last = self._last.get(team.team_id, _NOTHING)
        return _NOTHING if team.served_us < last.served_us or team.entitled_us < last.entitled_us else last

    def _counted_here(
        self, totals: Mapping[int, TeamService], interference: Iterable[Interference]
    ) -> dict[int, dict[str, Any]]:
        """The engine's own counters of the interval, by team and name: those that are not `CountedByPolicy`."""
        scheduler = self._scheduler
        longest_us = scheduler.pauses.take_longest_us() if scheduler is not None else {}
        swapped: Counter[tuple[int, str]] = Counter()
        for pair in interference:
            swapped[pair.victim_id, "out"] += pair.bytes_out
            swapped[pair.victim_id, "in"] += pair.bytes_in
        found = {}
        for team_id, team in totals.items():
            low, high = self._lags.get(team_id, (team.lag, team.lag))
            found[team_id] = {
                "backlogged_ms": team.backlogged_us // 1000 - self._last_of(team).backlogged_us // 1000,
                "lag_min_us": min(low, team.lag),
                "lag_max_us": max(high, team.lag),
                "bytes_swapped_out": swapped[team_id, "out"],
                "bytes_swapped_in": swapped[team_id, "in"],
                "longest_pause_us": longest_us.get(team_id, 0),
                "pause_bound_us": scheduler.pauses.bound_us(team_id, team.waiting) if scheduler is not None else 0,
            }
        return found

    def _interference(self) -> tuple[Interference, ...]:
        """What teams cost each other since the last sample, in order of (causer, victim)."""
        if self._scheduler is None:
            return ()
        return tuple(
            Interference(
                causer_id=causer,
                victim_id=victim,
                preemptions=counts.preemptions,
                swaps_out=counts.swaps_out,
                swaps_in=counts.swaps_in,
                recomputes=counts.recomputes,
                bytes_out=counts.blocks_out * self._block_bytes,
                bytes_in=counts.blocks_in * self._block_bytes,
                billed_us=counts.billed_us,
            )
            for (causer, victim), counts in sorted(self._scheduler.memory.bills.take_counts().items())
        )
