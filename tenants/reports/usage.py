"""The usage report: what each team used, by team, tier, model, day and key.

It sums ledger rows by the moment they finished, so each request is in exactly one period and a past period never
changes. `requests` are those that count: a request that was given back before it ran (outcome `refused` or `timeout`)
has a row, and uses up nothing. Calls that were refused before their admission are not in the ledger. Rows are grouped
by ids: a renamed team is one line. Every row is in exactly one line, so lines of any grouping sum to the total and to
the ledger itself.

With days, everybody in the report has a line for each day of the period, of zeros where nothing ended: a mean over the
lines must not be one over the busy days only. Everybody is each combination of the other dimensions that has a row in
the period, and a team that was asked for by name. More than IDLE_DAYS_MAX days before the first row of the report and
after the last one there are no such lines.

Device seconds are charged step by step; the ledger books all of a request's when it ends. The service samples book
them in the second they are charged, so over a period the two differ by what requests across its edges got on the other
side, and by charges of requests whose end nobody saw ("lost" rows carry their last known progress only).
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from sqlalchemy import ColumnElement, case, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from tenants import tables
from tenants.clock import from_epoch_us
from tenants.errors import Invalid
from tenants.key_format import redact
from tenants.reports.periods import DAY_US, DEFAULT_TIME_ZONE, Period, days_of, offsets
from tenants.reports.queries import NOTHING, OUTCOMES, SUMS, TIMES, Key, Spread, finished_within, spreads, sums
from tenants.teams import GONE, team_statuses

_ledger = tables.ledger.c
LINES_MAX = 100_000  # of a report by day
# How far before the first row and after the last one idle days have lines: nobody means the decades since 1970.
IDLE_DAYS_MAX = 366
DIMENSIONS = ("team", "tier", "model", "day", "key")
# What a row is grouped by: ids where there are any. Days depend on the time zone.
_GROUPS: dict[str, ColumnElement[Any]] = {
    "team": _ledger.team_id,
    "tier": _ledger.tier,
    "model": _ledger.model,
    "key": _ledger.key_id,
}


def check_dimensions(names: Sequence[str]) -> tuple[str, ...]:
    """`names` if each is a dimension, once. Raises Invalid."""
    for name in names:
        if name not in DIMENSIONS:
            raise Invalid(f"Cannot group by {redact(name[:80])!r}: use some of {', '.join(DIMENSIONS)}.", param="by")
    if len(set(names)) != len(names):
        raise Invalid("A dimension is named twice.", param="by")
    return tuple(names)


async def usage_report(
    connection: AsyncConnection, period: Period, by: Sequence[str] = ("team",), *, team: str | None = None
) -> dict[str, Any]:
    """Usage in `period`, one line for each combination of `by`, and a total line. `team` leaves the others out.

    Days are those of the period's time zone. A line by team has a `team_status`: whether that team is now `active`,
    `archived` or `gone`. Raises Invalid for an unknown dimension, and when days would make more than LINES_MAX lines;
    an unknown team has no lines.
    """
    by = check_dimensions(by)
    where = finished_within(period)
    team_id = None
    if team is not None:
        team_id = await connection.scalar(select(tables.teams.c.id).where(tables.teams.c.name == team))
        where &= _ledger.team_id == team_id
    groups = {name: await _day(connection, period) if name == "day" else _GROUPS[name] for name in by}
    sums_by_key = await sums(connection, groups, where)
    lines = {key: found for key, found in sums_by_key.items() if any(found[name] for name in OUTCOMES)}
    if "day" in by:
        lines = _with_idle_days(lines, by, period, team_id)
    total = (await sums(connection, {}, where))[()]
    labels = await _labels(connection, by)
    statuses = await team_statuses(connection) if "team" in by else {}
    times = await spreads(connection, groups, where, TIMES)
    total_times = await spreads(connection, {}, where, TIMES)
    data = [
        {name: _label(name, value, labels) for name, value in zip(by, key, strict=True)}
        | _line(found, times, key)
        | ({"team_status": statuses.get(key[by.index("team")], GONE)} if "team" in by else {})
        for key, found in lines.items()
    ]
    data.sort(key=lambda line: tuple(str(line[name]) for name in by))
    return {
        "object": "usage_report",
        **period.describe(),
        "by": list(by),
        "data": data,
        "total": _line(total, total_times, ()),
    }


def _with_idle_days(
    lines: dict[Key, dict[str, int]], by: tuple[str, ...], period: Period, team_id: int | None
) -> dict[Key, dict[str, int]]:
    """`lines`, and one of zeros for each day on which somebody in the report has none. Raises Invalid."""
    place = by.index("day")
    everybody = {key[:place] + key[place + 1 :] for key in lines}
    others = by[:place] + by[place + 1 :]
    if not others:
        everybody = {()}
    elif others == ("team",) and team_id is not None:
        everybody = {(team_id,)}
    busy = [key[place] for key in lines] or [(period.to_us - 1) // DAY_US]
    days = _days_around(period, min(busy) - IDLE_DAYS_MAX, max(busy) + IDLE_DAYS_MAX)
    if len(days) * len(everybody) > LINES_MAX:
        raise Invalid(
            f"This report would have {len(days) * len(everybody)} lines, {len(everybody)} for each of {len(days)} "
            f"days; at most {LINES_MAX} are made. Ask for a shorter period, one team, or fewer dimensions.",
            param="by",
        )
    nothing = dict.fromkeys(SUMS, 0)
    return {(*key[:place], day, *key[place:]): nothing for key in everybody for day in days} | lines


def _days_around(period: Period, first: int, last: int) -> list[int]:
    """The period's days from `first` to `last`, all three as days since 1970. A zone is never two days from UTC."""
    from_us = max(period.from_us, (first - 2) * DAY_US)
    to_us = max(from_us + 1, min(period.to_us, (last + 2) * DAY_US))
    return [day for day in days_of(replace(period, from_us=from_us, to_us=to_us)) if first <= day <= last]


