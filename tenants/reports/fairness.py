"""The fairness report: what each team got, what it was entitled to, how long requests waited, and who cost whom what.

It looks only at the seconds in which a team was backlogged (it had a sequence that was left waiting): what it does not
ask for, nobody owes it. Per team: share = its device seconds over all device seconds in those seconds; entitled = its
entitlement over all entitlements in them; satisfaction x = served / entitled. Over the teams that were ever backlogged,
with w their tier's weight: weighted Jain = (sum w x)^2 / (sum w * sum w x^2) (Jain et al., 1984), which is 1 when all
got the same part of what they were entitled to.

Size classes are by prompt and output tokens together (`tenants.reports.queries`): wait is admission to first step,
slowdown is a request's whole time over the work it would have been alone on the device, of requests that ended well.
Interference: the victim's sequences lost their slot or their blocks, the causer paid for the copies and replays.

Counts and waits are of requests that finished in the period, from the ledger; service, promotions, pauses and
interference are by the second, from the samples. Each request is held against the bound that was worked out for it when
it began to starve: `pauses_over_bound` counts those that paused longer, which the tier's longest pause and largest
bound need not show. Percentiles are exact, by nearest rank. Times are seconds.

A team's line has every counter that is declared with a `report` name (`policies.team_counters`).

`samples_deleted_before` is a moment of the period before which its samples are gone: service, shares, promotions and
interference begin there. `samples_by_the_hour_before` is one before which only whole hours are known, each of which
counts where it starts. Both are null when nothing of the period is missing.
"""

import math
from collections.abc import Sequence
from typing import Any

from sqlalchemy import case, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from policies.team_counters import TEAM_COUNTERS
from tenants import tables
from tenants.reports.periods import Period
from tenants.reports.queries import HAS_TOKENS, NOTHING, SIZE, SLOWDOWN, SUMS, TIMES, finished_within, spreads, sums
from tenants.reports.samples import Reach, reach, service_by_team, summed
from tenants.teams import GONE, team_statuses

_ledger = tables.ledger.c
_SIZES = ("short", "medium", "long")
_CAUSED = ("preemptions", "swaps_out", "swaps_in", "recomputes", "bytes_out", "bytes_in")
_TIER_COLUMNS = {
    "requests": SUMS["requests"],
    "simulated_requests": SUMS["simulated_requests"],
    "longest_pause_us": func.max(_ledger.longest_pause_us),
    "pause_bound_us": func.max(_ledger.pause_bound_us),
    "over_bound": func.sum(
        case(((_ledger.pause_bound_us > 0) & (_ledger.longest_pause_us > _ledger.pause_bound_us), 1), else_=0)
    ),
}
Terms = dict[int, tuple[str, str | None, int]]


async def fairness_report(connection: AsyncConnection, period: Period) -> dict[str, Any]:
    """See the module. Ten statements, whatever the period holds."""
    reached = await reach(connection, period)
    terms = await _terms(connection)
    service = await service_by_team(connection, reached)
    data = await _lines(connection, period, service, terms)
    judged = [line for line in data if line["satisfaction"] is not None]
    interference = await _interference(connection, reached, terms)
    steps = await summed(connection, reached, tables.step_samples, tables.step_hours)
    step = steps.get((), {})
    tiers = await _tiers(connection, period)
    return {
        "object": "fairness_report",
        **period.describe(),
        "samples_deleted_before": _shown_edge(period, reached.hours_from_us),
        "samples_by_the_hour_before": _shown_edge(period, reached.seconds_from_us),
        "data": data,
        "jain_weighted": weighted_jain([(line["weight"], line["satisfaction"]) for line in judged]),
        "satisfaction_min_to_max": min_to_max([line["satisfaction"] for line in judged]),
        "lag_max_seconds": max((line["lag_max_seconds"] for line in data), default=None),
        "lag_bound_seconds": max((line["lag_bound_seconds"] or 0 for line in data), default=0) or None,
        "device_seconds": math.fsum(line["device_seconds"] for line in data),
        **{name: sum(line[name] for line in tiers) for name in ("requests", "simulated_requests")},
        "tiers": tiers,
        "size_classes": await _size_classes(connection, period),
        "interference": interference,
        "totals": {
            **{name: sum(pair[name] for pair in interference) for name in _CAUSED},
            "stall_seconds": step.get("stall_us", 0) / 1e6,
            "replayed_tokens": step.get("replayed_tokens", 0),
            "promotions": sum(line["promotions"] for line in data),
        },
    }


def _shown_edge(period: Period, edge_us: int) -> str | None:
    """The moment up to which the period lacks samples; None when it lacks none."""
    return period.shown(min(edge_us, period.to_us)) if period.from_us < edge_us else None


