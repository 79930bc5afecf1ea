"""The fairness report's section on promises: pauses and lag against their printed bounds."""

from collections.abc import Mapping
from typing import Any

from gateway import svg
from gateway.report_format import Report, Rows, alt, count, mark, number, part_of, seconds, tier_order
from gateway.report_html import Cell, Figure, Section, Table, csv_href


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
                number(longest, 3),
                number(bound or None, 3),
                part_of(longest, bound),
                pause_mark(tier),
            ]
        )
        text = f"{seconds(longest)} of {seconds(bound)}" if bound else seconds(longest)
        is_bad = tier["pauses_over_bound"] > 0
        bars.append(svg.Bar(tier["tier"], [(longest or 0.0, "cx")], text, bound or None, is_bad))
    rows.append(
        [
            "lag, all teams",
            number(report["lag_max_seconds"], 3),
            number(report["lag_bound_seconds"] or None, 3),
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
            else "No request paused longer than the bound that held for it. The tick is the largest of these bounds."
        )
        + " A tier without a tick had no request that waited past its starvation threshold.",
        legend=str(svg.Legend([("longest pause seen", "cx", ""), ("bound (maximum pause)", "", "tick")])),
        unit="seconds without a token's progress, from arrival to the end",
        csv_name="pauses.csv",
        csv_href=csv_href(
            ["tier", "longest_pause_seconds", "pause_bound_seconds"],
            [[tier["tier"], tier["longest_pause_seconds"], tier["pause_bound_seconds"]] for tier in tiers],
        ),
    )
    table = Table("Promises", ["promise", "measured, s", "bound, s", "used", "verdict"], rows)
    return Section(
        "promises",
        "Promises",
        "What the scheduler promises in numbers, and what was measured in this period.",
        [figure] if tiers else [],
        [table],
    )


def pause_mark(tier: Mapping[str, Any]) -> Cell:
    """The verdict on a tier's pauses: each request is held against its own bound."""
    over = tier["pauses_over_bound"]
    if over:
        return Cell(f"✗ violated {count(over)} times", "bad", is_text=True)
    return mark(tier["longest_pause_seconds"], None if not tier["pause_bound_seconds"] else float("inf"))
