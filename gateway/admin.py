"""The admin listener: teams, keys, tiers, quotas, reports, status and metrics, for operators and the CLI.

Every path but /livez and /readyz needs `Authorization: Bearer <admin token>`, on loopback and for /metrics too. Bodies
are strict: an unknown field is refused with the nearest valid name. Errors are OpenAI's envelope. Each write is one
transaction with its audit row, and reloads the snapshot before it answers: the next request already sees it.
"""

import asyncio
import contextlib
import hmac
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway import admin_schema as schema
from gateway.body import read_body
from gateway.errors import (
    BadRequest,
    ClientGone,
    GatewayError,
    MethodNotAllowed,
    NotFound,
    Unauthenticated,
    Unavailable,
)
from tenants import audit, keys, reports, teams, tiers
from tenants import errors as tenant_errors
from tenants.clock import wall_clock_us
from tenants.database import STORE_ERRORS, Database
from tenants.key_format import redact
from tenants.periods import parse_moment, parse_period
from tenants.snapshot import SnapshotHolder

_log = logging.getLogger("terazi.admin")

BODY_BYTES_MAX = 64 * 1024
BODY_TIMEOUT_SECONDS = 10.0
FLUSH_TIMEOUT_SECONDS = 2.0
TOKEN_LEN_MIN = 16
OPEN_PATHS = frozenset({"/livez", "/readyz"})
ACTOR = "admin"


