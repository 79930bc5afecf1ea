"""Once a second: what each active team got since the last sample, as the fairness report is built from.

Reads the policy's and the scheduler's running totals; owns only what it saw last. Lags are looked at several times in
an interval, so their least and largest are those of the looks, not of every step: reading a hundred teams costs as much
as a step's picks.
"""

from engine.step.scheduler import Scheduler
from engine.wire.messages import Interference, ServiceSamples, TeamSample
from policies.policy import Policy
from policies.sequences import TeamService

INTERVAL_US = 1_000_000
LOOK_US = 100_000

_NOTHING = TeamService(team_id=-1, served_us=0, entitled_us=0, backlogged_us=0, waiting=0, running=0, lag=0.0)


class ServiceSampler:
    """Turns running totals into deltas. `look` often, `take` once an interval."""

    def __init__(self, policy: Policy, now_us: int, scheduler: Scheduler | None = None, block_bytes: int = 0) -> None:
        """`scheduler` tells of swaps, pauses and who cost whom what; without it those figures are 0."""
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
        """The interval that ends now; None when no team got, wanted or waited for anything in it.

        Also right before the table of teams changes, when the policy may close the account of a team that has left: it
        begins again at nothing when the team comes back.
        """
        interference = self._interference()
        scheduler = self._scheduler
        longest_us = scheduler.pauses.take_longest_us() if scheduler is not None else {}
        bytes_out: dict[int, int] = {}
        bytes_in: dict[int, int] = {}
        for pair in interference:
            bytes_out[pair.victim_id] = bytes_out.get(pair.victim_id, 0) + pair.bytes_out
            bytes_in[pair.victim_id] = bytes_in.get(pair.victim_id, 0) + pair.bytes_in
        teams: list[TeamSample] = []
        totals = {team.team_id: team for team in self._policy.team_service()}
        for team_id, team in totals.items():
            last = self._last.get(team_id, _NOTHING)
            if team.served_us < last.served_us or team.entitled_us < last.entitled_us:
                last = _NOTHING  # a new account
            low, high = self._lags.get(team_id, (team.lag, team.lag))
            sample = TeamSample(
                team_id=team_id,
                served_us=team.served_us - last.served_us,
                entitled_us=team.entitled_us - last.entitled_us,
                backlogged_ms=team.backlogged_us // 1000 - last.backlogged_us // 1000,
                waiting=team.waiting,
                running=team.running,
                lag_min_us=min(low, team.lag),
                lag_max_us=max(high, team.lag),
                promotions=team.promotions - last.promotions,
                bytes_swapped_out=bytes_out.get(team_id, 0),
                bytes_swapped_in=bytes_in.get(team_id, 0),
                exhausted=team.exhausted - last.exhausted,
                budget_us=team.budget_us,
                starving=team.starving,
                promoted_us=team.promoted_us - last.promoted_us,
                overhead_us=team.overhead_us - last.overhead_us,
                pause_bound_us=scheduler.pauses.bound_us(team_id, team.waiting) if scheduler is not None else 0,
                longest_pause_us=longest_us.get(team_id, 0),
                waiting_levels=team.waiting_levels,
            )
            if (
                sample.served_us
                or sample.entitled_us
                or team.backlogged_us > last.backlogged_us
                or sample.promotions
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

    def _interference(self) -> tuple[Interference, ...]:
        """Who cost whom what since the last sample, by causer and victim."""
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
