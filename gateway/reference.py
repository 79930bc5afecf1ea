"""The tables of docs/reference.md, drawn from the code: `python -m gateway.reference docs/reference.md` rewrites them.

A table stands between `<!-- NAME -->` and `<!-- /NAME -->`; a test compares what stands there with what is drawn here.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gateway.settings import SETTINGS, shown


def settings_table() -> str:
    """Every setting."""
    lines = ["| setting | YAML | flag | environment | default | unit or values | what it does |"]
    lines.append("|---|---|---|---|---|---|---|")
    for row in SETTINGS:
        values = ", ".join(row.choices) or row.unit
        default = shown(row, row.default)
        cells = [row.name, _code(row.path), _code(row.flag), _code(row.env), _code(default), values, row.help]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def commands_table() -> str:
    """Every command with its arguments and options."""
    lines = ["| command | arguments and options | what it does |", "|---|---|---|"]
    for name, command in walk_commands():
        options = " ".join(_parameter(parameter) for parameter in command.params if parameter.name != "help")
        help_line = (command.help or "").strip().splitlines()[0]
        lines.append(f"| `{name}` | {options} | {help_line} |")
    return "\n".join(lines)


def walk_commands() -> Iterator[tuple[str, Any]]:
    """(name, command) of every command of the CLI, groups left out."""
    from typer.main import get_command

    from gateway.cli import app

    def walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
        children = getattr(command, "commands", None)
        if children is None:
            yield name, command
            return
        for child_name, child in children.items():
            yield from walk(f"{name} {child_name}", child)

    yield from walk("terazi", get_command(app))


TABLES = {"settings": settings_table, "commands": commands_table}


def rewrite(text: str) -> str:
    """The document with its tables drawn anew."""
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
    document.write_text(rewrite(document.read_text("utf-8")), "utf-8")
