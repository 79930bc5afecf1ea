"""The map of folders in docs/architecture.md is drawn from the folders' own docstrings.

Print it with `python -m tests.test_map`.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("policies", "engine", "gateway", "tenants", "migrations")
BEGIN, END = "<!-- folders:begin -->", "<!-- folders:end -->"
MODULES_MAX = 14


def folders() -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted(path.parent for path in (ROOT / package).rglob("__init__.py"))


def first_line(folder: Path) -> str:
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text("utf-8"))) or ""
    return text.partition("\n")[0]


def table() -> str:
    """The map in Markdown."""
    rows = [f"| `{folder.relative_to(ROOT)}/` | {first_line(folder)} |" for folder in folders()]
    return "\n".join(["| folder | what is in it |", "|---|---|", *rows])


def test_every_folder_says_what_is_in_it() -> None:
    assert [str(folder) for folder in folders() if not first_line(folder)] == []


def test_the_map_is_drawn_from_the_folders() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    shown = page.partition(BEGIN)[2].partition(END)[0].strip()
    assert shown == table(), "run: python -m tests.test_map"


def test_a_folder_of_gateway_or_engine_holds_about_a_dozen_modules() -> None:
    sizes = {str(folder.relative_to(ROOT)): len(list(folder.glob("*.py"))) - 1 for folder in folders()}
    large = {
        name: size for name, size in sizes.items() if name.startswith(("gateway", "engine")) and size > MODULES_MAX
    }
    assert large == {}


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
