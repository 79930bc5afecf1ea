"""One log line for each refused call, so that an operator finds its `x-request-id` and its caller in the log.

A call that became a request has its own line ("request ended") and gets no second line. Lines are limited for each
listener, error code and caller: so many lines a minute. The next line after a gap says how many were left out.

A caller whose key has the right secret is named by the key's public id. Any other caller is named by the peer's
address, because a stranger can send any id. At most BUCKETS_MAX callers have a count of their own; all further callers
share one count.

A line holds no message and no query, since these repeat what the caller sent. Path and method are made printable.
The peer is the socket's: no header of a proxy is believed.
"""

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import GatewayError, Unauthenticated
from gateway.listen.protocol import OnRefusal
from gateway.logs import one_line
from gateway.openai.admission import key_from
from tenants import key_format
from tenants.snapshot import Identity, Snapshot

_log = logging.getLogger("terazi.requests")

WINDOW_SECONDS = 60.0
BUCKETS_MAX = 1000
PATH_CHARS_MAX = 200
REASON_HEADER = b"x-terazi-reason"  # what makes an answer a refusal: every GatewayError has it, and nothing else
IDENTITY_KEY = "terazi.identity"  # in the ASGI scope, once the caller is known
BOOKED_KEY = "terazi.is_booked"  # in the ASGI scope, once the request has a line of its own
_VERIFIED = ("key_revoked", "key_expired")  # errors that are raised only when the secret was right

Fields = Mapping[str, object]


@dataclass(slots=True)
class _Bucket:
    """One minute of refusals on one listener, with one error code, of one caller."""

    ends_at: float
    num_lines: int = 0
    num_suppressed: int = 0  # since the last line


class RefusalLog:
    """Owns the counts behind the limit. `clock` is monotonic seconds."""

    def __init__(
        self,
        lines_per_minute: int = 60,
        *,
        clock: Callable[[], float] = time.monotonic,
        buckets_max: int = BUCKETS_MAX,
    ) -> None:
        self._lines_per_minute = lines_per_minute
        self._clock = clock
        self._buckets_max = buckets_max
        self._buckets: OrderedDict[tuple[str, str, str], _Bucket] = OrderedDict()  # oldest minute first
        self._others = _Bucket(0.0)

    @property
    def num_buckets(self) -> int:
        """Counts in use: one for each listener, error code and caller."""
        return len(self._buckets)

    def write(self, listener: str, code: str, caller: str, fields: Fields) -> None:
        """Log one refusal, or only count it when this caller has had its lines of this minute."""
        now = self._clock()
        bucket = self._bucket((listener, code, caller), now)
        if bucket.num_lines >= self._lines_per_minute:
            bucket.num_suppressed += 1
            return
        bucket.num_lines += 1
        left_out = {"suppressed": bucket.num_suppressed} if bucket.num_suppressed else {}
        bucket.num_suppressed = 0
        _log.info("request refused", extra={"listener": listener, "error_code": code, **fields, **left_out})

    def _bucket(self, key: tuple[str, str, str], now: float) -> _Bucket:
        bucket = self._buckets.get(key)
        if bucket is None:
            self._make_room(now)
            if len(self._buckets) < self._buckets_max:
                bucket = self._buckets[key] = _Bucket(now + WINDOW_SECONDS)
            else:
                bucket = self._others
        if now >= bucket.ends_at:
            bucket.ends_at, bucket.num_lines = now + WINDOW_SECONDS, 0
            if bucket is not self._others:
                self._buckets.move_to_end(key)
        return bucket

    def _make_room(self, now: float) -> None:
        """When there are too many counts, forget those whose minute is over, the oldest first."""
        while len(self._buckets) >= self._buckets_max:
            (listener, code, caller), oldest = next(iter(self._buckets.items()))
            if now < oldest.ends_at:
                return
            del self._buckets[listener, code, caller]
            if oldest.num_suppressed:
                extra = {"listener": listener, "error_code": code, "caller": caller}
                _log.info("requests refused without a line", extra={**extra, "suppressed": oldest.num_suppressed})


class LogRefusals:
    """The outermost layer of a listener: sees the head of each answer, and logs the answers that refuse.

    `counts`, if given, counts refusals by code, also those without a line. `snapshot`, if given, serves to look up the
    team of a key that is revoked or expired.
    """

    def __init__(
        self,
        app: ASGIApp,
        refusals: RefusalLog,
        listener: str,
        *,
        counts: Counter[str] | None = None,
        snapshot: Callable[[], Snapshot] | None = None,
    ) -> None:
        self._app = app
        self._refusals = refusals
        self._listener = listener
        self._counts = counts
        self._snapshot = snapshot

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def watch(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                headers = dict(message["headers"])
                if REASON_HEADER in headers:
                    self._note(scope, message["status"], headers)
            await send(message)

        await self._app(scope, receive, watch)

    def _note(self, scope: Scope, status: int, headers: Mapping[bytes, bytes]) -> None:
        code = headers[REASON_HEADER].decode("latin-1")
        if self._counts is not None:
            self._counts[code] += 1
        if scope.get(BOOKED_KEY):
            return
        peer = peer_of(scope)
        who = self._who(scope, code)
        shown = headers.get(b"x-request-id", b"").decode("latin-1")
        own = headers.get(b"x-terazi-request-id", b"").decode("latin-1") or shown
        fields: dict[str, object] = {"request_id": own}
        if shown != own:
            fields["client_request_id"] = shown
        fields |= {"status": status, **who, "peer": peer}
        fields |= {"method": one_line(scope["method"], 20), "path": one_line(scope["path"], PATH_CHARS_MAX)}
        self._refusals.write(self._listener, code, str(who.get("key_public_id", peer)), fields)

    def _who(self, scope: Scope, code: str) -> dict[str, str]:
        """Team and key of a caller whose secret was right; else the public id that the caller claims, if the key has
        one."""
        identity: Identity | None = scope.get(IDENTITY_KEY)
        if identity is None and self._snapshot is not None:
            claimed = claimed_id(scope["headers"])
            if claimed is None:
                return {}
            identity = self._snapshot().owner(claimed) if code in _VERIFIED else None
            if identity is None:
                return {"claimed_key": claimed}
        return {} if identity is None else {"team": identity.team, "key_public_id": identity.key_public_id}


def wire_refusals(refusals: RefusalLog, listener: str, counts: Counter[str] | None = None) -> OnRefusal:
    """What `gateway.listen.protocol` calls when it refuses something that never became a call of the app."""

    def note(error: GatewayError, request_id: str, peer: str) -> None:
        if counts is not None:
            counts[error.code] += 1
        refusals.write(listener, error.code, peer, {"request_id": request_id, "status": error.status, "peer": peer})

    return note


def claimed_id(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The public id in the key that a request carries, even if the key is wrong. None if the text is not a key."""
    try:
        parsed = key_format.parse(key_from(headers))
    except Unauthenticated:
        return None
    return None if parsed is None else parsed.public_id


def peer_of(scope: Scope) -> str:
    """The address at the other end of the socket; `-` when there is none (a Unix socket, a call in this process)."""
    client = scope.get("client")
    return str(client[0]) if client else "-"


def caller_fields(scope: Scope, shown_id: str, request_id: str) -> dict[str, object]:
    """What the line of a request that has ended says of its caller: the peer, and the caller's own request id."""
    return {"peer": peer_of(scope), **({"client_request_id": shown_id} if shown_id != request_id else {})}
