"""The fairness report's sections on requests: waits and slowdowns, promotions, interference, totals."""

from collections.abc import Callable, Sequence

from gateway.reports import svg
from gateway.reports.format import Report, Rows, alt, count, number, seconds, size, sum_of, tier_order, tone
from gateway.reports.page import Cell, Figure, Section, Table, csv_href
from gateway.reports.series import OTHERS

SIZES = "short: at most 128 tokens of prompt and output together, medium: at most 512, long: more"

TIER_TIMES = [f"{name}_{which}" for name in ("queue", "ttft", "jct") for which in ("p50", "p95")]
PROMOTION_NAMES = ["team", "promotions", "promotions_exhausted", "promoted_seconds", "promotion_budget_seconds"]


def waits(report: Report) -> Section:
    """Wait and slowdown by size class per tier."""
    order = tier_order(report)
    rows: Rows = sorted(report["size_classes"], key=lambda row: order.index(row["tier"]))  # sizes stay in order
    tiers: Rows = sorted(report["tiers"], key=lambda row: order.index(row["tier"]))

    def drawn(
        name: str, title: str, unit: str, least: float, shown: Callable[[float], str], caption: str, keys: Sequence[str]
    ) -> Figure:
        ranges = []
        previous = ""
        for row in rows:
            p50, p95, most = (row[key] for key in keys)
            if p50 is None:
                continue
            ranges.append(
                svg.Range(
                    f"{row['tier']}, {row['size']}",
                    p50,
                    p95,
                    most,
                    f"{shown(p50)} … {shown(p95)}",
                    is_first=previous not in ("", row["tier"]),
                )
            )
            previous = row["tier"]
        alt = f"{title}, median to 95th percentile. " + "; ".join(
            f"{interval.label}: {interval.text}" for interval in ranges
        )
        return Figure(
            title,
            svg.ranges(alt, ranges, unit, least),
            caption if ranges else "No request of this period got that far.",
            csv_name=f"{name}.csv",
            csv_href=csv_href(["tier", "size", *keys], [[row[key] for key in ("tier", "size", *keys)] for row in rows]),
        )

    figures = [
        drawn(
            "wait",
            "Wait for the first step",
            "s, log scale",
            0.001,
            seconds,
            "Tick: median. Thick: to the 95th percentile. Thin: to the longest. Short requests should stand left of "
            "long ones.",
            ["wait_p50_seconds", "wait_p95_seconds", "wait_max_seconds"],
        ),
        drawn(
            "slowdown",
            "Slowdown",
            "times, log scale",
            1.0,
            lambda value: number(value, 1),
            "Time to the whole answer over the time it takes alone on the device; 1 is no slowdown. Alike for all "
            "sizes is proportional service.",
            ["slowdown_p50", "slowdown_p95", "slowdown_max"],
        ),
    ]
    table = Table(
        "Wait and slowdown by tier and size",
        [
            "tier",
            "size",
            "requests",
            "wait p50, s",
            "wait p95, s",
            "wait max, s",
            "slowdown mean",
            "slowdown p50",
            "slowdown p95",
            "slowdown max",
        ],
        [
            [
                row["tier"],
                row["size"],
                count(row["requests"]),
                *(number(row[key], 3) for key in ("wait_p50_seconds", "wait_p95_seconds", "wait_max_seconds")),
                *(number(row[key], 2) for key in ("slowdown_mean", "slowdown_p50", "slowdown_p95", "slowdown_max")),
            ]
            for row in rows
        ],
        num_text=2,
    )
    tier_table = Table(
        "Times of each tier",
        [
            "tier",
            "requests",
            "queue p50, s",
            "queue p95, s",
            "first token p50, s",
            "first token p95, s",
            "whole answer p50, s",
            "whole answer p95, s",
        ],
        [
            [
                row["tier"],
                count(row["requests"]),
                *(number(row[f"{name}_seconds"], 3) for name in TIER_TIMES),
            ]
            for row in tiers
        ],
    )
    lead = f"Sizes are {SIZES}. Wait is from admission to the first step; slowdown is of requests that ended well."
    return Section("waits", "Wait and slowdown", lead, figures if rows else [], [table, tier_table] if rows else [])


