"""Time as the engine reads it: one interface, a real clock, and a clock that tests and the simulator move by hand."""

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic time in whole microseconds. The engine never reads calendar time."""

    def now_us(self) -> int:
        """Microseconds since an arbitrary start. Never less than at an earlier call."""


class MonotonicClock:
    """The machine's monotonic clock."""

    def now_us(self) -> int:
        return time.monotonic_ns() // 1000


class VirtualClock:
    """A clock that moves only when told to."""

    def __init__(self, start_us: int = 0) -> None:
        self._now_us = start_us

    def now_us(self) -> int:
        return self._now_us

    def advance(self, by_us: int) -> None:
        """Move forward by `by_us` microseconds. Raises ValueError when that is negative."""
        if by_us < 0:
            raise ValueError(f"a clock cannot go back ({by_us} us)")
        self._now_us += by_us

    def advance_to(self, at_us: int) -> None:
        """Move forward to `at_us`. Stay when that moment is already past."""
        self._now_us = max(self._now_us, at_us)
