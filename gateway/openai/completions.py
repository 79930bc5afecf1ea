"""One completion request's way, from top to bottom. The order of the checks matters.

    head    identify the key (401/403), reserve one request and one slot (429)
    body    wait for room (429, 503), read under a limit (413), decode (400), find the model (404), render and encode;
            a request that can never run ends (400)
    admit   reserve prompt + clamped max tokens (429), open the ledger entry (503)
    run     submit to the engine; from here the request waits in the engine's queue only
    answer  tokens -> text -> stop strings -> chunks, while watching whether the client leaves
    end     one `finally`: abort if unfinished, settle once, close the ledger entry; only then send the last bytes

Until the first byte is sent, every refusal has its proper status. After that, a failure is an error event without
[DONE].
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Mapping

from starlette.types import Receive, Scope, Send

from engine.wire.messages import Finished, Hello, SamplingParams, Submit
from gateway.errors import ClientGone, EngineDied, EngineFailed, GatewayError, Retryable, Unavailable
from gateway.link.client import RequestStream
from gateway.listen.body import check_media_type, discard_body, read_body
from gateway.openai.admission import Claim, identify, queue_timeout
from gateway.openai.booking import (
    CLIENT_CLOSED,
    SHUTDOWN,
    UNEXPECTED,
    Ending,
    booked_engine_id,
    ending_of,
    ledger_row,
    log_fields,
    use_of,
)
from gateway.openai.disconnect import Departure
from gateway.openai.headers import limit_headers, tier_headers, timing_headers
from gateway.openai.reply import JSON_HEADERS, STREAM_HEADERS, Reply
from gateway.openai.request_fields import ignored_header
from gateway.openai.state import GatewayState, Timer, engine_away_error, starting_error
from gateway.openai.wire import KEEP_ALIVE, AnswerWriter, Endpoint, Usage, event
from gateway.prepare.preparation import BodyHold
from gateway.prepare.prepare import Prepared
from gateway.refusals import BOOKED_KEY, IDENTITY_KEY, caller_fields
from gateway.text.detokenizer import Detokenizer
from gateway.text.tokenizer import ModelTokenizer
from tenants.rows import OpenEntry, Progress
from tenants.snapshot import Identity

_log = logging.getLogger("terazi.requests")
_PROGRESS_TOKENS = 64  # between two progress lines in the journal
_LINGER_SECONDS = 1.0  # to read the rest of a body before an answer that closes the connection

REQUEST_ID_KEY = "terazi.request_id"  # in the ASGI scope, set by the outermost middleware
SHOWN_ID_KEY = "terazi.shown_id"  # in the ASGI scope: the caller's own id, if it sent one, else ours


def sampling_of(prepared: Prepared) -> SamplingParams:
    """The sampling parameters for the engine. A request without a seed gets a random seed."""
    request = prepared.request
    return SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=secrets.randbits(63) if request.seed is None else request.seed,
        max_tokens=prepared.max_tokens,
        min_tokens=min(request.min_tokens, prepared.max_tokens),
        ignore_eos=request.ignore_eos,
        stop_token_ids=request.stop_token_ids,
    )


class Completions:
    """The ASGI endpoint of `endpoint`, one of the two completion routes."""

    def __init__(self, state: GatewayState, endpoint: Endpoint) -> None:
        self._state = state
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _Call(self._state, self._endpoint, scope, receive, send).run()


class _Call:
    """The state of one request between its first and its last byte."""

    def __init__(self, state: GatewayState, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        self._state = state
        self._endpoint = endpoint
        self._scope = scope
        self._raw_headers: list[tuple[bytes, bytes]] = list(scope["headers"])
        self._headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in self._raw_headers}
        self._receive = receive
        self._request_id: str = scope[REQUEST_ID_KEY]
        self._reply = Reply(send, state.settings.send_timeout)
        self._departure = Departure(receive)
        self._received_at_us = state.clock.now_us()
        self._identity: Identity | None = None
        self._claim: Claim | None = None
        self._entry: OpenEntry | None = None
        self._stream: RequestStream | None = None
        self._has_called = False  # whether a request that is not admitted still counts in its team's minute
        self._timer: Timer | None = None
        self._is_heartbeat_due = False
        self._sent_at = state.clock.monotonic()
        self._has_body = False  # the whole body was read
        self._is_json = False  # the content type says so
        self._is_stream = False
        self._ignored_fields: tuple[str, ...] = ()
        self._has_sent_first = False  # the first chunk of text was sent
        self._num_tokens = 0  # that were taken from the stream
        self._first_token_at_us: int | None = None

    async def run(self) -> None:
        """Serve the request and answer it, with its result or its refusal."""
        ending = UNEXPECTED
        error: GatewayError | None = None
        answer: bytes | None = None
        try:
            answer, finish_reason = await self._serve()
            ending = Ending("ok", finish_reason)
        except ClientGone:
            ending = CLIENT_CLOSED
            self._has_called = True
        except GatewayError as refusal:
            # The traceback refers to this frame and to the frames with the body, and they refer to the error. Such a
            # cycle would keep megabytes until a full garbage collection.
            error = refusal.with_traceback(None)
            error.__context__ = None
            ending = ending_of(refusal)
            # A request that is wrong has cost work, so it counts. A request for which we had no room does not.
            self._has_called = refusal.status < 500 and not isinstance(refusal, Retryable)
        except asyncio.CancelledError:
            ending = SHUTDOWN
            raise
        finally:
            await self._end(ending)
        if answer is not None:
            await self._finish(answer)
        elif error is not None:
            await self._refuse(error)
        else:
            await self._leave()

    async def _serve(self) -> tuple[bytes, str]:
        """Do everything but send the last bytes. Returns these bytes and the finish reason.

        Raises GatewayError for a refusal, ClientGone when the client has left.
        """
        state = self._state
        began = state.clock.monotonic()
        self._identity = self._scope[IDENTITY_KEY] = identify(state, self._raw_headers)
        self._claim = Claim(state, self._identity)
        self._note_overhead("identify", began)
        hold = state.preparation.hold(self._identity.team_id)
        try:
            body = await self._read(hold)
            began = state.clock.monotonic()
            self._departure.start()
            hello, tokenizer = self._model()
            prepared = await self._prepare(body, hello, tokenizer)
            del body  # or it would stay in memory until the answer ends
        finally:
            hold.give_back()
        self._departure.check()  # a client that left meanwhile: nothing is submitted or booked
        self._is_stream = prepared.request.stream
        self._ignored_fields = prepared.request.ignored_fields
        self._entry = self._open_entry(prepared, hello)
        self._claim.admit(self._entry)
        self._stream = state.engine.submit(self._submit_message(prepared))
        self._note_overhead("prepare", began)
        self._departure.on_leave(self._stream.wake)
        if self._is_stream:
            self._arm(state.settings.early_headers_after)
        return await self._relay(prepared, self._stream, tokenizer)

    def _model(self) -> tuple[Hello, ModelTokenizer]:
        hello, tokenizer = self._state.engine.hello, self._state.tokenizer
        if hello is None or tokenizer is None:
            raise starting_error()
        if not self._state.engine.is_ready:
            raise engine_away_error(self._state.engine_lives)
        return hello, tokenizer

    async def _read(self, hold: BodyHold) -> bytes:
        settings = self._state.settings
        self._is_json = check_media_type(self._headers)
        body = await read_body(
            self._receive,
            self._headers,
            max_bytes=settings.max_body_bytes,
            timeout_seconds=settings.body_timeout,
            room=hold,
        )
        self._has_body = True
        return body

    async def _prepare(self, body: bytes, hello: Hello, tokenizer: ModelTokenizer) -> Prepared:
        """Prepare the body. This may wait for the team's turn; if the client leaves meanwhile, no work is done."""
        assert self._claim is not None
        return await self._state.preparation.prepare(
            self._claim.identity.team_id,
            self._endpoint,
            body,
            is_json=self._is_json,
            hello=hello,
            tokenizer=tokenizer,
            default_max_tokens=self._state.settings.default_max_tokens,
            check=self._departure.check,
        )

    def _open_entry(self, prepared: Prepared, hello: Hello) -> OpenEntry:
        assert self._claim is not None
        identity = self._claim.identity
        return OpenEntry(
            request_id=self._request_id,
            key_id=identity.key_id,
            key_public_id=identity.key_public_id,
            project_id=identity.project_id,
            project=identity.project,
            team_id=identity.team_id,
            team=identity.team,
            tier=identity.tier.name,
            model=hello.model.name,
            engine_id=booked_engine_id(hello),
            engine_epoch=hello.epoch,
            endpoint=self._endpoint,
            stream=prepared.request.stream,
            received_at_us=self._received_at_us,
            admitted_at_us=self._state.clock.now_us(),
            prompt_tokens=len(prepared.token_ids),
            max_tokens=prepared.max_tokens,
        )

    def _submit_message(self, prepared: Prepared) -> Submit:
        assert self._claim is not None
        tier = self._claim.identity.tier
        return Submit(
            request_id=self._request_id,
            team_id=self._claim.identity.team_id,
            start_level=tier.start_level,
            prompt_token_ids=prepared.token_ids,
            sampling=sampling_of(prepared),
            max_queue_us=tier.max_queue_seconds * 1_000_000,
        )

    # --- while it runs ------------------------------------------------------------------------------------------

    async def _relay(self, prepared: Prepared, stream: RequestStream, tokenizer: ModelTokenizer) -> tuple[bytes, str]:
        """Turn tokens into the answer, until the engine or a stop string ends it.

        Returns the last bytes of the answer and the finish reason.
        """
        request = prepared.request
        text = Detokenizer(tokenizer.table, request.stops, min_tokens=request.min_tokens)
        writer = AnswerWriter(request, self._request_id, self._received_at_us // 1_000_000)
        pieces: list[str] = []
        while True:
            token_ids = await stream.get()
            self._departure.check()
            began = self._state.clock.monotonic()
            self._count(len(token_ids))
            piece = text.feed(token_ids)
            self._note_overhead("relay", began)
            if text.is_stopped or stream.finished is not None:
                pieces.append(piece)
                break
            if not request.stream:
                pieces.append(piece)
                continue
            if token_ids:
                await self._send_text(writer, piece)
            if self._is_heartbeat_due:  # no text was sent meanwhile
                await self._send_heartbeat()
        if text.is_stopped and stream.finished is None:
            await self._stop_engine(stream)
        finish_reason = "stop" if text.is_stopped else self._natural_end(stream.finished)
        pieces.append(text.flush())
        usage = self._usage(stream)
        if not request.stream:
            return writer.whole("".join(pieces), finish_reason, usage), finish_reason
        head = b"" if self._has_sent_first else writer.first()
        return head + writer.last("".join(pieces), finish_reason, usage), finish_reason

    async def _stop_engine(self, stream: RequestStream) -> None:
        """Abort a request whose text is complete, and wait for the engine's count of its tokens.

        The count decides what the request costs, so usage, quota and ledger all have the same number. If the engine
        dies or hangs now, the client still gets its answer.
        """
        self._state.engine.abort(self._request_id)
        with contextlib.suppress(TimeoutError, Unavailable):
            async with asyncio.timeout(self._state.settings.close_wait):
                while stream.finished is None:
                    await stream.get()
                    self._departure.check()

    def _note_overhead(self, stage: str, began: float) -> None:
        self._state.meters.stages[stage].observe(self._state.clock.monotonic() - began)

    def _count(self, num_tokens: int) -> None:
        if num_tokens and self._first_token_at_us is None:
            self._first_token_at_us = self._state.clock.now_us()
        before, self._num_tokens = self._num_tokens, self._num_tokens + num_tokens
        if before // _PROGRESS_TOKENS != self._num_tokens // _PROGRESS_TOKENS:
            self._note_progress()

    def _note_progress(self) -> None:
        """Note for the ledger row how far the request has come, in case this process is killed before the request's
        end."""
        assert self._stream is not None
        self._state.ledger.progress(
            Progress(
                request_id=self._request_id,
                output_tokens=self._stream.num_tokens,
                device_us=self._stream.device_us,
                first_token_at_us=self._first_token_at_us,
                level_path=str(self._stream.level),
            )
        )

    def _natural_end(self, finished: Finished | None) -> str:
        """The finish reason of a request that the engine ended.

        Raises Overloaded after a queue timeout, EngineFailed after an error, EngineDied for any other end.
        """
        assert finished is not None and self._claim is not None
        if finished.reason in ("stop", "length"):
            return finished.reason
        if finished.reason == "timeout":
            raise queue_timeout(self._claim.identity.tier)
        if finished.reason == "error":
            raise EngineFailed(f"The engine failed on this request: {finished.message or 'no reason given'}.")
        raise EngineDied("The engine ended this request before it was complete.")

    def _usage(self, stream: RequestStream) -> Usage:
        assert self._entry is not None
        finished = stream.finished
        if finished is None:  # a stop string ended the text, and the engine has not answered the abort
            return Usage(self._entry.prompt_tokens, stream.num_tokens)
        return Usage(self._entry.prompt_tokens, finished.output_tokens, finished.cached_tokens)

    async def _send_text(self, writer: AnswerWriter, piece: str) -> None:
        data = writer.text(piece) if piece else b""
        if not self._has_sent_first:
            data = writer.first() + data
            self._has_sent_first = True
        await self._start_stream()
        if data:
            await self._send(data)

    async def _send_heartbeat(self) -> None:
        """Send a comment, so that the client sees that the stream lives.

        The first comment may bring the headers too.
        """
        await self._start_stream()
        await self._send(KEEP_ALIVE)

    async def _start_stream(self) -> None:
        if not self._reply.is_started:
            self._arm(self._state.settings.keep_alive_interval)
            await self._reply.start(200, self._response_headers(STREAM_HEADERS))

    async def _send(self, data: bytes) -> None:
        self._sent_at = self._state.clock.monotonic()
        self._is_heartbeat_due = False
        await self._reply.send(data)

    def _arm(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._state.clock.call_later(seconds, self._on_timer)

    def _on_timer(self) -> None:
        """Ask for a heartbeat if nothing was sent for a whole interval.

        If something was, look again at the interval's end.
        """
        assert self._stream is not None
        interval = self._state.settings.keep_alive_interval
        rest = self._sent_at + interval - self._state.clock.monotonic() if self._reply.is_started else 0.0
        if rest <= 0:
            self._is_heartbeat_due = True
            self._stream.wake()
        self._arm(rest if rest > 0 else interval)

    # --- its end ------------------------------------------------------------------------------------------------

    async def _end(self, ending: Ending) -> None:
        """The only clean-up: give back or book whatever this request holds, exactly once."""
        if self._timer is not None:
            self._timer.cancel()
        await self._departure.stop()
        claim, stream, engine = self._claim, self._stream, self._state.engine
        if claim is None:
            return
        settings = self._state.settings
        try:
            if stream is not None and stream.finished is None:
                engine.abort(self._request_id)
                await stream.wait_ended(settings.settle_wait)
        finally:
            self._settle(claim, ending)
            try:
                # The slot is free now. Only the row still waits for the engine's charge.
                if stream is not None and stream.finished is None:
                    await stream.wait_ended(settings.close_wait)
            finally:
                if stream is not None:
                    engine.forget(stream)
                self._close(claim, ending)

    def _settle(self, claim: Claim, ending: Ending) -> None:
        stream, entry = self._stream, self._entry
        used: int | None = 0 if self._has_called else None
        if claim.is_open and entry is not None:
            use = use_of(entry, stream, ending)
            used = None if use is None else use.tokens
        if used is None or not claim.is_outstanding:
            claim.release()
        else:
            claim.settle(used)

    def _close(self, claim: Claim, ending: Ending) -> None:
        if claim.is_open and self._entry is not None:
            now_us = self._state.clock.now_us()
            use = use_of(self._entry, self._stream, ending)
            claim.amend(None if use is None else use.tokens)  # the engine's count may be newer
            row = ledger_row(
                self._entry,
                self._stream,
                ending,
                finished_at_us=now_us,
                first_token_at_us=self._first_token_at_us,
            )
            claim.close(row)
            self._scope[BOOKED_KEY] = True
            shown_id = self._scope[SHOWN_ID_KEY]
            _log.info("request ended", extra=log_fields(row) | caller_fields(self._scope, shown_id, self._request_id))

    def _response_headers(self, base: Mapping[str, str]) -> dict[str, str]:
        headers = dict(base)
        if self._identity is not None:
            headers |= limit_headers(self._state.leases.view(self._identity))
            headers |= tier_headers(self._identity)
        headers |= ignored_header(self._ignored_fields)
        finished = self._stream.finished if self._stream is not None else None
        first = self._first_token_at_us
        headers |= timing_headers(
            queue_us=finished.queued_us if finished is not None else None,
            first_token_us=None if first is None else first - self._received_at_us,
        )
        return headers

    async def _finish(self, answer: bytes) -> None:
        """Send the last bytes. Everything is booked by now."""
        try:
            if self._reply.is_started:
                await self._reply.send(answer, is_last=True)
            else:
                headers = self._response_headers(STREAM_HEADERS if self._is_stream else JSON_HEADERS)
                await self._reply.whole(200, headers, answer)
        except ClientGone:
            pass  # the client left while the end of its answer was being sent

    async def _refuse(self, error: GatewayError) -> None:
        """Send the refusal with its status, or as an error event when the headers have been sent."""
        try:
            if self._reply.is_started:
                self._state.refused[error.code] += 1  # a refusal with a status is counted in `LogRefusals`
                await self._reply.send(event(error.body(self._request_id)), is_last=True)
            else:
                headers = {**self._response_headers(JSON_HEADERS), **error.headers()}
                if "connection" in headers and not self._has_body:
                    limit = self._state.settings.max_body_bytes
                    await discard_body(self._receive, max_bytes=limit, timeout_seconds=_LINGER_SECONDS)
                await self._reply.whole(error.status, headers, error.encode(self._request_id))
        except ClientGone:
            pass  # nobody reads the refusal

    async def _leave(self) -> None:
        """The client has left. Complete the exchange, because some middleware insists on an answer."""
        try:
            if self._reply.is_started:
                await self._reply.send(b"", is_last=True)
            else:
                await self._reply.whole(408, {**JSON_HEADERS, "connection": "close"}, b"{}")
        except ClientGone:
            pass
