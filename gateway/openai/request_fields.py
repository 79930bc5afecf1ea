"""The fields of a completion request that we know but do not serve, as one table. Pure.

- A field that would change the answer is refused by its name, unless its value asks for what happens anyway. A 200 that
  quietly drops `guided_json` would be the worst answer.
- A field that changes nothing in the answer is accepted in silence.
- Any other field, most likely a typo, is ignored and named in the answer's `x-terazi-ignored-fields`.

We look at the fields of the request itself and of `stream_options`, but not at fields of messages.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.errors import BadRequest
from gateway.openai.json_body import fields_of

FIELDS_MAX = 256  # in one request; a request with more is refused
NEUTRAL_BYTES_MAX = 256  # a longer value is not compared: it is surely not neutral
IGNORED_NAMES_MAX = 16  # in the header
IGNORED_NAME_CHARS_MAX = 40
IGNORED_HEADER = "x-terazi-ignored-fields"
_UNSAFE = re.compile(r"[^A-Za-z0-9_.\-]")


@dataclass(frozen=True, slots=True)
class Unserved:
    """A field that would change the answer. `null` and the `neutral` values are accepted, all other values refused."""

    name: str
    neutral: tuple[Any, ...] = ()
    hint: str = ""  # a sentence for the refusal
    endpoint: str = ""  # the only endpoint for which the row holds; "" is both


_ONE_CHOICE = "Only one choice is supported."
_MAX = "Use 'max_tokens'."
_STOP = "Use 'stop' or 'stop_token_ids'."
_IN_MESSAGES = "Put it into 'messages'."
_NO_TOOLS = "There is no tool calling here."
_NO_GRAMMAR = "Nothing here holds the answer to a grammar or a schema."
_NO_LORA = "There are no adapters here."

UNSERVED: tuple[Unserved, ...] = (
    # OpenAI
    Unserved("n", (1,), _ONE_CHOICE),
    Unserved("best_of", (1,), _ONE_CHOICE),
    Unserved("echo", (False,)),
    Unserved("suffix", ("",)),
    Unserved("logprobs", (False,)),
    Unserved("top_logprobs", (0,)),
    Unserved("frequency_penalty", (0,)),
    Unserved("presence_penalty", (0,)),
    Unserved("logit_bias", ({},)),
    Unserved(
        "response_format",
        ({"type": "text"},),
        f"The types json_object and json_schema are not supported. {_NO_GRAMMAR}",
    ),
    Unserved("tools", ([],), _NO_TOOLS),
    Unserved("tool_choice", ("auto", "none"), _NO_TOOLS),
    Unserved("functions", ([],), _NO_TOOLS),
    Unserved("function_call", ("auto", "none"), _NO_TOOLS),
    Unserved("reasoning_effort", ("none", "medium", "auto")),
    Unserved("reasoning", ({},)),
    Unserved("verbosity", ("medium",)),
    Unserved("modalities", ([], ["text"])),
    Unserved("audio"),
    Unserved("web_search_options"),
    Unserved("max_output_tokens", (), _MAX),
    Unserved("instructions", ("",), _IN_MESSAGES),
    # vLLM
    Unserved("min_p", (0,)),
    Unserved("repetition_penalty", (1,)),
    Unserved("length_penalty", (1,)),
    Unserved("use_beam_search", (False,)),
    Unserved("early_stopping", (False,)),
    Unserved("bad_words", ([],)),
    Unserved("allowed_token_ids", ([],)),
    Unserved("logits_processors", ([],)),
    Unserved("prompt_logprobs"),
    Unserved("prompt_embeds"),
    Unserved("truncate_prompt_tokens"),
    Unserved("truncation_side"),
    Unserved("include_stop_str_in_output", (False,)),
    Unserved("skip_special_tokens", (True,)),
    Unserved("add_special_tokens", (False,), endpoint="/v1/chat/completions"),
    Unserved("add_special_tokens", (True,), endpoint="/v1/completions"),
    Unserved("add_generation_prompt", (True,)),
    Unserved("continue_final_message", (False,)),
    Unserved("chat_template", ("",), "The model's own template is used."),
    Unserved("chat_template_kwargs", ({},)),
    Unserved("documents", ([],), _IN_MESSAGES),
    Unserved("mm_processor_kwargs", ({},)),
    Unserved("media_io_kwargs", ({},)),
    Unserved("guided_json", ("",), _NO_GRAMMAR),
    Unserved("guided_regex", ("",), _NO_GRAMMAR),
    Unserved("guided_choice", ([],), _NO_GRAMMAR),
    Unserved("guided_grammar", ("",), _NO_GRAMMAR),
    Unserved("guided_json_object", (False,), _NO_GRAMMAR),
    Unserved("structured_outputs", ({},), _NO_GRAMMAR),
    Unserved("structural_tag", ("",), _NO_GRAMMAR),
    Unserved("priority", (0,), "The team's tier decides the order."),
    Unserved("thinking_token_budget"),
    Unserved("return_token_ids", (False,)),
    Unserved("return_tokens_as_token_ids", (False,)),
    Unserved("kv_transfer_params", ({},)),
    Unserved("vllm_xargs", ({},)),
    Unserved("repetition_detection"),
    Unserved("stream_options.continuous_usage_stats", (False,)),
    # SGLang
    Unserved("regex", ("",), _NO_GRAMMAR),
    Unserved("ebnf", ("",), _NO_GRAMMAR),
    Unserved("json_schema", ("",), _NO_GRAMMAR),
    Unserved("sampling_params", ({},), "Send its fields by themselves."),
    Unserved("input_ids", (), "Use 'prompt' of /v1/completions, which takes token ids."),
    Unserved("min_new_tokens", (0,), "Use 'min_tokens'."),
    Unserved("stop_regex", ("", []), _STOP),
    Unserved("no_stop_trim", (False,)),
    Unserved("lora_path", ("",), _NO_LORA),
    Unserved("session_params", ({},)),
    Unserved("custom_logit_processor", ("",)),
    Unserved("custom_params", ({},)),
    Unserved("return_hidden_states", (False,)),
    Unserved("return_logprob", (False,)),
    Unserved("top_logprobs_num", (0,)),
    # TGI
    Unserved("max_new_tokens", (), _MAX),
    Unserved("do_sample", (True,), "Use 'temperature': 0 is greedy."),
    Unserved("typical_p", (1,)),
    Unserved("top_n_tokens", (0,)),
    Unserved("watermark", (False,)),
    Unserved("grammar", ("",), _NO_GRAMMAR),
    Unserved("adapter_id", ("",), _NO_LORA),
    Unserved("tool_prompt", ("",), _NO_TOOLS),
    Unserved("guideline", ("",), _IN_MESSAGES),
    Unserved("truncate"),
    Unserved("return_full_text", (False,)),
    Unserved("decoder_input_details", (False,)),
    # llama.cpp, Ollama and others whose fields people carry along
    Unserved("n_predict", (-1,), _MAX),
    Unserved("num_predict", (-1,), _MAX),
    Unserved("max_length", (), _MAX),
    Unserved("repeat_penalty", (1,)),
    Unserved("penalty_alpha", (0,)),
    Unserved("mirostat", (0,)),
    Unserved("tfs_z", (1,)),
    Unserved("top_a", (0,)),
    Unserved("xtc_probability", (0,)),
    Unserved("dry_multiplier", (0,)),
    Unserved("dynatemp_range", (0,)),
    Unserved("format", ("",), _NO_GRAMMAR),
    Unserved("options", ({},), "Send its fields by themselves."),
    Unserved("system", ("",), _IN_MESSAGES),
    Unserved("lora", ("", []), _NO_LORA),
    Unserved("lora_name", ("",), _NO_LORA),
    Unserved("lora_request", (), _NO_LORA),
    Unserved("stop_sequences", ([],), _STOP),
    Unserved("stop_strings", ("", []), _STOP),
    Unserved("stop_words", ("", []), _STOP),
    Unserved("stop_str", ("",), _STOP),
    Unserved("think", (False,)),
    Unserved("thinking", (False, {"type": "disabled"})),
    Unserved("enable_thinking", (False,)),
)

# Accepted in silence, because they change nothing in the answer's text.
HARMLESS: tuple[str, ...] = (
    "cache_prompt",
    "cache_salt",
    "extra_key",
    "guided_decoding_backend",
    "guided_whitespace_pattern",
    "include_reasoning",
    "keep_alive",
    "metadata",
    "parallel_tool_calls",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_id",
    "rid",
    "safety_identifier",
    "separate_reasoning",
    "service_tier",
    "spaces_between_special_tokens",
    "store",
    "stream_options.include_obfuscation",
    "stream_reasoning",
    "user",
)


def _rows_of(endpoint: str) -> dict[str, Unserved]:
    return {row.name: row for row in UNSERVED if row.endpoint in ("", endpoint)}


_HARMLESS = frozenset(HARMLESS)
_ROWS = {endpoint: _rows_of(endpoint) for endpoint in ("/v1/chat/completions", "/v1/completions")}


def check_fields(endpoint: str, body: bytes, served: Collection[str]) -> tuple[str, ...]:
    """Check the fields of a request. Returns the names of the unknown fields, in the order in which they were sent.

    `served` are the fields that the endpoint reads; a field of `stream_options` is written with a dot. Raises
    BadRequest (`unsupported_parameter`, with the name) for a field of the table with a value that is not neutral, and
    for more than FIELDS_MAX fields.
    """
    rows = _ROWS[endpoint]
    unknown: list[str] = []
    for name, value in _all_fields(body):
        row = rows.get(name)
        if row is not None:
            if not _is_neutral(row, value):
                raise BadRequest(_refusal(row), param=name, code="unsupported_parameter")
        elif name not in served and name not in _HARMLESS:
            unknown.append(name)
    return tuple(unknown)


def _all_fields(body: bytes) -> Iterator[tuple[str, msgspec.Raw]]:
    fields = fields_of(body, FIELDS_MAX)
    yield from fields.items()
    options = fields.get("stream_options")
    if options is not None and bytes(memoryview(options)[:1]) == b"{":
        for name, value in fields_of(options, FIELDS_MAX).items():
            yield f"stream_options.{name}", value


def _is_neutral(row: Unserved, raw: msgspec.Raw) -> bool:
    """Whether a value is null or one of the row's neutral values."""
    if len(memoryview(raw)) > NEUTRAL_BYTES_MAX:
        return False
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return False  # such as a number beyond all floats
    return value is None or any(_is_same(value, neutral) for neutral in row.neutral)