def weighted_jain(values: Sequence[tuple[float, float]]) -> float | None:
    """(sum w x)^2 / (sum w * sum w x^2) of (w, x); None without values, or when all x are 0."""
    square_sum = sum(w * x * x for w, x in values)
    if not square_sum:
        return None
    return float(sum(w * x for w, x in values) ** 2 / (sum(w for w, _ in values) * square_sum))


def min_to_max(values: Sequence[float]) -> float | None:
    """Least over greatest; None without values, or when all are 0."""
    return min(values) / max(values) if values and max(values) > 0 else None


async def _terms(connection: AsyncConnection) -> Terms:
    """Present name, tier and weight of every team."""
    query = select(tables.teams.c.id, tables.teams.c.name, tables.tiers.c.name, tables.tiers.c.weight)
    rows = await connection.execute(query.select_from(tables.teams.join(tables.tiers)))
    return {row[0]: (row[1], row[2], row[3]) for row in rows}


async def _lines(
    connection: AsyncConnection, period: Period, service: dict[int, dict[str, int | float]], terms: Terms
) -> list[dict[str, Any]]:
    booked = await sums(connection, {"team": _ledger.team_id}, finished_within(period))
    statuses = await team_statuses(connection)
    lines = []
    for team_id, row in service.items():
        name, tier, weight = terms.get(team_id, (f"team {team_id}", None, 1))
        counts = booked.get((team_id,), {})
        lines.append(
            {
                "team": name,
                "team_status": statuses.get(team_id, GONE),
                "tier": tier,
                "weight": weight,
                "active_seconds": row["interval_ms"] / 1e3,
                "share": _part(row["served_backlogged_us"], row["served_all_us"]),
                "entitled": _part(row["entitled_backlogged_us"], row["entitled_all_us"]),
                "satisfaction": _part(row["served_backlogged_us"], row["entitled_backlogged_us"]),
                "lag_bound_seconds": row["lag_bound_us"] / 1e6 or None,
                **{count: counts.get(count, 0) for count in ("requests", "preemptions", "swaps", "recomputes")},
                **{counter.report: counter.shown(row[counter.name]) for counter in TEAM_COUNTERS if counter.report},
            }
        )
    return sorted(lines, key=lambda line: str(line["team"]))


def _part(part: float, whole: float) -> float | None:
    return part / whole if whole else None


async def _tiers(connection: AsyncConnection, period: Period) -> list[dict[str, Any]]:
    where, groups = finished_within(period), {"tier": _ledger.tier}
    found = await sums(connection, groups, where, _TIER_COLUMNS)
    times = await spreads(connection, groups, where, TIMES)
    lines = []
    for key, row in sorted(found.items()):
        line: dict[str, Any] = {"tier": key[0], **{name: row[name] for name in ("requests", "simulated_requests")}}
        for name in TIMES:
            line |= times[key][1][name].seconds(name)
        line["longest_pause_seconds"] = row["longest_pause_us"] / 1e6
        line["pause_bound_seconds"] = row["pause_bound_us"] / 1e6 or None  # of requests that starved
        line["pauses_over_bound"] = row["over_bound"]
        lines.append(line)
    return lines


async def _size_classes(connection: AsyncConnection, period: Period) -> list[dict[str, Any]]:
    columns = {"wait": TIMES["queue"], "slowdown": SLOWDOWN}
    where = finished_within(period) & HAS_TOKENS  # a request that never ran has no size
    found = await spreads(connection, {"tier": _ledger.tier, "size": SIZE}, where, columns)
    lines = []
    for (tier, size), (requests, spread) in found.items():
        slowdown = spread.get("slowdown", NOTHING)
        lines.append(
            {
                "tier": tier,
                "size": size,
                "requests": requests,
                **spread.get("wait", NOTHING).seconds("wait"),
                "slowdown_mean": slowdown.mean,
                "slowdown_p50": slowdown.p50,
                "slowdown_p95": slowdown.p95,
                "slowdown_max": slowdown.largest,
            }
        )
    return sorted(lines, key=lambda line: (line["tier"], _SIZES.index(line["size"])))


async def _interference(connection: AsyncConnection, reached: Reach, terms: Terms) -> list[dict[str, Any]]:
    pairs = await summed(
        connection, reached, tables.interference_samples, tables.interference_hours, ("causer_id", "victim_id")
    )

    def name(team_id: int) -> str:
        return terms[team_id][0] if team_id in terms else f"team {team_id}"

    lines = [
        {"causer": name(causer_id), "victim": name(victim_id)}
        | {count: row[count] for count in _CAUSED}
        | {"device_seconds": row["billed_us"] / 1e6}
        for (causer_id, victim_id), row in pairs.items()
    ]
    return sorted(lines, key=lambda line: (str(line["causer"]), str(line["victim"])))
