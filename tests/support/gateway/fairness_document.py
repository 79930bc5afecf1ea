"""A fairness report and its series with made-up numbers, with every key that `tenants.reports` writes."""

import math
from typing import Any

from policies.team_counters import TEAM_COUNTERS

TIERS = ("gold", "silver", "bronze")
SIZES = ("short", "medium", "long")
WEIGHTS = {"gold": 4, "silver": 2, "bronze": 1}


def make_report(teams: list[str], *, is_empty: bool = False) -> dict[str, Any]:
    """One report; teams take the tiers in turn."""
    rows = [] if is_empty else [_row(team, i, len(teams)) for i, team in enumerate(teams)]
    pairs = [(a, b) for i, a in enumerate(teams) for j, b in enumerate(teams) if (i * 3 + j) % 4 < 2]
    return {
        "object": "fairness_report",
        "from": "2026-11-28T21:00:00Z",
        "to": "2026-11-29T21:00:00Z",
        "time_zone": "UTC",
        "data": rows,
        "jain_weighted": None if is_empty else 0.9871,
        "satisfaction_min_to_max": None if is_empty else 0.8123,
        "lag_max_seconds": None if is_empty else 0.412,
        "lag_bound_seconds": None if is_empty else 1.31,
        "device_seconds": math.fsum(row["device_seconds"] for row in rows),
        "tiers": [] if is_empty else [_tier(tier, i) for i, tier in enumerate(TIERS[: len(teams)])],
        "size_classes": []
        if is_empty
        else [_size(tier, size, i + j) for i, tier in enumerate(TIERS) for j, size in enumerate(SIZES)],
        "interference": [] if is_empty else [_pair(a, b, i) for i, (a, b) in enumerate(pairs)],
        "totals": {
            "preemptions": 0 if is_empty else 812,
            "swaps_out": 0 if is_empty else 54,
            "swaps_in": 0 if is_empty else 52,
            "recomputes": 0,
            "bytes_out": 0 if is_empty else 1_288_490_188,
            "bytes_in": 0 if is_empty else 1_203_000_000,
            "stall_seconds": 0.0 if is_empty else 0.413,
            "replayed_tokens": 0,
            "promotions": 0 if is_empty else 17,
        },
    }


def make_series(teams: list[str], seconds: int = 90) -> dict[str, Any]:
    """A second a sample, from 2026-11-29 20:00 UTC; each team is backlogged in two of three twenty seconds."""
    start = 1_795_982_400
    moments = [float(start + i) for i in range(seconds)]

    def wave(i: int, t: int) -> float:
        return 0.5 + 0.4 * math.sin(t / 7 + i)

    def is_backlogged(i: int, t: int) -> bool:
        return (t // 20 + i) % 3 > 0

    def column(value: Any) -> dict[str, list[float]]:
        return {team: [value(i, t) for t in range(seconds)] for i, team in enumerate(teams)}

    return {
        "at": moments,
        "interval_seconds": [1.0] * seconds,
        "served": column(lambda i, t: wave(i, t) / len(teams)),
        "entitled": column(lambda i, t: 0.9 / len(teams) if is_backlogged(i, t) else 0.1 / len(teams)),
        "backlogged": column(lambda i, t: 1.0 if is_backlogged(i, t) else 0.0),
        "lag": column(lambda i, t: 0.2 + 0.2 * math.sin(t / 11 + i)),
        "lag_bound": [1.31] * seconds,
    }


EMPTY_SERIES: dict[str, Any] = {"at": [], "interval_seconds": [], "lag_bound": []}
EMPTY_SERIES |= {name: {} for name in ("served", "entitled", "backlogged", "lag")}


def _row(team: str, i: int, count: int) -> dict[str, Any]:
    tier = TIERS[i % 3]
    counted = {counter.report: 0 for counter in TEAM_COUNTERS if counter.report}
    return counted | {
        "team": team,
        "team_status": "active",
        "tier": tier,
        "weight": WEIGHTS[tier],
        "device_seconds": 812.25 / (i + 1),
        "overhead_device_seconds": 0.031 * i,
        "active_seconds": 1800.0,
        "backlogged_seconds": 1500.0 / (i + 1),
        "share": 0.9 / count + 0.01 * (i % 3),
        "entitled": 1.0 / count,
        "satisfaction": 0.9 + 0.03 * (i % 4),
        "lag_min_seconds": 0.0,
        "lag_max_seconds": 0.412 - 0.01 * i,
        "lag_bound_seconds": 1.31,
        "requests": 1200 // (i + 1),
        "preemptions": 40 * i,
        "swaps": 3 * i,
        "recomputes": 0,
        "promotions": 5 * (i % 3),
        "promotions_exhausted": i % 2,
        "promotion_budget_seconds": 0.8,
        "promoted_seconds": 0.31 * (i % 3),
        "longest_pause_seconds": 0.41 * (i + 1),
        "pause_bound_seconds": 4.9 * (i + 1),
    }


def _tier(tier: str, i: int) -> dict[str, Any]:
    times = {
        f"{name}_{which}_seconds": 0.2 * (i + 1) * k
        for name in ("queue", "ttft", "jct")
        for k, which in enumerate(("p50", "p95", "max"), 1)
    }
    bound = (2.0, 11.5, None)[i]
    return {
        "tier": tier,
        "requests": 400,
        **times,
        "longest_pause_seconds": 2.4 * (i + 1),
        "pause_bound_seconds": bound,
        "pauses_over_bound": (3, 0, 0)[i],
    }


def _size(tier: str, size: str, i: int) -> dict[str, Any]:
    return {
        "tier": tier,
        "size": size,
        "requests": 100 + i,
        "wait_p50_seconds": 0.002 * 4**i,
        "wait_p95_seconds": 0.02 * 3**i,
        "wait_max_seconds": 0.1 * 3**i,
        "slowdown_mean": 1.2 + i,
        "slowdown_p50": 1.1 + i,
        "slowdown_p95": 2.0 + 2 * i,
        "slowdown_max": 3.0 + 4 * i,
    }


def _pair(causer: str, victim: str, i: int) -> dict[str, Any]:
    return {
        "causer": causer,
        "victim": victim,
        "preemptions": 37 * (i + 1),
        "swaps_out": 3 * i,
        "swaps_in": 3 * i,
        "recomputes": 0,
        "bytes_out": 25_000_000 * i,
        "bytes_in": 25_000_000 * i,
        "device_seconds": 0.017 * i,
    }
