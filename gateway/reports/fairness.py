"""The fairness report as a page: what was promised, what each team got of what it was entitled to, who waited and paid.

Input is `tenants.reports.fairness_report` with its `service_series`; nothing is measured or judged here but the marks:
a promise is *kept* when the lag was at most the printed bound, and no request paused longer than its own.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, tzinfo
from typing import Any
from zoneinfo import ZoneInfo

from gateway.reports import svg
from gateway.reports.format import (
    Report,
    Rows,
    alt,
    bound_text,
    count,
    has_wide_bound,
    is_broken,
    missing_samples,
    moment,
    number,
    part_of,
    percent,
    seconds,
    shown_teams,
    simulated_note,
    size,
    span,
    sum_of,
    team_name,
    tone,
    was_short,
)
from gateway.reports.page import Figure, Page, Section, Table, Tile, csv_href, render_page
from gateway.reports.promises import promises
from gateway.reports.requests import interference, promotions, totals, waits
from gateway.reports.series import OTHERS, Binned, bin_series, time_ticks


def render_fairness(report: Report, series: Report) -> str:
    """The page of one period, in the report's time zone."""
    zone = ZoneInfo(report["time_zone"])
    subtitle = f"{moment(report['from'], zone)} to {moment(report['to'], zone)}, {report['time_zone']}."
    notes = missing_samples(report)
    page = fairness_page(report, series, title="Fairness report", subtitle=subtitle, zone=zone, warnings=notes)
    return render_page(page)


def fairness_page(
    report: Report,
    series: Report,
    *,
    title: str,
    subtitle: str,
    zone: tzinfo = UTC,
    elapsed: bool = False,
    first: Sequence[Section] = (),
    warnings: Sequence[str] = (),
    facts: Sequence[tuple[str, str]] = (),
    footer: Sequence[str] = (),
) -> Page:
    """The page as a value; `first` are sections of the caller above the report's own."""
    teams = shown_teams(report)
    weights = {row["team"]: row["weight"] for row in report["data"]}
    binned = bin_series(series, teams, weights)
    sections = [
        *first,
        promises(report),
        shares(report, binned, teams, was_short(report, series), time_ticks(binned, zone, elapsed=elapsed, most=2)),
        evenness(report, binned, time_ticks(binned, zone, elapsed=elapsed)),
        lag(report, binned, teams, time_ticks(binned, zone, elapsed=elapsed)),
        waits(report),
        promotions(report, teams),
        interference(report, teams),
        totals(report),
    ]
    note = simulated_note(report)
    warnings = [note, *warnings] if note else warnings
    return Page(title, subtitle, tiles(report), sections, warnings, facts, [*footer, FOOTER])


NAMED_MAX = 20  # teams in one sentence
FOOTER = (
    "Share, entitlement and satisfaction count only the seconds in which a team was backlogged: it had a request that "
    "was left waiting. So shares of teams that were backlogged at different times do not add up to one. Device seconds "
    "are the measured time of each step, split over its rows; all of them together are the time the device ran."
)


def tiles(report: Report) -> list[Tile]:
    """Headline numbers."""
    rows: Rows = report["data"]
    judged = [row for row in rows if row["satisfaction"] is not None]
    least = min(judged, key=lambda row: row["satisfaction"], default=None)
    sums = report["totals"]
    bound = report["lag_bound_seconds"]
    worst = worst_pause(report)
    exhausted = count(sum_of(rows, "promotions_exhausted"))
    return [
        Tile("Weighted Jain index", number(report["jain_weighted"], 4), "1 is perfectly fair"),
        Tile(
            "Least satisfied team",
            percent(least["satisfaction"]) if least else "–",
            f"of its entitlement: {least['team']}" if least else "no team was backlogged",
        ),
        Tile(
            "Largest lag",
            seconds(report["lag_max_seconds"]),
            f"bound {seconds(bound)}" if bound else "no bound under this order",
            "bad" if is_broken(report["lag_max_seconds"], bound) else "",
        ),
        Tile(
            "Longest pause",
            seconds(worst["longest_pause_seconds"]) if worst else "–",
            f"{worst['tier']}, {bound_text(report, worst)}" if worst else "no request",
            "bad" if any(row["pauses_over_bound"] for row in report["tiers"]) else "",
        ),
        Tile("Promotions", count(sums["promotions"]), f"budget too small {exhausted} times"),
        Tile(
            "Swapped out",
            count(sums["swaps_out"]),
            f"sequences, {size(sums['bytes_out'])}; {count(sums['recomputes'])} recomputed",
        ),
    ]


def worst_pause(report: Report) -> Mapping[str, Any] | None:
    """The tier with the longest pause."""
    rows = [row for row in report["tiers"] if row["longest_pause_seconds"] is not None]
    return max(rows, key=lambda row: row["longest_pause_seconds"], default=None)


