"""docs/reference.md is drawn from the code."""

from pathlib import Path

from gateway.cli import reference

ROOT = Path(__file__).resolve().parents[3]


def test_the_reference_page_is_drawn_from_the_code() -> None:
    page = (ROOT / "docs" / "reference.md").read_text("utf-8")
    for draw in reference.TABLES.values():
        assert draw() in page
    assert reference.rewrite(page) == page, "run: python -m gateway.cli.reference docs/reference.md"
