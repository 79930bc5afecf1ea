"""The sending of one answer: knows whether the headers are sent, and gives up on a client that reads nothing."""

import asyncio
from collections.abc import Mapping

from starlette.types import Send

from gateway.errors import ClientGone

JSON_HEADERS = {"content-type": "application/json", "cache-control": "no-store"}
# Without x-accel-buffering, nginx holds a stream back.
STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache, no-store",
    "x-accel-buffering": "no",
}


class Reply:
    """Owns the `send` side of one request. `send_timeout` is seconds."""

    def __init__(self, send: Send, send_timeout: float) -> None:
        self._send = send
        self._send_timeout = send_timeout
        self.is_started = False

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Send status and headers."""
        self.is_started = True
        raw = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def send(self, data: bytes, *, is_last: bool = False) -> None:
        """Send a part of the body. Raises ClientGone when the client reads nothing for `send_timeout`."""
        try:
            async with asyncio.timeout(self._send_timeout):
                await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})
        except TimeoutError:
            raise ClientGone from None

    async def whole(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Send a complete answer, with its length. Raises ClientGone as `send` does."""
        await self.start(status, {**headers, "content-length": str(len(body))})
        await self.send(body, is_last=True)
