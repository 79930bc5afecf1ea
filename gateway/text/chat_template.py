"""The model's own chat template, rendered in a sandbox. It comes from the model's directory, never from a request.

Templates are written for transformers' `apply_chat_template`, so the environment is the same: trimmed blocks, loop
controls, a `tojson` that does not escape HTML, `raise_exception`, `strftime_now`, and `{% generation %}`. The last pair
of tags marks, for training, what the assistant says; here the tags have no effect.

The cost of one rendering is bounded in three ways:

- how many loop rounds and calls it makes together,
- how many characters it writes,
- how large a value `+`, `*`, `**` and `~` may make.

The bounds are for a template that runs away with an unlucky conversation. They are no defence against a hostile author:
a model directory is trusted like its weights.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.errors import BadRequest

MAX_RENDERED_CHARS = 32 * 1024 * 1024  # a template may repeat its input, but only so often
MAX_TEMPLATE_STEPS = 500_000  # loop rounds and calls in one rendering; so many take about a second
MAX_NUMBER_BITS = 4096  # in the result of a product or a power
# The names under which templates find the tokenizer's special tokens.
TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ModelFileError(ValueError):
    """A file of the model's directory cannot be used. The message is one line that names the file."""


class _TemplateRefusal(Exception):
    """The template called `raise_exception` or exceeded a bound. The text is the reason."""


class _Steps:
    """Counts the steps of one rendering."""

    __slots__ = ("taken",)

    def __init__(self) -> None:
        self.taken = 0


_steps: ContextVar[_Steps] = ContextVar("template_steps")


def _raise_exception(message: str) -> NoReturn:
    raise _TemplateRefusal(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


class _Generation(Extension):
    """Replaces `{% generation %}` by its body, with no scope of its own: a variable that the body sets stays set."""

    tags = frozenset({"generation"})  # type: ignore[assignment]  # jinja only tests membership

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox. It counts every loop round and every call, and checks a value's size before the value is made."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in list(template.find_all(nodes.For)):
            count = _own_call("count_round", [], loop.lineno)
            if loop.test is None:
                loop.body.insert(0, nodes.ExprStmt(count, lineno=loop.lineno))
            else:  # a round that the loop's own condition skips takes time too
                loop.test = nodes.And(count, loop.test, lineno=loop.lineno)
        _replace_concat(template)
        template.set_environment(self)
        return template

    def count_round(self) -> bool:
        """The compiled template calls this once for every loop round. `call` below does the counting."""
        return True

    def concat_bounded(self, *values: Any) -> str:
        """The value of `a ~ b`: all values as one text. Raises _TemplateRefusal when the text would be too long."""
        texts = [str(value) for value in values]
        _check_size(sum(map(len, texts)))
        return "".join(texts)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        steps = _steps.get(None)
        if steps is not None:  # None: a constant that is computed while the template is compiled
            steps.taken += 1
            if steps.taken > MAX_TEMPLATE_STEPS:
                raise _TemplateRefusal(f"it takes more than {MAX_TEMPLATE_STEPS} steps for them")
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        match operator, left, right:
            case "+", str() | list() | tuple(), str() | list() | tuple():
                _check_size(len(left) + len(right))
            case "*", str() | list() | tuple(), int():
                _check_size(len(left) * right)
            case "*", int(), str() | list() | tuple():
                _check_size(left * len(right))
            case "*", int(), int():
                _check_number(left.bit_length() + right.bit_length())
            case "**", int(), int():
                _check_number(left.bit_length() * right)
        return super().call_binop(context, operator, left, right)


def _own_call(method: str, arguments: list[nodes.Expr], lineno: int) -> nodes.Call:
    """The syntax node of a call of the environment's own method."""
    return nodes.Call(nodes.EnvironmentAttribute(method), arguments, [], None, None, lineno=lineno)


def _replace_concat(node: nodes.Node) -> None:
    """Replace every `a ~ b` below `node`, in place, by a call of `concat_bounded`."""
    for name, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            _replace_concat(value)
            if isinstance(value, nodes.Concat):
                setattr(node, name, _own_call("concat_bounded", value.nodes, value.lineno))
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, nodes.Node):
                    _replace_concat(item)
                    if isinstance(item, nodes.Concat):
                        value[index] = _own_call("concat_bounded", item.nodes, item.lineno)


def _check_size(size: int) -> None:
    if size > MAX_RENDERED_CHARS:
        raise _TemplateRefusal(f"it makes a text of more than {MAX_RENDERED_CHARS} characters of them")


