"""One request's way, in-process: status, body and ledger row, with an engine that does what the test says."""

import asyncio

import pytest

from gateway.openai.app import HttpSettings
from tenants.quotas import Limits
from tests.support.gateway.fake_engine import byte_ids, hello
from tests.support.gateway.harness import (
    CHAT,
    MODEL,
    TEXT,
    chat_body,
    events,
    gateway,
    text_of,
    tiny_model_tokenizer,
)

pytestmark = pytest.mark.anyio


async def test_one_answer_one_settlement_one_row() -> None:
    async with gateway(limits=Limits(tokens_per_minute=5000)) as g:
        g.engine.script = g.engine.saying("Hello!")
        response = await g.chat("hello", max_tokens=9, seed=3, temperature=0.5)
        assert response.status_code == 200
        body = response.json()
        assert body["choices"][0]["message"]["content"] == "Hello!"
        assert body["choices"][0]["finish_reason"] == "stop"
        prompt = len(g.engine.submitted[0].prompt_token_ids)
        assert body["usage"]["prompt_tokens"] == prompt and body["usage"]["completion_tokens"] == 6
        submit = g.engine.submitted[0]
        assert (submit.team_id, submit.start_level, submit.max_queue_us) == (1, 0, 55_000_000)
        assert (submit.sampling.max_tokens, submit.sampling.seed, submit.sampling.temperature) == (9, 3, 0.5)
        (row,) = g.ledger.rows
        assert (row.team, row.tier, row.model, row.engine_id, row.engine_epoch) == ("team-a", "gold", MODEL, "fake", 7)
        assert (row.prompt_tokens, row.output_tokens, row.max_tokens) == (prompt, 6, 9)
        assert (row.outcome, row.finish_reason, row.error_code) == ("ok", "stop", None)
        assert (row.device_us, row.level_path, row.endpoint, row.stream) == (6000, "0", CHAT, False)
        assert row.started_at_us == row.admitted_at_us + 2500
        assert row.first_token_at_us == row.admitted_at_us + 3500
        assert g.outstanding() == 0
        totals = g.state.leases.totals(1)
        assert totals.is_balanced and totals.settled_tokens == prompt + 6
        assert g.clock.num_timers == 0


@pytest.mark.case("G03", "B08")
async def test_streamed_or_not_the_settled_numbers_are_the_engines() -> None:
    async with gateway() as g:
        g.engine.script = g.engine.saying("the same words")
        plain = await g.chat("count me", seed=1)
        streamed = await g.chat("count me", seed=1, stream=True, stream_options={"include_usage": True})
        documents = events(streamed.text)
        assert text_of(documents) == plain.json()["choices"][0]["message"]["content"] == "the same words"
        assert documents[-2]["usage"] == plain.json()["usage"]
        one, two = g.ledger.rows
        for name in ("prompt_tokens", "output_tokens", "device_us", "finish_reason", "outcome"):
            assert getattr(one, name) == getattr(two, name)
        assert plain.json()["usage"]["prompt_tokens"] == len(g.engine.submitted[0].prompt_token_ids)


@pytest.mark.case("G34")
async def test_the_ledger_is_the_same_whether_or_not_usage_is_asked_for() -> None:
    async with gateway() as g:
        g.engine.script = g.engine.saying("abc")
        silent = await g.chat(stream=True)
        assert "usage" not in silent.text
        await g.chat(stream=True, stream_options={"include_usage": True})
        one, two = g.ledger.rows
        assert (one.prompt_tokens, one.output_tokens) == (two.prompt_tokens, two.output_tokens)


