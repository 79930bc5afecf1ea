"""The admin API's calls: each reads its input, does one thing, and shows the result.

A call that writes does so in one transaction, with the audit row. It reloads the snapshot before it answers, so the
next request sees the change.
"""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.requests import Request
from starlette.responses import Response

from gateway.admin import schema
from gateway.admin.answers import json_response
from gateway.admin.pauses import MaxPauses
from gateway.admin.state import AdminState, query_of
from gateway.errors import BadRequest
from gateway.listen.body import read_body
from policies.tiers import Tier
from tenants import audit, keys, teams, tiers
from tenants.key_format import redact
from tenants.reports.periods import parse_moment
from tenants.teams import Team

BODY_BYTES_MAX = 64 * 1024
BODY_TIMEOUT_SECONDS = 10.0
ACTOR = "admin"

Written = TypeVar("Written")


READINESS = ("ready", "degraded", "reasons", "engine_failure", "simulated")  # what /readyz shows of the status


class AdminCalls:
    """The handlers of all calls but reports."""

    def __init__(self, state: AdminState) -> None:
        self._state = state

    # --- probes and metrics -------------------------------------------------------------------------------------

    async def livez(self, _: Request) -> Response:
        return json_response({"status": "ok"})

    async def readyz(self, _: Request) -> Response:
        status = self._state.status()
        shown = {name: status[name] for name in READINESS if name in status}
        return json_response(shown, 200 if status["ready"] else 503)

    async def metrics(self, _: Request) -> Response:
        return Response(self._state.metrics(), media_type=CONTENT_TYPE_LATEST)

    async def status(self, _: Request) -> Response:
        return json_response(self._state.status())

    async def settings(self, _: Request) -> Response:
        return json_response({"settings": list(self._state.settings)})

    # --- reading ------------------------------------------------------------------------------------------------

    async def list_teams(self, request: Request) -> Response:
        query = query_of(request, "archived")
        archived = query.get("archived", "false")
        if archived not in ("true", "false"):
            raise BadRequest(f"archived must be true or false, not {redact(archived[:80])!r}.", param="archived")
        async with self._state.database.session() as connection:
            found = await teams.list_teams(connection, with_archived=archived == "true")
        pauses = self._pauses()
        return json_response(schema.list_record([self._team(team, pauses) for team in found]))

    async def show_team(self, request: Request) -> Response:
        async with self._state.database.session() as connection:
            return json_response(self._team(await teams.get_team(connection, request.path_params["name"])))

    async def show_quota(self, request: Request) -> Response:
        async with self._state.database.session() as connection:
            return json_response(schema.quota_record(await teams.get_team(connection, request.path_params["name"])))

    async def list_keys(self, request: Request) -> Response:
        return await self._keys_of(query_of(request, "team").get("team"))

    async def list_team_keys(self, request: Request) -> Response:
        return await self._keys_of(request.path_params["name"])

    async def _keys_of(self, team: str | None) -> Response:
        async with self._state.database.session() as connection:
            found = await keys.list_keys(connection, team)
        now_us = self._state.now_us()
        return json_response(schema.list_record([schema.key_record(key, now_us) for key in found]))

    async def list_tiers(self, _: Request) -> Response:
        async with self._state.database.session() as connection:
            found = await tiers.list_tiers(connection)
        pauses = self._pauses()
        return json_response(schema.list_record([self._tier(tier, pauses) for tier in found]))

    async def show_tier(self, request: Request) -> Response:
        async with self._state.database.session() as connection:
            return json_response(self._tier(await tiers.get_tier(connection, request.path_params["name"])))

    def _pauses(self) -> MaxPauses:
        return MaxPauses(self._state.hello(), self._state.snapshot_holder.current.teams)

    def _team(self, team: Team, pauses: MaxPauses | None = None) -> dict[str, Any]:
        return schema.team_record(team) | (pauses or self._pauses()).of_team(team.team_id).describe()

    def _tier(self, tier: Tier, pauses: MaxPauses | None = None) -> dict[str, Any]:
        return schema.tier_record(tier) | (pauses or self._pauses()).of_tier(tier.name).describe()

    def _moved(self, before: MaxPauses) -> dict[str, Any]:
        """Whose maximum pause a change has moved: one table of teams bounds everybody's."""
        return {"max_pause_moves": self._pauses().moved_from(before)}

    async def audit(self, request: Request) -> Response:
        text = query_of(request, "limit").get("limit", "100")
        if not (text.isascii() and text.isdecimal() and 1 <= int(text[:6]) <= 1000):
            raise BadRequest(f"limit must be a whole number from 1 to 1000, not {redact(text[:80])!r}.", param="limit")
        async with self._state.database.session() as connection:
            return json_response(schema.list_record(await audit.latest(connection, int(text))))

    # --- writing ------------------------------------------------------------------------------------------------

    async def create_team(self, request: Request) -> Response:
        body = schema.decode(await _body(request), schema.TeamCreate)

        async def create(connection: AsyncConnection, now_us: int) -> Team:
            return await teams.create_team(connection, body.name, body.tier, at_us=now_us, actor=ACTOR)

        before = self._pauses()
        team = await self._write(create)
        return json_response(self._team(team) | self._moved(before), 201)

    async def update_team(self, request: Request) -> Response:
        changes = schema.changes_of(schema.decode(await _body(request), schema.TeamUpdate))

        async def update(connection: AsyncConnection, now_us: int) -> Team:
            return await teams.update_team(
                connection,
                request.path_params["name"],
                tier=changes.get("tier"),
                new_name=changes.get("name"),
                is_archived=changes.get("archived"),
                at_us=now_us,
                actor=ACTOR,
            )

        before = self._pauses()
        team = await self._write(update)
        return json_response(self._team(team) | self._moved(before))

    async def set_quota(self, request: Request) -> Response:
        limits = schema.decode_object(await _body(request))
        if not limits:
            raise BadRequest("Give at least one limit; null makes it unlimited.", code="empty_change")

        async def update(connection: AsyncConnection, now_us: int) -> dict[str, Any]:
            name = request.path_params["name"]
            return schema.quota_record(await teams.set_quota(connection, name, limits, at_us=now_us, actor=ACTOR))

        return json_response(await self._write(update))

    async def update_tier(self, request: Request) -> Response:
        changes = schema.changes_of(schema.decode(await _body(request), schema.TierUpdate))

        async def update(connection: AsyncConnection, now_us: int) -> Tier:
            name = request.path_params["name"]
            return await tiers.update_tier(connection, name, changes, at_us=now_us, actor=ACTOR)

        before = self._pauses()
        tier = await self._write(update)
        return json_response(self._tier(tier) | self._moved(before))

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

        return json_response(await self._write(create), 201)

    async def revoke_key(self, request: Request) -> Response:
        schema.decode(await _body(request), schema.EmptyBody)

        async def revoke(connection: AsyncConnection, now_us: int) -> dict[str, Any]:
            key = await keys.revoke_key(connection, request.path_params["key_id"], at_us=now_us, actor=ACTOR)
            return schema.key_record(key, now_us)

        return json_response(await self._write(revoke))

    async def _write(self, change: Callable[[AsyncConnection, int], Awaitable[Written]]) -> Written:
        """Run `change` in one write transaction, then reload the snapshot. Raises TenantError.

        The reload comes before the answer, so a caller who is told of a change knows that the next request sees it.
        """
        async with self._state.database.begin_immediate() as connection:
            written = await change(connection, self._state.now_us())
        await self._state.snapshot_holder.reload()
        return written


async def _body(request: Request) -> bytes:
    return await read_body(
        request.receive, request.headers, max_bytes=BODY_BYTES_MAX, timeout_seconds=BODY_TIMEOUT_SECONDS
    )
