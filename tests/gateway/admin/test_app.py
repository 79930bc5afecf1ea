"""The admin API over ASGI: who may call it, what it refuses, and what it never tells."""

import asyncio
import json
import logging
from dataclasses import replace
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from gateway.admin import app as admin
from gateway.admin.app import OPEN_PATHS, AdminState, admin_app
from gateway.listen.listeners import limited_protocol
from gateway.listen.protocol import HttpProtocol
from gateway.openai.state import HttpSettings
from tenants import tables
from tests.support.gateway.admin import TOKEN, V1, client_of, error_of, trail
from tests.support.gateway.harness import WAIT, served
from tests.support.tenants.stores import Store

pytestmark = pytest.mark.anyio

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
    ("GET", f"{V1}/settings"),
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


REFUSED: list[tuple[str, str, Any, int, str, str | None, str]] = [
    ("POST", "/teams", {"name": "x", "tire": "gold"}, 400, "unknown_field", "tire", "Did you mean tier?"),
    ("POST", "/teams", {"name": "x"}, 400, "invalid_value", None, "missing required field `tier`"),
    ("POST", "/teams", {"name": 5, "tier": "gold"}, 400, "invalid_value", "name", "Expected `str`"),
    ("POST", "/teams", {"name": "X", "tier": "gold"}, 400, "invalid_value", "name", "not allowed"),
    ("POST", "/teams", {"name": "x", "tier": "golden"}, 404, "tier_not_found", None, "there are: gold, silver, bronze"),
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
async def test_what_cannot_be_right_is_refused_and_changes_nothing(
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


async def test_when_a_parameter_is_wrong_the_answer_shows_its_value(client: httpx.AsyncClient) -> None:
    for path, message in [
        ("teams?archived=maybe", "archived must be true or false, not 'maybe'."),
        ("audit?limit=0", "limit must be a whole number from 1 to 1000, not '0'."),
        ("reports/usage?format=xml", "format must be json or csv, not 'xml'."),
        ("reports/usage?by=team&by=day", "The query parameter by is given twice; give it once."),
    ]:
        assert error_of(await client.get(f"{V1}/{path}"))["message"] == message


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


async def test_a_bug_answers_500_without_details(state: AdminState) -> None:
    def broken() -> dict[str, Any]:
        raise KeyError("a secret detail")

    async with client_of(replace(state, status=broken)) as client:
        answer = await client.get(f"{V1}/status")
    assert (answer.status_code, error_of(answer)["type"]) == (500, "server_error")
    assert "secret detail" not in answer.text


@pytest.mark.case("S13", "S17")
async def test_who_has_no_token_holds_no_connection(state: AdminState, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that trickles in is never read for a caller without the token, and its connection is closed."""
    monkeypatch.setattr(admin, "LINGER_SECONDS", 0.05)
    head = f"POST {V1}/teams HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n"
    async with served(admin_app(state), HttpSettings(), HttpProtocol) as port:
        for token, body in (("", b"{"), ("authorization: Bearer wrong-wrong-wrong\r\n", b"")):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"{head}{token}\r\n".encode() + body)  # and not one byte more
            answer = await asyncio.wait_for(reader.read(), WAIT)  # to the end of the connection
            assert answer.startswith(b"HTTP/1.1 401 ") and b"invalid_admin_token" in answer
            assert b"connection: close" in answer.lower()
            writer.close()
        # the answer to a whole body is not lost, and is the last on its connection too
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            refused = await client.post(f"{V1}/teams", json={"name": "x" * 50_000})
            assert (refused.status_code, refused.headers["connection"]) == (401, "close")
            allowed = await client.get(f"{V1}/teams", headers={"authorization": f"Bearer {TOKEN}"})
            assert allowed.status_code == 200 and "connection" not in allowed.headers


@pytest.mark.case("S13")
async def test_a_head_that_never_ends_gives_its_place_up(state: AdminState) -> None:
    async with served(admin_app(state), HttpSettings(), limited_protocol(2, head_seconds=0.05)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /metrics HTTP/1.1\r\nhost:")
        assert await asyncio.wait_for(reader.read(), WAIT) == b""
        writer.close()
