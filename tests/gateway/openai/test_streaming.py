"""Streams over real TCP: when headers go, what fills a silence, how failures look once a stream has begun."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.support.gateway.fake_engine import byte_ids
from tests.support.gateway.harness import CHAT, MODEL, TEXT, WAIT, Gateway, chat_body, events, gateway, text_of

pytestmark = pytest.mark.anyio


class Stream:
    """A response that is being read, piece by piece."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.text = ""
        self._pieces = response.aiter_text()

    async def until(self, mark: str) -> str:
        """Read until `mark` has come, and return everything so far."""
        async with asyncio.timeout(WAIT):
            while mark not in self.text:
                self.text += await anext(self._pieces)
        return self.text

    async def rest(self) -> str:
        """Everything to the end of the body."""
        async with asyncio.timeout(WAIT):
            async for piece in self._pieces:
                self.text += piece
        return self.text


@contextlib.asynccontextmanager
async def streaming(g: Gateway, path: str = CHAT, **fields: Any) -> AsyncIterator[asyncio.Task[httpx.Response]]:
    """Send a streaming request; the task ends when its headers have come."""
    body = {**(chat_body() if path == CHAT else {"model": MODEL, "prompt": "hi"}), "stream": True, **fields}
    request = g.http.build_request("POST", path, json=body, headers={"authorization": f"Bearer {g.key}"})
    task = asyncio.create_task(g.http.send(request, stream=True))
    try:
        yield task
    finally:
        if task.done() and not task.cancelled():
            await task.result().aclose()
        else:
            task.cancel()


