"""What the admin API does: teams, keys, tiers, limits, maximum pauses and reports."""

import asyncio
import contextlib
import csv
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import pytest
from sqlalchemy import select

from engine.wire.messages import PolicyInfo
from gateway.admin import pauses
from gateway.admin.app import AdminState
from policies.bounds import pause_bound_us
from policies.config import PolicyConfig
from policies.sequences import TeamTerms
from tenants import tables
from tenants.errors import InvalidKey, KeyRevoked
from tenants.ledger import Ledger
from tests.support.gateway import fake_engine
from tests.support.gateway.admin import NOW, V1, client_of, error_of, trail
from tests.support.tenants.stores import NOW_US, Store, closed_row, open_entry

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
    assert changed.json() == (await client.get(f"{V1}/tiers/gold")).json()
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


async def test_reports_over_http_see_the_request_before_them(state: AdminState, store: Store) -> None:
    team_id = await store.team("search")
    ledger = Ledger(store.database, store.directory / "journal")
    await ledger.start()
    async with client_of(replace(state, flush=ledger.flush)) as client:
        for i in range(3):
            entry = open_entry(f"r{i}", team_id=team_id)
            ledger.open(entry)
            ledger.close(closed_row(entry, finished_at_us=NOW_US))
            report = (await client.get(f"{V1}/reports/usage", params={"by": "team,model"})).json()
            assert report["total"]["requests"] == i + 1
        assert report["data"][0]["team"] == "search"
        assert (report["by"], report["time_zone"]) == (["team", "model"], "UTC")
        assert (await client.get(f"{V1}/reports/usage", params={"to": "2026-01-01"})).json()["data"] == []
        fairness = (await client.get(f"{V1}/reports/fairness")).json()
        assert (fairness["object"], fairness["tiers"][0]["requests"]) == ("fairness_report", 3)
    await ledger.stop()


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


CONSTANTS = PolicyInfo(
    levels=8,
    base_quantum_us=50_000,
    fairness_window_us=1_000_000,
    step_cost_max_us=250_000,
    promotion_percent=20,
    grant_us=200_000,
    upload_max_us=30_000,
)