@pytest.mark.case("K58")
async def test_max_tokens_ends_with_length() -> None:
    async with gateway() as g:
        g.engine.script = g.engine.saying("a long story")
        body = (await g.chat(max_tokens=4)).json()
        assert body["choices"][0] == {
            "index": 0,
            "message": {"role": "assistant", "content": "a lo", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
        }
        assert g.ledger.rows[0].finish_reason == "length"


@pytest.mark.case("A01", "K64")
@pytest.mark.parametrize("asked", [32_000, 10**15])
async def test_a_cap_beyond_the_room_is_clamped_and_reserved_so(asked: int) -> None:
    async with gateway(greeting=hello(context_len=64), limits=Limits(tokens_per_minute=64)) as g:
        g.engine.script = g.engine.saying("ok")
        response = await g.chat("hi", max_tokens=asked)
        assert response.status_code == 200
        submit = g.engine.submitted[0]
        assert len(submit.prompt_token_ids) + submit.sampling.max_tokens == 64
        assert g.ledger.rows[0].max_tokens == submit.sampling.max_tokens


@pytest.mark.case("E09", "K64")
async def test_without_a_cap_the_default_ends_a_model_that_never_stops() -> None:
    async with gateway(settings=HttpSettings(default_max_tokens=32)) as g:
        g.engine.script = g.engine.saying("x" * 500)
        body = (await g.chat(max_tokens=None)).json()
        assert body["usage"]["completion_tokens"] == 32
        assert body["choices"][0]["finish_reason"] == "length"
        assert g.ledger.opened[0].max_tokens == 32


async def test_when_the_pool_is_below_the_context_it_is_the_clamp() -> None:
    async with gateway(greeting=hello(block_size=16, num_device_blocks=3)) as g:
        g.engine.script = g.engine.saying("ok")
        await g.chat("hi")
        submit = g.engine.submitted[0]
        assert len(submit.prompt_token_ids) + submit.sampling.max_tokens == 48
        too_long = await g.chat("a" * 60)
        assert too_long.status_code == 400 and too_long.json()["error"]["code"] == "context_length_exceeded"
        assert (
            "KV memory" in too_long.json()["error"]["message"] and "--kv-memory" in too_long.json()["error"]["message"]
        )


@pytest.mark.case("K66")
@pytest.mark.parametrize("extra", [0, 1, 5000])
async def test_a_prompt_beyond_the_context_is_refused_before_it_queues(extra: int) -> None:
    async with gateway(greeting=hello(context_len=32), limits=Limits(tokens_per_minute=10)) as g:
        response = await g.post(TEXT, {"model": MODEL, "prompt": [5] * (32 + extra)})
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        assert error["terazi"]["limit"] == 32
        assert "model's context" in error["message"] and "KV memory" not in error["message"]
        assert not g.engine.submitted and not g.ledger.opened and g.outstanding() == 0


@pytest.mark.case("K68")
@pytest.mark.parametrize("token_id", [-1, 512, 10**12])
async def test_a_token_id_outside_the_vocabulary_is_refused_by_position(token_id: int) -> None:
    async with gateway() as g:
        response = await g.post(TEXT, {"model": MODEL, "prompt": [5, token_id]})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == "prompt" and "prompt[1]" in error["message"]


@pytest.mark.case("A09")
async def test_token_ids_are_taken_as_they_are_and_billed_by_their_count() -> None:
    async with gateway() as g:
        g.engine.script = g.engine.saying("yes")
        response = await g.post(TEXT, {"model": MODEL, "prompt": [5, 6, 7]})
        assert g.engine.submitted[0].prompt_token_ids == (5, 6, 7)
        assert response.json()["usage"]["prompt_tokens"] == 3
        assert response.json()["choices"][0]["text"] == "yes"


@pytest.mark.case("A04")
async def test_the_same_words_as_parts_cost_the_same() -> None:
    async with gateway() as g:
        g.engine.script = g.engine.saying("ok")
        one = await g.post(CHAT, chat_body("two words"))
        parts = [{"role": "user", "content": [{"type": "text", "text": "two words"}]}]
        two = await g.post(CHAT, {"model": MODEL, "messages": parts})
        assert one.json()["usage"] == two.json()["usage"]


@pytest.mark.case("E08")
async def test_a_base_model_says_so_and_serves_completions() -> None:
    async with gateway(tokenizer=tiny_model_tokenizer(template=None)) as g:
        g.engine.script = g.engine.saying("text")
        response = await g.chat()
        assert response.status_code == 400
        assert response.json()["error"]["message"] == "This model has no chat template; use /v1/completions."
        assert (await g.post(TEXT, {"model": MODEL, "prompt": "x"})).status_code == 200
        listed = (await g.http.get("/v1/models", headers={"authorization": f"Bearer {g.key}"})).json()["data"][0]
        assert listed["endpoints"] == [TEXT]


@pytest.mark.case("K48", "K51")
async def test_a_stop_string_ends_the_engines_work_too() -> None:
    async with gateway() as g:
        g.engine.is_hung = True
        request = asyncio.create_task(g.chat(stop=["END", "\n\n"]))
        submit = await g.engine.next_submit()
        g.engine.say(submit.request_id, "keep E")
        g.engine.say(submit.request_id, "N")
        g.engine.say(submit.request_id, "D and more")
        assert await g.engine.next_abort() == submit.request_id
        g.engine.say(submit.request_id, "!")  # one step was on its way
        g.engine.finish(submit.request_id, "abort")
        body = (await request).json()
        assert body["choices"][0]["message"]["content"] == "keep "
        assert body["choices"][0]["finish_reason"] == "stop"
        (row,) = g.ledger.rows
        assert (row.outcome, row.finish_reason) == ("ok", "stop")
        used = body["usage"]["completion_tokens"]
        assert used == row.output_tokens == 18, "usage, quota and ledger say one number, the engine's"
        assert g.state.leases.totals(1).settled_tokens == body["usage"]["total_tokens"]
        assert g.outstanding() == 0


@pytest.mark.case("K48")
async def test_a_stream_never_shows_a_stop_string_or_a_part_of_it() -> None:
    async with gateway() as g:
        g.engine.script = g.engine.saying("one E two EN three END four")
        documents = events((await g.chat(stream=True, stop="END")).text)
        assert text_of(documents) == "one E two EN three "
        assert documents[-2]["choices"][0]["finish_reason"] == "stop"


async def test_a_stop_string_survives_an_engine_that_dies_on_the_abort() -> None:
    async with gateway() as g:
        g.engine.is_hung = True
        request = asyncio.create_task(g.chat(stop="END"))
        submit = await g.engine.next_submit()
        g.engine.say(submit.request_id, "done END")
        await g.engine.next_abort()
        g.engine.die()
        body = (await request).json()
        assert body["choices"][0]["message"]["content"] == "done "
        assert body["usage"]["completion_tokens"] == 8 == g.ledger.rows[0].output_tokens


@pytest.mark.case("K52")
async def test_a_character_cut_by_max_tokens_is_the_same_streamed_or_not() -> None:
    async with gateway() as g:
        g.engine.script = g.engine.saying("a😀")
        plain = (await g.chat(max_tokens=3)).json()["choices"][0]["message"]["content"]
        assert text_of(events((await g.chat(max_tokens=3, stream=True)).text)) == plain == "a\ufffd"


@pytest.mark.case("K54")
async def test_ids_that_are_no_text_leave_other_requests_alone() -> None:
    async with gateway() as g:
        first = asyncio.create_task(g.chat(stream=True))
        one = await g.engine.next_submit()
        second = asyncio.create_task(g.chat(stream=True))
        two = await g.engine.next_submit()
        g.engine.step({one.request_id: [3 + 0xFF, 511, 10**6], two.request_id: byte_ids("fine")})
        g.engine.finish(one.request_id, "stop")
        g.engine.finish(two.request_id, "stop")
        assert text_of(events((await second).text)) == "fine"
        assert (await first).status_code == 200


@pytest.mark.case("K57", "B18")
async def test_several_choices_are_refused_and_book_nothing() -> None:
    async with gateway() as g:
        response = await g.chat(n=4)
        assert response.status_code == 400 and response.json()["error"]["param"] == "n"
        assert not g.ledger.opened and g.outstanding() == 0


@pytest.mark.case("K47")
async def test_two_requests_with_one_client_id_are_two_requests() -> None:
    async with gateway() as g:
        g.engine.script = g.engine.saying("ok")
        responses = await asyncio.gather(
            *(g.post(CHAT, chat_body(), headers={"x-request-id": "same"}) for _ in range(2))
        )
        assert [r.status_code for r in responses] == [200, 200]
        assert [r.headers["x-request-id"] for r in responses] == ["same", "same"]
        assert len({row.request_id for row in g.ledger.rows}) == 2
        assert len({r.json()["id"] for r in responses}) == 2


async def test_a_client_id_that_is_no_id_is_not_echoed() -> None:
    async with gateway() as g:
        response = await g.http.get("/livez", headers={"x-request-id": "a b<script>"})
        assert response.headers["x-request-id"].startswith("req-")


async def test_large_bodies_are_prepared_in_a_thread_with_the_same_answer() -> None:
    async with gateway(settings=HttpSettings(thread_above_bytes=10)) as g:
        g.engine.script = g.engine.saying("ok")
        assert (await g.chat("hello")).json()["usage"]["prompt_tokens"] == len(g.engine.submitted[0].prompt_token_ids)
        assert (await g.chat(temperature=5)).status_code == 400


async def test_progress_is_noted_for_a_row_that_a_crash_would_need() -> None:
    async with gateway() as g:
        g.engine.script = g.engine.saying("x" * 130)
        await g.chat()
        assert g.ledger.progressed and g.ledger.progressed[-1].output_tokens <= 130
