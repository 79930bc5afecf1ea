"""A bounded amount that teams share: for each team and in all. Who finds no room waits, and teams take turns.

Two rules keep one team from using up what others need:

- No team holds more than `team_max`, so some of `total_max` is always left to others (`total_max` is the larger).
- Of those who wait, a team's own are served in their order, and teams one after the other. A team that is at its own
  bound is passed. The next in turn that fits its team but not the total is waited for: nobody passes it, so a large
  demand is not starved by small ones.

Used with bytes (bodies in preparation) and with turns (amount 1). All calls are from the event loop's thread.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class _Waiter:
    amount: int
    granted: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class FairRoom:
    """Owns what every team holds of one bounded amount. Units are the caller's."""

    def __init__(self, *, team_max: int, total_max: int) -> None:
        assert 0 < team_max <= total_max, (team_max, total_max)
        self.team_max = team_max
        self.total_max = total_max
        self.held = 0  # by all teams
        self._held: dict[int, int] = {}  # by team; without the zeros
        self._waiting: dict[int, deque[_Waiter]] = {}  # by team, in the order of turns; without empty queues

    def held_by(self, team_id: int) -> int:
        """What one team holds."""
        return self._held.get(team_id, 0)

    @property
    def num_waiting(self) -> int:
        """Demands that wait, of all teams."""
        return sum(len(waiters) for waiters in self._waiting.values())

    def num_waiting_of(self, team_id: int) -> int:
        """Demands of one team that wait."""
        return len(self._waiting.get(team_id, ()))

    def is_at_team_max(self, team_id: int, amount: int) -> bool:
        """Whether the team's own bound is what keeps `amount` waiting."""
        return self.held_by(team_id) + amount > self.team_max

    async def take(self, team_id: int, amount: int) -> None:
        """Wait until `amount` fits, and hold it. At most `team_max`, for more would wait for ever."""
        assert 0 <= amount <= self.team_max, f"{amount} never fits into {self.team_max}"
        waiter = _Waiter(amount)
        self._waiting.setdefault(team_id, deque()).append(waiter)
        self._grant()
        if waiter.granted.done():
            return
        try:
            await waiter.granted
        except asyncio.CancelledError:
            if waiter.granted.cancelled():
                self._forget(team_id, waiter)
            else:  # granted in the same moment
                self.give_back(team_id, amount)
            raise

    def give_back(self, team_id: int, amount: int) -> None:
        """End holding `amount`; those who waited for it go on."""
        left = self._held.get(team_id, 0) - amount
        assert left >= 0, "more is given back than was taken"
        self.held -= amount
        if left:
            self._held[team_id] = left
        else:
            self._held.pop(team_id, None)
        self._grant()

    @contextlib.asynccontextmanager
    async def turn(self, team_id: int) -> AsyncIterator[None]:
        """Hold 1 inside the block."""
        await self.take(team_id, 1)
        try:
            yield
        finally:
            self.give_back(team_id, 1)

    def _forget(self, team_id: int, waiter: _Waiter) -> None:
        waiters = self._waiting[team_id]
        waiters.remove(waiter)
        if not waiters:
            del self._waiting[team_id]
        self._grant()  # it may have been the one that others waited behind

    def _grant(self) -> None:
        while (team_id := self._next_in_turn()) is not None:
            waiters = self._waiting.pop(team_id)
            waiter = waiters.popleft()
            if waiters:
                self._waiting[team_id] = waiters  # at the end: the other teams come first
            self._held[team_id] = self._held.get(team_id, 0) + waiter.amount
            self.held += waiter.amount
            waiter.granted.set_result(None)

    def _next_in_turn(self) -> int | None:
        for team_id, waiters in self._waiting.items():
            amount = waiters[0].amount
            if self.is_at_team_max(team_id, amount):
                continue
            return team_id if self.held + amount <= self.total_max else None
        return None
