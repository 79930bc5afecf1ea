"""From a body to token ids: decode, check the model's name, encode, refuse what can never run, clamp the output.

No I/O, and no shared state but the tokenizer, so a body can be prepared in a thread or in another process.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.sampling import foreign_id
from engine.wire.messages import Hello
from gateway.errors import BadRequest, ContextLengthExceeded, NotFound, UnsupportedMediaType
from gateway.openai.wire import CompletionRequest, Endpoint, decode_request
from gateway.text.tokenizer import ModelTokenizer


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that can run. `max_tokens` is the most that it may generate, and is reserved for it.

    The prompt is only in `token_ids`. Its text is taken out of `request`, so that it does not stay in memory.
    """

    request: CompletionRequest
    token_ids: tuple[int, ...]
    max_tokens: int


def room_of(hello: Hello) -> int:
    """The most tokens, prompt and output together, of one request: the model's context, or the KV pool if smaller."""
    return min(hello.model.context_len, hello.block_size * hello.num_device_blocks)


def _what_is_full(hello: Hello) -> str:
    """The end of a refusal's sentence: which of the two bounds of `room_of` is reached, and the cure."""
    context = hello.model.context_len
    if room_of(hello) < context:
        return f"into the KV memory (the model's context has {context}): an operator can raise --kv-memory"
    return "into the model's context: send a shorter prompt"


def prepare(
    endpoint: Endpoint,
    body: bytes,
    *,
    is_json: bool,
    hello: Hello,
    tokenizer: ModelTokenizer,
    default_max_tokens: int,
) -> Prepared:
    """The request, ready to be admitted. `is_json` says that the content type was JSON.

    Raises:

    - ContextLengthExceeded, when the prompt leaves no room for one token of output;
    - BadRequest, for any other request that can never run;
    - NotFound, when the request names another model;
    - UnsupportedMediaType, when the body is not JSON and its content type did not say JSON.
    """
    try:
        request = decode_request(endpoint, body, max_chat_pieces=room_of(hello))
    except BadRequest as error:
        if is_json or error.code != "invalid_json" or body.lstrip()[:1] == b"{":
            raise
        raise UnsupportedMediaType(
            "The body is not JSON; send JSON with the header 'Content-Type: application/json'."
        ) from None
    name = hello.model.name
    if request.model != name:
        raise NotFound(
            f"The model {request.model[:200]!r} does not exist; this server has {name!r}.",
            code="model_not_found",
            param="model",
        )
    vocab_size = hello.model.vocab_size
    _check_ids("stop_token_ids", request.stop_token_ids, vocab_size)
    room = room_of(hello)
    param = "messages" if request.is_chat else "prompt"
    try:
        token_ids = _encode(request, tokenizer, room)
    except ContextLengthExceeded as error:
        raise ContextLengthExceeded(
            f"{error.message} With one token of output at most {room} tokens fit {_what_is_full(hello)}.",
            param=param,
            details={"limit": room},
        ) from None
    if not token_ids:
        raise BadRequest("The prompt has no tokens.", param=param, code="empty_prompt")
    if len(token_ids) >= room:
        raise ContextLengthExceeded(
            f"The prompt has {len(token_ids)} tokens; with one token of output at most {room} fit "
            f"{_what_is_full(hello)}.",
            param=param,
            details={"limit": room, "requested": len(token_ids) + 1},
        )
    if request.prompt_token_ids is not None:  # checked after the length, since each id of a long list costs time
        _check_ids("prompt", token_ids, vocab_size)
    asked = default_max_tokens if request.max_tokens is None else request.max_tokens
    bare = replace(request, messages=None, prompt_text=None, prompt_token_ids=None)
    return Prepared(bare, tuple(token_ids), min(asked, room - len(token_ids)))


def _encode(request: CompletionRequest, tokenizer: ModelTokenizer, room: int) -> Sequence[int]:
    if request.messages is not None:
        return tokenizer.encode_chat(request.messages, room=room)
    if request.prompt_text is not None:
        return tokenizer.encode_text(request.prompt_text, room=room)
    return request.prompt_token_ids or ()


def _check_ids(param: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Check a field that holds token ids. Raises BadRequest with the position of an id that the model does not have."""
    position = foreign_id(token_ids, vocab_size)
    if position is not None:
        raise BadRequest(
            f"'{param}[{position}]' is {token_ids[position]}; token ids go from 0 to {vocab_size - 1}.",
            param=param,
            code="invalid_token_id",
        )
