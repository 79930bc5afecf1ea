"""The parts that the public API is built of: settings, clock, tenants and engine. `gateway.serve` builds them once."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from gateway.errors import EngineDied, Unavailable
from gateway.link.client import EngineClient
from gateway.link.lives import EngineLives
from gateway.metrics.requests import Meters, SnapshotSource
from gateway.prepare.preparation import Preparation
from gateway.text.tokenizer import ModelTokenizer
from tenants.leases import Leases
from tenants.rows import LedgerRow, OpenEntry, Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """Limits and times of the public API. Durations are seconds."""

    max_body_bytes: int = 8 * 1024 * 1024  # as sent and as decoded; a larger body is a 413
    max_headers: int = 100
    max_header_bytes: int = 32 * 1024  # names and values together
    body_timeout: float = 60.0  # for the client to send the whole body
    send_timeout: float = 60.0  # a client that reads nothing for so long counts as gone
    early_headers_after: float = 15.0  # then a stream's headers are sent even without a token
    keep_alive_interval: float = 15.0  # of silence in a stream, before a comment line is sent
    default_max_tokens: int = 1024  # when the caller gives none
    thread_above_bytes: int = 4096  # larger bodies are decoded and tokenised in a thread
    process_above_bytes: int = 64 * 1024  # still larger bodies are, in a process of their own
    prepare_team_bytes: int = 0  # of one team's bodies being read or prepared; 0: three of the largest
    prepare_total_bytes: int = 0  # of all teams' bodies; 0: four times as many as of one team
    prepare_waiting_requests: int = 64  # of one team, unread, that may wait for room
    prepare_wait_seconds: float = 30.0  # to wait for room, or for a turn
    prepare_run_seconds: float = 20.0  # for one body in the process
    prepare_idle_seconds: float = 30.0  # without a body: then the process ends
    prepare_memory_bytes: int = 256 * 1024 * 1024  # the most that the process may take
    settle_wait: float = 0.5  # after an abort: how long the settlement waits for the engine's count
    close_wait: float = 10.0  # after that: how long the ledger row waits for the engine's charge
    store_lock_grace: float = 5.0  # not ready when the store's lock is lost for longer
    engine_silence: float = 30.0  # not ready when the engine sends nothing for longer, while requests are open
    cors_allow_origin: str = "*"  # "" sends no CORS headers


class Timer(Protocol):
    """A call that will be made later."""

    def cancel(self) -> None:
        """Do not make the call."""


class GatewayClock(Protocol):
    """Time as the public API reads it."""

    def now_us(self) -> int:
        """Microseconds since 1970, UTC."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary start."""

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Call `callback` once, on the event loop, after `seconds`."""


class SystemClock:
    """The machine's clocks and the running loop's timers."""

    def now_us(self) -> int:
        return time.time_ns() // 1000

    def monotonic(self) -> float:
        return time.monotonic()

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        return asyncio.get_running_loop().call_later(seconds, callback)


class LedgerBook(Protocol):
    """Where requests are booked. `tenants.ledger.Ledger` implements it. No call waits."""

    @property
    def has_room(self) -> bool:
        """False while a new request is refused: the journal is full, or SQL fails and `on_error` is "deny"."""

    @property
    def is_failing(self) -> bool:
        """True while the database does not take rows, which then wait in the journal."""

    @property
    def is_unwritable(self) -> bool:
        """True while the disk does not take the journal's lines. A new request is then refused."""

    def open(self, entry: OpenEntry) -> None:
        """Note that a request is admitted. Raises StoreUnavailable when the journal is full or cannot be written."""

    def progress(self, progress: Progress) -> None:
        """Note how far an open request has come."""

    def close(self, row: LedgerRow) -> None:
        """Book a request that has ended. Call it once for each `open`."""


