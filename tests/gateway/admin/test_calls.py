"""What the admin API does: teams, keys, tiers and limits."""

import asyncio

import httpx
import pytest
from sqlalchemy import select

from tenants import tables
from tenants.errors import InvalidKey, KeyRevoked
from tests.support.gateway.admin import NOW, V1, error_of, trail
from tests.support.tenants.stores import Store

pytestmark = pytest.mark.anyio


async def test_the_way_of_a_team(client: httpx.AsyncClient, store: Store) -> None:
    created = await client.post(f"{V1}/teams", json={"name": "search", "tier": "gold"})
    assert created.status_code == 201
    assert created.json() == {
        "object": "team",
        "id": 1,
        "name": "search",
        "tier": "gold",
        "limits": {"requests_per_minute": None, "tokens_per_minute": None, "concurrent": None},
        "num_keys": 0,
        "created_at": "2026-05-28T20:26:40Z",
        "archived_at": None,
        "max_pause_seconds": None,
        "max_pause_empty_queue_seconds": None,
        "max_pause_queue": None,
        "max_pause_unknown": "no engine is connected",
        "max_pause_moves": [],
    }
    key = (await client.post(f"{V1}/teams/search/keys")).json()
    assert (key["team"], key["status"], len(key["id"])) == ("search", "active", 12)
    assert store.holder.current.identify(key["key"], NOW).key_public_id == key["id"]
    quota = await client.put(f"{V1}/teams/search/quota", json={"concurrent": 2, "tokens_per_minute": 0})
    assert quota.json()["limits"] == {"requests_per_minute": None, "tokens_per_minute": 0, "concurrent": 2}
    assert (await client.get(f"{V1}/teams/search/quota")).json() == quota.json()
    assert store.holder.current.identify(key["key"], NOW).limits.concurrent == 2
    moved = await client.patch(f"{V1}/teams/search", json={"tier": "bronze", "name": "find"})
    assert (moved.json()["tier"], moved.json()["name"], moved.json()["num_keys"]) == ("bronze", "find", 1)
    who = store.holder.current.identify(key["key"], NOW)
    assert (who.team, who.tier.name) == ("find", "bronze")
    assert [team["name"] for team in (await client.get(f"{V1}/teams")).json()["data"]] == ["find"]
    assert (await client.get(f"{V1}/teams/search")).status_code == 404
    assert (await client.patch(f"{V1}/teams/find", json={"archived": True})).json()["archived_at"] is not None
    assert (await client.get(f"{V1}/teams")).json()["data"] == []
    assert len((await client.get(f"{V1}/teams", params={"archived": "true"})).json()["data"]) == 1


@pytest.mark.case("G51")
async def test_a_revoke_is_seen_by_the_next_request(client: httpx.AsyncClient, store: Store) -> None:
    await store.team("search")
    key = (await client.post(f"{V1}/teams/search/keys", json={"name": "ci"})).json()
    store.holder.current.identify(key["key"], NOW)
    revoked = await client.post(f"{V1}/keys/{key['id']}/revoke", json={})
    assert (revoked.status_code, revoked.json()["status"]) == (200, "revoked")
    with pytest.raises(KeyRevoked):
        store.holder.current.identify(key["key"], NOW)
    assert (await client.post(f"{V1}/keys/{key['id']}/revoke")).json() == revoked.json()
    listed = (await client.get(f"{V1}/keys", params={"team": "search"})).json()["data"]
    assert [(one["id"], one["name"], one["status"]) for one in listed] == [(key["id"], "ci", "revoked")]


async def test_tiers_are_shown_and_changed(client: httpx.AsyncClient, store: Store) -> None:
    await store.team("search", "gold")
    names = [tier["name"] for tier in (await client.get(f"{V1}/tiers")).json()["data"]]
    assert names == ["gold", "silver", "bronze"]
    seen: list[int] = []
    store.holder.subscribe(lambda snapshot: seen.append(snapshot.team_terms()[0].weight))
    changed = await client.patch(f"{V1}/tiers/gold", json={"weight": 8})
    assert changed.json() == (await client.get(f"{V1}/tiers/gold")).json() | {"max_pause_moves": []}
    assert changed.json()["weight"] == 8
    assert seen == [8]  # the engine is told before the answer


@pytest.mark.case("S08")
async def test_keys_of_a_team_are_only_its_own(client: httpx.AsyncClient, store: Store) -> None:
    for team in ("one", "two"):
        await store.team(team)
    ids = {team: {(await store.key(team))[0] for _ in range(2)} for team in ("one", "two")}
    for team in ids:
        by_path = (await client.get(f"{V1}/teams/{team}/keys")).json()["data"]
        by_query = (await client.get(f"{V1}/keys", params={"team": team})).json()["data"]
        assert {key["id"] for key in by_path} == {key["id"] for key in by_query} == ids[team]
    for trick in ("one' OR '1'='1", "%", "one,two", "ONE"):
        assert (await client.get(f"{V1}/keys", params={"team": trick})).status_code == 404


async def test_a_failed_store_is_503_and_nothing_is_half_done(
    client: httpx.AsyncClient, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.team("search")
    _, text = await store.key("search")
    await store.holder.reload()
    await store.database.dispose()
    store.directory.rename(store.directory.with_name("gone"))
    for method, path, body in [
        ("GET", f"{V1}/teams", None),
        ("GET", f"{V1}/reports/usage", None),
        ("POST", f"{V1}/teams", {"name": "x", "tier": "gold"}),
    ]:
        answer = await client.request(method, path, json=body)
        assert (answer.status_code, error_of(answer)["code"]) == (503, "store_unavailable")
        assert int(answer.headers["retry-after"]) >= 1
    assert store.holder.current.identify(text, NOW).team == "search"


async def test_writes_that_cross_leave_the_newest_snapshot(client: httpx.AsyncClient, store: Store) -> None:
    await store.team("search")
    weights = list(range(1, 21))
    answers = await asyncio.gather(*(client.patch(f"{V1}/tiers/gold", json={"weight": w}) for w in weights))
    assert {answer.status_code for answer in answers} == {200}
    async with store.database.session() as connection:
        stored = await connection.scalar(select(tables.tiers.c.weight).where(tables.tiers.c.name == "gold"))
    assert store.holder.current.team_terms()[0].weight == stored
    assert len([line for line in await trail(store) if line["action"] == "tier.update"]) == 20


@pytest.mark.case("S16")
async def test_nobody_chooses_a_key(client: httpx.AsyncClient, store: Store) -> None:
    await store.team("search")
    for field in ("key", "secret", "id", "public_id"):
        answer = await client.post(f"{V1}/teams/search/keys", json={field: "password"})
        assert (answer.status_code, error_of(answer)["param"]) == (400, field)
    assert (await client.get(f"{V1}/keys")).json()["data"] == []
    drawn = [(await client.post(f"{V1}/teams/search/keys")).json()["key"] for _ in range(3)]
    assert len({key[-49:] for key in drawn}) == 3


async def test_an_unknown_key_stays_unknown(client: httpx.AsyncClient, store: Store) -> None:
    from tenants import key_format

    await client.post(f"{V1}/teams", json={"name": "search", "tier": "gold"})
    with pytest.raises(InvalidKey):
        store.holder.current.identify(key_format.render(key_format.new_key()), NOW)
