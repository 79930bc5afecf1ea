"""The public listener: routes, and the one layer around them that makes every answer look the same.

Each route checks the key; no path prefix does. So a path without a route is a 404 for everybody, and the probes are the
only routes that need no key. The Host header is ignored.
"""

import re
import uuid
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import GatewayError, HeadersTooLarge, MethodNotAllowed, NotFound
from gateway.openai.admission import identify
from gateway.openai.completions import REQUEST_ID_KEY, SHOWN_ID_KEY, Completions
from gateway.openai.headers import limit_headers, tier_headers
from gateway.openai.reply import JSON_HEADERS
from gateway.openai.state import GatewayState as GatewayState
from gateway.openai.state import HttpSettings as HttpSettings
from gateway.openai.state import SystemClock as SystemClock
from gateway.openai.state import engine_document, not_ready_reasons, starting_error
from gateway.openai.wire import Endpoint
from gateway.prepare.prepare import room_of
from gateway.refusals import IDENTITY_KEY, LogRefusals, RefusalLog

CHAT: Endpoint = "/v1/chat/completions"
TEXT: Endpoint = "/v1/completions"
MODELS = "/v1/models"
_EXPOSED_HEADERS = (
    "retry-after, retry-after-ms, x-should-retry, x-request-id, server-timing, "
    "x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests, "
    "x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens, "
    "x-terazi-tier, x-terazi-start-level, x-terazi-queue-ms, x-terazi-reason, x-terazi-scope, x-terazi-simulated, "
    "x-terazi-ignored-fields"
)
_SLASHES = re.compile("/{2,}")
_CLIENT_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}\Z")


def public_app(state: GatewayState, refusals: RefusalLog | None = None) -> Starlette:
    """The ASGI app of the OpenAI routes and the probes. `refusals` logs the requests that are refused."""
    routes = [
        Route(CHAT, Completions(state, CHAT), methods=["POST"]),
        Route(TEXT, Completions(state, TEXT), methods=["POST"]),
        Route(MODELS, Models(state), methods=["GET"]),
        Route(MODELS + "/{model_id:path}", Models(state), methods=["GET"]),
        Route("/livez", Probe(state, is_readiness=False), methods=["GET"]),
        Route("/readyz", Probe(state, is_readiness=True), methods=["GET"]),
    ]
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(
                LogRefusals,
                refusals=refusals or RefusalLog(clock=state.clock.monotonic),
                listener="public",
                counts=state.refused,
                snapshot=lambda: state.snapshot_holder.current,
            ),
            Middleware(Edge, state=state),
        ],
        exception_handlers={HTTPException: _http_exception, GatewayError: _gateway_error},
    )
    app.router.redirect_slashes = False
    return app


class Edge:
    """The layer around all routes: request id, header limits, path spelling, CORS, and an envelope for bugs."""

    def __init__(self, app: ASGIApp, state: GatewayState) -> None:
        self._app = app
        self._settings = state.settings
        self._engine = state.engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req-{uuid.uuid4().hex}"
        scope[REQUEST_ID_KEY] = request_id
        has_origin = False
        preflight: dict[str, str] = {}
        shown_id = request_id
        for name, value in scope["headers"]:
            if name == b"origin":
                has_origin = True
            elif name.startswith(b"access-control-request-"):
                preflight[name.decode("latin-1")] = value.decode("latin-1")
            elif name == b"x-request-id" and _CLIENT_ID.match(value.decode("latin-1")):
                shown_id = value.decode("latin-1")
        scope[SHOWN_ID_KEY] = shown_id
        extra = {"x-request-id": shown_id, "x-terazi-request-id": request_id}
        hello = self._engine.hello
        if hello is not None and hello.is_simulated:
            extra["x-terazi-simulated"] = "true"
        if has_origin and self._settings.cors_allow_origin:
            extra["access-control-allow-origin"] = self._settings.cors_allow_origin
            extra["access-control-expose-headers"] = _EXPOSED_HEADERS
            extra["vary"] = "Origin"
        raw_extra = [(name.encode(), value.encode("latin-1")) for name, value in extra.items()]
        is_started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal is_started
            if message["type"] == "http.response.start":
                is_started = True
                message = {**message, "headers": [*message["headers"], *raw_extra]}
            await send(message)

        if scope["method"] == "OPTIONS":
            await _send(send_with_headers, 204, _preflight_headers(preflight), b"")
            return
        refusal = self._header_refusal(scope)
        if refusal is not None:
            await _send_error(send_with_headers, refusal, request_id)
            return
        scope["path"] = _one_spelling(scope["path"])
        try:
            await self._app(scope, receive, send_with_headers)
        except Exception:
            if not is_started:
                bug = GatewayError("The server failed on this request; its log says why.")
                await _send_error(send_with_headers, bug, request_id)
            raise  # uvicorn logs the bug, and closes a stream that had begun

    def _header_refusal(self, scope: Scope) -> GatewayError | None:
        headers = scope["headers"]
        size = sum(len(name) + len(value) for name, value in headers)
        if len(headers) > self._settings.max_headers or size > self._settings.max_header_bytes:
            return HeadersTooLarge(
                f"The request has {len(headers)} headers of {size} bytes; at most {self._settings.max_headers} "
                f"headers of {self._settings.max_header_bytes} bytes are read."
            )
        return None


