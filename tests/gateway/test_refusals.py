"""A refused call leaves one log line that its request id finds; floods leave few, and say how many were left out."""

import asyncio
import logging
import secrets
from collections import Counter
from typing import Any

import httpx
import pytest

from gateway.admin.app import AdminState
from gateway.listen.listeners import limited_protocol, make_server
from gateway.logs import JsonFormatter, TextFormatter
from gateway.openai.app import HttpSettings
from gateway.refusals import WINDOW_SECONDS, RefusalLog, wire_refusals
from gateway.settings.values import SettingsError, load
from tenants import key_format
from tenants.quotas import Limits
from tests.support.gateway.admin import TOKEN
from tests.support.gateway.admin import client_of as admin_client_of
from tests.support.gateway.harness import CHAT, MODEL, FakeClock, Gateway, chat_body, gateway, served
from tests.support.tenants.stores import Store

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="terazi")


def lines(caplog: pytest.LogCaptureFixture, message: str = "request refused") -> list[dict[str, Any]]:
    """The fields of each such line, in order."""
    return [vars(record) for record in caplog.records if record.getMessage() == message]


async def refused_in_every_way(g: Gateway) -> list[httpx.Response]:
    """One refusal of each kind that one call can meet."""
    bearer = {"authorization": f"Bearer {g.key}"}
    revoked, expired = g.holder.add("gone", is_revoked=True), g.holder.add("late", expires_at_us=1)
    stranger = key_format.render(key_format.new_key())
    answers = [
        await g.http.post(CHAT, json=chat_body()),
        await g.chat(key="nonsense"),
        await g.chat(key=stranger),
        await g.chat(key=revoked),
        await g.chat(key=expired),
        await g.http.get("/v1/models", headers={"authorization": f"Bearer {stranger}"}),
        await g.http.get("/v1/models/nope", headers=bearer),
        await g.http.get("/nowhere"),
        await g.http.get(CHAT, headers=bearer),
        await g.http.get("/livez", headers={f"x-{n}": "y" for n in range(200)}),
        await g.post(CHAT, content=b"{"),
        await g.post(CHAT, content=b"x" * 301),
        await g.post(CHAT, content=b"a=b", headers={"content-type": "text/xml"}),
        await g.chat(model="gpt-5"),
    ]
    g.ledger.is_full = True
    answers.append(await g.chat())
    g.ledger.is_full = False
    g.state.is_draining = True
    answers.append(await g.chat())
    g.state.is_draining = False
    g.engine.die()
    await g.state.engine.wait_closed()
    return [*answers, await g.chat()]


@pytest.mark.case("U07")
async def test_each_refusal_leaves_one_line_that_its_id_finds(caplog: pytest.LogCaptureFixture) -> None:
    async with gateway(settings=HttpSettings(max_body_bytes=300)) as g:
        answers = await refused_in_every_way(g)
        written = lines(caplog)
        assert [(line["status"], line["error_code"], line["request_id"]) for line in written] == [
            (answer.status_code, answer.json()["error"]["code"], answer.headers["x-request-id"]) for answer in answers
        ]
        statuses = [answer.status_code for answer in answers]
        assert statuses == [401] * 6 + [404, 404, 405, 431, 400, 413, 415, 404, 503, 503, 503]
        assert g.state.refused == Counter(line["error_code"] for line in written)
        assert {line["peer"] for line in written} == {"127.0.0.1"}


@pytest.mark.case("U07")
async def test_a_line_names_team_and_key_only_of_a_right_secret(caplog: pytest.LogCaptureFixture) -> None:
    async with gateway(limits=Limits(requests_per_minute=0)) as g:
        revoked = g.holder.add("gone", is_revoked=True)
        forged = key_format.render(key_format.ParsedKey(g.holder.identity_of("team-a").key_public_id, "0" * 43))
        for key in (g.key, revoked, forged, "sk-someone-elses-key"):
            await g.chat(key=key)
        own, gone, wrong, other = lines(caplog)
        public_id = key_format.parse(g.key)
        assert public_id is not None
        assert (own["status"], own["team"], own["key_public_id"]) == (429, "team-a", public_id.public_id)
        assert (gone["error_code"], gone["team"]) == ("key_revoked", "gone")
        assert wrong["claimed_key"] == public_id.public_id
        assert not {"team", "key_public_id"} & (wrong.keys() | other.keys()), "whoever knows an id is not its owner"
        assert "claimed_key" not in other


