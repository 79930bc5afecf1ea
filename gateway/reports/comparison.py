"""The demo's page: the fairness report of the EG-MLFQ run, with the comparison of both orders above it."""

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.reports import svg
from gateway.reports.fairness import fairness_page
from gateway.reports.format import count, number, percent, shown_teams, tone
from gateway.reports.page import Figure, Section, Table, csv_href, render_page

LICENCE = (
    "The trace is sampled from the Azure LLM inference trace 2023 (github.com/Azure/AzurePublicDataset; Patel et al., "
    "Splitwise, ISCA 2024), licence CC-BY-4.0; lengths scaled, teams assigned and bursts added by Terazi."
)
COLUMNS = {
    "team": "team",
    "policy": "policy",
    "requests": "requests",
    "ttft_mean": "TTFT mean, s",
    "ttft_p99": "TTFT p99, s",
    "jct_mean": "JCT mean, s",
    "jct_p95": "JCT p95, s",
    "slowdown_mean": "slowdown, times",
    "share": "share",
    "entitled": "entitled",
    "preemptions": "preempted",
    "swaps": "swapped",
    "recomputes": "recomputed",
    "promotions": "promoted",
}
COUNTS = ("preemptions", "swaps", "recomputes", "promotions")


def table_rows(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The per-team table: each team's rows of all policies side by side."""
    teams = list(dict.fromkeys(row["team"] for run in report["runs"] for row in run["teams"]))
    return [
        {name: {"policy": run["policy"], **row}.get(name) for name in COLUMNS}
        for team in teams
        for run in report["runs"]
        for row in run["teams"]
        if row["team"] == team
    ]


def run_rows(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row for each run: what the whole of it did."""
    rows = []
    for run in report["runs"]:
        fairness = run["fairness"]
        sums = fairness["totals"]
        rows.append(
            {
                "policy": run["policy"],
                "output_tokens_per_second": run["output_tokens_per_second"],
                "wall_seconds": run["wall_seconds"],
                "jain_weighted": fairness["jain_weighted"],
                "min_share": fairness["satisfaction_min_to_max"],
                "preemptions": sums["preemptions"],
                "swaps_out": sums["swaps_out"],
                "swaps_in": sums["swaps_in"],
                "recomputes": sums["recomputes"],
                "promotions": sums["promotions"],
                "stall_seconds": sums["stall_seconds"],
            }
        )
    return rows


def render_demo(report: Mapping[str, Any]) -> str:
    """The page of a demo report (see `gateway.demo.run`)."""
    last = report["runs"][-1]
    errors = [error for run in report["runs"] for error in run["errors"]]
    failed = sum(run["failed"] for run in report["runs"])
    page = fairness_page(
        last["fairness"],
        last["series"],
        title="Terazi: one trace, two orders",
        subtitle=f"{report['lead']} Headline numbers and every section after the comparison are the fairness report of "
        f"the {last['policy'].upper()} run.",
        elapsed=True,
        first=[answer(report), comparison(report)] if report["answer"] else [comparison(report)],
        warnings=[
            *([f"{failed} requests failed; the first reason: {errors[0]}"] if failed else []),
            *report["warnings"],
        ],
        facts=[(str(name), str(value)) for name, value in report["facts"].items()],
        footer=[LICENCE],
    )
    return render_page(page)


def answer(report: Mapping[str, Any]) -> Section:
    """One answer, so that one sees a model at work; the simulated engine's says that none was."""
    is_simulated = bool(report["runs"][-1]["fairness"].get("simulated_requests"))
    title = "One made-up answer of the simulated engine" if is_simulated else "One real answer"
    return Section("answer", title, report["question"], quote=report["answer"])


def comparison(report: Mapping[str, Any]) -> Section:
    """The same requests under both orders."""
    rows = table_rows(report)
    colours = shown_teams(report["runs"][-1]["fairness"])
    figures = [
        _bars(rows, colours, "jct_mean", "Mean time to the whole answer", "seconds"),
        _bars(rows, colours, "ttft_mean", "Mean time to the first token", "seconds"),
        _bars(rows, colours, "slowdown_mean", "Mean slowdown", "times its time alone on the device"),
        _answers(report, colours),
    ]
    shares = ("share", "entitled")
    table = Table(
        "Per team, both orders",
        list(COLUMNS.values()),
        [
            [
                row["team"],
                row["policy"],
                count(row["requests"]),
                *(number(row[name], 2) for name in ("ttft_mean", "ttft_p99", "jct_mean", "jct_p95", "slowdown_mean")),
                *(percent(row[name]) for name in shares),
                *(count(row[name]) for name in COUNTS),
            ]
            for row in rows
        ],
        num_text=2,
        note="TTFT: time to the first token. JCT: time to the whole answer. Slowdown: JCT over the time that the step "
        "profile predicts for the same request alone on the device.",
    )
    whole = Table(
        "Each run as a whole",
        [
            "policy",
            "output tokens/s",
            "wall, s",
            "weighted Jain",
            "min share",
            "preempted",
            "swapped out",
            "swapped in",
            "recomputed",
            "promoted",
            "stall for copies, s",
        ],
        [
            [
                row["policy"],
                number(row["output_tokens_per_second"], 1),
                number(row["wall_seconds"], 1),
                number(row["jain_weighted"], 3),
                number(row["min_share"], 3),
                *(count(row[name]) for name in ("preemptions", "swaps_out", "swaps_in", "recomputes", "promotions")),
                number(row["stall_seconds"], 3),
            ]
            for row in run_rows(report)
        ],
    )
    lead = (
        "Each pair of bars is one team: grey under the first order, coloured under the second. Where the coloured bar "
        "is longer, that team lost."
    )
    return Section("comparison", "Both orders side by side", lead, figures, [table, whole])


def _bars(rows: Sequence[Mapping[str, Any]], colours: Sequence[str], name: str, title: str, unit: str) -> Figure:
    first = rows[0]["policy"] if rows else ""
    bars = []
    previous = None
    for row in rows:
        value = row[name]
        shade = svg.colour(-1) if row["policy"] == first else tone(row["team"], colours)
        text = "–" if value is None else f"{value:,.2f}"
        label = f"{row['team']}, {row['policy']}"
        bars.append(svg.Bar(label, [(value or 0.0, shade)], text, is_first=previous not in (None, row["team"])))
        previous = row["team"]
    top = max((row[name] for row in rows if row[name] is not None), default=0.0)
    alt = f"{title}, {unit}. " + "; ".join(f"{bar.label}: {bar.text}" for bar in bars)
    return Figure(
        title,
        svg.bars(alt, bars, top),
        _gain(rows, name),
        unit=unit,
        csv_name=f"{name}.csv",
        csv_href=csv_href(["team", "policy", name], [[row["team"], row["policy"], row[name]] for row in rows]),
    )


def _gain(rows: Sequence[Mapping[str, Any]], name: str) -> str:
    """Every team's gain or loss, the largest gain first, in words."""
    values: dict[str, list[float]] = {}
    for row in rows:
        if row[name] is not None:
            values.setdefault(row["team"], []).append(row[name])
    ratios = {team: pair[-1] / pair[0] for team, pair in values.items() if len(pair) > 1 and pair[0] > 0}
    if not ratios:
        return "Lower is better."
    ordered = sorted(ratios, key=lambda team: ratios[team])
    return f"Lower is better. Times the first order's: {', '.join(f'{team} {ratios[team]:.2f}' for team in ordered)}."


def _answers(report: Mapping[str, Any], colours: Sequence[str]) -> Figure:
    samples = [(run["policy"], run["samples"]["jct"]) for run in report["runs"]]
    right = svg.nice(max((value for _, teams in samples for values in teams.values() for value in values), default=1.0))
    curves, rows = [], []
    for team in dict.fromkeys(team for _, teams in samples for team in teams):
        for place, (policy, teams) in enumerate(samples):
            values = teams.get(team, [])
            points = svg.cumulative(values, right)
            dash = "dashed" if place == 0 else ""
            curves.append(svg.Curve(f"{team}, {policy}", tone(team, colours), points, is_step=True, dash=dash))
            rows += [[team, policy, value] for value in sorted(values)]
    summary = "; ".join(f"{curve.name}: {max(0, len(curve.points) - 2)} answers" for curve in curves)
    return Figure(
        "Answers done within x seconds",
        svg.chart(
            f"Share of each team's answers done within x seconds, up to {right:g} s. {summary}.",
            curves,
            [(place, f"{label} s") for place, label in svg.value_ticks(right)],
            [(0.0, "0 %"), (0.5, "50 %"), (1.0, "100 %")],
        ),
        "Further left is better. Dashed lines are the first order, whole lines the second.",
        legend=str(svg.Legend([(curve.name, curve.colour, curve.dash or "solid") for curve in curves])),
        unit="share of the team's answers",
        csv_name="answers.csv",
        csv_href=csv_href(["team", "policy", "jct_seconds"], rows),
    )
