"""Coast mode: a team whose requests all take about as long as each other is served in order of arrival.

Levels pay when short requests wait behind long ones. Where all are alike they only let each newcomer pass the half-done
ones, and every request ends late: two jobs of 8 steps end after 15 and 16 instead of 8 and 16 (O3). So each team has an
estimate of how much its requests differ, the squared coefficient of variation CV^2 = variance / mean^2 of the work of
its latest completions. Below the lower threshold the team coasts, above the upper one it is back to levels; in
between nothing changes, so an ordinary mix does not flip to and fro. An exponential distribution has CV^2 = 1, the
point at which neither order is better.

Only finished sequences count. One that was aborted, timed out or failed has done part of its work, and how much says
when its caller lost patience, not how long requests are; were it counted, callers could switch a team's order by
hanging up.

A live sequence that has done more than three times the mean vetoes coasting until it ends. What finishes first is
short, so the estimate of a mixed team would otherwise say "all alike" while its long requests still run, and its short
ones would wait behind them.
"""

from collections import deque

from policies.config import PolicyConfig

_WHOLE = 100  # thresholds are in percent
_VETO_MEANS = 3


class CoastMode:
    """One team's estimate and the mode that follows from it. Exact: sums are integers, CV^2 is never divided out."""

    __slots__ = ("_above", "_below", "_is_alike", "_least", "_square_sum", "_sum", "_window", "_works", "longest_us")

    def __init__(self, config: PolicyConfig) -> None:
        self.longest_us = 0  # the most work that a live sequence has done, while completions are alike
        self._is_alike = False
        self._below = config.coast_below_percent
        self._above = config.coast_above_percent
        self._least = config.coast_completions_min
        self._window = config.coast_completions
        self._works: deque[int] = deque()
        self._sum = 0
        self._square_sum = 0

    def complete(self, work_us: int) -> bool:
        """A sequence finished after `work_us` of work in all. Returns whether completions began or ceased to be alike;
        when they begin, `longest_us` must be told.
        """
        works = self._works
        works.append(work_us)
        self._sum += work_us
        self._square_sum += work_us * work_us
        if len(works) > self._window:
            gone = works.popleft()
            self._sum -= gone
            self._square_sum -= gone * gone
        if len(works) < self._least:
            return False
        # n * sum of squares - (sum)^2 is n^2 * variance, and (sum)^2 is n^2 * mean^2.
        squared_mean = self._sum * self._sum
        variance = len(works) * self._square_sum - squared_mean
        if self._is_alike:
            changes = _WHOLE * variance > self._above * squared_mean
        else:
            changes = _WHOLE * variance < self._below * squared_mean
        if changes:
            self._is_alike = not self._is_alike
        return changes

    @property
    def is_alike(self) -> bool:
        """Completions are alike. Only then need `longest_us` be kept."""
        return self._is_alike

    @property
    def is_coasting(self) -> bool:
        """Completions are alike, and no live sequence vetoes it."""
        return self._is_alike and self.longest_us * len(self._works) <= _VETO_MEANS * self._sum

    def mean_work_us(self) -> int:
        """Mean work of the completions that count, rounded down; 0 before the first."""
        return self._sum // len(self._works) if self._works else 0
