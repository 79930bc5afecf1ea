"""API keys in the store. A key is shown once, when it is made, and a revoked key stays revoked. No secret is stored."""

import re
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from tenants import audit, key_format, tables
from tenants.clock import iso
from tenants.errors import Conflict, Invalid, NotFound, how_to_restore
from tenants.names import check_name
from tenants.pepper import Pepper
from tenants.teams import DEFAULT_PROJECT, get_team

_PUBLIC_ID = re.compile(rf"[0-9A-Za-z]{{{key_format.PUBLIC_LEN}}}", re.ASCII)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key as the admin sees it: no secret, no hash."""

    key_id: int
    public_id: str
    name: str
    project: str
    team: str
    created_at_us: int
    expires_at_us: int | None
    revoked_at_us: int | None
    is_team_archived: bool


def _query() -> Any:
    t = tables
    return select(
        t.api_keys.c.id,
        t.api_keys.c.public_id,
        t.api_keys.c.name,
        t.projects.c.name.label("project"),
        t.teams.c.name.label("team"),
        t.api_keys.c.created_at_us,
        t.api_keys.c.expires_at_us,
        t.api_keys.c.revoked_at_us,
        t.teams.c.archived_at_us,
    ).select_from(t.api_keys.join(t.projects).join(t.teams))


def _key(row: Row[Any]) -> ApiKey:
    values = dict(row._mapping)
    return ApiKey(key_id=values.pop("id"), is_team_archived=values.pop("archived_at_us") is not None, **values)


async def create_key(
    connection: AsyncConnection,
    team: str,
    pepper: Pepper,
    *,
    name: str = "default",
    expires_at_us: int | None = None,
    at_us: int,
    actor: str,
) -> tuple[ApiKey, str]:
    """Make a new random key of a team. Returns the key and its full text, which is kept nowhere.

    Raises NotFound for an unknown team, Conflict when the team is archived, Invalid for a wrong name or a past expiry.
    """
    owner = await get_team(connection, team)
    if owner.archived_at_us is not None:
        raise Conflict(f"Team {team!r} is archived. Restore it first: {how_to_restore(team)}", code="team_archived")
    check_name("Key", name)
    if expires_at_us is not None and expires_at_us <= at_us:
        raise Invalid(
            f"expires_at must lie in the future: it begins at {iso(expires_at_us)}, which is past (it is now "
            f"{iso(at_us)}). A date alone is its first moment in UTC, 00:00:00Z.",
            param="expires_at",
        )
    project_id = await connection.scalar(
        select(tables.projects.c.id).where(
            tables.projects.c.team_id == owner.team_id, tables.projects.c.name == DEFAULT_PROJECT
        )
    )
    key = key_format.new_key()
    await connection.execute(
        insert(tables.api_keys).values(
            public_id=key.public_id,
            project_id=project_id,
            name=name,
            pepper_id=pepper.pepper_id,
            secret_hmac=key_format.hash_secret(pepper.secret, key.secret),
            created_at_us=at_us,
            expires_at_us=expires_at_us,
        )
    )
    await audit.record(
        connection,
        at_us=at_us,
        actor=actor,
        action="key.create",
        target=key.public_id,
        detail={"team": team, "name": name, "expires_at": iso(expires_at_us)},
    )
    return await get_key(connection, key.public_id), key_format.render(key)


async def get_key(connection: AsyncConnection, public_id: str) -> ApiKey:
    """The key with this public id. Raises NotFound, also for a text that is no public id, such as a whole key."""
    row = None
    if _PUBLIC_ID.fullmatch(public_id):
        row = (await connection.execute(_query().where(tables.api_keys.c.public_id == public_id))).one_or_none()
    if row is None:
        raise NotFound(
            "There is no key with this public id: give the id that `key list` shows, not the key.", code="key_not_found"
        )
    return _key(row)


async def list_keys(connection: AsyncConnection, team: str | None = None) -> list[ApiKey]:
    """The keys of all teams, or of one team, oldest first. Raises NotFound for an unknown team."""
    query = _query().order_by(tables.api_keys.c.id)
    if team is not None:
        query = query.where(tables.teams.c.id == (await get_team(connection, team)).team_id)
    return [_key(row) for row in await connection.execute(query)]


async def revoke_key(connection: AsyncConnection, public_id: str, *, at_us: int, actor: str) -> ApiKey:
    """Revoke a key for good. Its running requests finish. A second revoke changes nothing. Raises NotFound."""
    key = await get_key(connection, public_id)
    if key.revoked_at_us is not None:
        return key
    await connection.execute(
        update(tables.api_keys).where(tables.api_keys.c.public_id == public_id).values(revoked_at_us=at_us)
    )
    await audit.record(
        connection, at_us=at_us, actor=actor, action="key.revoke", target=public_id, detail={"team": key.team}
    )
    return await get_key(connection, public_id)
