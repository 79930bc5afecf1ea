"""The tables of docs/reference.md and docs/metrics.md, drawn from the code: `python -m gateway.cli.reference PAGE`
rewrites those of a page.

A table stands between `<!-- NAME -->` and `<!-- /NAME -->`. A test compares the tables in the file with those drawn
here.
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from gateway.openai.request_fields import HARMLESS, UNSERVED, accepted_values
from gateway.openai.wire import served_fields
from gateway.outputs import write_output
from gateway.settings.values import SETTINGS, shown
from policies.team_counters import POLICY_COUNTERS, TEAM_COUNTERS, Over


def settings_table() -> str:
    """The table of all settings."""
    lines = ["| setting | YAML | flag | environment | default | unit or values | what it does |"]
    lines.append("|---|---|---|---|---|---|---|")
    for row in SETTINGS:
        values = ", ".join(row.choices) or row.unit
        default = shown(row, row.default)
        cells = [row.name, _code(row.path), _code(row.flag), _code(row.env), _code(default), values, row.help]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def commands_table() -> str:
    """The table of all commands, with their arguments and options."""
    lines = ["| command | arguments and options | what it does |", "|---|---|---|"]
    for name, command in walk_commands():
        options = " ".join(_parameter(parameter) for parameter in command.params if parameter.name != "help")
        help_line = (command.help or "").strip().splitlines()[0]
        lines.append(f"| `{name}` | {options} | {help_line} |")
    return "\n".join(lines)


def walk_commands() -> Iterator[tuple[str, Any]]:
    """(name, command) of every command of the CLI. Groups of commands are left out."""
    from typer.main import get_command

    from gateway.cli.main import app

    def walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
        children = getattr(command, "commands", None)
        if children is None:
            yield name, command
            return
        for child_name, child in children.items():
            yield from walk(f"{name} {child_name}", child)

    yield from walk("terazi", get_command(app))


def request_fields_table() -> str:
    """The table of all known fields of a completion request, by what the server does with them."""
    lines = ["| field | what becomes of it |", "|---|---|"]
    chat, text = served_fields("/v1/chat/completions"), served_fields("/v1/completions")
    both = [name for name in chat if name in text]
    lines.append(f"| {_names(both)} | served |")
    lines.append(f"| {_names([name for name in chat if name not in text])} | served by /v1/chat/completions |")
    lines.append(f"| {_names([name for name in text if name not in chat])} | served by /v1/completions |")
    lines.append(f"| {_names(HARMLESS)} | accepted: changes nothing in the answer |")
    for values, names in _by_accepted_values().items():
        lines.append(f"| {_names(names)} | refused, unless it is one of {values} |")
    lines.append("| every other field | ignored, and named in the answer's header `x-terazi-ignored-fields` |")
    return "\n".join(lines)


def _by_accepted_values() -> dict[str, list[str]]:
    """The names of the refused fields, by the values that are accepted nevertheless."""
    groups: dict[str, list[str]] = {}
    for row in UNSERVED:
        values = ", ".join(_code(value) for value in accepted_values(row)) + (
            f" on {row.endpoint}" if row.endpoint else ""
        )
        groups.setdefault(values, []).append(row.name)
    return groups


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def team_counters_table() -> str:
    """Every declared team counter, and where it is shown."""
    lines = [
        "| counted by | counter | over time | metric | in the fairness report | what |",
        "|---|---|---|---|---|---|",
    ]
    for counter in TEAM_COUNTERS:
        owner = "policy" if counter in POLICY_COUNTERS else "engine"
        suffix = "_total" if counter.over is Over.SUM else ""
        metric = _code(f"{counter.metric}{suffix}" if counter.metric else "")
        cells = [owner, _code(counter.name), counter.over.value, metric, _code(counter.report or ""), counter.text]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


TABLES = {
    "settings": settings_table,
    "commands": commands_table,
    "request fields": request_fields_table,
    "team counters": team_counters_table,
}


def rewrite(text: str) -> str:
    """The document `text` with its tables drawn anew."""
    for name, draw in TABLES.items():
        before, start, rest = text.partition(f"<!-- {name} -->")
        _, end, after = rest.partition(f"<!-- /{name} -->")
        if start and end:
            text = f"{before}{start}\n{draw()}\n{end}{after}"
    return text


def _parameter(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`"
    option = "/".join([*parameter.opts[:1], *parameter.secondary_opts[:1]])
    value = "" if parameter.is_flag else f" {parameter.metavar or 'VALUE'}"
    return f"`{option}{value}`".replace("|", "\\|")


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


if __name__ == "__main__":
    document = Path(sys.argv[1])
    write_output(document, rewrite(document.read_text("utf-8")))
