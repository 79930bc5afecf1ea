"""The engine's lives: how long to wait before the next start, and whether further starts seem useless.

A *life* begins when the engine is connected and ends with that connection. A start that never got so far is a life of
zero seconds. A life of at most `short_life_seconds` is *short*.

The pause before the next start doubles from FIRST_PAUSE_SECONDS up to `pause_seconds_max`. After `short_lives_max`
short lives in a row the engine is *failing*. Then the pause becomes `pause_seconds_max` at once and stays there, and
/readyz, a log line and a metric show the last reason. A life longer than `short_life_seconds` resets the pause and ends
the failing. The clock is passed in; nothing here waits.
"""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from gateway.logs import one_line

_log = logging.getLogger("terazi.engine")

FIRST_PAUSE_SECONDS = 0.5
RETRY_SECONDS_MIN = 2  # what a client is told while a start is under way
REASON_CHARS_MAX = 300


@dataclass(frozen=True, slots=True)
class EngineFailure:
    """Why the engine is failing.

    `next_start_seconds` is the time to the next start; 0 while a start is under way or the engine runs.
    """

    reason: str
    short_lives: int
    next_start_seconds: float

    def describe(self) -> dict[str, object]:
        """As JSON shows it."""
        return {
            "reason": self.reason,
            "short_lives": self.short_lives,
            "next_start_seconds": round(self.next_start_seconds, 1),
        }


class EngineLives:
    """Owns the count of short lives and the moment of the next start. `now` is monotonic seconds."""

    def __init__(
        self,
        *,
        short_life_seconds: float = 60.0,
        short_lives_max: int = 5,
        pause_seconds_max: float = 60.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._short_life_seconds = short_life_seconds
        self._short_lives_max = short_lives_max
        self._pause_seconds_max = pause_seconds_max
        self._now = now
        self._ready_at: float | None = None
        self._next_start_at: float | None = None
        self._num_short = 0
        self._num_pauses = 0  # since the last long life
        self._reason = ""
        self.num_restarts = 0  # counted by the supervisor or follower

    def starting(self) -> None:
        """Note that a start begins now."""
        self._next_start_at = None

    def ready(self) -> None:
        """Note that the engine is connected: a life begins."""
        self._ready_at = self._now()

    def ended(self, reason: str) -> float:
        """Note that the engine is gone, or that its start failed. Returns the seconds to wait before the next start."""
        was_long = self._has_lived_long()
        self._ready_at = None
        if was_long:
            self._num_short = self._num_pauses = 0
        else:
            self._num_short += 1
        self._reason = one_line(reason, REASON_CHARS_MAX)
        # Bound the exponent, so that a year of failures does not make a huge number.
        pause = min(FIRST_PAUSE_SECONDS * float(1 << min(self._num_pauses, 30)), self._pause_seconds_max)
        if self._num_short >= self._short_lives_max:
            pause = self._pause_seconds_max
            _log.error(
                "the engine is failing: %d lives in a row of at most %g s; next start in %.1f s; the last one: %s",
                self._num_short,
                self._short_life_seconds,
                pause,
                self._reason,
            )
        self._num_pauses += 1
        self._next_start_at = self._now() + pause
        return pause

    @property
    def is_steady(self) -> bool:
        """Whether the present life has lasted longer than a short life or, after an end, the last life did."""
        return not self._num_short or self._has_lived_long()

    @property
    def failure(self) -> EngineFailure | None:
        """Why the engine is failing; None when it is not."""
        if self._num_short < self._short_lives_max or self._has_lived_long():
            return None
        return EngineFailure(self._reason, self._num_short, self._wait_seconds())

    @property
    def retry_after_seconds(self) -> int:
        """When a client should try again while there is no engine: the time to the next start, in whole seconds."""
        return max(RETRY_SECONDS_MIN, math.ceil(self._wait_seconds()))

    def _wait_seconds(self) -> float:
        return 0.0 if self._next_start_at is None else max(0.0, self._next_start_at - self._now())

    def _has_lived_long(self) -> bool:
        return self._ready_at is not None and self._now() - self._ready_at > self._short_life_seconds