def _line(found: dict[str, int], times: dict[Key, tuple[int, dict[str, Spread]]], key: Key) -> dict[str, Any]:
    line: dict[str, Any] = {name: found[name] for name in SUMS}
    line["device_seconds"] = line.pop("device_us") / 1e6
    line["overhead_device_seconds"] = line.pop("overhead_device_us") / 1e6
    of_key = times[key][1] if key in times else {}
    for name in TIMES:
        line |= of_key.get(name, NOTHING).seconds(name)
    return line


async def _day(connection: AsyncConnection, period: Period) -> ColumnElement[Any]:
    """Days since 1970 on the wall clock of the period's zone."""
    finished = _ledger.finished_at_us
    if period.time_zone == DEFAULT_TIME_ZONE:
        return finished // DAY_US
    ends = select(func.min(finished), func.max(finished)).where(finished_within(period))
    first, last = (await connection.execute(ends)).one()
    if first is None:
        return finished // DAY_US
    pieces = offsets(period.time_zone, first, last)
    changes = [(finished < until, offset) for (_, offset), (until, _) in pairwise(pieces)]
    latest = pieces[-1][1]
    return (finished + (case(*changes, else_=latest) if changes else latest)) // DAY_US


async def _labels(connection: AsyncConnection, by: tuple[str, ...]) -> dict[str, dict[Any, str]]:
    """Present names of ids."""
    labels: dict[str, dict[Any, str]] = {}
    if "team" in by:
        query = select(tables.teams.c.id, tables.teams.c.name)
        labels["team"] = {row[0]: row[1] for row in await connection.execute(query)}
    if "key" in by:
        key_query = select(tables.api_keys.c.id, tables.api_keys.c.public_id)
        labels["key"] = {row[0]: row[1] for row in await connection.execute(key_query)}
    return labels


def _label(name: str, value: Any, labels: dict[str, dict[Any, str]]) -> str:
    if name == "day":
        return from_epoch_us(value * DAY_US).date().isoformat()
    if name in labels:
        return labels[name].get(value, f"{name} {value}")
    return str(value)
