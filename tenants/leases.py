"""Leases: what a team holds of its limits, from admission to the end of each request.

Unit: the team, whatever the number of its keys. Each request reserves first one request and one slot, then its tokens.
It ends in exactly one `settle` or `release`. A call to reserve looks first and takes afterwards, without an await
between: when fifty callers see one free unit, one of them gets it.

Rates count what was admitted in the last 60 s, (now - 60, now], whatever the minute on the clock. So no rolling minute
ever holds more than the limit. Time is a monotonic clock that is passed in, so a step of the wall clock changes
nothing.

Invariant, for each team and at all times: reserved = settled + released + outstanding.

All calls come from the event loop's thread, and none of them waits.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from tenants.errors import LimitExceeded
from tenants.quotas import Limits
from tenants.snapshot import Identity

WINDOW_SECONDS = 60.0
# Events within this time share one entry, which expires with the latest of them. So a window has at most 6,000 entries,
# whatever the rate. The window never frees anything earlier than exact counting would.
_ENTRY_SECONDS = 0.01
_CONCURRENT_RETRY_SECONDS = 1.0


class _Entry:
    """What was admitted within one hundredth of a second."""

    __slots__ = ("amount", "first", "last")

    def __init__(self, at: float) -> None:
        self.first = at
        self.last = at
        self.amount = 0


class RollingWindow:
    """A sum over the last 60 s whose parts can be corrected later."""

    def __init__(self) -> None:
        self._entries: deque[_Entry] = deque()
        self._sum = 0

    def sum(self, now: float) -> int:
        """What counts at `now`."""
        while self._entries and self._entries[0].last <= now - WINDOW_SECONDS:
            gone = self._entries.popleft()
            self._sum -= gone.amount
            gone.amount = 0  # a late correction must not touch the sum again
            gone.last = float("-inf")
        return self._sum

    def add(self, amount: int, now: float) -> _Entry:
        """Count `amount` at `now`. Returns the entry, which `correct` takes."""
        entry = self._entries[-1] if self._entries else None
        if entry is None or not entry.first <= now < entry.first + _ENTRY_SECONDS:
            entry = _Entry(now)
            self._entries.append(entry)
        entry.last = max(entry.last, now)
        entry.amount += amount
        self._sum += amount
        return entry

    def correct(self, entry: _Entry, delta: int) -> None:
        """Change what `entry` counts, unless it has left the window."""
        if entry.last != float("-inf"):
            entry.amount += delta
            self._sum += delta
            assert entry.amount >= 0

    def seconds_until(self, room: int, now: float) -> float:
        """How long until the sum has fallen by at least `room`. WINDOW_SECONDS when `room` is more than the sum."""
        if room <= 0:
            return 0.0
        freed = 0
        for entry in self._entries:
            freed += entry.amount
            if freed >= room:
                return max(0.0, entry.last + WINDOW_SECONDS - now)
        return WINDOW_SECONDS

    def seconds_until_empty(self, now: float) -> float:
        """How long until the sum is 0."""
        for entry in reversed(self._entries):
            if entry.amount:
                return max(0.0, entry.last + WINDOW_SECONDS - now)
        return 0.0


class ReservationState(Enum):
    """A reservation is outstanding until it is settled or released."""

    OUTSTANDING = "outstanding"
    SETTLED = "settled"
    RELEASED = "released"


class Reservation:
    """What one request holds. Only Leases makes and ends reservations; callers read them."""

    __slots__ = ("_request_entry", "_token_entry", "identity", "state", "tokens", "tokens_used")

    def __init__(self, identity: Identity, request_entry: _Entry) -> None:
        self.identity = identity
        self.tokens = 0
        self.tokens_used = 0  # set when the reservation is settled
        self.state = ReservationState.OUTSTANDING
        self._request_entry = request_entry
        self._token_entry: _Entry | None = None

    def __repr__(self) -> str:
        return f"Reservation(team={self.identity.team!r}, tokens={self.tokens}, {self.state.value})"


@dataclass(frozen=True, slots=True)
class LimitView:
    """One limit as its team may see it. All fields are None when there is no limit."""

    limit: int | None
    remaining: int | None
    reset_seconds: float | None  # until the whole limit is free again; None for concurrent requests


@dataclass(frozen=True, slots=True)
class LimitsView:
    """A team's limits at one moment."""

    requests: LimitView
    tokens: LimitView
    concurrent: LimitView


