"""Teams and their quotas in the store."""

import pytest

from tenants import audit, teams, tiers
from tenants.errors import Conflict, Invalid, NotFound
from tenants.quotas import Limits
from tests.support.tenants.stores import NOW_US, Store

pytestmark = pytest.mark.anyio


@pytest.mark.case("B15")
async def test_a_taken_name_is_a_conflict_and_changes_nothing(store: Store) -> None:
    await store.team("ml")
    await store.team("other")
    with pytest.raises(Conflict, match="already a team 'ml'"):
        await store.team("ml")
    with pytest.raises(Conflict, match="already a team 'ml'"):
        async with store.database.begin_immediate() as connection:
            await teams.update_team(connection, "other", new_name="ml", at_us=NOW_US, actor="test")
    async with store.database.session() as connection:
        assert [team.name for team in await teams.list_teams(connection)] == ["ml", "other"]
        assert len(await audit.latest(connection)) == 2  # a refused write leaves no trail either


async def test_a_rename_keeps_id_keys_and_limits(store: Store) -> None:
    team_id = await store.team("vision", concurrent=3)
    await store.key("vision")
    async with store.database.begin_immediate() as connection:
        team = await teams.update_team(connection, "vision", new_name="vision-lab", at_us=NOW_US, actor="test")
    assert (team.team_id, team.name, team.num_keys, team.limits) == (team_id, "vision-lab", 1, Limits(concurrent=3))


async def test_unknown_teams_and_tiers_are_not_found(store: Store) -> None:
    await store.team("ml")
    async with store.database.begin_immediate() as connection:
        with pytest.raises(NotFound):
            await teams.get_team(connection, "nobody")
        with pytest.raises(NotFound):
            await teams.set_quota(connection, "nobody", {"concurrent": 1}, at_us=1, actor="test")
        for change in ({"tier": "platinum"},):
            with pytest.raises(NotFound, match="platinum"):
                await teams.update_team(connection, "ml", at_us=1, actor="test", **change)
        with pytest.raises(NotFound, match="platinum"):
            await tiers.update_tier(connection, "platinum", {"weight": 1}, at_us=1, actor="test")


async def test_archiving_hides_a_team_and_can_be_undone(store: Store) -> None:
    await store.team("ml")
    await store.key("ml")

    async def archive(is_archived: bool) -> teams.Team:
        async with store.database.begin_immediate() as connection:
            return await teams.update_team(connection, "ml", is_archived=is_archived, at_us=NOW_US, actor="test")

    assert ((await archive(True)).archived_at_us, (await archive(True)).num_keys) == (NOW_US, 0)
    async with store.database.session() as connection:
        assert await teams.list_teams(connection) == []
        assert len(await teams.list_teams(connection, with_archived=True)) == 1
        assert len(await audit.latest(connection)) == 3  # the second archiving changed nothing
    assert (await archive(False)).num_keys == 1


@pytest.mark.case("G20")
async def test_a_quota_changes_only_what_it_names(store: Store) -> None:
    await store.team("ml", requests_per_minute=10, concurrent=0)
    async with store.database.begin_immediate() as connection:
        team = await teams.set_quota(
            connection, "ml", {"requests_per_minute": None, "tokens_per_minute": 7}, at_us=1, actor="test"
        )
        assert team.limits == Limits(None, 7, 0)
        with pytest.raises(Invalid):
            await teams.set_quota(connection, "ml", {"concurrent": -1}, at_us=1, actor="test")
        assert (await teams.get_team(connection, "ml")).limits == Limits(None, 7, 0)
