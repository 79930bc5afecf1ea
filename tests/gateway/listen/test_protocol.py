"""Bytes on a connection: HTTP/1.0, heads that are slow, endless or no HTTP at all, bodies of answered requests."""

import asyncio
import contextlib
import json
from typing import Any

import pytest

from gateway.listen import protocol as http_protocol
from gateway.listen.listeners import limited_protocol
from gateway.openai.app import HttpSettings
from tests.support.gateway.harness import (
    CHAT,
    WAIT,
    FakeClock,
    Gateway,
    chat_body,
    clocked,
    events,
    eventually,
    gateway,
    text_of,
)

pytestmark = pytest.mark.anyio


def request_bytes(g: Gateway, version: str = "1.1", *, key: str | None = None, **fields: Any) -> bytes:
    body = json.dumps(chat_body(**fields)).encode()
    head = f"POST {CHAT} HTTP/{version}\r\nhost: x\r\nauthorization: Bearer {key or g.key}\r\n"
    return head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body


async def exchange(g: Gateway, *parts: bytes, pace: bool = False) -> bytes:
    """Send, then read until the server closes. With `pace` the server sees the parts one after another."""
    reader, writer = await asyncio.open_connection("127.0.0.1", g.port)
    for part in parts:
        writer.write(part)
        await writer.drain()
        for _ in range(20 if pace else 0):
            await asyncio.sleep(0)
    answer = b""
    async with asyncio.timeout(WAIT):
        with contextlib.suppress(ConnectionResetError):
            answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.case("A21", "D07")
async def test_a_client_of_http_1_0_gets_each_token_as_plain_bytes() -> None:
    async with gateway(tcp=True) as g:
        reader, writer = await asyncio.open_connection("127.0.0.1", g.port)
        writer.write(request_bytes(g, "1.0", stream=True))
        submit = await g.engine.next_submit()
        g.engine.say(submit.request_id, "first")
        async with asyncio.timeout(WAIT):
            answer = await reader.readuntil(b"first")
            g.engine.say(submit.request_id, "second")
            g.engine.finish(submit.request_id, "stop")
            answer += await reader.read()
        writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200") and b"connection: close" in head
        assert b"chunked" not in head.lower() and b"content-length" not in head.lower()
        assert body.startswith(b"data: ") and body.endswith(b"data: [DONE]\n\n")
        assert text_of(events(body.decode())) == "firstsecond"


@pytest.mark.parametrize("offer", ["h2c", "websocket", "TLS/1.2, something/9"])
@pytest.mark.parametrize("num_parts", [1, 2, 400])
async def test_an_offer_to_upgrade_is_declined_and_the_request_is_answered(offer: str, num_parts: int) -> None:
    async with gateway(tcp=True) as g:
        head, _, body = request_bytes(g, ignored="x" * 200).partition(b"\r\n\r\n")
        head += f"\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: {offer}\r\nhttp2-settings: AAMAAABk".encode()
        whole = head + b"\r\n\r\n" + body
        size = -(-len(whole) // num_parts)
        parts = [whole[at : at + size] for at in range(0, len(whole), size)]
        second = request_bytes(g).replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1)
        answering = asyncio.ensure_future(exchange(g, *parts, second, pace=num_parts == 2))
        for text in ("first", "second"):
            submit = await g.engine.next_submit()
            g.engine.say(submit.request_id, text)
            g.engine.finish(submit.request_id, "stop")
        answer = await answering
        assert answer.count(b"HTTP/1.1 200 OK") == 2
        assert answer.index(b"first") < answer.index(b"second")


async def test_a_tunnel_is_refused() -> None:
    async with gateway(tcp=True) as g:
        answer = await exchange(g, b"CONNECT example.org:443 HTTP/1.1\r\nhost: example.org\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 400") and b'"invalid_http"' in answer


async def test_a_single_answer_to_http_1_0_has_its_length() -> None:
    async with gateway(tcp=True) as g:
        g.engine.script = g.engine.saying("hello")
        head, _, body = (await exchange(g, request_bytes(g, "1.0"))).partition(b"\r\n\r\n")
        assert f"content-length: {len(body)}".encode() in head and b"chunked" not in head
        assert json.loads(body)["choices"][0]["message"]["content"] == "hello"


@pytest.mark.case("A21")
async def test_a_response_has_a_length_or_chunks_never_both() -> None:
    async with gateway(tcp=True) as g:
        g.engine.script = g.engine.saying("x")
        for stream in (True, False):
            request = request_bytes(g, stream=stream).replace(b"host: x", b"host: x\r\nconnection: close")
            head = (await exchange(g, request)).partition(b"\r\n\r\n")[0].lower()
            assert (b"content-length" in head) != (b"transfer-encoding" in head)


