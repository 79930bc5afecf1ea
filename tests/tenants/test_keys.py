"""API keys in the store: revoked for good, of a living team, and never readable again."""

import json

import pytest

from tenants import audit, key_format, keys, tables
from tenants.errors import Conflict, Invalid, NotFound
from tests.support.tenants.stores import NOW_US, Store


@pytest.mark.anyio
@pytest.mark.case("G52", "S10")
async def test_the_secret_is_nowhere_in_the_store(store: Store) -> None:
    await store.team("search")
    public_id, text = await store.key("search")
    secret = key_format.parse(text).secret  # type: ignore[union-attr]
    async with store.database.begin_immediate() as connection:
        await keys.revoke_key(connection, public_id, at_us=store.now_us, actor="test")
        shown = await keys.list_keys(connection)
        trail = await audit.latest(connection)
        held = {table.name: (await connection.execute(table.select())).all() for table in tables.metadata.sorted_tables}
    await store.database.dispose()
    everything = b"".join(path.read_bytes() for path in store.directory.iterdir())
    for told in (repr(shown), json.dumps(trail), repr(held), repr(store.holder.current)):
        assert secret not in told
    assert public_id in json.dumps(trail)
    assert secret.encode() not in everything
    assert public_id.encode() in everything  # the search would find it


@pytest.mark.anyio
async def test_a_revoke_is_for_good_and_may_be_repeated(store: Store) -> None:
    await store.team("search")
    public_id, _ = await store.key("search")
    async with store.database.begin_immediate() as connection:
        first = await keys.revoke_key(connection, public_id, at_us=NOW_US + 1, actor="test")
        again = await keys.revoke_key(connection, public_id, at_us=NOW_US + 2, actor="test")
    assert first.revoked_at_us == again.revoked_at_us == NOW_US + 1


@pytest.mark.anyio
async def test_a_key_needs_a_living_team_and_a_future(store: Store) -> None:
    from tenants import teams

    await store.team("search")
    with pytest.raises(NotFound):
        await store.key("nobody")
    with pytest.raises(Invalid, match="future"):
        await store.key("search", expires_at_us=NOW_US)
    async with store.database.begin_immediate() as connection:
        await teams.update_team(connection, "search", is_archived=True, at_us=NOW_US, actor="test")
    with pytest.raises(Conflict, match="archived"):
        await store.key("search")


@pytest.mark.anyio
@pytest.mark.case("S02")
@pytest.mark.parametrize("given_id", ["", "%", "x' OR '1'='1", "A" * 12, "A" * 5000])
async def test_a_look_up_by_anything_but_a_public_id_finds_nothing(store: Store, given_id: str) -> None:
    await store.team("search")
    await store.key("search")
    async with store.database.session() as connection:
        with pytest.raises(NotFound):
            await keys.get_key(connection, given_id)


@pytest.mark.anyio
@pytest.mark.case("S08")
async def test_a_team_sees_only_its_own_keys(store: Store) -> None:
    for team in ("one", "two"):
        await store.team(team)
    own = {(await store.key("one"))[0] for _ in range(3)}
    other = {(await store.key("two"))[0] for _ in range(2)}
    async with store.database.session() as connection:
        assert {key.public_id for key in await keys.list_keys(connection, "one")} == own
        assert {key.public_id for key in await keys.list_keys(connection, "two")} == other
        assert len(await keys.list_keys(connection)) == 5
