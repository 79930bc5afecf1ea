"""Large bodies: bounded while they are read, prepared in a process of their own, and nobody else notices."""

import asyncio
import gc
import json
import os
import signal
import weakref
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.types import Message

from engine.wire.messages import Hello
from gateway.errors import Overloaded, Unavailable
from gateway.listen.body import read_body
from gateway.openai import completions
from gateway.openai.app import HttpSettings
from gateway.prepare import preparation, prepare
from gateway.prepare.preparation import Preparation
from tenants.quotas import Limits
from tests.support.gateway.fake_engine import hello
from tests.support.gateway.harness import CHAT, TOKENIZER, WAIT, Gateway, chat_body, eventually, gateway

pytestmark = pytest.mark.anyio

LARGE = "word " * 300  # as a chat more than PROCESS_ABOVE and less than the context
PROCESS_ABOVE = 1000


def settings(**overrides: Any) -> HttpSettings:
    return HttpSettings(thread_above_bytes=100, process_above_bytes=PROCESS_ABOVE, **overrides)


def bounds(**overrides: Any) -> Preparation:
    """A preparation that nothing is sent through: 100 bytes a team, 200 in all, bodies of up to 60."""
    numbers: dict[str, Any] = {
        "max_body_bytes": 60,
        "inline_bytes": 1,
        "small_bytes": 10,
        "team_bytes": 100,
        "total_bytes": 200,
        "waiting_requests": 2,
        "wait_seconds": WAIT,
        "run_seconds": WAIT,
        "idle_seconds": WAIT,
        "memory_bytes": 1 << 30,
        **overrides,
    }
    return Preparation(**numbers)


def expected_ids(text: str) -> tuple[int, ...]:
    body = json.dumps(chat_body(text)).encode()
    plain = prepare.prepare(CHAT, body, is_json=True, hello=hello(), tokenizer=TOKENIZER, default_max_tokens=16)
    return plain.token_ids


def pid_of(g: Gateway) -> int:
    pid = g.state.preparation.process.pid
    assert pid is not None
    return pid


# --- where the work is done ---------------------------------------------------------------------------------------


@pytest.mark.case("T03")
async def test_when_a_body_is_large_then_a_process_prepares_it(
    greeting: Hello, monkeypatch: pytest.MonkeyPatch
) -> None:
    def here(*_: Any, **__: Any) -> None:
        raise AssertionError("prepared in the gateway's process")

    async with gateway(settings=settings(), greeting=greeting) as g:
        g.engine.script = g.engine.saying("ok")
        monkeypatch.setattr(preparation, "prepare", here)
        answer = await g.chat(LARGE, seed=2**62 + 1, stop=["\u00e9"], temperature=0.1)
        assert answer.status_code == 200, answer.text
        (submit,) = g.engine.submitted
        assert submit.prompt_token_ids == expected_ids(LARGE)
        assert (submit.sampling.seed, submit.sampling.temperature) == (2**62 + 1, 0.1)
        refused = await g.chat(LARGE, temperature=9)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (400, "invalid_value", "temperature")
        other = await g.chat(LARGE, model="other")
        assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")
        assert g.state.preparation.process.num_starts == 1
        assert g.state.preparation.held_bytes == 0


@pytest.mark.case("T03")
async def test_when_the_process_is_busy_then_others_are_served(greeting: Hello) -> None:
    """A worker that stands still is as good as one that computes: nothing else waits for it."""
    async with gateway(settings=settings(), greeting=greeting) as g:
        g.engine.script = g.engine.saying("ok")
        other = g.holder.add("team-b")
        assert (await g.chat(LARGE)).status_code == 200
        os.kill(pid_of(g), signal.SIGSTOP)
        large = asyncio.create_task(g.chat(LARGE))
        await eventually(lambda: g.state.preparation.large.held > PROCESS_ABOVE)
        for key in (g.key, other):
            assert (await g.chat("short", key=key)).status_code == 200
            assert (await g.chat("middling " * 30, key=key)).status_code == 200, "it has the thread"
        assert not large.done()
        os.kill(pid_of(g), signal.SIGCONT)
        assert (await large).status_code == 200


# --- what is refused before the work ------------------------------------------------------------------------------


# --- bytes --------------------------------------------------------------------------------------------------------