def _check_number(num_bits: int) -> None:
    if num_bits > MAX_NUMBER_BITS:
        raise _TemplateRefusal(f"it makes a number of more than {MAX_NUMBER_BITS} bits of them")


class ChatTemplate:
    """One compiled template. Threads may share it."""

    def __init__(self, source: str, *, where: str = "chat template", **tokens: str) -> None:
        """Compile `source`. `tokens` are the special tokens that the template may use (TOKEN_NAMES).

        `where` names the template in errors. Raises ModelFileError when it cannot be parsed or compiled.
        """
        environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        del environment.globals["lipsum"]  # random text of any length is no part of a prompt
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelFileError(f"{where}, line {error.lineno}: {_one_line(error.message or '')}") from None
        except (SyntaxError, RecursionError, MemoryError, ValueError, _TemplateRefusal) as error:
            # The template parses, but Python cannot compile the result: it is nested too deeply, or has too large
            # constants.
            raise ModelFileError(f"{where}: it cannot be compiled: {_one_line(str(error))}") from None
        self._tokens = tokens

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt's text, up to the point where the assistant's turn begins.

        As in transformers, a message's field that is null counts as absent. Raises BadRequest with the template's own
        message when the template refuses the messages, fails on them or exceeds a bound.
        """
        present = [{name: value for name, value in message.items() if value is not None} for message in messages]
        token = _steps.set(_Steps())
        try:
            return "".join(self._pieces(present))
        except (_TemplateRefusal, jinja2.TemplateError) as error:
            raise _refused(str(error)) from None
        except RecursionError:
            raise _refused("the messages are nested too deeply") from None
        except MemoryError:
            raise _refused("there is not enough memory for what it makes of them") from None
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError, RuntimeError) as error:
            # When messages do not have the shape that the template expects, its code fails with one of Python's errors.
            raise _refused(str(error)) from None
        finally:
            _steps.reset(token)

    def _pieces(self, messages: list[dict[str, Any]]) -> Iterator[str]:
        size = 0
        for piece in self._template.generate(
            messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._tokens
        ):
            size += len(piece)
            _check_size(size)
            yield piece


def _refused(reason: str) -> BadRequest:
    return BadRequest(
        f"The model's chat template does not accept these messages: {reason.rstrip('.')}.",
        param="messages",
        code="invalid_messages",
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]


def _token_text(value: Any) -> str | None:
    """The text of a token in tokenizer_config.json, which is a string or {"content": ...}; None for any other value."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_text(path: Path) -> str:
    """A file's text, with or without a byte order mark. Raises ModelFileError."""
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{path} is not UTF-8: byte {error.start}") from None
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror}") from None


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} if there is no such file. Raises ModelFileError."""
    if not path.exists():
        return {}
    text = _read_text(path)
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise ModelFileError(f"{path}, line {error.lineno}: not JSON: {error.msg}") from None
    except RecursionError:
        raise ModelFileError(f"{path} is nested too deeply") from None
    if not isinstance(document, dict):
        raise ModelFileError(f"{path} must hold a JSON object")
    return document


def _of_config(config: Mapping[str, Any], where: str) -> str | None:
    """The template in tokenizer_config.json, or None. Of several templates, it is the template called `default`.

    Raises ModelFileError.
    """
    source: Any = config.get("chat_template")
    if isinstance(source, list):
        if not all(isinstance(entry, dict) for entry in source):
            raise ModelFileError(f"{where} must be a string or a list of objects with name and template")
        source = {entry.get("name"): entry.get("template") for entry in source}
    if isinstance(source, dict):
        source = source.get("default")
    if source is not None and not isinstance(source, str):
        raise ModelFileError(f"{where} must be a string")
    return source


def load_chat_template(directory: Path) -> ChatTemplate | None:
    """The template of a model directory, from `chat_template.jinja`, else from `tokenizer_config.json`, else None.

    Raises ModelFileError when the directory has a template that cannot be used.
    """
    config_path, own_file = directory / "tokenizer_config.json", directory / "chat_template.jinja"
    config = _read_object(config_path)
    if own_file.exists():
        source, where = _read_text(own_file), str(own_file)
    else:
        where = f"{config_path}: chat_template"
        found = _of_config(config, where)
        source = found or ""
    if not source.strip():
        return None
    if "added_tokens_decoder" not in config:  # older models keep their special tokens in a file of their own
        config = config | _read_object(directory / "special_tokens_map.json")
    tokens = {name: text for name in TOKEN_NAMES if (text := _token_text(config.get(name))) is not None}
    return ChatTemplate(source, where=where, **tokens)