async def settled() -> None:
    """Let everything that can run without outside help run."""
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.mark.case("D07")
async def test_each_token_goes_out_at_once_and_no_proxy_buffers() -> None:
    async with gateway(tcp=True) as g, streaming(g) as task:
        submit = await g.engine.next_submit()
        g.engine.say(submit.request_id, "one")
        stream = Stream(await task)
        assert "one" in await stream.until("one")
        headers = stream.response.headers
        assert headers["content-type"].startswith("text/event-stream")
        assert headers["x-accel-buffering"] == "no"
        assert {"no-cache", "no-store"} <= set(headers["cache-control"].split(", "))
        assert headers["transfer-encoding"] == "chunked" and "content-length" not in headers
        assert "x-terazi-queue-ms" not in headers, "not known yet"
        g.engine.say(submit.request_id, "two")
        await stream.until("two")
        g.engine.finish(submit.request_id, "stop")
        documents = events(await stream.rest())
        assert text_of(documents) == "onetwo" and documents[-1] == "[DONE]"
        assert documents[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


@pytest.mark.case("A12")
async def test_headers_come_early_and_comments_fill_the_silence() -> None:
    async with gateway(tcp=True) as g, streaming(g) as task:
        submit = await g.engine.next_submit()
        g.clock.advance(14.9)
        await settled()
        assert not task.done()
        g.clock.advance(0.2)
        stream = Stream(await task)
        assert stream.response.status_code == 200
        assert await stream.until("\n") == ": keep-alive\n"
        g.clock.advance(15)
        assert await stream.until("\n: keep-alive\n") == ": keep-alive\n: keep-alive\n"
        g.engine.say(submit.request_id, "late")
        await stream.until("late")
        g.clock.advance(10)
        g.engine.say(submit.request_id, "r")
        await stream.until('"r"')
        g.clock.advance(10)  # ten seconds since the last bytes: no comment is due
        await settled()
        g.engine.finish(submit.request_id, "stop")
        text = await stream.rest()
        assert text.count(": keep-alive") == 2
        assert "\n\n:" not in text.split("data:")[0] and ": keep-alive\n\n" not in text
        assert "id:" not in text.replace('"id":', "") and "data: \n" not in text
        assert text_of(events(text)) == "later"
        assert g.clock.num_timers == 0


@pytest.mark.case("A12")
async def test_a_pause_in_the_middle_of_a_stream_is_filled_too() -> None:
    async with gateway(tcp=True) as g, streaming(g) as task:
        submit = await g.engine.next_submit()
        g.engine.say(submit.request_id, "a")
        stream = Stream(await task)
        await stream.until('"a"')
        g.clock.advance(15)
        text = await stream.until(": keep-alive\n")
        assert text.endswith("\n\n: keep-alive\n")
        g.engine.finish(submit.request_id, "stop")
        assert events(await stream.rest())[-1] == "[DONE]"


async def test_tokens_without_text_do_not_put_off_the_comments() -> None:
    async with gateway(tcp=True) as g, streaming(g, stop="zz") as task:
        submit = await g.engine.next_submit()
        g.engine.say(submit.request_id, "a")
        stream = Stream(await task)
        await stream.until('"a"')
        for _ in range(3):
            g.engine.step({submit.request_id: [1]})  # a special token
            await settled()
            g.clock.advance(5)
        await stream.until(": keep-alive\n")
        g.engine.finish(submit.request_id, "stop")
        assert text_of(events(await stream.rest())) == "a"


@pytest.mark.case("K39")
async def test_a_queue_timeout_after_headers_is_an_error_event() -> None:
    async with gateway(tcp=True) as g, streaming(g) as task:
        submit = await g.engine.next_submit()
        g.clock.advance(15)
        stream = Stream(await task)
        await stream.until("keep-alive")
        g.engine.finish(submit.request_id, "timeout")
        text = await stream.rest()
        (document,) = events(text)
        assert document["error"]["code"] == "queue_timeout" and "[DONE]" not in text
        row = await g.ledger.next_row()
        assert (row.outcome, row.output_tokens) == ("timeout", 0)


async def test_when_the_engine_dies_in_a_stream_it_is_an_error_event() -> None:
    async with gateway(tcp=True) as g, streaming(g) as task:
        submit = await g.engine.next_submit()
        g.engine.say(submit.request_id, "half")
        stream = Stream(await task)
        await stream.until("half")
        g.engine.die()
        text = await stream.rest()
        assert events(text)[-1]["error"]["code"] == "engine_unavailable" and "[DONE]" not in text
        row = await g.ledger.next_row()
        assert (row.outcome, row.output_tokens, row.device_us) == ("error", 4, 4000)
        assert g.outstanding() == 0


async def test_a_shutdown_ends_streams_with_an_error_event() -> None:
    async with gateway(tcp=True) as g, streaming(g) as task:
        submit = await g.engine.next_submit()
        g.engine.say(submit.request_id, "half")
        stream = Stream(await task)
        await stream.until("half")
        g.state.end_streams()
        text = await stream.rest()
        assert events(text)[-1]["error"]["code"] == "draining" and "[DONE]" not in text
        assert await g.engine.next_abort() == submit.request_id
        row = await g.ledger.next_row()
        assert (row.outcome, row.output_tokens, row.device_us, row.level_path) == ("shutdown", 4, 4000, "0")
        assert row.started_at_us is not None, "the engine's last word was waited for"


@pytest.mark.case("A07")
async def test_what_cannot_be_served_is_a_400_before_any_event() -> None:
    async with gateway(tcp=True) as g, streaming(g, tool_choice="required", tools=[]) as task:
        response = await task
        assert response.status_code == 400 and response.headers["content-type"] == "application/json"


@pytest.mark.case("G33", "G34")
async def test_four_hundred_chunks_parse_and_end_with_one_usage_chunk() -> None:
    async with gateway(tcp=True) as g:
        async with streaming(g, path=TEXT, stream_options={"include_usage": True}) as task:
            submit = await g.engine.next_submit()
            stream: Stream | None = None
            for number in range(400):
                g.engine.step({submit.request_id: byte_ids(chr(97 + number % 26))})
                stream = stream or Stream(await task)
            g.engine.finish(submit.request_id, "length")
            assert stream is not None
            documents = events(await stream.rest())
        assert len(text_of(documents)) == 400
        assert documents[-1] == "[DONE]" and documents[-2]["choices"] == []
        assert documents[-2]["usage"]["completion_tokens"] == 400
        assert all(d["usage"] is None for d in documents[:-2])


async def test_the_row_is_closed_before_the_last_byte() -> None:
    async with gateway(tcp=True) as g, streaming(g) as task:
        submit = await g.engine.next_submit()
        g.engine.say(submit.request_id, "x")
        stream = Stream(await task)
        await stream.until('"x"')
        assert not g.ledger.rows
        g.engine.finish(submit.request_id, "stop")
        await stream.until("[DONE]")
        assert len(g.ledger.rows) == 1 and g.outstanding() == 0


async def test_a_slow_reader_holds_back_only_itself() -> None:
    """The client stops reading: its send waits, the engine's tokens pile up only to its own cap, others go on."""
    async with gateway(tcp=True) as g:
        _, writer = await asyncio.open_connection("127.0.0.1", g.port, limit=1)
        body = httpx.Request("POST", g.url, json=chat_body(stream=True)).read()
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {g.key}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        slow = await g.engine.next_submit()
        for _ in range(30):  # 30 MB of events: more than any socket buffer
            g.engine.step({slow.request_id: byte_ids("\x01" * 1000) * 170})
            await settled()
        g.engine.script = g.engine.saying("quick")
        assert (await g.chat()).status_code == 200
        assert g.state.engine.num_streams == 1
        writer.transport.abort()
        assert (await g.ledger.next_row()).outcome == "ok"
        row = await g.ledger.next_row()
        assert row.outcome == "client_closed" and g.outstanding() == 0