class Sender:
    """An ASGI receive that counts what was taken of it."""

    def __init__(self, *parts: bytes) -> None:
        self._parts = list(parts)
        self.num_taken = 0

    async def __call__(self) -> Message:
        self.num_taken += 1
        part = self._parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(self._parts)}


async def read(bodies: Preparation, team_id: int, sender: Sender, length: int | None) -> "preparation.BodyHold":
    """Read a body and keep hold of its bytes."""
    hold = bodies.hold(team_id)
    headers = {} if length is None else {"content-length": str(length)}
    await read_body(sender, headers, max_bytes=bodies.max_body_bytes, timeout_seconds=WAIT, room=hold)
    return hold


@pytest.mark.case("T03")
async def test_when_a_team_has_no_room_then_its_body_waits_unread() -> None:
    bodies = bounds()  # 75 bytes of a team's large bodies, 150 in all
    first = await read(bodies, 1, Sender(b"x" * 60), 60)
    exact = await read(bodies, 1, Sender(b"x" * 15), 15)
    sender = Sender(b"x" * 20)
    waiting = asyncio.create_task(read(bodies, 1, sender, 20))
    await eventually(lambda: bodies.num_waiting == 1)
    others = [await read(bodies, 2, Sender(b"x" * 60), 60), await read(bodies, 3, Sender(b"x" * 15), 15)]
    own_small = await read(bodies, 1, Sender(b"x" * 10), 10)
    assert sender.num_taken == 0 and bodies.held_bytes == 160, "small bodies have bytes of their own"
    first.give_back()
    (await waiting).give_back()
    assert sender.num_taken == 1
    for hold in (exact, own_small, *others):
        hold.give_back()
    assert bodies.held_bytes == 0


@pytest.mark.case("T03")
async def test_when_all_teams_fill_the_total_then_the_next_waits() -> None:
    bodies = bounds()
    holds = [await read(bodies, team_id, Sender(b"x" * 50), 50) for team_id in (1, 2, 3)]
    sender = Sender(b"x" * 11)
    waiting = asyncio.create_task(read(bodies, 4, sender, 11))
    await eventually(lambda: bodies.num_waiting == 1)
    assert sender.num_taken == 0
    holds.pop().give_back()
    for hold in (await waiting, *holds):
        hold.give_back()
    assert bodies.held_bytes == 0


@pytest.mark.case("T03")
async def test_when_a_length_is_unknown_then_room_is_asked_as_it_grows() -> None:
    bodies = bounds()
    small = await read(bodies, 1, Sender(b"x" * 5, b"x" * 5), None)
    assert (bodies.small.held, bodies.large.held) == (10, 0)
    grown = await read(bodies, 1, Sender(b"x" * 5, b"x" * 6), None)
    assert (bodies.small.held, bodies.large.held) == (20, 60), "all that it might have come to"
    sender = Sender(b"x" * 11, b"x")
    waiting = asyncio.create_task(read(bodies, 2, sender, None))
    (await waiting).give_back()
    sender = Sender(b"x" * 11, b"x", b"x")
    small.give_back()
    waiting = asyncio.create_task(read(bodies, 1, sender, None))
    await eventually(lambda: bodies.large.num_waiting == 1)
    assert sender.num_taken == 1, "the rest stays with the client"
    grown.give_back()
    (await waiting).give_back()
    assert bodies.held_bytes == 0


@pytest.mark.case("T03")
async def test_when_no_room_comes_then_the_refusal_says_whose_it_is() -> None:
    bodies = bounds(wait_seconds=0.001)
    first = await read(bodies, 1, Sender(b"x" * 60), 60)
    with pytest.raises(Overloaded) as own:
        await read(bodies, 1, Sender(), 60)
    assert (own.value.status, own.value.code, own.value.details["scope"]) == (429, "preparation_full", "team")
    second = await read(bodies, 2, Sender(b"x" * 60), 60)
    with pytest.raises(Unavailable) as total:
        await read(bodies, 3, Sender(), 60)
    assert (total.value.status, total.value.code, total.value.details["scope"]) == (503, "preparation_full", "global")
    assert "retry-after" in own.value.headers() and "retry-after" in total.value.headers()
    first.give_back()
    second.give_back()
    assert (bodies.held_bytes, bodies.num_waiting) == (0, 0)