def _no_server() -> dict[str, Any]:
    return {"ready": False, "reasons": ["no server runs"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminState:
    """What the admin app stands on.

    `status` returns one JSON-able mapping with at least `ready` (bool); `/readyz` shows `ready`, `degraded` and
    `reasons` of it. `flush` waits until the ledger's closed rows are in SQL, so a report sees the request before it.
    """

    token: str
    database: Database
    snapshot_holder: SnapshotHolder
    status: Callable[[], Mapping[str, Any]] = _no_server
    metrics: Callable[[], bytes] = bytes  # nothing
    flush: Callable[[], Awaitable[None]] | None = None
    now_us: Callable[[], int] = wall_clock_us

    def __post_init__(self) -> None:
        if len(self.token) < TOKEN_LEN_MIN:
            raise ValueError(f"the admin token must have at least {TOKEN_LEN_MIN} characters")

    def __repr__(self) -> str:
        return "AdminState()"  # it holds the token


class Conflict(GatewayError):
    """The name is taken, or the state has moved on."""

    status = 409
    type = "conflict_error"
    default_code = "conflict"


def render_metrics(registry: CollectorRegistry) -> bytes:
    """A registry in Prometheus' text format, for `AdminState.metrics`."""
    return generate_latest(registry)


def admin_app(state: AdminState) -> Starlette:
    """The admin API."""
    admin = _Admin(state)
    v1 = "/admin/v1"
    app = Starlette(
        routes=[
            Route("/livez", admin.livez),
            Route("/readyz", admin.readyz),
            Route("/metrics", admin.metrics),
            Route(f"{v1}/teams", admin.create_team, methods=["POST"]),
            Route(f"{v1}/teams", admin.list_teams),
            Route(f"{v1}/teams/{{name}}", admin.show_team),
            Route(f"{v1}/teams/{{name}}", admin.update_team, methods=["PATCH"]),
            Route(f"{v1}/teams/{{name}}/keys", admin.create_key, methods=["POST"]),
            Route(f"{v1}/teams/{{name}}/keys", admin.list_team_keys),
            Route(f"{v1}/teams/{{name}}/quota", admin.show_quota),
            Route(f"{v1}/teams/{{name}}/quota", admin.set_quota, methods=["PUT"]),
            Route(f"{v1}/keys", admin.list_keys),
            Route(f"{v1}/keys/{{key_id}}/revoke", admin.revoke_key, methods=["POST"]),
            Route(f"{v1}/tiers", admin.list_tiers),
            Route(f"{v1}/tiers/{{name}}", admin.show_tier),
            Route(f"{v1}/tiers/{{name}}", admin.update_tier, methods=["PATCH"]),
            Route(f"{v1}/reports/usage", admin.usage),
            Route(f"{v1}/reports/fairness", admin.fairness),
            Route(f"{v1}/status", admin.status),
            Route(f"{v1}/audit", admin.audit),
        ],
        middleware=[Middleware(_RequireToken, token=state.token)],
        exception_handlers={
            GatewayError: _answer_gateway_error,
            tenant_errors.TenantError: _answer_tenant_error,
            HTTPException: _answer_http_exception,
            ClientGone: _answer_client_gone,
            **dict.fromkeys(STORE_ERRORS, _answer_store_error),
            Exception: _answer_bug,
        },
    )
    app.router.redirect_slashes = False  # a redirect is no answer that a script understands
    return app


class _RequireToken:
    """Lets a call through only with the admin token; decides before routing, so unknown paths tell nothing."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._is_allowed(scope):
            await self._app(scope, receive, send)
            return
        error = Unauthenticated(
            "This call needs the admin token: Authorization: Bearer TOKEN.", code="invalid_admin_token"
        )
        await _error_response(error)(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1:
            return False
        kind, _, token = given[0].strip().partition(b" ")
        return hmac.compare_digest(token.strip(), self._token) and kind.lower() == b"bearer"


def _json(content: Any, status: int = 200) -> Response:
    headers = {"x-request-id": uuid4().hex, "cache-control": "no-store"}
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def _error_response(error: GatewayError) -> Response:
    request_id = uuid4().hex
    headers = error.headers() | {"x-request-id": request_id, "cache-control": "no-store"}
    return Response(error.encode(request_id), error.status, headers, "application/json")


async def _answer_gateway_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)
    return _error_response(error)


async def _answer_tenant_error(_: Request, error: Exception) -> Response:
    match error:
        case tenant_errors.Invalid():
            return _error_response(BadRequest(error.message, code=error.code, param=error.param))
        case tenant_errors.NotFound():
            return _error_response(NotFound(error.message, code=error.code))
        case tenant_errors.Conflict():
            return _error_response(Conflict(error.message, code=error.code))
        case tenant_errors.StoreUnavailable():
            return _error_response(Unavailable(error.message, code=error.code))
    raise error


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        # Starlette names the methods of the first route with this path; ours have one route for each method.
        same_path = [route for route in request.app.routes if route.path_regex.match(request.url.path)]
        allow = ", ".join(sorted(set().union(*(route.methods for route in same_path))))
        return _error_response(MethodNotAllowed(f"{request.method} is not allowed here.", headers={"allow": allow}))
    return _error_response(NotFound(f"There is no {redact(request.url.path)!r} on the admin listener."))


async def _answer_store_error(_: Request, error: Exception) -> Response:
    _log.error("an admin call met a store that does not answer: %s", error)
    return _error_response(Unavailable("The database does not answer now.", code="store_unavailable"))


async def _answer_client_gone(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # nobody is there to read it


async def _answer_bug(_: Request, __: Exception) -> Response:
    return _error_response(GatewayError("The server has failed; its log says why."))  # the server logs the traceback


class _Admin:
    """The handlers; each reads its input, does one thing, and shows the result."""

    def __init__(self, state: AdminState) -> None:
        self._state = state

    # --- probes and metrics -------------------------------------------------------------------------------------

    async def livez(self, _: Request) -> Response:
        return _json({"status": "ok"})

    async def readyz(self, _: Request) -> Response:
        status = self._state.status()
        shown = {name: status[name] for name in ("ready", "degraded", "reasons") if name in status}
        return _json(shown, 200 if status["ready"] else 503)

    async def metrics(self, _: Request) -> Response:
        return Response(self._state.metrics(), media_type=CONTENT_TYPE_LATEST)

    async def status(self, _: Request) -> Response:
        return _json(self._state.status())

    # --- reading ------------------------------------------------------------------------------------------------

    async def list_teams(self, request: Request) -> Response:
        query = _query(request, "archived")
        if query.get("archived", "false") not in ("true", "false"):
            raise BadRequest("archived must be true or false.", param="archived")
        async with self._state.database.session() as connection:
            found = await teams.list_teams(connection, with_archived=query.get("archived") == "true")
        return _json(schema.list_record([schema.team_record(team) for team in found]))

    async def show_team(self, request: Request) -> Response:
        async with self._state.database.session() as connection:
            return _json(schema.team_record(await teams.get_team(connection, request.path_params["name"])))

    async def show_quota(self, request: Request) -> Response:
        async with self._state.database.session() as connection:
            return _json(schema.quota_record(await teams.get_team(connection, request.path_params["name"])))

    async def list_keys(self, request: Request) -> Response:
        return await self._keys_of(_query(request, "team").get("team"))

    async def list_team_keys(self, request: Request) -> Response:
        return await self._keys_of(request.path_params["name"])

    async def _keys_of(self, team: str | None) -> Response:
        async with self._state.database.session() as connection:
            found = await keys.list_keys(connection, team)
        now_us = self._state.now_us()
        return _json(schema.list_record([schema.key_record(key, now_us) for key in found]))

    async def list_tiers(self, _: Request) -> Response:
        async with self._state.database.session() as connection:
            return _json(schema.list_record([schema.tier_record(tier) for tier in await tiers.list_tiers(connection)]))

    async def show_tier(self, request: Request) -> Response:
        async with self._state.database.session() as connection:
            return _json(schema.tier_record(await tiers.get_tier(connection, request.path_params["name"])))

    async def audit(self, request: Request) -> Response:
        text = _query(request, "limit").get("limit", "100")
        if not (text.isascii() and text.isdecimal() and 1 <= int(text[:6]) <= 1000):
            raise BadRequest("limit must be between 1 and 1000.", param="limit")
        async with self._state.database.session() as connection:
            return _json(schema.list_record(await audit.latest(connection, int(text))))

    # --- reports ------------------------------------------------------------------------------------------------

    async def usage(self, request: Request) -> Response:
        query = _query(request, "from", "to", "by", "team")
        period = parse_period(query.get("from"), query.get("to"), self._state.now_us())
        by = [name for name in query.get("by", "team").split(",") if name]
        await self._flush()
        async with self._state.database.session() as connection:
            team = query.get("team")
            if team is not None:
                await teams.get_team(connection, team)
            return _json(await reports.usage_report(connection, period, by, team=team))

    async def fairness(self, request: Request) -> Response:
        query = _query(request, "from", "to")
        period = parse_period(query.get("from"), query.get("to"), self._state.now_us())
        await self._flush()
        async with self._state.database.session() as connection:
            return _json(await reports.fairness_report(connection, period))

    async def _flush(self) -> None:
        if self._state.flush is not None:
            with contextlib.suppress(TimeoutError):  # the database is slow or away; the query will say
                async with asyncio.timeout(FLUSH_TIMEOUT_SECONDS):
                    await self._state.flush()

    # --- writing ------------------------------------------------------------------------------------------------

    async def create_team(self, request: Request) -> Response:
        body = schema.decode(await _body(request), schema.TeamCreate)

        async def create(connection: AsyncConnection, now_us: int) -> dict[str, Any]:
            team = await teams.create_team(connection, body.name, body.tier, at_us=now_us, actor=ACTOR)
            return schema.team_record(team)

        return _json(await self._write(create), 201)

    async def update_team(self, request: Request) -> Response:
        changes = schema.changes_of(schema.decode(await _body(request), schema.TeamUpdate))

        async def update(connection: AsyncConnection, now_us: int) -> dict[str, Any]:
            team = await teams.update_team(
                connection,
                request.path_params["name"],
                tier=changes.get("tier"),
                new_name=changes.get("name"),
                is_archived=changes.get("archived"),
                at_us=now_us,
                actor=ACTOR,
            )
            return schema.team_record(team)

        return _json(await self._write(update))

    async def set_quota(self, request: Request) -> Response:
        limits = schema.decode_object(await _body(request))
        if not limits:
            raise BadRequest("Give at least one limit; null makes it unlimited.", code="empty_change")

        async def update(connection: AsyncConnection, now_us: int) -> dict[str, Any]:
            name = request.path_params["name"]
            return schema.quota_record(await teams.set_quota(connection, name, limits, at_us=now_us, actor=ACTOR))

        return _json(await self._write(update))

    async def update_tier(self, request: Request) -> Response:
        changes = schema.changes_of(schema.decode(await _body(request), schema.TierUpdate))

        async def update(connection: AsyncConnection, now_us: int) -> dict[str, Any]:
            name = request.path_params["name"]
            return schema.tier_record(await tiers.update_tier(connection, name, changes, at_us=now_us, actor=ACTOR))

        return _json(await self._write(update))

    async def create_key(self, request: Request) -> Response:
        body = schema.decode(await _body(request), schema.KeyCreate)
        expires_at_us = None if body.expires_at is None else parse_moment(body.expires_at, "expires_at")

        async def create(connection: AsyncConnection, now_us: int) -> dict[str, Any]:
            key, text = await keys.create_key(
                connection,
                request.path_params["name"],
                self._state.snapshot_holder.pepper,
                name=body.name,
                expires_at_us=expires_at_us,
                at_us=now_us,
                actor=ACTOR,
            )
            return schema.key_record(key, now_us) | {"key": text}

        return _json(await self._write(create), 201)

    async def revoke_key(self, request: Request) -> Response:
        schema.decode(await _body(request), schema.EmptyBody)

        async def revoke(connection: AsyncConnection, now_us: int) -> dict[str, Any]:
            key = await keys.revoke_key(connection, request.path_params["key_id"], at_us=now_us, actor=ACTOR)
            return schema.key_record(key, now_us)

        return _json(await self._write(revoke))

    async def _write(self, change: Callable[[AsyncConnection, int], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
        """One transaction, then the snapshot: nobody is told of a change that the next request would not see."""
        async with self._state.database.begin_immediate() as connection:
            record = await change(connection, self._state.now_us())
        await self._state.snapshot_holder.reload()
        return record


async def _body(request: Request) -> bytes:
    return await read_body(
        request.receive, request.headers, max_bytes=BODY_BYTES_MAX, timeout_seconds=BODY_TIMEOUT_SECONDS
    )


def _query(request: Request, *known: str) -> dict[str, str]:
    """The query's parameters. Raises BadRequest for one that is unknown or given twice."""
    pairs = request.query_params.multi_items()
    found = dict(pairs)
    schema.check_names(found, known, "parameter")
    if len(found) != len(pairs):
        raise BadRequest("A query parameter is given twice.", code="invalid_value")
    return found
