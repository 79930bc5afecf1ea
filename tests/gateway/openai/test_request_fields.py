"""What becomes of each field of a request: served, refused by name, taken in silence, or named in the answer."""

import json
from typing import Any

import pytest

from gateway.errors import BadRequest
from gateway.openai import request_fields
from gateway.openai.request_fields import HARMLESS, UNSERVED, Unserved, ignored_header
from gateway.openai.wire import Endpoint, decode_request, served_fields
from tests.support.gateway.harness import CHAT, MODEL, TEXT, chat_body, gateway

pytestmark = pytest.mark.anyio

ENDPOINTS: tuple[Endpoint, ...] = (CHAT, TEXT)  # type: ignore[assignment]  # the harness has them as plain strings
PROMPTS: dict[str, Any] = {CHAT: {"messages": [{"role": "user", "content": "x"}]}, TEXT: {"prompt": "x"}}
# Values that ask for something, whatever the field is.
ASKING = ["more", 7, -7, 0.5, True, False, ["x"], {"x": {"y": [1]}}, "x" * 1000]


def body_of(endpoint: str, name: str, value: Any) -> bytes:
    """A request with one more field; a dot leads into `stream_options`."""
    outer, _, inner = name.partition(".")
    field = {outer: {inner: value}} if inner else {outer: value}
    return json.dumps({"model": MODEL, **PROMPTS[endpoint], **field}).encode()


def decode(endpoint: Endpoint, name: str, value: Any) -> tuple[str, ...]:
    return decode_request(endpoint, body_of(endpoint, name, value)).ignored_fields


def refusal(endpoint: Endpoint, name: str, value: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        decode(endpoint, name, value)
    return caught.value


def same(value: Any, neutral: Any) -> bool:
    return type(value) is type(neutral) and value == neutral


@pytest.mark.case("U06")
@pytest.mark.parametrize("row", UNSERVED, ids=lambda row: f"{row.name}{row.endpoint[:7]}")
def test_a_field_that_changes_the_answer_is_refused(row: Unserved) -> None:
    for endpoint in ENDPOINTS:
        if row.endpoint in ("", endpoint):
            for value in (None, *row.neutral):
                assert decode(endpoint, row.name, value) == ()
            for value in ASKING:
                if not any(same(value, neutral) for neutral in row.neutral):
                    error = refusal(endpoint, row.name, value)
                    assert (error.param, error.code, error.status) == (row.name, "unsupported_parameter", 400)
                    assert f"'{row.name}'" in error.message and "x" * 1000 not in error.message


@pytest.mark.case("U06")
@pytest.mark.parametrize("name", HARMLESS)
def test_a_field_that_changes_nothing_is_not_named(name: str) -> None:
    for endpoint in ENDPOINTS:
        for value in (None, True, "x", {"a": ["b"]}):
            assert decode(endpoint, name, value) == ()


@pytest.mark.case("U06")
@pytest.mark.parametrize(
    "name", ["max_token", "temprature", "", "extra_body", "chat-template", "N", "stream_options.include_usages", "日本"]
)
def test_a_field_nobody_knows_is_ignored_and_named(name: str) -> None:
    for endpoint in ENDPOINTS:
        for value in ASKING:
            assert decode(endpoint, name, value) == (name,)


@pytest.mark.parametrize(
    ("name", "value", "is_neutral"),
    [
        ("n", b"1.0", True),
        ("n", b"true", False),
        ("n", b"1e400", False),
        ("presence_penalty", b"-0.0", True),
        ("presence_penalty", b"false", False),
        ("tools", b" [ ] ", True),
        ("response_format", b'{"type": "text", "strict": true}', True),
        ("response_format", b"{}", True),
        ("response_format", b'{"type": "json_object"}', False),
        ("logit_bias", b'{"5": 1}', False),
        ("guided_json", b"{}", False),
        ("guided_json", b"[" * 200 + b"]" * 200, False),
        ("guided_json", b"[" * 100_000 + b"]" * 100_000, False),
    ],
)
def test_a_neutral_value_counts_in_every_spelling(name: str, value: bytes, is_neutral: bool) -> None:
    body = body_of(CHAT, name, "HERE").replace(b'"HERE"', value)
    if is_neutral:
        assert decode_request("/v1/chat/completions", body).ignored_fields == ()
    else:
        with pytest.raises(BadRequest) as caught:
            decode_request("/v1/chat/completions", body)
        assert caught.value.param == name or caught.value.code == "invalid_json"


def test_no_field_is_in_two_places() -> None:
    for endpoint in ENDPOINTS:
        rows = [row.name for row in UNSERVED if row.endpoint in ("", endpoint)]
        names = [*rows, *HARMLESS, *served_fields(endpoint)]
        assert len(set(names)) == len(names)


def test_of_a_doubled_field_the_last_counts() -> None:
    start = b'{"model": "m", "prompt": "x", '
    assert decode_request("/v1/completions", start + b'"n": 2, "n": 1}').ignored_fields == ()
    with pytest.raises(BadRequest):
        decode_request("/v1/completions", start + b'"n": 1, "n": 2}')


@pytest.mark.case("U06")
def test_more_fields_than_the_limit_are_refused() -> None:
    def sent(num_fields: int) -> bytes:
        others = {f"x{number}": number for number in range(num_fields - 2)}
        return json.dumps({"model": MODEL, "prompt": "x", **others}).encode()

    limit = request_fields.FIELDS_MAX
    assert len(decode_request("/v1/completions", sent(limit)).ignored_fields) == limit - 2
    for num_fields in (limit + 1, 100_000):
        with pytest.raises(BadRequest) as caught:
            decode_request("/v1/completions", sent(num_fields))
        assert caught.value.code == "too_many_fields" and str(limit) in caught.value.message


@pytest.mark.case("U06")
def test_the_header_is_short_and_safe_whatever_was_sent() -> None:
    assert ignored_header([]) == {}
    names = ["max_token", "a\r\nset-cookie: x", "ü, b", "", "y" * 100, *(f"x{number}" for number in range(200))]
    (value,) = ignored_header(names).values()
    parts = value.split(", ")
    assert parts[:5] == ["max_token", "a??set-cookie??x", "???b", "?", "y" * 40 + "..."]
    assert len(parts) == request_fields.IGNORED_NAMES_MAX + 1 and parts[-1] == "..."
    assert value.isascii() and value.isprintable() and len(value) < 1024
    assert "..." not in ignored_header([f"x{number}" for number in range(16)])["x-terazi-ignored-fields"]


@pytest.mark.case("U06")
@pytest.mark.parametrize("stream", [True, False])
async def test_the_answer_names_what_was_ignored(stream: bool) -> None:
    async with gateway() as g:
        g.engine.script = g.engine.saying("ok")
        known = await g.chat(stream=stream, user="u", metadata={"a": "b"}, store=True, n=1, tools=[])
        assert known.status_code == 200 and "x-terazi-ignored-fields" not in known.headers
        typo = await g.chat(stream=stream, max_token=5, foo=None)
        assert typo.status_code == 200 and typo.headers["x-terazi-ignored-fields"] == "max_token, foo"
        refused = await g.chat(stream=stream, min_p=0.1)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "min_p"


async def test_a_browser_may_read_the_header() -> None:
    async with gateway() as g:
        g.engine.script = g.engine.saying("ok")
        response = await g.post(CHAT, chat_body(max_token=5), headers={"origin": "http://x"})
        assert "x-terazi-ignored-fields" in response.headers["access-control-expose-headers"]
