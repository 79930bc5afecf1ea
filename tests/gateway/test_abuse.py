"""Many callers, many names, many departures: nothing grows, and nobody gets more by saying less."""

import asyncio
import contextlib
import gc
import json
import tracemalloc
from collections.abc import AsyncIterator

import pytest

from gateway.metrics.families import GatewayMetrics
from tests.support.gateway.harness import CHAT, Gateway, chat_body, eventually, gateway

pytestmark = pytest.mark.anyio


@pytest.mark.case("G37")
async def test_what_callers_name_is_never_a_label() -> None:
    async with gateway() as g:
        g.engine.script = g.engine.saying("ok")
        shown = GatewayMetrics(g.state, g.state.leases, g.ledger)

        async def calls(number: int) -> None:
            await g.chat(user=f"user-{number}")
            await g.chat(model=f"model-{number}")
            await g.chat(temperature=3 + number)
            await g.post(f"/v1/path-{number}", {})
            await g.chat(key=f"trz-{number}")

        await calls(0)
        before = shown.render()
        for number in range(1, 200):
            await calls(number)
        after = shown.render()
        assert after.count(b"\n") == before.count(b"\n"), "no new series"
        assert len(after) < 1 << 20
        assert b"user-" not in after and b"model-1" not in after and b"path-" not in after


@contextlib.asynccontextmanager
async def stream(g: Gateway) -> AsyncIterator[asyncio.StreamReader]:
    """A streaming client that has sent its request; leaving the block hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", g.port)
    body = json.dumps(chat_body(stream=True)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {g.key}\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    try:
        yield reader
    finally:
        writer.transport.abort()


@pytest.mark.case("G42")
async def test_streams_that_are_cut_leave_no_memory_behind() -> None:
    async with gateway(tcp=True) as g:

        async def cut(times: int) -> None:
            for _ in range(times):
                async with stream(g) as reader:
                    submit = await g.engine.next_submit()
                    g.engine.say(submit.request_id, "token")
                    await reader.readuntil(b"token")
                await g.engine.next_abort()
                await g.ledger.next_row()
            await eventually(lambda: not g.outstanding() and not g.state.engine.num_streams)
            for kept_by_doubles in (
                g.ledger.rows,
                g.ledger.opened,
                g.engine.submitted,
                g.engine.aborted,
                g.engine.finished,
            ):
                kept_by_doubles.clear()
            g.clock.advance(0)  # forgets cancelled timers
            gc.collect()

        await cut(100)  # caches are warm
        tasks = len(asyncio.all_tasks())
        tracemalloc.start()
        try:
            await cut(20)
            before = tracemalloc.get_traced_memory()[0]
            await cut(300)
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert grown < 300 * 500, (
            "one that is kept has ten thousand bytes; sets and free lists of the interpreter grow in jumps"
        )
        assert len(asyncio.all_tasks()) <= tasks and g.clock.num_timers == 0
        totals = g.state.leases.totals(1)
        assert totals.settled_requests == 420 and totals.outstanding_requests == 0
