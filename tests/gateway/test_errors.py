"""The one error envelope: each refusal has it, and its tree is the documented one."""

import pytest

from gateway import errors
from gateway.openai.app import HttpSettings
from tests.gateway.openai.test_app import envelope
from tests.support.gateway.harness import CHAT, MODEL, gateway

pytestmark = pytest.mark.anyio


@pytest.mark.case("A16")
async def test_every_refusal_has_the_envelope() -> None:
    async with gateway(settings=HttpSettings(max_body_bytes=200)) as g:
        bearer = {"authorization": f"Bearer {g.key}"}
        seen = {}
        for response in (
            await g.post(CHAT, content=b"{"),
            await g.post(CHAT, {"model": MODEL, "messages": []}),
            await g.chat(key="wrong"),
            await g.http.get("/nowhere"),
            await g.http.get(CHAT, headers=bearer),
            await g.post(CHAT, content=b"x" * 201),
            await g.post(CHAT, content=b"a=b", headers={"content-type": "text/xml"}),
            await g.chat(model="gpt-5"),
            await g.http.get("/v1/models/nope", headers=bearer),
        ):
            seen[response.status_code] = envelope(response)["code"]
        g.engine.die()
        await g.state.engine.wait_closed()
        dead = await g.chat()
        seen[dead.status_code] = envelope(dead)["code"]
        assert seen == {
            400: "empty_messages",
            401: "invalid_api_key",
            404: "model_not_found",
            405: "method_not_allowed",
            413: "request_too_large",
            415: "unsupported_media_type",
            503: "engine_unavailable",
        }


def test_the_tree_in_the_docstring_is_the_tree_in_the_code() -> None:
    documented = errors.__doc__ or ""
    todo = [errors.GatewayError]
    while todo:
        kind = todo.pop()
        todo += kind.__subclasses__()
        if kind.__module__ != errors.__name__ or kind in (errors.GatewayError, errors.Retryable):
            continue
        (line,) = [line for line in documented.splitlines() if f" {kind.__name__} " in line]
        assert str(kind.status) in line and kind.type in line
        assert kind.default_code in line or "(named by" in line or "(the limit" in line


@pytest.mark.parametrize("seconds", [-5, 0, 0.2, 1, 59.1])
@pytest.mark.case("G47")
def test_retry_after_is_whole_seconds_and_never_in_the_past(seconds: float) -> None:
    for kind in (errors.RateLimited, errors.QuotaSpent, errors.Overloaded, errors.Unavailable, errors.EngineDied):
        headers = kind("x", retry_after_seconds=seconds).headers()
        assert int(headers["retry-after"]) == max(1, -int(-seconds // 1))
    assert errors.QuotaSpent("x").headers()["x-should-retry"] == "false"
