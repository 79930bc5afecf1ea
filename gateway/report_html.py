"""The demo's page: one self-contained HTML file with inline SVG, no script, nothing fetched. All text is escaped."""

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from gateway import svg
from gateway.render import cell

LICENCE = (
    "The trace is sampled from the Azure LLM inference trace 2023 (github.com/Azure/AzurePublicDataset; Patel et al., "
    "Splitwise, ISCA 2024), licence CC-BY-4.0; lengths scaled, teams assigned and bursts added by Terazi."
)
COLUMNS = {
    "team": "team",
    "policy": "policy",
    "requests": "requests",
    "ttft_mean": "TTFT mean",
    "ttft_p95": "TTFT p95",
    "jct_mean": "JCT mean",
    "jct_p95": "JCT p95",
    "slowdown_mean": "slowdown mean",
    "share": "share",
    "entitled": "entitled",
    "preemptions": "preemptions",
}


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure and the sentence under it."""

    svg: Any  # Markup
    caption: str


def table_rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The per-team table: each team's rows of all policies side by side."""
    teams = list(dict.fromkeys(row["team"] for run in report["runs"] for row in run["teams"]))
    return [
        {name: {"policy": run["policy"], **row}.get(name) for name in COLUMNS}
        for team in teams
        for run in report["runs"]
        for row in run["teams"]
        if row["team"] == team
    ]


def render(report: dict[str, Any]) -> str:
    """The page of a demo report (see `gateway.demo`)."""
    from jinja2 import Environment, StrictUndefined

    template = (files("gateway") / "data" / "report.html.jinja").read_text("utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    rows = table_rows(report)
    errors = [error for run in report["runs"] for error in run["errors"]]
    return environment.from_string(template).render(
        title="Terazi: one trace, two orders",
        lead=report["lead"],
        failed=sum(run["failed"] for run in report["runs"]),
        first_error=errors[0] if errors else "",
        facts=list(report["facts"].items()),
        question=report["question"],
        answer=report["answer"],
        columns=list(COLUMNS.values()),
        rows=[[cell(row[name]) for name in COLUMNS] for row in rows],
        plots=_plots(report, rows),
        figures=json.dumps({**report, "runs": [_without_series(run) for run in report["runs"]]}, indent=1),
        licence=LICENCE,
    )


def _without_series(run: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in run.items() if name not in ("series", "samples")}


def _plots(report: dict[str, Any], rows: list[dict[str, Any]]) -> list[Plot]:
    from markupsafe import Markup

    def plot(drawing: str, caption: str) -> Plot:
        return Plot(Markup(drawing), caption)  # the drawing's own text is escaped in gateway.svg

    def by_team(name: str) -> dict[str, dict[str, float | None]]:
        grouped: dict[str, dict[str, float | None]] = {}
        for row in rows:
            grouped.setdefault(row["team"], {})[row["policy"]] = row[name]
        return grouped

    plots = [
        plot(svg.bars("Mean time to the whole answer", "seconds", by_team("jct_mean")), "Lower is better."),
        plot(svg.bars("Mean time to the first token", "seconds", by_team("ttft_mean")), "Lower is better."),
        plot(svg.bars("Mean slowdown", "times", by_team("slowdown_mean")), "1 is alone on the device."),
    ]
    curves: dict[str, list[tuple[float, float]]] = {}
    for team in by_team("jct_mean"):
        for run in report["runs"]:
            curves[f"{team}, {run['policy']}"] = svg.cumulative(run["samples"]["jct"].get(team, []))
    plots.append(
        plot(
            svg.lines("Share of answers done within x seconds", "seconds", "share of answers", curves),
            "Further left is better. Every second line is dashed.",
        )
    )
    served = (team for run in report["runs"] for team in run["series"]["served"])
    teams = list(dict.fromkeys([*by_team("jct_mean"), *served]))
    for run in report["runs"]:
        series = run["series"]
        nothing = [0.0] * len(series["t"])
        layers = {team: series["served"].get(team, nothing) for team in teams}  # a team has one colour in all plots
        drawing = svg.stacked(f"Device time by team under {run['policy']}", "seconds", series["t"], layers)
        plots.append(plot(drawing, "Each team's part of every second's device time."))
    return plots