@dataclass(frozen=True, slots=True)
class Totals:
    """One team's totals since the start. reserved = settled + released + outstanding, for requests and for tokens."""

    reserved_requests: int = 0
    settled_requests: int = 0
    released_requests: int = 0
    outstanding_requests: int = 0
    reserved_tokens: int = 0
    settled_tokens: int = 0
    released_tokens: int = 0
    outstanding_tokens: int = 0

    @property
    def imbalance(self) -> int:
        """By how many requests and tokens the invariant is broken, in either direction."""
        requests = self.settled_requests + self.released_requests + self.outstanding_requests
        tokens = self.settled_tokens + self.released_tokens + self.outstanding_tokens
        return abs(self.reserved_requests - requests) + abs(self.reserved_tokens - tokens)

    @property
    def is_balanced(self) -> bool:
        """Whether the invariant of this module holds."""
        return self.imbalance == 0


class Limited(Protocol):
    """A team and its limits: `Identity` or `KnownTeam`."""

    @property
    def team_id(self) -> int: ...

    @property
    def limits(self) -> Limits: ...


class _Team:
    """What one team holds, and its totals."""

    __slots__ = (
        "num_running",
        "outstanding_tokens",
        "released_requests",
        "released_tokens",
        "requests",
        "reserved_requests",
        "reserved_tokens",
        "settled_requests",
        "settled_tokens",
        "tokens",
    )

    def __init__(self) -> None:
        self.requests = RollingWindow()
        self.tokens = RollingWindow()
        self.num_running = 0
        self.outstanding_tokens = 0
        self.reserved_requests = 0
        self.settled_requests = 0
        self.released_requests = 0
        self.reserved_tokens = 0
        self.settled_tokens = 0
        self.released_tokens = 0

    def totals(self) -> Totals:
        return Totals(
            reserved_requests=self.reserved_requests,
            settled_requests=self.settled_requests,
            released_requests=self.released_requests,
            outstanding_requests=self.num_running,
            reserved_tokens=self.reserved_tokens,
            settled_tokens=self.settled_tokens,
            released_tokens=self.released_tokens,
            outstanding_tokens=self.outstanding_tokens,
        )