def shares(report: Report, binned: Binned, teams: Sequence[str], is_short: bool, ticks: svg.Ticks) -> Section:
    """Share against entitlement while backlogged: over the period, and over time for each team."""
    rows: Rows = report["data"]
    judged = [row for row in rows if row["share"] is not None]
    bars = [
        svg.Bar(
            row["team"],
            [(row["share"], tone(row["team"], teams))],
            f"{percent(row['share'])} of {percent(row['entitled'])}",
            row["entitled"],
        )
        for row in judged
        if row["team"] in teams
    ]
    below = sorted(
        (row for row in judged if (row["satisfaction"] or 0.0) < 1), key=lambda row: row["satisfaction"] or 0.0
    )
    said = "The bar is what the team got, the tick what it was entitled to. "
    if not judged:
        said = "No team was backlogged in this period, so nobody was owed anything."
    elif below:
        named = ", ".join(f"{row['team']} {percent(row['satisfaction'])}" for row in below[:NAMED_MAX])
        named += f" and {len(below) - NAMED_MAX} more" if len(below) > NAMED_MAX else ""
        said += f"Below its entitlement: {named} of it. Min share is {number(report['satisfaction_min_to_max'], 3)}."
        if is_short:
            said += (
                " KV memory was short in this period, so it may have held a team back that sent enough: a team gets no "
                "more of the device than its sequences with KV memory can use."
            )
    else:
        said += "Nobody got less than that."
    names = ["team", "share", "entitled", "satisfaction", "backlogged_seconds"]
    figures = [
        Figure(
            "Over the whole period",
            svg.bars(alt("Share of the device while backlogged, and entitlement", bars), bars, _top(judged)),
            said,
            legend=str(svg.Legend([("share", "cx", ""), ("entitlement", "", "tick")])),
            unit="part of all device time in the seconds in which the team was backlogged",
            csv_name="shares.csv",
            csv_href=csv_href(names, [[row[name] for name in names] for row in judged]),
            is_wide=True,
        )
    ]
    # One scale for all teams, so that the pictures compare; the others together are larger than any of them.
    tops = [peak(binned, team) for team in binned.share if team != OTHERS]
    panel_top = min(1.0, svg.nice(max(tops, default=1.0)))
    panels = [
        Figure(
            team,
            share_panel(
                team,
                binned,
                tone(team, teams),
                ticks,
                panel_top if team != OTHERS else min(1.0, svg.nice(peak(binned, team))),
            ),
            "",
            csv_name=f"share-{team}.csv",
            csv_href=csv_href(
                ["from_epoch_seconds", "share", "entitled"],
                [
                    [binned.start + i * binned.width, binned.share[team][i], binned.entitled[team][i]]
                    for i in range(binned.count)
                ],
            ),
        )
        for team in binned.share
    ]
    table = Table(
        "Teams",
        [
            "team",
            "tier",
            "weight",
            "requests",
            "device, s",
            "of it copies and replays, s",
            "backlogged, s",
            "share, %",
            "entitled, %",
            "satisfaction, %",
            "lag least, s",
            "lag most, s",
        ],
        [
            [
                team_name(row),
                row["tier"] or "–",
                number(row["weight"], 0),
                count(row["requests"]),
                number(row["device_seconds"], 1),
                number(row["overhead_device_seconds"], 3),
                number(row["backlogged_seconds"], 1),
                number(row["share"], 1, 100),
                number(row["entitled"], 1, 100),
                number(row["satisfaction"], 1, 100),
                number(row["lag_min_seconds"], 3),
                number(row["lag_max_seconds"], 3),
            ]
            for row in rows
        ],
        num_text=2,
    )
    return Section(
        "shares",
        "Share against entitlement",
        "What each team got of the device while it had work waiting, and what its weight entitled it to.",
        figures,
        [table] if rows else [],
        panels,
        f"One picture a team, {span(binned.width)} a step: the area is its share of the device, the dashed line its "
        "entitlement; gaps are times without a backlog. Fair is where the area reaches the line.",
    )


def peak(binned: Binned, team: str) -> float:
    """The largest share or entitlement of a team in any bin; 0 if there is none."""
    return max((value for value in [*binned.share[team], *binned.entitled[team]] if value is not None), default=0.0)


def _top(rows: Rows) -> float:
    """The end of a scale of shares."""
    return min(1.0, svg.nice(max((row[name] or 0.0 for row in rows for name in ("share", "entitled")), default=1.0)))


def share_panel(team: str, binned: Binned, colour: str, ticks: svg.Ticks, top: float) -> str:
    """One team's share and entitlement over time, on a scale from 0 to `top`."""

    def points(values: Sequence[float | None]) -> list[tuple[float, float | None]]:
        scaled = [None if value is None else value / top for value in values]
        return [*((i / binned.count, value) for i, value in enumerate(scaled)), (1.0, scaled[-1])]

    share, entitled = binned.share[team], binned.entitled[team]
    known = [value for value in share if value is not None]
    mean = f"{percent(sum(known) / len(known))} on average" if known else "never backlogged"
    return svg.chart(
        f"Share of {team} while backlogged over time against its entitlement: {mean}.",
        [
            svg.Curve("share", colour, points(share), is_step=True, is_filled=True),
            svg.Curve("share", colour, points(share), is_step=True),
            svg.Curve("entitlement", "ink", points(entitled), is_step=True, dash="dashed"),
        ],
        ticks,
        [(0.0, "0 %"), (0.5, f"{top * 50:g} %"), (1.0, f"{top * 100:g} %")],
    )


