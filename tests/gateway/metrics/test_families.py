"""What `/metrics` counts, read back through Prometheus' own parser; its labels and its cost are bounded."""

import asyncio
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.wire.messages import Interference, StepDone
from policies.tiers import DEFAULT_TIERS
from tenants.quotas import Limits
from tests.support.gateway.fake_engine import hello
from tests.support.gateway.harness import Gateway, chat_body, eventually, gateway
from tests.support.gateway.metrics import Shown, arrived, interval, sample

pytestmark = pytest.mark.anyio
GOLD, SILVER, BRONZE = DEFAULT_TIERS
HOSTILE = 'a"b\\c\nterazi_ready 7\n# {x="y"}'


@pytest.mark.case("K76")
async def test_after_a_run_the_counters_are_the_ledgers_sums() -> None:
    async with gateway() as g:
        shown = Shown(g)
        keys = [g.key, g.holder.add("team-b", tier=SILVER), g.holder.add("team-c", tier=BRONZE)]
        g.engine.script = g.engine.saying("hello you")
        for number, key in enumerate([*keys, *keys, keys[0]]):
            await g.chat("x" * number, key=key, max_tokens=4 if number % 2 else 100, stream=number % 3 == 0)
        await g.chat(key=keys[0], stop=["o"])
        g.engine.script = None
        failing = asyncio.create_task(g.chat(key=keys[1]))
        await eventually(lambda: g.engine.num_live == 1)
        submit = g.engine.submitted[-1]
        g.engine.say(submit.request_id, "half")
        g.engine.finish(submit.request_id, "error", message="boom", overhead_us=500)
        assert (await failing).status_code == 500
        assert shown.values("terazi_inflight", "tier") == {"gold": 0, "silver": 0, "bronze": 0}
        rows = g.ledger.rows
        assert {row.outcome for row in rows} == {"ok", "error"}
        wanted = Counter((row.team, row.tier, row.model, row.outcome) for row in rows)
        assert shown.values("terazi_requests_total", "team", "tier", "model", "outcome") == wanted
        for kind in ("prompt", "output"):
            tokens: Counter[str] = Counter()
            for row in rows:
                tokens[row.team] += getattr(row, f"{kind}_tokens")
            found = shown.values("terazi_tokens_total", "team", "type")
            assert {team: count for (team, which), count in found.items() if which == kind} == tokens
        wasted = sum(row.device_us - row.overhead_us for row in rows if row.outcome == "error")
        assert wasted == 3500
        assert shown.value("terazi_wasted_device_seconds_total", reason="error") == wasted / 1e6
        assert shown.values("terazi_queue_seconds_count", "tier") == Counter(row.tier for row in rows)
        assert sum(shown.values("terazi_queue_seconds_sum", "tier").values()) == pytest.approx(
            sum(((row.started_at_us or row.finished_at_us) - row.admitted_at_us) for row in rows) / 1e6
        )
        started = Counter((row.tier, row.model) for row in rows if row.first_token_at_us is not None)
        assert shown.values("terazi_ttft_seconds_count", "tier", "model") == started
        assert shown.values("terazi_gateway_overhead_seconds_count", "stage")["prepare"] == len(rows)
        assert shown.value("terazi_ledger_imbalance") == shown.value("terazi_reservations_outstanding") == 0


async def test_open_requests_and_token_gaps_are_seen_while_they_last() -> None:
    async with gateway() as g:
        shown = Shown(g)
        task = asyncio.create_task(g.chat())
        submit = await g.engine.next_submit()
        assert shown.value("terazi_inflight", tier="gold") == 1
        assert shown.value("terazi_reservations_outstanding") == shown.value("terazi_journal_open") == 1
        for seconds in (0, 0.02, 3):
            g.clock.advance(seconds)
            g.engine.say(submit.request_id, "a")
            await arrived(g, g.engine.num_frames_sent - 1)
        assert shown.value("terazi_itl_seconds_count") == 2
        assert shown.value("terazi_itl_seconds_sum") == pytest.approx(3.02)
        assert shown.value("terazi_itl_seconds_bucket", le="0.025") == 1
        g.engine.finish(submit.request_id, "stop")
        await task
        assert shown.value("terazi_inflight", tier="gold") == 0


