"""The tables of docs/reference.md and docs/metrics.md are drawn from the code."""

from pathlib import Path

from gateway.cli import reference

ROOT = Path(__file__).resolve().parents[3]


def test_the_tables_of_the_pages_are_drawn_from_the_code() -> None:
    pages = {name: (ROOT / "docs" / name).read_text("utf-8") for name in ("reference.md", "metrics.md")}
    for draw in reference.TABLES.values():
        assert draw() in "".join(pages.values())
    for name, page in pages.items():
        assert reference.rewrite(page) == page, f"run: python -m gateway.cli.reference docs/{name}"
