"""Closes gaps of uvicorn's httptools protocol in handling a connection's bytes. Pass `HttpProtocol` as uvicorn's
`http`.

- **HTTP/1.0.** Such a client (for many years nginx's default towards an upstream) knows no chunked framing. A body of
  unknown length goes out as plain bytes and ends with the connection (RFC 9112 §6.3).
- **Heads.** A request head has a size limit and a time limit while it arrives, so that slow or endless heads hold
  nothing.
- **Bodies of answered requests.** After an early answer (a 413, a 401) the rest of the body is read and dropped, so
  that the client sees the answer and not a reset. Bytes and time for this are limited.
- **Bytes that are not HTTP** are refused in the same JSON envelope as everything else.
- **Upgrades.** An offer to upgrade the connection is declined: the server goes on in HTTP/1.1 (RFC 9110 §7.8). The
  JVM's own client offers h2c with every request, also with one that has a body, and the parser would take the body for
  bytes of the other protocol.
- **Half-closed connections.** A client may send its whole request and then shut down its sending side (`nc -N`, some
  proxies). It still listens, and gets its answer. A client that has left sends the same FIN, and TCP shows the
  difference only after a write: the kernel of a client that has left answers with a reset. So while we owe an answer we
  write harmless bytes, and a reset ends the request. Before the answer these bytes are `100 Continue` (RFC 9110 §15.2
  allows any number of interim responses before the final response). Inside an event stream they are a comment; every
  body of unknown length here is an event stream, sent in whole lines. HTTP/1.0 has no interim responses: there a FIN
  counts as leaving, after a short grace.
- **Pipelining.** While a request is being answered we go on reading, or nobody would notice that the client has left.
  Bytes behind the request that cannot be parsed yet are kept, up to a limit. Above the limit reading stops, and the
  client is probed in the same way, because a FIN behind unread bytes does not arrive.
"""

import asyncio
import contextlib
import select
import socket
import uuid
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from gateway.errors import BadRequest, GatewayError, HeadersTooLarge
from gateway.openai.wire import KEEP_ALIVE

MAX_HEAD_BYTES = 64 * 1024  # request line and headers; the app has a lower limit of its own
HEAD_SECONDS = 30.0  # from the connection, or the head's first byte, to the head's end
MAX_DROPPED_BYTES = 64 * 1024 * 1024  # of a body whose request has been answered already
DROP_SECONDS = 30.0  # from the first such bytes to the body's end
MAX_AHEAD_BYTES = 64 * 1024  # that are kept behind a request that waits for its turn
GRACE_SECONDS = 0.1  # from a FIN to the first probe: short calls are answered by then
FIRST_LOOK_SECONDS = 0.001  # from a probe to the first look for a reset; each further look waits twice as long
PROBE_SECONDS = 10.0  # instead of a look that would wait longer, we probe again
UNANSWERED_SECONDS = 20  # a host that acknowledges no probe for so long is gone
_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
_UNANSWERED_OPTION: int | None = getattr(socket, "TCP_USER_TIMEOUT", None)  # Linux


OnRefusal = Callable[[GatewayError, str, str], None]  # the error, the request id and the peer's address


class _UntilClose(int):
    """A content length for a body that ends with the connection.

    uvicorn counts it down by what is sent, and checks that nothing is left at the end. All these checks pass.
    """

    def __lt__(self, other: object) -> bool:
        return False

    def __sub__(self, other: int) -> "_UntilClose":
        return self

    def __ne__(self, other: object) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


class _Flow(FlowControl):
    """Keeps reading stopped while too many bytes wait to be parsed, even when uvicorn asks to resume."""

    def __init__(self, transport: asyncio.Transport, ahead: Callable[[], int]) -> None:
        super().__init__(transport)
        self._num_ahead_bytes = ahead

    def resume_reading(self) -> None:
        if self._num_ahead_bytes() <= MAX_AHEAD_BYTES:
            super().resume_reading()


