"""Teams and their quotas in the store. Each team has a project `default`, to which its keys belong."""

from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Row, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from tenants import audit, tables
from tenants.clock import iso
from tenants.errors import Conflict, NotFound, how_to_restore
from tenants.key_format import redact
from tenants.names import check_name, is_name
from tenants.quotas import Limits, limits_from
from tenants.tiers import get_tier

DEFAULT_PROJECT = "default"
GONE = "gone"  # in reports, the status of a team that the store does not know


@dataclass(frozen=True, slots=True)
class Team:
    """One team as the admin API shows it."""

    team_id: int
    name: str
    tier: str
    limits: Limits
    created_at_us: int
    archived_at_us: int | None
    num_keys: int  # keys that are not revoked; 0 when the team is archived


def _query() -> Any:
    t = tables
    num_keys = (
        select(func.count())
        .select_from(t.api_keys.join(t.projects))
        .where(t.projects.c.team_id == t.teams.c.id, t.api_keys.c.revoked_at_us.is_(None))
        .scalar_subquery()
    )
    return select(t.teams, *t.LIMIT_COLUMNS, num_keys.label("num_keys")).select_from(t.teams.outerjoin(t.quotas))


def _team(row: Row[Any]) -> Team:
    values = row._mapping
    return Team(
        team_id=values["id"],
        name=values["name"],
        tier=values["tier"],
        limits=tables.limits_of(values),
        created_at_us=values["created_at_us"],
        archived_at_us=values["archived_at_us"],
        num_keys=values["num_keys"] if values["archived_at_us"] is None else 0,
    )


async def list_teams(connection: AsyncConnection, *, with_archived: bool = False) -> list[Team]:
    """The teams by name; archived teams only with `with_archived`."""
    query = _query().order_by(tables.teams.c.name)
    if not with_archived:
        query = query.where(tables.teams.c.archived_at_us.is_(None))
    return [_team(row) for row in await connection.execute(query)]


async def get_team(connection: AsyncConnection, name: str) -> Team:
    """One team. Raises NotFound."""
    row = None
    if is_name(name):
        row = (await connection.execute(_query().where(tables.teams.c.name == name))).one_or_none()
    if row is None:
        raise NotFound(f"There is no team {redact(name)!r}.", code="team_not_found")
    return _team(row)


async def team_statuses(connection: AsyncConnection) -> dict[int, str]:
    """The present status of every team, `active` or `archived`, by team id."""
    rows = await connection.execute(select(tables.teams.c.id, tables.teams.c.archived_at_us))
    return {row[0]: "active" if row[1] is None else "archived" for row in rows}


async def _name_taken(connection: AsyncConnection, name: str) -> Conflict | None:
    """The error when a team has this name already, else None.

    An archived team keeps its name, since it may come back.
    """
    query = select(tables.teams.c.archived_at_us).where(tables.teams.c.name == name)
    row = (await connection.execute(query)).one_or_none()
    if row is None:
        return None
    if row[0] is None:
        return Conflict(f"There is already a team {name!r}.", code="team_exists")
    return Conflict(
        f"There is already a team {name!r}, archived since {iso(row[0])}. Restore it: {how_to_restore(name)}; "
        f"or free its name: terazi team set {name} --name NEW",
        code="team_archived",
    )


async def create_team(connection: AsyncConnection, name: str, tier: str, *, at_us: int, actor: str) -> Team:
    """Make a team with its default project.

    Raises Invalid for a wrong name, NotFound for an unknown tier, Conflict when the name is taken.
    """
    check_name("Team", name)
    await get_tier(connection, tier)
    if (taken := await _name_taken(connection, name)) is not None:
        raise taken
    created = await connection.execute(insert(tables.teams).values(name=name, tier=tier, created_at_us=at_us))
    key = created.inserted_primary_key
    assert key is not None
    await connection.execute(insert(tables.projects).values(team_id=key[0], name=DEFAULT_PROJECT, created_at_us=at_us))
    await audit.record(connection, at_us=at_us, actor=actor, action="team.create", target=name, detail={"tier": tier})
    return await get_team(connection, name)


async def update_team(
    connection: AsyncConnection,
    name: str,
    *,
    tier: str | None = None,
    new_name: str | None = None,
    is_archived: bool | None = None,
    at_us: int,
    actor: str,
) -> Team:
    """Move a team to another tier, rename it, archive it or restore it. Its id and history stay.

    Raises NotFound for an unknown team or tier, Invalid for a wrong name, Conflict when the new name is taken.
    """
    team = await get_team(connection, name)
    values: dict[str, Any] = {}
    if tier is not None:
        await get_tier(connection, tier)
        values["tier"] = tier
    if new_name is not None:
        values["name"] = check_name("Team", new_name)
        if new_name != team.name and (taken := await _name_taken(connection, new_name)) is not None:
            raise taken
    if is_archived is not None and is_archived != (team.archived_at_us is not None):
        values["archived_at_us"] = at_us if is_archived else None
    if not values:
        return team
    await connection.execute(update(tables.teams).where(tables.teams.c.id == team.team_id).values(values))
    await audit.record(connection, at_us=at_us, actor=actor, action="team.update", target=name, detail=values)
    return await get_team(connection, values.get("name", name))


async def set_quota(connection: AsyncConnection, name: str, limits: dict[str, Any], *, at_us: int, actor: str) -> Team:
    """Replace the given limits of a team. None removes a limit; limits that are not named stay.

    Raises NotFound for an unknown team, Invalid for an unknown limit or a wrong value.
    """
    team = await get_team(connection, name)
    values = asdict(limits_from(limits, team.limits)) | {"updated_at_us": at_us}
    changed = await connection.execute(
        update(tables.quotas).where(tables.quotas.c.team_id == team.team_id).values(values)
    )
    if changed.rowcount == 0:
        await connection.execute(insert(tables.quotas).values(team_id=team.team_id, **values))
    await audit.record(connection, at_us=at_us, actor=actor, action="quota.set", target=name, detail={"limits": limits})
    return await get_team(connection, name)