async def test_the_ledgers_troubles_are_shown() -> None:
    async with gateway() as g:
        shown = Shown(g)
        g.engine.script = g.engine.saying("ok")
        await g.chat()
        g.clock.advance(7)
        assert shown.value("terazi_journal_lag_seconds") == 0
        g.ledger.backlog, g.ledger.num_failures = 1, 3
        assert shown.value("terazi_journal_lag_seconds") == 7
        assert shown.value("terazi_ledger_backlog") == 1
        assert shown.value("terazi_store_errors_total") == 3
        await g.chat(model="other")
        assert shown.value("terazi_refusals_total", code="model_not_found") == 1
        team = g.state.leases._teams[1]
        team.settled_tokens += 5  # what must never happen
        assert shown.value("terazi_ledger_imbalance") == 5


async def test_samples_add_up_by_team() -> None:
    async with gateway() as g:
        shown = Shown(g)
        g.holder.add("team-b", tier=BRONZE)
        cause = Interference(
            causer_id=1, victim_id=2, preemptions=5, swaps_out=2, swaps_in=1, recomputes=1, bytes_out=200, bytes_in=100
        )
        given = {"overhead_us": 250_000, "promotions": 1, "exhausted": 2, "budget_us": -500_000, "lag_max_us": 2.5e6}
        for _ in range(2):
            both = (sample(1, 1_000_000, 500_000, **given), sample(2, 500_000))
            shown.metrics.add(
                interval(*both, interference=(cause, cause), stall_us=125_000, replayed_tokens=9, num_raised=3)
            )
        device = shown.values("terazi_device_seconds_total", "team", "phase")
        assert device[("team-a", "compute")] == 1.5 and device[("team-a", "overhead")] == 0.5
        assert sum(device.values()) == 3.0
        assert shown.value("terazi_entitled_device_seconds_total", team="team-a") == 1.0
        assert shown.value("terazi_promotions_total", team="team-a", tier="gold") == 2
        assert shown.value("terazi_promotion_budget_exhausted_total", team="team-a") == 4
        assert shown.value("terazi_promotion_budget_remaining", team="team-a") == -0.5
        assert shown.value("terazi_service_lag_seconds", team="team-a") == 2.5
        assert shown.value("terazi_wasted_device_seconds_total", reason="overhead") == 0.5
        assert shown.value("terazi_preemptions_total") == 20
        assert shown.values("terazi_swaps_total", "direction") == {"out": 8, "in": 4}
        assert shown.values("terazi_swapped_bytes_total", "direction") == {"out": 800, "in": 400}
        assert shown.value("terazi_recomputes_total") == 4
        assert shown.value("terazi_stall_seconds_total") == 0.25
        assert shown.value("terazi_engine_exceptions_total") == 6
        assert shown.value("vllm:num_preemptions_total", model_name="org/tiny-random", engine="0") == 12


async def test_shares_are_of_backlogged_time_and_of_the_last_minute() -> None:
    async with gateway() as g:
        shown = Shown(g)
        g.holder.add("team-b", tier=BRONZE)
        assert "terazi_jain_index" not in {name for name, _ in shown.scrape()}
        shown.metrics.add(interval(sample(1, 100), sample(2, 900, backlogged_ms=0)))
        g.clock.advance(30)
        shown.metrics.add(interval(sample(1, 300, 400), sample(2, 100, 100)))
        assert shown.values("terazi_share_achieved", "team") == {"team-a": 400 / 1400, "team-b": 0.25}
        assert shown.values("terazi_share_entitled", "team") == {"team-a": 500 / 1500, "team-b": 0.2}
        ratio_a, ratio_b = 400 / 500, 1.0  # weights 4 and 1
        jain = (4 * ratio_a + ratio_b) ** 2 / (5 * (4 * ratio_a**2 + ratio_b**2))
        assert shown.value("terazi_jain_index") == pytest.approx(jain)
        g.clock.advance(30)  # the first interval is a minute old
        assert shown.values("terazi_share_achieved", "team") == {"team-a": 0.75, "team-b": 0.25}
        g.clock.advance(30)
        names = {name for name, _ in shown.scrape()}
        assert not names & {"terazi_share_achieved", "terazi_service_lag_seconds", "terazi_jain_index"}
        assert shown.value("terazi_device_seconds_total", team="team-a", phase="compute") == 400e-6