def promotions(report: Report, teams: Sequence[str]) -> Section:
    """Promotions used and left, per team."""
    rows: Rows = report["data"]
    shown = [row for row in rows if row["team"] in teams]
    bars = []
    for row in shown:
        used, left = row["promoted_seconds"] or 0.0, max(0.0, row["promotion_budget_seconds"] or 0.0)
        colour = tone(row["team"], teams)
        text = f"{number(used, 2)} used, {number(left, 2)} left"
        bars.append(svg.Bar(row["team"], [(used, colour), (left, f"{colour} left")], text, None))
    top = max((bar.values[0][0] + bar.values[1][0] for bar in bars), default=0.0)
    total, exhausted = sum_of(rows, "promotions"), sum_of(rows, "promotions_exhausted")
    said = (
        f"{count(total)} starving requests were promoted"
        + (
            f"; {count(exhausted)} found the budget too small and waited for the level order."
            if exhausted
            else ", and no budget ran out."
        )
        if total or exhausted
        else "0 promotions: no request waited past its tier's starvation threshold, so no budget was touched."
    )
    figure = Figure(
        "Promotion budget, used in the period and left at its end",
        svg.bars(alt("Promotion budget used and left", bars), bars, top or 1.0),
        said,
        legend=str(svg.Legend([("used under grants", "cx", ""), ("left", "cx", "light")])),
        unit="seconds of work",
        csv_name="promotions.csv",
        csv_href=csv_href(PROMOTION_NAMES, [[row[name] for name in PROMOTION_NAMES] for row in rows]),
        is_wide=True,
    )
    table = Table(
        "Promotions",
        [
            "team",
            "promotions",
            "budget too small, times",
            "promoted work, s",
            "budget left, s",
            "longest pause",
            "bound with the queue then",
        ],
        [
            [
                row["team"],
                count(row["promotions"]),
                count(row["promotions_exhausted"]),
                number(row["promoted_seconds"], 3),
                number(row["promotion_budget_seconds"], 3),
                seconds(row["longest_pause_seconds"]),
                seconds(row["pause_bound_seconds"] or None),
            ]
            for row in rows
        ],
        note="The bound here is the largest that held for the team in any second, with the queue it had then. Under "
        "Promises each request has the bound of the moment at which it began to starve, so the two may differ.",
    )
    lead = (
        "A request that waited past its tier's threshold is promoted, at the cost of its team's budget. The budget "
        "refills at a fixed rate, so a team that has many such requests cannot take the device over by them."
    )
    return Section("promotions", "Promotions, used and left", lead, [figure] if shown else [], [table] if rows else [])