def _one_spelling(path: str) -> str:
    """The path without repeated slashes and without a slash at the end, which people type into base URLs."""
    path = _SLASHES.sub("/", path)
    return path[:-1] if len(path) > 1 and path.endswith("/") else path


def _preflight_headers(asked: Mapping[str, str]) -> dict[str, str]:
    """The answer to a browser's preflight, which has no key. It allows what is asked; the real request needs a key."""
    return {
        "allow": "GET, HEAD, POST, OPTIONS",
        "access-control-allow-methods": "GET, HEAD, POST, OPTIONS",
        "access-control-allow-headers": asked.get("access-control-request-headers", "authorization, content-type"),
        "access-control-max-age": "600",
    }


async def _send(send: Send, status: int, headers: Mapping[str, str], body: bytes) -> None:
    raw = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
    if status != 204:
        raw.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _send_error(send: Send, error: GatewayError, request_id: str) -> None:
    await _send(send, error.status, {**JSON_HEADERS, **error.headers()}, error.encode(request_id))


class Models:
    """GET /v1/models and /v1/models/{id}: the model that is served. Needs a key, but does not count as a request.

    While the model loads the answer is a 503 `starting`, as on the other routes.
    """

    def __init__(self, state: GatewayState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self._state
        identity = scope[IDENTITY_KEY] = identify(state, scope["headers"])
        models = self._models()
        wanted: str | None = scope.get("path_params", {}).get("model_id")
        document: dict[str, Any] = {"object": "list", "data": models}
        if wanted is not None:
            found = [model for model in models if model["id"] == wanted]
            if not found:
                raise NotFound(f"The model {wanted[:200]!r} does not exist.", code="model_not_found", param="model")
            document = found[0]
        headers = limit_headers(state.leases.view(identity)) | tier_headers(identity)
        await _send(send, 200, {**JSON_HEADERS, **headers}, msgspec.json.encode(document))

    def _models(self) -> list[dict[str, Any]]:
        hello, tokenizer = self._state.engine.hello, self._state.tokenizer
        if hello is None or tokenizer is None:
            # Do not answer with an empty list: user interfaces would keep it, and probes would take it for readiness.
            raise starting_error()
        endpoints = [CHAT, TEXT] if tokenizer.has_chat_template else [TEXT]
        return [
            {
                "id": hello.model.name,
                "object": "model",
                "created": 0,
                "owned_by": "terazi-simulated" if hello.is_simulated else "terazi",
                "context_length": room_of(hello),
                "endpoints": endpoints,
                "simulated": hello.is_simulated,
            }
        ]


class Probe:
    """/livez says that this process answers. /readyz says that it can serve, else it is a 503 with the reasons.

    Both need no key and count as no request. While the database is away /readyz says `degraded` and stays a 200,
    because requests are served while the journal has room.
    """

    def __init__(self, state: GatewayState, *, is_readiness: bool) -> None:
        self._state = state
        self._is_readiness = is_readiness

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reasons = not_ready_reasons(self._state) if self._is_readiness else []
        document: dict[str, Any] = {"status": "unavailable" if reasons else "ok", "reasons": reasons}
        if self._is_readiness:
            document["degraded"] = self._state.is_degraded
            document |= engine_document(self._state)
        headers = {**JSON_HEADERS, "retry-after": "1"} if reasons else JSON_HEADERS
        await _send(send, 503 if reasons else 200, headers, msgspec.json.encode(document))


_HINTS = {
    "/v1/responses": f"use {CHAT}",
    "/v1/embeddings": "this server has no embedding model",
    "/v1/engines": f"use {TEXT} with 'model' in the body",
}


def _hint(path: str) -> str:
    """What to tell the caller of an unknown path: the route that was most likely meant."""
    for prefix, hint in _HINTS.items():
        if path == prefix or path.startswith(prefix + "/"):
            return hint
    for known in (CHAT, TEXT, MODELS):
        if path.endswith(known.removeprefix("/v1")):
            return f"use {known}"
    return f"the routes are {CHAT}, {TEXT} and {MODELS}"


async def _http_exception(request: Request, error: Exception) -> Response:
    """The answer for an error of the router, 404 or 405, in the envelope."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    refusal: GatewayError
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        refusal = MethodNotAllowed(
            f"{request.method} is not allowed on {path[:200]}; use {allowed}.", headers={"allow": allowed}
        )
    else:
        refusal = NotFound(f"There is no {path[:200]}; {_hint(path)}.")
    return _error_response(request, refusal)


async def _gateway_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)
    return _error_response(request, error)


def _error_response(request: Request, error: GatewayError) -> Response:
    headers = {**JSON_HEADERS, **error.headers()}
    return Response(error.encode(request.scope[REQUEST_ID_KEY]), error.status, headers=headers)