async def test_what_waits_is_shown_by_tier_and_level_until_nothing_is_open() -> None:
    async with gateway() as g:
        shown = Shown(g)
        g.holder.add("team-b")
        g.holder.add("team-c", tier=BRONZE)
        task = asyncio.create_task(g.chat())
        submit = await g.engine.next_submit()
        g.engine.say(submit.request_id, "a")
        await eventually(lambda: g.state.engine.latest_step is not None)
        first = sample(1, 9, waiting=4, waiting_levels=(1, 0, 3))
        shown.metrics.add(interval(first, sample(2, 9, waiting_levels=(2,)), sample(3, 9, waiting_levels=(0, 5))))
        queued = shown.values("terazi_queued", "tier", "level")
        assert queued[("gold", "0")] == 3 and queued[("gold", "2")] == 3 and queued[("bronze", "1")] == 5
        g.engine.finish(submit.request_id, "stop")
        await task
        assert sum(shown.values("terazi_queued", "tier", "level").values()) == 0
        task = asyncio.create_task(g.chat())
        submit = await g.engine.next_submit()
        assert sum(shown.values("terazi_queued", "tier", "level").values()) == 0, "the sample is of an earlier time"
        g.engine.finish(submit.request_id, "stop")
        await task


@pytest.mark.case("G63")
async def test_saturation_follows_the_steps_and_nothing_is_gated_by_it() -> None:
    greeting = hello(num_device_blocks=100, num_host_blocks=10, max_batch_size=4)
    async with gateway(greeting=greeting) as g:
        shown = Shown(g)
        seen = [shown.value("terazi_saturation")]
        task = asyncio.create_task(g.chat())
        submit = await g.engine.next_submit()
        for number, (running, free, free_host) in enumerate([(4, 100, 10), (2, 75, 3), (1, 0, 10), (1, 99, 9)]):
            step = StepDone(
                step_id=number, duration_us=1, num_running=running, num_free_blocks=free, num_free_host_blocks=free_host
            )
            g.engine.send(step)
            await arrived(g, number)
            seen.append(shown.value("terazi_saturation"))
        assert seen == [0, 1, 0.5, 1, 0.25]
        assert shown.values("terazi_kv_blocks", "pool") == {"device": 100, "host": 10}
        assert shown.values("terazi_kv_blocks_free", "pool") == {"device": 99, "host": 9}
        assert shown.values("terazi_kv_blocks_used_peak", "pool") == {"device": 100, "host": 7}
        full = StepDone(step_id=9, duration_us=1, num_running=4)
        g.engine.send(full)
        await eventually(lambda: g.state.engine.latest_step == full)
        other = asyncio.create_task(g.chat())
        assert (await g.engine.next_submit()).request_id != submit.request_id, "a full engine still takes requests"
        g.engine.die()
        assert (await task).status_code == (await other).status_code == 503
        assert shown.value("terazi_saturation") == 0, "an engine that has gone is not full for ever"
        assert shown.value("terazi_policy_effective") == shown.value("terazi_ready") == 0
        assert shown.values("terazi_kv_blocks_used_peak", "pool") == {"device": 100, "host": 10}


async def test_policy_effective_says_whether_shares_order_the_queue() -> None:
    for policy, effective in (("eg-mlfq", 1), ("fcfs", 0)):
        async with gateway(greeting=hello(policy=policy)) as g:
            assert Shown(g).value("terazi_policy_effective") == effective


