"""Chat templates as models ship them: rendered as transformers does, bounded, and refused in one line at the start."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.models.tiny import write_tiny_model
from engine.wire.messages import ModelInfo
from gateway.errors import BadRequest
from gateway.text import chat_template
from gateway.text.chat_template import ChatTemplate, ModelFileError, load_chat_template
from gateway.text.tokenizer import ModelTokenizer
from tests.support.gateway.harness import tiny_model_tokenizer

ROOM = 2048
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <b>short</b> & kind."},
    {"role": "user", "content": "hello world"},
    {"role": "assistant", "content": "hi", "name": None},
    {"role": "user", "content": "what is the answer"},
]
MARKED = (
    "{%- for message in messages %}\n"
    "    {%- if message.role == 'assistant' %}\n"
    "        {%- generation %}\n"
    "        {{- '<|im_start|>assistant\\n' + message.content + '<|im_end|>\\n' }}\n"
    "        {%- endgeneration %}\n"
    "    {%- else %}\n"
    "        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\n"
    "    {%- endif %}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}\n"
)
# In the manner of the templates of 2025: two passes, a namespace, a date, JSON, loop controls, undefined switches.
MODERN = """{# header #}
{%- set ns = namespace(last=-1, system='') -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
  {%- if m.role == 'system' -%}{%- set ns.system = m.content | trim -%}{%- continue -%}{%- endif -%}
{%- endfor -%}
{{- bos_token ~ 'Today: ' ~ strftime_now('%Y') ~ '\\n' -}}
{%- if enable_thinking is defined and enable_thinking -%}think{%- endif -%}
{%- if tools -%}{{ tools | tojson }}{%- endif -%}
{{ ns.system }} {{ {'b': '<é>', 'a': [1, none]} | tojson(indent=2, sort_keys=true) }}
{{ {'b': '<é>', 'a': 1} | tojson(true, separators=(',', ':')) }}
    {% for m in messages %}
{%- if m.name is defined %}never{% endif %}
    {% if loop.last %}
[{{ loop.index }}/{{ loop.length }} {{ '*' * 3 }} {{ 2 ** 5 }} {{ m.content.split(' ')[-1] }}]
    {% break %}
    {% endif %}
{% generation %}
{{ m.role }}{{ pad_token }}{{ nothing }}
{% endgeneration %}
    {% endfor %}
"""


def from_directory(directory: Path, name: str, text: str | None, **config: Any) -> ModelTokenizer:
    """The tiny model's tokenizer with another template, read from files as `serve` reads them."""
    write_tiny_model(directory)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    if text is not None:
        (directory / name).write_text(text)
    info = ModelInfo(
        name="m", path=str(directory), vocab_size=512, context_len=ROOM, eos_token_ids=(2,), dtype="", device=""
    )
    return ModelTokenizer.load(info)


@pytest.mark.case("H20")
def test_when_a_template_marks_generation_then_nothing_changes() -> None:
    bare = MARKED.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
    marked = tiny_model_tokenizer(template=MARKED).encode_chat(CHAT, room=ROOM)
    assert marked == tiny_model_tokenizer(template=bare).encode_chat(CHAT, room=ROOM)
    assert ChatTemplate("{% generation %}{% set x = 1 %}{% endgeneration %}{{ x }}").render([]) == "1"
    assert ChatTemplate("{% for m in 'ab' %}{% generation %}{{ m }}{% continue %}{% endgeneration %}-{% endfor %}")


@pytest.mark.case("H20")
@pytest.mark.parametrize("template", [MARKED, MODERN], ids=["marked", "modern"])
@pytest.mark.parametrize("place", ["config", "file", "named"])
def test_when_rendered_then_ids_are_those_of_transformers(tmp_path: Path, template: str, place: str) -> None:
    from transformers import AutoTokenizer

    named = [{"name": "default", "template": template}, {"name": "tool_use", "template": "{{ 0 }}"}]
    config = {"config": {"chat_template": template}, "file": {"chat_template": "unused"}, "named": {}}[place]
    if place == "named":
        config = {"chat_template": named}
    ours = from_directory(tmp_path, "chat_template.jinja", template if place == "file" else None, **config)
    reference = AutoTokenizer.from_pretrained(tmp_path)
    expected = reference.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert ours.encode_chat(CHAT, room=ROOM) == expected


def test_when_tokens_have_an_older_file_then_templates_see_them(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": null, "chat_template": "{{ bos_token }}|"}')
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": {"content": "<s>"}}')
    template = load_chat_template(tmp_path)
    assert template is not None and template.render(CHAT) == "<s>|"
    assert ChatTemplate("{{ bos_token is defined }}").render(CHAT) == "False"


@pytest.mark.parametrize(
    "config", ["{}", '{"chat_template": null}', '{"chat_template": " \\n"}', '{"chat_template": [{"name": "rag"}]}']
)
def test_when_no_template_is_the_default_then_there_is_none(tmp_path: Path, config: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(config)
    assert load_chat_template(tmp_path) is None


@pytest.mark.case("H20")
@pytest.mark.parametrize(
    ("template", "where", "reason"),
    [
        ("a\n{% for m in messages %}\n", ", line 2: ", "Unexpected end of template"),
        ("\n\n{% unknown %}", ", line 3: ", "unknown tag 'unknown'"),
        ("{{ messages | nofilter }}", ", line 1: ", "No filter named 'nofilter'"),
        ("{% generation %}", ", line 1: ", "endgeneration"),
        ("{{ 1 + }}", ", line 1: ", "unexpected 'end of print statement'"),
        ("{% for a in b %}" * 30 + "{% endfor %}" * 30, ": ", "too many statically nested blocks"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", ": ", "recursion"),
    ],
)
@pytest.mark.parametrize("is_own_file", [True, False], ids=["file", "config"])
def test_when_a_template_cannot_be_used_then_one_line_says_where(
    tmp_path: Path, template: str, where: str, reason: str, is_own_file: bool
) -> None:
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "" if is_own_file else template}))
    shown = f"{tmp_path / 'chat_template.jinja'}" if is_own_file else f"{config}: chat_template"
    if is_own_file:
        (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(ModelFileError) as caught:
        load_chat_template(tmp_path)
    assert str(caught.value).startswith(f"{shown}{where}") and reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("tokenizer_config.json", b'{"a": 1,\n oops}', "line 2: not JSON"),
        ("tokenizer_config.json", b"[1]", "must hold a JSON object"),
        ("tokenizer_config.json", b'{"chat_template": 7}', "chat_template must be a string"),
        ("tokenizer_config.json", b'{"chat_template": ["x"]}', "list of objects"),
        ("tokenizer_config.json", b"[" * 100_000, "nested too deeply"),
        ("chat_template.jinja", b"caf\xe9", "is not UTF-8: byte 3"),
        ("special_tokens_map.json", b"{", "not JSON"),
    ],
)
def test_when_a_model_file_is_damaged_then_one_line_names_it(
    tmp_path: Path, name: str, content: bytes, reason: str
) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelFileError, match=reason) as caught:
        load_chat_template(tmp_path)
    assert str(tmp_path / name) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "more than 2000 steps"),
        ("{% for i in range(99999) if false %}{% endfor %}", "more than 2000 steps"),
        ("{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(30) }}", "2000 steps"),
        ("{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}", "text"),
        ("{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}", "text"),
        ("{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}", "text"),
        ("{% set ns = namespace(x=9) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}", "bits"),
        ("{{ 10 ** 9999999999 }}", "more than 4096 bits"),
        ("{{ 'a' * 9999999999 }}{{ 9999999999 * 'a' }}", "text"),
        ("{% for i in range(1000) %}{{ 'a' * 1000 }}{% endfor %}", "text"),
        ("{{ range(9999999) }}", "Range too big"),
        ("{{ lipsum(9999999) }}", "'lipsum' is undefined"),
        ("{{ cycler() }}", "at least one item"),
        ("{{ undefined_name.field }}", "'undefined_name' is undefined"),
        ("{{ messages | tojson(nonsense=1) }}", "nonsense"),
        ("{% include 'other' %}", "no loader"),
        ("{{ strftime_now(5) }}", "strftime"),
    ],
)
def test_when_a_template_runs_away_then_it_is_a_400_with_words(
    monkeypatch: pytest.MonkeyPatch, template: str, reason: str
) -> None:
    monkeypatch.setattr(chat_template, "MAX_TEMPLATE_STEPS", 2_000)
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 500_000)
    compiled = ChatTemplate(template)
    for _ in range(2):  # the second time as the first: nothing of one rendering is left for the next
        with pytest.raises(BadRequest, match=f"chat template does not accept.*{reason}") as caught:
            compiled.render(CHAT)
        assert caught.value.code == "invalid_messages"


def test_when_the_steps_are_just_enough_then_it_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_TEMPLATE_STEPS", 4)
    template = ChatTemplate("{% for m in messages %}{{ m.role[0] }}{% endfor %}")
    assert template.render(CHAT) == "suau"
    with pytest.raises(BadRequest, match="more than 4 steps"):
        template.render([*CHAT, CHAT[0]])
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 4)
    assert template.render(CHAT) == "suau"
    with pytest.raises(BadRequest, match="more than 4 characters"):
        ChatTemplate("{% for m in messages %}{{ m.role[0] }}{% endfor %}!").render(CHAT)


def test_when_a_field_is_null_then_it_is_as_if_it_were_absent() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{{ 'calls' if m.tool_calls is defined else m.content }}{% endfor %}"
    )
    assert template.render([{"role": "assistant", "content": "x", "tool_calls": None}]) == "x"