@pytest.mark.case("T03")
async def test_when_too_many_wait_then_the_next_is_refused_at_once() -> None:
    bodies = bounds()
    first = await read(bodies, 1, Sender(b"x" * 60), 60)
    waiting = [asyncio.create_task(read(bodies, 1, Sender(b"x" * 60), 60)) for _ in range(2)]
    await eventually(lambda: bodies.num_waiting == 2)
    with pytest.raises(Overloaded, match="already wait"):
        await read(bodies, 1, Sender(), 60)
    other = await read(bodies, 2, Sender(b"x" * 60), 60)
    for hold in (first, other):
        hold.give_back()
    for task in waiting:
        (await task).give_back()


@pytest.mark.case("T03")
async def test_when_a_team_floods_then_it_gets_429_and_others_200(greeting: Hello) -> None:
    few = settings(prepare_waiting_requests=1, max_body_bytes=4000, prepare_team_bytes=6000, prepare_total_bytes=12000)
    async with gateway(settings=few, greeting=greeting, limits=Limits(requests_per_minute=100)) as g:
        g.engine.script = g.engine.saying("ok")
        other = g.holder.add("team-b")
        assert (await g.chat(LARGE)).status_code == 200
        os.kill(pid_of(g), signal.SIGSTOP)
        flood = [asyncio.create_task(g.chat(LARGE)) for _ in range(5)]
        await eventually(lambda: sum(task.done() for task in flood) == 2)
        assert g.state.preparation.large.held <= 4500
        others = asyncio.create_task(g.chat(LARGE, key=other))
        await eventually(lambda: g.state.preparation.large.held_by(2) > PROCESS_ABOVE)
        os.kill(pid_of(g), signal.SIGCONT)
        assert (await others).status_code == 200
        answers = [await task for task in flood]
        assert sorted(answer.status_code for answer in answers) == [200, 200, 200, 429, 429]
        assert answers[-1].json()["error"]["code"] == "preparation_full"
        assert g.state.leases.totals(1).released_requests == 2, "no room is no request of the minute"
        assert (g.state.preparation.held_bytes, g.state.preparation.num_waiting) == (0, 0)


# --- what stays ---------------------------------------------------------------------------------------------------


@pytest.mark.case("T12")
@pytest.mark.parametrize("body", [b"{" + b" " * 5000, b"x" * 20_000], ids=["400", "413"])
async def test_when_a_body_is_refused_then_no_circle_keeps_it(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that is kept holds its traceback, and so the frame with the body, until a full collection."""
    calls: list[weakref.ref[Any]] = []
    made = completions._Call.__init__

    def watched(self: Any, *arguments: Any) -> None:
        calls.append(weakref.ref(self))
        made(self, *arguments)

    monkeypatch.setattr(completions._Call, "__init__", watched)
    async with gateway(settings=HttpSettings(max_body_bytes=10_000)) as g:
        gc.disable()
        try:
            assert (await g.post(CHAT, content=body)).status_code in (400, 413)
            await eventually(lambda: calls[0]() is None)
        finally:
            gc.enable()


# --- who leaves ---------------------------------------------------------------------------------------------------


@pytest.fixture
async def held(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """Preparing begins and then waits for the test."""
    import threading

    class Held:
        has_begun = threading.Event()
        may_end = threading.Event()

    real = preparation.prepare

    def slow(*arguments: Any, **names: Any) -> prepare.Prepared:
        Held.has_begun.set()
        assert Held.may_end.wait(WAIT)
        return real(*arguments, **names)

    monkeypatch.setattr(preparation, "prepare", slow)
    yield Held
    Held.may_end.set()


@pytest.mark.case("C5")
async def test_when_a_client_leaves_while_preparing_then_no_work(held: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    start = completions.Departure.start

    def started(self: Any) -> None:
        seen.append(self)
        start(self)

    monkeypatch.setattr(completions.Departure, "start", started)
    async with gateway(tcp=True, settings=HttpSettings(thread_above_bytes=1)) as g:
        body = json.dumps(chat_body(stream=True)).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", g.port)
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {g.key}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await eventually(held.has_begun.is_set)
        writer.transport.abort()
        await eventually(lambda: seen[0].is_gone)
        held.may_end.set()
        await eventually(lambda: not g.outstanding())
        assert not g.engine.submitted and not g.ledger.opened and not g.ledger.rows
        assert g.state.engine.num_streams == 0 and g.state.preparation.held_bytes == 0
        totals = g.state.leases.totals(1)
        assert (totals.settled_requests, totals.settled_tokens, totals.reserved_tokens) == (1, 0, 0)
