"""Usage and fairness reports, read from the ledger and the service samples.

*Usage* sums ledger rows by the moment they finished, so each request is in exactly one period and a past period never
changes. Refused calls are not in the ledger and use up nothing. Rows are grouped by ids: a renamed team is one line.

*Fairness* looks only at the seconds in which a team was backlogged (it had a sequence that was left waiting): what it
does not ask for, nobody owes it. Per team: share = its device seconds over all device seconds in those seconds;
entitled = its entitlement over all entitlements in them; satisfaction x = served / entitled. Over the teams that were
ever backlogged, with w their tier's weight: weighted Jain = (sum w x)^2 / (sum w * sum w x^2) (Jain et al., 1984),
which is 1 when all got the same part of what they were entitled to.

Percentiles are exact, by nearest rank. Times are seconds; device_seconds = device_us / 1e6.
"""

import math
from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, case, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from tenants import tables
from tenants.clock import from_epoch_us
from tenants.errors import Invalid
from tenants.key_format import redact
from tenants.periods import Period

_DAY_US = 86_400_000_000
_ledger = tables.ledger.c
_samples = tables.service_samples.c
OUTCOMES = ("ok", "client_closed", "timeout", "error", "lost", "shutdown")
DIMENSIONS = ("team", "tier", "model", "day", "key")

# What a row is grouped by: ids where there are any.
_GROUPS: dict[str, ColumnElement[Any]] = {
    "team": _ledger.team_id,
    "tier": _ledger.tier,
    "model": _ledger.model,
    "day": _ledger.finished_at_us // _DAY_US,
    "key": _ledger.key_id,
}
_SUMS: dict[str, ColumnElement[Any]] = {
    "requests": func.count(),
    **{name: func.sum(case((_ledger.outcome == name, 1), else_=0)) for name in OUTCOMES},
    "prompt_tokens": func.sum(_ledger.prompt_tokens),
    "cached_tokens": func.sum(_ledger.cached_tokens),
    "output_tokens": func.sum(_ledger.output_tokens),
    "device_us": func.sum(_ledger.device_us),
    "preemptions": func.sum(_ledger.num_preemptions),
    "swaps": func.sum(_ledger.num_swaps),
    "recomputes": func.sum(_ledger.num_recomputes),
    "promotions": func.sum(_ledger.num_promotions),
}
# queue: admission to first step. ttft: arrival to first token. jct: arrival to end, of requests that ended well.
_TIMES: dict[str, ColumnElement[Any]] = {
    "queue": _ledger.started_at_us - _ledger.admitted_at_us,
    "ttft": _ledger.first_token_at_us - _ledger.received_at_us,
    "jct": case((_ledger.outcome == "ok", _ledger.finished_at_us - _ledger.received_at_us)),
}
Key = tuple[Any, ...]


