"""What `/metrics` counts, read back through Prometheus' own parser; its labels and its cost are bounded."""

import asyncio
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.wire.messages import Interference, StepDone
from tenants.quotas import Limits
from tests.support.gateway.fake_engine import hello
from tests.support.gateway.harness import eventually, gateway
from tests.support.gateway.metrics import BRONZE, Shown, arrived, interval, one_row, sample, team_entry

pytestmark = pytest.mark.anyio
HOSTILE = 'a"b\\c\nterazi_ready 7\n# {x="y"}'


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
