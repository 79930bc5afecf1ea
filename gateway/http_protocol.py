"""The bytes of a connection, where uvicorn's httptools protocol leaves something open. Pass it as uvicorn's `http`.

- A client of HTTP/1.0 (nginx's default towards an upstream for many years) knows no chunked framing: a body of unknown
  length goes out as plain bytes and ends with the connection (RFC 9112 §6.3).
- A request head has a size limit while it arrives, and a time limit, so that slow or endless heads hold nothing.
- The rest of a body whose request has been answered (a 413, a 401) is taken in and dropped, so that the client sees the
  answer and not a reset, but only so much of it and for so long.
- What is no HTTP is refused in the same JSON envelope as everything else.
- An offer to upgrade the connection is declined by going on in HTTP/1.1 (RFC 9110 §7.8). The JVM's own client makes one
  (h2c) with every request, body and all, which the parser would take for bytes of the other protocol.
"""

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from gateway.errors import BadRequest, GatewayError, HeadersTooLarge

MAX_HEAD_BYTES = 64 * 1024  # request line and headers; the app has a lower limit of its own
HEAD_SECONDS = 30.0  # from the first byte (or the connection) to the end of the head
MAX_DROPPED_BYTES = 64 * 1024 * 1024  # of a body that has been answered already
DROP_SECONDS = 30.0  # to the end of such a body


class _UntilClose(int):
    """A body length that no body exceeds or falls short of: uvicorn counts down from it and checks it is used up."""

    def __lt__(self, other: object) -> bool:
        return False

    def __sub__(self, other: int) -> "_UntilClose":
        return self

    def __ne__(self, other: object) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


class _Parser(httptools.HttpRequestParser):
    """httptools' parser, but one that ends at an offer to upgrade hands over to a fresh one without the offer."""

    def __init__(self, protocol: "HttpProtocol") -> None:
        super().__init__(protocol)
        # As uvicorn has it: a body that was announced wrongly must not cost an answer that is on its way.
        self.set_dangerous_leniencies(lenient_data_after_close=True)
        self._protocol = protocol

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]  # uvicorn feeds nothing but bytes
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._protocol.go_on_without_upgrade(data[offer.args[0] :])


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's httptools protocol with these gaps closed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = _Parser(self)
        self.head_seconds = HEAD_SECONDS
        self._is_in_head = True
        self._num_messages = 0  # begun on this connection
        self._head_bytes = 0  # of a head that is not complete
        self._dropped_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm(self.head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        head = self._num_messages if self._is_in_head else None
        super().data_received(data)
        # Counted in what arrives, since the parser keeps an unfinished line to itself; only when all of it is one head.
        if self._is_in_head and head == self._num_messages and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(HeadersTooLarge(f"The request's head is larger than {MAX_HEAD_BYTES} bytes."))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True
        self._num_messages += 1
        self._head_bytes = self._dropped_bytes = 0
        self._arm(self.head_seconds)

    def go_on_without_upgrade(self, rest: bytes) -> None:
        """The parser has read a head that offers an upgrade, and has stopped: read it again without the offer."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":
            raise httptools.HttpParserError("no tunnels")
        head = [b"%b %b HTTP/%b\r\n" % (method, self.url, version)]
        head += [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = _Parser(self)
        self.parser.feed_data(b"".join([*head, b"\r\n", rest]))

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # the parser stops right behind this head
        self._is_in_head = False
        self._disarm()
        super().on_headers_complete()
        if self.scope.get("http_version") == "1.0":
            self.cycle.chunked_encoding = False
            self.cycle.expected_content_length = _UntilClose()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if self.cycle.response_complete:
            if self._timer is None:
                self._arm(DROP_SECONDS)
            self._dropped_bytes += len(body)
            if self._dropped_bytes > MAX_DROPPED_BYTES:
                self.transport.close()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        if self.cycle.response_complete:
            self._disarm()
            if not self.transport.is_closing():  # uvicorn's own timer ended when the rest of the body arrived
                self._unset_keepalive_if_required()
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():
            self._refuse(BadRequest(msg, code="invalid_http"))

    def _refuse(self, error: GatewayError) -> None:
        body = error.encode("")
        head = {**error.headers(), "content-type": "application/json", "content-length": str(len(body))}
        lines = [f"{name}: {value}\r\n".encode("latin-1", "replace") for name, value in head.items()]
        self.transport.write(b"".join([STATUS_LINE[error.status], *lines, b"connection: close\r\n\r\n", body]))
        self.transport.close()

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, self._on_too_slow)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_too_slow(self) -> None:
        self._timer = None
        self.transport.close()
