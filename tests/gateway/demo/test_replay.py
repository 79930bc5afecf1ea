"""The load generator against a scripted server: what counts as a complete answer, and that arrivals do not wait."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from engine.sim.workload import TraceRequest
from gateway.demo.replay import Outcome, Target, describe, quantile, replay, summarise

Handler = Callable[[dict[str, object], asyncio.StreamWriter], Awaitable[None]]


def event(document: object) -> bytes:
    return f"data: {json.dumps(document)}\n\n".encode()


def usage(tokens: int) -> bytes:
    return event({"choices": [], "usage": {"completion_tokens": tokens}})


TOKEN = event({"choices": [{"text": "x"}]})
DONE = b"data: [DONE]\n\n"
OK = b"HTTP/1.1 200 OK\r\n\r\n"


async def play(rows: list[TraceRequest], handler: Handler, patience: float = 30.0) -> list[Outcome]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
        body = json.loads(await reader.readexactly(length))
        body["authorization"] = head.partition(b"Bearer ")[2].partition(b"\r")[0].decode()
        try:
            await handler(body, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        target = Target("127.0.0.1", port, "m", {"a": "key-a", "b": "key-b"}, 512, patience)
        return await replay(rows, target)


def one(handler: Handler, tokens: int = 2, patience: float = 30.0) -> Outcome:
    (outcome,) = asyncio.run(play([TraceRequest(0, "a", 3, tokens)], handler, patience))
    return outcome


def answer(*parts: bytes) -> Handler:
    async def handler(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        writer.write(b"".join(parts))
        await writer.drain()

    return handler


def test_a_whole_answer_has_times_and_tokens() -> None:
    outcome = one(answer(OK, TOKEN, TOKEN, usage(2), DONE))
    assert outcome.error is None
    assert outcome.output_tokens == 2
    assert outcome.ttft is not None
    assert outcome.jct is not None
    assert outcome.ttft <= outcome.jct


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ((OK, TOKEN, usage(2)), "without [DONE]"),
        ((OK, TOKEN, usage(1), DONE), "1 output tokens instead of 2"),
        ((OK, TOKEN, event({"error": {"message": "engine died"}})), "engine died"),
        ((b'HTTP/1.1 400 No\r\n\r\n{"error": {"message": "Too long."}}',), "HTTP 400: Too long."),
        ((b'HTTP/1.1 502 No\r\n\r\n["a proxy"]',), 'HTTP 502: ["a proxy"]'),
        ((b"HTTP/1.1 429 No\r\nRetry-After: 1\r\n\r\nslow down",), "HTTP 429: slow down"),
        ((b"nonsense\r\n\r\n",), "no HTTP answer: b'nonsense"),
        ((b"HTTP/1.1 x\r\n\r\n",), "ValueError"),
        ((), "no HTTP answer: b''"),
    ],
)
def test_what_is_no_whole_answer_is_an_error(parts: tuple[bytes, ...], said: str) -> None:
    outcome = one(answer(*parts))
    assert outcome.error is not None
    assert said in outcome.error


def test_a_server_that_hangs_is_an_error_too() -> None:
    async def hang(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    assert one(hang, patience=0.05).error == "no end within 0 s"


def test_requests_carry_their_teams_key_and_force_the_length() -> None:
    seen: list[dict[str, object]] = []

    async def handler(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        seen.append(body)
        writer.write(OK + TOKEN + usage(int(str(body["max_tokens"]))) + DONE)

    rows = [TraceRequest(0, "a", 3, 2), TraceRequest(1000, "b", 5, 4)]
    outcomes = asyncio.run(play(rows, handler))
    assert [outcome.error for outcome in outcomes] == [None, None]
    by_key = {str(body["authorization"]): body for body in seen}
    assert set(by_key) == {"key-a", "key-b"}
    prompt = by_key["key-b"]["prompt"]
    assert isinstance(prompt, list)
    assert len(prompt) == 5
    assert all(0 <= token < 512 for token in prompt)
    assert (by_key["key-b"]["max_tokens"], by_key["key-b"]["min_tokens"], by_key["key-b"]["ignore_eos"]) == (4, 4, True)


def test_arrivals_do_not_wait_for_answers() -> None:
    arrived = 0
    everyone = asyncio.Event()

    async def handler(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        nonlocal arrived
        arrived += 1
        if arrived == 3:
            everyone.set()
        await everyone.wait()  # nobody is answered before the last one has asked
        writer.write(OK + TOKEN + usage(1) + DONE)

    rows = [TraceRequest(at, "a", 1, 1) for at in (0, 1000, 2000)]
    assert [outcome.error for outcome in asyncio.run(play(rows, handler))] == [None] * 3


def test_summary_by_hand() -> None:
    rows = [TraceRequest(0, "a", 1, 10), TraceRequest(1_000_000, "a", 1, 10), TraceRequest(2_000_000, "b", 1, 10)]
    outcomes = [
        Outcome(rows[0], ttft=1.0, jct=2.0, output_tokens=10),
        Outcome(rows[1], ttft=3.0, jct=4.0, output_tokens=10),
        Outcome(rows[2], error="HTTP 503"),
    ]
    report = summarise(outcomes)
    assert report["wall_seconds"] == 5.0
    assert report["output_tokens_per_second"] == 4.0
    assert report["teams"]["a"]["jct_seconds"]["mean"] == 3.0
    assert (report["teams"]["b"]["failed"], report["teams"]["b"]["jct_seconds"]) == (1, None)
    assert report["errors"] == ["HTTP 503"]


def test_quantiles_are_nearest_rank() -> None:
    values = [float(i) for i in range(1, 101)]
    assert [quantile(values, q) for q in (0.0, 0.5, 0.95, 0.99, 1.0)] == [1, 50, 95, 99, 100]
    assert describe([]) is None
