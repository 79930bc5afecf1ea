"""The process that prepares large bodies: `python -m gateway.prepare.worker`, started by `gateway.prepare.process`.

Decoding and rendering hold Python's interpreter lock, for 8 MiB of JSON possibly for seconds. Here they hold the lock
of a process that has nothing else to do. When the process ends, its memory goes back to the operating system.

The worker answers one order after the other. An order is a frame with an `Order` on stdin, followed by the raw body; an
answer is a frame with an `Answer` on stdout. The worker ends at the end of stdin. It also ends by itself when one order
takes too long, even if nobody is left to kill it. It never imports torch.
"""

import contextlib
import gc
import os
import resource
import signal
import sys
from typing import BinaryIO

import msgspec

from engine.wire.messages import Hello, ModelInfo
from gateway import process_memory
from gateway.errors import (
    BadRequest,
    ContextLengthExceeded,
    GatewayError,
    NotFound,
    RequestTooLarge,
    UnsupportedMediaType,
)
from gateway.openai.wire import Endpoint
from gateway.prepare.prepare import Prepared, prepare
from gateway.text.tokenizer import ModelTokenizer

LENGTH_BYTES = 4  # of the length before each frame, big-endian
_NICE = 5  # where cores are short, engine and gateway come first
_REFUSALS: dict[str, type[GatewayError]] = {
    kind.__name__: kind for kind in (BadRequest, ContextLengthExceeded, NotFound, RequestTooLarge, UnsupportedMediaType)
}


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to do with the body that follows, which has `num_bytes`."""

    endpoint: Endpoint
    is_json: bool
    hello: Hello
    default_max_tokens: int
    num_bytes: int
    seconds: int  # the most time that the order may take


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A GatewayError as a message to the gateway."""

    kind: str  # the class's name
    message: str
    code: str
    param: str | None
    details: dict[str, int | str]

    @classmethod
    def of(cls, error: GatewayError) -> "Refusal":
        """The message for `error`."""
        return cls(
            kind=type(error).__name__,
            message=error.message,
            code=error.code,
            param=error.param,
            details=error.details,
        )

    def error(self) -> GatewayError:
        """The error that this message was made of."""
        return _REFUSALS[self.kind](self.message, code=self.code, param=self.param, details=self.details)


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one order. Exactly one of the two fields is set."""

    prepared: Prepared | None = None
    refusal: Refusal | None = None


def frame(message: Order | Answer) -> bytes:
    """A message as JSON with its length in front.

    Not MessagePack, because a caller's whole numbers may have any size.
    """
    data = msgspec.json.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def decode_answer(data: bytes) -> Answer:
    """The answer in a frame, given without its length. Raises msgspec.MsgspecError."""
    return _ANSWERS.decode(data)


_ORDERS = msgspec.json.Decoder(Order)
_ANSWERS = msgspec.json.Decoder(Answer)


class Worker:
    """Answers orders, and keeps the tokenizer of the last order's model."""

    def __init__(self) -> None:
        self._model: ModelInfo | None = None
        self._tokenizer: ModelTokenizer | None = None

    def answer(self, order: Order, body: bytes) -> Answer:
        """The prepared request, or the refusal that `gateway.prepare.prepare` raised.

        Raises OSError or ValueError when the tokenizer cannot be loaded.
        """
        if self._tokenizer is None or self._model != order.hello.model:
            self._tokenizer = ModelTokenizer.load(order.hello.model)
            self._model = order.hello.model
        try:
            prepared = prepare(
                order.endpoint,
                body,
                is_json=order.is_json,
                hello=order.hello,
                tokenizer=self._tokenizer,
                default_max_tokens=order.default_max_tokens,
            )
        except GatewayError as error:
            return Answer(refusal=Refusal.of(error))
        except MemoryError:
            too_large = RequestTooLarge(f"The request body of {len(body)} bytes takes too much memory to be read.")
            return Answer(refusal=Refusal.of(too_large))
        return Answer(prepared=prepared)


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Answer orders from `source` on `sink`, until `source` ends. Raises what `Worker.answer` raises."""
    worker = Worker()
    while len(length := source.read(LENGTH_BYTES)) == LENGTH_BYTES:
        order = _ORDERS.decode(source.read(int.from_bytes(length, "big")))
        body = source.read(order.num_bytes)
        if len(body) < order.num_bytes:
            return
        # If an order takes too long, SIGALRM ends this process. Its default action needs no interpreter.
        signal.alarm(order.seconds + 1)
        answer = worker.answer(order, body)
        signal.alarm(0)
        del body, order
        sink.write(frame(answer))
        sink.flush()
        del answer
        gc.collect()
        process_memory.trim()


def main() -> None:
    """`prepare_worker MEMORY_BYTES`: the most memory that this process may take."""
    process_memory.limit_arenas(1)
    most = int(sys.argv[1])
    with contextlib.suppress(ValueError, OSError):  # a hard limit that is lower stays as it is
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not mix with answers
    with contextlib.suppress(BrokenPipeError), sink:
        serve(sys.stdin.buffer, sink)


if __name__ == "__main__":
    main()
