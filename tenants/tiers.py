"""Tiers in the store: read them, and change their numbers."""

from dataclasses import asdict
from typing import Any

from sqlalchemy import insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from policies.tiers import DEFAULT_TIERS, Tier
from tenants import audit, tables
from tenants.errors import Invalid, NotFound
from tenants.key_format import redact
from tenants.names import is_name

# Both bounds are included. The constraints of `tenants.tables` say the same.
TIER_BOUNDS: dict[str, tuple[int, int]] = {
    "weight": (1, 1000),
    "start_level": (0, 7),
    "starving_after_ms": (1, 86_400_000),
    "promotion_burst_grants": (0, 1000),
    "max_queue_seconds": (1, 86_400),
}


async def create_defaults(connection: AsyncConnection, at_us: int) -> None:
    """Make the three tiers of a new store."""
    await connection.execute(insert(tables.tiers), [asdict(tier) | {"updated_at_us": at_us} for tier in DEFAULT_TIERS])


async def list_tiers(connection: AsyncConnection) -> list[Tier]:
    """All tiers, heaviest first."""
    query = select(tables.tiers).order_by(tables.tiers.c.weight.desc(), tables.tiers.c.name)
    return [tables.tier_of(row, "") for row in (await connection.execute(query)).mappings()]


async def get_tier(connection: AsyncConnection, name: str) -> Tier:
    """One tier. Raises NotFound."""
    row = None
    if is_name(name):
        query = select(tables.tiers).where(tables.tiers.c.name == name)
        row = (await connection.execute(query)).mappings().one_or_none()
    if row is None:
        there_are = ", ".join(tier.name for tier in await list_tiers(connection))
        raise NotFound(f"There is no tier {redact(name)!r}; there are: {there_are}.", code="tier_not_found")
    return tables.tier_of(row, "")


async def update_tier(
    connection: AsyncConnection, name: str, changes: dict[str, int], *, at_us: int, actor: str
) -> Tier:
    """Change a tier's numbers. Running requests keep their terms.

    Raises NotFound for an unknown tier, Invalid for a number out of bounds.
    """
    before = await get_tier(connection, name)
    for field, value in changes.items():
        low, high = TIER_BOUNDS[field]
        if not low <= value <= high:
            raise Invalid(f"{field} must be between {low} and {high}, not {value}.", param=field)
    after = Tier(**(asdict(before) | changes))
    values: dict[str, Any] = asdict(after) | {"updated_at_us": at_us}
    await connection.execute(update(tables.tiers).where(tables.tiers.c.name == name).values(values))
    await audit.record(
        connection, at_us=at_us, actor=actor, action="tier.update", target=name, detail={"changes": changes}
    )
    return after
