"""Requests that are refused, fail, or meet a limit: status, body, and what is given back."""

import asyncio
import random
from typing import Any

import pytest

from policies.tiers import Tier
from tenants.quotas import Limits
from tests.support.gateway.harness import (
    CHAT,
    MODEL,
    TEXT,
    chat_body,
    gateway,
)

pytestmark = pytest.mark.anyio


@pytest.mark.case("K39", "G47")
async def test_a_queue_timeout_before_the_headers_is_a_429() -> None:
    async with gateway(limits=Limits(requests_per_minute=1)) as g:
        request = asyncio.create_task(g.chat(stream=True))
        submit = await g.engine.next_submit()
        g.engine.finish(submit.request_id, "timeout")
        response = await request
        assert response.status_code == 429
        error = response.json()["error"]
        assert error["code"] == "queue_timeout" and "that the tier gold waits" in error["message"]
        assert "terazi tier set gold --max-queue-seconds" in error["message"]
        assert int(response.headers["retry-after"]) >= 1 and "x-ratelimit-limit-requests" in response.headers
        assert response.headers["x-terazi-scope"] == response.json()["error"]["terazi"]["scope"] == "global"
        assert g.ledger.rows[0].outcome == "timeout" and g.ledger.rows[0].started_at_us is None
        assert g.state.leases.totals(1).released_requests == 1


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("queue_full", 429, "overloaded_error"),
        ("draining", 503, "service_unavailable"),
        ("context_length_exceeded", 400, "invalid_request_error"),
        ("invalid_request", 400, "invalid_request_error"),
    ],
)
@pytest.mark.case("G47")
async def test_what_the_engine_refuses_keeps_its_status_and_costs_nothing(code: str, status: int, kind: str) -> None:
    async with gateway(limits=Limits(requests_per_minute=1)) as g:
        request = asyncio.create_task(g.chat(stream=True))
        submit = await g.engine.next_submit()
        g.engine.refuse(submit.request_id, code)
        response = await request
        assert response.status_code == status
        assert (response.json()["error"]["code"], response.json()["error"]["type"]) == (code, kind)
        assert (status == 400) != ("retry-after" in response.headers)
        (row,) = g.ledger.rows
        assert (row.outcome, row.error_code, row.prompt_tokens) == ("refused", code, 0)
        totals = g.state.leases.totals(1)
        assert (totals.released_requests, totals.outstanding_requests) == (1, 0)


async def test_an_engine_that_fails_one_request_is_a_500_in_the_envelope() -> None:
    async with gateway() as g:
        request = asyncio.create_task(g.chat())
        submit = await g.engine.next_submit()
        g.engine.say(submit.request_id, "ab")
        g.engine.finish(submit.request_id, "error", message="row failed")
        response = await request
        assert response.status_code == 500 and response.json()["error"]["code"] == "engine_error"
        row = g.ledger.rows[0]
        assert (row.outcome, row.error_code, row.output_tokens, row.device_us) == ("error", "engine_error", 2, 2000)
        assert g.state.leases.totals(1).settled_requests == 1, "work that was done is booked"


async def test_when_the_engine_dies_before_headers_it_is_a_503() -> None:
    async with gateway() as g:
        requests = [asyncio.create_task(g.chat()) for _ in range(3)]
        for _ in requests:
            await g.engine.next_submit()
        g.engine.die()
        for response in await asyncio.gather(*requests):
            assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1
        assert [(row.outcome, row.error_code) for row in g.ledger.rows] == [("refused", "engine_unavailable")] * 3
        assert g.outstanding() == 0
        again = await g.chat()
        assert again.status_code == 503 and again.json()["error"]["code"] == "engine_unavailable"
        assert len(g.ledger.rows) == 3, "a refused request has no row"


async def test_before_the_model_is_there_requests_get_503_starting() -> None:
    async with gateway(connect=False) as g:
        response = await g.chat()
        assert response.status_code == 503 and response.json()["error"]["code"] == "starting"
        assert int(response.headers["retry-after"]) >= 1 and g.outstanding() == 0


async def test_a_full_journal_is_a_503_that_holds_nothing() -> None:
    async with gateway(limits=Limits(requests_per_minute=1)) as g:
        g.ledger.is_full = True
        response = await g.chat()
        assert response.status_code == 503 and response.json()["error"]["code"] == "store_unavailable"
        assert not g.engine.submitted and g.outstanding() == 0
        g.ledger.is_full = False
        g.engine.script = g.engine.saying("ok")
        assert (await g.chat()).status_code == 200


async def test_a_drained_server_refuses_new_work_and_ends_old_work() -> None:
    async with gateway() as g:
        request = asyncio.create_task(g.chat(stream=True))
        submit = await g.engine.next_submit()
        g.engine.say(submit.request_id, "begun")
        g.state.is_draining = True
        refused = await g.chat()
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
        assert refused.headers["connection"] == "close"
        g.state.end_streams()
        await request
        assert g.ledger.rows[0].outcome == "shutdown"
        assert "[DONE]" not in (await request).text
        assert g.outstanding() == 0