def evenness(report: Report, binned: Binned, ticks: svg.Ticks) -> Section:
    """Weighted Jain and least over greatest satisfaction, over time."""

    def points(values: Sequence[float | None]) -> list[tuple[float, float | None]]:
        return [((i + 0.5) / binned.count, value) for i, value in enumerate(values)]

    known = [value for value in binned.jain if value is not None]
    worst = min(known, default=None)
    drawing = svg.chart(
        f"Weighted Jain index and least over greatest satisfaction over time; least Jain index {number(worst, 3)}.",
        [
            svg.Curve("weighted Jain", "ink", points(binned.jain)),
            svg.Curve("min share", "soft-line", points(binned.satisfaction_least), dash="dashed"),
        ],
        ticks,
        svg.value_ticks(1.0),
    )
    figure = Figure(
        "Evenness over time",
        drawing,
        f"Both lines are 1 when all backlogged teams get the same part of what they are entitled to. The index of the "
        f"whole period is {number(report['jain_weighted'], 3)}, the least one of a single step {number(worst, 3)}. "
        "A short dip is a team that came back with much work; a long one is unfair.",
        legend=str(
            svg.Legend(
                [("weighted Jain index", "ink", "solid"), ("least over greatest satisfaction", "soft-line", "dashed")]
            )
        ),
        unit=f"0 to 1, every {span(binned.width)}",
        csv_name="evenness.csv",
        csv_href=csv_href(
            ["from_epoch_seconds", "jain_weighted", "satisfaction_min_to_max"],
            [
                [binned.start + i * binned.width, binned.jain[i], binned.satisfaction_least[i]]
                for i in range(binned.count)
            ],
        ),
        is_wide=True,
    )
    table = Table(
        "Indices of the whole period",
        ["index", "value"],
        [
            ["weighted Jain index of satisfaction", number(report["jain_weighted"], 4)],
            ["min share: least satisfaction over greatest", number(report["satisfaction_min_to_max"], 4)],
        ],
    )
    return Section(
        "evenness",
        "How even",
        "Satisfaction is what a team got over what it was entitled to, while it was backlogged. Two numbers say how "
        "alike the teams' were; 1 is all alike.",
        [figure],
        [table],
    )


def lag(report: Report, binned: Binned, teams: Sequence[str], ticks: svg.Ticks) -> Section:
    """Lag of each team over time against the bound."""
    values = [value for lags in [*binned.lag.values(), binned.lag_bound] for value in lags if value is not None]
    top = svg.nice(max(values, default=0.0))

    def points(lags: Sequence[float | None]) -> list[tuple[float, float | None]]:
        return [
            ((i + 0.5) / binned.count, None if value is None else max(0.0, value) / top) for i, value in enumerate(lags)
        ]

    curves = [
        svg.Curve(team, tone(team, teams), points(lags), dash="" if i % 2 == 0 else "dashed")
        for i, (team, lags) in enumerate(binned.lag.items())
    ]
    has_bound = any(binned.lag_bound)
    bound = svg.Curve("bound", "ink", points(binned.lag_bound), is_step=True, dash="dotted")
    entries = [(curve.name, curve.colour, curve.dash or "solid") for curve in curves]
    most, limit = report["lag_max_seconds"], report["lag_bound_seconds"]
    said = f"The largest lag was {seconds(most)}"
    said += (
        f", {part_of(most, limit)} of the bound of {seconds(limit)}. No line may cross the dotted one."
        + (" The bound is twice as wide while KV blocks are short." if has_wide_bound(binned.lag_bound) else "")
        if limit
        else "; this order of requests promises no bound."
    )
    names = list(binned.lag)
    figure = Figure(
        "Lag over time",
        svg.chart(
            f"Lag of each team over time against its bound. {said}",
            [*curves, *([bound] if has_bound else [])],
            ticks,
            svg.value_ticks(top),
        ),
        said,
        legend=str(svg.Legend([*entries, *([("bound", "ink", "dotted")] if has_bound else [])])),
        unit=f"seconds of device time per unit of weight, the most in every {span(binned.width)}",
        csv_name="lag.csv",
        csv_href=csv_href(
            ["from_epoch_seconds", *names, "bound"],
            [
                [binned.start + i * binned.width, *(binned.lag[name][i] for name in names), binned.lag_bound[i]]
                for i in range(binned.count)
            ],
        ),
        is_wide=True,
    )
    return Section(
        "lag",
        "Lag against its bound",
        "How far the served time of a team ran ahead of its entitlement, compared with the team furthest behind. The "
        "gate keeps the gap between any two teams that can use the device below a bound, whatever they send.",
        [figure],
    )
