"""An engine that does exactly what a test tells it: speaks engine.wire.messages over a real Unix socket."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine.wire.framing import FrameDecoder, encode
from engine.wire.messages import (
    PROTOCOL_VERSION,
    Abort,
    ConfigureTeams,
    Finished,
    FinishReason,
    FromGateway,
    Hello,
    ModelInfo,
    ProfileInfo,
    Refused,
    StepDone,
    Submit,
    TokenEvent,
)

VOCAB_SIZE = 512
EOS = 2


def byte_ids(text: str | bytes) -> list[int]:
    """Token ids of the tiny tokenizer that stand for single bytes: three specials come before the 256 bytes."""
    return [3 + byte for byte in (text.encode() if isinstance(text, str) else text)]


def hello(**overrides: Any) -> Hello:
    """A greeting of the tiny model, context 2,048, with room for 128 blocks of 16 tokens."""
    context_len = overrides.pop("context_len", 2048)
    fields: dict[str, Any] = {
        "protocol_version": PROTOCOL_VERSION,
        "engine_id": "fake",
        "epoch": 7,
        "pid": 1,
        "kind": "torch",
        "policy": "eg-mlfq",
        "model": ModelInfo(
            name="org/tiny-random",
            path="",
            vocab_size=VOCAB_SIZE,
            context_len=context_len,
            eos_token_ids=(EOS,),
            dtype="float32",
            device="cpu",
        ),
        "profile": ProfileInfo(
            fixed_us=1000, prefill_token_us=10, prefill_attention_us=0, decode_row_us=10, decode_context_us=0
        ),
        "block_size": 16,
        "num_device_blocks": 128,
        "num_host_blocks": 0,
        "max_batch_size": 64,
        "max_batch_tokens": 2048,
        **overrides,
    }
    return Hello(**fields)


class FakeEngine:
    """Takes submissions and aborts into queues; every event goes out when the test says so.

    `script` answers each submission by itself (see `saying`). An abort is answered with a Finished unless `is_hung`.
    """

    def __init__(self, path: Path, greeting: Hello | None = None) -> None:
        self.path = path
        self.greeting = greeting or hello()
        self.script: Callable[[Submit], None] | None = None
        self.is_hung = False
        self.teams: ConfigureTeams | None = None
        self.aborted: list[str] = []
        self.submitted: list[Submit] = []
        self.finished: list[Finished] = []
        self.num_frames_sent = 0
        self._live: dict[str, tuple[Submit, int]] = {}  # with the number of tokens sent
        self._submits: asyncio.Queue[Submit] = asyncio.Queue()
        self._aborts: asyncio.Queue[str] = asyncio.Queue()
        self._writer: asyncio.StreamWriter | None = None
        self._server: asyncio.Server | None = None
        self._may_read = asyncio.Event()
        self._may_read.set()
        self._handlers: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self.path)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        self._may_read.set()
        self.die()
        await asyncio.gather(*self._handlers, return_exceptions=True)

    def die(self) -> None:
        """The connection ends in the middle of everything."""
        if self._writer is not None:
            self._writer.transport.abort()
            self._writer = None

    @property
    def num_live(self) -> int:
        return len(self._live)

    async def next_submit(self) -> Submit:
        return await asyncio.wait_for(self._submits.get(), 20)

    async def next_abort(self) -> str:
        return await asyncio.wait_for(self._aborts.get(), 20)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        self._writer = writer
        self.send(self.greeting)
        decoder: FrameDecoder[FromGateway] = FrameDecoder(FromGateway)
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                await self._may_read.wait()
                for message in decoder.feed(data):
                    self._take(message)
        writer.close()

    def _take(self, message: FromGateway) -> None:
        if isinstance(message, Submit):
            self._live[message.request_id] = (message, 0)
            self.submitted.append(message)
            self._submits.put_nowait(message)
            if self.script is not None:
                self.script(message)
        elif isinstance(message, Abort):
            self.aborted.append(message.request_id)
            self._aborts.put_nowait(message.request_id)
            if message.request_id in self._live and not self.is_hung:
                self.finish(message.request_id, "abort")
        else:
            self.teams = message

    def send(self, message: Any) -> None:
        assert self._writer is not None
        self.num_frames_sent += 1
        self._writer.write(encode(message))

    def send_raw(self, data: bytes) -> None:
        """Bytes that need not be a message."""
        assert self._writer is not None
        self._writer.write(data)

    async def start_stalling(self) -> None:
        """Take in nothing more until the end."""
        self._may_read.clear()

    def step(self, events: dict[str, Sequence[int]]) -> None:
        """One step: new tokens of several requests in one message, a millisecond of device time for each token."""
        tokens = []
        for request_id, token_ids in events.items():
            submit, sent = self._live[request_id]
            sent += len(token_ids)
            self._live[request_id] = (submit, sent)
            tokens.append(
                TokenEvent(
                    request_id=request_id, token_ids=tuple(token_ids), device_us=1000 * sent, level=submit.start_level
                )
            )
        self.send(StepDone(step_id=self.num_frames_sent, duration_us=1000, tokens=tuple(tokens)))

    def say(self, request_id: str, text: str | bytes) -> None:
        """Tokens that spell `text` byte by byte, in one step."""
        self.step({request_id: byte_ids(text)})

    def finish(self, request_id: str, reason: FinishReason, **overrides: Any) -> None:
        """The request's end."""
        submit, sent = self._live.pop(request_id)
        fields: dict[str, Any] = {
            "request_id": request_id,
            "reason": reason,
            "prompt_tokens": len(submit.prompt_token_ids),
            "output_tokens": sent,
            "device_us": 1000 * sent,
            "queued_us": 2500,
            "first_token_us": 3500 if sent else 0,
            "total_us": 9000,
            "level_path": (submit.start_level,) if sent else (),
            **overrides,
        }
        finished = Finished(**fields)
        self.finished.append(finished)
        self.send(StepDone(step_id=self.num_frames_sent, duration_us=1000, finished=(finished,)))

    def refuse(self, request_id: str, code: str, message: str = "no") -> None:
        del self._live[request_id]
        self.send(Refused(request_id=request_id, code=code, message=message))

    def saying(self, text: str | bytes, reason: FinishReason = "stop") -> Callable[[Submit], None]:
        """A script: every request gets `text`, one token a step, cut at its max tokens."""

        def script(submit: Submit) -> None:
            ids = byte_ids(text)
            limit = submit.sampling.max_tokens
            for token_id in ids[:limit]:
                self.step({submit.request_id: [token_id]})
            self.finish(submit.request_id, "length" if len(ids) > limit else reason)

        return script
