"""The gateway's end of the engine's socket: one connection, one reader task, one stream for each request.

Owns the connection and the table of open streams. Each step of the engine arrives as one message, which wakes each
request in it once. When the connection ends, every open stream ends with EngineDied; the caller decides when to connect
again. All methods are for the event loop's thread.

Limits: a stream holds at most its own request's max tokens. When more than `max_unsent_bytes` wait for an engine that
does not read, submissions are refused. Aborts are small and always written.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from engine.wire.framing import FrameDecoder, FrameError, encode
from engine.wire.messages import (
    PROTOCOL_VERSION,
    Abort,
    ConfigureTeams,
    Finished,
    FromEngine,
    Hello,
    Refused,
    ServiceSamples,
    StepDone,
    Submit,
    TeamEntry,
)
from gateway.errors import (
    BadRequest,
    ContextLengthExceeded,
    EngineDied,
    EngineFailed,
    GatewayError,
    Overloaded,
    Unavailable,
)
from policies.sequences import TeamTerms

_log = logging.getLogger("terazi.engine_client")
_READ_BYTES = 256 * 1024


class RequestStream:
    """What the engine sends for one request.

    It has one consumer, which iterates over batches of token ids and then reads `finished`.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.finished: Finished | None = None
        self.num_tokens = 0  # received, read or not
        self.last_token_at: float | None = None  # on the client's clock
        self.device_us = 0  # device time charged so far
        self.level = 0
        self._unread: list[int] = []
        self._error: GatewayError | None = None
        self._is_over = False  # the engine will say nothing more
        self._is_woken = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def error(self) -> GatewayError | None:
        """Why the stream broke; None if it did not."""
        return self._error

    @property
    def is_over(self) -> bool:
        """Whether the engine will say nothing more about the request.

        That is so when the request has ended, when the engine has refused it, and when the engine is gone.
        """
        return self._is_over

    def push(self, token_ids: Iterable[int], device_us: int, level: int) -> None:
        """Take in the new tokens of one step, the device time charged so far (µs) and the present level."""
        before = len(self._unread)
        self._unread += token_ids
        self.num_tokens += len(self._unread) - before
        self.device_us = device_us
        self.level = level
        self._release()

    def finish(self, finished: Finished) -> None:
        """Take in the engine's last word on this request."""
        self.finished = finished
        self._is_over = True
        self.device_us = finished.device_us
        self._release()

    def fail(self, error: GatewayError, *, is_over: bool) -> None:
        """End the stream with an error, unless the stream has ended.

        `is_over` says that the engine will say nothing more about the request.
        """
        self._is_over |= is_over
        if self.finished is None and self._error is None:
            self._error = error
        self._release()

    def wake(self) -> None:
        """Make the waiting `get`, or the next one, return even without tokens, so that its caller looks at something
        else."""
        self._is_woken = True
        self._release()

    def _release(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        assert self._waiter is None, "a stream has one consumer"
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    async def get(self) -> list[int]:
        """Wait for token ids and return all that are unread. The list is empty when the stream was woken or has
        finished.

        Raises the error with which the stream failed, once all tokens before it have been read.
        """
        while not (self._unread or self.finished or self._error or self._is_woken):
            await self._wait()
        self._is_woken = False
        if not self._unread and self._error is not None:
            raise self._error
        token_ids, self._unread = self._unread, []
        return token_ids

    async def wait_ended(self, timeout_seconds: float) -> Finished | None:
        """Wait for the engine's last word. None when there will be none, or it does not come within the time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                while not self._is_over:
                    await self._wait()
        return self.finished


class EngineClient:
    """The client of one engine on one Unix socket. `clock` is monotonic seconds."""

    def __init__(
        self,
        socket_path: Path | str,
        *,
        on_samples: Callable[[ServiceSamples], None] | None = None,
        max_unsent_bytes: int = 64 * 1024 * 1024,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.socket_path = str(socket_path)
        self.on_samples = on_samples
        self.on_token_gap: Callable[[float], None] | None = None  # seconds between two arrivals of one stream's tokens
        self.latest_step: StepDone | None = None
        self.peak_blocks = {"device": 0, "host": 0}  # the most KV blocks that were in use after a step
        self._hello: Hello | None = None
        self._is_ready = False
        self._streams: dict[str, RequestStream] = {}
        self._teams: tuple[TeamEntry, ...] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reader_task: asyncio.Task[None] | None = None
        self._max_unsent_bytes = max_unsent_bytes
        self._clock = clock
        self._heard_at = 0.0

    @property
    def hello(self) -> Hello | None:
        """The engine's greeting at the latest connection; None before the first connection."""
        return self._hello

    @property
    def is_ready(self) -> bool:
        """Whether the engine is connected and has greeted."""
        return self._is_ready

    @property
    def num_streams(self) -> int:
        """The number of requests whose end has not arrived."""
        return len(self._streams)

    @property
    def silent_seconds(self) -> float:
        """How long the engine has sent nothing while requests are open, in seconds; 0 when no request is open."""
        return self._clock() - self._heard_at if self._streams and self._is_ready else 0.0

    async def connect(self, timeout_seconds: float = 10.0) -> Hello:
        """Connect, wait for the engine's greeting, and send the table of teams if it is known.

        Raises EngineDied when no engine listens, when it does not greet in time, and when it speaks another protocol
        version.
        """
        assert not self._is_ready, "already connected"
        await self.close()
        try:
            async with asyncio.timeout(timeout_seconds):
                reader, self._writer = await asyncio.open_unix_connection(self.socket_path)
                greeted: asyncio.Future[Hello] = asyncio.get_running_loop().create_future()
                self._reader_task = asyncio.create_task(self._read(reader, greeted), name="engine-reader")
                hello = await greeted
        except (OSError, TimeoutError) as error:
            await self.close()
            raise EngineDied(f"The engine cannot be reached: {str(error) or 'no greeting in time'}.") from error
        except EngineDied:
            await self.close()
            raise
        self._hello = hello
        self._is_ready = True
        self._heard_at = self._clock()
        if self._teams is not None:
            self._write(encode(ConfigureTeams(teams=self._teams)))
        return hello

    async def close(self) -> None:
        """Close the connection. Open streams end with EngineDied. A second call does nothing."""
        if self._reader_task is not None:
            self._reader_task.cancel()
            await asyncio.gather(self._reader_task, return_exceptions=True)
            self._reader_task = None
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
            self._writer = None

    async def wait_closed(self) -> None:
        """Wait until the present connection has ended, for whatever reason."""
        if self._reader_task is not None:
            await asyncio.wait([self._reader_task])

    def configure_teams(self, terms: Iterable[TeamTerms]) -> None:
        """Replace the engine's table of teams by `terms`, now or as soon as the engine is connected."""
        self._teams = tuple(
            TeamEntry(
                team_id=team.team_id,
                weight=team.weight,
                start_level=team.start_level,
                starving_after_us=team.starving_after_us,
                promotion_burst_grants=team.promotion_burst_grants,
            )
            for team in terms
        )
        if self._is_ready:
            self._write(encode(ConfigureTeams(teams=self._teams)))

    def submit(self, message: Submit) -> RequestStream:
        """Hand in one request. Its stream ends with `finished` or with an error; a refusal by the engine is an error.

        Raises EngineDied when there is no connection, and Unavailable when too many bytes wait for the engine to read
        them.
        """
        if not self._is_ready or self._writer is None:
            raise EngineDied("The engine is not available; it is being restarted.", retry_after_seconds=2)
        assert message.request_id not in self._streams, f"request id {message.request_id} is in use"
        if self._writer.transport.get_write_buffer_size() > self._max_unsent_bytes:
            raise Unavailable("The engine does not take in requests at the moment.", retry_after_seconds=2)
        data = encode(message)  # first, so that a message that cannot be encoded leaves no trace
        stream = RequestStream(message.request_id)
        if not self._streams:
            self._heard_at = self._clock()
            self.latest_step = None  # the step is from an earlier time, in which other requests ran
        self._streams[message.request_id] = stream
        self._write(data)
        return stream

    def abort(self, request_id: str) -> None:
        """Ask the engine to end a request. The stream still gets its `finished`. An unknown id is ignored."""
        if self._is_ready and request_id in self._streams:
            self._write(encode(Abort(request_id=request_id)))

    def forget(self, stream: RequestStream) -> None:
        """Drop a stream that nobody will read any more. Whatever still arrives for it is dropped too."""
        self._streams.pop(stream.request_id, None)

    def fail_streams(self, error: Callable[[], GatewayError], *, is_over: bool = False) -> None:
        """End every open stream, in the order of submission. `error` makes a new error for each stream.

        Without `is_over` the engine still works on the requests: their handlers abort them, and each `finished` still
        comes.
        """
        for stream in list(self._streams.values()):
            stream.fail(error(), is_over=is_over)

    def _write(self, frame: bytes) -> None:
        assert self._writer is not None
        self._writer.write(frame)

    async def _read(self, reader: asyncio.StreamReader, greeted: asyncio.Future[Hello]) -> None:
        decoder: FrameDecoder[FromEngine] = FrameDecoder(FromEngine)
        reason = "The engine closed its connection."
        try:
            while data := await reader.read(_READ_BYTES):
                self._heard_at = self._clock()
                for message in decoder.feed(data):
                    if not greeted.done():
                        self._greet(message, greeted)
                    else:
                        self._dispatch(message)
        except (OSError, FrameError, EngineDied) as error:
            reason = f"The connection to the engine broke: {error}."
        finally:
            self._is_ready = False
            if self._writer is not None:
                self._writer.close()
            if not greeted.done():
                greeted.set_exception(EngineDied(reason))
            if self._streams:
                _log.error("%s %d requests end with an error", reason, len(self._streams))
            self.fail_streams(lambda: EngineDied("The engine stopped while it worked on this request."), is_over=True)
            self._streams.clear()

    def _greet(self, message: FromEngine, greeted: asyncio.Future[Hello]) -> None:
        if not isinstance(message, Hello):
            raise EngineDied("the first message was no greeting")
        if message.protocol_version != PROTOCOL_VERSION:
            older = "engine" if message.protocol_version < PROTOCOL_VERSION else "gateway"
            raise EngineDied(
                f"the engine speaks protocol {message.protocol_version} and this gateway {PROTOCOL_VERSION}; "
                f"the {older} is the older one: run both from the same version of Terazi"
            )
        greeted.set_result(message)

    def _dispatch(self, message: FromEngine) -> None:
        if isinstance(message, StepDone):
            self._note_step(message)
            for event in message.tokens:
                stream = self._streams.get(event.request_id)
                if stream is not None:
                    if event.token_ids:
                        self._note_gap(stream)
                    stream.push(event.token_ids, event.device_us, event.level)
            for finished in message.finished:
                stream = self._streams.pop(finished.request_id, None)
                if stream is not None:
                    stream.finish(finished)
        elif isinstance(message, ServiceSamples):
            if self.on_samples is not None:
                self.on_samples(message)
        elif isinstance(message, Refused):
            stream = self._streams.pop(message.request_id, None)
            if stream is not None:
                stream.fail(refusal_error(message), is_over=True)

    def _note_step(self, step: StepDone) -> None:
        self.latest_step = step
        if self._hello is not None:
            used = {
                "device": self._hello.num_device_blocks - step.num_free_blocks,
                "host": self._hello.num_host_blocks - step.num_free_host_blocks,
            }
            self.peak_blocks = {pool: max(most, used[pool]) for pool, most in self.peak_blocks.items()}

    def _note_gap(self, stream: RequestStream) -> None:
        if stream.last_token_at is not None and self.on_token_gap is not None:
            self.on_token_gap(self._heard_at - stream.last_token_at)
        stream.last_token_at = self._heard_at


def refusal_error(refused: Refused) -> GatewayError:
    """The error to answer with when the engine has refused a request."""
    if refused.code == "context_length_exceeded":
        return ContextLengthExceeded(refused.message)
    if refused.code == "queue_full":
        return Overloaded(f"The queue is full: {refused.message}.", code="queue_full", retry_after_seconds=5)
    if refused.code == "draining":
        return Unavailable("The server is shutting down.", code="draining", retry_after_seconds=5)
    if refused.code == "engine_error":
        return EngineFailed(f"The engine failed on this request: {refused.message}.")
    return BadRequest(refused.message, code=refused.code)
