"""The wire as real clients use it: what is ignored, what is refused with its name, what comes back."""

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from gateway.errors import BadRequest
from gateway.openai.wire import AnswerWriter, CompletionRequest, Usage, decode_request, event
from tests.support.gateway.harness import CHAT, MODEL, TEXT, chat_body, events


def chat(**fields: Any) -> CompletionRequest:
    return decode_request("/v1/chat/completions", json.dumps(chat_body(**fields)).encode())


def text(**fields: Any) -> CompletionRequest:
    return decode_request("/v1/completions", json.dumps({"model": MODEL, "prompt": "hi", **fields}).encode())


def refusal(endpoint: Any, body: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        decode_request(endpoint, body if isinstance(body, bytes) else json.dumps(body).encode())
    return caught.value


def chat_refusal(**fields: Any) -> BadRequest:
    return refusal(CHAT, chat_body(**fields))


def text_refusal(**fields: Any) -> BadRequest:
    return refusal(TEXT, {"model": MODEL, "prompt": "hi", **fields})


@pytest.mark.case("A01")
def test_the_newer_name_of_the_output_cap_wins() -> None:
    assert chat(max_completion_tokens=50).max_tokens == 50
    assert chat(max_tokens=70).max_tokens == 70
    assert chat(max_tokens=70, max_completion_tokens=50).max_tokens == 50
    assert chat().max_tokens is None


@pytest.mark.case("A02")
def test_unknown_fields_are_ignored_at_every_depth() -> None:
    message = {"role": "user", "content": "x", "id": "1", "agent": {"a": [1]}, "opts": None}
    request = chat(messages=[message], store=True, service_tier="auto", metadata={"a": "b"}, x_foo=1, user="u")
    assert request.messages == ({"role": "user", "content": "x"},)
    asked = chat(stream=True, stream_options={"include_usage": True, "include_obfuscation": False}, user="u")
    assert asked.include_usage, "a known field must survive the ignoring"


@pytest.mark.case("S06", "S15")
def test_no_client_field_can_name_an_upstream_a_template_or_a_tenant() -> None:
    sent = chat(base_url="http://evil", api_base="http://evil", team="other", team_id=9)
    assert replace(sent, ignored_fields=()) == chat()
    assert chat_refusal(chat_template="{{x}}").param == "chat_template"
    assert chat_refusal(priority=1).param == "priority"


@pytest.mark.case("A03")
def test_explicit_nulls_are_the_same_as_absent() -> None:
    names = (
        "temperature top_p top_k seed stop tools tool_choice user n max_tokens max_completion_tokens stream logprobs "
        "stream_options response_format min_tokens ignore_eos logit_bias reasoning_effort frequency_penalty functions"
    )
    assert chat(**dict.fromkeys(names.split())) == chat()
    assert text(**dict.fromkeys(["logprobs", "echo", "suffix", "best_of", "n", "stop", "seed"])) == text()


@pytest.mark.case("A03")
def test_stop_as_a_string_a_list_or_nothing() -> None:
    assert chat(stop="x").stops == chat(stop=["x"]).stops == ("x",)
    assert chat(stop=[]).stops == ()
    error = chat_refusal(stop=["a", "b", "c", "d", "e"])
    assert error.param == "stop" and "at most 4" in error.message
    assert chat_refusal(stop="").param == "stop"
    assert chat_refusal(stop=["x" * 2000]).param == "stop"


@pytest.mark.case("A04")
def test_content_parts_are_the_same_as_a_string() -> None:
    parts = [{"type": "text", "text": "hello"}]
    assert chat(messages=[{"role": "user", "content": parts}]) == chat()
    image = [*parts, {"type": "image_url", "image_url": {"url": "data:..."}}]
    error = chat_refusal(messages=[{"role": "user", "content": image}])
    assert error.param == "messages[0].content[1]" and "image_url" in error.message


@pytest.mark.case("A05")
@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}, {"content": []}])
@pytest.mark.parametrize("calls", [{"tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}, {}])
def test_an_assistant_turn_without_text_is_accepted_in_all_spellings(content: Any, calls: Any) -> None:
    history = [{"role": "user", "content": "q"}, {"role": "assistant", **content, **calls}]
    request = chat(messages=history)
    assert request.messages is not None
    assert request.messages[1] == {"role": "assistant", "content": "", **calls}


@pytest.mark.case("A06")
def test_developer_is_system_and_invented_roles_are_named() -> None:
    request = chat(messages=[{"role": "developer", "content": "x"}])
    assert request.messages == ({"role": "system", "content": "x"},)
    error = chat_refusal(messages=[{"role": "user", "content": "x"}, {"role": "wizard", "content": "x"}])
    assert error.param == "messages[1].role"
    assert "system, developer, user, assistant, tool" in error.message


@pytest.mark.case("K73")
def test_a_user_turn_without_content_is_refused_by_its_index() -> None:
    assert chat_refusal(messages=[{"role": "user", "content": None}]).param == "messages[0].content"
    assert chat_refusal(messages=[{"role": "system"}]).param == "messages[0].content"


@pytest.mark.case("A07")
@pytest.mark.parametrize("choice", [None, "auto", "none", "absent"])
def test_no_tools_is_fine_in_every_spelling(choice: str | None) -> None:
    fields = {} if choice == "absent" else {"tool_choice": choice}
    assert chat(tools=[], **fields) == chat()


@pytest.mark.case("A07")
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_asking_for_a_tool_is_refused(choice: Any) -> None:
    assert chat_refusal(tool_choice=choice, tools=[]).param == "tool_choice"
    assert chat_refusal(tools=[{"type": "function"}]).param == "tools"


@pytest.mark.case("A08")
@pytest.mark.parametrize(
    ("fields", "param"),
    [({"logprobs": True}, "logprobs"), ({"top_logprobs": 5}, "top_logprobs"), ({"logprobs": 5}, "logprobs")],
)
def test_chat_logprobs_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert chat_refusal(**fields).param == param
    assert chat(logprobs=False) == chat()


@pytest.mark.case("A08")
@pytest.mark.parametrize("value", [True, 0, 1, 5])
def test_text_logprobs_are_refused_by_name(value: Any) -> None:
    error = text_refusal(logprobs=value)
    assert (error.param, error.code) == ("logprobs", "unsupported_parameter"), "no silent coercion"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 2}, "best_of"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"n": 2}, "n"),
        ({"n": 0}, "n"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"presence_penalty": -1}, "presence_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"functions": [1]}, None),
    ],
)
def test_what_is_known_but_not_served_is_never_dropped_in_silence(fields: dict[str, Any], param: str | None) -> None:
    if param is None:
        assert chat_refusal(**fields).param == "functions"
    else:
        error = text_refusal(**fields)
        assert error.param == param and error.code == "unsupported_parameter"