def _is_same(value: Any, neutral: Any) -> bool:
    """Whether two JSON values are equal: 1.0 is 1, but true is not 1.

    If the neutral value is an object with fields, an empty object is equal too, and so is an object with more fields.
    """
    if isinstance(value, bool) != isinstance(neutral, bool):
        return False
    if isinstance(value, dict) and isinstance(neutral, dict) and neutral:
        return not value or all(value.get(name) == wanted for name, wanted in neutral.items())
    return bool(value == neutral)


def accepted_values(row: Unserved) -> list[str]:
    """The values of a field that are accepted, as JSON."""
    return ["null", *(msgspec.json.encode(value).decode() for value in row.neutral)]


def _refusal(row: Unserved) -> str:
    hint = f" {row.hint}" if row.hint else ""
    return f"'{row.name}' is not supported: leave it out, or send {' or '.join(accepted_values(row))}.{hint}"


def ignored_header(names: Collection[str]) -> dict[str, str]:
    """The header `x-terazi-ignored-fields`, or no header if there are no names.

    It has at most IGNORED_NAMES_MAX names, in characters that are safe in a header. `...` at the end of a name or of
    the list says that something was cut off.
    """
    if not names:
        return {}
    shown = [_header_safe(name) for name in list(names)[:IGNORED_NAMES_MAX]]
    if len(names) > IGNORED_NAMES_MAX:
        shown.append("...")
    return {IGNORED_HEADER: ", ".join(shown)}


def _header_safe(name: str) -> str:
    safe = _UNSAFE.sub("?", name[:IGNORED_NAME_CHARS_MAX]) or "?"
    return safe + "..." if len(name) > IGNORED_NAME_CHARS_MAX else safe