@dataclass(slots=True, kw_only=True)
class GatewayState:
    """The parts of one running gateway. `tokenizer` is None until the engine's model is known."""

    snapshot_holder: SnapshotSource
    leases: Leases
    ledger: LedgerBook
    engine: EngineClient
    tokenizer: ModelTokenizer | None = None
    settings: HttpSettings = field(default_factory=HttpSettings)
    clock: GatewayClock = field(default_factory=SystemClock)
    engine_lives: EngineLives = field(default_factory=EngineLives)
    is_draining: bool = False
    store_lost_seconds: Callable[[], float] = float  # how long the store's lock has been lost; 0.0 while it is held
    refused: Counter[str] = field(default_factory=Counter)  # refusals by error code, of which there is a fixed set
    meters: Meters = field(init=False)  # metrics of admitted requests
    preparation: Preparation = field(init=False)

    def __post_init__(self) -> None:
        self.meters = Meters(self.snapshot_holder)
        self.engine.on_token_gap = self.meters.gaps.observe
        settings = self.settings
        self.preparation = Preparation(
            max_body_bytes=settings.max_body_bytes,
            inline_bytes=settings.thread_above_bytes,
            small_bytes=settings.process_above_bytes,
            team_bytes=settings.prepare_team_bytes,
            total_bytes=settings.prepare_total_bytes,
            waiting_requests=settings.prepare_waiting_requests,
            wait_seconds=settings.prepare_wait_seconds,
            run_seconds=settings.prepare_run_seconds,
            idle_seconds=settings.prepare_idle_seconds,
            memory_bytes=settings.prepare_memory_bytes,
        )

    @property
    def is_degraded(self) -> bool:
        """True while the database does not take rows or the store's lock is lost. Requests may still be served."""
        return self.ledger.is_failing or self.store_lost_seconds() > 0

    def end_streams(self) -> None:
        """End every running request with an error, or an error event, at the end of the drain.

        They are booked as `shutdown`.
        """
        self.is_draining = True
        self.engine.fail_streams(draining_error)


def not_ready_reasons(state: GatewayState) -> list[str]:
    """Why no request can be served now.

    Empty when requests can be served. Both listeners' `/readyz` show the reasons.
    """
    facts = {
        "draining": state.is_draining,
        "starting": state.tokenizer is None or state.engine.hello is None,
        "engine_unavailable": state.tokenizer is not None and not state.engine.is_ready,
        "engine_silent": state.engine.silent_seconds > state.settings.engine_silence,
        "journal_unwritable": state.ledger.is_unwritable,
        "store_lock_lost": state.store_lost_seconds() > state.settings.store_lock_grace,
        "store_unavailable": not state.ledger.has_room,
    }
    return [reason for reason, is_so in facts.items() if is_so]


def engine_away_error(lives: EngineLives) -> EngineDied:
    """The error of a request that comes while there is no engine. It does not say why; the log and /readyz do."""
    text = "is being restarted" if lives.failure is None else "does not stay up; it will be started again"
    text = f"The engine {text}."
    return EngineDied(text, retry_after_seconds=lives.retry_after_seconds)


def engine_document(state: GatewayState) -> dict[str, Any]:
    """What `/readyz` and the status say about the engine, beside the reasons.

    `engine_failure` is there only while the engine is failing, `simulated` only for a simulated engine.
    """
    hello, failure = state.engine.hello, state.engine_lives.failure
    document: dict[str, Any] = {} if failure is None else {"engine_failure": failure.describe()}
    if hello is not None and hello.is_simulated:
        document["simulated"] = True
    return document


def draining_error() -> Unavailable:
    """The error of new requests during a shutdown, and of requests that still run at the end of the drain."""
    return Unavailable(
        "The server is shutting down.", code="draining", retry_after_seconds=5, headers={"connection": "close"}
    )


def starting_error() -> Unavailable:
    """The error of every request that needs the model, until the model is loaded."""
    return Unavailable("The model is still being loaded.", code="starting", retry_after_seconds=5)