class Leases:
    """Owns what every team holds. `clock` is monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._teams: dict[int, _Team] = {}

    def _team(self, team_id: int) -> _Team:
        team = self._teams.get(team_id)
        if team is None:
            team = self._teams[team_id] = _Team()
        return team

    def seed(self, history: Iterable[tuple[int, float, int]]) -> None:
        """Count what the ledger says was admitted just before the start: (team_id, age in seconds, tokens), oldest
        first.

        So a restart does not give teams a fresh minute. Nothing that is counted here is outstanding.
        """
        now = self._clock()
        for team_id, age_seconds, tokens in history:
            if 0 <= age_seconds < WINDOW_SECONDS:
                team = self._team(team_id)
                team.requests.add(1, now - age_seconds)
                team.tokens.add(tokens, now - age_seconds)

    def reserve_request(self, identity: Identity) -> Reservation:
        """Take one request and one slot. Raises LimitExceeded, and then takes nothing."""
        now = self._clock()
        team = self._team(identity.team_id)
        limits = identity.limits
        used = team.requests.sum(now)
        # Check the slot first: a team that lacks both is refused for the slot, not as if its minute were spent.
        if limits.concurrent is not None and team.num_running + 1 > limits.concurrent:
            raise _exceeded(
                identity, "concurrent_limit", limits.concurrent, team.num_running, 1, _CONCURRENT_RETRY_SECONDS
            )
        if limits.requests_per_minute is not None and used + 1 > limits.requests_per_minute:
            wait = team.requests.seconds_until(used + 1 - limits.requests_per_minute, now)
            raise _exceeded(identity, "requests", limits.requests_per_minute, used, 1, wait)
        team.num_running += 1
        team.reserved_requests += 1
        return Reservation(identity, team.requests.add(1, now))

    def reserve_tokens(self, reservation: Reservation, tokens: int) -> None:
        """Take `tokens` (prompt + clamped max tokens). Call it once for each reservation.

        Raises LimitExceeded when the tokens do not fit; the request and its slot are then given back.
        """
        assert reservation.state is ReservationState.OUTSTANDING, f"{reservation!r} has ended"
        assert reservation._token_entry is None, f"{reservation!r} already holds tokens"
        assert tokens >= 0, "a reservation is never negative"
        now = self._clock()
        identity = reservation.identity
        team = self._team(identity.team_id)
        limit = identity.limits.tokens_per_minute
        used = team.tokens.sum(now)
        if limit is not None and used + tokens > limit:
            self.release(reservation)
            wait = WINDOW_SECONDS if tokens > limit else team.tokens.seconds_until(used + tokens - limit, now)
            raise _exceeded(identity, "tokens", limit, used, tokens, wait)
        reservation._token_entry = team.tokens.add(tokens, now)
        reservation.tokens = tokens
        team.reserved_tokens += tokens
        team.outstanding_tokens += tokens

    def settle(self, reservation: Reservation, tokens_used: int) -> None:
        """End a request that ran and used `tokens_used`: free the slot, keep the request counted, correct the tokens.

        Tokens beyond what was reserved are counted from now on. Raises ValueError for a negative number, which must
        never give quota back; the reservation is then still outstanding.
        """
        if tokens_used < 0:
            raise ValueError(f"a request cannot use {tokens_used} tokens")
        team = self._end(reservation, ReservationState.SETTLED)
        now = self._clock()
        team.tokens.sum(now)
        surplus = tokens_used - reservation.tokens
        if surplus > 0:
            team.tokens.add(surplus, now)
            team.reserved_tokens += surplus
        elif reservation._token_entry is not None:
            team.tokens.correct(reservation._token_entry, surplus)
            team.released_tokens -= surplus
        team.settled_requests += 1
        team.settled_tokens += tokens_used
        reservation.tokens_used = tokens_used
        self._check(team)

    def release(self, reservation: Reservation) -> None:
        """End a request that never ran: give everything back, also its place in the minute."""
        team = self._end(reservation, ReservationState.RELEASED)
        now = self._clock()
        team.requests.sum(now)
        team.tokens.sum(now)
        team.requests.correct(reservation._request_entry, -1)
        if reservation._token_entry is not None:
            team.tokens.correct(reservation._token_entry, -reservation.tokens)
        team.released_requests += 1
        team.released_tokens += reservation.tokens
        self._check(team)

    def amend(self, reservation: Reservation, tokens_used: int | None) -> None:
        """Correct a reservation that has ended, when it becomes known only later how many tokens it used.

        `tokens_used` None means that the request never ran: then neither the request nor its tokens are counted.
        """
        assert reservation.state is not ReservationState.OUTSTANDING, f"{reservation!r} has not ended"
        assert tokens_used is None or tokens_used >= 0, "a use is never negative"
        team = self._teams[reservation.identity.team_id]
        was = reservation.state is ReservationState.SETTLED
        requests = (tokens_used is not None) - was
        tokens = (tokens_used or 0) - reservation.tokens_used
        if not requests and not tokens:
            return
        now = self._clock()
        team.requests.sum(now)
        team.tokens.sum(now)
        team.requests.correct(reservation._request_entry, requests)
        if reservation._token_entry is not None:
            team.tokens.correct(reservation._token_entry, tokens)
        team.settled_requests += requests
        team.released_requests -= requests
        team.settled_tokens += tokens
        team.released_tokens -= tokens
        reservation.state = ReservationState.RELEASED if tokens_used is None else ReservationState.SETTLED
        reservation.tokens_used = tokens_used or 0
        self._check(team)

    def _end(self, reservation: Reservation, state: ReservationState) -> _Team:
        assert reservation.state is ReservationState.OUTSTANDING, f"{reservation!r} has already ended"
        reservation.state = state
        team = self._teams[reservation.identity.team_id]
        team.num_running -= 1
        team.outstanding_tokens -= reservation.tokens
        return team

    @staticmethod
    def _check(team: _Team) -> None:
        totals = team.totals()
        assert totals.is_balanced, totals
        assert team.num_running >= 0 and team.outstanding_tokens >= 0, totals

    def view(self, identity: Limited) -> LimitsView:
        """What the team may still use now, by the limits in `identity`."""
        now = self._clock()
        team = self._teams.get(identity.team_id) or _Team()
        limits: Limits = identity.limits
        concurrent = LimitView(None, None, None)
        if limits.concurrent is not None:
            concurrent = LimitView(limits.concurrent, max(0, limits.concurrent - team.num_running), None)
        return LimitsView(
            requests=_rate_view(team.requests, limits.requests_per_minute, now),
            tokens=_rate_view(team.tokens, limits.tokens_per_minute, now),
            concurrent=concurrent,
        )

    def outstanding(self, team_id: int | None = None) -> int:
        """The number of requests between admission and their end, of one team or of all teams."""
        if team_id is not None:
            team = self._teams.get(team_id)
            return 0 if team is None else team.num_running
        return sum(team.num_running for team in self._teams.values())

    def imbalance(self) -> int:
        """By how many requests and tokens, over all teams, the invariant is broken. Anything but 0 is a bug."""
        return sum(team.totals().imbalance for team in self._teams.values())

    def totals(self, team_id: int) -> Totals:
        """One team's totals since the start."""
        team = self._teams.get(team_id)
        return Totals() if team is None else team.totals()


def _rate_view(window: RollingWindow, limit: int | None, now: float) -> LimitView:
    if limit is None:
        return LimitView(None, None, None)
    used = window.sum(now)
    return LimitView(limit, max(0, limit - used), window.seconds_until_empty(now))


def _exceeded(identity: Identity, limit: str, hard: int, used: int, requested: int, wait: float) -> LimitExceeded:
    return LimitExceeded(
        limit=limit,
        scope="team",
        name=identity.team,
        hard=hard,
        used=used,
        requested=requested,
        retry_after_seconds=wait,
    )
