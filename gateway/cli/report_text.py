"""Reports as text on stdout: JSON, CSV, and tables for a terminal."""

from collections.abc import Mapping
from typing import Any

from gateway.command import cell, print_json, print_table
from gateway.reports.format import missing_samples, simulated_note, team_name, why_unbound

_UNHAPPY = ["client_closed", "timeout", "error", "lost", "shutdown", "refused"]  # shown only if such requests exist
_COSTS = ["preemptions", "swaps", "recomputes", "promotions"]
_USAGE_COLUMNS = ["prompt_tokens", "output_tokens", "device_seconds"]
_USAGE_TIMES = ["ttft_p50_seconds", "ttft_p95_seconds", "jct_p50_seconds", "jct_p95_seconds"]
Report = Mapping[str, Any]


def write_json(report: Report) -> None:
    """Print the report as one JSON document, with every key."""
    print_json(report)


def write_usage(report: Report) -> None:
    """Print the report's lines, then the total. A column for endings or costs is left out when its total is 0."""
    dimensions, total = report["by"], report["total"]
    title = _title("usage", report)
    if not any(total[name] for name in ("requests", *_UNHAPPY)):
        print(f"{title}: no request ended in this period")
        return
    rows = [dict(row) for row in report["data"]] if dimensions else []
    if "team" in dimensions:
        rows = [row | {"team": team_name(row)} for row in rows]
    some = [name for name in (*_UNHAPPY, *_COSTS) if total[name]]
    unhappy = [name for name in some if name in _UNHAPPY]
    columns = [
        *dimensions,
        "requests",
        "ok",
        *unhappy,
        *_USAGE_COLUMNS,
        *(n for n in some if n in _COSTS),
        *(["simulated_requests"] if 0 < total["simulated_requests"] < total["requests"] else []),
        *_USAGE_TIMES,
    ]
    if note := simulated_note(report):
        print(note)
    print_table([*rows, dict.fromkeys(dimensions[:1], "TOTAL") | total], columns, title=title, has_total=bool(rows))


def write_fairness(report: Report) -> None:
    """Print one short table for each question that the HTML report answers."""
    print(_title("fairness", report))
    for note in missing_samples(report):
        print(f"note: {note}")
    if not report["data"] and not report["tiers"]:
        print("nothing was served in this period")
        return
    if note := simulated_note(report):
        print(note)
    print_table([_team(row) for row in report["data"]], title="\nteams, while backlogged")
    print_table(
        [_tier(row, report) for row in report["tiers"]], title="\ntiers: longest pause against the printed bound"
    )
    print_table([_size(row) for row in report["size_classes"]], title="\nwait and slowdown by size")
    print_table([_promotion(row) for row in report["data"]], title="\npromotions")
    print_table(
        [_pair(row) for row in report["interference"]],
        title="\nwho caused it, who bore it: slots lost, KV swapped out and in, KV recomputed",
    )
    sums = report["totals"]
    lag, bound = report["lag_max_seconds"], report["lag_bound_seconds"]
    jain, least = report["jain_weighted"], report["satisfaction_min_to_max"]
    print(
        "\nweighted Jain index: "
        + ("no team was backlogged" if jain is None else f"{jain:.3f}, min share {cell(least)}")
    )
    print(f"lag: most {cell(lag)} s, bound {cell(bound)} s: {verdict(lag, bound)}")
    print(
        f"totals: {sums['preemptions']} preemptions (a lost slot is free), "
        f"{sums['swaps_out']} swapped out ({sums['bytes_out']} bytes), "
        f"{sums['swaps_in']} in ({sums['bytes_in']} bytes), {sums['recomputes']} recomputes "
        f"({sums['replayed_tokens']} tokens), {sums['promotions']} promotions, {sums['stall_seconds']:.3f} s of stall"
    )


def verdict(measured: float | None, bound: float | None) -> str:
    """`VIOLATED` above the bound, `ok` within it, `no bound` without a measurement or a bound."""
    if measured is None or not bound:
        return "no bound"
    return "VIOLATED" if measured > bound else "ok"


def _title(name: str, report: Report) -> str:
    return f"{name} {cell(report['from'])} - {cell(report['to'])} {report['time_zone']}"


def _percent(value: float | None) -> float | None:
    return None if value is None else value * 100


def _team(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "team": team_name(row),
        "tier": row["tier"],
        "weight": row["weight"],
        "device_s": row["device_seconds"],
        "backlog_s": row["backlogged_seconds"],
        "share_%": _percent(row["share"]),
        "entitled_%": _percent(row["entitled"]),
        "satisfied_%": _percent(row["satisfaction"]),
        "lag_max_s": row["lag_max_seconds"],
    }


def _tier(row: Mapping[str, Any], report: Report) -> dict[str, Any]:
    return {
        "tier": row["tier"],
        "requests": row["requests"],
        "queue_p95_s": row["queue_p95_seconds"],
        "ttft_p95_s": row["ttft_p95_seconds"],
        "longest_pause_s": row["longest_pause_seconds"],
        "bound_s": row["pause_bound_seconds"],
        "over_bound": row["pauses_over_bound"],
        "verdict": _pause_verdict(row, report),
    }


def _pause_verdict(row: Mapping[str, Any], report: Report) -> str:
    if row["pauses_over_bound"]:
        return "VIOLATED"
    return "ok" if row["pause_bound_seconds"] else why_unbound(report, row)


def _size(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "tier": row["tier"],
        "size": row["size"],
        "requests": row["requests"],
        "wait_p50_s": row["wait_p50_seconds"],
        "wait_p95_s": row["wait_p95_seconds"],
        "wait_max_s": row["wait_max_seconds"],
        "slowdown_mean": row["slowdown_mean"],
        "slowdown_p95": row["slowdown_p95"],
    }


def _promotion(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "team": row["team"],
        "promotions": row["promotions"],
        "budget_too_small": row["promotions_exhausted"],
        "promoted_s": row["promoted_seconds"],
        "budget_left_s": row["promotion_budget_seconds"],
    }


def _pair(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "causer": row["causer"],
        "victim": row["victim"],
        "preempted": row["preemptions"],
        "out": row["swaps_out"],
        "in": row["swaps_in"],
        "recomputed": row["recomputes"],
        "paid_s": row["device_seconds"],
    }
