"""What each team got over time, for plots."""

from typing import Any

from sqlalchemy import ColumnElement, Select, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from tenants import tables
from tenants.reports.periods import Period
from tenants.reports.samples import HOUR_US, Span, reach

# Above it several samples make one moment: no reader can tell more apart, and a page stays small.
MOMENTS_MAX = 3600
_SECOND_US = 1_000_000


async def service_series(connection: AsyncConnection, period: Period) -> dict[str, Any]:
    """{"at": […], "interval_seconds": […], "lag_bound": […], and by team "served", "entitled", "backlogged", "lag"}.

    Each moment is the end of an interval, in seconds since 1970. `served` and `entitled` are device seconds within the
    interval, `backlogged` the seconds of it in which the team was, `lag` and `lag_bound` the largest seen in it. A
    moment is one sample; over longer times, up to `MOMENTS_MAX` intervals of equal length; hours where no more is kept.
    """
    reached = await reach(connection, period)
    at = tables.service_samples.c.at_us
    kept = Span(max(period.from_us, reached.seconds_from_us), period.to_us)
    first, last = (await connection.execute(select(func.min(at), func.max(at)).where(kept.holds(at)))).one()
    rows: list[Any] = []
    if reached.hours is not None and reached.hours.from_us < reached.seconds_from_us:
        gone = Span(reached.hours.from_us, min(reached.hours.to_us, reached.seconds_from_us))
        hours = tables.service_hours
        rows += await connection.execute(_query(hours, hours.c.at_us + HOUR_US, gone))
    if first is not None:
        width = -(-(last - first + 1) // (MOMENTS_MAX * _SECOND_US)) * _SECOND_US
        moment = at if width == _SECOND_US else (at // width + 1) * width
        rows += await connection.execute(_query(tables.service_samples, moment, kept))
    moments = sorted({row.at for row in rows})
    index = {at_us: i for i, at_us in enumerate(moments)}
    lengths, bounds = [0.0] * len(moments), [0.0] * len(moments)
    teams: dict[str, dict[str, list[float]]] = {"served": {}, "entitled": {}, "backlogged": {}, "lag": {}}
    for row in rows:
        i = index[row.at]
        # PostgreSQL sums bigints to Decimal
        served, entitled, backlogged, length = map(int, (row.served, row.entitled, row.backlogged, row.length))
        values = (served / 1e6, entitled / 1e6, backlogged / 1e3, row.lag / 1e6)
        for name, value in zip(teams, values, strict=True):
            line = teams[name].setdefault(row.team, [0.0] * len(moments))
            # An hour may end at the very moment of a second's sample: then both are one moment.
            line[i] = max(line[i], value) if name == "lag" else line[i] + value
        lengths[i] = max(lengths[i], length / 1e3)
        bounds[i] = max(bounds[i], row.bound / 1e6)
    return {"at": [at_us / 1e6 for at_us in moments], "interval_seconds": lengths, **teams, "lag_bound": bounds}


def _query(table: Any, moment: ColumnElement[int], span: Span) -> Select[Any]:
    """One row for each moment and team, oldest first."""
    columns = table.c
    at = moment.label("at")
    return (
        select(
            at,
            tables.teams.c.name.label("team"),
            func.sum(columns.served_us).label("served"),
            func.sum(columns.entitled_us).label("entitled"),
            func.sum(columns.backlogged_ms).label("backlogged"),
            func.max(columns.lag_max_us).label("lag"),
            func.max(columns.lag_bound_us).label("bound"),
            func.sum(columns.interval_ms).label("length"),
        )
        .select_from(table.join(tables.teams, tables.teams.c.id == columns.team_id))
        .where(span.holds(columns.at_us))
        .group_by(at, tables.teams.c.id, tables.teams.c.name)
        .order_by(at, tables.teams.c.name)
    )
