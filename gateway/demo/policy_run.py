"""Plays one trace under one policy against a real server. The demo and the policy benchmark share this."""

import asyncio
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.sim.simulate import isolated_us
from engine.sim.workload import TraceRequest
from gateway.admin.client import AdminClient, open_admin
from gateway.command import CommandError
from gateway.demo.replay import Outcome, Target, describe, replay, summarise
from gateway.demo.server_process import ServerProcess
from gateway.reports.reader import open_reports
from policies.cost import StepProfile

TEAM_TIERS = {"support": "gold", "dev": "silver", "reports": "bronze"}
OTHER_TIER = "silver"
PATIENCE_SECONDS = 3600
LEDGER_FIGURES = ("preemptions", "swaps", "recomputes", "promotions", "device_seconds")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options that all runs of a comparison share. Sizes are texts, as the flags of `terazi serve` take them."""

    data_root: Path
    engine: str
    model: str
    max_batch_size: str
    vocab_size: int
    question: str = ""
    weights: Mapping[str, int] = field(default_factory=dict)  # by tier; other tiers keep their default
    kv_memory: str = ""  # as --kv-memory; "" is the server's default
    host_kv_memory: str = ""
    max_batch_tokens: str = ""
    team_tiers: Mapping[str, str] = field(default_factory=lambda: TEAM_TIERS)  # other teams are silver

    def tier_of(self, team: str) -> str:
        """The tier of a team of the trace."""
        return self.team_tiers.get(team, OTHER_TIER)


async def _make_teams(admin: AdminClient, teams: Sequence[str], options: RunOptions) -> dict[str, str]:
    # Under overload, FCFS makes requests wait longer than their tier allows. Give both policies time to finish every
    # request.
    for tier in sorted({options.tier_of(team) for team in teams}):
        weight = {"weight": options.weights[tier]} if tier in options.weights else {}
        await admin.call("PATCH", f"/admin/v1/tiers/{tier}", body={"max_queue_seconds": PATIENCE_SECONDS, **weight})
    keys = {}
    for team in teams:
        tier = options.tier_of(team)
        await admin.call("POST", "/admin/v1/teams", body={"name": team, "tier": tier})
        answer = await admin.call("POST", f"/admin/v1/teams/{team}/keys", body={})
        keys[team] = str(answer["key"])
    return keys


async def ask(server: ServerProcess, key: str, model: str, question: str) -> str:
    """The model's greedy answer to one question. Raises CommandError when no answer comes."""
    import httpx

    body = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": 48, "temperature": 0}
    async with httpx.AsyncClient(base_url=server.info["url"], timeout=120.0, trust_env=False) as client:
        try:
            answer = await client.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})
        except httpx.HTTPError as error:
            raise CommandError(f"the model did not answer: {error!r}") from None
    if answer.status_code != 200:
        raise CommandError(f"the model did not answer: HTTP {answer.status_code} {answer.text[:300]}")
    return str(answer.json()["choices"][0]["message"]["content"])


def run_policy(
    policy: str, rows: Sequence[TraceRequest], options: RunOptions, on_done: Callable[[Outcome], None]
) -> dict[str, Any]:
    """Serve under `policy`, replay the trace, stop the server and read its reports. Returns one JSON-able document.

    The run's data directory is deleted first. `on_done` is called for each request that ends. Raises CommandError.
    """
    data_dir = options.data_root / policy
    shutil.rmtree(data_dir, ignore_errors=True)
    teams = sorted(
        {row.team for row in rows}, key=lambda team: (list(TEAM_TIERS).index(team) if team in TEAM_TIERS else 9, team)
    )

    async def play(server: ServerProcess) -> tuple[str, list[Outcome], dict[str, Any]]:
        async with open_admin(data_dir) as admin:
            keys = await _make_teams(admin, teams, options)
            status = await admin.call("GET", "/admin/v1/status")
        served_model = status["engine"]["model"]["name"]
        # The question is asked in each run, so every engine is warm when the trace begins.
        answer = await ask(server, keys[teams[0]], served_model, options.question) if options.question else ""
        target = Target(server.host, server.port, served_model, keys, options.vocab_size)
        return answer, await replay(rows, target, on_done=on_done), status

    with ServerProcess(data_dir, serve_options(policy, options)) as server:
        answer, outcomes, status = asyncio.run(play(server))
    return _document(policy, outcomes, answer, status, asyncio.run(_reports(data_dir)), teams, options)


