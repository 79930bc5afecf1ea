"""The decisions in docs/decisions/: one file each with four headings, all in the index, and nothing that sends a reader
to a page outside this repository.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FILES = sorted((DOCS / "decisions").glob("[0-9]*.md"))
INDEX = (DOCS / "decisions" / "README.md").read_text("utf-8")
PAGES = [
    *FILES,
    DOCS / "decisions" / "README.md",
    *(DOCS / f"{name}.md" for name in ("scheduling", "exactness", "glossary")),
]
HEADINGS = ["Context", "Decision", "Consequence", "Status"]
# How pages that are not in this repository used to be cited.
FOREIGN = re.compile(
    r"\b[Tt]he design\b|\bUX\b|\bpart [A-Z]\b|\bSCHEDULING\b|\bDESIGN\b|\bSTYLE\b|\bHOUSE\b|\bPLAN\b|§|\bsection \d",
)
LINK = re.compile(r"\]\(([^)#]*)(?:#([^)]*))?\)")
PATH = re.compile(r"`(?:python -m pytest (?:-s )?)?((?:tests|engine|policies|gateway|tenants)/[\w/]*(?:\.\w+)?)[` ]")


def anchors(page: Path) -> set[str]:
    """What links into a page may name: its headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_decision_has_the_four_headings() -> None:
    for file in FILES:
        text = file.read_text("utf-8")
        assert re.findall(r"^## (.+)$", text, re.MULTILINE) == HEADINGS, file.name
        assert all(body.strip() for body in re.split(r"^## .+$", text, flags=re.MULTILINE)[1:]), file.name


def test_numbers_count_up_and_stand_in_the_title() -> None:
    assert [int(file.name[:4]) for file in FILES] == list(range(1, len(FILES) + 1))
    for file in FILES:
        assert re.fullmatch(r"\d{4}-[a-z0-9-]+\.md", file.name)
        assert file.read_text("utf-8").startswith(f"# {int(file.name[:4])}. "), file.name


def test_the_index_names_each_decision_once_by_its_title() -> None:
    titles = [file.read_text("utf-8").splitlines()[0].removeprefix("# ") for file in FILES]
    listed = re.findall(r"^\* \[(.+)\]\((.+)\)$", INDEX, re.MULTILINE)
    assert listed == [(title, file.name) for title, file in zip(titles, FILES, strict=True)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem[:20])
def test_a_page_cites_nothing_outside_the_repository(page: Path) -> None:
    text = page.read_text("utf-8")
    assert [found[0] for found in FOREIGN.finditer(text)] == []
    for link, anchor in LINK.findall(text):
        if link.startswith("https://"):
            continue
        target = page.parent / link if link else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {link}#{anchor}"
    for path in PATH.findall(text):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


@pytest.mark.parametrize(
    "text", ["The design says so.", "UX asked for it.", "since part A", "SCHEDULING 8.3", "see §4"]
)
def test_a_foreign_reference_would_be_seen(text: str) -> None:
    assert FOREIGN.search(text)
