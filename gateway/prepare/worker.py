"""The process that prepares large bodies: `python -m gateway.prepare.worker`, started by `gateway.prepare.process`.

Decoding and rendering hold Python's interpreter lock, and 8 MiB of JSON can hold it for seconds. Here they hold the
lock of a process that has nothing else to do. What it took of memory goes back to the operating system at its end.

One order after the other: a frame with an `Order` on stdin and the raw body behind it; a frame with an `Answer` on
stdout. It ends when stdin does, and by itself when one order takes longer than it may, even if nobody is left to end
it. It never imports torch.
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

LENGTH_BYTES = 4  # before each frame, big-endian
_NICE = 5  # engine and gateway come first where cores are short
_REFUSALS: dict[str, type[GatewayError]] = {
    kind.__name__: kind for kind in (BadRequest, ContextLengthExceeded, NotFound, RequestTooLarge, UnsupportedMediaType)
}


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to do with the `num_bytes` of body that follow."""

    endpoint: Endpoint
    is_json: bool
    hello: Hello
    default_max_tokens: int
    num_bytes: int
    seconds: int  # that it may take


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A typed error on its way to the gateway."""

    kind: str  # the class's name
    message: str
    code: str
    param: str | None
    details: dict[str, int | str]

    @classmethod
    def of(cls, error: GatewayError) -> "Refusal":
        """`error` as it travels."""
        return cls(
            kind=type(error).__name__,
            message=error.message,
            code=error.code,
            param=error.param,
            details=error.details,
        )

    def error(self) -> GatewayError:
        """The error again."""
        return _REFUSALS[self.kind](self.message, code=self.code, param=self.param, details=self.details)


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two is set."""

    prepared: Prepared | None = None
    refusal: Refusal | None = None


def frame(message: Order | Answer) -> bytes:
    """A message with its length in front. JSON, because a caller's whole numbers may have any size."""
    data = msgspec.json.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def decode_answer(data: bytes) -> Answer:
    """A frame without its length. Raises msgspec.MsgspecError."""
    return _ANSWERS.decode(data)


_ORDERS = msgspec.json.Decoder(Order)
_ANSWERS = msgspec.json.Decoder(Answer)


class Worker:
    """Answers orders; keeps the tokenizer of the model that it was asked for last."""

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
    """Answer orders from `source` until it ends."""
    worker = Worker()
    while len(length := source.read(LENGTH_BYTES)) == LENGTH_BYTES:
        order = _ORDERS.decode(source.read(int.from_bytes(length, "big")))
        body = source.read(order.num_bytes)
        if len(body) < order.num_bytes:
            return
        # The kernel ends this process if nobody else does: its default action needs no interpreter.
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
    with contextlib.suppress(ValueError, OSError):  # a lower hard limit than ours stays
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is no answer
    with contextlib.suppress(BrokenPipeError), sink:
        serve(sys.stdin.buffer, sink)


if __name__ == "__main__":
    main()
