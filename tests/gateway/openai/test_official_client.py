"""The official openai client over TCP, unchanged: answers, streams, and errors as its own exception classes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from tenants.quotas import Limits
from tests.support.gateway.harness import MODEL, Gateway, gateway

pytestmark = pytest.mark.anyio

MESSAGES: Any = [{"role": "user", "content": "hello"}]


@asynccontextmanager
async def client(g: Gateway, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=options.pop("base_url", f"{g.url}/v1"),
        api_key=options.pop("api_key", g.key),
        max_retries=options.pop("max_retries", 0),
        **options,
    ) as sdk:
        yield sdk


async def test_chat_and_completions_without_streaming() -> None:
    async with gateway(tcp=True) as g, client(g) as sdk:
        g.engine.script = g.engine.saying("Merhaba 😀")
        chat = await sdk.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=50, seed=1)
        assert chat.choices[0].message.content == "Merhaba 😀" and chat.choices[0].finish_reason == "stop"
        assert chat.usage is not None and chat.usage.completion_tokens == len("Merhaba 😀".encode())
        assert chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens
        assert chat._request_id is not None
        text = await sdk.completions.create(model=MODEL, prompt="hello", max_tokens=4)
        assert (text.choices[0].text, text.choices[0].finish_reason) == ("Merh", "length")
        ids = await sdk.completions.create(model=MODEL, prompt=[5, 6, 7])
        assert ids.usage is not None and ids.usage.prompt_tokens == 3


@pytest.mark.case("G33", "K58")
async def test_streams_are_parsed_and_end_with_usage() -> None:
    async with gateway(tcp=True) as g, client(g) as sdk:
        words = "to be\n\ndata: or not"
        g.engine.script = g.engine.saying(words)
        stream = await sdk.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == words
        assert [c.usage.completion_tokens for c in chunks if c.usage] == [len(words)]
        assert chunks[-1].choices == [] and len({c.id for c in chunks}) == 1
        plain = await sdk.completions.create(model=MODEL, prompt="x", stream=True)
        assert "".join([c.choices[0].text async for c in plain]) == words


@pytest.mark.case("A12")
async def test_keep_alive_comments_do_not_disturb_the_sdk() -> None:
    async with gateway(tcp=True) as g, client(g) as sdk:
        asking = asyncio.create_task(sdk.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True))
        submit = await g.engine.next_submit()
        g.clock.advance(15)
        stream = await asking
        chunks = aiter(stream)
        for text in ("a", "b"):
            g.clock.advance(15)
            g.engine.say(submit.request_id, text)
            while (chunk := await anext(chunks)).choices[0].delta.content != text:
                assert chunk.choices[0].delta.content == ""
        g.clock.advance(15)
        g.engine.finish(submit.request_id, "stop")
        assert [c.choices[0].finish_reason async for c in chunks] == ["stop"]


async def test_the_sync_client_works_from_its_own_thread() -> None:
    async with gateway(tcp=True) as g:
        g.engine.script = g.engine.saying("sync")

        def ask() -> str:
            with (
                openai.OpenAI(base_url=f"{g.url}/v1/", api_key=g.key, max_retries=0) as sdk,
                sdk.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True) as stream,
            ):
                return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)

        assert await asyncio.to_thread(ask) == "sync"


async def test_models_are_listed_and_found() -> None:
    async with gateway(tcp=True) as g, client(g) as sdk:
        assert [model.id async for model in sdk.models.list()] == [MODEL]
        assert (await sdk.models.retrieve(MODEL)).owned_by == "terazi"
        with pytest.raises(openai.NotFoundError):
            await sdk.models.retrieve("org/other")


@pytest.mark.case("A16")
async def test_errors_are_the_sdks_own_classes() -> None:
    async with gateway(tcp=True, limits=Limits(requests_per_minute=3)) as g, client(g) as sdk:
        with pytest.raises(openai.BadRequestError) as bad:
            await sdk.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=5)
        assert (bad.value.param, bad.value.code) == ("temperature", "invalid_value")
        with pytest.raises(openai.NotFoundError) as unknown:
            await sdk.chat.completions.create(model="gpt", messages=MESSAGES)
        assert unknown.value.code == "model_not_found"
        async with client(g, api_key="wrong") as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.chat.completions.create(model=MODEL, messages=MESSAGES)
        g.engine.script = g.engine.saying("ok")
        await sdk.chat.completions.create(model=MODEL, messages=MESSAGES)
        with pytest.raises(openai.RateLimitError) as limited:
            await sdk.chat.completions.create(model=MODEL, messages=MESSAGES)
        assert limited.value.type == "rate_limit_error" and int(limited.value.response.headers["retry-after"]) >= 1
        g.engine.die()
        await g.state.engine.wait_closed()
        g.clock.advance(61)
        with pytest.raises(openai.InternalServerError) as down:
            await sdk.chat.completions.create(model=MODEL, messages=MESSAGES)
        assert down.value.status_code == 503


@pytest.mark.case("K39")
async def test_an_error_in_a_stream_is_raised_not_taken_for_an_end() -> None:
    async with gateway(tcp=True) as g, client(g) as sdk:
        asking = asyncio.create_task(sdk.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True))
        submit = await g.engine.next_submit()
        g.engine.say(submit.request_id, "half")
        stream = await asking
        g.engine.die()
        with pytest.raises(openai.APIError, match="engine stopped"):
            async for _ in stream:
                pass


@pytest.mark.case("B07")
async def test_a_retry_of_the_sdk_is_a_request_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway(tcp=True) as g, client(g, max_retries=1) as sdk:

        async def no_pause(**_: Any) -> None:
            return None

        monkeypatch.setattr(sdk, "_sleep_for_retry", no_pause)
        asking = asyncio.create_task(sdk.chat.completions.create(model=MODEL, messages=MESSAGES))
        first = await g.engine.next_submit()
        g.engine.script = g.engine.saying("second time")
        g.engine.finish(first.request_id, "error", message="once")
        answer = await asking
        assert answer.choices[0].message.content == "second time"
        assert [row.outcome for row in g.ledger.rows] == ["error", "ok"]
        assert len({row.request_id for row in g.ledger.rows}) == 2