def pause_of(record: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(record[f"max_pause_{name}"] for name in ("seconds", "empty_queue_seconds", "queue", "unknown"))


def bound(team_id: int, num_ahead: int) -> float:
    """What the policy says (its own tests say that it holds), of one gold and one bronze team, in seconds."""
    config = PolicyConfig(
        levels=8,
        base_quantum_us=50_000,
        fairness_window_us=1_000_000,
        step_cost_max_us=250_000,
        promotion_percent=20,
        grant_us=200_000,
    )
    gold = TeamTerms(1, weight=4, start_level=0, starving_after_us=300_000, promotion_burst_grants=4)
    bronze = TeamTerms(2, weight=1, start_level=2, starving_after_us=3_000_000, promotion_burst_grants=2)
    return pause_bound_us(config, [gold, bronze], team_id, num_ahead, 30_000, is_short=True) / 1e6


async def test_the_maximum_pause_is_shown_for_teams_and_tiers(state: AdminState, store: Store) -> None:
    await store.team("search", "gold", concurrent=3)
    await store.team("batch", "bronze")
    await store.holder.reload()
    greeting = fake_engine.hello(constants=CONSTANTS, max_queued_requests=11)
    async with client_of(replace(state, hello=lambda: greeting)) as client:
        search = (await client.get(f"{V1}/teams/search")).json()
        assert pause_of(search) == (bound(1, 2), bound(1, 0), 3, None)
        tiers = {tier["name"]: pause_of(tier) for tier in (await client.get(f"{V1}/tiers")).json()["data"]}
        assert tiers["gold"] == pause_of(search)
        assert tiers["bronze"] == (bound(2, 10), bound(2, 0), 11, None)
        assert tiers["silver"] == (None, None, None, "no team has this tier")
        assert pause_of((await client.get(f"{V1}/tiers/gold")).json()) == tiers["gold"]
        # the longest of a tier's teams, and by the table of teams as it is after the change
        made = (await client.post(f"{V1}/teams", json={"name": "more", "tier": "gold"})).json()
        assert made["max_pause_queue"] == 11
        assert pause_of((await client.get(f"{V1}/tiers/gold")).json()) == pause_of(made)
        await client.put(f"{V1}/teams/more/quota", json={"concurrent": 50})
        assert pause_of((await client.get(f"{V1}/teams/more")).json()) == pause_of(made), "the engine takes in 11"
        changed = (await client.patch(f"{V1}/tiers/gold", json={"starving_after_ms": 9000})).json()
        assert changed["max_pause_seconds"] == pytest.approx(made["max_pause_seconds"] + 8.7)
        archived = (await client.patch(f"{V1}/teams/more", json={"archived": True})).json()
        assert pause_of(archived) == (None, None, None, "the team is archived")
        none_kept = (await client.patch(f"{V1}/tiers/gold", json={"promotion_burst_grants": 0})).json()
        assert none_kept["max_pause_seconds"] is None
        assert "promotion_burst_grants is 0" in none_kept["max_pause_unknown"]


@pytest.mark.parametrize(
    ("greeting", "reason"),
    [
        (None, "no engine is connected"),
        (fake_engine.hello(policy="fcfs"), "the policy fcfs bounds no pause"),
        (
            fake_engine.hello(constants=msgspec.structs.replace(CONSTANTS, promotion_percent=0)),
            "promotion is off: engine.promotion_percent is 0",
        ),
    ],
)
async def test_without_a_bound_the_reason_is_shown(state: AdminState, store: Store, greeting: Any, reason: str) -> None:
    await store.team("search", "gold")
    await store.holder.reload()
    async with client_of(replace(state, hello=lambda: greeting)) as client:
        for path in ("teams/search", "tiers/gold"):
            record = (await client.get(f"{V1}/{path}")).json()
            assert pause_of(record)[:2] == (None, None)
            assert record["max_pause_unknown"] == reason


async def test_maximum_pauses_are_worked_out_once_for_each_kind(
    state: AdminState, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(30):
        await store.team(f"team-{number}", ("gold", "silver", "bronze")[number % 3], concurrent=5 + number % 2)
    await store.holder.reload()
    calls = []

    def counted(*args: Any, **more: Any) -> int:
        calls.append(args)
        return pause_bound_us(*args, **more)

    monkeypatch.setattr(pauses, "pause_bound_us", counted)
    greeting = fake_engine.hello(constants=CONSTANTS)
    async with client_of(replace(state, hello=lambda: greeting)) as client:
        listed = (await client.get(f"{V1}/teams")).json()["data"]
    assert len(listed) == 30 and all(team["max_pause_seconds"] for team in listed)
    assert len(calls) == 3 * 2 * 2, "three tiers, two queues, full and empty"


async def test_reports_take_a_time_zone_and_come_as_csv(state: AdminState, store: Store) -> None:
    team_id = await store.team("search")
    async with client_of(state) as client, booking(store) as ledger:
        # 2026-05-28 20:26:40 in UTC is the next day in Istanbul from 21:00 UTC on
        for number, hours in enumerate((0, 1)):
            entry = open_entry(f"r{number}", team_id=team_id)
            ledger.open(entry)
            ledger.close(closed_row(entry, finished_at_us=NOW_US + hours * 3_600_000_000))
        await ledger.flush()
        period = {"from": "2026-05-28", "to": "2026-05-30", "tz": "Europe/Istanbul", "by": "day"}
        report = (await client.get(f"{V1}/reports/usage", params=period)).json()
        assert report["time_zone"] == "Europe/Istanbul"
        assert [line["day"] for line in report["data"]] == ["2026-05-28", "2026-05-29"]
        answer = await client.get(f"{V1}/reports/usage", params=period | {"format": "csv"})
        assert answer.headers["content-type"].startswith("text/csv")
        lines = list(csv.DictReader(answer.text.splitlines()))
        assert [(line["day"], line["requests"]) for line in lines] == [("2026-05-28", "1"), ("2026-05-29", "1")]
        assert list(lines[0]) == ["day", *report["total"], "from", "to", "time_zone"]
        fairness = (await client.get(f"{V1}/reports/fairness", params={"tz": "Europe/Istanbul"})).json()
        assert fairness["time_zone"] == "Europe/Istanbul"
        for query, param in (("tz=Mars", "tz"), ("format=xml", "format")):
            refused = await client.get(f"{V1}/reports/usage?{query}")
            assert (refused.status_code, error_of(refused)["param"]) == (400, param)


@contextlib.asynccontextmanager
async def booking(store: Store) -> AsyncIterator[Ledger]:
    ledger = Ledger(store.database, store.directory / "journal")
    await ledger.start()
    try:
        yield ledger
    finally:
        await ledger.stop()


@pytest.mark.case("H12", "H10")
async def test_admin_bodies_take_8_0_and_a_byte_order_mark(client: httpx.AsyncClient, store: Store) -> None:
    await store.team("there")

    async def send(method: str, path: str, body: str, start: bytes = b"") -> httpx.Response:
        return await client.request(method, f"/admin/v1{path}", content=start + body.encode())

    tier = await send("PATCH", "/tiers/gold", '{"weight": 8.0, "max_queue_seconds": 6e1}', b"\xef\xbb\xbf")
    assert tier.status_code == 200
    assert repr((tier.json()["weight"], tier.json()["max_queue_seconds"])) == "(8, 60)"
    quota = await send("PUT", "/teams/there/quota", '{"concurrent": 8.0}', b"\xef\xbb\xbf")
    assert repr(quota.json()["limits"]["concurrent"]) == "8"
    for method, path, name in (("PATCH", "/tiers/gold", "weight"), ("PUT", "/teams/there/quota", "concurrent")):
        for wrong in ("8.5", '"8"', "1e400", "true", "9007199254740993.0", "[8]"):
            refused = await send(method, path, f'{{"{name}": {wrong}}}')
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, name), wrong
    latin = await client.request("PATCH", "/admin/v1/teams/there", content=b'{"name": "Espa\xf1a"}')
    assert latin.status_code == 400 and "UTF-8" in latin.json()["error"]["message"]
    foreign = await client.request("PATCH", "/admin/v1/teams/there", content='{"name": "x"}'.encode("utf-16"))
    assert foreign.status_code == 400 and "UTF-16" in foreign.json()["error"]["message"]
