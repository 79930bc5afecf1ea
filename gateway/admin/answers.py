"""Answers of the admin API: JSON that nobody caches. Every failure has OpenAI's envelope."""

import logging
from typing import Any
from uuid import uuid4

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from gateway.errors import BadRequest, ClientGone, GatewayError, MethodNotAllowed, NotFound, Unavailable
from tenants import errors as tenant_errors
from tenants.database import STORE_ERRORS
from tenants.disk import disk_trouble
from tenants.key_format import redact

_log = logging.getLogger("terazi.admin")


class Conflict(GatewayError):
    """The name is taken, or the state has changed meanwhile."""

    status = 409
    type = "conflict_error"
    default_code = "conflict"


def json_response(content: Any, status: int = 200) -> Response:
    """A JSON answer with headers that forbid caching."""
    headers = {"x-request-id": uuid4().hex, "cache-control": "no-store"}
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def error_response(error: GatewayError) -> Response:
    """The answer for a refusal: its status, its headers and the envelope."""
    request_id = uuid4().hex
    headers = error.headers() | {"x-request-id": request_id, "cache-control": "no-store"}
    return Response(error.encode(request_id), error.status, headers, "application/json")


async def answer_gateway_error(_: Request, error: Exception) -> Response:
    """The answer for a GatewayError that a call raised."""
    assert isinstance(error, GatewayError)
    return error_response(error)


async def answer_tenant_error(_: Request, error: Exception) -> Response:
    """The answer for a TenantError, with the status of its kind. Raises an error of another kind again."""
    match error:
        case tenant_errors.Invalid():
            return error_response(BadRequest(error.message, code=error.code, param=error.param))
        case tenant_errors.NotFound():
            return error_response(NotFound(error.message, code=error.code))
        case tenant_errors.Conflict():
            return error_response(Conflict(error.message, code=error.code))
        case tenant_errors.StoreUnavailable():
            return error_response(Unavailable(error.message, code=error.code))
    raise error


async def answer_http_exception(request: Request, error: Exception) -> Response:
    """The answer for an error of the router: 404 or 405."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        # We have one route for each method, and Starlette names only the methods of the first route with this path.
        same_path = [route for route in request.app.routes if route.path_regex.match(request.url.path)]
        allow = ", ".join(sorted(set().union(*(route.methods for route in same_path))))
        return error_response(MethodNotAllowed(f"{request.method} is not allowed here.", headers={"allow": allow}))
    return error_response(NotFound(f"There is no {redact(request.url.path)!r} on the admin listener."))


async def answer_store_error(request: Request, error: Exception) -> Response:
    """The answer when the database is away, full or broken."""
    _log.error("an admin call met a store that does not answer: %s", error)
    # The caller is an operator, so the answer may name the database's path.
    path = request.app.state.store_path
    message = disk_trouble(error, path) or "The database does not answer now."
    return error_response(Unavailable(message, code="store_unavailable"))


async def answer_client_gone(_: Request, __: Exception) -> Response:
    """The answer when the caller has left."""
    return Response(status_code=499)  # nobody is there to read it


async def answer_bug(_: Request, __: Exception) -> Response:
    """The answer for a bug. It says nothing about the bug."""
    return error_response(GatewayError("The server has failed; its log says why."))  # the server logs the traceback


EXCEPTION_HANDLERS: dict[Any, Any] = {
    GatewayError: answer_gateway_error,
    tenant_errors.TenantError: answer_tenant_error,
    HTTPException: answer_http_exception,
    ClientGone: answer_client_gone,
    **dict.fromkeys(STORE_ERRORS, answer_store_error),
    Exception: answer_bug,
}
