"""What the public API is made of: its settings, its clock and the parts it composes. Built once by `gateway.serve`."""

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

    max_body_bytes: int = 8 * 1024 * 1024  # decoded; more is a 413
    max_headers: int = 100
    max_header_bytes: int = 32 * 1024  # names and values together
    body_timeout: float = 60.0  # to send the whole body
    send_timeout: float = 60.0  # a client that takes in nothing for so long is gone
    early_headers_after: float = 15.0  # a stream's headers go out even without a token
    keep_alive_interval: float = 15.0  # silence in a stream before a comment line
    default_max_tokens: int = 1024  # when the caller gives none
    thread_above_bytes: int = 4096  # larger bodies are decoded and tokenised in a thread
    process_above_bytes: int = 64 * 1024  # and still larger ones in a process of their own
    prepare_team_bytes: int = 0  # of one team's bodies that are read or prepared; 0: three of the largest
    prepare_total_bytes: int = 0  # and of all teams'; 0: four times as many
    prepare_waiting_requests: int = 64  # of one team, unread
    prepare_wait_seconds: float = 30.0  # for room, or for a turn
    prepare_run_seconds: float = 20.0  # of one body in the process
    prepare_idle_seconds: float = 30.0  # then the process ends
    prepare_memory_bytes: int = 256 * 1024 * 1024  # of the process
    settle_wait: float = 0.5  # after an abort, for the engine's count before the reservation is settled
    close_wait: float = 10.0  # and for its charge before the ledger row is closed
    store_lock_grace: float = 5.0  # without the store's lock for so long: not ready
    engine_silence: float = 30.0  # open requests and no word for so long: not ready
    cors_allow_origin: str = "*"  # "" sends no CORS headers


class Timer(Protocol):
    """A call that has been put off."""

    def cancel(self) -> None:
        """Do not make it."""


class GatewayClock(Protocol):
    """Time as the public API reads it."""

    def now_us(self) -> int:
        """UTC epoch microseconds."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary start."""

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Call back once, on the event loop, after `seconds`."""


class SystemClock:
    """The machine's clocks and the running loop's timers."""

    def now_us(self) -> int:
        return time.time_ns() // 1000

    def monotonic(self) -> float:
        return time.monotonic()

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        return asyncio.get_running_loop().call_later(seconds, callback)


class LedgerBook(Protocol):
    """Where requests are booked: `tenants.ledger.Ledger`. No call waits."""

    @property
    def has_room(self) -> bool:
        """False while a new request would be refused."""

    @property
    def is_failing(self) -> bool:
        """The database does not take rows; they wait in the journal."""

    @property
    def is_unwritable(self) -> bool:
        """The disk does not take the journal's lines: a new request would be refused."""

    def open(self, entry: OpenEntry) -> None:
        """Raises StoreUnavailable when the journal has no room or cannot be written."""

    def progress(self, progress: Progress) -> None:
        """Where an open request stands."""

    def close(self, row: LedgerRow) -> None:
        """Exactly one for each `open`."""


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
    refused: Counter[str] = field(default_factory=Counter)  # by error code, which is a closed set
    meters: Meters = field(init=False)  # of admitted requests
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
        """Requests are served, but the database does not take rows, or the store's lock is lost."""
        return self.ledger.is_failing or self.store_lost_seconds() > 0

    def end_streams(self) -> None:
        """The grace time is over: every running request ends with an error (event) and is booked as `shutdown`."""
        self.is_draining = True
        self.engine.fail_streams(draining_error)


def not_ready_reasons(state: GatewayState) -> list[str]:
    """Why no request can be served now, as `/readyz` of both listeners says; empty when one can."""
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
    """What a request is told that the engine is not there for; the operator's log and /readyz have the reason."""
    text = "is being restarted" if lives.failure is None else "does not stay up; it will be started again"
    text = f"The engine {text}."
    return EngineDied(text, retry_after_seconds=lives.retry_after_seconds)


def engine_document(state: GatewayState) -> dict[str, Any]:
    """What `/readyz` and the status say of the engine beside the reasons: what there is to know, else nothing."""
    hello, failure = state.engine.hello, state.engine_lives.failure
    document: dict[str, Any] = {} if failure is None else {"engine_failure": failure.describe()}
    if hello is not None and hello.is_simulated:
        document["simulated"] = True
    return document


def draining_error() -> Unavailable:
    """What new requests, and in the end running ones, are told during a shutdown."""
    return Unavailable(
        "The server is shutting down.", code="draining", retry_after_seconds=5, headers={"connection": "close"}
    )


def starting_error() -> Unavailable:
    """What everybody who needs the model is told until it has been loaded."""
    return Unavailable("The model is still being loaded.", code="starting", retry_after_seconds=5)
