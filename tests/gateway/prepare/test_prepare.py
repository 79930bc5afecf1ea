"""From a request to token ids: the prompt is checked before it costs anything."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from gateway.errors import ContextLengthExceeded
from gateway.prepare import prepare
from gateway.text.chat_template import ChatTemplate
from tests.gateway.prepare.test_preparation import expected_ids
from tests.support.gateway.fake_engine import hello
from tests.support.gateway.harness import CHAT, MODEL, TOKENIZER

pytestmark = pytest.mark.anyio


def parts_body(num_parts: int, text: str = "a") -> bytes:
    content = [{"type": "text", "text": text}] * num_parts
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": content}]}).encode()


def messages_body(count: int) -> bytes:
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": ""}] * count}).encode()


@pytest.mark.case("T03")
@pytest.mark.parametrize("body_of", [parts_body, messages_body])
def test_when_pieces_exceed_the_context_then_nothing_is_rendered(
    body_of: Callable[[int], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered: list[int] = []
    real = ChatTemplate.render

    def render(self: ChatTemplate, messages: Any) -> str:
        rendered.append(len(messages))
        return real(self, messages)

    monkeypatch.setattr(ChatTemplate, "render", render)

    def call(count: int) -> None:
        prepare.prepare(
            CHAT,
            body_of(count),
            is_json=True,
            hello=hello(context_len=50),
            tokenizer=TOKENIZER,
            default_max_tokens=1,
        )

    with pytest.raises(ContextLengthExceeded) as caught:
        call(51)
    assert rendered == [] and caught.value.details == {"limit": 50, "requested": 51}
    with pytest.raises(ContextLengthExceeded, match="tokens"):
        call(50)
    assert len(rendered) == 1, "the template may make less of them"


@pytest.mark.case("T03")
def test_when_parts_are_few_then_the_prompt_is_what_it_was() -> None:
    """As many parts as fit a prompt: each at least one token here, and the same ids as one text."""
    prepared = prepare.prepare(
        CHAT, parts_body(900), is_json=True, hello=hello(), tokenizer=TOKENIZER, default_max_tokens=1
    )
    assert prepared.token_ids == expected_ids("\n".join(["a"] * 900))
    assert prepared.request.messages is None, "what the prompt was made from is not kept"
