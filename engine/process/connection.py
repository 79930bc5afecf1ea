"""The connection to a gateway: a non-blocking socket, the bytes not sent yet, and the frame not complete yet.

A Unix socket takes about 93 KiB and then blocks, and a gateway that has stopped reads nothing. So messages go through a
bounded outbox. While the outbox is full, the owner of the connection runs no step and reads nothing. Nothing here ever
waits.
"""

import socket
from collections import deque
from collections.abc import Iterator

import msgspec

from engine.wire.framing import FrameDecoder, encode
from engine.wire.messages import FromGateway

READ_BYTES = 256 * 1024


class ConnectionLost(Exception):
    """The gateway at the other end is gone. The message says how that was noticed."""


class Connection:
    """Owns an accepted socket until `close`. `max_outbox_bytes` bounds the bytes not sent yet."""

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
        """Whether the outbox is at its limit. The last message may go beyond the limit: nothing is cut or dropped."""
        return self._outbox_bytes >= self._max_outbox_bytes

    def send(self, message: msgspec.Struct) -> None:
        """Put a message in the outbox, and send what the socket takes now. Raises ConnectionLost or FrameError."""
        frame = encode(message)
        self._outbox.append(memoryview(frame))
        self._outbox_bytes += len(frame)
        self.flush()

    def flush(self) -> None:
        """Send as much of the outbox as the socket takes now. Raises ConnectionLost."""
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
        """The messages that have come in, perhaps none.

        Raises ConnectionLost at the end of the stream, and FrameError for bytes that are not this protocol.
        """
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
        """Close the socket. Messages not sent yet are dropped."""
        self._socket.close()
        self._outbox.clear()
