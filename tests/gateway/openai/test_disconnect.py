"""Clients that leave: while reading, queued, in prefill, decoding, streaming or not. Work stops, and it is booked."""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.types import Message

from gateway.errors import ClientGone
from gateway.openai.app import HttpSettings
from gateway.openai.disconnect import Departure
from tenants.quotas import Limits
from tests.support.gateway.harness import CHAT, WAIT, Gateway, chat_body, eventually, gateway

pytestmark = pytest.mark.anyio


@contextlib.asynccontextmanager
async def client(g: Gateway, body: bytes | None = None, **fields: Any) -> AsyncIterator[asyncio.StreamWriter]:
    """A bare TCP client that has sent one chat request; leaving the block hangs up."""
    _, writer = await asyncio.open_connection("127.0.0.1", g.port)
    sent = json.dumps(chat_body(**fields)).encode() if body is None else body
    length = len(sent) if body is None else len(sent) + 100
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {g.key}\r\ncontent-length: {length}\r\n\r\n"
    writer.write(head.encode() + sent)
    await writer.drain()
    try:
        yield writer
    finally:
        writer.transport.abort()


async def until_idle(g: Gateway) -> None:
    """Wait until no request holds anything."""
    await eventually(lambda: not g.outstanding() and not g.state.engine.num_streams)


@pytest.mark.case("K43", "B07")
@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_while_queued_aborts_and_costs_no_tokens(stream: bool) -> None:
    async with gateway(tcp=True, limits=Limits(tokens_per_minute=5000)) as g:
        async with client(g, stream=stream):
            submit = await g.engine.next_submit()
        assert await g.engine.next_abort() == submit.request_id
        row = await g.ledger.next_row()
        assert (row.outcome, row.output_tokens, row.device_us, row.started_at_us) == ("client_closed", 0, 0, None)
        totals = g.state.leases.totals(1)
        assert (totals.settled_requests, totals.settled_tokens, totals.outstanding_requests) == (1, 0, 0)


@pytest.mark.case("G29", "G07")
async def test_a_stream_that_is_cut_is_aborted_and_booked_for_what_was_made() -> None:
    async with gateway(tcp=True) as g:
        async with client(g, stream=True):
            submit = await g.engine.next_submit()
            g.engine.say(submit.request_id, "seven t")
        assert await g.engine.next_abort() == submit.request_id
        row = await g.ledger.next_row()
        assert (row.outcome, row.output_tokens, row.device_us) == ("client_closed", 7, 7000)
        assert g.state.leases.totals(1).settled_tokens == row.prompt_tokens + 7
        await until_idle(g)
        assert g.engine.num_live == 0


@pytest.mark.case("G30", "K42")
async def test_a_single_answer_nobody_waits_for_is_aborted_too() -> None:
    async with gateway(tcp=True) as g:
        async with client(g, stream=False):
            submit = await g.engine.next_submit()
            g.engine.say(submit.request_id, "half")
        assert await g.engine.next_abort() == submit.request_id
        assert (await g.ledger.next_row()).output_tokens == 4
        await until_idle(g)


@pytest.mark.case("K45")
async def test_a_client_that_left_is_not_counted_as_a_success() -> None:
    async with gateway(tcp=True) as g:
        async with client(g, stream=True):
            await g.engine.next_submit()
        row = await g.ledger.next_row()
        assert (row.outcome, row.finish_reason, row.error_code) == ("client_closed", None, "client_closed")
        assert dict(g.state.meters.outcomes) == {"client_closed": 1}


@pytest.mark.case("G21")
async def test_when_the_engine_hangs_in_prefill_the_slot_is_free() -> None:
    settings = HttpSettings(settle_wait=0, close_wait=0)
    async with gateway(tcp=True, settings=settings, limits=Limits(concurrent=1)) as g:
        g.engine.is_hung = True
        async with client(g, stream=True):
            await g.engine.next_submit()
        await g.engine.next_abort()
        row = await g.ledger.next_row()
        assert row.outcome == "client_closed"
        assert g.state.leases.totals(1).settled_tokens == row.prompt_tokens, "it may have been computed"
        await until_idle(g)
        g.engine.is_hung = False
        g.engine.script = g.engine.saying("ok")
        assert (await g.chat()).status_code == 200


