"""A whole gateway for tests: a scripted engine, real tenants in memory, a recorded ledger, clocks moved by hand."""

import asyncio
import contextlib
import json
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.types import ASGIApp

from engine.models.tiny import CHAT_TEMPLATE, tiny_tokenizer
from engine.wire.messages import Hello
from gateway.link.client import EngineClient
from gateway.listen.protocol import HttpProtocol
from gateway.openai.app import GatewayState, HttpSettings, public_app
from gateway.refusals import RefusalLog
from gateway.text.chat_template import ChatTemplate
from gateway.text.tokenizer import ModelTokenizer
from policies.tiers import DEFAULT_TIERS, Tier
from tenants import key_format
from tenants.errors import StoreUnavailable
from tenants.leases import Leases
from tenants.pepper import Pepper
from tenants.quotas import Limits
from tenants.rows import LedgerRow, OpenEntry, Progress
from tenants.snapshot import Identity, KeyEntry, KnownTeam, Snapshot
from tests.support.gateway.fake_engine import EOS, VOCAB_SIZE, FakeEngine, hello

MODEL = "org/tiny-random"
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
WAIT = 20.0  # seconds; only a test that has failed waits so long
PEPPER = Pepper.of(b"0123456789abcdef0123456789abcdef")


def tiny_model_tokenizer(*, template: str | None = CHAT_TEMPLATE) -> ModelTokenizer:
    """The tiny model's tokenizer, with a template or without one."""
    document = json.dumps(tiny_tokenizer(VOCAB_SIZE))
    compiled = None if template is None else ChatTemplate(template, bos_token="<|im_start|>", eos_token="<|im_end|>")
    return ModelTokenizer(document, compiled, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))


TOKENIZER = tiny_model_tokenizer()


class FakeClock:
    """Calendar, monotonic time and timers that move only when told to."""

    def __init__(self) -> None:
        self.seconds = 1_000.0
        self._timers: list[FakeTimer] = []

    def now_us(self) -> int:
        return 1_800_000_000_000_000 + round(self.seconds * 1e6)

    def monotonic(self) -> float:
        return self.seconds

    def call_later(self, seconds: float, callback: Callable[[], None]) -> "FakeTimer":
        timer = FakeTimer(self.seconds + seconds, callback)
        self._timers.append(timer)
        return timer

    @property
    def num_timers(self) -> int:
        return sum(not timer.is_done for timer in self._timers)

    def advance(self, seconds: float) -> None:
        """Move on, running what falls due in its order."""
        end = self.seconds + seconds
        while due := [timer for timer in self._timers if not timer.is_done and timer.at <= end]:
            timer = min(due, key=lambda timer: timer.at)
            self.seconds = max(self.seconds, timer.at)
            timer.is_done = True
            timer.callback()
        self._timers = [timer for timer in self._timers if not timer.is_done]
        self.seconds = end


@dataclass(eq=False)
class FakeTimer:
    """One call of FakeClock."""

    at: float
    callback: Callable[[], None]
    is_done: bool = False

    def cancel(self) -> None:
        self.is_done = True


class RecordingLedger:
    """What was opened and closed, in order; can run full."""

    def __init__(self) -> None:
        self.opened: list[OpenEntry] = []
        self.rows: list[LedgerRow] = []
        self.progressed: list[Progress] = []
        self.is_full = False
        self.is_failing = False
        self.is_unwritable = False
        self.backlog = 0
        self.num_failures = 0
        self._closed: asyncio.Queue[LedgerRow] = asyncio.Queue()

    @property
    def has_room(self) -> bool:
        return not self.is_full

    def open(self, entry: OpenEntry) -> None:
        if self.is_full or self.is_unwritable:
            raise StoreUnavailable("The journal is full.")
        self.opened.append(entry)

    def progress(self, progress: Progress) -> None:
        self.progressed.append(progress)

    def close(self, row: LedgerRow) -> None:
        assert row.request_id in {entry.request_id for entry in self.opened}, "closed without an open"
        assert row.request_id not in {other.request_id for other in self.rows}, "closed twice"
        self.rows.append(row)
        self._closed.put_nowait(row)

    @property
    def num_open(self) -> int:
        return len(self.opened) - len(self.rows)

    def lag_us(self, now_us: int) -> int:
        return now_us - self.rows[-self.backlog].finished_at_us if self.backlog else 0

    async def next_row(self) -> LedgerRow:
        """Wait for the next close."""
        return await asyncio.wait_for(self._closed.get(), WAIT)