@pytest.mark.case("G22", "G04")
async def test_no_route_leaks_a_slot_and_all_share_one_limit() -> None:
    async with gateway(limits=Limits(concurrent=1, requests_per_minute=8)) as g:
        g.engine.script = g.engine.saying("ok")
        for _ in range(2):
            assert (await g.chat()).status_code == 200
            assert (await g.chat(stream=True)).status_code == 200
            assert (await g.post(TEXT, {"model": MODEL, "prompt": "x"})).status_code == 200
            assert (await g.post(TEXT, {"model": MODEL, "prompt": "x", "stream": True})).status_code == 200
        for path, body in ((CHAT, chat_body()), (TEXT, {"model": MODEL, "prompt": "x"})):
            refused = await g.post(path, body)
            assert refused.status_code == 429 and refused.json()["error"]["code"] == "requests"


@pytest.mark.case("G06")
async def test_a_refusal_for_want_of_a_slot_does_not_burn_a_request() -> None:
    async with gateway(limits=Limits(concurrent=1, requests_per_minute=2)) as g:
        first = asyncio.create_task(g.chat())
        submit = await g.engine.next_submit()
        refused = await g.chat()
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "concurrent_limit"
        g.engine.say(submit.request_id, "ok")  # a request without a token would give its own place back
        g.engine.finish(submit.request_id, "stop")
        assert (await first).status_code == 200
        g.engine.script = g.engine.saying("ok")
        assert (await g.chat()).status_code == 200
        third = await g.chat()
        assert third.status_code == 429 and third.json()["error"]["code"] == "requests", "both places are used"


@pytest.mark.case("G48")
async def test_remaining_falls_by_what_was_really_used() -> None:
    async with gateway(limits=Limits(tokens_per_minute=10_000, requests_per_minute=100)) as g:
        g.engine.script = g.engine.saying("four")
        remaining = 10_000
        for turn in range(3):
            response = await g.chat()
            remaining -= response.json()["usage"]["total_tokens"]
            assert int(response.headers["x-ratelimit-remaining-tokens"]) == remaining
            assert int(response.headers["x-ratelimit-remaining-requests"]) == 99 - turn


@pytest.mark.case("G47")
async def test_a_spent_minute_says_when_to_come_back() -> None:
    async with gateway(limits=Limits(tokens_per_minute=100)) as g:
        g.engine.script = g.engine.saying("ok")
        assert (await g.chat(max_tokens=50)).status_code == 200
        refused = await g.chat(max_tokens=95)
        assert refused.status_code == 429
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "tokens")
        assert "team-a" in error["message"] and error["terazi"]["scope"] == "team"
        assert refused.headers["x-terazi-scope"] == "team"
        seconds = int(refused.headers["retry-after"])
        assert 1 <= seconds <= 60
        g.clock.advance(seconds)
        never = await g.chat(max_tokens=1000)
        assert never.headers["x-should-retry"] == "false", "it is larger than the limit itself"


@pytest.mark.case("G09")
async def test_whatever_happens_there_is_one_row_and_the_sums_agree() -> None:
    """200 seeded endings: finished, cut, refused, failed, timed out; no request without exactly one row."""
    rng = random.Random(9)
    async with gateway(tier=Tier("t", 1, 0, 1000, 4, 55)) as g:

        async def one() -> None:
            await g.chat(stream=rng.random() < 0.5, stop="Z", max_tokens=rng.randrange(1, 9))

        for _ in range(40):
            tasks = [asyncio.create_task(one()) for _ in range(5)]
            for _ in tasks:
                submit = await g.engine.next_submit()
                end = rng.choice(["stop", "length", "error", "timeout", "refuse", "abort"])
                if end not in ("timeout", "refuse"):
                    g.engine.say(submit.request_id, "Z" if rng.random() < 0.2 else "ab")
                if submit.request_id in g.engine.aborted:
                    continue
                if end == "refuse":
                    g.engine.refuse(submit.request_id, "queue_full")
                else:
                    g.engine.finish(submit.request_id, end)  # type: ignore[arg-type]
            await asyncio.gather(*tasks)
        assert len(g.ledger.rows) == len(g.ledger.opened) == 200
        assert sum(r.output_tokens for r in g.ledger.rows) == sum(f.output_tokens for f in g.engine.finished)
        assert sum(r.device_us for r in g.ledger.rows) == sum(f.device_us for f in g.engine.finished)
        assert g.outstanding() == 0 and g.state.leases.totals(1).is_balanced
        assert g.state.engine.num_streams == 0 and g.engine.num_live == 0 and g.clock.num_timers == 0


async def test_an_unexpected_fault_is_a_500_and_is_booked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with gateway() as g:
        g.engine.script = g.engine.saying("ok")

        def broken(*args: Any, **kwargs: Any) -> None:
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr("gateway.openai.completions.Detokenizer", broken)
        response = await g.chat()
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "internal_error" and "a bug" not in response.text
        assert (g.ledger.rows[0].outcome, g.ledger.rows[0].error_code) == ("error", "internal_error")
        assert g.outstanding() == 0
