"""OpenAI's wire format. Bytes become a frozen request or a BadRequest; an answer becomes bytes, in chunks or whole.
Pure.

An explicit null is the same as an absent field. `gateway.openai.request_fields` decides about fields that are not
served: they are refused by name (tools, logprobs, several choices, JSON schemas...), accepted in silence, or ignored
and named in the answer's headers.
"""

import re
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from engine.sampling import ANY_SEED, SEED_MAX, SEED_MIN
from gateway.errors import BadRequest, ContextLengthExceeded
from gateway.openai.json_body import not_json, whole, whole_or_none, without_mark
from gateway.openai.request_fields import check_fields

MAX_STOP_STRINGS = 4  # the number that OpenAI documents
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 64
ROLES = ("system", "developer", "user", "assistant", "tool")
_TOP_K_MAX = 2**31 - 1  # larger than any vocabulary, so all larger numbers mean the same
_LOCATION = re.compile(r" - at `(?:key in )?\$\.?(?P<path>.*)`\Z")


class StreamOptions(msgspec.Struct, frozen=True):
    """`stream_options`."""

    include_usage: bool | None = None


class ContentPart(msgspec.Struct, frozen=True):
    """One part of a message's content; only text parts are served."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    """One turn of the conversation as sent."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


# A whole number as sent. `whole` takes 8.0 for 8 and refuses 8.5.
Whole = int | float


