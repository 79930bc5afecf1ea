"""Messages on a byte stream: 4 bytes of big-endian length, then one MessagePack document.

Both ends of the socket use this module. Nothing here does I/O: the owner of a socket also handles the socket's errors.
"""

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

from engine.wire.messages import MAX_FRAME_BYTES

HEADER_BYTES = 4

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()


class FrameError(ValueError):
    """The peer does not speak this protocol: a frame is too long, is empty, or holds no known message."""


def encode(message: msgspec.Struct) -> bytes:
    """`message` as one whole frame. Raises FrameError when its body is longer than MAX_FRAME_BYTES."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"a message of {len(body)} bytes is longer than a frame may be ({MAX_FRAME_BYTES})")
    return len(body).to_bytes(HEADER_BYTES, "big") + body


class FrameDecoder(Generic[T]):
    """Cuts a byte stream into messages of one type or union of types.

    Holds at most one unfinished frame, and the bytes of the latest `feed`.
    """

    def __init__(self, message_type: Any, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(message_type)
        self._max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[T]:
        """The messages that `data` completes, in order. Raises FrameError, after which the stream cannot be read on."""
        buffer = self._buffer
        buffer += data
        at = 0
        try:
            while len(buffer) - at >= HEADER_BYTES:
                length = int.from_bytes(buffer[at : at + HEADER_BYTES], "big")
                if not 0 < length <= self._max_frame_bytes:
                    raise FrameError(f"a frame says it has {length} bytes")
                end = at + HEADER_BYTES + length
                if len(buffer) < end:
                    break
                with memoryview(buffer) as view:
                    message = self._decode(view[at + HEADER_BYTES : end])
                at = end
                yield message
        finally:
            del buffer[:at]

    def _decode(self, body: memoryview) -> T:
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise FrameError(f"a frame holds no known message: {error}") from error