@pytest.mark.case("U07")
async def test_a_refused_request_that_was_booked_has_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async with gateway() as g:
        asked = asyncio.create_task(g.chat())
        submit = await g.engine.next_submit()
        g.engine.refuse(submit.request_id, "queue_full")
        answer = await asked
        assert answer.status_code == 429
        (ended,) = lines(caplog, "request ended")
        assert (ended["request_id"], ended["error_code"]) == (answer.headers["x-request-id"], "queue_full")
        assert ended["peer"] == "127.0.0.1"
        assert lines(caplog) == []
        assert g.state.refused == {"queue_full": 1}


@pytest.mark.case("U07")
async def test_a_callers_own_request_id_is_found_too(caplog: pytest.LogCaptureFixture) -> None:
    async with gateway() as g:
        g.engine.script = g.engine.saying("ok")
        mine = {"x-request-id": "mine-1"}
        await g.post(CHAT, chat_body(), headers=mine)
        refused = await g.post(CHAT, chat_body(model="no"), headers=mine)
        for line in (*lines(caplog, "request ended"), *lines(caplog)):
            assert line["client_request_id"] == "mine-1"
        assert lines(caplog)[0]["request_id"] == refused.headers["x-terazi-request-id"]


@pytest.mark.case("U07")
@pytest.mark.parametrize("formatter", [JsonFormatter(), TextFormatter()])
async def test_what_a_caller_sends_begins_no_line_and_tells_nothing(
    caplog: pytest.LogCaptureFixture, formatter: logging.Formatter
) -> None:
    async with gateway() as g:
        secret, prompt = secrets.token_hex(20), "the launch is on friday"
        await g.http.get(f"/v1/%0a2026-01-01T00:00:00Z%20error%20terazi%20forged%1b[31m/{'x' * 9000}")
        await g.http.get(
            f"/v1/models/trz-abcdefGHIJKL-{secret}?key={secret}", headers={"authorization": f"Bearer {g.key}"}
        )
        await g.post(CHAT, {"model": MODEL, "messages": [{"role": prompt, "content": prompt}]})
        await g.post(CHAT, content=f'{{"{prompt}'.encode())
        texts = [formatter.format(record) for record in caplog.records]
        assert len(texts) == 4
        for text in texts:
            assert "\n" not in text and "\x1b" not in text and len(text) < 1000
            assert secret not in text and prompt not in text and key_of(g) not in text


def key_of(g: Gateway) -> str:
    return g.key.rpartition("-")[2]


@pytest.mark.case("U07")
async def test_a_proxys_header_is_not_believed(caplog: pytest.LogCaptureFixture) -> None:
    async with gateway(tcp=True) as g:
        await g.http.get("/nowhere", headers={"x-forwarded-for": "203.0.113.9", "forwarded": "for=203.0.113.9"})
        assert [line["peer"] for line in lines(caplog)] == ["127.0.0.1"]
    assert not make_server(nothing, keep_alive_timeout=1, drain_timeout=1).config.proxy_headers


@pytest.mark.case("U07")
async def test_a_flood_leaves_few_lines_and_the_next_counts_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    async with gateway(refusal_lines_per_minute=3) as g:
        for _ in range(10):
            await g.chat(model="no")
        await g.chat(key="nonsense")
        assert [line["error_code"] for line in lines(caplog)] == ["model_not_found"] * 3 + ["invalid_api_key"]
        g.clock.advance(WINDOW_SECONDS)
        await g.chat(model="no")
        await g.chat(model="no")
        assert [line.get("suppressed") for line in lines(caplog)[4:]] == [7, None]
        assert g.state.refused["model_not_found"] == 12, "counted all the same"