class CommonBody(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that both endpoints serve."""

    model: str | None = None
    max_tokens: Whole | None = None
    max_completion_tokens: Whole | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    seed: Whole | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Whole] | None = None
    min_tokens: Whole | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class ChatBody(CommonBody, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]


class TextBody(CommonBody, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | Whole | list[Whole]]


_CHAT_DECODER = msgspec.json.Decoder(ChatBody)
_TEXT_DECODER = msgspec.json.Decoder(TextBody)

Endpoint = Literal["/v1/chat/completions", "/v1/completions"]
_BODIES: dict[Endpoint, type[CommonBody]] = {"/v1/chat/completions": ChatBody, "/v1/completions": TextBody}


def served_fields(endpoint: Endpoint) -> tuple[str, ...]:
    """The names of the fields that an endpoint reads. A field of `stream_options` is written with a dot."""
    options = (f"stream_options.{name}" for name in StreamOptions.__struct_fields__)
    return (*_BODIES[endpoint].__struct_fields__, *options)


_SERVED = {endpoint: frozenset(served_fields(endpoint)) for endpoint in _BODIES}


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A checked request of either endpoint. Exactly one of messages, prompt_text and prompt_token_ids is set."""

    endpoint: Endpoint
    model: str
    messages: tuple[dict[str, Any], ...] | None
    prompt_text: str | None
    prompt_token_ids: tuple[int, ...] | None
    max_tokens: int | None  # as asked; None when absent
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stops: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    stream: bool
    include_usage: bool
    ignored_fields: tuple[str, ...] = ()  # names of unknown fields, as sent

    @property
    def is_chat(self) -> bool:
        return self.endpoint == "/v1/chat/completions"


def decode_request(endpoint: Endpoint, body: bytes, *, max_chat_pieces: int | None = None) -> CompletionRequest:
    """The checked request. Raises BadRequest, with the parameter's name, for a request that cannot be served.

    `max_chat_pieces` is the most messages of a chat, and the most text parts of all its messages together. Raises
    ContextLengthExceeded above that.
    """
    body = without_mark(body)
    try:
        if endpoint == "/v1/chat/completions":
            chat = _CHAT_DECODER.decode(body)
            _check_pieces(chat.messages, max_chat_pieces)
            ignored = check_fields(endpoint, body, _SERVED[endpoint])
            request = _chat_request(chat)
        else:
            text = _TEXT_DECODER.decode(body)
            ignored = check_fields(endpoint, body, _SERVED[endpoint])
            request = _text_request(text)
    except msgspec.ValidationError as error:
        raise _wrong_type(error) from None
    except msgspec.DecodeError as error:
        raise not_json(body, error) from None
    except RecursionError:
        raise BadRequest("The request body is nested too deeply.", code="invalid_json") from None
    return replace(request, ignored_fields=ignored) if ignored else request


def _check_pieces(messages: list[ChatMessage], most: int | None) -> None:
    """Raises ContextLengthExceeded when a chat has more messages or parts than `most`, before they are converted."""
    num_parts = sum(len(message.content) for message in messages if isinstance(message.content, list))
    for count, what in ((len(messages), "messages"), (num_parts, "content parts")):
        if most is not None and count > most:
            raise ContextLengthExceeded(
                f"The chat has {count} {what}; at most {most} are read, as many as a prompt may have tokens.",
                param="messages",
                details={"limit": most, "requested": count},
            )


def _wrong_type(error: msgspec.ValidationError) -> BadRequest:
    """The error for a wrong type. msgspec's text says where: ``Expected `int`, got `str` - at `$.messages[0].role`
    ``."""
    text = str(error).replace("int | float", "int")  # we accept 8.0 too, but the caller should send a whole number
    where = _LOCATION.search(text)
    if where:
        param = where["path"] or None
        return BadRequest(f"{text[: where.start()]} for '{param or 'the body'}'.", param=param, code="invalid_type")
    missing = re.search(r"missing required field `(\w+)`", text)
    if missing:
        name = missing.group(1)
        return BadRequest(f"You must provide '{name}'.", param=name, code="missing_required_parameter")
    return BadRequest(f"{text}.", code="invalid_type")


def _chat_request(body: ChatBody) -> CompletionRequest:
    if not body.messages:
        raise BadRequest("'messages' must have at least one message.", param="messages", code="empty_messages")
    return _request(
        "/v1/chat/completions",
        body,
        messages=tuple(_message(index, message) for index, message in enumerate(body.messages)),
    )


def _text_request(body: TextBody) -> CompletionRequest:
    text, token_ids = _prompt(body.prompt)
    return _request(
        "/v1/completions",
        body,
        prompt_text=text,
        prompt_token_ids=token_ids,
    )


def _prompt(prompt: str | list[str | Whole | list[Whole]]) -> tuple[str | None, tuple[int, ...] | None]:
    """The prompt as (text, None) or (None, token ids).

    It may be sent as a string, a list of token ids, or a list that holds exactly one of these. Raises BadRequest.
    """
    empty = BadRequest("'prompt' is empty.", param="prompt", code="empty_prompt")
    if isinstance(prompt, str):
        if not prompt:
            raise empty
        return prompt, None
    if not prompt:
        raise empty
    if set(map(type, prompt)) <= {int, float}:
        return None, _token_ids("prompt", prompt)
    if len(prompt) > 1:
        raise BadRequest(
            "'prompt' must be one string or one list of token ids; several prompts are not supported.",
            param="prompt",
            code="several_prompts",
        )
    only = prompt[0]
    if not only:
        raise empty
    if isinstance(only, str):
        return only, None
    assert isinstance(only, list), "a number alone was taken above"
    return None, _token_ids("prompt[0]", only)


def _token_ids(where: str, items: list[Any]) -> tuple[int, ...]:
    """The numbers as whole numbers. Raises BadRequest for a fraction.

    A prompt may have thousands of them, so they are checked one by one only if one of them is a float.
    """
    if float not in set(map(type, items)):
        return tuple(items)
    return tuple(whole(f"{where}[{position}]", item) for position, item in enumerate(items))


def _request(
    endpoint: Endpoint,
    body: CommonBody,
    *,
    messages: tuple[dict[str, Any], ...] | None = None,
    prompt_text: str | None = None,
    prompt_token_ids: tuple[int, ...] | None = None,
) -> CompletionRequest:
    if not body.model:
        raise BadRequest("You must provide 'model'.", param="model", code="missing_required_parameter")
    max_name, max_tokens = "max_completion_tokens", whole_or_none("max_completion_tokens", body.max_completion_tokens)
    older_max_tokens = whole_or_none("max_tokens", body.max_tokens)
    if max_tokens is None:
        max_name, max_tokens = "max_tokens", older_max_tokens
    if max_tokens is not None and max_tokens < 1:
        raise _out_of_range(max_name, max_tokens, "at least 1")
    min_tokens = whole_or_none("min_tokens", body.min_tokens) or 0
    if min_tokens < 0:
        raise _out_of_range("min_tokens", min_tokens, "at least 0")
    if max_tokens is not None and min_tokens > max_tokens:
        raise _out_of_range("min_tokens", min_tokens, f"at most '{max_name}' ({max_tokens})")
    temperature = 1.0 if body.temperature is None else body.temperature
    if not 0 <= temperature <= 2:
        raise _out_of_range("temperature", temperature, "between 0 and 2")
    top_p = 1.0 if body.top_p is None else body.top_p
    if not 0 <= top_p <= 1:
        raise _out_of_range("top_p", top_p, "between 0 and 1")
    top_k = whole_or_none("top_k", body.top_k) or 0
    top_k = 0 if top_k == -1 else top_k  # -1 is some servers' word for "all"
    if top_k < 0:
        raise _out_of_range("top_k", top_k, "at least 0 (0 is all)")
    top_k = min(top_k, _TOP_K_MAX)
    if top_p == 0:  # only the most probable token
        top_p, top_k = 1.0, 1
    return CompletionRequest(
        endpoint=endpoint,
        model=body.model,
        messages=messages,
        prompt_text=prompt_text,
        prompt_token_ids=prompt_token_ids,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=_seed(whole_or_none("seed", body.seed)),
        stops=_stops(body.stop),
        stop_token_ids=_stop_token_ids(body.stop_token_ids),
        ignore_eos=bool(body.ignore_eos),
        stream=bool(body.stream),
        include_usage=bool(body.stream and body.stream_options and body.stream_options.include_usage),
    )


def _out_of_range(param: str, value: object, allowed: str) -> BadRequest:
    return BadRequest(f"'{param}' must be {allowed}, not {value}.", param=param, code="invalid_value")


def _seed(seed: int | None) -> int | None:
    """The seed, a signed number of 64 bits; None for -1, which stands for no seed. Raises BadRequest out of range."""
    if seed is None or seed == ANY_SEED:
        return None
    if not SEED_MIN <= seed <= SEED_MAX:
        raise _out_of_range("seed", seed, f"between {SEED_MIN} and {SEED_MAX} (-1 is any)")
    return seed


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    """The stop strings. Raises BadRequest for too many strings, and for a string that is empty or too long.

    An empty list is the same as an absent field. An empty string would match before any text.
    """
    if stop is None:
        return ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > MAX_STOP_STRINGS:
        raise BadRequest(
            f"'stop' may have at most {MAX_STOP_STRINGS} strings, not {len(stops)}.", param="stop", code="invalid_value"
        )
    for text in stops:
        if not text or len(text) > MAX_STOP_CHARS:
            raise BadRequest(
                f"Each 'stop' string must have 1 to {MAX_STOP_CHARS} characters.", param="stop", code="invalid_value"
            )
    return stops


def _stop_token_ids(given: list[Whole] | None) -> tuple[int, ...]:
    """The stop token ids. `gateway.prepare.prepare`, which knows the model, checks that the model has them."""
    if given is None:
        return ()
    if len(given) > MAX_STOP_TOKEN_IDS:
        raise _out_of_range("stop_token_ids", f"{len(given)} ids", f"at most {MAX_STOP_TOKEN_IDS} ids")
    return _token_ids("stop_token_ids", given)


def _message(index: int, message: ChatMessage) -> dict[str, Any]:
    """One message as the chat template gets it: role, content as one string, and the fields of a tool turn."""
    where = f"messages[{index}]"
    if message.role not in ROLES:
        raise BadRequest(
            f"'{where}.role' is {message.role!r}; it must be one of {', '.join(ROLES)}.",
            param=f"{where}.role",
            code="invalid_value",
        )
    role = "system" if message.role == "developer" else message.role
    content = message.content
    if content is None:
        # Clients send assistant turns back as they got them, and a turn with tool calls has no text.
        if role not in ("assistant", "tool"):
            raise BadRequest(f"'{where}.content' is missing.", param=f"{where}.content", code="invalid_value")
        content = ""
    if isinstance(content, list):
        content = "\n".join(_part(f"{where}.content[{number}]", part) for number, part in enumerate(content))
    rendered: dict[str, Any] = {"role": role, "content": content}
    if message.name is not None:
        rendered["name"] = message.name
    if message.tool_calls:
        rendered["tool_calls"] = message.tool_calls
    if message.tool_call_id is not None:
        rendered["tool_call_id"] = message.tool_call_id
    return rendered


def _part(where: str, part: ContentPart) -> str:
    if part.type != "text" or part.text is None:
        raise BadRequest(
            f"'{where}' is a {part.type!r} part; this model reads only text parts with a 'text'.",
            param=where,
            code="unsupported_content",
        )
    return part.text


@dataclass(frozen=True, slots=True)
class Usage:
    """The token counts of one request's answer."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


_DONE = b"data: [DONE]\n\n"
# Characters that JSON allows in a string, but that some readers take for line breaks: as UTF-8 and as JSON escapes.
_LINE_BREAKS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))
# One comment line without a blank line behind it: some decoders take a comment and a blank line for an empty event.
KEEP_ALIVE = b": keep-alive\n"


def encode_json(document: dict[str, Any]) -> bytes:
    """JSON in one line, also for readers that split lines as Python's `splitlines()` does.

    U+2028, U+2029 and U+0085 are escaped. Their bytes can simply be replaced: outside strings JSON has only ASCII, and
    in UTF-8 no character's bytes stand inside another character. All other line breaks are control characters, which
    JSON always escapes.
    """
    text = msgspec.json.encode(document)
    for raw, escape in _LINE_BREAKS:
        if raw in text:
            text = text.replace(raw, escape)
    return text


def event(document: dict[str, Any]) -> bytes:
    """A server-sent event. The JSON has no line break of any kind, so one data line is enough."""
    return b"data: " + encode_json(document) + b"\n\n"


class AnswerWriter:
    """Makes the bytes of one request's answer: the chunks of a stream, or one document.

    `created` is a Unix time in seconds.
    """

    def __init__(self, request: CompletionRequest, request_id: str, created: int) -> None:
        self._is_chat = request.is_chat
        self._include_usage = request.include_usage
        self._head = {
            "id": f"{'chatcmpl' if request.is_chat else 'cmpl'}-{request_id.removeprefix('req-')}",
            "object": self._object(request.stream),
            "created": created,
            "model": request.model,
        }

    def _object(self, stream: bool) -> str:
        if not self._is_chat:
            return "text_completion"
        return "chat.completion.chunk" if stream else "chat.completion"

    def _chunk(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> bytes:
        document: dict[str, Any] = {**self._head, "choices": choices}
        if self._include_usage:
            document["usage"] = usage.as_dict() if usage else None
        return event(document)

    def _choice(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0}
        if self._is_chat:
            choice["delta"] = {"content": text} if text or finish_reason is None else {}
        else:
            choice["text"] = text
        return {**choice, "logprobs": None, "finish_reason": finish_reason}

    def first(self) -> bytes:
        """The first chunk of a chat stream, which names the role. A text stream has no such chunk: b""."""
        if not self._is_chat:
            return b""
        delta = {"role": "assistant", "content": ""}
        return self._chunk([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}])

    def text(self, text: str) -> bytes:
        """One chunk of text."""
        return self._chunk([self._choice(text, None)])

    def last(self, text: str, finish_reason: str, usage: Usage) -> bytes:
        """The end of a stream: the rest of the text, the finish chunk, the usage chunk if asked for, and [DONE]."""
        parts = []
        if text:
            parts.append(self.text(text))
        parts.append(self._chunk([self._choice("", finish_reason)]))
        if self._include_usage:
            parts.append(self._chunk([], usage))
        return b"".join([*parts, _DONE])

    def whole(self, text: str, finish_reason: str, usage: Usage) -> bytes:
        """The single answer of a request that does not stream."""
        choice: dict[str, Any] = {"index": 0}
        if self._is_chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        choice |= {"logprobs": None, "finish_reason": finish_reason}
        return encode_json({**self._head, "choices": [choice], "usage": usage.as_dict()})