def serve_options(policy: str, options: RunOptions) -> list[str]:
    """The flags of `terazi serve` for this run."""
    flags = {
        "--policy": policy,
        "--engine": options.engine,
        "--model": options.model,
        "--max-batch-size": options.max_batch_size,
        "--max-batch-tokens": options.max_batch_tokens,
        "--kv-memory": options.kv_memory,
        "--host-kv-memory": options.host_kv_memory,
    }
    return [text for flag, value in flags.items() if value for text in (flag, value)]


async def _reports(data_dir: Path) -> dict[str, Any]:
    """The reports of the ledger and the samples. Call it when the server has stopped."""
    async with open_reports(data_dir, environment={}) as reports:
        return {"usage": await reports.usage(), "fairness": await reports.fairness(), "series": await reports.series()}


def _device_ms(reports: Mapping[str, Any]) -> float | None:
    """Device milliseconds for each output token, without copies and replays: how fast the machine was in this run."""
    total = reports["usage"]["total"]
    tokens = total["output_tokens"]
    return (total["device_seconds"] - total["overhead_device_seconds"]) * 1000 / tokens if tokens else None


def _alone_seconds(profile: StepProfile, row: TraceRequest) -> float:
    """The modelled time, in seconds, of this request alone on the device, with the default chunk size."""
    return isolated_us(profile, EngineConfig(), row.prompt_tokens, row.output_tokens) / 1e6


def _document(
    policy: str,
    outcomes: Sequence[Outcome],
    answer: str,
    status: dict[str, Any],
    reports: dict[str, Any],
    teams: Sequence[str],
    options: RunOptions,
) -> dict[str, Any]:
    profile = StepProfile(**status["engine"]["profile"])
    summary = summarise(outcomes)
    fairness = {row["team"]: row for row in reports["fairness"]["data"]}
    usage = {row["team"]: row for row in reports["usage"]["data"]}
    table = []
    for team in teams:
        done = [o for o in outcomes if o.row.team == team and o.error is None]
        figures = summary["teams"][team]
        slowdown = describe([(o.jct or 0.0) / _alone_seconds(profile, o.row) for o in done])
        table.append(
            {
                "team": team,
                "tier": options.tier_of(team),
                "requests": figures["requests"],
                "failed": figures["failed"],
                "ttft_mean": (figures["ttft_seconds"] or {}).get("mean"),
                "ttft_p95": (figures["ttft_seconds"] or {}).get("p95"),
                "ttft_p99": (figures["ttft_seconds"] or {}).get("p99"),
                "jct_mean": (figures["jct_seconds"] or {}).get("mean"),
                "jct_p95": (figures["jct_seconds"] or {}).get("p95"),
                "slowdown_mean": (slowdown or {}).get("mean"),
                "slowdown_p95": (slowdown or {}).get("p95"),
                "share": fairness.get(team, {}).get("share"),
                "entitled": fairness.get(team, {}).get("entitled"),
                **{name: usage.get(team, {}).get(name) for name in LEDGER_FIGURES},
            }
        )
    return {
        "policy": policy,
        "answer": answer,
        "failed": summary["all"]["failed"],
        "errors": summary["errors"],
        "wall_seconds": summary["wall_seconds"],
        "output_tokens_per_second": summary["output_tokens_per_second"],
        "late_max_seconds": summary["late_max_seconds"],
        "device_ms_per_output_token": _device_ms(reports),
        "all": summary["all"],
        "teams": table,
        "fairness": reports["fairness"],
        "series": reports["series"],
        "samples": {"jct": {t: [o.jct for o in outcomes if o.row.team == t and o.error is None] for t in teams}},
    }
