"""The time series of a fairness report, thinned to what a picture can show.

A bin sums whole samples, so that a team's share in it is by the same rule as in the report: only the samples in which
the team was backlogged count, for its own time as for everybody's.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from typing import Any

from tenants.reports import min_to_max, weighted_jain

BINS_MAX = 96
OTHERS = "others"
_STEPS = [1, 2, 5, 10, 15, 20, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400]
Values = list[float | None]


@dataclass(frozen=True, slots=True)
class Binned:
    """Per bin and team; None where the team was not backlogged (or nothing was measured)."""

    start: float  # epoch seconds of the first bin's left edge
    width: float  # seconds of a bin
    count: int
    share: dict[str, Values]
    entitled: dict[str, Values]
    lag: dict[str, Values]  # the largest of the bin
    lag_bound: Values
    jain: Values
    satisfaction_least: Values  # of the least satisfied team over that of the most satisfied


def bin_series(series: Mapping[str, Any], shown: Sequence[str], weights: Mapping[str, float]) -> Binned:
    """Bins of whole round seconds. Teams that are not in `shown` are drawn together as `others`."""
    ends: Sequence[float] = series["at"]
    lengths: Sequence[float] = series["interval_seconds"]
    if not ends:
        return Binned(0.0, 1.0, 0, {}, {}, {}, [], [], [])
    first = ends[0] - lengths[0]
    # A sample is never cut: a bin is at least as long as the longest one.
    width = max(step_of((ends[-1] - first) / BINS_MAX), step_of(max(lengths) - 0.5))
    start = first // width * width if width > 1 else first
    # A sample is in the bin that its middle is in.
    index = [int((end - length / 2 - start) // width) for end, length in zip(ends, lengths, strict=True)]
    count = index[-1] + 1
    jain, least = _evenness(series, index, count, weights)
    merged = _merged(series, shown)
    everybody = [_totals(series[name], len(index)) for name in ("served", "entitled")]
    share, entitled, lag = {}, {}, {}
    for team, (served, due, backlogged, lags) in merged.items():
        share[team], entitled[team] = _shares(everybody, index, count, served, due, backlogged)
        lag[team] = _greatest(index, count, lags, backlogged)
    bounds = [value or None for value in series["lag_bound"]]
    return Binned(start, width, count, share, entitled, lag, _greatest(index, count, bounds), jain, least)


def step_of(seconds: float) -> float:
    """The next round length of time: 1 s … 1 day, then whole days."""
    return next((step for step in _STEPS if step >= seconds), math.ceil(seconds / 86400) * 86400)


def time_ticks(binned: Binned, zone: tzinfo = UTC, *, elapsed: bool = False, most: int = 4) -> list[tuple[float, str]]:
    """(0..1, label) at round moments: clock time in `zone`, or seconds since the start."""
    span = binned.width * binned.count
    if not span:
        return []
    step = step_of(span / (most + 0.25))
    if elapsed:
        return [(i * step / span, f"{i * step:g} s") for i in range(math.floor(span / step) + 1)]
    offset = _offset(binned.start, zone)
    first = math.ceil((binned.start + offset) / step) * step - offset
    places = [first + i * step for i in range(math.floor((binned.start + span - first) / step) + 1)]
    form = "%d %b" if step >= 86400 else "%H:%M" if step >= 60 else "%H:%M:%S"
    return [((at - binned.start) / span, datetime.fromtimestamp(at, zone).strftime(form)) for at in places]


def _offset(at: float, zone: tzinfo) -> float:
    offset = datetime.fromtimestamp(at, zone).utcoffset()
    return offset.total_seconds() if offset else 0.0


def _merged(series: Mapping[str, Any], shown: Sequence[str]) -> dict[str, tuple[Values, Values, Values, Values]]:
    """served, entitled, backlogged and lag of each shown team, and of the others together."""
    nothing = [0.0] * len(series["at"])
    found: dict[str, tuple[Values, Values, Values, Values]] = {}
    for team in series["served"]:
        values = (
            series["served"][team],
            series["entitled"].get(team, nothing),
            series["backlogged"].get(team, nothing),
            series["lag"].get(team, nothing),
        )
        if team in shown:
            found[team] = values
        elif OTHERS not in found:
            found[OTHERS] = values
        else:
            old = found[OTHERS]
            found[OTHERS] = (
                [(a or 0) + (b or 0) for a, b in zip(old[0], values[0], strict=True)],
                [(a or 0) + (b or 0) for a, b in zip(old[1], values[1], strict=True)],
                [max(a or 0, b or 0) for a, b in zip(old[2], values[2], strict=True)],
                [max(a or 0, b or 0) for a, b in zip(old[3], values[3], strict=True)],
            )
    return {team: found[team] for team in [*shown, OTHERS] if team in found}


def _shares(
    everybody: Sequence[Sequence[float]],
    index: Sequence[int],
    count: int,
    served: Values,
    due: Values,
    backlogged: Values,
) -> tuple[Values, Values]:
    sums = [[0.0] * count for _ in range(4)]  # served, entitled, and both of everybody
    all_served, all_due = everybody
    for i, place in enumerate(index):
        if backlogged[i]:
            for total, value in zip(sums, (served[i], due[i], all_served[i], all_due[i]), strict=True):
                total[place] += value or 0.0

    def part(some: list[float], whole: list[float]) -> Values:
        return [a / b if b > 0 else None for a, b in zip(some, whole, strict=True)]

    return part(sums[0], sums[2]), part(sums[1], sums[3])


def _totals(columns: Mapping[str, Sequence[float]], length: int) -> list[float]:
    totals = [0.0] * length
    for values in columns.values():
        for i, value in enumerate(values):
            totals[i] += value
    return totals


def _greatest(index: Sequence[int], count: int, values: Sequence[float | None], where: Values | None = None) -> Values:
    found: Values = [None] * count
    for i, place in enumerate(index):
        value = values[i]
        if value is not None and (where is None or where[i]):
            old = found[place]
            found[place] = value if old is None else max(old, value)
    return found


def _evenness(
    series: Mapping[str, Any], index: Sequence[int], count: int, weights: Mapping[str, float]
) -> tuple[Values, Values]:
    """Weighted Jain and least over greatest satisfaction of each bin, over the teams that were backlogged in it."""
    got: list[dict[str, list[float]]] = [{} for _ in range(count)]
    for team, served in series["served"].items():
        due = series["entitled"].get(team)
        backlogged = series["backlogged"].get(team)
        if due is None or backlogged is None:
            continue
        for i, place in enumerate(index):
            if backlogged[i]:
                pair = got[place].setdefault(team, [0.0, 0.0])
                pair[0] += served[i]
                pair[1] += due[i]
    jain: Values = []
    least: Values = []
    for teams in got:
        judged = [(weights.get(team, 1), a / b) for team, (a, b) in teams.items() if b > 0]
        jain.append(weighted_jain(judged) if len(judged) > 1 else None)
        least.append(min_to_max([x for _, x in judged]) if len(judged) > 1 else None)
    return jain, least
