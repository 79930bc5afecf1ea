"""`terazi usage|fairness|simulate`: these commands read the database or a trace, and change nothing."""

import asyncio
import contextlib
import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.cli.options import DataDir, Json, data_dir_of
from gateway.command import EXIT_USAGE, CommandError, print_json, print_table, reporting
from gateway.outputs import STANDARD_OUTPUT, write_output

usage_app = typer.Typer(help="What teams have used.", no_args_is_help=True)
fairness_app = typer.Typer(help="What teams got of what they were entitled to.", no_args_is_help=True)


def _choice(*allowed: str) -> Any:
    """A parser for `--format`."""

    def parse(text: str) -> str:
        if text not in allowed:
            raise typer.BadParameter(f"{text!r} is not one of {', '.join(allowed)}.")
        return text

    return parse


From = Annotated[str | None, typer.Option("--from", metavar="TIME", help="First moment; 24 h before --to.")]
To = Annotated[str | None, typer.Option("--to", metavar="TIME", help="End, not included; now.")]
Zone = Annotated[
    str, typer.Option("--tz", metavar="ZONE", help="Zone of days and of times without an offset: Europe/Istanbul.")
]


def _out_name(text: str) -> str:
    if not text.strip():
        raise typer.BadParameter("it is empty; give a file's name, or - for stdout")
    return text


Out = Annotated[
    str | None,
    typer.Option("--out", metavar="FILE", parser=_out_name, help="Write it there, not to the terminal; - is stdout."),
]
UsageFormat = Annotated[
    str, typer.Option("--format", metavar="table|json|csv", parser=_choice("table", "json", "csv"), help="What comes.")
]
FairnessFormat = Annotated[
    str,
    typer.Option(
        "--format", metavar="table|json|html", parser=_choice("table", "json", "html"), help="html is one page."
    ),
]


