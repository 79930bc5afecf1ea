"""What the engine's samples say: counters since this process started, and each team's share of the last minute.

One sample arrives a second while the engine has work. Counters add up by team (`gateway.metrics.requests` bounds the
teams). The window keeps WINDOW_SECONDS of samples with running sums, so that a scrape costs one look at each team of
the window.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.wire.messages import ServiceSamples, TeamSample
from gateway.metrics.requests import Meters
from policies.team_counters import Over, names_over
from tenants.reports import weighted_jain

WINDOW_SECONDS = 60.0
_SUMMED = names_over(Over.SUM)


@dataclass(slots=True)
class Share:
    """One team's device time in the intervals of the window in which it was backlogged, and everybody's in them."""

    served_us: int = 0
    entitled_us: int = 0
    all_served_us: int = 0
    all_entitled_us: int = 0
    intervals: int = 0

    def add(self, other: "Share", sign: int = 1) -> None:
        """Put one interval in (or, with -1, take it out)."""
        self.served_us += sign * other.served_us
        self.entitled_us += sign * other.entitled_us
        self.all_served_us += sign * other.all_served_us
        self.all_entitled_us += sign * other.all_entitled_us
        self.intervals += sign

    @property
    def achieved(self) -> float | None:
        """Its part of the device time."""
        return self.served_us / self.all_served_us if self.all_served_us else None

    @property
    def entitled(self) -> float | None:
        """Its part of the entitlements."""
        return self.entitled_us / self.all_entitled_us if self.all_entitled_us else None


class ServiceMeters:
    """Sums of all samples, and a window over the latest. `clock` is monotonic seconds."""

    def __init__(self, meters: Meters, clock: Callable[[], float]) -> None:
        self._meters = meters
        self._clock = clock
        self._intervals: deque[tuple[float, dict[int, Share]]] = deque()
        self._shares: dict[int, Share] = {}
        self._latest: dict[int, tuple[float, TeamSample]] = {}
        self.last: tuple[TeamSample, ...] = ()  # the teams of the latest message
        self.preemptions = 0
        self.recomputes = 0
        self.stall_us = 0
        self.num_raised = 0
        self.overhead_us = 0
        self.swaps: Counter[str] = Counter(out=0, **{"in": 0})
        self.swapped_bytes: Counter[str] = Counter(out=0, **{"in": 0})

    def add(self, samples: ServiceSamples) -> None:
        """One interval of the engine's samples."""
        now = self._clock()
        live = self._meters.live()
        for sample in samples.teams:
            team = self._meters.team(sample.team_id)
            for name in _SUMMED:
                team.totals[name] += getattr(sample, name)
            entry = live.get(sample.team_id)
            if entry is not None:
                team.promotions[entry.tier.name] += sample.promotions
            self.overhead_us += sample.overhead_us
            self._latest[sample.team_id] = (now, sample)
        for cause in samples.interference:
            self.preemptions += cause.preemptions
            self.recomputes += cause.recomputes
            self.swaps["out"] += cause.swaps_out
            self.swaps["in"] += cause.swaps_in
            self.swapped_bytes["out"] += cause.bytes_out
            self.swapped_bytes["in"] += cause.bytes_in
        self.stall_us += samples.stall_us
        self.num_raised += samples.num_raised
        self.last = samples.teams
        self._add_interval(samples.teams, now)

    def _add_interval(self, teams: tuple[TeamSample, ...], now: float) -> None:
        served_us = sum(team.served_us for team in teams)
        entitled_us = sum(team.entitled_us for team in teams)
        parts = {
            team.team_id: Share(team.served_us, team.entitled_us, served_us, entitled_us)
            for team in teams
            if team.backlogged_ms > 0
        }
        for team_id, part in parts.items():
            self._shares.setdefault(team_id, Share()).add(part)
        self._intervals.append((now, parts))
        self.expire()

    def expire(self) -> None:
        """Forget what is older than the window."""
        oldest = self._clock() - WINDOW_SECONDS
        while self._intervals and self._intervals[0][0] <= oldest:
            for team_id, part in self._intervals.popleft()[1].items():
                share = self._shares[team_id]
                share.add(part, -1)
                if not share.intervals:
                    del self._shares[team_id]
        for team_id in [other_id for other_id, (at, _) in self._latest.items() if at <= oldest]:
            del self._latest[team_id]

    def shares(self) -> dict[int, Share]:
        """Each place's share over the window; teams without a place of their own add up. Call `expire` before."""
        found: dict[int, Share] = {}
        for team_id, share in self._shares.items():
            place = self._meters.place(team_id)
            into = found.setdefault(place, Share())
            into.served_us += share.served_us
            into.entitled_us += share.entitled_us
            into.all_served_us = max(into.all_served_us, share.all_served_us)
            into.all_entitled_us = max(into.all_entitled_us, share.all_entitled_us)
        return found

    def latest(self) -> dict[int, list[TeamSample]]:
        """The latest samples of the window by place. Call `expire` before."""
        found: dict[int, list[TeamSample]] = {}
        for team_id, (_, sample) in self._latest.items():
            found.setdefault(self._meters.place(team_id), []).append(sample)
        return found

    def jain(self) -> float | None:
        """Weighted Jain index of served / entitled over the teams that were backlogged in the window."""
        live = self._meters.live()
        return weighted_jain(
            [
                (live[team_id].tier.weight, share.served_us / share.entitled_us)
                for team_id, share in self._shares.items()
                if team_id in live and share.entitled_us
            ]
        )