@pytest.mark.case("G37", "G66")
async def test_teams_beyond_500_are_other_and_nothing_is_lost() -> None:
    async with gateway(limits=Limits(concurrent=3)) as g:
        shown = Shown(g)
        for number in range(2, 601):
            g.holder.teams.append(cast(Any, SimpleNamespace(**team_entry(number))))
        g.holder.add("last")
        teams = tuple(sample(number, 1_000_000, promotions=1, budget_us=number) for number in range(1, 702))
        shown.metrics.add(interval(*teams))
        device = shown.values("terazi_device_seconds_total", "team")
        assert len(device) == 501 and device["other"] == 201 and sum(device.values()) == 701
        shares = shown.values("terazi_share_achieved", "team")
        assert len(shares) == 501 and sum(shares.values()) == pytest.approx(1)
        assert shown.value("terazi_promotion_budget_remaining", team="other") == 501e-6
        limits = shown.values("terazi_limit_remaining", "team", "kind")
        assert len(limits) == 500 and limits[("team-a", "concurrent")] == 3
        lines = shown.metrics.render().count(b"\n")
        assert len(shown.metrics.render()) < 1 << 20
        for number in range(1000, 1020):  # teams that nobody has ever made
            shown.metrics.add(interval(*(sample(100 * number + i, 1) for i in range(100))))
        assert shown.metrics.render().count(b"\n") == lines


def team_entry(number: int) -> dict[str, Any]:
    return {"team_id": number, "name": f"team-{number}", "tier": SILVER, "limits": Limits(concurrent=number)}


@pytest.mark.case("G66")
async def test_an_archived_team_frees_its_place_and_other_never_falls() -> None:
    async with gateway() as g:
        shown = Shown(g)
        g.state.meters._teams_max = 1
        g.holder.add("team-b")
        shown.metrics.add(interval(sample(1, 5_000_000), sample(2, 1_000_000)))
        assert shown.values("terazi_device_seconds_total", "team") == {"team-a": 5, "other": 1}
        g.holder.teams = [cast(Any, SimpleNamespace(**team_entry(2)))]
        g.holder.add("team-2")
        assert shown.values("terazi_device_seconds_total", "team") == {"other": 1}
        shown.metrics.add(interval(sample(1, 7_000_000), sample(2, 2_000_000)))
        assert shown.values("terazi_device_seconds_total", "team") == {"other": 8, "team-2": 2}


@pytest.mark.case("G38")
async def test_hostile_names_stay_labels_and_junk_models_make_none() -> None:
    greeting = hello()
    model = SimpleNamespace(**{name: getattr(greeting.model, name) for name in greeting.model.__struct_fields__})
    async with gateway() as g:
        shown = Shown(g)
        g.holder.teams[0] = cast(Any, SimpleNamespace(**(team_entry(1) | {"name": HOSTILE})))
        g.holder.add("team-b")
        shown.metrics.add(interval(sample(1, 1_000_000), sample(2, 1)))
        assert shown.values("terazi_device_seconds_total", "team")[HOSTILE] == 1
        assert shown.value("terazi_ready") == 1
        meters = g.state.meters
        row = await one_row(g)
        for number in range(100):
            meters.opened(row)
            meters.ended(replace_model(row, f"{model.name}{HOSTILE}{number}"))
        assert len(shown.values("terazi_requests_total", "model")) == 17
        assert shown.values("terazi_requests_total", "model")["other"] == 85
        lines = shown.metrics.render().count(b"\n")
        for number in range(200):
            assert (await g.chat(model=f"junk-{number}")).status_code == 404
        assert shown.metrics.render().count(b"\n") == lines + 1, "one refusal code"


async def one_row(g: Gateway) -> Any:
    g.engine.script = g.engine.saying("ok")
    await g.chat()
    return g.ledger.rows[-1]


def replace_model(row: Any, model: str) -> Any:
    from dataclasses import replace

    return replace(row, model=model)


