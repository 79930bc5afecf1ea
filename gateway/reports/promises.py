"""The fairness report's section on promises: pauses and lag against their printed bounds."""

from collections.abc import Mapping
from typing import Any

from gateway.reports import svg
from gateway.reports.format import Report, Rows, alt, count, mark, part_of, seconds, tier_order, why_unbound
from gateway.reports.page import Cell, Figure, Section, Table, csv_href

LAG_NOTE = (
    "The lag's bound has two values: it is twice as wide while KV blocks are short, for then not every team can use "
    "the device. The largest of the period is shown."
)


def promises(report: Report) -> Section:
    """Longest pause against the printed bound per tier, and lag against its bound."""
    bars: list[svg.Bar] = []
    rows: list[list[Cell | str]] = []
    order = tier_order(report)
    tiers: Rows = sorted(report["tiers"], key=lambda row: order.index(row["tier"]))
    for tier in tiers:
        longest, bound = tier["longest_pause_seconds"], tier["pause_bound_seconds"]
        rows.append(
            [
                f"longest pause, {tier['tier']}",
                seconds(longest),
                seconds(bound or None),
                part_of(longest, bound),
                pause_mark(report, tier),
            ]
        )
        text = f"{seconds(longest)} of {seconds(bound)}" if bound else seconds(longest)
        is_bad = tier["pauses_over_bound"] > 0
        bars.append(svg.Bar(tier["tier"], [(longest or 0.0, "cx")], text, bound or None, is_bad))
    rows.append(
        [
            "lag, all teams",
            seconds(report["lag_max_seconds"]),
            seconds(report["lag_bound_seconds"] or None),
            part_of(report["lag_max_seconds"], report["lag_bound_seconds"]),
            mark(report["lag_max_seconds"], report["lag_bound_seconds"]),
        ]
    )
    ends = [tier[name] or 0.0 for tier in tiers for name in ("longest_pause_seconds", "pause_bound_seconds")]
    top = max(ends, default=0.0) or 1.0
    broken = [f"{count(over)} of {tier['tier']}" for tier in tiers if (over := tier["pauses_over_bound"])]
    figure = Figure(
        "Longest pause of a request, against the printed bound",
        svg.bars(alt("Longest pause of a request per tier against its bound", bars), bars, top),
        (
            f"Requests that paused longer than the bound that held for them: {', '.join(broken)}."
            if broken
            else "No request paused longer than the bound that held for it."
        )
        + " The tick is the largest of these bounds; each holds from when a request begins to starve, for the queue of "
        "its team at that moment. A tier without a tick never starved: none of its requests waited past its threshold.",
        legend=str(svg.Legend([("longest pause seen", "cx", ""), ("bound (maximum pause)", "", "tick")])),
        unit="seconds without a token's progress, from arrival to the end",
        csv_name="pauses.csv",
        csv_href=csv_href(
            ["tier", "longest_pause_seconds", "pause_bound_seconds"],
            [[tier["tier"], tier["longest_pause_seconds"], tier["pause_bound_seconds"]] for tier in tiers],
        ),
    )
    table = Table(
        "Promises",
        ["promise", "measured", "bound", "used", "verdict"],
        rows,
        note=LAG_NOTE if report["lag_bound_seconds"] else "",
    )
    return Section(
        "promises",
        "Promises",
        "What the scheduler promises in numbers, and what was measured in this period.",
        [figure] if tiers else [],
        [table],
    )


def pause_mark(report: Report, tier: Mapping[str, Any]) -> Cell:
    """The verdict on a tier's pauses: each request is held against its own bound."""
    over = tier["pauses_over_bound"]
    if over:
        return Cell(f"✗ violated {count(over)} times", "bad", is_text=True)
    if tier["longest_pause_seconds"] is not None and not tier["pause_bound_seconds"]:
        return Cell(f"– {why_unbound(report, tier)}", "quiet", is_text=True)
    return mark(tier["longest_pause_seconds"], float("inf"))
