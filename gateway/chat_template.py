"""The model's own chat template, rendered in a sandbox. It comes from the model's directory, never from a request.

The environment is the one that templates are written for (transformers' `apply_chat_template`): trimmed blocks, loop
controls, `tojson` that leaves HTML alone, `raise_exception`, `strftime_now`.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.errors import BadRequest

MAX_RENDERED_CHARS = 32 * 1024 * 1024  # a template may repeat its input, but not without limit


class _TemplateRefusal(Exception):
    """The template called `raise_exception`."""


def _raise_exception(message: str) -> NoReturn:
    raise _TemplateRefusal(message)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


class ChatTemplate:
    """One compiled template. Raises jinja2.TemplateSyntaxError for a template that does not parse."""

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(source)
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    def render(self, messages: Sequence[dict[str, Any]]) -> str:
        """The prompt's text up to where the assistant speaks. Raises BadRequest with the template's own message."""
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(
                messages=list(messages), tools=None, documents=None, add_generation_prompt=True, **self._tokens
            ):
                size += len(piece)
                if size > MAX_RENDERED_CHARS:
                    raise BadRequest("The rendered prompt is too long.", param="messages", code="invalid_messages")
                pieces.append(piece)
        except (_TemplateRefusal, jinja2.TemplateError) as error:
            raise _refused(str(error)) from None
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError) as error:
            # Code in a template fails in Python's own ways when messages have another shape than it expects.
            raise _refused(str(error)) from None
        except RecursionError:
            raise _refused("the messages are nested too deeply") from None
        return "".join(pieces)


def _refused(reason: str) -> BadRequest:
    return BadRequest(
        f"The model's chat template does not accept these messages: {reason}.",
        param="messages",
        code="invalid_messages",
    )


def _token_text(value: Any) -> str:
    """A token in tokenizer_config.json is a string or {"content": ...}."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def load_chat_template(directory: Path) -> ChatTemplate | None:
    """The template of a model directory: `chat_template.jinja`, else `tokenizer_config.json`; None if it has none."""
    config_path = directory / "tokenizer_config.json"
    config: dict[str, Any] = json.loads(config_path.read_text("utf-8")) if config_path.exists() else {}
    source: Any = config.get("chat_template")
    if isinstance(source, list):  # named templates
        named = {entry.get("name"): entry.get("template") for entry in source}
        source = named.get("default")
    own_file = directory / "chat_template.jinja"
    if own_file.exists():
        source = own_file.read_text("utf-8")
    if not isinstance(source, str) or not source.strip():
        return None
    return ChatTemplate(
        source, bos_token=_token_text(config.get("bos_token")), eos_token=_token_text(config.get("eos_token"))
    )
