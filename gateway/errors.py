"""Everything the public API can refuse or fail with, as typed errors that carry their HTTP answer.

    GatewayError                    status  type                    code
    ├── BadRequest                  400     invalid_request_error   (named by the caller)
    │   └── ContextLengthExceeded   400     invalid_request_error   context_length_exceeded
    ├── Unauthenticated             401     authentication_error    invalid_api_key, key_revoked, key_expired,
    │                                                           team_archived
    ├── Forbidden                   403     permission_error        (named by the caller)
    ├── NotFound                    404     invalid_request_error   not_found, model_not_found
    ├── MethodNotAllowed            405     invalid_request_error   method_not_allowed
    ├── BodyTimeout                 408     timeout_error           body_timeout
    ├── RequestTooLarge             413     invalid_request_error   request_too_large
    ├── UnsupportedMediaType        415     invalid_request_error   unsupported_media_type
    ├── HeadersTooLarge             431     invalid_request_error   headers_too_large
    ├── Retryable                   (with an integer Retry-After >= 1; a limit of 0 has none)
    │   ├── RateLimited             429     rate_limit_error        requests, tokens, concurrent_limit
    │   ├── QuotaSpent              429     insufficient_quota      (the limit's name); x-should-retry: false
    │   ├── Overloaded              429     overloaded_error        queue_full, queue_timeout, preparation_full
    │   └── Unavailable             503     service_unavailable     starting, draining, store_unavailable, no_capacity,
    │       │                                                       preparation_full, preparation_failed
    │       └── EngineDied          503     service_unavailable     engine_unavailable
    └── EngineFailed                500     server_error            engine_error
    ClientGone                      (no answer: nobody is there to read it)

The body is OpenAI's envelope, `{"error": {"message", "type", "param", "code", "terazi": {...}}}`. Messages name the
team and the limit, never a key.
"""

import math
from collections.abc import Mapping
from typing import Any

import msgspec

DOC_URL = "docs/reference.md#errors"


class GatewayError(Exception):
    """One refusal or failure.

    `code` is the envelope's error code, `param` the field of the request that is wrong. `details` go into the
    envelope's `terazi` object, `headers` into the response.
    """

    status = 500
    type = "server_error"
    default_code = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        details: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.param = param
        self.details = dict(details or {})
        self._headers = dict(headers or {})

    def headers(self) -> dict[str, str]:
        """The response headers that this error adds, with lower-case names."""
        # A 4xx will not get better by a retry, so we say so. For a 5xx the client library decides for itself.
        hint = {"x-should-retry": "false"} if self.status < 500 else {}
        return {"x-terazi-reason": self.code, **hint, **self._headers}

    def body(self, request_id: str) -> dict[str, Any]:
        """OpenAI's error envelope with our `terazi` object."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
                "terazi": {**self.details, "request_id": request_id, "doc_url": DOC_URL},
            }
        }

    def encode(self, request_id: str) -> bytes:
        """The envelope as JSON."""
        return msgspec.json.encode(self.body(request_id))


class BadRequest(GatewayError):
    """The request as sent can never work; `param` says which field."""

    status = 400
    type = "invalid_request_error"
    default_code = "invalid_request"


class ContextLengthExceeded(BadRequest):
    """The prompt leaves no room for one generated token, in the context or in the KV pool."""

    default_code = "context_length_exceeded"


class Unauthenticated(GatewayError):
    """There is no key, or the key opens nothing. An unknown key and a wrong secret get the same words."""

    status = 401
    type = "authentication_error"
    default_code = "invalid_api_key"

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "www-authenticate": "Bearer"}


class Forbidden(GatewayError):
    """The key is good, but it does not allow this call."""

    status = 403
    type = "permission_error"
    default_code = "forbidden"


class NotFound(GatewayError):
    """No such path or model."""

    status = 404
    type = "invalid_request_error"
    default_code = "not_found"


class MethodNotAllowed(GatewayError):
    """The path exists, but not for this method."""

    status = 405
    type = "invalid_request_error"
    default_code = "method_not_allowed"


class BodyTimeout(GatewayError):
    """The client took too long to send its body."""

    status = 408
    type = "timeout_error"
    default_code = "body_timeout"

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "connection": "close"}


class RequestTooLarge(GatewayError):
    """The body, as sent or once decompressed, is over `max_body_bytes`."""

    status = 413
    type = "invalid_request_error"
    default_code = "request_too_large"


class UnsupportedMediaType(GatewayError):
    """The server does not read this content type or content encoding. The message says which it reads."""

    status = 415
    type = "invalid_request_error"
    default_code = "unsupported_media_type"

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "accept-encoding": "gzip, identity"}


class HeadersTooLarge(GatewayError):
    """Too many or too long request headers."""

    status = 431
    type = "invalid_request_error"
    default_code = "headers_too_large"


class Retryable(GatewayError):
    """A refusal that may end by itself.

    Its headers say when to try again, in whole seconds, unless no wait can help.
    """

    should_retry = True
    has_time = True  # False: no wait will help, so there is no Retry-After
    scope = "team"  # whose limit it is; "global" is the server's

    def __init__(self, message: str, *, retry_after_seconds: float = 1.0, **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.details.setdefault("scope", self.scope)
        self.retry_after_seconds = max(1, math.ceil(retry_after_seconds))

    def headers(self) -> dict[str, str]:
        seconds = self.retry_after_seconds
        when = {"retry-after": str(seconds), "retry-after-ms": str(seconds * 1000)} if self.has_time else {}
        return {
            **super().headers(),
            **when,
            "x-terazi-scope": str(self.details["scope"]),
            "x-should-retry": "true" if self.should_retry else "false",
        }


class RateLimited(Retryable):
    """A limit of the caller's own team has been reached. It frees up as requests end and as the minute passes."""

    status = 429
    type = "rate_limit_error"
    default_code = "requests"


class QuotaSpent(Retryable):
    """A limit of a calendar period has been reached. A retry before the period ends is pointless."""

    status = 429
    type = "insufficient_quota"
    default_code = "budget_exceeded"
    should_retry = False


class Overloaded(Retryable):
    """Capacity is contended: the engine's queue is full, or the request waited longer than its tier allows."""

    status = 429
    type = "overloaded_error"
    default_code = "queue_full"
    scope = "global"


class Unavailable(Retryable):
    """The server cannot serve the request now; the cause is the server's, and it will pass."""

    status = 503
    type = "service_unavailable"
    default_code = "no_capacity"
    scope = "global"


class EngineDied(Unavailable):
    """There is no connection to the engine, or the connection ended while the request ran."""

    default_code = "engine_unavailable"


class EngineFailed(GatewayError):
    """The engine reported that this one request failed."""

    status = 500
    type = "server_error"
    default_code = "engine_error"


class ClientGone(Exception):
    """The client closed its connection. The work for its request ends, and nobody gets an answer."""
