"""JSON as clients send it: marks and encodings before it, whole numbers with a fraction."""

import json
from typing import Any

import pytest

from gateway.errors import BadRequest
from gateway.openai.json_body import FLOAT_EXACT_MAX
from gateway.openai.wire import Endpoint, decode_request
from tests.support.gateway.harness import CHAT, MODEL, chat_body, gateway

pytestmark = pytest.mark.anyio

CHAT_ROUTE: Endpoint = "/v1/chat/completions"
TEXT_ROUTE: Endpoint = "/v1/completions"
NAMES = ["max_tokens", "max_completion_tokens", "min_tokens", "top_k", "seed", "stop_token_ids", "prompt", "n"]


def body_of(name: str, number: str) -> tuple[Endpoint, bytes]:
    """A request with `number` as it stands in one field; a list of it where the field is a list."""
    value = f"[5, {number}]" if name in ("stop_token_ids", "prompt") else number
    head = f'{{"model": "{MODEL}", "max_completion_tokens": 9' if name == "min_tokens" else f'{{"model": "{MODEL}"'
    prompt = "" if name == "prompt" else ', "prompt": "x"'
    return TEXT_ROUTE, f'{head}{prompt}, "{name}": {value}}}'.encode()


def refusal(endpoint: Endpoint, body: bytes) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        decode_request(endpoint, body)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.case("H12")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spelling", ["8.0", "8e0", "0.8e1", "80E-1"])
def test_a_whole_number_counts_however_it_is_written(name: str, spelling: str) -> None:
    if name == "n":
        spelling = spelling.replace("8", "1", 1) if spelling in ("8.0", "8e0") else "1.0"
        assert decode_request(*body_of(name, spelling)) == decode_request(*body_of(name, "1"))
        return
    floats, ints = decode_request(*body_of(name, spelling)), decode_request(*body_of(name, "8"))
    assert floats == ints and repr(floats) == repr(ints), "8.0 is equal to 8, so the types are compared too"


@pytest.mark.case("H12")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrong", ["8.5", '"8"', "1e400", "-1e400", "true", "8.0000001", "[8]", "{}", "1e300"])
def test_what_is_no_whole_number_is_refused_by_name(name: str, wrong: str) -> None:
    if name == "prompt" and wrong in ('"8"', "[8]"):
        assert refusal(*body_of(name, wrong)).param == "prompt"
        return
    param = refusal(*body_of(name, wrong)).param
    assert param is not None and param.partition("[")[0] == name


@pytest.mark.case("H12")
def test_a_float_that_is_not_exact_is_refused() -> None:
    """2^53 + 1 as a float is 2^53, so nobody can know which of them was meant."""
    exact = float(FLOAT_EXACT_MAX)
    assert decode_request(*body_of("seed", f"{exact:.1f}")).seed == FLOAT_EXACT_MAX == 2**53 - 1
    for written in ("9007199254740992.0", "9007199254740993.0", "1e16", "-9007199254740992.0"):
        error = refusal(*body_of("seed", written))
        assert error.param == "seed" and "all of its digits" in error.message
    assert decode_request(*body_of("seed", "9007199254740993")).seed == 2**53 + 1, "digits are exact at any length"


@pytest.mark.case("H12")
def test_the_message_speaks_of_whole_numbers() -> None:
    assert refusal(*body_of("max_tokens", "8.5")).message == "'max_tokens' must be a whole number, not 8.5."
    assert "float" not in refusal(*body_of("max_tokens", '"8"')).message
    assert refusal(*body_of("stop_token_ids", "8.5")).param == "stop_token_ids[1]"
    error = refusal(CHAT_ROUTE, json.dumps(chat_body(max_tokens=8.5, max_completion_tokens=8)).encode())
    assert error.param == "max_tokens", "also where the other name would win"


@pytest.mark.case("H12")
async def test_max_tokens_of_8_0_reserves_and_gives_8() -> None:
    async with gateway() as g:
        g.engine.script = g.engine.saying("more than eight")
        response = await g.chat(max_tokens=8.0, top_k=3.0, seed=4.0, min_tokens=2.0, stop_token_ids=[9.0])
        assert response.json()["usage"]["completion_tokens"] == 8
        sampling = g.engine.submitted[0].sampling
        assert repr((sampling.max_tokens, sampling.top_k, sampling.seed, sampling.min_tokens)) == "(8, 3, 4, 2)"
        assert repr(sampling.stop_token_ids) == "(9,)" and g.ledger.opened[0].max_tokens == 8


@pytest.mark.case("H10")
@pytest.mark.parametrize("document", [chat_body(), chat_body("Española 😀")])
def test_a_byte_order_mark_is_not_in_the_way(document: Any) -> None:
    body = json.dumps(document, ensure_ascii=False).encode()
    assert decode_request(CHAT_ROUTE, b"\xef\xbb\xbf" + body) == decode_request(CHAT_ROUTE, body)


ENCODINGS = ["latin-1", "cp1252", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be", "cp1254"]


@pytest.mark.case("H10")
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("content_type", ["application/json", None])
async def test_another_encoding_is_refused_in_words(encoding: str, content_type: str | None) -> None:
    async with gateway() as g:
        body = json.dumps(chat_body("España"), ensure_ascii=False).encode(encoding)
        headers = {} if content_type is None else {"content-type": content_type}
        response = await g.post(CHAT, content=body, headers=headers)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "invalid_encoding")
        assert "UTF-8" in error["message"] and "Content-Type: application/json; charset=utf-8" in error["message"]
        assert encoding[:6].upper() in error["message"] or "byte 0xF1 at position" in error["message"]


@pytest.mark.parametrize(
    "body", [b"\xef\xbb\xbf", b"\xef\xbb\xbf" * 2 + b"{}", b"\xef\xbb\xbf{", b"\xef\xbb", b"{\x00"]
)
def test_a_mark_alone_doubled_or_cut_is_a_400(body: bytes) -> None:
    assert refusal(CHAT_ROUTE, body).code in ("invalid_json", "invalid_encoding")