@pytest.mark.case("S13")
async def test_an_endless_head_is_cut_off_in_the_envelope() -> None:
    async with gateway(tcp=True) as g:
        for start in (b"GET /", b"GET / HTTP/1.1\r\nx: "):
            parts = [start, *[b"y" * 40_000] * 3]
            head, _, body = (await exchange(g, *parts, pace=True)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 431") and json.loads(body)["error"]["code"] == "headers_too_large"


async def test_a_long_body_with_the_next_head_behind_it_is_no_long_head() -> None:
    async with gateway(tcp=True) as g:
        g.engine.script = g.engine.saying("x")
        probe = b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        first = request_bytes(g, text="a" * 80_000, max_tokens=1)
        answer = await exchange(g, first + probe, b"\r\n")
        assert answer.count(b"HTTP/1.1 ") == 2 and b"HTTP/1.1 431" not in answer


@pytest.mark.case("A16")
async def test_what_is_no_http_is_refused_in_the_envelope() -> None:
    async with gateway(tcp=True) as g:
        head, _, body = (await exchange(g, b"\x16\x03\x01 hello\r\n\r\n")).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400") and json.loads(body)["error"]["code"] == "invalid_http"


@pytest.mark.case("S13")
async def test_a_slow_head_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.0)
    async with gateway(tcp=True) as g:
        assert await exchange(g, b"GET /livez HT") == b""
        assert await exchange(g) == b""


@pytest.mark.case("S01")
async def test_an_absolute_target_is_only_its_path() -> None:
    async with gateway(tcp=True) as g:
        request = request_bytes(g, key="wrong").replace(CHAT.encode(), b"http://localhost/livez/.." + CHAT.encode())
        answer = await exchange(g, request.replace(b"host: x", b"host: x\r\nconnection: close"))
        assert answer.startswith(b"HTTP/1.1 404")
        absolute = request_bytes(g, key="wrong").replace(CHAT.encode(), b"http://evil" + CHAT.encode())
        answer = await exchange(g, absolute.replace(b"host: x", b"host: x\r\nconnection: close"))
        assert answer.startswith(b"HTTP/1.1 401")


async def test_a_body_behind_its_answer_is_dropped_and_all_goes_on() -> None:
    async with gateway(tcp=True, settings=HttpSettings(max_body_bytes=100)) as g:
        size = 5_000_000
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {g.key}\r\ncontent-length: {size}\r\n\r\n"
        probe = b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        answer = await exchange(g, head.encode() + bytes(size) + probe)
        assert answer.startswith(b"HTTP/1.1 413") and b"HTTP/1.1 200 OK" in answer


@pytest.mark.parametrize("limit", ["MAX_DROPPED_BYTES", "DROP_SECONDS"])
async def test_but_only_so_much_of_it(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, limit, 0)
    async with gateway(tcp=True, settings=HttpSettings(max_body_bytes=100)) as g:
        reader, writer = await asyncio.open_connection("127.0.0.1", g.port)
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {g.key}\r\ncontent-length: 999999\r\n\r\n"
        writer.write(head.encode())
        await reader.readuntil(b"}}}")
        writer.write(b"x")
        await eventually(reader.at_eof)
        writer.close()


async def test_when_a_drained_server_closes_the_answer_arrives() -> None:
    async with gateway(tcp=True) as g:
        g.state.is_draining = True
        head, _, body = request_bytes(g).partition(b"\r\n\r\n")
        answer = await exchange(g, head + b"\r\n\r\n", body)
        assert answer.startswith(b"HTTP/1.1 503") and b"connection: close" in answer
        assert b'"draining"' in answer


@pytest.mark.case("D09")
async def test_an_idle_connection_is_used_again_after_a_minute() -> None:
    """Clients' pools keep connections for up to 60 s. Ours is closed after 75 s, by its own timer."""
    clock = FakeClock()
    async with gateway(tcp=True, http=clocked(limited_protocol(10), clock)) as g:
        g.engine.script = g.engine.saying("ok")
        reader, writer = await asyncio.open_connection("127.0.0.1", g.port)
        for seconds in (0, 60, 74, 74):
            clock.advance(seconds)
            writer.write(request_bytes(g))
            async with asyncio.timeout(WAIT):
                assert (await reader.readuntil(b"}}}")).startswith(b"HTTP/1.1 200 OK")
        clock.advance(74)
        await asyncio.sleep(0)
        assert not reader.at_eof()
        clock.advance(1)
        await eventually(reader.at_eof)
        writer.close()
