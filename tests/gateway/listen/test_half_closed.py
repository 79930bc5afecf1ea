"""Clients that send nothing more: some still listen and get their answer, others have left. Under both event loops.

A client that leaves and one that only shuts its sending side down look the same (a FIN) until something is written.
"""

import asyncio
import contextlib
import http.client
import io
import json
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from gateway.listen import protocol as http_protocol
from gateway.listen.protocol import MAX_AHEAD_BYTES, HttpProtocol
from gateway.openai.app import HttpSettings
from tests.support.gateway.harness import CHAT, WAIT, Gateway, chat_body, events, eventually, gateway, text_of

pytestmark = pytest.mark.anyio

INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
PROBE = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"
streaming_or_not = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": request.param}


def request_bytes(g: Gateway, version: str = "1.1", **fields: Any) -> bytes:
    body = json.dumps(chat_body(**fields)).encode()
    head = f"POST {CHAT} HTTP/{version}\r\nhost: x\r\nauthorization: Bearer {g.key}\r\n"
    return head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body


@contextlib.asynccontextmanager
async def client(g: Gateway, sent: bytes) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A bare client that has sent some bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", g.port)
    writer.write(sent)
    async with asyncio.timeout(WAIT):
        yield reader, writer
    writer.transport.abort()


def close(writer: asyncio.StreamWriter) -> None:
    """What a program does that ends: the kernel sends a FIN and nothing else, for nothing is unread."""
    writer.transport.abort()


