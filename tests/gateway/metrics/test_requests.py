"""Metrics of requests: counted once they end, and seen while they last."""

import asyncio
from collections import Counter

import pytest

from tests.support.gateway.harness import eventually, gateway
from tests.support.gateway.metrics import BRONZE, SILVER, Shown, arrived

pytestmark = pytest.mark.anyio


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
