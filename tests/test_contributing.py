"""What the pages name exists: files and folders, modules, make targets, tests, cases, and the targets of links.

A path may hold a placeholder in capitals (`policies/NAME.py`) or a `*`; then something must match it.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.settings.values import SETTINGS

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "benchmarks/README")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "decisions").glob("*.md")),
]
PACKAGES = ("policies", "engine", "gateway", "tenants", "migrations", "tests", "benchmarks")
FOLDERS = (*PACKAGES, "docs", ".ci")
TEMPLATES = {"tests/path.py"}  # shown to say how a path is written
CODE = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^```\w*\n(.*?)^```", re.M | re.S)
DOTTED = re.compile(rf"(?:{'|'.join(PACKAGES)})(?:\.[A-Za-z_]\w*)+")
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)]*))?\)")
# How pages that are not in this repository used to be cited, in prose, docstrings and comments.
FOREIGN = re.compile(
    r"\b[Tt]he design('s|\b)|\bUX\b|\bpart [A-J]\b|\b(?:SCHEDULING|DESIGN|STYLE|HOUSE)\b|(?<!RFC \d{4} )§"
)
CITING = ("test_decisions.py", "test_contributing.py")  # they show such citations
LINES_MAX = 10  # of a section that says how to add something


def snippets(page: Path) -> list[str]:
    """What stands in backticks, and each line of the blocks of code."""
    text = page.read_text("utf-8")
    blocks = FENCE.findall(text)
    return [*CODE.findall(FENCE.sub("", text)), *(line for block in blocks for line in block.splitlines())]


def paths_in(snippet: str) -> Iterator[str]:
    """Paths below our folders, without what stands behind `::`."""
    for word in re.split(r"[\s,;'\"()=]+", snippet):
        path = word.partition("::")[0].rstrip(".:")
        if path.split("/")[0] in FOLDERS and "/" in path:
            yield path


def is_there(path: str) -> bool:
    """Whether a path, with its placeholders, is in this tree."""
    pattern = re.sub(r"(?<![A-Za-z])[A-Z]{2,}(?![a-z])", "*", path).rstrip("/")
    return path in TEMPLATES or (ROOT / path).exists() or any(True for _ in ROOT.glob(pattern))


def is_module(name: str) -> bool:
    """Whether a dotted name is a module or folder of ours, or something that one of them names."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        base = ROOT.joinpath(*parts[:count])
        file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
        if file.is_file():
            rest = parts[count : count + 1]
            return not rest or re.search(rf"\b{rest[0]}\b", file.read_text("utf-8")) is not None
    return False


def anchors(page: Path) -> set[str]:
    """What links into a page may name: its headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text("utf-8"), re.M))


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT)).replace("/", "-")[:40]


each_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


@each_page
def test_every_path_on_a_page_exists(page: Path) -> None:
    named = {path for snippet in snippets(page) for path in paths_in(snippet)}
    assert sorted(path for path in named if not is_there(path)) == []


@each_page
def test_every_module_on_a_page_exists(page: Path) -> None:
    settings = {row.path for row in SETTINGS} | {"engine.socket"}
    run = {name for snippet in snippets(page) for name in re.findall(r"python -m ([\w.]+)", snippet)}
    ours = {name for name in run if name.split(".")[0] in PACKAGES}
    assert run - ours <= {"pytest", "venv", "pip", "vllm.entrypoints.openai.api_server"}
    named = {snippet for snippet in snippets(page) if DOTTED.fullmatch(snippet)} - settings
    files = {name for name in named if "/" not in name and (ROOT / name).exists()}
    assert sorted(name for name in ours | (named - files) if not is_module(name)) == []


@each_page
def test_every_make_target_on_a_page_exists(page: Path) -> None:
    named = {name for snippet in snippets(page) for name in re.findall(r"^(?:\$ )?make ([a-z][\w-]*)", snippet)}
    assert named <= make_targets()


@each_page
def test_every_test_on_a_page_exists(page: Path) -> None:
    tests = "\n".join(path.read_text("utf-8") for path in sorted((ROOT / "tests").rglob("test_*.py")))
    for snippet in snippets(page):
        for name in re.findall(r"(?:^|::)(test_\w+)(?!\.py)\b(?!\.)", snippet):
            assert f"def {name}(" in tests or name in ("test_name", "test_x"), name
        for path, word in re.findall(r"pytest (?:-s )?(tests/\S+) -k (\w+)", snippet):
            assert re.search(rf"def test_\w*{word}", (ROOT / path).read_text("utf-8")), snippet


@each_page
def test_every_case_on_a_page_is_listed(page: Path) -> None:
    known = set(re.findall(r"\b[A-Z]\d+[a-d]?\b", (ROOT / "docs" / "cases.md").read_text("utf-8")))
    named = {snippet for snippet in snippets(page) if re.fullmatch(r"[A-Z]\d\d?[a-d]?", snippet)}
    assert sorted(named - known) == []


@each_page
def test_every_link_on_a_page_leads_somewhere(page: Path) -> None:
    for link, anchor in LINK.findall(FENCE.sub("", page.read_text("utf-8"))):
        if link.startswith(("https://", "http://")):
            continue
        target = page.parent / link if link else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), f"{link}#{anchor}"


def test_nothing_cites_a_page_outside_the_repository() -> None:
    code = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if path.name not in CITING]
    found = []
    for path in [*PAGES, *code]:
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
            if FOREIGN.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert found == []


def test_every_module_named_in_the_code_exists() -> None:
    missing = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            named = {name for name in CODE.findall(path.read_text("utf-8")) if DOTTED.fullmatch(name)}
            missing += [f"{path.relative_to(ROOT)}: {name}" for name in sorted(named) if not is_module(name)]
    assert missing == []


def test_every_phony_target_has_a_rule() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text("utf-8"), re.M)
    assert set(phony.split()) == make_targets()


def test_every_way_to_add_something_fits_ten_lines() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    sections = re.split(r"^### ", page.partition("\n## How do I add …\n")[2], flags=re.M)[1:]
    found = {section.partition("\n")[0]: section.partition("\n")[2] for section in sections}
    assert found.keys() >= {"A policy", "A setting", "A route", "An attention backend", "A migration"}
    for title, body in found.items():
        lines = [line for line in re.split(r"^## ", body, flags=re.M)[0].splitlines() if line.strip()]
        assert len(lines) <= LINES_MAX, title
        assert "tests/" in body, f"{title} names no test"


@pytest.mark.parametrize(
    ("snippet", "missing"),
    [
        ("engine/step/scheduler.py", []),
        ("tests/mutants/ID.patch", []),
        ("engine/scheduler.py", ["engine/scheduler.py"]),
        ("python -m pytest tests/engine/test_gone.py -k x", ["tests/engine/test_gone.py"]),
        ("policies/NAME.txt", ["policies/NAME.txt"]),
    ],
)
def test_a_path_that_is_gone_would_be_seen(snippet: str, missing: list[str]) -> None:
    assert [path for path in paths_in(snippet) if not is_there(path)] == missing


@pytest.mark.parametrize("text", ["the order is the design's", "UX asked", "since part A", "HOUSE F8", "see §4"])
def test_a_foreign_citation_would_be_seen(text: str) -> None:
    assert FOREIGN.search(text)
    assert not FOREIGN.search("as RFC 9110 §7.8 says, and part of it")


@pytest.mark.parametrize(("name", "is_known"), [("engine.step.core", True), ("engine.core", False)])
def test_a_module_that_is_gone_would_be_seen(name: str, is_known: bool) -> None:
    assert is_module(name) is is_known
