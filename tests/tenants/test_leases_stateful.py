"""Conservation of leases under any order of calls, against a model that keeps plain lists."""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from tenants.errors import LimitExceeded
from tenants.leases import Leases, Reservation
from tests.support.tenants.stores import Clock, identity

TEAMS = {
    1: identity(1, requests_per_minute=5, tokens_per_minute=100, concurrent=3),
    2: identity(2, tokens_per_minute=60),
    3: identity(3),
}


@dataclass
class Counted:
    """Something admitted at `at`; it counts for a minute."""

    team: int
    at: float
    amount: int = 1


class LeasesMachine(RuleBasedStateMachine):
    """Every call is made on the leases and on two plain lists; they must agree at every step."""

    bare = Bundle("bare")  # holds a request and a slot
    held = Bundle("held")  # and tokens

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.leases = Leases(self.clock)
        self.requests: list[Counted] = []
        self.tokens: list[Counted] = []
        self.running = dict.fromkeys(TEAMS, 0)
        self.of: dict[Reservation, tuple[Counted, Counted | None]] = {}
        self.settled = dict.fromkeys(TEAMS, 0)

    def _used(self, counted: list[Counted], team: int) -> int:
        return sum(one.amount for one in counted if one.team == team and one.at > self.clock.now - 60)

    @rule(target=bare, team=st.sampled_from(sorted(TEAMS)))
    def reserve_request(self, team: int):  # type: ignore[no-untyped-def]
        limits = TEAMS[team].limits
        fits = (limits.concurrent is None or self.running[team] < limits.concurrent) and (
            limits.requests_per_minute is None or self._used(self.requests, team) < limits.requests_per_minute
        )
        try:
            reservation = self.leases.reserve_request(TEAMS[team])
        except LimitExceeded as error:
            assert not fits
            assert error.retry_after_seconds > 0
            return multiple()
        assert fits
        self.requests.append(Counted(team, self.clock.now))
        self.running[team] += 1
        self.of[reservation] = (self.requests[-1], None)
        return reservation

    @rule(target=held, reservation=consumes(bare), amount=st.integers(0, 120))
    def reserve_tokens(self, reservation: Reservation, amount: int):  # type: ignore[no-untyped-def]
        team = reservation.identity.team_id
        limit = TEAMS[team].limits.tokens_per_minute
        fits = limit is None or self._used(self.tokens, team) + amount <= limit
        request, _ = self.of[reservation]
        try:
            self.leases.reserve_tokens(reservation, amount)
        except LimitExceeded:
            assert not fits
            request.amount = 0
            self.running[team] -= 1
            return multiple()
        assert fits
        self.tokens.append(Counted(team, self.clock.now, amount))
        self.of[reservation] = (request, self.tokens[-1])
        return reservation

    @rule(reservation=consumes(held), part=st.floats(0, 1))
    def settle(self, reservation: Reservation, part: float) -> None:
        _, tokens = self.of[reservation]
        assert tokens is not None
        tokens.amount = int(tokens.amount * part)
        self.leases.settle(reservation, tokens.amount)
        self.running[tokens.team] -= 1
        self.settled[tokens.team] += tokens.amount

    @rule(reservation=consumes(held))
    def release_after_tokens(self, reservation: Reservation) -> None:
        self._release(reservation)

    @rule(reservation=consumes(bare))
    def release_before_tokens(self, reservation: Reservation) -> None:
        self._release(reservation)

    def _release(self, reservation: Reservation) -> None:
        request, tokens = self.of[reservation]
        self.leases.release(reservation)
        request.amount = 0
        if tokens is not None:
            tokens.amount = 0
        self.running[request.team] -= 1

    @rule(seconds=st.sampled_from([0.5, 10.0, 31.0, 60.0, 200.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def agrees_and_is_conserved(self) -> None:
        for team, who in TEAMS.items():
            totals = self.leases.totals(team)
            assert totals.is_balanced, totals
            assert totals.outstanding_requests == self.running[team] == self.leases.outstanding(team)
            assert totals.settled_tokens == self.settled[team]
            view = self.leases.view(who)
            if who.limits.requests_per_minute is not None:
                assert view.requests.remaining == who.limits.requests_per_minute - self._used(self.requests, team)
            if who.limits.tokens_per_minute is not None:
                assert view.tokens.remaining == who.limits.tokens_per_minute - self._used(self.tokens, team)


LeasesMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestLeasesConservation = LeasesMachine.TestCase
