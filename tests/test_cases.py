"""docs/cases.md has one line for every id that tests mention, and no line that no test mentions."""

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "cases.md").read_text("utf-8")
COVERED = re.findall(r"^- \*\*([A-Z]\d+[a-d]?)\*\* \S", PAGE, re.M)
EXEMPT = re.findall(r"^\| ([A-Z]\d+[a-d]?) \| \S", PAGE, re.M)


def marked() -> set[str]:
    """Every id in a `case` mark."""
    ids: set[str] = set()
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for arguments in re.findall(r"mark\.case\(([^)]*)\)", path.read_text("utf-8")):
            ids.update(re.findall(r"[\"']([A-Z]\d+[a-d]?)[\"']", arguments))
    return ids


def test_every_marked_case_has_one_line() -> None:
    assert [name for name, count in Counter(COVERED).items() if count > 1] == []
    assert sorted(marked() - set(COVERED)) == []


def test_every_line_has_a_test() -> None:
    assert sorted(set(COVERED) - marked()) == []


def test_what_does_not_apply_has_no_test() -> None:
    assert sorted(set(EXEMPT) & marked()) == []
    assert len(EXEMPT) * 10 <= len(COVERED), "at most a tenth"