@usage_app.command("report")
def usage_report(
    by: Annotated[
        str,
        typer.Option("--by", metavar="WHAT", help="team, tier, model, day, key; several with commas; '' is one total."),
    ] = "team",
    team: Annotated[str | None, typer.Option("--team", metavar="TEAM", help="Only this team.")] = None,
    from_text: From = None,
    to_text: To = None,
    zone: Zone = "UTC",
    output_format: UsageFormat = "table",
    out: Out = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Requests, tokens and device seconds from the ledger."""
    output_format = "json" if as_json else output_format
    with reporting(output_format == "json"):
        dimensions = [name.strip() for name in by.split(",") if name.strip()]

        async def read() -> dict[str, Any]:
            from gateway.reports.reader import open_reports

            async with open_reports(data_dir_of(data_dir), from_text, to_text, zone=zone) as reports:
                return await reports.usage(dimensions, team)

        report = asyncio.run(read())
        from gateway.cli import report_text
        from gateway.reports.csv_export import write_usage_csv

        write: dict[str, Callable[[dict[str, Any]], None]] = {
            "json": report_text.write_json,
            "csv": lambda report: write_usage_csv(sys.stdout, report),
            "table": report_text.write_usage,
        }
        _emit(out, lambda: write[output_format](report))


@fairness_app.command("report")
def fairness_report(
    from_text: From = None,
    to_text: To = None,
    zone: Zone = "UTC",
    output_format: FairnessFormat = "table",
    out: Out = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """What teams got against what they were entitled to, while backlogged; pauses against their bounds; who paid."""
    output_format = "json" if as_json else output_format
    with reporting(output_format == "json"):

        async def read() -> tuple[dict[str, Any], dict[str, Any]]:
            from gateway.reports.reader import open_reports

            async with open_reports(data_dir_of(data_dir), from_text, to_text, zone=zone) as reports:
                return await reports.fairness(), {} if output_format == "table" else await reports.series()

        report, series = asyncio.run(read())

        def write() -> None:
            from gateway.cli import report_text

            if output_format == "json":
                report_text.write_json({**report, "series": series})
            elif output_format == "html":
                from gateway.reports.fairness import render_fairness

                print(render_fairness(report, series))
            else:
                report_text.write_fairness(report)

        _emit(out, write)


def _emit(out: str | None, write: Callable[[], None]) -> None:
    """Run `write`, which prints. What it prints goes to standard output, or into what `out` names (`gateway.outputs`).

    Raises CommandError when `out` cannot be written.
    """
    if out is None or out == STANDARD_OUTPUT:
        write()
        return
    text = io.StringIO(newline="")
    with contextlib.redirect_stdout(text):
        write()
    write_output(out, text.getvalue())
    print(f"written: {out}", file=sys.stderr)


def simulate(
    trace: Path,
    policies: list[str],
    team_tiers: list[str],
    limits: Mapping[str, str | None],
    as_json: bool,
) -> None:
    """The body of `terazi simulate`. `limits` are settings as text; None stands for the default.

    For `coast`, None stands for TERAZI_COAST if that is set. Raises CommandError or SettingsError.
    """
    from engine.config import EngineConfig
    from engine.sim.parts import fixed_profile
    from engine.sim.simulate import simulate as run
    from engine.sim.workload import TraceError, read_trace
    from gateway.settings.values import parse_text, setting

    tiers: dict[str, str] = {}
    for pair in team_tiers:
        team, separator, tier = pair.rpartition("=")  # a tier's name has no "=", but a team's may have
        if not separator or not team or not tier:
            raise CommandError(f"--tier {pair!r} is not TEAM=TIER, such as search=gold", EXIT_USAGE, "usage")
        tiers[team] = tier
    sizes = {
        name: setting(name).default if text is None else parse_text(setting(name), text, _option(name))
        for name, text in limits.items()
    }
    coast = setting("coast")
    if limits["coast"] is None and coast.env in os.environ:
        sizes["coast"] = parse_text(coast, os.environ[coast.env], coast.env)
    for name in policies:
        parse_text(setting("policy"), name, "--policy")
    config = EngineConfig(
        kind="sim",
        max_batch_size=sizes["max_batch_size"],
        max_batch_tokens=sizes["max_batch_tokens"],
        kv_memory_bytes=sizes["kv_memory"],
        host_kv_memory_bytes=sizes["host_kv_memory"],
        memory_preemption=sizes["memory_preemption"],
        coast=sizes["coast"],
    )
    try:
        report = run(read_trace(trace), policies, profile=fixed_profile(), config=config, team_tiers=tiers)
    except (TraceError, ValueError) as error:
        raise CommandError(str(error), EXIT_USAGE, "trace_unusable") from None
    if as_json:
        print_json(report)
        return
    print_table([row for policy in report["policies"] for row in _simulated_rows(policy)], title="simulated, seconds")
    for policy in report["policies"]:
        for what in ("refused", "cut"):
            for reason, number in policy[what].items():
                print(f"{policy['policy']}: {number} of {policy['total']['num_requests']} requests {what}: {reason}")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _simulated_rows(policy: dict[str, Any]) -> list[dict[str, Any]]:
    def row(team: str, figures: dict[str, Any]) -> dict[str, Any]:
        def of(name: str, statistic: str) -> float | None:
            return (figures[name] or {}).get(statistic)

        return {
            "policy": policy["policy"],
            "team": team,
            "requests": figures["num_requests"],
            "refused": figures["num_refused"],
            "cut": figures["num_cut"],
            "ttft_mean": of("ttft_seconds", "mean"),
            "ttft_p95": of("ttft_seconds", "p95"),
            "jct_mean": of("jct_seconds", "mean"),
            "jct_p95": of("jct_seconds", "p95"),
            "slowdown_mean": of("slowdown", "mean"),
            "share": figures.get("share"),
            "entitled": figures.get("entitled_share"),
            "preemptions": figures["num_preemptions"],
            "swaps": figures["num_swaps"],
            "recomputes": figures["num_recomputes"],
            "promotions": figures["num_promotions"],
            "longest_pause": figures["longest_pause_seconds"],
        }

    teams = [team["team"] for team in policy["teams"]]
    return [*(row(team["team"], team) for team in policy["teams"]), row(_total_name(teams), policy["total"])]


def _total_name(teams: Sequence[str]) -> str:
    """A name for the total that no team has. A trace may name a team as it likes, even TOTAL."""
    name = "TOTAL"
    while name in teams:
        name += " of all"
    return name
