"""Reading service, interference and step samples: by the second where they are kept, by the hour everywhere else.

`tenants.retention` sums each hour of UTC when it is over, and later deletes its seconds. A report takes whole hours
from the hour tables and the rest of its period from the seconds. Summed over whole hours both give the same figures;
that is what the hour's columns `served_all_us` and the like are for, which only seconds can tell.

Where the seconds are gone, an hour counts in the period that contains its start, whole: adjacent periods still share
nothing and miss nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import ColumnElement, Select, Subquery, Table, case, func, select, union_all
from sqlalchemy.ext.asyncio import AsyncConnection

from policies.team_counters import Over, names_over
from tenants import tables
from tenants.reports.periods import Period

HOUR_US = 3_600_000_000
_samples = tables.service_samples.c
_hours = tables.service_hours.c

# How a column of service_hours is made from seconds, and from other hours: the team counters as they are declared, and
# figures of the whole interval.
SUMMED = ("interval_ms", *names_over(Over.SUM))
SUMMED_BACKLOGGED = ("served_backlogged_us", "entitled_backlogged_us", "served_all_us", "entitled_all_us")
LEAST = names_over(Over.LEAST)
MOST = (*names_over(Over.MOST), "lag_bound_us")
_AT_LAST = names_over(Over.LATEST)
LATEST = ("last_at_us", *_AT_LAST)
SERVICE_COLUMNS = (*SUMMED, *SUMMED_BACKLOGGED, *LEAST, *MOST, *LATEST)


@dataclass(frozen=True, slots=True)
class Span:
    """[from_us, to_us)."""

    from_us: int
    to_us: int

    def holds(self, column: ColumnElement[int]) -> ColumnElement[bool]:
        """The condition that `column` is in it."""
        return (column >= self.from_us) & (column < self.to_us)


@dataclass(frozen=True, slots=True)
class Reach:
    """Which tables a period is read from."""

    hours: Span | None
    seconds: tuple[Span, ...]
    seconds_from_us: int  # nothing finer than hours before this
    hours_from_us: int = 0  # nothing at all before this


def floor_hour(at_us: int) -> int:
    """The start of its hour."""
    return at_us // HOUR_US * HOUR_US


def ceil_hour(at_us: int) -> int:
    """The start of the first hour that does not begin earlier."""
    return -(-at_us // HOUR_US) * HOUR_US


async def reach(connection: AsyncConnection, period: Period) -> Reach:
    """How to read `period` now."""
    marks = tables.sample_marks.c
    row = (await connection.execute(select(marks.hours_to_us, marks.seconds_from_us, marks.hours_from_us))).one()
    return replace(split(period, row.hours_to_us, row.seconds_from_us), hours_from_us=row.hours_from_us)


def split(period: Period, hours_to_us: int, seconds_from_us: int) -> Reach:
    """`period` as whole hours that have been summed, and seconds around them. Both marks are starts of hours."""
    hours_from = ceil_hour(period.from_us)
    hours_to = ceil_hour(period.to_us) if period.to_us <= seconds_from_us else floor_hour(period.to_us)
    hours = Span(hours_from, min(hours_to_us, hours_to))
    if hours.from_us >= hours.to_us:
        edges = [Span(max(period.from_us, seconds_from_us), period.to_us)]
        return Reach(None, _not_empty(edges), seconds_from_us)
    edges = [
        Span(max(period.from_us, seconds_from_us), hours.from_us),
        Span(max(hours.to_us, seconds_from_us), period.to_us),
    ]
    return Reach(hours, _not_empty(edges), seconds_from_us)


def _not_empty(spans: Sequence[Span]) -> tuple[Span, ...]:
    return tuple(span for span in spans if span.from_us < span.to_us)


def seconds_by_team(span: Span) -> Select[Any]:
    """One row for each team that has samples in `span`: team_id and SERVICE_COLUMNS."""
    each = (
        select(
            _samples.at_us, func.sum(_samples.served_us).label("served"), func.sum(_samples.entitled_us).label("due")
        )
        .where(span.holds(_samples.at_us))
        .group_by(_samples.at_us)
        .subquery()
    )
    last = _last(tables.service_samples, _samples.at_us, span)

    def backlogged(column: ColumnElement[Any], name: str) -> ColumnElement[Any]:
        return func.sum(case((_samples.backlogged_ms > 0, column), else_=0)).label(name)

    return (
        select(
            _samples.team_id,
            *(func.sum(_samples[name]).label(name) for name in SUMMED),
            backlogged(_samples.served_us, "served_backlogged_us"),
            backlogged(_samples.entitled_us, "entitled_backlogged_us"),
            backlogged(each.c.served, "served_all_us"),
            backlogged(each.c.due, "entitled_all_us"),
            *(func.min(_samples[name]).label(name) for name in LEAST),
            *(func.max(_samples[name]).label(name) for name in MOST),
            func.max(_samples.at_us).label("last_at_us"),
            *(func.max(case((_samples.at_us == last.c.at_us, _samples[name]))).label(name) for name in _AT_LAST),
        )
        .select_from(
            tables.service_samples.join(each, _samples.at_us == each.c.at_us).join(
                last, _samples.team_id == last.c.team_id
            )
        )
        .where(span.holds(_samples.at_us))
        .group_by(_samples.team_id)
    )


def _hours_by_team(span: Span) -> Select[Any]:
    last = _last(tables.service_hours, _hours.at_us, span)
    return (
        select(
            _hours.team_id,
            *(func.sum(_hours[name]).label(name) for name in (*SUMMED, *SUMMED_BACKLOGGED)),
            *(func.min(_hours[name]).label(name) for name in LEAST),
            *(func.max(_hours[name]).label(name) for name in MOST),
            func.max(_hours.last_at_us).label("last_at_us"),
            *(func.max(case((_hours.at_us == last.c.at_us, _hours[name]))).label(name) for name in _AT_LAST),
        )
        .select_from(tables.service_hours.join(last, _hours.team_id == last.c.team_id))
        .where(span.holds(_hours.at_us))
        .group_by(_hours.team_id)
    )


def _last(table: Table, at: ColumnElement[int], span: Span) -> Subquery:
    """Each team's latest row in `span`."""
    query = select(table.c.team_id, func.max(at).label("at_us")).where(span.holds(at)).group_by(table.c.team_id)
    return query.subquery()