class _Parser(httptools.HttpRequestParser):
    """httptools' parser.

    When it stops at an offer to upgrade, a fresh parser reads the head again without the offer.
    """

    def __init__(self, protocol: "HttpProtocol") -> None:
        super().__init__(protocol)
        # As in uvicorn: data behind the last request must not cost an answer that is on its way.
        self.set_dangerous_leniencies(lenient_data_after_close=True)
        self._protocol = protocol

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]  # uvicorn feeds nothing but bytes
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._protocol.go_on_without_upgrade(data[offer.args[0] :])


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's httptools protocol, with the gaps that the module names closed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = _Parser(self)
        self.head_seconds = HEAD_SECONDS
        self.on_refusal: OnRefusal | None = None
        self._is_in_head = True
        self._num_messages = 0  # requests that have begun on this connection
        self._head_bytes = 0  # bytes of the present head so far
        self._dropped_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None  # the request that is being answered, or was last
        self._ahead = bytearray()  # bytes behind the waiting requests, not parsed yet
        self._refusal: GatewayError | None = None  # for bytes behind them that are not HTTP
        self._is_half_closed = False  # the client has sent its last byte
        self._look_seconds = 0.0
        self._look_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport, lambda: len(self._ahead))
        self._arm(self.head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        if self._look_timer is not None:
            self._look_timer.cancel()
        if self._running is not None and not self._running.response_complete:
            # uvicorn tells only the newest request, which may be a request that waits behind the running one.
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_parsing:
            self._parse(data)
        else:
            self._ahead += data
        if not self._is_parsing:
            self._read_on()

    @property
    def _is_parsing(self) -> bool:
        """Whether new bytes are parsed at once. They are not while requests wait for their turn."""
        return not self.pipeline and self._refusal is None

    def _parse(self, data: bytes) -> None:
        head = self._num_messages if self._is_in_head else None
        super().data_received(data)
        # Count the bytes that arrive, because the parser does not show an unfinished line. Count them only when all of
        # `data` belongs to one head.
        if self._is_in_head and head == self._num_messages and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse_in_turn(HeadersTooLarge(f"The request's head is larger than {MAX_HEAD_BYTES} bytes."))

    def _read_on(self) -> None:
        """Go on reading. uvicorn stops reading when a request has to wait; we stop only above MAX_AHEAD_BYTES."""
        if self.transport.is_closing():
            return
        if len(self._ahead) <= MAX_AHEAD_BYTES:
            self.flow.resume_reading()
            return
        self.flow.pause_reading()
        if self._look_timer is None and self._owes_answer:
            self._begin_probing()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # starts the next request, if one waits
        if self._refusal is not None and not self._owes_answer:
            self._refuse(self._refusal)
        if self._ahead and self._is_parsing and not self.transport.is_closing():
            data, self._ahead = bytes(self._ahead), bytearray()
            self.flow.resume_reading()
            self.data_received(data)
        if self._is_half_closed and not self._owes_answer:
            self.transport.close()

    @property
    def _owes_answer(self) -> bool:
        """Whether a request has arrived whole and has not been answered."""
        return self._running is not None and not self._running.response_complete and not self._running.more_body

    # --- a client that sends nothing more -----------------------------------------------------------------------

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio's own type; uvicorn always closes
        """True keeps the connection open for an answer."""
        if self.transport.is_closing() or not self._owes_answer:
            return False
        if not self._is_half_closed:
            self._is_half_closed = True
            self._begin_probing()
        return True

    def _begin_probing(self) -> None:
        if _UNANSWERED_OPTION is not None:
            with contextlib.suppress(OSError):
                connection: socket.socket = self.transport.get_extra_info("socket")
                connection.setsockopt(socket.IPPROTO_TCP, _UNANSWERED_OPTION, UNANSWERED_SECONDS * 1000)
        assert self._running is not None
        if self._running.response_started:
            self._probe()
        else:
            self._look_seconds = PROBE_SECONDS
            self._look_in(GRACE_SECONDS)

    def _probe(self) -> None:
        """Write harmless bytes, which a client that has left answers with a reset, and look for that reset."""
        cycle = self._running
        assert cycle is not None
        if cycle.response_started:
            if cycle.scope["method"] == "HEAD" or self.flow.write_paused:
                pass  # bytes that wait to be sent serve as the probe
            elif cycle.chunked_encoding:
                self.transport.write(b"%x\r\n%b\r\n" % (len(KEEP_ALIVE), KEEP_ALIVE))
            elif isinstance(cycle.expected_content_length, _UntilClose):
                self.transport.write(KEEP_ALIVE)
        elif cycle.scope["http_version"] == "1.1":
            self.transport.write(_INTERIM)
        elif self._is_half_closed:
            self.transport.close()
            return
        self._look_seconds = FIRST_LOOK_SECONDS
        self._look_in(self._look_seconds)

    def _look_in(self, seconds: float) -> None:
        if self._look_timer is not None:
            self._look_timer.cancel()
        self._look_timer = self.loop.call_later(seconds, self._look)

    def _look(self) -> None:
        """Ask the socket whether the client has left. If not, look again later, and after PROBE_SECONDS probe again."""
        self._look_timer = None
        if self.transport.is_closing() or not self._owes_answer:
            return
        asked = select.poll()
        asked.register(self.transport.get_extra_info("socket").fileno(), 0)  # poll always reports a reset
        if asked.poll(0):
            self.transport.abort()
        elif self._is_half_closed or self.flow.read_paused:
            self._look_seconds *= 2
            if self._look_seconds > PROBE_SECONDS:
                self._probe()
            else:
                self._look_in(self._look_seconds)

    # --- messages -----------------------------------------------------------------------------------------------

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True
        self._num_messages += 1
        self._head_bytes = self._dropped_bytes = 0
        self._arm(self.head_seconds)

    def go_on_without_upgrade(self, rest: bytes) -> None:
        """Read a head again without its offer to upgrade. `rest` are the bytes behind the head.

        The parser calls this when it has read such a head and has stopped.
        """
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":
            raise httptools.HttpParserError("no tunnels")
        head = [b"%b %b HTTP/%b\r\n" % (method, self.url, version)]
        head += [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = _Parser(self)
        self.parser.feed_data(b"".join([*head, b"\r\n", rest]))

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # the parser stops behind this head, and `go_on_without_upgrade` reads it again
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
            self._refuse_in_turn(BadRequest(msg, code="invalid_http"))

    def _refuse_in_turn(self, error: GatewayError) -> None:
        """Refuse bytes that cannot be read, after the requests before them have been answered."""
        if self._owes_answer:
            self._refusal = error
        else:
            self._refuse(error)

    def _refuse(self, error: GatewayError) -> None:
        request_id = f"req-{uuid.uuid4().hex}"
        if self.on_refusal is not None:
            peer = self.transport.get_extra_info("peername")
            self.on_refusal(error, request_id, str(peer[0]) if peer else "-")
        body = error.encode(request_id)
        head = {
            **error.headers(),
            "x-request-id": request_id,
            "content-type": "application/json",
            "content-length": str(len(body)),
        }
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
        if self._running is not None and not self._running.response_complete:
            self._arm(self.head_seconds)  # a head behind a running request has time until the request is answered
        else:
            self.transport.close()