@pytest.mark.case("A23")
def test_a_response_format_that_nobody_enforces_is_refused() -> None:
    for kind in ("json_object", "json_schema"):
        error = chat_refusal(response_format={"type": kind})
        assert error.param == "response_format" and kind in error.message
    assert chat(response_format={"type": "text"}) == chat()


@pytest.mark.case("K69", "K72")
def test_a_schema_is_refused_and_never_left_unenforced() -> None:
    schema: dict[str, Any] = {"type": "string", "enum": [str(n) for n in range(10_000)]}
    for _ in range(200):
        schema = {"type": "object", "properties": {"x": schema}}
    asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    error = chat_refusal(response_format=asked, min_tokens=5)
    assert (error.status, error.param) == (400, "response_format")


@pytest.mark.case("A09")
def test_a_prompt_is_one_string_or_one_list_of_token_ids() -> None:
    assert text(prompt="a").prompt_text == text(prompt=["a"]).prompt_text == "a"
    assert text(prompt=[1, 2]).prompt_token_ids == text(prompt=[[1, 2]]).prompt_token_ids == (1, 2)
    for several in (["a", "b"], [[1], [2]], ["a", [1]], [1, "a"]):
        error = text_refusal(prompt=several)
        assert (error.param, error.code) == ("prompt", "several_prompts")


@pytest.mark.case("K65")
@pytest.mark.parametrize("prompt", ["", [], [[]], [""]])
def test_an_empty_prompt_is_refused(prompt: Any) -> None:
    error = text_refusal(prompt=prompt)
    assert (error.param, error.code) == ("prompt", "empty_prompt")


@pytest.mark.case("K65")
def test_no_messages_are_refused() -> None:
    error = chat_refusal(messages=[])
    assert error.param == "messages"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": 0, "max_tokens": 5}, "max_completion_tokens"),
        ({"temperature": 2.01}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": -1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"stop_token_ids": list(range(65))}, "stop_token_ids"),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    error = chat_refusal(**fields)
    assert (error.param, error.code, error.status) == (param, "invalid_value", 400)


def test_sampling_is_passed_on() -> None:
    request = chat(temperature=0, top_p=0.5, top_k=7, seed=-5, min_tokens=2, ignore_eos=True, stop_token_ids=[9])
    assert (request.temperature, request.top_p, request.top_k) == (0, 0.5, 7)
    assert (request.min_tokens, request.ignore_eos, request.stop_token_ids) == (2, True, (9,))
    assert request.seed == -5
    assert (chat().temperature, chat().top_p, chat().top_k, chat().seed) == (1, 1, 0, None)
    assert (chat(top_p=0).top_p, chat(top_p=0).top_k) == (1, 1), "the most probable token alone"
    assert chat(top_k=-1).top_k == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": MODEL, "messages": "x"}, "messages"),
        ({"model": MODEL, "messages": [{"role": 1, "content": "x"}]}, "messages[0].role"),
        ({"model": MODEL, "messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"model": 5, "messages": []}, "model"),
        ({"model": MODEL, "messages": [], "max_tokens": "5"}, "max_tokens"),
        ({"model": MODEL, "messages": [], "stream": 1}, "stream"),
        ({"model": MODEL, "messages": [], "temperature": True}, "temperature"),
        ({"model": MODEL}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}]}, "model"),
        ({"model": "", "messages": [{"role": "user", "content": "x"}]}, "model"),
        ({"model": MODEL, "messages": [{"content": "x"}]}, "messages[0]"),
    ],
)
def test_wrong_types_and_missing_fields_name_the_parameter(body: Any, param: str) -> None:
    assert refusal(CHAT, body).param == param