async def test_the_slot_is_free_before_the_engines_last_word() -> None:
    settings = HttpSettings(settle_wait=0, close_wait=WAIT)
    async with gateway(tcp=True, settings=settings) as g:
        g.engine.is_hung = True
        async with client(g, stream=True):
            submit = await g.engine.next_submit()
        await g.engine.next_abort()
        await eventually(lambda: not g.outstanding())
        assert not g.ledger.rows
        g.engine.finish(submit.request_id, "abort", device_us=77)
        assert (await g.ledger.next_row()).device_us == 77


async def test_leaving_in_the_middle_of_the_body_holds_nothing() -> None:
    async with gateway(tcp=True) as g:
        async with client(g, body=b'{"model"'):
            await eventually(lambda: g.outstanding())
        await until_idle(g)
        assert not g.engine.submitted and not g.ledger.opened
        totals = g.state.leases.totals(1)
        assert (totals.settled_requests, totals.settled_tokens) == (1, 0), "it has made a request and used no tokens"


@pytest.mark.case("G32")
@pytest.mark.parametrize("stream", [True, False])
async def test_a_departure_is_seen_through_a_wrapping_middleware(stream: bool) -> None:
    class Wrapper(BaseHTTPMiddleware):
        async def dispatch(self, request: Any, call_next: Any) -> Any:
            return await call_next(request)

    async with gateway(tcp=True, wrap=Wrapper) as g:
        async with client(g, stream=stream):
            submit = await g.engine.next_submit()
            g.engine.say(submit.request_id, "x")
        assert await g.engine.next_abort() == submit.request_id
        assert (await g.ledger.next_row()).outcome == "client_closed"
        await until_idle(g)


@pytest.mark.case("B07")
async def test_three_impatient_retries_cost_what_was_done_and_no_more() -> None:
    async with gateway(tcp=True, limits=Limits(concurrent=1)) as g:
        for _ in range(3):
            async with client(g, stream=False):
                submit = await g.engine.next_submit()
                g.engine.say(submit.request_id, "ab")
            row = await g.ledger.next_row()
            assert (row.outcome, row.output_tokens) == ("client_closed", 2)
            await until_idle(g)
        assert len(g.engine.aborted) == 3


@pytest.mark.case("G09", "G21")
async def test_clients_that_leave_at_random_points_leave_nothing_behind() -> None:
    rng = random.Random(5)
    async with gateway(tcp=True) as g:

        async def one(number: int) -> None:
            async with client(g, text=f"{number}", stream=rng.random() < 0.5, stop="Z"):
                for _ in range(rng.randrange(40)):
                    await asyncio.sleep(0)

        async def answer() -> None:
            while True:
                submit = await g.engine.next_submit()
                if rng.random() < 0.6 and submit.request_id not in g.engine.aborted:
                    g.engine.say(submit.request_id, rng.choice(["a", "Z", "abc"]))
                if rng.random() < 0.3 and submit.request_id not in g.engine.aborted:
                    g.engine.finish(submit.request_id, "stop")

        answering = asyncio.create_task(answer())
        for _ in range(20):
            await asyncio.gather(*(one(number) for number in range(5)))
        await until_idle(g)
        await eventually(lambda: len(g.ledger.rows) >= len(g.ledger.opened))
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        assert sum(r.output_tokens for r in g.ledger.rows) == sum(f.output_tokens for f in g.engine.finished)
        assert g.engine.num_live == 0 and g.clock.num_timers == 0
        assert g.state.leases.totals(1).is_balanced


async def test_departure_calls_back_once_and_stops_cleanly() -> None:
    messages: asyncio.Queue[Message] = asyncio.Queue()
    calls: list[int] = []
    departure = Departure(messages.get)
    departure.start()
    departure.on_leave(lambda: calls.append(1))
    messages.put_nowait({"type": "http.request", "body": b"", "more_body": False})
    messages.put_nowait({"type": "http.disconnect"})
    await eventually(lambda: departure.is_gone)
    assert calls == [1]
    with pytest.raises(ClientGone):
        departure.check()
    departure.on_leave(lambda: calls.append(2))
    assert calls == [1, 2], "who asks late is told at once"
    await departure.stop()


async def test_a_departure_that_never_comes_ends_with_its_request() -> None:
    departure = Departure(asyncio.Queue[Message]().get)
    departure.start()
    await departure.stop()
    departure.check()