class Holder:
    """The snapshot as a test edits it: one team per name, one key each."""

    def __init__(self) -> None:
        self.entries: dict[str, KeyEntry] = {}
        self.teams: list[KnownTeam] = []
        self.current = Snapshot(PEPPER, {}, ())

    def add(
        self,
        team: str,
        *,
        tier: Tier = DEFAULT_TIERS[0],
        limits: Limits | None = None,
        is_revoked: bool = False,
        is_team_archived: bool = False,
        expires_at_us: int | None = None,
    ) -> str:
        """A team (or another key of it) and the key's text."""
        limits = limits or Limits()
        known = [entry for entry in self.teams if entry.name == team]
        team_id = known[0].team_id if known else len(self.teams) + 1
        if not known:
            self.teams.append(KnownTeam(team_id, team, tier, limits))
        key = key_format.new_key()
        identity = Identity(
            key_id=len(self.entries) + 1,
            key_public_id=key.public_id,
            project_id=team_id,
            project="default",
            team_id=team_id,
            team=team,
            tier=tier,
            limits=limits,
        )
        secret_hmac = key_format.hash_secret(PEPPER.secret, key.secret)
        self.entries[key.public_id] = KeyEntry(identity, secret_hmac, expires_at_us, is_revoked, is_team_archived)
        self.current = Snapshot(PEPPER, self.entries, tuple(self.teams))
        return key_format.render(key)

    def identity_of(self, team: str) -> Identity:
        return next(entry.identity for entry in self.entries.values() if entry.identity.team == team)


@dataclass
class Gateway:
    """One running gateway and everything behind it."""

    state: GatewayState
    app: ASGIApp
    engine: FakeEngine
    ledger: RecordingLedger
    clock: FakeClock
    holder: Holder
    key: str
    http: httpx.AsyncClient
    port: int = 0
    url: str = "http://gateway"
    headers: dict[str, str] = field(default_factory=dict)

    async def post(self, path: str, body: Any = None, *, key: str | None = None, **kwargs: Any) -> httpx.Response:
        """POST a JSON document with the team's key."""
        headers = {"authorization": f"Bearer {self.key if key is None else key}", **kwargs.pop("headers", {})}
        if body is not None:
            kwargs["json"] = body
        return await self.http.post(path, headers=headers, **kwargs)

    async def chat(self, text: str = "hello", **fields: Any) -> httpx.Response:
        """One chat request."""
        key = fields.pop("key", None)
        return await self.post(CHAT, chat_body(text, **fields), key=key)

    def outstanding(self) -> int:
        return self.state.leases.outstanding()


def chat_body(text: str = "hello", **fields: Any) -> dict[str, Any]:
    """A chat request's body."""
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


