"""Who is let in: the key as it arrives, the order of checks, and what a refusal may say."""

import pytest

from gateway.errors import RateLimited, Unauthenticated
from gateway.openai.admission import key_from, limit_error
from gateway.openai.app import HttpSettings
from tenants.errors import LimitExceeded
from tenants.quotas import Limits
from tests.support.gateway.harness import CHAT, TEXT, chat_body, gateway

pytestmark = pytest.mark.anyio

KEY = "trz-key"


@pytest.mark.case("A18")
@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"Bearer trz-key")],
        [(b"authorization", b"bearer trz-key")],
        [(b"Authorization", b"BEARER  trz-key")],
        [(b"authorization", b"Bearer trz-key \t")],
        [(b"x-api-key", b"trz-key")],
        [(b"api-key", b" trz-key")],
        [(b"authorization", b"Bearer trz-key"), (b"x-api-key", b"trz-key")],
        [(b"authorization", b"Bearer trz-key"), (b"authorization", b"Bearer trz-key")],
    ],
)
def test_a_key_is_found_in_every_form_clients_send(headers: list[tuple[bytes, bytes]]) -> None:
    assert key_from(headers) == KEY


@pytest.mark.case("H14")
@pytest.mark.parametrize(
    "foreign",
    [
        b"Basic dXNlcjpwYXNz",
        b"",
        b" \t ",
        b"Bearer",
        b"bearer  ",
        b"Digest username=x",
        b"Negotiate YII=",
        b"trz-other",
    ],
)
@pytest.mark.parametrize(
    "own", [(b"x-api-key", b"trz-key"), (b"api-key", b"trz-key"), (b"authorization", b"bearer\ttrz-key  ")]
)
def test_a_header_for_somebody_else_hides_no_key(foreign: bytes, own: tuple[bytes, bytes]) -> None:
    both = [(b"authorization", foreign), own]
    assert key_from(both) == key_from(both[::-1]) == KEY
    with pytest.raises(Unauthenticated, match="keys that differ"):
        key_from([*both, (b"x-api-key", b"another")])


@pytest.mark.case("H14")
async def test_a_good_key_beside_basic_is_let_in() -> None:
    async with gateway() as g:
        g.engine.script = g.engine.saying("ok")
        headers = {"authorization": "Basic dXNlcjpwYXNz", "x-api-key": g.key}
        assert (await g.http.post(CHAT, json=chat_body(), headers=headers)).status_code == 200
        assert (await g.http.get("/v1/models", headers=headers)).status_code == 200
        alone = await g.http.post(CHAT, json=chat_body(), headers={"authorization": "Basic dXNlcjpwYXNz"})
        assert alone.status_code == 401 and "Bearer <key>" in alone.json()["error"]["message"]


