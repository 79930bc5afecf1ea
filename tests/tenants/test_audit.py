"""The trail of who changed what."""

import pytest

from tenants import audit, tiers
from tests.support.tenants.stores import NOW_US, Store

pytestmark = pytest.mark.anyio


async def test_every_write_leaves_one_line_and_raises_the_generation(store: Store) -> None:
    await store.team("ml", concurrent=3)
    public_id, _ = await store.key("ml")
    before = (await store.holder.reload()).generation
    async with store.database.begin_immediate() as connection:
        await tiers.update_tier(connection, "gold", {"weight": 5}, at_us=NOW_US, actor="somebody")
    assert (await store.holder.reload()).generation == before + 1
    async with store.database.session() as connection:
        trail = await audit.latest(connection)
    assert [(line["action"], line["target"]) for line in trail] == [
        ("tier.update", "gold"),
        ("key.create", public_id),
        ("quota.set", "ml"),
        ("team.create", "ml"),
    ]
    assert (trail[0]["actor"], trail[0]["detail"]) == ("somebody", {"changes": {"weight": 5}})
