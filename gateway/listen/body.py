"""A request's body: read under a byte limit and a time limit, and unpacked when it is gzip.

The byte limit holds for the body as sent and as unpacked. A body that inflates beyond the limit is stopped at the first
byte too many, so memory never holds more. A body is unpacked in slices, and the event loop goes on between two slices.
"""

import asyncio
import contextlib
import zlib
from collections.abc import Iterator, Mapping
from typing import Protocol

from starlette.types import Receive

from gateway.errors import BadRequest, BodyTimeout, ClientGone, RequestTooLarge, UnsupportedMediaType

_GZIP_WINDOW = 31  # zlib's code for a gzip wrapper with the largest window
_SLICE_BYTES = 128 * 1024  # the most that is unpacked at a time


class BodyRoom(Protocol):
    """Gives a body room before it is read. `gateway.prepare.preparation.BodyHold` implements it."""

    @property
    def small_bytes(self) -> int:
        """The most bytes that a body of unknown length may have before it must call `take` again."""

    async def take(self, num_bytes: int | None) -> None:
        """Wait for room for so many bytes. None stands for a body of unknown length, which is taken for small."""


def check_media_type(headers: Mapping[str, str]) -> bool:
    """True for a JSON content type; False for no content type, or the content type that curl sends by default.

    Where the answer is False, the body is tried as JSON nevertheless. Raises UnsupportedMediaType for any other content
    type, charset or
    encoding.
    """
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity", "gzip", "x-gzip"):
        raise UnsupportedMediaType(f"Content-Encoding {encoding[:40]!r} is not supported; send gzip or identity.")
    media_type, _, parameters = headers.get("content-type", "").lower().partition(";")
    media_type = media_type.strip()
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip() == "charset" and value.strip(" \t\"'") not in ("utf-8", "utf8", "us-ascii", ""):
            raise UnsupportedMediaType("JSON is UTF-8: send 'Content-Type: application/json'.")
    if media_type == "application/json" or (media_type.startswith("application/") and media_type.endswith("+json")):
        return True
    if media_type in ("", "application/x-www-form-urlencoded"):
        return False
    raise UnsupportedMediaType(
        f"Content-Type {media_type[:60]!r} is not supported; add the header 'Content-Type: application/json'."
    )


async def read_body(
    receive: Receive,
    headers: Mapping[str, str],
    *,
    max_bytes: int,
    timeout_seconds: float,
    room: BodyRoom | None = None,
) -> bytes:
    """The decoded body. It is read only while it has `room`; the wait for room does not count towards
    `timeout_seconds`.

    Raises:

    - RequestTooLarge, when the body as announced, as sent or as decoded has more than `max_bytes`;
    - BodyTimeout, when the body does not arrive in time;
    - BadRequest, when gzip is damaged;
    - ClientGone, when the client leaves before the body's end;
    - what `room` raises.
    """
    announced = headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    is_gzip = headers.get("content-encoding", "").strip().lower() in ("gzip", "x-gzip")
    unpack = _Gunzip(max_bytes) if is_gzip else None
    parts: list[bytes] = []
    size = num_sent = 0
    is_length_known = announced.isdecimal() and not is_gzip
    if room is not None:
        await room.take(int(announced) if is_length_known else None)
    may_grow = room is not None and not is_length_known
    try:
        async with asyncio.timeout(timeout_seconds) as timer:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                sent: bytes = message.get("body", b"")
                num_sent += len(sent)
                for part in (sent,) if unpack is None else unpack.feed(sent):
                    size += len(part)
                    if max(size, num_sent) > max_bytes:
                        raise _too_large(max_bytes)
                    if room is not None and may_grow and size > room.small_bytes:
                        may_grow = False
                        timer.reschedule(None)
                        await room.take(max_bytes)
                        timer.reschedule(asyncio.get_running_loop().time() + timeout_seconds)
                    parts.append(part)
                    if unpack is not None:
                        await asyncio.sleep(0)
                if max(size, num_sent) > max_bytes:
                    raise _too_large(max_bytes)
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        raise BodyTimeout(f"The request body did not arrive within {timeout_seconds:g} s.") from None
    if unpack is not None:
        unpack.check_end()
    return b"".join(parts)


async def discard_body(receive: Receive, *, max_bytes: int, timeout_seconds: float) -> None:
    """Read and drop what the client still sends, before an answer that closes the connection.

    Closing a socket with unread bytes resets the connection, and the client may lose the answer. Reading ends at the
    body's end, above `max_bytes` or after `timeout_seconds`.
    """
    num_bytes = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_seconds):
            while num_bytes <= max_bytes:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


def _too_large(max_bytes: int) -> RequestTooLarge:
    text = f"The request body is larger than {max_bytes} bytes; send a smaller body."
    return RequestTooLarge(text, details={"limit": max_bytes})


class _Gunzip:
    """Unpacks a gzip stream of one or more members, up to one byte over the limit."""

    def __init__(self, max_bytes: int) -> None:
        self._room = max_bytes + 1
        self._inflater = zlib.decompressobj(_GZIP_WINDOW)
        self._has_data = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """What `data` unpacks to, in slices. Raises BadRequest when `data` is not gzip."""
        while data and self._room > 0:
            self._has_data = True
            if self._inflater.eof:
                self._inflater = zlib.decompressobj(_GZIP_WINDOW)
            limit = min(self._room, _SLICE_BYTES)
            try:
                part = self._inflater.decompress(data, limit)
            except zlib.error:
                raise _damaged() from None
            self._room -= len(part)
            # zlib may hold back some output. It comes with the next input, at the latest with the stream's checksum.
            data = self._inflater.unused_data if self._inflater.eof else self._inflater.unconsumed_tail
            yield part

    def check_end(self) -> None:
        """Raises BadRequest when the stream ends in the middle of a member."""
        if self._has_data and not self._inflater.eof:
            raise _damaged()


def _damaged() -> BadRequest:
    return BadRequest("The request body is not valid gzip, as its Content-Encoding says.", code="invalid_gzip")
