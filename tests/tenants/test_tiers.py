"""Tiers in the store."""

import pytest

from tenants import tiers
from tenants.errors import Invalid
from tests.support.tenants.stores import Store

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("field", sorted(tiers.TIER_BOUNDS))
async def test_a_tiers_numbers_stay_within_their_bounds_in_code_and_in_sql(store: Store, field: str) -> None:
    from sqlalchemy import update
    from sqlalchemy.exc import IntegrityError

    from tenants import tables

    low, high = tiers.TIER_BOUNDS[field]
    async with store.database.begin_immediate() as connection:
        for value in (low, high):
            tier = await tiers.update_tier(connection, "gold", {field: value}, at_us=1, actor="test")
            assert getattr(tier, field) == value
        for value in (low - 1, high + 1):
            with pytest.raises(Invalid, match=f"{field} must be between"):
                await tiers.update_tier(connection, "gold", {field: value}, at_us=1, actor="test")
    with pytest.raises(IntegrityError):
        async with store.database.begin_immediate() as connection:
            await connection.execute(update(tables.tiers).values({field: low - 1}))
