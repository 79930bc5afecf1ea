"""The usage report: what each team used, by team, tier, model, day and key.

It sums ledger rows by the moment they finished, so each request is in exactly one period and a past period never
changes. Refused calls are not in the ledger and use up nothing. Rows are grouped by ids: a renamed team is one line.
Every row is in exactly one line, so lines of any grouping sum to the total and to the ledger itself.

Device seconds are charged step by step; the ledger books all of a request's when it ends. The service samples book
them in the second they are charged, so over a period the two differ by what requests across its edges got on the other
side, and by charges of requests whose end nobody saw ("lost" rows carry their last known progress only).
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from sqlalchemy import ColumnElement, case, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from tenants import tables
from tenants.clock import from_epoch_us
from tenants.errors import Invalid
from tenants.key_format import redact
from tenants.ledger_queries import NOTHING, SUMS, TIMES, Key, Spread, finished_within, spreads, sums
from tenants.periods import DAY_US, DEFAULT_TIME_ZONE, Period, offsets

_ledger = tables.ledger.c
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

    Days are those of the period's time zone. Raises Invalid for an unknown dimension; an unknown team has no lines.
    """
    by = check_dimensions(by)
    where = finished_within(period)
    if team is not None:
        team_id = select(tables.teams.c.id).where(tables.teams.c.name == team).scalar_subquery()
        where &= _ledger.team_id == team_id
    groups = {name: await _day(connection, period) if name == "day" else _GROUPS[name] for name in by}
    lines = await sums(connection, groups, where)
    total = (await sums(connection, {}, where))[()]
    labels = await _labels(connection, by)
    times = await spreads(connection, groups, where, TIMES)
    total_times = await spreads(connection, {}, where, TIMES)
    data = [
        {name: _label(name, value, labels) for name, value in zip(by, key, strict=True)} | _line(found, times, key)
        for key, found in lines.items()
        if found["requests"]
    ]
    data.sort(key=lambda line: tuple(str(line[name]) for name in by))
    return {
        "object": "usage_report",
        **period.describe(),
        "by": list(by),
        "data": data,
        "total": _line(total, total_times, ()),
    }


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
