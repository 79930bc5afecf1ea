"""One gateway's connection: a non-blocking socket, what is not yet sent, what is not yet a whole frame.

A Unix socket takes about 93 KiB and then blocks, and a stopped gateway reads nothing, so sending goes through a bounded
outbox. When it is full its owner stops producing (it runs no step) and stops reading; nothing here ever waits.
"""

import socket
from collections import deque
from collections.abc import Iterator

import msgspec

from engine.wire.framing import FrameDecoder, encode
from engine.wire.messages import FromGateway

READ_BYTES = 256 * 1024


class ConnectionLost(Exception):
    """The peer is gone."""


class Connection:
    """Owns an accepted socket until `close`."""

    def __init__(self, accepted: socket.socket, max_outbox_bytes: int) -> None:
        accepted.setblocking(False)
        self._socket = accepted
        self._max_outbox_bytes = max_outbox_bytes
        self._outbox: deque[memoryview] = deque()
        self._outbox_bytes = 0
        self._decoder: FrameDecoder[FromGateway] = FrameDecoder(FromGateway)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._outbox)

    @property
    def is_full(self) -> bool:
        """Whether the outbox is at its limit. One message may overshoot it: nothing is cut or dropped."""
        return self._outbox_bytes >= self._max_outbox_bytes

    def send(self, message: msgspec.Struct) -> None:
        """Put a message in the outbox and send what the socket takes now. Raises ConnectionLost."""
        frame = encode(message)
        self._outbox.append(memoryview(frame))
        self._outbox_bytes += len(frame)
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes now. Raises ConnectionLost."""
        while self._outbox:
            frame = self._outbox[0]
            try:
                sent = self._socket.send(frame)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                raise ConnectionLost(str(error)) from error
            self._outbox_bytes -= sent
            if sent == len(frame):
                self._outbox.popleft()
            else:
                self._outbox[0] = frame[sent:]

    def receive(self) -> Iterator[FromGateway]:
        """The messages that have come in. Raises ConnectionLost at the end of the stream, FrameError for garbage."""
        try:
            data = self._socket.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            raise ConnectionLost(str(error)) from error
        if not data:
            raise ConnectionLost("closed by the gateway")
        yield from self._decoder.feed(data)

    def close(self) -> None:
        """Close the socket; unsent messages are dropped."""
        self._socket.close()
        self._outbox.clear()