@pytest.mark.case("A18")
@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"Basic dXNlcjpwYXNz"), (b"x-api-key", b"")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"")],
        [(b"authorization", b"Basic dXNlcjpwYXNz")],
        [(b"authorization", b"trz-key")],
        [(b"x-api-key", b"")],
        [(b"authorization", b"Bearer one"), (b"x-api-key", b"two")],
        [(b"authorization", b"Bearer one"), (b"authorization", b"Bearer two")],
    ],
)
def test_no_key_another_scheme_or_two_keys_are_refused(headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(Unauthenticated) as caught:
        key_from(headers)
    assert "one" not in caught.value.message.split() and "dXNl" not in caught.value.message


@pytest.mark.case("A18", "D15")
@pytest.mark.parametrize(
    "key", ["undefined", "sk-secret-value", "trz-" + "A" * 12 + "-" + "b" * 49, "x" * 5000, "\xff"]
)
async def test_a_wrong_key_is_one_401_that_never_repeats_it(key: str) -> None:
    async with gateway() as g:
        response = await g.http.post(
            CHAT, json=chat_body(), headers={"authorization": f"Bearer {key}".encode("latin-1")}
        )
        assert response.status_code == 401
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        assert key not in response.text and response.headers["www-authenticate"] == "Bearer"
        assert error["message"].startswith("Incorrect API key provided.")


async def test_a_known_public_id_with_a_wrong_secret_gets_the_same_words() -> None:
    async with gateway() as g:
        other = g.holder.add("team-b")
        forged = f"{g.key[:17]}{other[17:]}"
        wrong = (await g.chat(key=forged)).json()["error"]
        unknown = (await g.chat(key="nothing")).json()["error"]
        for error in (wrong, unknown):
            del error["terazi"]["request_id"]
        assert wrong == unknown


async def test_a_revoked_and_an_expired_key_say_so() -> None:
    async with gateway() as g:
        revoked = await g.chat(key=g.holder.add("team-a", is_revoked=True))
        assert revoked.status_code == 401 and revoked.json()["error"]["code"] == "key_revoked"
        key = g.holder.add("team-a", expires_at_us=g.clock.now_us() + 1)
        g.engine.script = g.engine.saying("ok")
        assert (await g.chat(key=key)).status_code == 200
        g.clock.advance(1)
        expired = await g.chat(key=key)
        assert expired.status_code == 401 and expired.json()["error"]["code"] == "key_expired"


@pytest.mark.case("U08")
async def test_when_the_team_is_archived_then_the_401_says_so() -> None:
    async with gateway() as g:
        g.engine.script = g.engine.saying("ok")  # what it would get if it were let in
        refused = await g.chat(key=g.holder.add("team-a", is_team_archived=True))
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (401, "team_archived")
        assert "Team team-a is archived" in error["message"] and "terazi team set team-a --restore" in error["message"]


async def test_a_key_in_the_query_string_opens_nothing() -> None:
    async with gateway() as g:
        response = await g.http.post(f"{CHAT}?api_key={g.key}&key={g.key}", json=chat_body())
        assert response.status_code == 401


async def test_the_head_decides_before_the_body_is_looked_at() -> None:
    async with gateway(limits=Limits(requests_per_minute=0), settings=HttpSettings(max_body_bytes=4)) as g:
        assert (await g.post(CHAT, content=b"not json", key="wrong")).status_code == 401
        refused = await g.post(CHAT, content=b"not json")
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "requests"


@pytest.mark.case("T03")
async def test_when_a_call_is_refused_then_it_counts_in_the_minute() -> None:
    async with gateway(
        limits=Limits(requests_per_minute=6, concurrent=1), settings=HttpSettings(max_body_bytes=999)
    ) as g:
        assert (await g.post(CHAT, content=b"{")).status_code == 400
        assert (await g.chat(model="other")).status_code == 404
        assert (await g.chat(temperature=9)).status_code == 400
        assert (await g.chat("x" * 999)).status_code == 413
        assert (await g.post(CHAT, content=b"x", headers={"content-type": "text/plain"})).status_code == 415
        g.engine.script = g.engine.saying("ok")
        last = await g.chat()
        assert last.status_code == 200 and last.headers["x-ratelimit-remaining-requests"] == "0"
        assert (await g.chat(temperature=9)).status_code == 429
        totals = g.state.leases.totals(1)
        assert (totals.settled_requests, totals.settled_tokens > 0, g.outstanding()) == (6, True, 0)
        assert len(g.ledger.opened) == 1, "a refused call has no row"


@pytest.mark.case("T03")
async def test_when_we_cannot_serve_then_a_call_does_not_count() -> None:
    async with gateway(limits=Limits(requests_per_minute=1), connect=False) as g:
        for _ in range(3):
            refused = await g.chat()
            assert refused.status_code == 503 and refused.headers["x-ratelimit-remaining-requests"] == "1"


@pytest.mark.case("S15")
async def test_headers_cannot_name_a_team_a_tier_or_an_address() -> None:
    async with gateway() as g:
        g.holder.add("team-b")
        g.engine.script = g.engine.saying("ok")
        spoofed = {
            "x-terazi-team": "team-b",
            "x-terazi-tier": "gold",
            "x-team": "team-b",
            "x-forwarded-for": "127.0.0.1",
            "openai-organization": "team-b",
            "x-terazi-start-level": "0",
        }
        await g.post(CHAT, chat_body(), headers=spoofed)
        assert (g.ledger.rows[0].team, g.engine.submitted[0].team_id) == ("team-a", 1)


@pytest.mark.case("G04")
async def test_one_teams_keys_and_routes_share_its_limits() -> None:
    async with gateway(limits=Limits(requests_per_minute=2)) as g:
        g.engine.script = g.engine.saying("ok")
        second = g.holder.add("team-a", limits=Limits(requests_per_minute=2))
        assert (await g.chat()).status_code == 200
        assert (await g.chat(key=second)).status_code == 200
        assert (await g.chat(key=second)).status_code == 429
        assert (await g.post(TEXT, {"model": "x", "prompt": "x"})).status_code == 429


@pytest.mark.case("G47")
def test_a_limit_error_carries_its_numbers() -> None:
    error = limit_error(
        LimitExceeded(limit="requests", scope="team", name="red", hard=5, used=5, requested=1, retry_after_seconds=0.2)
    )
    assert isinstance(error, RateLimited)
    body = error.body("req-1")["error"]
    assert body["terazi"] | {"doc_url": ""} == {
        "scope": "team",
        "limit": 5,
        "used": 5,
        "requested": 1,
        "request_id": "req-1",
        "doc_url": "",
    }
    assert error.headers()["retry-after"] == "1" and error.headers()["retry-after-ms"] == "1000"


@pytest.mark.case("G47")
def test_a_limit_of_nothing_names_no_time_to_try_again() -> None:
    error = limit_error(
        LimitExceeded(limit="requests", scope="team", name="red", hard=0, used=0, requested=1, retry_after_seconds=60)
    )
    headers = error.headers()
    assert not {"retry-after", "retry-after-ms"} & headers.keys() and headers["x-should-retry"] == "false"
    assert "terazi quota set red --requests-per-minute" in error.message


@pytest.mark.case("G38")
async def test_junk_models_make_one_series() -> None:
    async with gateway() as g:
        for number in range(50):
            assert (await g.chat(model=f"junk-{number}")).status_code == 404
        assert dict(g.state.refused) == {"model_not_found": 50}


@pytest.mark.case("D15")
async def test_the_key_is_in_no_log_line_body_or_row(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    async with gateway() as g:
        g.engine.script = g.engine.saying("ok")
        secret = g.key.rsplit("-", 1)[1]
        bodies = [(await g.chat()).text, (await g.chat(temperature=9)).text, (await g.chat(key=g.key[:-1])).text]
        g.engine.script = lambda submit: g.engine.finish(submit.request_id, "error", message="boom")
        bodies.append((await g.chat()).text)
        lines = [record.getMessage() + str(vars(record)) for record in caplog.records]
        assert any("request ended" in line for line in lines)
        for text in (*bodies, *lines, str(g.ledger.rows), str(g.ledger.opened)):
            assert secret not in text


async def test_one_line_is_logged_for_each_ended_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="terazi.requests")
    async with gateway() as g:
        g.engine.script = g.engine.saying("ok")
        await g.chat("a private prompt")
        g.engine.script = lambda submit: g.engine.finish(
            submit.request_id,
            "stop",
            level_path=(0, 2, 1),
            num_preemptions=5,
            num_swaps=3,
            num_recomputes=1,
            num_promotions=2,
            longest_pause_us=1_234_567,
        )
        await g.chat()
        record, other = caplog.records
        costs = {name: vars(other)[name] for name in ("preemptions", "swaps", "recomputes", "promotions")}
        assert costs == {"preemptions": 5, "swaps": 3, "recomputes": 1, "promotions": 2}
        assert (vars(other)["levels"], vars(other)["longest_pause_ms"]) == ("0>2>1", 1234)
        assert (record.team, record.outcome, record.output_tokens, record.queue_ms) == ("team-a", "ok", 2, 2)  # type: ignore[attr-defined]
        assert "private" not in str(vars(record))
