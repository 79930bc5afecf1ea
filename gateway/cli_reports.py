"""`terazi usage|fairness|simulate`: read the database or a trace, change nothing."""

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.cli_options import DataDir, Json, data_dir_of
from gateway.render import EXIT_USAGE, CommandError, cell, print_json, print_table, reporting

usage_app = typer.Typer(help="What teams have used.", no_args_is_help=True)
fairness_app = typer.Typer(help="What teams got of what they were entitled to.", no_args_is_help=True)


def _format(text: str) -> str:
    if text not in ("table", "json"):
        raise typer.BadParameter(f"{text!r} is not one of table, json.")
    return text


From = Annotated[str | None, typer.Option("--from", metavar="TIME", help="First moment, UTC; 24 h before --to.")]
To = Annotated[str | None, typer.Option("--to", metavar="TIME", help="End, not included; now.")]
FormatOption = Annotated[str, typer.Option("--format", metavar="table|json", parser=_format, help="How it is printed.")]

_UNHAPPY = ["client_closed", "timeout", "error", "lost", "shutdown"]  # shown where there were any
_USAGE_COLUMNS = ["prompt_tokens", "output_tokens", "device_seconds", "preemptions"]
_USAGE_COLUMNS += ["ttft_p50_seconds", "ttft_p95_seconds", "jct_p50_seconds", "jct_p95_seconds"]
_FAIRNESS_COLUMNS = ["team", "tier", "weight", "requests", "device_seconds", "backlogged_seconds", "share", "entitled"]
_FAIRNESS_COLUMNS += ["satisfaction", "lag_max_seconds", "preemptions", "promotions"]


@usage_app.command("report")
def usage_report(
    by: Annotated[
        str, typer.Option("--by", metavar="WHAT", help="team, tier, model, day, key; several with commas.")
    ] = "team",
    team: Annotated[str | None, typer.Option("--team", metavar="TEAM", help="Only this team.")] = None,
    from_text: From = None,
    to_text: To = None,
    output_format: FormatOption = "table",
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Requests, tokens and device seconds from the ledger."""
    as_json = as_json or output_format == "json"
    with reporting(as_json):
        dimensions = [name.strip() for name in by.split(",") if name.strip()]

        async def read() -> dict[str, Any]:
            from gateway.reports_reader import open_reports

            async with open_reports(data_dir_of(data_dir), from_text, to_text) as reports:
                return await reports.usage(dimensions, team)

        report = asyncio.run(read())
        if as_json:
            print_json(report)
            return
        total = dict.fromkeys(dimensions[:1], "total") | report["total"]
        rows = [*report["data"], total] if dimensions else [total]
        unhappy = [name for name in _UNHAPPY if report["total"][name]]
        columns = [*dimensions, "requests", "ok", *unhappy, *_USAGE_COLUMNS]
        print_table(rows, columns, title=f"usage {cell(report['from'])} - {cell(report['to'])}")


@fairness_app.command("report")
def fairness_report(
    from_text: From = None,
    to_text: To = None,
    output_format: FormatOption = "table",
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Share against entitlement, counting only the seconds in which a team was backlogged."""
    as_json = as_json or output_format == "json"
    with reporting(as_json):

        async def read() -> dict[str, Any]:
            from gateway.reports_reader import open_reports

            async with open_reports(data_dir_of(data_dir), from_text, to_text) as reports:
                return await reports.fairness()

        report = asyncio.run(read())
        if as_json:
            print_json(report)
            return
        print_table(report["data"], _FAIRNESS_COLUMNS, title=f"fairness {cell(report['from'])} - {cell(report['to'])}")
        jain = report["jain_weighted"]
        print("weighted Jain index: " + ("no team was backlogged" if jain is None else f"{jain:.3f}"))


def simulate(
    trace: Path,
    policies: list[str],
    team_tiers: list[str],
    max_batch_size: str | None,
    max_batch_tokens: str | None,
    as_json: bool,
) -> None:
    """Body of `terazi simulate`. Raises CommandError or SettingsError."""
    from engine.config import EngineConfig
    from engine.sim.service import fixed_profile
    from engine.sim.simulate import simulate as run
    from engine.sim.workload import TraceError, read_trace
    from gateway.settings import parse_text, setting

    tiers: dict[str, str] = {}
    for pair in team_tiers:
        team, separator, tier = pair.partition("=")
        if not separator or not team or not tier:
            raise CommandError(f"--tier {pair!r} is not TEAM=TIER", EXIT_USAGE, "usage")
        tiers[team] = tier
    slots = parse_text(setting("max_batch_size"), max_batch_size or "64", "--max-batch-size")
    tokens = parse_text(setting("max_batch_tokens"), max_batch_tokens or "2048", "--max-batch-tokens")
    for name in policies:
        parse_text(setting("policy"), name, "--policy")
    config = EngineConfig(kind="sim", max_batch_size=slots, max_batch_tokens=tokens)
    try:
        report = run(read_trace(trace), policies, profile=fixed_profile(), config=config, team_tiers=tiers)
    except (TraceError, ValueError) as error:
        raise CommandError(str(error), EXIT_USAGE, "trace_unusable") from None
    if as_json:
        print_json(report)
        return
    print_table([row for policy in report["policies"] for row in _simulated_rows(policy)], title="simulated, seconds")


def _simulated_rows(policy: dict[str, Any]) -> list[dict[str, Any]]:
    def row(team: str, figures: dict[str, Any]) -> dict[str, Any]:
        def of(name: str, statistic: str) -> float | None:
            return (figures[name] or {}).get(statistic)

        return {
            "policy": policy["policy"],
            "team": team,
            "requests": figures["num_requests"],
            "refused": figures["num_refused"],
            "ttft_mean": of("ttft_seconds", "mean"),
            "ttft_p95": of("ttft_seconds", "p95"),
            "jct_mean": of("jct_seconds", "mean"),
            "jct_p95": of("jct_seconds", "p95"),
            "slowdown_mean": of("slowdown", "mean"),
            "share": figures.get("share"),
            "entitled": figures.get("entitled_share"),
            "preemptions": figures["num_preemptions"],
        }

    return [*(row(team["team"], team) for team in policy["teams"]), row("all", policy["total"])]