def interference(report: Report, teams: Sequence[str]) -> Section:
    """Who caused (row) and who bore it (column), and what the causer paid."""
    rows: Rows = report["interference"]
    weights: dict[str, float] = {}
    for row in rows:
        for end in ("causer", "victim"):
            weights[row[end]] = weights.get(row[end], 0.0) + row["preemptions"] + row["swaps_out"] + row["recomputes"]
    names = sorted(weights, key=lambda name: (-weights[name], name))
    kept = sorted(names[: svg.NUM_COLOURS] if len(names) > svg.NUM_COLOURS else names)
    ends = [*kept, OTHERS] if len(names) > len(kept) else kept
    kinds = {
        "Preemptions (slots lost: free)": "preemptions",
        "Swaps (sequences moved to the host)": "swaps_out",
        "Recomputes (KV dropped)": "recomputes",
    }
    tables = [_matrix(title, rows, ends, kept, name) for title, name in kinds.items()]
    if not rows:
        return Section(
            "interference",
            "Who caused what, and who paid",
            "Nobody lost a slot or its KV memory to another team in this period.",
        )
    names_of = [
        "causer",
        "victim",
        "preemptions",
        "swaps_out",
        "swaps_in",
        "recomputes",
        "bytes_out",
        "bytes_in",
        "device_seconds",
    ]
    paid: dict[str, float] = {}
    for row in rows:
        paid[row["causer"]] = paid.get(row["causer"], 0.0) + row["device_seconds"]
    payers = sorted(paid, key=lambda name: (-paid[name], name))
    bars = [
        svg.Bar(name, [(paid[name], tone(name, teams))], f"{number(paid[name], 3)} s")
        for name in payers[: svg.NUM_COLOURS]
    ]
    figure = Figure(
        "Device time that causers paid for copies and replays",
        svg.bars(alt("Device time paid for copies and replays", bars), bars, max(paid.values()) or 1.0),
        f"Who makes others move pays for the moving: {payers[0]} paid most."
        if max(paid.values()) > 0
        else "Losing a slot costs no device time, and no memory was moved: nobody paid anything.",
        unit="device seconds",
        csv_name="interference.csv",
        csv_href=csv_href(names_of, [[row[name] for name in names_of] for row in rows]),
        is_wide=True,
    )
    lead = (
        "Rows caused it: room was made for their requests. Columns bore it: their requests lost a slot or their KV "
        "memory. The diagonal is a team's own doing. A lost slot is free: the KV memory stays where it is. Copies and "
        "recomputing cost device time, and the causer pays it."
    )
    return Section("interference", "Who caused what, and who paid", lead, [figure], tables)


def _matrix(title: str, rows: Rows, ends: Sequence[str], kept: Sequence[str], name: str) -> Table:
    sums: dict[tuple[str, str], int] = {}
    for row in rows:
        pair = tuple(row[end] if row[end] in kept else OTHERS for end in ("causer", "victim"))
        sums[pair[0], pair[1]] = sums.get((pair[0], pair[1]), 0) + row[name]
    most = max(sums.values(), default=0)
    body: list[list[Cell | str]] = []
    for causer in ends:
        values = [sums.get((causer, victim), 0) for victim in ends]
        cells = [Cell(count(v) if v else "·", "" if v else "quiet", v / most if most else 0.0) for v in values]
        body.append([causer, *cells, Cell(count(sum(values)))])
    whole = [sum(sums.get((causer, victim), 0) for causer in ends) for victim in ends]
    body.append(["suffered", *(Cell(count(v)) for v in whole), Cell(count(sum(whole)))])
    return Table(title, ["causer ↓, victim →", *ends, "caused"], body, is_matrix=True)


BYTES_NOTE = (
    "Bytes in may be more than bytes out: blocks of which the host still has a clean copy need no copy out when their "
    "sequence leaves the device again."
)


def totals(report: Report) -> Section:
    """Sums over all teams."""
    sums = report["totals"]
    rows = [
        ["device time", f"{number(report['device_seconds'], 3)} s"],
        ["of it standing still for copies", f"{number(sums['stall_seconds'], 3)} s"],
        ["preemptions (slots lost: free, no KV memory is moved)", count(sums["preemptions"])],
        ["sequences swapped out to the host", count(sums["swaps_out"])],
        ["sequences swapped in again", count(sums["swaps_in"])],
        ["bytes out", f"{size(sums['bytes_out'])} ({count(sums['bytes_out'])})"],
        ["bytes in", f"{size(sums['bytes_in'])} ({count(sums['bytes_in'])})"],
        ["sequences dropped and recomputed", count(sums["recomputes"])],
        ["tokens computed again", count(sums["replayed_tokens"])],
        ["promotions", count(sums["promotions"])],
    ]
    lead = "All teams together."
    return Section(
        "totals", "Totals", lead, (), [Table("Totals of the period", ["what", "amount"], rows, note=BYTES_NOTE)]
    )