async def service_by_team(connection: AsyncConnection, reach: Reach) -> dict[int, dict[str, int | float]]:
    """SERVICE_COLUMNS of each team over the whole reach. One statement."""
    parts = [seconds_by_team(span) for span in reach.seconds]
    if reach.hours is not None:
        parts.append(_hours_by_team(reach.hours))
    teams: dict[int, dict[str, int | float]] = {}
    if not parts:
        return teams
    for row in (await connection.execute(union_all(*parts))).mappings():
        # PostgreSQL sums bigints to Decimal
        part = {name: row[name] if isinstance(row[name], float) else int(row[name]) for name in SERVICE_COLUMNS}
        team = teams.setdefault(row["team_id"], part)
        if team is part:
            continue
        for name in (*SUMMED, *SUMMED_BACKLOGGED):
            team[name] += part[name]
        for name in LEAST:
            team[name] = min(team[name], part[name])
        for name in MOST:
            team[name] = max(team[name], part[name])
        if part["last_at_us"] > team["last_at_us"]:
            team.update({name: part[name] for name in LATEST})
    return teams


async def summed(
    connection: AsyncConnection, reach: Reach, seconds: Table, hours: Table, keys: Sequence[str] = ()
) -> dict[tuple[int, ...], dict[str, int]]:
    """The sums of all other columns, by `keys`, over tables that are plain sums. One statement."""
    names = [column.name for column in seconds.columns if not column.primary_key]
    spans = [(seconds, span) for span in reach.seconds]
    if reach.hours is not None:
        spans.append((hours, reach.hours))
    if not spans:
        return {}
    parts = [
        select(*(table.c[name] for name in (*keys, *names))).where(span.holds(table.c.at_us)) for table, span in spans
    ]
    rows = union_all(*parts).subquery()
    by = [rows.c[name] for name in keys]
    query = select(*by, *(func.sum(rows.c[name]) for name in names))
    if by:
        query = query.group_by(*by)
    return {
        tuple(row[: len(by)]): {name: int(value or 0) for name, value in zip(names, row[len(by) :], strict=True)}
        for row in await connection.execute(query)
    }