def _within(period: Period) -> ColumnElement[bool]:
    return (_ledger.finished_at_us >= period.from_us) & (_ledger.finished_at_us < period.to_us)


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

    Raises Invalid for an unknown dimension; an unknown team has no lines.
    """
    by = check_dimensions(by)
    where = _within(period)
    if team is not None:
        team_id = select(tables.teams.c.id).where(tables.teams.c.name == team).scalar_subquery()
        where &= _ledger.team_id == team_id
    lines = await _sums(connection, by, where)
    total = (await _sums(connection, (), where)).get((), {})
    labels = await _labels(connection, by)
    times = await _percentiles(connection, by, where)
    total_times = await _percentiles(connection, (), where)
    data = [
        {name: _label(name, value, labels) for name, value in zip(by, key, strict=True)}
        | _usage_line(sums)
        | times.get(key, _NO_TIMES)
        for key, sums in lines.items()
    ]
    data.sort(key=lambda line: tuple(str(line[name]) for name in by))
    return {
        "object": "usage_report",
        **period.describe(),
        "by": list(by),
        "data": data,
        "total": _usage_line(total) | total_times.get((), _NO_TIMES),
    }


def _usage_line(sums: dict[str, int]) -> dict[str, Any]:
    line: dict[str, Any] = {name: sums.get(name) or 0 for name in _SUMS}
    line["device_seconds"] = line.pop("device_us") / 1e6
    return line


async def _sums(
    connection: AsyncConnection, by: tuple[str, ...], where: ColumnElement[bool]
) -> dict[Key, dict[str, int]]:
    groups = [_GROUPS[name].label(f"by_{name}") for name in by]
    query = select(*groups, *(column.label(name) for name, column in _SUMS.items())).where(where)
    if groups:
        query = query.group_by(*groups)
    rows = (await connection.execute(query)).all()
    # PostgreSQL sums bigints to Decimal
    return {
        tuple(row[: len(by)]): {name: int(value or 0) for name, value in zip(_SUMS, row[len(by) :], strict=True)}
        for row in rows
    }


_NO_TIMES: dict[str, float | None] = {
    f"{name}_{which}_seconds": None for name in _TIMES for which in ("p50", "p95", "max")
}


async def _percentiles(
    connection: AsyncConnection, by: tuple[str, ...], where: ColumnElement[bool]
) -> dict[Key, dict[str, float | None]]:
    """p50, p95 (nearest rank) and the maximum of each time, by group; the database does the sorting."""
    found: dict[Key, dict[str, float | None]] = {}
    for name, column in _TIMES.items():
        groups = [_GROUPS[one].label(f"by_{one}") for one in by]
        ranked = (
            select(
                *groups,
                column.label("value"),
                func.row_number().over(partition_by=[_GROUPS[one] for one in by], order_by=column).label("rank"),
                func.count().over(partition_by=[_GROUPS[one] for one in by]).label("size"),
            )
            .where(where, column.is_not(None))
            .subquery()
        )
        keys = [ranked.c[group.name] for group in groups]
        ranks = {"p50": (ranked.c.size * 50 + 99) // 100, "p95": (ranked.c.size * 95 + 99) // 100}
        columns = [
            func.max(case((ranked.c.rank == rank, ranked.c.value))).label(which) for which, rank in ranks.items()
        ]
        query = select(*keys, *columns, func.max(ranked.c.value).label("max"), func.count())
        if keys:
            query = query.group_by(*keys)
        for row in await connection.execute(query):
            if row[-1]:
                times = found.setdefault(tuple(row[: len(by)]), dict(_NO_TIMES))
                for which, value in zip(("p50", "p95", "max"), row[len(by) : -1], strict=True):
                    times[f"{name}_{which}_seconds"] = value / 1e6
    return found


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
        return from_epoch_us(value * _DAY_US).date().isoformat()
    if name in labels:
        return labels[name].get(value, f"{name} {value}")
    return str(value)


async def fairness_report(connection: AsyncConnection, period: Period) -> dict[str, Any]:
    """What each team got and what it was entitled to, the indices over all, and the waits of each tier."""
    data = await _fairness_lines(connection, period)
    tier_times = await _percentiles(connection, ("tier",), _within(period))
    tier_sums = await _sums(connection, ("tier",), _within(period))
    judged = [line for line in data if line["satisfaction"] is not None]
    return {
        "object": "fairness_report",
        **period.describe(),
        "data": data,
        "jain_weighted": weighted_jain([(line["weight"], line["satisfaction"]) for line in judged]),
        "satisfaction_min_to_max": min_to_max([line["satisfaction"] for line in judged]),
        "lag_max_seconds": max((line["lag_max_seconds"] for line in data), default=None),
        "device_seconds": math.fsum(line["device_seconds"] for line in data),
        "tiers": [
            {"tier": key[0], "requests": sums["requests"]} | tier_times.get(key, _NO_TIMES)
            for key, sums in sorted(tier_sums.items())
        ],
    }


def weighted_jain(values: Sequence[tuple[float, float]]) -> float | None:
    """(sum w x)^2 / (sum w * sum w x^2) of (w, x); None without values, or when all x are 0."""
    square_sum = sum(w * x * x for w, x in values)
    if not square_sum:
        return None
    return float(sum(w * x for w, x in values) ** 2 / (sum(w for w, _ in values) * square_sum))


def min_to_max(values: Sequence[float]) -> float | None:
    """Least over greatest; None without values, or when all are 0."""
    return min(values) / max(values) if values and max(values) > 0 else None


async def _fairness_lines(connection: AsyncConnection, period: Period) -> list[dict[str, Any]]:
    within = (_samples.at_us >= period.from_us) & (_samples.at_us < period.to_us)
    each = (
        select(
            _samples.at_us,
            func.sum(_samples.served_us).label("served_us"),
            func.sum(_samples.entitled_us).label("entitled_us"),
        )
        .where(within)
        .group_by(_samples.at_us)
        .subquery()
    )

    def backlogged(column: ColumnElement[Any]) -> ColumnElement[Any]:
        return func.sum(case((_samples.backlogged_ms > 0, column), else_=0))

    query = (
        select(
            _samples.team_id,
            func.sum(_samples.served_us).label("served_us"),
            func.sum(_samples.interval_ms).label("active_ms"),
            func.sum(_samples.backlogged_ms).label("backlogged_ms"),
            backlogged(_samples.served_us).label("served_backlogged_us"),
            backlogged(_samples.entitled_us).label("entitled_backlogged_us"),
            backlogged(each.c.served_us).label("served_all_us"),
            backlogged(each.c.entitled_us).label("entitled_all_us"),
            func.max(_samples.lag_max_us).label("lag_max_us"),
            func.min(_samples.lag_min_us).label("lag_min_us"),
        )
        .select_from(tables.service_samples.join(each, _samples.at_us == each.c.at_us))
        .where(within)
        .group_by(_samples.team_id)
    )
    rows = (await connection.execute(query)).mappings().all()
    team_query = select(tables.teams.c.id, tables.teams.c.name, tables.tiers.c.name, tables.tiers.c.weight)
    terms = {
        row[0]: tuple(row[1:])
        for row in await connection.execute(team_query.select_from(tables.teams.join(tables.tiers)))
    }
    counts = await _sums(connection, ("team",), _within(period))
    lines = []
    for row in rows:
        name, tier, weight = terms.get(row["team_id"], (f"team {row['team_id']}", None, 1))
        booked = counts.get((row["team_id"],), {})
        entitled = int(row["entitled_backlogged_us"])
        lines.append(
            {
                "team": name,
                "tier": tier,
                "weight": weight,
                "device_seconds": int(row["served_us"]) / 1e6,
                "active_seconds": int(row["active_ms"]) / 1e3,
                "backlogged_seconds": int(row["backlogged_ms"]) / 1e3,
                "share": _part(row["served_backlogged_us"], row["served_all_us"]),
                "entitled": _part(entitled, row["entitled_all_us"]),
                "satisfaction": _part(row["served_backlogged_us"], entitled),
                "lag_min_seconds": row["lag_min_us"] / 1e6,
                "lag_max_seconds": row["lag_max_us"] / 1e6,
                **{
                    name: booked.get(name, 0)
                    for name in ("requests", "preemptions", "swaps", "recomputes", "promotions")
                },
            }
        )
    return sorted(lines, key=lambda line: str(line["team"]))


def _part(part: Any, whole: Any) -> float | None:
    return int(part) / int(whole) if whole else None


async def service_series(connection: AsyncConnection, period: Period) -> dict[str, Any]:
    """Each team's device seconds at every sample, for plots: {"at": […], "served": {team: […]}, "entitled": …}."""
    query = (
        select(_samples.at_us, tables.teams.c.name, _samples.served_us, _samples.entitled_us)
        .select_from(tables.service_samples.join(tables.teams, tables.teams.c.id == _samples.team_id))
        .where(_samples.at_us >= period.from_us, _samples.at_us < period.to_us)
        .order_by(_samples.at_us, tables.teams.c.name)
    )
    rows = (await connection.execute(query)).all()
    moments = sorted({row[0] for row in rows})
    index = {at: i for i, at in enumerate(moments)}
    served: dict[str, list[float]] = {}
    entitled: dict[str, list[float]] = {}
    for at, team, served_us, entitled_us in rows:
        served.setdefault(team, [0.0] * len(moments))[index[at]] = served_us / 1e6
        entitled.setdefault(team, [0.0] * len(moments))[index[at]] = entitled_us / 1e6
    return {"at": [at / 1e6 for at in moments], "served": served, "entitled": entitled}