@pytest.mark.case("U07")
async def test_strangers_cannot_evade_the_limit_with_new_ids(caplog: pytest.LogCaptureFixture) -> None:
    async with gateway(refusal_lines_per_minute=2) as g:
        for _ in range(6):
            await g.chat(key=key_format.render(key_format.new_key()))
        assert len(lines(caplog)) == 2


def test_callers_with_a_count_of_their_own_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    log = RefusalLog(2, clock=clock.monotonic, buckets_max=3)
    for number in range(10):
        for _ in range(5):
            log.write("public", "invalid_api_key", f"peer-{number}", {})
        assert log.num_buckets <= 3
    assert len(lines(caplog)) == 3 * 2 + 2, "the others share one count"
    clock.advance(WINDOW_SECONDS)
    log.write("public", "invalid_api_key", "peer-new", {})
    assert log.num_buckets == 3
    (left_out,) = lines(caplog, "requests refused without a line")
    assert (left_out["caller"], left_out["suppressed"]) == ("peer-0", 3)


def test_the_limit_of_lines_holds_at_its_edges(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    RefusalLog(0, clock=clock.monotonic).write("public", "x", "peer", {})
    assert lines(caplog) == []
    log = RefusalLog(1, clock=clock.monotonic)
    log.write("public", "x", "peer", {})
    clock.advance(WINDOW_SECONDS - 0.001)
    log.write("public", "x", "peer", {})
    assert len(lines(caplog)) == 1
    clock.advance(0.001)
    log.write("public", "x", "peer", {})
    assert len(lines(caplog)) == 2
    assert load({}, {}).refusal_lines_per_minute == 60
    with pytest.raises(SettingsError, match="at least 0"):
        load({}, {"TERAZI_REFUSAL_LINES_PER_MINUTE": "-1"})


@pytest.mark.case("U07")
@pytest.mark.parametrize(
    ("sent", "code", "room"),
    [
        (b"what is this\r\n\r\n", "invalid_http", 10),
        (b"", "no_capacity", 0),
    ],
)
async def test_what_never_became_a_call_leaves_a_line(
    caplog: pytest.LogCaptureFixture, sent: bytes, code: str, room: int
) -> None:
    clock, counts = FakeClock(), Counter[str]()
    told = wire_refusals(RefusalLog(clock=clock.monotonic), "public", counts)
    async with served(nothing, HttpSettings(), limited_protocol(room, on_refusal=told)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        answer = await reader.read()
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    (line,) = lines(caplog)
    assert (line["error_code"], line["peer"], line["listener"]) == (code, "127.0.0.1", "public")
    assert f"x-request-id: {line['request_id']}".encode() in head
    assert line["request_id"].encode() in body
    assert counts == {code: 1}


async def nothing(scope: Any, receive: Any, send: Any) -> None: ...


@pytest.mark.case("U07")
async def test_the_admin_listener_logs_its_refusals_too(caplog: pytest.LogCaptureFixture, store: Store) -> None:
    clock = FakeClock()
    state = AdminState(
        token=TOKEN,
        database=store.database,
        snapshot_holder=store.holder,
        refusals=RefusalLog(clock=clock.monotonic),
    )
    async with admin_client_of(state) as client:
        wrong = await client.get("/admin/v1/teams", headers={"authorization": f"Bearer {'x' * 32}"})
        missing = await client.get("/admin/v1/teams/nobody")
        unready = await client.get("/readyz")
    assert (wrong.status_code, missing.status_code, unready.status_code) == (401, 404, 503)
    written = lines(caplog)
    assert [(line["listener"], line["status"], line["request_id"]) for line in written] == [
        ("admin", answer.status_code, answer.headers["x-request-id"]) for answer in (wrong, missing)
    ], "a probe that is not ready is no refusal"
    assert "x" * 32 not in str(written)
