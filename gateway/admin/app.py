"""The admin listener: teams, keys, tiers, quotas, reports, status and metrics, for operators and the CLI.

Every path but /livez and /readyz needs `Authorization: Bearer <admin token>`, on loopback too. A call without the token
is refused before its body is read, and its connection is closed. Bodies are strict: the refusal of an unknown field
names the nearest valid name. Errors have OpenAI's envelope.
"""

import hmac

from prometheus_client import CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.admin.answers import EXCEPTION_HANDLERS, error_response
from gateway.admin.answers import Conflict as Conflict
from gateway.admin.calls import BODY_BYTES_MAX, AdminCalls
from gateway.admin.reports import ReportCalls
from gateway.admin.state import AdminState as AdminState
from gateway.errors import Unauthenticated
from gateway.listen.body import discard_body
from gateway.refusals import LogRefusals
from tenants.database import sqlite_path

OPEN_PATHS = frozenset({"/livez", "/readyz"})
# How long a refused caller may go on sending its body. If we closed at once, the caller could lose the answer.
LINGER_SECONDS = 1.0


def render_metrics(registry: CollectorRegistry) -> bytes:
    """The metrics of a registry in Prometheus' text format, for `AdminState.metrics`."""
    return generate_latest(registry)


def admin_app(state: AdminState) -> Starlette:
    """The ASGI app of the admin API on `state`."""
    admin = AdminCalls(state)
    of_reports = ReportCalls(state)
    v1 = "/admin/v1"
    watch = [] if state.refusals is None else [Middleware(LogRefusals, refusals=state.refusals, listener="admin")]
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
            Route(f"{v1}/reports/usage", of_reports.usage),
            Route(f"{v1}/reports/fairness", of_reports.fairness),
            Route(f"{v1}/status", admin.status),
            Route(f"{v1}/settings", admin.settings),
            Route(f"{v1}/audit", admin.audit),
        ],
        middleware=[*watch, Middleware(_RequireToken, token=state.token)],
        exception_handlers=EXCEPTION_HANDLERS,
    )
    app.state.store_path = sqlite_path(state.database.url)
    app.router.redirect_slashes = False  # scripts do not follow redirects
    return app


class _RequireToken:
    """Lets a call through only with the admin token.

    It decides before routing, so a stranger cannot learn which paths exist.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._is_allowed(scope):
            await self._app(scope, receive, send)
            return
        await discard_body(receive, max_bytes=BODY_BYTES_MAX, timeout_seconds=LINGER_SECONDS)
        error = Unauthenticated(
            "This call needs the admin token: Authorization: Bearer TOKEN.",
            code="invalid_admin_token",
            headers={"connection": "close"},
        )
        await error_response(error)(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1:
            return False
        kind, _, token = given[0].strip().partition(b" ")
        return hmac.compare_digest(token.strip(), self._token) and kind.lower() == b"bearer"
