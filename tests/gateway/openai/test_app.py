"""Paths, methods, probes, CORS and headers."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from gateway.openai.app import HttpSettings
from tests.support.gateway.harness import CHAT, MODEL, TEXT, TOKENIZER, Gateway, chat_body, gateway

pytestmark = pytest.mark.anyio


def envelope(response: httpx.Response) -> dict[str, Any]:
    """The error of a response, after checking that it is one."""
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code", "terazi"}
    assert error["terazi"]["request_id"].startswith("req-")
    assert response.headers["x-request-id"]
    if response.status_code in (429, 503):
        assert int(response.headers["retry-after"]) >= 1
    return error


@pytest.mark.case("A17")
@pytest.mark.parametrize("path", ["/v1//chat/completions", "//v1/chat//completions", "/v1/chat/completions/"])
async def test_slashes_as_people_type_them_do_not_count(path: str) -> None:
    async with gateway() as g:
        g.engine.script = g.engine.saying("ok")
        assert (await g.post(f"http://gateway{path}", chat_body())).status_code == 200


@pytest.mark.case("A17")
@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/v1/chat/completions", CHAT),
        ("/v1/chat/completions/chat/completions", CHAT),
        ("/chat/completions", CHAT),
        ("/v1/v1/models", "/v1/models"),
        ("/api/v1/completions", TEXT),
        ("/completions", TEXT),
        ("/v1/engines/x/completions", TEXT),
        ("/", CHAT),
    ],
)
async def test_a_wrong_path_is_told_the_right_one(path: str, meant: str) -> None:
    async with gateway() as g:
        response = await g.post(path, chat_body())
        assert response.status_code == 404
        assert f"{meant}" in envelope(response)["message"].replace(path + ";", ";")


@pytest.mark.case("A22")
async def test_the_responses_api_points_to_chat_completions() -> None:
    async with gateway() as g:
        response = await g.post("/v1/responses", {"model": MODEL, "input": "x"})
        assert response.status_code == 404
        assert "use /v1/chat/completions" in envelope(response)["message"]


async def test_a_wrong_method_names_the_right_one() -> None:
    async with gateway() as g:
        response = await g.http.get(CHAT)
        assert response.status_code == 405 and response.headers["allow"] == "POST"
        assert (await g.http.delete("/v1/models")).status_code == 405


@pytest.mark.case("A17")
@pytest.mark.parametrize("spelling", ["org/tiny-random", "org%2Ftiny-random"])
async def test_a_model_id_with_a_slash_is_found(spelling: str) -> None:
    async with gateway() as g:
        bearer = {"authorization": f"Bearer {g.key}"}
        listed = (await g.http.get("/v1/models", headers=bearer)).json()
        assert listed["object"] == "list" and [m["id"] for m in listed["data"]] == [MODEL]
        one = await g.http.get(f"/v1/models/{spelling}", headers=bearer)
        assert one.json() == listed["data"][0]
        assert one.json()["context_length"] == 2048
        assert (await g.http.get("/v1/models")).status_code == 401
        assert g.outstanding() == 0 and g.state.leases.totals(1).reserved_requests == 0


@pytest.mark.case("H17")
@pytest.mark.parametrize("is_connected", [False, True], ids=["no engine", "no tokenizer"])
@pytest.mark.parametrize("path", ["/v1/models", f"/v1/models/{MODEL}", "/v1/models/nope"])
async def test_while_the_model_loads_models_are_a_503(path: str, is_connected: bool) -> None:
    async with gateway(connect=False) as g:
        bearer = {"authorization": f"Bearer {g.key}"}
        if is_connected:
            await g.state.engine.connect()
        response = await g.http.get(path, headers=bearer)
        assert (response.status_code, envelope(response)["code"]) == (503, "starting")
        assert (await g.http.get(path)).status_code == 401, "who has no key is told so first"
        if not is_connected:
            await g.state.engine.connect()
        g.state.tokenizer = TOKENIZER
        assert (await g.http.get(path, headers=bearer)).status_code == (404 if "nope" in path else 200)
        g.engine.die()
        await g.state.engine.wait_closed()
        assert (await g.http.get("/v1/models", headers=bearer)).json()["data"][0]["id"] == MODEL, "it is known by now"


@pytest.mark.case("S01")
@pytest.mark.parametrize("host", ["evil/v1/models?", "a#b", "[::1", "livez", "x?/livez"])
async def test_the_host_header_opens_nothing(host: str) -> None:
    async with gateway() as g:
        response = await g.http.post(CHAT, json=chat_body(), headers={"host": host})
        assert response.status_code == 401


@pytest.mark.case("S01")
@pytest.mark.parametrize(
    "path", ["/livez/../v1/models", "/livez%2f..%2fv1/models", "/%2e%2e/v1/models", "//livez//v1/models", "/livez/x"]
)
async def test_no_spelling_of_a_path_gets_round_the_key(path: str) -> None:
    async with gateway() as g:
        request = httpx.Request("GET", "http://gateway/")
        request.url = httpx.URL("http://gateway").copy_with(raw_path=path.encode())
        response = await g.http.send(request)
        assert response.status_code in (401, 404)


@pytest.mark.case("D12")
async def test_liveness_is_green_before_readiness() -> None:
    async with gateway(connect=False) as g:
        assert (await g.http.get("/livez")).status_code == 200
        waiting = await g.http.get("/readyz")
        assert waiting.status_code == 503 and waiting.json()["reasons"] == ["starting"]
        assert int(waiting.headers["retry-after"]) >= 1


@pytest.mark.case("D12")
async def test_probes_need_no_key_answer_head_and_count_as_nothing() -> None:
    async with gateway(tcp=True) as g:
        for path in ("/livez", "/readyz"):
            assert (await g.http.get(path)).json()["status"] == "ok"
            head = await g.http.head(path)
            assert head.status_code == 200 and head.content == b""
        g.ledger.is_full = True
        assert (await g.http.get("/livez")).status_code == 200
        assert g.state.leases.totals(1).reserved_requests == 0 and not g.ledger.opened


async def reasons(g: Gateway) -> list[str]:
    found: list[str] = (await g.http.get("/readyz")).json()["reasons"]
    return found


async def test_readiness_says_why_not() -> None:
    async with gateway(tcp=True) as g:
        g.state.is_draining = True
        assert await reasons(g) == ["draining"]
        g.state.is_draining = False
        async with g.http.stream("POST", CHAT, json=chat_body(), headers={"authorization": "x"}):
            pass
        g.engine.die()
        await g.state.engine.wait_closed()
        assert await reasons(g) == ["engine_unavailable"]


@pytest.mark.case("K28")
async def test_an_engine_that_says_nothing_while_work_waits_is_not_ready() -> None:
    async with gateway() as g:
        g.clock.advance(3600)
        assert await reasons(g) == [], "idle is not silent"
        request = asyncio.create_task(g.chat())
        submit = await g.engine.next_submit()
        g.clock.advance(g.state.settings.engine_silence + 1)
        assert await reasons(g) == ["engine_silent"]
        g.engine.finish(submit.request_id, "stop")
        await request
        assert await reasons(g) == []


@pytest.mark.case("G46")
async def test_a_lost_database_is_degraded_a_full_journal_not_ready() -> None:
    async with gateway() as g:
        g.ledger.is_failing = True
        response = await g.http.get("/readyz")
        assert response.status_code == 200
        assert response.json() == {"status": "ok", "reasons": [], "degraded": True}
        g.ledger.is_full = True
        assert (await g.http.get("/readyz")).status_code == 503
        assert await reasons(g) == ["store_unavailable"]
        assert (await g.http.get("/livez")).status_code == 200


@pytest.mark.case("A19")
async def test_a_preflight_needs_no_key_and_is_allowed_what_it_asks_for() -> None:
    async with gateway() as g:
        asked = "authorization,content-type,x-stainless-os,x-stainless-retry-count"
        response = await g.http.options(
            CHAT,
            headers={
                "origin": "https://app.example",
                "access-control-request-method": "POST",
                "access-control-request-headers": asked,
            },
        )
        assert response.status_code == 204 and response.content == b""
        assert response.headers["access-control-allow-headers"] == asked
        assert response.headers["access-control-allow-origin"] == "*"
        assert "POST" in response.headers["access-control-allow-methods"]
        assert not g.state.refused, "nothing is counted as a failed login"


@pytest.mark.case("A19")
async def test_refusals_and_answers_carry_cors_headers_too() -> None:
    async with gateway() as g:
        g.engine.script = g.engine.saying("ok")
        origin = {"origin": "https://app.example"}
        for response in (
            await g.post(CHAT, chat_body(), headers=origin),
            await g.post(CHAT, chat_body(), key="wrong", headers=origin),
            await g.http.get("/nowhere", headers=origin),
        ):
            assert response.headers["access-control-allow-origin"] == "*"
            assert "retry-after" in response.headers["access-control-expose-headers"]
        assert "access-control-allow-origin" not in (await g.http.get("/livez")).headers


@pytest.mark.case("S13")
async def test_headers_have_a_number_and_a_size() -> None:
    async with gateway(settings=HttpSettings(max_headers=20, max_header_bytes=1000)) as g:
        many = await g.http.get("/livez", headers=[(f"x-{i}", "1") for i in range(30)])
        large = await g.http.get("/livez", headers={"x-large": "1" * 1000})
        assert many.status_code == large.status_code == 431
        assert envelope(many)["code"] == "headers_too_large"


async def test_the_answer_is_not_cached_and_names_the_tier() -> None:
    async with gateway() as g:
        g.engine.script = g.engine.saying("ok")
        response = await g.chat()
        assert response.headers["cache-control"] == "no-store"
        assert (response.headers["x-terazi-tier"], response.headers["x-terazi-start-level"]) == ("gold", "0")
        assert response.headers["x-terazi-queue-ms"] == "2" and "queue;dur=2.5" in response.headers["server-timing"]
        assert "x-ratelimit-limit-requests" not in response.headers, "unlimited is not a number"


async def test_error_bodies_are_json_for_odd_paths() -> None:
    async with gateway() as g:
        response = await g.http.get('/%22%3Cscript%3E%0A"')
        assert response.status_code == 404 and json.loads(response.content)