@contextlib.asynccontextmanager
async def gateway(
    *,
    tcp: bool = False,
    settings: HttpSettings | None = None,
    greeting: Hello | None = None,
    limits: Limits | None = None,
    tier: Tier = DEFAULT_TIERS[0],
    tokenizer: ModelTokenizer = TOKENIZER,
    connect: bool = True,
    wrap: Callable[[ASGIApp], ASGIApp] | None = None,
    http: Any = HttpProtocol,
    make_engine: Callable[[Path, Hello], FakeEngine] = FakeEngine,
    refusal_lines_per_minute: int = 60,
    **client: Any,
) -> AsyncIterator[Gateway]:
    """A gateway with one team, `team-a`. In-process, or a real uvicorn on a real port with `tcp`."""
    directory = Path(tempfile.mkdtemp(prefix="tz-"))  # short: a Unix socket's path may have 107 bytes
    clock, holder, ledger = FakeClock(), Holder(), RecordingLedger()
    engine = make_engine(directory / "engine.sock", greeting or hello())
    await engine.start()
    client_of_engine = EngineClient(directory / "engine.sock", clock=clock.monotonic)
    key = holder.add("team-a", tier=tier, limits=limits)
    state = GatewayState(
        snapshot_holder=holder,
        leases=Leases(clock=clock.monotonic),
        ledger=ledger,
        engine=client_of_engine,
        tokenizer=tokenizer if connect else None,
        settings=settings or HttpSettings(),
        clock=clock,
    )
    app: ASGIApp = public_app(state, RefusalLog(refusal_lines_per_minute, clock=clock.monotonic))
    if wrap is not None:
        app = wrap(app)
    if connect:
        await client_of_engine.connect()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(asyncio.to_thread, shutil.rmtree, directory)
        stack.push_async_callback(engine.stop)
        stack.push_async_callback(client_of_engine.close)
        stack.push_async_callback(state.preparation.stop)
        if tcp:
            port = await stack.enter_async_context(served(app, state.settings, http))
            url = f"http://127.0.0.1:{port}"
            transport: httpx.AsyncBaseTransport = httpx.AsyncHTTPTransport()
        else:
            port, url = 0, "http://gateway"
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        session = await stack.enter_async_context(
            httpx.AsyncClient(transport=transport, base_url=url, timeout=WAIT, **client)
        )
        yield Gateway(state, app, engine, ledger, clock, holder, key, session, port, url)


def clocked(protocol: Any, clock: FakeClock) -> Any:
    """A protocol class whose connections take their timers from `clock`, so that idle time passes when told to."""

    class Clocked(protocol):  # type: ignore[misc]  # a class made at run time
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.loop = _ClockedLoop(self.loop, clock)

    return Clocked


class _ClockedLoop:
    """An event loop whose `call_later` is the fake clock's."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: FakeClock) -> None:
        self._loop = loop
        self.call_later = clock.call_later

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


@contextlib.asynccontextmanager
async def served(app: ASGIApp, settings: HttpSettings, http: Any) -> AsyncIterator[int]:
    """A real uvicorn on a free port of 127.0.0.1, in this event loop."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(
        app,
        http=http,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        timeout_keep_alive=75,
    )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await eventually(lambda: server.started or task.done())
    assert server.started, "uvicorn did not start"
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        server.force_exit = True
        await task
        listener.close()


async def eventually(claim: Callable[[], Any], pause: float = 0) -> None:
    """Let the event loop run until `claim` holds; no time passes on the fake clock.

    `pause` spares the processor where another process has to get on.
    """
    async with asyncio.timeout(WAIT):
        while not claim():  # noqa: ASYNC110 - there is no event to wait for in the code under test
            await asyncio.sleep(pause)


def events(body: str) -> list[Any]:
    """The data of a whole event stream, checked line by line against the SSE grammar that clients can read."""
    documents: list[Any] = []
    for line in body.split("\n"):
        if not line or line.startswith(":"):
            continue
        assert line.startswith("data: "), f"no SSE line that every client reads: {line!r}"
        data = line.removeprefix("data: ")
        documents.append(data if data == "[DONE]" else json.loads(data))
    return documents


def text_of(documents: list[Any]) -> str:
    """The text of a stream of either endpoint."""
    parts = []
    for document in documents:
        if document != "[DONE]":
            for choice in document.get("choices", []):
                parts.append(choice["text"] if "text" in choice else choice["delta"].get("content", ""))
    return "".join(parts)