async def test_a_scrape_costs_the_same_after_many_requests() -> None:
    async with gateway(limits=Limits(concurrent=3, tokens_per_minute=10**9)) as g:
        shown = Shown(g)
        row = await one_row(g)
        shown.metrics.add(interval(sample(1, 1)))

        def calls() -> int:
            count = 0

            def note(*_: Any) -> None:
                nonlocal count
                count += 1

            sys.setprofile(note)
            try:
                shown.metrics.render()
            finally:
                sys.setprofile(None)
            return count

        few = calls()
        for _ in range(5000):
            g.state.meters.opened(row)
            g.state.meters.ended(row)
        assert calls() <= few * 1.05


VLLM = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:cache_config_info": "gauge",
    "vllm:num_preemptions": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
}


async def test_dashboards_made_for_vllm_find_their_names_types_and_labels() -> None:
    async with gateway() as g:
        shown = Shown(g)
        row = await one_row(g)
        engine = {"model_name": "org/tiny-random", "engine": "0"}
        series = shown.scrape()
        assert {name: kind for name, kind in shown.types.items() if name.startswith("vllm:")} == VLLM
        for name, labels in series:
            if name.startswith("vllm:") and name != "vllm:cache_config_info":
                assert {label: dict(labels)[label] for label in engine} == engine
        assert shown.value("vllm:request_success_total", finished_reason="stop", **engine) == 1
        assert shown.value("vllm:generation_tokens_total", **engine) == row.output_tokens
        assert shown.value("vllm:time_to_first_token_seconds_count", **engine) == 1
        # what the model server protocol of gateway-api-inference-extension reads
        ((_, labels),) = [one for one in series if one[0] == "vllm:cache_config_info"]
        assert (dict(labels)["block_size"], dict(labels)["num_gpu_blocks"]) == ("16", "128")
        task = asyncio.create_task(g.post("/v1/chat/completions", chat_body(max_tokens=5)))
        g.engine.script = None
        await eventually(lambda: g.engine.num_live == 1)
        step = StepDone(step_id=1, duration_us=1, num_running=1, num_waiting=7, num_free_blocks=32)
        g.engine.send(step)
        await eventually(lambda: g.state.engine.latest_step == step)
        assert shown.value("vllm:kv_cache_usage_perc", **engine) == 0.75
        assert shown.value("vllm:num_requests_waiting", **engine) == 7
        g.engine.finish(g.engine.submitted[-1].request_id, "stop")
        await task
        assert shown.value("vllm:num_requests_waiting", **engine) == 0


async def test_the_documented_names_are_the_served_names() -> None:
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text("utf-8").partition("## Left out")[0]
    documented = {
        name for group in re.findall(r"`([^`]+)`", page) for name in re.findall(r"(?:terazi_|vllm:)\w+", group)
    }
    async with gateway(limits=Limits(concurrent=3)) as g:
        shown = Shown(g)
        await one_row(g)
        await g.chat(model="other")
        shown.metrics.add(interval(sample(1, 1_000_000)))
        series = shown.scrape()
        served = {name for name, _ in series if not name.endswith(("_bucket", "_sum", "_count", "_created"))}
        served |= {name for name, kind in shown.types.items() if kind == "histogram"}
        assert served == documented
        kinds = dict(re.findall(r"(?m)^\| `(\w+)`[^|]*\| (\w+)", page))
        for name, kind in kinds.items():
            assert shown.types[name.removesuffix("_total")] == kind, name


async def test_limits_alone_give_no_more_than_500_teams_a_series() -> None:
    async with gateway(limits=Limits(requests_per_minute=2)) as g:
        shown = Shown(g)
        for number in range(2, 601):
            g.holder.teams.append(cast(Any, SimpleNamespace(**team_entry(number))))
        g.holder.add("unlimited")
        g.engine.script = g.engine.saying("ok")
        remaining = []
        for _ in range(3):
            remaining.append(shown.values("terazi_limit_remaining", "team", "kind")[("team-a", "requests")])
            await g.chat()
        assert remaining == [2, 1, 0]
        assert len(shown.values("terazi_limit_remaining", "team")) == 500
        assert "unlimited" not in shown.values("terazi_limit_remaining", "team")