class Answer:
    """Bytes as `http.client` reads them from a socket; it must step over interim responses by itself."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        response = http.client.HTTPResponse(self)  # type: ignore[arg-type]  # all it needs is a file
        response.begin()
        self.status, self.body = response.status, response.read().decode()

    def makefile(self, *_: Any) -> io.BytesIO:
        return io.BytesIO(self._data)


# --- still listening -----------------------------------------------------------------------------------------------


@pytest.mark.case("H16")
@streaming_or_not
async def test_who_shuts_only_its_sending_side_gets_the_answer(stream: bool) -> None:
    async with gateway(tcp=True) as g, client(g, request_bytes(g, stream=stream)) as (reader, writer):
        submit = await g.engine.next_submit()
        writer.write_eof()
        start = await reader.readuntil(INTERIM)
        assert start == INTERIM, "the server has looked whether anybody is there"
        g.engine.say(submit.request_id, "first ")
        await eventually(lambda: g.state.engine.num_streams == 1)
        g.engine.say(submit.request_id, "second")
        g.engine.finish(submit.request_id, "stop")
        answer = Answer(start + await reader.read())
        assert answer.status == 200
        text = text_of(events(answer.body)) if stream else json.loads(answer.body)["choices"][0]["message"]["content"]
        assert text == "first second" and (not stream or answer.body.endswith("data: [DONE]\n\n"))
        assert (await g.ledger.next_row()).outcome == "ok" and not g.engine.aborted


@pytest.mark.case("H16")
@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_in_the_middle_of_a_stream_it_goes_on(version: str) -> None:
    async with gateway(tcp=True) as g, client(g, request_bytes(g, version, stream=True)) as (reader, writer):
        submit = await g.engine.next_submit()
        g.engine.say(submit.request_id, "first")
        start = await reader.readuntil(b"first")
        writer.write_eof()
        start += await reader.readuntil(b": keep-alive\n")
        g.engine.say(submit.request_id, "second")
        g.engine.finish(submit.request_id, "stop")
        answer = Answer(start + await reader.read())
        assert text_of(events(answer.body)) == "firstsecond" and answer.body.endswith("data: [DONE]\n\n")
        assert INTERIM not in start


@pytest.mark.case("H16")
@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("path", ["/livez", "/v1/models", "/nowhere"])
async def test_short_calls_are_answered_without_interim_bytes(
    version: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "GRACE_SECONDS", WAIT)  # this machine may be slow
    async with gateway(tcp=True) as g:
        sent = f"GET {path} HTTP/{version}\r\nhost: x\r\nauthorization: Bearer {g.key}\r\n\r\n".encode()
        async with client(g, sent) as (reader, writer):
            writer.write_eof()
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 404" if path == "/nowhere" else b"HTTP/1.1 200 OK")
            assert Answer(answer).body


@pytest.mark.case("H16")
async def test_requests_in_a_row_are_all_answered() -> None:
    async with gateway(tcp=True) as g, client(g, (request_bytes(g) + PROBE) * 2) as (reader, writer):
        writer.write_eof()
        for text in ("first", "second"):
            submit = await g.engine.next_submit()
            g.engine.say(submit.request_id, text)
            g.engine.finish(submit.request_id, "stop")
        answer = (await reader.read()).replace(INTERIM, b"")
        assert answer.count(b"HTTP/1.1 200 OK") == 4 and answer.count(b'"status":"ok"') == 2
        assert answer.index(b"first") < answer.index(b'"status"') < answer.index(b"second")


# --- gone ----------------------------------------------------------------------------------------------------------


@pytest.mark.case("H16")
@streaming_or_not
@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("has_begun", [False, True])
async def test_who_closes_is_found_although_it_sends_only_a_fin(
    stream: bool, version: str, has_begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "PROBE_SECONDS", 100 * WAIT)  # found by the first probe
    async with gateway(tcp=True) as g, client(g, request_bytes(g, version, stream=stream)) as (reader, writer):
        submit = await g.engine.next_submit()
        if has_begun:
            g.engine.say(submit.request_id, "half")
        if has_begun and stream:
            await reader.readuntil(b"half")
        close(writer)
        assert await g.engine.next_abort() == submit.request_id
        assert (await g.ledger.next_row()).outcome == "client_closed"
        await eventually(lambda: not g.state.engine.num_streams and not g.outstanding())


@pytest.mark.case("H16")
@streaming_or_not
async def test_who_listens_for_a_while_and_then_closes_is_found(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "PROBE_SECONDS", 0.03)
    async with gateway(tcp=True) as g, client(g, request_bytes(g, stream=stream)) as (reader, writer):
        submit = await g.engine.next_submit()
        if stream:
            g.engine.say(submit.request_id, "half")
            await reader.readuntil(b"half")
        writer.write_eof()
        for _ in range(3):
            await reader.readuntil(b"keep-alive" if stream else INTERIM)
        assert not g.engine.aborted, "it has answered three probes"
        close(writer)
        assert await g.engine.next_abort() == submit.request_id
        assert (await g.ledger.next_row()).outcome == "client_closed"


@pytest.mark.case("H16")
async def test_http_1_0_is_never_sent_an_interim_response() -> None:
    async with gateway(tcp=True) as g, client(g, request_bytes(g, "1.0")) as (reader, writer):
        submit = await g.engine.next_submit()
        writer.write_eof()
        assert await g.engine.next_abort() == submit.request_id
        assert await reader.read() == b""
        assert (await g.ledger.next_row()).outcome == "client_closed"


@pytest.mark.case("H16")
async def test_an_end_in_the_middle_of_a_body_holds_nothing() -> None:
    async with gateway(tcp=True) as g, client(g, request_bytes(g)[:-5]) as (reader, writer):
        await eventually(lambda: g.outstanding())
        writer.write_eof()
        assert await reader.read() == b""
        await eventually(lambda: not g.outstanding())
        assert not g.engine.submitted and not g.ledger.opened


# --- with a second request in the pipe -----------------------------------------------------------------------------


def cut_post(g: Gateway) -> bytes:
    return request_bytes(g)[:-3]


BEHIND: dict[str, Callable[[Gateway], bytes]] = {
    "a call": lambda g: PROBE,
    "calls": lambda g: PROBE * 50,
    "half a head": lambda g: PROBE[:20],
    "a call and half a head": lambda g: PROBE + PROBE[:20],
    "half a body": cut_post,
    "a large body": lambda g: request_bytes(g, text="x" * 300_000),
    "no http": lambda g: b"no http\r\n\r\n" * 100,
    "more than is kept": lambda g: PROBE * 30_000,
}


@pytest.mark.case("H23")
@streaming_or_not
@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize("in_one_packet", [True, False], ids=["one packet", "later"])
async def test_a_departure_is_heard_whatever_waits_behind(
    stream: bool, behind: str, in_one_packet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "PROBE_SECONDS", 0.1)  # after a long time where reading has stopped
    monkeypatch.setattr(http_protocol, "GRACE_SECONDS", 0.01)
    async with gateway(tcp=True) as g:
        first, rest = request_bytes(g, stream=stream), BEHIND[behind](g)
        async with client(g, first + rest if in_one_packet else first) as (_, writer):
            submit = await g.engine.next_submit()
            if not in_one_packet:
                writer.write(rest)
                await asyncio.sleep(0)
                writer.write(b"GET ")
            if behind != "more than is kept":
                await eventually(lambda: not writer.transport.get_write_buffer_size())
            close(writer)
            assert await g.engine.next_abort() == submit.request_id
            row = await g.ledger.next_row()
            assert (row.outcome, row.output_tokens) == ("client_closed", 0)
            await eventually(lambda: not g.outstanding() and not g.state.engine.num_streams)
            assert len(g.engine.submitted) == 1, "what waited behind it is not begun"


@pytest.mark.case("H23")
@streaming_or_not
async def test_who_stays_gets_every_answer_in_order(stream: bool) -> None:
    # Prepared here: a process of its own would need the files of a model.
    async with gateway(settings=HttpSettings(process_above_bytes=1 << 20), tcp=True) as g:
        last = PROBE.replace(b"host", b"connection: close\r\nhost")
        bodies = [request_bytes(g, text="x" * size, stream=stream, max_tokens=1) for size in (10, 500_000, 10)]
        async with client(g, bodies[0]) as (reader, writer):
            submit = await g.engine.next_submit()
            for part in (PROBE, bodies[1], PROBE[:10], PROBE[10:] + bodies[2], last):
                writer.write(part)
                await asyncio.sleep(0)
            g.engine.say(submit.request_id, "first")
            g.engine.finish(submit.request_id, "stop")
            submit = await g.engine.next_submit()
            g.engine.say(submit.request_id, "second")
            g.engine.finish(submit.request_id, "stop")
            answers = (await reader.read()).split(b"HTTP/1.1 ")[1:]
        shown = [answer.partition(b" ")[0] for answer in answers]
        assert shown == [b"200", b"200", b"400", b"200", b"200", b"200"], "500,000 letters are beyond the context"
        assert b"first" in answers[0] and b"second" in answers[4]


@pytest.mark.case("H16", "H23")
@pytest.mark.parametrize("junk", [b"no http\r\n\r\n", b"\0" * 100_000, PROBE + b"\0" * 99])
async def test_what_cannot_be_read_costs_no_answer_before_it(junk: bytes) -> None:
    async with gateway(tcp=True) as g, client(g, request_bytes(g)) as (reader, writer):
        submit = await g.engine.next_submit()
        writer.write(junk)
        writer.write_eof()
        await reader.readuntil(INTERIM)
        g.engine.say(submit.request_id, "whole")
        g.engine.finish(submit.request_id, "stop")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200 OK") and b"whole" in answer
        statuses = [part.partition(b" ")[0] for part in answer.split(b"HTTP/1.1 ")[1:]]
        assert statuses[0] == b"200" and statuses[-1] == b"400"


@pytest.mark.case("H23")
async def test_only_so_much_is_kept_of_what_waits() -> None:
    connections: list[HttpProtocol] = []

    class Seen(HttpProtocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            connections.append(self)
            super().connection_made(transport)

    async with gateway(tcp=True, http=Seen) as g, client(g, request_bytes(g)) as (reader, writer):
        submit = await g.engine.next_submit()
        writer.write(PROBE)
        (connection,) = connections
        await eventually(lambda: connection.pipeline)
        later = PROBE * (8_000_000 // len(PROBE))
        writer.write(later)
        await eventually(lambda: connection.flow.read_paused)
        one_read = 256 * 1024
        assert MAX_AHEAD_BYTES < len(connection._ahead) <= MAX_AHEAD_BYTES + one_read
        assert writer.transport.get_write_buffer_size(), "the rest waits with the client"
        g.engine.say(submit.request_id, "ok")
        g.engine.finish(submit.request_id, "stop")
        num_answers = most = 0
        while num_answers < 12_000:  # more than are kept at once, so reading has gone on
            num_answers += (await reader.read(65536)).count(b'"status":"ok"')
            most = max(most, len(connection._ahead))
        assert most <= MAX_AHEAD_BYTES + one_read


@pytest.mark.case("S13")
async def test_a_slow_head_behind_a_running_request_does_not_end_it() -> None:
    class Quick(HttpProtocol):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.head_seconds = 0.01

    async with gateway(tcp=True, http=Quick) as g, client(g, request_bytes(g) + PROBE[:20]) as (reader, _):
        submit = await g.engine.next_submit()
        loop = asyncio.get_running_loop()
        later = loop.time() + 0.05
        await eventually(lambda: loop.time() > later)
        g.engine.say(submit.request_id, "ok")
        g.engine.finish(submit.request_id, "stop")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200 OK"), "and then the slow head ends the connection"


async def test_a_host_that_answers_no_probe_is_given_up() -> None:
    """The kernel gives the connection up; that takes a lost network, so only the option is looked at."""
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is None:
        pytest.skip("this system has no such option")
    connections: list[HttpProtocol] = []

    class Seen(HttpProtocol):
        def eof_received(self) -> bool:  # type: ignore[override]
            connections.append(self)
            return super().eof_received()

    async with gateway(tcp=True, http=Seen) as g, client(g, request_bytes(g)) as (_, writer):
        await g.engine.next_submit()
        writer.write_eof()
        await eventually(lambda: connections)
        connection = connections[0].transport.get_extra_info("socket")
        assert connection.getsockopt(socket.IPPROTO_TCP, option) == http_protocol.UNANSWERED_SECONDS * 1000
