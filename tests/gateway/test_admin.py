"""The admin API over ASGI: who may call it, what it takes, what it shows."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter
from sqlalchemy import select
from starlette.routing import Route

from gateway.admin import OPEN_PATHS, AdminState, admin_app, render_metrics
from tenants import tables
from tenants.clock import from_epoch_us
from tenants.errors import InvalidKey, KeyRevoked
from tenants.ledger import Ledger
from tenants.migrate import upgrade
from tests.tenants.support import NOW_US, Store, closed_row, open_entry, opened

pytestmark = pytest.mark.anyio
TOKEN = "adm-0123456789abcdefghij"
NOW = from_epoch_us(NOW_US)
V1 = "/admin/v1"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("admin") / "terazi.db"
    asyncio.run(upgrade(f"sqlite+aiosqlite:///{path}", now_us=lambda: 1))
    return path


@pytest.fixture
async def store(template: Path, tmp_path: Path) -> AsyncIterator[Store]:
    async with opened(template, tmp_path / "data") as store:
        yield store


@pytest.fixture
def state(store: Store) -> AdminState:
    registry = CollectorRegistry()
    Counter("terazi_things", "Things.", registry=registry).inc()
    return AdminState(
        token=TOKEN,
        database=store.database,
        snapshot_holder=store.holder,
        status=lambda: {"ready": True, "degraded": False, "reasons": [], "engine": {"model": "tiny"}},
        metrics=lambda: render_metrics(registry),
        now_us=lambda: store.now_us,
    )


def client_of(state: AdminState, token: str | None = TOKEN) -> httpx.AsyncClient:
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    # what the app raises is a bug; its answer is what we look at
    transport = httpx.ASGITransport(admin_app(state), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://admin", headers=headers)


@pytest.fixture
async def client(state: AdminState) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(state) as client:
        yield client


def error_of(answer: httpx.Response) -> dict[str, Any]:
    body = answer.json()["error"]
    assert set(body) == {"message", "type", "param", "code", "terazi"}
    assert body["terazi"]["request_id"] == answer.headers["x-request-id"]
    return dict(body)


CALLS = [
    ("GET", "/metrics"),
    ("GET", f"{V1}/teams"),
    ("POST", f"{V1}/teams"),
    ("GET", f"{V1}/teams/a"),
    ("PATCH", f"{V1}/teams/a"),
    ("POST", f"{V1}/teams/a/keys"),
    ("GET", f"{V1}/teams/a/keys"),
    ("GET", f"{V1}/teams/a/quota"),
    ("PUT", f"{V1}/teams/a/quota"),
    ("GET", f"{V1}/keys"),
    ("POST", f"{V1}/keys/AAAAAAAAAAAA/revoke"),
    ("GET", f"{V1}/tiers"),
    ("GET", f"{V1}/tiers/gold"),
    ("PATCH", f"{V1}/tiers/gold"),
    ("GET", f"{V1}/reports/usage"),
    ("GET", f"{V1}/reports/fairness"),
    ("GET", f"{V1}/status"),
    ("GET", f"{V1}/audit"),
    ("GET", "/no/such/path"),
    ("GET", "/"),
]


async def test_the_list_of_calls_is_complete(state: AdminState) -> None:
    served = [
        (method, route)
        for route in admin_app(state).routes
        if isinstance(route, Route) and route.path not in OPEN_PATHS
        for method in (route.methods or set()) - {"HEAD"}
    ]
    for method, path in CALLS[:-2]:
        matching = [one for one in served if one[0] == method and one[1].path_regex.match(path)]
        assert len(matching) == 1, path
        served.remove(matching[0])
    assert served == []


@pytest.mark.case("S17", "S07")
@pytest.mark.parametrize(("method", "path"), CALLS)
async def test_every_call_needs_the_token(state: AdminState, method: str, path: str) -> None:
    wrong = [
        {},
        {"authorization": "Bearer "},
        {"authorization": f"Bearer {TOKEN[:-1]}"},
        {"authorization": f"Bearer {TOKEN}x"},
        {"authorization": f"Basic {TOKEN}"},
        {"authorization": TOKEN},
        {"x-api-key": TOKEN},
    ]
    async with client_of(state, None) as client:
        answers = [await client.request(method, path, headers=headers) for headers in wrong]
        answers.append(await client.request(method, path, params={"token": TOKEN, "authorization": f"Bearer {TOKEN}"}))
        pair = [("authorization", f"Bearer {TOKEN}"), ("authorization", "Bearer other")]
        answers.append(await client.request(method, path, headers=pair))
        assert (await client.request(method, path, headers={"authorization": f"bEARER  {TOKEN} "})).status_code != 401
    for answer in answers:
        assert answer.status_code == 401
        assert error_of(answer)["code"] == "invalid_admin_token"
        assert answer.headers["www-authenticate"] == "Bearer"
        assert TOKEN not in answer.text


@pytest.mark.case("S07")
async def test_a_teams_key_is_no_admin_token(state: AdminState, store: Store) -> None:
    await store.team("search")
    _, text = await store.key("search")
    async with client_of(state, text) as client:
        answer = await client.put(f"{V1}/teams/search/quota", json={"concurrent": None})
        assert answer.status_code == 401
        assert text not in answer.text
    assert [line for line in await trail(store) if line["action"] == "quota.set"] == []


@pytest.mark.case("S01")
@pytest.mark.parametrize(
    "path",
    [
        "/livez/",
        "//livez",
        "/livez/../admin/v1/keys",
        "/livez%2f..%2fadmin%2fv1%2fkeys",
        "/livez;/admin/v1/keys",
        "/LIVEZ",
        "/admin/v1/keys/livez",
        "/readyz%00",
        "/admin/v1/keys?x=/livez",
        "/admin/v1/keys#/livez",
    ],
)
async def test_no_spelling_of_an_open_path_opens_another(state: AdminState, path: str) -> None:
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    from urllib.parse import unquote

    for host in (b"admin", b"admin/livez?", b"x#/livez", b"/livez"):
        scope = {
            "type": "http",
            "method": "GET",
            "path": unquote(path.partition("?")[0]),
            "raw_path": path.encode(),
            "query_string": path.partition("?")[2].encode(),
            "headers": [(b"host", host)],
            "scheme": "http",
            "server": ("127.0.0.1", 1),
            "root_path": "",
        }
        await admin_app(state)(scope, receive, send)
        assert sent[0]["status"] == 401
        sent.clear()


async def test_probes_are_open_and_say_little(state: AdminState) -> None:
    async with client_of(state, None) as client:
        assert (await client.get("/livez")).json() == {"status": "ok"}
        assert (await client.head("/livez")).status_code == 200
        ready = await client.get("/readyz")
        assert (ready.status_code, ready.json()) == (200, {"ready": True, "degraded": False, "reasons": []})
    starting = replace(state, status=lambda: {"ready": False, "reasons": ["the engine is starting"], "engine": "x"})
    async with client_of(starting, None) as client:
        answer = await client.get("/readyz")
        assert (answer.status_code, answer.json()) == (503, {"ready": False, "reasons": ["the engine is starting"]})
        assert (await client.get("/livez")).status_code == 200


async def test_metrics_and_status_are_what_was_injected(client: httpx.AsyncClient) -> None:
    answer = await client.get("/metrics")
    assert "terazi_things_total 1.0" in answer.text
    assert answer.headers["content-type"].startswith("text/plain")
    assert (await client.get(f"{V1}/status")).json()["engine"] == {"model": "tiny"}


async def test_a_short_token_is_refused(state: AdminState) -> None:
    with pytest.raises(ValueError, match="at least 16"):
        replace(state, token="")
    assert TOKEN not in repr(state)


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


REFUSED: list[tuple[str, str, Any, int, str, str | None, str]] = [
    ("POST", "/teams", {"name": "x", "tire": "gold"}, 400, "unknown_field", "tire", "Did you mean tier?"),
    ("POST", "/teams", {"name": "x"}, 400, "invalid_value", None, "missing required field `tier`"),
    ("POST", "/teams", {"name": 5, "tier": "gold"}, 400, "invalid_value", "name", "Expected `str`"),
    ("POST", "/teams", {"name": "X", "tier": "gold"}, 400, "invalid_value", "name", "not allowed"),
    ("POST", "/teams", {"name": "x", "tier": "golden"}, 404, "tier_not_found", None, "golden"),
    ("POST", "/teams", {"name": "there", "tier": "gold"}, 409, "team_exists", None, "already"),
    ("POST", "/teams", ["x"], 400, "invalid_json", None, "JSON object"),
    ("PATCH", "/teams/there", {}, 400, "empty_change", None, "Nothing to change"),
    ("PATCH", "/teams/there", {"id": 7}, 400, "unknown_field", "id", "Known: tier, name, archived"),
    ("PATCH", "/teams/nobody", {"tier": "gold"}, 404, "team_not_found", None, "nobody"),
    ("POST", "/teams/nobody/keys", {}, 404, "team_not_found", None, "nobody"),
    ("POST", "/teams/there/keys", {"key": "trz-mine"}, 400, "unknown_field", "key", "Known"),
    ("POST", "/teams/there/keys", {"secret": "hunter2"}, 400, "unknown_field", "secret", "Known"),
    ("POST", "/teams/there/keys", {"expires_at": "soon"}, 400, "invalid_value", "expires_at", "must be a date"),
    ("POST", "/teams/there/keys", {"expires_at": "2020-01-01"}, 400, "invalid_value", "expires_at", "future"),
    ("PUT", "/teams/there/quota", {}, 400, "empty_change", None, "at least one limit"),
    ("PUT", "/teams/there/quota", {"concurent": 1}, 400, "invalid_value", "concurent", "Did you mean concurrent?"),
    ("PUT", "/teams/there/quota", {"concurrent": "5"}, 400, "invalid_value", "concurrent", "whole number"),
    ("PUT", "/teams/there/quota", {"concurrent": -1}, 400, "invalid_value", "concurrent", "0 or more"),
    ("PUT", "/teams/there/quota", {"concurrent": 1.5}, 400, "invalid_value", "concurrent", "whole number"),
    ("PUT", "/teams/there/quota", {"concurrent": True}, 400, "invalid_value", "concurrent", "whole number"),
    ("PATCH", "/tiers/gold", {"weight": 0}, 400, "invalid_value", "weight", "between 1 and 1000"),
    ("PATCH", "/tiers/gold", {"weight": "4"}, 400, "invalid_value", "weight", "Expected `int`"),
    ("PATCH", "/tiers/gold", {"wieght": 4}, 400, "unknown_field", "wieght", "Did you mean weight?"),
    ("PATCH", "/tiers/lead", {"weight": 4}, 404, "tier_not_found", None, "lead"),
    ("POST", "/keys/AAAAAAAAAAAA/revoke", {}, 404, "key_not_found", None, "public id"),
    ("POST", "/keys/AAAAAAAAAAAA/revoke", {"now": 1}, 400, "unknown_field", "now", "None is allowed"),
]


@pytest.mark.case("A16", "D11")
@pytest.mark.parametrize(("method", "path", "body", "status", "code", "param", "message"), REFUSED)
async def test_what_cannot_be_right_is_refused_in_one_envelope_and_changes_nothing(
    client: httpx.AsyncClient, store: Store, method: str, path: str, body: Any, status: int, code: str,
    param: str | None, message: str,
) -> None:  # fmt: skip
    await store.team("there")
    before = await trail(store)
    answer = await client.request(method, V1 + path, json=body)
    error = error_of(answer)
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param)
    assert message in error["message"]
    assert await trail(store) == before


@pytest.mark.case("B16", "A16")
@pytest.mark.parametrize("text", ["{", "NaN", '{"concurrent": NaN}', '{"concurrent": 1e400}', "[" * 5000, "\xff"])
async def test_what_is_not_json_is_refused(client: httpx.AsyncClient, store: Store, text: str) -> None:
    await store.team("there")
    answer = await client.put(f"{V1}/teams/there/quota", content=text.encode("latin-1"))
    assert (answer.status_code, error_of(answer)["type"]) == (400, "invalid_request_error")


async def test_a_body_over_the_limit_is_refused(client: httpx.AsyncClient) -> None:
    answer = await client.post(f"{V1}/teams", content=b" " * 70_000)
    assert (answer.status_code, error_of(answer)["code"]) == (413, "request_too_large")


@pytest.mark.case("A16")
async def test_unknown_paths_methods_and_parameters_have_the_envelope(client: httpx.AsyncClient) -> None:
    for method, path, status, code in [
        ("GET", "/nope", 404, "not_found"),
        ("GET", f"{V1}/teams/a/b/c", 404, "not_found"),
        ("GET", f"{V1}/teams/", 404, "not_found"),
        ("DELETE", f"{V1}/teams", 405, "method_not_allowed"),
        ("POST", f"{V1}/status", 405, "method_not_allowed"),
        ("GET", f"{V1}/reports/usage?form=2026-01-01", 400, "unknown_field"),
        ("GET", f"{V1}/reports/usage?by=team&by=day", 400, "invalid_value"),
        ("GET", f"{V1}/reports/usage?by=user", 400, "invalid_value"),
        ("GET", f"{V1}/reports/usage?team=nobody", 404, "team_not_found"),
        ("GET", f"{V1}/reports/usage?from=2026-01-02&to=2026-01-01", 400, "invalid_value"),
        ("GET", f"{V1}/reports/fairness?from=x", 400, "invalid_value"),
        ("GET", f"{V1}/keys?team=nobody", 404, "team_not_found"),
        ("GET", f"{V1}/teams?archived=maybe", 400, "invalid_request"),
        ("GET", f"{V1}/audit?limit=0", 400, "invalid_request"),
        ("GET", f"{V1}/audit?limit=99999999999999999999", 400, "invalid_request"),
    ]:
        answer = await client.request(method, path)
        assert (answer.status_code, error_of(answer)["code"]) == (status, code), path
    assert (await client.delete(f"{V1}/teams")).headers["allow"] == "GET, HEAD, POST"


@pytest.mark.case("S07")
async def test_no_body_can_write_a_field_that_is_not_its_own(client: httpx.AsyncClient, store: Store) -> None:
    """Every writable field of every record, tried at every write that should not take it."""
    await store.team("there")
    public_id, _ = await store.key("there")
    takes = {
        ("POST", "/teams"): {"name", "tier"},
        ("PATCH", "/teams/there"): {"name", "tier", "archived"},
        ("POST", "/teams/there/keys"): {"name", "expires_at"},
        ("POST", f"/keys/{public_id}/revoke"): set(),
        ("PUT", "/teams/there/quota"): {"requests_per_minute", "tokens_per_minute", "concurrent"},
        ("PATCH", "/tiers/gold"): {
            "weight", "start_level", "starving_after_ms", "promotion_burst_grants", "max_queue_seconds",
        },
    }  # fmt: skip
    columns = {column.name for table in tables.metadata.sorted_tables for column in table.columns}
    fields = columns.union(*takes.values(), {"role", "scopes", "limits", "weight", "allowed_routes"})
    before = await trail(store)
    for (method, path), own in takes.items():
        for field in sorted(fields - own):
            answer = await client.request(method, V1 + path, json={field: "1"})
            assert answer.status_code == 400, (path, field)
            assert error_of(answer)["param"] == field
    assert await trail(store) == before


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


@pytest.mark.case("G52", "S12")
async def test_a_key_is_shown_once_and_then_nowhere(
    client: httpx.AsyncClient, store: Store, state: AdminState, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    await store.team("search")
    made = (await client.post(f"{V1}/teams/search/keys")).json()
    secret = made["key"].rpartition("-")[2]
    told = []
    for method, path in [
        *CALLS,
        ("POST", f"{V1}/keys/{made['key']}/revoke"),  # a whole key where its id belongs
        ("POST", f"{V1}/keys/{made['id']}/revoke"),
        ("GET", f"{V1}/teams/search/keys"),
        ("GET", f"{V1}/audit?limit=1000"),
    ]:
        told.append((await client.request(method, path)).text)
    key = made["key"]
    for method, path, body in [  # a key pasted everywhere it does not belong
        ("POST", "/teams", {"name": key, "tier": "gold"}),
        ("POST", "/teams", {"name": "x", "tier": key}),
        ("POST", "/teams", {key: 1}),
        ("PUT", "/teams/search/quota", {key: 1}),
        ("PUT", "/teams/search/quota", {"concurrent": key}),
        ("POST", "/teams/search/keys", {"expires_at": key}),
        ("POST", "/teams/search/keys", {"name": key}),
        ("GET", f"/teams/{key}", None),
        ("GET", f"/keys?team={key}", None),
        ("GET", f"/keys?{key}=1", None),
        ("GET", f"/reports/usage?by={key}", None),
        ("GET", f"/reports/usage?from={key}", None),
        ("GET", f"/{key}", None),
    ]:
        answer = await client.request(method, V1 + path, json=body)
        assert answer.status_code in (400, 404)
        told.append(answer.text)
    async with client_of(state, made["key"]) as other:
        told.append((await other.get(f"{V1}/keys")).text)
    logged = [record.getMessage() for record in caplog.records if record.name != "httpx"]  # the test's own client
    everything = "".join([*told, *logged]) + json.dumps(await trail(store)) + repr(store.holder.current)
    assert made["id"] in everything
    assert secret not in everything
    assert "secret_hmac" not in "".join(told)


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


async def test_a_bug_answers_500_without_details(state: AdminState) -> None:
    def broken() -> dict[str, Any]:
        raise KeyError("a secret detail")

    async with client_of(replace(state, status=broken)) as client:
        answer = await client.get(f"{V1}/status")
    assert (answer.status_code, error_of(answer)["type"]) == (500, "server_error")
    assert "secret detail" not in answer.text


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


async def trail(store: Store) -> list[dict[str, Any]]:
    async with store.database.session() as connection:
        rows = await connection.execute(select(tables.audit).order_by(tables.audit.c.id))
        return [dict(row) for row in rows.mappings()]