@pytest.mark.case("S13")
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"not json",
        b"\xff\xfe",
        b'{"temperature": NaN}',
        b'{"model": "\\ud800"}',
        b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"messages": ' + b'[{"tool_calls":[' * 50_000,
    ],
    ids=["empty", "cut", "text", "bytes", "nan", "surrogate", "deep", "deep-and-cut"],
)
def test_what_is_no_json_or_too_deep_is_a_400(body: bytes) -> None:
    error = refusal(CHAT, body)
    assert error.status == 400 and error.code in ("invalid_json", "invalid_type", "invalid_encoding")


def test_a_number_beyond_float_is_a_400() -> None:
    assert refusal(CHAT, b'{"model": "m", "messages": [], "temperature": 1e400}').param == "temperature"


USAGE = Usage(prompt_tokens=5, completion_tokens=3, cached_tokens=2)


@pytest.mark.case("K58", "G34")
@pytest.mark.parametrize("asked", [True, False])
def test_usage_comes_once_and_only_when_asked_for(asked: bool) -> None:
    request = chat(stream=True, stream_options={"include_usage": asked})
    writer = AnswerWriter(request, "req-1", 9)
    documents = events((writer.first() + writer.text("a") + writer.last("b", "length", USAGE)).decode())
    assert documents[-1] == "[DONE]"
    with_usage = [d for d in documents[:-1] if d.get("usage")]
    if asked:
        assert documents[-2] == with_usage[0] and len(with_usage) == 1 and with_usage[0]["choices"] == []
        assert all(d["usage"] is None for d in documents[:-2])
    else:
        assert not any("usage" in d for d in documents[:-1])
    finishes = [c["finish_reason"] for d in documents[:-1] for c in d["choices"] if c["finish_reason"]]
    assert finishes == ["length"]


@pytest.mark.case("H22")
def test_an_event_is_one_line_however_a_reader_splits() -> None:
    """Every character that `splitlines()` splits at, beside ones whose bytes are near to theirs."""
    awkward = "".join(map(chr, [*range(0x20), 0x7F, 0x85, 0xA8, 0x2027, 0x2028, 0x2029, 0x202A, 0x1F600])) + "é\\u2028"
    for request in (chat(stream=True), text(stream=True)):
        writer = AnswerWriter(request, "req-1", 9)
        for data in (writer.text(awkward), writer.last(awkward, "stop", USAGE)):
            assert data.decode().splitlines() == data.decode().split("\n")[:-1]
            choice = events(data.decode())[0]["choices"][0]
            assert (choice["text"] if "text" in choice else choice["delta"]["content"]) == awkward
    whole = AnswerWriter(chat(), "req-1", 9).whole(awkward, "stop", USAGE)
    assert len(whole.decode().splitlines()) == 1
    assert json.loads(whole)["choices"][0]["message"]["content"] == awkward
    error = BadRequest(awkward).body("req-1")
    assert len(event(error).decode().splitlines()) == 2, "its data line and the empty one"


@pytest.mark.case("G33")
def test_every_line_of_a_stream_is_sse_whatever_the_text() -> None:
    writer = AnswerWriter(chat(stream=True), "req-1", 9)
    awkward = ["\n\ndata: x", "\r\n", ": c", "\u2028\u2029", '"\\', "\x00", "data: [DONE]"]
    body = writer.first() + b"".join(map(writer.text, awkward)) + writer.last("", "stop", USAGE)
    documents = events(body.decode())
    deltas = [d["choices"][0]["delta"].get("content") for d in documents[1:-2]]
    assert deltas == awkward


def test_the_single_answers_have_the_documented_shape() -> None:
    whole = msgspec.json.decode(AnswerWriter(chat(), "req-ab", 9).whole("hi", "stop", USAGE))
    assert whole["object"] == "chat.completion" and whole["id"] == "chatcmpl-ab"
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": "hi", "refusal": None}
    assert whole["usage"]["total_tokens"] == 8
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    plain = msgspec.json.decode(AnswerWriter(text(), "req-ab", 9).whole("hi", "length", USAGE))
    assert plain["object"] == "text_completion"
    assert plain["choices"] == [{"index": 0, "text": "hi", "logprobs": None, "finish_reason": "length"}]
