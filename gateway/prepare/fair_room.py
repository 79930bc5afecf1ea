"""An amount that teams share, bounded for each team and in all. A demand that finds no room waits; teams take turns.

Rules keep one team from using up what others need:

- No team holds more than `team_max`. Where `total_max` is larger, some of it is always left to other teams.
- A team's demands are served in their order, and the teams take turns.
- A team whose next demand exceeds the team's own bound is passed over.
- A demand that fits its team but not the total blocks all demands behind it, so that small demands do not starve a
  large one.

For example, `total_max` is 10 and 8 is held: a demand for 4 whose turn it is waits, and a later demand for 2 waits
behind it.

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
    """Owns what every team holds of one bounded amount. The caller chooses the unit."""

    def __init__(self, *, team_max: int, total_max: int) -> None:
        assert 0 < team_max <= total_max, (team_max, total_max)
        self.team_max = team_max
        self.total_max = total_max
        self.held = 0  # by all teams
        self._held: dict[int, int] = {}  # by team; teams that hold nothing are left out
        self._waiting: dict[int, deque[_Waiter]] = {}  # by team, in the order of turns; no empty queue

    def held_by(self, team_id: int) -> int:
        """What one team holds."""
        return self._held.get(team_id, 0)

    @property
    def num_waiting(self) -> int:
        """The number of waiting demands, of all teams."""
        return sum(len(waiters) for waiters in self._waiting.values())

    def num_waiting_of(self, team_id: int) -> int:
        """The number of one team's waiting demands."""
        return len(self._waiting.get(team_id, ()))

    def is_at_team_max(self, team_id: int, amount: int) -> bool:
        """Whether the team's own bound leaves no room for `amount`."""
        return self.held_by(team_id) + amount > self.team_max

    async def take(self, team_id: int, amount: int) -> None:
        """Wait until `amount` fits, and hold it. `amount` is at most `team_max`; more would wait for ever."""
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
            else:  # cancelled in the moment in which the amount was granted
                self.give_back(team_id, amount)
            raise

    def give_back(self, team_id: int, amount: int) -> None:
        """Stop holding `amount`. Demands that fit now are granted."""
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
        self._grant()  # other demands may have waited behind this one

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
